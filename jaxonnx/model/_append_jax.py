"""Append the nodes of a JAX function to a network (`Model.then`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from onnx import ModelProto
from onnx.helper import make_value_info
from onnx.numpy_helper import to_array

from jaxonnx._compare.written import Origin, Run
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.values import Value, to_value
from jaxonnx._io.protos import opset_of
from jaxonnx._run.shapes import evaluate_shapes, infer_types
from jaxonnx.errors import InputError
from jaxonnx.onnx_out import OLDEST, Written, append


def append_function(
    proto: ModelProto,
    graph: Graph,
    tensors: Mapping[str, Any],
    function: Callable,
    consumed: Sequence[str],
    outputs: Sequence[str] | None,
) -> tuple[ModelProto, dict[str, np.ndarray], Written]:
    """Return a file in which the results of a function replace the outputs that it consumes.

    Args:
      consumed: the outputs that the function takes; the others follow its results.
      outputs: names of its results.

    Returns:
      The file, its new tensors, and the nodes of the function.

    Raises:
      InputError: the opset is too old, a shape is not known, or a name is taken.
      UnsupportedError: ONNX cannot express the function.
    """
    if (opset := opset_of(proto)) < OLDEST:
        raise InputError(
            f"the file has opset {opset}, and functions become nodes of opset {OLDEST} on; "
            f"jaxonnx.convert(model, opset={OLDEST}) gives a model that they can follow"
        )
    examples = _structs(_values(proto, graph, tensors, consumed))
    result = ModelProto()
    result.CopyFrom(proto)
    del result.training_info[:]
    unconsumed = [value for value in proto.graph.output if value.name not in consumed]
    written = append(result.graph, function, examples, list(consumed), outputs, opset)
    del result.graph.output[:]
    result.graph.output.extend([*written.outputs, *unconsumed])
    new = {x.name: to_array(x) for x in result.graph.initializer[len(proto.graph.initializer) :]}
    return result, new, written


def continue_origin(
    origin: Origin, outputs: Sequence[str], written: Written, consumed: Sequence[str]
) -> Origin:
    """Return a network that a function follows, as what its file is compared with.

    Args:
      origin: the network before, and
      outputs: its outputs.
      written: the nodes of the function.
      consumed: as in `append_function`.
    """
    count = len(written.outputs)

    def append(run: Run) -> Run:
        def run_whole(feeds: Mapping[str, Any], names: Sequence[str] = ()) -> list[Any]:
            within = [n for n in names if n in origin.names and n not in outputs]
            behind = [n for n in names if n in written.names]
            values = dict(zip([*outputs, *within], run(feeds, within), strict=True))
            results = written.run([values[name] for name in consumed], behind)
            values |= zip(behind, results[count:], strict=True)
            others = [name for name in outputs if name not in consumed]
            return [*results[:count], *(values[name] for name in (*others, *names))]

        return run_whole

    names = {*origin.names, *written.names, *(value.name for value in written.outputs)}
    return origin._replace(names=names, append=append)


def _values(
    proto: ModelProto, graph: Graph, tensors: Mapping[str, Any], names: Sequence[str]
) -> list[Value]:
    """Return dtypes and shapes of outputs: as evaluated, else as the file declares them.

    The evaluation fails where open sizes of inputs fit one another at some values only, like
    those of images that a position table fixes, or where a size is a number in an input, like that
    of a cache.

    Raises:
      InputError: the file does not say the shape of an output either.
    """
    shapes = evaluate_shapes(proto, graph, tensors)
    values = {} if shapes is None else shapes.values
    missing = [name for name in names if name not in values]
    kinds = infer_types(proto, tensors, missing) if missing else {}
    if unknown := [name for name in missing if name not in kinds]:
        raise InputError(
            f"the shape of output {unknown[0]!r} depends on values of the inputs, and the file "
            "does not declare it: with_outputs(...) chooses others"
        )
    declared = {n: to_value(make_value_info(n, kind)) for n, kind in kinds.items()}
    return [values[name] if name in values else declared[name] for name in names]


_FUNCTIONS = {"floordiv", "max", "min", "mod"}
"""Names that JAX does not take for dimensions."""


def _structs(values: Sequence[Value]) -> list[jax.ShapeDtypeStruct]:
    """Return the avals of values for tracing a function, with symbols for open sizes."""
    dimensions: dict[str, str] = {}

    def text(size: int | str | None, place: str) -> str:
        if isinstance(size, int):
            return str(size)
        variable = str(size).rpartition("*")[2]  # "batch" of "2*batch"
        if size is not None and variable.isidentifier() and variable not in _FUNCTIONS:
            return size
        return dimensions.setdefault(size or place, f"size_{len(dimensions)}")

    scope = jax.export.SymbolicScope()
    structs = []
    for value in values:
        sizes = [text(n, f"{value.name} {axis}") for axis, n in enumerate(value.shape or ())]
        shape = jax.export.symbolic_shape(", ".join(sizes), scope=scope) if sizes else ()
        dtype = jax.dtypes.canonicalize_dtype(np.dtype(value.dtype or np.float32))
        structs.append(jax.ShapeDtypeStruct(shape, dtype))
    return structs
