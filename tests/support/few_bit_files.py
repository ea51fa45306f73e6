"""Files with matrices of 2 to 8 bits, for every operator that reads such."""

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

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


def floats(**matrices):
    """Products with matrices (inputs, outputs), one after another, as a file."""
    names = [*matrices]
    ends = ["x", *(f"h{i}" for i in range(1, len(names))), "y"]
    lines = [f"{y} = MatMul({x}, {n})" for x, y, n in zip(ends, ends[1:], names, strict=False)]
    proto = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 17]>
        g (float[n,{len(matrices[names[0]])}] x) => (float[n,m] y) {{ {" ".join(lines)} }}"""
    )
    proto.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in matrices.items())
    return proto


EXPERTS, WIDTH = 4, 16


def experts(bits, block, zeros=False):
    """QMoE of SwiGLU, as onnxruntime-genai's builder writes it for gpt-oss."""
    scaled = lambda *shape: 0.02 * np.abs(normal(*shape))  # noqa: E731
    first, last = 2 * WIDTH, K
    tensors = {
        "probs": normal(5, EXPERTS),
        "w1": raw(EXPERTS, first, K * bits // 8),
        "s1": scaled(EXPERTS, first, K // block) if block else scaled(EXPERTS, first),
        "b1": normal(EXPERTS, first),
        "w2": raw(EXPERTS, last, WIDTH * bits // 8),
        "s2": scaled(EXPERTS, last, WIDTH // block) if block else scaled(EXPERTS, last),
        "b2": normal(EXPERTS, last),
    }
    inputs = ["x", *tensors]
    if zeros:
        blocks = [K // block, WIDTH // block] if block else []
        sizes = zip((first, last), blocks, strict=True) if block else [(first,), (last,)]
        z1, z2 = (raw(EXPERTS, *rest, -(-n * bits // 8)) for *rest, n in sizes)
        tensors |= {"z1": z1, "z2": z2}
        inputs += ["", "", "", "z1", "z2"]
    options = {
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.702,
        "activation_beta": 1.0,
        "k": 2,
        "normalize_routing_weights": 1,
        "expert_weight_bits": bits,
    }
    options |= {"block_size": block} if block else {}
    node = helper.make_node("QMoE", inputs, ["y"], domain=MS, **options)
    return network([node], ("x", TensorProto.FLOAT, [5, K]), **tensors)


def unpacked(tensors, name, bits, zeros):
    """The matrices (experts, outputs, inputs) of a QMoE."""
    codes, scale = tensors[f"w{name}"], tensors[f"s{name}"]
    shifts = np.arange(0, 8, bits)
    numbers = ((codes[..., None] >> shifts) & (2**bits - 1)).reshape(*codes.shape[:2], -1)
    zero = 2 ** (bits - 1)
    if zeros:
        packed = tensors[f"z{name}"]
        zero = (packed[..., None] >> shifts) & (2**bits - 1)
        rows = zero.reshape(len(zero), -1) if scale.ndim == 2 else zero.reshape(*zero.shape[:2], -1)
        zero = rows[..., None] if scale.ndim == 2 else rows[..., : scale.shape[2]]
        zero = np.repeat(zero, numbers.shape[2] // zero.shape[2], 2)
    scale = scale.reshape(*codes.shape[:2], -1)
    return (numbers - zero) * np.repeat(scale, numbers.shape[2] // scale.shape[2], 2)
