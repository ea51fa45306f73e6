"""Members of an ensemble in one program, with normalizations and weights of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import jaxonnx
from tests.support.paths import DATA

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)

MEMBER = """
<ir_version: 9, opset_import: ["": 18]>
g (float[n,3] x) => (float[n,2] y) {
  shifted = Sub(x, mean)
  scaled = Div(shifted, deviation)
  h = MatMul(scaled, w)
  r = Relu(h)
  flat = Reshape(r, sizes)
  z = Add(flat, b)
  factor = Constant<value = float {2.0}>()
  y = Mul(z, factor)
}
"""


def member(seed, **changes):
    random = np.random.default_rng(seed)
    proto = onnx.parser.parse_model(changes.pop("text", MEMBER))
    tensors = {
        "mean": np.float32(random.normal()),
        "deviation": np.float32(1 + random.random()),
        "w": random.normal(size=(3, 2)).astype("f4"),
        "b": random.normal(size=2).astype("f4"),
        "sizes": np.array([-1, 2]),
    } | changes
    for name, x in tensors.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(x), name))
    return proto


def run(proto, x=X):
    (y,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    return y


def test_members_with_normalizations_of_their_own_are_one_program(tmp_path):
    protos = [member(seed) for seed in range(3)]
    members = jaxonnx.stack(protos)
    assert {*members.params} == {"w", "b"}
    assert {*members.state} == {"mean", "deviation"}

    @jax.jit
    def apply(params, state, x):
        one = lambda params, state: members.model.apply(params, x, state=state)  # noqa: E731
        return jax.vmap(one)(params, state)

    expected = np.stack([run(proto) for proto in protos])
    np.testing.assert_allclose(apply(members.params, members.state, X), expected, rtol=1e-5)
    gradients = jax.grad(lambda p: apply(p, members.state, X)[1].sum())(members.params)
    alone = jaxonnx.load(protos[1])
    gradient = jax.grad(lambda p: alone.apply(p, X).sum())(alone.params)
    np.testing.assert_allclose(gradients["w"][1], gradient["w"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(gradients["w"][0], 0)
    members.member(2).save(tmp_path / "third.onnx")
    np.testing.assert_array_equal(run(onnx.load(tmp_path / "third.onnx")), expected[2])


def test_a_trained_file_and_the_original_are_stacked():
    model = jaxonnx.load(DATA / "lenet_bn.legacy.onnx")
    x = np.load(DATA / "lenet_bn.legacy.npz")["x"]
    other = model.replace(
        params=jax.tree.map(lambda p: p * 1.1, model.params),
        state=jax.tree.map(lambda s: s * 0.9, model.state),
    )
    members = jaxonnx.stack([model, other])
    apply = jax.jit(jax.vmap(lambda p, s: members.model.apply(p, x, state=s)))
    y = apply(members.params, members.state)
    np.testing.assert_allclose(y, jnp.stack([model(x), other(x)]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": MEMBER.replace("Relu(h)", "Tanh(h)")}, r"models\[1\].*'r' \(Tanh\)"),
        ({"text": MEMBER.replace("{2.0}", "{3.0}")}, None),
        ({"sizes": np.array([1, -1, 2][1:]), "w": np.zeros((3, 4), "f4")}, "'w' is float32"),
        ({"sizes": np.array([5, 2])}, r"constant 'sizes' \(int64\) differs"),
        ({"text": MEMBER.replace("float[n,3]", "float[m,3]")}, r"the inputs x: float32\[m, 3\]"),
        ({"text": MEMBER.replace('"": 18', '"": 17')}, "the opsets"),
    ],
)
def test_other_graphs_are_refused(changes, words):
    protos = [member(0), member(0, **changes)]
    if words is None:  # a constant in a node is a constant
        members = jaxonnx.stack(protos)
        assert [*members.state] == ["factor"]
        return
    with pytest.raises(jaxonnx.InputError, match=words):
        jaxonnx.stack(protos)


def test_views_are_refused():
    model = jaxonnx.load(member(0)).with_fixed_inputs({"x": X})
    with pytest.raises(jaxonnx.InputError, match=r"models\[1\] has views \(FixedInputs\)"):
        jaxonnx.stack([member(0), model])
    with pytest.raises(jaxonnx.InputError, match="a list of models"):
        jaxonnx.stack([])
