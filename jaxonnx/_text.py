"""Format text: counted nouns, shortened lists, rich tables as plain text or HTML."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group

WIDTH = 80
"""Characters in a line of text; only a longer name makes a longer one."""


def format_count(number: int, what: str) -> str:
    """Return "1 step" or "2,000 steps"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def list_some(texts: Iterable[str], rest: str = "jaxonnx info --json") -> str:
    """Return the first three of some texts, how many there are besides, and where these are."""
    texts = [*texts]
    where = f" ({rest})" if rest else ""
    more = f" and {len(texts) - 3} more{where}" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


class Rendered(ABC):
    """Something that rich renders (`__rich__`), as text in terminals and HTML in notebooks."""

    @abstractmethod
    def __rich__(self) -> Group: ...

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return _text(self, html=True)


def _text(shown: Any, html: bool = False) -> str:
    """Render with rich as plain text, or as HTML for a notebook."""
    console = Console(file=io.StringIO(), record=html, width=WIDTH, force_jupyter=False)
    console.print(shown)
    if html:
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
