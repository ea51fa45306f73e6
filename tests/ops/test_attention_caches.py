"""The caches of GroupQueryAttention, from step to step against onnxruntime."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxonnx.ops  # noqa: F401 - registers the operators
from jaxonnx.errors import NodeError, StaticError
from jaxonnx.lowering import jit
from jaxonnx.registry import lookup
from tests.ops.contrib_cases import DOMAIN, Fused, i32
from tests.ops.contrib_table import onnxruntime_result

HEADS, KV_HEADS, SIZE, WINDOW = 4, 2, 32, 4
GROUPED = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
QUANTIZED = {
    "int8": (np.int8, 8, "PER_TENSOR", 1),
    "int8_channels": (np.int8, 8, "PER_CHANNEL", KV_HEADS * SIZE),
    "int4": (np.uint8, 4, "PER_TENSOR", 1),
    "int4_channels": (np.uint8, 4, "PER_CHANNEL", KV_HEADS * SIZE),
}


def attention(*inputs, **attributes):
    return lookup(DOMAIN, "GroupQueryAttention", 1).function(*inputs, **attributes, outputs=3)


def steps_of(batch, count, seed):
    rng = np.random.default_rng(seed)
    widths = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
    return [rng.normal(size=(batch, count, width)).astype(np.float32) for width in widths]


def angles_of(length):
    angles = np.random.default_rng(9).uniform(0, 3, (length, SIZE // 2)).astype(np.float32)
    return [np.cos(angles), np.sin(angles)]


def scales_of(kind):
    _, bits, _, count = QUANTIZED[kind]
    rng = np.random.default_rng(3)
    return [rng.uniform(0.5, 1, count).astype(np.float32) * 3 / 2 ** (bits - 1) for _ in range(2)]


def count_resident(length, capacity):
    """L(T) of the specification, by its words."""
    evicted = capacity - WINDOW + 1
    while length > capacity:
        length -= evicted
    return length


def assert_same(case, resident):
    """Compare outputs with onnxruntime's, and caches up to a sample's steps; return its caches."""
    wanted = onnxruntime_result(case)
    known = case.inputs[6]
    found = jax.jit(lambda *inputs: attention(*inputs[:6], known, *inputs[7:], **case.attributes))(
        *case.inputs
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=2e-6)
    for x, e in zip(found[1:], wanted[1:], strict=True):
        assert (x.shape, x.dtype) == (e.shape, e.dtype)
        for sample, rows in enumerate(resident):
            np.testing.assert_allclose(
                x[sample, :, :rows], e[sample, :, :rows], rtol=1e-4, atol=2e-6
            )
    return wanted[1:]


@pytest.mark.parametrize(
    ("capacity", "kind"),
    [
        (WINDOW + 2, None),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in [(WINDOW, None), (WINDOW + 2, "int8"), (WINDOW, "int4_channels")]
        ),
    ],
)
def test_a_window_slides_over_chunks_of_every_length(capacity, kind):
    attributes = GROUPED | {
        "do_rotary": 1,
        "local_window_size": WINDOW,
        "sliding_window_cache": 1,
    }
    dtype, size, scales = np.float32, SIZE, [None, None]
    if kind:
        dtype, bits, form, _ = QUANTIZED[kind]
        size, scales = SIZE * bits // 8, scales_of(kind)
        attributes |= {"k_quant_type": form, "v_quant_type": form, "kv_cache_bit_width": bits}
    caches = [np.zeros((1, KV_HEADS, capacity, size), dtype)] * 2
    length = 0
    for seed, count in enumerate([3, 2, 7, 1, 1]):
        length += count
        inputs = [*steps_of(1, count, seed), *caches, i32(length - 1), np.array(length, np.int32)]
        inputs += [*angles_of(32), None, None, None, *scales]
        case = Fused("GroupQueryAttention", inputs, attributes, ["y", "k", "v"])
        caches = assert_same(case, [count_resident(length, capacity)])


def test_samples_of_different_lengths_have_windows_of_their_own():
    rng = np.random.default_rng(0)
    caches = [rng.normal(size=(3, KV_HEADS, WINDOW + 1, SIZE)).astype(np.float32) for _ in "kv"]
    for cache in caches:
        cache[1, :, 2:] = np.nan  # this sample has 2 steps so far
    lengths = [9, 3, 12]
    inputs = [*steps_of(3, 1, 1), *caches, i32(*lengths) - 1, np.array(12, np.int32)]
    bias = rng.normal(size=(1, HEADS, 1, 12)).astype(np.float32)
    inputs += [*angles_of(16), None, bias]
    attributes = GROUPED | {"local_window_size": WINDOW, "sliding_window_cache": 1, "do_rotary": 1}
    case = Fused("GroupQueryAttention", inputs, attributes, ["y", "k", "v"])
    assert_same(case, [count_resident(length, WINDOW + 1) for length in lengths])


def test_an_empty_cache_gets_the_room_of_the_window():
    """Training has no cache: outputs are those without one, which sees as far."""
    prompt = [*steps_of(2, 7, 0), *[np.zeros((2, KV_HEADS, 0, SIZE), np.float32)] * 2]
    inputs = [*prompt, i32(6, 4), np.array(7, np.int32)]
    attributes = GROUPED | {"local_window_size": WINDOW}
    wanted = onnxruntime_result(Fused("GroupQueryAttention", inputs, attributes, ["y", "k", "v"]))
    y, k, v = attention(*inputs, **attributes, sliding_window_cache=1)
    for sample, length in enumerate([7, 5]):
        np.testing.assert_allclose(
            y[sample, :length], wanted[0][sample, :length], rtol=1e-4, atol=2e-6
        )
        for x, e in zip((k, v), wanted[1:], strict=True):
            assert x.shape[2] == WINDOW
            np.testing.assert_allclose(x[sample], e[sample, :, length - WINDOW : length])
    short = [np.zeros((2, KV_HEADS, 3, SIZE), np.float32)] * 2
    with pytest.raises(NodeError, match="a cache of 3 steps is too short for a window of 4"):
        attention(*inputs[:3], *short, *inputs[5:], **attributes, sliding_window_cache=1)


@pytest.mark.parametrize(
    "kind",
    [
        "int8",
        "int4_channels",
        *(pytest.param(kind, marks=pytest.mark.deep) for kind in ("int8_channels", "int4")),
    ],
)
def test_a_quantized_cache_grows(kind):
    dtype, bits, form, _ = QUANTIZED[kind]
    attributes = GROUPED | {"k_quant_type": form, "v_quant_type": form, "kv_cache_bit_width": bits}
    caches = [np.zeros((1, KV_HEADS, 0, SIZE * bits // 8), dtype)] * 2
    length = 0
    for seed, count in enumerate([4, 3]):
        length += count
        inputs = [*steps_of(1, count, seed), *caches, i32(length - 1), np.array(length, np.int32)]
        inputs += [None] * 5 + scales_of(kind)
        case = Fused("GroupQueryAttention", inputs, attributes, ["y", "k", "v"])
        caches = assert_same(case, [length])


def test_gradients_go_straight_through_a_quantized_cache():
    """As if rounding were the identity within the range of the codes, and constant beyond it."""
    q, k, v = (0.3 * x for x in steps_of(1, 4, 0))
    scales = scales_of("int8")
    tail = [i32(3), np.array(4, np.int32)]
    empty = [np.zeros((1, KV_HEADS, 0, SIZE), np.int8)] * 2
    form = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}

    def rounded(k, v):
        inputs = [q, k, v, *empty, *tail, *[None] * 5, *scales]
        return jnp.sin(attention(*inputs, **GROUPED, **form)[0]).sum()

    def exact(k, v):
        k, v = (
            x + jax.lax.stop_gradient(jnp.clip(jnp.rint(x / s), -128, 127) * s - x)
            for x, s in zip((k, v), scales, strict=True)
        )
        return jnp.sin(attention(q, k, v, None, None, *tail, **GROUPED)[0]).sum()

    found, wanted = (jax.jit(jax.grad(f, (0, 1)))(k, v) for f in (rounded, exact))
    assert all(abs(x / s).max() < 127 for x, s in zip((k, v), scales, strict=True))
    for x, e in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, e, rtol=1e-4, atol=1e-6)


def test_a_cache_in_float8():
    """onnxruntime's CPU provider has none: a cache of what float8 holds gives what is held."""
    q, k, v = steps_of(1, 4, 0)
    scales = [np.array([s], np.float32) for s in (0.02, 0.03)]
    dtype = ml_dtypes.float8_e4m3fn
    empty = [np.zeros((1, KV_HEADS, 0, SIZE), dtype)] * 2
    form = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    tail = [i32(3), np.array(4, np.int32)]
    y, codes_k, codes_v = attention(q, k, v, *empty, *tail, *[None] * 5, *scales, **GROUPED, **form)
    for x, codes, scale in zip((k, v), (codes_k, codes_v), scales, strict=True):
        heads = x.reshape(1, 4, KV_HEADS, SIZE).swapaxes(1, 2)
        np.testing.assert_array_equal(codes, (heads / scale).astype(dtype))
    held = [
        (codes.astype(np.float32) * scale).swapaxes(1, 2).reshape(1, 4, -1)
        for codes, scale in zip((codes_k, codes_v), scales, strict=True)
    ]
    wanted = attention(q, *held, None, None, *tail, **GROUPED)[0]
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(NodeError, match="PER_TOKEN"):
        attention(q, k, v, *empty, *tail, **GROUPED, k_quant_type="PER_TOKEN")


def test_the_number_of_keys_may_be_traced_while_the_cache_is_empty():
    """As graphs for webgpu capture compute it: from the values of the mask."""
    q, k, v = steps_of(2, 4, 0)
    empty = [np.zeros((2, KV_HEADS, 0, SIZE), np.float32)] * 2

    def prompt(total, past):
        return attention(q, k, v, *past, i32(3, 2), total, **GROUPED)[0]

    found = jax.jit(lambda total: prompt(total, empty))(np.array(4, np.int32))
    np.testing.assert_allclose(found, prompt(np.array(4, np.int32), empty), rtol=1e-5, atol=1e-6)
    full = [np.zeros((2, KV_HEADS, 8, SIZE), np.float32)] * 2
    with pytest.raises(StaticError, match="total_sequence_length"):
        jax.jit(lambda total: prompt(total, full))(np.array(4, np.int32))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_token_is_written_into_a_shared_cache(batch):
    """A step of generation makes no copy of a cache: to write, to scale or to transpose it."""
    room = 512
    tables = [jnp.asarray(part) for part in angles_of(room)]

    def step(caches, news, lengths):
        more = lengths, np.array([room], np.int32), *tables
        shared = {"do_rotary": 1, "reuses_inputs": True}
        y, *caches = attention(*news, *caches, *more, **GROUPED, **shared)
        return y, caches

    cache = jax.ShapeDtypeStruct((batch, KV_HEADS, room, SIZE), np.float32)
    lengths = jax.ShapeDtypeStruct((batch,), np.int32)
    lowered = jit(step, donate_argnums=0)
    lowered = lowered.lower(lowered.trace([cache] * 2, steps_of(batch, 1, 0), lengths))
    memory = lowered.compile().memory_analysis()
    size = cache.size * cache.dtype.itemsize
    assert memory.alias_size_in_bytes >= 2 * size
    assert memory.temp_size_in_bytes < size
