"""Batches of images, decoded ahead of time by threads."""

import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any, Self

import jax
import numpy as np

from jaxonnx._data.batches import Batch, Examples, Memory, Source, prefetch
from jaxonnx._data.images.augment import Augment, prepare_batch
from jaxonnx._data.images.folder import Folder
from jaxonnx.errors import InputError, TrainingError

_AHEAD = 2
"""Batches decoded ahead of the one in use."""
_KEY = 2**32 - 3
"""Folded into the seed's key for augmentation. Steps fold in
their numbers, which are smaller."""


@dataclass(frozen=True)
class Pictures(Examples):
    """The images of a folder, decoded in each epoch unless they are cached.

    Another image with weight zero takes the place of one that cannot be read.
    """

    inputs: Folder
    strict: bool = field(default=False, kw_only=True)
    """Whether an image that cannot be read is an error: predictions need a result for each."""

    @classmethod
    def of(cls, folder: Folder, size: int, seed: int | None = None, strict: bool = False) -> Self:
        """Return the source of all images of a folder."""
        return cls(folder, folder.targets, size, seed, np.arange(len(folder.paths)), strict=strict)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the outputs."""
        return self.inputs.settings.how.labels

    @property
    def resumable(self) -> dict[str, Any]:
        settings = self.inputs.settings
        how = {k: v for k, v in vars(settings.how).items() if k != "labels"}
        how = {k: list(v) if isinstance(v, tuple) else v for k, v in how.items()}
        return {**how, "augment": settings.augment._asdict(), "pictures": len(self.inputs.paths)}

    def release(self) -> None:
        self.inputs.settings.decoded.release()

    def contents(self) -> Sequence[np.ndarray]:
        """Return the classes, sizes and names of the files, without reading the files."""
        paths = self.inputs.paths
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        names = "/".join(os.path.relpath(path, self.inputs.path) for path in paths)
        return [self.targets, np.array(sizes), np.frombuffer(os.fsencode(names), np.uint8)]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        settings = self.inputs.settings
        dtype = jax.dtypes.canonicalize_dtype(settings.where.dtype)
        where = replace(settings.where, dtype=dtype)
        augment = settings.augment if self.seed is not None else Augment()
        whole = augment.crop is not None
        like = np.empty((0, *self.inputs.size(whole), where.channels), np.uint8)
        memory = Memory(like, self.size)  # only to allocate blocks; its array has no rows
        key = jax.random.fold_in(jax.random.key(self.seed or 0), _KEY)

        def to_batch(
            number: int, rows: Any, weight: Any, block: Any, decoded: list[Future]
        ) -> Batch:
            rows, weight, aspects = self._whole(rows, weight, block, decoded, whole)
            x = prepare_batch(
                block,
                aspects,
                key,
                np.uint32(epoch),
                np.uint32(number),
                how=settings.how,
                where=where,
                augment=augment,
            )
            return Batch((x,), self.targets[rows], weight)

        def start_decoding() -> Iterator[tuple[int, Any, Any, np.ndarray, list[Future]]]:
            for number, (rows, weight) in enumerate(self.rows_of_batches(epoch, start), start):
                block = memory.allocate()
                decoded = [
                    pool.submit(self._decode, row, block[i], whole) for i, row in enumerate(rows)
                ]
                yield number, rows, weight, block, decoded

        pool = ThreadPoolExecutor(settings.workers, "jaxonnx-pictures")
        try:
            yield from starmap(to_batch, prefetch(start_decoding(), _AHEAD))
        finally:
            pool.shutdown(cancel_futures=True)

    def _decode(self, row: int, place: np.ndarray, whole: bool) -> float | InputError:
        """Decode an image into the array `place`; return its aspect ratio, or the error."""
        path, broken = self.inputs.paths[row], self.inputs.settings.decoded.broken
        if path in broken:
            return broken[path]
        try:
            place[...], aspect = self.inputs.picture(row, whole)
        except InputError as error:
            return error
        return aspect

    def _whole(
        self, rows: np.ndarray, weight: np.ndarray, block: np.ndarray, decoded: list, whole: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Wait for the images of a batch, and substitute those that cannot be read.

        Args:
          rows, weight: of the batch.
          block: uint8[size, height, width, channels], which the threads write.
          decoded: a future of `_decode` for each image.
          whole: whether whole images are read.

        Returns:
          The rows, with those of substitutes; the weights, 0 for substitutes; the aspect ratios.
        """
        rows, weight = rows.copy(), weight.copy()
        aspects = np.ones(len(rows), np.float32)
        for i, future in enumerate(decoded):
            aspect = future.result()
            if isinstance(aspect, InputError) and self.strict:
                raise aspect
            if isinstance(aspect, InputError):
                weight[i] = 0
                rows[i], aspect = self._substitute(rows[i], aspect, block[i], whole)
            aspects[i] = aspect
        return rows, weight, aspects

    def _substitute(
        self, row: int, error: InputError, place: np.ndarray, whole: bool
    ) -> tuple[int, float]:
        """Decode the next image that can be read into `place`; return its row and aspect ratio.

        Raises:
          TrainingError: no image of the folder can be read.
        """
        self._warn_of(row, error)
        for other in np.roll(self.rows, -1 - np.searchsorted(self.rows, row)):
            aspect = self._decode(other, place, whole)
            if not isinstance(aspect, InputError):
                return other, aspect
            self._warn_of(other, aspect)
        raise TrainingError(f"no picture of '{self.inputs.path}' can be read: {error}")

    def _warn_of(self, row: int, error: InputError) -> None:
        """Warn once of an image that cannot be read."""
        path, broken = self.inputs.paths[row], self.inputs.settings.decoded.broken
        if path not in broken:
            broken[path] = error
            warnings.warn(f"left out: {error}", stacklevel=2)


def notes_on_images(*sources: Source | None) -> list[str]:
    """Return notes for the history: the images of each folder, and those not read so far."""
    folders = [source.inputs for source in sources if isinstance(source, Pictures)]
    broken = [error for each in folders[:1] for error in each.settings.decoded.broken.values()]
    notes = dict.fromkeys(note for each in folders for note in each.notes)
    return [*notes, *(f"left out: {error}" for error in broken)]
