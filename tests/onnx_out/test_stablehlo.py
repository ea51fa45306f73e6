"""Inference and the training step as serialised StableHLO that runs without jaxonnx."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx import optim
from tests.support import tiny_networks
from tests.support.family_table import DATA, OPEN

RUN = """
import sys
import jax
import numpy as np
from jax import export

(folder,) = sys.argv[1:]
data = dict(np.load(f"{folder}/data.npz"))
load = lambda name: export.deserialize(open(f"{folder}/{name}", "rb").read())
step, inference = load("step").call, load("inference").call
state = {name[6:]: value for name, value in data.items() if name.startswith("state:")}
for i in range(3):
    state, outputs = step(state, {"x": data["x"], "target": data["target"]})
logits = inference(state, {"x": data["x"]})["logits"]
assert not any(name.split(".")[0] in ("jaxonnx", "onnx", "optax") for name in sys.modules)
np.savez(f"{folder}/result.npz", logits=logits, loss=outputs["loss"], **state)
"""


@pytest.mark.deep
@pytest.mark.parametrize("file", ["transformer.dynamo.onnx"])
def test_exported_step_runs_without_jaxonnx(tmp_path, file):
    """Exported once for any batch size, which the process that runs it chooses."""
    model = jaxonnx.load(DATA / file)
    written = jaxonnx.add_training(
        model, loss="softmax_cross_entropy_with_integer_labels", optimizer=optim.adam(1e-3, T=1)
    )
    training = jaxonnx.load(written).training
    (image,) = model.inputs
    (n,) = jax.export.symbolic_shape("n")
    dtype = jax.dtypes.canonicalize_dtype(image.dtype)
    x = jax.ShapeDtypeStruct((n, *image.shape[1:]), dtype)
    target = jax.ShapeDtypeStruct((n,), jnp.int32)
    state = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), training.state)
    for name, function, batch in (
        ("step", training.step, {"x": x, "target": target}),
        ("inference", training.inference, {"x": x}),
    ):
        exported = jax.export.export(jax.jit(function))(state, batch)
        (tmp_path / name).write_bytes(exported.serialize())
    x = np.arange(5 * np.prod(image.shape[1:])).reshape(5, *image.shape[1:]) % 13
    batch = {"x": x.astype(dtype), "target": np.arange(5, dtype=np.int32)}
    start = {f"state:{name}": np.asarray(v) for name, v in training.state.items()}
    np.savez(tmp_path / "data.npz", **batch, **start)
    subprocess.run([sys.executable, "-c", RUN, tmp_path], check=True, cwd=tmp_path)
    got = dict(np.load(tmp_path / "result.npz"))
    state = training.state
    for _ in range(3):
        state, outputs = training.step(state, batch)
    logits = training.inference(state, {"x": batch["x"]})["logits"]
    np.testing.assert_allclose(got["loss"], outputs["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["logits"], logits, rtol=1e-4, atol=1e-5)
    for name, value in state.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5)


def example(model, rows):
    """An argument for the model's one input: of zeros and ones."""
    (value,) = model.inputs
    shape = (rows, *value.shape[1:])
    return (np.indices(shape).sum(0) % 3 % 2).astype(jax.dtypes.canonicalize_dtype(value.dtype))


def exported(function, model):
    """`function(params, state, x)` as StableHLO for an x of any batch size `b`."""
    x = example(model, 1)
    x = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), *x.shape[1:]), x.dtype)
    return jax.export.export(jax.jit(function))(model.params, model.state, x)


@pytest.mark.parametrize("file", ["lstm.legacy.onnx", "transformer.legacy.onnx"])
def test_the_batch_may_be_symbolic(file):
    model = jaxonnx.load(DATA / file)
    program = exported(lambda params, state, x: model.apply(params, x, state=state), model)
    assert str(program.out_avals[0].shape[0]) == "b"


@pytest.mark.deep
@pytest.mark.parametrize("file", OPEN)
def test_inference_and_gradients_of_all_files_for_any_batch(file):
    model = jaxonnx.load(DATA / file)
    if file.startswith("fixed/"):
        model = model.with_any_batch()

    def applied_and_trained(params, state, x):
        def loss(params):
            outputs, renewed = model.apply_train(params, state, jax.random.key(0), x)
            return jax.tree.leaves(outputs)[-1].max(1).sum(), (outputs, renewed)

        applied = model.apply(params, x, state=state)
        return applied, jax.value_and_grad(loss, has_aux=True)(params)

    program = exported(applied_and_trained, model)
    if file not in ("lenet_bn.dynamo.onnx", "lstm.dynamo.onnx", "transformer.dynamo.onnx"):
        return  # the same operators
    for rows in (2, 5) if file.startswith("lenet") else (5,):
        x = example(model, rows)
        expected = jax.jit(applied_and_trained)(model.params, model.state, x)
        actual = program.call(model.params, model.state, x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), actual, expected
        )


@pytest.mark.deep
def test_a_step_of_train_for_any_batch():
    one = jaxonnx.training.step(tiny_networks.mlp(), tiny_networks.LABELS, optax.sgd(0.1))
    state, (x, y) = one.init(), tiny_networks.examples(6)
    (b,) = jax.export.symbolic_shape("b")
    batch = jax.ShapeDtypeStruct((b, 8), x.dtype), jax.ShapeDtypeStruct((b,), jnp.int32)
    program = jax.export.export(jax.jit(one.update))(state, batch, one.frozen)
    new, seen = program.call(state, (x, y.astype(np.int32)), one.frozen)
    expected, loss = jax.jit(one.update)(state, (x, y), one.frozen)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), new, expected)
    np.testing.assert_allclose(seen, loss, rtol=1e-5)


def test_a_row_of_an_axis_of_open_size():
    """As the pooler of BERT takes its first token, by a scalar index."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[b, t, 4] x) => (float[b, 4] y)
        <int64 zero = {0}> { y = Gather<axis = 1>(x, zero) }"""
    )
    model = jaxonnx.load(proto)
    x = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b, t"), 4), jnp.float32)
    program = jax.export.export(jax.jit(model.apply))(model.params, x)
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(program.call(model.params, x), x[:, 0])


# as PyTorch's exporters write BERT: a mask, positions, token types and heads from sizes
BERT = """
<ir_version: 8, opset_import: ["" : 17]>
bert (int64[b, t] ids) => (float[b, t, 8] y, float[b] mean) <
    int64 first = {0}, int64 second = {1}, int64[1] zero = {0}, int64[1] one = {1},
    int64[1] last = {-1}, int64[1] width = {8}, int64[2] heads = {2, 4}, int64[1] two = {2},
    int64[2] inner = {1, 2}, int64[1] all = {9223372036854775807}, int64[1, 1] type = {1}
> {
    sizes = Shape(ids)
    b = Gather(sizes, first)
    t = Gather(sizes, second)
    rows = Unsqueeze(b, zero)
    steps = Unsqueeze(t, zero)
    both = Concat<axis = 0>(rows, steps)
    ones = ConstantOfShape<value = int64[1] {1}>(two)
    none = ConstantOfShape<value = int64[1] {-1}>(two)
    open = Equal(both, none)
    target = Where(open, ones, both)
    types = Expand(type, target)
    range = Range(first, t, second)
    order = Slice(positions, zero, steps, one)
    word = Gather(words, ids)
    at = Gather(table, order)
    at_too = Gather(table, range)
    kind = Gather(table, types)
    placed = Add(word, at)
    placed_too = Add(placed, at_too)
    typed = Add(placed_too, kind)
    whole = Slice(typed, zero, all, zero)
    count = Mul(b, t)
    counts = Unsqueeze(count, zero)
    flat_target = Concat<axis = 0>(counts, width)
    flat = Reshape(whole, flat_target)
    dense = MatMul(flat, weight)
    split_target = Concat<axis = 0>(rows, steps, heads)
    split = Reshape(dense, split_target)
    q = Transpose<perm = [0, 2, 1, 3]>(split)
    k = Transpose<perm = [0, 2, 3, 1]>(split)
    scores = MatMul(q, k)
    mask = ConstantOfShape<value = float[1] {1.0}>(both)
    wide = Unsqueeze(mask, inner)
    masked = Add(scores, wide)
    p = Softmax<axis = -1>(masked)
    v = MatMul(p, q)
    joined = Transpose<perm = [0, 2, 1, 3]>(v)
    y_target = Concat<axis = 0>(rows, last, width)
    y = Reshape(joined, y_target)
    total = ReduceSum<keepdims = 0>(y, inner)
    length = Cast<to = 1>(t)
    mean = Div(total, length)
}"""


@pytest.mark.deep
def test_sizes_are_computed_from_symbolic_ones():
    proto = onnx.parser.parse_model(BERT)
    random = np.random.default_rng(0)
    tensors = {n: random.normal(size=(20, 8)).astype(np.float32) for n in ("words", "table")}
    tensors["weight"] = random.normal(size=(8, 8)).astype(np.float32)
    tensors["positions"] = np.arange(64)[None]
    for name, value in tensors.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    model = jaxonnx.load(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString())

    def mean(params, ids):
        y, mean = model.apply(params, ids)
        return mean.sum(), (y, mean)

    function = jax.value_and_grad(mean, has_aux=True)
    shape = jax.export.symbolic_shape("b, t", constraints=["t <= 64"])
    ids = jax.ShapeDtypeStruct(shape, np.int32)
    program = jax.export.export(jax.jit(function))(model.params, ids)
    ids = random.integers(0, 20, (3, 5))
    (_, outputs), gradients = program.call(model.params, ids.astype(np.int32))
    for a, b in zip(outputs, session.run(None, {"ids": ids}), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    _, expected = jax.jit(function)(model.params, ids.astype(np.int32))
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5)
