"""Resize and Upsample."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(3)
X = rng.normal(size=(1, 2, 4, 6)).astype(np.float32)
ENLARGE = np.array([1, 1, 1.5, 2], np.float32)
REDUCE = np.array([1, 1, 0.6, 0.5], np.float32)
NOTHING = np.zeros(0, np.float32)
SIZES = np.array([1, 2, 3, 8], np.int64)
ROI = np.array([0, 0, 0.2, 0.1, 1, 1, 0.9, 1.2], np.float32)


def resize(scales=None, sizes=None, *, roi=None, x=X, since=11, **options):
    """Opset 11 demands all of roi and scales, later ones take them as absent."""
    until = options.pop("until", None)
    name = options.pop("id")
    expected = options.pop("expected", "reference")
    inputs = [x, NOTHING if roi is None else roi, NOTHING if scales is None else scales]
    if sizes is not None:
        inputs.append(sizes)
    return Case("Resize", inputs, options, since=since, until=until, expected=expected, id=name)


def nearest_10(x, scales):
    """Before opset 11: coordinates j / scale, rounded down when enlarging and up otherwise."""
    for axis, scale in enumerate(scales.astype(np.float64)):
        at = np.arange(int(x.shape[axis] * scale)) / scale
        index = (np.ceil if scale < 1 else np.floor)(at).astype(int)
        x = x.take(np.minimum(index, x.shape[axis] - 1), axis)
    return x


def linear_10(x, scales):
    for axis, scale in enumerate(scales.astype(np.float64)):
        at = np.arange(int(x.shape[axis] * scale)) / scale
        line = np.arange(x.shape[axis])
        x = np.apply_along_axis(lambda v, at=at, line=line: np.interp(at, line, v), axis, x)
    return x.astype(np.float32)


CASES = [
    Case(
        "Upsample",
        [X],
        {"height_scale": 1.5, "width_scale": 2.0},
        until=1,
        expected=lambda x: nearest_10(x, ENLARGE),
    ),
    Case(
        "Upsample",
        [X],
        {"height_scale": 1.5, "width_scale": 2.0, "mode": "bilinear"},
        until=1,
        expected=lambda x: linear_10(x, ENLARGE),
        id="bilinear",
    ),
    Case(
        "Upsample",
        [X],
        {"scales": [1.0, 1.0, 1.5, 2.0], "mode": "linear"},
        since=7,
        until=8,
        expected=lambda x: linear_10(x, ENLARGE),
    ),
    Case("Upsample", [X, ENLARGE], since=9, expected=nearest_10, id="nearest"),
    Case("Upsample", [X, ENLARGE], {"mode": "linear"}, since=9, expected=linear_10, id="linear"),
    Case("Resize", [X, ENLARGE], since=10, until=10, expected=nearest_10, id="enlarge_10"),
    Case("Resize", [X, REDUCE], since=10, until=10, expected=nearest_10, id="reduce_10"),
    Case(
        "Resize",
        [X, ENLARGE],
        {"mode": "linear"},
        since=10,
        until=10,
        expected=linear_10,
        id="linear_10",
    ),
]
CASES += [
    resize(
        scales, mode=mode, coordinate_transformation_mode=coordinates, id=f"{mode}_{coordinates}"
    )
    for mode, coordinates, scales in [
        ("nearest", "half_pixel", ENLARGE),
        ("nearest", "asymmetric", REDUCE),
        ("linear", "half_pixel", ENLARGE),
        ("linear", "pytorch_half_pixel", REDUCE),
        ("linear", "align_corners", ENLARGE),
        ("linear", "asymmetric", ENLARGE),
        ("cubic", "half_pixel", ENLARGE),
        ("cubic", "align_corners", REDUCE),
    ]
]
CASES += [
    resize(None, SIZES, nearest_mode=rule, id=rule)
    for rule in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
]
CASES += [
    resize(
        ENLARGE,
        mode="linear",
        coordinate_transformation_mode="tf_half_pixel_for_nn",
        until=11,
        expected=lambda x, *_: (
            np.stack(
                [
                    [
                        np.interp((np.arange(6) + 0.5) / 1.5, np.arange(4), column)
                        for column in np.array(
                            [
                                np.interp((np.arange(12) + 0.5) / 2, np.arange(6), row)
                                for row in image
                            ]
                        ).T
                    ]
                    for image in x[0]
                ]
            )
            .swapaxes(1, 2)[None]
            .astype(np.float32)
        ),
        id="tf_half_pixel_for_nn",
    ),
    resize(None, SIZES, mode="linear", id="sizes"),
    resize(None, SIZES, mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1, id="exclude_outside"),
    resize(
        None,
        SIZES,
        roi=ROI,
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=3.0,
        id="crop",
    ),
    resize(REDUCE, mode="linear", antialias=1, since=18, id="antialias_linear"),
    resize(None, SIZES, mode="cubic", antialias=1, since=18, id="antialias_cubic"),
    resize(
        None,
        np.array([5, 5], np.int64),
        axes=[3, 2],
        mode="linear",
        keep_aspect_ratio_policy="not_larger",
        since=18,
        id="not_larger",
    ),
    resize(
        None,
        np.array([7, 7], np.int64),
        axes=[2, 3],
        mode="nearest",
        keep_aspect_ratio_policy="not_smaller",
        since=18,
        id="not_smaller",
    ),
    resize(
        REDUCE,
        mode="linear",
        coordinate_transformation_mode="half_pixel_symmetric",
        since=19,
        id="half_pixel_symmetric",
    ),
    resize(ENLARGE, x=np.arange(48).reshape(1, 2, 4, 6), mode="linear", id="int64"),
]
