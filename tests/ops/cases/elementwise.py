"""Cases of `jaxonnx/ops/elementwise.py`."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(0)
SIGNED = (rng.uniform(0.2, 0.8, (2, 3)) * [[1, -1, 1], [-1, 1, -1]]).astype(np.float32)
POSITIVE = rng.uniform(0.2, 0.8, (2, 3)).astype(np.float32)
OTHER = rng.uniform(1.1, 1.9, (2, 3)).astype(np.float32)
ROW = rng.uniform(1.1, 1.9, (3,)).astype(np.float32)
HALVES = np.array([0.5, 2.5, 1.0], np.float32)
COLUMN = rng.uniform(1.1, 1.9, (2, 1)).astype(np.float32)
CUBE = rng.uniform(0.2, 0.8, (2, 3, 4)).astype(np.float32)
INTEGERS = np.array([[7, -7, 3], [-3, 0, 5]], np.int32)
DIVISORS = np.array([[2, 2, -4], [-2, 5, 1]], np.int32)
BYTES = np.array([0, 1, 7, 200], np.uint8)

# operator -> where it is smooth
UNARY = {
    "Abs": SIGNED,
    "Acos": SIGNED,
    "Acosh": OTHER,
    "Asin": SIGNED,
    "Asinh": SIGNED,
    "Atan": SIGNED,
    "Atanh": SIGNED,
    "Ceil": SIGNED,
    "Cos": SIGNED,
    "Cosh": SIGNED,
    "Erf": SIGNED,
    "Exp": SIGNED,
    "Floor": SIGNED,
    "Log": POSITIVE,
    "Neg": SIGNED,
    "Reciprocal": OTHER,
    "Round": SIGNED[:, :1] * 0.5,
    "Sign": SIGNED,
    "Sin": SIGNED,
    "Sinh": SIGNED,
    "Sqrt": POSITIVE,
    "Tan": SIGNED,
    "Tanh": SIGNED,
}

# how opsets 1 to 6 lay b along a: attributes, shape of b, the same shape for NumPy
LIMITED = (
    ("equal", {}, (2, 3, 4), (2, 3, 4)),
    ("scalar", {"broadcast": 1}, (), ()),
    ("one", {"broadcast": 1}, (1, 1), ()),
    ("suffix", {"broadcast": 1}, (3, 4), (3, 4)),
    ("axis", {"broadcast": 1, "axis": 1}, (3,), (3, 1)),
    ("axis0", {"broadcast": 1, "axis": 0}, (2, 3), (2, 3, 1)),
)


def limited(op, function, a, b, **options):
    """Cases of a binary operator with the attributes of opsets 1 to 6; `b` has a's shape."""
    return [
        Case(
            op,
            [a, np.resize(b, shape)],
            attributes,
            until=6,
            expected=lambda a, b, to=to: function(a, b.reshape(to)),
            id=f"limited-{label}",
            **options,
        )
        for label, attributes, shape, to in LIMITED
    ]


CASES = [
    *(Case(name, [x]) for name, x in UNARY.items()),
    Case("Abs", [INTEGERS], since=6, id="integers"),
    Case("Neg", [INTEGERS], since=6, id="integers"),
    Case("Sign", [INTEGERS], id="integers"),
    Case("Sign", [BYTES], id="unsigned"),
    Case("Erf", [np.array([7, -7, 0], np.int32)], until=12, id="integers"),
    Case("Round", [np.array([0.5, 1.5, -2.5, 2.3], np.float32)], grad=(), id="halves"),
    Case("Add", [SIGNED, ROW], since=7),
    Case("Sub", [SIGNED, COLUMN], since=7),
    Case("Mul", [SIGNED, ROW], since=7),
    Case("Div", [SIGNED, OTHER], since=7),
    Case("Div", [INTEGERS, DIVISORS], since=7, id="truncates"),
    Case("Div", [BYTES, np.array([3], np.uint8)], since=14, id="unsigned"),
    Case("Pow", [POSITIVE, COLUMN], since=7),
    Case("Pow", [SIGNED, np.array([2, 3, 1])], since=12, id="integer-exponent"),
    # the result is integer like the base
    Case("Pow", [np.array([2, 3, 4]), HALVES], since=12, grad=(), id="mixed"),
    Case("Pow", [INTEGERS, np.array([2, 3, 0])], since=12, id="integers"),
    *limited("Add", np.add, CUBE, CUBE + 1),
    *limited("Sub", np.subtract, CUBE, CUBE + 1),
    *limited("Mul", np.multiply, CUBE, CUBE + 1),
    *limited("Div", np.divide, CUBE, CUBE + 1),
    *limited("Pow", np.power, CUBE, CUBE + 1),
    Case("Mod", [INTEGERS, DIVISORS]),
    Case("Mod", [INTEGERS, DIVISORS], {"fmod": 1}, id="fmod-integers"),
    Case("Mod", [5 * SIGNED, ROW], {"fmod": 1}, id="fmod"),
    Case("Mod", [5 * SIGNED, ROW], since=28, id="floor"),
    *(Case(name, [SIGNED, POSITIVE - 0.3, OTHER - 1]) for name in ("Max", "Min", "Sum", "Mean")),
    *(Case(name, [SIGNED]) for name in ("Max", "Min", "Sum", "Mean")),
    *(Case(name, [SIGNED, ROW - 1], since=8) for name in ("Max", "Min", "Sum", "Mean")),
    *(Case(name, [INTEGERS, DIVISORS], since=12, id="integers") for name in ("Max", "Min")),
    Case("Where", [SIGNED > 0, SIGNED, COLUMN]),
    Case("Where", [SIGNED > 0, INTEGERS, DIVISORS], id="integers"),
    Case("Clip", [SIGNED], until=5, expected=lambda x: x, id="unbounded"),
    Case(
        "Clip",
        [SIGNED],
        {"min": -0.3, "max": 0.4},
        until=10,
        expected=lambda x: x.clip(-0.3, 0.4),
        order=1,
    ),
    Case("Clip", [SIGNED], {"max": 0.4}, since=6, until=10, order=1, id="above"),
    Case("Clip", [SIGNED, np.float32(-0.3), np.float32(0.4)], since=11, order=1),
    Case("Clip", [SIGNED, None, np.float32(0.4)], since=11, order=1, id="above"),
    Case("Clip", [INTEGERS, np.int32(-2)], since=12, id="integers"),
]
