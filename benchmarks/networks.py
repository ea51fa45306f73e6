"""The networks of the benchmark, each written once over a vocabulary of layers.

`benchmarks.layers` has the vocabulary four times: as ONNX nodes, as Flax modules, as plain JAX in
NCHW and as PyTorch modules. Every system thus has the same network, written as one writes it there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


def mlp(layers, x):
    for features in (512, 512):
        x = layers.relu(layers.dense(x, features))
    return layers.dense(x, 10)


def lenet(layers, x):
    for features in (32, 64):
        x = layers.max_pool(layers.relu(layers.conv(x, features, 3, bias=True)), 2, 2)
    x = layers.relu(layers.dense(layers.flatten(x), 128))
    return layers.dense(x, 10)


def resnet18(layers, x):
    def normalized(x, features, kernel, stride=1):
        return layers.batch_norm(layers.conv(x, features, kernel, stride, kernel // 2))

    def block(x, features, stride, shortcut):
        y = layers.relu(normalized(x, features, 3, stride))
        y = normalized(y, features, 3)
        return layers.relu(y + (normalized(x, features, 1, stride) if shortcut else x))

    x = layers.max_pool(layers.relu(normalized(x, 64, 7, 2)), 3, 2, 1)
    for features, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        x = block(x, features, stride, stride > 1)
        x = block(x, features, 1, False)
    return layers.dense(layers.spatial_mean(x), 1000)


def resnet50(layers, x):
    def normalized(x, features, kernel, stride=1):
        return layers.batch_norm(layers.conv(x, features, kernel, stride, kernel // 2))

    def block(x, features, stride, shortcut):
        y = layers.relu(normalized(x, features, 1))
        y = layers.relu(normalized(y, features, 3, stride))
        y = normalized(y, 4 * features, 1)
        return layers.relu(y + (normalized(x, 4 * features, 1, stride) if shortcut else x))

    x = layers.max_pool(layers.relu(normalized(x, 64, 7, 2)), 3, 2, 1)
    for features, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            x = block(x, features, stride if i == 0 else 1, i == 0)
    return layers.dense(layers.spatial_mean(x), 1000)


def mobilenet_v2(layers, x):
    def normalized(x, features, kernel, stride=1, groups=1):
        return layers.batch_norm(
            layers.conv(x, features, kernel, stride, kernel // 2, groups=groups)
        )

    x = layers.relu6(normalized(x, 32, 3, 2))
    before = 32
    for expand, features, count, first in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for stride in (first, *[1] * (count - 1)):
            hidden = before * expand
            y = x if expand == 1 else layers.relu6(normalized(x, hidden, 1))
            y = layers.relu6(normalized(y, hidden, 3, stride, groups=hidden))
            y = normalized(y, features, 1)
            x = x + y if stride == 1 and before == features else y
            before = features
    x = layers.relu6(normalized(x, 1280, 1))
    return layers.dense(layers.spatial_mean(x), 1000)


def transformer(layers, x, depth, heads, size):
    for _ in range(depth):
        x = x + layers.attention(layers.layer_norm(x), heads)
        x = x + layers.dense(layers.gelu(layers.dense(layers.layer_norm(x), 4 * size)), size)
    return layers.sequence_mean(layers.layer_norm(x))


def encoder(layers, tokens):
    x = layers.positions(layers.embed(tokens, 1000, 256))
    return layers.dense(transformer(layers, x, 4, 4, 256), 10)


def vit_b16(layers, x):
    """Classify by ViT-B/16, with the mean of the patches in place of a class token."""
    x = layers.sequence(layers.conv(x, 768, 16, 16, bias=True))
    return layers.dense(transformer(layers, layers.positions(x), 12, 12, 768), 1000)


def lstm(layers, x):
    return layers.dense(layers.lstm(x, 256), 10)


@dataclass(frozen=True)
class Network:
    build: Callable[[Any, Any], Any]
    shape: tuple[int, ...]
    """The shape of a batch of inputs, images as NCHW."""
    classes: int
    tokens: int = 0
    """The size of the vocabulary where the inputs are tokens."""


NETWORKS = {
    "mlp": Network(mlp, (64, 784), 10),
    "lenet": Network(lenet, (64, 1, 28, 28), 10),
    "resnet18-64": Network(resnet18, (16, 3, 64, 64), 1000),
    "resnet18-224": Network(resnet18, (4, 3, 224, 224), 1000),
    "mobilenetv2": Network(mobilenet_v2, (16, 3, 64, 64), 1000),
    "encoder": Network(encoder, (8, 64), 10, tokens=1000),
    "lstm": Network(lstm, (32, 64, 128), 10),
}
"""Small networks."""

REAL = {
    "resnet50": Network(resnet50, (8, 3, 224, 224), 1000),
    "vit-b16": Network(vit_b16, (8, 3, 224, 224), 1000),
}
"""Networks of the sizes that people train."""


def batch(network: Network):
    """Return inputs and labels as NumPy arrays, always the same."""
    rng = np.random.default_rng(0)
    if network.tokens:
        x = rng.integers(0, network.tokens, network.shape).astype(np.int32)
    else:
        x = rng.normal(size=network.shape).astype(np.float32)
    return x, rng.integers(0, network.classes, network.shape[0]).astype(np.int32)
