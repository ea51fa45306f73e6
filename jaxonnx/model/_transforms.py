"""Models derived from a model: other inputs, outputs, values and batches, states set to zero."""

from __future__ import annotations

import dataclasses
import math
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
from jaxonnx._data.augment import AugmentedSource
from jaxonnx._data.batches import Batch, Source
from jaxonnx._data.inputs_and_targets import find_inputs, lacks_batch_axis
from jaxonnx._display import list_some
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.caches import find_continued, find_states
from jaxonnx._graph.roles import running_statistics, split
from jaxonnx._graph.select import Select, select
from jaxonnx._graph.uses import Weight, weights
from jaxonnx._graph.values import Value, list_values, matching, to_value
from jaxonnx._graph.weight_names import Places
from jaxonnx._io.protos import defined_names, onnx_type, opset_of, unused_name
from jaxonnx._rewrite.batch import free_batch
from jaxonnx._rewrite.head import Classes, replace_head
from jaxonnx._rewrite.join import join
from jaxonnx._rewrite.network import (
    Network,
    drop_unread,
    enter,
    leave,
    reenter,
    refuse_change,
    with_file,
    with_params,
)
from jaxonnx._run.shapes import evaluate_shapes, infer_types
from jaxonnx.errors import InputError, TrainingError
from jaxonnx.model._save import to_proto
from jaxonnx.model._statistics import batch_norms
from jaxonnx.onnx_out import OLDEST, ExportedFunction, append
from jaxonnx.views import BatchAxis, CallView, FixedInputs, Outputs, WholeInputs, fix_inputs

Initializer = Callable[..., jax.Array]
"""`(key, shape, dtype) -> array`, like those of `jax.nn.initializers`."""


def reinitialize(
    graph: Graph,
    tensors: Mapping[str, Any],
    constants: Mapping[str, Any],
    selection: Select,
    rng: jax.Array,
    initializer: Initializer,
    places: Places,
) -> dict[str, Any]:
    """Return the tensors with new values for the selected ones, as in `Model.reinitialize`."""
    floats = {n: v for n, v in tensors.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    chosen = select(selection, floats, "names", places=places)
    names = [name for name in floats if name in chosen]
    meanings = weights(graph, {**constants, **tensors})
    keys = jax.random.split(rng, len(names))
    new = {
        name: _draw(tensors[name], meanings[name], key, initializer)
        for name, key in zip(names, keys, strict=True)
    }
    return {**tensors, **new}


def _draw(value: Any, weight: Weight, key: jax.Array, initializer: Initializer) -> jax.Array:
    shape, dtype = value.shape, jnp.asarray(value).dtype
    if weight.start is not None:
        return jnp.full(shape, weight.start, dtype)
    if weight.matrix is None:
        return initializer(key, shape, dtype)
    order, batch_axes = weight.matrix.order, len(weight.matrix.batch)
    permuted = [shape[axis] for axis in order]
    batch, matrix = math.prod(permuted[:batch_axes]), tuple(permuted[batch_axes:])
    matrices = jnp.stack([initializer(k, matrix, dtype) for k in jax.random.split(key, batch)])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return matrices.reshape(permuted).transpose(inverse)


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
    proto, added = free_batch(model.proto, model.program, model.params, model.state, prove=prove)
    if proto is model.proto:
        return model
    net = with_file(model, proto, added)
    # what the changes leave over is dropped; an algorithm of the file may read it
    return net if proto.training_info else drop_unread(net)


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
    net = drop_unread(with_file(net, new.proto, new.constants))
    statistics = running_statistics(net.graph) & fresh.keys()
    params = {name: x for name, x in net.params.items() if name not in statistics}
    state = {**net.state, **{name: fresh[name] for name in statistics}}
    net = dataclasses.replace(net, params=params, state=state)
    key = jax.random.key(0) if rng is None else rng
    return with_new_values(net, key, lambda name, _: name in fresh, initializer)


def append_jax(model: M, function: Callable, outputs: Sequence[str] | None, check: bool) -> M:
    """Return the model of `Model.then`."""
    continued = {*find_continued(model.graph, model.inputs).values()}
    taken = [name for name in model.graph.outputs if name not in continued]
    if isinstance(function, Network):
        return _append_network(model, function, taken, outputs, check)
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


def _append_network(
    model: M, following: Network, taken: Sequence[str], outputs: Sequence[str] | None, check: bool
) -> M:
    """Return the model that another one follows, as `append_jax` does for a function."""
    new = join(model, following, taken, outputs)
    if check:
        first = make_origin(leave(model, CallView))
        after, inputs = make_origin(following), [value.name for value in following.inputs]
        before = [value.name for value in model.proto.graph.output]

        def run(feeds: Mapping[str, Any], names: Sequence[str] = ()) -> list[Any]:
            values = dict(zip(before, first.run(feeds), strict=True))
            results = after.run(dict(zip(inputs, (values[n] for n in taken), strict=True)))
            return [*results, *(values[name] for name in before if name not in taken)]

        whole = first._replace(run=run, names=())
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
) -> tuple[ModelProto, dict[str, np.ndarray], ExportedFunction]:
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
    used, taken_names = {*defined_names(result.graph)}, []
    declared = {value.name: value.type.tensor_type.elem_type for value in proto.graph.output}
    for name, example in zip(consumed, examples, strict=True):
        if declared[name] in _WIDE and declared[name] != onnx_type(example.dtype):
            cast = unused_name(f"{name}_{example.dtype}", used)
            node = make_node("Cast", [name], [cast], name=cast, to=onnx_type(example.dtype))
            result.graph.node.append(node)
            name = cast
        taken_names.append(name)
    written = append(result.graph, function, examples, taken_names, outputs, opset)
    del result.graph.output[:]
    result.graph.output.extend([*written.outputs, *unconsumed])
    new = {x.name: to_array(x) for x in result.graph.initializer[len(proto.graph.initializer) :]}
    return result, new, written


def continue_origin(
    origin: Origin, outputs: Sequence[str], written: ExportedFunction, consumed: Sequence[str]
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


def fit_to_batch(model: M, batch: Any, *, renews_statistics: bool = False) -> tuple[M, list[str]]:
    """Return a model of batches like one, and notes.

    Recurrent states that the data lacks start at zeros. A model of one example is mapped over the
    batch, where the data has an axis of examples in front of those of its inputs.

    Args:
      batch: as for `start_at_zeros`.
      renews_statistics: whether BatchNormalization uses the statistics of the batch.

    Raises:
      TrainingError: the first axis of an input is not the batch; or a size of a state is not known;
        or a model of one example has BatchNormalization whose statistics are renewed.
    """
    model, notes = start_at_zeros(model, batch)
    if lacks_batch_axis(batch, model.inputs):
        if renews_statistics and batch_norms(model):
            raise TrainingError(
                "the file takes one example, without a batch, and its BatchNormalization would see "
                "one example at a time: keep its statistics (train(..., statistics='frozen')), or "
                "export it with a batch axis"
            )
        return with_batch_axis(model), [
            *notes,
            "the file takes one example, without a batch: batches are mapped over it (jax.vmap), "
            "and the saved file takes one example as before",
        ]
    _check_batch_axis(model)
    return model, notes


def _check_batch_axis(model: Network) -> None:
    """Raise if no output has the first axis of inputs first, but one has another axis of theirs.

    The layers of PyTorch that take sequences with the steps first are such. Their steps would be
    taken as examples.
    """
    inputs = [v for v in model.inputs if v.shape and not v.whole]
    ends = {v.shape[0]: v for v in model.outputs if v.shape and isinstance(v.shape[0], str)}
    if any(v.shape[0] in ends for v in inputs if v.shape):
        return
    for value in inputs:
        for axis, size in enumerate(value.shape or ()):
            if size in ends:
                raise TrainingError(
                    f"the first axis of input {value} is not the batch, as the output {ends[size]} "
                    "shows: pass examples with one more axis in front of these, "
                    f"np.expand_dims(np.moveaxis({value.name}, {axis}, 0), {axis + 1})"
                )


def start_at_zeros(model: M, batch: Any) -> tuple[M, list[str]]:
    """Return a model whose recurrent states start at zeros if the data lacks them, and notes.

    The outputs that continue the states are left out.

    Args:
      batch: the data or a batch of it with targets, or the result of `inputs_alone`.

    Raises:
      TrainingError: the first axis of the sequences is not the batch, which the states have; or a
        size of the states is not known.
    """
    states = find_states(model.graph, model.inputs)
    if not states:
        return model, []
    x = batch[0] if isinstance(batch, tuple | list) and len(batch) in (2, 3) else batch
    count = len(x) if isinstance(x, tuple) else int(hasattr(x, "shape"))
    lacks = count == len(model.inputs) - len(states)
    if isinstance(x, Mapping):
        lacks = states.keys().isdisjoint(x)
    if not lacks:
        return model, []
    values = [v for v in model.inputs if v.name in states]
    sizes = {n for v in values for n in v.shape or ()}
    fixed = {}
    for v in values:
        lengths = [n for n in v.shape or () if isinstance(n, int)]
        if len(lengths) < len(v.shape or ()) - 1:
            raise TrainingError(
                f"the data lacks the state {v}, whose sizes are not all known, so that it cannot "
                f"start at zeros: fixed={{{v.name!r}: np.zeros(...)}}, with the batch size among "
                "its sizes, does"
            )
        fixed[v.name] = np.zeros(lengths, v.dtype)
    started = with_fixed_inputs(model, fixed)
    outputs = {*model.graph.outputs} - {*states.values()}
    started = enter(started, Outputs.among(started.graph, outputs))
    first, *_ = started.inputs
    size = (first.shape or (1,))[0]
    if not (isinstance(size, int) or size in sizes or lacks_batch_axis(batch, started.inputs)):
        raise TrainingError(
            f"the first axis of input {first} is not the batch, as the states "
            f"{list_values(values)} show: pass examples with one more axis in front of these"
        )
    return started, [
        f"the data lacks the states {list_some(states, '')}: they are zeros at the start of each "
        "example. The saved file has them as before"
    ]


def inputs_alone(model: Network, batch: Any) -> Any:
    """Return a batch of `predict`, which may lack targets, in the form with targets."""
    return find_inputs(batch, [value.name for value in model.inputs]), None


def add_states(model: Network, started: Network, source: Source) -> Source:
    """Return batches of all inputs of a model, of batches that lack the states.

    Args:
      started: the result of `start_at_zeros` for the model.
    """
    fixed = started.program.find(FixedInputs)
    if started is model or fixed is None:
        return source
    names = [value.name for value in started.inputs]

    def add(key: Any, epoch: Any, number: Any, batch: Batch) -> Batch:
        inputs = dict(zip(names, batch.inputs, strict=True))
        single = {name: x[0] for name, x in inputs.items()}
        for value in model.inputs:
            if value.name not in inputs:
                state = fixed.values[value.name]
                if state.array.ndim + (state.axis is not None) < len(value.shape or ()):  # mapped
                    states = np.repeat(state.repeat(single)[None], len(batch.weight), 0)
                else:
                    states = state.repeat(inputs)
                inputs[value.name] = states
        return batch._replace(inputs=tuple(inputs[value.name] for value in model.inputs))

    return AugmentedSource(source, add, jax.random.key(0))
