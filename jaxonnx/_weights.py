"""Weights as operators declare them: what their axes are, and how they hold numbers in few bits.

An operator names the inputs that are weights, and says which of their axes are inputs, outputs and
kernel positions. Of an operand in few bits, (code - zero point) * scale, it says how its inputs
hold it at one node::

    @op("MatMulTrits", weights={"b": packed()}, quantized={"b": Quantized("scales", storage=...)})

All that reads or writes such operands goes by the declaration: adapters and where they may be
merged, shardings, checks of zero points, quantization anew, and the forms in which files are saved.
A new format is the function of its operator, and a `Storage` whose `unpack` and `pack` differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax.numpy as jnp
import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Matrix:
    """A weight as a linear map: the meaning of each of its axes."""

    output: int
    input: int
    kernel: tuple[int, ...] = ()
    """The window of a convolution."""
    batch: tuple[int, ...] = ()
    """Axes along which there are separate maps: directions of an LSTM, experts."""
    lookup: bool = False
    """Rows are read, as in an embedding, and no product is formed."""
    grouped: bool = False
    """An output depends only on the inputs of its own group."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Matrix:
        """Return the map whose fields a file holds as JSON.

        Raises:
          KeyError, TypeError, ValueError: the fields are not those of a map.
        """
        layout = cls(
            entry["output"],
            entry["input"],
            (*entry["kernel"],),
            (*entry["batch"],),
            bool(entry["lookup"]),
            bool(entry.get("grouped", False)),  # older files lack it
        )
        whole = all(type(axis) is int for axis in layout.order)
        if not whole or sorted(layout.order) != [*range(len(layout.order))]:
            raise ValueError(f"the axes of a weight are not {[*layout.order]}")
        return layout

    @property
    def order(self) -> tuple[int, ...]:
        """The axes as initializers take them: batch, kernel, inputs, outputs.

        The columns of an embedding are what is summed over, so they count as its inputs.
        """
        ends = (self.output, self.input) if self.lookup else (self.input, self.output)
        return (*self.batch, *self.kernel, *ends)

    @property
    def summed_axes(self) -> tuple[int, ...]:
        """The axes along which an output is a sum."""
        return (self.input, *self.kernel)

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return rows (outputs) and columns (inputs at every place of the kernel)."""
        return shape[self.output], math.prod(shape[a] for a in (self.input, *self.kernel))

    def factors(self, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A (rank x columns) and B (rows x rank), with a pair for each map."""
        rows, columns = self.sizes(shape)
        batch = tuple(shape[a] for a in self.batch)
        return (*batch, rank, columns), (*batch, rows, rank)

    def fans(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return fan-in and fan-out: inputs of an output, and outputs that an input reaches."""
        window = math.prod(shape[a] for a in self.kernel)
        fan_in, fan_out = (shape[a] * window for a in self.order[-2:])
        return fan_in, fan_out

    def of(
        self, axes: tuple[int | None, ...], rank: int, apart: tuple[int, ...] = ()
    ) -> Matrix | None:
        """Return this map in terms of the axes of a tensor that is read through a view.

        Args:
          axes: the tensor's own axes in the order that the view shows; None stands for an axis of
            length one that the tensor lacks. Axes that it does not show count to the window.
          rank: the tensor's rank.
          apart: its axes of which the view shows one place; there is a map for each.

        Returns:
          None if outputs or inputs are not an axis of the tensor.
        """
        output, input = axes[self.output], axes[self.input]
        if output is None or input is None:
            return None
        hidden = [a for a in range(rank) if a not in axes and a not in apart]
        kernel = [axes[a] for a in self.kernel] + hidden
        return replace(
            self,
            output=output,
            input=input,
            kernel=tuple(a for a in kernel if a is not None),
            batch=(*apart, *(a for i in self.batch if (a := axes[i]) is not None)),
        )


@dataclass(frozen=True)
class Form:
    """An operator's declaration of the axes of a weight."""

    axes: Callable[[int, Mapping[str, Any], int], Matrix | None]
    """By the weight's rank, the node's attributes and the input's position; None if the weight is
    not a matrix."""
    attributes: tuple[str, ...] = ()
    """The attributes that `axes` depends on."""
    rows: str = ""
    """The attribute with the axis of the rows that a lookup reads; 0 without it."""


def matrix(*, first: bool = False, transpose: str | None = None, batch: str | None = None) -> Form:
    """Declare a factor of `a @ b`, the second one unless `first`; leading axes are separate maps.

    Args:
      first: the weight is `a`, and its last axis is summed over.
      transpose: an attribute that exchanges the last two axes before the product.
      batch: an attribute that moves the first axis behind the other leading ones before that.
    """

    def axes(rank: int, attributes: Mapping[str, Any], position: int = 0) -> Matrix | None:
        if rank < 2:
            return None
        order = [*range(rank)]
        if batch and attributes.get(batch, 0):
            order.insert(rank - 2, order.pop(0))
        *separate, rows, columns = order
        turned = bool(transpose and attributes.get(transpose, 0))
        output, input = (rows, columns) if first != turned else (columns, rows)
        return Matrix(output, input, batch=tuple(separate))

    return Form(axes, tuple(filter(None, (transpose, batch))))


def convolution(*, transposed: bool = False, depthwise: bool = False, last: bool = False) -> Form:
    """Declare a kernel (outputs, inputs, *window), or (inputs, outputs, *window) if `transposed`.

    With `last` it is (outputs, *window, inputs). The attribute `group` is the number of groups;
    with `depthwise`, every channel is one.
    """

    def axes(rank: int, attributes: Mapping[str, Any], position: int = 0) -> Matrix | None:
        if rank < 3:
            return None
        grouped = depthwise or attributes.get("group", 1) != 1
        if last:
            return Matrix(0, rank - 1, tuple(range(1, rank - 1)), grouped=grouped)
        output, input = (1, 0) if transposed else (0, 1)
        return Matrix(output, input, tuple(range(2, rank)), grouped=grouped)

    return Form(axes, () if depthwise else ("group",))


def recurrent() -> Form:
    """Declare matrices (directions, outputs, inputs)."""
    return Form(lambda rank, *_: Matrix(1, 2, batch=(0,)) if rank == 3 else None)


def packed(*, transpose: str | None = None) -> Form:
    """Declare a matrix of the attributes N x K, outputs and inputs, in a tensor of another shape.

    Args:
      transpose: an attribute without which the matrix has outputs along its second axis.
    """

    def axes(rank: int, attributes: Mapping[str, Any], position: int = 0) -> Matrix | None:
        return Matrix(0, 1) if transpose is None or attributes.get(transpose, 1) else Matrix(1, 0)

    return Form(axes, ("N", "K", *filter(None, [transpose])))


def table(axis: str | None = None) -> Form:
    """Declare an embedding, whose rows are read along the first axis or that of an attribute."""

    def axes(rank: int, attributes: Mapping[str, Any], position: int = 0) -> Matrix | None:
        if rank != 2:
            return None
        row = attributes.get(axis, 0) % 2 if axis else 0
        return Matrix(1 - row, row, lookup=True)

    return Form(axes, (axis,) if axis else (), rows=axis or "")


def einsum(equation: str) -> Form:
    """Declare factors of the sum in an attribute, such as `bi,oi->bo`.

    A weight is a matrix if one of its letters is summed with another factor and one is its own and
    stays; letters that it shares with another factor and that stay are separate maps.
    """

    def axes(rank: int, attributes: Mapping[str, Any], position: int = 0) -> Matrix | None:
        if not isinstance(attributes[equation], str):  # bytes that are not text
            return None
        text = "".join(attributes[equation].split())
        left, arrow, result = text.partition("->")
        terms = left.split(",")
        if position >= len(terms):
            return None
        parts = terms.pop(position)
        if not arrow:  # without an arrow, the letters that stand once stay
            result = {letter for letter in left if left.count(letter) == 1}
        others = "".join(terms)
        output = [i for i, x in enumerate(parts) if x in result and x not in others]
        input = [i for i, x in enumerate(parts) if x not in result and x in others]
        batch = [i for i, x in enumerate(parts) if x in result and x in others]
        unlike = len({*parts}) == rank == len(output) + len(input) + len(batch)
        if not unlike or len(output) != 1 or len(input) != 1:
            return None
        return Matrix(output[0], input[0], batch=tuple(batch))

    return Form(axes, (equation,))


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
