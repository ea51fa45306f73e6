"""Checkpoints opened as models, and the state of a loop of one's own in Orbax."""

import jax
import numpy as np
import onnx
import optax
import pytest

import jaxonnx
from jaxonnx import sparse
from tests.support.tiny_networks import LABELS, examples, mlp, train


def equal(model, other):
    """Bit for bit."""
    tensors, others = ({**m.params, **m.state} for m in (model, other))
    assert tensors.keys() == others.keys()
    for name, x in tensors.items():
        assert np.asarray(x).tobytes() == np.asarray(others[name]).tobytes(), name


@pytest.mark.deep
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": optax.adam(1e-2)},
        {"ema": 0.9, "trainable": ["w2", "b2"]},
        {"ema": 0.9, "sparsity": {"pattern": "2:4", "dense": 1, "dynamic": 1}, "epochs": 3},
    ],
    ids=["plain", "average", "sparse average"],
)
def test_a_folder_of_checkpoints_is_the_model_of_the_newest(tmp_path, settings):
    result = train(checkpoint_dir=tmp_path, **settings)
    model = jaxonnx.load(tmp_path, trainable=[*result.model.params])
    equal(model, result.model)
    if "sparsity" in settings:
        assert {layer.name for layer in model.sparsity.layers} == {"w1", "w2"}
        sparse.verify(model)
    else:
        assert model.sparsity is None


@pytest.mark.deep
def test_the_best_checkpoint_and_the_newest(tmp_path):
    settings = {"optimizer": optax.sgd(-0.1), "checkpoint_dir": tmp_path}  # it gets ever worse
    first = train(optimizer=optax.sgd(-0.1))
    last = train(epochs=3, **settings)
    equal(jaxonnx.load(tmp_path), last.model)
    equal(jaxonnx.load(str(tmp_path), checkpoint="newest"), last.model)
    equal(jaxonnx.load(tmp_path, checkpoint="best"), first.model)
    (file,) = (tmp_path / "15" / "about").glob("metadata")
    file.write_text("{")
    with pytest.warns(UserWarning, match="the checkpoint of step 15 .* cannot be read"):
        assert jaxonnx.load(tmp_path).params.keys() == last.model.params.keys()
    with pytest.raises(jaxonnx.InputError, match="checkpoint must be 'newest', 'best' or None"):
        jaxonnx.load(tmp_path, checkpoint="worst")
    with pytest.raises(jaxonnx.InputError, match="goes with a folder of checkpoints"):
        jaxonnx.load(mlp(), checkpoint="best")


def test_folders_without_a_model(tmp_path):
    with pytest.raises(jaxonnx.ModelError, match="a folder without checkpoints; give the checkp"):
        jaxonnx.load(tmp_path)
    train(checkpoint_dir=tmp_path / "odd", checkpoint_every=1, nan="rollback", epochs=1)
    for path in (tmp_path / "odd").glob("*/metrics/metrics"):
        path.write_text('{"score": -Infinity}')
    with pytest.raises(jaxonnx.ModelError, match=r"no checkpoint .* candidate for the best"):
        jaxonnx.load(tmp_path / "odd", checkpoint="best")


@pytest.mark.deep
def test_checkpoints_of_adapters(tmp_path):
    result = train(checkpoint_dir=tmp_path, lora=jaxonnx.LoRA(rank=2))
    with pytest.raises(jaxonnx.ModelError, match=r"jaxonnx\.Adapters\.load\(") as caught:
        jaxonnx.load(tmp_path)
    remedy = str(caught.value).partition("adapters: ")[2]
    equal(eval(remedy), result.model)


def test_checkpoints_of_a_file_that_trains_itself(tmp_path):
    proto = jaxonnx.add_training(mlp(), loss=LABELS, optimizer=jaxonnx.optim.adam(1e-2))
    result = train(proto, loss=None, optimizer=None, checkpoint_dir=tmp_path)
    model = jaxonnx.load(tmp_path)
    equal(model, result.model)
    for name, value in result.model.training.state.items():
        np.testing.assert_array_equal(model.training.state[name], value)
    onnx.checker.check_model(model.to_onnx())


@pytest.mark.deep
def test_a_state_is_kept_by_orbax_in_three_lines(tmp_path):
    from orbax import checkpoint

    x, y = examples()
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)]
    step = jaxonnx.training.step(mlp(dropout=True), LABELS, optax.adam(1e-2), ema=0.9, nan="skip")
    update = jax.jit(step.update)
    state = step.init()
    for batch in batches[:2]:
        state, _ = update(state, batch)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", step.to_file(state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", step.to_file(step.init()))
    restored = step.from_file(restored)
    for batch in batches[2:]:
        state, _ = update(state, batch)
        restored, _ = update(restored, batch)
    jax.tree.map(np.testing.assert_array_equal, state, restored)
