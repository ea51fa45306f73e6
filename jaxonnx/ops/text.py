"""Strings: tensors of them are NumPy arrays of dtype object, and nothing on them is compiled."""

import re
from typing import Literal

import numpy as np

from jaxonnx._limits import check_size, check_time
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import INDEX
from jaxonnx.registry import op


def _each(function, x, dtype):
    """Apply `function` to every element of x; the results are an array of `dtype`."""
    check_size(x.shape, object, host=True)
    y = np.empty(x.shape, dtype)
    for i in np.ndindex(x.shape):
        check_time()
        y[i] = function(x[i])
    return y


@op("StringConcat", since=20, dynamic=True)
def string_concat(x, y):
    check_size(np.broadcast_shapes(x.shape, y.shape), object, host=True)
    return np.asarray(x + y, object)


@op("StringSplit", since=20, dynamic=True)
def string_split(x, *, delimiter=None, maxsplit=None):
    """The substrings along a new last axis, padded with "", and how many there are."""
    limit = -1 if maxsplit is None else maxsplit
    parts = _each(lambda s: s.split(delimiter or None, limit), x, object)
    counts = _each(len, parts, INDEX)
    shape = (*x.shape, int(counts.max(initial=0)))
    check_size(shape, object, host=True)
    padded = np.full(shape, "", object)
    for i in np.ndindex(x.shape):
        padded[i][: counts[i]] = parts[i]
    return padded, counts


@op("RegexFullMatch", since=20, dynamic=True)
def regex_full_match(x, *, pattern=None):
    r"""Check whether each string as a whole matches `pattern`, in the syntax of RE2.

    Python's `re` does the work. What only one of the two can read (\pN, \C and \Q...\E;
    lookaround, back references and atomic groups) is an error.
    """
    if pattern is None:
        raise NodeError("the attribute 'pattern' is missing")
    try:
        regex = re.compile(_from_re2(pattern), re.ASCII)  # RE2's \d, \w and \b know ASCII only
    except re.error as error:
        raise NodeError(f"the pattern {pattern!r} cannot be read: {error}") from error
    return _each(lambda s: regex.fullmatch(s) is not None, x, bool)


_SPACE = r"\t\n\f\r "
_RE2_TOKEN = re.compile(r"\[:\w+:\]|\[\^?\]?|\(\?(?:[=!>(]|<[=!]|P=)|\\.|.", re.DOTALL)
_POSIX = {
    "[:alnum:]": "0-9A-Za-z",
    "[:alpha:]": "A-Za-z",
    "[:ascii:]": r"\x00-\x7F",
    "[:blank:]": r"\t ",
    "[:cntrl:]": r"\x00-\x1F\x7F",
    "[:digit:]": "0-9",
    "[:graph:]": "!-~",
    "[:lower:]": "a-z",
    "[:print:]": " -~",
    "[:punct:]": r"!-/:-@\[-`{-~",
    "[:space:]": r"\t\n\v\f\r ",
    "[:upper:]": "A-Z",
    "[:word:]": "0-9A-Za-z_",
    "[:xdigit:]": "0-9A-Fa-f",
}


def _from_re2(pattern):
    """Translate the pattern to the syntax of `re`."""
    tokens, inside = [], False
    for token in _RE2_TOKEN.findall(pattern):
        if token.startswith("(?") or (token[0] == "\\" and token[1:] in "123456789"):
            raise NodeError(f"the pattern {pattern!r} cannot be read: RE2 has no {token!r}")
        if inside:
            inside = token != "]"
            token = _POSIX.get(token, _SPACE if token == r"\s" else token)
            tokens.append(token.replace("[", r"\[") if token.startswith("[") else token)
        else:
            inside = token.startswith("[")
            replaced = {r"\z": r"\Z", r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"}
            tokens.append(replaced.get(token, token))
    return "".join(tokens)


@op("StringNormalizer", since=10, dynamic=True, shapes="x (C) | (1, C)")
def string_normalizer(
    x,
    *,
    case_change_action: Literal["NONE", "LOWER", "UPPER"] = "NONE",
    is_case_sensitive=0,
    locale=None,
    stopwords=None,
):
    """x [C] or [1, C] without its stop words, in one case; a single "" if nothing is left.

    Unicode has one mapping of case for all languages but a few; `locale` is not needed.
    """
    del locale
    cases = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}
    compared = str if is_case_sensitive else str.lower
    stop = {compared(word) for word in stopwords or ()}
    words = [s for s in x.ravel() if compared(s) not in stop]
    y = np.array([cases[case_change_action](s) for s in words] or [""], object)
    return y.reshape((1,) * (x.ndim - 1) + y.shape)
