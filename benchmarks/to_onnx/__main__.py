"""How many functions of JAX, Flax and optax become ONNX that agrees with JAX in onnxruntime.

    python -m benchmarks.to_onnx [--families jax.nn ...] [--jax2onnx PYTHON]

Every function, its gradient and its `vmap` (`benchmarks.to_onnx.cases` lists them) is exported, run
by onnxruntime and compared with JAX, to 1e-5 relatively or absolutely. --jax2onnx names the
interpreter of an environment with jax2onnx, onnxruntime, flax and optax, where the same list is
exported by that. Each family runs in a process of its own; one that crashes loses its present case.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

FAMILIES = (
    *("jax.nn", "flax.nnx", "optax losses", "optax optimizers"),
    *("jax.numpy", "jax.numpy.linalg", "jax.numpy.fft"),
)
KINDS = ("function", "gradient", "vmap")


def results(python: str, exporter: str, family: str) -> list[dict]:
    """Return the cases of a family that count, each with the reason why it fails, or "" ."""
    command = [python, "-m", "benchmarks.to_onnx.worker", exporter, family]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    folder = Path(__file__).parents[2]
    answers: list[dict] = []
    first = 0
    while True:
        done = subprocess.run(
            [*command, str(first)], capture_output=True, text=True, env=environment, cwd=folder,
            check=False,
        )  # fmt: skip
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        answers += [line for line in lines if "reason" in line]
        if done.returncode == 0:
            return [answer for answer in answers if answer["reason"] is not None]
        if not lines:
            raise RuntimeError(f"{exporter}, {family}: {done.stderr[-2000:]}")
        answers.append({**lines[-1], "reason": f"the process ended with {done.returncode}"})
        first = lines[-1]["index"] + 1


def share(answers: list[dict]) -> str:
    passed = sum(not answer["reason"] for answer in answers)
    return f"{passed} of {len(answers)}" if answers else "-"


def show(found: dict[str, dict[str, list[dict]]]) -> None:
    """Print the table, and the failures with their reasons."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    columns = [f"{exporter}: {kind}s" for exporter in found for kind in KINDS]
    table = Table("family", *columns, *(f"{exporter}, %" for exporter in found))
    for family in [*FAMILIES, "all"]:
        cells, rates = [], []
        for families in found.values():
            chosen = [a for f, rows in families.items() if family in (f, "all") for a in rows]
            cells += [share([a for a in chosen if a["kind"] == kind]) for kind in KINDS]
            passed = sum(not a["reason"] for a in chosen)
            rates.append(f"{100 * passed / len(chosen):.1f}" if chosen else "-")
        if set(rates) != {"-"}:
            table.add_row(family, *cells, *rates)
    console.print(table)
    for exporter, families in found.items():
        for family, answers in families.items():
            reasons = Counter(a["reason"] for a in answers if a["reason"])
            for reason, count in reasons.most_common():
                names = [f"{a['name']} ({a['kind']})" for a in answers if a["reason"] == reason]
                print(f"{exporter}, {family}: {count} x {reason}\n    {', '.join(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", choices=FAMILIES, default=FAMILIES, nargs="+")
    parser.add_argument("--jax2onnx", metavar="PYTHON", help="interpreter that has jax2onnx")
    options = parser.parse_args()
    pythons = {"jaxonnx": sys.executable}
    if options.jax2onnx:
        pythons["jax2onnx"] = options.jax2onnx
    found = {
        exporter: {family: results(python, exporter, family) for family in options.families}
        for exporter, python in pythons.items()
    }
    show(found)


if __name__ == "__main__":
    main()
