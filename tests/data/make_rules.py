"""Writes networks with buffers and parameters that only a rule of what is trained tells apart.

    python -m tests.data.make_rules

What is in them is what front ends for audio, policies and attention register as buffers; the rules
in `jaxonnx/_graph/rules.py` name the files. `rules/<network>.npz` holds what PyTorch trains and its
gradients, as in `zoo`. Needs torch and onnxscript.
"""

import math
import warnings
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracles.torch_zoo import export, golden, move

HERE = Path(__file__).parent / "rules"


class Pitch(nn.Module):
    """The mean cents over bins of pitch, as CREPE has it, of a spectrogram in mel bands."""

    def __init__(self):
        super().__init__()
        times, bins = torch.arange(64), torch.arange(33)
        angles = 2 * math.pi * bins[:, None] * times / 64
        edges = 700 * (10 ** (torch.linspace(0, 2800, 14) / 2595) - 1)
        hertz = torch.linspace(0, 8000, 33)
        rise = (hertz - edges[:-2, None]) / edges.diff()[:-1, None]
        fall = (edges[2:, None] - hertz) / edges.diff()[1:, None]
        self.register_buffer("taper", torch.hann_window(64))
        self.register_buffer("basis", torch.cat([angles.cos(), -angles.sin()]))
        self.register_buffer("bands", torch.minimum(rise, fall).clamp(min=0))
        self.register_buffer("cents", 1997.38 + 20 * torch.arange(36.0))
        self.emphasis = nn.Conv1d(1, 1, 3, padding=1)
        self.layer = nn.Linear(12, 36)

    def forward(self, x):
        parts = F.linear(self.emphasis(x) * self.taper, self.basis)
        heard = F.linear(parts[..., :33] ** 2 + parts[..., 33:] ** 2, self.bands)
        chances = self.layer(torch.log1p(heard)).softmax(-1)
        return (chances * self.cents).sum(-1) / 1000


class Scores(nn.Module):
    """Attention with biases of T5, ALiBi, ALiBi under a mask, and DeBERTa's normalized rows."""

    def __init__(self):
        super().__init__()
        places = torch.arange(6)
        distances = -(places[:, None] - places).abs() * torch.tensor([0.25, 0.0625])[:, None, None]
        future = torch.full((6, 6), -1e9).triu(1)
        self.register_buffer("alibi", distances[None])
        self.register_buffer("alibi_and_mask", (distances + future)[None])
        self.register_buffer("index", places[:, None] - places + 5)
        self.table = nn.Parameter(torch.randn(11, 2))
        self.relative = nn.Parameter(torch.randn(4, 8))
        self.gate = nn.Parameter(torch.randn(8))
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(2, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3)
        gathered = self.table[self.index.flatten()].view(6, 6, 2).permute(2, 0, 1)
        for bias in (self.alibi, self.alibi_and_mask, gathered):
            v = (scores + bias).softmax(-1) @ v
        y = v.transpose(1, 2).flatten(2) * self.gate.sigmoid()
        return y @ self.norm(self.relative).T


class Patches(nn.Module):
    """Blurred patches of an image behind a learned scale, and sinusoids as positions.

    The class token has a row of zeros among the positions, as in MAE.
    """

    def __init__(self):
        super().__init__()
        angles = torch.arange(9)[:, None] / 100 ** (torch.arange(4) / 4)
        places = torch.cat([angles.sin(), angles.cos()], 1)
        taps = torch.tensor([1.0, 2, 1])
        self.register_buffer("places", torch.cat([torch.zeros(1, 8), places])[None])
        self.register_buffer("taps", (taps[:, None] * taps / 16).repeat(8, 1, 1, 1))
        self.input = nn.Module()
        self.input.weight = nn.Parameter(torch.rand(1, 3, 1, 1) + 0.5)
        self.kernel = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        y = F.conv2d(self.kernel(x * self.input.weight), self.taps, padding=1, groups=8)
        y = torch.cat([self.token.expand(len(x), -1, -1), y.flatten(2).transpose(1, 2)], 1)
        return self.layer((y + self.places) * torch.tensor([1.0, 7, 2, 3, 0.5, 0.7, 4, 5]))


class Policy(nn.Module):
    """A policy that imitates a motion and shows it, for observations that it standardizes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("motion", torch.randn(7, 5))
        self.register_buffer("center", torch.randn(6))
        self.register_buffer("spread", torch.rand(6) + 0.5)
        self.register_buffer("action_scale", torch.tensor([0.5, 2.0, 1.5]))
        self.layer = nn.Linear(6, 3)

    def forward(self, x, time):
        y = self.layer(x * self.spread + self.center)
        return torch.tanh(y) * self.action_scale, self.motion[time]


class Features(nn.Module):
    """Random Fourier features, read by a GRU with a learned initial state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 3))
        self.start = nn.Parameter(torch.randn(1, 1, 4))
        self.gru = nn.GRU(6, 4, batch_first=True)

    def forward(self, x):
        angles = x @ self.frequencies
        waves = torch.cat([angles.sin(), angles.cos()], -1)
        return self.gru(waves, self.start.expand(-1, len(x), -1).contiguous())[0]


class Levels(nn.Module):
    """The boxes of YOLO: means of distributions over bins, times the strides of three maps.

    Of scores that waves are added to and that have temperatures, neither of which are learned.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(4, 64, 1)
        self.dfl = nn.Module()
        self.dfl.register_buffer("weight", torch.arange(16.0).view(1, 16, 1, 1))
        strides = torch.repeat_interleave(torch.tensor([8.0, 16, 32]), torch.tensor([64, 16, 4]))
        self.register_buffer("strides", strides[None])
        self.register_buffer("frequencies", 0.9 ** torch.arange(64.0))
        self.register_buffer("temperatures", 0.5 + 0.02 * torch.arange(64.0)[:, None])

    def forward(self, x):
        scores = self.layer(x) * self.temperatures
        waves = torch.sin(scores.mean(1)[..., None] * self.frequencies)
        bins = (scores + waves.transpose(1, 2)).unflatten(1, (4, 16)).transpose(1, 2)
        return F.conv2d(bins.softmax(1), self.dfl.weight)[:, 0] * self.strides / 100


class Norms(nn.Module):
    """Kernels of which one is divided by its spectral norm and one standardized (StdConv2d)."""

    def __init__(self):
        super().__init__()
        self.divided = nn.utils.spectral_norm(nn.Conv1d(2, 4, 3, padding=1))
        self.kernel = nn.Parameter(torch.randn(5, 4, 3))

    def forward(self, x):
        rows = self.kernel.reshape(1, 5, -1)
        rows = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6)
        return F.conv1d(self.divided(x).relu(), rows.reshape_as(self.kernel)).mean(2)


NETWORKS = {
    "pitch": (Pitch, (torch.randn(2, 1, 64),)),
    "scores": (Scores, (torch.randn(2, 6, 8),)),
    "patches": (Patches, (torch.randn(2, 3, 12, 12),)),
    "policy": (Policy, (torch.randn(2, 6), torch.tensor([1, 4]))),
    "levels": (Levels, (torch.randn(2, 4, 84),)),
    "features": (Features, (torch.randn(2, 5, 2),)),
    "norms": (Norms, (torch.randn(2, 2, 8),)),
}


def main() -> None:
    warnings.simplefilter("ignore")
    HERE.mkdir(exist_ok=True)
    for name, (network, inputs) in NETWORKS.items():
        torch.manual_seed(0)
        net = network().eval()
        move(net)
        file = onnx.ModelProto.FromString(export(net, inputs, "legacy", 17))
        for node in file.graph.node:
            del node.metadata_props[:]
            node.doc_string = ""
        onnx.save(file, HERE / f"{name}.onnx")
        golden(net, inputs, steps=False).save(HERE / f"{name}.npz")


if __name__ == "__main__":
    main()
