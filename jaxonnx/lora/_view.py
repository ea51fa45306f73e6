"""Merge the adapters of a model into its weights, or write them as nodes or inputs beside these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from jaxonnx import quantization
from jaxonnx._arrays import to_host
from jaxonnx._display import format_count, list_some
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.uses import Use, direct_uses, uses_by_tensor, weights
from jaxonnx._graph.weight_names import module_name
from jaxonnx._io import records
from jaxonnx._io.protos import all_graphs, defined_names, rename_reads, unused_name
from jaxonnx._rewrite.network import Network
from jaxonnx._weights import Matrix
from jaxonnx.errors import InputError, warn
from jaxonnx.lora._merge import Merge, magnitude, pair
from jaxonnx.lowering import LowRank, is_half, merge_change, norm_factors, to_array
from jaxonnx.views import Addition, View

M = TypeVar("M", bound=Network)


@dataclass(frozen=True)
class Adaption(Merge, View):
    """The view of adapters: calls see their sums with the weights, files one of three forms."""

    adapts: ClassVar[bool] = True

    def merge(self, network: M, *, requantize: bool) -> M:
        if self.stored and not requantize:
            raise InputError(
                f"adapters cannot be merged into weights in few bits ('{self.stored[0]}', ...) "
                "without rounding these anew: save(path, adapters='nodes') writes them beside, "
                "merge_adapters(requantize=True) and save(path, adapters='merged') round"
            )
        tensors = {**network.state, **network.params}

        # compiled once for each shape, which many layers of a network share
        @partial(jax.jit, static_argnums=0)
        def merge(place: Matrix, parts: Mapping[str, Any]) -> jax.Array:
            return to_array(dataclasses.replace(self, layouts={"": place}).read(parts)[""])

        params = {}
        for name in self.targets:
            if name not in self.layouts:
                params[name] = to_array(tensors[name])
                continue
            stored = name, *pair(name), magnitude(name)
            parts = zip(("", *pair(""), magnitude("")), stored, strict=True)
            parts = {part: tensors[n] for part, n in parts if n in tensors}
            params[name] = merge(self.layouts[name], parts)
        lost = [name for name, share in self._find_lost(tensors, params).items() if share > 0.5]
        if lost:
            kind = tensors[lost[0]].dtype
            warn(
                f"{kind} rounds most of the adapter away in {format_count(len(lost), 'weight')} "
                f"({list_some(lost, '')}), whose changes are smaller than the steps between its "
                "numbers: Adapters.save, or save(path, adapters='nodes') before merging, keeps "
                "all of it",
            )
        rounded: dict[str, Any] = {}
        if self.stored:
            factors = self._arrays(network, tensors)
            changes = {name: factors[name].change() for name in self.stored}
            scaled = self._scaled_matrices(network).items()
            changes |= {n: factors[n].change_of(matrix) for n, matrix in scaled if n in changes}
            rounded, losses = quantization.requantize(network.graph, network.tensors, changes)
            warn(_describe_losses(losses))
        left = self.without_factors(network.state)
        state = {name: value for name, value in left.items() if name not in params}
        state |= {name: jnp.asarray(value) for name, value in rounded.items()}
        constants = {n: v for n, v in network.program.constants.items() if n not in rounded}
        program = dataclasses.replace(network.program.leave(Adaption), constants=constants)
        return dataclasses.replace(network, params=params, state=state, program=program)

    def _find_lost(self, tensors: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, float]:
        """Return the share of the change that rounding loses, of each adapted 16-bit weight."""

        @partial(jax.jit, static_argnums=0)
        def compare(place, w, a, b, norms, rounded):
            w, rounded = w.astype(jnp.float32), rounded.astype(jnp.float32)
            whole = merge_change(w, a, b * (self.alpha / self.rank), norms, place)
            error, change = jnp.linalg.norm(rounded - whole), jnp.linalg.norm(whole - w)
            trained = change > 1e-6 * jnp.linalg.norm(w)  # magnitudes (DoRA) round as they start
            return jnp.where(trained, error / change, 0)

        halves = {name for name in self.layouts if name in merged and is_half(tensors[name])}
        halves.difference_update(self.find_rows(tensors))  # new rows start from nothing
        result = {}
        for name in halves:
            a, b = (to_array(tensors[member]) for member in pair(name))
            norms, w = tensors.get(magnitude(name)), to_array(tensors[name])
            result[name] = float(compare(self.layouts[name], w, a, b, norms, merged[name]))
        return result

    def leave(self, network: M, form: str | None) -> tuple[M, list[Addition]]:
        if (form or ("nodes" if self.stored else "merged")) == "merged":
            return self.merge(network, requantize=True), []
        factors = self._arrays(network, network.tensors)
        if form == "inputs" and any(f.scale is not None for f in factors.values()):
            raise InputError(
                "adapters='inputs' has no place for the magnitudes of DoRA: they would be others "
                "for each adapter, and onnxruntime's format has none; use 'nodes' or 'merged'"
            )

        def insert(proto: ModelProto) -> ModelProto:
            graph, tensors, inputs = network.graph, network.tensors, form == "inputs"
            return insert_adapters(proto, graph, tensors, factors, module_name, as_inputs=inputs)

        params, state = map(self.without_factors, (network.params, network.state))
        program = network.program.leave(Adaption)
        bare = dataclasses.replace(network, params=params, state=state, program=program)
        inputs: dict[str, np.ndarray] = {}
        if form == "inputs":
            pairs = {name: (f.a, f.b) for name, f in factors.items()}
            inputs = _name_factors(pairs, network)
        return bare, [Addition(frozenset(self.layouts), insert, inputs)]

    def _arrays(self, network: Network, values: Mapping[str, Any]) -> dict[str, Factors]:
        """Return the factors of each adapted weight as NumPy arrays, with the weight's shape."""
        meanings = weights(network.graph, network.tensors)
        result = {
            name: Factors(place, meanings[name].shape, *map(np.asarray, pair))
            for name, (place, *pair) in self.factors(values).items()
        }
        norms = self.magnitudes(values)
        for name, matrix in self._scaled_matrices(network).items():
            factors = result[name]
            scale = norm_factors(matrix + factors.change(), norms[name], factors.place.summed_axes)
            result[name] = dataclasses.replace(factors, scale=np.asarray(scale))
        return result

    def _scaled_matrices(self, network: Network) -> dict[str, np.ndarray]:
        """Return the weights in float32, dequantized, whose outputs are scaled to norms (DoRA)."""
        names = self.magnitudes(network.tensors)
        return quantization.dequantize(network.graph, network.tensors, names)


def drop_inputs(model: M, ratio: float) -> M:
    """Return a model with adapters whose training drops inputs of A.

    Raises:
      InputError: an adapter is added to its weight before the product.
    """
    *views, view = model.program.views
    assert isinstance(view, Adaption)
    view = dataclasses.replace(view, dropout=ratio)
    tensors = jax.eval_shape(view.read, model.tensors)
    if added := [name for name in view.layouts if not isinstance(tensors[name], LowRank)]:
        raise InputError(
            f"dropout={ratio}: the adapter of '{added[0]}' is added to the weight in each step, so "
            "that it has no inputs to drop: leave the weight out of where=, or dropout= out"
        )
    return dataclasses.replace(
        model, program=dataclasses.replace(model.program, views=(*views, view))
    )


def writes_apart(model: Network) -> bool:
    """Check whether the default file has adapters beside weights in few bits."""
    view = model.program.find(Adaption)
    return view is not None and bool(view.stored)


def file_tensors(model: Network) -> dict[str, Any]:
    """Return the tensors of the default file, by name; adapters of few-bit weights as factors."""
    view, tensors = model.program.find(Adaption), model.tensors
    if view is None:
        return tensors
    if not view.stored:
        return view.merge(model, requantize=False).tensors
    factors = _name_factors({n: pair for n, (_, *pair) in view.factors(tensors).items()}, model)
    norms = view.magnitudes(tensors)
    factors |= {magnitude_name(weight, module_name): norms[weight] for weight in norms}
    return {**view.without_factors(tensors), **factors}


def _name_factors(pairs: Mapping[str, Sequence[Any]], model: Network) -> dict[str, Any]:
    """Return the factors of each weight by their names in files, in the type that files have."""
    types = factor_types(pairs, model.graph, model.tensors)
    return {
        name: value.astype(types[weight])
        for weight, pair in pairs.items()
        for name, value in zip(factor_names(weight, module_name), pair, strict=True)
    }


def read_weight(model: Network, name: str) -> np.ndarray:
    """Return a weight with its adapter; one in few bits as float32."""
    view, tensors = model.program.find(Adaption), model.tensors
    if view is not None and name in view.layouts:
        view = dataclasses.replace(view, layouts={name: view.layouts[name]})
        if name not in view.stored:
            return to_host(to_array(view.read(tensors)[name]))
        (matrix,) = quantization.dequantize(model.graph, tensors, [name]).values()
        factors = view._arrays(model, tensors)[name]
        return matrix + (factors.change() if factors.scale is None else factors.change_of(matrix))
    if weights(model.graph, tensors)[name].storage:
        return quantization.dequantize(model.graph, tensors, [name])[name]
    return to_host(to_array(tensors[name]))


def _describe_losses(losses: Mapping[str, quantization.Loss]) -> str:
    """Describe the error of rounding with adapters, the worst matrices first."""
    worst = sorted(losses, key=lambda name: -losses[name].matrix)
    lines = [f"{n} {losses[n].matrix:.2g} ({losses[n].change:.2g})" for n in worst]
    lost = sum(loss.change > 0.5 for loss in losses.values())
    share = f"; most of the adapter of {format_count(lost, 'weight')} is lost" if lost else ""
    return (
        f"{format_count(len(losses), 'weight')} in few bits {'are' if len(losses) > 1 else 'is'} "
        "rounded anew with the adapters, with a relative error of the matrix (of its change) of "
        f"{list_some(lines, '')}{share}; adapters='nodes' loses nothing"
    )


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
    """The factors of the sum of matrix and change (DoRA), one for each output."""

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
    used = {*defined_names(result.graph)}
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
    uses_of = uses_by_tensor(graph, tensors)
    for weight, change in factors.items():
        pair = pairs[weight]
        if taken := writer.taken.intersection(pair):
            raise InputError(
                f"the adapter of '{weight}' would be called '{min(taken)}', and the file has "
                "another one of this name: merge it with adapters='merged', or save it apart with "
                "Adapters.save"
            )
        dtype = _float_type(weight, uses_of.get(weight, ()), tensors)
        writer.declare(pair, change, dtype, as_inputs)
        writer.add(weight, uses_of.get(weight, ()), change, pair)
    earlier = [renamed.get(n, n) for n in records.get(proto, records.ADAPTERS, list) or []]
    records.put(result, records.ADAPTERS, [*earlier, *added])
    del result.graph.node[:]
    result.graph.node.extend([*writer.first, *writer.nodes])
    return result


def factor_types(
    weights: Collection[str], graph: Graph, tensors: Mapping[str, Any]
) -> dict[str, np.dtype]:
    """Return the type that a file has the factors of each weight in."""
    uses_of = uses_by_tensor(graph, tensors)
    return {name: _float_type(name, uses_of.get(name, ()), tensors) for name in weights}


def _float_type(weight: str, uses: Sequence[Use], tensors: Mapping[str, Any]) -> np.dtype:
    """Return the type that a weight is computed with: its own, or that of its scales."""
    dtype = np.dtype(tensors[weight].dtype)
    if dtype.kind not in "iu" and dtype.itemsize > 1:
        return dtype
    for use in direct_uses(uses):
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
        self.nodes = [*map(deepcopy, graph.node)]
        self.by_output = {name: node for node in self.nodes for name in node.output if name}
        self.taken = {*defined_names(graph)}

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

    def add(self, weight: str, uses: Sequence[Use], change: Factors, pair: tuple[str, str]) -> None:
        final = [use for use in uses if not use.passes]
        if final and all(_takes_product(use, change) for use in final):
            flat = None if change.scale is None else change.scale.reshape(-1)
            scale = self._declare_scale(weight, flat, pair[0])
            for use in final:
                self._add_product(use, change, pair, scale)
            return
        direct = [use for use in uses if use.is_direct]
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
                f"the adapter of '{weight}' cannot be written as nodes at {uses[0].node.label}: "
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
