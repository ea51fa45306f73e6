"""Products around an attention, with its heads as an axis of their own.

A graph multiplies by one matrix for all heads, adds a bias, cuts query, key and value out of the
result and splits the last axis of each; it merges the heads again before the next product. A TPU
keeps the last two axes of an array in tiles of (8, 128), so that splitting or merging them copies
it, and its gradient. A product gives whatever axes its matrix has: to split those copies a weight.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxonnx._jaxpr import bind_equation, interpret

# The rewrite interprets a jaxpr with lazy values: a reshape or a product is recorded
# (`_MergedAxes`, `_Product`), and computed only where an equation needs the array. So a split of
# the last axis that follows a product becomes a split of its weight, which is smaller than the
# activations. An equation that no rule matches gets arrays, as in the original program: a missed
# pattern costs speed only. The whole product is computed at most once (`_once`), if any of its
# columns are needed unsplit.


def separate_heads(function: Callable) -> Callable:
    """Rewrite a function so that it splits heads by reshaping weights, not activations."""

    def evaluate(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        results = interpret(closed, _step, jax.tree.leaves(args), enter=lambda _: None)
        return jax.tree.unflatten(jax.tree.structure(shape), map(_array, results))

    return evaluate


@dataclass(frozen=True, eq=False)
class _LazyReshape:
    """A lazy reshape of `value`."""

    value: Any
    shape: tuple[int, ...]

    def array(self) -> Any:
        return self.value.reshape(self.shape)


class _MergedAxes(_LazyReshape):
    """A lazy reshape that merges all axes before the last (rows), or the last two (heads)."""


class _Row(_LazyReshape):
    """A lazy broadcast of a vector to (1, ..., 1, n)."""


@dataclass(frozen=True, eq=False)
class _Product:
    """A lazy product: some columns of x @ w + bias, with leading axes `lead`.

    Attributes:
      x: the rows, of any shape (..., K).
      w: (K, M).
      bias: (M,), or None.
      lead: the shape of the product before its last axis.
      columns: which columns of w.
      whole: returns the product with all columns, computed at its first call.
      params: the parameters of the `dot_general` besides its dimension numbers.
    """

    x: Any
    w: Any
    bias: Any
    lead: tuple[int, ...]
    columns: slice
    whole: Callable[[], Any]
    params: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.lead, self.columns.stop - self.columns.start

    @property
    def is_whole(self) -> bool:
        return self.columns == slice(0, self.w.shape[1])

    def array(self) -> Any:
        return self.whole() if self.is_whole else self.whole()[..., self.columns]

    def split(self, lead: tuple[int, ...], heads: int) -> Any:
        """Compute the product as (*lead, heads, M / heads), by splitting the weight."""
        x = self.x.reshape(*lead, len(self.w))
        w = self.w[:, self.columns].reshape(len(self.w), heads, -1)
        y = lax.dot_general(x, w, (((len(lead),), (0,)), ((), ())), **self.params)
        return y if self.bias is None else y + self.bias[self.columns].reshape(heads, -1)


def _array(value: Any) -> Any:
    """Compute a lazy value; return an array as it is."""
    return value.array() if isinstance(value, _LazyReshape | _Product) else value


def _step(equation: JaxprEqn, inputs: list) -> list:
    """Apply the rule of an equation to lazy inputs; without one, evaluate it on arrays."""
    rule = _RULES.get(equation.primitive.name)
    if rule is not None and (results := rule(equation, *inputs)) is not None:
        return [results]
    return bind_equation(equation, [*map(_array, inputs)])


# A rule takes an equation and lazy inputs, and returns a result, lazy or not, or None if it does
# not match.


def _dot_general(equation: JaxprEqn, x: Any, w: Any) -> Any:
    """Record a matrix product; one whose rows merge heads contracts both axes of a split weight."""
    params = dict(equation.params)
    numbers = params.pop("dimension_numbers")
    if numbers != (((1,), (0,)), ((), ())) or len(x.shape) != 2 or len(w.shape) != 2:
        return None
    w = _array(w)
    if isinstance(x, _MergedAxes) and x.value.shape[-1] != x.shape[-1]:  # of the last two axes
        rank, split = x.value.ndim, w.reshape(*x.value.shape[-2:], -1)
        y = lax.dot_general(x.value, split, (((rank - 2, rank - 1), (0, 1)), ((), ())), **params)
        return y.reshape(x.shape[0], w.shape[1])
    whole = _once(lambda: lax.dot_general(_array(x), w, numbers, **params))
    rows = x.value if isinstance(x, _MergedAxes) else _array(x)
    return _Product(rows, w, None, x.shape[:1], slice(0, w.shape[1]), whole, params)


def _reshape(equation: JaxprEqn, x: Any) -> Any:
    """Split the heads of a lazy product, or record a reshape that merges rows or heads."""
    shape = (*equation.params["new_sizes"],)
    *lead, last = shape
    if equation.params["dimensions"] is not None or not lead:
        return None
    if isinstance(x, _Product):
        if last == x.shape[-1] and x.is_whole:
            return replace(x, lead=(*lead,), whole=_once(lambda: x.array().reshape(shape)))
        splits = len(lead) > 1 and lead[-1] * last == x.shape[-1]
        return x.split((*lead[:-1],), lead[-1]) if splits else None
    if isinstance(x, _MergedAxes):
        return replace(x, shape=shape) if last == x.shape[-1] else None
    if isinstance(x, _Row):
        return None
    before = np.shape(x)
    merges_heads = len(before) > 3 and (*lead,) == before[:-2]
    merges_rows = len(before) > 2 and len(lead) == 1 and last == before[-1]
    return _MergedAxes(x, shape) if merges_heads or merges_rows else None


def _broadcast(equation: JaxprEqn, x: Any, *sizes: Any) -> Any:
    """Record the broadcast of a bias to (1, ..., 1, n)."""
    shape, axes = equation.params["shape"], equation.params["broadcast_dimensions"]
    before = np.shape(_array(x))
    is_row = not sizes and len(before) == 1 and axes == (len(shape) - 1,) and prod(shape[:-1]) == 1
    return _Row(_array(x), shape) if is_row and shape[-1:] == before else None


def _add(equation: JaxprEqn, a: Any, b: Any) -> Any:
    """Add a bias to a lazy product."""
    y, row = (b, a) if isinstance(b, _Product) else (a, b)
    if not (isinstance(y, _Product) and isinstance(row, _Row) and y.is_whole):
        return None
    if y.bias is not None or row.shape[-1] != y.shape[-1]:
        return None
    return replace(y, bias=row.value, whole=_once(lambda: y.array() + row.array()))


def _slice(equation: JaxprEqn, x: Any) -> Any:
    """Take columns of a lazy product: query, key or value."""
    if not isinstance(x, _Product) or equation.params["strides"] is not None:
        return None
    *starts, start = equation.params["start_indices"]
    *ends, end = equation.params["limit_indices"]
    if any(starts) or (*ends,) != x.lead:
        return None
    return replace(x, columns=slice(x.columns.start + start, x.columns.start + end))


def _once(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls `function` at its first call, and returns that result again."""
    results: list = []

    def call_once():
        if not results:
            results.append(function())
        return results[0]

    return call_once


_RULES: dict[str, Callable] = {
    "add": _add,
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot_general,
    "reshape": _reshape,
    "slice": _slice,
}
