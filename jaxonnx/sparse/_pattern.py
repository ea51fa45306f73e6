"""The interface of a sparsity pattern, and the names of patterns in files.

A kind of sparsity is one subclass of `SparsityPattern` and one call of `register`.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._require import require
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._templates import Axes


class SparsityPattern(Protocol):
    """The interface of a sparsity pattern; a subclass is a pattern of another kind.

    Patterns are compared and hashed by value, as a frozen dataclass is. `axes` are always the
    (output, input) axes of a weight; all other axes are batch axes.
    """

    density: float
    """The greatest fraction of the weights that is kept."""
    transposable: bool = True
    """Whether the pattern holds along the output axis as well as along the input axis."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that files record, from which `register` makes the pattern."""

    @abstractmethod
    def misfit(self, shape: tuple[int, ...], axes: Axes) -> str:
        """Say why a weight of this shape cannot take the pattern; empty if it can."""

    @abstractmethod
    def search(self, w: jax.Array, axes: Axes) -> Any:
        """Find the best mask of a weight, under a trace, in the form that `expand` takes."""

    def expand(self, best: Any, axes: Axes) -> jax.Array:
        """Return the boolean mask from the result of `search`."""
        return best

    def share(self, w: jax.Array, best: Any, axes: Axes) -> jax.Array:
        """Return the share of sum |w| that the result of `search` keeps; 1 if the sum is 0."""
        return kept_share(w, self.expand(best, axes))

    @abstractmethod
    def groups(self, nonzero: np.ndarray, axes: Axes, along: int) -> tuple[np.ndarray, np.ndarray]:
        """Number the groups that a product over the axis `along` must sum as a whole.

        Returns:
          For each weight the number of its group, or -1 if it has none along this axis, and
          whether the kept weights break the pattern there.
        """

    def holds(self, mask: jax.Array | np.ndarray, axes: Axes) -> bool:
        """Check whether the nonzero entries have the pattern."""
        nonzero = np.asarray(mask) != 0
        required = axes if self.transposable else axes[1:]
        return not any(self.groups(nonzero, axes, along)[1].any() for along in required)

    def pack(self, w: np.ndarray, nonzero: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the kept weights, and their places as `uint8`: by default one bit per weight.

        Raises:
          SparsityError: the weight does not have the pattern along this axis.
        """
        return w[nonzero], np.packbits(nonzero.reshape(-1), bitorder="little")

    def unpack(
        self, values: jax.Array, indices: jax.Array, shape: tuple[int, ...], axis: int
    ) -> jax.Array:
        """Return the dense weight from the results of `pack`, under a trace."""
        nonzero = jnp.unpackbits(indices, count=math.prod(shape), bitorder="little") != 0
        # boolean indexing has no static shape: gather instead, from the running count of kept
        # weights, and from a 0 behind the values for those that are not kept
        padded = jnp.append(values, jnp.zeros(1, values.dtype))
        places = jnp.cumsum(nonzero, dtype=jnp.int32) - 1
        return padded[jnp.where(nonzero, places, len(values))].reshape(shape)

    def damage(
        self, values: np.ndarray, indices: np.ndarray, shape: tuple[int, ...], axis: int
    ) -> str:
        """Say why two arrays of a file cannot come from `pack`; empty if they can."""
        if indices.dtype != np.uint8 or indices.shape != (-(-math.prod(shape) // 8),):
            return f"{indices.size} bytes of indices do not have a bit for each of {list(shape)}"
        if values.shape != (ones := int(np.bitwise_count(indices).sum()),):
            return f"values of shape {values.shape} where {ones} are kept"
        return ""


def kept_share(w: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the share of sum |w| under the mask; 1 if the sum is 0."""
    size = jnp.abs(w.astype(jnp.float32))
    return ratio(jnp.sum(jnp.where(mask, size, 0)), jnp.sum(size))


def ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Return part / whole; 1 if the whole is 0."""
    # the inner `where` keeps 0/0 out of the branch that is not taken
    return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 1.0)


_FORMS: dict[str, tuple[str, Callable[[re.Match, bool], SparsityPattern | None]]] = {}
"""The arguments `expression` and `make` of `register`, by `form`."""


def register(
    form: str, expression: str, make: Callable[[re.Match, bool], SparsityPattern | None]
) -> None:
    """Register a kind of pattern, so that `pattern="..."` and files can name it.

    Args:
      form: what the names look like, for the error about a name that nothing matches.
      expression: a regular expression that matches the names in full.
      make: a function of the match and `transposable` that returns the pattern, or None if the name
        is not valid.
    """
    _FORMS[form] = expression, make


def parse(pattern: str | SparsityPattern, transposable: bool = True) -> SparsityPattern:
    """Return the pattern of a name like `"2:4"`; raise `SparsityError` for any other name."""
    if not isinstance(pattern, str):
        expected = "a name like '2:4' or a SparsityPattern, or a dict of these by weight"
        require("pattern", pattern, hasattr(pattern, "search"), expected, SparsityError)
        return pattern
    for expression, make in _FORMS.values():
        match = re.fullmatch(expression, pattern)
        if match and (parsed := make(match, transposable)) is not None:
            return parsed
    raise SparsityError(f"pattern {pattern!r} is not of the form {' or '.join(_FORMS)}")


def default_axes(ndim: int) -> Axes:
    """Return (-2, -1) for a matrix, (0, 1) for a convolution kernel in ONNX's (O, I, kH, kW)."""
    return (-2, -1) if ndim == 2 else (0, 1)


def check(w: Any, pattern: SparsityPattern, axes: Axes | None) -> Axes:
    """Return non-negative axes; raise `SparsityError` if the weight does not fit the pattern."""
    if w.ndim < 2 or not jnp.issubdtype(w.dtype, jnp.floating):
        raise SparsityError(
            f"the weight must be a floating-point matrix or kernel, got {w.dtype}{[*w.shape]}"
        )
    axes = default_axes(w.ndim) if axes is None else axes
    if not all(-w.ndim <= a < w.ndim for a in axes) or len({a % w.ndim for a in axes}) != 2:
        raise SparsityError(f"axes {axes} do not name two axes of a weight of rank {w.ndim}")
    axes = (axes[0] % w.ndim, axes[1] % w.ndim)
    if misfit := pattern.misfit(w.shape, axes):
        raise SparsityError(f"a weight of shape {list(w.shape)} cannot be {pattern}: {misfit}")
    return axes
