"""Declare arguments once; make signatures and docstrings from the declarations."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_HERE = Path(__file__).parent
FOLDERS = (_HERE, _HERE.parent / "training" / "_settings")
"""Where the modules are that have declarations."""


class Argument(NamedTuple):
    """The declaration of an argument besides its type, which has the choices."""

    default: Any = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    """The range of a number."""
    finite: bool = True
    """Whether a number must be finite."""
    expected: str = ""
    """The values that it may have, for errors, where the type does not say it well; "{choices}" are
    the choices of the type."""
    hint: str = ""
    """An addition to errors about its value."""
    needs: tuple[str, ...] = ()
    """Other arguments of which one must be given with it: "name", or "name: type" if that must have
    a value of the type."""
    excludes: tuple[str, ...] = ()
    """Arguments, in the same form, of which none may be given with it."""
    reason: str = ""
    """The text of errors about `needs` and `excludes`, behind the name of the argument."""
    form: str = ""
    """The value of its flag as the help writes it: a key of `jaxonnx.cli._flags.VALUES`, or choices
    like "a|b", with "..." if it may be repeated; "choice" for the choices of its type, "switch" if
    it takes no value. "" means that it has no flag."""
    flag: str = ""
    """The name of its flag where that is another than its own."""
    resume: bool = False
    """Whether a run that resumes must have the same value."""
    words: str = ""
    """The help of its flag, where that takes less than the argument; else the first sentence."""
    needs_loss: bool = False
    """Whether it changes how a loss is computed or minimized: not for a file's own algorithm."""

    @property
    def has_range(self) -> bool:
        return (self.least, self.above, self.most, self.below) != (None,) * 4


class Declaration(NamedTuple):
    """An argument as it was declared."""

    type: str
    argument: Argument
    text: str
    """Its documentation; the first sentence stands alone."""

    @property
    def summary(self) -> str:
        """The help of its flag."""
        return self.argument.words or self.text.partition("\n")[0].rstrip(".")

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a `Literal` in its type."""
        nodes = [n for n in ast.walk(ast.parse(self.type)) if isinstance(n, ast.Subscript)]
        literals = [n.slice for n in nodes if ast.unparse(n.value) == "Literal"]
        values = [ast.literal_eval(node) for node in literals]
        return tuple(
            x for value in values for x in (value if isinstance(value, tuple) else [value])
        )


class _Group(NamedTuple):
    """A class of declarations."""

    bases: Sequence[str]
    declared: Mapping[str, Declaration]
    """Those in its own body."""


_DECLARES = re.compile(r"class \w+Arguments\(|[A-Z_]+ = ")
"""The start of a statement that declares arguments, or a constant for them."""


@functools.cache
def _read_groups() -> dict[str, _Group]:
    """Return the classes of declarations by name, from their source.

    Importing the modules would take JAX, which the command line does without to show its help. Of
    each module only constants and classes with a name that ends in "Arguments" are parsed.
    """
    groups = {}
    for path in (path for folder in FOLDERS for path in sorted(folder.glob("*.py"))):
        statements = re.split(r"\n(?=[^\s)\]}])", path.read_text("utf-8"))
        body = ast.parse("\n".join(filter(_DECLARES.match, statements))).body
        constants = {
            node.targets[0].id: node.value
            for node in body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in body:
            if isinstance(node, ast.ClassDef):
                groups[node.name] = _Group(
                    [*map(ast.unparse, node.bases)], _read_declarations(node, constants)
                )
    return groups


def _read_declarations(
    group: ast.ClassDef, constants: Mapping[str, ast.expr]
) -> dict[str, Declaration]:
    """Return the declarations in the body of a class: `name: Annotated[type, Argument(...)]`.

    Args:
      constants: values by name, which the declarations may use.
    """
    arguments = {}
    for key, text in itertools.pairwise(group.body):
        match key, text:
            case (
                ast.AnnAssign(
                    target=ast.Name(id=name),
                    annotation=ast.Subscript(
                        value=ast.Name(id="Annotated"),
                        slice=ast.Tuple(elts=[kind, ast.Call() as call]),
                    ),
                ),
                ast.Expr(value=documentation),
            ):
                nodes = {part.arg or "": part.value for part in call.keywords}
                if call.args:
                    (nodes["default"],) = call.args
                values = {
                    field: ast.literal_eval(
                        constants[node.id] if isinstance(node, ast.Name) else node
                    )
                    for field, node in nodes.items()
                }
                doc = inspect.cleandoc(ast.literal_eval(documentation))
                arguments[name] = Declaration(ast.unparse(kind), Argument(**values), doc)
    return arguments


def list_arguments(*groups: type | str) -> dict[str, Declaration]:
    """Return the arguments of classes of declarations, or of their names.

    Those of the bases of a class come before its own.
    """
    arguments: dict[str, Declaration] = {}
    for group in groups:
        name = group if isinstance(group, str) else group.__name__
        bases, declared = _read_groups().get(name, _Group((), {}))
        arguments |= {**list_arguments(*bases), **declared}
    return arguments


def check_names(function: str, group: type, arguments: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that a function does not have, as Python does.

    Raises:
      TypeError: with the name that is most like the wrong one.
    """
    names = [*list_arguments(group)]
    for name in arguments:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def documented(*groups: type) -> Callable[[F], F]:
    """Give a function that takes `**arguments: Unpack[...]` their signature and documentation.

    In its docstring, the entry of `**arguments` becomes one for each argument. Static tools read
    the same from `Unpack`.
    """

    def document(function: F) -> F:
        arguments = list_arguments(*groups)
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        named += [
            inspect.Parameter(name, kind, default=entry.argument.default, annotation=entry.type)
            for name, entry in arguments.items()
        ]
        function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
        text = inspect.cleandoc(function.__doc__ or "")
        entries = [_entry(name, entry) for name, entry in arguments.items()]
        function.__doc__ = re.sub(r"  \*\*arguments: .*", lambda _: "\n".join(entries), text)
        return function

    return document


def _entry(name: str, entry: Declaration) -> str:
    """Return the entry of an argument below "Args:", with its paragraphs and lists."""
    summary, _, rest = entry.text.partition("\n\n")
    first, *others = rest.split("\n\n")
    if first.startswith("* "):
        first, others = "", [first, *others]
    lines = [_wrap(f"{name}: {summary} {first}", "  ", "    ")]
    for part in others:
        items = re.split(r"\n(?=\* )", part)
        hang = "      " if part.startswith("* ") else "    "
        lines += ["", *(_wrap(item, "    ", hang) for item in items)]
    return "\n".join(lines)


def _wrap(text: str, first: str, others: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        96,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
    )
