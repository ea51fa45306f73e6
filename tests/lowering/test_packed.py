"""Matrices in few bits: one weight each, products without the float matrix, adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import jaxonnx
from jaxonnx.lowering import _packed
from tests.support.few_bit_files import (
    DRAW,
    EXPERTS,
    FILES,
    MS,
    WIDTH,
    K,
    N,
    experts,
    n_bits,
    network,
    normal,
    raw,
    runtime,
    unpacked,
)


@pytest.fixture
def in_parts(monkeypatch):
    """Loops for small matrices too, with a part that is left over."""
    monkeypatch.setattr(_packed, "SMALL", 0)
    monkeypatch.setattr("jaxonnx.lowering.SMALL", 0)
    monkeypatch.setattr(_packed, "PART", 4 * K * 12)


@pytest.mark.parametrize("kind", FILES)
def test_the_matrix_behind_a_packed_weight(kind, in_parts):
    """Values, both gradients and adapters equal those of the matrix that onnxruntime computes."""
    proto = FILES[kind]()
    model, run = jaxonnx.load(proto), runtime(proto)
    columns = model.inputs[0].shape[1]
    zero = run(x=np.zeros((1, columns), np.float32))
    w = run(x=np.eye(columns, dtype=np.float32)) - zero
    x = normal(5, columns)
    close = {"rtol": 1e-4, "atol": 1e-4 * np.abs(w).max()}
    np.testing.assert_allclose(jax.jit(model.apply)(model.params, x), x @ w + zero, **close)

    assert model.summary().matrices == {"w": (N, columns)}
    assert {"w", "s"}.isdisjoint(model.params)
    adapted = jaxonnx.LoRA(3, alpha=6.0, where="w").attach(model, jax.random.key(0))
    params = {name: jnp.asarray(normal(*v.shape)) for name, v in adapted.params.items()}
    params = {name: v for name, v in params.items() if "lora" in name}
    change = lambda p: 2.0 * (p["w.lora_B"] @ p["w.lora_A"]).T  # noqa: E731

    def loss(params, x):
        return (adapted.apply({**adapted.params, **params}, x) ** 2).sum()

    def expected(params, x):
        return ((x @ (w + change(params)) + zero) ** 2).sum()

    found = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)
    wanted = jax.value_and_grad(expected, (0, 1))(params, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())
    slope = jax.vmap(lambda x: adapted.apply({**adapted.params, **params}, x))(x[:, None])
    np.testing.assert_allclose(slope[:, 0], x @ (w + change(params)) + zero, **close)


def test_scales_are_trained_when_named(in_parts):
    model = jaxonnx.load(FILES["4 bits, zeros"](), trainable="s")
    x, step = normal(4, K), 1e-2 * normal(*model.params["s"].shape)

    def loss(params):
        return (model.apply(params, x) ** 2).sum()

    slope = sum(
        jax.tree.leaves(jax.tree.map(lambda g: (g * step).sum(), jax.grad(loss)(model.params)))
    )
    ends = [loss({"s": model.params["s"] + sign * step}) for sign in (1, -1)]
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2, rtol=1e-3)


def test_rows_of_a_packed_table():
    proto = table()
    model, ids = jaxonnx.load(proto), np.array([[1, 2, 49], [0, 7, 7]])
    rows = runtime(proto)(ids=ids)
    np.testing.assert_allclose(model(ids), rows, rtol=1e-5, atol=1e-5)
    adapted = jaxonnx.LoRA(2, where="w").attach(model, jax.random.key(0))
    params = {name: jnp.asarray(normal(*v.shape)) for name, v in adapted.params.items()}
    change = np.asarray(params["w.lora_A"].T @ params["w.lora_B"].T)[ids]
    np.testing.assert_allclose(adapted.apply(params, ids), rows + change, rtol=1e-4, atol=1e-4)


def test_memory_of_a_step_on_a_base_of_4_bits():
    """Arguments and temporaries, in bytes a weight; in float32 the base alone would be 4."""
    layers, size, block = 16, 1024, 32
    nodes, tensors, value = [], {}, "x"
    for i in range(layers):
        sizes = {"K": size, "N": size, "bits": 4, "block_size": block}
        inputs = [value, f"w{i}", f"s{i}"]
        nodes.append(helper.make_node("MatMulNBits", inputs, [f"h{i}"], domain=MS, **sizes))
        value = "y" if i == layers - 1 else f"r{i}"
        nodes.append(helper.make_node("Relu", [f"h{i}"], [value]))
        tensors[f"w{i}"] = raw(size, size // block, block // 2)
        tensors[f"s{i}"] = np.full((size, size // block), 0.01, np.float32)
    model = jaxonnx.load(network(nodes, ("x", TensorProto.FLOAT, ["n", size]), **tensors))
    adapted = jaxonnx.LoRA(2).attach(model, jax.random.key(0))
    assert len(adapted.params) == 2 * layers

    def loss(params, state, x):
        return (adapted.apply(params, x, state=state) ** 2).sum()

    x = jnp.ones((4, size))
    step = jax.jit(jax.value_and_grad(loss)).lower(adapted.params, adapted.state, x).compile()
    sizes = step.memory_analysis()
    adapters = sum(v.nbytes for v in adapted.params.values())
    activations = 3 * layers * x.nbytes
    bytes_taken = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    assert bytes_taken < 0.7 * layers * size**2 + 2 * adapters + activations


def test_results_of_packed_products_take_memory_when_they_are_computed():
    size, block, rows = 512, 32, 256

    def memory(layers):
        nodes, tensors, value = [], {}, "x"
        sizes = {"K": size, "N": size, "bits": 4, "block_size": block}
        for i in range(layers):
            inputs, result = [value, f"w{i}", f"s{i}"], f"h{i}" if i < layers - 1 else "y"
            nodes.append(helper.make_node("MatMulNBits", inputs, [result], domain=MS, **sizes))
            tensors[f"w{i}"] = raw(size, size // block, block // 2)
            tensors[f"s{i}"] = np.full((size, size // block), 0.01, np.float32)
            value = result
        model = jaxonnx.load(network(nodes, ("x", TensorProto.FLOAT, ["n", size]), **tensors))

        def loss(x, state):
            return model.apply({}, x, state=state).sum()

        x = jax.ShapeDtypeStruct((rows, size), jnp.float32)
        program = jax.jit(jax.grad(loss)).lower(x, model.state).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert memory(10) - memory(4) < 2 * 4 * rows * size


def typed(kind, opset, ir, block=0):
    """A matrix of a type behind DequantizeLinear."""
    numbers = {"INT2": (-2, 2), "UINT2": (0, 4), "UINT4": (0, 16), "INT4": (-8, 8)}
    dtype = helper.tensor_dtype_to_np_dtype(getattr(TensorProto, kind))
    low = numbers.get(kind)
    w = 1.5 * normal(K, N) if low is None else DRAW.integers(*low, (K, N))
    s = np.abs(normal(*((K // block, N) if block else (N,)))) + np.float32(0.1)
    options = {"axis": 0, "block_size": block} if block else {"axis": 1}
    first = helper.make_node("DequantizeLinear", ["w", "s"], ["d"], **options)
    proto = network([first, helper.make_node("MatMul", ["x", "d"], ["y"])], s=s)
    proto.graph.initializer.append(numpy_helper.from_array(w.astype(dtype), "w"))
    proto.opset_import[0].version, proto.ir_version = opset, ir
    return proto


@pytest.mark.parametrize(
    ("kind", "block", "said"),
    [
        ("FLOAT8E4M3FN", 0, "float8_e4m3fn"),
        ("FLOAT8E5M2FNUZ", 0, "float8_e5m2fnuz"),
        ("UINT4", 16, "uint4 in blocks of 16"),
        ("FLOAT4E2M1", 16, "float4_e2m1fn in blocks of 16"),
        ("INT2", 0, "int2"),
        ("UINT2", 32, "uint2 in blocks of 32"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*rounded anew")
def test_types_behind_dequantize_linear(kind, block, said):
    """Values by onnx.reference and by onnxruntime where it has the type; all three forms."""
    opset, ir = {"FLOAT8": (19, 9), "FLOAT4": (23, 11)}.get(
        kind[:6], (25, 13) if "2" in kind else (21, 10)
    )
    proto = typed(kind, opset, ir, block)
    model, x = jaxonnx.load(proto), normal(3, K)
    assert model.summary().matrices == {"w": (N, K)}
    assert not model.params
    assert f"w: {said}" in model.warnings[0]
    adapted = jaxonnx.LoRA(3, where="w").attach(model, jax.random.key(0))
    params = {name: jnp.asarray(0.3 * normal(*v.shape)) for name, v in adapted.params.items()}
    adapted = adapted.replace(params=params)
    change = np.asarray(params["w.lora_B"] @ params["w.lora_A"]).T
    plain = ReferenceEvaluator(proto).run(None, {"x": x})[0]
    wanted = plain + x @ change
    close = {"rtol": 1e-4, "atol": 1e-4 * np.abs(wanted).max()}
    np.testing.assert_allclose(model(x), plain, **close)
    np.testing.assert_allclose(adapted(x), wanted, **close)
    nodes, merged = (adapted.to_onnx(adapters=form) for form in ("nodes", "merged"))
    np.testing.assert_allclose(ReferenceEvaluator(nodes).run(None, {"x": x})[0], wanted, **close)
    if kind != "FLOAT4E2M1":  # for which onnxruntime 1.30 has no kernel on CPU
        np.testing.assert_allclose(runtime(nodes)(x=x), wanted, **close)
    np.testing.assert_allclose(
        jaxonnx.load(merged)(x), ReferenceEvaluator(merged).run(None, {"x": x})[0], **close
    )


def with_zeros(proto, zeros):
    """The file with other zero points."""
    for tensor in proto.graph.initializer:
        if tensor.name in ("z", "z1"):
            tensor.CopyFrom(numpy_helper.from_array(zeros, tensor.name))
    return proto


@pytest.mark.parametrize(
    "zeros", [100 * normal(N, 2), np.abs(normal(N * 2)).astype(np.float16)], ids=["wide", "half"]
)
def test_zero_points_in_floating_point_may_be_any_number(zeros):
    proto, x = with_zeros(n_bits(4, 32, "float"), zeros), normal(3, K)
    np.testing.assert_allclose(jaxonnx.load(proto)(x), runtime(proto)(x=x), rtol=1e-4, atol=1e-2)


def table():
    names, sizes = ["w", "ids", "s", "z"], {"bits": 4, "block_size": 16, "quantize_axis": 1}
    node = helper.make_node("GatherBlockQuantized", names, ["y"], "rows", domain=MS, **sizes)
    tensors = {"w": raw(50, K // 2), "s": normal(50, K // 16), "z": raw(50, K // 32)}
    return network([node], ("ids", TensorProto.INT64, ["n", 3]), rank=3, **tensors)


@pytest.mark.parametrize(
    ("make", "zeros", "words"),
    [
        (lambda: n_bits(4, 32, "uint8"), raw(N, 2), r"\[40, 2\]; .* \[40, 1\], packed in 4 bits"),
        (lambda: n_bits(2, 16, "uint8"), raw(N * 4), r"must be \[40, 1\], packed in 2 bits"),
        (lambda: n_bits(8, 32, "uint8"), raw(N, 1), r"must be \[40, 2\]"),
        (lambda: n_bits(4, 32, "float"), normal(N, 1), r"float32 \[40, 1\]; .* \[40, 2\]$"),
        (lambda: n_bits(4, 32, "uint8"), raw(N, 2).astype(np.int32), "int32 .* must be uint8"),
        (table, raw(50, 4), r"must be \[50, 2\], packed in 4 bits"),
        (table, raw(50, 2).astype(np.int8), "int8 .* must be uint8 as the weights$"),
        (lambda: experts(4, 0, True), raw(4, 32), r"must be \[4, 16\]"),
    ],
)
def test_zero_points_out_of_range(make, zeros, words):
    """Numbers that are not packed, or of other types, are refused, as onnxruntime does."""
    proto = with_zeros(make(), zeros)
    with pytest.raises(jaxonnx.ModelError, match=rf"node '\w+' .*zero points 'z1?' are .*{words}"):
        jaxonnx.load(proto)
    given = proto.graph.input[0]
    shape = [dim.dim_value or 3 for dim in given.type.tensor_type.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(given.type.tensor_type.elem_type)
    with pytest.raises(Exception, match=r"zero.points|parameter \(z"):
        runtime(proto)(**{given.name: np.zeros(shape, dtype)})


@pytest.mark.deep
@pytest.mark.parametrize(
    ("bits", "block", "zeros"), [(4, 16, False), (8, 0, False), (4, 0, True), (4, 16, True)]
)
def test_experts_in_few_bits(bits, block, zeros, tmp_path):
    """Adapters of each expert add what a MoE of floats with the changed matrices gives."""
    proto = experts(bits, block, zeros)
    model, x = jaxonnx.load(proto), normal(5, K)
    np.testing.assert_allclose(model(x), runtime(proto)(x=x), rtol=1e-3, atol=1e-3)
    assert model.summary().matrices == {"w1": (2 * WIDTH, K), "w2": (K, WIDTH)}
    adapted = jaxonnx.LoRA(2, where=["w1", "w2"]).attach(model, jax.random.key(0))
    assert adapted.params["w1.lora_A"].shape == (EXPERTS, 2, K)
    params = {name: jnp.asarray(0.1 * normal(*v.shape)) for name, v in adapted.params.items()}
    adapted = adapted.replace(params=params)

    tensors = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    w1, w2 = (
        unpacked(tensors, name, bits, zeros) + params[f"w{name}.lora_B"] @ params[f"w{name}.lora_A"]
        for name in "12"
    )
    floats = {"probs": tensors["probs"], "w1": w1, "b1": tensors["b1"], "w2": w2}
    floats = {n: np.asarray(v, np.float32) for n, v in (floats | {"b2": tensors["b2"]}).items()}
    node = helper.make_node("MoE", ["x", *floats], ["y"], domain=MS)
    for one in proto.graph.node[0].attribute:
        if one.name not in ("expert_weight_bits", "block_size"):
            node.attribute.append(one)
    wanted = runtime(network([node], ("x", TensorProto.FLOAT, [5, K]), **floats))(x=x)
    close = {"rtol": 1e-3, "atol": 1e-3 * np.abs(wanted).max()}
    np.testing.assert_allclose(adapted(x), wanted, **close)
    loss = jax.jit(lambda p: (adapted.apply(p, x) ** 2).sum())
    slope = jax.jit(jax.grad(loss))(params)
    # the steepest direction: differences along another one drown in the rounding of the loss
    square_of_params, square = (sum((v**2).sum() for v in x.values()) for x in (params, slope))
    size = 1e-3 * jnp.sqrt(square_of_params / square)
    step = {n: size * v for n, v in slope.items()}
    ends = [loss({n: v + sign * step[n] for n, v in params.items()}) for sign in (1, -1)]
    inner = sum((slope[n] * step[n]).sum() for n in params)
    np.testing.assert_allclose(inner, (ends[0] - ends[1]) / 2, rtol=2e-2)

    with pytest.raises(jaxonnx.InputError, match=r"cannot be written as nodes.*adapters='merged'"):
        adapted.to_onnx(adapters="nodes")
    with pytest.warns(UserWarning, match="2 weights in few bits are rounded anew"):
        adapted.save(tmp_path / "merged.onnx", adapters="merged")
    found = runtime(str(tmp_path / "merged.onnx"))(x=x)
    lost = {4: 0.3, 8: 0.03}[bits]
    assert np.linalg.norm(found - wanted) < lost * np.linalg.norm(wanted)
    with pytest.raises(jaxonnx.InputError, match="no weight is larger than its adapter"):
        jaxonnx.LoRA(1).attach(model, jax.random.key(0))  # by default experts are left out
