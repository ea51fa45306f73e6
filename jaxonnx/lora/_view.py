"""Merge the adapters of a model into its weights, or write them as nodes or inputs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx import quantization
from jaxonnx._arrays import to_host
from jaxonnx._graph.uses import weights
from jaxonnx._rewrite.network import Network
from jaxonnx._text import format_count, list_some
from jaxonnx.errors import InputError
from jaxonnx.llm import module_name
from jaxonnx.lora._merge import Merge, magnitude, pair
from jaxonnx.lora._nodes import (
    Factors,
    factor_names,
    factor_types,
    insert_adapters,
    magnitude_name,
)
from jaxonnx.lowering import LowRank, is_half, merge_change, norm_factors, to_array
from jaxonnx.views import Addition, View

M = TypeVar("M", bound=Network)


@dataclass(frozen=True)
class Adaption(Merge, View):
    """The view of adapters: calls see their sums with the weights, files one of three forms."""

    adapts: ClassVar[bool] = True

    def merge(self, network: M, *, requantize: bool) -> M:
        if self.stored and not requantize:
            raise InputError(
                f"adapters cannot be merged into weights in few bits ('{self.stored[0]}', ...) "
                "without rounding these anew: save(path, adapters='nodes') writes them beside, "
                "merge_adapters(requantize=True) and save(path, adapters='merged') round"
            )
        tensors = {**network.state, **network.params}

        @jax.jit
        def merge(tensors):
            merged = self.read(tensors)
            return {name: to_array(merged[name]) for name in self.targets}

        params = merge(tensors)
        lost = [name for name, share in self._find_lost(tensors, params).items() if share > 0.5]
        if lost:
            kind = tensors[lost[0]].dtype
            warnings.warn(
                f"{kind} rounds most of the adapter away in {format_count(len(lost), 'weight')} "
                f"({list_some(lost, '')}), whose changes are smaller than the steps between its "
                "numbers: Adapters.save, or save(path, adapters='nodes') before merging, keeps "
                "all of it",
                stacklevel=2,
            )
        rounded: dict[str, Any] = {}
        if self.stored:
            factors = self._arrays(network, tensors)
            changes = {name: factors[name].change() for name in self.stored}
            scaled = self._scaled_matrices(network).items()
            changes |= {n: factors[n].change_of(matrix) for n, matrix in scaled if n in changes}
            rounded, losses = quantization.requantize(network.graph, network.tensors, changes)
            warnings.warn(_describe_losses(losses), stacklevel=2)
        left = self.without_factors(network.state)
        state = {name: value for name, value in left.items() if name not in params}
        state |= {name: jnp.asarray(value) for name, value in rounded.items()}
        constants = {n: v for n, v in network.program.constants.items() if n not in rounded}
        program = dataclasses.replace(network.program.leave(Adaption), constants=constants)
        return dataclasses.replace(network, params=params, state=state, program=program)

    def _find_lost(self, tensors: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, float]:
        """Return the share of the change that rounding loses, of each adapted 16-bit weight."""

        @partial(jax.jit, static_argnums=0)
        def compare(place, w, a, b, norms, rounded):
            w, rounded = w.astype(jnp.float32), rounded.astype(jnp.float32)
            whole = merge_change(w, a, b * (self.alpha / self.rank), norms, place)
            error, change = jnp.linalg.norm(rounded - whole), jnp.linalg.norm(whole - w)
            trained = change > 1e-6 * jnp.linalg.norm(w)  # magnitudes (DoRA) round as they start
            return jnp.where(trained, error / change, 0)

        halves = {name for name in self.layouts if name in merged and is_half(tensors[name])}
        halves.difference_update(self.find_rows(tensors))  # new rows start from nothing
        result = {}
        for name in halves:
            a, b = (to_array(tensors[member]) for member in pair(name))
            norms, w = tensors.get(magnitude(name)), to_array(tensors[name])
            result[name] = float(compare(self.layouts[name], w, a, b, norms, merged[name]))
        return result

    def leave(self, network: M, form: str | None) -> tuple[M, list[Addition]]:
        if (form or ("nodes" if self.stored else "merged")) == "merged":
            return self.merge(network, requantize=True), []
        factors = self._arrays(network, network.tensors)
        if form == "inputs" and any(f.scale is not None for f in factors.values()):
            raise InputError(
                "adapters='inputs' has no place for the magnitudes of DoRA: they would be others "
                "for each adapter, and onnxruntime's format has none; use 'nodes' or 'merged'"
            )

        def insert(proto: ModelProto) -> ModelProto:
            graph, tensors, inputs = network.graph, network.tensors, form == "inputs"
            return insert_adapters(proto, graph, tensors, factors, module_name, as_inputs=inputs)

        params, state = map(self.without_factors, (network.params, network.state))
        program = network.program.leave(Adaption)
        bare = dataclasses.replace(network, params=params, state=state, program=program)
        inputs: dict[str, np.ndarray] = {}
        if form == "inputs":
            pairs = {name: (f.a, f.b) for name, f in factors.items()}
            inputs = _name_factors(pairs, network)
        return bare, [Addition(frozenset(self.layouts), insert, inputs)]

    def _arrays(self, network: Network, values: Mapping[str, Any]) -> dict[str, Factors]:
        """Return the factors of each adapted weight as NumPy arrays, with the weight's shape."""
        meanings = weights(network.graph, network.tensors)
        result = {
            name: Factors(place, meanings[name].shape, *map(np.asarray, pair))
            for name, (place, *pair) in self.factors(values).items()
        }
        norms = self.magnitudes(values)
        for name, matrix in self._scaled_matrices(network).items():
            factors = result[name]
            scale = norm_factors(matrix + factors.change(), norms[name], factors.place.summed)
            result[name] = dataclasses.replace(factors, scale=np.asarray(scale))
        return result

    def _scaled_matrices(self, network: Network) -> dict[str, np.ndarray]:
        """Return the weights in float32, dequantized, whose outputs are scaled to norms (DoRA)."""
        names = self.magnitudes(network.tensors)
        return quantization.dequantize(network.graph, network.tensors, names)


def drop_inputs(model: M, ratio: float) -> M:
    """Return a model with adapters whose training drops inputs of A.

    Raises:
      InputError: an adapter is added to its weight before the product.
    """
    *views, view = model.program.views
    assert isinstance(view, Adaption)
    view = dataclasses.replace(view, dropout=ratio)
    tensors = jax.eval_shape(view.read, model.tensors)
    if added := [name for name in view.layouts if not isinstance(tensors[name], LowRank)]:
        raise InputError(
            f"dropout={ratio}: the adapter of '{added[0]}' is added to the weight in each step, so "
            "that it has no inputs to drop: leave the weight out of where=, or dropout= out"
        )
    return dataclasses.replace(
        model, program=dataclasses.replace(model.program, views=(*views, view))
    )


def writes_apart(model: Network) -> bool:
    """Check whether the default file has adapters beside weights in few bits."""
    view = model.program.find(Adaption)
    return view is not None and bool(view.stored)


def file_tensors(model: Network) -> dict[str, Any]:
    """Return the tensors of the default file, by name; adapters of few-bit weights as factors."""
    view, tensors = model.program.find(Adaption), model.tensors
    if view is None:
        return tensors
    if not view.stored:
        return view.merge(model, requantize=False).tensors
    factors = _name_factors({n: pair for n, (_, *pair) in view.factors(tensors).items()}, model)
    norms = view.magnitudes(tensors)
    factors |= {magnitude_name(weight, module_name): norms[weight] for weight in norms}
    return {**view.without_factors(tensors), **factors}


def _name_factors(pairs: Mapping[str, Sequence[Any]], model: Network) -> dict[str, Any]:
    """Return the factors of each weight by their names in files, in the type that files have."""
    types = factor_types(pairs, model.graph, model.tensors)
    return {
        name: value.astype(types[weight])
        for weight, pair in pairs.items()
        for name, value in zip(factor_names(weight, module_name), pair, strict=True)
    }


def read_weight(model: Network, name: str) -> np.ndarray:
    """Return a weight with its adapter; one in few bits as float32."""
    view, tensors = model.program.find(Adaption), model.tensors
    if view is not None and name in view.layouts:
        view = dataclasses.replace(view, layouts={name: view.layouts[name]})
        if name not in view.stored:
            return to_host(to_array(view.read(tensors)[name]))
        (matrix,) = quantization.dequantize(model.graph, tensors, [name]).values()
        factors = view._arrays(model, tensors)[name]
        return matrix + (factors.change() if factors.scale is None else factors.change_of(matrix))
    if weights(model.graph, tensors)[name].storage:
        return quantization.dequantize(model.graph, tensors, [name])[name]
    return to_host(to_array(tensors[name]))


def _describe_losses(losses: Mapping[str, quantization.Loss]) -> str:
    """Describe the error of rounding with adapters, the worst matrices first."""
    worst = sorted(losses, key=lambda name: -losses[name].matrix)
    lines = [f"{n} {losses[n].matrix:.2g} ({losses[n].change:.2g})" for n in worst]
    lost = sum(loss.change > 0.5 for loss in losses.values())
    share = f"; most of the adapter of {format_count(lost, 'weight')} is lost" if lost else ""
    return (
        f"{format_count(len(losses), 'weight')} in few bits {'are' if len(losses) > 1 else 'is'} "
        "rounded anew with the adapters, with a relative error of the matrix (of its change) of "
        f"{list_some(lines, '')}{share}; adapters='nodes' loses nothing"
    )
