"""Checkpoints that onnxruntime-training wrote: parameters, moments, and damaged files."""

import errno
import os
import random
import warnings

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx._io.checkpoints import reason
from jaxonnx.training import read_training_checkpoint, restore_checkpoint
from tests.support.paths import DATA

ORT = DATA / "ort"
ADAM = jaxonnx.optim.adam(0.01, T=1)
LOSS = "softmax_cross_entropy_with_integer_labels"
TRAINED = ["fc1.weight", "fc2.weight", "fc2.bias"]


@pytest.fixture(scope="module")
def steps():
    with np.load(ORT / "steps.npz") as file:
        return dict(file)


def test_parameters_and_properties(steps):
    for name in ("plain", "moments"):
        found = read_training_checkpoint(ORT / f"{name}.ckpt")
        assert found.params.keys() == {*TRAINED}
        assert found.properties == {"epoch": 3, "best": 0.5, "note": "three"}
        for tensor, value in {**found.params, **found.frozen}.items():
            np.testing.assert_array_equal(value, steps[f"at:{tensor}"])
        model = jaxonnx.load(ORT / "net.onnx", weights=ORT / f"{name}.ckpt")
        np.testing.assert_array_equal(model.params["fc1.bias"], steps["at:fc1.bias"])
        np.testing.assert_array_equal(model.params["fc2.weight"], steps["at:fc2.weight"])
    assert found.moments.keys() == found.params.keys()
    assert (found.count, found.learning_rate) == (3, pytest.approx(1e-3))


def test_the_evaluation_model_gets_its_weights(steps):
    path = ORT / "eval_model.onnx"
    model = jaxonnx.load(path, weights=ORT / "plain.ckpt")
    assert [value.name for value in model.inputs] == ["x", "labels"]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    weights = {n.removeprefix("at:"): x for n, x in steps.items() if n.startswith("at:")}
    (expected,) = session.run(None, {"x": steps["x"], "labels": steps["y"], **weights})
    np.testing.assert_allclose(model(steps["x"], steps["y"]), expected, rtol=1e-5)


def test_training_goes_on_as_onnxruntime_does(steps):
    model = jaxonnx.load(ORT / "net.onnx", weights=ORT / "moments.ckpt", trainable=TRAINED)
    step = jaxonnx.training.step(model, LOSS, jaxonnx.optim.adam(0.01, T=1))
    state, update = restore_checkpoint(step, ORT / "moments.ckpt"), jax.jit(step.update)
    losses = []
    for _ in range(3):
        state, (loss, finite) = update(state, (steps["x"], steps["y"]))
        assert finite
        losses.append(float(loss))
    np.testing.assert_allclose(losses, steps["losses"], rtol=1e-6)
    for name, value in step.view(state).items():
        np.testing.assert_allclose(value, steps[f"end:{name}"], rtol=1e-5, atol=1e-7)
    # without the moments the first steps are others
    fresh = step.init()
    for _ in range(3):
        fresh, _ = update(fresh, (steps["x"], steps["y"]))
    assert np.abs(step.view(fresh)["fc2.weight"] - steps["end:fc2.weight"]).max() > 1e-3


def test_identity_trains_shared_tensors_as_onnxruntime_does(steps):
    """Ten steps of AdamW on a bias that the file reads twice more by Identity."""
    with np.load(ORT / "shared.npz") as file:
        losses, ends = file["losses"], {n: file[f"end:{n}"] for n in TRAINED}
    apart = jaxonnx.load(ORT / "shared.onnx", trainable=[*TRAINED, "shift", "more"])
    tied = jaxonnx.load(ORT / "shared.onnx", trainable=TRAINED, tied="identity")
    differences = []
    for model in (tied, apart):
        step = jaxonnx.training.step(model, LOSS, ADAM)
        update, state = jax.jit(step.update), step.init()
        results = []
        for _ in losses:
            state, (loss, _) = update(state, (steps["x"], steps["y"]))
            results.append(loss)
        if model is tied:
            np.testing.assert_allclose(results, losses, atol=5e-7)
        params = step.view(state)
        differences.append(max(np.abs(params[n] - end).max() for n, end in ends.items()))
    assert differences[0] < 5e-7
    assert differences[1] > 1e-5


def test_each_identity_has_the_value_of_a_checkpoint(steps):
    """As in a session whose initializer has the checkpoint's value."""
    proto = onnx.load(ORT / "shared.onnx")
    model = jaxonnx.load(proto, weights=ORT / "plain.ckpt")
    assert not {"shift", "more"} & model.params.keys()  # one tensor, as in the checkpoint
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(steps[f"at:{tensor.name}"], tensor.name))
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    (expected,) = session.run(None, {"x": steps["x"]})
    np.testing.assert_allclose(model(steps["x"]), expected, rtol=1e-5)
    assert np.abs(steps["at:fc2.bias"]).max() > 1e-3
    apart = jaxonnx.load(ORT / "shared.onnx").with_trainable([*TRAINED, "shift"])
    step = jaxonnx.training.step(apart, LOSS, ADAM)
    with pytest.raises(jaxonnx.TrainingError, match=r"'fc2.bias' and 'shift'.* tied='identity'"):
        restore_checkpoint(step, ORT / "moments.ckpt")
    tied = jaxonnx.load(ORT / "shared.onnx", weights=ORT / "moments.ckpt", tied="identity")
    step = jaxonnx.training.step(tied.with_trainable(TRAINED), LOSS, ADAM)
    state = restore_checkpoint(step, ORT / "moments.ckpt")
    np.testing.assert_array_equal(step.view(state)["fc2.bias"], steps["at:fc2.bias"])


@pytest.mark.parametrize("form", ["dict", "npz", "safetensors"])
def test_weights_without_a_copy_are_named(tmp_path, steps, form):
    proto = onnx.load(ORT / "shared.onnx")
    weights = {name: steps[f"at:{name}"] for name in TRAINED}
    path = tmp_path / f"weights.{form}"
    if form == "npz":
        np.savez(path, **weights)
    elif form == "safetensors":
        import safetensors.numpy as safetensors

        safetensors.save_file(weights, path)
    with pytest.warns(UserWarning, match=r"missing and keep .*: 'shift' \(of 'fc2.bias'\)"):
        model = jaxonnx.load(proto, weights=weights if form == "dict" else path)
    assert not np.asarray(model.params["shift"]).any()
    whole = weights | {"shift": weights["fc2.bias"], "more": weights["fc2.bias"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxonnx.load(proto, weights=whole)
        jaxonnx.load(proto, weights=jaxonnx.load(proto).params)
        jaxonnx.load(proto, weights={"fc2.bias": np.zeros(3, np.float32)})  # as before


def test_what_cannot_be_restored():
    model = jaxonnx.load(ORT / "net.onnx", trainable=TRAINED)
    step = jaxonnx.training.step(model, LOSS, jaxonnx.optim.adam(0.01, T=1))
    with pytest.raises(jaxonnx.TrainingError, match="include_optimizer_state"):
        restore_checkpoint(step, ORT / "plain.ckpt")
    other = jaxonnx.training.step(model, LOSS, optax.adam(0.01))
    with pytest.raises(jaxonnx.TrainingError, match=r"must be one jaxonnx.optim.adam"):
        restore_checkpoint(other, ORT / "moments.ckpt")
    whole = jaxonnx.training.step(jaxonnx.load(ORT / "net.onnx"), LOSS, jaxonnx.optim.adam(0.1))
    with pytest.raises(jaxonnx.TrainingError, match=r"for 'fc1.bias'"):
        restore_checkpoint(whole, ORT / "moments.ckpt")


@pytest.mark.parametrize(
    ("name", "optimizer"), [("AdamW", jaxonnx.optim.adam(0.01, T=1)), ("SGD", optax.sgd(0.01))]
)
def test_gradients_are_summed_there_and_averaged_here(name, optimizer, steps):
    with np.load(ORT / "summed.npz") as file:
        wanted = {n: file[f"{name}:{n}"] for n in TRAINED}
    ends = []
    for rule in (optax.chain(optax.scale(2), optimizer), optimizer):
        step = jaxonnx.training.step(ORT / "net.onnx", LOSS, rule, trainable=TRAINED, accumulate=2)
        update, state = step.jit().update, step.init()
        for half in [slice(0, 4), slice(4, 8)] * 6:
            state, _ = update(state, (steps["x"][half], steps["y"][half]))
        ends.append(step.view(state))
    summed, mean = ends
    for n, value in wanted.items():
        np.testing.assert_allclose(summed[n], value, atol=3e-7)
    assert max(np.abs(mean[n] - value).max() for n, value in wanted.items()) > 1e-4


def test_the_linear_schedule_has_its_counts_swapped():
    with np.load(ORT / "summed.npz") as file:
        rates = file["rates"]  # LinearLRScheduler(optimizer, 10, 100, 1e-3)
    parts = [optax.linear_schedule(0, 1e-3, 100), optax.constant_schedule(0)]
    schedule = optax.join_schedules(parts, [100])
    np.testing.assert_allclose([schedule(i) for i in range(110)], rates, atol=1e-9)


def test_what_another_program_would_do_is_named(steps):
    batch = steps["x"], steps["y"]
    with pytest.raises(jaxonnx.ModelError, match=r"a nominal one, .*generate_artifacts wrote"):
        jaxonnx.load(ORT / "net.onnx", weights=ORT / "nominal.ckpt")
    with pytest.raises(jaxonnx.TrainingError, match=r"goes to jaxonnx\.load\(path, weights="):
        jaxonnx.train(
            ORT / "net.onnx", batch, loss=LOSS, optimizer=ADAM, resume=ORT / "moments.ckpt"
        )
    with pytest.warns(UserWarning, match=r"eval_model\.onnx .* weights='checkpoint'.*'onnx::loss"):
        jaxonnx.load(ORT / "eval_model.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = jaxonnx.load(ORT / "eval_model.onnx", weights=ORT / "plain.ckpt")
    network = model.with_outputs(["y"])  # only artifacts left
    assert [value.name for value in network.inputs] == ["x"]
    whole = jaxonnx.load(ORT / "net.onnx", weights=ORT / "plain.ckpt")
    np.testing.assert_array_equal(network(steps["x"]), whole(steps["x"]))
    step = jaxonnx.training.step(ORT / "net.onnx", LOSS, optax.sgd(0.01), trainable=TRAINED)
    with pytest.raises(jaxonnx.TrainingError, match=r"1 moments .* SGD, which continues from its"):
        restore_checkpoint(step, ORT / "sgd.ckpt")
    saved = read_training_checkpoint(ORT / "sgd.ckpt")
    assert not any(x.any() for moments in saved.moments.values() for x in moments)
    assert saved.learning_rate == pytest.approx(1e-3)  # and 0.01 was set: it is never that


def test_damaged_files_end_in_an_error(tmp_path):
    data, path, draw = (ORT / "moments.ckpt").read_bytes(), tmp_path / "c", random.Random(0)
    refused = 0
    for number in range(3000):
        changed = bytearray(data)
        if number % 3 == 0:
            del changed[draw.randrange(8, len(data)) :]
        for _ in range(draw.randrange(1, 5)):
            at = draw.randrange(8, len(changed)) if len(changed) > 8 else 0
            if at:
                changed[at] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        path.write_bytes(changed)
        try:  # all else than this error fails the test
            found = read_training_checkpoint(path)
        except jaxonnx.ModelError:
            refused += 1
        else:  # of what is in the file, and no more
            assert sum(x.nbytes for x in found.params.values()) <= 3 * len(data)
    assert refused > 1000
    path.write_bytes(b"\x08\0\0\0ODTC")
    with pytest.raises(jaxonnx.ModelError, match="is damaged"):
        jaxonnx.load(ORT / "net.onnx", weights=path)
    with pytest.raises(jaxonnx.ModelError, match="does not say that it is one"):
        read_training_checkpoint(ORT / "net.onnx")


def test_the_reason_of_the_system_is_said():
    inner = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    outer = ValueError("x" * 300)
    outer.__cause__ = inner
    assert reason(outer) == reason(inner) == "No space left on device"
    text = f'{"y" * 300} [OS error 28: ENOSPC No space left on device] "folder"'
    assert reason(RuntimeError(text)) == "No space left on device"
    assert reason(RuntimeError("first\nsecond")) == "first"
