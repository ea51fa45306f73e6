"""`train`: documentation and assembly; `jaxonnx.training._loop` has the loop."""

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from jax.sharding import Mesh
from onnx import ModelProto

from jaxonnx._data.augmented import augment_examples, parse_augment
from jaxonnx._data.images.folder import Folder, find_folders, notes
from jaxonnx._mesh.processes import Processes
from jaxonnx._mesh.rules import Sharding
from jaxonnx._rewrite.head import Classes
from jaxonnx.errors import TrainingError
from jaxonnx.lora import Adapters, LoRA
from jaxonnx.model import Model, Statistics, Trainable, load
from jaxonnx.training._build_step import build_step, weights_of_classes
from jaxonnx.training._data import padding_of, sources
from jaxonnx.training._head import complete_settings, with_heads
from jaxonnx.training._loop import run
from jaxonnx.training._memory import fitting
from jaxonnx.training._mesh_step import automatic
from jaxonnx.training._report import Run
from jaxonnx.training._result import Result, changes
from jaxonnx.training._settings import Hook, Optimizer, Settings
from jaxonnx.training._step import target_names
from jaxonnx.training._stopping import Interrupt


def train(
    model: Model | str | os.PathLike | bytes | ModelProto,
    data: Any,
    *,
    loss: Any = None,
    optimizer: Optimizer | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
    pad: Mapping[str, Any] | None = None,
    length_buckets: int | Sequence[int] | None = None,
    seed: int = 0,
    validation: Any = None,
    preprocess: Mapping[str, Any] | None = None,
    augment: Any = None,
    class_weights: str | Mapping[Any, float] | None = None,
    metrics: Any = None,
    head: Classes | Mapping[str, Classes] | None = None,
    trainable: Trainable | None = None,
    lora: LoRA | Adapters | None = None,
    statistics: Statistics | None = None,
    dropout: float | Mapping[str, float] | None = None,
    sparsity: str | Mapping[str, Any] | None = None,
    accumulate: int = 1,
    ema: float | None = None,
    precision: Literal["bf16"] | None = None,
    remat: bool = False,
    mesh: Mesh | Literal["all"] | None = None,
    sharding: Sharding | None = None,
    nan: Literal["stop", "skip", "rollback"] = "stop",
    patience: int | None = None,
    monitor: str | tuple[str, str] | None = None,
    checkpoint_dir: str | os.PathLike | None = None,
    checkpoint_every: int | None = None,
    resume: bool | Literal["anyway"] = False,
    on_log: Hook | Sequence[Hook] | None = None,
    progress: bool | None = None,
) -> Result:
    """Train a model and return it with the history of the run.

    The whole step is one program, compiled once. BatchNormalization and Dropout behave as in
    training, and running statistics are renewed.

    >>> import numpy as np, optax
    >>> from jaxonnx import demo
    >>> x, y = np.zeros((8, 1, 8, 8), np.float32), np.arange(8)
    >>> loss = "softmax_cross_entropy_with_integer_labels"
    >>> result = train(demo.model(), (x, y), loss=loss, optimizer=optax.sgd(0.1), trainable="14.*")
    >>> sorted(name for name in result.model.params if result.changes[name])
    ['14.bias', '14.weight']

    Args:
      model: a Model, or anything that `jaxonnx.load` takes. It is not changed.
      data: `(x, y)`, a dict of arrays by input name with the targets beside them (one array under
        any other name, or several, which are then a dict; "x" and "y" will do for one input), the
        path of an .npz file with such arrays or of a .jsonl file (an object with these names in
        each line), or a Hugging Face Dataset, which is read in one piece; `x` is an array, a tuple
        of arrays, or a dict by input name. What each example weighs in losses and metrics is a
        third array, `(x, y, weight)`, or "weight" in a dict beside other targets: losses are
        divided by the sum of the weights. Or the path of a folder of pictures, with one folder in
        it for each class, whose number is the target. Or batches of such pairs, triples or dicts:
        an iterable (a Grain or torch DataLoader, tf.data, a list), or a function from the epoch to
        one. Data in one piece is shuffled in an order that depends on `seed` and the epoch only;
        iterables are taken as they come. A short batch is padded with other examples of the
        data, which the loss ignores but batch statistics see. Inputs and
        targets may be sequences of unequal length along the second axis: lists of lists, lists or
        object arrays of arrays, ragged columns of a dataset. The sequences of a batch are then
        padded to one width (`pad`, `length_buckets`), and those of one width are shuffled and
        batched together. A mask input ("attention_mask", "input_mask" or "mask") that is missing
        from the data is 1 for each token and 0 for padding. Batches of an iterable may have several
        widths, too; a program is compiled for each.
      loss: a loss of `optax.losses`, by name or itself, "absolute_error", "causal_lm" (each token
        is predicted from those before it; the targets may be left out: they are then the input of
        tokens, without padding), one of `jaxonnx.losses` (ONNX's, with weights of classes and
        labels to ignore), or a callable `(outputs, targets)` that gives a scalar or has the
        examples along its first axis. Losses are averaged over the examples of the batch; a scalar
        loss sees the fill of a short batch as well. For a model with several outputs a dict of
        losses by output name, or of pairs (loss, weight); the targets are then a dict by output
        name, too, and the losses are added. If the file ends in the Softmax, LogSoftmax or Sigmoid
        that a named loss has inside, the loss takes the logits before it (`history.notes` says so);
        the saved model keeps the ending, and metrics see its outputs. Loss and optimizer may be
        left out for a file that carries its training_info: then its own algorithm runs, from the
        state and update count in the file (the fill of a short batch counts), and the resulting
        model carries them on. All that follows applies to it but what changes the network or the
        update (`trainable` to `precision`, `remat`), and `nan` sees a gradient in the variables
        that it makes infinite.
      optimizer: any optax transformation, such as `jaxonnx.training.optimizer` makes with a
        schedule; or a function `lambda steps: ...` to one, of the number of updates in the run.
      batch_size: of data in one piece; 32 if not given, or what the model's inputs are fixed to.
      pad: the values that sequences are padded with, a dict by input name, like {"input_ids": 1}; 0
        by default. The name of the targets ("y", "targets" or "labels" for the only ones) sets
        theirs; labels are padded with the `ignore_index` of the loss, or -100.
      length_buckets: the widths that sequences are padded to, like (32, 64, 128), or one: a batch
        has the narrowest that its longest example fits into. With it, sequences of equal length
        are padded as well. By default powers of two from 8 on, of which the last is cut to the
        longest example of the data; or the length that the file is fixed to.
      seed: of the order of the examples and of random operators.
      validation: like `data`, or a share of data in one piece, like 0.2, whose choice depends on
        `seed` only; evaluated in inference mode after each epoch, in order.
      preprocess: how the pictures of a folder become inputs. The file's metadata says it, or a dict
        in its place, with any of "scale", "mean", "std" ((pixel * scale - mean) / std, for pixels
        from 0 to 255), "order" ("RGB" or "BGR"), "crop" (the share of a picture's sides that its
        middle has, 1 by default; 0.875 where 224 of 256 are cut), "size" ((height, width), for a
        network that takes any), "labels" (the classes in the order of the outputs; otherwise that
        of the file if it has them all, or the folders sorted by name). "augment" is for training
        only: "crop" cuts out random parts of the pictures, "flip" mirrors half of them; or a list
        of both, or a dict with the least share of the area and the share that is mirrored, like
        {"crop": 0.35, "flip": 0.5} (0.08 for "crop" if not given). They depend on `seed`, epoch and
        batch only. "workers" threads decode (as many as there are processors, up to 16), "memory"
        bounds the bytes of decoded pictures that are kept (2**30); others are decoded again in each
        epoch. Pictures that cannot be read are left out, with a warning. The saved file has all but
        these last three in its metadata, for `jaxonnx classify` or the next training.
      augment: a function `(key, x)` that returns what the inputs of a batch become (an array, or a
        tuple for several inputs), or `(key, batch)` for a `training.Batch` with its targets; other
        shapes are fine, other numbers of examples are not. It runs on the device, compiled, for
        `data` only. Its key depends on `seed`, epoch and batch only, so that a run that resumes
        draws the same. For a folder of pictures it takes what the network would, and may be
        "crop", "flip" and so on, as in `preprocess`.
      class_weights: what labels weigh in the loss, in training and validation, beside the weights
        of their examples: a dict by the name of the class (of the folder, the head or the file) or
        its number, 1 for those left out; or "balanced", which gives each class of data in one piece
        the same sum. It goes with losses of classes; metrics do not see it.
      metrics: what is computed on the validation data, as `validation_<name>` in the history: one
        or a list of "accuracy", "top_5" (or any number), "precision", "recall", "f1" (of classes:
        the mean over those that occur; for targets of yes and no like the outputs: the mean over
        the labels, of which one is the binary case), "mae", "mse", "r2" (the mean over the columns
        of the outputs), or functions `(outputs, targets)` that give a scalar or one value for each
        example; for several outputs a dict of these by output name. All but functions that give
        scalars are exact over the epoch. Yes is an output above 0.5, or above 0 where the loss
        takes logits and the file does not end in Sigmoid. By default the accuracy, for losses of
        labels.
      head: a new last layer, by the number of its classes or their names; for one of several a dict
        by output. It is drawn by `seed`, the Softmax or Sigmoid at the end is left out, and
        `history.notes` has what was replaced (`Model.with_head`). Loss and optimizer may be left
        out: then they are softmax cross entropy of integer labels, and Adam with a rate of 0.001
        for the head and 0.0001 for all else. With `lora` the head is trained in full.
      trainable: exactly these tensors are trained: names of tensors, modules or nodes, regular
        expressions or wildcards, or a predicate of name and value (`Model.with_trainable`). They
        are the parameters of the resulting model. With `lora` they are trained beside the adapters.
      lora: a `jaxonnx.LoRA`: only low-rank adapters of weights are trained. The resulting model has
        them merged into its weights; `.lora` of the result holds them alone, to be saved as a small
        file (`Adapters.save`), or passed here again to continue training them.
      statistics: "batch": BatchNormalization uses those of the batch and renews the running ones,
        the default; "frozen": it uses the running ones and keeps them (`Model.with_statistics`).
      dropout: the ratio of all Dropout nodes; or ratios by value, node or module, behind which
        Dropout is put if an exporter left none (`Model.with_dropout`).
      sparsity: "2:4", or options of `sparse.three_phase` whose phases are in epochs. By default a
        third of the epochs is dense, half have a dynamic mask, and the rest a fixed one. Embeddings
        and grouped convolutions stay dense. The saved model records what is sparse
        (`Model.sparsity`). With `products="cusparselt"` among the options, forward and backward
        products use the sparse tensor cores of an NVIDIA GPU once the mask is fixed (the extra
        `sparse-cuda`; `precision="bf16"`).
      accumulate: batches whose mean gradient makes one update (`optax.MultiSteps`); groups go on
        across epochs, and one that is not full at the end of the run makes no update. A step of the
        history is a batch, and so is one of the schedule of `sparsity`, whose phases stay whole
        epochs.
      ema: between 0 and 1, like 0.999: the share of itself that a moving average of the parameters
        keeps at each update. The average, which starts from the given weights, is what is
        validated and what the resulting model has; running statistics are those of training.
        With `sparsity` it is taken under the mask of the moment.
      precision: "bf16" lets the matrix products and convolutions of the forward pass and of both
        gradients take their operands in bfloat16, which is fast on accelerators (not on CPUs).
        The weights and their updates, norms, softmaxes and losses stay in float32, and so do
        validation and the resulting model.
      remat: keep few values for the gradient and compute the rest again (`Model.with_remat`), for
        networks whose activations do not fit into memory.
      mesh: a `jax.sharding.Mesh`, like `jax.make_mesh((4, 2), ("data", "model"))`, or "all" for all
        devices on one axis "data". Its axis "data" shares the examples of each batch, of which
        `batch_size` counts all; weights, statistics and the optimizer's state lie as `sharding`
        says, and so do those of the resulting model. The numbers are those of one device up to
        rounding, batch statistics those of the whole batch.
      sharding: with a mesh, "data": all weights on each device, the default; "fsdp": each tensor is
        split along the largest axis that the devices divide, small ones are not; "tensor": pairs of
        matrix products (perceptrons, attention) are split over the axis "model". Or a dict of
        rules, `{"blocks.*weight": P(None, "model"), ".*": "fsdp"}`, by name as in `trainable`, of
        which the first counts and without which a tensor is not split; or a function of name and
        shape. Shapes are those of the file. `model.shardings(mesh, sharding)` shows the outcome.
      nan: what happens when a loss, a gradient, or what a step would make of the statistics or of
        small weights is NaN or infinite. Such a step changes neither weights nor statistics; in a
        large weight a number that would become so stays as it was. "stop" ends the run; "skip" goes
        on with the next batch, up to 10 times in a row; "rollback" takes the weights, statistics
        and optimizer state that were last kept (at the end of an epoch, or as `checkpoint_every`
        says) and goes on with the batches after this one, of which up to 8 are lost, too, up to 3
        times in a row. `history.events` lists what happened, validation losses that are not finite
        among it. A run in which no step was taken, or that ends where it returned to more than
        once, says so like one that stops.
      patience: epochs without a better value of `monitor` after which the run ends. The result has
        the weights of the best epoch, whether it ends early or not. With `sparsity` only the
        epochs with the fixed mask count.
      monitor: a number of `history.epochs` that decides which epoch is the best: "validation_loss"
        if there is validation data, or else "loss". For metrics that are not jaxonnx's own a pair
        like `("validation_perplexity", "min")`.
      checkpoint_dir: a folder for checkpoints: parameters, statistics, optimizer, position in data
        and random numbers, history. They are written in the background and appear when they are
        complete; the last three and that of the best epoch are kept. The folder has the file of the
        model as well, so that `jaxonnx.load` opens it.
      checkpoint_every: steps between checkpoints, which may fall inside an epoch; the best epoch
        and the end of the run have one as well. By default each epoch has one.
      resume: continue from the newest checkpoint that can be read, if there is one. The weights
        are then bit for bit those of the uninterrupted run, wherever it was cut off. Parameters,
        the structure of the optimizer's state, and data in one piece (the number, types and a
        checksum of the examples) must be the same; "anyway" takes other data, too. Iterables
        cannot be checked: they must give the same batches, from the first of their epoch on.
      on_log: called as `on_log(step, metrics)` with the "loss" of each step (and the "rate", where
        `history.rates` has it), some steps after it was started (the device is never waited for),
        and with the numbers of each epoch, as in `history.epochs`; or a list of such functions.
        `jaxonnx.loggers` has some that write files. Those with a method `close` are closed at
        the end.
      progress: show a progress bar; by default where the output is a terminal or a notebook, and a
        line every ten seconds where it is neither.

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
    settings = Settings.of(locals())
    with (
        Processes(settings.mesh) as together,
        automatic(settings.mesh),
        fitting(settings),
        Interrupt() as interrupt,
    ):
        net = with_heads(model if isinstance(model, Model) else load(model, mesh=mesh), settings)
        function, preprocess = parse_augment(augment, preprocess, data)
        data, validation, net = find_folders(data, validation, net, preprocess)
        padding = padding_of(pad, length_buckets, loss)
        names = target_names(net)
        examples, held_out = sources(data, validation, net.inputs, batch_size, seed, padding, names)
        settings = replace(settings, class_weights=weights_of_classes(net, settings, examples))
        examples = augment_examples(examples, function, seed)
        if metrics is not None and held_out is None:
            raise TrainingError("metrics are computed on validation data: pass validation= as well")
        one = build_step(net, settings, epochs, examples.steps)
        trained, history = run(one, examples, held_out, settings, interrupt, together)
        trained = together.gather(trained)
        history.notes += notes(data, validation)
        if isinstance(data, Folder):
            data.settings.kept.release()  # the result refers to what is held out
        if history.stopped and not history.early:
            warnings.warn(history.stopped, stacklevel=2)
        made = Run(complete_settings(net, settings)[0], held_out)
        if lora is None:
            return Result(trained, history, _changes(one.model, trained), run=made)
        adapters, trained = Adapters.of(trained), trained.merge_adapters()
        changed = _changes(
            one.model.merge_adapters(), trained, {*adapters.layouts, *adapters.values}
        )
        return Result(trained, history, changed, adapters, made)


def _changes(before: Model, after: Model, names: Collection[str] | None = None) -> dict[str, float]:
    """Return the changes of all parameters and statistics, or of those named."""
    tensors = {**after.params, **after.state}
    shown = {n: v for n, v in tensors.items() if names is None or n in names}
    return changes({**before.state, **before.params}, shown)
