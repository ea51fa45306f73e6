"""The walk through a program that follows the elements of sparse weights to the products.

A value is an array of integers that say which weight element stands where, or None.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxonnx._jaxpr import Program, Scan, inner_program, interpret, scan, while_loop

# Entries that are no weight element:
_ZERO = -1  # zero by construction: padding, a `where` against zero
OTHER = -2  # an element of another array that was concatenated or stacked with a weight
_BELOW, _ABOVE = -3, -4  # a constant below or above zero, which may clip a rounded weight

_MOVES: dict[str, Callable[[np.ndarray, Mapping[str, Any]], Any]] = {
    "broadcast_in_dim": lambda x, p: _broadcast(x, p["shape"], p["broadcast_dimensions"]),
    "copy": lambda x, p: x,
    "copy_p": lambda x, p: x,
    "reshape": lambda x, p: x.reshape(p["new_sizes"]),
    "rev": lambda x, p: np.flip(x, p["dimensions"]),
    "slice": lambda x, p: x[
        tuple(map(slice, p["start_indices"], p["limit_indices"], p["strides"] or repeat(None)))
    ],
    "split": lambda x, p: np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"]),
    "squeeze": lambda x, p: x.squeeze(p["dimensions"]),
    "tile": lambda x, p: np.tile(x, p["reps"]),
    "transpose": lambda x, p: x.transpose(p["permutation"]),
    "unstack": lambda x, p: [*np.moveaxis(x, p["axis"], 0)],
}
"""Primitives that rearrange their only operand, by NumPy functions: these mostly return views, and
need no compilation for each shape."""
_KEEPS = {
    "abs", "convert_element_type", "device_put", "div", "mul", "name", "neg",
    "reduce_precision", "round", "sharding_constraint", "sign", "sqrt", "stop_gradient",
}  # fmt: skip
"""Elementwise primitives whose result is 0 where their first (for mul: any) operand is 0."""

_BOUNDS = {"max": _BELOW, "min": _ABOVE}
"""Primitives that map 0 to 0 if their other operand is such a constant: max(0, -1) is 0."""
_CARRY_BOUNDS = {*_MOVES, *_BOUNDS, "convert_element_type", "optimization_barrier"}
"""Primitives to which the sign of a constant matters, or that pass it on; it is dropped before all
others."""

_OPAQUE = {"custom_call", "ffi_call", "pallas_call", "ragged_dot_general"}
"""Primitives that may multiply by a weight where this walk cannot follow."""


class Elements(Protocol):
    """The elements of all sparse weights by number, and the verdict on a sum over some of them."""

    def weights(self, operands: list) -> list[str]:
        """Return the names of the weights whose elements are among the operands' numbers."""
        ...

    def judge(self, rows: np.ndarray) -> list[tuple[str, str, bool]]:
        """Judge a product that sums over each row of element numbers, int[free, summed].

        Returns:
          For each weight among the numbers its name, a description of what the product sums over,
          and whether these are whole groups of the pattern.
        """
        ...


class Walk:
    """Propagate element numbers through a program, and judge each product on the way.

    A call takes a program and an array of numbers for each of its inputs, and returns one for each
    result. None stands for a value without elements of a sparse weight. The verdicts are counted in
    `found`, by (weight, primitive, what is summed over, whether that is proof).
    """

    def __init__(self, elements: Elements):
        self.elements = elements
        self.found: Counter[tuple[str, str, str, bool]] = Counter()

    def __call__(self, program: Program, arguments: list) -> list:
        # `_step` enters calls itself, because it skips those none of whose operands is a weight
        return interpret(program, self._step, arguments, constant=_constant, enter=lambda _: None)

    def _step(self, equation: JaxprEqn, operands: list) -> list:
        """Return the numbers of an equation's results; None for results that are not followed."""
        if hasattr(equation.primitive, "plain") and all(x is None for x in operands):
            return [None] * len(equation.outvars)  # saves tracing the primitive's definition
        if (inner := _inner_program(equation)) is not None:
            return self(inner, operands)
        results = []
        if equation.primitive.name not in _CARRY_BOUNDS:
            operands = [None if _is_bound(x) else x for x in operands]
        if any(x is not None for x in operands):
            results = self._results(equation, operands)
        return [*results, *[None] * (len(equation.outvars) - len(results))]

    def _results(self, eqn: JaxprEqn, operands: list) -> list:
        """Apply the rule of the equation's primitive, and judge it if it is a product."""
        name, params = eqn.primitive.name, eqn.params
        first = operands[0]
        if name == "dot_general":
            contract, _ = params["dimension_numbers"]
            for x, summed in zip(operands, contract, strict=True):
                self._judge(name, x, summed)
        elif name == "sparse_product":
            self._judge(name, operands[1], (params["axis"],))
        elif name == "conv_general_dilated":
            # either operand can be the weight: the backward pass transposes convolutions. All axes
            # but batch (lhs) and output features (rhs), the first of a spec, are summed over
            dims = params["dimension_numbers"]
            self._judge(name, first, dims.lhs_spec[1:])
            self._judge(name, operands[1], dims.rhs_spec[1:])
        elif name == "cond":
            branches = [self(branch, operands[1:]) for branch in params["branches"]]
            return [
                x[0] if all(y is not None and np.array_equal(x[0], y) for y in x) else None
                for x in zip(*branches, strict=True)
            ]
        elif name == "scan":
            return self._scan(scan(eqn, operands))
        elif name == "while":
            # as in a scan, the carry is not followed; its weights are the ones closed over
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
            sources = [x for x in operands[: 2 if name == "mul" else 1] if x is not None]
            return [np.broadcast_to(x, _shape(eqn.outvars[0])) for x in sources[:1]]
        elif name in _BOUNDS:
            sources = [x for x in operands if not _is_bound(x, _BOUNDS[name])]
            if len(sources) == 1 and sources[0] is not None:
                return [np.broadcast_to(sources[0], _shape(eqn.outvars[0]))]
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
        """Walk the body for each step if it slices weights, else once."""
        # the carry is not followed: one pass over the body does not know its later values
        carry = [None] * len(loop.carry)
        steps = range(loop.length if any(x is not None for x in loop.sliced) else 1)
        slices = ([None if x is None else x[i] for x in loop.sliced] for i in steps)
        ys = [self(loop.body, [*loop.fixed, *carry, *values]) for values in slices]
        stacked = zip(*(y[len(carry) :] for y in ys), strict=True)
        whole = len(steps) == loop.length
        return carry + [
            np.stack(y) if whole and all(x is not None for x in y) else None for y in stacked
        ]

    def _judge(self, primitive: str, x: np.ndarray | None, summed: Sequence[int]) -> None:
        """Count the verdicts on a product that sums the operand `x` over the axes `summed`."""
        if x is None or not (x >= 0).any():
            return
        free = [a for a in range(x.ndim) if a not in summed]
        size = int(np.prod([x.shape[a] for a in summed]))
        rows = x.transpose(*free, *summed).reshape(-1, size)
        for weight, sums, ok in self.elements.judge(rows):
            self.found[weight, primitive, sums, ok] += 1


def _inner_program(equation: JaxprEqn) -> Program | None:
    """Return the program that an equation calls, also a `shard_map`; None for a sparse product."""
    if equation.primitive.name == "shard_map":
        return equation.params["jaxpr"]
    if equation.primitive.name == "sparse_product":
        return None
    return inner_program(equation)


def _constant(value: Any, aval: Any) -> np.ndarray | None:
    """Return the entry of a scalar constant by its sign, int[]; None for NaN and for arrays."""
    if aval.shape != () or not jnp.issubdtype(aval.dtype, np.number) or value != value:
        return None
    return np.asarray(_ZERO if value == 0 else _BELOW if value < 0 else _ABOVE)


def _is_bound(x: np.ndarray | None, *kinds: int) -> bool:
    """Check whether all entries are of these kinds; by default those of a nonzero constant."""
    kinds = kinds or (_BELOW, _ABOVE)
    return x is not None and x.size > 0 and x.flat[0] in kinds and bool(np.isin(x, kinds).all())


def _broadcast(x: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Return numbers as `lax.broadcast_in_dim` does, with the axes of x at `axes` of the shape."""
    alone = np.ones(len(shape), int)
    alone[[*axes]] = x.shape
    return np.broadcast_to(x.reshape(alone), shape)


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _merge(operands: list, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the numbers of a sum or selection: those of its only operand that is not all zero.

    None if another operand adds something to a weight or selects between different elements.
    """
    if any(x is None for x in operands):
        return None
    weights = [x for x in operands if (x != _ZERO).any()]
    same = all(np.array_equal(x, weights[0]) for x in weights)
    return np.broadcast_to((weights or operands)[0], shape) if same else None
