"""What `check` finds in files that were written wrongly, and what it lets pass."""

from pkgutil import resolve_name

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax.extend.core import Primitive

import jaxonnx
from jaxonnx import demo
from jaxonnx._compare import Session, written
from jaxonnx._compare.written import check_written
from jaxonnx.onnx_out import Nodes, primitive

HEAD = '<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 4] y)'
BEFORE = HEAD + " { [first] a = Tanh(x) [second] b = LeakyRelu<alpha = 0.1>(a) y = Neg(b) }"


def check(after, before=BEFORE, **options):
    check_written("the file", *map(onnx.parser.parse_model, (after, before)), **options)


@pytest.fixture(params=[True, False], ids=["onnxruntime", "alone"])
def runtime(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(written, "has_onnxruntime", lambda: False)


@pytest.mark.usefixtures("runtime")
def test_the_first_node_that_differs_is_named():
    check(BEFORE)
    check(HEAD + " { a = Tanh(x) c = LeakyRelu<alpha = 0.1>(a) y = Neg(c) }")
    with pytest.raises(jaxonnx.ModelError, match="'b', of LeakyRelu 'second'"):
        check(BEFORE.replace("0.1", "0.2"))
    with pytest.raises(jaxonnx.ModelError, match=r"something else .* shapes \[2, 4\] and \[4, 2\]"):
        check(HEAD + " { y = Tanh(x) }", HEAD.replace("n, 4] y", "4, n] y") + " {y = Transpose(x)}")


def test_an_invalid_file_is_refused_unless_it_was_invalid_before():
    after = BEFORE.replace("Tanh(x)", "Tanh<slope = 1.0>(x)")
    with pytest.raises(jaxonnx.ModelError, match=r"not valid, says onnx's checker: .*slope"):
        check(after)


def test_what_onnxruntime_refuses_is_refused_unless_it_refused_it_before():
    scale = "<float[3] s = {1, 2, 3}>"
    wrong = f"{HEAD} {scale} {{ a = Tanh(x) b = LayerNormalization<axis = 1>(a, s) y = Neg(b) }}"
    with pytest.raises(jaxonnx.ModelError, match=r"the file: onnxruntime refuses|does not run"):
        check(wrong)
    custom = HEAD.replace("21]", '21, "acme": 1]') + " { y = acme.Tanh(x) }"
    with pytest.raises(jaxonnx.Error, match=r"acme\.Tanh"):  # neither runs it
        check(custom, custom)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_files_in_16_bits_are_compared(kind):
    """Sessions of onnxruntime in Python take and give no arrays of bfloat16."""
    number = onnx.TensorProto.DataType.Value(kind.upper())
    before = f"""{HEAD.replace("float[", f"{kind}[")}
        {{ a = Cast<to = 1>(x) [second] b = Tanh(a) y = Cast<to = {number}>(b) }}"""
    check(before, before)
    with pytest.raises(jaxonnx.ModelError, match="'b', of Sigmoid 'second'"):
        check(before.replace("Tanh", "Sigmoid"), before)
    x = np.linspace(-2, 2, 8).reshape(2, 4).astype(kind)
    (y,) = Session(onnx.parser.parse_model(before).SerializeToString()).run({"x": x})
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, np.tanh(np.float32(x)).astype(kind))
    assert jaxonnx.validate(onnx.parser.parse_model(before), x).ok


def test_functions_in_bfloat16_are_exported():
    w = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)

    def product(x):
        return jnp.asarray(x, jnp.bfloat16) @ jnp.asarray(w, jnp.bfloat16)

    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    wide = lambda x: product(x).astype(jnp.float32)  # noqa: E731
    for function, example in [(product, x), (product, x.astype(jnp.bfloat16)), (wide, x)]:
        model = jaxonnx.to_onnx(function, example)
        (y,) = Session(model.SerializeToString()).run({model.graph.input[0].name: example})
        assert y.dtype == function(example).dtype
        np.testing.assert_allclose(np.float32(y), x @ w, rtol=0.03, atol=0.03)


def test_a_divisor_of_integers_does_not_end_the_process():
    text = """<ir_version: 10, opset_import: ["": 21]> g (int64[n, 64] x) => (int64[n, 64] y)
        { c = Div(x, x) y = Neg(c) }"""
    check(text, text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BEFORE.replace("LeakyRelu<alpha = 0.1>(a)", "RandomNormalLike(a)"), "random numbers"),
        (BEFORE.replace("float[n, 4] x", "float[4, 4, m] x").replace("n, 4] y", "4,4,m] y"), None),
        (BEFORE.replace("float[n, 4] x", "float x1, seq(float[4]) x"), "no random numbers for"),
    ],
)
def test_a_warning_says_what_was_not_compared(text, reason):
    if reason is None:
        check(text, text)
        return
    with pytest.warns(UserWarning, match=reason):
        written.check_written("the file", *[onnx.parser.parse_model(text)] * 2)


@pytest.mark.parametrize("classes", [0, 1])
def test_pictures_have_as_many_patches_as_there_are_positions(classes):
    """The file leaves their sides open: a table of positions tells them."""
    head = HEAD.replace("[n, 4] x", "[n, 3, h, w] x").replace("4] y", "m, 4] y")
    text = f"""{head} <int64[3] s = {{0, 4, -1}}> {{
        c = Conv<strides = [8, 8]>(x, k) r = Reshape(c, s) t = Transpose<perm = [0, 2, 1]>(r)
        a = Add({"e" if classes else "t"}, p) y = Tanh(a) }}"""
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    tensors = {"k": (4, 3, 8, 8), "p": (1, 9 + classes, 4)}
    for name, shape in tensors.items():
        tensor = random.normal(0, 0.1, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(tensor, name))
    if classes:
        pads = np.array([0, 1, 0, 0, 0, 0])
        proto.graph.initializer.append(onnx.numpy_helper.from_array(pads, "pads"))
        proto.graph.node.insert(3, onnx.helper.make_node("Pad", ["t", "pads"], ["e"]))
    check_written("the file", proto, proto)
    wrong = onnx.ModelProto()
    wrong.CopyFrom(proto)
    wrong.graph.node[-1].op_type = "Atan"
    with pytest.raises(jaxonnx.ModelError, match="'y', of Atan"):
        check_written("the file", wrong, proto)
    assert jaxonnx.validate(proto).ok


def test_large_files_are_left_out(monkeypatch):
    monkeypatch.setattr(written, "_LARGEST", 1000)
    with pytest.warns(UserWarning, match=r"KiB of weights.* check=False"):
        jaxonnx.convert(demo.model(), opset=21)
    jaxonnx.convert(demo.model(), opset=21, check=False)


def replace_operator(monkeypatch, before, after):
    """Let the writer of JAX functions write another operator."""
    several = Nodes.several

    def write(self, operator, *rest, **attributes):
        return several(self, after if operator == before else operator, *rest, **attributes)

    monkeypatch.setattr(Nodes, "several", write)


def wave(a):
    return jax.nn.relu(jax.jit(jnp.sin)(a + 1) * 3)


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(
    "example",
    [
        np.arange(3, dtype=np.float32),
        (3,),
        ("n", ()),
        ("2*n, m^2 + 1", ()),
        ("n, m, k", ("n == 2*m", "mod(m, 8) == 0", "mod(1, m) == 1", "k <= 3", "k + m >= 9")),
    ],
    ids=str,
)
def test_an_exported_function_is_compared_with_the_function(example, monkeypatch):
    if isinstance(example, tuple):
        if isinstance(example[0], str):
            example = jax.export.symbolic_shape(example[0], constraints=example[1])
        example = jax.ShapeDtypeStruct(example, np.float32)
    jaxonnx.to_onnx(wave, example)
    replace_operator(monkeypatch, "Sin", "Cos")
    with pytest.raises(jaxonnx.ModelError, match=r"exported function .* 'cos', of Cos '': "):
        jaxonnx.to_onnx(wave, example)
    jaxonnx.to_onnx(wave, example, check=False)


def test_functions_of_odd_arguments_are_compared():
    """Keys, labels, numbers, and a function of no numbers below zero."""

    def function(key, labels, count, a):
        noise = jax.random.normal(key, a.shape)
        return jnp.argmax(jnp.log(a) + noise, -1) == labels, a * count

    a = jax.ShapeDtypeStruct((4, 5), np.float32)
    jaxonnx.to_onnx(function, jax.random.key(3), np.zeros(4, np.int32), 3, a)
    size = jax.export.symbolic_shape("n, 2*n", constraints=["n >= 1000"])
    with pytest.warns(
        UserWarning, match=r"no sizes up to 256 were found .*constraints .* n, 2\*n.*check=False"
    ):
        jaxonnx.to_onnx(jnp.sin, jax.ShapeDtypeStruct(size, np.float32))


def test_a_function_that_does_not_take_all_sizes():
    """JAX traces it for any size n, and the file runs for those that 4 divides."""
    shape = jax.export.symbolic_shape("m, n")
    with pytest.warns(UserWarning, match=r"not take the shapes \[\(4, 5\)\]: .*multiples '4\*h'"):
        jaxonnx.to_onnx(
            lambda a: a.reshape(a.shape[0], a.shape[1] // 4, 4),
            jax.ShapeDtypeStruct(shape, np.float32),
        )


@pytest.mark.parametrize("known", [True, False])
def test_a_primitive_that_xla_does_not_know(known):
    twice = Primitive("example_twice")
    twice.def_abstract_eval(lambda a: a)
    if known:
        twice.def_impl(lambda a: 2 * a)
    primitive("example_twice")(lambda g, a, **_: g("Add", a, a))
    if known:
        jaxonnx.to_onnx(twice.bind, np.arange(3.0))
        return
    with pytest.warns(UserWarning, match="JAX does not evaluate the function: .*example_twice"):
        jaxonnx.to_onnx(twice.bind, np.arange(3.0))


def test_a_difference_that_rounding_explains_is_none():
    """Of numbers that nearly cancel, onnxruntime's sum rounds otherwise."""
    a = np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)
    jaxonnx.to_onnx(lambda a: jnp.square((a @ a.T).sum(0) * 1e3).sum() % 1, a)


@pytest.mark.usefixtures("runtime")
def test_a_continued_file_is_compared_with_both_networks(monkeypatch):
    model = jaxonnx.load(onnx.parser.parse_model(BEFORE))
    weights = np.arange(8, dtype=np.float32).reshape(4, 2)
    model.then(lambda y: wave(y @ weights))
    replace_operator(monkeypatch, "Sin", "Cos")
    with pytest.raises(jaxonnx.ModelError, match=r"both networks .* 'cos', of Cos '': "):
        model.then(lambda y: wave(y @ weights))
    model.then(lambda y: wave(y @ weights), check=False)


def test_a_file_is_continued_whatever_is_wrong_with_itself():
    """An output without a shape, which onnx's checker refuses, and onnxruntime does not."""
    text = BEFORE.replace("float[n, 4] y)", "float[n, 4] y, float[n, 4] b)")
    proto = onnx.parser.parse_model(text)
    proto.graph.output[1].type.tensor_type.ClearField("shape")
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(proto)
    jaxonnx.load(proto).with_outputs(["b", "y"]).then(lambda b, y: b + y)


def test_an_exported_step_is_compared_with_the_step(tmp_path, monkeypatch):
    x, y = demo.digits()[0]
    batch = x[:4], y[:4]
    options = {"loss": "softmax_cross_entropy_with_integer_labels", "optimizer": "adam"}
    replace_operator(monkeypatch, "Exp", "Sigmoid")
    with pytest.raises(jaxonnx.ModelError, match=r"step\.onnx computes .*, of Sigmoid '': "):
        jaxonnx.export_step(demo.mlp(), tmp_path, batch, **options)
    assert not [*tmp_path.iterdir()]
    zeros = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in batch]
    with pytest.raises(jaxonnx.ModelError, match=r"step\.onnx computes .*, of Sigmoid '': "):
        jaxonnx.export_step(demo.mlp(), tmp_path, tuple(zeros), **options)


def test_an_exported_evaluation_is_compared(tmp_path, monkeypatch):
    x, y = demo.digits()[0]
    options = {"loss": "softmax_cross_entropy_with_integer_labels", "metrics": "accuracy"}
    jaxonnx.export_step(demo.model(), tmp_path, (x[:4], y[:4]), **options)
    replace_operator(monkeypatch, "ArgMax", "ArgMin")
    with pytest.raises(jaxonnx.ModelError, match=r"evaluate\.onnx computes .*, of "):
        jaxonnx.export_step(demo.model(), tmp_path, (x[:4], y[:4]), **options)


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(
    ("name", "runtime"),
    [
        ("init", True),
        ("weights", False),
        *(pytest.param(*c, marks=pytest.mark.deep) for c in (("init", False), ("weights", True))),
    ],
    indirect=["runtime"],
)
def test_exported_states_and_weights_are_compared(name, tmp_path, monkeypatch):
    """Factors of adapters begin as zeros, which would hide a wrong sum."""
    x, y = demo.digits()[0]
    batch = x[:4], y[:4]
    options = {"loss": "softmax_cross_entropy_with_integer_labels", "lora": jaxonnx.LoRA(2)}
    jaxonnx.export_step(demo.mlp(), tmp_path / "right", batch, **options)
    exporter = resolve_name("jaxonnx._step_files.export:_Exporter")
    write = getattr(exporter, name)

    def write_wrongly(self):
        proto, told = write(self)
        for node in proto.graph.node:
            if node.op_type == "Add":
                node.op_type = "Sub"
        if name == "init":
            tensor = max(proto.graph.initializer, key=lambda tensor: len(tensor.raw_data))
            twice = 2 * onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(twice, tensor.name))
        return proto, told

    monkeypatch.setattr(exporter, name, write_wrongly)
    with pytest.raises(jaxonnx.ModelError, match=rf"{name}\.onnx computes something else"):
        jaxonnx.export_step(demo.mlp(), tmp_path / "wrong", batch, **options)
    assert not (tmp_path / "wrong").exists()
    jaxonnx.export_step(demo.mlp(), tmp_path / "wrong", batch, **options, check=False)


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("form", [None, "merged", "nodes", "inputs"])
def test_saved_adapters_are_compared(form, tmp_path, monkeypatch):
    text = (
        HEAD.replace("4] y)", "3] y)")
        + """
        <float[4, 4] v = {1, 2, 3, 4, 4, 3, 2, 1, 0, 1, 0, 1, 1, 1, 0, 2},
         float[4, 3] w = {1, 2, 3, 4, 3, 2, 1, 0, -1, 1, 1, 0}> {
            a = MatMul(x, v) b = Tanh(a) y = MatMul(b, w) }"""
    )
    model = jaxonnx.load(onnx.parser.parse_model(text))
    adapted = jaxonnx.LoRA(1).attach(model, jax.random.key(0))
    random = np.random.default_rng(0)
    params = {n: random.normal(size=x.shape).astype(x.dtype) for n, x in adapted.params.items()}
    adapted = adapted.replace(params=params)
    adapted.save(tmp_path / "right.onnx", adapters=form)
    write = resolve_name("jaxonnx.model._save:to_onnx")

    def write_wrongly(*args, **options):
        proto = write(*args, **options)
        (node,) = (node for node in proto.graph.node if node.op_type == "Tanh")
        node.op_type = "Atan"
        return proto

    monkeypatch.setattr("jaxonnx.model._save.to_onnx", write_wrongly)
    with pytest.raises(jaxonnx.ModelError, match=r"the file to be saved computes .* 'b', of Atan"):
        adapted.save(tmp_path / "wrong.onnx", adapters=form)
    assert not (tmp_path / "wrong.onnx").exists()
    adapted.save(tmp_path / "wrong.onnx", adapters=form, check=False)


@pytest.fixture
def wrong_pools(monkeypatch):
    """onnxruntime's default session computes another network than the one that was quantized."""
    session = Session

    class Wrong(session):
        def __init__(self, file, **options):
            proto = onnx.ModelProto.FromString(file)
            for node in proto.graph.node:
                if node.op_type == "MaxPool":
                    node.op_type = "AveragePool"
                    windows = [a for a in node.attribute if a.name in ("kernel_shape", "strides")]
                    del node.attribute[:]
                    node.attribute.extend(windows)
            super().__init__(proto.SerializeToString(), **options)

    monkeypatch.setattr(written, "Session", Wrong)
    monkeypatch.setattr("jaxonnx._compare.Session", Wrong)


DIFFERENCE = "the quantized file .* from QuantizeLinear '.*' on, integers differ by more than 1"


@pytest.mark.usefixtures("wrong_pools")
def test_a_file_that_is_quantized_otherwise_is_refused():
    x = demo.digits()[0][0][:32]
    jaxonnx.quantize(demo.model(), x, check=False)
    with pytest.raises(jaxonnx.ModelError, match=DIFFERENCE):
        jaxonnx.quantize(demo.model(), x)


@pytest.mark.deep
@pytest.mark.usefixtures("wrong_pools")
def test_a_trained_file_that_is_quantized_otherwise_is_told():
    x, y = demo.digits()[0]
    data = x[:32], y[:32]
    options = {"loss": "softmax_cross_entropy_with_integer_labels", "quantize": "int8"}
    with pytest.warns(UserWarning, match=f"{DIFFERENCE}.*returned all the same"):
        result = jaxonnx.train(demo.model(), data, **options, batch_size=32)
    assert "integers differ by more than 1" in result.history.notes[-1]
    result = jaxonnx.train(demo.model(), data, **options, batch_size=32, check=False)
    assert not any("differ" in note for note in result.history.notes)


SHRUNK = """<ir_version: 8, opset_import: ["": 10]>
    g (float[n, 2, 6, 6] x) => (float[n, 4, 2, 2] y)
    <float[4] s = {1, 1, 0.33333334, 0.4}, float[4, 2, 1, 1] w = {1, 2, -1, 3, 0, 1, 2, 2}> {
        [down] a = Resize<mode = "nearest">(x, s)
        y = Conv(a, w) }"""


@pytest.fixture
def plain_converter(monkeypatch):
    """ONNX's converter, which leaves out where opset 10 reads, without what is written for it."""
    monkeypatch.delitem(resolve_name("jaxonnx._rewrite.opset:_CHANGES"), "Resize")


@pytest.mark.usefixtures("plain_converter")
def test_a_scheme_does_not_change_the_network_by_its_opset():
    proto = onnx.parser.parse_model(SHRUNK)
    x = np.random.default_rng(0).normal(size=(8, 2, 6, 6)).astype(np.float32)
    y = np.asarray(jaxonnx.load(proto)(x))
    with pytest.raises(jaxonnx.ModelError, match=r"the file in opset 13 .* 'a', of Resize"):
        jaxonnx.quantize(proto, x)
    with pytest.raises(jaxonnx.ModelError, match=r"the file in opset 13 .* 'a', of Resize"):
        jaxonnx.train(proto, (x, y), loss="squared_error", epochs=1, quantize="int8")
    assert not np.allclose(jaxonnx.quantize(proto, x, check=False)(x), y, atol=0.5)


def test_quantized_files_are_those_of_their_networks():
    """8-bit floats are compared by their rank; onnxruntime has operators in ONNX's domain."""
    x = demo.digits()[0][0][:32]
    fp8 = jaxonnx.Quantization(weights="fp8", activations="fp8", dialect="tensorrt")
    jaxonnx.quantize(demo.model(), x, fp8)
    own = (
        HEAD
        + """ <float[4] s = {1, 2, 3, 4}, float[4, 2] w = {1, 2, 3, 4, 1, 2, 3, 4}> {
        a = SimplifiedLayerNormalization<axis = -1>(x, s) y = MatMul(a, w) }"""
    )
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    proto = onnx.parser.parse_model(own.replace("4] y", "2] y"))
    proto.graph.output[0].type.tensor_type.ClearField("shape")  # which onnx's checker refuses
    jaxonnx.quantize(proto, x)


@pytest.mark.usefixtures("plain_converter")
def test_an_opset_that_cannot_be_raised_without_a_difference_is_refused():
    proto = onnx.parser.parse_model(SHRUNK)
    with pytest.raises(jaxonnx.ModelError, match=r"the file in opset 11 .* 'a', of Resize 'down'"):
        jaxonnx.convert(proto, opset=11)
    x = np.random.default_rng(0).normal(size=(1, 2, 6, 6)).astype(np.float32)
    newer = jaxonnx.convert(proto, opset=11, check=False)
    assert not np.allclose(newer(x), jaxonnx.load(proto)(x))
