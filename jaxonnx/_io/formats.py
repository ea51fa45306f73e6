"""The table of file formats: how graphs and weights are read and written, by suffix.

A new format is one entry, with a function that reads it and one that writes it.
"""

import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

from jaxonnx import _safe_read
from jaxonnx._atomic_write import write_atomically
from jaxonnx._io.protos import all_graphs
from jaxonnx.errors import Error, InputError, ModelError

LIMIT = 2**31 - 2**20
"""Bytes that fit one protobuf file, with room for the graph."""

Graph = Callable[[], ModelProto]
Weights = Callable[[], Mapping[str, np.ndarray]]
"""What is to be written, made only when a format asks for it."""


class Format(NamedTuple):
    """How files of one suffix are read and written."""

    graph: Callable[[Path], ModelProto] | None
    """Read a ModelProto; None for files with weights only."""
    weights: Callable[[Path], dict[str, np.ndarray]] | None
    """Read weights by name; None if they are the tensors of the graph."""
    write: Callable[..., None]
    """Write to a path from a `Graph` and `Weights`; options of `Model.save` by name."""


def of(path: str | os.PathLike[str]) -> Format:
    """Return the format of a path: that of ONNX files unless its suffix is another's."""
    return _FORMATS.get(Path(path).suffix, _ONNX)


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
    if suffix in _FOREIGN:
        raise InputError(
            f"'{path}': jaxonnx writes .onnx, .npz and .safetensors files, not {suffix}; "
            f"{_FOREIGN[suffix]}"
        )


def save(path: str | os.PathLike[str], graph: Graph, weights: Weights, **options: bool) -> None:
    """Write a model; if that fails, the file that was at `path` stays as it was.

    Raises:
      InputError: options that the format does not have, or the suffix of a foreign one.
    """
    check_suffix(path)
    path, form = Path(path), of(path)
    chosen = {name: True for name, wanted in options.items() if wanted}
    if chosen and form is not _ONNX:
        raise InputError(f"a {path.suffix} file has neither external data nor sparse initializers")
    form.write(path, graph, weights, **chosen)


def _read_onnx(path: Path) -> ModelProto:
    try:
        return onnx.load(path, "protobuf", load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise ModelError(f"'{path}' is not an ONNX file, or is truncated ({error})") from error


def _write_onnx(
    path: Path, graph: Graph, _: Weights, external_data: bool = False, sparse: bool = False
) -> None:
    proto = graph()
    if sparse:
        _import_packed().to_sparse_initializers(proto)
    size = sum(len(t.raw_data) for t in proto.graph.initializer)
    data: dict[str, Any] = {}
    if external_data or size > LIMIT:
        # Each content has a name of its own, so that the file at `path` finds its own data
        # whenever the process is killed.
        data = {"save_as_external_data": True, "size_threshold": 1024}
        data["location"] = f"{path.name}.{_digest(proto)}.data"
    before = _data_files(path)
    with write_atomically(path) as written:
        onnx.save_model(proto, written, **data)
    for unused in before - {data.get("location")}:
        (path.parent / unused).unlink(missing_ok=True)


def _digest(proto: ModelProto) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for graph in all_graphs(proto.graph):
        for tensor in graph.initializer:
            digest.update(len(tensor.raw_data).to_bytes(8))
            digest.update(tensor.raw_data)
    return digest.hexdigest()


def _data_files(path: Path) -> set[str]:
    """Return the data files that belong to the model at `path` alone, by their names."""
    if not path.is_file():
        return set()
    pattern = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.data")
    files = {other.name for other in path.parent.iterdir() if pattern.fullmatch(other.name)}
    try:
        graphs = [*all_graphs(_read_onnx(path).graph)]
    except ModelError:
        return files
    entries = (e for g in graphs for tensor in g.initializer for e in tensor.external_data)
    usual = f"{path.name}.data"  # what other exporters call it
    return files | {usual for e in entries if (e.key, e.value) == ("location", usual)}


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    failure = f"'{path}' is not an .npz file, or is damaged"
    with _safe_read.wrap_errors(failure, ModelError), zipfile.ZipFile(path) as archive:
        packed = f"{_import_packed().INDEX}.npy" in archive.namelist()
    if packed:
        return _import_packed().load_weights(path)
    return _safe_read.arrays(path, failure, ModelError)


def save_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays of any names, where `np.savez` refuses "file"."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file by name."""
    safetensors = _safetensors()
    failure = f"'{path}' is not a safetensors file, or is damaged"
    with _safe_read.wrap_errors(failure, ModelError, safetensors.SafetensorError):
        return safetensors.numpy.load_file(path)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts in a safetensors file."""
    with open_safetensors(path) as file:
        return file.metadata() or {}


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file, to read its tensors one by one."""
    return _safetensors().safe_open(path, framework="numpy")


def _write_safetensors(path: Path, _: Graph, weights: Weights) -> None:
    write_safetensors(path, weights())


def write_safetensors(
    path: Path, weights: Mapping[str, np.ndarray], about: Mapping[str, str] | None = None
) -> None:
    """Write arrays by name, and texts about them."""
    safetensors = _safetensors()
    # the package would write the memory of a transposed array in the order that it lies in
    arrays = {name: np.require(w, requirements="C") for name, w in weights.items()}
    try:
        with write_atomically(path) as written:
            safetensors.numpy.save_file(arrays, written, about and {**about})
    except safetensors.SafetensorError as error:
        raise InputError(f"safetensors cannot hold these weights: {error}") from error


def _safetensors() -> ModuleType:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise Error(
            "safetensors files need safetensors: pip install 'jaxonnx[safetensors]'"
        ) from error
    return safetensors


def _import_packed() -> ModuleType:
    """Import the module for packed weights at its first use: it imports `jaxonnx.sparse`."""
    from jaxonnx._io import packed

    return packed


_ONNX = Format(_read_onnx, None, _write_onnx)
_FORMATS = {
    ".npz": Format(
        lambda path: _import_packed().load_packed(path),
        _read_npz,
        lambda path, graph, _: _import_packed().save_packed(graph(), path),
    ),
    ".safetensors": Format(None, read_weights, _write_safetensors),
}
