"""Which weights of a pytree become sparse, and why the others stay dense."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxonnx.errors import SparsityError
from jaxonnx.sparse._pattern import SparsityPattern, default_axes, parse
from jaxonnx.sparse._templates import Axes

Select = str | re.Pattern | Iterable[str | re.Pattern] | Callable[[str, Any], bool]
"""Names or regular expressions (matched in full), or a predicate of name and array."""


@dataclass(frozen=True)
class Layer:
    """One array of the parameters. `reason` says why it stays dense; empty if it becomes sparse."""

    name: str
    shape: tuple[int, ...]
    axes: Axes | None
    reason: str


def name_of(path: tuple) -> str:
    """Return the name of a leaf of a pytree: its keys joined by dots."""
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]  # the box of an nnx variable, which optimizers see with and without
    return jax.tree_util.keystr(path, simple=True, separator=".")


def by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by name."""
    return {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def layers(
    params: Any,
    pattern: str | SparsityPattern = "2:4",
    *,
    transposable: bool = True,
    select: Select | None = None,
    exclude: Mapping[str, str] | None = None,
    axes: Axes | Callable[[str, Any], Axes | None] | None = None,
) -> list[Layer]:
    """Report for every array of `params` whether it becomes sparse, or why it stays dense.

    >>> import numpy as np
    >>> for layer in layers({"w": np.ones((8, 4)), "b": np.ones(8)}):
    ...     print(layer.name, layer.axes or layer.reason)
    b no matrix or kernel
    w (0, 1)

    Args:
      params: any pytree of arrays: a dict, an nnx state, a dataclass.
      pattern, transposable: as in `mask`.
      select: names or regular expressions, matched in full, or a predicate of (name, array); by
        default every matrix and convolution kernel that the pattern fits.
      exclude: names that stay dense, with the reason to report (a grouped convolution, an
        embedding: what the array alone does not show).
      axes: the (output, input) axes as in `mask`, or a function of (name, array).

    Raises:
      SparsityError: nothing is left to be sparse, or a name or expression matches nothing.
    """
    pattern = parse(pattern, transposable)
    leaves = [(name_of(p), x) for p, x in jax.tree_util.tree_leaves_with_path(params)]
    chosen = _select_names(select, leaves)
    exclude = exclude or {}
    report = []
    for name, leaf in leaves:
        shape = tuple(jnp.shape(leaf))
        where = axes(name, leaf) if callable(axes) else axes
        if where is None and len(shape) >= 2:
            where = default_axes(len(shape))
        if len(shape) < 2 or where is None:
            reason = "no matrix or kernel"
        elif not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            reason = "not floating point"
        elif name in exclude:
            reason = exclude[name]
        elif name not in chosen:
            reason = "not selected"
        else:
            where = (where[0] % len(shape), where[1] % len(shape))
            reason = pattern.misfit(shape, where)
        report.append(Layer(name, shape, None if reason else where, reason))
    if all(layer.reason for layer in report):
        dense = "; ".join(f"{x.name}: {x.reason}" for x in report) or "there are no parameters"
        raise SparsityError(f"no weight can be {pattern}: {dense}")
    return report


def _select_names(select: Select | None, leaves: list[tuple[str, Any]]) -> set[str]:
    if select is None:
        return {name for name, _ in leaves}
    if callable(select):
        return {name for name, leaf in leaves if select(name, leaf)}
    chosen = set()
    for wanted in [select] if isinstance(select, str | re.Pattern) else select:
        matches = {n for n, _ in leaves if n == wanted or re.fullmatch(wanted, n)}
        if not matches:
            raise SparsityError(
                f"{wanted!r} selects no parameter; there are {', '.join(n for n, _ in leaves)}"
            )
        chosen |= matches
    return chosen
