"""The cases of `jax.lax`, of layers of `flax.linen`, and of equinox where it is installed.

Left out of `jax.lax` are collectives over the axes of a mesh, and functions of shapes and dtypes
instead of arrays: `NOT_TRIED` names them for the page of names.
"""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax import lax

from benchmarks.to_onnx.cases import (
    Case,
    bools,
    definite,
    images,
    inner,
    ints,
    labels,
    normal,
    others,
    positive,
    sequences,
    small,
    table,
    v,
    w,
    x,
    y,
)

UNARY = """
    abs asinh atan bessel_i0e bessel_i1e cbrt ceil cos cosh erf erfc exp exp2 expm1 floor
    is_finite logistic neg one_minus_square optimization_barrier round sign sin sinh
    square stop_gradient tan tanh
"""
BINARY = "add atan2 div eq ge gt le lt max min mul ne nextafter rem sub"
BITS = """
    bitwise_and bitwise_or bitwise_xor mulhi shift_left shift_right_arithmetic shift_right_logical
"""
REDUCTIONS = "reduce_max reduce_min reduce_prod reduce_sum"

NOT_TRIED = {
    "over the axes of a mesh": """
        all_gather all_to_all axis_index axis_size pbroadcast pcast pmax pmean pmin ppermute
        pshuffle psum psum_scatter psum_scatter_start pswapaxes ragged_all_to_all
        with_sharding_constraint""",
    "of shapes, dtypes, tokens and tracing, not of arrays": """
        DotDimensionNumbers after_all broadcast_shapes conv_dimension_numbers
        conv_general_permutations conv_general_shape_tuple conv_shape_tuple
        conv_transpose_shape_tuple create_token custom_root dce_sink dtype padtype_to_pads
        reduce_window_shape_tuple shape_as_value stage""",
    "complex numbers, in pairs: see jax.numpy": "complex conj imag real",
    "of several forms of products: see ragged_dot": "ragged_dot_general",
}
"""Names of `jax.lax` without a case, by the reason."""


def jax_lax() -> dict[str, Case]:
    m: Any = lax
    rows = np.array([2, 3, 1], np.int32)
    window = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1), "padding": "VALID"}
    kernel = normal(3, 3, 3, 4)
    layout = ("NHWC", "HWIO", "NHWC")
    along = lax.GatherDimensionNumbers((1,), (0,), (0,))
    put = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    at, new = np.array([[1], [0], [2]], np.int32), normal(3, 4)
    scatters = table(
        m, "scatter scatter_add scatter_max scatter_min scatter_mul scatter_sub", x, new
    )
    return {
        **table(m, UNARY, x),
        **table(m, BINARY, x, y),
        **{f"{k}, integers": c for k, c in table(m, "div rem max add", ints, others).items()},
        **table(m, BITS, ints.astype(np.uint32), np.abs(others).astype(np.uint32)),
        **table(m, "bitwise_not clz population_count", ints),
        **table(m, "digamma lgamma log log1p log2 reciprocal rsqrt sqrt", positive),
        **table(m, "acos asin atanh erf_inv", inner),
        **table(m, "igamma igammac igamma_grad_a random_gamma_grad", positive, positive + 1),
        **{n: (lambda a, u, f=f: f(a, at, u, put), c) for n, (f, c) in scatters.items()},
        **{n: (lambda a, f=f: f(a, (1,)), c) for n, (f, c) in table(m, REDUCTIONS, x).items()},
        **{n: (lambda a, f=f: f(a, 1), c)
           for n, (f, c) in table(m, "cumlogsumexp cummax cummin cumprod cumsum", x).items()},
        "acosh": (m.acosh, (positive + 1,)),
        "approx_max_k": (lambda a: m.approx_max_k(a, 2), (x,)),
        "approx_min_k": (lambda a: m.approx_min_k(a, 2), (x,)),
        "argmax": (lambda a: m.argmax(a, 1, jnp.int32), (x,)),
        "argmin": (lambda a: m.argmin(a, 1, jnp.int32), (x,)),
        "associative_scan": (lambda a: m.associative_scan(jnp.add, a), (x,)),
        "batch_matmul": (m.batch_matmul, (sequences, normal(2, 4, 3))),
        "betainc": (m.betainc, (positive, positive + 1, np.abs(inner))),
        "bitcast_convert_type": (lambda a: m.bitcast_convert_type(a, jnp.int32), (x,)),
        "broadcast": (lambda a: m.broadcast(a, (2,)), (x,)),
        "broadcast_in_dim": (lambda a: m.broadcast_in_dim(a, (3, 6), (1,)), (v,)),
        "broadcast_like": (lambda a, b: m.broadcast_like(a, b), (np.float32(2), x)),
        "broadcast_to_rank": (lambda a: m.broadcast_to_rank(a, 3), (x,)),
        "broadcasted_iota": (lambda a: a * m.broadcasted_iota(a.dtype, (3, 4), 1), (x,)),
        "clamp": (lambda a: m.clamp(-0.5, a, 0.5), (x,)),
        "collapse": (lambda a: m.collapse(a, 0, 2), (x,)),
        "composite": (m.composite(lambda a: jnp.tanh(a) * 2, "tests.double"), (x,)),
        "concatenate": (lambda a, b: m.concatenate([a, b], 1), (x, y)),
        "cond": (lambda a: m.cond(a.sum() > 0, jnp.sin, jnp.cos, a), (x,)),
        "conv": (
            lambda a, k: m.conv(a, k, (1, 1), "SAME"),
            (normal(2, 3, 8, 8), normal(4, 3, 3, 3))),
        "conv_general_dilated": (
            lambda a, k: m.conv_general_dilated(
                a, k, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=layout),
            (images, kernel)),
        "conv_general_dilated_local": (
            lambda a, k: m.conv_general_dilated_local(a, k, (1,), "VALID", (3,)),
            (normal(2, 3, 8), normal(4, 9, 6))),
        "conv_general_dilated_patches": (
            lambda a: m.conv_general_dilated_patches(a, (3, 3), (1, 1), "VALID"),
            (normal(2, 3, 8, 8),)),
        "conv_transpose": (
            lambda a, k: m.conv_transpose(a, k, (2, 2), "SAME", dimension_numbers=layout),
            (images, kernel)),
        "conv_with_general_padding": (
            lambda a, k: m.conv_with_general_padding(a, k, (1, 1), [(1, 0), (2, 1)], None, None),
            (normal(2, 3, 8, 8), normal(4, 3, 3, 3))),
        "convert_element_type": (lambda a: m.convert_element_type(a, jnp.int32), (x,)),
        "custom_linear_solve": (
            lambda b: m.custom_linear_solve(
                lambda z: definite @ z, b, lambda _, z: jnp.linalg.solve(definite, z),
                symmetric=True), (normal(4),)),
        "dot": (m.dot, (x, y.T.copy())),
        "dot_general": (
            lambda a, b: m.dot_general(a, b, (((2,), (2,)), ((0,), (0,)))),
            (sequences, sequences)),
        "dynamic_index_in_dim": (lambda a, i: m.dynamic_index_in_dim(a, i[0], 0), (x, labels)),
        "dynamic_slice": (lambda a, i: m.dynamic_slice(a, (i[0], 0), (2, 3)), (x, labels)),
        "dynamic_slice_in_dim": (lambda a, i: m.dynamic_slice_in_dim(a, i[0], 2), (x, labels)),
        "dynamic_update_index_in_dim": (
            lambda a, b, i: m.dynamic_update_index_in_dim(a, b[0], i[0], 0), (x, y, labels)),
        "dynamic_update_slice": (
            lambda a, b, i: m.dynamic_update_slice(a, b[:2], (i[0], 0)), (x, y, labels)),
        "dynamic_update_slice_in_dim": (
            lambda a, b, i: m.dynamic_update_slice_in_dim(a, b[:2], i[0], 0), (x, y, labels)),
        "empty": (lambda a: m.full_like(m.empty((3, 4), a.dtype), 1) + a, (x,)),
        "expand_dims": (lambda a: m.expand_dims(a, (1,)), (x,)),
        "fft": (lambda a: jnp.abs(m.fft(a, "RFFT", (4,))), (x,)),
        "fori_loop": (lambda a: m.fori_loop(0, 3, lambda i, z: z * 0.5 + i, a), (x,)),
        "full": (lambda a: a + m.full((3, 4), 2.0), (x,)),
        "full_like": (lambda a: m.full_like(a, 2.0), (x,)),
        "gather": (lambda a: m.gather(a, at, along, (1, 4)), (x,)),
        "index_in_dim": (lambda a: m.index_in_dim(a, 1), (x,)),
        "index_take": (lambda a, i: m.index_take(a, (i,), (0,)), (x, labels % 3)),
        "integer_pow": (lambda a: m.integer_pow(a, 3), (x,)),
        "iota": (lambda a: a * m.iota(jnp.float32, 4), (x,)),
        "map": (lambda a: m.map(jnp.tanh, a), (x,)),
        "pad": (lambda a: m.pad(a, np.float32(1), ((1, 0, 1), (-1, 2, 0))), (x,)),
        "platform_dependent": (
            lambda a: m.platform_dependent(a, cpu=jnp.sin, default=jnp.sin), (x,)),
        "polygamma": (lambda a: m.polygamma(np.float32(1) + 0 * a, a), (positive,)),
        "polynomial": (lambda a: m.polynomial(a, [1.0, 2.0, 3.0]), (x,)),
        "pow": (m.pow, (positive, y)),
        "ragged_dot": (
            lambda a, b, n: m.ragged_dot(a, b, n), (normal(6, 4), normal(3, 4, 5), rows)),
        "reduce": (lambda a: m.reduce(a, np.float32(0), m.add, (0,)), (x,)),
        "reduce_and": (lambda a: m.reduce_and(a, (1,)), (bools,)),
        "reduce_or": (lambda a: m.reduce_or(a, (1,)), (bools,)),
        "reduce_xor": (lambda a: m.reduce_xor(a, (1,)), (ints,)),
        "reduce_precision": (lambda a: m.reduce_precision(a, 5, 10), (x,)),
        "reduce_window": (
            lambda a: m.reduce_window(a, -jnp.inf, m.max, **window), (images,)),
        "reshape": (lambda a: m.reshape(a, (2, 6)), (x,)),
        "rev": (lambda a: m.rev(a, (0,)), (x,)),
        "rng_bit_generator": (
            lambda k: m.rng_bit_generator(k, (3,)), (np.array([1, 2, 3, 4], np.uint32),)),
        "rng_uniform": (lambda a: m.rng_uniform(a[0], a[0] + 1, (3,)), (v,)),
        "scan": (lambda a: m.scan(lambda c, z: (c + z, c * z), jnp.zeros(4), a), (x,)),
        "scatter_apply": (
            lambda a: m.scatter_apply(a, at, jnp.tanh, put, update_shape=(3, 4)), (x,)),
        "scaled_dot": (m.scaled_dot, (normal(2, 5, 4), normal(2, 4, 3))),
        "select": (m.select, (bools, x, y)),
        "select_n": (m.select_n, (bools, x, y)),
        "slice": (lambda a: m.slice(a, (0, 1), (3, 4), (2, 1)), (x,)),
        "slice_in_dim": (lambda a: m.slice_in_dim(a, 1, 4, 2, 1), (x,)),
        "sort": (m.sort, (x,)),
        "sort_key_val": (m.sort_key_val, (v, w)),
        "split": (lambda a: m.split(a, (1, 3), 1), (x,)),
        "squeeze": (lambda a: m.squeeze(a[None], (0,)), (x,)),
        "stack": (lambda a, b: m.stack([a, b]), (x, y)),
        "switch": (lambda a, i: m.switch(i[0], [jnp.sin, jnp.cos, jnp.tanh], a), (x, small)),
        "tile": (lambda a: m.tile(a, (2, 1)), (x,)),
        "top_k": (lambda a: m.top_k(a, 2), (x,)),
        "transpose": (lambda a: m.transpose(a, (1, 0)), (x,)),
        "unstack": (lambda a: m.unstack(a), (x,)),
        "while_loop": (
            lambda a: m.while_loop(lambda z: z[0] < 3, lambda z: (z[0] + 1, z[1] * 2), (0, a)),
            (x,)),
        "zeta": (m.zeta, (positive + 1, positive)),
    }  # fmt: skip


def linen_layers() -> dict[str, Case]:
    m: Any = linen
    layers = {
        "Dense": (m.Dense(5), x),
        "DenseGeneral": (m.DenseGeneral((2, 3)), x),
        "Einsum": (m.Einsum((4, 5), "nta,ab->ntb"), sequences),
        "Embed": (m.Embed(5, 3), small),
        "Conv": (m.Conv(4, (3, 3)), images),
        "ConvLocal": (m.ConvLocal(4, (3, 3)), images),
        "ConvTranspose": (m.ConvTranspose(4, (3, 3), (2, 2)), images),
        "BatchNorm": (m.BatchNorm(use_running_average=True), images),
        "LayerNorm": (m.LayerNorm(), x),
        "RMSNorm": (m.RMSNorm(), x),
        "GroupNorm": (m.GroupNorm(2), sequences),
        "InstanceNorm": (m.InstanceNorm(), images),
        "WeightNorm": (m.WeightNorm(m.Dense(5)), x),
        "Dropout": (m.Dropout(0.5, deterministic=True), x),
        "MultiHeadAttention": (m.MultiHeadAttention(2), sequences),
        "MultiHeadDotProductAttention": (m.MultiHeadDotProductAttention(2), sequences),
        "PReLU": (m.PReLU(), x),
        "Sequential": (m.Sequential([m.Dense(5), m.relu, m.Dense(2)]), x),
        "Bidirectional": (m.Bidirectional(m.RNN(m.GRUCell(3)), m.RNN(m.GRUCell(3))), sequences),
        "ConvLSTMCell": (m.RNN(m.ConvLSTMCell(4, (3, 3))), normal(1, 2, 8, 8, 3)),
    }
    cells = ("GRUCell", "LSTMCell", "MGUCell", "OptimizedLSTMCell", "SimpleCell")
    layers |= {name: (m.RNN(getattr(m, name)(6)), sequences) for name in cells}
    return {name: (_apply(module, a), (a,)) for name, (module, a) in layers.items()}


def _apply(module: linen.Module, array: np.ndarray) -> Any:
    variables = module.init(jax.random.key(0), array)
    return lambda a: module.apply(variables, a)


def equinox_layers() -> dict[str, Case]:
    """Return the layers of equinox; none where it is not installed."""
    if find_spec("equinox") is None:
        return {}
    import equinox  # type: ignore[import-not-found]

    m, key = equinox.nn, jax.random.key(0)
    layers = {
        "Linear": (m.Linear(4, 5, key=key), x),
        "MLP": (m.MLP(4, 2, 8, 2, key=key), x),
        "Conv2d": (m.Conv2d(3, 4, 3, key=key), normal(2, 3, 8, 8)),
        "ConvTranspose2d": (m.ConvTranspose2d(3, 4, 3, key=key), normal(2, 3, 8, 8)),
        "MaxPool2d": (m.MaxPool2d(2, 2), normal(2, 3, 8, 8)),
        "AvgPool2d": (m.AvgPool2d(2, 2), normal(2, 3, 8, 8)),
        "LayerNorm": (m.LayerNorm(4), x),
        "RMSNorm": (m.RMSNorm(4), x),
        "GroupNorm": (m.GroupNorm(2, 4), normal(2, 4, 6)),
        "Embedding": (m.Embedding(5, 3, key=key), small),
        "PReLU": (m.PReLU(), x),
    }
    return {name: (jax.vmap(layer), (a,)) for name, (layer, a) in layers.items()}
