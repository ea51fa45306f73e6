"""Print continuations of prompts after each epoch (`samples=`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxonnx._require import require
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import TrainingError
from jaxonnx.llm._configuration import DECODER_TOKENS
from jaxonnx.llm._generate import Generator
from jaxonnx.llm._images import encode_chat, stack_images
from jaxonnx.llm._sampling import stop_tokens
from jaxonnx.llm._shapes import is_chat
from jaxonnx.llm._tokenizer import Tokenizer

_COUNT = 40
"""Tokens of a continuation."""


class Continuations:
    """Writes greedy continuations by a model, with one program for all epochs.

    Args:
      model: the model that is trained.
      view: returns the parameters of a state of the training, as the model takes them.
      prompts: texts or lists of messages, for a model of a folder with a tokenizer, or tokens; None
        for none.

    Raises:
      TrainingError: the prompts are none, or there is no tokenizer for them.
    """

    def __init__(
        self,
        model: Network,
        view: Callable[[Any], Mapping[str, Any]],
        prompts: Sequence[Any] | None,
    ):
        self._model, self._view = model, view
        several = isinstance(prompts, list | tuple) and len(prompts) > 0
        fits = prompts is None or (
            several and all(isinstance(p, str) or np.ndim(p) > 0 for p in prompts)
        )
        require("samples", prompts, fits, "a list of texts, messages or tokens", TrainingError)
        folder = self._model.folder
        texts = [p for p in prompts or () if isinstance(p, str) or is_chat(p)]
        if texts and folder is None:
            raise TrainingError(
                "samples has texts, and the model was not loaded from a folder with a tokenizer: "
                "give tokens, [length] each"
            )
        self._tokenizer = None if folder is None or not texts else Tokenizer(folder)
        # behind an encoder the decoder begins anew
        self._encoded = DECODER_TOKENS in [value.name for value in self._model.inputs]
        self._rows, self._pixels = stack_images([self._encode(prompt) for prompt in prompts or ()])
        longest = 1 if self._encoded else max(map(len, self._rows), default=0)
        self._generate = Generator(self._model)
        self._count = max(1, min(_COUNT, self._generate.positions - longest)) if prompts else _COUNT

    def write(self, state: Any, epoch: int) -> None:
        """Print the continuations by the state of the training at the end of an epoch, from 1."""
        if not self._rows:
            return
        tensors = {**self._model.state, **state.state}
        params, stop = self._view(state), stop_tokens(self._model)
        rows = self._generate(params, tensors, self._rows, self._count, stop, self._pixels)
        for prompt, row in zip(self._rows, rows, strict=True):
            pair = f"{self._decode(prompt)} -> {self._decode(row[1:])}" if self._encoded else ""
            print(f"epoch {epoch}: {pair or self._decode(row)}", flush=True)

    def _encode(self, prompt: Any) -> Any:
        if self._tokenizer is not None and isinstance(prompt, str):
            return self._tokenizer.encode(prompt, end=self._encoded)
        if self._tokenizer is not None and is_chat(prompt):
            return encode_chat(self._model, self._tokenizer, prompt)
        return np.asarray(prompt)

    def _decode(self, row: np.ndarray) -> Any:
        if row.ndim > 1:
            return f"features {list(row.shape)}"
        return row.tolist() if self._tokenizer is None else repr(self._tokenizer.decode(row))
