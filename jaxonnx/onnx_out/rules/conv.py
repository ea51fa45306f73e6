"""Convolutions in every form that forward passes and their gradients take."""

import numpy as np

from jaxonnx.onnx_out._nodes import Nodes, Tensor
from jaxonnx.onnx_out._rule_table import Refusal, primitive
from jaxonnx.onnx_out.rules.shapes import pad_tensor, reverse


@primitive("conv_general_dilated")
def conv_general_dilated(
    g, x, w, *, out, dimension_numbers, window_strides, padding, lhs_dilation, rhs_dilation,
    feature_group_count, batch_group_count,
):  # fmt: skip
    if out.dtype.kind in "iub":
        raise Refusal("ONNX has convolutions of floating point numbers only")
    dtype = np.dtype(np.float32) if out.dtype.itemsize < 4 and x.dtype != np.float16 else out.dtype
    x, w = g.cast(x, dtype), g.cast(w, dtype)
    x = g.transpose(x, dimension_numbers.lhs_spec)
    w = g.transpose(w, dimension_numbers.rhs_spec)
    groups = feature_group_count
    # batch groups (the kernel gradient of a grouped convolution) become feature groups: the groups
    # of examples are moved into the channels
    if batch_group_count > 1:
        groups = batch_group_count
        n, c, *space = x.shape
        x = g.reshape(x, [groups, n // groups, c, *space])
        x = g.transpose(x, [1, 0, *range(2, len(space) + 3)])
        x = g.reshape(x, [n // groups, groups * c, *space])
    flat = x.ndim == 2
    if flat:  # without a spatial axis; Conv needs one
        x, w = g.reshape(x, [*x.shape, 1]), g.reshape(w, [*w.shape, 1])
        window_strides = lhs_dilation = rhs_dilation = (1,)
        padding = ((0, 0),)
    spec = dimension_numbers.out_spec
    shape = [out.shape[i] for i in spec] + [1] * flat
    y = _convolve(g, x, w, window_strides, padding, lhs_dilation, rhs_dilation, groups)
    y = Tensor(y, shape, dtype)
    y = g.reshape(y, shape[:2]) if flat else y
    return g.cast(g.transpose(y, np.argsort(spec)), out.dtype)


def _convolve(g: Nodes, x, w, strides, padding, apart, dilations, groups) -> str:
    """Convolve images (N, C, *space) with kernels (M, C / groups, *space).

    Args:
      strides, padding, dilations: of the windows, for each axis.
      apart: the dilation of the images, for each axis.
      groups: the number of feature groups.
    """
    reach = [(k - 1) * d for k, d in zip(w.shape[2:], dilations, strict=True)]
    if any(s > 1 for s in apart):
        # dilated images are the gradient of a strided convolution: ConvTranspose, whose padding
        # cuts `reach` minus that of the dilated images. What a high edge pads beyond `reach` is
        # its output_padding, which must be less than the stride
        pads = [(r - low, r - high) for r, (low, high) in zip(reach, padding, strict=True)]
        more = [max(-high, 0) for _, high in pads]
        if (
            all(s == 1 for s in strides)
            and all(low >= 0 for low, _ in pads)
            and all(m < s for m, s in zip(more, apart, strict=True))
        ):
            return _transposed_convolution(g, x, w, pads, more, apart, dilations, groups)
        config = [(0, 0, 0)] * 2 + [(0, 0, s - 1) for s in apart]
        x = pad_tensor(g, x, np.zeros((), x.dtype), config)
    if any(low < 0 or high < 0 for low, high in padding):
        config = [(0, 0, 0)] * 2 + [(min(low, 0), min(high, 0), 0) for low, high in padding]
        x = pad_tensor(g, x, np.zeros((), x.dtype), config)
    pads = [max(low, 0) for low, _ in padding] + [max(high, 0) for _, high in padding]
    return g(
        "Conv", x, w, strides=strides, pads=pads, dilations=dilations, group=groups,
        kernel_shape=w.shape[2:],
    )  # fmt: skip


def _transposed_convolution(g: Nodes, x, w, pads, more, strides, dilations, groups) -> str:
    """Convolve dilated images as a ConvTranspose with strides.

    ConvTranspose takes kernels (C, M / groups, *space), and applies them mirrored.
    """
    m, c, *kernel = w.shape
    space = range(3, 3 + len(kernel))
    w = g.transpose(g.reshape(w, [groups, m // groups, c, *kernel]), [0, 2, 1, *space])
    w = g.reshape(w, [groups * c, m // groups, *kernel])
    w = reverse(g, w, range(2, w.ndim))
    edges = [low for low, _ in pads] + [max(high, 0) for _, high in pads]
    return g(
        "ConvTranspose", x, w, strides=strides, pads=edges, output_padding=more,
        dilations=dilations, group=groups, kernel_shape=kernel,
    )  # fmt: skip
