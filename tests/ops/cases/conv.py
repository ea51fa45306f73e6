"""Conv, ConvTranspose, ConvInteger, QLinearConv, CausalConvWithState, DeformConv, Col2Im."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype(np.float32)


def u8(*shape):
    return np.asarray(rng.integers(0, 256, shape), np.uint8)


def i8(*shape):
    return np.asarray(rng.integers(-128, 128, shape), np.int8)


def shape(*sizes):
    return np.array(sizes, np.int64)


def per_channel(x, w, x_zero, w_zero):
    x, w = x.astype(np.int32) - x_zero, w.astype(np.int32) - w_zero[:, None, None]
    return np.einsum("nclk,mck->nml", np.lib.stride_tricks.sliding_window_view(x, 3, 2), w)


X = f(2, 4, 5, 6)

CASES = [
    Case("Conv", [X, f(3, 4, 3, 2), f(3)], expected="ort"),
    Case(
        "Conv", [f(2, 3, 7), f(4, 3, 3)], {"pads": [1, 2], "strides": [2]}, id="1d", expected="ort"
    ),
    Case("Conv", [f(1, 2, 4, 3, 3), f(2, 2, 2, 2, 2), f(2)], id="3d", expected="ort"),
    Case("Conv", [X, f(6, 4, 1, 1), f(6)], id="pointwise", expected="ort"),
    Case("Conv", [X, f(6, 4, 1, 1)], {"strides": [2, 3]}, id="pointwise_stride", expected="ort"),
    Case(
        "Conv", [f(2, 1, 5, 5), f(3, 1, 3, 3)], {"pads": [1] * 4}, id="one_channel", expected="ort"
    ),
    Case(
        "Conv",
        [X, f(4, 1, 3, 3), f(4)],
        {"group": 4, "pads": [1, 0, 1, 2], "strides": [2, 1]},
        id="depthwise",
        expected="ort",
    ),
    Case(
        "Conv",
        [X, f(8, 1, 2, 3)],
        {"group": 4, "dilations": [2, 1]},
        id="depthwise_multiplier",
        expected="ort",
    ),
    Case("Conv", [X, f(6, 2, 3, 3)], {"group": 2, "pads": [1] * 4}, id="grouped", expected="ort"),
    Case(
        "Conv",
        [f(2, 3, 2, 2), f(4, 3, 3, 3)],
        {"pads": [1] * 4},
        id="image_below_kernel",
        expected="ort",
    ),
    Case(
        "Conv",
        [X, f(3, 4, 3, 3)],
        {"dilations": [2, 1], "strides": [1, 2], "pads": [2, 1, 0, 1]},
        id="dilated",
        expected="ort",
    ),
    *(
        Case("Conv", [X, f(3, 4, 2, 3)], {"auto_pad": a, "strides": [2, 3]}, id=a, expected="ort")
        for a in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    Case("ConvTranspose", [X, f(4, 3, 3, 2), f(3)], expected="ort"),
    Case("ConvTranspose", [f(2, 3, 5), f(3, 2, 4)], {"strides": [3]}, id="1d", expected="ort"),
    Case("ConvTranspose", [f(1, 2, 2, 3, 2), f(2, 1, 2, 2, 2)], id="3d", expected="ort"),
    Case(
        "ConvTranspose",
        [X, f(4, 3, 3, 3), f(6)],
        {"group": 2, "strides": [2, 3], "pads": [1, 0, 1, 2], "output_padding": [1, 2]},
        id="groups_padding",
        expected="ort",
    ),
    Case(
        "ConvTranspose",
        [X, f(4, 2, 3, 3)],
        {"dilations": [2, 1], "strides": [1, 2], "output_shape": [8, 12]},
        id="output_shape",
        expected="ort",
    ),
    *(
        Case(
            "ConvTranspose",
            [X, f(4, 2, 4, 3)],
            {"auto_pad": a, "strides": [2, 2]},
            id=a,
            expected="ort",
        )
        for a in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    Case("ConvInteger", [u8(1, 4, 4, 5), u8(4, 2, 3, 2), u8(), u8()], {"group": 2}, expected="ort"),
    Case(
        "ConvInteger",
        [u8(2, 3, 5, 5), i8(2, 3, 3, 3), np.array(7, np.uint8)],
        {"pads": [1, 0, 2, 1], "strides": [2, 1]},
        id="no_weight_zero_point",
    ),
    Case(
        "ConvInteger",
        [i8(1, 2, 6), i8(3, 2, 3), i8(), i8(3)],
        expected=per_channel,
        id="per_channel",
    ),
    Case(
        "QLinearConv",
        [
            u8(1, 2, 4, 4),
            np.array(0.02, np.float32),
            u8(),
            i8(3, 2, 3, 3) // 2,  # two products fit int16, in which AVX2 adds them
            np.array([0.1, 0.2, 0.05], np.float32),
            np.zeros(3, np.int8),
            np.array(0.4, np.float32),
            u8(),
            rng.integers(-500, 500, 3).astype(np.int32),
        ],
        {"pads": [1] * 4},
        grad=(),
        expected="ort",
    ),
    Case(
        "CausalConvWithState", [f(2, 3, 5), f(3, 1, 3), f(3), f(2, 3, 2)], {"activation": "silu"}, 2
    ),
    Case("CausalConvWithState", [f(2, 3, 2), f(3, 1, 4)], outputs=2, id="short"),
    Case(
        "DeformConv",
        [f(1, 4, 4, 5), f(2, 2, 2, 2), 0.4 * f(1, 16, 3, 4), f(2), f(1, 8, 3, 4)],
        {"group": 2, "offset_group": 2},
        rtol=1e-4,
        atol=1e-5,
    ),
    Case(
        "DeformConv",
        [f(1, 2, 5, 5), f(2, 2, 3, 3), 2 * f(1, 18, 3, 3)],
        {"pads": [1] * 4, "strides": [2, 2]},
        rtol=1e-4,
        atol=1e-5,
        order=1,
        id="far",
    ),
    Case("Col2Im", [f(2, 12, 12), shape(5, 4), shape(2, 2)]),
    Case(
        "Col2Im",
        [f(1, 8, 12), shape(4, 5), shape(2, 2)],
        {"strides": [2, 1], "pads": [1, 0, 1, 1], "dilations": [1, 2]},
        id="overlap",
    ),
]
