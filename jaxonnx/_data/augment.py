"""Augmentation on the device: random crops and flips of images, or a function of the user."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._arrays import make_key
from jaxonnx._data.batches import Batch, DerivedSource, Source
from jaxonnx._data.images import Layout, Preparation
from jaxonnx._require import name_type
from jaxonnx.errors import TrainingError

_DEFAULTS = {"crop": 0.08, "flip": 0.5}
_TRIES = 10
"""Random crops that are drawn, of which the first that lies within the image is used."""
_RATIO = math.log(4 / 3)
"""The logarithm of the greatest ratio between the aspect of a crop and that of the input."""


class Augment(NamedTuple):
    """Settings of random augmentation."""

    crop: float | None = None
    """The smallest area of a random crop, as a fraction of the image; None for no crops."""
    flip: float = 0.0
    """The probability that an image is mirrored."""

    @classmethod
    def of(cls, setting: Any) -> Self:
        """Parse `preprocess={"augment": wanted}`: names, or a dict of numbers by name.

        Raises:
          TrainingError: a name other than "crop" and "flip", or a number out of range.
        """
        if not isinstance(setting, Mapping):
            names = [setting] if isinstance(setting, str) else setting or ()
            setting = {name: _DEFAULTS.get(name) for name in names}
        for name, value in setting.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in _DEFAULTS or not (number and 0 < value <= 1):
                raise TrainingError(
                    "augment has 'crop', the least share of the area that a random part of a "
                    "picture has, and 'flip', how often a picture is mirrored; names, or a dict "
                    f"of numbers above 0, up to 1; not {name!r}: {value!r}"
                )
        return cls(**setting)


def key_of(key: jax.Array, epoch: Any, number: Any) -> jax.Array:
    """Return the key of a batch from the run's key, the epoch and the batch's number in it."""
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
    """Augment a batch of images and convert it to the network's input.

    Args:
      pixels: uint8[n, height, width, channels]; whole images of any size if crops are random.
      aspects: float32[n], the aspect ratio of each image before it was stretched to this size.
      key: of the run.
      epoch, number: of the batch.
      how, where, augment: the settings.
    """
    key = key_of(key, epoch, number)
    parts, mirrors = jax.random.split(key)
    x = pixels
    if (least := augment.crop) is not None:
        keys = jax.random.split(parts, len(x))

        def crop(picture: Any, aspect: Any, key: jax.Array) -> jax.Array:
            start, share = part(key, aspect, where.size, least)
            return crop_and_resize(picture, start, share, where.size)

        x = jax.vmap(crop)(x, aspects, keys)
    if augment.flip:
        mirrored = jax.random.bernoulli(mirrors, augment.flip, (len(x), 1, 1, 1))
        x = jnp.where(mirrored, x[:, :, ::-1], x)
    return how(jax.lax.optimization_barrier(x), where)


def crop_and_resize(picture: Any, start: Any, share: Any, size: tuple[int, int]) -> jax.Array:
    """Crop an image and resize it by bilinear interpolation, without antialiasing.

    `jax.image.scale_and_translate` smooths when it shrinks, which takes ten times as long on CPU;
    whole images are kept so small (`folder._LARGER`) that it is not needed.

    Args:
      picture: uint8[height, width, channels].
      start: the (top, left) of the crop, as fractions of the sides.
      share: its (height, width), as fractions of the sides.
      size: the height and width of the result.
    """
    x = picture.astype(jnp.float32)
    for axis in (0, 1):
        length = x.shape[axis]
        steps = (jnp.arange(size[axis]) + 0.5) / size[axis]
        # centers of pixels are at half integers
        place = jnp.clip((start[axis] + steps * share[axis]) * length - 0.5, 0, length - 1)
        low = place.astype(jnp.int32)
        weight = (place - low).reshape(-1, *(1,) * (2 - axis))
        before, after = (x.take(i, axis, mode="clip") for i in (low, low + 1))
        # without a barrier XLA fuses both axes, and computes the first one again for each tap of
        # the second
        x = jax.lax.optimization_barrier(before + (after - before) * weight)
    return jnp.round(x).astype(picture.dtype)


def part(
    key: jax.Array, aspect: Any, size: tuple[int, int], least: float
) -> tuple[jax.Array, jax.Array]:
    """Draw a random crop, as in Szegedy et al., "Going Deeper with Convolutions", 2015, section 6.

    The area is uniform between `least` and 1, the aspect ratio log-uniform within a factor of 4/3
    of that of `size`. The first of `_TRIES` draws that lies within the image is taken.

    Returns:
      (top, left) and (height, width), as fractions of the image's sides.
    """
    areas, ratios, place = jax.random.split(key, 3)
    area = jax.random.uniform(areas, (_TRIES,), minval=least)
    ratio = jnp.exp(jax.random.uniform(ratios, (_TRIES,), minval=-_RATIO, maxval=_RATIO))
    ratio = ratio * (size[1] / size[0]) / aspect
    shares = jnp.sqrt(jnp.stack([area / ratio, area * ratio], axis=1))
    share = jnp.minimum(shares[jnp.argmax((shares <= 1).all(1))], 1)
    return jax.random.uniform(place, (2,)) * (1 - share), share


_KEY = 2**32 - 4
"""Folded into the seed's key for the function; images and steps fold in others."""


class AugmentedSource(DerivedSource):
    """A source that applies a function to each batch of another source.

    Random changes depend only on the key, the epoch and the number of the batch, so that a resumed
    run draws the same.

    Args:
      source: the source of the batches.
      change: a function of (key, epoch, number of the batch, batch) that returns a batch.
      key: of the run.
    """

    def __init__(
        self, source: Source, change: Callable[[jax.Array, Any, Any, Batch], Batch], key: jax.Array
    ):
        super().__init__(source)  # batches are checked as they come: changing takes time
        self._change, self._key = change, key

    @property
    def steps(self) -> int | None:
        return self._source.steps

    def apply(self, batch: Batch) -> Batch:
        """Change a batch of the innermost source as if it were the first one."""
        batch = self._source.apply(batch) if isinstance(self._source, AugmentedSource) else batch
        return self._change(self._key, np.uint32(0), np.uint32(0), batch)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for number, batch in enumerate(self._source.batches(epoch, start), start):
            yield self._change(self._key, np.uint32(epoch), np.uint32(number), batch)


def augment_examples(examples: Source, augment: Any, seed: int) -> Source:
    """Return a source whose batches a user's function changes, on the device.

    Args:
      examples: the source.
      augment: a function of (key, x), or of (key, batch) if its second parameter has that name;
        for any other argument of `train` the source is returned as it is.
      seed: of the run.
    """
    if not callable(augment):
        return examples
    takes_batch = [*inspect.signature(augment).parameters][1:2] == ["batch"]
    apply = jax.jit(_on_batch(augment) if takes_batch else _on_inputs(augment))

    def change_batch(key: jax.Array, epoch: Any, number: Any, batch: Batch) -> Batch:
        if takes_batch:
            return apply(key, epoch, number, batch)
        # targets stay on the host, where those of a stream are checked
        return batch._replace(inputs=apply(key, epoch, number, batch.inputs))

    return AugmentedSource(examples, change_batch, jax.random.fold_in(make_key(seed), _KEY))


def _on_inputs(function: Callable) -> Callable:
    """Wrap a function of (key, x), where x is the only input or a tuple of all, and check it."""

    def apply(key: jax.Array, epoch: Any, number: Any, inputs: tuple) -> tuple:
        single = len(inputs) == 1
        x = function(key_of(key, epoch, number), inputs[0] if single else inputs)
        x = (x,) if single else x
        old, new = jax.tree.structure(inputs), jax.tree.structure(x)
        if old != new:
            raise TrainingError(f"augment must return what it takes, {old}, and returns {new}")
        _check_count(x, len(inputs[0]))
        return x

    return apply


def _on_batch(function: Callable) -> Callable:
    """Wrap a function of (key, batch), and check its result."""

    def apply(key: jax.Array, epoch: Any, number: Any, batch: Batch) -> Batch:
        new = function(key_of(key, epoch, number), batch)
        if not isinstance(new, Batch):
            raise TrainingError(
                "augment must return the batch with other values, like "
                f"batch._replace(inputs=...), and returns {name_type(new)}"
            )
        _check_count(new, len(batch.weight))
        return new

    return apply


def _check_count(new: Any, count: int) -> None:
    """Raise if a function changed the number of examples, by which epochs are counted."""
    shapes = [np.shape(x) for x in jax.tree.leaves(new)]
    if any(shape[:1] != (count,) for shape in shapes):
        raise TrainingError(
            f"augment must keep the {count} examples of a batch, and returns arrays of shape "
            f"{', '.join(map(str, shapes))}"
        )
