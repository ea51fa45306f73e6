"""Merge the adapters of a model into its weights, or write them as nodes or inputs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx._graph.uses import weights
from jaxonnx._network import Network
from jaxonnx._require import require_choice
from jaxonnx._rewrite import requantize as rounding
from jaxonnx._rewrite.adapters import (
    Factors,
    factor_names,
    factor_types,
    insert_adapters,
    magnitude_name,
    module_name,
)
from jaxonnx._text import format_count, list_some
from jaxonnx.errors import InputError
from jaxonnx.lowering import in_file, norm_factors

M = TypeVar("M", bound=Network)
AdapterForm = Literal["merged", "nodes", "inputs"]


def refuse_adapters(model: Network, what: str) -> None:
    """Raise an InputError if a model has adapters, which would not fit the changed graph."""
    if model.program.adaption is not None:
        raise InputError(
            f"{what} of a model with adapters cannot be changed: set it before they are attached, "
            "or merge them first with .merge_adapters()"
        )


def merge_adapters(model: M, *, requantize: bool = False) -> M:
    """Return the model of `Model.merge_adapters`."""
    adaption = model.program.adaption
    if adaption is None:
        return model
    stored = adaption.stored
    if stored and not requantize:
        raise InputError(
            f"adapters cannot be merged into weights in few bits ('{stored[0]}', ...) without "
            "rounding these anew: save(path, adapters='nodes') writes them beside, "
            "merge_adapters(requantize=True) and save(path, adapters='merged') round"
        )
    tensors = {**model.state, **model.params}
    merged = [name for name in adaption.params if name not in stored]
    params = jax.jit(lambda t: {n: in_file(adaption(t)[n]) for n in merged})(tensors)
    rounded: dict[str, Any] = {}
    if stored:
        factors = _factors(model, tensors)
        changes = {name: factors[name].change() for name in stored}
        scaled = _scaled_matrices(model).items()
        changes |= {n: factors[n].change_of(matrix) for n, matrix in scaled if n in stored}
        rounded, losses = rounding.requantize(model.graph, model.tensors, changes)
        warnings.warn(_describe_losses(losses), stacklevel=2)
    state = {n: v for n, v in tensors.items() if n in model.state and n not in params}
    state |= {name: jnp.asarray(value) for name, value in rounded.items()}
    constants = {n: v for n, v in model.program.constants.items() if n not in rounded}
    program = dataclasses.replace(model.program, constants=constants, adaption=None)
    return dataclasses.replace(model, params=params, state=state, program=program)


def _describe_losses(losses: Mapping[str, rounding.Loss]) -> str:
    """Describe the error of rounding with adapters, the worst matrices first."""
    worst = sorted(losses, key=lambda name: -losses[name].matrix)
    lines = [f"{n} {losses[n].matrix:.2g} ({losses[n].change:.2g})" for n in worst]
    lost = sum(loss.change > 0.5 for loss in losses.values())
    told = f"; most of the adapter of {format_count(lost, 'weight')} is lost" if lost else ""
    return (
        f"{format_count(len(losses), 'weight')} in few bits {'are' if len(losses) > 1 else 'is'} "
        "rounded anew with the adapters, with a relative error of the matrix (of its change) of "
        f"{list_some(lines, '')}{told}; adapters='nodes' loses nothing"
    )


def choose_adapter_form(model: Network, requested: AdapterForm | None) -> AdapterForm:
    """Return the form in which a file stores the adapters of a model; "merged" without adapters.

    Raises:
      InputError: there is no such form, or the model has no adapters.
    """
    require_choice("adapters", requested, ("merged", "nodes", "inputs", None))
    adaption = model.program.adaption
    if adaption is None:
        if requested in ("nodes", "inputs"):
            raise InputError(
                f"adapters={requested!r}: the model has none, or they are merged into its weights; "
                "result.lora.attach(model) gives a model with its adapters apart"
            )
        return "merged"
    return requested or ("nodes" if adaption.stored else "merged")


def insert_factors(
    model: Network, values: Mapping[str, Any], form: AdapterForm, proto: ModelProto
) -> ModelProto:
    """Return `proto`, a file of the base weights, with the adapters as nodes or as inputs."""
    factors = _factors(model, values)
    if form == "inputs" and any(f.scale is not None for f in factors.values()):
        raise InputError(
            "adapters='inputs' has no place for the magnitudes of DoRA: they would be others for "
            "each adapter, and onnxruntime's format has none; use 'nodes' or 'merged'"
        )
    return insert_adapters(
        proto, model.graph, model.tensors, factors, module_name, as_inputs=form == "inputs"
    )


def file_tensors(model: Network) -> dict[str, Any]:
    """Return the tensors of the default file, by name; adapters of few-bit weights as factors."""
    adaption = model.program.adaption
    if adaption is None or not adaption.stored:
        return merge_adapters(model).tensors
    tensors, factors_of = model.tensors, adaption.factors(model.tensors)
    types = factor_types(factors_of, model.graph, tensors)
    factors = {
        member: value.astype(types[weight])
        for weight, (_, *pair) in factors_of.items()
        for member, value in zip(factor_names(weight, module_name), pair, strict=True)
    }
    norms = adaption.magnitudes(tensors)
    factors |= {magnitude_name(weight, module_name): norms[weight] for weight in norms}
    return {**adaption.without_factors(tensors), **factors}


def _factors(model: Network, values: Mapping[str, Any]) -> dict[str, Factors]:
    """Return the factors of each adapted weight as NumPy arrays, with the weight's shape."""
    adaption: Any = model.program.adaption
    meanings = weights(model.graph, model.tensors)
    result = {
        name: Factors(place, meanings[name].shape, *map(np.asarray, pair))
        for name, (place, *pair) in adaption.factors(values).items()
    }
    norms = adaption.magnitudes(values)
    for name, matrix in _scaled_matrices(model).items():
        own = result[name]
        scale = norm_factors(matrix + own.change(), norms[name], own.place.summed)
        result[name] = dataclasses.replace(own, scale=np.asarray(scale))
    return result


def _scaled_matrices(model: Network) -> dict[str, np.ndarray]:
    """Return the weights in float32, dequantized, whose outputs are scaled to norms (DoRA)."""
    adaption, tensors = model.program.adaption, model.tensors
    names = () if adaption is None else adaption.magnitudes(tensors)
    return rounding.dequantize(model.graph, tensors, names)
