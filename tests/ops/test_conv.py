"""Convolutions, pooling and regions where tables of random cases do not reach.

Gradients are those of PyTorch 2.13 at the same points.
"""

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import pytest

import jaxonnx
from jaxonnx.errors import NodeError
from tests.support.gradient_points import assert_point, operator

nan, inf = np.nan, np.inf

QUANTIZED = [(1, 1, 4, 4), (), (), (1, 1, 3, 3), (), (), (), ()]
"""Shapes of the inputs of QLinearConv."""


def test_ties_go_to_the_first_maximum():
    x = [[[1, 2, 2, 1], [2, 2, 0, 1]]]
    won = [[[0, 1, 1, 0], [1, 0, 0, 1]]]
    window = {"kernel_shape": [2], "strides": [2]}
    assert_point("MaxPool", [x], [[[2, 2], [2, 1]]], won, **window)
    assert_point("GlobalMaxPool", [[[[[1, 3], [3, 3]]]]], [[[[3]]]], [[[[0, 1], [0, 0]]]])


@pytest.mark.deep
def test_maximum_of_nan_and_of_minus_infinity():
    pool = operator("MaxPool")
    x = np.array([[[1, nan, 2, -inf, -inf, -inf]]], np.float32)
    y, index = pool(x, kernel_shape=[2], strides=[2], pads=[0, 0])
    np.testing.assert_array_equal(y, [[[nan, 2, -inf]]])
    np.testing.assert_array_equal(index, [[[1, 2, 4]]])
    _, index = pool(x[..., 3:], kernel_shape=[2], strides=[2], pads=[1, 0])
    np.testing.assert_array_equal(index, [[[0, 1]]])
    _, index = pool(np.zeros((1, 1, 2), np.uint8), kernel_shape=[2], pads=[1, 1])
    np.testing.assert_array_equal(index, [[[0, 0, 1]]])


def test_norm_of_zeros_has_gradient_zero():
    zeros = np.zeros((1, 1, 2))
    for p in (1, 2, 3):
        assert_point("LpPool", [zeros], [[[0]]], zeros, kernel_shape=[2], p=p)
        assert_point("GlobalLpPool", [zeros], [[[0]]], zeros, p=p)


@pytest.mark.deep
def test_large_windows():
    """Pooled one axis after the other; index and gradient still follow the first maximum."""
    x = jnp.zeros((1, 1, 6, 6)).at[0, 0, 2, 3].set(1).at[0, 0, 4, 1].set(1)
    pool = operator("MaxPool")
    y, index = pool(x, kernel_shape=[5, 5], pads=[0, 0, 0, 0])
    np.testing.assert_array_equal(index, np.array([[[[15, 15], [15, 15]]]]))
    gradient = jax.grad(lambda x: pool(x, kernel_shape=[5, 5])[0].sum())(x)
    assert gradient[0, 0, 2, 3] == 4
    assert gradient.sum() == 4
    np.testing.assert_array_equal(y, np.ones((1, 1, 2, 2)))


def test_empty_batch():
    x, w = np.zeros((0, 2, 4, 4), np.float32), np.ones((3, 2, 3, 3), np.float32)
    assert operator("Conv")(x, w).shape == (0, 3, 2, 2)
    assert operator("MaxPool")(x, kernel_shape=[2, 2])[0].shape == (0, 2, 3, 3)
    assert operator("GlobalMaxPool")(x).shape == (0, 2, 1, 1)
    np.testing.assert_array_equal(jax.grad(lambda w: operator("Conv")(x, w).sum())(w), 0 * w)


def test_columns_have_three_axes():
    fold, sizes = operator("Col2Im"), (np.array([3, 3]), np.array([2, 2]))
    assert fold(np.zeros((0, 4, 4), np.float32), *sizes).shape == (0, 1, 3, 3)
    with pytest.raises(NodeError, match="does not hold 4 blocks"):
        fold(np.zeros((1, 4, 4, 2), np.float32), *sizes)


def test_transposed_convolution_larger_than_its_windows():
    x, w = np.ones((1, 1, 2), np.float32), np.ones((1, 1, 2), np.float32)
    y = operator("ConvTranspose")(x, w, output_shape=[6], strides=[2])
    np.testing.assert_array_equal(y, [[[1, 1, 1, 1, 0, 0]]])


@pytest.mark.deep
def test_regions_off_the_image_are_zero():
    x = np.ones((1, 1, 3, 3), np.float32)
    far = np.array([[50, 50, 60, 60]], np.float32)
    align = operator("RoiAlign")
    for mode in ("avg", "max"):
        y = align(x, far, np.zeros(1, np.int64), mode=mode)
        np.testing.assert_array_equal(y, np.zeros((1, 1, 1, 1)))


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_traced_regions_sample_like_known_ones(mode):
    """The adaptive number of samples depends on values; traced, it is bounded by the image."""
    x = np.random.default_rng(0).normal(size=(1, 2, 5, 4)).astype(np.float32)
    rois = np.array([[0, 0, 3, 4], [-9, -3, 30, 7], [1, 1, 1.2, 1.1]], np.float32)
    index = np.zeros(3, np.int64)

    def run(rois):
        return operator("RoiAlign")(x, rois, index, mode=mode, output_height=2, output_width=2)

    np.testing.assert_allclose(jax.jit(run)(rois), run(rois), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "message"),
    [
        (
            "Conv",
            [(1, 3, 4, 4), (2, 2, 3, 3)],
            {},
            r"w .*\(group\*m, c, K1, \*K\) with group = 1, c = 3",
        ),
        ("Conv", [(1, 2, 4, 4), (2, 2, 3, 3)], {"kernel_shape": [2, 2]}, "not that of the weight"),
        ("Conv", [(1, 2, 4, 4), (2, 2, 5, 5)], {}, "does not fit an axis of 4"),
        ("Conv", [(1, 2, 4, 4), (2, 2, 3, 3)], {"pads": [1, 1]}, "pads has 2 entries"),
        (
            "Conv",
            [(1, 2, 4, 4), (2, 2, 3, 3)],
            {"pads": [1] * 4, "auto_pad": "SAME_UPPER"},
            "exclude each other",
        ),
        ("Conv", [(1, 2, 4, 4), (2, 2, 3, 3)], {"auto_pad": "SAME"}, "auto_pad must .*got 'SAME'"),
        ("Conv", [(1, 2, 4, 4), (2, 2, 3, 3)], {"pads": []}, "pads has 0 entries"),
        ("Conv", [(1, 2, 4, 4), (2, 2, 3, 3)], {"kernel_shape": []}, "not that of the weight"),
        ("Conv", [(1, 2, 4, 4), (2, 2, 3, 3)], {"pads": [0, 0, -1, 0]}, "must not be negative"),
        (
            "AveragePool",
            [(1, 2, 4)],
            {"kernel_shape": [2], "pads": [-1, 0]},
            "must not be negative",
        ),
        ("MaxPool", [(1, 2, 4, 4)], {"kernel_shape": []}, "kernel_shape has 0 entries"),
        ("Conv", [(1, 2, 4, 4), (2, 2, 3, 3)], {"strides": [0, 1]}, "must be positive"),
        ("ConvTranspose", [(1, 2, 4, 4), (2, 2, 3, 3)], {"output_padding": [1, 0]}, "less than"),
        ("ConvTranspose", [(1, 2, 4, 4), (2, 2, 3, 3)], {"output_padding": [-1, 0]}, "less than"),
        (
            "ConvTranspose",
            [(1, 2, 4, 4), (2, 2, 3, 3)],
            {"output_shape": [6, 6], "pads": [1, 1]},
            "pads has 2 entries",
        ),
        (
            "RoiAlign",
            [(1, 2, 4, 4), (1, 4), (1,)],
            {"output_height": -1},
            "must .*got -1",
        ),
        (
            "RoiAlign",
            [(1, 2, 4, 4), (1, 4), (1,)],
            {"sampling_ratio": -1},
            "must .*got -1",
        ),
        ("Conv", [(1, 2, 4, 4), (2, 2, 3, 3), (1,)], {}, "b has .* m = 2"),
        ("Conv", [(1, 2, 4, 4), (1, 2, 3, 3), (3, 3)], {}, "b has .* m = 1"),
        ("ConvTranspose", [(1, 2, 4, 4), (2, 1, 3, 3), (2,)], {}, "b has .* m = 1"),
        ("ConvTranspose", [(1, 1, 4, 4), (1, 1, 3, 3)], {"output_shape": [1, 1, 6]}, "2 axes"),
        ("ConvTranspose", [(1, 1, 4, 4), (1, 1, 3, 3)], {"output_shape": []}, "2 axes"),
        ("ConvInteger", [(1, 1, 4, 4), (1, 1, 3, 3), (4, 4)], {}, "x_zero_point .* of size 1"),
        ("ConvInteger", [(1, 1, 4, 4), (1, 1, 3, 3), (), (3,)], {}, "w_zero_point .* m = 1"),
        ("QLinearConv", [*QUANTIZED[:1], (3,), *QUANTIZED[2:]], {}, "x_scale .* size 1"),
        ("QLinearConv", [*QUANTIZED[:4], (3,), *QUANTIZED[5:]], {}, "w_scale .* m = 1"),
        ("QLinearConv", [*QUANTIZED[:6], (3,), *QUANTIZED[7:]], {}, "y_scale .* size 1"),
        ("MaxUnpool", [(1, 1, 2, 2), (2, 1, 2, 2)], {"kernel_shape": [2, 2]}, "indices .* N = 1"),
        ("MaxUnpool", [(1, 1, 2, 2)] * 2, {"kernel_shape": [2]}, "kernel_shape has 1 entries"),
        ("MaxUnpool", [(1, 1, 2, 2)] * 2, {"kernel_shape": [2, 0]}, "must be positive"),
        (
            "MaxPool",
            [(2, 3)],
            {"kernel_shape": [2]},
            r"x has shape \[2, 3\]; it must be \(N, C, D1",
        ),
        ("DeformConv", [(1, 1, 3, 3), (1, 1, 2, 2), (1, 8, 3, 3)], {}, "offset"),
    ],
)
def test_bad_shapes(name, inputs, attributes, message):
    with pytest.raises(NodeError, match=message):
        operator(name)(*(np.zeros(s, np.float32) for s in inputs), **attributes)


def test_an_output_shape_has_the_batch_and_channels_of_the_input():
    x = np.ones((1, 1, 2, 2), np.float32)
    indices = np.arange(4).reshape(x.shape)
    for shape in ([7, 4, 5, 5], [1, 1, 25]):
        with pytest.raises(NodeError, match="the first two must be equal"):
            operator("MaxUnpool")(x, indices, np.array(shape), kernel_shape=[2, 2])


def test_nan_survives_activation_and_pooling():
    """XLA:CPU joins convolution, maximum and reduce_window into a kernel that loses NaNs."""
    model = jaxonnx.load(
        onnx.parser.parse_model("""
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[64,1,28,28] x, float[32,1,3,3] w, float[32] b) => (float[64,32,13,13] y) {
                c = Conv (x, w, b)
                r = Relu (c)
                y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
            }""").SerializeToString()
    )
    x = np.zeros((64, 1, 28, 28), np.float32)
    x[0, 0, 5, 5] = np.nan
    found = np.isnan(model(x, np.ones((32, 1, 3, 3), np.float32), np.zeros(32, np.float32)))
    assert found[0, :, 1:3, 1:3].all()
    assert found.sum() == 32 * 4


def test_pixels_outside_of_a_deformed_window_are_zero_beside_one_that_is_nan():
    x = np.array([[[[1, 2], [3, np.nan]]]], np.float32)
    offset = np.zeros((1, 2, 2, 2), np.float32)
    offset[0, :, 1, 1] = 1  # one beyond the image on each axis
    y = operator("DeformConv")(x, np.ones((1, 1, 1, 1), np.float32), offset)
    assert y[0, 0, 1, 1] == 0


@pytest.mark.parametrize("name", ["RoiAlign", "MaxRoiPool"])
def test_regions_of_no_image_are_nan(name):
    """As other indices that are only known while running; a known one is an error."""
    x, rois = np.ones((2, 1, 4, 4), np.float32), np.float32([[0, 0, 2, 2]] * 2)
    number = np.array([1, 2])
    if name == "RoiAlign":
        with pytest.raises(NodeError, match="index 2 is out of range"):
            operator(name)(x, rois, number)
        y = jax.jit(lambda n: operator(name)(x, rois, n))(number)
    else:
        rois = np.concatenate([number[:, None].astype(np.float32), rois], 1)
        y = jax.jit(lambda r: operator(name)(x, r, pooled_shape=[1, 1]))(rois)
    assert np.isnan(y.ravel()).tolist() == [False, True]
