"""Writes what fifty steps of an optimizer do to a network in PyTorch.

    python tests/data/make_trajectories.py

`<name>.<optimizer>.npz` holds the examples (`x`, for images bytes to be divided by `scale`, and
`y`), visited in order, again and again, in batches of `batch`; the settings of the optimizer;
the `losses` before each step; and the final value of every parameter and running statistic as
`end:<name>`. A running variance comes with `count:<name>`, how many numbers of a channel a batch
has: PyTorch divides by one less. The runs start from the ONNX file, whose names they have:
`<name>.legacy.onnx` of make_exported.py, or `<name>.training.onnx`, which is written here, as a
user does who wants to train it (TrainingMode.TRAINING keeps BatchNormalization as it trains).
"""

import warnings
from pathlib import Path

import networks
import numpy as np
import onnx
import torch
from make_exported import assign
from onnx import numpy_helper
from sklearn.datasets import load_digits
from torch import nn

HERE = Path(__file__).parent
STEPS = 50
RUNS = [
    # network, the ending of its file, batch size, optimizer, its settings
    ("lenet_bn", "legacy", 16, "momentum", {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    ("digits", "training", 16, "momentum", {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}),
    ("digits", "training", 16, "adamw", {"lr": 2e-3, "weight_decay": 0.05}),
    # a bias of keys has no gradient but rounding noise, which a smaller eps would scale up
    ("transformer", "legacy", 16, "adamw", {"lr": 1e-3, "weight_decay": 0.05, "eps": 1e-6}),
]
OPTIMIZERS = {"momentum": torch.optim.SGD, "adamw": torch.optim.AdamW}


def digits_net() -> nn.Module:
    """Convolutions and a linear layer with normalization, for 8x8 digits; no two tensors are equal.

    No bias in front of a normalization: its gradient is rounding noise, which Adam scales up. No
    average pooling: in this network onnxruntime-training 1.19.2 gives a wrong gradient for it.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 32, bias=False),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        for _ in range(5):
            net(torch.rand(16, 1, 8, 8))
    return net


def export_training(net: nn.Module, x: torch.Tensor, path: Path) -> None:
    """The older exporter as one uses it to train on; the network takes over what the file holds.

    Tracing the network renews the running statistics, of which the file keeps some state between.
    """
    torch.onnx.export(
        net.train(),
        (x,),
        path,
        dynamo=False,
        opset_version=15,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=["x"],
        output_names=["logits"],
        dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}},
    )
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    statistics = {k: torch.tensor(found[k]) for k, _ in net.named_buffers() if "running" in k}
    net.load_state_dict(statistics, strict=False)


def examples(name: str) -> tuple[np.ndarray, torch.Tensor, int]:
    """Inputs as they are stored, labels, and what to divide the former by."""
    if name == "digits":
        images, labels = load_digits(return_X_y=True)
        return images[:800].astype(np.uint8).reshape(-1, 1, 8, 8), torch.tensor(labels[:800]), 16
    x, y = networks.inputs(name, 48, seed=7), networks.labels(48, seed=7)
    if name == "transformer":
        return x.numpy(), y, 1
    return np.round(x.numpy() * 255).astype(np.uint8), y, 255


def counts(net: nn.Module, x: torch.Tensor) -> dict[str, int]:
    """How many numbers of a channel each normalization sees in a batch."""
    found, hooks = {}, []
    for name, module in net.named_modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):

            def note(module, given, output, name=name):
                found[f"{name}.running_var"] = given[0].numel() // given[0].shape[1]

            hooks.append(module.register_forward_hook(note))
    with torch.no_grad():
        net.eval()(x)
    for hook in hooks:
        hook.remove()
    return found


def run(name: str, ending: str, size: int, optimizer: str, settings: dict[str, float]) -> None:
    stored, y, scale = examples(name)
    x = torch.tensor(stored.astype(np.float32) / scale if scale > 1 else stored)
    path = HERE / f"{name}.{ending}.onnx"
    net = digits_net() if name == "digits" else networks.network(name)
    if ending == "training":
        export_training(net, x[:2], path)
    start = {k: v.clone() for k, v in net.state_dict().items()}
    numbers = counts(net, x[:size])

    net.train()
    stepper = OPTIMIZERS[optimizer](net.parameters(), **settings)
    losses = []
    for step in range(STEPS):
        first = step * size % len(x)
        stepper.zero_grad()
        loss = nn.functional.cross_entropy(net(x[first : first + size]), y[first : first + size])
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    print(name, optimizer, [round(loss, 3) for loss in losses[::7]])

    end = {k: v.numpy().copy() for k, v in net.state_dict().items()}
    net.load_state_dict(start)
    parameters = {k: end[k] for k, _ in net.named_parameters()}
    found = assign(onnx.load(path), net, parameters)
    found |= {k: v for k, v in end.items() if "running" in k}
    np.savez_compressed(
        HERE / f"{name}.{optimizer}.npz",
        x=stored,
        y=y.numpy().astype(np.int32),
        scale=scale,
        batch=size,
        **settings,
        losses=np.float32(losses),
        **{f"count:{k}": v for k, v in numbers.items()},
        **{f"end:{k}": v for k, v in found.items()},
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.backends.mha.set_fastpath_enabled(False)
    for case in RUNS:
        run(*case)
