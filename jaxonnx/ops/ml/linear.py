"""Linear models and support vector machines of ai.onnx.ml, and scores of all its classifiers.

Support vector machines follow LIBSVM's conventions.
"""

from itertools import combinations
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from jaxonnx.errors import NodeError
from jaxonnx.ops.common import concrete, table
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


def _kernel(x, vectors, kind, params):
    """Compute the kernel [N, V] between the rows of x [N, C] and the support vectors [V, C]."""
    gamma, coef0, degree = (float(p) for p in params) if params else (0.0, 0.0, 0.0)
    dot = jnp.matmul(x, vectors.T, precision=jax.lax.Precision.HIGHEST)
    if kind == "LINEAR":
        return dot
    if kind == "POLY":
        # an integral power is differentiable at negative bases too
        return (gamma * dot + coef0) ** (int(degree) if degree.is_integer() else degree)
    if kind == "SIGMOID":
        return jnp.tanh(gamma * dot + coef0)
    if kind == "RBF":
        return jnp.exp(-gamma * jnp.sum((x[:, None] - vectors) ** 2, axis=-1))
    raise NodeError(f"kernel_type must be LINEAR, POLY, RBF or SIGMOID, got {kind!r}")


@op("SVMRegressor", since=1, domain=ML)
def svm_regressor(
    x,
    *,
    coefficients=None,
    kernel_params=None,
    kernel_type="LINEAR",
    n_supports=0,
    one_class=0,
    post_transform: Transform = "NONE",
    rho=None,
    support_vectors=None,
):
    """Values [N, 1] of x [N, C] or [C]; with `one_class`, 1 for inliers and -1 for outliers.

    Without support vectors the coefficients are those of a linear model.
    """
    if not coefficients or not rho:
        raise NodeError("coefficients and rho must be given")
    x = jnp.atleast_2d(real(x))
    weights = np.asarray(coefficients, x.dtype)
    if n_supports:
        vectors = np.asarray(support_vectors, x.dtype).reshape(n_supports, -1)
        y = _kernel(x, vectors, kernel_type, kernel_params) @ weights
    else:
        y = _kernel(x, weights[None], "LINEAR", None)[:, 0]
    y = (y + rho[0])[:, None]
    return transform(jnp.where(y > 0, 1.0, -1.0) if one_class else y, post_transform)


@op("SVMClassifier", since=1, domain=ML)
def svm_classifier(
    x,
    *,
    classlabels_ints=None,
    classlabels_strings=None,
    coefficients=None,
    kernel_params=None,
    kernel_type="LINEAR",
    post_transform: Transform = "NONE",
    prob_a=None,
    prob_b=None,
    rho=None,
    support_vectors=None,
    vectors_per_class=None,
):
    """Labels [N] and scores of x [N, C] or [C].

    With support vectors there is one decision for each pair of classes and the class with most
    votes wins. The scores are the probabilities [N, classes] if prob_a and prob_b are given, else
    the decisions [N, pairs], for two classes minus and plus the decision. Without support vectors
    there is one linear score for each class, all with the same rho, and the greatest wins.
    """
    if not coefficients or not rho:
        raise NodeError("coefficients and rho must be given")
    if len(prob_a or ()) != len(prob_b or ()):
        raise NodeError("prob_a and prob_b must have one length")
    classes = number_of_classes(classlabels_ints, classlabels_strings)
    x = jnp.atleast_2d(real(x))
    weights = np.asarray(coefficients, x.dtype)
    if not vectors_per_class:
        scores = _kernel(x, weights.reshape(classes, -1), "LINEAR", None) + rho[0]
        index = jnp.argmax(scores, axis=-1)
        return labels_of(index, classlabels_ints, classlabels_strings), transform(
            scores, post_transform
        )

    count = classes * (classes - 1) // 2
    if len(vectors_per_class) != classes or len(rho) < count:
        raise NodeError(
            f"{classes} classes need as many vectors_per_class and {count} rho, and have "
            f"{len(vectors_per_class)} and {len(rho)}"
        )
    pairs = list(combinations(range(classes), 2))
    vectors = np.asarray(support_vectors, x.dtype).reshape(sum(vectors_per_class), -1)
    kernel = _kernel(x, vectors, kernel_type, kernel_params)
    pair_weights = _pair_weights(weights.reshape(classes - 1, -1), vectors_per_class, pairs)
    decisions = jnp.matmul(kernel, pair_weights.T, precision=jax.lax.Precision.HIGHEST)
    decisions = decisions + np.asarray(rho[: len(pairs)], x.dtype)
    winners = jnp.where(decisions > 0, *np.array(pairs).T)
    index = jnp.argmax(jax.nn.one_hot(winners, classes).sum(axis=-2), axis=-1)
    labels = labels_of(index, classlabels_ints, classlabels_strings)
    if prob_a:
        a, b = np.asarray(prob_a, x.dtype), np.asarray(prob_b, x.dtype)
        pairwise = jnp.clip(jax.nn.sigmoid(-(decisions * a + b)), 1e-7, 1 - 1e-7)
        scores = jax.vmap(lambda p: _couple(p, pairs, classes))(pairwise)
        return labels, transform(scores, post_transform)
    if classes == 2:
        return labels, transform_binary(decisions[:, 0], post_transform, opposite=True)
    return labels, transform(decisions, post_transform)


def _pair_weights(weights, vectors_per_class, pairs):
    """Return the weights [pairs, V] of every support vector in every decision.

    Row k of LIBSVM's [classes - 1, V] holds what the vectors of a class count against its k-th
    rival, the class itself left out.
    """
    start = np.concatenate([[0], np.cumsum(vectors_per_class)])
    spread = np.zeros((len(pairs), weights.shape[1]), weights.dtype)
    for row, (i, j) in zip(spread, pairs, strict=True):
        row[start[i] : start[i + 1]] = weights[j - 1, start[i] : start[i + 1]]
        row[start[j] : start[j + 1]] = weights[i, start[j] : start[j + 1]]
    return spread


def _couple(pairwise, pairs, classes):
    """Compute class probabilities from pairwise ones: Wu, Lin, Weng 2004, algorithm 2.

    Of 100 rounds those that start within the tolerance 0.005 / classes change nothing, so that
    the number of rounds is fixed and the whole can be differentiated.
    """
    i, j = np.array(pairs).T
    r = jnp.zeros((classes, classes), pairwise.dtype).at[i, j].set(pairwise)
    r = r.at[j, i].set(1 - pairwise)
    q = -r.T * r
    q = q + jnp.diag(jnp.sum(r * r, axis=0))

    def one_round(_, p):
        qp = q @ p
        pqp = p @ qp
        converged = jnp.max(jnp.abs(qp - pqp)) < 0.005 / classes

        # the minimum of p' Q p along one coordinate; the division by 1 + step keeps the sum at 1
        def one_class(t, state):
            new, qp, pqp = state
            step = (pqp - qp[t]) / q[t, t]
            pqp = (pqp + step * (step * q[t, t] + 2 * qp[t])) / (1 + step) ** 2
            return new.at[t].add(step) / (1 + step), (qp + step * q[t]) / (1 + step), pqp

        new, _, _ = jax.lax.fori_loop(0, classes, one_class, (p, qp, pqp))
        return jnp.where(converged, p, new)

    return jax.lax.fori_loop(0, 100, one_round, jnp.full(classes, 1 / classes, pairwise.dtype))
