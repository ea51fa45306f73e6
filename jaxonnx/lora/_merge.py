"""The sum of weights and adapters, as the evaluator computes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxonnx._axes import Matrix
from jaxonnx.errors import InputError
from jaxonnx.lowering import ChangedWeight, LowRank, in_file, is_half, unfold_change


@dataclass(frozen=True)
class Merge:
    """The sum of the file's weights and the adapters (a `_run.changes.Adaption`)."""

    params: tuple[str, ...]
    rank: int
    alpha: float
    layouts: Mapping[str, Matrix]
    stored: tuple[str, ...] = ()

    def factors(self, tensors: Mapping[str, Any]) -> dict[str, tuple[Matrix, Any, Any]]:
        pairs = {name: [in_file(tensors[member]) for member in pair(name)] for name in self.layouts}
        scale = self.alpha / self.rank
        return {
            name: (self.layouts[name], jnp.matrix_transpose(a), jnp.matrix_transpose(b) * scale)
            for name, (a, b) in pairs.items()
        }

    def without_factors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        members = {member for name in self.layouts for member in pair(name)}
        return {name: value for name, value in tensors.items() if name not in members}

    def __call__(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(tensors)
        for name, place in self.layouts.items():
            # a step may store those of a stack of matrices in the order of kernels
            a, b = (in_file(result.pop(member)) for member in pair(name))
            w = tensors[name]
            plain = w.ndim == 2 and w.dtype == a.dtype and not is_half(w)
            b = b * (self.alpha / self.rank)
            if plain or not (is_float(w) or place.kernel or place.batch):
                result[name] = LowRank(w, a.T, b.T) if place.output else LowRank(w, b, a)
                continue
            if is_float(w):
                change = unfold_change(a, b, place, w.shape)
                result[name] = (w + change).astype(w.dtype)
            else:
                result[name] = ChangedWeight(w, a, b, place)
        return result


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


def check_scale(rank: Any, alpha: Any) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise InputError(f"rank must be a positive integer, and is {rank!r}")
    if alpha is not None and not 0 < alpha < math.inf:
        raise InputError(f"alpha must be a positive number, and is {alpha!r}")


def pair(name: str) -> tuple[str, str]:
    return f"{name}.lora_A", f"{name}.lora_B"
