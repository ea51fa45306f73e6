"""Find parameters that no gradient reaches, because only integers are computed from them."""

import re
from collections.abc import Collection
from functools import cache

import onnx

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.roles import graph_tensors
from jaxonnx.lowering import RoundedArray

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
