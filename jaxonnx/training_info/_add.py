"""Writing training_info: a network gets a loss, an optimizer and initializers in its own file."""

import math
import re
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from jaxonnx._graph.uses import Weight
from jaxonnx._graph.values import dimension
from jaxonnx._io.protos import Writer, defined_names, onnx_type, opset_of
from jaxonnx._require import require_choice
from jaxonnx._weights import Matrix
from jaxonnx.errors import TrainingError
from jaxonnx.onnx_out import Nodes, Tensor
from jaxonnx.optim import OnnxTransformation

DOMAIN = "ai.onnx.preview.training"
OPSET = 12
"""The first opset that has all operators written here."""


# Each function below writes the nodes of a mean loss of outputs y and targets t, and returns its
# name.


def _operator(name: str) -> Callable[[Writer, str, str], str]:
    """Return a function that writes a loss which is an operator."""
    return lambda g, y, t: g.node(name, y, t, name="loss")


def _squared_error(g: Writer, y: str, t: str) -> str:
    error = g.node("Sub", y, t)
    return g.node("ReduceMean", g.node("Mul", error, error), name="loss", keepdims=0)


def _binary(g: Writer, y: str, t: str) -> str:
    # -log p(y) if t = 1, -log(1 - p(y)) if t = 0, where p is the logistic function: both are
    # softplus(y) - y t
    values = g.node("Sub", g.node("Softplus", y), g.node("Mul", y, t))
    return g.node("ReduceMean", values, name="loss", keepdims=0)


_LOSSES: dict[str, tuple[Callable[[Writer, str, str], str], bool]] = {
    "softmax_cross_entropy_with_integer_labels": (_operator("SoftmaxCrossEntropyLoss"), True),
    "SoftmaxCrossEntropyLoss": (_operator("SoftmaxCrossEntropyLoss"), True),
    "NegativeLogLikelihoodLoss": (_operator("NegativeLogLikelihoodLoss"), True),
    "squared_error": (_squared_error, False),
    "absolute_error": (
        lambda g, y, t: g.node(
            "ReduceMean", g.node("Abs", g.node("Sub", y, t)), name="loss", keepdims=0
        ),
        False,
    ),
    "sigmoid_binary_cross_entropy": (_binary, False),
}
"""The mean losses by name, and whether their targets are labels."""


def add(
    proto: ModelProto,
    params: Collection[str],
    loss: str,
    optimizer: OnnxTransformation,
    init: str | Mapping[str, str] | None,
    meanings: Mapping[str, Weight],
) -> None:
    """Add training_info to a model, in place; see `jaxonnx.add_training`.

    Args:
      proto: the model.
      params: the initializers to train.
      loss: a key of `_LOSSES`.
      optimizer: one of `jaxonnx.optim`.
      init: how weights are initialized; see `kinds`.
      meanings: how the graph uses each weight.

    Raises:
      TrainingError: ONNX's training operators do not take this model, loss or optimizer.
    """
    stored = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    _check(proto, loss, optimizer, {name: stored.get(name) for name in params})
    values = {name: stored[name] for name in params}
    used = set(defined_names(proto.graph))
    step = Writer("algorithm", used)
    reset = Writer("initialization", used)
    inputs = _loss(step, proto.graph, loss)
    updates, state = _update(step, optimizer, values, inputs, opset_of(proto))
    starts = {name: fill(reset, name, value) for name, value in state.items()}
    for name, kind in kinds(init, values, meanings).items():
        starts[name] = draw(reset, kind, name, values[name], meanings[name].matrix)
    info = proto.training_info.add(algorithm=step.graph, initialization=reset.graph)
    for name, output in updates.items():
        info.update_binding.add(key=name, value=output)
    for name, output in starts.items():
        info.initialization_binding.add(key=name, value=output)
    proto.ir_version = max(proto.ir_version, 7)  # the first with training_info
    if all(entry.domain != DOMAIN for entry in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def _check(
    proto: ModelProto,
    loss: str,
    optimizer: OnnxTransformation,
    values: Mapping[str, np.ndarray | None],
) -> None:
    """Raise `TrainingError` if the model, loss or optimizer cannot be written."""
    if proto.training_info:
        raise TrainingError(
            "the model carries training_info already; remove it first "
            "(`del model_proto.training_info[:]`) or train with it"
        )
    require_choice("loss", loss, [*_LOSSES], TrainingError)
    if not isinstance(optimizer, OnnxTransformation):
        raise TrainingError(
            "the optimizer must be jaxonnx.optim.adam, adagrad or momentum, which ONNX has "
            "operators for; with any other use jaxonnx.train"
        )
    if (opset := opset_of(proto)) < OPSET:
        raise TrainingError(
            f"the model has opset {opset}, training needs {OPSET}; convert it with "
            f"jaxonnx.convert(model, opset={OPSET})"
        )
    if len(proto.graph.output) != 1:
        raise TrainingError(f"the model has {len(proto.graph.output)} outputs; a loss takes one")
    if not values:
        raise TrainingError("the model has no parameter to train; choose some by trainable=")
    dtypes = {value.dtype for value in values.values() if value is not None}
    for name, value in values.items():
        if value is None:
            raise TrainingError(
                f"'{name}' is not an initializer of the main graph, as training_info demands; "
                "leave it out by trainable="
            )
        if value.dtype not in (np.float32, np.float64) or len(dtypes) > 1:
            raise TrainingError(
                f"'{name}' is {value.dtype}; ONNX's optimizers take tensors that are all float32 "
                "or all float64; leave others out by trainable="
            )


def _loss(g: Writer, main: GraphProto, loss: str) -> tuple[list[str], str]:
    """Write the input of the targets, and the loss.

    Returns:
      The names of all inputs, those of the model and the targets, and the name of the loss.
    """
    (output,) = main.output
    write, counts_classes = _LOSSES[loss]
    kind = output.type.tensor_type
    if not kind.HasField("shape"):
        raise TrainingError(
            f"the output '{output.name}' has no declared shape; add it with onnx.shape_inference"
        )
    y, shape = output.name, [*map(dimension, kind.shape.dim)]
    if counts_classes:
        last = len(shape) - 1
        if loss[0].islower() and last > 1:  # optax has the classes last, ONNX on axis 1
            y = g.node("Transpose", y, perm=[0, last, *range(1, last)])
            del shape[-1]
        else:
            del shape[1]
    target = g.fresh("target")
    element = TensorProto.INT64 if counts_classes else kind.elem_type
    g.graph.input.append(helper.make_tensor_value_info(target, element, shape))
    value = write(g, y, target)
    stored = {tensor.name for tensor in main.initializer}
    inputs = [v.name for v in main.input if v.name not in stored]
    g.graph.output.append(helper.make_tensor_value_info(value, kind.elem_type, []))
    return [*inputs, target], value


def _update(
    g: Writer,
    optimizer: OnnxTransformation,
    values: Mapping[str, np.ndarray],
    cut: tuple[list[str], str],
    opset: int,
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Write the gradients, the learning rate and the optimizer's operator.

    Args:
      g: the algorithm's graph.
      optimizer: the optimizer.
      values: the weights.
      cut: the names of the inputs and of the loss, from which Gradient cuts its subgraph.
      opset: of the model.

    Returns:
      For each variable the output with its new value, and the optimizer's initial state by name.
    """
    inputs, loss = cut
    gradients = [g.fresh(f"gradient.{name}") for name in values]
    g.nodes(
        "Gradient", [*values, *inputs], gradients, xs=[*values], zs=inputs, y=loss, domain=DOMAIN
    )
    first = np.array(optimizer.first, np.int64)
    count = g.constant("T", first, np.int64)
    rate = _learning_rate(g, optimizer, count, next(iter(values.values())).dtype, opset)
    variables, state = dict(values), {count: first}
    for slot in _SLOTS[optimizer.operator]:
        zeros = {f"{slot}.{name}": np.zeros_like(value) for name, value in values.items()}
        state |= {g.constant(name, value, value.dtype): value for name, value in zeros.items()}
    variables |= {name: value for name, value in state.items() if name != count}
    updates = {name: g.fresh(f"{name}.new") for name in variables}
    # the operators take all weights, then all gradients, then each state of all weights
    tensors = list(variables)
    tensors[len(values) : len(values)] = gradients
    results = updates.values()
    g.nodes(
        optimizer.operator, [rate, count, *tensors], results, domain=DOMAIN, **optimizer.attributes
    )
    for name, value in variables.items():
        g.output(updates[name], value)
    updates[count] = g.node("Add", count, g.constant("one", 1, np.int64), name=f"{count}.new")
    g.output(updates[count], first)
    return updates, state


_SLOTS = {"Adam": "VH", "Adagrad": "H", "Momentum": "V"}
"""The tensors of state that each operator keeps for a weight, by the names of the specification."""


def _learning_rate(
    g: Writer, optimizer: OnnxTransformation, count: str, dtype: np.dtype, opset: int
) -> str:
    """Write the learning rate, a constant or a schedule of the count of updates.

    Args:
      count: the name of an int64 scalar.
      dtype: of the rate, float32 or float64.

    Raises:
      UnsupportedError: naming the JAX primitive of a schedule that has no operator.
    """
    if not callable(optimizer.learning_rate):
        return g.constant("learning_rate", optimizer.learning_rate, dtype)
    if optimizer.first:  # a schedule counts the updates made, from 0 on
        count = g.node("Sub", count, g.constant("first", optimizer.first, np.int64))
    argument = g.node("Cast", count, name="schedule", to=onnx_type(np.int32))
    with jax.enable_x64(dtype == np.float64):  # it is computed in the type of its result
        schedule = jax.make_jaxpr(optimizer.learning_rate)(jax.ShapeDtypeStruct((), jnp.int32))
        nodes = Nodes(g, opset)
        (value,) = nodes.program(schedule, [Tensor(argument, (), np.int32)])
    return g.node("Cast", nodes.name(value), name="learning_rate", to=onnx_type(dtype))


_NUMBERS = {"zeros": 0.0, "ones": 1.0}
KINDS = ("glorot", "he", "normal", "zeros", "ones")


def kinds(
    init: str | Mapping[str, str] | None,
    values: Mapping[str, np.ndarray],
    meanings: Mapping[str, Weight],
) -> dict[str, str | float]:
    """Choose the initializer of each tensor, by name: a kind of `KINDS`, or a constant number.

    Args:
      init: a kind for all weights, while other tensors start from the number that suits their
        operator (a scale from 1, say); or kinds by name or regular expression, of which the first
        that matches a name in full counts; or None for none.
      values: the tensors.
      meanings: how the graph uses them.

    Raises:
      TrainingError: an unknown kind, or an expression that matches no tensor.
    """
    chosen = init if isinstance(init, Mapping) else {} if init is None else {".*": init}
    for pattern, kind in chosen.items():
        require_choice("init", kind, KINDS, TrainingError)
        if not any(name == pattern or re.fullmatch(pattern, name) for name in values):
            raise TrainingError(f"init={{{pattern!r}: ...}} matches none of {', '.join(values)}")
    result: dict[str, str | float] = {}
    for name in values:
        start = meanings[name].start if isinstance(init, str) else None
        for pattern, kind in chosen.items():
            if name == pattern or re.fullmatch(pattern, name):
                result[name] = kind if start is None else start
                break
    return result


def draw(
    writer: Writer, kind: str | float, name: str, value: np.ndarray, place: Matrix | None
) -> str:
    """Append the nodes that initialize a tensor; return the name of their output.

    glorot: uniform within sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010); he: normal with
    standard deviation sqrt(2 / fan_in) (He et al., 2015); normal: standard deviation 0.01.

    Args:
      writer: receives the nodes.
      kind: one of `KINDS`, or a number.
      name: of the tensor.
      value: an array with its shape and dtype.
      place: which of its axes are inputs and outputs, if that is known.
    """
    number = _NUMBERS.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(number, str):
        return fill(writer, name, np.full_like(value, number))
    fan_in, fan_out = _fans(value.shape, place)
    if kind == "glorot":
        limit = math.sqrt(6 / max(fan_in + fan_out, 1))
        operator, settings = "RandomUniform", {"low": -limit, "high": limit}
    else:
        scale = math.sqrt(2 / max(fan_in, 1)) if kind == "he" else 0.01
        operator, settings = "RandomNormal", {"scale": scale}
    shape, dtype = list(value.shape), onnx_type(value.dtype)
    result = writer.node(operator, name=f"{name}.start", shape=shape, dtype=dtype, **settings)
    writer.output(result, value)
    return result


def fill(writer: Writer, name: str, value: np.ndarray) -> str:
    """Append nodes for a tensor whose elements all equal the first one of `value`.

    Returns:
      The name of their output.
    """
    number = helper.make_tensor("value", onnx_type(value.dtype), [1], value.reshape(-1)[:1])
    shape = writer.constant("shape", value.shape, np.int64)
    result = writer.node("ConstantOfShape", shape, name=f"{name}.start", value=number)
    writer.output(result, value)
    return result


def _fans(shape: tuple[int, ...], place: Matrix | None) -> tuple[int, int]:
    """Return fan_in and fan_out of a weight.

    If its axes are not known, the last two are inputs and outputs, as in `jax.nn.initializers`.
    """
    rank = len(shape)
    if rank < 2:
        return 1, 1
    return (place or Matrix(rank - 1, rank - 2, kernel=tuple(range(rank - 2)))).fans(shape)
