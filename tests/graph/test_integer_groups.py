"""Adapters beside the matrices of files that onnxruntime's `quantize_dynamic` wrote."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import optax
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import QuantType, quantize_dynamic

import jaxonnx
from tests.support.adapter_files import base_tensors, session
from tests.support.sweeps import sweep

DRAW = np.random.default_rng(0)
SIZE, HIDDEN = 32, 48
BLOCK = """<ir_version: 9, opset_import: ["": 17]>
g (float[n,t,32] x) => (float[n,t,32] y) {
  q = MatMul(x, q_proj) k = MatMul(x, k_proj) v = MatMul(x, v_proj)
  kt = Transpose <perm = [0, 2, 1]> (k)
  s = MatMul(q, kt) p = Softmax <axis = -1> (s) a = MatMul(p, v)
  o = MatMul(a, o_proj) r = Add(x, o)
  u = MatMul(r, up_proj) ub = Add(u, up_bias) g1 = Relu(ub)
  d = MatMul(g1, down_proj) y = Add(r, d)
}"""
MATRICES = {f"{name}_proj": (SIZE, SIZE) for name in "qkvo"}
MATRICES |= {"up_proj": (SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}
OPTIONS = {
    "uint8": {"weight_type": QuantType.QUInt8},
    "int8": {"weight_type": QuantType.QInt8},
    "int8, columns": {"weight_type": QuantType.QInt8, "per_channel": True, "reduce_range": True},
}


def normal(*shape):
    return DRAW.standard_normal(shape).astype(np.float32)


def plain():
    proto = onnx.parser.parse_model(BLOCK)
    tensors = {name: normal(*shape) / shape[0] ** 0.5 for name, shape in MATRICES.items()}
    tensors["up_bias"] = normal(HIDDEN)
    proto.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in tensors.items())
    return proto


def quantized(path, kind="int8"):
    onnx.save(plain(), path / "plain.onnx")
    quantize_dynamic(path / "plain.onnx", path / "int8.onnx", **OPTIONS[kind])
    return onnx.load(path / "int8.onnx")


def adapt(model, scale=0.1):
    adapted = jaxonnx.LoRA(4).attach(model, jax.random.key(0))
    values = {n: jnp.asarray(scale * normal(*v.shape)) for n, v in adapted.params.items()}
    return adapted.replace(params=values)


@pytest.mark.parametrize("kind", OPTIONS)
def test_adapters_beside_products_of_integers(kind, tmp_path):
    proto, x = quantized(tmp_path, kind), normal(2, 5, SIZE)
    kinds = {node.op_type for node in proto.graph.node}
    assert {"DynamicQuantizeLinear", "MatMulInteger"} <= kinds
    model, base = jaxonnx.load(proto), session(proto.SerializeToString())
    wanted = base.run(None, {"x": x})[0]
    close = {"rtol": 0, "atol": 1e-2 * np.abs(wanted).max()}  # a value may round to the next step
    np.testing.assert_allclose(model(x), wanted, **close)
    assert [*model.to_onnx().graph.node] == [*proto.graph.node]
    names = {f"{name}_quantized": shape[::-1] for name, shape in MATRICES.items()}
    assert model.summary().matrices == names
    assert not any("no gradient" in note for note in model.warnings)

    adapted = adapt(model)
    assert {name.partition(".lora")[0] for name in adapted.params} == {*names}
    changed = np.asarray(adapted(x))
    assert np.abs(changed - wanted).max() > 10 * close["atol"]
    given = jaxonnx.Adapters.of(adapted).to_inputs()
    for form, inputs in (("nodes", {}), ("inputs", given)):
        path = str(tmp_path / f"{form}.onnx")
        adapted.save(path, adapters=form)
        written = onnx.load(path)
        onnx.checker.check_model(written, full_check=True)
        assert base_tensors(proto).items() <= base_tensors(written).items()  # bit for bit
        np.testing.assert_allclose(session(path).run(None, {"x": x, **inputs})[0], changed, **close)
    without = session(str(tmp_path / "inputs.onnx")).run(None, {"x": x})[0]
    np.testing.assert_array_equal(without, wanted)
    with pytest.warns(UserWarning, match="rounded anew"):
        merged = adapted.merge_adapters(requantize=True)
    assert [n.op_type for n in merged.to_onnx().graph.node] == [n.op_type for n in proto.graph.node]
    found = ReferenceEvaluator(merged.to_onnx()).run(None, {"x": x})[0]  # whose sums are exact
    np.testing.assert_allclose(found, changed, rtol=0, atol=0.05 * np.abs(changed).max())


@pytest.mark.parametrize("form", ["nodes", "inputs"])
def test_adapters_beside_what_onnxruntime_fuses(form, tmp_path):
    """MatMulIntegerToFloat, in the file that an optimized session writes."""
    quantized(tmp_path, "uint8")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(tmp_path / "int8.onnx", options, ["CPUExecutionProvider"])
    proto, x = onnx.load(tmp_path / "fused.onnx"), normal(2, 5, SIZE)
    assert "MatMulIntegerToFloat" in {node.op_type for node in proto.graph.node}
    adapted, path = adapt(jaxonnx.load(proto)), str(tmp_path / "adapted.onnx")
    adapted.save(path, adapters=form)
    given = jaxonnx.Adapters.of(adapted).to_inputs() if form == "inputs" else {}
    wanted = np.asarray(adapted(x))
    found = session(path).run(None, {"x": x, **given})[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-2 * np.abs(wanted).max())


@pytest.mark.parametrize("form", ["nodes", "inputs"])
def test_adapters_beside_static_activations(form, tmp_path):
    """MatMulIntegerToFloat of a QuantizeLinear, as onnxruntime's optimizer makes it of QDQ."""
    text = """<ir_version: 9, opset_import: ["": 17]>
    g (float[n,t,32] x) => (float[n,t,48] y) {
      q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
      w = DequantizeLinear <axis = 1> (codes, scale, zero) y = MatMul(d, w)
    }"""
    proto = onnx.parser.parse_model(text)
    tensors = {
        "s": np.float32(0.02),
        "z": np.uint8(120),
        "codes": DRAW.integers(-127, 128, (SIZE, HIDDEN)).astype(np.int8),
        "scale": 0.002 + 0.001 * np.abs(normal(HIDDEN)),
        "zero": np.zeros(HIDDEN, np.int8),
    }
    made = [numpy_helper.from_array(np.asarray(v), name) for name, v in tensors.items()]
    proto.graph.initializer.extend(made)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    fused, x, path = onnx.load(tmp_path / "fused.onnx"), normal(2, 5, SIZE), tmp_path / "out.onnx"
    assert [n.op_type for n in fused.graph.node] == ["QuantizeLinear", "MatMulIntegerToFloat"]
    model = jaxonnx.load(fused)
    base = session(fused.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(model(x), base, rtol=1e-4, atol=1e-4)
    adapted = adapt(model)
    adapted.save(path, adapters=form)
    assert base_tensors(fused).items() <= base_tensors(onnx.load(path)).items()
    given = jaxonnx.Adapters.of(adapted).to_inputs() if form == "inputs" else {}
    wanted, run = np.asarray(adapted(x)), session(str(path))
    assert np.abs(wanted - base).max() > 0.01
    np.testing.assert_allclose(run.run(None, {"x": x, **given})[0], wanted, rtol=1e-4, atol=1e-4)
    if form == "inputs":
        np.testing.assert_array_equal(run.run(None, {"x": x})[0], base)
    else:
        again = jaxonnx.load(path)  # trained further as products of their own
        np.testing.assert_allclose(again(x), wanted, rtol=1e-4, atol=1e-4)


def test_gradients_of_adapters_beside_integers(tmp_path):
    """By finite differences: of the file where it is smooth, else of the matrices as floats."""
    proto = quantized(tmp_path)
    adapted, x = adapt(jaxonnx.load(proto)), normal(16, 5, SIZE)
    target = normal(16, 5, SIZE)
    stored = {t.name: numpy_helper.to_array(t).astype(np.float32) for t in proto.graph.initializer}

    @jax.jit
    def loss(params):
        return ((adapted.apply(params, x) - target) ** 2).mean()

    def loss_of_floats(params):
        floats = onnx.load(tmp_path / "plain.onnx")
        for tensor in floats.graph.initializer:
            if tensor.name in MATRICES:
                w, zero, scale = (
                    stored[f"{tensor.name}_{part}"] for part in ("quantized", "zero_point", "scale")
                )
                a, b = (np.asarray(params[f"{tensor.name}_quantized.lora_{end}"]) for end in "AB")
                w = (w - zero) * scale + (b @ a).T
                tensor.CopyFrom(numpy_helper.from_array(w, tensor.name))
        y = session(floats.SerializeToString()).run(None, {"x": x})[0]
        return ((y - target).astype(np.float64) ** 2).mean()

    for name, slope in jax.jit(jax.grad(loss))(adapted.params).items():
        unit = slope / jnp.linalg.norm(slope)
        smooth = name.startswith("down_proj")  # nothing is rounded behind
        high, low = (
            (loss if smooth else loss_of_floats)(
                {**adapted.params, name: adapted.params[name] + step * unit}
            )
            for step in (1e-2, -1e-2)
        )
        # rounding moves the activations at which the derivative is taken
        rtol = 1e-3 if smooth else 0.05
        np.testing.assert_allclose((high - low) / 2e-2, (slope * unit).sum(), rtol=rtol)


def test_training_beside_integers(tmp_path):
    """As far as the same adapters beside the matrices in float32."""
    x = normal(64, 5, SIZE)
    proto = quantized(tmp_path)
    y = np.asarray(adapt(jaxonnx.load(proto), 0.2)(x))
    settings = {"loss": "squared_error", "optimizer": optax.adam(1e-2), "batch_size": 16}
    settings |= {"epochs": 8, "lora": jaxonnx.LoRA(4), "seed": 0}
    result = jaxonnx.train(proto, (x, y), **settings)
    other = jaxonnx.train(tmp_path / "plain.onnx", (x, y), **settings)
    assert result.history.losses[-1] < 0.7 * result.history.losses[0]
    assert result.history.losses[-1] < 1.1 * other.history.losses[-1]
    found = session(result.model.to_onnx().SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(np.mean((found - y) ** 2), result.history.losses[-1], rtol=0.1)


def test_parts_of_a_group_that_others_read(tmp_path):
    """Outputs inside of a group, and a file that is cut behind one, have all their nodes."""
    proto, x = quantized(tmp_path), normal(2, 5, SIZE)
    model = jaxonnx.load(proto)
    inner = next(n for n in proto.graph.node if n.op_type == "MatMulInteger")
    cut = model.with_outputs([inner.output[0], inner.input[0], "g1"])
    onnx.checker.check_model(cut.to_onnx(), full_check=True)
    found = session(cut.to_onnx().SerializeToString()).run(None, {"x": x})
    for one, other in zip(cut(x), found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-2 * np.abs(other).max())


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("rank", sweep([0, 1, 2, 3], 0, 3))
@pytest.mark.parametrize("kind", ["group", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"])
def test_parameters_of_columns_may_be_rows(kind, rank, batch):
    """Scales and zero points of shape (1, N), which onnxruntime takes as those of shape (N)."""
    shape = [(), (1,), (HIDDEN,), (1, HIDDEN)][rank]
    draw = np.random.default_rng(1)
    zeros = draw.integers(90, 160, shape).astype(np.uint8)
    scales = draw.uniform(0.002, 0.02, shape).astype(np.float32)
    tensors = {"w": draw.integers(0, 256, (SIZE, HIDDEN)).astype(np.uint8), "s": scales, "z": zeros}
    bodies = {
        "group": """q, a, p = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, p, z)
                    f = Cast <to = 1> (i) b = Mul(a, s) y = Mul(f, b)""",
        "DynamicQuantizeMatMul": "y = com.microsoft.DynamicQuantizeMatMul(x, w, s, z)",
        "MatMulIntegerToFloat": """q, a, p = DynamicQuantizeLinear(x)
                                   y = com.microsoft.MatMulIntegerToFloat(q, w, a, s, p, z)""",
    }
    free = "n,t" if batch else "n"
    proto = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[{free},{SIZE}] x) => (float[{free},{HIDDEN}] y) {{ {bodies[kind]} }}"""
    )
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in tensors.items())
    x, model = normal(*batch, 4, SIZE), jaxonnx.load(proto)
    (expected,) = session(proto.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(model(x), expected, rtol=1e-6, atol=1e-6)
    adapted = adapt(model)
    a, b = (next(v for n, v in adapted.params.items() if n.endswith(end)) for end in ("_A", "_B"))
    if kind != "MatMulIntegerToFloat":
        change = x @ np.asarray(a).T @ np.asarray(b).T
        np.testing.assert_allclose(adapted(x), expected + change, rtol=1e-4, atol=1e-4)
    assert jnp.isfinite(jax.jit(jax.grad(lambda x: model(x).sum()))(x)).all()
