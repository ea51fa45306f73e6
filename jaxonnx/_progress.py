"""Progress: a bar around batches, and how a notebook shows one."""

import html
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

T = TypeVar("T")

_LATER = 2.0
"""Seconds after which there is a bar."""
_IN_NOTEBOOK = 0.5
"""Seconds between two pictures of it in a notebook."""


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
