"""More attention of com.microsoft: one step of decoding, block-sparse, without padding, biases.

Meaning as in onnxruntime's ContribOperators.md. Sequences without padding are rows, one after the
other: `token_offset` says where each row stands among (batch, steps), the real ones first.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._axes import matrix, table
from jaxonnx._constraints import Positive
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.attention import merge_heads, rotate, split_heads
from jaxonnx.ops.attention_softmax import Window, attend
from jaxonnx.ops.common import INDEX
from jaxonnx.ops.contrib.attention import multi_head_attention, refuse, self_attention
from jaxonnx.ops.contrib.fused import DOMAIN
from jaxonnx.ops.linear import affine, matmul
from jaxonnx.registry import Omissible, Static, op


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


def _block_mask(rows, columns):
    """Convert block masks in CSR form to bool (layouts, blocks, blocks)."""
    count = rows.shape[1] - 1
    check_size((rows.shape[0], count, count), bool, host=True)
    mask = np.zeros((rows.shape[0], count, count), bool)
    for layout, (starts, listed) in enumerate(zip(rows, columns, strict=True)):
        for row in range(count):
            mask[layout, row, listed[starts[row] : starts[row + 1]]] = True
    return mask


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
    layouts = _block_mask(block_row_indices, block_col_indices)
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
