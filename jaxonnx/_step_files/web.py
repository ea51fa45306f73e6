"""A page that trains an exported step in a browser."""

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import numpy as np
from onnx import ModelProto, numpy_helper

from jaxonnx._data import images
from jaxonnx._files import write_atomically
from jaxonnx._io.files import LIMIT
from jaxonnx._require import require_choice
from jaxonnx._step_files import MODEL, Places
from jaxonnx.errors import InputError
from jaxonnx.lora import file_tensors
from jaxonnx.model import Model, to_proto
from jaxonnx.training import as_batch

PACKAGE = "onnxruntime-web"
VERSION = "1.30.0"
"""The version of the package that npm downloads."""

RUNTIME = {
    "ort.wasm.min.mjs": "wasm.js",
    "ort-wasm-simd-threaded.mjs": "wasm-threaded.js",
    "ort-wasm-simd-threaded.wasm": "wasm-threaded.wasm",
    "ort.webgpu.min.mjs": "webgpu.js",
    "ort-wasm-simd-threaded.asyncify.mjs": "webgpu-threaded.js",
    "ort-wasm-simd-threaded.asyncify.wasm": "webgpu-threaded.wasm",
}
"""Files of the package, and their names in the folder: not all servers know the type of .mjs."""

FILES = "index.html", "train.js", "examples.bin"
"""The files of a page, beside those of its runtime."""

_HELD_OUT = 0.2
"""The fraction of the examples that the page evaluates on."""
KINDS = ("image", "audio", "table")
"""The kinds of inputs of a page."""
_SIDES = range(8, 65)
"""The sides of images that can be drawn by hand."""


@contextmanager
def runtime(path: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Provide a folder with the files of onnxruntime-web, as a context manager.

    Args:
      path: of the package or its `dist`; by default the one in `node_modules`, or else a temporary
        download by npm.

    Raises:
      InputError: the package is not found, or npm fails.
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
    """Download the package by npm into a folder; return the folder of its files.

    Raises:
      InputError: npm is not installed, or fails.
    """
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
        members = [archive.getmember(f"package/dist/{name}") for name in RUNTIME]
        archive.extractall(folder, members, filter="data")
    return folder / "package" / "dist"


def split_setting(web: Any, batch: Any) -> tuple[str | None, Any]:
    """Return the kind of inputs that `web` names, if it does, and the examples of the page.

    Raises:
      InputError: there is no such kind or entry.
    """
    if not isinstance(web, Mapping) or not isinstance(web.get("inputs"), str):
        return None, web
    require_choice("web['inputs']", web["inputs"], KINDS)
    if unknown := sorted(map(str, web.keys() - {"inputs", "examples"})):
        raise InputError(f"web has the entries 'inputs' and 'examples', not '{unknown[0]}'")
    examples = web.get("examples", batch)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(examples)):
        raise InputError("web['examples'] is missing: the batch has shapes and no numbers")
    return web["inputs"], examples


def serialize(model: Model, trained: Iterable[str]) -> tuple[bytes, Places]:
    """Return the file of a network before training, and the places of its tensors in it.

    Weights are as they are without adapters: these change nothing yet, or are trained further.

    Args:
      model: that is trained.
      trained: the tensors that the page overwrites.

    Raises:
      InputError: one of these is not among the initializers of the graph, or has another size
        there.
    """
    tensors, proto = file_tensors(model) if trained else {}, to_proto(model, repeat=True)
    for tensor in proto.graph.initializer if model.program.adapts else ():
        x = model.tensors.get(tensor.name)
        if x is not None and len(tensor.raw_data) == x.nbytes:
            tensor.raw_data = np.asarray(x).tobytes()
    if sum(len(tensor.raw_data) for tensor in proto.graph.initializer) > LIMIT:
        return b"", {}
    return _places(proto, {name: tensors[name].nbytes for name in trained})


def write(
    folder: Path,
    source: Path,
    model: Model,
    data: Any,
    manifest: Mapping[str, Any],
    places: Places,
    kind: str | None = None,
) -> dict[str, Any]:
    """Write the page, its data and its runtime into the folder of an exported step.

    Args:
      folder: of the exported step.
      source: the folder with the files of the runtime.
      model: before the training.
      data: examples in a form that `as_batch` takes.
      manifest: of the step, with `weights`.
      places: of the tensors in the file of the network.
      kind: of the inputs, one of `KINDS`; by default images that can be drawn are recognized.

    Returns:
      The entry of the page in the manifest.

    Raises:
      InputError: the shapes of the examples are not those of the step.
    """
    # the examples by the names of the step's inputs, in their dtypes
    leaves = map(np.asarray, jax.tree.leaves(as_batch(data, model)))
    arrays = {}
    for (name, declared), array in zip(manifest["step"]["batch"].items(), leaves, strict=True):
        if [*array.shape[1:]] != declared["shape"][1:]:
            raise InputError(
                f"the page's examples have '{name}' of shape {[*array.shape[1:]]}, and the step "
                f"takes {declared['shape'][1:]}"
            )
        arrays[name] = array.astype(declared["dtype"])
    (folder / "runtime").mkdir(exist_ok=True)
    for name, file_name in RUNTIME.items():
        with write_atomically(folder / "runtime" / file_name) as file:
            shutil.copyfile(source / name, file)
    for asset in (files("jaxonnx") / "assets" / "web").iterdir():
        with write_atomically(folder / asset.name) as file:
            file.write_bytes(asset.read_bytes())
    trained = {name: places[name] for name in manifest["weights"]["tensors"]}
    entry = {
        "examples": _examples(folder, arrays),
        "model": {"file": MODEL, "tensors": trained},
    }
    drawing = None if kind in ("audio", "table") else _drawing(model, arrays, kind == "image")
    if classes := _classes(model, arrays):
        entry["classes"] = classes
        if drawing:
            entry["drawing"] = drawing
    if kind or drawing:
        entry["inputs"] = kind or "image"
    return entry


def _examples(folder: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Write the examples in random order to `examples.bin`; return its entry in the manifest.

    Each array begins at a multiple of 8 bytes, so that JavaScript can view it in place.
    """
    count = len(next(iter(arrays.values())))
    order = np.random.default_rng(0).permutation(count)
    places, at = {}, 0
    with write_atomically(folder / "examples.bin") as file, file.open("wb") as written:
        for name, array in arrays.items():
            places[name] = at
            at += written.write(array[order].tobytes())
            at += written.write(bytes(-at % 8))
    held_out = int(count * _HELD_OUT)
    return {"file": "examples.bin", "count": count, "held_out": held_out, "arrays": places}


def _places(proto: ModelProto, sizes: Mapping[str, int]) -> tuple[bytes, dict[str, Any]]:
    """Serialize a model, and find the bytes of some tensors in it, for the page to overwrite.

    Args:
      proto: the model.
      sizes: the bytes of the tensors by name.

    Returns:
      The file, and the offset and size of the data of each initializer.

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
    for name, tensor in tensors.items():
        at, size = text.index(tensor.SerializeToString(), at), len(tensor.raw_data)
        if size != sizes.get(name, size):
            raise InputError(
                f"the page cannot write '{name}': the file has 64 bits for each number, the "
                "training 32; with JAX's `jax_enable_x64` it has 64 as well"
            )
        places[name] = {"offset": text.index(tensor.raw_data, at), "bytes": size}
    return text, places


def _classes(model: Model, arrays: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """Return the classes for the page; None unless an output scores them, by integer labels."""
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


def _drawing(
    model: Model, arrays: Mapping[str, np.ndarray], is_image: bool = False
) -> dict[str, Any] | None:
    """Return the settings for drawing an input; None unless it is a small gray image.

    The background is the median of the first and last rows; the ink is the extreme value that is
    farther from it. Features of audio have such shapes, too: without `is_image` the image must be
    nearly square, and a quarter of all pixels the background.
    """
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
    is_drawn = max(where.size) <= 2 * min(where.size) and np.mean(pixels == paper) >= 0.25
    if not (is_image or is_drawn):
        return None
    return {
        "input": name,
        "height": where.size[0],
        "width": where.size[1],
        "paper": float(paper),
        "ink": float(high if high - paper >= paper - low else low),
    }
