"""The page of the functions that `to_onnx` writes, by name, from an export of each."""

import importlib
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "to_onnx_functions.md"
FAMILIES = (
    *("jax.lax", "jax.nn", "jax.numpy", "jax.numpy.linalg", "jax.numpy.fft"),
    *("flax.linen", "flax.nnx", "equinox.nn"),
)
_HEAD = """# Functions that become ONNX

This page lists functions and layers by name, each with what `jaxonnx.to_onnx` makes of it: it is
exported with small arguments, and the file runs in onnxruntime and agrees with JAX to 1e-5 (✓), or
the reason why not. `python -m jaxonnx.docs coverage` writes the page. A name may have several
cases. [Back to ONNX](back_to_onnx.md) has their gradients and `vmap`, and the losses and optimizers
of optax, counted by `python -m benchmarks.to_onnx`.
"""


def write_coverage() -> None:
    """Write the page, from a checkout; it takes a minute of processor time."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "onnxruntime"))
    PAGE.write_text("\n".join([f"{_HEAD}\nWritten with {versions}.\n", *_sections()]), "utf-8")


def list_names(family: str) -> list[str]:
    """Return the names of the cases of a family."""
    return [*importlib.import_module("benchmarks.to_onnx.cases").FAMILIES[family]()]


def _sections() -> Iterator[str]:
    cases = importlib.import_module("benchmarks.to_onnx.cases")
    worker = importlib.import_module("benchmarks.to_onnx.worker")
    outcome = partial(worker.outcome, "jaxonnx")
    for family in FAMILIES:
        yield f"## {family}\n"
        rows = [(name, _try(outcome, *case)) for name, case in cases.FAMILIES[family]().items()]
        if not rows:
            yield "Not installed where this page was written: no layer was tried.\n"
            continue
        passed = sum(reason == "✓" for _, reason in rows)
        yield f"{passed} of {len(rows)}.\n\n<details>\n<summary>Every name</summary>\n"
        yield "| name | |\n|---|---|"
        yield from (f"| {name} | {reason} |" for name, reason in rows)
        yield "\n</details>\n"
    yield "## Not tried\n\n| `jax.lax` | names |\n|---|---|"
    left_out = importlib.import_module("benchmarks.to_onnx.lax_cases").NOT_TRIED
    yield from (f"| {reason} | {', '.join(names.split())} |" for reason, names in left_out.items())
    yield ""


def _try(outcome: Any, function: Any, arrays: tuple) -> str:
    """Return "✓", or the reason why a function does not become ONNX."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = outcome(function, arrays)
    if reason is None:
        return "JAX does not compute it here"
    line = reason.partition(";")[0].partition(" in /")[0]
    return line.replace("|", "\\|") or "✓"
