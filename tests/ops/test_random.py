"""Random operators: moments, support, types, and which draws are equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import TensorProto, helper

from jaxonnx._graph.bind import bind
from jaxonnx._run.scope import Context, run
from jaxonnx.errors import NodeError

N = 20_000
ROW = np.zeros((1, N), np.float32)


def draw(op, inputs=(), *, opset=22, key=0, nodes=1, **attributes):
    """The outputs of `nodes` equal nodes under one key."""
    names = [f"x{i}" for i in range(len(inputs))]
    proto = helper.make_graph(
        [helper.make_node(op, names, [f"y{i}"], **attributes) for i in range(nodes)],
        "g",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for n, x in zip(names, inputs, strict=True)
        ],
        [helper.make_empty_tensor_value_info(f"y{i}") for i in range(nodes)],
    )
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", opset)])
    graph = bind(model, model.graph, ())
    given = dict(zip(names, inputs, strict=True))
    results = jax.jit(lambda k, given: run(graph, given, Context(key=k)))(
        jax.random.key(key), given
    )
    return results if nodes > 1 else results[0]


@pytest.mark.parametrize("opset", [1, 22])
def test_normal_moments(opset):
    for y in (
        draw("RandomNormal", shape=[N], mean=2.0, scale=3.0, opset=opset),
        draw("RandomNormalLike", [ROW], mean=2.0, scale=3.0, opset=opset),
    ):
        z = (np.asarray(y).ravel() - 2) / 3
        moments = [np.mean(z**p) for p in (1, 2, 3, 4)]
        np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.15)


@pytest.mark.parametrize("opset", [1, 22])
def test_uniform_moments_and_support(opset):
    for y in (
        draw("RandomUniform", shape=[N], low=-1.0, high=3.0, opset=opset),
        draw("RandomUniformLike", [ROW], low=-1.0, high=3.0, opset=opset),
    ):
        assert y.min() >= -1
        assert y.max() < 3
        np.testing.assert_allclose([np.mean(y), np.var(y)], [1, 16 / 12], atol=0.05)


@pytest.mark.parametrize("opset", [15, 22])
def test_bernoulli_frequency(opset):
    p = np.repeat(np.array([0, 0.3, 1], np.float32), N).reshape(3, N)
    y = draw("Bernoulli", [p], opset=opset)
    assert y.dtype == np.float32
    assert set(np.unique(y)) == {0, 1}
    np.testing.assert_allclose(np.mean(y, 1), [0, 0.3, 1], atol=0.02)
    assert draw("Bernoulli", [p], dtype=TensorProto.BOOL, opset=opset).dtype == bool


@pytest.mark.parametrize("opset", [7, 22])
def test_multinomial_frequencies(opset):
    """Unnormalised log-probabilities, one distribution a row."""
    p = np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 0]])
    with np.errstate(divide="ignore"):
        logits = np.float32(np.log(p) + np.array([[3], [-2]]))
    y = draw("Multinomial", [logits], sample_size=N, opset=opset)
    assert y.shape == (2, N)
    assert y.dtype == np.int32
    counted = np.stack([np.bincount(row, minlength=3) / N for row in np.asarray(y)])
    np.testing.assert_allclose(counted, p, atol=0.02)
    with pytest.raises(NodeError, match="int32 or int64"):
        draw("Multinomial", [logits], dtype=TensorProto.FLOAT)


def test_types():
    half = ROW.astype(np.float16)
    assert draw("RandomNormal", shape=[3], dtype=TensorProto.FLOAT16).dtype == np.float16
    assert draw("RandomNormalLike", [half]).dtype == np.float16
    assert draw("RandomUniformLike", [half], dtype=TensorProto.BFLOAT16).dtype == jnp.bfloat16
    assert draw("RandomUniformLike", [np.zeros(2, np.int32)], dtype=1).dtype == np.float32
    with pytest.raises(NodeError, match="floating-point"):
        draw("RandomUniformLike", [np.zeros(2, np.int32)])


def test_key_and_seed_decide_what_is_drawn():
    def equal(a, b):
        return bool(np.array_equal(a, b))

    first, second = draw("RandomNormal", shape=[9], nodes=2)
    again, _ = draw("RandomNormal", shape=[9], nodes=2)
    assert equal(first, again), "one key, one node: one value"
    assert not equal(first, second), "nodes differ"
    assert not equal(first, draw("RandomNormal", shape=[9], nodes=2, key=1)[0]), "keys differ"

    seeded = draw("RandomNormal", shape=[9], nodes=2, seed=0.5)
    assert equal(*seeded), "nodes with one seed draw alike"
    assert not equal(seeded[0], draw("RandomNormal", shape=[9], nodes=2, seed=1.5)[0])
    assert not equal(seeded[0], draw("RandomNormal", shape=[9], nodes=2, seed=0.5, key=1)[0])
