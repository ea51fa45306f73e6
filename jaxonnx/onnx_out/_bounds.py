"""Numbers held between bounds: Relu and Clip in place of choices, masks for their cotangents.

onnxruntime takes 13 ns a number for Where, and less than one for any of these.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxonnx._io.build import onnx_type
from jaxonnx.onnx_out._tensors import Tensor

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
      gates: the results of comparisons whose selection became a Relu or Clip.
      gated: (cotangent, gates) by the name of the cotangent's product with the masks of the gates.
    """

    compared: dict[str, Comparison] = field(default_factory=dict)
    held: dict[str, tuple[Tensor, Any]] = field(default_factory=dict)
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
        return Tensor(g("Clip", x if low is None else source, low, limit), out.shape, out.dtype)
    if which in bounds.gates and limit == 0:
        # the mask, as numbers, of the elements that pass this gate and those before it
        cotangent, gates = bounds.gated.get(x, (x, []))
        gates, passes = [*gates, which], None
        for gate in gates:
            comparison = bounds.compared[gate]
            bound = np.asarray(comparison.bound, out.dtype)
            mask = g(OPPOSITE[comparison.operator], comparison.source, bound)
            passes = mask if passes is None else g("And", passes, mask)
        y = g("Mul", cotangent, g("Cast", passes, to=onnx_type(out.dtype)))
        bounds.gated[y] = cotangent, gates
        return Tensor(y, out.shape, out.dtype)
    return None
