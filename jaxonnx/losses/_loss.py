"""A loss: its values, and its needs of the model, the data and each batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.batches import Batch
from jaxonnx._data.inputs_and_targets import count_examples, is_zero_or_one
from jaxonnx._data.ragged import IGNORED, with_derived
from jaxonnx._display import format_count
from jaxonnx._graph.values import Value
from jaxonnx._require import check_arguments, require
from jaxonnx.errors import Error, TrainingError, UnsupportedError
from jaxonnx.llm import label_tokens, take_next_logits, take_packed_rows
from jaxonnx.model import Model, as_model
from jaxonnx.views import PackedRows

_SHOWN = 8
_ROUNDING = 1e-3
"""How far rounded probabilities may lie outside of 0 ... 1."""

REGISTERED: "dict[str, Loss]" = {}
"""The losses that have a name, apart from optax's."""
ALSO_CALLED: dict[str, str] = {}
"""Names of losses elsewhere, in lower case and without "loss", by their names here."""

DeriveTargets = Callable[[Sequence[Any], Sequence[Value], str], Any]
"""`(inputs, values, what)`: the targets of inputs, for the model's inputs `values`; `what` is the
data, for errors. Inputs are arrays, or `Ragged` for sequences of unequal length."""
CompleteInput = Callable[[Any], tuple[Any, Any]]
"""A function of the labels that returns an input that data omits, and the labels to learn."""


class Loss:
    """A loss of `(outputs, targets)`, with the properties that `jaxonnx.train` computes it by.

    Called, it returns a scalar, or an array with the examples along its first axis. A function does
    as well, where nothing of the following differs. A subclass sets what does; `register` gives it
    a name. What is said of labels holds for targets that are such.
    """

    name: str | None = None
    """For errors, and for `train(..., loss=name)`."""
    takes: str = "targets of the shape of the outputs"
    """The targets, for errors."""

    # outputs and targets
    takes_targets: bool = True
    """Whether there are targets at all."""
    elementwise: bool = False
    """Whether outputs and targets are one array each: targets have a value for each output, or a
    label for all those along `class_axis`."""
    class_axis: int | None = None
    """The axis of the outputs that targets which are labels do not have."""
    one_hot: bool = False
    """Whether targets are distributions over the classes, on the last axis."""
    classes_last: bool = False
    """Whether targets with a number for each class have the classes on the last axis."""
    interval: tuple[float, float] | None = None
    """The least and the greatest number that targets may be."""
    binary: bool = False
    """Whether targets are one of these two numbers, and none between."""
    ignore_index: int | None = None
    """The label that does not count."""
    logits_of: str | None = None
    """The operator ("Softmax" or "Sigmoid") that the loss contains: behind such a node it takes the
    node's input."""
    metrics: Sequence[Any] = ()
    """The metrics of validation data by default."""
    smooths: bool = False
    """Whether labels can be smoothed: `with_label_smoothing`."""

    # rows
    group: int = 1
    """The number of consecutive examples that are compared, which shuffles keep together."""
    apart: bool = False
    """Whether the texts of a row of data are the examples of a group, each of its own."""
    answers: str | None = None
    """The column that rows of texts must have, for a loss that compares answers."""
    stride: int = 1
    """Of so many rows the first is learned; the others serve for comparison."""
    compares_with_start: bool = False
    """Whether `second` evaluates the model as it is before the training, which `evaluate` does not
    know."""

    # tokens
    of_tokens: bool = False
    """Whether labels are tokens, which `preview` counts and decodes."""
    next_token: bool = False
    """Whether the outputs at each place are scored by the label at the next one."""
    forcing: bool = False
    """Whether a decoder reads the labels before each one (teacher forcing)."""

    def __call__(self, outputs: Any, targets: Any) -> Any:
        raise UnsupportedError(f"the loss {type(self).__name__} has no __call__(outputs, targets)")

    def totals(self, outputs: Any, targets: Any, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a sum over a batch and its divisor, which add up to the mean of an epoch.

        That of a scalar loss is NaN where the weights of the examples are not all equal.
        """
        return totals(self(outputs, targets), weight)

    @property
    def denominator(self) -> str | None:
        """The divisor of `totals`: "examples" (their weights), "none", or None for its own."""
        return "examples"

    @property
    def class_axes(self) -> tuple[int, ...]:
        """The axes of the outputs of which one is that of the classes."""
        return (-1 if self.class_axis is None else self.class_axis,)

    def find_labels(self, targets: Any) -> Any:
        """Return the part of the targets that metrics compare with the outputs."""
        return targets

    def align(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return outputs and targets aligned by position, for metrics.

        For `next_token` they are the scores that have labels, and the labels that have scores.
        """
        return (outputs[:, :-1], targets[:, 1:]) if self.next_token else (outputs, targets)

    def prepare(self, model: Model) -> Model:
        """Return the model that is trained, of one without caches, unless the data has values.

        For `next_token` that is one with the logits of all places.
        """
        return take_next_logits(model) if self.next_token else model

    def derive(self, model: Model) -> DeriveTargets | None:
        """Return a function that makes targets where data has none; None if it must have some.

        For `next_token` they are the tokens.
        """
        if self.next_token:
            return label_tokens(model, self.ignore_index)
        return None if self.takes_targets else _no_targets

    def complete(self, model: Model) -> Mapping[str, tuple[CompleteInput, Any]]:
        """Return functions by the names of inputs that data may omit, and the inputs' padding."""
        return {}

    def second(self, model: Model) -> Callable[[Batch], Any] | None:
        """Return a function that adds a second model's outputs on a batch to its targets.

        Args:
          model: as it is before the training.
        """
        return None

    def draw(self, model: Model) -> Callable[[np.random.Generator, Batch], Batch] | None:
        """Return a function that changes a batch at random, on the host."""
        return None

    @property
    def draws(self) -> bool:
        """Whether `draw` changes batches, which a step of your own gets changed already."""
        return type(self).draw is not Loss.draw

    def caption(self, targets: Any) -> Sequence[str]:
        """Return captions of rows with these targets, for `preview`."""
        return []

    def with_class_weights(self, classes: Mapping[int, float]) -> "Loss":
        """Return the loss with class weights.

        Raises:
          TrainingError: the loss is not one of classes, or has such weights.
        """
        raise TrainingError(
            "class_weights go with losses of classes, like "
            "'softmax_cross_entropy_with_integer_labels', not with "
            f"{self!r}; weights of examples, beside x and y, go with any loss that has one value "
            "for each"
        )

    def with_label_smoothing(self, share: float) -> "Loss":
        """Return the loss of labels of which a share is spread over all classes alike.

        Called where `smooths` is true. It is that of PyTorch's `label_smoothing`, which weighs the
        share of each class by its class weight, and of transformers' `label_smoothing_factor`.
        """
        raise UnsupportedError(
            f"the loss {type(self).__name__} sets smooths, and has no with_label_smoothing(share)"
        )

    def check(self, outputs: Any, targets: Any, what: str = "the loss", weight: Any = None) -> None:
        """Refuse shapes that do not fit, given arrays or `jax.ShapeDtypeStruct`s.

        Args:
          weight: of the examples, where it is known.
        """
        if self.elementwise:
            self.check_shapes(outputs, targets, f"{what} {self.name!r}")
        try:
            loss = jax.eval_shape(self.__call__, outputs, targets)
        except (TypeError, ValueError) as error:
            if not self.elementwise or isinstance(error, Error):
                raise
            raise TrainingError(
                f"{what} {self.name!r} takes no outputs of shape {outputs.shape} with targets of "
                f"shape {targets.shape}: {error}; pass a function (outputs, targets) that gives it "
                "others, like outputs and targets with the axes before the classes joined"
            ) from error
        size = len(jax.tree.leaves(targets if self.takes_targets else outputs)[0])
        fits = isinstance(loss, jax.ShapeDtypeStruct) and loss.shape[:1] in ((), (size,))
        expected = f"a scalar or one value for each of {size} examples"
        require(what, loss, fits, expected, TrainingError)
        real = jnp.issubdtype(loss.dtype, jnp.floating)
        require(what, loss.dtype, real, "of a floating-point type", TrainingError)
        if not loss.shape and self.denominator == "examples" and not is_zero_or_one(weight):
            raise TrainingError(
                f"{what} is a scalar, so example weights cannot be applied: return one value for "
                f"each of {size} examples"
            )

    def check_shapes(self, outputs: Any, targets: Any, what: str) -> None:
        """Refuse targets of other shapes, for an `elementwise` loss."""
        if not hasattr(outputs, "shape") or not hasattr(targets, "shape"):
            hint = ""
            if isinstance(targets, Mapping):
                columns = ", ".join(map(repr, targets))
                hint = (
                    f", and beside the inputs the data has {columns}: leave out those that are not "
                    "targets"
                )
            raise TrainingError(
                f"{what} takes one output and one target{hint}; for a model with several pass a "
                "dict of losses by output name, or a callable (outputs, targets) -> loss"
            )
        shape, axis = outputs.shape, self.class_axis
        if axis is not None:
            if not jnp.issubdtype(targets.dtype, jnp.integer):
                use = "real targets use loss='squared_error'"
                if targets.shape == shape:
                    use = f"mixtures of classes use loss='softmax_cross_entropy', for {use}"
                missing = jnp.issubdtype(targets.dtype, jnp.floating)
                missing = " (integers with a missing one, NaN, are)" if missing else ""
                raise TrainingError(
                    f"{what} needs integer labels; they are {targets.dtype}{missing}: {self.name} "
                    f"is a loss of classes, for {use}"
                )
            if len(shape) <= abs(axis):
                raise TrainingError(
                    f"{what} needs outputs with the classes on axis {axis}; their shape is {shape}"
                )
            shape = (*shape[:axis], *shape[axis:][1:])
        if targets.shape != shape:
            first = axis == -1 and targets.shape == (*outputs.shape[:1], *outputs.shape[2:])
            last = axis == 1 and targets.shape == outputs.shape[:-1]
            raise TrainingError(
                f"{what} needs targets of shape {shape} for outputs of shape {outputs.shape}; "
                f"they have {targets.shape}"
                + "; jaxonnx.losses.cross_entropy() has the classes on axis 1" * first
                + "; jaxonnx.losses.cross_entropy(axis=-1) has the classes on the last axis" * last
            )

    def check_labels(
        self, targets: Any, outputs: Any, what: str, names: Sequence[str] | None = None
    ) -> None:
        """Refuse targets that optax would read as others.

        These are labels outside of 0 ... classes - 1, numbers outside of `interval`, and one-hot
        targets whose classes are on another axis.
        """
        if self.interval is not None:
            self._check_interval(np.asarray(targets), what)
        if self.classes_last:
            self._check_last(np.asarray(targets), what)
        if self.class_axis is None:
            return
        classes = outputs.shape[self.class_axis]
        if names is not None and len(names) != classes:
            shown = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
            raise TrainingError(
                f"{what} has {len(names)} classes ({shown}), and the outputs have {classes}: "
                f"head={len(names)} (--head {len(names)}) replaces the last layer"
            )
        check_classes(targets, outputs.shape, self.class_axis, self.ignore_index, what)

    def _check_interval(self, targets: np.ndarray, what: str) -> None:
        """Refuse targets outside of `interval`; NaN stands for a missing one."""
        assert self.interval is not None
        least, greatest = self.interval
        if not targets.size or targets.dtype == bool:
            return
        # without a copy of all targets, which may be masks of images
        low, high = np.fmin.reduce(targets, axis=None), np.fmax.reduce(targets, axis=None)
        between = self.binary and ((targets > least) & (targets < greatest)).any()
        if low < least - _ROUNDING or high > greatest + _ROUNDING or between:
            way = "2 * y - 1 makes them of 0 and 1" if least < 0 else "y / 255 makes them of a mask"
            raise TrainingError(
                f"{what} has targets from {low} to {high}; the loss {self.name!r} takes "
                f"{self.takes}. {way}. To leave labels out, pass a function (outputs, targets) -> "
                "one value for each example, or jaxonnx.losses.cross_entropy(ignore_index=...) for "
                "outputs that have each class"
            )

    def _check_last(self, targets: np.ndarray, what: str) -> None:
        """Refuse distributions along axis 1, as images have them, which is not the last one."""
        rows = targets[:8]
        if targets.ndim < 3 or targets.dtype.kind not in "fiu" or not _are_one(rows.sum(1)):
            return
        if not _are_one(rows.sum(-1)):
            raise TrainingError(
                f"{what}: targets {list(targets.shape)} are distributions along axis 1, and the "
                f"loss {self.name!r} has the classes on the last axis: pass integer labels to "
                "jaxonnx.losses.cross_entropy(), which has them on axis 1, or a function that "
                "moves both, like lambda o, t: optax.losses."
                f"{self.name}(jnp.moveaxis(o, 1, -1), jnp.moveaxis(t, 1, -1))"
            )

    def __repr__(self) -> str:
        return repr(self.name) if self.name else f"<{type(self).__name__}>"


def register(name: str, loss: Loss, *, also_called: str = "") -> None:
    """Register a loss, so that `train(..., loss=name)` and the command line can name it.

    Args:
      also_called: names that it has elsewhere, in lower case, separated by spaces. An error about
        one of these suggests the loss.

    Raises:
      TrainingError: `loss` is not a `Loss`.
    """
    check_arguments(register, locals(), TrainingError)
    require("register: loss", loss, isinstance(loss, Loss), "a Loss", TrainingError)
    REGISTERED[name], ALSO_CALLED[name] = loss, also_called


def load_second(loss: Loss, source: Any, model: Model, what: str) -> Model:
    """Load the second model of a loss, in the form of the one that is trained.

    Args:
      source: as `jaxonnx.load` takes it, or a model.
      model: the one that is trained. It may take several texts in a row.
      what: the second model, for the error.

    Raises:
      TrainingError: its file cannot tell the texts of a row apart, or not by the same input.
    """
    second = loss.prepare(as_model(source).without_cache())
    packing = model.program.find(PackedRows)
    if packing is None:
        return second
    packed = take_packed_rows(second)
    other = packed.program.find(PackedRows)
    assert other is not None
    if (other.input, other.form) != (packing.input, packing.form):
        raise TrainingError(
            f"{what} tells the texts of a row apart by the {other.form} in '{other.input}', and "
            f"the model by the {packing.form} in '{packing.input}': leave "
            "preprocess={'pack': True} out"
        )
    return packed


def take_inputs(inputs: Sequence[Any], model: Model, second: Model, what: str) -> Sequence[Any]:
    """Return the inputs of a second model among those of the one that is trained, by their names.

    Args:
      what: the second model, for the error.

    Raises:
      TrainingError: the models have no input in common.
    """
    names = [value.name for value in model.inputs]
    named = dict(zip(names, inputs, strict=True))
    chosen = [named.get(value.name) for value in second.inputs]
    if len(chosen) == len(names) == 1:
        chosen = [*inputs]
    if all(x is None for x in chosen):
        raise TrainingError(
            f"{what} takes {', '.join(v.name for v in second.inputs)}, and the model "
            f"{', '.join(names)}: they need inputs of the same names"
        )
    return with_derived(chosen, second.inputs)


def _no_targets(inputs: Sequence[Any], values: Sequence[Value], what: str) -> np.ndarray:
    return np.zeros(count_examples(inputs, inputs, values), np.int32)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WeighedLoss(Loss):
    """A loss whose classes may have weights; 1 for classes that are missing."""

    class_weights: Mapping[int, float] | None = None

    @property
    def denominator(self) -> str | None:
        return None if self.class_weights else "examples"

    def totals(self, outputs: Any, targets: Any, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not self.class_weights:
            return totals(self(outputs, targets), weight)
        shares = self._weigh_labels(*self.align(outputs, targets))
        total, _ = totals(self(outputs, targets) * shares, weight)
        return total, totals(shares, weight)[0]

    def with_class_weights(self, classes: Mapping[int, float]) -> Loss:
        if self.class_axis is None and not self.one_hot:
            return super().with_class_weights(classes)
        return replace(self, class_weights=classes)

    def _weigh_classes(self, count: int) -> np.ndarray:
        """Return the weight of each class."""
        weights = np.ones(count, np.float32)
        for number, weight in (self.class_weights or {}).items():
            weights[number] = weight
        return weights

    def _weigh_labels(self, outputs: Any, targets: Any) -> jax.Array:
        """Return the weights of the classes that targets are, or of their mixture."""
        if self.one_hot:
            return targets @ self._weigh_classes(outputs.shape[-1])
        return jnp.take(self._weigh_classes(outputs.shape[self.class_axis]), targets, mode="clip")

    def check(self, outputs: Any, targets: Any, what: str = "the loss", weight: Any = None) -> None:
        if not self.class_weights:
            return super().check(outputs, targets, what, weight)
        replace(self, class_weights=None).check(outputs, targets, what, weight)
        classes = outputs.shape[-1 if self.class_axis is None else self.class_axis]
        if wrong := [number for number in self.class_weights if not 0 <= number < classes]:
            raise TrainingError(
                f"class_weights has {', '.join(map(str, wrong))}; the classes of {what} are "
                f"0 ... {classes - 1}"
            )


def _are_one(sums: np.ndarray) -> bool:
    return bool(np.abs(sums - 1).max(initial=0) < _ROUNDING)


def check_classes(
    targets: np.ndarray, shape: tuple[int, ...], axis: int, ignored: int | None, what: str
) -> None:
    """Refuse labels other than 0 ... classes - 1 but for one that is ignored.

    Args:
      shape: that of the outputs.
      axis: of the classes in them.
    """
    classes = shape[axis]
    wrong = (targets < 0) | (targets >= classes)
    if targets.dtype.kind == "f":
        wrong |= targets % 1 != 0
    if ignored is not None:
        wrong &= targets != ignored
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0])
        label, remedy = targets[first], ""
        counted = targets if ignored is None else targets[targets != ignored]
        alike = (targets[wrong] == label).all()
        if classes == 1:
            along = axis % len(shape)
            remedy = (
                "; one output says yes or no: use loss='sigmoid_binary_cross_entropy', and targets "
                f"of shape {(*targets.shape[:along], 1, *targets.shape[along:])}"
            )
        elif (counted.min(), counted.max()) == (1, classes):
            remedy = f"; classes are counted from 0: subtract 1 from labels 1 ... {classes}"
        elif alike and ignored is None:
            last = len(shape) > 2 and axis in (-1, len(shape) - 1)
            arguments = "axis=-1, " * last + f"ignore_index={label}"
            remedy = f"; jaxonnx.losses.cross_entropy({arguments}) leaves these out"
            if last and label == IGNORED:
                remedy += ", and so does 'causal_lm' where labels are the tokens, which it shifts"
        elif alike and counted.size == targets.size:
            remedy = f"; with ignore_index={label} the loss leaves these out"
        elif alike:
            remedy = (
                f"; labels in the data with {ignored} in their place, the ignore_index of the "
                "loss, leave these out"
            )
        raise TrainingError(
            f"{what} has {format_count(int(wrong.sum()), 'label')} outside of 0 ... {classes - 1}, "
            f"the first is {label} at {', '.join(map(str, first))}{remedy}"
        )


def widen_labels(labels: Any) -> jax.Array:
    """Return integer labels in 32 bits or more, to be compared with any label that is ignored.

    JAX compares in the type of the array: of uint8 labels, -100 would be the class 156.
    """
    labels = jnp.asarray(labels)
    narrow = jnp.issubdtype(labels.dtype, jnp.integer) and labels.dtype.itemsize < 4
    return labels.astype(jnp.int32) if narrow else labels


def totals(values: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of the values of examples, or of their means, and of the weights.

    A scalar has no weights: it is NaN where these are not all equal. Half precision, whose sums end
    at 65504, is summed in float32.
    """
    examples = weight.sum()
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if not values.ndim:
        return jnp.where((weight == weight[:1]).all(), values, jnp.nan) * examples, examples
    values = values.reshape(values.shape[0], -1).mean(1)
    return jnp.where(weight > 0, values * weight, 0).sum(), examples
