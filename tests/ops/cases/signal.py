"""Fourier transforms, windows, the mel scale."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(5)
REAL = rng.normal(size=(2, 6, 4, 1)).astype(np.float32)
COMPLEX = rng.normal(size=(2, 6, 4, 2)).astype(np.float32)
SIGNAL = rng.normal(size=(2, 10, 1)).astype(np.float32)
WINDOW = np.hanning(6)[1:-1].astype(np.float32)


def scalar(value, dtype=np.int64):
    return np.array(value, dtype)


CASES = [
    case
    for since, until, rest, axis in [(17, 19, [], {"axis": 1}), (20, None, [scalar(1)], {})]
    for case in (
        Case("DFT", [REAL, None, *rest], axis, since=since, until=until, id="real"),
        Case("DFT", [COMPLEX, None, *rest], axis, since=since, until=until, id="complex"),
        Case(
            "DFT",
            [REAL, scalar(8), *rest],
            {"onesided": 1, **axis},
            since=since,
            until=until,
            id="onesided_padded",
        ),
        Case(
            "DFT",
            [COMPLEX, scalar(5), *rest],
            {"inverse": 1, **axis},
            since=since,
            until=until,
            id="inverse_cut",
        ),
        Case(
            "DFT",
            [COMPLEX, None, *rest],
            {"inverse": 1, "onesided": 1, **axis},
            since=since,
            until=until,
            id="inverse_onesided",
        ),
    )
]
CASES += [
    Case("DFT", [COMPLEX], since=20, id="last_axis"),
    Case("STFT", [SIGNAL, scalar(3), WINDOW]),
    Case("STFT", [SIGNAL, scalar(2), None, scalar(4)], {"onesided": 0}, id="rectangular"),
    Case(
        "STFT",
        [rng.normal(size=(1, 8, 2)).astype(np.float32), scalar(2), WINDOW, scalar(4)],
        {"onesided": 0},
        id="complex",
    ),
]
CASES += [
    Case(name, [scalar(size)], attributes, id=f"{size}_{attributes.get('periodic', 1)}")
    for name in ("HannWindow", "HammingWindow", "BlackmanWindow")
    for size, attributes in [(8, {}), (7, {"periodic": 0}), (5, {"output_datatype": 11})]
]
CASES += [
    Case(
        "MelWeightMatrix",
        [scalar(4), scalar(16), scalar(8000), scalar(0, np.float32), scalar(4000, np.float32)],
    ),
    Case(
        "MelWeightMatrix",
        [scalar(8), scalar(16), scalar(8192), scalar(0, np.float32), scalar(4096, np.float32)],
        {"output_datatype": 11},
        id="float64",
    ),
]
