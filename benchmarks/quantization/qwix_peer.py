"""Qwix on the network of an ONNX file, written in Flax: after training, and in training.

Qwix (0.1.8) has no ranges for activations here but those of each image as it comes, symmetric, and
leaves BatchNormalization where it is: finer scales than those of a file that is quantized once. Its
networks stay in JAX, and are evaluated there, by `PtqProvider`, with integers. Its convolutions
want one type for weights and activations, so that there is no int4 beside int8, and grouped ones
have no gradient in `QtProvider`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import qwix
from onnx import numpy_helper

from benchmarks.layers.linen import Net
from benchmarks.networks import Network

BATCH = 64


def read_variables(path, net: Net, x) -> dict[str, Any]:
    """Return the variables of the Flax network with the weights of the file, in order of use."""
    proto = onnx.load(path)
    stored: dict[str, Any] = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    variables: dict[str, Any] = {"params": {}, "batch_stats": {}}
    channels = x.shape[-1]
    counts = dict.fromkeys(("Conv", "BatchNorm", "Dense"), 0)

    def put(kind, **arrays):
        name = f"{kind}_{counts[kind]}"
        counts[kind] += 1
        for leaf, value in arrays.items():
            part = "batch_stats" if leaf in ("mean", "var") else "params"
            variables[part].setdefault(name, {})[leaf] = jnp.asarray(value)

    for node in proto.graph.node:
        read: list[Any] = [stored.get(name) for name in node.input]
        if node.op_type == "Conv":
            channels = len(read[1])
            put("Conv", kernel=read[1].transpose(2, 3, 1, 0))
        elif node.op_type == "BatchNormalization":
            put("BatchNorm", **dict(zip(("scale", "bias", "mean", "var"), read[1:], strict=True)))
        elif node.op_type == "Gemm":
            kernel = read[1].T
            if not counts["Dense"]:  # which reads the pixels, by channels in ONNX
                side = math.isqrt(len(kernel) // channels)
                kernel = kernel.reshape(channels, side, side, -1).swapaxes(0, 1).swapaxes(1, 2)
                kernel = kernel.reshape(channels * side**2, -1)
            put("Dense", kernel=kernel, bias=read[2])
    wanted = jax.eval_shape(lambda: net.init(jax.random.key(0), x, False))
    assert jax.tree.map(jnp.shape, dict(wanted)) == jax.tree.map(jnp.shape, variables)
    return variables


def accuracy(net, variables, data) -> float:
    """Return the percentage of the labels that the network gives."""
    logits = jax.jit(lambda x: net.apply(variables, x, False))
    parts = range(0, len(data[0]), 500)
    found = np.concatenate([logits(data[0][i : i + 500]).argmax(1) for i in parts])
    return 100 * float((found == data[1]).mean())


def train(net, variables, data, epochs: int, rate: float, seed: int):
    """Train in the mode of BatchNormalization's batches, with the optimizer of our own training."""
    x, y = data
    count = len(x) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, epochs * count, 0.05))

    @jax.jit
    def step(variables, state, x, y):
        def loss(params):
            whole = variables | {"params": params}
            logits, moved = net.apply(whole, x, True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), moved

        gradients, moved = jax.grad(loss, has_aux=True)(variables["params"])
        updates, state = optimizer.update(gradients, state)
        params = optax.apply_updates(variables["params"], updates)
        return variables | {"params": params} | moved, state

    state = optimizer.init(variables["params"])
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        for rows in random.permutation(len(x))[: count * BATCH].reshape(count, BATCH):
            variables, state = step(variables, state, x[rows], y[rows])
    return variables


def measure(path, network: Network, data, test, epochs: int, rate: float, seed: int):
    """Return the accuracy of the file in Flax, in int8 by `PtqProvider`, and after `QtProvider`."""
    (x, y), (x_test, y_test) = (
        (np.moveaxis(images, 1, -1), labels) for images, labels in (data, test)
    )
    net, types = Net(network), {"weight_qtype": jnp.int8, "act_qtype": jnp.int8}
    variables = read_variables(path, net, x[:1])
    integers = qwix.quantize_model(net, qwix.PtqProvider([qwix.QuantizationRule(**types)]))
    rounding = qwix.quantize_model(net, qwix.QtProvider([qwix.QtRule(**types)]))
    abstract = jax.eval_shape(lambda: integers.init(jax.random.key(0), x[:1], False))["params"]

    def rounded(variables):
        return variables | {"params": qwix.quantize_params(variables["params"], abstract)}

    trained = train(rounding, variables, (x, y), epochs, rate, seed)
    cases = (net, variables), (integers, rounded(variables)), (integers, rounded(trained))
    return [accuracy(one, values, (x_test, y_test)) for one, values in cases]
