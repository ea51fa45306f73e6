"""Every rule of jaxonnx.lowering measured: time of the plain form over that of the fast one.

    python -m benchmarks.speed.lowerings [rule ...]
    python -m benchmarks.speed.lowerings --fit

Above 1 the rule pays on this CPU. Columns: forward, gradient for x, gradient for w (convolutions),
or forward, forward and backward (the rest). Both are compiled as jaxonnx compiles, with channels
last and kernels first, and with an allocator that keeps its pages. `--fit`
tries other bounds of the rules instead, on shapes to both sides of them, and says where another
would gain more than 10 %.
"""

import argparse
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from benchmarks.speed.fit import fit
from jaxonnx import lowering
from jaxonnx.cli.process import keep_pages
from jaxonnx.lowering._conv import Conv
from jaxonnx.ops import rnn
from jaxonnx.ops.pool import place_windows

ROUNDS, REPEATS = 5, 3

# batch, input channels, output channels, image, kernel, stride, groups
CONVOLUTIONS = {
    "Winograd": (4, 64, 64, 56, 3, 1, 1),
    "oneDNN, large image": (8, 64, 64, 56, 3, 1, 1),
    "oneDNN, stride": (8, 128, 128, 56, 3, 2, 1),
    "oneDNN, few inputs": (8, 3, 64, 224, 7, 2, 1),
    "Winograd, more channels": (4, 256, 256, 14, 3, 1, 1),
    "Winograd, small image": (16, 256, 256, 4, 3, 1, 1),
    "pointwise": (16, 32, 16, 32, 1, 1, 1),
    "pointwise, small image": (16, 960, 160, 2, 1, 1, 1),
    "image below kernel": (16, 512, 512, 2, 3, 1, 1),
    "image below kernel, narrow": (16, 32, 32, 2, 3, 1, 1),
    "output below kernel": (16, 256, 512, 4, 3, 2, 1),
    "few inputs": (16, 3, 32, 64, 3, 2, 1),
    "few inputs, large image": (1, 3, 16, 512, 3, 1, 1),
    "patches": (8, 3, 192, 224, 16, 16, 1),
    "image below a large kernel": (1, 16, 16, 40, 41, 1, 1),
    "grouped": (16, 64, 64, 16, 3, 1, 4),
    "grouped, narrow": (4, 128, 128, 14, 3, 1, 32),
    "depthwise": (16, 32, 32, 32, 3, 1, 32),
    "depthwise, large image": (8, 32, 32, 112, 3, 1, 32),
    "depthwise, stride": (16, 96, 96, 32, 3, 2, 96),
    "depthwise, large kernel": (1, 64, 64, 56, 31, 1, 64),
    "depthwise, small image": (16, 960, 960, 2, 3, 1, 960),
}
# batch, channels, image, kernel, stride
POOLS = {
    "max pool": (64, 32, 26, 2, 2),
    "max pool, overlapping": (16, 64, 32, 3, 2),
    "max pool, large": (2, 64, 20, 9, 1),
}
SUMS = {"window sum": (64, 32, 28, 2, 2), "window sum, overlapping": (16, 64, 16, 3, 1)}
# rows, inputs, outputs
ROUNDED = {
    "bfloat16 product": (512, 1024, 1024),
    "bfloat16 product, few rows": (64, 784, 512),
}
# batch, input channels, output channels, image, kernel, stride, groups
ROUNDED_CONVOLUTIONS = {
    "bfloat16 pointwise": (16, 256, 128, 16, 1, 1, 1),
    "bfloat16 strided": (16, 128, 256, 8, 3, 2, 1),
    "bfloat16 large image": (8, 64, 64, 56, 3, 1, 1),
    "bfloat16 many channels": (8, 256, 256, 14, 3, 1, 1),
}
# axes of the sums, shape
NORMALIZATIONS = {
    "batch statistics": ((0, 1, 2), 8, 56, 56, 256),
    "batch statistics, small image": ((0, 1, 2), 8, 14, 14, 1024),
    "layer statistics": ((1,), 1576, 768),
}
# steps, batch, features, hidden units
LSTMS = {"LSTM": (64, 32, 128, 256), "LSTM, few units": (64, 32, 64, 64)}
GRUS = {"GRU": (64, 32, 128, 256), "GRU, few units": (64, 32, 64, 64)}


def ratio(plain, fast, arguments, units: bool = False) -> float:
    """Return the median time of `plain` over that of `fast`, in interleaved rounds.

    Args:
      plain, fast, arguments: the two forms and what they are called with.
      units: whether `fast` is compiled for products in 16 bits.
    """
    jitted = [
        lowering.jit(form, onednn=True, units=units and form is fast) for form in (plain, fast)
    ]
    systems = [form.lower(form.trace(*arguments)).compile() for form in jitted]
    times = ([], [])
    for _ in range(ROUNDS + 1):
        for system, record in zip(systems, times, strict=True):
            start = time.perf_counter()
            for _ in range(REPEATS):
                jax.block_until_ready(system(*arguments))
            record.append(time.perf_counter() - start)
    plain_time, fast_time = (statistics.median(record[1:]) for record in times)
    return plain_time / fast_time


def _normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def convolution(
    n: int, c: int, m: int, size: int, kernel: int, stride: int, groups: int, turned: bool = True
):
    """Yield the plain and the fast form, and arguments, of a convolution and its gradients."""
    pads = [kernel // 2] * 4
    windows = place_windows((size,) * 2, (kernel,) * 2, strides=(stride,) * 2, pads=pads)
    form = Conv((size,) * 2, *windows, groups=groups, turned=turned)
    weight = (kernel, kernel, c // groups, m) if turned else (m, c // groups, kernel, kernel)
    arrays = [_normal(n, size, size, c), _normal(*weight), _normal(n, *windows.out, m)]
    for out in (2, 0, 1):
        arguments = [a for i, a in enumerate(arrays) if i != out]
        yield partial(form.plain, out), partial(form.fast, out), arguments


def rounded_product(rows: int, inputs: int, outputs: int):
    """Yield a product and its gradients in float32 and in the units for bfloat16."""
    x, w, y = _normal(rows, inputs), _normal(inputs, outputs), _normal(rows, outputs)
    for axes, factors in (((1, 0), (x, w)), ((1, 1), (y, w)), ((0, 0), (x, y))):
        form = lowering.Dot(((axes[0],), (axes[1],)))
        yield partial(form.plain, 2), partial(form.in_units, jnp.bfloat16, 2), [*factors]


def rounded_convolution(*shape: Any):
    """Yield a convolution and its gradients, fast in float32 and in the units for bfloat16."""
    for _, fast, arguments in convolution(*shape):
        form, out = fast.func.__self__, fast.args[0]
        yield fast, partial(lowering.RoundedForm(form, jnp.bfloat16).on_cpu, out), arguments


def pool(initial, combine, fast, n, c, size, kernel, stride):
    """Yield the plain and the fast form, and arguments, of a pooling and with its gradient."""
    pads = [(kernel - 1) // 2] * 4
    windows = place_windows((size,) * 2, (kernel,) * 2, strides=(stride,) * 2, pads=pads)
    around = ((0, 0), *windows.pads, (0, 0))

    def plain(x):
        shape = (1, *windows.kernel, 1), (1, *windows.strides, 1)
        return lax.reduce_window(x, np.float32(initial), combine, *shape, around)

    def gradient(function):
        return lambda x, ct: jax.vjp(function, x)[1](ct)

    fast = partial(fast, window=windows, channels=-1)
    x, ct = _normal(n, size, size, c), _normal(n, *windows.out, c)
    yield plain, fast, [x]
    yield gradient(plain), gradient(fast), [x, ct]


def normalization(axes: tuple[int, ...], *shape: int):
    """Yield both forms, and arguments, of a normalization and Relu, and with its gradient."""
    batch = 0 in axes
    scale, shift = (np.ones(shape[-1], np.float32) for _ in range(2))

    def plain(x, scale, shift):
        mean = x.mean(axes, keepdims=True)
        root = lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + 1e-5)
        return jax.nn.relu((x - mean) * root * scale + shift)

    def fast(x, scale, shift):
        ends = (scale, shift) if batch else (None, None)
        ends = (end if end is None else end.reshape((1,) * len(axes) + (-1,)) for end in ends)
        y = lowering.standardize(x, *ends, axes, 1e-5)[0]
        return jax.nn.relu(y if batch else y * scale + shift)

    def gradient(function):
        return lambda x, scale, shift, ct: jax.vjp(function, x, scale, shift)[1](ct)

    x, ct = _normal(*shape), _normal(*shape)
    yield plain, fast, [x, scale, shift]
    yield gradient(plain), gradient(fast), [x, scale, shift, ct]


def _lstm(state, x, w, r):
    h, c = state
    i, o, f, new = jnp.split(x @ w.T + h @ r.T, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(new)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _gru(state, x, w, r):
    of_input, of_state = (jnp.split(gates, 3, -1) for gates in (x @ w.T, state[0] @ r.T))
    z, reset = (jax.nn.sigmoid(a + b) for a, b in zip(of_input[:2], of_state[:2], strict=True))
    h = (1 - z) * jnp.tanh(of_input[2] + reset * of_state[2]) + z * state[0]
    return (h,), h


def recurrence(kind, steps, batch, features, hidden):
    """Yield a scan and the operator, and arguments, of an LSTM or GRU and with its gradient."""
    cell, gates, states = {"LSTM": (_lstm, 4, 2), "GRU": (_gru, 3, 1)}[kind]
    operator = rnn.lstm if kind == "LSTM" else partial(rnn.gru, linear_before_reset=1)

    def plain(x, w, r):
        zeros = (jnp.zeros((batch, hidden), x.dtype),) * states
        return lax.scan(lambda state, x: cell(state, x, w[0], r[0]), zeros, x)[1][:, None]

    def fast(x, w, r):
        return operator(x, w, r)[0]

    def gradient(function):
        return lambda x, w, r, ct: jax.vjp(lambda w, r: function(x, w, r), w, r)[1](ct)

    weights = (_normal(1, gates * hidden, n) / hidden**0.5 for n in (features, hidden))
    arguments = [_normal(steps, batch, features), *weights]
    yield plain, fast, arguments
    yield gradient(plain), gradient(fast), [*arguments, _normal(steps, 1, batch, hidden)]


def main():
    pools = partial(pool, -np.inf, lax.max, lowering.max_pool)
    sums = partial(pool, 0, lax.add, lowering.window_sum)
    lstm = partial(recurrence, "LSTM")
    families: tuple[Any, ...] = (
        (CONVOLUTIONS, convolution),
        (ROUNDED, rounded_product),
        (ROUNDED_CONVOLUTIONS, rounded_convolution),
        (POOLS, pools),
        (SUMS, sums),
        (NORMALIZATIONS, normalization),
        (LSTMS, lstm),
        (GRUS, partial(recurrence, "GRU")),
    )
    rules = {name: (forms, shape) for table, forms in families for name, shape in table.items()}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rules", nargs="*", help=f"some of: {', '.join(rules)}")
    parser.add_argument("--fit", action="store_true", help="try other bounds of the rules")
    parser.add_argument("--rounds", type=int, default=7, help="of --fit")
    options = parser.parse_args()
    keep_pages()
    if options.fit:
        unturned = partial(convolution, turned=False)
        by_name: dict[str, Any] = {
            "convolution": convolution,
            "unturned": unturned,
            "pool": pools,
            "sum": sums,
            "recurrence": lstm,
        }
        fit(by_name, options.rounds)
        return
    table = Table("rule", "shape", "forward", "x / both", "w", title="plain / fast")
    for name in options.rules or rules:
        forms, shape = rules[name]
        units = name in ROUNDED | ROUNDED_CONVOLUTIONS
        cells = [f"{ratio(*form, units=units):.1f}" for form in forms(*shape)]
        table.add_row(name, " ".join(map(str, shape)), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
