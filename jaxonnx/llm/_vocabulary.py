"""More tokens in a language model: rows of its embedding, outputs of its output layer.

1. The embedding is the table whose rows an input of tokens is looked up in.
2. The output layer is found from the outputs back, through nodes that keep the last axis: the
   nearest product with a matrix that has as many outputs as the table has rows. A bias behind it,
   or another operand with a number for each token, belongs to it. It may be the table, transposed.
3. All of these tensors get rows at their end, and what has their number follows: targets of
   Reshape, the attribute N of MatMulNBits, and declared shapes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from onnx import ModelProto, helper

from jaxonnx import quantization
from jaxonnx._data.ragged import token_inputs
from jaxonnx._display import list_some
from jaxonnx._graph.bind import Graph, Node, bind
from jaxonnx._graph.caches import find_lookups
from jaxonnx._graph.uses import Use, uses_by_tensor, weights
from jaxonnx._io import records
from jaxonnx._io.protos import all_graphs, all_nodes, declare, defined_names, unused_name
from jaxonnx._rewrite.network import Network, refuse_change, with_file
from jaxonnx._run.shapes import evaluate_shapes
from jaxonnx.errors import InputError, warn
from jaxonnx.llm._folders import GENAI, ModelFolder
from jaxonnx.llm._tokenizer import Tokenizer

M = TypeVar("M", bound=Network)

_IN_ROWS = ("GatherBlockQuantized", "MatMulNBits")
"""Operators whose tensors of few bits have the numbers of each token side by side."""
_KEEPING = ("Gather", "GatherND", "LogSoftmax", "Slice", "Softmax")
"""Operators, besides views and elementwise ones, that may keep the last axis of their data."""


@dataclass
class Vocabulary:
    """Where a graph has a number, or several, for each token."""

    graph: Graph
    tensors: Mapping[str, Any]
    rows: int = 0
    """The number of tokens that the tensors have room for."""
    axes: dict[str, int] = field(default_factory=dict)
    """The axis of tokens of each tensor."""
    matrices: list[str] = field(default_factory=list)
    """Those that are embeddings and output layers."""
    values: set[str] = field(default_factory=set)
    """The results with scores of tokens along the last axis, subgraphs included."""
    targets: list[tuple[Node, str, int]] = field(default_factory=list)
    """The nodes that reshape one of them, with the constant target and the axis of tokens."""

    def __post_init__(self) -> None:
        self._uses: dict[tuple[int, int], list[Use]] = {}
        for uses in uses_by_tensor(self.graph, self.tensors).values():
            for use in uses:
                self._uses.setdefault((use.node.index, use.position), []).append(use)

    @classmethod
    def find(cls, graph: Graph, tensors: Mapping[str, Any], inputs: Collection[str]) -> Vocabulary:
        """Find the embedding and the output layer of a model.

        Args:
          graph: its bound graph.
          tensors: the values of its named tensors.
          inputs: those of tokens.

        Raises:
          InputError: there is no embedding, or a tensor has a form in which it gets no rows.
        """
        result = cls(graph, tensors)
        lookups = [
            (node, rows)
            for node, name, rows in find_lookups(graph, {n: n for n in graph.inputs}, tensors)
            if name in inputs
        ]
        if not lookups:
            named = ", ".join(map(repr, inputs)) or "of tokens, which the model does not have"
            raise InputError(
                f"no embedding: no Gather reads rows of a table by the input {named}. Add the "
                "tokens in transformers (add_tokens, resize_token_embeddings), and export again"
            )
        result.rows = lookups[0][1]
        for node, rows in lookups:
            if rows != result.rows:
                raise InputError(
                    f"the tokens are rows of several tables, of {result.rows} rows at "
                    f"{lookups[0][0].label} and {rows} at {node.label}"
                )
            result._add_matrix(node, 0)
        for name in graph.outputs:
            result._trace_back(graph, name)
        return result

    def has_scales(self, name: str) -> bool:
        """Check whether a tensor has the scales or zero points of rows in few bits."""
        uses = (use for uses in self._uses.values() for use in uses)
        return any(name in use.parts and use.name in self.matrices for use in uses)

    def _trace_back(self, graph: Graph, value: str) -> bool:
        """Find the layer that computes a score for each token in the last axis of a value.

        Returns:
          Whether there is one.
        """
        node = graph.producers.get(value)
        if value in self.values or node is None:
            return value in self.values
        if node.op.name == "If" and not node.op.domain:
            place = node.outputs.index(value)
            branches = [self._trace_back(g, g.outputs[place]) for g in node.subgraphs]
            if any(branches) and not all(branches):
                raise InputError(f"{node.label} has scores of tokens in one of its branches only")
            return self._note(value, any(branches))
        for position in node.op.forms:
            for use in self._uses.get((node.index, position), ()):
                place = use.matrix
                if place is not None and not place.lookup and not place.batch:
                    if self._count_outputs(use) != self.rows:
                        return False
                    self._add_matrix(node, position)
                    self._add_operands(node, {position, *node.op.parts.get(position, ())})
                    return self._note(value, True)
        if not (node.op.pointwise or node.op.view or node.op.name in _KEEPING):
            return False
        computed = [name for name in node.inputs if name in graph.producers]
        computed = computed if node.op.pointwise else [n for n in computed if n == node.inputs[0]]
        # of all inputs, for their operands
        if not any([self._trace_back(graph, name) for name in computed]):  # noqa: C419
            return False
        if node.op.pointwise:
            self._add_operands(node, ())
        elif node.op.name == "Reshape":
            self._add_target(node, -1)
        return self._note(value, True)

    def _note(self, value: str, has_scores: bool) -> bool:
        self.values |= {value} if has_scores else set()
        return has_scores

    def _count_outputs(self, use: Use) -> int:
        storage = use.node.op.storage(use.position, self.tensors[use.name], use.node.attributes)
        shape = storage.shape if storage else use.view.shape
        form: Any = use.node.op.form(use.position)
        return shape[form.axes(len(shape), use.node.attributes, use.position).output]

    def _add_operands(self, node: Node, others: Collection[int]) -> None:
        """Add the operands of a node that have a number for each token, such as a bias."""
        for position in {*range(len(node.inputs))} - {*others}:
            for use in self._uses.get((node.index, position), ()):
                shape = self.tensors[use.name].shape
                if shape and shape[-1] == self.rows and use.is_direct:
                    self._add(use.name, len(shape) - 1, node)

    def _add_matrix(self, node: Node, position: int) -> None:
        """Add the embedding or output layer at an input of a node.

        Raises:
          InputError: it has a form in which it gets no rows.
        """
        uses = self._uses.get((node.index, position), ())
        use = next((use for use in uses if use.matrix is not None), None)
        tensor = None if use is None else self.tensors[use.name]
        if use is None or tensor is None or use.view.part:
            raise InputError(
                f"{node.label} reads the rows of tokens from a tensor that is computed or taken "
                f"apart: {_REMEDY}"
            )
        place: Any = use.matrix
        if use.name not in self.matrices:
            self.matrices.append(use.name)
        if jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.dtype.itemsize > 1:
            self._add(use.name, place.input if place.lookup else place.output, node)
        elif node.op.name in _IN_ROWS:
            for name in filter(None, (use.name, *use.parts[:2])):
                self._add(name, 0, node)
        else:
            raise InputError(f"the rows of tokens are in {tensor.dtype} at {node.label}: {_REMEDY}")
        for use in (use for uses in self._uses.values() for use in uses):
            if use.name in self.axes and use.node.op.name == "Reshape" and use.position == 0:
                self._add_target(use.node, self.axes[use.name])

    def _add(self, name: str, axis: int, node: Node) -> None:
        if name not in self.tensors:
            raise InputError(f"'{name}', which {node.label} reads, is computed: {_REMEDY}")
        if self.axes.setdefault(name, axis) != axis:
            raise InputError(f"'{name}' has the tokens in its rows and in its columns")

    def _add_target(self, node: Node, axis: int) -> None:
        """Note a Reshape whose constant target has the number of tokens."""
        _, *names = node.inputs
        for name in names[:1]:
            target = self.tensors.get(name)
            if isinstance(target, np.ndarray) and target.size and target[axis] == self.rows:
                self.targets.append((node, name, axis))


_REMEDY = (
    "add the tokens to the file from before quantization, or in transformers (add_tokens, "
    "resize_token_embeddings), and export again"
)


def find_unnamed_outputs(proto: ModelProto, vocabulary: Vocabulary) -> list[str]:
    """Return outputs with as many numbers as there are rows, whose layer was not found."""
    lengths: dict[str, Any] = {}
    for value in proto.graph.output:
        dims = value.type.tensor_type.shape.dim
        if value.name not in vocabulary.values:
            lengths[value.name] = dims[-1].dim_value if dims else 0
    if not all(lengths.values()):  # which the file does not declare
        shapes = evaluate_shapes(proto, vocabulary.graph, vocabulary.tensors)
        values = shapes.values if shapes else {}
        evaluated = {n: values[n].shape for n in lengths if n in values}
        lengths |= {name: shape[-1] for name, shape in evaluated.items() if shape}
    return [name for name, length in lengths.items() if length == vocabulary.rows]


def add_rows(
    vocabulary: Vocabulary,
    values: Mapping[str, np.ndarray],
    present: int,
    chosen: Sequence[int],
) -> dict[str, np.ndarray]:
    """Return the tensors of a vocabulary with the rows of new tokens, in the types of the file.

    Rows of floating-point tensors are the mean of those that tokens have. transformers'
    `mean_resizing` draws them around it, with 1e-9 of their covariance. After Hewitt, "Initializing
    New Word Embeddings for Pretrained Language Models", 2021: the probabilities of other tokens
    hardly change. Rows in few bits repeat the last one.

    Args:
      vocabulary: the vocabulary.
      values: all named tensors.
      present: the number of tokens that there are.
      chosen: the rows of new tokens; those within the table replace rows without a token.

    Raises:
      InputError: a mean is not finite.
    """
    result = {}
    more = max(0, max(chosen) + 1 - vocabulary.rows)
    for name, axis in vocabulary.axes.items():
        x = values[name]
        if not jnp.issubdtype(x.dtype, jnp.floating) or vocabulary.has_scales(name):
            rows = x.reshape(vocabulary.rows, -1)
            grown = np.concatenate([rows, *[rows[-1:]] * more])
            result[name] = grown.reshape(-1) if x.ndim == 1 else grown.reshape(-1, *x.shape[1:])
            continue
        rows = np.moveaxis(x, axis, 0)
        mean = rows[:present].mean(0, dtype=np.float64)
        if not np.isfinite(mean).all():
            raise InputError(
                f"'{name}' has numbers that are not finite, so new tokens cannot start at the mean"
            )
        grown = np.concatenate([rows, np.empty((more, *rows.shape[1:]), x.dtype)])
        grown[[*chosen]] = mean.astype(x.dtype)
        result[name] = np.ascontiguousarray(np.moveaxis(grown, 0, axis))
    return result


def write_rows(
    proto: ModelProto, vocabulary: Vocabulary, values: Mapping[str, np.ndarray]
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Return a copy of a file with more rows in its vocabulary, and its new constants.

    Args:
      proto: the file, without the data of its tensors.
      vocabulary: its vocabulary.
      values: the tensors of `add_rows`.

    Raises:
      InputError: an output does not get the scores of the new tokens.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    first = vocabulary.matrices[0]
    count = values[first].shape[vocabulary.axes[first]]
    constants: dict[str, np.ndarray] = {}
    used = {*defined_names(result.graph), *vocabulary.tensors}
    targets = {node.outputs[0]: (name, axis) for node, name, axis in vocabulary.targets}
    for node in all_nodes(result.graph):
        if node.op_type == "MatMulNBits" and node.input[1] in values:
            for attribute in (a for a in node.attribute if a.name == "N"):
                attribute.i = count
        if node.op_type == "Reshape" and node.output[0] in targets:
            name, axis = targets[node.output[0]]
            target = vocabulary.tensors[name].copy()
            target[axis] = count
            node.input[1] = unused_name(f"{node.output[0]}.shape", used)
            constants[node.input[1]] = target
    for graph in all_graphs(result.graph):
        for tensor in graph.initializer:
            if tensor.name in values:
                tensor.dims[:] = values[tensor.name].shape
        for value in graph.input:
            if value.name in values:
                kind, shape = value.type.tensor_type.elem_type, values[value.name].shape
                value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shape))
        for i, value in reversed([*enumerate(graph.value_info)]):
            if any(d.dim_value == vocabulary.rows for d in value.type.tensor_type.shape.dim):
                del graph.value_info[i]
        for value in graph.output:
            dims = value.type.tensor_type.shape.dim
            if value.name in vocabulary.values and dims and dims[-1].dim_value == vocabulary.rows:
                dims[-1].dim_value = count
    for name, x in constants.items():
        result.graph.initializer.append(declare(name, x))
    _check_outputs(result, vocabulary, {**vocabulary.tensors, **values, **constants}, count)
    return result, constants


def _check_outputs(
    result: ModelProto, vocabulary: Vocabulary, tensors: Mapping[str, Any], count: int
) -> None:
    """Check by an evaluation on shapes that outputs have scores of the new tokens, too.

    Raises:
      InputError: they do not.
    """
    outputs = [name for name in vocabulary.graph.outputs if name in vocabulary.values]
    shapes = evaluate_shapes(result, bind(result, result.graph, tensors.keys()), tensors)
    if shapes is None and evaluate_shapes(result, vocabulary.graph, vocabulary.tensors) is None:
        return  # neither can be evaluated with sizes that fit each other
    ends = {n: v.shape[-1] for n, v in (shapes.values if shapes else {}).items() if v.shape}
    for name in outputs:
        if ends.get(name, count) != count or shapes is None:
            raise InputError(
                f"the output '{name}' does not follow when the vocabulary has {count} rows in "
                f"place of {vocabulary.rows}: a node before it has a constant of that size. Add "
                "the tokens in transformers (add_tokens, resize_token_embeddings), and export again"
            )


def add_tokens(model: M, tokenizer: Tokenizer, tokens: Sequence[str], special: bool) -> M:
    """Return the model of `Model.with_tokens`."""
    refuse_change(model, "the vocabulary")
    if not all(tokens):
        raise InputError("tokens: an empty text is no token")
    if repeated := [text for text, times in Counter(tokens).items() if times > 1]:
        raise InputError(f"tokens: {repeated[0]!r} comes twice")
    present = tokenizer.size
    tokenizer, new, old = tokenizer.add_tokens(tokens, special)
    vocabulary = Vocabulary.find(model.graph, model.tensors, token_inputs(model.inputs))
    if unnamed := find_unnamed_outputs(model.proto, vocabulary):
        raise InputError(
            f"the output '{unnamed[0]}' has {vocabulary.rows} numbers, as the embedding has rows, "
            "and the layer that computes them was not found: add the tokens in transformers "
            "(add_tokens, resize_token_embeddings), and export again"
        )
    # a tokenizer may have tokens beyond the table already, whose rows were never added
    rows = sorted({*new.values(), *range(vocabulary.rows, tokenizer.last + 1)})
    if old := {text: token for text, token in old.items() if token < vocabulary.rows}:
        listed = [f"{text!r} ({token})" for text, token in old.items()]
        warn(
            f"{list_some(listed, '')}: tokens already, which stay as they are until train(lora=) "
            "trains their rows"
        )
    net = model
    if rows:
        grown = add_rows(vocabulary, model._file_values, present, rows)
        net = _replace_tensors(model, vocabulary, grown, rows)
        floats = jnp.floating
        few = [n for n in vocabulary.matrices if not jnp.issubdtype(net.tensors[n].dtype, floats)]
        net = _start_at_mean(net, few, present, rows) if few else net
        before, after = vocabulary.rows, max(vocabulary.rows, max(rows) + 1)
        folder = _resize_settings(tokenizer.folder, before, after)
        net = dataclasses.replace(net, companion=folder)
    chosen = {
        name: tuple(dict.fromkeys((*model.new_rows.get(name, ()), *old.values(), *rows)))
        for name in vocabulary.matrices
    }
    return dataclasses.replace(net, new_rows={**model.new_rows, **chosen})


def _replace_tensors(
    model: M, vocabulary: Vocabulary, grown: Mapping[str, np.ndarray], rows: Sequence[int]
) -> M:
    """Return a model with other values, and shapes, of the tensors of its vocabulary."""
    proto, constants = model.proto, dict(grown)
    if max(rows) >= vocabulary.rows:
        proto, added = write_rows(proto, vocabulary, grown)
        constants |= added
    if records.has(proto, records.SPARSITY):
        from jaxonnx._io.packed import without  # imports jaxonnx.sparse

        without(proto, grown)
    params, state, others = (
        {name: x for name, x in constants.items() if name in group}
        for group in (model.params, model.state, constants.keys() - {*model.params, *model.state})
    )
    wide = {name: grown[name] for name in model.originals.keys() & grown.keys()}
    net = with_file(model, proto, others, params, state)
    return dataclasses.replace(net, originals={**model.originals, **wide})


def _start_at_mean(model: M, names: Sequence[str], present: int, rows: Sequence[int]) -> M:
    """Return a model whose new rows in few bits are the mean of those of tokens, rounded."""
    changes = {}
    meanings = weights(model.graph, model.tensors)
    for name, matrix in quantization.dequantize(model.graph, model.tensors, names).items():
        place: Any = meanings[name].matrix
        matrix = np.moveaxis(matrix, place.input if place.lookup else place.output, 0)
        change = np.zeros_like(matrix)
        change[[*rows]] = matrix[:present].mean(0, dtype=np.float64) - matrix[[*rows]]
        changes[name] = np.moveaxis(change, 0, place.input if place.lookup else place.output)
    rounded, _ = quantization.requantize(model.graph, model.tensors, changes)
    groups = model.params, model.state, model.program.constants
    params, state, constants = ({**x, **{n: rounded[n] for n in rounded if n in x}} for x in groups)
    program = dataclasses.replace(model.program, constants=constants)
    arrays = ({n: jnp.asarray(x) for n, x in group.items()} for group in (params, state))
    return dataclasses.replace(model, params=next(arrays), state=next(arrays), program=program)


def _resize_settings(folder: ModelFolder, before: int, after: int) -> ModelFolder:
    """Return a folder whose configurations have another size of the vocabulary."""

    def resize(settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        return {
            key: after if key == "vocab_size" and value == before else resize(value)
            for key, value in settings.items()
        }

    files = {name: folder.read_json(name) for name in ("config.json", GENAI)}
    changed = {name: resize(settings) for name, settings in files.items()}
    return folder.with_json({n: x for n, x in changed.items() if x != files[n]})
