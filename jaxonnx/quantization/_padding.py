"""Padding in calibration data: which places of an activation hold tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import jax
import numpy as np

from jaxonnx._data.ragged import masks_and_positions
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import Error

_MASK_ENDS = re.compile(r"(attention_|input_)?mask")
"""The names of masks, behind those of their side: "decoder_attention_mask"."""


@dataclass(frozen=True)
class TokenAxes:
    """The axes of an activation along which tokens follow each other."""

    mask: str
    """The input [batch, length] that is 0 for padding."""
    axes: tuple[int, ...]
    """Empty if the first axis is batch and length together."""

    def find_tokens(self, inputs: Mapping[str, Any], ndim: int) -> Any:
        """Return an array of bool, false for padding, that broadcasts against the activation."""
        mask = inputs[self.mask] > 0
        ones = (1,) * (ndim - 1)
        if not self.axes:
            return mask.reshape(-1, *ones)
        shapes = ([len(mask), *ones] for _ in self.axes)
        masks = []
        for axis, shape in zip(self.axes, shapes, strict=True):
            shape[axis] = -1
            masks.append(mask.reshape(shape))
        return reduce(and_, masks)


def find_token_axes(
    model: Network, values: Sequence[str], batches: Iterable[Sequence[Any]]
) -> dict[str, TokenAxes]:
    """Find the token axes of the activations that calibration data reach with padding.

    These are the axes that grow with the length of a batch. A network that takes no other length
    has none.

    Args:
      model: the network.
      values: the names of the activations.
      batches: inputs, in the order of the model's.
    """
    names = [value.name for value in model.inputs]
    result: dict[str, TokenAxes] = {}
    for mask in masks_and_positions(model.inputs)[0]:
        place = names.index(mask.name)
        padded = (b for b in batches if np.ndim(b[place]) == 2 and not np.all(b[place]))
        batch = next(padded, None)
        if batch is None:
            continue
        count, length = np.shape(batch[place])
        side = _MASK_ENDS.split(mask.name)[0]
        shorter = {
            name: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype))
            for name, x in zip(names, batch, strict=True)
        }
        longer = {
            name: x.update(shape=tuple(n + (i > 0 and n == length) for i, n in enumerate(x.shape)))
            if name.startswith(side) and (side or not name.startswith("decoder_"))
            else x
            for name, x in shorter.items()
        }
        try:
            before, after = (_infer_shapes(model, values, inputs) for inputs in (shorter, longer))
        except Error:
            continue
        for name, x, y in zip(values, before, after, strict=True):
            axes = tuple(i for i, (n, m) in enumerate(zip(x, y, strict=True)) if i and m == n + 1)
            if x and axes and x[0] == count:
                result[name] = TokenAxes(mask.name, axes)
            elif x and (x[0], y[0]) == (count * length, count * (length + 1)):
                result[name] = TokenAxes(mask.name, ())
    return result


def _infer_shapes(
    model: Network, values: Sequence[str], inputs: Mapping[str, jax.ShapeDtypeStruct]
) -> list[tuple[int, ...]]:
    """Return the shapes of activations for shapes of inputs."""
    program, first = model.program.with_values(values), len(model.graph.outputs)

    def read(inputs):
        return program.evaluate(model.params, model.state, inputs)[first:]

    return [x.shape for x in jax.eval_shape(read, inputs)]
