"""Implementation of `Model.with_tokens`: rows for new tokens, and the files that name them."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxonnx import quantization
from jaxonnx._data.ragged import token_inputs
from jaxonnx._graph.uses import weights
from jaxonnx._io import records
from jaxonnx._rewrite.network import Network, refuse_change, with_file
from jaxonnx._text import list_some
from jaxonnx.errors import InputError
from jaxonnx.llm._folders import GENAI, ModelFolder
from jaxonnx.llm._tokenizer import Tokenizer
from jaxonnx.llm._vocabulary import Vocabulary, add_rows, find_unnamed_outputs, write_rows

M = TypeVar("M", bound=Network)


def add_tokens(model: M, tokenizer: Tokenizer, tokens: Sequence[str], special: bool) -> M:
    """Return the model of `Model.with_tokens`."""
    refuse_change(model, "the vocabulary")
    if not all(tokens):
        raise InputError("tokens: an empty text is no token")
    if repeated := [text for text, times in Counter(tokens).items() if times > 1]:
        raise InputError(f"tokens: {repeated[0]!r} comes twice")
    present = tokenizer.size
    tokenizer, new, old = tokenizer.add_tokens(tokens, special)
    if old:
        listed = [f"{text!r} ({token})" for text, token in old.items()]
        warnings.warn(
            f"{list_some(listed, '')}: tokens already, which stay as they are", stacklevel=4
        )
    if not new:
        return model
    vocabulary = Vocabulary.find(model.graph, model.tensors, token_inputs(model.inputs))
    if unnamed := find_unnamed_outputs(model.proto, vocabulary):
        raise InputError(
            f"the output '{unnamed[0]}' has {vocabulary.rows} numbers, as the embedding has rows, "
            "and the layer that computes them was not found: add the tokens in transformers "
            "(add_tokens, resize_token_embeddings), and export again"
        )
    rows = [*new.values()]
    grown = add_rows(vocabulary, model._file_values, present, rows)
    net = _replace_tensors(model, vocabulary, grown, rows)
    few = [n for n in vocabulary.matrices if not jnp.issubdtype(net.tensors[n].dtype, jnp.floating)]
    if few:
        net = _start_at_mean(net, few, present, rows)
    before, after = vocabulary.rows, max(vocabulary.rows, max(rows) + 1)
    folder = _resize_settings(tokenizer.folder, before, after)
    earlier = model.new_rows
    new_rows = {name: (*earlier.get(name, ()), *rows) for name in vocabulary.matrices}
    return dataclasses.replace(net, companion=folder, new_rows={**earlier, **new_rows})


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

    read = {name: folder.read_json(name) for name in ("config.json", GENAI)}
    changed = {name: resize(settings) for name, settings in read.items()}
    return folder.with_json({n: x for n, x in changed.items() if x != read[n]})
