"""The file of a rounded network: its record, and integers for weights that are floats in training.

While a network is trained its weights are float tensors in front of a QuantizeLinear, so that the
graph computes with the values of the deployed file. The record says which values become
initializers when the file is saved (`fold`): integer weights, scales, and int32 biases. `unfold` is
the way back, for files of other quantizers, too.

A scale per output channel is free to take in another factor per output channel. So training keeps
the BatchNormalization, with statistics of the batch, behind the product with the rounded weight,
and the saved file has its factor f = scale / sqrt(var + epsilon) in the scales of the weight: the
integers stay those that were trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from jaxonnx._display import format_count
from jaxonnx._graph.ancestors import select_part
from jaxonnx._graph.bind import Graph, bind
from jaxonnx._graph.uses import uses, weights
from jaxonnx._io import records
from jaxonnx._io.protocol import File
from jaxonnx._io.protos import Editor, count_readers, remove_values, sort_nodes
from jaxonnx._rewrite.network import Network
from jaxonnx._run.scope import Context, run
from jaxonnx.errors import InputError
from jaxonnx.ops.contrib.moving_ranges import limits_of
from jaxonnx.quantization._qoperators import (
    ReplacedOperator,
    close_operators,
    has_quantized_operators,
)


@dataclass(frozen=True)
class Bias:
    """A bias that is stored as int32, whose scale is that of the activation times the weight's."""

    name: str
    """The bias in floating point."""
    stored: str
    """The int32 tensor in the saved file."""
    scale: str
    """The scale of the int32 tensor in the saved file."""
    scales: tuple[str, str]
    """The scales of the activation and of the weight."""


@dataclass(frozen=True)
class Record:
    """The record of quantized tensors in a file's metadata; all fields are names of values."""

    folds: tuple[str, ...] = ()
    """Computed values that become initializers when the file is saved."""
    scales: tuple[str, ...] = ()
    """The scales of weights and activations."""
    names: Mapping[str, str] = field(default_factory=dict)
    """From each integer weight to the float tensor that it is rounded from."""
    biases: tuple[Bias, ...] = ()
    """The biases that are stored as int32."""
    opened: tuple[ReplacedOperator, ...] = ()
    """Nodes that were operators on quantized tensors, and are so again in the saved file."""
    norms: tuple[str, ...] = ()
    """The outputs of BatchNormalizations that the saved file has in the scales of weights."""
    idle: tuple[str, ...] = ()
    """The results of Relu and Clip that the saved file lacks where a QuantizeLinear behind them has
    their limits."""
    positive: tuple[str, ...] = ()
    """Non-negative activations: their zero point is the least of their integers."""
    folded: bool = False
    """Whether the file is a saved one, in which integers are initializers."""
    learned: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """From each scale that is trained to its initial value and to the parameter that changes it."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Record:
        """Parse the record from its JSON entry.

        Raises:
          KeyError, TypeError, ValueError: it is malformed.
        """
        biases = (
            Bias(**{**bias, "scales": (bias["scales"][0], bias["scales"][1])})
            for bias in entry["biases"]
        )
        opened = tuple(ReplacedOperator(*map(str, fields)) for fields in entry.get("opened", ()))
        norms = tuple(map(str, entry.get("norms", ())))
        learned = {name: (pair[0], pair[1]) for name, pair in entry.get("learned", {}).items()}
        idle, positive = (tuple(map(str, entry.get(key, ()))) for key in ("idle", "positive"))
        names, folded = dict(entry["names"]), bool(entry["folded"])
        return cls(
            tuple(entry["folds"]),
            tuple(entry["scales"]),
            names,
            tuple(biases),
            opened,
            norms,
            idle,
            positive,
            folded,
            learned,
        )

    def write(self, proto: ModelProto) -> None:
        """Replace the record of a file."""
        fields = asdict(self)
        for name in ("idle", "positive", "learned"):
            if not fields[name]:
                del fields[name]
        records.put(proto, records.QUANTIZATION, fields)


def record_of(proto: ModelProto) -> Record | None:
    """Return the record of quantized tensors, None if the file has no record."""
    return records.get(proto, records.QUANTIZATION, Record.read)


class StoredTypes(NamedTuple):
    """The types that the QuantizeLinear nodes of a file round to, by NumPy's names."""

    weights: set[str]
    activations: set[str]
    blocks: set[int]
    """The block sizes of weights; 0 stands for weights without blocks."""


def stored_types(proto: ModelProto, tensors: Mapping[str, Any]) -> StoredTypes:
    """Return the types that a file rounds to; its weights are float tensors (not folded)."""
    entry = record_of(proto) or Record()
    types = StoredTypes(set(), set(), set())
    for node in proto.graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        point = tensors.get(node.input[2]) if len(node.input) > 2 else np.uint8(0)
        options = {part.name: helper.get_attribute_value(part) for part in node.attribute}
        if kind := options.get("output_dtype"):
            name = helper.tensor_dtype_to_np_dtype(kind).name
        else:
            name = "uint8" if point is None else np.dtype(point.dtype).name
        weight = node.output[0] in entry.names
        (types.weights if weight else types.activations).add(name)
        if weight:
            types.blocks.add(options.get("block_size", 0))
    return types


def is_quantized(model: Network) -> bool:
    """Check whether a model has weights in integers, or in front of QuantizeLinear in its file.

    The integers are behind DequantizeLinear or in operators on them.
    """
    entry = record_of(model.proto)
    if entry is None or entry.folded:
        weights = {*model.params}
        if any(
            n.op_type == "QuantizeLinear" and n.input[0] in weights for n in model.proto.graph.node
        ):
            return True
    stored = {name for name, x in model.tensors.items() if np.dtype(x.dtype).kind not in "fcb"}
    return has_quantized_operators(model.proto.graph) or any(
        node.op.dequantizes and node.inputs[0] in stored for node in model.graph.nodes
    )


_SMALL_TYPES = ("int2", "uint2", "int4", "uint4", "float8_e4m3fn", "float8_e5m2")
"""Types that only weights are stored in, so that a tensor of one needs no look at its readers."""


def fold(proto: ModelProto, graph: Graph, values: Mapping[str, np.ndarray]) -> ModelProto:
    """Store quantized weights, scales and biases as initializers, as a deployed file has them.

    The nodes that compute them, and the float tensors that only these read, are removed.

    Args:
      proto: the file, with the data of its tensors; it is changed in place.
      graph: its main graph, bound.
      values: the values of its named tensors.

    Returns:
      `proto`.
    """
    entry = record_of(proto)
    if entry is None or entry.folded:
        return proto
    main, entry = proto.graph, _restrict(entry, proto.graph, values)
    # 1. compute the integers of the weights, in place of the nodes that do
    names = entry.folds
    part = select_part(graph, names)
    folded = dict(zip(names, map(np.asarray, run(part, {}, Context(values))), strict=True))
    computed = {name for node in part.nodes for name in node.outputs}
    candidates = {name for node in part.nodes for name in node.reads}
    remove_values(main, computed)
    main.initializer.extend(numpy_helper.from_array(x, name) for name, x in folded.items())
    tensors = {**values, **folded}
    # 2. fold BatchNormalizations that training kept, store biases in int32, drop idle limits
    norms = [node for node in main.node if node.output[0] in entry.norms]
    convs = [node for node in main.node if {*node.output} & {norm.input[0] for norm in norms}]
    candidates.update(name for node in (*norms, *convs) for name in node.input[1:])
    changed = fold_rounded_norms(main, entry.norms, tensors)
    remove_values(main, changed)
    main.initializer.extend(numpy_helper.from_array(x, name) for name, x in changed.items())
    _store_biases(main, entry.biases, tensors | changed)
    candidates |= _remove_idle(main, entry.idle, tensors | changed)
    # 3. remove the float tensors that nothing reads any more
    remove_values(main, candidates - count_readers(main).keys() - folded.keys())
    records.rename_sparse(
        proto, {entry.names[stored]: stored for stored in entry.folds if stored in entry.names}
    )
    # 4. quantized operators in place of the pairs around them
    close_operators(main, entry.opened)
    sort_nodes(main)
    replace(entry, norms=(), idle=(), positive=(), folded=True, learned={}).write(proto)
    return proto


def _restrict(entry: Record, graph: GraphProto, values: Mapping[str, np.ndarray]) -> Record:
    """Restrict a record to the tensors that a graph still has, after a selection of outputs.

    A BatchNormalization stays if the result of its convolution is an output, too, and so does its
    B in floating point.
    """
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {value.name for value in graph.output}
    norms = {name: makers[name].input for name in entry.norms if name in makers}
    folded = {name for name, inputs in norms.items() if inputs[0] not in outputs}
    floats = {inputs[2] for name, inputs in norms.items() if name not in folded}
    values_left = makers.keys() | values.keys()
    return replace(
        entry,
        folds=tuple(name for name in entry.folds if name in makers),
        scales=tuple(name for name in entry.scales if name in values_left),
        names={stored: name for stored, name in entry.names.items() if stored in makers},
        biases=tuple(
            b
            for b in entry.biases
            if values_left.issuperset((b.name, *b.scales)) and b.name not in floats
        ),
        norms=tuple(name for name in entry.norms if name in folded),
    )


def _remove_idle(
    graph: GraphProto, results: tuple[str, ...], tensors: Mapping[str, np.ndarray]
) -> set[str]:
    """Remove each Relu and Clip whose limits the QuantizeLinear that alone reads it has, too.

    Args:
      results: of the nodes that may be removed.

    Returns:
      The names that the removed nodes read.
    """
    producers = {node.output[0]: node for node in graph.node if node.output[0] in results}
    times = count_readers(graph)
    names: set[str] = set()
    removed: set[str] = set()
    for node in graph.node:
        before = producers.get(node.input[0]) if node.op_type == "QuantizeLinear" else None
        if before is None or times[node.input[0]] > 1 or len(node.input) < 3:
            continue
        scale, point = (tensors.get(name) for name in node.input[1:3])
        limits = _limits_of(before, tensors)
        if scale is None or point is None or scale.size > 1 or limits is None:
            continue
        least, _, most = limits_of(point.dtype)
        with np.errstate(divide="ignore"):
            low, high = np.rint(np.asarray(limits, np.float32) / scale) + point.astype(np.float32)
        if low <= least and most <= high:
            node.input[0] = before.input[0]
            names.update(before.input)
            removed.update(before.output)
    remove_values(graph, removed)
    return names


def _limits_of(node: NodeProto, tensors: Mapping[str, np.ndarray]) -> tuple[Any, Any] | None:
    """Return the least and the greatest number of a Relu or Clip; None if they are computed."""
    limits = (
        {"min": -np.inf, "max": np.inf} if node.op_type == "Clip" else {"min": 0, "max": np.inf}
    )
    limits |= {part.name: helper.get_attribute_value(part) for part in node.attribute}
    stored = {key: name for key, name in zip(limits, node.input[1:], strict=False) if name}
    if any(name not in tensors for name in stored.values()):
        return None
    limits |= {key: tensors[name].item() for key, name in stored.items()}
    return limits["min"], limits["max"]


def fold_rounded_norms(
    graph: GraphProto, norms: Iterable[str], values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Fold BatchNormalizations into the scales of quantized weights and biases of convolutions.

    Args:
      graph: a graph whose integer weights are initializers; its nodes are changed in place.
      norms: the outputs of the BatchNormalizations.
      values: of the initializers.

    Returns:
      New values of scales, biases (which have the name of the BatchNormalization's B), and integer
      weights, which change their sign where f < 0.
    """
    makers = {name: node for node in graph.node for name in node.output}
    changed: dict[str, np.ndarray] = {}
    removed = []
    for name in norms:
        norm = makers[name]
        conv = makers[norm.input[0]]
        dequantize = makers[conv.input[1]]
        stored, scale, *point = dequantize.input
        # the factor and the shift by channel, in float64; the shift is stored in the file's type
        epsilon = next((part.f for part in norm.attribute if part.name == "epsilon"), 1e-5)
        gain, b, mean, var = (values[n].astype(np.float64) for n in norm.input[1:5])
        factor = gain / np.sqrt(var + epsilon)
        bias = sum(values[n].astype(np.float64) for n in conv.input[2:])
        shift = ((bias - mean) * factor + b).astype(values[norm.input[2]].dtype)
        # a scale of 0 has no inverse, which the scale of an int32 bias needs: the integers are 0
        width = np.where(factor == 0, 1, np.abs(factor))
        changed[scale] = (values[scale] * width).astype(values[scale].dtype)
        changed[stored] = _turn(values[stored], np.sign(factor), *(values[n] for n in point))
        changed[norm.input[2]] = shift
        conv.input[2:] = [norm.input[2]]
        conv.output[0], norm.output[0] = name, conv.output[0]
        removed.append(norm.output[0])
    remove_values(graph, removed)
    return changed


def _turn(stored: np.ndarray, sign: np.ndarray, point: np.ndarray | None = None) -> np.ndarray:
    """Multiply the distances of integers (outputs, ...) from their zero point by -1, 0 or 1."""
    if (sign == 1).all():
        return stored
    rows = (-1, *(1,) * (stored.ndim - 1))
    middle = np.float32(0) if point is None else point.astype(np.float32).reshape(rows)
    moved = middle + sign.astype(np.float32).reshape(rows) * (stored.astype(np.float32) - middle)
    integer = jnp.issubdtype(stored.dtype, jnp.integer)
    limits = (ml_dtypes.iinfo if integer else ml_dtypes.finfo)(stored.dtype)
    # 127 for the 128 that an int8 of -128 would become
    return np.clip(moved, np.float32(limits.min), np.float32(limits.max)).astype(stored.dtype)


def _store_biases(
    graph: GraphProto, biases: Iterable[Bias], tensors: Mapping[str, np.ndarray]
) -> None:
    """Replace float biases by int32 tensors, their scales and DequantizeLinear nodes of the two.

    A bias that has no room in int32 at this scale stays as it is.
    """
    domain = next((n.domain for n in graph.node if n.op_type == "DequantizeLinear"), "")
    removed, initializers, nodes = [], [], []
    for bias in biases:
        # of the activation, shape (), and of the weight, shape () or (outputs,), where a
        # ConvTranspose has the outputs of one group
        x_scale, w_scale = (tensors[name] for name in bias.scales)
        value, scale = tensors[bias.name], np.asarray(x_scale * w_scale, np.float32)
        if scale.ndim and value.ndim:
            scale = np.tile(scale, max(value.shape[-1] // scale.size, 1))
        # float64: float32 cannot hold every int32
        stored = np.rint(value.astype(np.float64) / scale)
        if np.abs(stored).max(initial=0) > np.iinfo(np.int32).max:
            continue
        removed.append(bias.name)
        initializers.append(numpy_helper.from_array(stored.astype(np.int32), bias.stored))
        initializers.append(numpy_helper.from_array(scale, bias.scale))
        options: dict[str, Any] = {"axis": stored.ndim - 1} if scale.ndim else {}
        inputs, label = [bias.stored, bias.scale], f"{bias.name}_DequantizeLinear"
        options |= {"domain": domain} if domain else {}
        nodes.append(helper.make_node("DequantizeLinear", inputs, [bias.name], label, **options))
    remove_values(graph, removed)
    graph.initializer.extend(initializers)
    graph.node.extend(nodes)


def unfold(
    proto: ModelProto,
    graph: Graph,
    tensors: Mapping[str, Any],
    opened: tuple[ReplacedOperator, ...],
) -> tuple[ModelProto, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Undo `fold`: replace integer weights by float tensors in front of a QuantizeLinear.

    Weights are integer tensors that an operator reads as a parameter behind a DequantizeLinear.
    Biases of int32 become float tensors without rounding. `fold` stores all of them as before.

    Args:
      proto: the file, of jaxonnx or of another quantizer.
      graph: its main graph, bound.
      tensors: the values of its named tensors.
      opened: the nodes that `open_operators` replaced, for the record.

    Returns:
      The new file, the float tensors by name, and zero points that it adds, which set the type that
      a QuantizeLinear rounds to.
    """
    # 1. the integers that weights are stored in, and the record of what `fold` had
    stored = {
        use.name
        for use in uses(graph, tensors)
        if use.node.op.role(use.position) == "param"
        and np.dtype(tensors[use.name].dtype).kind in "iu"
    } | {n for n, x in tensors.items() if x.dtype.name in _SMALL_TYPES}
    file = Editor(proto, tensors)
    entry = record_of(proto) or Record()
    recorded = {bias.stored: bias for bias in entry.biases}
    producers = {node.output[0]: node for node in proto.graph.node if node.output}
    floats: dict[str, np.ndarray] = {}
    points: dict[str, np.ndarray] = {}
    folds, names, biases = [], dict(entry.names), []
    times = count_readers(proto.graph)
    scales_of_biases = _find_scales_of_biases(proto.graph, producers)
    values = {n for node in proto.graph.node for n in node.output}
    nodes = [
        node
        for node in file.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in stored
    ]
    part = select_part(graph, [node.output[0] for node in nodes])
    results = map(np.asarray, run(part, {}, Context(tensors)))
    removed, inverses, points_of_biases = [], [], set()
    # 2. each becomes a float tensor: a bias alone, a weight in front of a QuantizeLinear
    for node, value in zip(nodes, results, strict=True):
        name, output = node.input[0], node.output[0]
        if tensors[name].dtype == np.int32:
            bias = recorded.get(name)
            if bias is None and output in scales_of_biases:
                bias = Bias(output, name, node.input[1], scales_of_biases[output])
            if bias is None or max(times[part] for part in node.input[:2]) > 1:
                continue  # it stays as it is: something else reads its numbers or its scale
            biases.append(bias)
            removed += [name, node.input[1], output]
            points_of_biases.update(node.input[2:])
            floats[output] = value
            continue
        if name in folds:  # another node reads the same integers
            continue
        # without onnxruntime's suffix, if that name is free
        short = name.removesuffix("_quantized")
        is_free = short != name and short not in {*tensors, *values}
        weight = names.setdefault(name, short if is_free else f"{name}_float")
        # rounding the dequantized weight with the same parameters gives the integers again
        inverse = NodeProto()
        inverse.CopyFrom(node)
        inverse.op_type, inverse.name = "QuantizeLinear", f"{weight}_QuantizeLinear"
        inverse.input[0], inverse.output[0] = weight, name
        if len(node.input) < 3:  # QuantizeLinear alone would give uint8
            point = f"{weight}_zero_point_of_type"
            inverse.input.append(point)
            points[point] = np.zeros(tensors[node.input[1]].shape, tensors[name].dtype)
        removed.append(name)
        inverses.append(inverse)
        folds.append(name)
        floats[weight] = value
    # 3. some exporters leave weights in floating point, and so does `fold` then; a scalar is none
    names |= {
        node.output[0]: node.input[0]
        for node in proto.graph.node
        if node.op_type == "QuantizeLinear" and np.ndim(tensors.get(node.input[0], 0))
    }
    # 4. the file with these tensors, and its record
    remove_values(file.graph, removed)
    remove_values(file.graph, points_of_biases - count_readers(file.graph).keys())
    file.graph.node.extend(inverses)
    for name, value in (floats | points).items():
        file.add_tensor(name, value)
    result = file.finish()
    pairs = [n for n in result.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    scales = entry.scales or [n.input[1] for n in pairs if n.input[1] in tensors]
    positive = tuple(
        node.input[0]
        for node in proto.graph.node
        if node.op_type == "QuantizeLinear" and len(node.input) > 2 and node.input[0] in producers
        if (point := tensors.get(node.input[2])) is not None and point.size == 1
        if int(point.item()) == limits_of(point.dtype)[0]
    )
    entry = Record(
        tuple(folds), tuple(dict.fromkeys(scales)), names, tuple(biases), opened, positive=positive
    )
    records.rename_sparse(result, names)
    entry.write(result)
    return result, floats, points


def join_pairs(proto: ModelProto, tensors: Mapping[str, Any]) -> ModelProto:
    """Let each DequantizeLinear read the QuantizeLinear before it, at the same scale.

    PyTorch's converted models have a Cast to the same type between the two, which no gradient
    passes, and two constants for each scale and zero point, which would be trained apart.

    Returns:
      The file without these, or the same object if it has none.
    """
    file = Editor(proto, tensors)
    producers = {name: node for node in file.graph.node for name in node.output}
    joined: set[str] = set()
    for node in file.graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        before, casts = producers.get(node.input[0]), []
        while before is not None and before.op_type == "Cast":
            casts += before.output
            before = producers.get(before.input[0])
        if before is None or before.op_type != "QuantizeLinear":
            continue
        values = [[tensors.get(name) for name in x.input[1:]] for x in (before, node)]
        if [*before.input[1:]] == [*node.input[1:]] and not casts:
            continue
        # of the same type, so that casts between have it, too
        if len(values[0]) == len(values[1]) and all(
            a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b)
            for a, b in zip(*values, strict=True)
        ):
            joined.update((*casts, *node.input[1:]))
            node.input[:] = [before.output[0], *before.input[1:]]
    if not joined:
        return proto
    remove_values(file.graph, joined - count_readers(file.graph).keys())
    return file.finish()


def _find_scales_of_biases(
    graph: GraphProto, producers: Mapping[str, NodeProto]
) -> dict[str, tuple[str, str]]:
    """Return the scales of the dequantized operands of products, by the third input, the bias."""
    result: dict[str, tuple[str, str]] = {}
    for node in graph.node:
        parts = [producers.get(name) for name in node.input[:2]]
        scales = [x.input[1] for x in parts if x is not None and x.op_type == "DequantizeLinear"]
        if len(node.input) > 2 and len(scales) == 2:
            result.setdefault(node.input[2], (scales[0], scales[1]))
    return result


def dequantize_weights(file: File) -> File:
    """Replace each DequantizeLinear of stored tensors with a floating-point tensor of its result.

    A new tensor has the name of its node's result.

    Raises:
      InputError: no DequantizeLinear reads only stored tensors.
    """
    proto, tensors = file.proto, file.tensors
    graph = bind(proto, proto.graph, tensors.keys())
    nodes = [n for n in graph.nodes if n.op.dequantizes and tensors.keys() >= {*n.reads}]
    names = tuple(node.outputs[0] for node in nodes)
    if not names:
        raise InputError(
            "dequantize=True: the file has no weights behind DequantizeLinear; print(model) shows "
            "what is trained"
        )
    values = run(select_part(graph, names), {}, Context(tensors))
    new = dict(zip(names, map(np.asarray, values), strict=True))
    replaced = {node.index for node in nodes}
    others = {n for node in graph.nodes if node.index not in replaced for n in node.reads}
    others.update((*graph.outputs, *(value.name for value in proto.graph.input)))
    unused = {name for node in nodes for name in node.reads} - others
    edited = Editor(proto)
    remove_values(edited.graph, {*new, *unused})
    for name, value in new.items():
        edited.add_tensor(name, value)
    result = edited.proto
    records.put(result, records.QUANTIZATION, None)  # it speaks of tensors that are gone
    records.rename_sparse(result, {node.inputs[0]: node.outputs[0] for node in nodes})
    remaining = {name: value for name, value in tensors.items() if name not in unused}
    return file._replace(proto=result, tensors=remaining | new)


def describe_integers(graph: Graph, tensors: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes for the user on how the quantized weights and operators of a file are trained."""
    stored = {
        name: weight.storage for name, weight in weights(graph, tensors).items() if weight.storage
    }
    if stored:
        first, storage = next(iter(stored.items()))
        yield (
            f"{format_count(len(stored), 'weight')} in few bits ({first}: {storage}, ...) "
            f"{'are' if len(stored) > 1 else 'is'} not trained; lora=jaxonnx.LoRA(rank=8) trains "
            "low-rank changes beside them"
        )
    dequantized = [n for n in graph.nodes if n.op.dequantizes and tensors.keys() >= {*n.reads}]
    quantized = [n for n in graph.nodes if n.op.result is not None]
    if quantized:
        yield (
            f"weights of operators on integers ({quantized[0].op.name}, ...) are not trained; "
            "jaxonnx.train(..., quantize=) trains them at their own scales"
        )
    if dequantized:
        yield (
            f"{format_count(len(dequantized), 'tensor')} behind DequantizeLinear: "
            "jaxonnx.train(..., quantize=) trains them at their own scales, "
            "jaxonnx.load(path, dequantize=True) makes trained floating-point tensors of them"
        )
    products = Counter(n.op.name for n in graph.nodes if n.op.is_integer)
    if products:
        listed = ", ".join(f"{name} {count}" for name, count in products.items())
        yield (
            f"operators that compute with integers ({listed}) have no gradient: train the file "
            "from before quantization"
        )
