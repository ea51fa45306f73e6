"""The interpreter of jaxprs: calls are entered, loops taken apart, programs replaced."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import _jaxpr as jaxpr


def program(x):
    known = np.float32([1, 2, 3])

    @jax.custom_jvp
    def square(x):
        return x * x

    square.defjvps(lambda dx, y, x: 2 * x * dx)
    y = jax.checkpoint(square)(jax.jit(jnp.sin)(x + known))
    _, y = jax.lax.scan(lambda c, row: (c + row, c * y), y, jnp.stack([y, x]), reverse=True)
    return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + jnp.abs(y).max(), y)


X = np.float32([0.1, 0.2, 0.3])


def bound(equation, inputs):
    results = equation.primitive.bind(*inputs, **equation.params)
    return results if equation.primitive.multiple_results else [results]


def test_arrays_as_values_give_what_the_program_gives():
    (found,) = jaxpr.interpret(jax.make_jaxpr(program)(X), bound, [X])
    np.testing.assert_allclose(found, program(X), rtol=1e-6)


def test_a_rule_sees_no_call_and_the_parts_of_every_loop():
    seen = {}

    def rule(equation, inputs):
        name = equation.primitive.name
        seen[name] = equation, inputs
        return [f"{name}{i}" for i in range(len(equation.outvars))]

    closed = jax.make_jaxpr(program)(X)
    (result,) = jaxpr.interpret(closed, rule, ["x"], constant=lambda value, aval: f"{aval.shape}")
    assert result == "while0"
    assert seen.keys() == {"add", "sin", "mul", "scan", "while"} | (seen.keys() & {
        "broadcast_in_dim", "concatenate", "stack"})  # fmt: skip
    assert seen["add"][1] == ["x", "(3,)"]
    scan = jaxpr.scan(*seen["scan"])
    assert (scan.fixed, scan.carry) == (["mul0"], ["mul0"])
    assert (len(scan.sliced), scan.length, scan.reverse) == (1, 2, True)
    loop = jaxpr.while_loop(*seen["while"])
    assert (loop.tested, loop.fixed, loop.carry) == ([], ["scan1"], ["scan1"])


def test_programs_inside_equations_are_traced_again():
    def doubled(inner, *args):
        return [2 * x for x in jaxpr.interpret(inner, bound, args)]

    def rule(equation, inputs):
        params = jaxpr.retrace_params(equation.params, doubled)
        results = equation.primitive.bind(*inputs, **params)
        return results if equation.primitive.multiple_results else [results]

    def branches(x):
        x = jax.checkpoint(lambda x: x + 1)(x)
        return jax.lax.cond(x[0] > 0, lambda x: x + 1, lambda x: -x, x)

    closed = jax.make_jaxpr(branches)(X)
    (found,) = jaxpr.interpret(closed, rule, [X], enter=lambda equation: None)
    np.testing.assert_allclose(found, 2 * (2 * (X + 1) + 1), rtol=1e-6)
