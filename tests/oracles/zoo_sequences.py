"""Blocks of the zoo over sequences (N, 6, 8): attention, positions, masks, spectra."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.oracles.zoo_blocks import LENGTH, Apply, Blocks, C, act

HEADS = 2
SIZE = C // HEADS


BLOCKS = Blocks()


def split_heads(x):
    return x.view(x.shape[0], LENGTH, HEADS, SIZE).transpose(1, 2)


def merge_heads(x):
    return x.transpose(1, 2).reshape(x.shape[0], LENGTH, C)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


@BLOCKS.add
def linear_sequence(draw):
    return nn.Sequential(nn.Linear(C, C, bias=draw.random() < 0.7), act(draw))


@BLOCKS.add
def multihead(draw):
    layer = nn.MultiheadAttention(
        C, HEADS, batch_first=True, bias=draw.random() < 0.7, add_bias_kv=draw.random() < 0.2
    )
    return Apply(lambda m, x: m.layer(x, x, x, need_weights=False)[0], layer=layer)


@BLOCKS.add
def encoder_layer(draw):
    return nn.TransformerEncoderLayer(
        C,
        HEADS,
        11,
        0.0,
        draw.choice(["relu", "gelu"]),
        batch_first=True,
        norm_first=draw.random() < 0.5,
    )


@BLOCKS.add
def masked_attention(draw):
    """Causal, with the mask as a buffer in one of its spellings."""
    low = draw.choice([-math.inf, torch.finfo(torch.float32).min, -1e4])
    keep = torch.tril(torch.ones(LENGTH, LENGTH))
    spelling = draw.choice(["add", "where", "sdpa", "causal", "one minus"])
    added = torch.zeros(LENGTH, LENGTH).masked_fill(keep == 0, low)

    def run(m, x):
        q, k, v = (split_heads(y) for y in m.qkv(x).chunk(3, -1))
        if spelling == "sdpa":
            return m.out(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=m.mask)))
        if spelling == "causal":
            return m.out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        s = q @ k.transpose(-1, -2) / math.sqrt(SIZE)
        if spelling == "add":
            s = s + m.mask
        elif spelling == "where":
            s = torch.where(m.mask > 0, s, low)
        else:
            s = s + (1.0 - m.mask) * -1e4
        return m.out(merge_heads(s.softmax(-1) @ v))

    mask = keep if spelling in ("where", "one minus") else added
    return Apply(run, {"mask": mask}, qkv=nn.Linear(C, 3 * C), out=nn.Linear(C, C))


@BLOCKS.add
def rotary(draw):
    """Frequencies as a buffer, or cosines and sines as buffers, cut or gathered."""
    inv_freq = 1.0 / 10000 ** (torch.arange(0, SIZE, 2) / SIZE)
    angle = torch.arange(32)[:, None] * inv_freq
    angle = torch.cat([angle, angle], -1)
    how = draw.choice(["frequencies", "cut", "gathered"])
    norms = draw.random() < 0.3

    def run(m, x):
        q, k, v = (split_heads(y) for y in (m.q(x), m.k(x), m.v(x)))
        if norms:
            q, k = m.q_norm(q), m.k_norm(k)
        place = torch.arange(LENGTH)
        if how == "frequencies":
            a = place[:, None].float() * m.inv_freq[None]
            a = torch.cat([a, a], -1)
            cos, sin = a.cos(), a.sin()
        elif how == "cut":
            cos, sin = m.cos_cached[: x.shape[1]], m.sin_cached[: x.shape[1]]
        else:
            cos, sin = m.cos_cached[place], m.sin_cached[place]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return m.o(merge_heads((q @ k.transpose(-1, -2) * SIZE**-0.5).softmax(-1) @ v))

    buffers = {"inv_freq": inv_freq}
    if how != "frequencies":
        buffers = {"cos_cached": angle.cos(), "sin_cached": angle.sin()}
    parts = {n: nn.Linear(C, C, bias=False) for n in "qkvo"}
    if norms:
        parts |= {"q_norm": RMSNorm(SIZE), "k_norm": RMSNorm(SIZE)}
    return Apply(run, buffers, **parts)


class RMSNorm(nn.Module):
    """Spelled out, as Llama has it; Gemma adds one to the weight."""

    def __init__(self, size: int, one: bool = False):
        super().__init__()
        self.one = one
        self.weight = nn.Parameter(torch.zeros(size) if one else torch.ones(size))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * (1.0 + self.weight) if self.one else self.weight * x


@BLOCKS.add
def rms_norm(draw):
    return draw.choice([lambda: RMSNorm(C), lambda: RMSNorm(C, True), lambda: nn.RMSNorm(C)])()


@BLOCKS.add
def layer_norm(draw):
    return nn.LayerNorm(draw.choice([(C,), (LENGTH, C)]), elementwise_affine=draw.random() < 0.8)


@BLOCKS.add
def position_learned(draw):
    shape = draw.choice([(1, LENGTH, C), (LENGTH, C), (1, 20, C)])
    return Apply(
        lambda m, x: m.layer(x) + (m.position[:, :LENGTH] if shape[-2] == 20 else m.position),
        position=torch.zeros(shape),
        layer=nn.Linear(C, C),
    )


@BLOCKS.add
def position_embedding(draw):
    return Apply(lambda m, x: x + m.table(torch.arange(LENGTH)), table=nn.Embedding(16, C))


@BLOCKS.add
def sinusoids(draw):
    angle = torch.arange(64)[:, None] / 10000 ** (torch.arange(0, C, 2) / C)
    table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    return Apply(
        lambda m, x: m.layer(x) + m.pe[:, : x.shape[1]], {"pe": table[None]}, layer=nn.Linear(C, C)
    )


@BLOCKS.add
def slopes(draw):
    """ALiBi."""
    slope = 2.0 ** -(8 * torch.arange(1, HEADS + 1) / HEADS)
    apart = (torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]).float()

    def run(m, x):
        q, k, v = (split_heads(y) for y in m.qkv(x).chunk(3, -1))
        s = q @ k.transpose(-1, -2) + m.slopes[:, None, None] * m.apart
        return merge_heads(s.softmax(-1) @ v)

    return Apply(run, {"slopes": slope, "apart": -apart.abs()}, qkv=nn.Linear(C, 3 * C))


@BLOCKS.add
def relative_bias(draw):
    """T5's buckets."""
    place = torch.arange(LENGTH)
    bucket = (place[None] - place[:, None]).clamp(-4, 4) + 4

    def run(m, x):
        q, k, v = (split_heads(y) for y in m.qkv(x).chunk(3, -1))
        s = q @ k.transpose(-1, -2) + m.table(m.bucket).permute(2, 0, 1)[None]
        return merge_heads(s.softmax(-1) @ v)

    return Apply(run, {"bucket": bucket}, qkv=nn.Linear(C, 3 * C), table=nn.Embedding(9, HEADS))


@BLOCKS.add
def head_parameters(draw):
    """Biases and factors that are split over heads: deBERTa's, Swin V2's, talking heads."""

    def run(m, x):
        q, k, v = (split_heads(y) for y in m.qkv(x).chunk(3, -1))
        q, v = q + m.q_bias, v + m.v_bias
        s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
        s = torch.einsum("nhij,hg->ngij", s * m.scale.exp(), m.talk)
        return merge_heads(s.softmax(-1) @ v)

    shape = (1, HEADS, 1, SIZE)
    return Apply(
        run,
        q_bias=torch.zeros(shape),
        v_bias=torch.zeros(shape),
        scale=torch.zeros(HEADS, 1, 1),
        talk=torch.eye(HEADS),
        qkv=nn.Linear(C, 3 * C, bias=False),
    )


@BLOCKS.add
def class_token(draw):
    count = draw.choice([1, 2])

    def run(m, x):
        x = torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1)
        return m.layer(x)[:, :LENGTH]

    return Apply(
        run,
        token=torch.zeros(1, count, C),
        layer=nn.TransformerEncoderLayer(C, 2, 8, 0.0, batch_first=True),
    )


@BLOCKS.add
def learned_queries(draw):
    def run(m, x):
        return m.layer(m.queries.expand(x.shape[0], -1, -1), x, x, need_weights=False)[0]

    return Apply(
        run,
        queries=torch.randn(1, LENGTH, C),
        layer=nn.MultiheadAttention(C, HEADS, batch_first=True),
    )


@BLOCKS.add
def gated(draw):
    def run(m, x):
        return m.down(F.silu(m.gate(x)) * m.up(x))

    return Apply(
        run,
        gate=nn.Linear(C, 12, bias=False),
        up=nn.Linear(C, 12, bias=False),
        down=nn.Linear(12, C, bias=False),
    )


@BLOCKS.add
def windowed_spectrum(draw):
    """A windowed Fourier transform of features by products with buffers."""
    size = 32
    n = torch.arange(size)
    angle = 2 * math.pi * n * torch.arange(size // 2 + 1)[:, None] / size
    window = torch.hann_window(size)
    how = draw.choice(["one", "apart"])

    def run(m, x):
        x = m.layer(x)
        if how == "one":
            re, im = x @ (m.cos * m.window).T, x @ (m.sin * m.window).T
        else:
            x = x * m.window
            re, im = x @ m.cos.T, x @ m.sin.T
        return m.out(torch.log1p(re.square() + im.square()))

    buffers = {"window": window, "cos": angle.cos(), "sin": angle.sin()}
    return Apply(run, buffers, layer=nn.Linear(C, size), out=nn.Linear(size // 2 + 1, C))


@BLOCKS.add
def residual_sequence(draw):
    body = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 12), act(draw), nn.Linear(12, C))
    if draw.random() < 0.3:
        return Apply(lambda m, x: x + m.alpha * m.body(x), alpha=torch.tensor(0.1), body=body)
    if draw.random() < 0.5:
        return Apply(lambda m, x: x + m.gamma * m.body(x), gamma=torch.full((C,), 0.1), body=body)
    return Apply(lambda m, x: x + m.body(x), body=body)


@BLOCKS.add
def shared_layers(draw):
    """ALBERT's."""
    layer = nn.TransformerEncoderLayer(C, HEADS, 9, 0.0, batch_first=True)
    return nn.Sequential(layer, layer)


@BLOCKS.add
def quantizer(draw):
    """A codebook that is mixed softly."""

    def run(m, x):
        distance = torch.cdist(x, m.codes.expand(x.shape[0], -1, -1))
        return (-distance).softmax(-1) @ m.codes

    return Apply(run, codes=torch.randn(5, C))


@BLOCKS.add
def memory(draw):
    """Learned keys and values beside those of the sequence."""

    def run(m, x):
        q, k, v = m.qkv(x).chunk(3, -1)
        k = torch.cat([m.keys.expand(x.shape[0], -1, -1), k], 1)
        v = torch.cat([m.values.expand(x.shape[0], -1, -1), v], 1)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v

    return Apply(
        run, keys=torch.randn(1, 2, C), values=torch.randn(1, 2, C), qkv=nn.Linear(C, 3 * C)
    )
