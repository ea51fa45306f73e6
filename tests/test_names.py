"""Names can be reached where texts speak of them, and say what they hold."""

import ast
import importlib
import inspect
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pytest

import jaxonnx
from jaxonnx import docs
from jaxonnx.cli._parser import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "jaxonnx").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "jaxonnx" / "docs").glob("*.md"))]
DOTTED = re.compile(r"(?<![\w/.\"'-])(jaxonnx|jax|optax|onnx|Model|model)((?:\.[A-Za-z_]\w*)+)")
FILES = {
    "onnx",
    "npz",
    "toml",
    "py",
    "md",
    "sh",
    "csv",
    "jsonl",
    "json",
    "data",
    "txt",
    "safetensors",
}
NO_NAMES = {
    "jaxonnx.adapters",
    "jaxonnx.sparsity",
    "jaxonnx.graph",
    "jaxonnx.image",
    "jaxonnx.operators",  # entry points
    "onnx.proto",
    "onnx.quantize",
    "model.embed_tokens",
    "model.embed_tokens.weight",
    "model.language_model",
}
"""Keys of records in files, a file of ONNX's specification, a producer's, names of tensors."""

PROPERTIES = property, cached_property


def strings(path):
    """The string constants of a module, among them its docstrings and messages."""
    tree = ast.parse(path.read_text())
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is str]


def reachable(root, path):
    if root in ("Model", "model"):
        value, parts = jaxonnx.Model, path
        fields = {f for c in value.__mro__ for f in getattr(c, "__annotations__", {})}
        own = inspect.getattr_static(value, parts[0], None)
        if parts[0] in fields or isinstance(own, PROPERTIES):
            return True  # of an instance
    else:
        value, parts = importlib.import_module(root), path
    for i, part in enumerate(parts):
        if not hasattr(value, part):
            try:
                value = importlib.import_module(".".join([root, *parts[: i + 1]]))
                continue
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def unreachable(texts):
    found = {}
    for text in texts:
        for root, tail in DOTTED.findall(text):
            path = tail[1:].split(".")
            if path[-1] in FILES or root + tail in NO_NAMES:
                continue
            if (root, *path) not in found:
                found[root, *path] = reachable(root, path)
    return sorted(".".join(name) for name, fine in found.items() if not fine)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "jaxonnx")))
def test_names_in_messages_and_docstrings(path):
    assert not unreachable(strings(path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_in_pages(page):
    assert not unreachable([page.read_text()])


def parameters():
    """The names of the arguments of public functions, classes and methods."""
    found = set()
    for name in docs.MODULES:
        for key, value in vars(importlib.import_module(name)).items():
            members = [value, *vars(value).values()] if inspect.isclass(value) else [value]
            for member in () if key.startswith("_") else members:
                if inspect.isfunction(member) or inspect.isclass(member):
                    with suppress(ValueError):  # a built-in class without a signature
                        found |= {*inspect.signature(member).parameters}
    return found


def messages(path):
    """The strings in `raise` statements."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise):
            yield from (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))


def test_arguments_in_messages():
    """`name=` in an error is an argument that somebody can pass; those of operators aside."""
    known = parameters()
    named = re.compile(r"(?<![\w.\"'=<>!-])([a-z]\w+)=")
    wrong = {
        (path.name, name)
        for path in SOURCES
        if "ops" not in path.parts
        for message in messages(path)
        if isinstance(message, str)
        for name in named.findall(message)
        if name not in known
    }
    assert not wrong


def test_flags_in_messages():
    known = {
        name
        for command in COMMANDS.values()
        for flags in command.list_flags().values()
        for flag in flags
        for name in flag.names.split()
    }
    named = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")
    wrong = {
        (path.name, name)
        for path in (ROOT / "jaxonnx" / "cli").glob("*.py")
        for message in messages(path)
        if isinstance(message, str)
        for name in named.findall(message)
        if name not in known
    }
    assert not wrong


BARE = {"found", "own", "known", "given", "kept", "one", "said", "wanted", "odd", "held", "made"}
BARE |= {"told", "asked", "there", "seen", "read"}
"""Participles and pronouns, which do not name what a variable holds."""


def variables(tree):
    """The names of the variables and parameters of functions."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda))
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_variables_name_what_they_hold():
    for path in SOURCES:
        name = str(path.relative_to(ROOT / "jaxonnx"))
        bare = BARE.intersection(variables(ast.parse(path.read_text())))
        assert not bare, f"{name} has variables {bare}: call each by what it holds"
