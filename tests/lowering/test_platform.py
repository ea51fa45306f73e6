"""What a platform is quick at is chosen where a program is lowered, not where it is traced."""

import hashlib
import re
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx._run.call_form import prepare_tensors
from jaxonnx.lowering import _contract, _stored_array
from jaxonnx.lowering._conv import Conv
from jaxonnx.training import Settings, build_step
from jaxonnx.training._settings.weight_layout import WeightLayout
from tests.support.tiny_networks import LABELS, examples, mlp

rng = np.random.default_rng(0)


def network():
    """Convolutions that CPU has four rules of its own for, and a matrix product."""
    shapes = {
        "wide": (48, 48, 3, 3),
        "depthwise": (48, 1, 3, 3),
        "grouped": (48, 12, 3, 3),
        "small image": (48, 48, 3, 3),
        "head": (10, 48),
    }
    settings = {"depthwise": {"group": 48}, "grouped": {"group": 4, "strides": [4, 4]}}
    nodes, x = [], "x"
    for name in list(shapes)[:-1]:
        nodes.append(
            helper.make_node(
                "Conv", [x, name], [f"y {name}"], pads=[1] * 4, **settings.get(name, {})
            )
        )
        x = f"y {name}"
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["pooled"]))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"]))
    nodes.append(helper.make_node("Gemm", ["flat", "head"], ["y"], transB=1))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 48, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(np.zeros(s, np.float32), name) for name, s in shapes.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_a_step_traced_on_cpu_has_the_convolutions_of_the_platform_it_is_lowered_for():
    model, optimizer = jaxonnx.load(network()), optax.adam(1e-3)
    storage = WeightLayout(model.params, optax.with_extra_args_support(optimizer))
    assert len(storage.names) == 4

    def step(params, memory, x, y):
        def loss(params):
            logits, _ = model.apply_train(
                storage.apply_params(params), model.state, jax.random.key(0), x
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        updates, memory = optimizer.update(jax.grad(loss)(params), memory, params)
        return optax.apply_updates(params, updates), memory

    params = storage.store(model.params)
    x, y = np.zeros((8, 48, 8, 8), np.float32), np.arange(8)
    traced = jax.jit(step).trace(params, optimizer.init(params), x, y)
    found = {}
    for platform in ("cpu", "tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        found[platform] = [
            len(re.findall(rf"stablehlo\.{kind}\b", text))
            for kind in ("convolution", "dot_general")
        ]
    # four layers and their gradients, of images but the first; the head has three products
    assert found["tpu"] == found["cuda"] == [11, 3]
    convolutions, products = found["cpu"]
    assert convolutions < 11
    assert products > 3


@dataclass(frozen=True)
class Product:
    """T(x, w, y) of matrices."""

    batch: tuple[int, ...] = field(default=(), init=False)

    def plain(self, out, u, v):
        return (v @ u.T, u.T @ v, u @ v)[out]


def lowered(platform):
    x = np.ones((3, 3), np.float32)
    traced = jax.jit(lambda x: _contract.contract(Product(), 2, x, x)).trace(x)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return hashlib.md5(text.encode()).hexdigest(), "stablehlo.tanh" in text


def test_a_rule_for_one_platform_changes_that_platform_alone():
    before = {platform: lowered(platform) for platform in ("cpu", "cuda", "tpu")}
    rule = lambda form, out, u, v: jnp.tanh(form.plain(out, u, v))  # noqa: E731
    _contract.on_platforms(Product, {"tpu": _contract.Rule(rule, mapped=rule)})
    try:
        after = {platform: lowered(platform) for platform in before}
    finally:
        del _contract.RULES[Product]
    assert {platform for platform in before if after[platform] != before[platform]} == {"tpu"}
    assert after["tpu"][1]
    assert {platform: lowered(platform) for platform in before} == before


def test_a_platform_without_rules_has_the_plain_form():
    assert _contract.RULES[Conv].keys() == {"cpu"}
    form = Conv((5,), (3,), (1,), (1,), ((1, 1),), (5,), 1)
    assert _contract.on_platform("cuda", form) == form.plain


@pytest.mark.parametrize(("platform", "names"), [("cpu", {"w"}), ("tpu", {"w"}), ("gpu", set())])
def test_weights_have_the_order_of_the_platform_that_they_are_for(platform, names):
    params = {"w": jnp.ones((8, 4, 3, 3)), "b": jnp.ones(8)}
    optimizer = optax.with_extra_args_support(optax.adam(1e-3))
    assert WeightLayout(params, optimizer, platform).names == names


def test_where_arrays_are_says_their_order_and_nothing_is_asked_while_tracing(monkeypatch):
    def asked():
        raise AssertionError("the default backend was asked")

    model = jaxonnx.load(network())
    monkeypatch.setattr(jax, "default_backend", asked)
    stored = prepare_tensors(model.program, model.params)
    assert stored["wide"].value.shape == (3, 3, 48, 48)
    (cpu,) = {d.platform for x in model.params.values() for d in x.devices()}
    monkeypatch.delitem(_stored_array.ORDERS, cpu)
    assert prepare_tensors(model.program, model.params) == model.params
    monkeypatch.undo()

    def inside(params):
        assert _stored_array.order(params["wide"]) is None
        return params

    jax.eval_shape(inside, model.params)


@pytest.mark.parametrize("nan", ["skip", pytest.param("stop", marks=pytest.mark.deep)])
def test_accelerators_select_what_a_conditional_gives_on_cpu(nan):
    settings = Settings(loss=LABELS, optimizer=optax.sgd(0.1), nan=nan)
    x, y = examples(8)
    states, conditionals = [], []
    for platform in ("cpu", "tpu"):
        one = build_step(jaxonnx.load(mlp()), settings, None, 1, platform=platform)
        update, state = jax.jit(one.update), one.init()
        conditionals.append("cond[" in str(update.trace(state, (x, y)).jaxpr))
        seen = []
        for factor in (1, np.nan, 1):
            state, (_, finite) = update(state, (factor * x, y))
            seen.append(bool(finite))
        assert seen == [True, False, nan == "skip"]
        states.append(state)
    assert conditionals == [True, False]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *states)
