"""NonMaxSuppression and ImageDecoder."""

import io

import numpy as np
import pytest
from PIL import Image

import jaxonnx.ops  # noqa: F401 - registers the operators
from jaxonnx.errors import NodeError
from jaxonnx.registry import lookup

decode = lookup("", "ImageDecoder", 20)
BOXES = np.array([[[0, 0, 1, 1], [1, 1, 0, 0], [0, 0.5, 1, 1.5], [2, 2, 3, 3]]], np.float32)
SCORES = np.array([[[0.5, 0.5, 0.9, 0.1]]], np.float32)


def suppress(*inputs, opset=11, **attributes):
    return lookup("", "NonMaxSuppression", opset)(*inputs, **attributes).tolist()


@pytest.mark.parametrize("opset", [10, 11])
def test_equal_scores_keep_the_first_box(opset):
    kept = suppress(BOXES, SCORES, np.array([9]), np.array([0.5], np.float32), opset=opset)
    assert kept == [[0, 0, 2], [0, 0, 0], [0, 0, 3]]


def test_limits():
    nine, half = np.array(9), np.array(0.3, np.float32)
    assert suppress(BOXES, SCORES) == []
    assert suppress(BOXES, SCORES, np.array(1), half) == [[0, 0, 2]]
    assert suppress(BOXES, SCORES, nine, half, np.array(0.1, np.float32)) == [[0, 0, 2]]


def test_centres():
    boxes = np.array([[[0.5, 0.5, 1, 1], [0.5, 0.6, 1, 1], [5, 5, 1, 1]]], np.float32)
    scores = np.array([[[0.1, 0.2, 0.3]]], np.float32)
    kept = suppress(boxes, scores, np.array(9), np.array(0.5, np.float32), center_point_box=1)
    assert kept == [[0, 0, 2], [0, 0, 1]]


def test_what_does_not_fit():
    with pytest.raises(NodeError, match=r"must be \(batch, (n, 4|classes, n)\)"):
        suppress(BOXES[..., :3], SCORES)
    with pytest.raises(NodeError, match=r"must be \(batch, (n, 4|classes, n)\)"):
        suppress(BOXES[:0], SCORES)
    with pytest.raises(NodeError, match="center_point_box is 5"):
        suppress(BOXES, SCORES, center_point_box=5)


def encoded(pixels, name):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, name)
    return np.frombuffer(stream.getvalue(), np.uint8)


def test_decoding():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    np.testing.assert_array_equal(decode(encoded(pixels, "PNG")), pixels)
    np.testing.assert_array_equal(
        decode(encoded(pixels, "BMP"), pixel_format="BGR"), pixels[:, :, ::-1]
    )
    grey = decode(encoded(pixels[:, :, 0].copy(), "PNG"), pixel_format="Grayscale")
    np.testing.assert_array_equal(grey, pixels[:, :, :1])
    assert decode(np.zeros(9, np.uint8)).shape == (0, 0, 3)
    with pytest.raises(NodeError, match=r"must be \(bytes\)"):
        decode(encoded(pixels, "PNG")[None])
    with pytest.raises(NodeError, match="pixel_format"):
        decode(encoded(pixels, "PNG"), pixel_format="CMYK")
