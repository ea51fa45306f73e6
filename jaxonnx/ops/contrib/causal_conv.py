"""CausalConvWithState of com.microsoft: short convolutions of LFM2, Mamba and Gated DeltaNet."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._axes import convolution
from jaxonnx.errors import NodeError
from jaxonnx.ops.contrib.attention import refuse
from jaxonnx.ops.contrib.fused import DOMAIN
from jaxonnx.registry import op


@op(
    "CausalConvWithState",
    since=1,
    domain=DOMAIN,
    weights={"weight": convolution(depthwise=True)},
    params=("bias",),
)
def causal_conv_with_state(
    x,
    weight,
    bias=None,
    past_state=None,
    *,
    activation: Literal["none", "silu", "swish"] = "none",
    channels_last=0,
    dilation=1,
    input_channel_offset=0,
    input_channels=0,
    ndim=1,
    state_channels_last=-1,
    state_length=0,
    state_update_capacity=0,
    state_window=0,
):
    """y_t = sum_j w_j x_(t - (k - 1 - j) dilation) of each channel, where `past_state` goes before.

    The state is the last (k - 1) dilation steps of (batch, channels, steps); with a `state_window`
    it has a leading axis for the states after each of so many last steps.
    """
    refuse(
        input_channel_offset=input_channel_offset,
        input_channels=input_channels,
        state_channels_last=None if state_channels_last == -1 else True,
        state_length=state_length,
        state_update_capacity=state_update_capacity,
        ndim=None if ndim == 1 else ndim,
    )
    shape = x.shape
    if channels_last:
        x = jnp.moveaxis(x.reshape(*shape[:2], -1), 1, 2)
    batch, channels, steps = x.shape
    taps = weight.shape[2]
    length = (taps - 1) * dilation
    if weight.shape != (channels, 1, taps):
        raise NodeError(f"a weight of shape {weight.shape} does not fit {channels} channels")
    before = jnp.zeros((batch, channels, length), x.dtype)
    if past_state is not None:
        past = past_state[-1] if state_window else past_state
        before = jnp.moveaxis(past.reshape(batch, length, -1), 1, 2) if channels_last else past
    if before.shape != (batch, channels, length):
        raise NodeError(f"a state of shape {before.shape} is not {(batch, channels, length)}")
    whole = jnp.concatenate([before, x], axis=2)
    wide = whole.astype(jnp.promote_types(x.dtype, np.float32))
    y = jnp.zeros((), wide.dtype) if bias is None else bias[:, None].astype(wide.dtype)
    for j in range(taps):
        y = y + wide[:, :, j * dilation : j * dilation + steps] * weight[:, :, j]
    y = (y if activation == "none" else jax.nn.silu(y)).astype(x.dtype)

    def state(count):
        """Return the state after `count` steps, zeros if there are none."""
        last = whole[:, :, count : count + length] if count > 0 else jnp.zeros_like(before)
        if channels_last:
            last = jnp.moveaxis(last, 1, 2).reshape(batch, length, *shape[2:])
        return last

    if channels_last:
        y = jnp.moveaxis(y, 1, 2).reshape(shape)
    if not state_window:
        return y, state(steps)
    return y, jnp.stack([state(steps - state_window + 1 + j) for j in range(state_window)])
