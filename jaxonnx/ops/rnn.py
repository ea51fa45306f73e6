"""Recurrent layers: RNN, GRU, LSTM.

All three share `scan_over`, which scans over the steps (`jaxonnx.lowering._recurrence`). A reverse
direction scans from the end; steps beyond a sequence's length leave the state alone, so that it
starts where its own data ends.
"""

from typing import Annotated, Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp

from jaxonnx._constraints import Default, NotNegative
from jaxonnx._weights import recurrent
from jaxonnx.errors import NodeError
from jaxonnx.lowering import (
    elementwise,
    gru_cell,
    lstm_cell,
    recur,
    state_product,
    transpose_weight,
)
from jaxonnx.ops.common import widen
from jaxonnx.registry import op

MATRICES = {"w": recurrent(), "r": recurrent()}


class Cell(TypedDict, total=False):
    """The attributes of all recurrent layers in all opsets."""

    activation_alpha: Any
    activation_beta: Any
    clip: NotNegative | None
    hidden_size: Any
    output_sequence: Annotated[Any, Default(0)]


class RecurrentAttributes(Cell, total=False):
    """The attributes that all recurrent layers have."""

    direction: Annotated[Literal["forward", "reverse", "bidirectional"], Default("forward")]


class GatedAttributes(RecurrentAttributes, total=False):
    """The attributes of layers with gates."""

    activations: Any


class FirstGruAttributes(Cell, total=False):
    """The attributes of the first GRU, whose schema misspells the default direction."""

    activations: Any
    direction: Annotated[
        Literal["forward", "reverse", "bidirectional", "foward"], Default("foward")
    ]


def gates(count: int) -> str:
    """Declare the shapes of the weights of a recurrence with `count` gates."""
    rows = f"{count}*hidden_size" if count > 1 else "hidden_size"
    return f"r (dirs, {rows}, hidden_size), w (dirs, {rows}, _), b (dirs, 2*{rows})"


# function, then the defaults of the parameters (alpha, beta) that it takes
_ACTIVATIONS = {
    "affine": (lambda x, alpha, beta: alpha * x + beta, 1.0, 0.0),
    "elu": (jax.nn.elu, 1.0),
    "hardsigmoid": (lambda x, alpha, beta: jnp.clip(alpha * x + beta, 0, 1), 0.2, 0.5),
    "leakyrelu": (jax.nn.leaky_relu, 0.01),
    "relu": (jax.nn.relu,),
    "scaledtanh": (lambda x, alpha, beta: alpha * jnp.tanh(beta * x), 1.0, 1.0),
    "sigmoid": (jax.nn.sigmoid,),
    "softplus": (jax.nn.softplus,),
    "softsign": (jax.nn.soft_sign,),
    "tanh": (jnp.tanh,),
    "thresholdedrelu": (lambda x, alpha: jnp.where(x >= alpha, x, 0), 1.0),
}

_REVERSED = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def activations_of(
    default,
    r,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=None,
    clip: Any = None,
    direction="forward",
    **_,
):
    """Return the activation functions of each direction, with inputs clipped to [-clip, clip].

    Each function takes what it needs from the front of the lists of alphas and betas.

    Raises:
      NodeError: the activations or the weights `r` are not of as many directions.
    """
    count, directions = len(default), len(_REVERSED[direction])
    names = activations or default * directions
    if len(names) != count * directions:
        raise NodeError(f"{count * directions} activations are needed, {len(names)} are given")
    if (sets := r.shape[0]) != directions:
        raise NodeError(f"direction {direction!r} needs {directions} sets of weights, not {sets}")
    remaining = iter(activation_alpha or ()), iter(activation_beta or ())

    def function(name):
        if name.lower() not in _ACTIVATIONS:
            raise NodeError(f"unknown activation {name!r}; known are {', '.join(_ACTIVATIONS)}")
        apply, *defaults = _ACTIVATIONS[name.lower()]
        parameters = [next(g, d) for g, d in zip(remaining, defaults, strict=False)]
        if clip is None:
            return (lambda x: apply(x, *parameters)) if parameters else apply
        return lambda x: apply(jnp.clip(x, -clip, clip), *parameters)

    functions = [function(name) for name in names]
    return [functions[i * count : (i + 1) * count] for i in range(directions)]


def scan_over(cell, x, hidden, bias, sequence_lens, initial, *, layout=0, direction="forward", **_):
    """Compute Y and the last states over every direction d.

    Shapes as in the specification; `cell(d)` is (step, own gates, weight, recurrent weight, extra)
    of `jaxonnx.lowering._recurrence`; `bias` (directions, gates) is added to the gates.
    """
    reversals = _REVERSED[direction]
    if layout:
        x = x.swapaxes(0, 1)
    steps, batch, _ = x.shape
    valid = None
    if sequence_lens is not None:
        valid = (jnp.arange(steps)[:, None] < sequence_lens)[..., None]

    def start(state, d):
        if state is None:
            return jnp.zeros((batch, hidden), x.dtype)
        return state[:, d] if layout else state[d]

    def one_direction(d, reverse):
        step, apart, weight, recurrent, extra = cell(d)
        first, *others = (start(state, d) for state in initial)
        # states that no product reads (the cell of an LSTM) are float32, and rounded at the end
        states = first, *map(widen, others)
        added = None if bias is None else bias[d]
        y, last = recur(step, reverse, apart, x, weight, recurrent, added, extra, valid, states)
        last = [state.astype(x.dtype) for state in last]
        return y if valid is None else jnp.where(valid, y, 0), last

    ys, lasts = zip(*(one_direction(d, rev) for d, rev in enumerate(reversals)), strict=True)
    y = jnp.stack(ys, axis=1)
    if layout:
        y = y.transpose(2, 0, 1, 3)
    return y, *(jnp.stack(states, axis=1 if layout else 0) for states in zip(*lasts, strict=True))


def sum_of_biases(b):
    """Add the biases of the input and the recurrence."""
    return None if b is None else sum(jnp.split(b, 2, axis=1))


@op("RNN", since=1, weights=MATRICES, params={"b": 0.0}, shapes=gates(1))
def rnn(
    x,
    w,
    r,
    b=None,
    sequence_lens=None,
    initial_h=None,
    *,
    activations=("Tanh", "Tanh"),
    layout=0,
    **attributes: Unpack[RecurrentAttributes],
):
    """H = f(X Wi' + H Ri' + Wbi + Rbi). Y is always returned, whatever `output_sequence` says."""
    names = list(activations)[: len(_REVERSED[attributes.get("direction", "forward")])]
    functions = activations_of(["Tanh"], r, activations=names, **attributes)

    def cell(d):
        (f,) = functions[d]
        return (lambda gates, _, h: (f(gates),)), 0, w[d], r[d], None

    settings = {"layout": layout, **attributes}
    return scan_over(
        cell, x, r.shape[-1], sum_of_biases(b), sequence_lens, (initial_h,), **settings
    )


@op("GRU", since=3, weights=MATRICES, params={"b": 0.0}, shapes=gates(3))
def gru(
    x,
    w,
    r,
    b=None,
    sequence_lens=None,
    initial_h=None,
    *,
    layout=0,
    linear_before_reset=0,
    **attributes: Unpack[GatedAttributes],
):
    """Gates z (update), r (reset), h (hidden):

    z = f(X Wz' + H Rz' + Wbz + Rbz), r likewise,
    h = g(X Wh' + (r * H) Rh' + Rbh + Wbh), or with `linear_before_reset`
    h = g(X Wh' + r * (H Rh' + Rbh) + Wbh); H = (1 - z) * h + z * H.
    """
    functions = activations_of(["Sigmoid", "Tanh"], r, **attributes)
    hidden = r.shape[-1]
    bias = None
    if b is not None:
        of_input, of_state = jnp.split(b, 2, axis=1)
        bias = of_input + of_state
        if linear_before_reset:
            new_gate = of_input[:, 2 * hidden :], of_state[:, 2 * hidden :]
            bias = jnp.concatenate([bias[:, : 2 * hidden], *new_gate], axis=1)

    def cell(d):
        f, g = functions[d]
        if linear_before_reset:
            step = GRU if (f, g) == USUAL[:2] else gru_step(f, g)
            return step, hidden, w[d], r[d], None
        r_zr, r_h = jnp.split(r[d], [2 * hidden])
        return reset_first(f, g), 0, w[d], r_zr, (r_h, transpose_weight(r_h))

    settings = {"layout": layout, **attributes}
    return scan_over(cell, x, hidden, bias, sequence_lens, (initial_h,), **settings)


def gru_step(f, g):
    """Return the step of a GRU with `linear_before_reset`: gates z, r, h, H Rh' and H to H."""

    def step(gates, _, h):
        return (elementwise(blend_state, *jnp.split(gates, 4, axis=-1), h.astype(gates.dtype)),)

    def blend_state(z, reset, new, share, h):
        z = f(z)
        return (1 - z) * g(new + f(reset) * share) + z * h

    return step


def reset_first(f, g):
    """Return the step of a GRU that multiplies the reset state: gates z, r, h and H to H."""

    def step(gates, weights, h):
        z, reset, new = jnp.split(gates, 3, axis=-1)
        wide = h.astype(gates.dtype)
        reset_h = elementwise(lambda reset, h: f(reset) * h, reset, wide)
        new = new + state_product(reset_h.astype(h.dtype), *weights)
        return (elementwise(blend_state, z, new, wide),)

    def blend_state(z, new, h):
        z = f(z)
        return (1 - z) * g(new) + z * h

    return step


@op("GRU", since=1, weights=MATRICES, params={"b": 0.0}, shapes=gates(3))
def gru_1(
    x, w, r, b=None, sequence_lens=None, initial_h=None, **attributes: Unpack[FirstGruAttributes]
):
    """As `gru`, without `linear_before_reset`; the first schema misspells its default direction."""
    direction = attributes.get("direction", "foward").replace("foward", "forward")
    spelled: Any = {**attributes, "direction": direction}
    return gru(x, w, r, b, sequence_lens, initial_h, **spelled)


@op("LSTM", since=1, weights=MATRICES, params={"b": 0.0, "p": 0.0}, shapes=gates(4))
def lstm(
    x,
    w,
    r,
    b=None,
    sequence_lens=None,
    initial_h=None,
    initial_c=None,
    p=None,
    *,
    input_forget=0,
    layout=0,
    **attributes: Unpack[GatedAttributes],
):
    """Gates i, o, f (input, output, forget) and c (cell), with peepholes P:

    i = f(X Wi' + H Ri' + Pi * C + Wbi + Rbi), f likewise (1 - i if `input_forget`),
    C = f * C + i * g(X Wc' + H Rc' + Wbc + Rbc), o = f(X Wo' + H Ro' + Po * C + Wbo + Rbo),
    H = o * h(C).
    """
    functions = activations_of(["Sigmoid", "Tanh", "Tanh"], r, **attributes)

    def cell(d):
        f, g, h = functions[d]
        usual = (f, g, h) == USUAL and p is None and not input_forget
        step = LSTM if usual else lstm_step(f, g, h, input_forget)
        return step, 0, w[d], r[d], None if p is None else p[d]

    initial, settings = (initial_h, initial_c), {"layout": layout, **attributes}
    return scan_over(cell, x, r.shape[-1], sum_of_biases(b), sequence_lens, initial, **settings)


def lstm_step(f, g, h, input_forget):
    """Return the step of an LSTM with these activations: gates, peepholes, H and C to H and C."""

    def step(gates, peepholes, _, c):
        i, o, forget, new = jnp.split(gates, 4, axis=-1)
        p_i, p_o, p_f = (None,) * 3 if peepholes is None else jnp.split(peepholes, 3)
        if peepholes is not None:
            i, forget = i + p_i * c, forget + p_f * c
        if input_forget:
            c = elementwise(coupled_cell, i, new, c)
        else:
            c = elementwise(separate, i, forget, new, c)
        o = o if peepholes is None else o + p_o * c
        return elementwise(lambda o, c: f(o) * h(c), o, c), c

    def separate(i, forget, new, c):
        return f(forget) * c + f(i) * g(new)

    def coupled_cell(i, new, c):
        i = f(i)
        return (1 - i) * c + i * g(new)

    return step


USUAL = (jax.nn.sigmoid, jnp.tanh, jnp.tanh)
LSTM = lstm_cell(lstm_step(*USUAL, 0))
GRU = gru_cell(gru_step(*USUAL[:2]))
