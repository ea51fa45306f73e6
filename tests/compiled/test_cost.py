"""A training step does the work of the step that one writes by hand: counted, not timed.

XLA counts the program as it was lowered, before its own passes, so the counts are the same on every
machine.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxonnx
from benchmarks import networks
from benchmarks.layers.naive import Naive
from benchmarks.layers.onnx_file import write
from benchmarks.networks import Network, batch
from benchmarks.speed import guard
from benchmarks.systems import train_step
from jaxonnx._jaxpr import programs


def mlp(layers, x):
    return layers.dense(layers.relu(layers.dense(x, 64)), 10)


def cnn(layers, x):
    x = layers.relu(layers.batch_norm(layers.conv(x, 16, 3, pad=1)))
    x = layers.relu(layers.conv(layers.max_pool(x, 2, 2), 32, 3, bias=True))
    return layers.dense(layers.flatten(x), 10)


def encoder(depth):
    def build(layers, tokens):
        x = layers.positions(layers.embed(tokens, 50, 16))
        for _ in range(depth):
            x = x + layers.attention(layers.layer_norm(x), 2)
            x = x + layers.dense(layers.gelu(layers.dense(layers.layer_norm(x), 64)), 16)
        return layers.dense(layers.sequence_mean(layers.layer_norm(x)), 10)

    return Network(build, (4, 8), 10, tokens=50)


NETWORKS = {
    "mlp": Network(mlp, (16, 32), 10),
    "cnn": Network(cnn, (4, 3, 12, 12), 10),
    "encoder": encoder(2),
}


def imported(network, folder):
    """The step of `train` of an ONNX file, traced."""
    write(network, folder / "network.onnx")
    model = jaxonnx.load(folder / "network.onnx")
    tables = {n for n, v in model.state.items() if v.ndim == 2}
    model = model.with_trainable(lambda name, _: name in model.params or name in tables)
    step, *arguments = train_step(model, *map(jnp.asarray, batch(network)))
    return jax.jit(step).trace(*arguments)


def written(network):
    """The same in plain JAX, traced: forward, softmax cross-entropy, backward and Adam."""
    optimizer = optax.adam(1e-3)
    params, state = {}, {}
    x, y = map(jnp.asarray, batch(network))
    network.build(Naive(params, state, train=False), x)

    def step(params, state, memory, x, y):
        def objective(params):
            layers = Naive(params, state, train=True)
            logits = network.build(layers, x)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return loss, layers.renewed

        (loss, renewed), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        updates, memory = optimizer.update(gradients, memory, params)
        return optax.apply_updates(params, updates), renewed, memory, loss

    return jax.jit(step).trace(params, state, optimizer.init(params), x, y)


def count(text, operation):
    return len(re.findall(rf"stablehlo\.{operation}\b", text))


@pytest.mark.deep
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_costs_what_it_costs_by_hand(name, tmp_path):
    traced = imported(NETWORKS[name], tmp_path)
    ours, theirs = (t.lower() for t in (traced, written(NETWORKS[name])))
    costs: Any = [lowered.cost_analysis() for lowered in (ours, theirs)]
    flops, plain = (cost["flops"] for cost in costs)
    # a number whose update is not finite stays as it was: three operations, in the same pass;
    # four more see it in small arrays, two keep their moments where a step is not taken
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(theirs.args_info[0][0])]
    guard = sum(3 * n + 6 * n * (n <= 1024) for n in sizes)
    np.testing.assert_allclose(flops, plain + guard, rtol=0.02)
    text, other = ours.as_text(), theirs.as_text()
    # a convolution may become a product, or sums where there are few channels
    products = [count(t, "convolution") + count(t, "dot_general") for t in (text, other)]
    assert products[0] <= products[1]
    assert count(text, "while") == count(other, "while") == 0
    # the conditional around the update, and no other; those by platform are gone when XLA compiles
    assert conditionals(traced.jaxpr) == 1


def conditionals(program):
    equations = getattr(program, "jaxpr", program).eqns
    own = [e for e in equations if e.primitive.name == "cond"]
    within = (conditionals(p) for e in equations for p in programs(e.params))
    return sum(not e.params.get("branches_platforms") for e in own) + sum(within)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["mlp", "encoder"])
def test_what_is_not_finite_is_seen_at_little_cost(name):
    """As compiled; `python -m benchmarks.speed.guard` times it."""
    cost = guard.more(guard.compiled(networks.NETWORKS[name]))
    assert cost["flops"] < 1.02
    assert cost["bytes accessed"] < 1.05  # XLA's count, which also has what it fuses otherwise


def equations(program, seen):
    """Of a program and of those in it, each of which counts once."""
    program = getattr(program, "jaxpr", program)
    if id(program) in seen:
        return 0
    seen.append(id(program))

    def is_program(x):
        return hasattr(x, "eqns") or hasattr(x, "jaxpr")

    inner = [jax.tree.leaves([*e.params.values()], is_leaf=is_program) for e in program.eqns]
    programs = [x for leaves in inner for x in leaves if is_program(x)]
    return len(program.eqns) + sum(equations(x, seen) for x in programs)


def test_a_traced_step_grows_by_no_more_with_every_layer(tmp_path):
    two, three, four = (equations(imported(encoder(n), tmp_path).jaxpr, []) for n in (2, 3, 4))
    assert four - three <= three - two
    by_hand = [written(encoder(n)) for n in (2, 4)]
    few, many = (equations(trace.jaxpr, []) for trace in by_hand)
    weights = [len(jax.tree.leaves(trace.args_info[0][0])) for trace in by_hand]
    # where a step is not taken, a weight and its two moments stay
    assert four - two < 1.3 * (many - few) + 3 * (weights[1] - weights[0])
