"""Attention operators of com.microsoft: Attention, MultiHeadAttention, rotary embedding.

Meaning as in onnxruntime's ContribOperators.md; padding masks add `mask_filter_value`, as there.
"""

import jax.numpy as jnp
import numpy as np

from jaxonnx._axes import matrix
from jaxonnx.errors import NodeError
from jaxonnx.ops.attention import angles, merge_heads, rotate, split_heads
from jaxonnx.ops.attention_softmax import Window, attend, weigh
from jaxonnx.ops.contrib.fused import DOMAIN
from jaxonnx.ops.linear import affine
from jaxonnx.registry import Outputs, op


def refuse(**options):
    """Raise if an option is set that only GPU execution providers of onnxruntime support."""
    for name, value in options.items():
        if value is not None and (isinstance(value, str | int | float) is False or value):
            raise NodeError(f"{name} is not supported; export the model without it")


def _padding_bias(mask, batch, keys, filter_value, dtype):
    """Convert a padding mask to one that is added to the scores, (b, 1, 1 or queries, keys).

    Args:
      mask: the number of valid keys of each sample (b,), the ends and starts of valid keys (2b,),
        or 1 at valid keys (b, keys) or (b, queries, keys); or None.
      batch, keys: sizes.
      filter_value: what is added to the scores of invalid keys.
      dtype: of the result.
    """
    if mask is None:
        return None
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


def _window(queries, keys, offset, unidirectional):
    """Return the causal window of queries that begin at `offset`; None if all keys are visible."""
    return (
        Window(jnp.arange(queries) + offset, jnp.arange(keys), right=0) if unidirectional else None
    )


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
    padding = _padding_bias(mask, qkv.shape[0], k.shape[2], filter_value, qkv.dtype)
    window = _window(q.shape[2], k.shape[2], offset, unidirectional)
    return merge_heads(attend(q, k, v, (padding, attention_bias), window, scale or None)), present


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
    outputs: Outputs = 4,
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
    padding = _padding_bias(key_padding_mask, q.shape[0], k.shape[2], mask_filter_value, q.dtype)
    masks = padding, attention_bias
    window = _window(q.shape[2], k.shape[2], offset, unidirectional)
    y = merge_heads(attend(q, k, v, masks, window, scale or None))
    if outputs < 4:
        return y, k, v
    return y, k, v, weigh(q, k, masks, window, scale or None).masked.astype(q.dtype)


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
