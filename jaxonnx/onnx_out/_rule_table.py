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
from typing import Any

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

    None if there is none, or if the file is not one of JAX.
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
