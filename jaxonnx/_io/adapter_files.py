"""Files of adapters alone: those of onnxruntime (.onnx_adapter) and the folders of PEFT."""

import difflib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from jaxonnx._atomic_write import whole
from jaxonnx._io.formats import read_weights, write_safetensors
from jaxonnx._safe_read import reading
from jaxonnx.errors import Error, InputError, ModelError

SUFFIX = ".onnx_adapter"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


_PREFIX = "base_model.model."
"""What PEFT puts before the names of modules."""
_UNKNOWN = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
"""Settings of PEFT that a change of rank r does not have."""


def is_foreign(path: str | os.PathLike) -> bool:
    """Check whether a path is an .onnx_adapter, or a folder that PEFT wrote."""
    return os.fspath(path).endswith(SUFFIX) or Path(path, _CONFIG).is_file()


def read(
    path: str | os.PathLike, weights: Mapping[str, str]
) -> tuple[dict[str, np.ndarray], int, float]:
    """Return the factors A (rank, inputs) and B (outputs, rank), their rank, and alpha.

    Args:
      path: an .onnx_adapter or a folder of PEFT.
      weights: the weight of each module; the factors are called "<weight>.lora_A" and
        "<weight>.lora_B". "self_attn" and "attn" count as one.

    Raises:
      InputError: a module without a weight, several ranks, or what is not LoRA.
      ModelError: the file is damaged.
    """
    where, alpha = f"'{os.fspath(path)}'", None
    if transposed := os.fspath(path).endswith(SUFFIX):
        arrays = read_onnx_adapter(path)
    else:
        arrays, config = read_peft(path)
        alpha = _alpha(where, config)
    modules = {_module(name): weight for name, weight in weights.items()}
    result: dict[str, np.ndarray] = {}
    ranks = set()
    for key, value in arrays.items():
        stem, _, end = key.removeprefix(_PREFIX).rpartition(".lora_")
        if end not in ("A.weight", "B.weight") or value.ndim < 2:
            raise InputError(f"{where}: '{key}' is not a factor of LoRA")
        if _module(stem) not in modules:
            near = difflib.get_close_matches(_module(stem), modules, 3)
            hint = f"near it are {', '.join(near)}" if near else "names= says what it is called"
            raise InputError(f"{where}: the model has no weight of a module '{stem}'; {hint}")
        if not np.isfinite(value).all():
            raise ModelError(f"{where}: '{key}' has values that are not finite")
        value = value.swapaxes(-1, -2) if transposed else value
        ranks.add(value.shape[-2 if end[0] == "A" else -1])
        result[f"{modules[_module(stem)]}.lora_{end[0]}"] = value
    if len(ranks) != 1:
        raise InputError(f"{where} has adapters of ranks {sorted(ranks)}, not of one")
    (rank,) = ranks
    return result, rank, float(rank if alpha is None else alpha)


def _module(name: str) -> str:
    """Return the name of a module as onnxruntime-genai has it."""
    return name.replace(".self_attn.", ".attn.").removeprefix("/").replace("/", ".")


def _alpha(where: str, config: Mapping[str, Any]) -> float:
    """Return the alpha of a configuration of PEFT, if it is of a change of rank r."""
    if config.get("peft_type") != "LORA":
        raise InputError(f"{where} is of type {config.get('peft_type')!r}, not LORA")
    odd = [key for key in _UNKNOWN if config.get(key)]
    if odd or config.get("bias", "none") != "none":
        raise InputError(f"{where} has {', '.join(odd) or 'bias'}, which jaxonnx.LoRA has not")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise InputError(f"{where}: adapter_config.json has no r or no lora_alpha")
    return alpha * (math.sqrt(rank) if config.get("use_rslora") else 1.0)


def write_onnx_adapter(path: str | os.PathLike, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by the names of a model's inputs, as `onnxruntime.LoraAdapter` loads them."""
    runtime = _onnxruntime()
    adapter = runtime.AdapterFormat()
    values = {n: runtime.OrtValue.ortvalue_from_numpy(x) for n, x in arrays.items()}
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters(values)
    with whole(path) as written:
        adapter.export_adapter(os.fspath(written))


def read_onnx_adapter(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Return the arrays of an .onnx_adapter file by name.

    Raises:
      ModelError: it is not such a file.
    """
    runtime = _onnxruntime()
    with reading(f"'{path}' is not an {SUFFIX} file, or is damaged", ModelError):
        if not Path(path).is_file():
            raise FileNotFoundError(path)
        found = runtime.AdapterFormat.read_adapter(os.fspath(path)).get_parameters()
        return {name: np.array(value.numpy()) for name, value in found.items()}


def write_peft(folder: str | os.PathLike, factors: Mapping[str, np.ndarray], rank: int) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` of factors by their names.

    They are A (inputs, rank) and B (rank, outputs), with the scale in B, so that alpha is the rank.
    """
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".lora_")[0] for name in factors}),
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_safetensors(Path(folder, _WEIGHTS), {_PREFIX + n: x.T for n, x in factors.items()})
    with whole(Path(folder, _CONFIG)) as written:
        written.write_text(json.dumps(config, indent=2) + "\n")


def read_peft(folder: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays by name, and the configuration.

    Raises:
      ModelError: one of the files is missing or damaged.
    """
    with reading(f"'{folder}' has no adapters of PEFT, or they are damaged", ModelError):
        config = json.loads(Path(folder, _CONFIG).read_text())
        if not isinstance(config, dict):
            raise ValueError(f"{_CONFIG} is not an object")
    arrays = read_weights(Path(folder, _WEIGHTS))
    half = ml_dtypes.bfloat16
    return {n: x.astype(np.float32) if x.dtype == half else x for n, x in arrays.items()}, config


def _onnxruntime() -> ModuleType:
    try:
        import onnxruntime
    except ImportError as error:
        raise Error(f"{SUFFIX} files need onnxruntime: pip install onnxruntime") from error
    return onnxruntime
