"""The table of files on the page about language models: what each is, and what is trained in it.

    python -m tests.support.llm_table

It is written between the markers of the page; `tests/docs/test_llm_table.py` checks it.
"""

import json

import jax
import onnx

import jaxonnx
from tests.support.paths import DATA, ROOT

LLM = DATA / "llm"
PAGE = ROOT / "jaxonnx" / "docs" / "language_models.md"
MARKERS = "<!-- files -->", "<!-- /files -->"
HEAD = "file", "written by", "attention", "loss at first", "trained in full", "adapted"
BUILDER = {
    "gemma3_text": "fp32, cpu",
    "gpt_oss": "int4, cpu",
    "lfm2": "fp32, cpu",
    "llama": "fp32, webgpu, graph capture",
    "phi3": "int4, int8 caches",
    "qwen2": "fp16, cuda, `prune_lm_head`",
    "qwen3": "fp16, cpu",
}
"""What the stored files of the builder are, which `genai_builder.STORED` has as arguments."""
ATTENTIONS = "GroupQueryAttention", "MultiHeadAttention", "CausalConvWithState", "QMoE"


def rows():
    """Yield the path, what wrote it, and the loss that transformers gives."""
    losses = json.loads((LLM / "builder" / "losses.json").read_text())["losses"]
    for name, what in BUILDER.items():
        yield LLM / "builder" / f"{name}.onnx", f"builder: {what}", losses[name]
    told = json.loads((LLM / "qwen3.json").read_text())["loss"]
    yield LLM / "qwen3-genai" / "model.onnx", "builder: fp32, cpu, a folder", told
    yield LLM / "qwen3-optimum" / "model.onnx", "optimum: fp32, caches", told
    merged = json.loads((LLM / "optimum-merged.json").read_text())["loss"]
    path = LLM / "optimum-merged" / "decoder_model_merged.onnx"
    yield path, "optimum: fp32, merged (`use_cache_branch`)", merged


def _row(path, what, loss):
    model = jaxonnx.load(path)
    types = {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    found = [name for name in ATTENTIONS if name in types] or ["basic operators"]
    adapted = jaxonnx.LoRA(rank=2, where="all-linear").attach(model, jax.random.key(0))
    name = path.relative_to(LLM).as_posix()
    numbers = f"{len(model.params)} tensors", f"{len(adapted.params) // 2} matrices"
    return f"`{name}`", what, ", ".join(found), f"{loss:.4f}", *numbers


def table():
    lines = (HEAD, ("---",) * len(HEAD), *(_row(*row) for row in rows()))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main():
    text = PAGE.read_text()
    start, end = MARKERS
    before, _, rest = text.partition(start)
    PAGE.write_text(f"{before}{start}\n{table()}\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
