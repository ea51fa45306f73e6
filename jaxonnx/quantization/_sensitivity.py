"""`sensitivity`: the error of the outputs when a single weight is quantized or made sparse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._figures import new_axes
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError
from jaxonnx.quantization._ranges import spread_scale, weight_parameters
from jaxonnx.quantization._scheme import TYPES, Quantization
from jaxonnx.quantization._sites import WeightSite


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


def measure(
    model: Network,
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
        from jaxonnx import sparse

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
