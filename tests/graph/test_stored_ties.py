"""An output layer that is the embedding, stored a second time, is one weight with it."""

import jax
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx

LOSS = "softmax_cross_entropy_with_integer_labels"


def file(transposed=True, product="MatMul", **changes):
    """A bag of words: rows of a table, a layer, and the table as the output layer."""
    random = np.random.default_rng(0)
    table = random.normal(size=(12, 8)).astype(np.float32)
    tensors = {
        "first": random.normal(size=(8, 8)).astype(np.float32),
        "onnx::MatMul_9": np.ascontiguousarray(table.T) if transposed else table,
        "words.weight": table,
        "bias": random.normal(size=(12,)).astype(np.float32),
    } | changes
    last = "MatMul(h, head) y = Add(z, bias)"
    if product == "Gemm":
        last = f"Gemm<transB = {int(not transposed)}>(h, head, bias) y = Identity(z)"
    proto = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 17]> g (int64[n] x) => (float[n, 12] y) {{
      e = Gather(words, x) m = MatMul(e, first) h = Relu(m) z = {last}
    }}""")
    for node in proto.graph.node:
        names = {"words": "words.weight", "head": "onnx::MatMul_9"}
        node.input[:] = [names.get(name, name) for name in node.input]
    for name, value in tensors.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


def arrays(proto):
    return {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}


def train(model, **settings):
    x = np.arange(12)
    optimizer = settings.pop("optimizer", optax.adam(0.01))
    return jaxonnx.train(
        model, (x, x[::-1].copy()), loss=LOSS, optimizer=optimizer, batch_size=12, **settings
    ).model


CASES = [(True, "MatMul"), (True, "Gemm"), (False, "Gemm")]


@pytest.mark.parametrize(("transposed", "product"), CASES)
def test_they_are_trained_as_one_and_written_to_both_places(transposed, product, tmp_path):
    proto = file(transposed, product)
    before = proto.SerializeToString()
    model = jaxonnx.load(proto)
    assert {*model.params} == {"first", "words.weight", "bias"}
    assert "'words.weight' and 'onnx::MatMul_9' are one weight" in " ".join(str(model).split())
    assert model.to_onnx().SerializeToString() == before == proto.SerializeToString()
    x = np.arange(12)

    def loss(words, head):  # of the two places, which add up
        h = jax.nn.relu(words[x] @ model.params["first"])
        y = h @ head.T + model.params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(y, x[::-1]).mean()

    words = model.params["words.weight"]
    expected = words - 0.1 * sum(jax.jit(jax.grad(loss, (0, 1)))(words, words))
    trained = train(model, optimizer=optax.sgd(0.1))
    np.testing.assert_allclose(trained.params["words.weight"], expected, rtol=1e-5, atol=1e-6)
    trained.save(tmp_path / "out.onnx")
    written = arrays(onnx.load(tmp_path / "out.onnx"))
    assert [*written] == [*arrays(proto)]
    head = written["onnx::MatMul_9"].T if transposed else written["onnx::MatMul_9"]
    np.testing.assert_array_equal(head, written["words.weight"])
    (found,) = onnxruntime.InferenceSession(tmp_path / "out.onnx").run(None, {"x": x})
    np.testing.assert_allclose(trained(x), found, rtol=1e-5, atol=1e-6)


def test_tied_and_trainable_decide():
    proto = file()
    assert len(jaxonnx.load(proto, tied=[]).params) == 4
    assert len(jaxonnx.load(proto, tied="onnx::.*").params) == 3
    assert {*jaxonnx.load(proto, trainable="onnx::MatMul_9").params} == {"words.weight"}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "words.weight": np.zeros((12, 8), np.float32),
            "onnx::MatMul_9": np.zeros((8, 12), np.float32),
        },
        {"onnx::MatMul_9": np.ones((8, 12), np.float32)},
    ],
)
def test_tensors_that_are_equal_by_coincidence_or_not_at_all_are_apart(changes):
    assert len(jaxonnx.load(file(**changes)).params) == 4


def test_weights_checkpoints_adapters_and_other_outputs(tmp_path):
    model = jaxonnx.load(file())
    trained = train(model, checkpoint_dir=tmp_path / "run")
    for way in (
        jaxonnx.load(tmp_path / "run"),
        jaxonnx.load(file(), weights=dict(trained.params)),
        jaxonnx.load(trained.to_onnx()),
    ):
        assert {*way.params} == {"first", "words.weight", "bias"}
        np.testing.assert_array_equal(way.params["words.weight"], trained.params["words.weight"])
    adapted = train(model, lora=jaxonnx.LoRA(rank=2))
    adapted(np.arange(12))
    written = arrays(adapted.to_onnx())
    np.testing.assert_array_equal(written["onnx::MatMul_9"].T, written["words.weight"])
    hidden = model.with_outputs(["h"])
    assert hidden(np.arange(3)).shape == (3, 8)
    hidden.to_onnx()
    jaxonnx.load(model.with_head(3).to_onnx())(np.arange(3))


def autoencoder(kinds, other=None):
    """Two layers of which the second has the matrix of the first, transposed, or another."""
    weight = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    first, second = (
        f"Gemm<transB = 1>({x}, {w})" if kind == "Gemm" else f"MatMul({x}, {w})"
        for kind, x, w in zip(kinds, "xh", ("l.weight", "val_9"), strict=True)
    )
    proto = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 17]> g (float[n, 8] x) => (float[n, 8] y) {{
      z = {first.replace("l.weight", "w")} h = Relu(z) y = {second}
    }}""")
    proto.graph.node[0].input[1] = "l.weight"
    back = weight if other is None else other
    for name, value, kind in zip(("l.weight", "val_9"), (weight, back.T), kinds, strict=True):
        value = np.ascontiguousarray(value if kind == "Gemm" else value.T)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


@pytest.mark.parametrize("kinds", [("MatMul", "MatMul"), ("Gemm", "Gemm"), ("Gemm", "MatMul")])
def test_the_transposed_matrix_of_another_layer_is_one_weight_with_it(kinds):
    proto = autoencoder(kinds)
    model = jaxonnx.load(proto)
    assert {*model.params} == {"l.weight"}
    assert model.to_onnx().SerializeToString() == proto.SerializeToString()
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    gradient = jax.grad(lambda params: (model.apply(params, x) ** 2).sum())(model.params)
    weight = arrays(proto)["l.weight"]
    weight = weight if kinds[0] == "Gemm" else weight.T

    def loss(w):
        return ((jax.nn.relu(x @ w.T) @ w) ** 2).sum()

    expected = jax.grad(loss)(weight)
    expected = expected if kinds[0] == "Gemm" else expected.T
    np.testing.assert_allclose(gradient["l.weight"], expected, rtol=1e-4, atol=1e-4)


def test_the_matrix_of_a_copy_is_a_weight_of_its_own():
    square = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    proto = autoencoder(("MatMul", "MatMul"), square)
    proto.graph.initializer[0].CopyFrom(proto.graph.initializer[1])
    proto.graph.initializer[0].name = "l.weight"
    assert len(jaxonnx.load(proto).params) == 2


def called_twice(*scopes):
    """A linear layer of one module or two, whose transposed weight PyTorch stores for each call."""
    weight = np.random.default_rng(0).normal(size=(40, 40)).astype(np.float32)
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]> g (float[n, 40] x) => (float[n, 40] y) {
      a = MatMul(x, val_3) h = Relu(a) y = MatMul(h, val_9)
    }""")
    for name in ("val_3", "val_9"):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    for node, scope in zip((proto.graph.node[0], proto.graph.node[2]), scopes, strict=True):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", scope, "linear"]))
    return proto


def test_a_module_that_is_called_twice_has_one_weight():
    proto = called_twice("layer", "layer")
    model = jaxonnx.load(proto)
    assert {*model.params} == {"val_3"}
    assert model.to_onnx().SerializeToString() == proto.SerializeToString()
    weight, x = model.params["val_3"], np.ones((2, 40), np.float32)
    gradient = jax.grad(lambda params: model.apply(params, x).sum())(model.params)["val_3"]
    apart = jax.grad(lambda a, b: (jax.nn.relu(x @ a) @ b).sum(), (0, 1))(weight, weight)
    np.testing.assert_allclose(gradient, sum(apart), rtol=1e-4, atol=1e-4)
    assert len(jaxonnx.load(proto, tied=[]).params) == 2


def test_modules_that_are_copies_have_their_own_weights():
    assert len(jaxonnx.load(called_twice("layers.0", "layers.1")).params) == 2


ONE_WEIGHT = "ignore:.*the embedding and the output layer are one weight"


@pytest.mark.filterwarnings(ONE_WEIGHT)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("transposed", "product"), CASES)
def test_adapters_reach_both_places_in_every_form(transposed, product, dora, tmp_path):
    """Onnxruntime against NumPy, with the changed table in both places."""
    proto, draw, x = file(transposed, product), np.random.default_rng(1).normal, np.arange(12)
    model = jaxonnx.load(proto)
    lora = jaxonnx.LoRA(rank=2, where="words.weight", dora=dora)
    adapted = lora.attach(model, jax.random.key(0))
    params = {n: draw(size=v.shape).astype(np.float32) for n, v in adapted.params.items()}
    adapted = adapted.replace(params=params)
    a, b, *norms = params.values()
    words = np.asarray(model.params["words.weight"], np.float64) + (b @ a).T
    words *= norms[0] / np.linalg.norm(words, axis=0) if dora else 1
    expected = np.maximum(words @ model.params["first"], 0) @ words.T + model.params["bias"]
    np.testing.assert_allclose(adapted(x), expected, rtol=1e-3, atol=1e-4)
    path = tmp_path / "out.onnx"
    for form in ("merged", "nodes") if dora else ("merged", "nodes", "inputs"):
        adapted.save(path, adapters=form)
        more = jaxonnx.Adapters.of(adapted).to_inputs() if form == "inputs" else {}
        (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x, **more})
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(jaxonnx.load(path)(x, **more), expected, rtol=1e-3, atol=1e-4)
    again = jaxonnx.load(path).to_onnx()  # the nodes stay nodes
    assert again.SerializeToString() == onnx.load(path).SerializeToString()


def test_an_adapter_of_both_places_is_announced():
    """As PEFT does for `tie_word_embeddings`; no other adapter is."""
    lora, key = jaxonnx.LoRA(rank=2, where="words.weight"), jax.random.key(0)
    with pytest.warns(UserWarning, match=r"'words.weight': the embedding and .* tied=\[\]"):
        adapted = lora.attach(jaxonnx.load(file()), key)
    with pytest.warns(UserWarning, match="changes both"):
        jaxonnx.Adapters.of(adapted).attach(jaxonnx.load(file()))
    apart = jaxonnx.load(file(), tied=[])
    lora.attach(apart, key)
    jaxonnx.LoRA(rank=2, where="onnx::MatMul_9").attach(apart, key)
    jaxonnx.LoRA(rank=2, where="first").attach(jaxonnx.load(file()), key)


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_the_matrix_of_a_spectral_norm_follows_its_kernel(operator):
    """PyTorch's older exporter folds the Reshape before the norm, and stores the kernel twice."""
    random = np.random.default_rng(0)
    kernel = random.normal(size=(4, 2, 3)).astype(np.float32)
    turned = operator == "ConvTranspose"  # its outputs are along the second axis
    matrix = np.ascontiguousarray(kernel.swapaxes(0, 1) if turned else kernel)
    matrix = matrix.reshape(len(matrix), -1)
    u, _, v = np.linalg.svd(matrix)
    proto = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 17]> g (float[n, c, 5] x) => (float[n, d, m] y) {{
      rows = MatMul(matrix, v) norm = MatMul(u, rows) w = Div(kernel, norm) y = {operator}(x, w)
    }}""")
    tensors = {"kernel": kernel, "matrix": matrix, "u": u[:, 0], "v": v[0]}
    for name, value in tensors.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    model = jaxonnx.load(proto)
    assert [*model.params] == ["kernel"]
    assert "(Transpose)" not in str(model)
    assert model.to_onnx() == proto
    changed = model.replace(params={"kernel": 3 * model.params["kernel"]})
    x = random.normal(size=(2, kernel.shape[not turned], 5)).astype(np.float32)
    np.testing.assert_allclose(changed(x), model(x), rtol=1e-5)  # the norm divides the factor out
    saved = changed.to_onnx()
    np.testing.assert_array_equal(arrays(saved)["matrix"], 3 * matrix)
    session = onnxruntime.InferenceSession(saved.SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": x})[0], model(x), rtol=1e-5)
    loaded = jaxonnx.load(proto, weights={"kernel": 3 * kernel})
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-5)
