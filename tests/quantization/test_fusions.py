"""Networks that onnxruntime's fusions of integer operators get wrong, unless they are avoided."""

import numpy as np
import onnx.numpy_helper
import onnx.parser
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

import jaxonnx
from jaxonnx import InputError, Quantization
from tests.quantization.test_placement import Net, X, optimized_kinds, whole
from tests.support.sessions import outputs_everywhere
from tests.support.sweeps import sweep

MINMAX = Quantization(calibration="minmax")


def conv_around(*between, opset=19):
    """Return branches of a network: each is a node between integer convolutions."""
    net = Net()
    ends = []
    for op, inputs, attributes in between:
        x = net.conv("x", 4, 8)
        x = net.add(op, x, *inputs, **attributes)
        x = net.conv(net.conv(x, 8, 8), 8, 4, relu=False)
        ends.append(net.add("ReduceMean", x, whole(2, 3)))
    proto = net.finish(net.add("Sum", *ends))
    proto.opset_import[0].version = opset
    return proto


def check(proto, x, scheme=MINMAX):
    """Compare the quantized network in sessions of onnxruntime with ours; return its file."""
    model = jaxonnx.quantize(jaxonnx.load(proto), x, scheme)
    saved = model.to_onnx()
    size = np.abs(model(x)).max()
    for output in outputs_everywhere(saved, {"x": x}):
        np.testing.assert_allclose(output, model(x), atol=1e-2 * size)
    feeds = {"x": x}
    (exact,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)
    assert np.abs(model(x) - exact).max() < 0.1 * np.abs(exact).max()
    return saved


AXES = {
    "Pad": ("Pad", (whole(1, 2), "", whole(-1)), {}),
    "Pad that reflects": ("Pad", (whole(1, 0, 2, 1), "", whole(3, 2)), {"mode": "reflect"}),
    "scales": ("Resize", ("", np.float32([3, 2])), {"axes": [3, 2]}),
    "sizes": ("Resize", ("", "", whole(13, 17)), {"axes": [3, 2], "mode": "linear"}),
    "CenterCropPad": ("CenterCropPad", (whole(6, 11),), {"axes": [2, 3]}),
}


@pytest.mark.parametrize("node", sweep(AXES, "Pad", "scales"))
def test_axes_between_integer_convolutions(node, tmp_path):
    """onnxruntime moves transposes across these nodes, and permutes numbers of absent axes."""
    saved = check(conv_around(AXES[node]), X)
    assert optimized_kinds(saved, tmp_path)["QLinearConv"] == 3


POOLS = {
    "rounded up": {"ceil_mode": 1, "count_include_pad": 1, "kernel_shape": [3, 3]},
    "rounded up with padding": {
        "ceil_mode": 1,
        "count_include_pad": 1,
        "pads": [1, 1, 1, 1],
        "kernel_shape": [3, 3],
    },
    "dilated by 1": {"dilations": [1, 1], "kernel_shape": [2, 2]},
    "dilated": {"dilations": [2, 2], "kernel_shape": [2, 2]},
}


@pytest.mark.parametrize("pool", POOLS)
def test_averages_between_integer_convolutions(pool, tmp_path):
    attributes = {"strides": [2, 2], **POOLS[pool]}
    saved = check(conv_around(("AveragePool", (), attributes)), X)
    in_integers = pool in ("rounded up", "dilated by 1")
    assert optimized_kinds(saved, tmp_path)["QLinearAveragePool"] == in_integers


def test_numbers_beyond_a_cropped_image_have_a_range():
    roi = np.float32([0, 0, -0.5, -0.5, 1, 1, 1.5, 1.5])
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 9.0}
    resize = "Resize", (roi, np.float32([1, 1, 1, 1])), {"mode": "nearest", **crop}
    proto = conv_around(resize)
    # onnxruntime 1.32 does not extrapolate at these scales, so that it is no oracle here
    exact = ReferenceEvaluator(proto).run(None, {"x": X})[0]
    with pytest.raises(jaxonnx.ModelError, match="from QuantizeLinear 'v2_QuantizeLinear' on"):
        jaxonnx.quantize(jaxonnx.load(proto), X, MINMAX)
    quantized = jaxonnx.quantize(jaxonnx.load(proto), X, MINMAX, check=False)(X)
    np.testing.assert_allclose(quantized, exact, atol=0.05 * np.abs(exact).max())


STACKS = {"experts": (4, 32, 16), "a stack of one": (1, 32, 16)}


@pytest.mark.parametrize("weights", ["int8", "uint8"])
@pytest.mark.parametrize("stack", STACKS)
def test_stacks_of_matrices(stack, weights, tmp_path):
    """onnxruntime refuses a zero point for each of their columns."""
    random, shape = np.random.default_rng(2), STACKS[stack]
    x = random.normal(size=(8, 4, 5, 32)).astype(np.float32)
    net = Net()
    net.add("MatMul", "x", random.normal(0, 0.05, shape).astype(np.float32))
    proto = net.finish(net.add("Tanh", "v0"))
    del proto.graph.input[0].type.tensor_type.shape.dim[1:]
    for n in x.shape[1:]:
        proto.graph.input[0].type.tensor_type.shape.dim.add(dim_value=n)
    saved = check(proto, x, Quantization(weights=weights, calibration="minmax"))
    assert optimized_kinds(saved, tmp_path)["MatMulIntegerToFloat"] == 1
    scales = {t.name: [*t.dims] for t in saved.graph.initializer if t.name.endswith("scale")}
    assert scales["w0_scale"] == ([16] if weights == "int8" else [])
    again = jaxonnx.load(saved).to_onnx()
    assert [node.input for node in again.graph.node] == [node.input for node in saved.graph.node]


@pytest.mark.parametrize("dialect", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("first", ["encoder", "decoder"])
def test_weights_that_two_products_read_along_both_axes(first, dialect):
    """The decoder of tied weights: onnxruntime refuses its scales, or takes them for columns."""
    random = np.random.default_rng(3)
    shapes = {"encoder": (8, 6), "decoder": (6, 8)}
    x = random.normal(size=(64, 8)).astype(np.float32)
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 19]>
    g (float[n, 8] x) => (float[n, 8] y) {{
        t = Transpose <perm = [1, 0]> (w)
        a = MatMul(x, {"w" if first == "encoder" else "t"})
        r = Relu(a)
        y = MatMul(r, {"t" if first == "encoder" else "w"})
    }}""")
    weight = random.normal(size=shapes[first]).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    activations = "uint8" if dialect == "onnxruntime" else "int8"
    scheme = Quantization(dialect=dialect, activations=activations, calibration="minmax")
    saved = check(proto, x, scheme)
    assert {t.name: [*t.dims] for t in saved.graph.initializer}["w_scale"] == []
    # weights alone, and 4 bits, are multiplied in floating point: a scale for each channel
    for other in (Quantization(activations=None), Quantization(weights="int4")):
        saved = check(proto, x, other)
        assert {t.name: [*t.dims] for t in saved.graph.initializer}["w_scale"] == [6]


def test_blocks_of_8_bits_beside_integers_are_refused():
    net = Net()
    proto = net.finish(net.add("MatMul", "x", np.ones((8, 4), np.float32)))
    with pytest.raises(InputError, match="refuses products of quantized activations with 'w0'"):
        jaxonnx.quantize(jaxonnx.load(proto), X, Quantization(block=4))
