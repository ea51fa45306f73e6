"""jaxonnx beside hand-written JAX, PyTorch and onnxruntime: ratios of step times, and one chart.

    python -m benchmarks [--real | --networks lenet mlp] [--systems jaxonnx flax torch] [--rounds 9]
                         [--phases train forward] [--threads 2] [--clock cpu] [--out benchmarks.png]

Every system runs in a process of its own with the same cores, threads and allocator settings; the
processes take turns, round by round. A ratio is jaxonnx's time over the other's in the same round,
so that a machine under load treats both alike: printed are the median and the quartiles. Below 1
jaxonnx is faster. A peer that is not installed, or fails, is named and left out. On a GPU there are
products of bfloat16 numbers as well, and a table of the fractions of what the device can do at most
(with --ceilings on CPU, too; see benchmarks.speed.ceilings). --against <folder of another checkout>
takes jaxonnx as it is there as one more system, to compare a change with what was before it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, REAL
from benchmarks.systems import SYSTEMS, applies

PHASES = ("train", "forward")
_ALL = NETWORKS | REAL
BEFORE = "jaxonnx-before"
"""The system of `--against`."""
MEASURE_S = 0.2
"""Steps are repeated within a round until they take about this long."""

KEEP_PAGES = (
    "glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184:"
    "glibc.malloc.hugetlb=1"
)
"""The allocator keeps what is freed, instead of faulting the same pages in again in each step."""


@dataclass
class Worker:
    """A process of benchmarks.worker, and what it has measured."""

    process: subprocess.Popen
    log: Path
    start: float = 0.0
    """Seconds from importing the system to the end of the first step: compilation above all."""
    parameters: int = 0
    start_memory: int = 0
    memory: int = 0
    cost: dict[str, float] = field(default_factory=dict)
    """Operations and bytes of a step."""
    times: list[float] = field(default_factory=list)

    def answer(self) -> dict | None:
        """Return a line of the process, or None if it has ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ready(self) -> bool:
        first = self.answer()
        if first is None:
            return False
        self.start, self.parameters = first["seconds"], first["parameters"]
        self.start_memory, self.cost = first["memory"], first["cost"]
        return True

    def measure(self, count: int) -> float:
        assert self.process.stdin is not None
        print(count, file=self.process.stdin, flush=True)
        answer = self.answer()
        if answer is None:
            raise RuntimeError(self.reason())
        self.memory = answer["memory"]
        return answer["seconds"]

    def reason(self) -> str:
        lines = self.log.read_text().strip().splitlines()
        return lines[-1] if lines else f"ended with code {self.process.wait()}"

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def environment(options) -> dict[str, str]:
    """Return the environment of every process that measures."""
    variables = dict(os.environ, OMP_NUM_THREADS=str(options.threads))
    variables.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share a GPU
    if options.allocator == "keep":
        variables["GLIBC_TUNABLES"] = KEEP_PAGES
    return variables


def spawn(network, system, phase, path: Path, options) -> Worker:
    others = {
        "onnxruntime-training": options.ort_python,
        "onnxsim": options.sim_python,
        "torch": options.torch_python,
    }
    other = next((others[name] for name in others if system.startswith(name)), None)
    folder = options.against if system == BEFORE else Path(__file__).parent.parent
    log = path.parent / f"{network}.{system}.{phase}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [
                *(other or sys.executable, "-m", "benchmarks.worker"),
                *(network, system.removesuffix("-before"), phase, path, options.clock),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(options),
            cwd=folder,  # where Python looks for modules first
        )
    return Worker(process, log)


def compare(network: str, phase: str, folder: Path, options) -> dict[str, Worker]:
    """Measure every system on a network; the rounds are interleaved."""
    path = folder / f"{network}.onnx"
    workers: dict[str, Worker] = {}
    counts = {}
    systems = [s for s in options.systems if applies(s, _ALL[network], phase)]
    started = {}
    if options.together:
        started = {s: spawn(network, s, phase, path, options) for s in systems}
    try:
        for system in systems:
            worker = started.get(system) or spawn(network, system, phase, path, options)
            if not worker.ready():
                print(f"{network}, {phase}: without {system} ({worker.reason()})", file=sys.stderr)
                worker.stop()
                continue
            workers[system] = worker
            worker.measure(1)
            counts[system] = max(3, min(1000, round(MEASURE_S / worker.measure(2))))
        for _ in range(options.rounds):
            for system, worker in workers.items():
                worker.times.append(worker.measure(counts[system]))
    finally:
        for worker in (started | workers).values():
            worker.stop()
    sizes = {system: worker.parameters for system, worker in workers.items()}
    if sizes and max(sizes.values()) > 1.01 * min(sizes.values()):
        raise RuntimeError(f"{network}: the networks differ in their number of parameters: {sizes}")
    return workers


def figures(workers: dict[str, Worker]) -> dict[str, dict]:
    ours = np.array(workers["jaxonnx"].times) if "jaxonnx" in workers else None
    rows = {}
    for system, worker in workers.items():
        times = np.array(worker.times)
        rows[system] = {
            "ms": float(np.median(times) * 1e3),
            "spread": float(np.subtract(*np.quantile(times, (0.75, 0.25))) / np.median(times)),
            "to first step, s": worker.start,
            "MB, first step": worker.start_memory / 1e6,
            "MB, steps": worker.memory / 1e6,
            **worker.cost,
        }
        if ours is not None and system != "jaxonnx":
            rows[system]["ratio"] = [float(q) for q in np.quantile(ours / times, (0.25, 0.5, 0.75))]
    return rows


def show(results: dict[str, dict], options) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    peers = [system for system in options.systems if system != "jaxonnx"]
    ratios = Table("network", "jaxonnx, ms", *peers, title="time of jaxonnx / time of the other")
    costs = Table(
        "network", *options.systems, title="seconds to the first step's end; peak MB of steps"
    )
    for name, rows in results.items():
        ours = rows.get("jaxonnx")
        cells = [
            f"{r[1]:.2f} ({r[0]:.2f}-{r[2]:.2f})" if (r := rows.get(p, {}).get("ratio")) else "-"
            for p in peers
        ]
        ratios.add_row(name, f"{ours['ms']:.2f}" if ours else "-", *cells)
        cells = [
            f"{rows[s]['to first step, s']:.1f}  {rows[s]['MB, steps']:.0f}" if s in rows else "-"
            for s in options.systems
        ]
        costs.add_row(name, *cells)
    console.print(ratios)
    console.print(costs)


def ceilings(options) -> dict:
    """Measure what the device can do at most, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.speed.ceilings"]
    folder = Path(__file__).parent.parent
    done = subprocess.run(
        command, env=environment(options), cwd=folder, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def show_fractions(results: dict[str, dict], most: dict) -> None:
    """Print what share steps reach of the rates of a large matrix product and of a copy.

    The operations are those of the network in Flax, whatever a system makes of them.
    """
    rates = ", ".join(
        f"{name} {rate / 1e9:.0f} {'GB/s' if name == 'copy' else 'GFLOP/s'}"
        for name, rate in most.items()
        if name != "device"
    )
    table = Table("network", "system", "GFLOP", "of the matrix ceiling", "of the copy ceiling")
    table.title = f"fractions of {most['device']}: {rates}"
    for name, rows in results.items():
        plain = rows.get("flax", {}).get("flops")
        for system, row in rows.items():
            if plain and (system.startswith("jaxonnx") or "flops" in row):
                ceiling = most.get("bfloat16" if system.endswith("bf16") else "float32", 0)
                seconds, moved = row["ms"] / 1e3, row.get("bytes")
                products = f"{plain / seconds / ceiling:.2f}" if ceiling else "-"
                copies = f"{moved / seconds / most['copy']:.2f}" if moved else "-"
                table.add_row(name, system, f"{plain / 1e9:.2f}", products, copies)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def draw(results: dict[str, dict], title: str, path: Path) -> None:
    """Draw one panel per phase: ratios with their quartiles, on a logarithmic axis."""
    from matplotlib.figure import Figure

    phases = [p for p in PHASES if any(name.endswith(p) for name in results)]
    rows = max(sum(name.endswith(phase) for name in results) for phase in phases)
    figure = Figure(figsize=(5.5 * len(phases), 1.2 + 0.8 * rows), layout="constrained")
    peers = list(dict.fromkeys(s for rows in results.values() for s in rows if "ratio" in rows[s]))
    panels = figure.subplots(1, len(phases), squeeze=False)[0]
    for axes, phase in zip(panels, phases, strict=True):
        chosen = {n.split(",")[0]: rows for n, rows in results.items() if n.endswith(phase)}
        for i, peer in enumerate(peers):
            points = [(j, r[peer]["ratio"]) for j, r in enumerate(chosen.values()) if peer in r]
            if not points:
                continue
            heights = [j + (i - (len(peers) - 1) / 2) * 0.8 / len(peers) for j, _ in points]
            low, middle, high = np.array([ratio for _, ratio in points]).T
            spread = [middle - low, high - middle]
            axes.errorbar(middle, heights, xerr=spread, fmt="o", color=f"C{i}", label=peer)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_yticks(range(len(chosen)), list(chosen))
        axes.invert_yaxis()
        axes.set_xlabel("time of jaxonnx / time of the other (left of 1: jaxonnx is faster)")
        axes.set_title({"train": "training step", "forward": "forward pass"}[phase])
        axes.grid(axis="x", alpha=0.3)
    entries = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        [*entries.values()], [*entries], loc="outside lower center", ncols=4, fontsize="small"
    )
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", choices=_ALL, nargs="+", help="default: the small ones")
    parser.add_argument("--real", action="store_true", help="ResNet-50 and ViT-B/16 at 224 pixels")
    rare = (
        "jaxonnx-bf16",
        "torch-bf16",
        "torch-channels-last-bf16",
        "torch-compile",
        "onnxruntime-training",
        "exported",
        "onnxsim",
    )
    default = [s for s in SYSTEMS if s not in rare]
    parser.add_argument("--systems", choices=SYSTEMS, nargs="+", help=f"default: not {rare}")
    parser.add_argument("--against", type=Path, help="a checkout whose jaxonnx is a system as well")
    parser.add_argument("--phases", choices=PHASES, default=[*PHASES], nargs="+")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu, with --threads 1, is for a machine that is busy with other work",
    )
    parser.add_argument("--allocator", choices=("keep", "default"), default="keep")
    parser.add_argument("--together", action="store_true", help="compile all systems at once")
    parser.add_argument("--plain", action="store_true", help="do not measure the device itself")
    parser.add_argument("--ceilings", action="store_true", help="fractions of what is possible")
    parser.add_argument("--ort-python", help="interpreter that has onnxruntime-training 1.19.2")
    parser.add_argument("--sim-python", help="interpreter that has onnxsim 0.8")
    parser.add_argument("--torch-python", help="interpreter that has PyTorch, if not this one")
    parser.add_argument(
        "--out", type=Path, help="the chart (png, svg, pdf); figures go to .json beside"
    )
    options = parser.parse_args()
    most = {} if options.plain else ceilings(options)
    on_gpu = "bfloat16" in most
    options.systems = options.systems or [*default, *(["jaxonnx-bf16"] if on_gpu else [])]
    options.networks = options.networks or [*(REAL if options.real else NETWORKS)]
    if options.against:
        options.systems.append(BEFORE)
    if options.ort_python and "onnxruntime-training" not in options.systems:
        options.systems.append("onnxruntime-training")

    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)  # of this process and of those that it starts
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for network in options.networks:
            write(_ALL[network], folder / f"{network}.onnx")
            write(_ALL[network], folder / f"{network}.training.onnx", training=True)
            for phase in options.phases:
                found = figures(compare(network, phase, folder, options))
                results[f"{network}, {phase}"] = found
                times = (f"{system} {row['ms']:.2f} ms" for system, row in found.items())
                print(f"{network}, {phase}: " + ", ".join(times), flush=True)
    show(results, options)
    if most and (on_gpu or options.ceilings):
        show_fractions(results, most)
    if options.out:
        title = (
            f"{platform.machine()}, {len(cores)} cores, {options.clock} clock, "
            f"medians and quartiles of {options.rounds} rounds"
        )
        draw(results, title, options.out)
        options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
