"""`train`: prepares model, data and step, and runs the loop of `jaxonnx.training._loop`."""

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
    """Train a model on data; return the trained model and the history of the run.

    A training step is one compiled program. BatchNormalization and Dropout run in training mode,
    and running statistics are updated.

    >>> import numpy as np, optax
    >>> from jaxonnx import demo
    >>> x, y = np.zeros((8, 1, 8, 8), np.float32), np.arange(8)
    >>> loss = "softmax_cross_entropy_with_integer_labels"
    >>> result = train(demo.model(), (x, y), loss=loss, optimizer=optax.sgd(0.1), trainable="14.*")
    >>> sorted(name for name in result.model.params if result.changes[name])
    ['14.bias', '14.weight']

    Arguments by topic:

    * loss: loss, optimizer, learning_rate;
    * model: head, trainable, lora, statistics, dropout, sparsity, quantize;
    * step: metrics, class_weights, seed, accumulate, ema, precision, master, remat, mesh, sharding,
      nan;
    * data: batch_size, fixed, batching, pad, length_buckets, preprocess;
    * run: epochs, validation, augment, patience, monitor, checkpoint_dir, checkpoint_every, resume,
      on_log, samples, progress.

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts. It is not changed.
      data: inputs with targets, in one of these forms. All but iterables are shuffled, in an order
        that depends only on `seed` and the epoch.

        * Arrays: `(x, y)`, where `x` is an array, a tuple of arrays, or a dict by input name. Or
          one dict with the inputs by name ("x" for a single input) and the targets under another
          name, such as "y"; several targets become a dict.
        * Weighted examples: `(x, y, weight)`, or a dict with "weight" besides other targets. Losses
          and metrics are weighted, and losses are divided by the sum of the weights.
        * A file: an .npz file with such arrays, or a .jsonl file with one object of these names per
          line.
        * A Hugging Face Dataset. It is read into memory.
        * A folder of images: one folder per class. The index of the class is the target.
        * Texts: a .jsonl file, a list or a Dataset of objects with "text", with "prompt" and
          "completion", or with "messages" (dicts of "role" and "content"). They need a model from a
          folder with a tokenizer. Its tokenizer and chat template make tokens and labels
          (`preprocess`). The loss counts completions and the messages of the assistant. Rows may
          have "weight", and those of chats "tools", "documents" and "chat_template_kwargs" for the
          template; a message with "weight": 0 does not count.
        * An iterable of batches in the forms above (a Grain or torch DataLoader, tf.data, a list),
          or a function from the epoch to one. Batches are used in their order.

        A short batch is filled with other examples of the data. The loss ignores them; batch
        statistics include them.

        Inputs and targets may be sequences of unequal length along the second axis: lists of lists,
        lists or object arrays of arrays, ragged columns of a Dataset. The sequences of a batch are
        padded to one width (`pad`, `length_buckets`), and sequences of equal width are batched
        together. A mask input ("attention_mask", "input_mask" or "mask") that is missing from the
        data is 1 for tokens and 0 for padding. The batches of an iterable may differ in width; each
        width is compiled.
      **arguments: those of `jaxonnx.training.TrainArguments`, where each is documented.

    Returns:
      A `Result` with `.model` and `.history`; printing it shows what changed.

      A run may end before its last epoch: by `patience`, at a non-finite step (`nan`), because a
      checkpoint could not be written (a full disk), because memory ran out after the first step, or
      by Ctrl-C. The result then has the best weights that are available. `history.stopped` gives
      the reason, which weights these are, and the last checkpoint. All but `patience` also warn.

      Ctrl-C ends the run after the current step and writes a checkpoint. A second Ctrl-C ends it
      without a checkpoint, even while it waits for data. For this, `train` installs a SIGINT
      handler in the main thread until it returns. Before the first step, Ctrl-C raises
      KeyboardInterrupt.

    Raises:
      TrainingError: the data, labels, loss or settings do not fit the model (raised before
        compilation), or a later batch does not fit the earlier ones, or a step does not fit into
        memory.
      InputError: names, regular expressions or `sharding` do not fit the model or the mesh.
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
            net = read_whole_sequences(net, settings.loss, data)
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
