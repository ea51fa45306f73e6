"""Read and write adapter files: .onnx_adapter of onnxruntime, and folders of PEFT."""

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxonnx._atomic_write import write_atomically
from jaxonnx._io.formats import read_metadata, read_weights, write_safetensors
from jaxonnx._safe_read import wrap_errors
from jaxonnx.errors import Error, InputError, ModelError

SUFFIX = ".onnx_adapter"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


Change = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""A (rank, inputs), B (outputs, rank) and with DoRA the norms of the outputs."""
_PREFIX = "base_model.model."
"""What PEFT puts before the names of modules."""
_NORMS = "magnitude_vector"
_BASE = "base"
"""The metadata with a checksum of the adapted weights."""
_PARTS_OF_CHANGE = {"A": 2, "B": 2, _NORMS: 1}
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
    """By their names, the tensors of `modules_to_save`, which were trained in full."""


def is_foreign(path: str | os.PathLike[str]) -> bool:
    """Check whether a path is an .onnx_adapter, or a folder that PEFT wrote."""
    return os.fspath(path).endswith(SUFFIX) or Path(path, _CONFIG).is_file()


def read(path: str | os.PathLike[str], modules: Collection[str]) -> Contents:
    """Return the contents of an adapter file.

    Args:
      path: an .onnx_adapter or a folder of PEFT.
      modules: the modules that there are.

    Raises:
      InputError: a module that there is not, or what is not LoRA.
      ModelError: the file is damaged.
    """
    where, scale_of, config = f"'{os.fspath(path)}'", _scale_one, {}
    if transposed := os.fspath(path).endswith(SUFFIX):
        arrays = read_onnx_adapter(path)
    else:
        arrays, config = read_peft(path)
        scale_of = _scales(where, config)
    others: dict[str, np.ndarray] = {}
    tables: set[str] = set()
    factors: dict[str, dict[str, np.ndarray]] = {}
    scales: dict[str, float] = {}
    for key, value in arrays.items():
        stem, _, end = key.removeprefix(_PREFIX).rpartition(".lora_")
        table, end = end.startswith("embedding_"), end.removesuffix(".weight")
        end = end.removeprefix("embedding_")
        if ".base_layer." in key:  # PEFT adds the table itself to the adapter of an embedding
            continue
        if not stem and config.get("modules_to_save"):
            others[key.removeprefix(_PREFIX)] = value
            continue
        if end not in _PARTS_OF_CHANGE or value.ndim < _PARTS_OF_CHANGE[end]:
            raise InputError(f"{where}: '{key}' is not a factor of LoRA")
        module = plain_name(stem)
        if module not in modules:
            near = difflib.get_close_matches(module, modules, 3)
            hint = f"near it are {', '.join(near)}" if near else "names= says what it is called"
            raise InputError(f"{where}: the model has no weight of a module '{stem}'; {hint}")
        if not np.isfinite(value).all():
            raise ModelError(f"{where}: '{key}' has values that are not finite")
        value = value.swapaxes(-1, -2) if transposed else value
        factors.setdefault(module, {})[end] = value
        tables.update([module] if table else [])
        if end == "A":
            scales[module] = scale_of(stem, value.shape[-2])
    for module, parts in factors.items():
        if not parts.keys() >= {"A", "B"} or parts["A"].shape[-2] != parts["B"].shape[-1]:
            raise InputError(f"{where}: A and B for '{module}' are missing, or of unequal ranks")
        if (_NORMS in parts) != bool(config.get("use_dora")):
            raise InputError(
                f"{where}: use_dora is {bool(config.get('use_dora'))}, and '{module}' has "
                f"{'a' if _NORMS in parts else 'no'} lora_magnitude_vector"
            )
    if not factors:
        raise InputError(f"{where} has no adapters")
    changes = {name: (x["A"], x["B"], x.get(_NORMS)) for name, x in factors.items()}
    return Contents(changes, scales, tables, others)


def plain_name(module: str) -> str:
    """Return the name of a module as onnxruntime-genai has it: "self_attn" and "attn" are one."""
    return module.replace(".self_attn.", ".attn.").removeprefix("/").replace("/", ".")


def _scale_one(module: str, rank: int) -> float:
    return 1.0


def _scales(where: str, config: Mapping[str, Any]) -> Callable[[str, int], float]:
    """Return the scale of a change by module and rank, if a configuration of PEFT is of LoRA."""
    if config.get("peft_type") != "LORA":
        raise InputError(f"{where} is of type {config.get('peft_type')!r}, not LORA")
    for key in ("lora_bias", "bias"):
        if config.get(key, "none") not in (False, None, "none"):
            raise InputError(f"{where} has {key}, which jaxonnx.LoRA has not")
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    if not isinstance(config.get("r"), int) or not isinstance(alpha, int | float):
        raise InputError(f"{where}: adapter_config.json has no r or no lora_alpha")

    def scale(module: str, rank: int) -> float:
        # as PEFT matches them: the end of a module's name, which may be an expression
        matching = [x for key, x in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
        return (matching or [alpha])[0] / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return scale


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
    about: Mapping[str, str | None] = MappingProxyType({}),
    tables: Collection[str] = (),
    others: Mapping[str, np.ndarray] = MappingProxyType({}),
    base: str = "",
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` of changes by module.

    The scale is in B, so that alpha is the rank. The checksum of the base goes into the metadata of
    the first, since PEFT warns of settings that it does not know.

    Args:
      folder: to write to.
      changes: by module.
      about: settings that say what the adapters are for.
      tables: the modules among them that are embeddings.
      others: weights that were trained in full, by module.
      base: the checksum.
    """
    # PEFT looks for a name at the end of others: unless it is anchored, "q" is "block.q", too
    ranks = {f"^{re.escape(name)}$": len(a) for name, (a, *_) in sorted(changes.items())}
    rank = max(ranks.values())
    odd = {name: r for name, r in ranks.items() if r != rank}
    config = {
        **about,
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": "|".join(ranks),
        "rank_pattern": odd,
        "alpha_pattern": odd,
        "modules_to_save": [*others] or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": any(norms is not None for *_, norms in changes.values()),
    }
    ends, ends_of_table = ("A.weight", "B.weight", _NORMS), ("embedding_A", "embedding_B", _NORMS)
    arrays = {
        f"{_PREFIX}{name}.lora_{end}": np.ascontiguousarray(x)
        for name, change in changes.items()
        for end, x in zip(ends_of_table if name in tables else ends, change, strict=True)
        if x is not None
    }
    arrays |= {f"{_PREFIX}{name}.weight": np.ascontiguousarray(x) for name, x in others.items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_safetensors(Path(folder, _WEIGHTS), arrays, {_BASE: base})
    with write_atomically(Path(folder, _CONFIG)) as written:
        written.write_text(json.dumps(config, indent=2) + "\n")


def read_peft(folder: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays by name, and the configuration.

    Raises:
      ModelError: one of the files is missing or damaged.
    """
    with wrap_errors(f"'{folder}' has no adapters of PEFT, or they are damaged", ModelError):
        config = json.loads(Path(folder, _CONFIG).read_text())
        if not isinstance(config, dict):
            raise ValueError(f"{_CONFIG} is not an object")
    arrays = read_weights(Path(folder, _WEIGHTS))
    half = ml_dtypes.bfloat16
    return {n: x.astype(np.float32) if x.dtype == half else x for n, x in arrays.items()}, config


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
