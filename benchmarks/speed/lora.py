"""LoRA and full steps of a language model beside those of `transformers` and `peft`.

    python -m benchmarks.speed.lora [--hidden 256] [--layers 4] [--sequence 128] [--batch 8]
    python -m benchmarks.speed.lora --apart [...]    # first steps and memory of processes
    python -m benchmarks.speed.lora --bf16 [...]     # products in bfloat16 as well

A Llama with random weights, saved by `transformers` and written as ONNX by onnxruntime-genai's
builder, or with the same nodes where that is not installed. Both sides take AdamW steps on the same
tokens, in turn, in one process. CPU milliseconds are those of all threads together, so that other
work on the machine counts less; memory is what XLA reserves for ours. On a GPU float32 products are
in TF32 on both sides. With `--apart` each has a process of its own: seconds from its beginning to
the end of the first step, imports and compiling included, milliseconds of later ones, and the peak
of its memory. `torch.compile` needs a C++ compiler. All of it needs torch, transformers, peft and
onnxruntime.
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

START = time.perf_counter()
RANK, VOCABULARY = 8, 2048
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write(
    folder: Path, hidden: int, layers: int, precisions: list[str], vocabulary: int = VOCABULARY
) -> None:
    """Write a Llama with random weights for `transformers` (hf/) and as ONNX (fp32/, int4/)."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    heads = max(hidden // 64, 1)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 128 * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "hf")
    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(
        folder / "hf"
    )
    if find_spec("onnxruntime_genai") is None:
        write_alike(folder, hidden, layers)
        return
    for precision in precisions:
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
        files = ["-i", folder / "hf", "-o", folder / precision, "-p", precision]
        subprocess.run([*builder, *files, "-c", folder], check=True, capture_output=True)


def write_alike(folder: Path, hidden: int, layers: int) -> None:
    """Write the nodes of the builder where it is not installed: float32, and in 4 bits."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    from benchmarks.compiled.decoder import decoder

    model = decoder(hidden, layers, 1024).to_onnx()
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name.split(".")[-1] in ("qkv", "o", "gate", "up", "down"):
                node.input[i] = f"{name}_proj"
    for tensor in model.graph.initializer:
        if tensor.name.split(".")[-1] in ("qkv", "o", "gate", "up", "down"):
            tensor.name += "_proj"
    for name in ("fp32", "int4"):
        (folder / name).mkdir()
    onnx.save(model, folder / "fp32" / "model.onnx")
    logging.disable(logging.INFO)  # a line for each node
    packed: Any = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True, accuracy_level=0)
    packed.process()
    onnx.save(packed.model.model, folder / "int4" / "model.onnx")


def ours(path: Path, ids: np.ndarray, lora: bool, rounded: bool = False):
    """Return a function that takes a step, and the bytes that XLA reserves for it."""
    import jax
    import optax

    import jaxonnx
    from jaxonnx.training._settings.precision import round_products

    model = jaxonnx.load(path).with_outputs("logits")
    if lora:
        where = ["*_proj*"]
        model = jaxonnx.LoRA(RANK, where=where).attach(model, jax.random.key(0))
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    for value in model.inputs:
        if value.name.startswith("past"):
            heads: Any = tuple(value.shape or ())[1]
            given[value.name] = np.zeros((len(ids), heads, 0, 64), np.float32)
    optimizer = optax.adamw(1e-3)

    def loss(params, state):
        logits, _ = model.apply_train(params, state, jax.random.key(0), **given)
        return jaxonnx.losses.causal_lm()(logits, jax.numpy.asarray(ids))

    gradient = jax.value_and_grad(loss)
    dtype = jax.numpy.bfloat16 if rounded else None
    if rounded:
        gradient = round_products(gradient, dtype)

    def step(params, moments, state):
        value, gradients = gradient(params, state)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    carry = [jax.tree.map(jax.numpy.copy, model.params), optimizer.init(model.params)]
    jitted = model.program.jit(step, dtype, donate_argnums=(0, 1))
    compiled = jitted.lower(jitted.trace(*carry, model.state)).compile()
    sizes: Any = compiled.memory_analysis()

    def run() -> float:
        *carry[:], value = compiled(*carry, model.state)
        return float(value)

    return run, sizes.argument_size_in_bytes + sizes.temp_size_in_bytes


def peers(folder: Path, ids: np.ndarray, lora: bool, compiled: bool = False, rounded: bool = False):
    """Return a function that takes PyTorch's step, and None."""
    import peft
    import torch
    from transformers import LlamaForCausalLM

    net = LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    if lora:
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=PROJECTIONS)
        net = peft.get_peft_model(net, config)
    net = net.to("cuda" if torch.cuda.is_available() else "cpu")
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-3, fused=True)
    tokens = torch.from_numpy(ids.astype(np.int64))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as JAX has it
    tokens = tokens.to(device)
    mask = torch.ones_like(tokens)
    call: Any = torch.compile(net) if compiled else net

    def run() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=rounded):
            loss = call(input_ids=tokens, attention_mask=mask, labels=tokens, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return run, None


SYSTEMS = {
    "LoRA": partial(ours, lora=True),
    "LoRA, base in 4 bits": partial(ours, lora=True),
    "LoRA, bf16": partial(ours, lora=True, rounded=True),
    "full": partial(ours, lora=False),
    "full, bf16": partial(ours, lora=False, rounded=True),
    "peft": partial(peers, lora=True),
    "peft, compiled": partial(peers, lora=True, compiled=True),
    "peft, bf16": partial(peers, lora=True, rounded=True),
    "PyTorch, full": partial(peers, lora=False),
    "PyTorch, full, bf16": partial(peers, lora=False, rounded=True),
    "PyTorch, full, compiled": partial(peers, lora=False, compiled=True),
}


def make(name: str, folder: Path, ids: np.ndarray):
    """Return the step of a system by its name."""
    path = folder / "hf"
    if SYSTEMS[name].func is ours:
        path = folder / ("int4" if "4 bits" in name else "fp32") / "model.onnx"
    return SYSTEMS[name](path, ids)


def measure_alone(name: str, folder: Path, ids: np.ndarray, rounds: int) -> dict[str, float]:
    """Take steps of one system in this process."""
    take_step, _ = make(name, folder, ids)
    take_step()
    first, times = time.perf_counter() - START, []
    for _ in range(rounds):
        start = time.perf_counter()
        take_step()
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"first": first, "ms": min(times) * 1e3, "peak": peak}


def compare_alone(folder: Path, names: list[str]) -> Table:
    """Run each system in a process of its own."""
    table = Table("step", "s to the end of the first", "ms, least, of later ones", "peak MB")
    for name in names:
        command = [sys.executable, "-m", "benchmarks.speed.lora", *sys.argv[1:]]
        command += ["--one", name, "--folder", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            table.add_row(name, (done.stderr.strip().splitlines() or ["failed"])[-1])
            continue
        said = json.loads(done.stdout.splitlines()[-1])
        table.add_row(name, f"{said['first']:.1f}", f"{said['ms']:.0f}", f"{said['peak']:.0f}")
    return table


def compare_in_turn(folder: Path, names: list[str], ids: np.ndarray, rounds: int) -> Table:
    """Run all systems in this process, in turn."""
    made = {name: make(name, folder, ids) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for take_step in [run for run, _ in made.values()] * 2:
        take_step()
    for _ in range(rounds):
        for name, (take_step, _) in made.items():
            wall, cpu = time.perf_counter(), time.process_time()
            take_step()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    table = Table("step", "ms, least", "ms, median", "CPU ms, least", "reserved, MB")
    for name, (_, reserved) in made.items():
        wall, cpu = np.array(times[name]).T * 1e3
        cells = [f"{x:.0f}" for x in (wall.min(), np.median(wall), cpu.min())]
        table.add_row(name, *cells, f"{reserved / 1e6:.0f}" if reserved else "–")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"hidden": 256, "layers": 4, "sequence": 128, "batch": 8, "rounds": 20}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--apart", action="store_true", help="each in a process of its own")
    parser.add_argument("--compiled", action="store_true", help="torch.compile as well")
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16 as well")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = options.batch, options.sequence
    ids = np.random.default_rng(0).integers(0, VOCABULARY, shape).astype(np.int32)
    if options.one:
        print(json.dumps(measure_alone(options.one, options.folder, ids, options.rounds)))
        return
    omitted = [kind for kind in ("compiled", "bf16") if not getattr(options, kind)]
    names = [name for name in SYSTEMS if name.split(", ")[-1] not in omitted]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, options.hidden, options.layers, ["fp32", "int4"])
        if options.apart:
            table = compare_alone(folder, names)
        else:
            table = compare_in_turn(folder, names, ids, options.rounds)
    Console().print(table)


if __name__ == "__main__":
    main()
