"""Attention with its variants, linear attention, and rotary position embedding.

Heads stand at axis 1 throughout: (batch, heads, sequence, head size). Query heads that share a key
and value head are a group, so that nothing is repeated.
"""

import math
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx._constraints import AtLeast
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.lowering import is_half, product, product_rounded
from jaxonnx.ops.common import canonical, element_dtype
from jaxonnx.ops.selection import gather
from jaxonnx.registry import Outputs, op

WHOLE = 1 << 27
"""The most bytes of scores, in float32, that are computed at once; more are computed in blocks."""
BLOCK = 1 << 24
"""The bytes of the scores of a block."""

KEYS = 256
"""The keys of a block of `attend_to_first`."""


def group_queries(x, kv_heads):
    """Reshape query heads to (batch, key heads, query heads per key head, ...)."""
    if x.shape[1] % kv_heads:
        raise NodeError(f"{x.shape[1]} query heads are not a multiple of {kv_heads} key heads")
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def scores(q, k, scale=None):
    """Compute scale * Q K'; by default the scale is 1 / sqrt(head size).

    As in the specification each factor is multiplied by the root of the scale, against overflow.
    Shapes (batch, heads, queries, size) and (batch, key heads, keys, size) to (batch, heads,
    queries, keys). Half precision gives float32, so that the softmax is of numbers not yet rounded.
    """
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):  # a 1 would be broadcast
        raise NodeError(f"queries {q.shape} and keys {k.shape} differ in batch or head size")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if is_half(q):
        return scale * product(_rows(q, k.shape[1]), k.mT).reshape(*q.shape[:3], k.shape[2])
    is_known = isinstance(q.shape[2], int) and isinstance(k.shape[2], int)
    if is_known and k.shape[2] >= 32 * q.shape[2]:
        # a cache, of which XLA would make a copy to scale it, and one to transpose it
        y = jnp.einsum("bhkd,bhgqd->bhkgq", k, group_queries(q * scale, k.shape[1]))
        y = jnp.moveaxis(y, 2, -1)
    else:
        root = math.sqrt(abs(scale))
        grouped = group_queries(q * math.copysign(root, scale), k.shape[1])
        y = jnp.einsum("bhgqd,bhkd->bhgqk", grouped, k * root)
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


def masked_softmax(x, sink=None):
    """Compute softmax over the last axis; a row of -inf gives zeros, and no gradient is NaN.

    A `sink` is one more score of each row, which takes its share and has no value.
    """
    exponentials, total = _exponentials(x, sink)
    return exponentials / total


def _exponentials(x, sink):
    """Return the numerators of `masked_softmax`, at most 1, and the denominator of each row."""
    top = x.max(axis=-1, keepdims=True, initial=-jnp.inf)
    top = top if sink is None else jnp.maximum(top, sink)
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    e = jnp.exp(x - top)
    total = e.sum(axis=-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - top)
    return e, jnp.where(total == 0, 1, total)


def soft_cap(x, cap):
    """Return cap * tanh(x / cap), or x if cap is not positive, as in onnx.reference."""
    return cap * jnp.tanh(x / cap) if cap > 0 else x


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


class Window(NamedTuple):
    """Which keys a query sees: those at a distance of at most `left` before and `right` after it.

    Positions have the shape (steps,), or (batch, steps) where they differ between samples.
    """

    queries: Any
    keys: Any
    """Negative where there is no key."""
    left: int = -1
    """-1 for no bound, as for `right`."""
    right: int = -1

    def mask(self):
        """Return a boolean mask (queries, keys), or (batch, 1, queries, keys)."""
        queries, keys = self.queries[..., :, None], self.keys[..., None, :]
        visible = keys >= 0
        if self.left >= 0:
            visible = visible & (keys >= queries - self.left)
        if self.right >= 0:
            visible = visible & (keys <= queries + self.right)
        return visible if visible.ndim == 2 else visible[:, None]


class Scores(NamedTuple):
    """The stages of attention scores, each (batch, heads, queries, keys)."""

    raw: Any
    """scale * Q K'."""
    capped: Any
    """`raw` after the soft cap."""
    masked: Any
    """`capped` with the masks."""
    exponentials: Any
    """The numerators of the softmax of `masked`."""
    total: Any
    """Its denominators, (batch, heads, queries, 1)."""

    @property
    def probabilities(self) -> Any:
        """The softmax of `masked`: the weights of the values."""
        return self.exponentials / self.total

    def weigh(self, v: Any) -> Any:
        """Sum values (batch, key heads, keys, size), weighted by the probabilities.

        In float32 sums are divided, not weights: of each layer's arrays (queries, keys) gradients
        then need the exponentials only. In half precision such sums could overflow.
        """
        if is_half(v):
            return weighted_values(self.probabilities, v)
        y = weighted_values(self.exponentials, v)
        return y / self.total.astype(y.dtype)


def weigh(q, k, masks=(), window=None, scale=None, cap=0.0, sink=None, dtype=None) -> Scores:
    """Compute the scores of all keys for all queries; arguments as in `attend`."""
    raw = scores(q, k, scale)
    capped = masked = soft_cap(raw, cap)
    for mask in masks:
        masked = masked if mask is None else apply_mask(masked, mask)
    if window is not None:
        masked = apply_mask(masked, window.mask())
    wide = masked if dtype is None else masked.astype(dtype)
    if sink is not None:
        sink = sink.astype(wide.dtype)[:, None, None]
    return Scores(raw, capped, masked, *_exponentials(wide, sink))


def attend(q, k, v, masks=(), window=None, scale=None, cap=0.0, sink=None, dtype=None):
    """Compute the attention of queries (batch, heads, steps, size) over all keys and values.

    Scores that take more than `WHOLE` bytes are computed for a block of queries at a time, and
    again for gradients: nothing of size (queries, keys) is kept.

    Args:
      q: (batch, heads, steps, size).
      k, v: (batch, key heads, keys, size).
      masks: float masks to add, or boolean ones, that broadcast to the scores; None are ignored.
      window: which keys a query sees by their positions.
      scale: see `scores`.
      cap: the soft cap of the scores, by a tanh; 0 for none.
      sink: (heads,), the score of an additional key without a value.
      dtype: of the softmax; by default float32 for half precision.
    """
    keywords = {"scale": scale, "cap": cap, "sink": sink, "dtype": dtype}
    steps, size = q.shape[2], _block_length(q, k)
    if size is None:
        return weigh(q, k, masks, window, **keywords).weigh(v)
    count = -(-steps // size)
    check_size((*q.shape[:2], size, k.shape[2]), np.float32)

    def split(x, axis):
        """Return the blocks of `x` along an axis, which comes first; the last one is padded."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, count * size - steps)
        axis %= x.ndim
        x = jnp.pad(x, widths).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    # Gradients for keys and values are sums over blocks: half precision would round each sum.
    kv = [x.astype(np.float32) if is_half(x) else x for x in (k, v)]
    by_query = [m is not None and m.ndim > 1 and m.shape[-2] == steps for m in masks]
    blocks = [split(m, -2) if split_it else () for m, split_it in zip(masks, by_query, strict=True)]
    places = () if window is None else split(jnp.asarray(window.queries), -1)

    @jax.checkpoint
    def block(part):
        q_part, mask_parts, queries = part
        keys, values = (x.astype(y.dtype) for x, y in zip(kv, (k, v), strict=True))
        all_masks = zip(by_query, mask_parts, masks, strict=True)
        parts = [mine if split_it else whole for split_it, mine, whole in all_masks]
        part_window = None if window is None else window._replace(queries=queries)
        return weigh(q_part, keys, parts, part_window, **keywords).weigh(values)

    y = jnp.moveaxis(lax.map(block, (split(q, 2), blocks, places)), 0, 2)
    return y.reshape(*y.shape[:2], count * size, y.shape[-1])[:, :, :steps]


def attend_to_first(count, q, k, v, window, scale=None, cap=0.0, sink=None):
    """Compute `attend` in a cache of which the first `count` keys are filled; without gradients.

    On CPU only these are read, in blocks, whose softmax is combined as in Dao et al.,
    "FlashAttention", 2022 (arXiv:2205.14135); elsewhere all at once, in parallel. `count` is
    traced; the other arguments are as in `attend`.
    """
    room = k.shape[2]
    positions = jnp.broadcast_to(window.keys, (len(k), room))
    before = 0 if window.left < 0 else window.queries.min() - window.left
    first, end = jnp.maximum(before, 0) // KEYS, -(-count // KEYS)

    def add_block(i, sums):
        start = jnp.minimum(i * KEYS, room - KEYS)  # the last block overlaps the one before it
        keys, values, at = (
            lax.dynamic_slice_in_dim(x, start, KEYS, axis)
            for x, axis in ((k, 2), (v, 2), (positions, 1))
        )
        block = window._replace(keys=jnp.where(start + np.arange(KEYS) < i * KEYS, -1, at))
        wide, keys = q.astype(np.float32), keys.astype(np.float32)
        x = weigh(wide, keys, (), block, scale, cap).masked
        top, total, y = sums
        new_top = jnp.maximum(top, x.max(axis=-1, keepdims=True))
        subtracted = jnp.where(new_top == -jnp.inf, 0, new_top)
        e, share = jnp.exp(x - subtracted), jnp.exp(top - subtracted)
        total = total * share + e.sum(axis=-1, keepdims=True)
        return new_top, total, y * share + weighted_values(e, values.astype(np.float32))

    def attend_in_blocks():
        total = jnp.zeros((*q.shape[:3], 1), np.float32)
        top, y = total - jnp.inf, jnp.zeros((*q.shape[:3], v.shape[3]), np.float32)
        if sink is not None:
            top, total = total + sink.astype(np.float32)[:, None, None], total + 1
        _, total, y = lax.fori_loop(first, end, add_block, (top, total, y))
        return (y / jnp.where(total == 0, 1, total)).astype(v.dtype)

    whole = partial(attend, q, k, v, (), window, scale=scale, cap=cap, sink=sink)
    return lax.platform_dependent(cpu=attend_in_blocks, default=whole)


def _block_length(q, k):
    """Return the number of queries in a block, or None if all scores are computed at once."""
    batch, heads, steps, _ = q.shape
    if not all(isinstance(n, int) for n in (batch, heads, steps, k.shape[2])):
        return None  # symbolic sizes of `jax.export`
    row = batch * heads * k.shape[2] * 4
    return None if row * steps <= WHOLE else max(1, min(steps, BLOCK // row))


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
