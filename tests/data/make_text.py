"""Writes text/llama.onnx, a small Llama for text of any length, and what PyTorch makes of it.

    python tests/data/make_text.py

It needs torch and transformers, which need not be installed for the tests; the file was written by
torch 2.15 and transformers 5.23. The tokens are ASCII characters, and the weights are random.
"""

from pathlib import Path

import numpy as np
import onnx
import torch
import transformers

FOLDER = Path(__file__).parent / "text"
LENGTHS = 9, 4, 6


class Network(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=256,
        use_cache=False,
        tie_word_embeddings=True,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    names = "input_ids", "attention_mask"
    example = torch.arange(1, 13).reshape(2, 6), torch.ones(2, 6, dtype=torch.long)
    program = torch.onnx.export(
        Network(model).eval(),
        example,
        dynamo=True,
        dynamic_shapes=dict.fromkeys(names, axes),
        input_names=names,
        output_names=["logits"],
    )
    proto = program.model_proto
    for value in (*proto.graph.node, *proto.graph.value_info):  # the exporting machine's file names
        del value.metadata_props[:]
    onnx.save(proto, FOLDER / "llama.onnx")

    random = np.random.default_rng(0)
    ids, mask = np.zeros((2, len(LENGTHS), max(LENGTHS)), np.int64)
    for i, length in enumerate(LENGTHS):
        ids[i, :length], mask[i, :length] = random.integers(1, 128, length), 1
    labels = np.where(mask > 0, ids, -100)
    outputs = model(*map(torch.tensor, (ids, mask)), labels=torch.tensor(labels))
    outputs.loss.backward()
    gradient = dict(model.named_parameters())["model.layers.0.mlp.down_proj.weight"].grad
    np.savez(
        FOLDER / "llama.npz",
        input_ids=ids,
        attention_mask=mask,
        loss=outputs.loss.item(),
        logits=outputs.logits.detach().numpy(),
        grad=gradient.numpy(),
    )


if __name__ == "__main__":
    main()
