"""The loss, the optimizer, and what is trained of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

from jaxonnx._arguments.declare import Argument

if TYPE_CHECKING:
    import optax

    from jaxonnx._rewrite.head import Classes
    from jaxonnx.lora import Adapters, LoRA
    from jaxonnx.model import Trainable
    from jaxonnx.quantization import Quantization

Optimizer: TypeAlias = (
    "optax.GradientTransformation | Callable[[int], optax.GradientTransformation]"
)
OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "rmsprop", "sgd")
SCHEDULES = ("constant", "linear", "cosine")
RATE = 1e-3
"""The learning rate of an optimizer that is chosen by name."""


class LossArguments(TypedDict, total=False):
    """The loss and the optimizer."""

    loss: Annotated[
        Any,
        Argument(form="text", words="The name of a loss of optax or jaxonnx; that of class labels"),
    ]
    """The loss, by its name in optax or `jaxonnx.losses`; or a function.

    By default, for integer labels and one output, softmax cross entropy (`history.notes` says so).
    By name: a loss of `optax.losses`, "absolute_error", "causal_lm" (each token is predicted from
    those before it; without targets they are the input tokens, with padding ignored), "seq2seq_lm"
    (labels of an encoder-decoder, of which its decoder's input is made), or one of
    `jaxonnx.losses` (ONNX's, with class weights and labels to ignore). A function `(outputs,
    targets)` returns a scalar, or one value for each example along its first axis. Losses are
    averaged over the examples of the batch; a scalar also covers the examples that fill a short
    batch. For a model with several outputs, pass a dict of losses by output name, or of pairs
    (loss, weight); targets are then a dict by output name, too, and the losses are added. If the
    file ends in the Softmax, LogSoftmax or Sigmoid that a named loss contains, the loss takes the
    logits before it (`history.notes` says so); the saved model keeps that ending, and metrics see
    its outputs. Loss and optimizer may be left out for a file with `training_info`: its own
    algorithm then runs, from the state and the update count in the file, and the resulting model
    carries them on. Arguments that change the network or the update do not apply to it."""
    optimizer: Annotated[Optimizer | str | None, Argument()]
    """An optax transformation, its name, or a function `lambda steps: ...` that returns one.

    Names are "adam" (the default), "adamw", "adagrad", "lion", "rmsprop" and "sgd", whose rate is
    `learning_rate`. A function takes the number of updates of the run. `jaxonnx.training.optimizer`
    builds the usual chains, with schedules."""
    learning_rate: Annotated[float | None, Argument(needs_loss=True)]
    """The learning rate of an optimizer that is chosen by name, 0.001 by default."""


class ModelArguments(TypedDict, total=False):
    """What is trained of the model."""

    head: Annotated[
        Classes | Mapping[str, Classes] | None,
        Argument(form="heads", words="The number of classes of a new last layer"),
    ]
    """A new last layer for a number of classes, or for their names.

    For one of several outputs, pass a dict by output name. The weights are drawn with `seed`, a
    Softmax or Sigmoid at the end is left out, and `history.notes` has what was replaced
    (`Model.with_head`). Loss and optimizer may be left out: they are then softmax cross entropy
    with integer labels, and Adam with a rate of 0.001 for the head and 0.0001 for everything else.
    With `lora` the head is trained in full."""
    trainable: Annotated[Trainable | None, Argument(form="names", needs_loss=True)]
    """The tensors that are trained: names of tensors, modules or nodes, or regular expressions.

    Wildcards and predicates of name and value are taken, too (`Model.with_trainable`). These
    tensors are the parameters of the resulting model. With `lora` they are trained beside the
    adapters."""
    lora: Annotated[
        LoRA | Adapters | None,
        Argument(form="rank", needs_loss=True, words="The rank of adapters to train, not weights"),
    ]
    """The rank of adapters to train in place of the weights: a `jaxonnx.LoRA`.

    The resulting model has them merged into its weights. `.lora` of the result holds them
    alone, to be saved as a small file (`Adapters.save`), or to be passed here again to
    continue."""
    statistics: Annotated[
        Literal["batch", "frozen", "recompute"] | None,
        Argument(form="statistics", needs_loss=True),
    ]
    """The statistics of BatchNormalization: of the "batch", "frozen", or "recompute".

    With "batch" it uses those of the batch and updates the running ones, with "frozen" it uses the
    running ones and keeps them (`Model.with_statistics`). "recompute" is like "batch", and at the
    end of each epoch, before it is validated, the running statistics are computed anew from up to
    200 batches of the training data (`Model.recompute_statistics`). By default that is done while
    they cannot have settled, where the steps of the run are fewer than 5 / (1 - momentum);
    `history.notes` says so."""
    dropout: Annotated[float | Mapping[str, float] | None, Argument(form="ratios", needs_loss=True)]
    """The ratio of all Dropout nodes, or ratios by value, node or module.

    A ratio by name also inserts Dropout where an exporter removed it (`Model.with_dropout`)."""
    sparsity: Annotated[str | Mapping[str, Any] | None, Argument(needs_loss=True)]
    """Train sparse weights: "2:4", or options of `sparse.three_phase` with phases in epochs.

    By default a third of the epochs is dense, half have a dynamic mask, and the rest a fixed
    one. `pattern` may be patterns by tensor, module or node (`{"body": "2:4", "head": "1:4"}`),
    `method` "three_phase", "sr_ste", "s_ste" or "one_shot" (with the options of `sparse.sr_ste`,
    `sparse.s_ste` and `sparse.fixed_mask`). Embeddings and grouped convolutions stay dense. The
    saved model records what is sparse (`Model.sparsity`). With `products="sparse"` among the
    options, forward and backward products with sparse weights leave out their zeros: on CPU in
    float32, on NVIDIA GPUs with `precision="bf16"` and the extra `sparse-cuda`."""
    quantize: Annotated[
        str | Quantization | None,
        Argument(
            form="scheme",
            resume=True,
            needs_loss=True,
            words="Train through rounding: int8, int4, or fields of Quantization as "
            "weights=int4,block=32",
        ),
    ]
    """Train through the rounding of a quantized network: "int8", "int4", ... or a `Quantization`.

    Ranges are measured on the first batches of the data (`jaxonnx.quantize`), then weights and
    scales are trained with the loss of the task, through the rounding (straight-through gradients);
    or ranges follow the data (`learn="ranges"`), and rounding begins after some epochs (`start`).
    BatchNormalization is folded into convolutions first. The saved model has integer weights. A
    file that is quantized already is trained at its own scales and saved in its own form."""
