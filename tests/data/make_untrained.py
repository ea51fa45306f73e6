"""Writes a network that was never trained, whose equal tensors PyTorch's current exporter merges.

    python tests/data/make_untrained.py

All scales and variances of `untrained.dynamo.onnx` are one initializer of ones, all shifts and
means one of zeros. `untrained.dynamo.npz` holds a batch (`x`, `y`), the learning rate `lr`, and,
after one step of SGD in PyTorch on the mean squared error, every parameter and running statistic
as `end:<name>`. The exporter drops biases of zeros that Conv and Gemm have: no layer has one here.
"""

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).parent


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.inorm = nn.InstanceNorm2d(4, affine=True)
        self.ln = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):  # a ReLU between, so that no normalization is folded into Conv
        x = self.bn2(torch.relu(self.conv(self.bn1(x))))
        x = torch.relu(self.inorm(x)) * torch.linspace(0.5, 1.5, 9).reshape(3, 3)
        return self.fc(self.ln(x.mean((2, 3))))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net, x, y = Network().eval(), torch.randn(8, 4, 5, 5), torch.randn(8, 4)
    path, batch = HERE / "untrained.dynamo.onnx", torch.export.Dim("batch")
    shapes = {"x": {0: batch}}
    program = torch.onnx.export(net, (x,), dynamo=True, dynamic_shapes=shapes)
    program.save(path)
    optimizer = torch.optim.SGD(net.train().parameters(), lr=0.5)
    ((net(x) - y) ** 2).mean().backward()
    optimizer.step()
    end = {f"end:{n}": v.detach() for n, v in net.state_dict().items() if v.dim()}
    # PyTorch divides by one less than the numbers of a channel, ONNX by all
    for norm, count in (("bn1", 8 * 25), ("bn2", 8 * 9)):
        var = end[f"end:{norm}.running_var"]
        var -= 0.9
        var *= (count - 1) / count
        var += 0.9
    np.savez_compressed(path.with_suffix(".npz"), x=x, y=y, lr=0.5, **end)


if __name__ == "__main__":
    main()
