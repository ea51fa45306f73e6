"""Parse the options of a command from flags and a TOML file."""

import argparse
import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jaxonnx
from jaxonnx.cli._flag_types import PAIRS, Gather
from jaxonnx.cli._flags import COMMON, VERBS

_EXITS = (
    "exit status: 0 success, 1 stopped early or failed during the work, "
    "2 invalid usage, files, model or data, 130 interrupted"
)

_ALSO_CALLED = {"lr": "rate", "learning-rate": "rate", "max-norm": "clip", "wd": "weight-decay"}
"""Names that other tools have for a flag."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of one command, from flags and `--config`; exit if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="jaxonnx",
        description="Run, train, quantize and sparsify ONNX models with JAX.",
        epilog=f"{_EXITS}.\njaxonnx COMMAND --help shows the flags of a command, and examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=jaxonnx.__version__)
    commands = parser.add_subparsers(dest="verb", required=True, metavar="command")
    for name, verb in VERBS.items():
        examples = "\n".join(f"  {line}" for line in verb.examples.splitlines())
        command = commands.add_parser(
            name,
            help=verb.what,
            description=f"{verb.what[0].upper()}{verb.what[1:]}.",
            epilog=f"examples:\n{examples}\n\n{_EXITS}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        actions = {}
        for title, flags in {**verb.groups, **COMMON}.items():
            group = command.add_argument_group(title) if title else command
            for flag in flags:
                action = group.add_argument(*flag.names.split(), help=flag.help, **flag.settings)
                long = [name for name in action.option_strings if name.startswith("--")]
                actions[(long or [action.dest])[0].removeprefix("--")] = action
        if arguments and arguments[0] == name:
            _check_flags(command, arguments[1:], actions)
            # the file that --config names; other mistakes are left to the parser itself
            early = argparse.ArgumentParser(prog=f"jaxonnx {arguments[0]}", add_help=False)
            early.add_argument("--config", type=Path)
            if (path := early.parse_known_args(arguments)[0].config) is not None:
                _configure(command, actions, path)
            if "dry-run" in actions:
                writes_nothing = "--dry-run" in arguments or actions["dry-run"].default
                actions["output"].required &= not writes_nothing
    return parser.parse_args(arguments)


def _check_flags(
    parser: argparse.ArgumentParser, words: Sequence[str], actions: Mapping[str, argparse.Action]
) -> None:
    """Refuse flags that a command does not have, with those that may be meant."""
    flags = {flag for action in actions.values() for flag in action.option_strings} | {"--help"}
    for text in words:
        flag = text.partition("=")[0]
        if flag.startswith("--") and flag != "--" and flag not in flags:
            near = _nearest(flag[2:], [name for name in actions if f"--{name}" in flags])
            parser.exit(
                2,
                f"{parser.prog}: unknown flag {flag}; try {' or '.join(f'--{x}' for x in near)} "
                f"({parser.prog} --help has all)\n",
            )


def _nearest(name: str, others: Sequence[str]) -> list[str]:
    """Return the two names that are most similar to one, or to its name here."""
    return difflib.get_close_matches(_ALSO_CALLED.get(name, name), others, n=2, cutoff=0)


def _configure(
    parser: argparse.ArgumentParser, actions: Mapping[str, argparse.Action], path: Path
) -> None:
    """Make the values of a TOML file the defaults of a command's flags."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--config {path}: {error}")
    preprocess = values.pop("preprocess", {})
    if not isinstance(preprocess, dict):
        parser.error(f"--config {path}: preprocess must be a table")
    values |= {"loss-on" if key == "loss" else key: x for key, x in preprocess.items()}
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in actions or name == "config":
            near = _nearest(name, [other for other in actions if other != "config"])
            parser.error(f"--config {path}: unknown '{key}'; try {' or '.join(near)}")
        action = actions[name]
        try:
            action.default = _default(action, value)
        except ValueError as error:
            parser.error(f"--config {path}: {key} = {value!r} {error}")
        except argparse.ArgumentTypeError as error:
            parser.error(f"--config {path}: {key}: {error}")
        action.required = False
        if not action.option_strings:
            action.nargs = "*" if action.nargs == "+" else "?"


def _default(action: argparse.Action, value: Any) -> Any:
    """Convert a value of a TOML file to that of the flag."""
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if isinstance(value, dict) and action.type in PAIRS:
        value = [
            f"{name}={','.join(map(str, x)) if isinstance(x, list) else x}"
            for name, x in value.items()
        ]
    if isinstance(value, bool | dict):
        raise ValueError("must be a number or a text")
    convert: Callable[[str], Any] = action.type or str  # type: ignore[assignment]
    if isinstance(action, Gather) or action.nargs == "+":
        return [convert(str(x)) for x in (value if isinstance(value, list) else [value])]
    separator = "x" if action.metavar == "HxW" else ","
    text = separator.join(map(str, value)) if isinstance(value, list) else str(value)
    if action.choices and text not in action.choices:
        raise ValueError(f"is none of {', '.join(action.choices)}")
    try:
        return convert(text)
    except ValueError:
        flag = action.option_strings[-1] if action.option_strings else action.dest
        raise ValueError(f"does not fit {flag}") from None
