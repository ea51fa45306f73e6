"""jaxonnx.optim: the update rules against independent recursions, and as optax citizens."""

import doctest
import math

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest

import jaxonnx
from jaxonnx import errors, optim

STEPS = 1000
# Trajectories of 1,000 float32 steps against float64: rounding errors accumulate.
TOLERANCE = {np.float32: 2e-4, np.float64: 1e-10}


def f32(value):
    """ONNX attributes are float32."""
    return float(np.float32(value))


def quadratic(dtype):
    """An ill-conditioned bowl around 0.3 with some curvature change: X0 and its gradient."""
    scale = np.array([0.1, 1.0, 7.0], dtype)

    def gradient(x):
        return scale * (x - dtype(0.3)) + dtype(0.1) * (x - dtype(0.3)) ** 3

    return np.array([1.5, -2.0, 0.7], dtype), gradient


def numpy_adam(X, gradient, rate, T, alpha, beta, epsilon, norm, post):
    V = H = np.zeros_like(X)
    for t in range(T, T + STEPS):
        G = norm * X + gradient(X)
        V = alpha * V + (1 - alpha) * G
        H = beta * H + (1 - beta) * G * G
        R = rate(t - T)
        if t > 0:
            R = R * math.sqrt(1 - beta**t) / (1 - alpha**t)
        X = (1 - post) * (X - R * V / (np.sqrt(H) + epsilon))
    return X, V, H


def numpy_adagrad(X, gradient, rate, T, decay, epsilon, norm):
    H = np.zeros_like(X)
    for t in range(T, T + STEPS):
        G = norm * X + gradient(X)
        H = H + G * G
        X = X - rate(t - T) / (1 + t * decay) * G / (np.sqrt(H) + epsilon)
    return X, H


def numpy_momentum(X, gradient, rate, alpha, beta, mode, norm):
    V = np.zeros_like(X)
    for t in range(STEPS):
        G = norm * X + gradient(X)
        V = alpha * V + (beta if t > 0 else 1.0) * G
        X = X - rate(t) * (V if mode == "standard" else G + alpha * V)
    return X, V


def run(optimizer, X, gradient, steps=STEPS):
    """The trajectory's end and the optimizer's state, the loop compiled."""

    def step(_, carry):
        X, state = carry
        updates, state = optimizer.update(gradient(X), state, X)
        return optax.apply_updates(X, updates), state

    X = jnp.asarray(X)
    return jax.jit(lambda X: jax.lax.fori_loop(0, steps, step, (X, optimizer.init(X))))(X)


def constant(value):
    return value, lambda t: value


def cosine(value):
    schedule = optax.cosine_decay_schedule(value, STEPS)
    return schedule, lambda t: value * 0.5 * (1 + math.cos(math.pi * t / STEPS))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rate", [constant, cosine])
@pytest.mark.parametrize("T", [0, 1, 500])
@pytest.mark.parametrize(("norm", "post"), [(0.0, 0.0), (0.02, 1e-3)])
def test_adam_trajectory(dtype, rate, T, norm, post):
    with jax.enable_x64(dtype == np.float64):
        X, gradient = quadratic(dtype)
        ours, theirs = rate(0.01)
        optimizer = optim.adam(
            ours, 0.85, 0.99, 1e-4, norm_coefficient=norm, norm_coefficient_post=post, T=T
        )
        got, state = run(optimizer, X, gradient)
        assert got.dtype == state.V.dtype == state.H.dtype == dtype
        assert int(state.count) == STEPS
    X64, gradient64 = quadratic(np.float64)
    coefficients = map(f32, (0.85, 0.99, 1e-4, norm, post))
    want = numpy_adam(X64, gradient64, theirs, T, *coefficients)
    for a, b in zip((got, state.V, state.H), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rate", [constant, cosine])
@pytest.mark.parametrize("T", [0, 1])
@pytest.mark.parametrize(("decay", "norm"), [(0.0, 0.0), (0.01, 0.02)])
def test_adagrad_trajectory(dtype, rate, T, decay, norm):
    with jax.enable_x64(dtype == np.float64):
        X, gradient = quadratic(dtype)
        ours, theirs = rate(0.1)
        optimizer = optim.adagrad(ours, 1e-4, decay, norm_coefficient=norm, T=T)
        got, state = run(optimizer, X, gradient)
    X64, gradient64 = quadratic(np.float64)
    want = numpy_adagrad(X64, gradient64, theirs, T, *map(f32, (decay, 1e-4, norm)))
    for a, b in zip((got, state.H), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rate", [constant, cosine])
@pytest.mark.parametrize("mode", optim.MODES)
@pytest.mark.parametrize(("beta", "norm"), [(1.0, 0.0), (0.3, 0.02)])
def test_momentum_trajectory(dtype, rate, mode, beta, norm):
    with jax.enable_x64(dtype == np.float64):
        X, gradient = quadratic(dtype)
        ours, theirs = rate(0.01)
        optimizer = optim.momentum(ours, 0.8, beta, mode=mode, norm_coefficient=norm)
        got, state = run(optimizer, X, gradient)
    X64, gradient64 = quadratic(np.float64)
    alpha, beta, norm = map(f32, (0.8, beta, norm))
    want = numpy_momentum(X64, gradient64, theirs, alpha, beta, mode, norm)
    for a, b in zip((got, state.V), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def five_steps(optimizer, steps=5):
    """Five float64 steps on fixed gradients, as the PyTorch literals below were made."""
    with jax.enable_x64(True):
        x = jnp.array([0.5, -1.0, 2.0])
        state = optimizer.init(x)
        for t in range(steps):
            g = jnp.array([0.1, -0.2, 0.3]) * (t + 1) + 0.05 * x
            updates, state = optimizer.update(g, state, x)
            x = optax.apply_updates(x, updates)
        return np.asarray(x)


# tests/data/optimizers.py prints them: torch 2.13, float64.
TORCH = {
    "adagrad": [0.20987421, -0.70905586, 1.71114774],
    "sgd": [0.37237866, -0.74475732, 1.5944754],
    "nesterov": [0.30902016, -0.61804033, 1.39600884],
    "adam": [0.01008815, -0.51049912, 1.50960377],
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("adagrad", optim.adagrad(0.1, 1e-6, 0.25, norm_coefficient=0.0625)),
        ("sgd", optim.momentum(0.0625, 0.5, 0.75, norm_coefficient=0.0625)),
        ("nesterov", optim.momentum(0.0625, 0.5, mode="nesterov", norm_coefficient=0.0625)),
        ("adam", optim.adam(0.1, 0.875, 0.96875, 0.0, T=1)),
    ],
)
def test_equals_torch_where_the_rules_coincide(name, optimizer):
    np.testing.assert_allclose(five_steps(optimizer), TORCH[name], rtol=1e-6)


def test_relation_to_torchs_epsilon():
    """An update of Adam at count T is optax's (and torch's) with eps = epsilon/sqrt(1-beta**T)."""
    alpha, beta, epsilon = f32(0.9), f32(0.999), 0.25
    with jax.enable_x64(True):
        x = jnp.array([0.5, -1.0, 2.0])
        ours = optim.adam(0.1, alpha, beta, epsilon, T=1)
        state = ours.init(x)
        moments = optax.adam(0.1, alpha, beta).init(x)
        for T in range(1, 30):
            g = jnp.sin(T * x)
            eps = epsilon / math.sqrt(1 - beta**T)
            updates, state = ours.update(g, state, x)
            expected, moments = optax.adam(0.1, alpha, beta, eps).update(g, moments)
            np.testing.assert_allclose(updates, expected, rtol=1e-9)
            x = optax.apply_updates(x, updates)


OPTIMIZERS = {
    "adam": optim.adam(0.1, norm_coefficient=0.01, norm_coefficient_post=0.01),
    "adagrad": optim.adagrad(0.1, norm_coefficient=0.01),
    "momentum": optim.momentum(0.1, mode="nesterov", norm_coefficient=0.01),
}


@pytest.fixture(params=OPTIMIZERS)
def optimizer(request):
    return OPTIMIZERS[request.param]


@pytest.fixture
def params():
    return {"a": jnp.array([1.0, -2.0]), "b": {"c": jnp.array([[0.5]]), "empty": jnp.zeros((0, 3))}}


def steps(optimizer, params, number):
    state = optimizer.init(params)
    for t in range(number):
        gradients = jax.tree.map(lambda x, t=t: jnp.cos(3 * x + t), params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def test_trees_are_updated_leaf_by_leaf(optimizer, params):
    whole = steps(optimizer, params, 3)
    assert_same(whole["b"]["c"], steps(optimizer, params["b"]["c"], 3))
    assert jax.tree.structure(whole) == jax.tree.structure(params)
    assert steps(optimizer, {}, 2) == {}


def test_chain(optimizer, params):
    doubled = optax.chain(optax.identity(), optimizer, optax.scale(2.0))
    x = steps(optimizer, params, 1)
    y = steps(doubled, params, 1)
    assert_same(
        jax.tree.map(lambda p, q: p + 2 * (q - p), params, x),
        y,
    )


def test_multi_transform(optimizer, params):
    labels = {"a": "ours", "b": {"c": "frozen", "empty": "frozen"}}
    both = optax.multi_transform({"ours": optimizer, "frozen": optax.set_to_zero()}, labels)
    x = steps(both, params, 4)
    assert_same(x["b"], params["b"])
    assert_same(x["a"], steps(optimizer, params, 4)["a"])


def test_multi_steps_averages_gradients(optimizer, params):
    every_second = optax.MultiSteps(optimizer, every_k_schedule=2)
    state = every_second.init(params)
    x = params
    for sign in (1.0, 3.0):
        gradients = jax.tree.map(lambda p, sign=sign: sign * jnp.ones_like(p), params)
        updates, state = every_second.update(gradients, state, x)
        x = optax.apply_updates(x, updates)
    twos = jax.tree.map(lambda p: 2 * jnp.ones_like(p), params)
    updates, _ = optimizer.update(twos, optimizer.init(params), params)
    assert_same(x, optax.apply_updates(params, updates))


@pytest.mark.parametrize(
    ("factory", "settings"),
    [
        (optim.adam, {"norm_coefficient": 0.01, "norm_coefficient_post": 0.01}),
        (optim.adagrad, {"decay_factor": 0.5}),
        (optim.momentum, {"mode": "nesterov", "beta": 0.5}),
    ],
)
def test_inject_hyperparams(factory, settings, params):
    injected = optax.inject_hyperparams(factory)(0.1, **settings)
    state = injected.init(params)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(0.1)
    x = steps(injected, params, 3)
    # Injected coefficients are float32 arrays, so that 1 - beta has lost some digits.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4),
        x,
        steps(factory(0.1, **settings), params, 3),
    )


def test_schedule_is_called_with_the_number_of_updates_made():
    optimizer = optim.momentum(lambda count: 1.0 + count, alpha=0.0)
    state = optimizer.init(jnp.zeros(1))
    for t in range(3):
        updates, state = optimizer.update(jnp.ones(1), state)
        assert float(updates[0]) == -(1.0 + t)


def test_bfloat16_tensors_keep_their_dtype(optimizer):
    params = jnp.array([1.0, -2.0], jnp.bfloat16)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves((updates, state[1:])))


@pytest.mark.parametrize("factory", [optim.adam, optim.adagrad])
def test_gradient_through_an_update_at_rest(factory):
    """Without a past, dX = -R c G / (d |G| + epsilon): its slope at G = 0 is -R c / epsilon."""
    optimizer = factory(0.5, epsilon=0.25)
    x = jnp.zeros(())

    def dX(g):
        return optimizer.update(g, optimizer.init(x), x)[0]

    c = {optim.adam: 0.1, optim.adagrad: 1.0}[factory]
    np.testing.assert_allclose(jax.grad(dX)(0.0), -0.5 * c / 0.25, rtol=1e-6)


@pytest.mark.parametrize("mode", ["", "Nesterov", "none"])
def test_unknown_mode(mode):
    with pytest.raises(errors.TrainingError, match="standard and nesterov"):
        optim.momentum(0.1, mode=mode)


def test_regularisation_needs_params(optimizer):
    x = jnp.ones(2)
    with pytest.raises(errors.TrainingError, match="needs params"):
        optimizer.update(x, optimizer.init(x))


def test_params_may_be_left_out_without_regularisation():
    for factory in (optim.adam, optim.adagrad, optim.momentum):
        x = jnp.ones(2)
        optimizer = factory(0.1)
        state = optimizer.init(x)
        assert_same(optimizer.update(x, state)[0], optimizer.update(x, state, 5 * x)[0])


def test_a_transformation_describes_itself():
    """The transformation says which operator it is, for writers of training graphs."""
    optimizer = optim.adam(1e-3, T=1)
    assert (optimizer.operator, optimizer.first) == ("Adam", 1)
    assert optimizer.attributes["epsilon"] == f32(1e-6)
    assert isinstance(optimizer, optax.GradientTransformation)


# The operators of ai.onnx.preview.training.

DOMAIN = "ai.onnx.preview.training"


def operator(name, tensors, results, attributes, dtype=np.float32):
    """A model of one node with the inputs R, T and `tensors` (an empty name: omitted)."""
    inputs = ["R", "T", *tensors]
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    kinds = {"T": onnx.TensorProto.INT64}
    node = onnx.helper.make_node(name, inputs, results, domain=DOMAIN, **attributes)
    graph = onnx.helper.make_graph(
        [node],
        name,
        [onnx.helper.make_tensor_value_info(n, kinds.get(n, kind), None) for n in inputs if n],
        [onnx.helper.make_tensor_value_info(n, kind, None) for n in results],
    )
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid(DOMAIN, 1)]
    return jaxonnx.load(onnx.helper.make_model(graph, opset_imports=opsets))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("schedule", "count", "dtype"),
    [
        (False, 1, np.float64),
        (True, 3, np.float64),
        (False, 3, np.float32),
        (True, 1, np.float32),
    ],
)
@pytest.mark.parametrize(
    ("factory", "slots", "settings"),
    [
        (optim.adam, "VH", {"T": 0, "norm_coefficient": 0.01, "norm_coefficient_post": 1e-3}),
        (optim.adam, "VH", {"T": 1}),
        (optim.adagrad, "H", {"T": 1, "decay_factor": 0.125, "norm_coefficient": 0.01}),
        (optim.momentum, "V", {"mode": "standard", "beta": 0.5}),
        (optim.momentum, "V", {"mode": "nesterov", "norm_coefficient": 0.01}),
    ],
)
def test_hundred_updates_are_hundred_executions(factory, slots, settings, schedule, count, dtype):
    rate = optax.cosine_decay_schedule(0.05, 100) if schedule else 0.05
    transformation = factory(rate, **settings)
    names = [f"{kind}{i}" for kind in "XG" + slots for i in range(count)]
    results = [f"{name}_new" for name in names if name[0] != "G"]
    with jax.enable_x64(dtype == np.float64):
        model = operator(transformation.operator, names, results, transformation.attributes, dtype)
        rng = np.random.default_rng(0)
        X = [jnp.asarray(rng.normal(size=(2, i + 1)), dtype) for i in range(count)]
        tensors = [*X, *[jnp.zeros_like(x) for _ in slots for x in X]]
        state = transformation.init(X)
        for t in range(100):
            G = [jnp.cos(3 * x + t) for x in X]
            R = np.asarray(rate(t) if schedule else rate, dtype)
            T = np.int64(t + transformation.first)
            tensors = list(model(R, T, *tensors[:count], *G, *tensors[count:]))
            updates, state = transformation.update(G, state, X)
            X = optax.apply_updates(X, updates)
        rtol = {np.float32: 2e-6, np.float64: 1e-7 if schedule else 1e-13}[dtype]
        for got, want in zip(tensors, jax.tree.leaves((X, state[1:])), strict=True):
            assert got.dtype == dtype
            np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("name", "tensors", "attributes", "message"),
    [
        ("Adam", ["X", "G", "V"], {}, "3 inputs follow R and T; each optimized tensor has 4"),
        ("Adam", [], {}, "has 2 inputs; Adam takes at least 3"),
        ("Adagrad", ["X", "G", "H", "Z"], {}, "4 inputs follow R and T; each .* has 3"),
        ("Adagrad", ["X", "G", ""], {}, "2 inputs follow R and T"),
        ("Adam", ["X", "", "V", "H"], {}, "4 inputs follow R and T"),
        ("Adam", ["X", "G", "V", "wide"], {}, r"must be alike"),
        ("Momentum", ["X", "G", "V"], {"mode": "heavy"}, "mode must be .*got 'heavy'"),
        ("Momentum", ["X", "G", "V"], {"mode": None}, r"required attributes \['mode'\]"),
        ("Adam", ["X", "G", "V", "H"], {"gamma": 0.1}, "unknown attributes"),
    ],
)
def test_bad_nodes(name, tensors, attributes, message):
    if name == "Momentum":
        attributes = {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0, **attributes}
        attributes = {key: value for key, value in attributes.items() if value is not None}
    x, wide = np.ones(2, np.float32), np.ones(3, np.float32)
    values = [wide if t == "wide" else x for t in tensors if t]
    with pytest.raises(errors.Error, match=message):
        operator(name, tensors, ["Y"], attributes)(np.float32(0.1), np.int64(0), *values)


def test_rate_and_count_are_scalars():
    model = operator("Adagrad", ["X", "G", "H"], ["Y"], {})
    x = np.ones(2, np.float32)
    np.testing.assert_allclose(model(np.float32([0.5]), np.int64([0]), x, x, 0 * x), 0.5, rtol=1e-5)
    with pytest.raises(errors.Error, match=r"R has shape \[2\]; it must be of size 1"):
        model(x, np.int64(0), x, x, x)


def test_doctests():
    assert doctest.testmod(optim).failed == 0
