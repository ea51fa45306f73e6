"""`Quantization`: which types weights and activations get, and how their ranges are found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from jaxonnx._graph.select import Select
from jaxonnx._rewrite.moving_ranges import Schedule
from jaxonnx.errors import InputError
from jaxonnx.ops.contrib.moving_ranges import limits_of


class NumberType(NamedTuple):
    """A type that QuantizeLinear rounds to."""

    dtype: np.dtype
    opset: int
    """The first opset whose QuantizeLinear has the type, and a scale for each channel."""

    @property
    def is_integer(self) -> bool:
        """Whether it is an integer type; the others are 8-bit floating point."""
        return "float" not in self.dtype.name

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the greatest number."""
        least, _, most = limits_of(self.dtype)
        return least, most

    @property
    def middle(self) -> int:
        """The zero point of symmetric ranges."""
        return limits_of(self.dtype)[1]

    def round(self, x: np.ndarray) -> np.ndarray:
        """Round float32 numbers to those of the type: halves to even, with saturation."""
        least, most = self.limits
        if self.is_integer:
            return np.clip(np.rint(x), least, most)
        return np.clip(x, least, most).astype(self.dtype).astype(np.float32)


TYPES = {
    "int8": NumberType(np.dtype(np.int8), 13),
    "uint8": NumberType(np.dtype(np.uint8), 13),
    "fp8": NumberType(np.dtype(ml_dtypes.float8_e4m3fn), 19),
    "int16": NumberType(np.dtype(np.int16), 21),
    "uint16": NumberType(np.dtype(np.uint16), 21),
    "int4": NumberType(np.dtype(ml_dtypes.int4), 21),
    "uint4": NumberType(np.dtype(ml_dtypes.uint4), 21),
    "int2": NumberType(np.dtype(ml_dtypes.int2), 25),
}

_WEIGHTS = ("int8", "uint8", "fp8", "int4", "uint4", "int2")
_ACTIVATIONS = ("uint8", "int8", "uint16", "int16", "fp8", None)
_CALIBRATIONS = ("minmax", "average", "percentile", "mse", "entropy")
_DIALECTS: dict[str, tuple[str | None, ...]] = {
    "onnxruntime": ("uint8", "int8", "uint16", "int16", None),
    "tensorrt": ("int8", "fp8", None),
    "qnn": ("uint8", "uint16"),
}
"""The types of activations of each dialect. The optimizations of onnxruntime 1.32 compute networks
with activations of fp8 wrongly (67 % of the digits instead of 97 %, 2026-11-25)."""
_NAMES = {"onnxruntime": "onnxruntime", "tensorrt": "TensorRT", "qnn": "QNN"}
_BLOCKS_SINCE = 21
"""The first opset whose QuantizeLinear has a `block_size`."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A scheme for `jaxonnx.quantize` and `jaxonnx.train(..., quantize=)`.

    >>> import jaxonnx
    >>> jaxonnx.Quantization.of("int4").weights
    'int4'

    Attributes:
      weights: the type of weights: "int8", "uint8", "fp8" (E4M3), "int4", "uint4" or "int2"; their
        zero point is the middle of the type, 0 for signed ones.
      activations: the type of the inputs of quantized operators: "uint8", "int8", "uint16",
        "int16", "fp8", or None to leave them as they are (quantized weights only).
      per_channel: one scale for each output channel of a weight, not one for all of it.
      block: one scale for so many inputs of each output channel of a MatMul or Gemm, whose number
        of inputs must be a multiple of it; other weights have a scale for each channel.
      symmetric: activations have the zero point of the middle of their type. None: as `dialect`
        has it, which for "onnxruntime" is only so for signed types.
      calibration: how the range of an activation is found. "minmax": the least and greatest number
        of the calibration data. "average": the mean of those of the batches. "percentile": 99.99 %
        of the numbers. "mse": the range whose rounding has the least mean squared error.
        "entropy": the range whose rounded histogram diverges least from the whole one (Kullback and
        Leibler), as in TensorRT.
      where: the weights to round: names, modules, nodes or a predicate, as in
        `Model.with_trainable`, that choose among those of Conv, ConvTranspose, Gemm, MatMul, RNN,
        GRU and LSTM. None: all of them.
      skip: the weights to leave as they are. They are chosen in the same way.
      dialect: what the runtime takes. "onnxruntime" also quantizes what pools, sums, products and
        concatenations read, and the biases of convolutions and Gemm when the model is saved
        (int32), so that they are computed with integers. "tensorrt" does neither, and its
        activations are symmetric int8 or fp8. "qnn" (Qualcomm's processors) quantizes what all
        operators of floats read and what the graph gives, to uint8 or uint16, and has scales for
        channels at convolutions alone.
      reduce_range: weights of 8 bits take 7 of them. Sums of two products then fit into 16 bits in
        onnxruntime on x86 processors with AVX2 or AVX512 and without VNNI. For
        `jaxonnx.quantize` alone: training would leave the range again.
      bits: "auto" chooses int4, int8 or float32 for each weight. It goes by what a weight costs
        when it alone is rounded (`jaxonnx.sensitivity`), so that all together take `size`.
      size: the share of the bytes of the weights in float32 that they take with bits="auto"; above
        0.125.
      learn: "scales" trains the scales with the weights, by the gradient of "Learned Step Size
        Quantization" (arXiv:1902.08153). "ranges" trains those of weights; the ranges of
        activations follow the least and the greatest number of each batch. None keeps those of the
        calibration.
      decay: with learn="ranges", the share of a range that a step leaves as it was.
      freeze: with learn="ranges", the share of the run's steps after which ranges stay.
      start: the epochs that are trained in floating point before rounding begins, also a fraction;
        ranges follow the data from the first step on. Validation is always of the rounded network.

    Raises:
      InputError: a value that a scheme cannot have, with what it can.
    """

    weights: Literal["int8", "uint8", "fp8", "int4", "uint4", "int2"] = "int8"
    activations: Literal["uint8", "int8", "uint16", "int16", "fp8"] | None = "uint8"
    per_channel: bool = True
    block: int | None = None
    symmetric: bool | None = None
    calibration: Literal["minmax", "average", "percentile", "mse", "entropy"] = "mse"
    where: Select | None = None
    skip: Select | None = None
    dialect: Literal["onnxruntime", "tensorrt", "qnn"] = "onnxruntime"
    reduce_range: bool = False
    bits: Literal["auto"] | None = None
    size: float | None = None
    learn: Literal["scales", "ranges"] | None = "scales"
    decay: float = 0.9
    freeze: float = 0.5
    start: float = 0

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[Any, ...]] = {
            "weights": _WEIGHTS,
            "activations": _ACTIVATIONS,
            "calibration": _CALIBRATIONS,
            "dialect": (*_DIALECTS,),
            "learn": ("scales", "ranges", None),
            "per_channel": (True, False),
            "reduce_range": (True, False),
            "bits": ("auto", None),
            "symmetric": (True, False, None),
        }
        if "fp4" in (self.weights, self.activations):
            raise InputError(
                "onnxruntime (1.32) has no DequantizeLinear of fp4, and TensorRT was not tried: "
                "pass weights='int4', with block= where fp4 would have blocks"
            )
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                listed = ", ".join(map(repr, values))
                raise InputError(f"{name} is one of {listed}, and was {getattr(self, name)!r}")
        if self.block is not None and (type(self.block) is not int or self.block < 2):
            raise InputError(f"block is a number of inputs, at least 2, and was {self.block!r}")
        if self.activations not in (taken := _DIALECTS[self.dialect]):
            types = " or ".join(one for one in taken if one)
            raise InputError(
                f"{_NAMES[self.dialect]} takes activations of {types}, not of {self.activations}: "
                f"pass activations={taken[0]!r}"
            )
        if self.weights == "int2" and self.activations is not None:
            raise InputError(
                "weights of int2 are multiplied in floating point: pass activations=None"
            )
        if self.reduce_range and self.weights not in ("int8", "uint8"):
            raise InputError(
                f"reduce_range is for weights of 8 bits, and these are {self.weights}: leave it out"
            )
        share = 1 if self.size is None else self.size
        if (self.bits is None) != (self.size is None) or not 0.125 <= share <= 1:
            raise InputError(
                "bits='auto' and size=, a share of the weights' bytes from 0.125 to 1, go "
                f"together: bits={self.bits!r}, size={self.size!r}"
            )
        if self.bits and (self.weights != "int8" or self.block or self.reduce_range):
            raise InputError(
                "bits='auto' chooses the types: leave weights, block, reduce_range out"
            )
        if self.symmetric is False and self.activations == "fp8":
            raise InputError("fp8 has no zero point: leave symmetric=False out")
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.learn == "ranges" and self.activations is None:
            raise InputError("learn='ranges' is for activations, and activations=None has none")
        if not 0 <= self.decay < 1:
            raise InputError(
                f"decay is a share of a range, from 0 to below 1, and was {self.decay}"
            )
        if not 0 < self.freeze <= 1:
            raise InputError(f"freeze is a share of the run, above 0 to 1, and was {self.freeze}")
        if not 0 <= self.start < math.inf:
            raise InputError(f"start is a number of epochs, at least 0, and was {self.start}")
        if self.learn != "ranges" and (self.decay, self.freeze) != (0.9, 0.5):
            raise InputError("decay and freeze are those of moving ranges: pass learn='ranges'")

    @classmethod
    def of(cls, scheme: str | Quantization) -> Quantization:
        """Return a scheme by the type of its weights; activations are uint8, of "int2" as they are.

        Raises:
          InputError: there is no scheme of this name.
        """
        if isinstance(scheme, Quantization):
            return scheme
        if scheme not in _WEIGHTS:
            names = ", ".join(map(repr, _WEIGHTS))
            raise InputError(
                f"a scheme is one of {names}, or a jaxonnx.Quantization, and was {scheme!r}"
            )
        activations = None if scheme == "int2" else "uint8"
        return cls(weights=scheme, activations=activations)  # type: ignore[arg-type]

    @property
    def as_json(self) -> dict[str, Any]:
        """The fields as values of JSON; a predicate becomes the string "a predicate"."""
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
        """The first opset that has the types and blocks of the scheme."""
        weights = "int4" if self.bits else self.weights
        types = [TYPES[name].opset for name in (weights, self.activations) if name]
        return max(*types, _BLOCKS_SINCE if self.block else 0)

    @property
    def is_symmetric(self) -> bool:
        """Whether the zero point of activations is the middle of their type."""
        if self.symmetric is not None:
            return self.symmetric
        return self.dialect == "tensorrt" or self.activations in ("int8", "int16", "fp8")

    @property
    def weight_limits(self) -> tuple[int, int]:
        """The least and the greatest quantized weight, with the zero point subtracted."""
        kind = TYPES[self.weights]
        least, most = (limit - kind.middle for limit in kind.limits)
        return (least // 2, most // 2) if self.reduce_range else (least, most)


def make_schedule(
    scheme: Quantization, epochs: int | None, steps_per_epoch: int | None
) -> Schedule | None:
    """Return the steps at which ranges freeze and rounding begins; None if there are none.

    Args:
      scheme: its `learn`, `decay`, `freeze` and `start`.
      epochs, steps_per_epoch: of the run; None if they are not known.

    Raises:
      InputError: the number of steps matters and is not known, or rounding would not begin.
    """
    moves = scheme.learn == "ranges"
    if not (moves or scheme.start):
        return None
    if scheme.start and epochs is not None and scheme.start >= epochs:
        raise InputError(f"start={scheme.start}: the run has {epochs} epochs and would not round")
    freezes = moves and scheme.freeze < 1
    if (freezes and epochs is None) or ((freezes or scheme.start) and steps_per_epoch is None):
        raise InputError(
            "freeze and start are parts of a run whose steps are not known: pass arrays, or an "
            "iterable with a length (to step: epochs= and steps_per_epoch=), or freeze=1 and "
            "start=0"
        )
    epoch = steps_per_epoch or 1
    end = round(scheme.freeze * epoch * (epochs or 1)) if freezes else None
    decay = scheme.decay if moves else None
    return Schedule(decay, end, round(scheme.start * epoch), scheme.is_symmetric)
