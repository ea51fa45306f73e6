"""Transposable 2:4, N:M and other sparsity for any JAX program: masks, training, proof, storage."""

from jaxonnx.sparse._cutlass import from_cutlass, to_cutlass
from jaxonnx.sparse._layers import (
    Goal,  # noqa: F401
    Layer,
    Patterns,  # noqa: F401
    Sparsity,
    goals,  # noqa: F401
    layers,
)

# for other rooms of the package
from jaxonnx.sparse._masks import from_bits, mask, to_bits  # noqa: F401
from jaxonnx.sparse._metrics import metrics, state_masks
from jaxonnx.sparse._nm import Pattern
from jaxonnx.sparse._pack import (  # noqa: F401
    INDEX,
    Packed,
    load,
    pack,
    save,
    unpack,
    unpack_mask,
)
from jaxonnx.sparse._pattern import (
    SparsityPattern,
    parse,  # noqa: F401
    register,
)
from jaxonnx.sparse._plot import plot_masks
from jaxonnx.sparse._products import (
    pack_matrix,  # noqa: F401
    prepare_products,  # noqa: F401
    register_products,
    sparse_products,
)
from jaxonnx.sparse._record import (
    has,  # noqa: F401
    record,
)
from jaxonnx.sparse._s_ste import SSteState, s_ste
from jaxonnx.sparse._templates import (
    Axes,  # noqa: F401
    templates,
)
from jaxonnx.sparse._three_phase import ThreePhaseState, fixed_mask, prune, sr_ste, three_phase
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
