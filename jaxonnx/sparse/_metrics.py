"""What the optimizer state says about the sparsity."""

from typing import Any

import jax
import numpy as np

from jaxonnx._arrays import to_host
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._masks import from_bits
from jaxonnx.sparse._three_phase import ThreePhaseState


def find_state(opt_state: Any) -> ThreePhaseState:
    """Return the `ThreePhaseState` in an optimizer state; `SparsityError` unless there is one."""

    def is_state(x):
        return isinstance(x, ThreePhaseState)

    states = [x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]
    if len(states) != 1:
        raise SparsityError(f"the optimizer state has {len(states)} three-phase states, not one")
    return states[0]


def state_masks(opt_state: Any) -> dict[str, jax.Array]:
    """Return the current boolean masks by name."""
    state = find_state(opt_state)
    return {n: from_bits(bits, state.pruned[n].shape) for n, bits in state.masks.items()}


def metrics(opt_state: Any) -> dict[str, Any]:
    """Summarise the sparsity of an optimizer state in plain numbers.

    `phase` (of the next step), `sparsity` (fraction of weights hidden), `flip_rate` and `kept` (of
    sum |W|, at the last refresh) over all sparse weights, `flips` and `kept_by_layer` by name.

    >>> import jax, optax
    >>> from jaxonnx import sparse
    >>> optimizer = sparse.fixed_mask(optax.sgd(0.1))
    >>> metrics(optimizer.init({"w": jax.numpy.ones((4, 4))}))["sparsity"]
    0.5
    """
    state = find_state(opt_state)
    names = sorted(state.masks)
    sizes = np.array([state.pruned[n].size for n in names])
    ones = np.array([np.bitwise_count(to_host(state.masks[n])).sum() for n in names])
    flips, shares = np.asarray(state.flips, float), np.asarray(state.kept, float)
    return {
        "phase": int(state.phase),
        "sparsity": 1 - float(ones.sum() / sizes.sum()),
        "flip_rate": float(flips @ sizes / sizes.sum()),
        "kept": float(shares @ sizes / sizes.sum()),
        "flips": dict(zip(names, flips.tolist(), strict=True)),
        "kept_by_layer": dict(zip(names, shares.tolist(), strict=True)),
    }
