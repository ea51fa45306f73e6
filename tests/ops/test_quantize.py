"""The straight-through gradient of quantization, against values of PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import jaxonnx
from jaxonnx.errors import NodeError
from tests.support.gradient_points import operator

X = np.array([0.3, -12.8, 100, -5.26], np.float32)
WEIGHTS = np.arange(1, 5)


def fake_quantized(zero_type="int8", zero=3, between=""):
    text = f"""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[4] x, float s) => (y) <{zero_type} z = {{{zero}}}> {{
            q = QuantizeLinear(x, s, z)
            {between or "r = Identity(q)"}
            y = DequantizeLinear({"r" if between else "q"}, s, z)
        }}
    """
    model = jaxonnx.load(onnx.parser.parse_model(text))
    return lambda x, s: model.apply({}, x, s)


def test_gradients_go_straight_through():
    """`torch._fake_quantize_learnable_per_tensor_affine(x, 0.1, 3, -128, 127, 1.0)`."""
    f = fake_quantized()
    s = jnp.float32(0.1)
    np.testing.assert_allclose(f(X, s), [0.3, -12.8, 12.4, -5.3], rtol=1e-6)

    def loss(x, s):
        return (f(x, s) * WEIGHTS).sum()

    by_x, by_scale = jax.jit(jax.grad(loss, (0, 1)))(X, s)
    np.testing.assert_array_equal(by_x, [1, 2, 0, 4])
    np.testing.assert_allclose(by_scale, 370.4, rtol=1e-5)
    tangents = jax.jvp(lambda x: f(x, s), (jnp.asarray(X),), (jnp.ones(4),))[1]
    np.testing.assert_array_equal(tangents, [1, 1, 0, 1])


def test_float8_has_the_same_gradient_in_full_precision():
    x = np.array([0.3, -12.83, 100, 0], np.float32)
    gradient = jax.grad(
        lambda x: (fake_quantized("float8e4m3fn", 0)(x, 0.1 * jnp.ones(())) * 1.03).sum()
    )(x)
    np.testing.assert_array_equal(gradient, np.float32([1.03, 1.03, 0, 1.03]))


def test_a_relu_at_zero_keeps_its_gradient():
    """x = 0 with zero point 0 sits on the edge of uint8, but does not saturate."""
    gradient = jax.grad(lambda x: fake_quantized("uint8", 0)(x, jnp.ones(())).sum())(jnp.zeros(4))
    np.testing.assert_array_equal(gradient, 1)


def test_other_operators_see_plain_integers():
    f = fake_quantized(between="r = Flatten(q)")
    assert f(X, jnp.float32(0.1)).shape == (4, 1)


def test_known_and_traced_values_quantize_alike():
    f = operator("DynamicQuantizeLinear")
    for known, traced in zip(f(X), jax.jit(f)(X), strict=True):
        np.testing.assert_allclose(known, getattr(traced, "value", traced), rtol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "attributes", "message"),
    [
        ([X, np.ones(3, np.float32)], {"axis": 0}, "does not fit axis 0"),
        ([X, np.ones(3, np.float32)], {"axis": 0, "block_size": 2}, "one per block"),
        ([X, np.float32([1]), np.int8([0])], {"output_dtype": 2}, "contradicts"),
        ([X, np.float32([1])], {"precision": 6}, "must be of a floating-point type, got int32"),
    ],
)
def test_refused(inputs, attributes, message):
    with pytest.raises(NodeError, match=message):
        operator("QuantizeLinear")(*inputs, **attributes)


def test_scales_and_zero_points_go_together():
    a, point, scale = np.ones((2, 2), np.int8), np.int8([0]), np.float32([1])
    product = operator("QLinearMatMul")
    assert product(a, scale[0], point, a, scale, point, scale, point[0])[0, 0] == 2
    with pytest.raises(NodeError, match=r"a_zero_point .* size a with a = 2"):
        product(a, np.float32([1, 2]), point, a, scale, point, scale, point)
