"""GPTQ: weights rounded one input at a time, each correcting the error of those before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx._rewrite.network import Network
from jaxonnx.quantization._layer_inputs import as_rows, find_products, from_rows, visit
from jaxonnx.quantization._scheme import TYPES, Parameters, Quantization, WeightSite, spread_scale

_DAMPING = 0.01
"""The addition to the diagonal of a Hessian, as a share of its mean (section 3.3 of the paper)."""
_COLUMNS = 128
"""The columns after whose rounding all later columns are corrected at once."""

Fit = Callable[[str, np.ndarray | None], Parameters]
"""From the name of a weight and the mean squares of its inputs to its scales."""


def round_weights(
    model: Network,
    sites: Mapping[str, WeightSite],
    examples: Sequence[Sequence[Any]],
    schemes: Mapping[str, Quantization],
    fit: Fit,
) -> tuple[dict[str, np.ndarray], dict[str, Parameters]]:
    """Round weights so that the outputs of their layers change least on calibration data.

    "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
    (arXiv:2210.17323). Each layer reads what the quantized layers before it compute. Columns go in
    the order of their inputs' mean squares, largest first (`act_order`), at scales that are chosen
    before (`static_groups`), weighted by these squares.

    Args:
      model: the network before quantization.
      sites: the weights; those that are no matrix of a product keep their values.
      examples: batches of inputs, in the order of the model's.
      schemes: the scheme of each weight.
      fit: chooses the scales of a weight.

    Returns:
      The rounded weights (multiples of their scales, float32), and their scales, by name.
    """
    values: dict[str, np.ndarray] = {}
    scales: dict[str, Parameters] = {}
    tensors = dict(model.tensors)
    for group, inputs in visit(model, find_products(model, sites), examples, tensors):
        squares = np.diag(inputs.hessian)
        order = np.argsort(-squares, kind="stable")
        factor = factor_inverse(inputs.hessian[np.ix_(order, order)])
        for name in group.weights:
            w, site, scheme = np.asarray(tensors[name]), sites[name], schemes[name]
            scales[name] = fit(name, inputs.squares)
            spread = as_rows(np.broadcast_to(spread_scale(scales[name], w), w.shape), site)
            rows = round_rows(as_rows(w, site)[:, order], spread[:, order], factor, scheme)
            values[name] = from_rows(rows[:, np.argsort(order)], w, site)
            tensors[name] = jnp.asarray(values[name])
    return values, scales


def factor_inverse(hessian: np.ndarray) -> np.ndarray:
    """Return the upper Cholesky factor U of the inverse of a damped Hessian, U^T U.

    An input that is always 0 gets a 1 on the diagonal: nothing corrects it, and it corrects
    nothing. float64 takes over where float32 loses that the matrix is positive definite.
    """
    diagonal = np.diag(hessian)
    unread = diagonal == 0
    damping = _DAMPING * (diagonal[~unread].mean() if not unread.all() else 0)
    damped = hessian + np.diag(np.where(unread, 1, damping)).astype(hessian.dtype)
    for dtype in (np.float32, np.float64):
        h = damped.astype(dtype)
        try:
            factor = np.linalg.cholesky(np.linalg.inv(h)).T
        except np.linalg.LinAlgError:
            continue
        if np.isfinite(factor).all():
            return factor
    raise AssertionError("a damped matrix x^T x is positive definite in float64")


def round_rows(
    w: np.ndarray, scale: np.ndarray, factor: np.ndarray, scheme: Quantization
) -> np.ndarray:
    """Round [outputs, inputs] to multiples of its scales, column by column.

    Args:
      w: the weight, with its inputs in the order in which they are rounded.
      scale: of each number, in the shape of w.
      factor: U of `factor_inverse`, [inputs, inputs].
      scheme: the type.
    """
    kind, limits = TYPES[scheme.weights], scheme.weight_limits
    # columns are rows of the transposed arrays, whose numbers are adjacent
    left, scale = w.T.astype(factor.dtype), np.ascontiguousarray(scale.T)
    result = np.empty(left.shape, np.float32)
    for start in range(0, len(left), _COLUMNS):
        end = min(start + _COLUMNS, len(left))
        errors = np.empty((end - start, left.shape[1]), factor.dtype)
        for i in range(start, end):
            codes = np.clip(kind.round(left[i] / scale[i] + kind.middle) - kind.middle, *limits)
            result[i] = codes * scale[i]
            errors[i - start] = (left[i] - result[i]) / factor[i, i]
            left[i + 1 : end] -= np.outer(factor[i, i + 1 : end], errors[i - start])
        left[end:] -= factor[start:end, end:].T @ errors
    return result.T
