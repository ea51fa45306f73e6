"""Masked rows, precision and refusals of the attention operators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxonnx.ops  # noqa: F401 - registers the operators
from jaxonnx.errors import NodeError
from jaxonnx.registry import lookup

attention = lookup("", "Attention", 25)
flex = lookup("ai.onnx.preview", "FlexAttention", 1)
linear = lookup("", "LinearAttention", 27)
rotary = lookup("", "RotaryEmbedding", 23)

rng = np.random.default_rng(0)
Q, K, V = (rng.normal(size=(1, 2, 3, 2)).astype(np.float32) for _ in range(3))
EMPTY_ROW = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1]], bool)
HIDDEN = np.where(EMPTY_ROW, 0, -np.inf).astype(np.float32)


def finite(tree):
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))


@pytest.mark.deep
@pytest.mark.parametrize("mask", [EMPTY_ROW, HIDDEN], ids=["boolean", "float"])
def test_a_query_without_keys_gives_zeros_and_gradients_without_nan(mask):
    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, mask)[0] ** 2)

    y = attention(Q, K, V, mask)[0]
    np.testing.assert_array_equal(y[:, :, 1], 0)
    gradients = jax.grad(loss, (0, 1, 2))(Q, K, V)
    assert finite(gradients)
    np.testing.assert_array_equal(gradients[0][:, :, 1], 0)
    assert finite(jax.jvp(jax.grad(loss), (Q, K, V), (Q, K, V)))


def test_a_softcap_that_is_not_positive_caps_nothing():
    """As for onnx.reference and onnxruntime."""
    y = attention(Q, K, V)[0]
    for softcap in (0.0, -1.0, -np.inf):
        np.testing.assert_array_equal(attention(Q, K, V, softcap=softcap)[0], y)


def test_infinite_scores_behind_a_mask_do_not_show():
    k = K.copy()
    k[:, :, 1] = np.inf
    y = attention(abs(Q), k, V, np.array([True, False, True]))[0]
    assert finite(y)


def test_score_mod_may_hide_every_key():
    y = flex(Q, K, V, score_mod=lambda x: (x + HIDDEN,))
    np.testing.assert_array_equal(y[:, :, 1], 0)


def test_half_precision_of_flex_attention_is_widened():
    seen = []
    flex(
        *(x.astype(np.float16) for x in (Q, K, V)), prob_mod=lambda p: seen.append(p.dtype) or (p,)
    )
    assert seen == [np.float32]


def test_negative_offset_masks_the_first_queries():
    y = attention(Q, K, V, None, None, None, np.array([1]), is_causal=1)[0]
    np.testing.assert_array_equal(y[:, :, :2], 0)
    np.testing.assert_allclose(y[:, :, 2], V[:, :, 0], rtol=1e-6)


def test_linear_attention_continues_from_its_state():
    q, k, v = (rng.normal(size=(1, 4, 4)).astype(np.float32) for _ in range(3))
    heads = {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear"}
    whole, last = linear(q, k, v, **heads)
    first, state = linear(q[:, :2], k[:, :2], v[:, :2], **heads)
    second, state = linear(q[:, 2:], k[:, 2:], v[:, 2:], state, **heads)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-6)


def test_refusals():
    with pytest.raises(NodeError, match="go together"):
        attention(Q, K, V, None, K)
    with pytest.raises(NodeError, match="cannot be combined"):
        attention(Q, K, V, None, K, V, np.array([3]))
    with pytest.raises(NodeError, match="left_window_size must be at least -1, got -2"):
        attention(Q, K, V, left_window_size=-2)
    with pytest.raises(NodeError, match="not a multiple"):
        attention(Q[:, :1], K, V)
    with pytest.raises(NodeError, match="softmax_precision must be of a floating-point type"):
        attention(Q, K, V, softmax_precision=3)
    for mode in (-1, 4):
        with pytest.raises(NodeError, match=f"qk_matmul_output_mode must be 0, 1, .* got {mode}"):
            attention(Q, K, V, qk_matmul_output_mode=mode)
    with pytest.raises(NodeError, match="into None heads"):
        attention(Q[0], K[0], V[0])
    with pytest.raises(NodeError, match=f"has {Q.shape[1]} heads, not 7"):
        attention(Q, K, V, q_num_heads=7)
    attention(Q, K, V, q_num_heads=Q.shape[1])  # exporters repeat what the shape says
    for q, k, v in ((Q[..., :1], K, V), (Q, K[..., :1], V), (Q[:0], K, V), (Q, K, V[:0])):
        with pytest.raises(NodeError, match=r"differ in batch or head|do not fit"):
            attention(q, k, v)
    with pytest.raises(NodeError, match="do not fit the scores"):
        attention(Q, K, V[:, :, :1])
    short = (Q[:, :, :1], K, V), (Q, K[:, :, :1], V[:, :, :1]), (Q[:, :1], K[:, :1], V[:, :1])
    for q, k, v in short:  # the mask would broadcast them, or be cut
        with pytest.raises(NodeError, match="does not fit the scores"):
            attention(q, k, v, np.zeros((1, 2, 3, 3), np.float32))
    one = np.ones((1, Q.shape[2], Q.shape[3] // 2), np.float32)
    rotary(Q, one, one, num_heads=7)  # is for packed heads, and others ignore it
    with pytest.raises(NodeError, match="needs decay"):
        linear(Q[0], K[0], V[0], q_num_heads=1, kv_num_heads=1, update_rule="gated")
    ones = {"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "delta"}
    for q, k, v, beta in (
        (Q[0, :1], K[0], V[0], Q[0, :, :, :1]),
        (Q[0, :, :, :1], K[0], V[0], Q[0, :, :, :1]),
        (Q[0], K[0], V[0, :, :1], Q[0, :, :, :1]),
        (Q[0], K[0], V[0], Q[0, :, :1, :1]),
        (Q[0], K[0], V[0], Q[0]),
    ):  # what is 1 would be broadcast
        with pytest.raises(NodeError, match="does not fit a key of 2 sequences of 3 steps"):
            linear(q, k, v, None, None, beta, **ones)
    with pytest.raises(NodeError, match=r"past_state has shape \(2, 1, 2, 1\), not \(2, 1, 2, 2\)"):
        linear(Q[0], K[0], V[0], Q[0, :, None, :2, :1], None, Q[0, :, :, :1], **ones)
    with pytest.raises(NodeError, match="angles"):
        rotary(Q, np.ones((1, 3, 2), np.float32), np.ones((1, 3, 2), np.float32))
    one = np.ones((1, 3, 1), np.float32)
    for x, size in ((Q[..., :1], 0), (np.ones((1, 2, 3, 4), np.float32), 3), (Q, 4)):
        with pytest.raises(NodeError, match="do not rotate in pairs"):
            rotary(x, one, one, rotary_embedding_dim=size)


def test_positions_beyond_the_caches_are_no_angles():
    """The last angle was taken for them; negative ones count from the end, as in Gather."""
    x, cache = np.ones((1, 1, 2, 2), np.float32), np.arange(3, dtype=np.float32)[:, None]
    y = rotary(x, cache, cache, jnp.array([[7, -1]]))
    np.testing.assert_array_equal(y, [[[[np.nan] * 2, [0, 4]]]])
    with pytest.raises(NodeError, match="index 7 is out of range"):
        rotary(x, cache, cache, np.array([[7, -1]]))
