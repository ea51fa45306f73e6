"""MaxRoiPool and RoiAlign."""

import numpy as np

from tests.ops.case_table import Case, run_onnxruntime

rng = np.random.default_rng(0)
X = (rng.permutation(2 * 3 * 6 * 7).reshape(2, 3, 6, 7) / 4 - 30).astype(np.float32)
BOXES = np.array([[0, 0, 5, 4], [1.3, 2.2, 4.6, 5.9], [-2, 1, 3, 9], [6, 5, 6.2, 5.1]], np.float32)
IMAGE = np.array([0, 1, 1, 0], np.int64)
ROIS = np.concatenate([IMAGE[:, None], BOXES], 1).astype(np.float32)
SHAPE = {"output_height": 2, "output_width": 3, "spatial_scale": 0.9}


def case(op, inputs, attributes, **rest):
    """Against onnxruntime, which has these up to opset 21; 22 only adds an element type."""

    def expected(*values):
        model = Case(op, values, attributes).model(min(21, rest.get("until") or 21))
        return run_onnxruntime(model, {f"x{i}": v for i, v in enumerate(values)})

    return Case(op, inputs, attributes, expected=expected, grad=(0,), order=1, rtol=1e-4, **rest)


CASES = [
    case("MaxRoiPool", [X, ROIS], {"pooled_shape": [2, 3]}),
    case("MaxRoiPool", [X, ROIS], {"pooled_shape": [3, 2], "spatial_scale": 0.5}, id="scaled"),
    *(
        case(
            "RoiAlign",
            [X, BOXES, IMAGE],
            SHAPE | {"mode": mode, "sampling_ratio": ratio},
            since=since,
            until=until,
            id=f"{mode}_{ratio}",
        )
        for mode in ("avg", "max")
        for ratio in (0, 2)
        for since, until in ((10, 15), (16, None))
    ),
    case(
        "RoiAlign",
        [X, BOXES, IMAGE],
        SHAPE | {"coordinate_transformation_mode": "output_half_pixel"},
        since=16,
        id="output_half_pixel",
    ),
]
