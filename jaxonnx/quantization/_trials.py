"""A network each of whose tensors can be rounded to one type or another without compiling anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from jaxonnx._io import order
from jaxonnx._io.build import unused_name
from jaxonnx._rewrite.network import Network, reenter, with_file, with_tensors
from jaxonnx.ops.contrib.moving_ranges import DOMAIN
from jaxonnx.quantization._insert import find_in
from jaxonnx.quantization._ranges import find_origin, find_ranges, observe
from jaxonnx.quantization._record import declare
from jaxonnx.quantization._scheme import TYPES, Quantization
from jaxonnx.quantization._sensitivity import Changes, round_weight
from jaxonnx.quantization._sites import WeightSite


@dataclass(frozen=True)
class Trials:
    """A network with a RoundTo node for each activation, which rounds to the levels in its state.

    Attributes:
      network: the network, in which nothing is rounded.
      sites: its weights.
      schemes: the scheme of each type of weights; None for sparsity patterns.
      levels: of the activations that have a range, by type: new state for the RoundTo nodes.
      sizes: the number of elements of each weight, and of each activation for one example.
      factors: for matrices of MatMul and Gemm the activation that they are multiplied by.
    """

    network: Network
    sites: Mapping[str, WeightSite]
    schemes: Mapping[str, Quantization | None]
    levels: Mapping[str, Mapping[str, Mapping[str, Any]]]
    sizes: Mapping[str, int]
    factors: Mapping[str, str] = field(default_factory=dict)

    def change(self, name: str, kind: str) -> Changes:
        """Return the new tensors that round a weight or an activation to a type."""
        if name in self.levels:
            return self.levels[name][kind]
        return round_weight(self.network, self.sites, self.schemes, name, kind)

    def round(self, types: Mapping[str, str | None]) -> Network:
        """Return the network with tensors of these types; None is floating point."""
        changes = [self.change(name, kind) or {} for name, kind in types.items() if kind]
        return with_tensors(self.network, {n: x for part in changes for n, x in part.items()})


def make_trials(
    model: Network,
    scheme: Quantization,
    schemes: Mapping[str, Quantization | None],
    activations: Sequence[str],
    examples: Sequence[Sequence[Any]],
) -> Trials:
    """Measure the ranges of a network and give it RoundTo nodes.

    Args:
      model: a network in floating point. If its caches are empty, they are so in the result.
      scheme: what is rounded, and how ranges are found.
      schemes: the scheme of each type of weights; None for sparsity patterns.
      activations: the types of activations.
      examples: calibration data, batches of inputs in the order of the model's.
    """
    sites = find_in(model, model, examples[0])(scheme)
    weights, tensors = sites.weights, model.tensors
    sizes = {name: int(tensors[name].size) for name in weights}
    if not activations:
        return Trials(model, weights, schemes, {}, sizes)
    observed = observe(model, sites.range_names, examples)
    ranges = {
        kind: find_ranges(observed, sites.shared, replace(scheme, activations=kind), {}).ranges
        for kind in activations
    }
    rounded = ranges[activations[0]]
    reads, used, result = sites.select_reads(rounded), {*tensors}, ModelProto()
    result.CopyFrom(model.proto)
    used.update(name for node in result.graph.node for name in node.output)
    names = {
        n: (unused_name(f"{n}_levels", used), unused_name(f"{n}_rounded", used)) for n in rounded
    }
    for node in result.graph.node:
        for i, name in enumerate(node.input):
            if node.output and reads.get((node.output[0], i)) == name:
                node.input[i] = names[name][1]
    for value, (limits, output) in names.items():
        label = f"{value}_RoundTo"
        result.graph.node.append(
            helper.make_node("RoundTo", [value, limits], [output], label, domain=DOMAIN)
        )
    result.opset_import.add(domain=DOMAIN, version=1)
    state = {levels: np.zeros(4, np.float32) for levels, _ in names.values()}
    result.graph.initializer.extend(declare(name, value) for name, value in state.items())
    order.sort(result.graph)
    groups: dict[str, list[str]] = {}
    for value in rounded:
        groups.setdefault(find_origin(value, sites.shared), []).append(value)
    # scale, zero point, and the least and greatest integer of each range, float32 [4]
    ends = {kind.dtype: kind.limits for kind in reversed(TYPES.values())}
    levels: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for origin, values in groups.items():
        levels[origin] = {}
        for kind in activations:
            levels[origin][kind] = {}
            for value in values:
                scale, point, *_ = ranges[kind][value]
                numbers = [scale, float(point), *ends[point.dtype]]
                levels[origin][kind][names[value][0]] = np.array(numbers, np.float32)
    batch = max(len(x) for x in examples[0] if np.ndim(x))
    sizes |= {n: -(-observed.sizes[n] // batch) for n in levels}
    network = reenter(with_file(model, result, state=state), model)
    factors = {
        node.inputs[1]: find_origin(node.inputs[0], sites.shared)
        for node in model.graph.nodes
        if node.op.name in ("Gemm", "MatMul") and node.inputs[1] in weights
        if node.inputs[0] in rounded
    }
    return Trials(network, weights, schemes, levels, sizes, factors)
