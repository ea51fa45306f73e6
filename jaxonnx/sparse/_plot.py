"""Pictures of masks."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxonnx._figures import import_pyplot
from jaxonnx._require import check_arguments
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._layers import Layer, by_name, goals

_COLUMNS = 4


def plot_masks(source: Any, layers: Iterable[Layer] | None = None) -> Any:
    """Draw the kept weights, outputs downwards, inputs to the right; return the figure.

    Of a kernel the first position is drawn. The title has the share of kept weights.

    Args:
      source: a model that records sparse weights (`jaxonnx.Model`), or parameters.
      layers: the weights to be drawn, as `layers(params)` reports them; by default those that the
        model records.

    Raises:
      SparsityError: no layer is sparse.
      Error: matplotlib is not installed.
    """
    check_arguments(plot_masks, locals())
    pyplot = import_pyplot()
    recorded = getattr(source, "sparsity", None)
    expected = goals((recorded.layers if recorded else ()) if layers is None else layers)
    if not expected:
        raise SparsityError("no layer is sparse: there is no mask to draw")
    aliases = getattr(source, "aliases", {})
    weights = by_name(getattr(source, "params", source))
    columns = min(len(expected), _COLUMNS)
    rows = -(-len(expected) // columns)
    size = (3 * columns, 3 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for panel in axes.flat[len(expected) :]:
        panel.set_axis_off()
    for panel, (name, goal) in zip(axes.flat, expected.items(), strict=False):
        nonzero = np.moveaxis(np.asarray(weights[name]) != 0, goal.axes, (-2, -1))
        panel.imshow(
            nonzero.reshape(-1, *nonzero.shape[-2:])[0], cmap="Greys", interpolation="nearest"
        )
        title = f"{aliases.get(name, name)}\n{goal.pattern}, {nonzero.mean():.0%} kept"
        panel.set_title(title, fontsize=8)
        panel.set(xlabel="input", ylabel="output")
    return figure
