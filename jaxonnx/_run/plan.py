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
"""The most elements of an input (scalar or vector) that is fixed while compiling."""

NOWHERE = -1
"""The index of no node: a cut there leaves all nodes to the compiled part."""


@dataclass(frozen=True)
class Parts:
    """A graph that is split into a compiled part and a rest that is evaluated node by node."""

    compiled: Any
    """The jitted function of the first part."""
    boundary: tuple[str, ...]
    """The values that the compiled part passes to the rest."""
    rest: Graph | None
    """The rest; None if the whole graph is compiled."""


@dataclass(frozen=True)
class Plan:
    """Facts learned from past calls: where compiling must stop, and the compiled parts."""

    cuts: frozenset[int]
    """Indices of nodes that need the value of something that is traced while compiling."""
    fixed: frozenset[str] = frozenset()
    """Inputs whose values are constants of the compiled functions."""
    fixes: bool = True
    """Whether to fix an input where that helps before cutting the graph."""
    parts: Mapping[tuple, Parts] = field(default_factory=dict)
    """The compiled parts, by the key that `make_key` returns."""

    def fix_or_cut(self, error: StaticError, arrays: Mapping[str, Any]) -> Plan:
        """Return a plan under which a node that needs a known value can be evaluated.

        Small inputs that the value depends on are fixed; else the graph is cut at the node.

        Raises:
          StaticError: the error itself, if neither is possible.
        """
        small = all(np.ndim(arrays[n]) <= 1 and np.size(arrays[n]) <= FIXING for n in error.inputs)
        if error.inputs and small and self.fixes:
            return replace(self, fixed=self.fixed.union(error.inputs))
        if error.index is None or error.index in self.cuts:
            raise error
        return replace(self, cuts=self.cuts | {error.index}, parts={})


def make_key(changes: Changes, others: frozenset[str], fixed: Mapping[str, np.ndarray]) -> tuple:
    """Return the key of compiled parts.

    Args:
      changes: the changes of the graph.
      others: the names of inputs that are not arrays.
      fixed: the values of the fixed inputs.
    """
    values = ((name, v.dtype.str, v.shape, v.tobytes()) for name, v in sorted(fixed.items()))
    return (changes, others, *values)
