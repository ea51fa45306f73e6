"""Layers of decoders of com.microsoft with a state: GroupQueryAttention, CausalConvWithState.

Meaning as in onnxruntime's ContribOperators.md. A cache grows, or has room for more steps than have
passed, or holds a window of the last ones; its numbers may be rounded to integers or float8.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer

from jaxonnx._limits import check_size
from jaxonnx._weights import convolution
from jaxonnx.errors import NodeError, StaticError
from jaxonnx.ops.attention import (
    KEYS,
    Window,
    attend,
    attend_to_first,
    merge_heads,
    rotate,
    split_heads,
    weigh,
)
from jaxonnx.ops.common import INDEX, divide
from jaxonnx.ops.contrib.attention import refuse
from jaxonnx.ops.contrib.fused import DOMAIN, rms_norm
from jaxonnx.ops.quantize import dequantize_linear, quantize, quantize_linear
from jaxonnx.registry import Omissible, Outputs, ReusesInputs, op

INT4 = np.dtype(ml_dtypes.int4)


class _Codes(NamedTuple):
    """The quantization of a cache (batch, heads, steps, size): numbers are codes times a scale."""

    scale: Any
    """A scalar, or one number for each head and channel."""
    dtype: Any
    """The dtype of the codes. Two int4, each plus 8, are in one byte, the first in its low bits."""

    def _scale(self, heads):
        return self.scale.astype(np.float32).reshape(1, heads if self.scale.size > 1 else 1, 1, -1)

    def read(self, codes, dtype):
        """Dequantize the codes of a cache."""
        if self.dtype == INT4:
            pairs = jnp.stack([codes & 15, codes >> 4], axis=-1).astype(np.int8) - 8
            codes = pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
        return (codes.astype(np.float32) * self._scale(codes.shape[1])).astype(dtype)

    def round(self, x):
        """Quantize and dequantize numbers; gradients go straight through."""
        scale = self.scale.astype(np.float32).reshape(-1)
        rounded = quantize_linear(merge_heads(x), scale, np.zeros(scale.shape, self.dtype), axis=2)
        y: Any = dequantize_linear(rounded, scale, axis=2)
        return split_heads(y, x.shape[1]).astype(x.dtype)

    def write(self, x):
        """Return the codes of numbers that `round` has rounded, packed for int4."""
        codes = quantize(divide(x.astype(np.float32), self._scale(x.shape[1])), None, self.dtype)
        if self.dtype != INT4:
            return codes
        low, high = ((codes[..., i::2].astype(np.int8) + 8).astype(np.uint8) for i in (0, 1))
        return low | high << 4


def _write_into_cache(past, new, start):
    """Return a cache with one step of each sample at its `start`.

    XLA writes a scatter into the memory of a donated cache, whereas it would duplicate and fuse a
    `dynamic_update_slice`.
    """
    rows, heads = np.arange(len(new))[:, None], np.arange(new.shape[1])
    return past.at[rows, heads, start[:, None]].set(new[:, :, 0], mode="drop")


def _append_to_cache(past, new, start, length):
    """Return a cache of `length` steps: `past` up to a sample's `start`, then `new`, then zeros."""
    if (past is None or not past.shape[2]) and length == new.shape[2]:
        return new
    check_size((length,), INDEX, host=True)
    check_size((*new.shape[:2], length, new.shape[3]), new.dtype)
    at = np.arange(length)
    old = jnp.zeros((*new.shape[:2], length, new.shape[3]), new.dtype)
    if past is not None:
        steps_before = min(length, past.shape[2])
        old = old.at[:, :, :steps_before].set(past[:, :, :steps_before])
    index = (at - start[:, None])[:, None, :, None]
    inside = (index >= 0) & (index < new.shape[2])
    moved = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[2] - 1), axis=2, mode="clip")
    return jnp.where(inside, moved, jnp.where(index < 0, old, 0))


def _count_resident(length, capacity, window):
    """Return the number of steps that the cache of a window holds: L(T) of the specification."""
    evicted = capacity - window + 1  # steps that a full cache evicts at once
    return length - evicted * jnp.maximum(-(-(length - capacity) // evicted), 0)


def _slide_window(pasts, news, start, lengths, window):
    """Update the caches of keys and values for attention over a sliding window.

    Args:
      pasts: the caches (batch, heads, capacity, size); empty ones get the capacity `window`.
      news: the new steps (batch, heads, steps, size).
      start: (batch,), the steps before the new ones.
      lengths: (batch,), the steps after the new ones.
      window: the steps that a query sees.

    Returns:
      The keys and values that attention reads, which are the caches followed by the new steps
      (steps that are evicted now are still read); the position of each of their rows, -1 for rows
      without a step; and the new caches.
    """
    length, steps = pasts[0].shape[2], news[0].shape[2]
    capacity = length or window
    if capacity < window:
        raise NodeError(f"a cache of {capacity} steps is too short for a window of {window}")
    check_size((*news[0].shape[:2], capacity + steps, news[0].shape[3]), news[0].dtype)
    # steps in the caches before and after; a cache holds the latest ones, the oldest first
    before = _count_resident(start, capacity, window)[:, None]
    after = _count_resident(lengths, capacity, window)[:, None]
    start, lengths = start[:, None], lengths[:, None]
    old, new, places = (np.arange(n) for n in (length, steps, capacity))
    positions = jnp.concatenate(
        [
            jnp.where(old < before, start - before + old, -1),
            jnp.where(new < lengths - start, start + new, -1),
        ],
        axis=1,
    )
    # the step of each row of the new caches, and from it the row of [past, new] to read it from
    place = lengths - after + places
    place = jnp.where(place < start, place - start + before, place - start + length)
    place = jnp.clip(place, 0, length + steps - 1)[:, None, :, None]
    # what a cache holds beyond its steps is not specified, and may be NaN
    pasts = [jnp.where((old < before)[:, None, :, None], past, 0) for past in pasts]
    rows = [jnp.concatenate(pair, axis=2) for pair in zip(pasts, news, strict=True)]
    caches = (jnp.take_along_axis(x, place, axis=2, mode="clip") for x in rows)
    return rows, positions, [jnp.where((places < after)[:, None, :, None], x, 0) for x in caches]


_NORMS = {"q_norm_weight": 1.0, "k_norm_weight": 1.0}


@op("GroupQueryAttention", since=1, domain=DOMAIN, params=_NORMS)
def group_query_attention(
    query,
    key: Omissible,
    value: Omissible,
    past_key: Omissible,
    past_value: Omissible,
    seqlens_k,
    total_sequence_length,
    cos_cache=None,
    sin_cache=None,
    position_ids=None,
    attention_bias=None,
    head_sink=None,
    k_scale=None,
    v_scale=None,
    q_norm_weight=None,
    k_norm_weight=None,
    query_seqlens=None,
    *,
    causal=1,
    do_rotary=0,
    k_norm_epsilon=None,
    k_quant_type="NONE",
    kv_cache_bit_width=None,
    kv_num_heads,
    local_window_size=-1,
    num_heads,
    q_norm_epsilon=None,
    qk_norm_epsilon=9.999999974752427e-07,
    qk_output=0,
    rotary_interleaved=0,
    scale=None,
    sliding_window_cache=0,
    smooth_softmax=-1,
    softcap=0.0,
    v_quant_type="NONE",
    outputs: Outputs = 4,
    reuses_inputs: ReusesInputs = False,
):
    """Attention of `num_heads` over `kv_num_heads`, with a cache of keys and values.

    A sample's valid length after this step is seqlens_k + 1, of which `query_seqlens` are new, or
    as many as there can be; the new steps may be padded at their end.
    """
    if key is None:
        size = query.shape[-1] // (num_heads + 2 * kv_num_heads)
        ends = np.cumsum([num_heads * size, kv_num_heads * size])
        query, key, value = jnp.split(query, ends, axis=-1)
    q, k, v = (
        split_heads(part, heads)
        for part, heads in ((query, num_heads), (key, kv_num_heads), (value, kv_num_heads))
    )
    steps = q.shape[2]
    if q_norm_weight is not None and k_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, q_norm_epsilon or qk_norm_epsilon)[0]
        k = rms_norm(k, k_norm_weight, k_norm_epsilon or qk_norm_epsilon)[0]
    lengths = jnp.asarray(seqlens_k).reshape(-1) + 1
    start = lengths - (jnp.minimum(steps, lengths) if query_seqlens is None else query_seqlens)
    queries = start[:, None] + np.arange(steps)
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise NodeError("do_rotary=1 needs cos_cache and sin_cache")
        if position_ids is None and steps > len(cos_cache):
            raise NodeError(
                f"{steps} tokens, and tables of rotary positions for {len(cos_cache)}: cut the "
                "texts"
            )
        positions = queries if position_ids is None else position_ids
        cos, sin = (jnp.asarray(c)[positions][:, None] for c in (cos_cache, sin_cache))
        q, k = (rotate(part, cos, sin, rotary_interleaved) for part in (q, k))

    codes: list[_Codes | None] = [None, None]  # None for a cache that is not quantized
    for i, (name, past, number, kind) in enumerate(
        (
            ("keys", past_key, k_scale, k_quant_type),
            ("values", past_value, v_scale, v_quant_type),
        )
    ):
        if kind == "NONE":
            continue
        if kind not in ("PER_TENSOR", "PER_CHANNEL") or number is None:
            raise NodeError(
                f"cached {name} are quantized {kind} and have {'no' if number is None else 'a'} "
                "scale: supported are PER_TENSOR and PER_CHANNEL, with a scale"
            )
        if past is not None:
            codes[i] = _Codes(number, INT4 if kv_cache_bit_width == 4 else past.dtype)
    news = [x if c is None else c.round(x) for c, x in zip(codes, (k, v), strict=True)]
    pasts, keeps_room = [past_key, past_value], False
    for i, (past, c) in enumerate(zip(pasts, codes, strict=True)):
        if past is not None and c is not None:  # an empty one has a type, but maybe no sizes
            pasts[i] = c.read(past, q.dtype) if past.shape[2] else news[i][:, :, :0]
    if sliding_window_cache and past_key is not None:
        (k, v), at, caches = _slide_window(pasts, news, start, lengths, local_window_size)
    else:
        if not isinstance(total_sequence_length, Tracer):
            total = int(np.asarray(total_sequence_length).item())
        elif past_key is None or not past_key.shape[2]:
            total = steps  # without a cache the new steps are all keys
        else:
            raise StaticError(
                "total_sequence_length must be known while tracing, because it is the number of "
                "keys: pass what it is computed from as a NumPy array, call the model outside of "
                "jit, or pass empty caches"
            )
        length = max(total, 0 if past_key is None else past_key.shape[2])
        keeps_room = reuses_inputs and past_key is not None and past_key.shape[2] == length
        in_place = keeps_room and steps == 1
        add = _write_into_cache if in_place else partial(_append_to_cache, length=length)
        caches = [add(*pair, start) for pair in zip(pasts, news, strict=True)]
        k, v = (cache[:, :, :total] for cache in caches)
        at = jnp.arange(total)
        at = jnp.where(at < lengths[:, None], at, -1)
    caches = [x if c is None else c.write(x) for c, x in zip(codes, caches, strict=True)]

    bias = attention_bias
    if bias is not None and sliding_window_cache:  # its columns are positions
        columns = jnp.clip(at, 0, bias.shape[-1] - 1)[:, None, None]
        bias = jnp.take_along_axis(bias, columns, axis=-1, mode="clip")
    if head_sink is None and smooth_softmax > 0:
        head_sink = jnp.zeros(num_heads)
    left = local_window_size - 1 if local_window_size >= 0 else -1
    window = Window(queries, at, left, 0 if causal else -1)
    options = ((bias,), window, scale or None, softcap, head_sink)
    if keeps_room and bias is None and k.shape[2] > 2 * KEYS:
        y = merge_heads(attend_to_first(lengths.max(), q, k, v, *options[1:]))
    else:
        y = merge_heads(attend(q, k, v, *options))
    if outputs < 4:
        return y, *caches
    weights = weigh(q, k, *options)
    return y, *caches, (weights.probabilities if qk_output == 2 else weights.masked).astype(y.dtype)


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
        """Return the state after `count` steps; zeros after no step."""
        last = whole[:, :, count : count + length] if count > 0 else jnp.zeros_like(before)
        if channels_last:
            last = jnp.moveaxis(last, 1, 2).reshape(batch, length, *shape[2:])
        return last

    if channels_last:
        y = jnp.moveaxis(y, 1, 2).reshape(shape)
    if not state_window:
        return y, state(steps)
    return y, jnp.stack([state(steps - state_window + 1 + j) for j in range(state_window)])
