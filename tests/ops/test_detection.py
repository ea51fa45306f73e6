"""NonMaxSuppression and ImageDecoder."""

import io

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from PIL import Image

import jaxonnx
import jaxonnx.ops
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
    with pytest.raises(NodeError, match=r"center_point_box must be .*got 5"):
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


def test_no_limit_of_boxes():
    """2**63 - 1, as torchvision's SSD has it."""
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[1, 6, 4] boxes, float[1, 2, 6] scores) => (int64[n, 3] y)
    <int64[1] count = {9223372036854775807}, float[1] half = {0.5}> {
      y = NonMaxSuppression(boxes, scores, count, half)
    }""")
    random = np.random.default_rng(0)
    corners = np.sort(random.random((2, 1, 6, 2)), 0)
    values = [np.concatenate([*corners], -1), random.random((1, 2, 6))]
    boxes, scores = (value.astype(np.float32) for value in values)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    (expected,) = session.run(None, {"boxes": boxes, "scores": scores})
    with pytest.warns(UserWarning, match="64-bit outputs"):
        model = jaxonnx.load(proto)
    np.testing.assert_array_equal(model(boxes, scores), expected)
    assert len(expected) > 2
