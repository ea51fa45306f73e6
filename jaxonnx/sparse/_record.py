"""The record of sparse weights, for weights that are sparse already."""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from jaxonnx.errors import InputError, SparsityError
from jaxonnx.sparse._layers import Patterns, goals, layers
from jaxonnx.sparse._pattern import SparsityPattern

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
    wanted = goals(report)
    sparse = {
        name: goal.pattern for name, goal in wanted.items() if has(source.params[name], *goal)
    }
    dense = [f"{name}: not {goal.pattern}" for name, goal in wanted.items() if name not in sparse]
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
