"""Tokens and logits of language models: inputs, outputs of all steps, labels, embeddings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.ragged import IGNORED, Ragged, derived_inputs, masks_and_positions
from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.values import Value
from jaxonnx._rewrite.network import Network, enter
from jaxonnx.errors import TrainingError
from jaxonnx.views import CallView, Outputs

N = TypeVar("N", bound=Network)
DECODER_TOKENS = "decoder_input_ids"
"""The input of the decoder of an encoder-decoder, as Hugging Face names it: labels, shifted."""
LOGITS = "logits"
"""The output of language models that exporters and runtimes agree on."""
_FEATURES = "hidden_states", "last_hidden_state"
"""Outputs of networks without a layer of logits."""
_CROSS = re.compile(r"(.*[._/])?(encoder[._/].*|decoder_input_ids)")
"""Inputs of an encoder-decoder, or of its decoder alone."""


def token_input(model: Network, what: str = "the data has texts") -> str:
    """Return the name of the input that takes tokens.

    Args:
      what: what needs it, for the error.

    Raises:
      TrainingError: the model has no input of integers.
    """
    spare = derived_inputs(model.inputs)
    kinds = [(v.name, v.dtype) for v in model.inputs if v.name not in spare]
    integers = [name for name, kind in kinds if kind is not None and kind.kind in "iu"]
    if not integers:
        raise TrainingError(f"{what}, and the model has no input of tokens")
    return "input_ids" if "input_ids" in integers else integers[0]


def vocabulary(model: Network) -> int | None:
    """Return the size of the vocabulary: the last axis of the logits, if it is a number."""
    shapes = {value.name: value.shape for value in model.outputs}
    shape = shapes.get("logits", model.outputs[0].shape)
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def find_embeddings(model: Network) -> dict[str, float]:
    """Return the values that are embeddings of tokens, each with the factor that scales it.

    Raises:
      TrainingError: the model has no embeddings.
    """
    tokens = token_input(model, "neftune adds noise to embeddings")
    producers, tensors = model.graph.producers, model.tensors
    same = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")  # tokens pass through these

    def source(name: str) -> str:
        while name in producers and producers[name].op.name in same:
            name = producers[name].inputs[0]
        return name

    values = {
        node.outputs[0]: 1.0
        for node in model.graph.nodes
        if node.op.like == "Gather" and source(node.inputs[1]) == tokens
    }
    if not values:
        raise TrainingError(
            f"neftune adds noise to embeddings, and no Gather reads rows by the input '{tokens}'"
        )
    for node in model.graph.nodes:
        if node.op.name == "Mul":
            for value, factor in (node.inputs, node.inputs[::-1]):
                number = tensors.get(source(factor), ())
                if source(value) in values and np.size(number) == 1:
                    values[source(value)] = float(np.asarray(number).item())
    return values


def take_logits(model: N) -> N:
    """Return a decoder with its logits of all steps only; other models as they are.

    The file may give those of the last step (`prune_lm_head`).

    Raises:
      TrainingError: there are no logits.
    """
    names = [value.name for value in model.outputs]
    if {*names} <= {*_FEATURES}:
        raise TrainingError(
            f"the output '{names[0]}' has features, and the loss takes logits, which the file does "
            "not have (the builder's exclude_lm_head): model.then(head) puts a layer behind them"
        )
    if LOGITS in names:
        model = enter(model, Outputs.among(model.graph, {LOGITS}), AllSteps(LOGITS))
    return model


def take_next_logits(model: N) -> N:
    """Return the model as `take_logits`, for a loss that shifts labels.

    Raises:
      TrainingError: it is the decoder of an encoder, or there are no logits.
    """
    crossed = [value.name for value in model.inputs if _CROSS.fullmatch(value.name)]
    if crossed:
        raise TrainingError(
            f"causal_lm shifts labels, and the decoder of an encoder (input {crossed[0]!r}) reads "
            "shifted ones: it would learn the token after next. loss='seq2seq_lm' does not shift "
            "labels; jaxonnx.losses.shift_right(labels, ...) makes the input of them"
        )
    return take_logits(model)


def label_tokens(
    model: Network, ignore_index: int | None
) -> Callable[[Sequence[Any], Sequence[Value], str], Any]:
    """Return a function that makes labels of the tokens, without those of images."""
    ignored = IGNORED if ignore_index is None else ignore_index
    image = model.folder.image_token if model.folder else None

    def derive(inputs: Sequence[Any], values: Sequence[Value], what: str) -> Any:
        labels = _next_tokens(inputs, values, ignored, what)
        return labels if image is None else _ignore_token(labels, image, ignored)

    return derive


def _ignore_token(labels: Any, token: int, ignored: int) -> Any:
    """Return labels without those that are a token."""
    if isinstance(labels, Ragged):
        return Ragged(_ignore_token(labels.values, token, ignored), labels.starts)
    where = jnp.where if isinstance(labels, jax.Array) else np.where
    return where(labels == token, ignored, labels)


def _next_tokens(columns: Sequence[Any], inputs: Sequence[Value], ignored: int, what: str) -> Any:
    """Return the tokens as labels for next-token prediction; the loss shifts them by one.

    Args:
      columns: arrays or `Ragged` for the inputs.
      inputs: the model's inputs.
      ignored: the label of tokens that the mask hides.
      what: the data, for errors.

    Raises:
      TrainingError: there is no input of tokens, or its lengths are not those of its mask.
    """
    named = dict(zip((value.name for value in inputs), columns, strict=True))
    spare = derived_inputs(inputs)
    integers = [n for n, c in named.items() if c.dtype.kind in "iu" and n not in spare]
    if not integers:
        raise TrainingError(f"{what} has no targets, and no input of tokens that could be such")
    name = "input_ids" if "input_ids" in integers else integers[0]
    tokens, (masks, _) = named[name], masks_and_positions(inputs)
    if not masks:
        return tokens
    side = name.removesuffix("input_ids")  # others, as of cross attention, are not of these tokens
    name_of_mask = next(
        (m.name for m in masks if m.name == f"{side}attention_mask"), masks[-1].name
    )
    mask = named[name_of_mask]
    if isinstance(tokens, Ragged) and isinstance(mask, Ragged):
        if np.array_equal(tokens.starts, mask.starts):
            values = np.where(mask.values > 0, tokens.values.astype(np.int64), ignored)
            return Ragged(values, tokens.starts)
    elif not isinstance(tokens, Ragged) and tokens.shape == getattr(mask, "shape", None):
        if isinstance(tokens, np.ndarray) and isinstance(mask, np.ndarray):
            return np.where(mask > 0, tokens.astype(np.int64), ignored)
        return jnp.where(mask > 0, tokens.astype(jnp.int32), ignored)
    raise TrainingError(
        f"{what}: the lengths of '{name}' are not those of its mask, '{name_of_mask}'; with labels "
        f"in the data, {ignored} where there is none, the loss does not need a mask"
    )


# Make decoders that compute the logits of the last step compute those of all steps.


@dataclass(frozen=True)
class AllSteps(CallView):
    """An output has all time steps, without the selection of the last one on the way to it.

    The selection is a Gather of index -1 along axis 1 that keeps the axis, or one that drops it and
    an Unsqueeze behind, as `prune_lm_head` of onnxruntime-genai's builder writes. A graph without
    one stays as it is.
    """

    output: str
    """The output, with axes (batch, steps, ...)."""
    stays: ClassVar[bool] = False

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        tensors, producers = {**graph.initializers, **constants}, graph.producers
        needed = ancestors(graph.nodes, [self.output])
        for node in reversed(graph.nodes):
            source = (
                None if needed.isdisjoint(node.outputs) else _find_source(node, tensors, producers)
            )
            if source is not None:
                new = {node.outputs[0]: source}
                nodes = tuple(_rename_inputs(n, new) for n in graph.nodes)
                return replace(graph, nodes=nodes)
        return graph


def _find_source(
    node: Node, constants: Mapping[str, np.ndarray], producers: Mapping[str, Node]
) -> str | None:
    """Return the value that a node selects the last step of; None if it does something else."""
    if node.op.name == "Unsqueeze" and len(node.inputs) == 2:
        source, axes = node.inputs
        if _is(constants.get(axes), 1) and source in producers:
            return _find_gathered(producers[source], constants, ())
    return _find_gathered(node, constants, (1,))


def _find_gathered(
    node: Node, constants: Mapping[str, np.ndarray], shape: tuple[int, ...]
) -> str | None:
    """Return the data of a Gather of index -1 along axis 1, if the index has this shape."""
    if node.op.name != "Gather" or node.attributes.get("axis") != 1:
        return None
    source, index = node.inputs
    return source if _is(constants.get(index), -1) and np.shape(constants[index]) == shape else None


def _is(value: np.ndarray | None, number: int) -> bool:
    return value is not None and value.size == 1 and value.item() == number


def _rename_inputs(node: Node, new: Mapping[str, str]) -> Node:
    inputs, reads = (tuple(new.get(n, n) for n in names) for names in (node.inputs, node.reads))
    return node if inputs == node.inputs else replace(node, inputs=inputs, reads=reads)
