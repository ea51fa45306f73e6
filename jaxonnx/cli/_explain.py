"""`--explain`: prints the equivalent Python program."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jaxonnx
from jaxonnx.cli._inputs import Columns


class Name(str):
    """A name rather than a text."""


def evaluate_calls(value: Any) -> Any:
    """Return a value with its calls made."""
    if isinstance(value, partial):
        return value()
    return [evaluate_calls(x) for x in value] if isinstance(value, list) else value


def source(value: Any) -> str:
    """Return the Python that makes a value."""
    match value:
        case partial():
            named = [f"{name}={source(x)}" for name, x in value.keywords.items()]
            called = value.func.__qualname__  # by the name that users call it by
            in_package = called in jaxonnx.__all__
            room = "jaxonnx" if in_package else value.func.__module__.partition("._")[0]
            return f"{room}.{called}({', '.join([*map(source, value.args), *named])})"
        case Name():
            return str(value)
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False)
        case Mapping():
            return "{" + ", ".join(f"{source(k)}: {source(x)}" for k, x in value.items()) + "}"
        case tuple():
            return "(" + ", ".join(map(source, value)) + ("," if len(value) == 1 else "") + ")"
        case list():
            return "[" + ", ".join(map(source, value)) + "]"
    return repr(value)


def loading(path: Path, **settings: Any) -> str:
    """Return the line that loads the model."""
    return f"model = {source(partial(jaxonnx.load, path, **settings))}"


def reading(name: str, path: Path, columns: Columns, complete: bool) -> list[str]:
    """Return the lines that read inputs, targets and weights from a .npz file.

    Args:
      complete: whether the inputs are all that the model has.
    """

    def arrays(names: Mapping[str, str]) -> dict[str, Name]:
        return {key: Name(f"arrays[{source(key_of_array)}]") for key, key_of_array in names.items()}

    inputs, targets = arrays(columns.inputs), arrays({name: name for name in columns.targets})
    parts: list[Any] = [tuple(inputs.values()) if complete else inputs]
    parts += targets.values() if len(targets) == 1 else [targets]
    parts += arrays({name: name for name in columns.weight}).values()
    return [f"arrays = np.load({source(path)})", f"{name} = {', '.join(map(source, parts))}"]


def training(settings: Mapping[str, Any]) -> list[str]:
    """Return the lines that train `model` with `data`."""
    arguments = ["model", "data", *(f"{name}={source(x)}" for name, x in settings.items())]
    return ["result = jaxonnx.train(", *(f"    {argument}," for argument in arguments), ")"]
