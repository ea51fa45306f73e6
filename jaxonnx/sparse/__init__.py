"""Transposable 2:4, N:M and other sparsity for any JAX program: masks, training, proof, storage."""

from jaxonnx.sparse._layers import (
    Goal,
    Layer,
    Patterns,
    Sparsity,
    goals,
    has,
    layers,
    plot_masks,
    record,
)
from jaxonnx.sparse._nm import Pattern
from jaxonnx.sparse._pack import (
    INDEX,
    Packed,
    from_cutlass,
    load,
    pack,
    save,
    to_cutlass,
    unpack,
    unpack_mask,
)

# for other rooms of the package
from jaxonnx.sparse._pattern import SparsityPattern, from_bits, mask, parse, register, to_bits
from jaxonnx.sparse._products import (
    pack_matrix,
    prepare_products,
    register_products,
    sparse_products,
)
from jaxonnx.sparse._s_ste import SSteState, s_ste
from jaxonnx.sparse._templates import Axes, templates
from jaxonnx.sparse._three_phase import (
    ThreePhaseState,
    fixed_mask,
    metrics,
    prune,
    sr_ste,
    state_masks,
    three_phase,
)
from jaxonnx.sparse._verify import Verification, verify

__all__ = [
    "Layer",
    "Packed",
    "Pattern",
    "SSteState",
    "Sparsity",
    "SparsityPattern",
    "ThreePhaseState",
    "Verification",
    "fixed_mask",
    "from_cutlass",
    "layers",
    "load",
    "mask",
    "metrics",
    "pack",
    "plot_masks",
    "prune",
    "record",
    "register",
    "register_products",
    "s_ste",
    "save",
    "sparse_products",
    "sr_ste",
    "state_masks",
    "templates",
    "three_phase",
    "to_cutlass",
    "unpack",
    "unpack_mask",
    "verify",
]
