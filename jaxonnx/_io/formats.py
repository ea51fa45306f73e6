"""The formats, of which the first that finds a source reads it, and the one of a suffix writes."""

import os
from pathlib import Path
from typing import Any, TypeVar

from jaxonnx._io.checkpoints import RunFormat
from jaxonnx._io.files import (
    BytesFormat,
    OnnxFormat,
    PackedFormat,
    ProtoFormat,
    SafetensorsFormat,
)
from jaxonnx._io.protocol import File, Format, Graph, Weights, is_folder
from jaxonnx._io.training_checkpoints import TrainingCheckpointFormat
from jaxonnx._require import require
from jaxonnx.errors import InputError

K = TypeVar("K", bound=type[Format])

FORMATS: list[Format] = [
    ProtoFormat(),
    BytesFormat(),
    TrainingCheckpointFormat(),
    RunFormat(),
    PackedFormat(),
    SafetensorsFormat(),
    OnnxFormat(),  # any other path
]
"""In the order in which they are asked for a source."""


def register(kind: K) -> K:
    """Register a format, which is asked before those that are there; return it.

    Args:
      kind: a subclass of `Format`.

    Raises:
      InputError: it is not one.
    """
    fits = isinstance(kind, type) and issubclass(kind, Format)
    require("formats.register: kind", kind, fits, "a subclass of jaxonnx.formats.Format")
    FORMATS.insert(0, kind())
    return kind


def find(source: Any, **choices: str | None) -> tuple[Format, Any]:
    """Find a network: its format, and what that reads.

    Args:
      source: as `load` takes it.
      choices: the arguments of `load` that choose one of several networks, by name; None if they
        are not passed.

    Raises:
      InputError: the source is of no format, or of one for which these are no arguments.
      ModelError: there is no such file.
    """
    chosen = {name: value for name, value in choices.items() if value is not None}
    for form in FORMATS:
        if {form.choice}.issuperset(chosen):
            place = form.find(source, chosen.get(form.choice))
            if place is not None:
                return form, place
    for name, value in chosen.items():
        forms = " or ".join(form.form for form in FORMATS if form.choice == name)
        raise InputError(f"{name}={value!r} goes with {forms}; the source is of another kind")
    *forms, last = [form.form for form in FORMATS if form.form]
    raise InputError(
        f"a model is {', '.join(forms)} or {last}, not of type {type(source).__name__}"
    )


def read(source: Any) -> File:
    """Read a model, as `load` does."""
    form, place = find(source)
    return form.read(place)


_FOREIGN = {
    ".tflite": "onnx2tf converts an .onnx file (`onnx2tf -i net.onnx`)",
    ".h5": "onnx2tf converts an .onnx file (`onnx2tf -i net.onnx -oh5`)",
    ".keras": "onnx2tf converts an .onnx file (`onnx2tf -i net.onnx -okv3`)",
    ".mlmodel": "coremltools converts torch modules, as onnx2torch makes one of an .onnx file",
    ".mlpackage": "coremltools converts torch modules, as onnx2torch makes one of an .onnx file",
    ".ort": "`python -m onnxruntime.tools.convert_onnx_models_to_ort net.onnx` converts",
    ".engine": "TensorRT converts (`trtexec --onnx=net.onnx --saveEngine=net.engine`)",
    ".plan": "TensorRT converts (`trtexec --onnx=net.onnx --saveEngine=net.plan`)",
    ".trt": "TensorRT converts (`trtexec --onnx=net.onnx --saveEngine=net.trt`)",
    ".xml": "OpenVINO converts (`ovc net.onnx`)",
    ".param": "pnnx converts (`pnnx net.onnx`)",
    ".mnn": "MNN converts (`MNNConvert -f ONNX --modelFile net.onnx --MNNModel net.mnn`)",
    ".pt": "onnx2torch makes a module of an .onnx file; weights by name go into .safetensors",
    ".pth": "onnx2torch makes a module of an .onnx file; weights by name go into .safetensors",
    ".gguf": "llama.cpp converts folders of Hugging Face, not ONNX files",
}
"""Suffixes of other formats, and the converter from ONNX to each."""


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Refuse to write ONNX under the suffix of another format.

    Raises:
      InputError: with the program that converts.
    """
    suffix = Path(path).suffix.lower()
    if suffix in _FOREIGN and not any(form.suffix == suffix for form in FORMATS):
        raise InputError(
            f"'{path}': jaxonnx writes .onnx, .npz and .safetensors files, not {suffix}; "
            f"{_FOREIGN[suffix]}"
        )


def save(path: str | os.PathLike[str], graph: Graph, weights: Weights, **options: bool) -> Format:
    """Write a model; if that fails, the file that was at `path` stays as it was.

    Returns:
      The format of the file.

    Raises:
      InputError: options that the format does not have, the suffix of a foreign one, or a folder.
    """
    if is_folder(path):
        raise InputError(f"'{os.fspath(path)}' is a folder: give the path of a file")
    check_suffix(path)
    path = Path(path)
    form = next((form for form in FORMATS if form.suffix == (path.suffix or None)), FORMATS[-1])
    chosen = {name: True for name, is_set in options.items() if is_set}
    if not chosen.keys() <= {*form.takes}:
        raise InputError(f"a {path.suffix} file has neither external data nor sparse initializers")
    form.write(path, graph, weights, **chosen)
    return form
