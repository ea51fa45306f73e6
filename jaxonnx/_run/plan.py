"""Where the compiling of a program stops, and the parts that it was compiled to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx._run.changes import Changes
from jaxonnx.errors import StaticError

FIXING = 64
"""An input that fixes shapes is a scalar or a vector of at most so many elements."""

NOWHERE = -1
"""The index of no node: a cut there leaves all nodes to the compiled part."""


@dataclass(frozen=True)
class Parts:
    compiled: Any
    boundary: tuple[str, ...]
    """The values that the compiled part passes to the rest."""
    rest: Graph | None


@dataclass(frozen=True)
class Plan:
    """Facts learned from past calls: where compiling must stop, and the compiled parts."""

    cuts: frozenset[int]
    """Indices of nodes that need to know a value which compiling hides."""
    fixed: frozenset[str] = frozenset()
    """Inputs whose values are known while compiling."""
    fixes: bool = True
    """Whether inputs are fixed before the graph is cut."""
    parts: Mapping[tuple, Parts] = field(default_factory=dict)
    """By the changes of the graph and the values of the fixed inputs."""

    def fix_or_cut(self, error: StaticError, arrays: Mapping[str, Any]) -> Plan:
        """Fix the inputs that a node needs to know, or cut the graph there, or raise the error."""
        small = all(np.ndim(arrays[n]) <= 1 and np.size(arrays[n]) <= FIXING for n in error.inputs)
        if error.inputs and small and self.fixes:
            return replace(self, fixed=self.fixed.union(error.inputs))
        if error.index is None or error.index in self.cuts:
            raise error
        return replace(self, cuts=self.cuts | {error.index}, parts={})


def make_key(changes: Changes, others: frozenset[str], fixed: Mapping[str, np.ndarray]) -> tuple:
    """Return a key for compiled parts: changes, inputs that are not arrays, and fixed ones."""
    values = ((name, v.dtype.str, v.shape, v.tobytes()) for name, v in sorted(fixed.items()))
    return (changes, others, *values)
