"""Activations in training: dropped, noisy or recomputed (`dropout=`, `neftune=`, `remat=`)."""

from collections.abc import Mapping
from typing import Annotated, TypedDict

from jaxonnx._arguments import Argument
from jaxonnx._rewrite.network import enter
from jaxonnx.llm import find_embeddings
from jaxonnx.training._settings import Plan
from jaxonnx.views import EmbeddingNoise


class DropoutArguments(TypedDict, total=False):
    """Ratios of Dropout."""

    dropout: Annotated[
        float | Mapping[str, float] | None,
        Argument(form="X|NAME=X...", resume=True, needs_loss=True),
    ]
    """The ratio of all Dropout nodes, or ratios by value, node or module.

    A ratio by name also inserts Dropout where an exporter removed it (`Model.with_dropout`)."""


def change_dropout(plan: Plan) -> None:
    """Set the ratios of Dropout, and insert Dropout where they name other values."""
    if plan.settings.dropout is not None:
        plan.model = plan.model.with_dropout(plan.settings.dropout)


class NeftuneArguments(TypedDict, total=False):
    """Noise on embeddings."""

    neftune: Annotated[float | None, Argument(form="X", least=0, resume=True, needs_loss=True)]
    """Add noise to the embeddings of tokens in training (NEFTune), like 5.0.

    It is uniform in +-`neftune` / sqrt(length * features), with the padded length of the batch, as
    in transformers and TRL: of Gemma and BART behind the factor sqrt(features). Jain et al.,
    "NEFTune: Noisy Embeddings Improve Instruction Finetuning", 2023 (arXiv:2310.05914)."""


def add_noise(plan: Plan) -> None:
    """Add noise to the embeddings in training."""
    if plan.settings.neftune:
        noise = EmbeddingNoise(find_embeddings(plan.model), plan.settings.neftune)
        plan.model = enter(plan.model, noise)


class RematArguments(TypedDict, total=False):
    """Activations that are recomputed."""

    remat: Annotated[bool, Argument(False, form="switch", needs_loss=True)]
    """Recompute most activations in the backward pass instead of storing them.

    For networks whose activations do not fit into memory (`Model.with_remat`)."""


def recompute_activations(plan: Plan) -> None:
    """Recompute most activations in the backward pass."""
    if plan.settings.remat:
        plan.model = plan.model.with_remat()
