"""Write tests/data/llm: a tiny Qwen3 with a tokenizer and a chat template, as exporters write it.

    python -m tests.data.make_llm genai      # transformers, torch, onnxruntime-genai 0.18
    python -m tests.data.make_llm optimum    # transformers 4.57, torch, optimum-onnx
    python -m tests.data.make_llm pairs      # transformers, torch, onnxscript

Two layers, hidden size 32, random weights. The tokenizer is trained on `pydoc_data.topics`.
`qwen3.json` has the loss of transformers for a few tokens, of two lengths. `pairs.onnx` is a Llama
whose mask has an entry for each pair of tokens.
"""

import contextlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

FOLDER = Path(__file__).with_name("llm")
VOCABULARY = 192
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def checkpoint(folder):
    """Write a Hugging Face checkpoint with random weights."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 0.1 if "embed" in name else 0.1 if p.ndim == 1 else p.shape[-1] ** -0.5
            p.copy_(torch.randn_like(p) * scale + (p.ndim == 1))
    model.save_pretrained(folder)
    ids = torch.randint(3, VOCABULARY, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    labels = torch.where(mask > 0, ids, -100)
    with torch.no_grad():
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss.item()
    tokens = [row[keep > 0].tolist() for row, keep in zip(ids, mask, strict=True)]
    (FOLDER / "qwen3.json").write_text(json.dumps({"tokens": tokens, "loss": loss}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator([text for text in topics.values() if text.isascii()], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def genai(source, target):
    """Run onnxruntime-genai's builder."""
    import onnxruntime_genai

    sys.path.insert(0, str(Path(onnxruntime_genai.__file__).parent / "models"))
    import builder

    arguments = None, str(source), str(target), "fp32", "cpu", str(source / "cache")
    with contextlib.redirect_stdout(io.StringIO()):
        options = builder.parse_extra_options(*arguments, [])
        builder.create_model(*arguments, **options)


def optimum(source, target):
    """Run optimum's exporter: a merged decoder, where it merges one."""
    from optimum.exporters.onnx import main_export

    task = "text-generation-with-past"
    main_export(str(source), target, task=task, do_validation=False, library_name="transformers")


def pairs():
    """Export a Llama with positions and a boolean mask (batch, 1, queries, keys)."""
    import onnx
    import torch
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, **sizes, **heads, use_cache=False, attn_implementation="sdpa"
    )
    torch.manual_seed(0)

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.LlamaForCausalLM(config)

        def forward(self, input_ids, attention_mask, position_ids):
            return self.model(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids
            ).logits

    batch, length = (torch.export.Dim(name) for name in ("batch", "length"))
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    program = torch.onnx.export(
        Network().eval(),
        (ids, mask, torch.arange(6).expand(2, 6)),
        dynamo=True,
        verbose=False,
        output_names=["logits"],
        dynamic_shapes=(
            {0: batch, 1: length},
            {0: batch, 2: length, 3: length},
            {0: batch, 1: length},
        ),
    )
    model = program.model_proto
    for node in model.graph.node:  # the exporting machine's file names
        del node.metadata_props[:]
    onnx.save(model, FOLDER / "pairs.onnx")


def main(which):
    if which == "pairs":
        pairs()
        return
    target = FOLDER / f"qwen3-{which}"
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder))
        {"genai": genai, "optimum": optimum}[which](Path(folder), target)
        text = (target / "tokenizer.json").read_text("utf-8")
        (target / "tokenizer.json").write_text(json.dumps(json.loads(text)), "utf-8")
    print(*sorted((p.name, p.stat().st_size) for p in target.iterdir()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
