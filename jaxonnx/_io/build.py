"""Build a graph node by node."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from onnx import GraphProto, helper, numpy_helper

from jaxonnx._io.protos import all_graphs


class Writer:
    """A graph whose new names are unused in the model; `used` is shared by its writers."""

    def __init__(self, name: str, used: set[str]):
        self.graph: GraphProto = GraphProto(name=name)
        self.used = used

    def fresh(self, name: str) -> str:
        """Return an unused name: `name`, or `name_2` and so on if another writer has it."""
        return unused_name(name, self.used)

    def node(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Append a node with one output, called like `name`; return the output's name."""
        output = self.fresh(name or operator.lower())
        self.nodes(operator, inputs, [output], **attributes)
        return output

    def nodes(
        self, operator: str, inputs: Iterable[str], outputs: Iterable[str], **attributes: Any
    ) -> None:
        """Append a node with these outputs."""
        self.graph.node.append(helper.make_node(operator, [*inputs], [*outputs], **attributes))

    def constant(self, name: str, value: Any, dtype: Any) -> str:
        """Append an initializer called like `name`; return its name."""
        name = self.fresh(name)
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def output(self, name: str, value: Any) -> None:
        """Declare an output with the shape and dtype of `value`."""
        kind = onnx_type(value.dtype)
        self.graph.output.append(helper.make_tensor_value_info(name, kind, value.shape))


def unused_name(name: str, used: set[str]) -> str:
    """Return `name`, or `name_2` and so on if that is in `used`, which it joins."""
    free, number = name, 1
    while free in used:
        number += 1
        free = f"{name}_{number}"
    used.add(free)
    return free


def onnx_type(dtype: Any) -> int:
    """Return the TensorProto.DataType of a NumPy dtype."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def names(graph: GraphProto) -> Iterator[str]:
    """Yield every name that a graph or one of its subgraphs defines."""
    for inner in all_graphs(graph):
        yield from (value.name for value in inner.input)
        yield from (tensor.name for tensor in inner.initializer)
        yield from (sparse.values.name for sparse in inner.sparse_initializer)
        for node in inner.node:
            yield from node.output
