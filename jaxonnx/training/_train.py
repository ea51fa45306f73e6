"""`train`: fit model and data to each other, build the step, and run the loop."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from onnx import ModelProto

from jaxonnx._arguments import check_names, documented
from jaxonnx._data.augment import augment_examples
from jaxonnx._data.batches import SERVES_ONE_EPOCH, Examples
from jaxonnx._display import format_count
from jaxonnx._mesh.processes import Processes
from jaxonnx.errors import TrainingError, warn
from jaxonnx.model import Model, as_model
from jaxonnx.training._data import DataSources, choose_loss, fit_to_data, open_data, read_data
from jaxonnx.training._loop.memory import explain_memory_errors
from jaxonnx.training._loop.run import run
from jaxonnx.training._loop.stopping import Interrupt
from jaxonnx.training._objective.needs import complete_batches
from jaxonnx.training._result import Result, to_result
from jaxonnx.training._settings import Settings
from jaxonnx.training._settings.mesh import automatic
from jaxonnx.training._settings.order import TrainArguments
from jaxonnx.training._settings.parameters import with_heads
from jaxonnx.training._step import Step
from jaxonnx.training._step.build import build_step


@documented(TrainArguments)
def train(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
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

    * loss: loss, optimizer, learning_rate, schedule, warmup, clip, weight_decay;
    * model: head, trainable, lora, statistics, dropout, neftune, sparsity, quantize;
    * step: metrics, class_weights, label_smoothing, seed, accumulate, ema, precision, master,
      remat, mesh, sharding, nan;
    * data: batch_size, fixed, batching, pad, length_buckets, columns, preprocess;
    * run: epochs, steps_per_epoch, max_steps, validation, validate_every, validate_first, augment,
      patience, min_improvement, monitor, checkpoint_dir, checkpoint_every, keep_best, resume,
      check, on_log, samples, progress.

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts. It is not changed.
      data: inputs with targets, of one of these kinds. All but iterables are shuffled, in an order
        that depends only on `seed` and the epoch.

        * Arrays: `(x, y)`, where `x` is an array, a tuple of arrays, or a dict by input name. Or
          one dict with the inputs by name ("x" for a single input) and the targets under another
          name, such as "y"; several targets become a dict.
        * Weighted examples: `(x, y, weight)`, or a dict with "weight" besides other targets. Losses
          and metrics are weighted, and losses are divided by the sum of the weights.
        * A file: an .npz file with such arrays, or a .jsonl, .json, .csv, .tsv or .parquet file
          with these names as columns. `columns` renames them.
        * A Hugging Face Dataset, which is read into memory. Of a DatasetDict the split "train", and
          "validation" unless `validation` is passed. An IterableDataset is read as it is needed,
          and shuffled through a buffer of 1,024 rows; if it has no end, pass `steps_per_epoch`.
        * A folder of images: one folder per class. The index of the class is the target.
        * Texts: a file, a list, a Dataset or an iterator of rows with "text", with "prompt" and
          "completion", with "messages" (dicts of "role" and "content"), with "conversations" (dicts
          of "from" and "value"), with "instruction", "input" and "output", or for a loss of pairs
          with "prompt", "chosen" and "rejected". They need a model from a folder with a tokenizer.
          Its tokenizer and chat template make tokens and labels
          (`preprocess`). The loss counts completions and the messages of the assistant. Rows may
          have "weight", and those of chats "tools", "documents" and "chat_template_kwargs" for the
          template; a message with "weight": 0 does not count. For a model with one row of outputs
          for each text: rows with "text" (or "sentence"), or with the texts of a pair ("text" and
          "text_pair", "sentence1" and "sentence2", "premise" and "hypothesis", "question" and
          "answer", "query" and "passage", ...), and "label", the number or name of a class, a
          number, or a list of numbers.
        * An iterable of batches in the forms above (a Grain or torch DataLoader, tf.data, a list),
          or a function from the epoch to one. Batches are used in their order.
        * Any other kind of data, once `jaxonnx.training.register_data` has it.

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
        Processes(settings.mesh) as processes,
        automatic(settings.mesh),
        explain_memory_errors(settings),
        Interrupt() as interrupt,
    ):
        plan = prepare_run(model, data, settings)
        trained, history = run(
            plan.step, plan.sources[0], plan.sources[1], plan.settings, interrupt, processes
        )
        history.notes += plan.notes
        if history.stopped and not history.early:
            warn(history.stopped)
        return to_result(
            *(plan.step, processes.gather(trained), history, plan.data.held_out), plan.description
        )


@dataclass(frozen=True)
class PreparedRun:
    """A step and its data.

    Attributes:
      step: the step.
      sources: the data as the step takes it: augmented, and with what a second model computes.
      settings: of the run, with the number of epochs.
      notes_on_model: for the history.
      data: the examples as the data has them, and notes on them.
      title: the name of the data.
    """

    step: Step
    sources: Sequence[Any]
    settings: Settings
    notes_on_model: Sequence[str]
    data: DataSources
    title: str

    @property
    def notes(self) -> list[str]:
        return [*self.notes_on_model, *self.data.notes]

    @property
    def description(self) -> str:
        """The name of the data and the number of its examples, as far as they are known."""
        examples, parts = self.data.examples, [self.title]
        if isinstance(examples, Examples):
            parts.append(format_count(len(examples.rows), "example"))
        return ", ".join(filter(None, parts))


def prepare_run(
    model: Model | str | os.PathLike[str] | bytes | ModelProto, data: Any, settings: Settings
) -> PreparedRun:
    """Read the data of a run, and build its step.

    Raises:
      TrainingError: data, loss or settings do not fit the model.
    """
    # 1. The model, with new heads, and the data, as its kind: no example is read yet.
    net = with_heads(as_model(model, settings.mesh), settings)
    opened = open_data(data, settings)
    settings, chosen = choose_loss(net, settings, opened.data)
    # 2. Each fitted to the other: the model to the first batch, then the examples to the model.
    net, notes = fit_to_data(net, settings, opened.data.first_batch)
    run_data = read_data(net, settings, opened)
    # 3. The step, for a run whose length is known now.
    settings = settings.with_length(run_data.examples.steps)
    fixed = settings.max_steps is None and settings.steps_per_epoch is None
    if fixed and run_data.examples.spent and settings.epochs != 1:
        raise TrainingError(f"epochs={settings.epochs}: {SERVES_ONE_EPOCH}, or epochs=1")
    settings = replace(settings, samples=opened.data.convert_samples(settings.samples))
    step = build_step(
        run_data.model,
        settings,
        settings.epochs,
        run_data.examples.steps,
        run_data.examples,
        held_out=run_data.held_out,
    )
    # 4. The batches as this step takes them.
    changed = augment_examples(run_data.examples, settings.augment, settings.seed)
    sources = [changed, run_data.held_out]
    sources = complete_batches(run_data.model, settings.loss, sources, settings.seed)
    notes = [*opened.notes, *chosen, *notes]
    return PreparedRun(step, sources, settings, notes, run_data, opened.data.title)
