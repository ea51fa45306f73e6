"""The experimental operators of early ONNX that onnxruntime kept: WinML and CoreML converters."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import NodeError
from jaxonnx.registry import op


@op("Affine", since=1, pointwise=True)
def affine(x, *, alpha=1.0, beta=0.0):
    return alpha * x + beta


@op("Scale", since=1, pointwise=True)
def scale_by(x, *, scale=1.0):
    return scale * x


@op("ScaledTanh", since=1, pointwise=True)
def scaled_tanh(x, *, alpha, beta):
    return alpha * jnp.tanh(beta * x)


@op("ParametricSoftplus", since=1, pointwise=True)
def parametric_softplus(x, *, alpha, beta):
    return alpha * jax.nn.softplus(beta * x)


@op("ImageScaler", since=1)
def image_scaler(x, *, bias, scale=1.0):
    """scale * x + bias of its channel; x (N, C, H, W)."""
    return scale * x + np.asarray(bias, x.dtype).reshape(-1, 1, 1)


@op("Crop", since=1)
def crop(x, *, border, scale=None):
    """Cut (left, top, right, bottom) pixels off, or (height, width) out from left and top on."""
    left, top, right, bottom = border
    height, width = scale or (x.shape[2] - top - bottom, x.shape[3] - left - right)
    if min(height, width) < 0 or top + height > x.shape[2] or left + width > x.shape[3]:
        raise NodeError(f"images of {x.shape[2:]} pixels do not hold what is to be cropped")
    return x[:, :, top : top + height, left : left + width]
