"""Several texts in one row: what attention reads so that none sees another.

A file can express it if its mask has an entry for each pair of tokens and its positions are an
input, or by inputs of GroupQueryAttention that exporters omit (`position_ids`, `attention_bias`).
One input with a number for each token says which text the token is of; the rest follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.values import Value

_VISIBLE = "packed texts: who sees whom"
"""The value that GroupQueryAttention takes as its bias."""
_COUNTED = "packed texts: positions"
"""The value that it takes as its positions, where no input has them."""
_INPUTS = {"position_ids": 9, "attention_bias": 10}
"""The places of these inputs among those of GroupQueryAttention."""


@dataclass(frozen=True)
class Packing:
    """Which values of a graph say that a row has several texts.

    Attributes:
      input: the input with a number for each token.
      form: these are "texts", 1 for the first text of a row, 2 for the next, and 0 for padding, or
        the "positions" of tokens in their text, and 0 for padding.
      positions: the values that take positions, besides `input`.
      masks: the inputs (batch, 1, queries, keys) with their dtypes.
    """

    input: str
    form: Literal["texts", "positions"]
    positions: tuple[str, ...]
    masks: Mapping[str, np.dtype]

    def number(self, lengths: Sequence[int]) -> np.ndarray:
        """Return what `input` has for a row of texts of these lengths."""
        if self.form == "texts":
            return np.repeat(np.arange(1, len(lengths) + 1), lengths)
        return np.concatenate([np.arange(n) for n in lengths])

    def values(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that follow from the input, which itself becomes a mask of tokens."""
        given = jnp.asarray(inputs[self.input])
        places = jnp.arange(given.shape[1])
        if self.form == "texts":
            starts = jnp.pad(given[:, 1:] != given[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            begun = jnp.where(starts, places, 0)
            counted, texts = places - jnp.maximum.accumulate(begun, axis=1), given
            made = {self.input: (given > 0).astype(given.dtype)}
        else:  # padding is texts of one token
            counted, texts = given, jnp.cumsum(given == 0, axis=1)
            made = {self.input: given}
        visible = ((texts[:, :, None] == texts[:, None, :]) & (places[:, None] >= places))[:, None]
        made |= {name: counted.astype(given.dtype) for name in (*self.positions, _COUNTED)}
        for name, dtype in self.masks.items():
            added = jnp.issubdtype(dtype, jnp.floating)
            shown, hidden = (0, jnp.finfo(dtype).min) if added else (1, 0)
            made[name] = jnp.where(visible, shown, hidden).astype(dtype)
        return made | {_VISIBLE: visible}


def find_packing(
    graph: Graph, masks: Sequence[Value], positions: Sequence[str]
) -> tuple[Graph, Packing] | None:
    """Return a graph that takes rows of several texts, None if nothing in it may tell them apart.

    Whether it does is for a comparison to find: other operators may mix tokens as well.

    Args:
      masks: the inputs that say which tokens there are, or which sees which.
      positions: the inputs that have the position of each token.
    """
    full = {v.name: np.dtype(v.dtype) for v in masks if len(v.shape or ()) == 4 and v.dtype}
    flat = [v.name for v in masks if v.name not in full]
    if flat:
        nodes = tuple(_extend(node, positions) for node in graph.nodes)
        if len(flat) > 1 or None in nodes or nodes == graph.nodes:
            return None
        graph = replace(graph, nodes=tuple(node for node in nodes if node is not None))
        found = Packing(flat[0], "texts", tuple(positions), full)
    elif positions:
        found = Packing(positions[0], "positions", tuple(positions[1:]), full)
    else:
        return None
    derived = {*found.positions, *full}
    return replace(graph, inputs=tuple(n for n in graph.inputs if n not in derived)), found


def _extend(node: Node, positions: Sequence[str]) -> Node | None:
    """Return a node with inputs for packed texts, if it is attention; None if it has others."""
    if node.op.name != "GroupQueryAttention":
        return node
    given = [*node.inputs, *[""] * (_INPUTS["attention_bias"] + 1 - len(node.inputs))]
    if given[_INPUTS["attention_bias"]]:
        return None
    given[_INPUTS["attention_bias"]] = _VISIBLE
    place = _INPUTS["position_ids"]
    given[place] = given[place] or (positions[0] if positions else _COUNTED)
    return replace(node, inputs=tuple(given), reads=(*node.reads, _VISIBLE, given[place]))
