"""Tokens that are added to a language model: its vocabulary, its tokenizer and its folder."""

import itertools
import json
import shutil
import warnings
from dataclasses import replace

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
import tokenizers
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx import demo
from tests.support.few_bit_files import MS, normal, raw
from tests.support.paths import DATA
from tests.support.sweeps import sweep

LLM = DATA / "llm"
FOLDERS = [LLM / "qwen3-genai", LLM / "qwen3-optimum"]
NEW = ["<tool>", "</tool>"]
TEXT = "a list <tool>of</tool> a list"


def write_tokenizer(folder, words):
    """A tokenizer of words "w0", "w1", ..., and the configuration of a runtime."""
    folder.mkdir(exist_ok=True)
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def decoder(head="MatMul", rows=7, last=None, width=4, bias=False):
    """An embedding, a layer and an output layer of some form."""
    arrays = {"table": normal(rows, width), "layer": normal(width, width)}
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["e"]),
        helper.make_node("MatMul", ["e", "layer"], ["h"]),
    ]
    out = "scores" if bias or head == "Reshape" else "logits"
    if head == "tied":
        nodes.append(helper.make_node("Transpose", ["table"], ["t"], perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", ["h", "t"], [out]))
    elif head == "Gemm":
        arrays |= {"head": normal(rows, width), "c": normal(rows)}
        arrays["flat"] = np.array([-1, width])
        nodes.append(helper.make_node("Reshape", ["h", "flat"], ["f"]))
        nodes.append(helper.make_node("Gemm", ["f", "head", "c"], ["g"], transB=1))
        arrays["back"] = np.array([-1, 4, rows])
        nodes.append(helper.make_node("Reshape", ["g", "back"], [out]))
    else:
        arrays["head"] = normal(width, rows)
        nodes.append(helper.make_node("MatMul", ["h", "head"], [out]))
    if bias:
        arrays["bias"] = normal(rows)
        nodes.append(helper.make_node("Add", ["bias", out], ["logits"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", last])],
        [numpy_helper.from_array(x, name) for name, x in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def write_folder(folder, proto, words):
    write_tokenizer(folder, words)
    onnx.save(proto, folder / "model.onnx")
    settings = {"model_type": "none", "vocab_size": 7, "text_config": {"vocab_size": 7}}
    (folder / "config.json").write_text(json.dumps(settings | {"num_labels": 7}))
    return jaxonnx.load(folder)


def run(path, **feeds):
    session = onnxruntime.InferenceSession(path)
    rows, width = feeds["input_ids"].shape
    for name in (value.name for value in session.get_inputs()):
        if name.startswith("past"):
            feeds[name] = np.zeros((rows, 1, 0, 16), np.float32)
        elif name == "attention_mask":
            feeds[name] = np.ones((rows, width), np.int64)
        elif name == "position_ids":
            feeds[name] = np.arange(width)[None]
    return session.run(["logits"], feeds)[0]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_has_the_tokens(folder, tmp_path):
    """Ids, vocabulary, configurations and the scores of other tokens, in every runtime."""
    before = jaxonnx.load(folder)
    model = before.with_tokens(NEW)
    ids = model.tokenizer.encode(TEXT)
    assert [i for i in ids if i > 191] == [192, 193]
    assert model.tokenizer.decode(ids) == TEXT
    assert model.outputs[0].shape[-1] == 194
    assert before.tokenizer.encode(TEXT).max() < 192  # a Model never changes
    old = before.tokenizer.encode("a list of")[None]
    np.testing.assert_array_equal(model.tokenizer.encode("a list of"), old[0])
    whole, wider = (m.without_cache()(input_ids=old, **rest(m, old)) for m in (before, model))
    np.testing.assert_allclose(wider[..., :192], whole, atol=1e-6)
    mean = np.mean(whole, -1)
    np.testing.assert_allclose(wider[..., 192], mean, atol=1e-6)
    np.testing.assert_allclose(wider[..., 193], mean, atol=1e-6)
    model.save(f"{tmp_path}/saved/")
    settings = {p.name: json.loads(p.read_text()) for p in (tmp_path / "saved").glob("*.json")}
    sizes = [s.get("vocab_size", s.get("model", {}).get("vocab_size")) for s in settings.values()]
    assert [size for size in sizes if size] == [194]
    added = settings["tokenizer.json"]["added_tokens"]
    assert [(t["id"], t["content"], t["special"]) for t in added[-2:]] == [
        (192, "<tool>", False),
        (193, "</tool>", False),
    ]
    saved = jaxonnx.load(tmp_path / "saved")
    np.testing.assert_array_equal(saved.tokenizer.encode(TEXT), ids)
    read = tokenizers.Tokenizer.from_file(f"{tmp_path}/saved/tokenizer.json")
    np.testing.assert_array_equal(read.encode(TEXT).ids, ids)
    ours = model.without_cache()(input_ids=ids[None], **rest(model, ids[None]))
    theirs = run(tmp_path / "saved/model.onnx", input_ids=ids[None])
    np.testing.assert_allclose(theirs, ours, atol=2e-5)


def rest(model, ids):
    """The masks and positions that a model takes."""
    made = {"attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    return {v.name: made[v.name] for v in model.without_cache().inputs if v.name in made}


@pytest.mark.parametrize(
    ("head", "bias"),
    [("MatMul", False), ("MatMul", True), ("tied", False), ("tied", True), ("Gemm", False)],
)
@pytest.mark.parametrize("last", [7, None, "vocabulary"])
def test_output_layers_of_every_form(head, bias, last, tmp_path):
    proto = decoder(head, last=last, bias=bias)
    model = write_folder(tmp_path / "old", proto, 7).with_tokens(["x", "y", "z"])
    ids = np.array([[0, 3, 6, 3]])
    before = run(tmp_path / "old/model.onnx", input_ids=ids)
    model.save(f"{tmp_path}/new/")
    onnx.checker.check_model(str(tmp_path / "new/model.onnx"), full_check=True)
    after = run(tmp_path / "new/model.onnx", input_ids=ids)
    np.testing.assert_allclose(after[..., :7], before, atol=1e-6)
    np.testing.assert_allclose(after[..., 7:].T, [before.mean(-1).T] * 3, atol=1e-5)
    np.testing.assert_allclose(model(ids), after, atol=1e-5)
    again = jaxonnx.load(tmp_path / "new")
    assert again.tokenizer.encode("w1 x w2").tolist() == [1, 7, 2]
    read = json.loads((tmp_path / "new/config.json").read_text())
    assert read["vocab_size"] == read["text_config"]["vocab_size"] == 10
    assert read["num_labels"] == 7
    if last == 7:
        assert again.outputs[0].shape[-1] == 10


def test_rows_without_a_token_come_first(tmp_path):
    """The mean is that of the rows of tokens, as other rows were never trained."""
    model = write_folder(tmp_path / "old", decoder(), 5)
    table, head = (np.asarray(model.params[name]) for name in ("table", "head"))
    two = model.with_tokens(["x", "y"])
    assert two.outputs[0].shape == model.outputs[0].shape
    np.testing.assert_array_equal(two.params["table"][:5], table[:5])
    np.testing.assert_allclose(two.params["table"][5:], [table[:5].mean(0, "f8")] * 2, rtol=1e-6)
    np.testing.assert_allclose(two.params["head"][:, 6], head[:, :5].mean(1, "f8"), rtol=1e-6)
    three = two.with_tokens("z")
    assert three.params["table"].shape == (8, 4)
    assert three.new_rows == {"table": (5, 6, 7), "head": (5, 6, 7)}
    assert three.tokenizer.encode("w1xyz").tolist() == [1, 5, 6, 7]


@pytest.mark.parametrize("texts", [["w7"], ["x"], ["w1", "w8"]])
def test_tokens_beyond_the_table_get_rows(tmp_path, texts):
    """A tokenizer may have tokens that the network was never resized for."""
    model = write_folder(tmp_path / "old", decoder(last=7), 9)
    table = np.asarray(model.params["table"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wider = model.with_tokens(texts)
    assert ["'w1' (1): tokens" in str(w.message) for w in caught] == [True] * ("w1" in texts)
    count = 9 + ("x" in texts)
    assert wider.outputs[0].shape[-1] == count
    grown = np.concatenate([table, [table.mean(0, "f8")] * (count - 7)])
    np.testing.assert_allclose(wider.params["table"], grown, rtol=1e-6)
    assert wider.new_rows["table"] == (*[1] * ("w1" in texts), *range(7, count))
    wider.save(f"{tmp_path}/new/")
    assert json.loads((tmp_path / "new/config.json").read_text())["vocab_size"] == count
    ids = wider.tokenizer.encode("w2 w7 w8 " + texts[0])[None]
    np.testing.assert_allclose(
        run(f"{tmp_path}/new/model.onnx", input_ids=ids), wider(ids), atol=1e-5
    )


def fit(model, rows, **more):
    settings = {"loss": "causal_lm", "optimizer": optax.sgd(0.1), "batch_size": 2}
    return jaxonnx.train(model, rows, **{**settings, "epochs": 1, "progress": False, **more})


TOKENS = {"input_ids": [[1, 7, 2, 8], [8, 3, 7, 4]]}


@pytest.mark.parametrize("head", ["MatMul", "tied", "Gemm"])
def test_new_rows_are_trained_beside_adapters(head, tmp_path):
    """By the gradients that they have in a run of the whole tables; other rows stay bit for bit."""
    model = write_folder(tmp_path / "old", decoder(head), 7).with_tokens(["x", "y"])
    names = ["table"] if head == "tied" else ["table", "head"]
    full = fit(model, TOKENS, trainable=names)
    lora = jaxonnx.LoRA(rank=2, where=["layer"])
    adapted = fit(model, TOKENS, lora=lora)
    assert {*adapted.lora.layouts} == {"layer", *names}
    for name in names:
        axis = int(adapted.model.params[name].shape[0] != 9)
        before, after, whole = (
            np.moveaxis(np.asarray(m.params[name]), axis, 0)
            for m in (model, adapted.model, full.model)
        )
        np.testing.assert_array_equal(after[:7], before[:7])
        assert np.abs(after[7:] - before[7:]).min(-1).max() > 0
        np.testing.assert_allclose(after[7:], whole[7:], atol=1e-6)
    long = fit(model, TOKENS, lora=lora, epochs=5)
    y, ids = long.model(IDS_OF_ROWS), IDS_OF_ROWS
    long.model.save(f"{tmp_path}/new/")
    np.testing.assert_allclose(run(tmp_path / "new/model.onnx", input_ids=ids), y, atol=1e-5)
    for form in ("nodes", "inputs"):
        attached = long.lora.attach(model)
        attached.save(tmp_path / f"{form}.onnx", adapters=form)
    np.testing.assert_allclose(run(tmp_path / "nodes.onnx", input_ids=ids), y, atol=1e-5)
    long.lora.save(tmp_path / "a.npz")
    long.lora.save(f"{tmp_path}/peft/", names=lambda name: f"model.{name}")
    for path in ("a.npz", "peft"):
        more = {"names": lambda name: f"model.{name}"} if path == "peft" else {}
        loaded = jaxonnx.Adapters.load(tmp_path / path, model, **more)
        np.testing.assert_allclose(loaded.attach(model)(ids), y, atol=1e-5)
        further = fit(loaded.attach(model), TOKENS)
        assert further.history.losses[0] < long.history.losses[0]
        moved = further.lora.apply(model).params["table"]
        np.testing.assert_array_equal(moved[:7], model.params["table"][:7])
    with pytest.raises(jaxonnx.InputError, match=r"rows of tokens in '\w+' have no place"):
        long.lora.save(tmp_path / "a.onnx_adapter")
    with pytest.raises(jaxonnx.InputError, match=r"rows of tokens in '\w+' cannot be combined"):
        jaxonnx.Adapters.combine([long.lora, long.lora], [1, 1])


IDS_OF_ROWS = np.array([[0, 3, 7, 8]])


def test_adapters_of_the_table_train_its_new_rows(tmp_path):
    model = write_folder(tmp_path / "old", decoder(), 7).with_tokens(["x", "y"])
    lora = jaxonnx.LoRA(rank=2, where=["table", "layer"])
    result = fit(model, TOKENS, lora=lora)
    assert result.lora.values["table.lora_A"].shape == (2, 9)
    assert result.lora.values["head.lora_B"].tolist() == [7, 8]


def test_training_is_resumed(tmp_path):
    model = write_folder(tmp_path / "old", decoder("tied"), 7).with_tokens(["x", "y"])
    lora = jaxonnx.LoRA(rank=2, where=["layer"])
    whole = fit(model, TOKENS, lora=lora, epochs=4)
    more = {"lora": lora, "checkpoint_dir": str(tmp_path / "run")}
    fit(model, TOKENS, epochs=2, **more)
    resumed = fit(model, TOKENS, epochs=4, resume=True, **more)
    for name, value in whole.lora.values.items():
        np.testing.assert_array_equal(resumed.lora.values[name], value)
    newest = jaxonnx.Adapters.load(tmp_path / "run")
    np.testing.assert_array_equal(newest.apply(model).params["table"], whole.model.params["table"])


def test_texts_are_trained_and_generated(tmp_path):
    """Chats with new tokens, whose answer the saved folder repeats."""
    model = jaxonnx.load(FOLDERS[0]).with_tokens(NEW, special_tokens=True)
    assert {192, 193} <= {*model.tokenizer.special_tokens}
    rows = [{"prompt": "a list", "completion": "<tool>of</tool>"}] * 4
    lora = jaxonnx.LoRA(rank=4, where="all-linear")
    optimizer = optax.adam(0.02)
    result = fit(model, rows, lora=lora, optimizer=optimizer, epochs=40)
    assert result.history.losses[-1] < 0.4 * result.history.losses[0]
    text = result.model.generate("a list", max_new_tokens=8)
    assert text.startswith("<tool>of</tool>")
    result.model.save(f"{tmp_path}/saved/")
    assert jaxonnx.load(tmp_path / "saved").generate("a list", max_new_tokens=8) == text


def in_few_bits(zeros, tied=False):
    """An embedding and an output layer in four bits, perhaps one as the builder ties them."""
    rows, width, block = 7, 32, 16
    arrays = {"data": raw(rows, width // 2), "scales": np.abs(normal(rows, width // block))}
    arrays |= {"w": raw(rows, width // block, block // 2), "s": np.abs(normal(rows, 2)).ravel()}
    arrays |= {"layer": normal(width, width) / 6}
    if zeros:
        arrays |= {"z": raw(rows, 1), "zw": raw(rows)}
    gather = {"bits": 4, "block_size": block, "quantize_axis": 1, "gather_axis": 0}
    product = {"K": width, "N": rows, "bits": 4, "block_size": block, "accuracy_level": 1}
    nodes = [
        helper.make_node(
            "GatherBlockQuantized",
            ["data", "input_ids", "scales", *["z"] * zeros],
            ["e"],
            domain=MS,
            **gather,
        ),
        helper.make_node("MatMul", ["e", "layer"], ["h"]),
        helper.make_node(
            "MatMulNBits", ["h", "w", "s", *["zw"] * zeros], ["logits"], domain=MS, **product
        ),
    ]
    if tied:
        del arrays["data"], arrays["scales"]
        arrays |= {"s": arrays["s"].reshape(rows, -1), "sizes": np.array([rows, width // 2])}
        nodes[0].input[2] = "s"
        nodes.insert(0, helper.make_node("Reshape", ["w", "sizes"], ["data"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", rows])],
        [numpy_helper.from_array(x, name) for name, x in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize(
    ("kind", "words"), sweep(itertools.product(["", "zeros", "tied"], [7, 6]), 1, 2, 4)
)
def test_rows_in_few_bits(kind, words, tmp_path):
    """They are the mean, rounded; what is trained of them is saved beside them."""
    proto = in_few_bits(kind == "zeros", kind == "tied")
    old = write_folder(tmp_path / "old", proto, words)
    model = old.with_tokens(["x", "y"])
    ids = np.array([[0, 3, 5, 3]])
    before = run(tmp_path / "old/model.onnx", input_ids=ids)[..., :words]
    model.save(f"{tmp_path}/new/")
    after = run(tmp_path / "new/model.onnx", input_ids=ids)
    assert after.shape[-1] == words + 2
    np.testing.assert_allclose(after[..., :words], before, rtol=1e-4, atol=1e-4)
    mean, spread = before.mean(-1, keepdims=True), before.std(-1, keepdims=True)
    assert (np.abs(after[..., words:] - mean) < 0.25 * spread).all()
    np.testing.assert_allclose(model(ids), after, rtol=1e-4, atol=1e-4)
    lora = jaxonnx.LoRA(rank=2, where=["layer"])
    data = {"input_ids": [[1, words, 2, words + 1], [words, 3, words + 1, 4]]}
    result = fit(model, data, lora=lora, epochs=3, optimizer=optax.sgd(0.01))
    assert {*result.lora.layouts} == {"layer", *model.new_rows}
    assert {*model.new_rows} == ({"w"} if kind == "tied" else {"data", "w"})
    ids = np.array([[0, words, 5, words + 1]])
    y = result.model(ids)
    assert np.abs(y - model(ids)).max() > 0.01
    result.model.save(f"{tmp_path}/apart/")
    saved = run(tmp_path / "apart/model.onnx", input_ids=ids)
    np.testing.assert_allclose(saved, y, rtol=1e-3, atol=1e-3)
    back = jaxonnx.load(tmp_path / "apart")
    np.testing.assert_array_equal(back.tensors["w"], model.tensors["w"])
    result.lora.save(f"{tmp_path}/peft/", model, names=lambda name: f"model.{name}")
    loaded = jaxonnx.Adapters.load(tmp_path / "peft", model, names=lambda name: f"model.{name}")
    np.testing.assert_allclose(loaded.attach(model)(ids), y, rtol=1e-4, atol=1e-4)


def test_a_table_in_few_bits_for_both_ends_is_adapted(tmp_path):
    """Its readers have one change, behind the Reshape of its codes, too."""
    model = jaxonnx.load(in_few_bits(zeros=False, tied=True))
    assert model.inputs[0].rows == 7
    with pytest.warns(UserWarning, match="'w': the embedding and the output layer are one weight"):
        adapted = jaxonnx.LoRA(rank=2, where=["w"]).attach(model, jax.random.key(0))
    values = {n: 2 * normal(*x.shape) for n, x in adapted.params.items()}
    adapted, ids = adapted.replace(params=values), np.array([[0, 3, 5, 3]])
    y = adapted(ids)
    assert np.abs(y - model(ids)).max() > 0.1
    adapted.save(tmp_path / "apart.onnx")
    np.testing.assert_allclose(run(tmp_path / "apart.onnx", input_ids=ids), y, rtol=1e-4, atol=1e-4)
    with pytest.warns(UserWarning, match="rounded anew"):
        merged = adapted.merge_adapters(requantize=True)(ids)
    assert np.abs(merged - y).max() < 0.5 * np.abs(model(ids) - y).max()


@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.deep)])
def test_rows_in_half_precision(name, tmp_path):
    """The builder's files: tied; with an output layer of its own, converted."""
    proto = onnx.load(LLM / "builder" / f"{name}.onnx")
    if name == "llama":
        half = jaxonnx.convert(jaxonnx.load(proto), "float16", check=False)
        proto = half.to_onnx()
    model = write_folder(tmp_path / "old", proto, 64)
    net = model.with_tokens(["x", "y"])
    ids = np.array([[5, 9, 60, 33]])
    before, after = (m.without_cache()(input_ids=ids, **rest(m, ids)) for m in (model, net))
    assert after.shape == (1, 4, 66)
    np.testing.assert_array_equal(after[..., :64], before)
    lora = jaxonnx.LoRA(rank=2, where="attention")
    data = {"input_ids": [[5, 64, 7, 65, 9]] * 4}
    result = fit(net, data, lora=lora, epochs=6, optimizer=optax.adam(0.02))
    assert result.history.losses[-1] < 0.8 * result.history.losses[0]
    for table in net.new_rows:
        assert net.params[table].dtype == np.float16
        axis = int(net.params[table].shape[0] != 66)
        old, new = (np.moveaxis(np.asarray(m.params[table]), axis, 0) for m in (net, result.model))
        np.testing.assert_array_equal(old[:64], new[:64])
        assert (old[64:] != new[64:]).any(-1).all()


def test_both_branches_of_a_merged_decoder(tmp_path):
    """optimum's If has the output layer in two subgraphs."""
    proto = onnx.load(LLM / "optimum-merged" / "decoder_model_merged.onnx")
    rows = jaxonnx.load(proto).inputs[0].rows
    assert rows is not None
    model = write_folder(tmp_path / "old", proto, rows)
    net = model.with_tokens(["x", "y"])
    ids = np.array([[5, 9, 11, 3]])
    more = rest(model, ids)
    before, after = (m.without_cache()(input_ids=ids, **more) for m in (model, net))
    np.testing.assert_allclose(after[..., :rows], before, atol=1e-6)
    assert after.shape[-1] == rows + 2
    onnx.checker.check_model(net.to_onnx())


def test_existing_tokens_are_named_and_stay(tmp_path):
    model = write_folder(tmp_path / "old", decoder(), 7)
    with pytest.warns(UserWarning, match=r"'w1' \(1\), 'w4' \(4\): tokens already"):
        net = model.with_tokens(["w1", "x", "w4"])
    assert net.tokenizer.encode("x w4").tolist() == [7, 4]
    with pytest.warns(UserWarning, match=r"'x' \(7\): tokens already"):
        again = net.with_tokens("x")
    assert again.to_onnx() == net.to_onnx()
    assert again.new_rows == net.new_rows == {"table": (1, 4, 7), "head": (1, 4, 7)}


@pytest.mark.parametrize("head", ["MatMul", "tied"])
def test_rows_of_tokens_of_a_saved_folder_are_trained_when_they_are_named(tmp_path, head):
    """They were not after a folder was loaded again, whatever one called."""
    net = write_folder(tmp_path / "old", decoder(head), 7).with_tokens(["x", "y"])
    net.save(f"{tmp_path}/new/")
    with pytest.warns(UserWarning, match=r"'x' \(7\), 'y' \(8\): tokens already"):
        loaded = jaxonnx.load(f"{tmp_path}/new/").with_tokens(["x", "y"])
    lora = jaxonnx.LoRA(rank=2, where=["layer"])
    results = [fit(model, TOKENS, lora=lora) for model in (net, loaded)]
    values, others = (result.lora.values for result in results)
    assert values.keys() == others.keys()
    assert "table.lora_A" in values
    for name, value in values.items():
        np.testing.assert_array_equal(others[name], value)


def test_tokens_that_cannot_be_added(tmp_path):
    model = write_folder(tmp_path / "old", decoder(), 7)
    with pytest.raises(jaxonnx.InputError, match="'x' comes twice"):
        model.with_tokens(["x", "y", "x"])
    with pytest.raises(jaxonnx.InputError, match="an empty text is no token"):
        model.with_tokens(["x", ""])
    with pytest.raises(jaxonnx.InputError, match="no tokenizer, as it was not loaded from a fold"):
        jaxonnx.load(decoder()).with_tokens(["x"])
    adapted = jaxonnx.LoRA(rank=2, where=["layer"]).attach(model, jax.random.key(0))
    with pytest.raises(jaxonnx.InputError, match="the vocabulary of a model with adapters"):
        adapted.with_tokens(["x"])
    images = replace(demo.model(), companion=model.companion)
    with pytest.raises(jaxonnx.InputError, match="no embedding: no Gather reads rows of a table"):
        images.with_tokens(["x"])
    (tmp_path / "old/tokenizer.json").unlink()
    with pytest.raises(jaxonnx.Error, match=r"has no tokenizer.json, by which"):
        jaxonnx.load(tmp_path / "old").with_tokens(["x"])


def changed(proto, nodes, output="logits", **arrays):
    """A file with its output layer (and what else is before `output`) replaced by other nodes."""
    kept = [node for node in proto.graph.node if output not in node.output]
    del proto.graph.node[:]
    proto.graph.node.extend([*kept, *nodes])
    made = [numpy_helper.from_array(x, name) for name, x in arrays.items()]
    proto.graph.initializer.extend(made)
    return proto


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("integers", r"the rows of tokens are in int8 at node 'e' \(Gather"),
        ("mixed", "the output 'logits' has 7 numbers, as the embedding has rows, and the layer"),
        ("computed", "node 'logits' .MatMul.* from a tensor that is computed or taken apart"),
        ("fixed", "the output 'logits' does not follow when the vocabulary has 8 rows in place of"),
        ("several", r"rows of several tables, of 7 rows at node 'e' .* and 9 at node 'e2'"),
        ("infinite", "'bias' has numbers that are not finite"),
    ],
)
def test_vocabularies_that_cannot_grow(kind, words, tmp_path):
    node = helper.make_node
    if kind == "integers":
        nodes = [
            node("Gather", ["codes", "input_ids"], ["q"], "e"),
            node("DequantizeLinear", ["q", "scale"], ["e"]),
        ]
        codes = np.zeros((7, 4), np.int8)
        proto = changed(decoder(), nodes, "e", codes=codes, scale=np.float32(0.1))
        nodes = [*proto.graph.node]
        del proto.graph.node[:]
        proto.graph.node.extend([*nodes[-2:], *nodes[:-2]])
    elif kind == "mixed":
        nodes = [node("CumSum", ["m", "axis"], ["logits"]), node("MatMul", ["h", "head"], ["m"])]
        proto = changed(decoder(last=7), nodes[::-1], axis=np.array(2))
    elif kind == "computed":
        nodes = [
            node("Concat", ["left", "right"], ["w"], axis=1),
            node("MatMul", ["h", "w"], ["logits"]),
        ]
        proto = changed(decoder(), nodes, left=normal(4, 3), right=normal(4, 4))
    elif kind == "fixed":
        nodes = [
            node("MatMul", ["h", "head"], ["m"]),
            node("Expand", ["ones", "sizes"], ["wide"]),
            node("Add", ["m", "wide"], ["logits"]),
        ]
        proto = changed(decoder(), nodes, ones=np.ones(1, "f4"), sizes=np.array([1, 1, 7]))
    elif kind == "several":
        nodes = [
            node("Gather", ["other", "input_ids"], ["e2"]),
            node("MatMul", ["h", "head"], ["m"]),
            node("ReduceSum", ["e2", "axis"], ["sum"]),
            node("Add", ["m", "sum"], ["logits"]),
        ]
        proto = changed(decoder(), nodes, other=normal(9, 4), axis=np.array([2]))
    else:
        nodes = [
            node("MatMul", ["h", "head"], ["m"]),
            node("Add", ["m", "bias"], ["logits"]),
        ]
        proto = changed(decoder(), nodes, bias=np.array([0, -np.inf] + [0] * 5, "f4"))
    model = write_folder(tmp_path / "old", proto, 7)
    with pytest.raises(jaxonnx.InputError, match=words):
        model.with_tokens(["x"])


@pytest.mark.parametrize("name", ["t5", "t5-merged", "whisper-genai", "bert"])
def test_encoders_with_decoders(name, tmp_path):
    """Each file of a folder has the tokens; one table is that of encoder, decoder and logits."""
    shutil.copytree(DATA / "transformers" / name, tmp_path / "old")
    model = jaxonnx.load(tmp_path / "old")
    if not (tmp_path / "old/tokenizer.json").is_file():
        write_tokenizer(tmp_path / "old", 48)
    net = model.with_tokens(["x", "y"])
    assert len(net.new_rows) == 1
    net.save(f"{tmp_path}/new/")
    back = jaxonnx.load(tmp_path / "new")
    assert {v.rows for v in back.inputs if v.name.endswith("input_ids")} == {50}
    assert back.outputs[0].shape[-1] == (16 if name == "bert" else 50)
    for file in (tmp_path / "new").glob("*.onnx"):
        onnxruntime.InferenceSession(file)
