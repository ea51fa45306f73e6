"""The record of what is sparse, for weights that are sparse already."""

from typing import Any, TypeVar

import numpy as np

from jaxonnx.errors import SparsityError
from jaxonnx.sparse._layers import layers
from jaxonnx.sparse._pattern import SparsityPattern, parse

T = TypeVar("T")


def record(
    model: T, pattern: str | SparsityPattern = "2:4", *, transposable: bool = True, **choice: Any
) -> T:
    """Return a model that records which of its weights have a pattern.

    Files hold the record, so that weights can be packed (`save("sparse.npz")`), and `verify` knows
    what to prove. `jaxonnx.train` records by itself; this is for weights of a loop of your own, or
    of another program.

    >>> from jaxonnx import demo, sparse
    >>> model = demo.model()
    >>> choice = {"select": "12.weight", **model.sparsity_options()}
    >>> model = model.replace(params=sparse.prune(model.params, **choice))
    >>> pattern, layers = sparse.record(model).sparsity
    >>> print(pattern, *[layer.name for layer in layers])
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
    goal = parse(pattern, transposable)
    choice = source.sparsity_options() | choice
    fitting = [x for x in layers(source.params, goal, **choice) if x.axes is not None]
    sparse = [x.name for x in fitting if has(source.params[x.name], goal, x.axes)]
    dense = [x.name for x in fitting if x.name not in sparse]
    if not sparse or (dense and choice.get("select") is not None):
        raise SparsityError(
            f"{', '.join(dense)}: not {goal}; sparse.prune makes weights so, and "
            "jaxonnx.train(..., sparsity=) trains them"
        )
    return source.with_sparsity(goal, **choice | {"select": sparse})


def has(w: Any, pattern: SparsityPattern, axes: Any) -> bool:
    """Check whether a weight has a pattern and is neither zero nor nearly so."""
    w = np.asarray(w)
    if pattern.misfit(w.shape, axes):
        return False
    return np.count_nonzero(w) > 0.8 * pattern.density * w.size and pattern.holds(w, axes)
