"""The plan of the house: which module may import which, and what `import jaxonnx` brings in."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import jaxonnx

ROOT = Path(jaxonnx.__file__).parent

ORDER = (
    *("__main__", "docs", "cli", "demo", "flax", "backend", "jaxonnx"),
    *(
        "validation",
        "tools",
        "_step_files",
        "training",
        "_arguments",
        "losses",
        "_hub",
        "lora",
        "loggers",
        "formats",
        "model",
        "training_info",
        "onnx_out",
        "llm",
        "quantization",
    ),
    *("_compare", "_data", "_mesh", "_rewrite", "_run", "views", "_graph", "_io"),
    *("ops", "registry", "_constraints", "lowering", "sparse", "optim"),
    *("_native", "_jaxpr", "_weights", "_arrays"),
    *("_limits", "_files", "_display", "_require", "errors"),
)
"""The rooms and modules of the package, from the top: each imports only those after it."""

ONLY = {
    "_io": {"sparse", "registry", "_arrays", "_limits", "_files"} | {"_require", "errors"},
    "ops": {"registry", "_constraints", "lowering", "optim", "_weights"} | {"_limits", "errors"},
    "_limits": {"_files", "errors"},
    "registry": {"_weights", "_constraints"},
    "_constraints": {"errors"},
    "lowering": {"_native", "_jaxpr", "_arrays", "_require", "errors"},
    "sparse": {"_native", "_jaxpr", "_arrays", "_files", "_display"} | {"_require", "errors"},
    "_native": {"errors"},
    "_files": {"errors"},
    "_arrays": set(),
    "_display": {"errors"},
    "_require": {"errors"},
    "optim": {"_require", "errors"},
    "loggers": {"_files", "_require", "errors"},
    "tools": {"training", "model", "_require", "_display", "errors"},
    "demo": {"training", "model", "sparse", "_files", "errors"},
}
"""All that a room may import which knows nothing of graphs and Models, or their faces only."""

PUBLIC = {"cli.process"}
"""Modules with a public name within a public room, but for those of `FAMILIES`."""
FAMILIES = ("ops", "onnx_out.rules", "onnx_out.passes")
"""Packages of modules that register themselves, entered through the face of their room."""


def modules():
    """The source of each module, by its name."""
    for path in ROOT.rglob("*.py"):
        parts = ("jaxonnx", *path.relative_to(ROOT).with_suffix("").parts)
        yield ".".join(parts).removesuffix(".__init__"), path.read_text()


def imports(source, known):
    """The modules of the package that a source names, at whatever depth and for whatever use."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where a name comes from"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known
            if not names <= known:
                found |= {node.module} & known
    return found


def room(name):
    return name.split(".")[1] if "." in name else name


@pytest.fixture(scope="module")
def edges():
    sources = dict(modules())
    return {name: imports(source, sources.keys()) for name, source in sources.items()}


def test_there_is_no_cycle(edges):
    waiting = dict(edges)
    while waiting:
        done = [name for name, needed in waiting.items() if not needed & waiting.keys()]
        assert done, f"these import each other: {sorted(waiting)}"
        for name in done:
            del waiting[name]


def test_rooms_import_downwards_only(edges):
    assert {room(name) for name in edges} == {*ORDER}
    place = ORDER.index
    for name, needed in edges.items():
        for other in needed:
            assert place(room(name)) <= place(room(other)), f"{name} imports {other}"
            allowed = ONLY.get(room(name))
            same = room(name) == room(other)
            assert same or allowed is None or room(other) in allowed, f"{name} imports {other}"


def test_rooms_are_entered_through_their_face(edges):
    """A private module of a room with a public face is imported within the room only."""
    for name, needed in edges.items():
        for other in needed:
            inner = other.removeprefix("jaxonnx.").startswith(("onnx_out.rules", "onnx_out.passes"))
            private = inner or any(part.startswith("_") for part in other.split(".")[2:])
            assert not private or room(name) == room(other), f"{name} imports {other}"


OUTSIDE = {"tools", "demo", "loggers"}
"""Rooms that could be packages of somebody else."""
SUPPORT = {"_require", "_display", "_files", "errors"}
SHARED = {"OPTIMIZERS", "TrainArguments", "shade"}
"""Names of faces that are no names of users: for a signature, a check and the colors of curves."""


def test_rooms_outside_import_public_names_alone():
    for name, source in modules():
        for node in ast.walk(ast.parse(source)) if room(name) in OUTSIDE else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxonnx"):
                if room(node.module) in {*OUTSIDE, *SUPPORT}:
                    continue
                public = {*jaxonnx.__all__, *SHARED}
                public |= {*getattr(importlib.import_module(node.module), "__all__", ())}
                names = {alias.name for alias in node.names}
                assert names <= public, f"{name} imports {names - public}"


def test_private_modules_have_an_underscore(edges):
    for name in edges:
        _, *path = name.split(".")
        dotted = ".".join(path)
        if len(path) > 1 and not dotted.startswith(FAMILIES) and dotted not in PUBLIC:
            assert any(part.startswith("_") for part in path), f"{name} looks public"


def test_an_import_that_is_wrong_is_seen():
    """The tests above see every form of an import."""
    known = {"jaxonnx", "jaxonnx.model", "jaxonnx.model._show", "jaxonnx.errors"}
    source = """
    from typing import TYPE_CHECKING
    if TYPE_CHECKING:
        from jaxonnx.model import _show, Model
    def late():
        import jaxonnx.errors
        from jaxonnx import __version__
    """
    source = "\n".join(line[4:] for line in source.splitlines())
    assert imports(source, known) == known


FOREIGN = 43
"""The most imports of other rooms' private modules in tests. A new test calls the public face, or
stands in the folder of the room."""


def test_tests_import_the_inside_of_their_own_room():
    known, foreign = dict(modules()).keys(), []
    for path in sorted((ROOT.parent / "tests").glob("*/test_*.py")):
        folder = {"data_sources": "data"}.get(path.parent.name, path.parent.name)
        for name in sorted(imports(path.read_text(), known)):
            inside = (
                any(part.startswith("_") for part in name.split(".")[1:]) and name.count(".") > 1
            )
            if inside and room(name).strip("_") != folder:
                foreign.append(f"{folder}/{path.name}: {name}")
    assert len(foreign) <= FOREIGN, "\n".join(foreign)


def test_importing_the_package_is_lean():
    """JAX and ONNX are imported at the first use of a public name; no handler is installed."""
    source = """if True:
        import signal, sys
        sys.argv = ["jaxonnx"]
        before, handler = {*sys.modules}, signal.getsignal(signal.SIGINT)
        import jaxonnx
        print({"jax", "onnx", "numpy", "optax"} & {*sys.modules} - before)
        print(signal.getsignal(signal.SIGINT) is handler)
    """
    done = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["set()", "True"]


def test_public_names_are_those_that_type_checkers_see():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body for alias in node.names}
    assert seen == {*jaxonnx.__all__}
    for name in seen:
        assert getattr(jaxonnx, name).__name__.rpartition(".")[2] == name
