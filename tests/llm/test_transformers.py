"""Encoders, two towers and encoder-decoders as optimum exports them, against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx import losses
from jaxonnx._data.ragged import Needs, Padding
from jaxonnx.errors import TrainingError
from tests.support.genai_builder import whisper_batch
from tests.support.paths import DATA
from tests.support.sources import make_source

FILES = DATA / "transformers"
DEEP = pytest.mark.deep
PAIRS = Padding(needs=Needs(group=2, derive=losses.in_batch_negatives().derive(None)))
CROSS_ENTROPY = "softmax_cross_entropy_with_integer_labels"
WATCHED = {
    "bert": {
        "embeddings.word_embeddings.weight": "embeddings.word_embeddings.weight",
        "encoder.layer.0.attention.self.query.weight": "onnx::MatMul_185",
    },
    "clip": {
        "vision_model.embeddings.patch_embedding.weight": (
            "vision_model.embeddings.patch_embedding.weight"
        ),
        "text_projection.weight": "onnx::MatMul_502",
    },
    "t5": {
        "shared.weight": "shared.weight",  # one table for both files and the logits
        "encoder.block.0.layer.0.SelfAttention.q.weight": "encoder.onnx::MatMul_230",
        "decoder.block.0.layer.1.EncDecAttention.q.weight": "onnx::MatMul_569",
    },
    "whisper": {
        "model.encoder.conv1.weight": "encoder.conv1.weight",
        "model.decoder.embed_tokens.weight": "model.decoder.embed_tokens.weight",
    },
    "whisper-genai": {
        "model.encoder.conv1.weight": "encoder.encoder.conv1.weight",
        "model.decoder.embed_tokens.weight": "decoder.embed_tokens.weight",
        # the encoder's file has the keys and values of the decoder
        "model.decoder.layers.0.encoder_attn.k_proj.weight": (
            "encoder.model.layers.0.attn.cross.k_proj.MatMul.weight"
        ),
        "model.decoder.layers.0.encoder_attn.q_proj.weight": (
            "model.layers.0.cross_attn.q_proj.MatMul.weight"
        ),
    },
    "vit": {
        "vit.embeddings.cls_token": "vit.embeddings.cls_token",
        "classifier.weight": "classifier.weight",
    },
}
"""Weights whose gradients are compared, by PyTorch's names, and their names in the files."""


def mean_of_tokens(hidden, mask):
    kept = mask[..., None].astype(hidden.dtype)
    return (hidden * kept).sum(1) / jnp.maximum(kept.sum(1), 1)


def sentence_encoder():
    model = jaxonnx.load(FILES / "bert")
    tokens = model.with_outputs(["last_hidden_state", "attention_mask"])
    return tokens.then(mean_of_tokens, outputs=["sentence_embedding"])


def whisper():
    """Its encoder has fixed positions, which the file adds like any other table."""
    model = jaxonnx.load(FILES / "whisper")
    return model.with_trainable([n for n in model.params if n != "encoder.onnx::Add_138"])


def recorded(name):
    told = dict(np.load(FILES / name / "step.npz"))
    losses = told.pop("losses")
    gradients = {n.split()[1]: told.pop(n) for n in [*told] if n.startswith("gradient")}
    told |= whisper_batch() if name == "whisper-genai" else {}
    return told, losses, gradients


MODELS = {
    "bert": (sentence_encoder, "in_batch_negatives"),
    "clip": (lambda: jaxonnx.load(FILES / "clip"), {"logits_per_text": "contrastive"}),
    "vit": (lambda: jaxonnx.load(FILES / "vit"), CROSS_ENTROPY),
    "t5": (lambda: jaxonnx.load(FILES / "t5"), "seq2seq_lm"),
    "whisper": (whisper, "seq2seq_lm"),
    "whisper-genai": (lambda: jaxonnx.load(FILES / "whisper-genai"), "seq2seq_lm"),
}


STARTS = {"t5": (0, 0), "whisper": (2, 1), "whisper-genai": (2, 1)}
"""The first token of each decoder, and that of padding."""
KEEP_GRADIENTS = optax.GradientTransformation(lambda params: params, lambda g, state, _: (g, g))


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(n, marks=DEEP) for n in ("clip", "vit", *STARTS))]
)
def test_steps_are_those_of_transformers(name):
    make, loss = MODELS[name]
    model, (batch, told, gradients) = make(), recorded(name)
    if name in STARTS:
        tokens = losses.shift_right(batch["labels"], *STARTS[name])
        kind = next(v.dtype for v in model.inputs if v.name == "decoder_input_ids")
        batch["decoder_input_ids"] = tokens.astype(kind)
    step = jaxonnx.training.step(model, loss, optax.chain(KEEP_GRADIENTS, optax.adam(1e-3)))
    update, state, found = jax.jit(step.update), step.init(), []
    for _ in range(len(told)):
        state, (value, _) = update(state, batch)
        found.append(float(value))
        if len(found) == 1:
            ours = step.to_file(state).optimizer[0]
    np.testing.assert_allclose(found, told, rtol=1e-4)
    for theirs, name_here in WATCHED[name].items():
        expected = gradients[theirs]
        expected = expected.T if "MatMul" in name_here else expected
        np.testing.assert_allclose(ours[name_here], expected, rtol=1e-3, atol=2e-6, err_msg=theirs)


@pytest.mark.parametrize("name", ["t5", pytest.param("whisper", marks=DEEP)])
def test_an_encoder_and_its_decoder_are_one_model_of_a_folder(name, tmp_path):
    """Labels alone make the decoder's tokens; what is saved are two files that onnxruntime runs."""
    batch, told, _ = recorded(name)
    labels = [row[row != -100] for row in batch["labels"]]
    inputs = {n: x for n, x in batch.items() if n != "labels"}
    data = inputs | {"labels": labels}
    settings = {"loss": "seq2seq_lm", "batch_size": len(labels)}
    assert jaxonnx.evaluate(FILES / name, data, **settings)["loss"] == pytest.approx(
        float(told[0]), rel=1e-5
    )
    settings |= {"optimizer": optax.adam(1e-2), "epochs": 4, "progress": False}
    result = jaxonnx.train(FILES / name, data, **settings)
    assert result.history.losses[0] == pytest.approx(float(told[0]), rel=1e-5)
    assert result.history.losses[-1] < result.history.losses[0] - 0.1

    result.model.save(f"{tmp_path}/tuned/")
    assert {p.name for p in (tmp_path / "tuned").iterdir()} == {
        p.name for p in (FILES / name).iterdir()
    }
    encoder, decoder = (
        onnxruntime.InferenceSession(tmp_path / "tuned" / f"{part}_model.onnx")
        for part in ("encoder", "decoder")
    )
    (states,) = encoder.run(None, inputs)
    tokens = losses.shift_right(batch["labels"], *STARTS[name])
    feed = {"encoder_hidden_states": states, "input_ids": tokens}
    if "attention_mask" in batch:
        feed["encoder_attention_mask"] = batch["attention_mask"]
    (logits,) = decoder.run(["logits"], feed)
    found = result.model(**inputs, decoder_input_ids=tokens)
    np.testing.assert_allclose(logits, found, atol=1e-5)
    again = jaxonnx.load(tmp_path / "tuned")(**inputs, decoder_input_ids=tokens)
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize(("name", "form"), [("t5", "lists"), ("whisper", "array")])
def test_labels_do_not_begin_with_the_start_token(name, form):
    """Whisper's tokenizer writes it; transformers' example of speech recognition leaves it out."""
    batch, told, _ = recorded(name)
    start = STARTS[name][0]
    labels = batch["labels"]
    inputs = {n: x for n, x in batch.items() if n != "labels"}
    column = np.pad(labels, ((0, 0), (1, 0)), constant_values=start)
    column[0] = [*labels[0], -100]  # one that lacks it
    if form == "lists":
        column = [row[row != -100] for row in column]
    data = inputs | {"labels": column}
    settings = {"loss": "seq2seq_lm", "batch_size": len(labels)}
    found = jaxonnx.evaluate(FILES / name, data, **settings)["loss"]
    assert found == pytest.approx(float(told[0]), rel=1e-5)


@pytest.mark.deep
def test_whisper_of_onnxruntime_genai_is_one_model(tmp_path):
    """Its decoder takes keys and values that the encoder's file computes for each layer."""
    folder, (batch, told, _) = FILES / "whisper-genai", recorded("whisper-genai")
    model = jaxonnx.load(folder)
    assert [value.name for value in model.without_cache().inputs] == [
        "input_features",
        "decoder_input_ids",
    ]
    labels = [row[row != -100] for row in batch["labels"]]
    data = {"input_features": batch["input_features"], "labels": labels}
    of_decoder = [n for n in model.params if "encoder." not in n or ".cross." in n]
    lora = jaxonnx.LoRA(rank=2, where=[n for n in of_decoder if "attn" in n and "MatMul" in n])
    settings = {"batch_size": 3, "epochs": 2, "optimizer": optax.adam(1e-2), "progress": False}
    result = jaxonnx.train(model, data, loss="seq2seq_lm", lora=lora, **settings)
    assert result.history.losses[0] == pytest.approx(float(told[0]), rel=1e-5)
    assert result.history.losses[1] < result.history.losses[0] - 0.02

    result.model.save(f"{tmp_path}/tuned/")
    assert {p.name for p in (tmp_path / "tuned").iterdir()} == {p.name for p in folder.iterdir()}
    encoder, decoder = (
        onnxruntime.InferenceSession(tmp_path / "tuned" / file) for file in model.folder.files
    )
    names = [value.name for value in encoder.get_outputs()]
    values = encoder.run(None, {"audio_features": batch["input_features"]})
    feed = {n.replace("present", "past"): x for n, x in zip(names, values, strict=True)}
    feed = {name: x for name, x in feed.items() if "cross" in name}
    feed |= {f"past_{kind}_self_0": np.zeros((3, 2, 0, 8), np.float32) for kind in ("key", "value")}
    feed["input_ids"] = np.array([[2, 7, 8], [2, 9, 10], [2, 11, 12]], np.int32)
    (logits,) = decoder.run(["logits"], feed)
    tokens = {"decoder_input_ids": feed["input_ids"], "input_features": batch["input_features"]}
    np.testing.assert_allclose(logits, result.model.without_cache()(**tokens), atol=1e-5)


def test_a_joined_folder_is_written_bit_for_bit(tmp_path):
    """One file has the joined graph; two have what they had, in names, nodes and tensors."""
    model = jaxonnx.load(FILES / "t5")
    assert model.folder.files == ("encoder_model.onnx", "decoder_model.onnx")
    model.save(f"{tmp_path}/same/")
    for file in model.folder.files:
        old, new = (onnx.load(folder / file) for folder in (FILES / "t5", tmp_path / "same"))
        onnx.checker.check_model(new, full_check=True)
        old, new = old.graph, new.graph
        assert [*old.input] == [*new.input]
        assert [*old.output] == [*new.output]
        assert [n.name for n in old.node] == [n.name for n in new.node]
        assert [(*n.input, *n.output) for n in old.node] == [
            (*n.input, *n.output) for n in new.node
        ]
        old, new = ([(t.name, t.raw_data) for t in graph.initializer] for graph in (old, new))
        assert old == new
    model.save(tmp_path / "t5.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "t5.onnx")
    ids = np.array([[5, 6, 7], [8, 9, 1]])
    feed = {"input_ids": ids, "attention_mask": 0 * ids + 1, "decoder_input_ids": ids[:, :2]}
    (found,) = session.run(None, feed)
    np.testing.assert_allclose(found, model(**feed), atol=1e-6)


@DEEP
@pytest.mark.parametrize("form", ["merged", "nodes", "inputs"])
def test_adapters_of_a_folder_are_saved_in_the_file_that_they_change(form, tmp_path):
    model = jaxonnx.load(FILES / "t5")
    adapted = jaxonnx.LoRA(rank=2, where="attention").attach(model, jax.random.key(0))
    adapted = adapted.replace(params={n: x + 0.1 for n, x in adapted.params.items()})
    adapted.save(f"{tmp_path}/tuned/", adapters=form)
    encoder, decoder = (
        onnxruntime.InferenceSession(tmp_path / "tuned" / file) for file in model.folder.files
    )
    ids = np.array([[5, 6, 7], [8, 9, 1]])
    given = model if form == "inputs" else adapted  # without factors it is the base
    mask = np.ones_like(ids)
    (states,) = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    feed = {"encoder_hidden_states": states, "input_ids": ids, "encoder_attention_mask": mask}
    (logits,) = decoder.run(["logits"], feed)
    expected = given(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    factors = [len(s.get_overridable_initializers()) for s in (encoder, decoder)]
    assert factors == ([8, 16] if form == "inputs" else [0, 0])


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_another_shift_of_labels_is_refused(name):
    with pytest.raises(TrainingError, match=r"input 'decoder_input_ids'.*seq2seq_lm.*shift_right"):
        jaxonnx.training.step(jaxonnx.load(FILES / name), "causal_lm", optax.sgd(0.1))
    decoder = jaxonnx.load(FILES / name / "decoder_model.onnx")
    with pytest.raises(TrainingError, match="the token after next"):
        jaxonnx.evaluate(decoder, {}, loss="causal_lm")


def test_sentence_embeddings_leave_padding_out_in_onnxruntime():
    model = sentence_encoder()
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    ids, mask = np.array([[3, 4, 5, 0], [7, 8, 9, 1]]), np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}
    (found,) = session.run(None, feed)
    np.testing.assert_allclose(found, model(**feed), atol=1e-6)
    np.testing.assert_allclose(
        found[:1], model(ids[:1, :3], mask[:1, :3], 0 * ids[:1, :3]), atol=1e-6
    )


LINEAR = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 3] x) => (float[n, 2] y) <float[3, 2] w = {1, 0, 0, 1, 1, 1}>
    { y = MatMul(x, w) }"""


def test_pairs_stay_together():
    seen = []
    model = jaxonnx.load(onnx.parser.parse_model(LINEAR))
    pair = np.repeat(np.arange(12.0, dtype=np.float32), 2)
    x = np.stack([pair, np.tile([0, 1], 12), 0 * pair], 1).astype(np.float32)

    def spy(outputs, targets, weight):
        jax.debug.callback(lambda *rows: seen.append(rows), outputs, weight)
        return outputs.sum(1)

    loss = losses.GroupLoss(name="spy", function=spy, group=2, takes_targets=False)
    settings = {
        "optimizer": optax.set_to_zero(),
        "epochs": 2,
        "validation": 0.25,
        "progress": False,
    }
    jaxonnx.train(model, {"x": x}, loss=loss, batch_size=8, **settings)
    jax.effects_barrier()
    orders = [rows[weight > 0, 0].tolist() for rows, weight in seen]
    assert all(a == b for rows in orders for a, b in zip(rows[::2], rows[1::2], strict=True))
    assert [len(rows) for rows in orders] == [8, 8, 2, 6] * 2
    assert orders[0] != orders[4]
    with pytest.raises(TrainingError, match=r"in groups of 2.*batch_size.*got 5"):
        jaxonnx.train(model, {"x": x}, loss=loss, batch_size=5, **settings)
    with pytest.raises(TrainingError, match=r"in groups of 2.*number of examples.*got 23"):
        jaxonnx.train(model, {"x": x[1:]}, loss=loss, batch_size=8, **settings)


def test_pairs_of_unequal_length_stay_together():
    values = jaxonnx.load(FILES / "bert").inputs
    lengths = [3, 9, 4, 2, 15, 1, 8, 8, 2, 2]
    rows = [[i // 2 + 1] * n for i, n in enumerate(lengths)]
    source = make_source({"input_ids": rows}, values, 4, 0, PAIRS)
    for batch in source.batches(0):
        first = batch.inputs[0][:, 0]
        assert (first[::2] == first[1::2]).all()
    widths = {batch.inputs[0].shape[1] for batch in source.batches(0)}
    assert len(widths) > 1


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        (losses.in_batch_negatives(negatives=1), np.random.default_rng(0).normal(size=(12, 5))),
        (losses.contrastive(), np.random.default_rng(0).normal(size=(4, 4))),
    ],
    ids=["in_batch_negatives", "contrastive"],
)
def test_what_fills_a_batch_is_no_negative(loss, outputs):
    kept = len(outputs) // 2
    weight = (np.arange(len(outputs)) < kept).astype(np.float32)
    whole = outputs[:kept, :kept] if loss.name == "contrastive" else outputs[:kept]
    found = jax.jit(loss)(outputs, None, weight)
    np.testing.assert_allclose(found[:kept], jax.jit(loss)(whole), rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda x: (loss(x, None, weight) * weight).sum()))(outputs)
    assert np.isfinite(gradient).all()


def test_hard_negatives_are_negatives_of_all_anchors():
    anchor, good, bad = np.eye(3, dtype=np.float32)
    rows = jnp.array([anchor, anchor, bad, good, good, bad])
    expected = np.log(1 + 3 / np.e)  # the other pair's two, and its own
    np.testing.assert_allclose(losses.in_batch_negatives(scale=1, negatives=1)(rows), expected)


def test_outputs_that_do_not_fit_are_refused():
    with pytest.raises(TrainingError, match="rows in groups of 2; it is \\(3, 2\\)"):
        losses.in_batch_negatives()(jnp.ones((3, 2)))
    step = jaxonnx.training.step(jaxonnx.load(FILES / "clip"), "contrastive", optax.sgd(1.0))
    with pytest.raises(TrainingError, match="there are 4 outputs: name one"):
        step.check(recorded("clip")[0])
    with pytest.raises(TrainingError, match="scale is above 0"):
        losses.in_batch_negatives(scale=0)


@pytest.mark.deep
def test_a_vision_transformer_gets_another_head():
    batch, _, _ = recorded("vit")
    images, labels = batch["pixel_values"], batch["labels"] % 2
    settings = {"optimizer": optax.adam(1e-2), "epochs": 10, "batch_size": 4, "progress": False}
    result = jaxonnx.train(FILES / "vit", (images, labels), head=["cat", "dog"], **settings)
    assert result.history.losses[-1] < 0.5 * result.history.losses[0]
    session = onnxruntime.InferenceSession(result.model.to_onnx().SerializeToString())
    (found,) = session.run(None, {"pixel_values": images})
    assert found.shape == (4, 2)
    np.testing.assert_allclose(found, result.model(images), atol=1e-5)
