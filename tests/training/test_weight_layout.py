"""Weights of convolutions are stored in another order only where no optimizer can tell."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx.training._settings.weight_layout import WeightLayout
from jaxonnx.training._step import copy

rng = np.random.default_rng(0)
PARAMS = {
    "w": jnp.ones((8, 4, 3, 3)),
    "square": jnp.ones((3, 3, 3, 3)),
    "line": jnp.ones((8, 4, 3)),
    "matrix": jnp.ones((8, 3)),
    "table": jnp.ones((1, 8, 32)),
}


def stored(optimizer):
    return WeightLayout(PARAMS, optax.with_extra_args_support(optimizer)).names


INDIFFERENT = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
    "sgd": optax.sgd(0.1, 0.9, nesterov=True),
    "clipping": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
    "accumulation": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "groups": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.set_to_zero()}, dict.fromkeys(PARAMS, "a") | {"w": "b"}
    ),
    "onnx": jaxonnx.optim.adam(1e-3),
}
TELLING = {
    "noise": optax.chain(optax.add_noise(0.1, 0.1, 0), optax.sgd(0.1)),
    "fan": optax.stateless_with_tree_map(lambda g, p: g / p.shape[-1]),
    "constants": optax.stateless_with_tree_map(lambda g, p: g + np.ones(g.shape)),
    "captured": optax.stateless_with_tree_map(
        lambda g, p: g + (PARAMS["w"] if g.shape == (8, 4, 3, 3) else 0)
    ),
    "captured, square": optax.stateless_with_tree_map(
        lambda g, p: g + (PARAMS["square"] if g.shape == (3, 3, 3, 3) else 0)
    ),
    "scattered": optax.stateless_with_tree_map(
        lambda g, p: g.at[0].multiply(0.0, wrap_negative_indices=False)
    ),
    "sums of rows": optax.stateless_with_tree_map(
        lambda g, p: g * jax.lax.reduce(g, 0.0, lambda a, b: a + 2 * b, (g.ndim - 1,)).sum()
    ),
    "rows": optax.stateless_with_tree_map(lambda g, p: g - g.mean(0)),
    "sparse": jaxonnx.sparse.three_phase(optax.sgd(0.1), dense=0, dynamic=1, steps_per_epoch=1),
}


@pytest.mark.parametrize("name", INDIFFERENT)
def test_updates_element_by_element(name):
    assert stored(INDIFFERENT[name]) == {"w", "line"}


@pytest.mark.parametrize("name", TELLING)
def test_an_optimizer_that_can_tell_keeps_the_order_of_the_file(name):
    assert not stored(TELLING[name])


def network(channels=2, features=6, classes=3):
    w = rng.normal(size=(features, channels, 3, 3)).astype(np.float32)
    head = rng.normal(size=(classes, features)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["p"]),
            helper.make_node("Flatten", ["p"], ["f"]),
            helper.make_node("Gemm", ["f", "head"], ["y"], transB=1),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", channels, 5, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", classes])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(head, "head")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.deep
def test_a_run_gives_what_it_gives_in_the_order_of_the_file(tmp_path):
    x, y = rng.normal(size=(16, 2, 5, 5)).astype(np.float32), rng.integers(0, 3, 16)
    model = jaxonnx.load(network())
    told = optax.chain(optax.adam(1e-2), TELLING["fan"], optax.scale(3.0))

    def run(optimizer, epochs=3, **options):
        options |= {"loss": "softmax_cross_entropy_with_integer_labels", "ema": 0.5}
        options |= {"epochs": epochs, "batch_size": 8, "validation": (x, y), "progress": False}
        return jaxonnx.train(model, (x, y), optimizer=optimizer, **options)

    # the gradient is divided by the last axis, 3 in the kernel and 6 in the head
    plain = optax.chain(
        optax.adam(1e-2),
        optax.stateless(lambda g, p: {"w": g["w"], "head": g["head"] / 2}),
    )
    one, other = run(plain), run(told)
    for name, value in one.model.params.items():
        assert value.shape == model.params[name].shape
        np.testing.assert_allclose(value, other.model.params[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        [row["validation_loss"] for row in one.history.epochs],
        [row["validation_loss"] for row in other.history.epochs],
        rtol=1e-4,
    )
    run(plain, epochs=2, checkpoint_dir=tmp_path)
    resumed = run(plain, checkpoint_dir=tmp_path, resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.model.params, one.model.params)


class Cut(Exception):
    pass


@pytest.mark.deep
def test_sparse_runs_give_what_they_give_in_the_order_of_the_file(tmp_path):
    x, y = rng.normal(size=(16, 4, 5, 5)).astype(np.float32), rng.integers(0, 4, 16)
    model = jaxonnx.load(network(4, 8, 4))
    rules = {"a": optax.adam(1e-2), "b": optax.sgd(0.1, 0.9)}
    rules = optax.multi_transform(rules, {"w": "a", "head": "b"})
    plain = optax.chain(rules, optax.identity())
    told = optax.chain(rules, optax.stateless(lambda g, p: jax.tree.map(reshaped, g)))
    phases = {"dense": 1, "dynamic": 1, "fixed": 1, "refresh": 0.5, "moments": "zero"}
    options = {"ema": 0.5, "accumulate": 2, "sparsity": phases | {"transposable": False}}

    def run(optimizer, folder=None, cut=None):
        def stop(step, numbers):
            if step == cut:
                raise Cut

        given = {"loss": "softmax_cross_entropy_with_integer_labels", "progress": False}
        given |= {"epochs": 3, "batch_size": 4, "validation": (x, y), "on_log": stop}
        if folder is not None:
            given |= {"checkpoint_dir": tmp_path / folder, "checkpoint_every": 1, "resume": True}
        return jaxonnx.train(model, (x, y), optimizer=optimizer, **given, **options)

    straight, other = run(plain), run(told)
    for name, value in straight.model.params.items():
        assert WeightLayout(model.params, plain).names == {"w"}
        assert not WeightLayout(model.params, told).names
        np.testing.assert_array_equal(value == 0, other.model.params[name] == 0)
        np.testing.assert_allclose(value, other.model.params[name], rtol=1e-4, atol=1e-6)
    jaxonnx.sparse.verify(straight.model)
    # inside each of the phases, of four steps each
    for cut in (2, 6, 10):
        with pytest.raises(Cut):
            run(plain, "stored", cut)
    resumed = run(plain, "stored")
    jax.tree.map(np.testing.assert_array_equal, resumed.model.params, straight.model.params)
    # checkpoints have the order of the file, whoever writes them
    with pytest.raises(Cut):
        run(told, "file", 7)
    resumed = run(plain, "file")
    for name, value in resumed.model.params.items():
        np.testing.assert_array_equal(value == 0, straight.model.params[name] == 0)
        np.testing.assert_allclose(value, straight.model.params[name], rtol=1e-4, atol=1e-6)


def reshaped(x):
    return x.reshape(-1).reshape(x.shape)


@pytest.mark.deep
def test_a_loop_of_ones_own():
    model = jaxonnx.load(network())
    x, y = rng.normal(size=(8, 2, 5, 5)).astype(np.float32), rng.integers(0, 3, 8)
    optimizer = optax.adam(1e-2)

    def trained(params):
        @jax.jit
        def step(params, memory):
            def loss(params):
                logits = model.apply(params, x)
                return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

            updates, memory = optimizer.update(jax.grad(loss)(params), memory, params)
            return optax.apply_updates(params, updates), memory

        memory = optimizer.init(params)
        for _ in range(5):
            params, memory = step(params, memory)
        return params

    params = trained(jaxonnx.kernels_first(model.params))
    assert params["w"].value.shape == (3, 3, 2, 6)
    one, other = model.replace(params=params), model.replace(params=trained(model.params))
    for name, value in one.params.items():
        np.testing.assert_allclose(value, other.params[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(one(x), other(x), rtol=1e-4, atol=1e-5)


def test_arrays_are_copied_and_turned_without_programs(caplog):
    """A network of 50 shapes would compile 100 of them before its first step."""
    params = {"w": jnp.asarray(np.arange(120, dtype=np.float32).reshape(5, 3, 2, 4))}
    with jax.log_compiles(True):
        storage = WeightLayout(params, optax.with_extra_args_support(optax.sgd(0.1)), "cpu")
        stored = storage.store(params)
        back = copy(storage.view(stored))
    assert storage.names == {"w"}
    assert not [line for line in caplog.messages if line.startswith("Compiling")]
    np.testing.assert_array_equal(stored["w"], np.transpose(params["w"], (2, 3, 1, 0)))
    np.testing.assert_array_equal(back["w"], params["w"])
    assert back["w"].unsafe_buffer_pointer() != params["w"].unsafe_buffer_pointer()


@pytest.mark.parametrize(("optimizer", "together"), [("adamw", True), ("noise", False)])
def test_the_first_state_of_an_optimizer_is_one_program_where_it_traces(
    caplog, optimizer, together
):
    optimizer = (INDIFFERENT | TELLING)[optimizer]
    loss = "softmax_cross_entropy_with_integer_labels"
    one = jaxonnx.training.step(jaxonnx.load(network()), loss=loss, optimizer=optimizer)
    jax.clear_caches()
    with jax.log_compiles(True):
        one.init()
    programs = [line.split()[1] for line in caplog.messages if line.startswith("Compiling")]
    assert any("init_fn" in program for program in programs) == together


def test_the_first_state_of_an_optimizer_lies_with_its_parameters():
    model = jaxonnx.load(network())
    last = jax.devices()[-1]
    placed = {name: jax.device_put(x, last) for name, x in model.params.items()}
    loss = "softmax_cross_entropy_with_integer_labels"
    one = jaxonnx.training.step(model.replace(params=placed), loss=loss, optimizer=optax.adam(0.1))
    state = one.init()
    arrays = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert arrays
    assert {x.sharding.device_set.pop() for x in arrays} == {last}
    assert all(x.committed for x in arrays)


def test_the_first_state_traces():
    loss = "softmax_cross_entropy_with_integer_labels"
    one = jaxonnx.training.step(jaxonnx.load(network()), loss=loss, optimizer=optax.adam(0.1))
    shapes = jax.eval_shape(one.init)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, one.init())
