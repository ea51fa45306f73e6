"""What few bits cost a decoder: `quantize` and training, beside onnxruntime's quantizers.

    python -m benchmarks.quantization.decoders                   # the extra test-llm; one seed
    python -m benchmarks.quantization.decoders --size large --folder decoders --only "128|float32"
    python -m benchmarks.quantization.decoders --costs --folder decoders     # after the first

A Llama learns the source of Python's library in PyTorch, and onnxruntime-genai's builder writes it
in float32. Each row is another folder in few bits: by the builder, by onnxruntime's
MatMulNBitsQuantizer, by `jaxonnx.quantize`, or by an epoch of `jaxonnx.train`. All are evaluated
in jaxonnx, as they are saved, on modules of the library that nothing was trained on. `--costs` has
the time and the memory of quantizing instead, in a process for each row.
"""

import argparse
import contextlib
import functools
import importlib
import inspect
import json
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import jaxonnx
from benchmarks.quantization.lora_quality import HELD_OUT, sources, tune
from tests.support import genai_builder
from tests.support.paths import DATA

TOKENIZER = DATA / "llm" / "qwen3-genai" / "tokenizer.json"
WIDTH, BATCH = 128, 16
"""The tokens of an example, and the examples of a batch."""
PIECES = 200
"""How many pieces of 2,000 characters calibrate, and are an epoch of training."""
SIZES = {"small": (128, 3), "large": (256, 4)}
"""Widths and layers of the decoders."""
GRIDS = {
    "int4, blocks of 32": (4, 32),
    "int4, blocks of 128": (4, 128),
    "int2, blocks of 32": (2, 32),
}
"""Bits and blocks."""
NBITS = "onnxruntime.quantization.matmul_nbits_quantizer"
BASE, TRAINED = "float32", "float32, one epoch"


def read_library() -> list[str]:
    """Return the source of Python's library, without the modules that are held out."""
    files = sorted(Path(inspect.__file__).parent.glob("*.py"))
    return [f.read_text() for f in files if f.stem not in HELD_OUT.split()]


@functools.cache
def sample_texts() -> list[dict[str, str]]:
    """Return pieces of the library, to calibrate and to train with."""
    pieces = [text[i : i + 2000] for text in read_library() for i in range(0, len(text), 2000)]
    return [{"text": text} for text in random.Random(0).sample(pieces, PIECES)]


@functools.cache
def tokenize(held_out: bool) -> np.ndarray:
    """Return tokens of the held-out modules, or of the pieces, [examples, WIDTH]."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    texts = sources(HELD_OUT) if held_out else sample_texts()
    ids = np.concatenate([tokenizer.encode(row["text"]).ids for row in texts])
    rows = len(ids) // (WIDTH * BATCH) * BATCH
    return ids[: rows * WIDTH].reshape(rows, WIDTH)


def write_checkpoint(folder: Path, size: str, steps: int, seed: int) -> None:
    """Train a Llama on Python's library with one thread, and write it as transformers does."""
    import torch
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER), eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    width, layers = SIZES[size]
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WIDTH,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = transformers.LlamaForCausalLM(config)
    tokens = torch.tensor([i for text in read_library() for i in tokenizer(text)["input_ids"]])
    optimizer = torch.optim.AdamW(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.384 / width, steps)
    draw = random.Random(seed)
    for step in range(steps):
        starts = [draw.randrange(len(tokens) - WIDTH) for _ in range(16)]
        ids = torch.stack([tokens[i : i + WIDTH] for i in starts])
        loss = network(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 500 == 0:
            print(f"checkpoint {seed}, step {step}: loss {loss.item():.3f}", flush=True)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Calibration:
    """The inputs of the first 16 batches for onnxruntime, which `quantize` reads too."""

    def __init__(self, folder: Path):
        decoder = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
        shape = BATCH, decoder["num_key_value_heads"], 0, decoder["head_size"]
        self.caches = {
            f"past_key_values.{layer}.{kind}": np.zeros(shape, np.float32)
            for layer in range(decoder["num_hidden_layers"])
            for kind in ("key", "value")
        }

    def __iter__(self):
        for ids in tokenize(False)[: 16 * BATCH].reshape(-1, BATCH, WIDTH):
            yield self.caches | {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def quantize_by_onnxruntime(place: Path, target: Path, name: str, bits: int, block: int) -> None:
    """Write the folder of onnxruntime's round to nearest, GPTQ or HQQ."""
    theirs: Any = importlib.import_module(NBITS)
    skip = shutil.ignore_patterns("model.onnx*", "measured.json")
    shutil.copytree(place / BASE, target, ignore=skip, dirs_exist_ok=True)
    config = {
        "nearest": None,
        "GPTQ": theirs.GPTQWeightOnlyQuantConfig(Calibration(place / BASE)),
        "HQQ": theirs.HQQWeightOnlyQuantConfig(block, bits),
    }[name]
    quantizer = theirs.MatMulNBitsQuantizer(
        onnx.load(place / BASE / "model.onnx"), bits, block, algo_config=config
    )
    with contextlib.redirect_stdout(sys.stderr):
        quantizer.process()
    written = quantizer.model
    onnx.save(getattr(written, "model", written), target / "model.onnx")


def list_rows(place: Path, seed: int) -> dict[str, Callable[[Path], object]]:
    """Return functions that write the folder of a row, by its name."""
    width, _ = SIZES[place.name.split("-")[0]]
    epoch = {"epochs": 1, "seed": seed, "preprocess": {"max_length": WIDTH}}
    rows: dict[str, Callable[[Path], object]] = {}

    def quantize(target: Path, scheme: jaxonnx.Quantization, method: Any) -> None:
        jaxonnx.quantize(
            jaxonnx.load(place / BASE),
            sample_texts(),
            scheme,
            method=method,
            batch_size=BATCH,
            preprocess={"max_length": WIDTH},
        ).save(f"{target}/")

    def train(target: Path, base: str, rate: float, **settings) -> None:
        model = jaxonnx.load(place / base)
        tune(model, sample_texts(), rate, **epoch, **settings).model.save(f"{target}/")

    def build(target: Path, bits: str, *more: str) -> None:
        genai_builder.build(place / "checkpoint", target, bits, "cpu", more)

    rows[BASE] = lambda target: build(target, "fp32")
    rows[TRAINED] = lambda target: train(target, BASE, 2e-4)
    for activations in None, "uint8":
        scheme = jaxonnx.Quantization(activations=activations)
        rows[f"int8, activations {activations}: quantize, nearest"] = functools.partial(
            quantize, scheme=scheme, method=None
        )
    for grid, (bits, block) in GRIDS.items():
        weights: Any = f"int{bits}"
        scheme = jaxonnx.Quantization(weights=weights, activations=None, block=block)
        # onnxruntime's NumPy code (1.32) packs zero points for at least two blocks of a row
        several = block < width
        if bits == 4:
            for name in ("rtn", "k_quant") if several else ("rtn",):
                options = f"block_size={block}", f"algo_config={name}"
                rows[f"{grid}: builder, {name}"] = functools.partial(
                    lambda target, options: build(target, "int4", *options), options=options
                )
        for name in ("nearest", "GPTQ", "HQQ") if bits == 4 and several else ("nearest", "HQQ"):
            rows[f"{grid}: onnxruntime, {name}"] = functools.partial(
                quantize_by_onnxruntime, place, name=name, bits=bits, block=block
            )
        for method in (None, "gptq", "awq"):
            rows[f"{grid}: quantize, {method or 'nearest'}"] = functools.partial(
                quantize, scheme=scheme, method=method
            )
        adapters = {"lora": jaxonnx.LoRA(rank=8, where="all-linear")}
        rows[f"{grid}: quantize, gptq; LoRA, one epoch"] = functools.partial(
            train, base=f"{grid}: quantize, gptq", rate=2e-3, **adapters
        )
        rows[f"{grid}: train, one epoch"] = functools.partial(
            train, base=BASE, rate=2e-4, quantize=scheme
        )
    return rows


def compute_logits(path: Path) -> np.ndarray:
    """Return log-probabilities of the next tokens, [rows, WIDTH, vocabulary]."""
    model = jaxonnx.load(path).without_cache()
    batches = tokenize(True).reshape(-1, BATCH, WIDTH)
    logits = np.concatenate([np.asarray(model(x, np.ones_like(x))) for x in batches])
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def measure(path: Path, exact: np.ndarray) -> dict[str, float]:
    """Return the loss of a folder on held-out text, and its distances to the float32 network."""
    logits, ids = compute_logits(path), tokenize(True)
    each = np.take_along_axis(logits[:, :-1], ids[:, 1:, None], -1)
    change, centered = (x - x.mean(-1, keepdims=True) for x in (logits - exact, exact))
    return {
        "loss": -float(each.mean(dtype=np.float64)),
        "divergence": float((np.exp(exact) * (exact - logits)).sum(-1).mean(dtype=np.float64)),
        "change": float(np.sqrt(np.square(change).mean() / np.square(centered).mean())),
        "bytes": sum(f.stat().st_size for f in path.glob("model.onnx*")),
    }


def write_rows(place: Path, options: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """Write the folders of a seed, and measure them, unless that was done before."""
    start, results = time.perf_counter(), {}
    if not (place / "checkpoint" / "config.json").exists():
        write_checkpoint(place / "checkpoint", options.size, options.steps, seed)
    exact = functools.cache(lambda: compute_logits(place / BASE))
    for name, write in list_rows(place, seed).items():
        if name != BASE and not re.search(options.only, name):
            continue
        measured = place / name / "measured.json"
        if not measured.exists():
            write(place / name)
            measured.write_text(json.dumps(measure(place / name, exact())))
        results[name] = json.loads(measured.read_text())
        values = ", ".join(f"{key} {value:.5g}" for key, value in results[name].items())
        print(f"{time.perf_counter() - start:.0f} s, {seed}, {name}: {values}", flush=True)
    return results


def print_costs(place: Path, options: argparse.Namespace) -> None:
    """Print the seconds and the peak memory of quantizing, each in a process of its own."""
    print("| | CPU seconds | megabytes more |\n|---|---|---|")
    for name in list_rows(place, 0):
        if ("onnxruntime" in name or "quantize" in name) and re.search(options.only, name):
            command = [sys.executable, "-m", "benchmarks.quantization.decoders", "--cost-of", name]
            told = subprocess.run(
                [*command, "--folder", str(place)], check=True, stdout=subprocess.PIPE, text=True
            ).stdout.split()
            print(f"| {name} | {float(told[-2]):.1f} | {float(told[-1]):.0f} |", flush=True)


def print_cost(place: Path, name: str) -> None:
    """Print the CPU seconds of writing a row, and the megabytes that it adds to the process."""
    write = list_rows(place, 0)[name]
    importlib.import_module(NBITS)  # no part of what is measured
    with tempfile.TemporaryDirectory() as target:
        before, start = measure_memory(), time.process_time()
        write(Path(target))
        print(time.process_time() - start, measure_memory() - before)


def measure_memory() -> float:
    """Return the most megabytes that the process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def print_table(results: list[dict[str, dict[str, float]]]) -> None:
    columns = "perplexity", "change, %", "KL, 1e-3", "logits, %", "megabytes"
    print(f"\n| | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for name in results[0]:
        parts = [seed[name] for seed in results if name in seed]
        loss, base = ([seed[n]["loss"] for seed in results if name in seed] for n in (name, BASE))
        lost = 100 * np.expm1(np.subtract(loss, base))
        divergence, change = (
            np.array([part[key] for part in parts]) for key in ("divergence", "change")
        )
        print(
            f"| {name} | {np.exp(np.mean(loss)):.3f} | {show(lost, '+.2f')} "
            f"| {show(1e3 * divergence, '.2f')} | {show(100 * change, '.1f')} "
            f"| {parts[0]['bytes'] / 1e6:.2f} |"
        )


def show(values: np.ndarray, form: str) -> str:
    """Return the mean of seeds and, of several, their standard deviation."""
    spread = f" ± {np.std(values, ddof=1):{form.strip('+')}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="of the decoder")
    parser.add_argument("--steps", type=int, default=1500, help="of 16 rows in PyTorch")
    parser.add_argument("--seeds", type=int, default=1, help="of the checkpoint and its training")
    parser.add_argument("--folder", type=Path, help="keeps what is written, and is read again")
    parser.add_argument("--only", default="", help="a regular expression: the rows")
    parser.add_argument("--costs", action="store_true", help="time and memory of quantizing")
    parser.add_argument("--cost-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost_of:
        return print_cost(options.folder, options.cost_of)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        places = [folder / f"{options.size}-{seed}" for seed in range(options.seeds)]
        if options.costs:
            return print_costs(places[0], options)
        print_table([write_rows(place, options, seed) for seed, place in enumerate(places)])


if __name__ == "__main__":
    main()
