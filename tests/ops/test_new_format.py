"""A packed format that nobody here has seen is one operator: five numbers -1, 0, 1 in a byte."""

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx import registry
from jaxonnx.lowering import LowRank, map_changed
from jaxonnx.registry import Quantized, Storage, packed
from tests.support.paths import ROOT

DOMAIN = "test.ternary"
SIZE, BLOCK = 160, 10
PLACES = 3 ** np.arange(5, dtype=np.uint8)


@dataclass(frozen=True)
class Trits(Storage):
    @property
    def levels(self):
        return np.array([-1, 0, 1], np.float32)

    def stored_shape(self, shape):
        return *shape[:-1], -(-shape[-1] // 5)

    def unpack(self, x, shape):
        digits = x.reshape(*shape[:-1], -1, 1) // PLACES % 3
        return digits.reshape(*shape[:-1], -1)[..., : shape[-1]].astype(np.float32) - 1

    def pack(self, numbers, x):
        digits = (numbers + 1).astype(np.uint8).reshape(*numbers.shape[:-1], -1, 5)
        return (digits * PLACES).sum(-1, dtype=np.uint8).reshape(x.shape)


def trits(shape, dtype, attributes):
    size = attributes["N"], attributes["K"]
    return Trits(size, "ternary", attributes["block_size"], axis=1)


def declare():
    @registry.op(
        "MatMulTrits",
        since=1,
        domain=DOMAIN,
        like="MatMul",
        weights={"b": packed()},
        quantized={"b": Quantized("scales", storage=trits, repacked=True)},
        bias="bias",
        params=("bias",),
        accepts={"b": LowRank},
    )
    def matmul_trits(x, b, scales, bias=None, *, K, N, block_size):
        def unpack(b):
            numbers = Trits((N, K), "ternary").unpack(b, (N, K))
            return numbers * jnp.repeat(scales, block_size, axis=1)

        y = x @ map_changed(unpack, b).T
        return y if bias is None else y + bias


@pytest.fixture
def declared(monkeypatch):
    mine = defaultdict(list, {key: [*ops] for key, ops in registry._OPS.items()})
    monkeypatch.setattr(registry, "_OPS", mine)
    declare()


def make_file():
    """Two products with w0 and w1, a bias and an activation between."""
    draw, tensors = np.random.default_rng(0), {}
    nodes = [helper.make_node("Relu", ["h"], ["r"])]
    for i, (x, y) in enumerate((("x", "h"), ("r", "y"))):
        tensors[f"w{i}"] = draw.integers(0, 243, (SIZE, SIZE // 5)).astype(np.uint8)
        tensors[f"s{i}"] = draw.uniform(0.1, 0.3, (SIZE, SIZE // BLOCK)).astype(np.float32)
        tensors[f"c{i}"] = draw.normal(size=SIZE).astype(np.float32)
        names, sizes = [x, f"w{i}", f"s{i}", f"c{i}"], {"K": SIZE, "N": SIZE, "block_size": BLOCK}
        nodes.insert(2 * i, helper.make_node("MatMulTrits", names, [y], domain=DOMAIN, **sizes))
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", SIZE]) for name in ("x", "y")
    )
    stored = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def read(proto, i):
    """The matrix of a layer, number by number."""
    tensors = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    codes, scales = tensors[f"w{i}"], tensors[f"s{i}"]
    return np.array(
        [
            [
                (codes[row, k // 5] // 3 ** (k % 5) % 3 - 1.0) * scales[row, k // BLOCK]
                for k in range(SIZE)
            ]
            for row in range(SIZE)
        ]
    )


def compute(x, matrices, proto):
    c0, c1 = (numpy_helper.to_array(t) for t in proto.graph.initializer if t.name[0] == "c")
    return np.maximum(x @ matrices[0].T + c0, 0) @ matrices[1].T + c1


DATA = tuple(np.random.default_rng(1).normal(size=(2, 32, SIZE)).astype(np.float32))
SETTINGS = {
    "loss": "squared_error",
    "batch_size": 16,
    "optimizer": optax.adam(1e-2),
    "lora": jaxonnx.LoRA(4),
    "progress": False,
}


def test_it_loads_and_is_described(declared):
    proto = make_file()
    model = jaxonnx.load(proto)
    wanted = compute(DATA[0], [read(proto, 0), read(proto, 1)], proto)
    np.testing.assert_allclose(model(DATA[0]), wanted, rtol=1e-4, atol=1e-4)
    assert {*model.params} == {"c0", "c1"}
    text = " ".join(str(model).split())
    assert "2 weights in few bits (w0: ternary in blocks of 10, ...)" in text
    assert "learned?" not in text
    assert model.summary().matrices == {"w0": (SIZE, SIZE), "w1": (SIZE, SIZE)}
    assert model.to_onnx() == proto


def test_adapters_are_trained_and_merged(declared, tmp_path):
    proto = make_file()
    result = jaxonnx.train(jaxonnx.load(proto), DATA, epochs=5, **SETTINGS)
    losses, path = result.history.losses, str(tmp_path / "merged.onnx")
    assert losses[-1] < 0.9 * losses[0]
    assert {*result.lora.values} == {f"w{i}.lora_{end}" for i in (0, 1) for end in "AB"}
    with pytest.warns(UserWarning, match="2 weights in few bits are rounded anew"):
        result.model.save(path, adapters="merged")
    written = onnx.load(path)
    shapes = [
        {t.name: (t.data_type, *t.dims) for t in f.graph.initializer} for f in (proto, written)
    ]
    assert shapes[0] == shapes[1]
    for i in (0, 1):
        a, b = (np.asarray(result.lora.values[f"w{i}.lora_{end}"]) for end in "AB")
        before, after, wanted = read(proto, i), read(written, i), read(proto, i) + b @ a
        # the best ternary matrix is nearer than the old one
        assert 0 < np.linalg.norm(after - wanted) < np.linalg.norm(before - wanted)
    y = compute(DATA[0], [read(written, 0), read(written, 1)], written)
    np.testing.assert_allclose(jaxonnx.load(path)(DATA[0]), y, rtol=1e-4, atol=1e-4)


def test_adapters_as_nodes_and_their_norms(declared):
    model = jaxonnx.load(proto := make_file())
    for settings in ({}, {"dora": True}):
        adapted = jaxonnx.LoRA(2, where="w*", **settings).attach(model, jax.random.key(0))
        adapted = adapted.replace(params={n: x + 0.1 for n, x in adapted.params.items()})
        if not settings:
            file = adapted.to_onnx(adapters="nodes")
            assert [node.op_type for node in file.graph.node].count("MatMul") == 4
            y = jaxonnx.load(file)(DATA[0])
            np.testing.assert_allclose(y, adapted(DATA[0]), rtol=1e-4, atol=1e-4)
    norms = adapted.params["w0.lora_magnitude"] - 0.1
    np.testing.assert_allclose(norms, np.linalg.norm(read(proto, 0), axis=1), rtol=1e-5)


def test_it_is_unknown_without_its_declaration():
    with pytest.raises(jaxonnx.UnsupportedError, match="MatMulTrits"):
        jaxonnx.load(make_file())


def test_it_is_split_over_devices():
    command = [sys.executable, "-c", "from tests.ops.test_new_format import split; split()"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    subprocess.run(command, check=True, env=environment, cwd=ROOT)


def split():
    """Compare a training on four devices with one on a single device."""
    declare()
    mesh, model = jax.make_mesh((2, 2), ("data", "model")), jaxonnx.load(make_file())
    specs = model.shardings(mesh, "tensor").specs
    assert specs["w0"] == jax.P("model")
    assert specs["w1"] == jax.P(None, "model")
    laid = jaxonnx.load(make_file(), mesh=mesh, sharding={"w*": jax.P("model")})
    assert {laid.tensors[n].sharding.spec for n in ("w0", "s0")} == {jax.P("model")}
    alone = jaxonnx.train(model, DATA, **SETTINGS)
    both = jaxonnx.train(model, DATA, **SETTINGS, mesh=mesh, sharding="tensor")
    np.testing.assert_allclose(both.history.losses, alone.history.losses, rtol=1e-4)
    for name, x in both.lora.values.items():
        np.testing.assert_allclose(x, alone.lora.values[name], rtol=1e-3, atol=1e-5)
