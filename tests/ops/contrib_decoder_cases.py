"""Cases of what decoders have besides attention, for `test_contrib`."""

import numpy as np

from tests.ops.contrib_cases import Fused, f, u8

TOKENS, SIZE, WIDTH, EXPERTS = 5, 32, 16, 4
X, PROBS = f(TOKENS, SIZE), 2 * f(TOKENS, EXPERTS)
FC1, FC2 = [0.3 * f(EXPERTS, WIDTH, SIZE), f(EXPERTS, WIDTH)], [0.3 * f(EXPERTS, SIZE, WIDTH)]
FUSED = [0.3 * f(EXPERTS, 2 * WIDTH, SIZE), f(EXPERTS, 2 * WIDTH)]
SWIGLU = {
    "activation_type": "swiglu",
    "swiglu_fusion": 1,
    "activation_alpha": 1.702,
    "activation_beta": 1.0,
    "normalize_routing_weights": 1,
    "k": 2,
}


def scale(*shape):
    return np.abs(f(*shape)) * np.float32(0.02)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swiglu_apart(x, probs, w1, b1, w2, b2, w3, b3):
    """k = 1 of SwiGLU whose halves are separate, which onnxruntime's CPU provider lacks."""
    y = np.zeros_like(x)
    for t, e in enumerate(probs.argmax(1)):
        share = 1 / np.exp(probs[t] - probs[t, e]).sum()
        gate, up = w1[e] @ x[t] + b1[e], w3[e] @ x[t] + b3[e]
        gate, up = np.minimum(gate, 1), np.clip(up, -1, 1)
        y[t] = share * (w2[e] @ (gate * sigmoid(gate) * up) + b2[e])
    return y


def float4(x, probs, w1, s1, b1, w2, s2, b2, *rest):
    """k = 1 of float4 weights, which onnxruntime's CPU provider lacks."""
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = np.array(numbers + [-n for n in numbers], np.float32)
    g1, g2 = rest[-2:]
    y = np.zeros_like(x)
    for t, e in enumerate(probs.argmax(1)):
        h = x[t]
        for i, (codes, scales, bias, whole) in enumerate(((w1, s1, b1, g1), (w2, s2, b2, g2))):
            outputs = len(scales[e])
            w = np.zeros((outputs, len(h)), np.float32)
            for n in range(outputs):
                for m in range(len(h)):
                    code = codes[e, m, n // 2] >> 4 if n % 2 else codes[e, m, n // 2] & 15
                    w[n, m] = numbers[code] * scales[e, n, m // 32] * whole[e]
            h = w @ h + bias[e]
            h = np.maximum(h, 0) if i == 0 else h
        y[t] = h / np.exp(probs[t] - probs[t, e]).sum()
    return y


def causal(x, w, bias, state, dilation=1):
    """One by one, with the states after the last two steps."""
    held = (w.shape[2] - 1) * dilation
    whole = np.concatenate([state[-1], x], 2)
    y = np.zeros_like(x)
    for t in range(x.shape[2]):
        for j in range(w.shape[2]):
            y[:, :, t] += w[:, 0, j] * whole[:, :, t + j * dilation]
    y += bias[:, None]
    states = [whole[:, :, t : t + held] for t in (x.shape[2] - 1, x.shape[2])]
    return y * sigmoid(y), np.stack(states)


BITS4 = [u8(EXPERTS, 2 * WIDTH, SIZE // 2), scale(EXPERTS, 2 * WIDTH, 2), f(EXPERTS, 2 * WIDTH)]
BITS4 += [u8(EXPERTS, SIZE, WIDTH // 2), scale(EXPERTS, SIZE, 1), f(EXPERTS, SIZE)]
BITS8 = [u8(EXPERTS, 2 * WIDTH, SIZE), scale(EXPERTS, 2 * WIDTH), None]
BITS8 += [u8(EXPERTS, SIZE, WIDTH), scale(EXPERTS, SIZE), None]
ZEROS = [u8(EXPERTS, WIDTH), u8(EXPERTS, SIZE // 2)]
FLOAT4 = [u8(EXPERTS, SIZE, WIDTH), scale(EXPERTS, 2 * WIDTH, 1), f(EXPERTS, 2 * WIDTH)]
FLOAT4 += [u8(EXPERTS, 2 * WIDTH, SIZE // 2), scale(EXPERTS, SIZE, 1), f(EXPERTS, SIZE)]
FLOAT4 += [None] * 7 + [f(EXPERTS), f(EXPERTS)]
CONV = [f(2, 3, 5), f(3, 1, 3), f(3), f(2, 3, 2)]

CASES = [
    Fused("MoE", [X, PROBS, *FC1, *FC2], {"k": 2}),
    Fused("MoE", [X[None], PROBS, *FC1, *FC2], {"activation_type": "silu"}, id="silu"),
    Fused("MoE", [X, PROBS, *FC1, *FC2], {"activation_type": "gelu", "k": 3}, id="gelu"),
    Fused("MoE", [X, PROBS, *FUSED, *FC2, f(EXPERTS, SIZE)], SWIGLU, id="swiglu"),
    Fused("MoE", [X, PROBS, *FUSED, *FC2], SWIGLU | {"swiglu_limit": 0.5}, id="swiglu_limit"),
    Fused(
        "MoE",
        [X, PROBS, *FC1, *FC2, f(EXPERTS, SIZE), 0.3 * f(EXPERTS, WIDTH, SIZE), f(EXPERTS, WIDTH)],
        {"activation_type": "swiglu", "swiglu_limit": 1.0},
        id="swiglu_apart",
        expected=swiglu_apart,
    ),
    Fused("QMoE", [X, PROBS, *BITS4], SWIGLU | {"block_size": 16}, atol=1e-5),
    Fused("QMoE", [X, PROBS, *BITS8], SWIGLU | {"expert_weight_bits": 8}, id="8_bits", atol=1e-5),
    Fused(
        "QMoE",
        # as inputs, not constants: onnxruntime rounds no activations to int8 then
        [
            *(X, PROBS, BITS8[0], BITS4[1], None, BITS8[3], BITS4[4], None),
            *(None, None, None, BITS8[0][..., :2], BITS8[3][..., :1]),
        ],
        SWIGLU | {"expert_weight_bits": 8, "block_size": 16},
        id="8_bits_in_blocks",
        atol=1e-5,
    ),
    Fused(
        "QMoE",
        [
            *(X, PROBS, BITS4[0], BITS4[1][..., 0], None, BITS4[3], BITS4[4][..., 0], None),
            *(None, None, None, *ZEROS, None, np.abs(f(TOKENS, EXPERTS))),
        ],
        SWIGLU,
        id="zero_points",
        atol=1e-5,
    ),
    Fused("QMoE", [X, PROBS, *FLOAT4], {"quant_type": "fp4"}, id="fp4", expected=float4),
    Fused("CausalConvWithState", CONV, outputs=["y", "state"]),
    Fused(
        "CausalConvWithState",
        [*CONV[:2], None, None],
        {"activation": "silu"},
        ["y", "state"],
        "silu",
    ),
    Fused(
        "CausalConvWithState",
        [f(2, 5, 3), *CONV[1:3], f(2, 4, 3)],
        {"channels_last": 1, "dilation": 2},
        ["y", "state"],
        id="channels_last",
    ),
    Fused(
        "CausalConvWithState",
        [*CONV[:3], CONV[3][None].repeat(2, 0)],
        {"state_window": 2, "activation": "swish"},
        ["y", "state"],
        id="states",
        expected=causal,
    ),
]
