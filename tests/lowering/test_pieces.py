"""Programs in pieces give what they give as a whole, and equal layers are compiled once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxonnx
from jaxonnx.lowering import _pieces, jit
from tests.support.paths import DATA


@pytest.fixture
def compilations():
    """The names of the programs that XLA compiles."""
    names = []

    def listen(event, _, **settings):
        if event.endswith("backend_compile_duration"):
            names.append(settings.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@jax.custom_jvp
def halve(x):
    return x * 0.5


halve.defjvp(lambda x, dx: (halve(*x), halve(*dx)))


def layer(x, weight, cache, place):
    """Change a row of a cache, and read all of it."""
    for _ in range(4):
        x = halve(jnp.tanh(x @ weight)) + x
    cache = jax.lax.dynamic_update_slice(cache, x[:1], (place, 0))
    return x + cache.mean(0), cache


def network(x, weights, caches, place, *, scale):
    mask = jnp.arange(len(x))[:, None] <= place
    x, changed = jnp.where(mask, x * scale, 0), []
    for weight, cache in zip(weights, caches, strict=True):
        x, cache = layer(x, weight, cache, place)
        changed.append(cache)
    return {"x": x, "place": place, "layers": 3}, changed


def arguments(layers, width=16):
    x, *weights = np.random.default_rng(0).normal(0, 0.3, (layers + 1, width, width))
    caches = [jnp.zeros((8, width)) for _ in weights]
    return jnp.float32(x[:4]), [*map(jnp.float32, weights)], caches, 2


def in_pieces(function, arguments, **named):
    return function.in_pieces(*arguments, **named)(*arguments, **named)


@pytest.mark.parametrize("layers", [12, 13, 22, 29])
def test_results_are_those_of_the_whole(layers, monkeypatch, compilations):
    monkeypatch.setattr(_pieces, "LEAST", 64)
    function = jit(network, static_argnames="scale", donate_argnames="caches")
    expected = jax.jit(network, static_argnames="scale")(*arguments(layers), scale=2.0)
    compilations.clear()
    results = in_pieces(function, arguments(layers), scale=2.0)
    assert compilations.count("jit(piece)") in (2, 3)  # layers, and what is around them
    jax.tree.map(np.testing.assert_array_equal, results, expected)
    assert jax.tree.structure(results) == jax.tree.structure(expected)


def test_the_next_call_compiles_nothing(monkeypatch, compilations):
    monkeypatch.setattr(_pieces, "LEAST", 64)
    function = jit(network, static_argnames="scale")
    in_pieces(function, arguments(12), scale=2.0)
    compilations.clear()
    x, *others = arguments(12)
    results, _ = in_pieces(function, (x + 1, *others), scale=2.0)
    assert "jit(piece)" not in compilations
    expected, _ = function(x + 1, *others, scale=2.0)
    np.testing.assert_array_equal(results["x"], expected["x"])


def test_donated_caches_are_changed_in_place(monkeypatch):
    monkeypatch.setattr(_pieces, "LEAST", 64)
    x, weights, caches, place = arguments(12)
    places = [cache.unsafe_buffer_pointer() for cache in caches]
    function = jit(partial(network, scale=1.0), donate_argnums=2)
    _, changed = in_pieces(function, (x, weights, caches, place))
    assert [cache.unsafe_buffer_pointer() for cache in changed] == places
    assert all(cache.is_deleted() for cache in caches)
    assert not any(weight.is_deleted() for weight in weights)


def test_layers_that_differ_are_compiled_apart(monkeypatch, compilations):
    """A layer of another wiring, width or number is no copy of its neighbours."""
    monkeypatch.setattr(_pieces, "LEAST", 64)

    def mixed(x, weights):
        before = x
        for i, weight in enumerate(weights):
            for _ in range(3):
                x, before = jnp.tanh(x @ weight) + (before if i in (5, 9) else x), x
                x = x * (0.25 if i == 14 else 0.5)
        return x

    x, weights, *_ = arguments(20)
    function = jit(mixed)
    np.testing.assert_array_equal(in_pieces(function, (x, weights)), jax.jit(mixed)(x, weights))


def test_a_short_program_stays_whole():
    function = jit(network, static_argnames="scale")
    assert function.in_pieces(*arguments(4), scale=2.0) is function


def test_a_decoder_in_pieces_writes_the_same_tokens(monkeypatch, compilations):
    """Of prompts of unequal length, and of a turn of a chat, which continues from the caches."""

    def write():
        model = jaxonnx.load(DATA / "llm" / "qwen3-genai")
        layers = {n: 4 * x for n, x in model.params.items() if x.ndim == 2 and 192 not in x.shape}
        model = model.replace(params={**model.params, **layers})
        rows = model.generate([np.arange(5, 12), np.arange(3)], max_new_tokens=12, stop=[])
        chat = [{"role": "user", "content": "a list"}]
        first = model.generate(chat, max_new_tokens=9, stop=[])
        chat += [{"role": "assistant", "content": first}, {"role": "user", "content": "of lists"}]
        return rows, first, model.generate(chat, max_new_tokens=9, stop=[])

    expected = write()
    assert "jit(piece)" not in compilations
    monkeypatch.setattr(_pieces, "LEAST", 64)
    rows, *texts = write()
    assert "jit(piece)" in compilations
    assert "jit(_step)" not in compilations[compilations.index("jit(piece)") :]
    jax.tree.map(np.testing.assert_array_equal, rows, expected[0])
    assert texts == [*expected[1:]]
