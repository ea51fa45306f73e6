"""Writes networks with unusual inputs, as PyTorch exports them, with losses of training.

    python tests/data/make_inputs.py

`inputs/pitch.onnx` takes audio and two numbers, `inputs/graph.onnx` nodes and edges of a graph, and
`inputs/one.onnx` one example without a batch. `inputs/<name>.npz` holds the data, the losses of
training by SGD with a rate of `RATE`, in the order of the data, and the parameters afterwards by
their names in the file (`after:<name>`); all are PyTorch's.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).parent / "inputs"
RATE = 0.05


class Pitch(nn.Module):
    """A tracker of pitch, whose range of frequencies is given with each call."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 4, 16, 8), nn.ReLU(), nn.Conv1d(4, 6, 4, 2))

    def forward(self, audio, fmin, fmax):
        scores = self.body(audio[:, None]).mean(2)
        grid = fmin * (fmax / fmin) ** torch.linspace(0, 1, 6)
        return (torch.softmax(scores, 1) * torch.log2(grid)).sum(1)


class Graph(nn.Module):
    """Two rounds of messages along edges, summed by index_add and scatter_add."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, nodes, edges):
        source, target = edges[0], edges[1]
        h = torch.relu(self.first(nodes))
        h = h + torch.zeros_like(h).index_add(0, target, h[source])
        m = self.second(h)[source]
        h = h + torch.zeros_like(h).scatter_add(0, target[:, None].expand(-1, 8), m)
        return self.out(torch.tanh(h))


class One(nn.Module):
    """A network of one picture, which it puts into a batch of its own."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3, 2), nn.Linear(4, 5)

    def forward(self, picture):
        return self.out(torch.relu(self.conv(picture[None])).mean((2, 3)))[0]


def train(net, batches, loss):
    """Return the losses of some steps of SGD."""
    optimizer, losses = torch.optim.SGD(net.parameters(), RATE), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        value = loss(net(*inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return np.float32(losses)


def write(name, net, inputs, names, batches, loss, data, **options):
    HERE.mkdir(exist_ok=True)
    path = HERE / f"{name}.onnx"
    torch.onnx.export(net, inputs, path, input_names=names, external_data=False, **options)
    losses = train(net, batches, loss)
    after = {f"after:{n}": p.detach().numpy() for n, p in net.named_parameters()}
    np.savez(HERE / f"{name}.npz", losses=losses, **data, **after)


def main():
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    audio, pitch = torch.randn(12, 256, generator=draw), 6 + torch.rand(12, generator=draw)
    fmin, fmax = torch.tensor(50.0), torch.tensor(800.0)
    batches = [((audio[i : i + 4], fmin, fmax), pitch[i : i + 4]) for i in (0, 4, 8)]
    dynamic = {"audio": {0: torch.export.Dim("batch")}, "fmin": None, "fmax": None}
    write(
        *("pitch", Pitch(), (audio[:2], fmin, fmax), ["audio", "fmin", "fmax"], batches),
        *(nn.MSELoss(), {"audio": audio.numpy(), "pitch": pitch.numpy()}),
        dynamic_shapes=dynamic,
    )
    graphs = []
    for nodes, edges in ((7, 12), (5, 9), (6, 4)):
        x = torch.randn(nodes, 3, generator=draw)
        e = torch.randint(nodes, (2, edges), generator=draw)
        graphs.append(((x, e), torch.randint(2, (nodes,), generator=draw)))
    data = {}
    for i, ((x, e), y) in enumerate(graphs):
        data |= {f"nodes{i}": x.numpy(), f"edges{i}": e.numpy(), f"y{i}": y.numpy()}
    dynamic = {"nodes": {0: torch.export.Dim("n")}, "edges": {1: torch.export.Dim("e")}}
    write(
        *("graph", Graph(), graphs[0][0], ["nodes", "edges"], graphs, nn.CrossEntropyLoss(), data),
        dynamic_shapes=dynamic,
    )
    pictures, labels = torch.randn(12, 3, 9, 9, generator=draw), torch.arange(12) % 5
    one = One()

    def each(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = one

        def forward(self, x):
            return torch.stack([self.one(picture) for picture in x])

    HERE.mkdir(exist_ok=True)
    path = HERE / "one.onnx"
    torch.onnx.export(one, (pictures[0],), path, input_names=["picture"], external_data=False)
    batches = [((pictures[i : i + 4],), labels[i : i + 4]) for i in (0, 4, 8)]
    losses = train(Mapped(), batches, each)
    after = {f"after:{n}": p.detach().numpy() for n, p in one.named_parameters()}
    data = {"picture": pictures.numpy(), "label": labels.numpy()}
    np.savez(HERE / "one.npz", losses=losses, **data, **after)


if __name__ == "__main__":
    main()
