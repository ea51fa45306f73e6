"""Losses that compare rows of a batch: pairs, negatives.

The functions return a `GroupLoss`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxonnx._require import check_arguments
from jaxonnx.errors import TrainingError
from jaxonnx.losses._loss import Loss, register, totals


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GroupLoss(Loss):
    """A loss of rows that belong together, called with `(outputs, targets)`; one value for each.

    `jaxonnx.train` shuffles, splits and batches data in one piece in whole groups.
    """

    name: str | None
    function: Callable[[Any, Any, Any], jax.Array]
    """`(outputs, targets, weight)`; of an example that fills a batch the weight is 0."""
    group: int = 1
    """The rows of a group, which follow one another."""
    takes_targets: bool = True
    """Whether the loss takes any."""
    metrics: Sequence[Callable[[Any, Any], jax.Array]] = ()
    """The metrics of validation data by default."""
    takes = "no targets"

    def __call__(self, outputs: Any, targets: Any = None, weight: Any = None) -> jax.Array:
        return self.function(outputs, targets, weight)

    def totals(self, outputs: Any, targets: Any, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return totals(self(outputs, targets, weight), weight)


def in_batch_negatives(*, scale: float = 20.0, negatives: int = 0) -> GroupLoss:
    """Return the loss of embeddings whose pairs are to be near, with all others of the batch far.

    Rows of the outputs (N, features) come in groups: an anchor, what belongs to it (a question and
    its answer, two sentences of one meaning), and `negatives` that do not. Each row of a group has
    its loss: the cross entropy of the right one among the second and further rows of all groups,
    by `scale` times the cosine of their angles to the anchor. There are no targets. Henderson et
    al., "Efficient Natural Language Response Suggestion for Smart Reply", 2017 (arXiv:1705.00652);
    Sentence Transformers calls it MultipleNegativesRankingLoss, others InfoNCE.

    >>> loss = in_batch_negatives(scale=1.0)
    >>> print(f"{loss(jnp.array([[1.0, 0], [1, 0], [0, 1], [0, 1]]))[0]:.4f}")  # log(1 + 1 / e)
    0.3133

    With `accumulate=` a batch is compared in its parts.

    Args:
      scale: above 0, the inverse of the temperature.
      negatives: rows behind each pair that do not belong to it.

    Raises:
      TrainingError: an argument is out of its range; or outputs are not whole groups of vectors.
    """
    check_arguments(in_batch_negatives, locals(), TrainingError)
    if not scale > 0 or isinstance(negatives, bool) or not negatives >= 0:
        raise TrainingError(
            "in_batch_negatives: scale is above 0 and negatives at least 0; they are "
            f"{scale!r}, {negatives!r}"
        )
    rows = 2 + negatives

    def loss(outputs: Any, targets: Any, weight: Any) -> jax.Array:
        shape = getattr(outputs, "shape", ())
        if len(shape) != 2 or shape[0] % rows:
            raise TrainingError(
                f"in_batch_negatives takes one output (N, features) with rows in groups of {rows}; "
                + (f"it is {shape}" if shape else _describe_outputs(outputs))
            )
        x = outputs.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.maximum((x * x).sum(1, keepdims=True), 1e-24))
        groups = x.reshape(-1, rows, shape[1])
        others = groups[:, 1:].reshape(-1, shape[1])
        scores, positives = scale * groups[:, 0] @ others.T, jnp.arange(len(groups)) * (rows - 1)
        if weight is not None:  # what fills the batch is no negative of the others
            filled = weight.reshape(-1, rows)[:, 1:].reshape(-1) <= 0
            of_own = jnp.arange(len(others)) // (rows - 1) == jnp.arange(len(groups))[:, None]
            scores = jnp.where(filled & ~of_own, -jnp.inf, scores)
        right = jnp.take_along_axis(jax.nn.log_softmax(scores), positives[:, None], 1)[:, 0]
        return jnp.repeat(-right, rows)

    return GroupLoss(name="in_batch_negatives", function=loss, group=rows, takes_targets=False)


def contrastive() -> GroupLoss:
    """Return the loss of scores (N, N) of which those on the diagonal belong together.

    It is the mean of the cross entropies along rows and columns, as CLIP has it for its output
    "logits_per_image" or "logits_per_text": `loss={"logits_per_image": "contrastive"}`. There are
    no targets. Radford et al., "Learning Transferable Visual Models From Natural Language
    Supervision", 2021 (arXiv:2103.00020).

    >>> print([f"{x:.4f}" for x in contrastive()(jnp.eye(2))])  # log(1 + 1 / e)
    ['0.3133', '0.3133']

    Raises:
      TrainingError: the scores are not square.
    """

    def loss(outputs: Any, targets: Any, weight: Any) -> jax.Array:
        shape = getattr(outputs, "shape", ())
        if len(shape) != 2 or shape[0] != shape[1]:
            raise TrainingError(
                "contrastive takes one output (N, N), scores of each example with each; "
                + (f"it is {shape}" if shape else _describe_outputs(outputs))
            )
        scores = outputs.astype(jnp.float32)
        if weight is not None:  # what fills the batch is compared with itself alone
            filled = weight <= 0
            apart = (filled | filled[:, None]) & ~jnp.eye(len(weight), dtype=bool)
            scores = jnp.where(apart, -jnp.inf, scores)
        columns, rows = (jnp.diag(jax.nn.log_softmax(scores, axis)) for axis in (0, 1))
        return -(columns + rows) / 2

    return GroupLoss(name="contrastive", function=loss, takes_targets=False)


def _describe_outputs(outputs: Any) -> str:
    """Return the remedy for several outputs, as a part of an error."""
    return f"there are {len(outputs)} outputs: name one, loss={{'output': ...}}"


register("contrastive", contrastive(), also_called="clip")
register(
    "in_batch_negatives",
    in_batch_negatives(),
    also_called="infonce multiplenegativesranking mnr",
)
