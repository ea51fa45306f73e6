"""Gradients beside central differences of the outputs, along random directions.

Outputs are float32, so a difference over a step h has two errors: of rounding, which grows as
1 / h, and of curvature and kinks (Relu, MaxPool), which grows with h. Both are in the bend
y(h) - 2 y(0) + y(-h), which is zero for a line: its norm, over 2 h, measures the error of the
central difference. Of a ladder of steps the one with the smallest error is taken, and that error is
the tolerance, not a number chosen beforehand. Outputs are subtracted and summed in float64.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.model import Model

_STEPS = 2.0 ** np.arange(-4, -15, -2)
"""Steps, relative to the root mean square of a tensor."""
_SAMPLE = 8
"""The number of tensors with a direction of their own; another one is of all of them."""
_ROUNDING = 2e-3
"""The error of the gradient itself, of the usual size of a derivative."""
_DEVIATIONS = 4
"""Of the measured error, which is that of a sum of independent errors: one standard deviation."""
_SHARP = 0.1
"""A difference with a larger tolerance, relative to the usual derivative, tells nothing."""
_SHARP_EPS = 400
"""The same in units of the spacing of numbers: 0.4 in float16."""


class Slope(NamedTuple):
    """A derivative along a direction."""

    where: str
    """The tensor that is moved."""
    gradient: float
    difference: float
    """By central differences."""
    error: float
    """The measured error of the difference."""
    size: float
    """The usual size of a derivative along such directions."""
    limit: float
    """The largest tolerance, relative to `size`, with which the difference tells something."""

    @property
    def conclusive(self) -> bool:
        return _DEVIATIONS * self.error <= self.limit * self.size

    @property
    def ok(self) -> bool:
        """Whether both derivatives agree within the measured error."""
        allowed = _DEVIATIONS * self.error + _ROUNDING * self.size
        return abs(self.gradient - self.difference) <= allowed

    def __str__(self) -> str:
        return f"{self.where}: {self.gradient:.4g}, by differences {self.difference:.4g}"


def measure_slopes(model: Model, feeds: Mapping[str, Any], seed: int = 0) -> list[Slope]:
    """Measure derivatives of a random projection of the outputs, along random directions.

    Args:
      model: a model with parameters and outputs of real numbers.
      feeds: its inputs by name.

    Returns:
      A slope for each tensor of a sample that is spread over the network, and one for all tensors
      together; none if outputs are not finite.
    """
    random = np.random.default_rng(seed)

    @jax.jit
    def outputs(params, direction, step):
        moved = jax.tree.map(lambda w, d: (w + step * d).astype(w.dtype), params, direction)
        results = jax.tree.leaves(model.apply(moved, **feeds))
        return [y for y in results if jnp.issubdtype(y.dtype, jnp.floating)]

    zero = {name: jnp.zeros(w.shape, jnp.float32) for name, w in model.params.items()}
    center = outputs(model.params, zero, 0.0)
    if not all(np.isfinite(np.asarray(y, np.float64)).all() for y in center):
        return []
    weights = [random.standard_normal(y.shape).astype(np.float32) for y in center]

    @jax.jit
    def gradients(params):
        def project(params):
            pairs = zip(weights, outputs(params, zero, 0.0), strict=True)
            return sum(jnp.vdot(w, y.astype(jnp.float32)) for w, y in pairs)

        return jax.grad(project)(params)

    slopes = gradients(model.params)
    drawn = {
        name: (_root_mean_square(w) * random.standard_normal(w.shape)).astype(np.float32)
        for name, w in model.params.items()
    }

    def project(direction, step) -> np.ndarray:
        """Multiply all outputs with their weights; the sum of these products is differentiated."""
        pairs = zip(weights, outputs(model.params, direction, step), strict=True)
        return np.concatenate([(w * np.asarray(y, np.float64)).reshape(-1) for w, y in pairs])

    base = project(zero, 0.0)
    # outputs that do not move by chance, or not at all, are still rounded
    eps = max(float(jnp.finfo(y.dtype).eps) for y in (*center, *model.params.values()))
    rounding = float(np.linalg.norm(base) * eps / 2)

    def measure(where: str, names: Sequence[str]) -> Slope:
        direction = {**zero, **{name: drawn[name] for name in names}}
        pairs = ((np.asarray(slopes[n], np.float64), drawn[n]) for n in names)
        parts = np.concatenate([(slope * d).reshape(-1) for slope, d in pairs])
        ladder = []
        for step in _STEPS:
            up, down = (project(direction, x) for x in (step, -step))
            bend = float(np.linalg.norm(up - 2 * base + down))
            error = max(bend, rounding) / (2 * step) if np.isfinite(bend) else np.inf
            ladder.append((error, float((up - down).sum() / (2 * step))))
        error, difference = min(ladder)
        gradient = float(parts.sum())
        size = max(float(np.linalg.norm(parts)), abs(difference))
        return Slope(where, gradient, difference, error, size, max(_SHARP, _SHARP_EPS * eps))

    names = [*model.params]
    chosen = [names[i] for i in np.linspace(0, len(names) - 1, _SAMPLE).round().astype(int)]
    sample = [measure(f"'{name}'", [name]) for name in dict.fromkeys(chosen)]
    return [*sample, measure("all tensors", names)]


def _root_mean_square(w: Any) -> float:
    size = float(np.sqrt(np.mean(np.square(np.asarray(w, np.float64)))))
    return size or 1.0
