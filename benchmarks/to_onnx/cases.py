"""What `benchmarks.to_onnx` exports: functions of flat arrays, by family.

Every function of `jax.nn`, every layer of `flax.nnx`, every loss and optimizer of optax, and of
`jax.numpy` (with `linalg` and `fft`) all that compute arrays of arrays and can be compiled. A
function without an entry here takes one array of three by four. Complex results are the pair of
their real and imaginary part, because no file of ONNX that runtimes take has complex outputs.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Case = tuple[Any, tuple]
"""A function or an nnx module, and its arguments."""

random = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


x, y, v, w = normal(3, 4), normal(3, 4), normal(6), normal(6)
positive = np.abs(x) + 0.5
inner = np.tanh(x) * 0.9
square = normal(4, 4)
definite = (square @ square.T + 4 * np.eye(4)).astype(np.float32)
ints = np.array([[1, -5, 7, 3], [4, 4, -2, 9]], np.int32)
others = np.array([[3, 3, -2, 2], [1, 5, 4, 3]], np.int32)
small = np.array([0, 2, 1, 2, 4, 2], np.int32)
bools, either = x > 0, y > 0
holes = np.where(x > 1, np.nan, x).astype(np.float32)
images = normal(2, 8, 8, 3)
sequences = normal(2, 5, 4)
labels = np.array([1, 0, 3], np.int32)
classes = np.eye(4, dtype=np.float32)[labels]


def real(function: Callable) -> Callable:
    """Return a function with complex results as pairs."""

    def paired(*arrays):
        def pair(z):
            return (jnp.real(z), jnp.imag(z)) if jnp.iscomplexobj(z) else z

        return jax.tree.map(pair, function(*arrays))

    return paired


def table(module: Any, names: str, *arrays: Any) -> dict[str, Case]:
    """Return functions by name, of those that this release has, on the same arrays."""
    return {n: (getattr(module, n), arrays) for n in names.split() if hasattr(module, n)}


def jax_nn() -> dict[str, Case]:
    nn = jax.nn
    return {
        **table(
            nn,
            "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu "
            "log_sigmoid log_softmax logmeanexp logsumexp mish relu relu6 selu sigmoid silu "
            "soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus standardize swish "
            "tanh",
            x,
        ),
        "gelu, exact": (lambda a: nn.gelu(a, approximate=False), (x,)),
        "log1mexp": (nn.log1mexp, (positive,)),
        "one_hot": (lambda i: nn.one_hot(i, 5), (small,)),
        "dot_product_attention": (nn.dot_product_attention, (normal(2, 5, 2, 4),) * 3),
        "dot_product_attention, causal": (
            lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True),
            (normal(2, 5, 2, 4), normal(2, 5, 2, 4), normal(2, 5, 2, 4)),
        ),
    }


UNARY = """
    abs absolute all amax amin any arcsinh argmax argmin argsort around array asarray asinh
    atleast_1d atleast_2d atleast_3d arctan atan average cbrt ceil column_stack conj conjugate copy
    cos cosh count_nonzero corrcoef cov cumprod cumsum deg2rad degrees diag diagflat diagonal diff
    ediff1d empty_like exp exp2 expm1 fabs flip fliplr flipud floor frexp gradient i0 imag
    iscomplex isfinite isinf isnan isneginf isposinf isreal matrix_transpose max mean median min
    modf nan_to_num nanargmax nanargmin negative ones_like positive prod ptp rad2deg
    radians ravel real reciprocal rint rot90 round sign signbit sin sinc sinh sort square squeeze
    std sum tan tanh trace transpose trapezoid tril triu trunc unstack unwrap var vstack
    hstack dstack zeros_like
"""
"""Functions of one array of real numbers."""

BINARY = """
    add allclose append arctan2 array_equal array_equiv atan2 copysign divide divmod equal
    floor_divide fmax fmin fmod greater greater_equal heaviside hypot inner isclose
    kron less less_equal logaddexp logaddexp2 maximum minimum mod multiply nextafter not_equal outer
    remainder subtract true_divide vdot vecdot broadcast_arrays
"""

INTEGERS = """
    bitwise_and bitwise_or bitwise_xor gcd lcm floor_divide remainder fmod divmod add
    multiply maximum
"""


def jax_numpy() -> dict[str, Case]:
    m = jnp
    pieces = [lambda a: a * 2, lambda a: a - 1]
    return {
        **table(m, UNARY, x),
        **table(m, BINARY, x, y),
        **{f"{k}, integers": c for k, c in table(m, INTEGERS, ints, others).items()},
        **table(m, "acosh arccosh log log10 log1p log2 sqrt", positive + 0.6),
        **table(m, "acos arccos arcsin arctanh asin atanh", inner),
        **table(
            m,
            "nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar",
            holes,
        ),
        **table(m, "bitwise_count bitwise_invert bitwise_not invert", ints),
        **table(m, "logical_and logical_or logical_xor", bools, either),
        **table(m, "bitwise_left_shift left_shift", ints, small[:4]),
        **table(m, "bitwise_right_shift right_shift", ints, small[:4]),
        **table(m, "convolve correlate dot polyadd polymul polysub", v, w),
        "logical_not": (m.logical_not, (bools,)),
        "power": (m.power, (positive, y)),
        "pow": (m.pow, (positive, y)),
        "float_power": (m.float_power, (positive, y)),
        "power, integers": (lambda a: a**3, (ints,)),
        "angle": (m.angle, (x,)),
        "apply_along_axis": (lambda a: m.apply_along_axis(m.cumsum, 1, a), (x,)),
        "apply_over_axes": (lambda a: m.apply_over_axes(m.sum, a, [0, 1]), (x,)),
        "arange": (lambda a: a + m.arange(4), (x,)),
        "argpartition": (lambda a: m.take_along_axis(a, m.argpartition(a, 2), -1)[..., 2], (v,)),
        "array_split": (lambda a: m.array_split(a, 4), (v,)),
        "astype": (lambda a: m.astype(a, jnp.int32), (x,)),
        "bartlett": (lambda a: a * m.bartlett(6), (v,)),
        "bincount": (lambda i: m.bincount(i, length=5), (small,)),
        "blackman": (lambda a: a * m.blackman(6), (v,)),
        "block": (lambda a, b: m.block([[a, b], [b, a]]), (x, y)),
        "broadcast_to": (lambda a: m.broadcast_to(a, (2, 3, 4)), (x,)),
        "choose": (lambda i, a: m.choose(i, [a, -a, 2 * a], mode="clip"), (small, v)),
        "clip": (lambda a: m.clip(a, -0.5, 0.5), (x,)),
        "compress": (lambda a: m.compress(np.array([True, False, True]), a, 0), (x,)),
        "concat": (lambda a, b: m.concat([a, b]), (x, y)),
        "concatenate": (lambda a, b: m.concatenate([a, b], 1), (x, y)),
        "cross": (m.cross, (normal(4, 3), normal(4, 3))),
        "cumulative_prod": (lambda a: m.cumulative_prod(a, axis=1), (x,)),
        "cumulative_sum": (lambda a: m.cumulative_sum(a, axis=1, include_initial=True), (x,)),
        "delete": (lambda a: m.delete(a, 1, 0), (x,)),
        "digitize": (m.digitize, (v, np.sort(w))),
        "dsplit": (lambda a: m.dsplit(a[None], 2), (x,)),
        "einsum": (lambda a, b: m.einsum("ij,kj->ik", a, b), (x, y)),
        "expand_dims": (lambda a: m.expand_dims(a, 1), (x,)),
        "extract": (lambda c, a: m.extract(c, a, size=5), (bools, x)),
        "eye": (lambda a: a + m.eye(3, 4), (x,)),
        "fill_diagonal": (lambda a: m.fill_diagonal(a, 7.0, inplace=False), (x,)),
        "flatnonzero": (lambda a: m.flatnonzero(a, size=5), (bools,)),
        "full": (lambda a: m.full((2, 2), a[0]), (v,)),
        "full_like": (lambda a: m.full_like(a, 3), (x,)),
        "geomspace": (lambda a: m.geomspace(a[0], a[1], 5), (positive[0],)),
        "hamming": (lambda a: a * m.hamming(6), (v,)),
        "hanning": (lambda a: a * m.hanning(6), (v,)),
        "histogram": (lambda a: m.histogram(a, 4), (v,)),
        "histogram2d": (lambda a, b: m.histogram2d(a, b, 3), (v, w)),
        "histogram_bin_edges": (lambda a: m.histogram_bin_edges(a, 4), (v,)),
        "histogramdd": (lambda a: m.histogramdd(a, 2), (normal(6, 2),)),
        "hsplit": (lambda a: m.hsplit(a, 2), (x,)),
        "identity": (lambda a: a @ m.identity(4), (x,)),
        "indices": (lambda a: a * m.indices((3, 4)), (x,)),
        "insert": (lambda a: m.insert(a, 1, 5.0, 1), (x,)),
        "interp": (m.interp, (v, np.sort(w), normal(6))),
        "intersect1d": (
            lambda a, b: m.intersect1d(a, b, size=6, fill_value=-1), (small, small[::2])),
        "isin": (m.isin, (small, np.array([2, 4], np.int32))),
        "ix_": (lambda a: a[m.ix_(np.array([0, 2]), np.array([1, 3]))], (x,)),
        "kaiser": (lambda a: a * m.kaiser(6, 3.0), (v,)),
        "ldexp": (m.ldexp, (x, np.array([1, -2, 3, 0], np.int32))),
        "lexsort": (lambda a, b: m.lexsort((a, b)), (v, small)),
        "linspace": (lambda a: m.linspace(a[0], a[1], 5), (v,)),
        "logspace": (lambda a: m.logspace(a[0], a[1], 5), (inner[0],)),
        "matmul": (m.matmul, (x, y.T)),
        "matvec": (m.matvec, (x, v[:4])),
        "meshgrid": (m.meshgrid, (v, w)),
        "moveaxis": (lambda a: m.moveaxis(a, 0, 1), (x,)),
        "nanpercentile": (lambda a: m.nanpercentile(a, 30), (holes,)),
        "nanquantile": (lambda a: m.nanquantile(a, 0.3), (holes,)),
        "nonzero": (lambda a: m.nonzero(a, size=6), (bools,)),
        "ones": (lambda a: a + m.ones((3, 1)), (x,)),
        "packbits": (m.packbits, (bools,)),
        "pad": (lambda a: m.pad(a, ((1, 2), (0, 3))), (x,)),
        "pad, reflect": (lambda a: m.pad(a, 2, mode="reflect"), (x,)),
        "partition": (lambda a: m.partition(a, 2)[..., 2], (v,)),
        "percentile": (lambda a: m.percentile(a, 30), (x,)),
        "permute_dims": (lambda a: m.permute_dims(a, (1, 0)), (x,)),
        "piecewise": (lambda a: m.piecewise(a, [a < 0, a >= 0], pieces), (x,)),
        "place": (lambda a, c: m.place(a, c, v, inplace=False), (x, bools)),
        "polyder": (m.polyder, (v,)),
        "polydiv": (m.polydiv, (v, w[:3])),
        "polyint": (m.polyint, (v,)),
        "polyval": (m.polyval, (v, x)),
        "put": (lambda a: m.put(a, np.array([1, 3]), 7.0, inplace=False), (x,)),
        "put_along_axis": (
            lambda a, i: m.put_along_axis(a, i[:, None], 9.0, 1, inplace=False), (x, labels)),
        "quantile": (lambda a: m.quantile(a, 0.3, axis=1), (x,)),
        "ravel_multi_index": (
            lambda i: m.ravel_multi_index((i, i), (5, 5), mode="clip"), (small,)),
        "repeat": (lambda a: m.repeat(a, 2, 1), (x,)),
        "reshape": (lambda a: m.reshape(a, (2, 6)), (x,)),
        "resize": (lambda a: m.resize(a, (5, 5)), (x,)),
        "roll": (lambda a: m.roll(a, 1, 0), (x,)),
        "rollaxis": (lambda a: m.rollaxis(a, 1), (x,)),
        "searchsorted": (lambda a, b: m.searchsorted(a, b), (np.sort(v), x)),
        "select": (lambda a: m.select([a > 1, a > 0], [a, a * 2], -1.0), (x,)),
        "setdiff1d": (lambda a, b: m.setdiff1d(a, b, size=4, fill_value=-1), (small, small[:1])),
        "setxor1d": (lambda a, b: m.setxor1d(a, b, size=4, fill_value=-1), (small, small[:1])),
        "split": (lambda a: m.split(a, 2, 1), (x,)),
        "stack": (lambda a, b: m.stack([a, b], 1), (x, y)),
        "swapaxes": (lambda a: m.swapaxes(a, 0, 1), (x,)),
        "take": (lambda a, i: m.take(a, i, 0), (x, labels)),
        "take_along_axis": (lambda a, i: m.take_along_axis(a, i[:, None], 1), (x, labels)),
        "tensordot": (lambda a, b: m.tensordot(a, b, axes=((0, 1), (0, 1))), (x, y)),
        "tile": (lambda a: m.tile(a, (2, 2)), (x,)),
        "tri": (lambda a: a * m.tri(3, 4), (x,)),
        "tril_indices": (lambda a: a[m.tril_indices(3)], (x,)),
        "triu_indices": (lambda a: a[m.triu_indices(3)], (x,)),
        "union1d": (lambda a, b: m.union1d(a, b, size=6, fill_value=-1), (small, small[:1])),
        "unique": (lambda a: m.unique(a, size=5, fill_value=-1), (small,)),
        "unique_counts": (lambda a: tuple(m.unique_counts(a, size=5)), (small,)),
        "unpackbits": (m.unpackbits, (np.array([3, 200], np.uint8),)),
        "unravel_index": (lambda i: m.unravel_index(i, (2, 3)), (small,)),
        "vander": (lambda a: m.vander(a, 4), (v,)),
        "vecmat": (m.vecmat, (v[:3], x)),
        "vectorize": (m.vectorize(lambda a, b: a * b + 1), (x, y)),
        "vsplit": (lambda a: m.vsplit(a, 3), (x,)),
        "where": (m.where, (bools, x, y)),
        "zeros": (lambda a: a + m.zeros((3, 1)), (x,)),
    }  # fmt: skip


def linear_algebra() -> dict[str, Case]:
    m = jnp.linalg
    return {
        **table(m, "det inv norm slogdet matrix_norm vector_norm matrix_rank", definite),
        **table(m, "cholesky eigvalsh", definite),
        **table(m, "qr pinv svdvals cond", square),
        "cross": (m.cross, (normal(4, 3), normal(4, 3))),
        "diagonal": (m.diagonal, (square,)),
        "eigh": (lambda a: abs(m.eigh(a)[1]), (definite,)),
        "lstsq": (lambda a, b: m.lstsq(a, b)[0], (normal(5, 3), normal(5))),
        "matmul": (m.matmul, (x, y.T)),
        "matrix_power": (lambda a: m.matrix_power(a, 3), (square,)),
        "matrix_transpose": (m.matrix_transpose, (x,)),
        "multi_dot": (lambda a, b, c: m.multi_dot([a, b, c]), (x, y.T, normal(3, 2))),
        "outer": (m.outer, (v, w)),
        "solve": (m.solve, (definite, normal(4, 2))),
        "svd": (lambda a: m.svd(a)[1], (normal(4, 3),)),
        "tensordot": (lambda a, b: m.tensordot(a, b, axes=((0, 1), (0, 1))), (x, y)),
        "tensorinv": (lambda a: m.tensorinv(a.reshape(2, 2, 4)), (definite,)),
        "tensorsolve": (lambda a, b: m.tensorsolve(a, b), (definite, normal(4))),
        "trace": (m.trace, (square,)),
        "vecdot": (m.vecdot, (x, y)),
    }


def fourier() -> dict[str, Case]:
    m = jnp.fft
    one = "fft fft2 fftn fftshift ifft ifft2 ifftn ifftshift rfft rfft2 rfftn ihfft"
    spectrum = normal(3, 5), normal(3, 5)
    back = [m.hfft, m.irfft, m.irfft2, m.irfftn]
    cases = {name: (real(function), a) for name, (function, a) in table(m, one, x).items()}
    for function in back:
        cases[function.__name__] = (lambda a, b, f=function: f(a + 1j * b), spectrum)
    cases["convolution"] = (
        lambda a, b: m.irfft(m.rfft(a, 12) * m.rfft(b, 12), 12)[:11], (v, w))  # fmt: skip
    cases["power spectrum"] = (lambda a: jnp.square(jnp.abs(m.rfft(a))), (normal(2, 16),))
    return cases


def _call(module: Any) -> Any:
    module.eval()
    return module


def nnx_layers() -> dict[str, Case]:
    def keys():
        return nnx.Rngs(0)

    def trained(module, *arrays):
        """Return a function of the arrays that gives the module's new statistics as well."""
        definition, state = nnx.split(module)

        def step(*inputs):
            merged = nnx.merge(definition, copied(state))
            result = merged(*inputs)
            return result, jax.tree.leaves(nnx.state(merged, nnx.BatchStat))

        return step, arrays

    cell = {
        name: (nnx.RNN(getattr(nnx, name)(4, 6, rngs=keys()), rngs=keys()), (sequences,))
        for name in ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")
    }
    cases = {
        "Linear": (nnx.Linear(4, 5, rngs=keys()), (x,)),
        "LinearGeneral": (
            nnx.LinearGeneral((5, 4), (2, 3), axis=(-2, -1), rngs=keys()), (sequences,)),
        "Einsum": (nnx.Einsum("nta,ab->ntb", (4, 5), (5,), rngs=keys()), (sequences,)),
        "Embed": (nnx.Embed(5, 3, rngs=keys()), (small,)),
        "Conv": (nnx.Conv(3, 4, (3, 3), rngs=keys()), (images,)),
        "Conv, strides": (nnx.Conv(3, 4, (3, 3), 2, rngs=keys()), (images,)),
        "Conv, 1-d, dilated": (nnx.Conv(4, 4, (3,), kernel_dilation=2, rngs=keys()), (sequences,)),
        "Conv, depthwise": (
            nnx.Conv(3, 6, (3, 3), feature_group_count=3, rngs=keys()), (images,)),
        "Conv, circular": (nnx.Conv(3, 4, (3, 3), padding="CIRCULAR", rngs=keys()), (images,)),
        "ConvTranspose": (nnx.ConvTranspose(3, 4, (3, 3), (2, 2), rngs=keys()), (images,)),
        "BatchNorm": (nnx.BatchNorm(3, rngs=keys()), (images,)),
        "LayerNorm": (nnx.LayerNorm(4, rngs=keys()), (x,)),
        "RMSNorm": (nnx.RMSNorm(4, rngs=keys()), (x,)),
        "GroupNorm": (nnx.GroupNorm(4, 2, rngs=keys()), (sequences,)),
        "InstanceNorm": (nnx.InstanceNorm(3, rngs=keys()), (images,)),
        "WeightNorm": (nnx.WeightNorm(nnx.Linear(4, 5, rngs=keys()), rngs=keys()), (x,)),
        "SpectralNorm": (nnx.SpectralNorm(nnx.Linear(4, 5, rngs=keys()), rngs=keys()), (x,)),
        "Dropout": (nnx.Dropout(0.5, rngs=keys()), (x,)),
        "MultiHeadAttention": (
            nnx.MultiHeadAttention(2, 4, decode=False, rngs=keys()), (sequences,)),
        "PReLU": (nnx.PReLU(), (x,)),
        "LoRA": (nnx.LoRA(4, 2, 5, rngs=keys()), (x,)),
        "LoRALinear": (nnx.LoRALinear(4, 5, lora_rank=2, rngs=keys()), (x,)),
        "Sequential": (
            nnx.Sequential(nnx.Linear(4, 5, rngs=keys()), nnx.relu, nnx.Linear(5, 2, rngs=keys())),
            (x,)),
        "Bidirectional": (
            nnx.Bidirectional(
                nnx.RNN(nnx.GRUCell(4, 3, rngs=keys()), rngs=keys()),
                nnx.RNN(nnx.GRUCell(4, 3, rngs=keys()), rngs=keys()), rngs=keys()),
            (sequences,)),
        **cell,
        "avg_pool": (lambda a: nnx.avg_pool(a, (2, 2), (2, 2)), (images,)),
        "max_pool": (lambda a: nnx.max_pool(a, (3, 3), (2, 2), "SAME"), (images,)),
        "min_pool": (lambda a: nnx.min_pool(a, (2, 2), (2, 2)), (images,)),
    }  # fmt: skip
    cases = {n: (_call(f) if isinstance(f, nnx.Module) else f, a) for n, (f, a) in cases.items()}
    cases["BatchNorm, training"] = trained(nnx.BatchNorm(3, rngs=keys()), images)
    cases["Dropout, training"] = trained(nnx.Dropout(0.5, rngs=keys()), x)
    return cases


def optax_losses() -> dict[str, Case]:
    m = optax.losses
    p, q = np.abs(x) / np.abs(x).sum(1, keepdims=True), np.abs(y) / np.abs(y).sum(1, keepdims=True)
    blank = np.zeros((2, 5), np.float32)
    signs = np.sign(v)
    cases = {
        **table(m, "cosine_distance cosine_similarity huber_loss l2_loss", x, y),
        **table(m, "log_cosh squared_error", x, y),
        **table(m, "convex_kl_divergence kl_divergence generalized_kl_divergence", np.log(p), q),
        **table(m, "kl_divergence_with_log_targets", np.log(p), np.log(q)),
        **table(m, "sigmoid_binary_cross_entropy sigmoid_focal_loss dice_loss", x, classes),
        **table(m, "safe_softmax_cross_entropy softmax_cross_entropy", x, classes),
        **table(m, "poly_loss_cross_entropy binary_dice_loss", x, classes),
        **table(m, "multiclass_generalized_dice_loss", images, np.abs(images)),
        **table(m, "ranking_softmax_loss", x, classes),
        **table(m, "hinge_loss perceptron_loss sparsemax_loss", v, signs),
        **table(
            m,
            "softmax_cross_entropy_with_integer_labels multiclass_hinge_loss "
            "multiclass_perceptron_loss multiclass_sparsemax_loss",
            x,
            labels,
        ),
        "ctc_loss": (
            lambda a, i: m.ctc_loss(a, blank, i, jnp.zeros(i.shape)),
            (normal(2, 5, 4), np.array([[1, 2], [3, 1]], np.int32))),
        "ctc_loss_with_forward_probs": (
            lambda a, i: m.ctc_loss_with_forward_probs(a, blank, i, jnp.zeros(i.shape)),
            (normal(2, 5, 4), np.array([[1, 2], [3, 1]], np.int32))),
        "fenchel_young_loss": (
            m.make_fenchel_young_loss(cast(Any, jax.nn.logsumexp)), (x[0], classes[0])),
        "ntxent": (m.ntxent, (x, np.array([0, 1, 0], np.int32))),
        "smooth_labels": (lambda a: m.smooth_labels(a, 0.1), (classes,)),
        "triplet_margin_loss": (m.triplet_margin_loss, (x, y, normal(3, 4))),
    }  # fmt: skip
    return cases


def optax_optimizers() -> dict[str, Case]:
    rate = 1e-2
    names = (
        "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb "
        "lars lion novograd optimistic_adam_v2 optimistic_gradient_descent polyak_sgd "
        "radam rmsprop rprop sgd sign_sgd sm3 yogi lbfgs"
    )
    optimizers = {
        name: getattr(optax, name)(rate) for name in names.split() if hasattr(optax, name)
    }
    optimizers |= {
        "adam, schedule": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 10)),
        "sgd, Nesterov": optax.sgd(rate, 0.9, nesterov=True),
        "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(rate)),
        "MultiSteps": optax.MultiSteps(optax.adam(rate), 2).gradient_transformation(),
        "apply_if_finite": optax.apply_if_finite(optax.adam(rate), 3),
        "ema": optax.chain(optax.adam(rate), optax.ema(0.9)),
        "lookahead": optax.lookahead(optax.sgd(rate), 3, 0.5),
        "contrib.muon": optax.contrib.muon(rate),
        "contrib.prodigy": optax.contrib.prodigy(rate),
        "contrib.schedule_free_adamw": optax.contrib.schedule_free_adamw(rate),
        "contrib.dadapt_adamw": optax.contrib.dadapt_adamw(rate),
        "contrib.dog": optax.contrib.dog(rate),
        "contrib.ademamix": optax.contrib.ademamix(rate),
        "noisy_sgd": optax.noisy_sgd(rate, key=0),
    }
    return {name: _update(name, o) for name, o in optimizers.items()}


def _update(name: str, optimizer: Any) -> Case:
    """Return the second update: gradients, params and state in, updates and state out."""
    params = {"w": normal(4, 3), "b": normal(3)}
    gradients = {"w": normal(4, 3), "b": normal(3)}
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    extra = {}
    if name == "polyak_sgd":
        extra = {"value": np.float32(0.7)}
    if name == "lbfgs":
        optimizer = optax.scale_by_lbfgs(3)
    init = optimizer.init(jax.tree.map(jnp.asarray, params))
    _, state = optimizer.update(gradients, init, params, **extra)
    leaves, tree = jax.tree.flatten((gradients, state, params))
    keys = [jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key) for a in leaves]

    def update(*arrays):
        arrays = [
            jax.random.wrap_key_data(a) if k else a for a, k in zip(arrays, keys, strict=True)
        ]
        gradients, state, params = jax.tree.unflatten(tree, arrays)
        return [
            bits(a) for a in jax.tree.leaves(optimizer.update(gradients, state, params, **extra))
        ]

    return update, tuple(np.asarray(bits(a)) for a in leaves)


def bits(array: Any) -> Any:
    """Return an array, a random key as the integers that it consists of."""
    key = jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key)
    return jax.random.key_data(array) if key else array


def _others(name: str) -> Callable[[], dict[str, Case]]:
    """Return the cases of a module that imports this one."""
    return lambda: getattr(importlib.import_module("benchmarks.to_onnx.lax_cases"), name)()


FAMILIES: dict[str, Callable[[], dict[str, Case]]] = {
    "jax.lax": _others("jax_lax"),
    "jax.nn": jax_nn,
    "flax.nnx": nnx_layers,
    "flax.linen": _others("linen_layers"),
    "equinox.nn": _others("equinox_layers"),
    "optax losses": optax_losses,
    "optax optimizers": optax_optimizers,
    "jax.numpy": jax_numpy,
    "jax.numpy.linalg": linear_algebra,
    "jax.numpy.fft": fourier,
}


def gradient(function: Any, arrays: tuple) -> Case | None:
    """Return the gradient by weights and floats of the sum of squares of the results."""
    weights: list = []
    call = function
    if isinstance(function, nnx.Module):
        definition, params, rest = nnx.split(function, nnx.Param, ...)
        weights, tree = jax.tree.flatten(params)

        def call(*inputs):
            params = jax.tree.unflatten(tree, inputs[: len(weights)])
            return nnx.merge(definition, params, copied(rest))(*inputs[len(weights) :])

    inputs = (*map(np.asarray, weights), *arrays)
    floats = [i for i, a in enumerate(inputs) if a.dtype == np.float32]

    def total(*arrays):
        leaves = jax.tree.leaves(call(*arrays))
        return sum(
            jnp.square(a).sum() for a in leaves if jnp.issubdtype(jnp.result_type(a), jnp.floating)
        )

    return (jax.grad(total, floats), inputs) if floats else None


def pure(function: Any) -> Callable:
    """Return a function that does not change the module that it may be."""
    if not isinstance(function, nnx.Module):
        return function
    definition, state = nnx.split(function)
    return lambda *arrays: nnx.merge(definition, copied(state))(*arrays)


def copied(state: Any) -> Any:
    """Return a state with variables of its own, which the present trace may change."""
    return jax.tree.map(lambda array: array, state)


def mapped(function: Any, arrays: tuple) -> Case:
    """Return the function mapped over two of each argument."""
    pairs = (np.stack([a, a[::-1] if a.ndim else a]) for a in arrays)
    return jax.vmap(pure(function)), tuple(pairs)


def cases(family: str) -> Iterator[tuple[str, str, Case]]:
    """Yield the kind, the name and the function of each case of a family."""
    for name, (function, arrays) in FAMILIES[family]().items():
        yield "function", name, (function, arrays)
        if family != "optax optimizers" and (case := gradient(function, arrays)):
            yield "gradient", name, case
        yield "vmap", name, mapped(function, arrays)
