"""Linear models of ai.onnx.ml, and what all its classifiers share: score transforms and labels."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from jaxonnx.errors import NodeError
from jaxonnx.ops.known_values import concrete, table
from jaxonnx.ops.ml.features import ML, exactly_one, real
from jaxonnx.registry import op


def _softmax_zero(scores):
    """Compute softmax over the nonzero scores; zeros alone give 1/2 each, as in onnx.reference."""
    used = jnp.abs(scores) > 1e-7
    top = jnp.max(scores, axis=-1, keepdims=True)
    exponents = jnp.where(used, jnp.exp(scores - top), scores * jnp.exp(-top))
    total = jnp.sum(jnp.where(used, exponents, 0), axis=-1, keepdims=True)
    return jnp.where(total == 0, 0.5, exponents / jnp.where(total == 0, 1, total))


Transform = Literal["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]
_TRANSFORMS = {
    "NONE": lambda scores: scores,
    "SOFTMAX": lambda scores: jax.nn.softmax(scores, axis=-1),
    "LOGISTIC": jax.nn.sigmoid,
    "SOFTMAX_ZERO": _softmax_zero,
    # exact, where onnxruntime and onnx.reference use an approximation good to three digits
    "PROBIT": ndtri,
}


def transform(scores, post_transform, dtype=np.float32):
    """Apply `post_transform` to scores [N, classes or targets]."""
    scores = scores.astype(jnp.promote_types(scores.dtype, np.float32))
    return _TRANSFORMS[post_transform](scores).astype(dtype)


def transform_binary(score, post_transform, opposite=False):
    """Return the two scores [N, 2] that one score [N] of the positive class stands for.

    1 - s and s without a transform or for PROBIT (-s and s if `opposite`); the others are
    transforms of -s and s. onnxruntime does the same for NONE and LOGISTIC and ignores the rest.
    """
    logits = opposite or post_transform not in ("NONE", "PROBIT")
    return transform(jnp.stack([-score if logits else 1 - score, score], axis=-1), post_transform)


def labels_of(index, ints, strings):
    """Return the class labels at `index`; strings exist only as concrete values."""
    kind, labels = exactly_one(classlabels_ints=ints, classlabels_strings=strings)
    if kind == "classlabels_ints":
        return jnp.asarray(table(np.asarray(labels, np.int64)))[index]
    return np.asarray(labels, object)[concrete(index, "a classifier with string labels")]


def number_of_classes(ints, strings):
    return len(exactly_one(classlabels_ints=ints, classlabels_strings=strings)[1])


def _affine(x, coefficients, intercepts, rows):
    x = jnp.atleast_2d(real(x))
    weights = np.asarray(coefficients, x.dtype).reshape(rows, -1)
    scores = jnp.matmul(x, weights.T, precision=jax.lax.Precision.HIGHEST)
    return scores if intercepts is None else scores + np.asarray(intercepts, x.dtype)


@op("LinearClassifier", since=1, domain=ML)
def linear_classifier(
    x,
    *,
    coefficients,
    intercepts=None,
    classlabels_ints=None,
    classlabels_strings=None,
    multi_class=0,
    post_transform: Transform = "NONE",
):
    """Label [N] and scores [N, classes] of x [N, C] or [C].

    A single row of coefficients for two classes gives the score of the second one, which wins
    above 0. The label is that of the greatest score before `post_transform`; `multi_class` says
    how the model was trained and changes nothing, as in onnxruntime.
    """
    del multi_class
    classes = number_of_classes(classlabels_ints, classlabels_strings)
    features = x.shape[-1]
    rows = len(coefficients) // features
    if rows * features != len(coefficients) or (rows != classes and (rows, classes) != (1, 2)):
        raise NodeError(
            f"{len(coefficients)} coefficients do not fit {features} features and {classes} classes"
        )
    scores = _affine(x, coefficients, intercepts, rows)
    if (rows, classes) == (1, 2):
        score = scores[:, 0]
        index, scores = (score > 0).astype(np.int32), transform_binary(score, post_transform)
    else:
        index, scores = jnp.argmax(scores, axis=-1), transform(scores, post_transform)
    return labels_of(index, classlabels_ints, classlabels_strings), scores


@op("LinearRegressor", since=1, domain=ML)
def linear_regressor(
    x, *, coefficients=None, intercepts=None, targets=1, post_transform: Transform = "NONE"
):
    """Targets [N, targets] of x [N, C] or [C]. Every transform is applied, also to one target."""
    if coefficients is None or len(coefficients) != targets * x.shape[-1]:
        raise NodeError(f"{targets} x {x.shape[-1]} coefficients are needed")
    return transform(_affine(x, coefficients, intercepts, targets), post_transform)
