"""Derivatives against central differences, as `jax.test_util.check_grads` has them.

One program gives them all, instead of a dozen, and its values at the points beside as well.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

STEP = 1e-5


def check(
    function: Callable, inputs: Sequence[np.ndarray], order: int, rtol: float, atol: float
) -> None:
    """Compare reverse and forward mode along a random direction.

    Args:
      function: gives a list of arrays for float64 inputs.
      inputs: where it is differentiated.
      order: of the derivatives, 1 or 2; the second are both modes over the reverse one.
    """
    point = np.concatenate([x.ravel() for x in inputs])
    ends = np.cumsum([x.size for x in inputs])[:-1]
    random = np.random.default_rng(0)
    direction = random.standard_normal(point.shape)

    @jax.jit  # is traced once for all of its derivatives
    def smooth(x):
        parts = jnp.split(x, ends)
        values = (p.reshape(i.shape) for p, i in zip(parts, inputs, strict=True))
        return jnp.concatenate([y.ravel() for y in function(*values)])

    weights = random.standard_normal(math.prod(jax.eval_shape(smooth, point).shape))

    @jax.jit
    def reverse(x):
        return jax.vjp(smooth, x)[1](weights)[0]

    def forward(f, x):
        return jax.jvp(f, (x,), (direction,))[1]

    @jax.jit
    def values(x):
        """Functions and their derivatives in one direction."""
        found = {"value": smooth(x), "slope": forward(smooth, x), "reverse": reverse(x)}
        if order > 1:
            found["slope of reverse"] = forward(reverse, x)
            found["reverse twice"] = jax.grad(lambda x: reverse(x) @ direction)(x)
        return found

    before, at, after = (jax.device_get(values(point + h * direction)) for h in (-STEP, 0, STEP))

    def differences(name):
        return (after[name] - before[name]) / (2 * STEP)

    slope = differences("value")
    pairs = [(at["slope"], slope), (at["reverse"] @ direction, slope @ weights)]
    if order > 1:
        slope = differences("reverse")
        pairs += [(at["slope of reverse"], slope), (at["reverse twice"], slope)]
    for exact, approximate in pairs:
        np.testing.assert_allclose(exact, approximate, rtol, atol)
