"""Contractions and windows of jaxonnx, by the operators that they came from."""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from jaxonnx._jaxpr import inner_program
from jaxonnx.lowering import Choice, Conv
from jaxonnx.onnx_out._nodes import Nodes, Tensor
from jaxonnx.onnx_out._rule_table import primitive
from jaxonnx.onnx_out._tensors import all_known
from jaxonnx.onnx_out.rules import conv_gradients as cells
from jaxonnx.onnx_out.rules.shapes import expand, pad_tensor

RULES: dict[type, Callable[..., Any]] = {}
"""The rule of each trilinear form, `rule(g, form, out, u, v, like)`. It returns None if the form's
own program is to be written instead. `out` is the number of the factor that is computed from the
other two, u and v: 2 for the forward pass, 0 and 1 for the gradients (see `lowering.contract`)."""

FEW_PLACES = 16
"""The most positions of a result at which onnxruntime is faster at the gradient of the images by
one product for all images than by a convolution (on a busy CPU)."""

MATRIX = 2**12
"""The fewest elements of a 1x1 kernel with which onnxruntime is faster at the gradient of one image
by a product with the kernel as it is than by a convolution with its transpose."""


@primitive("contract")
def contract(g, u, v, *, form, equation, out):
    number = equation.params["out"]
    rule = RULES.get(type(form))
    result = None if rule is None else rule(g, form, number, u, v, out)
    return g.program(inner_program(equation), [u, v])[0] if result is None else result


def _conv(g: Nodes, form: Conv, out: int, u: Any, v: Any, like: Any) -> Any:
    """Write a convolution or one of its gradients by operators on images (N, C, *size).

    The form has channels last; a transpose on either side cancels those of the neighbours.
    """
    if u.dtype != v.dtype or u.dtype.name not in ("float32", "float64"):
        return None
    if not all_known([*form.size, *form.out]) or min(map(min, form.pads)) < 0:
        return None
    rank = len(form.kernel)
    first, last = (0, rank + 1, *range(1, rank + 1)), (0, *range(2, rank + 2), 1)
    weight = (rank + 1, rank, *range(rank)) if form.turned else tuple(range(rank + 2))
    if out == 1:
        y = _of_weight(g, form, g.transpose(u, first), g.transpose(v, first))
        return y if y is None else g.transpose(y, np.argsort(weight))
    images, w = (u, v) if out == 2 else (v, u)
    images, w = g.transpose(images, first), g.transpose(w, weight)
    if out != 2:
        y = _of_images(g, form, images, w)
    elif g.main.gates and form.groups == 1 and cells.few(form):
        y = cells.forward(g, form, images, w)
    else:
        shape = (images.shape[0], w.shape[0], *form.out)
        y = Tensor(g("Conv", images, w, **_attributes(form)), shape, images.dtype)
    return y if y is None else g.transpose(y, last)


RULES[Conv] = _conv


def _attributes(form: Any, *chosen: str) -> dict[str, Any]:
    """Return the attributes of Conv for a form, all of them or the chosen ones."""
    every = {
        "kernel_shape": form.kernel,
        "strides": form.strides,
        "dilations": form.dilations,
        "pads": [*(low for low, _ in form.pads), *(high for _, high in form.pads)],
        "group": getattr(form, "groups", 1),
    }
    return {name: every[name] for name in chosen or every}


def _of_images(g: Nodes, form: Conv, dy: Any, w: Any) -> Any:
    """Write the gradient of the images in the fastest way that fits; None for the form's own one.

    These are products with 0/1 matrices, products whose windows are added, or ConvTranspose.
    """
    wide = form.groups == 1 and prod(form.kernel) > 1
    small = wide and prod(form.out) <= cells.SIDE_BY_SIDE
    rows, columns = w.shape[:2]
    if (
        form.groups == prod(form.kernel) == max(form.strides) == dy.shape[0] == 1
        and form.size == form.out
        and rows * columns >= MATRIX
    ):
        w, dy = g.reshape(w, [rows, columns]), g.reshape(dy, [rows, prod(form.out)])
        y = g.product(w, True, dy, False, (columns, prod(form.out)))
        return g.reshape(y, (1, columns, *form.size))
    write, of_channels = None, cells.of_channels(form, w.shape)
    if g.main.gates and (small or (of_channels and not cells.is_few_images(dy))):
        write = cells.images if small else cells.channels_of_images
    if write is not None and (y := write(g, form, dy, w)) is not None:
        return y
    if wide and prod(form.out) <= FEW_PLACES:
        return _add_windows(g, form, dy, w)
    few = form.groups == 1 and w.shape[1] < w.shape[0] and prod(form.kernel) > 1
    if max(form.strides) == 1 and not few:
        return None
    # output_padding: the rows at the end that no window reaches
    more = [n - (m - 1) * s - (k - 1) * d - 1 + sum(p) for n, k, s, d, p, m in cells.axes_of(form)]
    if min(more) < 0 or any(m >= s for m, s in zip(more, form.strides, strict=True)):
        return None
    y = g("ConvTranspose", dy, w, output_padding=more, **_attributes(form))
    return Tensor(y, (dy.shape[0], w.shape[1] * form.groups, *form.size), dy.dtype)


def _add_windows(g: Nodes, form: Conv, dy: Any, w: Any) -> Any:
    """Write the gradient of the images as one product, and add each tap's part where it reads."""
    taps, (rows, columns), count = prod(form.kernel), w.shape[:2], dy.shape[0]
    places = count * prod(form.out)
    dy = g.reshape(g.transpose(dy, (1, 0, *range(2, dy.ndim))), [rows, places])
    every = g.product(
        g.reshape(w, [rows, columns * taps]), True, dy, False, (columns * taps, places)
    )
    every = g.reshape(every, [columns, taps, places])
    total: Any = None
    for tap, offset in enumerate(form.taps.offsets):
        part = g.slice(every, [0, tap, 0], [columns, tap + 1, places], [1, 1, 1])
        part = g.reshape(part, [columns, count, *form.out])
        edges = [(0, 0, 0)] * 2
        for at, (size, _, s, _, (low, _), n) in zip(offset, cells.axes_of(form), strict=True):
            edges.append((at - low, size - (at - low + (n - 1) * s + 1), s - 1))
        part = pad_tensor(g, part, np.zeros((), dy.dtype), edges)
        shape = columns, count, *form.size
        total = part if total is None else Tensor(g("Add", total, part), shape, dy.dtype)
    return g.transpose(total, (1, 0, *range(2, total.ndim)))


def _of_weight(g: Nodes, form: Conv, x: Any, dy: Any) -> Any:
    """Write the gradient of the weight by products where that is faster, else return None."""
    taps, rows, columns = prod(form.kernel), dy.shape[1], x.shape[1]
    if cells.of_channels(form, (rows, columns // form.groups)):
        return cells.channels_of_weight(g, form, x, dy)
    pointwise = taps == 1 and not any(map(any, form.pads))
    many = columns >= cells.MANY_CHANNELS and taps <= cells.MOST_TAPS
    if form.groups > 1 or not (many or pointwise or prod(form.out) <= FEW_PLACES):
        return None
    if not pointwise or rows * columns > (rows + columns) * prod(form.out):
        return cells.of_weight(g, form, x, dy)
    x = g.slice(x, [0] * x.ndim, x.shape, [1, 1, *form.strides])
    x, dy = (g.reshape(a, [*a.shape[:2], prod(form.out)]) for a in (x, dy))
    y = g("MatMul", dy, g.transpose(x, (0, 2, 1)))
    y = g.reduce_tensor("ReduceSum", Tensor(y, (x.shape[0], rows, columns), x.dtype), [0])
    return g.reshape(y, (rows, columns, *form.kernel))


@primitive("batch_normalization")
def batch_normalization(g, x, *vectors, options, equation):
    epsilon, channels = options
    same = all(v.dtype == x.dtype and v.ndim == 1 for v in vectors)
    if not same or x.dtype not in (np.float32, np.float64) or x.ndim < 2:
        return g.program(inner_program(equation), [x, *vectors])[0]
    first = tuple(range(x.ndim)) if channels == 1 else (0, x.ndim - 1, *range(1, x.ndim - 1))
    images = g.transpose(x, first)
    y = Tensor(g("BatchNormalization", images, *vectors, epsilon=epsilon), images.shape, x.dtype)
    return g.transpose(y, np.argsort(first))


@primitive("window_maximum")
def window_maximum(g, x, *, taps, equation):
    """Write MaxPool; its second result, the indices of the maxima, serves the gradient."""
    if x.dtype not in (np.float32, np.float64) or (pooled := _max_pool(g, x, taps)) is None:
        return g.program(inner_program(equation), [x])[0]
    return pooled[0]


@primitive("window_winner")
def window_winner(g, x, y, *, equation, out):
    """Write the index of each window's maximum, and record the images on it for `_choice`."""
    winner = g.program(inner_program(equation), [x, y])[0]
    winner.windows = x
    return winner


def _max_pool(g: Nodes, x: Any, taps: Any) -> tuple[Tensor, Tensor] | None:
    """Write MaxPool once for each pair of images and windows.

    Returns:
      The maxima, in the layout of x, and their indices into the flat images, with channels first;
      None if MaxPool cannot express the windows.
    """
    last, rank = taps.lead == 1, len(taps.size)
    if isinstance(x, np.ndarray) or rank > 3 or x.ndim != rank + 2:
        return None
    inside = all(0 <= edge < k for _, k, _, _, edges, _ in cells.axes_of(taps) for edge in edges)
    if not inside or not all_known([*taps.size, *taps.out]):
        return None
    images = g.transpose(x, (0, rank + 1, *range(1, rank + 1))) if last else x
    if (key := (str(images), taps)) not in g.pools:
        attributes = _attributes(taps, "kernel_shape", "strides", "dilations", "pads")
        y, places = g.several("MaxPool", 2, images, **attributes)
        shape = (*images.shape[:2], *taps.out)
        g.pools[key] = Tensor(y, shape, x.dtype), Tensor(places, shape, np.int64)
    y, places = g.pools[key]
    return (g.transpose(y, (0, *range(2, rank + 2), 1)) if last else y), places


def _choice(g: Nodes, form: Choice, out: int, winner: Any, dy: Any, like: Any) -> Any:
    """Write the gradient of a max pooling: scatter-add each number to where its maximum was."""
    taps, x = form.taps, getattr(winner, "windows", None)
    if out != 1 or x is None or g.opset < 16 or dy.dtype != x.dtype:
        return None
    if (pooled := _max_pool(g, x, taps)) is None:
        return None
    last, rank = taps.lead == 1, len(taps.size)
    first = (0, rank + 1, *range(1, rank + 1)) if last else tuple(range(rank + 2))
    dy = g.transpose(dy, first)
    shape = [like.shape[i] for i in first]
    zeros = expand(g, np.zeros(1, dy.dtype), [prod(shape)])
    places, dy = g.reshape(pooled[1], [-1]), g.reshape(dy, [-1])
    y = g("ScatterElements", zeros, places, dy, axis=0, reduction="add")
    y = g.reshape(Tensor(y, (prod(shape),), like.dtype), shape)
    return g.transpose(y, np.argsort(first))


RULES[Choice] = _choice
