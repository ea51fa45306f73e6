"""The architectures of transformers with tiny configurations, for `torch_zoo --transformers`."""

import re
from collections.abc import Callable, Iterable, Iterator

import jax
import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.oracles.torch_zoo import (
    NOT_EXPORTED,
    Table,
    exported,
    first,
    golden,
    move,
    silence,
    unexplained,
)
from tests.oracles.zoo_compare import compare

SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "hidden_dim", "ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_key_value_heads", "num_experts", "num_local_experts"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **{"vocab_size": 99, "image_size": 32, "patch_size": 8, "num_experts_per_tok": 1},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
}
"""The sizes of configurations, by the names that they go by; others stay as they are."""
LISTS = {"hidden_sizes": 8, "embed_dims": 8, "depths": 1, "layer_dims": 8}
"""Entries of lists of sizes, one a stage."""
LARGEST = 400_000
"""Numbers; a network that stays larger is left out."""


class First(nn.Module):
    """The first output of a model of transformers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(**{self.model.main_input_name: x}, return_dict=False)[0]


def build(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a small model of that type with moved parameters, and an input."""
    config = transformers.AutoConfig.for_model(kind)
    for name, size in SIZES.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, size)
    for name, size in LISTS.items():
        if isinstance(stages := getattr(config, name, None), list | tuple):
            setattr(config, name, [size * 2**i if size > 1 else 1 for i in range(len(stages))])
    config.use_cache = False
    for name in ("dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModel.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} numbers")
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    move(model)
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", 32)
        x = torch.randn(2, getattr(config, "num_channels", 3), side, side)
    else:
        x = torch.randint(3, 99, (2, 7))
    net = First(model).eval()
    first(net(x))
    return net, (x,)


def run_architectures(
    table: Table, pattern: str, in_time: Callable[[Iterable[str]], Iterator[str]]
) -> None:
    """Compare every architecture whose type matches, as both exporters write it."""
    for kind in in_time(sorted(k for k in MODEL_MAPPING_NAMES if re.fullmatch(pattern, k))):
        try:
            with silence():
                net, inputs = build(kind)
                found = golden(net, inputs, steps=False)
        except NOT_EXPORTED as error:
            table.networks["not built"] += 1
            table.explained[f"not built: {type(error).__name__}"] += 1
            continue
        for exporter, opset in (("legacy", 17), ("dynamo", 20)):
            content = exported(net, inputs, exporter, opset)
            findings = None if content is None else [*compare(content, found)]
            table.count(findings)
            for finding in unexplained(findings):
                place = re.sub(r"\.\d+\.", ".*.", finding.tensor) or kind
                detail = f"{finding.tensor} {finding.detail}"
                table.add(finding.kind, f"{kind}: {place}", f"{exporter} {opset}", detail)
            jax.clear_caches()
