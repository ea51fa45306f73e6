"""Cases of `jaxonnx/ops/shape.py`."""

import numpy as np

from tests.ops.case_table import Case

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
ONES = X[:, None, :, :1]
EMPTY = np.zeros((0, 3, 4), np.float32)
IMAGE = np.arange(2 * 8 * 2 * 2, dtype=np.float32).reshape(2, 8, 2, 2) / 9
PIXELS = np.arange(2 * 2 * 4 * 6, dtype=np.float32).reshape(2, 2, 4, 6) / 9


def ints(*values):
    return np.array(values, np.int64)


CASES = [
    Case("Identity", [X]),
    Case("Identity", [ints(1, 2)], id="integers"),
    Case("Shape", [X], expected=lambda x: ints(2, 3, 4), grad=()),
    Case("Shape", [X], {"start": -2}, since=15, grad=(), id="start"),
    Case("Shape", [X], {"start": 1, "end": -1}, since=15, grad=(), id="window"),
    Case("Shape", [X], {"start": -9, "end": 9}, since=15, grad=(), id="clamped"),
    Case("Shape", [X], {"start": 2, "end": 1}, since=15, grad=(), id="empty"),
    Case("Size", [X], expected=lambda x: np.array(24), grad=()),
    Case("Reshape", [X], {"shape": [4, -1]}, until=4, expected=lambda x: x.reshape(4, 6)),
    Case("Reshape", [X, ints(4, -1)], since=5),
    Case("Reshape", [X, ints(0, -1)], since=5, id="copied"),
    Case("Reshape", [X[:1, :1, :1], ints()], since=5, id="scalar"),
    Case(
        "Reshape", [EMPTY, ints(0, -1)], since=5, expected=lambda x, s: x.reshape(0, 12), id="none"
    ),
    Case("Reshape", [EMPTY, ints(3, 0)], {"allowzero": 1}, since=14, id="allowzero"),
    Case("Flatten", [X], expected=lambda x: x.reshape(2, 12)),
    Case("Flatten", [X], {"axis": 0}, expected=lambda x: x.reshape(1, 24), id="first"),
    Case("Flatten", [X], {"axis": 3}, expected=lambda x: x.reshape(24, 1), id="all"),
    Case("Flatten", [X], {"axis": -1}, since=11, id="negative"),
    Case("Flatten", [EMPTY], expected=lambda x: x.reshape(0, 12), id="empty"),
    Case("Squeeze", [ONES], {"axes": [1]}, until=12, expected=lambda x: x[:, 0]),
    Case("Squeeze", [ONES], until=12, expected=lambda x: x[:, 0, :, 0], id="all"),
    Case("Squeeze", [ONES], {"axes": [-1]}, since=11, until=12, id="negative"),
    Case("Squeeze", [ONES, ints(-1, 1)], since=13),
    Case("Squeeze", [ONES], since=13, id="all"),
    Case("Unsqueeze", [X], {"axes": [0, 4]}, until=12, expected=lambda x: x[None, ..., None]),
    Case("Unsqueeze", [X], {"axes": [-2]}, since=11, until=12, id="negative"),
    Case("Unsqueeze", [X, ints(-1, 1)], since=13),
    Case("Transpose", [X], expected=np.transpose),
    Case("Transpose", [X], {"perm": [1, 0, 2]}, expected=lambda x: x.transpose(1, 0, 2), id="perm"),
    Case("Expand", [X[:, :1], ints(3, 1)], since=8),
    Case("Expand", [X[0, 0], ints(2, 2, 1)], since=8, id="rank"),
    Case(
        "Tile",
        [X, np.float32(2), np.float32(1)],
        until=5,
        expected=lambda x, tiles, axis: np.tile(x, (1, 2, 1)),
        grad=(0,),
    ),
    Case("Tile", [X, ints(2, 1, 3)], since=6),
    Case("Tile", [X, ints(2, 0, 1)], since=6, id="none"),
    Case(
        "DepthToSpace", [IMAGE], {"blocksize": 2}, expected=lambda x: _blocks(x, (0, 3, 4, 1, 5, 2))
    ),
    Case("DepthToSpace", [IMAGE], {"blocksize": 2, "mode": "CRD"}, since=11, id="CRD"),
    Case(
        "SpaceToDepth", [PIXELS], {"blocksize": 2}, expected=lambda x: _depth(x, (0, 3, 5, 1, 2, 4))
    ),
    Case(
        "SpaceToDepth",
        [PIXELS],
        {"blocksize": 2, "mode": "CRD"},
        since=28,
        expected=lambda x: _depth(x, (0, 1, 3, 5, 2, 4)),
        id="CRD",
    ),
]


def _blocks(x, order):
    return x.reshape(2, 2, 2, 2, 2, 2).transpose(order).reshape(2, 2, 4, 4)


def _depth(x, order):
    return x.reshape(2, 2, 2, 2, 3, 2).transpose(order).reshape(2, 8, 2, 3)
