"""The arguments of `train`, `step` and `evaluate`, each declared once.

The type, the default and the documentation of an argument stand here, with its form on the command
line and whether a resumed run must have the same value. Signatures, `Settings`, TOML files, flags
and the reference are made from these classes. Types are texts here, and nothing of JAX is imported:
the command line reads this to show its help.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypedDict,
    TypeVar,
)

if TYPE_CHECKING:
    import optax
    from jax.sharding import Mesh

    from jaxonnx._mesh.rules import Sharding
    from jaxonnx._rewrite.head import Classes
    from jaxonnx.lora import Adapters, LoRA
    from jaxonnx.model import Trainable
    from jaxonnx.quantization import Quantization

Hook = Callable[[int, dict[str, Any]], None]
Optimizer: TypeAlias = (
    "optax.GradientTransformation | Callable[[int], optax.GradientTransformation]"
)
OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "rmsprop", "sgd")
SCHEDULES = ("constant", "linear", "cosine")
RATE = 1e-3
"""The learning rate of an optimizer that is chosen by name."""
NAN_POLICIES = ("stop", "skip", "rollback")
F = TypeVar("F", bound=Callable[..., Any])


class Argument(NamedTuple):
    """What the annotation of an argument says besides its type."""

    default: Any = None
    form: str = ""
    """The form of its flag, a key of `jaxonnx.cli._flag_types.FORMS`; "" means it has no flag."""
    flag: str = ""
    """The name of its flag where that is another than its own."""
    resume: bool = False
    """Whether a run that resumes must have the same value."""
    words: str = ""
    """The help of its flag, where that takes less than the argument; else the first sentence."""
    needs_loss: bool = False
    """Whether it changes how a loss is computed or minimized: a file's own algorithm has none."""


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


class DataArguments(TypedDict, total=False):
    """How data becomes batches."""

    batch_size: Annotated[int | None, Argument(form="count")]
    """The number of examples in a batch; 32 by default, or what the model's inputs are fixed to.

    It applies to data in one piece; batches of an iterable are taken as they are."""
    fixed: Annotated[
        Mapping[str, Any] | None,
        Argument(
            form="fills",
            resume=True,
            needs_loss=True,
            words="The value of an input that is the same for all examples",
        ),
    ]
    """The values of inputs that are the same for all examples, by input name, like {"fmin": 50.0}.

    They hold in training, validation and evaluation, and are no part of the data. What has one axis
    less than the input, whose first axis is open, is repeated for each example. The saved file has
    all its inputs (`Model.with_fixed_inputs`)."""
    batching: Annotated[Mapping[str, None] | None, Argument(resume=True)]
    """The inputs that have no axis of examples, like {"nodes": None, "edges": None} for a graph.

    Each batch passes them whole, beside inputs and targets that have as many rows as there are
    examples; losses and weights count the rows of the targets. Batches of an iterable may have
    other sizes each, for which a program is compiled, and nothing fills them up. Of data in one
    piece such an input goes with every batch; if all inputs are such, the data are one batch in the
    order that they have."""
    pad: Annotated[
        Mapping[str, Any] | None,
        Argument(
            form="fills", resume=True, words="The value that pads short sequences of an input"
        ),
    ]
    """The values that pad sequences of unequal length, by input name, like {"input_ids": 1}.

    0 by default. The name of the targets ("y", "targets" or "labels" if there is one) sets
    theirs; labels are padded with the `ignore_index` of the loss, or -100."""
    length_buckets: Annotated[
        int | Sequence[int] | None,
        Argument(form="widths", resume=True, words="The widths that sequences are padded to"),
    ]
    """The widths that sequences are padded to, like (32, 64, 128), or one width.

    A batch has the narrowest width that its longest example fits into. With it, sequences of
    equal length are padded as well. By default powers of two from 8 on, of which the last is
    cut to the longest example of the data; or the length that the file is fixed to."""
    preprocess: Annotated[Mapping[str, Any] | None, Argument()]
    """How the images of a folder become inputs, or texts become tokens: a dict.

    Of images it stands in the place of the file's metadata.

    It has any of "scale", "mean", "std" ((pixel * scale - mean) / std, for pixels from 0 to
    255), "order" ("RGB" or "BGR"), "crop" (the share of an image's sides that its middle has, 1
    by default; 0.875 where 224 of 256 are cut), "size" ((height, width), for a network that
    takes any), and "labels" (the classes in the order of the outputs; otherwise those of the
    file if it has them all, or the folders sorted by name). "augment" is for training only:
    "crop" cuts out random parts of the images, "flip" mirrors half of them; or a list of both,
    or a dict with the least share of the area and the share that is mirrored, like {"crop":
    0.35, "flip": 0.5} (0.08 for "crop" by default). It depends on `seed`, epoch and batch only.
    "workers" threads decode (as many as there are processors, up to 16), and "memory" bounds
    the bytes of decoded images that are kept (2**30); others are decoded again in each epoch.
    Images that cannot be read are left out, with a warning. The saved file has all but
    "augment", "workers" and "memory" in its metadata, for `jaxonnx classify` and later
    training.

    Of texts it has any of "max_length" (tokens of an example at most, by default 1024, or the
    positions of the model if these are fewer), "long" (what longer texts are: "cut", "split" into
    several examples, or "refuse"; by default plain texts are split and others cut, and
    `history.notes` counts them), "loss" ("completions", the default, or "all" tokens) and "pack"
    (True joins texts to rows of at most "max_length" tokens, none of which sees another; a file
    that cannot express it is refused)."""


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
    """Prompts whose continuation is printed after each epoch: texts, or tokens.

    The most likely tokens, up to 40, by the weights of the epoch (`Model.generate`). Texts need a
    model of a folder with a tokenizer."""
    progress: Annotated[bool | None, Argument()]
    """Show a progress bar; by default in terminals and notebooks.

    Elsewhere the default is a line every ten seconds."""


class TrainArguments(LossArguments, StepArguments, DataArguments, RunArguments, total=False):
    """All arguments of `train` besides model and data."""


GROUPS = (LossArguments, ModelArguments, StepArguments, DataArguments, RunArguments)
"""The classes whose own keys are all arguments, in the order of signatures."""


class Declared(NamedTuple):
    """An argument as it was declared."""

    type: str
    argument: Argument
    text: str
    """Its documentation; the first sentence stands alone."""

    @property
    def summary(self) -> str:
        """What the help of its flag says."""
        return self.argument.words or self.text.partition("\n")[0].rstrip(".")


@functools.cache
def _texts() -> dict[str, dict[str, str]]:
    """Return the strings below the keys of each class of this module."""
    source = inspect.getsource(sys.modules[__name__])
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            own = texts.setdefault(node.name, {})
            for key, text in itertools.pairwise(node.body):
                if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
                    own[ast.unparse(key.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return texts


def declared(*groups: type) -> dict[str, Declared]:
    """Return the arguments of classes of this module, those of their bases included."""
    texts = {name: text for own in _texts().values() for name, text in own.items()}
    found = {}
    for group in groups:
        for name, hint in group.__annotations__.items():
            argument, kind = _parse(hint.__forward_arg__)
            found[name] = Declared(kind, argument, texts[name])
    return found


@functools.cache
def _parse(annotation: str) -> tuple[Argument, str]:
    """Return what `Annotated[type, Argument(...)]` says, and the text of the type."""
    parts = ast.parse(annotation, mode="eval").body
    assert isinstance(parts, ast.Subscript)
    assert isinstance(parts.slice, ast.Tuple)
    kind, argument = parts.slice.elts
    assert isinstance(argument, ast.Call)
    named = {part.arg or "": ast.literal_eval(part.value) for part in argument.keywords}
    return Argument(*map(ast.literal_eval, argument.args), **named), ast.unparse(kind)


def declared_in(group: type) -> dict[str, Declared]:
    """Return the arguments of a class without those of its bases."""
    return {name: one for name, one in declared(group).items() if name in _texts()[group.__name__]}


def check_names(function: str, group: type, arguments: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that a function does not have, as Python does.

    Raises:
      TypeError: with the name that is most like the wrong one.
    """
    names = [*declared(group)]
    for name in arguments:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def documented(*groups: type) -> Callable[[F], F]:
    """Give a function that takes `**arguments: Unpack[...]` their signature and documentation.

    In its docstring, the entry of `**arguments` becomes one for each argument. Static tools read
    the same from `Unpack`.
    """

    def document(function: F) -> F:
        arguments = declared(*groups)
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        named += [
            inspect.Parameter(name, kind, default=one.argument.default, annotation=one.type)
            for name, one in arguments.items()
        ]
        function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
        text = inspect.cleandoc(function.__doc__ or "")
        entries = [_entry(name, one) for name, one in arguments.items()]
        function.__doc__ = re.sub(r"  \*\*arguments: .*", lambda _: "\n".join(entries), text)
        return function

    return document


def _entry(name: str, one: Declared) -> str:
    """Return the entry of an argument below "Args:"."""
    text = f"{name}: {' '.join(one.text.split())}"
    return textwrap.fill(
        text, 96, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
