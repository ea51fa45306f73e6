"""Quantized decoders: texts and tokens without caches, in the files of two exporters."""

import json
import shutil

import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx import Quantization
from jaxonnx.cli import main
from tests.support.exact_products import avoid_saturation
from tests.support.paths import DATA

GENAI, OPTIMUM = (DATA / "llm" / f"qwen3-{name}" for name in ("genai", "optimum"))
TEXTS = [{"text": text} for text in ("a list is a sequence", "a tuple", "what is a set")] * 4
TOKENS = np.random.default_rng(0).integers(3, 190, (8, 6))
HEAD = json.loads((GENAI / "genai_config.json").read_text())["model"]["decoder"]["head_size"]
FOUR_BITS = Quantization(weights="int4", activations=None, block=16)
LOSS = {"loss": "causal_lm", "batch_size": 4}


def names(model):
    return [value.name for value in (*model.inputs, *model.outputs)]


def logits_of_onnxruntime(proto, tokens):
    """Run a decoder with empty caches."""
    session = onnxruntime.InferenceSession(avoid_saturation(proto).SerializeToString())
    feeds = {}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            shape = [len(tokens), value.shape[1], 0, HEAD]
            feeds[value.name] = np.zeros(shape, np.float32)
        elif value.name == "position_ids":
            feeds[value.name] = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        else:
            feeds[value.name] = tokens if value.name == "input_ids" else np.ones_like(tokens)
    return session.run(["logits"], feeds)[0]


@pytest.mark.parametrize(
    ("path", "scheme"),
    [(GENAI, "int8"), (OPTIMUM, FOUR_BITS)],
)
def test_ranges_are_those_of_whole_sequences(path, scheme):
    """The result has its caches, and its logits are near the float ones in onnxruntime, too."""
    model = jaxonnx.load(path)
    quantized = jaxonnx.quantize(model, {"input_ids": TOKENS}, scheme, batch_size=4)
    assert names(quantized) == names(model)
    floats = logits_of_onnxruntime(model.to_onnx(), TOKENS)
    theirs = logits_of_onnxruntime(quantized.to_onnx(), TOKENS)
    whole = quantized.without_cache()
    ours = whole.predict({"input_ids": TOKENS}, batch_size=8, progress=False)
    spread = floats.std()
    assert 0 < np.square(theirs - floats).mean() ** 0.5 < 0.4 * spread
    assert np.square(theirs - ours).mean() ** 0.5 < 0.05 * spread
    assert np.square(theirs - floats).mean() > 4 * np.square(theirs - ours).mean()


def test_frequencies_of_rotary_embeddings_stay():
    """They are the constant factor of a MatMul, which no training changes."""
    model = jaxonnx.load(OPTIMUM)
    scheme = Quantization(calibration="minmax")
    proto = jaxonnx.quantize(model, {"input_ids": TOKENS}, scheme, batch_size=4).to_onnx()
    names = [tensor.name for tensor in proto.graph.initializer]
    assert "model.norm.weight" in names
    assert "onnx::Expand_122_quantized" not in names


@pytest.mark.deep
def test_caches_in_the_data_are_read():
    model = jaxonnx.load(OPTIMUM)
    shape = [4, *(model.inputs[-1].shape[1], 3, model.inputs[-1].shape[3])]
    batch = {
        value.name: np.random.default_rng(1).normal(size=shape).astype(np.float32)
        for value in model.inputs
        if value.name.startswith("past")
    }
    mask, positions = np.ones((4, 9), np.int64), np.broadcast_to(np.arange(3, 9), (4, 6))
    batch |= {"input_ids": TOKENS[:4], "attention_mask": mask, "position_ids": positions}
    batch = {value.name: batch[value.name] for value in model.inputs}
    quantized = jaxonnx.quantize(model, [batch]).tensors
    without = jaxonnx.quantize(model, [{"input_ids": TOKENS[:4]}]).tensors
    assert any((quantized[n] != without[n]).any() for n in quantized if n.endswith("_scale"))


def test_texts_calibrate():
    model = jaxonnx.load(GENAI)
    before = jaxonnx.evaluate(model, TEXTS, **LOSS)["loss"]
    quantized = jaxonnx.quantize(model, TEXTS, "int8", batch_size=4)
    assert jaxonnx.evaluate(quantized, TEXTS, **LOSS)["loss"] == pytest.approx(before, abs=0.02)


@pytest.mark.deep
def test_texts_train_through_rounding(tmp_path, capsys):
    """The saved folder has the loss of the trained model; the shell calibrates by texts, too."""
    model = jaxonnx.load(GENAI)
    before = jaxonnx.evaluate(model, TEXTS, **LOSS)["loss"]
    assert {
        *jaxonnx.sensitivity(model, TEXTS, batch_size=4, batches=1, types=("int8",)).errors
    } <= {*model.params}
    result = jaxonnx.train(
        model, TEXTS, optimizer=optax.adam(1e-2), epochs=1, quantize=FOUR_BITS, **LOSS
    )
    result.model.save(f"{tmp_path}/tuned/")
    after = jaxonnx.evaluate(result.model, TEXTS, **LOSS)["loss"]
    saved = jaxonnx.evaluate(tmp_path / "tuned", TEXTS, **LOSS)["loss"]
    assert saved == pytest.approx(after, abs=1e-4)
    assert after < before
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, TEXTS)))
    shutil.copytree(GENAI, tmp_path / "model")
    command = f"quantize {tmp_path}/model {path} -o {tmp_path}/q.onnx --batch-size 4"
    assert main(command.split()) == 0
    assert "QuantizeLinear" in {n.op_type for n in onnx.load(tmp_path / "q.onnx").graph.node}
