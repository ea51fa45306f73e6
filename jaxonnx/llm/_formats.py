"""Formats of language models: which files of a folder are the model.

onnxruntime-genai    genai_config.json names the file of the decoder, and that of its encoder
optimum              model.onnx, or decoder_model*.onnx, beside config.json
transformers.js      onnx/model.onnx and variants of it, onnx/model_q4.onnx

The last two have an encoder beside its decoder as encoder_model.onnx; they are
joined here. The first and the last have vision-language models as three files (`_vision_language`).

A name like "onnx-community/Qwen3-0.6B-ONNX" is a folder of the Hugging Face hub.

The joined graph takes what Hugging Face's models take: the inputs of the encoder, and those of the
decoder as `decoder_input_ids`, `decoder_attention_mask` and so on. The decoder reads the states of
the encoder and its mask, or (onnxruntime-genai's Whisper) keys and values that the encoder
computes. Names of the encoder's tensors have `PREFIX`.
"""

import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
from onnx import FunctionProto, GraphProto, ModelProto

from jaxonnx._io.checkpoints import RunFormat
from jaxonnx._io.files import list_data_files
from jaxonnx._io.formats import FORMATS
from jaxonnx._io.protocol import File, Format
from jaxonnx._io.protos import PREFIX, own_name, reads, rename_values, value_names
from jaxonnx.errors import InputError, ModelError
from jaxonnx.llm._folders import (
    CHAT_TEMPLATES,
    DECODERS,
    GENAI,
    VARIANTS,
    WEIGHTS,
    ModelFolder,
    ancestors,
    extract_part,
    list_modules,
    refuse_records,
    split_variant,
)
from jaxonnx.llm._vision_language import VisionLanguage

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
        if not _joined_values(first.graph, second.graph):
            raise ModelError(
                f"the decoder has no input '{STATES}' for what the encoder gives; its inputs are "
                + ", ".join(value.name for value in second.graph.input)
            )
        versions = {entry.domain: entry.version for entry in first.opset_import}
        for entry in second.opset_import:
            if versions.get(entry.domain, entry.version) != entry.version:
                raise ModelError(
                    f"the encoder has operators of version {versions[entry.domain]} of "
                    f"'{entry.domain or 'ai.onnx'}', the decoder of version {entry.version}; "
                    "jaxonnx.convert(..., opset=) of one of them makes them the same"
                )
        both = {_key(f) for f in first.functions} & {_key(f) for f in second.functions}
        if both:
            raise ModelError(f"the encoder and the decoder both have a function '{min(both)[1]}'")
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
            operands = {name for node in part.graph.node for name in reads(node)}
            declared = [
                values.get(n, v) for n, v in part_values.items() if n in values or n in joined
            ]
            new = [
                v for n, v in values.items() if n in operands and n not in mine and n not in theirs
            ]
            part.graph.input.extend([*declared, *new])
        first.graph.output.extend(encoder.graph.output)
        second.graph.output.extend(proto.graph.output)
        original = {name: value.name for name, value in mine.items()}
        rename_values(first.graph, lambda name: original.get(name, own_name(name)), _leave)
        original = {new: old for old, new in renamed.items()}
        rename_values(second.graph, lambda name: original.get(name, name))
        return first, second


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


_MARKS = (GENAI, "config.json", "tokenizer.json", "tokenizer_config.json")
_ENCODER = "encoder_model"
_PARTS = "vision_encoder", "embed_tokens"
"""Files of transformers.js before the decoder of a vision-language model."""
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)+")


class FolderFormat(Format):
    """A format of the folders of language models."""

    def read(self, place: ModelFolder) -> File:
        return place.read()


class DescribedFormat(FolderFormat):
    """An .onnx file beside a configuration that describes it.

    It is `config.json` of transformers, or the genai_config.json that names the file, in the folder
    of the file or, for transformers.js, in the one above.
    """

    def find(self, source: Any, choice: str | None) -> ModelFolder | None:
        if not isinstance(source, str | os.PathLike) or (path := Path(source)).suffix != ".onnx":
            return None
        for folder in (path.parent, *([path.parent.parent] if path.parent.name == "onnx" else [])):
            name = path.relative_to(folder).as_posix()
            with suppress(ModelError):  # another file by that name
                config, genai = map(ModelFolder(folder).read_json, ("config.json", GENAI))
                decoder = genai.get("model", {}).get("decoder", {})
                if "model_type" in config or decoder.get("filename") == name:
                    return ModelFolder(folder, (name,))
        return None


class GenaiFormat(FolderFormat):
    """A folder of onnxruntime-genai, whose configuration names the files."""

    def find(self, source: Any, choice: str | None) -> ModelFolder | None:
        if not isinstance(source, str | os.PathLike) or not Path(source, GENAI).is_file():
            return None
        return self.choose(str(source), Path(source), _list_files(Path(source)))

    def choose(self, what: str, path: Path, names: Collection[str]) -> ModelFolder | None:
        """Choose the files that the configuration names; None if it names no decoder.

        Args:
          what: the folder, for errors.
          path: the folder, which has the configuration.
          names: its files.

        Raises:
          InputError: the folder does not have a file that the configuration names.
        """
        model = ModelFolder(path).read_json(GENAI).get("model", {})
        for kind in (VisionLanguage, EncoderDecoder, ModelFolder):
            files = tuple(model.get(role, {}).get("filename") for role in kind.roles)
            if not all(files):
                continue
            if missing := [name for name in files if name not in names]:
                raise InputError(
                    f"'{what}': {GENAI} names '{missing[0]}', and the folder does not have it"
                )
            return kind(path, files)
        return None


class ExportedFormat(FolderFormat):
    """A folder of optimum or transformers.js, whose files have the names of their exporters."""

    form = "the folder of a language model"
    choice = "variant"

    def find(self, source: Any, choice: str | None) -> ModelFolder | None:
        if not isinstance(source, str | os.PathLike) or not Path(source).is_dir():
            return None
        names = _list_files(Path(source))
        marked = any(mark in names for mark in _MARKS) or any(n.startswith("onnx/") for n in names)
        return self.choose(str(source), Path(source), names, choice) if marked else None

    def choose(
        self, what: str, path: Path, names: Collection[str], variant: str | None
    ) -> ModelFolder:
        """Choose the files of one model, and of one variant.

        Args:
          what: the folder, for errors.
          path: the folder.
          names: its files.

        Raises:
          InputError: no file fits, or several do: the message names them.
        """
        files = sorted(n for n in names if re.fullmatch(r"(onnx/)?[^/]+\.onnx", n))
        stems, variants = ({n: split_variant(n)[i] for n in files} for i in (0, 1))
        choice = {"q8": "quantized"}.get(variant or "", variant)
        candidates = [n for n in files if choice in (None, variants[n])]
        merged = [n for n in candidates if stems[n] == DECODERS[0]]
        if merged:
            candidates = [n for n in candidates if n in merged or stems[n] not in DECODERS]
        if {DECODERS[0], *_PARTS} <= {*stems.values()}:
            if len(merged) == 1:
                return VisionLanguage(path, (*_choose_parts(stems, variants, choice), *merged))
            candidates = merged
        if len(candidates) == 1:
            return ModelFolder(path, (*candidates,))
        rest = [n for n in candidates if stems[n] != DECODERS[2]]
        roles = {stems[n]: n for n in rest}
        if len(rest) == 2 and {*roles} in ({DECODERS[0], _ENCODER}, {DECODERS[1], _ENCODER}):
            encoder = roles.pop(_ENCODER)
            return EncoderDecoder(path, (encoder, *roles.values()))
        if not files:
            nested = sorted({str(PurePosixPath(n).parent) for n in names if n.endswith(".onnx")})
            hint = f"; its folders {', '.join(nested)} have some" if nested else ""
            raise InputError(f"'{what}' has no .onnx file, in itself or in 'onnx'{hint}")
        if not candidates:
            raise InputError(f"'{what}' has no variant {variant!r}; it has {', '.join(files)}")
        several = sorted({variants[n] for n in candidates})
        hint = f"variant= (one of {', '.join(map(repr, several))}), or " * (len(several) > 1)
        raise InputError(
            f"'{what}' has several models: {', '.join(candidates)}; choose one by {hint}the path "
            "of the file"
        )


class HubFormat(FolderFormat):
    """A folder of the Hugging Face hub, by the name of its repository."""

    form = "the name of one on the Hugging Face hub"
    choice = "variant"

    def find(self, source: Any, choice: str | None) -> ModelFolder | None:
        named = isinstance(source, str) and _HUB.fullmatch(source) and not os.path.exists(source)
        if not named or Path(source).suffix in (".onnx", ".npz"):
            return None
        return _download(source, choice)


def _list_files(path: Path) -> list[str]:
    return [p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()]


def _choose_parts(
    stems: Mapping[str, str], variants: Mapping[str, str], choice: str | None
) -> list[str]:
    """Choose the files of `_PARTS`, in the variant of the decoder or else the most precise one."""
    chosen = []
    for part in _PARTS:
        files = {variants[name]: name for name, stem in stems.items() if stem == part}
        ordered = (choice or "fp32", *VARIANTS, *sorted(files))
        chosen.append(next(files[variant] for variant in ordered if variant in files))
    return chosen


def _download(name: str, variant: str | None) -> ModelFolder:
    """Bring a folder of the Hugging Face hub here, with one model and no other weights."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise InputError(
            f"'{name}' does not exist; to read it from the Hugging Face hub: pip install "
            "huggingface_hub"
        ) from error
    repository, inner = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    prefix = f"{inner}/" if inner else ""
    # what a lack of the network raises is httpx's own, in its newer versions
    failures = (OSError, getattr(sys.modules.get("httpx"), "HTTPError", OSError))
    try:
        names = [n for n in hub.list_repo_files(repository) if n.startswith(prefix)]
        names = [n.removeprefix(prefix) for n in names]
        needed = [prefix + n for n in names if not n.endswith(WEIGHTS) and _is_part(n)]
        path = Path(hub.snapshot_download(repository, allow_patterns=needed), inner)
        if modules := list_modules(path):
            patterns = [f"{prefix}{module}*" for module in modules]
            hub.snapshot_download(repository, allow_patterns=patterns)
        folder = _choose(name, path, names, variant)
        files = folder.files
        hub.snapshot_download(repository, allow_patterns=[f"{prefix}{file}*" for file in files])
        patterns = [
            str(PurePosixPath(prefix + file).parent / n)
            for file in files
            for n in list_data_files(path / file)
            if not (path / file).parent.joinpath(n).exists()
        ]
        if patterns:
            hub.snapshot_download(repository, allow_patterns=patterns)
    except failures as error:
        try:
            path = Path(hub.snapshot_download(repository, local_files_only=True), inner)
        except failures:
            raise InputError(
                f"'{name}' does not exist, and the Hugging Face hub did not return it: {error}"
            ) from error
        folder = _choose(name, path, _list_files(path), variant)
    return folder


def _choose(what: str, path: Path, names: Collection[str], variant: str | None) -> ModelFolder:
    """Choose the files of a model, by the configuration of onnxruntime-genai or by their names."""
    named = GenaiFormat().choose(what, path, names) if variant is None and GENAI in names else None
    return named or ExportedFormat().choose(what, path, names, variant)


def _is_part(name: str) -> bool:
    """Check whether a file is configuration: no data of a model, and not of another folder."""
    data = ".onnx." in name or ".onnx_data" in name or name.endswith(".data")
    nested = "/" in name and not fnmatch(name, CHAT_TEMPLATES)
    return not data and not nested


# before folders of runs, and behind the formats that a user has registered
_place = next(i for i, form in enumerate(FORMATS) if isinstance(form, RunFormat))
FORMATS[_place:_place] = DescribedFormat(), GenaiFormat(), ExportedFormat(), HubFormat()
