"""Resize and GridSample where the tables of cases do not look."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image

import jaxonnx.ops
from jaxonnx.errors import NodeError
from jaxonnx.registry import lookup

resize = lookup("", "Resize", 19)
grid_sample = lookup("", "GridSample", 22)
X = np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)


def test_an_infinite_pixel_stays_where_it_is():
    x = X.copy()
    x[0, 0, 0, 0] = np.inf
    y = np.asarray(resize(x, None, np.array([1, 1, 2, 2], np.float32), mode="linear"))
    assert np.isfinite(y[0, 0, 3:]).all()
    assert np.isfinite(y[0, 0, :, 3:]).all()


def test_the_output_has_the_size_that_float32_arithmetic_gives():
    x = np.ones((10,), np.float32)
    assert resize(x, None, np.array([0.7], np.float32)).shape == (7,)


def test_enlarging_by_whole_numbers_needs_no_gather():
    scales = np.array([1, 1, 2, 3], np.float32)
    program = jax.make_jaxpr(lambda x: resize(x, None, scales))(X)
    assert "gather" not in str(program)
    np.testing.assert_array_equal(resize(X, None, scales), X.repeat(2, 2).repeat(3, 3))


def test_gradients_need_no_scatter():
    scales = np.array([1, 1, 1.5, 2], np.float32)

    def total(x):
        return jnp.sum(resize(x, None, scales, mode="cubic") ** 2)

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(total))(X))


def test_integers_are_rounded():
    x = np.array([0, 255], np.uint8)
    y = resize(x, None, np.array([2], np.float32), mode="linear")
    assert y.dtype == np.uint8
    np.testing.assert_array_equal(y, [0, 64, 191, 255])


@pytest.mark.parametrize("sizes", [(24, 20), (70, 61)])
def test_antialiased_integers_are_rounded_along_each_axis(sizes):
    """As in onnxruntime and Pillow: cubic overshoot of the width is cut before the height."""
    image = np.zeros((1, 1, 32, 28), np.uint8)
    image[..., 8:24, 5:19], image[..., 20:, 10:] = 180, 255
    options = {"mode": "cubic", "antialias": 1, "cubic_coeff_a": -0.5, "exclude_outside": 1}
    y = resize(image, None, None, np.array([1, 1, *sizes]), **options)
    pillow = Image.fromarray(image[0, 0]).resize(sizes[::-1], Image.Resampling.BICUBIC)
    assert abs(np.asarray(y[0, 0], int) - np.asarray(pillow, int)).max() <= 1

    options |= {"cubic_coeff_a": -0.75, "exclude_outside": 0, "axes": [2, 3]}
    for x in (image, 500 - 9 * image.astype(np.int32)):
        shape, tensor = [*x.shape], onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
        inputs = [onnx.helper.make_tensor_value_info("x", tensor, shape)]
        outputs = [onnx.helper.make_tensor_value_info("y", tensor, None)]
        sides = onnx.numpy_helper.from_array(np.array(sizes), "sizes")
        node = onnx.helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **options)
        graph = onnx.helper.make_graph([node], "graph", inputs, outputs, [sides])
        opset = [onnx.helper.make_opsetid("", 19)]
        proto = onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)
        (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
        y = jaxonnx.load(proto)(x)
        assert abs(np.asarray(y, int) - np.asarray(expected, int)).max() <= 1


def test_refusals():
    one = np.ones(4, np.float32)
    with pytest.raises(NodeError, match="exactly one"):
        resize(X)
    with pytest.raises(NodeError, match="exactly one"):
        resize(X, None, one, np.array([1, 1, 3, 4]))
    with pytest.raises(NodeError, match="2 scales or sizes"):
        resize(X, None, one[:2])
    with pytest.raises(NodeError, match=r"must be positive: \[1, 1, 0, 4\]"):
        resize(X, None, None, np.array([1, 1, 0, 4]))
    assert resize(X[:0], None, None, np.array([0, 1, 3, 4])).shape == (0, 1, 3, 4)
    with pytest.raises(NodeError, match="cannot have sizes"):
        resize(X[:0], None, None, np.array([1, 1, 3, 4]))
    with pytest.raises(NodeError, match=r"mode must be .*got 'area'"):
        resize(X, None, one, mode="area")
    with pytest.raises(NodeError, match="nearest_mode"):
        resize(X, None, 2 * one, nearest_mode="up")
    with pytest.raises(NodeError, match="coordinate_transformation_mode"):
        resize(X, None, 2 * one, coordinate_transformation_mode="corners")
    with pytest.raises(NodeError, match="roi"):
        resize(X, None, 2 * one, coordinate_transformation_mode="tf_crop_and_resize")
    grid = lookup("", "AffineGrid", 20)
    with pytest.raises(NodeError, match="does not fit 1 images"):
        grid(np.zeros((2, 2, 3), np.float32), np.array([1, 1, 2, 2]))
    with pytest.raises(NodeError, match="does not fit"):
        grid_sample(X, np.zeros((1, 2, 2, 3), np.float32))


def test_bicubic_sampling_at_the_border_is_that_of_pytorch():
    grid = np.array([[[[-1.2, -1.1], [1.3, 0.9], [0.1, -1.05]]]], np.float32)
    y = grid_sample(X, grid, mode="cubic", padding_mode="border", align_corners=1)
    # torch.nn.functional.grid_sample of PyTorch 2.13 with the same settings
    expected = [-0.3532496988773346, 10.801095962524414, 1.4805010557174683]
    np.testing.assert_allclose(y[0, 0, 0], expected, rtol=1e-5, atol=1e-6)


BY_SCALES = ["half_pixel", "pytorch_half_pixel", "asymmetric"]
"""The others keep a fractional length (limits.md)."""
BY_SIZES = [*BY_SCALES, "half_pixel_symmetric", "align_corners", "tf_crop_and_resize"]


def nearest(kind, coordinates, size, value):
    """A node that resizes the pixels 0 ... size - 1 by a scale, or to a size."""
    rounding = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    given = ("", value) if kind == "sizes" else (value, "")
    for rule in rounding:
        names = [f"x{size}", "roi", *given]
        yield onnx.helper.make_node(
            "Resize",
            names,
            [f"{size} {value} {rule}"],
            mode="nearest",
            nearest_mode=rule,
            coordinate_transformation_mode=coordinates,
        )


@pytest.mark.parametrize(
    ("kind", "coordinates"),
    [
        *(("scales", mode) for mode in BY_SCALES),
        *((kind, mode) for kind in ("sizes", "ratios") for mode in BY_SIZES),
    ],
)
def test_nearest_pixels_are_those_of_onnxruntime(kind, coordinates):
    """It computes coordinates in float32, where some are on the other side of a half.

    Ratios are scales that give a whole length.
    """
    sizes, steps = (3, 5, 7, 10), range(3, 37)
    if kind == "ratios":
        sizes, steps = (5, 7, 12, 14, 20, 32), range(1, 61)
    values = {f"x{n}": np.arange(n, dtype=np.float32) for n in sizes}
    values["roi"] = np.array([0.1, 0.8], np.float32)
    nodes = []
    for size in sizes:
        for step in steps:
            value = np.array([step / (size if kind == "ratios" else 10)], np.float32)
            if kind == "sizes":
                value = np.array([step])
            length = step if kind == "sizes" else size * value[0]
            if kind == "ratios" and length != step:
                continue
            # scales that change no size are in limits.md, too
            if int(length) not in (0, size):
                name = f"{kind}{size if kind == 'ratios' else ''}/{step}"
                values[name] = value
                nodes += nearest(kind, coordinates, size, name)
    constants = [onnx.numpy_helper.from_array(x, name) for name, x in values.items()]
    names = [node.output[0] for node in nodes]
    outputs = [onnx.helper.make_tensor_value_info(name, 1, [None]) for name in names]
    graph = onnx.helper.make_graph(nodes, "g", [], outputs, constants)
    opsets = [onnx.helper.make_opsetid("", 19)]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    expected = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {})
    for node, y in zip(nodes, expected, strict=True):
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {n: v.decode() for n, v in attributes.items()}
        inputs = [values[name] if name else None for name in node.input]
        found = resize(*inputs, **attributes)
        np.testing.assert_array_equal(found, y, node.output[0])
