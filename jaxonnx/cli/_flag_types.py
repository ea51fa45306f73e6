"""Flags of the command line, and parsers for their values."""

import argparse
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxonnx._arguments import list_arguments
from jaxonnx._mesh import AUTOMATIC
from jaxonnx.cli._declarations import SCHEME, read_declarations


class Flag(NamedTuple):
    names: str
    help: str
    settings: Mapping[str, Any] = {}
    """Other arguments of `argparse.ArgumentParser.add_argument`."""


class Verb(NamedTuple):
    what: str
    examples: str
    groups: Mapping[str, Sequence[Flag]]
    """Flags by the title of their group; "" is the parser itself."""


class Gather(argparse.Action):
    """An action that collects a repeated flag's values; they replace the configuration's."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [values] if before is self.default else [*before, values])


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
    return tuple(float(part) for part in text.split(","))


def size(text: str) -> tuple[int, int]:
    height, width = map(int, text.split("x"))
    return height, width


def share(text: str) -> Path | float:
    """Parse a number as a share, anything else as a file."""
    try:
        return float(text)
    except ValueError:
        return path(text)


def ratio(text: str) -> tuple[str, float]:
    """Parse NAME=X, or X alone."""
    name, _, number = text.rpartition("=")
    return name, float(number)


def class_weight(text: str) -> tuple[str, float] | str:
    """Parse NAME=X, or the word balanced."""
    return text if text == "balanced" else _named_ratio(text)


def fill(text: str) -> tuple[str, int | float]:
    """Parse NAME=N; whole numbers stay whole."""
    name, number = _named_ratio(text)
    return name, int(number) if number.is_integer() else number


def rename(text: str) -> tuple[str, str]:
    """Parse NAME=NEW."""
    name, equal, new = text.partition("=")
    if not (name and equal and new):
        raise ValueError(f"is not NAME=NEW: {text}")
    return name, new


def _named_ratio(text: str) -> tuple[str, float]:
    name, number = ratio(text)
    if not name:
        raise ValueError(f"has no name before {text}")
    return name, number


def widths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse_count(text: str) -> tuple[str, int]:
    """Parse OUTPUT=N, or N alone."""
    name, _, number = text.rpartition("=")
    if not number.isdigit():
        raise argparse.ArgumentTypeError(f"{number!r} is not a number; names go to --labels A,B")
    return name, int(number)


def axes(text: str) -> dict[str, int] | str:
    """Parse NAME=N,..., or all."""
    if text == "all":
        return text
    pairs = (part.split("=") for part in text.split(","))
    return {name: int(size) for name, size in pairs}


def scheme(text: str) -> str | dict[str, Any]:
    """Parse a type of weights, or FIELD=VALUE,... of a `jaxonnx.Quantization`.

    A part without "=" is one more name of the choice before it.
    """
    if "=" not in text:
        return text
    fields, last = read_declarations(*SCHEME), ""
    result: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals and last and fields[last].is_repeatable:
            name, value = last, part
        elif name not in fields:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(fields)}")
        last = name
        try:
            value = fields[name].convert(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{name}={value} {error}") from error
        result[name] = [*result.get(name, ()), value] if fields[name].is_repeatable else value
    return result


def cluster(text: str) -> tuple[str, int, int] | str:
    """Parse HOST:PORT,COUNT,INDEX, or auto."""
    if text == "auto":
        return text
    address, count, index = text.split(",")
    return address, int(count), int(index)


def dimension(text: str) -> tuple[str, int]:
    name, number = text.rsplit("=", 1)
    return name, positive(number)


PATH: Mapping[str, Any] = {"type": path}
FILE: Mapping[str, Any] = {"type": path, "metavar": "FILE"}
FOLDER: Mapping[str, Any] = {"type": path, "metavar": "FOLDER"}
REAL: Mapping[str, Any] = {"type": float, "metavar": "X"}
COUNT: Mapping[str, Any] = {"type": int, "metavar": "N"}
POSITIVE: Mapping[str, Any] = {"type": positive, "metavar": "N"}
NUMBERS: Mapping[str, Any] = {"type": numbers, "metavar": "X,..."}
WIDTHS: Mapping[str, Any] = {"type": widths, "metavar": "N,..."}
SIZE: Mapping[str, Any] = {"type": size, "metavar": "HxW"}
SWITCH: Mapping[str, Any] = {"action": argparse.BooleanOptionalAction, "default": False}
MANY: Mapping[str, Any] = {"action": Gather, "metavar": "NAME"}

PAIRS = (axes, class_weight, parse_count, dimension, fill, ratio, rename, scheme)
"""Kinds of values with a name and "=", which are a table in a TOML file."""

NEEDED: Mapping[str, Any] = {**FILE, "required": True}

FORMS: Mapping[str, Mapping[str, Any]] = {
    "text": {},
    "names": MANY,
    "count": COUNT,
    "choice": {},
    "name": {"metavar": "NAME"},
    "real": REAL,
    "switch": SWITCH,
    "toggle": {"action": argparse.BooleanOptionalAction},
    "folder": FOLDER,
    "rank": COUNT,
    "heads": {**MANY, "type": parse_count, "metavar": "N|OUTPUT=N"},
    "ratios": {**MANY, "type": ratio, "metavar": "X|NAME=X"},
    "class_weights": {**MANY, "type": class_weight, "metavar": "NAME=X"},
    "mesh": {"type": axes, "metavar": "all|NAME=N,..."},
    "sharding": {"choices": AUTOMATIC, "metavar": "NAME"},
    "fills": {**MANY, "type": fill, "metavar": "NAME=N"},
    "renames": {**MANY, "type": rename, "metavar": "NAME=NEW"},
    "widths": WIDTHS,
    "validation": {"type": share, "metavar": "PATH|SHARE"},
    "augment": {**MANY, "choices": ("crop", "flip")},
    "logs": {**MANY, **FILE},
    "scheme": {"type": scheme, "metavar": "TYPE|FIELD=X,..."},
}
"""How the command line takes an argument of `jaxonnx.train`, by `Argument.form`."""


def declared_flags(
    group: type | str, names: Collection[str] | None = None, without: Collection[str] = ()
) -> list[Flag]:
    """Return the flags of the arguments of a class of declarations.

    Args:
      group: the class, or its name where importing it takes JAX.
      names: the arguments to take; all by default.
      without: arguments to leave out.
    """
    flags = []
    for name, entry in list_arguments(group).items():
        argument = entry.argument
        if not argument.form or name in without or (names is not None and name not in names):
            continue
        settings = {**FORMS[argument.form], "dest": name}  # without the flag: None, or False
        if argument.form in ("choice", "name"):
            settings["choices"] = entry.choices
        text = entry.summary.replace("%", "%%").replace("`", "")
        text = text[0].lower() + text[1:]
        text += "; repeatable" if settings.get("action") is Gather else ""
        flags.append(Flag(f"--{(argument.flag or name).replace('_', '-')}", text, settings))
    return flags


_KINDS: Mapping[str, Mapping[str, Any]] = {
    "bool": {"action": argparse.BooleanOptionalAction},
    "int": POSITIVE,
    "float": REAL,
    "str": {"metavar": "PATH"},
    "Select": MANY,
    "Sequence": MANY,
}


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
    flags = []
    for name in names:
        entry, flag = declared[name], (renamed or {}).get(name, name).replace("_", "-")
        more = {"choices": entry.choices} if entry.kind == "choice" else _KINDS[entry.kind]
        text = entry.text.replace("%", "%%").replace("`", "")
        text += "; repeatable" if entry.is_repeatable else ""
        flags.append(Flag(f"--{flag}", text, {**more, "dest": name_of(owner, name)}))
    return flags


def name_of(owner: str, argument: str) -> str:
    """Return the name among the options of an argument that `read_flags` has a flag of."""
    return f"{owner}.{argument}"


def collect_values(options: argparse.Namespace, owner: str) -> dict[str, Any]:
    """Return the values of the arguments of an owner whose flags are given."""
    values = {
        name.removeprefix(f"{owner}."): value
        for name, value in vars(options).items()
        if name.startswith(f"{owner}.") and value is not None
    }
    return {name: None if value == "none" else value for name, value in values.items()}
