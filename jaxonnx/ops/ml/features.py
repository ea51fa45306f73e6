"""Features of ai.onnx.ml: selecting, filling in, scaling, encoding; maps and vocabularies.

Real-valued inputs are computed in their own dtype, integers in float32; where the specification
fixes tensor(float) as the output, the result is rounded to float32 at the end.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict, Unpack

import jax.numpy as jnp
import numpy as np

from jaxonnx._constraints import Default, NotNegative
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import concrete, table
from jaxonnx.registry import is_known, op, xp

ML = "ai.onnx.ml"


def real(x):
    """Return `x` itself if it is real-valued, else in float32."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(np.float32)


def exactly_one(**options):
    """Return the only option that is set, as (name, value)."""
    present = [(name, value) for name, value in options.items() if value is not None]
    if len(present) != 1:
        raise NodeError(f"exactly one of {', '.join(options)} must be given, got {len(present)}")
    return present[0]


@op("ArrayFeatureExtractor", since=1, domain=ML)
def array_feature_extractor(x, y):
    """Columns `y` of the last axis; a vector counts as one row, as in onnxruntime."""
    if x.dtype == object:
        y = concrete(y, "selecting strings")
    if isinstance(y, np.ndarray) and y.size and not 0 <= y.min() <= y.max() < x.shape[-1]:
        raise NodeError(f"indices must be in [0, {x.shape[-1] - 1}], got {y.ravel().tolist()}")
    z = xp(x, y).take(x, y.reshape(-1), axis=-1)
    return z[None] if x.ndim == 1 else z


@op("Binarizer", since=1, domain=ML)
def binarizer(x, *, threshold=0.0):
    return (x > threshold).astype(x.dtype)


@op("FeatureVectorizer", since=1, domain=ML)
def feature_vectorizer(*x, inputdimensions: NotNegative | None = None):
    """Rows side by side, each input cut or padded with zeros to its `inputdimensions`."""
    rows = [v[None] if v.ndim == 1 else v.reshape(v.shape[0], -1) for v in x]
    widths = [v.shape[1] for v in rows] if inputdimensions is None else inputdimensions
    if len(widths) != len(rows):
        raise NodeError(f"{len(rows)} inputs, but {len(widths)} inputdimensions")
    check_size((max(map(len, rows), default=0), sum(widths)), np.float32, host=is_known(*x))
    fitted = [
        xp(v).pad(v[:, :width], ((0, 0), (0, max(width - v.shape[1], 0))))
        for v, width in zip(rows, widths, strict=True)
    ]
    return xp(*x).concatenate(fitted, axis=1).astype(np.float32)


@op("Imputer", since=1, domain=ML)
def imputer(
    x,
    *,
    imputed_value_floats=None,
    imputed_value_int64s=None,
    replaced_value_float=0.0,
    replaced_value_int64=0,
):
    if jnp.issubdtype(x.dtype, jnp.floating):
        imputed, replaced = imputed_value_floats, replaced_value_float
    else:
        imputed, replaced = imputed_value_int64s, replaced_value_int64
    if imputed is None or len(imputed) not in (1, x.shape[-1]):
        raise NodeError(
            f"{x.shape[-1]} features of type {x.dtype} need 1 or {x.shape[-1]} imputed values "
            f"of their own kind, not {imputed}"
        )
    missing = xp(x).isnan(x) if replaced != replaced else x == replaced
    return xp(x).where(missing, np.asarray(imputed, x.dtype), x)


@op("Normalizer", since=1, domain=ML, shapes="x (C) | (N, C)")
def normalizer(x, *, norm: Literal["MAX", "L1", "L2"] = "MAX"):
    """Rows divided by their maximum, sum of |x| or Euclidean norm; as they are if that is 0."""
    x = jnp.asarray(real(x))
    if norm == "L2":
        square = jnp.sum(x * x, axis=-1, keepdims=True)
        divisor = jnp.sqrt(jnp.where(square == 0, 1, square))
    else:
        reduce, size = (jnp.max, x) if norm == "MAX" else (jnp.sum, jnp.abs(x))
        divisor = reduce(size, axis=-1, keepdims=True)
        divisor = jnp.where(divisor == 0, 1, divisor)
    return (x / divisor).astype(np.float32)


@op("OneHotEncoder", since=1, domain=ML)
def one_hot_encoder(x, *, cats_int64s=None, cats_strings=None, zeros=1):
    """One more axis, over the categories. `zeros=0` forbids others, which needs concrete values."""
    _, categories = exactly_one(cats_int64s=cats_int64s, cats_strings=cats_strings)
    if x.dtype != object:
        x = x.astype(table(categories).dtype)
    y = x[..., None] == table(np.asarray(categories, object if cats_strings else np.int64))
    if not zeros and not concrete(y.any(axis=-1), "OneHotEncoder with zeros=0").all():
        raise NodeError("an input is none of the categories, which zeros=0 forbids")
    return y.astype(np.float32)


@op("Scaler", since=1, domain=ML)
def scaler(x, *, offset=None, scale=None):
    x = real(x)
    if offset is not None:
        x = x - np.asarray(offset, x.dtype)
    if scale is not None:
        x = x * np.asarray(scale, x.dtype)
    return x.astype(np.float32)


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
