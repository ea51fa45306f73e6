"""The weights that another runtime trained, back in the file that they came from."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx._io.formats import read_weights
from jaxonnx._require import check_arguments
from jaxonnx._safe_read import wrap_errors
from jaxonnx.errors import InputError
from jaxonnx.lora import Adapters
from jaxonnx.model import Model, as_model, load

FORMAT = "jaxonnx training step 1"
"""The value of "format" in a manifest."""


def import_step(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    folder: str | os.PathLike[str],
    state: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Model:
    """Return a model with the weights of a training state from another runtime.

    The state is what the graphs of `export_step` compute. Adapters are merged into their weights,
    except that those of weights in few bits stay beside them. If the step has other weights to
    evaluate than those it trains (a moving average, those of `optax.contrib.schedule_free`), the
    model gets them, as after `train`; its running statistics are those of training then, and
    `Model.recompute_statistics` makes them fit.

    Of a step that the file carries itself (`training_info`) the model gets all variables, so that
    training goes on.

    Args:
      model: the model that the step was exported from: a Model, or what `jaxonnx.load` takes.
      folder: the folder that `export_step` wrote.
      state: arrays by the names of the manifest's state, or the path of an .npz or .safetensors
        file with them; by default `state.npz` or `state.safetensors` in the folder. Tensors of the
        optimizer may be missing.

    Raises:
      InputError: the folder has no manifest, the state lacks a tensor, or the model does not have
        tensors of these names and shapes.
    """
    check_arguments(import_step, locals())
    if _is_folder_of_step(model) and not _is_folder_of_step(folder):
        raise InputError(
            f"'{folder}' and '{model}' are swapped: the file of the network comes first, then the "
            "folder that export_step wrote"
        )
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"'{path}' is not a manifest of export_step: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"'{path}' is not a manifest of export_step: it is not a {FORMAT!r}")
    if state is None:
        files = [Path(folder) / "state.npz", Path(folder) / "state.safetensors"]
        state = next((file for file in files if file.exists()), None)
        if state is None:
            raise InputError(
                f"there is no state: neither '{files[0]}' nor '{files[1]}'; give its path"
            )
    what, arrays, _ = read_weights(state)
    graph = manifest.get("weights")
    if graph is None:
        needed = [*_names(path, manifest, "params"), *_names(path, manifest, "statistics")]
    else:
        needed = _names(path, graph, "state")
    if missing := [name for name in needed if name not in arrays]:
        raise InputError(f"{what}: the state has no '{missing[0]}', which the weights need")
    values = {name: jnp.asarray(arrays[name]) for name in needed}
    if graph is not None:
        # compute the file's tensors from the state, by the graph that the manifest names
        places, file = graph.get("tensors"), graph.get("file")
        if not (
            isinstance(places, dict) and all(isinstance(name, str) for name in places.values())
        ):
            raise InputError(f"'{path}' is damaged: it has no names by 'tensors'; export again")
        if not isinstance(file, str) or file != Path(file).name:
            raise InputError(
                f"'{path}' is damaged: it has no name of a 'file' beside it; export again"
            )
        finish = load(path.parent / file)
        outputs = [value.name for value in finish.outputs]
        if missing := [name for name in places.values() if name not in outputs]:
            raise InputError(
                f"'{path}' is damaged: '{file}' has no output '{missing[0]}', which 'tensors' "
                "names; export again"
            )
        tensors = finish(**values)
        tensors = tensors if isinstance(tensors, tuple) else (tensors,)
        by_output = dict(zip(outputs, tensors, strict=True))
        values = {name: by_output[output] for name, output in places.items()}
    model = as_model(model)
    if model.proto.training_info and {*model.training.variables} == {*values}:
        return load(model.training.to_onnx(values))
    if graph is not None and graph.get("adapters") is not None:
        with wrap_errors(f"'{path}' is damaged: 'adapters' are none; export again", InputError):
            adapters = Adapters.read(graph["adapters"], values)
        return adapters.attach(model)
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
    values = {name: value.astype(present[name].dtype) for name, value in values.items()}
    return model.replace(
        params={name: values.get(name, value) for name, value in model.params.items()},
        state={name: values.get(name, value) for name, value in model.state.items()},
    )


def _names(path: Path, part: Any, key: str) -> list[str]:
    """Return the list of names `part[key]` of a manifest; raise `InputError` if it is not one."""
    names = part.get(key) if isinstance(part, dict) else None
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise InputError(f"'{path}' is damaged: it has no list of names '{key}'; export again")
    return names


def _is_folder_of_step(path: Any) -> bool:
    """Check whether this is the path of a folder with a manifest."""
    return isinstance(path, str | os.PathLike) and Path(path, "manifest.json").is_file()
