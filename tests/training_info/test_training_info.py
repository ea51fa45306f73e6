"""training_info executed: every rule of IR.md and of onnx.proto, and whole training runs."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import pytest

import jaxonnx

OPSETS = [
    onnx.helper.make_opsetid("", 22),
    onnx.helper.make_opsetid("ai.onnx.preview.training", 1),
]


def graph(text):
    for name in ("Gradient", "Adam", "Adagrad", "Momentum"):
        text = text.replace(f" {name}", f" ai.onnx.preview.training.{name}")
    return onnx.parser.parse_graph(text)


def info(algorithm="", update=None, initialization="", initial=None):
    """A TrainingInfoProto from graphs in ONNX's text format and bindings."""
    proto = onnx.TrainingInfoProto()
    if algorithm:
        proto.algorithm.CopyFrom(graph(algorithm))
    if initialization:
        proto.initialization.CopyFrom(graph(initialization))
    for field, bindings in (
        (proto.update_binding, update),
        (proto.initialization_binding, initial),
    ):
        for key, value in bindings.items() if isinstance(bindings, dict) else bindings or ():
            field.add(key=key, value=value)
    return proto


def model(main, *infos):
    proto = onnx.helper.make_model(graph(main), opset_imports=OPSETS, ir_version=10)
    proto.training_info.extend(infos)
    return proto


def training(main, *infos):
    return jaxonnx.load(model(main, *infos)).training


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def close(got, want, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


# y = x w + b, squared loss, plain gradient descent; the step counts itself.
LINE = """
line (float[N,2] x) => (float[N] y) <float[2] w = {1, 2}, float b = {0.5}> {
  xw = MatMul(x, w)
  y = Add(xw, b)
}"""
DESCENT = """
descent (float[N] t) => (float loss, float[2] w1, float b1, int64 n1)
<float rate = {0.1}, int64 n = {0}, int64 one = {1}> {
  e = Sub(y, t)
  e2 = Mul(e, e)
  loss = ReduceMean<keepdims = 0>(e2)
  dw, db = Gradient<xs = ["w", "b"], zs = ["x", "t"], y = "loss">(w, b, x, t)
  rdw = Mul(rate, dw)
  rdb = Mul(rate, db)
  w1 = Sub(w, rdw)
  b1 = Sub(b, rdb)
  n1 = Add(n, one)
}"""
UPDATE = {"w": "w1", "b": "b1", "n": "n1"}
RESET = """
reset () => (float[2] w0, float b0, int64 n0) {
  w0 = RandomNormal<shape = [2], scale = 0.1>()
  b0 = Constant<value_float = 0.25>()
  n0 = Constant<value_int = 0>()
}"""


def line_data(n=32):
    x = normal(n, 2)
    return {"x": x, "t": x @ np.float32([3, -2]) + np.float32(0.7)}


def line_loss(w, b, x, t):
    return ((x @ w + b - t) ** 2).mean()


# Executing.


def test_step_is_the_algorithm_on_the_combined_graph():
    """The algorithm reads the inference tensor y, Gradient cuts through the inference graph."""
    ours = training(LINE, info(DESCENT, UPDATE))
    data = line_data()
    state, outputs = ours.step(ours.state, data)
    w, b = np.float32([1, 2]), np.float32(0.5)
    loss, (dw, db) = jax.value_and_grad(line_loss, (0, 1))(w, b, data["x"], data["t"])
    close(outputs["loss"], loss)
    close(outputs["y"], data["x"] @ w + b)
    close(state["w"], w - 0.1 * dw)
    close(state["b"], b - 0.1 * db)
    assert state["n"] == 1
    assert set(outputs) == {"y", "loss", "w1", "b1", "n1"}


def test_state_is_the_bound_initializers_and_nothing_else():
    ours = training(LINE, info(DESCENT, UPDATE))
    assert set(ours.variables) == set(ours.state) == {"w", "b", "n"}
    assert ours.inputs == (("x", "t"),)
    assert ours.outputs == (("y", "loss", "w1", "b1", "n1"),)
    assert ours.metrics == ("loss",)


def test_variables_are_preinitialized_from_the_file():
    ours = training(LINE, info(DESCENT, UPDATE))
    close(ours.state["w"], [1, 2])
    close(ours.init(jax.random.key(0))["w"], [1, 2])


def test_training_is_pure_and_inference_uses_the_state():
    ours = training(LINE, info(DESCENT, UPDATE))
    data = line_data()
    first = ours.state
    before = jax.tree.map(np.array, first)
    state, _ = ours.step(first, data)
    again, _ = ours.step(first, data)
    jax.tree.map(np.testing.assert_array_equal, before, first)
    jax.tree.map(np.testing.assert_array_equal, state, again)
    y = ours.inference(state, {"x": data["x"]})
    assert set(y) == {"y"}
    close(y["y"], data["x"] @ state["w"] + state["b"])


def test_linear_regression_finds_the_line():
    ours = training(LINE, info(DESCENT, UPDATE, RESET, {"w": "w0", "b": "b0", "n": "n0"}))
    data = line_data()
    state = ours.init(jax.random.key(3))

    def step(state, _):
        state, outputs = ours.step(state, data)
        return state, outputs["loss"]

    state, losses = jax.jit(lambda s: jax.lax.scan(step, s, length=200))(state)
    close(state["w"], [3, -2], rtol=1e-3)
    close(state["b"], 0.7, rtol=1e-3)
    assert state["n"] == 200
    assert losses[-1] < 1e-6 < losses[0]


def test_initialization_with_random_operators():
    """Every variable named by a binding is set anew, the others return to their initializers."""
    ours = training(LINE, info(DESCENT, UPDATE, RESET, {"w": "w0", "n": "n0"}))
    one, same, other = (ours.init(jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(one["w"], same["w"])
    assert not np.allclose(one["w"], other["w"])
    assert np.abs(one["w"]).max() < 1
    close(one["b"], 0.5)
    assert one["n"] == 0


def test_a_variable_may_be_bound_by_the_initialization_only():
    ours = training(LINE, info(DESCENT, {"w": "w1"}, RESET, {"b": "b0"}))
    assert set(ours.variables) == {"w", "b"}
    state, _ = ours.step(ours.init(jax.random.key(0)), line_data())
    close(state["b"], 0.25)


def test_initialization_may_set_initializers_of_the_algorithm():
    """onnx.proto: "a use case is resetting the number of training iteration to zero"."""
    ours = training(LINE, info(DESCENT, UPDATE, RESET, {"n": "n0"}))
    state, _ = ours.step(ours.state, line_data())
    assert state["n"] == 1
    assert ours.init(jax.random.key(0))["n"] == 0


def test_empty_training_info_changes_nothing():
    ours = training(LINE, info())
    state, outputs = ours.step(ours.init(jax.random.key(0)), {"x": normal(2, 2)})
    assert state == {}
    assert set(outputs) == {"y"}


def test_running_statistics_of_batch_normalization():
    """A file in training mode binds its running statistics itself, also after Model.save."""
    main = """
    g (float[8,2] x) => (float[8,2] y, float[2] m1, float[2] v1)
    <float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] m = {0, 0}, float[2] v = {1, 1}> {
      y, m1, v1 = BatchNormalization<training_mode = 1, momentum = 0.75>(x, s, b, m, v)
    }"""
    loaded = jaxonnx.load(model(main, info(update={"m": "m1", "v": "v1"})))
    x = normal(8, 2) + 3
    for ours in (loaded.training, jaxonnx.load(loaded.to_onnx()).training):
        state, outputs = ours.step(ours.state, {"x": x})
        close(outputs["y"].mean(0), [0, 0])
        close(state["m"], 0.25 * x.mean(0))
        close(state["v"], 0.75 + 0.25 * x.var(0))


def test_update_from_an_output_of_the_inference_graph():
    """The values of an update binding may be outputs of ModelProto.graph."""
    main = "g (float[2] x) => (float[2] m1) <float[2] m = {1, 1}> { m1 = Add(m, x) }"
    ours = training(main, info(update={"m": "m1"}))
    state, _ = ours.step(ours.state, {"x": np.float32([1, 2])})
    close(state["m"], [2, 3])


def test_identity_over_a_variable_follows_it():
    main = """
    g (float[2] x) => (float[2] y) <float[2] w = {1, 1}> { v = Identity(w)
      y = Mul(v, x) }"""
    algorithm = "a () => (float[2] w1) { w1 = Add(w, y) }"
    ours = training(main, info(algorithm, {"w": "w1"}))
    x = np.float32([1, 2])
    state, _ = ours.step(ours.state, {"x": x})
    close(ours.inference(state, {"x": x})["y"], [2, 6])


def test_random_operators_in_a_step():
    main = """
    g (float[64] x) => (float[64] y) <float ratio = {0.5}, bool on = {1}> {
      y = Dropout(x, ratio, on)
    }"""
    ours = training(main, info("a () => (float s) { s = ReduceSum<keepdims = 0>(y) }"))
    batch = {"x": np.ones(64, np.float32)}
    drawn = [ours.step({}, batch, key=jax.random.key(k))[1]["y"] for k in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_sparse_initializer_of_an_algorithm():
    """The combined graph has the sparse initializers of both graphs, too."""
    proto = model(MINIMAL, info("a () => (float[2] w1) { w1 = Add(w, s) }", {"w": "w1"}))
    values = onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, [1], [5])
    where = onnx.helper.make_tensor("at", onnx.TensorProto.INT64, [1], [1])
    sparse = onnx.helper.make_sparse_tensor(values, where, [2])
    proto.training_info[0].algorithm.sparse_initializer.append(sparse)
    ours = jaxonnx.load(proto).training
    state, _ = ours.step(ours.state, {"x": np.zeros(2, np.float32)})
    close(state["w"], [1, 6])


def test_external_data_of_an_algorithm(tmp_path):
    proto = model(LINE, info(ADAM, ADAM_UPDATE))
    (moment,) = (t for t in proto.training_info[0].algorithm.initializer if t.name == "hw")
    moment.raw_data = np.float32([1, 2]).tobytes()
    moment.ClearField("float_data")
    onnx.external_data_helper.set_external_data(moment, "moments.bin", 0, 8)
    (tmp_path / "moments.bin").write_bytes(moment.raw_data)
    moment.ClearField("raw_data")
    onnx.save(proto, tmp_path / "model.onnx")
    close(jaxonnx.load(tmp_path / "model.onnx").training.state["hw"], [1, 2])
    with pytest.raises(jaxonnx.Error, match=r"moments\.bin"):
        jaxonnx.load(onnx.load(tmp_path / "model.onnx", load_external_data=False))


# Several TrainingInfoProtos.

DOUBLE = "double () => (float a1, float seen) { a1 = Add(a, a)\n seen = Identity(y) }"
COPY = "copy () => (float b1, float seen) { b1 = Identity(a)\n seen = Identity(y) }"
PAIR = "pair () => (float y) <float a = {3}, float b = {1}> { y = Mul(a, b) }"


def test_algorithms_run_in_order_with_bindings_applied_in_between():
    ours = training(PAIR, info(DOUBLE, {"a": "a1"}), info(COPY, {"b": "b1"}))
    state, outputs = ours.step(ours.state, {})
    assert (state["a"], state["b"]) == (6, 6)
    assert outputs["seen"] == 6  # the second algorithm's, computed from the new a
    assert ours.inference(state, {})["y"] == 36
    ours = training(PAIR, info(COPY, {"b": "b1"}), info(DOUBLE, {"a": "a1"}))
    state, _ = ours.step(ours.state, {})
    assert (state["a"], state["b"]) == (6, 3)


def test_two_algorithms_may_update_one_variable():
    """IR.md asks for unique keys in each binding; in order, two updates are no contradiction."""
    ours = training(PAIR, info(DOUBLE, {"a": "a1"}), info(DOUBLE, {"a": "a1"}))
    state, _ = ours.step(ours.state, {})
    assert state["a"] == 12


def test_one_algorithm_alone():
    ours = training(PAIR, info(DOUBLE, {"a": "a1"}), info(COPY, {"b": "b1"}))
    state, outputs = ours.step(ours.state, {}, algorithm=1)
    assert (state["a"], state["b"]) == (3, 3)
    assert set(outputs) == {"y", "b1", "seen"}
    with pytest.raises(jaxonnx.Error, match="algorithm is 2; the model has 2"):
        ours.step(ours.state, {}, algorithm=2)


def test_initializations_run_in_order():
    """The last binding wins; each initialization draws its own numbers."""
    draw = "i () => (float r) { r = RandomUniform<shape: ints = []>() }"
    ours = training(
        PAIR,
        info(initialization=draw, initial={"a": "r", "b": "r"}),
        info(initialization=draw, initial={"b": "r"}),
    )
    state = ours.init(jax.random.key(0))
    assert state["a"] != state["b"]


def test_algorithms_share_a_variable_by_name():
    count = "count () => (float n1) <float n = {0}, float one = {1}> { n1 = Add(n, one) }"
    use = "use () => (float b1) <float n = {0}, float two = {2}> { b1 = Mul(n, two) }"
    ours = training(PAIR, info(count, {"n": "n1"}), info(use, {"b": "b1"}))
    state, _ = ours.step(ours.state, {})
    assert (state["n"], state["b"]) == (1, 2)


def test_constants_of_algorithms_are_their_own():
    one = "one () => (float a1) <float c = {1}> { a1 = Add(a, c) }"
    two = "two () => (float b1) <float c = {2}> { b1 = Add(b, c) }"
    ours = training(PAIR, info(one, {"a": "a1"}), info(two, {"b": "b1"}))
    state, _ = ours.step(ours.state, {})
    assert (state["a"], state["b"]) == (4, 3)


# The rules.

MINIMAL = "g (float[2] x) => (float[2] y) <float[2] w = {1, 1}> { y = Mul(w, x) }"
STEP = "a () => (float[2] w1) { w1 = Add(w, y) }"
START = "i () => (float[2] w0) { w0 = Constant<value_floats = [0.0, 0.0]>() }"


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([], "carries no training_info"),
        (
            [info(STEP, [("w", "w1"), ("w", "w1")])],
            r"training_info\[0\].update_binding assigns 'w' twice",
        ),
        (
            [info(initialization=START, initial=[("w", "w0"), ("w", "w0")])],
            "initialization_binding assigns 'w' twice",
        ),
        ([info(STEP, {"y": "w1"})], "'y', which is not an initializer"),
        ([info(STEP, {"v": "w1"})], "'v', which is not an initializer"),
        ([info(initialization=START, initial={"x": "w0"})], "'x', which is not an initializer"),
        ([info(STEP, {"w": "w2"})], "'w2' to 'w', which is not an output of the graph"),
        ([info(STEP, {"w": "w1"}, START, {"w": "w1"})], "initialization_binding assigns 'w1'"),
        ([info(initial={"w": "w0"})], "'w0' to 'w', which is not an output"),
        (
            [info(STEP), info("b () => (float[2] z) <float[2] v = {1, 1}> { z = Add(v, w1) }")],
            "reads 'w1'",
        ),
        (
            [info(initialization="i (float[2] x) => (float[2] w0) { w0 = Neg(x) }")],
            "initialization graph has inputs",
        ),
        ([info(initialization="i () => (float[2] w0) { w0 = Neg(w) }")], "reads 'w'"),
        (
            [info("a () => (float[2] z) <float[2] w = {1, 1}> { z = Neg(w) }")],
            r"initializers \['w'\] of the algorithm are initializers of the main graph too",
        ),
        ([info("a (float[2] x) => (float[2] z) { z = Neg(x) }")], r"inputs \['x'\]"),
        ([info("a () => (float[2] y) { y = Neg(w) }")], "'y', which is already defined"),
        (
            [
                info("a () => (float n1) <float n = {0}> { n1 = Neg(n) }", {"n": "n1"}),
                info("a () => (float n1) <float n = {1}> { n1 = Neg(n) }", {"n": "n1"}),
            ],
            "'n' different values",
        ),
        ([info("a () => (float z) { z = Unheard(w) }")], "Unheard"),
    ],
)
def test_files_against_the_rules(infos, message):
    with pytest.raises(jaxonnx.Error, match=message):
        _ = training(MINIMAL, *infos)


def test_inference_does_not_see_the_algorithm():
    main = "g (float[2] x) => (float[2] y) <float[2] w = {1, 1}> { y = Mul(w1, x) }"
    with pytest.raises(jaxonnx.Error, match="reads 'w1'"):
        training(main, info(STEP, {"w": "w1"}))


def test_shapes_and_types_of_bound_values():
    algorithm = "a () => (float[1,2] w1) <int64[2] s = {1, 2}> { w1 = Reshape(w, s) }"
    ours = training(MINIMAL, info(algorithm, {"w": "w1"}))
    with pytest.raises(jaxonnx.Error, match=r"'w1' \(float32\[1, 2\]\) is bound to 'w'"):
        ours.step(ours.state, {"x": np.ones(2, np.float32)})
    algorithm = "a () => (int32[2] w1) { w1 = Cast<to = 6>(w) }"
    ours = training(MINIMAL, info(algorithm, {"w": "w1"}))
    with pytest.raises(jaxonnx.Error, match="int32"):
        ours.step(ours.state, {"x": np.ones(2, np.float32)})


@pytest.mark.parametrize(
    ("state", "batch", "message"),
    [
        ({}, {"x": np.ones(2)}, r"state has the names \[\]; missing \['w'\]"),
        ({"w": 1, "v": 2}, {"x": np.ones(2)}, r"unknown \['v'\]"),
        ({"w": 1}, {}, r"batch has the names \[\]; missing \['x'\]"),
        ({"w": 1}, {"x": 1, "t": 2}, r"unknown \['t'\]"),
    ],
)
def test_names_of_state_and_batch(state, batch, message):
    ours = training(MINIMAL, info(STEP, {"w": "w1"}))
    with pytest.raises(jaxonnx.Error, match=message):
        ours.step(state, batch)


def test_types_and_shapes_of_a_batch():
    ours = training(LINE, info(DESCENT, UPDATE))
    data = line_data()
    with pytest.raises(jaxonnx.Error, match=r"input t: float32.* was given float16"):
        ours.step(ours.state, {"x": data["x"], "t": data["t"].astype(np.float16)})
    with pytest.raises(jaxonnx.Error, match="'N' was 32 in input 'x'"):
        ours.step(ours.state, {"x": data["x"], "t": data["t"][1:]})


# Resuming.

ADAM = """
adam (float[N] t) => (float loss, float[2] w1, float b1, float[2] vw1, float vb1,
  float[2] hw1, float hb1, int64 T1)
<float R = {0.05}, int64 T = {0}, int64 one = {1}, float[2] vw = {0, 0}, float vb = {0},
 float[2] hw = {0, 0}, float hb = {0}> {
  e = Sub(y, t)
  e2 = Mul(e, e)
  loss = ReduceMean<keepdims = 0>(e2)
  dw, db = Gradient<xs = ["w", "b"], zs = ["x", "t"], y = "loss">(w, b, x, t)
  w1, b1, vw1, vb1, hw1, hb1 = Adam(R, T, w, b, dw, db, vw, vb, hw, hb)
  T1 = Add(T, one)
}"""
ADAM_UPDATE = {n: f"{n}1" for n in ("w", "b", "vw", "vb", "hw", "hb", "T")}


def steps(ours, state, number):
    for _ in range(number):
        state, _ = ours.step(state, line_data())
    return state


def test_resume_from_the_file_alone(tmp_path):
    proto = model(LINE, info(ADAM, ADAM_UPDATE))
    whole = jaxonnx.load(proto).training
    ours = jaxonnx.load(proto).training
    saved = ours.to_onnx(steps(ours, ours.state, 7))
    onnx.checker.check_model(saved)
    onnx.save(saved, tmp_path / "half.onnx")
    resumed = jaxonnx.load(tmp_path / "half.onnx").training
    assert resumed.state["T"] == 7
    end = steps(resumed, resumed.state, 8)
    jax.tree.map(np.testing.assert_array_equal, end, steps(whole, whole.state, 15))
    written = {t.name: t for t in saved.training_info[0].algorithm.initializer}
    assert written["T"].data_type == onnx.TensorProto.INT64
    assert {t.name for t in saved.graph.initializer} == {"w", "b"}


def test_saved_file_infers_with_the_trained_weights():
    ours = training(LINE, info(ADAM, ADAM_UPDATE))
    state = steps(ours, ours.state, 3)
    x = line_data()["x"]
    y = jaxonnx.load(ours.to_onnx(state))(x)
    close(y, ours.inference(state, {"x": x})["y"])
    close(y, x @ state["w"] + state["b"])


def test_saving_keeps_everything_else():
    proto = model(LINE, info(DESCENT, UPDATE, RESET, {"w": "w0"}))
    proto.graph.initializer[0].doc_string = "weights"
    ours = jaxonnx.load(proto).training
    saved = ours.to_onnx(ours.state)
    for text in (proto, saved):
        for g in (text.graph, text.training_info[0].algorithm):
            for tensor in g.initializer:
                tensor.CopyFrom(
                    onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name)
                )
    assert saved == proto


# Whole runs.


def test_block_coordinate_descent():
    """Two TrainingInfoProtos, each minimising over one coordinate with the other fixed."""
    main = """
    f () => (float y) <float a = {0}, float b = {0}> {
      ab = Mul(a, b)
      a2 = Mul(a, a)
      b2 = Mul(b, b)
      squares = Add(a2, b2)
      bowl = Add(squares, ab)
      d = Sub(a, b)
      y = Sub(bowl, d)
    }"""

    def newton(x):
        return f"""
        newton () => (float {x}1) {{
          d{x} = Gradient<xs = ["{x}"], y = "y">({x})
          h{x} = Gradient<xs = ["{x}"], y = "d{x}">({x})
          s{x} = Div(d{x}, h{x})
          {x}1 = Sub({x}, s{x})
        }}"""

    ours = training(main, info(newton("a"), {"a": "a1"}), info(newton("b"), {"b": "b1"}))
    state, a, b = ours.state, 0.0, 0.0
    for _ in range(20):
        state, _ = ours.step(state, {})
        a = (1 - b) / 2
        b = (-1 - a) / 2
        close(state["a"], a)
        close(state["b"], b)
    close(state["a"], 1)
    close(state["b"], -1)


@pytest.mark.deep
def test_gan_with_two_optimizers():
    """Generator and discriminator in one file, each with its own Adam; the rest hand-written."""
    main = """
    generator (float[N,2] z) => (float[N,1] fake) <float[2,1] G = {0.5, -0.3}, float[1] c = {0}> {
      zG = MatMul(z, G)
      fake = Add(zG, c)
    }"""
    discriminator = """
      hf = Mul(fake, D)
      sf = Add(hf, e)
      hr = Mul(real, D)
      sr = Add(hr, e)
      lf = Softplus(sf)
      nr = Neg(sr)
      lr = Softplus(nr)
      l = Add(lf, lr)
      loss_d = ReduceMean<keepdims = 0>(l)
      dD, de = Gradient<xs = ["D", "e"], y = "loss_d">(D, e)
      D1, e1, vD1, ve1, hD1, he1 = Adam(R, T, D, e, dD, de, vD, ve, hD, he)
      T1 = Add(T, one)
    """
    states = "float[1] vD = {0}, float[1] ve = {0}, float[1] hD = {0}, float[1] he = {0}"
    first = info(
        f"""
        d (float[N,1] real) => (float loss_d, float[1] D1, float[1] e1, float[1] vD1, float[1] ve1,
          float[1] hD1, float[1] he1, int64 T1)
        <float[1] D = {{0.1}}, float[1] e = {{0}}, float R = {{0.02}}, int64 T = {{0}},
         int64 one = {{1}}, {states}> {{ {discriminator} }}""",
        {n: f"{n}1" for n in ("D", "e", "vD", "ve", "hD", "he", "T")},
    )
    second = info(
        """
        g () => (float loss_g, float[2,1] G1, float[1] c1, float[2,1] vG1, float[1] vc1,
          float[2,1] hG1, float[1] hc1)
        <float[1] D = {0.1}, float[1] e = {0}, float R = {0.01}, int64 T = {0},
         float[2,1] vG = {0, 0}, float[1] vc = {0}, float[2,1] hG = {0, 0}, float[1] hc = {0}> {
          hf = Mul(fake, D)
          sf = Add(hf, e)
          nf = Neg(sf)
          l = Softplus(nf)
          loss_g = ReduceMean<keepdims = 0>(l)
          dG, dc = Gradient<xs = ["G", "c"], zs = ["z"], y = "loss_g">(G, c, z)
          G1, c1, vG1, vc1, hG1, hc1 = Adam(R, T, G, c, dG, dc, vG, vc, hG, hc)
        }""",
        {n: f"{n}1" for n in ("G", "c", "vG", "vc", "hG", "hc")},
    )
    ours = training(main, first, second)
    state = ours.state
    g = {"G": jnp.array([[0.5], [-0.3]]), "c": jnp.zeros(1)}
    d = {"D": jnp.array([0.1]), "e": jnp.zeros(1)}
    # The generator's algorithm reads the count after the discriminator has raised it.
    adam_d, adam_g = jaxonnx.optim.adam(0.02), jaxonnx.optim.adam(0.01, T=1)
    state_d, state_g = adam_d.init(d), adam_g.init(g)

    def fake(g, z):
        return z @ g["G"] + g["c"]

    def score(d, x):
        return x * d["D"] + d["e"]

    def loss_d(d, g, z, real):
        return (jax.nn.softplus(score(d, fake(g, z))) + jax.nn.softplus(-score(d, real))).mean()

    def loss_g(g, d, z):
        return jax.nn.softplus(-score(d, fake(g, z))).mean()

    @jax.jit
    def by_hand(g, d, state_g, state_d, z, real):
        updates, state_d = adam_d.update(jax.grad(loss_d)(d, g, z, real), state_d, d)
        d = jax.tree.map(jnp.add, d, updates)
        updates, state_g = adam_g.update(jax.grad(loss_g)(g, d, z), state_g, g)
        return jax.tree.map(jnp.add, g, updates), d, state_g, state_d

    for i in range(40):
        z, real = normal(16, 2, seed=i), normal(16, 1, seed=i) + 2
        state, _ = ours.step(state, {"z": z, "real": real})
        g, d, state_g, state_d = by_hand(g, d, state_g, state_d, z, real)
    assert state["T"] == 40
    for name, value in {**g, **d}.items():
        close(state[name], value, rtol=1e-4, atol=1e-5)
    assert float(state["c"][0]) > 0.1  # the samples move towards the real ones
