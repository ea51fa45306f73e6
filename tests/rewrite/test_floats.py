"""Networks in float64, and those of float16 in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnxruntime
import pytest

import jaxonnx
from jaxonnx import demo
from tests.support.paths import DATA

X = np.random.default_rng(0).normal(size=(2, 3))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def parse(text):
    return onnx.parser.parse_model(text)


def differences(f, x, step=1e-3):
    """The Jacobian of f at a vector by central differences of the fourth order."""
    columns = []
    for direction in step * np.eye(x.size):
        near, far = (f(x + i * direction) - f(x - i * direction) for i in (1, 2))
        columns.append((8 * near - far) / (12 * step))
    return np.stack(columns, -1)


@pytest.mark.parametrize("name", ["unfolded.attention", "lstm.legacy", "transformer.legacy"])
def test_jacobians_in_float64_are_those_of_finite_differences(name, x64):
    model = jaxonnx.load(DATA / f"{name}.onnx", dtype="float64")
    assert {p.dtype.name for p in model.params.values()} == {"float64"}
    x = np.load(DATA / f"{name}.npz")["x"][:1]
    x = x.astype("f8") if x.dtype.kind == "f" else x
    weight = min(
        (n for n in model.params if n.endswith("bias")), key=lambda n: model.params[n].size
    )

    def f(bias):
        y = model.apply({**model.params, weight: bias}, x)
        return (y[0] if isinstance(y, tuple) else y).ravel()[:4]

    bias = model.params[weight]
    found, step = jax.jit(jax.jacobian(f))(bias), jax.jit(f)
    assert step(bias).dtype == np.float64
    np.testing.assert_allclose(found, differences(step, bias), rtol=1e-8, atol=1e-10)


def test_a_file_in_float64_runs_in_onnxruntime(tmp_path, x64):
    model = jaxonnx.convert(demo.mlp(), "float64")
    x = np.asarray(demo.digits()[1][0][:8], np.float64)
    with pytest.warns(UserWarning, match=r"many runtimes have no kernels.*astype\('float32'\)"):
        model.save(tmp_path / "double.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "double.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: x})
    assert y.dtype == np.float64
    np.testing.assert_allclose(model(x), y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(demo.mlp()(x.astype("f4")), y, rtol=1e-4, atol=1e-4)
    again = jaxonnx.load(tmp_path / "double.onnx")
    assert {p.dtype.name for p in again.params.values()} == {"float64"}
    again.save(tmp_path / "same.onnx")  # no warning: the file was in float64 before


KINDS = """
<ir_version: 10, opset_import: ["": 21, "local": 1]>
g (float[n,3] x, bool one) => (float[n,3] y, float[n,3] rounded, float[n,3] z)
<float[3] w = {0.1, 0.2, 0.3}> {
  half = Cast <to = 10> (x)
  rounded = Cast <to = 1> (half)
  third = Constant <value_float = 0.25> ()
  scaled = Mul(x, third)
  size = Shape(x)
  zeros = ConstantOfShape(size)
  count = Cast <to = 1> (size)
  total = ReduceSum <keepdims = 0> (count)
  b = If (one) <
    then_branch = t () => (float[3] t1) { t1 = Mul(w, third) },
    else_branch = e () => (float[3] e1) { e1 = Constant <value = float[3] {1, 2, 3}> () }
  >
  a0 = Add(scaled, zeros)
  a1 = Add(a0, b)
  a2 = local.shift(a1)
  y = Mul(a2, total)
  four = Unsqueeze(x, axes)
  none = Constant <value_floats = [0.0]> ()
  large = Resize <mode = "nearest"> (x, , scales)
  z = Slice(large, start, stop, axes)
}
<domain: "local", opset_import: ["": 21]>
shift (v) => (r) { s = Constant <value = float[3] {0.5, 0.5, 1.5}> ()  r = Add(v, s) }
"""


def kinds():
    proto = parse(KINDS)
    for name, value in {
        "axes": np.array([0]),
        "start": np.array([0]),
        "stop": np.array([2]),
        "scales": np.float32([2, 1]),
    }.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


@pytest.mark.parametrize("one", [True, False])
def test_casts_to_narrower_types_stay_and_all_else_is_in_float64(one, x64):
    model = jaxonnx.load(kinds(), dtype="float64", trainable=["w"])
    proto = model.to_onnx()
    onnx.checker.check_model(proto, full_check=True)
    w = np.float32([0.1, 0.2, 0.3]).astype("f8")
    shift = np.array([0.5, 0.5, 1.5])
    y = (X * 0.25 + (w * 0.25 if one else [1, 2, 3]) + shift) * 5
    rounded = X.astype("f2").astype("f8")
    for outputs in (
        model(X, np.array(one)),
        onnx.reference.ReferenceEvaluator(proto).run(None, {"x": X, "one": np.array(one)}),
    ):
        for output, expected in zip(outputs, (y, rounded, X[[0, 0]]), strict=True):
            assert output.dtype == np.float64
            np.testing.assert_allclose(output, expected, rtol=1e-15)
    scales = next(t for t in proto.graph.initializer if t.name == "scales")
    assert scales.data_type == onnx.TensorProto.FLOAT  # as Resize takes it


def test_operators_without_float64_stay_in_float32_with_a_warning(x64):
    proto = parse("""
    <ir_version: 10, opset_import: ["": 21]>
    g (float[n,3] x) => (float[n,2] y)
    <float scale = {0.1}, int8 zero = {0}, float[3,2] w = {1, 2, 3, 4, 5, 6}> {
      q = QuantizeLinear(x, scale, zero)
      r = DequantizeLinear(q, scale, zero)
      y = MatMul(r, w)
    }""")
    with pytest.warns(UserWarning, match=r"DequantizeLinear.*QuantizeLinear.*float32"):
        model = jaxonnx.load(proto, dtype="float64")
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(
        None, {"x": X.astype("f4")}
    )
    assert model(X).dtype == np.float64
    np.testing.assert_allclose(model(X), expected, rtol=1e-6)
    (y,) = onnxruntime.InferenceSession(model.to_onnx().SerializeToString()).run(None, {"x": X})
    np.testing.assert_allclose(model(X), y, rtol=1e-12)


def test_a_file_in_float16_is_trained_in_float32(tmp_path):
    half = jaxonnx.convert(demo.mlp(), "float16")
    half.save(tmp_path / "half.onnx")
    model = jaxonnx.load(tmp_path / "half.onnx", dtype="float32")
    types = {x.dtype.name for x in (*model.params.values(), *model.program.constants.values())}
    assert types - {"int64"} == {"float32"}
    x = demo.digits()[1][0][:8]
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    (y,) = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(model(x), y, rtol=1e-4, atol=1e-4)
    widened = {n: jnp.float32(v) for n, v in half.params.items()}
    np.testing.assert_allclose(demo.mlp().apply(widened, x), y, rtol=1e-4, atol=1e-4)


def test_values_of_inputs_and_state_are_converted_too(x64):
    model = jaxonnx.load(DATA / "lenet_bn.legacy.onnx")
    x = np.load(DATA / "lenet_bn.legacy.npz")["x"]
    fixed = jaxonnx.convert(model.with_fixed_inputs({"x": x}), "float64")
    assert {v.dtype.name for v in fixed.state.values()} == {"float64"}
    assert fixed().dtype == np.float64
    np.testing.assert_allclose(fixed(), model(x), rtol=1e-4, atol=1e-4)
    narrow = {n: v.astype("f4") for n, v in fixed.state.items()}
    with pytest.raises(jaxonnx.InputError, match=r"state '.*' is float32.*astype\('float64'\)"):
        fixed.apply(fixed.params, state=narrow)


def test_other_types_than_the_models_name_the_remedy(x64):
    model, x = demo.mlp(), demo.digits()[1][0][:2]
    wide = {name: np.float64(value) for name, value in model.params.items()}
    for call in (lambda: model.apply(wide, x), lambda: model(np.float64(x))):
        with pytest.raises(jaxonnx.InputError, match=r"jaxonnx\.convert\(model, 'float64'\)"):
            call()
    double = jaxonnx.convert(model, "float64")
    with pytest.raises(jaxonnx.InputError, match=r"is float32, the model's is float64"):
        double.apply(model.params, np.float64(x))
    with pytest.raises(jaxonnx.InputError, match="weights in float64, and is not rounded"):
        jaxonnx.convert(double, "float32")
    assert jaxonnx.convert(model, "float32") is model
    with pytest.raises(jaxonnx.InputError, match="keep must be empty"):
        jaxonnx.convert(model, "float64", keep=["Gemm"])


def test_float64_without_x64_is_refused():
    with pytest.raises(jaxonnx.InputError, match="jax_enable_x64"):
        jaxonnx.convert(demo.mlp(), "float64")


def test_a_model_in_float64_is_trained(x64):
    model = jaxonnx.convert(demo.mlp(), "float64")
    x, y = (np.asarray(a[:64]) for a in demo.digits()[1])
    result = jaxonnx.train(model, (np.float64(x), y), epochs=1, batch_size=32)
    assert {p.dtype.name for p in result.model.params.values()} == {"float64"}
