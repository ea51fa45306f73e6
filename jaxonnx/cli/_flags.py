"""Flags: the forms of their values, and those that declarations of arguments make."""

import argparse
import ast
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jaxonnx
from jaxonnx._arguments import Argument, Declaration, list_arguments


class Flag(NamedTuple):
    names: str
    help: str
    settings: Mapping[str, Any]
    """Other arguments of `argparse.ArgumentParser.add_argument`."""


class AppendAction(argparse.Action):
    """An action that joins the values of a repeated flag; they replace the configuration's.

    Those with a name (`NAME=X`) become a dict; one that is for all names stands alone.
    """

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, self.join(None if before is self.default else before, values))

    def join(self, before: Any, value: Any) -> Any:
        """Add a value to those before it, which may be None.

        Raises:
          ArgumentError: it is for all names, and is not the only one.
        """
        if not isinstance(value, tuple):
            return [*(before or ()), value]
        name, value = value
        if before is not None and not (name and isinstance(before, dict)):
            raise argparse.ArgumentError(self, f"takes {self.metavar}: one for all, or by name")
        return {**(before or {}), name: value} if name else value


def path(text: str) -> Path:
    """Parse a path, which no null byte is in: a TOML file may have one."""
    if "\0" in text:
        raise ValueError("a null byte")
    return Path(text)


def positive(text: str) -> int:
    """Parse an integer from 1 to the largest size of an axis."""
    number = int(text)
    if not 0 < number < 2**31:
        raise ValueError("not positive, or too large")
    return number


def numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def widths(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def size(text: str) -> tuple[int, int]:
    height, width = map(int, text.split("x"))
    return height, width


def share(text: str) -> Path | float:
    """Parse a number as a share, anything else as a file."""
    try:
        return float(text)
    except ValueError:
        return path(text)


def count(text: str) -> tuple[str, int]:
    """Parse OUTPUT=N, or N alone."""
    name, _, number = text.rpartition("=")
    if not number.isdigit():
        raise argparse.ArgumentTypeError(f"{number!r} is not a number; names go to --labels A,B")
    return name, int(number)


def ratio(text: str) -> tuple[str, float]:
    """Parse NAME=X, or X alone."""
    name, _, number = text.rpartition("=")
    return name, float(number)


def named_ratio(text: str) -> tuple[str, float]:
    """Parse NAME=X."""
    name, number = ratio(text)
    if not name:
        raise ValueError(f"has no name before {text}")
    return name, number


def class_weight(text: str) -> tuple[str, float | str]:
    """Parse NAME=X, or the word balanced."""
    return ("", text) if text == "balanced" else named_ratio(text)


def fill(text: str) -> tuple[str, int | float]:
    """Parse NAME=N; whole numbers stay whole."""
    name, number = named_ratio(text)
    return name, int(number) if number.is_integer() else number


def dimension(text: str) -> tuple[str, int]:
    """Parse NAME=N of an axis."""
    name, number = text.rsplit("=", 1)
    return name, positive(number)


def rename(text: str) -> tuple[str, str]:
    """Parse NAME=NEW."""
    name, equal, new = text.partition("=")
    if not (name and equal and new):
        raise ValueError(f"is not NAME=NEW: {text}")
    return name, new


def axes(text: str) -> dict[str, int] | str:
    """Parse NAME=N,..., or all."""
    if text == "all":
        return text
    pairs = (part.split("=") for part in text.split(","))
    return {name: int(size) for name, size in pairs}


def cluster(text: str) -> tuple[str, int, int]:
    """Parse HOST:PORT,COUNT,INDEX."""
    address, count, index = text.split(",")
    return address, int(count), int(index)


SCHEME = ("quantization/_scheme.py", "Quantization")


def pattern(text: str) -> tuple[str, str]:
    """Parse NAME=N:M, or N:M alone."""
    name, _, value = text.rpartition("=")
    return name, value


def scheme(text: str) -> str | dict[str, Any]:
    """Parse a type of weights, or FIELD=VALUE,... of a `jaxonnx.Quantization`.

    A part without "=" is one more name of the choice before it.
    """
    if "=" not in text:
        return text
    fields, name = read_declarations(*SCHEME), ""
    result: dict[str, Any] = {}
    for part in text.split(","):
        before, equals, value = part.partition("=")
        if not equals and isinstance(result.get(name), list):
            value = before
        elif (name := before) not in fields:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(fields)}")
        entry = fields[name]
        try:
            value = _convert(value, entry)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{name}={value} {error}") from error
        result[name] = [*result.get(name, ()), value] if entry.argument.form == "NAME..." else value
    return result


def _convert(text: str, entry: Declaration) -> Any:
    """Convert a text to a value of a declared argument.

    Raises:
      ValueError: it stands for none.
    """
    form = entry.argument.form
    if form == "choice":
        if text not in entry.choices:
            raise ValueError(f"is none of {', '.join(entry.choices)}")
        return None if text == "none" else text
    if form == "switch":
        if text.lower() not in ("true", "false"):
            raise ValueError("is neither true nor false")
        return text.lower() == "true"
    return VALUES.get(form, str)(text)


VALUES: Mapping[str, Callable[[str], Any]] = {
    "TEXT": str,
    "NAME": str,
    "PATH": path,
    "FILE": path,
    "FOLDER": path,
    "DATA": path,
    "FILE|A,B": path,
    "PATH|SHARE": share,
    "N": int,
    "N>0": positive,
    "N,...": widths,
    "N|OUTPUT=N": count,
    "X": float,
    "X,...": numbers,
    "X|NAME=X": ratio,
    "HxW": size,
    "N:M|NAME=N:M": pattern,
    "balanced|NAME=X": class_weight,
    "NAME=N": fill,
    "NAME=SIZE": dimension,
    "NAME=NEW": rename,
    "all|NAME=N,...": axes,
    "HOST:PORT,COUNT,INDEX": cluster,
    "TYPE|FIELD=X,...": scheme,
}
"""Parsers of values, by how the help writes them."""
AUTO = "auto"
"""The value of a flag without its optional value, which argparse passes to the parser, too."""


def _or_auto(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that leaves `AUTO` as it is."""

    @functools.wraps(parse)  # argparse shows its name
    def parse_or_auto(text: str) -> Any:
        return text if text == AUTO else parse(text)

    return parse_or_auto


def make_flag(names: str, value: str, text: str, **settings: Any) -> Flag:
    """Make a flag.

    Args:
      names: its names; without a dash, those of an argument by position.
      value: a key of `VALUES`, the choices like "a|b", or "" for a flag that is on or off. "N=5"
        has a default, "NAME..." may be repeated, and "[FILE]" left out: it is `AUTO` then.
      text: its help. A flag that is "(required)" says so.
      settings: of `argparse.ArgumentParser.add_argument`, in place of those by `value`.
    """
    is_option = names.startswith("-")
    by_value: dict[str, Any] = {}
    if not value:
        by_value["action"] = argparse.BooleanOptionalAction
    if value.startswith("["):
        value = value[1:-1]
        by_value |= {"nargs": "?", "const": AUTO} if is_option else {"nargs": "?"}
    if value.endswith("...") and value not in VALUES:
        value = value.removesuffix("...")
        by_value |= {"action": AppendAction} if is_option else {"nargs": "+"}
        text += "; repeatable" * is_option
    if "=" in value and value not in VALUES:
        value, _, default = value.partition("=")
        by_value["default"] = default  # which argparse parses
        text += f" (default: {default})"
    if value in VALUES:
        parse = VALUES[value]
        by_value["type"] = _or_auto(parse) if "const" in by_value else parse
        if is_option or value != "PATH":
            by_value["metavar"] = value
    elif value:
        by_value["choices"] = value.split("|")
    if text.endswith("(required)"):
        by_value["required"] = True
    return Flag(names, text.replace("%", "%%"), {**by_value, **settings})


def read_table(text: str) -> list[Flag]:
    """Make flags of a text like that of `--help`: names, value and help (`make_flag`)."""
    flags = []
    for row in re.split(r"\n(?=\S)", inspect.cleandoc(text)):
        usage, words = re.split(r"\s{2,}", row, maxsplit=1)
        parts = usage.split()
        names = [part for part in parts if part.startswith("-")] or parts[:1]
        value = " ".join(parts[len(names) :])
        flags.append(make_flag(" ".join(names), value, " ".join(words.split())))
    return flags


def list_flags(
    group: type | str, names: Collection[str] | None = None, without: Collection[str] = ()
) -> list[Flag]:
    """Return the flags of the arguments of a class of declarations.

    Args:
      group: the class, or its name where importing it takes JAX.
      names: the arguments to take; all by default.
      without: arguments to leave out.
    """
    return [
        _declared_flag(entry, entry.argument.flag or name, name)
        for name, entry in list_arguments(group).items()
        if entry.argument.form and name not in without and (names is None or name in names)
    ]


def read_flags(
    file: str, owner: str, names: Iterable[str], renamed: Mapping[str, str] | None = None
) -> list[Flag]:
    """Return the flags of arguments of a function, or of fields of a class, outside `_arguments`.

    Args:
      file: of the source, and
      owner: the name of the function or class, as `read_declarations` takes them.
      names: the arguments to take.
      renamed: the flags of some, where they have other names.
    """
    declared = read_declarations(file, owner)
    return [
        _declared_flag(declared[name], (renamed or {}).get(name, name), f"{owner}.{name}")
        for name in names
    ]


def _declared_flag(entry: Declaration, name: str, dest: str) -> Flag:
    text, value = entry.summary.replace("`", ""), entry.argument.form
    if value in ("choice", "switch"):
        value = "|".join(entry.choices) if value == "choice" else ""
    if text.split()[0][1:].islower() or text[1] == " ":  # not a name like DoRA
        text = text[0].lower() + text[1:]
    return make_flag(f"--{name.replace('_', '-')}", value, text, dest=dest)


def collect_values(options: argparse.Namespace, owner: str) -> dict[str, Any]:
    """Return the values of those flags of an owner (`read_flags`) that are given."""
    return {
        name.removeprefix(f"{owner}."): None if value == "none" else value
        for name, value in vars(options).items()
        if name.startswith(f"{owner}.") and value is not None
    }


_FORMS_OF_TYPES = {
    "Literal": "choice",
    "Select": "NAME...",
    "Sequence": "NAME...",
    "bool": "switch",
    "int": "N>0",
    "float": "X",
    "str": "NAME",
}
"""The forms of arguments outside `_arguments`, by the start of their type."""


@functools.cache
def read_declarations(file: str, name: str) -> dict[str, Declaration]:
    """Return the arguments of a function, or the fields of a class, from its source.

    Importing it would take JAX, which the command line does without to show its help. A choice that
    may be None, and is not by default, has the value "none".

    Args:
      file: relative to the package.
      name: of a method with that of its class, "Class.method".
    """
    owner: Any = ast.parse((Path(jaxonnx.__file__).parent / file).read_text("utf-8"))
    for part in name.split("."):
        (owner,) = (node for node in owner.body if getattr(node, "name", "") == part)
    texts = _read_entries(ast.get_docstring(owner) or "")
    if isinstance(owner, ast.ClassDef):
        fields = [node for node in owner.body if isinstance(node, ast.AnnAssign)]
        typed = [(ast.unparse(x.target), x.annotation, x.value) for x in fields]
    else:
        names = (*owner.args.args, *owner.args.kwonlyargs)
        defaults = (*owner.args.defaults, *owner.args.kw_defaults)
        missing = (None,) * (len(names) - len(defaults))
        typed = [
            (x.arg, x.annotation, default)
            for x, default in zip(names, (*missing, *defaults), strict=True)
        ]
    declared = {}
    for argument, annotation, default in typed:
        if argument in texts:
            kind = ast.unparse(annotation)
            is_none = default is None or ast.unparse(default) == "None"
            if kind.startswith("Literal") and not is_none:
                kind = kind.replace(" | None", " | Literal['none']")
            forms = (form for start, form in _FORMS_OF_TYPES.items() if kind.startswith(start))
            form = next(forms, "NAME")
            declared[argument] = Declaration(kind, Argument(form=form), texts[argument])
    return declared


def _read_entries(docstring: str) -> dict[str, str]:
    """Return the first clause of each entry of "Args:" or "Attributes:"."""
    lines = docstring.splitlines()
    heads = [i for i, line in enumerate(lines) if line in ("Args:", "Attributes:")]
    entries: list[str] = []
    for line in itertools.takewhile(str.strip, lines[heads[0] + 1 :]) if heads else ():
        if line.startswith("    "):
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    pairs = (entry.partition(": ")[::2] for entry in entries)
    return {name: re.split(r"[.:;](?:\s|$)", text)[0] for name, text in pairs}
