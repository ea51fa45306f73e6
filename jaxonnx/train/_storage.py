"""Weights of convolutions, during a run on CPU, in the order that its loops are quick on.

XLA:CPU runs an elementwise loop along the last axis. That of a 3x3 kernel (M, C, 3, 3) has three
elements, and an update of Adam takes five times as long there as on (3, 3, C, M), which is also the
order that the convolution itself reads and its gradient comes in. So the run keeps such weights,
and what the optimizer has for them, in the latter order, if the optimizer cannot tell: if its
program for one order and its program for the other are the same, element by element. What makes it
sparse goes around it and is told the axes as they are stored (`jaxonnx.train._sparsity`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import JaxprEqn

from jaxonnx._jaxpr import Program, interpret, programs
from jaxonnx.lowering._layout import KernelFirst, kernel_first
from jaxonnx.sparse import ThreePhaseState
from jaxonnx.sparse._masks import from_bits, to_bits
from jaxonnx.sparse._templates import Axes

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
    """Return whether the optimizer does the same, element by element, to weights in either order.

    Its programs for the one order and for the other must be made of the same operations on the same
    values, and no operation on large arrays (of more than two axes) may see where an element is.
    """

    def told(params):
        def run(params, gradients, value):
            state = optimizer.init(params)
            return optimizer.update(gradients, state, params, value=value, grad=gradients)

        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        return _described(jax.make_jaxpr(run)(like, like, np.float32(0)))

    try:
        return told(params) == told(stored)
    except (AssertionError, IndexError, TypeError, ValueError, _Tells):
        return False  # it has something of the shape that it was made for


class _Tells(Exception):
    """Raised by an operation that can tell the order of the axes of a large array."""


def _described(program: Program) -> tuple[list, list]:
    """Return the operations of a program and its results, whatever order its axes have.

    A value is (number of the operation, which of its results), so that equal descriptions have
    equal flows of data.
    """
    steps: list[tuple] = []

    def rule(equation, inputs):
        results = [(len(steps), i) for i in range(len(equation.outvars))]
        steps.append((equation.primitive.name, inputs, _parameters(equation)))
        return results

    arguments = [(-1, i) for i in range(len(getattr(program, "jaxpr", program).invars))]
    return steps, interpret(program, rule, arguments, constant=_constant)


def _constant(value: Any, aval: Any) -> tuple:
    if _large(aval):
        raise _Tells
    is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    return str(aval), str(value) if is_key else np.asarray(value).tobytes()


def _parameters(equation: JaxprEqn) -> Any:
    """Return what an operation does besides its name."""
    name, inner = equation.primitive.name, programs(equation.params)
    large = any(_large(v.aval) for v in (*equation.invars, *equation.outvars))
    if inner and not (large and name != "cond"):
        return [*map(_described, inner)]
    if not large:
        return str(equation.params)
    results = {_shape(v) for v in equation.outvars}
    shapes = {_shape(v) for v in equation.invars} - {()}
    pointwise = name in _POINTWISE and shapes <= results
    total = name in _TOTALS and results == {()}
    if not (pointwise or total or (name == "broadcast_in_dim" and not shapes)):
        raise _Tells
    return None


def _large(aval: Any) -> bool:
    return len(getattr(aval, "shape", ())) > 2


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape
