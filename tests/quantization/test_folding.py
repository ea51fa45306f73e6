"""BatchNormalization in the convolution before it, as `quantize` writes it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx import demo
from jaxonnx.quantization._insert import fold_normalizations

BN = ("scale", "b", "mean", "var")


def draw(seed, channels, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    scale, b, mean = rng.normal(size=(3, channels))
    tensors = {"scale": scale + 0.5, "b": b, "mean": mean, "var": rng.uniform(0.1, 3, channels)}
    return {name: value.astype(dtype) for name, value in tensors.items()}


def node(kind, inputs, outputs, **attributes):
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def file(
    *nodes,
    opset=15,
    size=(6, 5),
    group=1,
    bias=False,
    inputs=4,
    channels=8,
    outputs=("y",),
    defaults=(),
    dtype: Any = np.float32,
    conv=None,
    norm=None,
    before=None,
    **tensors,
):
    """A file with Conv and BatchNormalization, x -> c -> n; `nodes` go on from there."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    rng = np.random.default_rng(0)
    kernel = (3, 2, 2)[: len(size)]
    given: dict[str, Any] = {
        "w": rng.normal(size=(channels, inputs // group, *kernel)).astype(dtype)
    }
    given |= draw(1, channels, dtype) | ({"d": np.ones(channels, dtype)} if bias else {})
    given |= tensors
    first = [
        conv or node("Conv", "x w d" if bias else "x w", "c", group=group),
        norm or node("BatchNormalization", "c scale b mean var", "n", epsilon=1e-3),
    ]
    infos = [helper.make_tensor_value_info("x", kind, [2, inputs, *size])]
    infos += [helper.make_tensor_value_info(n, kind, given[n].shape) for n in defaults]
    graph = helper.make_graph(
        [*(before or []), *first, *(nodes or [node("Relu", "n", "y")])],
        "g",
        infos,
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in given.items()],
    )
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def image(model, seed=2):
    (x, *_) = model.inputs
    return np.random.default_rng(seed).normal(size=x.shape).astype(x.dtype)


def count(model):
    """Count the BatchNormalizations of a model's file."""
    proto = model.to_onnx()
    nodes = [*proto.graph.node, *(node for f in proto.functions for node in f.node)]
    return sum(node.op_type == "BatchNormalization" for node in nodes)


def check(model, remaining, rtol=2e-5):
    """Check that folding leaves so many BatchNormalizations and the same outputs."""
    x = image(model)
    folded = fold_normalizations(model)
    for a, b in zip(jax.tree.leaves(folded(x)), jax.tree.leaves(model(x)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.nanmax(np.abs(b)))
    assert count(folded) == remaining
    return folded


def by_onnxruntime(proto, x) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    data = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


KINDS: dict[str, dict[str, Any]] = {
    "image": {},
    "bias": {"bias": True},
    "line": {"size": (9,)},
    "volume": {"size": (5, 4, 4), "bias": True},
    "grouped": {"group": 2},
    "depthwise": {"group": 4, "bias": True},
    "depthwise, one each": {"group": 8, "inputs": 8},
    "long kernel": {"w": np.random.default_rng(3).normal(size=(8, 4, 1, 17)), "size": (2, 20)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opset", [7, 9, 14, 15])
def test_a_pair_is_one_convolution(kind, opset):
    options: dict[str, Any] = {n: np.float32(v) if n == "w" else v for n, v in KINDS[kind].items()}
    proto = file(opset=opset, **options)
    folded = check(jaxonnx.load(proto), 0)
    x = image(folded)
    (expected,), (y,) = (by_onnxruntime(p, x) for p in (proto, folded.to_onnx()))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * expected.max())


@pytest.mark.parametrize("opset", [1, 6])
@pytest.mark.parametrize("is_test", [0, 1])
def test_a_pair_of_an_old_opset(opset, is_test):
    hint: dict[str, Any] = {"consumed_inputs": [0, 0, 0, 1, 1]} if opset == 1 else {}
    norm = node("BatchNormalization", "c scale b mean var", "n", is_test=is_test, **hint)
    check(jaxonnx.load(file(opset=opset, norm=norm)), 0)


def test_a_network_has_none_left():
    model = demo.model()
    assert (count(model), count(fold_normalizations(model))) == (3, 0)


def test_names_of_training_that_nothing_reads_are_no_obstacle():
    names, attributes = "n m v", {"training_mode": 1}
    norm = node("BatchNormalization", "c scale b mean var", names, **attributes)
    check(jaxonnx.load(file(norm=norm)), 0)


def branch(name, *nodes):
    value = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph([*nodes], name, [], [value])


CONDITION = node("Greater", "total zero", "above"), node("ReduceSum", "n", "total", keepdims=0)
SUBGRAPH = (
    *CONDITION[::-1],
    node(
        "If",
        "above",
        "y",
        then_branch=branch("t", node("Relu", "n", "t")),
        else_branch=branch("e", node("Relu", "c", "e")),
    ),
)
"""A branch reads the result of the convolution."""

LONELY = {
    "a shared weight": file(
        node("Relu", "n", "r"),
        node("Mul", "w two", "z"),
        outputs=("r", "z"),
        two=np.array([2], np.float32),
    ),
    "a shared bias": file(
        node("Reshape", "b to", "v"), node("Add", "n v", "y"), to=np.array([1, 8, 1, 1])
    ),
    "a weight that is the image": file(conv=node("Conv", "w w", "c")),
    "the bias of both": file(conv=node("Conv", "x w b", "c")),
    "a value of the file": file(node("Relu", "n", "y"), outputs=("y", "c")),
    "a value read twice": file(node("Add", "n c", "y")),
    "a weight of the file": file(node("Relu", "n", "y"), outputs=("y", "w")),
    "read in a branch": file(*SUBGRAPH, zero=np.float32(0)),
    "statistics read": file(
        node("Reshape", "m to", "v"),
        node("Add", "n v", "y"),
        opset=9,
        norm=node("BatchNormalization", "c scale b mean var", "n m"),
        to=np.array([1, 8, 1, 1]),
    ),
    "a computed scale": file(
        norm=node("BatchNormalization", "c s b mean var", "n"),
        before=[node("Abs", "scale", "s")],
    ),
    "a computed weight": file(conv=node("Conv", "x v", "c"), before=[node("Abs", "w", "v")]),
    "an activation between": file(
        conv=node("Conv", "x w", "d"), before=None, norm=node("Relu", "d", "c")
    ),
}
LONELY["an activation between"].graph.node.insert(
    2, node("BatchNormalization", "c scale b mean var", "n")
)


@pytest.mark.parametrize("what", LONELY)
def test_what_something_else_reads_is_not_folded(what):
    proto = LONELY[what]
    check(jaxonnx.load(proto), 1)


def with_value(name, value, place=3, **options: Any):
    tensor: Any = draw(1, 8)[name] if name in BN else np.ones((8, 4, 3, 2), np.float32)
    tensor[place] = value
    options[name] = tensor
    return file(**options)


UNSAFE = {
    "NaN variance": with_value("var", np.nan),
    "negative variance": with_value("var", -0.5),
    "infinite variance": with_value("var", np.inf),
    "infinite mean": with_value("mean", np.inf),
    "NaN scale": with_value("scale", np.nan),
    "infinite b": with_value("b", -np.inf),
    "NaN weight": with_value("w", np.nan),
    "infinite weight": with_value("w", np.inf),
    "huge weight": with_value("w", 1e35),
    "tiny weights": with_value("w", 1e-36),
    "tiny scale": with_value("scale", 1e-39),
    "tiny scale of large weights": with_value(
        "scale", 1e-39, w=np.full((8, 4, 3, 2), 1e20, np.float32)
    ),
    "huge mean": with_value("mean", 3e38),
    "variance of zero": with_value(
        "var", 0, norm=node("BatchNormalization", "c scale b mean var", "n", epsilon=0.0)
    ),
    "tiny variance": with_value(
        "var", 1e-37, norm=node("BatchNormalization", "c scale b mean var", "n", epsilon=0.0),
        scale=np.full(8, 1e30, np.float32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNSAFE)
def test_numbers_that_are_not_safe_are_not_folded(what):
    model = jaxonnx.load(UNSAFE[what])
    folded = fold_normalizations(model)
    assert count(folded) == 1
    np.testing.assert_array_equal(folded(image(model)), model(image(model)))


def test_a_channel_that_is_switched_off_is_folded():
    scale = draw(1, 8)["scale"]
    scale[2:4] = 0
    check(jaxonnx.load(file(scale=scale)), 0)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 99),
    st.floats(0, 2.0**100, width=32),
    st.floats(-(2.0**60), 2.0**60, width=32),
    st.floats(-(2.0**60), 2.0**60, width=32),
)
def test_folded_or_not_the_results_are_as_exact(seed, var, scale, mean):
    """Against float64, the error is below that of rounding."""
    tensors = draw(seed, 8)
    tensors["var"][1], tensors["scale"][1], tensors["mean"][1] = var, scale, mean
    model = jaxonnx.load(file(node("Identity", "n", "y"), **tensors))
    x = image(model)
    exact = {n: np.array(v, np.float64) for n, v in {**model.params, **model.state}.items()}
    with jax.enable_x64(True):
        y = np.asarray(
            jax.lax.conv(jnp.asarray(x, float), jnp.asarray(exact["w"]), (1, 1), "VALID")
        )
        rows = np.abs(exact["w"]).reshape(8, -1).sum(1) * np.abs(x).max()
    shape = (8, 1, 1)
    factor = exact["scale"] / np.sqrt(exact["var"] + np.float32(1e-3))
    wanted = (y - exact["mean"].reshape(shape)) * factor.reshape(shape)
    wanted = wanted + exact["b"].reshape(shape)
    size = (rows + np.abs(exact["mean"])) * np.abs(factor) + np.abs(exact["b"])
    error = np.abs(np.float64(fold_normalizations(model)(x)) - wanted).max((0, 2, 3))
    np.testing.assert_array_less(error, 1e-5 * size + 1e-30)


def test_other_types_are_not_folded():
    check(jaxonnx.load(file(dtype=np.float16)), 1, rtol=1e-2)
    # scale and statistics of other types, from opset 15 on
    half: dict[str, Any] = {name: np.float16(value) for name, value in draw(1, 8).items()}
    check(jaxonnx.load(file(**half)), 1)
    with jax.enable_x64(True):
        check(jaxonnx.load(file(dtype=np.float64)), 0, rtol=1e-13)
        wide: dict[str, Any] = {name: np.float64(value) for name, value in draw(1, 8).items()}
        check(jaxonnx.load(file(**wide)), 1)


def test_statistics_of_pixels_are_not_folded():
    norm = node("BatchNormalization", "c scale b mean var", "n", spatial=0)
    pixels: dict[str, Any] = {
        name: np.resize(value, (8, 4, 4)) for name, value in draw(1, 8).items()
    }
    assert count(fold_normalizations(jaxonnx.load(file(opset=7, norm=norm, **pixels)))) == 1
    # vectors do not fit them, and a call says so
    assert count(fold_normalizations(jaxonnx.load(file(opset=7, norm=norm)))) == 1


def test_vectors_of_other_lengths_are_not_folded():
    ones: dict[str, Any] = {name: np.ones(1, np.float32) for name in BN}
    assert count(fold_normalizations(jaxonnx.load(file(**ones)))) == 1


FUNCTION = """
<ir_version: 8, opset_import: ["" : 15, "here" : 1]>
g (float[2,4,6,5] x) => (float[2,8,4,4] y) {
  y = here.normalized(x, w, scale, b, mean, var)
}
<domain: "here", opset_import: ["" : 15]>
normalized (x, w, scale, b, mean, var) => (y) {
  c = Conv(x, w)
  y = BatchNormalization(c, scale, b, mean, var)
}
"""


def test_a_pair_in_a_function_is_left_alone():
    proto = onnx.parser.parse_model(FUNCTION)
    proto.graph.initializer.extend(file().graph.initializer)
    check(jaxonnx.load(proto), 1)
