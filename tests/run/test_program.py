"""Calls that run at once, and what they find out about a graph."""

import dataclasses
import threading

import jax
import numpy as np
import onnx.parser
import pytest

import jaxonnx

THREADS = 8

FIXING = """
<ir_version: 9, opset_import: ["": 18]>
g (float[n] x, int64[1] size, int64 count) => (float[m] y, float[k] z) {
  y = Expand(x, size)
  none = Sub(count, count)
  one = Div(count, count)
  steps = Range(none, count, one)
  shifted = Cast <to = 1> (steps)
  z = Neg(shifted)
}
"""

CUT = """
<ir_version: 9, opset_import: ["": 18]>
g (float[n] x, int64[m] sizes) => (float[k] y) {
  total = ReduceSum <keepdims = 0> (sizes)
  none = Sub(total, total)
  one = Div(total, total)
  steps = Range(none, total, one)
  numbers = Cast <to = 1> (steps)
  largest = ReduceMax <keepdims = 0> (x)
  y = Add(numbers, largest)
}
"""


def at_once(call):
    """Runs `call(i)` in every thread, all starting together; returns what went wrong."""
    start, failures = threading.Barrier(THREADS), []

    def work(i):
        start.wait()
        try:
            call(i)
        except Exception as error:  # noqa: BLE001  (reported by the test that asked)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


@pytest.mark.deep
def test_threads_that_fix_shapes_differently():
    model = jaxonnx.load(onnx.parser.parse_model(FIXING))

    def call(i):
        for j in range(5):  # 40 pairs of values, more than are compiled
            size, count = 1 + i, 1 + j
            y, z = model(np.ones(1, np.float32), np.array([size]), np.array(count))
            np.testing.assert_array_equal(y, np.ones(size))
            np.testing.assert_array_equal(z, -np.arange(count))

    assert not at_once(call)
    assert not at_once(call)


def test_threads_that_cut_a_graph():
    for _ in range(2):
        model = jaxonnx.load(onnx.parser.parse_model(CUT))

        def call(i, model=model):
            sizes = np.ones(100 + i, np.int64)  # too many to be fixed
            y = model(np.ones(3, np.float32), sizes)
            np.testing.assert_array_equal(y, np.arange(len(sizes)) + 1)

        assert not at_once(call)
        (parts,) = model.program._plan.parts.values()
        assert parts.rest is not None


def test_a_plan_is_never_changed():
    model = jaxonnx.load(onnx.parser.parse_model(FIXING))
    before = model.program._plan
    model(np.ones(1, np.float32), np.array([2]), np.array(3))
    after = model.program._plan
    assert (before.fixed, {*before.parts}) == (frozenset(), set())
    assert after.fixed == {"size", "count"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(after, "fixed", frozenset())  # noqa: B010  (pyright refuses the assignment)
    # other weights do not begin anew
    assert model.replace(params=model.params).program._plan is after
    assert jax.tree.leaves(model.params) == []


PAIRS = ("y", "a"), ("z", "b"), ("o", "c")
CALLS = "a = MatMul(x, w) {} b = MatMul(y, w) {} c = MatMul(z, w) {}"
NORM = "{}, m{i}, v{i} = BatchNormalization<training_mode = 1>({}, scale, bias, mean, var)"


@pytest.mark.parametrize("kind", ["nodes", "function", "rematerialized"])
def test_a_normalization_that_is_called_three_times_moves_its_statistics_three_times(kind):
    """As PyTorch does: the file has three nodes that read the same running statistics."""
    norms = [
        NORM.format(out, x, i=i) for i, (out, x) in enumerate((("y", "a"), ("z", "b"), ("o", "c")))
    ]
    functions = ""
    if kind == "function":
        norms = [f"{out} = own.norm({x}, scale, bias, mean, var)" for out, x in PAIRS]
        norm = NORM.format("y", "x", i=0)
        functions = f"""<domain: "own", opset_import: ["": 17]>
        norm (x, scale, bias, mean, var) => (y) {{ {norm} }}"""
    proto = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 17, "own": 1]> g (float[4, 3] x) => (float[4, 3] o) {{
      {CALLS.format(*norms)} }} {functions}""")
    random = np.random.default_rng(0)
    tensors = {name: random.random(3) for name in ("scale", "bias", "mean", "var")}
    for name, value in {**tensors, "w": random.normal(size=(3, 3))}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), name))
    model, x = jaxonnx.load(proto), np.float32(random.normal(size=(4, 3)))
    model = model.with_remat() if kind == "rematerialized" else model

    def loss(params):
        y, state = model.apply_train(params, model.state, jax.random.key(0), x)
        return (y**2).sum(), state

    state = jax.jit(jax.grad(loss, has_aux=True))(model.params)[1]
    p, mean, var, h = model.params, tensors["mean"], tensors["var"], x
    for _ in range(3):
        h = h @ np.asarray(p["w"])
        mean, var = 0.9 * mean + 0.1 * h.mean(0), 0.9 * var + 0.1 * h.var(0)
        h = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5) * np.asarray(p["scale"]) + np.asarray(
            p["bias"]
        )
    np.testing.assert_allclose(state["mean"], mean, rtol=1e-4)
    np.testing.assert_allclose(state["var"], var, rtol=1e-4)
