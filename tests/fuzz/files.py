"""The other formats: files of weights, adapters, data, checkpoints, external data, settings."""

import contextlib
import io
import json
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import onnx

import jaxonnx
from jaxonnx.cli._parser import parse
from tests.fuzz.check import OPTIONS, Outcome, Overtime, finding
from tests.fuzz.mutate import FLOATS, INTEGERS, changed, mutated
from tests.support import tiny_networks

VALUES = [None, True, False, "", "x", "w1", "2:4", "1:1", [], {}, [0], [1, 0], [99, -1], {"w1": 1}]
VALUES += [*INTEGERS, *FLOATS, 2**70, -1, 3, "[" * 100_000]
CONFIG = """epochs = 3
batch-size = 8
rate = 1e-3
metrics = ["accuracy", "top_3"]
optimizer = "adamw"
sparsity = "2:4"
"""

Files = dict[str, bytes]


def write_files() -> dict[str, Files]:
    """Return the files of each kind, by their paths."""
    result = {}
    for kind, (write, _) in KINDS.items():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write(Path(folder))
            paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            result[kind] = {str(p.relative_to(folder)): p.read_bytes() for p in paths}
    return result


def broken(files: Files, random: Random) -> Files:
    """Return the files with one of them changed."""
    name = random.choice(sorted(files))
    data = files[name]
    if name.endswith(".npz") and random.random() < 0.7:
        new = _npz(data, random)
    elif name.endswith("about/metadata") and random.random() < 0.8:
        text = json.dumps(_json(json.loads(json.loads(data)["about"]), random))
        new = json.dumps({"about": text, "crc": zlib.crc32(text.encode())}).encode()
    elif name.endswith(".safetensors") and random.random() < 0.6:
        size = int.from_bytes(data[:8], "little")
        header = _text(_json(json.loads(data[8 : 8 + size]), random))
        new = len(header).to_bytes(8, "little") + header + data[8 + size :]
    elif name.endswith(".onnx"):
        new = mutated(data, random, data)
    elif data[:1] == b"{" and random.random() < 0.7:
        new = _text(_json(json.loads(data), random))
    else:
        new = changed(data, random)
    return files | {name: new}


def _text(value: Any) -> bytes:
    """Write JSON; what stands for deep brackets becomes them."""
    return json.dumps(value).replace('"' + "[" * 100_000 + '"', "[" * 100_000).encode()


def _json(value: Any, random: Random) -> Any:
    """Change a value somewhere inside of JSON."""
    if isinstance(value, dict | list) and value and random.random() < 0.85:
        new = value.copy()
        key = random.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        if random.random() < 0.1:
            del new[key]
        else:
            new[key] = _json(value[key], random)
        return new
    if isinstance(value, dict) and random.random() < 0.5:
        return value | {random.choice(["w1", "x", ""]): random.choice(VALUES)}
    if isinstance(value, str) and value[:1] == "{" and random.random() < 0.7:
        return json.dumps(_json(json.loads(value), random))
    return random.choice(VALUES)


def _npz(data: bytes, random: Random) -> bytes:
    """Change one array of a file, so that the archive itself is whole, or how it is kept."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(sorted(members))
    if name.startswith("jaxonnx") and random.random() < 0.8:
        array = np.load(io.BytesIO(members[name]))
        if name == "jaxonnx.graph.npy":
            text = mutated(array.tobytes(), random, array.tobytes())
        else:
            text = _text(_json(json.loads(array.tobytes()), random))
        out = io.BytesIO()
        np.save(out, np.frombuffer(text, np.uint8))
        members[name] = out.getvalue()
    elif random.random() < 0.3:
        del members[name]
    elif random.random() < 0.3:
        members[random.choice(("w1.npy", "x.npy", "y", "values:w1.npy"))] = members[name]
    else:
        head = random.random() < 0.6  # the header says which shape and type
        cut = members[name].find(b"\n") + 1 if head else len(members[name])
        members[name] = changed(members[name][:cut], random) + members[name][cut:]
    out = io.BytesIO()
    kind = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(out, "w", kind) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return out.getvalue()


def examine(kind: str, files: Files, stage: Callable[[str], None] = lambda _: None) -> Outcome:
    """Write files, and read them with what jaxonnx has for them."""
    stage(kind)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        try:
            with warnings.catch_warnings(), jax.disable_jit():
                warnings.simplefilter("ignore")
                KINDS[kind][1](Path(folder))
        except jaxonnx.Error as error:
            return Outcome("refused", detail=str(error)[:200])
        except (Exception, Overtime) as error:  # noqa: BLE001 - this is what is looked for
            return finding(error, kind)
    return Outcome("ran")


@cache
def _mlp() -> jaxonnx.Model:
    return jaxonnx.load(tiny_networks.mlp())


def _sparse() -> jaxonnx.Model:
    model = _mlp()
    params = {**model.params}
    for name in ("w1", "w2"):
        params[name] = params[name] * jaxonnx.sparse.mask(params[name])
    return jaxonnx.sparse.record(model.replace(params=params))


def _write_adapters(folder: Path) -> None:
    adapted = jaxonnx.LoRA(rank=2, where=["w1", "w2"]).attach(_mlp(), jax.random.key(0))
    jaxonnx.Adapters.of(adapted).save(folder / "a.npz")


def _write_data(folder: Path) -> None:
    x, y = tiny_networks.examples(8)
    np.savez_compressed(folder / "d.npz", x=x, y=y)


def _write_external(folder: Path) -> None:
    settings = {"save_as_external_data": True, "location": "m.data", "size_threshold": 0}
    onnx.save_model(tiny_networks.mlp(), folder / "m.onnx", **settings)


def _write_run(folder: Path) -> None:
    tiny_networks.train(epochs=1, checkpoint_dir=folder / "run", data=tiny_networks.examples(8))


def _write_adapted(folder: Path) -> None:
    settings = {"lora": jaxonnx.LoRA(rank=2), "checkpoint_dir": folder / "run"}
    tiny_networks.train(epochs=1, data=tiny_networks.examples(8), **settings)


def _read_model(path: Path) -> None:
    model = jaxonnx.load(path, **OPTIONS)
    str(model)
    model(tiny_networks.examples(2)[0])


def _read_sparse(path: Path) -> None:
    _, packed = jaxonnx.sparse.load(path)
    jaxonnx.sparse.unpack(packed)


def _read_config(path: Path) -> None:
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        parse(["train", "m.onnx", "d.npz", "-o", "o.onnx", "--config", str(path)])


KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "packed": (lambda f: _sparse().save(f / "m.npz"), lambda f: _read_model(f / "m.npz")),
    "sparse": (lambda f: _sparse().save(f / "m.npz"), lambda f: _read_sparse(f / "m.npz")),
    "weights": (
        lambda f: np.savez(f / "w.npz", **_mlp().params),
        lambda f: jaxonnx.load(tiny_networks.mlp(), weights=f / "w.npz"),
    ),
    "safetensors": (
        lambda f: _mlp().save(f / "w.safetensors"),
        lambda f: jaxonnx.load(tiny_networks.mlp(), weights=f / "w.safetensors"),
    ),
    "adapters": (
        _write_adapters,
        lambda f: jaxonnx.Adapters.load(f / "a.npz").apply(_mlp())(tiny_networks.examples(2)[0]),
    ),
    "data": (
        _write_data,
        lambda f: jaxonnx.evaluate(_mlp(), f / "d.npz", loss=tiny_networks.LABELS),
    ),
    "external": (_write_external, lambda f: _read_model(f / "m.onnx")),
    "checkpoints": (_write_run, lambda f: _read_model(f / "run")),
    "adapter checkpoints": (
        _write_adapted,
        lambda f: jaxonnx.Adapters.load(f / "run").apply(_mlp()),
    ),
    "settings": (lambda f: (f / "c.toml").write_text(CONFIG), lambda f: _read_config(f / "c.toml")),
}
"""How files of each kind are written, and read."""
