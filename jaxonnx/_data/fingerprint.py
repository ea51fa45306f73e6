"""A fingerprint of examples, to refuse other data when a run resumes."""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_BYTES = 2**28
"""Of each array, what is read for its checksum; of longer ones these are rows all over it."""


def identity(rows: np.ndarray, columns: Iterable[np.ndarray]) -> dict[str, Any]:
    """Return number, types and a checksum of examples, as JSON holds them.

    Args:
      rows: which of the examples.
      columns: inputs, targets and weights.
    """
    columns = [np.asarray(column) for column in columns]
    return {
        "examples": len(rows),
        "arrays": [f"{x.dtype}{[*x.shape[1:]]}" for x in columns],
        "checksum": [_checksum(rows), *map(_checksum, columns)],
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words what differs between two identities."""
    if before["examples"] != now["examples"]:
        return f"{before['examples']} examples, and now there are {now['examples']}"
    if before["arrays"] != now["arrays"]:
        return f"examples of {', '.join(before['arrays'])}, and now {', '.join(now['arrays'])}"
    return "examples with other numbers in them"


def _checksum(x: np.ndarray) -> int:
    """Return the CRC of an array, or of rows that are evenly spread over a large one."""
    least = -(-x.nbytes // _BYTES)
    numbers: Any = np.ascontiguousarray(x[:: max(1, least)]).reshape(-1).view(np.uint8)
    return zlib.crc32(numbers)
