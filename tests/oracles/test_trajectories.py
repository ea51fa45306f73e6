"""Fifty steps of `jaxonnx.train` against fifty of PyTorch and of onnxruntime-training.

tests/data/make_trajectories.py and make_ort_trajectories.py wrote what they are compared with.
"""

from inspect import signature

import numpy as np
import optax
import pytest

import jaxonnx
from tests.support.paths import DATA


def read(name):
    """A golden run: its arrays, its settings, and the final tensors by name."""
    golden = dict(np.load(DATA / f"{name}.npz"))
    settings = {k: v.item() for k, v in golden.items() if not v.ndim}
    end = {k.removeprefix("end:"): v for k, v in golden.items() if k.startswith("end:")}
    return golden, settings, end


def follow(file, golden, optimizer, end):
    """The run again: the examples in order, again and again."""
    x, y, size, scale = (golden[name] for name in ("x", "y", "batch", "scale"))
    x = x.astype(np.float32) / np.float32(scale) if scale > 1 else x
    starts = [step * size % len(x) for step in range(50)]
    return jaxonnx.train(
        DATA / f"{file}.onnx",
        [(x[i : i + size], y[i : i + size]) for i in starts],
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optimizer,
        trainable=[name for name in end if "running" not in name],
    )


def check(result, losses, end, rtol=1e-3):
    np.testing.assert_allclose(result.history.losses, losses, rtol=rtol)
    found = {**result.model.params, **result.model.state}
    for name, value in end.items():
        atol = rtol * np.abs(value).max()
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=atol, err_msg=name)


def momentum(lr, momentum, weight_decay):
    """torch.optim.SGD adds the decay to the gradient."""
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(lr, momentum))


def onnx_momentum(lr, momentum, weight_decay):
    return jaxonnx.optim.momentum(lr, momentum, norm_coefficient=weight_decay)


def adamw(lr, weight_decay, eps=1e-8):
    """torch.optim.AdamW decays by 0.01 unless told otherwise, optax.adamw by 0.0001."""
    return optax.adamw(lr, eps=eps, weight_decay=weight_decay)


def onnx_adam(lr, weight_decay):
    """onnxruntime's AdamW is that of Hugging Face: epsilon is 1e-6 and added to the root before the
    correction, and the new weights decay. That is the Adam of ONNX."""
    return jaxonnx.optim.adam(lr, T=1, norm_coefficient_post=lr * weight_decay)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("file", "name", "make"),
    [
        ("lenet_bn.legacy", "lenet_bn.momentum", onnx_momentum),
        ("digits.training", "digits.momentum", momentum),
        ("digits.training", "digits.adamw", adamw),
        ("transformer.legacy", "transformer.adamw", adamw),
    ],
)
def test_fifty_steps_follow_pytorch(file, name, make):
    golden, settings, end = read(name)
    options = {k: v for k, v in settings.items() if k in signature(make).parameters}
    start = jaxonnx.load(DATA / f"{file}.onnx").state
    for key, value in end.items():
        if (count := golden.get(f"count:{key}")) is not None:
            # PyTorch divides the variance of a batch by N - 1, ONNX by N
            rest = 0.9**50 * np.asarray(start[key])
            end[key] = rest + (value - rest) * (count - 1) / count
    check(follow(file, golden, make(**options), end), golden["losses"], end)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("file", "name"),
    [("transformer.legacy", "transformer"), ("digits.training", "digits")],
)
def test_fifty_steps_follow_onnxruntime_training(file, name):
    golden, settings, end = read(f"{name}.ort")
    examples, _, _ = read(f"{name}.adamw")
    optimizer = onnx_adam(settings["lr"], settings["weight_decay"])
    check(follow(file, examples, optimizer, end), golden["losses"], end)
