"""The walk through a program that follows the elements of sparse weights to the products.

A value is an array of integers that say which weight element stands where, or None.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxonnx._jaxpr import Program, Scan, inner_program, interpret, scan, while_loop

_ZERO = -1  # an element that is zero by construction: padding, a `where` against zero
OTHER = -2  # an element of something else that stands beside a weight
_BELOW, _ABOVE = -3, -4  # a constant below or above zero, which may bound a rounded weight

_MOVES: dict[str, Callable[[np.ndarray, Mapping[str, Any]], Any]] = {
    "broadcast_in_dim": lambda x, p: _broadcast(x, p["shape"], p["broadcast_dimensions"]),
    "copy": lambda x, p: x,
    "copy_p": lambda x, p: x,
    "reshape": lambda x, p: x.reshape(p["new_sizes"]),
    "rev": lambda x, p: np.flip(x, p["dimensions"]),
    "slice": lambda x, p: x[_slices(p["start_indices"], p["limit_indices"], p["strides"])],
    "split": lambda x, p: np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"]),
    "squeeze": lambda x, p: x.squeeze(p["dimensions"]),
    "tile": lambda x, p: np.tile(x, p["reps"]),
    "transpose": lambda x, p: x.transpose(p["permutation"]),
    "unstack": lambda x, p: [*np.moveaxis(x, p["axis"], 0)],
}
"""Primitives that rearrange their only operand, as NumPy does it: mostly without a copy, and with
nothing to compile."""
_KEEPS = {
    "abs", "convert_element_type", "device_put", "div", "mul", "name", "neg",
    "reduce_precision", "round", "sharding_constraint", "sign", "sqrt", "stop_gradient",
}  # fmt: skip
"""Elementwise primitives that give 0 where their first (for mul: any) operand is 0."""

_BOUNDS = {"max": _BELOW, "min": _ABOVE}
"""Primitives that give 0 for 0 beside such a constant."""
_CARRY_BOUNDS = {*_MOVES, *_BOUNDS, "convert_element_type", "optimization_barrier"}

_OPAQUE = {"custom_call", "ffi_call", "pallas_call", "ragged_dot_general"}
"""Primitives that may multiply by a weight where this walk cannot follow."""


class Elements(Protocol):
    """Numbered elements of weights, and what a product that sums over them proves."""

    def weights(self, operands: list) -> list[str]:
        """Return the weights that occur in some numbers."""
        ...

    def judge(self, rows: np.ndarray) -> list[tuple[str, str, bool]]:
        """Return (weight, what is summed over, whether that is proof) of numbers [free, summed]."""
        ...


class Walk:
    """Carries the numbers through a program and judges the products on the way.

    Calling it with a program and the numbers of its inputs gives those of its results; None stands
    for what has no weight in it.
    """

    def __init__(self, elements: Elements):
        self.elements = elements
        self.found: Counter[tuple[str, str, str, bool]] = Counter()

    def __call__(self, program: Program, arguments: list) -> list:
        # calls are entered by `_step`, which knows the operands
        return interpret(program, self._step, arguments, constant=_constant, enter=lambda _: None)

    def _step(self, equation: JaxprEqn, operands: list) -> list:
        """Return the numbers of the results; None for those that are followed no further."""
        if hasattr(equation.primitive, "plain") and all(x is None for x in operands):
            return [None] * len(equation.outvars)  # without tracing what it does
        if (inner := _inner_program(equation)) is not None:
            return self(inner, operands)
        results = []
        if equation.primitive.name not in _CARRY_BOUNDS:
            operands = [None if _is_bound(x) else x for x in operands]
        if any(x is not None for x in operands):
            results = self._results(equation, operands)
        return [*results, *[None] * (len(equation.outvars) - len(results))]

    def _results(self, eqn: JaxprEqn, operands: list) -> list:
        name, params = eqn.primitive.name, eqn.params
        first = operands[0]
        if name == "dot_general":
            contract, batch = params["dimension_numbers"]
            for x, summed, shared in zip(operands, contract, batch, strict=True):
                self._judge(name, x, summed, shared)
        elif name == "sparse_product":
            self._judge(name, operands[1], (params["axis"],), ())
        elif name == "conv_general_dilated":
            dims = params["dimension_numbers"]
            self._judge(name, first, dims.lhs_spec[1:], ())
            self._judge(name, operands[1], dims.rhs_spec[1:], ())
        elif name == "cond":
            branches = [self(branch, operands[1:]) for branch in params["branches"]]
            return [
                x[0] if all(y is not None and np.array_equal(x[0], y) for y in x) else None
                for x in zip(*branches, strict=True)
            ]
        elif name == "scan":
            return self._scan(scan(eqn, operands))
        elif name == "while":
            loop = while_loop(eqn, operands)
            state = [None] * len(loop.carry)
            self(loop.condition, [*loop.tested, *state])
            self(loop.body, [*loop.fixed, *state])
        elif name in _OPAQUE:
            for weight in self.elements.weights(operands):
                self.found[weight, name, "out of sight", False] += 1
        elif name in _MOVES and first is not None:
            out = _MOVES[name](first, params)
            return out if eqn.primitive.multiple_results else [out]
        elif name == "optimization_barrier":
            return operands
        elif name in _KEEPS:
            kept = [x for x in operands[: 2 if name == "mul" else 1] if x is not None]
            return [np.broadcast_to(x, _shape(eqn.outvars[0])) for x in kept[:1]]
        elif name in _BOUNDS:
            kept = [x for x in operands if not _is_bound(x, _BOUNDS[name])]
            if len(kept) == 1 and kept[0] is not None:
                return [np.broadcast_to(kept[0], _shape(eqn.outvars[0]))]
        elif name in ("add", "add_any", "sub", "select_n"):
            return [_merge(operands[name == "select_n" :], _shape(eqn.outvars[0]))]
        elif name in ("concatenate", "stack"):
            parts = [
                np.full(_shape(v), OTHER) if x is None else x
                for v, x in zip(eqn.invars, operands, strict=True)
            ]
            if name == "stack":
                return [np.stack(parts, params["axis"])]
            return [np.concatenate(parts, params["dimension"])]
        elif name == "pad" and first is not None and operands[1] is not None:
            return [np.asarray(jax.lax.pad(jnp.asarray(first), _ZERO, params["padding_config"]))]
        return []

    def _scan(self, loop: Scan) -> list:
        # what a weight becomes in the carry is not followed
        carry = [None] * len(loop.carry)
        steps = range(loop.length if any(x is not None for x in loop.sliced) else 1)
        slices = ([None if x is None else x[i] for x in loop.sliced] for i in steps)
        ys = [self(loop.body, [*loop.fixed, *carry, *values]) for values in slices]
        stacked = zip(*(y[len(carry) :] for y in ys), strict=True)
        whole = len(steps) == loop.length
        return carry + [
            np.stack(y) if whole and all(x is not None for x in y) else None for y in stacked
        ]

    def _judge(self, primitive: str, x, summed, shared) -> None:
        if x is None or not (x >= 0).any():
            return
        free = [a for a in range(x.ndim) if a not in summed]
        size = int(np.prod([x.shape[a] for a in summed]))
        rows = x.transpose(*free, *summed).reshape(-1, size)
        for weight, sums, ok in self.elements.judge(rows):
            self.found[weight, primitive, sums, ok] += 1


def _inner_program(equation: JaxprEqn) -> Program | None:
    """Return the program that an equation runs, also that of a `shard_map`; not a product's."""
    if equation.primitive.name == "shard_map":
        return equation.params["jaxpr"]
    if equation.primitive.name == "sparse_product":
        return None
    return inner_program(equation)


def _constant(value: Any, aval: Any) -> np.ndarray | None:
    """Return the numbers of a constant: of interest are zeros, and bounds below and above them."""
    if aval.shape != () or not jnp.issubdtype(aval.dtype, np.number) or value != value:
        return None
    return np.asarray(_ZERO if value == 0 else _BELOW if value < 0 else _ABOVE)


def _is_bound(x: np.ndarray | None, *kinds: int) -> bool:
    """Check whether numbers are those of a constant that is not zero."""
    kinds = kinds or (_BELOW, _ABOVE)
    return x is not None and x.size > 0 and x.flat[0] in kinds and bool(np.isin(x, kinds).all())


def _broadcast(x: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Return numbers as `lax.broadcast_in_dim` puts them at these axes of a shape."""
    alone = np.ones(len(shape), int)
    alone[[*axes]] = x.shape
    return np.broadcast_to(x.reshape(alone), shape)


def _slices(begin, end, steps) -> tuple[slice, ...]:
    return tuple(map(slice, begin, end, steps or [1] * len(begin)))


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _merge(operands: list, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the only one of several alternatives or summands that is not zero everywhere."""
    if any(x is None for x in operands):
        return None
    weights = [x for x in operands if (x != _ZERO).any()]
    same = all(np.array_equal(x, weights[0]) for x in weights)
    return np.broadcast_to((weights or operands)[0], shape) if same else None
