"""Operators on concrete values around detectors: NonMaxSuppression, ImageDecoder."""

import io
import struct
from typing import Literal

import numpy as np

from jaxonnx._limits import check_size, check_time
from jaxonnx.errors import NodeError
from jaxonnx.registry import op

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
