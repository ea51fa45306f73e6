"""All that waits for a GPU, in one command: tests, sparse products, steps, masks, precision.

    python -m benchmarks.gpu [--minutes 8] [--out gpu.txt]

It needs this checkout with the packages of the extras `test` and `sparse-cuda`, a C++ compiler (the
extra `sparse-cpu` has one), and a CUDA build of JAX: in the checkout `pip install -e
'.[test,sparse-cuda]' 'jax[cuda13]'`. Each part is a process of its own, which is ended when its
share of the time is over; what it printed until then is kept, and so are the results of the others.
All of it is printed and written to a file; charts and figures of the steps go beside it.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def list_parts(out: Path) -> dict[str, tuple[float, list[str]]]:
    """Return minutes and arguments of Python of each part.

    What a part leaves of its time, the next ones have.
    """
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    marked = [str(file) for file in files if "mark.gpu" in file.read_text()]
    parts = {
        "device": (0.25, ["-c", "import jax; print(jax.__version__, jax.devices())"]),
        "tests": (1.5, ["-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider"]),
        "sparse products": (1.0, ["-m", "benchmarks.sparse.products", "--rounds", "10"]),
    }
    parts["tests"][1].extend(marked)
    for network, minutes in (("encoder", 1.75), ("resnet18-64", 1.75), ("mlp", 1.0)):
        chart = out.resolve().with_name(f"{out.stem}-{network}.png")
        arguments = ["-m", "benchmarks", "--networks", network, "--rounds", "5"]
        arguments += ["--systems", "jaxonnx", "jaxonnx-bf16", "flax", "--out", str(chart)]
        parts[f"steps and forward passes of {network}"] = (minutes, arguments)
    threads = str(len(os.sched_getaffinity(0)))
    masks = ["-m", "benchmarks.sparse.mask", "--rounds", "5", "--threads", threads]
    return parts | {"masks": (0.75, masks)}


def run(arguments: list[str], seconds: float) -> tuple[str, str]:
    """Return what a process printed, and how it ended; it is ended with those that it started."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
        return printed, f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        return printed, f"ended after {seconds:.0f} s"
    finally:
        if process.poll() is None:  # Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=8, help="of all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu.txt"))
    chosen = parser.parse_args(arguments)
    parts = list_parts(chosen.out)
    scale = 60 * chosen.minutes / sum(minutes for minutes, _ in parts.values())
    left = 0.0
    with chosen.out.open("w") as file:
        for name, (minutes, command) in parts.items():
            began, seconds = time.monotonic(), left + scale * minutes
            printed, end = run(command, seconds)
            taken = time.monotonic() - began
            left = max(0.0, seconds - taken)
            text = f"== {name}: {end}, {taken:.0f} s\n{printed.rstrip()}\n"
            print(text, flush=True)
            print(text, file=file, flush=True)


if __name__ == "__main__":
    main()
