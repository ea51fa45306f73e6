"""`--explain`: a command as the Python that does the same."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jaxonnx


class Name(str):
    """A name rather than a text."""


class Planned(NamedTuple):
    """A function of the updates of the run: this call, with their number as its next argument."""

    call: partial


def made(value: Any) -> Any:
    """Return a value with its calls made."""
    if isinstance(value, Planned):
        call = value.call
        return lambda steps: call(steps)
    if isinstance(value, partial):
        return value()
    return [made(x) for x in value] if isinstance(value, list) else value


def source(value: Any) -> str:
    """Return the Python that makes a value."""
    match value:
        case Planned(call):
            more = partial(call.func, *call.args, Name("steps"), **call.keywords)
            return f"lambda steps: {source(more)}"
        case partial():
            named = [f"{name}={source(x)}" for name, x in value.keywords.items()]
            return f"{_public(value.func)}({', '.join([*map(source, value.args), *named])})"
        case Name():
            return str(value)
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False)
        case Mapping():
            return "{" + ", ".join(f"{source(k)}: {source(x)}" for k, x in value.items()) + "}"
        case tuple():
            return "(" + "".join(f"{source(x)}, " for x in value).rstrip() + ")"
        case list():
            return "[" + ", ".join(map(source, value)) + "]"
    return repr(value)


def loading(path: Path, **settings: Any) -> str:
    """Return the line that loads the model."""
    return f"model = {source(partial(jaxonnx.load, path, **settings))}"


def reading(name: str, path: Path, columns: tuple[Sequence[str], Sequence[str]]) -> list[str]:
    """Return the lines that read inputs and targets from a .npz file."""
    inputs, targets = ([f"arrays[{source(column)}]" for column in part] for part in columns)
    by_name = [f"{source(n)}: {x}" for n, x in zip(columns[1], targets, strict=True)]
    labels = targets[0] if len(targets) == 1 else "{" + ", ".join(by_name) + "}"
    return [
        f"arrays = np.load({source(path)})",
        f"{name} = ({', '.join(inputs)},), {labels}",
    ]


def training(settings: Mapping[str, Any]) -> list[str]:
    """Return the lines that train `model` with `data`."""
    arguments = ["model", "data", *(f"{name}={source(x)}" for name, x in settings.items())]
    return ["result = jaxonnx.train(", *(f"    {argument}," for argument in arguments), ")"]


def _public(function: Any) -> str:
    """Return the name by which users call a function of the package."""
    name = function.__qualname__
    room = "jaxonnx" if name in jaxonnx.__all__ else function.__module__.partition("._")[0]
    return f"{room}.{name}"
