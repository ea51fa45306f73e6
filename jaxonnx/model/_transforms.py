"""Implementation of the methods of Model that return another Model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx._graph.bind import bind
from jaxonnx._graph.caches import find_caches
from jaxonnx._graph.fake_quantization import pass_rounding
from jaxonnx._graph.integer_groups import fuse_integer_products
from jaxonnx._graph.roles import graph_tensors, running_statistics, split
from jaxonnx._graph.select import Select, select
from jaxonnx._graph.values import list_values, matching
from jaxonnx._network import Network, enter, refuse_change
from jaxonnx._rewrite.batch import free_batch
from jaxonnx._rewrite.head import Classes, replace_head
from jaxonnx._rewrite.outputs import cut
from jaxonnx.errors import InputError
from jaxonnx.model._append_jax import append_function
from jaxonnx.model._reinitialize import Initializer, reinitialize
from jaxonnx.views import BatchAxis, EmptyCaches, WholeInputs, fix_inputs, omit_caches

M = TypeVar("M", bound=Network)


def with_values(model: M, params: Mapping[str, Any] | None, state: Mapping[str, Any] | None) -> M:
    """Return the model of `Model.replace`."""
    return dataclasses.replace(
        model,
        params=matching("params", model.params, params),
        state=matching("state", model.state, state),
    )


def with_outputs(model: M, outputs: str | Iterable[str]) -> M:
    """Return the model of `Model.with_outputs`."""
    return with_file(model, cut(model.proto, model.graph, model.tensors, outputs))


def without_cache(model: M) -> M:
    """Return the model of `Model.without_cache`."""
    caches = find_caches(model.graph, model.inputs)
    if caches is None:
        return model
    return enter(model, *omit_caches(model.graph, caches))


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
    return enter(model, BatchAxis())


def with_any_batch(model: M, *, prove: bool = False) -> M:
    """Return the model of `Model.with_any_batch`.

    Args:
      prove: compare it with the given one on random numbers whatever was changed.
    """
    refuse_change(model, "the batch size")
    network = model.proto, model.program, model.params, model.state
    proto, added = free_batch(*network, prove=prove)
    if proto is model.proto:
        return model
    net = with_file(model, proto, added)
    # what the changes leave over is dropped; an algorithm of the file may read it
    return net if proto.training_info else with_outputs(net, net.graph.outputs)


def with_params(model: M, wanted: Select) -> M:
    """Return the model of `Model.with_trainable`."""
    refuse_change(model, "trainable")
    tensors = model.tensors
    floats = {n: v for n, v in tensors.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    # a running statistic is renewed, not trained, unless it is asked for by its name
    statistics = running_statistics(model.graph)
    chosen = select(wanted, floats, "trainable", statistics, places=model._places)
    constants = {n: v for n, v in model.program.constants.items() if n not in chosen}
    return dataclasses.replace(
        model,
        params={name: jnp.asarray(tensors[name]) for name in tensors if name in chosen},
        state={n: v for n, v in tensors.items() if n not in chosen and n not in constants},
        program=dataclasses.replace(model.program, constants=constants),
    )


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


def append_jax(model: M, function: Callable, outputs: Sequence[str] | None) -> M:
    """Return the model of `Model.then`."""
    caches = find_caches(model.graph, model.inputs)
    continued = {*caches.pairs.values()} if caches else set()
    taken = [name for name in model.graph.outputs if name not in continued]
    proto, added = append_function(
        model.proto, model.graph, model.tensors, function, taken, outputs
    )
    new = with_file(model, proto, added)
    learned, _, _ = split(new.graph, new.tensors, proto.graph)
    new = with_params(new, [*model.params, *(name for name in learned if name in added)])
    return new if model.program.find(EmptyCaches) is None else without_cache(new)


def with_file(model: M, proto: ModelProto, added: Mapping[str, np.ndarray] | None = None) -> M:
    """Return the model of a changed file: tensors keep their roles, new ones are constants.

    Raises:
      InputError: a view does not fit another file.
    """
    refuse_change(model, "the graph")
    constants = {**model.program.constants, **(added or {})}
    tensors = {**model.params, **model.state, **constants}
    graph = fuse_integer_products(bind(proto, proto.graph, tensors.keys()), tensors)
    graph = pass_rounding(graph, tensors)
    read = {*graph_tensors(graph)}
    params, state, constants = (
        {name: value for name, value in group.items() if name in read}
        for group in (model.params, model.state, constants)
    )
    program = model.program.replace_file(graph, constants)
    heads = tuple(head for head in model.heads if read.issuperset(head.tensors))
    return dataclasses.replace(
        model, params=params, state=state, proto=proto, program=program, heads=heads
    )
