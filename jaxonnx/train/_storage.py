"""Weights of convolutions, during a run on CPU, in the order that its loops are quick on.

XLA:CPU runs an elementwise loop along the last axis. That of a 3x3 kernel (M, C, 3, 3) has three
elements, and an update of Adam takes five times as long there as on (3, 3, C, M), which is also the
order that the convolution itself reads and its gradient comes in. So the run keeps such weights,
and what the optimizer has for them, in the latter order, if the optimizer cannot tell: if its
program for one order and its program for the other are the same, element by element. What makes it
sparse goes around it and is told the axes as they are stored (`jaxonnx.train._sparsity`).
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxonnx.lowering._layout import KernelFirst, kernel_first
from jaxonnx.sparse import ThreePhaseState
from jaxonnx.sparse._masks import from_bits, to_bits
from jaxonnx.sparse._templates import Axes

_PROGRAM = (ClosedJaxpr, Jaxpr)

_POINTWISE = {
    *("abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "copy", "div", "eq"),
    *("erf", "exp", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p"),
    *("logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "round", "rsqrt"),
    *("select_n", "sign", "sqrt", "square", "stop_gradient", "sub", "tanh"),
}
_TOTALS = {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"}


class Storage:
    """How the arrays of a run are stored; `names` are the parameters that are stored otherwise."""

    def __init__(
        self, params: Mapping[str, jax.Array], optimizer: optax.GradientTransformationExtraArgs
    ):
        self.names = frozenset(n for n, x in params.items() if kernel_first(x.shape) is not None)
        self._shapes = {name: params[name].shape for name in self.names}
        if self.names and not (
            jax.default_backend() == "cpu" and indifferent(optimizer, params, self.store(params))
        ):
            self.names = frozenset()

    def store(self, tree: Any) -> Any:
        """The parameters in a tree (dictionaries by name) in the order to store."""
        return self._turned(tree, stored=False)

    def view(self, tree: Any) -> Any:
        """A stored tree in the order of the file."""
        return self._turned(tree, stored=True)

    def given(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Stored parameters for `Model.apply_train`, whose convolutions take them as they are."""
        return {n: KernelFirst(x) if n in self.names else x for n, x in params.items()}

    def axes(self, name: str, axes: Axes) -> Axes:
        """Where axes of a parameter are as it is stored."""
        if name not in self.names:
            return axes
        places = self._order(name, stored=True)
        return places[axes[0]], places[axes[1]]

    def _turned(self, tree: Any, stored: bool) -> Any:
        """A tree in the other order, of the two that its parameters can have."""

        def turn(path, x):
            if isinstance(x, ThreePhaseState):
                return self._turned_phases(x, stored)
            name = getattr(path[-1], "key", "") if path else ""
            if name not in self.names or x.shape != self._shape(name, stored):
                return x
            return x.transpose(self._order(name, stored))

        def is_leaf(x):
            return isinstance(x, ThreePhaseState) and x is not tree

        return jax.tree_util.tree_map_with_path(turn, tree, is_leaf=is_leaf) if self.names else tree

    def _turned_phases(self, state: ThreePhaseState, stored: bool) -> ThreePhaseState:
        """Masks are bits, in the order of their parameter."""
        masks = {
            name: _turned_bits(bits, self._shape(name, stored), self._order(name, stored))
            if name in self.names
            else bits
            for name, bits in state.masks.items()
        }
        return self._turned(state._replace(masks={}), stored)._replace(masks=masks)

    def _shape(self, name: str, stored: bool) -> tuple[int, ...]:
        shape = self._shapes[name]
        return tuple(shape[a] for a in self._order(name, stored=False)) if stored else shape

    def _order(self, name: str, stored: bool) -> tuple[int, ...]:
        """The axes of a parameter, stored or as in the file, in the other order."""
        order: Any = kernel_first(self._shapes[name])
        return tuple(order.index(a) for a in range(len(order))) if stored else order


@partial(jax.jit, static_argnums=(1, 2))
def _turned_bits(bits: jax.Array, shape: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    return to_bits(from_bits(bits, shape).transpose(order))


def indifferent(optimizer: optax.GradientTransformationExtraArgs, params: Any, stored: Any) -> bool:
    """Whether the optimizer does the same, element by element, to weights in either order."""

    def program(params):
        def run(params, gradients, value):
            state = optimizer.init(params)
            return optimizer.update(gradients, state, params, value=value, grad=gradients)

        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        return jax.make_jaxpr(run)(like, like, np.float32(0))

    one = program(params)
    try:
        other = program(stored)
    except (AssertionError, IndexError, TypeError, ValueError):
        return False  # it has something of the shape that it was made for
    return _same(one, other)


def _same(one: Any, other: Any) -> bool:
    """Whether two programs differ in the order of axes only, which no operation depends on."""
    programs = [getattr(p, "jaxpr", p) for p in (one, other)]
    steps, others = (p.eqns for p in programs)
    known = [c for p in (one, other) for c in getattr(p, "consts", ())]
    return not _large(known) and len(steps) == len(others) and all(map(_same_step, steps, others))


def _same_step(a: Any, b: Any) -> bool:
    literals = [[v.val for v in e.invars if isinstance(v, Literal)] for e in (a, b)]
    same = a.primitive is b.primitive and len(literals[0]) == len(literals[1])
    if not same or _large(literals[0]) or not all(map(np.array_equal, *literals)):
        return False
    name, large = a.primitive.name, _large(v.aval for v in (*a.invars, *a.outvars))
    inner, others = (_programs(e.params) for e in (a, b))
    if inner:
        return not (large and name in ("scan", "while")) and all(map(_same, inner, others))
    if not large:
        return str(a.params) == str(b.params)
    results, shapes = {v.aval.shape for v in a.outvars}, {v.aval.shape for v in a.invars} - {()}
    if name in _POINTWISE:
        return shapes <= results
    return results == {()} if name in _TOTALS else name == "broadcast_in_dim" and not shapes


def _programs(params: Mapping[str, Any]) -> list:
    """The programs among the parameters of an operation."""
    found = jax.tree.leaves([*params.values()], is_leaf=lambda v: isinstance(v, _PROGRAM))
    return [v for v in found if isinstance(v, _PROGRAM)]


def _large(values: Iterable[Any]) -> bool:
    return any(len(getattr(v, "shape", ())) > 2 for v in values)
