"""LoRA: layouts of weights, adapters as parameters, merging, files, training."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import onnxruntime
import optax
import pytest
from jax.sharding import AxisType

import jaxonnx
from tests.support.lora_networks import (
    FORMS,
    HEAD,
    LABELS,
    X,
    Y,
    mlp,
    normal,
    parse,
    train,
)
from tests.support.paths import DATA


def changed(model, lora):
    """The model with adapters attached, B no longer zero."""
    adapted = lora.attach(model, jax.random.key(0))
    params = {n: jnp.asarray(normal(*v.shape)) for n, v in adapted.params.items()}
    return adapted.replace(params=params)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:the file .* was not compared:UserWarning")  # left
@pytest.mark.parametrize("form", FORMS)
def test_adapters_add_what_a_layer_of_pytorch_adds(form, tmp_path):
    nodes, shape, size, expected = FORMS[form]
    rank, alpha = 3, 6.0
    w = normal(*shape)
    x = np.arange(4, dtype=np.float32) if form == "Gather" else normal(*size)
    dims = ",".join("d" + str(i) if i == 0 else str(d) for i, d in enumerate(size))
    model = jaxonnx.load(parse(f"g (float[{dims}] x) => (float[?] y) {{ {nodes} }}", w=w))
    (name,) = model.params
    lora = jaxonnx.LoRA(rank, alpha=alpha, where=name)
    start = lora.attach(model, jax.random.key(0))
    assert {*start.params} == {f"{name}.lora_A", f"{name}.lora_B"}
    np.testing.assert_array_equal(start(x), model(x))  # B is zero
    adapted = changed(model, lora)
    a, b = (np.asarray(v) for v in adapted.params.values())
    found = adapted.apply(adapted.params, x, state=adapted.state) - model(x)
    np.testing.assert_allclose(found, alpha / rank * expected(x, a, b), rtol=1e-4, atol=1e-4)

    merged = adapted.merge_adapters()
    assert {*merged.params} == {name}
    np.testing.assert_allclose(merged(x), adapted(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(model.params[name], w)  # the base stays
    adapted.save(tmp_path / "merged.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "merged.onnx", providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(session.run(None, {"x": x})[0], adapted(x), rtol=1e-4, atol=1e-4)


def walk(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves([*eqn.params.values()]):
            yield from walk(getattr(inner, "jaxpr", inner)) if hasattr(inner, "eqns") else ()


@pytest.mark.deep
@pytest.mark.parametrize("form", ["MatMul", "MatMul, batch", "Gemm, alpha", "MatMul, left"])
@pytest.mark.parametrize("on_mesh", [False, True])
def test_no_gradient_of_a_whole_matrix(form, on_mesh):
    """With few rows (MatMul) two small products, with many (batch) a merged weight: both exact."""
    nodes, shape, size, _ = FORMS[form]
    dims = ",".join(map(str, size))
    model = jaxonnx.load(
        parse(f"g (float[{dims}] x) => (float[?] y) {{ {nodes} }}", w=normal(*shape))
    )
    adapted, x = changed(model, jaxonnx.LoRA(1, alpha=1.5, where=".*")), normal(*size)
    direction = jax.tree.map(lambda v: normal(*v.shape), adapted.params)

    def loss(params):
        return (adapted.apply(params, x) ** 3).sum()

    def merged_loss(params):
        change = 1.5 * params["w.lora_B"] @ params["w.lora_A"]
        change = change if change.shape == shape else change.T
        return (model.apply({"w": model.params["w"] + change}, x) ** 3).sum()

    def derivatives(loss):
        slope = lambda params: jax.jvp(loss, (params,), (direction,))[1]  # noqa: E731
        both = lambda p: (jax.value_and_grad(loss)(p), jax.value_and_grad(slope)(p))  # noqa: E731
        return jax.jit(both)(adapted.params)

    def dense_gradients(loss):
        """Count products that sum over rows into a whole matrix; the change itself has rank 1."""
        program = jax.make_jaxpr(jax.grad(loss))(adapted.params)
        return sum(
            eqn.primitive.name == "dot_general"
            and sorted(eqn.outvars[0].aval.shape) == [5, 6]
            and eqn.invars[0].aval.shape[eqn.params["dimension_numbers"][0][0][0]] > 1
            for eqn in walk(program.jaxpr)
        )

    merged = derivatives(merged_loss)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh) if on_mesh else nullcontext():
        apart = derivatives(loss)
        assert dense_gradients(loss) == (form == "MatMul, left")
    assert dense_gradients(merged_loss) == 1
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(merged), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def test_what_is_adapted():
    model = mlp()
    key = jax.random.key(0)

    def adapted(**options):
        params = jaxonnx.LoRA(**options).attach(model, key).params
        return {name.removesuffix(".lora_A") for name in params if name.endswith("A")}

    assert adapted(rank=2) == {"w1", "w2"}
    assert adapted(rank=4) == {"w1"}  # of w2 the adapter would be larger than the weight
    assert adapted(rank=4, where="w.*") == {"w1", "w2"}
    assert adapted(rank=4, where=lambda name, value: value.shape[0] == 4) == {"w2"}
    beside = jaxonnx.LoRA(2).attach(model, key, trainable=["w2", "b2"])
    assert {*beside.params} == {"w1.lora_A", "w1.lora_B", "w2", "b2"}
    assert {*beside.state} == {"w1", "b1"}
    assert {*beside.merge_adapters().params} == {"w1", "w2", "b1", "b2"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0}, ["rank must be a positive integer", "0"]),
        ({"rank": 2.0}, ["rank", "2.0"]),
        ({"alpha": -1}, ["alpha", "-1"]),
        ({"rank": 16}, ["no weight is larger than its adapter of rank 16"]),
        ({"rank": 5, "where": "w2"}, ["rank=5", "'w2'", "[4, 16]", "at most 4"]),
        ({"where": "b1"}, ["where='b1'", "no weight that can be adapted", "w1, w2"]),
        ({"where": "*"}, ["matches no weight that can be adapted"]),
    ],
)
def test_settings_that_do_not_fit(settings, words):
    with pytest.raises(jaxonnx.InputError) as caught:
        jaxonnx.LoRA(**settings).attach(mlp(), jax.random.key(0))
    for word in words:
        assert word in str(caught.value)


def test_a_model_with_adapters_keeps_them():
    model = mlp()
    adapted = jaxonnx.LoRA(2).attach(model, jax.random.key(0))
    for change in (
        lambda: adapted.with_trainable("w1"),
        lambda: adapted.with_outputs("h"),
        lambda: jaxonnx.LoRA(2).attach(adapted, jax.random.key(0)),
    ):
        with pytest.raises(jaxonnx.InputError, match=r"merge_adapters\(\)"):
            change()
    with pytest.raises(jaxonnx.InputError, match="no adapters"):
        jaxonnx.Adapters.of(model)
    assert model.merge_adapters() is model


def test_the_weights_are_arguments_of_the_compiled_step():
    model = jaxonnx.load(
        parse("g (float[n,64] x) => (float[n,64] y) { y = MatMul(x, w) }", w=normal(64, 64))
    )
    adapted = jaxonnx.LoRA(2).attach(model, jax.random.key(0))
    step = jax.jit(lambda p, s, x: adapted.apply_train(p, s, None, x))
    text = step.lower(adapted.params, adapted.state, jnp.ones((2, 64))).as_text()
    assert max(len(line) for line in text.splitlines() if "constant" in line) < 2000


def test_half_precision_weights_have_adapters_in_float32():
    proto = onnx.parser.parse_model(
        HEAD + "g (float16[n,6] x) => (float16[n,5] y) { y = MatMul(x, w) }"
    )
    w = onnx.numpy_helper.from_array(normal(6, 5).astype(np.float16), "w")
    proto.graph.initializer.append(w)
    adapted = changed(jaxonnx.load(proto), jaxonnx.LoRA(1))
    assert {v.dtype for v in adapted.params.values()} == {np.dtype(np.float32)}
    assert adapted.merge_adapters().params["w"].dtype == np.float16
    assert adapted(normal(2, 6).astype(np.float16)).dtype == np.float16


@pytest.mark.deep
def test_the_file_of_adapters(tmp_path):
    path = tmp_path / "adapters.npz"
    model = jaxonnx.load(DATA / "lenet_bn.legacy.onnx")
    x = np.load(DATA / "lenet_bn.legacy.npz")["x"]
    lora = jaxonnx.LoRA(2, alpha=4, where="classifier.[02].weight")
    adapted = lora.attach(model, jax.random.key(1), trainable="classifier.4.*")
    params = {n: v + 0.1 for n, v in adapted.params.items()}
    state = {n: v + 0.1 if "running" in n else v for n, v in adapted.state.items()}
    adapted = adapted.replace(params=params, state=state)
    jaxonnx.Adapters.of(adapted).save(path)
    weights = sum(v.nbytes for v in model.params.values())
    assert path.stat().st_size < weights / 4

    adapters = jaxonnx.Adapters.load(path)
    assert (adapters.rank, adapters.alpha) == (2, 4)
    applied = adapters.apply(model)
    np.testing.assert_array_equal(applied(x), adapted.merge_adapters()(x))
    assert {*applied.params} == {*model.params}
    for name, value in adapters.attach(model).params.items():
        np.testing.assert_array_equal(value, params[name])

    with pytest.raises(jaxonnx.InputError, match=r"another model.*'classifier.0.weight'"):
        adapters.apply(mlp())
    np.savez(tmp_path / "other.npz", w=np.ones(3))
    with pytest.raises(jaxonnx.ModelError, match="holds no adapters"):
        jaxonnx.Adapters.load(tmp_path / "other.npz")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(jaxonnx.ModelError, match="holds no adapters"):
        jaxonnx.Adapters.load(path)


@pytest.mark.deep
def test_training_with_adapters(tmp_path):
    model = mlp()
    before = {name: np.array(value) for name, value in model.params.items()}
    result = train(model, lora=jaxonnx.LoRA(2), epochs=8)
    assert result.history.epochs[-1]["loss"] < 0.5 * result.history.losses[0]
    assert {*result.changes} == {"w1", "w2"}
    assert {*result.model.params} == {*model.params}
    for name, value in before.items():
        np.testing.assert_array_equal(model.params[name], value)
        change = np.asarray(result.model.params[name]) - value
        assert np.linalg.matrix_rank(np.atleast_2d(change), tol=1e-4) == (
            2 if value.ndim > 1 else 0
        )

    path = tmp_path / "adapters.npz"
    result.lora.save(path)
    applied = jaxonnx.Adapters.load(path).apply(model)
    np.testing.assert_allclose(applied(X), result.model(X), rtol=1e-6, atol=1e-6)
    further = train(model, lora=jaxonnx.Adapters.load(path), epochs=1)
    assert further.history.losses[0] < 0.6 * result.history.losses[0]


def test_a_run_with_adapters_resumes_bit_for_bit(tmp_path):
    settings = {"lora": jaxonnx.LoRA(2), "trainable": "b2"}
    whole = train(mlp(), **settings)
    train(mlp(), **settings, epochs=1, checkpoint_dir=tmp_path)
    resumed = train(mlp(), **settings, checkpoint_dir=tmp_path, resume=True)
    assert resumed.history.losses == whole.history.losses
    for name, value in whole.lora.values.items():
        np.testing.assert_array_equal(resumed.lora.values[name], value)
    assert "b2" in whole.lora.values
    assert not np.array_equal(whole.model.params["b2"], np.zeros(4))


@pytest.mark.parametrize("other", [jaxonnx.LoRA(2, alpha=8), jaxonnx.LoRA(2, dropout=0.5)])
def test_a_run_with_adapters_of_another_scale_does_not_resume(other, tmp_path):
    """Their tensors have the same shapes, and would mean another change of the weights."""
    train(mlp(), lora=jaxonnx.LoRA(2), epochs=1, checkpoint_dir=tmp_path)
    message = r"has lora=LoRA\(alpha=2, dropout=0\), and lora=LoRA\(alpha=[28], dropout=0"
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(mlp(), lora=other, checkpoint_dir=tmp_path, resume=True)


@pytest.mark.deep
def test_a_rank_is_adapters_of_this_rank():
    short, written = (train(mlp(), lora=lora, epochs=1).lora for lora in (2, jaxonnx.LoRA(rank=2)))
    assert short.rank == 2
    for name, value in written.values.items():
        np.testing.assert_array_equal(short.values[name], value)
    with pytest.raises(jaxonnx.TrainingError, match=r"lora must be .* a rank, or Adapters"):
        train(mlp(), lora=True)
    with pytest.raises(jaxonnx.Error, match="rank must be"):
        train(mlp(), lora=0)


def test_a_file_of_integers_names_what_trains_it():
    """All its parameters are stored in few bits, which print(model) alone said."""
    proto = jaxonnx.quantize(mlp(), X).to_onnx()
    words = r"no parameter is to be trained; .*lora=.*jaxonnx\.quantize\(model, data\)"
    with pytest.raises(jaxonnx.TrainingError, match=words):
        jaxonnx.train(proto, (X, Y), loss=LABELS, optimizer=optax.sgd(0.1))


def test_an_optimizer_for_each_group():
    still = {"b": optax.adam(0.05), "rest": optax.set_to_zero()}
    optimizer = optax.multi_transform(still, jaxonnx.labels({"b": ".*lora_B"}, default="rest"))
    model = mlp()
    adapted = jaxonnx.LoRA(2).attach(model, jax.random.key(0))
    result = train(adapted, optimizer=optimizer)
    for name, value in adapted.params.items():
        assert np.array_equal(result.model.params[name], value) == name.endswith("lora_A")

    optimizer = optax.multi_transform(
        {"head": optax.adam(0.05), "body": optax.set_to_zero()},
        jaxonnx.labels({"head": ["w2", "b2"]}, default="body"),
    )
    result = train(model, optimizer=optimizer)
    assert {name for name, change in result.changes.items() if change} == {"w2", "b2"}
    with pytest.raises(jaxonnx.InputError, match="no group has w1, b1; give them one"):
        jaxonnx.labels({"head": ".2"})(model.params)
    with pytest.raises(jaxonnx.InputError, match=r"labels: head='v.*' matches no"):
        jaxonnx.labels({"head": "v.*"}, default="body")(model.params)


def test_rates_of_lora_plus():
    """Adam's first step is the rate, that of B 16 times as long (arXiv:2402.12354)."""
    adapted = changed(mlp(), jaxonnx.LoRA(2))
    groups = jaxonnx.labels({"b": ".*lora_B"}, default="a")
    rates = optax.multi_transform({"a": optax.adam(1e-3), "b": optax.adam(16e-3)}, groups)
    step = jaxonnx.training.step(adapted, LABELS, rates)
    state, _ = jax.jit(step.update)(step.init(), ((X[:16],), Y[:16]), step.frozen)
    for name, value in step.view(state).items():
        moved = np.abs(value - adapted.params[name])
        rate = 16e-3 if name.endswith("lora_B") else 1e-3
        np.testing.assert_allclose(moved, rate, rtol=0.05, err_msg=name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora": "8"}, r"jaxonnx.LoRA, like LoRA\(rank=8\), a rank, or .*got '8'"),
        ({"lora": jaxonnx.LoRA(2), "sparsity": "2:4"}, "leave one of the two out"),
        ({"statistics": "running"}, "'frozen', 'recompute' or None"),
        ({"dropout": 0.1}, "no Dropout node"),
    ],
)
def test_settings_of_a_run_that_do_not_fit(settings, words):
    with pytest.raises(jaxonnx.Error, match=words):
        train(mlp(), **settings)


def test_adapters_of_a_stack_of_matrices_are_trained():
    """B of shape (experts, outputs, rank) is stored in the order of kernels by a run on CPU."""
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[n,4,1,16] x) => (float[n,4,1,16] y) { y = MatMul(x, w) }
    """)
    w = np.random.default_rng(0).normal(0, 0.2, (4, 16, 16)).astype("f4")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    x = np.random.default_rng(1).normal(size=(8, 4, 1, 16)).astype("f4")
    lora = jaxonnx.LoRA(rank=2, where="w", alpha=4)
    settings = {"loss": "squared_error", "batch_size": 8, "progress": False}
    result = jaxonnx.train(
        proto, (x, 0 * x), optimizer=optax.adam(1e-2), lora=lora, epochs=20, **settings
    )
    assert result.history.losses[-1] < 0.7 * result.history.losses[0]
    a, b = (result.lora.values[f"w.lora_{end}"] for end in "AB")
    assert (a.shape, b.shape) == ((4, 2, 16), (4, 16, 2))
    change = 2 * jnp.matrix_transpose(b @ a)
    np.testing.assert_allclose(result.model.params["w"], w + change, atol=1e-6)
    np.testing.assert_allclose(result.model(x), x @ (w + change), atol=1e-5)


def test_factors_are_those_of_a_draw_in_their_shape():
    """They are drawn in as few programs as possible, with the numbers of a draw for each shape."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 13] x) => (float[n, 11] y) { y = MatMul(x, w) }""")
    weight = np.ones((13, 11), np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    key = jax.random.key(3)
    factor = jaxonnx.LoRA(3).attach(jaxonnx.load(proto), key).params["w.lora_A"]
    expected = jax.random.normal(jax.random.split(key, 1)[0], factor.shape) / np.sqrt(13)
    np.testing.assert_allclose(factor, expected, rtol=1e-6)
