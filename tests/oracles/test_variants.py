"""Variants of a decoder as transformers.js has them, made by onnxruntime's quantizers."""

import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

import jaxonnx
from tests.support.paths import DATA

SOURCE = DATA / "llm" / "qwen3-optimum" / "model.onnx"
TOLD = json.loads((DATA / "llm" / "qwen3.json").read_text())
IDS = np.array(TOLD["tokens"][:1])


def _four_bits():
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(SOURCE), block_size=32, is_symmetric=True)
    quantizer.process()
    return quantizer.model.model


def _bnb4():
    from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer

    quantizer = MatMulBnb4Quantizer(onnx.load(SOURCE), quant_type=1, block_size=64)
    quantizer.process()
    return quantizer.model.model


def _half(model):
    kept = {"keep_io_types": True, "disable_shape_infer": True, "op_block_list": ["Range"]}
    return convert_float_to_float16(model, **kept)


def _eight_bits(kind):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model_int8.onnx")
        signed = kind == QuantType.QInt8  # sums of all 8 bits saturate on processors without VNNI
        options = {"reduce_range": signed, "extra_options": {"EnableSubgraph": True}}
        quantize_dynamic(SOURCE, path, weight_type=kind, **options)
        return onnx.load(path)


VARIANTS = {
    "fp16": lambda: _half(onnx.load(SOURCE)),
    "bnb4": _bnb4,
    "q4": _four_bits,
    "q4f16": lambda: _half(_four_bits()),
    "int8": lambda: _eight_bits(QuantType.QInt8),
    "uint8": lambda: _eight_bits(QuantType.QUInt8),
}


def compare(model, atol):
    """Compare logits with those of onnxruntime; both get empty caches."""
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    feed = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    feed["position_ids"] = np.arange(IDS.shape[1])[None]
    for value in session.get_inputs():
        if value.name not in feed:
            feed[value.name] = np.zeros((1, 1, 0, 16), np.float32)
    feed = {value.name: feed[value.name] for value in session.get_inputs()}
    (wanted,) = session.run(["logits"], feed)
    np.testing.assert_allclose(model(**feed)[0], wanted, rtol=0, atol=atol)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::UserWarning:onnxruntime", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_agrees_and_learns(name):
    if name.startswith("q4") and importlib.util.find_spec("onnx_ir") is None:
        pytest.skip("onnxruntime's quantizer to 4 bits needs onnx_ir")
    model = jaxonnx.load(VARIANTS[name]())
    atol = 3e-2 if name.endswith("16") else 1e-4
    compare(model, atol)
    data, lora = {"input_ids": IDS}, jaxonnx.LoRA(rank=4, where="all-linear")
    adam = optax.adam(3e-3)
    result = jaxonnx.train(model, data, loss="causal_lm", optimizer=adam, epochs=3, lora=lora)
    assert result.history.losses[0] == pytest.approx(TOLD["loss"], abs=1.0)
    assert result.history.losses[-1] < result.history.losses[0] - 0.02
    compare(result.model, atol)
