"""Losses that optax lacks, as callables `(outputs, targets)` for `train(..., loss=)`.

`cross_entropy` and `negative_log_likelihood` are those of ONNX's operators, `causal_lm`,
`masked_lm` and `seq2seq_lm` those of language models. `distill` learns from another model, `dpo`,
`orpo` and `kto` from preferences, `in_batch_negatives` and `contrastive` from pairs. Losses of
optax are chosen by name.
"""

from jaxonnx.losses._distill import Distillation, distill
from jaxonnx.losses._groups import (
    GroupLoss,
    contrastive,
    dpo,
    in_batch_negatives,
    kto,
    log_likelihoods,
    orpo,
)
from jaxonnx.losses._labels import (
    ClassLoss,
    Masking,
    causal_lm,
    cross_entropy,
    masked_lm,
    negative_log_likelihood,
    seq2seq_lm,
    shift_right,
)

__all__ = [
    "ClassLoss",
    "Distillation",
    "GroupLoss",
    "Masking",
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
    "seq2seq_lm",
    "shift_right",
]
