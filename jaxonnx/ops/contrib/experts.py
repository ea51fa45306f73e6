"""Mixtures of experts of com.microsoft, with weights in floating point or quantized.

Meaning as in onnxruntime's ContribOperators.md. Every expert sees every token, one expert after the
other, and gradients compute each again: time is that of all experts, memory that of one.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxonnx._constraints import Default
from jaxonnx._limits import check_size
from jaxonnx._weights import Form, InBytes, Matrix, Quantized, Storage, matrix, unpack_bits
from jaxonnx.errors import NodeError
from jaxonnx.lowering import ChangedWeight, map_changed, product
from jaxonnx.ops.activation import swish
from jaxonnx.ops.contrib.attention import refuse
from jaxonnx.ops.contrib.fused import DOMAIN
from jaxonnx.registry import Omissible, op

ROWS = matrix(first=True)
"""Of weights (experts, outputs, inputs)."""

Activation = Literal["relu", "relu2", "gelu", "silu", "identity", "swiglu", "geglu"]

_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "relu2": lambda x: jax.nn.relu(x) ** 2,
    "gelu": jax.nn.gelu,  # by tanh, as in onnxruntime
    "silu": swish,
    "identity": lambda x: x,
}
_GATED = ("swiglu", "geglu")


class MixtureAttributes(TypedDict, total=False):
    """The attributes of mixtures, whatever the form of their weights."""

    activation_alpha: Annotated[Any, Default(1.0)]
    activation_beta: Annotated[Any, Default(0.0)]
    activation_type: Annotated[Activation, Default("relu")]
    k: Annotated[Any, Default(1)]
    normalize_routing_weights: Annotated[Any, Default(0)]
    swiglu_fusion: Annotated[Literal[0, 1, 2], Default(0)]
    swiglu_limit: Any
    swiglu_limit_after_activation: Annotated[Any, Default(0)]
    use_sparse_mixer: Annotated[Any, Default(0)]


def _mixture_weights(router_probs, router_weights, k, normalize):
    """Return the weight of each expert for each token, float32[tokens, experts].

    It is 0 for all but the `k` experts with the greatest `router_probs`.

    Args:
      router_probs: (tokens, experts), logits that choose the experts.
      router_weights: (tokens, experts), their weights; None for the softmax of `router_probs`.
      k: the number of experts of a token.
      normalize: whether the chosen weights are divided by their sum.
    """
    logits = router_probs.astype(jnp.promote_types(router_probs.dtype, np.float32))
    _, chosen = lax.top_k(logits, k)
    shares = jax.nn.softmax(logits) if router_weights is None else router_weights
    picked = jnp.take_along_axis(shares.astype(logits.dtype), chosen, axis=1)
    if normalize:
        picked = picked / picked.sum(axis=1, keepdims=True)
    return (jax.nn.one_hot(chosen, logits.shape[1]) * picked[..., None]).sum(axis=1)


def _apply_gate(g, x, kind, alpha, beta, limit, limit_after_activation):
    """Return SwiGLU or GEGLU: x multiplied by an activation of the gate g."""
    if kind == "geglu":
        return jax.nn.gelu(g) * x
    limit = jnp.inf if limit is None else limit
    if not limit_after_activation:
        g = jnp.minimum(g, limit)
    g = swish(g, alpha=alpha)
    return jnp.minimum(g, limit) * (jnp.clip(x, -limit, limit) + beta)


def _mix(
    x,
    router_probs,
    router_weights,
    experts,
    read_arrays,
    *,
    activation_alpha=1.0,
    activation_beta=0.0,
    activation_type: Activation = "relu",
    k=1,
    normalize_routing_weights=0,
    swiglu_fusion=0,
    swiglu_limit=None,
    swiglu_limit_after_activation=0,
    use_sparse_mixer=0,
):
    """Return the sum over experts of their shares times their outputs for x.

    A scan evaluates one expert after the other on all tokens, so that only one expert's weights
    are dequantized at a time.

    Args:
      x: tokens, (..., size).
      router_probs, router_weights: as in `_mixture_weights`.
      experts: a pytree of arrays with a leading axis of experts.
      read_arrays: a function of one expert's arrays that returns its weights (outputs, inputs) and
        biases, w1, b1, w2, b2, w3, b3; None for those that it does not have.
    """
    refuse(use_sparse_mixer=use_sparse_mixer)
    shares = _mixture_weights(router_probs, router_weights, k, normalize_routing_weights)
    gate = (activation_alpha, activation_beta, swiglu_limit, swiglu_limit_after_activation)
    tokens = x.reshape(-1, x.shape[-1])
    wide = jnp.promote_types(x.dtype, np.float32)

    def affine(x, w, b):
        y = product(x, w.T).astype(wide)
        return y if b is None else y + b

    @jax.checkpoint
    def add(total, expert):
        share, arrays = expert
        w1, b1, w2, b2, w3, b3 = read_arrays(arrays)
        y = affine(tokens, w1, b1)
        if activation_type not in _GATED:
            y = _ACTIVATIONS[activation_type](y)
        elif swiglu_fusion == 0:
            if w3 is None:
                raise NodeError("swiglu_fusion 0 needs fc3_experts_weights")
            y = _apply_gate(y, affine(tokens, w3, b3), activation_type, *gate)
        else:
            halves = (y[:, 0::2], y[:, 1::2]) if swiglu_fusion == 1 else jnp.split(y, 2, axis=1)
            y = _apply_gate(halves[0], halves[1], activation_type, *gate)
        return total + share[:, None] * affine(y.astype(x.dtype), w2, b2), None

    zero = jnp.zeros(tokens.shape, wide)
    total, _ = lax.scan(add, zero, (shares.T, experts))
    return total.astype(x.dtype).reshape(x.shape)


@op(
    "MoE",
    since=1,
    domain=DOMAIN,
    weights={
        "fc1_experts_weights": ROWS,
        "fc2_experts_weights": ROWS,
        "fc3_experts_weights": ROWS,
    },
    params=dict.fromkeys(("fc1_experts_bias", "fc2_experts_bias", "fc3_experts_bias"), 0.0),
)
def mixture_of_experts(
    x,
    router_probs,
    fc1_experts_weights,
    fc1_experts_bias: Omissible,
    fc2_experts_weights,
    fc2_experts_bias=None,
    fc3_experts_weights=None,
    fc3_experts_bias=None,
    **attributes: Unpack[MixtureAttributes],
):
    """Sum of the `k` experts with the greatest router_probs, by their softmax over all experts.

    Weights are (experts, outputs, inputs); x is (tokens, size) or (batch, steps, size).
    """
    experts = (
        *(fc1_experts_weights, fc1_experts_bias),
        *(fc2_experts_weights, fc2_experts_bias),
        *(fc3_experts_weights, fc3_experts_bias),
    )
    return _mix(x, router_probs, None, experts, lambda arrays: arrays, **attributes)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
"""The values of the codes 0 to 15 of float4e2m1."""


def _read_integers(codes, scales, zero_points, bits, inputs, dtype):
    """Dequantize the integer weights of one expert: (codes - zero point) * scale per block.

    Args:
      codes: uint8 (outputs, bytes of the inputs).
      scales: (outputs,), or (outputs, blocks).
      zero_points: packed like the codes, or None for the middle of the range.
      bits: of a number.
      inputs: the number of inputs.
      dtype: of the result.

    Returns:
      (outputs, inputs).
    """
    storage = InBytes.of((len(codes), inputs), bits, 0, axis=1)
    numbers = storage.unpack(codes, storage.shape).astype(np.float32)
    zero: Any = np.float32(storage.middle)
    if zero_points is not None:  # packed along the last axis of scales: blocks, or else rows
        zero = storage.unpack(zero_points, scales.shape).reshape(len(codes), -1)
    scales = scales.reshape(len(codes), -1).astype(np.float32)
    block = -(-inputs // scales.shape[1])
    if zero_points is not None:
        zero = jnp.repeat(zero.astype(np.float32), block, axis=1)[:, :inputs]
    return ((numbers - zero) * jnp.repeat(scales, block, axis=1)[:, :inputs]).astype(dtype)


def _read_float4(codes, scales, global_scale, dtype):
    """Dequantize the float4 weights of one expert to (outputs, inputs).

    Args:
      codes: uint8 (inputs, outputs / 2).
      scales: (outputs, blocks of inputs).
      global_scale: a factor of all scales, or None.
      dtype: of the result.
    """
    numbers = jnp.asarray(_E2M1)[unpack_bits(codes, 4)].T
    scales = scales.astype(np.float32) * (1 if global_scale is None else global_scale)
    block = numbers.shape[1] // scales.shape[1]
    return (numbers * jnp.repeat(scales, block, axis=1)).astype(dtype)


def _declare(layer: int) -> Quantized:
    """Declare the matrices (experts, outputs, inputs) of a layer, in bytes along the inputs.

    In float4 the tensor has inputs first, and outputs in bytes.
    """

    def storage(shape, dtype, attributes):
        block = attributes.get("block_size", 0)
        if attributes.get("quant_type", "int") != "int":
            return Storage((*shape[:2], shape[2] * 2), "fp4", block, is_final=True)
        bits = attributes.get(f"fc{layer}_expert_weight_bits")
        bits = bits or attributes.get("expert_weight_bits", 4)
        return InBytes.of((*shape[:2], shape[2] * 8 // bits), bits, block, axis=2)

    return Quantized(
        f"fc{layer}_scales",
        f"fc{layer}_zero_points",
        storage=storage,
        repacked=True,
        scalable=False,
    )


def _axes_of_experts(rank, attributes, position=0):
    if rank != 3:
        return None
    ends = (1, 2) if attributes.get("quant_type", "int") == "int" else (2, 1)
    return Matrix(*ends, batch=(0,))


EXPERTS = Form(_axes_of_experts, ("quant_type",))


@op(
    "QMoE",
    since=1,
    domain=DOMAIN,
    quantized={f"fc{i}_experts_weights": _declare(i) for i in (1, 2, 3)},
    weights={f"fc{i}_experts_weights": EXPERTS for i in (1, 2, 3)},
    params=dict.fromkeys(("fc1_experts_bias", "fc2_experts_bias", "fc3_experts_bias"), 0.0),
    accepts={f"fc{i}_experts_weights": ChangedWeight for i in (1, 2, 3)},
)
def quantized_mixture_of_experts(
    x,
    router_probs,
    fc1_experts_weights,
    fc1_scales: Omissible,
    fc1_experts_bias: Omissible,
    fc2_experts_weights,
    fc2_scales=None,
    fc2_experts_bias=None,
    fc3_experts_weights=None,
    fc3_scales=None,
    fc3_experts_bias=None,
    fc1_zero_points=None,
    fc2_zero_points=None,
    fc3_zero_points=None,
    router_weights=None,
    fc1_global_scale=None,
    fc2_global_scale=None,
    fc1_act_scale=None,
    fc2_act_scale=None,
    fc1_act_block_scale=None,
    fc2_act_block_scale=None,
    *,
    accuracy_level=0,
    block_size=None,
    expert_weight_bits=4,
    fc1_expert_weight_bits=None,
    fc2_expert_weight_bits=None,
    fc3_expert_weight_bits=None,
    quant_type: Literal["int", "fp4", "nvfp4"] = "int",
    weights_prepacked=-1,
    **attributes: Unpack[MixtureAttributes],
):
    """MoE of weights in packed integers (experts, outputs, inputs), or in float4 with block scales.

    `accuracy_level` only allows coarser arithmetic, which is not used.
    """
    refuse(
        fc1_act_scale=fc1_act_scale,
        fc2_act_scale=fc2_act_scale,
        fc1_act_block_scale=fc1_act_block_scale,
        fc2_act_block_scale=fc2_act_block_scale,
    )
    if fc1_scales is None or fc2_scales is None:
        raise NodeError("quantized experts need fc1_scales and fc2_scales")
    layers = [
        (fc1_experts_weights, fc1_scales, fc1_zero_points, fc1_global_scale, fc1_experts_bias),
        (fc2_experts_weights, fc2_scales, fc2_zero_points, fc2_global_scale, fc2_experts_bias),
        (fc3_experts_weights, fc3_scales, fc3_zero_points, None, fc3_experts_bias),
    ]
    widths = (fc1_expert_weight_bits, fc2_expert_weight_bits, fc3_expert_weight_bits)
    bits = [width or expert_weight_bits for width in widths]
    inputs = [x.shape[-1], 0, x.shape[-1]]
    if quant_type == "int":
        _check_packing(fc1_experts_weights, x.shape[-1], bits[0])
        gated = attributes.get("activation_type") in _GATED and attributes.get("swiglu_fusion")
        inputs[1] = fc1_experts_weights.shape[1] // (2 if gated else 1)
        _check_packing(fc2_experts_weights, inputs[1], bits[1])

    def dequantize(i, scales, zero, global_scale, codes):
        if quant_type != "int":
            return _read_float4(codes, scales, global_scale, x.dtype)
        check_size((codes.shape[0], inputs[i]), np.float32)
        return _read_integers(codes, scales, zero, bits[i], inputs[i], x.dtype)

    def read(arrays):
        weights = []
        for i, (stored, *others, bias) in enumerate(arrays):
            unpack = partial(dequantize, i, *others)
            weights += [None if stored is None else map_changed(unpack, stored), bias]
        return weights

    # XLA has no constants of this type of scales, which a scan would make of them
    small = np.dtype(ml_dtypes.float8_e8m0fnu)
    layers = [
        tuple(
            a.astype(np.float32) if isinstance(a, np.ndarray) and a.dtype == small else a
            for a in layer
        )
        for layer in layers
    ]
    return _mix(x, router_probs, router_weights, layers, read, **attributes)


def _check_packing(codes, inputs, bits):
    """Raise unless codes are (experts, outputs, inputs) in bytes, as all providers read them."""
    if bits not in (2, 4, 8) or codes.shape[2] != -(-inputs * bits // 8):
        raise NodeError(
            f"weights of shape {codes.shape} are not {inputs} inputs of 2, 4 or 8 bits in bytes: "
            "CUDA's packing is not supported; build the file with qmoe_weights_prepacked=0 or for "
            "another execution provider"
        )
