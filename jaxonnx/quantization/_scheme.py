"""`Quantization`: which types weights and activations get, and how their ranges are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from jaxonnx._graph.select import Select
from jaxonnx.errors import InputError


class IntegerType(NamedTuple):
    """A type that QuantizeLinear rounds to."""

    dtype: np.dtype
    opset: int
    """The first version of ONNX that has it, with a scale for each channel."""

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the greatest number."""
        info = ml_dtypes.iinfo(self.dtype)
        return int(info.min), int(info.max)


TYPES = {
    "int8": IntegerType(np.dtype(np.int8), 13),
    "uint8": IntegerType(np.dtype(np.uint8), 13),
    "int16": IntegerType(np.dtype(np.int16), 21),
    "uint16": IntegerType(np.dtype(np.uint16), 21),
    "int4": IntegerType(np.dtype(ml_dtypes.int4), 21),
}

_WEIGHTS = ("int8", "int4")
_ACTIVATIONS = ("uint8", "int8", "uint16", "int16", None)
_CALIBRATIONS = ("minmax", "percentile", "mse")
_BLOCKS_SINCE = 21


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A scheme for `jaxonnx.quantize` and `jaxonnx.train(..., quantize=)`.

    >>> import jaxonnx
    >>> jaxonnx.Quantization.of("int4").weights
    'int4'

    Attributes:
      weights: the type of weights, "int8" or "int4"; their zero point is 0.
      activations: the type of the inputs of quantized operators: "uint8", "int8", "uint16",
        "int16", or None to leave them as they are (quantized weights only).
      per_channel: one scale for each output channel of a weight, not one for all of it.
      block: one scale for so many inputs of each output channel of a MatMul or Gemm, whose number
        of inputs must be a multiple of it; other weights have a scale for each channel.
      symmetric: activations have the zero point of the middle of their type. None: as `dialect`
        has it, which for "onnxruntime" is only so for signed types.
      calibration: how the range of an activation is found. "minmax": the least and greatest number
        of the calibration data. "percentile": 99.99 % of the numbers. "mse": the range whose
        rounding has the least mean squared error.
      where: names, modules, nodes or a predicate, as in `Model.with_trainable`, that choose among
        the weights of Conv, ConvTranspose, Gemm, MatMul, RNN, GRU and LSTM. None: all of them.
      skip: weights to leave as they are, chosen in the same way.
      dialect: "onnxruntime" also quantizes what pools, sums, products and concatenations read, and
        the biases of convolutions and Gemm when the model is saved (int32), so that they are
        computed with integers. "tensorrt" does neither, and its activations are symmetric int8.
      learn: "scales" trains the scales with the weights, by the gradient of "Learned Step Size
        Quantization" (arXiv:1902.08153); None keeps those of the calibration.

    Raises:
      InputError: a value that a scheme cannot have, with what it can.
    """

    weights: Literal["int8", "int4"] = "int8"
    activations: Literal["uint8", "int8", "uint16", "int16"] | None = "uint8"
    per_channel: bool = True
    block: int | None = None
    symmetric: bool | None = None
    calibration: Literal["minmax", "percentile", "mse"] = "mse"
    where: Select | None = None
    skip: Select | None = None
    dialect: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    learn: Literal["scales"] | None = "scales"

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[Any, ...]] = {
            "weights": _WEIGHTS,
            "activations": _ACTIVATIONS,
            "calibration": _CALIBRATIONS,
            "dialect": ("onnxruntime", "tensorrt"),
            "learn": ("scales", None),
            "per_channel": (True, False),
            "symmetric": (True, False, None),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                listed = ", ".join(map(repr, values))
                raise InputError(f"{name} is one of {listed}, and was {getattr(self, name)!r}")
        if self.block is not None and (type(self.block) is not int or self.block < 2):
            raise InputError(f"block is a number of inputs, at least 2, and was {self.block!r}")
        if self.dialect == "tensorrt" and self.activations not in ("int8", None):
            raise InputError(
                f"TensorRT takes activations of int8, not of {self.activations}: pass "
                "activations='int8'"
            )

    @classmethod
    def of(cls, scheme: str | Quantization) -> Quantization:
        """Return a scheme by its name: "int8", or "int4" (of the weights; activations are uint8).

        Raises:
          InputError: there is no scheme of this name.
        """
        if isinstance(scheme, Quantization):
            return scheme
        if scheme not in _WEIGHTS:
            raise InputError(
                f"a scheme is 'int8', 'int4' or a jaxonnx.Quantization, and was {scheme!r}"
            )
        return cls(weights=scheme)  # type: ignore[arg-type]

    @property
    def as_json(self) -> dict[str, Any]:
        """The fields as JSON has them; of a predicate only that there is one."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("where", "skip"):
            value = fields[name]
            if callable(value):
                fields[name] = "a predicate"
            elif value is not None and not isinstance(value, str):
                fields[name] = [getattr(one, "pattern", one) for one in value]
        return fields

    @property
    def opset(self) -> int:
        """The first version of ONNX that has what the scheme needs."""
        types = [TYPES[name].opset for name in (self.weights, self.activations) if name]
        return max(*types, _BLOCKS_SINCE if self.block else 0)

    @property
    def is_symmetric(self) -> bool:
        """Whether activations have the zero point of the middle of their type."""
        if self.symmetric is not None:
            return self.symmetric
        return self.dialect == "tensorrt" or self.activations in ("int8", "int16")
