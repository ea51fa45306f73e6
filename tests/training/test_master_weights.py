"""Files in float16 and bfloat16 are trained by float32 master weights."""

import json
from itertools import pairwise

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx

TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
LOSS = "softmax_cross_entropy_with_integer_labels"


def file(kind, cast=False):
    """A perceptron of one type; or with weights of that type behind Cast in a float32 graph."""
    random = np.random.default_rng(0)
    shapes = {"w1": (8, 16), "b1": (16,), "w2": (16, 4), "b2": (4,)}
    dtype = np.dtype(kind) if kind == "float16" else ml_dtypes.bfloat16
    tensors = {n: (random.normal(size=s) / 4).astype(dtype) for n, s in shapes.items()}
    outside = TensorProto.FLOAT if cast else TYPES[kind]
    read = {name: f"{name}.wide" if cast else name for name in shapes}
    nodes = [
        helper.make_node("MatMul", ["x", read["w1"]], ["a"]),
        helper.make_node("Add", ["a", read["b1"]], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", read["w2"]], ["d"]),
        helper.make_node("Add", ["d", read["b2"]], ["y"]),
    ]
    casts = [helper.make_node("Cast", [n], [read[n]], to=TensorProto.FLOAT) for n in shapes]
    graph = helper.make_graph(
        casts * cast + nodes,
        "net",
        [helper.make_tensor_value_info("x", outside, ["n", 8])],
        [helper.make_tensor_value_info("y", outside, ["n", 4])],
        [numpy_helper.from_array(x, n) for n, x in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def examples(model):
    random = np.random.default_rng(1)
    x = random.normal(size=(64, 8)).astype(np.float32)
    return x.astype(model.inputs[0].dtype), x[:, :4].argmax(1)


def train(model, **changes):
    settings = {"loss": LOSS, "optimizer": optax.adam(1e-3), "epochs": 4, "batch_size": 16}
    return jaxonnx.train(model, examples(model), **settings | changes)


@pytest.fixture(params=[(kind, cast) for kind in TYPES for cast in (False, True)], ids=str)
def model(request):
    return jaxonnx.load(file(*request.param))


def by_hand(model, steps=8):
    """The weights after steps of Adam on float32 weights that are rounded for the network."""
    x, y = examples(model)
    optimizer = optax.adam(1e-3)
    masters = {name: value.astype(jnp.float32) for name, value in model.params.items()}
    types = {name: value.dtype for name, value in model.params.items()}
    state = optimizer.init(masters)

    @jax.jit
    def move(masters, state):
        def loss(masters):
            params = {name: value.astype(types[name]) for name, value in masters.items()}
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                model.apply(params, x), y
            ).mean()

        updates, state = optimizer.update(jax.grad(loss)(masters), state, masters)
        return optax.apply_updates(masters, updates), state

    for _ in range(steps):
        masters, state = move(masters, state)
    return {name: value.astype(types[name]) for name, value in masters.items()}


def test_adam_moves_every_weight_as_on_float32_weights(model):
    result = train(model, epochs=8, batch_size=64, seed=3)
    for name, expected in by_hand(model).items():
        found = result.model.params[name]
        assert found.dtype == model.params[name].dtype
        ulp = float(jnp.finfo(found.dtype).eps)
        np.testing.assert_allclose(
            np.float32(found), np.float32(expected), rtol=2 * ulp, atol=2e-4, err_msg=name
        )
    assert result.history.losses[-1] < result.history.losses[0]
    assert any("master weights" in note for note in result.history.notes)


def test_the_file_has_its_own_types(model):
    trained = train(model).model.to_onnx()
    types = {t.name: t.data_type for t in trained.graph.initializer}
    assert types == {t.name: t.data_type for t in model.proto.graph.initializer}
    onnx.checker.check_model(trained)


def test_small_updates_add_up():
    """An update of a hundredth of the last digit would be lost each time."""
    model = jaxonnx.load(file("bfloat16"))
    changed = {}
    for master in (True, False):
        after = train(model, optimizer=optax.sgd(1e-4), epochs=100, master=master).model
        changed[master] = np.mean(
            np.concatenate(
                [np.ravel(after.params[n] != x) for n, x in model.params.items()], dtype=float
            )
        )
    assert changed[True] > 2 * changed[False]


def test_without_masters_adam_stops_in_float16():
    model = jaxonnx.load(file("float16"))
    with pytest.warns(UserWarning, match="not finite at step 1"):
        result = train(model, master=False)
    assert result.history.stopped
    assert not any("master" in note for note in result.history.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2},
        {"lora": 2},
        *(pytest.param(c, marks=pytest.mark.deep) for c in ({}, {"ema": 0.9})),
    ],
)
def test_a_run_that_resumes_has_the_masters(tmp_path, changes):
    model = jaxonnx.load(file("float16"))
    if rank := changes.get("lora"):
        changes = {"lora": jaxonnx.LoRA(rank=rank)}
    whole = train(model, **changes)
    train(model, epochs=2, checkpoint_dir=tmp_path, **changes)
    resumed = train(model, checkpoint_dir=tmp_path, resume=True, **changes)
    assert resumed.history.losses == whole.history.losses
    opened = model if rank else jaxonnx.load(tmp_path)
    for name, value in whole.model.params.items():
        assert value.dtype == model.params[name].dtype
        np.testing.assert_array_equal(resumed.model.params[name], value)
        if name in opened.params and not rank:
            assert opened.params[name].dtype == value.dtype
            np.testing.assert_array_equal(opened.params[name], value)


@pytest.mark.deep
def test_sparse_and_on_a_mesh():
    model = jaxonnx.load(file("bfloat16"))
    changes = {"sparsity": {"dense": 1, "dynamic": 2}}
    one = train(model, **changes)
    many = train(model, mesh=jax.make_mesh((1,), ("data",)), sharding="fsdp", **changes)
    assert not jaxonnx.sparse.verify(one.model).failures
    for name, value in one.model.params.items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.float32(many.model.params[name]), np.float32(value), rtol=0.02, atol=1e-3
        )


@pytest.mark.deep
def test_an_exported_step_trains_the_masters(tmp_path):
    model = jaxonnx.load(file("float16", cast=True))
    x, y = examples(model)
    jaxonnx.export_step(model, tmp_path, (x[:16], y[:16]), LOSS, optax.sgd(0.1), init="npz")
    state = dict(np.load(tmp_path / "init.npz"))
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    told = json.loads((tmp_path / "manifest.json").read_text())["step"]
    names = [value.name for value in session.get_inputs()]
    own = jaxonnx.training.step(model, LOSS, optax.sgd(0.1))
    batch = dict(zip(told["batch"], jax.tree.leaves(own.as_batch((x[:16], y[:16]))), strict=True))
    kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
    types = {value.name: kinds[value.type] for value in session.get_inputs() if value.name in batch}
    for _ in range(3):
        given = {n: np.asarray(v).astype(types[n]) for n, v in batch.items()} | state
        outputs = [o.name for o in session.get_outputs()]
        found = dict(zip(outputs, session.run(None, {n: given[n] for n in names}), strict=True))
        state |= {name: found[new] for name, new in told["state"].items()}
    current = own.init()
    for _ in range(3):
        current, _ = own.update(current, (x[:16], y[:16]))
    trained = jaxonnx.import_step(model, tmp_path, state)
    for name, value in own.view(current).items():
        assert trained.params[name].dtype == jnp.float16
        np.testing.assert_allclose(
            np.float32(trained.params[name]), np.float32(value), rtol=1e-3, atol=1e-5
        )


def scaled_loss(factor):
    """Squared errors times a factor, in the type of the network."""

    def loss(outputs, targets):
        targets = jax.nn.one_hot(targets, outputs.shape[-1], dtype=outputs.dtype)
        return jnp.mean((outputs - targets) ** 2, 1) * jnp.asarray(factor, outputs.dtype)

    return loss


@pytest.mark.parametrize("cast", [False, True])
def test_small_gradients_of_float16_are_scaled(cast):
    """Gradients of 1e-8 are zero in float16, or lose their digits."""
    half = jaxonnx.load(file("float16", cast=cast))
    settings = {"loss": scaled_loss(1e-6), "optimizer": optax.sgd(3e4)}
    plain, scaled = train(half, **settings), train(half, **settings, precision="fp16")
    exact = train(half, loss=scaled_loss(1), optimizer=optax.sgd(3e-2))
    for name, value in exact.model.params.items():
        moved = np.float32(value) - np.float32(half.params[name])
        found = np.float32(scaled.model.params[name]) - np.float32(half.params[name])
        error = np.linalg.norm(found - moved)
        assert error < 0.05 * np.linalg.norm(moved), name
        lost = np.float32(plain.model.params[name]) - np.float32(half.params[name])
        assert np.linalg.norm(lost - moved) > 2 * error, name
    assert any("loss is scaled" in note for note in scaled.history.notes)


@pytest.mark.parametrize("nan", ["stop", "skip"])
def test_overflows_halve_the_scale_and_are_no_events(nan):
    model = jaxonnx.load(file("float16"))
    settings = {"loss": scaled_loss(1000), "optimizer": optax.sgd(1e-4), "precision": "fp16"}
    result = train(model, **settings, nan=nan)
    assert result.history.stopped is None
    assert not result.history.events
    assert len(result.history.losses) == 16
    assert result.history.losses[-1] < result.history.losses[0]
    step = jaxonnx.training.step(model, nan=nan, **settings)
    x, y = examples(model)
    update, state = jax.jit(step.update), step.init()
    factors = [float(state.scale.factor)]
    for _ in range(16):
        state, seen = update(state, (x[:16], y[:16]))
        assert seen[1] == 1
        factors.append(float(state.scale.factor))
    assert factors[0] == 2**15
    assert {b / a for a, b in pairwise(factors)} == {1.0, 0.5}
    assert factors[-1] == factors[-4] < factors[0]
    assert int(state.taken) == sum(a == b for a, b in pairwise(factors))
    assert int(state.count) == 16


def test_what_no_scale_helps_is_an_event():
    model = jaxonnx.load(file("float16"))
    x, y = examples(model)
    x = x.copy()
    x[3, 0] = np.nan
    settings = {"loss": LOSS, "optimizer": optax.sgd(0.1), "precision": "fp16", "batch_size": 16}
    result = jaxonnx.train(model, (x, y), epochs=1, nan="skip", **settings)
    assert [event["event"] for event in result.history.events] == ["skipped"]
    # what is infinite in float16 alone is left out by no other setting of `nan`
    for name, nan in (("fp16", "stop"), ("fp16", "rollback"), (None, "stop")):
        settings |= {"precision": name, "nan": nan}
        with pytest.warns(UserWarning, match="not finite") as warned:
            assert jaxonnx.train(model, (x, y), epochs=5, **settings).history.stopped
        hint = "precision='fp16' has no numbers beyond 65,504, which 'bf16' has"
        assert (hint in str(warned[0].message)) == (name == "fp16")


def test_a_run_with_a_scale_resumes(tmp_path):
    model = jaxonnx.load(file("float16"))
    changes = {"loss": scaled_loss(30), "optimizer": optax.sgd(1e-3), "precision": "fp16"}
    whole = train(model, **changes)
    train(model, epochs=2, checkpoint_dir=tmp_path, **changes)
    resumed = train(model, checkpoint_dir=tmp_path, resume=True, **changes)
    assert resumed.history.losses == whole.history.losses
