"""Weights that a file stores as integers: reported, and on request made floating-point tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto

from jaxonnx._graph.ancestors import select_part
from jaxonnx._graph.bind import Graph, bind
from jaxonnx._graph.uses import weights
from jaxonnx._io import records
from jaxonnx._io.protocol import File
from jaxonnx._run.scope import Context, run
from jaxonnx._text import format_count
from jaxonnx.errors import InputError
from jaxonnx.quantization._record import declare


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
    result = ModelProto()
    result.CopyFrom(proto)
    for i, node in reversed([*enumerate(proto.graph.node)]):
        first = node.output[0] if node.output else ""
        if first in new or (node.op_type == "Constant" and first in unused):
            del result.graph.node[i]
    for i, tensor in reversed([*enumerate(proto.graph.initializer)]):
        if tensor.name in unused:
            del result.graph.initializer[i]
    result.graph.initializer.extend(declare(name, value) for name, value in new.items())
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
