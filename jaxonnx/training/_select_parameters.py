"""Select the parameters of a run: adapters, `trainable`, statistics, Dropout, remat."""

import jax

from jaxonnx._data.language_models import token_input
from jaxonnx._graph.gradients import find_without_gradient
from jaxonnx._rewrite.network import enter
from jaxonnx._text import list_some
from jaxonnx.errors import TrainingError
from jaxonnx.lora import LoRA
from jaxonnx.model import Model
from jaxonnx.quantization import select_scales
from jaxonnx.training._head import beside_adapters
from jaxonnx.training._settings import Settings
from jaxonnx.views import EmbeddingNoise

_ADAPTERS = 2**32 - 1
"""What is folded into the seed's key for adapters; steps fold in their number."""


def select_parameters(model: Model, settings: Settings) -> Model:
    """Return the model whose parameters the run trains.

    Raises:
      TrainingError: nothing is left to be trained.
      InputError: a choice that does not fit the model.
    """
    if settings.statistics is not None:
        mode = settings.statistics
        model = model.with_statistics("batch" if mode == "recompute" else mode)
    if settings.dropout is not None:
        model = model.with_dropout(settings.dropout)
    if settings.neftune:
        model = enter(model, EmbeddingNoise(find_embeddings(model), settings.neftune))
    lora, trainable = settings.lora, settings.trainable
    if isinstance(lora, LoRA):
        key = jax.random.fold_in(jax.random.key(settings.seed), _ADAPTERS)
        model = lora.attach(model, key, trainable=beside_adapters(model, trainable))
    elif lora is not None:
        model = lora.attach(model)
    elif trainable is not None:
        model = select_scales(model, model.with_trainable(trainable))
    if settings.remat:
        model = model.with_remat()
    if not model.params:
        raise TrainingError("no parameter is to be trained; print(model) shows what the model has")
    return model


_SAME = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Operators through which tokens pass on their way to an embedding."""


def find_embeddings(model: Model) -> tuple[str, ...]:
    """Return the values that are embeddings of tokens.

    Raises:
      TrainingError: there are none.
    """
    tokens = token_input(model, "neftune adds noise to embeddings")
    producers = model.graph.producers

    def source(name: str) -> str:
        while name in producers and producers[name].op.name in _SAME:
            name = producers[name].inputs[0]
        return name

    values = [
        node.outputs[0]
        for node in model.graph.nodes
        if node.op.like == "Gather" and source(node.inputs[1]) == tokens
    ]
    if not values:
        raise TrainingError(
            f"neftune adds noise to embeddings, and no Gather reads rows by the input '{tokens}'"
        )
    return tuple(values)


def freeze_without_gradient(model: Model) -> tuple[Model, list[str]]:
    """Freeze the parameters that no gradient reaches; return the model, and notes on them.

    Raises:
      TrainingError: no parameter has a gradient.
    """
    names = () if model.program.adapts else model.params
    frozen = find_without_gradient(model.graph, names)
    if not frozen:
        return model, []
    trained = [name for name in model.params if name not in frozen]
    if not trained:
        raise TrainingError(
            f"no output has a gradient with respect to a parameter ({list_some(frozen)}), as none "
            "has behind operators on integers: model.with_outputs(NAME) ends the graph before "
            "these, and quantize= trains weights of quantized operators"
        )
    model = model.with_trainable(lambda name, _: name in trained)
    return model, [
        f"frozen, as no output has a gradient with respect to them: {list_some(frozen, '')}; "
        f"trained: {list_some(trained, '')}"
    ]
