"""Three-phase training: the invariants of each phase, under any optimizer and in any loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxonnx import sparse
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._pattern import parse

INNER = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.05),
    "adamw": lambda: optax.adamw(0.05, weight_decay=0.1),
}
SHAPES = {"linear": (8, 12), "conv": (4, 8, 3, 1), "bias": (12,), "head": (12, 10)}
SPARSE = ("linear", "conv")


def weights(seed):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in SHAPES.items()}


def gradients(seed, step):
    return weights((seed, step + 1))


@functools.cache
def wrapped(inner="sgd", **schedule):
    tx = sparse.three_phase(INNER[inner](), **schedule)
    return tx, jax.jit(tx.update)


@functools.cache
def plain(inner):
    tx = INNER[inner]()
    return tx, jax.jit(tx.update)


def run(tx, update, params, steps, seed=0, state=None, start=0):
    """Yields (params, state) after every step."""
    state = tx.init(params) if state is None else state
    for step in range(start, start + steps):
        updates, state = update(gradients(seed, step), state, params)
        params = optax.apply_updates(params, updates)
        yield params, state


def same(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def assert_pattern(params, state, pattern="2:4"):
    kept = sparse.state_masks(state)
    for name in SPARSE:
        assert parse(pattern).holds(kept[name], (0, 1))
        assert not np.any(np.asarray(params[name])[~np.asarray(kept[name])])


SCHEDULE = {"dense": 3, "dynamic": 6, "fixed": 4, "refresh": 2}


@pytest.mark.parametrize("inner", INNER)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_dense_is_the_inner_optimizer_then_always_2_4_then_a_fixed_mask(inner, seed):
    params = weights(seed)
    reference = [p for p, _ in run(*plain(inner), params, 3, seed)]
    history = list(run(*wrapped(inner, **SCHEDULE), params, 14, seed))
    for (now, state), dense in zip(history[:2], reference[:2], strict=True):
        assert same(now, dense)
        assert int(state.phase) == 1
        assert all(np.all(m) for m in sparse.state_masks(state).values())
    # the last dense step ends in the first mask, of the weights that the inner optimizer gives
    for name in SPARSE:
        mask = sparse.mask(reference[2][name])
        np.testing.assert_array_equal(sparse.state_masks(history[2][1])[name], mask)
        np.testing.assert_array_equal(history[2][0][name], jnp.where(mask, reference[2][name], 0))
    for name in ("bias", "head"):
        np.testing.assert_array_equal(history[2][0][name], reference[2][name])
    for now, state in history[2:]:
        assert_pattern(now, state)
    assert [int(s.phase) for _, s in history] == [1] * 2 + [2] * 6 + [3] * 6
    final = history[8][1].masks
    assert all(same(state.masks, final) for _, state in history[8:])


@pytest.mark.parametrize("reset", [True, False])
def test_phase_two_follows_the_formulas_of_the_procedure(reset):
    rate, params = 0.1, weights(1)
    history = list(run(*wrapped("sgd", **SCHEDULE, reset=reset), params, 9, 1))
    shown, hidden, m = {}, {}, {}
    for name in SPARSE:
        w = np.asarray(params[name])
        for step in range(9):
            u = -rate * np.asarray(gradients(1, step)[name])
            if step < 3:
                w = w + u
            else:
                shown[name] = shown[name] + u * m[name]
                hidden[name] = hidden[name] + u * (1 - m[name])
                w = shown[name] + hidden[name]
            if step in (2, 4, 6, 8):
                m[name] = np.asarray(sparse.mask(w), np.float32)
                shown[name] = w * m[name]
                hidden[name] = w * (1 - m[name]) * (not reset)
            if step >= 2:
                now, state = history[step]
                np.testing.assert_allclose(now[name], shown[name], rtol=1e-5, atol=1e-6)
                pruned = np.where(m[name], 0, state.pruned[name])
                np.testing.assert_allclose(pruned, hidden[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", ["momentum", "adamw"])
def test_resuming_anywhere_changes_nothing(inner):
    params = weights(2)
    tx, update = wrapped(inner, **SCHEDULE)
    straight = list(run(tx, update, params, 13, 2))
    for stop in (1, 3, 4, 6, 9, 11):
        now, state = straight[stop - 1]
        saved = [np.asarray(x).copy() for x in jax.tree.leaves((now, state))]
        structure = jax.tree.structure((params, tx.init(params)))
        now, state = jax.tree.unflatten(structure, map(jnp.asarray, saved))
        resumed = list(run(tx, update, now, 13 - stop, 2, state, stop))
        assert same(resumed[-1], straight[-1])


def test_epochs_are_steps():
    a = wrapped(dense=3, dynamic=6, fixed=3, refresh=3)
    b = wrapped(dense=1, dynamic=2, fixed=1, steps_per_epoch=3)
    params = weights(3)
    assert same(list(run(*a, params, 12))[-1], list(run(*b, params, 12))[-1])


@pytest.mark.deep
@pytest.mark.parametrize("moments", ["keep", "zero"])
def test_moments_of_newly_hidden_weights(moments):
    tx, update = wrapped("momentum", dense=2, dynamic=0, moments=moments)
    *_, (_, state) = run(tx, update, weights(4), 2)
    trace = state.inner[0].trace
    hidden = ~np.asarray(sparse.state_masks(state)["linear"])
    assert np.all(np.asarray(trace["linear"])[hidden] == 0) == (moments == "zero")
    assert np.all(np.asarray(trace["linear"])[~hidden] != 0)
    assert np.all(np.asarray(trace["head"]) != 0)


@pytest.mark.deep
def test_it_chains_with_clipping_schedules_accumulation_and_multi_transform():
    params = weights(5)
    schedule = {"dense": 1, "dynamic": 2, "refresh": 1}
    inner = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))
    )
    labels = {"linear": "sparse", "conv": "sparse", "bias": "plain", "head": "plain"}
    for tx in (
        optax.chain(optax.clip(0.5), sparse.three_phase(inner, **schedule)),
        optax.MultiSteps(sparse.three_phase(inner, **schedule), 2),
        sparse.three_phase(optax.MultiSteps(inner, 2), **schedule),
        sparse.three_phase(optax.adafactor(0.1), moments="zero", **schedule),
        optax.multi_transform(
            {"sparse": sparse.three_phase(inner, **schedule), "plain": optax.sgd(0.1)}, labels
        ),
    ):
        *_, (now, state) = run(tx, jax.jit(tx.update), params, 6)
        assert_pattern(now, state)
        assert sparse.metrics(state)["phase"] == 3
        assert np.all(np.asarray(now["head"]) != np.asarray(params["head"]))


@pytest.mark.deep
def test_half_precision_weights_stay_exactly_sparse():
    params = {"linear": weights(6)["linear"].astype(jnp.bfloat16)}
    tx = sparse.three_phase(optax.adam(0.01), dense=1, dynamic=3, refresh=1)
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(6):
        g = {"linear": gradients(6, step)["linear"]}  # float32 updates of bfloat16 weights
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        assert params["linear"].dtype == jnp.bfloat16
        assert (np.asarray(params["linear"], np.float32) != 0).sum() == 48


def test_metrics_count_flips_and_what_is_kept():
    tx, update = wrapped(dense=1, dynamic=4, fixed=1, refresh=2)
    history = list(run(tx, update, weights(7), 6))
    assert sparse.metrics(history[0][1])["sparsity"] == 0.5
    assert sparse.metrics(history[0][1])["flip_rate"] == 0
    before, after = (sparse.state_masks(history[i][1]) for i in (1, 2))
    numbers = sparse.metrics(history[2][1])
    for name in SPARSE:
        changed = np.mean(np.asarray(before[name]) != np.asarray(after[name]))
        assert numbers["flips"][name] == pytest.approx(changed)
    w = np.concatenate([np.ravel(history[2][0][n]) for n in SPARSE])
    assert numbers["phase"] == 2
    assert 0 < numbers["flip_rate"] < 1
    assert 0.5 < numbers["kept"] <= 1
    assert np.count_nonzero(w) == w.size // 2
    assert sparse.metrics((history[2][1], optax.EmptyState())) == numbers
    with pytest.raises(SparsityError, match="0 three-phase states"):
        sparse.metrics(optax.sgd(0.1).init(weights(7)))


def test_the_state_is_one_copy_of_the_weights_and_one_bit_each():
    params = weights(8)
    tx, _ = wrapped(**SCHEDULE)
    state = tx.init(params)._replace(inner=())
    copy = sum(params[n].nbytes for n in SPARSE)
    bits = sum(-(-params[n].size // 8) for n in SPARSE)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == copy + bits + 4 * (2 + 2 * len(SPARSE))


@pytest.mark.deep
def test_one_shot_static_and_sr_ste_share_the_parts():
    params = weights(9)
    pruned = sparse.prune(params)
    tx = sparse.fixed_mask(optax.adam(0.1))
    for start in (pruned, params):  # also when the first forward pass was dense
        *_, (now, state) = run(tx, jax.jit(tx.update), start, 3)
        for name in SPARSE:
            mask = np.asarray(sparse.mask(params[name]))
            np.testing.assert_array_equal(np.asarray(now[name]) != 0, mask)
    one_axis = sparse.fixed_mask(optax.sgd(0.1), transposable=False)
    *_, (now, _) = run(one_axis, jax.jit(one_axis.update), params, 2)
    assert parse("2:4", transposable=False).holds(now["linear"], (0, 1))
    assert not parse("2:4").holds(now["linear"], (0, 1))

    # SR-STE by its formula: dense W, W <- W - rate * (g + decay * (1 - m) * W)
    tx = sparse.sr_ste(optax.sgd(0.1), decay=0.01)
    w = np.asarray(params["linear"])
    m = np.asarray(sparse.mask(w))
    state = tx.init(params)
    for step in range(4):
        updates, state = jax.jit(tx.update)(gradients(9, step), state, params)
        params = optax.apply_updates(params, updates)
        w = w - 0.1 * (np.asarray(gradients(9, step)["linear"]) + 0.01 * ~m * w)
        m = np.asarray(sparse.mask(w))
        np.testing.assert_allclose(params["linear"], w * m, rtol=1e-5, atol=1e-6)


@pytest.mark.deep
def test_a_flax_model_that_never_saw_onnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(4, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dense = nnx.Linear(8, 16, rngs=rngs)
            self.head = nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.conv(x))).mean((1, 2))
            return self.head(nnx.relu(self.dense(x)))

    def axes(name, leaf):
        return (-1, -2)  # (in, out) and (kH, kW, in, out)

    net = Net(nnx.Rngs(0))
    tx = sparse.three_phase(optax.adam(1e-2), dense=2, dynamic=4, fixed=2, refresh=2, axes=axes)
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer, x, y):
        def loss(net):
            return optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()

        optimizer.update(net, nnx.grad(loss)(net))

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 5, 5, 4)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 3, 8))
    for _ in range(8):
        step(net, optimizer, x, y)
    for kernel in (net.conv.kernel[...], net.dense.kernel[...]):
        assert parse("2:4").holds(kernel, (-1, -2))
    assert np.all(np.asarray(net.head.kernel[...]) != 0)

    net.eval()
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    report = sparse.layers(params, axes=axes)
    proof = sparse.verify(lambda p, x: nnx.merge(graph, p, rest)(x), params, x, layers=report)
    assert {p.weight for p in proof.products} == {r.name for r in report if not r.reason}


def test_a_plain_function_that_never_saw_onnx():
    def net(params, x):
        return jax.nn.relu(x @ params["first"]) @ params["second"]

    rng = np.random.default_rng(1)
    params = {n: jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32) for n in ("first", "second")}
    x = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    y = jnp.roll(x, 1, axis=1)
    tx = sparse.three_phase(optax.adam(0.02), dense=5, dynamic=10, fixed=5, refresh=5)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        loss, g = jax.value_and_grad(lambda p: jnp.mean((net(p, x) - y) ** 2))(params)
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(20):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < losses[5]
    assert len(sparse.verify(net, params, x).products) == 4


def test_layers_say_why_they_stay_dense():
    params = weights(10) | {
        "table": jnp.zeros((4, 4), jnp.int32),
        "depthwise": jnp.ones((8, 1, 3, 3)),
    }
    report = {x.name: x for x in sparse.layers(params, exclude={"conv": "grouped convolution"})}
    assert {name: x.reason for name, x in report.items()} == {
        "linear": "",
        "conv": "grouped convolution",
        "bias": "no matrix or kernel",
        "head": "input axis of 10 is not a multiple of 4",
        "table": "not floating point",
        "depthwise": "input axis of 1 is not a multiple of 4",
    }
    assert report["linear"].axes == (0, 1)
    for select in ("linear", "lin.*", ["linear"], lambda name, w: w.ndim == 2):
        chosen = sparse.layers(params, select=select)
        assert [x.name for x in chosen if not x.reason] == ["linear"]
        assert next(x for x in chosen if x.name == "conv").reason == "not selected"
    with pytest.raises(SparsityError, match="'lineal' selects no parameter; there are bias, conv"):
        sparse.layers(params, select="lineal")
    with pytest.raises(SparsityError, match="no weight can be 2:4 transposable: bias: no matrix"):
        sparse.layers({"bias": jnp.ones(4)})
    with pytest.raises(SparsityError, match="there are no parameters"):
        sparse.layers({})


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"dense": 3, "dynamic": 0, "fixed": 0}, "leave no phase"),
        ({"dense": -1, "dynamic": 2, "refresh": 1}, "dense=-1 is negative"),
        ({"dense": 1, "dynamic": 2}, "pass refresh="),
        ({"dense": 1, "dynamic": 2, "refresh": 5}, "ends before the first refresh"),
        ({"dense": 1, "dynamic": 2, "refresh": 0}, "less than a step"),
        ({"dense": 1, "dynamic": 2, "steps_per_epoch": 0}, "at least one step"),
        ({"dense": 1, "dynamic": 2, "refresh": 1, "pattern": "5:4"}, "N:M"),
    ],
)
def test_schedules_that_cannot_be_are_refused(schedule, message):
    with pytest.raises(SparsityError, match=message):
        sparse.three_phase(optax.sgd(0.1), **schedule)


def test_update_without_parameters_is_refused():
    tx, _ = wrapped(**SCHEDULE)
    with pytest.raises(SparsityError, match="needs the parameters"):
        tx.update(weights(0), tx.init(weights(0)))
