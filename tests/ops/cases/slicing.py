"""Cases of `jaxonnx/ops/selection.py`."""

import numpy as np

from tests.ops.case_table import Case
from tests.ops.cases.shape import EMPTY, X, ints

FIRST, LAST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
SQUARE = np.arange(20, dtype=np.float32).reshape(4, 5) / 7
VALUE = np.array(0.5, np.float32)


def split(sizes, axis):
    return lambda x, *_: tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


def pads(label, mode, widths, crop=(slice(None),) * 3, **options):
    """A Pad of `X[crop]` by `widths`, in the form of every opset."""
    flat = [low for low, _ in widths] + [high for _, high in widths]
    x = X[crop]

    def expected(x, *_):
        return np.pad(x, widths, mode)

    for since, attribute in (1, "paddings"), (2, "pads"):
        attributes = {attribute: flat, "mode": mode}
        until = 1 if since == 1 else 10
        yield Case("Pad", [x], attributes, since=since, until=until, expected=expected, id=label)
    yield Case("Pad", [x, ints(*flat)], {"mode": mode}, since=11, expected=expected, id=label)


CASES = [
    Case("Concat", [X, X[:, :1]], until=3, expected=lambda *xs: np.concatenate(xs, 1)),
    Case("Concat", [X, X[:1]], {"axis": 0}, expected=lambda *xs: np.concatenate(xs, 0), id="first"),
    Case("Concat", [X, X[..., :1], X], {"axis": -1}, since=11, id="last"),
    Case("Concat", [EMPTY, X], {"axis": 0}, since=4, id="empty"),
    Case("Split", [X], {"axis": 1}, 3, until=1, expected=split([1, 1, 1], 1)),
    Case(
        "Split",
        [X],
        {"axis": 2, "split": [1, 3]},
        2,
        until=12,
        expected=split([1, 3], 2),
        id="sizes",
    ),
    Case("Split", [X], outputs=2, since=2, until=12, expected=split([1, 1], 0), id="equal"),
    Case("Split", [X], {"axis": -1}, 2, since=11, until=17, expected=split([2, 2], 2), id="last"),
    Case("Split", [X, ints(1, 3)], {"axis": 2}, 2, since=13, id="sizes"),
    Case("Split", [X, ints(0, 3)], {"axis": 1}, 2, since=13, id="empty"),
    Case("Split", [X], {"axis": 2, "num_outputs": 2}, 2, since=18, id="equal"),
    Case(
        "Split",
        [X],
        {"axis": 2, "num_outputs": 3},
        3,
        since=18,
        expected=split([2, 2, 0], 2),
        id="few",
    ),
    Case("Split", [X], {"axis": 1, "num_outputs": 2}, 2, since=18, id="uneven"),
    Case(
        "Slice",
        [X],
        {"starts": [1, -2], "ends": [1000, -1], "axes": [1, 2]},
        until=9,
        expected=lambda x: x[:, 1:, -2:-1],
    ),
    Case("Slice", [X], {"starts": [1], "ends": [2]}, until=9, expected=lambda x: x[1:2], id="axes"),
    Case("Slice", [X, ints(1), ints(LAST)], since=10, id="axes"),
    Case("Slice", [X, ints(-2), ints(LAST), ints(-1)], since=10, id="open"),
    Case("Slice", [X, ints(-1, 0), ints(FIRST, 3), ints(2, 1), ints(-2, 2)], since=10, id="steps"),
    Case("Slice", [X, ints(LAST), ints(FIRST), ints(1), ints(-1)], since=10, id="reversed"),
    Case("Slice", [X, ints(3), ints(1), ints(2)], since=10, id="empty"),
    Case("Slice", [EMPTY, ints(LAST), ints(FIRST), ints(0), ints(-1)], since=10, id="none"),
    *pads("constant", "constant", [(0, 1), (2, 0), (1, 1)]),
    *pads("reflect", "reflect", [(0, 1), (2, 0), (1, 3)]),
    *pads("edge", "edge", [(0, 1), (2, 0), (1, 3)]),
    Case("Pad", [X, ints(0, 1, 0, 1, 0, 2)], {"mode": "wrap"}, since=19, id="wrap"),
    Case("Pad", [X, ints(0, 1, 0, 0, 0, 2), VALUE], since=11, id="value"),
    Case("Pad", [X, ints(1, 0, 1, 2), VALUE, ints(-1, 0)], since=18, id="axes"),
    Case(
        "Pad",
        [X, ints(0, -1, 2, 0, 0, -1)],
        since=11,
        expected=lambda x, pads: np.pad(x[:, 1:, :3], [(0, 0), (0, 0), (2, 0)]),
        id="removed",
    ),
    Case("CenterCropPad", [SQUARE, ints(7, 2)], since=18),
    Case("CenterCropPad", [SQUARE, ints(1)], {"axes": [-2]}, since=18, id="axes"),
    Case("Trilu", [SQUARE], since=14),
    Case("Trilu", [X, np.array(1)], since=14, id="above"),
    Case("Trilu", [X, np.array(-1)], {"upper": 0}, since=14, id="below"),
    Case(
        "ReverseSequence",
        [SQUARE, ints(4, 3, 2, 1, 0)],
        since=10,
        expected=lambda x, n: _backwards(x, n),
    ),
    Case(
        "ReverseSequence",
        [X.transpose(1, 2, 0), ints(4, 1, 2)],
        {"batch_axis": 0, "time_axis": 1},
        since=10,
        expected=lambda x, n: _backwards(x.swapaxes(0, 1), n).swapaxes(0, 1),
        id="batch",
    ),
    Case("OneHot", [ints(0, 2, -1, 5), np.array(3), np.array([0.5, 2], np.float32)], since=9),
    Case(
        "OneHot",
        [np.array([[0.0, 2.9]], np.float32), ints(3), np.array([1, 7], np.int32)],
        {"axis": 1},
        since=11,
        expected=lambda i, depth, values: np.array([[[7, 1], [1, 1], [1, 7]]], np.int32),
        grad=(),
        id="floats",
    ),
]


def _backwards(x, lengths):
    """Time is axis 0, the batch axis 1."""
    y = x.copy()
    for b, n in enumerate(lengths):
        y[:n, b] = x[:n, b][::-1]
    return y
