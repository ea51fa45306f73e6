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
from jaxonnx.quantization._calibration import find_token_axes
from jaxonnx.quantization._sites import PRODUCTS, WeightSite


@dataclass(frozen=True)
class Activation:
    """A value that weights are multiplied by."""

    name: str
    axis: int
    """The axis that is summed over."""
    strides: tuple[int, ...] = ()
    """Those of a pointwise convolution, which reads every n-th place only."""

    def rows(self, x: Any) -> Any:
        """Return the value as rows of inputs, [n, inputs]."""
        for axis, step in enumerate(self.strides, 2):
            x = x[(slice(None),) * axis + (slice(None, None, step),)]
        x = jnp.moveaxis(jnp.asarray(x, jnp.float32), self.axis, -1)
        return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class Products:
    """Products of the same activations with weights, like those with the matrices of q, k and v."""

    activations: tuple[Activation, ...]
    """Several where layers share the weights, as the blocks of ALBERT do."""
    uses: list[Use] = field(default_factory=list)
    """The uses of the weights."""

    @property
    def weights(self) -> list[str]:
        """The names of the weights."""
        return [*dict.fromkeys(use.name for use in self.uses)]


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
    """Group the products with quantized matrices by the activations that a matrix multiplies.

    These are MatMul, Gemm, and convolutions with windows of one element, in the main graph.
    Products with the transpose of a matrix that others read as it is do not count.
    """
    by_weight: dict[str, dict[Activation, list[Use]]] = {}
    for use in uses(model.graph, model.tensors):
        activation = _find_activation(use, model.tensors, sites)
        if activation is not None and activation.name not in model.tensors:
            by_weight.setdefault(use.name, {}).setdefault(activation, []).append(use)
    groups: dict[tuple[Activation, ...], Products] = {}
    for by_activation in by_weight.values():
        activations = tuple(by_activation)
        group = groups.setdefault(activations, Products(activations))
        group.uses.extend(use for part in by_activation.values() for use in part)
    return [*groups.values()]


def _find_activation(
    use: Use, tensors: Mapping[str, Any], sites: Mapping[str, WeightSite]
) -> Activation | None:
    """Return the activation that a product multiplies by a matrix; None for other uses."""
    node, place, site = use.node, use.matrix, sites.get(use.name)
    if node.op.domain or node.op.name not in PRODUCTS or use.outer is not node:
        return None
    if site is None or place is None or place.input != site.input:
        return None
    shape, attributes = tensors[use.name].shape, node.attributes
    if place.batch or place.grouped or any(shape[axis] != 1 for axis in place.kernel):
        return None
    value = node.inputs[1 - use.position]
    if node.op.name == "MatMul":
        return Activation(value, -1 if use.position == 1 else -2)
    if node.op.name == "Gemm":
        flipped = attributes.get("transA" if use.position == 1 else "transB", 0)
        return Activation(value, int((use.position == 1) != bool(flipped)))
    if node.op.name == "ConvTranspose" or any(attributes.get("pads") or ()):
        return None
    return Activation(value, 1, (*(attributes.get("strides") or ()),))


def visit(
    model: Network, groups: Sequence[Products], examples: Sequence[Sequence[Any]], tensors: Any
) -> Iterator[tuple[Products, Inputs]]:
    """Evaluate a network on all batches at once, and stop at each group of products.

    Between two stops, values of a batch that no later node reads are dropped, so that memory is
    that of the activations between two layers, of one Hessian, and of one for each group of shared
    weights. The stop of these is before their first product. The rows of their other products are
    those of the network as it is given, and are summed in a pass before.

    Args:
      model: the network in floating point.
      groups: the products.
      examples: batches of inputs, in the order of the model's. Padding does not count.
      tensors: the tensors by name, which the caller may replace at each stop: later nodes read the
        new ones.

    Yields:
      A group, and the statistics of its activations.

    Raises:
      InputError: an activation is not finite.
    """
    graph = model.graph
    # 1. the last reader of each value, and the stops, behind the nodes that compute activations
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.reads}
    last |= dict.fromkeys(graph.outputs, -1)  # nothing needs the outputs
    places = {name: i for i, node in enumerate(graph.nodes, 1) for name in node.outputs}
    batches = [*_supply_inputs(model, examples)]
    values = [*dict.fromkeys(x.name for group in groups for x in group.activations)]
    tokens = find_token_axes(model, values, examples)

    def walk(
        chosen: Sequence[tuple[Products, Activation]],
    ) -> Iterator[tuple[Products, list[Any], list[Scope], int]]:
        """Step all batches from activation to activation, and sum products and sizes of rows."""
        context, start = Context(tensors, training=False), 0
        scopes = [Scope(graph, context, None, inputs) for inputs in batches]
        for group, activation in sorted(chosen, key=lambda pair: places.get(pair[1].name, 0)):
            total, magnitude, count = 0.0, 0.0, 0
            stop = places.get(activation.name, 0)
            for scope, inputs in zip(scopes, batches, strict=True):
                for i in range(start, stop):
                    node = graph.nodes[i]
                    scope.step(node)
                    for name in {*node.reads, *node.outputs}:
                        if last.get(name, -1) <= i and name not in tensors:
                            scope.values.pop(name, None)
                x = scope[activation.name]
                rows = activation.rows(x)
                is_token = np.ones(len(rows), bool)
                if (axes := tokens.get(activation.name)) is not None:
                    is_token = activation.rows(
                        jnp.broadcast_to(axes.find_tokens(inputs, x.ndim), x.shape)
                    ).any(1)
                    rows = jnp.where(is_token[:, None], rows, 0)
                total, magnitude = total + rows.T @ rows, magnitude + jnp.abs(rows).sum(0)
                count += int(is_token.sum())
            start = stop
            if not np.isfinite(total).all():
                raise InputError(
                    f"'{activation.name}', which '{group.weights[0]}' is multiplied by, is not "
                    "finite for some example of the calibration data"
                )
            yield group, [np.asarray(total), np.asarray(magnitude), count], scopes, stop

    # 2. the sums of shared weights, but those of their first products
    others: dict[int, list[Any]] = {}
    shared = [(group, x) for group in groups for x in group.activations[1:]]
    for group, sums, *_ in walk(shared):
        before = others.get(id(group), [0, 0, 0])
        others[id(group)] = [x + y for x, y in zip(before, sums, strict=True)]
    # 3. the sums of first products, at which weights change
    for group, sums, scopes, stop in walk([(group, group.activations[0]) for group in groups]):
        more = others.pop(id(group), [0, 0, 0])
        total, magnitude, count = (x + y for x, y in zip(sums, more, strict=True))
        yield group, Inputs(total / max(count, 1), magnitude / max(count, 1))
        # 4. the caller may have replaced the weights: renew their views
        operands = [use.node.inputs[use.position] for use in group.uses]
        needed = ancestors(graph.nodes, operands)
        views = [node for node in graph.nodes[:stop] if not needed.isdisjoint(node.outputs)]
        for scope in scopes:
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
