"""Functions that ONNX has no operator for, composed of those that it has, as XLA computes them."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.onnx_out._rule_table import Refusal, composed, replaces_jax


@composed("log1p")
def log1p(x):
    """Return log(1 + x) by Kahan's method: with u = 1 + x rounded, log(u) * x / (u - 1).

    The rounding error of u is in both log(u) and u - 1, and cancels.
    """
    u = 1 + x
    log = jnp.log(u)
    exact = u == 1
    near = log * (x / jnp.where(exact, 1, u - 1))
    return jnp.where(exact, x, jnp.where(jnp.isfinite(log), near, log))


@composed("expm1")
def expm1(x):
    """Return exp(x) - 1 by Kahan's method: with u = exp(x) rounded, (u - 1) * x / log(u)."""
    u = jnp.exp(x)
    near = (u != 1) & (jnp.abs(x) < 0.5)
    small = (u - 1) * (x / jnp.where(near, jnp.log(jnp.where(near, u, 2)), 1))
    return jnp.where(u == 1, x, jnp.where(near, small, u - 1))


@composed("one_minus_square")
def one_minus_square(x):
    return 1 - x * x


@composed("bessel_i0e")
def bessel_i0e(x):
    return _bessel(x, 0)


@composed("bessel_i1e")
def bessel_i1e(x):
    return jnp.sign(x) * _bessel(x, 1)


def _bessel(x, order):
    """Return exp(-|x|) I_order(|x|), for order 0 or 1.

    Below 40, the mean of exp(x cos t - x) cos(order t) over a period by the trapezoidal rule, which
    converges exponentially for periodic functions. Above, where the peak is too narrow for 64
    points, Hankel's asymptotic series in 1 / x.
    """
    x = jnp.abs(x)
    near = x < 40
    cosines = np.cos(2 * np.pi * np.arange(64) / 64)
    small = jnp.where(near, x, 0)[..., None]
    heights = jnp.exp(small * (cosines - 1).astype(x.dtype)) * (cosines**order).astype(x.dtype)
    large, term, total = jnp.where(near, 40, x), jnp.ones_like(x), jnp.ones_like(x)
    for k in range(1, 7):
        term = term * ((2 * k - 1) ** 2 - 4 * order) / (8 * k * large)
        total = total + term
    return jnp.where(near, heights.mean(-1), total / jnp.sqrt(2 * np.pi * large)).astype(x.dtype)


@composed("polynomial")
def polynomial(x, *coefficients):
    *lower, total = coefficients
    for coefficient in reversed(lower):
        total = total * x + coefficient
    return total


@composed("log2")
def log2(x):
    return jnp.log(x) * np.asarray(1 / np.log(2), x.dtype)


@composed("exp2")
def exp2(x):
    return lax.pow(jnp.full_like(x, 2), x)


@composed("cbrt")
def cbrt(x):
    return jnp.sign(x) * lax.pow(jnp.abs(x), jnp.full_like(x, 1 / 3))


@composed("erfc")
def erfc(x):
    return 1 - lax.erf(x)


@composed("atan2")
def atan2(y, x):
    pi = np.pi
    right = jnp.arctan(y / jnp.where(x == 0, 1, x))
    left = jnp.where(y < 0, right - pi, right + pi)
    upright = jnp.sign(y) * (pi / 2)
    return jnp.where(x > 0, right, jnp.where(x < 0, left, upright)).astype(y.dtype)


_SMALL = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_LARGE = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


@composed("erf_inv")
def erf_inv(x):
    """Return the inverse of erf by the polynomials of Giles, to the accuracy of float32.

    "Approximating the erfinv function" (GPU Computing Gems, 2012).
    """
    w = -jnp.log1p(-x * x)
    small = w < 5
    w = jnp.where(small, w - 2.5, jnp.sqrt(w) - 3)
    p = jnp.where(small, _SMALL[0], _LARGE[0])
    for a, b in zip(_SMALL[1:], _LARGE[1:], strict=True):
        p = jnp.where(small, a, b) + p * w
    return jnp.where(jnp.abs(x) == 1, x * jnp.inf, p * x).astype(x.dtype)


_LANCZOS = (
    *(676.520368121885098567009190444019, -1259.13921672240287047156078755283),
    *(771.3234287776530788486528258894, -176.61502916214059906584551354),
    *(12.507343278686904814458936853, -0.13857109526572011689554707),
    *(9.984369578019570859563e-6, 1.50563273514931155834e-7),
)


@composed("lgamma")
def lgamma(x):
    """Return log |gamma(x)| by Lanczos' approximation, below 0.5 by Euler's reflection formula.

    Coefficients and steps are those of XLA.
    """
    reflected = x < 0.5
    z = jnp.where(reflected, -x, x - 1)
    total = 0.99999999999980993227684700473478 + jnp.zeros_like(z)
    for i, c in enumerate(_LANCZOS):
        total = total + c / (z + i + 1)
    t = 7.5 + z
    log_t = np.log(7.5) + jnp.log1p(z / 7.5)
    y = (z + 0.5 - t / log_t) * log_t + 0.5 * np.log(2 * np.pi) + jnp.log(total)
    # log |sin(pi x)| from the distance to the nearest integer: pi x loses its digits for large x
    fraction = jnp.abs(x) - jnp.floor(jnp.abs(x))
    fraction = jnp.where(fraction > 0.5, 1 - fraction, fraction)
    sine = jnp.log(jnp.sin(np.pi * fraction))
    result = jnp.where(reflected, jnp.where(jnp.isfinite(sine), np.log(np.pi) - sine - y, -sine), y)
    return jnp.where(jnp.isinf(x), jnp.inf, result).astype(x.dtype)


@composed("digamma")
def digamma(x):
    """Return the derivative of `lgamma`, differentiated by hand."""
    reflected = x < 0.5
    z = jnp.where(reflected, -x, x - 1)
    total, slope = 0.99999999999980993227684700473478 + jnp.zeros_like(z), jnp.zeros_like(z)
    for i, c in enumerate(_LANCZOS):
        slope = slope - c / jnp.square(z + i + 1)
        total = total + c / (z + i + 1)
    log_t = np.log(7.5) + jnp.log1p(z / 7.5)
    y = log_t + slope / total - 7 / (7.5 + z)
    turned = x + jnp.abs(jnp.floor(x + 0.5))
    cotangent = np.pi * jnp.cos(np.pi * turned) / jnp.sin(np.pi * turned)
    result = jnp.where(reflected, y - cotangent, y)
    return jnp.where((x <= 0) & (x == jnp.floor(x)), jnp.nan, result).astype(x.dtype)


_BERNOULLI = 1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160
"""Bernoulli's numbers B(2k) / (2k)!."""


@composed("zeta")
def zeta(x, q):
    """Return Hurwitz' zeta(x, q): ten terms of the series, and the Euler-Maclaurin formula."""
    total = jnp.zeros_like(x)
    for k in range(10):
        total = total + (q + k) ** -x
    a = q + 10
    power = a**-x
    total = total + power * (a / (x - 1) + 0.5)
    factor = x * power / a
    for k, coefficient in enumerate(_BERNOULLI):
        total = total + coefficient * factor
        factor = factor * (x + 2 * k + 1) * (x + 2 * k + 2) / (a * a)
    return jnp.where(x > 1, total, jnp.where(x == 1, jnp.inf, jnp.nan)).astype(x.dtype)


@composed("polygamma")
def polygamma(order, x):
    sign = 1 - 2 * jnp.mod(order + 1, 2)
    value = sign * jnp.exp(lax.lgamma(order + 1)) * lax.zeta(order + 1, x)
    return jnp.where(order == 0, lax.digamma(x), value).astype(x.dtype)


@composed("shift_right_arithmetic")
def shift_right_arithmetic(x, amount):
    bits = 8 * x.dtype.itemsize
    amount = jnp.minimum(amount, bits - 1)
    unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)  # whose highest bit is kept, too
    negative = lax.shift_right_logical(x, x.dtype.type(bits - 1)) > 0 if unsigned else x < 0
    return jnp.where(
        negative, ~lax.shift_right_logical(~x, amount), lax.shift_right_logical(x, amount)
    )


@composed("population_count")
def population_count(x):
    total = jnp.zeros_like(x)
    for bit in range(8 * x.dtype.itemsize):
        total += lax.shift_right_logical(x, jnp.full_like(x, bit)) & jnp.ones_like(x)
    return total


@composed("clz")
def clz(x):
    total = jnp.zeros_like(x)
    for bit in range(8 * x.dtype.itemsize):
        total += (lax.shift_right_logical(x, jnp.full_like(x, bit)) == 0).astype(x.dtype)
    return total


FORMATS = {"float16": (10, 15), "bfloat16": (7, 127), "float32": (23, 127), "float64": (52, 1023)}
"""The bits of the fraction and the bias of the exponent, of each floating point format."""


@composed("bitcast_convert_type")
def bitcast_convert_type(x, *, new_dtype):
    """Reinterpret bits as another dtype of the same width.

    ONNX has no such operator before opset 26. Between integers it is a cast; floating point numbers
    are composed and decomposed by arithmetic.
    """
    new_dtype = jnp.dtype(new_dtype)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    if x.dtype.itemsize == new_dtype.itemsize:
        if {x.dtype.kind, new_dtype.kind} <= {"i", "u"}:
            return x.astype(new_dtype)
        if x.dtype.name in FORMATS and new_dtype.kind in "iu":
            return _bits(x, unsigned).astype(new_dtype)
        if x.dtype.kind in "iu" and new_dtype.name in FORMATS:
            return _float(x.astype(unsigned), new_dtype)
    raise Refusal(f"ONNX cannot read the bits of {x.dtype} as {new_dtype}")


def _wide(dtype):
    """Return the dtype in which the arithmetic on numbers of a format is exact."""
    return jnp.promote_types(dtype, jnp.float32)


def _float(bits, dtype):
    """Return the floating point numbers that have these bits.

    Args:
      bits: unsigned integers of the same width as `dtype`.
      dtype: a key of `FORMATS`.
    """
    (digits, bias), wide = FORMATS[dtype.name], _wide(dtype)
    bits = bits.astype(jnp.promote_types(bits.dtype, jnp.uint32))
    sign = jnp.where(bits >> 8 * dtype.itemsize - 1 == 1, -1.0, 1.0).astype(wide)
    exponent = ((bits >> digits) & 2 * bias + 1).astype(jnp.int32)
    fraction = (bits & 2**digits - 1).astype(f"int{8 * bits.dtype.itemsize}").astype(wide)
    fraction = fraction * wide.type(2.0**-digits)
    small = fraction * wide.type(2.0 ** (1 - bias))
    power = jnp.power(wide.type(2), jnp.clip(exponent - bias, 1 - bias, bias).astype(wide))
    special = jnp.where(fraction == 0, jnp.inf, jnp.nan).astype(wide)
    normal = jnp.where(exponent == 2 * bias + 1, special, (1 + fraction) * power)
    return (sign * jnp.where(exponent == 0, small, normal)).astype(dtype)


def _bits(x, unsigned):
    """Return the bits of floating point numbers as unsigned integers; any NaN gives a quiet one."""
    (digits, bias), wide = FORMATS[x.dtype.name], _wide(x.dtype)
    as_type, two = jnp.promote_types(unsigned, jnp.uint32).type, wide.type(2)
    x = x.astype(wide)
    size = jnp.abs(x)
    finite = jnp.isfinite(x)
    least = wide.type(2.0 ** (1 - bias))
    normal = jnp.where(finite & (size >= least), size, 1)
    # the logarithm may round across a power of two: `scale` must be in [1, 2), correct by one
    exponent = jnp.floor(jnp.log(normal) * wide.type(1 / np.log(2)))

    def scale(exponent):  # by two powers of two, as a single one may over- or underflow
        half = jnp.floor(exponent / 2)
        return normal * jnp.power(two, -half) * jnp.power(two, half - exponent)

    exponent = exponent + (scale(exponent) >= 2) - (scale(exponent) < 1)
    fraction = ((scale(exponent) - 1) * wide.type(2.0**digits)).astype(as_type)
    bits = ((exponent.astype(jnp.int32) + bias).astype(as_type) << as_type(digits)) | fraction
    # a subnormal number is its fraction in units of 2^(1 - bias - digits); the factor may overflow
    up = bias - 1 + digits
    small = (size * wide.type(2.0 ** (up // 2)) * wide.type(2.0 ** (up - up // 2))).astype(as_type)
    infinite = (2 * bias + 1) << digits
    special = jnp.where(jnp.isnan(x), as_type(infinite + 2 ** (digits - 1)), as_type(infinite))
    bits = jnp.where(finite, jnp.where(size < least, small, bits), special)
    negative = (x < 0) | ((x == 0) & (1 / x < 0))
    sign = as_type(1 << 8 * unsigned.itemsize - 1)
    return (bits | jnp.where(negative, sign, as_type(0))).astype(unsigned)


@replaces_jax
def exp_neg_sq(x):
    """Return exp(-x^2), with a relative error of about x^2 roundings.

    JAX splits x by its bits for a smaller error, which takes many nodes in ONNX.
    """
    return jnp.exp(-x * x)


@composed("nextafter")
def nextafter(x, y):
    """Return the float32 next to x in the direction of y.

    The bits of numbers of one sign, as integers, are ordered like their magnitudes.
    """
    if x.dtype != jnp.float32:
        raise Refusal(f"it supports float32, not {x.dtype}")
    bits = lax.bitcast_convert_type(x, jnp.int32)
    beside = lax.bitcast_convert_type(jnp.where((x < y) == (x > 0), bits + 1, bits - 1), x.dtype)
    least = jnp.where(y > 0, np.float32(1e-45), np.float32(-1e-45))
    beside = jnp.where(x == 0, least, beside)
    return jnp.where(jnp.isnan(x) | jnp.isnan(y), jnp.nan, jnp.where(x == y, y, beside))


@composed("mulhi")
def mulhi(x, y):
    """Return the upper 32 bits of a product of uint32, by multiplication of 16-bit halves."""
    if x.dtype != jnp.uint32:
        raise Refusal(f"it supports uint32, not {x.dtype}")
    low, high = x & 0xFFFF, x >> 16
    below, above = y & 0xFFFF, y >> 16
    middle = high * below + ((low * below) >> 16)
    other = low * above + (middle & 0xFFFF)
    return high * above + (middle >> 16) + (other >> 16)
