"""Recurrent layers: empty sequences, program size, refusals."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxonnx.ops  # noqa: F401 - registers the operators
from jaxonnx.errors import NodeError
from jaxonnx.lowering import _recurrence, _recurrence_kernel, elementwise, transpose_weight
from jaxonnx.registry import lookup
from tests.support.sweeps import sweep

rnn, lstm, gru = (lookup("", name, 22) for name in ("RNN", "LSTM", "GRU"))
rng = np.random.default_rng(0)
X = rng.normal(size=(5, 2, 3)).astype(np.float32)
W, R = (
    rng.normal(size=(1, 16, 3)).astype(np.float32),
    rng.normal(size=(1, 16, 4)).astype(np.float32),
)


def test_an_empty_sequence_keeps_the_initial_state():
    start = rng.normal(size=(1, 2, 4)).astype(np.float32)
    y, h, c = lstm(X, W, R, None, np.array([0, 5], np.int32), start, start)
    np.testing.assert_array_equal(y[:, 0, 0], 0)
    np.testing.assert_array_equal(h[0, 0], start[0, 0])
    np.testing.assert_array_equal(c[0, 0], start[0, 0])


def test_padding_has_no_gradient():
    def loss(x):
        return (lstm(x, W, R, None, np.array([2, 5], np.int32))[1] ** 2).sum()

    gradient = jax.grad(loss)(X)
    np.testing.assert_array_equal(gradient[2:, 0], 0)
    assert np.all(gradient[:2, 0] != 0)


def test_accelerators_project_the_input_of_all_steps_at_once():
    every = f"tensor<{X.shape[0] * X.shape[1]}x{W.shape[1]}xf32>"
    traced = jax.jit(lambda x: lstm(x, W, R)).trace(X)
    for platform, at_once in (("cuda", True), ("tpu", True), ("cpu", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.dot_general") == 2
        assert (every in text) == at_once


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_steps_may_be_absent(direction):
    y, h, _ = lstm(X[:0], W, R, direction=direction)
    assert y.shape == (0, 1, 2, 4)
    np.testing.assert_array_equal(h, 0)
    gradient = jax.grad(lambda r: lstm(X[:0], W, r, direction=direction)[0].sum())(R)
    np.testing.assert_array_equal(gradient, 0)


def test_a_gradient_multiplies_for_the_weights_once():
    """No loop carries a gradient of a weight, and the program has five products."""
    text = jax.jit(jax.grad(lambda w, r: lstm(X, w, r)[1].sum(), (0, 1))).lower(W, R).as_text()
    assert text.count("stablehlo.dot_general") == 5
    loops = re.findall(r"stablehlo\.while.*", text)
    assert len(loops) == 2
    carried = re.findall(r"tensor<([0-9x]+)xf32>", " ".join(loops))
    constant = sorted(x for x in carried if sorted(x.split("x")) in (["16", "3"], ["16", "4"]))
    assert constant == ["16x4", "3x16", "4x16"]


@pytest.mark.parametrize(("reset_last", "products"), [(1, 5), (0, 8)])
def test_a_gradient_of_a_gru_multiplies_once_for_what_reads_its_state(reset_last, products):
    """Without `linear_before_reset` one weight reads the reset state, which only a step knows."""
    w, r = W[:, :12], R[:, :12]
    function = lambda w, r: gru(X, w, r, linear_before_reset=reset_last)[1].sum()  # noqa: E731
    text = jax.jit(jax.grad(function, (0, 1))).lower(w, r).as_text()
    assert text.count("stablehlo.dot_general") == products
    carried = re.findall(r"tensor<([0-9x]+)xf32>", " ".join(re.findall(r"while\(.*", text)))
    sums = [x for x in carried if sorted(x.split("x")) in (["12", "3"], ["12", "4"], ["4", "8"])]
    assert sorted(sums) == sorted(
        ["3x12", "4x12", "12x4"] if reset_last else ["3x12", "4x8", "8x4"]
    )


def _in_groups(monkeypatch, always: bool):
    """Make CPU group hidden units always, or never."""
    monkeypatch.setattr(_recurrence, "LARGE", 0 if always else _recurrence.VAST + 1)
    monkeypatch.setattr(_recurrence, "FEW", 0)


@pytest.mark.parametrize(
    ("layer", "direction"),
    sweep([(rnn, "bidirectional"), (lstm, "forward")], 1),
    ids=["rnn", "lstm"],
)
def test_groups_of_hidden_units_change_nothing(monkeypatch, layer, direction):
    gates, ways = 4 if layer is lstm else 1, 1 if direction == "forward" else 2
    shapes = {"w": (gates * 6, 3), "r": (gates * 6, 6), "b": (gates * 12,), "initial_h": (2, 6)}
    shapes |= {"p": (18,), "initial_c": (2, 6)} if layer is lstm else {}
    names = [*shapes]
    values = [rng.normal(size=(ways, *shapes[n])) for n in names]
    lengths = np.array([3, 5], np.int32)

    def outputs(x, *values):
        named = dict(zip(names, values, strict=True))
        return layer(x, sequence_lens=lengths, direction=direction, **named)

    def total(*values):
        return sum(jnp.sum(jnp.sin(y)) for y in outputs(*values))

    every = tuple(range(len(values) + 1))
    gradient = jax.grad(total, every)
    pushed = lambda *values: jax.jvp(gradient, values, values)[1]  # noqa: E731
    several = jax.vmap(outputs, (0, *(None for _ in values)))
    start = X.astype(np.float64)
    both = np.stack([start, -start])

    def together(start, both, *values):
        functions = (outputs, start), (gradient, start), (pushed, start), (several, both)
        return [function(x, *values) for function, x in functions]

    results = []
    for always in (False, True):
        _in_groups(monkeypatch, always)
        with jax.enable_x64(True):
            results.append(jax.jit(lambda *args: together(*args))(start, both, *values))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), *results)


@pytest.mark.parametrize(
    ("batch", "hidden", "platform", "product"),
    [
        (4, 256, "cpu", "(tensor<4x259xf32>, tensor<259x512xf32>)"),
        (3, 256, "cpu", "(tensor<3x256xf32>, tensor<256x1024xf32>)"),
        (4, 257, "cpu", "(tensor<4x257xf32>, tensor<257x1028xf32>)"),
        (4, 128, "cpu", "(tensor<4x128xf32>, tensor<128x512xf32>)"),
        (4, 1024, "cpu", "(tensor<4x1024xf32>, tensor<1024x4096xf32>)"),
        (4, 256, "tpu", "(tensor<4x256xf32>, tensor<256x1024xf32>)"),
    ],
)
def test_large_products_of_a_step_are_made_in_groups_on_cpu(
    batch, hidden, platform, product, monkeypatch
):
    monkeypatch.setattr(_recurrence_kernel, "LEAST", np.inf)
    shapes = (5, batch, 3), (1, 4 * hidden, 3), (1, 4 * hidden, hidden)
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    lowered = jax.jit(lambda x, w, r: lstm(x, w, r)).trace(*args)
    text = lowered.lower(lowering_platforms=(platform,)).as_text()
    assert text.count(product) == (2 if "259" in product else 1)


@pytest.mark.parametrize("hidden", [3, 5, 8])
def test_transposed(hidden):
    w = rng.normal(size=(hidden, 2))
    np.testing.assert_array_equal(transpose_weight(w), w.T)


@pytest.mark.deep
def test_a_function_element_by_element_has_derivatives_of_all_orders():
    check_grads(lambda x, y: elementwise(lambda x, y: jnp.tanh(x) * y * x, x, y), (0.3, 0.7), 3)


def test_refusals():
    with pytest.raises(NodeError, match="direction"):
        lstm(X, W, R, direction="sideways")
    with pytest.raises(NodeError, match="2 sets of weights"):
        lstm(X, W, R, direction="bidirectional")
    with pytest.raises(NodeError, match=r"w has shape .*, 4\*hidden_size, _"):
        lstm(X, W[..., None], R)
    for wrong in ((W, R[:, :8]), (W[:, :8], R), (W[:, :12], R[:, :8])):
        with pytest.raises(NodeError, match=r"[wr] has shape .*, 3\*hidden_size, "):
            gru(X, *wrong, linear_before_reset=1)
    with pytest.raises(NodeError, match=r"b has shape \[1, 2\]; .* hidden_size = 4"):
        lstm(X, W, R, np.ones((1, 2), np.float32))
    with pytest.raises(NodeError, match="3 activations"):
        lstm(X, W, R, activations=["Tanh"])
    with pytest.raises(NodeError, match="unknown activation"):
        rnn(X, W[:, :4], R[:, :4], activations=["Gelu"])
    with pytest.raises(NodeError, match="hidden_size"):
        lstm(X, W, R, hidden_size=5)
    for clip in (-1.0, -np.inf, np.nan):  # which onnxruntime refuses, for GRU and LSTM
        with pytest.raises(NodeError, match=r"clip must not be negative"):
            lstm(X, W, R, clip=clip)
