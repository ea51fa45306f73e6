"""MaxRoiPool and RoiAlign."""

import numpy as np

from tests.cases import Case

rng = np.random.default_rng(0)
X = (rng.permutation(2 * 3 * 6 * 7).reshape(2, 3, 6, 7) / 4 - 30).astype(np.float32)
BOXES = np.array([[0, 0, 5, 4], [1.3, 2.2, 4.6, 5.9], [-2, 1, 3, 9], [6, 5, 6.2, 5.1]], np.float32)
IMAGE = np.array([0, 1, 1, 0], np.int64)
ROIS = np.concatenate([IMAGE[:, None], BOXES], 1).astype(np.float32)
SHAPE = {"output_height": 2, "output_width": 3, "spatial_scale": 0.9}

CASES = [
    Case("MaxRoiPool", [X, ROIS], {"pooled_shape": [2, 3]}, expected="ort", grad=(0,), order=1),
    Case(
        "MaxRoiPool",
        [X, ROIS],
        {"pooled_shape": [3, 2], "spatial_scale": 0.5},
        expected="ort",
        grad=(0,),
        order=1,
        id="scaled",
    ),
    *(
        Case(
            "RoiAlign",
            [X, BOXES, IMAGE],
            SHAPE | {"mode": mode, "sampling_ratio": ratio},
            expected="ort",
            order=1,
            grad=(0,),
            rtol=1e-4,
            id=f"{mode}_{ratio}",
        )
        for mode in ("avg", "max")
        for ratio in (0, 2)
    ),
    Case(
        "RoiAlign",
        [X, BOXES, IMAGE],
        SHAPE | {"coordinate_transformation_mode": "output_half_pixel"},
        since=16,
        expected="ort",
        order=1,
        grad=(0,),
        rtol=1e-4,
        id="output_half_pixel",
    ),
]
