"""Transposable 2:4 (and N:M) sparsity for any JAX program: masks, training, proof and storage."""

from .layers import Layer, layers
from .masks import Pattern, mask
from .metrics import metrics, state_masks
from .pack import Packed, load, pack, save, unpack, unpack_mask
from .templates import templates
from .three_phase import ThreePhaseState, fixed_mask, prune, sr_ste, three_phase
from .verify import Verification, verify

__all__ = [
    "Layer",
    "Packed",
    "Pattern",
    "ThreePhaseState",
    "Verification",
    "fixed_mask",
    "layers",
    "load",
    "mask",
    "metrics",
    "pack",
    "prune",
    "save",
    "sr_ste",
    "state_masks",
    "templates",
    "three_phase",
    "unpack",
    "unpack_mask",
    "verify",
]
