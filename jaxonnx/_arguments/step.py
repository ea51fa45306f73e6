"""The arguments of a training step."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from jaxonnx._arguments.declare import Argument


class BasicArguments(TypedDict, total=False):
    """Arguments that act in the objective, the storage and the step themselves."""

    metrics: Annotated[Any, Argument(form="NAME...")]
    """Metrics of the validation data: accuracy, f1, iou, mae, r2, perplexity and others.

    Pass one or a list; each becomes `validation_<name>` in the history. For several outputs, pass a
    dict by output name.

    * "accuracy", "top_5" (or another number).
    * "precision", "recall", "f1", "iou" (intersection over union), "dice": means over the classes
      that occur. For binary targets of the shape of the outputs, means over the labels.
    * "perplexity": exp of the mean negative log probability of the labels, or of the next tokens
      for "causal_lm".
    * "mae", "mse", "r2": means over the columns of the outputs.
    * A function `(outputs, targets)` that returns a scalar, or one value per example.

    A binary output is true above 0.5. If the loss takes logits and the file does not end in
    Sigmoid, it is true above 0. All metrics are exact over the epoch, except for functions that
    return a scalar: these are averaged over the batches. The default is "accuracy" for losses of
    labels."""
    seed: Annotated[int, Argument(0, form="N", least=0, most=0x7FFFFFFFFFFFFFFF, resume=True)]
    """The random seed: of the order of the examples, and of random operators."""
    master: Annotated[bool, Argument(True, form="switch", resume=True)]
    """Train float16 and bfloat16 parameters as float32 master weights.

    The optimizer state, the average of `ema` and checkpoints are then float32 (12 bytes per
    parameter with Adam instead of 6). The model computes with the rounded weights, and the
    resulting model has the dtypes of the file, rounded once. With False, updates are added to the
    16-bit parameters directly: most of them are lost to rounding, and an epsilon of 1e-8 is zero in
    float16."""
    nan: Annotated[Literal["stop", "skip", "rollback"], Argument("stop", form="choice")]
    """What to do at a non-finite step: "stop", "skip" or (in `train` only) "rollback".

    A step is non-finite if its loss, a gradient, a new statistic or a new small weight is NaN or
    infinite. It changes neither weights nor statistics. In a large weight, only the elements that
    would become non-finite keep their value.

    * "stop": end the run.
    * "skip": continue with the next batch, at most 10 times in a row.
    * "rollback": restore the last snapshot (of the end of an epoch, or as `checkpoint_every` says)
      and continue with the batches after this one, at most 3 times in a row. Up to 8 batches are
      lost.

    `history.events` lists these steps and non-finite validation losses. `history.stopped` also
    reports a run without any finite step, and a run that ended with weights that were restored more
    than once."""
