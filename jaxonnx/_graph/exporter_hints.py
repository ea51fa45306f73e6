"""Guess an exporter's optimizations for inference, such as folded BatchNormalization.

A file does not say that BatchNormalization was folded into a convolution, or that Dropout was left
out. The guesses here rest on these traces. Each can deceive, and a file without them may have been
changed all the same:

- PyTorch's current exporter names the module of each node and the rewriting that made it: a
  convolution that stems from a BatchNorm module, or from a rule that fuses it, is a folded one. Its
  graph says that a linear layer or a sum takes a `clone`, which is what Dropout becomes;
- PyTorch's older exporter gives weights that it computed new names: `onnx::Conv_193`;
- in an `nn.Sequential`, a linear layer with the number k whose neighbour k - 1 has no node;
- from other exporters: several convolutions that all have a bias, and no normalization at all.
"""

import re
from collections.abc import Collection, Iterator

from onnx import GraphProto, NodeProto

from jaxonnx._display import list_some
from jaxonnx._io.protos import modules, own_name, text

_SEVERAL = 5
"""The number of convolutions from which on a network is expected to have normalizations."""

_COMPUTED = re.compile(r"onnx::Conv(Transpose)?_\d+")
"""The names that PyTorch's exporter gives to weights that it computed."""

_LINEAR = ("Gemm", "MatMul")
# a line of PyTorch's FX graph: a linear layer or sum whose first or second argument is a clone
_OF_CLONE = re.compile(r"aten\.(linear|addmm|mm|add)\.\w+\]\(args = \((%\w+, )?%clone")

_OF_BLOCKS = re.compile(r"onnx::\w+::\d+$")
"""The names that onnxruntime-training's blocks give to what they compute, like a loss."""


def find_folded_norms(graph: GraphProto) -> tuple[int, str]:
    """Count convolutions that seem to have BatchNormalization folded in, and say why."""
    convolutions = [node for node in graph.node if node.op_type in ("Conv", "ConvTranspose")]
    traced = [node for node in convolutions if is_folded(node)]
    if traced:
        return len(traced), "the exporter recorded it"
    renamed = [
        n
        for n in convolutions
        if len(n.input) > 2 and all(map(_COMPUTED.fullmatch, map(own_name, n.input[1:3])))
    ]
    if renamed:
        return len(renamed), f"weights with names like '{renamed[0].input[1]}'"
    normalized = any("Norm" in node.op_type for node in graph.node)
    biased = all(len(node.input) > 2 and node.input[2] for node in convolutions)
    if len(convolutions) < _SEVERAL or not biased or normalized:
        return 0, ""
    # biases with the names that PyTorch gives to a convolution's own
    if all(
        n.input[1].endswith(".weight") and n.input[2] == f"{n.input[1][:-7]}.bias"
        for n in convolutions
    ):
        return 0, ""
    return len(convolutions), "they all have a bias, and nothing is normalized"


def is_folded(node: NodeProto) -> bool:
    """Check whether the exporter recorded that BatchNormalization went into a convolution."""
    keys = ("pkg.torch.onnx.class_hierarchy", "pkg.onnxscript.rewriter.rule_name", "namespace")
    recorded = " ".join(_metadata(node, key) for key in keys).lower().replace("_", "")
    return node.op_type.startswith("Conv") and "batchnorm" in recorded


def find_missing_dropout(graph: GraphProto) -> list[str]:
    """Return the values behind which Dropout seems to have been left out."""
    present = {name for node in graph.node for name in modules(node)}
    maker = {name: node for node in graph.node for name in node.output if name}
    values = []
    for node in graph.node:
        if node.op_type == "Dropout":
            return []
        name = _input_of_clone(node) or _input_across_gap(node, present)
        before = maker.get(name)
        if before is None or before.op_type in ("Reshape", "Transpose"):
            continue  # a clone also makes a transposed array contiguous
        # a module that is used twice goes by one of its names
        if node.op_type == "Add" or modules(before)[-1:] != modules(node)[-1:]:
            values.append(name)
    return list(dict.fromkeys(values))


def _input_of_clone(node: NodeProto) -> str:
    """Return the input of a linear layer or a sum that is a clone in PyTorch's own graph."""
    match = _OF_CLONE.search(_metadata(node, "pkg.torch.onnx.fx_node"))
    if match is None:
        return ""
    if match[1] == "add":
        return node.input[1 if match[2] else 0] if node.op_type == "Add" else ""
    return node.input[0] if node.op_type in _LINEAR and not match[2] else ""


def _input_across_gap(node: NodeProto, present: Collection[str]) -> str:
    """Return the input of a linear layer whose neighbour in a Sequential has no node."""
    path = modules(node)
    if node.op_type not in _LINEAR or not path:
        return ""
    match = re.fullmatch(r"(.*\.)?([1-9]\d*)", path[-1])
    if match is None or f"{match[1] or ''}{int(match[2]) - 1}" in present:
        return ""
    return node.input[0]


def _metadata(node: NodeProto, key: str) -> str:
    return next((text(entry.value) for entry in node.metadata_props if entry.key == key), "")


def notes(graph: GraphProto, drops: bool) -> Iterator[str]:
    """Yield notes on the consequences of these traces for training.

    Args:
      graph: the graph as the file has it.
      drops: whether Dropout was put back already.
    """
    count, why = find_folded_norms(graph)
    if count:
        yield (
            f"BatchNormalization seems to be folded into {count} convolutions ({why}): training "
            "goes on without it and may need a smaller learning rate. A file that keeps it trains "
            "as the network did; PyTorch writes one with torch.onnx.export(..., dynamo=False, "
            "training=torch.onnx.TrainingMode.PRESERVE)"
        )
    if not graph.initializer and any(_OF_BLOCKS.match(value.name) for value in graph.output):
        yield (
            "this seems to be an eval_model.onnx of onnxruntime-training, whose weights are "
            "inputs: jaxonnx.load(path, weights='checkpoint') makes tensors of them, and "
            f".with_outputs([...]) returns the network without the loss '{graph.output[0].name}'"
        )
    places = [] if drops else find_missing_dropout(graph)
    if places:
        listed = list_some(f"'{name}'" for name in places)
        yield (
            f"Dropout seems to be left out behind {listed}: if the network was trained with "
            "it, dropout={'value': ratio} in training puts it back (Model.with_dropout)"
        )
