"""The arguments of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxonnx._arguments.declare import Argument
from jaxonnx._arguments.model import ModelArguments, OptimizerArguments

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxonnx._mesh.rules import Sharding


class StepArguments(OptimizerArguments, ModelArguments, total=False):
    """The arguments of one step: metrics, random seed, precision, devices, non-finite steps."""

    metrics: Annotated[Any, Argument(form="names")]
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
    class_weights: Annotated[
        str | Mapping[Any, float] | None,
        Argument(
            form="class_weights",
            expected="'balanced', or a dict from classes to weights",
            needs_loss=True,
        ),
    ]
    """The weight of each class in the loss, by name or index; or "balanced".

    Weights apply in training and validation, and multiply the weights of examples. Classes that are
    not listed have weight 1. "balanced" gives each class of the data the same total weight; it is
    not available for iterables. Only losses with class labels accept it. Metrics ignore it."""
    label_smoothing: Annotated[
        float | None, Argument(form="real", least=0, below=1, resume=True, needs_loss=True)
    ]
    """The share of each label that is spread over all classes alike, like 0.1.

    For cross entropies of classes and of tokens, in training and validation, as in PyTorch and
    transformers. With `class_weights`, each share counts with the weight of its own class. Labels
    that are ignored stay so."""
    seed: Annotated[int, Argument(0, form="count", least=0, most=0x7FFFFFFFFFFFFFFF, resume=True)]
    """The random seed: of the order of the examples, and of random operators."""
    accumulate: Annotated[int, Argument(1, form="count", least=1, resume=True, needs_loss=True)]
    """The number of batches whose gradients make one update.

    It is the update of one batch of all their rows: the gradients of the losses are summed, and
    divided once by what counts in all these batches (tokens, weights of examples and classes).
    The batches that are left at the end of an epoch or of the run make an update of their own, of
    all their rows, as in PyTorch Lightning and transformers: an epoch of 10 batches has three
    updates with `accumulate=4`. A step of the history is one batch, and so is a step of the
    schedule of `sparsity`, whose phases are whole epochs."""
    ema: Annotated[
        float | None,
        Argument(
            form="real",
            above=0,
            below=1,
            expected="a decay between 0 and 1, like 0.999",
            resume=True,
            needs_loss=True,
        ),
    ]
    """The decay of an exponential moving average of the parameters, like 0.999.

    It is between 0 and 1. The average starts at the initial weights, and a note in the history says
    if a run was too short to leave them. Validation, checkpoints and
    the resulting model have the average. Running statistics, which follow the weights that are
    trained, are recomputed for it from the training data (up to 200 batches) at the end of each
    epoch. So they are for the weights at which `optax.contrib.schedule_free`, `optax.lookahead` and
    `optax.contrib.sam` want the network evaluated; `statistics="batch"` keeps them. With
    `sparsity`, the average is masked with the current mask."""
    precision: Annotated[
        Literal["bf16", "fp16"] | None, Argument(form="choice", resume=True, needs_loss=True)
    ]
    """Compute matrix products and convolutions in 16 bits: "bf16" or "fp16".

    This applies to the forward pass and both gradients, and is fast on accelerators; "bf16" also on
    CPUs with AVX512_BF16, AMX or ARM's BF16, which leave in float32 what is not faster. Weights,
    updates, normalization, softmax and losses stay in float32, and so do validation and the
    resulting model. With "fp16" the loss is scaled: by 2**15 at first, by half as much after each
    gradient that overflows, by twice as much after 2000 steps without overflow. A step that
    overflows changes nothing and is not listed in `history.events`. Use "fp16" for float16 files,
    whose small gradients would be zero otherwise, and for hardware without bfloat16."""
    master: Annotated[bool, Argument(True, form="toggle", resume=True)]
    """Train float16 and bfloat16 parameters as float32 master weights.

    The optimizer state, the average of `ema` and checkpoints are then float32 (12 bytes per
    parameter with Adam instead of 6). The model computes with the rounded weights, and the
    resulting model has the dtypes of the file, rounded once. With False, updates are added to the
    16-bit parameters directly: most of them are lost to rounding, and an epsilon of 1e-8 is zero in
    float16."""
    remat: Annotated[bool, Argument(False, form="switch", needs_loss=True)]
    """Recompute most activations in the backward pass instead of storing them.

    For networks whose activations do not fit into memory (`Model.with_remat`)."""
    mesh: Annotated[
        Mesh | Literal["all"] | None,
        Argument(form="mesh", words="All devices, or the sizes of axes like data=4,model=2"),
    ]
    """The devices to train on: "all", or a `jax.sharding.Mesh`.

    "all" is a mesh with the one axis "data". The axis "data" splits the examples of each batch;
    `batch_size` is the total over all devices. Weights, statistics and optimizer state are placed
    according to `sharding`, also in the resulting model. Results equal those of one device up to
    rounding, and batch statistics are those of the whole batch."""
    sharding: Annotated[
        Sharding | None,
        Argument(
            form="sharding",
            needs=("mesh",),
            reason="says how tensors are split over a mesh, and there is none: pass mesh='all' for "
            "all devices, or a jax.sharding.Mesh",
            words="How weights are placed on the mesh: data, fsdp or tensor",
        ),
    ]
    """How weights are placed on the mesh: "data", "fsdp" or "tensor"; or rules by name.

    * "data" (the default): all weights on each device.
    * "fsdp": each tensor is split along its largest axis that the number of devices divides. Small
      tensors are not split.
    * "tensor": pairs of matrix products (MLPs, attention) are split over the axis "model".
    * A dict of rules like `{"blocks.*weight": P(None, "model"), ".*": "fsdp"}`. Names match as in
      `trainable`, the first match counts, and a tensor without a match is not split.
    * A function of the name and the shape in the file.

    `model.shardings(mesh, sharding)` shows the placement."""
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
