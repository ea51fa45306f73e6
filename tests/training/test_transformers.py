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
from jaxonnx._data.forms import examples_of
from jaxonnx._data.ragged import Padding
from jaxonnx.errors import TrainingError
from tests.support.paths import DATA

FILES = DATA / "transformers"
DEEP = pytest.mark.deep
LABELS = losses.cross_entropy(axis=-1, ignore_index=-100)
PAIRS = Padding(untargeted=True, group=2)
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
    "whisper": {
        "model.encoder.conv1.weight": "encoder.conv1.weight",
        "model.decoder.embed_tokens.weight": "model.decoder.embed_tokens.weight",
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


def joined(name):
    """The encoder and the decoder of a folder as one graph."""
    encoder, decoder = (onnx.load(FILES / name / f"{n}_model.onnx") for n in ("encoder", "decoder"))
    encoder = onnx.compose.add_prefix(encoder, "encoder.")
    states = [("encoder.last_hidden_state", "encoder_hidden_states")]
    return onnx.compose.merge_models(encoder, decoder, io_map=states)


def whisper():
    """Its encoder has fixed positions, which the file adds like any other table."""
    model = jaxonnx.load(joined("whisper"))
    return model.with_trainable([n for n in model.params if n != "encoder.onnx::Add_138"])


def shifted(batch, start, padding):
    """The batch of `joined`, from what transformers takes."""
    labels, mask = batch["labels"], batch.get("attention_mask")
    encoder = {f"encoder.{n}": x for n, x in batch.items() if n != "labels"}
    also = {} if mask is None else {"encoder_attention_mask": mask}
    return encoder | also | {"input_ids": losses.shift_right(labels, start, padding), "y": labels}


def recorded(name):
    told = dict(np.load(FILES / name / "step.npz"))
    losses = told.pop("losses")
    gradients = {n.split()[1]: told.pop(n) for n in [*told] if n.startswith("gradient")}
    return told, losses, gradients


MODELS = {
    "bert": (sentence_encoder, "in_batch_negatives"),
    "clip": (lambda: jaxonnx.load(FILES / "clip"), {"logits_per_text": "contrastive"}),
    "vit": (lambda: jaxonnx.load(FILES / "vit"), CROSS_ENTROPY),
    "whisper": (whisper, LABELS),
}


KEEP_GRADIENTS = optax.GradientTransformation(lambda params: params, lambda g, state, _: (g, g))


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(n, marks=DEEP) for n in ("clip", "vit", "whisper"))]
)
def test_steps_are_those_of_transformers(name):
    make, loss = MODELS[name]
    model, (batch, told, gradients) = make(), recorded(name)
    batch = shifted(batch, 2, 1) if name == "whisper" else batch
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
        expected = expected.T if name_here.startswith("onnx::") else expected
        np.testing.assert_allclose(ours[name_here], expected, rtol=1e-3, atol=2e-6, err_msg=theirs)


@pytest.mark.deep
def test_an_encoder_and_its_decoder_train_together_and_are_saved_apart(tmp_path):
    """T5, whose one table of embeddings each of its files has for itself."""
    model, (batch, told, gradients) = jaxonnx.load(joined("t5")), recorded("t5")
    batch = shifted(batch, 0, 0)
    step = jaxonnx.training.step(model, LABELS, optax.sgd(0.1))
    state, (value, _) = jax.jit(step.update)(step.init(), batch)
    assert float(value) == pytest.approx(told[0], rel=1e-5)
    params = step.view(state)
    change = {n: 10 * (np.asarray(x) - np.asarray(params[n])) for n, x in model.params.items()}
    tables = change["encoder.embed_tokens.weight"] + change["shared.weight"]
    np.testing.assert_allclose(tables, gradients["shared.weight"], rtol=1e-3, atol=1e-5)

    trained = step.to_model(params, state.state)
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in trained.to_onnx().graph.initializer}
    encoder = {n.removeprefix("encoder."): x for n, x in tensors.items() if n[:8] == "encoder."}
    decoder = {n: x for n, x in tensors.items() if n[:8] != "encoder."}
    for part, weights in (("encoder", encoder), ("decoder", decoder)):
        apart = jaxonnx.load(FILES / "t5" / f"{part}_model.onnx", weights=weights)
        apart.save(tmp_path / f"{part}_model.onnx")
    sessions = [
        onnxruntime.InferenceSession(tmp_path / f"{part}_model.onnx")
        for part in ("encoder", "decoder")
    ]
    mask = batch["encoder.attention_mask"]
    feed = {"input_ids": batch["encoder.input_ids"], "attention_mask": mask}
    (states,) = sessions[0].run(None, feed)
    feed = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
    (logits,) = sessions[1].run(["logits"], feed | {"input_ids": batch["input_ids"]})
    inputs = {n: x for n, x in batch.items() if n != "y"}
    np.testing.assert_allclose(logits, model.apply(params, **inputs), atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_another_shift_of_labels_is_refused(name):
    with pytest.raises(TrainingError, match=r"input 'encoder\..*shift_right"):
        jaxonnx.training.step(jaxonnx.load(joined(name)), "causal_lm", optax.sgd(0.1))
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

    loss = losses.GroupLoss("spy", spy, rows=2, targets=False)
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
    with pytest.raises(TrainingError, match=r"in groups of 2.*batch_size.*is 5"):
        jaxonnx.train(model, {"x": x}, loss=loss, batch_size=5, **settings)
    with pytest.raises(TrainingError, match=r"in groups of 2.*number of examples.*is 23"):
        jaxonnx.train(model, {"x": x[1:]}, loss=loss, batch_size=8, **settings)


def test_pairs_of_unequal_length_stay_together():
    values = jaxonnx.load(FILES / "bert").inputs
    lengths = [3, 9, 4, 2, 15, 1, 8, 8, 2, 2]
    rows = [[i // 2 + 1] * n for i, n in enumerate(lengths)]
    source = examples_of({"input_ids": rows}, values, 4, 0, "data", padding=PAIRS)
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
