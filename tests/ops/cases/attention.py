"""Attention, FlexAttention, LinearAttention, RotaryEmbedding."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(2)


def f(*shape):
    return rng.normal(size=shape).astype(np.float32)


def qkv(heads=2, kv_heads=2, queries=3, keys=4, size=2, v_size=3):
    return [f(2, heads, queries, size), f(2, kv_heads, keys, size), f(2, kv_heads, keys, v_size)]


def packed(heads=2, kv_heads=2, queries=3, keys=4, size=2, v_size=3):
    return [f(2, queries, heads * size), f(2, keys, kv_heads * size), f(2, keys, kv_heads * v_size)]


MASK = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], bool)
PAST = [f(2, 2, 2, 2), f(2, 2, 2, 3)]
LENGTHS = np.array([3, 2], np.int64)

CASES = [
    Case("Attention", qkv(), outputs=4),
    Case("Attention", qkv(4, 2), {"scale": 0.3}, id="grouped"),
    Case("Attention", packed(4, 2), {"q_num_heads": 4, "kv_num_heads": 2}, id="packed"),
    Case("Attention", qkv(), {"softcap": 1.5, "qk_matmul_output_mode": 1}, outputs=4, id="softcap"),
    Case("Attention", qkv(), {"is_causal": 1, "qk_matmul_output_mode": 3}, outputs=4, id="causal"),
    Case(
        "Attention",
        [*qkv(), f(3, 4)],
        {"qk_matmul_output_mode": 3, "softmax_precision": 11},
        outputs=4,
        id="float_mask",
    ),
    Case("Attention", [*qkv(), MASK], id="boolean_mask_with_empty_row"),
    Case("Attention", [*qkv(), f(2, 1, 3, 6), *PAST], {"is_causal": 1}, outputs=3, id="past"),
    Case("Attention", [*qkv(), f(3, 3)], since=24, id="short_mask"),
    Case("Attention", [*qkv(), None, None, None, LENGTHS], since=24, id="lengths"),
    Case(
        "Attention",
        [*qkv(), MASK, None, None, LENGTHS],
        {"is_causal": 1},
        since=24,
        id="causal_lengths",
    ),
    Case(
        "Attention",
        qkv(queries=4, keys=5),
        {"left_window_size": 1, "right_window_size": 2},
        since=25,
        id="window",
    ),
    Case("FlexAttention", qkv(4, 2), domain="ai.onnx.preview"),
    Case("FlexAttention", qkv(), {"scale": 0.5}, domain="ai.onnx.preview", id="scale"),
    Case(
        "LinearAttention",
        [f(2, 3, 8), f(2, 3, 4), f(2, 3, 6)],
        {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": "linear"},
        outputs=2,
        id="linear",
    ),
    Case(
        "LinearAttention",
        [f(2, 3, 4), f(2, 3, 4), f(2, 3, 6), f(2, 2, 2, 3), -abs(f(2, 3, 4))],
        {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "gated", "scale": 0.7},
        outputs=2,
        id="gated",
    ),
    Case(
        "LinearAttention",
        [f(2, 3, 4), f(2, 3, 4), f(2, 3, 6), None, None, abs(f(2, 3, 1))],
        {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "delta"},
        outputs=2,
        id="delta",
    ),
    Case(
        "LinearAttention",
        [f(2, 3, 4), f(2, 3, 4), f(2, 3, 6), f(2, 2, 2, 3), -abs(f(2, 3, 2)), abs(f(2, 3, 2))],
        {"q_num_heads": 2, "kv_num_heads": 2},
        outputs=2,
        id="gated_delta",
    ),
    Case("RotaryEmbedding", [f(2, 2, 3, 4), f(2, 3, 2), f(2, 3, 2)]),
    Case(
        "RotaryEmbedding",
        [f(2, 3, 12), f(5, 2), f(5, 2), np.array([[0, 1, 4], [2, 3, 3]])],
        {"num_heads": 2, "rotary_embedding_dim": 4, "interleaved": 1},
        id="packed_partial",
    ),
]
