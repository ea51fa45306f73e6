"""Constants are not trained, though they stand where weights do: by numbers, place or name."""

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxonnx
from jaxonnx._graph.sites import describe_constant

TIMES = np.arange(64)


def fourier(window=None, bins=33):
    """Cosines and sines as nnAudio, torchlibrosa and conv-stft have them: (2 * bins, 64)."""
    angles = 2 * np.pi * np.arange(bins)[:, None] * TIMES / 64
    basis = np.concatenate([np.cos(angles), -np.sin(angles)])
    return basis if window is None else basis * window(65)[:-1]


def cosine_transform():
    return np.cos(np.pi * np.arange(13)[:, None] * (TIMES + 0.5) / 64) * np.sqrt(2 / 64)


def triangles(slaney=True):
    """A mel bank (20, 65), as librosa and torchaudio make them."""
    hertz = 700 * (10 ** (np.linspace(0, 2800, 22) / 2595) - 1)
    bins = np.linspace(0, 8000, 65)
    rise = (bins - hertz[:-2, None]) / np.diff(hertz)[:-1, None]
    fall = (hertz[2:, None] - bins) / np.diff(hertz)[1:, None]
    bank = np.maximum(0, np.minimum(rise, fall))
    return bank * 2 / (hertz[2:] - hertz[:-2])[:, None] if slaney else bank


def positions(count=50, size=16):
    angles = np.arange(count)[:, None] / 10000 ** (np.arange(0, size, 2) / size)
    return np.stack([np.sin(angles), np.cos(angles)], 2).reshape(count, size)


def rotary(function):
    angles = np.arange(64)[:, None] * 10000.0 ** -(np.arange(0, 16, 2) / 16)
    return function(np.concatenate([angles, angles], 1))


VECTORS = {
    "geometric": {
        "inv_freq": 10000.0 ** -(np.arange(0, 16, 2) / 16),
        "alibi": 2.0 ** -np.arange(1, 9),
    },
    "arithmetic": {"cents of a pitch tracker": 1997.38 + 20 * np.arange(360)},
    "window": {
        "hann": np.hanning(33)[:-1],
        "symmetric hann": np.hanning(32),
        "padded hann": np.pad(np.hanning(25)[:-1], 4),
        "hamming": np.hamming(24),
        "blackman": np.blackman(21)[:-1],
        "povey": np.hanning(400) ** 0.85,
        "gauss": np.exp(-0.5 * ((np.arange(31) - 15) / 5) ** 2),
    },
}
MATRICES = {
    "sinusoids": {
        "fourier": fourier(),
        "windowed": fourier(np.hanning),
        "hamming": fourier(np.hamming),
        "transposed": fourier(np.hanning).T,
        "as kernels": fourier(np.hanning)[:, None],
        "cosine transform": cosine_transform(),
        "positions": positions(),
        "rotary cosines": rotary(np.cos),
        "rotary sines": rotary(np.sin),
    },
    "bank": {
        "mel": triangles(),
        "mel, transposed": triangles(slaney=False).T,
        "rectangular bands": np.repeat(np.eye(8), 6, 1) / 6,
    },
}
CASES = [(kind, n) for group in (VECTORS, MATRICES) for kind, some in group.items() for n in some]


def load(nodes, shape="n, k", options=None, opset=20, **tensors):
    """A file with these float nodes from x to y."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": {opset}]> g (float[{shape}] x) => (float[m] y) '
        f"{{ {nodes} }}"
    )
    for name, value in tensors.items():
        tensor = onnx.numpy_helper.from_array(np.float32(value), name.replace("__", "."))
        proto.graph.initializer.append(tensor)
    for node in proto.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    return jaxonnx.load(proto, **(options or {}))


def weight(*shape):
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_constants_are_known(kind, name, dtype):
    value = {**VECTORS, **MATRICES}[kind][name].astype(dtype)
    assert kind in describe_constant(value)
    random = np.random.default_rng(0)
    scale = 0.1 * np.abs(value).max()
    assert not describe_constant(value + (scale * random.normal(size=value.shape)).astype(dtype))


@given(st.integers(0, 1000), st.integers(4, 64))
def test_learned_tensors_are_not(seed, count):
    random = np.random.default_rng(seed)
    for shape in ((count,), (count, count), (8, count), (count, 1, 32)):
        for value in (np.ones(shape), np.zeros(shape), random.normal(size=shape)):
            assert not describe_constant(value)
            assert not describe_constant(value + random.normal(size=shape) * 0.02)
    sparse = random.normal(size=(count, count)) * (random.random((count, count)) < 0.3)
    for value in (np.eye(count), np.maximum(sparse, 0), random.random((count, count))):
        assert not describe_constant(value)


def test_other_types_are_not_looked_at():
    for vector in (np.array(["a", ","] * 4, object), np.arange(8), np.ones(8, bool)):
        assert not describe_constant(vector)


def test_values_decide_whatever_the_name():
    nodes = "a = Mul(x, v__weight) y = MatMul(a, w)"
    hann = np.hanning(32)
    assert [*load(nodes, v__weight=hann, w=weight(32, 3)).params] == ["w"]
    moved = hann + np.random.default_rng(0).normal(size=32) * 0.01
    assert {*load(nodes, v__weight=moved, w=weight(32, 3)).params} == {"v.weight", "w"}


CONV = "p = Conv(z, k) q = Relu(p) y = Flatten(q)"
PLACES = {
    "mean and std in front": (
        f"m = Sub(x, mean) z = Div(m, std) {CONV}",
        {"mean": weight(3, 1, 1), "std": weight(1, 3, 1, 1), "k": weight(4, 3, 1, 1)},
        {"mean", "std"},
    ),
    "the same by other names": (
        f"m = Mul(x, c1) z = Add(m, c2) {CONV}",
        {"c1": weight(1, 3, 1, 1), "c2": weight(3, 1, 1), "k": weight(4, 3, 1, 1)},
        {"c1", "c2"},
    ),
    "a weight in front": (
        f"z = Mul(x, input__weight) {CONV.replace('k)', 'k, b)')}",
        {"input__weight": weight(1, 3, 1, 1), "k": weight(4, 3, 1, 1), "b": weight(4)},
        set(),
    ),
    "scales behind a layer": (
        "p = Conv(x, k) r = Mul(p, s) t = Add(r, u) y = Flatten(t)",
        {"k": weight(4, 3, 1, 1), "s": weight(4, 1, 1), "u": weight(1, 4, 1, 1)},
        set(),
    ),
    "no layer at all": (
        "m = Mul(x, s) z = Add(m, u) y = Flatten(z)",
        {"s": weight(3, 1, 1), "u": weight(3, 1, 1)},
        set(),
    ),
    "scales of actions": (
        "f = GlobalAveragePool(x) e = Flatten(f) h = MatMul(e, w) t = Tanh(h) "
        "m = Mul(t, action_scale) y = Add(m, action_bias)",
        {"w": weight(3, 5), "action_scale": weight(5), "action_bias": weight(5)},
        {"action_scale", "action_bias"},
    ),
    "a window by its name": (
        "f = GlobalAveragePool(x) e = Flatten(f) h = MatMul(e, w) m = Mul(h, stft_window) "
        "y = MatMul(m, v)",
        {"w": weight(3, 5), "stft_window": weight(5), "v": weight(5, 2)},
        {"stft_window"},
    ),
    "weights by the names of buffers": (
        "f = GlobalAveragePool(x) e = Flatten(f) h = Gemm(e, w, mean) g = Gemm(h, std, fb) "
        "y = Gemm(g, v, window)",
        {"w": weight(3, 5), "mean": weight(5), "std": weight(5, 4), "fb": weight(4)}
        | {"v": weight(4, 2), "window": weight(2)},
        set(),
    ),
    "groups that are normalized": (
        "c = Conv(x, k) s = Constant<value_ints=[0, 2, -1]>() r = Reshape(c, s) "
        "i = InstanceNormalization(r, val_1, val_2) h = Shape(c) b = Reshape(i, h) m = Mul(b, g) "
        "y = Add(m, o)",
        {
            **{"k": weight(4, 3, 1, 1), "g": weight(4, 1, 1), "o": weight(4, 1, 1)},
            **{"val_1": np.ones(2), "val_2": np.zeros(2)},  # so named by PyTorch's exporter
        },
        {"val_1", "val_2"},
    ),
    "instances that are normalized": (
        "c = Conv(x, k) y = InstanceNormalization(c, one, zero)",
        {"k": weight(4, 3, 1, 1), "one": np.ones(4), "zero": np.zeros(4)},
        set(),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_and_names(name):
    nodes, tensors, frozen = PLACES[name]
    model = load(nodes, "n, 3, 4, 4", **tensors)
    assert {n.replace("__", ".") for n in tensors} - {*model.params} == frozen
    text = " ".join(str(model).split())
    for one in frozen:
        assert f"'{one}'" in text
        assert {*load(nodes, "n, 3, 4, 4", {"trainable": one}, **tensors).params} == {one}
    assert ("constant" in text or "learned?" in text) == bool(frozen)


def test_constant_nodes_beside_initializers():
    """What a program computes with; a file all of whose tensors are Constant nodes has weights."""
    nodes = """v = Constant<value = float[4] {1.0, 7.0, 2.0, 3.0}>() a = MatMul(x, w) s = Mul(a, v)
    y = MatMul(s, u)"""
    assert {*load(nodes, w=weight(4, 4), u=weight(4, 2)).params} == {"w", "u"}
    numbers = ", ".join(map(str, np.float32(weight(16))))
    nodes = f"w = Constant<value = float[4, 4] {{{numbers}}}>() {nodes}"
    assert {*load(nodes.replace("(s, u)", "(s, w)")).params} == {"w", "v"}


def test_a_motion_that_is_shown_beside_a_policy():
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    g (float[n, 8] x, int64[n] time) => (float[n, 2] action, float[n, 5] pose) {
      h = MatMul(x, w) t = Relu(h) action = MatMul(t, u) pose = Gather(motion, time)
    }""")
    for name, shape in {"w": (8, 4), "u": (4, 2), "motion": (30, 5)}.items():
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(np.float32(weight(*shape)), name)
        )
    model = jaxonnx.load(proto)
    assert {*model.params} == {"w", "u"}
    assert "'motion': its rows are outputs" in " ".join(str(model).split())


def test_a_table_of_sinusoids_that_positions_choose():
    nodes = """i = Cast<to = 7>(x) e = Gather(words, i) n = Shape(i) s = Constant<value_int = 1>()
    c = Gather(n, s) o = Constant<value_int = 0>() r = Range(o, c, s) p = Gather(places, r)
    a = Add(e, p) y = MatMul(a, w)"""
    tensors = {"words": weight(9, 16), "w": weight(16, 2)}
    assert {*load(nodes, **tensors, places=positions()).params} == {"words", "w"}
    assert {*load(nodes, **tensors, places=weight(50, 16)).params} == {"words", "w", "places"}


def test_two_frequencies_that_positions_multiply():
    """As a rotary embedding of four dimensions and ALiBi with two heads have them."""
    nodes = """n = Shape(x) one = Constant<value_int = 1>() c = Gather(n, one)
    o = Constant<value_int = 0>() r = Range(o, c, one) f = Cast<to = 1>(r)
    l = Constant<value_ints = [-1]>() g = Unsqueeze(f, l) m = Mul(g, slopes) a = MatMul(m, w)
    h = MatMul(x, u) y = Add(h, a)"""
    model = load(nodes, "n, 4", slopes=[1.0, 0.01], w=weight(2, 3), u=weight(4, 3))
    assert {*model.params} == {"w", "u"}


def test_a_file_is_written_with_its_constants():
    nodes = "a = Mul(x, v) y = MatMul(a, w)"
    model = load(nodes, v=VECTORS["geometric"]["inv_freq"], w=weight(8, 3))
    proto = model.to_onnx()
    assert {t.name for t in proto.graph.initializer} == {"v", "w"}
    onnx.checker.check_model(proto)


def test_a_vector_of_very_different_numbers_is_no_window():
    """The fit of a Gaussian to it is ill-conditioned, of which NumPy warns."""
    assert describe_constant(np.float32([0.5, 7e14, 0.3, 0.7, 0.9, 0.2, 0.4, 0.6])) == ""
