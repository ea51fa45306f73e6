"""Cases of onnxruntime's operators for `test_contrib`: images, mathematics, early experiments."""

import math

import numpy as np

from tests.ops.contrib_cases import Fused, f, s, u8

IMAGE = f(2, 4, 5, 6)
OLD = {"domain": "", "opset": 8}


def erf_gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)).astype(np.float32)) / 2


def tanh_gelu(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def group_norm(x, gamma, beta, *, silu=False, groups=2):
    """Of images with their channels last."""
    y = np.empty_like(x)
    size = x.shape[-1] // groups
    for example in range(len(x)):
        for g in range(groups):
            part = x[example, ..., g * size : (g + 1) * size]
            y[example, ..., g * size : (g + 1) * size] = (part - part.mean()) / np.sqrt(
                part.var() + 1e-5
            )
    y = y * gamma + beta
    return y / (1 + np.exp(-y)) if silu else y


def skip_group_norm(x, gamma, beta, skip, bias):
    total = x + skip[:, None, None] + bias
    return group_norm(total, gamma, beta, silu=True), total


def conv(x, w, b=None):
    """A valid convolution of images with their channels last."""
    views = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (1, 2))
    y = np.einsum("nhwcij,mcij->nhwm", views, w)
    return y if b is None else y + b


def complex_pairs(function):
    def product(a, b):
        y = function(*(x[..., 0] + 1j * x[..., 1] for x in (a, b)))
        return np.stack([y.real, y.imag], -1).astype(np.float32)

    return product


def rfft(x):
    y = np.fft.rfft(x)
    return np.stack([y.real, y.imag], -1).astype(np.float32)


def irfft(x):
    return np.fft.irfft(x[..., 0] + 1j * x[..., 1]).astype(np.float32)


EARLY = [
    Fused("Affine", [f(5)], {"alpha": 0.5, "beta": -2.0}, **OLD),
    Fused("Scale", [f(2, 3)], {"scale": -1.5}, **OLD),
    Fused("ScaledTanh", [f(2, 3)], {"alpha": 1.7, "beta": 0.6}, **OLD),
    Fused("ParametricSoftplus", [f(5)], {"alpha": 1.7, "beta": 0.6}, **OLD),
    Fused("ImageScaler", [IMAGE], {"scale": 0.5, "bias": [1.0, -2.0, 0.25, 3.0]}, **OLD),
    Fused("Crop", [IMAGE], {"border": [1, 0, 2, 1]}, **OLD),
    Fused("Crop", [IMAGE], {"border": [2, 1, 0, 0], "scale": [3, 2]}, **OLD, id="scale"),
]

MATHEMATICS = [
    Fused("TransposeMatMul", [f(2, 4, 3), f(2, 5, 4)], {"transA": 1, "transB": 1, "alpha": 0.5}),
    Fused(
        "FusedMatMulActivation",
        [f(3, 2), f(3, 4)],
        {"activation": "LeakyRelu", "activation_alpha": 0.2, "transA": 1, "alpha": 2.0},
        expected=lambda a, b: (lambda y: np.where(y > 0, y, np.float32(0.2) * y))(2 * a.T @ b),
    ),
    Fused(
        "FusedMatMulActivation",
        [f(2, 3), f(3, 4)],
        {"activation": "Softmax", "activation_axis": -1},
        expected=lambda a, b: softmax(a @ b),
        id="softmax",
    ),
    Fused(
        "GemmFastGelu",
        [f(2, 3), f(3, 4), f(4)],
        expected=lambda x, w, b: tanh_gelu(x @ w + b),
    ),
    Fused(
        "GemmFloat8",
        [f(2, 3), f(4, 3), f(2, 4), s(0.5), s([3.0]), s(2.0)],
        {"transB": 1, "alpha": 0.5, "beta": 2.0, "activation": "RELU"},
        expected=lambda a, b, c, sa, sb, sy: np.maximum(0.5 * a @ b.T * sa * sb + 2 * c, 0) * sy,
    ),
    Fused("Inverse", [f(2, 3, 3)], atol=1e-4),
    Fused("CDist", [f(3, 4), f(2, 4)], {"metric": "euclidean"}),
    Fused("CDist", [f(3, 4), f(2, 4)], {"metric": "sqeuclidean"}, id="squared"),
    Fused("ExpandDims", [f(2, 3), np.array([-1], np.int32)]),
    Fused("Trilu", [f(2, 3, 4), np.array(1)], {"upper": 0}),
    Fused("Pad", [f(2, 3), np.array([1, 0, 0, 2]), s(0.5)]),
    Fused("Pad", [f(2, 3), np.array([0, 1, 0, 2])], {"mode": "reflect"}, id="reflect"),
    Fused("Range", [s(1), s(4), s(0.5)]),
    Fused("Range", [np.array(3, np.int32), np.array(6, np.int32)], id="whole"),
    Fused("GatherND", [f(3, 2, 4), np.array([[0, 1], [2, 0]])]),
    Fused("Unique", [s([2, 1, 1, 3, 4, 3])], outputs=["y", "places", "counts"]),
    Fused("Rfft", [f(2, 8)], expected=rfft),
    Fused("Irfft", [f(2, 5, 2)], {"signal_ndim": 1}, expected=irfft),
    Fused("ComplexMul", [f(3, 2), f(3, 2)], expected=complex_pairs(lambda a, b: a * b)),
    Fused("ComplexMulConj", [f(3, 2), f(3, 2)], expected=complex_pairs(lambda a, b: a * b.conj())),
    Fused(
        "BiasSoftmax",
        [f(2, 3, 4), f(1, 1, 4)],
        {"axis": 2, "is_inner_broadcast": 0},
        expected=lambda x, b: softmax(x + b),
    ),
]

IMAGES = [
    Fused("BiasAdd", [f(2, 3, 4), f(4), f(2, 3, 4)], expected=lambda x, b, skip: x + b + skip),
    Fused(
        "BiasSplitGelu",
        [f(2, 3, 8), f(8)],
        expected=lambda x, b: (x + b)[..., :4] * erf_gelu((x + b)[..., 4:]),
    ),
    Fused(
        "GroupNorm",
        [f(2, 3, 2, 4), f(4), f(4)],
        {"activation": 0, "groups": 2},
        expected=group_norm,
    ),
    Fused(
        "GroupNorm",
        [IMAGE, f(4), f(4)],
        {"activation": 1, "groups": 2, "channels_last": 0},
        expected=lambda x, *rest: np.moveaxis(
            group_norm(np.moveaxis(x, 1, -1), *rest, silu=True), -1, 1
        ),
        id="first",
    ),
    Fused(
        "SkipGroupNorm",
        [f(2, 3, 2, 4), f(4), f(4), f(2, 4), f(4)],
        {"activation": 1, "groups": 2},
        ["y", "total"],
        expected=skip_group_norm,
    ),
    Fused(
        "NhwcConv",
        [f(1, 4, 5, 4), f(3, 2, 3, 4), f(3)],
        expected=lambda x, w, b: conv(x, np.moveaxis(w, -1, 1), b),
    ),
    Fused(
        "NhwcFusedConv",
        [f(1, 4, 5, 2), f(3, 2, 2, 2), f(3), f(1, 3, 4, 3)],
        {"activation": "Relu"},
        expected=lambda x, w, b, z: np.maximum(conv(x, w, b) + z, 0),
    ),
    Fused(
        "NhwcMaxPool",
        [u8(1, 5, 6, 3)],
        {"kernel_shape": [2, 3], "strides": [2, 1], "pads": [1] * 4},
    ),
]

CASES = [*EARLY, *MATHEMATICS, *IMAGES]
