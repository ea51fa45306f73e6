"""Patterns by layer, methods by name, and how both are recorded, proved and drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest

import jaxonnx
from jaxonnx import sparse

RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(48, 16)).astype("f4"), RNG.integers(0, 8, 48)


def network():
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    net (float[n,16] x) => (float[n,8] y) {
        a = MatMul(x, body)
        h = Relu(a)
        y = MatMul(h, head)
    }
    """)
    for name, shape in (("body", (16, 32)), ("head", (32, 8))):
        value = np.random.default_rng(1).normal(0, 0.2, shape).astype("f4")
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return jaxonnx.load(proto)


def train(sparsity, epochs=3, **options):
    return jaxonnx.train(
        network(),
        DATA,
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optax.adam(3e-3),
        epochs=epochs,
        batch_size=16,
        sparsity=sparsity,
        progress=False,
        **options,
    )


def kept(w, m):
    """Return the most that any group of m keeps, along the input and along the output axis."""
    kept = np.asarray(w) != 0
    return [int(x.reshape(-1, m).sum(1).max()) for x in (kept, kept.T)]


def test_each_weight_gets_the_first_pattern_that_names_it(tmp_path):
    result = train({"pattern": {"body": "2:4", "head": "1:4", ".*": "2:8"}, "dense": 1})
    trained = result.model
    found = {layer.name: str(layer.pattern) for layer in trained.sparsity.layers}
    assert found == {"body": "2:4 transposable", "head": "1:4 transposable"}
    assert kept(trained.params["body"], 4) == [2, 2]
    assert kept(trained.params["head"], 4) == [1, 1]
    shown = "2:4 transposable (1), 1:4 transposable (1) by three_phase"
    assert shown in " ".join(str(trained).split())

    proof = sparse.verify(trained)
    assert {(p.weight, str(p.pattern)) for p in proof.products} == {*found.items()}
    for name in ("a.onnx", "a.npz", "b.onnx"):
        trained.save(tmp_path / name, **({"sparse": True} if name == "b.onnx" else {}))
        back = jaxonnx.load(tmp_path / name)
        assert back.sparsity == trained.sparsity
        for weight, value in trained.params.items():
            np.testing.assert_array_equal(back.params[weight], value)
    _, packed = sparse.load(tmp_path / "a.npz")
    assert {name: str(p.pattern) for name, p in packed.items()} == found


def test_weights_without_a_pattern_stay_dense_and_names_must_be_right():
    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8)), "c": jnp.ones(8)}
    report = {x.name: x for x in sparse.layers(params, {"a": "1:4"})}
    assert report["a"].pattern == sparse.Pattern(1, 4)
    assert (report["b"].pattern, report["b"].reason) == (None, "not selected")
    pruned = sparse.prune(params, {"a": "1:4", "b": sparse.Pattern(2, 4, False)})
    assert int(jnp.count_nonzero(pruned["a"])) == 16
    assert int(jnp.count_nonzero(pruned["b"])) == 32
    with pytest.raises(jaxonnx.SparsityError, match="'d' selects no parameter"):
        sparse.layers(params, {"a": "2:4", "d": "2:4"})
    with pytest.raises(jaxonnx.SparsityError, match="'tow' selects no parameter"):
        network().with_sparsity({"tow": "2:4"})
    with pytest.raises(jaxonnx.SparsityError, match="not of the form zeros or N:M"):
        sparse.layers(params, {"a": "half"})


def test_one_axis_patterns_beside_transposable_ones_are_proved_forward_only():
    w = jax.random.normal(jax.random.key(0), (2, 8, 8))
    params = {"a": w[0], "b": w[1]}
    patterns = {"a": sparse.Pattern(2, 4, False), "b": "2:4"}
    params = sparse.prune(params, patterns)
    layers = sparse.layers(params, patterns)
    proof = sparse.verify(
        lambda p, x: x @ p["a"].T @ p["b"].T, params, jnp.ones((3, 8)), layers=layers
    )
    assert {(p.weight, p.part) for p in proof.products} == {
        ("a", "forward"),
        ("b", "forward"),
        ("b", "backward"),
    }
    recorded = {"a": "2:4 one-axis", "b": "2:4 transposable"}
    assert {p.weight: str(p.pattern) for p in proof.products} == recorded


@pytest.mark.parametrize("method", ["three_phase", "sr_ste", "one_shot"])
def test_methods_are_those_of_the_optimizers_and_are_recorded(method, tmp_path):
    result = train({"method": method}, epochs=2 if method != "three_phase" else 3)
    assert result.model.sparsity.method == method
    assert {tuple(kept(w, 4)) for w in result.model.params.values()} == {(2, 2)}
    phases = {"three_phase": [1, 2, 3], "sr_ste": [2, 2], "one_shot": [3, 3]}
    assert result.history.phases == phases[method]
    result.model.save(tmp_path / "a.onnx")
    assert jaxonnx.load(tmp_path / "a.onnx").sparsity == result.model.sparsity
    assert f"by {method}, recorded in the file" in " ".join(str(result.model).split())


def soft(w, n, m):
    """S(W) of arXiv 2409.09099 along the inputs of x @ W, group by group."""
    result = np.zeros_like(w)
    for output in range(w.shape[1]):
        for begin in range(0, len(w), m):
            group = w[begin : begin + m, output]
            least = sorted(np.abs(group))[m - n - 1]
            shrunk = [np.sign(x) * max(abs(x) - least, 0) for x in group]
            result[begin : begin + m, output] = shrunk
    return result


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "5:8"])
def test_s_ste_is_the_formulas_of_its_paper(pattern):
    n, m = map(int, pattern.split(":"))
    w = RNG.normal(size=(16, 12))
    params, b = {"w": jnp.asarray(w, jnp.float32), "b": jnp.ones(3)}, np.ones(3)
    tx = sparse.s_ste(optax.adamw(0.1, weight_decay=0.2), pattern=pattern, axes=(1, 0), select="w")
    dense = optax.adamw(0.1, weight_decay=0.2)
    state, plain, inner = tx.init(params), {"w": w, "b": b}, dense.init({"w": w, "b": b})
    beta = (w * soft(w, n, m)).sum() / (soft(w, n, m) ** 2).sum()
    update = jax.jit(tx.update)
    for _ in range(5):
        before = np.asarray(params["w"])
        gradients = {"w": RNG.normal(size=w.shape), "b": RNG.normal(size=3)}
        updates, state = update(jax.tree.map(jnp.float32, gradients), state, params)
        params = optax.apply_updates(params, updates)
        steps, inner = dense.update(gradients, inner, plain)
        plain = jax.tree.map(lambda x, u: x + np.asarray(u), plain, steps)
        wanted = beta * soft(plain["w"], n, m)
        np.testing.assert_allclose(params["w"], wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(params["b"], plain["b"], rtol=1e-5, atol=1e-6)
        nonzero = np.asarray(params["w"]) != 0
        assert nonzero.reshape(-1, m, 12).sum(1).max() == n
        np.testing.assert_array_equal(sparse.state_masks(state)["w"], nonzero)
    np.testing.assert_allclose(state.scales["w"], beta, rtol=1e-5)
    numbers = sparse.metrics(state)
    assert numbers["flip_rate"] == pytest.approx(((before != 0) != nonzero).mean())
    share = np.abs(plain["w"])[nonzero].sum() / np.abs(plain["w"]).sum()
    assert numbers["kept"] == pytest.approx(share, rel=1e-4)


def test_s_ste_trains_a_file_that_verify_proves_forward(tmp_path):
    result = train({"method": "s_ste"}, epochs=20)
    losses = [row["loss"] for row in result.history.epochs]
    assert losses[-1] < 0.9 * losses[0]
    assert result.history.phases == [2] * 20
    assert {p.part for p in sparse.verify(result.model).products} == {"forward"}
    result.model.save(tmp_path / "a.npz")
    back = jaxonnx.load(tmp_path / "a.npz")
    assert back.sparsity == result.model.sparsity
    assert back.sparsity.method == "s_ste"
    again = {"epochs": 4, "checkpoint_dir": tmp_path / "c"}
    whole = train({"method": "s_ste"}, **again)
    train({"method": "s_ste"}, **again | {"epochs": 2, "checkpoint_dir": tmp_path / "d"})
    resumed = train({"method": "s_ste"}, **again | {"checkpoint_dir": tmp_path / "d"}, resume=True)
    for name, w in whole.model.params.items():
        np.testing.assert_array_equal(resumed.model.params[name], w)


def test_sr_ste_is_that_of_a_loop_of_ones_own():
    """The same weights as `sparse.sr_ste` around Adam gives, batch by batch."""
    model, (x, y) = network(), DATA

    def loss(params, x, y):
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    options = model.sparsity_options()
    optimizer = sparse.sr_ste(optax.adam(3e-3), decay=0.01, **options)

    @jax.jit
    def update(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    params, state = model.params, optimizer.init(model.params)
    for _ in range(3):
        params, state = update(params, state)
    result = jaxonnx.train(
        model,
        (x, y),
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optax.adam(3e-3),
        epochs=3,
        batch_size=48,
        sparsity={"method": "sr_ste", "decay": 0.01},
        progress=False,
    )
    for name, value in params.items():
        np.testing.assert_allclose(result.model.params[name], value, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        (
            {"method": "magnitude"},
            "'sr_ste', 's_ste' or 'one_shot', got 'magnitude'",
        ),
        ({"method": "one_shot", "dense": 1}, "for one_shot any of pattern.*not"),
        ({"method": "sr_ste", "dynamic": 1}, "for sr_ste any of pattern.*decay"),
        ({"method": "s_ste", "transposable": True}, "along one axis: leave transposable out"),
        ({"method": "s_ste", "pattern": {"body": sparse.Pattern(2, 4)}}, "body is to be 2:4 tran"),
        ({"pattern": {"head": "1:4"}, "products": "sparse", "dense": 1}, "transposable 2:4"),
    ],
)
def test_options_of_another_method_are_refused(sparsity, message):
    with pytest.raises((jaxonnx.TrainingError, jaxonnx.SparsityError), match=message):
        train(sparsity)


def test_a_run_that_ends_in_its_dense_phase_is_not_recorded_as_sparse():
    """neural-compressor PR 1250: a run that ends before its masks are there."""
    x, y = DATA
    data = np.where(np.arange(48)[:, None] == 40, np.inf, x), y  # ends the run
    dense = "the dense phase of sparsity: no weight is 2:4 transposable"
    with pytest.warns(match="not finite"), pytest.warns(match=dense):
        result = jaxonnx.train(
            network(),
            data,
            optimizer=optax.sgd(0.1),
            epochs=3,
            batch_size=16,
            sparsity={"dense": 1, "dynamic": 1},
        )
    assert result.history.stopped
    assert result.history.epochs == []
    assert result.model.sparsity is None
    assert any("'dense': 0" in note for note in result.history.notes)
    assert np.asarray(result.model.params["body"]).all()
    with pytest.raises(jaxonnx.TrainingError, match=r"0\.9 epochs, 3 steps, leaves no .* 2 steps"):
        train({"dense": 0.9, "dynamic": 1}, epochs=None, max_steps=2)
    ended = train({"dense": 0.5, "dynamic": 1}, epochs=None, max_steps=3)  # before the fixed mask
    assert kept(ended.model.params["body"], 4) == [2, 2]
    assert ended.model.sparsity is not None


@pytest.mark.parametrize(
    "sparsity",
    [
        {"method": "sr_ste"},
        {"method": "s_ste"},
        {"dense": 1, "dynamic": None},
        {"dense": 1, "dynamic": 20},
        {"dense": 1, "dynamic": 1},
    ],
    ids=str,
)
def test_patience_counts_the_phase_that_a_run_ends_in(sparsity):
    result = jaxonnx.train(
        network(),
        DATA,
        optimizer=optax.sgd(0.0),
        epochs=8,
        batch_size=48,
        sparsity=sparsity,
        validation=DATA,
        patience=2,
    )
    phases = [row["phase"] for row in result.history.epochs]
    assert result.history.early
    best = phases.index(phases[-1]) + 1  # the first of that phase
    assert result.history.best == best
    assert len(phases) == best + 2
    assert min(kept(result.model.params["body"], 4)) == 2


def test_what_stays_dense_is_said_with_the_reason():
    result = train({"select": "body", "dense": 1})
    (note,) = (note for note in result.history.notes if "dense" in note)
    assert note == "1 dense tensor: not selected ('head')"
    assert note in str(result)


def test_a_weight_whose_size_the_file_reads_is_sparse():
    """PyTorch's exporter, unless it optimizes, makes the bias of a convolution of that size."""
    proto = network().to_onnx()
    size = onnx.helper.make_node("Shape", ["body"], ["size"])
    proto.graph.node.insert(0, size)
    proto.graph.node.append(onnx.helper.make_node("ConstantOfShape", ["size"], ["zeros"]))
    proto.graph.node.append(onnx.helper.make_node("MatMul", ["x", "zeros"], ["nothing"]))
    model = jaxonnx.load(proto).with_sparsity("2:4")
    assert {layer.name for layer in model.sparsity.layers if layer.pattern} == {"body", "head"}


def test_curves_of_masks_are_drawn():
    import matplotlib

    matplotlib.use("agg")
    history = train({"dense": 1, "dynamic": 2}, epochs=4).history
    axes = history.plot()
    lines = {line.get_label(): line for one in axes.figure.axes for line in one.get_lines()}
    flips = np.asarray(lines["mask bits that changed"].get_ydata())
    assert np.isnan(flips[[0, 3]]).all()
    np.testing.assert_allclose(flips[1:3], [row["flip_rate"] for row in history.epochs[1:3]])
    shares = [row["kept"] for row in history.epochs]
    np.testing.assert_allclose(lines["kept share of |w|"].get_ydata(), shares)
    matplotlib.pyplot.close(axes.figure)


def test_masks_are_drawn_outputs_down_and_inputs_across():
    import matplotlib

    matplotlib.use("agg")
    params = {"w": RNG.normal(size=(8, 16)), "k": RNG.normal(size=(16, 8, 3, 3)), "b": np.ones(4)}
    axes = {"w": (1, 0), "k": (0, 1)}  # x @ w, and a convolution
    choice = {"axes": lambda name, _: axes.get(name)}
    params = sparse.prune(jax.tree.map(jnp.asarray, params), **choice)
    figure = sparse.plot_masks(params, sparse.layers(params, **choice))
    kernel, matrix = (one.get_images()[0].get_array() for one in figure.axes)
    np.testing.assert_array_equal(matrix, np.asarray(params["w"]).T != 0)
    np.testing.assert_array_equal(kernel, np.asarray(params["k"])[..., 0, 0] != 0)
    assert figure.axes[1].get_title() == "w\n2:4 transposable, 50% kept"
    matplotlib.pyplot.close(figure)
    model = network().replace(params=sparse.prune(network().params, axes=(1, 0)))
    figure = sparse.plot_masks(sparse.record(model))
    assert [one.get_title()[:4] for one in figure.axes] == ["body", "head"]
    matplotlib.pyplot.close(figure)
    with pytest.raises(jaxonnx.SparsityError, match="no mask to draw"):
        sparse.plot_masks(network())


def test_the_zeros_of_a_pruned_file_are_kept_or_named(tmp_path):
    """Adam of optax with masked gradients; dense training says that it fills the zeros."""
    dense = network()
    params = {n: jnp.where(jnp.abs(w) > 0.15, w, 0) for n, w in dense.params.items()}
    model = dense.replace(params=params)
    loss = "softmax_cross_entropy_with_integer_labels"
    options = {"loss": loss, "epochs": 3, "batch_size": 48, "progress": False}
    result = jaxonnx.train(model, DATA, optimizer=optax.adam(3e-3), sparsity="zeros", **options)

    def objective(params):
        return getattr(optax, loss)(model.apply(params, DATA[0]), DATA[1]).mean()

    optimizer = optax.adam(3e-3)
    state, expected = optimizer.init(params), params
    for _ in range(3):
        gradient = jax.tree.map(lambda g, w: g * (w != 0), jax.grad(objective)(expected), params)
        updates, state = optimizer.update(gradient, state)
        expected = optax.apply_updates(expected, updates)
    for name, w in result.model.params.items():
        np.testing.assert_allclose(w, expected[name], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(w != 0, params[name] != 0)
    result.model.save(tmp_path / "pruned.onnx")
    saved = jaxonnx.load(tmp_path / "pruned.onnx")
    assert (str(saved.sparsity), saved.sparsity.method) == ("zeros", "one_shot")

    words = r"2 weights with zeros, as of pruning \('body' \d\d%, 'head' \d\d%\), become dense"
    for lora, way in ((None, "sparsity='zeros' keeps them"), (2, "adapters='nodes'")):
        with pytest.warns(UserWarning, match=f"{words} .*{way}"):
            filled = jaxonnx.train(model, DATA, lora=lora, **options)
        assert any(way in note for note in filled.history.notes)
    with pytest.raises(jaxonnx.TrainingError, match="'zeros' is that of the initial weights"):
        train({"pattern": "zeros", "method": "sr_ste"})
    both = jaxonnx.train(
        model, DATA, sparsity={"pattern": dict.fromkeys(params, "zeros")}, **options
    )
    assert both.model.sparsity.method == "one_shot"  # pyright: ignore[reportOptionalMemberAccess]
