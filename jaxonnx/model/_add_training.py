"""`add_training`: writes loss, optimizer and their state into a file as `training_info`."""

import os
import re
from collections.abc import Mapping

from onnx import ModelProto

from jaxonnx._graph.select import matching
from jaxonnx._graph.uses import weights
from jaxonnx._require import check_arguments
from jaxonnx.model._load import as_model
from jaxonnx.model._model import Model, Trainable
from jaxonnx.model._save import to_proto
from jaxonnx.optim import OnnxTransformation
from jaxonnx.training_info import add


def add_training(
    model: Model | ModelProto | bytes | str | os.PathLike[str],
    *,
    loss: str,
    optimizer: OnnxTransformation,
    trainable: Trainable | None = None,
    init: str | Mapping[str, str] | None = None,
) -> ModelProto:
    """Add a loss and an optimizer to a model, as the `training_info` of the ONNX specification.

    Inference does not change, and runtimes without training ignore `training_info`.
    `jaxonnx.load(...).training` runs it. A batch then has the inputs of the network and the
    targets, as an input "target" (or "target_2" if the network has a "target"). The algorithm runs
    the inference graph: BatchNormalization uses the running statistics of the file, and Dropout is
    inactive.

    >>> import jaxonnx
    >>> from jaxonnx import demo
    >>> proto = add_training(
    ...     demo.model(), loss="squared_error", optimizer=jaxonnx.optim.adam(1e-3), trainable="14.*"
    ... )
    >>> [entry.key for entry in proto.training_info[0].update_binding][:2]
    ['14.weight', '14.bias']

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts, with one output.
      loss: the name of a loss, which is averaged over the batch. Of optax: "squared_error",
        "sigmoid_binary_cross_entropy" (of logits), "softmax_cross_entropy_with_integer_labels"
        (classes on the last axis). Of ONNX: "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"
        (of log-probabilities), both with classes on axis 1. Or "absolute_error".
      optimizer: `jaxonnx.optim.adam`, `adagrad` or `momentum`. Its learning rate may be a schedule
        of scalar operations, as those of optax are; it becomes part of the file.
      trainable: the parameters to train, as in `Model.with_trainable`; by default `model.params`.
      init: adds an initialization graph, to train the network from scratch. "glorot", "he",
        "normal" (standard deviation 0.01) or "zeros" applies to all trained tensors; vectors become
        0, scales 1, and slopes of PRelu 0.25. Or a dict from names, as in `trainable`, to one of
        these or "ones"; the other parameters keep the values of the file.

    Returns:
      A ModelProto with one TrainingInfoProto. Its initialization also resets the optimizer state
      and the update count.

    Raises:
      TrainingError: the loss, optimizer or initializer is unknown; or the model has `training_info`
        already, several outputs, or trained tensors that are neither float32 nor float64.
      UnsupportedError: the schedule uses an operation that ONNX does not have.
    """
    check_arguments(add_training, locals())
    model = as_model(model)
    model = model if trainable is None else model.with_trainable(trainable)
    if isinstance(init, Mapping):
        # kind of initializer of each tensor; the first pattern that matches decides
        kinds: dict[str, str] = {}
        for name, kind in init.items():
            tensors = matching(name, model.params, places=model._places)
            for tensor in tensors or [name]:
                kinds.setdefault(re.escape(tensor) if tensors else name, kind)
        init = kinds
    proto = to_proto(model, repeat=True)  # what is trained must be an initializer
    add(proto, [*model.params], loss, optimizer, init, weights(model.graph, model.tensors))
    return proto
