"""What is generated behind a prompt: tokens and their text, as they come, and where they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

_INCOMPLETE = "\ufffd"
"""What tokenizers write for a part of a character."""


@dataclass
class Continuation:
    """The new tokens of one prompt, up to a stop.

    Attributes:
      stops: the tokens that end it.
      texts: the texts that end it.
      decode: converts tokens to text; not needed for tokens alone.
      room: the most tokens.
      tokens: those so far, with that which ended it.
      ended: whether a token or a text has ended it.
    """

    stops: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    room: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    _held: str = ""
    """Text that may be the beginning of a stop."""
    _before: Sequence[int] = ()
    """Tokens of the text that is continued."""
    _places: tuple[int, int] = 0, 0
    """The tokens from the first place on are decoded, of which those before the second one were."""

    def continue_text(self, tokens: Sequence[int]) -> None:
        """Decode behind the tokens of a text, as some tokenizers drop the space of a first one."""
        self._before, self._places = tokens, (0, len(tokens))

    @property
    def is_done(self) -> bool:
        return self.ended or len(self.tokens) >= self.room

    def add(self, token: int) -> str:
        """Add a token, unless this has ended; return the text that is certain by now.

        It has whole characters only, and nothing of a text or token that ends it.
        """
        if self.is_done:
            return ""
        self.tokens.append(token)
        self.ended = token in self.stops
        if self.decode is None:
            return ""
        text = self._held + ("" if self.ended else self._decode_new(self.decode))
        ends = [at for stop in self.texts if (at := text.find(stop)) >= 0]
        if ends:
            self.ended, text = True, text[: min(ends)]
        self._held = "" if self.is_done else self._find_beginning(text)
        return text.removesuffix(self._held)

    def _decode_new(self, decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text that the last tokens add; nothing if a character is not whole yet.

        The tokens before are decoded with them.
        """
        start, stop = self._places
        tokens = [*self._before, *self.tokens]
        before, text = decode(tokens[start:stop]), decode(tokens[start:])
        if text.endswith(_INCOMPLETE) or len(text) <= len(before):
            return ""
        self._places = stop, len(tokens)
        return text[len(before) :]

    def _find_beginning(self, text: str) -> str:
        """Return the longest end of a text that a stop begins with."""
        longest = max((len(stop) for stop in self.texts), default=1) - 1
        ends = (text[-n:] for n in range(min(longest, len(text)), 0, -1))
        return next((end for end in ends if any(s.startswith(end) for s in self.texts)), "")

    def follow(self, row: np.ndarray) -> np.ndarray:
        """Return the tokens of a prompt, and these behind them."""
        return np.append(row, self.tokens).astype(row.dtype)
