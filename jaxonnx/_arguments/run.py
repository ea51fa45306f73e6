"""The arguments of a run: epochs, validation, checkpoints, logs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypedDict

from jaxonnx._arguments.declare import Argument

Hook = Callable[[int, dict[str, Any]], None]


class RunArguments(TypedDict, total=False):
    """The arguments of a run: epochs, validation, early stopping, checkpoints, logs."""

    epochs: Annotated[
        int | None,
        Argument(
            form="N",
            least=1,
            hint="; jaxonnx.evaluate(model, data, loss=, metrics=) or the command jaxonnx evaluate "
            "computes metrics without training",
        ),
    ]
    """The number of passes over the data; 1 by default, or as many as `max_steps` takes."""
    max_steps: Annotated[int | None, Argument(form="N", least=1)]
    """The number of steps after which the run ends, be it in the middle of an epoch.

    With `epochs` as well, what comes first counts. A step is one batch, also with `accumulate`. A
    run can be resumed with a larger number; a schedule then follows the longer run. With
    `accumulate`, batches that wait at the end make an update of their own, which they would not
    have made alone in a longer run."""
    steps_per_epoch: Annotated[int | None, Argument(form="N", least=1, resume=True)]
    """The number of steps of an epoch; by default those of a pass over the data.

    The data is read on and on: an epoch begins where the one before it ended. An endless stream
    needs this number."""
    validation: Annotated[
        Any,
        Argument(
            form="PATH|SHARE",
            words="Validation data (file or folder), or a fraction like 0.2",
        ),
    ]
    """Validation data in any form of `data`, or the fraction of the data to hold out, like 0.2.

    The examples that are held out depend on `seed` only. Validation runs in inference mode after
    each epoch, on the examples in order."""
    validate_every: Annotated[
        int | None,
        Argument(form="N", least=1, resume=True),
    ]
    """The number of steps between validations, and at the end of the run; by default each epoch.

    `history.epochs` then has a row for each validation, with the loss since the one before. What
    else is done once in an epoch (checkpoints, `patience`, `samples`) is done there."""
    validate_first: Annotated[bool, Argument(False, form="switch")]
    """Validate the initial weights as well, before the first step.

    `history.epochs` begins with this row, of epoch 0, which can be the best."""
    augment: Annotated[
        Any,
        Argument(form="crop|flip...", words="Random augmentation of training images: crop or flip"),
    ]
    """Random augmentation of training batches: "crop" or "flip" for images, or a function.

    A function `(key, x)` returns the new inputs: an array, or a tuple for several inputs. To change
    targets as well, take and return a `jaxonnx.training.Batch`: `(key, batch)`. Shapes may change;
    the number of examples may not. The function is compiled, runs on the device, and is applied to
    `data` only. The key depends on `seed`, epoch and batch only, so that a resumed run draws the
    same. For a folder of images the function gets what the network would get, and the other values
    of "augment" in `preprocess` are accepted as well."""
    patience: Annotated[int | None, Argument(form="N", least=1)]
    """Stop after this number of epochs (or validations) without a better value of `monitor`.

    The result has the weights of the best epoch, also if the run ends normally. With `sparsity`,
    only epochs with the fixed mask count."""
    min_improvement: Annotated[
        float,
        Argument(
            0.0,
            form="X",
            least=0,
            needs=("patience",),
            reason="goes with patience=, which counts improvements",
        ),
    ]
    """The least improvement that counts for `patience`.

    The value is compared with the last one that counted, so that small improvements add up. Which
    weights are the best does not depend on it."""
    monitor: Annotated[
        str | tuple[str, str] | None,
        Argument(
            form="NAME",
            expected="a name like 'validation_loss', or a pair of a name and 'min' or 'max'",
            needs=("patience", "checkpoint_dir"),
            reason="chooses the best epoch for patience= or checkpoint_dir=, and neither is given",
            words="The metric of the best epoch (default: validation_loss)",
        ),
    ]
    """The metric of `history.epochs` that decides which epoch is best.

    The default is "validation_loss", or "loss" without validation data. For a metric of your own,
    pass a pair with its direction, like `("validation_regret", "min")`."""
    checkpoint_dir: Annotated[
        str | os.PathLike[str] | None,
        Argument(form="FOLDER", flag="checkpoints", expected="the path of a folder"),
    ]
    """A folder for checkpoints.

    A checkpoint has the parameters, statistics, optimizer state, position in the data, random state
    and history. Checkpoints are written in the background and appear once they are complete. The
    last three and those of the best epochs are kept (`keep_best`). The folder also has the file of
    the model, so that `jaxonnx.load` opens the folder."""
    checkpoint_every: Annotated[
        int | None,
        Argument(
            form="N",
            least=1,
            needs=("checkpoint_dir", "nan: Literal['rollback']"),
            reason="needs a checkpoint_dir, or nan='rollback'",
        ),
    ]
    """The number of steps between checkpoints; by default one checkpoint per epoch.

    Checkpoints may be in the middle of an epoch. The best epoch and the end of the run always have
    one."""
    keep_best: Annotated[
        int,
        Argument(1, form="N", least=1, needs=("checkpoint_dir",), reason="needs a checkpoint_dir"),
    ]
    """The number of best checkpoints to keep, by `monitor`, besides the last three."""
    resume: Annotated[
        bool | Literal["anyway"],
        Argument(
            False,
            form="switch",
            expected="True or False or 'anyway' (the folder to continue in is checkpoint_dir=; a "
            "checkpoint of onnxruntime-training goes to jaxonnx.load(path, weights=checkpoint), "
            "its moments to jaxonnx.training.restore_checkpoint)",
            needs=("checkpoint_dir",),
            reason="needs the checkpoint_dir of the run to continue",
        ),
    ]
    """Continue from the newest readable checkpoint, if there is one.

    The weights are bit for bit those of an uninterrupted run. The parameters, the structure of the
    optimizer state and the data must be the same: the number, dtypes and a checksum of the examples
    are compared. "anyway" accepts other data. Iterables are not compared: they must yield the same
    batches, from the start of the epoch on."""
    check: Annotated[bool, Argument(True, form="switch")]
    """With `quantize` or `lora`, compare the file of the trained model with the model.

    If the file that `save` writes computes something else, a warning says so and names the first
    node that differs; `history.notes` has it, too, or the reason why the file was not compared. If
    `quantize` needs a newer opset, the file in that opset is compared before the training, and a
    difference is an error."""
    on_log: Annotated[
        Hook | Sequence[Hook] | None,
        Argument(
            form="FILE...",
            flag="log",
            expected="a function (step, metrics), or a list of them",
            words="Log to a .csv or .jsonl file, a TensorBoard folder, wandb:NAME or mlflow:NAME",
        ),
    ]
    """A function `on_log(step, metrics)`, or a list of them; `jaxonnx.loggers` has some.

    It gets the "loss" of each step, and the "rate" if `history.rates` has it. These arrive a few
    steps later, so that the device does not wait. It also gets the metrics of each epoch, as in
    `history.epochs`. If the function has a method `close`, it is called at the end; a method
    `flush` is called before each checkpoint is written."""
    samples: Annotated[Sequence[Any] | None, Argument(form="NAME...")]
    """Prompts to continue and print after each epoch: texts, lists of messages, tokens, or features
    of an encoder.

    Each is continued greedily by at most 40 tokens, with the weights of the epoch
    (`Model.generate`). Texts need a model from a folder with a tokenizer. If the training data are
    chats, a text is a message of the user, written by the chat template."""
    progress: Annotated[bool | None, Argument(form="switch")]
    """Whether to show a progress bar; by default in terminals and notebooks.

    Elsewhere the default is one line every ten seconds."""
