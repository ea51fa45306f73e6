"""Whisper by onnxruntime-genai's builder: transformers' losses, and generation by its runtime.

Needs torch, transformers and onnxruntime-genai, the extra test-llm; CI has the stored folder
(`tests/llm/test_transformers.py`).
"""

import os

import numpy as np
import optax
import pytest

import jaxonnx
from tests.support.genai_builder import build, change_norms, whisper_batch, write_whisper

CLOSE = {"fp32": 1e-5, "fp16": 1e-3, "int4": 0.1}
"""By how much the first loss may differ from that of the float32 checkpoint."""


def generate(folder, features, tokens, count):
    """What onnxruntime-genai writes behind the tokens."""
    genai = pytest.importorskip("onnxruntime_genai")
    runtime = genai.Model(os.fspath(folder))
    settings = genai.GeneratorParams(runtime)
    length = tokens.shape[1] + count
    given = {"max_length": length, "min_length": length, "batch_size": len(tokens)}
    settings.set_search_options(do_sample=False, **given)
    generator, inputs = genai.Generator(runtime, settings), genai.NamedTensors()
    inputs["audio_features"], inputs["input_ids"] = features, tokens.astype(np.int32)
    generator.set_inputs(inputs)
    while not generator.is_done():
        generator.generate_next_token()
    return np.stack([generator.get_sequence(row) for row in range(len(tokens))])


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", CLOSE)
def test_the_saved_folder_runs_in_onnxruntime_genai(precision, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("onnxruntime_genai")
    network = write_whisper(tmp_path / "torch")
    options = ["block_size=16", "accuracy_level=1"] if precision == "int4" else []
    build(tmp_path / "torch", tmp_path / "onnx", precision, "cpu", options)
    change_norms(network, 1e-5)
    batch = whisper_batch()
    with torch.no_grad():
        loss = network(**{n: torch.from_numpy(x) for n, x in batch.items()}).loss.item()

    model = jaxonnx.load(tmp_path / "onnx")
    features = batch["input_features"].astype(model.inputs[0].dtype)
    labels = [row[row != -100] for row in batch["labels"]]
    data = {"input_features": features, "labels": labels}
    settings = {"batch_size": 3, "epochs": 3, "optimizer": optax.adam(1e-2), "progress": False}
    lora = jaxonnx.LoRA(rank=2, where="all-linear")
    result = jaxonnx.train(model, data, loss="seq2seq_lm", lora=lora, **settings)
    assert result.history.losses[0] == pytest.approx(loss, abs=CLOSE[precision])
    assert result.history.losses[-1] < result.history.losses[0] - 0.1
    result.model.save(f"{tmp_path}/tuned/")
    tokens = np.full((3, 1), 2)
    expected = generate(tmp_path / "tuned", features, tokens, 8)
    new = result.model.generate(features, max_new_tokens=8, stop=[])
    np.testing.assert_array_equal(new, expected)
