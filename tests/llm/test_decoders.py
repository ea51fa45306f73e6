"""Decoders with caches as exporters write them: `without_cache`, training, evaluation."""

import json

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import TensorProto, helper

import jaxonnx
from tests.support.paths import DATA

LLM = DATA / "llm"
TOLD = json.loads((LLM / "qwen3.json").read_text())
FILES = [LLM / "qwen3-genai" / "model.onnx", LLM / "qwen3-optimum" / "model.onnx"]


@pytest.fixture(params=FILES, ids=lambda path: path.parent.name)
def path(request):
    return request.param


@pytest.fixture
def model(path):
    return jaxonnx.load(path)


def feeds(path, ids):
    """What onnxruntime needs for whole sequences."""
    session = onnxruntime.InferenceSession(path)
    rows, width = ids.shape
    full = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    for value in session.get_inputs():
        if value.name == "position_ids":
            full[value.name] = np.tile(np.arange(width), (rows, 1))
        elif value.name not in full:
            full[value.name] = np.zeros((rows, 1, 0, 16), np.float32)
    return session.run(["logits"], full)[0]


def test_whole_sequences_need_tokens_only(path, model):
    ids = np.random.default_rng(0).integers(3, 192, (2, 9))
    whole = model.without_cache()
    assert [v.name for v in whole.outputs] == ["logits"]
    assert {v.name for v in whole.inputs} <= {"input_ids", "attention_mask", "position_ids"}
    logits = whole.predict(ids)
    np.testing.assert_allclose(logits, feeds(path, ids), atol=2e-5)
    assert whole.to_onnx() == model.to_onnx()


def test_the_loss_is_that_of_transformers(model):
    told = jaxonnx.evaluate(model, {"input_ids": TOLD["tokens"]}, loss="causal_lm", metrics=[])
    assert told["loss"] == pytest.approx(TOLD["loss"], abs=1e-4)


def test_training_keeps_the_caches():
    model = jaxonnx.load(FILES[0])
    data = {"input_ids": [row * 4 for row in TOLD["tokens"]]}
    result = jaxonnx.train(model, data, loss="causal_lm", optimizer=optax.adam(3e-3), epochs=20)
    assert result.history.losses[-1] < 0.7 * result.history.losses[0]
    names = [[v.name for v in m.inputs + m.outputs] for m in (model, result.model)]
    assert names[0] == names[1]
    session = onnxruntime.InferenceSession(result.model.to_onnx().SerializeToString())
    assert len(session.get_inputs()) == len(model.inputs)


def test_a_step_of_ones_own_reads_tokens(model):
    one = jaxonnx.training.step(model, {"logits": "causal_lm"}, optax.sgd(0.1))
    _, seen = jax.eval_shape(one.update, one.init(), {"input_ids": np.ones((1, 5), int)})
    assert seen.shape == (2,)


def test_positions_come_from_the_mask():
    model = jaxonnx.load(FILES[1])
    ids = np.array([TOLD["tokens"][1]])
    padded = np.pad(ids, ((0, 0), (3, 0)))
    mask = (np.arange(padded.shape[1]) >= 3).astype(int)[None]
    data = {"input_ids": padded, "attention_mask": mask}
    logits = model.without_cache().predict(data)[:, 3:]
    np.testing.assert_allclose(logits, model.without_cache().predict(ids), atol=1e-5)


def test_caches_of_the_data_are_used(model):
    ids = np.array([TOLD["tokens"][0]])
    names = {v.name for v in model.inputs} - {"input_ids", "attention_mask", "position_ids"}
    data = {name: np.zeros((1, 1, 4, 16), np.float32) for name in names}
    data |= {"input_ids": ids, "attention_mask": np.ones((1, ids.shape[1] + 4), int)}
    data["position_ids"] = np.arange(ids.shape[1])[None] + 4
    data = {v.name: data[v.name] for v in model.inputs}
    found = model.predict(data)
    assert {*found} == {v.name for v in model.outputs}


def test_texts_longer_than_the_table_of_positions_are_refused():
    """Beyond it onnxruntime reads nothing; a gather would repeat the last position."""
    model = jaxonnx.load(FILES[0])
    with pytest.raises(jaxonnx.Error, match=r"129 tokens, and tables of rotary positions for 128"):
        jaxonnx.train(model, {"input_ids": [[5] * 129]}, loss="causal_lm")


def concat_cache(kind=TensorProto.FLOAT, size="past"):
    """y = x joined to its past, which is handed on, behind a switch."""
    info = helper.make_tensor_value_info
    then = helper.make_graph(
        [helper.make_node("Concat", ["past", "x3"], ["joined"], axis=1)],
        "past",
        [],
        [info("joined", kind, None)],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x3"], ["alone"])], "none", [], [info("alone", kind, None)]
    )
    nodes = [
        helper.make_node("Cast", ["ids"], ["x"], to=kind),
        helper.make_node("Unsqueeze", ["x", "axis"], ["x3"]),
        helper.make_node("If", ["use"], ["state"], then_branch=then, else_branch=other),
        helper.make_node("Identity", ["state"], ["present"]),
        helper.make_node("Mul", ["state", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "switched",
        [
            info("ids", TensorProto.INT64, ["batch", "length"]),
            info("past", kind, ["batch", size, 1]),
            info("use", TensorProto.BOOL, [1]),
        ],
        [info("y", kind, ["batch", "all", 1]), info("present", kind, ["batch", "all", 1])],
        [
            helper.make_tensor("axis", TensorProto.INT64, [1], [2]),
            helper.make_tensor("w", kind, [1], [2.0]),
        ],
    )
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.checker.check_model(model)
    return model


def test_a_switch_for_caches_is_off():
    whole = jaxonnx.load(concat_cache()).without_cache()
    assert [v.name for v in whole.inputs] == ["ids"]
    np.testing.assert_array_equal(whole(np.array([[1, 2]])), [[[2.0], [4.0]]])
    used = whole(np.array([[1]]), past=np.ones((1, 1, 1), np.float32), use=np.array([True]))
    np.testing.assert_array_equal(used, [[[2.0], [2.0]]])


@pytest.mark.parametrize("token", [192, -3])
@pytest.mark.parametrize(("even", "labels"), [(False, False), (True, True)])
def test_tokens_beyond_the_vocabulary_are_refused_with_their_row(token, even, labels):
    """Gather gives NaN for them, or counts from the end: nothing else would say so."""
    rows = [[8, 9, 4], [8, 9, token]] if even else [[5, 6, 7, 3], [8, 9, token]]
    data = {"input_ids": np.array(rows) if even else rows}
    if labels:
        data |= {"labels": [[3] * len(row) for row in rows]}
    model = jaxonnx.load(LLM / "qwen3-genai")
    said = rf"example 1 has {token} at place 2 of input 'input_ids'.* 192 rows, 0 ... 191; "
    said += r"model\.with_tokens\(\.\.\.\) adds"
    with pytest.raises(jaxonnx.Error, match=f"^data: {said}"):
        jaxonnx.train(model, data, loss="causal_lm", optimizer=optax.sgd(0.1), epochs=1)
    with pytest.raises(jaxonnx.Error, match=f"^data: {said}"):
        jaxonnx.evaluate(model, data, loss="causal_lm")
    with pytest.raises(jaxonnx.Error, match=f"^batch 1 of data in epoch 1: {said}"):
        jaxonnx.evaluate(model, [data], loss="causal_lm")
    with pytest.raises(jaxonnx.InputError, match=f"row 1 of the tokens to continue has {token};"):
        model.generate(rows, max_new_tokens=1)


def test_tables_of_all_forms_say_how_many_rows_they_have():
    """In few bits, tied to the logits, in a branch, and one for each kind of token."""
    files = {"builder/phi3.onnx": 64, "builder/gemma3_text.onnx": 64, "qwen3-optimum": 192}
    files |= {"optimum-merged/decoder_model_merged.onnx": 64}
    for file, count in files.items():
        rows = {value.name: value.rows for value in jaxonnx.load(LLM / file).inputs}
        assert rows["input_ids"] == count, file
    rows = {v.name: v.rows for v in jaxonnx.load(LLM.parent / "transformers" / "bert").inputs}
    assert rows == {"input_ids": 48, "token_type_ids": 2, "attention_mask": None}


def test_what_is_read_in_the_other_branch_alone_is_no_input():
    """As the keys of an encoder are, which a merged decoder takes beside its own past."""
    model = concat_cache()
    info = helper.make_tensor_value_info
    model.graph.input.append(info("keys", TensorProto.FLOAT, ["batch", "text", 1]))
    (switch,) = (node for node in model.graph.node if node.op_type == "If")
    (then,) = (a.g for a in switch.attribute if a.name == "then_branch")
    then.node[0].input[1] = "sum"
    then.node.insert(0, helper.make_node("Add", ["x3", "keys"], ["sum"]))
    whole = jaxonnx.load(model).without_cache()
    assert [v.name for v in whole.inputs] == ["ids"]
    np.testing.assert_array_equal(whole(np.array([[1, 2]])), [[[2.0], [4.0]]])
    past = np.ones((1, 1, 1), np.float32)
    used = whole(np.array([[1]]), past=past, use=np.array([True]), keys=np.ones((1, 1, 1)))
    np.testing.assert_array_equal(used, [[[2.0], [4.0]]])


def test_features_that_are_joined_to_an_input_are_no_cache():
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("Concat", ["x", "r"], ["y"], axis=1),
        ],
        "skip",
        [info("x", TensorProto.FLOAT, ["n", "c", 4])],
        [info("y", TensorProto.FLOAT, ["n", "d", 4])],
    )
    model = jaxonnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert model.without_cache() is model


@pytest.mark.deep
def test_a_merged_decoder_trains_in_its_branch_without_a_past():
    """optimum's `merge_decoders` wrote it, of one layer of Llama; its weights lie around the If."""
    path = LLM / "optimum-merged" / "decoder_model_merged.onnx"
    model = jaxonnx.load(path)
    told = json.loads((LLM / "builder" / "losses.json").read_text())
    ids, loss = np.array(told["ids"]), json.loads((LLM / "optimum-merged.json").read_text())["loss"]
    lora = jaxonnx.LoRA(rank=4, where="all-linear")
    data, adam = {"input_ids": ids}, optax.adam(1e-2)
    result = jaxonnx.train(model, data, loss="causal_lm", optimizer=adam, epochs=5, lora=lora)
    assert result.history.losses[0] == pytest.approx(loss, abs=1e-4)
    assert result.history.losses[-1] < loss - 0.2
    session = onnxruntime.InferenceSession(result.model.to_onnx().SerializeToString())
    positions = np.tile(np.arange(12), (2, 1))
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions}
    past = np.zeros((2, 1, 0, 16), np.float32)
    feed |= {f"past_key_values.0.{what}": past for what in ("key", "value")}
    feed["use_cache_branch"] = np.array([False])
    (wanted,) = session.run(["logits"], feed)
    np.testing.assert_allclose(result.model(**feed)[0], wanted, atol=2e-5)


def test_the_size_of_a_cache_that_is_joined_to_what_another_cache_gives():
    """As in LFM2 in half precision: a convolution's cache is read before keys are joined."""
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (int64[batch,seq] ids, float[batch,8,2] past_conv, float[batch,past,size] past_key)
    => (float[batch,seq,8] y, float[batch,8,2] conv, float[batch,total,size] key)
    <int64[1] minus_two = {-2}, int64[1] two = {2}, int64[1] end = {1000}> {
        x = Gather (table, ids)
        t = Transpose <perm = [0, 2, 1]> (x)
        joined = Concat <axis = 2> (past_conv, t)
        conv = Slice (joined, minus_two, end, two)
        new = Slice (joined, two, end, two)
        turned = Transpose <perm = [0, 2, 1]> (new)
        y = MatMul (turned, w)
        key = Concat <axis = 1> (past_key, y)
    }
    """)
    rng = np.random.default_rng(0)
    w, table = rng.normal(size=(8, 8)).astype("f4"), rng.normal(size=(11, 8)).astype("f4")
    for name, value in (("w", w), ("table", table)):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    ids = rng.integers(0, 11, (3, 5))
    x = table[ids]
    result = jaxonnx.train(
        jaxonnx.load(proto),
        (ids, {"y": 0 * x}),
        loss={"y": "squared_error"},
        optimizer=optax.sgd(0.1),
        epochs=1,
        batch_size=3,
        progress=False,
    )
    np.testing.assert_allclose(result.history.losses, [np.mean((x @ w) ** 2)], rtol=1e-5)
