"""The layers as plain JAX in the layout of the ONNX file (NCHW), without jaxonnx's lowerings."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Naive:
    """Layers over the dictionaries `params` and `state`, which the first call fills."""

    def __init__(self, params: dict, state: dict, train: bool):
        self.params, self.state, self.train = params, state, train
        self.renewed, self.count = {}, 0
        self.random = np.random.default_rng(0)

    def weight(self, *shape, fan_in=None, fill=0.0, kind="params"):
        name, values = f"w{self.count}", getattr(self, kind)
        self.count += 1
        if name not in values:
            normal = self.random.normal(size=shape) * (fan_in or 1) ** -0.5
            values[name] = jnp.asarray(normal if fan_in else np.full(shape, fill), jnp.float32)
        return name, values[name]

    def conv(self, x, features, kernel, stride=1, pad=0, groups=1, bias=False):
        c = x.shape[1] // groups
        _, w = self.weight(features, c, kernel, kernel, fan_in=c * kernel**2)
        y = lax.conv_general_dilated(
            x, w, (stride,) * 2, [(pad, pad)] * 2, feature_group_count=groups
        )
        return y + self.weight(features)[1][:, None, None] if bias else y

    def batch_norm(self, x):
        c = x.shape[1]
        (_, scale), (_, shift) = self.weight(c, fill=1), self.weight(c)
        (first, mean), (second, var) = (self.weight(c, fill=i, kind="state") for i in (0, 1))
        if self.train:
            old, mean, var = (mean, var), x.mean((0, 2, 3)), x.var((0, 2, 3))
            self.renewed[first] = 0.9 * old[0] + 0.1 * mean
            self.renewed[second] = 0.9 * old[1] + 0.1 * var
        mean, var, scale, shift = (v[:, None, None] for v in (mean, var, scale, shift))
        return (x - mean) * lax.rsqrt(var + 1e-5) * scale + shift

    def max_pool(self, x, kernel, stride, pad=0):
        return lax.reduce_window(
            x,
            -np.inf,
            lax.max,
            (1, 1, kernel, kernel),
            (1, 1, stride, stride),
            [(0, 0)] * 2 + [(pad, pad)] * 2,
        )

    def relu(self, x):
        return jnp.maximum(x, 0)

    def relu6(self, x):
        return jnp.clip(x, 0, 6)

    def gelu(self, x):
        return 0.5 * x * (1 + lax.erf(x / 2**0.5))

    def flatten(self, x):
        return x.reshape(len(x), -1)

    def spatial_mean(self, x):
        return x.mean((2, 3))

    def sequence(self, x):
        return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)

    def sequence_mean(self, x):
        return x.mean(1)

    def dense(self, x, features):
        size = x.shape[-1]
        return x @ self.weight(size, features, fan_in=size)[1] + self.weight(features)[1]

    def layer_norm(self, x):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        size = x.shape[-1]
        standard = (x - mean) * lax.rsqrt(var + 1e-5)
        return standard * self.weight(size, fill=1)[1] + self.weight(size)[1]

    def embed(self, tokens, vocabulary, features):
        return self.weight(vocabulary, features, fan_in=features)[1][tokens]

    def positions(self, x):
        return x + self.weight(*x.shape[1:], fan_in=x.shape[2])[1]

    def attention(self, x, heads):
        n, length, size = x.shape
        parts = jnp.split(self.dense(x, 3 * size), 3, 2)
        q, k, v = (p.reshape(n, length, heads, -1).transpose(0, 2, 1, 3) for p in parts)
        weights = jax.nn.softmax(q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5)
        return self.dense((weights @ v).transpose(0, 2, 1, 3).reshape(x.shape), size)

    def lstm(self, x, hidden):
        n, _, size = x.shape
        _, w = self.weight(size, 4 * hidden, fan_in=hidden)
        _, r = self.weight(hidden, 4 * hidden, fan_in=hidden)
        bias = self.weight(4 * hidden)[1] + self.weight(4 * hidden)[1]

        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ w + h @ r + bias, 4, 1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((n, hidden))
        return lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))[0][0]
