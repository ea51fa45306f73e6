"""Inputs without examples, and networks of one example, trained as PyTorch trains them."""

import re

import jax
import numpy as np
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx
import jaxonnx.cli
from tests.support.paths import DATA
from tests.support.sweeps import sweep

SGD = {"optimizer": optax.sgd(0.05)}
LABELS = {"loss": "softmax_cross_entropy_with_integer_labels", **SGD}
RANGE = {"fmin": 50.0, "fmax": 800.0}


def stored(name):
    path = DATA / "inputs" / name
    with np.load(f"{path}.npz") as file:
        return jaxonnx.load(f"{path}.onnx"), dict(file)


def check(result, expected):
    np.testing.assert_allclose(result.history.losses, expected["losses"], rtol=2e-5)
    after = {n.removeprefix("after:"): x for n, x in expected.items() if n.startswith("after:")}
    found = {**result.model.state, **result.model.params}
    for name, value in after.items():
        assert result.changes[name] > 0
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=2e-6, err_msg=name)


def batches(*arrays):
    return [tuple(x[i : i + 4] for x in arrays) for i in (0, 4, 8)]


def test_numbers_that_hold_for_all_examples(tmp_path):
    model, data = stored("pitch")
    settings = {"loss": "squared_error", "fixed": RANGE, **SGD}
    whole = data["audio"], data["pitch"]
    result = jaxonnx.train(model, batches(*whole), validation=whole, **settings)
    check(result, data)
    # the saved file has all inputs, and is called with them or without
    assert [value.name for value in result.model.inputs] == ["audio", "fmin", "fmax"]
    y = result.model(data["audio"], np.float32(50), np.float32(800))
    predicted = result.model.predict(data["audio"], fixed=RANGE, batch_size=5)
    np.testing.assert_allclose(predicted, y, rtol=1e-5)
    mean = jaxonnx.evaluate(result.model, whole, loss="squared_error", fixed=RANGE)["loss"]
    np.testing.assert_allclose(mean, result.history.epochs[0]["validation_loss"], rtol=1e-5)
    np.testing.assert_allclose(mean, np.mean((y - data["pitch"]) ** 2), rtol=1e-5)
    # where a run resumes, they must be the same
    kept = {**settings, "checkpoint_dir": tmp_path}
    jaxonnx.train(model, batches(*whole), **kept)
    other = kept | {"fixed": RANGE | {"fmin": 60.0}}
    with pytest.raises(jaxonnx.TrainingError, match="fixed"):
        jaxonnx.train(model, batches(*whole), epochs=2, resume=True, **other)


def test_numbers_among_the_data_are_refused_with_the_way_out():
    model, data = stored("pitch")
    given = {"audio": data["audio"], "y": data["pitch"]}
    for data, words in (
        (given | RANGE, "fmin' is a scalar, .*; fixed={'fmin': value}"),
        (given, "'fmin', 'fmax' .fixed={'fmin': value}"),
    ):
        with pytest.raises(jaxonnx.TrainingError, match=words):
            jaxonnx.train(model, data, loss="squared_error")
    with pytest.raises(jaxonnx.InputError, match=r"no input 'f'; it has audio: .*fmin"):
        jaxonnx.train(model, given, loss="squared_error", fixed={"f": 1})
    with pytest.raises(jaxonnx.InputError, match=r"fmin: float32\[\] has rank 0, but .* \[2\]"):
        jaxonnx.train(model, given, loss="squared_error", fixed={"fmin": [1.0, 2.0]})


def test_values_of_each_example_and_of_one_element():
    text = """<ir_version: 9, opset_import: ["": 17]>
    g (float[n, 2] x, float[n, 2] shift, float[1] speed, int64 axis) => (float[n] y) {
      s = Add(x, shift) m = Mul(s, speed) c = CumSum(m, axis) y = ReduceSum <keepdims = 0> (c, a)
    }""".replace("{\n", "<int64[1] a = {1}> {\n", 1)
    model = jaxonnx.load(onnx.parser.parse_model(text))
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    fixed = model.with_fixed_inputs({"shift": [1.0, 2.0], "speed": 2, "axis": 1})
    expected = model(x, np.tile(np.float32([1, 2]), (3, 1)), np.float32([2]), np.int64(1))
    np.testing.assert_array_equal(fixed(x), expected)
    assert [value.name for value in fixed.inputs] == ["x"]
    assert fixed.to_onnx() == model.to_onnx()


def graphs(data):
    return [
        {"nodes": data[f"nodes{i}"], "edges": data[f"edges{i}"], "y": data[f"y{i}"]}
        for i in range(3)
    ]


def test_graphs_are_passed_whole():
    model, data = stored("graph")
    whole = {"nodes": None, "edges": None}
    given = graphs(data)
    with pytest.raises(jaxonnx.TrainingError, match=r"edges' 2, .* batching={'edges': None}"):
        jaxonnx.train(model, given, **LABELS)
    result = jaxonnx.train(model, given, batching=whole, validation=given, **LABELS)
    check(result, data)
    found = jaxonnx.evaluate(
        result.model, given, metrics="accuracy", loss=LABELS["loss"], batching=whole
    )
    outputs = [result.model(one["nodes"], one["edges"]) for one in given]
    right = np.concatenate([y.argmax(1) == g["y"] for y, g in zip(outputs, given, strict=True)])
    assert found["accuracy"] == pytest.approx(right.mean())
    assert found["loss"] == pytest.approx(result.history.epochs[0]["validation_loss"], rel=1e-5)


@pytest.mark.deep
def test_one_graph_is_one_batch_whose_weights_choose_nodes():
    model, data = stored("graph")
    one = graphs(data)[0]
    inputs, mask = {n: one[n] for n in ("nodes", "edges")}, np.float32([1, 1, 1, 0, 0, 0, 0])
    whole = {"nodes": None, "edges": None}
    result = jaxonnx.train(
        *(model, (inputs, one["y"], mask)),
        validation=(inputs, one["y"], 1 - mask),
        **({"batching": whole, "epochs": 3} | LABELS),
    )
    assert len(result.history.losses) == 3
    logits = np.asarray(model(one["nodes"], one["edges"]), np.float64)
    each = np.log(np.exp(logits).sum(1)) - logits[np.arange(7), one["y"]]
    assert result.history.losses[0] == pytest.approx(each[:3].mean(), rel=1e-5)
    with pytest.raises(jaxonnx.TrainingError, match=r"validation=0.2 is a share"):
        jaxonnx.train(model, (inputs, one["y"]), batching=whole, validation=0.2, **LABELS)
    for wrong, words in (({"edges": 1}, "without an axis"), ({"edge": None}, "edge': None}")):
        with pytest.raises(jaxonnx.Error, match=words):
            jaxonnx.train(model, (inputs, one["y"]), batching=wrong, **LABELS)


def test_a_model_whose_inputs_are_all_fixed_has_no_batch_axis():
    model = jaxonnx.load(
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 17]> g (float[3] x) => (float[3] y) { y = Neg(x) }'
        )
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    fixed = model.with_fixed_inputs({"x": x[0]})
    with pytest.raises(jaxonnx.InputError, match="no input that could have an axis of examples"):
        fixed.with_batch_axis()
    np.testing.assert_array_equal(model.with_batch_axis().with_fixed_inputs({"x": x})(), -x)


def test_a_new_batch_axis_has_a_name_of_its_own():
    """Not that of an axis of the example, whose size is another."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[batch, 4] x) => (float[batch, 3] y) { y = MatMul(x, w) }""")
    w = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    x = np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)
    model = jaxonnx.load(proto).with_batch_axis()
    assert [value.shape for value in model.inputs] == [("batch_2", "batch", 4)]
    np.testing.assert_allclose(model(x), x @ w, rtol=1e-5)


@pytest.mark.deep
def test_a_file_of_one_example_is_mapped():
    model, data = stored("one")
    assert model.inputs[0].shape == (3, 9, 9)
    whole = data["picture"], data["label"]
    result = jaxonnx.train(model, batches(*whole), validation=whole, **LABELS)
    check(result, data)
    assert any("takes one example" in note for note in result.history.notes)
    assert result.model.inputs[0].shape == (3, 9, 9)
    each = np.stack([result.model(x) for x in data["picture"]])
    np.testing.assert_allclose(result.model.predict(data["picture"]), each, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        result.model.with_batch_axis()(data["picture"]), each, rtol=1e-5, atol=1e-6
    )
    found = jaxonnx.evaluate(result.model, whole, loss=LABELS["loss"])
    assert found["loss"] == pytest.approx(result.history.epochs[0]["validation_loss"], rel=1e-5)


def test_statistics_of_one_example():
    text = """<ir_version: 9, opset_import: ["": 17]> g (float[2, 4] x) => (float[1, 2, 4] y)
    <int64[1] a = {0}, float[2] s = {1,2}, float[2] b = {0,1}, float[2] m = {0,0},
     float[2] v = {1,1}> { h = Unsqueeze(x, a) y = BatchNormalization(h, s, b, m, v) }"""
    model = jaxonnx.load(onnx.parser.parse_model(text))
    x = np.ones((3, 2, 4), np.float32)
    with pytest.raises(jaxonnx.TrainingError, match=r"one example at a time: .*frozen"):
        jaxonnx.train(model, (x, x[:, None]), loss="squared_error")
    result = jaxonnx.train(model, (x, x[:, None]), loss="squared_error", statistics="frozen")
    assert result.changes["s"] > 0


@pytest.mark.deep
def test_numbers_by_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, data = stored("pitch")
    np.savez("d.npz", audio=data["audio"], y=data["pitch"])
    model, flags = DATA / "inputs" / "pitch.onnx", "--fixed fmin=50 --fixed fmax=800"
    for line in (
        f"train {model} d.npz -o t.onnx --loss squared_error --epochs 2 {flags}",
        f"evaluate t.onnx d.npz --loss squared_error {flags}",
        f"run t.onnx d.npz -o o.npz {flags}",
    ):
        assert jaxonnx.cli.main(line.split()) == 0
    trained = jaxonnx.load("t.onnx")
    assert len(trained.inputs) == 3
    y = trained.predict(data["audio"], fixed=RANGE)
    np.testing.assert_allclose(np.load("o.npz")[trained.outputs[0].name], y, rtol=1e-5)
    capsys.readouterr()
    assert jaxonnx.cli.main(f"train {model} d.npz -o t.onnx {flags} --explain".split()) == 0
    assert "fixed={'fmin': 50, 'fmax': 800}" in capsys.readouterr().out.replace('"', "'")


def recurrent(x, states, nodes):
    """A file with a GRU or LSTM of four units that takes and gives its states."""
    kinds = ", ".join(f"float[{states}] {name}" for name in "hc")
    nodes = nodes.replace("ROWS", "i, W, R, B, , h, c")
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[{x}] x, {kinds}) => (y, float[{states}] hn, float[{states}] cn)
    <int64[1] one = {{1}}, int64[1] zero = {{0}}, int64[2] ends = {{0, 1}}> {{ {nodes} }}""")
    random = np.random.default_rng(3)
    sizes = {"W": (1, 16, 5), "R": (1, 16, 4), "B": (1, 32), "O": (4, 3)}
    for name, shape in sizes.items():
        value = random.normal(size=shape).astype(np.float32) / 2
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    proto.graph.output[0].type.tensor_type.elem_type = 1
    return proto


LSTM = "r, hn, cn = LSTM <hidden_size = 4> (ROWS) s = Squeeze(r, one) m = MatMul(s, O)"
FIRST = f"i = Transpose <perm = [1, 0, 2]> (x) {LSTM} y = Transpose <perm = [1, 0, 2]> (m)"
STEP = "o, hs, cs = LSTM <hidden_size = 4> (u, W, R, B, , s, d) q = Squeeze(o, ends)"


def branch(kind):
    """A branch of an If that has the LSTM, with names of its own."""
    nodes = re.sub(r"\b(i|r|hn|cn|s|m|y)\b", rf"\g<1>_{kind}", FIRST)
    outputs = ", ".join(f"float[1, b, 4] {name}_{kind}" for name in ("hn", "cn"))
    nodes = nodes.replace("ROWS", f"i_{kind}, W, R, B, , h, c")
    return f"{kind}_branch = g () => ({outputs}, float[b, t, 3] y_{kind}) {{ {nodes} }}"


BRANCHES = f"""n = Shape <end = 1> (x) go = Greater(n, zero)
    hn, cn, y = If <{branch("then")}, {branch("else")}> (go)"""
BODIES = {
    "Scan": """hn, cn, r = Scan <num_scan_inputs = 1,
        body = f (float[1, b, 4] s, float[1, b, 4] d, float[b, 5] e)
        => (float[1, b, 4] hs, float[1, b, 4] cs, float[b, 4] q) { u = Unsqueeze(e, zero) STEP }
        > (h, c, x)""",
    "Loop": """n = Shape <end = 1> (x) k = Squeeze(n) hn, cn, r = Loop <
        body = f (int64 j, bool go, float[1, b, 4] s, float[1, b, 4] d)
        => (bool on, float[1, b, 4] hs, float[1, b, 4] cs, float[b, 4] q) {
        on = Identity(go) e = Gather(x, j) u = Unsqueeze(e, zero) STEP } > (k, , h, c)""",
}
X = np.random.default_rng(4).normal(size=(6, 7, 5)).astype(np.float32)
TARGETS = np.random.default_rng(5).normal(size=(6, 7, 3)).astype(np.float32)
RECURRENT = {
    "batch first": ("b, t, 5", "1, b, 4", FIRST, X, TARGETS),
    "one example": ("1, 7, 5", "1, 1, 4", FIRST, X, TARGETS),
    "in branches": ("b, t, 5", "1, b, 4", BRANCHES, X, TARGETS),
    "steps first": (
        *("t, b, 5", "1, b, 4", f"i = Identity(x) {LSTM} y = Identity(m)"),
        *(X.reshape(3, 2, 7, 5).swapaxes(1, 2), TARGETS.reshape(3, 2, 7, 3).swapaxes(1, 2)),
    ),
    **{
        f"steps first, {name}": (
            *("t, b, 5", "1, b, 4", body.replace("STEP", STEP) + " y = MatMul(r, O)"),
            *(X.reshape(3, 2, 7, 5).swapaxes(1, 2), TARGETS.reshape(3, 2, 7, 3).swapaxes(1, 2)),
        )
        for name, body in BODIES.items()
    },
    "no batch": (
        *("frames, 5", "1, 1, 4", f"i = Unsqueeze(x, one) {LSTM} y = Squeeze(m, one)"),
        *(X, TARGETS),
    ),
}


@pytest.mark.parametrize(
    "name", sweep(RECURRENT, "batch first", "one example", "steps first", "no batch")
)
def test_states_start_at_zeros(name):
    """The loss and the step of SGD are those of onnxruntime with states of zeros."""
    shape, states, nodes, x, targets = RECURRENT[name]
    proto = recurrent(shape, states, nodes)
    model, single = jaxonnx.load(proto), name == "one example"
    given = {"x": x, "target": targets} if "steps" in name else (x, targets)
    settings = {"loss": "squared_error", "optimizer": optax.sgd(1.0), "epochs": 1}
    settings |= {"accumulate": len(x), "batch_size": 1} if single else {"batch_size": len(x)}
    result = jaxonnx.train(model, given, progress=False, **settings)
    assert any("the data lacks the states h, c: they are zeros" in n for n in result.history.notes)
    saved = result.model.to_onnx()
    assert [v.name for v in saved.graph.input] == ["x", "h", "c"]
    assert [v.name for v in saved.graph.output] == ["y", "hn", "cn"]

    def loss(params):
        """The mean squared error, with one call of onnxruntime for each example or batch."""
        file = model.replace(params=params).to_onnx().SerializeToString()
        session = onnxruntime.InferenceSession(file)
        whole = name in ("batch first", "in branches")
        parts = [x] if whole else [r[None] if single else r for r in x]
        zeros = np.zeros((1, 6 if whole else 2 if "steps" in name else 1, 4), np.float32)
        calls = [session.run(["y"], {"x": r, "h": zeros, "c": zeros})[0] for r in parts]
        y = calls[0] if whole else np.stack([r[0] if single else r for r in calls])
        return np.square(y.astype(np.float64) - targets).mean()

    assert np.mean(result.history.losses) == pytest.approx(loss(model.params), rel=1e-5)
    step = {n: np.asarray(v - result.model.params[n]) for n, v in model.params.items()}
    random = np.random.default_rng(6)
    along = {n: random.normal(size=v.shape).astype(np.float32) for n, v in step.items()}
    ends = [loss({n: v + e * along[n] for n, v in model.params.items()}) for e in (1e-2, -1e-2)]
    slope = sum(np.vdot(step[n], along[n]) for n in step)
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=1e-2, abs=1e-4)


@pytest.mark.deep
def test_all_functions_start_states_at_zeros(tmp_path):
    """As onnxruntime does with zeros: the states' first axis is of layers, not of examples."""
    proto = recurrent(*RECURRENT["batch first"][:3])
    model, sgd = jaxonnx.load(proto), optax.sgd(0.1)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    zeros = np.zeros((1, 6, 4), np.float32)
    (y,) = session.run(["y"], {"x": X, "h": zeros, "c": zeros})
    np.savez(path := tmp_path / "x.npz", x=X, y=TARGETS)
    np.testing.assert_allclose(model.predict(path), y, atol=1e-6)
    found = jaxonnx.evaluate(model, path, loss="squared_error")
    assert found["loss"] == pytest.approx(np.square(y - TARGETS).mean(), rel=1e-5)
    np.testing.assert_allclose(model.predict(X), y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.predict({"x": X}, batch_size=4), y, rtol=1e-5, atol=1e-6)
    small = jaxonnx.quantize(model, X, batch_size=3)
    assert [value.name for value in small.inputs] == ["x", "h", "c"]
    found = onnxruntime.InferenceSession(small.to_onnx().SerializeToString()).run(
        ["y"], {"x": X, "h": zeros, "c": zeros}
    )[0]
    assert 0 < np.abs(found - y).max() < 0.1 * np.abs(y).max()
    data, bound = (X, TARGETS), {"max_loss": 10.0, "metric": "mse"}
    for validation in (None, data):
        small = jaxonnx.quantize(model, data, validation=validation, batch_size=3, **bound)
        assert [value.name for value in small.inputs] == ["x", "h", "c"]
        assert [value.name for value in small.outputs] == ["y", "hn", "cn"]
    assert jaxonnx.sensitivity(model, X, types=["int8"], activations=[]).errors
    manifest = jaxonnx.export_step(model, tmp_path, (X, TARGETS), "squared_error", sgd)
    run = onnxruntime.InferenceSession(tmp_path / "step.onnx").run
    init = onnxruntime.InferenceSession(tmp_path / "init.onnx")
    state = dict(zip(manifest["step"]["state"], init.run(None, {}), strict=True))
    batch = dict(zip(manifest["step"]["batch"], (X, TARGETS, np.ones(6, np.float32)), strict=True))
    (loss,) = run([manifest["step"]["loss"]], state | batch)
    np.testing.assert_allclose(loss, np.square(y - TARGETS).mean(), rtol=1e-5)
    step = jaxonnx.training.step(model, {"y": "squared_error"}, sgd)
    with pytest.raises(jaxonnx.TrainingError, match="the batch lacks the states h, c: pass them"):
        step.update(step.init(), (X, {"y": TARGETS}))
    both = {"x": X, "h": zeros, "c": zeros}
    _, (whole, _) = jax.jit(step.update)(step.init(), (both, {"y": TARGETS}))
    np.testing.assert_allclose(whole, loss, rtol=1e-5)
    for call in (model.predict, lambda data: jaxonnx.quantize(model, data)):
        with pytest.raises(jaxonnx.TrainingError, match="'h', 'c': the examples are along axis 1"):
            call(both)
    open_sizes = jaxonnx.load(recurrent("b, t, 5", "layers, b, 4", FIRST))
    with pytest.raises(jaxonnx.TrainingError, match=r"state h: .*layers.* not all known"):
        open_sizes.predict(X)


def test_steps_first_without_states():
    """The default of PyTorch's LSTM: the steps are first in its inputs, the batch in the result."""
    nodes = "i = Identity(x) r, f, e = LSTM <hidden_size = 4> (i, W, R, B) y = Squeeze(f, zero)"
    proto = recurrent("7, b, 5", "1, b, 4", nodes + " hn = Identity(h) cn = Identity(c)")
    del proto.graph.input[1:], proto.graph.output[1:], proto.graph.node[3:]
    proto.graph.output[0].CopyFrom(
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["b", 4])
    )
    model, targets = jaxonnx.load(proto), TARGETS[:, 0, :1].repeat(4, 1)
    for x in (X[:, :6], X):  # whose first axis would be taken as examples
        for settings in ({}, {"batch_size": 6}):
            with pytest.raises(
                jaxonnx.TrainingError,
                match=r"x: .*7, b, 5.* is not the batch, as the output y: .*b, 4.* one more axis",
            ):
                jaxonnx.train(model, (x, targets), loss="squared_error", **SGD, **settings)
        for call in (
            model.predict,
            lambda x: jaxonnx.quantize(model, x),
            lambda x: jaxonnx.sensitivity(model, x),
            lambda x: jaxonnx.quantize(model, (x, targets), max_loss=1.0, metric="mse"),
            lambda x: jaxonnx.find_rate(model, (x, targets), loss="squared_error"),
        ):
            with pytest.raises(jaxonnx.TrainingError, match="is not the batch, as the output y"):
                call(x)
    steps_first = X.swapaxes(0, 1)
    for value in (proto.graph.input[0], proto.graph.output[0]):
        next(d for d in value.type.tensor_type.shape.dim if d.dim_param).dim_value = 1
    with pytest.raises(
        jaxonnx.TrainingError,
        match=r"'x': the examples are along axis 1 of sequences .*np.moveaxis\(x, 1, 0\)",
    ):
        jaxonnx.train(jaxonnx.load(proto), (steps_first, targets), loss="squared_error", **SGD)
    pair = np.expand_dims(np.moveaxis(steps_first, 1, 0), 2), targets[:, None]
    result = jaxonnx.train(model, pair, loss="squared_error", **SGD, batch_size=6)
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    (y,) = session.run(None, {"x": steps_first})
    np.testing.assert_allclose(result.history.losses[0], np.square(y - targets).mean(), rtol=1e-5)


def test_ranges_of_files_without_the_batch_in_front():
    """They are those of the file with the batch in front: each example is mapped over the file."""
    scales = []
    for name, x in (("batch first", X), ("no batch", X), ("steps first", np.expand_dims(X, 2))):
        model = jaxonnx.load(recurrent(*RECURRENT[name][:3]))
        small = jaxonnx.quantize(model, x, batch_size=6, check=False)
        assert [v.shape for v in small.inputs] == [v.shape for v in model.inputs]
        tensors = {t.name: t for t in small.to_onnx().graph.initializer}
        scales.append(onnx.numpy_helper.to_array(tensors["r_scale"]))
    np.testing.assert_allclose(scales[1:], scales[0], rtol=1e-6)


@pytest.mark.deep
def test_the_bound_of_a_file_without_a_batch():
    """Its opset is raised for the types of the bound, and the examples stay mapped."""
    model = jaxonnx.load(recurrent(*RECURRENT["no batch"][:3]))
    bound = {"max_loss": 10.0, "metric": "mse", "batch_size": 3}
    small = jaxonnx.quantize(model, (X, TARGETS), **bound)
    assert [v.shape for v in small.inputs] == [v.shape for v in model.inputs]
    assert jaxonnx.sensitivity(model, X, ["int8"]).errors


def test_states_and_sequences_that_do_not_fit():
    loss = {"loss": "squared_error", **SGD}
    steps_first = jaxonnx.load(recurrent(*RECURRENT["steps first"][:3]))
    with pytest.raises(
        jaxonnx.TrainingError, match=r"x: .* is not the batch, as the states h: .*c: "
    ):
        jaxonnx.train(steps_first, (X, TARGETS), **loss)
    single = jaxonnx.load(recurrent(*RECURRENT["one example"][:3]))
    with pytest.raises(jaxonnx.TrainingError, match=r"cannot be opened: .* values: 'c', 'h'"):
        jaxonnx.train(single, (X, TARGETS), batch_size=2, **loss)  # the file would lose them
    first = jaxonnx.load(recurrent(*RECURRENT["batch first"][:3]))
    with pytest.raises(jaxonnx.TrainingError, match=r"2 inputs; the model has 3: .*fixed={name:"):
        jaxonnx.train(first, ((X, X), TARGETS), batch_size=1, **loss)
    whole = {
        n: np.zeros((1, 4), np.float32) for n in "hc"
    }  # of each example, wherever the batch is
    result = jaxonnx.train(
        first, (X, {"y": TARGETS}), fixed=whole, **SGD, loss={"y": "squared_error"}
    )
    zeros = jaxonnx.train(first, (X, TARGETS), **loss)
    np.testing.assert_allclose(result.history.losses, zeros.history.losses, rtol=1e-6)
