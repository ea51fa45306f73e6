"""Blocks of the zoo over sequences (N, 6, 8) that go step by step, and convolutions over them."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.oracles.zoo_blocks import LENGTH, Apply, Blocks, C

BLOCKS = Blocks()


@BLOCKS.add
def recurrent(draw):
    both = draw.random() < 0.5
    kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])
    layer = kind(
        C,
        C // (1 + both),
        draw.choice([1, 2]),
        bidirectional=both,
        batch_first=True,
        bias=draw.random() < 0.8,
    )
    return Apply(lambda m, x: m.layer(x)[0], layer=layer)


@BLOCKS.add
def recurrent_learned_start(draw):
    def run(m, x):
        return m.layer(x, m.start.expand(1, x.shape[0], C).contiguous())[0]

    return Apply(run, start=torch.zeros(1, 1, C), layer=nn.GRU(C, C, batch_first=True))


@BLOCKS.add
def recurrent_cell(draw):
    def run(m, x):
        h, all_h = torch.zeros_like(x[:, 0]), []
        for t in range(LENGTH):
            h = m.cell(x[:, t], h)
            all_h.append(h)
        return torch.stack(all_h, 1)

    return Apply(run, cell=nn.GRUCell(C, C))


@BLOCKS.add
def conformer(draw):
    return Apply(
        lambda m, x: x + m.body(m.norm(x).transpose(1, 2)).transpose(1, 2),
        norm=nn.LayerNorm(C),
        body=nn.Sequential(
            nn.Conv1d(C, 2 * C, 1),
            nn.GLU(1),
            nn.Conv1d(C, C, 3, 1, 1, groups=C),
            nn.SiLU(),
            nn.BatchNorm1d(C),
            nn.Conv1d(C, C, 1),
        ),
    )


@BLOCKS.add
def state_space(draw):
    """Mamba's scan, written out over the sequence."""

    def run(m, x):
        dt = F.softplus(m.dt(x))
        a, b, c = -torch.exp(m.A_log), *m.bc(x).chunk(2, -1)
        h, ys = torch.zeros_like(x[:, 0, :, None] * b[:, 0, None]), []
        for t in range(LENGTH):
            h = (
                torch.exp(dt[:, t, :, None] * a) * h
                + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
            )
            ys.append((h * c[:, t, None]).sum(-1))
        return torch.stack(ys, 1) + x * m.D

    return Apply(
        run,
        A_log=torch.log(torch.rand(C, 3) + 1),
        D=torch.ones(C),
        dt=nn.Linear(C, C),
        bc=nn.Linear(C, 6),
    )


@BLOCKS.add
def time_mix(draw):
    """RWKV's token shift."""

    def run(m, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        k = m.key(x * m.mix_k + before * (1 - m.mix_k))
        r = m.receptance(x * m.mix_r + before * (1 - m.mix_r))
        return torch.sigmoid(r) * torch.relu(k).square()

    shape = (1, 1, C)
    return Apply(
        run,
        mix_k=torch.rand(shape),
        mix_r=torch.rand(shape),
        key=nn.Linear(C, C, bias=False),
        receptance=nn.Linear(C, C, bias=False),
    )
