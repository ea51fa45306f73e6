"""The run: epochs, validation, checkpoints, reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypedDict

from jaxonnx._arguments.declare import Argument

Hook = Callable[[int, dict[str, Any]], None]


class RunArguments(TypedDict, total=False):
    """The run: epochs, validation, checkpoints, reports."""

    epochs: Annotated[int, Argument(1, "count")]
    """The number of passes over the data."""
    validation: Annotated[
        Any,
        Argument(
            form="validation", words="A file or folder of validation data, or a share like 0.2"
        ),
    ]
    """Validation data in any form of `data`, or the share of the data to hold out, like 0.2.

    Which examples are held out depends on `seed` only. They are evaluated in inference mode
    after each epoch, in order."""
    augment: Annotated[
        Any, Argument(form="augment", words="Random changes of training pictures: crop or flip")
    ]
    """Augmentation of training batches: "crop" or "flip" for images; or a function.

    A function `(key, x)` returns the new inputs (an array, or a tuple for several inputs); `(key,
    batch)` for a `jaxonnx.training.Batch` returns one with its targets. Shapes may change, the
    number of examples may not. It runs on the device, compiled, for `data` only. The key depends on
    `seed`, epoch and batch only, so that a run that resumes draws the same. For a folder of images
    it takes what the network would, and may be "crop", "flip" and so on, as in `preprocess`."""
    patience: Annotated[int | None, Argument(form="count")]
    """The number of epochs without a better value of `monitor` after which the run ends.

    The result has the weights of the best epoch, whether the run ends early or not. With
    `sparsity` only the epochs with the fixed mask count."""
    monitor: Annotated[
        str | tuple[str, str] | None,
        Argument(form="text", words="The number that decides which epoch is best: validation_loss"),
    ]
    """The number of `history.epochs` that decides which epoch is the best.

    "validation_loss" if there is validation data, or else "loss". For metrics that are not
    jaxonnx's own, a pair like `("validation_regret", "min")`."""
    checkpoint_dir: Annotated[str | os.PathLike | None, Argument(form="folder", flag="checkpoints")]
    """A folder for checkpoints.

    A checkpoint has the parameters, statistics, optimizer state, position in the data, random
    numbers and history. Checkpoints are written in the background and appear when they are
    complete; the last three and that of the best epoch are kept. The folder has the file of the
    model as well, so that `jaxonnx.load` opens it."""
    checkpoint_every: Annotated[int | None, Argument(form="count")]
    """The number of steps between checkpoints; by default each epoch has one.

    They may fall inside an epoch. The best epoch and the end of the run have one as well."""
    resume: Annotated[bool | Literal["anyway"], Argument(False, "switch")]
    """Continue from the newest checkpoint that can be read, if there is one.

    The weights are then bit for bit those of the uninterrupted run, wherever it ended.
    Parameters, the structure of the optimizer state, and data in one piece (the number, types
    and a checksum of the examples) must be the same; "anyway" accepts other data. Iterables
    cannot be checked: they must give the same batches, from the first of their epoch on."""
    on_log: Annotated[
        Hook | Sequence[Hook] | None,
        Argument(
            form="logs", flag="log", words="A .csv or .jsonl file, or a folder for TensorBoard"
        ),
    ]
    """A function `on_log(step, metrics)`, or a list of them; `jaxonnx.loggers` writes files.

    It gets the "loss" of each step (and the "rate", where `history.rates` has it) some steps
    later, because the device is never waited for, and the numbers of each epoch, as in
    `history.epochs`. A function with a method `close` is closed at the end."""
    samples: Annotated[Sequence[Any] | None, Argument(form="names")]
    """Prompts whose continuation is printed after each epoch: texts, tokens, or features.

    The most likely tokens, up to 40, by the weights of the epoch (`Model.generate`). Texts need a
    model of a folder with a tokenizer."""
    progress: Annotated[bool | None, Argument()]
    """Show a progress bar; by default in terminals and notebooks.

    Elsewhere the default is a line every ten seconds."""
