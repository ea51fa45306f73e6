"""Vision-language models against transformers: losses, gradients, and saved files.

Needs torch, transformers 5 and onnxruntime-genai 0.18; CI has none of them, and compares stored
values (tests/llm/test_vision_language.py, tests/llm/test_image_messages.py).
"""

import copy
import json
import shutil

import numpy as np
import optax
import pytest

import jaxonnx
from tests.data import make_vision_language as made
from tests.support.three_files import (
    FOLDERS,
    IMAGE_TOKEN,
    flatten_features,
    read_oracle,
    run_folder,
)

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
CASES = [
    ("llava", "genai", "fp32"),
    ("llava", "js", "int4"),
    ("internvl", "genai", "int4"),
    ("internvl", "js", "fp32"),
]


@pytest.mark.deep
@pytest.mark.parametrize(("family", "layout", "precision"), CASES)
def test_losses_gradients_and_saved_files(family, layout, precision, tmp_path):
    from PIL import Image

    pytest.importorskip("onnxruntime_genai")
    network = made.write_folder(family, layout, tmp_path / "model", precision)
    picture = Image.fromarray(made.make_picture())
    told = made.run_transformers(family, network, picture)
    ids = told["input_ids"]
    pixels = told["pixel_values"][None] if family == "internvl" else told["pixel_values"]
    model = jaxonnx.load(tmp_path / "model")
    data = {"input_ids": ids, "pixel_values": pixels}
    settings = {"loss": "causal_lm", "progress": False}
    if precision == "fp32":
        labels = np.where(ids == IMAGE_TOKEN, -100, ids)
        gradients = find_gradients(network, told, labels)
        before, step = model.params, {"optimizer": optax.sgd(1.0), "epochs": 1}
        after = jaxonnx.train(model, data, **step, **settings).model.params
        for name, of in NAMES.items():
            change = np.asarray(before[name] - after[name])
            wanted = gradients[of].T if "MatMul" in name else gradients[of]
            np.testing.assert_allclose(change, wanted, atol=2e-5)
    lora = jaxonnx.LoRA(rank=2, where="all-linear")
    result = jaxonnx.train(model, data, lora=lora, optimizer=optax.adam(1e-2), epochs=4, **settings)
    tolerance = 1e-5 if precision == "fp32" else 0.1
    np.testing.assert_allclose(result.history.losses[0], told["loss"], rtol=tolerance)
    assert result.history.losses[-1] < result.history.losses[0] - 0.02
    result.model.save(tmp_path / "tuned/", adapters="merged" if precision == "fp32" else "nodes")
    logits = result.model.without_cache()(ids, pixels, np.ones_like(ids))
    # onnxruntime's product with MatMulNBits rounds activations to 8 bits
    tolerance = 1e-5 if precision == "fp32" else 0.1
    ran = run_folder(tmp_path / "tuned", ids, pixels)
    np.testing.assert_allclose(ran, logits, atol=tolerance)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("family", "layout"), [("llava", "genai"), ("internvl", "js")])
def test_adapters_of_peft(family, layout, tmp_path):
    from PIL import Image

    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    pytest.importorskip("onnxruntime_genai")
    network = made.write_folder(family, layout, tmp_path / "model", "fp32")
    told = made.run_transformers(family, network, Image.fromarray(made.make_picture()))
    ids, pixels = told["input_ids"], told["pixel_values"]
    model = jaxonnx.load(tmp_path / "model")
    config = peft.LoraConfig(r=2, target_modules=r".*language_model.*_proj")
    tensors = {"input_ids": torch.from_numpy(ids), "pixel_values": torch.from_numpy(pixels)}

    def run(network):
        with torch.no_grad():
            return network(**tensors).logits.numpy()

    theirs = peft.get_peft_model(copy.deepcopy(network), config).eval()
    torch.manual_seed(1)
    for name, value in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(value, std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    adapters = jaxonnx.Adapters.load(tmp_path / "theirs", model)
    pixels = pixels[None] if family == "internvl" else pixels
    logits = adapters.attach(model).without_cache()(ids, pixels, np.ones_like(ids))
    assert np.abs(run(theirs) - run(network)).max() > 0.01
    np.testing.assert_allclose(logits, run(theirs), atol=1e-5)
    adapters.save(tmp_path / "back", model)
    back = peft.PeftModel.from_pretrained(copy.deepcopy(network), str(tmp_path / "back")).eval()
    np.testing.assert_allclose(run(back), run(theirs), atol=1e-6)


NAMES = {
    "embedding.embed_tokens.weight": "embed_tokens.weight",
    "model.layers.0.attn.o_proj.MatMul.weight": "layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.down_proj.MatMul.weight": "layers.0.mlp.down_proj.weight",
}


def find_gradients(network, told, labels):
    """Return the gradients of transformers by the names of parameters of the language model."""
    import torch

    tensors = {name: torch.from_numpy(told[name]) for name in ("input_ids", "pixel_values")}
    network(**tensors, labels=torch.from_numpy(labels)).loss.backward()
    parameters = network.model.language_model.named_parameters()
    return {name: value.grad.numpy() for name, value in parameters}


def test_the_runtime_answers_as_generate_does(tmp_path):
    """onnxruntime-genai knows no model type "llava"; that of Gemma 3 takes the same inputs."""
    genai = pytest.importorskip("onnxruntime_genai")
    shutil.copytree(FOLDERS["llava"], tmp_path / "base")
    flatten_features(tmp_path / "base" / "vision.onnx")
    config = json.loads((tmp_path / "base" / "genai_config.json").read_text())
    config["model"]["type"] = "gemma3"
    config["model"]["vision"]["config_filename"] = "processor_config.json"
    (tmp_path / "base" / "genai_config.json").write_text(json.dumps(config))
    (tmp_path / "base" / "processor_config.json").write_text("{}")
    oracle = read_oracle("llava")
    ids, pixels = oracle["input_ids"], oracle["pixels"]
    data = {"input_ids": ids, "pixel_values": pixels}
    lora = jaxonnx.LoRA(rank=2, where="all-linear")
    settings = {"optimizer": optax.adam(0.1), "epochs": 2, "progress": False}
    result = jaxonnx.train(tmp_path / "base", data, loss="causal_lm", lora=lora, **settings)
    result.model.save(tmp_path / "tuned/")

    parameters = genai.GeneratorParams(runtime := genai.Model(str(tmp_path / "tuned")))
    parameters.set_search_options(max_length=ids.shape[1] + 4, do_sample=False)
    generator = genai.Generator(runtime, parameters)
    inputs = genai.NamedTensors()
    inputs["input_ids"] = ids.astype(np.int32)
    inputs["pixel_values"] = pixels
    inputs["num_image_tokens"] = np.array([4])
    generator.set_inputs(inputs)
    for _ in range(4):
        generator.generate_next_token()
    new = []
    for _ in range(4):
        row = np.array([[*ids[0], *new]])
        logits = result.model.without_cache()(row, pixels, np.ones_like(row))
        new.append(int(logits[0, -1].argmax()))
    assert generator.get_sequence(0)[-4:].tolist() == new
