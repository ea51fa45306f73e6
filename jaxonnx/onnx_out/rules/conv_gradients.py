"""Gradients of convolutions as products of matrices, one for all images.

onnxruntime makes one small product for each image and each group of channels. Where images are
small, or each channel is a group, it is quicker at one product of all images for each channel. Its
numbers belong to pairs of a cell of the image and a place of the result; which tap reads that cell
for that place is known.
"""

from functools import cache
from math import prod
from typing import Any

import numpy as np

from jaxonnx.onnx_out._tensors import Tensor
from jaxonnx.onnx_out.rules.shapes import pad_tensor

PAIRS = 2**12
"""The most (cell, place) pairs of a channel for which products of all pairs are worth it."""

FEW_IMAGES = 4
"""The most images of a batch with which onnxruntime is faster at the gradients of a depthwise
convolution by a convolution for each image and channel than by one product for each channel."""

READS = 2**16
"""The most elements of a 0/1 matrix of taps, cells and places (`_reads`)."""

FEWEST = 4, 9
"""The most places of an image and the most taps with which a convolution is faster as one matrix
product for all images."""

MANY_CHANNELS = 8
"""The fewest input channels with which onnxruntime is faster at the gradient of a kernel by
products of windows than by a convolution of images with images."""

MOST_TAPS = 49
"""The most taps for which that holds: there is a node for each."""

SIDE_BY_SIDE = 49
"""The most places of an image for which the windows of all taps are concatenated for one product.
Larger images have one product for each tap: their windows would fill the memory."""

Axes = tuple[tuple, ...]
"""For each spatial axis (size, kernel, stride, dilation, (low, high), places)."""

# In this module a cell is a position in the image, a place a position in the result, and a tap a
# position in the kernel; each is numbered over all spatial axes, in row-major order. `form` is the
# `lowering.Conv` of the convolution, w is (out channels, in channels / groups, *kernel), x and dy
# are (N, C, *size), and `turned` swaps N and C.


def axes_of(form: Any) -> Axes:
    """Return the geometry of a convolution's windows, axis by axis."""
    parts = form.size, form.kernel, form.strides, form.dilations, form.pads, form.out
    return tuple(zip(*parts, strict=True))


@cache
def _cells(axes: Axes) -> np.ndarray:
    """Return the cell that each tap reads for each place, int64[taps, places]; -1 in the padding.

    Axes are added one at a time: the number of a cell is the number so far times the new size plus
    the position along the new axis.
    """
    result = np.zeros((1, 1), np.int64)
    for size, kernel, stride, dilation, (low, _), out in axes:
        taps, places = np.arange(kernel)[:, None], np.arange(out)
        at = places * stride + taps * dilation - low
        at[(at < 0) | (at >= size)] = -1
        before, at = result[:, None, :, None], at[None, :, None, :]
        result = np.where((before < 0) | (at < 0), -1, before * size + at)
        result = result.reshape(-1, np.shape(result)[2] * out)
    return result


@cache
def _pairs(axes: Axes) -> np.ndarray:
    """Return the index cell * places + place of the cell of each tap, int64[taps * places].

    For a tap in the padding it is cells * places, one beyond the last pair.
    """
    cells = _cells(axes)
    pairs = cells * cells.shape[1] + np.arange(cells.shape[1])
    none = prod(size for size, *_ in axes) * cells.shape[1]
    return np.where(cells < 0, none, pairs).reshape(-1)


@cache
def _reads(axes: Axes, dtype: Any, rows: int) -> np.ndarray:
    """Return the 0/1 array [taps, places, cells]: 1 if a tap reads the cell for the place.

    Args:
      axes: the geometry.
      dtype: of the result.
      rows: the rows of the matrix that it is reshaped to.
    """
    cells = _cells(axes)[..., None]
    reads = cells == np.arange(prod(size for size, *_ in axes))
    return reads.astype(dtype).reshape(rows, -1)


def of_channels(form: Any, w: Any) -> bool:
    """Check whether a convolution with a kernel of shape `w` is depthwise."""
    return form.groups == w[0] > 1 and w[1] == 1


def channels_of_weight(g: Any, form: Any, x: Any, dy: Any) -> Any:
    """Write the kernel gradient of a depthwise convolution.

    Few images are convolved with images. Of more, one product gives for each channel the sums over
    (cell, place) pairs; a Gather picks for each tap the pairs that it reads, and a sum over places
    finishes. For larger images this is done with rows in place of whole images, once for each row
    of the kernel.

    Returns:
      The gradient (C, 1, *kernel); None if there are too many pairs even within rows.
    """
    axes = axes_of(form)
    whole = prod(form.size) * prod(form.out) <= PAIRS
    inner = axes if whole else axes[1:]
    cells, places = (prod(axis[i] for axis in inner) for i in (0, -1))
    if cells * places > PAIRS:
        return None
    if is_few_images(x):
        return _channels_of_few(g, form, x, dy)
    turned = (1, 0, *range(2, x.ndim))
    x, dy, channels, count = g.transpose(x, turned), g.transpose(dy, turned), x.shape[1], x.shape[0]
    rows, parts = count if whole else count * form.out[0], [x]
    if not whole:
        size, kernel, stride, dilation, (low, _), out = axes[0]
        last = (out - 1) * stride + 1
        more = last + (kernel - 1) * dilation - size - low
        rest = [(0, 0, 0)] * (x.ndim - 3)
        x = pad_tensor(g, x, np.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), (low, more, 0), *rest])
        channel, after = x.shape[:2], x.shape[3:]
        parts = [  # x[:, :, start : start + last : stride]
            g.slice(
                x, [0, 0, start, *[0] * len(after)], [*channel, start + last, *after],
                [1, 1, stride, *[1] * len(after)],
            )
            for start in range(0, kernel * dilation, dilation)
        ]  # fmt: skip
    dy = g.reshape(dy, [channels, rows, places])
    products = []
    for part in parts:
        part = g.transpose(g.reshape(part, [channels, rows, cells]), (0, 2, 1))
        y = Tensor(g("MatMul", part, dy), (channels, cells, places), x.dtype)
        products.append(g.reshape(y, [channels, 1, cells * places]))
    every = g("Concat", *products, axis=1) if len(products) > 1 else products[0]
    kernels = channels * len(parts)
    every = g.reshape(
        Tensor(every, (channels, len(parts), cells * places), x.dtype), [kernels, cells * places]
    )
    pairs = _pairs(inner)
    if (pairs == cells * places).any():  # a tap in the padding reads zero
        every = g("Concat", every, np.zeros((kernels, 1), x.dtype), axis=1)
    gathered = Tensor(g("Gather", every, pairs, axis=1), (kernels, len(pairs)), x.dtype)
    gathered = g.reshape(gathered, [kernels, len(pairs) // places, places])
    return g.reshape(g.reduce_tensor("ReduceSum", gathered, [2]), [channels, 1, *form.kernel])


def is_few_images(x: Any) -> bool:
    """Check whether a batch has at most `FEW_IMAGES`."""
    return isinstance(x.shape[0], int) and x.shape[0] <= FEW_IMAGES


def _channels_of_few(g: Any, form: Any, x: Any, dy: Any) -> Any:
    """Write the kernel gradient of a depthwise convolution as convolutions of images with images.

    The channels of all images are groups, dy is the kernel, and strides and dilations change roles.
    """
    (count, channels), axes = x.shape[:2], axes_of(form)
    # padding at the end; negative where no window reads the last cells, which are cut off
    high = [(n - 1) * s + (k - 1) * d + 1 - size - low for size, k, s, d, (low, _), n in axes]
    stop = [size + min(h, 0) for size, h in zip(form.size, high, strict=True)]
    x = g.slice(x, [0] * x.ndim, [count, channels, *stop], [1] * x.ndim)
    y = g(
        "Conv",
        g.reshape(x, [1, count * channels, *stop]),
        g.reshape(dy, [count * channels, 1, *form.out]),
        kernel_shape=form.out,
        strides=form.dilations,
        dilations=form.strides,
        pads=[*(low for low, _ in form.pads), *(max(h, 0) for h in high)],
        group=count * channels,
    )
    y = g.reshape(
        Tensor(y, (1, count * channels, *form.kernel), x.dtype), [count, channels, *form.kernel]
    )
    if count > 1:
        y = g.reduce_tensor("ReduceSum", y, [0])
    return g.reshape(y, [channels, 1, *form.kernel])


def channels_of_images(g: Any, form: Any, dy: Any, w: Any) -> Any:
    """Write the image gradient of a depthwise convolution as one product for each channel.

    The kernel is expanded to a matrix (places, cells) for each channel. Only for training steps: in
    such a product a number that is not finite spreads over its image.

    Returns:
      The gradient (N, C, *size); None if the matrices would be large.
    """
    cells, places, taps = prod(form.size), prod(form.out), prod(form.kernel)
    (count, channels), axes, dtype = dy.shape[:2], axes_of(form), dy.dtype
    if cells * places > PAIRS or cells * places * taps > READS:
        return None
    turned = (1, 0, *range(2, dy.ndim))
    dy = g.reshape(g.transpose(dy, turned), [channels, count, places])
    kernels = g("MatMul", g.reshape(w, [channels, taps]), _reads(axes, dtype, taps))
    kernels = Tensor(kernels, (channels, places * cells), dtype)
    y = g("MatMul", dy, g.reshape(kernels, [channels, places, cells]))
    y = g.reshape(Tensor(y, (channels, count, cells), dtype), [channels, count, *form.size])
    return g.transpose(y, turned)


def few(form: Any) -> bool:
    """Check whether a convolution has so few places and taps that `forward` is faster."""
    return prod(form.out) <= FEWEST[0] and prod(form.kernel) <= FEWEST[1]


def forward(g: Any, form: Any, x: Any, w: Any) -> Any:
    """Write a convolution as one matrix product of the kernel with the windows of all images.

    Only for training steps: a model for inference keeps Conv.
    """
    every, rows = _side_by_side(g, _windows(g, form, x)), w.shape[0]
    y = g("MatMul", g.reshape(w, [rows, every.shape[0]]), every)
    y = g.reshape(Tensor(y, (rows, every.shape[1]), x.dtype), [rows, x.shape[0], *form.out])
    return g.transpose(y, (1, 0, *range(2, x.ndim)))


def of_weight(g: Any, form: Any, x: Any, dy: Any) -> Any:
    """Write the kernel gradient as one product of dy with all windows, or as one for each tap."""
    taps, rows, columns = prod(form.kernel), dy.shape[1], x.shape[1]
    parts = _windows(g, form, x)
    turned, count = (1, 0, *range(2, dy.ndim)), parts[0].shape[1]
    dy = g.reshape(g.transpose(dy, turned), [rows, count])
    if prod(form.out) <= SIDE_BY_SIDE:
        y = g("Gemm", dy, _side_by_side(g, parts), transB=1)
        y = Tensor(y, (rows, columns * taps), x.dtype)
    else:
        products = (g("Gemm", dy, part, transB=1) for part in parts)
        products = (Tensor(y, (rows, columns), x.dtype) for y in products)
        y = g("Concat", *(g.reshape(y, [rows, columns, 1]) for y in products), axis=2)
        y = Tensor(y, (rows, columns, taps), x.dtype)
    return g.reshape(y, (rows, columns, *form.kernel))


def _windows(g: Any, form: Any, x: Any) -> list:
    """Return the cells of all images that each tap reads, as a matrix (C, N * places)."""
    edges = [(0, 0, 0)] * 2
    for size, k, s, d, (low, _), n in axes_of(form):
        edges.append((low, (n - 1) * s + (k - 1) * d + 1 - size - low, 0))
    x = pad_tensor(g, g.transpose(x, (1, 0, *range(2, x.ndim))), np.zeros((), x.dtype), edges)
    parts = []
    for offset in form.taps.offsets:
        ends = [o + (n - 1) * s + 1 for o, n, s in zip(offset, form.out, form.strides, strict=True)]
        part = g.slice(x, [0, 0, *offset], [*x.shape[:2], *ends], [1, 1, *form.strides])
        parts.append(g.reshape(part, [x.shape[0], x.shape[1] * prod(form.out)]))
    return parts


def _side_by_side(g: Any, parts: list) -> Any:
    """Join the matrices of `_windows` to one (C * taps, N * places)."""
    (columns, count), taps, dtype = parts[0].shape, len(parts), parts[0].dtype
    if taps == 1:
        return parts[0]
    every = g("Concat", *(g.reshape(part, [columns, 1, count]) for part in parts), axis=1)
    return g.reshape(Tensor(every, (columns, taps, count), dtype), [columns * taps, count])


def images(g: Any, form: Any, dy: Any, w: Any) -> Any:
    """Write the image gradient as two products: the terms of each tap, and a sum by a 0/1 matrix.

    Only for training steps: in the second product a number that is not finite spreads over its
    image.

    Returns:
      The gradient (N, C, *size); None if the 0/1 matrix would be large.
    """
    taps, (rows, columns), count = prod(form.kernel), w.shape[:2], dy.shape[0]
    cells, places, axes = prod(form.size), prod(form.out), axes_of(form)
    if cells * places * taps > READS:
        return None
    dtype = dy.dtype
    turned = (1, 0, *range(2, dy.ndim))
    dy = g.reshape(g.transpose(dy, turned), [rows, count * places])
    every = g.product(
        g.reshape(w, [rows, columns * taps]), True, dy, False, (columns * taps, count * places)
    )
    every = g.transpose(g.reshape(every, [columns, taps, count, places]), (0, 2, 1, 3))
    every = g.reshape(every, [columns * count, taps * places])
    y = g("MatMul", every, _reads(axes, dtype, taps * places))
    y = g.reshape(Tensor(y, (columns * count, cells), dtype), [columns, count, *form.size])
    return g.transpose(y, turned)
