"""Axes of weights: which are inputs, outputs and kernel positions, as operators declare them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


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
    def summed(self) -> tuple[int, ...]:
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
