"""The inputs of matrix products on calibration data, one group of products at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.uses import Use, uses
from jaxonnx._rewrite.network import Network
from jaxonnx._run.scope import Context, Scope
from jaxonnx.errors import InputError
from jaxonnx.quantization._padding import find_token_axes
from jaxonnx.quantization._sites import PRODUCTS, WeightSite


@dataclass(frozen=True)
class Products:
    """Products of one activation with weights, like those with the matrices of q, k and v."""

    value: str
    """The activation."""
    axis: int
    """The axis of the activation that is summed over."""
    strides: tuple[int, ...] = ()
    """Those of a pointwise convolution, which reads every n-th place only."""
    uses: list[Use] = field(default_factory=list)
    """The uses of the weights."""

    @property
    def weights(self) -> list[str]:
        """The names of the weights."""
        return [use.name for use in self.uses]

    def rows(self, x: Any) -> Any:
        """Return the activation as rows of inputs, [n, inputs]."""
        for axis, step in enumerate(self.strides, 2):
            x = x[(slice(None),) * axis + (slice(None, None, step),)]
        x = jnp.moveaxis(jnp.asarray(x, jnp.float32), self.axis, -1)
        return x.reshape(-1, x.shape[-1])


_LEAST = 0.1
"""The least mean square of an input, as a share of the median one."""


@dataclass(frozen=True)
class Inputs:
    """Statistics of the rows that products read."""

    hessian: np.ndarray
    """The mean of x x^T, [inputs, inputs] in float32: half the Hessian of an output's error."""
    magnitude: np.ndarray
    """The mean of |x|, [inputs]."""

    @property
    def squares(self) -> np.ndarray:
        """The mean of x^2, [inputs], by which scales weigh the errors of weights.

        An input that is 0 in (nearly) all of the data counts as a small one: the weights that read
        it would be clipped or rounded away, and other data may reach it.
        """
        squares = np.diag(self.hessian)
        if not squares.any():
            return squares
        return np.maximum(squares, _LEAST * np.median(squares[squares > 0]))


def find_products(model: Network, sites: Mapping[str, WeightSite]) -> list[Products]:
    """Group the products with quantized matrices by their activations, in order of the graph.

    These are MatMul, Gemm, and convolutions with windows of one element. A weight that several
    nodes read is in the group of the first.
    """
    groups: dict[tuple, Products] = {}
    grouped: set[str] = set()
    for use in uses(model.graph, model.tensors):
        key = _read_activation(use, model.tensors) if use.name in sites else None
        if key is not None and use.name not in grouped and key[0] not in model.tensors:
            grouped.add(use.name)
            group = groups.setdefault(key, Products(*key))
            group.uses.append(use)
    return [*groups.values()]


def _read_activation(
    use: Use, tensors: Mapping[str, Any]
) -> tuple[str, int, tuple[int, ...]] | None:
    """Return the activation, axis and strides of a product with a matrix; None for others."""
    node, place = use.node, use.matrix
    if node.op.domain or node.op.name not in PRODUCTS or use.outer is not node or place is None:
        return None
    shape, attributes = tensors[use.name].shape, node.attributes
    if place.batch or place.grouped or any(shape[axis] != 1 for axis in place.kernel):
        return None
    value = node.inputs[1 - use.position]
    if node.op.name == "MatMul":
        return value, -1 if use.position == 1 else -2, ()
    if node.op.name == "Gemm":
        flipped = attributes.get("transA" if use.position == 1 else "transB", 0)
        return value, int((use.position == 1) != bool(flipped)), ()
    if node.op.name == "ConvTranspose" or any(attributes.get("pads") or ()):
        return None
    return value, 1, (*(attributes.get("strides") or ()),)


def visit(
    model: Network, groups: Sequence[Products], examples: Sequence[Sequence[Any]], tensors: Any
) -> Iterator[tuple[Products, Inputs]]:
    """Evaluate a network on all batches at once, and stop at each group of products.

    Between two stops, values of a batch that no later node reads are dropped, so that memory is
    that of the activations between two layers, and of one Hessian.

    Args:
      model: the network in floating point.
      groups: the products, in order of the graph.
      examples: batches of inputs, in the order of the model's. Padding does not count.
      tensors: the tensors by name, which the caller may replace at each stop: later nodes read the
        new ones.

    Yields:
      A group, and the statistics of its activation.

    Raises:
      InputError: the activation is not finite.
    """
    graph = model.graph
    # 1. the last reader of each value, the node of each stop, and a scope for each batch
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.reads}
    last |= dict.fromkeys(graph.outputs, -1)  # nothing needs the outputs
    place = {id(node): i for i, node in enumerate(graph.nodes)}
    stops = [min(place[id(use.node)] for use in group.uses) for group in groups]
    scopes = [
        (Scope(graph, Context(tensors, training=False), None, inputs), inputs)
        for inputs in _supply_inputs(model, examples)
    ]
    tokens = find_token_axes(model, [group.value for group in groups], examples)
    # 2. from stop to stop: step all batches, and sum the products and sizes of the rows
    start = 0
    for group, stop in sorted(zip(groups, stops, strict=True), key=lambda pair: pair[1]):
        total, magnitude, count = 0.0, 0.0, 0
        for scope, inputs in scopes:
            for i in range(start, stop):
                node = graph.nodes[i]
                scope.step(node)
                for name in {*node.reads, *node.outputs}:
                    if last.get(name, -1) <= i and name not in tensors:
                        scope.values.pop(name, None)
            x = scope[group.value]
            rows = group.rows(x)
            is_token = np.ones(len(rows), bool)
            if (axes := tokens.get(group.value)) is not None:
                is_token = group.rows(
                    jnp.broadcast_to(axes.find_tokens(inputs, x.ndim), x.shape)
                ).any(1)
                rows = jnp.where(is_token[:, None], rows, 0)
            total, magnitude = total + rows.T @ rows, magnitude + jnp.abs(rows).sum(0)
            count += int(is_token.sum())
        start = stop
        mean = np.asarray(total) / max(count, 1)
        if not np.isfinite(mean).all():
            raise InputError(
                f"'{group.value}', which '{group.weights[0]}' is multiplied by, is not finite for "
                "some example of the calibration data"
            )
        yield group, Inputs(mean, np.asarray(magnitude) / max(count, 1))
        # 3. the caller may have replaced the weights: renew their views
        operands = [use.node.inputs[use.position] for use in group.uses]
        needed = ancestors(graph.nodes, operands)
        views = [node for node in graph.nodes[:stop] if not needed.isdisjoint(node.outputs)]
        for scope, _ in scopes:
            scope.values.update((name, tensors[name]) for name in group.weights)
            for node in views:
                scope.step(node)


def _supply_inputs(model: Network, examples: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of the graph itself for each batch, those that views supply included."""
    if any(view.maps for view in model.program.views):
        raise InputError(
            "method= needs a network that takes batches itself: save the model, and quantize the "
            "file with batches of the size that it declares"
        )
    names = [value.name for value in model.inputs]
    hidden = [name for name in model.program.base.inputs if name not in names]
    supply = model.program.with_values(hidden)
    first = len(model.graph.outputs)

    @jax.jit
    def read(inputs):
        outputs = supply.evaluate(model.params, model.state, inputs, training=False)
        return outputs[first:]

    for batch in examples:
        inputs = dict(zip(names, map(jnp.asarray, batch), strict=True))
        more = read(inputs) if hidden else ()
        yield inputs | dict(zip(hidden, more, strict=True))


def as_rows(w: np.ndarray, site: WeightSite) -> np.ndarray:
    """Return a matrix, or the weight of a pointwise convolution, as [outputs, inputs]."""
    return np.moveaxis(w, (site.output, site.input), (0, 1)).reshape(
        w.shape[site.output], w.shape[site.input]
    )


def from_rows(rows: np.ndarray, w: np.ndarray, site: WeightSite) -> np.ndarray:
    """Return [outputs, inputs] in the shape of the weight w: the inverse of `as_rows`."""
    ones = (1,) * (w.ndim - 2)
    return np.moveaxis(rows.reshape(*rows.shape, *ones), (0, 1), (site.output, site.input))
