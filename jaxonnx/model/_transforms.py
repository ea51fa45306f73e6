"""Implementation of the methods of Model that return another Model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto, TensorProto
from onnx.helper import make_node, make_value_info
from onnx.numpy_helper import to_array

from jaxonnx._compare.written import Origin, Run, check_written, make_origin
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.caches import find_caches
from jaxonnx._graph.roles import running_statistics, split
from jaxonnx._graph.select import Select
from jaxonnx._graph.values import Value, list_values, matching, to_value
from jaxonnx._io.build import names as all_names
from jaxonnx._io.build import onnx_type, unused_name
from jaxonnx._io.protos import opset_of
from jaxonnx._rewrite.batch import free_batch
from jaxonnx._rewrite.head import Classes, replace_head
from jaxonnx._rewrite.network import (
    Network,
    enter,
    leave,
    reenter,
    refuse_change,
    with_file,
    with_outputs,
    with_params,
)
from jaxonnx._run.shapes import evaluate_shapes, infer_types
from jaxonnx.errors import InputError
from jaxonnx.model._reinitialize import Initializer, reinitialize
from jaxonnx.model._save import to_proto
from jaxonnx.onnx_out import OLDEST, Written, append
from jaxonnx.views import BatchAxis, CallView, WholeInputs, fix_inputs

M = TypeVar("M", bound=Network)


def with_values(model: M, params: Mapping[str, Any] | None, state: Mapping[str, Any] | None) -> M:
    """Return the model of `Model.replace`."""
    return dataclasses.replace(
        model,
        params=matching("params", model.params, params),
        state=matching("state", model.state, state),
    )


def with_fixed_inputs(model: M, values: Mapping[str, Any]) -> M:
    """Return a model some of whose inputs have one value in each call, and are no inputs."""
    view = fix_inputs(model.inputs, values)
    return enter(model, view) if view.values else model


def with_whole_inputs(model: M, names: Collection[str]) -> M:
    """Return a model some of whose inputs have no axis of examples.

    Raises:
      InputError: there is no such input.
    """
    if unknown := {*names} - {value.name for value in model.inputs}:
        raise InputError(
            f"batching={{{unknown.pop()!r}: None}}: the model has {list_values(model.inputs)}"
        )
    return enter(model, WholeInputs(frozenset(names)))


def with_batch_axis(model: M) -> M:
    """Return the model of `Model.with_batch_axis`."""
    if not model.inputs:
        raise InputError(
            "with_batch_axis: the model has no input that could have an axis of examples: call it "
            "before with_fixed_inputs"
        )
    used = {str(n) for value in (*model.inputs, *model.outputs) for n in value.shape or ()}
    return enter(model, BatchAxis(unused_name("batch", used)))


def with_any_batch(model: M, *, prove: bool = False) -> M:
    """Return the model of `Model.with_any_batch`.

    Args:
      prove: as in `free_batch`.
    """
    network = model.proto, model.program, model.params, model.state
    proto, added = free_batch(*network, prove=prove)
    if proto is model.proto:
        return model
    net = with_file(model, proto, added)
    # what the changes leave over is dropped; an algorithm of the file may read it
    return net if proto.training_info else with_outputs(net, net.graph.outputs)


def with_new_values(model: M, rng: jax.Array, names: Select, initializer: Initializer) -> M:
    """Return the model of `Model.reinitialize`."""
    refuse_change(model, "weights")
    tensors = {**model.params, **model.state}
    constants = model.program.constants
    new = reinitialize(model.graph, tensors, constants, names, rng, initializer, model._places)
    params, state = ({name: new[name] for name in old} for old in (model.params, model.state))
    return with_values(model, params, state)


def with_new_head(
    model: M,
    classes: Classes,
    at: str | None,
    ending: bool,
    rng: jax.Array | None,
    initializer: Initializer,
) -> M:
    """Return the model of `Model.with_head`."""
    tensors, trained = model.tensors, model.params
    new = replace_head(model.proto, model.graph, tensors, trained, classes, at, ending=ending)
    fresh = {name: jnp.asarray(value) for name, value in new.tensors.items()}
    wide = {n: x for n, x in new.tensors.items() if x.dtype != fresh[n].dtype}
    constants = {n: v for n, v in model.program.constants.items() if n not in fresh}
    net = dataclasses.replace(
        model,
        params={**model.params, **fresh},
        state={name: x for name, x in model.state.items() if name not in fresh},
        program=dataclasses.replace(model.program, constants=constants),
        originals={**model.originals, **wide},
        heads=(*(h for h in model.heads if fresh.keys().isdisjoint(h.tensors)), new.head),
    )
    net = with_file(net, new.proto, new.constants)
    net = with_outputs(net, net.graph.outputs)
    statistics = running_statistics(net.graph) & fresh.keys()
    params = {name: x for name, x in net.params.items() if name not in statistics}
    state = {**net.state, **{name: fresh[name] for name in statistics}}
    net = dataclasses.replace(net, params=params, state=state)
    key = jax.random.key(0) if rng is None else rng
    return with_new_values(net, key, lambda name, _: name in fresh, initializer)


def append_jax(model: M, function: Callable, outputs: Sequence[str] | None, check: bool) -> M:
    """Return the model of `Model.then`."""
    caches = find_caches(model.graph, model.inputs)
    continued = {*caches.pairs.values()} if caches else set()
    taken = [name for name in model.graph.outputs if name not in continued]
    proto, added, written = append_function(
        model.proto, model.graph, model.tensors, function, taken, outputs
    )
    new = with_file(model, proto, added)
    learned, _, _ = split(new.graph, new.tensors, proto.graph)
    new = with_params(new, [*model.params, *(name for name in learned if name in added)])
    if check:
        origin = make_origin(leave(model, CallView), partial(to_proto, model))
        before = [value.name for value in model.proto.graph.output]
        whole = continue_origin(origin, before, written, taken)
        check_written("the file of both networks", partial(to_proto, new), whole)
    return reenter(new, model)


_WIDE = {TensorProto.INT64, TensorProto.UINT64, TensorProto.DOUBLE}
"""Types that have 32 bits in JAX unless its 64-bit types are on."""


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
    used, read = {*all_names(result.graph)}, []
    declared = {value.name: value.type.tensor_type.elem_type for value in proto.graph.output}
    for name, example in zip(consumed, examples, strict=True):
        if declared[name] in _WIDE and declared[name] != onnx_type(example.dtype):
            cast = unused_name(f"{name}_{example.dtype}", used)
            node = make_node("Cast", [name], [cast], name=cast, to=onnx_type(example.dtype))
            result.graph.node.append(node)
            name = cast
        read.append(name)
    written = append(result.graph, function, examples, read, outputs, opset)
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
