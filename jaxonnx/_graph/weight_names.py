"""The names of weights besides their own: of modules and nodes, of ties, and aliases.

A weight that its exporter numbered (val_42, onnx::MatMul_394) has an alias: the module that reads
it and its name there ("encoder.layers.0.linear1.weight").
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onnx import GraphProto

from jaxonnx._graph.ancestors import behind
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.roles import Roles, stored_names
from jaxonnx._graph.uses import Use, weights
from jaxonnx._io.protos import all_nodes, modules, own_name
from jaxonnx._io.ties import tied_names

Names = Mapping[str, Collection[str]]
"""The tensors that a name stands for."""

_NUMBERED = re.compile(
    r"((?:onnx::|_)?[A-Za-z]+(?:::[A-Za-z]+)?_\d+|\d+|/.*Constant(?:_\d+)?_output_0)"
    r"((?:_(?:quantized|scales?|zero_points?|zp|transposed|Q\d\w*|DQ_Q\d\w*|qzeros|merged_\d+))*)"
)
"""A name that an exporter made of a number, and a quantizer's suffix."""

_OPERATOR = re.compile(r"[./](MatMul|Gemm|Conv)$")
"""A scope that onnxruntime makes of the name of a node that it fuses."""

_SUFFIX = re.compile(r"(\.MatMul)?[./](weight|kernel|qweight)(_\w+)?$")
"""The part of a weight's name behind that of its module."""

_GATES = {"RNN": "WRB", "GRU": "WRB", "LSTM": "WRBP", "DynamicQuantizeLSTM": "WRBP"}
"""The names of the weights of recurrent operators in the specification."""


@dataclass(frozen=True, eq=False)
class Places:
    """The names that weights of a graph go by: of modules and nodes that read them, ties, aliases.

    Attributes:
      proto, graph: the main graph, as a GraphProto and bound.
      tensors: the values of its named tensors.
      params: the names of the parameters, which are weights whatever their role.
    """

    proto: GraphProto
    graph: Graph
    tensors: Mapping[str, Any]
    params: Collection[str]

    @cached_property
    def roles(self) -> Roles:
        """The roles of the tensors in the graph."""
        return Roles(self.graph, self.tensors, stored_names(self.proto), self.params)

    @cached_property
    def ties(self) -> dict[str, str]:
        """From each further name of a tied tensor to the name of the tensor."""
        return tied_names(self.proto, self.tensors)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """From the name of each numbered weight to its alias: module.weight or the like.

        Several weights of one module with the same part are numbered: attn.weight, attn.weight_1.
        """
        scopes = {n.output[0]: modules(n) for n in all_nodes(self.proto) if n.output}
        taken = {*self.tensors}
        owners = {name.rpartition(".")[0] for name in taken}
        chosen: dict[str, str] = {}
        data = behind(self.graph.nodes, self.graph.inputs)
        # a kernel is named for its normalization, not for the statistics that are computed of it
        normalized = {use.name: use for use in self.roles.used if _is_normalized(use)}
        for use in self.roles.used:
            use = normalized.get(use.name, use)
            match = _NUMBERED.fullmatch(own_name(use.name))
            at = use.node if use.outer.op.name == "If" else use.outer
            path = scopes.get(next(iter(at.outputs), ""))
            if match is None or not path or use.name not in self._weights or use.name in chosen:
                continue
            module = _OPERATOR.sub("", path[-1])
            # scopes lack a module that is not called itself ("model" of OPT): its bias may have it
            longer = [name for name in owners if name.endswith(f".{module}")]
            module = longer[0] if len(longer) == 1 else module
            stem, end = f"{module}.{_part(use, data)}", match[2]
            names = itertools.chain([stem + end], (f"{stem}_{i}{end}" for i in itertools.count(1)))
            chosen[use.name] = next(name for name in names if name not in taken)
            taken.add(chosen[use.name])
        return chosen

    @cached_property
    def modules(self) -> Names:
        """The weights of each module, by the nodes' records and the names of weights.

        Every prefix of a name counts: "blocks.0.bias" is in "blocks" and "blocks.0".
        """
        names: dict[str, dict[str, None]] = {}
        for tensor in self._weights:
            for end in re.finditer(r"(?<=.)[./]", tensor):
                names.setdefault(tensor[: end.start()], {})[tensor] = None
        nodes = {node.output[0]: node for node in self.proto.node if node.output}
        for output, tensors in self._read.items():
            for scope in modules(nodes[output]) if output in nodes else ():
                names.setdefault(scope, {}).update(dict.fromkeys(tensors))
        return names

    @cached_property
    def nodes(self) -> Names:
        """The weights that each node reads, by its name and by those of its outputs."""
        names: dict[str, dict[str, None]] = {}
        for node in self.proto.node:
            tensors = dict.fromkeys(self._read.get(node.output[0], ()) if node.output else ())
            for name in filter(None, (node.name, *node.output)) if tensors else ():
                names.setdefault(name, {}).update(tensors)
        return names

    @cached_property
    def _weights(self) -> dict[str, str]:
        """From each weight to the tensor that nodes read in its place.

        Weights are tensors with a role, parameters, and quantized matrices. An adapter's factors
        are found where the weight that they change is.
        """
        stored = (name for name, w in weights(self.graph, self.tensors).items() if w.storage)
        named = {*self.roles.of, *self.params, *stored}

        def root(name: str) -> str:  # an adapter of ours is where its weight is
            weight = name.partition(".lora_")[0]
            return weight if weight in self.tensors else name

        return {name: root(name) for name in self.tensors if name in named}

    @cached_property
    def _read(self) -> dict[str, list[str]]:
        """The weights that the nodes of the main graph read, by the first output of the node."""
        names_by_output: dict[str, list[str]] = {}
        names_of: dict[str, list[str]] = {}
        for name, root in self._weights.items():
            names_of.setdefault(root, []).append(name)
        for use in self.roles.used:
            if use.name in names_of and use.outer.outputs:
                names_by_output.setdefault(use.outer.outputs[0], []).extend(names_of[use.name])
        return names_by_output


def module_name(weight: str) -> str:
    """Return the name of the module that a weight belongs to, as Olive and PEFT have it.

    >>> module_name("model.layers.0.attn.q_proj.MatMul.weight_Q4")
    'model.layers.0.attn.q_proj'
    """
    return _SUFFIX.sub("", weight)


def is_numbered(name: str) -> bool:
    """Check whether an exporter made the name of a weight of a number."""
    return _NUMBERED.fullmatch(own_name(name)) is not None


def _part(use: Use, data: Collection[str]) -> str:
    """Return the last part of an alias: "weight" or "bias", or W, R, B, P of recurrent layers.

    Args:
      use: the first use of the tensor.
      data: the values that depend on inputs. A normalization of others is of a weight, and scales
        it by its "gain".
    """
    if gates := _GATES.get(use.node.op.name):
        return gates[use.position - 1]
    scales = use.node.op.start(use.position) == 1.0
    if scales and use.node is use.outer and use.node.inputs[0] not in data:
        return "gain"
    return "weight" if scales or _is_normalized(use) or use.matrix is not None else "bias"


def _is_normalized(use: Use) -> bool:
    """Check whether a normalization normalizes the tensor."""
    return use.position == 0 and use.node.op.start(1) == 1.0
