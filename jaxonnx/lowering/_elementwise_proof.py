"""Proof that an optimizer treats large arrays element by element, whatever the order of their axes.

If it does, its state and updates can be stored in any order of axes (`lowering._stored_array`):
numbers, checkpoints and exported files stay the same. optax has no flag for this, and a list of
names would miss the optimizers that users write, so the programs for the two orders are traced and
compared.

The proof is by induction over the operations of the program. Call a value of more than two axes
large. Claim: for inputs that are transposed, every large value is transposed likewise and every
other value is the same. It holds for inputs; an operation keeps it if it is pointwise on operands
of one shape, reduces all axes (up to the order of a sum), or spreads a scalar. Any other operation
on a large value, and any large constant, ends the proof. Values of up to two axes may go through
any operation, if both programs apply the same one to the same values with the same parameters.
A refusal costs speed only; optimizers that factor by axes, such as Adafactor, are refused rightly.
"""

from collections import defaultdict
from collections.abc import Mapping
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
"""Elementwise primitives."""
_TOTALS = {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"}
"""Full reductions: of these, the order of elements changes the rounding only."""


def is_elementwise(
    optimizer: optax.GradientTransformationExtraArgs, params: Any, stored: Any
) -> bool:
    """Check whether an optimizer's update is elementwise on arrays with more than two axes.

    Args:
      optimizer: its `init` and `update` are traced.
      params: the parameters in ONNX's order of axes.
      stored: the same parameters in the order in which they are to be stored.

    Returns:
      Whether the programs for both orders are the same and satisfy the module's induction. False
      also if tracing fails.
    """

    def description(params):
        def run(params, gradients, value):
            state = optimizer.init(params)
            return optimizer.update(gradients, state, params, value=value, grad=gradients)

        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        return _describe(jax.make_jaxpr(run)(like, like, np.float32(0)))

    try:
        return description(params) == description(stored)
    except (AssertionError, IndexError, TypeError, ValueError, _DependsOnOrder):
        # the other errors are those of optimizers that are written for certain shapes
        return False


def group_updates(
    optimizer: optax.GradientTransformationExtraArgs, params: Mapping[str, Any], most: int
) -> dict[str, tuple[str, ...]]:
    """Group the small arrays that an optimizer updates by one elementwise program.

    It updates the concatenation of a group, under the name of its first array, as it does each.

    Args:
      optimizer: its `init` and `update` are traced, on the arrays and on the groups.
      params: arrays by name, or their shapes.
      most: the elements of an array that is still small.

    Returns:
      The names of each group of several arrays, by size, by the first of them; none if tracing
      fails.
    """
    numbers: dict[Any, int] = {}

    def describe_updates(params: Mapping[str, Any]) -> dict[str, Any]:
        """Number the expressions that are computed for each array, equal ones alike.

        A value is (the array that it belongs to, number of its expression). Arrays whose values are
        reduced, reordered, or combined with those of another array get an expression of their own.
        """

        def run(params, gradients, value):
            state = optimizer.init(params)
            return optimizer.update(gradients, state, params, value=value, grad=gradients)

        def number(*parts: Any) -> int:
            return numbers.setdefault(parts, len(numbers))

        def constant(value, aval):
            scalar = not aval.shape and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
            return None, number(str(aval), np.asarray(value).tobytes() if scalar else object())

        def rule(equation, inputs):
            name, owners = equation.primitive.name, {owner for owner, _ in inputs} - {None}
            shapes = {_shape(v) for v in equation.invars} - {()}
            results = {_shape(v) for v in equation.outvars}
            if name == "broadcast_in_dim" and not shapes:
                return inputs[:1]
            pointwise = name in _POINTWISE and shapes <= results and len(owners) < 2
            if pointwise or not (owners or shapes or results - {()}):
                keys = [key for _, key in inputs]
                count = len(equation.outvars)
                owner = next(iter(owners), None)
                return [(owner, number(name, str(equation.params), i, *keys)) for i in range(count)]
            mixed.update(owners)
            return [(None, number(object())) for _ in equation.outvars]

        mixed: set[str] = set()
        names = sorted(params)  # as JAX orders them
        like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
        arguments = [(n, number(part)) for part in ("weight", "gradient") for n in names]
        program = jax.make_jaxpr(run)(like, like, np.float32(0))
        values = interpret(program, rule, [*arguments, (None, number("loss"))], constant=constant)
        updates = dict(zip(names, values, strict=False))
        return {
            n: None if n in mixed else (updates[n][1], *(key for at, key in values if at == n))
            for n in names
        }

    try:
        alike = defaultdict(list)
        alone = describe_updates(params)
        for name, x in sorted(params.items(), key=lambda item: (item[1].size, item[0])):
            if alone[name] and x.size <= most and jnp.issubdtype(x.dtype, jnp.floating):
                alike[x.dtype, alone[name]].append(name)
        groups = {names[0]: tuple(names) for names in alike.values() if len(names) > 1}
        sizes = {first: sum(params[n].size for n in names) for first, names in groups.items()}
        members = {name for names in groups.values() for name in names}
        joined = {name: x for name, x in params.items() if name not in members}
        joined |= {n: jax.ShapeDtypeStruct([size], params[n].dtype) for n, size in sizes.items()}
        together = describe_updates(joined)
    except (AttributeError, AssertionError, LookupError, TypeError, ValueError):
        return {}  # as for optimizers that are written for certain names or shapes
    return groups if all(together[name] == alone[name] for name in groups) else {}


class _DependsOnOrder(Exception):
    """Raised for an operation whose result may depend on the order of a large array's axes."""


def _describe(program: Program) -> tuple[list, list]:
    """Return the operations and results of a program in a form that can be compared.

    A value is (number of its operation, number among the results), so that programs with equal
    descriptions apply the same operations to the same values. Shapes of large arrays are left out.

    Raises:
      _DependsOnOrder: an operation may depend on the order of a large array's axes.
    """
    steps: list[tuple] = []

    def rule(equation, inputs):
        results = [(len(steps), i) for i in range(len(equation.outvars))]
        steps.append((equation.primitive.name, inputs, _parameters(equation)))
        return results

    arguments = [(-1, i) for i in range(len(getattr(program, "jaxpr", program).invars))]
    return steps, interpret(program, rule, arguments, constant=_constant)


def _constant(value: Any, aval: Any) -> tuple:
    """Return the description of a constant: its type and its bytes."""
    if _large(aval):
        raise _DependsOnOrder  # its elements may differ from place to place
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return str(aval), str(value) if is_key else np.asarray(value).tobytes()


def _parameters(equation: JaxprEqn) -> Any:
    """Return the parameters of an operation for its description; None on large arrays.

    Raises:
      _DependsOnOrder: the operation is on a large array, and not one that the induction allows.
    """
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
        raise _DependsOnOrder
    return None


def _large(aval: Any) -> bool:
    """Check whether an abstract value has more than two axes."""
    return len(getattr(aval, "shape", ())) > 2


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape
