"""Attention: softmax attention with its variants, rotary position embedding.

Heads stand at axis 1 throughout: (batch, heads, sequence, head size). Query heads that share a key
and value head are a group, so that nothing is repeated.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx._limits import room
from jaxonnx.errors import NodeError
from jaxonnx.lowering import is_half, product, product_rounded
from jaxonnx.ops.common import canonical, element_dtype
from jaxonnx.ops.indexing import gather
from jaxonnx.registry import op


def split_heads(x: Any, heads: int | None) -> jax.Array:
    """Split (batch, sequence, heads * size) into (batch, heads, sequence, size); keep rank 4."""
    if x.ndim == 4:
        if heads and x.shape[1] != heads:  # exporters repeat the number, which ONNX has no room for
            raise NodeError(f"a tensor of shape {x.shape} has {x.shape[1]} heads, not {heads}")
        return x
    if not heads or x.shape[-1] % heads:
        raise NodeError(f"a tensor of shape {x.shape} cannot be split into {heads} heads")
    return x.reshape(*x.shape[:2], heads, x.shape[-1] // heads).swapaxes(1, 2)


def merge_heads(x):
    """Invert `split_heads`."""
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def group_queries(x, kv_heads):
    """Reshape query heads to (batch, key heads, query heads per key head, ...)."""
    if x.shape[1] % kv_heads:
        raise NodeError(f"{x.shape[1]} query heads are no multiple of {kv_heads} key heads")
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def scores(q, k, scale=None):
    """Compute scale * Q K', by default 1 / sqrt(head size); each factor is scaled by its root.

    Shapes (batch, heads, queries, size) and (batch, key heads, keys, size) to (batch, heads,
    queries, keys). Half precision gives float32, so that the softmax is of numbers not yet rounded.
    """
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):  # a 1 would be broadcast
        raise NodeError(f"queries {q.shape} and keys {k.shape} differ in batch or head size")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if is_half(q):
        return scale * product(_rows(q, k.shape[1]), k.mT).reshape(*q.shape[:3], k.shape[2])
    root = math.sqrt(abs(scale))
    signed = math.copysign(root, scale)
    y = jnp.einsum("bhgqd,bhkd->bhgqk", group_queries(q * signed, k.shape[1]), k * root)
    return y.reshape(*q.shape[:3], k.shape[2])


def weighted_values(probabilities, v):
    """Compute P V of (batch, heads, queries, keys) and (batch, key heads, keys, size)."""
    if (probabilities.shape[0], probabilities.shape[3]) != (v.shape[0], v.shape[2]):
        raise NodeError(f"values {v.shape} do not fit the scores {probabilities.shape}")
    if is_half(v):
        y = product_rounded(_rows(probabilities, v.shape[1]), v)
    else:
        p = group_queries(probabilities.astype(v.dtype), v.shape[1])
        y = jnp.einsum("bhgqk,bhkd->bhgqd", p, v)
    return y.reshape(*probabilities.shape[:3], v.shape[-1])


def _rows(x, kv_heads):
    """Return (batch, key heads, rows, size): the queries of the heads that share a key head."""
    x = group_queries(x, kv_heads)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def masked_softmax(x):
    """Compute softmax over the last axis; a row of -inf gives zeros, and no gradient is NaN."""
    top = x.max(axis=-1, keepdims=True, initial=-jnp.inf)
    e = jnp.exp(x - lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top)))
    total = e.sum(axis=-1, keepdims=True)
    return e / jnp.where(total == 0, 1, total)


def soft_cap(x, cap):
    """Return cap * tanh(x / cap), or x if cap is not positive, as in onnx.reference."""
    return cap * jnp.tanh(x / cap) if cap > 0 else x


def reach(queries, keys, offset, *, left=-1, right=-1):
    """Return which keys each query sees: (queries, keys), with offsets (batch, 1, queries, keys).

    Query i stands at position i + offset, which is one number or one for each batch entry; `left`
    and `right` bound the distance unless -1.
    """
    room((queries, keys), np.int64, host=not np.ndim(offset))
    position = np.arange(queries)[:, None]
    if np.ndim(offset):
        offset = jnp.asarray(offset).reshape(-1, 1, 1, 1)
    ahead = np.arange(keys) - (position + offset)
    visible = np.ones((queries, keys), bool)
    if left >= 0:
        visible = visible & (ahead >= -left)
    if right >= 0:
        visible = visible & (ahead <= right)
    return visible


def apply_mask(x, mask):
    """Add a float mask, or put -inf where a boolean one is False; -inf in a mask always wins.

    A mask whose last axis is shorter hides the keys beyond it.
    """
    missing = x.shape[-1] - mask.shape[-1]
    pairs = zip(reversed(mask.shape[:-1]), reversed(x.shape[:-1]), strict=False)
    if missing < 0 or mask.ndim > x.ndim or any(m not in (1, n) for m, n in pairs):
        raise NodeError(f"a mask of shape {mask.shape} does not fit the scores {x.shape}")
    boolean = mask.dtype == np.bool_
    if missing:
        widths = [(0, 0)] * (mask.ndim - 1) + [(0, missing)]
        mask = jnp.pad(mask, widths, constant_values=False if boolean else -np.inf)
    if boolean:
        return jnp.where(mask, x, -jnp.inf)
    mask = mask.astype(x.dtype)
    return jnp.where(mask == -jnp.inf, -jnp.inf, x + mask)


def _softmax_dtype(precision, default):
    if precision is None:
        return default
    dtype = canonical(element_dtype(precision))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise NodeError(f"softmax_precision must be of a floating-point type, and is {dtype}")
    return dtype


@op("Attention", since=23)
def attention(
    q,
    k,
    v,
    attn_mask=None,
    past_key=None,
    past_value=None,
    nonpad_kv_seqlen=None,
    *,
    is_causal=0,
    kv_num_heads=None,
    left_window_size=-1,
    q_num_heads=None,
    qk_matmul_output_mode=0,
    right_window_size=-1,
    scale=None,
    softcap=0.0,
    softmax_precision=None,
):
    """Y = softmax(softcap(scale Q K') + mask) V; Q, K, V of rank 4, or rank 3 with heads packed.

    Query i stands at position i + offset: the length of the past, or `nonpad_kv_seqlen` less the
    number of queries. A query that sees no key gives zeros.
    """
    if (past_key is None) != (past_value is None):
        raise NodeError("past_key and past_value go together")
    if nonpad_kv_seqlen is not None and past_key is not None:
        raise NodeError("nonpad_kv_seqlen cannot be combined with past_key")
    if min(left_window_size, right_window_size) < -1:
        raise NodeError("a window size is -1 (no bound) or not negative")
    if qk_matmul_output_mode not in range(4):
        raise NodeError(f"qk_matmul_output_mode must be 0 to 3, not {qk_matmul_output_mode}")
    packed = q.ndim == 3
    q, k, v = (
        split_heads(q, q_num_heads),
        split_heads(k, kv_num_heads),
        split_heads(v, kv_num_heads),
    )
    offset = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k = jnp.concatenate([past_key, k], axis=2)
        v = jnp.concatenate([past_value, v], axis=2)
    queries, keys = q.shape[2], k.shape[2]
    if nonpad_kv_seqlen is not None:
        offset = nonpad_kv_seqlen - queries

    raw = scores(q, k, scale)
    capped = soft_cap(raw, softcap)
    biased = capped
    if attn_mask is not None:
        biased = apply_mask(biased, attn_mask)
    left, right = left_window_size, 0 if is_causal else right_window_size
    if left >= 0 or right >= 0:
        biased = apply_mask(biased, reach(queries, keys, offset, left=left, right=right))
    if nonpad_kv_seqlen is not None:
        biased = apply_mask(biased, np.arange(keys) < nonpad_kv_seqlen[:, None, None, None])
    wide = biased.astype(_softmax_dtype(softmax_precision, biased.dtype))
    probabilities = masked_softmax(wide)
    y = weighted_values(probabilities, v)
    exposed = (raw, capped, biased, probabilities)[qk_matmul_output_mode].astype(q.dtype)
    return merge_heads(y) if packed else y, k, v, exposed


@op("FlexAttention", since=1, domain="ai.onnx.preview")
def flex_attention(q, k, v, *, prob_mod=None, scale=None, score_mod=None, softmax_precision=None):
    """Y = prob_mod(softmax(score_mod(scale Q K'))) V, at least float32 from the scores on."""
    dtype = _softmax_dtype(softmax_precision, jnp.promote_types(q.dtype, np.float32))
    x = scores(q, k, scale).astype(dtype)
    if score_mod is not None:
        (x,) = score_mod(x)
    probabilities = masked_softmax(x)
    if prob_mod is not None:
        (probabilities,) = prob_mod(probabilities)
    return weighted_values(probabilities, v.astype(dtype)).astype(v.dtype)


def angles(cos_cache, sin_cache, positions):
    """Return what the caches hold for positions: NaN where they end before a traced one."""
    return gather(cos_cache, positions), gather(sin_cache, positions)


def rotate(x, cos, sin, interleaved):
    """Rotate pairs of the last axis: neighbours if `interleaved`, else elements half of it apart.

    `cos` and `sin` hold one number a pair; what `x` has beyond twice their length stays as it is
    (RoFormer, arXiv 2104.09864).
    """
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        pairs = turned.reshape(*turned.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([cos * a - sin * b, sin * a + cos * b], axis=-1).reshape(turned.shape)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = jnp.concatenate([cos * a - sin * b, sin * a + cos * b], axis=-1)
    return jnp.concatenate([turned, rest], axis=-1)


@op("RotaryEmbedding", since=23)
def rotary_embedding(
    x,
    cos_cache,
    sin_cache,
    position_ids=None,
    *,
    interleaved=0,
    num_heads=None,
    rotary_embedding_dim=0,
):
    """Rotary position embedding of the first `rotary_embedding_dim` channels (0: all) of a head."""
    heads = split_heads(x, num_heads if x.ndim == 3 else None)
    if position_ids is not None:
        cos_cache, sin_cache = angles(cos_cache, sin_cache, position_ids)
    turned = rotary_embedding_dim or heads.shape[-1]
    if turned % 2 or turned > heads.shape[-1]:
        raise NodeError(f"of {heads.shape[-1]} channels {turned} do not rotate in pairs")
    half = turned // 2
    if not cos_cache.shape[-1] == sin_cache.shape[-1] == half:
        raise NodeError(
            f"the caches hold {cos_cache.shape[-1]} and {sin_cache.shape[-1]} angles, not {half}"
        )
    y = rotate(heads, cos_cache[:, None], sin_cache[:, None], interleaved)
    return y if x.ndim == 4 else merge_heads(y)
