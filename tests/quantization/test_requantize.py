"""Adapters merged into matrices in few bits: the types and blocks of the file, rounded anew."""

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi._pybind_state import quantize_matmul_4bits

import jaxonnx
from jaxonnx.quantization import requantize
from tests.support.adapter_files import base_tensors, changed, two_layers
from tests.support.few_bit_files import (
    FILES,
    MS,
    K,
    experts,
    network,
    normal,
    raw,
    runtime,
    unpacked,
)

ROUNDED = pytest.mark.filterwarnings("ignore:.*rounded anew")


def matrix_of(path_or_proto, columns):
    """The matrix that onnxruntime multiplies by."""
    run = runtime(path_or_proto)
    zero = run(x=np.zeros((1, columns), np.float32))
    return run(x=np.eye(columns, dtype=np.float32)) - zero


QUICK = ("4 bits, g_idx", "4 bits, zeros", "nf4", "blocks of rows")


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.deep) for kind in FILES],
)
def test_merged_into_few_bits(kind, tmp_path):
    """Onnxruntime has the matrix with its change, up to the error that the warning says."""
    proto = FILES[kind]()
    model = jaxonnx.load(proto)
    columns = model.inputs[0].shape[1]
    adapted, path = changed(model), str(tmp_path / "merged.onnx")
    with pytest.warns(
        UserWarning, match=r"1 weight in few bits is rounded anew.* w 0\.\d+ \("
    ) as w:
        adapted.save(path, adapters="merged")
    said = float(str(w[0].message).partition(" w ")[2].split()[0])
    written = onnx.load(path)
    onnx.checker.check_model(written)
    before, after = base_tensors(proto), base_tensors(written)
    assert {n: kind for n, (kind, _) in before.items()} == {
        n: kind for n, (kind, _) in after.items()
    }
    assert [node.op_type for node in written.graph.node] == [n.op_type for n in proto.graph.node]
    wanted = matrix_of(proto, columns) + 2 * np.asarray(
        (adapted.params["w.lora_B"] @ adapted.params["w.lora_A"]).T
    )
    found = matrix_of(path, columns)
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    np.testing.assert_allclose(error, said, rtol=0.1, atol=0.01)
    x = normal(3, columns)
    np.testing.assert_allclose(
        jaxonnx.load(path)(x), runtime(path)(x=x), rtol=1e-3, atol=1e-3 * np.abs(found).max()
    )
    assert error < {"2 bits": 0.6, "8 bits": 0.01, "a scale": 0.05}.get(kind, 0.2)


@pytest.mark.parametrize("kind", FILES)
def test_codes_are_packed_as_they_were(kind):
    """In NumPy, and under jit."""
    model = jaxonnx.load(FILES[kind]())
    (node,) = (node for node in model.graph.nodes if node.op.quantized)
    ((position, _),) = node.op.quantized.items()
    x = np.asarray(model.tensors[node.inputs[position]])
    storage = node.op.storage(position, x, node.attributes)
    numbers = storage.unpack(x, storage.shape)
    packed = storage.pack(numbers, x)
    assert packed.dtype == x.dtype
    assert kind == "fp4" or (packed == x).all()  # which has two zeros
    np.testing.assert_array_equal(storage.unpack(packed, storage.shape), numbers)
    traced = jax.jit(lambda x: storage.unpack(x, storage.shape))(x)
    np.testing.assert_array_equal(traced, numbers)
    np.testing.assert_array_equal(jax.jit(storage.pack)(traced, x), packed)


@pytest.mark.parametrize("zeros", ["", "uint8"])
def test_no_more_is_lost_than_by_quantizers(zeros):
    """Onnxruntime's own quantization to 4 bits in blocks, of the changed matrix."""
    rows, columns, block = 48, 96, 32
    w = normal(rows, columns)
    codes = np.zeros((rows, columns // block, block // 2), np.uint8)
    scale = np.zeros(rows * columns // block, np.float32)
    zero = np.zeros((rows, -(-columns // block // 2)), np.uint8)

    def quantize(w):
        w = np.ascontiguousarray(w.T)
        quantize_matmul_4bits(codes, w, scale, zero, block, rows, columns, not zeros)

    quantize(w)
    theirs = {"w": codes, "s": scale} | ({"z": zero} if zeros else {})
    model = jaxonnx.load(_product(rows, columns, block, theirs))
    change = 0.3 * normal(rows, 2) @ normal(2, columns)
    arrays, losses = requantize(model.graph, model.tensors, {"w": change.astype(np.float32)})
    eye = np.eye(columns, dtype=np.float32)
    wanted = np.asarray(model(eye)).T + change
    found = np.asarray(jaxonnx.load(_product(rows, columns, block, theirs | arrays))(eye)).T
    lost = np.linalg.norm(found - wanted)
    np.testing.assert_allclose(lost / np.linalg.norm(wanted), losses["w"].matrix, rtol=1e-3)
    quantize(wanted)
    other = np.asarray(jaxonnx.load(_product(rows, columns, block, theirs))(eye)).T
    assert lost < 0.99 * np.linalg.norm(other - wanted)


def _product(rows, columns, block, tensors):
    sizes = {"K": columns, "N": rows, "bits": 4, "block_size": block, "accuracy_level": 1}
    node = helper.make_node("MatMulNBits", ["x", *tensors], ["y"], domain=MS, **sizes)
    return network([node], ("x", TensorProto.FLOAT, ["n", columns]), **tensors)


@pytest.mark.parametrize("scale", [(), (1,), (5,), (1, 5)])
@pytest.mark.parametrize("zero", [None, (), (1,), (5,)])
@pytest.mark.parametrize("kind", ["DynamicQuantizeMatMul", "MatMulInteger"])
def test_all_shapes_of_scales_and_zero_points(kind, scale, zero, tmp_path):
    """Onnxruntime, with and without its fusions, has the changed matrix up to the error said."""
    dynamic = kind != "MatMulInteger"
    points = [] if zero is None else ["z"]
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"]),
        helper.make_node("MatMulInteger", ["q", "w", "qz", *points], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["qs", "s"], ["both"]),
        helper.make_node("Mul", ["f", "both"], ["y"]),
    ]
    if dynamic:
        nodes = [helper.make_node(kind, ["x", "w", "s", *points], ["y"], domain=MS)]
    draw = np.random.default_rng(0)
    tensors = {
        "w": draw.integers(0, 256, (12, 5))
        .astype(np.uint8)
        .view(np.int8 if zero is None else "u1"),
        "s": np.asarray(draw.uniform(0.002, 0.02, scale), np.float32),
    }
    if zero is not None:
        tensors["z"] = np.asarray(draw.integers(100, 150, zero), np.uint8)
    proto = network(nodes, ("x", TensorProto.FLOAT, ["n", 12]), **tensors)
    adapted, path = changed(jaxonnx.load(proto), 2), str(tmp_path / "merged.onnx")
    with pytest.warns(UserWarning, match="rounded anew") as w:
        adapted.save(path, adapters="merged")
    said = float(str(w[0].message).partition(" w ")[2].split()[0])
    before, after = (
        {t.name: (t.data_type, [*t.dims]) for t in file.graph.initializer}
        for file in (proto, onnx.load(path))
    )
    assert before == after
    change = 2 * np.asarray(adapted.params["w.lora_B"] @ adapted.params["w.lora_A"]).T
    wanted = matrix_of(proto, 12) + change
    error = np.linalg.norm(matrix_of(path, 12) - wanted) / np.linalg.norm(wanted)
    np.testing.assert_allclose(error, said, rtol=0.1, atol=1e-3)
    assert error < 0.01


@ROUNDED
def test_what_has_no_adapter_stays_bit_for_bit(tmp_path):
    proto = two_layers()
    adapted, path = changed(jaxonnx.load(proto), 2, "*q_proj*"), str(tmp_path / "merged.onnx")
    adapted.save(path, adapters="merged")
    before, after = base_tensors(proto), base_tensors(onnx.load(path))
    assert {n for n in before if before[n] != after[n]} == {
        f"model.layers.0.attn.q_proj.MatMul.weight_{end}" for end in ("Q4", "scales")
    }
    merged = adapted.merge_adapters(requantize=True)
    assert {*merged.params} == {*jaxonnx.load(proto).params}
    still = jaxonnx.LoRA(2, where="*_proj*").attach(jaxonnx.load(proto), jax.random.key(0))
    still.save(path, adapters="merged")  # B is zero
    assert base_tensors(onnx.load(path)) == before


def test_a_matrix_that_is_dequantized_in_two_ways():
    proto = two_layers()
    first, _, last = proto.graph.node
    last.input[1] = first.input[1]  # with scales of its own
    adapted = changed(jaxonnx.load(proto), 2, "*q_proj*")
    with pytest.raises(jaxonnx.InputError, match="dequantized in several ways"):
        adapted.merge_adapters(requantize=True)
    last.input[2] = first.input[2]
    with pytest.warns(UserWarning, match="rounded anew"):
        changed(jaxonnx.load(proto), 2, "*q_proj*").merge_adapters(requantize=True)


@ROUNDED
@pytest.mark.parametrize(("kind", "axis"), [("bytes", 1), ("int4", 1), ("int4", 0), ("uint4", 0)])
def test_rows_of_a_packed_table_merged(kind, axis, tmp_path):
    """Codes in bytes or of 4 bits each, in blocks along rows or columns."""
    sizes = {"block_size": 16, "gather_axis": 0, "quantize_axis": axis}
    node = helper.make_node(
        "GatherBlockQuantized", ["w", "ids", "s", "z"], ["y"], domain=MS, **sizes
    )
    shape = (K // 16, K) if axis == 0 else (K, K // 16)
    tensors, types = {"w": raw(K, K), "s": normal(*shape), "z": raw(*shape)}, {}
    if kind == "bytes":
        tensors = {"w": raw(K, K // 2), "s": tensors["s"], "z": raw(K, K // 32)}
    else:
        low, kind = (-8, TensorProto.INT4) if kind == "int4" else (0, TensorProto.UINT4)
        tensors |= {n: (tensors[n] % 16).astype(np.int8) + low for n in "wz"}
        types = dict.fromkeys("wz", kind)
    ids = ("ids", TensorProto.INT64, ["n"])
    proto = network([node], ids, types, rank=2, **tensors)
    adapted, path = changed(jaxonnx.load(proto), 2), str(tmp_path / "merged.onnx")
    adapted.save(path, adapters="merged")
    ids, wanted = np.arange(K), np.asarray(adapted(np.arange(K)))
    error = np.linalg.norm(runtime(path)(ids=ids) - wanted) / np.linalg.norm(wanted)
    assert error < 0.15


def test_zero_points_of_rows_of_experts_move(monkeypatch):
    """A step up for every number of a row is one for its zero point."""
    # the generator is shared: some numbers, by the order of tests, lose nothing but rounding
    monkeypatch.setattr("tests.support.few_bit_files.DRAW", np.random.default_rng(0))
    proto = experts(4, 0, True)
    tensors = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    tensors["z1"] = tensors["z1"] & 0x33 | 0x44  # none of them is at an end
    (stored,) = (t for t in proto.graph.initializer if t.name == "z1")
    stored.CopyFrom(numpy_helper.from_array(tensors["z1"], "z1"))
    model = jaxonnx.load(proto)
    before = unpacked(tensors, "1", 4, True)
    change = np.broadcast_to(3 * tensors["s1"][..., None], before.shape).astype(np.float32)
    arrays, losses = requantize(model.graph, model.tensors, {"w1": change})
    wanted = before + change
    lost = np.linalg.norm(unpacked(tensors | arrays, "1", 4, True) - wanted)
    np.testing.assert_allclose(lost / np.linalg.norm(wanted), losses["w1"].matrix, rtol=1e-3)
    assert losses["w1"].matrix < 0.02


@pytest.mark.parametrize(("steps", "lost"), [(0.3, True), (3.0, False)])
def test_a_lost_adapter_is_said(steps, lost, tmp_path):
    """A change of less than half a step of int4, in onnxruntime."""
    proto = two_layers()
    model = jaxonnx.load(proto)
    attached = jaxonnx.LoRA(rank=1, where="*q_proj*").attach(model, jax.random.key(0))
    (scales,) = (np.asarray(x) for n, x in model.tensors.items() if "q_proj" in n and "scales" in n)
    b = steps * np.abs(scales).mean(axis=1, keepdims=True)
    values = {n: np.ones(v.shape) if n.endswith("A") else b for n, v in attached.params.items()}
    adapted = attached.replace(params={n: v.astype(np.float32) for n, v in values.items()})
    path = str(tmp_path / "merged.onnx")
    with pytest.warns(UserWarning, match="rounded anew") as record:
        adapted.save(path, adapters="merged")
    (message,) = (str(entry.message) for entry in record)
    assert ("most of the adapter of 1 weight is lost" in message) == lost

    def project(file):
        """The matrix of q_proj alone."""
        file.graph.output[0].name = "h"
        del file.graph.node[1:]
        return matrix_of(file, 32)

    change = np.ones((32, 1)) @ b.T
    error = np.linalg.norm(project(onnx.load(path)) - project(proto) - change)
    error /= np.linalg.norm(change)
    assert (error > 0.5) == lost
