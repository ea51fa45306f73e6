"""Products of all forms that take adapters, and a small network to train them."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax

import jaxonnx

HEAD = '<ir_version: 9, opset_import: ["": 17]>'


DRAW = np.random.default_rng(0)


def parse(text, **weights):
    proto = onnx.parser.parse_model(HEAD + text)
    for name, value in weights.items():
        value = np.asarray(value, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


def normal(*shape):
    return DRAW.standard_normal(shape).astype(np.float32)


def dense(x, a, b):
    return x @ a.T @ b.T


def conv(x, a, b):
    """x through a convolution with A as its kernel, then one of 1x1 with B."""
    a, b = jnp.asarray(a), jnp.asarray(b)
    h = jax.lax.conv_general_dilated(x, a, (1, 1), "VALID")
    return jnp.einsum("nrhw,or->nohw", h, b)


def spread(x, a, b):
    """x through a transposed convolution with A, then one of 1x1 with B."""
    h = np.zeros((len(x), len(a), 4, 4), np.float32)
    for i, j in np.ndindex(2, 2):
        h[:, :, i : i + 3, j : j + 3] += np.einsum("nchw,rc->nrhw", x, a[:, :, i, j])
    return np.einsum("nrhw,or->nohw", h, b)


FORMS = {
    # graph, weight, input, what a LoRA layer of PyTorch adds: scale * B(A(x))
    "MatMul": ("y = MatMul(x, w)", (6, 5), (2, 6), dense),
    "MatMul, batch": ("y = MatMul(x, w)", (6, 5), (2, 4, 6), dense),
    "MatMul, left": (
        "y = MatMul(w, x)",
        (5, 6),
        (6, 2),
        lambda x, a, b: b @ (a @ x),
    ),
    "Gemm": ("y = Gemm(x, w)", (6, 5), (2, 6), dense),
    "Gemm, transB": ("y = Gemm <transB = 1> (x, w)", (5, 6), (2, 6), dense),
    "Gemm, alpha": (
        "y = Gemm <transB = 1, alpha = 0.5> (x, w)",
        (5, 6),
        (2, 6),
        lambda x, a, b: 0.5 * dense(x, a, b),
    ),
    "Transpose": ("t = Transpose(w) y = MatMul(x, t)", (5, 6), (2, 6), dense),
    "Identity": ("i = Identity(w) y = MatMul(x, i)", (6, 5), (2, 6), dense),
    "Conv": (
        "y = Conv(x, w)",
        (5, 4, 3, 3),
        (2, 4, 6, 6),
        lambda x, a, b: conv(x, a.reshape(-1, 4, 3, 3), b),
    ),
    "Conv, unsqueezed": (
        "a = Constant <value = int64[1] {-1}> () u = Unsqueeze(w, a) y = Conv(x, u)",
        (5, 4, 1),
        (2, 4, 6, 6),
        lambda x, a, b: conv(x, a.reshape(-1, 4, 1, 1), b),
    ),
    "Conv, groups": (
        "y = Conv <group = 2> (x, w)",
        (4, 3, 3, 3),
        (2, 6, 6, 6),
        lambda x, a, b: jnp.concatenate(
            [
                conv(x[:, 3 * g : 3 * g + 3], a.reshape(-1, 3, 3, 3), b[2 * g : 2 * g + 2])
                for g in (0, 1)
            ],
            axis=1,
        ),
    ),
    "ConvTranspose": (
        "y = ConvTranspose(x, w)",
        (4, 5, 2, 2),
        (2, 4, 3, 3),
        lambda x, a, b: spread(x, a.reshape(-1, 4, 2, 2), b),
    ),
    "Gather": (
        "i = Cast <to = 7> (x) y = Gather(w, i)",
        (7, 5),
        (4,),
        lambda x, a, b: a.T[x.astype(int)] @ b.T,
    ),
}


MLP = """
g (float[n,8] x) => (float[n,4] y) {
  h = Gemm(x, w1, b1) r = Relu(h) y = Gemm <transB = 1> (r, w2, b2)
}
"""


X = normal(64, 8)


Y = (X @ normal(8, 4)).argmax(1)


def mlp():
    draw = np.random.default_rng(1).standard_normal
    weights = {"w1": draw((8, 16)), "w2": draw((4, 16)), "b1": np.zeros(16), "b2": np.zeros(4)}
    return jaxonnx.load(parse(MLP, **weights))


LABELS = "softmax_cross_entropy_with_integer_labels"


def train(model, **settings):
    settings = {"optimizer": optax.adam(0.05), "epochs": 3, "batch_size": 16} | settings
    return jaxonnx.train(model, (X, Y), loss=LABELS, **settings)
