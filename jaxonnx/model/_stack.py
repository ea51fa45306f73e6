"""`stack`: several networks of one graph as one program under `jax.vmap`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto, NodeProto

from jaxonnx._display import list_some
from jaxonnx._graph.values import list_values
from jaxonnx._io.protos import all_nodes
from jaxonnx._io.tensors import equal_bits
from jaxonnx._require import check_arguments, require, require_integer
from jaxonnx.errors import InputError
from jaxonnx.model._load import as_model
from jaxonnx.model._model import Model


class Stack(NamedTuple):
    """Several models of one graph: the tensors of all members along a new first axis.

    Attributes:
      model: the graph, for `apply`, with the tensors of the first member.
      params: the parameters, by name; [members, ...].
      state: tensors that are not trained, by name; [members, ...]. Constants of the graph that
        differ between members are among them.
    """

    model: Model
    params: dict[str, jax.Array]
    state: dict[str, jax.Array]

    def member(self, index: int) -> Model:
        """Return one of the models, to save it, say.

        Raises:
          InputError: `index` is not from 0 to the number of models less one.
        """
        sizes = [len(x) for x in (*self.params.values(), *self.state.values())]
        require_integer("index", index, 0, max(sizes, default=1) - 1)
        params, state = jax.tree.map(lambda x: x[index], (self.params, self.state))
        return self.model.replace(params=params, state=state)


def stack(models: Sequence[Model | str | os.PathLike[str] | bytes | ModelProto]) -> Stack:
    """Stack models that differ in their tensors alone, such as an ensemble, for `jax.vmap`.

    >>> import jax, jaxonnx
    >>> from jaxonnx import demo
    >>> first = demo.mlp()
    >>> second = first.reinitialize(jax.random.key(0), ".*")
    >>> members = jaxonnx.stack([first, second])
    >>> def apply(params, state, x):
    ...     return members.model.apply(params, x, state=state)
    >>> x = jax.numpy.ones((3, 1, 8, 8))
    >>> jax.vmap(apply, (0, 0, None))(members.params, members.state, x).shape
    (2, 3, 10)

    Args:
      models: Models, or anything that `jaxonnx.load` accepts. What is a parameter in the first one
        is a parameter of all.

    Returns:
      A `Stack` of `model`, `params` and `state`. Floating-point constants that differ, like means
      and deviations of inputs that each file has of its own, are in its state.

    Raises:
      InputError: nodes, inputs or outputs differ, or the shape or dtype of a tensor, or a constant
        of integers; the message names it. Or a model has adapters, fixed inputs or another view.
    """
    check_arguments(stack, locals())
    kinds = (Model, ModelProto, str, bytes, os.PathLike)
    listed = isinstance(models, list | tuple) and len(models) > 0
    each = listed and all(isinstance(model, kinds) for model in models)
    require("models", models, each, "a list of models, or of what jaxonnx.load accepts")
    nets = [as_model(model) for model in models]
    first, *others = nets
    nodes = _list_nodes(first.proto)
    for i, net in enumerate(nets):
        if net.program.views:
            kinds = list_some([type(view).__name__ for view in net.program.views], "")
            raise InputError(
                f"models[{i}] has views ({kinds}), which are not stacked: merge adapters before, "
                "and fix inputs of `.model` after"
            )
    for i, net in enumerate(others, 1):
        _check_same_graph(first, net, nodes, i)
    values = {name: [net.tensors[name] for net in nets] for name in first.tensors}
    for name, tensors in values.items():
        types = [f"{x.dtype}{list(x.shape)}" for x in tensors]
        if other := next((kind for kind in types if kind != types[0]), ""):
            raise InputError(
                f"tensor '{name}' is {types[0]} in models[0] and {other} in "
                f"models[{types.index(other)}]: it must have one shape and dtype in all"
            )
    differing = {
        name: x
        for name, x in first.program.constants.items()
        if not all(equal_bits(np.asarray(x), np.asarray(other)) for other in values[name])
    }
    for name, x in differing.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise InputError(
                f"the constant '{name}' ({x.dtype}) differs between the models: only constants in "
                "floating point are stacked, as others fix shapes and axes"
            )
    constants = {name: x for name, x in first.program.constants.items() if name not in differing}
    state = first.state | {name: jnp.asarray(x) for name, x in differing.items()}
    model = replace(first, state=state, program=replace(first.program, constants=constants))
    params, state = (
        {name: jnp.stack([jnp.asarray(x) for x in values[name]]) for name in group}
        for group in (model.params, model.state)
    )
    return Stack(model, params, state)


def _list_nodes(proto: ModelProto) -> list[NodeProto]:
    """Return copies of the nodes of a file and of its functions, without names and notes."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    nodes = []
    for body in (copy.graph, *copy.functions):
        for node in all_nodes(body):
            for field in ("name", "doc_string", "metadata_props"):
                node.ClearField(field)
        nodes += body.node
    return nodes


def _check_same_graph(first: Model, net: Model, nodes: Sequence[NodeProto], index: int) -> None:
    """Raise an InputError with the difference unless two models have the same graph."""

    def differ(what: str, expected: Any, actual: Any) -> InputError:
        return InputError(f"models[{index}] has {what} {actual}, and models[0] {expected}")

    for what, a, b in (
        ("the inputs", first.inputs, net.inputs),
        ("the outputs", first.outputs, net.outputs),
    ):
        if a != b:
            raise differ(what, list_values(a), list_values(b))
    opsets = [{e.domain: e.version for e in x.proto.opset_import} for x in (first, net)]
    if opsets[0] != opsets[1]:
        raise differ("the opsets", *opsets)
    other_nodes = _list_nodes(net.proto)
    for a, b in zip(nodes, other_nodes, strict=False):
        if a != b:
            raise InputError(
                f"models[{index}] has another node than models[0]: '{b.output[0]}' ({b.op_type}) "
                f"differs from '{a.output[0]}' ({a.op_type}) in operator, attributes or names"
            )
    if len(nodes) != len(other_nodes):
        raise differ("nodes:", len(nodes), len(other_nodes))
    if unmatched := sorted(first.tensors.keys() ^ net.tensors.keys()):
        raise InputError(f"models[0] and models[{index}] have not both {list_some(unmatched)}")
