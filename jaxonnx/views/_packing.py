"""Several texts in one row: what attention reads so that none sees another.

A file can express it if its mask has an entry for each pair of tokens and its positions are an
input, or by inputs of GroupQueryAttention that exporters omit (`position_ids`, `attention_bias`).
One input with a number for each token says which text the token is of; the rest follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.values import Value
from jaxonnx.views._view import CallView, Measure

_VISIBLE = "packed texts: who sees whom"
"""The value that GroupQueryAttention takes as its bias."""
_COUNTED = "packed texts: positions"
"""The value that it takes as its positions, where no input has them."""
_INPUTS = {"position_ids": 9, "attention_bias": 10}
"""The positions of these inputs among those of GroupQueryAttention."""


@dataclass(frozen=True)
class PackedRows(CallView):
    """Rows may have several texts; one input tells which tokens belong to the same one.

    Attributes:
      input: the one input that callers pass, integers of shape (batch, tokens).
      form: what its numbers mean. "texts": 1 for tokens of the first text of a row, 2 for the next,
        0 for padding. "positions": the position of a token in its text, 0 for padding.
      positions: further inputs that get the positions, shape (batch, tokens).
      masks: the dtypes of inputs of shape (batch, 1, queries, keys) that get the mask, by name.
    """

    input: str
    form: Literal["texts", "positions"]
    positions: tuple[str, ...]
    masks: Mapping[str, np.dtype]
    stays: ClassVar[bool] = False

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        nodes = self._extend_nodes(graph)
        assert nodes is not None  # or `find_packing` finds none
        derived = {*self.positions, *self.masks}
        inputs = tuple(name for name in graph.inputs if name not in derived)
        return replace(graph, inputs=inputs, nodes=nodes)

    def supply(self, inputs: Mapping[str, Any], measure: Measure) -> dict[str, Any]:
        return {**inputs, **self.values(inputs)}

    def _extend_nodes(self, graph: Graph) -> tuple[Node, ...] | None:
        """Add the inputs that texts need to nodes; None if a node has another attention bias."""
        if self.form == "positions":
            return graph.nodes
        nodes = [_extend(node, self.positions) for node in graph.nodes]
        extended = tuple(node for node in nodes if node is not None)
        return extended if len(extended) == len(nodes) else None

    def number(self, lengths: Sequence[int]) -> np.ndarray:
        """Return the numbers of `input` for a row of texts of these lengths, shape (tokens,)."""
        if self.form == "texts":
            return np.repeat(np.arange(1, len(lengths) + 1), lengths)
        return np.concatenate([np.arange(n) for n in lengths])

    def values(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Compute positions and masks from the input.

        In the form "texts" the input itself becomes the mask of tokens (0 or 1) that the file
        expects there.
        """
        numbers = jnp.asarray(inputs[self.input])
        places = jnp.arange(numbers.shape[1])
        if self.form == "texts":
            # the position of a token is its distance from the latest start of a text
            starts = jnp.pad(
                numbers[:, 1:] != numbers[:, :-1], ((0, 0), (1, 0)), constant_values=True
            )
            begins = jnp.where(starts, places, 0)
            token_positions, texts = places - jnp.maximum.accumulate(begins, axis=1), numbers
            derived = {self.input: (numbers > 0).astype(numbers.dtype)}
        else:  # a text starts at position 0; padding counts as texts of one token
            token_positions, texts = numbers, jnp.cumsum(numbers == 0, axis=1)
            derived = {self.input: numbers}
        # causal within a text: (batch, 1, queries, keys)
        visible = ((texts[:, :, None] == texts[:, None, :]) & (places[:, None] >= places))[:, None]
        derived |= {
            name: token_positions.astype(numbers.dtype) for name in (*self.positions, _COUNTED)
        }
        for name, dtype in self.masks.items():
            additive = jnp.issubdtype(dtype, jnp.floating)
            shown, hidden = (0, jnp.finfo(dtype).min) if additive else (1, 0)
            derived[name] = jnp.where(visible, shown, hidden).astype(dtype)
        return derived | {_VISIBLE: visible}


def find_packing(
    graph: Graph, masks: Sequence[Value], positions: Sequence[str]
) -> PackedRows | None:
    """Prepare a graph for rows of several texts; None if it has no inputs to keep them apart.

    The caller must compare results to know whether texts are kept apart, since other operators than
    attention may mix tokens.

    Args:
      graph: the bound graph.
      masks: the inputs that say which tokens there are, or which sees which.
      positions: the inputs that have the position of each token.
    """
    full = {v.name: np.dtype(v.dtype) for v in masks if len(v.shape or ()) == 4 and v.dtype}
    flat = [v.name for v in masks if v.name not in full]
    if flat:
        view = PackedRows(flat[0], "texts", tuple(positions), full)
        return None if len(flat) > 1 or view._extend_nodes(graph) in (None, graph.nodes) else view
    return PackedRows(positions[0], "positions", tuple(positions[1:]), full) if positions else None


def _extend(node: Node, positions: Sequence[str]) -> Node | None:
    """Add the inputs for packed texts to a GroupQueryAttention; other nodes stay as they are.

    None if it has an attention bias already.
    """
    if node.op.name != "GroupQueryAttention":
        return node
    inputs = [*node.inputs, *[""] * (_INPUTS["attention_bias"] + 1 - len(node.inputs))]
    if inputs[_INPUTS["attention_bias"]]:
        return None
    inputs[_INPUTS["attention_bias"]] = _VISIBLE
    place = _INPUTS["position_ids"]
    inputs[place] = inputs[place] or (positions[0] if positions else _COUNTED)
    return replace(node, inputs=tuple(inputs), reads=(*node.reads, _VISIBLE, inputs[place]))
