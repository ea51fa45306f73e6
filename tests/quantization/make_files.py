"""Writes the files of one network that quantizers of other projects export.

    python -m tests.quantization.make_files

Needs torch 2.13, torchao 0.18, nncf 3.4, brevitas 0.13 and onnxoptimizer.
"""

import tempfile
from pathlib import Path

import brevitas.nn as qnn
import nncf
import onnx
import torch
from brevitas.export import export_onnx_qcdq
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

FOLDER = Path(__file__).parent / "files"
NAMES = {"input_names": ["x"], "output_names": ["y"]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(4, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 2, 1)
        self.c = nn.Linear(128, 3)

    def forward(self, x):
        return self.c(torch.flatten(self.b(torch.relu(self.a(x))), 1))


class BrevitasNet(nn.Module):
    def __init__(self, bits):
        super().__init__()
        weights = {
            "weight_quant": Int8WeightPerTensorFloat,
            "weight_bit_width": bits,
            "weight_narrow_range": False,
        }
        self.i = qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width=8)
        self.a = qnn.QuantConv2d(4, 8, 3, padding=1, **weights)
        self.r = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=8)
        self.b = qnn.QuantConv2d(8, 2, 1, **weights)
        self.j = qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width=8)
        self.c = qnn.QuantLinear(128, 3, True, **weights)

    def forward(self, x):
        return self.c(self.j(torch.flatten(self.b(self.r(self.a(self.i(x)))), 1)))


def write_pt2e(x):
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    net = prepare_pt2e(torch.export.export(Net().eval(), (x,)).module(), quantizer)
    net(x)
    exported = torch.export.export(convert_pt2e(net), (x,))
    proto = torch.onnx.export(exported, (x,), dynamo=True, **NAMES).model_proto
    for node in proto.graph.node:
        del node.metadata_props[:]  # paths of this machine
    del proto.graph.value_info[:]
    onnx.save(proto, FOLDER / "pt2e.onnx")


def write_nncf(x):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "float.onnx")
        torch.onnx.export(Net().eval(), (x,), path, dynamo=False, opset_version=17, **NAMES)
        data = nncf.Dataset([x.numpy()], lambda batch: {"x": batch})
        onnx.save(nncf.quantize(onnx.load(path), data, subset_size=1), FOLDER / "nncf.onnx")


def write_brevitas(x, bits, name):
    net = BrevitasNet(bits).train()
    net(x)
    path = str(FOLDER / name)
    export_onnx_qcdq(net.eval(), args=x, export_path=path, dynamo=False, **NAMES)


def main():
    torch.manual_seed(0)
    x = torch.randn(4, 4, 8, 8)
    write_pt2e(x)
    write_nncf(x)
    write_brevitas(x, 8, "brevitas.onnx")
    write_brevitas(x, 4, "brevitas_int4.onnx")


if __name__ == "__main__":
    main()
