"""Adapters that start from what quantization lost (LoftQ, arXiv:2310.08659)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._axes import Matrix
from jaxonnx._graph.uses import weights
from jaxonnx.errors import InputError
from jaxonnx.lora._merge import is_float, pair, unfold_map
from jaxonnx.lora._module_names import module_name
from jaxonnx.model import Model
from jaxonnx.quantization import dequantize

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
    tensors = model.tensors
    theirs, other = weights(against.graph, against.tensors), against.tensors
    modules = {_module(n): n for n in theirs if n in other and is_float(other[n])}
    matrices = dequantize(model.graph, tensors, places)
    result = {}
    for name, place in places.items():
        twin = name if name in modules.values() else modules.get(_module(name), "")
        at: Any = theirs[twin].matrix if twin else None
        if at is None:
            raise InputError(f"against= has no weight '{name}' in floating point")
        present = unfold_map(matrices[name], place)
        wanted = unfold_map(other[twin], at)
        if present.shape != wanted.shape:
            raise InputError(
                f"against= is another model: its '{twin}' is a matrix of {[*wanted.shape]}, "
                f"'{name}' one of {[*present.shape]}"
            )
        u, s, v = np.linalg.svd(wanted - present, full_matrices=False)
        root = np.sqrt(s[..., :rank] / scale)
        a, b = root[..., :, None] * v[..., :rank, :], u[..., :rank] * root[..., None, :]
        result |= zip(pair(name), (jnp.asarray(a), jnp.asarray(b)), strict=True)
    return result


def _module(name: str) -> str:
    return module_name(_SUFFIX.sub("", name))
