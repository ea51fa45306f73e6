"""Rounding as a view: weights in floating point, which the file of the network has as integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from jaxonnx._rewrite.network import Network, enter, with_file
from jaxonnx.quantization._fold import fold, unfold
from jaxonnx.quantization._qoperators import has_quantized_operators, open_operators
from jaxonnx.quantization._record import Record, record_of
from jaxonnx.views import Addition, View

N = TypeVar("N", bound=Network)


@dataclass(frozen=True)
class Rounding(View):
    """The file has integers where the network rounds weights; its record says which (`Record`).

    Attributes:
      report: the `Sensitivity` by which types were chosen, if they were.
      clipped: the fraction of the numbers of activations that the calibrated range clips, but 0.
    """

    report: Any = field(default=None, compare=False)
    clipped: Mapping[str, float] = field(default_factory=dict, compare=False)

    def leave(self, network: N, form: str | None) -> tuple[N, list[Addition]]:
        network, _ = super().leave(network, form)
        write = partial(fold, graph=network.graph, values=network._file_values)
        return network, [Addition(frozenset(), write)]


def open_quantized(model: N) -> tuple[N, int]:
    """Return a quantized model whose integer weights and biases are parameters in floating point.

    Operators on integers are opened, too. The file is written as before.

    Returns:
      The model, and the number of the parameters.
    """
    proto, added, weights_of_operators = open_operators(model.proto, model.tensors)
    model = with_file(model, proto, added)
    proto, floats, points = unfold(model.proto, model.graph, model.tensors, weights_of_operators)
    model = with_file(model, proto, points, floats)
    weights = {*floats, *(record_of(proto) or Record()).names.values()}
    return (model if model.program.find(Rounding) else enter(model, Rounding())), len(weights)


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
