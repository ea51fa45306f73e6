"""ONNX files of anyone's through jaxonnx and onnxruntime: results, time and memory of each.

    python -m benchmarks.real FOLDER_OR_FILE ... [--against CHECKOUT] [--json FILE]

Each file is loaded and run by both, saved untouched by jaxonnx, run once more by onnxruntime as it
was saved (its outputs must have the same bits), and one gradient of its parameters is taken. Every
runtime has a process of its own for every file. Columns are pairs, jaxonnx's figure and
onnxruntime's: CPU seconds (all threads) until the file is loaded and of the first call, which
compiles; milliseconds of a call, the least of several; the peak of memory, libraries included.
--against adds a row for the jaxonnx of another checkout.

Inputs are random numbers of the declared shapes; open dimensions are tried until onnxruntime takes
them. A file `net.onnx.npz` beside `net.onnx` has arrays by the names of the inputs instead.
"""

import argparse
import collections
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.real import worker

WORKER = Path(__file__).with_name("worker.py")
PAIRS = {
    "load s": ("load", ".2f"),
    "first call s": ("first", ".2f"),
    "call ms": ("ms", ".1f"),
    "load MB": ("load MB", ".0f"),
    "peak MB": ("peak MB", ".0f"),
}
"""Columns with a figure of jaxonnx and one of onnxruntime: the figure and its format."""


def part(name: str, path: Path, folder: Path, options, checkout: Path | None = None) -> dict:
    """Return the figures of a worker; "error" is the end of what one that failed said."""
    log, answers = folder / "log", folder / "answers"
    answers.write_text("")
    if options.check:
        code = forked(name, path, folder, options)
    else:
        command = [sys.executable, WORKER, name, path, folder]
        environment = dict(os.environ, PYTHONPATH=str(checkout or Path(__file__).parents[2]))
        with log.open("w") as errors, answers.open("w") as figures:
            try:
                code = subprocess.run(
                    command,
                    env=environment,
                    stdout=figures,
                    stderr=errors,
                    timeout=options.timeout,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
    result = {}
    for line in answers.read_text().splitlines():
        result |= json.loads(line)
    if code is None:
        result["error"] = f"takes more than {options.timeout} s"
    elif code:
        lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
        result["error"] = " ".join(lines[-2:]) or f"ended with code {code}"
    return result


def forked(name: str, path: Path, folder: Path, options) -> int | None:
    """Run a worker in a copy of a process that has the libraries; None if it takes too long."""
    os.environ["JAX_TRACEBACK_FILTERING"] = "off"  # an error is the last thing in the log
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.real.worker", "jax", "jaxonnx", "onnxruntime"])
    process = context.Process(target=worker.check, args=(name, path, folder, options.memory))
    process.start()
    process.join(options.timeout)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def measure(path: Path, options) -> dict[str, dict]:
    """Return the figures of a file by system."""
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows["onnxruntime"] = part("onnxruntime", path, folder, options)
        checkouts = {"jaxonnx": None} | ({"before": options.against} if options.against else {})
        for system, checkout in checkouts.items():
            row = rows[system] = part("jaxonnx", path, folder, options, checkout)
            if "saved MB" in row and (folder / "results").exists():
                saved = part("again", folder / "saved.onnx", folder, options)
                row |= {"saved error" if key == "error" else key: saved[key] for key in saved}
            for file in folder.glob("saved.onnx*"):
                file.unlink()
    return rows


def count(results: dict[str, dict[str, dict]]) -> None:
    """Print the failures of --check, and how many files passed each part."""
    parts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for path, rows in results.items():
        theirs, ours = rows["onnxruntime"], rows["jaxonnx"]
        agree = "difference" in ours
        right = agree and ours["difference"] < (1e-2 if ours.get("half") else 1e-3)
        outcomes = {
            "onnxruntime runs it": None if "error" in theirs else True,
            "loaded": "parameters" in ours,
            "run": "first" in ours if "first" in theirs else None,
            "same results": right if agree else None,
            "same tensors when saved": ours.get("same tensors"),
            "same bits in onnxruntime when saved": ours.get("same bits"),
            "gradient finite": ours.get("finite"),
        }
        errors = [f"{key}: {ours[key]}" for key in ours if key.endswith("error")]
        wrong = [name for name, passed in outcomes.items() if passed is False]
        for name, passed in outcomes.items():
            parts[name][passed] += 1
        if wrong or errors:
            details = [*errors, *([f"difference {ours['difference']:.1e}"] if agree else [])]
            print(f"{path}: {', '.join(wrong)}: {'; '.join(details)}")
    for name, passed in parts.items():
        print(f"{name}: {passed[True]} of {passed[True] + passed[False]}, {passed[None]} not asked")


def cells(row: dict, other: dict) -> list[str]:
    """Return the cells of jaxonnx's figures beside onnxruntime's."""
    both = [
        " / ".join(f"{r[key]:{form}}" if key in r else "-" for r in (row, other))
        for key, form in PAIRS.values()
    ]
    bits = {True: "same", False: "[red]other", None: "-"}[row.get("same bits")]
    alone = (("difference", ".0e"), ("saved MB", ".1f"))
    after = (("gradient", ".2f"), ("gradient ms", ".1f"), ("gradient MB", ".0f"))
    texts = [[f"{row[k]:{form}}" if k in row else "-" for k, form in g] for g in (alone, after)]
    return [*both, *texts[0], bits, *texts[1]]


def show(results: dict[str, dict[str, dict]]) -> None:
    table = Table("file", "MB", "system", *PAIRS, title="jaxonnx / onnxruntime")
    for column in ("difference", "saved MB", "bits", "gradient: compile s", "ms", "peak MB"):
        table.add_column(column)
    failures = []
    for path, rows in results.items():
        size, other = f"{Path(path).stat().st_size / 1e6:.1f}", rows["onnxruntime"]
        for system, row in rows.items():
            failures += [f"{path}, {system}: {row[k]}" for k in row if k.endswith("error")]
            if system != "onnxruntime":
                table.add_row(Path(path).name, size, system, *cells(row, other))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for failure in failures:
        console.print(failure, markup=False)


def files(paths: list[Path]) -> list[Path]:
    """Return the .onnx files among paths and in folders."""
    found = [sorted(p.rglob("*.onnx")) if p.is_dir() else [p] for p in paths]
    return [path.resolve() for group in found for path in group]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", type=Path, nargs="+", help="files, or folders of files")
    parser.add_argument("--against", type=Path, help="a checkout whose jaxonnx has a row as well")
    parser.add_argument("--check", action="store_true", help="measure nothing: for many files")
    parser.add_argument("--memory", type=float, default=8, help="GB for a process of --check")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each process")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    results = {}
    for path in files(options.paths):
        print(path, file=sys.stderr)
        results[str(path)] = measure(path, options)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    (count if options.check else show)(results)


if __name__ == "__main__":
    main()
