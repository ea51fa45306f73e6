"""The table of primitives: how the graph says each of them, from an opset on.

A rule is a plain function that reads like the primitive::

    @primitive("concatenate")
    def concatenate(g, *operands, dimension):
        return g("Concat", *operands, axis=dimension)

`g` appends nodes (`Nodes`), the positional parameters are the operands, the keyword-only parameters
are those of the primitive's parameters that the rule needs; `out`, if it is among them, is the
shape and dtype of the result, or a tuple of them. A primitive that ONNX has no operator for may be
composed of others, in JAX::

    @composed("erfc")
    def erfc(x):
        return 1 - lax.erf(x)
"""

import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Rule = Callable[..., Any]


class Refusal(Exception):
    """Raised by a rule for an operation that ONNX lacks; becomes an `UnsupportedError`."""


_RULES: dict[str, dict[int, Rule]] = defaultdict(dict)
"""The rules of each primitive by the opset from which they hold."""

_ELEMENTWISE: set[str] = set()
"""Primitives that are registered as elementwise."""


def primitive(*names: str, since: int = 0, elementwise: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for primitives.

    Args:
      names: of the primitives.
      since: the opset from which the rule holds, where ONNX changed with it.
      elementwise: whether each element of the result depends only on the elements of the operands
        at the same place, so that the rule may be applied to transposed operands.
    """

    def register(rule: Rule) -> Rule:
        accepted = _keywords(rule)

        def call(g, *operands, out, **params):
            # a rule's keyword-only parameters choose among those of the primitive
            named = {**params, "out": out}
            return rule(g, *operands, **{name: named[name] for name in accepted if name in named})

        for name in names:
            _RULES[name][since] = call
        if elementwise:
            _ELEMENTWISE.update(names)
        return rule

    return register


def is_elementwise(name: str) -> bool:
    """Check whether a primitive is elementwise, so that its axes can be in any order."""
    return name in _ELEMENTWISE


def composed(*names: str) -> Callable[[Rule], Rule]:
    """Register a JAX function of arrays as the rule of primitives: its own primitives are written.

    Its keyword-only parameters receive the primitive's parameters of the same names.
    """

    def register(function: Rule) -> Rule:
        accepted = _keywords(function)

        def call(g, *operands, **params):
            settings = {name: params[name] for name in accepted if name in params}
            results = g.run(lambda *arrays: function(*arrays, **settings), *operands)
            return results[0] if len(results) == 1 else results

        for name in names:
            _RULES[name][0] = call
        return function

    return register


_RESTATED: dict[str, Rule] = {}


def replaces_jax(function: Rule) -> Rule:
    """Register a function that replaces the internal function of JAX with the same name.

    For a function that JAX composes of many primitives, bit operations for instance, where ONNX
    needs only a few nodes for the same result.
    """
    _RESTATED[function.__name__] = function
    return function


def restated_as(source: str) -> Rule | None:
    """Return the replacement of a function of JAX, given as "NAME at FILE" (see `_jaxpr.source`).

    None if the function has no replacement, or if the file is not one of JAX.
    """
    name, _, path = source.partition(" at ")
    return _RESTATED.get(name) if "jax/_src/" in path.replace("\\", "/") else None


def rule_of(name: str, opset: int) -> Rule | None:
    """Return the rule of a primitive with the newest `since` that is not above the opset.

    None if there is no rule.
    """
    return max(
        ((since, rule) for since, rule in _RULES.get(name, {}).items() if since <= opset),
        key=lambda pair: pair[0],
        default=(0, None),
    )[1]


def names() -> list[str]:
    """Return the primitives that have a rule."""
    return sorted(_RULES)


def _keywords(function: Rule) -> list[str]:
    """Return the names of a function's keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


@dataclass(frozen=True)
class Pair:
    """A complex value: the tensors of its real and of its imaginary part."""

    re: Any
    im: Any

    @property
    def shape(self) -> tuple:
        return self.re.shape

    @property
    def dtype(self) -> np.dtype:
        return np.result_type(self.re.dtype, np.complex64)


jax.tree_util.register_dataclass(Pair, ["re", "im"], [])

_COMPLEX_RULES: dict[str, Rule] = {}
"""The rules for complex numbers by primitive; they take (g, operands, out, params)."""

PARTS: set[str] = set()
"""Primitives that act on the real and the imaginary part separately: their rule for real numbers is
applied to each."""


def complex_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a JAX function of pairs and arrays as the rule of primitives for complex numbers.

    Its keyword-only parameters receive the primitive's parameters of the same names.
    """

    def register(function: Rule) -> Rule:
        parameters = inspect.signature(function).parameters.values()
        accepted = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

        def call(g, operands, out, params):
            settings = {name: params[name] for name in accepted if name in params}
            tree = jax.tree.structure(tuple(operands))

            def flat(*arrays):
                parts = jax.tree.leaves(function(*jax.tree.unflatten(tree, arrays), **settings))
                # with a scalar operand a part may not have the shape of the result yet
                return [jnp.broadcast_to(part, out.shape) for part in parts]

            results = g.run(flat, *jax.tree.leaves(tuple(operands)))
            return [Pair(*results) if len(results) == 2 else results[0]]

        for name in names:
            _COMPLEX_RULES[name] = call
        return function

    return register


def complex_primitive(name: str) -> Callable[[Rule], Rule]:
    """Register `rule(g, operands, out, params)`, which appends nodes itself, for a primitive."""

    def register(rule: Rule) -> Rule:
        _COMPLEX_RULES[name] = lambda *arguments: [rule(*arguments)]
        return rule

    return register


def has_complex_rule(name: str) -> bool:
    """Check whether a primitive has a rule for complex numbers."""
    return name in _COMPLEX_RULES


def is_complex(value: Any) -> bool:
    return np.dtype(value.dtype).kind == "c"


def apply_complex(g: Any, equation: Any, operands: list, outs: tuple) -> list:
    """Return the results of an equation with complex operands or results, as `Pair`s.

    Raises:
      Refusal: the primitive has no rule for complex numbers.
    """
    name = equation.primitive.name
    operands = [
        Pair(np.ascontiguousarray(x.real), np.ascontiguousarray(x.imag))
        if isinstance(x, np.ndarray) and is_complex(x)
        else x
        for x in operands
    ]
    if name in _COMPLEX_RULES:
        return _COMPLEX_RULES[name](g, operands, outs[0], equation.params)
    rule = rule_of(name, g.opset) if name in PARTS else None
    if rule is None:
        raise Refusal("it does not support complex numbers, which are pairs in ONNX")
    parts = [np.float64 if out.dtype == np.complex128 else np.float32 for out in outs]
    real = [jax.ShapeDtypeStruct(o.shape, dtype) for o, dtype in zip(outs, parts, strict=True)]
    like = real if equation.primitive.multiple_results else real[0]
    params = {**equation.params, "avals": [v.aval for v in equation.invars], "equation": equation}
    halves = []
    for half in ("re", "im"):
        chosen = [getattr(x, half) if isinstance(x, Pair) else x for x in operands]
        results = rule(g, *chosen, out=like, **params)
        results = results if isinstance(results, (list, tuple)) else [results]
        halves.append([g.cast_result(x, out) for x, out in zip(results, real, strict=True)])
    return [Pair(*both) for both in zip(*halves, strict=True)]
