"""The kernel for products of a few rows with a matrix in 4 bits, against NumPy and onnxruntime."""

from types import SimpleNamespace

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx._native import CompilerError, load_library
from jaxonnx.lowering import _packed
from jaxonnx.lowering._packed import multiply

CALL = "jaxonnx_few_bits_cpu"


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    try:
        load_library(_packed._SOURCE, [_packed._SOURCE.with_suffix(".inc")])
    except CompilerError as error:
        pytest.skip(str(error))
    assert _packed._is_ready()


def operands(rows, columns, block, count, seed=0):
    """x, codes, scales, zero points as floats, and the product in float64 with and without."""
    rng = np.random.default_rng(seed)
    blocks = -(-columns // block)
    codes = rng.integers(0, 16, (rows, blocks * block))
    scales = rng.normal(size=(rows, blocks)).astype(np.float32)
    zeros = rng.uniform(0, 15, (rows, blocks)).astype(np.float32)
    x = rng.normal(size=(count, columns)).astype(np.float32)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    wide = [
        (codes.reshape(rows, blocks, block) - zero.astype(float)) * scales[..., None].astype(float)
        for zero in (np.full((rows, blocks, 1), 8), zeros[..., None])
    ]
    results = [x @ w.reshape(rows, -1)[:, :columns].T for w in wide]
    return x, packed, scales, zeros, results


@pytest.mark.parametrize("variant", [0, 1, 2])
@pytest.mark.parametrize(
    ("rows", "columns", "block", "count"),
    [(1, 32, 32, 1), (70, 96, 32, 5), (33, 200, 64, 4), (257, 128, 128, 8), (5, 1000, 32, 3)],
)
def test_variants_compute_the_product_and_threads_change_no_bit(
    variant, rows, columns, block, count
):
    """Rows and columns need not be whole parts or blocks, nor zero points integers."""
    x, codes, scales, zeros, results = operands(rows, columns, block, count)
    unpack = SimpleNamespace(block=block, middle=8, read_zeros=lambda scale, zero: zero)
    for more, exact in (((), results[0]), ((zeros,), results[1])):
        try:
            made = [
                np.asarray(multiply(x, unpack, codes, scales, *more, variant=variant, threads=n))
                for n in (1, 3, 64)
            ]
        except jax.errors.JaxRuntimeError as error:
            pytest.skip(str(error))
        np.testing.assert_allclose(made[0], exact, atol=1e-5 * np.abs(exact).max())
        for other in made[1:]:
            np.testing.assert_array_equal(other, made[0])


def file_of(rows, columns, block, bits, zeros, groups=False):
    rng = np.random.default_rng(1)
    blocks = -(-columns // block)
    tensors = {
        "b": rng.integers(0, 256, (rows, blocks, block * bits // 8), np.uint8),
        "scales": rng.normal(size=rows * blocks).astype(np.float32),
    }
    if zeros:
        tensors["zeros"] = rng.integers(0, 256, rows * -(-blocks * bits // 8), np.uint8)
    names = ["x", "b", "scales", "zeros" if zeros else ""]
    if groups:
        tensors["groups"] = (np.arange(columns) // block).astype(np.int32)
        names.append("groups")
    node = helper.make_node(
        "MatMulNBits",
        names,
        ["y"],
        domain="com.microsoft",
        **{"K": columns, "N": rows, "bits": bits, "block_size": block, "accuracy_level": 1},
    )
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "m", size])
        for name, size in (("x", columns), ("y", rows))
    ]
    graph = helper.make_graph(
        [node], "g", ends[:1], ends[1:], [numpy_helper.from_array(x, n) for n, x in tensors.items()]
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("count", "bits", "block", "groups", "fast"),
    [
        (1, 4, 32, False, True),
        (8, 4, 64, False, True),
        (9, 4, 32, False, False),
        (1, 8, 32, False, False),
        (1, 4, 16, False, False),
        (1, 4, 32, True, False),
    ],
)
def test_files_use_it_where_it_fits(count, bits, block, groups, fast, zeros):
    """For a few rows, 4 bits and blocks of whole vectors; all agree with onnxruntime."""
    # onnxruntime 1.32 computes groups with packed zero points wrongly
    proto = file_of(512, 600 if not groups else 608, block, bits, zeros and not groups, groups)
    onnx.checker.check_model(proto)
    model = jaxonnx.load(proto)
    x = np.random.default_rng(2).normal(size=(count, 1, model.inputs[0].shape[2]))
    x = x.astype(np.float32)
    compiled = jax.jit(lambda x: model.apply(model.params, x))
    assert (CALL in compiled.lower(x).as_text()) == fast
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    (expected,) = session.run(None, {"x": x})
    np.testing.assert_allclose(compiled(x), expected, atol=2e-5 * np.abs(expected).max())


def test_groups_in_the_order_of_columns_change_nothing():
    """Also with packed zero points, where onnxruntime 1.32 gives other results than without."""
    x = np.random.default_rng(2).normal(size=(1, 1, 608)).astype(np.float32)
    plain, grouped = (file_of(512, 608, 32, 4, True, groups) for groups in (False, True))
    (expected,) = onnxruntime.InferenceSession(plain.SerializeToString()).run(None, {"x": x})
    y = jaxonnx.load(grouped)(x)
    np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())


def test_no_rows_give_no_rows():
    model = jaxonnx.load(file_of(512, 640, 32, 4, False))
    assert model(np.zeros((0, 1, 640), np.float32)).shape == (0, 1, 512)


def test_gradients_and_exports_do_without(monkeypatch):
    model = jaxonnx.load(file_of(512, 640, 32, 4, False))
    x = np.random.default_rng(3).normal(size=(1, 2, 640)).astype(np.float32)

    def loss(x):
        return (model.apply(model.params, x) ** 2).sum() / 2

    gradient = jax.jit(jax.grad(loss))(x)
    exported = jax.export.export(jax.jit(loss))(jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert CALL not in exported.mlir_module()
    monkeypatch.setattr(_packed, "_is_ready", lambda: False)
    plain = jax.jit(jax.grad(loss))
    assert CALL not in plain.lower(x).as_text()
    np.testing.assert_allclose(gradient, plain(x), rtol=1e-3, atol=1e-3 * np.abs(gradient).max())
