"""Find constants at weight inputs of operators, by their use or name."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxonnx._graph.ancestors import ancestors, behind
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.operands import Operands
from jaxonnx._graph.uses import Use
from jaxonnx._io.encoder_decoder import own_name

_BUFFER = re.compile(
    r"(.*_)?(inv_freq|window|mel(_(fb|basis|filters?|bank|scale))?|fb|fbank|filter_?banks?"
    r"|anchors?|mean|std|(cos|sin)_cached?|freqs_cis|action_(scale|bias))"
)
"""The last part of the names that buffers go by."""
_WEIGHT = re.compile(r"(weight|bias|gamma|beta|kernel|scale_param)s?")
"""The last part of the names that weights go by, wherever they are."""


def _last_part(name: str) -> str:
    return re.split(r"[./:]", name.removesuffix(":0"))[-1]


def is_buffer(name: str) -> bool:
    """Check whether a tensor has a name that buffers go by."""
    return _BUFFER.fullmatch(_last_part(name)) is not None


_UNNAMED = re.compile(r"val_\d+|onnx::\w+_\d+")
"""Names that PyTorch's exporters give to tensors that are none of the network's."""


class Buffers:
    """Recognizes constant buffers by where tensors are used and by their names.

    Args:
      graph: the main graph.
      uses: the uses of its tensors.
      layers: the indices of the main graph's nodes that have weights.
      initializers: the names of the tensors that are initializers.
      stored: whether there are weights among the initializers; then Constant nodes hold no weights.
    """

    def __init__(
        self,
        graph: Graph,
        uses: Sequence[Use],
        layers: Collection[int],
        initializers: Collection[str],
        stored: bool,
    ):
        self._graph = graph
        self._layers = layers
        self._initializers = initializers
        self._stored = stored
        nodes = [node for node in graph.nodes if node.index in layers]
        self._after = behind(graph.nodes, (name for node in nodes for name in node.outputs))
        self._before = ancestors(graph.nodes, (name for node in nodes for name in node.reads))
        self._fed = behind(graph.nodes, graph.inputs)
        self._operands = Operands(graph, self._fed)
        self._plain = {node.index: node for node in graph.nodes if self._is_plain(node)}

    def is_learned(self, use: Use, value: np.ndarray) -> bool:
        """Check whether a tensor is learned, at an input for which the operator has no weight."""
        return self._operands.is_learned(use, value)

    def describe(self, use: Use, role: str | None, tensors: Mapping[str, Any]) -> str:
        """Return why a tensor with this use is a constant, as part of a sentence; else ""."""
        last = _last_part(use.name)
        if _WEIGHT.fullmatch(last):
            return ""
        if _BUFFER.fullmatch(last):
            return f"named '{last}'"
        node = use.node
        if node is not use.outer:
            return ""
        if role == "vector":
            if self._stored and use.name not in self._initializers:
                return "in a Constant node, where the weights are initializers"
            if self._is_in_front(use, tensors[use.name]):
                return "meets nothing but inputs before the first layer"
            if self._scales_actions(node):
                return "scales the file's output behind Tanh"
        if node.op.name == "Gather" and use.position == 0 and self._is_only_output(node):
            return "its rows are outputs as they are"
        if node.op.name == "MatMul" and self._operands.feeds_sin_and_cos(node):
            return "its products go to Sin and Cos alone, as those of random Fourier features do"
        if "Normalization" in node.op.name and self._is_filler(use, tensors):
            return "what the operator needs where a normalization has no scale or bias"
        if node.op.name == "InstanceNormalization" and self._groups(node, tensors):
            return "stands for GroupNormalization, whose scale and bias come after it"
        return ""

    def _is_in_front(self, use: Use, value: Any) -> bool:
        """Check whether a tensor normalizes inputs: arithmetic with them before the first layer.

        The other operand is an input that went through no layer, layers follow, and no layer reads
        that input in another way, except for its sizes. An outer product (a table that meets each
        number of an input in each row) does not count.
        """
        others = [name for i, name in enumerate(use.node.inputs) if i != use.position]
        raw = self._after.isdisjoint(others) and not self._fed.isdisjoint(others)
        if not raw or use.node.index not in self._plain:
            return False
        if self._before.isdisjoint(use.node.outputs):
            return False
        producers = (self._graph.producers.get(name) for name in others)
        moved = ("Expand", "Reshape", "Unsqueeze")
        broadcast = any(p is not None and p.op.name in moved for p in producers)
        if broadcast and sum(n != 1 for n in np.shape(value)) > 1:
            return False
        sized = [node for node in self._graph.nodes if node.op.name not in ("Shape", "Size")]
        inputs = ancestors(sized, others) & {*self._graph.inputs}
        own = [name for node in self._plain.values() for name in node.outputs]
        reached = behind(self._graph.nodes, inputs, own)
        layers = (node for node in self._graph.nodes if node.index in self._layers)
        return all(reached.isdisjoint(layer.reads) for layer in layers if layer is not use.node)

    def _is_plain(self, node: Node) -> bool:
        """Check whether a node is arithmetic of a tensor and an input that met no layer before."""
        fed = [name for name in node.inputs if name in self._fed]
        plain = node.op.name in ("Add", "Div", "Mul", "Sub") and not node.op.domain
        return plain and len(fed) == 1 and fed[0] not in self._after

    def _scales_actions(self, node: Node) -> bool:
        """Check whether a node scales or shifts a Tanh on the way to an output.

        Policies of reinforcement learning map Tanh to the range of their actions like this.
        """
        if node.op.name not in ("Add", "Mul"):
            return False
        value, operators = node.outputs[0], {node.op.name}
        while value not in self._graph.outputs:
            readers = self._graph.readers.get(value, ())
            if len(readers) != 1 or readers[0].op.name not in ("Add", "Clip", "Identity", "Mul"):
                return False
            value = readers[0].outputs[0]
        while node.op.name in ("Add", "Mul"):
            operators.add(node.op.name)
            producers = map(self._graph.producers.get, node.inputs)
            before = [producer for producer in producers if producer is not None]
            if len(before) != 1:
                return False
            (node,) = before
        return node.op.name == "Tanh" and "Mul" in operators

    def _is_only_output(self, node: Node) -> bool:
        """Check whether rows of a table, looked up by inputs, reach outputs but no layer."""
        if self._fed.isdisjoint(node.inputs[1:]) or not self._after.isdisjoint(node.inputs):
            return False
        shown = behind(self._graph.nodes, node.outputs)
        others = {*self._graph.outputs} - shown
        layers = [n for n in self._graph.nodes if n.index in self._layers and n is not node]
        return not others.isdisjoint(self._after) and not any(
            not shown.isdisjoint(layer.reads) for layer in layers
        )

    def _is_filler(self, use: Use, tensors: Mapping[str, Any]) -> bool:
        """Check whether a scale or bias has its initial value (1 or 0) and an exporter's name.

        Exporters add such tensors where a normalization has no scale or bias of its own.
        """
        start = use.node.op.start(use.position)
        apart = self._stored and use.name not in self._initializers
        if start is None or not (apart or _UNNAMED.fullmatch(own_name(use.name))):
            return False
        return bool((np.asarray(tensors[use.name]) == start).all())

    def _groups(self, node: Node, tensors: Mapping[str, Any]) -> bool:
        """Check whether an InstanceNormalization behind a Reshape stands for GroupNormalization.

        Its own scales are ones and its own biases zeros.
        """
        maker = self._graph.producers.get(node.inputs[0])
        scale, bias = (np.asarray(self._value(name, tensors)) for name in node.inputs[1:3])
        reshaped = maker is not None and maker.op.name == "Reshape"
        return reshaped and bool((scale == 1).all() and (bias == 0).all())

    def _value(self, name: str, tensors: Mapping[str, Any]) -> Any:
        return tensors.get(name, self._graph.initializers.get(name, np.nan))
