"""Cases of `jaxonnx/ops/activation.py`."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(1)
X = np.array([[-3.3, -0.7, 0.3], [0.6, 1.7, 4.1]], np.float32)
CUBE = rng.normal(size=(2, 3, 2)).astype(np.float32)
SLOPE = np.array([0.25, 0.5, 0.125], np.float32)
MASKED = np.array([[0.5, -np.inf, 1], [0.25, 1, -np.inf]], np.float32)
INTEGERS = np.array([-3, -1, 0, 2, 3], np.int32)

# operator -> attributes other than the default ones
PLAIN = {
    "Celu": {"alpha": 0.7},
    "Elu": {"alpha": 0.7},
    "Gelu": {"approximate": "tanh"},
    "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
    "HardSwish": {},
    "LeakyRelu": {"alpha": 0.3},
    "Mish": {},
    "Relu": {},
    "Selu": {"alpha": 1.2, "gamma": 1.1},
    "Shrink": {"bias": 0.2, "lambd": 0.65},
    "Sigmoid": {},
    "Softplus": {},
    "Softsign": {},
    "Swish": {"alpha": 1.3},
    "ThresholdedRelu": {"alpha": 0.5},
}


def on_matrix(function, axis):
    """What opsets 1 to 12 do: all axes from `axis` on are one."""

    def apply(x):
        return function(x.reshape(int(np.prod(x.shape[:axis])), -1)).reshape(x.shape)

    return apply


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def selu(x, alpha, gamma):
    return np.float32(gamma) * np.where(x > 0, x, np.float32(alpha) * np.expm1(x))


def hardmax(x):
    return np.eye(x.shape[1], dtype=x.dtype)[x.argmax(1)]


def log_softmax(x):
    return np.log(softmax(x))


SOFT = {"Softmax": softmax, "LogSoftmax": log_softmax, "Hardmax": hardmax}

CASES = [
    *(Case(name, [X]) for name in PLAIN if name != "Selu"),
    Case("Selu", [X], until=5, expected=lambda x: selu(x, 1.6732, 1.0507)),
    Case("Selu", [X], since=6),
    *(Case(name, [X], attributes, id="attributes") for name, attributes in PLAIN.items()),
    Case("Relu", [INTEGERS], since=14, id="integers"),
    Case(
        "Shrink",
        [INTEGERS],
        {"bias": 0.5, "lambd": 1.5},
        expected=lambda x: np.array([-2, 0, 0, 1, 2], np.int32),
        id="integers",
    ),
    Case("PRelu", [CUBE, SLOPE], until=6, expected=lambda x, s: np.where(x > 0, x, s[:, None] * x)),
    Case("PRelu", [CUBE, SLOPE[:1]], until=6, id="shared"),
    Case("PRelu", [CUBE, SLOPE[:, None]], since=7),
    Case("PRelu", [INTEGERS, np.array([2], np.int32)], since=9, id="integers"),
    Case("SwiGLU", [X, X[::-1] + 1]),
    Case("SwiGLU", [X, X[::-1] + 1], {"alpha": 1.3}, id="attributes"),
    *(
        Case(name, [CUBE], {"axis": axis}, until=12, expected=on_matrix(f, axis), id=f"axis{axis}")
        for name, f in SOFT.items()
        for axis in (0, 1, 2)
    ),
    *(Case(name, [CUBE], until=12, expected=on_matrix(f, 1)) for name, f in SOFT.items()),
    *(
        Case(name, [CUBE], {"axis": -1}, since=11, until=12, expected=on_matrix(f, 2), id="last")
        for name, f in SOFT.items()
    ),
    *(Case(name, [CUBE], since=13) for name in SOFT),
    *(Case(name, [CUBE], {"axis": 0}, since=13, id="first") for name in SOFT),
    Case("Softmax", [MASKED], grad=(), id="masked"),
    Case("LogSoftmax", [MASKED], grad=(), expected="ort", id="masked"),
]
