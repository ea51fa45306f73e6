"""Tensors that a file computes with before data meet them, and other tensors in plain arithmetic.

What each of them is in PyTorch: a parameter, or a buffer.
"""

import jax
import numpy as np
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx

RANDOM = np.random.default_rng(0)


def weight(*shape):
    return RANDOM.normal(size=shape)


ANGLES = np.pi / 8 * (np.arange(8) + 0.5) * np.arange(8)[:, None]
BLUR = np.outer([1, 3, 3, 1], [1, 3, 3, 1]) / 64
SOBEL = np.array([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
BACK = "h = MatMul(x, w0)"
COMPUTED = {
    "exp(A_log) of Mamba": (f"{BACK} e = Exp(p) n = Neg(e) y = Mul(h, n)", weight(6, 8), True),
    "a gate": (f"{BACK} s = Sigmoid(p) y = Mul(h, s)", weight(1, 6, 8), True),
    "softplus of a vector": (f"{BACK} s = Softplus(p) y = Mul(h, s)", weight(8), True),
    "a factor by heads": (f"{BACK} s = Exp(p) y = Mul(h, s)", weight(2, 1, 1), True),
    "weight norm": (
        "l = ReduceL2<axes = [1]>(p) u = Div(p, l) v = Mul(u, g) y = MatMul(x, v)",
        weight(8, 8),
        True,
    ),
    "weight norm along an axis in a list": (
        """a = Constant<value_ints = [1]>() q = Mul(p, p) n = ReduceSum(q, a) l = Sqrt(n)
        u = Div(p, l) v = Mul(u, g) y = MatMul(x, v)""",
        weight(8, 8),
        True,
    ),
    "a vector of a spectral norm of a reshaped kernel": (
        """a = Constant<value_int = 8>() l = Constant<value_ints = [-1]>() m = Unsqueeze(a, z)
        s = Concat<axis = 0>(m, l) r = Reshape(w0, s) u = MatMul(r, p) d = MatMul(u, g)
        v = Div(w0, d) y = MatMul(x, v)""",
        weight(8),
        False,
    ),
    "a norm that the exporter computed": (
        "c = Clip(p, low) u = Div(w0, c) y = MatMul(x, u)",
        np.abs(weight(8, 1)),
        False,
    ),
    "a weight that is divided by its norm, expanded to its shape (ArcFace)": (
        """l = ReduceL2<axes = [-1]>(p) c = Clip(l, low) s = Shape(p) e = Expand(c, s)
        u = Div(p, e) t = Transpose(u) y = MatMul(x, t)""",
        weight(8, 8),
        True,
    ),
    "positions that are resized between computed places (SAM)": (
        f"""{BACK} zero = Constant<value = int64 {{0}}>() many = Constant<value = int64 {{6}}>()
        one = Constant<value = int64 {{1}}>() last = Constant<value_ints = [-1]>()
        i = Range(zero, many, one) j = Add(i, one) a = Unsqueeze(i, last) b = Unsqueeze(j, last)
        q = GatherND(p, a) r = GatherND(p, b) d = Sub(r, q) m = Mul(d, places) s = Add(q, m)
        y = Add(h, s)""",
        weight(9, 8),
        True,
    ),
    "a symmetric weight, of its upper triangle": (
        """u = Trilu(p) one = Constant<value = int64 {1}>() d = Trilu(p, one) t = Transpose(d)
        s = Add(u, t) y = MatMul(x, s)""",
        weight(8, 8),
        True,
    ),
    "a triangle whose numbers are scattered": (
        """i = Constant<value = int64[3, 2] {0, 0, 2, 1, 5, 3}>() s = ScatterND(w0, i, p)
        y = MatMul(x, s)""",
        weight(3),
        True,
    ),
    "thresholds in ascending order": (
        f"""{BACK} e = Exp(p) zero = Constant<value = int64 {{0}}>() t = CumSum(e, zero)
        y = Sub(h, t)""",
        weight(8),
        True,
    ),
    "a weight of tensor factors, scaled": (
        """k = Einsum<equation = "ij,jk->ik">(w0, wx) s = Exp(p) m = Mul(k, s) y = MatMul(x, m)""",
        weight(8),
        True,
    ),
    "a standardized kernel": (
        "m = ReduceMean<axes = [1]>(p) v = Sub(p, m) y = MatMul(x, v)",
        weight(8, 8),
        True,
    ),
    "a mask on a weight": ("v = Mul(w0, p) y = MatMul(x, v)", np.tri(8), False),
    "the weight under a mask": ("v = Mul(p, mask) y = MatMul(x, v)", weight(8, 8), True),
    "frequencies times positions": (
        f"{BACK} a = Mul(p, places) c = Cos(a) y = Mul(h, c)",
        10.0 ** -np.arange(8),
        False,
    ),
    "a cosine transform of eight numbers": (f"{BACK} y = MatMul(h, p)", np.cos(ANGLES), False),
}
PLACES = {
    "positions behind a second layer": (
        f"{BACK} r = Relu(h) y = Add(r, p)",
        weight(1, 6, 8),
        True,
    ),
    "a threshold": (f"{BACK} y = Max(h, p)", weight(8), True),
    "a temperature": (f"{BACK} y = Div(h, p)", weight(8), True),
    "what stands for masked places": (f"{BACK} y = Where(keep, h, p)", weight(8), True),
    "kernels that are mixed": (
        "m = MatMul(x, w0) k = Mul(m, p) t = Transpose<perm = [0, 2, 1]>(k) y = MatMul(x, t)",
        weight(1, 6, 8),
        True,
    ),
    "centers": (
        """a = Constant<value_ints = [2]>() u = Unsqueeze(x, a) c = Sub(u, p) r = Relu(c)
        y = MatMul(r, w0)""",
        weight(5, 8),
        True,
    ),
    "the start of a recurrence": (
        """t = Transpose<perm = [1, 0, 2]>(x) n = Shape<start = 1, end = 2>(t)
        one = Constant<value_ints = [1]>() size = Constant<value_ints = [8]>()
        s = Concat<axis = 0>(one, n, size) e = Expand(p, s)
        all, y = GRU<hidden_size = 8>(t, wg, rg, , , e)""",
        weight(1, 1, 8),
        True,
    ),
    "zeros that a recurrence starts from": (
        "t = Transpose<perm = [1, 0, 2]>(x) all, y = GRU<hidden_size = 8>(t, wg, rg, , , p)",
        np.zeros((1, 2, 8)),
        False,
    ),
    "a skip of the inputs (D of a state space)": (
        f"{BACK} s = Mul(x, p) y = Add(h, s)",
        weight(8),
        True,
    ),
    "a bias of scores that was gathered (Swin, T5)": (
        f"{BACK} t = Transpose<perm = [0, 2, 1]>(h) s = MatMul(h, t) a = Add(s, p) y = Softmax(a)",
        weight(2, 11)[:, np.arange(6)[:, None] - np.arange(6) + 5],
        True,
    ),
    "a bias of scores, by GatherND from computed indices": (
        f"""{BACK} t = Transpose<perm = [0, 2, 1]>(h) s = MatMul(h, t) m = Max(index) n = Shape(m)
        e = Expand(index, n) b = GatherND(p, e) a = Add(s, b) y = Softmax(a)""",
        weight(11),
        True,
    ),
    "positions that are looked up by tuples of indices (Whisper)": (
        f"""{BACK} n = Shape<start = 0, end = 1>(x) tail = Constant<value_ints = [6, 1]>()
        s = Concat<axis = 0>(n, tail) e = Expand(index0, s) r = GatherND(p, e) y = Add(h, r)""",
        weight(9, 8),
        True,
    ),
    "rows that are looked up by element": (
        f"""{BACK} n = Shape(x) e = Expand(index1, n) r = GatherElements<axis = 1>(p, e)
        y = Add(h, r)""",
        weight(2, 9, 8),
        True,
    ),
    "features that are joined to those of data": (
        f"""{BACK} s = Shape<start = 0, end = 2>(x) tail = Constant<value_ints = [3]>()
        t = Concat<axis = 0>(s, tail) e = Expand(p, t) y = Concat<axis = 2>(h, e)""",
        weight(1, 1, 3),
        True,
    ),
    "coordinates that are joined to features": (
        f"{BACK} y = Concat<axis = 2>(h, p)",
        np.stack(np.broadcast_arrays(np.linspace(-1, 1, 6), np.linspace(0, 1, 2)[:, None]), 2),
        False,
    ),
    "the constant that StyleGAN's convolutions start from": (
        """n = Shape<start = 0, end = 1>(x) tail = Constant<value_ints = [1, 6, 8]>()
        s = Concat<axis = 0>(n, tail) e = Expand(p, s) k = Conv(e, wc)
        a = Constant<value_ints = [1]>() u = Unsqueeze(x, a) y = Mul(k, u)""",
        weight(1, 1, 6, 8),
        True,
    ),
    "queries that a layer projects": (
        "q = MatMul(p, w0) t = Transpose(q) y = MatMul(x, t)",
        weight(5, 8),
        True,
    ),
    "exponents": (f"{BACK} s = Sigmoid(h) y = Pow(s, p)", np.abs(weight(8)), True),
    "a row that replaces one of data": (
        f"""{BACK} o = Constant<value = int64[2, 2] {{0, 0, 1, 0}}>()
        t = Constant<value_ints = [2, 8]>() e = Expand(p, t) y = ScatterND(h, o, e)""",
        weight(8),
        True,
    ),
    "a part of a matrix, taken out of a sequence": (
        """i = Constant<value = int64 {0}>() n = Constant<value_ints = [8, 4]>()
        q = SplitToSequence<axis = 0>(p, n) a = SequenceAt(q, i) t = Transpose(a)
        y = MatMul(x, t)""",
        weight(12, 8),
        True,
    ),
    "ALiBi": (
        f"{BACK} t = Transpose<perm = [0, 2, 1]>(h) s = MatMul(h, t) a = Add(s, p) y = Softmax(a)",
        -np.abs(np.arange(6)[:, None] - np.arange(6)) * np.array([[[0.25]], [[0.0625]]]),
        False,
    ),
    "a mask": (f"{BACK} y = Add(h, p)", np.where(weight(6, 8) > 0, 0, -1e4), False),
    "means of features": (f"{BACK} s = Sub(h, p) y = Div(s, g)", weight(8), False),
    "a mean image": ("s = Sub(x, p) y = MatMul(s, w0)", weight(6, 8), False),
    "keys beside those of a sequence, by Tile": (
        f"""{BACK} n = Shape<start = 0, end = 1>(x) one = Constant<value_ints = [1, 1]>()
        s = Concat<axis = 0>(n, one) e = Tile(p, s) y = Concat<axis = 1>(h, e)""",
        weight(1, 1, 8),
        True,
    ),
    "random Fourier features": (
        "m = MatMul(x, p) s = Sin(m) c = Cos(m) j = Concat<axis = 2>(s, c) y = MatMul(j, w1)",
        weight(8, 5),
        False,
    ),
    "a layer with a sine behind it": ("m = MatMul(x, p) y = Sin(m)", weight(8, 5), True),
    "a kernel that blurs": (
        """a = Constant<value_ints = [1]>() u = Unsqueeze(x, a) c = Conv(u, wc)
        y = Conv<group = 2>(c, p)""",
        np.stack([BLUR, BLUR])[:, None],
        False,
    ),
    "the zero that PyTorch's exporter adds to a convolution without a bias": (
        """a = Constant<value_ints = [1]>() u = Unsqueeze(x, a) s = Constant<value_ints = [2]>()
        o = Constant<value = float {0}>() b = Expand(o, s) y = Conv(u, p, b)""",
        weight(2, 1, 3, 3),
        True,
    ),
    "Sobel's kernels": (
        "a = Constant<value_ints = [1]>() u = Unsqueeze(x, a) c = Conv(u, p) y = Conv(c, w2)",
        np.stack([SOBEL, SOBEL.T])[:, None],
        False,
    ),
}


def file(nodes, value):
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[2, 6, 8] x) => (float[2, m] y) '
        f"{{ {nodes} }}"
    )
    tensors = {"w0": weight(8, 8), "w1": weight(10, 3), "wc": weight(2, 1, 1, 1)}
    tensors |= {"w2": weight(1, 2, 1, 1), "wg": weight(1, 24, 8), "rg": weight(1, 24, 8)}
    tensors |= {
        "wx": weight(8, 8),
        "g": weight(8),
        "places": np.arange(6.0)[:, None],
        "mask": np.tri(8),
        "p": value,
    }
    tensors["low"] = 1e-12
    index = np.arange(6)[:, None] - np.arange(6) + 5
    rows = np.arange(6)[:, None]
    integers = {"z": np.array([0]), "index": index[..., None], "index0": rows, "index1": rows}
    for name, array in integers.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for name, array in tensors.items():
        if any(name in node.input for node in proto.graph.node):
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(array), name))
    if any("keep" in node.input for node in proto.graph.node):
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(np.arange(48).reshape(6, 8) % 3 > 0, "keep")
        )
    return proto


@pytest.mark.parametrize("name", COMPUTED | PLACES)
def test_parameters_and_buffers(name):
    nodes, value, learned = (COMPUTED | PLACES)[name]
    model = jaxonnx.load(file(nodes, value))
    assert ("p" in model.params) == learned
    assert model.params.keys().isdisjoint({"mask", "o"})


@pytest.mark.parametrize("name", ["exp(A_log) of Mamba", "weight norm", "a threshold"])
def test_gradients_pass_what_is_computed(name):
    nodes, value, _ = (COMPUTED | PLACES)[name]
    model, x = jaxonnx.load(file(nodes, value)), np.float32(weight(2, 6, 8))
    gradients = jax.grad(lambda params: (model.apply(params, x) ** 2).sum())(model.params)
    assert np.abs(gradients["p"]).max() > 0


def test_what_is_computed_from_weights_of_eight_bits_is_none():
    proto = file("c = Cast<to = 1>(q) v = Mul(c, p) y = MatMul(x, v)", weight(8))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.int8(100 * weight(8, 8)), "q"))
    assert "q" not in jaxonnx.load(proto).params


def test_a_computed_constant_is_told():
    model = jaxonnx.load(file(f"{BACK} e = Exp(p) y = Mul(h, e)", -np.arange(8)))
    assert {*model.params} == {"w0"}
    assert "'p': a geometric sequence (computed from it)" in " ".join(str(model).split())


def test_nothing_large_is_computed():
    """A file of a few bytes must not take the machine while it is loaded."""
    for size, nodes in (
        (8, "a = Constant<value_ints = [900000, 90000, 8]>() e = Exp(p) y = Expand(e, a)"),
        (1, "e = Exp(p) b = Mul(e, many) c = Mul(b, wide) y = Add(h, c)"),
        (
            1,
            """e = Exp(p) from = Constant<value_float = 0.0>() to = Constant<value_float = 1e10>()
         step = Constant<value_float = 1.0>() r = Range(from, to, step) c = Mul(e, r)
         y = Add(h, c)""",
        ),
        (
            1,
            """e = Exp(p) n = Constant<value_ints = [100000, 100000]>() o = ConstantOfShape(n)
         c = Mul(e, o) y = Add(h, c)""",
        ),
        (1, "e = Exp(p) b = MatMul(many, wide) c = Mul(b, e) y = Add(h, c)"),
    ):
        proto = file(f"{BACK} {nodes}", weight(1, size))
        for name, shape in {"many": (90000, 1), "wide": (1, 90000)}.items():
            tensor = onnx.numpy_helper.from_array(np.float32(weight(*shape)), name)
            proto.graph.initializer.append(tensor)
        assert "p" not in jaxonnx.load(proto).params


def standardized(mode=1, momentum=0.0, statistics="moments", copy=False):
    """A kernel (1, 4, 6) that BatchNormalization standardizes, as timm's StdConv2d is exported."""
    kernel = np.random.default_rng(1).normal(size=(1, 4, 6)).astype(np.float32)
    tensors = {"kernel": kernel, "gain": [0.6, 1, 2, 3], "shift": np.zeros(4)}
    tensors |= {"zeros": np.zeros(4), "ones": np.ones(4)}
    tensors |= {"turned": kernel.swapaxes(1, 2)} if copy else {}
    turned = "" if copy else "turned = Transpose<perm = [0, 2, 1]>(kernel)"
    pair = {"moments": "mean, variance", "constants": "zeros, ones"}[statistics]
    proto = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 17]> g (float[n, 3, 2] x) => (float[n, 4, 1] y) {{
      {turned}
      mean = ReduceMean<axes = [0, 1], keepdims = 0>(turned)
      middle = ReduceMean<axes = [0, 1]>(turned)
      apart = Sub(turned, middle)
      squares = Mul(apart, apart)
      variance = ReduceMean<axes = [0, 1], keepdims = 0>(squares)
      unit, m, v = BatchNormalization<training_mode = {mode}, momentum = {momentum:.1f}>(
        kernel, gain, shift, {pair})
      shape = Constant<value = int64[3] {{4, 3, 2}}>()
      folded = Reshape(unit, shape)
      maps = Conv(x, folded)
      y = GlobalAveragePool(maps)
    }}""")
    for name, value in tensors.items():
        array = np.asarray(value, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


ROWS = np.random.default_rng(2).normal(size=(8, 3, 2)).astype(np.float32)


def run(proto):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    return session.run(None, {"x": ROWS})[0]


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(("momentum", "statistics"), [(0, "moments"), (1, "constants")])
def test_a_kernel_that_batch_normalization_standardizes_is_trained(copy, momentum, statistics):
    proto = standardized(1, momentum, statistics, copy)
    model = jaxonnx.load(proto)
    assert [*model.params] == ["kernel", "gain", "shift"]
    assert not model.state
    assert not model.warnings
    np.testing.assert_allclose(model(ROWS), run(proto), atol=1e-6)
    targets = np.zeros((8, 4, 1), np.float32)
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.1), "batch_size": 8}
    result = jaxonnx.train(model, (ROWS, targets), **settings).model
    assert not np.allclose(result.params["kernel"], model.params["kernel"], atol=1e-3)
    saved = result.to_onnx()
    np.testing.assert_allclose(result(ROWS), run(saved), atol=1e-6)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in saved.graph.initializer}
    np.testing.assert_array_equal(stored["kernel"], result.params["kernel"])
    if copy:
        np.testing.assert_array_equal(stored["turned"], stored["kernel"].swapaxes(1, 2))


def test_a_kernel_is_standardized_by_the_statistics_of_a_file_in_inference_mode():
    proto = standardized(0, 0, "constants")
    norm = next(node for node in proto.graph.node if node.op_type == "BatchNormalization")
    del norm.output[1:]
    model = jaxonnx.load(proto)
    y, state = model.apply_train(model.params, model.state, jax.random.key(0), ROWS)
    np.testing.assert_allclose(y, run(proto), atol=1e-6)
    assert not state


@pytest.mark.parametrize("case", ["momentum of one", "computed from x", "Constant nodes"])
def test_normalization_without_running_statistics_uses_those_of_the_batch(case):
    statistics = "mean, variance" if case == "computed from x" else "zeros, ones"
    momentum = 1.0 if case == "momentum of one" else 0.9
    fillers = """
      zeros = Constant<value = float[3] {0, 0, 0}>()
      ones = Constant<value = float[3] {1, 1, 1}>()""" * (case == "Constant nodes")
    proto = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 17]> g (float[n, 3, 2] x) => (float[n, 3, 2] y) {{
      {fillers}
      mean = ReduceMean<axes = [0, 2], keepdims = 0>(x)
      square = Mul(x, x)
      variance = ReduceMean<axes = [0, 2], keepdims = 0>(square)
      y, m, v = BatchNormalization<training_mode = 1, momentum = {momentum}>(
        x, gain, shift, {statistics})
    }}""")
    tensors = {"gain": [0.5, 1, 2], "shift": [1, 2, 3], "zeros": [0, 0, 0], "ones": [1, 1, 1]}
    for name in [*tensors][: 2 if fillers else 4]:
        array = np.asarray(tensors[name], np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model = jaxonnx.load(proto)
    assert [*model.params] == ["gain", "shift"]
    assert not model.state
    assert not model.warnings
    np.testing.assert_allclose(model(ROWS), run(proto), atol=1e-5)
    np.testing.assert_allclose(run(model.to_onnx()), run(proto), atol=1e-5)
    y, state = model.apply_train(model.params, model.state, jax.random.key(0), ROWS)
    np.testing.assert_allclose(y, run(proto), atol=1e-5)
    assert not state
