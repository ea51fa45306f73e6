"""`sensitivity`: the error of the outputs when a single weight is quantized or made sparse."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx import sparse
from jaxonnx._figures import new_axes
from jaxonnx._require import check_arguments, require_integer
from jaxonnx.errors import InputError
from jaxonnx.model import Model, as_model
from jaxonnx.quantization._ranges import read_examples, spread_scale, weight_parameters
from jaxonnx.quantization._scheme import TYPES, Quantization
from jaxonnx.quantization._sites import WeightSite, find_weights


@dataclass(frozen=True)
class Sensitivity:
    """The error that each weight causes when only it is quantized; prints as a table, largest
    first.

    Attributes:
      errors: by name of the weight, then by dtype or pattern: the mean squared change of the
        outputs, divided by their mean square.
      sizes: the number of elements of each weight.
    """

    errors: Mapping[str, Mapping[str, float]]
    sizes: Mapping[str, int]

    @property
    def types(self) -> tuple[str, ...]:
        """The dtypes and patterns that were measured."""
        return tuple(next(iter(self.errors.values())))

    @property
    def ranking(self) -> list[str]:
        """The names of the weights, sorted by their largest error, in descending order."""
        return sorted(self.errors, key=lambda name: -max(self.errors[name].values()))

    def __str__(self) -> str:
        rows = [
            (name, f"{self.sizes[name]:,}", *(f"{e:.2e}" for e in self.errors[name].values()))
            for name in self.ranking
        ]
        table = [("weight", "size", *self.types), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
        return "\n".join(lines)

    def plot(self, axes: Any = None) -> Any:
        """Draw a bar for each weight and dtype, on a log axis; return the matplotlib axes."""
        axes = new_axes(axes)
        names, height = [*self.errors], 0.8 / len(self.types)
        places = np.arange(len(names))
        for k, kind in enumerate(self.types):
            measured = [self.errors[name][kind] for name in names]
            values = [max(e, 1e-12) if np.isfinite(e) else np.nan for e in measured]
            axes.barh(places + k * height, values, height, label=kind)
        axes.set_yticks(places + 0.4 - height / 2, names)
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="relative squared change of the outputs")
        axes.legend()
        return axes


def sensitivity(
    model: Model | str | os.PathLike | bytes | ModelProto,
    data: Any,
    types: Sequence[str] = ("int8", "int4"),
    *,
    batch_size: int | None = None,
    batches: int = 4,
    preprocess: Any = None,
) -> Sensitivity:
    """Measure the error of the outputs when one weight at a time is quantized or made sparse.

    Each weight is rounded with one scale per channel, while all other weights and all activations
    stay in floating point. Labels are not needed. The errors of several weights add up
    approximately.

    >>> import numpy as np, jaxonnx
    >>> from jaxonnx import demo
    >>> x = np.random.default_rng(0).random((32, 1, 8, 8), np.float32)
    >>> found = jaxonnx.sensitivity(demo.mlp(), x, ("int8", "int4", "2:4"))
    >>> found.errors["body_weight"]["int8"] < found.errors["body_weight"]["int4"]
    True

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts.
      data: inputs in any form that `Model.predict` accepts, or texts as in `jaxonnx.train`.
      types: dtypes of weights like "int8", or sparsity patterns like "2:4".
      batch_size: the number of examples per batch. Ignored for iterables.
      batches: the number of batches to compare outputs on.
      preprocess: as in `jaxonnx.train`, for folders of images and texts.

    Returns:
      The errors of all weights of Conv, ConvTranspose, Gemm, MatMul, RNN, GRU and LSTM. The error
      of a pattern is infinite for a weight whose shape does not fit it.

    Raises:
      InputError: the model has no such weight, or there is no such dtype or pattern.
      TrainingError: the data do not fit the model.
    """
    check_arguments(sensitivity, locals())
    require_integer("batches", batches)
    net = as_model(model)
    net, source = read_examples(net, data, batch_size, preprocess)
    chosen = net.params.keys() - net._factors
    sites = {n: s for n, s in find_weights(net.graph, net.tensors).items() if n in chosen}
    if not sites:
        raise InputError(
            "the model has no weight that can be quantized; print(model) lists its tensors"
        )
    examples = [batch.inputs for batch in islice(source.batches(0), batches)]
    schemes = {kind: None if ":" in kind else Quantization.of(kind) for kind in types}
    errors = measure(net, sites, examples, schemes)
    return Sensitivity(errors, {name: int(net.params[name].size) for name in sites})


def measure(
    model: Model,
    sites: Mapping[str, WeightSite],
    examples: Sequence[Sequence[Any]],
    schemes: Mapping[str, Quantization | None],
) -> dict[str, dict[str, float]]:
    """Measure the change of the outputs when one weight at a time is rounded or made sparse.

    Args:
      model: the network in floating point.
      sites: the weights.
      examples: batches of inputs, in the order of the model's.
      schemes: by name; None if the name is that of a sparsity pattern.

    Returns:
      For each weight and scheme the squared change of the outputs divided by their squares.
    """
    names = [value.name for value in model.inputs]

    @jax.jit
    def evaluate(params, inputs):
        outputs = model.program.evaluate(params, model.state, dict(zip(names, inputs, strict=True)))
        return [y for y in outputs if jnp.issubdtype(y.dtype, jnp.floating)]

    exact = [evaluate(model.params, tuple(inputs)) for inputs in examples]

    def error(params: Any) -> float:
        changed, size = 0.0, 0.0
        for inputs, expected in zip(examples, exact, strict=True):
            found = evaluate(params, tuple(inputs))
            changed += sum(
                float(jnp.square(a - b).sum()) for a, b in zip(found, expected, strict=True)
            )
            size += sum(float(jnp.square(b).sum()) for b in expected)
        return changed / max(size, float(np.finfo(np.float32).tiny))

    result: dict[str, dict[str, float]] = {name: {} for name in sites}
    for name, site in sites.items():
        for kind, scheme in schemes.items():
            w = _approximate(np.asarray(model.params[name]), site, kind, scheme)
            value = np.inf if w is None else error({**model.params, name: jnp.asarray(w)})
            result[name][kind] = value
    return result


def _approximate(
    w: np.ndarray, site: WeightSite, kind: str, scheme: Quantization | None
) -> np.ndarray | None:
    """Round a weight by a scheme, or prune it to the pattern `kind` if there is no scheme.

    Returns:
      The weight, float32; None if its shape does not fit the pattern.
    """
    if scheme is None:
        pattern, axes = sparse.parse(kind, True), (site.output, site.input)
        if pattern.misfit(w.shape, axes):
            return None
        return np.where(sparse.mask(w, pattern, axes=axes), w, 0)
    number = TYPES[scheme.weights]
    scale = spread_scale(weight_parameters(w, site, scheme), w)
    rounded = number.round(w / scale + number.middle) - number.middle
    return (rounded * scale).astype(np.float32)


def choose_types(
    errors: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int], share: float
) -> dict[str, str | None]:
    """Choose int4, int8 or None (float32) for each weight within a limit of their total size.

    A greedy search: all weights start as int4; then the weight whose error falls most for each
    added byte gets the next wider type, as long as one fits.

    Args:
      errors: of each weight by type, from `measure`.
      sizes: the number of elements of each weight.
      share: the limit, as a fraction of the size of all weights in float32.

    Raises:
      InputError: the limit is below the size with int4 for all.
    """
    ladder: tuple[tuple[str | None, float], ...] = (("int4", 1 / 8), ("int8", 1 / 4), (None, 1.0))
    total = sum(sizes.values())
    step = dict.fromkeys(sizes, 0)
    left = share * total - total / 8
    if left < 0:
        raise InputError(f"size={share} is less than four bits take, which is 0.125 of the weights")

    def gain(name: str) -> tuple[float, float]:
        """Return the error that the next type saves per size, and the size that it adds."""
        (kind, now), (after, then) = ladder[step[name]], ladder[step[name] + 1]
        better = errors[name][str(kind)] - (errors[name][after] if after else 0.0)
        cost = (then - now) * sizes[name]
        return better / cost, cost

    while open_ := [n for n in sizes if step[n] + 1 < len(ladder) and gain(n)[1] <= left]:
        name = max(open_, key=lambda n: gain(n)[0])
        left -= gain(name)[1]
        step[name] += 1
    return {name: ladder[step[name]][0] for name in sizes}
