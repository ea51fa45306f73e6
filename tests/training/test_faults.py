"""What must not be lost or silent: weights, runs and checkpoints, whatever comes in between."""

import json
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
import jaxonnx.sparse  # which compiles nothing, but would with what a test puts in place of jit
from jaxonnx._io import checkpoints
from jaxonnx.training import step
from jaxonnx.training._step import stays_finite
from tests.support.fork_server import Command
from tests.support.tiny_networks import LABELS, examples, mlp, same, train, weights


def batches(epoch=0):
    x, y = examples()
    return [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]


def with_nan(*numbers):
    """Batches, of which those with these numbers hold NaN in each epoch."""
    found = [
        (x * np.float32(np.nan) if i in numbers else x, y) for i, (x, y) in enumerate(batches())
    ]
    return lambda epoch: found


# Steps that are not finite.


@pytest.mark.parametrize(
    ("nan", "kept", "stopped"),
    [
        (
            "stop",
            14,
            "at step 15 (nan='skip' leaves out such steps); the weights are those of step 14",
        ),
        ("skip", 14, None),
        ("rollback", 10, None),
    ],
)
def test_weights_that_an_update_makes_infinite_are_not_taken(nan, kept, stopped, recwarn):
    def rate(count):
        return jnp.where(count == 14, jnp.inf, 1e-2)

    settings = {"data": batches, "optimizer": optax.sgd(rate), "validation": examples(16)}
    result = train(epochs=3, nan=nan, **settings)
    expected = [str(result.history.stopped)] if stopped else []
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == expected
    assert (stopped or "None") in str(result.history.stopped)
    assert [event["event"] for event in result.history.events] == {
        "stop": [],
        "skip": ["skipped"],
        "rollback": ["rolled back"],
    }[nan]
    update = jax.jit(step(mlp(), LABELS, optax.sgd(1e-2)).update)
    state = step(mlp(), LABELS, optax.sgd(1e-2)).init()
    for batch in (batches() * 3)[:kept]:
        state, _ = update(state, batch)
    for name, value in weights(result).items():
        np.testing.assert_allclose(value, state.params[name], rtol=1e-5, atol=1e-7)


def test_a_rate_that_is_infinite_changes_nothing():
    with pytest.warns(UserWarning, match="the weights are those of step 0"):
        result = train(optimizer=optax.sgd(float("inf")), nan="stop")
    assert not any(result.changes.values())
    for settings in ({"rate": np.inf}, {"rate": np.nan}, {"warmup": np.inf}):
        with pytest.raises(jaxonnx.TrainingError, match=r"must be a (finite )?number"):
            jaxonnx.training.optimizer("sgd", **settings)


NORMED = """<ir_version: 8, opset_import: ["": 17]>
normed (float[n, 2] x) => (float[n, 2] y)
<float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] m = {0, 0}, float[2] v = {1, 1},
 float[2, 2] w = {1, 0, 0, 1}> {
    h = MatMul(x, w)
    n1, m1, v1 = BatchNormalization <training_mode = 1> (h, s, b, m, v)
    y = Tanh(n1)
}"""


def test_statistics_that_are_not_finite_are_not_taken():
    def loss(outputs, _):
        return (outputs * 0).sum(-1)  # whose gradient is 0

    one = step(onnx.parser.parse_model(NORMED), loss, optax.sgd(0.1), trainable=["b"])
    x = np.float32([[3e38, 1], [-3e38, 2]])  # the variance overflows, nothing else
    state, (value, finite) = jax.jit(one.update)(one.init(), (x, np.zeros(2)))
    assert (value, finite) == (0, 0)
    for name, x in one.init().state.items():
        np.testing.assert_array_equal(state.state[name], x)


def test_what_was_infinite_may_stay_so():
    """As the zeros of a mask may, which a file adds: -inf, or numbers whose sum overflows."""
    old = {"mask": jnp.float32([-np.inf, -3e38, -3e38]), "w": jnp.float16([6e4, 6e4])}
    assert stays_finite(old, old)
    for place, value in ((1, np.inf), (2, np.nan)):
        assert not stays_finite(old, {**old, "mask": old["mask"].at[place].set(value)})
    assert not stays_finite(old, {**old, "w": old["w"] * 2})


@pytest.mark.deep
def test_of_large_weights_no_number_becomes_nan():
    """A step looks at small ones; what it did not see stays as it was, too."""
    wide = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    wide (float[n, 300] x) => (float[n, 300] y) { y = Gemm(x, w, b) }""")
    start = {"w": np.full((300, 300), 0.5, np.float32), "b": np.ones(300, np.float32)}
    for name, value in start.items():
        wide.graph.initializer.append(onnx.numpy_helper.from_array(value, name))

    def spoiling(name):
        def update(updates, _):
            updates = jax.tree.map(lambda u: u - 3, updates)
            return {**updates, name: updates[name].at[..., 0].set(np.nan)}

        return optax.stateless(update)

    batch = np.ones((1, 300), np.float32), np.zeros((1, 300), np.float32)
    for name, taken in (("b", 0), ("w", 1)):
        one = step(wide, "squared_error", spoiling(name))
        state, (_, finite) = one.update(one.init(), batch)
        assert finite == taken
        for other, value in start.items():
            found = np.array(state.params[other])
            moved = np.full(value.shape, bool(taken))
            moved[..., 0] &= other != name
            np.testing.assert_array_equal(found != value, moved)


@pytest.mark.deep
def test_a_step_that_is_not_taken_moves_nothing_else():
    """Neither statistics, averages, moments nor hidden weights and masks."""
    ones, zeros = (", ".join([x] * 8) for x in "10")
    normed = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    normed (float[n, 8] x) => (float[n, 8] y)
    <float[8] s = {{{ones}}}, float[8] b = {{{zeros}}}, float[8] m = {{{zeros}}},
     float[8] v = {{{ones}}}> {{
        h = MatMul(x, w)
        y, m1, v1 = BatchNormalization <training_mode = 1> (h, s, b, m, v)
    }}""")
    weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    normed.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))

    def infinite(updates, memory, _=None, *, value, **__):
        return jax.tree.map(lambda u: jnp.where(value > 1e6, jnp.inf, u), updates), memory

    spoiled = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), infinite)
    optimizer = optax.chain(optax.adam(1e-1), spoiled)
    settings = {"sparsity": {"dynamic": 9}, "ema": 0.5, "nan": "skip"}
    one = step(normed, "squared_error", optimizer, steps_per_epoch=2, **settings)
    update = jax.jit(one.update)

    def after(pairs):
        state = one.init()
        for pair in pairs:
            state, (_, finite) = update(state, pair)
            assert finite == (pair[1].max() < 1e6)
        return state

    random = np.random.default_rng(1)
    pairs = [tuple(random.normal(size=(2, 8, 8)).astype(np.float32)) for _ in range(4)]
    wanted = after(pairs)
    for place in range(5):
        bad = pairs[0][0] + 1, pairs[0][1] + 1e7  # its loss and its gradient are finite
        state = after([*pairs[:place], bad, *pairs[place:]])
        assert (state.count, state.taken) == (5, 4)
        jax.tree.map(np.testing.assert_array_equal, state.replace(count=wanted.count), wanted)


def test_returns_that_get_nowhere_end_the_run():
    message = "none of 6 steps was applied: the loss, nan, is not finite at step 6; .* of step 0"
    with pytest.warns(UserWarning, match=message):
        result = train(data=with_nan(1), epochs=3, nan="rollback")
    assert not any(result.changes.values())
    message = r"step 9, and 2 rollbacks to the same weights made no progress; the .* step 5"
    with pytest.warns(UserWarning, match=message):
        result = train(data=lambda e: with_nan(*[1] * e)(0), epochs=3, nan="rollback")
    assert same(result, train(data=batches))


def test_a_run_that_skips_all_steps_says_so():
    with pytest.warns(UserWarning, match="none of 5 steps was applied: the loss, nan, .* step 0"):
        train(data=with_nan(*range(5)), nan="skip")


def test_a_validation_loss_that_is_not_finite_is_an_event():
    x, y = examples(8)
    result = train(validation=(np.where(x > 1, np.nan, x).astype(np.float32), y), epochs=2)
    assert result.history.events == [
        {
            "step": number,
            "event": "not finite in validation",
            "why": "validation_loss, nan, is not finite",
        }
        for number in (5, 10)
    ]
    assert "2 times not finite in validation" in str(result)
    assert result.history.stopped is None
    json.dumps(result.history.events)


# Checkpoints: of other data, of other programs, on a full disk.


def test_other_data_do_not_resume(tmp_path):
    settings = {"checkpoint_dir": tmp_path, "resume": True}
    x, y = examples()
    train(**settings)
    others = [
        ((x[:32], y[:32]), "had 40 examples, and now there are 32: pass the same data"),
        ((x.astype(np.float64), y), r"had examples of float32\[8\], int64\[\], and now float64"),
        ((np.where(np.arange(8) == 5, 0, x), y), "had examples with other values"),
        ((x, y, np.ones(40)), "had examples of float32"),
    ]
    for data, message in others:
        with pytest.raises(jaxonnx.TrainingError, match=message):
            train(data=data, epochs=2, **settings)
    result = train(data=(x[:32], y[:32]), epochs=2, **(settings | {"resume": "anyway"}))
    assert len(result.history.losses) == 9
    assert any("had 40 examples" in note for note in result.history.notes)


def test_data_that_do_not_say_what_they_are_resume(tmp_path):
    train(data=batches, checkpoint_dir=tmp_path)  # a stream, as which any data may come
    train(
        data=lambda epoch: [(-x, y) for x, y in batches()],
        epochs=2,
        resume=True,
        checkpoint_dir=tmp_path,
    )


def test_another_optimizer_is_named(tmp_path):
    train(checkpoint_dir=tmp_path)
    message = r"it has .*\.count int32\[\], this one has .*\.trace\['b1'\] float32\[16\]"
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(checkpoint_dir=tmp_path, resume=True, optimizer=optax.sgd(0.1, momentum=0.9))


def test_checkpoints_of_another_format_give_way(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "FORMAT", 3)
        train(epochs=2, checkpoint_dir=tmp_path)
    with (
        pytest.warns(UserWarning, match="of step 5 .*format is 3; this jaxonnx reads 2"),
        pytest.warns(UserWarning, match="of step 10 .*format is 3"),
        pytest.raises(jaxonnx.TrainingError, match=r"no checkpoint in .* can be read"),
    ):
        train(epochs=2, checkpoint_dir=tmp_path, resume=True)


def test_what_is_no_checkpoint_stays_apart(tmp_path):
    folder = tmp_path / "run"
    train(checkpoint_dir=folder)
    mine = folder / "mine" / "metrics" / "metrics"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    (folder / "notes").write_text("mine")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "file").write_text("")
    (folder / "77").symlink_to(tmp_path / "flat")
    with pytest.warns(UserWarning, match="the checkpoint of step 77 .*not a checkpoint of jaxonnx"):
        result = train(epochs=2, checkpoint_dir=folder, resume=True)
    assert same(result, train(epochs=2))
    assert mine.read_text() == (folder / "notes").read_text() == "mine"
    assert (tmp_path / "flat" / "file").exists()
    assert not list(folder.glob("unreadable.5*"))


def small_files():
    """Limit the size of files that this process writes, but for JAX's compiled programs."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.mark.deep
def test_checkpoints_that_the_system_refuses_are_told_in_a_line(tmp_path):
    """A limit for the size of files does what a full disk does."""
    onnx.save(mlp(hidden=4000), tmp_path / "net.onnx")  # 208 kB, and its checkpoints three times
    x, y = examples()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    line = "train net.onnx data.npz -o out.onnx --checkpoints kept --epochs 2"
    done = Command(line.split(), tmp_path, prepare=small_files)
    said = done.communicate(timeout=200)
    assert done.returncode == 1, said
    line = "a checkpoint could not be written at step 4 (File too large); the weights are those of"
    assert said.count(f"jaxonnx train: {line}") == 1, said
    assert said.count(line) == 2, said  # the summary has it, too
    # TensorStore's threads print that asyncio's loop is closed, if parts end after Orbax has given
    # up: line by line between ours, so that only the places can be told apart
    places = {Path(name).parent.name for name in re.findall(r'File "(.+?)", line', said)}
    assert places <= {"asyncio"}, said
    assert jaxonnx.load(tmp_path / "out.onnx").params


# Arguments that do not fit.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": (None, examples()[1])}, "data: input 'x' is None"),
        ({"data": (np.zeros(8, [("a", "f4")]), np.zeros(8))}, "input 'x' must be numbers, got"),
        (
            {"data": ([[1.0], [[2.0]]], [0, 1])},
            "input 'x' must be arrays of numbers whose shapes differ only",
        ),
        ({"validation": np.nan}, "validation=nan must be a share between 0 and 1"),
        ({"validation": np.inf}, "validation=inf must be a share"),
        ({"validation": True}, "validation=True must be a share"),
        ({"seed": 2**70}, "seed must be an integer of 0 to 9223372036854775807, got"),
        ({"batch_size": 2**62}, "batch_size=4611686018427387904: a batch of these .* of memory"),
        ({"batch_size": 2**31 - 1}, "batch_size=2147483647: a batch of these examples takes .*GiB"),
        ({"sparsity": {"x": 1}}, "sparsity is a pattern like '2:4', or a dict .* not {'x': 1}"),
        ({"sparsity": 3}, "sparsity must be a pattern like '2:4', or a dict .* got 3"),
        ({"checkpoint_dir": "a\0b"}, r"checkpoint_dir has a null byte: 'a\\x00b'"),
    ],
)
def test_arguments_that_do_not_fit(settings, message, monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda *_, **__: pytest.fail("compiled"))
    model = jaxonnx.load(mlp())
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(model, **settings)


def test_arrays_of_another_byte_order_are_read():
    x, y = examples()
    result = train(data=(x.astype(">f4"), y.astype(">i8")))
    assert same(result, train(data=(x, y)))


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 1099511627776 bytes"
        ),
        MemoryError("Unable to allocate 1.00 TiB for an array"),
    ],
    ids=["device", "host"],
)
def test_memory_that_is_not_enough_says_what_helps(error, tmp_path):
    def data(epoch):
        yield from batches()[:taken]
        raise error

    message = "not enough for 1.00? TiB: a smaller batch_size, with accumulate= .* remat=True"
    taken = 0
    with pytest.raises(jaxonnx.TrainingError, match=f"{message}.*; resume=True goes on from"):
        train(data=data, checkpoint_dir=tmp_path)
    taken = 2  # which are not lost
    with pytest.warns(UserWarning, match=f"{message}.*; the weights are those of step 2"):
        result = train(data=data)
    assert same(result, train(data=batches()[:2]))


def test_a_step_that_memory_is_too_small_for_is_not_begun(monkeypatch):
    """It would take the weights with it."""
    from jaxonnx.training._loop import memory

    mean = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    mean (float[n, t] x) => (float[n, 1] y) <float[1] w = {2}> {
        m = ReduceMean <axes = [1]> (x)
        y = Mul(m, w)
    }""")
    small, large = ((np.ones((4, n), np.float32), np.zeros((4, 1))) for n in (2, 999))
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.1), "trainable": ["w"]}
    sizes = []

    def size(compiled, devices):
        used = compiled.memory_analysis()
        sizes.append(used.argument_size_in_bytes + used.temp_size_in_bytes)
        sizes[-1] += used.output_size_in_bytes - used.alias_size_in_bytes
        check(compiled, devices)

    check = memory._check
    monkeypatch.setattr(memory, "_check", size)
    whole = train(mean, [small, small], **settings)
    assert len(sizes) == 1
    monkeypatch.setattr(memory, "memory", lambda: sizes[0])
    message = "memory is not enough for .*: a smaller batch_size, with accumulate="
    with pytest.warns(UserWarning, match=f"{message}.*; the weights are those of step 2"):
        result = train(mean, [small, small, large], **settings)
    assert same(result, whole)
    monkeypatch.setattr(memory, "memory", lambda: sizes[0] - 1)
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(mean, [small], **settings)


def test_what_a_device_has_left_is_what_a_step_may_take(monkeypatch):
    from jaxonnx.training._loop import memory

    class Device:
        def __init__(self, used):
            self.used = used

        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": self.used}

    class Compiled:
        def memory_analysis(self):
            return SimpleNamespace(
                temp_size_in_bytes=300,
                output_size_in_bytes=150,
                alias_size_in_bytes=50,
                argument_size_in_bytes=10_000,
            )

    memory._check(Compiled(), [Device(600), Device(0)])
    with pytest.raises(MemoryError, match="allocates 400 bytes, of which there are 399 bytes"):
        memory._check(Compiled(), [Device(0), Device(601)])
