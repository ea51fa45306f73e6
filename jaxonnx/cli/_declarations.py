"""Read arguments and their documentation from the source of functions and classes.

Importing them would take JAX, which the command line does without to show its help.
"""

import ast
import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jaxonnx

ADAPTERS = ("lora/_lora.py", "LoRA")
SCHEME = ("quantization/_scheme.py", "Quantization")
QUANTIZE = ("training/_quantize.py", "quantize")
EXPORT_SAFETENSORS = ("_hub/checkpoints.py", "export_safetensors")
EXPORT_STEP = ("_step_files/export.py", "export_step")
CONVERT = ("model/_convert.py", "convert")
SENSITIVITY = ("training/_quantize.py", "sensitivity")
GENERATE = ("model/_model.py", "Model.generate")


class Declaration(NamedTuple):
    """An argument of a function, or a field of a class."""

    kind: str
    """"choice", or the name of its type: "bool", "int", "float", "Sequence", "Select"."""
    choices: Sequence[str]
    """The values of a choice; "none" is one if None is, and is not the default."""
    text: str
    """The first clause of its documentation."""

    @property
    def is_repeatable(self) -> bool:
        return self.kind in ("Select", "Sequence")

    def convert(self, text: str) -> Any:
        """Return the value that a text on the command line stands for.

        Raises:
          ValueError: it stands for none.
        """
        match self.kind:
            case "choice" if text in self.choices:
                return None if text == "none" else text
            case "choice":
                raise ValueError(f"is none of {', '.join(self.choices)}")
            case "bool" if text.lower() in ("true", "false"):
                return text.lower() == "true"
            case "bool":
                raise ValueError("is neither true nor false")
            case "int":
                return int(text)
            case "float":
                return float(text)
        return text


@functools.cache
def read_declarations(file: str, name: str) -> dict[str, Declaration]:
    """Return the arguments of a function, or the fields of a class, that have annotations.

    Args:
      file: relative to the package.
      name: of a method with that of its class, "Class.method".
    """
    owner: Any = ast.parse((Path(jaxonnx.__file__).parent / file).read_text("utf-8"))
    for part in name.split("."):
        (owner,) = (node for node in owner.body if getattr(node, "name", "") == part)
    texts = _entries(ast.get_docstring(owner) or "")
    return {
        name: Declaration(*_type(annotation, default), texts[name])
        for name, annotation, default in _annotated(owner)
        if name in texts
    }


def _annotated(owner: Any) -> list[tuple[str, ast.expr, ast.expr | None]]:
    if isinstance(owner, ast.ClassDef):
        fields = [node for node in owner.body if isinstance(node, ast.AnnAssign)]
        return [(ast.unparse(field.target), field.annotation, field.value) for field in fields]
    spec = owner.args
    defaults = [*(None,) * (len(spec.args) - len(spec.defaults)), *spec.defaults, *spec.kw_defaults]
    arguments = zip((*spec.args, *spec.kwonlyargs), defaults, strict=True)
    return [(argument.arg, argument.annotation, default) for argument, default in arguments]


def _type(annotation: ast.expr, default: ast.expr | None) -> tuple[str, tuple[str, ...]]:
    parts = [node for node in ast.walk(annotation) if isinstance(node, ast.Subscript)]
    for part in parts:
        if ast.unparse(part.value) == "Literal":
            values = ast.literal_eval(part.slice)
            choices = values if isinstance(values, tuple) else (values,)
            is_none = default is not None and ast.unparse(default) == "None"
            optional = "None" in ast.unparse(annotation).split(" | ")
            return "choice", (*choices, "none") if optional and not is_none else choices
    first = ast.unparse(annotation).partition(" | ")[0]
    return first.partition("[")[0], ()


def _entries(docstring: str) -> dict[str, str]:
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
