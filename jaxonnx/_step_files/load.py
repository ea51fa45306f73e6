"""The weights that another runtime trained, back in the file that they came from."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx._files import wrap_errors
from jaxonnx._io.formats import read_weights
from jaxonnx._io.protocol import check_exists
from jaxonnx._require import check_arguments, require
from jaxonnx.errors import InputError
from jaxonnx.lora import Adapters, pair
from jaxonnx.model import Model, as_model, load

FORMAT = "jaxonnx training step 1"
"""The value of "format" in a manifest."""
State = Mapping[str, Any] | str | os.PathLike[str]


def import_step(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    folder: str | os.PathLike[str],
    state: State | None = None,
) -> Model:
    """Return a model with the weights of a training state from another runtime.

    The state is what the graphs of `export_step` compute. Adapters are merged into their weights,
    except that those of weights in few bits stay beside them. If the step has other weights to
    evaluate than those it trains (a moving average, those of `optax.contrib.schedule_free`), the
    model gets them, as after `train`; its running statistics are those of training then, and
    `Model.recompute_statistics` makes them fit.

    Of a step that the file carries itself (`training_info`) the model gets the variables of the
    optimizer, too, as far as the state has them, so that training goes on.

    Args:
      model: the model that the step was exported from: a Model, or what `jaxonnx.load` takes.
      folder: the folder that `export_step` wrote.
        state: arrays by the names of the manifest's state, or the path of an .npz or .safetensors
        file with them, or of a flat .bin file; by default `state.npz`, `state.safetensors` or
        `state.bin` in the folder. Tensors of the optimizer may be missing. A flat file has the
        bytes of the arrays of `manifest["state"]` one after another, of all of them or of those
        that the weights need, which come first.

    Raises:
      InputError: the folder has no manifest, the state lacks a tensor or is of another size, or the
        model does not have tensors of these names and shapes.
    """
    check_arguments(import_step, locals())
    if _is_folder_of_step(model) and not _is_folder_of_step(folder):
        raise InputError(
            f"'{folder}' and '{model}' are swapped: the file of the network comes first, then the "
            "folder that export_step wrote"
        )
    path, manifest = read_manifest(folder)
    if state is None:
        files = [Path(folder, f"state{suffix}") for suffix in (".npz", ".safetensors", _FLAT)]
        state = next((file for file in files if file.exists()), None)
        if state is None:
            tried = ", ".join(f"'{file}'" for file in files)
            raise InputError(f"there is no state: none of {tried}; give its path")
    model, graph = as_model(model), manifest.get("weights")
    variables = model.training.variables if model.proto.training_info else ()
    optional = _list_optional(manifest)
    carries_step = bool(variables) and {*variables} == {*_list_required(path, manifest), *optional}
    values = _read_state(path, manifest, state, optional if carries_step else ())
    if carries_step:
        values = model.training.state | {n: jnp.asarray(x) for n, x in values.items()}
        return load(model.training.to_onnx(values))
    if graph is not None:
        values = _compute_tensors(path, graph, [values])[0]
    if graph is not None and graph.get("adapters") is not None:
        return _read_adapters(path, graph["adapters"], values).attach(model)
    present = {**model.state, **model.params}
    for name, value in values.items():
        if name not in present:
            raise InputError(
                f"the model has no tensor '{name}' to take; is it the one that '{folder}' was "
                "exported of?"
            )
        if np.shape(value) != present[name].shape:
            raise InputError(
                f"'{name}' is {list(value.shape)} in the state, {list(present[name].shape)} in the "
                "model"
            )
    values = {name: jnp.asarray(value, present[name].dtype) for name, value in values.items()}
    return model.replace(
        params={name: values.get(name, value) for name, value in model.params.items()},
        state={name: values.get(name, value) for name, value in model.state.items()},
    )


def average_states(
    folder: str | os.PathLike[str],
    states: Sequence[State],
    weights: Sequence[float] | None = None,
) -> dict[str, np.ndarray]:
    """Average the states of several clients of one exported step (federated averaging).

    The result has the parameters and running statistics, and the second set of weights where the
    step has one; `state | averaged` is the next state of a client, which keeps its optimizer. Means
    are taken in float64, and have the dtype of the state. The same holds for a file that carries
    its step (`training_info`): of its variables, those that the network reads are averaged.

    Args:
      folder: the folder that `export_step` wrote.
      states: of each client, as `import_step` takes it.
      weights: the weight of each client, such as its number of examples; equal by default.

    Returns:
      Arrays by the names of the manifest's state, which `import_step` takes.

    Raises:
      InputError: as in `import_step`; or a client has numbers that are not finite; or the mean of
        the states is not that of the networks' weights: with adapters, since the mean of A and the
        mean of B are not the factors of the mean of B @ A (they are if all clients share one of
        the two), or with masks of sparsity that differ.
    """
    check_arguments(average_states, locals())
    path, manifest = read_manifest(folder)
    listed = isinstance(states, list | tuple) and len(states) > 0
    kinds = (Mapping, str, os.PathLike)
    each = listed and all(isinstance(state, kinds) for state in states)
    require("states", states, each, "a list of states: dicts of arrays, or paths of files")
    shares = [1.0] * len(states) if weights is None else [*weights]
    fits = len(shares) == len(states) and all(isinstance(x, Real) and x >= 0 for x in shares)
    expected = f"a number of at least 0 for each of the {len(states)} states, and not all 0"
    require("weights", weights, fits and 0 < sum(shares) < math.inf, expected)
    shares = [x / sum(shares) for x in shares]
    clients = [_read_state(path, manifest, state) for state in states]
    averaged = {name: _mean(name, [c[name] for c in clients], shares) for name in clients[0]}
    for mask in [name for name in manifest.get("state", ()) if ".masks." in name]:
        name = mask.rpartition(".masks.")[2]
        if any(((c[name] == 0) != (clients[0][name] == 0)).any() for c in clients):
            raise InputError(
                f"the clients have different masks of '{name}', so that its mean is not sparse: "
                "average in the fixed phase, from one model with its masks"
            )
    if (graph := manifest.get("weights")) is not None:
        *each, result = _compute_tensors(path, graph, [*clients, averaged])
        about = graph.get("adapters")
        *each, result = [_changes(path, about, tensors) for tensors in (*each, result)]
        for name, value in result.items():
            right = _mean(name, [tensors[name] for tensors in each], shares)
            scale = max(np.abs(tensors[name]).max(initial=0) for tensors in each)
            if np.abs(value - right).max(initial=0) > 32 * np.finfo(np.float32).eps * scale:
                raise InputError(
                    f"'{name}': the mean of the states does not give the mean of the clients' "
                    "weights (of adapters, the means of A and of B are not factors of the mean of "
                    "B @ A). Average the weights: import_step(model, folder, state) of each "
                    "client, and the mean of their params"
                    + (", by jaxonnx.Adapters.combine" if about is not None else "")
                )
    return averaged


def _mean(name: str, arrays: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    """Return the weighted mean of the arrays of a tensor; of integers, the one that all have."""
    first = arrays[0]
    for x in arrays:
        if x.shape != first.shape:
            raise InputError(f"'{name}' is {[*first.shape]} and {[*x.shape]} in the states")
    if not jnp.issubdtype(first.dtype, jnp.floating):
        if any((x != first).any() for x in arrays):
            raise InputError(f"'{name}' is of {first.dtype}, and differs between the clients")
        return first
    for i, x in enumerate(arrays):
        if not np.isfinite(x.astype(np.float64)).all():
            raise InputError(f"client {i} has numbers in '{name}' that are not finite")
    mean = sum(share * x.astype(np.float64) for share, x in zip(shares, arrays, strict=True))
    return np.asarray(mean).astype(first.dtype)


def _changes(path: Path, about: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors, with the changes by adapters of weights in few bits instead of factors."""
    if about is None:
        return tensors
    adapters = _read_adapters(path, about, tensors)
    if adapters.has_magnitudes:
        raise InputError(
            "adapters with magnitudes (DoRA) of weights in few bits have no mean: the norms that "
            "they scale are those of each client; train LoRA(dora=False)"
        )
    values = {name: np.asarray(x, np.float32) for name, x in adapters.values.items()}
    pairs = {name: [values.pop(member) for member in pair(name)] for name in adapters.layouts}
    # the indices of trained rows are a vector
    products = {n: b @ a for n, (a, b) in pairs.items() if a.ndim > 1 and b.ndim > 1}
    return values | products


def read_manifest(folder: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """Return the path of a manifest and the manifest."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"'{path}' is not a manifest of export_step: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"'{path}' is not a manifest of export_step: it is not a {FORMAT!r}")
    return path, manifest


_FLAT = ".bin"


def _list_required(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors of a state that the weights need."""
    graph = manifest.get("weights")
    if graph is not None:
        return _names(path, graph, "state")
    return [*_names(path, manifest, "params"), *_names(path, manifest, "statistics")]


def _list_optional(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors of a state that the optimizer has."""
    places = manifest.get("state")
    places = places if isinstance(places, dict) else {}
    return [n for n, x in places.items() if isinstance(x, dict) and x.get("role") == "optimizer"]


def _read_state(
    path: Path, manifest: Mapping[str, Any], state: State, optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Read the tensors of a state that the weights need, and the optional ones that it has.

    Raises:
      InputError: it lacks one, or is a flat file of another size.
    """
    needed = _list_required(path, manifest)
    if isinstance(state, str | os.PathLike) and Path(state).suffix == _FLAT:
        return _read_flat(path, manifest, check_exists(state, "a state"), needed, optional)
    what, arrays, _ = read_weights(state)
    if missing := [name for name in needed if name not in arrays]:
        raise InputError(f"{what}: the state has no '{missing[0]}', which the weights need")
    return {name: arrays[name] for name in (*needed, *optional) if name in arrays}


def _read_flat(
    path: Path,
    manifest: Mapping[str, Any],
    file: Path,
    needed: Sequence[str],
    optional: Sequence[str],
) -> dict[str, np.ndarray]:
    """Return tensors of a flat file."""
    end, values = 0, {}
    with wrap_errors(f"'{path}' is damaged: 'state' is none; export again", InputError):
        places = manifest["state"]
        total = sum(int(place["bytes"]) for place in places.values())
        for name in needed:
            end = max(end, int(places[name]["offset"]) + int(places[name]["bytes"]))
        data = file.read_bytes()
        if len(data) in (total, end):
            for name in (*needed, *optional) if len(data) == total else needed:
                dtype, place = np.dtype(places[name]["dtype"]), places[name]
                x = np.frombuffer(data, np.uint8, place["bytes"], place["offset"])
                values[name] = x.view(dtype).reshape(place["shape"])
    if len(data) not in (total, end):
        raise InputError(
            f"'{file}' has {len(data):,} bytes, and the state of '{path.parent}' {total:,} "
            f"({end:,} without what the weights do not need): it is damaged, or of another step"
        )
    return values


def _compute_tensors(
    path: Path, graph: Mapping[str, Any], states: Sequence[Mapping[str, Any]]
) -> list[dict[str, np.ndarray]]:
    """Compute the file's tensors from each state, by the graph that the manifest names."""
    places, file = graph.get("tensors"), graph.get("file")
    if not (isinstance(places, dict) and all(isinstance(name, str) for name in places.values())):
        raise InputError(f"'{path}' is damaged: it has no names by 'tensors'; export again")
    if not isinstance(file, str) or file != Path(file).name:
        raise InputError(f"'{path}' is damaged: it has no name of a 'file' beside it; export again")
    finish = load(path.parent / file)
    outputs = [value.name for value in finish.outputs]
    if missing := [name for name in places.values() if name not in outputs]:
        raise InputError(
            f"'{path}' is damaged: '{file}' has no output '{missing[0]}', which 'tensors' names; "
            "export again"
        )
    results = []
    for state in states:
        tensors = finish(**{name: jnp.asarray(value) for name, value in state.items()})
        tensors = tensors if isinstance(tensors, tuple) else (tensors,)
        by_output = dict(zip(outputs, map(np.asarray, tensors), strict=True))
        results.append({name: by_output[output] for name, output in places.items()})
    return results


def _read_adapters(path: Path, about: Any, values: Mapping[str, Any]) -> Adapters:
    with wrap_errors(f"'{path}' is damaged: 'adapters' are none; export again", InputError):
        return Adapters.read(about, values)


def _names(path: Path, part: Any, key: str) -> list[str]:
    """Return the list of names `part[key]` of a manifest; raise `InputError` if it is not one."""
    names = part.get(key) if isinstance(part, dict) else None
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise InputError(f"'{path}' is damaged: it has no list of names '{key}'; export again")
    return names


def _is_folder_of_step(path: Any) -> bool:
    """Check whether this is the path of a folder with a manifest."""
    return isinstance(path, str | os.PathLike) and Path(path, "manifest.json").is_file()
