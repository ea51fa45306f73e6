"""Blocks of the zoo over vectors (N, 8): layers, experts, ties, masks, standardization."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.oracles.zoo_blocks import Apply, Blocks, C, act

BLOCKS = Blocks()


@BLOCKS.add
def linear(draw):
    return nn.Sequential(nn.Linear(C, C, bias=draw.random() < 0.7), act(draw))


@BLOCKS.add
def fake_quantized(draw):
    """As quantization-aware training has it: weights by channel, inputs as a whole."""
    layer, scale = nn.Linear(C, C), torch.full((C,), 0.01)

    def run(m, x):
        zeros = torch.zeros(C, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(
            m.layer.weight, m.scale, zeros, 0, -128, 127
        )
        return F.linear(torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127), weight)

    return Apply(run, {"scale": scale}, layer=layer)


@BLOCKS.add
def perceptron(draw):
    return nn.Sequential(nn.Linear(C, 13), act(draw), nn.LayerNorm(13), nn.Linear(13, C))


@BLOCKS.add
def batch_norm_vector(draw):
    return nn.Sequential(nn.ReLU(), nn.BatchNorm1d(C, affine=draw.random() < 0.8))


@BLOCKS.add
def bilinear(draw):
    return Apply(lambda m, x: m.layer(x, x.flip(1)), layer=nn.Bilinear(C, C, C))


@BLOCKS.add
def spectral_norm(draw):
    return parametrizations.spectral_norm(nn.Linear(C, C))


@BLOCKS.add
def masked_linear(draw):
    """MADE: a buffer of ones and zeros on a weight."""
    mask = torch.tril(torch.ones(C, C), -draw.choice([0, 1]))
    return Apply(
        lambda m, x: F.linear(x, m.layer.weight * m.mask, m.layer.bias),
        {"mask": mask},
        layer=nn.Linear(C, C),
    )


@BLOCKS.add
def standardized(draw):
    mean, scale = torch.randn(C) * 0.2, torch.rand(C) + 0.5
    return Apply(
        lambda m, x: m.layer(((x - m.mean) / m.scale).clamp(-3, 3)),
        {"mean": mean, "scale": scale},
        layer=nn.Linear(C, C),
    )


@BLOCKS.add
def cosine_classifier(draw):
    def run(m, x):
        return F.linear(F.normalize(x, dim=-1), F.normalize(m.weight, dim=-1)) * m.scale.exp()

    return Apply(run, weight=torch.randn(C, C), scale=torch.tensor(1.0))


@BLOCKS.add
def prototypes(draw):
    return Apply(lambda m, x: -(x[:, None] - m.centers).pow(2).sum(-1), centers=torch.randn(C, C))


@BLOCKS.add
def radial_basis(draw):
    def run(m, x):
        d = (x[:, None] - m.centers[None]).pow(2).sum(-1)
        return torch.exp(-d * torch.exp(m.log_width)[None])

    return Apply(run, centers=torch.randn(C, C), log_width=torch.zeros(C))


@BLOCKS.add
def film(draw):
    def run(m, x):
        scale, shift = m.condition(x.tanh()).chunk(2, -1)
        return x * (1 + scale) + shift

    return Apply(run, condition=nn.Linear(C, 2 * C))


@BLOCKS.add
def fourier_features(draw):
    """Random frequencies, as a buffer: nothing in a file tells them from weights."""

    def run(m, x):
        p = 2 * math.pi * x @ m.frequencies
        return m.layer(torch.cat([p.sin(), p.cos()], -1))

    return Apply(run, {"frequencies": torch.randn(C, 5)}, layer=nn.Linear(10, C))


@BLOCKS.add
def experts(draw):
    def run(m, x):
        gates = m.gate(x).softmax(-1)
        h = F.gelu(torch.einsum("nc,ecd->ned", x, m.up))
        return torch.einsum("ned,edc,ne->nc", h, m.down, gates)

    return Apply(
        run, up=torch.randn(3, C, 5) * 0.3, down=torch.randn(3, 5, C) * 0.3, gate=nn.Linear(C, 3)
    )


@BLOCKS.add
def tied_transposed(draw):
    return Apply(
        lambda m, x: F.linear(torch.tanh(m.layer(x)), m.layer.weight.T), layer=nn.Linear(C, 5)
    )


@BLOCKS.add
def shared_twice(draw):
    layer = nn.Linear(C, C)
    return nn.Sequential(layer, act(draw), layer)


@BLOCKS.add
def low_rank(draw):
    return Apply(lambda m, x: x + (x @ m.a) @ m.b * 0.5, a=torch.randn(C, 2), b=torch.zeros(2, C))


@BLOCKS.add
def action(draw):
    scale, bias = torch.rand(C) + 0.5, torch.rand(C)
    return Apply(
        lambda m, x: torch.tanh(m.layer(x)) * m.action_scale + m.action_bias,
        {"action_scale": scale, "action_bias": bias},
        layer=nn.Linear(C, C),
    )


@BLOCKS.add
def mixed_vectors(draw):
    """Vectors that only meet each other before they meet data."""
    return Apply(
        lambda m, x: x * (m.a * m.b + 1) - m.c, a=torch.zeros(C), b=torch.ones(C), c=torch.zeros(C)
    )
