"""Losses: optax's by name, ONNX's, or any callable of outputs and targets."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxonnx._data.inputs_and_targets import is_zero_or_one
from jaxonnx._data.ragged import IGNORED
from jaxonnx._require import require
from jaxonnx._text import format_count
from jaxonnx.errors import TrainingError
from jaxonnx.losses import (
    ClassLoss,
    GroupLoss,
    causal_lm,
    contrastive,
    cross_entropy,
    dpo,
    in_batch_negatives,
    kto,
    masked_lm,
    negative_log_likelihood,
    orpo,
    seq2seq_lm,
)

_CLASSES = (
    "softmax_cross_entropy_with_integer_labels",
    "multiclass_hinge_loss",
    "multiclass_perceptron_loss",
    "multiclass_sparsemax_loss",
)
"""Losses of scores (..., classes) and integer labels (...)."""

_ONE_HOT = ("poly_loss_cross_entropy", "safe_softmax_cross_entropy", "softmax_cross_entropy")
"""Losses of scores (..., classes) and a distribution (..., classes)."""

_SOFT = "softmax_cross_entropy"

_LOGITS = {
    "masked_lm": "Softmax",
    **dict.fromkeys((*_CLASSES, *_ONE_HOT, "cross_entropy", "causal_lm", "seq2seq_lm"), "Softmax"),
    **dict.fromkeys(("dice_loss", "multiclass_generalized_dice_loss"), "Softmax"),
    **dict.fromkeys(("binary_dice_loss", "hinge_loss", "perceptron_loss"), "Sigmoid"),
    **dict.fromkeys(
        ("sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "sparsemax_loss"), "Sigmoid"
    ),
}
"""Losses of logits, and the operator that each contains."""

_ALSO_CALLED = {
    "ce crossentropy sparsecategoricalcrossentropy softmax": _CLASSES[0],
    "crossentropy nllcrossentropy": "SoftmaxCrossEntropyLoss",
    "categoricalcrossentropy onehot": "softmax_cross_entropy",
    "nll": "NegativeLogLikelihoodLoss",
    "bce bcewithlogits binarycrossentropy sigmoid": "sigmoid_binary_cross_entropy",
    "focal": "sigmoid_focal_loss",
    "mse l2 meansquarederror": "squared_error",
    "mae l1 meanabsoluteerror": "absolute_error",
    "huber smoothl1": "huber_loss",
    "kl kldiv": "kl_divergence",
    "clip": "contrastive",
    "infonce multiplenegativesranking mnr": "in_batch_negatives",
}
"""Names of losses elsewhere, in lower case, and their names here."""

_SHOWN = 8


@cache
def _named_losses() -> dict[str, Callable[..., Any]]:
    """Return the losses of optax that need predictions and targets and nothing else, and ONNX's."""
    losses = {}
    for name in dir(optax.losses):
        function = getattr(optax.losses, name)
        if callable(function) and name not in ("smooth_labels", "ntxent"):
            parameters = inspect.signature(function).parameters.values()
            needed = [p for p in parameters if p.default is p.empty or p.name == "targets"]
            if len(needed) == 2:
                losses[name] = function
    losses["absolute_error"] = lambda outputs, targets: jnp.abs(outputs - targets)
    losses["causal_lm"] = causal_lm()
    losses["contrastive"] = contrastive()
    losses["dpo"] = dpo()
    losses["kto"] = kto()
    losses["orpo"] = orpo()
    losses["in_batch_negatives"] = in_batch_negatives()
    losses["masked_lm"] = masked_lm()
    losses["seq2seq_lm"] = seq2seq_lm()
    losses["SoftmaxCrossEntropyLoss"] = cross_entropy()
    losses["NegativeLogLikelihoodLoss"] = negative_log_likelihood()
    return losses


@dataclass(frozen=True)
class Loss:
    """`function(outputs, targets)` is a scalar or has the examples along its first axis."""

    function: Callable[[Any, Any], Any]
    name: str | None = None
    class_weights: Mapping[int, float] | None = None
    """Weights of classes; 1 for classes that are missing."""
    smoothing: float = 0.0
    """The share of each distribution that all classes have alike."""

    @property
    def class_axis(self) -> int | None:
        """The axis of the outputs that targets which are labels do not have."""
        if isinstance(self.function, ClassLoss):
            return self.function.axis
        return -1 if self.name in _CLASSES else None

    @property
    def ignore_index(self) -> int | None:
        """The label that the loss ignores."""
        return getattr(self.function, "ignore_index", None)

    @property
    def next_token(self) -> bool:
        """Whether outputs are scored by the label at the next place."""
        return getattr(self.function, "shift", False)

    @property
    def masking(self) -> Any:
        """How tokens of a batch are hidden, if they are."""
        return getattr(self.function, "masking", None)

    @property
    def labels_are_tokens(self) -> bool:
        """Whether data without labels has them: the tokens themselves."""
        return self.next_token or self.masking is not None

    @property
    def forcing(self) -> bool:
        """Whether the model reads the labels before each one."""
        return isinstance(self.function, ClassLoss) and self.function.forcing

    @property
    def rows(self) -> int:
        """The number of examples that stay together in data that is shuffled."""
        return self.function.rows if isinstance(self.function, GroupLoss) else 1

    @property
    def metrics(self) -> Sequence[Any]:
        """The metrics of validation data by default."""
        if isinstance(self.function, GroupLoss):
            return self.function.metrics
        return () if self.class_axis is None else ("accuracy",)

    @property
    def takes_targets(self) -> bool:
        """Whether there are targets at all."""
        return not isinstance(self.function, GroupLoss) or self.function.targets

    def align(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return outputs and targets aligned by position, shifted for next tokens."""
        if isinstance(self.function, ClassLoss):
            return self.function.align(outputs, targets)
        return outputs, targets

    @property
    def one_hot(self) -> bool:
        """Whether targets are distributions over the classes, on the last axis."""
        return self.name in _ONE_HOT

    @property
    def logits_of(self) -> str | None:
        """The operator whose input the loss takes rather than its output."""
        return _LOGITS.get(self.name or "")

    @property
    def denominator(self) -> str | None:
        """The sum of "examples" (their weights), "none" for a sum, or None: that of its labels."""
        if isinstance(self.function, ClassLoss) and self.function.reduction != "none":
            return "none" if self.function.reduction == "sum" else None
        return None if self.class_weights else "examples"

    def totals(self, outputs: Any, targets: Any, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a sum over a batch and its divisor, which add up to the mean of an epoch.

        The sum of a scalar loss sees the fill as well.
        """
        function = self.function
        if isinstance(function, ClassLoss) and function.reduction != "none":
            if self.class_weights:
                function = replace(function, weight=self._of_classes(outputs.shape[function.axis]))
            return function.totals(outputs, targets, weight)
        if isinstance(function, GroupLoss):
            return totals(function(outputs, targets, weight), weight)
        shares = self._shares(*self.align(outputs, targets)) if self.class_weights else None
        if self.name == _SOFT:  # each class of a mixture has its own weight
            if self.smoothing:
                targets = optax.smooth_labels(targets, self.smoothing)
            values = function(outputs, targets * self._of_classes(outputs.shape[-1]))
        else:
            values = function(outputs, targets) * (1 if shares is None else shares)
        total, examples = totals(values, weight)
        return total, examples if shares is None else totals(shares, weight)[0]

    def with_class_weights(self, classes: Mapping[int, float]) -> Self:
        """Return the loss with class weights.

        Raises:
          TrainingError: the loss is not one of classes, or has such weights.
        """
        if self.class_axis is None and not self.one_hot:
            raise TrainingError(
                f"class_weights go with losses of classes, like {_CLASSES[0]!r}, not with "
                f"{self.name or self.function!r}; weights of examples, beside x and y, go with any "
                "loss that has one value for each"
            )
        if isinstance(self.function, ClassLoss) and self.function.weight is not None:
            raise TrainingError(
                f"the loss {self.name!r} has weights of classes already: leave them or "
                "class_weights out"
            )
        return replace(self, class_weights=classes)

    def with_label_smoothing(self, share: float) -> Self:
        """Return the loss of labels of which a share is spread over all classes alike.

        It is that of PyTorch's `label_smoothing`, which weighs the share of each class by its class
        weight, and of transformers' `label_smoothing_factor`.
        """
        if self.name == _SOFT:
            return replace(self, smoothing=share)
        function: Any = cross_entropy(axis=-1) if self.name == _CLASSES[0] else self.function
        return replace(self, function=replace(function, smoothing=share))

    @property
    def has_distributions(self) -> bool:
        """Whether targets are classes, or distributions over them, of a cross entropy."""
        return self.name in (_CLASSES[0], _SOFT) or isinstance(self.function, ClassLoss)

    def _of_classes(self, count: int) -> np.ndarray:
        """Return the weight of each class."""
        weights = np.ones(count, np.float32)
        for number, weight in (self.class_weights or {}).items():
            weights[number] = weight
        return weights

    def _shares(self, outputs: Any, targets: Any) -> jax.Array:
        """Return the weights of the classes that targets are, or of their mixture."""
        if self.one_hot:
            return targets @ self._of_classes(outputs.shape[-1])
        return jnp.take(self._of_classes(outputs.shape[self.class_axis]), targets, mode="clip")

    def check(self, outputs: Any, targets: Any, what: str = "the loss", weight: Any = None) -> None:
        """Refuse shapes that do not fit, given arrays or `jax.ShapeDtypeStruct`s.

        Args:
          weight: of the examples, where it is known.
        """
        if self.name is not None and not isinstance(self.function, GroupLoss):
            self._check_named(outputs, targets, what)
        loss = jax.eval_shape(self.function, outputs, targets)
        size = len(jax.tree.leaves(targets if self.takes_targets else outputs)[0])
        fits = isinstance(loss, jax.ShapeDtypeStruct) and loss.shape[:1] in ((), (size,))
        expected = f"a scalar or one value for each of {size} examples"
        require(what, loss, fits, expected, TrainingError)
        real = jnp.issubdtype(loss.dtype, jnp.floating)
        require(what, loss.dtype, real, "of a floating-point type", TrainingError)
        of_examples = loss.shape or isinstance(self.function, ClassLoss)
        if not of_examples and not is_zero_or_one(weight):
            raise TrainingError(
                f"{what} is a scalar, which weights of examples cannot weigh: return one value for "
                f"each of {size} examples"
            )
        self._check_classes(outputs, what)

    def _check_classes(self, outputs: Any, what: str) -> None:
        """Refuse class weights of unknown classes."""
        if self.class_weights:
            classes = outputs.shape[-1 if self.class_axis is None else self.class_axis]
            if odd := [number for number in self.class_weights if not 0 <= number < classes]:
                raise TrainingError(
                    f"class_weights has {', '.join(map(str, odd))}; the classes of {what} are "
                    f"0 ... {classes - 1}"
                )

    def _check_named(self, outputs: Any, targets: Any, what: str) -> None:
        what = f"{what} {self.name!r}"
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
        wanted = outputs.shape
        if self.class_axis is not None:
            if not jnp.issubdtype(targets.dtype, jnp.integer):
                raise TrainingError(
                    f"{what} needs integer labels; they are {targets.dtype}: {self.name} is a loss "
                    "of classes, for real targets use loss='squared_error'"
                )
            if len(wanted) <= abs(self.class_axis):
                raise TrainingError(
                    f"{what} needs outputs with the classes on axis {self.class_axis}; their shape "
                    f"is {wanted}"
                )
            wanted = (*wanted[: self.class_axis], *wanted[self.class_axis :][1:])
        if targets.shape != wanted:
            raise TrainingError(
                f"{what} needs targets of shape {wanted} for outputs of shape {outputs.shape}; "
                f"they have {targets.shape}"
            )
        if self.class_axis is None:
            return
        weight = self.function.weight if isinstance(self.function, ClassLoss) else None
        if weight is not None and len(weight) != outputs.shape[self.class_axis]:
            raise TrainingError(
                f"{what} has weights of {len(weight)} classes; the outputs have "
                f"{outputs.shape[self.class_axis]}"
            )

    def check_labels(
        self, targets: Any, outputs: Any, what: str, names: Sequence[str] | None = None
    ) -> None:
        """Refuse labels outside of 0 ... classes - 1, which optax would read as others."""
        if self.class_axis is None:
            return
        classes = outputs.shape[self.class_axis]
        if names is not None and len(names) != classes:
            shown = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
            raise TrainingError(
                f"{what} has {len(names)} classes ({shown}), and the outputs have {classes}: "
                f"head={len(names)} (--head {len(names)}) replaces the last layer"
            )
        check_classes(targets, classes, self.ignore_index, what)


def check_classes(targets: np.ndarray, classes: int, ignored: int | None, what: str) -> None:
    """Refuse labels outside of 0 ... classes - 1 but for one that is ignored."""
    wrong = (targets < 0) | (targets >= classes)
    if ignored is not None:
        wrong &= targets != ignored
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0])
        padding = ignored is None and targets[first] == IGNORED
        raise TrainingError(
            f"{what} has {format_count(int(wrong.sum()), 'label')} outside of 0 ... {classes - 1}, "
            f"the first is {targets[first]} at {', '.join(map(str, first))}"
            + (
                "; jaxonnx.losses.cross_entropy(axis=-1, ignore_index=-100) ignores these where "
                "labels are tags, and 'causal_lm' where they are the tokens, which it shifts"
            )
            * bool(padding)
        )


def totals(values: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of the values of examples, or of their means, and of the weights.

    Half precision, whose sums end at 65504, is summed in float32.
    """
    examples = weight.sum()
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if not values.ndim:
        return values * examples, examples
    values = values.reshape(values.shape[0], -1).mean(1)
    return jnp.where(weight > 0, values * weight, 0).sum(), examples


def _near(name: str) -> list[str]:
    """Return the losses that a misspelled or foreign name may mean."""
    named = {_plain(name): name for name in _named_losses()}
    plain = _plain(name)
    meant = [name for other, name in _ALSO_CALLED.items() if plain in other.split()]
    spelled = difflib.get_close_matches(plain, named, n=3)
    parts = [key for key in named if plain and (plain in key or key in plain)]
    near = dict.fromkeys([*meant, *(named[key] for key in (*spelled, *parts))])
    return [name for name in near if name in _named_losses()][:4] or sorted(_named_losses())


def _plain(name: str) -> str:
    """Normalize a name: letters only, without words like "loss"."""
    letters = "".join(filter(str.isalnum, name.lower()))
    return letters.removesuffix("loss")


def _takes(name: str) -> str:
    """Describe the targets that a loss takes."""
    if name in _CLASSES:
        return "integer labels: the index of the class"
    if name in ("dpo", "orpo"):
        return "pairs of answers, chosen and rejected"
    if name == "kto":
        return "answers with a judgement each"
    if isinstance(_named_losses()[name], GroupLoss):
        return "no targets"
    if name in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        return "ONNX's; classes on axis 1, integer labels: the index of the class"
    if name in _ONE_HOT:
        return "a probability for each class"
    if name in ("hinge_loss", "perceptron_loss"):
        return "-1 or 1 for each output"
    if _LOGITS.get(name) == "Sigmoid":
        return "0 or 1 for each output"
    return "targets of the shape of the outputs"


def find_by_output(loss: Any) -> dict[str | None, Loss]:
    """Return the losses in the argument of `train`, by output; None for all outputs."""
    losses = loss if isinstance(loss, Mapping) else {} if loss is None else {None: loss}
    return {o: find(x[0] if isinstance(x, tuple) and x else x) for o, x in losses.items()}


def find(loss: Any) -> Loss:
    """Return the loss of that name, or around that callable, which may be one of optax's itself."""
    if isinstance(loss, ClassLoss | GroupLoss):
        return Loss(loss, loss.name)
    named = _named_losses()
    if callable(loss):
        return Loss(loss, next((name for name, value in named.items() if value is loss), None))
    if not isinstance(loss, str) or loss not in named:
        near = ", ".join(f"{name} ({_takes(name)})" for name in _near(str(loss)))
        raise TrainingError(
            f"there is no loss {loss!r} of predictions and targets; try {near}, "
            "or pass a callable (outputs, targets) -> loss"
        )
    function = named[loss]
    return Loss(function, function.name if isinstance(function, ClassLoss) else loss)


def is_loss(argument: Any) -> bool:
    """Check whether an argument is a loss, not the name of a metric."""
    return not isinstance(argument, str) or argument in _named_losses()
