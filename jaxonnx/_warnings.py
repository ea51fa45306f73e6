"""Warnings that point to the line of the user's program."""

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called the package, however deep in it the warning arises.

    The frames in between may be those of JAX or of a user's function, and the stack of a thread has
    no line of the user's: there it is the line that entered the package.
    """
    frame = entered = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            entered = frame.f_back or frame
        frame = frame.f_back
    place = entered.f_globals
    warnings.warn_explicit(
        message,
        category,
        entered.f_code.co_filename,
        entered.f_lineno,
        place.get("__name__", "<unknown>"),
        place.setdefault("__warningregistry__", {}),
    )
