"""Operators of other packages, by their entry points (`jaxonnx/docs/extending.md`).

The modules are imported when a file has an operator that jaxonnx lacks, so that others cost
nothing.
"""

import functools
from importlib.metadata import entry_points

from jaxonnx.errors import UnsupportedError

GROUP = "jaxonnx.operators"


@functools.cache
def load_plugins() -> bool:
    """Import the modules of all entry points, once; return whether there are any.

    Raises:
      UnsupportedError: a module fails to import, or an entry point names none; the message names
        its package.
    """
    points = entry_points(group=GROUP)
    for point in points:
        try:
            point.load()
        except (ImportError, AttributeError, TypeError, ValueError, LookupError) as error:
            package = point.dist.name if point.dist is not None else "an unknown package"
            raise UnsupportedError(
                f"the operators of the package '{package}' ({point.value}) cannot be loaded: "
                f"{type(error).__name__}: {error}; repair or uninstall it"
            ) from error
    return bool(points)
