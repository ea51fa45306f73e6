"""Cases of `jaxonnx/ops/reduction.py`."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(2)
X = rng.permutation(np.linspace(0.2, 2, 24)).reshape(2, 3, 4).astype(np.float32)
SIGNED = X * np.where(np.arange(24).reshape(2, 3, 4) % 3, 1, -1).astype(np.float32)
INTEGERS = np.array([[3, -5, 1], [2, 2, -7]], np.int32)
TIES = np.array([[1, 3, 3, 0], [2, 0, 2, 0]], np.float32)

REDUCTIONS = (
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
)


def reductions(name):
    """Axes in every form, as an attribute and from `moved` on as an input."""
    x = X if name == "ReduceLogSum" else SIGNED
    moved = 13 if name == "ReduceSum" else 18
    yield Case(name, [x])
    yield Case(name, [x], {"keepdims": 0}, id="scalar")
    if name != "ReduceLogSumExp":  # the reference refuses rank 0
        yield Case(name, [np.float32(0.75)], id="rank0")
    yield Case(name, [x], {"axes": [0, 2]}, until=moved - 1, id="axes")
    yield Case(name, [x], {"axes": [1], "keepdims": 0}, until=moved - 1, id="axis")
    yield Case(name, [x], {"axes": [-1]}, since=11, until=moved - 1, id="last")
    yield Case(name, [x, np.array([0, 2])], since=moved, id="axes")
    yield Case(name, [x, np.array([-2])], {"keepdims": 0}, since=moved, id="axis")
    yield Case(name, [x, np.array([], np.int64)], since=moved, id="all")
    yield Case(name, [x], {"noop_with_empty_axes": 1}, since=moved, id="noop")
    if name != "ReduceMean":  # the mean of nothing is undefined
        nothing = np.zeros((2, 0), np.float32)
        yield Case(name, [nothing, np.array([1])], since=moved, grad=(), id="empty")


def integers(name, function):
    return Case(name, [INTEGERS], expected=lambda x: np.asarray(function(x), x.dtype).reshape(1, 1))


CASES = [
    Case("ReduceLogSumExp", [np.float32(0.75)], expected=lambda x: x, id="rank0"),
    *(case for name in REDUCTIONS for case in reductions(name)),
    integers("ReduceL1", lambda x: 20),
    integers("ReduceMax", np.max),
    integers("ReduceMin", np.min),
    integers("ReduceMean", lambda x: 0),
    integers("ReduceProd", np.prod),
    integers("ReduceSum", np.sum),
    integers("ReduceSumSquare", lambda x: 92),
    Case("ReduceL2", [INTEGERS], expected=lambda x: np.array([[9]], np.int32), id="truncates"),
    *(Case(name, [INTEGERS > 1, np.array([1])], since=20) for name in ("ReduceMax", "ReduceMin")),
    *(
        Case(name, [TIES], {"axis": 1, **attributes}, since=since, grad=(), id=label)
        for name in ("ArgMax", "ArgMin")
        for since, label, attributes in (
            (1, "axis", {}),
            (1, "squeezed", {"keepdims": 0}),
            (12, "last", {"select_last_index": 1}),
        )
    ),
    *(Case(name, [INTEGERS], id="integers") for name in ("ArgMax", "ArgMin")),
    *(
        Case(name, [SIGNED, np.array(axis)], {"exclusive": exclusive, "reverse": reverse})
        for name in ("CumSum", "CumProd")
        for axis, exclusive, reverse in ((0, 0, 0), (1, 1, 0), (-1, 0, 1), (2, 1, 1))
    ),
    *(Case(name, [INTEGERS, np.array(1)], id="integers") for name in ("CumSum", "CumProd")),
    Case("Einsum", [X[0], X[1]], {"equation": "ij,kj->ik"}, id="product"),
    Case("Einsum", [X[0, :, :3]], {"equation": "ii"}, id="trace"),
    Case("Einsum", [X[0, :, :3]], {"equation": "ij->ji"}, id="transpose"),
    Case("Einsum", [X, X[0].T], {"equation": "...ij, jk"}, id="ellipsis"),
    Case("Einsum", [X[0], X[0, 0]], {"equation": "bA,A"}, id="implicit"),
    Case("Einsum", [INTEGERS, INTEGERS], {"equation": "ij,ij->i"}, id="integers"),
    Case("TopK", [X], {"k": 2}, outputs=2, until=9),
    Case("TopK", [X], {"k": 2, "axis": 1}, outputs=2, until=9, id="axis"),
    Case("TopK", [X, np.array([2])], outputs=2, since=10),
    Case("TopK", [X, np.array([2])], {"axis": 0}, outputs=2, since=10, id="axis"),
    Case("TopK", [TIES, np.array([3])], outputs=2, since=10, grad=(), id="ties"),
    Case("TopK", [X, np.array([3])], {"largest": 0}, outputs=2, since=11, id="smallest"),
    Case("TopK", [INTEGERS, np.array([2])], {"largest": 0}, outputs=2, since=11, id="integers"),
]
