"""Losses that optax lacks, as callables `(outputs, targets)` for `train(..., loss=)`.

`cross_entropy` and `negative_log_likelihood` are those of ONNX's operators, `causal_lm`,
`masked_lm` and `seq2seq_lm` those of language models. `distill` learns from another model, `dpo`,
`orpo` and `kto` from preferences, `in_batch_negatives` and `contrastive` from pairs. Losses of
optax are chosen by name. A `Loss` of your own says what it needs of the model, the data and each
batch, and `register` gives it a name.
"""

from jaxonnx.losses._distill import Distillation, distill
from jaxonnx.losses._labels import ClassLoss, cross_entropy, negative_log_likelihood
from jaxonnx.losses._loss import Loss, check_classes, register, totals, widen_labels
from jaxonnx.losses._named import FunctionLoss, find, find_by_output, is_loss
from jaxonnx.losses._preferences import (
    GroupLoss,
    PreferenceLoss,
    contrastive,
    dpo,
    in_batch_negatives,
    kto,
    log_likelihoods,
    orpo,
)
from jaxonnx.losses._tokens import causal_lm, masked_lm, scores_tokens, seq2seq_lm, shift_right

__all__ = [
    "ClassLoss",
    "Distillation",
    "GroupLoss",
    "Loss",
    "PreferenceLoss",
    "causal_lm",
    "contrastive",
    "cross_entropy",
    "distill",
    "dpo",
    "in_batch_negatives",
    "kto",
    "log_likelihoods",
    "masked_lm",
    "negative_log_likelihood",
    "orpo",
    "register",
    "seq2seq_lm",
    "shift_right",
]
