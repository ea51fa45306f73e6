"""Weights that replace those of a file: arrays by name, or those of another file."""

import difflib
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from onnx import GraphProto, helper

from jaxonnx._io.formats import find
from jaxonnx._io.protocol import File, Format, check_exists
from jaxonnx._io.tensors import equal_bits
from jaxonnx._io.ties import sources, update_tied
from jaxonnx.errors import InputError


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
        _take_inputs(graph, tensors, new)
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
        warnings.warn(
            f"{what}: these tensors, which the file stores as others because their first values "
            f"are equal, are missing and keep the values of the file: {names}. Pass them as "
            "well; where two are one tensor, its value under both names",
            stacklevel=3,
        )
    return file._replace(tensors=result)


def _take_inputs(
    graph: GraphProto, tensors: dict[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> None:
    """Make tensors of the inputs that have new values: artifacts have their weights as inputs."""
    for value in [*graph.input]:
        if value.name in new and value.name not in tensors:
            kind = value.type.tensor_type
            dims = [max(dim.dim_value, 0) for dim in kind.shape.dim]
            graph.initializer.add(name=value.name, data_type=kind.elem_type, dims=dims)
            graph.input.remove(value)
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            tensors[value.name] = np.broadcast_to(np.zeros((), dtype), dims)  # not allocated
