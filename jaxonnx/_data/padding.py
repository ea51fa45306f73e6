"""The padding token of a model, and the proof that padding changes none of its outputs.

A network may depend on padding in ways that no mask shows: decoders that classify look for the last
token by `input_ids != pad_token_id`, or read the last place whatever its token is, and a mask may
have become a constant of the file. So a text is evaluated alone and padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxonnx._data.ragged import IGNORED, Columns, Padding, Ragged, token_inputs
from jaxonnx._rewrite.batch import ROUND_TOGETHER
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import Error, TrainingError, warn

CLOSE = {True: 1e-4, False: 2e-2}
"""Differences of outputs that are rounding, of the greatest one: in float32, and in fewer bits."""
_CLOSE_INTEGERS = 0.1
"""The difference that is rounding where a batch is rounded together, its padding included."""


def fit_padding(padding: Padding, model: Network) -> Padding:
    """Return padding by the model's own token, that is checked before it is used.

    Args:
      padding: as the user asks for it.
      model: evaluated for the check.
    """
    tokens = [value for value in model.inputs if value.name in token_inputs(model.inputs)]
    if not tokens:
        return padding
    token = model.companion.padding_token
    if token is not None and any(v.rows is not None and token >= v.rows for v in tokens):
        token = None
    names = [value.name for value in tokens]
    check = PaddingCheck(model, names, padding.pad, token)
    return replace(padding, token=token or 0, check=check)


class PaddingCheck:
    """Compares the outputs of a text alone with those of the same text with padding, once.

    Where the file takes no text of that length, or fixes the length, padding by two tokens is
    compared. Each of several processes checks its own examples, by itself: their data may differ.
    A model whose tensors are distributed over them cannot be evaluated by one; a warning says so.

    Args:
      model: a network with inputs of tokens.
      tokens: the names of these.
      pad: padding values of the user.
      token: the padding token that the files beside the model name, if they do.
    """

    def __init__(
        self, model: Network, tokens: Sequence[str], pad: Mapping[str, Any], token: int | None
    ):
        self._run: Any = None
        self._model, self._tokens, self._pad, self._token = model, tokens, pad, token
        self._done = False

    def __call__(self, columns: Columns, what: str) -> None:
        """Check the padding of some examples, if there is any, and that labels are as long.

        Raises:
          TrainingError: padding changes the outputs of a text, and the user has not chosen it; or
            an example has more or fewer labels than tokens.
        """
        self._check_labels(columns, what)
        inputs, _ = columns.pair
        named = {v.name: x for v, x in zip(self._model.inputs, inputs, strict=True)}
        ragged = [name for name in self._tokens if isinstance(named[name], Ragged)]
        if self._done or not ragged:
            return
        full = np.min([x.lengths for x in inputs if isinstance(x, Ragged)], axis=0) > 0
        if not full.any():
            return
        row = int(np.where(full, columns.lengths, columns.lengths.max() + 1).argmin())
        wider = columns.widths[columns.widths > columns.lengths[row]]
        if not len(wider):
            return
        self._done = True
        self._run = _find_local(self._model)
        if self._run is None:
            warn(
                f"{what}: whether padding changes its outputs is not checked, because the model is "
                "distributed over several processes",
            )
            return
        width, name = int(wider.min()), ragged[0]
        is_chosen = any(name in self._pad for name in ragged)
        fill = self._pad.get(name, self._token or 0)
        padded = self._evaluate(columns, row, width)
        fixed = any(
            isinstance(x, Ragged) and isinstance((value.shape or (0, None))[1], int)
            for value, x in zip(self._model.inputs, inputs, strict=True)
        )
        alone = None if fixed else self._evaluate(columns, row)
        if alone is None and padded is not None and not is_chosen and self._token is None:
            other = self._evaluate(columns, row, width, shift=1)
            lengths = {width: int(columns.lengths[row])}
            distance = _distance(padded, other, lengths)
            self._refuse(distance, f"{what}: example {row}", name, fill, False)
        elif alone is not None and padded is not None:
            self._refuse(_distance(alone, padded), f"{what}: example {row}", name, fill, is_chosen)

    def _check_labels(self, columns: Columns, what: str) -> None:
        """Refuse examples whose labels are not as many as the tokens that the logits are of.

        These are tokens along the axis that an output [batch, length, classes] has, too.
        """
        inputs, targets = columns.pair
        outputs = self._model.outputs
        names = [value.name for value in outputs]
        usual = "logits" if len(names) > 1 else names[0]
        named = targets if isinstance(targets, Mapping) else {"labels": targets}
        for value in outputs:
            labels = named.get(value.name, named.get("labels") if value.name == usual else None)
            length = value.shape[1] if value.shape is not None and len(value.shape) == 3 else None
            if not isinstance(labels, Ragged) or labels.dtype.kind not in "iu":
                continue
            for other, x in zip(self._model.inputs, inputs, strict=True):
                along = isinstance(length, str) and (other.shape or ())[1:] == (length,)
                if other.name not in self._tokens or not along or not isinstance(x, Ragged):
                    continue
                if (differs := x.lengths != labels.lengths).any():
                    row = int(differs.argmax())
                    raise TrainingError(
                        f"{what}: example {row} has {x.lengths[row]} tokens ('{other.name}') and "
                        f"{labels.lengths[row]} labels: pass one for each token, {IGNORED} for "
                        "those that do not count"
                    )

    def _evaluate(
        self, columns: Columns, row: int, width: int | None = None, shift: int = 0
    ) -> Any:
        """Evaluate an example, padded or alone; None if the file does not take it.

        Args:
          shift: added to the padding token.
        """
        inputs, _ = columns.pair
        first = [value.shape[0] for value in self._model.inputs if value.shape and not value.whole]
        count = next((size for size in first if isinstance(size, int)), 1)
        rows, arrays = np.full(count, row), []
        for value, x, fill in zip(self._model.inputs, inputs, columns.fills, strict=False):
            if not isinstance(x, Ragged):
                arrays.append(x[rows])
                continue
            size = int(x.lengths[row]) if width is None else width
            more = shift if value.name in self._tokens else 0
            arrays.append(x.pad_rows(rows, size, fill + more))
        try:
            outputs = self._run(*arrays)
        except Error:  # as convolutions and blocks of attention need some tokens
            return None
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def _refuse(self, distance: float, what: str, name: str, fill: Any, is_chosen: bool) -> None:
        floats = [v.dtype for v in self._model.outputs if v.dtype is not None]
        close = CLOSE[all(kind == np.float32 for kind in floats if kind.kind == "f")]
        if any(node.op_type in ROUND_TOGETHER for node in self._model.proto.graph.node):
            close = _CLOSE_INTEGERS
        if distance <= close:
            return
        problem = f"{what}: its outputs change by {distance:.1%} with padding ({fill}) behind it"
        if is_chosen:
            warn(f"{problem}, as pad= says")
            return
        raise TrainingError(
            f"{problem}: pad={{{name!r}: ...}} is the token that the file takes for padding "
            "(pad_token_id in config.json, which jaxonnx.load('folder/') reads; the remedy for "
            "decoders that classify). A file that reads the last place whatever its token takes an "
            "iterable of batches, each of texts of one length. If the file was trained with such "
            f"padding and has no mask, pad={{{name!r}: {fill}}} says so"
        )


def _find_local(model: Network) -> Any:
    """Return a model whose tensors this process has; None if it has only parts of some."""

    def find(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: x.addressable_data(0)
            if isinstance(x, jax.Array) and x.is_fully_replicated and not x.is_fully_addressable
            else x
            for name, x in tensors.items()
        }

    params, state = find(model.params), find(model.state)
    arrays = (x for x in (*params.values(), *state.values()) if isinstance(x, jax.Array))
    is_whole = all(x.is_fully_addressable for x in arrays)
    return replace(model, params=params, state=state) if is_whole else None


def _distance(first: Any, second: Any, lengths: Mapping[int, int] | None = None) -> float:
    """Return the largest difference of floating-point outputs, of the largest of each.

    An axis that is longer in one of the two is cut to the same length: it has the places of tokens,
    and those of padding are behind them.

    Args:
      lengths: how much of an axis of a size has places of tokens, where both are padded.
    """
    distances = [0.0]
    for a, b in zip(first, second, strict=True):
        if not hasattr(a, "dtype") or not jax.numpy.issubdtype(a.dtype, np.floating):
            continue
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if a.ndim != b.ndim or not a.size:
            continue
        sizes = enumerate(np.minimum(a.shape, b.shape).tolist())
        shape = tuple(slice((lengths or {}).get(n, n) if axis else n) for axis, n in sizes)
        a, b = a[shape], b[shape]
        finite = np.isfinite(a) & np.isfinite(b)
        if (a[~finite] != b[~finite]).any():
            return np.inf
        if finite.any():
            scale = max(np.abs(a[finite]).max(), np.abs(b[finite]).max(), 1e-30)
            distances.append(float(np.abs(a - b)[finite].max() / scale))
    return max(distances)
