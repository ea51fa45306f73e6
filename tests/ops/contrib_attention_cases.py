"""Cases of onnxruntime's rarer attention operators for `test_contrib`."""

from itertools import pairwise

import numpy as np

from tests.ops.contrib_cases import Fused, f, i32

LENGTHS = np.array([1, 3, 2])
PADDED = np.arange(3) >= LENGTHS[:, None]
OFFSETS = np.argsort(PADDED.ravel(), kind="stable").astype(np.int32).reshape(3, 3)
ENDS = i32(0, 1, 4, 6)


def attend(q, k, v, bias=0):
    """Attention of (steps, heads, size)."""
    x = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(np.float32(q.shape[-1])) + bias
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), v).reshape(len(q), -1)


def packed(q, k, v, bias, offsets, ends):
    biases = np.split(bias, 3)
    q, k, v = ((x + b).reshape(len(x), 2, -1) for x, b in zip((q, k, v), biases, strict=True))
    spans = [slice(a, b) for a, b in pairwise(ends)]
    return np.concatenate([attend(q[at], k[at], v[at]) for at in spans])


def projected(x, w, bias, offsets, ends):
    return packed(*np.split(x @ w, 3, axis=1), bias, offsets, ends)


def remove_padding(x, counts):
    rows = np.concatenate([one[:n] for one, n in zip(x, counts, strict=True)])
    return rows, OFFSETS, ENDS, i32(3)


def restore_padding(rows, offsets):
    y = np.zeros((9, rows.shape[1]), np.float32)
    y[offsets.ravel()[: len(rows)]] = rows
    return y.reshape(3, 3, -1)


def t5(bias_table, queries, keys):
    """One by one, bidirectional, at most 20 apart: as in Mesh TensorFlow."""
    y = np.zeros((1, bias_table.shape[1], queries, keys), np.float32)
    half = len(bias_table) // 2
    for i in range(queries):
        for j in range(keys):
            n = abs(j - i)
            near = half // 2
            far = near + int(np.log(max(n, 1) / near) / np.log(20 / near) * (half - near))
            bucket = (half if j > i else 0) + (n if n < near else min(far, half - 1))
            y[0, :, i, j] = bias_table[bucket]
    return y


def gated(q, q_bias, rel_pos, w, b, eco):
    q = (q + q_bias).reshape(2, 3, 2, 4).transpose(0, 2, 1, 3)
    gates = 1 / (1 + np.exp(-(q @ w + b).reshape(2, 2, 3, 2, 2).sum(-1)))
    return (gates[..., :1] * (gates[..., 1:] * eco - 1) + 2) * rel_pos


STEP = [f(2, 1, 8), f(2, 1, 8), f(2, 1, 8)]
PAST = [f(2, 2, 3, 4), f(2, 2, 3, 4)]
BLOCKS = [
    i32(*[[0, 1, 3], [0, 1, 2]]),
    i32(*[[0, 0, 1], [0, 1, -1]]),
]
CACHES = [f(2, 2, 32, 8), f(2, 2, 32, 8)]
SPARSE = {"num_heads": 4, "kv_num_heads": 2, "sparse_block_size": 16}

CASES = [
    Fused(
        "DecoderMaskedMultiHeadAttention",
        [*STEP, None, None, f(2, 2, 5, 4), f(2, 2, 5, 4), i32(3), None, None, f(24)],
        {"num_heads": 2, "past_present_share_buffer": 1},
        ["y", "k", "v"],
        shared=(5, 6),
    ),
    Fused(
        "DecoderMaskedMultiHeadAttention",
        [f(2, 1, 8), *PAST],
        {"num_heads": 2, "scale": 0.3},
        id="cross",
    ),
    Fused(
        "SparseAttention",
        [
            f(2, 20, 32),
            f(2, 20, 16),
            f(2, 20, 16),
            *CACHES,
            *BLOCKS,
            i32(20),
            i32(20, 20),
        ],
        SPARSE,
        ["y", "k", "v"],
        shared=(3, 4),
        id="prompt",
    ),
    Fused(
        "SparseAttention",
        [f(2, 1, 32), f(2, 1, 16), f(2, 1, 16), *CACHES, *BLOCKS, i32(19), i32(19, 19)],
        SPARSE | {"scale": 0.5},  # of unequal lengths onnxruntime reads what nobody wrote
        ["y", "k", "v"],
        shared=(3, 4),
        id="next",
    ),
    Fused(
        "RemovePadding",
        [f(3, 3, 2), LENGTHS.astype(np.int32)],
        outputs=["y", "offsets", "ends", "longest"],
        expected=remove_padding,
    ),
    Fused("RestorePadding", [f(6, 2), OFFSETS], expected=restore_padding),
    Fused(
        "PackedAttention",
        [f(6, 4), f(4, 24), f(24), OFFSETS, ENDS],
        {"num_heads": 2},
        expected=projected,
    ),
    Fused(
        "PackedMultiHeadAttention",
        [f(6, 8), f(6, 8), f(6, 8), f(24), OFFSETS, ENDS],
        {"num_heads": 2},
        expected=packed,
    ),
    Fused(
        "RelativePositionBias",
        [f(8, 2), np.array(30), np.array(30)],
        {"is_bidirectional": 1, "max_distance": 20},
        expected=lambda table, queries, keys: t5(table, int(queries), int(keys)),
    ),
    Fused(
        "GatedRelativePositionBias",
        [f(2, 3, 8), f(8), f(1, 2, 3, 3), f(4, 4), f(4), f(1, 2, 1, 1)],
        {"num_heads": 2},
        expected=gated,
    ),
]
