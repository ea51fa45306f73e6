"""Proof that an optimizer treats large arrays element by element, whatever the order of their axes.

If it does, its state and updates can be stored in any order of axes (`lowering._layout`): numbers,
checkpoints and exported files stay the same. optax has no flag for this, and a list of names would
miss the optimizers that users write, so the programs for the two orders are traced and compared.

The proof is by induction over the operations of the program. Call a value of more than two axes
large. Claim: for inputs that are transposed, every large value is transposed likewise and every
other value is the same. It holds for inputs; an operation keeps it if it is pointwise on operands
of one shape, reduces all axes (up to the order of a sum), or spreads a scalar. Any other operation
on a large value, and any large constant, ends the proof. Values of up to two axes may go through
any operation, if both programs apply the same one to the same values with the same parameters.
A refusal costs speed only; optimizers that factor by axes, such as Adafactor, are refused rightly.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import JaxprEqn

from jaxonnx._jaxpr import Program, interpret, programs

_POINTWISE = {
    *("abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "copy", "div", "eq"),
    *("erf", "exp", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p"),
    *("logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "round", "rsqrt"),
    *("select_n", "sign", "sqrt", "square", "stop_gradient", "sub", "tanh"),
}
"""Primitives that are element-wise."""
_TOTALS = {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"}
"""Full reductions: of these, the order of elements changes the rounding only."""


def is_elementwise(
    optimizer: optax.GradientTransformationExtraArgs, params: Any, stored: Any
) -> bool:
    """Check whether the optimizer does the same, element by element, to weights in either order.

    Its programs for the two orders must be made of the same operations on the same values, and no
    operation on large arrays (of more than two axes) may depend on where an element is.
    """

    def description(params):
        def run(params, gradients, value):
            state = optimizer.init(params)
            return optimizer.update(gradients, state, params, value=value, grad=gradients)

        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        return _describe(jax.make_jaxpr(run)(like, like, np.float32(0)))

    try:
        return description(params) == description(stored)
    except (AssertionError, IndexError, TypeError, ValueError, _Tells):
        # besides ours: what an optimizer made for certain shapes raises for others
        return False


class _Tells(Exception):
    """Raised for an operation whose result may depend on the order of a large array's axes."""


def _describe(program: Program) -> tuple[list, list]:
    """Return the operations and results of a program, without what depends on orders of axes.

    A value is (number of its operation, number among the results), so that programs of equal
    descriptions pass the same values to the same operations.
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
        raise _Tells  # its elements may differ from place to place
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return str(aval), str(value) if is_key else np.asarray(value).tobytes()


def _parameters(equation: JaxprEqn) -> Any:
    """Return the parameters of an operation that its results depend on."""
    name, inner = equation.primitive.name, programs(equation.params)
    large = any(_large(v.aval) for v in (*equation.invars, *equation.outvars))
    # branches are compared, but a loop over large arrays, which may slice them, is refused below
    if inner and not (large and name != "cond"):
        return [*map(_describe, inner)]
    if not large:
        return str(equation.params)
    # on large arrays only what cannot tell one axis from another: operations on equal shapes (and
    # scalars), totals, and scalars spread over an array
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
