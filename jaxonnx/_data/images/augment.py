"""Augmentation of images on the device: random crops and flips, then scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxonnx._data.images.preparation import Layout, Preparation
from jaxonnx.errors import TrainingError

_DEFAULTS = {"crop": 0.08, "flip": 0.5}
_TRIES = 10
_RATIO = math.log(4 / 3)


class Augment(NamedTuple):
    """Settings of random augmentation."""

    crop: float | None = None
    """The least share of a picture's area that its random part has; None for no such parts."""
    flip: float = 0.0
    """The probability that an image is mirrored."""

    @classmethod
    def of(cls, wanted: Any) -> Self:
        """Return what `preprocess={"augment": wanted}` asks for.

        Raises:
          TrainingError: it asks for something else than "crop" and "flip".
        """
        if not isinstance(wanted, Mapping):
            names = [wanted] if isinstance(wanted, str) else wanted or ()
            wanted = {name: _DEFAULTS.get(name) for name in names}
        for name, value in wanted.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in _DEFAULTS or not (number and 0 < value <= 1):
                raise TrainingError(
                    "augment has 'crop', the least share of the area that a random part of a "
                    "picture has, and 'flip', how often a picture is mirrored; names, or a dict "
                    f"of numbers above 0, up to 1; not {name!r}: {value!r}"
                )
        return cls(**wanted)


def key_of(key: jax.Array, epoch: Any, number: Any) -> jax.Array:
    """Return the key of a batch, by its number in an epoch."""
    return jax.random.fold_in(jax.random.fold_in(key, epoch), number)


@partial(jax.jit, static_argnames=("how", "where", "augment"))
def prepare_batch(
    pixels: Any,
    aspects: Any,
    key: jax.Array,
    epoch: Any,
    number: Any,
    *,
    how: Preparation,
    where: Layout,
    augment: Augment,
) -> jax.Array:
    """Return the input for a batch of pictures, in steps that the compiler leaves apart.

    Args:
      pixels: uint8[n, height, width, channels]; with crops the whole pictures, of any size.
      aspects: float32[n], width / height of each picture before it was brought to its size.
      number: of the batch in its epoch.
    """
    key = key_of(key, epoch, number)
    parts, mirrors = jax.random.split(key)
    x = pixels
    if augment.crop is not None:
        keys = jax.random.split(parts, len(x))
        crop = partial(_random_crop, size=where.size, least=augment.crop)
        x = jax.vmap(crop)(x, aspects, keys)
    if augment.flip:
        mirrored = jax.random.bernoulli(mirrors, augment.flip, (len(x), 1, 1, 1))
        x = jnp.where(mirrored, x[:, :, ::-1], x)
    return how(jax.lax.optimization_barrier(x), where)


def _random_crop(
    picture: Any, aspect: Any, key: jax.Array, size: tuple[int, int], least: float
) -> jax.Array:
    """Return a random part of a picture, resized."""
    start, share = part(key, aspect, size, least)
    return crop_and_resize(picture, start, share, size)


def crop_and_resize(picture: Any, start: Any, share: Any, size: tuple[int, int]) -> jax.Array:
    """Return a part of a picture at a size, each pixel between the four that are nearest.

    A convolution over more of them, as `jax.image.scale_and_translate` has for what is made
    smaller, takes ten times as long on CPU; whole pictures are kept so small that it is not needed.
    """
    x = picture.astype(jnp.float32)
    for axis in (0, 1):
        length = x.shape[axis]
        steps = (jnp.arange(size[axis]) + 0.5) / size[axis]
        place = jnp.clip((start[axis] + steps * share[axis]) * length - 0.5, 0, length - 1)
        low = place.astype(jnp.int32)
        weight = (place - low).reshape(-1, *(1,) * (2 - axis))
        before, after = (x.take(i, axis, mode="clip") for i in (low, low + 1))
        # fused into the second axis, the first would be computed again for each of its taps
        x = jax.lax.optimization_barrier(before + (after - before) * weight)
    return jnp.round(x).astype(picture.dtype)


def part(
    key: jax.Array, aspect: Any, size: tuple[int, int], least: float
) -> tuple[jax.Array, jax.Array]:
    """Draw a part of a picture: (top, left) and (height, width), in shares of its sides.

    The area is uniform between `least` and all of it, the ratio of the sides log-uniform within 4/3
    of that of `size`; the first of some draws that fits is taken (Szegedy et al., "Going Deeper
    with Convolutions", 2015, section 6).
    """
    areas, ratios, place = jax.random.split(key, 3)
    area = jax.random.uniform(areas, (_TRIES,), minval=least)
    ratio = jnp.exp(jax.random.uniform(ratios, (_TRIES,), minval=-_RATIO, maxval=_RATIO))
    ratio = ratio * (size[1] / size[0]) / aspect
    shares = jnp.sqrt(jnp.stack([area / ratio, area * ratio], axis=1))
    share = jnp.minimum(shares[jnp.argmax((shares <= 1).all(1))], 1)
    return jax.random.uniform(place, (2,)) * (1 - share), share
