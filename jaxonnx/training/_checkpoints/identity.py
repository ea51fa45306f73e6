"""Describe a run by values of JSON, so that another run does not continue its checkpoints."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np
from optax import InjectStatefulHyperparamsState

from jaxonnx._arguments import RATE, list_arguments
from jaxonnx._arrays import to_host
from jaxonnx._data.batches import Source
from jaxonnx._data.ragged import Padding
from jaxonnx._io.checkpoints import crc
from jaxonnx.lora import Adaption
from jaxonnx.losses import FunctionLoss, Loss, find_by_output
from jaxonnx.quantization import Quantization
from jaxonnx.training._settings import Settings
from jaxonnx.training._step import State, Step

_OF_LIBRARIES = ("jax", "jaxonnx", "optax")
_MODELS = ("reference", "teacher")
"""Arguments of losses that may be the path of a model, which may move."""
_PHASES = ("dense", "dynamic", "products")
"""Options of sparsity that a resumed run may have otherwise."""


def describe_run(step: Step, examples: Source, settings: Settings, state: State) -> dict[str, Any]:
    """List the values that a resumed run must share: arguments, objective, adapters, data.

    Args:
      settings: as the user gave them.
      state: of a run at its start.
    """
    # 1. The arguments that are declared so.
    arguments = list_arguments("TrainArguments").items()
    same = {name: getattr(settings, name) for name, entry in arguments if entry.argument.resume}
    padding = Padding.of(settings.pad, settings.length_buckets)
    same["pad"] = {name: float(x) for name, x in padding.pad.items()} or None
    scheme = None if settings.quantize is None else Quantization.of(settings.quantize)
    fixed = settings.fixed
    same["fixed"] = fixed and {name: np.asarray(x).tolist() for name, x in fixed.items()}
    same["batching"] = sorted(settings.batching or ()) or None
    same["quantize"] = scheme and scheme.as_json
    for name in ("class_weights", "dropout"):
        if isinstance(same[name], Mapping):
            same[name] = _comparable(same[name]) or None
    same["length_buckets"] = None if padding.buckets is None else [*padding.buckets]
    same["batch_size"] = examples.size
    # 2. What it optimizes, and the rest.
    lora = step.model.program.find(Adaption)
    return {
        **same,
        **_describe_objective(step, settings, state),
        "lora": lora and f"LoRA(alpha={lora.alpha:g}, dropout={lora.dropout:g})",
        "patience": settings.patience,
        "updates": step.updates,
        "phases": step.phases,
        "preprocess": examples.resumable,
        "data": examples.identity,
    }


def _comparable(value: Any) -> Any:
    """Return weights or ratios by name as a checkpoint has them."""
    if isinstance(value, Mapping):
        return {str(name): _comparable(x) for name, x in value.items()}
    return value if isinstance(value, str) else float(value)


def _describe_objective(step: Step, settings: Settings, state: State) -> dict[str, Any]:
    """Describe loss, optimizer, sparsity and augmentation by values of JSON.

    An optimizer of optax is described by the constants that its state has as hyperparameters
    (`optax.inject_hyperparams`): those of a checkpoint would replace the new ones.

    Args:
      settings: as the user gave them.
      state: of a run at its start.
    """
    loss, chosen = step.settings.loss, settings.optimizer
    result: dict[str, Any] = {"loss": None, "augment": _describe(settings.augment)}
    if loss is not None:
        shares = {
            output: part[1] if isinstance(part, tuple) else 1.0
            for output, part in (loss.items() if isinstance(loss, Mapping) else ((None, loss),))
        }
        parts = {output: _describe(x) for output, x in find_by_output(loss).items()}
        whole = {str(o): [text, shares[o]] for o, text in parts.items()}
        result["loss"] = parts[None] if [*parts] == [None] else whole
        starts = [x.compares_with_start for x in find_by_output(loss).values()]
        params = step.model.params.values()
        local = all(x.is_fully_addressable for x in params)
        if any(starts) and local and not step.model.program.adapts:  # else it is frozen
            sums = [crc(to_host(x)) for x in params]
            result["reference"] = f"the initial weights {zlib.crc32(repr(sums).encode()):08x}"
    if loss is not None and (isinstance(chosen, str) or (chosen is None and not step.model.heads)):
        rate = settings.learning_rate
        result |= {
            "optimizer": chosen or "adam",
            "schedule": settings.schedule or "constant",
            "warmup": settings.warmup or 0,
            "clip": settings.clip,
            "weight_decay": settings.weight_decay,
        }
        if not callable(rate):
            result["learning_rate"] = RATE if rate is None else rate
    else:
        kind = InjectStatefulHyperparamsState
        nodes = jax.tree.leaves(state.optimizer, is_leaf=lambda x: isinstance(x, kind))
        constants = [
            f"{name}={x:.6g}"
            for node in nodes
            if isinstance(node, kind)
            for name, x in node.hyperparams.items()
            if name not in node.hyperparams_states and np.ndim(x) == 0
        ]
        result |= {"optimizer": f"optax({', '.join(constants)})"} if constants else {}
    sparsity = settings.sparsity
    if sparsity is not None:
        options = dict(sparsity) if isinstance(sparsity, Mapping) else {"pattern": sparsity}
        options = {"method": "three_phase"} | options
        sparsity = {name: str(x) for name, x in sorted(options.items()) if name not in _PHASES}
    return result | {"sparsity": sparsity}


def _describe(value: Any) -> str | None:
    """Describe a loss, a function, a name or a list of them by names and the numbers in it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(str(_describe(x)) for x in value)
    inner = value
    while isinstance(inner, partial | FunctionLoss) and not getattr(inner, "name", None):
        inner = inner.func if isinstance(inner, partial) else inner.function
    name = inner.name if isinstance(inner, Loss) else None
    name = name or getattr(inner, "__qualname__", type(inner).__qualname__)
    numbers = [f"{key}={x}" for key, x in _list_numbers(value)]
    return name + (f"({', '.join(numbers)})" if numbers else "")


def _list_numbers(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers that a function or an object has, by name, and a checksum of its code.

    They are in arguments of `partial`, defaults, enclosing functions, and fields; those of
    functions of libraries in enclosing functions only, as a newer version may have more.
    """
    pairs: dict[str, Any] = {}
    if isinstance(value, partial):
        pairs = {"function": value.func, **{str(i): x for i, x in enumerate(value.args)}}
        pairs |= value.keywords
    elif isinstance(value, MethodType):
        pairs = {"function": value.__func__, "object": value.__self__}
    elif isinstance(value, FunctionType):
        pairs = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        pairs = {name: _contents(cell) for name, cell in pairs.items()}
        package = (value.__module__ or "").partition(".")[0]
        if package == "optax":
            return
        if package not in _OF_LIBRARIES:
            defaults = value.__defaults__ or ()
            names = value.__code__.co_varnames[: value.__code__.co_argcount]
            pairs |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
            pairs |= value.__kwdefaults__ or {}
            parts = sorted({repr(x) for x in _list_symbols(value.__code__)})
            pairs["code"] = f"{zlib.crc32(' '.join(parts).encode()):08x}"
    elif isinstance(value, Loss) and is_dataclass(value):
        pairs = {x.name: getattr(value, x.name) for x in fields(value)}
        pairs = {x.name: pairs[x.name] for x in fields(value) if pairs[x.name] is not x.default}
        pairs.pop("name", None)
    elif hasattr(value, "__dict__") and callable(value):
        pairs = vars(value)
    for name, x in pairs.items():
        if isinstance(x, bool | int | float | str | np.generic) and name not in _MODELS:
            yield name, x
        elif isinstance(x, np.ndarray | jax.Array):
            yield name, f"{crc(np.asarray(x)):08x}"
        elif isinstance(x, FunctionType | MethodType | partial | Loss):
            yield from _list_numbers(x)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is bound later
        return None


def _list_symbols(code: CodeType) -> Iterator[Any]:
    """Yield the names and the floating-point constants that code uses, as all versions of Python
    compile them."""
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _list_symbols(x)
        elif isinstance(x, float):
            yield x
