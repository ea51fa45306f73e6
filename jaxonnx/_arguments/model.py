"""The loss, the optimizer, and which weights are trained in which form."""

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
RATE = 1e-3
"""The learning rate of an optimizer that is chosen by name."""
BY_NAME = ("optimizer: str | None",)
NAMED = "goes with an optimizer by name, like optimizer='adam'; an optax transformation has its own"


class LossArguments(TypedDict, total=False):
    """The loss and the optimizer."""

    loss: Annotated[
        Any,
        Argument(
            form="text",
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
            form="name",
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
            form="real",
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
            form="name",
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
            form="real",
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
            form="real",
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
            form="real",
            least=0,
            needs=BY_NAME,
            reason=NAMED,
            needs_loss=True,
        ),
    ]
    """The coefficient of decoupled weight decay, in matrices, kernels and embeddings.

    Biases, scales of normalizations and other vectors do not decay, and `history.notes` counts
    them. By default that of optax: 1e-4 for "adamw", 1e-3 for "lion", none for others."""


class ModelArguments(TypedDict, total=False):
    """What is trained: a new head, the parameters, adapters, sparse or quantized weights."""

    head: Annotated[
        Classes | Mapping[str, Classes] | None,
        Argument(form="heads", words="Replace the last layer, with this number of classes"),
    ]
    """A new last layer: the number of classes, or their names.

    For one of several outputs, pass a dict by output name. The weights are drawn with `seed`, and a
    Softmax or Sigmoid at the end is removed (`Model.with_head`). `history.notes` lists what was
    replaced. The default loss is then softmax cross entropy with integer labels, the default
    optimizer Adam with a learning rate of 0.001 for the head and 0.0001 for the other parameters.
    With `lora`, all weights of the head are trained."""
    trainable: Annotated[
        Trainable | None,
        Argument(
            form="names",
            excludes=("lora: Adapters",),
            reason="cannot be combined with Adapters, which determine what is trained",
            needs_loss=True,
        ),
    ]
    """The tensors to train: names of tensors, modules or nodes, or regular expressions.

    Wildcards and predicates of name and value are accepted as well (`Model.with_trainable`). These
    tensors are the parameters of the resulting model. With `lora` they are trained in addition to
    the adapters."""
    lora: Annotated[
        LoRA | Adapters | None,
        Argument(
            form="rank",
            expected="a jaxonnx.LoRA, like LoRA(rank=8), or Adapters to continue with",
            excludes=("sparsity",),
            reason="cannot be combined with sparsity: merge the adapters into the model first, or "
            "leave one of the two out",
            needs_loss=True,
            words="Train adapters of this rank instead of the weights",
        ),
    ]
    """Train low-rank adapters instead of the weights: a `jaxonnx.LoRA`.

    The adapters of the resulting model are merged into its weights. `result.lora` has the adapters
    alone: save them with `Adapters.save`, or pass them here to continue training."""
    statistics: Annotated[
        Literal["batch", "frozen", "recompute"] | None,
        Argument(form="choice", needs_loss=True),
    ]
    """The statistics that BatchNormalization uses in training: "batch", "frozen" or "recompute".

    * "batch": those of the batch; the running statistics are updated.
    * "frozen": the running statistics, which stay as they are (`Model.with_statistics`).
    * "recompute": like "batch", and at the end of each epoch, before validation, the running
      statistics are recomputed from up to 200 batches of training data
      (`Model.recompute_statistics`).

    The default is "batch", and "recompute" at the ends of epochs up to step 5 / (1 - momentum),
    before which running averages have not converged. `history.notes` records this."""
    dropout: Annotated[float | Mapping[str, float] | None, Argument(form="ratios", needs_loss=True)]
    """The ratio of all Dropout nodes, or ratios by value, node or module.

    A ratio by name also inserts Dropout where an exporter removed it (`Model.with_dropout`)."""
    neftune: Annotated[float | None, Argument(form="real", least=0, resume=True, needs_loss=True)]
    """Add noise to the embeddings of tokens in training (NEFTune), like 5.0.

    It is uniform in +-`neftune` / sqrt(length * features), with the padded length of the batch, as
    in transformers and TRL. Jain et al., "NEFTune: Noisy Embeddings Improve Instruction
    Finetuning", 2023 (arXiv:2310.05914)."""
    sparsity: Annotated[
        str | Mapping[str, Any] | None,
        Argument(
            expected="a pattern like '2:4', or a dict of pattern, method and options",
            needs_loss=True,
        ),
    ]
    """Train sparse weights: "2:4", or a dict of options of `sparse.three_phase`.

    The lengths of phases are in epochs. By default a third of the epochs is dense, half have a
    dynamic mask, and the rest have a fixed mask. Other options:

    * "pattern": one pattern, or patterns by tensor, module or node, like `{"body": "2:4", "head":
      "1:4"}`.
    * "method": "three_phase", "sr_ste", "s_ste" or "one_shot", with the options of `sparse.sr_ste`,
      `sparse.s_ste` and `sparse.fixed_mask`.
    * "products": "sparse" skips the zeros in forward and backward products with sparse weights. It
      needs a CPU and float32, or an NVIDIA GPU, `precision="bf16"` and the extra `sparse-cuda`.

    Embeddings and grouped convolutions stay dense. The saved model records which weights are sparse
    (`Model.sparsity`)."""
    quantize: Annotated[
        str | Quantization | None,
        Argument(
            form="scheme",
            resume=True,
            needs_loss=True,
            words="Quantization-aware training: int8, int4, or fields of Quantization like "
            "weights=int4,block=32",
        ),
    ]
    """Quantization-aware training: "int8", "int4", ... or a `jaxonnx.Quantization`.

    Ranges are calibrated on the first batches of the data, as in `jaxonnx.quantize`. Then weights
    and scales are trained with the given loss, with straight-through gradients of the rounding.
    With `Quantization(learn="ranges")`, ranges follow the data instead; `Quantization(start=)`
    delays the rounding by some epochs. BatchNormalization is folded into convolutions first. The
    saved model has integer weights. A file that is already quantized is trained with its own scales
    and saved in its own form."""
