"""Insert QuantizeLinear and DequantizeLinear into a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from jaxonnx._io import order
from jaxonnx._io.build import names
from jaxonnx.quantization._record import Bias, Record, declare, record_of


class Writer:
    """Inserts pairs of QuantizeLinear and DequantizeLinear into a copy of a file.

    `parameters` of the methods are (scale, zero point, axis, block size): arrays, the axis of
    scales per channel or None, and 0 where there are no blocks.

    Args:
      proto: the file.
      taken: names that new tensors must not have, besides those of the file's values.

    Attributes:
      proto: the copy.
      added: the scales and zero points that the copy gets, by name.
      parameters: the names of these by the name of the tensor that is rounded.
    """

    def __init__(self, proto: ModelProto, taken: Iterable[str]):
        self.proto = ModelProto()
        self.proto.CopyFrom(proto)
        self.added: dict[str, np.ndarray] = {}
        self._record = record_of(proto) or Record()
        self.parameters: dict[str, list[str]] = {}
        self._results: dict[str, str] = {}
        self._taken = {*taken, *names(proto.graph)}

    def quantize_weight(self, name: str, parameters: Any, *, bare: bool = False) -> None:
        """Insert a pair behind a weight, for all its readers, in subgraphs too.

        Args:
          bare: the DequantizeLinear has no zero point, which is 0.
        """
        readers = [*self.proto.graph.node]
        quantized, result = self._insert(name, parameters)
        if bare:
            self.proto.graph.node[-1].input.pop()
        for node in readers:
            order.rename_reads(node, {name: result})
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
            new = {name: self._name(f"{name}_float"), self._results[name]: name}
            for node in self.proto.graph.node:
                order.rename_reads(node, new)
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
                (self.parameters[value][0], self.parameters[weight][0]),
            )
            for name, value, weight in biases
        )
        self._record = replace(self._record, biases=recorded)

    def finish(self, norms: Iterable[str]) -> ModelProto:
        """Sort the nodes, write the record and return the file.

        Args:
          norms: the outputs of the BatchNormalizations that the saved file has folded.
        """
        order.sort(self.proto.graph)
        quantized = {n.input[0] for n in self.proto.graph.node if n.op_type == "QuantizeLinear"}
        idle = (n.output[0] for n in self.proto.graph.node if n.op_type in ("Clip", "Relu"))
        idle = tuple(name for name in idle if name in quantized)
        replace(self._record, norms=tuple(norms), idle=idle).write(self.proto)
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
        self.parameters[name] = inputs
        return quantized, result

    def _name(self, wanted: str) -> str:
        """Return an unused name: `wanted`, or that with a number appended."""
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name
