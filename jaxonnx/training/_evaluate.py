"""`evaluate`: the loss and metrics of a model over a data set."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import jax
import numpy as np
from onnx import ModelProto

from jaxonnx._arguments import DataArguments, check_names, documented
from jaxonnx._data import images
from jaxonnx._data.batches import Source, drop_fill, prefetch
from jaxonnx._data.inputs_and_targets import is_zero_or_one
from jaxonnx._data.kinds import open_data
from jaxonnx._display import track_batches
from jaxonnx._require import check_arguments
from jaxonnx.errors import TrainingError
from jaxonnx.lowering import jit
from jaxonnx.model import Model, as_model
from jaxonnx.training._data import OpenedData, choose_loss, fit_to_evaluation, read_data
from jaxonnx.training._objective import Objective, find_objective
from jaxonnx.training._objective.needs import complete_batches
from jaxonnx.training._settings import Settings


@documented(DataArguments)
def evaluate(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    data: Any,
    *,
    metrics: Any = None,
    loss: Any = None,
    progress: bool | None = None,
    **arguments: Unpack[DataArguments],
) -> dict[str, Any]:
    """Compute the loss and metrics of a model over a data set, in inference mode.

    Values are exact over the whole data set. They are not means over batches, and the examples that
    fill a short last batch are not counted.

    >>> import numpy as np
    >>> from jaxonnx import demo
    >>> data = np.zeros((10, 1, 8, 8), np.float32), np.arange(10)
    >>> evaluate(demo.model(), data, metrics=["accuracy", "top_10"], batch_size=4)
    {'accuracy': 0.1..., 'top_10': 1.0}

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts.
      data: inputs with targets, in any form that `jaxonnx.train` accepts.
      metrics: as in `jaxonnx.train`, and these:

        * "roc_auc", "average_precision": the mean over the classes, each against all others, or
          over binary columns.
        * "confusion_matrix": a `jaxonnx.training.ConfusionMatrix`.
        * "per_class": precision, recall, F1 and support, a `jaxonnx.training.PerClass`.
        * "roc_curve", "precision_recall_curve": a `jaxonnx.training.Curves`.

        The tables and curves print as tables, have their arrays as attributes, and have `plot()`.
        Curves and areas keep the outputs of all examples in memory.
      loss: as in `jaxonnx.train`. Metrics use it to tell whether outputs are logits, and of classes
        or of binary labels.
      progress: whether to show a progress bar after two seconds; by default in terminals and
        notebooks.
      **arguments: those of `jaxonnx.training.DataArguments`, where each is documented.

    Returns:
      A dict with "loss" and the metrics by name; for a model with several outputs "<output>_loss"
      and "<output>_<metric>".

    Raises:
      TrainingError: neither loss nor metrics are given, or the data, labels, loss or metrics do not
        fit the model.
    """
    check_arguments(evaluate, locals())
    if loss is None and metrics is None:
        raise TrainingError("evaluate computes metrics=, like ['accuracy'], or loss=, or both")
    check_names("evaluate", DataArguments, arguments)
    settings = Settings(**arguments, loss=loss)
    opened = OpenedData(open_data(data, names=settings.columns))
    net = as_model(model)
    settings, _ = choose_loss(net, settings, opened.data)
    loss = settings.loss
    net = fit_to_evaluation(net, settings, opened.data.first_batch)
    net, examples, *_ = read_data(net, settings, opened, training=False)
    _, examples = complete_batches(net, loss, [None, examples], settings.seed, trains=False)
    goal = find_objective(net, loss, metrics)
    return evaluate_objective(goal, examples, images.preparation(net).labels, progress)


def evaluate_objective(
    goal: Objective,
    examples: Source,
    labels: Sequence[str],
    progress: bool | None,
    model: Model | None = None,
) -> dict[str, Any]:
    """Return the values of an objective over all examples; tables get the names of classes.

    Args:
      model: evaluated in place of the objective's, whose graph it has.
    """
    model = goal.model if model is None else model
    sums_of, merged = goal.compiled_sums, jit(goal.merge_sums)
    fitting: set[Any] = set()

    def start_batches() -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the sums until each batch, and the predictions of the batch that are gathered."""
        sums: Any = None
        for number, batch in enumerate(
            track_batches(examples.batches(0), examples.steps, progress)
        ):
            outputs = model(*batch.inputs)
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs)
            plain = is_zero_or_one(batch.weight)
            sizes = str((shapes, jax.tree.map(np.shape, batch.targets), plain))
            if sizes not in fitting:
                goal.fit(shapes, batch.targets, batch.weight)
                fitting.add(sizes)
            if sums is None:
                # numbers in 64 bits
                sums = jax.tree.map(
                    lambda x: x.astype(np.int64 if x.dtype.kind in "iu" else np.float64),
                    goal.start(shapes, batch._replace(inputs=())),
                )
                if examples.targets is not None:
                    names = getattr(examples, "classes", None)
                    goal.check_labels(examples.targets, shapes, "data", names)
            if examples.targets is None:
                goal.check_labels(batch.targets, shapes, f"batch {number + 1} of the data")
            parts = shapes, batch.targets
            if not np.all(batch.weight) and any(goal.counts_fill(*parts, m) for m in (False, True)):
                batch = drop_fill(batch, model.inputs)
                outputs = model(*batch.inputs)
            new = sums_of(outputs, batch._replace(inputs=()))  # which may be strings
            with jax.enable_x64(True):  # single precision would stop counting at 2**24
                sums = merged(sums, {name: new[name] for name in sums})
            yield sums, {name: new[name] for name in goal.prediction_metrics}

    sums: Any = {}
    gathered: list[Any] = []
    for sums, predictions in prefetch(start_batches()):
        jax.block_until_ready(sums)
        gathered.append(jax.device_get(predictions))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *gathered)
    with jax.enable_x64(True):
        values = goal.values({**sums, **whole})
    return {n: x.with_names(labels) if hasattr(x, "with_names") else x for n, x in values.items()}
