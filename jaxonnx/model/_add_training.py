"""`add_training`: a model's file with its own training in it."""

import os
import re
from collections.abc import Mapping

from onnx import ModelProto

from jaxonnx._graph.select import matching
from jaxonnx._graph.uses import weights
from jaxonnx.model._load import load
from jaxonnx.model._model import Model, Trainable
from jaxonnx.model._save import to_proto
from jaxonnx.optim import OnnxTransformation
from jaxonnx.training_info import add


def add_training(
    model: Model | ModelProto | bytes | str | os.PathLike,
    *,
    loss: str,
    optimizer: OnnxTransformation,
    trainable: Trainable | None = None,
    init: str | Mapping[str, str] | None = None,
) -> ModelProto:
    """Return a file that carries its own training: the network with loss, optimizer and count.

    Inference is unchanged, and runtimes without training ignore the rest.
    `jaxonnx.load(...).training` executes it; its batches hold the inputs of the network and the
    targets, an input named "target" (or "target_2", where the network uses that name).
    BatchNormalization and Dropout train as they infer, with the statistics of the file and without
    dropping, because the algorithm runs the inference graph.

    >>> import jaxonnx
    >>> from jaxonnx import demo
    >>> proto = add_training(
    ...     demo.model(), loss="squared_error", optimizer=jaxonnx.optim.adam(1e-3), trainable="14.*"
    ... )
    >>> [entry.key for entry in proto.training_info[0].update_binding][:2]
    ['14.weight', '14.bias']

    Args:
      model: a network with one output.
      loss: the mean of a loss of optax, "squared_error", "sigmoid_binary_cross_entropy" (of
        logits) or "softmax_cross_entropy_with_integer_labels" (classes on the last axis); or of
        "absolute_error"; or one of ONNX, "SoftmaxCrossEntropyLoss" or "NegativeLogLikelihoodLoss"
        (of log-probabilities), whose classes are on axis 1.
      optimizer: `jaxonnx.optim.adam`, `adagrad` or `momentum`. Its learning rate may be a schedule
        that computes with scalars, as those of optax do; it becomes part of the file.
      trainable: the parameters to train, as in `Model.with_trainable`; None means
        `model.params`.
      init: writes an initialization graph, with which the network can be trained from scratch:
        "glorot", "he", "normal" (0.01 wide) or "zeros" for all trained tensors, of which vectors
        become 0, scales 1 and slopes of PRelu 0.25; or such kinds (and "ones") by names as those of
        `trainable`, the other parameters keeping the values of the file.

    Returns:
      A ModelProto with one TrainingInfoProto. Its initialization also resets the optimizer's state
      and the update count.

    Raises:
      TrainingError: unknown loss, optimizer or initializer, a model that has training_info
        already, several outputs, or trained tensors that are not float32 or float64.
      UnsupportedError: the schedule needs what ONNX does not have.
    """
    model = model if isinstance(model, Model) else load(model)
    model = model if trainable is None else model.with_trainable(trainable)
    if isinstance(init, Mapping):
        init = _by_tensor(init, model)
    proto = to_proto(model, repeat=True)  # what is trained must be an initializer
    add(proto, [*model.params], loss, optimizer, init, weights(model.graph, model.tensors))
    return proto


def _by_tensor(init: Mapping[str, str], model: Model) -> dict[str, str]:
    """Return the kind of initializer of each tensor; the first pattern that matches decides.

    A name that matches no tensor stays as it is, for the error of `training_info.add`.
    """
    kinds: dict[str, str] = {}
    for name, kind in init.items():
        tensors = matching(name, model.params, places=model._places)
        for tensor in tensors or [name]:
            kinds.setdefault(re.escape(tensor) if tensors else name, kind)
    return kinds
