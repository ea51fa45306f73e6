"""Adapters that start from what quantization lost (LoftQ, arXiv:2310.08659)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._axes import Matrix
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.uses import uses, weights
from jaxonnx._rewrite.adapters import module_name
from jaxonnx._rewrite.requantize import storage_names
from jaxonnx._rewrite.stored_grids import READERS
from jaxonnx.errors import InputError
from jaxonnx.lora._merge import is_float, pair
from jaxonnx.model import Model

_SUFFIX = re.compile(r"_(quantized|Q\d\w*|Bnb4|DQ_Q\d)$")
"""What quantizers of onnxruntime append to the name of a weight."""


def approximate_errors(
    model: Model, against: Model, places: Mapping[str, Matrix], rank: int, scale: float
) -> dict[str, jax.Array]:
    """Return A and B whose scaled product is nearest to what the weights lack of other ones.

    Nearest by the sum of squares among all of this rank (Eckart and Young): of the singular value
    decomposition U S V of the difference, B is U sqrt(S), A is sqrt(S) V.

    Raises:
      InputError: `against` does not have a weight in floating point, or in another shape.
    """
    tensors, found = model.tensors, weights(model.graph, model.tensors)
    theirs, other = weights(against.graph, against.tensors), against.tensors
    modules = {_module(n): n for n in theirs if n in other and is_float(other[n])}
    stored = {name: found[name].shape for name in places if found[name].storage}
    matrices = _dequantize(model.graph, tensors, stored)
    result = {}
    for name, place in places.items():
        twin = name if name in modules.values() else modules.get(_module(name), "")
        at: Any = theirs[twin].matrix if twin else None
        if at is None:
            raise InputError(f"against= has no weight '{name}' in floating point")
        own = _as_map(matrices.get(name, tensors[name]), place)
        wanted = _as_map(other[twin], at)
        if own.shape != wanted.shape:
            raise InputError(
                f"against= is another model: its '{twin}' is a matrix of {[*wanted.shape]}, "
                f"'{name}' one of {[*own.shape]}"
            )
        u, s, v = np.linalg.svd(wanted - own, full_matrices=False)
        root = np.sqrt(s[..., :rank] / scale)
        a, b = root[..., :, None] * v[..., :rank, :], u[..., :rank] * root[..., None, :]
        result |= zip(pair(name), (jnp.asarray(a), jnp.asarray(b)), strict=True)
    return result


def _dequantize(
    graph: Graph, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Return matrices that are stored in few bits, in float32.

    Args:
      graph, tensors: the bound graph and its tensors.
      shapes: of the matrices, by the names of their codes.

    Raises:
      InputError: a weight is read where it cannot be rounded again.
    """
    result: dict[str, np.ndarray] = {}
    for use in uses(graph, tensors):
        if use.name not in shapes or use.name in result or not use.is_direct:
            continue
        given = [np.asarray(tensors[n]) if n else None for n in storage_names(use)]
        grid = READERS[use.node.op.name](use, *given)
        there, shape = grid.groups >= 0, shapes[use.name]
        group = np.empty(grid.codes.shape[1], int)
        group[grid.groups[there]] = np.nonzero(there)[0]
        zero = np.broadcast_to(grid.zero, grid.scale.shape)
        rows = (grid.codes - zero[:, group]) * grid.scale[:, group]
        matrix = np.empty(math.prod(shape), np.float32)
        matrix[grid.arrange(np.arange(matrix.size).reshape(shape)).ravel()] = rows.ravel()
        result[use.name] = matrix.reshape(shape)
    return result


def _module(name: str) -> str:
    return module_name(_SUFFIX.sub("", name))


def _as_map(x: Any, place: Matrix) -> np.ndarray:
    """Return a weight as maps (..., outputs, inputs)."""
    x = np.asarray(x, np.float32)
    order = (*place.batch, place.output, place.input, *place.kernel)
    shape = [x.shape[axis] for axis in (*place.batch, place.output)]
    return x.transpose(order).reshape(*shape, -1)
