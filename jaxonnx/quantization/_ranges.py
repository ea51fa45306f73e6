"""Scales and zero points: of weights by their values, of activations by calibration data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError
from jaxonnx.ops.contrib.moving_ranges import limits_of, range_parameters
from jaxonnx.quantization._padding import find_token_axes
from jaxonnx.quantization._scheme import TYPES, Quantization
from jaxonnx.quantization._sites import WeightSite

_BINS = 2048
"""Bins of the histogram of an activation."""
_SAMPLE = 2**16
"""The most elements of an activation that each batch contributes to its histogram, and of an output
that are compared."""
COMPARED = 2
"""The first batches, on which calibrated ranges are compared with the widest ones."""
_SHARES = np.linspace(0.2, 1, 81)
"""The fractions of a range that are tried for the least error."""
_KEPT = 0.9999
"""The fraction of the elements within the range of "percentile"."""

_HIDDEN = -1e30
"""An activation that reaches down to this is an attention mask, which is added to scores."""


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
      importance: what the errors of each input are multiplied by, [inputs]; None: 1.
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


class Observed(NamedTuple):
    """Activations on calibration data."""

    limits: dict[str, np.ndarray]
    """The minimum and maximum of each batch, [batches, 2], by the name of the activation."""
    samples: dict[str, np.ndarray]
    """Some of the elements."""
    sizes: dict[str, int]
    """The number of elements of a batch."""
    outputs: list[dict[str, Any]]
    """Samples of the network's float outputs, of the first `COMPARED` batches."""


class Calibration(NamedTuple):
    """Ranges of activations, and the widest ones, which calibrated ones are compared with."""

    ranges: dict[str, Parameters]
    """By the name of the activation."""
    widest: dict[str, Parameters]
    """The ranges from the minimum to the maximum of all data."""


def observe(model: Network, values: Iterable[str], batches: Sequence[Sequence[Any]]) -> Observed:
    """Evaluate a network on calibration data and record its activations.

    Args:
      model: the network before quantization.
      values: the names of the activations.
      batches: inputs, in the order of the model's. Padding does not count.
    """
    # the program returns the measured values behind the outputs of the graph
    measured = [*values]
    program, first = model.program.with_values(measured), len(model.graph.outputs)
    names = [value.name for value in model.inputs]
    tokens = find_token_axes(model, measured, batches)

    @jax.jit
    def read(params, state, inputs):
        feeds = dict(zip(names, inputs, strict=True))
        outputs = program.evaluate(params, state, feeds)
        floats = [x.astype(jnp.float32) for x in outputs[first:]]
        masks = [
            tokens[n].find_tokens(feeds, x.ndim) if n in tokens else True
            for n, x in zip(measured, floats, strict=True)
        ]
        pairs = [*zip(floats, masks, strict=True)]
        least = [jnp.where(k, x, jnp.inf).min() for x, k in pairs]
        greatest = [jnp.where(k, x, -jnp.inf).max() for x, k in pairs]
        limits = [*map(jnp.stack, zip(least, greatest, strict=True))]
        samples = [take_sample(jnp.where(k, x, jnp.nan)) for x, k in pairs]
        return (limits, samples, [x.size for x in floats]), sample_outputs(model, outputs[:first])

    parts, outputs = [], []
    for inputs in batches:
        part, results = read(model.params, model.state, tuple(inputs))
        parts.append(jax.device_get(part))
        outputs += [results] * (len(outputs) < COMPARED)
    limits, samples, sizes = (
        {name: [part[k][i] for part in parts] for i, name in enumerate(measured)} for k in range(3)
    )
    return Observed(
        {name: np.stack(x) for name, x in limits.items()},
        {name: np.concatenate([x[~np.isnan(x)] for x in xs]) for name, xs in samples.items()},
        {name: int(x[0]) for name, x in sizes.items()},
        outputs,
    )


def find_ranges(
    observed: Observed,
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


def sample_outputs(model: Network, outputs: Sequence[Any]) -> dict[str, jax.Array]:
    """Return samples of the float outputs of a network, by name; those of a sequence as one."""
    parts = {
        name: [x for x in jax.tree.leaves(y) if jnp.issubdtype(x.dtype, jnp.floating)]
        for name, y in zip(model.graph.outputs, outputs, strict=True)
    }
    return {n: jnp.concatenate([*map(take_sample, x)]) for n, x in parts.items() if x}


def clipped_share(sample: np.ndarray, parameters: Parameters) -> float:
    """Return the fraction of the numbers that a range clips: those beyond half a step of it."""
    scale, zero_point, *_ = parameters
    least, _, most = limits_of(zero_point.dtype)
    low, high = (float(scale) * (x - float(zero_point)) for x in (least - 0.5, most + 0.5))
    return float(np.mean((sample < low) | (sample > high)))


def take_sample(x: jax.Array) -> jax.Array:
    """Return every k-th element, so that at most `_SAMPLE` leave the device."""
    return x.reshape(-1)[:: max(-(-x.size // _SAMPLE), 1)]


def find_origin(name: str, shared: Mapping[str, str]) -> str:
    """Return the activation whose range `name` has, through a chain of shared ranges."""
    while name in shared:
        name = shared[name]
    return name


def _range(low: float, high: float, seen: np.ndarray, scheme: Quantization) -> tuple[float, float]:
    """Choose the range of an activation by the scheme's method; numbers beyond it saturate.

    Args:
      low, high: the least and the greatest number of the calibration data.
      seen: a sample of the numbers.
      scheme: the method (`calibration`) and the type.

    Returns:
      The ends of a range that contains 0.
    """
    low, high = _with_zero(low, high)
    if scheme.calibration in ("minmax", "average") or low == high:
        return low, high
    counts, edges = np.histogram(seen, _BINS, (low, high))
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
    limits = np.asarray(low, np.float64), np.asarray(high, np.float64)
    scale, point = range_parameters(*limits, kind, scheme.is_symmetric)
    return Parameters(scale.astype(np.float32), point)
