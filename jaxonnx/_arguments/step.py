"""What one step computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxonnx._arguments.declare import Argument
from jaxonnx._arguments.model import ModelArguments

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxonnx._mesh.rules import Sharding

NAN_POLICIES = ("stop", "skip", "rollback")


class StepArguments(ModelArguments, total=False):
    """What one step computes."""

    metrics: Annotated[Any, Argument(form="names")]
    """Metrics of the validation data: accuracy, f1, iou, mae, r2, perplexity and others.

    "accuracy", "top_5" (with any number), "precision", "recall", "f1", "iou", "dice",
    "perplexity", "mae", "mse", "r2": one or a list; each becomes `validation_<name>` in the
    history. "perplexity" is exp of the mean negative log probability of the labels, as of the next
    tokens of "causal_lm". "precision", "recall", "f1", "iou" (intersection over union, as of the
    pixels of a segmentation) and "dice" are means over the classes that occur; for binary targets
    shaped like the outputs, means over the labels, of which one is the binary case. "mae", "mse"
    and "r2" are means over the columns of the outputs. A function `(outputs, targets)` returns a
    scalar or one value for each example. For several outputs, pass a dict by output name. All but
    functions that return scalars are exact over the epoch. A binary output is true above 0.5, or
    above 0 where the loss takes logits and the file does not end in Sigmoid. By default the
    accuracy, for losses of labels."""
    class_weights: Annotated[
        str | Mapping[Any, float] | None, Argument(form="class_weights", needs_loss=True)
    ]
    """The weight of each class in the loss, by name or number; or "balanced".

    It applies in training and validation, beside the weights of examples. Classes that are left
    out weigh 1; "balanced" gives each class of data in one piece the same sum. Only losses of
    classes take it; metrics do not see it."""
    seed: Annotated[int, Argument(0, "count", resume=True)]
    """The seed of the order of the examples and of random operators."""
    accumulate: Annotated[int, Argument(1, "count", resume=True, needs_loss=True)]
    """The number of batches whose mean gradient makes one update.

    Groups (`optax.MultiSteps`) continue across epochs, and an incomplete one at the end of the run
    makes no update. A step of the history is a batch, and so is a step of the schedule of
    `sparsity`, whose phases stay whole epochs."""
    ema: Annotated[float | None, Argument(form="real", resume=True, needs_loss=True)]
    """The decay of a moving average of the parameters, between 0 and 1, like 0.999.

    The average starts from the given weights. It is what is validated and what the resulting
    model has; running statistics are those of training. With `sparsity` it is taken under the
    present mask."""
    precision: Annotated[
        Literal["bf16", "fp16"] | None, Argument(form="precision", resume=True, needs_loss=True)
    ]
    """"bf16" or "fp16": operands of matrix products and convolutions have 16 bits.

    This holds for the forward pass and both gradients, and is fast on accelerators (not on
    CPUs). The weights and their updates, norms, softmaxes and losses stay in float32, and so do
    validation and the resulting model. With "fp16" the loss is scaled while its gradient is taken:
    by 2**15 at first, by half as much after each gradient that overflows (whose step is not taken
    and is not an event), by twice as much after 2000 steps without. It is for float16 files, whose
    small gradients are zero otherwise, and for hardware without bfloat16."""
    master: Annotated[bool, Argument(True, resume=True)]
    """Train float16 and bfloat16 parameters as float32 master weights.

    The optimizer, the average of `ema` and checkpoints have float32 arrays (with Adam 12 bytes a
    parameter instead of 6), the model computes with the rounded weights, and the resulting model
    has the types of the file, rounded once. With False, updates are added to the 16-bit numbers
    themselves: most are lost to rounding, and an epsilon of 1e-8 is zero in float16."""
    remat: Annotated[bool, Argument(False, "switch", needs_loss=True)]
    """Keep few values for the gradient and compute the others again.

    For networks whose activations do not fit into memory (`Model.with_remat`)."""
    mesh: Annotated[
        Mesh | Literal["all"] | None,
        Argument(form="mesh", words="Train on all devices, or on axes with so many of them"),
    ]
    """The devices: "all" of them on one axis "data", or a `jax.sharding.Mesh`.

    The axis "data" splits the examples of each batch, of which `batch_size` counts all.
    Weights, statistics and optimizer state are placed as `sharding` says, and so are those of
    the resulting model. The numbers are those of one device up to rounding, batch statistics
    those of the whole batch."""
    sharding: Annotated[
        Sharding | None,
        Argument(form="sharding", words="How a mesh holds the weights: data, fsdp or tensor"),
    ]
    """How a mesh holds the weights: "data", "fsdp" or "tensor"; or rules by name.

    "data": all weights on each device, the default. "fsdp": each tensor is split along the
    largest axis that the devices divide; small ones are not split. "tensor": pairs of matrix
    products (perceptrons, attention) are split over the axis "model". A dict of rules,
    `{"blocks.*weight": P(None, "model"), ".*": "fsdp"}`, names tensors as `trainable` does; the
    first match counts, and a tensor without one is not split. Or a function of name and shape.
    Shapes are those of the file. `model.shardings(mesh, sharding)` shows the outcome."""
    nan: Annotated[Literal["stop", "skip", "rollback"], Argument("stop", "nan_policy")]
    """What a step that is not finite does: "stop", "skip" or (in `train` only) "rollback".

    Such a step has a loss, a gradient, new statistics or new small weights that are NaN or
    infinite. It changes neither weights nor statistics; in a large weight, a number that would
    become non-finite keeps its value. "stop" ends the run. "skip" continues with the next
    batch, up to 10 times in a row. "rollback" restores the last snapshot (of the end of an
    epoch, or as `checkpoint_every` says) and continues with the batches after this one, of
    which up to 8 are lost, up to 3 times in a row. `history.events` lists what happened,
    validation losses that are not finite included. A run that took no step, or that ends where
    it was restored to more than once, says so like one that stops."""
