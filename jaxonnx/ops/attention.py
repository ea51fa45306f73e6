"""Attention with its variants, linear attention, and rotary position embedding.

Heads stand at axis 1 throughout: (batch, heads, sequence, head size).
"""

import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx._constraints import AtLeast
from jaxonnx.errors import NodeError
from jaxonnx.ops.attention_softmax import (
    Window,
    attend,
    group_queries,
    masked_softmax,
    scores,
    weigh,
    weighted_values,
)
from jaxonnx.ops.common import canonical, element_dtype
from jaxonnx.ops.indexing import gather
from jaxonnx.registry import Outputs, op


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


def _softmax_dtype(precision, default):
    if precision is None:
        return default
    dtype = canonical(element_dtype(precision))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise NodeError(f"softmax_precision must be of a floating-point type, got {dtype}")
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
    left_window_size: Annotated[int, AtLeast(-1)] = -1,
    q_num_heads=None,
    qk_matmul_output_mode: Literal[0, 1, 2, 3] = 0,
    right_window_size: Annotated[int, AtLeast(-1)] = -1,
    scale=None,
    softcap=0.0,
    softmax_precision=None,
    outputs: Outputs = 4,
):
    """Y = softmax(softcap(scale Q K') + mask) V; Q, K, V of rank 4, or rank 3 with heads packed.

    Query i stands at position i + offset: the length of the past, or `nonpad_kv_seqlen` less the
    number of queries. A query that sees no key gives zeros.
    """
    if (past_key is None) != (past_value is None):
        raise NodeError("past_key and past_value go together")
    if nonpad_kv_seqlen is not None and past_key is not None:
        raise NodeError("nonpad_kv_seqlen cannot be combined with past_key")
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

    left, right = left_window_size, 0 if is_causal else right_window_size
    window = None
    if max(left, right) >= 0 or nonpad_kv_seqlen is not None:
        at = jnp.arange(keys)
        if nonpad_kv_seqlen is not None:
            at = jnp.where(at < nonpad_kv_seqlen[:, None], at, -1)
        window = Window(jnp.arange(queries) + jnp.asarray(offset)[..., None], at, left, right)
    dtype = _softmax_dtype(softmax_precision, None)
    keywords = {"masks": (attn_mask,), "window": window, "scale": scale, "cap": softcap}
    y = attend(q, k, v, **keywords, dtype=dtype)
    y = merge_heads(y) if packed else y
    if outputs < 4:
        return y, k, v
    x = weigh(q, k, **keywords, dtype=dtype)
    stages = x.raw, x.capped, x.masked, x.probabilities
    return y, k, v, stages[qk_matmul_output_mode].astype(q.dtype)


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
    """Look up cosines and sines by position; NaN for a traced position beyond the caches."""
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


def _describe_packed(x):
    """Describe (steps, batch, heads, size) for people."""
    steps, batch, heads, size = x.shape
    return f"{batch} sequences of {steps} steps with {heads} heads of {size}"


@op("LinearAttention", since=27)
def linear_attention(
    query,
    key,
    value,
    past_state=None,
    decay=None,
    beta=None,
    *,
    chunk_size=64,
    kv_num_heads,
    q_num_heads,
    scale=0.0,
    update_rule: Literal["linear", "gated", "delta", "gated_delta"] = "gated_delta",
):
    """o_t = scale S_t' q_t, where with a decay g and an update rate beta (each if the rule has it)

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}' k_t)'; without beta, k_t v_t' is
    added. One `lax.scan` in (at least) float32; `chunk_size` is a hint for other implementations.
    """
    rules = {"linear": (0, 0), "gated": (1, 0), "delta": (0, 1), "gated_delta": (1, 1)}
    for name, needed, tensor in zip(
        ("decay", "beta"), rules[update_rule], (decay, beta), strict=True
    ):
        if needed != (tensor is not None):
            verb = "needs" if needed else "takes no"
            raise NodeError(f"update_rule {update_rule!r} {verb} {name}")
    wide = jnp.promote_types(query.dtype, np.float32)

    def steps(x, heads):
        return split_heads(x, heads).astype(wide).transpose(2, 0, 1, 3)

    q, k, v = steps(query, q_num_heads), steps(key, kv_num_heads), steps(value, kv_num_heads)
    g = None if decay is None else steps(decay, kv_num_heads)
    rate = None if beta is None else steps(beta, beta.shape[-1])
    heads, size = k.shape[2:]
    fitting = {
        "query": (q, (q.shape[2],), (size,)),
        "value": (v, (heads,), (v.shape[3],)),
        "decay": (g, (heads,), (1, size)),
        "beta": (rate, (1, heads), (1,)),
    }
    for name, (x, counts, sizes) in fitting.items():  # a 1 would be broadcast
        if x is None:
            continue
        if x.shape[:2] != k.shape[:2] or x.shape[2] not in counts or x.shape[3] not in sizes:
            raise NodeError(
                f"{name} of {_describe_packed(x)} does not fit a key of {_describe_packed(k)}"
            )
    shape = (*k.shape[1:], v.shape[-1])
    if past_state is not None and past_state.shape != shape:
        raise NodeError(f"past_state has shape {past_state.shape}, not {shape}")
    factor = scale or 1 / math.sqrt(q.shape[-1])
    state_dtype = query.dtype if past_state is None else past_state.dtype
    if past_state is None:
        past_state = jnp.zeros(shape, wide)

    def step(state, inputs):
        q, k, v, g, rate = inputs
        if g is not None:
            state = state * jnp.exp(g)[..., None]
        if rate is not None:
            v = rate * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * v[..., None, :]
        o = jnp.einsum("bhgk,bhkv->bhgv", group_queries(q, kv_num_heads), state)
        return state, factor * o.reshape(*q.shape[:2], v.shape[-1])

    state, o = lax.scan(step, past_state.astype(wide), (q, k, v, g, rate))
    return merge_heads(o.transpose(1, 2, 0, 3)).astype(query.dtype), state.astype(state_dtype)
