"""The arguments of a training step: its loss, its optimizer, and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

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


if TYPE_CHECKING:
    import optax


Optimizer: TypeAlias = (
    "optax.GradientTransformation | Callable[[int], optax.GradientTransformation]"
)
RATE = 1e-3
"""The learning rate of an optimizer that is chosen by name."""
BY_NAME = ("optimizer: str | None",)
NAMED = "goes with an optimizer by name, like optimizer='adam'; an optax transformation has its own"


class LossArguments(TypedDict, total=False):
    """The loss and the optimizer."""

    loss: Annotated[
        Any,
        Argument(
            form="NAME",
            words="The name of a loss (default: softmax cross entropy; causal_lm for texts)",
        ),
    ]
    """The loss: its name in optax or `jaxonnx.losses`, or a function.

    The default is the softmax cross entropy of integer labels; of texts on a language model
    "causal_lm", behind an encoder "seq2seq_lm", and where masks are filled "masked_lm".

    A name is one of `optax.losses` or `jaxonnx.losses` (ONNX's losses, with class weights and an
    ignored label), or one of these:

    * "absolute_error".
    * "causal_lm": predicts each token from those before it. Without targets, the input tokens are
      the targets, and padding is ignored.
    * "seq2seq_lm": for an encoder-decoder. The decoder's input is made of the labels.

    A function `(outputs, targets)` returns a scalar, or one value per example along the first axis.
    Losses are averaged over the examples of the batch. A scalar also includes the examples that
    fill a short batch.

    For a model with several outputs, pass a dict from output name to loss, or to a pair (loss,
    weight). Targets are then a dict by output name as well, and the weighted losses are added.

    If the file ends in the Softmax, LogSoftmax or Sigmoid that a named loss contains, the loss is
    computed from the logits before it. The saved model keeps that last node, and metrics see its
    outputs. `history.notes` records this.

    The default for one output and integer labels is softmax cross entropy, which `history.notes`
    records. For a file with `training_info`, omit loss and optimizer to run the algorithm of the
    file, from the state and the update count in it; the resulting model has both as they are at the
    end of the run. Arguments that change the network or the update cannot be combined with it."""
    optimizer: Annotated[
        Optimizer | Literal["adam", "adamw", "adagrad", "lion", "rmsprop", "sgd"] | None,
        Argument(
            form="choice",
            expected="a name ({choices}), an optax transformation, like optax.adam(1e-3) or "
            "jaxonnx.training.optimizer('adamw', 1e-3), or a function of steps (the updates of the "
            "run) to one",
            words="adam, adamw, adagrad, lion, rmsprop or sgd (default: that of the file's "
            "training_info, or adam)",
        ),
    ]
    """An optax transformation, its name, or a function from the number of updates to one.

    Names are "adam" (the default), "adamw", "adagrad", "lion", "rmsprop" and "sgd". They use the
    arguments from `learning_rate` to `weight_decay`, which an optax transformation has itself.
    `jaxonnx.training.optimizer` builds the same for a loop of your own."""


class OptimizerArguments(TypedDict, total=False):
    """The settings of an optimizer that is given by name."""

    learning_rate: Annotated[
        float | Callable[[Any], Any] | None,
        Argument(
            form="X",
            flag="rate",
            above=0,
            needs=BY_NAME,
            reason=NAMED,
            needs_loss=True,
            words="The peak learning rate (default: 0.001; for a new head and no other flag of the "
            "optimizer, a tenth of it for all layers but the head)",
        ),
    ]
    """The learning rate of an optimizer that is given by name; 0.001 by default.

    With a schedule it is the greatest one. It may be a schedule of optax itself."""
    schedule: Annotated[
        Literal["constant", "linear", "cosine"] | None,
        Argument(
            form="choice",
            needs=BY_NAME,
            reason=NAMED,
            needs_loss=True,
        ),
    ]
    """The learning rate after the warmup: "constant" (the default), "linear" or "cosine".

    The latter two decay to zero at the end of the run."""
    warmup: Annotated[
        float | None,
        Argument(
            form="X",
            least=0,
            needs=BY_NAME,
            reason=NAMED,
            needs_loss=True,
        ),
    ]
    """The number of updates in which the rate rises from zero; below 1, a fraction of the run."""
    clip: Annotated[
        float | None,
        Argument(
            form="X",
            above=0,
            finite=False,
            needs=BY_NAME,
            reason=NAMED,
            needs_loss=True,
        ),
    ]
    """The maximum global norm of the gradients.

    Longer gradients are scaled down to it."""
    weight_decay: Annotated[
        float | None,
        Argument(
            form="X",
            least=0,
            needs=BY_NAME,
            reason=NAMED,
            needs_loss=True,
        ),
    ]
    """The coefficient of decoupled weight decay, in matrices, kernels and embeddings.

    Biases, scales of normalizations and other vectors do not decay, and `history.notes` counts
    them. By default that of optax: 1e-4 for "adamw", 1e-3 for "lion", none for others."""
