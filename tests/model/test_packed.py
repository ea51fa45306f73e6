"""Matrices in few bits: one weight each, products without the float matrix, adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx.lowering import _packed

DRAW = np.random.default_rng(0)
K, N = 64, 40
MS = "com.microsoft"


def normal(*shape):
    return DRAW.standard_normal(shape).astype(np.float32)


def raw(*shape):
    return DRAW.integers(0, 256, shape).astype(np.uint8)


def network(nodes, x=("x", TensorProto.FLOAT, ["n", K]), types=None, rank=2, **tensors):
    """A file with nodes that end in y; `types` has those of tensors that NumPy cannot tell."""
    made = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    for tensor in made:
        if kind := (types or {}).get(tensor.name):
            numbers = numpy_helper.to_array(tensor)
            tensor.CopyFrom(helper.make_tensor(tensor.name, kind, numbers.shape, numbers.ravel()))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, "nmk"[:rank])],
        made,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def n_bits(bits, block, zeros="", index=False, bias=False, columns=K):
    blocks = -(-columns // block)
    tensors = {
        "w": raw(N, blocks, block * bits // 8),
        "s": normal(N, blocks),
    }
    inputs = ["x", "w", "s", "z" if zeros else "", "i" if index else "", "c" if bias else ""]
    if zeros == "uint8":
        tensors["z"] = raw(N, -(-blocks * bits // 8))
    elif zeros:
        tensors["z"] = 8 * normal(N, blocks)
    if index:
        tensors["i"] = DRAW.permutation(np.arange(columns, dtype=np.int32) % blocks)
    if bias:
        tensors["c"] = normal(N)
    while not inputs[-1]:
        inputs.pop()
    sizes = {"K": columns, "N": N, "bits": bits, "block_size": block, "accuracy_level": 1}
    node = helper.make_node("MatMulNBits", inputs, ["y"], "product", domain=MS, **sizes)
    return network([node], ("x", TensorProto.FLOAT, ["n", columns]), **tensors)


def bnb4(kind, block=32):
    sizes = {"K": K, "N": N, "block_size": block, "quant_type": kind}
    node = helper.make_node("MatMulBnb4", ["x", "w", "s"], ["y"], domain=MS, **sizes)
    return network([node], w=raw(N * K // 2), s=np.abs(normal(N * K // block)))


def dequantized(shape, nodes, scale, types=TensorProto.INT8, **attributes):
    """DequantizeLinear of integers of 4 or 8 bits, and what reads its result."""
    low, high = (-8, 8) if types == TensorProto.INT4 else (-128, 128)
    w = DRAW.integers(low, high, shape).astype(np.int8)
    z = DRAW.integers(low // 2, high // 2, scale).astype(np.int8)
    first = helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], **attributes)
    nodes = [helper.make_node(*node, **options) for node, options in nodes]
    tensors = {"w": w, "s": normal(*scale), "z": z}
    return network([first, *nodes], types={"w": types, "z": types}, **tensors)


PRODUCT = [(("MatMul", ["x", "d"], ["y"]), {})]
TURNED = [(("Transpose", ["d"], ["t"]), {"perm": [1, 0]}), (("MatMul", ["x", "t"], ["y"]), {})]
GEMM = [(("Gemm", ["x", "d"], ["y"]), {"transB": 1, "alpha": 1.0})]
INT4 = TensorProto.INT4

FILES = {
    "4 bits": lambda: n_bits(4, 16),
    "4 bits, bias": lambda: n_bits(4, 16, "uint8", bias=True),
    "4 bits, zeros": lambda: n_bits(4, 32, "uint8"),
    "4 bits, float zeros": lambda: n_bits(4, 32, "float"),
    "4 bits, padded": lambda: n_bits(4, 16, "uint8", columns=K - 8),
    "4 bits, g_idx": lambda: n_bits(4, 16, "float", index=True),
    "8 bits": lambda: n_bits(8, 32, "uint8"),
    "2 bits": lambda: n_bits(2, 16),
    "fp4": lambda: bnb4(0),
    "nf4": lambda: bnb4(1),
    "nf4, blocks over rows": lambda: bnb4(1, 128),
    "a scale": lambda: dequantized((K, N), PRODUCT, ()),
    "a scale a column": lambda: dequantized((K, N), PRODUCT, (N,), axis=1),
    "a scale a row": lambda: dequantized((N, K), TURNED, (N,), axis=0),
    "blocks of rows": lambda: dequantized((K, N), PRODUCT, (4, N), INT4, axis=0, block_size=16),
    "blocks of columns": lambda: dequantized((N, K), GEMM, (N, 2), INT4, axis=1, block_size=32),
}


def runtime(proto, **options):
    chosen = onnxruntime.SessionOptions()
    chosen.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    path = proto if isinstance(proto, str) else proto.SerializeToString()
    session = onnxruntime.InferenceSession(path, chosen, providers=["CPUExecutionProvider"])
    return lambda **inputs: session.run(None, inputs)[0]


@pytest.fixture
def in_parts(monkeypatch):
    """Loops for small matrices too, with a part that is left over."""
    monkeypatch.setattr(_packed, "SMALL", 0)
    monkeypatch.setattr("jaxonnx.ops.quantize.SMALL", 0)
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
    names = ["w", "ids", "s", "z"]
    sizes = {"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    node = helper.make_node("GatherBlockQuantized", names, ["y"], domain=MS, **sizes)
    tensors = {"w": raw(50, K // 2), "s": normal(50, K // 16), "z": raw(50, K // 32)}
    proto = network([node], ("ids", TensorProto.INT64, ["n", 3]), rank=3, **tensors)
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
