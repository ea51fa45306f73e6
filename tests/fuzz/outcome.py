"""How a case ended."""

from typing import NamedTuple


class Outcome(NamedTuple):
    """How a case ended.

    Attributes:
      kind: "refused", "ran" or "finding"; of those that were compared also "same", "both refuse",
        "explained" (a row of `tests.fuzz.compare.ROWS` has the reason), "we refuse", "they refuse"
        or "differ".
      bucket: what cases of one cause have in common.
      detail: for people.
    """

    kind: str
    bucket: str = ""
    detail: str = ""
