"""Folders of language models: which file is the decoder, what goes with it, and saving all of it.

onnxruntime-genai    genai_config.json names the file of the decoder, and that of its encoder
optimum              model.onnx, or decoder_model*.onnx, beside config.json
transformers.js      onnx/model.onnx and variants of it, onnx/model_q4.onnx

The last two have an encoder beside its decoder as encoder_model.onnx; `_io.encoder_decoder` joins
them. The first and the last have vision-language models as three files (`_io.vision_language`).

A name like "onnx-community/Qwen3-0.6B-ONNX" is a folder of the Hugging Face hub.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
from onnx import ModelProto

from jaxonnx import _safe_read
from jaxonnx._atomic_write import write_atomically
from jaxonnx._io.encoder_decoder import part_files
from jaxonnx._io.formats import LIMIT
from jaxonnx._io.protos import all_graphs
from jaxonnx._io.vision_language import VISION, split_parts
from jaxonnx.errors import InputError, ModelError

GENAI = "genai_config.json"
CHAT_TEMPLATES = "additional_chat_templates/*.jinja"
"""Chat templates beside the default one, by transformers' name."""
_MARKS = (GENAI, "config.json", "tokenizer.json", "tokenizer_config.json")
_VARIANTS = ("fp32", "fp16", "bf16", "int8", "uint8", "q8", "quantized", "q4", "q4f16", "bnb4")
_DECODERS = ("decoder_model_merged", "decoder_model", "decoder_with_past_model")
"""Files of optimum with the same weights; the first contains the others."""
_ENCODER = "encoder_model"
_PARTS = "vision_encoder", "embed_tokens"
"""Files of transformers.js before the decoder of a vision-language model."""
_WEIGHTS = (".onnx", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)+")
_TASKS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
}
"""The tasks of the hub, by the end of the class of transformers."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder, and the file in it that is the model."""

    path: Path
    file: str
    """Relative to the folder, with slashes."""
    encoder: str = ""
    """The file of the encoder, where `file` is its decoder."""
    vision: str = ""
    """The file of the vision encoder, where `file` is the decoder of a vision-language model."""
    embedding: str = ""
    """The file of the embedding, likewise."""
    changed: Mapping[str, str] = field(default_factory=dict, kw_only=True, hash=False, repr=False)
    """The texts of files that the model has in place of the folder's, by name."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the model: one, or those before the decoder and the decoder."""
        return (*filter(None, (self.encoder, self.vision, self.embedding)), self.file)

    def is_of_vision(self, name: str) -> bool:
        """Return whether a tensor is one of the vision encoder, which is frozen by default."""
        return bool(self.vision) and name.startswith(VISION)

    @property
    def image_token(self) -> int | None:
        """The token that stands for the features of images, if the configuration names it."""
        for source in (self.read_json(GENAI).get("model", {}), self.read_json("config.json")):
            for name in ("image_token_id", "image_token_index"):
                if isinstance(source.get(name), int):
                    return source[name]
        return None

    def read_image_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' image processor; empty if the folder has none."""
        nested = self.read_json("processor_config.json").get("image_processor")
        settings = self.read_json("preprocessor_config.json") or nested
        return settings if isinstance(settings, dict) else {}

    def read_json(self, name: str) -> dict[str, Any]:
        """Return an object that the folder has as a JSON file; empty without the file.

        Raises:
          ModelError: it is damaged.
        """
        path = self.path / name
        if name not in self.changed and not path.is_file():
            return {}
        with _safe_read.wrap_errors(f"'{path}' is not JSON, or is damaged", ModelError):
            settings = json.loads(self.changed.get(name) or path.read_text("utf-8"))
            if not isinstance(settings, dict):
                raise ValueError("it has no object")
            return settings

    def with_json(self, files: Mapping[str, Any]) -> ModelFolder:
        """Return the folder of a model that has other contents of JSON files, by name."""
        texts = {n: json.dumps(x, indent=2, ensure_ascii=False) + "\n" for n, x in files.items()}
        return replace(self, changed={**self.changed, **texts})

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
        """The hub's name of what the model does; empty if no configuration tells."""
        if self.vision:
            return "image-text-to-text"
        if self.read_json(GENAI):
            return "text-generation"
        classes = self.read_json("config.json").get("architectures") or ()
        tasks = (task for end, task in _TASKS.items() if any(c.endswith(end) for c in classes))
        return next(tasks, "")


def find_folder(source: Any, variant: str | None) -> ModelFolder | None:
    """Return the folder of a language model that a source of `load` means; None for other sources.

    Raises:
      InputError: no file, or several, could be meant; or `variant` goes with no folder.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_dir():
            names = [p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()]
            if any(mark in names for mark in _MARKS) or any(n.startswith("onnx/") for n in names):
                return ModelFolder(path, *choose_files(str(source), names, variant, path))
        if path.suffix == ".onnx" and variant is None:
            return _find_described(path)
        named = isinstance(source, str) and _HUB.fullmatch(source) and not path.exists()
        if named and path.suffix not in (".onnx", ".npz"):
            return _download(str(source), variant)
    if variant is not None:
        raise InputError(
            f"variant={variant!r} chooses among the files of a language model's folder, and the "
            "source is not such a folder"
        )
    return None


def _find_described(path: Path) -> ModelFolder | None:
    """Return the folder whose configuration describes a file; None if there is none.

    It is `config.json` of transformers, or the genai_config.json that names the file, in the folder
    of the file or, for transformers.js, in the one above.
    """
    for folder in (path.parent, *([path.parent.parent] if path.parent.name == "onnx" else [])):
        name = path.relative_to(folder).as_posix()
        with suppress(ModelError):  # another file by that name
            config, genai = map(ModelFolder(folder, name).read_json, ("config.json", GENAI))
            decoder = genai.get("model", {}).get("decoder", {})
            if "model_type" in config or decoder.get("filename") == name:
                return ModelFolder(folder, name)
    return None


def choose_files(
    what: str, names: Collection[str], variant: str | None, folder: Path | None = None
) -> tuple[str, ...]:
    """Return the model among the files of a folder, and its encoder, if that is a file as well.

    Args:
      folder: where `genai_config.json` can be read.

    Raises:
      InputError: there is none, or several could be meant: the message names them.
    """
    files = sorted(n for n in names if re.fullmatch(r"(onnx/)?[^/]+\.onnx", n))
    if variant is None and GENAI in names and folder is not None:
        model = ModelFolder(folder, "").read_json(GENAI).get("model", {})
        parts = "decoder", "encoder", "vision", "embedding"
        chosen = [model.get(part, {}).get("filename") or "" for part in parts]
        if chosen[0]:
            chosen = chosen if all(chosen[2:]) else chosen[:2]
            if missing := [name for name in chosen if name and name not in names]:
                raise InputError(
                    f"'{what}': {GENAI} names '{missing[0]}', and the folder does not have it"
                )
            return (*chosen,)
    wanted = {"q8": "quantized"}.get(variant or "", variant)
    candidates = [n for n in files if wanted is None or (_split(n)[1] or "fp32") == wanted]
    merged = {n for n in candidates if _split(n)[0] == _DECODERS[0]}
    if merged:
        candidates = [n for n in candidates if n in merged or _split(n)[0] not in _DECODERS]
    if {_DECODERS[0], *_PARTS} <= {_split(n)[0] for n in files}:
        decoders = [n for n in candidates if n in merged]
        if len(decoders) == 1:
            return decoders[0], "", *_choose_parts(files, wanted)
        candidates = decoders
    if len(candidates) == 1:
        return (candidates[0],)
    stems = sorted(_split(n)[0] for n in candidates if _split(n)[0] != _DECODERS[2])
    if stems in ([_DECODERS[0], _ENCODER], [_DECODERS[1], _ENCODER]):
        of = {_split(n)[0]: n for n in candidates}
        return of[stems[0]], of[_ENCODER]
    if not files:
        nested = sorted({str(PurePosixPath(n).parent) for n in names if n.endswith(".onnx")})
        hint = f"; its folders {', '.join(nested)} have some" if nested else ""
        raise InputError(f"'{what}' has no .onnx file, in itself or in 'onnx'{hint}")
    if not candidates:
        raise InputError(f"'{what}' has no variant {variant!r}; it has {', '.join(files)}")
    variants = sorted({_split(n)[1] or "fp32" for n in candidates})
    hint = f"variant= (one of {', '.join(map(repr, variants))}), or " if len(variants) > 1 else ""
    raise InputError(
        f"'{what}' has several models: {', '.join(candidates)}; choose one by {hint}the path of "
        "the file"
    )


def _split(name: str) -> tuple[str, str]:
    """Return the name of a file without its suffix and variant, and the variant."""
    stem = PurePosixPath(name).stem
    base, _, last = stem.rpartition("_")
    return (base, last) if base and last in _VARIANTS else (stem, "")


def _choose_parts(files: Collection[str], variant: str | None) -> list[str]:
    """Return the files of `_PARTS`, in the variant of the decoder or else the most precise one."""
    chosen = []
    for part in _PARTS:
        variants = {_split(n)[1] or "fp32": n for n in files if _split(n)[0] == part}
        ordered = (variant or "fp32", *_VARIANTS)
        chosen.append(next(variants[name] for name in ordered if name in variants))
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
        wanted = [prefix + n for n in names if not n.endswith(_WEIGHTS) and _is_part(n)]
        path = Path(hub.snapshot_download(repository, allow_patterns=wanted), inner)
        files = choose_files(name, names, variant, path)
        hub.snapshot_download(repository, allow_patterns=[f"{prefix}{file}*" for file in files])
        patterns = [
            str(PurePosixPath(prefix + file).parent / n)
            for file in files
            for n in _locations(path / file)
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
        names = [p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()]
        files = choose_files(name, names, variant, path)
    return ModelFolder(path, *files)


def _is_part(name: str) -> bool:
    """Check whether a file is configuration: no data of a model, and not of another folder."""
    data = ".onnx." in name or ".onnx_data" in name or name.endswith(".data")
    nested = "/" in name and not fnmatch(name, CHAT_TEMPLATES)
    return not data and not nested


def _locations(path: Path) -> list[str]:
    """Return the files that have the external data of a model, relative to its own folder."""
    proto = onnx.load(path, load_external_data=False)
    tensors = (tensor for graph in all_graphs(proto.graph) for tensor in graph.initializer)
    entries = (entry for tensor in tensors for entry in tensor.external_data)
    return sorted({entry.value for entry in entries if entry.key == "location"})


def is_folder(path: str | os.PathLike[str], home: ModelFolder | None) -> bool:
    """Return whether `save` writes a folder: the path says so, or it is one of another kind."""
    text = os.fspath(path)
    ends = text.endswith(("/", os.sep))
    return ends or os.path.isdir(text) or (home is not None and not Path(text).suffix)


def save_folder(
    path: str | os.PathLike[str],
    home: ModelFolder,
    graph: Callable[[], ModelProto],
    classes: Sequence[str] = (),
) -> None:
    """Write a folder like the one that a model was loaded from, with other weights.

    All other files are copied as they are, but for files of weights that are not part of this
    model. The model has the name that it had, its external data as well.

    Args:
      classes: the names of the classes if these are others, for `config.json`.

    Raises:
      OSError: a file cannot be read or written.
    """
    target, source = Path(path), home.path
    protos = [graph()]
    if home.vision:
        protos = [*split_parts(protos[0], [source / name for name in home.files])]
    elif home.encoder:
        headers = (onnx.load(source / n, load_external_data=False) for n in home.files)
        protos = [*part_files(*protos, *headers)]
    target.mkdir(parents=True, exist_ok=True)
    copied, left = _sort_files(home)
    for name in copied:
        if not (target / name).exists() or not os.path.samefile(source / name, target / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    for name, text in home.changed.items():
        with write_atomically(target / name) as written:
            written.write_text(text, "utf-8")
    config = home.read_json("config.json")
    if config and classes and [*classes] != [*(config.get("id2label") or {}).values()]:
        text = json.dumps(config | describe_classes(classes), indent=2, ensure_ascii=False)
        with write_atomically(target / "config.json") as written:
            written.write_text(text + "\n", "utf-8")
    for name, proto in zip(home.files, protos, strict=True):
        _write_model(target / name, proto, _locations(source / name))
    if left:
        warnings.warn(
            f"not copied to '{target}', because their weights are the old ones: {', '.join(left)}",
            stacklevel=3,
        )


def describe_classes(classes: Sequence[str]) -> dict[str, Any]:
    """Return the settings of `config.json` for a classifier of these classes."""
    return {
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
        "num_labels": len(classes),
        "problem_type": None,  # of the old classes; transformers finds it by its labels
    }


def _write_model(file: Path, proto: ModelProto, locations: Sequence[str]) -> None:
    """Write one file, with external data where the old one had some."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".jaxonnx-") as scratch:
        written = Path(scratch, file.name)
        large = sum(len(t.raw_data) for t in proto.graph.initializer) > LIMIT
        location = (locations or [f"{file.name}_data"])[0]
        data = {"save_as_external_data": True, "location": location} if locations or large else {}
        onnx.save_model(proto, written, **data)
        if data and (Path(scratch) / location).exists():
            (file.parent / location).parent.mkdir(parents=True, exist_ok=True)
            shutil.copymode(written, Path(scratch) / location)  # onnx writes it for the user alone
            os.replace(Path(scratch) / location, file.parent / location)
        os.replace(written, file)


def _sort_files(home: ModelFolder) -> tuple[list[str], list[str]]:
    """Return the files of a folder that go along, and other forms of the model, which do not."""
    names = sorted(_walk(home.path))
    stems = {_split(n)[0] for n in home.files}
    family = stems if stems.isdisjoint(_DECODERS) else {*stems, *_DECODERS}
    models = [n for n in names if n.endswith(".onnx")]
    others = [n for n in models if _split(n)[0] not in family]
    data = {
        model: {str(PurePosixPath(model).parent / n) for n in _locations(home.path / model)}
        for model in models
    }
    needed = {n for model in others for n in data[model]}
    dropped = {n for model in models if model not in others for n in data[model]} - needed
    copied = [n for n in names if n in needed or not n.endswith(_WEIGHTS)]
    copied = [n for n in copied if n not in dropped]
    left = [n for n in models if n not in others and n not in home.files]
    return sorted({*copied, *others}), left


def _walk(folder: Path) -> Iterator[str]:
    """Yield the files of a folder and of those below it, without hidden ones."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            yield name.as_posix()
