"""ONNX networks as modules of Flax: fine-tuned, mapped over, differentiated, saved."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from flax import nnx

import jaxonnx
from tests.support.paths import DATA
from tests.support.tiny_networks import examples, mlp

LENET = DATA / "lenet_bn.legacy.onnx"


@pytest.fixture(scope="module")
def model():
    return jaxonnx.load(LENET)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    x = rng.random((8, 1, 28, 28), np.float32)
    return jnp.asarray(x), jnp.asarray(rng.integers(0, 3, 8), jnp.int32)


def run_onnxruntime(proto, x):
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {session.get_inputs()[0].name: np.asarray(x)})[0]


def noisy():
    """y = Dropout(x @ w, 0.5) with w = ones."""
    make = onnx.helper
    graph = make.make_graph(
        [
            make.make_node("MatMul", ["x", "w"], ["h"]),
            make.make_node("Dropout", ["h", "ratio"], ["y"]),
        ],
        "noisy",
        [make.make_tensor_value_info("x", 1, ["n", 4])],
        [make.make_tensor_value_info("y", 1, ["n", 16])],
        [
            onnx.numpy_helper.from_array(np.ones((4, 16), np.float32), "w"),
            onnx.numpy_helper.from_array(np.float32(0.5), "ratio"),
        ],
    )
    opset = [make.make_opsetid("", 17)]
    return jaxonnx.load(make.make_model(graph, opset_imports=opset, ir_version=8))


def random_input():
    """y = x + N(0, 1), in inference too."""
    make = onnx.helper
    graph = make.make_graph(
        [
            make.make_node("RandomNormalLike", ["x"], ["noise"]),
            make.make_node("Add", ["x", "noise"], ["y"]),
        ],
        "random",
        [make.make_tensor_value_info("x", 1, ["n"])],
        [make.make_tensor_value_info("y", 1, ["n"])],
    )
    opset = [make.make_opsetid("", 17)]
    return jaxonnx.load(make.make_model(graph, opset_imports=opset, ir_version=8))


def loss(network, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(network(x), y).mean()


class Classifier(nnx.Module):
    """The logits of an ONNX backbone, and a new head of three classes on them."""

    def __init__(self, model, rngs):
        self.backbone = jaxonnx.flax.Module(model)
        self.head = nnx.Linear(10, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.backbone(x)))


def test_kinds_of_variables(model):
    net = jaxonnx.flax.Module(model)
    params, statistics, rest = nnx.split(net, nnx.Param, nnx.BatchStat, ...)[1:]
    assert {path[-1] for path in nnx.to_flat_state(params).paths} == {*model.params}
    assert {path[-1] for path in nnx.to_flat_state(statistics).paths} == {*model.state}
    assert not jax.tree.leaves(rest)


def test_frozen_tensors_are_plain_variables(model):
    wanted = "classifier.0.weight"
    net = jaxonnx.flax.Module(model.with_trainable(r"features.*(weight|bias)"))
    assert type(net.state[wanted]) is nnx.Variable
    assert type(net.state["features.1.running_mean"]) is nnx.BatchStat


@pytest.mark.deep
def test_same_outputs_as_the_model(model, batch):
    x, _ = batch
    net = jaxonnx.flax.Module(model)
    y = nnx.jit(lambda net, x: net(x))(net, x)
    apply = jax.jit(lambda params, state, x: model.apply(params, x, state=state))
    np.testing.assert_array_equal(y, apply(model.params, model.state, x))
    # calls of a model fold BatchNormalization in their weights
    np.testing.assert_allclose(y, model(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(net(x=x), net(x))


@pytest.mark.deep
def test_backbone_and_head_fine_tuned_and_saved(model, batch, tmp_path):
    x, y = batch
    net = Classifier(model, nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer):
        value, gradients = nnx.value_and_grad(loss)(net, x, y)
        optimizer.update(net, gradients)
        return value

    net.train()
    losses = [float(step(net, optimizer)) for _ in range(15)]
    net.eval()
    assert losses[-1] < 0.7 * losses[0]

    path = tmp_path / "tuned.onnx"
    net.backbone.to_model().save(path)
    tuned = onnx.load(path)
    np.testing.assert_allclose(run_onnxruntime(tuned, x), net.backbone(x), rtol=1e-4, atol=1e-5)
    for name in (*model.params, *model.state):  # weights and statistics
        variable = net.backbone.params.get(name) or net.backbone.state[name]
        saved = next(t for t in tuned.graph.initializer if t.name == name)
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(saved), variable[...])
    assert not np.allclose(net.backbone(x), model(x), atol=1e-3)
    # the model that the module was made of has not changed
    np.testing.assert_allclose(run_onnxruntime(onnx.load(LENET), x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.deep
def test_adapters_are_the_parameters_and_are_merged_in_the_file(model, batch):
    x, y = batch
    lora = jaxonnx.LoRA(rank=2, where="classifier.*weight")
    net = jaxonnx.flax.Module(lora.attach(model, jax.random.key(0)))
    optimizer = nnx.Optimizer(net, optax.sgd(0.5), wrt=nnx.Param)
    gradient = nnx.jit(nnx.grad(loss))
    optimizer.update(net, gradient(net, x, y))
    optimizer.update(net, gradient(net, x, y))
    assert {name.split(".lora_")[0] for name in net.params} == {
        f"classifier.{i}.weight" for i in (0, 2, 4)
    }
    merged = net.to_model().to_onnx()
    assert len(merged.graph.initializer) == len(onnx.load(LENET).graph.initializer)
    np.testing.assert_allclose(run_onnxruntime(merged, x), net(x), rtol=1e-4, atol=1e-5)
    assert not np.allclose(net(x), model(x), atol=1e-3)


@pytest.mark.deep
def test_training_mode_is_apply_train(model, batch):
    x, _ = batch
    net = jaxonnx.flax.Module(model, deterministic=False)
    expected, state = model.apply_train(model.params, model.state, None, x)
    np.testing.assert_array_equal(net(x), expected)
    for name, value in state.items():
        np.testing.assert_array_equal(net.state[name][...], value)
    net.eval()
    np.testing.assert_array_equal(net(x), model.apply(model.params, x, state=state))


@pytest.mark.deep
def test_only_the_head_is_trained(model, batch):
    x, y = batch
    net = Classifier(model, nnx.Rngs(0))
    head = nnx.All(nnx.Param, nnx.PathContains("head"))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=head)
    gradients = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, head)))(net, x, y)
    optimizer.update(net, gradients)
    for name, value in model.params.items():
        np.testing.assert_array_equal(net.backbone.params[name][...], value)
    assert np.abs(net.head.bias[...]).max() > 0


@pytest.mark.deep
def test_tensors_are_frozen_by_name(model, batch):
    x, y = batch
    net = jaxonnx.flax.Module(model)
    last = nnx.All(nnx.Param, lambda path, _: path[-1].startswith("classifier.4"))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=last)
    optimizer.update(net, nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, last)))(net, x, y))
    for name, value in model.params.items():
        same = (net.params[name][...] == value).all()
        assert same != name.startswith("classifier.4")


def test_view_sets_the_mode_of_a_copy(model, batch):
    x, _ = batch
    net = Classifier(model, nnx.Rngs(0))
    training = nnx.view(net, deterministic=False)
    assert net.backbone.deterministic
    assert not training.backbone.deterministic
    expected, _ = model.apply_train(model.params, model.state, None, x)
    np.testing.assert_array_equal(training.backbone(x), expected)


def test_dropout_draws_anew_in_each_call_and_never_in_eval():
    net = jaxonnx.flax.Module(noisy(), rngs=nnx.Rngs(0))
    x = jnp.ones((2, 4))
    np.testing.assert_array_equal(net(x), jnp.full((2, 16), 4.0))
    net.train()
    first, second = net(x), net(x)
    assert {*np.unique(first)} == {0.0, 8.0}
    assert (first != second).any()
    again = jaxonnx.flax.Module(noisy(), deterministic=False, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(again(x), first)


def test_random_operators_need_rngs():
    with pytest.raises(jaxonnx.InputError, match=r"rngs=nnx\.Rngs"):
        jaxonnx.flax.Module(noisy(), deterministic=False)(jnp.ones((2, 4)))
    with pytest.raises(jaxonnx.InputError, match=r"rngs=nnx\.Rngs"):
        jaxonnx.flax.Module(random_input())(jnp.zeros(3))
    net = jaxonnx.flax.Module(random_input(), rngs=nnx.Rngs(0))
    assert (net(jnp.zeros(3)) != net(jnp.zeros(3))).all()


def test_wrong_input_is_refused(model):
    with pytest.raises(jaxonnx.InputError, match="rank 4"):
        jaxonnx.flax.Module(model)(jnp.zeros((28, 28)))


@pytest.mark.deep
def test_ensemble_by_vmap():
    """Three sets of parameters in one call: those of separate calls, stacked."""
    model, (x, y) = jaxonnx.load(mlp()), examples(6)
    members = [
        jax.tree.map(lambda v, seed=seed: v * (1 + 0.1 * seed), model.params) for seed in range(3)
    ]
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *members)
    outputs = jax.jit(jax.vmap(model.apply, (0, None)))(stacked, x)
    expected = jnp.stack([model.replace(params=member)(x) for member in members])
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)

    graph, params, rest = nnx.split(jaxonnx.flax.Module(model), nnx.Param, ...)
    names = nnx.to_pure_dict(params)["params"]
    nnx.replace_by_pure_dict(params, {"params": {name: stacked[name] for name in names}})
    gradient = jax.jit(jax.vmap(jax.grad(lambda p: loss(nnx.merge(graph, p, rest), x, y))))(params)
    found = nnx.to_pure_dict(gradient)["params"]

    @jax.jit
    @jax.grad
    def gradient_alone(params):
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    for i, member in enumerate(members):
        for name, value in gradient_alone(member).items():
            np.testing.assert_allclose(found[name][i], value, rtol=1e-3, atol=1e-5)


@pytest.mark.deep
def test_ensemble_of_modules(model, batch):
    """Modules of one model are stacked to a module that `nnx.vmap` maps over, and taken apart."""
    x, _ = batch
    other = model.replace(params=jax.tree.map(lambda v: 1.1 * v, model.params))
    graphs, states = zip(*(nnx.split(jaxonnx.flax.Module(m)) for m in (model, other)), strict=True)
    assert graphs[0] == graphs[1] != nnx.graphdef(jaxonnx.flax.Module(noisy()))
    stacked = nnx.merge(graphs[0], jax.tree.map(lambda *values: jnp.stack(values), *states))
    outputs = nnx.jit(nnx.vmap(lambda net, x: net(x), in_axes=(0, None)))(stacked, x)
    for output, member in zip(outputs, (model, other), strict=True):
        np.testing.assert_allclose(output, member(x), rtol=1e-4, atol=1e-5)
    second = nnx.merge(graphs[0], jax.tree.map(lambda v: v[1], nnx.state(stacked)))
    np.testing.assert_array_equal(second.to_model()(x), other(x))


def test_modules_of_one_model_share_what_is_compiled(model, batch):
    traced = []

    @nnx.jit
    def run(net, x):
        traced.append(x.shape)
        return net(x)

    for _ in range(2):
        run(jaxonnx.flax.Module(model), batch[0])
    assert len(traced) == 1


@pytest.mark.deep
def test_per_example_gradients():
    """Their mean is the gradient of the mean loss; each is that of its example alone."""
    model, (x, y) = jaxonnx.load(mlp()), examples(6)
    graph, params, rest = nnx.split(jaxonnx.flax.Module(model), nnx.Param, ...)

    def one(params, x, y):
        return loss(nnx.merge(graph, params, rest), x[None], y[None])

    each = jax.jit(jax.vmap(jax.grad(one), (None, 0, 0)))(params, x, y)
    mean = jax.jit(jax.grad(lambda params: loss(nnx.merge(graph, params, rest), x, y)))(params)
    fifth = jax.jit(jax.grad(one))(params, x[5], y[5])
    for many, together, alone in zip(*map(jax.tree.leaves, (each, mean, fifth)), strict=True):
        np.testing.assert_allclose(many.mean(0), together, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(many[5], alone, rtol=1e-3, atol=1e-5)


@pytest.mark.deep
def test_saliency(model, batch):
    """The gradient for the input agrees with a difference quotient along itself."""
    x, _ = batch
    net = jaxonnx.flax.Module(model)
    score = jax.jit(lambda x: net(x)[:, 7].sum())
    saliency = jax.grad(score)(x)
    assert saliency.shape == x.shape
    step = 1e-2 * saliency / jnp.linalg.norm(saliency)
    quotient = (score(x + step) - score(x - step)) / 2e-2
    np.testing.assert_allclose(quotient, jnp.linalg.norm(saliency), rtol=2e-2)


@pytest.mark.deep
def test_flax_is_imported_at_first_use():
    code = (
        "import sys, jaxonnx; assert 'flax' not in sys.modules; jaxonnx.flax.Module; "
        "assert 'flax' in sys.modules; jaxonnx.backend.prepare"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        _ = jaxonnx.nothing
