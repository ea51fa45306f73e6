"""Calibrate a network and insert QuantizeLinear and DequantizeLinear by a scheme."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from onnx import ModelProto, helper

from jaxonnx._display import list_some
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._io.protos import Editor, rename_reads
from jaxonnx._rewrite.network import (
    Network,
    drop_unread,
    enter,
    reenter,
    with_file,
    with_tensors,
)
from jaxonnx._run.call_form import read_names
from jaxonnx.errors import warn
from jaxonnx.lowering import is_in_memory
from jaxonnx.quantization._awq import scale_inputs
from jaxonnx.quantization._calibration import observe, warn_if_worse
from jaxonnx.quantization._files import Bias, Record, record_of
from jaxonnx.quantization._gptq import round_weights
from jaxonnx.quantization._scheme import (
    Parameters,
    Quantization,
    clipped_share,
    find_ranges,
    fit_bias,
    scales_channels,
    weight_parameters,
)
from jaxonnx.quantization._sites import Sites, choose_types, value_types
from jaxonnx.quantization._view import Rounding

N = TypeVar("N", bound=Network)

_B = 2
"""The position of `B` among the inputs of a BatchNormalization, and of a convolution."""


def insert(
    unfolded: N,
    scheme: Quantization,
    examples: Sequence[Sequence[Any]],
    method: str | None = None,
    *,
    keep_norms: bool = False,
    types: Mapping[str, str | None] | None = None,
) -> N:
    """Calibrate a network and insert QuantizeLinear and DequantizeLinear by a scheme.

    Args:
      unfolded: a network in floating point. If its caches are empty, they are so for the
        calibration, and inputs and outputs of the result.
      scheme: the types and methods of quantization.
      examples: calibration data, batches of inputs in the order of the model's.
      method: as in `jaxonnx.quantize`.
      keep_norms: keep a BatchNormalization, for training, if the weight of the convolution before
        it has a scale for each output channel; `fold` writes it into these scales. All others are
        folded into the weights at once.
      types: other types of some weights and activations than the scheme's, by name. None keeps
        floating point.

    Raises:
      InputError: the scheme does not fit the network.
    """
    model = fold_normalizations(unfolded)
    whole = reenter(model, unfolded)
    tensors = model.tensors
    # 1. what is quantized: weights, each by a scheme of its type, and activations
    types = types or {}
    dtypes = cache(partial(value_types, whole, examples[0]))
    sites, schemes = choose_types(model, dtypes, scheme, types)
    fitted: dict[str, Parameters] = {}
    if method == "awq":
        values, fitted = scale_inputs(whole, sites.weights, examples, schemes)
        model, whole = with_tensors(model, values), with_tensors(whole, values)
        tensors = model.tensors
    # 2. the ranges of activations on the calibration data
    observed = observe(whole, sites.range_names, examples)
    calibration = find_ranges(observed, sites.shared, scheme, types)
    ranges = calibration.ranges
    shares = {n: clipped_share(x, ranges[n]) for n, x in observed.samples.items() if n in ranges}
    # 3. BatchNormalizations that stay for training
    folds = find_folds(unfolded) if keep_norms else {}
    norms = {w: (fold.conv.outputs[0], fold.norm.outputs[0]) for w, fold in folds.items()}
    # only weights with a scale for each output channel, along the first axis
    along = {n: site for n, site in sites.weights.items() if n in norms and site.output == 0}
    norms = {n: p for n, p in norms.items() if n in along and scales_channels(along[n], schemes[n])}
    convs = {norm: conv for conv, norm in norms.values()}
    if norms:
        model = fold_normalizations(unfolded, norms)
        outputs = [norm for _, norm in norms.values()]
        model = with_tensors(model, flip_negative_scales(model.graph, outputs, model.tensors))
        tensors = model.tensors
    # 4. the scales of weights
    biases = {bias.weight: bias for bias in sites.biases if bias.value in ranges}

    def fit(name: str, squares: np.ndarray | None = None) -> Parameters:
        """Choose the scales of a weight, by the mean squares of its inputs where they are known."""
        w, parameters = np.asarray(tensors[name]), fitted.get(name)
        if parameters is None:
            parameters = weight_parameters(w, sites.weights[name], schemes[name], squares)
        if bias := biases.get(name):
            parameters = fit_bias(parameters, tensors[bias.name], float(ranges[bias.value].scale))
        return parameters

    scales: dict[str, Parameters] = {}
    if method == "gptq":
        values, scales = round_weights(whole, sites.weights, examples, schemes, fit)
        model = with_tensors(model, values)
    scales = {n: scales[n] if n in scales else fit(n) for n in sites.weights}
    # 5. write the QDQ pairs
    inserter = _Inserter(model.proto, {*tensors, *(value.name for value in model.inputs)})
    # onnxruntime (1.32) refuses zero points per column of a stack of matrices of integers
    bare = {
        name
        for name, parameters in scales.items()
        if sites.weights[name].stacked and schemes[name].computes_integers
        if parameters.axis is not None and not parameters.block
    }
    inserter.quantize_weights(scales, bare)
    reads = select_reads(sites, ranges)
    reads = {(convs.get(node, node), i): name for (node, i), name in reads.items()}
    inserter.quantize_values(reads, ranges, sites.shared)
    inserter.quantize_outputs((n for n in sites.outputs if n in ranges), ranges)
    inserter.store_biases((b.name, b.value, b.weight) for b in sites.biases if b.value in ranges)
    net = with_file(model, inserter.write(norm for _, norm in norms.values()), inserter.added)
    # 6. compare with the widest ranges, and warn
    entered = reenter(net, unfolded)
    warn_if_worse(entered, calibration, observed, inserter.parameters, examples, shares, scheme)
    if zeros := [repr(n) for n, x in observed.limits.items() if not x.any()]:
        warn(
            f"{list_some(zeros, '')}: 0 in all calibration data, so that the range is not known, "
            "and stays in floating point: pass examples that reach what computes it",
        )
    return enter(net, Rounding(clipped={n: x for n, x in shares.items() if x}))


def select_reads(sites: Sites, ranges: Collection[str]) -> dict[tuple[str, int], str]:
    """Select the reads of nodes all of whose activations have a range.

    Another node stays in floating point with all of its inputs: runtimes compute with integers only
    where every input is quantized.
    """
    left_out = {output for (output, _), name in sites.reads.items() if name not in ranges}
    return {place: name for place, name in sites.reads.items() if place[0] not in left_out}


class Fold(NamedTuple):
    """A BatchNormalization in the convolution before it, whose result it alone reads.

    With f = scale / sqrt(var + epsilon), the weight w becomes w * f and the bias of the convolution
    (bias - mean) * f + b.
    """

    conv: Node
    norm: Node
    factor: np.ndarray
    """f, of shape (channels,)."""
    bias: np.ndarray
    """The new bias, of shape (channels,)."""


def fold_normalizations(model: N, keep: Collection[str] = ()) -> N:
    """Fold each BatchNormalization into the convolution before it.

    The B of a BatchNormalization becomes the bias of its convolution.

    Args:
      keep: the weights of convolutions whose BatchNormalization stays.
    """
    folds = {w: fold for w, fold in find_folds(model).items() if w not in keep}
    values = {}
    for weight, fold in folds.items():
        w = np.asarray(model.tensors[weight])
        values[weight] = w * fold.factor.reshape(-1, *(1,) * (w.ndim - 1))
        values[fold.norm.inputs[_B]] = fold.bias
    norms = {fold.norm.outputs[0] for fold in folds.values()}
    before = {fold.conv.outputs[0]: fold.norm for fold in folds.values()}
    file = Editor(model.proto)
    nodes = file.graph.node
    for i, node in reversed([*enumerate(nodes)]):
        if node.output and node.output[0] in norms:
            del nodes[i]
    for node in nodes:
        if node.output and node.output[0] in before:
            norm = before[node.output[0]]
            node.input[2:] = [norm.inputs[_B]]
            node.output[0] = norm.outputs[0]
    return drop_unread(with_tensors(with_file(model, file.proto), values))


def find_folds(model: Network) -> dict[str, Fold]:
    """Find the BatchNormalizations to fold, by the name of the convolution's weight.

    They are in the main graph, and nothing else reads the weight and B.
    """
    graph, tensors, folds = model.graph, model.tensors, {}
    times = Counter(read_names(graph))
    stored = tensors.keys() & graph.weights
    convs = {node.outputs[0]: node for node in graph.nodes if node.outputs and _is(node, "Conv")}
    for norm in graph.nodes:
        if not _is(norm, "BatchNormalization") or norm.inputs[0] not in convs:
            continue
        conv = convs[norm.inputs[0]]
        weight, names = conv.inputs[1], (conv.inputs[1], *norm.inputs[1:5], *conv.inputs[2:])
        alone = times[norm.inputs[0]] == times[weight] == times[norm.inputs[_B]] == 1
        statistics = any(times[name] for name in norm.outputs[1:])
        foldable = alone and not statistics and norm.attributes.get("spatial", 1)
        if not foldable or conv.inputs[0] == weight or not stored.issuperset(names):
            continue
        epsilon = norm.attributes.get("epsilon", 1e-5)
        if (values := _fold([tensors[name] for name in names], epsilon)) is not None:
            folds[weight] = Fold(conv, norm, *values)
    return folds


def _is(node: Node, name: str) -> bool:
    """Check whether a node is an operator of ONNX of this name."""
    return node.op.name == name and not node.op.domain and node.body is None


def _fold(arrays: Sequence[Any], epsilon: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the factor and the bias of a `Fold`.

    None if shapes or types do not fit, or folding would lose precision.

    Args:
      arrays: the weight; scale, b, mean and variance; and the bias of the convolution, if any.
    """
    (dtype, *others) = {x.dtype for x in arrays}
    if others or dtype not in (np.float32, np.float64) or not all(map(is_in_memory, arrays)):
        return None
    w, *vectors = map(np.asarray, arrays)
    if w.ndim < 3 or any(v.shape != w.shape[:1] for v in vectors):
        return None
    scale, b, mean, var, *bias = (v.astype(np.float64) for v in vectors)
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(var + epsilon)
        shift = (sum(bias) - mean) * factor + b
        largest = np.abs(w).max(axis=tuple(range(1, w.ndim)), initial=0) * np.abs(factor)
    # Subnormal products and overflow would lose digits that the two nodes keep. Comparisons are
    # written such that NaN fails them.
    info = np.finfo(dtype)
    low, high = float(info.tiny / info.eps), float(info.max * info.eps)
    sound = epsilon >= 0 and np.all((var >= 0) & (var < np.inf)) and np.all(np.abs(shift) <= high)
    for size in (np.abs(factor), largest):
        sound = sound and np.all((size == 0) | ((low <= size) & (size <= high)))
    return (factor.astype(dtype), shift.astype(dtype)) if sound else None


def flip_negative_scales(
    graph: Graph, norms: Collection[str], tensors: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return values that make the scales of BatchNormalizations positive, for the same function.

    Where a scale is negative, so become the channel's weight, mean and bias of the convolution.
    Otherwise the saved file would have the negated integers, and -128 has no counterpart in int8.
    A pair that shares one of these tensors with another node stays as it is.

    Args:
      graph: the main graph, bound.
      norms: the outputs of the BatchNormalizations, each of which follows a convolution.
      tensors: the values of its named tensors.
    """
    times = Counter(read_names(graph))
    values = {}
    for name in norms:
        x, scale, _, mean, _ = graph.producers[name].inputs[:5]
        conv = graph.producers[x]
        names = (scale, mean, *conv.inputs[1:])
        sign = np.where(np.asarray(tensors[scale]) < 0, -1, 1)
        if any(times[each] > 1 for each in names):
            continue
        for each in names:
            x = np.asarray(tensors[each])
            values[each] = x * sign.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
    return values


class _Inserter(Editor):
    """Inserts pairs of QuantizeLinear and DequantizeLinear into a copy of a file.

    `parameters` of the methods are (scale, zero point, axis, block size): arrays, the axis of
    scales per channel or None, and 0 where there are no blocks.

    Attributes:
      parameters: the names of scale and zero point by the name of the tensor that is rounded.
    """

    def __init__(self, proto: ModelProto, taken: Iterable[str]):
        super().__init__(proto, taken)
        self.parameters: dict[str, list[str]] = {}
        self._record = record_of(proto) or Record()
        self._results: dict[str, str] = {}

    def quantize_weights(self, parameters: Mapping[str, Any], bare: Collection[str]) -> None:
        """Insert a pair behind each weight, for all its readers, in subgraphs too.

        Args:
          parameters: by the name of the weight.
          bare: the weights whose DequantizeLinear has no zero point, which is 0.
        """
        readers, results, names = [*self.graph.node], {}, {}
        for name in parameters:
            quantized, results[name] = self._insert(name, parameters[name])
            names[quantized] = name
            if name in bare:
                self.graph.node[-1].input.pop()
        for node in readers:
            rename_reads(node, results)
        entry = self._record
        self._record = replace(entry, folds=(*entry.folds, *names), names={**entry.names, **names})

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
        for node in [*self.graph.node]:
            for i, name in enumerate(node.input):
                if node.output and reads.get((node.output[0], i)) == name:
                    if name not in self._results:
                        same = self.parameters.get(shared.get(name, ""))
                        _, self._results[name] = self._insert(name, parameters[name], same)
                    node.input[i] = self._results[name]

    def quantize_outputs(self, names: Iterable[str], parameters: Mapping[str, Any]) -> None:
        """Insert a pair in front of outputs of the graph.

        The result of the pair takes the name of the output, and the unrounded value a new one.
        """
        for name in names:
            if name not in self._results:
                _, self._results[name] = self._insert(name, parameters[name])
            new = {name: self.unused_name(f"{name}_float"), self._results[name]: name}
            for node in self.graph.node:
                rename_reads(node, new)
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
                self.unused_name(f"{name}_quantized"),
                self.unused_name(f"{name}_quantized_scale"),
                (self.parameters[value][0], self.parameters[weight][0]),
            )
            for name, value, weight in biases
        )
        self._record = replace(self._record, biases=recorded)

    def write(self, norms: Iterable[str]) -> ModelProto:
        """Write the record and return the file.

        Args:
          norms: the outputs of the BatchNormalizations that the saved file has folded.
        """
        proto = self.finish()
        quantized = {n.input[0] for n in self.graph.node if n.op_type == "QuantizeLinear"}
        idle = (n.output[0] for n in self.graph.node if n.op_type in ("Clip", "Relu"))
        idle = tuple(name for name in idle if name in quantized)
        replace(self._record, norms=tuple(norms), idle=idle).write(proto)
        least = helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
        proto.ir_version = max(proto.ir_version, least)
        return proto

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
            names = self.unused_name(f"{name}_scale"), self.unused_name(f"{name}_zero_point")
            inputs = [*map(self.add_tensor, names, (scale, zero_point))]
            self._record = replace(self._record, scales=(*self._record.scales, inputs[0]))
        options = {"axis": axis, "block_size": block or None}
        options = {key: value for key, value in options.items() if value is not None}
        source = name
        outputs = (
            self.unused_name(f"{name}_quantized"),
            self.unused_name(f"{name}_DequantizeLinear_Output"),
        )
        for op, output in zip(("QuantizeLinear", "DequantizeLinear"), outputs, strict=True):
            source = self.add_node(op, [source, *inputs], output, f"{name}_{op}", **options)
        self.parameters[name] = inputs
        return outputs
