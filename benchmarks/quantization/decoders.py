"""Perplexities of a decoder in 4 bits: `quantize` and training, beside onnxruntime-genai's builder.

    python -m benchmarks.quantization.decoders [--seeds 3]     # the extra test-llm

A small Llama learns the source of Python's library in PyTorch. onnxruntime-genai's builder writes
it in float32 and in 4 bits (blocks of 32, the logits too); jaxonnx quantizes the float32 folder,
or trains it for an epoch on the same texts. Each row is of other modules of the library, and of
the folder as it is saved.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import numpy as np

import jaxonnx
from benchmarks.quantization.lora_quality import HELD_OUT, MODULES, sources, tune
from tests.support import genai_builder
from tests.support.paths import DATA

TOKENIZER = DATA / "llm" / "qwen3-genai" / "tokenizer.json"
WIDTH = 128
"""The tokens of an example."""
BLOCKS, LARGE_BLOCKS = (
    jaxonnx.Quantization(weights="int4", activations=None, block=size) for size in (32, 128)
)
BUILDER = {
    "float32": ("fp32", ()),
    "builder, int4": ("int4", ("block_size=32",)),
    "builder, int4, k_quant": ("int4", ("block_size=32", "algo_config=k_quant")),
    "builder, int4 in blocks of 128": ("int4", ("block_size=128",)),
}
"""Rows of the builder: precision and options."""
QUANTIZE = {
    "quantize, int4": (BLOCKS, None),
    'quantize, int4, method="gptq"': (BLOCKS, "gptq"),
    'quantize, int4, method="awq"': (BLOCKS, "awq"),
    "quantize, int4 in blocks of 128": (LARGE_BLOCKS, None),
    'quantize, int4 in blocks of 128, method="gptq"': (LARGE_BLOCKS, "gptq"),
    "quantize, int8": (jaxonnx.Quantization(activations=None), None),
    "quantize, int8, activations uint8": (jaxonnx.Quantization(), None),
}
"""Rows of `quantize`: the scheme and the method."""
TRAIN = {"train, float32": None, "train, int4": BLOCKS}
"""Rows of `train`: what it rounds."""


def write_checkpoint(folder: Path, rows: list[dict[str, str]], steps: int, seed: int) -> None:
    """Train a Llama on texts, and write it as transformers does."""
    import torch
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER), eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WIDTH,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    network = transformers.LlamaForCausalLM(config)
    tokens = torch.tensor([i for row in rows for i in tokenizer(row["text"])["input_ids"]])
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    draw = random.Random(seed)
    for _ in range(steps):
        starts = [draw.randrange(len(tokens) - WIDTH) for _ in range(16)]
        ids = torch.stack([tokens[i : i + WIDTH] for i in starts])
        loss = network(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_folders(place: Path, learned: list[dict[str, str]], seed: int):
    """Write the folder of each row; yield its name and path."""
    for name, (precision, more) in BUILDER.items():
        genai_builder.build(place / "checkpoint", place / name, precision, "cpu", more)
        yield name, place / name
    model = jaxonnx.load(place / "float32")
    settings = {"batch_size": 16, "preprocess": {"max_length": WIDTH}}
    for name, (scheme, method) in QUANTIZE.items():
        quantized = jaxonnx.quantize(model, learned, scheme, method=method, **settings)
        quantized.save(f"{place / name}/")
        yield name, place / name
    for name, scheme in TRAIN.items():
        trained = tune(
            model, learned, 3e-4, 1, seed, quantize=scheme, preprocess={"max_length": WIDTH}
        ).model
        trained.save(f"{place / name}/")
        yield name, place / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="of 16 rows in PyTorch")
    parser.add_argument("--seeds", type=int, default=1, help="of the checkpoint and its training")
    options = parser.parse_args()
    learned, held_out, start = sources(MODULES), sources(HELD_OUT), time.perf_counter()
    losses: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as place:
            write_checkpoint(Path(place) / "checkpoint", learned, options.steps, seed)
            for name, path in write_folders(Path(place), learned, seed):
                values = jaxonnx.evaluate(
                    path,
                    held_out,
                    loss="causal_lm",
                    batch_size=16,
                    preprocess={"max_length": WIDTH},
                )
                losses.setdefault(name, []).append(values["loss"])
                sizes[name] = sum(f.stat().st_size for f in path.glob("model.onnx*"))
                spent = time.perf_counter() - start
                print(f"{spent:.0f} s, {seed}, {name}: {np.exp(values['loss']):.3f}", flush=True)
    print("\n| | perplexity | to float32 | megabytes |\n|---|---|---|---|")
    for name, values in losses.items():
        perplexity = np.exp(values)
        ratio = perplexity / np.exp(losses["float32"])
        print(
            f"| {name} | {show(perplexity)} | {show(ratio)} | {sizes[name] / 1e6:.2f} |", flush=True
        )


def show(values: np.ndarray) -> str:
    """Return the mean of seeds and, of several, their standard deviation."""
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
