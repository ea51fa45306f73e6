"""Rounding of weights up or down by the error of the layer, not each to the nearest number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._rewrite.network import Network
from jaxonnx._run.scope import Context, run
from jaxonnx.quantization._ranges import Parameters, spread_scale
from jaxonnx.quantization._scheme import Quantization
from jaxonnx.quantization._sites import PRODUCTS, Sites

_STEPS, _RATE = 400, 0.02
"""The steps for each weight, and the learning rate of Adam."""
_EXAMPLES, _BATCH = 256, 32
"""The examples that layers are compared on, and those of each step."""
_FIRST, _LAST = 20.0, 2.0
"""The exponent of the regularizer 1 - |2 h - 1|^exponent in the first and in the last step. A large
exponent hardly pulls h towards 0 or 1 unless it is near one of them; a small one always does."""


def learn_rounding(
    model: Network,
    sites: Sites,
    scales: Mapping[str, Parameters],
    examples: Sequence[Sequence[Any]],
    schemes: Mapping[str, Quantization],
) -> dict[str, np.ndarray]:
    """Learn for each number of a weight whether to round it up or down, one layer at a time.

    This is AdaRound, "Up or Down? Adaptive Rounding for Post-Training Quantization"
    (arXiv:2004.10568). It differs in that each layer reads the activations of the network in
    floating point, and that the mean of the remaining error is added to the layer's bias.

    Args:
      model: the network before quantization.
      sites: what is quantized.
      scales: the scales of the weights.
      examples: batches of inputs, in the order of the model's.
      schemes: the scheme of each weight.

    Returns:
      The rounded weights (multiples of their scales, float32) and the corrected biases, by name.
    """
    graph = model.graph
    nodes = {
        node.inputs[1]: node
        for node in graph.nodes
        if node.op.name in PRODUCTS and not node.op.domain and node.inputs[1] in scales
        if node.inputs[0] not in model.tensors
    }
    reads = _evaluate(model, [node.inputs[0] for node in nodes.values()], examples)
    biases = {bias.name for bias in sites.biases}
    result = {}
    for name, node in nodes.items():
        if name not in model.params:
            continue
        layer = partial(_apply, graph, node, dict(model.tensors))
        w, parameters = np.asarray(model.tensors[name]), scales[name]
        x = reads[node.inputs[0]]
        result[name] = rounded = _round(layer, w, parameters, x, schemes[name])
        bias = node.inputs[2] if len(node.inputs) > 2 else ""
        if bias in biases & model.params.keys():
            error = np.asarray(layer(w, x) - layer(rounded, x))
            axes = tuple(i for i in range(error.ndim) if i != 1)  # all but the channels
            result[bias] = np.asarray(model.params[bias]) + error.mean(axes)
    return result


def _evaluate(
    model: Network, names: Sequence[str], examples: Sequence[Sequence[Any]]
) -> dict[str, np.ndarray]:
    """Return values of the graph for the first examples, concatenated along the batch axis."""
    wanted = [*dict.fromkeys(names)]
    program, first = model.program.with_values(wanted), len(model.graph.outputs)
    inputs = [value.name for value in model.inputs]
    read = jax.jit(
        lambda *x: program.evaluate(model.params, model.state, dict(zip(inputs, x, strict=True)))
    )
    parts, count = [], 0
    for batch in examples:
        parts.append(jax.device_get(read(*batch))[first:])
        count += len(parts[-1][0])
        if count >= _EXAMPLES:
            break
    return {n: np.concatenate([p[i] for p in parts]) for i, n in enumerate(wanted)}


def _apply(graph: Graph, node: Node, tensors: dict[str, Any], w: Any, x: Any) -> Any:
    """Evaluate one node of the graph with another weight w on an activation x."""
    alone = replace(graph, nodes=(node,), outputs=node.outputs[:1])
    (y,) = run(alone, {node.inputs[0]: x}, Context({**tensors, node.inputs[1]: w}))
    return y


def _round(
    layer: Any, w: np.ndarray, parameters: Parameters, x: np.ndarray, scheme: Quantization
) -> np.ndarray:
    """Round a weight up or down so that its layer's result changes least.

    With h in [0, 1] for each number, the weight is scale * (floor(w / scale) + h). Adam minimizes
    the squared change of the result and a regularizer that pulls every h to 0 or 1; at the end h is
    rounded. The nearest rounding is returned if that is not better.

    Args:
      layer: a function of the weight and x.
      w: the weight in floating point.
      parameters: its scales.
      x: what the layer reads, with a batch axis first.
      scheme: the type of the weight.
    """
    scale = spread_scale(parameters, w)
    least, most = scheme.weight_limits
    ratio = np.clip(w / scale, least, most)
    below = np.floor(ratio)
    # h is a sigmoid stretched to [-0.1, 1.1] and clipped, so that it reaches 0 and 1; `start` is
    # its inverse, at which h is the fraction that floor drops
    share = np.clip(ratio - below, 0.01, 0.99)
    start = jnp.asarray(-np.log(1.2 / (share + 0.1) - 1), jnp.float32)
    nearest = np.rint(ratio) * scale

    def soft(v):
        """Return h, and the weight that it gives."""
        h = jnp.clip(jax.nn.sigmoid(v) * 1.2 - 0.1, 0, 1)
        return h, jnp.clip(below + h, least, most) * scale

    @jax.jit
    def error(value, x):
        return jnp.square(layer(value, x) - layer(w, x)).mean()

    first = float(error(nearest, x[:_BATCH]))
    if not first:
        return nearest
    optimizer = optax.adam(_RATE)

    @jax.jit
    def step(v, state, x, y, power, weight):
        def loss(v):
            h, value = soft(v)
            undecided = 1 - jnp.abs(2 * h - 1) ** power  # 0 where h is 0 or 1
            return jnp.square(layer(value, x) - y).mean() / first + weight * undecided.mean()

        change, state = optimizer.update(jax.grad(loss)(v), state)
        return optax.apply_updates(v, change), state

    random = np.random.default_rng(0)
    v, state = start, optimizer.init(start)
    target = np.asarray(jax.jit(layer)(w, x))
    for i in range(_STEPS):
        rows = random.permutation(len(x))[:_BATCH]
        power = _LAST + (_FIRST - _LAST) * (1 - i / _STEPS)
        # the first fifth of the steps is without the regularizer
        v, state = step(v, state, x[rows], target[rows], power, float(i > _STEPS / 5))
    learned = np.asarray(np.clip(below + (np.asarray(soft(v)[0]) > 0.5), least, most) * scale)
    return learned if error(learned, x) < error(nearest, x) else nearest
