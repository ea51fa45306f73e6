"""add_training: a file that carries its training does what optax does, and infers as before."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx import optim

STEPS = 100


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def mlp(ending="y = Identity(s)", opset=17, dtype="float"):
    """Two layers; their weights are initializers A, a, B and b."""
    proto = onnx.parser.parse_model(f"""
    <ir_version: 8, opset_import: ["": {opset}]>
    mlp ({dtype}[N,4] x) => ({dtype}[N,3] y) {{
      h = Gemm(x, A, a)
      r = Tanh(h)
      s = Gemm<transB = 1>(r, B, b)
      {ending}
    }}""")
    kind = {"float": np.float32, "double": np.float64, "float16": np.float16}[dtype]
    for name, shape in {"A": (4, 8), "a": (8,), "B": (3, 8), "b": (3,)}.items():
        tensor = onnx.numpy_helper.from_array(normal(*shape).astype(kind) / 2, name)
        proto.graph.initializer.append(tensor)
    return proto


CNN = """
<ir_version: 8, opset_import: ["": 17]>
cnn (float[N,1,8,8] x) => (float[N,3] y) {
  c = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(x, conv, conv_bias)
  n = BatchNormalization(c, scale, shift, mean, var)
  r = Relu(n)
  p = GlobalAveragePool(r)
  f = Flatten(p)
  y = Gemm(f, B, b)
}"""


def cnn():
    proto = onnx.parser.parse_model(CNN)
    values = {
        "conv": normal(6, 1, 3, 3),
        "conv_bias": np.zeros(6, np.float32),
        "scale": np.ones(6, np.float32),
        "shift": np.zeros(6, np.float32),
        "mean": normal(6) / 10,
        "var": np.full(6, 1.5, np.float32),
        "B": normal(6, 3),
        "b": np.zeros(3, np.float32),
    }
    for name, value in values.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


def targets(counts_classes, n=16, dtype=np.float32):
    if counts_classes:
        return np.arange(n) % 3
    return (normal(n, 3, seed=5) > 0).astype(dtype)


LOSSES = {
    "softmax_cross_entropy_with_integer_labels": (
        optax.losses.softmax_cross_entropy_with_integer_labels
    ),
    "SoftmaxCrossEntropyLoss": optax.losses.softmax_cross_entropy_with_integer_labels,
    "NegativeLogLikelihoodLoss": lambda y, t: -jnp.take_along_axis(y, t[:, None], 1),
    "squared_error": optax.losses.squared_error,
    "absolute_error": lambda y, t: abs(y - t),
    "sigmoid_binary_cross_entropy": optax.losses.sigmoid_binary_cross_entropy,
}
OPTIMIZERS = {
    "adam": optim.adam(1e-3),
    "adam-all": optim.adam(
        0.01, 0.8, 0.99, 1e-4, norm_coefficient=0.01, norm_coefficient_post=1e-3, T=1
    ),
    "adagrad": optim.adagrad(0.05, decay_factor=0.01, norm_coefficient=0.01),
    "momentum": optim.momentum(0.05),
    "nesterov": optim.momentum(0.05, 0.8, 0.5, mode="nesterov", norm_coefficient=0.01),
}


def by_optax(proto, loss, optimizer, x, t, steps=STEPS, trainable=None):
    """The same training as an ordinary JAX loop; the weights and losses of all steps."""
    model = jaxonnx.load(proto)
    params = {n: v for n, v in model.params.items() if trainable is None or n in trainable}
    rest = {n: v for n, v in model.params.items() if n not in params}

    def objective(params):
        return loss(model.apply({**rest, **params}, x), t).mean()

    def step(carry, _):
        params, state = carry
        value, gradients = jax.value_and_grad(objective)(params)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    start = params, optimizer.init(params)
    (params, _), losses = jax.jit(lambda c: jax.lax.scan(step, c, length=steps))(start)
    return {**rest, **params}, losses


def by_file(written, x, t, steps=STEPS, state=None):
    training = jaxonnx.load(written).training
    losses = []
    state = training.state if state is None else state
    for _ in range(steps):
        state, outputs = training.step(state, {"x": x, "target": t})
        losses.append(outputs["loss"])
    return state, np.array(losses)


def assert_same_training(proto, loss, optimizer, x, t, rtol=1e-6, **settings):
    """Weights and losses agree to rounding; a weight near 0 to rounding of a typical one."""
    written = jaxonnx.add_training(proto, loss=loss, optimizer=optimizer, **settings)
    onnx.checker.check_model(written, full_check=True)
    state, losses = by_file(written, x, t)
    params, expected = by_optax(
        proto, LOSSES[loss], optimizer, x, t, trainable=settings.get("trainable")
    )
    np.testing.assert_allclose(losses, expected, rtol=10 * rtol)
    for name in state.keys() & params.keys():
        np.testing.assert_allclose(state[name], params[name], rtol=rtol, atol=rtol, err_msg=name)
    assert state["T"] == optimizer.first + STEPS
    return written, state, losses


@pytest.mark.deep
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    x, t = normal(16, 4), targets(True)
    loss = "softmax_cross_entropy_with_integer_labels"
    _, _, losses = assert_same_training(mlp(), loss, OPTIMIZERS[name], x, t)
    assert losses[-1] < losses[0]


@pytest.mark.deep
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss):
    proto = mlp("y = LogSoftmax(s)" if "Likelihood" in loss else "y = Identity(s)")
    t = targets("oftmax" in loss or "Likelihood" in loss)
    assert_same_training(proto, loss, optim.momentum(0.1), normal(16, 4), t)


def test_softmax_cross_entropy_of_sequences():
    """optax has the classes on the last axis, ONNX on axis 1."""
    proto = mlp()
    proto.graph.CopyFrom(
        onnx.parser.parse_graph("""
        g (float[N,5,4] x) => (float[N,5,3] y) { h = MatMul(x, A)
          y = MatMul(h, B) }""")
    )
    for name, value in {"A": normal(4, 8), "B": normal(8, 3)}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    x, t = normal(7, 5, 4), np.arange(35).reshape(7, 5) % 3
    loss = "softmax_cross_entropy_with_integer_labels"
    assert_same_training(proto, loss, optim.momentum(0.05), x, t)
    written = jaxonnx.add_training(
        proto, loss="SoftmaxCrossEntropyLoss", optimizer=optim.momentum(0.05)
    )
    target = written.training_info[0].algorithm.input[0].type.tensor_type
    assert [d.dim_param or d.dim_value for d in target.shape.dim] == ["N", 3]


@pytest.mark.parametrize("open_dimension", [None, -1])
def test_the_target_of_an_open_batch_is_open(open_dimension):
    proto = mlp()
    dim = proto.graph.output[0].type.tensor_type.shape.dim[0]
    dim.Clear()
    if open_dimension:
        dim.dim_value = open_dimension
    written = jaxonnx.add_training(proto, loss="squared_error", optimizer=optim.adam(1e-3))
    target = written.training_info[0].algorithm.input[0].type.tensor_type
    assert not target.shape.dim[0].WhichOneof("value")
    assert target.shape.dim[1].dim_value == 3


SCHEDULES = {
    "constant": optax.constant_schedule(0.05),
    "step": optax.piecewise_constant_schedule(0.1, {20: 0.5, 60: 0.1}),
    "exponential": optax.exponential_decay(0.1, 10, 0.8, staircase=True, end_value=0.01),
    "polynomial": optax.polynomial_schedule(0.1, 0.01, 2, 50, 10),
    "warm-up cosine": optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 80, 1e-3),
    "warm-up exponential": optax.warmup_exponential_decay_schedule(0.0, 0.1, 10, 20, 0.5),
    "restarts": optax.sgdr_schedule(
        [{"init_value": 0.0, "peak_value": 0.1, "warmup_steps": 5, "decay_steps": 40}] * 3
    ),
    "a loop": lambda n: 0.1 * jax.lax.fori_loop(0, 3, lambda i, x: x / 2, 1 + 0.1 * n),
    "a table": lambda n: jnp.float32([0.1, 0.05, 0.01])[jnp.minimum(n, 2)],
    "own": lambda count: 0.1 / jnp.sqrt(1.0 + count) + 0.01 * (jnp.sin(count) ** 2),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_become_part_of_the_file(name):
    x, t = normal(16, 4), targets(False)
    optimizer = optim.momentum(SCHEDULES[name])
    written, *_ = assert_same_training(mlp(), "squared_error", optimizer, x, t)
    domains = {n.domain for n in written.training_info[0].algorithm.node}
    assert domains == {"", "ai.onnx.preview.training"}


def test_a_schedule_that_onnx_cannot_say_is_refused():
    rate = jax.ShapeDtypeStruct((), np.float32)
    optimizer = optim.momentum(lambda n: jax.pure_callback(lambda n: np.float32(n), rate, n))
    with pytest.raises(jaxonnx.UnsupportedError, match=r"'pure_callback' in .*add_training.py"):
        jaxonnx.add_training(mlp(), loss="squared_error", optimizer=optimizer)


def test_a_schedule_may_be_computed_again():
    x, t = normal(16, 4), targets(False)
    optimizer = optim.momentum(jax.checkpoint(optax.cosine_decay_schedule(0.1, 10)))
    assert_same_training(mlp(), "squared_error", optimizer, x, t)


def test_schedule_counts_updates_even_if_T_starts_at_one():
    x, t = normal(16, 4), targets(False)
    optimizer = optim.adam(lambda count: jnp.where(count < 3, 0.0, 0.01), T=1)
    written = jaxonnx.add_training(mlp(), loss="squared_error", optimizer=optimizer)
    start = jaxonnx.load(written).training.state
    state, _ = by_file(written, x, t, 3)
    np.testing.assert_array_equal(state["A"], start["A"])
    assert np.any(by_file(written, x, t, 4)[0]["A"] != start["A"])


def test_double():
    with jax.enable_x64(True):
        x, t = normal(16, 4).astype(np.float64), targets(False, dtype=np.float64)
        proto = mlp(dtype="double")
        assert_same_training(proto, "squared_error", optim.adam(0.01), x, t, rtol=1e-10)


@pytest.mark.deep
def test_convolutional_network():
    x = normal(16, 1, 8, 8)
    written, _, losses = assert_same_training(
        cnn(),
        "softmax_cross_entropy_with_integer_labels",
        optim.adam(0.01, T=1),
        x,
        targets(True),
        rtol=1e-5,
        trainable=["conv", "conv_bias", "scale", "shift", "B", "b"],
    )
    assert losses[-1] < losses[0]
    variables = set(jaxonnx.load(written).training.variables)
    assert not variables & {"mean", "var"}


def test_trainable():
    x, t = normal(16, 4), targets(True)
    loss = "softmax_cross_entropy_with_integer_labels"
    _, state, _ = assert_same_training(mlp(), loss, optim.adam(0.01), x, t, trainable=["B", "b"])
    assert set(state) == {"B", "b", "V.B", "V.b", "H.B", "H.b", "T"}


@pytest.mark.parametrize("make", [mlp, cnn])
def test_inference_in_onnxruntime(make):
    proto = make()
    written = jaxonnx.add_training(
        proto,
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optim.adam(SCHEDULES["warm-up cosine"]),
        init="he",
    )
    assert written.graph == proto.graph
    x = normal(5, 4) if make is mlp else normal(5, 1, 8, 8)
    session = onnxruntime.InferenceSession(written.SerializeToString())
    np.testing.assert_allclose(
        session.run(None, {"x": x})[0], jaxonnx.load(proto)(x), rtol=1e-4, atol=1e-5
    )


def test_resume_from_the_file_alone(tmp_path):
    x, t = normal(16, 4), targets(True)
    written = jaxonnx.add_training(
        mlp(),
        loss="SoftmaxCrossEntropyLoss",
        optimizer=optim.adam(SCHEDULES["warm-up cosine"], norm_coefficient=0.01),
    )
    whole, _ = by_file(written, x, t, 20)
    half, _ = by_file(written, x, t, 12)
    onnx.save(jaxonnx.load(written).training.to_onnx(half), tmp_path / "half.onnx")
    resumed, _ = by_file(tmp_path / "half.onnx", x, t, 8)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


# Initialization.


def test_initialization_resets_the_optimizer():
    written = jaxonnx.add_training(mlp(), loss="squared_error", optimizer=optim.adam(0.01, T=1))
    training = jaxonnx.load(written).training
    state, _ = by_file(written, normal(16, 4), targets(False), 5)
    trained = jaxonnx.load(training.to_onnx(state)).training
    fresh = trained.init(jax.random.key(0))
    assert fresh["T"] == 1
    np.testing.assert_array_equal(fresh["V.A"], np.zeros((4, 8)))
    np.testing.assert_array_equal(fresh["A"], state["A"])  # init=None: weights stay


def test_train_from_scratch_from_the_file_alone():
    proto = cnn()
    for tensor in proto.graph.initializer:
        if tensor.name in ("conv", "B", "scale"):
            zeros = np.zeros(tensor.dims, np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(zeros, tensor.name))
    written = jaxonnx.add_training(
        proto,
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optim.adam(0.02, T=1),
        trainable=["conv", "conv_bias", "scale", "shift", "B", "b"],
        init="he",
    )
    state = jaxonnx.load(written).training.init(jax.random.key(1))
    np.testing.assert_array_equal(state["scale"], np.ones(6))
    np.testing.assert_array_equal(state["shift"], np.zeros(6))
    t = np.arange(32) % 3
    rows, columns = np.indices((8, 8)) % 2
    patterns = np.stack([rows, columns, rows ^ columns]).astype(np.float32)
    x = normal(32, 1, 8, 8) / 5 + patterns[t][:, None]
    _, losses = by_file(written, x, t, 60, state)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("init", "fan", "distribution"),
    [
        ("glorot", 320 + 640, "uniform"),
        ("he", 320, "normal"),
        ("normal", None, "normal"),
        ({"W": "he", "B": "zeros"}, 320, "normal"),
    ],
)
def test_distributions(init, fan, distribution):
    """Of a 640x320 weight that is transposed: 320 inputs, 640 outputs."""
    proto = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["": 17]>
    g (float[N,320] x) => (float[N,640] y) { y = Gemm<transB = 1>(x, W, B) }""")
    sevens = np.full(640, 7, np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(sevens, "B"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(normal(640, 320), "W"))
    written = jaxonnx.add_training(
        proto, loss="squared_error", optimizer=optim.momentum(0.1), init=init
    )
    state = jaxonnx.load(written).training.init(jax.random.key(0))
    w = np.asarray(state["W"])
    if init == "glorot":
        limit = np.sqrt(6 / fan)
        assert np.abs(w).max() <= limit
        np.testing.assert_allclose(w.std(), limit / np.sqrt(3), rtol=1e-2)
    else:
        std = 0.01 if fan is None else np.sqrt(2 / fan)
        np.testing.assert_allclose(w.std(), std, rtol=1e-2)
        assert np.abs(w).max() > 3 * std
    assert abs(w.mean()) < 1e-3
    np.testing.assert_array_equal(state["B"], np.zeros(640))


# Errors.


@pytest.mark.parametrize(
    ("proto", "settings", "message"),
    [
        (mlp(), {"loss": "hinge"}, "loss must be 'softmax.*got 'hinge'"),
        (mlp(), {"optimizer": optax.adam(0.1)}, "must be jaxonnx.optim"),
        (mlp(), {"init": "orthogonal"}, "init must be 'glorot'.*got 'orthogonal'"),
        (mlp(), {"init": {"C": "he"}}, "matches none of A, a, B, b"),
        (mlp(), {"trainable": ["C"]}, "'C'"),
        (mlp(opset=11), {}, r"opset 11, .* jaxonnx.convert\(model, opset=12\)"),
        (mlp(dtype="float16"), {}, "'A' is float16"),
        (
            jaxonnx.add_training(mlp(), loss="squared_error", optimizer=optim.adam(0.1)),
            {},
            "carries training_info already",
        ),
    ],
)
def test_errors(proto, settings, message):
    settings = {"loss": "squared_error", "optimizer": optim.momentum(0.1), **settings}
    with pytest.raises(jaxonnx.Error, match=message):
        jaxonnx.add_training(proto, **settings)


def test_names_that_the_network_uses_are_avoided():
    proto = mlp()
    proto.graph.node[0].output[0] = proto.graph.node[1].input[0] = "target"
    proto.graph.node[1].output[0] = proto.graph.node[2].input[0] = "loss"
    written = jaxonnx.add_training(proto, loss="squared_error", optimizer=optim.adam(0.1))
    onnx.checker.check_model(written)
    training = jaxonnx.load(written).training
    batch = {"x": normal(16, 4), "target_2": targets(False)}
    state, outputs = training.step(training.state, batch)
    assert "loss_2" in outputs
    assert np.any(state["A"] != training.state["A"])


# jaxonnx.train on a file that carries its training.


def test_train_follows_the_file(tmp_path):
    """Its algorithm, loss, optimizer and count; two runs in a row are one run."""
    x, t = normal(64, 4), targets(True, 64)
    written = jaxonnx.add_training(
        mlp(),
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optim.adam(SCHEDULES["warm-up cosine"]),
    )
    batches = [(x[i : i + 16], t[i : i + 16]) for i in range(0, 64, 16)]
    onnx.save(written, tmp_path / "net.onnx")
    whole = jaxonnx.train(tmp_path / "net.onnx", batches, epochs=6, validation=(x, t))
    assert len(whole.history.losses) == 24
    assert whole.history.epochs[-1]["validation_loss"] < whole.history.losses[0]
    half = jaxonnx.train(tmp_path / "net.onnx", batches, epochs=3)
    half.model.save(tmp_path / "half.onnx")
    resumed = jaxonnx.train(tmp_path / "half.onnx", batches, epochs=3)
    assert half.history.losses + resumed.history.losses == whole.history.losses
    state = resumed.model.training.state
    assert state["T"] == 24
    jax.tree.map(np.testing.assert_array_equal, state, whole.model.training.state)
    np.testing.assert_array_equal(resumed.model.params["A"], state["A"])


def test_print_shows_the_training():
    written = jaxonnx.add_training(mlp(), loss="squared_error", optimizer=optim.adam(0.1, T=1))
    shown = " ".join(str(jaxonnx.load(written)).split())
    assert "training by Gradient, Adam; updates 13 tensors; takes target; T = 1" in shown


@pytest.mark.deep
def test_train_equals_train_with_the_same_optimizer():
    x, t = normal(64, 4), targets(True, 64)
    settings = {
        "loss": "softmax_cross_entropy_with_integer_labels",
        "optimizer": optim.adam(1e-3, T=1),
    }
    data = {"epochs": 25, "batch_size": 16, "seed": 3}
    ours = jaxonnx.train(jaxonnx.add_training(mlp(), **settings), (x, t), **data)
    theirs = jaxonnx.train(mlp(), (x, t), **settings, **data)
    np.testing.assert_allclose(ours.history.losses, theirs.history.losses, rtol=1e-5)
    for name, value in theirs.model.params.items():
        np.testing.assert_allclose(
            ours.model.params[name], value, rtol=1e-6, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("stream", [False, True], ids=["arrays", "stream"])
def test_train_runs_a_short_batch_at_its_own_size(stream):
    """The examples that fill it were counted: in the loss, the gradients and the validation."""
    x, t = normal(21, 4), targets(False, 21)
    rule = optim.momentum(0.5)
    written = jaxonnx.add_training(mlp(), loss="squared_error", optimizer=rule)
    if stream:
        data = [(x[i : i + 8], t[i : i + 8]) for i in range(0, 21, 8)]
        settings = {}
    else:
        data, settings = (x, t), {"batch_size": 8, "seed": 3}
    ours = jaxonnx.train(written, data, epochs=2, validation=(x, t), **settings)
    mean = float(np.square(np.asarray(ours.model(x)) - t).mean())
    assert ours.history.epochs[-1]["validation_loss"] == pytest.approx(mean, rel=1e-5)
    # the same run by optax, whose loss has a value for each example and so leaves out the fill
    theirs = jaxonnx.train(
        mlp(), data, epochs=2, loss="squared_error", optimizer=rule, validation=(x, t), **settings
    )
    np.testing.assert_allclose(ours.history.losses, theirs.history.losses, rtol=1e-5)
    assert ours.history.epochs[-1]["loss"] == pytest.approx(
        theirs.history.epochs[-1]["loss"], rel=1e-5
    )
    for name, value in theirs.model.params.items():
        np.testing.assert_allclose(ours.model.params[name], value, rtol=1e-5, atol=1e-6)


def test_train_leaves_out_examples_of_weight_0():
    x, t = normal(16, 4), targets(False, 16)
    written = jaxonnx.add_training(mlp(), loss="squared_error", optimizer=optim.momentum(0.5))
    counts = np.arange(16) % 3 > 0
    ours = jaxonnx.train(written, (x, t, counts.astype(np.float32)), batch_size=16)
    training = jaxonnx.load(written).training
    state, outputs = training.step(training.state, {"x": x[counts], "target": t[counts]})
    assert ours.history.losses == pytest.approx([float(outputs["loss"])], rel=1e-6)
    np.testing.assert_allclose(ours.model.params["A"], state["A"], rtol=1e-5, atol=1e-6)
    # in a loop of one's own their loss is NaN, and nothing counts where all weights are 0
    one = jaxonnx.training.step(written)
    _, (loss, finite) = one.update(one.init(), (x, t, counts.astype(np.float32)))
    assert (np.isnan(loss), finite) == (True, 0)
    state, (_, finite) = one.update(one.init(), (x, t, np.zeros(16, np.float32)))
    assert (finite, state.taken, state.params["T"]) == (1, 0, 0)


@pytest.mark.parametrize("where", ["file", "target", "mesh"])
@pytest.mark.parametrize("short", ["data", "validation", "stream"])
def test_train_refuses_a_short_batch_of_a_fixed_size(where, short):
    """The algorithm has no weights, so that the fill would count."""
    proto = mlp()
    for value in (*proto.graph.input, *proto.graph.output) if where == "file" else ():
        value.type.tensor_type.shape.dim[0].dim_value = 8
    written = jaxonnx.add_training(proto, loss="squared_error", optimizer=optim.adam(0.1))
    if where == "target":
        (target,) = written.training_info[0].algorithm.input
        target.type.tensor_type.shape.dim[0].dim_value = 8
    x, t = normal(21, 4), targets(False, 21)
    settings = {"mesh": "all"} if where == "mesh" else {}
    data = (x, t) if short == "data" else (x[:16], t[:16])
    if short == "validation":
        settings["validation"] = x, t
    elif short == "stream":
        data = [(x[:8], t[:8]), (x[8:13], t[8:13])]
    with pytest.raises(jaxonnx.Error, match="batches of 8, of which one has 5: pass data of a m"):
        jaxonnx.train(
            written, data, epochs=1, batch_size=None if short == "stream" else 8, **settings
        )
    if short == "data":
        result = jaxonnx.train(written, (x[:16], t[:16]), batch_size=8, **settings)
        assert len(result.history.losses) == 2


def test_train_stops_at_a_loss_that_is_not_finite():
    x, t = normal(32, 4), targets(False, 32)
    x[16:] = np.nan
    written = jaxonnx.add_training(mlp(), loss="squared_error", optimizer=optim.adam(0.01))
    batches = [(x[:16], t[:16]), (x[16:], t[16:])]
    with pytest.warns(UserWarning, match="not finite at step 2"):
        result = jaxonnx.train(written, batches)
    assert result.model.training.state["T"] == 1
    assert np.isfinite(result.model.params["A"]).all()


@pytest.mark.parametrize(
    ("proto", "settings", "message"),
    [
        (mlp(), {}, "needs integer labels; they are float32.*loss='squared_error'"),
        ("carrying", {"sparsity": "2:4"}, "go with loss= and optimizer="),
        ("carrying", {"data": (normal(4, 4), {"t": targets(False, 4)})}, "algorithm takes target"),
    ],
)
def test_train_without_a_loss(proto, settings, message):
    if proto == "carrying":
        proto = jaxonnx.add_training(mlp(), loss="squared_error", optimizer=optim.adam(0.1))
    settings = {"data": (normal(4, 4), targets(False, 4)), **settings}
    with pytest.raises(jaxonnx.Error, match=message):
        jaxonnx.train(proto, **settings)
