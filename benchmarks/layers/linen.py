"""The layers as Flax modules, images in NHWC: what one writes in Flax by hand."""

from flax import linen

from benchmarks.networks import Network


class Layers:
    def __init__(self, train: bool):
        self.train = train

    def conv(self, x, features, kernel, stride=1, pad=0, groups=1, bias=False):
        return linen.Conv(
            features,
            (kernel, kernel),
            stride,
            [(pad, pad)] * 2,
            feature_group_count=groups,
            use_bias=bias,
        )(x)

    def batch_norm(self, x):
        return linen.BatchNorm(not self.train, momentum=0.9)(x)

    def max_pool(self, x, kernel, stride, pad=0):
        pads = [(pad, pad)] * 2
        return linen.max_pool(x, (kernel,) * 2, (stride,) * 2, pads)  # type: ignore[arg-type]

    def relu(self, x):
        return linen.relu(x)

    def relu6(self, x):
        return linen.relu6(x)

    def gelu(self, x):
        return linen.gelu(x, approximate=False)

    def flatten(self, x):
        return x.reshape(len(x), -1)

    def spatial_mean(self, x):
        return x.mean((1, 2))

    def sequence(self, x):
        return x.reshape(len(x), -1, x.shape[-1])

    def sequence_mean(self, x):
        return x.mean(1)

    def dense(self, x, features):
        return linen.Dense(features)(x)

    def layer_norm(self, x):
        return linen.LayerNorm(epsilon=1e-5)(x)

    def embed(self, tokens, vocabulary, features):
        return linen.Embed(vocabulary, features)(tokens)

    def positions(self, x):
        return x + linen.Embed(*x.shape[1:]).embedding

    def attention(self, x, heads):
        return linen.MultiHeadDotProductAttention(heads)(x)

    def lstm(self, x, hidden):
        return linen.RNN(linen.OptimizedLSTMCell(hidden))(x)[:, -1]  # type: ignore[index]


class Net(linen.Module):
    network: Network

    @linen.compact
    def __call__(self, x, train: bool):
        return self.network.build(Layers(train), x)
