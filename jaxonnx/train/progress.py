"""The progress bar of a run."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxonnx.train.history import History


class Bar:
    """One bar over all steps of a run; nothing is written where `show` is false.

    Args:
      show: None shows the bar where the output is a terminal.
      epochs: the epochs of the run.
      steps: the steps of an epoch, where known.
    """

    def __init__(self, show: bool | None, epochs: int, steps: int | None):
        console = Console()
        self._epochs = epochs
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("[progress.remaining]{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (console.is_terminal if show is None else show),
        )
        total = None if steps is None else epochs * steps
        self._task = self._progress.add_task("compiling", total=total, loss="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()

    def show(self, history: History) -> None:
        """The state after some step."""
        loss = f"loss {history.losses[-1]:.4f}" if history.losses else ""
        row = history.epochs[-1] if history.epochs else {}
        if "validation_accuracy" in row:
            loss += f"  accuracy {row['validation_accuracy']:.2%}"
        done = len(history.epochs)
        under_way = len(history.losses) > row.get("step", 0)
        description = f"epoch {done + under_way}/{self._epochs}"
        self._progress.update(
            self._task, completed=len(history.losses), description=description, loss=loss
        )
