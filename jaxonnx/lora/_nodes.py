"""Low-rank adapters as nodes of the graph, beside the weights that they change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from jaxonnx._axes import Matrix
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.uses import Use, direct_uses, uses_by_tensor
from jaxonnx._io import records
from jaxonnx._io.build import names as all_names
from jaxonnx._io.build import rename_reads, unused_name
from jaxonnx._io.protos import all_graphs
from jaxonnx.errors import InputError

RANK = "lora_r"
"""The symbolic dimension of adapters that are inputs."""


@dataclass(frozen=True)
class Factors:
    """The change a b of a weight: a (..., inputs, rank), b (..., rank, outputs)."""

    place: Matrix
    shape: tuple[int, ...]
    """Of the matrix."""
    a: np.ndarray
    b: np.ndarray
    scale: np.ndarray | None = None
    """What the sum of matrix and change is multiplied by (DoRA): a factor for each output."""

    @property
    def is_plain(self) -> bool:
        """Whether x @ a @ b is the term that the adapter adds to a product."""
        return not (self.place.kernel or self.place.batch)

    def change(self) -> np.ndarray:
        """Return a b in the order of the matrix's axes."""
        place = self.place
        order = [*place.batch, place.input, *place.kernel, place.output]
        product = (self.a @ self.b).reshape([self.shape[i] for i in order])
        return product.transpose(np.argsort(order))

    def change_of(self, matrix: np.ndarray) -> np.ndarray:
        """Return the difference that the adapter makes to a matrix, the scale included."""
        return (matrix + self.change()) * self.scale - matrix


def magnitude_name(weight: str, names: Callable[[str], str]) -> str:
    """Return the name of the norms of a weight's outputs, as PEFT has it."""
    return f"{names(weight)}.lora_magnitude_vector"


def factor_names(weight: str, names: Callable[[str], str]) -> tuple[str, str]:
    """Return the names of both factors of a weight."""
    stem = names(weight)
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def insert_adapters(
    proto: ModelProto,
    graph: Graph,
    tensors: Mapping[str, Any],
    factors: Mapping[str, Factors],
    names: Callable[[str], str],
    *,
    as_inputs: bool,
) -> ModelProto:
    """Return the file with adapters behind their products; its own tensors stay as they are.

    Behind a product with a matrix stand two small ones and a sum; into any other weight the change
    is added before the nodes that read it. Factors of earlier adapters that the file has by the
    same names get other ones, so that `Adapters.to_inputs` names the new factors.

    Args:
      proto, graph, tensors: the file, its bound graph, its named tensors.
      factors: by the name of the weight.
      names: the module of a weight, for the names of its factors.
      as_inputs: make the factors inputs with empty defaults, as `ExtractAdapters` of Olive does,
        instead of initializers.

    Raises:
      InputError: two weights have one name, earlier factors are inputs of the file, or a weight is
        read where nothing can be added.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    pairs = {weight: factor_names(weight, names) for weight in factors}
    added = [name for pair in pairs.values() for name in pair]
    # rename values of these names, but for inputs and outputs; return the new names
    used = {*all_names(result.graph)}
    fixed = {value.name for value in (*result.graph.input, *result.graph.output)}
    renamed = {name: unused_name(name, used) for name in added if name in used - fixed}
    if renamed:
        for inner in all_graphs(result.graph):
            for value in (*inner.initializer, *inner.value_info):
                value.name = renamed.get(value.name, value.name)
            for node in inner.node:
                node.input[:] = [renamed.get(name, name) for name in node.input]
                node.output[:] = [renamed.get(name, name) for name in node.output]
    writer = _Writer(result.graph)  # its lists of nodes are changed, and written at the end
    read = uses_by_tensor(graph, tensors)
    for weight, change in factors.items():
        pair = pairs[weight]
        if taken := writer.taken.intersection(pair):
            raise InputError(
                f"the adapter of '{weight}' would be called '{min(taken)}', and the file has "
                "another one of this name: merge it with adapters='merged', or save it apart with "
                "Adapters.save"
            )
        dtype = _float_type(weight, read.get(weight, ()), tensors)
        writer.declare(pair, change, dtype, as_inputs)
        writer.add(weight, read.get(weight, ()), change, pair)
    earlier = [renamed.get(n, n) for n in records.get(proto, records.ADAPTERS, list) or []]
    records.put(result, records.ADAPTERS, [*earlier, *added])
    del result.graph.node[:]
    result.graph.node.extend([*writer.first, *writer.nodes])
    return result


def factor_types(
    weights: Collection[str], graph: Graph, tensors: Mapping[str, Any]
) -> dict[str, np.dtype]:
    """Return the type that a file has the factors of each weight in."""
    read = uses_by_tensor(graph, tensors)
    return {name: _float_type(name, read.get(name, ()), tensors) for name in weights}


def _float_type(weight: str, read: Sequence[Use], tensors: Mapping[str, Any]) -> np.dtype:
    """Return the type that a weight is computed with: its own, or that of its scales."""
    dtype = np.dtype(tensors[weight].dtype)
    if dtype.kind not in "iu" and dtype.itemsize > 1:
        return dtype
    for use in direct_uses(read):
        scale = tensors.get((use.parts or use.node.inputs)[0])
        if scale is not None:
            return np.dtype(scale.dtype)
    return np.dtype(np.float32)


class _Writer:
    """Nodes, initializers and inputs that are added to a graph."""

    def __init__(self, graph: GraphProto):
        self.graph = graph
        self.first: list[NodeProto] = []
        """Nodes that only read weights."""
        self.nodes = [*map(_copy, graph.node)]
        self.by_output = {name: node for node in self.nodes for name in node.output if name}
        self.taken = {*all_names(graph)}

    def declare(
        self, pair: tuple[str, str], change: Factors, dtype: np.dtype, as_inputs: bool
    ) -> None:
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        axes = {pair[0]: -1, pair[1]: -2}
        for name, value in zip(pair, (change.a, change.b), strict=True):
            self.taken.add(name)
            value = np.ascontiguousarray(value.astype(dtype))
            if as_inputs:
                dims: list[Any] = [*value.shape]
                dims[axes[name]] = RANK
                self.graph.input.append(helper.make_tensor_value_info(name, kind, dims))
                value = value[..., :0] if axes[name] == -1 else value[..., :0, :]
            self.graph.initializer.append(numpy_helper.from_array(value, name))

    def add(self, weight: str, read: Sequence[Use], change: Factors, pair: tuple[str, str]) -> None:
        final = [use for use in read if not use.passes]
        if final and all(_takes_product(use, change) for use in final):
            flat = None if change.scale is None else change.scale.reshape(-1)
            scale = self._declare_scale(weight, flat, pair[0])
            for use in final:
                self._add_product(use, change, pair, scale)
            return
        direct = [use for use in read if use.is_direct]
        scale = self._declare_scale(weight, change.scale, pair[0])
        if all(use.node.op.dequantizes and use.node is use.outer for use in direct):
            change_name = self._whole(weight, change, pair)
            for use in direct:
                self._add_to_output(use.node.outputs[0], change_name, scale)
        elif any(use.node.op.form(use.position) is not None for use in final) and not any(
            use.position in use.node.op.quantized or use.node.body for use in direct
        ):
            total = f"{weight}/with_adapter"
            for node in self.nodes:
                rename_reads(node, {weight: total})
            change_name = self._whole(weight, change, pair)
            self.first += self._sum([weight, change_name], total, total, scale)
        else:
            raise InputError(
                f"the adapter of '{weight}' cannot be written as nodes at {read[0].node.label}: "
                "merge it with adapters='merged', save it with Adapters.save('x.npz'), or leave "
                "it out of where="
            )

    def _declare_scale(self, weight: str, scale: np.ndarray | None, factor: str) -> str | None:
        """Return the name of an initializer with the scale, of the type of a factor."""
        if scale is None:
            return None
        name = unused_name(f"{weight}/lora_scale", self.taken)
        dtype = self._type(factor)
        value = scale.astype(helper.tensor_dtype_to_np_dtype(dtype))
        self.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def _type(self, initializer: str) -> int:
        return next(t.data_type for t in self.graph.initializer if t.name == initializer)

    def _sum(
        self, summands: list[str], total: str, name: str, scale: str | None
    ) -> list[NodeProto]:
        """Return the nodes that add, and multiply by the scale, if any."""
        if scale is None:
            return [helper.make_node("Add", summands, [total], name)]
        added = f"{total}/unscaled"
        return [
            helper.make_node("Add", summands, [added], name),
            helper.make_node("Mul", [added, scale], [total], f"{total}/lora_magnitude"),
        ]

    def _add_product(
        self, use: Use, change: Factors, pair: tuple[str, str], scale: str | None
    ) -> None:
        """Put x a b behind a product with x, or behind rows that are read."""
        output = use.node.outputs[0]
        node = self.by_output[output]
        nodes: list[NodeProto] = []

        def new(kind: str, inputs: list[str], end: str, **attributes: Any) -> str:
            proto = helper.make_node(kind, inputs, [f"{output}/{end}"], **attributes)
            proto.name = proto.output[0]
            nodes.append(proto)
            return proto.output[0]

        if use.node.op.like == "Gather":
            rows = new("Gather", [pair[0], node.input[1]], "lora_A", axis=0)
        else:
            x = use.node.inputs[0]
            if change.place.lookup:  # of the embedding, whose transpose this is
                first = new("Transpose", [pair[1]], "lora_B_transposed", perm=[1, 0])
                pair = first, new("Transpose", [pair[0]], "lora_A_transposed", perm=[1, 0])
            if 0 in use.node.op.quantized:
                *scale_and_zero, _ = replace(use, position=0).parts
                x = new("DequantizeLinear", [x, *filter(None, scale_and_zero)], "lora_x")
            if use.node.attributes.get("transA", 0):
                x = new("Transpose", [x], "lora_transposed", perm=[1, 0])
            rows = new("MatMul", [x, pair[0]], "lora_A")
        added = new("MatMul", [rows, pair[1]], "lora_B")
        alpha = use.node.attributes.get("alpha", 1.0)
        if alpha != 1 and use.node.op.name == "Gemm":
            factor = f"{output}/lora_alpha"
            proto = helper.make_tensor(factor, self._type(pair[0]), [], [alpha])
            self.graph.initializer.append(proto)
            added = new("Mul", [added, factor], "lora_scaled")
        node.output[0], name = f"{output}/base", f"{output}/lora_sum"
        nodes += self._sum([node.output[0], added], output, name, scale)
        self._insert_behind(node, nodes)

    def _whole(self, weight: str, change: Factors, pair: tuple[str, str]) -> str:
        """Compute a b in the order of the weight's axes; return its name."""
        place, shape = change.place, change.shape
        order = [*place.batch, place.input, *place.kernel, place.output]
        sizes = f"{weight}/lora_shape"
        value = np.array([shape[i] for i in order], np.int64)
        self.graph.initializer.append(numpy_helper.from_array(value, sizes))
        names = [f"{weight}/lora_{end}" for end in ("product", "reshaped", "change")]
        perm = np.argsort(order).tolist()
        self.first += [
            helper.make_node("MatMul", [*pair], [names[0]], names[0]),
            helper.make_node("Reshape", [names[0], sizes], [names[1]], names[1]),
            helper.make_node("Transpose", [names[1]], [names[2]], names[2], perm=perm),
        ]
        return names[2]

    def _add_to_output(self, output: str, change: str, scale: str | None) -> None:
        node = self.by_output[output]
        node.output[0], name = f"{output}/base", f"{output}/lora_sum"
        self._insert_behind(node, self._sum([node.output[0], change], output, name, scale))

    def _insert_behind(self, node: NodeProto, nodes: Sequence[NodeProto]) -> None:
        place = next(i for i, other in enumerate(self.nodes) if other is node)
        self.nodes[place + 1 : place + 1] = nodes
        self.by_output |= {name: new for new in nodes for name in new.output}


def _copy(node: NodeProto) -> NodeProto:
    result = NodeProto()
    result.CopyFrom(node)
    return result


def _takes_product(use: Use, change: Factors) -> bool:
    """Check whether x @ a @ b can be added to the result of a node."""
    op, main = use.node.op, use.node is use.outer and use.node.body is None
    if not main or not change.is_plain or use.view.part or use.view.expanded:
        return False
    bias = () if op.bias is None else use.node.inputs[op.bias :][:1]
    if change.scale is not None and any(bias):  # which is not scaled
        return False
    if change.place.lookup and op.like == "Gather":
        form = op.form(use.position)
        first = form is not None and use.node.attributes.get(form.rows, 0) == 0
        return first and (use.view.axes in (None, (0, 1)) or use.matrix is not None)
    if change.place.lookup and use.position not in op.quantized:
        return False
    product = op.like in ("Gemm", "MatMul") and use.position == 1
    return product and use.matrix is not None
