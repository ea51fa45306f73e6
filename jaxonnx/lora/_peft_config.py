"""The settings in PEFT's adapter_config.json, and which of them change what an adapter computes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxonnx.errors import InputError

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
"""What is read here, or tells how the tensors are read."""

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
"""What the adapter starts as is subtracted from the base, and follows from the base alone."""
_CHANGED_STARTS: Mapping[str, str] = MappingProxyType(
    {
        "pissa_niter_": "random singular vectors were subtracted from the base",
        "corda": "what data chose was subtracted from the base",
        "lora_ga": "what gradients chose was subtracted from the base",
        "loftq": "the base was replaced by its quantized values",
    }
)


class Settings(NamedTuple):
    """What a configuration of PEFT says of its tensors."""

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
