"""A fingerprint of examples, to refuse other data when a run resumes."""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_BYTES = 2**28
"""The most bytes of an array that its checksum reads; of a larger one it reads every k-th row."""


def identity(rows: np.ndarray, columns: Iterable[np.ndarray]) -> dict[str, Any]:
    """Return the number, dtypes and checksums of examples, as values of JSON.

    Args:
      rows: the indices of the examples that are used.
      columns: inputs, targets and weights.
    """
    columns = [np.asarray(column) for column in columns]
    return {
        "examples": len(rows),
        "arrays": [f"{x.dtype}{[*x.shape[1:]]}" for x in columns],
        "checksum": [_checksum(rows), *map(_checksum, columns)],
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the first difference between two results of `identity`, for an error."""
    if before["examples"] != now["examples"]:
        return f"{before['examples']} examples, and now there are {now['examples']}"
    if before["arrays"] != now["arrays"]:
        return f"examples of {', '.join(before['arrays'])}, and now {', '.join(now['arrays'])}"
    return "examples with other values"


def _checksum(x: np.ndarray) -> int:
    """Return the CRC-32 of an array, or of evenly spaced rows of a large one."""
    step = max(1, -(-x.nbytes // _BYTES))
    content: Any = np.ascontiguousarray(x[::step]).reshape(-1).view(np.uint8)
    return zlib.crc32(content)
