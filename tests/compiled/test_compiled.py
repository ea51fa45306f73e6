"""Programs for TPU, CUDA and ROCm, lowered and compiled where there is none of them.

What is marked `compiled` takes long, and in part needs libtpu (the extra `tpu-compile`).
"""

import importlib.util
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from benchmarks.compiled.programs import ENVIRONMENT, SEARCHED, apart, compiled, device
from jaxonnx import demo
from jaxonnx.sparse import _search, _templates
from tests.ops.operator_cases import CASES, compilable, newest, partial, traced

PLATFORMS = ("tpu", "cuda", "rocm")
COMPILABLE = [case for case in CASES if compilable(case.values[0])]
EVERY = 80
"""Of so many cases of operators one is in the sample."""


def lower(case):
    function = partial(case.function(newest(case)), case.inputs, traced(case, newest(case)))
    values = [jnp.asarray(case.inputs[i]) for i in traced(case, newest(case))]
    program = jax.jit(function).trace(*values)
    has_two_bits = "on_cpu" in str(program.jaxpr)
    for platform in PLATFORMS:
        with pytest.raises(jaxonnx.UnsupportedError) if has_two_bits else nullcontext():
            assert program.lower(lowering_platforms=(platform,)).as_text()


def test_jax_attention_is_plain_products_on_gpus():
    """Attention operators do not use it there (Limits, Speed); were it cuDNN's, they could gain."""
    like = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    attend = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    text = attend.trace(like, like, like).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" in text
    assert "custom_call" not in text


@pytest.mark.parametrize("case", COMPILABLE[::EVERY])
def test_operators_lower_for_accelerators(case):
    lower(case)


@pytest.mark.compiled
@pytest.mark.parametrize("case", COMPILABLE)
def test_every_operator_lowers_for_accelerators(case):
    lower(case)


def test_integers_of_two_bits_are_refused_where_xla_aborts():
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], "quantize", to=TensorProto.INT2),
        helper.make_node("Concat", ["narrow", "table"], ["both"], "join", axis=0),
        helper.make_node("Cast", ["both"], ["y"], to=TensorProto.FLOAT),
    ]
    floats = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None]) for n in "xy"]
    table = numpy_helper.from_array(np.array([1, -2], ml_dtypes.int2), "table")
    graph = helper.make_graph(nodes, "g", floats[:1], floats[1:], [table])
    model = jaxonnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)]))
    x = np.array([-2, 0, 1], np.float32)
    np.testing.assert_array_equal(model(x), [-2, 0, 1, 1, -2])
    batch = jax.vmap(lambda x: model.apply(model.params, x))(x[None])
    np.testing.assert_array_equal(batch, [[-2, 0, 1, 1, -2]])
    traced = jax.jit(model.apply).trace(model.params, x)
    assert traced.lower(lowering_platforms=("cpu",)).as_text()
    for platform in PLATFORMS:
        told = rf"quantize.*tensor 'narrow' is INT2.*{platform.upper()}.*INT8"
        with pytest.raises(jaxonnx.UnsupportedError, match=told):
            traced.lower(lowering_platforms=(platform,))


def mask(w):
    return _search.expand(_search.search(w, (0, 1)), (0, 1))


W = np.random.default_rng(0).normal(size=(64, 72)).astype(np.float32)


def test_masks_are_searched_by_kernels_on_one_tpu_alone():
    traced = jax.jit(mask).trace(W)
    kernels = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("tpu_custom_call")
        for platform in ("cpu", *PLATFORMS)
    }
    assert kernels == {"cpu": 0, "tpu": 2, "cuda": 0, "rocm": 0}
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=jax.NamedSharding(mesh, jax.P("x")))
    split = jax.jit(mask).trace(sharded).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" not in split.as_text()


@pytest.mark.deep
def test_the_primitives_of_a_search_are_its_functions_under_every_transformation():
    wanted = _templates.expand(_templates.codes(W))
    np.testing.assert_array_equal(mask(W), wanted)
    with jax.disable_jit():
        np.testing.assert_array_equal(mask(W), wanted)
    np.testing.assert_array_equal(jax.grad(lambda w: (w * mask(w)).sum())(W), wanted)
    batch = jnp.stack([W, W + 1])
    each = jnp.stack([*map(mask, batch)], 1)
    np.testing.assert_array_equal(jax.vmap(mask, 1, 1)(batch.swapaxes(0, 1)), each)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("shape", "axes", "dtype"),
    [((8, 12, 3), (1, 0), "float32"), ((1, 520, 12), (1, 2), "bfloat16")],
)
def test_the_kernels_of_tpu_are_the_search_bit_for_bit(shape, axes, dtype):
    w = jnp.asarray(np.random.default_rng(1).integers(-9, 9, shape), dtype)
    codes, *sums = _templates.search(w, axes)
    found, *others = _search.search_on_tpu(w, axes, interpret=True)
    np.testing.assert_array_equal(found, codes)
    np.testing.assert_array_equal(others, sums)  # of integers: exact
    expanded = _templates.expand(codes, axes)
    np.testing.assert_array_equal(_search.expand_on_tpu(codes, axes, interpret=True)[0], expanded)


@pytest.mark.deep
def test_an_exported_step_has_the_choice_of_every_platform():
    loss = "softmax_cross_entropy_with_integer_labels"
    step = jaxonnx.training.step(demo.model(), loss, jaxonnx.optim.momentum(0.1))
    batch = np.zeros((2, 1, 8, 8), np.float32), np.arange(2)

    def update(state, x, y):
        return step.update(state, (x, y))[1]

    arguments = (step.init(), *batch)
    leaves, tree = jax.tree.flatten(arguments)
    exported = jax.export.export(
        jax.jit(lambda *leaves: update(*jax.tree.unflatten(tree, leaves))),
        platforms=("cpu", "tpu", "cuda"),
    )(*leaves)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cpu", "tpu", "cuda")
    np.testing.assert_allclose(again.call(*leaves), update(*arguments), rtol=1e-6)
    traced = jax.jit(update).trace(*arguments)
    convolutions = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("convolution(")
        for platform in ("cpu", "tpu")
    }
    assert convolutions["cpu"] < convolutions["tpu"]
    # a program for several platforms has them all, of which each runs its own
    assert again.mlir_module().count("convolution(") >= sum(convolutions.values())


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="XLA's compiler for TPU is missing: pip install 'jaxonnx[tpu-compile]'",
)


needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="XLA's compiler for CUDA is missing: pip install 'jaxonnx[cuda-compile]'",
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("tpu-v5e", marks=needs_libtpu),
        pytest.param("h100", marks=needs_cuda),
    ],
)
def chip(request):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield device(request.param)


@pytest.mark.compiled
@pytest.mark.parametrize("case", COMPILABLE[::EVERY])
def test_a_sample_of_operators_compiles_for_accelerators(case, chip):
    function = partial(case.function(newest(case)), case.inputs, traced(case, newest(case)))
    values = [jnp.asarray(case.inputs[i]) for i in traced(case, newest(case))]
    assert compiled(function, chip, *values).as_text()


@needs_libtpu
@pytest.mark.compiled
def test_a_search_on_tpu_moves_little_more_than_the_weight():
    counts = apart("tpu-v5e", "", "mask codes", "jaxonnx")
    weight = 4 * SEARCHED**2 / 1e6
    assert counts["calls"] == {"tpu_custom_call": 1}
    assert counts["MB accessed"] < 1.2 * weight
    assert counts["MB of temporaries"] < 0.1 * weight


@needs_libtpu
@pytest.mark.compiled
def test_a_refresh_on_tpu_moves_less_than_three_times_the_weight():
    counts = apart("tpu-v5e", "", "mask refresh", "jaxonnx")
    assert counts["calls"]["tpu_custom_call"] == 2
    assert counts["MB accessed"] < 2.6 * 4 * SEARCHED**2 / 1e6


@needs_libtpu
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "accessed", "temporaries", "copies"),
    [
        ("mlp", 1.09, 1.2, 3),
        ("lenet", 1.06, 1.45, 3),
        ("encoder", 1.08, 0.8, 27),
        ("lstm", 1.56, 0.6, 3),
    ],
)
def test_steps_for_tpu_stay_near_those_of_flax(name, accessed, temporaries, copies):
    ours, theirs = (apart("tpu-v5e", name, "step", system) for system in ("jaxonnx", "flax"))
    assert ours["MB accessed"] < accessed * theirs["MB accessed"]
    assert ours["MB a turn"] <= 0.25 * theirs["MB a turn"]
    if ours["MB a turn"]:
        assert ours["MB in all turns"] < 0.4 * theirs["MB in all turns"]
    assert ours["MB of temporaries"] < temporaries * theirs["MB of temporaries"]
    assert ours["copies"] <= theirs["copies"] + copies


@needs_cuda
@pytest.mark.compiled
@pytest.mark.parametrize(("name", "temporaries"), [("mlp", 1.15), ("lenet", 0.65), ("lstm", 0.85)])
def test_steps_for_cuda_stay_near_those_of_flax(name, temporaries):
    ours, theirs = (apart("h100", name, "step", system) for system in ("jaxonnx", "flax"))
    assert ours["calls"] == theirs["calls"]
    assert ours["MB of temporaries"] < temporaries * theirs["MB of temporaries"]
