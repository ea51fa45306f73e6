"""Formats of a single file (ONNX, packed .npz, .safetensors), and of a model in memory."""

import hashlib
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

from jaxonnx._files import read_arrays, wrap_errors, write_atomically
from jaxonnx._io.protocol import File, Format, Graph, Weights, check_exists
from jaxonnx._io.protos import all_graphs
from jaxonnx._io.read import read_proto
from jaxonnx.errors import Error, InputError, ModelError

LIMIT = 2**31 - 2**20
"""Bytes that fit one protobuf file, with room for the graph."""


class ProtoFormat(Format):
    """A ModelProto, which is not changed."""

    form = "a ModelProto"

    def find(self, source: Any, choice: str | None) -> ModelProto | None:
        return source if isinstance(source, ModelProto) else None

    def read(self, place: ModelProto) -> File:
        proto = ModelProto()
        proto.CopyFrom(place)
        return read_proto(proto, "the ModelProto")


class BytesFormat(Format):
    """The bytes of an ONNX file."""

    form = "the bytes of a file"

    def find(self, source: Any, choice: str | None) -> bytes | None:
        fits = isinstance(source, bytes | bytearray | memoryview)
        return bytes(source) if fits else None

    def read(self, place: bytes) -> File:
        try:
            return read_proto(onnx.load_model_from_string(place), "the bytes")
        except DecodeError as error:
            raise ModelError(
                f"the bytes are not an ONNX model, or are truncated ({error})"
            ) from error


class OnnxFormat(Format):
    """An ONNX file. Paths that no other format finds are taken for one."""

    form = "the path of an .onnx file"
    suffix = ".onnx"
    takes = ("external_data", "sparse")

    def find(self, source: Any, choice: str | None) -> Path | None:
        return check_exists(source) if isinstance(source, str | os.PathLike) else None

    def read(self, place: Path) -> File:
        return read_proto(_parse(place), f"'{place}'", path=place)

    def write(
        self,
        path: Path,
        graph: Graph,
        weights: Weights,
        external_data: bool = False,
        sparse: bool = False,
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
        if unused := before - {data.get("location")}:
            for other in path.parent.glob("*.onnx"):  # a copy of the file that was at `path`
                unused -= list_data_files(other)
        for name in unused:
            (path.parent / name).unlink(missing_ok=True)


class PackedFormat(Format):
    """An .npz of a graph and its tensors, the sparse ones packed; as weights, any .npz."""

    form = "the path of an .npz that Model.save wrote"
    suffix = ".npz"

    def read(self, place: Path) -> File:
        proto = _import_packed().load_packed(place)
        return read_proto(proto, f"'{place}'", path=place)

    def read_weights(self, place: Path) -> dict[str, np.ndarray]:
        failure = f"'{place}' is not an .npz file, or is damaged"
        with wrap_errors(failure, ModelError), zipfile.ZipFile(place) as archive:
            packed = f"{_import_packed().INDEX}.npy" in archive.namelist()
        if packed:
            return _import_packed().load_weights(place)
        return read_arrays(place, failure, ModelError)

    def write(self, path: Path, graph: Graph, weights: Weights, **options: bool) -> None:
        _import_packed().save_packed(graph(), path)


class SafetensorsFormat(Format):
    """Weights by name."""

    suffix = ".safetensors"
    has_graph = False

    def read_weights(self, place: Path) -> dict[str, np.ndarray]:
        return read_safetensors(place)

    def write(self, path: Path, graph: Graph, weights: Weights, **options: bool) -> None:
        write_safetensors(path, weights())


def _parse(path: Path) -> ModelProto:
    try:
        return onnx.load(path, "protobuf", load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise ModelError(f"'{path}' is not an ONNX file, or is truncated ({error})") from error


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
    return files | ({f"{path.name}.data"} & list_data_files(path))  # what other exporters call it


def list_data_files(path: Path) -> set[str]:
    """Return the files of a model's external data, relative to its folder.

    There are none if it is damaged, or cannot be read.
    """
    try:
        graphs = all_graphs(_parse(path).graph)
    except (ModelError, OSError):
        return set()
    entries = (e for g in graphs for tensor in g.initializer for e in tensor.external_data)
    return {entry.value for entry in entries if entry.key == "location"}


def save_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays of any names, where `np.savez` refuses "file"."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file by name."""
    safetensors = _safetensors()
    failure = f"'{path}' is not a safetensors file, or is damaged"
    with wrap_errors(failure, ModelError, safetensors.SafetensorError):
        return safetensors.numpy.load_file(path)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts in a safetensors file."""
    with open_safetensors(path) as file:
        return file.metadata() or {}


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file, to read its tensors one by one."""
    return _safetensors().safe_open(path, framework="numpy")


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
