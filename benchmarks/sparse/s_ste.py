"""S-STE: 2:4 by a continuous function of dense weights (https://arxiv.org/abs/2409.09099).

Along the input axis, in float32; without the paper's pruning of gradients in the backward pass.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxonnx import sparse


class ContinuousState(NamedTuple):
    inner: Any
    dense: list[jax.Array | None]
    """The weights that the gradients move, of those that are sparse."""
    scales: list[jax.Array | None]


def s_ste(inner, **weights):
    """Wrap `inner` by S-STE; `weights` are options of `sparse.layers`, which says what is sparse.

    The gradient for the sparse weights moves dense ones. In each group of four these lose the third
    largest magnitude, which is continuous, and are scaled by a number that is fixed at the start,
    by which the sparse weights are nearest to the dense ones.
    """

    def axes(params):
        report = sparse.layers(params, transposable=False, **weights)
        return [layer.axes and layer.axes[1] for layer in report]

    def shrink(w, axis):
        groups = jnp.moveaxis(w, axis, -1)
        size = jnp.abs(groups).reshape(-1, 4)
        left = jnp.maximum(size - jnp.sort(size, axis=1)[:, 1:2], 0).reshape(groups.shape)
        return jnp.moveaxis(jnp.sign(groups) * left, -1, axis)

    def scale(w, axis):
        small = shrink(w, axis)
        return jnp.vdot(small, w) / jnp.vdot(small, small)

    def init(params: Any) -> Any:
        found = list(zip(jax.tree.leaves(params), axes(params), strict=True))
        dense = [None if axis is None else jnp.array(w) for w, axis in found]  # may be donated
        scales = [None if axis is None else scale(w, axis) for w, axis in found]
        return ContinuousState(inner.init(params), dense, scales)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, inner_state = inner.update(updates, state.inner, params)
        moves, form = jax.tree.flatten(updates)
        dense = list(state.dense)
        for i, (w, axis) in enumerate(zip(jax.tree.leaves(params), axes(params), strict=True)):
            if axis is not None:
                dense[i] = dense[i] + moves[i]
                moves[i] = state.scales[i] * shrink(dense[i], axis) - w
        return form.unflatten(moves), ContinuousState(inner_state, dense, state.scales)

    return optax.GradientTransformation(init, update)
