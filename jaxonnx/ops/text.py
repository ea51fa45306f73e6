"""Strings, which are NumPy arrays of dtype object, and n-grams of tokens.

Nothing on strings is compiled. TfIdfVectorizer has the n-grams of its pool as a trie that every
position of the input walks down: a step is one lookup in the sorted edges for all positions at
once, so that integer inputs are compiled and the work grows only with the logarithm of the pool.
Words are counted by NumPy, whatever their shape is.
"""

import re
from itertools import pairwise
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx._constraints import NotNegative
from jaxonnx._limits import check_size, check_time
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import INDEX, table
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


UNROLLED = 16
"""The most skips for which the walks are unrolled in a program."""


class _Trie(NamedTuple):
    tokens: dict
    """The number of each token that occurs in the pool."""
    edges: dict
    """Node from (node, token number); node 0 is the root."""
    grams: dict
    """The number of the n-gram that ends at a node."""
    longest: int
    """The tokens of the longest n-gram."""


@op("TfIdfVectorizer", since=9, shapes="x (C) | (N, C)")
def tfidf_vectorizer(
    x,
    *,
    max_gram_length,
    max_skip_count: NotNegative,
    min_gram_length,
    mode: Literal["TF", "IDF", "TFIDF"],
    ngram_counts,
    ngram_indexes,
    pool_int64s=None,
    pool_strings=None,
    weights=None,
):
    """Counts [N, V] of the pool's n-grams in x [N, C], or [V] in x [C], weighted by `mode`.

    The tokens of an n-gram stand skip + 1 apart, for each skip from 0 to max_skip_count; single
    tokens count once. `weights` are in the order of the pool, as the specification says, whatever
    columns the n-grams have.
    """
    if (pool_int64s is None) == (pool_strings is None):
        raise NodeError("exactly one of pool_int64s and pool_strings must be given")
    pool = pool_int64s if pool_strings is None else pool_strings
    lengths = (min_gram_length, max_gram_length)
    trie = _trie(pool, ngram_counts, len(ngram_indexes), lengths)
    rows = x if x.ndim == 2 else x[None]
    # the numbers of the tokens of x; those that are not in the pool get one more
    if x.dtype == object:
        numbers = [trie.tokens.get(token, len(trie.tokens)) for token in rows.ravel()]
        tokens = np.reshape(numbers, rows.shape).astype(np.int32)
    else:
        tokens = _lookup(trie.tokens, rows, len(trie.tokens))
    counts = _count(tokens, trie, len(ngram_indexes), max_skip_count)
    scores = (counts > 0 if mode == "IDF" else counts).astype(np.float32)
    if mode != "TF" and weights:
        scores = scores * np.asarray(weights, np.float32)
    xp = _namespace(tokens)
    check_size((len(tokens), max(ngram_indexes) + 1), np.float32)
    y = xp.zeros((len(tokens), max(ngram_indexes) + 1), np.float32)
    y = jnp.asarray(_add_at(y, (slice(None), np.asarray(ngram_indexes)), scores))
    return y if x.ndim == 2 else y[0]


def _namespace(x):
    return np if isinstance(x, np.ndarray) else jnp


def _add_at(x, index, values):
    if isinstance(x, np.ndarray):
        np.add.at(x, index, values)
        return x
    return x.at[index].add(values)


def _trie(pool, ngram_counts, size, lengths) -> _Trie:
    """Build a trie of the n-grams of the pool whose length is within `lengths`.

    Args:
      pool: the tokens of all n-grams: first those of the 1-grams, then of the 2-grams, ...
      ngram_counts: where the n-grams of each n begin in the pool.
      size: the number of n-grams in `ngram_indexes`.
      lengths: the least and the greatest n.
    """
    starts = [*ngram_counts, len(pool)]
    if starts != sorted(starts) or starts[0] < 0:
        raise NodeError(
            f"ngram_counts {[*ngram_counts]} must rise from 0 to the size of the pool, {len(pool)}"
        )
    for n, (begin, end) in enumerate(pairwise(starts), start=1):
        if (end - begin) % n:
            raise NodeError(
                f"ngram_counts {[*ngram_counts]} give {end - begin} tokens to n-grams of {n}"
            )
    grams = [
        tuple(pool[i : i + n])
        for n, (begin, end) in enumerate(pairwise(starts), start=1)
        for i in range(begin, end, n)
    ]
    if len(grams) != size:
        raise NodeError(f"the pool has {len(grams)} n-grams, ngram_indexes {size}")
    grams = {i: gram for i, gram in enumerate(grams) if lengths[0] <= len(gram) <= lengths[1]}
    trie = _Trie({}, {}, {}, max(map(len, grams.values()), default=0))
    for i, gram in grams.items():
        node = 0
        for token in gram:
            edge = (node, trie.tokens.setdefault(token, len(trie.tokens)))
            node = trie.edges.setdefault(edge, len(trie.edges) + 1)
        trie.grams[node] = i
    return trie


def _lookup(entries: dict, x, missing):
    """Return the integer that `entries` has for each integer of x, or `missing`."""
    xp = _namespace(x)
    keys, values = np.array(sorted(entries.items()), np.int64).reshape(-1, 2).T
    if not len(keys):
        return xp.full(x.shape, missing)
    keys, values = xp.asarray(table(keys)), xp.asarray(table(values))
    place = xp.clip(xp.searchsorted(keys, x), 0, len(keys) - 1)
    return xp.where(keys[place] == x, values[place], missing)


def _count(tokens, trie: _Trie, size, most_skips):
    """Count the n-grams of the pool in rows of token numbers [N, C], with up to `most_skips` skips.

    All positions walk the trie at once; a walk counts the n-gram of each node that it reaches.

    Returns:
      int32[N, size].
    """
    rows, length = tokens.shape
    # an edge (node, token) as one integer, which a sorted table can look up
    base = len(trie.tokens) + 1
    edges = {node * base + token: child for (node, token), child in trie.edges.items()}
    dead = len(trie.edges) + 1  # where a walk goes that leaves the trie
    gram_of = np.full(dead + 1, size)  # one more than there are, for nodes where none ends
    gram_of[list(trie.grams)] = list(trie.grams.values())
    xp = _namespace(tokens)
    gram_of, row = xp.asarray(gram_of), np.arange(rows)[:, None]
    single = _lookup(edges, tokens, dead)
    counts = _add_at(xp.zeros((rows, size + 1), np.int32), (row, gram_of[single]), 1)

    def walk(skip, counts):
        node = single
        for n in range(1, trie.longest):
            at = np.arange(length) + n * (skip + 1)
            token = tokens[:, xp.minimum(at, length - 1)]
            token = xp.where(at < length, token, len(trie.tokens))  # no n-gram has it
            node = _lookup(edges, node * base + token, dead)
            counts = _add_at(counts, (row, gram_of[node]), 1)
        return counts

    # beyond these skips no second token of an n-gram is in the row
    skips = max(min(most_skips + 1, length - 1), 0) if trie.longest > 1 else 0
    if xp is jnp and skips:
        counts = lax.fori_loop(0, skips, walk, counts, unroll=skips <= UNROLLED)
    for skip in range(skips if xp is np else 0):
        check_time()
        counts = walk(skip, counts)
    return counts[:, :size]
