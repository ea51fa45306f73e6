"""The exported training step in stock onnxruntime: does it train the same, and how quickly?

    python -m benchmarks.speed.export_step [--networks lenet mlp] [--rounds 7]
                                     [--ort-python PYTHON] [--sim-python PYTHON]
    python -m benchmarks.speed.export_step --agree 100 [--networks lenet mlp] [--frozen]
    python -m benchmarks.speed.export_step --file net.onnx [--batches 1 16] [--rank 4]
                                     [--node FOLDER]

Times and peak memory are those of `python -m benchmarks`, of the systems that train an ONNX file:
jaxonnx, its exported step in onnxruntime, onnxruntime-training 1.19.2 (its own interpreter:
`--ort-python`) and onnxsim's loop (`--sim-python`).

With `--agree` jaxonnx and onnxruntime train side by side on handwritten digits, a new batch at
each step: in float64, which shows that they are the same training, and in float32, beside what two
runs of jaxonnx differ by whose first weights differ in the last bit, and by how far jaxonnx itself
is from float64. Shown are the first step whose losses differ by more than 1e-5, the largest
relative difference of losses, that of the last step, and the largest of weights, relative to the
largest of their tensor.

With `--file` a classifier of your own is exported for these batches, with the weights in one file.
Shown are the seconds that it takes, the kilobytes of the graphs and of the other file beside
`model.onnx`, and the milliseconds of a step here and in onnxruntime for Python, Node and
WebAssembly (onnxruntime-node and onnxruntime-web in the node_modules of FOLDER). With `--rank` all
layers get adapters.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import __main__ as networks
from benchmarks.networks import NETWORKS
from benchmarks.speed.agreement import agreement
from benchmarks.systems import LEARNING_RATE

_STEPS = """
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
const [modules, kind, folder, count] = process.argv.slice(2);
const ort = createRequire(`${modules}/`)(kind);
const read = (name) => new Uint8Array(readFileSync(`${folder}/${name}`));
const manifest = JSON.parse(readFileSync(`${folder}/manifest.json`));
const open = ({ file, data = [] }) => kind === "onnxruntime-node"
  ? ort.InferenceSession.create(`${folder}/${file}`)
  : ort.InferenceSession.create(
    read(file), { externalData: data.map((path) => ({ path, data: read(path) })) });
const [step, init] = [await open(manifest.step), await open(manifest.init)];
const arrays = { float32: Float32Array, int32: Int32Array };
const batch = Object.fromEntries(Object.entries(manifest.step.batch).map(
  ([name, { dtype, shape, role }]) =>
    [name, new ort.Tensor(dtype, new arrays[dtype](read(`${role}.bin`).buffer), shape)]));
let state = await init.run({});
const times = [];
for (let i = 0; i < count; i++) {
  const began = performance.now();
  const found = await step.run({ ...state, ...batch });
  times.push(performance.now() - began);
  state = Object.fromEntries(Object.entries(manifest.step.state).map(
    ([name, next]) => [name, found[next]]));
}
console.log(times.sort((a, b) => a - b)[count >> 1]);
"""
"""A loop in JavaScript, which prints the median of its times in milliseconds."""


def measure(options: argparse.Namespace, size: int, folder: Path) -> list[str]:
    """Return a row of times and sizes of a step for a batch size."""
    import jax
    import optax

    import jaxonnx
    from benchmarks.systems import LOSS, Exported

    model, random, count = jaxonnx.load(options.file), np.random.default_rng(0), options.steps
    sizes: Any = model.inputs[0].shape, model.outputs[0].shape
    x = random.normal(size=[size, *sizes[0][1:]]).astype(np.float32)
    y = random.integers(0, sizes[1][-1], size).astype(np.int32)
    settings: dict[str, Any] = {"lora": jaxonnx.LoRA(options.rank)} if options.rank else {}
    rule = optax.adam(LEARNING_RATE)
    began = time.perf_counter()
    jaxonnx.export_step(model, folder, (x, y), LOSS, rule, external_data="shared", **settings)
    seconds = time.perf_counter() - began
    graphs, rest = ([f.stat().st_size / 1e3 for f in folder.glob(p)] for p in ("*.onnx", "*.data"))
    graphs.remove((folder / "model.onnx").stat().st_size / 1e3)
    for role, array in (("input", x), ("target", y), ("weight", np.ones(size, np.float32))):
        array.tofile(folder / f"{role}.bin")
    one = jaxonnx.training.step(model, LOSS, rule, **settings)
    update, state = one.jit().update, one.init()
    exported, times = Exported(folder), ([], [])
    for _ in range(count):
        began = time.perf_counter()
        state, report = update(state, (x, y))
        jax.block_until_ready((state, report))
        times[0].append(time.perf_counter() - began)
        began = time.perf_counter()
        exported.step(x, y)
        times[1].append(time.perf_counter() - began)
    ms = [np.median(part) * 1e3 for part in times]
    (folder / "steps.mjs").write_text(_STEPS)
    for kind in ("onnxruntime-node", "onnxruntime-web") if options.node else ():
        command = ["node", folder / "steps.mjs", options.node.resolve(), kind, folder, str(count)]
        ms.append(float(subprocess.run(command, check=True, capture_output=True).stdout))
    return [
        str(size),
        f"{seconds:.1f}",
        f"{sum(graphs):.0f}, {sum(rest):.0f}",
        *(f"{t:.1f}" for t in ms),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", choices=NETWORKS, default=[*NETWORKS], nargs="+")
    parser.add_argument("--agree", type=int, help="steps to train side by side")
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam", help="of --agree")
    parser.add_argument("--rate", type=float, help="of --agree")
    parser.add_argument("--frozen", action="store_true", help="statistics of the file in --agree")
    parser.add_argument("--file", type=Path, help="a classifier to export")
    parser.add_argument("--batches", type=int, default=[1, 16], nargs="+", help="of --file")
    parser.add_argument("--rank", type=int, help="of adapters for --file")
    parser.add_argument("--node", type=Path, help="a folder with node_modules, for --file")
    parser.add_argument("--steps", type=int, default=30, help="of --file")
    options, rest = parser.parse_known_args()
    if options.file:
        table = Table(
            "batch", "export, s", "kB: graphs, data", "ms: jaxonnx", "Python", "Node", "wasm"
        )
        for size in options.batches:
            with tempfile.TemporaryDirectory() as folder:
                table.add_row(*measure(options, size, Path(folder)))
        Console().print(table)
        return
    if options.agree is None:
        systems = ["jaxonnx", "exported", "onnxruntime-training", "onnxsim"]
        absent = [
            a
            for flag, a in zip(("--ort-python", "--sim-python"), systems[2:], strict=True)
            if not any(r.startswith(flag) for r in rest)
        ]
        chosen = [system for system in systems if system not in absent]
        sys.argv[1:] = ["--networks", *options.networks, "--phases", "train", *rest]
        sys.argv += ["--systems", *chosen]
        networks.main()
        return
    import optax

    optimizer = {
        "adam": optax.adam(options.rate or LEARNING_RATE),
        "sgd": optax.sgd(options.rate or 1e-2, momentum=0.9),
    }
    columns = ("network", "compared", "above 1e-5 at", "losses", "last loss", "weights")
    table = Table(*columns)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            chosen = optimizer[options.optimizer]
            for what, d in agreement(
                name, Path(folder), options.agree, chosen, options.frozen
            ).items():
                numbers = (f"{x:.1e}" for x in (d.worst, d.last, d.weights))
                row = name, what, "never" if d.first is None else str(d.first), *numbers
                table.add_row(*row)
                print(*row, sep=" | ", file=sys.stderr, flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
