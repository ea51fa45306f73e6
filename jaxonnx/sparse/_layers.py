"""Which weights of a pytree become sparse, and why the others stay dense."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._display import import_pyplot
from jaxonnx._require import check_arguments
from jaxonnx.errors import InputError, SparsityError
from jaxonnx.sparse._pattern import SparsityPattern, default_axes, parse
from jaxonnx.sparse._templates import Axes

Patterns = str | SparsityPattern | Mapping[str, str | SparsityPattern]
"""A pattern, or patterns by name or regular expression (matched in full; the first counts)."""

Select = str | re.Pattern[str] | Iterable[str | re.Pattern[str]] | Callable[[str, Any], bool]
"""Names or regular expressions (matched in full), or a predicate of name and array."""


@dataclass(frozen=True)
class Layer:
    """One array of the parameters. `reason` says why it stays dense; empty if it becomes sparse."""

    name: str
    shape: tuple[int, ...]
    axes: Axes | None
    reason: str
    pattern: SparsityPattern | None = None
    """The pattern that it is given; None if it stays dense."""


class Goal(NamedTuple):
    """The pattern that a weight gets, and its (output, input) axes."""

    pattern: SparsityPattern
    axes: Axes


def goals(report: Iterable[Layer]) -> dict[str, Goal]:
    """Return the goal of each layer of a report that is sparse or becomes so, by name."""
    return {
        x.name: Goal(x.pattern, x.axes)
        for x in report
        if x.pattern is not None and x.axes is not None
    }


@dataclass(frozen=True)
class Sparsity:
    """The record of sparse weights that a model carries."""

    layers: tuple[Layer, ...]
    """The weights, with their axes and patterns."""
    method: str = ""
    """How they were trained, by the name that `jaxonnx.train` has for it; empty if not recorded."""

    @property
    def patterns(self) -> Counter[SparsityPattern]:
        """The number of weights of each pattern."""
        return Counter(goal.pattern for goal in goals(self.layers).values())

    def __str__(self) -> str:
        counts = self.patterns.most_common()
        if len(counts) == 1:
            return str(counts[0][0])
        return ", ".join(f"{pattern} ({count})" for pattern, count in counts)


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
    pattern: Patterns = "2:4",
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
      pattern, transposable: as in `mask`; or patterns by name, `{"body.*": "2:4", "head": "1:4"}`,
        of which the first that matches a weight counts. Weights that none matches stay dense.
      select: names or regular expressions, matched in full, or a predicate of (name, array); by
        default every matrix and convolution kernel that the pattern fits.
      exclude: names that stay dense, with the reason to report (a grouped convolution, an
        embedding: what the array alone does not show).
      axes: the (output, input) axes as in `mask`, or a function of (name, array).

    Raises:
      SparsityError: nothing is left to be sparse, or a name or expression matches nothing.
    """
    check_arguments(layers, locals())
    leaves = [(name_of(p), x) for p, x in jax.tree_util.tree_leaves_with_path(params)]
    chosen = _select_names(select, leaves)
    expected = match_patterns(pattern, transposable, leaves)
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
        elif name not in chosen or name not in expected:
            reason = "not selected"
        else:
            where = (where[0] % len(shape), where[1] % len(shape))
            reason = expected[name].misfit(shape, where)
        fits = (None, None) if reason else (where, expected[name])
        report.append(Layer(name, shape, fits[0], reason, fits[1]))
    if all(layer.reason for layer in report):
        dense = "; ".join(f"{x.name}: {x.reason}" for x in report) or "there are no parameters"
        names = " or ".join(map(str, dict.fromkeys(expected.values())))
        raise SparsityError(f"no weight can be {names}: {dense}")
    return report


def match_patterns(
    patterns: Patterns, transposable: bool, leaves: list[tuple[str, Any]]
) -> dict[str, SparsityPattern]:
    """Return the pattern of each leaf that `patterns` gives one, by name.

    Raises:
      SparsityError: a string that names no pattern, or a name or expression that matches nothing.
    """
    if not isinstance(patterns, Mapping):
        return dict.fromkeys((name for name, _ in leaves), parse(patterns, transposable))
    matched: dict[str, SparsityPattern] = {}
    for selector, pattern in patterns.items():
        parsed = parse(pattern, transposable)
        for name in sorted(_select_names([selector], leaves)):
            matched.setdefault(name, parsed)  # the first expression that matches counts
    return matched


def _select_names(select: Select | None, leaves: list[tuple[str, Any]]) -> set[str]:
    """Return the names of the leaves that `select` chooses; None chooses all."""
    if select is None:
        return {name for name, _ in leaves}
    if callable(select):
        return {name for name, leaf in leaves if select(name, leaf)}
    chosen = set()
    for selector in [select] if isinstance(select, str | re.Pattern) else select:
        matches = {n for n, _ in leaves if n == selector or re.fullmatch(selector, n)}
        if not matches:
            raise SparsityError(
                f"{selector!r} selects no parameter; there are {', '.join(n for n, _ in leaves)}"
            )
        chosen |= matches
    return chosen


# The record of sparse weights, for weights that are sparse already.

T = TypeVar("T")


def record(model: T, pattern: Patterns = "2:4", *, transposable: bool = True, **choice: Any) -> T:
    """Return a model that records which of its weights have a pattern.

    A saved file contains the record. `save("sparse.npz")` needs it to pack weights, and `verify` to
    know what to prove. `jaxonnx.train` records the weights that it trains; call this for weights
    from a loop of your own or from another program.

    >>> from jaxonnx import demo, sparse
    >>> model = demo.model()
    >>> choice = {"select": "12.weight", **model.sparsity_options()}
    >>> model = model.replace(params=sparse.prune(model.params, **choice))
    >>> sparsity = sparse.record(model).sparsity
    >>> print(sparsity, *[layer.name for layer in sparsity.layers])
    2:4 transposable 12.weight

    Args:
      model: a `jaxonnx.Model`; it stays as it is.
      pattern, transposable: as in `layers`.
      choice: `select`, `exclude` and `axes` as in `layers`. Weights that `select` names must have
        the pattern; by default those that have it are recorded.

    Raises:
      SparsityError: no weight has the pattern, or one that was selected has not.
    """
    source: Any = model
    if not hasattr(source, "sparsity_options"):
        raise InputError(f"record takes a model (jaxonnx.load(path)), got {type(model).__name__}")
    choice = source.sparsity_options() | choice
    report = layers(source.params, pattern, transposable=transposable, **choice)
    expected = goals(report)
    sparse = {
        name: goal.pattern for name, goal in expected.items() if has(source.params[name], *goal)
    }
    dense = [f"{name}: not {goal.pattern}" for name, goal in expected.items() if name not in sparse]
    named = choice.get("select") is not None or isinstance(pattern, Mapping)
    if not sparse or (dense and named):
        raise SparsityError(
            f"{', '.join(dense)}; sparse.prune makes weights so, and "
            "jaxonnx.train(..., sparsity=) trains them"
        )
    return source.with_sparsity(sparse, **choice | {"select": None})


def has(w: Any, pattern: SparsityPattern, axes: Any) -> bool:
    """Check whether a weight has a pattern, and uses at least 80 % of the places that it allows.

    A weight that is zero, or nearly so, has every pattern without having been pruned to it.
    """
    w = np.asarray(w)
    if pattern.misfit(w.shape, axes):
        return False
    return np.count_nonzero(w) > 0.8 * pattern.density * w.size and pattern.holds(w, axes)


_COLUMNS = 4


def plot_masks(source: Any, layers: Iterable[Layer] | None = None) -> Any:
    """Draw the kept weights, outputs downwards, inputs to the right; return the figure.

    Of a kernel the first position is drawn. The title has the share of kept weights.

    Args:
      source: a model that records sparse weights (`jaxonnx.Model`), or parameters.
      layers: the weights to be drawn, as `layers(params)` reports them; by default those that the
        model records.

    Raises:
      SparsityError: no layer is sparse.
      Error: matplotlib is not installed.
    """
    check_arguments(plot_masks, locals())
    pyplot = import_pyplot()
    recorded = getattr(source, "sparsity", None)
    expected = goals((recorded.layers if recorded else ()) if layers is None else layers)
    if not expected:
        raise SparsityError("no layer is sparse: there is no mask to draw")
    aliases = getattr(source, "aliases", {})
    weights = by_name(getattr(source, "params", source))
    columns = min(len(expected), _COLUMNS)
    rows = -(-len(expected) // columns)
    size = (3 * columns, 3 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for panel in axes.flat[len(expected) :]:
        panel.set_axis_off()
    for panel, (name, goal) in zip(axes.flat, expected.items(), strict=False):
        nonzero = np.moveaxis(np.asarray(weights[name]) != 0, goal.axes, (-2, -1))
        panel.imshow(
            nonzero.reshape(-1, *nonzero.shape[-2:])[0], cmap="Greys", interpolation="nearest"
        )
        title = f"{aliases.get(name, name)}\n{goal.pattern}, {nonzero.mean():.0%} kept"
        panel.set_title(title, fontsize=8)
        panel.set(xlabel="input", ylabel="output")
    return figure
