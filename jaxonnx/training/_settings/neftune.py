"""Noise on the embeddings of tokens (`neftune=`)."""

from typing import Annotated, TypedDict

import numpy as np

from jaxonnx._arguments import Argument
from jaxonnx._rewrite.network import enter
from jaxonnx.errors import TrainingError
from jaxonnx.llm import token_input
from jaxonnx.model import Model
from jaxonnx.training._settings import Plan
from jaxonnx.views import EmbeddingNoise


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


_SAME = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Operators through which tokens pass on their way to an embedding."""


def find_embeddings(model: Model) -> dict[str, float]:
    """Return the values that are embeddings of tokens, each with the factor that scales it.

    Raises:
      TrainingError: the model has no embeddings.
    """
    tokens = token_input(model, "neftune adds noise to embeddings")
    producers, tensors = model.graph.producers, model.tensors

    def source(name: str) -> str:
        while name in producers and producers[name].op.name in _SAME:
            name = producers[name].inputs[0]
        return name

    values = {
        node.outputs[0]: 1.0
        for node in model.graph.nodes
        if node.op.like == "Gather" and source(node.inputs[1]) == tokens
    }
    if not values:
        raise TrainingError(
            f"neftune adds noise to embeddings, and no Gather reads rows by the input '{tokens}'"
        )
    for node in model.graph.nodes:
        if node.op.name == "Mul":
            for value, factor in (node.inputs, node.inputs[::-1]):
                number = tensors.get(source(factor), ())
                if source(value) in values and np.size(number) == 1:
                    values[source(value)] = float(np.asarray(number).item())
    return values
