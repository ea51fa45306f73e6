"""Views of how a network is called: its inputs, the axis of its batch, its outputs, its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.values import Value, fit, list_values
from jaxonnx._require import require
from jaxonnx.errors import InputError
from jaxonnx.views._view import CallView, Evaluate, Measure


@dataclass(frozen=True)
class FixedInput:
    """An input that has the same value in all evaluations."""

    array: np.ndarray
    """The value."""
    axis: int | None
    """The batch axis of the input, if the value is of one example."""
    sources: tuple[tuple[str, int], ...] = ()
    """The inputs that are not fixed, with the batch axis of each."""

    def repeat(self, inputs: Mapping[str, Any]) -> np.ndarray:
        """Return the value for the batch of the other inputs."""
        if self.axis is None:
            return self.array
        sizes = (np.shape(inputs[name])[axis] for name, axis in self.sources if name in inputs)
        return np.repeat(np.expand_dims(self.array, self.axis), next(sizes, 1), self.axis)


@dataclass(frozen=True)
class FixedInputs(CallView):
    """Some inputs have constant values, which are known while compiling."""

    values: Mapping[str, FixedInput]

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        return replace(graph, inputs=tuple(n for n in graph.inputs if n not in self.values))

    def supply(self, inputs: Mapping[str, Any], measure: Measure) -> dict[str, Any]:
        return {**{name: x.repeat(inputs) for name, x in self.values.items()}, **inputs}

    @property
    def supplied_inputs(self) -> Collection[str]:
        return self.values.keys()


def fix_inputs(values: Iterable[Value], fixed_values: Mapping[str, Any]) -> FixedInputs:
    """Convert the values of fixed inputs to the types of the file.

    A value with one axis less than its input, which has a symbolic dimension, is the value of each
    example. The first symbolic dimension is the batch.

    Raises:
      InputError: there is no such input, or a value does not fit it.
    """
    require("fixed", fixed_values, isinstance(fixed_values, Mapping), "a dict by input name")
    declared, fixed = {value.name: value for value in values}, {}
    others = [v for v in declared.values() if v.name not in fixed_values and not v.whole]
    for name, array in fixed_values.items():
        if name not in declared:
            raise InputError(
                f"fixed={{{name!r}: ...}}: the model has no input '{name}'; it has "
                f"{list_values([*declared.values()])}"
            )
        value = declared[name]
        if isinstance(array, bool | int | float | list | tuple):
            array = fit(replace(value, shape=None), array, {})
        array = np.asarray(array)
        shape = value.shape
        axis = next((i for i, n in enumerate(shape or ()) if not isinstance(n, int)), None)
        axis = axis if len(shape or ()) == array.ndim + 1 else None
        if shape is not None and array.size == 1 and all(size == 1 for size in shape):
            array = array.reshape(len(shape) * (1,))  # a number, whatever the rank
        sources: list[tuple[str, int]] = []
        if axis is not None and shape is not None:
            batch, shapes = shape[axis], [(v.name, v.shape or ()) for v in others]
            sources = [(n, sizes.index(batch) if batch in sizes else 0) for n, sizes in shapes]
            value = replace(value, shape=(*shape[:axis], *shape[axis + 1 :]))
        fixed[name] = FixedInput(np.asarray(fit(value, array, {})), axis, tuple(sources))
    return FixedInputs(fixed)


@dataclass(frozen=True)
class WholeInputs(CallView):
    """Some inputs have no axis of examples (`Value.whole`)."""

    names: frozenset[str]

    def declare(self, value: Value) -> Value:
        return replace(value, whole=value.whole or value.name in self.names)


@dataclass(frozen=True)
class BatchAxis(CallView):
    """A network of one example is mapped over a new first axis of all inputs and outputs."""

    name: str = "batch"
    """The name of the axis, which no axis of an example has."""
    maps = True

    def wrap(self, evaluate: Evaluate) -> Evaluate:
        def evaluate_batch(
            tensors: Mapping[str, Any], key: jax.Array | None, inputs: Mapping[str, Any]
        ) -> tuple:
            count = np.shape(next(iter(inputs.values())))[0]
            keys, axis = (None, None) if key is None else (jax.random.split(key, count), 0)
            each = jax.vmap(lambda key, inputs: evaluate(tensors, key, inputs), in_axes=(axis, 0))
            outputs, renewed = each(keys, inputs)
            # each example gave running statistics of its own
            return outputs, renewed and {name: x.mean(0) for name, x in renewed.items()}

        return evaluate_batch

    def declare(self, value: Value) -> Value:
        shape = value.shape
        return value if shape is None else replace(value, shape=(self.name, *shape))


# Other outputs than the file's.


@dataclass(frozen=True)
class Outputs(CallView):
    """The outputs are these values: some of the network's own, or inner ones."""

    names: tuple[str, ...]
    stays: ClassVar[bool] = False

    @classmethod
    def among(cls, graph: Graph, names: Collection[str]) -> Outputs:
        """Keep the outputs of a graph that have one of these names."""
        return cls(tuple(dict.fromkeys(name for name in graph.outputs if name in names)))

    @classmethod
    def beside(cls, graph: Graph, values: Collection[str]) -> Outputs:
        """Add inner values behind the outputs of a graph."""
        return cls((*graph.outputs, *values))

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        types = dict(zip(graph.outputs, graph.output_types, strict=True))
        return replace(graph, outputs=self.names, output_types=tuple(map(types.get, self.names)))


@dataclass(frozen=True)
class Part(CallView):
    """Inner values are given, and only the nodes between them and the outputs are evaluated."""

    given: frozenset[str]
    outputs: tuple[str, ...]
    stays: ClassVar[bool] = False

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        needed = ancestors(graph.nodes, self.outputs, self.given)
        nodes = tuple(node for node in graph.nodes if not needed.isdisjoint(node.outputs))
        reads = {name for node in nodes for name in node.reads}
        inputs = tuple(name for name in graph.inputs if name in reads - self.given)
        graph = Outputs(self.outputs).enter(graph, constants)
        return replace(graph, inputs=(*inputs, *sorted(self.given)), nodes=nodes)


# Several texts in one row: what attention reads so that none sees another.
#
# A file can express it if its mask has an entry for each pair of tokens and its positions are an
# input, or by inputs of GroupQueryAttention that exporters omit (`position_ids`, `attention_bias`).
# One input with a number for each token says which text the token is of; the rest follows from it.

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
      form: the meaning of its numbers. "texts": 1 for tokens of the first text of a row, 2 for the
        next, 0 for padding. "positions": the position of a token in its text, 0 for padding.
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
