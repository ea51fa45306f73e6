"""An encoder and its decoder: two files of a folder as one graph, and the graph as two files.

The joined graph takes what Hugging Face's models take: the inputs of the encoder, and those of the
decoder as `decoder_input_ids`, `decoder_attention_mask` and so on. The decoder reads the states of
the encoder and its mask, or (onnxruntime-genai's Whisper) keys and values that the encoder
computes. Names of the encoder's tensors have `PREFIX`.
"""

from collections.abc import Sequence

import onnx
from onnx import FunctionProto, GraphProto, ModelProto

from jaxonnx._io.order import reads
from jaxonnx._io.protocol import File
from jaxonnx._io.protos import PREFIX, own_name, rename_values, value_names
from jaxonnx.errors import ModelError
from jaxonnx.llm._folders import ModelFolder, ancestors, extract_part, refuse_records

STATES = "encoder_hidden_states"
MASK, DECODER_MASK = "attention_mask", "encoder_attention_mask"
_HIDDEN = "last_hidden_state"
_OF_DECODER = "input_ids", "inputs_embeds", "attention_mask", "position_ids"
"""Inputs that a decoder has for itself, whatever the encoder has."""
_NAMES = {"audio_features": "input_features"}
"""Inputs of encoders that Hugging Face's models have under other names."""


class EncoderDecoder(ModelFolder):
    """A folder with an encoder and its decoder."""

    roles = ("encoder", "decoder")

    def join(self, files: Sequence[File]) -> File:
        (first, states, _), (second, tensors, _) = files
        _check(first, second)
        result = ModelProto()
        result.CopyFrom(second)
        renamed = _decoder_names(first.graph, second.graph)
        rename_values(result.graph, lambda name: renamed.get(name, name))
        front = ModelProto()
        front.CopyFrom(first)
        names = value_names(first.graph) - {value.name for value in first.graph.input}
        rename_values(
            front.graph,
            lambda name: PREFIX + name if name in names else _NAMES.get(name, name),
            _enter,
        )
        if both := (value_names(front.graph) & value_names(result.graph)) - {*renamed.values()}:
            raise ModelError(f"the encoder and the decoder both have a value '{min(both)}'")

        inputs = {value.name for value in front.graph.input} | _joined_values(
            first.graph, second.graph
        )
        values = [v for v in result.graph.input if v.name not in inputs]
        nodes = [*front.graph.node, *result.graph.node]
        for field, merged in (("input", [*front.graph.input, *values]), ("node", nodes)):
            result.graph.ClearField(field)
            getattr(result.graph, field).extend(merged)
        for field in ("initializer", "sparse_initializer", "value_info", "quantization_annotation"):
            getattr(result.graph, field).extend(getattr(front.graph, field))
        result.graph.value_info.extend(front.graph.output)
        result.functions.extend(first.functions)
        domains = {entry.domain for entry in second.opset_import}
        result.opset_import.extend(e for e in first.opset_import if e.domain not in domains)
        result.ir_version = max(first.ir_version, second.ir_version)
        tensors |= {PREFIX + n if n in names else n: x for n, x in states.items()}
        return File(result, tensors, self)

    def split(self, proto: ModelProto) -> Sequence[ModelProto]:
        refuse_records(proto)
        # the files that were joined, for their inputs, outputs and metadata
        encoder, decoder = (
            onnx.load(self.path / name, load_external_data=False) for name in self.files
        )
        renamed = _decoder_names(encoder.graph, decoder.graph)
        joined = _joined_values(encoder.graph, decoder.graph)
        owned = {PREFIX + value.name for value in encoder.graph.output}
        outputs = {value.name for value in proto.graph.output}
        front = ancestors(proto.graph.node, owned)
        back = ancestors(proto.graph.node, outputs - joined, joined)
        for name in (
            value_names(proto.graph) - front - back
        ):  # what nothing needs stays where it was
            (front if name.startswith(PREFIX) else back).add(name)

        first, second = (
            extract_part(proto, *part, joined) for part in ((encoder, front), (decoder, back))
        )
        values = {value.name: value for value in proto.graph.input}
        mine = {_NAMES.get(v.name, v.name): v for v in encoder.graph.input}
        theirs = {renamed.get(v.name, v.name): v for v in decoder.graph.input}
        for part, part_values in ((first, mine), (second, theirs)):
            read = {name for node in part.graph.node for name in reads(node)}
            declared = [
                values.get(n, v) for n, v in part_values.items() if n in values or n in joined
            ]
            new = [v for n, v in values.items() if n in read and n not in mine and n not in theirs]
            part.graph.input.extend([*declared, *new])
        first.graph.output.extend(encoder.graph.output)
        second.graph.output.extend(proto.graph.output)
        original = {name: value.name for name, value in mine.items()}
        rename_values(first.graph, lambda name: original.get(name, own_name(name)), _leave)
        original = {new: old for old, new in renamed.items()}
        rename_values(second.graph, lambda name: original.get(name, name))
        return first, second


def _check(encoder: ModelProto, decoder: ModelProto) -> None:
    if not _joined_values(encoder.graph, decoder.graph):
        raise ModelError(
            f"the decoder has no input '{STATES}' for what the encoder gives; its inputs are "
            + ", ".join(value.name for value in decoder.graph.input)
        )
    versions = {entry.domain: entry.version for entry in encoder.opset_import}
    for entry in decoder.opset_import:
        if versions.get(entry.domain, entry.version) != entry.version:
            raise ModelError(
                f"the encoder has operators of version {versions[entry.domain]} of "
                f"'{entry.domain or 'ai.onnx'}', the decoder of version {entry.version}; "
                "jaxonnx.convert(..., opset=) of one of them makes them the same"
            )
    both = {_key(f) for f in encoder.functions} & {_key(f) for f in decoder.functions}
    if both:
        raise ModelError(f"the encoder and the decoder both have a function '{min(both)[1]}'")


def _key(function: FunctionProto) -> tuple[str, str, str]:
    return function.domain, function.name, function.overload


def _find_links(encoder: GraphProto, decoder: GraphProto) -> dict[str, str]:
    """Return the inputs of a decoder that are outputs of its encoder, with these.

    These are the states, or the keys and values for each layer, as `past_key_cross_0` is an input
    and `present_key_cross_0` an output.
    """
    names, inputs = ([v.name for v in values] for values in (encoder.output, decoder.input))
    pairs = {name: name.replace("past_", "present_", 1) for name in inputs if "past_" in name}
    links = {name: output for name, output in pairs.items() if output in names}
    if STATES in inputs:
        if len(names) != 1 and _HIDDEN not in names:
            raise ModelError(f"the encoder has the outputs {', '.join(names)}, and no '{_HIDDEN}'")
        links[STATES] = names[0] if len(names) == 1 else _HIDDEN
    return links


def _joined_values(encoder: GraphProto, decoder: GraphProto) -> set[str]:
    """Return the values of the joined graph that the encoder computes and the decoder reads."""
    return {PREFIX + name for name in _find_links(encoder, decoder).values()}


def _decoder_names(encoder: GraphProto, decoder: GraphProto) -> dict[str, str]:
    """Return the names that inputs of the decoder have in the joined graph, where others."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in encoder.input}
    names = {
        value.name: f"decoder_{value.name}"
        for value in decoder.input
        if value.name in kinds or value.name in _OF_DECODER
    }
    names |= {name: PREFIX + output for name, output in _find_links(encoder, decoder).items()}
    for value in decoder.input:
        if value.name == DECODER_MASK and kinds.get(MASK) == value.type.tensor_type.elem_type:
            names[value.name] = MASK
    return names


def _enter(name: str) -> str:
    """Return the name of an encoder's node in the joined graph: a module of PyTorch's, below."""
    if not name:
        return name
    return f"/{PREFIX[:-1]}{name}" if name.startswith("/") else PREFIX + name


def _leave(name: str) -> str:
    """Return the inverse of `_enter`."""
    inner = name.removeprefix(f"/{PREFIX[:-1]}")
    return inner if inner.startswith("/") and inner != name else name.removeprefix(PREFIX)
