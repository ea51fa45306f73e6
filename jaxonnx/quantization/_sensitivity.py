"""`sensitivity`: the error of the outputs when a single tensor is quantized or made sparse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxonnx._figures import new_axes
from jaxonnx._rewrite.network import Network, with_tensors
from jaxonnx.quantization._ranges import spread_scale, weight_parameters
from jaxonnx.quantization._scheme import TYPES, Quantization
from jaxonnx.quantization._sites import WeightSite

Changes = Mapping[str, Any] | None
"""New values of parameters and state by name; None for a pattern that does not fit."""


class Trial(NamedTuple):
    """A choice of types that `jaxonnx.quantize(max_loss=)` evaluated."""

    loss: float
    """What it loses relative to floating point, in units of the metric."""
    size: int
    """The bytes of the weights, and of the activations of one example."""
    wider_types: Mapping[str, str | None]
    """The tensors with other types than the narrowest; None is floating point."""


@dataclass(frozen=True)
class Sensitivity:
    """The error that each tensor causes when only it is quantized; prints as a table, largest
    first.

    Attributes:
      errors: by name of the weight or activation, then by dtype or pattern: the mean squared change
        of the outputs, divided by their mean square.
      sizes: the number of elements of each weight, and of each activation for one example.
      trials: what `jaxonnx.quantize(max_loss=)` evaluated, in order; the last one is its result.
    """

    errors: Mapping[str, Mapping[str, float]]
    sizes: Mapping[str, int]
    trials: Sequence[Trial] = field(default=(), kw_only=True)

    @property
    def types(self) -> tuple[str, ...]:
        """The dtypes and patterns that were measured."""
        return tuple(dict.fromkeys(kind for row in self.errors.values() for kind in row))

    @property
    def ranking(self) -> list[str]:
        """The names of the tensors, sorted by their largest error, in descending order."""
        return sorted(self.errors, key=lambda n: -max(self.errors[n].values(), default=0))

    @property
    def wider_types(self) -> dict[str, str]:
        """The types of the tensors that the last trial gives more bits."""
        return (
            {n: t or "float32" for n, t in self.trials[-1].wider_types.items()}
            if self.trials
            else {}
        )

    def __str__(self) -> str:
        def show(name: str, kind: str) -> str:
            return f"{self.errors[name][kind]:.2e}" if kind in self.errors[name] else ""

        rows = [
            (name, f"{self.sizes[name]:,}", *(show(name, kind) for kind in self.types))
            for name in self.ranking
        ]
        head: tuple[str, ...] = "weight", "size", *self.types
        if not self.trials:
            return _align([head, *rows])
        rows = [(*row, self.wider_types.get(row[0], "")) for row in rows]
        tried = [
            (f"{i}", f"{x.loss:.4g}", f"{x.size:,}", f"{len(x.wider_types)} of {len(rows)}")
            for i, x in enumerate(self.trials, 1)
        ]
        tables = (
            [("tensor", *head[1:], "result"), *rows],
            [("trial", "loss", "bytes", "wider"), *tried],
        )
        return "\n\n".join(map(_align, tables))

    def plot(self, axes: Any = None) -> Any:
        """Draw a bar for each tensor and dtype, on a log axis; return the matplotlib axes."""
        axes = new_axes(axes)
        names, height = [*self.errors], 0.8 / len(self.types)
        places = np.arange(len(names))
        for k, kind in enumerate(self.types):
            measured = [self.errors[name].get(kind, np.nan) for name in names]
            values = [max(e, 1e-12) if np.isfinite(e) else np.nan for e in measured]
            axes.barh(places + k * height, values, height, label=kind)
        labels = [f"{n}: {self.wider_types[n]}" if n in self.wider_types else n for n in names]
        axes.set_yticks(places + 0.4 - height / 2, labels)
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="relative squared change of the outputs")
        axes.legend()
        return axes


def _align(table: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
    return "\n".join(lines)


def output_error(model: Network, examples: Sequence[Sequence[Any]]) -> Callable[[Network], float]:
    """Return the squared change of the outputs of another network divided by their squares.

    Args:
      model: the network to compare with.
      examples: batches of inputs, in the order of the model's.
    """
    names = [value.name for value in model.inputs]

    def evaluate(network: Network, inputs: Sequence[Any]) -> list[Any]:
        feed = dict(zip(names, map(jnp.asarray, inputs), strict=True))
        outputs = network.program(network.params, network.state, None, feed)
        return [y for y in outputs if jnp.issubdtype(y.dtype, jnp.floating)]

    exact = [evaluate(model, inputs) for inputs in examples]
    size = sum(float(jnp.square(y).sum()) for outputs in exact for y in outputs)

    def error(network: Network) -> float:
        changed = sum(
            float(jnp.square(a - b).sum())
            for inputs, expected in zip(examples, exact, strict=True)
            for a, b in zip(evaluate(network, inputs), expected, strict=True)
        )
        return changed / max(size, float(np.finfo(np.float32).tiny))

    return error


def measure(
    model: Network,
    kinds: Mapping[str, Sequence[str | None]],
    change: Callable[[str, str], Changes],
    examples: Sequence[Sequence[Any]],
) -> dict[str, dict[str, float]]:
    """Measure the change of the outputs when one tensor at a time is rounded or made sparse.

    Args:
      model: the network in floating point.
      kinds: the types or patterns to try, by the name of the tensor; None is left out.
      change: from a name and a type to the new tensors.
      examples: batches of inputs, in the order of the model's.

    Returns:
      For each tensor and type the squared change of the outputs divided by their squares.
    """
    error = output_error(model, examples)
    result: dict[str, dict[str, float]] = {name: {} for name in kinds}
    for name, tried in kinds.items():
        for kind in filter(None, tried):
            new = change(name, kind)
            result[name][kind] = np.inf if new is None else error(with_tensors(model, new))
    return result


def round_weight(
    model: Network,
    sites: Mapping[str, WeightSite],
    schemes: Mapping[str, Quantization | None],
    name: str,
    kind: str,
) -> Changes:
    """Round a weight by a scheme, or prune it to the pattern `kind` if there is no scheme.

    Returns:
      The weight by its name, float32; None if its shape does not fit the pattern.
    """
    w, site, scheme = np.asarray(model.tensors[name]), sites[name], schemes[kind]
    if scheme is None:
        from jaxonnx import sparse

        pattern, axes = sparse.parse(kind, True), (site.output, site.input)
        if pattern.misfit(w.shape, axes):
            return None
        return {name: np.where(sparse.mask(w, pattern, axes=axes), w, 0)}
    number = TYPES[scheme.weights]
    scale = spread_scale(weight_parameters(w, site, scheme), w)
    rounded = number.round(w / scale + number.middle) - number.middle
    return {name: (rounded * scale).astype(np.float32)}


Ladders = Mapping[str, Sequence[str | None]]
"""The types of each tensor that are chosen among, from the narrowest. None is float32."""


def bytes_of(kind: str | None, elements: int) -> float:
    """Return the bytes that elements of a type take; those of None are float32."""
    return elements * (TYPES[kind].bits if kind else 32) / 8


def rank_steps(
    errors: Mapping[str, Mapping[str, float]], ladders: Ladders, sizes: Mapping[str, int]
) -> Iterator[tuple[str, str | None]]:
    """Yield steps of a tensor to its next wider type, until all have their widest.

    All tensors start in their narrowest type. The next step is that which saves most error for each
    byte that it adds.

    Args:
      errors: of each tensor by type, from `measure`.
      ladders: the types of each tensor.
      sizes: the number of elements of each tensor.

    Yields:
      The tensor, and its next type.
    """

    def gain(name: str, i: int) -> float:
        """Return the error that the step from type i saves for each byte."""
        now, after = ladders[name][i : i + 2]
        cost = bytes_of(after, sizes[name]) - bytes_of(now, sizes[name])
        better = errors[name][str(now)] - (errors[name][after] if after else 0.0)
        return better / max(cost, 1e-9)

    place = dict.fromkeys(ladders, 0)
    while open_ := {n: gain(n, i) for n, i in place.items() if i + 1 < len(ladders[n])}:
        name = max(open_, key=lambda n: open_[n])
        place[name] += 1
        yield name, ladders[name][place[name]]
