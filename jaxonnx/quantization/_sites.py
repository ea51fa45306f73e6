"""Find the weights and activations that a scheme quantizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import TensorProto

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.roles import graph_tensors
from jaxonnx._graph.select import select
from jaxonnx._graph.uses import uses
from jaxonnx._rewrite.masks import describe_masks
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError
from jaxonnx.quantization._qoperators import SAME_NUMBERS
from jaxonnx.quantization._scheme import Quantization, WeightSite

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that runtimes compute with integers if all of their inputs are quantized."""
_RECURRENT = ("RNN", "GRU", "LSTM")
"""Operators of which only the weights are quantized."""
_ELEMENTWISE = ("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool")
"""Operators that onnxruntime computes with integers where inputs and results are quantized."""
_ACTIVATIONS = ("Relu", "Clip")
"""Operators that runtimes fuse with the product or sum before and the QuantizeLinear behind."""


@dataclass(frozen=True)
class Bias:
    """A bias that a runtime adds to sums of integers, as int32 in units of both factors' scales."""

    name: str
    value: str
    """The activation that the node multiplies."""
    weight: str
    """The weight that it is multiplied by."""


@dataclass(frozen=True)
class Sites:
    """The weights, activations and biases of a graph that a scheme quantizes."""

    weights: Mapping[str, WeightSite]
    """The weights by name."""
    reads: Mapping[tuple[str, int], str]
    """The activation that a node reads quantized, by (the node's first output, input position)."""
    shared: Mapping[str, str]
    """For an activation with the scale of another one (the result of a MaxPool, say), the other."""
    biases: tuple[Bias, ...]
    outputs: tuple[str, ...] = ()
    """Outputs of the graph that are quantized as well."""

    @property
    def values(self) -> tuple[str, ...]:
        """All quantized activations, each once, in the order of the nodes."""
        return tuple(dict.fromkeys((*self.reads.values(), *self.outputs)))

    @property
    def range_names(self) -> tuple[str, ...]:
        """The activations that have a range of their own."""
        return tuple(name for name in self.values if name not in self.shared)


def choose_types(
    model: Network,
    dtypes: Callable[[], Mapping[str, np.dtype]],
    scheme: Quantization,
    types: Mapping[str, str | None],
) -> tuple[Sites, dict[str, Quantization]]:
    """Find the quantized tensors, and the scheme of each weight by its type.

    Args:
      model, dtypes: as for `find_sites`.
      scheme: what to quantize.
      types: other types of some weights than the scheme's, by name. None keeps floating point.

    Raises:
      InputError: as from `find_sites`, or onnxruntime computes products with a weight wrongly.
    """
    sites = find_sites(model, dtypes, scheme)
    kinds = {name: types.get(name, scheme.weights) for name in sites.weights}
    in_int2 = {name: sites.weights[name] for name, kind in kinds.items() if kind == "int2"}
    if wrong := find_wrong_int2(model.graph, model.tensors, in_int2, scheme.block):
        raise InputError(
            f"onnxruntime 1.32 computes products with {', '.join(map(repr, wrong))} in int2 "
            "wrongly or refuses them: the number of outputs must be a multiple of 4, and a "
            "Transpose needs block=; leave them out with skip=, or pass weights='int4' or max_loss="
        )
    of_type = {kind: with_weights(scheme, kind) for kind in kinds.values() if kind is not None}
    schemes = {name: of_type[kind] for name, kind in kinds.items() if kind is not None}
    if len(schemes) < len(kinds):
        chosen = with_weights(
            scheme, scheme.weights, where=lambda name, _: name in schemes, skip=None
        )
        sites = find_sites(model, dtypes, chosen)
    return sites, schemes


def with_weights(scheme: Quantization, kind: str, **changes: Any) -> Quantization:
    """Return a scheme with one type of weights, in place of a choice (`max_loss`).

    A wider type that takes no blocks (`block`) has one scale for each output channel.
    """
    free: dict[str, Any] = {"max_loss": None}
    if kind in ("int8", "uint8") and kind != scheme.weights and scheme.computes_integers:
        free["block"] = None
    return replace(scheme, weights=kind, **free, **changes)  # type: ignore[arg-type]


def find_sites(
    model: Network, dtypes: Callable[[], Mapping[str, np.dtype]], scheme: Quantization
) -> Sites:
    """Find the weights and values of a network that a scheme quantizes.

    Factors of adapters are left out unless `where` names them, and with them the sums that their
    products are added in. Constants, which no training would change, like the frequencies of rotary
    embeddings, stay in floating point.

    Args:
      model: the network.
      dtypes: returns those of all values of the main graph that are arrays (`value_types`); it is
        called where activations are quantized.
      scheme: what to quantize, and in the manner of which runtime (`dialect`).

    Raises:
      InputError: there is no weight to quantize, `where` or `skip` match nothing, or onnxruntime
        refuses products of integers with 8-bit weights in blocks.
    """
    # 1. the weights, of which `where` and `skip` choose
    graph, tensors, factors = model.graph, model.tensors, model._factors
    constants = model.program.constants
    weights = {n: s for n, s in find_weights(graph, tensors).items() if n not in constants}
    if scheme.where is not None or scheme.skip is not None or factors:
        candidates = {name: tensors[name] for name in weights}
        kind = "weight that can be quantized"
        chosen = weights.keys() - factors
        if scheme.where is not None:
            chosen = select(scheme.where, candidates, "where", kind=kind, places=model._places)
        if scheme.skip is not None:
            chosen -= select(scheme.skip, candidates, "skip", kind=kind, places=model._places)
        weights = {name: site for name, site in weights.items() if name in chosen}
    if not weights:
        raise InputError(_explain_lack(graph, tensors))
    # without JAX's 64-bit types they are float32 here, and not in the file
    doubles = {x.name for x in model.proto.graph.initializer if x.data_type == TensorProto.DOUBLE}
    if wide := [name for name in weights if name in doubles]:
        raise InputError(_explain_type(wide[0], "float64"))
    if scheme.activations is None:
        return Sites(weights, {}, {}, ())
    if scheme.block and scheme.computes_integers and scheme.weights in ("int8", "uint8"):
        # it makes MatMulIntegerToFloat of such a MatMul, which takes no blocks
        products = [node for node in graph.nodes if _is(node, ("MatMul",))]
        if wrong := [f"'{n}'" for node in products for n in node.inputs if n in weights]:
            raise InputError(
                "onnxruntime 1.32 refuses products of quantized activations with "
                f"{', '.join(wrong)} in blocks of 8 bits: leave out block=, or pass "
                "activations=None or weights='int4'"
            )
    # 2. the values that products read, or (in the manner of QNN) any node
    types = dtypes()
    quantized = {*weights}  # with their views (Transpose, Reshape, Cast...)
    for node in graph.nodes:
        if node.op.view and node.inputs[0] in quantized:
            quantized.update(node.outputs)

    def is_activation(name: str) -> bool:
        """Check whether a value is float32 and computed from the inputs."""
        return name not in tensors and name not in quantized and types.get(name) == np.float32

    reads: dict[tuple[str, int], str] = {}
    biases = []
    left_out = {*factors} - weights.keys()
    floats = {*left_out}  # with their products, up to the sums with those of the weights
    for node in graph.nodes:
        if not floats.isdisjoint(node.inputs):
            is_product = not left_out.isdisjoint(node.inputs)
            floats.update(
                node.outputs if is_product or floats | {*tensors} >= {*node.inputs} else ()
            )
            continue
        positions = []
        if _is(node, PRODUCTS):
            operands = node.inputs[:2]
            positions = [i for i, name in enumerate(operands) if is_activation(name)]
            rest = [name for i, name in enumerate(operands) if i not in positions]
            positions = positions if quantized.issuperset(rest) else []
        elif scheme.dialect == "qnn" and node.body is None and not node.subgraphs:
            positions = [i for i, name in enumerate(node.inputs) if name and is_activation(name)]
        reads |= {(node.outputs[0], i): node.inputs[i] for i in positions}
        if positions and node.op.name in PRODUCTS and len(node.inputs) == 3:
            value, weight, bias = node.inputs
            if bias not in tensors or tensors[bias].dtype != np.float32 or weight not in weights:
                continue
            # a number for each output along the last axis; that of a Gemm may also have one for
            # each row, or be a matrix or a single number
            shape, outputs = tensors[bias].shape, tensors[weight].shape[weights[weight].output]
            if node.op.name == "ConvTranspose":  # its weight has the outputs of a group
                outputs *= node.attributes.get("group", 1)
            if shape[-1:] == (outputs,) == (math.prod(shape),):
                biases.append(Bias(bias, value, weight))
    if scheme.dialect == "onnxruntime":
        _add_reads(graph, tensors, reads, is_activation, floats)
    # 3. the biases that become int32: nothing else reads them
    times = Counter(name for node in graph.nodes for name in node.reads)
    alone = tuple(
        bias
        for bias in biases
        if times[bias.name] == 1
        # the int32 bias is in units of input scale * weight scale, one for each output channel;
        # with blocks along the inputs a channel has several weight scales
        if not (scheme.block and weights[bias.weight].in_blocks)
    )
    # 4. the values with a range, and those that share one with the value they have numbers of
    outputs: tuple[str, ...] = ()
    if scheme.dialect == "qnn":
        outputs = tuple(n for n in graph.outputs if n in graph.producers and is_activation(n))
    values = {*reads.values(), *outputs}
    shared = {
        name: node.inputs[0]
        for node in graph.nodes
        if _keeps_numbers(node, tensors) and node.inputs[0] in values
        for name in values.intersection(node.outputs)
    }
    return Sites(weights, reads, shared, () if scheme.dialect == "tensorrt" else alone, outputs)


def value_types(model: Network, inputs: Sequence[Any]) -> dict[str, np.dtype]:
    """Return the dtypes of the values of the main graph that are arrays, by abstract evaluation.

    Args:
      inputs: one batch, in the order of the model's inputs.
    """
    names = [value.name for value in model.inputs]
    results = [name for node in model.graph.nodes for name in node.outputs if name]
    program = model.program.with_values(results)

    def evaluate(params, state, inputs):
        outputs = program.evaluate(params, state, dict(zip(names, inputs, strict=True)))
        return [x if isinstance(x, jax.Array | np.ndarray) else None for x in outputs]

    shapes = jax.eval_shape(evaluate, model.params, model.state, tuple(inputs))
    types = {
        name: np.dtype(x.dtype)
        for name, x in zip(results, shapes[len(model.graph.outputs) :], strict=True)
        if x is not None
    }
    pairs = zip(names, inputs, strict=True)
    return types | {name: np.dtype(jnp.result_type(x)) for name, x in pairs}


_CURES = {
    "float16": "jaxonnx.convert(model, 'float32') first",
    "bfloat16": "export it in float32",
    "float64": "quantize the file in float32 that it was made of, or export it again in float32",
}
"""Remedies for networks whose weights are of another type than float32."""


def _explain_type(name: str, kind: str) -> str:
    return (
        f"the weights are {kind}, as '{name}' is, and runtimes have integers for networks in "
        f"float32: {_CURES[kind]}"
    )


def _explain_lack(graph: Graph, tensors: Mapping[str, Any]) -> str:
    """Say why there is no weight to quantize."""
    source = "quantize the file in floating point that it was made of"
    for node in graph.nodes:
        if _is(node, ("ConvInteger", "MatMulInteger")):
            return (
                f"{node.label}: the file is quantized dynamically, by scales that each call "
                f"computes and training cannot learn: {source}"
            )
        readers = graph.readers.get(node.outputs[0], ())
        if _is(node, ("Clip",)) and any(_is(other, ("DequantizeLinear",)) for other in readers):
            return (
                f"{node.label} limits integers in front of DequantizeLinear, as "
                "Brevitas exports fewer than 8 bits and narrow ranges; no gradient passes it: "
                f"{source}, with weights='int4' for instance"
            )
    if masked := describe_masks(graph, tensors):
        return f"there is no weight to quantize: {masked}"
    for use in uses(graph, tensors):
        kind = np.dtype(tensors[use.name].dtype)
        product = use.node.op.name in (*PRODUCTS, *_RECURRENT) and not use.node.op.domain
        if product and use.matrix is not None and use.name in graph.weights:
            if kind.name in _CURES:
                return _explain_type(use.name, kind.name)
            if kind == np.float32 and use.outer is not use.node:
                return (
                    f"{use.outer.label}: only a function or a subgraph multiplies by '{use.name}', "
                    "and weights of the main graph are quantized; "
                    "onnx.inliner.inline_local_functions(model) puts functions into it"
                )
    return (
        "there is no float32 weight of Conv, ConvTranspose, Gemm, MatMul, RNN, GRU or LSTM to "
        "quantize; print(model) lists the tensors"
    )


def _add_reads(
    graph: Graph,
    tensors: Mapping[str, Any],
    reads: dict[tuple[str, int], str],
    is_activation: Callable[[str], bool],
    floats: Set[str],
) -> None:
    """Let further nodes read quantized values, so that onnxruntime computes with integers.

    It has no Conv of integers with a result in floating point, so every reader of a Conv reads it
    quantized. Sums, pools and operators that only move numbers are computed with integers if all
    readers of their results read these quantized.

    Args:
      graph, tensors: the network.
      reads: as in `Sites`, of the products; changed in place.
      floats: values whose readers stay in floating point.
    """

    def result(node: Node) -> str:
        """Return the result of a node, or of the activation function that alone reads it."""
        name = node.outputs[0]
        while name not in graph.outputs and len(after := graph.readers.get(name, ())) == 1:
            if not _is(after[0], _ACTIVATIONS):
                break
            name = after[0].outputs[0]
        return name

    def places(node: Node, name: str) -> list[tuple[str, int]]:
        """List the places at which a node reads a value; -1 stands for its subgraphs."""
        positions = [i for i, x in enumerate(node.inputs) if x == name] or [-1]
        return [(node.outputs[0], i) for i in positions]

    def is_quantized(name: str) -> bool:
        """Check whether every reader of a value reads it quantized."""
        reading = [place for node in graph.readers.get(name, ()) for place in places(node, name)]
        return name not in graph.outputs and {*reading} <= reads.keys()

    for node in graph.nodes:
        if _is(node, ("Conv",)) and (node.outputs[0], 0) in reads:
            name = result(node)
            for reader in graph.readers.get(name, ()) if name not in graph.outputs else ():
                product = _is(reader, PRODUCTS) or _is_misfused(reader)
                if not product and floats.isdisjoint(reader.inputs):
                    reads |= {place: name for place in places(reader, name) if place[1] >= 0}
    for node in reversed(graph.nodes):  # so that this passes through chains
        moves = _keeps_numbers(node, tensors)
        if not (moves or _is(node, _ELEMENTWISE)) or not floats.isdisjoint(node.inputs):
            continue
        if _is_misfused(node):
            continue
        operands = node.inputs[: 1 if moves else None]
        results = [*filter(is_activation, node.outputs)] if moves else [result(node)]
        if all(map(is_activation, operands)) and all(map(is_quantized, results)):
            reads |= {(node.outputs[0], i): name for i, name in enumerate(operands)}


def find_wrong_int2(
    graph: Graph, tensors: Mapping[str, Any], weights: Mapping[str, WeightSite], block: int | None
) -> list[str]:
    """Find the weights that onnxruntime 1.32 with its optimizations does not compute in int2.

    It makes MatMulNBits of DequantizeLinear and MatMul, or Gemm without transB, and packs rows of
    N % 4 != 0 numbers wrongly. A Transpose behind an int2 tensor it cannot fold.
    """
    products = [node for node in graph.nodes if _is(node, ("MatMul", "Gemm"))]
    fused = {node.inputs[1] for node in products if not node.attributes.get("transB")}
    direct = {name for node in products for name in node.inputs}
    return [
        name
        for name, site in weights.items()
        if site.in_blocks and tensors[name].ndim == 2
        if (name in fused and tensors[name].shape[site.output] % 4)
        or (name not in direct and not block)
    ]


def find_weights(graph: Graph, tensors: Mapping[str, Any]) -> dict[str, WeightSite]:
    """Find the float32 weights of products and recurrences that can be quantized.

    A weight that a subgraph or a function body stores is left out: nodes are inserted into the main
    graph only. One of the main graph that a subgraph captures is rounded for both.
    """
    inner = {
        name
        for node in graph.nodes
        for g in (*node.subgraphs, *([] if node.body is None else [node.body]))
        for name in graph_tensors(g)
    }
    sites = {}
    for use in uses(graph, tensors):
        place, name = use.matrix, use.name
        product = _is(use.node, (*PRODUCTS, *_RECURRENT)) and use.outer is use.node
        if not product or place is None or name in inner:
            continue
        if name in sites:
            turned = use.node.op.name == "MatMul" and place.output != sites[name].output
            sites[name] = replace(sites[name], turned=sites[name].turned or turned)
            continue
        if tensors[name].dtype == np.float32 and name in graph.weights and tensors[name].size:
            in_blocks = use.node.op.name in ("Gemm", "MatMul")
            stacked = in_blocks and tensors[name].ndim > 2
            sites[name] = WeightSite(name, place.output, place.input, in_blocks, stacked)
    return sites


def _is(node: Node, names: tuple[str, ...]) -> bool:
    """Check whether a node is one of these operators of the default domain."""
    return node.op.name in names and not node.op.domain and node.body is None


def _keeps_numbers(node: Node, tensors: Mapping[str, Any]) -> bool:
    """Check whether the results have no numbers beyond those of the first input and 0."""
    if _is(node, ("Pad",)):
        values = [tensors.get(name) for name in node.inputs[2:3] if name]
        zero = all(value is not None and not np.any(value) for value in values)
        return zero and not node.attributes.get("value")
    # beyond a cropped image, and between numbers of a cubic spline, are others
    adds = node.attributes.get("extrapolation_value") or node.attributes.get("mode") == "cubic"
    return _is(node, SAME_NUMBERS) and not adds


def _is_misfused(node: Node) -> bool:
    """Check whether onnxruntime (1.32) refuses a node of integers, or computes another one."""
    attributes = node.attributes
    dilated = {*(attributes.get("dilations") or (1,))} != {1}
    counts = attributes.get("ceil_mode") and attributes.get("count_include_pad")
    return _is(node, ("AveragePool",)) and bool(dilated or counts)
