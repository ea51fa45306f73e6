"""Write tests/data/transformers: tiny networks of several families, as optimum exports them.

    python -m tests.data.make_transformers [name ...]    # transformers 4.57, torch, optimum-onnx

One layer each, hidden size 16, random weights. Beside each network is what transformers computes of
a batch: `step.npz` has the inputs and labels, the first loss, gradients of a few weights ("gradient
<PyTorch's name>"), and the losses of five steps of Adam ("losses").
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as t
from optimum.exporters.onnx import main_export

FOLDER = Path(__file__).with_name("transformers")
SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
RATE = 1e-3


def new(kind: Any, config: Any) -> Any:
    """Return a network with weights of a size at which each layer matters."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                table = "embed" in name or "shared" in name
                p.copy_(torch.randn_like(p) * (0.3 if table else p.shape[-1] ** -0.5))
    return model


def export(name: str, model: Any, task: str, keep: tuple[str, ...], **sizes: int) -> None:
    """Write the files of one network."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder, "torch"))
        target = Path(folder, "onnx")
        settings = {"task": task, "do_validation": False, "library_name": "transformers"}
        main_export(str(Path(folder, "torch")), target, **settings, **sizes)
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        (FOLDER / name).mkdir(parents=True)
        for file in (*keep, "config.json", "generation_config.json"):
            if (target / file).exists():
                shutil.copy(target / file, FOLDER / name / file)


def record(
    name: str, model: Any, batch: dict[str, torch.Tensor], loss: Callable[..., Any], watched: str
) -> None:
    """Write what PyTorch computes of a batch."""
    weights = dict(model.named_parameters())
    names = [n for n in weights if any(part in n for part in watched.split())]
    first = loss(model, batch)
    first.backward()
    found = {f"gradient {n}": weights[n].grad.numpy().copy() for n in names}
    optimizer, losses = torch.optim.Adam(model.parameters(), RATE), []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    arrays = {n: x.numpy() for n, x in batch.items()}
    np.savez_compressed(FOLDER / name / "step.npz", losses=np.float32(losses), **arrays, **found)


def tokens(rows: int, width: int, least: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens and a mask with rows of several lengths."""
    ids = torch.randint(least, 45, (rows, width))
    mask = (torch.arange(width) < torch.arange(width, width - rows, -1)[:, None]).long()
    return ids * mask, mask


def bert() -> None:
    config = t.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = new(t.BertModel, config)
    export("bert", model, "feature-extraction", ("model.onnx",))
    ids, mask = tokens(6, 9)

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> Any:
        """Return MultipleNegativesRankingLoss of Sentence Transformers, on means of tokens."""
        kept = batch["attention_mask"][..., None].float()
        hidden = model(**batch).last_hidden_state
        pooled = torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1))
        scores = 20 * pooled[::2] @ pooled[1::2].T
        return torch.nn.functional.cross_entropy(scores, torch.arange(3))

    record("bert", model, {"input_ids": ids, "attention_mask": mask}, loss, "word_emb query.weight")


def clip() -> None:
    text = SIZES | {"bos_token_id": 46, "eos_token_id": 47, "pad_token_id": 47}
    vision = {n: v for n, v in SIZES.items() if n not in ("vocab_size", "max_position_embeddings")}
    vision |= {"image_size": 16, "patch_size": 8}
    config = t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    model = new(t.CLIPModel, config)
    export("clip", model, "zero-shot-image-classification", ("model.onnx",))
    ids, mask = tokens(4, 7)
    ids[torch.arange(4), mask.sum(1) - 1] = 47
    batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(4, 3, 16, 16)}

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> Any:
        model.logit_scale.requires_grad_(False)  # the file has its exponential as a constant
        return model(**batch, return_loss=True).loss

    record("clip", model, batch, loss, "text_projection patch_embedding")


def seq2seq(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    return model(**batch).loss


def t5() -> None:
    config = t.T5Config(
        vocab_size=48,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8,
    )
    model = new(t.T5ForConditionalGeneration, config)
    files = ("encoder_model.onnx", "decoder_model.onnx")
    export("t5", model, "text2text-generation", files)
    files = ("encoder_model.onnx", "decoder_model_merged.onnx")
    export("t5-merged", model, "text2text-generation-with-past", files)
    ids, mask = tokens(4, 9)
    labels, counts = tokens(4, 6)
    labels[counts == 0] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    record("t5", model, batch, seq2seq, "shared EncDecAttention.q encoder.block.0.layer.0.SelfA")


def whisper() -> None:
    config = t.WhisperConfig(
        vocab_size=48,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=1,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=2,
        begin_suppress_tokens=None,
        suppress_tokens=None,
        dropout=0.0,
    )
    model = new(t.WhisperForConditionalGeneration, config)
    files = ("encoder_model.onnx", "decoder_model.onnx")
    export("whisper", model, "automatic-speech-recognition", files, nb_max_frames=20)
    labels, counts = tokens(3, 7)
    labels[counts == 0] = -100
    batch = {"input_features": torch.randn(3, 8, 20), "labels": labels}
    record("whisper", model, batch, seq2seq, "embed_tokens encoder.conv1.weight encoder_attn.q")


def vit() -> None:
    vision = {n: v for n, v in SIZES.items() if n not in ("vocab_size", "max_position_embeddings")}
    config = t.ViTConfig(
        **vision,
        image_size=16,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = new(t.ViTForImageClassification, config)
    export("vit", model, "image-classification", ("model.onnx",))
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 3, 4, 1])}
    record("vit", model, batch, seq2seq, "cls_token classifier")


if __name__ == "__main__":
    for write in (bert, clip, t5, whisper, vit):
        if write.__name__ in sys.argv[1:] or not sys.argv[1:]:
            write()
    for path in sorted(FOLDER.glob("*/*.json")):  # nothing of the exporting machine
        settings = json.loads(path.read_text())
        settings.pop("_name_or_path", None)
        path.write_text(json.dumps(settings, indent=2) + "\n")
    sizes = {str(p.relative_to(FOLDER)): p.stat().st_size for p in FOLDER.glob("*/*")}
    print(*sorted(sizes.items()), sep="\n")
