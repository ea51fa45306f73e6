"""AffineGrid and GridSample."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(4)
IMAGE = rng.normal(size=(2, 2, 3, 4)).astype(np.float32)
VOLUME = rng.normal(size=(1, 2, 2, 3, 3)).astype(np.float32)
FLOW = rng.uniform(-1.4, 1.4, (2, 3, 2, 2)).astype(np.float32)
FLOW_3D = rng.uniform(-1.3, 1.3, (1, 2, 2, 2, 3)).astype(np.float32)
LINE, FLOW_1D = IMAGE[:, :, 0], FLOW[:, 0, :, :1]

CASES = [
    Case(
        "AffineGrid",
        [rng.normal(size=(2, 2, 3)).astype(np.float32), np.array([2, 3, 4, 5])],
        {"align_corners": corners},
        id=f"2d_{corners}",
    )
    for corners in (0, 1)
]
CASES += [
    Case(
        "AffineGrid",
        [rng.normal(size=(1, 3, 4)).astype(np.float32), np.array([1, 1, 2, 3, 4])],
        id="3d",
    ),
]
# The coordinate at which a mode changes its taps is a kink: one order of derivatives.
CASES += [
    Case(
        "GridSample",
        [IMAGE, FLOW],
        {"mode": mode, "padding_mode": padding, "align_corners": corners},
        since=since,
        until=until,
        order=1,
        expected="ort",
        id=f"{mode}_{padding}_{corners}",
    )
    for modes, since, until in [
        (("bilinear", "bicubic", "nearest"), 16, 19),
        (("linear", "cubic", "nearest"), 20, None),
    ]
    for mode in modes
    for padding, corners in [("zeros", 0), ("border", 1), ("reflection", 0), ("reflection", 1)]
]
CASES += [
    Case("GridSample", [VOLUME, FLOW_3D], since=20, order=1, id="3d"),
    Case("GridSample", [VOLUME, FLOW_3D], {"mode": "nearest"}, since=20, order=1, id="3d_nearest"),
    Case("GridSample", [LINE, FLOW_1D], {"mode": "cubic"}, since=20, order=1, id="1d_cubic"),
]
