"""Checkpoints that transformers loads: its logits, and no missing or unexpected key.

Needs torch and transformers, and what writes the files: onnxruntime-genai and mobius (with
transformers 5), or optimum. CI has none of them.
"""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxonnx
from tests.oracles.test_peft import (
    ARCHITECTURES,
    LLAMA,
    MOBIUS,
    OPTIMUM,
    read_network,
    run_model,
    run_network,
    write_network,
)
from tests.support import genai_builder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore")]

NOT_WRITTEN = ("gpt_oss", "olmo")
"""Their experts, and norms without weights, have another form in files."""
LIKE_LLAMA = {"llama": {}, "qwen2": {}, "smollm3": {"no_rope_layers": [1, 1]}}


def check(checkpoint, model, folder, kind=transformers.AutoModelForCausalLM):
    """Export a model and compare all tensors and the logits with those of the original."""
    jaxonnx.export_safetensors(model, folder, original=checkpoint)
    network, about = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(map(len, about.values())), about
    original = kind.from_pretrained(checkpoint, dtype=torch.float32)
    tensors, wanted = network.state_dict(), original.state_dict()
    for name, value in wanted.items():
        np.testing.assert_allclose(tensors[name].numpy(), value.numpy(), rtol=0, atol=1e-6)
    return network.eval()


def check_decoder(checkpoint, model, folder):
    network = check(checkpoint, model, folder / "exported")
    wanted = run_network(read_network(checkpoint))
    atol = 1e-5 * max(1, np.abs(wanted).max())
    np.testing.assert_allclose(run_network(network), wanted, rtol=0, atol=atol)

    trained = jaxonnx.LoRA(rank=2, where="mlp").attach(model, jax.random.key(0))
    values = {name: x + 0.1 for name, x in trained.params.items()}
    trained = trained.replace(params=values)
    jaxonnx.export_safetensors(trained, folder / "adapted", original=checkpoint)
    logits = run_network(read_network(folder / "adapted"))
    ours = run_model(trained)
    assert np.abs(ours - wanted).max() > 0.01 * np.abs(wanted).max()
    return logits, ours, atol


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NOT_WRITTEN])
def test_files_of_the_builder(name, tmp_path):
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("onnxruntime_genai")
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    genai_builder.write_checkpoint(name, checkpoint)
    genai_builder.build(checkpoint, target, "fp32", "cpu")
    logits, ours, atol = check_decoder(checkpoint, jaxonnx.load(target), tmp_path)
    if name not in ("phi", "nemotron"):  # the builder's epsilon is another
        np.testing.assert_allclose(logits, ours, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [*LIKE_LLAMA, *(n for n in MOBIUS if n != "gpt_oss")])
def test_files_of_mobius(name, tmp_path):
    pytest.importorskip("mobius")
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    write_network(name, (LIKE_LLAMA | MOBIUS)[name], checkpoint)
    mobius = Path(sys.executable).with_name("mobius")
    command = [mobius, "build", "--config", checkpoint, "--ep", "cpu", target]
    subprocess.run(command, check=True, capture_output=True)
    model = jaxonnx.load(target / "model.onnx")
    logits, ours, atol = check_decoder(checkpoint, model, tmp_path)
    np.testing.assert_allclose(logits, ours, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [*LIKE_LLAMA, *(n for n in OPTIMUM if n != "t5")])
def test_files_of_optimum(name, tmp_path):
    export = pytest.importorskip("optimum.exporters.onnx").main_export
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    write_network(name, (LIKE_LLAMA | OPTIMUM)[name], checkpoint)
    settings = {"task": "text-generation-with-past", "do_validation": False}
    export(str(checkpoint), target, library_name="transformers", **settings)
    logits, ours, atol = check_decoder(checkpoint, jaxonnx.load(target), tmp_path)
    np.testing.assert_allclose(logits, ours, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_encoders_by_optimum(name, tmp_path):
    export = pytest.importorskip("optimum.exporters.onnx").main_export
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    sizes = LLAMA | {"num_labels": 3, "image_size": 16, "patch_size": 8}
    config = transformers.AutoConfig.for_model(name, **sizes)
    text = name == "bert"
    kinds = ("SequenceClassification", "ImageClassification")
    kind = getattr(transformers, f"AutoModelFor{kinds[not text]}")
    torch.manual_seed(0)
    network = kind.from_config(config).eval()
    genai_builder.randomize(network)
    network.save_pretrained(checkpoint)
    task = "text-classification" if text else "image-classification"
    export(str(checkpoint), target, library_name="transformers", task=task, do_validation=False)
    check(checkpoint, jaxonnx.load(target / "model.onnx"), tmp_path / "out", kind)
