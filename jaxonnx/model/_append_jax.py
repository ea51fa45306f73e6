"""A network continued by a JAX function: its nodes stay, those of the function follow."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from onnx import ModelProto
from onnx.numpy_helper import to_array

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.values import Value
from jaxonnx._io.protos import opset_of
from jaxonnx._run.shapes import evaluate_shapes
from jaxonnx.errors import InputError
from jaxonnx.onnx_out import OLDEST, append


def append_function(
    proto: ModelProto,
    graph: Graph,
    tensors: Mapping[str, Any],
    function: Callable,
    outputs: Sequence[str] | None,
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Return a file whose outputs are what a function computes of its outputs, and its new tensors.

    Raises:
      InputError: the opset is too old, a shape is not known, or a name is taken.
      UnsupportedError: ONNX cannot say the function.
    """
    if (opset := opset_of(proto)) < OLDEST:
        raise InputError(
            f"the file has opset {opset}, and functions become nodes of opset {OLDEST} on; convert "
            "it with onnx.version_converter.convert_version"
        )
    shapes = evaluate_shapes(proto, graph, tensors)
    values = shapes.values if shapes else {}
    if unknown := [name for name in graph.outputs if name not in values]:
        raise InputError(f"the shape of output {unknown[0]!r} depends on values of the inputs")
    result = ModelProto()
    result.CopyFrom(proto)
    del result.training_info[:]
    examples = _structs([values[name] for name in graph.outputs])
    added = append(result.graph, function, examples, list(graph.outputs), outputs, opset)
    del result.graph.output[:]
    result.graph.output.extend(added)
    new = {x.name: to_array(x) for x in result.graph.initializer[len(proto.graph.initializer) :]}
    return result, new


_FUNCTIONS = {"floordiv", "max", "min", "mod"}
"""Names that JAX does not take for dimensions."""


def _structs(values: Sequence[Value]) -> list[jax.ShapeDtypeStruct]:
    """Return what a function may know of values: symbolic sizes where they are open."""
    others: dict[str, str] = {}

    def text(size: int | str | None, place: str) -> str:
        if isinstance(size, int):
            return str(size)
        variable = str(size).rpartition("*")[2]  # of "2*batch" as well
        if size is not None and variable.isidentifier() and variable not in _FUNCTIONS:
            return size
        return others.setdefault(size or place, f"size_{len(others)}")

    scope = jax.export.SymbolicScope()
    structs = []
    for value in values:
        sizes = [text(n, f"{value.name} {axis}") for axis, n in enumerate(value.shape or ())]
        shape = jax.export.symbolic_shape(", ".join(sizes), scope=scope) if sizes else ()
        dtype = jax.dtypes.canonicalize_dtype(np.dtype(value.dtype or np.float32))
        structs.append(jax.ShapeDtypeStruct(shape, dtype))
    return structs
