"""The arguments of `train`, `step` and `evaluate`, each declared once.

A declaration has the type, the range, the default and the documentation of an argument, the form of
its flag, and whether a resumed run must have the same value. Signatures, `Settings`, TOML files,
flags and the reference are made from these classes, and values are checked by them. Arguments that
change the plan of a step are declared where they do, in `jaxonnx.training._settings`. All of them
are read from their source: nothing of JAX is imported to show the help of the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

from jaxonnx._arguments.declare import (
    Argument,
    Declaration,
    check_names,
    documented,
    list_arguments,
)

if TYPE_CHECKING:
    import optax

Optimizer: TypeAlias = (
    "optax.GradientTransformation | Callable[[int], optax.GradientTransformation]"
)
RATE = 1e-3
"""The learning rate of an optimizer that is chosen by name."""
BY_NAME = ("optimizer: str | None",)
NAMED = "goes with an optimizer by name, like optimizer='adam'; an optax transformation has its own"
Hook = Callable[[int, dict[str, Any]], None]


class DataArguments(TypedDict, total=False):
    """The arguments of batches: their size, fixed inputs, padding, images and texts."""

    batch_size: Annotated[int | None, Argument(form="N", least=1)]
    """The number of examples per batch; defaults to 32, or to the batch size that the file fixes.

    Batches of an iterable are taken as they are."""
    fixed: Annotated[
        Mapping[str, Any] | None,
        Argument(
            form="NAME=N...",
            expected="a dict by input name",
            resume=True,
            needs_loss=True,
            words="The value of an input that is the same for all examples",
        ),
    ]
    """Values of inputs that are the same for all examples, by input name, like {"fmin": 50.0}.

    They are used in training, validation and evaluation, and are not part of the data. If the first
    axis of an input is open, a value with one axis less is repeated for each example. The saved
    file keeps all its inputs (`Model.with_fixed_inputs`)."""
    batching: Annotated[
        Mapping[str, None] | None,
        Argument(
            form="NAME...",
            expected="a dict by input name, with None for each input without an axis of examples, "
            "like {'edges': None}",
            excludes=("mesh",),
            reason="passes inputs whole, and mesh= splits batches: leave one of the two out",
            resume=True,
            words="Inputs without an axis of examples, by name",
        ),
    ]
    """Inputs without an axis of examples, like {"nodes": None, "edges": None} for a graph.

    Each batch passes them whole. The other inputs and the targets have one row per example, and
    losses and weights count the rows of the targets. Batches of an iterable may differ in size: a
    program is compiled for each size, and no batch is filled up. With arrays, such an input is
    passed with every batch. If no input has an axis of examples, the arrays are one batch and are
    not shuffled."""
    pad: Annotated[
        Mapping[str, Any] | None,
        Argument(
            form="NAME=N...",
            resume=True,
            words="The value that pads an input (default: the padding token of the folder, or 0)",
        ),
    ]
    """Values that pad sequences of unequal length, by input name, like {"input_ids": 1}.

    The default for tokens is the padding token of the model's folder, else 0, and 0 for other
    inputs. If padding changes the outputs of a text, the data are refused; with a value for its
    tokens here, this is a warning. Targets have an entry of their own, by their name ("y",
    "targets" or "labels" if the data has one of these). Labels are padded with the `ignore_index`
    of the loss by default, or with -100."""
    length_buckets: Annotated[
        int | Sequence[int] | None,
        Argument(
            form="N,...",
            expected="a width or several, like (32, 64, 128)",
            resume=True,
            words="The widths that sequences are padded to",
        ),
    ]
    """Widths to pad sequences to, like (32, 64, 128), or one width.

    A batch is padded to the narrowest width that holds its longest example. With this argument,
    sequences of equal length are padded as well. The default is the length that the file fixes, if
    it fixes one. Otherwise it is the powers of two from 8 on, the last of them cut to the longest
    example of the data."""
    columns: Annotated[
        Mapping[str, str] | None,
        Argument(
            form="NAME=NEW...",
            expected="a dict from the names in the data to new ones, like {'question': 'prompt'}",
            words="The new name of a column, or of a role of messages",
        ),
    ]
    """New names of columns by those in the data, like {"question": "prompt"}.

    For chats they also rename keys and roles of messages: {"dialog": "messages", "speaker": "role",
    "utterance": "content", "agent": "assistant"}."""
    preprocess: Annotated[Mapping[str, Any] | None, Argument()]
    """How images become inputs, or texts become tokens: a dict of the keys below.

    For images, these keys replace the preprocessing in the metadata of the file:

    * "scale", "mean", "std": an input is (pixel * scale - mean) / std, with pixels from 0 to 255.
    * "order": the order of the channels, "RGB" or "BGR".
    * "crop": the fraction of each side of the image that is kept, around its center. 1 by default;
      0.875 cuts 224 of 256 pixels.
    * "stretch": whether images are stretched to the aspect ratio of the input. By default they are
      cropped to it.
    * "filter": Pillow's filter for resizing: "bilinear" (the default), "bicubic", "lanczos", "box",
      "hamming" or "nearest". Images for random crops are resized bilinearly.
    * "size": (height, width), for a network that accepts any size.
    * "labels": the names of the classes, in the order of the outputs. The default is the names in
      the file if it has all of them, else the names of the folders, sorted.
    * "augment": random changes in training only. "crop" cuts out a random part, "flip" mirrors half
      of the images; or a list of both. A dict sets the least fraction of the area (0.08 by default)
      and the probability of mirroring, like {"crop": 0.35, "flip": 0.5}. The changes depend on
      `seed`, epoch and batch only.
    * "workers": the number of threads that decode; by default the number of processors, at most 16.
    * "memory": the bytes of decoded images to keep, 2**30 by default. Other images are decoded
      again in each epoch.

    Images that cannot be read are skipped, with a warning. The saved file has all keys but
    "augment", "workers" and "memory" in its metadata, for `jaxonnx classify` and later training.

    For texts:

    * "max_length": the maximum number of tokens per example. The default is 1024, or the number of
      positions of the model if that is smaller.
    * "long": "cut" truncates longer texts, "split" makes several examples of one, "skip" leaves
      them out, "refuse" raises.
      Parts of which the loss counts no token are left out. By default plain texts are split and
      others are cut; `history.notes` has the counts.
    * "loss": "completions" (the default) or "all": the tokens that the loss counts.
    * "pack": True joins texts to rows of at most "max_length" tokens. Texts in one row do not
      attend to each other. Raises if the file cannot express this."""


class BasicArguments(TypedDict, total=False):
    """Arguments that act in the objective, the storage and the step themselves."""

    metrics: Annotated[Any, Argument(form="NAME...")]
    """Metrics of the validation data: accuracy, f1, iou, mae, r2, perplexity and others.

    Pass one or a list; each becomes `validation_<name>` in the history. For several outputs, pass a
    dict by output name.

    * "accuracy", "top_5" (or another number).
    * "precision", "recall", "f1", "iou" (intersection over union), "dice": means over the classes
      that occur. For binary targets of the shape of the outputs, means over the labels. Labels may
      lack the axis of a single binary output.
    * "perplexity": exp of the mean negative log probability of the labels, or of the next tokens
      for "causal_lm".
    * "mae", "mse", "r2": means over the columns of the outputs.
    * A function `(outputs, targets)` that returns a scalar, or one value per example.

    A binary output is true above 0.5. If the loss takes logits and the file does not end in
    Sigmoid, it is true above 0. Beside a loss that is a function, labels of -100 do not count. All
    metrics are exact over the epoch, except for functions that return a scalar: these are averaged
    over the batches. They are NaN where an output that counts is NaN. The default is "accuracy" for
    losses of labels."""
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
    Losses are averaged over the examples of the batch. A scalar is computed without the examples
    that fill a short batch, at the price of one more program; it takes no weights of examples.

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
    only epochs in the last phase of the run count: with the fixed mask, or with masks that move to
    the end ("sr_ste", "s_ste", a dynamic phase without end)."""
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

    The weights are bit for bit those of an uninterrupted run. The parameters, the loss, the
    optimizer's settings and the structure of its state, and the data must be the same: the number,
    dtypes and a checksum of the examples are compared. "anyway" accepts other data. Iterables are
    not compared: they must yield the same batches, from the start of the epoch on."""
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


OPTIMIZERS = list_arguments(LossArguments)["optimizer"].choices
"""The optimizers that have a name."""
