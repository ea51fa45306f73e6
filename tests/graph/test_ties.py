"""Identity nodes over initializers: weights that are shared on purpose, and equal ones."""

import jax
import numpy as np
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx
from tests.support.paths import DATA

FILES = sorted(path.relative_to(DATA) for path in DATA.rglob("*.onnx"))
RNG = np.random.default_rng(0)
W = (RNG.standard_normal((4, 4)) / 2).astype(np.float32)


def model(nodes, **tensors):
    """The file of these nodes over x, with these tensors."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 17]>
        g (float[n,4] x) => (float[n,4] y) {{ {nodes} }}"""
    )
    for name, value in tensors.items():
        value = np.asarray(value, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


def twice(w=W):
    return model("w2 = Identity(w) h = MatMul(x, w) r = Relu(h) y = MatMul(r, w2)", w=w)


def trained(net):
    x = RNG.standard_normal((8, 4)).astype(np.float32)
    return jaxonnx.train(
        net, (x, x[:, ::-1]), loss="squared_error", optimizer=optax.sgd(0.1), batch_size=8, epochs=2
    ).model


def test_a_matrix_behind_identity_is_one_weight(tmp_path):
    net = jaxonnx.load(twice())
    assert [*net.params] == ["w"]
    assert "'w' and 'w2' are one weight" in str(net)
    assert [*net.with_trainable("w2").params] == ["w"]  # by either name
    assert [*jaxonnx.load(twice(), trainable=["w2", "w"]).params] == ["w"]
    x = RNG.standard_normal((8, 4)).astype(np.float32)
    gradient = jax.grad(lambda params: net.apply(params, x).sum())(net.params)["w"]
    apart = jaxonnx.load(twice(), tied=[])
    parts = jax.grad(lambda params: apart.apply(params, x).sum())(apart.params)
    np.testing.assert_allclose(gradient, parts["w"] + parts["w2"], rtol=1e-5)
    after = trained(net)
    after.save(tmp_path / "out.onnx")
    assert not np.array_equal(after.params["w"], W)
    assert (tmp_path / "out.onnx").stat().st_size == len(twice().SerializeToString())
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], after(x), rtol=1e-4, atol=1e-5)


def test_tied_decides_otherwise():
    apart = trained(jaxonnx.load(twice(), tied=[]))
    assert not np.array_equal(apart.params["w"], apart.params["w2"])
    again = jaxonnx.load(apart.to_onnx())  # two initializers now
    assert [*again.params] == ["w", "w2"]
    ones = jaxonnx.load(twice(np.ones((4, 4))))
    assert [*ones.params] == ["w", "w2"]
    assert "not 'w2'" in str(ones)
    assert "separately" in str(ones)
    assert [*jaxonnx.load(twice(np.ones((4, 4))), tied="w.").params] == ["w"]
    with pytest.raises(jaxonnx.InputError, match="w3"):
        jaxonnx.load(twice(), tied="w3")
    with pytest.raises(jaxonnx.InputError, match="other values than 'w'"):
        jaxonnx.load(twice(), tied="w2", weights={"w": 2 * W, "w2": 3 * W})


def test_identity_ties_what_the_file_has_once(tmp_path):
    """Trained as a file without the Identity nodes; a copy of an embedding is a second tensor."""
    shared = "h = MatMul(x, w) n = Mul(h, s) r = Relu(n) z = MatMul(r, {w}) y = Mul(z, {s})"
    identities = f"w2 = Identity(w) s2 = Identity(s) {shared.format(w='w2', s='s2')}"
    once = jaxonnx.load(model(shared.format(w="w", s="s"), w=W, s=np.ones(4)))
    net = jaxonnx.load(model(identities, w=W, s=np.ones(4)), tied="identity")
    assert [*net.params] == [*once.params] == ["w", "s"]
    x = RNG.standard_normal((8, 4)).astype(np.float32)
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.1), "epochs": 2}
    tuned, expected = (jaxonnx.train(m, (x, x), **settings).model for m in (net, once))
    for name, value in expected.params.items():
        np.testing.assert_allclose(tuned.params[name], value, rtol=1e-6)
    tuned.save(tmp_path / "out.onnx")
    assert [n.op_type for n in onnx.load(tmp_path / "out.onnx").graph.node].count("Identity") == 2
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], tuned(x), rtol=1e-4, atol=1e-5)
    weights = {"w": 2 * W, "s": np.full(4, 3, np.float32)}
    given = jaxonnx.load(
        model(identities, w=W, s=np.ones(4)),
        weights={**weights, "s2": weights["s"]},
        tied="identity",
    )
    np.testing.assert_allclose(given(x), once.replace(params=weights)(x), rtol=1e-5)
    with pytest.raises(jaxonnx.InputError, match="tied='w2': it has other values than 'w'"):
        jaxonnx.load(twice(), tied="identity", weights={"w": W, "w2": 3 * W})
    embedded = model(
        "i = Constant<value_ints = [1]> () e = Gather(w, i) h = Add(x, e) y = MatMul(h, o)",
        w=W,
        o=W.T,
    )
    assert "o" not in jaxonnx.load(embedded).params
    assert "o" in jaxonnx.load(embedded, tied="identity").params


def test_a_tie_holds_in_weights_and_checkpoints(tmp_path):
    """A file of weights has a tied one once, by the initializer's name."""
    net = jaxonnx.load(twice())
    x = RNG.standard_normal((8, 4)).astype(np.float32)
    after = jaxonnx.train(
        net, (x, x[:, ::-1]), loss="squared_error", optimizer=optax.sgd(0.1), batch_size=8,
        epochs=2, checkpoint_dir=tmp_path / "run",
    ).model  # fmt: skip
    after.save(tmp_path / "w.safetensors")
    folder = jaxonnx.load(tmp_path / "run")
    file = jaxonnx.load(twice(), weights=tmp_path / "w.safetensors")
    named = jaxonnx.load(twice(), weights={"w": np.asarray(after.params["w"])})
    for again in (folder, file, named):
        assert [*again.params] == ["w"]
        np.testing.assert_array_equal(again(x), after(x))


def test_an_identity_that_is_not_trained_is_saved_as_it_is_used(tmp_path):
    """A bias of zeros that training changes, and an addend that the exporter found equal to it."""
    zeros = "z = Identity(b) p = MatMul(x, w) h = Add(p, b) s = Sin(z) y = Sub(h, s)"
    net = jaxonnx.load(model(zeros, w=W, b=np.zeros(4)))
    assert {*net.params} == {"w", "b"}
    after = trained(net)
    after.save(tmp_path / "out.onnx")
    x = RNG.standard_normal((8, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], after(x), rtol=1e-4, atol=1e-5)
    assert np.any(after.params["b"])


def test_other_values_for_one_of_two_names_are_kept():
    net = jaxonnx.load(twice(), weights={"w": 2 * W, "w2": 3 * W})
    np.testing.assert_array_equal(net.params["w2"], 3 * W)


def test_a_chain_of_names_and_twelve_layers():
    """ALBERT's sharing, as the older exporter writes it."""
    layers, value = ["a = Identity(w)", "b = Identity(a)"], "x"
    for k in range(12):
        layers.append(f"h{k} = MatMul({value}, {'wab'[k % 3]}) g{k} = Add(h{k}, {'cd'[k % 2]})")
        value = f"g{k}"
    nodes = f"d = Identity(c) {' '.join(layers)} y = Relu({value})"
    net = jaxonnx.load(model(nodes, w=W, c=W[0]))
    assert [*net.params] == ["w", "c"]
    assert [*jaxonnx.load(model(nodes, w=W, c=0 * W[0])).params] == ["w", "c", "d"]
    assert "'w' and 'a', 'b' are one weight" in str(net)


def test_statistics_are_tensors_of_their_own():
    nodes = """b = Identity(m) s = Identity(v)
    i = Constant <value_ints = [-1, 4, 1]> () r = Reshape(x, i)
    n = BatchNormalization(r, s, b, m, v) y = Flatten(n)"""
    proto = model(nodes, m=W[0], v=1 + W[1] ** 2)
    net = jaxonnx.load(proto, tied=None)
    assert ({*net.params}, {*net.state}) == ({"b", "s"}, {"m", "v"})
    with pytest.raises(jaxonnx.InputError, match="tied='b'"):
        jaxonnx.load(proto, tied="b")
    assert len(net.to_onnx().SerializeToString()) <= len(proto.SerializeToString())


def test_an_algorithm_updates_tensors_of_their_own():
    net = jaxonnx.load(twice(np.ones((4, 4))))
    settings = {"loss": "squared_error", "optimizer": jaxonnx.optim.momentum(0.1)}
    training = jaxonnx.load(jaxonnx.add_training(net, **settings)).training
    x = RNG.standard_normal((8, 4)).astype(np.float32)
    state, _ = training.step(training.state, {"x": x, "target": x})
    assert not np.array_equal(state["w"], state["w2"])


@pytest.mark.filterwarnings("ignore:this seems to be an eval_model.onnx")
@pytest.mark.parametrize("file", FILES, ids=str)
def test_an_untouched_save_never_grows_a_file(file, tmp_path):
    net = jaxonnx.load(DATA / file)
    net.save(tmp_path / "out.onnx")
    before, after = (onnx.load(path) for path in (DATA / file, tmp_path / "out.onnx"))
    # numbers that the file has as varints are raw bytes in ours
    slack = sum(8 * len(t.int64_data) + 4 * len(t.int32_data) for t in before.graph.initializer)
    assert after.ByteSize() <= before.ByteSize() + slack + 16
    again = jaxonnx.load(tmp_path / "out.onnx")
    assert again.tensors.keys() == net.tensors.keys()
    for name, value in net.tensors.items():
        np.testing.assert_array_equal(np.asarray(again.tensors[name]), np.asarray(value))


def test_a_parameter_that_is_one_minus_another_is_told():
    """PyTorch's older exporter computes 1 - mix of RWKV's token shift into a tensor of its own."""
    mix = RNG.random(4).astype(np.float32)
    nodes = "a = Mul(x, mix) b = Mul(a, rest) h = MatMul(b, w) y = Add(h, zeros)"
    net = jaxonnx.load(
        model(
            nodes.replace("a = Mul(x, mix)", "g = MatMul(x, w) a = Mul(g, mix)"),
            mix=mix,
            rest=1 - mix,
            w=W,
            zeros=np.zeros(4),
        )
    )
    assert {*net.params} == {"mix", "rest", "w", "zeros"}
    assert "not 'rest', which is 1 - 'mix'" in " ".join(str(net).split())
    assert "which is 1 -" not in str(net.with_trainable("w"))
