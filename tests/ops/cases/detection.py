"""NonMaxSuppression and ImageDecoder, whose results cannot be compiled."""

import io

import numpy as np
from PIL import Image

from tests.ops.case_table import Case

rng = np.random.default_rng(6)
CORNERS = rng.uniform(0, 1, (2, 6, 4)).astype(np.float32)
CENTRES = np.concatenate([rng.uniform(0, 1, (2, 6, 2)), rng.uniform(0.3, 0.6, (2, 6, 2))], -1)
SCORES = rng.uniform(0, 1, (2, 2, 6)).astype(np.float32)
LIMITS = [np.array([3]), np.array([0.3], np.float32), np.array([0.1], np.float32)]


def png():
    stream = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8)).save(stream, "PNG")
    return np.frombuffer(stream.getvalue(), np.uint8)


CONCRETE = {"grad": (), "jit": False, "vmap": False}
CASES = [
    Case("NonMaxSuppression", [CORNERS, SCORES, *LIMITS], **CONCRETE),
    Case(
        "NonMaxSuppression",
        [CENTRES.astype(np.float32), SCORES, *LIMITS],
        {"center_point_box": 1},
        id="centres",
        **CONCRETE,
    ),
    Case("ImageDecoder", [png()], **CONCRETE),
    Case("ImageDecoder", [png()], {"pixel_format": "BGR"}, id="bgr", **CONCRETE),
]
