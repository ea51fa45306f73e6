"""RNN, GRU and LSTM against a plain loop over directions, samples and steps."""

from functools import partial

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(1)

STEPS, BATCH, FEATURES, HIDDEN = 3, 2, 2, 3
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def activation(name, alpha, beta):
    return {
        "Affine": lambda x: alpha * x + beta,
        "Elu": lambda x: np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0))),
        "HardSigmoid": lambda x: np.clip(alpha * x + beta, 0, 1),
        "LeakyRelu": lambda x: np.where(x >= 0, x, alpha * x),
        "Relu": lambda x: np.maximum(x, 0),
        "ScaledTanh": lambda x: alpha * np.tanh(beta * x),
        "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "Softplus": lambda x: np.log1p(np.exp(x)),
        "Softsign": lambda x: x / (1 + np.abs(x)),
        "Tanh": np.tanh,
        "ThresholdedRelu": lambda x: np.where(x >= alpha, x, 0),
    }[name]


def loop(kind, functions, options, x, w, r, b=None, lens=None, h0=None, c0=None, p=None):
    """Y, Y_h (and Y_c) by the equations of the specification; layout 0."""
    reversals = {"reverse": [True], "bidirectional": [False, True]}.get(
        options.get("direction"), [False]
    )
    clip = options.get("clip", np.inf)
    directions, gates = len(reversals), GATES[kind]
    b = np.zeros((directions, 2 * gates * HIDDEN)) if b is None else b
    lens = [STEPS] * BATCH if lens is None else lens
    shape = (directions, BATCH, HIDDEN)
    h0, c0 = (np.zeros(shape) if s is None else s for s in (h0, c0))
    p = np.zeros((directions, 3 * HIDDEN)) if p is None else p
    y = np.zeros((STEPS, *shape))
    hs, cs = h0.astype(float).copy(), c0.astype(float).copy()
    for d, n in np.ndindex(directions, BATCH):
        wb, rb = np.split(b[d].astype(float), 2)
        ws, rs = np.split(w[d].astype(float), gates), np.split(r[d].astype(float), gates)
        wbs, rbs = np.split(wb, gates), np.split(rb, gates)
        names = functions[d * len(DEFAULT[kind]) :][: len(DEFAULT[kind])]
        act = [lambda v, name=name: activation(*name)(np.clip(v, -clip, clip)) for name in names]
        h, c = hs[d, n], cs[d, n]
        for t in list(range(lens[n]))[:: -1 if reversals[d] else 1]:
            inner = [x[t, n] @ a.T + e for a, e in zip(ws, wbs, strict=True)]
            outer = [h @ a.T + e for a, e in zip(rs, rbs, strict=True)]
            if kind == "RNN":
                h = act[0](inner[0] + outer[0])
            elif kind == "GRU":
                z, reset = act[0](inner[0] + outer[0]), act[0](inner[1] + outer[1])
                if options.get("linear_before_reset"):
                    share = reset * outer[2]
                else:
                    share = (reset * h) @ rs[2].T + rbs[2]
                h = (1 - z) * act[1](inner[2] + share) + z * h
            else:
                i, o, f, g = (a + e for a, e in zip(inner, outer, strict=True))
                pi, po, pf = np.split(p[d], 3)
                i = act[0](i + pi * c)
                f = 1 - i if options.get("input_forget") else act[0](f + pf * c)
                c = f * c + i * act[1](g)
                h = act[0](o + po * c) * act[2](c)
            y[t, d, n] = h
        hs[d, n], cs[d, n] = h, c
    results = (y, hs, cs) if kind == "LSTM" else (y, hs)
    return tuple(result.astype(x.dtype) for result in results)


def batch_first(kind, functions, options, x, w, r, b=None, lens=None, h0=None, c0=None, p=None):
    h0, c0 = (None if s is None else s.swapaxes(0, 1) for s in (h0, c0))
    y, *states = loop(kind, functions, options, x.swapaxes(0, 1), w, r, b, lens, h0, c0, p)
    return y.transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in states)


def case(kind, options=None, *, functions=None, bias=True, lens=None, start=True, peep=False, **kw):
    """A case; `functions` lists (name, alpha, beta), which also become the attributes."""
    options = dict(options or {})
    directions = 2 if options.get("direction") == "bidirectional" else 1
    layout = options.get("layout", 0)

    def f(*shape):
        return rng.normal(size=shape, scale=0.7).astype(np.float32)

    gates = GATES[kind] * HIDDEN
    state = (BATCH, directions, HIDDEN) if layout else (directions, BATCH, HIDDEN)
    inputs = [
        f(*((BATCH, STEPS) if layout else (STEPS, BATCH)), FEATURES),
        f(directions, gates, FEATURES),
        f(directions, gates, HIDDEN),
        f(directions, 2 * gates) if bias else None,
        None if lens is None else np.array(lens, np.int32),
        f(*state) if start else None,
    ]
    if kind == "LSTM":
        inputs += [f(*state) if start else None, f(directions, 3 * HIDDEN) if peep else None]
    oracle = functions or [(name, None, None) for name in DEFAULT[kind] * directions]
    expected = partial(batch_first if layout else loop, kind, oracle, options)
    if functions:
        options["activations"] = [name for name, _, _ in functions]
        numbers = {
            "activation_alpha": [a for _, a, _ in functions if a is not None],
            "activation_beta": [b for _, _, b in functions if b is not None],
        }
        options |= {name: values for name, values in numbers.items() if values}
    kw.setdefault("order", 1)
    return Case(
        kind,
        inputs,
        options | {"hidden_size": HIDDEN},
        outputs=3 if kind == "LSTM" else 2,
        expected=expected,
        **kw,
    )


CASES = [
    case_
    for kind in GATES
    for case_ in (
        case(kind, order=2),
        case(kind, bias=False, start=False, id="bare"),
        case(kind, {"direction": "reverse"}, lens=[3, 1], id="reverse"),
        case(kind, {"direction": "bidirectional"}, lens=[2, 3], id="bidirectional"),
        case(kind, {"layout": 1}, lens=[2, 3], since=14, id="batch_first"),
        case(kind, {"clip": 0.3}, id="clip"),
    )
]
CASES += [
    case("RNN", functions=[function], since=22, id=function[0])
    for function in [
        ("Affine", 0.5, 0.2),
        ("Elu", 0.7, None),
        ("HardSigmoid", 0.3, 0.4),
        ("LeakyRelu", 0.2, None),
        ("Relu", None, None),
        ("ScaledTanh", 0.8, 1.2),
        ("Sigmoid", None, None),
        ("Softplus", None, None),
        ("Softsign", None, None),
        ("ThresholdedRelu", 0.1, None),
    ]
]
CASES += [
    case("GRU", {"linear_before_reset": 1}, since=3, order=2, id="linear_before_reset"),
    case("GRU", {"linear_before_reset": 1}, bias=False, since=3, id="linear_before_reset_bare"),
    case("LSTM", peep=True, order=2, id="peepholes"),
    case("LSTM", {"input_forget": 1}, peep=True, id="input_forget"),
    case(
        "LSTM",
        {"direction": "bidirectional"},
        functions=[
            ("Sigmoid", None, None),
            ("Elu", 0.5, None),
            ("Tanh", None, None),
            ("HardSigmoid", 0.3, 0.4),
            ("Softsign", None, None),
            ("ScaledTanh", 0.9, 0.7),
        ],
        id="activations",
    ),
    case("RNN", {"output_sequence": 1}, until=1, id="output_sequence"),
]
