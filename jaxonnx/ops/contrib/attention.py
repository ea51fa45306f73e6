"""Attention operators of com.microsoft: Attention, MultiHeadAttention, GroupQueryAttention, rotary.

Meaning as in onnxruntime's ContribOperators.md; padding masks add `mask_filter_value`, as there.
"""

import jax.numpy as jnp
import numpy as np

from jaxonnx._axes import matrix
from jaxonnx._limits import room
from jaxonnx.errors import NodeError
from jaxonnx.ops.attention import (
    angles,
    apply_mask,
    masked_softmax,
    merge_heads,
    reach,
    rotate,
    scores,
    soft_cap,
    split_heads,
    weighted_values,
)
from jaxonnx.ops.common import INDEX
from jaxonnx.ops.contrib.fused import DOMAIN, rms_norm
from jaxonnx.ops.linear import affine
from jaxonnx.registry import Omissible, Static, op


def refuse(**options):
    """Raise for an option that is set and that only other execution providers support."""
    for name, value in options.items():
        if value is not None and (isinstance(value, str | int | float) is False or value):
            raise NodeError(f"{name} is not supported; export the model without it")


def _padding_bias(mask, batch, keys, filter_value, dtype):
    """Return an additive mask from key lengths (b,), ends and starts (2b,), or ones at keys."""
    if mask is None:
        return jnp.zeros((), dtype)
    at = np.arange(keys)
    if mask.ndim == 1:
        if mask.shape[0] not in (batch, 2 * batch):
            raise NodeError(f"a mask of shape {mask.shape} does not fit a batch of {batch}")
        valid = at < mask[:batch, None]
        if mask.shape[0] == 2 * batch:
            valid = valid & (at >= mask[batch:, None])
    else:
        valid = mask > 0
    if valid.ndim == 2:
        valid = valid[:, None]
    if valid.ndim != 3 or valid.shape[-1] != keys:
        raise NodeError(f"a mask of shape {mask.shape} does not fit {keys} keys")
    return jnp.where(valid[:, None], 0, filter_value).astype(dtype)


def _attend(q, k, v, bias, scale, unidirectional, offset):
    """Return the output, heads merged, and biased scores; q, k, v (batch, heads, steps, size)."""
    x = scores(q, k, scale or None) + bias
    if unidirectional:
        x = apply_mask(x, reach(q.shape[2], k.shape[2], offset, right=0))
    return merge_heads(weighted_values(masked_softmax(x), v)), x.astype(q.dtype)


@op("Attention", since=1, domain=DOMAIN, weights={"weights": matrix()}, params=("bias",))
def attention_contrib(
    x,
    weights,
    bias=None,
    mask_index=None,
    past=None,
    attention_bias=None,
    past_sequence_length=None,
    *,
    do_rotary=0,
    mask_filter_value=-10000.0,
    num_heads,
    past_present_share_buffer=0,
    qkv_hidden_sizes=None,
    rotary_embedding_dim=None,
    scale=None,
    unidirectional=0,
):
    """Self-attention with the projection of x to Q, K and V; `past` (2, b, heads, p, size)."""
    refuse(do_rotary=do_rotary, past_present_share_buffer=past_present_share_buffer)
    return self_attention(
        affine(x, weights, bias),
        num_heads,
        qkv_hidden_sizes,
        mask_index,
        past,
        attention_bias,
        mask_filter_value,
        scale,
        unidirectional,
    )


def self_attention(
    qkv, heads, sizes, mask, past, attention_bias, filter_value, scale, unidirectional
):
    """Return the attention of projected Q, K and V, side by side, and the cache behind it."""
    sizes = sizes or [qkv.shape[-1] // 3] * 3
    parts = jnp.split(qkv, np.cumsum(sizes)[:2], axis=-1)
    q, k, v = (split_heads(part, heads) for part in parts)
    offset = 0
    present = None
    if past is not None:
        offset = past.shape[3]
        k, v = (jnp.concatenate(pair, axis=2) for pair in ((past[0], k), (past[1], v)))
    if k.shape == v.shape:
        present = jnp.stack([k, v])
    added = _padding_bias(mask, qkv.shape[0], k.shape[2], filter_value, qkv.dtype)
    if attention_bias is not None:
        added = added + attention_bias
    return _attend(q, k, v, added, scale, unidirectional, offset)[0], present


@op("MultiHeadAttention", since=1, domain=DOMAIN, params=("bias",))
def multi_head_attention(
    query,
    key=None,
    value=None,
    bias=None,
    key_padding_mask=None,
    attention_bias=None,
    past_key=None,
    past_value=None,
    past_sequence_length=None,
    cache_indirection=None,
    *,
    mask_filter_value=-10000.0,
    num_heads,
    scale=None,
    unidirectional=0,
):
    """Attention over projected Q, K, V; packed ones have the shape (b, s, heads, 3 or 2, size).

    A key and value of rank 4 are the cache of another attention and get no bias.
    """
    refuse(past_sequence_length=past_sequence_length, cache_indirection=cache_indirection)
    if query.ndim == 5:
        q, k, v = (part.squeeze(3).swapaxes(1, 2) for part in jnp.split(query, 3, axis=3))
    elif key is not None and key.ndim == 5:
        q = split_heads(query, num_heads)
        k, v = (part.squeeze(3).swapaxes(1, 2) for part in jnp.split(key, 2, axis=3))
    else:
        q, k, v = (split_heads(part, num_heads) for part in (query, key, value))
    if bias is not None:
        widths = np.cumsum([num_heads * part.shape[-1] for part in (q, k)])
        biases = (split_heads(b[None, None], num_heads) for b in jnp.split(bias, widths))
        q, *kv = (part + b for part, b in zip((q, k, v), biases, strict=True))
        if key is None or key.ndim != 4:
            k, v = kv
    offset = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k = jnp.concatenate([past_key, k], axis=2)
        v = jnp.concatenate([past_value, v], axis=2)
    added = _padding_bias(key_padding_mask, q.shape[0], k.shape[2], mask_filter_value, q.dtype)
    if attention_bias is not None:
        added = added + attention_bias
    y, x = _attend(q, k, v, added, scale, unidirectional, offset)
    return y, k, v, x


def _append_to_cache(past, new, start, length):
    """Return a cache of `length` steps: `past` up to a sample's `start`, then `new`, then zeros."""
    room((length,), INDEX, host=True)
    room((*new.shape[:2], length, new.shape[3]), new.dtype)
    at = np.arange(length)
    old = jnp.zeros((*new.shape[:2], length, new.shape[3]), new.dtype)
    if past is not None:
        kept = min(length, past.shape[2])
        old = old.at[:, :, :kept].set(past[:, :, :kept])
    index = (at - start[:, None])[:, None, :, None]
    inside = (index >= 0) & (index < new.shape[2])
    moved = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[2] - 1), axis=2, mode="clip")
    return jnp.where(inside, moved, jnp.where(index < 0, old, 0))


@op("GroupQueryAttention", since=1, domain=DOMAIN)
def group_query_attention(
    query,
    key: Omissible,
    value: Omissible,
    past_key: Omissible,
    past_value: Omissible,
    seqlens_k,
    total_sequence_length: Static,
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
):
    """Attention of `num_heads` over `kv_num_heads`, with a cache of keys and values.

    A sample's valid length after this step is seqlens_k + 1, of which `query_seqlens` are new, or
    as many as there can be; the new steps may be padded at their end.
    """
    refuse(kv_cache_bit_width=kv_cache_bit_width, sliding_window_cache=sliding_window_cache)
    if (k_quant_type, v_quant_type) != ("NONE", "NONE"):
        raise NodeError("a quantized cache is not supported; export the model without it")
    if key is None:
        size = query.shape[-1] // (num_heads + 2 * kv_num_heads)
        ends = np.cumsum([num_heads * size, kv_num_heads * size])
        query, key, value = jnp.split(query, ends, axis=-1)
    q, k, v = (
        split_heads(part, heads)
        for part, heads in ((query, num_heads), (key, kv_num_heads), (value, kv_num_heads))
    )
    steps, total = q.shape[2], int(total_sequence_length.item())
    if q_norm_weight is not None and k_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, q_norm_epsilon or qk_norm_epsilon)[0]
        k = rms_norm(k, k_norm_weight, k_norm_epsilon or qk_norm_epsilon)[0]
    lengths = jnp.asarray(seqlens_k).reshape(-1) + 1
    start = lengths - (jnp.minimum(steps, lengths) if query_seqlens is None else query_seqlens)
    if do_rotary:
        positions = start[:, None] + np.arange(steps) if position_ids is None else position_ids
        cos, sin = (jnp.asarray(c)[positions][:, None] for c in (cos_cache, sin_cache))
        q, k = (rotate(part, cos, sin, rotary_interleaved) for part in (q, k))
    length = max(total, 0 if past_key is None else past_key.shape[2])
    k, v = (
        _append_to_cache(past_key, k, start, length),
        _append_to_cache(past_value, v, start, length),
    )

    x = soft_cap(scores(q, k[:, :, :total], scale or None), softcap)
    if attention_bias is not None:
        x = x + attention_bias
    left = local_window_size - 1 if local_window_size >= 0 else -1
    x = apply_mask(x, reach(steps, total, start, left=left, right=0 if causal else -1))
    x = apply_mask(x, np.arange(total) < lengths[:, None, None, None])
    sink = jnp.zeros(num_heads, x.dtype) if head_sink is None else head_sink
    if smooth_softmax > 0 or head_sink is not None:
        column = jnp.broadcast_to(sink.astype(x.dtype)[:, None, None], (*x.shape[:3], 1))
        p = masked_softmax(jnp.concatenate([x, column], axis=-1))[..., :-1]
    else:
        p = masked_softmax(x)
    y = merge_heads(weighted_values(p, v[:, :, :total]))
    return y, k, v, (p if qk_output == 2 else x).astype(query.dtype)


@op("RotaryEmbedding", since=1, domain=DOMAIN)
def rotary_embedding_contrib(
    x,
    position_ids,
    cos_cache,
    sin_cache,
    *,
    interleaved=0,
    is_packed_batching=0,
    num_heads=0,
    rotary_embedding_dim=0,
    scale=1.0,
):
    """Rotary position embedding; a vector of position ids holds those of the first steps."""
    refuse(is_packed_batching=is_packed_batching, scale=None if scale == 1 else scale)
    if x.ndim == 3 and not num_heads:
        num_heads = x.shape[-1] // (2 * cos_cache.shape[-1])
    heads = split_heads(x, num_heads)
    if rotary_embedding_dim and cos_cache.shape[-1] != rotary_embedding_dim // 2:
        raise NodeError(f"the caches hold {cos_cache.shape[-1]} angles for {rotary_embedding_dim}")
    if position_ids.ndim == 1:
        position_ids = position_ids[:, None] + np.arange(heads.shape[2])
    cos, sin = (c[:, None] for c in angles(cos_cache, sin_cache, position_ids))
    y = rotate(heads, cos, sin, interleaved)
    return y if x.ndim == 4 else merge_heads(y)
