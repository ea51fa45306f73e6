"""Folders of PEFT in both directions: its logits are those of the file with the same adapters.

Needs peft, torch and transformers, and what writes the files: onnxruntime-genai and mobius (with
transformers 5), or optimum. CI has none of them.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest

import jaxonnx
from tests.support import genai_builder
from tests.support.adapter_files import changed
from tests.support.genai_builder import ARCHITECTURES, LAYERS, SIZES

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore")]

IDS = np.random.default_rng(0).integers(3, 60, (2, 9))
LLAMA = SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": False}
MOBIUS = {
    "llama": {},
    "mistral": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "hidden_size": 16,
        "layer_types": ["sliding_attention"] * LAYERS,
    },
    "olmo2": {},
    "phi": {"partial_rotary_factor": 1.0},
    "phi3": ARCHITECTURES["phi3"],
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
OPTIMUM = {
    "llama": {},
    "mistral": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "layer_types": ["full_attention"] * LAYERS},
    "olmo2": {},
    "phi3": ARCHITECTURES["phi3"],
    "gpt2": {"n_embd": 32, "n_layer": LAYERS, "n_head": 2, "n_positions": 64},
    "gpt_neox": {},
    "bloom": {"n_head": 2, "n_layer": LAYERS},
    "falcon": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "t5": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 2,
    },
}


def write_network(architecture, settings, folder):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(architecture, **(LLAMA | settings))
    network = kind_of(config).from_config(config).eval()
    genai_builder.randomize(network)
    network.save_pretrained(folder)


def kind_of(config):
    pairs = transformers.AutoModelForSeq2SeqLM
    return pairs if config.is_encoder_decoder else transformers.AutoModelForCausalLM


def read_network(folder):
    kind = kind_of(transformers.AutoConfig.from_pretrained(folder))
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def read_with_changed_norms(folder):
    network = read_network(folder)
    genai_builder.change_norms(network)
    return network


def run_network(network):
    ids = torch.from_numpy(IDS)
    named = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    named |= {"decoder_input_ids": ids} if network.config.is_encoder_decoder else {}
    with torch.no_grad():
        return network(**named).logits.numpy()


def run_model(model):
    whole, named = model.without_cache(), {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    named["decoder_input_ids"] = IDS
    named["position_ids"] = np.broadcast_to(np.arange(IDS.shape[1]), IDS.shape)
    result = whole(**{value.name: named[value.name] for value in whole.inputs})
    return np.asarray(result[0] if isinstance(result, tuple) else result)


def check_both_directions(
    checkpoint, model, folder, read_network=read_network, dora=False, where="all-linear"
):
    """Load what PEFT saved, and let PEFT load what was trained and saved here."""
    base = run_network(read_network(checkpoint))
    atol = 1e-5 * max(1, np.abs(base).max())
    np.testing.assert_allclose(run_model(model), base, rtol=0, atol=atol)

    settings = {"r": 3, "lora_alpha": 5, "target_modules": where, "use_rslora": True}
    settings |= {"use_dora": dora}
    theirs = peft.get_peft_model(read_network(checkpoint), peft.LoraConfig(**settings)).eval()
    torch.manual_seed(1)
    for name, value in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(value, std=0.2)
    theirs.save_pretrained(folder / "theirs")
    adapters = jaxonnx.Adapters.load(folder / "theirs", model)
    wanted = run_network(theirs)
    assert np.abs(wanted - base).max() > 0.01 * np.abs(base).max()
    np.testing.assert_allclose(run_model(adapters.attach(model)), wanted, rtol=0, atol=atol)

    pairs = bool(model.folder and "encoder" in model.folder.roles)
    lora = jaxonnx.LoRA(rank=4, alpha=8, dora=dora, where=[*adapters.layouts])
    trained = jaxonnx.train(
        model,
        {"input_ids": IDS} | ({"labels": IDS} if pairs else {}),
        loss="seq2seq_lm" if pairs else "causal_lm",
        optimizer=optax.adam(1e-1),
        epochs=3,
        lora=lora,
        progress=False,
    ).lora
    for ours, name in ((trained, "ours"), (adapters, "again")):
        ours.save(f"{folder}/{name}/", model)
        logits = run_network(
            peft.PeftModel.from_pretrained(read_network(checkpoint), folder / name).eval()
        )
        wanted = run_model(ours.attach(model))
        assert np.abs(wanted - base).max() > 0.01 * np.abs(base).max()
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_files_of_the_builder(architecture, tmp_path):
    pytest.importorskip("onnxruntime_genai")
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    genai_builder.write_checkpoint(architecture, checkpoint)
    genai_builder.build(checkpoint, target, "fp32", "cpu")
    dora = architecture in ("qwen3", "phi3")
    model = jaxonnx.load(target)
    check_both_directions(checkpoint, model, tmp_path, read_with_changed_norms, dora)


def test_the_decoder_of_a_vision_language_model(tmp_path):
    """PEFT adapts it in `model.language_model`; the builder writes it alone."""
    pytest.importorskip("onnxruntime_genai")
    vision = {"model_type": "pixtral", "hidden_size": 24, "intermediate_size": 24, "head_dim": 12}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    text = LLAMA | {"model_type": "mistral", "head_dim": 16}
    settings = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    kind = transformers.AutoModelForImageTextToText
    torch.manual_seed(0)
    network = kind.from_config(transformers.Mistral3Config(**settings)).eval()
    genai_builder.randomize(network)
    network.save_pretrained(tmp_path / "hf")
    genai_builder.write_tokenizer(tmp_path / "hf")
    genai_builder.build(tmp_path / "hf", tmp_path / "onnx", "fp32", "cpu", ["exclude_embeds=false"])

    def read_network(folder):
        whole = kind.from_pretrained(folder, dtype=torch.float32).eval()
        genai_builder.change_norms(whole)
        return whole

    where = r".*language_model.*_proj"
    check_both_directions(
        tmp_path / "hf", jaxonnx.load(tmp_path / "onnx"), tmp_path, read_network, where=where
    )


@pytest.mark.parametrize("provider", ["default", "cpu"])
@pytest.mark.parametrize("architecture", MOBIUS)
def test_files_of_mobius(architecture, provider, tmp_path):
    pytest.importorskip("mobius")
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    write_network(architecture, MOBIUS[architecture], checkpoint)
    mobius = Path(sys.executable).with_name("mobius")
    folders = ["--config", checkpoint, "--ep", provider, target]
    subprocess.run([mobius, "build", *folders], check=True, capture_output=True)
    check_both_directions(checkpoint, jaxonnx.load(target / "model.onnx"), tmp_path)


@pytest.mark.parametrize("architecture", OPTIMUM)
def test_files_of_optimum(architecture, tmp_path):
    export = pytest.importorskip("optimum.exporters.onnx").main_export
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    write_network(architecture, OPTIMUM[architecture], checkpoint)
    kind = "text2text" if architecture == "t5" else "text"
    settings = {"task": f"{kind}-generation-with-past", "do_validation": False}
    export(str(checkpoint), target, library_name="transformers", **settings)
    check_both_directions(checkpoint, jaxonnx.load(target), tmp_path)


def test_peft_finds_the_model_that_was_exported(tmp_path, monkeypatch):
    """By `_name_or_path` of optimum's folder, or the argument."""
    export = pytest.importorskip("optimum.exporters.onnx").main_export
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    write_network("llama", {}, checkpoint)
    settings = {"task": "text-generation-with-past", "do_validation": False}
    export(str(checkpoint), target, library_name="transformers", **settings)
    model = jaxonnx.load(target)
    adapted = changed(model, 2, "attention")
    wanted = run_model(adapted)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "_name_or_path": str(checkpoint)}))
    jaxonnx.Adapters.of(adapted).save(f"{tmp_path}/found/", model)
    (target / "config.json").write_text(json.dumps({**config, "_name_or_path": ""}))
    jaxonnx.Adapters.of(adapted).save(f"{tmp_path}/named/", model, base_model=str(checkpoint))
    for name in ("found", "named"):
        network = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / name).eval()
        np.testing.assert_allclose(run_network(network), wanted, rtol=0, atol=1e-5)


def test_embeddings_whole_layers_and_combined_adapters(tmp_path):
    """Of an untied Llama by the builder: PEFT's adapters of both ends, and its weighted sums."""
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("onnxruntime_genai")
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    genai_builder.write_checkpoint("llama", checkpoint)
    genai_builder.build(checkpoint, target, "fp32", "cpu")
    model = jaxonnx.load(target)

    def write(name, seed, **settings):
        config = peft.LoraConfig(r=2, lora_alpha=3 + seed, **settings)
        theirs = peft.get_peft_model(read_network(checkpoint), config).eval()
        torch.manual_seed(seed)
        for key, value in theirs.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                torch.nn.init.normal_(value, std=0.2)
        theirs.save_pretrained(tmp_path / name)
        return run_network(theirs)

    def check(adapters, wanted):
        atol = 1e-5 * max(1, np.abs(wanted).max())
        np.testing.assert_allclose(run_model(adapters.attach(model)), wanted, rtol=0, atol=atol)

    ends = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    wanted = write("ends", 1, **ends)
    adapters = jaxonnx.Adapters.load(tmp_path / "ends", model)
    check(adapters, wanted)
    adapters.save(f"{tmp_path}/back/", model)
    again = peft.PeftModel.from_pretrained(read_network(checkpoint), tmp_path / "back").eval()
    np.testing.assert_allclose(run_network(again), wanted, rtol=0, atol=1e-4)
    check(
        jaxonnx.Adapters.load(tmp_path / "back", model),
        wanted,
    )

    write("first", 1, target_modules=["q_proj", "down_proj", "lm_head"])
    write("second", 2, target_modules=["q_proj", "down_proj", "lm_head"])
    ours = [jaxonnx.Adapters.load(tmp_path / name, model) for name in ("first", "second")]
    theirs = peft.PeftModel.from_pretrained(read_network(checkpoint), tmp_path / "first", "first")
    theirs.load_adapter(tmp_path / "second", "second")
    for method in ("linear", "cat"):
        names, factors = ["first", "second"], [0.7, 0.4]
        theirs.add_weighted_adapter(names, factors, method, combination_type=method)
        theirs.set_adapter(method)
        combined = jaxonnx.Adapters.combine(ours, factors, method)
        check(combined, run_network(theirs.eval()))


@pytest.mark.parametrize("stabilized", [(True, True), (True, False), (False, True)])
def test_combined_adapters_with_stabilized_scales(stabilized, tmp_path):
    """`use_rslora`: the weighted sum of the changes, which PEFT scales once more by the first."""
    pytest.importorskip("onnxruntime_genai")
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    genai_builder.write_checkpoint("llama", checkpoint)
    genai_builder.build(checkpoint, target, "fp32", "cpu")
    model = jaxonnx.load(target)
    modules = ["q_proj", "down_proj", "lm_head", "embed_tokens"]
    ours = []
    for i, rslora in enumerate(stabilized):
        settings = {"r": 2 + 2 * i, "lora_alpha": 3 + i, "use_rslora": rslora}
        config = peft.LoraConfig(target_modules=modules, **settings)
        network = peft.get_peft_model(read_network(checkpoint), config)
        torch.manual_seed(i)
        for key, value in network.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(value, std=0.2)
        network.save_pretrained(tmp_path / f"{i}")
        ours.append(jaxonnx.Adapters.load(tmp_path / f"{i}", model))
    theirs = peft.PeftModel.from_pretrained(read_network(checkpoint), tmp_path / "0", "0")
    theirs.load_adapter(tmp_path / "1", "1")
    factors = [0.7, -0.4]
    theirs.add_weighted_adapter(["0", "1"], factors, "cat", combination_type="cat")
    theirs.set_adapter("cat")
    layers = [m for m in theirs.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert len(layers) == 2 * LAYERS + 2
    for layer in layers:  # rank / sqrt(rank) with `use_rslora`, though the factors have all scales
        assert layer.scaling["cat"] == pytest.approx(6**0.5 if stabilized[0] else 1)
        layer.scaling["cat"] = 1.0
        parts = [w * layer.get_delta_weight(n) for n, w in zip("01", factors, strict=True)]
        torch.testing.assert_close(layer.get_delta_weight("cat"), sum(parts))
    expected = run_network(theirs.eval())
    combined = jaxonnx.Adapters.combine(ours, factors)
    atol = 1e-5 * max(1, np.abs(expected).max())
    np.testing.assert_allclose(run_model(combined.attach(model)), expected, rtol=0, atol=atol)
    combined.save(f"{tmp_path}/back/", model)
    again = peft.PeftModel.from_pretrained(read_network(checkpoint), tmp_path / "back").eval()
    np.testing.assert_allclose(run_network(again), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "modules", [["lm_head"], ["embed_tokens"], ["q_proj", "lm_head", "embed_tokens"]]
)
@pytest.mark.parametrize("ties", [False, True])  # `ensure_weight_tying` adapts both ends
def test_both_ends_of_a_tied_table_in_four_bits(modules, ties, tmp_path):
    """Refused where the file has one table for both; the file that the error names takes them."""
    pytest.importorskip("onnxruntime_genai")
    checkpoint = tmp_path / "hf"
    network = genai_builder.write_checkpoint("qwen3", checkpoint)
    with torch.no_grad():  # numbers that 4 bits have
        for p in network.parameters():
            if p.ndim == 2:
                integers = torch.randint(-7, 8, p.shape)
                integers.view(-1, 32)[:, 0] = -8
                p.copy_(integers * 2.0**-5)
    network.save_pretrained(checkpoint)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=modules, ensure_weight_tying=ties)
    theirs = peft.get_peft_model(read_with_changed_norms(checkpoint), config).eval()
    torch.manual_seed(1)
    for key, value in theirs.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(value, std=0.2)
    theirs.save_pretrained(tmp_path / "peft")
    base, expected = run_network(read_with_changed_norms(checkpoint)), run_network(theirs)
    atol = 1e-5 * max(1, np.abs(expected).max())
    models = {}
    for shared in ("true", "false"):
        options = [*genai_builder.QUANTIZED, f"shared_embeddings={shared}"]
        genai_builder.build(checkpoint, tmp_path / shared, "int4", "cpu", options)
        models[shared] = jaxonnx.load(tmp_path / shared, tied=[])
        np.testing.assert_allclose(run_model(models[shared]), base, rtol=0, atol=atol)
    with pytest.raises(jaxonnx.InputError, match=r"both the embedding .*shared_embeddings=false"):
        jaxonnx.Adapters.load(tmp_path / "peft", models["true"])
    adapters = jaxonnx.Adapters.load(tmp_path / "peft", models["false"])
    logits = run_model(adapters.attach(models["false"]))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=atol)
    adapters.save(f"{tmp_path}/back/", models["false"])
    again = peft.PeftModel.from_pretrained(read_with_changed_norms(checkpoint), tmp_path / "back")
    np.testing.assert_allclose(run_network(again.eval()), expected, rtol=0, atol=atol)


def test_patterns_of_ranks(tmp_path):
    """Each module has the rank and the scale of the first pattern at the end of its name."""
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("onnxruntime_genai")
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    genai_builder.write_checkpoint("llama", checkpoint)
    genai_builder.build(checkpoint, target, "fp32", "cpu")
    config = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules="all-linear",
        rank_pattern={"q_proj": 3, r"layers\.0\.mlp\.down_proj": 1, "proj": 4},
        alpha_pattern={"up_proj": 7, r"^model\.layers\.1\.self_attn\.o_proj": 5},
    )
    theirs = peft.get_peft_model(read_network(checkpoint), config).eval()
    torch.manual_seed(1)
    for key, value in theirs.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(value, std=0.2)
    theirs.save_pretrained(tmp_path / "peft")
    model = jaxonnx.load(target)
    adapters = jaxonnx.Adapters.load(tmp_path / "peft", model)
    wanted = run_network(theirs)
    atol = 1e-5 * max(1, np.abs(wanted).max())
    np.testing.assert_allclose(run_model(adapters.attach(model)), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "setting", ["bias_all", "conv", "conv_dora", "olora", "pissa_dora", "saved"]
)
def test_settings_back_in_peft(setting, tmp_path):
    """Adapters that PEFT trained with a setting, written here, and loaded by PEFT again."""
    from tests.data.make_peft import Network
    from tests.lora.test_peft_settings import STORED, load_network, write_folder

    model = load_network()
    adapters = jaxonnx.Adapters.load(write_folder(tmp_path / "theirs", setting), model)
    adapters.save(tmp_path / "back", model)
    network = peft.PeftModel.from_pretrained(Network(), tmp_path / "back").eval()
    outputs = network(torch.from_numpy(STORED["ids"])).detach().numpy()
    np.testing.assert_allclose(outputs, STORED[setting], rtol=0, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_kernels_in_groups_in_peft(groups, tmp_path):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=1, groups=groups))
    x, path = torch.randn(2, 4, 5, 5), tmp_path / "conv.onnx"
    torch.onnx.export(network, (x,), path, dynamo=False)
    model = jaxonnx.load(path)
    adapters = jaxonnx.Adapters.of(changed(model, 1, "0.weight"))
    adapters.save(tmp_path / "peft", model)
    loaded = peft.PeftModel.from_pretrained(network, tmp_path / "peft").eval()
    outputs = loaded(x).detach().numpy()
    np.testing.assert_allclose(outputs, adapters.attach(model)(x.numpy()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3_text", "lfm2"])
def test_vectors_and_a_part_of_a_matrix_with_dora(architecture, tmp_path):
    """Norms and biases beside adapters of queries alone, which files pack with keys and values."""
    pytest.importorskip("onnxruntime_genai")
    checkpoint, target = tmp_path / "hf", tmp_path / "onnx"
    genai_builder.write_checkpoint(architecture, checkpoint)
    genai_builder.build(checkpoint, target, "fp32", "cpu")
    model = jaxonnx.load(target)
    base = read_with_changed_norms(checkpoint)
    norms = [n for n, m in base.named_modules() if type(m).__name__.endswith("Norm")]
    config = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=["q_proj"],
        modules_to_save=norms,
        bias="all",
        use_dora=True,
    )
    theirs = peft.get_peft_model(base, config).eval()
    torch.manual_seed(1)
    for value in theirs.parameters():
        if value.requires_grad:
            value.data += 0.2 * torch.randn_like(value)
    theirs.save_pretrained(tmp_path / "theirs")
    adapters = jaxonnx.Adapters.load(tmp_path / "theirs", model)
    adapters.save(f"{tmp_path}/ours/", model)
    again = peft.PeftModel.from_pretrained(
        read_with_changed_norms(checkpoint), tmp_path / "ours"
    ).eval()
    wanted = run_network(theirs)
    atol = 2e-5 * max(1, np.abs(wanted).max())
    np.testing.assert_allclose(run_model(adapters.attach(model)), wanted, rtol=0, atol=atol)
    np.testing.assert_allclose(run_network(again), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("trainable", [{"fc.weight", "fc.bias"}, {"fc.weight"}])
def test_a_module_whose_name_ends_as_that_of_another_one(trainable, tmp_path):
    """As DistilBERT's pre_classifier and classifier: PEFT reads both as trained in full."""
    from tests.lora.test_peft_modules import load_heads, train_heads

    model = load_heads()
    adapted = train_heads(model, trainable, "body.weight")
    adapted.lora.save(f"{tmp_path}/peft/", model)
    sizes = {"body": (4, 4), "pre_fc": (4, 6), "relu": None, "fc": (6, 3)}
    layers = {
        name: torch.nn.ReLU() if size is None else torch.nn.Linear(*size, bias=name != "body")
        for name, size in sizes.items()
    }
    network = torch.nn.Sequential()
    for name, layer in layers.items():
        network.add_module(name, layer)
    network.load_state_dict(
        {name: torch.from_numpy(np.array(x)) for name, x in model.params.items()}
    )
    loaded = peft.PeftModel.from_pretrained(network, tmp_path / "peft").eval()
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    outputs = loaded(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(outputs, adapted.model(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_of_a_module_around_the_network(tied, tmp_path):
    """PEFT finds the modules of the network, whose names the file has behind "net."."""
    write_network("llama", {"tie_word_embeddings": tied}, tmp_path / "checkpoint")

    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = read_network(tmp_path / "checkpoint")

        def forward(self, input_ids):
            return self.net(input_ids=input_ids, use_cache=False).logits

    path, named = tmp_path / "net.onnx", {"input_names": ["input_ids"], "verbose": False}
    torch.onnx.export(Wrapper().eval(), (torch.from_numpy(IDS),), path, dynamo=True, **named)
    model = jaxonnx.load(path)
    adapted = changed(model, 2, "all-linear")
    jaxonnx.Adapters.of(adapted).save(tmp_path / "peft", model)
    theirs = peft.PeftModel.from_pretrained(
        read_network(tmp_path / "checkpoint"), tmp_path / "peft"
    )
    wanted = run_network(theirs.eval())
    np.testing.assert_allclose(adapted(IDS), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    again = jaxonnx.Adapters.load(tmp_path / "peft", model).attach(model)
    np.testing.assert_allclose(again(IDS), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
