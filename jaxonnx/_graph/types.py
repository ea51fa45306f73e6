"""Element types of values: checked against their uses, and those that no gradient reaches.

Types are checked as ONNX's checker does.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.roles import graph_tensors
from jaxonnx.errors import ModelError
from jaxonnx.lowering import RoundedArray


def infer_types(graph: Graph, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Infer the types of values ("tensor(float)") from those of inputs and tensors.

    Results of control flow and of operators that ONNX has no schema of have unknown types ("").

    Args:
      graph: the bound main graph.
      tensors: its named tensors.

    Raises:
      ModelError: inputs of a node have different types where the schema has one; unknown types fit
        all others.
    """
    kinds = {name: _type_of(np.dtype(value.dtype)) for name, value in tensors.items()}
    for name, kind in zip(graph.inputs, graph.input_types, strict=True):
        if kind is not None and kind.tensor_type.elem_type in _NAMES:
            kinds[name] = _NAMES[kind.tensor_type.elem_type]
    return _infer(graph, kinds)


def _infer(graph: Graph, kinds: dict[str, str]) -> dict[str, str]:
    """Add the types of a graph's values to those of its inputs and tensors."""
    kinds |= {name: _type_of(value.dtype) for name, value in graph.initializers.items()}
    for node in graph.nodes:
        types = [kinds.get(name, "") for name in node.inputs]
        if node.body is not None:
            inner = dict(zip(node.body.inputs, types, strict=False))
            inner |= {local: kinds.get(name, "") for local, name in node.body.lifted.items()}
            inner = _infer(node.body, inner)
            results = [inner.get(name, "") for name in node.body.outputs]
        else:
            for body in node.subgraphs:  # which may be given other types than they declare
                _infer(body, {**kinds, **dict.fromkeys(body.inputs, "")})
            results = _infer_results(node, types)
        kinds.update(zip(node.outputs, results, strict=False))
    return kinds


def _infer_results(node: Node, types: Sequence[str]) -> list[str]:
    """Infer the types of a node's outputs from those of its inputs, "" where unknown."""
    variables, results, single = _variables(node.op.domain, node.op.name, node.version)
    bound: dict[str, str] = {}
    for i, kind in enumerate(types if variables else ()):
        variable = variables[min(i, len(variables) - 1)]  # the last input may be variadic
        if kind and variable and bound.setdefault(variable, kind) != kind:
            other = node.inputs[types.index(bound[variable])]
            raise ModelError(
                f"{node.label} reads '{node.inputs[i]}' ({kind[7:-1]}), with '{other}' "
                f"({bound[variable][7:-1]}); their types must be the same. Convert one of them in "
                "the file, or insert a Cast"
            )
    if node.op.name == "Cast" and node.attributes.get("to") in _NAMES:
        return [_NAMES[node.attributes["to"]]]
    return [bound.get(variable) or single.get(variable, "") for variable in results]


@cache
def _variables(
    domain: str, name: str, version: int
) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, str]]:
    """Return the type variables of an operator's inputs and outputs, and types of single ones.

    The variable of a variadic input whose values may differ in type is "".
    """
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return (), (), {}
    inputs = tuple(p.type_str * p.is_homogeneous for p in schema.inputs)
    outputs = tuple(p.type_str * p.is_homogeneous for p in schema.outputs)
    return inputs, outputs, {p.type_str: min(p.types) for p in schema.outputs if len(p.types) == 1}


_NAMES = {code: f"tensor({name.lower()})" for name, code in TensorProto.DataType.items() if code}
"""The names of element types in schemas."""


@cache
def _type_of(dtype: np.dtype) -> str:
    return _NAMES[helper.np_dtype_to_tensor_dtype(dtype)]


_FLOAT = re.compile(r"\((float|float16|bfloat16|double|complex64|complex128)\)")
"""A type of ONNX that has gradients, also within a sequence."""
_TYPES = {code: name for name, code in onnx.TensorProto.DataType.items()}
"""The names of element types, by the number that a Cast has; a hostile file may have others."""


def find_without_gradient(graph: Graph, names: Collection[str]) -> list[str]:
    """Return those of the named tensors of a graph whose gradient is zero for any loss.

    Nothing that is only read to compute integers has a gradient, unless an operator passes that of
    a quantized input straight through, as DequantizeLinear does behind QuantizeLinear. All inputs
    of functions, nodes with subgraphs and operators of other domains are taken to have one.
    """
    integers: set[str] = set()
    for node in graph.nodes:
        if not (node.op.domain or node.graphs or node.body):
            integers.update(name for name in node.outputs if _is_integer(node, name, integers))
    reached = {*graph.outputs} - integers
    for node in reversed(graph.nodes):
        if reached.isdisjoint(node.outputs):
            continue
        through = {name for i, name in enumerate(node.inputs) if node.op.takes(i, RoundedArray)}
        reached.update({*node.reads} - integers | through)
        for inner in (*node.subgraphs, *([] if node.body is None else [node.body])):
            reached.update(graph_tensors(inner))
    return [name for name in names if name not in reached]


def _is_integer(node: Node, output: str, integers: Collection[str]) -> bool:
    """Check whether a result is of integers or booleans; in doubt it is not."""
    if node.op.name == "Cast":
        return _TYPES.get(node.attributes["to"], "").startswith(("INT", "UINT", "BOOL"))
    outputs = _signature(node.op.name, node.version)
    position = node.outputs.index(output)
    if position >= len(outputs):
        return False
    may_be_float, same = outputs[position]
    return not may_be_float or any(node.inputs[i] in integers for i in same if i < len(node.inputs))


@cache
def _signature(name: str, version: int) -> tuple[tuple[bool, tuple[int, ...]], ...]:
    """Return, for each output of an operator, whether it may be float, and inputs of its type."""
    if not onnx.defs.has(name, version, ""):
        return ()
    schema = onnx.defs.get_schema(name, version, "")
    types = {c.type_param_str: " ".join(c.allowed_type_strs) for c in schema.type_constraints}
    return tuple(
        (
            _FLOAT.search(types.get(y.type_str, y.type_str)) is not None,
            tuple(i for i, x in enumerate(schema.inputs) if x.type_str == y.type_str),
        )
        for y in schema.outputs
    )
