"""Files of onnxruntime-genai's builder: tiny checkpoints with random weights, and what it writes.

    python -m tests.support.genai_builder    # writes tests/data/llm/builder
    python -m tests.support.genai_builder whisper    # tests/data/transformers/whisper-genai

It needs torch, transformers, tokenizers and onnxruntime-genai 0.18: the extra test-llm.
"""

import contextlib
import io
import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path

import onnx

from tests.support.paths import DATA

FOLDER = DATA / "llm" / "builder"
VOCABULARY, WINDOW, LAYERS = 64, 8, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LOCAL = {"head_dim": 16, "sliding_window": WINDOW}
GEMMA = LOCAL | {"query_pre_attn_scalar": 16, "hidden_size": 16}
"""The builder rounds the scale of Gemma's embeddings, sqrt(hidden_size), to two places."""
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    "phi": {"partial_rotary_factor": 1.0},
    # by the size of the vocabulary the builder knows heads: no other product may have it
    "phi3": {
        "original_max_position_embeddings": 64,
        "intermediate_size": 96,
        "num_key_value_heads": 2,
    },
    "mistral": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 1]},
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 2.0, "attention_multiplier": 0.25},
    "olmo": {},
    "nemotron": {"head_dim": 16, "partial_rotary_factor": 1.0},
    "gpt_oss": LOCAL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}
"""Model types of transformers, and what differs from `SIZES`."""

QUANTIZED = ["block_size=32", "accuracy_level=1"]
STORED = {
    "gemma3_text": ("fp32", "cpu", []),
    "gpt_oss": ("int4", "cpu", [*QUANTIZED, "qmoe_block_size=32"]),
    "lfm2": ("fp32", "cpu", []),
    "phi3": ("int4", "cpu", [*QUANTIZED, "kv_cache_quant_scheme=int8_per_tensor"]),
    "llama": ("fp32", "webgpu", ["use_webgpu_fp32=true", "enable_webgpu_graph=true"]),
    "qwen2": ("fp16", "cuda", ["prune_lm_head=true"]),
    "qwen3": ("fp16", "cpu", []),
}
"""The files in `FOLDER`: precision, execution provider and options of each."""


def write_checkpoint(architecture, folder):
    """Write a checkpoint of Hugging Face, and return its network."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(
        architecture, **(SIZES | ARCHITECTURES[architecture])
    )
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    randomize(network)
    if architecture == "gpt_oss":
        _store_float4(network)
    network.save_pretrained(folder)
    if architecture == "gpt_oss":
        _add_float4(folder)
    write_tokenizer(folder)
    return network


def write_tokenizer(folder):
    import transformers
    from tokenizers import Tokenizer, models

    words = {f"<{i}>": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<3>"))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<0>", eos_token="<1>", pad_token="<2>"
    )
    fast.save_pretrained(folder)


WHISPER = {
    "vocab_size": 48,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_target_positions": 32,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "dropout": 0.0,
}
WHISPER_TOKENS = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
"""The tokens from 2 on."""


def write_whisper(folder):
    """Write a checkpoint of Whisper, which always takes 3000 frames; return its network."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = transformers.WhisperConfig(**WHISPER, attn_implementation="eager")
    network = transformers.WhisperForConditionalGeneration(config).eval()
    sinusoids = network.model.encoder.embed_positions.weight
    before = sinusoids.detach().clone()
    randomize(network)
    with torch.no_grad():
        sinusoids.copy_(before)
    network.save_pretrained(folder)
    special = dict(enumerate(WHISPER_TOKENS, 2)) | {1: "<|endoftext|>"}
    words = {special.get(i, f"<{i}>"): i for i in range(WHISPER["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer.add_special_tokens([*special.values()])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[1])
    fast.save_pretrained(folder)
    return network


def whisper_batch():
    """Return features of three sounds, and their labels with padding."""
    import numpy as np

    random = np.random.default_rng(0)
    features = random.normal(size=(3, 8, 3000)).astype(np.float32)
    labels = random.integers(6, 48, (3, 7))
    labels[1, 4:], labels[2, 6:] = -100, -100
    return {"input_features": features, "labels": labels}


def store_whisper():
    """Write a folder of the builder's, with the first loss and gradients by transformers."""
    import numpy as np
    import torch

    folder = DATA / "transformers" / "whisper-genai"
    with tempfile.TemporaryDirectory() as place:
        network = write_whisper(Path(place, "torch"))
        build(Path(place, "torch"), Path(place, "onnx"), "fp32", "cpu")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(
            Path(place, "onnx"), folder, ignore=shutil.ignore_patterns("audio_processor*")
        )
    change_norms(network, 1e-5)
    batch = whisper_batch()
    loss = network(**{n: torch.from_numpy(x) for n, x in batch.items()}).loss
    loss.backward()
    watched = [
        "decoder.embed_tokens",
        "encoder.conv1",
        "encoder_attn.k_proj",
        "encoder_attn.q_proj",
    ]
    gradients = {
        f"gradient {name}": p.grad.numpy()
        for name, p in network.named_parameters()
        if name.endswith(".weight") and any(part in name for part in watched)
    }
    # features are random numbers with a seed, which the test draws again
    np.savez_compressed(folder / "step.npz", losses=[loss.item()], **gradients)


def randomize(network):
    """Give parameters random numbers of the size that keeps that of activations."""
    import torch

    with torch.no_grad():
        for name, p in network.named_parameters():
            scale = 0.1 if p.ndim == 1 else 0.3 if "embed" in name else p.shape[-1] ** -0.5
            p.copy_(torch.randn_like(p) * scale + (p if p.ndim == 1 else 0))


def _float4(names, shapes):
    """Yield names with random blocks and scales of float4, and the numbers that these stand for."""
    import torch

    generator = torch.Generator().manual_seed(1)
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    numbers = torch.cat([magnitudes, -magnitudes])
    for name, (experts, inputs, outputs) in zip(names, shapes, strict=True):
        size = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, size[:3], dtype=torch.uint8, generator=generator)
        codes = torch.stack([blocks & 15, blocks >> 4], -1).reshape(*size[:3], 32)
        values = numbers[codes.long()] * torch.pow(2.0, scales.float() - 127)[..., None]
        yield name, blocks, scales, values.reshape(experts, outputs, inputs).transpose(1, 2)


def _experts(tensors):
    names = sorted(name for name in tensors if name.endswith(("gate_up_proj", "down_proj")))
    return names, [tensors[name].shape for name in names]


def _store_float4(network):
    """Give experts the numbers of their float4 form, which the builder quantizes."""
    tensors = dict(network.named_parameters())
    for name, _, _, values in _float4(*_experts(tensors)):
        tensors[name].data.copy_(values)


def _add_float4(folder):
    """Add the float4 form of experts to a checkpoint, as gpt-oss is published."""
    from safetensors.torch import load_file, save_file

    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    for name, blocks, scales, _ in _float4(*_experts(tensors)):
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path, metadata={"format": "pt"})


def build(checkpoint, target, precision, provider, options=()):
    """Run the builder on a checkpoint; return the path of the file that it writes."""
    import onnxruntime_genai

    place = str(Path(onnxruntime_genai.__file__).with_name("models"))
    if place not in sys.path:
        sys.path.insert(0, place)
    import builder

    options = list(options)
    if any(option.startswith("kv_cache_quant_scheme") for option in options):
        scales = Path(checkpoint) / "cache_scales.json"
        told = {"k_scales": [0.03] * LAYERS, "v_scales": [0.02] * LAYERS}
        scales.write_text(json.dumps({"scales": told, "qmax": 128.0}))
        options.append(f"kv_cache_scale_file={scales}")
    where = (None, str(checkpoint), str(target), precision, provider, str(checkpoint / "cache"))
    logging.disable(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        told = builder.parse_extra_options(*where, options)
        config = told["hf_details"]["hf_config"]
        if config.model_type == "gemma3_text":  # the builder reads the keys of transformers 4
            config.rope_local_base_freq, config.rope_theta = 10000.0, 1e6
            config.rope_parameters["rope_type"] = "default"
        builder.create_model(*where, **told)
    logging.disable(logging.NOTSET)
    return target / "model.onnx"


def loss_of(network, ids):
    """Return the loss of next tokens, of the network as the builder writes it."""
    import torch

    change_norms(network)
    with torch.no_grad():
        return network(input_ids=torch.tensor(ids), labels=torch.tensor(ids)).loss.item()


def change_norms(network, epsilon=1e-6):
    """Make norms those of the builder: their epsilon, and OLMo's do not subtract the mean."""
    import torch

    for module in network.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = epsilon
        if type(module).__name__ == "OlmoLayerNorm":
            shape = module.normalized_shape
            module.forward = lambda x, shape=shape: torch.nn.functional.rms_norm(x, shape, eps=1e-6)


def list_matrices(network):
    """Return the names of the linear layers, without the head."""
    import torch

    linear = [n for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)]
    return sorted(name for name in linear if name != "lm_head")


def describe(tensors):
    """Return the shape of each tensor, and a sum that tells its values and their order."""
    import numpy as np

    def total(x):
        values = np.asarray(x, np.float64).ravel()
        return round(float(values @ np.cos(np.arange(values.size))), 6)

    return {name: [[*x.shape], total(x)] for name, x in sorted(tensors.items())}


def write_peft(network, ids):
    """Write adapters of PEFT with random numbers, and the logits with them, into `FOLDER`."""
    import numpy as np
    import peft
    import torch

    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules="all-linear")
    adapted = peft.get_peft_model(network, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(value, std=0.3)
        logits = adapted(input_ids=torch.tensor(ids)).logits.numpy()
    adapted.save_pretrained(FOLDER / "peft")
    (FOLDER / "peft" / "README.md").unlink()
    np.save(FOLDER / "peft" / "logits.npy", logits)


def main():
    import numpy as np
    from safetensors.numpy import load_file

    FOLDER.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (2, 12)).tolist()
    losses, modules, checkpoints = {}, {}, {}
    with tempfile.TemporaryDirectory() as place:
        for name, (precision, provider, options) in STORED.items():
            checkpoint, target = Path(place) / name, Path(place) / f"{name}-file"
            network = write_checkpoint(name, checkpoint)
            losses[name] = loss_of(network, ids)
            modules[name] = list_matrices(network)
            if name != "gpt_oss":  # has experts in another form
                checkpoints[name] = describe(load_file(checkpoint / "model.safetensors"))
            if name == "gemma3_text":
                write_peft(network, ids)
            path = build(checkpoint, target, precision, provider, options)
            onnx.save(onnx.load(path), FOLDER / f"{name}.onnx")
            shutil.rmtree(target)
    (FOLDER / "losses.json").write_text(json.dumps({"ids": ids, "losses": losses}) + "\n")
    (FOLDER / "checkpoints.json").write_text(json.dumps(checkpoints) + "\n")
    (FOLDER / "modules.json").write_text(json.dumps(modules, indent=0) + "\n")


if __name__ == "__main__":
    store_whisper() if sys.argv[1:] == ["whisper"] else main()
