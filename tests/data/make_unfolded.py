"""Writes networks whose weights stand behind Slice, Concat, Split, Gather, Expand and the like.

    python tests/data/make_unfolded.py

PyTorch's older exporter without constant folding takes recurrent weights and `in_proj_weight`
apart in the graph. `unfolded.<network>.npz` holds `x`, `y` and the gradient of `(y * y).mean()`
by PyTorch as `grad:<name>`, for every parameter.
"""

import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

HERE = Path(__file__).parent


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(6, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.gru(self.lstm(x)[0])[0][:, -1])


class Attention(nn.Module):
    """A class token, crossed attention over it, and normalization over two axes."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.norm = nn.LayerNorm((5, 8))
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.experts = nn.Parameter(torch.randn(2, 8, 8) / 3)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.position
        tokens = self.norm(tokens)
        seen, _ = self.cross(tokens[:, :1], tokens, tokens)
        a, b = seen @ self.experts[0], seen @ self.experts[1].T
        return self.head((a + b)[:, 0])


def main() -> None:
    warnings.simplefilter("ignore")
    for network, x in ((Recurrent, torch.randn(3, 5, 4)), (Attention, torch.randn(3, 4, 8))):
        torch.manual_seed(0)
        net = network().eval()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.dim() == 1:  # no two that are equal
                    parameter.add_(0.1 * torch.randn_like(parameter))
        name = f"unfolded.{network.__name__.lower()}"
        path = HERE / f"{name}.onnx"
        torch.onnx.export(
            net,
            (x,),
            path,
            dynamo=False,
            opset_version=14,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
        )
        file = onnx.load(path)
        for node in file.graph.node:
            del node.metadata_props[:]
            node.doc_string = ""
        onnx.save(file, path)
        y = net(x)
        (y * y).mean().backward()
        arrays = {"x": x, "y": y}
        arrays |= {f"grad:{n}": p.grad for n, p in net.named_parameters()}
        np.savez(HERE / f"{name}.npz", **{n: v.detach().numpy() for n, v in arrays.items()})


if __name__ == "__main__":
    main()
