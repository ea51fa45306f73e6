"""The layout and the dtype in which a run stores its weights.

Order: convolution weights, and the optimizer's state for them, are stored in the order of
`lowering._stored_array` if the optimizer is element-wise (`lowering.is_elementwise`). The wrapper
for sparse training lies outside of it and gets the axes as stored (`_settings.sparsity`).

Width: float16 and bfloat16 weights are kept as float32 master weights (Micikevicius et al., "Mixed
Precision Training", arXiv 1710.03740): an update below half a unit of the last digit would be lost,
and the epsilon of most optimizers is zero in float16. The model computes with the rounded weights,
and its file gets them rounded once.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxonnx.lowering import (
    KernelFirst,
    Transposition,
    is_elementwise,
    order,
    platform_of,
    transpose_tree,
)


class WeightLayout:
    """How the arrays of a run are stored.

    Args:
      params: in the order of the file.
      optimizer: of the run, without its wrapper for sparsity.
      platform: where the run takes place ("cpu", "gpu", "tpu"); by default where the arrays are.
      master: keep float32 master weights of float16 and bfloat16 parameters.

    Attributes:
      names: the parameters that are stored in another order than the file's.
      platform: where the run takes place; "" if the arrays are traced.
      narrow: the types that the model has for parameters with a master weight.
      groups: names of small parameters, by the first of each group, whose concatenation the
        optimizer has under that name (`join`).
    """

    groups: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def __init__(
        self,
        params: Mapping[str, jax.Array],
        optimizer: optax.GradientTransformationExtraArgs,
        platform: str | None = None,
        master: bool = True,
    ):
        self.platform = platform or next(map(platform_of, params.values()), "")
        orders = {name: order(x, platform) for name, x in params.items()}
        turns = {
            name: Transposition(params[name].shape, axes) for name, axes in orders.items() if axes
        }
        if turns and not is_elementwise(optimizer, params, transpose_tree(params, turns)):
            turns = {}
        self.names = frozenset(turns)
        self._turns = turns
        self._back = {name: turn.back for name, turn in turns.items()}

        self.narrow = {
            name: x.dtype for name, x in params.items() if master and is_half_precision(x.dtype)
        }

    def widen(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameters as the optimizer has them."""
        return {n: x.astype(jnp.float32) if n in self.narrow else x for n, x in params.items()}

    def round(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameters of `widen` in the types of the file; gradients pass in float32."""
        return {n: x.astype(self.narrow.get(n, x.dtype)) for n, x in params.items()}

    def store(self, tree: Any) -> Any:
        """Return a tree with its parameters (dictionaries by name) in the order to store."""
        return _transpose_leaves(tree, self._turns)

    def view(self, tree: Any) -> Any:
        """Return a stored tree in the order of the file."""
        return _transpose_leaves(tree, self._back)

    def apply_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return stored parameters for `Model.apply_train`, which takes them as they are."""
        params = self.round(params)
        return {n: KernelFirst(x) if n in self.names else x for n, x in params.items()}

    def join(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return arrays by name with each group as one vector, as the optimizer has them."""
        result = dict(tree)
        for first, names in self.groups.items():
            result[first] = jnp.concatenate([result.pop(name).reshape(-1) for name in names])
        return result

    def split(self, joined: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays of `join`, in the shapes of those of the same names in `like`."""
        result = dict(joined)
        for first, names in self.groups.items():
            ends = np.cumsum([like[name].size for name in names])
            parts = jnp.split(result.pop(first), ends[:-1])
            result |= {n: x.reshape(like[n].shape) for n, x in zip(names, parts, strict=True)}
        return {name: result[name] for name in like}

    def axes(self, name: str, axes: tuple[int, int]) -> tuple[int, int]:
        """Map axes of a parameter to its stored layout."""
        if name not in self.names:
            return axes
        places = self._back[name].axes
        return places[axes[0]], places[axes[1]]


def is_half_precision(dtype: Any) -> bool:
    """Check whether a type has 16 bits for a real number."""
    return dtype in (jnp.float16, jnp.bfloat16)


def _transpose_leaves(tree: Any, turns: Mapping[str, Transposition]) -> Any:
    def phases(state):
        # masks are bits, in the order of their parameter
        masks = {
            name: _rotate_bits(bits, turns[name]) if name in turns else bits
            for name, bits in state.masks.items()
        }
        return _transpose_leaves(state._replace(masks={}), turns)._replace(masks=masks)

    from jaxonnx.sparse import ThreePhaseState  # not before something is trained

    return transpose_tree(tree, turns, {ThreePhaseState: phases})


@partial(jax.jit, static_argnums=1)
def _rotate_bits(bits: jax.Array, turn: Transposition) -> jax.Array:
    from jaxonnx.sparse import from_bits, to_bits

    return to_bits(turn(from_bits(bits, turn.shape)))
