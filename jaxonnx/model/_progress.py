"""A progress bar around batches."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

T = TypeVar("T")

_LATER = 2.0
"""Seconds after which there is a bar."""


def tracked(batches: Iterable[T], total: int | None, show: bool | None) -> Iterator[T]:
    """Yield batches, with a bar once they take long.

    Args:
      total: how many there are, where that is known.
      show: by default where the output is a terminal.
    """
    console = Console()
    if not (console.is_terminal if show is None else show):
        yield from batches
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console)
    task = bar.add_task("", total=total)
    began = time.perf_counter()
    started = False
    try:
        for number, batch in enumerate(batches):
            if not started and time.perf_counter() - began > _LATER:
                bar.start()
                started = True
            bar.update(task, completed=number)
            yield batch
        bar.update(task, completed=total)
    finally:
        if started:
            bar.stop()
