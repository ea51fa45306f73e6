"""All that waits for a GPU, in one command: tests, sparse products, steps, masks, precision.

    python -m benchmarks.gpu [--minutes 8] [--out gpu.txt]

It needs this checkout with the packages of the extra `test` and a CUDA build of JAX
(`pip install 'jax[cuda13]'`); `jaxonnx[sparse-cuda]` for cuSPARSELt's products. Each part is a
process of its own, which is ended when its share of the time is over; what it printed until then is
kept, and so are the results of the others. All of it is printed and written to a file.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

STEPS = [
    *("-m", "benchmarks", "--rounds", "5", "--out", "gpu.png"),
    *(
        "--systems",
        "jaxonnx",
        "jaxonnx-bf16",
        "flax",
        "--networks",
        "mlp",
        "resnet18-64",
        "encoder",
    ),
]
PARTS = {
    "device": (0.25, ["-c", "import jax; print(jax.__version__, jax.devices())"]),
    "tests": (2.5, ["-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider"]),
    "sparse products": (1.5, ["-m", "benchmarks.sparse.products", "--rounds", "10"]),
    "steps and forward passes, beside Flax, and in bfloat16": (2.5, STEPS),
    "masks": (1.0, ["-m", "benchmarks.sparse.mask", "--rounds", "5"]),
}
"""Minutes and arguments of Python of each part. What one leaves of its time, the next ones have."""


def run(arguments: list[str], seconds: float) -> tuple[str, str]:
    """Return what a process printed, and how it ended."""
    root = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=root,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
        return printed, f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        return printed, f"ended after {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=8, help="of all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu.txt"))
    chosen = parser.parse_args()
    scale = 60 * chosen.minutes / sum(minutes for minutes, _ in PARTS.values())
    left = 0.0
    with chosen.out.open("w") as file:
        for name, (minutes, arguments) in PARTS.items():
            began, seconds = time.monotonic(), left + scale * minutes
            printed, end = run(arguments, seconds)
            taken = time.monotonic() - began
            left = max(0.0, seconds - taken)
            text = f"== {name}: {end}, {taken:.0f} s\n{printed.rstrip()}\n"
            print(text, flush=True)
            print(text, file=file, flush=True)


if __name__ == "__main__":
    main()
