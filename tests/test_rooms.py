"""The plan of the house: which module may import which, and what `import jaxonnx` brings in."""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import jaxonnx

ROOT = Path(jaxonnx.__file__).parent

ORDER = (
    *("__main__", "docs", "cli", "demo", "flax", "backend", "jaxonnx"),
    *(
        "validation",
        "_step_files",
        "training",
        "_arguments",
        "losses",
        "_hub",
        "lora",
        "loggers",
        "model",
        "training_info",
        "onnx_out",
        "quantization",
    ),
    *("_data", "_mesh", "_rewrite", "_run", "views", "_graph", "_io"),
    *("ops", "registry", "_constraints", "lowering", "sparse", "optim"),
    *("_native", "_jaxpr", "_axes", "_few_bits", "_arrays"),
    *("_limits", "_safe_read", "_atomic_write", "_progress"),
    *("_text", "_figures", "_require", "errors"),
)
"""The rooms and modules of the package, from the top: each imports only those after it."""

ONLY = {
    "_io": {"sparse", "_arrays", "_limits", "_safe_read", "_atomic_write", "_require", "errors"},
    "ops": {"registry", "_constraints", "lowering", "optim", "_axes", "_few_bits"}
    | {"_limits", "errors"},
    "_limits": {"_safe_read", "errors"},
    "registry": {"_axes", "_few_bits", "_constraints"},
    "_constraints": {"errors"},
    "lowering": {"_native", "_jaxpr", "_require"},
    "sparse": {"_native", "_jaxpr", "_arrays", "_safe_read", "_atomic_write", "_figures"}
    | {"_require", "errors"},
    "_native": {"errors"},
    "_safe_read": {"errors"},
    "_atomic_write": {"errors"},
    "_arrays": set(),
    "_text": set(),
    "_figures": {"errors"},
    "_require": {"errors"},
    "_progress": set(),
    "optim": {"_require", "errors"},
    "losses": {"ops", "_require", "errors"},
}
"""Rooms that know nothing of graphs and Models, and all that they may import."""

PUBLIC = {"cli.process"}
"""Modules with a public name within a public room, but for those of `FAMILIES`."""
FAMILIES = ("ops", "onnx_out.rules", "onnx_out.passes")
"""Packages of modules that register themselves, entered through the face of their room."""


BUDGETS = {
    "ops": (6795, "250 operators of five domains, each as its specification writes it"),
    "training": (5720, "step, loop, losses, metrics, checkpoints, reports, cards, previews"),
    "_arguments": (323, "the arguments of train, each declared once, and the names that they take"),
    "losses": (394, "those that optax lacks: of tokens, from other models, of pairs in a batch"),
    "onnx_out": (3307, "a rule for each JAX primitive, and what makes graphs quick in runtimes"),
    "_graph": (2840, "binding, and which tensor is a weight, by the habits of exporters"),
    "cli": (2075, "eighteen commands; their flags are declared where the arguments are"),
    "sparse": (2025, "patterns, the search of masks, training, packing, products and their proof"),
    "lowering": (2105, "what XLA is quick with, or kernels, with a row in a benchmark each; forms"),
    "_data": (3356, "arrays, files, pictures, chats with images, sequences, loaders as one kind"),
    "validation": (540, "outputs, gradients, files, integers, beside another computation"),
    "_run": (1416, "the evaluator, and what keeps hostile files from taking the machine"),
    "views": (536, "changes of a network and their ways back, those that belong to no feature"),
    "_io": (2240, "ModelProto, external data, joined files, npz, safetensors, packing"),
    "model": (2580, "Model, what makes another Model of one, and generation of text"),
    "_rewrite": (1205, "networks and files to files: heads, batches, outputs, bfloat16"),
    "training_info": (520, "the file's own training graphs, run and written"),
    "_step_files": (500, "exported steps, their manifest, the page for browsers"),
    "quantization": (2990, "schemes, sites, ranges, records and views; GPTQ and AWQ; bounds"),
    "_mesh": (450, "rules, shardings and processes"),
    "lora": (1450, "adapters: their view, sums, nodes and files, and the modules that PEFT names"),
    "_hub": (300, "checkpoints of transformers: names, rows and files; uploads"),
    "registry": (226, "what an operator declares of its inputs and attributes"),
    "_constraints": (200, "what a specification demands of arguments, and how it is said"),
    "docs": (362, "the reference from docstrings, and the site of pages and notebooks"),
    "loggers": (230, "tables, lines, events, and runs of two services"),
    "demo": (200, "the digits network that the first command trains"),
}
"""Lines of code, without comments, docstrings and blank lines, that a room may have, and for what.
A change that needs more raises its room's budget and says why in its commit."""
SMALL = 180
"""The budget of any other module of the top level."""
LONGEST = 400
"""Lines of code that a module may have. Docstrings do not count: those of a public class, such as
`Model`, are the reference, which reads best in one place."""


@cache
def code_lines(source):
    """Count the lines that hold code."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(body := getattr(node, "body", None), list)
        for part in body
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
        if isinstance(part.value.value, str)
        for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)
    }
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    written = {
        line
        for token in tokens
        if token.type not in layout | {tokenize.ENDMARKER}
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(written - docstrings)


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


def test_rooms_keep_their_budgets():
    lines = Counter()
    for name, source in modules():
        lines[room(name)] += code_lines(source)
    over = {name: count for name, count in lines.items() if count > BUDGETS.get(name, (SMALL,))[0]}
    assert not over, f"more lines of code than {BUDGETS.keys() & over.keys() or SMALL} may have"


def test_modules_are_short():
    counts = {name: code_lines(source) for name, source in modules()}
    assert {name: count for name, count in counts.items() if count > LONGEST} == {}


def test_code_lines_are_those_with_code():
    assert (
        code_lines('"""Doc."""\n\nx = 1  # why\n# note\ndef f():\n    """Doc."""\n    "a"\n') == 2
    )


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
