"""`Network`: the tensors, the file and the program of a model, and changes of its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto

from jaxonnx._display import list_some
from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph, bind
from jaxonnx._graph.caches import count_rows, find_counted
from jaxonnx._graph.quantization_patterns import fuse_integer_products, pass_rounding
from jaxonnx._graph.roles import graph_tensors, running_statistics
from jaxonnx._graph.select import Select, resolve, select
from jaxonnx._graph.values import Value, to_value
from jaxonnx._graph.weight_names import Places
from jaxonnx._io import records
from jaxonnx._io.protocol import ALONE, Companion
from jaxonnx._io.protos import subgraphs, unused_name, value_names
from jaxonnx._io.save import in_file_types
from jaxonnx._require import require
from jaxonnx._rewrite.head import Head
from jaxonnx._run.program import Program
from jaxonnx._run.shapes import declared_types, evaluate_shapes, infer_types, type_of
from jaxonnx.errors import InputError
from jaxonnx.views import PackedRows, View

if TYPE_CHECKING:  # a model without sparse weights does not import it
    from jaxonnx.sparse import Sparsity

N = TypeVar("N", bound="Network")


@dataclass(frozen=True, eq=False, repr=False)
class Network:
    """The data of a Model, for the rooms below `jaxonnx.model`."""

    params: dict[str, jax.Array]
    state: dict[str, jax.Array]
    proto: ModelProto = field(repr=False)
    """The file without the data of its tensors."""
    program: Program
    originals: Mapping[str, np.ndarray]
    """64-bit tensors of the file, which the 32-bit arrays of JAX cannot hold."""
    heads: tuple[Head, ...] = ()
    """The layers that `with_head` put in the place of others."""
    new_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The rows of the tokens of `with_tokens`, by the embedding or output layer."""
    companion: Companion = ALONE
    """The companion of the file, saved with it."""
    source: ModelProto | None = field(default=None, repr=False)
    """`proto` as it was loaded, to see whether nodes were added or rewritten since."""

    @property
    def head(self) -> tuple[str, ...]:
        """The names of the tensors of new heads (`with_head`), for `trainable` and `labels`."""
        return tuple(name for head in self.heads for name in head.tensors)

    @property
    def folder(self) -> Any:
        """The folder of a language model that the file is in, if it was loaded from one."""
        return self.companion.folder

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @property
    def tensors(self) -> dict[str, Any]:
        """All named tensors: parameters, state, and constants as NumPy arrays."""
        return {**self.program.constants, **self.state, **self.params}

    @property
    def _file_values(self) -> dict[str, np.ndarray]:
        """All named tensors in the types of the file."""
        values = in_file_types({**self.state, **self.params}, self.originals)
        return {**self.program.constants, **values}

    @cached_property
    def _places(self) -> Places:
        """The modules and nodes of the weights, and their other names."""
        return Places(self.proto.graph, self.graph, self.tensors, self.params)

    @property
    def aliases(self) -> dict[str, str]:
        """Names for weights whose exporter numbered them, by the module that reads them.

        For `onnx::MatMul_394` it is "encoder.layers.0.linear1.weight", say. It chooses the weight
        wherever a name does. The matrix of a MatMul is PyTorch's weight transposed.
        """
        return dict(self._places.aliases)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs that a call must give, in order."""
        values = self._select_values(self.proto.graph.input, {*self.graph.inputs})
        if not any(value.dtype is not None and value.dtype.kind in "iu" for value in values):
            return values
        rows = count_rows(self.graph, self.tensors)
        # packed rows number their texts, and make the mask of the numbers
        counted = set() if self.program.find(PackedRows) else find_counted(self.graph)
        return tuple(replace(v, rows=rows.get(v.name), counted=v.name in counted) for v in values)

    @cached_property
    def _defaults(self) -> frozenset[str]:
        """Inputs with an initializer as their default: they may be passed by name."""
        names = frozenset(v.name for v in self.proto.graph.input)
        return names.difference(self.graph.inputs, *(v.supplied_inputs for v in self.program.views))

    @cached_property
    def _input_names(self) -> frozenset[str]:
        return self._defaults.union(self.graph.inputs)

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """The outputs, in file order."""
        return self._select_values(self.proto.graph.output, {*self.graph.outputs})

    def _select_values(
        self, values: Iterable[ValueInfoProto], names: set[str]
    ) -> tuple[Value, ...]:
        """Return those of these names, as the views declare them."""
        selected = (to_value(value) for value in values if value.name in names)
        views = self.program.views
        return tuple(reduce(lambda value, view: view.declare(value), views, v) for v in selected)

    @property
    def sparsity(self) -> Sparsity | None:
        """The weights that the file records as sparse; None without a record.

        Integer weights of a quantized file are among them, although they are not parameters. A
        malformed record counts as none, and `warnings` reports it.
        """
        if not records.has(self.proto, records.SPARSITY):
            return None
        from jaxonnx._io import packed

        stored = {**self.program.constants, **self.params}
        return None if packed.damage(self.proto) else packed.find_recorded(self.proto, stored)

    @cached_property
    def _factors(self) -> frozenset[str]:
        """The tensors that the file records as factors of adapters."""
        return records.get(self.proto, records.ADAPTERS, frozenset[str]) or frozenset()


def enter(model: N, *views: View) -> N:
    """Return a model under further views."""
    return replace(model, program=model.program.enter(*views))


def leave(model: N, *kinds: type[View]) -> N:
    """Return a model without the views of these kinds, whose changes are taken back."""
    for view in reversed(model.program.views):
        if isinstance(view, kinds):
            model, _ = view.leave(model, None)
    return model


def reenter(model: N, before: Network) -> N:
    """Enter the views that another network has, and that did not stay in this file, as they follow.

    Args:
      before: the network that was changed, with caches that are empty, say.
    """
    for view in before.program.views:
        model = enter(model, *view.follow(model.graph, model.inputs))
    return model


def refuse_change(model: Network, what: str) -> None:
    """Raise an InputError if the model has a view that would not fit a changed graph."""
    if model.program.adapts:
        raise InputError(
            f"{what} of a model with adapters cannot be changed: set it before they are attached, "
            "or merge them first with .merge_adapters()"
        )


def bind_file(proto: ModelProto, tensors: Mapping[str, Any]) -> Graph:
    """Return the graph of a file with these tensors, without views."""
    graph = fuse_integer_products(bind(proto, proto.graph, tensors.keys()), tensors)
    return pass_rounding(graph, tensors)


def with_file(
    model: N,
    proto: ModelProto,
    added: Mapping[str, np.ndarray] | None = None,
    params: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
) -> N:
    """Return the model of a changed file: tensors keep their roles, unless new nodes compute them.

    Args:
      added, params, state: new constants, parameters and state, by name.

    Raises:
      InputError: a view does not fit another file.
    """
    refuse_change(model, "the graph")
    before, after = (
        {(name, node.op_type == "Constant") for node in file.graph.node for name in node.output}
        for file in (model.proto, proto)
    )
    # another node may compute the tensor of a Constant node from now on
    computed = {name for name, _ in after - before}
    groups = [
        {**old, **{name: convert(x) for name, x in (new or {}).items()}}
        for old, new, convert in (
            (model.params, params, jnp.asarray),
            (model.state, state, jnp.asarray),
            (model.program.constants, added, np.asarray),
        )
    ]
    tensors = {n: x for group in groups for n, x in group.items() if n not in computed}
    graph = bind_file(proto, tensors)
    stored = {*graph_tensors(graph)}
    new_params, new_state, constants = (
        {name: value for name, value in group.items() if name in stored} for group in groups
    )
    program = model.program.replace_file(graph, constants)
    heads = tuple(head for head in model.heads if stored.issuperset(head.tensors))
    return replace(
        model, params=new_params, state=new_state, proto=proto, program=program, heads=heads
    )


def with_outputs(model: N, outputs: str | Iterable[str]) -> N:
    """Return the model of `Model.with_outputs`."""
    return with_file(model, cut(model.proto, model.graph, model.tensors, outputs))


def drop_unread(model: N) -> N:
    """Drop the nodes and tensors that no output is computed from; all inputs stay.

    Callers, data and runtimes go by the inputs of a file, and some read none of their numbers
    (`token_type_ids` of exported encoders).
    """
    proto = cut(model.proto, model.graph, model.tensors, model.graph.outputs)
    needed = {value.name for value in proto.graph.input}
    inputs = [v for v in model.proto.graph.input if v.name in needed or v.name not in model.tensors]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    return with_file(model, proto)


def with_inputs(model: N, inputs: str | Iterable[str]) -> N:
    """Return the model of `Model.with_inputs`."""
    proto = cut(model.proto, model.graph, model.tensors, model.graph.outputs, inputs)
    return with_file(model, proto)


def with_tensors(model: N, values: Mapping[str, Any]) -> N:
    """Replace the values of some parameters, state or constants."""
    params, state = (
        {name: jnp.asarray(values[name]) if name in values else x for name, x in group.items()}
        for group in (model.params, model.state)
    )
    program = model.program
    if not program.constants.keys().isdisjoint(values):  # else what is compiled stays compiled
        constants = {name: values.get(name, x) for name, x in program.constants.items()}
        program = replace(program, constants=constants)
    return replace(model, params=params, state=state, program=program)


def with_params(model: N, selection: Select) -> N:
    """Return the model of `Model.with_trainable`."""
    refuse_change(model, "trainable")
    tensors = model.tensors
    floats = {n: v for n, v in tensors.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    # a running statistic is renewed, not trained, unless it is asked for by its name
    spared = running_statistics(model.graph)
    # and so are numbers that are no weights of a vision encoder
    spared |= {name for name in model.program.constants if model.companion.freezes(name)}
    chosen = select(selection, floats, "trainable", spared, places=model._places)
    constants = {n: v for n, v in model.program.constants.items() if n not in chosen}
    return replace(
        model,
        params={name: jnp.asarray(tensors[name]) for name in tensors if name in chosen},
        state={n: v for n, v in tensors.items() if n not in chosen and n not in constants},
        program=replace(model.program, constants=constants),
    )


def cut(
    proto: ModelProto,
    graph: Graph,
    tensors: Mapping[str, Any],
    outputs: str | Iterable[str],
    inputs: str | Iterable[str] | None = None,
) -> ModelProto:
    """Cut a model at values of its main graph; return the smaller file.

    Nodes, initializers, inputs, value types and functions that the new outputs do not need are
    dropped, and so is training_info, which belongs to the whole graph. The types of the outputs are
    those of the file, else those that ONNX's shape inference finds, else those of an evaluation on
    shapes, which takes longer.

    Args:
      proto: the file.
      graph: its main graph, bound.
      tensors: the values of its named tensors.
      outputs: names of values, inputs included, or of nodes (then: the node's first output), or of
        modules as PyTorch's exporters record them (then: what the last node of the module gives).
      inputs: the values at which the smaller graph begins, named alike; None for the inputs of the
        file that the outputs need.

    Raises:
      InputError: a name is unknown; the message has similar ones. Or the outputs do not depend on
        one of `inputs`, or depend on other inputs, too.
    """
    names = _resolve_all(proto, "outputs", outputs)
    starts = [] if inputs is None else _resolve_all(proto, "inputs", inputs)
    # 1. the values from which the outputs are computed, themselves included
    needed = ancestors(graph.nodes, {*names} - {*starts}, starts)
    for node in reversed(proto.graph.node):
        # the bound graph lacks nodes that give named tensors, and those of fused groups
        if not needed.isdisjoint(node.output):
            needed.update({*node.input} - {"", *starts})
    new_inputs: Sequence[ValueInfoProto] = ()
    if inputs is not None:
        new_inputs = cut(proto, graph, tensors, starts).graph.output
        _check_inputs(graph, names, new_inputs, needed)
    # 2. drop the old outputs, and all that is not needed
    result = ModelProto()
    result.CopyFrom(proto)
    del result.training_info[:]
    main = result.graph
    _filter(main.node, lambda node: not needed.isdisjoint(node.output))
    for entries in (main.input, main.initializer, main.value_info):
        _filter(entries, lambda entry: entry.name in needed)
    others = [*main.input]
    del main.input[:]
    main.input.extend([*new_inputs, *others])
    used = {*value_names(proto.graph)}
    for node in main.node:  # one that stays for another of its outputs
        new = [unused_name(name, used) if name in starts else name for name in node.output]
        node.output[:] = new
    _filter(main.sparse_initializer, lambda sparse: sparse.values.name in needed)
    _filter(main.quantization_annotation, lambda entry: entry.tensor_name in needed)
    # the declared type of an output that stays a value moves to value_info
    typed = {value.name for value in (*main.input, *main.value_info)}
    main.value_info.extend(
        value for value in main.output if value.name in needed and value.name not in typed
    )
    del main.output[:]
    # keys of the functions that nodes call, directly or in subgraphs and functions
    functions = {_key(function, function.name): function for function in result.functions}
    called: set[tuple[str, str, str]] = set()
    waiting = [*result.graph.node]
    while waiting:
        node = waiting.pop()
        waiting += [inner for graph in subgraphs(node) for inner in graph.node]
        key = _key(node, node.op_type)
        if key in functions and key not in called:
            called.add(key)
            waiting += functions[key].node
    _filter(result.functions, lambda function: _key(function, function.name) in called)
    # 3. declare the new outputs
    declared, kinds = declared_types(result), infer_types(result, tensors, names)
    vague = []  # a type is unknown, or has a dimension that inference names unk__0, unk__1, ...
    for name in names:
        kind = kinds.get(name)
        dims = () if kind is None else kind.tensor_type.shape.dim
        unknown = kind is None or any(dim.dim_param.startswith("unk__") for dim in dims)
        if unknown and name not in declared:
            vague.append(name)
    if vague:
        shapes = evaluate_shapes(result, bind(result, result.graph, tensors.keys()), tensors)
        values = shapes.values if shapes else {}
        kinds |= {name: type_of(values[name]) for name in vague if name in values}
    _filter(result.graph.value_info, lambda value: value.name not in names)
    result.graph.output.extend(ValueInfoProto(name=name) for name in names)
    for value in result.graph.output:
        if value.name in kinds:
            value.type.CopyFrom(kinds[value.name])
    return result


def _resolve_all(proto: ModelProto, argument: str, values: str | Iterable[str]) -> list[str]:
    """Return the values of the main graph that an argument names.

    Raises:
      InputError: there is no such value, or one comes twice.
    """
    listed = [values] if isinstance(values, str) or not isinstance(values, Iterable) else values
    listed = [*listed]
    named = all(isinstance(name, str) for name in listed)
    require(argument, values, named, "names of values of the graph")
    # `resolve` knows results of nodes only; an output may be an initializer or an input
    ends = {value.name for value in (*proto.graph.output, *proto.graph.input)}
    names = [name if name in ends else resolve(proto.graph, name) for name in listed]
    fits = names and len({*names}) == len(names)
    require(argument, listed, fits, "different values of the graph")
    return names


def _check_inputs(
    graph: Graph,
    outputs: Sequence[str],
    new_inputs: Sequence[ValueInfoProto],
    needed: Set[str],
) -> None:
    """Raise an InputError unless the outputs depend on these inputs, and on no others."""
    starts = [value.name for value in new_inputs]
    if others := [name for name in graph.inputs if name in needed]:
        raise InputError(
            f"the outputs depend on {list_some(others)} besides {list_some(starts)}: name all of "
            f"them, {[*starts, *others]}"
        )
    used = {name for n in graph.nodes if not needed.isdisjoint(n.outputs) for name in n.reads}
    if unread := [name for name in starts if name not in used and name not in outputs]:
        raise InputError(f"the outputs {list_some(outputs)} do not depend on {list_some(unread)}")
    if unknown := [value.name for value in new_inputs if not value.HasField("type")]:
        raise InputError(f"the type of {list_some(unknown)} is not known, which an input must have")


def _key(item: NodeProto | FunctionProto, name: str) -> tuple[str, str, str]:
    """Return domain, name and overload, which identify a function; "ai.onnx" is the domain ""."""
    return "" if item.domain == "ai.onnx" else item.domain, name, item.overload


def _filter(repeated: Any, keep: Any) -> None:
    """Keep the items of a repeated protobuf field for which `keep(item)` holds, in place."""
    filtered = [item for item in repeated if keep(item)]
    if len(filtered) < len(repeated):
        del repeated[:]
        repeated.extend(filtered)
