"""Proof, from the program itself, that products with a sparse weight contract along its N:M axis.

The jaxprs of the forward pass and of its vjp are walked. Every array that is a rearrangement of
sparse weights (transposed, reshaped, sliced, flipped, concatenated, scaled...) is followed as an
array of integers that say which weight element stands where. At each matrix product and convolution
these integers say which elements the product sums over, and thus whether it sums over whole groups
of M along the one blocked axis of the weight, the other, or neither.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._require import check_arguments
from jaxonnx.errors import InputError, SparsityError
from jaxonnx.sparse._layers import (
    Goal,
    Layer,
    Patterns,
    Sparsity,
    by_name,
    goals,
    match_patterns,
    name_of,
)
from jaxonnx.sparse._layers import layers as report
from jaxonnx.sparse._pattern import SparsityPattern
from jaxonnx.sparse._walk import Walk


@dataclass(frozen=True)
class Product:
    """A kind of matrix product or convolution with a sparse weight, and how often it occurs."""

    weight: str
    pattern: SparsityPattern
    """The pattern of the weight."""
    primitive: str
    part: str
    """`"forward"` or `"backward"`."""
    sums: str
    """The axis of the weight that the product sums over, `"axis 1"`, or why this is not a proof."""
    ok: bool
    """Whether the weight has its pattern along the axis that the product sums over."""
    count: int
    """The number of such products in the program."""


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; printing it gives a table."""

    products: tuple[Product, ...]
    failures: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names that the table shows in place of the names of weights."""

    def __str__(self) -> str:
        head = ("weight", "product", "pass", "sums over", "", "times")
        rows = [
            (self.aliases.get(p.weight, p.weight), p.primitive, p.part, p.sums,
             str(p.pattern) if p.ok else "FAILS", str(p.count))
            for p in self.products
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join([*lines, *self.failures])


def verify(
    function: Any,
    params: Any = None,
    *inputs: Any,
    layers: Iterable[Layer] | None = None,
    pattern: Patterns | None = None,
    transposable: bool = True,
) -> Verification:
    """Prove that each product with a sparse weight is N:M along that product's contraction axis.

    >>> from jaxonnx import sparse
    >>> w = jnp.arange(16.0).reshape(4, 4)
    >>> params = {"w": jnp.where(sparse.mask(w), w, 0)}
    >>> print(verify(lambda params, x: x @ params["w"].T, params, jnp.ones((2, 4))))
    weight  product      pass      sums over                    times
    w       dot_general  forward   axis 1     2:4 transposable  1
    w       dot_general  backward  axis 0     2:4 transposable  1

    Args:
      function: `function(params, *inputs)`, the forward pass; it is traced, not run. Or, alone, a
        model that has `apply`, `params`, and `inputs` with their `shape` and `dtype`, as a
        `jaxonnx.Model` has; dynamic dimensions are then taken as 2. Integer weights of a quantized
        file are proved by their values in floating point, which are 0 where they are.
      params: a pytree with the concrete weights.
      inputs: arrays or `jax.ShapeDtypeStruct`; the vjp is taken for parameters and inputs.
      layers: which weights are sparse along which axes and how, as `layers(params)` reports it. By
        default those that the model records (`sparsity`), or else those that the pattern fits and
        that have as many zeros as it asks for.
      pattern, transposable: what to prove, as in `layers`; by default what the model or `layers`
        say, or else "2:4". A one-axis pattern is proved for the forward pass only.

    Returns:
      The products found; `str()` of it is a table.

    Raises:
      SparsityError: a weight has too many nonzeros in a group along a product's contraction axis,
        is summed over something other than its groups, or is found in no product at all (because
        something was added to it, say). The message has the table.
    """
    check_arguments(verify, locals())
    if params is None and not hasattr(function, "inputs"):
        raise InputError(
            "verify takes a model, or a function and its parameters, got "
            f"{type(function).__name__}; jaxonnx.load(path) makes a model of a file"
        )
    aliases = getattr(function, "aliases", {})
    function = getattr(function, "with_float_weights", lambda: function)()
    recorded = getattr(function, "sparsity", None) if layers is None and pattern is None else None
    layers = recorded.layers if recorded else layers
    if params is None:
        inputs = tuple(
            jax.ShapeDtypeStruct([d if isinstance(d, int) else 2 for d in x.shape], x.dtype)
            for x in function.inputs
        )
        function, params = function.apply, function.params
    if layers is None:
        layers = _find_sparse(params, "2:4" if pattern is None else pattern, transposable)
    elif pattern is not None or not transposable:
        leaves = [*by_name(params).items()]
        patterns = match_patterns("2:4" if pattern is None else pattern, transposable, leaves)
        layers = [replace(x, pattern=patterns.get(x.name)) for x in layers if x.axes is not None]
    layers = [*layers]
    expected = goals(layers)
    elements = _Elements(expected, params)

    def shape_of(x):
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))

    arguments = jax.tree.map(shape_of, (params, *inputs))
    # inputs of the function hold no sparse weight: None
    numbers = [elements.numbers.get(name_of(path))
               for path, _ in jax.tree_util.tree_leaves_with_path(params)]  # fmt: skip
    numbers += [None] * (len(jax.tree.leaves(arguments)) - len(numbers))

    def products(f) -> Counter:
        walk = Walk(elements)
        closed = jax.make_jaxpr(f)(*arguments)
        walk(closed, numbers)
        return walk.found

    forward, backward = products(function), Counter()
    # the vjp contains the forward pass: subtract its products, which `Counter` counts
    if any(goal.pattern.transposable for goal in expected.values()):
        backward = products(lambda *a: _pull_back_ones(function, *a)) - forward
    rows = tuple(
        Product(weight, expected[weight].pattern, primitive, part, sums, ok, count)
        for part, counter in (("forward", forward), ("backward", backward))
        for (weight, primitive, sums, ok), count in counter.items()
        if part == "forward" or expected[weight].pattern.transposable
    )
    proved = {p.weight for p in rows}
    failures = [f"{p.weight}: {p.primitive} ({p.part}) sums over {p.sums}"
                for p in rows if not p.ok]  # fmt: skip
    failures += [f"{n}: found in no product" for n in elements.numbers if n not in proved]
    result = Verification(rows, tuple(failures), aliases)
    if failures:
        patterns = Sparsity(tuple(layers))
        raise SparsityError(f"the weights are not proved to be {patterns}:\n{result}")
    return result


def _find_sparse(params: Any, patterns: Patterns, transposable: bool) -> list[Layer]:
    """Report the layers that have at least as many zeros as their pattern asks for.

    Raises:
      SparsityError: no weight has.
    """
    matched = match_patterns(patterns, transposable, [*by_name(params).items()])

    def has_zeros(name: str, w: Any) -> bool:
        fits = name in matched and np.ndim(w) > 1
        return fits and bool(np.mean(np.asarray(w) == 0) >= 1 - matched[name].density)

    if not any(has_zeros(name, w) for name, w in by_name(params).items()):
        listed = " or ".join(map(str, dict.fromkeys(matched.values())))
        raise SparsityError(
            f"nothing is sparse: no weight has the zeros of {listed}; jaxonnx.train(..., "
            "sparsity=...) and sparse.prune make them"
        )
    return report(params, patterns, transposable=transposable, select=has_zeros)


def _pull_back_ones(function, *arguments):
    """Return the vjp of a function at its arguments, for cotangents of ones."""

    def cotangent(y):
        if jnp.issubdtype(y.dtype, jnp.inexact):
            return jnp.ones_like(y)
        return np.zeros(y.shape, jax.dtypes.float0)

    out, pull = jax.vjp(function, *arguments)
    return pull(jax.tree.map(cotangent, out))


class _Elements:
    """The elements of all sparse weights, numbered consecutively: see the protocol in `_walk`.

    Attributes:
      numbers: an int array shaped like the weight with the numbers of its elements, by name.
    """

    def __init__(self, expected: Mapping[str, Goal], params: Any):
        self.numbers: dict[str, np.ndarray] = {}
        leaves = by_name(params)
        self._weights: list[_Weight] = []
        count = sum(np.size(leaves[name]) for name in expected if name in leaves)
        kind = np.int32 if count < 2**31 else np.int64
        begins = [0]
        for name, goal in expected.items():
            if name not in leaves:
                raise SparsityError(f"the parameters have no {name!r}")
            used = np.asarray(leaves[name]) != 0
            end = begins[-1] + used.size
            self.numbers[name] = np.arange(begins[-1], end, dtype=kind).reshape(used.shape)
            self._weights.append(_Weight(name, goal, used))
            begins.append(end)
        if not self.numbers:
            raise SparsityError("no layer is sparse: there is nothing to verify")
        self._begins = np.asarray(begins, kind)

    def _owners(self, numbers: np.ndarray) -> np.ndarray:
        """Return the index of the weight of each number; -1 for negative numbers."""
        return np.searchsorted(self._begins, numbers, "right") - 1

    def weights(self, operands: list) -> list[str]:
        """Return the names of the weights whose elements are among the operands' numbers."""
        present = [x[x >= 0] for x in operands if x is not None]
        return [self._weights[k].name for k in np.unique(self._owners(np.concatenate(present)))]

    def judge(self, rows: np.ndarray) -> list[tuple[str, str, bool]]:
        """Judge a product that sums over each row of numbers [free, summed], for each weight.

        Rows are judged without the entries that are zero, another array's or another weight's:
        terms of these do not add to a group.
        """
        lowest, highest = self._owners(np.asarray([rows.min(), rows.max()])).tolist()
        if lowest == highest:  # weights are numbered consecutively: all entries are of this one
            return [self._weights[lowest].judge(rows - self._begins[lowest])]
        owners = self._owners(rows)
        verdicts = []
        for k in np.unique(owners[owners >= 0]).tolist():
            is_own = owners == k
            has_own = is_own.any(axis=1)
            elements = np.where(is_own, rows - self._begins[k], _NO_ELEMENT)[has_own]
            verdicts.append(self._weights[k].judge(elements))
        return verdicts


_NO_ELEMENT = -1
"""An entry that is not an element of the weight. Lookup tables by element have one more entry at
their end, which the index -1 reads."""


class _Weight:
    """A sparse weight; its elements are flat indices into it.

    Args:
      name: of the weight.
      goal: its pattern and axes.
      used: which elements are nonzero, shaped like the weight.
    """

    def __init__(self, name: str, goal: Goal, used: np.ndarray):
        self.name, self._goal, self._used = name, goal, used

    @cached_property
    def _groups(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each of the two axes, each element's group and whether it keeps too many weights."""
        pattern, axes = self._goal
        groups = [pattern.groups(self._used, axes, along) for along in axes]
        # the last entry is that of _NO_ELEMENT
        return [
            (np.append(ids.ravel(), -1), np.append(full.ravel(), False)) for ids, full in groups
        ]

    @cached_property
    def _sizes(self) -> list[np.ndarray]:
        """For each of the two axes, the number of elements of each group."""
        return [np.bincount(ids[ids >= 0], minlength=1) for ids, _ in self._groups]

    def judge(self, rows: np.ndarray) -> tuple[str, str, bool]:
        """Return the verdict on a product that sums over each row of elements: see `_Elements`."""
        for side in (1, 0):
            # the first row alone mostly rules out the wrong axis, without work for all rows
            if self._has_whole_groups(rows[:1], side) and self._has_whole_groups(rows, side):
                full = self._groups[side][1]
                is_full = bool(full.any() and full[rows].any())
                axis = f"axis {self._goal.axes[side]}"
                return self.name, f"{axis}, groups too full" if is_full else axis, not is_full
        return self.name, "no whole groups", False

    def _has_whole_groups(self, rows: np.ndarray, side: int) -> bool:
        """Check that no row has only a part of a group, or an element twice."""
        # run lengths of the sorted group numbers of all rows at once
        groups = np.sort(self._groups[side][0][rows], axis=1)
        starts = np.ones(groups.shape, bool)
        starts[:, 1:] = groups[:, 1:] != groups[:, :-1]
        starts = np.flatnonzero(starts)
        numbers = groups.reshape(-1)[starts]
        lengths = np.diff(starts, append=groups.size)
        is_whole = bool((lengths == self._sizes[side][numbers])[numbers >= 0].all())
        return is_whole and self._has_distinct_elements(rows)

    def _has_distinct_elements(self, rows: np.ndarray) -> bool:
        """Check that no row has an element twice."""
        is_used = np.zeros(self._used.size + 1, bool)
        is_used[rows] = True
        if np.count_nonzero(is_used) == rows.size:  # distinct in all rows together, without a sort
            return True
        ordered = np.sort(rows, axis=1)
        return not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != _NO_ELEMENT)).any()
