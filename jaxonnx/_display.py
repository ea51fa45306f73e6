"""Show results: counted nouns, shortened lists, tables, progress bars, and axes for figures."""

from __future__ import annotations

import html
import io
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console, Group

from jaxonnx.errors import Error

T = TypeVar("T")

WIDTH = 80
"""Characters in a line of text; only a longer name makes a longer one."""
_LATER = 2.0
"""Seconds after which a progress bar is shown."""
_IN_NOTEBOOK = 0.5
"""Seconds between two drawings of a bar in a notebook."""


def format_count(number: int, what: str) -> str:
    """Return "1 step" or "2,000 steps"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def list_some(texts: Iterable[str], rest: str = "jaxonnx info --json") -> str:
    """Return the first three of some texts, how many there are besides, and where these are."""
    texts = [*texts]
    where = f" ({rest})" if rest else ""
    more = f" and {len(texts) - 3} more{where}" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


class Printable(ABC):
    """Something that rich renders (`__rich__`), as text in terminals and HTML in notebooks."""

    @abstractmethod
    def __rich__(self) -> Group: ...

    def __str__(self) -> str:
        return self._render().file.getvalue().rstrip("\n")  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        console = self._render(record=True)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def _render(self, record: bool = False) -> Console:
        console = Console(file=io.StringIO(), record=record, width=WIDTH, force_jupyter=False)
        console.print(self)
        return console


def track_batches(batches: Iterable[T], total: int | None, show: bool | None) -> Iterator[T]:
    """Yield batches, with a bar once they take long.

    Args:
      total: how many there are, where that is known.
      show: by default where the output is a terminal or a notebook.
    """
    console = Console()
    if not (console.is_terminal or console.is_jupyter if show is None else show):
        yield from batches
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    cell = Cell() if console.is_jupyter else None
    bar = Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console)
    task = bar.add_task("", total=total)
    due, started, done = time.perf_counter() + _LATER, False, 0
    try:
        for done, batch in enumerate(batches):
            bar.update(task, completed=done)
            now = time.perf_counter()
            if now > due and cell is not None:
                cell.draw(done, total)
                due, started = now + _IN_NOTEBOOK, True
            elif now > due and not started:
                bar.start()
                started = True
            yield batch
            done += 1
        bar.update(task, completed=done)
    finally:
        if started and cell is not None:
            cell.draw(done, total)
        elif started:
            bar.stop()


class Cell:
    """A bar in a notebook as HTML: rich draws there only with ipywidgets, and warns without."""

    def __init__(self) -> None:
        self._shown: Any = None

    def draw(self, done: int, total: int | None, text: str = "") -> None:
        """Draw the bar in place of the one before."""
        from IPython.display import HTML, display

        most = "" if total is None else f' max="{total}"'
        drawn = HTML(f'<progress value="{done}"{most}></progress> {html.escape(text)}')
        if self._shown is None:
            self._shown = display(drawn, display_id=True)
        else:
            self._shown.update(drawn)


def import_pyplot() -> Any:
    """Return `matplotlib.pyplot`.

    Raises:
      Error: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise Error("plotting needs matplotlib: pip install 'jaxonnx[plot]'") from error
    return pyplot


def new_axes(axes: Any) -> Any:
    """Return the axes to draw on, new ones by default."""
    if axes is not None:
        return axes
    return import_pyplot().subplots(figsize=(7, 4), layout="constrained")[1]
