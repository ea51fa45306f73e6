"""Adapters that start from what quantization lost, `LoRA(init="loftq")`."""

import jax
import numpy as np
import onnx
import onnx.parser
import pytest
from onnxruntime.quantization import quantize_dynamic

import jaxonnx
from jaxonnx.lora import _loftq
from tests.support.few_bit_files import FILES, K, N, floats, normal, runtime

KINDS = (
    *("4 bits, padded", "4 bits, g_idx", "8 bits", "nf4, blocks over rows"),
    *("a scale a row", "blocks of rows", "blocks of columns"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_approximation_of_the_error(kind):
    """The sum of squares that is left is that of the other singular values (Eckart and Young)."""
    proto, rank = FILES[kind](), 5
    columns = jaxonnx.load(proto).inputs[0].shape[1]
    one = np.eye(columns, dtype=np.float32)
    stored = runtime(proto)(x=one)
    error = np.abs(stored).mean() * normal(columns, N)
    against = jaxonnx.load(floats(w=stored + error))
    lora = jaxonnx.LoRA(rank, alpha=20.0, where="w", init="loftq", against=against)
    adapted = lora.attach(jaxonnx.load(proto), jax.random.key(0))
    left = stored + error - np.asarray(adapted(one))
    singular = np.linalg.svd(error, compute_uv=False)
    np.testing.assert_allclose((left**2).sum(), (singular[rank:] ** 2).sum(), rtol=1e-3)
    a, b = (np.asarray(adapted.params[f"w.lora_{end}"]) for end in "AB")
    np.testing.assert_allclose(np.diag(a @ a.T), np.diag(b.T @ b), rtol=1e-3)  # as in the paper


def test_names_of_quantizers(tmp_path):
    """Training starts nearer to the float model than without, in a file of onnxruntime."""
    matrices = {"onnx__MatMul_7": normal(K, N), "onnx__MatMul_9": normal(N, K)}
    onnx.save(floats(**matrices), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    model, against = (jaxonnx.load(tmp_path / f"{name}.onnx") for name in ("int8", "float"))
    x = normal(16, K)
    wanted, starts = against(x), []
    for options in ({}, {"init": "loftq", "against": against}):
        adapted = jaxonnx.LoRA(32, where="onnx.*", **options).attach(model, jax.random.key(0))
        assert len(adapted.params) == 4
        starts.append(np.linalg.norm(adapted(x) - wanted) / np.linalg.norm(wanted))
    assert starts[1] < starts[0]
    for end in ("Q4", "Bnb4", "Q4G32", "quantized"):
        assert _loftq._module(f"fc.weight_{end}") == "fc"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init": "loft"}, "'normal' or 'loftq', got 'loft'"),
        ({"init": "loftq"}, "goes with against="),
        ({"init": "loftq", "against": {"v": (K, N)}}, "has no weight 'w' in floating point"),
        ({"init": "loftq", "against": {"w": (K, N + 1)}}, r"matrix of \[41, 64\].* of \[40, 64\]"),
    ],
)
def test_models_that_do_not_fit(options, words):
    if "against" in options:
        sizes = options["against"].items()
        options |= {"against": jaxonnx.load(floats(**{n: normal(*shape) for n, shape in sizes}))}
    with pytest.raises(jaxonnx.InputError, match=words):
        jaxonnx.LoRA(2, where="w", **options).attach(
            jaxonnx.load(FILES["4 bits"]()), jax.random.key(0)
        )
