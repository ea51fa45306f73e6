"""Cases of a sweep, of which most are deep."""

from collections.abc import Iterable

import pytest


def sweep(cases: Iterable, *chosen: int | str) -> list:
    """Return the cases as parameters of a test: the chosen ones, and all others marked as deep.

    Args:
      chosen: places of cases, or cases that are names.
    """
    parameters = []
    for place, case in enumerate(cases):
        is_chosen = place in chosen or (isinstance(case, str) and case in chosen)
        marks = () if is_chosen else pytest.mark.deep
        values = case if type(case) is tuple else (case,)
        parameters.append(pytest.param(*values, marks=marks))
    return parameters
