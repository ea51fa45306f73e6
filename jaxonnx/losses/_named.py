"""Find losses: by their names here and in optax, or of any callable of outputs and targets."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxonnx.errors import TrainingError
from jaxonnx.losses._labels import cross_entropy
from jaxonnx.losses._loss import ALSO_CALLED, REGISTERED, Loss, WeighedLoss, register, totals


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FunctionLoss(WeighedLoss):
    """A function of outputs and targets as a loss: optax's, or the user's, which has no name."""

    function: Callable[[Any, Any], Any]
    name: str | None = None
    takes: str = Loss.takes
    class_axis: int | None = None
    one_hot: bool = False
    classes_last: bool = False
    interval: tuple[float, float] | None = None
    binary: bool = False
    logits_of: str | None = None

    @property
    def elementwise(self) -> bool:
        return self.name is not None

    @property
    def metrics(self) -> Sequence[Any]:
        return () if self.class_axis is None else ("accuracy",)

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return self.function(outputs, targets)

    def __repr__(self) -> str:
        return repr(self.name or self.function)


class _LabelCrossEntropy(FunctionLoss):
    """The cross entropy of labels; of smoothed ones it is ours, which has their share."""

    smooths = True

    def with_label_smoothing(self, share: float) -> Loss:
        return replace(
            cross_entropy(axis=-1),
            name=self.name,
            class_weights=self.class_weights,
            smoothing=share,
        )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _MixtureCrossEntropy(FunctionLoss):
    """The cross entropy of distributions, of which each class has its own weight."""

    smoothing: float = 0.0
    smooths = True

    def totals(self, outputs: Any, targets: Any, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        shares = self._weigh_labels(outputs, targets) if self.class_weights else None
        if self.smoothing:
            targets = optax.smooth_labels(targets, self.smoothing)
        values = self.function(outputs, targets * self._weigh_classes(outputs.shape[-1]))
        total, examples = totals(values, weight)
        return total, examples if shares is None else totals(shares, weight)[0]

    def with_label_smoothing(self, share: float) -> Loss:
        return replace(self, smoothing=share)


_LABELS = {
    "class_axis": -1,
    "logits_of": "Softmax",
    "takes": "integer labels: the index of the class",
}
"""Losses of scores (..., classes) and integer labels (...)."""
_MIXTURES = {
    "one_hot": True,
    "classes_last": True,
    "logits_of": "Softmax",
    "takes": "a probability for each class",
}
"""Losses of scores (..., classes) and a distribution (..., classes)."""
_MASKS = {
    "classes_last": True,
    "interval": (0, 1),
    "logits_of": "Softmax",
    "takes": "0 or 1 for each output",
}
"""Losses of scores (..., classes) and a mask for each class (..., classes)."""
_BINARY = {"interval": (0, 1), "logits_of": "Sigmoid", "takes": "0 or 1 for each output"}
_SIGNED = {
    "interval": (-1, 1),
    "binary": True,
    "logits_of": "Sigmoid",
    "takes": "-1 or 1 for each output",
}
_OPTAX: Mapping[str, Mapping[str, Any]] = {
    "softmax_cross_entropy_with_integer_labels": _LABELS | {"kind": _LabelCrossEntropy},
    "multiclass_hinge_loss": _LABELS,
    "multiclass_perceptron_loss": _LABELS,
    "multiclass_sparsemax_loss": _LABELS,
    "softmax_cross_entropy": _MIXTURES | {"kind": _MixtureCrossEntropy},
    "safe_softmax_cross_entropy": _MIXTURES,
    "poly_loss_cross_entropy": _MIXTURES,
    "dice_loss": _MASKS,
    "multiclass_generalized_dice_loss": _MASKS,
    "kl_divergence": {"classes_last": True},
    "convex_kl_divergence": {"classes_last": True},
    "binary_dice_loss": _BINARY,
    "sigmoid_binary_cross_entropy": _BINARY,
    "sigmoid_focal_loss": _BINARY,
    "sparsemax_loss": _BINARY,
    "hinge_loss": _SIGNED,
    "perceptron_loss": _SIGNED,
}
"""The properties of optax's losses, apart from those of numbers; `logits_of` is the operator that
each contains."""

_ALSO_CALLED = {
    "softmax_cross_entropy_with_integer_labels": "ce crossentropy sparsecategoricalcrossentropy "
    "softmax",
    "softmax_cross_entropy": "categoricalcrossentropy onehot",
    "sigmoid_binary_cross_entropy": "bce bcewithlogits binarycrossentropy sigmoid",
    "sigmoid_focal_loss": "focal",
    "squared_error": "mse l2 meansquarederror",
    "huber_loss": "huber smoothl1",
    "kl_divergence": "kl kldiv",
}
_NO_LOSSES = {
    "cosine_similarity": "is greater where outputs fit better; 'cosine_distance' is 1 minus it",
    "ctc_loss_with_forward_probs": "returns more than the loss, which 'ctc_loss' does not",
    "make_fenchel_young_loss": "makes a loss of a function: pass the result",
    "smooth_labels": "changes labels, as label_smoothing= does beside a cross entropy",
}
"""Functions in `optax.losses` that are none."""
_CALLED = ("cross_entropy", "negative_log_likelihood", "distill")
"""Functions in `jaxonnx.losses` whose results are losses without a name."""


@cache
def _optax_losses() -> dict[str, Loss]:
    """Return the losses of optax that need predictions and targets and nothing else."""
    losses: dict[str, Loss] = {}
    for name in dir(optax.losses):
        function = getattr(optax.losses, name)
        if callable(function) and name not in ("ntxent", *_NO_LOSSES):
            parameters = inspect.signature(function).parameters.values()
            needed = [p for p in parameters if p.default is p.empty or p.name == "targets"]
            if len(needed) == 2:
                settings = {"kind": FunctionLoss, **_OPTAX.get(name, {})}
                losses[name] = settings.pop("kind")(function=function, name=name, **settings)
    return losses


def _named_losses() -> Mapping[str, Loss]:
    return {**_optax_losses(), **REGISTERED}


def find(loss: Any) -> Loss:
    """Return the loss of that name, or around that callable, which may be one of optax's itself.

    Raises:
      TrainingError: an unknown name; the message suggests similar ones.
    """
    if isinstance(loss, Loss):
        return loss
    if callable(loss):
        named = _optax_losses().values()
        same = (x for x in named if isinstance(x, FunctionLoss) and x.function is loss)
        return next(same, FunctionLoss(function=loss))
    named = _named_losses()
    if not isinstance(loss, str) or loss not in named:
        raise _refuse(loss, named)
    return named[loss]


def _refuse(loss: Any, named: Mapping[str, Loss]) -> TrainingError:
    """Return the error about a loss without such a name, with what can be written in its place."""
    if isinstance(loss, str) and loss in _NO_LOSSES:
        return TrainingError(f"optax.losses.{loss} is no loss: it {_NO_LOSSES[loss]}")
    plain = _plain(str(loss))
    ways = [f"{name} ({named[name].takes})" for name in _near(str(loss))]
    ways += [f"jaxonnx.losses.{name}(...)" for name in _CALLED if plain and plain in _plain(name)]
    for name in dir(optax.losses):
        if name in named or not plain or plain not in _plain(name) or name in _NO_LOSSES:
            continue
        # a function of more than outputs and targets, which is called by one of these two
        parameters = inspect.signature(getattr(optax.losses, name)).parameters.values()
        _, *rest = [p.name for p in parameters if p.default is p.empty]
        others = [f"targets[{x!r}]" for x in rest] if len(rest) > 1 else ["targets"]
        call = f"optax.losses.{name}({', '.join(['outputs', *others])})"
        ways.append(f"loss=lambda outputs, targets: {call}")
    return TrainingError(
        f"there is no loss {loss!r} of predictions and targets; "
        f"{'try' if ways else 'there are'} {', '.join(ways or sorted(named))}, "
        "or pass a function (outputs, targets) that returns a loss for each example, or a scalar"
    )


def find_by_output(loss: Any) -> dict[str | None, Loss]:
    """Return the losses in the argument of `train`, by output; None for all outputs."""
    losses = loss if isinstance(loss, Mapping) else {} if loss is None else {None: loss}
    return {o: find(x[0] if isinstance(x, tuple) and x else x) for o, x in losses.items()}


def is_loss(argument: Any) -> bool:
    """Check whether an argument is a loss, not the name of a metric."""
    return not isinstance(argument, str) or argument in _named_losses()


def _near(name: str) -> list[str]:
    """Return the losses that a misspelled or foreign name may mean."""
    losses, plain = _named_losses(), _plain(name)
    named = {_plain(name): name for name in losses}
    called = {**_ALSO_CALLED, **ALSO_CALLED}
    meant = [name for name, others in called.items() if plain in others.split()]
    spelled = difflib.get_close_matches(plain, named, n=3)
    parts = [key for key in named if plain and (plain in key or key in plain)]
    near = dict.fromkeys([*meant, *(named[key] for key in (*spelled, *parts))])
    return [name for name in near if name in losses][:4]


def _plain(name: str) -> str:
    """Normalize a name: letters only, without words like "loss"."""
    letters = "".join(filter(str.isalnum, name.lower()))
    return letters.removesuffix("loss")


register(
    "absolute_error",
    FunctionLoss(
        function=lambda outputs, targets: jnp.abs(outputs - targets), name="absolute_error"
    ),
    also_called="mae l1 meanabsoluteerror",
)
