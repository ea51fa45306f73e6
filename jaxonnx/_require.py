"""Check arguments: "batch must be 'any' or None, got 8"."""

import ast
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Unpack, get_origin

import numpy as np

from jaxonnx.errors import InputError

_Kind = tuple[str, Callable[[Any], bool]]


def _is_a(*types: type) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, types) and (bool in types or not isinstance(x, bool))


def _is_key(x: Any) -> bool:
    import jax
    import jax.numpy as jnp  # not needed by `import jaxonnx`

    dtype = getattr(x, "dtype", np.dtype(bool))
    return dtype == np.uint32 or jnp.issubdtype(dtype, jax.dtypes.prng_key)


def takes_steps(x: Any) -> bool:
    """Check whether this is a function of the number of updates of a run, `steps`."""
    return inspect.isfunction(x) and [*inspect.signature(x).parameters] == ["steps"]


def _is_transformation(x: Any) -> bool:
    return all(callable(getattr(x, part, None)) for part in ("init", "update"))


def _with_article(name: str) -> str:
    return f"{'an' if re.match('[AEIOaeio]|nd', name) else 'a'} {name}"  # uint8, ndarray


_is_integer = _is_a(int, np.integer)
_is_iterable = _is_a(Iterable)
_LIST: _Kind = (
    "a list",
    lambda x: _is_iterable(x) and not isinstance(x, str | bytes) and getattr(x, "ndim", 1) > 0,
)
_KINDS: dict[str, _Kind] = {
    "bool": ("True or False", _is_a(bool, np.bool_)),
    "int": ("an integer", _is_integer),
    "float": ("a number", lambda x: (_is_a(Real)(x) and x == x) or getattr(x, "ndim", 1) == 0),
    "str": ("a string", _is_a(str)),
    "bytes": ("bytes", _is_a(bytes)),
    "PathLike": ("a path", _is_a(os.PathLike)),
    "Pattern": ("a regular expression", _is_a(re.Pattern)),
    "Mapping": ("a dict", _is_a(Mapping)),
    "Callable": ("a function", callable),
    "Array": ("an array", lambda x: hasattr(x, "dtype")),
    "Key": ("a key (jax.random.key(0))", _is_key),
    "GradientTransformation": ("an optax transformation", lambda x: _is_transformation(x)),
    "Optimizer": ("an optax transformation", lambda x: _is_transformation(x) or takes_steps(x)),
    "tuple": (
        "a pair of axes",
        lambda x: isinstance(x, tuple | list) and [*map(_is_integer, x)] == [True, True],
    ),
    "None": ("None", lambda x: x is None),
} | {
    name: (_with_article(name), lambda x, name=name: name in (c.__name__ for c in type(x).__mro__))
    for name in ("Adapters", "Layer", "LoRA", "Model", "ModelProto", "Packed", "Rngs")
}
"""The names of types of annotations, for errors, and the values that they allow."""
_KINDS |= dict.fromkeys(("Iterable", "Sequence", "Collection"), _LIST)
_KINDS |= {
    "Hook": _KINDS["Callable"],
    "dict": _KINDS["Mapping"],
    "ndarray": _KINDS["Array"],
    "Initializer": _KINDS["Callable"],
}
_ELEMENTS: dict[str, _Kind] = {
    "str": ("strings", _is_a(str)),
    "None": ("None", lambda x: x is None),
    "Hook": ("functions", callable),
    "Pattern": ("strings", _is_a(str, re.Pattern)),
    "Array": ("arrays", lambda x: hasattr(x, "dtype") or isinstance(x, Real)),
    "Layer": ("layers", _KINDS["Layer"][1]),
}
"""The same of the elements of lists and dicts."""


def require(
    name: str, value: Any, fits: Any, expected: str, error: type[Exception] = InputError
) -> None:
    """Raise an error unless an argument fits: "`name` must be `expected`, got `value`"."""
    if not fits:
        raise error(f"{name} must be {expected}, got {describe(value)}")


def require_choice(
    name: str, value: Any, choices: Sequence[Any], error: type[Exception] = InputError
) -> None:
    """Raise an error unless an argument is one of some names, numbers or None."""
    *others, last = map(repr, choices)
    expected = f"{', '.join(others)} or {last}" if others else last
    require(name, value, is_one_of(value, choices), expected, error)


def require_integer(
    name: str,
    value: Any,
    least: int = 1,
    most: int | None = None,
    error: type[Exception] = InputError,
) -> None:
    """Raise an error unless an argument is an integer from `least` to `most`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    fits = whole and least <= value and (most is None or value <= most)
    limits = f"{least} to {most}" if whole and most and value > most else f"at least {least}"
    require(name, value, fits, f"an integer of {limits}", error)


def is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Check whether an argument is one of some choices.

    An array or a dict, which `in` would compare or hash, is not.
    """
    return isinstance(value, str | int | np.generic | None) and value in choices


def describe(value: Any) -> str:
    """Describe an argument: arrays by dtype and shape, large and opaque values by their type."""
    if getattr(value, "shape", ()) and hasattr(value, "dtype"):
        return f"{value.dtype}{[*value.shape]}"
    text = repr(value)
    if isinstance(value, Mapping) and len(text) > 80:
        for key, x in value.items():
            if not hasattr(x, "dtype"):
                return f"a dict in which {key!r} is {describe(x)}"
    return text if len(text) <= 80 and text[0] != "<" else f"a value of type {type(value).__name__}"


def name_type(value: Any) -> str:
    """Return the type of a value behind its article: "a list", "an int"."""
    return _with_article(type(value).__name__)


def check_arguments(
    annotated: Any, values: Mapping[str, Any], error: type[Exception] = InputError
) -> None:
    """Refuse arguments of types that the annotations of a function or class exclude.

    A union with a type that is not in `_KINDS` allows every value: what takes it checks it.

    Raises:
      Exception: an `error`, "`name` must be `types`, got `value`".
    """
    for name, kinds in _read_annotations(annotated).items():
        value = values.get(name, _read_annotations)
        if value is not _read_annotations and not any(allows(value) for _, allows in kinds):
            *others, last = dict.fromkeys(text for text, _ in kinds)
            expected = f"{', '.join(others)} or {last}" if others else last
            require(name, value, False, expected, error)


@functools.cache
def _read_annotations(annotated: Any) -> dict[str, list[_Kind]]:
    """Return the types that arguments may have, without those that may be anything."""
    annotations = {}
    for name, annotation in inspect.get_annotations(annotated).items():
        if get_origin(annotation) is Unpack:  # keywords, which Python 3.11 does not print as code
            continue
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        if kinds := read_type(text, name in ("rng", "key")):
            annotations[name] = kinds
    return annotations


@functools.cache
def read_type(annotation: str, is_key: bool = False) -> list[_Kind]:
    """Return the kinds of values that an annotation allows; none if it allows every value.

    Args:
      is_key: whether arrays are random keys.
    """
    kinds: list[Any] = [*_kinds(ast.parse(annotation, mode="eval").body, is_key)]
    return [] if None in kinds else kinds


def _kinds(node: ast.expr, is_key: bool) -> Iterator[Any]:
    """Yield an entry of `_KINDS` for each member of a union; None for a type that is not there."""
    match node:
        case ast.BinOp(left=left, right=right):
            yield from _kinds(left, is_key)
            yield from _kinds(right, is_key)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            for choice in values.elts if isinstance(values, ast.Tuple) else (values,):
                value = ast.literal_eval(choice)
                yield repr(value), lambda x, v=value: isinstance(x, type(v)) and x == v
        case ast.Subscript(value=value, slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            # re.Pattern[str] is a Pattern
            names = [ast.unparse(part).rpartition(".")[2].partition("[")[0] for part in parts]
            for kind in _kinds(value, is_key):
                yield _with_elements(kind, *names)
        case ast.Name(id="Select" | "Trainable"):
            yield from map(_KINDS.get, ("str", "Iterable", "Callable"))
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield _KINDS.get("Key" if is_key and name == "Array" else name)
        case _:
            yield _KINDS.get(ast.unparse(node))


def _with_elements(kind: _Kind | None, *names: str) -> _Kind | None:
    """Return the kind of lists and dicts whose elements are strings or arrays, if so annotated.

    Args:
      names: the types of elements; of a dict those of keys and values.
    """
    element = names[-1]
    if kind is not None and kind[0] == "a pair of axes" and element == "str":
        return (
            "a pair of strings",
            lambda x: isinstance(x, tuple | list) and [*map(type, x)] == [str] * 2,
        )
    if kind is None or kind[0] not in ("a list", "a dict") or element not in _ELEMENTS:
        return kind
    (text, allows), (plural, fits) = kind, _ELEMENTS[element]
    _, fits_key = _ELEMENTS.get(names[0], (text, lambda _: True))

    def allows_all(x: Any) -> bool:
        if not allows(x) or isinstance(x, Iterator):  # which would be used up
            return allows(x)
        if isinstance(x, Mapping):
            is_dict = text == "a dict"
            return is_dict and all(map(fits_key, x)) and all(map(fits, x.values()))
        return all(map(fits, x))

    return f"{text} of {plural}", allows_all
