"""Normalization in training, Dropout when it is random, and awkward points.

Values of BatchNormalization in training are those of PyTorch 2.13 (its variance corrected from the
sample's to the population's, as the specification has it).
"""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest

import jaxonnx
from jaxonnx import lowering
from jaxonnx._jaxpr import interpret
from jaxonnx.errors import NodeError
from jaxonnx.registry import lookup
from tests.support.gradient_points import assert_point, operator

rng = np.random.default_rng(0)
X = np.array([[[1.0, 2.0], [0.0, -1.0]], [[3.0, 6.0], [2.0, -1.0]]], np.float32)
SCALE, BIAS = np.array([1.0, 2.0], np.float32), np.array([0.5, -1.0], np.float32)
MEAN, VAR = np.array([1.0, -1.0], np.float32), np.array([2.0, 0.5], np.float32)
VERSIONS = [(1, {}), (7, {"outputs": 1}), (9, {"outputs": 1}), (14, {}), (15, {})]


@pytest.mark.parametrize(("opset", "context"), VERSIONS)
def test_batch_normalization_in_training(opset, context):
    norm = operator("BatchNormalization", opset)
    y, mean, var, *_ = norm(X, SCALE, BIAS, MEAN, VAR, momentum=0.75, training=True, **context)
    np.testing.assert_allclose(mean, [1.5, -0.75], rtol=1e-6)
    np.testing.assert_allclose(var, [0.75 * 2 + 0.25 * 3.5, 0.75 * 0.5 + 0.25 * 1.5], rtol=1e-6)
    expected = [
        [[-0.5690434, -0.0345217], [-1.0, -2.6329877]],
        [[0.5, 2.1035652], [2.2659755, -2.6329877]],
    ]
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.parametrize(("opset", "context"), VERSIONS)
def test_batch_normalization_in_inference(opset, context):
    norm = operator("BatchNormalization", opset)
    y, mean, var, *_ = norm(X, SCALE, BIAS, MEAN, VAR, training=False, **context)
    shape = (2, 1)
    expected = (X - MEAN.reshape(shape)) / np.sqrt(VAR.reshape(shape) + 1e-5)
    np.testing.assert_allclose(y, expected * SCALE.reshape(shape) + BIAS.reshape(shape), rtol=1e-5)
    np.testing.assert_array_equal(mean, MEAN)
    np.testing.assert_array_equal(var, VAR)


@pytest.mark.parametrize(
    ("opset", "context", "active"),
    [
        (1, {"is_test": 0}, True),
        (6, {"is_test": 1}, False),
        (7, {"outputs": 5}, True),
        (9, {"outputs": 1}, False),
        (14, {"training_mode": 1}, True),
        (15, {"training_mode": 0}, False),
    ],
)
def test_the_file_decides_when_the_caller_does_not(opset, context, active):
    norm = operator("BatchNormalization", opset)
    _, mean, *_ = norm(X, SCALE, BIAS, MEAN, VAR, training=None, **context)
    assert (np.asarray(mean) != MEAN).any() == active


def test_batch_normalization_is_stable_far_from_zero():
    x = 1e4 + rng.normal(size=(64, 2, 8)).astype(np.float32)
    norm = operator("BatchNormalization")
    y, *_ = norm(x, SCALE, np.zeros(2, np.float32), MEAN, VAR, training=True)
    np.testing.assert_allclose(np.asarray(y).std((0, 2)), SCALE, rtol=1e-3)


@pytest.mark.parametrize("axes", [(0, 2), (0, 1), (1, 2)])
@pytest.mark.parametrize("scaled", [False, True])
def test_standardizing_has_the_derivatives_of_its_formula(axes, scaled):
    def formula(x, scale, shift):
        centred = x - x.mean(axes, keepdims=True)
        var = jnp.square(centred).mean(axes, keepdims=True)
        y = centred / jnp.sqrt(var + 1e-3)
        return (y * scale + shift if scaled else y), x.mean(axes, keepdims=True), var

    def standardized(x, scale, shift):
        vectors = (scale, shift) if scaled else (None, None)
        return lowering.standardize(x, *vectors, axes, 1e-3)

    def curve(function):
        def loss(*arguments):
            y, mean, var = function(*arguments)
            statistics = mean**2 * factors[1].mean(axes, keepdims=True) + var**2
            return (factors[0] * y**2).sum() + statistics.sum()

        gradient = jax.grad(loss, (0, 1, 2))
        curved = jax.jit(lambda *arguments: jax.jvp(gradient, arguments, directions))
        stacked = [jnp.stack([argument, 2 * argument]) for argument in arguments]
        return curved(*arguments), jax.jit(jax.vmap(gradient))(*stacked)

    with jax.enable_x64(True):
        x, direction, *factors = np.random.default_rng(0).normal(100, 2, (4, 4, 3, 2))
        scale, shift = (x[:1].mean(axes, keepdims=True) + c for c in (0.0, 1.0))
        arguments, directions = (x, scale, shift), (direction, scale + 1, shift - 2)
        values = map(jax.tree.leaves, map(curve, (standardized, formula)))
        for value, expected in zip(*values, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-8)


def test_the_gradient_of_batch_normalization_takes_two_sums_of_the_images():
    def gradient(x, scale, shift, cotangent):
        normalized = lambda *x: lowering.standardize(*x, (0, 1), 1e-3)[0]  # noqa: E731
        return jax.vjp(normalized, x, scale, shift)[1](cotangent)

    def step(equation, depths):
        """Count the sums that lie between the cotangent and a value; -1 for what needs neither."""
        name, (x, *_), (y, *_) = equation.primitive.name, equation.invars, equation.outvars
        deepest = max(depths, default=-1)
        reduces = name == "reduce_sum" and x.aval.size > y.aval.size and deepest >= 0
        return [deepest + reduces] * len(equation.outvars)

    x, vector = np.ones((2, 3, 4), np.float32), np.ones((1, 1, 4), np.float32)
    program = jax.make_jaxpr(gradient)(x, vector, vector, x)
    depths = interpret(program, step, [-1, -1, -1, 0], constant=lambda *_: -1)
    assert depths == [1, 1, 1]


def test_batch_normalization_of_mixed_types():
    """Types of x, of scale and of the statistics are independent from opset 15 on."""
    norm = operator("BatchNormalization", 15)
    x = jnp.asarray(X, jnp.bfloat16)
    y, mean, var = norm(x, SCALE, BIAS, MEAN, VAR.astype(np.float32), training=True)
    assert y.dtype == jnp.bfloat16
    assert mean.dtype == var.dtype == np.float32


def test_statistics_are_declared_as_state():
    for opset in (1, 6, 7, 9, 14, 15):
        op = lookup("", "BatchNormalization", opset)
        assert op is not None
        assert (op.params, op.state) == ((1, 2), (3, 4))


def test_zero_vectors():
    assert_point("LpNormalization", [[0, 0]], [0, 0], [0, 0])
    assert_point("LpNormalization", [[0, 0]], [0, 0], [0, 0], p=1)


def test_norms_and_variances_that_are_not_finite_are_not_zero():
    x = np.array([[np.nan, 1], [np.inf, 1]], np.float32)
    for p in (1, 2):
        y = np.asarray(operator("LpNormalization")(x, p=p))
        np.testing.assert_array_equal(y, [[np.nan, np.nan], [np.nan, 0]])
    y = np.asarray(operator("MeanVarianceNormalization")(x, axes=(1,)))
    np.testing.assert_array_equal(y, np.full((2, 2), np.nan))
    assert_point("RMSNormalization", [[0, 0], [1, 1]], [0, 0], [316.22778] * 2, [0, 0])


@pytest.mark.parametrize("opset", [1, 6, 7, 10, 12, 13, 22])
def test_dropout_in_training(opset):
    x = np.ones((100, 100), np.float32)
    dropout = operator("Dropout", opset)
    given = {"ratio": 0.25} if opset < 12 else {}
    inputs = () if opset < 12 else (np.float32(0.25),)
    key = lambda seed=None: jax.random.key(seed or 0)  # noqa: E731
    y, mask = dropout(x, *inputs, **given, key=key, training=True)
    kept = np.asarray(mask).astype(bool)
    assert mask.dtype == (np.float32 if opset < 10 else np.bool_)
    assert abs(kept.mean() - 0.75) < 0.02
    np.testing.assert_allclose(y, np.where(kept, 1 / 0.75, 0), rtol=1e-6)
    gradient = jax.grad(lambda x: dropout(x, *inputs, **given, key=key, training=True)[0].sum())(x)
    np.testing.assert_array_equal(gradient, y)
    still, mask = dropout(x, *inputs, **given, key=key, training=False)
    np.testing.assert_array_equal(still, x)
    assert np.asarray(mask).all()


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 12, 13, 22])
def test_the_mask_of_inference_drops_nothing(opset):
    """The output is data * mask in inference too; onnxruntime has 0 there before opset 12."""
    kind = "float" if opset < 10 else "bool"
    model = onnx.parser.parse_model(
        f'<ir_version: 7, opset_import: ["": {opset}]> g (float[3] x) => (float[3] y, {kind}[3] m) '
        "{ y, m = Dropout(x) }"
    )
    x = np.float32([1, -2, 3])
    y, mask = jaxonnx.load(model)(x)
    assert mask.dtype == (np.float32 if opset < 10 else np.bool_)
    np.testing.assert_array_equal(y, x * np.asarray(mask))
    if opset >= 12:
        expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
        np.testing.assert_array_equal(mask, expected[1])


def test_dropout_listens_to_its_inputs_and_seed():
    dropout = operator("Dropout")
    key = lambda seed=None: jax.random.key(7 if seed is None else seed)  # noqa: E731
    x = np.ones(64, np.float32)

    def run(ratio, mode, seed=None):
        return dropout(x, ratio, mode, seed=seed, key=key, training=None)[0]

    traced = jax.jit(run)
    np.testing.assert_array_equal(run(np.float32(0.5), np.array(False)), x)
    np.testing.assert_array_equal(traced(np.float32(0.5), np.array(False)), x)
    np.testing.assert_array_equal(traced(np.float32(0), np.array(True)), x)
    on = traced(np.float32(0.5), np.array(True))
    np.testing.assert_array_equal(on, run(np.float32(0.5), np.array(True)))
    assert set(np.unique(on)) == {0, 2}
    assert (run(np.float32(0.5), np.array(True), 1) != on).any()


def test_bad_groups():
    with pytest.raises(NodeError, match=r"num_groups\*c, .* with num_groups = 3"):
        operator("GroupNormalization")(X.reshape(1, 4, 2), SCALE, BIAS, num_groups=3)
    with pytest.raises(NodeError, match="p must be 1 or 2, got 3"):
        operator("LpNormalization")(X, p=3)


def test_layer_normalization_in_a_file_older_than_it():
    """Opset 12, as Deeploy's files and those of onnxruntime's optimizer have it."""
    proto = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["": 12]>
    g (float[2,3,4] x) => (float[2,3,4] y)
    <float[4] scale = {1,2,3,4}, float[4] bias = {1,0,-1,0.5}> {
      y = LayerNormalization<epsilon = 0.1>(x, scale, bias)
    }""")
    x = rng.normal(size=(2, 3, 4)).astype(np.float32)
    model = jaxonnx.load(proto)
    assert {*model.params} == {"scale", "bias"}
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(model(x), expected, rtol=1e-5, atol=1e-6)
