"""Operators of detectors: NonMaxSuppression, pooling over regions of interest, ImageDecoder."""

import io
import struct
from typing import Annotated, Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx import lowering
from jaxonnx._constraints import Default, NotNegative, Positive
from jaxonnx._limits import check_size, check_time
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import divide, index_of
from jaxonnx.registry import is_known, op, xp

FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Of images, in Pillow's words; for others, such as EPS, it may start programs."""


def _suppress(low, high, scores, count, iou_threshold):
    """Return the indices of the boxes that remain, best first; equal scores in their order."""
    area = np.prod(high - low, axis=-1)
    order = np.argsort(-scores, kind="stable")
    selected = []
    while order.size and len(selected) < count:
        check_time()
        best, order = order[0], order[1:]
        selected.append(best)
        overlap = np.minimum(high[best], high[order]) - np.maximum(low[best], low[order])
        common = np.prod(np.maximum(overlap, 0), axis=-1)
        union = area[best] + area[order] - common
        valid = (area[best] > 0) & (area[order] > 0) & (union > 0)
        iou = np.where(valid, common / np.where(valid, union, 1), 0)
        order = order[~(iou > iou_threshold)]
    return selected


@op(
    "NonMaxSuppression",
    since=10,
    dynamic=True,
    shapes="boxes (batch, n, 4), scores (batch, classes, n)",
)
def non_max_suppression(
    boxes,
    scores,
    max_output_boxes_per_class=None,
    iou_threshold=None,
    score_threshold=None,
    *,
    center_point_box: Literal[0, 1] = 0,
):
    """Rows (batch, class, box) of the kept boxes; boxes (B, n, 4), scores (B, classes, n)."""
    boxes, scores = np.asarray(boxes), np.asarray(scores)

    def scalar(value, default):
        return default if value is None or np.size(value) == 0 else np.asarray(value).item()

    count = scalar(max_output_boxes_per_class, 0)
    iou = np.float32(scalar(iou_threshold, 0))
    if not 0 <= iou <= 1:
        raise NodeError(f"iou_threshold must be between 0 and 1, got {iou:g}")
    least = scalar(score_threshold, None)
    if center_point_box:
        low, high = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2
    else:  # the corners on either diagonal
        low = np.minimum(boxes[..., :2], boxes[..., 2:])
        high = np.maximum(boxes[..., :2], boxes[..., 2:])
    rows = []
    for b, c in np.ndindex(scores.shape[:2]):
        check_time()
        s = scores[b, c]
        among = np.arange(s.size) if least is None else np.flatnonzero(s > np.float32(least))
        selected = _suppress(low[b, among], high[b, among], s[among], count, iou)
        rows += [(b, c, among[i]) for i in selected]
    return np.array(rows, np.int64).reshape(-1, 3)


@op("ImageDecoder", since=20, dynamic=True, shapes="encoded_stream (bytes)")
def image_decoder(encoded_stream, *, pixel_format: Literal["RGB", "BGR", "Grayscale"] = "RGB"):
    """The image as uint8 (height, width, channels), empty if the stream cannot be decoded."""
    try:
        from PIL import Image
    except ImportError as error:
        raise NodeError("decoding needs Pillow: pip install 'jaxonnx[image]'") from error
    modes = {"RGB": "RGB", "BGR": "RGB", "Grayscale": "L"}
    mode = modes[pixel_format]
    try:
        with Image.open(io.BytesIO(np.asarray(encoded_stream).tobytes()), formats=FORMATS) as image:
            check_size((*image.size, len(mode)), host=True)
            pixels = np.asarray(image.convert(mode))
    except NodeError:
        raise
    except (EOFError, LookupError, OSError, SyntaxError, ValueError, struct.error):
        return np.zeros((0, 0, len(mode)), np.uint8)
    except Image.DecompressionBombError as error:
        raise NodeError(str(error)) from error
    if pixel_format == "Grayscale":
        return pixels[:, :, None]
    return pixels[:, :, ::-1].copy() if pixel_format == "BGR" else pixels


ROIS_AT_ONCE = 16
"""Regions computed together; each holds a copy of its image."""


def _per_roi(function, *arguments):
    """Apply `function` to every region, a few at a time, keeping nothing for the gradient."""
    return lax.map(lambda a: jax.checkpoint(function)(*a), arguments, batch_size=ROIS_AT_ONCE)


@op("MaxRoiPool", since=1)
def max_roi_pool(x, rois, *, pooled_shape, spatial_scale=1.0):
    """Maximum over the bins of each region (batch index, x1, y1, x2, y2); an empty bin gives 0.

    Corners are rounded to pixels (halves away from zero), as in Fast R-CNN (https://arxiv.org/abs/1504.08083).
    """
    x, rois = jnp.asarray(x), lax.stop_gradient(jnp.asarray(rois))
    check_size((len(rois), x.shape[1], *pooled_shape), x.dtype)
    for count, size in zip(pooled_shape, x.shape[2:], strict=True):
        check_size((x.shape[1], count, size), x.dtype)

    def bins(first, last, count, size):
        """Return a mask of the pixels that each bin covers, (count, size)."""
        scaled = (v * spatial_scale for v in (first, last))
        # to the nearest integer, halves away from zero
        first, last = (jnp.sign(v) * jnp.floor(jnp.abs(v) + 0.5) for v in scaled)
        step = divide(jnp.maximum(last - first + 1, 1), count)
        number = jnp.arange(count)
        begin = jnp.floor(number * step) + first
        end = jnp.ceil((number + 1) * step) + first
        pixel = jnp.arange(size)
        return (pixel >= begin[:, None]) & (pixel < end[:, None])

    def pool(roi):
        image = x.at[roi[0].astype(jnp.int32)].get(mode="fill")
        rows = bins(roi[2], roi[4], pooled_shape[0], x.shape[2])
        columns = bins(roi[1], roi[3], pooled_shape[1], x.shape[3])
        y = lowering.first_max(jnp.where(columns, image[:, :, None], -jnp.inf), 3)
        y = lowering.first_max(jnp.where(rows[:, :, None], y[:, None], -jnp.inf), 2)
        full = rows.any(1)[:, None] & columns.any(1)
        return jnp.where(full, y, 0)

    return _per_roi(pool, rois)


class Bins(TypedDict, total=False):
    """The attributes of RoiAlign in all opsets."""

    mode: Annotated[Literal["avg", "max"], Default("avg")]
    output_height: Annotated[Positive, Default(1)]
    output_width: Annotated[Positive, Default(1)]
    sampling_ratio: Annotated[NotNegative, Default(0)]
    spatial_scale: Annotated[Any, Default(1.0)]


@op("RoiAlign", since=10)
def roi_align_10(x, rois, batch_indices, **bins: Unpack[Bins]):
    """RoiAlign without the half-pixel shift of opset 16."""
    mode = "output_half_pixel"
    return roi_align(x, rois, batch_indices, coordinate_transformation_mode=mode, **bins)


@op("RoiAlign", since=16)
def roi_align(
    x,
    rois,
    batch_indices,
    *,
    coordinate_transformation_mode: Literal["half_pixel", "output_half_pixel"] = "half_pixel",
    mode: Literal["avg", "max"] = "avg",
    output_height: Positive = 1,
    output_width: Positive = 1,
    sampling_ratio: NotNegative = 0,
    spatial_scale=1.0,
):
    """Mean or maximum of bilinear samples in the bins of each region (x1, y1, x2, y2).

    The axes are independent of each other: the mean is a product with one matrix per axis, the
    maximum (of weighted corner pixels, as onnxruntime and the suite have it) is taken axis by
    axis. https://arxiv.org/abs/1703.06870
    """
    half_pixel = coordinate_transformation_mode == "half_pixel"
    x = jnp.asarray(x)
    height, width = x.shape[2:]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    edges = (rois.astype(wide) * spatial_scale - 0.5 * half_pixel).reshape(-1, 2, 2)
    length = edges[:, 1] - edges[:, 0]
    length = length if half_pixel else xp(rois).maximum(length, 1)

    def max_samples(axis, size, bins):
        """Bound the samples of a bin on the image, which are more than half a pixel apart."""
        if sampling_ratio:
            return sampling_ratio
        if is_known(rois):
            return max(1, int(np.ceil(np.max(length[:, axis], initial=0) / bins)))
        return 2 * size + 4

    samples = max_samples(1, height, output_height), max_samples(0, width, output_width)
    check_size((len(rois), x.shape[1], output_height, output_width), x.dtype)
    check_size((output_height, samples[0], 2, height), wide)
    check_size((output_width, samples[1], 2, width), wide)

    def pool(edge, extent, number):
        image = x.at[number].get(mode="fill").astype(wide)  # NaN for no image of the batch
        down = _samples(edge[0, 1], extent[1], output_height, height, samples[0], sampling_ratio)
        across = _samples(edge[0, 0], extent[0], output_width, width, samples[1], sampling_ratio)
        if mode == "avg":
            return jnp.einsum("ph,chw,qw->cpq", _mean(*down, height), image, _mean(*across, width))
        rows = _weighted_max(image, *across)
        return _weighted_max(rows.swapaxes(1, 2), *down).swapaxes(1, 2)

    number = jnp.asarray(index_of(batch_indices, len(x)))
    return _per_roi(pool, edges, length, number).astype(x.dtype)


def _samples(start, extent, bins, size, max_samples, ratio):
    """Compute the samples of every bin of a region along one axis.

    Args:
      start, extent: of the region, in pixels.
      bins: the number of bins.
      size: of the image.
      max_samples: a bound on the samples of a bin that can lie on the image.
      ratio: the samples of a bin; 0 for ceil(bin size).

    Returns:
      The two pixels around each sample and their weights (bins, max_samples, 2); which samples
      exist (bins, max_samples); the number of samples of a bin; and whether there are samples
      beyond `max_samples`, which lie off the image and are 0.
    """
    step = divide(extent, bins)
    count = jnp.asarray(ratio, extent.dtype) if ratio else jnp.ceil(step)
    spacing = divide(step, jnp.maximum(count, 1))
    begin = start + jnp.arange(bins) * step
    # the first sample that can lie at -1 or after it; none is skipped when all of them fit
    first = jnp.ceil(divide(-1 - begin, jnp.where(spacing > 0, spacing, 1)) - 0.5)
    first = lax.stop_gradient(jnp.clip(first, 0, jnp.maximum(count - max_samples, 0)))
    number = first[:, None] + jnp.arange(max_samples)
    exists = number < count
    at = begin[:, None] + (number + 0.5) * spacing
    inside = (at >= -1) & (at <= size)
    at = jnp.where(at > 0, at, 0)
    low = jnp.clip(lax.stop_gradient(jnp.floor(at)), 0, size - 1)
    part = jnp.where(low < size - 1, at - low, 0)
    weights = jnp.where((inside & exists)[..., None], jnp.stack([1 - part, part], -1), 0)
    pixels = jnp.stack([low, jnp.minimum(low + 1, size - 1)], -1).astype(jnp.int32)
    return pixels, weights, exists, count, count > max_samples


def _mean(pixels, weights, exists, count, rest, size):
    """Return the matrix (bins, size) that averages the samples of each bin."""
    hits = pixels[..., None] == jnp.arange(size)
    return jnp.where(hits, weights[..., None], 0).sum((1, 2)) / jnp.maximum(count, 1)


def _weighted_max(image, pixels, weights, exists, count, rest):
    """Return the maximum of the samples' weighted pixels on the last axis of (C, M, size), or 0."""
    values = image[..., pixels] * weights
    values = jnp.where(exists[..., None], values, -jnp.inf)
    y = lowering.first_max(values.reshape(*values.shape[:-2], -1), values.ndim - 2)
    return jnp.where(count > 0, jnp.where(rest, jnp.maximum(y, 0), y), 0)
