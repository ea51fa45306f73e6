"""Complex numbers within a graph: pairs of real tensors, and the rules that compute with them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.onnx_out._rule_table import Refusal, Rule, rule_of


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

_RULES: dict[str, Rule] = {}
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
            _RULES[name] = call
        return function

    return register


def by_nodes(name: str) -> Callable[[Rule], Rule]:
    """Register `rule(g, operands, out, params)`, which appends nodes itself, for a primitive."""

    def register(rule: Rule) -> Rule:
        _RULES[name] = lambda *arguments: [rule(*arguments)]
        return rule

    return register


def knows(name: str) -> bool:
    """Check whether a primitive has a rule for complex numbers."""
    return name in _RULES


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
    if name in _RULES:
        return _RULES[name](g, operands, outs[0], equation.params)
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
