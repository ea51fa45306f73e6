"""Compare how a file is trained with how PyTorch trains the network that it was exported from.

Exporters transpose, stack, cut and rename weights, so tensors are matched by their numbers: those
of all parameters of a network of the zoo are different, and each number of a trained tensor tells
which one of PyTorch's it is. That holds for gradients and updates too, in any layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
from onnx import numpy_helper

import jaxonnx
from jaxonnx._graph.bind import bind
from jaxonnx._graph.roles import Roles, stored_names

LEARNING_RATE = 1e-3
STEPS = 5
_FORWARD = 1e-4
"""How far an output may be off, relative to the greatest."""
_GRADIENT = 2e-3
"""How far a gradient may be off, relative to the greatest of its parameter."""
_ROUNDING = 2e-5
"""What is added to that, relative to the greatest of all gradients: sums that cancel."""
_MOST = 0.9
"""The share of a tensor's numbers by which it is a parameter or a buffer."""
_TWICE = 1.6
"""Numbers that are trained so often, on average, belong to a tie that came apart."""


class Finding(NamedTuple):
    """A difference, or one that is explained.

    Attributes:
      kind: "load", "run", "save", "size", "frozen", "trained", "untied", "outputs", "gradient",
        "adam" or "accumulated".
      tensor: PyTorch's name of the parameter or buffer concerned; "" if it is not one.
      detail: what differs.
      why: the explanation; "" if there is none.
    """

    kind: str
    tensor: str
    detail: str
    why: str = ""


@dataclass(frozen=True)
class Golden:
    """What PyTorch says of a network, all as NumPy arrays.

    The loss is the mean square of the first output less `target`.

    Attributes:
      inputs: by the names in the file.
      target, output: of the shape of the first output.
      params: as `named_parameters()` has them, ties once.
      buffers: as `named_buffers()`.
      gradients: of the parameters that have one.
      losses: of the first steps of Adam; empty if they were not taken.
      accumulated: of the batches of as many steps, each of two batches of the same inputs, which
        `unequal` weighs; empty likewise.
    """

    inputs: dict[str, np.ndarray]
    target: np.ndarray
    output: np.ndarray
    params: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))
    accumulated: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def save(self, path: Path) -> None:
        arrays = {}
        for name, value in vars(self).items():
            if isinstance(value, dict):
                arrays |= {f"{name}:{key}": array for key, array in value.items()}
            else:
                arrays[name] = value
        np.savez_compressed(path, **arrays)

    @classmethod
    def read(cls, path: Path) -> Self:
        dicts: dict[str, dict] = {n: {} for n in ("inputs", "params", "buffers", "gradients")}
        plain = {}
        with np.load(path) as arrays:
            for key, array in arrays.items():
                name, found, rest = key.partition(":")
                if found:
                    dicts[name][rest] = array
                else:
                    plain[name] = array
        return cls(**dicts, **plain)


class Numbers:
    """The different numbers of several arrays, and the places where they are."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.names = list(arrays)
        flat = [np.asarray(a, np.float32).reshape(-1) for a in arrays.values()]
        values = np.concatenate([*flat, np.zeros(0, np.float32)])
        self.owner = np.repeat(np.arange(len(flat)), [len(a) for a in flat])
        self.order = np.argsort(values, kind="stable")
        self.sorted = values[self.order]
        self.size = len(values)
        _, place, times = np.unique(values, return_inverse=True, return_counts=True)
        self.once = times[place] == 1
        """Which numbers tell their place; networks as they were initialized have some twice."""

    @property
    def different(self) -> bool:
        """Whether all but a few numbers are different."""
        return not self.size or len(np.unique(self.sorted)) > 0.999 * self.size

    def find(self, array: Any) -> np.ndarray:
        """Return the places of an array's numbers in the arrays one after the other, -1 if none."""
        flat = np.asarray(array, np.float32).reshape(-1)
        if not self.size:
            return np.full(len(flat), -1)
        at = np.minimum(np.searchsorted(self.sorted, flat), self.size - 1)
        return np.where(self.sorted[at] == flat, self.order[at], -1)


def stored_tensors(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the float tensors of a file: initializers and Constant nodes, also in functions."""
    found = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in nodes:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return {n: a for n, a in found.items() if jnp.issubdtype(a.dtype, jnp.floating)}


def compare(content: bytes, golden: Golden, run: bool = True) -> Iterator[Finding]:
    """Yield the differences between the training of a file and PyTorch's.

    Args:
      content: the file.
      golden: what PyTorch says.
      run: whether to compute outputs, gradients and steps, which takes a second or two.
    """
    try:
        model = jaxonnx.load(content)
    except jaxonnx.Error as error:
        yield Finding("load", "", f"{type(error).__name__}: {error}")
        return
    proto = onnx.ModelProto.FromString(content)
    saved = stored_tensors(model.to_onnx())
    for name, array in stored_tensors(proto).items():
        if name not in saved or array.tobytes() != saved[name].tobytes():
            yield Finding("save", "", name)
    params = {name: np.asarray(value) for name, value in model.params.items()}
    if not Numbers(golden.params).different:  # as they were before training: ones and zeros
        yield from _compare_size(params, golden)
        return
    tensors = stored_tensors(proto)
    wrong = [*compare_trained(params, tensors, golden, told_constants(proto, tensors))]
    yield from wrong
    if not run:
        return
    try:
        yield from compare_gradients(model, golden)
        if len(golden.losses) and not wrong:
            yield from compare_steps(model, golden)
        if len(golden.accumulated) and not wrong:
            yield from compare_accumulated(model, golden)
    except jaxonnx.Error as error:
        yield Finding("run", "", f"{type(error).__name__}: {error}")


def _compare_size(params: Mapping[str, np.ndarray], golden: Golden) -> Iterator[Finding]:
    """Yield by how much the count of trained numbers differs."""
    ours = sum(a.size for a in params.values())
    # nothing tells a table of zeros from a constant, and single numbers are constants
    known = [a.size > 1 and (a.ndim == 1 or np.ptp(a) > 0) for a in golden.params.values()]
    theirs = sum(a.size for a, k in zip(golden.params.values(), known, strict=True) if k)
    if not theirs <= ours <= sum(a.size for a in golden.params.values()):
        shapes = {name: a.shape for name, a in params.items()}
        yield Finding("size", "", f"{ours} trained numbers instead of {theirs}: {shapes}")


def told_constants(
    proto: onnx.ModelProto, tensors: Mapping[str, np.ndarray]
) -> list[tuple[np.ndarray, str]]:
    """Return the tensors that only their place before the first layer makes constants, and why.

    In front of a network nothing tells a learned vector from a mean of the data.
    """
    graph = bind(proto, proto.graph, tensors.keys())
    constants = Roles(graph, tensors, stored_names(proto.graph)).constants
    return [(tensors[name], why) for name, why in constants.items() if "before the first" in why]


def compare_trained(
    params: Mapping[str, np.ndarray],
    stored: Mapping[str, np.ndarray],
    golden: Golden,
    told: Sequence[tuple[np.ndarray, str]] = (),
) -> Iterator[Finding]:
    """Yield which parameters are not trained, which tensors are trained that are none, and ties.

    Args:
      params: the tensors that are trained.
      stored: the tensors of the file.
      golden: PyTorch's parameters and buffers.
      told: tensors that are constants, each with an explanation.
    """
    theirs, buffers = Numbers(golden.params), Numbers(golden.buffers)
    explained = {int(p): why for array, why in told for p in theirs.find(array) if p >= 0}
    count, there = np.zeros(theirs.size, int), np.zeros(theirs.size, bool)
    for array in stored.values():
        places = theirs.find(array)
        there[places[places >= 0]] = True
    foreign = []
    for name, array in params.items():
        places = theirs.find(array)
        np.add.at(count, places[places >= 0], 1)
        learned = (places >= 0) | (array.reshape(-1) == 0)  # a mask that was multiplied has zeros
        if learned.mean() < _MOST or not (places >= 0).any():
            foreign.append(name)
    computed = False
    for i, name in enumerate(theirs.names):
        own, shape = theirs.owner == i, str(golden.params[name].shape)
        used = own.copy()  # rows of a table that nothing looked up may not be in the file
        used[own] = golden.gradients.get(name, np.zeros(own.sum())).reshape(-1) != 0
        if not used.any():
            continue
        why = next((explained[p] for p in np.flatnonzero(used) if p in explained), "")
        if count[used].mean() > _TWICE:
            detail = f"{shape} is trained {count[used].max()} times"
            looked_up = any(_repeats(theirs, array, own) for array in params.values())
            yield Finding("untied", name, detail, "a table that the exporter looked up" * looked_up)
        elif (count[used] > 0).mean() >= _MOST:
            continue
        elif there[used].mean() < _MOST:
            computed = True
            yield Finding("frozen", name, shape, "the exporter wrote other numbers")
        elif own.sum() == 1:
            yield Finding("frozen", name, shape, "a single number, which trainable= includes")
        else:
            yield Finding("frozen", name, shape, why)
    for name in foreign:
        shown = f"{name} {params[name].shape}"
        places = buffers.find(params[name])
        if (complements(golden).find(params[name]) >= 0).mean() >= _MOST:
            yield Finding("trained", "", shown, "1 - a parameter, which the exporter computed")
            continue
        if (places >= 0).mean() >= _MOST:
            owner = buffers.names[buffers.owner[places[places >= 0][0]]]
            yield Finding("trained", owner, f"{shown}, a buffer")
        else:
            why = "of the numbers that the exporter computed" if computed else ""
            yield Finding("trained", "", shown, why)


def complements(golden: Golden) -> Numbers:
    """Return the numbers 1 - p, which PyTorch's older exporter computes of a parameter p."""
    return Numbers({name: 1 - value for name, value in golden.params.items()})


def _repeats(numbers: Numbers, array: np.ndarray, own: np.ndarray) -> bool:
    """Check whether one tensor has the same numbers of a parameter several times."""
    places = numbers.find(array)
    places = places[places >= 0]
    places = places[own[places]]
    return len(places) > _TWICE * len(np.unique(places))


def mean_square(output: Any, target: Any) -> jax.Array:
    first = output[0] if isinstance(output, tuple) else output
    return jnp.square(first - target).mean()


def compare_gradients(model: jaxonnx.Model, golden: Golden) -> Iterator[Finding]:
    """Yield how the first output and the gradients of the parameters differ, as far as trained."""

    @jax.jit
    def differentiate(params: Any, inputs: Any) -> Any:
        def loss(params: Any) -> Any:
            output = model.apply(params, **inputs)
            first = output[0] if isinstance(output, tuple) else output
            return mean_square(first, golden.target), first

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, output), gradients = differentiate(model.params, golden.inputs)
    far = _distance(output, golden.output)
    if not far <= _FORWARD:
        yield Finding("outputs", "", f"off by {far:.1e}")
        return
    numbers, others = Numbers(golden.params), complements(golden)
    ours = np.zeros(numbers.size)
    for name, gradient in gradients.items():
        flat = np.asarray(gradient).reshape(-1)
        places = numbers.find(model.params[name])
        if not (places >= 0).any():  # 1 - a parameter, which the exporter computed
            places, flat = others.find(model.params[name]), -flat
        np.add.at(ours, places[places >= 0], flat[places >= 0])
    found = {n for n in model.params if (numbers.find(model.params[n]) >= 0).mean() >= _MOST}
    trained = np.zeros(numbers.size, bool)
    for name in found:
        places = numbers.find(model.params[name])
        trained[places[places >= 0]] = True
    greatest = max((np.abs(g).max() for g in golden.gradients.values() if g.size), default=0.0)
    for i, name in enumerate(numbers.names):
        own = (numbers.owner == i) & trained & numbers.once
        if name not in golden.gradients or not own.any():
            continue
        their = golden.gradients[name].reshape(-1)[own[numbers.owner == i]]
        bound = _GRADIENT * np.abs(their).max() + _ROUNDING * greatest
        far = np.abs(ours[own] - their).max()
        if not far <= bound:
            yield Finding("gradient", name, f"off by {far:.1e} of {np.abs(their).max():.1e}")


def compare_steps(model: jaxonnx.Model, golden: Golden) -> Iterator[Finding]:
    """Yield how the losses of steps of Adam differ, the first of which is that before it."""
    data = [(golden.inputs, golden.target)] * STEPS
    result = jaxonnx.train(
        model, data, loss=mean_square, optimizer=optax.adam(LEARNING_RATE), statistics="batch"
    )
    losses = np.asarray(result.history.losses)
    if not np.allclose(losses, golden.losses, rtol=2e-3, atol=1e-7):
        yield Finding("adam", "", f"losses {losses} instead of {golden.losses}")


def unequal(target: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets of batch 0 or 1 of a step, and the weights of its examples.

    Of tokens (batch, length, words) the targets are labels, -100 where they do not count: all count
    in batch 0, and one of each row in batch 1.
    """
    if target.ndim == 3:
        labels = target.argmax(-1)
        labels[:, 1:] = np.where(number, -100, labels[:, 1:])
        return labels, np.ones(len(target), np.float32)
    return target, np.resize(np.float32([[1, 0.25, 4], [16, 1, 8]][number]), len(target))


def compare_accumulated(model: jaxonnx.Model, golden: Golden) -> Iterator[Finding]:
    """Yield how the losses of steps of Adam over two unequal batches differ."""

    def mean_squares(output: Any, target: Any) -> jax.Array:
        first = output[0] if isinstance(output, tuple) else output
        return jnp.square(first - target).reshape(len(target), -1).mean(1)

    tokens = jaxonnx.losses.cross_entropy(axis=-1, ignore_index=-100)
    batches = [(golden.inputs, *unequal(golden.target, number)) for number in (0, 1)]
    result = jaxonnx.train(
        model,
        batches * STEPS,
        loss=tokens if golden.target.ndim == 3 else mean_squares,
        optimizer=optax.adam(LEARNING_RATE),
        statistics="batch",
        accumulate=2,
    )
    losses = np.asarray(result.history.losses)
    if not np.allclose(losses, golden.accumulated, rtol=2e-3, atol=1e-7):
        yield Finding("accumulated", "", f"losses {losses} instead of {golden.accumulated}")


def _distance(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        return np.inf
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-6))
