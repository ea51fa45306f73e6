"""Pooling over windows and over the whole image, MaxUnpool."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(0)


def distinct(*shape):
    """No two elements are equal or close, and none is near 0, so that a
    maximum is differentiable."""
    count = int(np.prod(shape))
    return (rng.permutation(count).reshape(shape) / 4 - count / 8 + 0.1).astype(np.float32)


X, LINE = distinct(2, 3, 5, 6), distinct(2, 2, 7)
K = {"kernel_shape": [3, 2]}
STRIDED = K | {"strides": [2, 3], "pads": [1, 0, 1, 1]}
AUTO = [K | {"auto_pad": a, "strides": [2, 2]} for a in ("SAME_UPPER", "SAME_LOWER", "VALID")]


def indices(x):
    """Where 2x2 windows with stride 2 could have had their maximum."""
    n, c, h, w = x.shape
    return (np.arange(n * c * h * w).reshape(n, c, h, w) * 4 + 1).astype(np.int64)


def unpool(x, i):
    y = np.zeros(4 * x.size, np.float32)
    y[i.ravel()] = x.ravel()
    return y.reshape(*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])


def strided_mean(x):
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 1)), constant_values=np.nan)
    views = np.lib.stride_tricks.sliding_window_view(x, (3, 2), (2, 3))[:, :, ::2, ::3]
    return np.nanmean(views, (-1, -2))


def norm(p):
    return lambda x: (np.abs(x) ** p).sum((2, 3), keepdims=True) ** (1 / p)


def windows_norm(p, pads=0):
    def expected(x):
        x = np.pad(np.abs(x) ** p, ((0, 0), (0, 0), (pads, pads), (pads, pads)))
        views = np.lib.stride_tricks.sliding_window_view(x, (3, 2), (2, 3))
        return views.sum((-1, -2)) ** (1 / p)

    return expected


CASES = [
    *(
        case
        for name, since in (("AveragePool", 7), ("MaxPool", 1), ("LpPool", 2))
        for case in (
            Case(name, [X], K, since=since, expected="ort"),
            Case(name, [X], STRIDED, since=since, id="strided", expected="ort"),
            *(Case(name, [X], a, since=since, id=a["auto_pad"], expected="ort") for a in AUTO),
            Case(name, [LINE], {"kernel_shape": [3]}, since=since, id="1d", expected="ort"),
        )
    ),
    # windows larger than the axis: part of one (less than a stride is missing), none
    *(
        Case(
            name,
            [distinct(1, 1, 2, 3)],
            {"kernel_shape": [4, 5], "strides": strides, "pads": [1, 0, 0, 0]},
            since=since,
            expected="ort",
            id=f"large_{strides[1]}",
            vmap=False,
        )
        for name, since in (("AveragePool", 7), ("MaxPool", 1), ("LpPool", 2))
        for strides in ([2, 3], [3, 2])
    ),
    Case("AveragePool", [X], STRIDED, until=6, expected=strided_mean),
    Case("AveragePool", [X], K | {"auto_pad": "VALID"}, until=6, id="VALID"),
    Case(
        "AveragePool", [X], STRIDED | {"count_include_pad": 1}, since=7, expected="ort", id="count"
    ),
    *(
        Case(
            name,
            [X],
            {"kernel_shape": [2, 3], "strides": [3, 2], "pads": [1, 0, 0, 1], "ceil_mode": 1},
            since=since,
            expected="ort",
            id="ceil",
        )
        for name, since in (("AveragePool", 10), ("MaxPool", 10), ("LpPool", 18))
    ),
    *(
        Case(name, [X], K | {"dilations": [2, 3]}, since=since, expected="ort", id="dilated")
        for name, since in (("AveragePool", 19), ("MaxPool", 10), ("LpPool", 18))
    ),
    Case("MaxPool", [X], STRIDED, outputs=2, since=8, expected="ort", id="indices"),
    Case(
        "MaxPool",
        [X],
        STRIDED | {"storage_order": 1, "dilations": [2, 1]},
        outputs=2,
        since=10,
        expected="ort",
        id="column_major",
    ),
    Case(
        "MaxPool",
        [distinct(1, 2, 3, 4, 3)],
        {"kernel_shape": [2, 2, 2]},
        outputs=2,
        since=8,
        expected="ort",
        id="3d",
    ),
    Case(
        "MaxPool",
        [rng.integers(-9, 9, (1, 2, 4, 4)).astype(np.int8)],
        K,
        since=12,
        expected="ort",
        id="int8",
    ),
    Case("LpPool", [X], K | {"p": 3.0}, until=1, expected=windows_norm(3), id="float_p"),
    Case("LpPool", [X], K | {"p": 1}, since=2, expected=windows_norm(1), id="p1"),
    Case(
        "LpPool", [X], K | {"p": 3, "pads": [1] * 4}, since=2, expected=windows_norm(3, 1), id="p3"
    ),
    Case("GlobalAveragePool", [X], expected="ort"),
    Case("GlobalMaxPool", [X], expected="ort"),
    Case("GlobalLpPool", [X], {"p": 3.0}, until=1, expected=norm(3)),
    Case("GlobalLpPool", [X], since=2, expected=norm(2)),
    Case("GlobalLpPool", [X], {"p": 1}, since=2, expected=norm(1), id="p1"),
    Case(
        "MaxUnpool",
        [distinct(2, 1, 2, 3), indices(np.zeros((2, 1, 2, 3)))],
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        expected=unpool,
    ),
    Case(
        "MaxUnpool",
        [distinct(1, 1, 2, 2), np.array([[[[6, 8], [16, 18]]]]), np.array([1, 1, 5, 5])],
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        expected="ort",
        id="output_shape",
    ),
]
