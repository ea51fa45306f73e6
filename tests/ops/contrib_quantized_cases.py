"""Cases of onnxruntime's quantized operators for `test_contrib`."""

import ml_dtypes
import numpy as np

from tests.ops.contrib_cases import Fused, f, i32, rng, s, u8, weights

SCALES = [s(0.1), np.uint8(120), s(0.05), np.uint8(7)]
LEAKY = [u8(2, 5), s(0.1), np.uint8(120), s(0.1), np.uint8(100)]


def table(rows, columns):
    return rng.integers(100, 156, (rows, columns)).astype(np.uint8)


def lstm(*rest, directions=1, **attributes):
    signs = np.uint8([128] * directions)
    return [
        f(4, 1, 5),
        rng.integers(65, 192, (directions, 5, 12)).astype(np.uint8),
        rng.integers(65, 192, (directions, 3, 12)).astype(np.uint8),
        f(directions, 24),
        None,
        *rest,
        s([0.01] * directions),
        signs,
        s([0.012] * directions),
        signs,
    ]


LAYERS = [
    Fused("QLinearLeakyRelu", LEAKY, {"alpha": 0.2}),
    Fused("QLinearSigmoid", [u8(2, 5), s(0.05), np.uint8(120), s(1 / 256), np.uint8(0)]),
    Fused(
        "QLinearSoftmax",
        [u8(2, 5), s(0.02), np.uint8(120), s(1 / 256), np.uint8(0)],
        {"opset": 13, "axis": -1},
    ),
    Fused(
        "QLinearSoftmax",
        [u8(2, 2, 3), s(0.02), np.uint8(120), s(1 / 256), np.uint8(0)],
        {"opset": 12, "axis": 1},
        id="matrix",
    ),
    Fused(
        "QLinearReduceMean",
        [u8(2, 3, 4), *SCALES],
        {"axes": [1], "keepdims": 0},
        expected=lambda x, a, z, b, y: np.clip(
            np.rint((x.astype(np.float32) - z).mean(1) * a / b) + y, 0, 255
        ).astype(np.uint8),
    ),
    Fused(
        "QLinearAveragePool",
        [u8(1, 2, 5, 5), *SCALES],
        {"kernel_shape": [2, 3], "pads": [1, 0, 1, 1], "strides": [2, 1]},
    ),
    Fused(
        "QLinearAveragePool",
        [u8(1, 5, 5, 2), *SCALES],
        {"kernel_shape": [2, 2], "channels_last": 1},
        id="channels_last",
    ),
    Fused(
        "QLinearWhere",
        [
            np.array([[True], [False]]),
            u8(3),
            s(0.1),
            np.uint8(9),
            u8(2, 3),
            s(0.2),
            np.uint8(70),
            s(0.3),
            np.uint8(50),
        ],
    ),
    Fused(
        "QLinearConv",
        [
            u8(1, 5, 5, 2),
            s(0.1),
            np.uint8(120),
            weights(3, 2, 2, 2),
            s(0.05),
            np.int8(0),
            s(0.5),
            np.uint8(128),
            i32(5, -9, 60),
        ],
        {"channels_last": 1, "strides": [2, 1]},
    ),
    Fused(
        "QGemm",
        [
            u8(2, 8),
            s(0.1),
            np.uint8(120),
            weights(3, 8),
            s([0.02, 0.03, 0.04]),
            np.int8([0, 0, 0]),
            i32(5, -9, 60),
        ],
        {"transB": 1, "alpha": 1.5},
        atol=1e-4,
    ),
    Fused(
        "QGemm",
        [
            u8(8, 2),
            s(0.1),
            np.uint8(120),
            weights(8, 3),
            s(0.02),
            np.int8(3),
            None,
            s(0.5),
            np.uint8(128),
        ],
        {"transA": 1},
        id="quantized",
    ),
    Fused(
        "QAttention",
        [
            u8(2, 3, 4),
            weights(4, 24),
            f(24),
            s(0.01),
            s(0.02),
            i32(2, 3),
            np.uint8(120),
            np.int8(0),
        ],
        {"num_heads": 2},
        atol=1e-4,
    ),
    Fused(
        "QAttention",
        [
            u8(2, 3, 4),
            weights(4, 24),
            f(24),
            s(0.01),
            abs(f(24)) * s(0.02),
            None,
            np.uint8(120),
            np.zeros(24, np.int8),
            f(2, 2, 2, 2, 4),
        ],
        {"num_heads": 2, "unidirectional": 1},
        ["y", "present"],
        atol=1e-4,
        id="past",
    ),
    Fused(
        "QEmbedLayerNormalization",
        [
            i32(*[[1, 2, 0], [3, 1, 2]]),
            i32(*[[0, 1, 1], [0, 0, 1]]),
            table(4, 5),
            table(6, 5),
            table(2, 5),
            table(1, 5)[0],
            table(1, 5)[0],
            i32(*[[1, 1, 0], [1, 0, 0]]),
            *(s(0.02 + 0.01 * i) for i in range(5)),
            *(np.uint8(120 + i) for i in range(5)),
        ],
        outputs=["y", "counts"],
        atol=1e-4,
    ),
    Fused(
        "DynamicQuantizeLSTM",
        lstm(None, None, None),
        {"hidden_size": 3},
        ["y", "h", "c"],
        atol=1e-4,
    ),
    Fused(
        "DynamicQuantizeLSTM",
        lstm(f(2, 1, 3), f(2, 1, 3), f(2, 9), directions=2),
        {"hidden_size": 3, "direction": "bidirectional", "input_forget": 1, "clip": 3.0},
        ["y", "h", "c"],
        atol=1e-4,
        id="bidirectional",
    ),
    *(
        Fused(
            "MatMulBnb4",
            [f(2, 32), u8(48), abs(f(6))],
            {"K": 32, "N": 3, "block_size": 16, "quant_type": kind},
            id=("fp4", "nf4")[kind],
            atol=1e-5,
        )
        for kind in (0, 1)
    ),
    Fused(
        "GatherBlockQuantized",
        [u8(5, 16), np.array([[1, -1], [4, 0]]), f(5, 2), u8(5, 1)],
        {"block_size": 16, "bits": 4},
    ),
    Fused(
        "GatherBlockQuantized",
        [u8(5, 32), np.array([3, 1]), f(5, 2)],
        {"block_size": 16, "bits": 8},
        id="8_bits",
    ),
    Fused(
        "GatherBlockQuantized",
        [rng.integers(-8, 8, (32, 5)).astype(ml_dtypes.int4), np.array([3, 1]), f(2, 5)],
        {"block_size": 16, "quantize_axis": 0, "gather_axis": 1},
        id="int4",
    ),
]
