"""Create axes of matplotlib, an optional dependency."""

from typing import Any

from jaxonnx.errors import Error


def import_pyplot() -> Any:
    """Return `matplotlib.pyplot`.

    Raises:
      Error: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise Error("plotting needs matplotlib: pip install 'jaxonnx[plot]'") from error
    return pyplot


def new_axes(axes: Any) -> Any:
    """Return the axes to draw on, new ones by default."""
    if axes is not None:
        return axes
    return import_pyplot().subplots(figsize=(7, 4), layout="constrained")[1]
