"""Writes the network of `jaxonnx demo`: untrained, for the 8x8 digits of scikit-learn.

    python tests/data/make_digits.py

The widths are multiples of four, so that every layer but the first convolution (one input channel)
and the last (ten outputs) can be 2:4. The older exporter keeps BatchNormalization.
"""

from pathlib import Path

import torch
from make_exported import export_legacy
from torch import nn

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).eval()
    path = ROOT / "jaxonnx" / "assets" / "digits_cnn.onnx"
    export_legacy(net, torch.zeros(2, 1, 8, 8), path, opset=17)
