"""Cases of `jaxonnx/ops/selection.py`."""

import numpy as np

from tests.ops.case_table import Case
from tests.ops.cases.shape import X, ints

MATRIX = np.array([[1, 2, -3, 0.5], [4, -0.5, 2, 3], [0.25, 1.5, -1, 2]], np.float32)
PLACES = np.array([[1, 0, 2, 0], [0, 2, 1, -1]])
UPDATES = np.array([[0.3, -4, 6, 1.1], [-2, 7, 0.1, 5]], np.float32)
SHARED = np.array([[0, 0, 2, 1], [0, 0, -1, 1]])
ROWS = np.array([[0], [2]])
CELLS = np.array([[0, 1], [-1, 2], [0, 1]])
CACHE = np.arange(24, dtype=np.float32).reshape(2, 6, 2) / 5
NEW = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], np.float32)
REDUCTIONS = {"add": 16, "mul": 16, "max": 18, "min": 18}


def put(axis):
    def expected(x, indices, updates):
        y = x.copy()
        np.put_along_axis(y, indices, updates, axis)
        return y

    return expected


CASES = [
    Case("Gather", [X, ints(1, 0)], expected=lambda x, i: x[i]),
    Case(
        "Gather",
        [X, np.array([[0, 2], [1, 1]])],
        {"axis": 1},
        expected=lambda x, i: x[:, i],
        id="grid",
    ),
    Case("Gather", [X, np.array(2)], {"axis": 1}, expected=lambda x, i: x[:, 2], id="scalar"),
    Case("Gather", [X, np.array(-1)], {"axis": -1}, since=11, id="last"),
    Case("Gather", [X, ints(-3, -1)], {"axis": 2}, since=11, id="strided"),
    Case("GatherElements", [MATRIX, PLACES], since=11),
    Case(
        "GatherElements",
        [MATRIX, SHARED[:, :2] - 1],
        {"axis": 1},
        since=11,
        expected=lambda x, i: np.take_along_axis(x[:2], i, 1),
        id="smaller",
    ),
    Case("GatherND", [X, np.array([[0, 2], [1, -1]])], since=11),
    Case("GatherND", [X, np.array([[[0, 2, 1]], [[1, 0, 3]]])], since=11, id="cells"),
    Case("GatherND", [X, np.array([[2], [0]])], {"batch_dims": 1}, since=12, id="batch"),
    Case("Scatter", [MATRIX, PLACES, UPDATES], since=9, until=11, expected=put(0)),
    Case("ScatterElements", [MATRIX, PLACES, UPDATES], since=11),
    Case(
        "ScatterElements",
        [MATRIX[:2], PLACES[:, 1:3], UPDATES[:, 1:3]],
        {"axis": 1},
        since=11,
        id="row",
    ),
    *(
        Case("ScatterElements", [MATRIX, SHARED, UPDATES], {"reduction": r}, since=since, id=r)
        for r, since in REDUCTIONS.items()
    ),
    Case("ScatterND", [MATRIX, ROWS, UPDATES], since=11),
    Case("ScatterND", [MATRIX, CELLS[:2], UPDATES[0, :2]], since=11, id="cells"),
    *(
        Case("ScatterND", [MATRIX, CELLS, UPDATES[0, :3]], {"reduction": r}, since=since, id=r)
        for r, since in REDUCTIONS.items()
    ),
    Case("TensorScatter", [CACHE, NEW], since=24),
    Case("TensorScatter", [CACHE, NEW, ints(4, 1)], since=24, id="linear"),
    Case("TensorScatter", [CACHE, NEW, ints(5, 1)], {"mode": "circular"}, since=24, id="circular"),
    Case(
        "Compress",
        [MATRIX, np.array([False, True, True])],
        {"axis": 0},
        since=9,
        expected=lambda x, c: x[1:],
    ),
    Case(
        "Compress",
        [MATRIX, np.array([0, 1, 0, 0, 1], bool)],
        since=9,
        expected=lambda x, c: x.ravel()[[1, 4]],
    ),
    Case(
        "Compress", [MATRIX, np.array([True, False, True])], {"axis": -1}, since=11, id="negative"
    ),
    Case("NonZero", [MATRIX > 1], since=9),
    Case(
        "NonZero",
        [np.array(2.0)],
        since=9,
        expected=lambda x: np.zeros((0, 1), np.int64),
        grad=(),
        id="scalar",
    ),
    Case("Unique", [ints(2, 1, 1, 3, 4, 3)], outputs=4, since=11),
    Case("Unique", [ints(2, 1, 1, 3, 4, 3)], {"sorted": 0}, 4, since=11, id="unsorted"),
    Case("Unique", [np.array([[1, 0], [1, 0], [2, 3]])], {"axis": 0}, 4, since=11, id="axis"),
    Case(
        "Unique",
        [np.array([["b", "b", "a"], ["x", "x", "y"]], object)],
        {"axis": 1, "sorted": 0},
        4,
        since=11,
        expected=lambda x: (x[:, [0, 2]], ints(0, 2), ints(0, 0, 1), ints(2, 1)),
        jit=False,
        vmap=False,
        id="strings",
    ),
]
