"""Normalization over a batch, an instance, a group of channels, a layer or neighbours; Dropout."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx import lowering
from jaxonnx._constraints import Positive
from jaxonnx.ops.common import axes_of, axis_of, element_dtype, widen
from jaxonnx.ops.elementwise import absolute
from jaxonnx.ops.pool import place_windows
from jaxonnx.registry import Channels, Key, Outputs, Training, op

SCALED = {"scale": 1.0, "b": 0.0}
STATISTICS = {"mean": 0.0, "var": 1.0}


def _batch_norm(
    x, scale, bias, mean, var, momentum, epsilon, batch: bool, channels: int, spatial: bool = True
):
    """Return (y, running mean, running var, mean, var), the last two as used for y.

    The variance of the batch is the population's. Half precision is computed in float32.
    """
    if not spatial and channels == -1:
        x = jnp.moveaxis(x, -1, 1)
        y, *statistics = _batch_norm(x, scale, bias, mean, var, momentum, epsilon, batch, 1, False)
        return jnp.moveaxis(y, 1, -1), *statistics
    shape = x.shape[1:] if not spatial else (-1, *(1,) * (x.ndim - 2))
    shape = shape if channels == 1 else -1
    if spatial and not batch:
        vectors = map(widen, (scale, bias, mean, var))
        y = lowering.normalize(widen(x), *vectors, epsilon=epsilon, channels=channels)
        return y.astype(x.dtype), mean, var, mean, var
    gain, shift = (widen(v).reshape(shape) for v in (scale, bias))
    if batch:
        axes = tuple(a for a in range(x.ndim) if a == 0 or (spatial and a != channels % x.ndim))
        wide = widen(x)
        ends = [1 if a in axes else n for a, n in enumerate(x.shape)]
        gain, shift = (jnp.broadcast_to(v, [*ends]).astype(wide.dtype) for v in (gain, shift))
        y, batch_mean, batch_var = lowering.standardize(wide, gain, shift, axes, epsilon)
        batch_mean, batch_var = batch_mean.reshape(mean.shape), batch_var.reshape(var.shape)
        new_mean = (mean * momentum + batch_mean * (1 - momentum)).astype(mean.dtype)
        new_var = (var * momentum + batch_var * (1 - momentum)).astype(var.dtype)
        saved = batch_mean.astype(mean.dtype), batch_var.astype(var.dtype)
    else:
        gain = gain * lax.rsqrt(widen(var).reshape(shape) + epsilon)
        y = (widen(x) - widen(mean).reshape(shape)) * gain + shift
        new_mean, new_var, saved = mean, var, (mean, var)
    return y.astype(x.dtype), new_mean, new_var, *saved


@op("BatchNormalization", since=1, params=SCALED, state=STATISTICS)
def batch_normalization_1(
    x,
    scale,
    b,
    mean,
    var,
    *,
    epsilon=1e-5,
    is_test=0,
    momentum=0.9,
    spatial=1,
    training: Training,
    channels: Channels = 1,
):
    batch = not is_test if training is None else training
    return _batch_norm(x, scale, b, mean, var, momentum, epsilon, batch, channels, bool(spatial))


@op("BatchNormalization", since=7, params=SCALED, state=STATISTICS)
def batch_normalization_7(
    x,
    scale,
    b,
    mean,
    var,
    *,
    epsilon=1e-5,
    momentum=0.9,
    spatial=1,
    outputs: Outputs,
    training: Training,
    channels: Channels = 1,
):
    """Unless the caller sets the mode, a node that lists more outputs than Y is in training."""
    batch = outputs > 1 if training is None else training
    return _batch_norm(x, scale, b, mean, var, momentum, epsilon, batch, channels, bool(spatial))


@op("BatchNormalization", since=14, params=SCALED, state=STATISTICS)
def batch_normalization(
    x,
    scale,
    b,
    mean,
    var,
    *,
    epsilon=1e-5,
    momentum=0.9,
    training_mode=0,
    training: Training,
    channels: Channels = 1,
):
    batch = bool(training_mode) if training is None else training
    return _batch_norm(x, scale, b, mean, var, momentum, epsilon, batch, channels)[:3]


def _over_channels(v, rank: int):
    return v.reshape(-1, *(1,) * (rank - 2))


@op("InstanceNormalization", since=1, params=SCALED)
def instance_normalization(x, scale, b, *, epsilon=1e-5):
    unit, *_ = lowering.standardize(widen(x), None, None, (*range(2, x.ndim),), epsilon)
    y = unit * _over_channels(scale, x.ndim) + _over_channels(b, x.ndim)
    return y.astype(x.dtype)


AFFINE = {"scale": 1.0, "bias": 0.0}
GROUPS = "x (N, num_groups*c, *D)"


def _group_norm(x, scale, bias, num_groups, epsilon, stash):
    """Normalize in the wider type, then scale and shift in x's own: the function body."""
    groups = widen(x, stash).reshape(x.shape[0], num_groups, -1)
    unit, *_ = lowering.standardize(groups, None, None, (2,), epsilon)
    unit = unit.astype(x.dtype).reshape(x.shape)
    return unit * _over_channels(scale, x.ndim) + _over_channels(bias, x.ndim)


@op("GroupNormalization", since=18, params=AFFINE, shapes=GROUPS)
def group_normalization_18(x, scale, bias, *, epsilon=1e-5, num_groups):
    """`scale` and `bias` have one entry per group."""
    each = x.shape[1] // num_groups
    scale, bias = jnp.repeat(scale, each), jnp.repeat(bias, each)
    return _group_norm(x, scale, bias, num_groups, epsilon, np.float32)


@op("GroupNormalization", since=21, params=AFFINE, shapes=GROUPS)
def group_normalization(x, scale, bias, *, epsilon=1e-5, num_groups, stash_type=1):
    """`scale` and `bias` have one entry per channel."""
    return _group_norm(x, scale, bias, num_groups, epsilon, element_dtype(stash_type))


# ONNX has it from opset 17 on; onnxruntime takes it at any, and exporters wrote it before.
@op("LayerNormalization", since=1, params=SCALED)
def layer_normalization(x, scale, b=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    """(y, mean, 1 / standard deviation) over the axes from `axis` on.

    Normalized in the type `stash_type` (in float64 where x is, as onnxruntime does), then scaled
    and shifted in x's own.
    """
    stash = element_dtype(stash_type)
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    unit, mean, var = lowering.standardize(widen(x, stash), None, None, axes, epsilon)
    y = unit.astype(x.dtype) * scale
    y = y if b is None else y + b
    return y, mean.astype(stash), lax.rsqrt(var + epsilon).astype(stash)


@op("RMSNormalization", since=23, params={"scale": 1.0})
def rms_normalization(x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    wide = widen(x, element_dtype(stash_type))
    root = lax.rsqrt(jnp.square(wide).mean(axes) + epsilon)
    unit = wide * jnp.expand_dims(root, axes)  # in this order: see lowering.standardize
    return unit.astype(x.dtype).astype(scale.dtype) * scale


@op("LRN", since=1)
def lrn(x, *, alpha=1e-4, beta=0.75, bias=1.0, size: Positive):
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ** beta."""
    wide = widen(x)
    channels = jnp.square(wide).reshape(x.shape[0], 1, x.shape[1], -1)
    around = place_windows(channels.shape[2:], (size, 1), pads=((size - 1) // 2, 0, size // 2, 0))
    total = lowering.window_sum(channels, around).reshape(x.shape)
    return (wide * (bias + alpha / size * total) ** -beta).astype(x.dtype)


@op("LpNormalization", since=1)
def lp_normalization(x, *, axis=-1, p: Literal[1, 2] = 2):
    """x / ||x||_p along an axis; a zero vector stays zero, and has gradient zero."""
    axis = axis_of(axis, x.ndim)
    wide = widen(x)
    total = (absolute(wide) if p == 1 else jnp.square(wide)).sum(axis, keepdims=True)
    norm = jnp.where(total != 0, total, 1)  # a NaN stays one
    return jnp.where(total != 0, wide / (norm if p == 1 else jnp.sqrt(norm)), 0).astype(x.dtype)


@op("MeanVarianceNormalization", since=9)
def mean_variance_normalization(x, *, axes=(0, 2, 3)):
    """(x - mean) / (standard deviation + 1e-9), the schema's function body."""
    wide = widen(x)
    axes = axes_of(axes, x.ndim)
    centred = wide - wide.mean(axes, keepdims=True)
    var = jnp.square(centred).mean(axes, keepdims=True)
    std = jnp.where(var != 0, jnp.sqrt(jnp.where(var != 0, var, 1)), 0)
    return (centred / (std + 1e-9)).astype(x.dtype)


def _dropout(x, ratio, active, key, mask_type=np.bool_):
    """Return (x / (1 - ratio) where kept, kept); `ratio` and `active` may be traced."""
    constant = isinstance(active, bool | np.bool_) and isinstance(ratio, int | float)
    if constant and (not active or ratio == 0):
        return x, jnp.ones(x.shape, mask_type)
    active = active & (ratio > 0)
    ratio = jnp.where(active, jnp.asarray(ratio, np.float32), 0)
    keep = jax.random.bernoulli(key, 1 - ratio, x.shape)
    scale = 1 / jnp.where(ratio < 1, 1 - ratio, 1)
    y = jnp.where(keep, x * scale.astype(x.dtype), 0).astype(x.dtype)
    return y, keep.astype(mask_type)


def _scalar(value, default):
    """Return a known scalar input as a Python number, a traced one as it is."""
    if value is None:
        return default
    return value.item() if isinstance(value, np.ndarray) else value.reshape(())


@op("Dropout", since=1, pointwise=True)
def dropout_1(data, *, is_test=0, ratio=0.5, key: Key, training: Training):
    active = not is_test if training is None else training
    return _dropout(data, float(ratio), active, key(), data.dtype)


@op("Dropout", since=7, pointwise=True)
def dropout_7(data, *, ratio=0.5, key: Key, training: Training):
    """The caller sets the mode; the default is inference. The mask has the type of `data`."""
    return _dropout(data, float(ratio), bool(training), key(), data.dtype)


@op("Dropout", since=10, pointwise=True)
def dropout_10(data, *, ratio=0.5, key: Key, training: Training):
    return _dropout(data, float(ratio), bool(training), key())


@op("Dropout", since=12, pointwise=True)
def dropout(data, ratio=None, training_mode=None, *, seed=None, key: Key, training: Training):
    """y = data * mask / (1 - ratio); in training also where the file says inference."""
    active = _scalar(training_mode, False) if training is None else training
    return _dropout(data, _scalar(ratio, 0.5), active, key(seed))
