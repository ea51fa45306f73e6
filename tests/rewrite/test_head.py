"""New last layers: every form of one, what is refused, training with one, and the command."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import numpy_helper

import jaxonnx
from jaxonnx._data import images
from jaxonnx.cli import main
from tests.support import tiny_networks
from tests.support.paths import DATA

KEY = jax.random.key(7)


def file(nodes, inputs="float[n,4] x", outputs="float[n,6] y", opset=17, ir=8, more="", **tensors):
    """A file of these nodes; tensors are shapes of random numbers, or arrays."""
    proto = onnx.parser.parse_model(
        f'<ir_version: {ir}, opset_import: ["": {opset}, "f": 1, "com.microsoft": 1]> '
        f"g ({inputs}) => ({outputs}) {{ {nodes} }} {more}"
    )
    random = np.random.default_rng(0)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            value = random.normal(size=value, scale=0.5).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
        if ir < 4:
            kind = proto.graph.initializer[-1].data_type
            proto.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, value.shape))
    return proto


def session(proto):
    onnx.checker.check_model(proto, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


IMAGES = {"inputs": "float[n,4,3,3] x"}
HALF = np.ones((4, 6), np.float16)
I8 = np.arange(24, dtype=np.int8)
FORMS = {
    "Gemm": (file("y = Gemm(x, w, b)", w=(4, 6), b=(6,)), ["w", "b"]),
    "Gemm, transB": (file("y = Gemm <transB = 1> (x, w)", w=(6, 4)), ["w"]),
    "Gemm, the weight first": (
        file("t = Transpose(x) z = Gemm(w, t, b) y = Transpose(z)", w=(6, 4), b=(6, 1)),
        ["w", "b"],
    ),
    "MatMul, Add, Softmax": (
        file("m = MatMul(x, w) a = Add(b, m) y = Softmax(a)", w=(4, 6), b=(1, 6)),
        ["w", "b"],
    ),
    "MatMul with a transposed weight": (
        file("t = Transpose(w) m = MatMul(x, t) i = Identity(m) y = LogSoftmax(i)", w=(6, 4)),
        ["w"],
    ),
    "a mask that nobody reads": (
        file("m = MatMul(x, w) a, mask = Dropout(m) y = Add(a, b)", w=(4, 6), b=(6,)),
        ["w", "b"],
    ),
    "tokens": (
        file(
            "m = MatMul(x, w) y = Add(m, b)", "float[n,s,4] x", "float[n,s,6] y", w=(4, 6), b=(6,)
        ),
        ["w", "b"],
    ),
    "SqueezeNet": (
        file(
            "d = Dropout(x) c = Conv(d, w, b) r = Relu(c) p = GlobalAveragePool(r) "
            "v = Reshape(p, s) y = Softmax(v)",
            **IMAGES,
            w=(6, 4, 1, 1),
            b=(6,),
            s=np.array([-1, 6]),
        ),
        ["w", "b"],
    ),
    "SqueezeNet, of an old opset": (
        file(
            "c = Conv(x, w, b) p = AveragePool <kernel_shape = [3, 3]> (c) y = Softmax(p)",
            "float[1,4,3,3] x",
            "float[1,6,1,1] y",
            opset=7,
            ir=3,
            w=(6, 4, 1, 1),
            b=(6,),
        ),
        ["w", "b"],
    ),
    "a fixed shape": (
        file(
            "c = Conv(x, w) p = ReduceMean <axes = [2, 3], keepdims = 0> (c) v = Reshape(p, s) "
            "y = Squeeze(v, a)",
            "float[1,4,3,3] x",
            "float[1,6] y",
            w=(6, 4, 3, 3),
            s=np.array([1, 6, 1]),
            a=np.array([2]),
        ),
        ["w"],
    ),
    "a shape that is taken from the layer": (
        file("m = MatMul(x, w) s = Shape(m) r = Expand(m, s) y = Softmax(r)", w=(4, 6)),
        ["w"],
    ),
    "segmentation": (
        file(
            'c = Conv(x, w) y = Resize <mode = "linear"> (c, , , s)',
            "float[2,4,3,3] x",
            "float[2,6,9,9] y",
            w=(6, 4, 1, 1),
            s=np.array([2, 6, 9, 9]),
        ),
        ["w"],
    ),
    "channels last": (
        file(
            "c = Conv(x, w) t = Transpose <perm = [0, 2, 3, 1]> (c) a = Add(t, b) "
            "u = Transpose <perm = [0, 3, 1, 2]> (a) p = GlobalAveragePool(u) f = Flatten(p) "
            "y = Sigmoid(f)",
            **IMAGES,
            w=(6, 4, 1, 1),
            b=(6,),
        ),
        ["w", "b"],
    ),
    "half precision": (
        file("h = Cast <to = 10> (x) m = MatMul(h, w) y = Cast <to = 1> (m)", w=HALF),
        ["w"],
    ),
    "constants": (
        file(
            "w = Constant <value = float[3,2] {1, 2, 3, 4, 5, 6}> () m = MatMul(x, w) "
            "b = Constant <value = float[2] {5, 6}> () a = Add(m, b) y = Sigmoid(a)",
            "float[n,3] x",
            "float[n,2] y",
        ),
        ["w", "b"],
    ),
    "one number": (
        file("y = Gemm(x, w, b)", outputs="float[n,1] y", w=(4, 1), b=(1,)),
        ["w", "b"],
    ),
    "batch normalization": (
        file(
            "m = MatMul(x, w) y = BatchNormalization(m, s, b, mean, var)",
            **{name: np.ones(6, np.float32) for name in ("s", "b", "mean", "var")},
            w=(4, 6),
        ),
        ["w", "s", "b", "mean", "var"],
    ),
    "a bias that another layer has too": (
        file("h = Gemm(x, v, b) r = Relu(h) y = Gemm(r, w, b)", v=(4, 6), w=(6, 6), b=(6,)),
        ["w", "y.bias"],
    ),
    "an embedding that is the last weight": (
        file(
            "e = Gather(w, x) t = Transpose(w) y = MatMul(e, t)",
            "int64[n,s] x",
            "float[n,s,6] y",
            w=(6, 4),
        ),
        ["y.weight"],
    ),
    "the last token of a text, as decoders that classify take it": (
        file(
            "m = MatMul(x, w) g = ReduceMax <axes = [2], keepdims = 0> (x) "
            "i = ArgMax <axis = 1> (g) y = GatherND <batch_dims = 1> (m, i)",
            "float[n,t,4] x",
            w=(4, 6),
        ),
        ["w"],
    ),
    "the same of PyTorch's exporter, from rows of all texts": (
        file(
            "m = MatMul(x, w) f = Flatten <axis = 2> (m) s = Shape(m) k = Gather(s, two) "
            "g = ReduceMax <axes = [2], keepdims = 0> (x) r = Reshape(g, a) "
            "i = ArgMax <axis = 0> (r) c = Gather <axis = 0> (f, i) d = Concat <axis = 0> (a, k) "
            "y = Reshape(c, d)",
            "float[n,t,4] x",
            "float[k,6] y",
            w=(4, 6),
            a=np.array([-1]),
            two=np.array([2]),
        ),
        ["w"],
    ),
    "a normalized weight": (
        file(
            "n = ReduceL2 <axes = [0]> (v) d = Div(v, n) w = Mul(d, g) y = MatMul(x, w)",
            v=(4, 6),
            g=(1, 6),
        ),
        ["y.weight"],
    ),
    "quantized": (
        file(
            "w = DequantizeLinear(q, s) m = MatMul(x, w) a = Add(m, b) r = QuantizeLinear(a, s, z) "
            "t = DequantizeLinear(r, s, z) p = Softmax(t) u = QuantizeLinear(p, s, z) "
            "y = DequantizeLinear(u, s, z)",
            q=I8.reshape(4, 6),
            s=np.float32(0.1),
            z=np.int8(0),
            b=(6,),
        ),
        ["m.weight", "b"],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    proto, tensors = FORMS[name]
    model = jaxonnx.load(proto)
    new = model.with_head(5, rng=KEY)
    assert new.head == tuple(tensors)
    assert {*new.params} | {*new.state} >= {*tensors}
    saved = new.to_onnx()
    runtime = session(saved)
    (declared,) = runtime.get_outputs()
    classes = max(i for i, d in enumerate(model.outputs[0].shape) if d in (1, 2, 6))
    classes = 1 if "SqueezeNet" in name or name == "segmentation" else classes
    shape = [5 if i == classes else d for i, d in enumerate(model.outputs[0].shape)]
    assert (declared.name, declared.shape) == ("y", shape)
    shape = [d if isinstance(d, int) else 2 for d in model.inputs[0].shape]
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    if model.inputs[0].dtype == np.int64:
        x = np.ones(shape, np.int64)
    (expected,) = runtime.run(None, {"x": x})
    rtol = 1e-2 if name == "half precision" else 1e-5
    np.testing.assert_allclose(new(x), expected, rtol=rtol, atol=1e-6)
    assert np.std(expected) > 0.01  # the weight is drawn
    operators = [node.op_type for node in saved.graph.node]
    assert not {*operators} & {"Softmax", "LogSoftmax", "Sigmoid", "QuantizeLinear"}
    for each in tensors:
        assert each in str(new)  # print says what was replaced


@pytest.mark.deep
@pytest.mark.parametrize(
    "path", sorted(p for p in DATA.glob("*.onnx") if "training" not in p.name), ids=lambda p: p.stem
)
def test_exports(path):
    model = jaxonnx.load(path)
    new = model.with_head(("a", "b"), rng=KEY)
    output = new.outputs[-1]
    assert output.name == model.outputs[-1].name
    assert output.shape == (model.outputs[-1].shape[0], 2)
    same = {n for n in model.params if np.array_equal(model.params[n], new.params[n])}
    assert {*new.params} == {*model.params} == {*same, *new.head}
    assert len(new.head) == 2
    assert {*new.state} == {*model.state}
    saved = new.to_onnx()
    assert len(saved.graph.node) <= len(model.to_onnx().graph.node)
    assert {*jaxonnx.load(saved).params} == {*new.params}
    # of equal places a normalization leaves only what rounding does
    sizes = ([2 if i == 0 else d for i, d in enumerate(v.shape)] for v in new.inputs)
    random = np.random.default_rng(0)
    x = [random.uniform(1, 2, n).astype(v.dtype) for n, v in zip(sizes, new.inputs, strict=True)]
    inputs = dict(zip((v.name for v in new.inputs), x, strict=True))
    (expected,) = session(saved).run(None, inputs)
    np.testing.assert_allclose(new(*x), expected, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    "choice",
    [
        "m = MatMul(x, w) y = Gather <axis = 2> (m, i)",
        "m = MatMul(x, w) s = Concat <axis = 1> (i, i) y = GatherND <batch_dims = 1> (m, s)",
        "m = Conv(x, v) y = Gather <axis = 1> (m, i)",
    ],
)
def test_choices_among_classes_take_no_other_head(choice):
    index = "g = ReduceMax <axes = [1, 2], keepdims = 0> (x) h = Unsqueeze(g, one) "
    nodes = f"{index} i = Cast <to = 7> (h) {choice}"
    proto = file(
        nodes, "float[n,4,4] x", "float[a,b,c] y", w=(4, 6), v=(6, 4, 1), one=np.array([1])
    )
    if "GatherND" in choice:
        proto.graph.output[0].type.tensor_type.shape.dim.pop()
        proto.graph.output[0].type.tensor_type.shape.dim.pop()
    with pytest.raises(jaxonnx.InputError, match=r"before it is node .* \(Gather"):
        jaxonnx.load(proto).with_head(5)


def test_what_is_left_out_is_said():
    model = jaxonnx.load(DATA / "sklearn_mlp.onnx")
    (head,) = model.with_head(7).heads
    assert (head.output, head.classes, head.axis) == ("probabilities", 7, -1)
    assert "the Softmax at the end is left out, 'probabilities' has logits" in head.note
    assert "outputs computed from the old one are left out: label" in head.note
    kept = model.with_head(7, ending=True)
    assert "Softmax" not in kept.heads[0].note
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(np.sum(kept(x), 1), 1, rtol=1e-5)
    carrying = jaxonnx.add_training(
        tiny_networks.mlp(), loss=tiny_networks.LABELS, optimizer=jaxonnx.optim.adam(0.1)
    )
    trained = jaxonnx.load(carrying).with_head(7)
    assert not trained.proto.training_info
    assert "training_info" in trained.heads[0].note


SEVERAL = file(
    "h = Relu(x) y = Gemm(h, v) z = Gemm(h, w) p = Softmax(z)",
    outputs="float[n,6] y, float[n,3] z, float[n,3] p, float[n,4] h",
    v=(4, 6),
    w=(4, 3),
)


def test_an_output_that_is_a_constant_stays():
    proto = file("y = Gemm(x, w)", outputs="float[n,6] y, float[6] c", w=(4, 6), c=(6,))
    new = jaxonnx.load(proto).with_head(5)
    assert [str(v) for v in new.outputs] == ["y: float32[n, 5]", "c: float32[6]"]
    _, c = session(new.to_onnx()).run(None, {"x": np.ones((2, 4), np.float32)})
    np.testing.assert_array_equal(c, numpy_helper.to_array(proto.graph.initializer[1]))


def test_one_of_several():
    model = jaxonnx.load(SEVERAL)
    with pytest.raises(jaxonnx.InputError, match=r"at=NAME.*'y' has node 'y' .*4 -> 6.*'z' has"):
        model.with_head(5)
    assert [str(v) for v in model.with_head(5, at="z").outputs] == [
        "y: float32[n, 6]",
        "z: float32[n, 5]",
        "h: float32[n, 4]",
    ]
    assert [v.name for v in model.with_head(5, at="p", ending=True).outputs] == ["y", "p", "h"]
    both = model.with_head(5, at="y").with_head(4, at="p")
    assert [v.shape[1] for v in both.outputs] == [5, 4, 4]
    assert both.head == ("v", "w")
    assert both.with_outputs("h").head == ()
    again = both.with_head(2, at="p")
    assert [head.classes for head in again.heads] == [5, 2]
    by_layer = jaxonnx.load(FORMS["MatMul, Add, Softmax"][0]).with_head(5, at="m")
    assert by_layer.head == ("w", "b")


FUNCTION = '<domain: "f", opset_import: ["": 17]> linear (x, w) => (y) { y = MatMul(x, w) }'
REFUSED = {
    "a sum": (
        file("a = Gemm(x, v) b = Gemm(x, w) y = Add(a, b)", v=(4, 6), w=(4, 6)),
        r"'y' .Add.* several values.*Before it are 'a' \(Gemm\), 'b' \(Gemm\)",
    ),
    "a function": (
        file("y = f.linear(x, w)", more=FUNCTION, w=(4, 6)),
        r"inline_local_functions",
    ),
    "integers": (
        file(
            "q = QuantizeLinear(x, s, z) m = QLinearMatMul(q, s, z, w, s, z, s, z) "
            "y = DequantizeLinear(m, s, z)",
            w=I8.reshape(4, 6),
            s=np.float32(0.1),
            z=np.int8(0),
        ),
        "computes with integers",
    ),
    "no layer": (file("y = Relu(x)", outputs="float[n,4] y"), "no matrix product or convolution"),
    "a shape that is computed": (
        file(
            "m = MatMul(x, w) s = Shape(x) b = Gather(s, o) t = Concat <axis = 0> (b, k) "
            "y = Reshape(m, t)",
            w=(4, 6),
            o=np.array([0]),
            k=np.array([6]),
        ),
        r"does not follow.*'y' \(Reshape.*with_outputs\('m'\)",
    ),
    "classes that are mixed": (
        file("m = MatMul(x, w) y = Reshape(m, s)", w=(4, 6), s=np.array([-1, 2, 3])),
        r"'y' \(Reshape.*does not keep its 6 outputs apart",
    ),
    "a number for each class": (
        file("m = MatMul(x, w) y = Div(m, d)", w=(4, 6), d=(6,)),
        r"a number for each of its 6 outputs in 'd'",
    ),
    "rounded outputs": (
        file(
            "m = MatMul(x, w) y = QuantizeLinear(m, s, z)",
            outputs="int8[n,6] y",
            w=(4, 6),
            s=np.float32(0.1),
            z=np.int8(0),
        ),
        "rounded to integers",
    ),
    "a recurrent layer": (
        file(
            "r, y = RNN <hidden_size = 6> (x, w, h)",
            "float[s,n,4] x",
            "float[1,n,6] y",
            w=(1, 6, 4),
            h=(1, 6, 6),
        ),
        r"\(RNN",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    proto, message = REFUSED[name]
    model = jaxonnx.load(proto)
    before = model.proto.SerializeToString()
    with pytest.raises(jaxonnx.InputError, match=re.compile(message, re.DOTALL)):
        model.with_head(5)
    assert model.proto.SerializeToString() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "must be the number of classes or their names, got 0"),
        ((True,), "got True"),
        (("cat",), "got 'cat'"),
        ((["a", "b", "a"],), "'a' comes twice"),
        ((5, "hh"), "no value, node or module 'hh'"),
        ((5, "h"), r"'h' is not a last layer.*model.with_outputs\('h'\)"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(jaxonnx.InputError, match=message):
        jaxonnx.load(tiny_networks.mlp()).with_head(*arguments)


def test_weights_are_drawn_by_the_fans():
    model = jaxonnx.load(file("y = Gemm(x, w)", "float[n,900] x", w=(900, 6)))
    w = np.asarray(model.with_head(300).params["w"])
    np.testing.assert_allclose(w.std(), 900**-0.5, rtol=0.02)
    other = model.with_head(300, rng=KEY, initializer=jax.nn.initializers.constant(2.0))
    np.testing.assert_array_equal(other.params["w"], 2)


def test_doubles_stay_doubles():
    w = np.ones((4, 6))
    inputs = {"inputs": "double[n,4] x", "outputs": "double[n,6] y"}
    own = file("y = Gemm(x, w)", **inputs, w=w)
    shared = file("h = Gemm(x, w) y = Gemm(h, w)", "double[n,4] x", "double[n,4] y", w=np.eye(4))
    for proto in (own, shared):
        with pytest.warns(UserWarning, match="64-bit"):
            model = jaxonnx.load(proto)
        (y,) = session(model.with_head(5).to_onnx()).run(None, {"x": np.ones((2, 4))})
        assert (y.dtype, y.shape) == (np.float64, (2, 5))


def test_adapters_and_sparsity():
    model = jaxonnx.load(tiny_networks.mlp())
    with pytest.raises(jaxonnx.InputError, match="merge"):
        jaxonnx.LoRA(2).attach(model, KEY).with_head(5)
    sparse = model.with_sparsity("2:4").with_head(7)
    onnx.checker.check_model(sparse.to_onnx())
    assert "w2" not in [layer.name for layer in sparse.sparsity.layers]


def numbers(result, model):
    """Whether each tensor is bit for bit that of a model."""
    return {
        name: np.array_equal(model.params[name], value)
        for name, value in result.model.params.items()
    }


@pytest.mark.deep
def test_training_with_a_head_alone():
    """Loss and optimizer have defaults, and what is saved is what onnxruntime computes."""
    model = jaxonnx.load(tiny_networks.mlp())
    x, y = tiny_networks.examples(64)
    result = jaxonnx.train(model, (x, y % 3), head=3, batch_size=8, epochs=4, validation=0.25)
    notes = "\n".join(result.history.notes)
    for said in ("3 outputs in place of 4: w2 [16, 3], b2 [3]", "cross entropy", "0.001", "0.0001"):
        assert said in notes
    assert "w2 [16, 3]" in str(result)
    rows = result.history.epochs
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "validation_accuracy" in rows[-1]
    # the head moves by about 0.001 in a step, all else by a tenth of that
    start = jaxonnx.training.step(model, head=3).model.params
    moved = {n: float(np.abs(result.model.params[n] - start[n]).mean()) for n in start}
    assert moved["w2"] > 4 * moved["w1"] > 0
    (expected,) = session(result.model.to_onnx()).run(None, {"x": x})
    np.testing.assert_allclose(result.model(x), expected, rtol=1e-4, atol=1e-6)
    assert result.model.head == ("w2", "b2")


@pytest.mark.deep
def test_a_probe_then_everything():
    model = jaxonnx.load(tiny_networks.mlp()).with_head(3)
    x, y = tiny_networks.examples()
    probe = jaxonnx.train(model, (x, y % 3), trainable=model.head)
    assert {*probe.model.params} == {"w2", "b2"}
    for name in ("w1", "b1"):
        np.testing.assert_array_equal(probe.model.state[name], model.params[name])
    rest = jaxonnx.train(probe.model, (x, y % 3), trainable=[*model.params])
    assert {*rest.model.params} == {*model.params}
    assert not any(numbers(rest, model).values())
    adapted = jaxonnx.train(model, (x, y % 3), lora=jaxonnx.LoRA(2))
    assert {*adapted.lora.layouts} == {"w1"}
    assert numbers(adapted, model)["w2"] is False


@pytest.mark.deep
def test_losses_of_heads():
    several = jaxonnx.load(SEVERAL)
    x, y = tiny_networks.examples()
    data = x[:, :4], {"y": y, "z": y % 2}
    result = jaxonnx.train(several, data, head={"y": 5, "z": ["no", "yes"]})
    assert [head.classes for head in result.model.heads] == [5, 2]
    images = jaxonnx.load(FORMS["SqueezeNet, of an old opset"][0])
    pixels = np.ones((1, 4, 3, 3), np.float32), np.zeros((1, 1, 1), np.int32)
    dense = jaxonnx.train(images, pixels, head=5, optimizer=optax.sgd(0.1))
    np.testing.assert_allclose(dense.history.losses, np.log(5), rtol=0.5)
    for settings, message in (
        ({"head": 1}, "one output: say which loss"),
        ({"head": 5, "loss": "nonsense"}, "nonsense"),
        ({"head": "cat"}, "got 'cat'"),
        ({"head": {"q": 5}}, "'q'"),
    ):
        with pytest.raises(jaxonnx.Error, match=message):
            jaxonnx.train(tiny_networks.mlp(), (x, y), **settings)
    kept = jaxonnx.load(FORMS["MatMul, Add, Softmax"][0]).with_head(5, ending=True)
    with pytest.raises(jaxonnx.TrainingError, match="probabilities: say which loss"):
        jaxonnx.train(kept, (x[:, :4], y))


@pytest.mark.deep
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(tiny_networks.mlp(), "net.onnx")
    x, y = tiny_networks.examples()
    np.savez("data.npz", x=x, y=y % 3)
    Path("names.txt").write_text("a\nb\nc\n")
    run = ["train", "net.onnx", "data.npz", "-o", "out.onnx", "--epochs", "1", "--json"]
    assert main([*run, "--labels", "names.txt"]) == 0
    notes = json.loads(capsys.readouterr().out)["history"]["notes"]
    assert "3 outputs in place of 4" in notes[0]
    assert "0.0001" in notes[-1]
    model = jaxonnx.load("out.onnx")
    assert (model.outputs[0].shape[1], images.preparation(model).labels) == (3, ("a", "b", "c"))
    assert main([*run, "--head", "y=3", "--optimizer", "sgd"]) == 0
    assert not images.preparation(jaxonnx.load("out.onnx")).labels
    with pytest.raises(SystemExit):
        main([*run, "--head", "a,b,c"])
    assert "'a,b,c' is not a number; names go to --labels A,B" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*run, "--head", "4", "--head", "y=3"])
    assert "argument --head: takes N|OUTPUT=N: one for all, or by name" in capsys.readouterr().err
    for flags, message in (
        (["--head", "4", "--labels", "names.txt"], "--head 4, but 'names.txt' has 3 names"),
        (["--head", "z=3"], "no value, node or module 'z'"),
    ):
        assert main([*run, *flags]) == 2
        assert message in capsys.readouterr().err


def test_names_of_classes_without_pictures():
    """They say nothing of pixels, and what a file says of pixels stays."""
    model = jaxonnx.load(tiny_networks.mlp()).with_head(["no", "yes"])
    assert images.preparation(model) == images.Preparation(labels=("no", "yes"))
    assert not images.says_numbers(model)
    known = images.with_preparation(model, images.Preparation(scale=1.0, labels=("no", "yes")))
    other = known.with_head(["a", "b", "c"])
    assert images.preparation(other) == images.Preparation(scale=1.0, labels=("a", "b", "c"))
    assert images.preparation(other.with_head(3)) == images.Preparation(scale=1.0)
