"""Maps and vocabularies of ai.onnx.ml. A map is a `dict`, a sequence of maps a list of them."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict, Unpack

import jax.numpy as jnp
import numpy as np

from jaxonnx._constraints import Default
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.known_values import concrete, table
from jaxonnx.ops.ml.features import ML, exactly_one
from jaxonnx.registry import op


def translate(x, keys, values, default, *, last: bool):
    """Look up each x among `keys`: its entry of `values`, or `default`.

    NaN equals NaN. Of equal keys the last or the first counts. Strings have no compiled form.
    """
    x = concrete(x, "translating to strings") if values.dtype == object else x
    keys, values, default = table(keys), table(values), table(default)
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    if x.dtype == object or values.dtype == object:
        module = np
    else:
        module, values = jnp, jnp.asarray(values)
    place = module.searchsorted(keys, x, side="right") - 1 if last else module.searchsorted(keys, x)
    place = module.clip(place, 0, len(keys) - 1)
    key = module.asarray(keys)[place]
    hit = (key == x) | ((key != key) & (x != x))
    return module.where(hit, values[place], default)


@op("LabelEncoder", since=1, domain=ML)
def label_encoder_1(x, *, classes_strings=None, default_int64=-1, default_string="_Unused"):
    """Strings to their index in `classes_strings`, or indices to strings."""
    classes = np.asarray(classes_strings or [], object)
    index = np.arange(len(classes))
    if x.dtype == object:
        return translate(x, classes, index, np.int64(default_int64), last=False)
    return translate(x, index, classes, np.asarray(default_string, object), last=False)


class Table(TypedDict, total=False):
    """The attributes of a LabelEncoder: keys, values and a default, each in one of these types."""

    keys_floats: Any
    keys_int64s: Any
    keys_strings: Any
    keys_tensor: Any
    values_floats: Any
    values_int64s: Any
    values_strings: Any
    values_tensor: Any
    default_float: Annotated[Any, Default(-0.0)]
    default_int64: Annotated[Any, Default(-1)]
    default_string: Annotated[Any, Default("_Unused")]
    default_tensor: Any


_TENSORS = ("keys_tensor", "values_tensor", "default_tensor")


@op("LabelEncoder", since=2, domain=ML, without=_TENSORS)
def label_encoder_2(x, **attributes: Unpack[Table]):
    """Each element's value in a table; of a repeated key the first counts, as in onnxruntime."""
    return _encode(x, attributes, last=False)


@op("LabelEncoder", since=4, domain=ML)
def label_encoder_4(x, **attributes: Unpack[Table]):
    """Each element's value in a table; of a repeated key the last counts."""
    return _encode(x, attributes, last=True)


def _encode(x, attributes: Table, *, last):
    dtypes = {"floats": np.float32, "int64s": np.int64, "strings": object}
    dtypes |= {"tensor": None} if last else {}
    (keys_kind, keys), (kind, values) = (
        exactly_one(**{kind: attributes.get(f"{part}_{kind}") for kind in dtypes})
        for part in ("keys", "values")
    )
    keys = np.asarray(keys, dtypes[keys_kind]).reshape(-1)
    values, default = np.asarray(values, dtypes[kind]).reshape(-1), None
    if kind == "tensor":
        kind = {"O": "strings", "i": "int64s"}.get(values.dtype.kind, "floats")
        default = attributes.get("default_tensor")
    if len(keys) != len(values):
        raise NodeError(f"{len(keys)} keys but {len(values)} values")
    if default is None:
        usual = {"floats": -0.0, "int64s": -1, "strings": "_Unused"}[kind]
        default = attributes.get(f"default_{kind[:-1]}", usual)
    default = np.asarray(default, values.dtype).reshape(())
    return translate(x, keys, values, default, last=last)


@op("CategoryMapper", since=1, domain=ML)
def category_mapper(
    x, *, cats_int64s=None, cats_strings=None, default_int64=-1, default_string="_Unused"
):
    """Strings to the integers beside them, or back."""
    if cats_int64s is None or cats_strings is None or len(cats_int64s) != len(cats_strings):
        raise NodeError("cats_int64s and cats_strings must be given and have the same length")
    integers, strings = np.asarray(cats_int64s, np.int64), np.asarray(cats_strings, object)
    if x.dtype == object:
        return translate(x, strings, integers, np.int64(default_int64), last=False)
    return translate(x, integers, strings, np.asarray(default_string, object), last=False)


@op("CastMap", since=1, domain=ML, dynamic=True)
def cast_map(
    x,
    *,
    cast_to: Literal["TO_FLOAT", "TO_INT64", "TO_STRING"] = "TO_FLOAT",
    map_form: Literal["DENSE", "SPARSE"] = "DENSE",
    max_map=1,
):
    """The values by ascending key as one row [1, n]; SPARSE puts each at its key's position.

    Missing positions are 0, or the string "0.f", and a float is written with six decimals:
    onnxruntime's rule, for the specification has none.
    """
    casts: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "TO_FLOAT": (float, np.float32),
        "TO_INT64": (int, np.int64),
        "TO_STRING": (lambda value: value if isinstance(value, str) else f"{value:f}", object),
    }
    cast, dtype = casts[cast_to]
    values = {key: cast(value) for key, value in sorted(x.items())}
    if map_form == "DENSE":
        return np.asarray([list(values.values())], dtype)
    if any(not 0 <= key < max_map for key in values):
        raise NodeError(f"a sparse map's keys must be in [0, {max_map - 1}], got {list(values)}")
    check_size([max_map], object, host=True)
    row = np.full((1, max_map), "0.f" if cast_to == "TO_STRING" else 0, dtype)
    for key, value in values.items():
        row[0, key] = value
    return row


@op("DictVectorizer", since=1, domain=ML, dynamic=True)
def dict_vectorizer(x, *, int64_vocabulary=None, string_vocabulary=None):
    """The map's values in the order of the vocabulary, 0 or "" for those it lacks.

    One map gives one row [1, n], as in onnxruntime; a sequence of maps gives one row each.
    """
    _, vocabulary = exactly_one(
        int64_vocabulary=int64_vocabulary, string_vocabulary=string_vocabulary
    )
    rows = x if isinstance(x, list) else [x]
    unknown = {key for row in rows for key in row} - set(vocabulary)
    if unknown:
        raise NodeError(f"keys that are not in the vocabulary: {sorted(unknown)[:5]}")
    # a bare Python number has the specification's default type
    bare = {str: object, float: np.float32, int: np.int64}
    values = [value for row in rows for value in row.values()]
    kinds = {np.dtype(bare.get(type(value)) or value.dtype) for value in values}
    dtype = np.result_type(*kinds) if kinds else np.dtype(np.float32)
    missing = "" if dtype.kind == "O" else 0
    return np.asarray([[row.get(key, missing) for key in vocabulary] for row in rows], dtype)


@op("ZipMap", since=1, domain=ML, dynamic=True)
def zip_map(x, *, classlabels_int64s=None, classlabels_strings=None):
    """One map from label to score for each row of x [N, C] (or for x [C])."""
    _, labels = exactly_one(
        classlabels_int64s=classlabels_int64s, classlabels_strings=classlabels_strings
    )
    rows = np.atleast_2d(concrete(x, "ZipMap"))
    if rows.shape[1] != len(labels):
        raise NodeError(f"{rows.shape[1]} columns but {len(labels)} class labels")
    check_size([len(rows)], object, host=True)
    return [dict(zip(labels, row, strict=True)) for row in rows]
