"""Adapters as nodes, as inputs and as files of their own, run by onnxruntime."""

import json
import re

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from safetensors.numpy import load_file

import jaxonnx
from jaxonnx import demo
from jaxonnx._io import checkpoints
from tests.support.adapter_files import base_tensors, changed, peft_folder, session, two_layers
from tests.support.few_bit_files import FILES, normal
from tests.support.lora_networks import FORMS, parse
from tests.support.paths import DATA


@pytest.mark.parametrize("form", ["nodes", "inputs"])
@pytest.mark.parametrize("kind", ["4 bits, bias", "nf4", "blocks of rows", "blocks of columns"])
def test_adapters_beside_weights_in_few_bits(kind, form, tmp_path):
    proto = FILES[kind]()
    model = jaxonnx.load(proto)
    adapted, x = changed(model), normal(4, 64)
    path = str(tmp_path / "adapted.onnx")
    adapted.save(path, adapters=form)
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=False)
    assert base_tensors(proto).items() <= base_tensors(written).items()  # bit for bit
    run = session(path)
    lora = jaxonnx.Adapters.of(adapted)
    given = lora.to_inputs() if form == "inputs" else {}
    expected = np.asarray(adapted(x))
    close = {"rtol": 1e-3, "atol": 2e-2 * np.abs(expected).max()}  # ours are not rounded to int8
    np.testing.assert_allclose(run.run(None, {"x": x, **given})[0], expected, **close)
    if form == "inputs":
        plain = session(proto.SerializeToString()).run(None, {"x": x})[0]
        np.testing.assert_array_equal(run.run(None, {"x": x})[0], plain)
        assert not np.allclose(plain, expected, **close)
    else:
        again = jaxonnx.load(path)  # trained further as products of their own
        assert {"w.lora_A.weight", "w.lora_B.weight"} <= {*again.params}
    with pytest.raises(jaxonnx.InputError, match=r"weights in few bits.*adapters='nodes'"):
        adapted.merge_adapters()


@pytest.mark.filterwarnings("ignore:the file to be saved was not compared:UserWarning")  # left
@pytest.mark.parametrize("form", ["nodes", "inputs"])
@pytest.mark.parametrize("kind", FORMS)
def test_adapters_beside_weights_in_float(kind, form, tmp_path):
    nodes, shape, size, _ = FORMS[kind]
    x = np.arange(4, dtype=np.float32) if kind == "Gather" else normal(*size)
    dims = ",".join("d" + str(i) if i == 0 else str(d) for i, d in enumerate(size))
    proto = parse(f"g (float[{dims}] x) => (float[?] y) {{ {nodes} }}", w=normal(*shape))
    model = jaxonnx.load(proto)
    (name,) = model.params
    adapted, path = changed(model, where=name), str(tmp_path / "adapted.onnx")
    adapted.save(path, adapters=form)
    given = jaxonnx.Adapters.of(adapted).to_inputs() if form == "inputs" else {}
    found = session(path).run(None, {"x": x, **given})[0]
    np.testing.assert_allclose(found, adapted(x), rtol=1e-4, atol=1e-4)
    if form == "inputs":
        plain = session(proto.SerializeToString()).run(None, {"x": x})[0]
        np.testing.assert_allclose(session(path).run(None, {"x": x})[0], plain, atol=1e-5)


@pytest.mark.parametrize("model", [demo.mlp, lambda: jaxonnx.load(two_layers())])
def test_what_computes_something_else_is_refused(model, tmp_path, monkeypatch):
    """Wrong signs of B, in the merged weights and in the nodes."""
    adapted, path = changed(model(), where=".*"), tmp_path / "adapted.onnx"
    adapted.save(path, adapters="nodes")
    before, kind = path.read_bytes(), type(adapted.program.views[-1])
    factors, merge = kind.factors, kind.merge

    def negate(self, tensors):
        return {n: (place, a, -b) for n, (place, a, b) in factors(self, tensors).items()}

    def merge_negated(self, network, *, requantize):
        wrong = {n: -x if n.endswith("lora_B") else x for n, x in network.params.items()}
        return merge(self, network.replace(params=wrong), requantize=requantize)

    monkeypatch.setattr(kind, "factors", negate)
    monkeypatch.setattr(kind, "merge", merge_negated)
    difference = r"computes something else .* the first value that differs is '.*', of"
    with pytest.raises(jaxonnx.ModelError, match=f"to be saved {difference}"):
        adapted.save(path, adapters="nodes")
    assert path.read_bytes() == before
    adapted.save(path, adapters="nodes", check=False)
    if model is demo.mlp:
        with pytest.raises(jaxonnx.ModelError, match=f"merged adapters {difference}"):
            adapted.merge_adapters()
        adapted.merge_adapters(check=False)


TWICE = ["MatMul", "MatMul, batch", "Gemm", "Gemm, transB", "Gemm, alpha", "Transpose", "Gather"]
TWICE += ["4 bits", "a scale a row"]
TWICE = [(kind, False, form) for kind in TWICE for form in ("nodes", "inputs")]
TWICE += [("MatMul", True, "nodes"), ("nf4", True, "nodes")]  # magnitudes are no inputs


@pytest.mark.parametrize(("kind", "dora", "form"), TWICE)
def test_adapters_of_a_file_that_has_some_as_nodes(kind, dora, form, tmp_path):
    """Against the same changes by jaxonnx, before they are written as nodes."""
    if kind in FILES:
        model, x = jaxonnx.load(FILES[kind]()), normal(4, 64)
        name = "w"
    else:
        nodes, shape, size, _ = FORMS[kind]
        x = np.arange(4, dtype=np.float32) if kind == "Gather" else normal(*size)
        dims = ",".join("d" + str(i) if i == 0 else str(d) for i, d in enumerate(size))
        text = f"g (float[{dims}] x) => (float[?] y) {{ {nodes} }}"
        model = jaxonnx.load(parse(text, w=normal(*shape)))
        (name,) = model.params
    path = str(tmp_path / "once.onnx")
    for number in range(2):
        adapted = changed(model, 2 + number, where=name, dora=dora)
        adapted.save(path, adapters=form if number else "nodes")
        given = jaxonnx.Adapters.of(adapted).to_inputs() if form == "inputs" and number else {}
        expected, close = np.asarray(adapted(x)), 1e-4 if kind in FORMS else 2e-2
        (found,) = session(path).run(None, {"x": x, **given})
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=close * np.abs(expected).max())
        model = jaxonnx.load(path)
    onnx.checker.check_model(path, full_check=False)
    names = {f"{name}.lora_{end}.weight{more}" for end in "AB" for more in ("", "_2")}
    assert {*model.tensors} >= names if form == "nodes" else names - {*given}
    assert model._factors == names


def test_onnxruntime_swaps_adapters_of_one_base(tmp_path):
    proto, x = two_layers(), normal(3, 32)
    model, path = jaxonnx.load(proto), str(tmp_path / "base.onnx")
    everything = lambda name, value: True  # noqa: E731
    tuned = [changed(model, rank, everything) for rank in (2, 5)]
    tuned[0].save(path, adapters="inputs")
    inputs = {
        value.name: [*map(str, value.shape)]
        for value in session(path).get_overridable_initializers()
    }
    assert inputs == {
        f"model.layers.0.attn.{name}.lora_{end}.weight": shape
        for name in ("q_proj", "o_proj")
        for end, shape in (("A", ["32", "lora_r"]), ("B", ["lora_r", "32"]))
    }
    run = session(path)
    plain = session(proto.SerializeToString()).run(None, {"x": x})[0]
    for adapted in (*tuned, tuned[0]):
        file = str(tmp_path / "tuned.onnx_adapter")
        lora = jaxonnx.Adapters.of(adapted)
        lora.save(file)
        adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        adapter.Load(file)
        options.add_active_adapter(adapter)
        expected = np.asarray(adapted(x))
        found = run.run(None, {"x": x}, options)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
        np.testing.assert_array_equal(run.run(None, {"x": x})[0], plain)
        again = jaxonnx.Adapters.load(file, model)
        assert (again.rank, again.layouts) == (lora.rank, lora.layouts)
        np.testing.assert_allclose(again.attach(model)(x), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(jaxonnx.InputError, match="pass the model"):
        jaxonnx.Adapters.load(file)
    with pytest.raises(jaxonnx.InputError, match="no weight of a module 'model"):
        jaxonnx.Adapters.load(file, jaxonnx.load(FILES["nf4"]()))
    (tmp_path / "broken.onnx_adapter").write_bytes(b"TORT?")
    with pytest.raises(jaxonnx.ModelError, match="onnx_adapter file, or is damaged"):
        jaxonnx.Adapters.load(tmp_path / "broken.onnx_adapter", model)


def test_folders_of_peft(tmp_path):
    model, x = jaxonnx.load(two_layers()), normal(3, 32)
    adapted = changed(model, 4, "*_proj*")
    named = lambda name: _rewritten(name).replace(".attn.", ".self_attn.")  # noqa: E731
    folder = f"{tmp_path}/peft/"
    jaxonnx.Adapters.of(adapted).save(folder, names=named)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert config["target_modules"].startswith(r"^model\.layers\.0\.self_attn\.o_proj$|")
    again = jaxonnx.Adapters.load(folder, model)
    np.testing.assert_allclose(again.attach(model)(x), adapted(x), rtol=1e-5, atol=1e-5)

    def written(**changes):
        path = tmp_path / "peft" / "adapter_config.json"
        path.write_text(json.dumps(config | changes))
        return jaxonnx.Adapters.load(folder, model)

    assert written(use_rslora=True).alpha == 16.0
    for changes, words in (
        ({"peft_type": "IA3"}, "'IA3', not LORA"),
        ({"use_dora": True}, r"use_dora is True.* no lora_magnitude_vector"),
        ({"r": None}, "no r"),
    ):
        with pytest.raises(jaxonnx.InputError, match=words):
            written(**changes)
    (tmp_path / "peft" / "adapter_config.json").write_text("{")
    with pytest.raises(jaxonnx.ModelError, match="no adapters of PEFT, or they are damaged"):
        jaxonnx.Adapters.load(folder, model)


def test_folders_around_adapters_are_refused_with_those_inside(tmp_path):
    """PEFT has a folder for an adapter with a name, and Trainer one for each checkpoint."""
    model = jaxonnx.load(two_layers())
    with pytest.raises(jaxonnx.ModelError, match=r"neither adapter_config.json and .* of a run$"):
        jaxonnx.Adapters.load(tmp_path, model)
    adapters = jaxonnx.Adapters.of(changed(model, 4, "*_proj*"))
    adapters.save(tmp_path / "ranking", names=lambda name: name.partition(".MatMul")[0])
    with pytest.raises(jaxonnx.ModelError, match=r"pass one of the folders in it, like .*ranking'"):
        jaxonnx.Adapters.load(tmp_path, model)
    assert jaxonnx.Adapters.load(tmp_path / "ranking", model).rank == 4


def _rewritten(name):
    return name.partition(".MatMul")[0]


def test_training_on_weights_in_few_bits(tmp_path):
    model, draw = jaxonnx.load(two_layers()), np.random.default_rng(3)
    x = draw.standard_normal((64, 32)).astype(np.float32)
    target = np.asarray(changed(model, 2, "*_proj*")(x))
    settings = {
        "loss": "squared_error",
        "optimizer": optax.adam(0.02),
        "batch_size": 16,
        "lora": jaxonnx.LoRA(4, where="*_proj*"),
    }
    result = jaxonnx.train(model, (x, target), epochs=20, **settings)
    assert result.history.losses[-1] < 0.5 * result.history.losses[0]
    assert {*result.model.params} == {*result.lora.values}
    assert "not merged" in str(result)
    path = str(tmp_path / "tuned.onnx")
    result.model.save(path)
    written = onnx.load(path)
    assert base_tensors(two_layers()).keys() <= base_tensors(written).keys()
    for name, value in model.tensors.items():
        np.testing.assert_array_equal(result.model.tensors[name], value)
    expected = np.asarray(result.model(x))
    np.testing.assert_allclose(session(path).run(None, {"x": x})[0], expected, rtol=1e-3, atol=1e-3)
    result.lora.save(tmp_path / "tuned.npz")
    further = jaxonnx.Adapters.load(tmp_path / "tuned.npz").attach(model)
    np.testing.assert_array_equal(further(x), expected)


def test_checkpoints_hold_adapters_alone(tmp_path):
    model, x = jaxonnx.load(two_layers(64)), normal(32, 64)
    settings = {
        "loss": "squared_error",
        "optimizer": optax.sgd(1e-3),
        "batch_size": 16,
        "lora": jaxonnx.LoRA(2),
    }
    whole = jaxonnx.train(model, (x, x), epochs=2, **settings)
    jaxonnx.train(model, (x, x), epochs=1, checkpoint_dir=tmp_path / "run", **settings)
    stored = checkpoints.read(tmp_path / "run")
    assert {*stored.tensors} == {*whole.lora.values}
    resumed = {"checkpoint_dir": tmp_path / "run", "resume": True}
    again = jaxonnx.train(model, (x, x), epochs=2, **settings, **resumed)
    assert again.history.losses == whole.history.losses
    other = jaxonnx.load(two_layers(64))  # drawn anew: another base
    with pytest.raises(jaxonnx.TrainingError, match="is of another run"):
        jaxonnx.train(other, (x, x), epochs=3, **settings, **resumed)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda m, p: m.save(p, adapters="nodes"), "the model has none"),
        (
            lambda m, p: m.save(p, adapters="none"),
            "'nodes', 'inputs' or None, got 'none'",
        ),
        (lambda m, p: jaxonnx.LoRA(64).attach(m, jax.random.key(0)), "no weight is larger"),
        (lambda m, p: jaxonnx.LoRA(4, alpha=0), "alpha must be a positive number"),
        (
            lambda m, p: jaxonnx.LoRA(64, where="*q_proj*").attach(m, jax.random.key(0)),
            "rank=64 is too much",
        ),
    ],
)
def test_requests_that_do_not_fit(action, words, tmp_path):
    with pytest.raises(jaxonnx.InputError, match=words):
        action(jaxonnx.load(two_layers()), tmp_path / "x.onnx")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("s", np.nan, "MatMulNBits.*: 's' has numbers that are not finite"),
        ("z", np.inf, "'z' has numbers that are not finite"),
        ("i", 4, "'i' has group 4, and there are 4 groups"),
    ],
)
def test_damaged_scales_zero_points_and_groups(name, value, words):
    proto = FILES["4 bits, g_idx"]()
    for tensor in proto.graph.initializer:
        if tensor.name == name:
            array = np.array(onnx.numpy_helper.to_array(tensor))
            array.flat[0] = value
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
    with pytest.raises(jaxonnx.ModelError, match=words):
        jaxonnx.LoRA(2, where="w").attach(jaxonnx.load(proto), jax.random.key(0))


@pytest.mark.parametrize(("file", "kv"), [("llama", 16), ("phi3", 32)])  # float32, MatMulNBits
def test_queries_keys_and_values_apart_in_peft(file, kv, tmp_path):
    """Adapters of q_proj and v_proj on a builder's qkv_proj, of 32 outputs and twice `kv`."""
    model = jaxonnx.load(DATA / "llm" / "builder" / f"{file}.onnx")
    layer = "model.layers.1.self_attn"
    shapes = {"q_proj": (2, 32), "v_proj": (2, kv), "o_proj": (3, 32)}
    factors = {
        f"{layer}.{name}": {"A": normal(rank, 32), "B": normal(outputs, rank)}
        for name, (rank, outputs) in shapes.items()
    }
    patterns = {"rank_pattern": {"o_proj": 3}, "alpha_pattern": {"o_proj": 1}}
    arrays = peft_folder(tmp_path / "peft", factors, **patterns)
    adapters = jaxonnx.Adapters.load(tmp_path / "peft", model)
    qkv, o = sorted(adapters.layouts, key=lambda name: "o_proj" in name)
    assert ".attn.qkv_proj." in qkv
    assert adapters.rank == 4

    def change(name, scale):
        a, b = (factors[f"{layer}.{name}"][end] for end in "AB")
        return scale * b @ a

    def product(adapters, name):
        a, b = (np.asarray(adapters.values[f"{name}.lora_{end}"]) for end in "AB")
        return adapters.alpha / adapters.rank * b @ a

    wanted = {qkv: np.concatenate([change("q_proj", 2), np.zeros((kv, 32)), change("v_proj", 2)])}
    wanted[o] = change("o_proj", 1 / 3)
    for name, value in wanted.items():
        np.testing.assert_allclose(product(adapters, name), value, rtol=1e-5, atol=1e-5)
    attached = adapters.attach(model)
    assert attached.params[f"{o}.lora_A"].shape == (3, 32)

    named = lambda name: _rewritten(name).replace(".attn.", ".self_attn.")  # noqa: E731
    adapters.save(f"{tmp_path}/back/", model, names=named)
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    ranks = {f"^{re.escape(f'{layer}.{name}')}$": 2 for name in ("q_proj", "v_proj")}
    assert (config["r"], config["rank_pattern"]) == (3, ranks)
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert back.keys() == arrays.keys()
    # the factors that PEFT trains, so that a step is of the same size: o_proj has another scale
    assert (adapters.alpha, config["lora_alpha"]) == (8, 6)
    for key, value in arrays.items():
        quotient = 1 / 6 if key.endswith("o_proj.lora_B.weight") else 1
        np.testing.assert_allclose(back[key], quotient * value, rtol=1e-6)
    again = jaxonnx.Adapters.load(tmp_path / "back", model)
    for name, value in wanted.items():
        np.testing.assert_allclose(product(again, name), value, rtol=1e-5, atol=1e-5)

    # trained on the whole matrix, each of three takes all ranks
    fresh = changed(model, 3, qkv)
    jaxonnx.Adapters.of(fresh).save(f"{tmp_path}/fresh/", model, names=named)
    loaded = jaxonnx.Adapters.load(tmp_path / "fresh", model)
    assert loaded.rank == 9
    products = [product(one, qkv) for one in (loaded, jaxonnx.Adapters.of(fresh))]
    np.testing.assert_allclose(*products, rtol=1e-4, atol=1e-5)

    for name, shape, words in (
        (f"{layer}.q_proj", (5, 2), "q_proj has 32 outputs in this one, 5 in the adapters"),
        (f"{layer}.q_proj", (32, 3), "missing, or of unequal ranks"),
        (f"{layer}.x_proj", (32, 2), "no weight of a module"),
    ):
        target = tmp_path / str(len(words))
        peft_folder(target, {name: {"A": normal(2, 32), "B": normal(*shape)}})
        with pytest.raises(jaxonnx.InputError, match=words):
            jaxonnx.Adapters.load(target, model)


@pytest.mark.filterwarnings("ignore:.*the embedding and the output layer are one weight")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("shape", "x", "body"),
    [
        ((3, 3, 3, 3), normal(1, 3, 9, 9), "h = Conv(x, a) y = Conv(h, b)"),
        ((8, 4), np.arange(8), "h = Gather(a, x) t = Transpose(b) y = MatMul(h, t)"),
    ],
)
def test_codes_that_two_nodes_dequantize(shape, x, body, dora, tmp_path):
    """Against the file with the changed weight in floating point, both in onnxruntime."""

    def write(body, **tensors):
        kinds = ("int64[8] x", "?,?") if x.ndim == 1 else ("float[1,3,9,9] x", "?,?,?,?")
        result = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({kinds[0]}) => (float[{kinds[1]}] y) {{ {body} }}""")
        arrays = [onnx.numpy_helper.from_array(v, name) for name, v in tensors.items()]
        result.graph.initializer.extend(arrays)
        return result

    codes = np.random.default_rng(0).integers(-100, 100, shape).astype(np.int8)
    scale = np.linspace(0.001, 0.01, len(codes), dtype=np.float32)
    both = " ".join(f"{name} = DequantizeLinear <axis = 0> (w, s)" for name in "ab")
    model = jaxonnx.load(write(f"{both} {body}", w=codes, s=scale))
    adapted = jaxonnx.LoRA(2, where="w", dora=dora).attach(model, jax.random.key(0))
    adapted = adapted.replace(params={n: normal(*v.shape) for n, v in adapted.params.items()})
    a, b, *norms = adapted.params.values()
    change = (b @ a).T if x.ndim == 1 else (b @ a).reshape(shape)
    weight = codes * scale.reshape(-1, *[1] * (codes.ndim - 1)) + change
    if dora:
        axes = (0,) if x.ndim == 1 else (1, 2, 3)
        lengths = np.sqrt((weight**2).sum(axes, keepdims=True))
        weight = weight * np.reshape(norms[0], lengths.shape) / lengths
    changed_file = write(re.sub(r"\b[ab]\b", "w", body), w=np.asarray(weight, np.float32))
    wanted = session(changed_file.SerializeToString()).run(None, {"x": x})[0]
    path = str(tmp_path / "out.onnx")
    for form in ["nodes"] if dora else ["nodes", "inputs"]:
        adapted.save(path, adapters=form)
        more = jaxonnx.Adapters.of(adapted).to_inputs() if form == "inputs" else {}
        for found in (session(path).run(None, {"x": x, **more})[0], jaxonnx.load(path)(x, **more)):
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("form", ["nodes", "inputs"])
@pytest.mark.parametrize("activations", [None, "uint8"])
def test_factors_in_a_file_stay_as_they_are(form, activations, tmp_path):
    """Against onnxruntime on the quantized file without adapters, plus their products."""
    w, x = normal(16, 16), normal(32, 16)
    text = "g (float[n,16] x) => (float[n,16] y) { h = MatMul(x, w) y = Identity(h) }"
    base = jaxonnx.load(parse(text, w=w))
    adapted, path = changed(base, 8), str(tmp_path / "out.onnx")
    adapted.save(path, adapters=form)
    loaded, scheme = jaxonnx.load(path), jaxonnx.Quantization(activations=activations)
    quantized = jaxonnx.quantize(loaded, {"x": x} if form == "inputs" else x, scheme)
    quantized.save(path)
    alone = str(tmp_path / "alone.onnx")
    jaxonnx.quantize(base, x, scheme).save(alone)
    plain = onnxruntime.SessionOptions()  # default sessions round x for products in few bits
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (rounded,) = onnxruntime.InferenceSession(alone, plain).run(None, {"x": x})
    for scale in (1, 3) if form == "inputs" else (1,):  # adapters that the ranges do not know
        params = {n: scale * v for n, v in adapted.params.items()}
        given = jaxonnx.Adapters.of(adapted.replace(params=params)).to_inputs()
        feeds = {"x": x, **(given if form == "inputs" else {})}
        a, b = (np.asarray(v, np.float64) for v in params.values())
        expected = rounded + 2 * x @ a.T @ b.T
        (found,) = onnxruntime.InferenceSession(path, plain).run(None, feeds)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
        (found,) = session(path).run(None, feeds)
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    integers = {n for n, (kind, _) in base_tensors(onnx.load(path)).items() if kind == np.int8}
    assert integers >= {"w_quantized"}
    assert not any("lora" in name for name in integers)

    factors = {"w.lora_A.weight", "w.lora_B.weight"}
    again = jaxonnx.load(path, dequantize=True)  # the record stays with the file
    assert factors <= {*again.params}
    for net in (loaded, again):
        assert {*jaxonnx.LoRA(2).attach(net, jax.random.key(0)).params}.isdisjoint(
            f"{name}.lora_A" for name in factors
        )
        assert factors.isdisjoint(jaxonnx.sensitivity(net, x).errors)
        assert factors <= {*net.sparsity_options()["exclude"]}
    if form == "nodes":
        chosen = jaxonnx.Quantization(where="w.*", skip="w.lora_B.weight")
        names = {t.name for t in jaxonnx.quantize(loaded, x, chosen).to_onnx().graph.initializer}
        assert {"w_quantized", "w.lora_A.weight_quantized", "w.lora_B.weight"} <= names
        jaxonnx.quantize(loaded, x, jaxonnx.Quantization(skip="w.lora_B.weight"))
        settings = {"loss": "squared_error", "optimizer": optax.sgd(1e-3), "epochs": 1}
        run = jaxonnx.train(loaded, (x, x), batch_size=16, quantize="int8", **settings)
        assert any(note.startswith("1 weights are rounded") for note in run.history.notes)


@pytest.mark.parametrize("file", ["adapters.npz", "peft/"])
def test_adapters_of_another_base_are_announced(file, tmp_path):
    """Names and shapes fit, and the numbers that the adapters were trained for do not."""
    weight = onnx.numpy_helper.from_array(normal(8, 8), "w")
    infos = [onnx.helper.make_tensor_value_info(n, 1, ["batch", 8]) for n in "xy"]
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", infos[:1], infos[1:], [weight])
    opsets = [onnx.helper.make_opsetid("", 21)]
    model = jaxonnx.load(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))
    names = {} if file.endswith("npz") else {"names": lambda _: "proj"}
    jaxonnx.Adapters.of(changed(model)).save(f"{tmp_path}/{file}", model, **names)
    loaded = jaxonnx.Adapters.load(f"{tmp_path}/{file}", model, **names)
    loaded.attach(model)  # warnings are errors in tests
    other = model.replace(params={"w": 2 * model.params["w"]})
    with pytest.warns(UserWarning, match="trained for other values of these weights"):
        loaded.attach(other)
