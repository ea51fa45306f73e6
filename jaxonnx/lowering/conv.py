"""Convolution, forward and both gradients."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxonnx.lowering.contract import contract


@dataclass(frozen=True)
class Conv:
    """T(x, w, y) of a convolution: x (N, C, *size), w (M, C / groups, *kernel), y (N, M, *out)."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    groups: int

    batch = (0, 2)

    def _forward(self, x, w):
        """Half precision is accumulated in float32 by every accelerator's convolution."""
        return lax.conv_general_dilated(
            x,
            w,
            self.strides,
            self.pads,
            rhs_dilation=self.dilations,
            feature_group_count=self.groups,
        )

    def plain(self, out, u, v):
        if out == 2:
            return self._forward(u, v)
        if out == 0:
            x = jax.ShapeDtypeStruct((v.shape[0], u.shape[1] * self.groups, *self.size), u.dtype)
            return jax.linear_transpose(lambda x: self._forward(x, u), x)(v)[0]
        w = jax.ShapeDtypeStruct((v.shape[1], u.shape[1] // self.groups, *self.kernel), u.dtype)
        return jax.linear_transpose(lambda w: self._forward(u, w), w)(v)[0]

    def fast(self, out, u, v):
        wide = jnp.promote_types(u.dtype, jnp.float32)
        return self.plain(out, u.astype(wide), v.astype(wide)).astype(u.dtype)


def convolution(x, w, window, groups: int):
    """Cross-correlation of x (N, C, *size) with w (M, C / groups, *kernel) at these windows."""
    kernel, strides, dilations, pads, _ = window
    form = Conv(x.shape[2:], kernel, strides, dilations, pads, groups)
    return contract(form, 2, x, w)


def transposed_convolution(x, w, *, size, strides, dilations, pads, groups):
    """The transpose of `convolution` as a map of images; x (N, M, *out) -> (N, C, *size)."""
    form = Conv(size, w.shape[2:], strides, dilations, pads, groups)
    return contract(form, 0, w, x)
