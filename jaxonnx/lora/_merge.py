"""The sum of weights and adapters, as the evaluator computes it."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._display import list_some
from jaxonnx._graph.uses import find_tied, uses_by_tensor
from jaxonnx._require import require
from jaxonnx._weights import Matrix, is_float
from jaxonnx.errors import InputError, warn
from jaxonnx.lowering import ChangedRows, ChangedWeight, LowRank, is_half, merge_change, to_array
from jaxonnx.model import Model


@dataclass(frozen=True)
class Merge:
    """The sum of the file's weights and the adapters."""

    params: tuple[str, ...]
    rank: int
    alpha: float
    layouts: Mapping[str, Matrix]
    stored: tuple[str, ...] = ()
    """The adapted weights in few bits, into which nothing can be merged without rounding."""
    dropout: float = 0.0
    """The share of the inputs of A that training drops."""

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(name for name in self.params if name not in self.stored)

    def factors(self, tensors: Mapping[str, Any]) -> dict[str, tuple[Matrix, Any, Any]]:
        result, with_rows = {}, {*self.find_rows(tensors)}
        for name, place in self.layouts.items():
            a, b = (to_array(tensors[part]) for part in pair(name))
            if chosen := name in with_rows:
                count = tensors[name].shape[row_axis(place)]
                a, b = choose_rows(a, count), choose_rows(b, count).T if b.ndim == 1 else b
            b = b if chosen else b * (self.alpha / self.rank)
            result[name] = place, jnp.matrix_transpose(a), jnp.matrix_transpose(b)
        return result

    def find_rows(self, tensors: Mapping[str, Any]) -> list[str]:
        """Return the weights of which rows are trained: one of the factors has their indices."""
        return [name for name in self.layouts if find_chosen(tensors, name) is not None]

    def magnitudes(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        named = {name: tensors.get(magnitude(name)) for name in self.layouts}
        return {name: value for name, value in named.items() if value is not None}

    def without_factors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        members = list_members(self.layouts)
        return {name: value for name, value in tensors.items() if name not in members}

    def read(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(tensors)
        for name, place in self.layouts.items():
            # a step may store those of a stack of matrices in the order of kernels
            a, b = (to_array(result.pop(member)) for member in pair(name))
            w, norms = tensors[name], result.pop(magnitude(name), None)
            if a.ndim == 1 or b.ndim == 1:
                rows, changes = (a, b.T) if a.ndim == 1 else (b, a)
                result[name] = ChangedRows(w, rows, changes, by_row=row_axis(place) == 0)
                continue
            plain = w.ndim == 2 and ((w.dtype == a.dtype and not is_half(w)) or self._drops(place))
            b = b * (self.alpha / self.rank)
            if plain or not (is_float(w) or place.kernel or place.batch):
                factors = (a.T, b.T) if place.output else (b, a)
                result[name] = LowRank(w, *factors, norms, by_row=not place.output)
            elif is_float(w):
                result[name] = merge_change(w, a, b, norms, place)
            else:
                result[name] = ChangedWeight(w, a, b, place, norms)
        return result

    def _drops(self, place: Matrix) -> bool:
        return self.dropout > 0 and not place.kernel and not place.batch

    def drop(self, tensors: Mapping[str, Any], key: jax.Array) -> Mapping[str, Any]:
        """Drop inputs of A, each adapter by its own key, and scale up the rest."""
        if not self.dropout:
            return tensors
        keys = {n: jax.random.fold_in(key, zlib.crc32(n.encode())) for n in self.layouts}
        changed = {
            n: dataclasses.replace(tensors[n], key=k, ratio=self.dropout)
            for n, k in keys.items()
            if not isinstance(tensors[n], ChangedRows)
        }
        return {**tensors, **changed}


def check_magnitudes(model: Model, names: Collection[str]) -> None:
    """Raise an InputError unless the outputs of these weights can be scaled (DoRA)."""
    uses_of = uses_by_tensor(model.graph, model.tensors)
    for name in (name for name in names if not is_float(model.tensors[name])):
        for use in (use for use in uses_of[name] if use.is_direct):
            declared = use.node.op.quantized.get(use.position)
            if declared is None or not declared.scalable:
                raise InputError(
                    f"'{name}' is multiplied as it is stored, at {use.node.label}, so that DoRA "
                    "cannot scale its outputs: leave it out of where=, or train without dora="
                )


def checksum(model: Model, layouts: Mapping[str, Matrix], values: Mapping[str, Any]) -> str:
    """Return a checksum of a row of each adapted weight; "" if one is on other hosts.

    It is the first row, or the first one that is trained.
    """
    result = 0
    for name, place in sorted(layouts.items()):
        x = to_array(model.tensors[name])
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return ""
        chosen = find_chosen(values, name)
        first = 0 if chosen is None or row_axis(place) else int(chosen[0])
        row = np.ascontiguousarray(x[first])
        result = zlib.crc32(f"{name} {row.dtype}".encode() + row.tobytes(), result)
    return f"{result:08x}"


def warn_about_ties(model: Model, names: Collection[str]) -> None:
    """Warn if one of these weights is both an embedding and the matrix of a product."""
    if tied := [f"'{name}'" for name in find_tied(model.graph, model.tensors) if name in names]:
        warn(
            f"{list_some(tied)}: the embedding and the output layer are one weight, so that its "
            "adapter changes both, unlike PEFT's adapter of an output layer; where the file stores "
            "the weight twice, jaxonnx.load(path, tied=[]) keeps the two apart",
        )


def check_scale(rank: Any, alpha: Any) -> None:
    require("rank", rank, type(rank) is int and rank >= 1, "a positive integer")
    require("alpha", alpha, alpha is None or 0 < alpha < math.inf, "a positive number")


def pair(name: str) -> tuple[str, str]:
    return f"{name}.lora_A", f"{name}.lora_B"


def list_members(layouts: Mapping[str, Matrix]) -> set[str]:
    """Return the names of values of adapters that are none of the model's tensors."""
    return {member for name in layouts for member in (*pair(name), magnitude(name))}


def list_adapted(values: Mapping[str, Any], layouts: Mapping[str, Matrix]) -> list[str]:
    """Return the weights that have adapters, and not changes of some rows."""
    return [name for name in layouts if find_chosen(values, name) is None]


def refuse_others(
    values: Mapping[str, Any],
    layouts: Mapping[str, Matrix],
    beyond: Collection[str] = (),
    reason: str = "is not held by this form: leave it out of trainable=, or save an .npz or "
    "the model",
) -> None:
    """Raise an InputError if tensors were trained beside the adapters, and `beyond` lacks them."""
    if others := [name for name in values if name not in list_members(layouts) | {*beyond}]:
        raise InputError(f"'{others[0]}' was trained beside the adapters and {reason}")


def refuse_rows(values: Mapping[str, Any], layouts: Mapping[str, Matrix], reason: str) -> None:
    """Raise an InputError if rows of tokens were trained (`Model.with_tokens`)."""
    adapted = list_adapted(values, layouts)
    if tables := [name for name in layouts if name not in adapted]:
        raise InputError(f"the trained rows of tokens in '{tables[0]}' {reason}")


def row_axis(place: Matrix) -> int:
    """Return the axis of a weight that has the rows of an embedding, or its output layer's."""
    return place.input if place.lookup else place.output


def find_chosen(values: Mapping[str, Any], name: str) -> Any:
    """Return the indices of the rows that are trained of a weight; None if it has an adapter."""
    return next((values[member] for member in pair(name) if values[member].ndim == 1), None)


def index_member(name: str, place: Matrix) -> str:
    """Return the name of the factor that has the indices of the rows that are trained."""
    return pair(name)[0 if place.lookup else 1]


def choose_rows(rows: Any, count: int) -> Any:
    """Return the matrix that chooses rows among `count`, one for each index; a matrix as it is."""
    return jax.nn.one_hot(rows, count, dtype=jnp.float32) if rows.ndim == 1 else rows


def magnitude(name: str) -> str:
    """Return the name of the norms that DoRA trains for the outputs of a weight."""
    return f"{name}.lora_magnitude"


def unfold_map(x: Any, place: Matrix) -> np.ndarray:
    """Return a weight as maps (..., outputs, inputs) in float32."""
    x = np.asarray(x, np.float32)
    order = (*place.batch, place.output, place.input, *place.kernel)
    shape = [x.shape[axis] for axis in (*place.batch, place.output)]
    return x.transpose(order).reshape(*shape, -1)
