"""The mask of a pattern for one weight, and their storage as one bit per weight."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxonnx._arrays import like, on_auto_axes, whole
from jaxonnx._require import check_arguments
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._pattern import SparsityPattern, check, parse
from jaxonnx.sparse._templates import Axes


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
