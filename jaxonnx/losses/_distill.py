"""Knowledge distillation: the loss against the outputs of another model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.batches import Batch
from jaxonnx._require import check_arguments, require, require_integer
from jaxonnx._rewrite.last_layer import ENDINGS, find_ending, normalizes
from jaxonnx.errors import TrainingError
from jaxonnx.losses._loss import Loss, check_classes, load_second, take_inputs
from jaxonnx.model import Model


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Distillation(Loss):
    """A loss of logits and of another model's, called with `(outputs, targets)`; see `distill`."""

    temperature: float
    soft: float
    ignore_index: int
    teacher: Any
    top: int | None
    next_token: bool
    class_axis: int | None
    name: str | None = "distill"
    logits_of: str | None = "Softmax"
    of_tokens = True

    def second(self, model: Model) -> Callable[[Batch], Any] | None:
        """Return a function that adds the teacher's outputs on a batch to its labels.

        Raises:
          TrainingError: the teacher has several outputs.
        """
        if self.teacher is None:
            return None
        what = "distill: the teacher"
        teacher = load_second(self, self.teacher, model, what)
        if len(teacher.outputs) != 1:
            raise TrainingError(
                f"distill: the teacher has {len(teacher.outputs)} outputs: choose that of the "
                "logits, with model.with_outputs(NAME)"
            )
        (output,) = teacher.outputs
        ending = find_ending(teacher.graph, output.name)
        if (
            ending is not None
            and ENDINGS[ending.op.name] == self.logits_of
            and normalizes(ending, self.class_axes, output.shape)
        ):
            teacher = teacher.with_outputs([ending.inputs[0]])

        shapes = [value.shape for value in (*teacher.outputs, *model.outputs)]

        @partial(jax.jit, static_argnums=3)
        def compute(params, state, inputs, labels):
            logits = teacher.apply(params, *inputs, state=state)
            axis = self.find_axis(logits.shape, labels)
            classes = [shape[axis] for shape in shapes if shape and len(shape) == logits.ndim]
            sizes = [size for size in classes if isinstance(size, int)]
            if len(sizes) == len(shapes) == 2:  # the shapes of the greatest logits do not tell
                _check_classes(*sizes)
            return self.shorten(logits, axis)

        def add(batch: Batch) -> Any:
            inputs = take_inputs(batch.inputs, model, teacher, what)
            labels = batch.targets.shape if hasattr(batch.targets, "shape") else None
            return compute(teacher.params, teacher.state, inputs, labels), batch.targets

        return add

    @property
    def class_axes(self) -> tuple[int, ...]:
        return (-1, 1) if self.class_axis is None else (self.class_axis,)

    def find_labels(self, targets: Any) -> Any:
        return targets[1] if isinstance(targets, tuple | list) else targets

    def check_labels(
        self, targets: Any, outputs: Any, what: str, names: Sequence[str] | None = None
    ) -> None:
        if self.soft == 1 or not (isinstance(targets, tuple | list) or self.teacher is not None):
            return
        labels = self.find_labels(targets)
        axis = self.find_axis(outputs.shape, labels.shape)
        check_classes(np.asarray(labels), outputs.shape, axis, self.ignore_index, what)

    def find_axis(self, logits: tuple[int, ...], labels: tuple[int, ...] | None) -> int:
        """Return the axis of the classes, 1 or -1, from the shapes of logits and of labels.

        Raises:
          TrainingError: these shapes do not fit, or leave it open.
        """
        axes = self.class_axes
        places = {a: (*logits[:a], *logits[a:][1:])[1:] for a in axes if len(logits) > 1}
        fitting = [a for a, shape in places.items() if labels is None or labels[1:] == shape]
        if not fitting:
            named = " or ".join(map(str, axes))
            raise TrainingError(
                f"distill needs logits with the classes on axis {named}, and labels with their "
                f"other axes; logits are {list(logits)}"
                + (f", and labels {list(labels)}" if labels is not None else "")
            )
        if len(fitting) > 1 and len(logits) > 3 and not self.next_token:
            raise TrainingError(
                f"distill: the classes of logits {list(logits)} may lie on axis 1 or on the last "
                "one: pass axis=1, as in images of ONNX, or axis=-1"
            )
        return fitting[0]

    def shorten(self, logits: jax.Array, axis: int) -> Any:
        """Select all logits of the teacher, or the greatest ones.

        Those are the logarithms of their probabilities, and their classes, both (N, ..., top).
        """
        if self.top is None or self.top >= logits.shape[axis]:
            return logits
        scores = jnp.moveaxis(logits, axis, -1).astype(jnp.float32) / self.temperature
        return jax.lax.top_k(jax.nn.log_softmax(scores), self.top)

    @property
    def denominator(self) -> str | None:
        return None

    def totals(self, outputs: Any, targets: Any, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, counts = self._add_up(outputs, targets)
        return jnp.where(weight > 0, values * weight, 0).sum(), (counts * weight).sum()

    def __call__(self, outputs: jax.Array, targets: Any) -> jax.Array:
        values, counts = self._add_up(outputs, targets)
        return values / jnp.maximum(counts, 1)

    def _add_up(self, outputs: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
        """Return the sum of each example's places that count, and their number, both (N,)."""
        teacher, labels = targets if isinstance(targets, tuple | list) else (targets, None)
        if not (hasattr(teacher, "astype") or isinstance(teacher, tuple | list)):
            raise TrainingError(
                "distill: targets must be the teacher's logits, or a pair of these and labels, got "
                f"{type(teacher).__name__}"
            )
        axis = self.find_axis(outputs.shape, None if labels is None else labels.shape)
        if not isinstance(teacher, tuple | list):
            if teacher.ndim != outputs.ndim:
                raise TrainingError(
                    f"distill: the teacher's logits are {list(teacher.shape)}, and the student's "
                    f"{list(outputs.shape)}"
                )
            teacher = jnp.moveaxis(teacher, axis, -1)
        outputs = jnp.moveaxis(outputs, axis, -1)
        values = self.temperature**2 * self._diverge(outputs, teacher)
        if labels is None:
            values = values.reshape(len(values), -1)
            return values.sum(1), jnp.full(len(values), values.shape[1], values.dtype)
        if self.next_token:
            last = jnp.full_like(labels[:, :1], self.ignore_index)
            labels = jnp.concatenate([labels[:, 1:], last], axis=1)
        counts = labels != self.ignore_index
        if self.soft < 1:
            if not jnp.issubdtype(labels.dtype, jnp.integer):
                raise TrainingError(
                    f"distill(soft={self.soft}) learns integer labels beside the teacher's logits; "
                    f"they are {labels.dtype}"
                )
            scores = jax.nn.log_softmax(outputs.astype(jnp.float32))
            chosen = jnp.where(counts, labels, 0)[..., None]
            learned = -jnp.take_along_axis(scores, chosen, -1)[..., 0]
            values = self.soft * values + (1 - self.soft) * learned
        values = jnp.where(counts, values, 0)
        values, counts = (x.reshape(len(x), -1).sum(1) for x in (values, counts))
        return values, counts

    def _diverge(self, outputs: jax.Array, teacher: Any) -> jax.Array:
        """Return KL(teacher || student) at each place, of the classes that the teacher has."""
        student = jax.nn.log_softmax(outputs.astype(jnp.float32) / self.temperature)
        if isinstance(teacher, tuple | list):
            teacher, classes = teacher
            student = jnp.take_along_axis(student, classes, -1)
            # all other classes together are one more
            rest, others = (jnp.maximum(1 - jnp.exp(x).sum(-1), 1e-7) for x in (teacher, student))
            more = rest * (jnp.log(rest) - jnp.log(others))
        else:
            _check_classes(teacher.shape[-1], outputs.shape[-1])
            teacher = jax.nn.log_softmax(teacher.astype(jnp.float32) / self.temperature)
            more = 0.0
        return (jnp.exp(teacher) * (teacher - student)).sum(-1) + more


def _check_classes(teacher: int, student: int) -> None:
    if teacher != student:
        raise TrainingError(
            f"distill: the teacher has {teacher} classes, the student {student}: they must be the "
            "same"
        )


def distill(
    *,
    temperature: float = 2.0,
    soft: float = 1.0,
    ignore_index: int = -100,
    teacher: Any = None,
    top: int | None = None,
    next_token: bool = False,
    axis: int | None = None,
) -> Distillation:
    """Return the loss of a model that learns the outputs of another one.

    It is `temperature ** 2` times the divergence KL(teacher || student) of the softmaxes of logits
    (N, ..., classes) or (N, classes, ...) divided by the temperature, called one mean for each
    example. `train` and
    `evaluate` take the mean over all places that count, as of `causal_lm`. Hinton, Vinyals and
    Dean, "Distilling the Knowledge in a Neural Network", 2015 (arXiv:1503.02531).

    With `teacher`, `train` evaluates that model on each batch, and data has labels as usual. It may
    be the loss of one of several outputs: `loss={"logits": ..., "distilled": distill(...)}`, with
    labels for each. If the model or the teacher ends in Softmax or LogSoftmax, its logits are those
    before. Without `teacher`, targets are the teacher's logits; or a pair of these and labels (N,
    ...). Labels of `ignore_index` mark places that do not count, and the others are learned as well
    if `soft` is below 1.

    >>> loss = distill(temperature=1.0)
    >>> print(loss(jnp.zeros((1, 2)), jnp.log(jnp.array([[0.25, 0.75]]))).round(4))
    [0.1308]

    Args:
      temperature: above 0.
      soft: the share of the divergence, from 0 to 1; the rest is cross entropy of the labels.
      ignore_index: the label of places that do not count.
      teacher: a Model, or anything that `jaxonnx.load` accepts, with the inputs and classes of the
        model that is trained.
      top: the number of the teacher's classes that are compared at each place, those of the
        greatest probability. All others together count as one class. It is for large vocabularies:
        the memory of a batch of logits is then that of the student's alone, and the divergence a
        lower bound of that of all classes.
      next_token: labels are tokens, and those at each place are scored by the logits at the place
        before it, as in `causal_lm`. Otherwise labels of tokens are those of the next place.
      axis: of the classes: 1, as images have it in ONNX, or -1. By default the shape of the labels
        tells, and where both fit, or without labels, it is the last one; for logits of more than
        three axes it must be passed then.

    Raises:
      TrainingError: an argument is out of its range.
    """
    check_arguments(distill, locals(), TrainingError)
    if not temperature > 0 or not 0 <= soft <= 1:
        raise TrainingError(
            f"distill: temperature is above 0 and soft from 0 to 1; they are {temperature}, {soft}"
        )
    if top is not None:
        require_integer("distill: top", top, error=TrainingError)
        require(
            "distill: top", top, teacher is not None, "left out without teacher=", TrainingError
        )
    require("distill: axis", axis, axis in (None, 1, -1), "1, -1 or None", TrainingError)
    return Distillation(
        temperature=temperature,
        soft=soft,
        ignore_index=ignore_index,
        teacher=teacher,
        top=top,
        next_token=next_token,
        class_axis=axis,
    )
