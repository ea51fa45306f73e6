"""Adapters in onnxruntime-genai, on files of its builder."""

import shutil
import subprocess
import sys

import jax
import numpy as np
import onnx
import pytest

import jaxonnx
from jaxonnx._graph.weight_names import module_name

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore::FutureWarning")]
pytest.importorskip("torch")
genai = pytest.importorskip("onnxruntime_genai")
SIZE, WORDS = 128, 256
IDS = np.random.default_rng(0).integers(3, WORDS, (1, 9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with random weights: hf/, fp32/ and int4/, with separate projections."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        hidden_size=SIZE,
        intermediate_size=2 * SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "hf")
    vocabulary = {f"w{i}": i for i in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(
        folder / "hf"
    )
    for precision, fused in (("fp32", "false"), ("int4", "false"), ("fp32", "true")):
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
        out = folder / (precision + "_fused" * (fused == "true"))
        files = ["-i", folder / "hf", "-o", out, "-p", precision, "-c", folder]
        options = ["--extra_options", f"fuse_qkv={fused}"]
        subprocess.run([*builder, *files, *options], check=True, capture_output=True)
    path = folder / "int4" / "model.onnx"
    proto = onnx.load(path, load_external_data=False)
    for node in proto.graph.node:  # level 4 rounds activations to int8
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    onnx.save(proto, path)
    return folder


def logits(model):
    given = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    for value in model.inputs:
        if value.name.startswith("past"):
            given[value.name] = np.zeros((1, 2, 0, 64), np.float32)
    return np.asarray(model(**given)[0])


def drawn(model, rank):
    """The model with adapters of random numbers."""
    result = jaxonnx.LoRA(rank, alpha=2.0 * rank, where="*_proj*").attach(model, jax.random.key(0))
    key = jax.random.key(rank)
    return result.replace(
        params={
            n: 0.1 * jax.random.normal(key, v.shape) if "lora" in n else v
            for n, v in result.params.items()
        }
    )


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_adapters_of_onnxruntime_genai(folder, precision, tmp_path):
    source = folder / precision
    model, out = jaxonnx.load(source / "model.onnx"), tmp_path / "served"
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("model.onnx*"))
    drawn(model, 4).save(out / "model.onnx", adapters="inputs", external_data=True)

    def last_logits(path, adapter=None):
        net = genai.Model(str(path))
        params = genai.GeneratorParams(net)
        params.set_search_options(max_length=32)
        generator = genai.Generator(net, params)
        if adapter is not None:
            adapters = genai.Adapters(net)
            adapters.load(adapter, "ours")
            generator.set_active_adapter(adapters, "ours")
        generator.append_tokens(IDS[0].astype(np.int32))
        return np.array(generator.get_logits()).reshape(-1, WORDS)[-1]

    np.testing.assert_array_equal(last_logits(out), last_logits(source))
    for rank in (4, 6):
        tuned, file = drawn(model, rank), str(tmp_path / f"{rank}.onnx_adapter")
        jaxonnx.Adapters.of(tuned).save(file)
        expected = logits(tuned)[0, -1]
        np.testing.assert_allclose(last_logits(out, file), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_peft_on_packed_projections(folder, rslora, tmp_path):
    """PEFT's q_proj, k_proj, v_proj and o_proj, on a qkv_proj: its changes, and back."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    pattern = {"k_proj": 2}
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=modules, use_rslora=rslora, rank_pattern=pattern
    )
    net = peft.get_peft_model(LlamaForCausalLM.from_pretrained(folder / "hf").eval(), config)
    torch.manual_seed(0)
    for name, value in net.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(value, std=0.1)
    net.save_pretrained(tmp_path / "peft")

    def theirs(net):
        with torch.no_grad():
            return net(torch.from_numpy(IDS)).logits.numpy()

    model = jaxonnx.load(folder / "fp32_fused" / "model.onnx")
    adapters = jaxonnx.Adapters.load(tmp_path / "peft", model)
    assert any("qkv_proj" in name for name in adapters.layouts)
    for name in adapters.layouts:
        layer = net.base_model.model.model.layers[int(name.split(".")[2])].self_attn
        parts = modules[:3] if "qkv_proj" in name else modules[3:]
        delta = [getattr(layer, part).get_delta_weight("default") for part in parts]
        a, b = (np.asarray(adapters.values[f"{name}.lora_{end}"]) for end in "AB")
        found = adapters.alpha / adapters.rank * b @ a
        np.testing.assert_allclose(found, torch.cat(delta).detach().numpy(), rtol=1e-5, atol=1e-6)

    named = lambda name: module_name(name).replace(".attn.", ".self_attn.")  # noqa: E731
    adapters.save(f"{tmp_path}/back/", model, names=named)
    fresh = LlamaForCausalLM.from_pretrained(folder / "hf").eval()
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "back").eval()
    np.testing.assert_allclose(theirs(again), theirs(net.eval()), rtol=1e-3, atol=1e-4)
