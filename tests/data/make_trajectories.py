"""Writes what twenty plain SGD steps do to two networks in PyTorch.

`<name>.sgd.npz` holds the examples (`x`: 48 images as bytes or token rows, `y`), visited in order
in batches of 16, the `losses` before each step, and the final value of every parameter and running
statistic as `end:<name>`. They start from `<name>.legacy.onnx`, whose names they have.
"""

from pathlib import Path

import networks
import numpy as np
import onnx
import torch
from make_exported import assign

HERE = Path(__file__).parent
RATE = {"lenet_bn": 0.2, "transformer": 0.1}

for name, rate in RATE.items():
    torch.backends.mha.set_fastpath_enabled(False)
    net = networks.network(name)
    start = {k: v.clone() for k, v in net.state_dict().items()}
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), rate)
    x, y = networks.inputs(name, 48, seed=7), networks.labels(48, seed=7)
    losses = []
    for step in range(20):
        batch = slice(step * 16 % 48, step * 16 % 48 + 16)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(name, [round(loss, 3) for loss in losses])

    end = {k: v.numpy().copy() for k, v in net.state_dict().items()}
    net.load_state_dict(start)
    parameters = {k: end[k] for k, _ in net.named_parameters()}
    found = assign(onnx.load(HERE / f"{name}.legacy.onnx"), net, parameters)
    found |= {k: v for k, v in end.items() if "running" in k}
    np.savez_compressed(
        HERE / f"{name}.sgd.npz",
        x=x.numpy() if name == "transformer" else np.round(x.numpy() * 255).astype(np.uint8),
        y=y.numpy(),
        rate=rate,
        losses=np.float32(losses),
        **{f"end:{k}": v for k, v in found.items()},
    )
