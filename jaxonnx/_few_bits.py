"""Operands in few bits, (code - zero point) * scale: how operators declare them.

An operator names the inputs that hold an operand, and says how these hold it at one node::

    @op("MatMulTrits", weights={"b": packed()}, quantized={"b": Quantized("scales", storage=...)})

All that reads or writes such operands goes by the declaration: adapters and where they may be
merged, shardings, checks of zero points, quantization anew, and the forms in which files are saved.
A new format is the function of its operator, and a `Storage` whose `unpack` and `pack` differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Storage:
    """How a tensor holds the numbers of a matrix in few bits: here, each as an element."""

    shape: tuple[int, ...]
    """Of the matrix, which the tensor's own need not be."""
    type: str
    """Of a number: "int4", "uint8", "nf4"."""
    block: int = 0
    """How many numbers share a scale; 0: all along `axis`, or those of a channel."""
    axis: int | None = None
    """The axis of the matrix that blocks run along; None: through the whole matrix, row by row."""
    channels: int | None = None
    """The axis whose indices have a scale each, where there are no blocks."""
    middle: int = 0
    """The zero point of a matrix for which the file has none."""
    is_final: bool = False
    """Whether nothing can be rounded to this form again."""

    def __str__(self) -> str:
        return f"{self.type} in blocks of {self.block}" if self.block else self.type

    @property
    def in_channels(self) -> bool:
        """Whether scales are a vector along `channels`, not an array of blocks."""
        return self.channels is not None and not self.block

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the greatest code, where `levels` is None."""
        kind = ml_dtypes.iinfo(np.dtype(self.type))
        return kind.min, kind.max

    @property
    def levels(self) -> np.ndarray | None:
        """The numbers that codes stand for, ascending; None for all integers between `limits`."""
        kind = np.dtype(self.type)
        if jnp.issubdtype(kind, jnp.integer):
            return None
        codes = np.arange(2 ** ml_dtypes.finfo(kind).bits, dtype=np.uint8)
        numbers = codes.view(kind).astype(np.float32)
        return np.unique(numbers[np.isfinite(numbers)])

    def blocks(self, scales: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of scales and zero points: that of the matrix, with blocks for numbers.

        Args:
          scales: the shape of the scales in the file, which may be flat.
        """
        if not self.block or self.axis is None or math.prod(scales) == 1:
            return scales
        return tuple(-(-n // self.block) if i == self.axis else n for i, n in enumerate(self.shape))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor that holds numbers of this shape."""
        return shape

    def unpack(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Return the numbers, of this shape, that a tensor of codes or zero points holds."""
        return x.reshape(shape)

    def pack(self, numbers: Any, x: Any) -> Any:
        """Return numbers in the type and shape of the tensor x, whose padding stays."""
        return numbers.astype(x.dtype).reshape(x.shape)


@dataclass(frozen=True)
class InBytes(Storage):
    """Unsigned integers of `bits` bits, side by side in bytes along the last axis."""

    bits: int = 8

    @property
    def limits(self) -> tuple[int, int]:
        return 0, 2**self.bits - 1

    @property
    def levels(self) -> np.ndarray | None:
        return None

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return *shape[:-1], -(-shape[-1] * self.bits // 8)

    def unpack(self, x: Any, shape: tuple[int, ...]) -> Any:
        return unpack_bits(x.reshape(*shape[:-1], -1), self.bits)[..., : shape[-1]]

    def pack(self, numbers: Any, x: Any) -> Any:
        rest = unpack_bits(x.reshape(*numbers.shape[:-1], -1), self.bits)
        rest = rest[..., numbers.shape[-1] :]
        whole = (np if isinstance(x, np.ndarray) else jnp).concatenate(
            [numbers.astype(np.uint8), rest], -1
        )
        return pack_bits(whole, self.bits).reshape(x.shape)

    @classmethod
    def of(cls, shape: tuple[int, ...], bits: int, block: int, axis: int) -> InBytes:
        """Declare a matrix whose zero point, where the file has none, is the middle code."""
        return cls(shape, f"int{bits}", block, axis, middle=2 ** (bits - 1), bits=bits)


StorageOf = Callable[[tuple[int, ...], Any, Mapping[str, Any]], Storage]
"""The storage at a node, by the tensor's shape and type, and the node's attributes."""


def is_float(x: Any) -> bool:
    """Check whether the numbers of an array are floating-point ones, and no codes of 8 bits."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


def as_it_is(shape: tuple[int, ...], dtype: Any, attributes: Mapping[str, Any]) -> Storage:
    """Declare codes as they are, with one scale, or one for each index of the last axis."""
    return Storage(shape, str(dtype), channels=len(shape) - 1)


def along(axis: Callable[[Mapping[str, Any]], int]) -> StorageOf:
    """Declare codes as they are, with scales per block (attribute `block_size`) or channel.

    Args:
      axis: how attributes tell the axis of channels, or that blocks run along.
    """

    def storage(shape: tuple[int, ...], dtype: Any, attributes: Mapping[str, Any]) -> Storage:
        place = axis(attributes) % max(len(shape), 1)
        return Storage(shape, str(dtype), attributes.get("block_size", 0), place, place)

    return storage


@dataclass(frozen=True)
class Quantized:
    """An operator's declaration of an operand in few bits.

    Args:
      scale: the input that the numbers are multiplied by.
      zero_point: the input that is subtracted before.
      groups: the input with the block of each column, where blocks are not adjacent columns.
      storage: how the tensor holds the numbers.
      repacked: the axes of the tensor are not those of the matrix, and zero points are held as the
        codes are.
      float_zeros: zero points may also be in floating point, where codes are not.
      scalable: the operator multiplies by dequantized numbers, whose rows DoRA can scale.
    """

    scale: str = ""
    zero_point: str = ""
    groups: str = ""
    storage: StorageOf = as_it_is
    repacked: bool = False
    float_zeros: bool = False
    scalable: bool = True

    def parts(self, order: list[str]) -> tuple[int, int, int]:
        """Return the positions of scale, zero point and groups in `order`, -1 for none."""
        names = self.scale, self.zero_point, self.groups
        return cast("tuple[int, int, int]", tuple(order.index(n) if n else -1 for n in names))


def with_scales(*names: str, storage: StorageOf = as_it_is) -> dict[str, Quantized]:
    """Declare operands `x` with inputs `x_scale` and `x_zero_point`, multiplied as integers."""
    parts = {name: (f"{name}_scale", f"{name}_zero_point") for name in names}
    return {name: Quantized(*both, "", storage, scalable=False) for name, both in parts.items()}


def unpack_bits(packed: Any, bits: int) -> Any:
    """Unpack numbers of `bits` bits from the bytes of the last axis, lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return numbers.reshape(*packed.shape[:-1], packed.shape[-1] * len(shifts))


def pack_bits(numbers: Any, bits: int) -> Any:
    """Pack numbers into bytes along the last axis: the inverse of `unpack_bits`."""
    parts = numbers.astype(np.uint8).reshape(*numbers.shape[:-1], -1, 8 // bits)
    return (parts << np.arange(0, 8, bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
