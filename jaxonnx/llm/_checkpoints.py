"""Checkpoints that transformers loads, of a network in one file."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxonnx._data.images import preparation
from jaxonnx._display import list_some
from jaxonnx._files import write_atomically
from jaxonnx._graph.uses import Weight, weights
from jaxonnx._io.files import open_safetensors, write_safetensors
from jaxonnx._require import require
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError, ModelError, warn
from jaxonnx.llm._folders import CHAT_TEMPLATES, ModelFolder, describe_classes
from jaxonnx.llm._module_names import (
    HEAD,
    TABLE,
    Block,
    find_family,
    includes_one,
    name_weights,
    torch_axes,
)

SHARD = 5 * 10**9
"""The most bytes of one file, as in transformers."""
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?")
_COMPANIONS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *(
        "chat_template*",
        CHAT_TEMPLATES,
        "generation_config.json",
        "preprocessor_config.json",
        "*.model",
    ),
)
"""Files that go along: of the tokenizer, of generation, of images."""
_NO_TEXT = {"pixel_values", "input_features", "input_values"}
"""Inputs that are images or sounds."""

Arrays = Mapping[str, Callable[[], np.ndarray]]
"""Functions that make the tensors of a checkpoint, by name."""


def write_checkpoint(
    net: Network,
    target: Path,
    read_weight: Callable[[str], np.ndarray],
    *,
    original: str | os.PathLike[str] | None,
    names: Mapping[str, str],
    dequantize: bool,
    dtype: str | None,
    check: bool,
) -> None:
    """Write the checkpoint of `export_safetensors`, which has the arguments and the errors.

    Args:
      read_weight: returns a weight by its name, with the changes of adapters.
    """
    if net.folder is not None and len(net.folder.files) > 1:
        raise InputError(
            "export_safetensors takes a model of one file, and this one is joined of "
            + ", ".join(net.folder.files)
        )
    meanings = weights(net.graph, net.tensors)
    settings = _read_config(net, original)
    family = find_family(net, settings)
    blocks = name_weights(net, meanings, family, names)
    sources = dict.fromkeys(block.source for parts in blocks.values() for block in parts)
    stored = [f"'{name}'" for name in sources if meanings[name].storage]
    if stored and not dequantize:
        raise InputError(
            f"{list_some(stored)}: transformers has no matrices in few bits of this form; "
            "dequantize=True writes them as floating-point numbers"
        )
    arrays: Arrays = {
        key: partial(_read_tensor, net, read_weight, meanings, parts, family, dtype)
        for key, parts in blocks.items()
    }
    if check:
        _check_rows(net, meanings, blocks)
    head, table = f"{HEAD}.weight", f"{TABLE}.weight"
    tied = head not in arrays
    if not tied and table in arrays and settings.get("tie_word_embeddings"):
        tied = np.array_equal(arrays[head](), arrays[table]())
    if tied:
        arrays.pop(head, None)
    target.mkdir(parents=True, exist_ok=True)
    types = _write_weights(target, arrays, check)
    if settings:
        settings.pop("quantization_config", None)
        settings |= _describe_classes(net, settings)
        if net.folder is not None and "config.json" in net.folder.changed:
            changed = net.folder.read_json("config.json")
            settings |= {k: changed[k] for k in ("problem_type",) if k in changed}
        settings |= {"tie_word_embeddings": tied} if table in arrays else {}
        if table in arrays and "vocab_size" in settings:
            source = blocks[table][0].source  # `original` may not have all tokens
            rows, *_ = torch_axes(net, source, meanings[source])
            settings["vocab_size"] = meanings[source].shape[rows]
        ((kind, _),) = types.most_common(1)
        settings |= dict.fromkeys({"dtype", "torch_dtype"} & settings.keys(), kind)
        _write_json(target / "config.json", settings)
    else:
        warn(
            f"'{target}' has no config.json, which transformers needs: pass original=, the "
            "folder of the original checkpoint",
        )
    # copy files of the tokenizer and the like, those of the model's folder first
    folders = [net.folder.path] if net.folder else []
    if original is not None:
        folders.append(Path(original) if Path(original).is_dir() else Path(original).parent)
    for source in reversed(folders):
        for path in (path for pattern in _COMPANIONS for path in source.glob(pattern)):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            if path.is_file() and not (copy.exists() and copy.samefile(path)):
                shutil.copyfile(path, copy)
    for name, text in (net.folder.changed if net.folder else {}).items():
        if any(Path(name).match(pattern) for pattern in _COMPANIONS):
            with write_atomically(target / name) as written:
                written.write_text(text, "utf-8")


def _describe_classes(model: Network, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a classifier whose classes are not those of its `config.json`."""
    named, (*heads,) = [*preparation(model).labels], model.heads
    count, shape = len(named), model.outputs[0].shape
    if len(heads) == 1:
        count = heads[0].classes
    elif shape and any("Classification" in kind for kind in settings.get("architectures") or ()):
        count = shape[-1] if isinstance(shape[-1], int) else count
    present = [*(settings.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}).values()]
    if not count or named == present or (count == len(present) and not named):
        return {}
    named = named if len(named) == count else [f"LABEL_{number}" for number in range(count)]
    return describe_classes(named)


def _read_tensor(
    model: Network,
    read_weight: Callable[[str], np.ndarray],
    meanings: Mapping[str, Weight],
    blocks: list[Block],
    family: str,
    dtype: str | None,
) -> np.ndarray:
    """Return a tensor of a checkpoint, made of rows of the file's tensors."""
    pieces = []
    for name, first, _, _, rows in sorted(blocks, key=lambda block: block.start):
        value = read_weight(name).transpose(torch_axes(model, name, meanings[name]))
        pieces.append(value[first : first + rows] if rows else value)
    result = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype)) if dtype else result.dtype
    if any(includes_one(model, block.source, block.target, family) for block in blocks):
        result = result.astype(np.float32) - 1
    return result.astype(kind, copy=False)


def _check_rows(
    model: Network, meanings: Mapping[str, Weight], blocks: Mapping[str, list[Block]]
) -> None:
    """Check that tensors of a checkpoint have each row of each weight once, without a gap.

    Raises:
      ModelError: with the tensor that has not.
    """
    counts: Counter[str] = Counter()
    sizes = {
        name: [meanings[name].shape[axis] for axis in torch_axes(model, name, meanings[name])]
        for name in {block.source for parts in blocks.values() for block in parts}
    }
    for key, parts in blocks.items():
        end = 0
        for block in sorted(parts, key=lambda block: block.start):
            rows = block.rows or (*sizes[block.source], 1)[0]
            counts[block.source] += rows
            if block.start != end:
                problem = "twice" if block.start < end else "not at all"
                row = min(block.start, end)
                raise ModelError(f"'{key}' of the checkpoint would have row {row} {problem}")
            end = block.start + rows
    for name, size in sizes.items():
        if counts[name] != (*size, 1)[0]:
            text = f"{counts[name]} rows of '{name}' {size}"
            raise ModelError(f"the checkpoint would have {text}")


def _check_file(path: Path, shard: Mapping[str, np.ndarray]) -> None:
    """Check that a file that was written has these tensors.

    Raises:
      ModelError: with the tensor that differs.
    """
    with open_safetensors(path) as file:
        written = {*file.keys()}
        if different := sorted(written ^ shard.keys()):
            raise ModelError(f"the checkpoint has other tensors: {list_some(different)}")
        for key, array in shard.items():
            back = file.get_tensor(key)
            same = back.dtype == array.dtype and back.shape == array.shape
            if not same or back.tobytes() != array.tobytes():
                raise ModelError(
                    f"'{key}' of the checkpoint is {back.dtype} {[*back.shape]}, and does not have "
                    f"the numbers of the model's, {array.dtype} {[*array.shape]}"
                )


def _write_weights(target: Path, arrays: Arrays, check: bool) -> Counter[str]:
    """Write `model.safetensors`, or several files and their index; return the bytes of each type.

    Raises:
      InputError: the folder has other files of weights.
      ModelError: `check` finds that a file has other tensors.
    """
    shards: list[list[str]] = []
    types: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=target, prefix=".jaxonnx-") as scratch:
        shard: dict[str, np.ndarray] = {}
        for key in (*arrays, None):
            value = arrays[key]() if key else np.empty(0)
            size = sum(x.nbytes for x in (*shard.values(), value))
            if key is None or (shard and size > SHARD):
                path = Path(scratch, str(len(shards)))
                write_safetensors(path, shard, {"format": "pt"})
                if check:
                    _check_file(path, shard)
                shards.append([*shard])
                shard = {}
            if key is not None:
                shard[key] = value
                types[str(value.dtype)] += value.nbytes
        count = len(shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        names = names if count > 1 else ["model.safetensors"]
        written = {*names, _INDEX} if count > 1 else {*names}
        existing = {path.name for path in target.iterdir() if _WEIGHTS.fullmatch(path.name)}
        if others := sorted(existing - written):
            raise InputError(
                f"'{target}' has {list_some(others)}, which would be read instead or as well: "
                "remove other weights, or choose another folder"
            )
        for i, name in enumerate(names):
            os.replace(Path(scratch, str(i)), target / name)
    if count > 1:
        places = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        size = {"total_size": sum(types.values())}
        _write_json(target / _INDEX, {"metadata": size, "weight_map": places})
    return types


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with write_atomically(path) as written:
        written.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _read_config(model: Network, original: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Read the settings of `config.json`; empty without the file.

    Where that is of a model of images too, and the file is the decoder alone, these are its own:
    transformers would look for its weights by other names, find none, and draw new ones.

    Raises:
      InputError: `original` has no such file.
      ModelError: it is damaged.
    """
    if original is not None:
        path = Path(original, "config.json") if Path(original).is_dir() else Path(original)
        require("original", os.fspath(original), path.is_file(), "a folder with config.json, or it")
        settings = ModelFolder(path.parent).read_json(path.name)
    else:
        settings = model.folder.read_json("config.json") if model.folder else {}
    text = settings.get("text_config")
    if not isinstance(text, dict) or not _NO_TEXT.isdisjoint(value.name for value in model.inputs):
        return settings
    shared = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
    return {**{key: settings[key] for key in shared if key in settings}, **text}
