"""Feature transforms of ai.onnx.ml: selecting, filling in, scaling, encoding.

Real-valued inputs are computed in their own dtype, integers in float32; where the specification
fixes tensor(float) as the output, the result is rounded to float32 at the end.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np

from jaxonnx._constraints import NotNegative
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.known_values import concrete, table
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
            f"a {x.dtype} input of {x.shape[-1]} features needs 1 or {x.shape[-1]} imputed values "
            f"of its own kind, not {imputed}"
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
