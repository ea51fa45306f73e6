"""The formats, asked in order for a source or a suffix; weights that replace those of a file."""

import difflib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from onnx import helper

from jaxonnx._io.checkpoints import RunFormat, TrainingCheckpointFormat
from jaxonnx._io.files import (
    BytesFormat,
    OnnxFormat,
    PackedFormat,
    ProtoFormat,
    SafetensorsFormat,
)
from jaxonnx._io.protocol import File, Format, Graph, Weights, check_exists, is_folder
from jaxonnx._io.tensors import equal_bits
from jaxonnx._io.ties import sources, update_tied
from jaxonnx._require import require
from jaxonnx.errors import InputError, warn

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
    """Find a network: its format, and the files that this reads.

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


def read_weights(
    weights: str | os.PathLike[str] | Mapping[str, Any],
) -> tuple[str, dict[str, np.ndarray], Format]:
    """Return a label of these weights for messages, their arrays by name, and their format.

    Args:
      weights: a file in any of the formats (of a file with a graph, its tensors), or arrays.
    """
    if isinstance(weights, Mapping):
        arrays = {name: _numbers(name, value) for name, value in weights.items()}
        return "the weights", arrays, Format()
    if not isinstance(weights, str | os.PathLike):
        raise InputError(
            f"weights are a path, or arrays by name, not of type {type(weights).__name__}"
        )
    form, place = find(check_exists(weights, "a file of weights"))
    return f"'{os.fspath(weights)}'", form.read_weights(place), form


def _numbers(name: str, value: Any) -> np.ndarray:
    """Return a weight that a caller has passed as an array."""
    with suppress(ValueError, TypeError):  # ragged lists, and what has no array
        array = np.asarray(value)
        if array.dtype.kind not in "OUSM":
            return array
    raise InputError(f"the weights have '{name}' of type {type(value).__name__}, not as numbers")


def replace_weights(file: File, weights: str | os.PathLike[str] | Mapping[str, Any]) -> File:
    """Replace the weights of a file that others have the names of.

    Args:
      weights: a file in any of the formats (of a file with a graph, its tensors), or arrays by
        name. Tensors that it does not have stay as they are.

    Raises:
      InputError: a name that no tensor has, or another shape or type than the tensor's.
      ModelError: the file is missing or damaged.
    """
    graph, tensors = file.proto.graph, file.tensors
    what, new, form = read_weights(weights)
    if form.replaces_inputs:
        # make tensors of the inputs that have new values: artifacts have their weights as inputs
        for value in [*graph.input]:
            if value.name in new and value.name not in tensors:
                kind = value.type.tensor_type
                dims = [max(dim.dim_value, 0) for dim in kind.shape.dim]
                graph.initializer.add(name=value.name, data_type=kind.elem_type, dims=dims)
                graph.input.remove(value)
                dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
                tensors[value.name] = np.broadcast_to(np.zeros((), dtype), dims)  # not allocated
    for name, value in new.items():
        if name not in tensors:
            near = difflib.get_close_matches(name, tensors, n=8) or sorted(tensors)
            listed = ", ".join(near[:40]) + ", ..." * (len(near) > 40)
            raise InputError(
                f"{what} has '{name}', the model does not; its tensors are called {listed}"
                if near
                else f"{what} has '{name}', and the model has no weights that could be replaced"
            )
        old = tensors[name]
        if (value.shape, value.dtype) != (old.shape, old.dtype):
            raise InputError(
                f"{what}: '{name}' is {value.dtype}{list(value.shape)}, the model's is "
                f"{old.dtype}{list(old.shape)}"
            )
    # onnxruntime-training has the file's tensors alone, and evaluates its Identity nodes
    result = update_tied(graph, tensors, new, all_copies=form.replaces_inputs)
    left: dict[str, str] = {}
    for name, of in sources(graph, tensors).items():
        if name in new or result[name] is not tensors[name]:
            continue
        if of in left or (of in new and not equal_bits(new[of], tensors[of])):
            left[name] = of
    if left:
        names = ", ".join(f"'{name}' (of '{of}')" for name, of in left.items())
        warn(
            f"{what}: these tensors, which the file stores as others because their first values "
            f"are equal, are missing and keep the values of the file: {names}. Pass them as "
            "well; where two are one tensor, its value under both names",
        )
    return file._replace(tensors=result)
