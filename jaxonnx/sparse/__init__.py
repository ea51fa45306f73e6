"""Transposable 2:4 (and N:M) sparsity for any JAX program: masks, training, proof and storage."""

from .layers import Layer, layers
from .masks import Pattern, mask
from .templates import templates
from .three_phase import (
    ThreePhaseState,
    fixed_mask,
    metrics,
    prune,
    sr_ste,
    state_masks,
    three_phase,
)

__all__ = [
    "Layer",
    "Pattern",
    "ThreePhaseState",
    "fixed_mask",
    "layers",
    "mask",
    "metrics",
    "prune",
    "sr_ste",
    "state_masks",
    "templates",
    "three_phase",
]
