"""The folder of a language model: the files that are the model, and all that is saved with them."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import onnx
from onnx import ModelProto, NodeProto

from jaxonnx._data.images import FILTERS
from jaxonnx._files import replace_file, wrap_errors, write_atomically
from jaxonnx._io.files import LIMIT, OnnxFormat, list_data_files
from jaxonnx._io.protocol import Companion, File, Graph, check_exists, is_folder
from jaxonnx._io.protos import all_nodes, reads
from jaxonnx._io.records import QUANTIZATION, SPARSITY
from jaxonnx.errors import InputError, ModelError, warn

GENAI = "genai_config.json"
CHAT_TEMPLATES = "additional_chat_templates/*.jinja"
"""Chat templates beside the default one, by transformers' name."""
DECODERS = ("decoder_model_merged", "decoder_model", "decoder_with_past_model")
"""Files of optimum with the same weights; the first contains the others."""
WEIGHTS = (".onnx", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
VARIANTS = ("fp32", "fp16", "bf16", "int8", "uint8", "q8", "quantized", "q4", "q4f16", "bnb4")
_VARIANT = re.compile(rf"(.+?)_({'|'.join(VARIANTS)}|O[1-4]|q?u?int8_(arm64|avx2|avx512(_vnni)?))")
"""The name of a file with its variant: those of transformers.js, and the levels of optimization and
the processors that optimum and sentence-transformers write files for."""
MODULES = "modules.json"
"""The file in which sentence-transformers lists a network and the modules behind it."""
_TRANSCRIPT = "<|startoftranscript|>"
"""The token that Whisper's transcripts begin with."""
_BEHIND_PADDING = {
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke"),
    *("markuplm", "mluke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta"),
    *("xlm-roberta-xl", "xmod"),
}
"""Model types of transformers whose first position is the one behind `pad_token_id`: the table of
`max_position_embeddings` has no places for as many tokens."""
_TASKS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
}
"""The tasks of the hub, by the end of the class of transformers."""

_SQUARE = ("Beit", "DPT", "DeiT", "Perceiver", "Segformer", "ViT")
"""Image processors for which a size that is one number is both sides, not the shorter edge."""
_PROBLEMS = {
    "Softmax": (None, "single_label_classification"),
    "Sigmoid": ("multi_label_classification",),
    "": ("regression",),
}
"""The `problem_type` of transformers by the function of outputs; None is found by labels."""


@dataclass(frozen=True)
class ModelFolder(Companion):
    """A folder with a model in one file, its configuration and its tokenizer.

    A subclass is of a model in several files, which are one graph in memory.
    """

    roles: ClassVar[tuple[str, ...]] = ("decoder",)
    """The names in `genai_config.json` of the files of the model, in order."""

    path: Path
    files: tuple[str, ...] = ()
    """The files of the model, relative to the folder, with slashes."""
    changed: Mapping[str, str] = field(default_factory=dict, kw_only=True, hash=False, repr=False)
    """The texts of files that the model has in place of the folder's, by name."""

    @property
    def folder(self) -> ModelFolder:
        return self

    @property
    def image_token(self) -> int | None:
        """The token that stands for the features of images; None without a vision encoder."""
        return None

    def read(self) -> File:
        """Read the files of the model as one."""
        reader = OnnxFormat()
        return self.join([reader.read(check_exists(self.path / name)) for name in self.files])

    def join(self, files: Sequence[File]) -> File:
        """Join the files of the model to one graph.

        Raises:
          ModelError: they do not fit each other.
        """
        (file,) = files
        return file._replace(companion=self)

    def split(self, proto: ModelProto) -> Sequence[ModelProto]:
        """Split a graph that `join` made, changed or not, into the files of the model.

        Raises:
          InputError: the graph has a record that is of several files.
        """
        return [proto]

    def read_image_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' image processor; empty if the folder has none."""
        nested = self.read_json("processor_config.json").get("image_processor")
        settings = self.read_json("preprocessor_config.json") or nested
        return settings if isinstance(settings, dict) else {}

    @property
    def image_settings(self) -> dict[str, Any]:
        settings = self.read_image_settings()
        with wrap_errors(f"'{self.path}': preprocessor_config.json is damaged", ModelError):
            fields = _fields_of_processor(settings)
        return fields | ({"labels": self.classes} if self.classes else {})

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes by `config.json`, in the order of the outputs; () without."""
        named = self.read_json("config.json").get("id2label") or {}
        numbers = [*map(str, range(len(named)))]
        return tuple(str(named[n]) for n in numbers) if named.keys() == {*numbers} else ()

    def read_json(self, name: str) -> dict[str, Any]:
        """Return an object that the folder has as a JSON file; empty without the file.

        Raises:
          ModelError: it is damaged.
        """
        path = self.path / name
        if name not in self.changed and not path.is_file():
            return {}
        with wrap_errors(f"'{path}' is not JSON, or is damaged", ModelError):
            settings = json.loads(self.changed.get(name) or path.read_text("utf-8"))
            if not isinstance(settings, dict):
                raise ValueError("it has no object")
            return settings

    def with_json(self, files: Mapping[str, Any]) -> ModelFolder:
        """Return the folder of a model that has other contents of JSON files, by name."""
        texts = {n: json.dumps(x, indent=2, ensure_ascii=False) + "\n" for n, x in files.items()}
        return replace(self, changed={**self.changed, **texts})

    @property
    def padding_token(self) -> int | None:
        """The padding token of the model, if the files beside it name one.

        `config.json` comes first: exporters write its `pad_token_id` into the graphs of decoders
        that classify, which find the last token of a text by it.
        """
        config, genai = self.read_json("config.json"), self.read_json(GENAI).get("model", {})
        text = config.get("text_config")
        generation = self.read_json("generation_config.json")
        for source in (config, text if isinstance(text, Mapping) else {}, generation, genai):
            token = source.get("pad_token_id")
            if isinstance(token, int) and token >= 0:
                return token
        return self.find_special_token("pad_token")

    def find_special_token(self, role: str) -> int | None:
        """Return the token that the tokenizer's files name for a role, like "eos_token"."""
        settings = self.read_json("tokenizer_config.json")
        listed = settings.get("added_tokens_decoder")
        if listed is None:  # as older versions of transformers wrote it
            settings |= self.read_json("special_tokens_map.json")
        named = settings.get(role)
        content = named.get("content") if isinstance(named, Mapping) else named
        if content is None:
            return None
        for number, token in (listed or {}).items():
            if token.get("content") == content:
                return int(number)
        tokenizer = self.read_json("tokenizer.json")
        added = tokenizer.get("added_tokens") or ()
        number = next((token["id"] for token in added if token["content"] == content), None)
        words = (tokenizer.get("model") or {}).get("vocab")
        return words.get(content) if number is None and isinstance(words, Mapping) else number

    @property
    def context_length(self) -> int | None:
        """The context length that the configuration files give, if any does."""
        settings = self.read_json("config.json")
        length, fill = settings.get("max_position_embeddings"), settings.get("pad_token_id")
        if settings.get("model_type") in _BEHIND_PADDING and isinstance(length, int):
            return length - 1 - (fill if isinstance(fill, int) else 1)
        nested = settings.get("text_config")
        for source, name in (
            (self.read_json(GENAI).get("model", {}), "context_length"),
            (nested if isinstance(nested, Mapping) else {}, "max_position_embeddings"),
            (settings, "max_position_embeddings"),
            (settings, "n_positions"),
            (settings, "max_target_positions"),
        ):
            if isinstance(source.get(name), int):
                return source[name]
        return None

    @property
    def end_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that end a text, and those of them at which a runtime stops.

        A runtime reads the first file that names any: genai_config.json, generation_config.json,
        config.json. The tokenizer's own end token, which is learned, comes before them, as in
        transformers' Trainer.
        """
        files = map(self.read_json, ("generation_config.json", "config.json"))
        sources = (self.read_json(GENAI).get("model", {}), *files)
        listed = (source.get("eos_token_id") for source in sources)
        numbers = next((ids for ids in listed if isinstance(ids, list | int)), [])
        stops = tuple(numbers) if isinstance(numbers, list) else (numbers,)
        learned = self.find_special_token("eos_token")
        return tuple(dict.fromkeys(stops if learned is None else (learned, *stops))), stops

    @property
    def start_token(self) -> int | None:
        """The token that the decoder of an encoder-decoder begins with, if the files give it.

        onnxruntime-genai's folders have the start token of Whisper in the tokenizer alone.
        """
        files = [self.read_json(name) for name in ("generation_config.json", "config.json")]
        files.append(self.read_json(GENAI).get("model", {}))
        name = "decoder_start_token_id"
        start = next((f[name] for f in files if isinstance(f.get(name), int)), None)
        if start is None:
            added = self.read_json("tokenizer.json").get("added_tokens", ())
            start = next((token["id"] for token in added if token["content"] == _TRANSCRIPT), None)
        return start

    @property
    def repository(self) -> str:
        """The repository of the hub, if the folder is in the hub's cache; otherwise empty."""
        cached = re.search(r"models--([^/\\]+?)--([^/\\]+)", str(self.path.absolute()))
        return f"{cached[1]}/{cached[2]}" if cached else ""

    @property
    def origin(self) -> str:
        """The name or path of the exported model, if transformers wrote it; otherwise empty."""
        return str(self.read_json("config.json").get("_name_or_path") or "")

    @property
    def task(self) -> str:
        """The hub's name of the model's task; empty if no configuration tells."""
        if self.read_json(GENAI):
            return "text-generation"
        classes = self.read_json("config.json").get("architectures") or ()
        tasks = (task for end, task in _TASKS.items() if any(c.endswith(end) for c in classes))
        return next(tasks, "")

    def with_scores(self, function: str, classes: Sequence[str]) -> ModelFolder:
        """Return the folder with the `problem_type` that a training gives a classifier.

        Pipelines of transformers read scores by it, and `train` chooses a loss.
        """
        config, fitting = self.read_json("config.json"), _PROBLEMS[function]
        classifies = any("Classification" in kind for kind in config.get("architectures") or ())
        if not (classifies or "problem_type" in config) or config.get("problem_type") in fitting:
            return self
        config |= _describe_other_classes(config, classes) | {"problem_type": fitting[0]}
        return self.with_json({"config.json": config})

    def accepts(self, path: str | os.PathLike[str]) -> bool:
        """Check whether `save` writes this path: it is, or is to be, one of a folder."""
        return is_folder(path) or not Path(path).suffix

    def save(self, path: str | os.PathLike[str], graph: Graph, classes: Sequence[str] = ()) -> None:
        """Write a folder like this one, with other weights.

        All other files are copied as they are, but for files of weights that are not part of this
        model or of a module of sentence-transformers behind it. The model has the name that it had,
        its external data as well.

        Args:
          classes: the names of the classes if these are others, for `config.json`.

        Raises:
          InputError: another model of the folder has its weights in a file that would change.
        """
        target, source = Path(path), self.path
        for name in self.files:  # of copies, say
            data = list_data_files(source / name)
            for other in {*(target / name).parent.glob("*.onnx")} - {
                target / n for n in self.files
            }:
                if shared := data & list_data_files(other):
                    raise InputError(
                        f"'{other}' has its weights in '{min(shared)}', as '{name}' has, which "
                        "would be overwritten: save to another folder"
                    )
        protos = self.split(graph())
        target.mkdir(parents=True, exist_ok=True)
        copied, left = _sort_files(self)
        for name in copied:
            if not (target / name).exists() or not os.path.samefile(source / name, target / name):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, target / name)
        for name, text in self.changed.items():
            with write_atomically(target / name) as written:
                written.write_text(text, "utf-8")
        config = self.read_json("config.json")
        if config and (changed := _describe_other_classes(config, classes)):
            text = json.dumps(config | changed, indent=2, ensure_ascii=False)
            with write_atomically(target / "config.json") as written:
                written.write_text(text + "\n", "utf-8")
        for name, proto in zip(self.files, protos, strict=True):
            # write one file, with external data where the old one had some
            file = target / name
            locations = sorted(list_data_files(source / name))
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent, prefix=".jaxonnx-") as scratch:
                written = Path(scratch, file.name)
                large = sum(len(t.raw_data) for t in proto.graph.initializer) > LIMIT
                location = (locations or [f"{file.name}_data"])[0]
                data = (
                    {"save_as_external_data": True, "location": location}
                    if locations or large
                    else {}
                )
                onnx.save_model(proto, written, **data)
                if data and (Path(scratch) / location).exists():
                    (file.parent / location).parent.mkdir(parents=True, exist_ok=True)
                    replace_file(Path(scratch) / location, file.parent / location)
                replace_file(written, file)
        if left:
            warn(
                f"not copied to '{target}', because their weights are the old ones: "
                f"{', '.join(left)}",
            )


def _fields_of_processor(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `preprocess` by the settings of an image processor of transformers.

    Those of pixels are left out where a processor does what the keys do not say.
    """
    fields: dict[str, Any] = {}
    rescales, normalizes = settings.get("do_rescale", True), settings.get("do_normalize")
    unclear = normalizes and not {"image_mean", "image_std"} <= settings.keys()
    others = ("include_top", "offset", "rescale_offset")
    if settings and not unclear and not any(settings.get(name) for name in others):
        fields["scale"] = float(settings.get("rescale_factor", 1 / 255)) if rescales else 1.0
        fields["mean"] = tuple(map(float, settings["image_mean"])) if normalizes else (0.0,)
        fields["std"] = tuple(map(float, settings["image_std"])) if normalizes else (1.0,)
    if settings.get("do_flip_channel_order"):
        fields["order"] = "BGR"
    if not settings.get("do_resize", True):
        return fields
    filters = dict(enumerate(FILTERS))
    if (name := filters.get(settings.get("resample", -1))) is not None:
        fields["filter"] = name
    kind = str(settings.get("image_processor_type") or settings.get("feature_extractor_type"))
    size, stretches = _read_size(settings.get("size"), kind.startswith(_SQUARE))
    if size is None:
        return fields
    edge, share = min(size), settings.get("crop_pct")
    if settings.get("do_center_crop") and not share:
        size, _ = _read_size(settings.get("crop_size"))
        resized = edge * 256 // 224 if kind.startswith("Levit") else edge
        share = max(size) / resized if size else None
    elif share and edge >= 384 and not settings.get("do_center_crop"):
        share, stretches = None, True  # ConvNeXt crops smaller ones
    if share is not None and share > 1:  # the crop comes first, or is padded
        return fields
    fields |= {"crop": share} if share else {}
    return fields | ({"stretch": True} if stretches else {}) | ({"size": size} if size else {})


def _read_size(size: Any, square: bool = True) -> tuple[tuple[int, int] | None, bool]:
    """Return height and width of a size of transformers, and whether images are stretched to it.

    If they are not, it is that of their shorter edge.

    Args:
      square: what a single number means: both sides, or the shorter edge.
    """
    if isinstance(size, Mapping):
        square, edge = "height" in size, size.get("shortest_edge")
        size = [size.get("height", edge), size.get("width", edge)]
    height, width = size if isinstance(size, Sequence) else (size, size)
    return (None, False) if None in (height, width) else ((height, width), square)


def _describe_other_classes(config: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return the settings of `config.json` for classes that it does not have."""
    present = [*(config.get("id2label") or {}).values()]
    return describe_classes(classes) if classes and [*classes] != present else {}


def describe_classes(classes: Sequence[str]) -> dict[str, Any]:
    """Return the settings of `config.json` for a classifier of these classes."""
    return {
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
        "num_labels": len(classes),
        "problem_type": None,  # of the old classes; transformers finds it by its labels
    }


def split_variant(name: str) -> tuple[str, str]:
    """Return the name of a file without its suffix and variant, and the variant."""
    stem = PurePosixPath(name).stem
    named = _VARIANT.fullmatch(stem)
    return (named[1], named[2]) if named else (stem, "fp32")


def list_modules(folder: Path) -> list[str]:
    """Return the folders of sentence-transformers' modules behind a network, with a slash.

    Some have weights of their own, like "2_Dense/".

    Raises:
      ModelError: the file that lists them is damaged.
    """
    path = folder / MODULES
    if not path.is_file():
        return []
    with wrap_errors(f"'{path}' is not JSON, or is damaged", ModelError):
        modules = json.loads(path.read_text("utf-8"))
        behind = [m["path"] for m in modules if not m["type"].endswith(".Transformer")]
    return [f"{name.strip('/')}/" for name in behind if name.strip("/")]


def _sort_files(home: ModelFolder) -> tuple[list[str], list[str]]:
    """Return the files of a folder that go along, and other forms of the model, which do not."""
    files = (path.relative_to(home.path) for path in home.path.rglob("*") if path.is_file())
    visible = (file for file in files if not any(part.startswith(".") for part in file.parts))
    names = sorted(file.as_posix() for file in visible)
    stems = {split_variant(n)[0] for n in home.files}
    family = stems if stems.isdisjoint(DECODERS) else {*stems, *DECODERS}
    models = [n for n in names if n.endswith(".onnx")]
    others = [n for n in models if split_variant(n)[0] not in family]
    data = {
        model: {str(PurePosixPath(model).parent / n) for n in list_data_files(home.path / model)}
        for model in models
    }
    needed = {n for model in others for n in data[model]}
    dropped = {n for model in models if model not in others for n in data[model]} - needed
    modules = (*list_modules(home.path),)
    copied = [n for n in names if n in needed or not n.endswith(WEIGHTS) or n.startswith(modules)]
    copied = [n for n in copied if n not in dropped]
    left = [n for n in models if n not in others and n not in home.files]
    return sorted({*copied, *others}), left


# Parts of a graph that are files of their own.


def refuse_records(proto: ModelProto) -> None:
    """Raise an InputError if a graph that is to be several files has a record of its weights."""
    if records := {SPARSITY, QUANTIZATION} & {entry.key for entry in proto.metadata_props}:
        raise InputError(
            f"the record {min(records)!r} is of all files of a folder: save the model as one file, "
            "with a path that ends in .onnx"
        )


def ancestors(
    nodes: Iterable[NodeProto], names: Set[str], without: Set[str] = frozenset()
) -> set[str]:
    """Return `names` and their ancestors, without following those in `without`."""
    values = {*names}
    for node in reversed([*nodes]):
        if not values.isdisjoint(node.output):
            values |= reads(node) - {*without}
    return values


def extract_part(
    proto: ModelProto, header: ModelProto, names: Set[str], joined: Set[str]
) -> ModelProto:
    """Extract the nodes that compute these values into a model of their own."""
    result, graph = ModelProto(), proto.graph
    result.CopyFrom(header)
    result.ClearField("graph")
    result.graph.name, result.graph.doc_string = header.graph.name, header.graph.doc_string
    result.ir_version = max(header.ir_version, proto.ir_version)
    target = result.graph
    target.node.extend(node for node in graph.node if not names.isdisjoint(node.output))
    inputs = joined | {value.name for value in graph.input}
    target.value_info.extend(v for v in graph.value_info if v.name in names - inputs)
    target.initializer.extend(tensor for tensor in graph.initializer if tensor.name in names)
    sparse = (tensor for tensor in graph.sparse_initializer if tensor.values.name in names)
    target.sparse_initializer.extend(sparse)
    notes = (note for note in graph.quantization_annotation if note.tensor_name in names)
    target.quantization_annotation.extend(notes)
    versions = {entry.domain: entry.version for entry in proto.opset_import}
    imported = {entry.domain for entry in result.opset_import}
    for domain in sorted({node.domain for node in all_nodes(target)} & versions.keys() - imported):
        result.opset_import.add(domain=domain, version=versions[domain])
    return result
