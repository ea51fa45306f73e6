"""Attention of com.microsoft: with a cache, sparse, without padding; rotary embedding.

Meaning as in onnxruntime's ContribOperators.md; padding masks add `mask_filter_value`, as there.
Sequences without padding are rows, one after the
other: `token_offset` says where each row stands among (batch, steps), the real ones first.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._constraints import Positive
from jaxonnx._limits import check_size
from jaxonnx._weights import matrix, table
from jaxonnx.errors import NodeError
from jaxonnx.ops.attention import Window, angles, attend, merge_heads, rotate, split_heads, weigh
from jaxonnx.ops.common import INDEX
from jaxonnx.ops.contrib.fused import DOMAIN
from jaxonnx.ops.linear import affine, matmul
from jaxonnx.registry import Omissible, Outputs, Static, op


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
      filter_value: the addition to the scores of invalid keys.
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


@op("DecoderMaskedMultiHeadAttention", since=1, domain=DOMAIN, params=("bias",))
def decoder_masked_multi_head_attention(
    query,
    key=None,
    value=None,
    mask_index=None,
    attention_bias=None,
    past_key=None,
    past_value=None,
    past_sequence_length=None,
    beam_width=None,
    cache_indirection=None,
    bias=None,
    *,
    mask_filter_value=None,
    num_heads,
    output_qk=None,
    past_present_share_buffer=None,
    scale=None,
):
    """MultiHeadAttention of one step; without a key the query holds Q, K and V side by side.

    With `past_present_share_buffer` the caches have room for more steps than have passed.
    """
    refuse(cache_indirection=cache_indirection)
    if key is None:
        query, key, value = jnp.split(query, 3, axis=-1)
    hidden = -10000.0 if mask_filter_value is None else mask_filter_value
    options = {"num_heads": num_heads, "scale": scale, "mask_filter_value": hidden}
    if not past_present_share_buffer or past_key is None:
        past = past_key, past_value
        return multi_head_attention(
            query, key, value, bias, mask_index, attention_bias, *past, **options
        )
    refuse(mask_index=mask_index, attention_bias=attention_bias)
    if bias is not None:
        factors: Any = (query, key, value)
        query, key, value = (x + b for x, b in zip(factors, jnp.split(bias, 3), strict=True))
    start = jnp.broadcast_to(jnp.asarray(past_sequence_length).reshape(-1), query.shape[:1])
    k, v = (
        _write_cache(past, split_heads(new, num_heads), start)
        for past, new in ((past_key, key), (past_value, value))
    )
    options["mask_filter_value"] = -jnp.inf
    y, *_, x = multi_head_attention(query, k, v, None, start + 1, **options)
    return y, k, v, x


@jax.vmap
def _write_cache(cache, new, start):
    """Return the cache (heads, length, size) with new steps from `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(cache, new, start, axis=1)


@op("SparseAttention", since=1, domain=DOMAIN)
def sparse_attention(
    query,
    key: Omissible,
    value: Omissible,
    past_key,
    past_value,
    block_row_indices: Static,
    block_col_indices: Static,
    total_sequence_length: Static,
    key_total_sequence_lengths,
    cos_cache=None,
    sin_cache=None,
    *,
    do_rotary=0,
    kv_num_heads,
    num_heads,
    rotary_interleaved=0,
    scale=None,
    sparse_block_size: Positive,
):
    """Causal GroupQueryAttention that sees only listed blocks of keys; heads cycle the layouts.

    Steps after a prompt are the last of each sample's `key_total_sequence_lengths`.
    """
    if key is None:
        size = query.shape[-1] // (num_heads + 2 * kv_num_heads)
        ends = np.cumsum([num_heads * size, kv_num_heads * size])
        query, key, value = jnp.split(query, ends, axis=-1)
    heads = (num_heads, kv_num_heads, kv_num_heads)
    q, k, v = (split_heads(x, n) for x, n in zip((query, key, value), heads, strict=True))
    steps, total = q.shape[2], int(total_sequence_length.item())
    check_size((total,), INDEX, host=True)
    lengths = jnp.asarray(key_total_sequence_lengths).reshape(-1)
    start = jnp.zeros_like(lengths) if steps == total else lengths - steps
    if do_rotary:
        at = start[:, None] + np.arange(steps)
        cos, sin = (jnp.asarray(c)[at][:, None] for c in (cos_cache, sin_cache))
        q, k = (rotate(part, cos, sin, rotary_interleaved) for part in (q, k))
    length = past_key.shape[2]
    k, v = _write_cache(past_key, k, start), _write_cache(past_value, v, start)
    # convert block masks in CSR form to bool (layouts, blocks, blocks)
    count = block_row_indices.shape[1] - 1
    check_size((block_row_indices.shape[0], count, count), bool, host=True)
    layouts = np.zeros((block_row_indices.shape[0], count, count), bool)
    for layout, (starts, listed) in enumerate(
        zip(block_row_indices, block_col_indices, strict=True)
    ):
        for row in range(count):
            layouts[layout, row, listed[starts[row] : starts[row + 1]]] = True
    at = jnp.clip(start[:, None] + np.arange(steps), 0, length - 1)
    rows = jnp.asarray(layouts)[:, at // sparse_block_size, :]
    visible = rows[..., np.arange(total) // sparse_block_size]
    heads_of = np.arange(num_heads) % len(layouts)
    visible = jnp.moveaxis(visible[heads_of], 1, 0)  # (batch, heads, steps, total)
    at = jnp.arange(total)
    keys = jnp.where(at < lengths[:, None], at, -1)
    window = Window(start[:, None] + jnp.arange(steps), keys, right=0)
    y = attend(q, k[:, :, :total], v[:, :, :total], (visible,), window, scale or None)
    return merge_heads(y), k, v


@op("RemovePadding", since=1, domain=DOMAIN, dynamic=True)
def remove_padding(x, sequence_token_count):
    """The real rows of (batch, steps, size), offsets of all rows, cumulated and greatest length."""
    steps = x.shape[1]
    counts = np.asarray(sequence_token_count)
    padding = np.arange(steps) >= counts[:, None]
    offsets = np.argsort(padding.reshape(-1), kind="stable").astype(np.int32)
    rows = jnp.asarray(x).reshape(-1, x.shape[2])[offsets[: counts.sum()]]
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return rows, offsets.reshape(padding.shape), ends, counts.max(keepdims=True).astype(np.int32)


@op("RestorePadding", since=1, domain=DOMAIN)
def restore_padding(x, token_offset):
    """Rows to (batch, steps, size), with zeros in the padding."""
    batch, steps = token_offset.shape
    full = jnp.zeros((batch * steps, x.shape[1]), x.dtype)
    return full.at[token_offset.reshape(-1)[: x.shape[0]]].set(x).reshape(batch, steps, -1)


def _rows(y, token_offset, count):
    """Return the real rows of (batch, steps, size)."""
    return y.reshape(-1, y.shape[-1])[token_offset.reshape(-1)[:count]]


@op(
    "PackedAttention",
    since=1,
    domain=DOMAIN,
    weights={"weights": matrix()},
    params=("bias",),
)
def packed_attention(
    x,
    weights,
    bias,
    token_offset,
    cumulative_sequence_length,
    attention_bias=None,
    *,
    num_heads,
    qkv_hidden_sizes=None,
    scale=None,
):
    """Attention over sequences without padding."""
    qkv = restore_padding(affine(x, weights, bias), token_offset)
    lengths = jnp.diff(jnp.asarray(cumulative_sequence_length))
    y, _ = self_attention(
        qkv, num_heads, qkv_hidden_sizes, lengths, None, attention_bias, -jnp.inf, scale, 0
    )
    return _rows(y, token_offset, x.shape[0])


@op("PackedMultiHeadAttention", since=1, domain=DOMAIN, params=("bias",))
def packed_multi_head_attention(
    query,
    key=None,
    value=None,
    bias=None,
    token_offset=None,
    cumulative_sequence_length=None,
    attention_bias=None,
    *,
    mask_filter_value=None,
    num_heads,
    scale=None,
):
    """MultiHeadAttention over sequences without padding; all in one is (rows, heads, 3, size)."""
    if key is None:
        query, key, value = (query[:, :, i].reshape(query.shape[0], -1) for i in range(3))
    count = query.shape[0]
    q, k, v = (restore_padding(part, token_offset) for part in (query, key, value))
    y, *_ = multi_head_attention(
        q,
        k,
        v,
        bias,
        jnp.diff(jnp.asarray(cumulative_sequence_length)),
        attention_bias,
        mask_filter_value=-jnp.inf,
        num_heads=num_heads,
        scale=scale,
    )
    return _rows(y, token_offset, count)


@op("RelativePositionBias", since=1, domain=DOMAIN, weights={"bias_table": table()})
def relative_position_bias(
    bias_table, query_length: Static, key_length: Static, *, is_bidirectional=0, max_distance
):
    """T5's bias (1, heads, queries, keys) by distance, in buckets that grow with it."""
    queries, keys = int(query_length.item()), int(key_length.item())
    check_size((queries, keys), INDEX, host=True)
    distance = np.arange(keys) - np.arange(queries)[:, None]
    buckets, bucket = bias_table.shape[0], np.zeros_like(distance)
    if is_bidirectional:
        buckets //= 2
        bucket += buckets * (distance > 0)
        distance = abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    far = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    far = exact + (far * (buckets - exact)).astype(np.int64)
    bucket += np.where(distance < exact, distance, np.minimum(far, buckets - 1))
    return jnp.moveaxis(jnp.asarray(bias_table)[bucket], -1, 0)[None]


@op(
    "GatedRelativePositionBias",
    since=1,
    domain=DOMAIN,
    weights={"weight": matrix()},
    params=("query_bias", "bias", "eco_a"),
)
def gated_relative_position_bias(
    query_layer, query_bias, rel_pos, weight, bias, eco_a, token_offset=None, *, num_heads
):
    """WavLM's bias: `rel_pos` times (u (r eco_a - 1) + 2), whose gates u, r depend on the query."""
    q = query_layer + query_bias
    q = split_heads(q if token_offset is None else restore_padding(q, token_offset), num_heads)
    gates = matmul(q, weight) + bias
    u, r = jnp.split(jax.nn.sigmoid(gates.reshape(*gates.shape[:-1], 2, -1).sum(-1)), 2, axis=-1)
    if rel_pos.shape[-2] != q.shape[2]:
        raise NodeError(f"rel_pos {rel_pos.shape} does not fit {q.shape[2]} steps")
    return (u * (r * eco_a - 1) + 2) * rel_pos
