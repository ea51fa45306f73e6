"""The layers as PyTorch modules."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.networks import Network


class Positions(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.table = nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)

    def forward(self, x):
        return x + self.table


class Attention(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.both, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x):
        n, length, size = x.shape
        parts = self.both(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0))
        return self.out(mixed.transpose(1, 2).reshape(n, length, size))


class LSTM(nn.LSTM):
    def forward(self, x):  # type: ignore[override]
        return super().forward(x)[1][0][0]


class Builder(nn.Module):
    """A module that makes its layers at the first call, which sees every shape."""

    def __init__(self, network: Network):
        super().__init__()
        self.network = network
        self.modules_in_order = nn.ModuleList()
        self.count = 0

    def forward(self, x):
        self.count = 0
        return self.network.build(self, x)

    def _layer(self, make, *arguments, **named):
        self.count += 1
        if self.count > len(self.modules_in_order):
            self.modules_in_order.append(make(*arguments, **named))
        return self.modules_in_order[self.count - 1]

    def conv(self, x, features, kernel, stride=1, pad=0, groups=1, bias=False):
        return self._layer(
            lambda: nn.Conv2d(x.shape[1], features, kernel, stride, pad, groups=groups, bias=bias)
        )(x)

    def batch_norm(self, x):
        return self._layer(lambda: nn.BatchNorm2d(x.shape[1]))(x)

    def max_pool(self, x, kernel, stride, pad=0):
        return self._layer(nn.MaxPool2d, kernel, stride, pad)(x)

    def relu(self, x):
        return self._layer(nn.ReLU, inplace=True)(x)

    def relu6(self, x):
        return self._layer(nn.ReLU6, inplace=True)(x)

    def gelu(self, x):
        return self._layer(nn.GELU)(x)

    def flatten(self, x):
        return self._layer(nn.Flatten)(x)

    def spatial_mean(self, x):
        return x.mean((2, 3))

    def sequence(self, x):
        return x.flatten(2).transpose(1, 2)

    def sequence_mean(self, x):
        return x.mean(1)

    def dense(self, x, features):
        return self._layer(lambda: nn.Linear(x.shape[-1], features))(x)

    def layer_norm(self, x):
        return self._layer(lambda: nn.LayerNorm(x.shape[-1]))(x)

    def embed(self, tokens, vocabulary, features):
        return self._layer(nn.Embedding, vocabulary, features)(tokens)

    def positions(self, x):
        return self._layer(lambda: Positions(*x.shape[1:]))(x)

    def attention(self, x, heads):
        return self._layer(lambda: Attention(x.shape[-1], heads))(x)

    def lstm(self, x, hidden):
        return self._layer(lambda: LSTM(x.shape[-1], hidden, batch_first=True))(x)


class Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Attention | Positions | LSTM) or super().is_leaf_module(
            m, module_qualified_name
        )


def build(network: Network, x: torch.Tensor) -> nn.Module:
    """Build a module without the builder around it, so that its calls cost what modules cost."""
    builder = Builder(network)
    builder(x)
    return torch.fx.GraphModule(builder, Tracer().trace(builder))
