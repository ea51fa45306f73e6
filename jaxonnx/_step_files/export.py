"""`export_step`: writes a training step as plain ONNX graphs and a manifest."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx._arguments import check_names
from jaxonnx._compare.written import Origin, check_written
from jaxonnx._data.random_inputs import draw_inputs
from jaxonnx._files import write_atomically
from jaxonnx._graph.values import Value, to_value
from jaxonnx._io.files import LIMIT, save_npz
from jaxonnx._io.formats import save
from jaxonnx._io.protos import unused_name
from jaxonnx._require import check_arguments, require_choice
from jaxonnx._step_files import MODEL, REST, Places, share_tensors, shorten_constants
from jaxonnx._step_files import web as _web
from jaxonnx._step_files.load import FORMAT, read_manifest
from jaxonnx.errors import InputError, TrainingError
from jaxonnx.lora import Adapters, file_tensors, writes_apart
from jaxonnx.model import Model, as_model, start_at_zeros
from jaxonnx.onnx_out import (
    OPSET,
    ExportedFunction,
    flatten_vectors,
    known_tensor,
    least_opset,
    merge_identities,
    reads,
    split_into_blocks,
    split_state,
    write_function,
)
from jaxonnx.training import (
    Batch,
    Settings,
    State,
    Step,
    StepArguments,
    as_batch,
    build_step,
    with_heads,
)

FILES = {
    "step": "step.onnx",
    "evaluate": "evaluate.onnx",
    "init": "init.onnx",
    "weights": "weights.onnx",
}


def export_step(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    path: str | os.PathLike[str],
    batch: Any,
    loss: Any = None,
    optimizer: Any = None,
    *,
    opset: int = OPSET,
    epochs: int | None = None,
    steps_per_epoch: int = 1,
    web: Any = None,
    runtime: str | os.PathLike[str] | None = None,
    init: Literal["onnx", "safetensors", "npz"] = "onnx",
    external_data: bool | Literal["shared"] | None = None,
    check: bool = True,
    **settings: Unpack[StepArguments],
) -> dict[str, Any]:
    """Write a training step as plain ONNX graphs, which any ONNX runtime can run.

    The folder gets these files:

    * `step.onnx`: one step, in standard operators. Its inputs are a batch and the training state,
      its outputs the loss and the new state.
    * `init.onnx`: a graph without inputs that returns the initial state.
    * `evaluate.onnx`: the sums of loss and metrics over a batch, in inference mode.
    * `manifest.json`: the meaning of all inputs and outputs, and which output feeds which input at
      the next step. An input of the batch has a role ("input", "target" or "weight"), by which
      programs find it where names have no order, as in JavaScript. Its "state" has dtype, shape and
      role of each array of the state ("parameter", "statistic", "optimizer", "average" or
      "progress"), and its place in a flat file ("offset", "bytes"), which `import_step` takes.

    Parameters and running statistics have the names of the tensors in the model file, so that
    `jaxonnx.load(net, weights=...)` loads trained weights. Results equal those of `jaxonnx.train`:
    random operators are seeded with the seed and the step count, which is part of the state.

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts.
      path: the folder; it is created if it does not exist.
      batch: an example batch, like `(x, y)`, in any form that `train` accepts. Only shapes and
        dtypes are used. Weights of examples become an input if the batch has them. For a step that
        accepts any batch size, pass `jax.ShapeDtypeStruct`s with a symbolic first dimension.
      loss: as in `train`.
      optimizer: as in `train`.
      opset: the ONNX opset. The manifest has the least that would do ("least_opset"): 16 for most
        steps, 18 with random numbers.
      epochs: as in `jaxonnx.training.step`.
      steps_per_epoch: as in `jaxonnx.training.step`.
      web: examples, in the form of `batch`. Adds a web page that trains with them in a browser. It
        shows loss and accuracy on a fifth of them, which is held out, and offers the trained file
        for download. Any file server can serve the folder (`python -m http.server`). Small gray
        images can be drawn in it; `{"inputs": kind, "examples": examples}` says what the inputs
        are, "image", "audio" or "table", where that is not recognized (without examples, those of
        `batch`).
      runtime: the folder of the npm package onnxruntime-web, which the page needs; by default it is
        taken from `node_modules`, or downloaded by npm.
      init: "safetensors" or "npz" writes the initial state as a file of arrays instead of a graph.
      external_data: where large tensors are stored: in each graph (False), in a file beside each
        (True; above 2 GB always), or once for all ("shared"): then the folder has the network as
        `model.onnx`, and the graphs refer to its weights by their place in this file, and to what
        it lacks in `shared.data`. The manifest has these files by "data", for runtimes that do not
        open files themselves. "shared" with a page, False without by default.
      check: compare the graphs with the computations of `train`, by onnxruntime where it is
        installed, before anything is written: on arrays of `batch` that have different numbers, and
        on random numbers in place of others. Above 256 MiB of state it is not compared, with a
        warning.
      **settings: other arguments of `jaxonnx.training.step`: metrics, trainable, lora, sparsity,
        ..., except mesh and quantize.

    Returns:
      The manifest.

    Raises:
      InputError: the folder has a file of one of these names that no earlier export wrote, and that
        would change, such as the model itself.
      UnsupportedError: a part of the step cannot be expressed in ONNX.
      TrainingError: settings or batch do not fit the model.
      ModelError: `check` finds a difference; the message names the first node that differs.
    """
    check_arguments(export_step, locals())
    check_names("export_step", StepArguments, settings)
    if settings.get("mesh") is not None:
        raise TrainingError("mesh: a step that is exported runs on one device")
    if settings.get("quantize") is not None:
        raise TrainingError(
            "quantize: an exported step keeps the scales that a model has; leave it out, and pass "
            "the model that jaxonnx.quantize(model, data) returns"
        )
    require_choice("init", init, ("onnx", "safetensors", "npz"))
    external_data = (False if web is None else "shared") if external_data is None else external_data
    require_choice("external_data", external_data, (False, True, "shared"))
    chosen = Settings(loss=loss, optimizer=optimizer, epochs=epochs, **settings)
    model, _ = start_at_zeros(with_heads(as_model(model), chosen), batch)
    step = build_step(model, chosen, epochs, steps_per_epoch, platform="onnx")
    exporter = _Exporter(step, batch, opset)
    kind, web = _web.split_setting(web, batch)
    web = web if web is None else as_batch(web, step.model)  # refused before all is written
    with nullcontext() if web is None else _web.runtime(runtime) as source:
        names = [n for n in FILES if source or exporter.finishes or n != "weights"]
        files = FILES | {"init": f"init.{init}"}
        graphs = exporter.make_graphs(names)
        if check:
            for name in [n for n in names if files[n].endswith(".onnx")]:
                proto, _ = graphs[name]
                check_written(files[name], proto, exporter.to_origin(name, proto))
        chosen_files = {n: files[n] for n in names}
        base = None
        if source is not None or external_data == "shared":
            trained = () if source is None else graphs["weights"][1]["tensors"]
            base = _web.serialize(step.model, trained)
        written = [*chosen_files.values(), "manifest.json"]
        written += [MODEL] if base and base[0] else []
        written += [REST] if external_data == "shared" else []
        written += [] if source is None else _web.FILES
        preserved = _find_preserved(Path(path), written, base and base[0])
        manifest = exporter.write(Path(path), graphs, chosen_files, external_data, base)
        if source is not None and base is not None:
            manifest["web"] = _web.write(
                Path(path), source, step.model, web, manifest, base[1], kind
            )
        if preserved:
            manifest["preserved"] = preserved
        with write_atomically(Path(path) / "manifest.json") as file:
            file.write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _find_preserved(folder: Path, names: Sequence[str], network: bytes | None) -> list[str]:
    """Return the files that stay as they are, which the user had before the first export.

    Args:
      folder: to write to.
      names: of the files to write.
      network: the contents of `MODEL`.

    Raises:
      InputError: a file is there that no export wrote, and would be overwritten.
    """
    try:
        _, earlier = read_manifest(folder)
    except InputError:
        users = names
    else:
        listed = earlier.get("preserved", [])
        users = listed if isinstance(listed, list) else names
    preserved = []
    for file in (folder / name for name in names if name in users and (folder / name).exists()):
        if file.name != MODEL or file.read_bytes() != network:
            raise InputError(
                f"'{file}' would be overwritten, and no earlier export wrote it: it may be the "
                "model itself. Export to another folder, or remove the file"
            )
        preserved.append(file.name)
    return preserved


class _Exporter:
    """Writes the graphs of a step, for batches with the shapes and dtypes of an example.

    Attributes:
      state: the initial state of the step.
      params: the names of its parameters, without variables of the optimizer.
      names, leaves, values: the name of each leaf of the state, the leaf, and its array (for a PRNG
        key, its data).
      batch: the names of the inputs of a batch.
      examples: the arrays of the example batch, with the symbolic batch size if there is one.
      next: the names of the outputs with the new state.
      results: the names of the outputs of the loss, and of whether it is finite.
    """

    def __init__(self, step: Step, batch: Any, opset: int):
        self._step, self.opset = step, opset
        self.state = step.init()
        self.frozen = {name: step.model.state[name] for name in step.frozen}
        example = step.as_batch(jax.tree.map(_concrete, batch))
        step.check(example)
        self.example = example
        used: set[str] = set()
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(self.state)
        # a parameter has the name of the file's tensor
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        names = [name.removeprefix("params.").removeprefix("state.") for name in names]
        self.names = [unused_name(name, used) for name in names]
        self.leaves = [value for _, value in leaves]
        self.params = [n for n in self.state.params if n not in step.optimizer_variables]
        self._roles = [
            "optimizer"
            if path[0].name == "params" and path[1].key in step.optimizer_variables
            else _ROLES.get(path[0].name, "progress")
            for path, _ in leaves
        ]
        self.values = [known_tensor(value, value) for value in self.leaves]
        inputs = [value.name for value in step.model.inputs]
        targets = [_key("targets", path) for path, _ in _leaves(example.targets)]
        names = [*inputs, *targets, "weight"]
        self.batch = [unused_name(name, used) for name in names]
        roles = ["input" for _ in inputs] + ["target" for _ in targets] + ["weight"]
        self._batch_roles = dict(zip(self.batch, roles, strict=True))
        self.next = [unused_name(f"next.{name}", used) for name in self.names]
        self.results = unused_name("loss", used), unused_name("is_finite", used)
        self.examples = jax.tree.leaves(example)
        sizes = [*({_open_size(leaf) for leaf in jax.tree.leaves(batch)} - {None})]
        if len(sizes) > 1:
            raise InputError(
                f"the arrays of a batch have several symbolic sizes: {sizes[0]}, {sizes[1]}"
            )
        if sizes:
            types = [jax.dtypes.canonicalize_dtype(x.dtype) for x in self.examples]
            shapes = [(*sizes, *np.shape(x)[1:]) for x in self.examples]
            self.examples = [*map(jax.ShapeDtypeStruct, shapes, types)]
        self._written: dict[str, tuple[ExportedFunction, Sequence[str]]] = {}
        """The functions of the graphs, with the names of their inputs."""

    @property
    def finishes(self) -> bool:
        """Whether the file's tensors must be computed from the state (by `weights.onnx`).

        They must with adapters, master weights in a wider type, or second weights (an average).
        """
        types = {name: x.dtype for name, x in self._step.params.items()}
        wide = any(x.dtype != types.get(name, x.dtype) for name, x in self.state.params.items())
        second = self._step.has_second_weights(self.state)
        return self._step.model.program.adapts or wide or second

    def start(self) -> dict[str, np.ndarray]:
        """Return the state to start from, by name."""
        return dict(zip(self.names, self.values, strict=True))

    def make_graphs(self, names: Sequence[str]) -> dict[str, tuple[ModelProto, dict[str, Any]]]:
        """Return graphs by name ("step", "evaluate", "init", "weights"), with their entries in the
        manifest."""
        graphs = {name: getattr(self, name)() for name in names if name != "init"}
        # state that only the step reads (moments, say) may be stored in the shape of its blocks;
        # `init` is written after that, with the arrays reshaped
        needed = {name for other in graphs.keys() - {"step"} for name in graphs[other][1]["state"]}
        proto, entry = graphs["step"]
        needed.update(self.state.params, self.state.state)
        inner = {name: new for name, new in entry["state"].items() if name not in needed}
        shapes = split_state(proto, inner)
        merge_identities(proto.graph, inner=True)  # of results that branches compute
        pairs = zip(self.names, self.values, strict=True)
        self.values = [x.reshape(shapes.get(name, x.shape)) for name, x in pairs]
        return {name: graphs.get(name) or self.init() for name in names}

    def to_origin(self, name: str, proto: ModelProto) -> Origin:
        """Return a function of the step as what its graph is compared with."""
        written, inner = self._written[name]
        leaves = zip(self.names, self.leaves, strict=True)
        shapes = {name: known_tensor(x, x).shape for name, x in leaves}
        outputs = [to_value(value) for value in proto.graph.output]

        def run(feeds: Mapping[str, Any], names: Sequence[str] = ()) -> list[Any]:
            values = {**self.start(), **feeds}
            arrays = [values[n].reshape(shapes.get(n, values[n].shape)) for n in inner]
            results = written.run(arrays, names)
            for i, value in enumerate(outputs):  # moments may be in blocks
                results[i] = results[i].reshape(
                    [n for n in value.shape or () if isinstance(n, int)]
                )
            return results

        inputs = [to_value(value) for value in proto.graph.input]

        def draw(seed: int) -> dict[str, np.ndarray]:
            feeds = {**self._draw_state(seed), **self._draw_batch(seed)}
            return {value.name: feeds[value.name].astype(value.dtype) for value in inputs}

        names = {value.name for value in outputs}.union(written.names)
        size = sum(x.nbytes for x in self.values)
        return Origin(inputs, run, names=names, size=size, draw=draw)

    def _draw_state(self, seed: int) -> dict[str, np.ndarray]:
        """Return the initial state, with random numbers added to arrays of one number.

        Moments of zero, or factors of adapters, would hide what they are multiplied by.
        """
        random = np.random.default_rng(seed)
        return {
            name: x + random.uniform(0.05, 0.1, x.shape).astype(x.dtype)
            if x.size > 1 and jnp.issubdtype(x.dtype, jnp.floating) and (x == x.flat[0]).all()
            else x
            for name, x in self.start().items()
        }

    def _draw_batch(self, seed: int) -> dict[str, np.ndarray]:
        """Return the example batch, with random numbers in place of arrays of one number."""
        arrays = dict(zip(self.batch, map(np.asarray, jax.tree.leaves(self.example)), strict=True))
        rows = {value.name: value.rows for value in self._step.model.inputs}
        values = [Value(name, x.dtype, x.shape, rows=rows.get(name)) for name, x in arrays.items()]
        drawn = draw_inputs(values, len(values), seed=seed)
        weight = self.batch[-1]
        return {
            name: x if name == weight or (x != x.flat[:1]).any() else drawn[name]
            for name, x in arrays.items()
        }

    def write(
        self,
        folder: Path,
        graphs: Mapping[str, Any],
        files: Mapping[str, str],
        external_data: bool | Literal["shared"],
        base: tuple[bytes, Places] | None = None,
    ) -> dict[str, Any]:
        """Write graphs into a folder; return the manifest.

        Args:
          folder: is created.
          graphs: of `make_graphs`.
          files: the file names by graph.
          external_data: as in `export_step`.
          base: the file of the network, for a page or for graphs that refer to it, and the places
            of its tensors.
        """
        folder.mkdir(parents=True, exist_ok=True)
        data: dict[str, list[str]] = {}
        if base is not None:
            contents = {MODEL: base[0]}
            if external_data == "shared":
                protos = {n: p for n, (p, _) in graphs.items() if files[n].endswith(".onnx")}
                contents[REST], data = share_tensors(protos, *base)
            for name, content in contents.items():
                if content:
                    with write_atomically(folder / name) as file:
                        file.write_bytes(content)
        for name, (proto, _) in graphs.items():
            path = folder / files[name]
            if path.suffix == ".npz":
                with write_atomically(path) as file:
                    save_npz(file, self.start())
                continue
            save(
                path,
                lambda proto=proto: proto,
                self.start,
                external_data=external_data is True and path.suffix == ".onnx",
            )
        entries = {name: {"file": files[name], **entry} for name, (_, entry) in graphs.items()}
        for name, beside in data.items():
            entries[name]["data"] = beside
        return {
            "format": FORMAT,
            "opset": self.opset,
            "least_opset": max(least_opset(proto) for proto, _ in graphs.values()),
            "state": self._describe_state(entries.get("weights", {}).get("state")),
            "params": self.params,
            "statistics": [*self.state.state],
            **entries,
        }

    def _describe_state(self, needed: Sequence[str] | None) -> dict[str, Any]:
        """Return type, shape, role and the place in a flat file of each tensor of the state.

        Args:
          needed: the tensors that `import_step` needs, which come first; by default parameters and
            statistics.
        """
        if needed is None:
            needed = [*self.params, *self.state.state]
        described = zip(self.names, self.values, self._roles, strict=True)
        order = sorted(described, key=lambda each: each[0] not in needed)  # stable
        places, offset = {}, 0
        for name, x, role in order:
            place = {"dtype": str(x.dtype), "shape": [*x.shape], "offset": offset}
            places[name] = {**place, "bytes": x.nbytes, "role": role}
            offset += x.nbytes
        return places

    def _unflatten(self, values: Any, arrays: Any) -> tuple[State, Batch]:
        """Return the state and the batch from their leaves."""
        state = jax.tree_util.tree_unflatten(self._structure, values)
        return state, jax.tree.unflatten(jax.tree.structure(self.example), arrays)

    def step(self) -> tuple[ModelProto, dict[str, Any]]:
        """Return the graph of a training step, and its entry in the manifest."""

        def update(values, arrays):
            state, (loss, good) = self._step.update(*self._unflatten(values, arrays), self.frozen)
            return [*jax.tree.leaves(state), loss, good.astype(bool)]

        loss, finite = self.results
        proto = self._graph("step", update, [*self.next, loss, finite])
        if proto.ByteSize() < LIMIT:  # what ONNX infers shapes of
            flatten_vectors(proto)
            proto = split_into_blocks(proto)
        entry = {
            "batch": self._batch(proto),
            "state": dict(zip(self.names, self.next, strict=True)),
            "loss": loss,
            "finite": finite,
        }
        return proto, entry

    def evaluate(self) -> tuple[ModelProto, dict[str, Any]]:
        """Return the graph of the sums of loss and metrics over a batch, in inference mode.

        The second result is its entry in the manifest.
        """
        sums = self._step.sums(self.example)
        is_single = "loss 1" not in sums  # the terms of a sum of losses are "loss 0", "loss 1", ...
        paths = [path for path, _ in _leaves(sums)]
        metrics = ["loss" if is_single and p[0].key == "loss 0" else str(p[0].key) for p in paths]
        outputs = [_key(metric, path[1:]) for metric, path in zip(metrics, paths, strict=True)]

        def evaluate(values, arrays):
            results = self._step.evaluate(sums, *self._unflatten(values, arrays), self.frozen)
            return jax.tree.leaves(results)

        proto = self._graph("evaluate", evaluate, outputs)
        state = self._drop_unread(proto)
        groups: dict[str, list[str]] = {}
        for metric, name in zip(metrics, outputs, strict=True):
            groups.setdefault(metric, []).append(name)
        return proto, {"batch": self._batch(proto), "state": state, "sums": groups}

    def init(self) -> tuple[ModelProto, dict[str, Any]]:
        """Return a graph without inputs that outputs the initial state, and its manifest entry."""
        proto = self._write("init", lambda: self.values, (), [], self.names)
        shorten_constants(proto)
        return proto, {"state": self.names}

    def weights(self) -> tuple[ModelProto, dict[str, Any]]:
        """Return a graph from the state to the trained tensors of the file, and its manifest entry.

        For weights in few bits, these are the factors of their adapters, named as by `save`.
        """

        model = self._step.model
        renewed, apart = {*self.state.params, *self.state.state}, writes_apart(model)
        if not apart:
            renewed.update(*(view.targets for view in model.program.views))
        before = model.tensors  # which may have earlier factors by the names of the new ones
        names = [
            n for n, x in file_tensors(model).items() if n in renewed or x is not before.get(n)
        ]
        outputs = {name: f"file.{name}" for name in names}

        def read(values):
            state = jax.tree_util.tree_unflatten(self._structure, values)
            trained = file_tensors(self._step.to_model(self._step.view(state), state.state))
            return [trained[name] for name in outputs]

        proto = self._write("weights", read, (self.leaves,), self.names, [*outputs.values()])
        entry = {"state": self._drop_unread(proto), "tensors": outputs}
        return proto, entry | ({"adapters": Adapters.of(model).about} if apart else {})

    def _drop_unread(self, proto: ModelProto) -> list[str]:
        """Remove the inputs of state that a graph does not read; return the names of the others."""
        names = {name for node in proto.graph.node for name in reads(node)}
        for value in [v for v in proto.graph.input if v.name in {*self.names} - names]:
            proto.graph.input.remove(value)
        return [value.name for value in proto.graph.input if value.name in self.names]

    def _graph(self, name: str, function: Any, outputs: list[str]) -> ModelProto:
        """Write a function of the leaves of state and batch as a model."""
        names = [*self.names, *self.batch]
        return self._write(name, function, (self.leaves, self.examples), names, outputs)

    def _write(
        self, name: str, function: Any, arrays: Any, inputs: Sequence[str], outputs: Sequence[str]
    ) -> ModelProto:
        """Write a function of arrays as the graph of a name."""
        proto, written = write_function(function, arrays, inputs, outputs, self.opset, flat=True)
        self._written[name] = written, inputs
        return proto

    def _batch(self, proto: ModelProto) -> dict[str, Any]:
        """Return dtype, shape and role of each input of the batch, for the manifest.

        Types of 64 bits that have 32 in JAX are "narrowed_from" these.
        """
        declared = {value.name: to_value(value) for value in proto.graph.input}
        leaves = jax.tree.leaves(self.example)
        types = dict(zip(self.batch, (np.dtype(leaf.dtype) for leaf in leaves), strict=True))
        types |= {value.name: value.dtype for value in self._step.model.inputs}
        entries = {}
        for name in self.batch:
            dtype = declared[name].dtype
            shape, role = list(declared[name].shape or ()), self._batch_roles[name]
            entries[name] = {"dtype": str(dtype), "shape": shape, "role": role}
            if types[name] != dtype:
                entries[name]["narrowed_from"] = str(types[name])
        return entries


_ROLES = {
    "params": "parameter",
    "state": "statistic",
    "optimizer": "optimizer",
    "average": "average",
}
"""The role in a manifest of the tensors of a field of `State`; of other fields, "progress"."""
OPEN = 4
"""The size of the batch that a step is checked with if the batch size is symbolic."""


def _open_size(leaf: Any) -> Any:
    """Return the first size of a leaf if it is symbolic, else None."""
    size = (getattr(leaf, "shape", None) or (0,))[0]
    return None if isinstance(size, (int, np.integer)) else size


def _concrete(leaf: Any) -> Any:
    """Return an array of zeros for a `jax.ShapeDtypeStruct`; of a symbolic batch, `OPEN` examples.

    Raises:
      InputError: another size than the first is symbolic.
    """
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    first = () if _open_size(leaf) is None else (OPEN,)
    shape = (*first, *leaf.shape[len(first) :])
    if not all(isinstance(n, int) for n in shape):
        raise InputError(f"only the first size of a batch may be symbolic, not {leaf.shape}")
    return np.zeros(shape, leaf.dtype)


def _leaves(tree: Any) -> list:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _key(name: str, path: Any) -> str:
    text = jax.tree_util.keystr(path, simple=True, separator=".")
    return f"{name}.{text}" if text else name
