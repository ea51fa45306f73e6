"""QuantizeLinear and DequantizeLinear in a file: put in, folded into integers, opened again.

While a network is trained its weights are float tensors in front of a QuantizeLinear, so that the
graph computes with what it will have when it is deployed. A record in the file says which values
become initializers when it is saved (`fold`): integer weights, scales, and int32 biases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.uses import uses
from jaxonnx._io import order, records
from jaxonnx._rewrite.fold_rounded_norms import fold_rounded_norms
from jaxonnx._rewrite.qoperators import Opened, close_operators
from jaxonnx._run.scope import Context, run

_SMALL_TYPES = ("int2", "uint2", "int4", "uint4", "float8_e4m3fn", "float8_e5m2")
"""Types that only weights are stored in, so that a tensor of one needs no look at its readers."""


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
    opened: tuple[Opened, ...] = ()
    """Nodes that were operators on quantized tensors, and are so again in the saved file."""
    norms: tuple[str, ...] = ()
    """The outputs of BatchNormalizations that the saved file has in the scales of weights."""
    folded: bool = False
    """Whether the file is a saved one, in which integers are initializers."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Record:
        """Parse the record from its JSON entry.

        Raises:
          KeyError, TypeError, ValueError: it is malformed.
        """
        biases = (
            Bias(b["name"], b["stored"], b["scale"], (b["scales"][0], b["scales"][1]))
            for b in entry["biases"]
        )
        lists = tuple(entry["folds"]), tuple(entry["scales"])
        opened = tuple(Opened(*map(str, fields)) for fields in entry.get("opened", ()))
        norms = tuple(map(str, entry.get("norms", ())))
        folded = bool(entry["folded"])
        return cls(*lists, dict(entry["names"]), tuple(biases), opened, norms, folded)


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


class Writer:
    """Inserts pairs of QuantizeLinear and DequantizeLinear into a copy of a file.

    `parameters` of the methods are (scale, zero point, axis, block size): arrays, the axis of
    scales per channel or None, and 0 where there are no blocks.

    Args:
      proto: the file.
      taken: names that new tensors must not have, besides the results of nodes.

    Attributes:
      proto: the copy.
      added: the scales and zero points that the copy gets, by name.
    """

    def __init__(self, proto: ModelProto, taken: Iterable[str]):
        self.proto = ModelProto()
        self.proto.CopyFrom(proto)
        self.added: dict[str, np.ndarray] = {}
        self._record = record_of(proto) or Record()
        self._parameters: dict[str, list[str]] = {}
        self._results: dict[str, str] = {}
        self._taken = {*taken, *(n for node in proto.graph.node for n in node.output)}

    def quantize_weight(self, name: str, parameters: Any) -> None:
        """Insert a pair behind a weight, for all its readers."""
        graph = self.proto.graph
        readers = [(node, i) for node in graph.node for i, x in enumerate(node.input) if x == name]
        quantized, result = self._insert(name, parameters)
        for node, i in readers:
            node.input[i] = result
        entry = self._record
        names = {**entry.names, quantized: name}
        self._record = replace(entry, folds=(*entry.folds, quantized), names=names)

    def quantize_values(
        self,
        reads: Mapping[tuple[str, int], str],
        parameters: Mapping[str, Any],
        shared: Mapping[str, str],
    ) -> None:
        """Insert a pair behind activations, for some of their readers.

        Args:
          reads: the name of the activation that an input reads, by the first output of its node and
            its position. An input whose name has changed since is left alone.
          parameters: by the name of the activation.
          shared: for an activation that takes the scale and zero point of another one, the name of
            that, which comes before it in the file.
        """
        for node in [*self.proto.graph.node]:
            for i, name in enumerate(node.input):
                if node.output and reads.get((node.output[0], i)) == name:
                    if name not in self._results:
                        same = self._parameters.get(shared.get(name, ""))
                        _, self._results[name] = self._insert(name, parameters[name], same)
                    node.input[i] = self._results[name]

    def quantize_outputs(self, names: Iterable[str], parameters: Mapping[str, Any]) -> None:
        """Insert a pair in front of outputs of the graph.

        The result of the pair takes the name of the output, and the unrounded value a new one.
        """
        for name in names:
            if name not in self._results:
                _, self._results[name] = self._insert(name, parameters[name])
            new = {name: self._name(f"{name}_float"), self._results[name]: name}
            for node in self.proto.graph.node:
                node.input[:] = [new.get(x, x) for x in node.input]
                node.output[:] = [new.get(x, x) for x in node.output]

    def store_biases(self, biases: Iterable[tuple[str, str, str]]) -> None:
        """Record biases to store as int32 when the file is saved.

        Args:
          biases: the names of a bias, and of the activation and the weight of its product, both
            with a pair behind them.
        """
        recorded = tuple(
            Bias(
                name,
                self._name(f"{name}_quantized"),
                self._name(f"{name}_quantized_scale"),
                (self._parameters[value][0], self._parameters[weight][0]),
            )
            for name, value, weight in biases
        )
        self._record = replace(self._record, biases=recorded)

    def keep_norms(self, outputs: Iterable[str]) -> None:
        """Record the BatchNormalizations, by their outputs, that the saved file has folded."""
        self._record = replace(self._record, norms=tuple(outputs))

    def finish(self) -> ModelProto:
        """Sort the nodes, write the record and return the file."""
        order.sort(self.proto.graph)
        records.put(self.proto, records.QUANTIZATION, asdict(self._record))
        least = helper.find_min_ir_version_for(self.proto.opset_import, ignore_unknown=True)
        self.proto.ir_version = max(self.proto.ir_version, least)
        return self.proto

    def _insert(
        self, name: str, parameters: Any, inputs: list[str] | None = None
    ) -> tuple[str, str]:
        """Add a pair that reads a value; return the results of its two nodes.

        New names are those that onnxruntime's quantizer gives.

        Args:
          inputs: the scale and zero point of another pair to share.
        """
        scale, zero_point, axis, block = parameters
        if inputs is None:
            inputs = [self._name(f"{name}_scale"), self._name(f"{name}_zero_point")]
            for tensor, value in zip(inputs, (scale, zero_point), strict=True):
                self.added[tensor] = np.asarray(value)
                self.proto.graph.initializer.append(declare(tensor, self.added[tensor]))
            self._record = replace(self._record, scales=(*self._record.scales, inputs[0]))
        options = {"axis": axis, "block_size": block or None}
        attributes = {key: value for key, value in options.items() if value is not None}
        quantized = self._name(f"{name}_quantized")
        result = self._name(f"{name}_DequantizeLinear_Output")
        for op, read, output in (
            ("QuantizeLinear", name, quantized),
            ("DequantizeLinear", quantized, result),
        ):
            label = f"{name}_{op}"
            node = helper.make_node(op, [read, *inputs], [output], label, **attributes)
            self.proto.graph.node.append(node)
        self._parameters[name] = inputs
        return quantized, result

    def _name(self, wanted: str) -> str:
        """Return an unused name: `wanted`, or that with a number appended."""
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name


def learn_scales(
    proto: ModelProto, tensors: Mapping[str, Any]
) -> tuple[ModelProto, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Make the scales of a file trainable: scale = initial scale * exp(parameter).

    With this form an optimizer's step changes every scale by a fraction of its value, whatever its
    magnitude; scales stay positive; and weight decay pulls them towards those of the calibration.

    Returns:
      The new file, the initial scales (constants), and the parameters, which are zeros.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    entry = record_of(result) or Record()
    constants, params, nodes = {}, {}, []
    for name in entry.scales:
        if name in entry.folds or name not in tensors:  # trainable already, or of a moving range
            continue
        value = np.asarray(tensors[name])
        initial, change, factor = (f"{name}_{part}" for part in ("initial", "change", "factor"))
        constants[initial], params[change] = value, np.zeros_like(value)
        nodes.append(helper.make_node("Exp", [change], [factor], factor))
        nodes.append(helper.make_node("Mul", [initial, factor], [name], name))
        remove_tensor(result.graph, name)
        entry = replace(entry, folds=(*entry.folds, name))
    for name, value in (constants | params).items():
        result.graph.initializer.append(declare(name, value))
    result.graph.node.extend(nodes)
    order.sort(result.graph)
    records.put(result, records.QUANTIZATION, asdict(entry))
    return result, constants, params


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
    names = entry.folds
    needed = ancestors(graph.nodes, names)
    nodes = tuple(node for node in graph.nodes if needed.issuperset(node.outputs))
    results = run(replace(graph, nodes=nodes, outputs=names), {}, Context(values))
    folded = dict(zip(names, map(np.asarray, results), strict=True))
    computed = {name for node in nodes for name in node.outputs}
    read = {name for node in nodes for name in node.reads}
    for i, node in reversed([*enumerate(main.node)]):
        if computed.intersection(node.output):
            del main.node[i]
    for name, value in folded.items():
        main.initializer.append(numpy_helper.from_array(value, name))
    tensors = {**values, **folded}
    norms = [node for node in main.node if node.output[0] in entry.norms]
    convs = [node for node in main.node if {*node.output} & {norm.input[0] for norm in norms}]
    read.update(name for node in (*norms, *convs) for name in node.input[1:])
    for name, value in fold_rounded_norms(main, entry.norms, tensors).items():
        tensors[name] = value
        remove_tensor(main, name)
        main.initializer.append(numpy_helper.from_array(value, name))
    for bias in entry.biases:
        _store_bias(main, bias, tensors[bias.name], *(tensors[name] for name in bias.scales))
    used = {name for node in main.node for name in node.input}
    used.update(value.name for value in main.output)
    for name in read - used - folded.keys():
        remove_tensor(main, name)
    records.rename_sparse(proto, {name: stored for stored, name in entry.names.items()})
    close_operators(main, entry.opened)
    order.sort(main)
    records.put(proto, records.QUANTIZATION, asdict(replace(entry, norms=(), folded=True)))
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


def _store_bias(graph: GraphProto, bias: Bias, value: np.ndarray, *scales: np.ndarray) -> None:
    """Replace a float bias by an int32 tensor, its scale and a DequantizeLinear of the two.

    A bias that has no room in int32 at this scale stays as it is.

    Args:
      scales: of the activation, shape (), and of the weight, shape () or (outputs,), where a
        ConvTranspose has the outputs of one group.
    """
    scale = np.asarray(scales[0] * scales[1], np.float32)
    if scale.ndim and value.ndim:
        scale = np.tile(scale, max(value.shape[-1] // scale.size, 1))
    # float64: float32 cannot hold every int32
    stored = np.rint(value.astype(np.float64) / scale)
    if np.abs(stored).max(initial=0) > np.iinfo(np.int32).max:
        return
    remove_tensor(graph, bias.name)
    graph.initializer.append(numpy_helper.from_array(stored.astype(np.int32), bias.stored))
    graph.initializer.append(numpy_helper.from_array(scale, bias.scale))
    axis: dict[str, Any] = {"axis": stored.ndim - 1} if scale.ndim else {}
    inputs, label = [bias.stored, bias.scale], f"{bias.name}_DequantizeLinear"
    graph.node.append(helper.make_node("DequantizeLinear", inputs, [bias.name], label, **axis))


def unfold(
    proto: ModelProto, graph: Graph, tensors: Mapping[str, Any], opened: tuple[Opened, ...] = ()
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
    stored = {
        use.name
        for use in uses(graph, tensors)
        if use.node.op.role(use.position) == "param"
        and np.dtype(tensors[use.name].dtype).kind in "iu"
    } | {n for n, x in tensors.items() if x.dtype.name in _SMALL_TYPES}
    result = ModelProto()
    result.CopyFrom(proto)
    entry = record_of(result) or Record()
    recorded = {bias.stored: bias for bias in entry.biases}
    producers = {node.output[0]: node for node in proto.graph.node if node.output}
    floats: dict[str, np.ndarray] = {}
    points: dict[str, np.ndarray] = {}
    folds, names, biases = [], dict(entry.names), []
    times = Counter(name for node in proto.graph.node for name in node.input)
    for node in [*result.graph.node]:
        if node.op_type != "DequantizeLinear" or node.input[0] not in stored:
            continue
        name, output = node.input[0], node.output[0]
        value = _dequantize(graph, tensors, output)
        if tensors[name].dtype == np.int32:
            bias = recorded.get(name) or _find_bias(proto, node, producers)
            if bias is None or max(times[part] for part in node.input[:2]) > 1:
                continue  # it stays as it is: something else reads its numbers or its scale
            biases.append(bias)
            remove_tensor(result.graph, name)
            remove_tensor(result.graph, node.input[1])
            result.graph.node.remove(node)
            floats[output] = value
            continue
        if name in folds:  # another node reads the same integers
            continue
        weight = names.setdefault(name, _float_name(name, tensors, proto))
        # rounding the dequantized weight with the same parameters gives the integers again
        inverse = NodeProto()
        inverse.CopyFrom(node)
        inverse.op_type, inverse.name = "QuantizeLinear", f"{weight}_QuantizeLinear"
        inverse.input[0], inverse.output[0] = weight, name
        if len(node.input) < 3:  # QuantizeLinear alone would give uint8
            point = f"{weight}_zero_point_of_type"
            inverse.input.append(point)
            points[point] = np.zeros(tensors[node.input[1]].shape, tensors[name].dtype)
        remove_tensor(result.graph, name)
        result.graph.node.append(inverse)
        folds.append(name)
        floats[weight] = value
    for name, value in (floats | points).items():
        result.graph.initializer.append(declare(name, value))
    order.sort(result.graph)
    scales = dict.fromkeys(entry.scales or _scales_of(result.graph, tensors))
    entry = Record(tuple(folds), tuple(scales), names, tuple(biases), opened)
    records.rename_sparse(result, names)
    records.put(result, records.QUANTIZATION, asdict(entry))
    return result, floats, points


def _dequantize(graph: Graph, tensors: Mapping[str, Any], name: str) -> np.ndarray:
    """Evaluate one value of a graph that depends on its tensors alone."""
    needed = ancestors(graph.nodes, [name])
    nodes = tuple(node for node in graph.nodes if needed.issuperset(node.outputs))
    (value,) = run(replace(graph, nodes=nodes, outputs=(name,)), {}, Context(tensors))
    return np.asarray(value)


def _find_bias(
    proto: ModelProto,
    node: NodeProto,
    producers: Mapping[str, NodeProto],
) -> Bias | None:
    """Describe the int32 bias that a DequantizeLinear reads; None if no product with two
    dequantized operands has it as its third input."""
    for reader in proto.graph.node:
        if len(reader.input) > 2 and reader.input[2] == node.output[0]:
            parts = [producers.get(name) for name in reader.input[:2]]
            if all(part is not None and part.op_type == "DequantizeLinear" for part in parts):
                x_scale, w_scale = (part.input[1] for part in parts if part is not None)
                return Bias(node.output[0], node.input[0], node.input[1], (x_scale, w_scale))
    return None


def _scales_of(graph: GraphProto, tensors: Mapping[str, Any]) -> list[str]:
    """Return the stored scales of all QuantizeLinear and DequantizeLinear nodes."""
    pairs = [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    return [node.input[1] for node in pairs if node.input[1] in tensors]


def _float_name(name: str, tensors: Mapping[str, Any], proto: ModelProto) -> str:
    """Name the float tensor of an integer weight: without onnxruntime's suffix, if that is free."""
    short = name.removesuffix("_quantized")
    values = {n for node in proto.graph.node for n in node.output}
    return short if short != name and short not in {*tensors, *values} else f"{name}_float"


def declare(name: str, value: np.ndarray) -> TensorProto:
    """Return a TensorProto with the type and shape of `value`, without data (`save` fills it)."""
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    return TensorProto(name=name, data_type=kind, dims=value.shape)


def remove_tensor(graph: GraphProto, name: str) -> None:
    """Remove a tensor: its initializer and graph input, or the node (Constant, Identity) of it."""
    for entries_of, defines in _OWNERS:
        for i, entry in reversed([*enumerate(entries_of(graph))]):
            if defines(entry, name):
                del entries_of(graph)[i]


_OWNERS: tuple[tuple[Callable[[GraphProto], Any], Callable[[Any, str], bool]], ...] = (
    (lambda graph: graph.initializer, lambda entry, name: entry.name == name),
    (lambda graph: graph.input, lambda entry, name: entry.name == name),
    (lambda graph: graph.sparse_initializer, lambda entry, name: entry.values.name == name),
    (lambda graph: graph.node, lambda entry, name: name in entry.output),
)
"""The fields of a graph that can define a tensor, and how an entry of each is matched by name."""
