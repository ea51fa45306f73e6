"""What holds for any network holds for decoders: accumulation, remat, half precision, resuming."""

import numpy as np
import onnx
import optax
import pytest
from onnxruntime.transformers.float16 import convert_float_to_float16

import jaxonnx
from jaxonnx._run.scope import find_cuts
from tests.support.paths import DATA

FOLDER = DATA / "llm" / "qwen3-genai"
ROWS = np.random.default_rng(0).integers(3, 192, (8, 12))


@pytest.fixture(scope="module")
def model():
    return jaxonnx.load(FOLDER)


def train(model, **changes):
    settings = {"loss": "causal_lm", "optimizer": optax.adam(1e-2), "batch_size": 8, "epochs": 2}
    return jaxonnx.train(model, {"input_ids": ROWS}, progress=False, **settings | changes)


@pytest.fixture(scope="module")
def whole(model):
    return train(model)


def close(found, expected, rtol=1e-3):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=1e-4, err_msg=name)


@pytest.mark.deep
def test_accumulated_batches_are_one_large_one(model, whole):
    """SGD, whose update is the gradient; Adam divides small gradients by small ones."""
    large = train(model, optimizer=optax.sgd(0.3))
    parts = train(model, optimizer=optax.sgd(0.3), batch_size=4, accumulate=2)
    close(parts.model.params, large.model.params)
    means = np.mean(np.reshape(parts.history.losses, (2, 2)), axis=1)
    np.testing.assert_allclose(means, large.history.losses, rtol=1e-5)


@pytest.mark.deep
def test_layers_are_computed_again_in_the_backward_pass(model, whole):
    assert len(find_cuts(model.without_cache().graph)) >= 2  # layers
    again = train(model, remat=True)
    np.testing.assert_allclose(again.history.losses, whole.history.losses, rtol=1e-5)
    close(again.model.params, whole.model.params, rtol=1e-2)


@pytest.mark.deep
def test_half_precision_has_master_weights_in_float32(whole):
    """A file of float16 whose updates are too small for it learns what the float32 file learns."""
    proto = onnx.load(FOLDER / "model.onnx")
    half = jaxonnx.load(convert_float_to_float16(proto))
    assert {x.dtype for x in half.params.values()} == {np.dtype("float16")}
    small = {"optimizer": optax.adam(1e-4), "epochs": 4}
    found, expected = (train(net, **small) for net in (half, jaxonnx.load(FOLDER)))
    assert {x.dtype for x in found.model.params.values()} == {np.dtype("float16")}
    np.testing.assert_allclose(found.history.losses, expected.history.losses, rtol=2e-3)
    falls = [run.history.losses[0] - run.history.losses[-1] for run in (found, expected)]
    assert falls[0] == pytest.approx(falls[1], rel=0.1)


@pytest.mark.deep
def test_adapters_resume_and_leave_a_tied_embedding(model, tmp_path):
    """Bit for bit, with the perplexity of validation texts in each epoch."""
    settings = {"lora": jaxonnx.LoRA(rank=4, where="all-linear"), "metrics": "perplexity"}
    settings |= {"validation": {"input_ids": ROWS[:3]}, "batch_size": 4, "seed": 5}
    straight = train(model, epochs=3, **settings)
    for epochs in (1, 3):
        parts = train(model, epochs=epochs, checkpoint_dir=tmp_path, resume=True, **settings)
    for name, value in straight.lora.values.items():
        np.testing.assert_array_equal(parts.lora.values[name], value)
    for row in straight.history.epochs:
        measured = row["validation_perplexity"]
        assert measured == pytest.approx(np.exp(row["validation_loss"]), rel=1e-5)
    tensors = straight.model.tensors
    tied = [n for n, x in model.params.items() if x.shape in ((192, 32), (32, 192))]
    assert tied
    for name in tied:
        np.testing.assert_array_equal(tensors[name], model.params[name])
    layers = [n for n in model.params if n.startswith("model.layers") and model.params[n].ndim == 2]
    assert all(not np.array_equal(tensors[name], model.params[name]) for name in layers)
