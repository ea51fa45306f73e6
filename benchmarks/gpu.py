"""All that waits for a GPU, in one command: tests, sparse products, steps, masks, precision.

    python -m benchmarks.gpu [--minutes 8] [--out gpu.txt] [--parts tests decoder ...]

It needs this checkout with the packages of the extras `test` and `sparse-cuda`, a C++ compiler (the
extra `sparse-cpu` has one), and a CUDA build of JAX: in the checkout `pip install -e
'.[test,sparse-cuda]' 'jax[cuda13]'`; for the peers flax, torch, transformers and peft. Each part is
a process of its own, which is ended when its share of the time is over; what it printed until then
is kept, and so are the results of the others. All of it is printed and written to a file, `gpu.txt`
in the folder `$OUT` by default, as soon as a part has ended; charts and figures of the steps go
beside it. The most valuable parts come first.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

NETWORKS = {
    **{"encoder": 0.6, "mlp": 0.4, "resnet18-64": 0.7, "lstm": 0.5},
    **{"mobilenetv2": 0.7, "resnet18-224": 0.6, "lenet": 0.5},
}
"""Minutes of each network, whose five systems compile at the same time."""


VARIABLES = {
    "PYTHONUNBUFFERED": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # processes share a GPU
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def list_parts(out: Path) -> dict[str, tuple[float, list[str]]]:
    """Return minutes and arguments of Python of each part.

    What a part leaves of its time, the next ones have.
    """
    out = out.resolve()
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    marked = [str(file) for file in files if "mark.gpu" in file.read_text()]
    parts = {
        "device": (0.1, ["-c", "import jax; print(jax.__version__, jax.devices())"]),
        "tests": (0.8, ["-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider"]),
    }
    parts["tests"][1].extend(marked)
    for network, minutes in NETWORKS.items():
        chart = out.with_name(f"{out.stem}-{network}.png")
        arguments = ["-m", "benchmarks", "--networks", network, "--rounds", "5", "--phases"]
        arguments += ["train", "--plain", "--together", "--out", str(chart)]
        systems = ["jaxonnx", "jaxonnx-bf16", "flax", "torch", "torch-bf16"]
        parts[f"steps of {network}"] = (minutes, [*arguments, "--systems", *systems])
    threads = str(len(os.sched_getaffinity(0)))
    return parts | {
        "decoder": (1.4, ["-m", "benchmarks.speed.lora", "--rounds", "10", "--bf16"]),
        "masks": (0.4, ["-m", "benchmarks.sparse.mask", "--rounds", "5", "--threads", threads]),
        "sparse products": (0.6, ["-m", "benchmarks.sparse.products", "--rounds", "10"]),
        "memory": (0.3, ["-m", "benchmarks.speed.memory", "--networks", "encoder"]),
        "device at most": (0.4, ["-m", "benchmarks.speed.ceilings"]),
    }


def run(arguments: list[str], seconds: float) -> tuple[str, str]:
    """Return what a process printed, and how it ended; it is ended with those that it started."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | VARIABLES,
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
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ""), "gpu.txt"))
    parser.add_argument("--parts", nargs="+", help="some of them, by their names (default: all)")
    chosen = parser.parse_args(arguments)
    parts = list_parts(chosen.out)
    if chosen.parts:
        if unknown := set(chosen.parts) - parts.keys():
            parser.error(f"--parts {', '.join(sorted(unknown))}: there are {', '.join(parts)}")
        parts = {name: parts[name] for name in chosen.parts}
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
