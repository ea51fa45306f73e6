"""Normalizations; Dropout in inference (in training it is random: test_normalization.py)."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype(np.float32)


def positive(*shape):
    return rng.uniform(0.5, 2, shape).astype(np.float32)


X = f(2, 4, 3, 5) + 3
C = [positive(4), f(4)]
STATS = [f(4), positive(4)]
EACH = [positive(4, 3, 5), f(4, 3, 5), f(4, 3, 5), positive(4, 3, 5)]


def infer(x, scale, b, mean, var):
    shape = (-1, 1, 1) if scale.ndim == 1 else scale.shape
    scale, b = scale.reshape(shape), b.reshape(shape)
    if mean.ndim == 1:
        mean, var = mean.reshape(shape), var.reshape(shape)
    return (x - mean) / np.sqrt(var + 1e-5) * scale + b


def train(axes, saved):
    def expected(x, scale, b, mean, var):
        m, v = x.mean(axes), x.var(axes)
        running = 0.9 * mean + 0.1 * m, 0.9 * var + 0.1 * v
        return infer(x, scale, b, m, v), *running, *((m, v) if saved else ())

    return expected


def lp(p, axis):
    return lambda x: x / np.linalg.norm(x, p, axis, keepdims=True)


def instance(x, scale, b):
    return infer(x, scale, b, x.mean((2, 3), keepdims=True), x.var((2, 3), keepdims=True))


def neighbours(x):
    """Sums over channels c - 1 to c + 2."""
    square = np.pad(x * x, ((0, 0), (1, 2), (0, 0), (0, 0)))
    total = sum(square[:, i : i + x.shape[1]] for i in range(4))
    return x / (2 + 0.5 / 4 * total) ** 0.6


def groups(x, scale, bias):
    y = x.reshape(2, 2, -1)
    y = (y - y.mean(2, keepdims=True)) / np.sqrt(y.var(2, keepdims=True) + 1e-5)
    each = (np.repeat(v, 4 // v.size).reshape(-1, 1, 1) for v in (scale, bias))
    return y.reshape(x.shape) * next(each) + next(each)


CASES = [
    Case("BatchNormalization", [X, *C, *STATS], {"is_test": 1}, until=6, expected=infer),
    Case(
        "BatchNormalization",
        [X, *C, *STATS],
        outputs=5,
        until=13,
        expected=train((0, 2, 3), True),
        rtol=1e-4,
        id="training",
    ),
    Case(
        "BatchNormalization",
        [X, *EACH],
        {"is_test": 1, "spatial": 0},
        until=6,
        expected=infer,
        id="each",
    ),
    Case(
        "BatchNormalization",
        [X, *EACH],
        {"spatial": 0},
        since=7,
        until=8,
        expected=infer,
        id="each",
    ),
    Case(
        "BatchNormalization",
        [X, *EACH],
        {"spatial": 0},
        outputs=5,
        until=8,
        expected=train(0, True),
        rtol=1e-3,
        atol=1e-4,
        id="each_training",
    ),
    Case("BatchNormalization", [X, *C, *STATS], since=7, expected=infer, id="inference"),
    Case(
        "BatchNormalization",
        [X, *C, *STATS],
        {"training_mode": 1},
        outputs=3,
        since=14,
        expected=train((0, 2, 3), False),
        rtol=1e-4,
        id="training",
    ),
    Case("InstanceNormalization", [X, *C], expected=instance, rtol=1e-4, atol=1e-5),
    Case(
        "InstanceNormalization",
        [f(2, 4, 6), *C],
        {"epsilon": 0.1},
        since=6,
        expected="ort",
        id="1d",
    ),
    Case(
        "GroupNormalization",
        [X, positive(2), f(2)],
        {"num_groups": 2},
        until=20,
        expected=groups,
        rtol=1e-4,
        atol=1e-5,
    ),
    Case(
        "GroupNormalization",
        [X, *C],
        {"num_groups": 2},
        since=21,
        expected=groups,
        rtol=1e-4,
        atol=1e-5,
    ),
    Case("LayerNormalization", [f(2, 3, 4), positive(4), f(4)], rtol=1e-4),
    # mean and inverse deviation are float32 even of float64: too coarse for finite differences
    Case("LayerNormalization", [f(2, 3, 4), positive(4)], outputs=3, rtol=1e-4, grad=(), id="all"),
    Case("LayerNormalization", [f(2, 3, 4), positive(3, 4)], {"axis": 1}, rtol=1e-4, id="axis"),
    Case("RMSNormalization", [f(2, 3, 4), positive(4)], rtol=1e-4),
    Case("RMSNormalization", [f(2, 3, 4), positive(3, 4)], {"axis": 1}, rtol=1e-4, id="axis"),
    Case("LRN", [X], {"size": 3}, expected="ort"),
    Case(
        "LRN",
        [X],
        {"size": 4, "alpha": 0.5, "beta": 0.6, "bias": 2.0},
        expected=neighbours,
        id="even",
    ),
    Case("LpNormalization", [f(2, 3, 4)], expected=lp(2, 2)),
    Case("LpNormalization", [f(2, 3, 4)], {"p": 1, "axis": 1}, expected=lp(1, 1), id="p1"),
    Case("MeanVarianceNormalization", [X], rtol=1e-4, atol=1e-5),
    Case("MeanVarianceNormalization", [X], {"axes": [1, -1]}, rtol=1e-4, atol=1e-5, id="axes"),
    Case("Dropout", [X], {"is_test": 1}, until=6, expected=lambda x: x),
    Case("Dropout", [X], since=7, expected=lambda x: x),
    Case(
        "Dropout",
        [X],
        outputs=2,
        since=10,
        expected=lambda x: (x, np.ones(x.shape, bool)),
        id="mask",
    ),
    Case(
        "Dropout",
        [X, np.float32(0.3), np.array(False)],
        since=12,
        expected=lambda x, r, t: x,
        grad=(0,),
        id="inputs",
    ),
]
