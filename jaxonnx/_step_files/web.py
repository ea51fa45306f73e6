"""A page that trains an exported step in a browser."""

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import numpy as np
from onnx import ModelProto, numpy_helper

from jaxonnx._atomic_write import whole
from jaxonnx._data.images import preparation as images
from jaxonnx.errors import InputError
from jaxonnx.model import Model, file_tensors, to_proto
from jaxonnx.training import as_batch

PACKAGE = "onnxruntime-web"
VERSION = "1.30.0"
"""Of the package, where npm brings it."""

RUNTIME = {
    "ort.wasm.min.mjs": "wasm.js",
    "ort-wasm-simd-threaded.mjs": "wasm-threaded.js",
    "ort-wasm-simd-threaded.wasm": "wasm-threaded.wasm",
    "ort.webgpu.min.mjs": "webgpu.js",
    "ort-wasm-simd-threaded.asyncify.mjs": "webgpu-threaded.js",
    "ort-wasm-simd-threaded.asyncify.wasm": "webgpu-threaded.wasm",
}
"""Files of the package, and what they are called in the folder: all servers know .js."""

_HELD_OUT = 0.2
"""The share of the examples that the page tests with."""
_SIDES = range(8, 65)
"""Sides of a picture that can be drawn by hand."""


@contextmanager
def runtime(path: str | os.PathLike | None) -> Iterator[Path]:
    """Give the folder with the files of the runtime.

    Args:
      path: of the package or its `dist`; None means that of `node_modules`, or else one that npm
        brings for the moment.

    Raises:
      InputError: there is none.
    """
    places = [Path(path), Path(path) / "dist"] if path else [Path("node_modules", PACKAGE, "dist")]
    for place in places:
        if all((place / name).is_file() for name in RUNTIME):
            yield place
            return
    if path:
        raise InputError(
            f"'{os.fspath(path)}' is not a folder of {PACKAGE} {VERSION}: it lacks "
            + ", ".join(name for name in RUNTIME if not (places[-1] / name).is_file())
        )
    with tempfile.TemporaryDirectory(prefix="jaxonnx-") as folder:
        yield _fetch_package(Path(folder))


def _fetch_package(folder: Path) -> Path:
    """Return the folder of a package that npm brings."""
    npm = shutil.which("npm")
    remedy = f"run `npm install {PACKAGE}@{VERSION}` and name its folder, node_modules/{PACKAGE}"
    if npm is None:
        raise InputError(f"the page needs the files of {PACKAGE}, and npm is not there: {remedy}")
    command = [npm, "pack", "--silent", f"{PACKAGE}@{VERSION}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    packed = [*folder.glob("*.tgz")]
    if done.returncode or not packed:
        raise InputError(f"npm did not bring {PACKAGE} {VERSION} ({done.stderr.strip()}): {remedy}")
    with tarfile.open(packed[0]) as archive:
        wanted = [archive.getmember(f"package/dist/{name}") for name in RUNTIME]
        archive.extractall(folder, wanted, filter="data")
    return folder / "package" / "dist"


def write(
    folder: Path, source: Path, model: Model, data: Any, manifest: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the page, its data and its runtime into the folder of an exported step.

    Args:
      source: what `runtime` gives.
      model: as it is before the training.
      data: examples in a form that `as_batch` takes.
      manifest: what the folder says of the step, and of `weights`.

    Returns:
      What the manifest says of the page.
    """
    arrays = _arrays(data, model, manifest["step"]["batch"])
    found = file_tensors(model)
    trained = {name: found[name].nbytes for name in manifest["weights"]["tensors"]}
    text, places = _places(to_proto(model, repeat=True), trained)
    (folder / "runtime").mkdir(exist_ok=True)
    for name, own in RUNTIME.items():
        with whole(folder / "runtime" / own) as file:
            shutil.copyfile(source / name, file)
    for asset in (files("jaxonnx") / "assets" / "web").iterdir():
        with whole(folder / asset.name) as file:
            file.write_bytes(asset.read_bytes())
    with whole(folder / "model.onnx") as file:
        file.write_bytes(text)
    told = {
        "examples": _examples(folder, arrays),
        "model": {"file": "model.onnx", "tensors": places},
    }
    if classes := _classes(model, arrays):
        told["classes"] = classes
        if drawing := _drawing(model, arrays):
            told["drawing"] = drawing
    return told


def _arrays(data: Any, model: Model, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the examples as the step takes them, by the names of its inputs."""
    leaves = map(np.asarray, jax.tree.leaves(as_batch(data, model)))
    arrays = {}
    for (name, told), array in zip(batch.items(), leaves, strict=True):
        if [*array.shape[1:]] != told["shape"][1:]:
            raise InputError(
                f"the page's examples have '{name}' of shape {[*array.shape[1:]]}, and the step "
                f"takes {told['shape'][1:]}"
            )
        arrays[name] = array.astype(told["dtype"])
    return arrays


def _examples(folder: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Write the examples, in an order of their own; return where each array begins."""
    count = len(next(iter(arrays.values())))
    order = np.random.default_rng(0).permutation(count)
    places, at = {}, 0
    with whole(folder / "examples.bin") as file, file.open("wb") as written:
        for name, array in arrays.items():
            places[name] = at
            at += written.write(array[order].tobytes())
            at += written.write(bytes(-at % 8))
    held_out = int(count * _HELD_OUT)
    return {"file": "examples.bin", "count": count, "held_out": held_out, "arrays": places}


def _places(proto: ModelProto, sizes: Mapping[str, int]) -> tuple[bytes, dict[str, Any]]:
    """Return a file, and where in it tensors have their numbers.

    Args:
      sizes: of the tensors in bytes, by name.

    Raises:
      InputError: a tensor is not among the initializers of the graph, or has another size there.
    """
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    for name in sizes:
        if name not in tensors:
            raise InputError(f"the page cannot write '{name}', which lies in a part of the graph")
        # the numbers become the last bytes of their tensor
        tensors[name].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensors[name]), name))
    text, at, places = proto.SerializeToString(), 0, {}
    for name in sorted(sizes, key=[*tensors].index):
        tensor, size = tensors[name].SerializeToString(), len(tensors[name].raw_data)
        if size != sizes[name]:
            raise InputError(
                f"the page cannot write '{name}': the file has 64 bits for each number, the "
                "training 32; with JAX's `jax_enable_x64` it has 64 as well"
            )
        at = text.index(tensor, at) + len(tensor)
        places[name] = {"offset": at - size, "bytes": size}
    return text, places


def _classes(model: Model, arrays: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """Return what the page says of classes, where one output scores them and labels are numbers."""
    _, *targets, _ = [*arrays][len(model.inputs) - 1 :]
    if len(model.outputs) != 1 or len(targets) != 1:
        return None
    output, labels = model.outputs[0], arrays[targets[0]]
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(output.shape or ()) != 2:
        return None
    names = images.preparation(model).labels
    count = (output.shape or (0, 0))[1]
    count = count if isinstance(count, int) else int(labels.max()) + 1
    size = (model.inputs[0].shape or (None,))[0]
    return {
        "output": output.name,
        "labels": targets[0],
        "names": [*names] if len(names) == count else [str(i) for i in range(count)],
        "batch": size if isinstance(size, int) else None,
    }


def _drawing(model: Model, arrays: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """Return how a drawing becomes an input, where that is a small picture in grey."""
    try:
        where = images.layout(model)
    except InputError:
        return None
    small = all(side in _SIDES for side in where.size)
    if where.channels != 1 or not small or where.dtype not in (np.float32, np.uint8):
        return None
    name = model.inputs[0].name
    pixels = arrays[name].reshape(-1, *where.size)
    edge = np.concatenate([pixels[:, 0].ravel(), pixels[:, -1].ravel()])
    paper, low, high = np.median(edge), pixels.min(), pixels.max()
    return {
        "input": name,
        "height": where.size[0],
        "width": where.size[1],
        "paper": float(paper),
        "ink": float(high if high - paper >= paper - low else low),
    }
