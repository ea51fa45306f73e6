"""A vision-language model: three files of a folder as one graph, and the graph as three files.

    pixel_values -> vision encoder -> features of images --+
    input_ids ----> embedding ---> embeddings of tokens ---+-> decoder -> logits

The features stand in for the tokens of images, of each row by its own order. onnxruntime-genai's
embedding does so itself, for the images of all rows in a line; transformers.js leaves it to the
runtime. In the joined graph it is the same few nodes for both. Names of tensors of the vision
encoder and the embedding have a prefix; those of the decoder stay.
"""

from collections.abc import Callable, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper
from onnx.external_data_helper import load_external_data_for_tensor

from jaxonnx._io.protocol import File
from jaxonnx._io.protos import all_nodes, reads, rename_values, value_names
from jaxonnx.errors import ModelError, warn
from jaxonnx.llm._folders import GENAI, ModelFolder, ancestors, extract_part, refuse_records
from jaxonnx.registry import lookup

VISION, EMBEDDING = "vision_encoder.", "embedding."
PIXELS, TOKENS, EMBEDS = "pixel_values", "input_ids", "inputs_embeds"
_MERGE = "merge_images."
_MOVES = ("Identity", "Cast", "Reshape")
"""Operators behind which embeddings are the same, in another shape or type."""


class VisionLanguage(ModelFolder):
    """A folder with a vision encoder, which is frozen by default, an embedding and a decoder."""

    roles = ("vision", "embedding", "decoder")

    @property
    def image_token(self) -> int | None:
        for source in (self.read_json(GENAI).get("model", {}), self.read_json("config.json")):
            for name in ("image_token_id", "image_token_index"):
                if isinstance(source.get(name), int):
                    return source[name]
        return None

    @property
    def task(self) -> str:
        return "image-text-to-text"

    def freezes(self, name: str) -> bool:
        return name.startswith(VISION)

    def join(self, files: Sequence[File]) -> File:
        """Join the three files.

        If they do not fit, a folder of onnxruntime-genai is that of the decoder, with a warning.
        """
        vision, embedding, decoder = files
        tiles = bool(self.read_image_settings().get("crop_to_patches"))
        try:
            joined = _join_parts(vision, embedding, decoder, self.image_token, tiles)
            return joined._replace(companion=self)
        except ModelError as error:
            if not self.read_json(GENAI):
                raise
            warn(
                f"the decoder of '{self.path}' is loaded alone, to be trained on {EMBEDS}: {error}",
            )
            return ModelFolder(self.path, self.files[-1:]).join(files[-1:])

    def split(self, proto: ModelProto) -> Sequence[ModelProto]:
        refuse_records(proto)
        paths = [self.path / name for name in self.files]
        headers = [onnx.load(path, load_external_data=False) for path in paths]
        places = [v.name for v in headers[1].graph.input if v.name != TOKENS]
        text = _find_text(headers[1].graph, places[0] if places else "")
        nodes = [node for node in proto.graph.node if not _is_merging(node)]
        back = ancestors(nodes, {v.name for v in proto.graph.output} - {EMBEDS}, {EMBEDS})
        features = _find_features(headers[0].graph).name
        owned = [
            ancestors(nodes, {VISION + features}),
            ancestors(nodes, {EMBEDDING + text}),
            back,
        ]
        for name in value_names(proto.graph) - set().union(*owned):  # what nothing needs stays
            part = 0 if name.startswith(VISION) else 1 if name.startswith(EMBEDDING) else 2
            owned[part].add(name)
        new = {v.name: v for v in proto.graph.input}
        computed = {name for node in nodes for name in node.output}
        computed |= {tensor.name for tensor in proto.graph.initializer}
        computed |= {tensor.values.name for tensor in proto.graph.sparse_initializer}
        parts = []
        for prefix, header, names in zip((VISION, EMBEDDING, ""), headers, owned, strict=True):
            hidden = {VISION + features} if prefix == VISION else {EMBEDS}
            part = extract_part(proto, header, names & computed, hidden)
            operands = {n for node in part.graph.node for n in reads(node)}
            theirs = {v.name: v if prefix else new.get(v.name, v) for v in header.graph.input}
            others = [
                v for n, v in new.items() if n in operands and n not in {TOKENS, PIXELS, *theirs}
            ]
            declared = [v for n, v in theirs.items() if prefix or n in new or n == EMBEDS]
            part.graph.input.extend([*declared, *others])
            part.graph.output.extend(proto.graph.output if not prefix else header.graph.output)
            if prefix:
                part.ir_version = header.ir_version
                drop = methodcaller("removeprefix", prefix)
                rename_values(part.graph, drop, drop)
            parts.append(part)
        _restore(parts[1], headers[1], paths[1].parent)
        parts[2].ClearField("metadata_props")
        parts[2].metadata_props.extend(proto.metadata_props)
        return parts[0], parts[1], parts[2]


def _join_parts(
    vision: File, embedding: File, decoder: File, image_token: int | None, tiles: bool
) -> File:
    """Return the three files as one.

    Args:
      vision, embedding, decoder: the files.
      image_token: the token that stands for a feature of an image, if it is known.
      tiles: whether `pixel_values` has several images, or tiles of them, for each row.

    Raises:
      ModelError: the files do not fit each other.
    """
    if image_token is None:
        raise ModelError(
            "no configuration file names the token that stands for the features of images: "
            "'image_token_id' in genai_config.json (\"model\") or config.json"
        )
    _check_inputs("the vision encoder", vision.proto.graph, {PIXELS})
    (decoder_embeds,) = _find(decoder.proto.graph.input, EMBEDS, "the decoder has no input")
    features = _find_features(vision.proto.graph)
    places = [v.name for v in embedding.proto.graph.input if v.name != TOKENS]
    _check_inputs("the embedding", embedding.proto.graph, {TOKENS, *places[:1]})
    text = _find_text(embedding.proto.graph, places[0] if places else "")

    result, tensors = ModelProto(), {}
    result.CopyFrom(decoder.proto)
    fronts = []
    for what, prefix, (proto, values, _), keep in (
        ("vision encoder", VISION, vision, set() if tiles else {PIXELS}),
        ("embedding", EMBEDDING, embedding, {TOKENS}),
    ):
        front = ModelProto()
        front.CopyFrom(proto)
        if prefix == EMBEDDING:
            _cut(front.graph, text)
        names = value_names(front.graph) - keep
        rename_values(front.graph, _adder(prefix, names), _adder(prefix))
        _take_opsets(result, front, what)
        tensors |= {prefix + n: x for n, x in values.items() if n in names}
        fronts.append(front.graph)

    pixels, tokens = (
        next(v for v in front.input if v.name.endswith(name))
        for front, name in zip(fronts, (PIXELS, TOKENS), strict=True)
    )
    graph, nodes = result.graph, []
    pixels.type.tensor_type.shape.dim[0].CopyFrom(tokens.type.tensor_type.shape.dim[0])
    if tiles:
        nodes += _flatten_tiles(pixels)
    kinds = [v.type.tensor_type.elem_type for v in (tokens, features, decoder_embeds)]
    nodes += [*fronts[0].node, *fronts[1].node]
    converts = text not in [v.name for v in embedding.proto.graph.output]
    nodes += _merge(VISION + features.name, EMBEDDING + text, image_token, kinds, converts)
    values = [v for v in graph.input if v.name != EMBEDS]
    nodes += graph.node
    for field, merged in (("input", [tokens, pixels, *values]), ("node", nodes)):
        graph.ClearField(field)
        getattr(graph, field).extend(merged)
    for front in fronts:
        for field in ("initializer", "sparse_initializer", "quantization_annotation", "value_info"):
            getattr(graph, field).extend(getattr(front, field))
    graph.value_info.append(decoder_embeds)
    return File(result, decoder.tensors | tensors)


def find_features(proto: ModelProto) -> str:
    """Return the value of a joined graph that has the features of images."""
    return next(n.input[0] for n in proto.graph.node if f"{_MERGE}features" in n.output)


def _check_inputs(what: str, graph: GraphProto, names: set[str]) -> None:
    """Raise a ModelError unless a graph has inputs of these names."""
    tensors = {tensor.name for tensor in graph.initializer}
    inputs = {value.name for value in graph.input} - tensors
    if inputs != names:
        raise ModelError(
            f"{what} takes {', '.join(sorted(inputs))}, and must take "
            f"{' and '.join(sorted(names))} alone"
        )


def _find(values: Any, name: str, lack: str) -> list[ValueInfoProto]:
    chosen = [value for value in values if value.name == name]
    if not chosen:
        raise ModelError(f"{lack} '{name}': it has {', '.join(v.name for v in values)}")
    return chosen


def _find_features(graph: GraphProto) -> ValueInfoProto:
    """Return the output of a vision encoder that has the features."""
    if len(graph.output) == 1:
        return graph.output[0]
    return _find(graph.output, "image_features", "the vision encoder has no output")[0]


def _find_text(graph: GraphProto, places: str) -> str:
    """Return the value of an embedding that has the embeddings of tokens, without images.

    Args:
      graph: the embedding.
      places: its input of the features that it places; "" without one.

    Raises:
      ModelError: the features are placed in a way that is not known.
    """
    makers = {name: node for node in graph.node for name in node.output}

    def pass_moves(name: str) -> str:
        while name in makers and makers[name].op_type in _MOVES:
            name = makers[name].input[0]
        return name

    (output,) = _find(graph.output, EMBEDS, "the embedding has no output")
    if not places:
        return output.name
    behind = {places}
    for node in graph.node:
        if reads(node) & behind:
            behind.update(node.output)
    node = makers.get(pass_moves(output.name))
    kind = "" if node is None else node.op_type
    data = {"Where": [1, 2], "ScatterND": [0], "ScatterElements": [0]}.get(kind, [])
    texts = [node.input[i] for i in data if node is not None and node.input[i] not in behind]
    if len(texts) != 1:
        raise ModelError(
            f"the embedding puts '{places}' among the embeddings of tokens by {kind or 'no node'}, "
            "and must do so by Where or ScatterND"
        )
    return pass_moves(texts[0])


def _cut(graph: GraphProto, text: str) -> None:
    """Remove the nodes of an embedding that place the features of images, in place."""
    names = ancestors(graph.node, {text})
    for field, of in (("node", lambda n: n.output), ("initializer", lambda t: [t.name])):
        chosen = [x for x in getattr(graph, field) if not names.isdisjoint(of(x))]
        graph.ClearField(field)
        getattr(graph, field).extend(chosen)
    inputs = [value for value in graph.input if value.name == TOKENS]
    for field in ("input", "output", "value_info"):
        graph.ClearField(field)
    graph.input.extend(inputs)


def _restore(part: ModelProto, header: ModelProto, folder: Path) -> None:
    """Put the nodes back into an embedding that `_cut` removed, in place."""
    produced = {name for node in part.graph.node for name in node.output}
    extra = [node for node in header.graph.node if produced.isdisjoint(node.output)]
    needed = {name for node in extra for name in reads(node)}
    needed -= {tensor.name for tensor in part.graph.initializer}
    part.graph.node.extend(extra)
    for tensor in header.graph.initializer:
        if tensor.name in needed:
            if tensor.external_data:
                load_external_data_for_tensor(tensor, str(folder))
                tensor.data_location = TensorProto.DEFAULT
                tensor.ClearField("external_data")
            part.graph.initializer.append(tensor)


def _adder(prefix: str, names: set[str] | None = None) -> Callable[[str], str]:
    """Return a function that adds a prefix to names, or to some of them."""
    return lambda name: prefix + name if name and (names is None or name in names) else name


def _take_opsets(result: ModelProto, front: ModelProto, what: str) -> None:
    """Add functions and opsets of a file to the joined one, in place.

    Raises:
      ModelError: an operator would get another meaning.
    """
    versions = {entry.domain: entry.version for entry in result.opset_import}
    old_versions = {entry.domain: entry.version for entry in front.opset_import}
    for node in all_nodes(front.graph):
        domain = "" if node.domain == "ai.onnx" else node.domain
        old, new = old_versions.get(domain), versions.get(domain)
        operators = [lookup(domain, node.op_type, version) for version in (old, new) if version]
        if operators[1:] and operators[0] is not operators[1]:
            raise ModelError(
                f"the {what} has operators of version {old} of '{domain or 'ai.onnx'}', the "
                f"decoder of version {new}, and {node.op_type} '{node.name}' differs between them; "
                "jaxonnx.convert(..., opset=) of one of them makes them the same"
            )
    result.opset_import.extend(e for e in front.opset_import if e.domain not in versions)
    keys = {(f.domain, f.name, f.overload) for f in result.functions}
    result.functions.extend(
        f for f in front.functions if (f.domain, f.name, f.overload) not in keys
    )
    result.ir_version = max(result.ir_version, front.ir_version)


def _flatten_tiles(pixels: ValueInfoProto) -> list[NodeProto]:
    """Give an input of images an axis of tiles, in place; return the node that removes it."""
    dims = pixels.type.tensor_type.shape.dim
    sizes = [dim.dim_value for dim in dims][1:]
    if not all(sizes):
        raise ModelError(f"the vision encoder leaves the size of '{PIXELS}' open, {sizes}")
    inner, pixels.name = pixels.name, PIXELS
    for axis, size in enumerate(["tiles", *sizes], 1):
        dim = dims[axis] if axis < len(dims) else dims.add()
        dim.Clear()
        setattr(dim, "dim_value" if isinstance(size, int) else "dim_param", size)
    shape = helper.make_tensor("", TensorProto.INT64, [4], [-1, *sizes])
    flat = f"{_MERGE}tile_shape"
    return [
        helper.make_node("Constant", [], [flat], f"{_MERGE}TileShape", value=shape),
        helper.make_node("Reshape", [PIXELS, flat], [inner], f"{_MERGE}Tiles"),
    ]


def _merge(
    features: str, text: str, image_token: int, kinds: Sequence[int], converts: bool
) -> list[NodeProto]:
    """Return nodes that put features of images in the place of their tokens.

    Args:
      features: those of each row, [rows * images, tokens, size] or with these axes joined.
      text: the embeddings of tokens, [rows, length, size].
      image_token: the token that stands for a feature.
      kinds: the types of tokens, of features and of the decoder's input.
      converts: whether the type of `text` may be another one.
    """
    nodes: list[NodeProto] = []

    def add(op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        output = output if output == EMBEDS else _MERGE + output
        nodes.append(helper.make_node(op, inputs, [output], _MERGE + op, **attributes))
        nodes[-1].name = f"{output}_{op}" if output == EMBEDS else output
        return output

    def constant(output: str, values: list[int], kind: int = TensorProto.INT64) -> str:
        tensor = helper.make_tensor("", kind, [len(values)], values)
        return add("Constant", [], output, value=tensor)

    of_tokens, of_features, expected = kinds
    last, first, second = (constant(f"at_{i % 3}", [i]) for i in (-1, 0, 1))
    is_image = add("Equal", [TOKENS, constant("token", [image_token], of_tokens)], "is_image")
    counts = add("Cast", [is_image], "counts", to=TensorProto.INT64)
    axis = add("Squeeze", [second], "axis")
    number = add("Sub", [add("CumSum", [counts, axis], "number"), second], "place")
    place = add("Unsqueeze", [add("Max", [number, first], "bounded"), last], "places")
    # the features of each row apart: a row's first image token has its first feature
    rows = add("Gather", [add("Shape", [TOKENS], "token_shape"), first], "rows")
    size = add("Gather", [add("Shape", [features], "feature_shape"), last], "size")
    shape = add("Concat", [rows, last, size], "shape", axis=0)
    apart = add("Reshape", [features, shape], "features")
    chosen = add("GatherND", [apart, place], "chosen", batch_dims=1)
    if of_features != expected:
        chosen = add("Cast", [chosen], "converted", to=expected)
    if converts:
        text = add("Cast", [text], "text", to=expected)
    mask = add("Unsqueeze", [is_image, last], "mask")
    add("Where", [mask, chosen, text], EMBEDS)
    return nodes


def _is_merging(node: NodeProto) -> bool:
    return any(name == EMBEDS or name.startswith(_MERGE) for name in node.output) or (
        node.name == f"{_MERGE}Tiles"
    )
