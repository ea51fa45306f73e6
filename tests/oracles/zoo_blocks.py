"""Blocks of the zoo's random networks, in PyTorch: each keeps the shape of what it gets. Images.

A block is a function of a `random.Random` that returns a module. Images are (N, 8, 8, 8), sequences
(N, 6, 8), vectors (N, 8); numbers from `draw` make each block another one.
"""

import math
from collections.abc import Callable
from random import Random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

C, SIDE, LENGTH = 8, 8, 6
"""Channels, height and width of images, length of sequences."""
Make = Callable[[Random], nn.Module]


class Blocks(dict[str, Make]):
    """Blocks by name."""

    def add(self, make: Make) -> Make:
        self[make.__name__] = make
        return make


BLOCKS = Blocks()


class Apply(nn.Module):
    """A function of the module itself, its parameters and buffers by name, and the input."""

    def __init__(self, function: Callable, buffers: dict | None = None, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                setattr(self, name, nn.Parameter(part))
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.function(self, x)


def act(draw: Random) -> nn.Module:
    kinds = [nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Mish, nn.ELU, nn.Tanh, nn.Sigmoid]
    return draw.choice([*kinds, nn.LeakyReLU, nn.Softplus, lambda: nn.GELU("tanh")])()


@BLOCKS.add
def conv(draw):
    k, d = draw.choice([1, 3, 5]), draw.choice([1, 2])
    groups, bias = draw.choice([1, 2, 4, 8]), draw.random() < 0.6
    mode = draw.choice(["zeros", "zeros", "reflect", "replicate", "circular"])
    layer = nn.Conv2d(C, C, k, 1, k // 2 * d, d, groups, bias, padding_mode=mode)
    return nn.Sequential(layer, act(draw))


@BLOCKS.add
def conv_transposed(draw):
    groups = draw.choice([1, 2, 8])
    return nn.Sequential(
        nn.MaxPool2d(2), nn.ConvTranspose2d(C, C, 4, 2, 1, groups=groups, bias=draw.random() < 0.5)
    )


@BLOCKS.add
def conv_1d(draw):
    layer = nn.Conv1d(C, C, 3, 1, 1, groups=draw.choice([1, 2, 8]))
    return Apply(lambda m, x: m.layer(x.flatten(2)).view_as(x), layer=layer)


@BLOCKS.add
def conv_3d(draw):
    layer = nn.Conv3d(1, 1, (3, 3, 1), 1, (1, 1, 0))
    return Apply(lambda m, x: m.layer(x[:, None])[:, 0], layer=layer)


@BLOCKS.add
def separable(draw):
    return nn.Sequential(
        nn.Conv2d(C, C, (1, 3), 1, (0, 1)), act(draw), nn.Conv2d(C, C, (3, 1), 1, (1, 0))
    )


@BLOCKS.add
def weight_norm(draw):
    return parametrizations.weight_norm(nn.Conv2d(C, C, 3, 1, 1))


@BLOCKS.add
def weight_standardized(draw):
    def run(m, x):
        w = m.layer.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, m.layer.bias, padding=1)

    return Apply(run, layer=nn.Conv2d(C, C, 3, 1, 1))


@BLOCKS.add
def batch_norm(draw):
    return nn.Sequential(nn.ReLU(), nn.BatchNorm2d(C, affine=draw.random() < 0.8))


@BLOCKS.add
def group_norm(draw):
    return nn.GroupNorm(draw.choice([1, 2, 4, 8]), C, affine=draw.random() < 0.8)


@BLOCKS.add
def instance_norm(draw):
    return nn.InstanceNorm2d(C, affine=draw.random() < 0.8)


@BLOCKS.add
def layer_norm_image(draw):
    shape = draw.choice([(C, SIDE, SIDE), (SIDE, SIDE), (SIDE,)])
    return nn.LayerNorm(shape, elementwise_affine=draw.random() < 0.8)


@BLOCKS.add
def layer_norm_channels(draw):
    """ConvNeXt's, by permuting or spelled out."""

    def spelled(m, x):
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-6)
        return m.weight[:, None, None] * x + m.bias[:, None, None]

    if draw.random() < 0.5:
        return Apply(spelled, weight=torch.ones(C), bias=torch.zeros(C))
    return Apply(
        lambda m, x: m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.LayerNorm(C)
    )


@BLOCKS.add
def response_norm(draw):
    """ConvNeXt V2's GRN, channels last."""

    def run(m, x):
        x = x.permute(0, 2, 3, 1)
        g = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        x = m.gamma * (x * (g / (g.mean(-1, keepdim=True) + 1e-6))) + m.beta + x
        return x.permute(0, 3, 1, 2)

    return Apply(run, gamma=torch.zeros(1, 1, 1, C), beta=torch.zeros(1, 1, 1, C))


@BLOCKS.add
def filter_response_norm(draw):
    def run(m, x):
        x = x * torch.rsqrt(x.pow(2).mean((2, 3), keepdim=True) + 1e-6)
        return torch.maximum(m.gamma * x + m.beta, m.tau)

    shape = (1, C, 1, 1)
    return Apply(run, gamma=torch.ones(shape), beta=torch.zeros(shape), tau=torch.zeros(shape))


@BLOCKS.add
def squeeze_excite(draw):
    gate = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(C, 4, 1), act(draw), nn.Conv2d(4, C, 1), nn.Sigmoid()
    )
    return Apply(lambda m, x: x * m.gate(x), gate=gate)


@BLOCKS.add
def efficient_channel_attention(draw):
    def run(m, x):
        y = m.conv(x.mean((2, 3))[:, None])[:, 0]
        return x * y.sigmoid()[..., None, None]

    return Apply(run, conv=nn.Conv1d(1, 1, 3, padding=1, bias=False))


@BLOCKS.add
def spatial_gate(draw):
    def run(m, x):
        return x * torch.sigmoid(m.conv(torch.cat([x.mean(1, True), x.amax(1, True)], 1)))

    return Apply(run, conv=nn.Conv2d(2, 1, 7, padding=3, bias=False))


@BLOCKS.add
def layer_scale(draw):
    shape = draw.choice([(C, 1, 1), (1, C, 1, 1)])
    return Apply(
        lambda m, x: x + m.gamma * m.layer(x), gamma=torch.ones(shape), layer=nn.Conv2d(C, C, 1)
    )


@BLOCKS.add
def prelu(draw):
    return nn.PReLU(draw.choice([1, C]))


@BLOCKS.add
def frequency_prelu(draw):
    def run(m, x):
        return torch.where(x > 0, x, m.slope * x)

    return Apply(run, slope=torch.full(draw.choice([(1, C, 1, SIDE), (C, 1, 1)]), 0.25))


@BLOCKS.add
def gate_parameter(draw):
    shape = draw.choice([(1, C, 1, 1), (C, 1, 1), (1, 1, SIDE, SIDE)])
    return Apply(
        lambda m, x: x * torch.sigmoid(m.gate) + m.layer(x),
        gate=torch.zeros(shape),
        layer=nn.Conv2d(C, C, 1),
    )


@BLOCKS.add
def blur(draw):
    """An anti-aliasing filter, as a buffer, behind a learned layer."""
    taps = torch.tensor([1.0, 2.0, 1.0])
    kernel = (taps[:, None] * taps / taps.sum() ** 2).repeat(C, 1, 1, 1)
    return Apply(
        lambda m, x: F.conv2d(m.layer(x), m.kernel, padding=1, groups=C),
        {"kernel": kernel},
        layer=nn.Conv2d(C, C, 1),
    )


@BLOCKS.add
def sobel(draw):
    kernel = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
    kernels = torch.stack([kernel, kernel.T])[:, None]
    return Apply(
        lambda m, x: x + m.layer(F.conv2d(x.mean(1, True), m.kernels, padding=1)),
        {"kernels": kernels},
        layer=nn.Conv2d(2, C, 1),
    )


@BLOCKS.add
def image_mean(draw):
    shape = draw.choice([(1, C, 1, 1), (C, 1, 1)])
    mean, std = torch.rand(shape) * 0.3 + 0.3, torch.rand(shape) * 0.1 + 0.2
    return Apply(
        lambda m, x: m.layer((x - m.mean) / m.std),
        {"mean": mean, "std": std},
        layer=nn.Conv2d(C, C, 1),
    )


@BLOCKS.add
def position_image(draw):
    return Apply(
        lambda m, x: m.layer(x) + m.position,
        position=torch.zeros(1, C, SIDE, SIDE),
        layer=nn.Conv2d(C, C, 1),
    )


@BLOCKS.add
def window_attention(draw):
    """Swin's: the bias is gathered from a table by a buffer of indices."""
    heads, side = 2, 4
    place = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"))
    place = place.flatten(1)
    apart = (place[:, :, None] - place[:, None]) + side - 1
    index = apart[0] * (2 * side - 1) + apart[1]

    def run(m, x):
        n = x.shape[0]
        w = x.view(n, C, 2, side, 2, side).permute(0, 2, 4, 3, 5, 1).reshape(-1, side * side, C)
        q, k, v = m.qkv(w).reshape(-1, side * side, 3, heads, C // heads).permute(2, 0, 3, 1, 4)
        bias = m.table[m.index.view(-1)].view(side * side, side * side, heads).permute(2, 0, 1)
        a = ((q * (C // heads) ** -0.5) @ k.transpose(-2, -1) + bias).softmax(-1)
        w = m.out((a @ v).transpose(1, 2).reshape(-1, side * side, C))
        return w.view(n, 2, 2, side, side, C).permute(0, 5, 1, 3, 2, 4).reshape(n, C, SIDE, SIDE)

    table = torch.zeros((2 * side - 1) ** 2, heads)
    return Apply(run, {"index": index}, table=table, qkv=nn.Linear(C, 3 * C), out=nn.Linear(C, C))


@BLOCKS.add
def mixer(draw):
    return Apply(
        lambda m, x: x + m.tokens(m.norm(x.flatten(2))).view_as(x),
        norm=nn.LayerNorm(SIDE * SIDE),
        tokens=nn.Sequential(nn.Linear(SIDE * SIDE, 5), act(draw), nn.Linear(5, SIDE * SIDE)),
    )


@BLOCKS.add
def residual(draw):
    body = nn.Sequential(conv(draw), nn.GroupNorm(2, C), act(draw), conv(draw))
    return Apply(lambda m, x: x + m.body(x), body=body)


@BLOCKS.add
def shuffled(draw):
    return nn.Sequential(
        nn.PixelUnshuffle(2), nn.Conv2d(4 * C, 4 * C, 1, groups=4), nn.PixelShuffle(2)
    )


@BLOCKS.add
def unet(draw):
    mode = draw.choice(["nearest", "bilinear"])
    return Apply(
        lambda m, x: m.merge(torch.cat([x, m.up(m.down(x))], 1)),
        down=nn.Conv2d(C, C, 3, 2, 1),
        up=nn.Upsample(scale_factor=2, mode=mode),
        merge=nn.Conv2d(2 * C, C, 1),
    )


@BLOCKS.add
def dynamic_conv(draw):
    """Weights that a gate mixes from several kernels."""

    def run(m, x):
        mix = m.gate(x.mean((0, 2, 3))).softmax(-1)
        return F.conv2d(x, (mix[:, None, None, None, None] * m.kernels).sum(0), padding=1)

    return Apply(run, kernels=torch.randn(3, C, C, 3, 3) * 0.1, gate=nn.Linear(C, 3))


@BLOCKS.add
def fourier_filter(draw):
    """A filter bank over the width, as a buffer: a cosine basis, and a learned mask on it."""
    n = torch.arange(SIDE)
    basis = torch.cos(math.pi / SIDE * (n + 0.5) * n[:, None]) * math.sqrt(2 / SIDE)
    return Apply(
        lambda m, x: ((m.layer(x) @ m.basis.T) * m.mask) @ m.basis,
        {"basis": basis},
        mask=torch.ones(1, C, 1, SIDE),
        layer=nn.Conv2d(C, C, 1),
    )
