"""Decoders by mobius-onnx: transformers' losses, training, and saved files in onnxruntime.

Needs mobius-onnx, torch and transformers 5; CI has none of them. From a configuration of
transformers 4 mobius takes the base of the rotary embeddings for a default that was never set, and
writes files of Qwen without them.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import optax
import pytest

import jaxonnx

IDS = np.random.default_rng(0).integers(3, 60, (2, 12))
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "head_dim": 16,
}


def run_both(model):
    """Return the logits of onnxruntime and of the model, without a past."""
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    positions = np.broadcast_to(np.arange(12), IDS.shape).copy()
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": positions}
    feeds = {value.name: feeds.get(value.name) for value in session.get_inputs()}
    for value in session.get_inputs():
        if feeds[value.name] is None:
            heads, size = value.shape[1], value.shape[3]
            feeds[value.name] = np.zeros((len(IDS), heads, 0, size), np.float32)
    names = [value.name for value in model.outputs]
    (wanted,) = session.run(["logits"], feeds)
    return wanted, np.asarray(model(**feeds)[names.index("logits")])


@pytest.mark.deep
@pytest.mark.parametrize("provider", ["default", "cpu"])  # operators of ONNX, and of onnxruntime
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_decoders_of_mobius(name, provider, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("mobius")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES)
    network = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    network.save_pretrained(tmp_path / "hf")
    mobius = Path(sys.executable).with_name("mobius")
    folders = ["--config", tmp_path / "hf", "--ep", provider, tmp_path / "onnx"]
    subprocess.run([mobius, "build", *folders], check=True, capture_output=True)
    tokens = torch.from_numpy(IDS)
    loss = float(network(input_ids=tokens, labels=tokens).loss.detach())

    model = jaxonnx.load(tmp_path / "onnx" / "model.onnx")
    for lora in (None, jaxonnx.LoRA(rank=4, where="all-linear")):
        settings = {"loss": "causal_lm", "optimizer": optax.adam(1e-2), "lora": lora}
        result = jaxonnx.train(model, {"input_ids": IDS}, epochs=6, progress=False, **settings)
        np.testing.assert_allclose(result.history.losses[0], loss, rtol=1e-5)
        assert result.history.losses[-1] < loss - 0.2
        np.testing.assert_allclose(*run_both(result.model), atol=1e-5)
