"""All cases of com.microsoft, with their results in onnxruntime."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from jaxonnx.registry import lookup
from tests.ops import (
    contrib_attention_cases,
    contrib_decoder_cases,
    contrib_other_cases,
    contrib_quantized_cases,
)
from tests.ops.contrib_cases import DOMAIN, Fused, f, i8, i32, rng, s, u8, weights


def wanted(case):
    if case.expected is None:
        return onnxruntime_result(case)
    results = case.expected(*case.inputs)
    return results if isinstance(results, tuple) else (results,)


def model_of(case):
    """The case as a model of one node, and its inputs by name."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(case.inputs)]
    given = {n: x for n, x in zip(names, case.inputs, strict=True) if n}
    # onnxruntime does not take arrays of 4 bits
    packed = [n for n, x in given.items() if x.dtype == ml_dtypes.int4]
    stored = [numpy_helper.from_array(given.pop(n), n) for n in packed]
    node = helper.make_node(case.op, names, case.outputs, domain=case.domain, **case.attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for n, x in given.items()
        ],
        [
            # onnxruntime cannot infer the type of this one
            helper.make_tensor_value_info(n, 1, None) if n == "qk" else onnx.ValueInfoProto(name=n)
            for n in case.outputs
            if n
        ],
        stored,
    )
    opsets = [helper.make_opsetid("", case.opset), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), given


def onnxruntime_result(case):
    model, given = model_of(case)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    if not case.shared:
        return session.run(None, given)
    # the caches of these are one buffer with their successors
    binding = session.io_binding()
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(x.copy()) for n, x in given.items()}
    for n, value in values.items():
        binding.bind_ortvalue_input(n, value)
    for n, i in zip(case.outputs, (None, *case.shared), strict=False):
        if i is None:
            binding.bind_output(n)
        else:
            binding.bind_ortvalue_output(n, values[f"x{i}"])
    session.run_with_iobinding(binding)
    return [value.numpy().copy() for value in binding.get_outputs()]


def value_of(x):
    return getattr(x, "value", x)


def run(case, jit=False):
    function, values = traced(case)
    return (jax.jit(function) if jit else function)(*values)


def places_of(case):
    """The places of the inputs that may be traced."""
    static = lookup(case.domain, case.op, 1).static
    if case.op == "GroupQueryAttention":
        static |= {6}  # the number of keys, which may be traced only while the cache is empty
    return [i for i, x in enumerate(case.inputs) if x is not None and i not in static]


def traced(case):
    """The case as a function of the inputs that may be traced, and those."""
    found, places = lookup(case.domain, case.op, 1), places_of(case)

    def function(*values):
        inputs = list(case.inputs)
        for i, value in zip(places, values, strict=True):
            inputs[i] = value
        results = found(*inputs, **case.attributes)
        results = results if isinstance(results, tuple) else (results,)
        return [value_of(r) for r, name in zip(results, case.outputs, strict=False) if name]

    return function, [jnp.asarray(case.inputs[i]) for i in places]


IDS, SEGMENTS = i32(*[[1, 2, 0], [3, 1, 2]]), i32(*[[0, 1, 1], [0, 0, 1]])


MASK = i32(*[[1, 1, 0], [1, 0, 0]])


QKV = [f(2, 3, 8), f(2, 3, 8), f(2, 3, 8)]


CACHE = [f(2, 2, 2, 4), f(2, 2, 2, 4)]


ANGLES = rng.uniform(0, 3, (8, 8)).astype(np.float32)


ROTARY = [np.cos(ANGLES), np.sin(ANGLES)]


GROUPED = {"num_heads": 4, "kv_num_heads": 2}


PROMPT = [f(2, 3, 64), f(2, 3, 32), f(2, 3, 32), None, None, i32(2, 1), np.array(3, np.int32)]


NEXT = [
    f(2, 1, 64),
    f(2, 1, 32),
    f(2, 1, 32),
    f(2, 2, 4, 16),
    f(2, 2, 4, 16),
    i32(4, 2),
    np.array(5, np.int32),
]


KV = ["y", "k", "v"]


CASES = [
    Fused("FusedMatMul", [f(3, 2), f(4, 3)], {"transA": 1, "transB": 1, "alpha": 0.5}),
    Fused("FusedMatMul", [f(2, 3, 4), f(3, 4, 5)], {"transBatchA": 1}, id="batch_a"),
    Fused("FusedMatMul", [f(3, 2, 4), f(5, 3, 4)], {"transBatchB": 1, "transB": 1}, id="batch_b"),
    Fused("FusedGemm", [f(2, 3), f(3, 4), f(4)], {"activation": "Relu", "alpha": 0.5}),
    Fused(
        "FusedGemm",
        [f(2, 3), f(4, 3), f(4)],
        {"activation": "LeakyRelu", "activation_alpha": 0.2, "transB": 1},
        id="leaky",
    ),
    *(
        Fused("FusedGemm", [f(2, 3), f(3, 4), f(4)], {"activation": name, **settings}, id=name)
        for name, settings in {
            "ParametricSoftplus": {"activation_alpha": 0.5, "activation_beta": 2.0},
            "ScaledTanh": {"activation_alpha": 0.5, "activation_beta": 2.0},
            "Selu": {"activation_alpha": 1.5, "activation_gamma": 0.9},
            "Softplus": {},
            "Softsign": {},
            "ThresholdedRelu": {"activation_alpha": 0.3},
        }.items()
    ),
    Fused("FusedConv", [f(1, 2, 4, 4), f(3, 2, 3, 3), f(3)], {"activation": "Relu"}),
    Fused(
        "FusedConv",
        [f(1, 2, 4, 4), f(3, 2, 3, 3), f(3), f(1, 3, 4, 4)],
        {"activation": "Relu", "pads": [1, 1, 1, 1]},
        id="sum",
    ),
    Fused(
        "FusedConv",
        [f(1, 2, 4, 4), f(3, 2, 1, 1)],
        {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]},
        id="hard_sigmoid",
    ),
    Fused(
        "FusedConv",
        [f(1, 2, 4, 4), f(3, 2, 1, 1)],
        {"activation": "Clip", "activation_params": [0.0, 0.5]},
        id="clip",
    ),
    Fused("Gelu", [f(3, 4)]),
    Fused("BiasGelu", [f(3, 4), f(4)]),
    Fused("FastGelu", [f(3, 4)]),
    Fused("FastGelu", [f(3, 4), f(4)], id="bias"),
    Fused("QuickGelu", [f(3, 4)], {"alpha": 1.5}),
    Fused(
        "SkipLayerNormalization",
        [f(2, 3, 4), f(2, 3, 4), f(4), f(4), f(4)],
        {"epsilon": 1e-5},
        ["y", "", "", "total"],
    ),
    Fused("SkipLayerNormalization", [f(2, 3, 4), f(3, 4), f(4)], id="bare"),
    Fused(
        "SkipSimplifiedLayerNormalization",
        [f(2, 3, 4), f(2, 3, 4), f(4), f(4)],
        {"epsilon": 1e-5},
        ["y", "", "", "total"],
    ),
    Fused("SimplifiedLayerNormalization", [f(2, 3, 4), f(4)], {"axis": -1}, domain=""),
    *(
        Fused(
            "SimplifiedLayerNormalization",
            [f(2, 3, 4), f(*shape)],
            {"axis": axis},
            ["y", "inverse"],
            id=f"{axis}, scale {shape}",
            domain="",
        )
        for axis in (-1, 1)
        for shape in ((), (3, 4), (2, 1, 4), (2, 3, 1))
    ),
    Fused(
        "EmbedLayerNormalization",
        [IDS, SEGMENTS, f(4, 5), f(6, 5), f(2, 5), f(5), f(5), MASK],
        outputs=["y", "counts", "total"],
    ),
    Fused(
        "EmbedLayerNormalization",
        [IDS, None, f(4, 5), f(6, 5), None, f(5), f(5), None, i32(*[[3, 2, 1], [0, 1, 5]])],
        outputs=["y", "counts"],
        id="positions",
    ),
    Fused("QuantizeLinear", [f(3, 4), s(0.02), np.uint8(100)]),
    Fused("QuantizeLinear", [f(3, 2), s([0.1, 0.2]), i8(2)], {"axis": 1}, id="axis"),
    Fused("DequantizeLinear", [u8(3, 4), s(0.02), np.uint8(100)]),
    Fused("DequantizeLinear", [i8(3, 2), s([0.1, 0.2, 0.3]), i8(3)], {"axis": 0}, id="axis"),
    Fused(
        "QLinearAdd",
        [u8(2, 3), s(0.1), np.uint8(9), u8(3), s(0.2), np.uint8(70), s(0.3), np.uint8(50)],
    ),
    Fused(
        "QLinearMul",
        [i8(2, 3), s(0.1), np.int8(9), i8(3), s(0.2), np.int8(-7), s(2.0), np.int8(5)],
    ),
    Fused(
        "QLinearGlobalAveragePool",
        [u8(1, 2, 3, 3), s(0.1), np.uint8(9), s(0.05), np.uint8(7)],
    ),
    Fused(
        "QLinearGlobalAveragePool",
        [u8(1, 3, 3, 2), s(0.1), np.uint8(9), s(0.05), np.uint8(7)],
        {"channels_last": 1},
        id="channels_last",
    ),
    Fused(
        "QLinearConcat",
        [s(0.2), np.uint8(9), u8(2, 2), s(0.1), np.uint8(3), u8(2, 3), s(0.3), np.uint8(99)],
        {"axis": 1},
    ),
    Fused(
        "DynamicQuantizeMatMul",
        [f(2, 8), u8(8, 3), s(0.02), np.uint8(120), f(3)],
        atol=1e-5,
    ),
    Fused(
        "DynamicQuantizeMatMul", [f(2, 8), weights(8, 3), abs(f(3)), i8(3)], id="columns", atol=1e-4
    ),
    Fused(
        "MatMulIntegerToFloat",
        [u8(2, 8), weights(8, 3), s(0.02), s(0.03), np.uint8(120), np.int8(3), f(3)],
        atol=1e-5,
    ),
    Fused(
        "MatMulNBits",
        [f(2, 20), u8(3, 2, 8), f(6)],
        {"K": 20, "N": 3, "bits": 4, "block_size": 16},
        atol=1e-4,
    ),
    Fused(
        "MatMulNBits",
        [f(2, 40), u8(3, 3, 8), f(9), u8(6), None, f(3)],
        {"K": 40, "N": 3, "bits": 4, "block_size": 16},
        id="zero_points",
        atol=1e-4,
    ),
    Fused(
        "MatMulNBits",
        [f(2, 32), u8(3, 2, 16), f(6), u8(6)],
        {"K": 32, "N": 3, "bits": 8, "block_size": 16},
        id="8_bits",
        atol=1e-3,
    ),
    Fused("Attention", [f(2, 3, 4), f(4, 24), f(24)], {"num_heads": 2}),
    Fused(
        "Attention",
        [f(2, 3, 4), f(4, 24), f(24), MASK, None, f(1, 2, 3, 3)],
        {"num_heads": 2, "unidirectional": 1, "scale": 0.3},
        id="raw_mask",
    ),
    Fused("Attention", [f(2, 3, 4), f(4, 24), f(24), i32(2, 3)], {"num_heads": 2}, id="lengths"),
    Fused(
        "Attention",
        [f(2, 3, 4), f(4, 24), f(24), i32(3, 2, 1, 0)],
        {"num_heads": 2},
        id="ends_and_starts",
    ),
    Fused(
        "Attention",
        [f(2, 3, 4), f(4, 24), f(24), None, f(2, 2, 2, 2, 4)],
        {"num_heads": 2, "unidirectional": 1},
        ["y", "present"],
        id="past",
    ),
    Fused(
        "Attention",
        [f(2, 3, 4), f(4, 20), f(20)],
        {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 4]},
        id="sizes",
    ),
    Fused("MultiHeadAttention", [*QKV, f(24)], {"num_heads": 2}, KV),
    Fused(
        "MultiHeadAttention",
        [*QKV, None, MASK, f(1, 1, 3, 3)],
        {"num_heads": 2, "mask_filter_value": -100.0},
        id="mask",
    ),
    Fused(
        "MultiHeadAttention",
        [*QKV, None, None, None, *CACHE],
        {"num_heads": 2, "unidirectional": 1, "scale": 0.4},
        KV,
        id="past",
    ),
    Fused("MultiHeadAttention", [f(2, 3, 8), *CACHE], {"num_heads": 2}, id="cross_cache"),
    Fused("GroupQueryAttention", PROMPT, GROUPED, KV, id="prompt"),
    Fused("GroupQueryAttention", NEXT, GROUPED, KV, id="next"),
    Fused(
        "GroupQueryAttention",
        [*NEXT[:3], f(2, 2, 6, 16), f(2, 2, 6, 16), *NEXT[5:], *ROTARY],
        GROUPED | {"do_rotary": 1, "rotary_interleaved": 1, "softcap": 2.0},
        KV,
        id="shared_cache_rotary",
    ),
    Fused(
        "GroupQueryAttention",
        [*PROMPT, *ROTARY],
        GROUPED | {"do_rotary": 1, "local_window_size": 2, "scale": 0.3},
        KV,
        id="window_rotary",
    ),
    Fused(
        "GroupQueryAttention",
        [f(2, 3, 128), None, None, *PROMPT[3:], None, None, None, f(1, 4, 3, 3)],
        GROUPED,
        KV,
        id="packed_bias",
    ),
    Fused(
        "GroupQueryAttention",
        [*PROMPT, None, None, None, None, f(4)],
        GROUPED | {"smooth_softmax": 1},
        KV,
        id="sink",
    ),
    Fused("GroupQueryAttention", PROMPT, GROUPED | {"smooth_softmax": 1}, KV, id="smooth"),
    Fused("GroupQueryAttention", PROMPT, GROUPED | {"causal": 0}, KV, id="bidirectional"),
    *(
        Fused(
            "GroupQueryAttention",
            [*NEXT[:5], i32(4, 4), NEXT[6]],  # of hidden keys onnxruntime gives anything
            GROUPED | {"qk_output": form},
            [*KV, "qk"],
            id=f"qk_{form}",
        )
        for form in (1, 2)
    ),
    Fused("MultiHeadAttention", QKV, {"num_heads": 2}, [*KV, "qk"], id="qk"),
    Fused("RotaryEmbedding", [f(2, 2, 3, 16), np.array([2]), *ROTARY]),
    Fused(
        "RotaryEmbedding",
        [f(2, 3, 40), np.array([[0, 1, 4], [2, 3, 3]]), *ROTARY],
        {"num_heads": 2, "rotary_embedding_dim": 16, "interleaved": 1},
        id="partial",
    ),
    *contrib_other_cases.CASES,
    *contrib_quantized_cases.LAYERS,
    *contrib_attention_cases.CASES,
    *contrib_decoder_cases.CASES,
]


def named(case):
    return f"{case.op}-{case.id}".rstrip("-")
