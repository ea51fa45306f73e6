"""The interface of a sparsity pattern, and the names of patterns in files.

A kind of sparsity is one subclass of `SparsityPattern` and one call of `register`. `mask` gives the
mask of a pattern for one weight, which is stored as one bit per weight.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxonnx._arrays import like, on_auto_axes, whole
from jaxonnx._require import check_arguments, require
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
    is_fixed: bool = False
    """Whether masks can only be those of the initial weights, as `sparse.fixed_mask` has them."""

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


@dataclass(frozen=True)
class Zeros(SparsityPattern):
    """The zeros that a weight has, as of pruning without a pattern."""

    density = 1.0
    transposable = False
    is_fixed = True

    @property
    def name(self) -> str:
        return "zeros"

    def __str__(self) -> str:
        return self.name

    def misfit(self, shape: tuple[int, ...], axes: Axes) -> str:
        return ""

    def search(self, w: jax.Array, axes: Axes) -> jax.Array:
        return w != 0

    def groups(self, nonzero: np.ndarray, axes: Axes, along: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(nonzero.shape, -1, np.int32), np.zeros(nonzero.shape, bool)


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
      form: the form of the names, for the error about a name that nothing matches.
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


register("zeros", "zeros", lambda match, transposable: Zeros())


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


def mask(
    w: jax.Array | np.ndarray,
    pattern: str | SparsityPattern = "2:4",
    *,
    transposable: bool = True,
    axes: Axes | None = None,
) -> jax.Array:
    """Find the mask of the pattern that keeps the most of sum |w| in every block.

    2:4 transposable is exact; ties go to the template that comes first in `templates()`. Other
    transposable N:M patterns are exact up to M = 8 but for ties and rounding, and within 0.1 % of
    the optimum beyond (`jaxonnx.sparse._nm`). A one-axis mask is exact; ties go to the lower
    index.

    >>> w = jnp.array([[4.0, 3, 2, 1], [3, 4, 1, 2], [1, 2, 3, 4], [2, 1, 4, 3]])
    >>> print(mask(w).astype(int))
    [[1 1 0 0]
     [1 1 0 0]
     [0 0 1 1]
     [0 0 1 1]]

    Args:
      w: floating-point weight. Blocks lie over the two `axes`; every other axis (kernel positions,
        leading batch axes) is a batch axis.
      pattern: "N:M" with 0 < N < M <= 32, or any `SparsityPattern`.
      transposable: N:M along both axes, so that the weight and its transpose are both N:M along
        their contraction; otherwise along the input axis only.
      axes: the (output, input) axes. By default (-2, -1) for rank 2 and (0, 1), the layout of ONNX
        and PyTorch convolutions, above. A Flax kernel (in, out) is `axes=(1, 0)`, its convolution
        (kH, kW, I, O) is `axes=(-1, -2)`; the order only matters for one-axis masks.

    Returns:
      `bool`, shaped like `w`.

    Raises:
      SparsityError: not floating point, axes that are not multiples of M, NaN or infinity. Under a
        trace the values are not checked: a block with a NaN gets some valid template.
    """
    check_arguments(mask, locals())
    pattern = parse(pattern, transposable)
    axes = check(w, pattern, axes)
    if not isinstance(w, Tracer) and not np.isfinite(np.asarray(w, np.float32)).all():
        raise SparsityError("the weight has NaN or infinite entries: it has no best mask")

    # `true` is an argument of the jitted function, so that XLA cannot know its value
    return on_auto_axes(
        lambda w: _find_mask(True, w, pattern, axes), lambda _, w: like(w), jnp.asarray(w)
    )


@partial(jax.jit, static_argnames=("pattern", "axes"))
def _find_mask(true: bool, w: jax.Array, pattern: SparsityPattern, axes: Axes) -> jax.Array:
    return pattern.expand(run_unfused(true, lambda: pattern.search(w, axes)), axes)


def run_unfused(true: Any, function: Callable[[], Any]) -> Any:
    """Return `function()`, computed once and not fused with the operations that read the results.

    XLA would otherwise compute the search of a block again for each cell of its mask. A conditional
    is a boundary of fusion, so this is one whose condition always holds.

    Args:
      true: a traced value that is true. XLA must not know it, or would remove the conditional.
    """

    def zeros():
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(function))

    return jax.lax.cond(true, function, zeros)


def to_bits(mask: jax.Array) -> jax.Array:
    """Pack a mask into `uint8[ceil(size / 8)]`.

    Bit k of word j is element k * words + j of the flattened mask: consecutive weights then read
    consecutive words, which vectorises, and the packing does not depend on the pattern.
    """
    return on_auto_axes(_to_bits, lambda bits, _: whole(bits), mask)


def _to_bits(mask: jax.Array) -> jax.Array:
    shape = _planes(mask.shape)
    planes = jnp.pad(mask.reshape(-1), (0, prod(shape) - mask.size)).reshape(shape)
    return jnp.sum(planes.astype(jnp.uint8) << _places(shape), axis=0, dtype=jnp.uint8).reshape(-1)


def from_bits(bits: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Unpack the boolean mask of this shape from the result of `to_bits`."""
    planes = (bits.reshape(1, *_planes(shape)[1:]) >> _places(_planes(shape))) & 1
    return planes.reshape(-1)[: prod(shape)].reshape(shape).astype(bool)


def _planes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape [8, ...] of a flattened mask as planes, of which plane k fills bit k.

    A matrix whose rows divide by 8 is split between rows: a TPU, whose layout pads rows, would
    otherwise copy the mask to flatten it. Both shapes give the same order of bits.
    """
    if len(shape) == 2 and shape[0] % 8 == 0 and shape[1] >= 128:
        return 8, shape[0] // 8, shape[1]
    return 8, -(-prod(shape) // 8)


def _places(planes: tuple[int, ...]) -> jax.Array:
    """Return the bit of each plane, uint8[8, 1, ...]."""
    return jnp.arange(8, dtype=jnp.uint8).reshape(8, *[1] * (len(planes) - 1))
