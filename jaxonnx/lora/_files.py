"""Adapter files: .onnx_adapter of onnxruntime, and folders of PEFT with their settings."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxonnx._files import wrap_errors, write_atomically
from jaxonnx._io.files import read_metadata, read_safetensors, write_safetensors
from jaxonnx.errors import Error, InputError, ModelError

_MERGED = "merge it in PEFT (merge_and_unload), and export the merged model"
CONVERTED = (
    "save it in PEFT as an adapter of the original weights, save_pretrained(path, "
    "path_initial_model_for_weight_conversion=...), or, if this file has the changed weights, set "
    '"init_lora_weights" to true in adapter_config.json'
)

_APPLIED = (
    *("peft_type", "r", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "bias"),
    *("init_lora_weights", "fan_in_fan_out", "trainable_token_indices", "modules_to_save"),
    "lora_bias",
)
"""Settings that are read here, or that say how the tensors are read."""

_WITHOUT_EFFECT = (
    # about the folder
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config"),
    # which modules there are, and of which rank: the tensors tell
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "ensure_weight_tying"),
    # in training only
    *("lora_dropout", "velora_config", "monteclora_config"),
    # of a start that `init_lora_weights` chooses, or of another setting
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("megatron_core",),
)

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "alora_invocation_tokens": "the adapter acts from these tokens on only, and no change of a "
        "weight does that: train an adapter without them",
        "arrow_config": f"it mixes several adapters for each token: {_MERGED}",
        "kasa_config": "it takes the smallest singular values out of the weights, and scales "
        f"between A and B: {_MERGED}",
        "layer_replication": "it repeats layers of the model: export the model with the repeated "
        "layers, and remove this setting",
        "megatron_config": f"the adapter lies in parts on several devices: {_MERGED}",
        "target_parameters": f"it adapts parameters that are no layers, such as experts: {_MERGED}",
        "use_bdlora": f"A or B is block-diagonal: {_MERGED}",
        "use_qalora": "A reads averages of groups of inputs: train an adapter without it",
    }
)

_NEUTRAL_STARTS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
"""Of `init_lora_weights`: the base stays as it is."""
_SUBTRACTED_STARTS = ("pissa", "olora")
"""Of `init_lora_weights`: the initial adapter is subtracted from the base, and computed from it."""
_CHANGED_STARTS: Mapping[str, str] = MappingProxyType(
    {
        "pissa_niter_": "random singular vectors were subtracted from the base",
        "corda": "what data chose was subtracted from the base",
        "lora_ga": "what gradients chose was subtracted from the base",
        "loftq": "the base was replaced by its quantized values",
    }
)


class Settings(NamedTuple):
    """The meaning of PEFT's tensors, by the configuration beside them."""

    scale_of: Callable[[str, int], float]
    """The scale of a change by module and rank."""
    dora: bool = False
    start: str = ""
    """ "pissa" or "olora", if such a start is subtracted from the base."""
    fan_in_fan_out: bool = False
    """Whether the base has its matrices as inputs x outputs, which "olora" decomposes as such."""


def read_settings(where: str, config: Mapping[str, Any]) -> Settings:
    """Read a configuration of PEFT.

    Args:
      where: the folder, for messages.
      config: its `adapter_config.json`.

    Raises:
      InputError: it is not of LoRA, or has a setting that changes what the adapter computes and
        that is not known here.
    """
    if config.get("peft_type") != "LORA":
        raise InputError(f"{where} is of type {config.get('peft_type')!r}, not LORA")
    for name, value in config.items():
        if name in _APPLIED or name in _WITHOUT_EFFECT or not value:
            continue  # None, False and what is empty are the defaults of all others
        reason = _REFUSED.get(name, f"this setting of PEFT is not known to jaxonnx: {_MERGED}")
        raise InputError(f"{where} has {name}={value!r} in adapter_config.json: {reason}")
    start = str(config.get("init_lora_weights", True)).lower()
    if start not in (*_NEUTRAL_STARTS, *_SUBTRACTED_STARTS):
        key = "pissa_niter_" if start.startswith("pissa_niter_") else start
        reason = _CHANGED_STARTS.get(key, "a start that is not known to jaxonnx")
        raise InputError(f"{where} has init_lora_weights {start!r}, {reason}: {CONVERTED}")
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    if not isinstance(config.get("r"), int) or not isinstance(alpha, int | float):
        raise InputError(f"{where}: adapter_config.json has no r or no lora_alpha")

    def scale(module: str, rank: int) -> float:
        # as PEFT matches them: the end of a module's name, which may be an expression
        matching = [x for key, x in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
        return (matching or [alpha])[0] / (math.sqrt(rank) if config.get("use_rslora") else rank)

    start = start if start in _SUBTRACTED_STARTS else ""
    return Settings(scale, bool(config.get("use_dora")), start, bool(config.get("fan_in_fan_out")))


SUFFIX = ".onnx_adapter"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


Change = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""A (rank, inputs), B (outputs, rank) and with DoRA the norms of the outputs."""
_PREFIX = "base_model.model."
"""The prefix of names of modules in PEFT."""
_NORMS = "magnitude_vector"
_TOKENS = ".token_adapter.trainable_tokens_delta"
_BASE = "base"
"""The metadata with a checksum of the adapted weights."""
_TRAINING = ("velora_", "monteclora_")
"""Parts that only the training in PEFT reads."""
_PARTS_OF_CHANGE = {"A": 2, "B": 2, "B.bias": 1, _NORMS: 1}
"""By the end of a name, the least rank."""


class Contents(NamedTuple):
    """An adapter file."""

    changes: dict[str, Change]
    """By module (`plain_name`)."""
    scales: dict[str, float]
    """Of each change."""
    tables: set[str]
    """The modules that are embeddings, whose A has a column for each row of the table."""
    others: dict[str, np.ndarray]
    """By their names, the tensors that were trained in full: of `modules_to_save`, and biases."""
    tokens: dict[str, tuple[list[int], np.ndarray]]
    """By module, the rows of its matrix that were trained, and their values."""
    biases: dict[str, np.ndarray]
    """By module, the addition of `lora_bias` to its bias."""
    settings: Settings


def is_foreign(path: str | os.PathLike[str]) -> bool:
    """Check whether a path is an .onnx_adapter, or a folder that PEFT wrote."""
    return os.fspath(path).endswith(SUFFIX) or Path(path, _CONFIG).is_file()


def read(
    path: str | os.PathLike[str], modules: Collection[str], tied: Sequence[str] = ()
) -> Contents:
    """Return the contents of an adapter file.

    Args:
      path: an .onnx_adapter or a folder of PEFT.
      modules: the known modules.
      tied: weights that are both an embedding and an output layer.

    Raises:
      InputError: an unknown module, or an adapter that is not LoRA.
      ModelError: the file is damaged.
    """
    where, config, settings = f"'{os.fspath(path)}'", {}, Settings(lambda module, rank: 1.0)
    if transposed := os.fspath(path).endswith(SUFFIX):
        arrays = read_onnx_adapter(path)
    else:
        arrays, config = read_peft(path)
        settings = read_settings(where, config)
    result = Contents({}, {}, set(), {}, {}, {}, settings)
    factors: dict[str, dict[str, np.ndarray]] = {}
    for key, value in arrays.items():
        name = key.removeprefix(_PREFIX)
        if not np.isfinite(value).all():
            raise ModelError(f"{where}: '{key}' has values that are not finite")
        if not transposed and ".lora_" not in name:
            if name.endswith(_TOKENS):
                stem = name.removesuffix(_TOKENS)
                rows = find_tokens(config.get("trainable_token_indices"), stem)
                _check_module(where, stem, modules, tied)
                if len(rows) != len(value):
                    raise ModelError(f"{where}: '{key}' has {len(value)} rows for {len(rows)}")
                result.tokens[plain_name(stem)] = rows, value
            # PEFT adds the tables of adapted embeddings
            elif not name.endswith((".base_layer.weight", ".num_batches_tracked")):
                result.others[name.replace(".base_layer.", ".")] = value
            continue
        stem, _, end = name.partition(".lora_")
        if end.startswith(_TRAINING):
            continue
        table, end = end.startswith("embedding_"), end.removesuffix(".weight")
        end = end.removeprefix("embedding_")
        if not stem or end not in _PARTS_OF_CHANGE or value.ndim < _PARTS_OF_CHANGE[end]:
            raise InputError(f"{where}: '{key}' is not a factor of LoRA")
        _check_module(where, stem, modules, tied)
        module = plain_name(stem)
        value = value.swapaxes(-1, -2) if transposed else value
        factors.setdefault(module, {})[end] = value
        result.tables.update([module] if table else [])
        if end == "A":
            rank = value.shape[-2] if transposed else len(value)
            result.scales[module] = settings.scale_of(stem, rank)
    for module, parts in factors.items():
        if not transposed and parts.keys() >= {"A", "B"}:
            factors[module] = parts = _flatten_convolution(where, module, parts)
        if not parts.keys() >= {"A", "B"} or parts["A"].shape[-2] != parts["B"].shape[-1]:
            raise InputError(f"{where}: A and B for '{module}' are missing, or of unequal ranks")
        if (_NORMS in parts) != settings.dora:
            raise InputError(
                f"{where}: use_dora is {settings.dora}, and '{module}' has "
                f"{'a' if _NORMS in parts else 'no'} lora_magnitude_vector"
            )
        result.changes[module] = parts["A"], parts["B"], parts.get(_NORMS)
        if "B.bias" in parts:
            result.biases[module] = parts["B.bias"] * result.scales[module]
    if not (result.changes or result.tokens):
        raise InputError(f"{where} has no adapters")
    return result


def _check_module(where: str, stem: str, modules: Collection[str], tied: Sequence[str]) -> None:
    """Raise an InputError unless there is such a module."""
    module = plain_name(stem)
    if module not in modules:
        near = difflib.get_close_matches(module, modules, 3)
        hint = f"near it are {', '.join(near)}" if near else "names= says what it is called"
        hint = describe_ties(tied) or hint
        raise InputError(f"{where}: the model has no weight of a module '{stem}'; {hint}")


def describe_ties(tied: Sequence[str]) -> str:
    """Tell that an output layer has no weight of its own; empty without such a tie."""
    if not tied:
        return ""
    return (
        f"'{tied[0]}' is both the embedding and the output layer, which PEFT adapts apart: where "
        "the file stores the weight twice, as onnxruntime-genai's builder does with "
        "shared_embeddings=false, jaxonnx.load(path, tied=[]) keeps the two apart"
    )


def find_tokens(indices: Any, module: str) -> list[int]:
    """Return the rows of a module that `trainable_token_indices` of PEFT lists."""
    if isinstance(indices, Mapping):  # by the end of a module's name
        named = [rows for key, rows in indices.items() if f".{module}".endswith(f".{key}")]
        indices = named[0] if named else []
    return [int(row) for row in indices or []]


def _flatten_convolution(
    where: str, module: str, parts: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the factors of a convolution as those of the matrix of its kernel.

    PEFT has A (rank, channels, *window), which reads the channels of all groups, and B (outputs,
    rank / groups, 1, ...). Ranks that read one group alone are those of a kernel in groups.

    Raises:
      InputError: ranks read other channels than those of their group.
    """
    a, b = parts["A"], parts["B"]
    if a.ndim == 2:
        return {**parts}
    norms = {_NORMS: parts[_NORMS].reshape(-1)} if _NORMS in parts else {}
    rank, b = len(a), b.reshape(len(b), -1)
    groups = rank // max(b.shape[1], 1)
    if b.shape[1] * groups != rank or a.shape[1] % groups or len(b) % groups:
        raise InputError(f"{where}: A and B for '{module}' are of unequal ranks")
    by_group = a.reshape(groups, rank // groups, groups, -1)
    by_rank = np.stack([by_group[i, :, i] for i in range(groups)])
    if np.count_nonzero(by_group) != np.count_nonzero(by_rank):
        raise InputError(
            f"{where}: the adapter of '{module}', a convolution in {groups} groups, reads the "
            "channels of all groups, and no change of its kernel computes that (PEFT cannot merge "
            "it, either): train an adapter without this module"
        )
    if (by_rank == by_rank[:1]).all():
        return {"A": by_rank[0], "B": b, **norms}
    pieces = np.split(b, groups)
    whole = np.zeros((len(b), rank), b.dtype)
    for i, piece in enumerate(pieces):
        whole[i * len(piece) : (i + 1) * len(piece), i * b.shape[1] : (i + 1) * b.shape[1]] = piece
    return {"A": by_rank.reshape(rank, -1), "B": whole, **norms}


def plain_name(module: str) -> str:
    """Return the name of a module as onnxruntime-genai has it: "self_attn" and "attn" are one."""
    return module.replace(".self_attn.", ".attn.").removeprefix("/").replace("/", ".")


def fold_convolution(change: Change, shape: tuple[int, ...], groups: int) -> Change:
    """Return the factors of a kernel's matrix as PEFT has those of a convolution.

    The reverse of reading one: each group has its own ranks, as many as the change has.

    Args:
      change: A (rank, channels of a group at each place of the window), B (outputs, rank), norms.
      shape: of the kernel (outputs, channels of a group, *window).
      groups: the number of groups.
    """
    a, b, norms = change
    _, channels, *window = shape
    ones = (1,) * len(window)
    whole = np.zeros((groups, len(a), groups, channels, *window), np.float32)
    for group in range(groups):
        whole[group, :, group] = a.reshape(len(a), channels, *window)
    whole = whole.reshape(groups * len(a), groups * channels, *window)
    norms = None if norms is None else norms.reshape(1, -1, *ones)
    return whole, b.reshape(*b.shape, *ones), norms


def write_onnx_adapter(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by the names of a model's inputs, as `onnxruntime.LoraAdapter` loads them."""
    runtime = _onnxruntime()
    adapter = runtime.AdapterFormat()
    values = {n: runtime.OrtValue.ortvalue_from_numpy(x) for n, x in arrays.items()}
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters(values)
    with write_atomically(path) as written:
        adapter.export_adapter(os.fspath(written))


def read_onnx_adapter(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of an .onnx_adapter file by name.

    Raises:
      ModelError: it is not such a file.
    """
    runtime = _onnxruntime()
    with wrap_errors(f"'{path}' is not an {SUFFIX} file, or is damaged", ModelError):
        if not Path(path).is_file():
            raise FileNotFoundError(path)
        parameters = runtime.AdapterFormat.read_adapter(os.fspath(path)).get_parameters()
        return {name: np.array(value.numpy()) for name, value in parameters.items()}


def write_peft(
    folder: str | os.PathLike[str],
    changes: Mapping[str, Change],
    scale: float = 1.0,
    about: Mapping[str, str | None] = MappingProxyType({}),
    tables: Collection[str] = (),
    others: Mapping[str, np.ndarray] = MappingProxyType({}),
    biases: Mapping[str, np.ndarray] = MappingProxyType({}),
    base: str = "",
    tokens: Mapping[str, tuple[list[int], np.ndarray]] = MappingProxyType({}),
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` of changes by module.

    The checksum of the base goes into the metadata of the first, since PEFT warns of settings that
    it does not know.

    Args:
      folder: to write to.
      changes: by module.
      scale: of all changes, alpha / rank.
      about: settings on the purpose of the adapters.
      tables: the modules among them that are embeddings.
      others: weights that were trained in full, by module.
      biases: those that were, by module.
      base: the checksum.
      tokens: by module, rows that were trained, and their values.
    """
    # PEFT looks for a name at the end of others: unless it is anchored, "q" is "block.q", too
    ranks = {f"^{re.escape(name)}$": len(a) for name, (a, *_) in sorted(changes.items())}
    rank = max(ranks.values())
    exceptions = {name: r for name, r in ranks.items() if r != rank}
    alphas = {name: _shorten(r * scale) for name, r in {**exceptions, "": rank}.items()}
    config = {
        **about,
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alphas.pop(""),
        "target_modules": "|".join(ranks),
        "rank_pattern": exceptions,
        "alpha_pattern": alphas,
        "modules_to_save": [*others] or None,
        "bias": "all" if biases.keys() - others.keys() else "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": any(norms is not None for *_, norms in changes.values()),
    }
    if tokens:
        config["trainable_token_indices"] = {name: rows for name, (rows, _) in tokens.items()}
    ends, ends_of_table = ("A.weight", "B.weight", _NORMS), ("embedding_A", "embedding_B", _NORMS)
    arrays = {
        f"{_PREFIX}{name}.lora_{end}": np.ascontiguousarray(x)
        for name, change in changes.items()
        for end, x in zip(ends_of_table if name in tables else ends, change, strict=True)
        if x is not None
    }
    arrays |= {f"{_PREFIX}{name}.weight": np.ascontiguousarray(x) for name, x in others.items()}
    for name, (_, x) in tokens.items():
        arrays[f"{_PREFIX}{name}{_TOKENS}"] = np.ascontiguousarray(x)
    for name, x in biases.items():
        inner = "base_layer." if name in changes else ""
        arrays[f"{_PREFIX}{name}.{inner}bias"] = np.ascontiguousarray(x)
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_safetensors(Path(folder, _WEIGHTS), arrays, {_BASE: base})
    with write_atomically(Path(folder, _CONFIG)) as written:
        written.write_text(json.dumps(config, indent=2) + "\n")


def _shorten(number: float) -> float:
    """Return a whole number as an integer, as configurations of PEFT have alpha."""
    return int(number) if number == int(number) else number


def read_peft(folder: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays by name, and the configuration.

    Raises:
      ModelError: one of the files is missing or damaged.
    """
    with wrap_errors(f"'{folder}' has no adapters of PEFT, or they are damaged", ModelError):
        config = json.loads(Path(folder, _CONFIG).read_text())
        if not isinstance(config, dict):
            raise ValueError(f"{_CONFIG} is not an object")
    arrays = read_safetensors(Path(folder, _WEIGHTS))
    half = ml_dtypes.bfloat16
    return {n: x.astype(np.float32) if x.dtype == half else x for n, x in arrays.items()}, config


def refuse_folder(path: str | os.PathLike[str]) -> ModelError:
    """Return the error for a folder that holds no adapters, with those in it that do.

    PEFT writes adapters that have a name into a folder of this name, and transformers' Trainer
    those of a step into "checkpoint-500".
    """
    inner = sorted(file.parent for file in Path(path).glob(f"*/{_CONFIG}"))
    way = f": pass one of the folders in it, like '{inner[-1]}'" if inner else ""
    return ModelError(
        f"'{os.fspath(path)}' holds no adapters: it has neither {_CONFIG} and {_WEIGHTS} (PEFT) "
        f"nor the checkpoints of a run{way}"
    )


def read_base(path: str | os.PathLike[str]) -> str:
    """Return the checksum of the base that a folder of PEFT has adapters of; "" if it has none."""
    weights = Path(path, _WEIGHTS)
    return read_metadata(weights).get(_BASE, "") if weights.is_file() else ""


def _onnxruntime() -> ModuleType:
    try:
        import onnxruntime
    except ImportError as error:
        raise Error(f"{SUFFIX} files need onnxruntime: pip install onnxruntime") from error
    return onnxruntime
