"""Tokens that are added, against transformers' own, PEFT's trained rows, and onnxruntime-genai."""

import json

import numpy as np
import optax
import pytest

import jaxonnx
from tests.support import genai_builder
from tests.support.paths import DATA

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")
genai = pytest.importorskip("onnxruntime_genai")

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore::FutureWarning")]
NEW = ["<tool>", "</tool>"]


def build(name, place, precision="fp32", options=()):
    checkpoint, target = place / "hf", place / "onnx"
    genai_builder.write_checkpoint(name, checkpoint)
    genai_builder.build(checkpoint, target, precision, "cpu", options)
    return checkpoint, target


def read_network(checkpoint, resize):
    network = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    if resize:
        network.resize_token_embeddings(genai_builder.VOCABULARY + len(NEW))
    return network


def run_network(network, ids):
    with torch.no_grad():
        return network(input_ids=torch.tensor(ids)).logits.numpy()


def run_model(model, ids):
    return np.asarray(model.without_cache()(input_ids=ids, attention_mask=np.ones_like(ids)))


def generate(folder, ids, count):
    model = genai.Model(str(folder))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=len(ids) + count, do_sample=False)
    generator = genai.Generator(model, settings)
    generator.append_tokens(np.asarray(ids, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gemma3_text"])
def test_vocabularies_are_those_of_transformers(name, tmp_path, monkeypatch):
    """Ids of texts and logits, without the noise that transformers adds to the mean."""
    normal = torch.distributions.MultivariateNormal
    draw = lambda self, sample_shape: self.mean.expand(*sample_shape, -1)  # noqa: E731
    monkeypatch.setattr(normal, "sample", draw)
    checkpoint, target = build(name, tmp_path)
    model = jaxonnx.load(target).with_tokens(NEW)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.add_tokens(NEW) == 2
    text = "<5><tool><6></tool> <7>"
    assert model.tokenizer.encode(text).tolist() == tokenizer(text)["input_ids"]
    network = read_network(checkpoint, resize=True)
    genai_builder.change_norms(network)
    ids = np.array([[5, 17, 33, 60, 8]])
    wanted = run_network(network, ids)
    assert wanted.shape == (1, 5, 66)
    np.testing.assert_allclose(run_model(model, ids), wanted, rtol=0, atol=2e-4)
    ids[0, 2:4] = 64, 65
    np.testing.assert_allclose(run_model(model, ids), run_network(network, ids), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_trained_rows_in_peft_and_the_runtime(name, tmp_path):
    checkpoint, target = build(name, tmp_path)
    model = jaxonnx.load(target).with_tokens(NEW)
    lora = jaxonnx.LoRA(rank=2, where="all-linear")
    data = {"input_ids": [[5, 64, 7, 8, 65, 9]] * 2}
    settings = {"loss": "causal_lm", "epochs": 30, "batch_size": 2, "progress": False}
    result = jaxonnx.train(model, data, lora=lora, optimizer=optax.adam(0.02), **settings)
    assert result.history.losses[-1] < 0.2 * result.history.losses[0]
    ids = np.array([[5, 64, 7, 8, 65, 9]])
    wanted = run_model(result.model, ids)
    result.lora.save(f"{tmp_path}/peft/")
    told = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert [64, 65] in told["trainable_token_indices"].values()
    network = read_network(checkpoint, resize=True)
    genai_builder.change_norms(network)
    network = peft.PeftModel.from_pretrained(network, tmp_path / "peft").eval()
    np.testing.assert_allclose(run_network(network, ids), wanted, rtol=0, atol=2e-4)
    result.model.save(f"{tmp_path}/tuned/")
    ours = result.model.generate(np.array([5]), max_new_tokens=5)
    assert ours.tolist() == [5, 64, 7, 8, 65, 9]
    np.testing.assert_array_equal(generate(tmp_path / "tuned", [5], 5), ours)
    loaded = jaxonnx.Adapters.load(tmp_path / "peft", model)
    np.testing.assert_allclose(run_model(loaded.apply(model), ids), wanted, rtol=0, atol=2e-5)


def test_the_runtime_reads_the_tokens(tmp_path):
    """Of a folder with a tokenizer of bytes, also behind a chat."""
    model = jaxonnx.load(DATA / "llm" / "qwen3-genai").with_tokens(NEW)
    model.save(f"{tmp_path}/saved/")
    theirs = genai.Tokenizer(genai.Model(f"{tmp_path}/saved"))
    for text in ("a list <tool>of</tool>", "<|im_start|>user\n<tool><|im_end|>"):
        ids = model.tokenizer.encode(text)
        assert {192} <= {*ids.tolist()}
        np.testing.assert_array_equal(theirs.encode(text), ids)
    ids = model.tokenizer.encode("a list <tool>", end=False)
    assert theirs.decode(ids) == "a list <tool>"
    ours = model.generate(ids, max_new_tokens=9, stop=[])
    np.testing.assert_array_equal(generate(tmp_path / "saved", ids, 9)[: len(ours)], ours)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", []),
        ("llama", ["is_symmetric=false"]),
        ("qwen3", []),  # whose embedding reads the codes of the output layer
        ("qwen3", ["int4_algo_config=k_quant"]),
        ("qwen3", ["shared_embeddings=false"]),
    ],
)
def test_rows_in_four_bits_in_the_runtime(name, options, tmp_path):
    quantized = ["block_size=32", "accuracy_level=1"]
    _, target = build(name, tmp_path, "int4", [*quantized, *options])
    model = jaxonnx.load(target).with_tokens(NEW)
    lora = jaxonnx.LoRA(rank=2, where="all-linear")
    data = {"input_ids": [[5, 64, 7, 8, 65, 9]] * 2}
    settings = {"loss": "causal_lm", "epochs": 40, "batch_size": 2, "progress": False}
    result = jaxonnx.train(model, data, lora=lora, optimizer=optax.adam(0.02), **settings)
    assert result.history.losses[-1] < 0.2 * result.history.losses[0]
    ours = result.model.generate(np.array([5]), max_new_tokens=5)
    assert ours.tolist() == [5, 64, 7, 8, 65, 9]
    result.model.save(f"{tmp_path}/tuned/")
    np.testing.assert_array_equal(generate(tmp_path / "tuned", [5], 5), ours)
