"""JAX functions as ONNX: what onnxruntime computes is what JAX computes."""

import ast
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from flax import linen, nnx
from jax import lax
from jax.experimental import io_callback
from onnx.shape_inference import infer_shapes

import jaxonnx
from benchmarks.speed.doubles import for_onnxruntime
from jaxonnx import lowering
from jaxonnx.onnx_out import composed, primitive, to_onnx
from jaxonnx.onnx_out._export import write_function
from jaxonnx.onnx_out._rule_table import _RULES, names
from jaxonnx.onnx_out.passes import flatten_vectors, split_into_blocks
from jaxonnx.ops import elementwise
from jaxonnx.ops.pool import Window
from tests.support.paths import DATA

random = np.random.default_rng(0)
x = random.standard_normal((3, 4)).astype(np.float32)
y = random.standard_normal((4, 5)).astype(np.float32)
line = random.standard_normal(6).astype(np.float32)
images = random.standard_normal((2, 3, 8, 8)).astype(np.float32)
kernel = random.standard_normal((4, 3, 3, 3)).astype(np.float32)
depthwise = random.standard_normal((6, 1, 3, 3)).astype(np.float32)
integers = np.array([1, -5, 7, 3], np.int32)
divisors = np.array([3, 3, -2, 2], np.int32)
rows = np.array([2, 0, 2], np.int32)
rows4 = np.array([6, 0, 4, 9], np.int32)
square = random.standard_normal((4, 4)).astype(np.float32)
pair = random.standard_normal((2, 4, 3)).astype(np.float32)
key = np.array([0, 3], np.uint32)


def conv(a, b, strides=(1, 1), padding="SAME", **settings):
    return lax.conv_general_dilated(a, b, strides, padding, **settings)


def gradient(function):
    return jax.grad(lambda *arrays: jnp.square(function(*arrays)).sum(), (0, 1))


def pooled(window, stride, padding):
    return lambda a: lax.reduce_window(
        a, -jnp.inf, lax.max, (1, 1, window, window), (1, 1, stride, stride), padding
    )


def windows(size, kernel, stride, edge):
    out = (size + 2 * edge - kernel) // stride + 1
    return Window((kernel,) * 2, (stride,) * 2, (1, 1), ((edge, edge),) * 2, (out, out))


def layer(size, kernel, stride, edge, groups=1, channels=1, pool=False):
    """A convolution of ours, with pooling behind it."""

    def function(a, w):
        y = lowering.convolution(a, w, windows(size, kernel, stride, edge), groups, channels)
        if pool:
            y = lowering.max_pool(jnp.tanh(y), windows(y.shape[2], 3, 2, 1), channels)
        scale = jnp.arange(y.shape[channels]) / 8
        return y * scale.reshape((-1, 1, 1) if channels == 1 else -1)

    return function


def recurrent(a):
    return lax.scan(lambda c, t: (jnp.tanh(c * 0.5 + t), c + t), jnp.zeros(4), a)


FUNCTIONS = {
    **{
        f"nn.{name}": (getattr(jax.nn, name), x)
        for name in (
            *("relu", "relu6", "sigmoid", "softplus", "soft_sign", "silu", "log_sigmoid"),
            *("leaky_relu", "hard_sigmoid", "hard_silu", "hard_tanh", "elu", "celu", "selu"),
            *("gelu", "mish", "squareplus", "softmax", "log_softmax", "standardize", "logsumexp"),
        )
    },
    **{
        f"jnp.{name}": (getattr(jnp, name), x)
        for name in (
            *("log1p", "expm1", "cbrt", "sinh", "arctan", "exp2", "log2", "square", "sign"),
            *("round", "floor", "tril", "median", "isfinite", "signbit", "nan_to_num", "ptp"),
        )
    },
    "erf_inv": (lambda a: lax.erf_inv(jnp.tanh(a)), x),
    "lgamma": (lambda a: lax.lgamma(a * 3), x),
    "digamma": (lambda a: lax.digamma(jnp.abs(a) + 0.1), x),
    "polygamma": (lambda a: jax.scipy.special.polygamma(np.arange(4), jnp.abs(a) + 0.3), x),
    "erfc": (lax.erfc, x),
    "atan2": (jnp.arctan2, x, x[::-1]),
    "power": (lambda a: jnp.abs(a) ** 2.5, x),
    "dot": (lambda a, b: a @ b, x, y),
    "dot of turned": (lambda a, b: jnp.einsum("ij,kj->ki", a, b), x, y.T),
    "dot of batches": (jnp.matmul, np.stack([x, x]), np.stack([y, -y])),
    "dot of rows": (jnp.vecdot, x, x[::-1]),
    "dot of many": (lambda a, b: jnp.einsum("abcd,ebdf->aecf", a, b), images, images),
    "dot of halves": (lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32),
                      x.astype(np.float16), y.astype(np.float16)),
    "gradient": (jax.grad(lambda a, b: jnp.tanh(a @ b).sum()), x, y),
    "conv": (conv, images, kernel),
    "conv of channels last": (
        lambda a, b: conv(a, b, dimension_numbers=("NHWC", "HWIO", "NHWC")),
        images.transpose(0, 2, 3, 1), kernel.transpose(2, 3, 1, 0),
    ),
    "conv gradients": (gradient(conv), images, kernel),
    "conv gradients, strides": (gradient(lambda a, b: conv(a, b, (2, 2))), images, kernel),
    "conv gradients, strides, valid": (
        gradient(lambda a, b: conv(a, b, (2, 3), "VALID")), images, kernel),
    "conv gradients, dilation": (
        gradient(lambda a, b: conv(a, b, rhs_dilation=(2, 2))), images, kernel),
    "conv gradients, depthwise": (
        gradient(lambda a, b: conv(a, b, (2, 2), feature_group_count=3)), images, depthwise),
    "conv, transposed": (
        lambda a, b: lax.conv_transpose(
            a, b, (2, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")), images, kernel),
    "conv, apart and cut": (
        lambda a, b: conv(a, b, (2, 1), ((-1, 2), (1, -1)), lhs_dilation=(3, 2)), images, kernel),
    "layer": (gradient(layer(8, 3, 1, 1, pool=True)), images, kernel),
    "layer, channels last": (
        gradient(layer(8, 3, 1, 1, channels=-1, pool=True)), images.transpose(0, 2, 3, 1), kernel),
    "layer, strides": (gradient(layer(8, 3, 2, 0)), images, kernel),
    "layer, few places": (gradient(layer(8, 5, 2, 1)), images,
        np.arange(300, dtype=np.float32).reshape(4, 3, 5, 5) / 300),
    "layer of points": (gradient(layer(8, 1, 1, 0)), images, kernel[:, :, :1, :1]),
    "layer of points, strides": (gradient(layer(8, 1, 3, 0)), images, kernel[:, :, :1, :1]),
    "layer, groups": (gradient(layer(8, 3, 2, 1, groups=3)), images, depthwise),
    "max pool": (pooled(2, 2, "VALID"), images),
    "max pool gradient": (jax.grad(lambda a: jnp.square(pooled(3, 2, "SAME")(a)).sum()), images),
    "max pool, forward": (
        lambda a: jax.jvp(pooled(3, 2, "SAME"), (a,), (jnp.sin(a),))[1], images),
    "sum pool gradient": (
        jax.grad(lambda a: jnp.square(nnx.avg_pool(a, (2, 3), (2, 1), "SAME")).sum()), images),
    "min pool": (lambda a: -lax.reduce_window(a, jnp.inf, lax.min, (1, 3), (1, 1), "SAME"), x),
    "max pool of booleans": (
        lambda a: lax.reduce_window(a > 0, False, lax.max, (1, 3), (1, 1), "SAME"), x),
    "take": (lambda a, i: a[i], x, rows),
    "take from the end": (lambda a, i: a[i], x, np.array([-1, 0], np.int32)),
    "take beyond": (lambda a, i: a.at[i].get(mode="fill"), x, np.array([7, 0, -9], np.int32)),
    "take gradient": (jax.grad(lambda a, i: jnp.square(a[i]).sum()), x, rows),
    "take along": (lambda a, i: jnp.take_along_axis(a, i[:, None], 1), x, rows),
    "take pairs": (lambda a, i, j: a[i, j], x, rows, np.array([3, 9, 1], np.int32)),
    "cross entropy gradient": (
        jax.grad(lambda a, i: -jnp.take_along_axis(jax.nn.log_softmax(a), i[:, None], 1).mean()),
        x, rows),
    "set beyond": (lambda a, i: a.at[i].set(7), x, np.array([2, 5], np.int32)),
    "add columns": (lambda a, i: a.at[:, i].add(7), x, np.array([2, 1], np.int32)),
    "greatest at": (lambda a, i: a.at[i, 1].max(0.5), x, rows),
    "dynamic slice": (lambda a, i: lax.dynamic_slice(a, (i, 1), (2, 2)), x, np.int32(2)),
    "dynamic update": (
        lambda a, i: lax.dynamic_update_slice(a, jnp.zeros((2, 2)), (i, 1)), x, np.int32(2)),
    "sort": (lambda a: jnp.sort(a, 0), x),
    "argsort": (jnp.argsort, x),
    "argsort of equal zeros": (jnp.argsort, np.array([-0.0, 0.0, 1.0, -0.0, 0.0], np.float32)),
    "lexsort": (lambda a, b: jnp.lexsort((a, b)), integers, np.array([1, 1, 0, 0], np.int32)),
    "top k": (lambda a: lax.top_k(a, 2), x),
    "approximate top k": (lambda a: lax.approx_min_k(jax.device_put(a), 2, 0, 1.0), x),
    "searchsorted": (lambda a: jnp.searchsorted(jnp.arange(-2.0, 3), a), x),
    "cumsum": (lambda a: jnp.cumsum(a, 1), x),
    "cumprod": (lambda a: jnp.cumprod(a, 1), x),
    "cummax": (lambda a: lax.cummax(a, 1, reverse=True), x),
    "cumlogsumexp": (lambda a: lax.cumlogsumexp(a, 0), x),
    "argmax": (lambda a: jnp.argmax(a, 1), x),
    "variance": (lambda a: a.var(0), x),
    "any": (lambda a: jnp.any(a > 1, 0) ^ jnp.all(a > -1, 0), x),
    "remainder": (lambda a, b: (a % b, a // b, lax.rem(a, b)), integers, divisors),
    "remainder by zero": (
        lambda a, b: (lax.rem(a, b), lax.div(a, b), a.astype(jnp.uint8) // b.astype(jnp.uint8)),
        integers, np.array([0, 0, 3, 0], np.int32)),
    "gcd, mapped": (jax.vmap(jnp.gcd), np.stack([integers, divisors]), np.stack([divisors, rows4])),
    "unique": (lambda a: jnp.unique(a, size=3), rows),
    "next": (jnp.nextafter, np.array([0, 1, -1, 3e38, 1e-40], np.float32), line[:5]),
    "bits": (lambda a: ((a << 2) ^ (a >> 1) & ~a, lax.population_count(a), lax.clz(a)), integers),
    "uint32": (
        lambda a: a * np.uint32(3000000000) + np.uint32(4000000000),
        np.array([3, 4000000001], np.uint32)),
    "int8": (lambda a: a * np.int8(100) + np.int8(100), np.array([3, -100], np.int8)),
    "bits of floats": (
        lambda a: lax.bitcast_convert_type(a, jnp.int32),
        np.array([0, -0.0, 1, -1.5, 3e38, 1e-40, np.inf, 2**-126], np.float32)),
    "floats of bits": (
        lambda a: lax.bitcast_convert_type(a, jnp.float32),
        np.array([0, 1, 0x3F800001, 0x7F7FFFFF, 0x7F800000, -0x40800000], np.int32)),
    "halves of bits": (
        lambda a: (lax.bitcast_convert_type(a, jnp.float16),
            lax.bitcast_convert_type(a, jnp.bfloat16).astype(jnp.float32)),
        np.array([0, 1, 0x03FF, 0x3C01, 0x7BFF, 0x7C00, 0xBC00], np.uint16)),
    "bits of halves": (
        lambda a: lax.bitcast_convert_type(a, jnp.int16),
        np.array([0, -0.0, 1, -1.5, 65504, 6e-8, np.inf], np.float16)),
    "uniform halves": (lambda k: jax.random.uniform(k, (9,), jnp.float16), key),
    "erf gradient": (jax.grad(lambda a: lax.erf(a * 3).sum()), x),
    "half": (lambda a: jnp.tanh(a.astype(jnp.float16)) * 2, x),
    "bfloat16": (lambda a: a.astype(jnp.bfloat16).astype(jnp.float32) * 2, x),
    "bfloat16 added to rows": (
        lambda a: jnp.zeros(3, jnp.bfloat16).at[np.array([0, 2, 2, 0])].add(
            a.astype(jnp.bfloat16)).astype(jnp.float32), np.arange(4, dtype=np.float32)),
    "bfloat16 added to elements": (
        lambda a: jnp.ones((2, 3), jnp.bfloat16).at[np.array([0, 1, 1]), np.array([2, 0, 0])].max(
            a.astype(jnp.bfloat16)).astype(jnp.float32), np.arange(3, dtype=np.float32)),
    "where of bools": (lambda a: jnp.where(a > 0, a > 1, a < -1), x),
    "round away": (lax.round, np.array([0.5, -0.5, 1.5, 0.49999997, -2.4, 2.6], np.float32)),
    "clip": (lambda a: jnp.clip(a, -0.5, 0.5), x),
    "pad": (lambda a: lax.pad(a, 0.0, [(1, -1, 2), (-1, 2, 0)]), x),
    "flip": (lambda a: a[::-1, ::-2], x),
    "roll": (lambda a: jnp.roll(a, 1, 0), x),
    "convolve": (jax.vmap(jnp.convolve), x, x),
    "hessian": (jax.hessian(lambda a: jnp.sin(a).prod()), line),
    "cond": (lambda p, a: lax.cond(p, jnp.sin, jnp.cos, a), np.bool_(True), x),
    "switch": (lambda i, a: lax.switch(i, [jnp.sin, jnp.cos, jnp.exp], a), np.int32(2), x),
    "scan": (recurrent, x),
    "scan gradient": (jax.grad(lambda a: recurrent(a)[1].sum()), x),
    "scan over nothing": (lambda a: lax.scan(lambda c, _: (c + 1, c), a, None, length=3), x),
    "fori": (lambda a: lax.fori_loop(0, 5, lambda i, c: c + i * a, a), x),
    "while": (lambda a: lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2 + 1, a + 9), x),
    "uniform": (lambda k: jax.random.uniform(k, (3, 5)), key),
    "normal": (lambda k: jax.random.normal(jax.random.split(k)[1], (7,)), key),
    "bits of a new key": (
        lambda n: jax.random.bits(jax.random.fold_in(jax.random.key(1), n), (4,)), np.int32(5)),
    "permutation": (lambda k: jax.random.permutation(k, 10), key),
    "solve": (jax.vmap(jnp.linalg.solve), np.stack([square, square.T]), pair),
    "cholesky": (lambda a: jnp.linalg.cholesky(a @ a.T + jnp.eye(4)), square),
    "not positive": (lambda a: jnp.linalg.cholesky(a - 9 * jnp.eye(4)), square),
    "determinant gradient": (jax.grad(jnp.linalg.det), square),
    "qr": (lambda a: (jnp.linalg.qr(a), jnp.linalg.qr(a.T, mode="complete")), y),
    "eigh": (lambda a: jax.tree.map(jnp.abs, jnp.linalg.eigh(a + a.T)), square),
    "svd": (lambda a: jax.tree.map(jnp.abs, jnp.linalg.svd(a, full_matrices=False)), y),
    "fft": (lambda a: jnp.abs(jnp.fft.fft2(a)), x),
    "rfft": (lambda a: jnp.fft.irfft(jnp.fft.rfft(a, 7) * jnp.fft.rfft(a[::-1], 7), 7), x),
    "fft gradient": (jax.grad(lambda a: jnp.abs(jnp.fft.rfft(jnp.fft.fft(a).real)).sum()), x),
    "complex": (lambda a: jnp.angle(jnp.exp(1j * a) * (a + 2j) / (a - 1j) ** 2), x),
    "powers of complex": (lambda a: (jnp.sqrt(a * 1j) + (a + 1j) ** (0.5j * a)).imag, x),
    "complex factors": (lambda a: jnp.abs((a + 1j).at[1:, ::2].multiply(2 - 1j)), x),
    "welch": (lambda a: jax.scipy.signal.welch(a, nperseg=4)[1], images),
    "bessel": (lambda a: jnp.i0(a * 20), x),
    "remat": (jax.grad(lambda a: jax.checkpoint(jnp.sin)(a).sum()), x),
}  # fmt: skip


def run(model, *arrays):
    """What onnxruntime computes."""
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = dict(zip((value.name for value in model.graph.input), arrays, strict=True))
    needed = {value.name for value in session.get_inputs()}
    return session.run(None, {name: np.asarray(v) for name, v in feeds.items() if name in needed})


def close(results, wanted):
    wanted = jax.tree.leaves(wanted)
    assert [(a.shape, a.dtype) for a in results] == [(b.shape, b.dtype) for b in wanted]
    for a, b in zip(results, wanted, strict=True):
        tolerance = 1e-3 if a.dtype == np.float16 else 2e-5
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_onnxruntime_computes_the_same(name):
    function, *arrays = FUNCTIONS[name]
    close(run(to_onnx(function, *arrays), *arrays), jax.jit(function)(*arrays))


@pytest.mark.parametrize("opset", [13, 15, 23])
def test_other_opsets(opset):
    def function(a):
        a = jax.nn.standardize(a) @ a.T
        return jnp.max(a, 0), jnp.prod(a, 1), jnp.concatenate([a, a])[1:]

    close(run(to_onnx(function, x, opset=opset), x), jax.jit(function)(x))


SYMBOLIC = {
    "softmax": jax.nn.softmax,
    "gradient of a mean": jax.grad(lambda a: jnp.square(a).mean()),
    "reshape": lambda a: a.reshape(-1, 2),
    "concatenate": lambda a: jnp.concatenate([a, a * 2])[1:],
    "arange": lambda a: a + jnp.arange(a.shape[0])[:, None],
    "take": lambda a: a[:, jnp.array([0, 2])] * a.shape[0],
    "outer": lambda a: jnp.einsum("ij,kj->ik", a, a),
    "powers": lambda a: jnp.broadcast_to(a.sum(), (a.shape[0] ** 2 + 1,)),
    "scan": lambda a: lax.scan(lambda c, t: (c + t, c * t), jnp.zeros(a.shape[0]), a.T),
    "cond": lambda a: lax.cond(a[0, 0] > 0, jnp.sin, jnp.cos, a),
    "halves": lambda a: a[: a.shape[0] // 2] + (a.shape[0] % 2),
    "sort": lambda a: jnp.sort(a, 0),
    "argsort": lambda a: jnp.argsort(a, 0),
    "sort by two keys": lambda a: lax.sort((jnp.round(a), a, -a), dimension=0, num_keys=2),
    "all of top_k": lambda a: lax.top_k(a.T, a.shape[0]),
    "median": lambda a: jnp.median(a, 0),
    "quantile": lambda a: jnp.quantile(a, 0.3, axis=0),
    "padding by a size": lambda a: jnp.pad(a, ((0, a.shape[0]), (0, 0))),
    "parts of a split": lambda a: jnp.split(a, [1])[1] - a[:1],
    "an update in place": lambda a: lax.dynamic_update_slice(a, a[::-1, 1:3], (0, 2)),
    "gradient of a slice": jax.grad(lambda a: jnp.sin(lax.slice_in_dim(a, 0, 1)).sum()),
    "gradient of a roll": jax.grad(lambda a: jnp.sin(jnp.roll(a, 1, 0) * a).sum()),
    "gradient of an edge": jax.grad(
        lambda a: jnp.sin(jnp.pad(a, ((1, 2), (0, 0)), mode="edge")).sum()
    ),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes(name):
    shape = jax.export.symbolic_shape("batch, 4")
    model = to_onnx(SYMBOLIC[name], jax.ShapeDtypeStruct(shape, np.float32))
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    for array in (x, y):
        array = array[:, :4]
        close(run(model, array), SYMBOLIC[name](array))


@pytest.mark.parametrize("channels", [None, 2])
def test_circular_padding_names_the_constraints_that_it_needs(channels):
    """JAX asks whether mod(1, h) > 0, which h >= 2 does not tell it."""
    if channels:
        net = nnx.Conv(3, channels, (3, 3), padding="CIRCULAR", rngs=nnx.Rngs(0))
        last = images.transpose(0, 2, 3, 1)
    else:
        last = x

        def net(a):
            return jnp.pad(a, ((0, 0), (2, 2)), mode="wrap")

    constraints: list[str] = []
    for _ in range(4):
        spec = "n, h, w, 3" if channels else "n, m"
        shape = jax.export.symbolic_shape(spec, constraints=constraints)
        try:
            model = to_onnx(net, jax.ShapeDtypeStruct(shape, np.float32))
            break
        except jaxonnx.UnsupportedError as error:
            constraints += ast.literal_eval(str(error).rpartition("constraints=")[2])
    close(run(model, last), net(last))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, images):
        h = nnx.max_pool(nnx.relu(self.norm(self.conv(images))), (2, 2), (2, 2))
        h = self.attention(h.reshape(h.shape[0], -1, 8))
        return self.out(self.dropout(h).mean(1))


@pytest.mark.deep
def test_a_module_of_nnx_and_back():
    net = Net(nnx.Rngs(0))
    net.eval()
    shape = jax.export.symbolic_shape("n, 8, 8, 3")
    proto = to_onnx(net, jax.ShapeDtypeStruct(shape, np.float32))
    last = images.transpose(0, 2, 3, 1)
    close(run(proto, last), net(last))
    model = jaxonnx.load(proto)
    assert {"conv.kernel", "conv.bias", "attention.query.kernel", "out.bias"} <= {*model.params}
    assert "norm.mean" not in model.params
    close([np.asarray(model(last))], net(last))


def test_a_module_of_linen():
    net = linen.Sequential([linen.Dense(4), linen.relu, linen.Dense(2)])
    variables = net.init(jax.random.key(0), x)
    proto = to_onnx(net.bind(variables), x, outputs=["logits"])
    close(run(proto, x), net.apply(variables, x))
    names = {tensor.name for tensor in proto.graph.initializer}
    assert {"layers_0.kernel", "layers_2.bias"} <= names
    assert proto.graph.output[0].name == "logits"


def test_names_are_those_of_the_arguments():
    model = to_onnx(lambda params, n: params["w"] * n, {"w": x, "b": x}, 2.0)
    assert [value.name for value in model.graph.input] == ["params.b", "params.w", "n"]
    with pytest.raises(jaxonnx.InputError, match=r"inputs= has 1 names for 2 arrays"):
        to_onnx(lambda a, b: a + b, x, x, inputs=["a"])
    with pytest.raises(jaxonnx.InputError, match=r"two arrays have the name 'a'"):
        to_onnx(lambda a, b: a + b, x, x, inputs=["a", "a"])
    with pytest.raises(jaxonnx.InputError, match=r"'a' is the name of another tensor"):
        to_onnx(lambda a: a + 1, x, outputs=["a"])
    with pytest.raises(jaxonnx.InputError, match="is a str, not an array of numbers"):
        to_onnx(lambda a: a, "text")
    with pytest.raises(jaxonnx.InputError, match="returns no array for these examples"):
        to_onnx(lambda a: {"y": None}, x)
    with pytest.raises(jaxonnx.InputError, match=r"opset 9 is too old.* Pass opset=13"):
        to_onnx(lambda a: a, x, opset=9)


def references(a):
    reference = jax.new_ref(a)
    reference[...] += 1
    return reference[...]


SYMBOLIC_ROWS = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 4"), np.float32)


def test_multiples_are_divided():
    shape = jax.export.symbolic_shape("2*n, 4")
    model = to_onnx(lambda a: a.reshape(-1, 8), jax.ShapeDtypeStruct(shape, np.float32))
    close(run(model, x[:2]), x[:2].reshape(-1, 8))


BAD = {
    "a print": (lambda a: (jax.debug.print("{}", a), a)[1], x, r"'debug_\w+' in .* side effects"),
    "a callback": (
        lambda a: (jax.debug.callback(print, a), a)[1], x, r"'debug_callback' in .* side effects"),
    "an ordered callback": (
        lambda a: io_callback(np.sin, a, a, ordered=True), x, r"'io_callback' in .* side effects"),
    "a pure callback": (lambda a: jax.pure_callback(np.sin, a, a), x, r"'pure_callback' in "),
    "a reference": (references, x, r"'\w+' in "),
    "a primitive": (
        lambda a: jnp.abs(jnp.linalg.eigvals(a)), square, r"'eig' in .* has no form in ONNX"),
    "a dtype": (
        lambda a: a.astype(jnp.float8_e4m3fn) + 1, x, r"in .*: it computes with float8_e4m3fn"),
    "complex results": (lambda a: a * 1j, x, "the function gives complex numbers"),
    "a complex input": (lambda a: a.real, x * 1j, "the function takes complex numbers"),
    "complex branches": (
        lambda a: lax.cond(a[0, 0] > 0, jnp.exp, jnp.sin, a * 1j).real, x,
        r"'cond' in .* complex numbers"),
    "an operator of later opsets": (
        lambda a: a & 3, integers, r"'and' in .* needs BitwiseAnd, .* opset 18"),
    "integers in convolutions": (
        lambda a: conv(a, a), images.astype(np.int32), "'conv_.* floating point numbers only"),
    "a choice by a size": (
        lambda a: a if a.shape[0] > 2 else -a, SYMBOLIC_ROWS, r"the function in .* symbolic size"),
    "a running maximum over a symbolic axis": (
        lambda a: lax.cummax(a, 0), SYMBOLIC_ROWS, r"'cummax' in .* depends on a symbolic size"),
    "a scan over a symbolic axis": (
        lambda a: lax.associative_scan(jnp.add, a), SYMBOLIC_ROWS,
        r"JAX does not trace the function in .*: associative scan over axis"),
    "a division of a size": (
        lambda a: a.reshape(-1, 8), SYMBOLIC_ROWS,
        r"divide evenly .* numbers, multiples like '4\*h', or constraints"),
    "repeated complex factors": (
        lambda a: (a + 1j).at[jnp.array([0, 0])].multiply(2j).real, x,
        r"'scatter.mul' in .* by several factors each; use unique_indices"),
    "a choice by values": (
        lambda a: a if a[0, 0] > 0 else -a, x, r"the function in .* values while it is traced"),
    "a selection by values": (lambda a: a[a > 0], x, r"the function in .* values while"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_onnx_cannot_say_is_refused_by_its_line(name):
    function, example, message = BAD[name]
    opset = 17 if "opset" in name else 18
    with pytest.raises(jaxonnx.UnsupportedError, match=message) as raised:
        to_onnx(function, example, opset=opset)
    assert "complex numbers" in message or re.search(r"test_to_onnx.py:\d+", str(raised.value))


def test_examples_that_do_not_fit_are_said_with_the_line():
    with pytest.raises(
        jaxonnx.InputError, match=r"\(float32\[3,4\], float32\[3,4\]\) in .*py:\d+: dot_general"
    ):
        to_onnx(lambda a, b: a @ b, x, x)
    with pytest.raises(jaxonnx.InputError, match=r"does not take .* missing 1 required"):
        to_onnx(lambda a, b: a @ b, x)
    with pytest.raises(jaxonnx.UnsupportedError, match=r"'fft' in .* needs DFT, .* opset 17 on"):
        to_onnx(lambda a: jnp.abs(jnp.fft.fft(a)), x, opset=16)
    with pytest.raises(jaxonnx.UnsupportedError, match="scatters by add from opset 16 on"):
        to_onnx(lambda a: a.at[rows].add(1), x, opset=15)


def test_programs_that_are_called_again_are_functions_of_the_model():
    @jax.jit
    def block(a, w):
        for _ in range(3):
            a = jnp.tanh(a @ w) + jnp.sin(a) * 0.5
        return a

    def network(a, w):
        return block(block(a, w), w * 2), lax.scan(lambda c, _: (block(c, w), None), a, None, 2)[0]

    w = y[:, :4]
    model = to_onnx(network, x, w)
    assert [function.name for function in model.functions] == ["block"]
    assert sum(node.op_type == "block" for node in model.graph.node) == 2
    close(run(model, x, w), network(x, w))
    close([np.asarray(a) for a in jaxonnx.load(model)(x, w)], network(x, w))
    assert not to_onnx(lambda a, w: block(a, w), x, w).functions
    symbolic = to_onnx(network, SYMBOLIC_ROWS, w)
    assert not symbolic.functions  # whose sizes would have to be handed on
    close(run(symbolic, x, w), network(x, w))


BITS = np.array([[1, -5, 7, 3], [4, 4, -2, 9]], np.int32)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda a: lax.reduce_xor(a, (1,)), BITS),
        (lambda a: lax.reduce_xor(a, (0, 1)), BITS),
        (lambda a: lax.reduce_xor(a, (0,)), BITS > 0),
        (lambda a: lax.shift_right_arithmetic(a, jnp.full_like(a, 3)), BITS),
        (lambda a: lax.shift_right_arithmetic(a, jnp.full_like(a, 3)), BITS.astype(np.uint32)),
    ],
)
def test_bits(function, x):
    np.testing.assert_array_equal(run(to_onnx(function, x), x)[0], function(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a: a.at[np.array([0])].apply(jnp.tanh), "applies a function in place"),
        (lambda a: lax.reduce_or(a.astype(int), (0,)), "it supports bool, not integers"),
    ],
)
def test_what_would_compute_something_else_is_refused(function, message):
    with pytest.raises(jaxonnx.UnsupportedError, match=message):
        to_onnx(function, np.ones((3, 4), np.float32))


@pytest.mark.deep
@pytest.mark.parametrize("family", ["jax.nn", "jax.numpy.fft"])
def test_families_of_the_scoreboard(family):
    from benchmarks.to_onnx.cases import cases
    from benchmarks.to_onnx.worker import outcome

    reasons = {f"{name}, {kind}": outcome("jaxonnx", *case) for kind, name, case in cases(family)}
    assert sum(reason is not None for reason in reasons.values()) > 50
    assert not {name: reason for name, reason in reasons.items() if reason}


def test_a_rule_is_added_in_one_place(monkeypatch):
    monkeypatch.setitem(_RULES, "igamma", {})  # and forgotten with the test

    @composed("igamma")
    def igamma(a, x):
        return a * x  # not what it means

    assert "igamma" in names()
    with pytest.raises(jaxonnx.ModelError, match=r"computes something else .* of Mul"):
        to_onnx(lax.igamma, x, x)
    close(run(to_onnx(lax.igamma, x, x, check=False), x, x), x * x)

    @primitive("igamma", since=19)
    def newer(g, a, x):
        return g("Add", a, x)

    close(run(to_onnx(lax.igamma, x, x, opset=19, check=False), x, x), x + x)
    close(run(to_onnx(lax.igamma, x, x, opset=18, check=False), x, x), x * x)


def test_float64_is_exact():
    """Random numbers of float64 and the formula of the format, bit by bit."""
    bits = np.array([0, 1, 2**62, 2**63 + 2**52, 2046 << 52, 2047 << 52], np.uint64)

    def function(k, b):
        floats = lax.bitcast_convert_type(b, jnp.float64)
        return jax.random.uniform(k, (5,)), floats, lax.bitcast_convert_type(floats, jnp.uint64)

    with jax.enable_x64(True):
        results = run(to_onnx(function, key, bits), key, bits)
        for found, wanted in zip(results, jax.jit(function)(key, bits), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_what_is_not_needed_is_not_written():
    large = np.ones((100, 100), np.float32)
    model = to_onnx(lambda a: (a @ large, (jnp.exp(a) @ large)[:0])[0] @ large, large)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "MatMul"]
    assert len(model.graph.initializer) == 1

    def turned(a):  # in the order of a, without transposition
        return jnp.cos(jnp.sin(a.T)).T

    model = to_onnx(lambda a: lax.cond(a[0, 0] > 0, turned, jnp.exp, a), large)
    (choice,) = (node for node in model.graph.node if node.op_type == "If")
    branches = [[node.op_type for node in a.g.node] for a in choice.attribute]
    assert sorted(map(sorted, branches)) == [["Cos", "Identity", "Sin"], ["Exp", "Identity"]]


@pytest.mark.parametrize("kind", ["int64", "double"])
def test_then_computes_with_types_of_64_bits_as_jax_does(kind):
    """A mean over a mask of int64, say; the file's values have 64 bits, and JAX's have 32."""
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g ({kind}[n, 3] mask) => ({kind}[n, 3] m) {{ m = Identity(mask) }}"""
    model = jaxonnx.load(onnx.parser.parse_model(text))
    counts = model.then(lambda m: 1 / jnp.maximum(m.sum(1), 1).astype(jnp.float32))
    mask = np.array([[1, 1, 0], [0, 0, 0]], np.float64 if kind == "double" else np.int64)
    close(run(counts.to_onnx(), mask), np.array([0.5, 1], np.float32))


def test_then_knows_the_sizes_of_what_it_continues():
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[batch, 4] x) => (float[n, 2] y) <int64[2] s = {-1, 2}> { y = Reshape(x, s) }"""
    model = jaxonnx.load(onnx.parser.parse_model(text))
    longer = model.then(lambda y: jax.nn.softmax(y.reshape(-1, 4)) * y.shape[0])
    for array in (x, y[:, :4]):
        close(run(longer.to_onnx(), array), jax.nn.softmax(array) * 2 * len(array))
    old = jaxonnx.load(onnx.parser.parse_model(text.replace('"": 17', '"": 9')))
    with pytest.raises(jaxonnx.InputError, match="opset 9"):
        old.then(jax.nn.softmax)


def test_then_continues_a_network():
    from tests.support.tiny_networks import mlp

    model = jaxonnx.load(mlp())
    head = nnx.Sequential(jax.nn.relu, nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    longer = model.then(head, outputs=["scores"])
    data = random.standard_normal((5, 8)).astype(np.float32)
    close(run(longer.to_onnx(), data), head(model(data)))
    close([np.asarray(longer(data))], head(model(data)))
    assert {*longer.params} == {*model.params, "layers.1.kernel", "layers.1.bias"}
    before, after = model.to_onnx().graph.node, longer.to_onnx().graph.node
    assert list(after[: len(before)]) == list(before)
    again = jaxonnx.load(longer.to_onnx())
    assert {*again.params} == {*longer.params}
    with pytest.raises(jaxonnx.InputError, match="'h' is the name of another tensor"):
        model.then(head, outputs=["h"])
    head = linen.Dense(2)
    variables = head.init(jax.random.key(0), model(data))
    longer = model.then(head.bind(variables))
    close(run(longer.to_onnx(), data), head.apply(variables, model(data)))
    assert {*longer.params} == {*model.params, "kernel", "bias"}


def test_then_continues_open_sizes_that_fit_at_some_values_only():
    """As optimum declares images: any height and width, for a table of four patches."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[b, channels, height, width] x) => (float[b, 2] y)
    <float[2, 3, 8, 8] w = {}, int64[3] s = {0, 2, -1},
     float[1, 2, 4] table = {1, 2, 3, 4, 5, 6, 7, 8}> {
      h = Conv<strides = [8, 8]>(x, w)
      r = Reshape(h, s)
      p = Add(r, table)
      y = ReduceMean<axes = [2], keepdims = 0>(p)
    }"""
    weights = " ".join(f"{x:.3f}," for x in np.linspace(-1, 1, 384)).rstrip(",")
    model = jaxonnx.load(onnx.parser.parse_model(text.replace("w = {}", f"w = {{{weights}}}")))
    longer = model.then(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))  # compared at a size that fits
    x = random.standard_normal((5, 3, 16, 16)).astype(np.float32)
    assert [v.shape for v in longer.outputs] == [("b", 3)]
    close(run(longer.to_onnx(), x), longer(x))
    assert {"kernel", "bias"} < {*longer.params}


@pytest.mark.deep
def test_then_continues_a_vision_transformer_of_transformers(tmp_path):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, intermediate_size=24, image_size=16, patch_size=8)

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = transformers.ViTForImageClassification(config)

        def forward(self, x):
            return self.vit(x).logits

    net = Logits().eval()
    x, axes = torch.randn(2, 3, 16, 16), dict(enumerate(("batch", "channels", "height", "width")))
    path = tmp_path / "vit.onnx"
    names = {"input_names": ["x"], "output_names": ["logits"]}
    open_axes = {"x": axes, "logits": {0: "batch"}}
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(net, (x,), path, dynamo=False, dynamic_axes=open_axes, **names)
    longer = jaxonnx.load(path).then(jax.nn.softmax)
    expected = net(x).softmax(-1).detach().numpy()
    close(run(longer.to_onnx(), x.numpy()), expected)


@pytest.mark.parametrize("path", ["qwen3-genai", "qwen3-optimum", "builder/lfm2.onnx"])
def test_then_continues_a_decoder_and_leaves_its_caches(path):
    model = jaxonnx.load(DATA / "llm" / path)
    head = nnx.Linear(model.outputs[0].shape[-1], 2, rngs=nnx.Rngs(0))
    longer = model.then(head, outputs=["scores"])
    assert [v.name for v in longer.inputs] == [v.name for v in model.inputs]
    assert [v.name for v in longer.outputs] == ["scores", *(v.name for v in model.outputs[1:])]
    whole = model.without_cache().then(head, outputs=["scores"])
    assert [v.name for v in whole.outputs] == ["scores"]
    assert whole.to_onnx() == longer.to_onnx()
    ids = np.array([[5, 6, 7, 8]])
    scores, logits = (net.predict({"input_ids": ids}) for net in (whole, model.without_cache()))
    close([scores], head(logits))
    if path.startswith("qwen3"):
        session = onnxruntime.InferenceSession(longer.to_onnx().SerializeToString())
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        given["position_ids"] = np.arange(4)[None]
        sizes = {"batch_size": 1, "past_sequence_length": 0, "kv_cache_dim": 16}
        for value in session.get_inputs():
            if value.name not in given:
                shape = [sizes.get(n, n) for n in value.shape]
                given[value.name] = np.zeros(shape, np.float32)
        given = {value.name: given[value.name] for value in session.get_inputs()}
        np.testing.assert_allclose(session.run(["scores"], given)[0], scores, atol=2e-5)


def test_convolutions_stay_operators():
    """No transposition, and one operator for each layer, where images have their channels last."""

    def loss(a, w):
        return jnp.square(layer(8, 3, 1, 1, pool=True)(a, w)).sum()

    nodes = [n.op_type for n in to_onnx(loss, images, kernel).graph.node]
    assert nodes == ["Conv", "Tanh", "MaxPool", "Mul", "Mul", "ReduceSum"]
    nodes = [n.op_type for n in to_onnx(jax.grad(loss), images, kernel).graph.node]
    assert nodes.count("MaxPool") == nodes.count("ScatterElements") == 1
    assert nodes.count("Conv") == nodes.count("ConvTranspose") == 1


@pytest.mark.parametrize("channels", [1, -1])
def test_batch_normalization_stays_an_operator(channels):
    """By known statistics; its derivatives are those of the formula, and so are batches of it."""
    vectors = np.abs(np.random.default_rng(2).standard_normal((4, 3))).astype(np.float32)
    a = images if channels == 1 else images.transpose(0, 2, 3, 1)

    def normalized(a, v):
        return lowering.normalize(a, *v, 1e-3, channels)

    def formula(a, v):
        scale, bias, mean, var = v.reshape(4, 3, 1, 1) if channels == 1 else v
        return (a - mean) / jnp.sqrt(var + 1e-3) * scale + bias

    model = to_onnx(normalized, a, vectors)
    assert [n.op_type for n in model.graph.node].count("BatchNormalization") == 1
    close(run(model, a, vectors), formula(a, vectors))

    def several(function):
        total = lambda *arrays: jnp.sin(function(*arrays)).sum()  # noqa: E731
        return jax.jit(
            lambda a, v: (
                jax.grad(total, (0, 1))(a, v),
                jax.vmap(function, (0, None))(a[:, None], v),
            )
        )

    wanted = several(formula)(a, vectors)
    for one, other in zip(
        *map(jax.tree.leaves, (several(normalized)(a, vectors), wanted)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    close(run(to_onnx(several(normalized), a, vectors), a, vectors), wanted)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "edge", "groups"),
    [(6, 3, 1, 1, 3), (20, 5, 2, 2, 3), (17, 3, 2, 0, 3), (8, 3, 2, 1, 1)],
)
def test_gradients_of_small_products_are_large_ones(size, kernel, stride, edge, groups):
    """In a training step, where each channel has a kernel or images are small."""
    random = np.random.default_rng(3)
    a = random.standard_normal((5, 3, size, size)).astype(np.float32)
    w = random.standard_normal((3, 3 // groups, kernel, kernel)).astype(np.float32)
    total = lambda *arrays: jnp.sin(layer(size, kernel, stride, edge, groups)(*arrays)).sum()  # noqa: E731
    slopes = jax.grad(total, (0, 1))
    model = write_function(slopes, (a, w), None, None, 18, flat=True)[0]
    of_images = 1 if size > 16 else 0  # by a convolution
    nodes = [node.op_type for node in model.graph.node]
    assert nodes.count("Conv") + nodes.count("ConvTranspose") == 1 + of_images
    assert "Pad" not in nodes or size > 6
    close(run(model, a, w), jax.jit(slopes)(a, w))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "form",
    [
        Window((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)), (8, 8)),
        Window((3, 2), (3, 2), (1, 1), ((0, 0), (1, 0)), (2, 4)),  # rows that no window reads
        Window((3, 3), (2, 1), (1, 2), ((2, 0), (0, 3)), (4, 7)),
    ],
    ids=["plain", "strides", "dilations"],
)
def test_channels_of_few_images_have_gradients_by_convolutions(form, count):
    """In a training step: one product for all images is slower."""
    random = np.random.default_rng(3)
    a = random.standard_normal((count, 6, 8, 8)).astype(np.float32)
    w = random.standard_normal((6, 1, *form.kernel)).astype(np.float32)
    total = lambda *arrays: jnp.sin(lowering.convolution(*arrays, form, 6, 1)).sum()  # noqa: E731
    slopes = jax.grad(total, (0, 1))
    model = write_function(slopes, (a, w), None, None, 18, flat=True)[0]
    nodes = [node.op_type for node in model.graph.node]
    assert nodes.count("Conv") + nodes.count("ConvTranspose") == 3
    assert not {"Gather", "MatMul"} & {*nodes}
    close(run(model, a, w), jax.jit(slopes)(a, w))


def test_a_large_pointwise_kernel_is_not_transposed():
    """In the gradient of one image, which is smaller."""
    random = np.random.default_rng(3)
    a = random.standard_normal((1, 64, 3, 3)).astype(np.float32)
    w = random.standard_normal((96, 64, 1, 1)).astype(np.float32) / 1000
    total = lambda *arrays: jnp.sin(layer(3, 1, 1, 0)(*arrays)).sum()  # noqa: E731
    slopes = jax.grad(total, (0, 1))
    model = write_function(slopes, (a, w), None, None, 18, flat=True)[0]
    nodes = [node.op_type for node in model.graph.node]
    assert nodes.count("Gemm") == 2
    assert "Transpose" not in nodes
    close(run(model, a, w), jax.jit(slopes)(a, w))


def test_a_product_of_vectors_is_a_sum():
    """onnxruntime takes ten times as long for a MatMul of a row and a column."""

    def function(a, b):
        return jnp.vdot(a, a), jnp.dot(a.ravel(), b.ravel())

    model = to_onnx(function, images, -images)
    nodes = [node.op_type for node in model.graph.node]
    assert sorted(n for n in nodes if n != "Reshape") == ["Mul", "ReduceSum", "ReduceSumSquare"]
    close(run(model, images, -images), function(images, -images))


def test_vectors_have_one_axis():
    """In a training step, other than where they are broadcast to an array or are results."""

    def function(a, scale):
        total = a.sum((0, 2, 3), keepdims=True)
        root = jnp.sqrt(jnp.square(total) + scale.reshape(1, 3, 1, 1))
        flat = -root.reshape(3, 1) * scale[:, None]
        chosen = jnp.where(flat > total.max(), flat, jnp.tanh(root.reshape(3, 1)))
        return a * root, total, chosen.reshape(-1), flat.T @ chosen

    vector = np.float32([1, 2, 3])
    model = write_function(function, (images, vector), None, None, 18, flat=True)[0]
    plain = run(model, images, vector)
    flatten_vectors(model)
    onnx.checker.check_model(model, full_check=True)
    inferred = infer_shapes(model).graph
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.value_info
    }
    for node in model.graph.node:
        if node.op_type in ("Sqrt", "Add", "Neg", "Greater", "Tanh", "Where"):
            assert shapes[node.output[0]] == [3]
    for one, other in zip(run(model, images, vector), plain, strict=True):
        np.testing.assert_array_equal(one, other)


OF_MATRICES, OF_IMAGES = ("Gemm", "MatMul"), ("Conv", "ConvTranspose")


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize(
    ("size", "channels", "stride", "products", "convolutions"),
    [(9, 8, 1, 9, 2), (17, 8, 2, 9, 2), (7, 8, 1, 3, 1), (2, 8, 1, 4, 0), (9, 7, 1, 0, 3)],
    ids=["a product for each tap", "strides", "one product", "no convolution", "few channels"],
)
def test_gradients_of_weights_are_products(size, channels, stride, products, convolutions, opset):
    """In a training step, of batches of any size."""
    random = np.random.default_rng(3)
    a = random.standard_normal((3, channels, size, size)).astype(np.float32)
    w = random.standard_normal((5, channels, 3, 3)).astype(np.float32)
    total = lambda *arrays: jnp.sin(layer(size, 3, stride, 1)(*arrays)).sum()  # noqa: E731
    slopes = jax.grad(total, (0, 1))
    (batch,) = jax.export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype)
    for like in (a, images):
        model = write_function(slopes, (like, w), None, None, opset, flat=True)[0]
        nodes = [node.op_type for node in model.graph.node]
        found = [sum(map(nodes.count, names)) for names in (OF_MATRICES, OF_IMAGES)]
        assert found == [products, convolutions]
        close(run(model, a, w), jax.jit(slopes)(a, w))


def test_channels_are_scaled_and_shifted_in_one_pass():
    """In a training step, whatever else is added."""
    scale, shift = np.float32([[[1]], [[-2]], [[3]]]), np.float32([[[0]], [[5]], [[-1]]])

    def function(a, scale, shift):
        return jnp.sin(a * scale + shift), (a * scale + jnp.sin(a)) + shift

    model = write_function(function, (images, scale, shift), None, None, 18, flat=True)[0]
    nodes = [node.op_type for node in model.graph.node if "Reshape" not in node.op_type]
    assert sorted(nodes) == ["Add", "BatchNormalization", "BatchNormalization", "Sin", "Sin"]
    for one, other in zip(
        run(model, images, scale, shift), function(images, scale, shift), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_gelu_has_a_short_gradient():
    """JAX cuts the bits of x for the exponent in the derivative of erf; the graph does not."""
    nodes = [n.op_type for n in to_onnx(jax.grad(lambda a: lax.erf(a).sum()), x).graph.node]
    assert sorted(nodes) == ["Exp", "Mul", "Mul", "Neg"]


def test_relu_stays_an_operator():
    def relu(a):
        return jnp.where(a <= 0, 0, a)

    odd = np.array([np.nan, np.inf, -np.inf, -1, 2, 0, -0.0], np.float32)
    model = to_onnx(relu, odd)
    assert [n.op_type for n in model.graph.node] == ["Relu"]
    np.testing.assert_array_equal(run(model, odd)[0], relu(odd))

    def several(a):  # one comparison, and a choice that drops NaNs
        negative = a <= 0
        return jnp.where(negative, 0, a) + jnp.where(negative, 0, jnp.log(a))

    close(run(to_onnx(several, x), x), several(x))


def test_clip_stays_an_operator():
    """So does its gradient in a training step: a product with a mask of what Clip leaves."""
    odd = np.array([np.nan, np.inf, -np.inf, -1, 0, -0.0, 2, 6, 7], np.float32)

    def clip(a):
        return elementwise.clip(a, np.float32(0), np.float32(6))

    model = to_onnx(clip, odd)
    assert [n.op_type for n in model.graph.node] == ["Clip"]
    np.testing.assert_array_equal(run(model, odd)[0], clip(odd))
    factors = np.arange(9, dtype=np.float32)
    slopes = jax.value_and_grad(lambda a, b: (clip(a) * b).sum())
    _, wanted = slopes(odd, factors)
    model = write_function(slopes, (odd, factors), None, None, 18, flat=True)[0]
    masked = {"Cast", "Equal", "Clip", "Mul", "ReduceSum"}
    assert {n.op_type for n in model.graph.node} == masked
    np.testing.assert_array_equal(run(model, odd, factors)[1][1:], wanted[1:])
    np.testing.assert_array_equal(run(to_onnx(slopes, odd, factors), odd, factors)[1], wanted)


def test_gradients_of_parts_and_products_are_one_operator():
    """Parts are joined, not padded and added; a product comes out in the order it is read in."""

    def loss(a, w):
        first, second = jnp.split(a @ w, [1], axis=1)
        return (jnp.sin(first) * jnp.cos(second)).sum()

    model = to_onnx(jax.grad(loss, 1), x, y)
    nodes = [node.op_type for node in model.graph.node]
    assert nodes.count("Concat") == nodes.count("Gemm") == 1
    assert not {"Pad", "Transpose"} & {*nodes}
    close(run(model, x, y), jax.grad(loss, 1)(x, y))
    overlapping = jax.grad(lambda a: (a[:2] * a[1:]).sum())
    close(run(to_onnx(overlapping, x), x), overlapping(x))


def test_factors_are_taken_out_of_sums_in_training_steps():
    """So normalizations and their gradients compute fewer whole arrays."""
    scale = np.float32([[[1]], [[-2]], [[3]]])

    def loss(a, scale):
        centred = a - a.mean((0, 2, 3), keepdims=True)
        root = lax.rsqrt(jnp.square(centred).mean((0, 2, 3), keepdims=True) + 1e-3)
        return jnp.sin(centred * root * scale).sum()

    def whole(model):
        shapes = infer_shapes(model).graph.value_info
        sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in shapes}
        return sum(sizes.get(n.output[0]) == [2, 3, 8, 8] for n in model.graph.node)

    slopes = jax.value_and_grad(loss, (0, 1))
    plain = to_onnx(slopes, images, scale)
    model = write_function(slopes, (images, scale), None, None, 18, flat=True)[0]
    assert (whole(model), whole(plain)) == (9, 15)
    close(run(model, images, scale), slopes(images, scale))


def test_factors_that_fit_one_at_a_time_stay_apart():
    small, one = np.float32([[3e-38], [-5e-38]]), np.float32([[1]])
    for function in (
        lambda a, _: a * jnp.float32(2**74) * jnp.float32(2**75),
        lambda a, b: jnp.ldexp(a * b, 140),
    ):
        model = write_function(function, (small, one), None, None, 18, flat=True)[0]
        close(run(model, small, one), function(small, one))


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(one, id=one.name, marks=[pytest.mark.deep] * (one.name == "RNG_DEFAULT"))
        for one in lax.RandomAlgorithm
    ],
)
def test_bits_are_those_of_xla(algorithm):
    shapes = [(), (1,), (8,), (5, 3), (7, 3, 2)]

    def function(state):
        kinds = [(shape, np.uint32) for shape in shapes]
        kinds += [((3, 3), np.uint8), ((2, 2), np.uint16), ((2, 3), np.uint64)]
        return [lax.rng_bit_generator(state, shape, dtype, algorithm) for shape, dtype in kinds]

    with jax.enable_x64(True):
        for states in (
            # the second one counts beyond 64 bits
            np.array([[7, 11, 2**32 - 2, 17], [2**32 - 1, 11, 2**32 - 2, 2**32 - 1]], np.uint32),
            np.uint64([[3, 2**33 - 1]]),
        ):
            model, compiled = to_onnx(function, states[0]), jax.jit(function)
            for state in states:
                wanted = jax.tree.leaves(compiled(state))
                for one, other in zip(run(model, state), wanted, strict=True):
                    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_keys_of_other_kinds(kind):
    def function(seed):
        key, other = jax.random.split(jax.random.key(seed, impl=kind))
        key = jax.random.fold_in(key, 7)
        return jax.random.uniform(key, (3, 5)), jax.random.bernoulli(other, 0.3, (7,))

    wanted = jax.jit(function)(3)
    for one, other in zip(run(to_onnx(function, np.int32(3)), np.int32(3)), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_chains_on_large_arrays_run_in_blocks():
    def function(a, b, c):
        first = jnp.tanh(a) * b + c
        total = first.sum()  # a detour: what needs it is another chain
        other = jnp.abs(first * total) - b[:1, :1]
        return jnp.where(total > 0, jnp.sqrt(other + 9) * 2, first), -first, other[0]

    large = np.random.default_rng(1).standard_normal((2, 512, 512)).astype(np.float32)
    arrays = large[0], large[1], np.float32(2)
    plain = to_onnx(function, *arrays)
    model = split_into_blocks(plain)
    onnx.checker.check_model(model, full_check=True)
    scans = [node for node in model.graph.node if node.op_type == "Scan"]
    assert [len(scan.attribute[0].g.node) for scan in scans] == [4, 7]
    for found, wanted in zip(run(model, *arrays), run(plain, *arrays), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_doubles_run_in_blocks():
    """As `benchmarks.speed.agreement` compares them: onnxruntime lacks Erf of doubles."""
    numbers = np.linspace(-4, 4, 2**18)
    with jax.enable_x64(True):
        model = split_into_blocks(to_onnx(lambda a: lax.erf(a) * a * a + 1, numbers))
    assert "Scan" in [node.op_type for node in model.graph.node]
    wanted = [math.erf(a) * a * a + 1 for a in numbers]
    np.testing.assert_allclose(run(for_onnxruntime(model), numbers)[0], wanted, 1e-12, 1e-12)


def test_chains_on_points_are_flat():
    """onnxruntime is slow at arrays whose last axis has size one, with scalars."""
    weight = np.random.default_rng(1).standard_normal((64, 32, 1, 1)).astype(np.float32)

    def function(a, b):
        y = (a * b + 1) * jnp.tanh(a)
        return y, jnp.sqrt(jnp.abs(y))

    model = split_into_blocks(to_onnx(function, weight, np.float32(2)))
    onnx.checker.check_model(model, full_check=True)
    made = {v.name: len(v.type.tensor_type.shape.dim) for v in infer_shapes(model).graph.value_info}
    assert all(made[n.output[0]] == 1 for n in model.graph.node if n.op_type in ("Mul", "Tanh"))
    for one, other in zip(
        run(model, weight, np.float32(2)), function(weight, np.float32(2)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5)
