"""Networks on calibration data: padding, statistics of activations, errors of calibrated ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.ragged import masks_and_positions
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import Error, warn
from jaxonnx.quantization._scheme import ActivationStatistics, Calibration, Quantization

_SAMPLE = 2**16
"""The most elements of an activation that each batch contributes to its histogram, and of an output
that are compared."""
_COMPARED = 2
"""The first batches, on which calibrated ranges are compared with the widest ones."""
_NOISE, _TRIED = 1.25, 32
"""The ratio of errors that is no noise, and the narrowest ranges that one of the worst is among."""
_MASK_ENDS = re.compile(r"(attention_|input_)?mask")
"""The names of masks, behind those of their side: "decoder_attention_mask"."""


def observe(
    model: Network, values: Iterable[str], batches: Sequence[Sequence[Any]]
) -> ActivationStatistics:
    """Evaluate a network on calibration data and record its activations.

    Args:
      model: the network before quantization.
      values: the names of the activations.
      batches: inputs, in the order of the model's. Padding does not count.
    """
    # 1. a program that returns the measured values behind the outputs of the graph
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

    # 2. ranges, samples and sizes of each batch, joined
    parts, outputs = [], []
    for inputs in batches:
        part, results = read(model.params, model.state, tuple(inputs))
        parts.append(jax.device_get(part))
        outputs += [results] * (len(outputs) < _COMPARED)
    limits, samples, sizes = (
        {name: [part[k][i] for part in parts] for i, name in enumerate(measured)} for k in range(3)
    )
    return ActivationStatistics(
        {name: np.stack(x) for name, x in limits.items()},
        {name: np.concatenate([x[~np.isnan(x)] for x in xs]) for name, xs in samples.items()},
        {name: int(x[0]) for name, x in sizes.items()},
        outputs,
    )


def sample_outputs(model: Network, outputs: Sequence[Any]) -> dict[str, jax.Array]:
    """Return samples of the float outputs of a network, by name; those of a sequence as one."""
    parts = {
        name: [x for x in jax.tree.leaves(y) if jnp.issubdtype(x.dtype, jnp.floating)]
        for name, y in zip(model.graph.outputs, outputs, strict=True)
    }
    return {n: jnp.concatenate([*map(take_sample, x)]) for n, x in parts.items() if x}


def take_sample(x: jax.Array) -> jax.Array:
    """Return every k-th element, so that at most `_SAMPLE` leave the device."""
    return x.reshape(-1)[:: max(-(-x.size // _SAMPLE), 1)]


def warn_if_worse(
    model: Network,
    calibration: Calibration,
    observed: ActivationStatistics,
    names: Mapping[str, Sequence[str]],
    examples: Sequence[Sequence[Any]],
    shares: Mapping[str, float],
    scheme: Quantization,
) -> None:
    """Warn if calibrated ranges have an output further from the float one than the widest ranges.

    Args:
      model: the quantized model, with the inputs of the one that was calibrated.
      names: the scale and zero point of each activation.
      examples: the calibration data.
      shares: the fraction of the numbers of each activation that are clipped.
      scheme: its method of calibration.
    """
    widest = {
        value: dict(zip(names[value], map(jnp.asarray, parameters[:2]), strict=True))
        for value, parameters in calibration.widest.items()
        if value in names and parameters.scale != calibration.ranges[value].scale
    }
    if not widest:
        return
    inputs = [value.name for value in model.inputs]

    @jax.jit
    def measure_distances(params, state, x, expected):
        values = model.program.evaluate(params, state, dict(zip(inputs, x, strict=True)))
        outputs = sample_outputs(model, values)
        squares = {n: jnp.maximum(jnp.square(y).sum(), 1e-30) for n, y in expected.items()}
        return [
            jnp.sqrt(jnp.square(outputs[n] - y).sum() / squares[n]) for n, y in expected.items()
        ]

    pairs = [*zip(examples, observed.outputs, strict=False)]  # of the first batches

    def measure(ranges: Mapping[str, Any], count: int = _COMPARED) -> np.ndarray:
        state = {**model.state, **calibrated, **ranges}
        return np.array(
            [measure_distances(model.params, state, tuple(x), y) for x, y in pairs[:count]]
        )

    calibrated = {
        name: jnp.asarray(value)
        for x in widest
        for name, value in zip(names[x], calibration.ranges[x][:2], strict=True)
    }
    errors, least = measure({}), measure({n: v for x in widest.values() for n, v in x.items()})
    worse = (errors > _NOISE * least).all(0)
    if not worse.any():
        return
    k = int(np.argmax(np.where(worse, errors.mean(0) - least.mean(0), -np.inf)))
    narrow = sorted(widest, key=lambda x: calibration.ranges[x].scale / calibration.widest[x].scale)
    gains = {x: float(errors[0, k] - measure(widest[x], 1)[0, k]) for x in narrow[:_TRIED]}
    worst = [
        f"{x!r} ({shares[x]:.2%} of its numbers clipped)"
        for x in sorted(gains, key=lambda x: -gains[x])[:3]
        if gains[x] > 0
    ]
    output = f"the output {[*observed.outputs[0]][k]!r}" if worse.size > 1 else "the outputs"
    warn(
        f"calibration={scheme.calibration!r} changes {output} on the calibration data by "
        f"{errors[:, k].mean():.2%}, 'minmax' by {least[:, k].mean():.2%} (root mean square, of "
        f"that of the outputs), most through the ranges of "
        f"{', '.join(worst) or 'several activations'}: pass calibration='minmax', or another "
        "method",
    )


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
