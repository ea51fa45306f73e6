"""Learned tensors that stand where operators declare no weight, as exporters leave them."""

import numpy as np
import onnx.parser
import pytest

import jaxonnx


def weight(*shape):
    return np.random.default_rng(0).normal(size=shape)


ALIBI = -np.arange(8.0) * 2.0 ** -np.arange(1, 5)[:, None]
HEADS = """o = MatMul(x, w0) q = MatMul(o, w)
  s = Constant<value_ints = [0, 0, 4, 8]>() r = Reshape(q, s)
  h = Transpose<perm = [0, 2, 1, 3]>(r)"""
PLACES = {
    "biases split over heads (DeBERTa)": (
        f"{HEADS} y = Add(h, p)",
        {"p": weight(1, 4, 1, 8)},
        True,
    ),
    "factors over heads": (f"{HEADS} y = Mul(h, p)", {"p": weight(1, 4, 1, 8)}, True),
    "sizes of anchors in pixels (YOLOv5)": (
        f"{HEADS} e = Sigmoid(h) y = Mul(e, p)",
        {"p": np.round(100 * np.abs(weight(1, 4, 1, 8))) + 8},
        False,
    ),
    "slopes over channels and frequencies": (
        f"{HEADS} y = PRelu(h, p)",
        {"p": weight(1, 4, 1, 8)},
        True,
    ),
    "the same, spelled out": (
        f"{HEADS} a = Relu(h) b = Sub(h, a) c = Mul(p, b) y = Add(a, c)",
        {"p": weight(1, 4, 1, 8)},
        True,
    ),
    "slopes times positions (ALiBi)": (
        f"{HEADS} y = Add(h, p)",
        {"p": ALIBI[None, :, None]},
        False,
    ),
    "a mask": (f"{HEADS} y = Add(h, p)", {"p": weight(1, 4, 1, 8) * 1e9}, False),
    "a table whose rows are normalized (DeBERTa)": (
        "q = MatMul(x, w) n = LayerNormalization(p, g) t = Transpose(n) y = MatMul(q, t)",
        {"p": weight(6, 32), "g": weight(32)},
        True,
    ),
    "a token that is repeated by a computed shape (CLIP)": (
        """q = MatMul(x, w) two = Constant<value_ints = [2]>() ones = ConstantOfShape(two)
        one = Constant<value_ints = [1]>() many = Constant<value_ints = [2, 1, 32]>()
        none = Constant<value_ints = [-1, -1, -1]>() e = Equal(many, none)
        s = Where(e, one, many) t = Expand(p, s) y = Concat<axis = 1>(t, q)""",
        {"p": weight(32)},
        True,
    ),
    "positions behind a linear layer": (
        "q = MatMul(x, w) y = Add(q, p)",
        {"p": weight(1, 5, 32)},
        True,
    ),
    "positions behind a quantized product": (
        """u, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(u, v, z)
        f = Cast<to = 1>(i) m = Mul(f, s) b = Add(m, c) q = Add(b, p) y = MatMul(q, w2)""",
        {"p": weight(1, 5, 32), "c": weight(32), "w2": weight(32, 4)},
        True,
    ),
    "something added behind a second layer": (
        "q = MatMul(x, w) r = Relu(q) t = MatMul(r, w2) y = Add(t, p)",
        {"p": weight(1, 5, 32), "w2": weight(32, 32)},
        True,
    ),
    "two frequencies of rotary positions (GPT-NeoX)": (
        """r = ReduceMean<axes = [1]>(x) a = MatMul(p, r) t = Transpose<perm = [0, 2, 1]>(a)
        k = Concat<axis = -1>(t, t) i = Cos(k) j = Sin(k) l = Add(i, j) y = MatMul(l, w4)""",
        {"p": np.array([1, 0.01]).reshape(1, 2, 1), "w4": weight(4, 4)},
        False,
    ),
    "values that a Softmax weighs": (
        "q = MatMul(x, w) r = Softmax(q) y = MatMul(r, p)",
        {"p": np.arange(32.0)[:, None] + weight(32, 1)},
        True,
    ),
    "bins that a Softmax weighs": (
        "q = MatMul(x, w0) r = Softmax(q) y = MatMul(r, p)",
        {"p": np.arange(8.0)[:, None]},
        False,
    ),
    "scales that have not moved": ("q = MatMul(x, w) y = Mul(q, p)", {"p": np.ones(32)}, True),
    "strides of three maps": (
        "q = MatMul(x, w) y = Mul(q, p)",
        {"p": np.repeat([1.0, 2, 4], [16, 12, 4])},
        False,
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_places(name):
    nodes, tensors, trained = PLACES[name]
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[2, 5, 8] x) => (float[m] y) '
        f"{{ {nodes} }}"
    )
    tensors = {"w": weight(8, 32), "w0": weight(8, 8), "v": np.int8(100 * weight(8, 32))} | tensors
    for one, value in tensors.items():
        value = value if value.dtype == np.int8 else np.float32(value)
        if any(one in node.input for node in proto.graph.node):
            proto.graph.initializer.append(onnx.numpy_helper.from_array(value, one))
    model = jaxonnx.load(proto)
    assert ("p" in model.params) == trained
    model(np.float32(weight(2, 5, 8)))


def test_norms_of_queries_and_keys():
    """onnxruntime-genai's builder writes Qwen3's into GroupQueryAttention."""
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 21, "com.microsoft": 1]>
    g (float[2, 3, 64] x, int32[2] lengths, int32 total) => (float[2, 3, 32] y) {
      q = MatMul(x, w)
      y = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>
        (q, , , , , lengths, total, , , , , , , , qn, kn)
    }""")
    for one, shape in {"w": (64, 64), "qn": (8,), "kn": (8,)}.items():
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(np.float32(weight(*shape)), one)
        )
    assert {*jaxonnx.load(proto).params} == {"w", "qn", "kn"}
