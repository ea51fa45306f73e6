"""Writes every network of networks.py through both of PyTorch's exporters, with goldens.

    python tests/data/make_exported.py [name ...]

`<name>.<exporter>.onnx` is the model; `<name>.<exporter>.npz` holds `x`, `y`, `logits`, the mean
softmax cross-entropy `loss`, and the gradient of that loss with respect to every trainable tensor
as `grad:<name>`, where the name is the one in the file: of the initializer, of the output of an
Identity over an initializer, or of the output of a Constant. The gradients are PyTorch's, taken in
the network that the file holds: an exporter that folded BatchNormalization into a convolution
wrote a network without BatchNormalization, so it is folded in PyTorch as well.
"""

import argparse
import itertools
import logging
import warnings
from pathlib import Path

import networks
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

HERE = Path(__file__).parent
OPSET = {"lenet": 9, "lenet_bn": 15, "resnet18": 11, "mobilenet": 13, "transformer": 17, "lstm": 14}


FIXED = [
    ("lenet", "dynamo", 1),
    ("lstm", "dynamo", 2),
    ("lstm", "legacy", 2),
    ("transformer", "dynamo", 1),
    ("transformer", "legacy", 2),
]


def export_legacy(net: nn.Module, x: torch.Tensor, path: Path, opset: int) -> None:
    """The TorchScript exporter; keeps BatchNormalization, in evaluation mode."""
    torch.onnx.export(
        net,
        (x,),
        path,
        dynamo=False,
        opset_version=opset,
        training=torch.onnx.TrainingMode.PRESERVE,
        input_names=["x"],
        output_names=["logits"],
        dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}},
    )


def export_dynamo(net: nn.Module, x: torch.Tensor, path: Path) -> None:
    """The current exporter; folds BatchNormalization into the convolution before it."""
    program = torch.onnx.export(
        net,
        (x,),
        dynamo=True,
        input_names=["x"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    model = program.model_proto
    for node in model.graph.node:  # the exporting machine's file names
        kept = [p for p in node.metadata_props if "stack_trace" not in p.key]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(model, path)


def fold(net: nn.Module) -> nn.Module:
    """Folds each BatchNorm2d into the Conv2d registered just before it, in place."""
    for module in list(net.modules()):
        children = list(module.named_children())
        for (a, conv), (b, norm) in itertools.pairwise(children):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, a, fuse_conv_bn_eval(conv, norm))
                setattr(module, b, nn.Identity())
    return net.requires_grad_(True)


def tensors(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Initializers, constants, and Identities over them, by the name that jaxonnx uses."""
    found = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        elif node.op_type == "Identity" and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    return found


def gates(tensor: np.ndarray) -> np.ndarray:
    """Rows from PyTorch's gate order (input, forget, cell, output) to ONNX's (i, o, f, c)."""
    i, f, c, o = np.split(tensor, 4)
    return np.concatenate([i, o, f, c])


def recurrent(of: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The W, R and B that ONNX makes of the parameters of one nn.LSTM layer."""
    ends = [end for end in ("", "_reverse") if f"{prefix}.weight_ih_l0{end}" in of]

    def stacked(*kinds):
        return np.stack(
            [np.concatenate([gates(of[f"{prefix}.{k}_l0{end}"]) for k in kinds]) for end in ends]
        )

    return {
        f"{prefix}.W": stacked("weight_ih"),
        f"{prefix}.R": stacked("weight_hh"),
        f"{prefix}.B": stacked("bias_ih", "bias_hh"),
    }


def assign(model: onnx.ModelProto, net: nn.Module, gradients: dict) -> dict[str, np.ndarray]:
    """PyTorch's gradients under the names of the file, in the layout of the file.

    A tensor of the file is recognised by its name, else by its value, possibly transposed.
    """
    values = {k: p.detach().numpy() for k, p in net.named_parameters()}
    for prefix in [k for k, m in net.named_modules() if isinstance(m, nn.LSTM)]:
        for of in (values, gradients):
            of |= recurrent(of, prefix)
            for key in [k for k in of if k.startswith(prefix) and k[-1] not in "WRB"]:
                del of[key]
    free = {k: v for k, v in tensors(model).items() if v.dtype == np.float32 and v.ndim}
    assigned = {}
    for key, value in values.items():
        for transpose in (False, True):
            wanted, gradient = (a.T if transpose else a for a in (value, gradients[key]))
            matches = [
                k
                for k, v in free.items()
                if v.shape == wanted.shape and np.allclose(v, wanted, rtol=1e-5, atol=1e-6)
            ]
            if key in matches:
                matches = [key]
            if matches:
                break
        assert len(matches) == 1, f"{key} {value.shape} is {matches}"
        assigned[matches[0]] = gradient
        del free[matches[0]]
    print("   left:", {k: v.shape for k, v in free.items() if v.size > 1})
    return assigned


def goldens(name: str, net: nn.Module, model: onnx.ModelProto) -> dict[str, np.ndarray]:
    x, y = networks.inputs(name, 4, seed=100), networks.labels(4, seed=100)
    logits = net(x)
    loss = nn.functional.cross_entropy(logits, y)
    keys, parameters = zip(*net.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    found = assign(model, net, {k: g.numpy() for k, g in zip(keys, gradients, strict=True)})
    return {
        "x": x.numpy(),
        "y": y.numpy(),
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
    } | {f"grad:{k}": g for k, g in found.items()}


def write(name: str, exporter: str) -> None:
    path = HERE / f"{name}.{exporter}.onnx"
    print(path.name)
    # equal tensors, which the older exporter writes once and copies with Identity
    net = networks.network(name, fresh=(name, exporter) == ("resnet18", "legacy"))
    x = networks.inputs(name, 2, seed=0)
    if exporter == "legacy":
        export_legacy(net, x, path, OPSET[name])
    else:
        export_dynamo(net, x, path)
    model = onnx.load(path)
    if not any(node.op_type == "BatchNormalization" for node in model.graph.node):
        net = fold(net)
    np.savez_compressed(path.with_suffix(".npz"), **goldens(name, net, model))


def write_fixed() -> None:
    """Networks without dynamic axes, exported for a batch of one or two."""
    for name, exporter, count in FIXED:
        net, x = networks.network(name), networks.inputs(name, count, seed=0)
        path = HERE / "fixed" / f"{name}.{exporter}.{count}.onnx"
        settings = {"opset_version": 17} if exporter == "legacy" else {"verbose": False}
        torch.onnx.export(
            net,
            (x,),
            path,
            dynamo=exporter == "dynamo",
            input_names=["x"],
            output_names=["logits"],
            external_data=False,
            **settings,
        )
        model = onnx.load(path)
        for node in model.graph.node:
            del node.metadata_props[:]
        onnx.save(model, path)


def write_external() -> None:
    """The LeNet again, with its larger tensors in a file of their own."""
    model = onnx.load(HERE / "lenet.dynamo.onnx")
    data = HERE / "external" / "lenet.data"
    data.unlink(missing_ok=True)  # onnx appends
    onnx.save(
        model,
        HERE / "external" / "lenet.onnx",
        save_as_external_data=True,
        location=data.name,
        size_threshold=256,
    )
    data.chmod(0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(networks.NETWORKS))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.backends.mha.set_fastpath_enabled(False)
    for name in parser.parse_args().names:
        for exporter in ("legacy", "dynamo"):
            write(name, exporter)
    write_external()
    write_fixed()
