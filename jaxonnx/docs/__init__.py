"""Pages that are made, and a site of all pages; those that are written lie beside this module.

python -m jaxonnx.docs               # writes reference.md, from docstrings
python -m jaxonnx.docs coverage      # writes to_onnx_functions.md, from an export of each function
python -m jaxonnx.docs build SITE    # builds the site; needs the extra `docs`
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODULES = (
    "jaxonnx",
    "jaxonnx.training",
    "jaxonnx.losses",
    "jaxonnx.loggers",
    "jaxonnx.formats",
    "jaxonnx.optim",
    "jaxonnx.sparse",
    "jaxonnx.flax",
    "jaxonnx.training_info",
    "jaxonnx.onnx_out",
)
"""The modules whose public names, and nothing else, are the interface of the package."""

_SECTION = re.compile(r"(Args|Attributes|Raises|References|Returns|Yields):")
_LINK = re.compile(r"`([^`]+?) <(\S+)>`_")
_UNREADABLE = re.compile(r"=<.*?>(?=[,)])")
"""Defaults whose text differs from run to run, such as functions, or says nothing."""
_STARTS = {"pycon": ["```pycon"], "math": ["```math", r"\begin{aligned}"]}
_ENDS = {"pycon": ["```"], "math": [r"\end{aligned}", "```", ""]}
_ENTRY = re.compile(r"  (\S[^:]*): (.*)")


def reference() -> str:
    """Return the reference in Markdown."""
    lines = ["# Reference", "", "Made from the docstrings by `python -m jaxonnx.docs`.", ""]
    for module, values in public_names():
        lines += [f"## {module.__name__}", "", *markdown(module.__doc__ or ""), ""]
        for name, value in values.items():
            lines += entry(name, value)
    return "\n".join(lines).rstrip() + "\n"


def public_names() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each module of the interface and its values by their full names, each value once.

    These are the functions and classes of `__all__`, or else those that the module defines.
    """
    shown: list[Any] = []
    for name in MODULES:
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", None)
        members = {key: getattr(module, key) for key in listed or vars(module)}
        values = {
            f"{name}.{key}": value
            for key, value in members.items()
            if not key.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
            if (listed or value.__module__ == name) and value not in shown
        }
        shown += values.values()
        yield module, values


def entry(name: str, value: Any) -> list[str]:
    """Return the entry of a function or class: its signature, text, fields and methods."""
    short = name.rsplit(".", 1)[-1]
    lines = [f"### {name}", ""]
    if not inspect.isclass(value):
        return [*lines, *_signature(short, value), *_text(value)]
    if not issubclass(value, Exception):
        lines += _signature(short, value)
    lines += _text(value)
    if fields := [*_fields(value)]:
        lines += [*(f"* `{field}`: {text}" for field, text in fields), ""]
    members = {name: inner for cls in _classes(value) for name, inner in vars(cls).items()}
    for member, inner in members.items():
        if member.startswith("_") and member not in ("__call__", "__init__"):
            continue
        if inspect.isfunction(inner) and inner.__doc__:
            called = short if member == "__init__" else f"{short}.{member}"
            lines += [f"#### {short}.{member}", "", *_signature(called, inner), *_text(inner)]
        elif isinstance(inner, property | functools.cached_property) and inner.__doc__:
            lines += [f"#### {short}.{member}", "", *_text(inner)]
    return lines


def _classes(value: type) -> list[type]:
    """Return a class, after the dataclasses that it extends."""
    return [cls for cls in reversed(value.__mro__) if cls is value or dataclasses.is_dataclass(cls)]


def _text(value: Any) -> list[str]:
    return [*markdown(inspect.getdoc(value) or ""), ""]


def _signature(name: str, value: Any) -> list[str]:
    """Return the signature as it is called: names and defaults; types are in the text."""
    full = inspect.signature(value)
    shown = [p.replace(annotation=p.empty) for p in full.parameters.values() if p.name != "self"]
    text = str(full.replace(parameters=shown, return_annotation=full.empty))
    text = _UNREADABLE.sub("=...", text)
    wrapped = textwrap.wrap(f"{name}{text}", 96, subsequent_indent="    ", break_on_hyphens=False)
    return ["```text", *wrapped, "```", ""]


def _fields(value: type) -> Iterator[tuple[str, str]]:
    """Yield the fields and attributes of a class that have a text below them in the source."""
    for cls in _classes(value):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                doc = text.value.value if isinstance(text.value, ast.Constant) else ""
                yield ast.unparse(field.target), " ".join(str(doc).split())


def markdown(text: str) -> list[str]:
    """Convert a docstring to Markdown: sections with entries as lists; examples and formulas."""
    lines: list[str] = []
    section, fence = False, None
    for line in inspect.cleandoc(_LINK.sub(r"[\1](\2)", text)).splitlines():
        if fence is not None and not (line.startswith("    ") if fence == "math" else line.strip()):
            lines += _ENDS[fence]
            fence = None
        if fence is None and (line.startswith(">>> ") or line == ".. math::"):
            fence = "math" if line == ".. math::" else "pycon"
            lines += _STARTS[fence]
            if fence == "math":
                continue
        if fence is not None:
            lines.append(line)
        elif _SECTION.fullmatch(line):
            section = True
            lines += [f"**{line[:-1]}**", ""]
        elif section and line.startswith("  "):
            entry = _ENTRY.fullmatch(line)
            lines.append(f"* `{entry[1]}`: {entry[2]}" if entry else line[2:])
        else:
            section = section and not line
            lines.append(line)
    return [*lines, *_ENDS[fence]] if fence is not None else lines


# The page of the functions that `to_onnx` writes, by name, from an export of each.

COVERAGE_PAGE = Path(__file__).parent / "to_onnx_functions.md"
EXPORTED_FAMILIES = (
    *("jax.lax", "jax.nn", "jax.numpy", "jax.numpy.linalg", "jax.numpy.fft"),
    *("flax.linen", "flax.nnx", "equinox.nn"),
)
_COVERAGE_HEAD = """# Functions that become ONNX

This page lists functions and layers by name, each with what `jaxonnx.to_onnx` makes of it: it is
exported with small arguments, and the file runs in onnxruntime and agrees with JAX to 1e-5 (✓), or
the reason why not. `python -m jaxonnx.docs coverage` writes the page. A name may have several
cases. [Back to ONNX](back_to_onnx.md) has their gradients and `vmap`, and the losses and optimizers
of optax, counted by `python -m benchmarks.to_onnx`.
"""


def write_coverage() -> None:
    """Write the page of functions, from a checkout; it takes a minute of processor time."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "onnxruntime"))
    head = f"{_COVERAGE_HEAD}\nWritten with {versions}.\n"
    COVERAGE_PAGE.write_text("\n".join([head, *_coverage_sections()]), "utf-8")


def _coverage_sections() -> Iterator[str]:
    cases = importlib.import_module("benchmarks.to_onnx.cases")
    worker = importlib.import_module("benchmarks.to_onnx.worker")
    outcome = partial(worker.outcome, "jaxonnx")
    for family in EXPORTED_FAMILIES:
        yield f"## {family}\n"
        rows = [
            (name, _try_export(outcome, *case)) for name, case in cases.FAMILIES[family]().items()
        ]
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


def _try_export(outcome: Any, function: Any, arrays: tuple) -> str:
    """Return "✓", or the reason why a function does not become ONNX."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = outcome(function, arrays)
    if reason is None:
        return "JAX does not compute it here"
    line = reason.partition(";")[0].partition(" in /")[0]
    return line.replace("|", "\\|") or "✓"
