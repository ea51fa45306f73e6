"""Sums, products and comparisons in fewer nodes: factors merged, choices as Relu and Clip.

The derivatives of normalizations multiply whole arrays by factors of channels, several times. In a
training step a product of small factors takes the place of products of the arrays; it rounds
otherwise, as compilers do.

Choices between a tensor and a number become Relu or Clip, and masks for their cotangents:
onnxruntime takes 13 ns a number for Where, and less than one for any of these.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxonnx._io.protos import onnx_type
from jaxonnx._jaxpr import programs
from jaxonnx.onnx_out._tensors import Tensor, all_known


def multiply(g: Any, x: Any, y: Any, out: Any) -> Any:
    """Multiply, and record the factors on the result: (x * a) * b is written as x * (a * b).

    Args:
      g: the graph.
      x, y: the operands, before broadcasting (`thin`).
      out: the shape and dtype of the result.
    """
    full, factor = (x, y) if _has_shape(x, out) else (y, x)
    if not _has_shape(full, out):
        return g("Mul", x, y)
    if _has_shape(factor, out):
        z = Tensor(g("Mul", x, y), out.shape, out.dtype)
        z.times = x, y
        return z
    if full.scaled is not None and (both := _merge_factors(g, full.scaled[1], factor)) is not None:
        full, factor = full.scaled[0], both
    z = Tensor(g("Mul", full, factor), out.shape, out.dtype)
    z.scaled = full, factor
    return z


def add(g: Any, x: Any, y: Any, out: Any) -> Any:
    """Add; x * a + b with a number for each channel in a and b is one BatchNormalization.

    Args:
      g: the graph.
      x, y: the operands, before broadcasting (`thin`).
      out: the shape and dtype of the result.
    """
    full, shift = (x, y) if _has_shape(x, out) else (y, x)
    if not _has_shape(full, out):
        return g("Add", x, y)
    if _has_shape(shift, out):
        z = Tensor(g("Add", x, y), out.shape, out.dtype)
        z.sum = x, y
        return z
    if _of_channels(shift, out):
        if _is_scaled(full, out):
            return _shift_channels(g, full, shift)
        # (x * a + y) + b = (x * a + b) + y
        for part, other in [full.sum, full.sum[::-1]] if full.sum else []:
            if _is_scaled(part, out):
                return g("Add", _shift_channels(g, part, shift), other)
    return g("Add", x, y)


def _of_channels(x: Any, out: Any) -> bool:
    """Check whether an operand has the shape (1, C, 1, ...) of a number for each channel."""
    if len(out.shape) < 3 or not all_known([*x.shape, *out.shape[1:]]):
        return False
    return x.shape == (1, out.shape[1], *[1] * (len(out.shape) - 2))


def _is_scaled(x: Any, out: Any) -> bool:
    """Check whether a tensor is a product with a number for each channel."""
    return x.scaled is not None and _of_channels(x.scaled[1], out)


def _shift_channels(g: Any, x: Any, shift: Any) -> Tensor:
    """Write x * scale + shift by channels as a BatchNormalization with mean 0 and variance 1.

    It reads and writes the array once, where Mul and Add do so twice.
    """
    full, scale = x.scaled
    channels = x.shape[1]
    neutral = np.zeros(channels, x.dtype), np.ones(channels, x.dtype)
    vectors = (g.reshape(v, [channels]) for v in (scale, shift))
    y = g("BatchNormalization", full, *vectors, *neutral, epsilon=0.0)
    return Tensor(y, x.shape, x.dtype)


def _has_shape(x: Any, out: Any) -> bool:
    """Check whether an operand is a tensor with the shape of the result."""
    return isinstance(x, Tensor) and x.shape == out.shape


def _merge_factors(g: Any, a: Any, b: Any) -> Any:
    """Return the product of two factors; None if it broadcasts beyond both, or might overflow."""
    arrays = [x for x in (a, b) if isinstance(x, np.ndarray)]
    # two constants stay apart: a program may have two because their product would overflow
    if len(arrays) == 2:
        return None
    if not all(((np.abs(x) > 1e-6) & (np.abs(x) < 1e6)).all() for x in arrays):
        return None
    if not all_known((*a.shape, *b.shape)):
        return None
    shape = np.broadcast_shapes(a.shape, b.shape)
    if shape not in (a.shape, b.shape):
        return None
    return Tensor(g("Mul", a, b), shape, a.dtype)


def scales_by_bits(program: Any) -> bool:
    """Check whether a program constructs floating point numbers from bits.

    `ldexp` does: it scales by several powers of two because one would overflow, so that factors
    must not be merged.
    """
    for equation in getattr(program, "jaxpr", program).eqns:
        is_bitcast = equation.primitive.name == "bitcast_convert_type"
        if is_bitcast and equation.outvars[0].aval.dtype.kind == "f":
            return True
        if any(map(scales_by_bits, programs(equation.params))):
            return True
    return False


def reduce_sum(g: Any, x: Any, axes: list[int]) -> Tensor:
    """Sum a tensor along axes, with factors and signs moved out of the sum.

    sum(x * a) = sum(x) * a where a does not vary along the axes, sum(-x) = -sum(x), and the same
    within products and sums of two tensors.
    """
    if x.sum is not None and all(_is_scaled(y, x) and _can_factor_out(y, axes) for y in x.sum):
        parts = [reduce_sum(g, part, axes) for part in x.sum]
        return Tensor(g("Add", *parts), parts[0].shape, x.dtype)
    if x.negated is not None:
        total = reduce_sum(g, x.negated, axes)
        return Tensor(g("Neg", total), total.shape, total.dtype)
    factors = []
    if _can_factor_out(x, axes):
        x, factor = x.scaled
        factors.append(factor)
    if x.times is not None:
        operands = [*x.times]
        for i, operand in enumerate(operands):
            if _can_factor_out(operand, axes):
                operands[i], factor = operand.scaled
                factors.append(factor)
        if factors:
            x = Tensor(g("Mul", *operands), x.shape, x.dtype)
    remaining = [i for i in range(x.ndim) if i not in axes]
    shape = [x.shape[i] for i in remaining]
    total = Tensor(g.reduce("ReduceSum", x, axes), shape, x.dtype)
    for factor in factors:
        sizes = [factor.shape[i] for i in remaining] if factor.ndim == x.ndim else []
        total = Tensor(g("Mul", total, g.reshape(factor, sizes)), shape, x.dtype)
    return total


def _can_factor_out(x: Tensor, axes: list[int]) -> bool:
    """Check whether a tensor has a factor that does not vary along the axes."""
    if x.scaled is None or not all_known((factor := x.scaled[1]).shape):
        return False
    is_scalar = all(n == 1 for n in factor.shape)
    return is_scalar or (factor.ndim == x.ndim and all(factor.shape[axis] == 1 for axis in axes))


OPPOSITE = {
    "Less": "GreaterOrEqual",
    "LessOrEqual": "Greater",
    "Greater": "LessOrEqual",
    "GreaterOrEqual": "Less",
}


@dataclass(frozen=True)
class Comparison:
    """A comparison `x operator bound` of a tensor with a number.

    Attributes:
      x: the tensor that is compared.
      source: a tensor, x itself or one that x was clipped from, for which the comparison has the
        same result.
      operator: a key of `OPPOSITE`.
      bound: the number.
    """

    x: Tensor
    source: Tensor
    operator: str
    bound: Any


@dataclass
class Bounds:
    """The comparisons with numbers in a graph, and the selections that became Relu or Clip.

    The operator Relu is `where(x <= 0, 0, x)` in JAX, and its gradient selects from the cotangent
    by the same comparison.

    Attributes:
      compared: comparisons by the name of their result.
      held: (x, bound) by the name of max(x, bound).
      clipped: (y, limits) of each Clip within two limits, by the comparison with the upper one; a
        limit is (x, operator, bound).
      gates: the results of comparisons whose selection became a Relu or Clip.
      gated: (cotangent, gates) by the name of the cotangent's product with the masks of the gates.
    """

    compared: dict[str, Comparison] = field(default_factory=dict)
    held: dict[str, tuple[Tensor, Any]] = field(default_factory=dict)
    clipped: dict[str, tuple[str, set[tuple[Tensor, str, float]]]] = field(default_factory=dict)
    gates: set[str] = field(default_factory=set)
    gated: dict[str, tuple[Tensor, list[str]]] = field(default_factory=dict)


def number(x: Any) -> Any:
    """Return the number that all elements of an operand are known to equal, or None.

    Args:
      x: an array, or a tensor, which may have been broadcast from an array.
    """
    value = x if isinstance(x, np.ndarray) else getattr(x, "thin", None)
    if not isinstance(value, np.ndarray) or not value.size or (value != value.flat[0]).any():
        return None
    return value.flat[0]


def note(g: Any, result: str, operator: str, x: Any, y: Any) -> None:
    """Record a comparison of a tensor with a number.

    Args:
      g: the graph.
      result: the name of the comparison's result.
      operator: the operator of ONNX.
      x, y: its operands; nothing is recorded unless y is a known number.
    """
    bound = number(y)
    if operator in OPPOSITE and bound is not None and isinstance(x, Tensor):
        source, low = g.main.bounds.held.get(x, (x, np.inf))
        # max(x, low) > bound and x > bound are the same if bound > low: compare x itself
        source = source if operator.startswith("Greater") and bound > low else x
        g.main.bounds.compared[result] = Comparison(x, source, operator, bound)


def clip_choice(g: Any, which: Any, chosen: Any, x: Any, out: Any) -> Any:
    """Write a selection by a comparison as Clip or Relu, or as a product with a mask.

    `select(x > bound, bound, x)` is Clip. In training steps (`g.main.gates`), the gradient of such
    a selection, `select(x > bound, 0, cotangent)`, is a product of the cotangent with a mask. It
    keeps a NaN that the selection would drop.

    Args:
      g: the graph.
      which: the comparison.
      chosen: the value where it holds.
      x: the value elsewhere.
      out: the shape and dtype of the result.

    Returns:
      The result; None if the selection is of neither form.
    """
    fits = isinstance(which, Tensor) and isinstance(x, Tensor) and x.shape == out.shape
    if out.dtype.name not in ("float32", "float64") or not fits:
        return None
    bounds, at, limit = g.main.bounds, g.main.bounds.compared.get(which), number(chosen)
    if at is not None and at.x == x and limit is not None and at.bound == limit:
        if g.main.gates:
            bounds.gates.add(which)
        limit = np.asarray(limit, out.dtype)
        if not at.operator.startswith("Greater"):  # a lower limit
            y = g("Clip", x, limit) if limit else g("Relu", x)
            bounds.held[y] = x, limit
            return Tensor(y, out.shape, out.dtype)
        # an upper limit; x may be max(source, low) already: one Clip has both bounds
        source, low = bounds.held.get(x, (x, None))
        low = None if low is None or low > limit else np.asarray(low, out.dtype)
        y = g("Clip", x if low is None else source, low, limit)
        if low is not None:
            limits = {(source, "Less", float(low)), (source, "Greater", float(limit))}
            bounds.clipped[which] = y, limits
        return Tensor(y, out.shape, out.dtype)
    if which in bounds.gates and limit == 0:
        # the mask, as numbers, of the elements that pass this gate and those before it
        cotangent, gates = bounds.gated.get(x, (x, []))
        gates, passes = [*gates, which], None
        comparisons = [bounds.compared[gate] for gate in gates]
        tests = {(c.source, c.operator, float(c.bound)) for c in comparisons}
        for gate in gates:
            y, limits = bounds.clipped.get(gate, ("", set()))
            if tests == limits:  # what passes both is what Clip left as it was
                passes = g("Equal", y, comparisons[0].source)
        for comparison in comparisons if passes is None else ():
            bound = np.asarray(comparison.bound, out.dtype)
            mask = g(OPPOSITE[comparison.operator], comparison.source, bound)
            passes = mask if passes is None else g("And", passes, mask)
        y = g("Mul", cotangent, g("Cast", passes, to=onnx_type(out.dtype)))
        bounds.gated[y] = cotangent, gates
        return Tensor(y, out.shape, out.dtype)
    return None
