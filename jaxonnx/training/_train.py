"""`train`: documentation and assembly; `jaxonnx.training._loop` has the loop."""

import os
import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Unpack

from onnx import ModelProto

from jaxonnx._arguments import TrainArguments, check_names, documented
from jaxonnx._data.augmented import augment_examples, parse_augment
from jaxonnx._data.images.folder import Folder, find_folders, notes
from jaxonnx._data.texts import packs_texts, read_texts
from jaxonnx._mesh.processes import Processes
from jaxonnx.errors import TrainingError
from jaxonnx.lora import Adapters
from jaxonnx.model import Model, load
from jaxonnx.quantization import prepare
from jaxonnx.training._batch_size import fit_to_batches, open_batch
from jaxonnx.training._build_step import build_step, weights_of_classes
from jaxonnx.training._data import padding_of, sources
from jaxonnx.training._head import complete_settings, with_heads
from jaxonnx.training._loop import run
from jaxonnx.training._memory import explain_memory_errors
from jaxonnx.training._mesh_step import automatic
from jaxonnx.training._report import Run
from jaxonnx.training._result import Result, changes
from jaxonnx.training._sequences import read_whole_sequences, take_packed_rows
from jaxonnx.training._settings import Settings
from jaxonnx.training._step import target_names
from jaxonnx.training._stopping import Interrupt


@documented(TrainArguments)
def train(
    model: Model | str | os.PathLike | bytes | ModelProto,
    data: Any,
    **arguments: Unpack[TrainArguments],
) -> Result:
    """Train a model and return it with the history of the run.

    The whole step is one program, compiled once. BatchNormalization and Dropout behave as in
    training, and running statistics are updated.

    >>> import numpy as np, optax
    >>> from jaxonnx import demo
    >>> x, y = np.zeros((8, 1, 8, 8), np.float32), np.arange(8)
    >>> loss = "softmax_cross_entropy_with_integer_labels"
    >>> result = train(demo.model(), (x, y), loss=loss, optimizer=optax.sgd(0.1), trainable="14.*")
    >>> sorted(name for name in result.model.params if result.changes[name])
    ['14.bias', '14.weight']

    The arguments, by what they concern:

    * the loss: loss, optimizer, learning_rate;
    * the model: head, trainable, lora, statistics, dropout, sparsity, quantize;
    * the step: metrics, class_weights, seed, accumulate, ema, precision, remat, mesh, sharding,
      nan;
    * the data: batch_size, fixed, batching, pad, length_buckets, preprocess;
    * the run: epochs, validation, augment, patience, monitor, checkpoint_dir, checkpoint_every,
      resume, on_log, progress.

    Args:
      model: a Model, or anything that `jaxonnx.load` takes. It is not changed.
      data: arrays, a file, a folder of images, or batches, with inputs and targets.

        Arrays are `(x, y)`, or a dict by input name with the targets beside them: one array under
        any other name, or several, which are then a dict; "x" and "y" will do for one input. `x` is
        an array, a tuple of arrays, or a dict by input name. A third array, `(x, y, weight)`, or
        "weight" in a dict beside other targets, weighs the examples in losses and metrics: losses
        are divided by the sum of the weights.

        Texts are a .jsonl file, a list or a Hugging Face Dataset of objects with "text", with
        "prompt" and "completion", or with "messages" (dicts of "role" and "content"). The tokenizer
        and the chat template of the folder that the model was loaded from make tokens and labels
        of them (`preprocess`); the loss is on completions and on what the assistant says.

        A file is an .npz file with such arrays, or a .jsonl file with an object of these names in
        each line. A Hugging Face Dataset is read in one piece. A folder of images has one folder
        for each class, whose number is the target.

        Batches are such pairs, triples or dicts: an iterable (a Grain or torch DataLoader, tf.data,
        a list), or a function from the epoch to one. Data in one piece is shuffled in an order that
        depends on `seed` and the epoch only; iterables are taken in their order. A short batch is
        filled with other examples of the data, which the loss ignores but batch statistics see.

        Inputs and targets may be sequences of unequal length along the second axis: lists of lists,
        lists or object arrays of arrays, ragged columns of a dataset. The sequences of a batch are
        padded to one width (`pad`, `length_buckets`), and those of one width are shuffled and
        batched together. A mask input ("attention_mask", "input_mask" or "mask") that is missing
        from the data is 1 for each token and 0 for padding. Batches of an iterable may have several
        widths, too; a program is compiled for each.
      **arguments: those of `jaxonnx.training.TrainArguments`, where each is documented.

    Returns:
      `.model` and `.history`; printing it says what changed. A run that ends before its last epoch
      gives the best that it has, says in `history.stopped` why, which weights these are and where
      the last checkpoint is, and warns (but not of `patience`). These are steps that are not
      finite, a checkpoint that could not be written (a full disk), memory that is not enough after
      steps were taken, and Ctrl-C, which ends the run after the present step, with a checkpoint;
      after a second Ctrl-C it ends without one, also where it waits for data. In the main thread
      `train` has a SIGINT handler of its own until it returns, for that; before the first step
      Ctrl-C is a KeyboardInterrupt, as usual.

    Raises:
      TrainingError: data, labels, loss or settings that do not fit, before anything is compiled;
        or a later batch that does not fit those before it; or memory is not enough for a step.
      InputError: names, expressions or `sharding` that do not fit the model or the mesh.
    """
    check_names("train", TrainArguments, arguments)
    settings = Settings(**arguments)
    with (
        Processes(settings.mesh) as together,
        automatic(settings.mesh),
        explain_memory_errors(settings),
        Interrupt() as interrupt,
    ):
        net = model if isinstance(model, Model) else load(model, mesh=settings.mesh)
        net, fitted = fit_to_batches(with_heads(net, settings), settings, data)
        net, opened = open_batch(net, settings)
        net = read_whole_sequences(net, settings.loss, data)
        augment, preprocess = parse_augment(settings.augment, settings.preprocess, data)
        if packed := packs_texts(data, preprocess):
            net = take_packed_rows(net)
        padding = padding_of(settings.pad, settings.length_buckets, settings.loss, net)
        given = data, settings.validation, net
        data, validation, padding, said = read_texts(*given, preprocess, padding)
        if data is given[0]:
            data, validation, net = find_folders(data, validation, net, preprocess)
        size, names = settings.batch_size, target_names(net)
        examples, held_out = sources(
            data, validation, net.inputs, size, settings.seed, padding, names
        )
        if settings.metrics is not None and held_out is None:
            raise TrainingError("metrics are computed on validation data: pass validation= as well")
        settings = replace(settings, class_weights=weights_of_classes(net, settings, examples))
        rounding: list[str] = []
        if settings.quantize is not None:
            net, *rounding = prepare(
                net, settings.quantize, examples, settings.epochs, examples.steps
            )
        examples = augment_examples(examples, augment, settings.seed)
        step = build_step(net, settings, settings.epochs, examples.steps)
        if packed and step.model.program.packing is None:
            raise TrainingError("preprocess={'pack': True} cannot be combined with quantize")
        trained, history = run(step, examples, held_out, settings, interrupt, together)
        trained = together.gather(trained)
        history.notes += [*fitted, *opened, *said, *notes(data, validation), *rounding]
        if isinstance(data, Folder):
            data.settings.decoded.release()  # the result refers to what is held out
        if history.stopped and not history.early:
            warnings.warn(history.stopped, stacklevel=2)
        record = Run(complete_settings(net, settings)[0], held_out)
        if settings.lora is None:
            return Result(trained, history, _changes(step.model, trained), run=record)
        adapters, before = Adapters.of(trained), step.model
        if not adapters.are_apart(before):
            trained, before = trained.merge_adapters(), before.merge_adapters()
        changed = _changes(before, trained, {*adapters.layouts, *adapters.values})
        return Result(trained, history, changed, adapters, record)


def _changes(before: Model, after: Model, names: Collection[str] | None = None) -> dict[str, float]:
    """Return the changes of all parameters and statistics, or of those named."""
    old, tensors = {**before.state, **before.params}, {**after.params, **after.state}
    shown = {n: v for n, v in tensors.items() if n in old and (names is None or n in names)}
    return changes(old, shown)
