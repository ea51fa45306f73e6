"""Initialization graphs: the nodes that draw a tensor's first value."""

import math
import re
from collections.abc import Mapping

import numpy as np
from onnx import helper

from jaxonnx._axes import Matrix
from jaxonnx._graph.uses import Weight
from jaxonnx._io.build import Writer, onnx_type
from jaxonnx._require import require_choice
from jaxonnx.errors import TrainingError

_NUMBERS = {"zeros": 0.0, "ones": 1.0}
KINDS = ("glorot", "he", "normal", "zeros", "ones")


def kinds(
    init: str | Mapping[str, str] | None,
    values: Mapping[str, np.ndarray],
    meanings: Mapping[str, Weight],
) -> dict[str, str | float]:
    """Choose the initializer of each tensor, by name: a kind of `KINDS`, or a constant number.

    Args:
      init: a kind for all weights, while other tensors start from the number that suits their
        operator (a scale from 1, say); or kinds by name or regular expression, of which the first
        that matches a name in full counts; or None for none.
      values: the tensors.
      meanings: how the graph uses them.

    Raises:
      TrainingError: an unknown kind, or an expression that matches no tensor.
    """
    chosen = init if isinstance(init, Mapping) else {} if init is None else {".*": init}
    for pattern, kind in chosen.items():
        require_choice("init", kind, KINDS, TrainingError)
        if not any(name == pattern or re.fullmatch(pattern, name) for name in values):
            raise TrainingError(f"init={{{pattern!r}: ...}} matches none of {', '.join(values)}")
    result: dict[str, str | float] = {}
    for name in values:
        start = meanings[name].start if isinstance(init, str) else None
        for pattern, kind in chosen.items():
            if name == pattern or re.fullmatch(pattern, name):
                result[name] = kind if start is None else start
                break
    return result


def draw(
    writer: Writer, kind: str | float, name: str, value: np.ndarray, place: Matrix | None
) -> str:
    """Append the nodes that initialize a tensor; return the name of their output.

    glorot: uniform within sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010); he: normal with
    standard deviation sqrt(2 / fan_in) (He et al., 2015); normal: standard deviation 0.01.

    Args:
      writer: receives the nodes.
      kind: one of `KINDS`, or a number.
      name: of the tensor.
      value: an array with its shape and dtype.
      place: which of its axes are inputs and outputs, if that is known.
    """
    number = _NUMBERS.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(number, str):
        return fill(writer, name, np.full_like(value, number))
    fan_in, fan_out = _fans(value.shape, place)
    if kind == "glorot":
        limit = math.sqrt(6 / max(fan_in + fan_out, 1))
        operator, settings = "RandomUniform", {"low": -limit, "high": limit}
    else:
        scale = math.sqrt(2 / max(fan_in, 1)) if kind == "he" else 0.01
        operator, settings = "RandomNormal", {"scale": scale}
    shape, dtype = list(value.shape), onnx_type(value.dtype)
    result = writer.node(operator, name=f"{name}.start", shape=shape, dtype=dtype, **settings)
    writer.output(result, value)
    return result


def fill(writer: Writer, name: str, value: np.ndarray) -> str:
    """Append nodes for a tensor whose elements all equal the first one of `value`.

    Returns:
      The name of their output.
    """
    number = helper.make_tensor("value", onnx_type(value.dtype), [1], value.reshape(-1)[:1])
    shape = writer.constant("shape", value.shape, np.int64)
    result = writer.node("ConstantOfShape", shape, name=f"{name}.start", value=number)
    writer.output(result, value)
    return result


def _fans(shape: tuple[int, ...], place: Matrix | None) -> tuple[int, int]:
    """Return fan_in and fan_out of a weight.

    If its axes are not known, the last two are inputs and outputs, as in `jax.nn.initializers`.
    """
    rank = len(shape)
    if rank < 2:
        return 1, 1
    return (place or Matrix(rank - 1, rank - 2, kernel=tuple(range(rank - 2)))).fans(shape)
