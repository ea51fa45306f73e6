"""Declare arguments once; make signatures and docstrings from the declarations."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
PARTS = ("model", "step", "data", "run")
"""The modules of this package that have declarations."""


class Argument(NamedTuple):
    """What the annotation of an argument says besides its type."""

    default: Any = None
    form: str = ""
    """The form of its flag, a key of `jaxonnx.cli._flag_types.FORMS`; "" means it has no flag."""
    flag: str = ""
    """The name of its flag where that is another than its own."""
    resume: bool = False
    """Whether a run that resumes must have the same value."""
    words: str = ""
    """The help of its flag, where that takes less than the argument; else the first sentence."""
    needs_loss: bool = False
    """Whether it changes how a loss is computed or minimized: a file's own algorithm has none."""


class Declared(NamedTuple):
    """An argument as it was declared."""

    type: str
    argument: Argument
    text: str
    """Its documentation; the first sentence stands alone."""

    @property
    def summary(self) -> str:
        """What the help of its flag says."""
        return self.argument.words or self.text.partition("\n")[0].rstrip(".")


@functools.cache
def _texts() -> dict[str, dict[str, str]]:
    """Return the strings below the keys of each class of declarations."""
    parts = (importlib.import_module(f"{__package__}.{part}") for part in PARTS)
    trees = [ast.parse(inspect.getsource(part)) for part in parts]
    texts: dict[str, dict[str, str]] = {}
    for node in itertools.chain(*(tree.body for tree in trees)):
        if isinstance(node, ast.ClassDef):
            doc = texts.setdefault(node.name, {})
            for key, text in itertools.pairwise(node.body):
                if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
                    doc[ast.unparse(key.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return texts


def list_arguments(*groups: type) -> dict[str, Declared]:
    """Return the arguments of classes of declarations, those of their bases included."""
    texts = {name: text for doc in _texts().values() for name, text in doc.items()}
    arguments = {}
    for group in groups:
        for name, hint in group.__annotations__.items():
            argument, kind = _parse(hint.__forward_arg__)
            arguments[name] = Declared(kind, argument, texts[name])
    return arguments


@functools.cache
def _parse(annotation: str) -> tuple[Argument, str]:
    """Parse `Annotated[type, Argument(...)]` into the argument and the text of the type."""
    parts = ast.parse(annotation, mode="eval").body
    assert isinstance(parts, ast.Subscript)
    assert isinstance(parts.slice, ast.Tuple)
    kind, argument = parts.slice.elts
    assert isinstance(argument, ast.Call)
    named = {part.arg or "": ast.literal_eval(part.value) for part in argument.keywords}
    return Argument(*map(ast.literal_eval, argument.args), **named), ast.unparse(kind)


def list_own_arguments(group: type) -> dict[str, Declared]:
    """Return the arguments of a class without those of its bases."""
    names = _texts()[group.__name__]
    return {name: entry for name, entry in list_arguments(group).items() if name in names}


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


def _entry(name: str, entry: Declared) -> str:
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
