"""`Quantization`: the dtypes of quantized weights and activations, and how ranges are found."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from jaxonnx._graph.select import Select
from jaxonnx._require import check_arguments, is_one_of, require
from jaxonnx.errors import InputError
from jaxonnx.ops.contrib.moving_ranges import limits_of
from jaxonnx.quantization._moving_ranges import Schedule


class NumberType(NamedTuple):
    """A type that QuantizeLinear rounds to."""

    dtype: np.dtype
    opset: int
    """The first opset whose QuantizeLinear has the type, and a scale for each channel."""

    @property
    def bits(self) -> int:
        """The bits of a number."""
        return (ml_dtypes.iinfo if self.is_integer else ml_dtypes.finfo)(self.dtype).bits

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

_WEIGHTS = ("int8", "uint8", "fp8", "int16", "int4", "uint4", "int2")
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
    """The settings of `jaxonnx.quantize` and `jaxonnx.train(..., quantize=)`.

    >>> import jaxonnx
    >>> jaxonnx.Quantization.of("int4").weights
    'int4'

    Attributes:
      weights: the dtype of weights: "int8", "uint8", "fp8" (E4M3), "int16", "int4", "uint4" or
        "int2". The zero point is the middle of the type, which is 0 for signed types.
      activations: the dtype of the inputs of quantized operators: "uint8", "int8", "uint16",
        "int16" or "fp8". None quantizes weights only.
      per_channel: one scale per output channel of a weight, instead of one per weight. Stacks of
        matrices (a MatMul with a weight of three or more axes) share the scales of their columns;
        in unsigned types they have one per weight, as onnxruntime demands next to activations that
        are quantized. So do weights of 8 bits that a MatMul and another product read along
        different axes (tied weights of an autoencoder).
      block: one scale per block of this many inputs, for each output channel of a MatMul or Gemm.
        The number of inputs must be a multiple of it. Other weights have one scale per channel.
      symmetric: activations use the middle of their type as zero point. The default depends on
        `dialect`; for "onnxruntime" it is True for signed types only.
      calibration: how the range of an activation is found. "minmax": the minimum and maximum over
        the calibration data. "average": the mean over batches of the minimum and maximum.
        "percentile": 99.99 % of the values. "mse": the range with the smallest mean squared
        rounding error.
      where: the weights to quantize: names, modules, nodes or a predicate, as in
        `Model.with_trainable`. They are chosen among the weights of Conv, ConvTranspose, Gemm,
        MatMul, RNN, GRU and LSTM. None: all of them, but for adapters that the file has as nodes.
      skip: the weights not to quantize. They are chosen in the same way.
      dialect: the runtime that the file is for. "onnxruntime" also quantizes what other operators
        read of a Conv, the inputs of pooling, Add, Mul and Concat between quantized layers, and the
        biases of convolutions and Gemm when the model is saved (int32), so that it computes with
        integers from one layer to the next. "tensorrt" does neither; its activations are
        symmetric int8 or fp8. "qnn" (Qualcomm) quantizes the inputs of all floating-point operators
        and the outputs of the graph to uint8 or uint16, and has per-channel scales for convolutions
        only.
      reduce_range: use 7 of the 8 bits of weights. Sums of two products then fit into 16 bits,
        which onnxruntime needs on x86 processors with AVX2 or AVX512 but without VNNI. For
        `jaxonnx.quantize` only: training would exceed the range.
      max_loss: what may be lost. All tensors start in the types of the scheme, and those with the
        largest errors (`jaxonnx.sensitivity`) get 8 or 16 bits or float32 until no more is lost.
        `jaxonnx.quantize` says by which metric, as its own argument `max_loss` does.
        `jaxonnx.train` takes its loss on the validation data (without any, on the training data),
        before the first step.
      learn: what is trained besides the weights. "scales" trains all scales with the gradient of
        "Learned Step Size Quantization" (arXiv:1902.08153). "ranges" trains the scales of weights,
        while the ranges of activations follow the minimum and maximum of each batch. None keeps the
        calibrated scales.
      decay: the decay of the moving average of ranges, with learn="ranges".
      freeze: the fraction of the steps of the run after which ranges stay fixed, with
        learn="ranges".
      start: the number of epochs, possibly fractional, that are trained in floating point before
        rounding begins. Ranges follow the data from the first step on. Validation always uses the
        quantized network.

    Raises:
      InputError: a value, or a combination of values, is not supported; the message lists those
        that are.
    """

    weights: Literal["int8", "uint8", "fp8", "int16", "int4", "uint4", "int2"] = "int8"
    activations: Literal["uint8", "int8", "uint16", "int16", "fp8"] | None = "uint8"
    per_channel: bool = True
    block: int | None = None
    symmetric: bool | None = None
    calibration: Literal["minmax", "average", "percentile", "mse"] = "mse"
    where: Select | None = None
    skip: Select | None = None
    dialect: Literal["onnxruntime", "tensorrt", "qnn"] = "onnxruntime"
    reduce_range: bool = False
    max_loss: float | None = None
    learn: Literal["scales", "ranges"] | None = "scales"
    decay: float = 0.9
    freeze: float = 0.5
    start: float = 0

    def __post_init__(self) -> None:
        if "fp4" in map(str, (self.weights, self.activations)):
            raise InputError(
                "onnxruntime (1.32) has no DequantizeLinear of fp4, and TensorRT was not tried: "
                "pass weights='int4', with block= where fp4 would have blocks"
            )
        check_arguments(Quantization, vars(self))
        fits = self.block is None or (type(self.block) is int and self.block >= 2)
        require("block", self.block, fits, "a number of inputs, at least 2")
        if self.activations not in (choices := _DIALECTS[self.dialect]):
            types = " or ".join(kind for kind in choices if kind)
            raise InputError(
                f"{_NAMES[self.dialect]} takes activations of {types}, not of {self.activations}: "
                f"pass activations={choices[0]!r}"
            )
        if self.weights == "int2" and self.activations is not None:
            raise InputError("int2 weights need floating-point activations: pass activations=None")
        if self.reduce_range and self.weights not in ("int8", "uint8"):
            raise InputError(
                f"reduce_range needs weights of 8 bits, not {self.weights}: leave it out"
            )
        if self.max_loss is not None:
            fits = 0 <= self.max_loss < math.inf
            require("max_loss", self.max_loss, fits, "a finite number of at least 0")
            if self.reduce_range or "fp8" in (self.weights, self.activations):
                raise InputError(
                    "max_loss chooses among integer types: leave reduce_range and fp8 out"
                )
        if self.symmetric is False and self.activations == "fp8":
            raise InputError("fp8 has no zero point: leave symmetric=False out")
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.learn == "ranges" and self.activations is None:
            raise InputError("learn='ranges' needs activations=, which is None")
        require("decay", self.decay, 0 <= self.decay < 1, "a share of a range, from 0 to below 1")
        require("freeze", self.freeze, 0 < self.freeze <= 1, "a share of the run, above 0, up to 1")
        require("start", self.start, 0 <= self.start < math.inf, "a number of epochs, at least 0")
        if self.learn != "ranges" and (self.decay, self.freeze) != (0.9, 0.5):
            raise InputError("decay and freeze need learn='ranges'")

    @classmethod
    def of(cls, scheme: str | Quantization) -> Quantization:
        """Return the default scheme for a dtype of weights; a `Quantization` is returned as it is.

        Activations are uint8. For "int2" they are not quantized.

        Raises:
          InputError: there is no scheme of this name.
        """
        if isinstance(scheme, Quantization):
            return scheme
        expected = f"{', '.join(map(repr, _WEIGHTS))} or a jaxonnx.Quantization"
        require("quantize", scheme, is_one_of(scheme, _WEIGHTS), expected)
        activations = None if scheme == "int2" else "uint8"
        return cls(weights=scheme, activations=activations)  # type: ignore[arg-type]

    @property
    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values. A predicate becomes the text "a predicate"."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("where", "skip"):
            value = fields[name]
            if callable(value):
                fields[name] = "a predicate"
            elif value is not None and not isinstance(value, str):
                fields[name] = [getattr(x, "pattern", x) for x in value]
        return fields

    @property
    def opset(self) -> int:
        """The first ONNX opset that has the types and blocks of this scheme."""
        types = [TYPES[name].opset for name in (self.weights, self.activations) if name]
        wider = self.max_loss is not None and self.dialect != "tensorrt"  # types of 16 bits
        return max(*types, _BLOCKS_SINCE if self.block or wider else 0)

    @property
    def is_symmetric(self) -> bool:
        """Whether the zero point of activations is the middle of their type."""
        if self.symmetric is not None:
            return self.symmetric
        return self.dialect == "tensorrt" or self.activations in ("int8", "int16", "fp8")

    @property
    def computes_integers(self) -> bool:
        """Whether onnxruntime computes products of integers by this scheme."""
        return self.dialect == "onnxruntime" and self.activations is not None

    @property
    def scale_signs(self) -> tuple[int, ...]:
        """The signs that scales of weights may have.

        Few bits have one more number below zero than above: of four, two. A negative scale gives it
        to the side that needs it, as in onnxruntime's MatMulNBits. Products of integers, whose
        biases have the scale of the product, and other runtimes get positive ones.
        """
        few = TYPES[self.weights].bits <= 4 and self.activations is None
        return (1, -1) if few and self.dialect == "onnxruntime" else (1,)

    @property
    def weight_limits(self) -> tuple[int, int]:
        """The smallest and largest quantized weight, minus the zero point."""
        kind = TYPES[self.weights]
        least, most = (limit - kind.middle for limit in kind.limits)
        return (least // 2, most // 2) if self.reduce_range else (least, most)


def with_weights(scheme: Quantization, kind: str, **changes: Any) -> Quantization:
    """Return a scheme with one type of weights, in place of a choice (`max_loss`).

    A wider type that takes no blocks (`block`) has one scale for each output channel.
    """
    free: dict[str, Any] = {"max_loss": None}
    if kind in ("int8", "uint8") and kind != scheme.weights and scheme.computes_integers:
        free["block"] = None
    return replace(scheme, weights=kind, **free, **changes)  # type: ignore[arg-type]


def make_schedule(
    scheme: Quantization, epochs: int | None, steps_per_epoch: int | None
) -> Schedule | None:
    """Return when ranges follow the data and when rounding begins; None if both are constant.

    Raises:
      InputError: the number of steps is needed and not known, or rounding would never begin.
    """
    moves = scheme.learn == "ranges"
    if not (moves or scheme.start):
        return None
    if scheme.start and epochs is not None and scheme.start >= epochs:
        raise InputError(
            f"start={scheme.start}: the run has {epochs} epochs, so that rounding would never begin"
        )
    freezes = moves and scheme.freeze < 1
    if (freezes and epochs is None) or ((freezes or scheme.start) and steps_per_epoch is None):
        raise InputError(
            "freeze and start need the number of steps of the run: pass arrays, or an "
            "iterable with a length (to step: epochs= and steps_per_epoch=), or freeze=1 and "
            "start=0"
        )
    epoch = steps_per_epoch or 1
    end = round(scheme.freeze * epoch * (epochs or 1)) if freezes else None
    decay = scheme.decay if moves else None
    return Schedule(decay, end, round(scheme.start * epoch), scheme.is_symmetric)
