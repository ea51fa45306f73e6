"""LinearAttention: a state in place of the keys and values of all steps before."""

import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.errors import NodeError
from jaxonnx.ops.attention import merge_heads, split_heads
from jaxonnx.ops.attention_softmax import group_queries
from jaxonnx.registry import op


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
