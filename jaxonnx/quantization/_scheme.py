"""`Quantization`: the dtypes of weights and activations, and their scales and zero points.

Scales of weights are found by their values, ranges of activations by calibration data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from jaxonnx._graph.select import Select
from jaxonnx._require import check_arguments, is_one_of, require
from jaxonnx.errors import InputError
from jaxonnx.ops.contrib.moving_ranges import limits_of, range_parameters


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


_BINS = 2048
"""Bins of the histogram of an activation."""
_SHARES = np.linspace(0.2, 1, 81)
"""The fractions of a range that are tried for the least error."""
_KEPT = 0.9999
"""The fraction of the elements within the range of "percentile"."""

_HIDDEN = -1e30
"""An activation that reaches down to this is an attention mask, which is added to scores."""


@dataclass(frozen=True)
class WeightSite:
    """A weight that a scheme quantizes."""

    name: str
    output: int
    """The axis of the output channels."""
    input: int
    """The axis of the input channels."""
    in_blocks: bool
    """Whether a scheme's blocks apply: only to factors of MatMul and Gemm."""
    stacked: bool = False
    """Whether it is a stack of matrices, one for each expert or head, of rank 3 or more."""
    turned: bool = False
    """Whether a MatMul reads it along another axis, as the decoder of tied weights does."""


class Parameters(NamedTuple):
    """The inputs and attributes of QuantizeLinear beside the tensor itself."""

    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None = None
    block: int = 0


def find_block(site: WeightSite, scheme: Quantization) -> int:
    """Return the number of inputs of a weight that share a scale; 0 for all of them."""
    return scheme.block if scheme.block and site.in_blocks else 0


def divides(w: Any, site: WeightSite, scheme: Quantization) -> bool:
    """Check whether the blocks of a scheme, if it has some for this weight, divide its inputs."""
    block = find_block(site, scheme)
    return not block or w.shape[site.input] % block == 0


def scales_channels(site: WeightSite, scheme: Quantization) -> bool:
    """Check whether a weight without blocks gets a scale for each output channel."""
    kind = TYPES[scheme.weights]
    if not scheme.per_channel or (scheme.dialect == "qnn" and site.in_blocks):
        return False
    # with integers, onnxruntime (1.32) takes one zero point for a stack of matrices, or none
    if site.stacked and scheme.computes_integers and kind.middle:
        return False
    # nor a scale for each input, as the output channels are for a product with the transpose
    return not (site.turned and scheme.activations is not None and kind.bits == 8)


def weight_parameters(
    w: np.ndarray,
    site: WeightSite,
    scheme: Quantization,
    importance: np.ndarray | None = None,
    shares: Iterable[float] = _SHARES[::-1],
) -> Parameters:
    """Find the scales of a weight with the least squared error after rounding.

    Args:
      w: the weight, float32.
      site: its output and input axes.
      scheme: its type, and whether there is a scale for the tensor, for each output channel or for
        each block of inputs.
      importance: the factors of the errors of each input, [inputs]; None: 1.
      shares: the fractions of the full range that are tried, with `scheme.scale_signs`. At equal
        errors the first is kept.

    Raises:
      InputError: blocks do not divide the inputs, or the weight is not finite.
    """
    kind = TYPES[scheme.weights]
    axes = [site.output] if scales_channels(site, scheme) else []
    block = find_block(site, scheme)
    weight = np.ones((), np.float32)
    if importance is not None:
        weight = importance.reshape(-1, *(1,) * (w.ndim - 1 - site.input))
    if block:
        n, axis = w.shape[site.input], site.input
        if not divides(w, site, scheme):
            raise InputError(
                f"'{site.name}' has {n} inputs, which blocks of {block} do not divide; choose "
                "another block=, leave it out with skip=, or pass max_loss="
            )
        parts = (*w.shape[:axis], n // block, block, *w.shape[axis + 1 :])
        w, summed = w.reshape(parts), (axis + 1,)
        if importance is not None:
            weight = weight.reshape(n // block, block, *weight.shape[1:])
    else:
        summed = tuple(a for a in range(w.ndim) if a not in axes)
    greatest = np.abs(w).max(axis=summed, keepdims=True, initial=0)
    if not np.isfinite(greatest).all():
        raise InputError(f"the weight '{site.name}' has values that are not finite")
    greatest = np.where(greatest > 0, greatest, np.float32(1))
    limits = scheme.weight_limits
    most = np.float32(limits[1])
    best, least = greatest / most, np.full(greatest.shape, np.inf, np.float32)
    shares = [1] if scheme.reduce_range else [*shares]
    for share in (sign * x for x in shares for sign in scheme.scale_signs):
        scale = (share * greatest / most).astype(np.float32)
        rounded = np.clip(kind.round(w / scale + kind.middle) - kind.middle, *limits) * scale
        error = (np.square(rounded - w) * weight).sum(axis=summed, keepdims=True)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    scale = best.squeeze(summed).astype(np.float32)
    axis = site.input if block else site.output if axes else None
    return Parameters(scale, np.full(scale.shape, kind.middle, kind.dtype), axis, block)


def spread_scale(parameters: Parameters, w: np.ndarray) -> np.ndarray:
    """Reshape or repeat the scales of a weight so that they broadcast against it."""
    scale, _, axis, block = parameters
    if axis is None:
        return scale
    if block:
        return np.repeat(scale, block, axis)
    return scale.reshape(-1, *(1,) * (w.ndim - 1 - axis))


def fit_bias(parameters: Parameters, bias: Any, step: float) -> Parameters:
    """Raise the scales of a weight so that its bias fits into int32, in units of `step` * scale.

    A channel of weights near zero would lose its bias otherwise. Training has room for its double.

    Args:
      parameters: of the weight, with one scale or one for each output (of a group).
      bias: a number for each output.
      step: the scale of the activation that the weight is multiplied by.
    """
    scale = parameters.scale
    greatest = np.abs(np.asarray(bias)).reshape(-1, scale.size).max(0).reshape(scale.shape)
    return parameters._replace(scale=np.maximum(scale, np.float32(greatest / (step * 2.0**30))))


class ActivationStatistics(NamedTuple):
    """Activations on calibration data."""

    limits: dict[str, np.ndarray]
    """The minimum and maximum of each batch, [batches, 2], by the name of the activation."""
    samples: dict[str, np.ndarray]
    """Some of the elements."""
    sizes: dict[str, int]
    """The number of elements of a batch."""
    outputs: list[dict[str, Any]]
    """Samples of the network's float outputs, of the first batches."""


class Calibration(NamedTuple):
    """Ranges of activations, and the widest ones, which calibrated ones are compared with."""

    ranges: dict[str, Parameters]
    """By the name of the activation."""
    widest: dict[str, Parameters]
    """The ranges from the minimum to the maximum of all data."""


def find_ranges(
    observed: ActivationStatistics,
    shared: Mapping[str, str],
    scheme: Quantization,
    types: Mapping[str, str | None],
) -> Calibration:
    """Choose the ranges of activations.

    Attention masks are left out: they hold numbers near the lowest of float32, and rounding them
    together with zeros would destroy the scores that they are added to. So are activations that are
    0 in all of the data, like the mask of texts without padding, whose range is not known.

    Args:
      observed: the activations, but for those of `shared`.
      shared: for an activation that has the range of another one, the other.
      scheme: the type of activations and the method of calibration.
      types: other types of some activations. Those with None are left out.

    Raises:
      InputError: an activation is not finite.
    """
    result, widest = {}, {}
    for name, limits in observed.limits.items():
        kind = types.get(name, scheme.activations)
        low, high = limits[:, 0].min(), limits[:, 1].max()
        if kind is None or not limits.any() or (low <= _HIDDEN and high < -_HIDDEN):
            continue
        if not np.isfinite([low, high]).all():
            raise InputError(
                f"'{name}' is not finite for some example of the calibration data, so that it has "
                "no range"
            )
        settings = replace(scheme, activations=kind) if kind != scheme.activations else scheme
        widest[name] = _parameters(*_with_zero(low, high), settings)
        if scheme.calibration == "average":
            low, high = limits.mean(0)
        result[name] = _parameters(*_range(low, high, observed.samples[name], settings), settings)
    origins = {name: find_origin(name, shared) for name in (*observed.limits, *shared)}
    ranges = {name: result[origin] for name, origin in origins.items() if origin in result}
    return Calibration(ranges, widest)


def clipped_share(sample: np.ndarray, parameters: Parameters) -> float:
    """Return the fraction of the numbers that a range clips: those beyond half a step of it."""
    scale, zero_point, *_ = parameters
    least, _, most = limits_of(zero_point.dtype)
    low, high = (float(scale) * (x - float(zero_point)) for x in (least - 0.5, most + 0.5))
    return float(np.mean((sample < low) | (sample > high)))


def find_origin(name: str, shared: Mapping[str, str]) -> str:
    """Return the activation whose range `name` has, through a chain of shared ranges."""
    while name in shared:
        name = shared[name]
    return name


def _range(
    low: float, high: float, sample: np.ndarray, scheme: Quantization
) -> tuple[float, float]:
    """Choose the range of an activation by the scheme's method; numbers beyond it saturate.

    Args:
      low, high: the least and the greatest number of the calibration data.
      sample: a sample of the numbers.
      scheme: the method (`calibration`) and the type.

    Returns:
      The ends of a range that contains 0.
    """
    low, high = _with_zero(low, high)
    if scheme.calibration in ("minmax", "average") or low == high:
        return low, high
    counts, edges = np.histogram(sample, _BINS, (low, high))
    if scheme.calibration == "percentile":
        # the same small share of elements is left out at both ends
        total, tail = np.cumsum(counts) / counts.sum(), (1 - _KEPT) / 2
        first = int(np.searchsorted(total, tail))
        last = min(int(np.searchsorted(total, 1 - tail)) + 1, _BINS)
        return min(float(edges[first]), 0.0), max(float(edges[last]), 0.0)
    centers = (edges[1:] + edges[:-1]) / 2
    kind = TYPES[scheme.activations or "uint8"]
    errors = []
    for share in _SHARES[::-1]:
        scale, zero_point, *_ = _parameters(share * low, share * high, scheme)
        shift = float(zero_point)
        levels = kind.round(centers / scale + shift)
        errors.append((counts * np.square((levels - shift) * scale - centers)).sum())
    share = float(_SHARES[::-1][int(np.argmin(errors))])
    return share * low, share * high


def _with_zero(low: float, high: float) -> tuple[float, float]:
    """Widen a range so that it contains 0."""
    return min(float(low), 0.0), max(float(high), 0.0)


def _parameters(low: float, high: float, scheme: Quantization) -> Parameters:
    """Return the scale and zero point of a range, chosen so that 0 is an exact level."""
    kind = TYPES[scheme.activations or "uint8"].dtype
    scale, point = range_parameters(
        np.asarray(low, np.float64), np.asarray(high, np.float64), kind, scheme.is_symmetric
    )
    return Parameters(scale.astype(np.float32), point)
