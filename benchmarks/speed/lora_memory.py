"""Memory of a process that trains LoRA on a base of 200 million weights, in 4 bits and in float32.

    python -m benchmarks.speed.lora_memory [--layers 12] [--size 4096]

A stack of square matrices as MatMulNBits (blocks of 32) and as MatMul; each process loads its file,
takes two steps through `jaxonnx.train`, and reports the greatest memory that it had.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BLOCK = 32


def write(path: Path, layers: int, size: int, bits: int) -> None:
    """Write a stack of `layers` matrices of `size` x `size`, in 4 bits or as float32."""
    draw, nodes, tensors, value = np.random.default_rng(0), [], {}, "x"
    for i in range(layers):
        out = "y" if i == layers - 1 else f"h{i}"
        if bits == 4:
            tensors[f"w{i}"] = draw.integers(0, 256, (size, size // BLOCK, BLOCK // 2), np.uint8)
            tensors[f"s{i}"] = np.full((size, size // BLOCK), 1e-3, np.float32)
            sizes: Any = {"K": size, "N": size, "bits": 4, "block_size": BLOCK}
            inputs = [value, f"w{i}", f"s{i}"]
            nodes.append(
                helper.make_node("MatMulNBits", inputs, [out], domain="com.microsoft", **sizes)
            )
        else:
            tensors[f"w{i}"] = 1e-2 * draw.standard_normal((size, size), np.float32)
            nodes.append(helper.make_node("MatMul", [value, f"w{i}"], [out]))
        value = out
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", size]) for n in "xy"]
    made = [numpy_helper.from_array(x, name) for name, x in tensors.items()]
    graph = helper.make_graph(nodes, "stack", ends[:1], ends[1:], made)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=10, opset_imports=opsets)
    onnx.save_model(model, path, save_as_external_data=True, location=f"{path.name}.data")


def train(path: str) -> None:
    """Take two steps, and print the greatest memory of the process in megabytes."""
    import optax

    import jaxonnx

    model = jaxonnx.load(path)
    x = np.ones((128, model.inputs[0].shape[1]), np.float32)  # type: ignore[index]
    settings = {"loss": "squared_error", "optimizer": optax.adam(1e-3), "batch_size": 64}
    jaxonnx.train(model, (x, x), lora=jaxonnx.LoRA(8), progress=False, **settings)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--train")
    options = parser.parse_args()
    if options.train:
        return train(options.train)
    print(f"{options.layers * options.size**2 / 1e6:.0f} million weights")
    for bits in (4, 32):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "stack.onnx"
            write(path, options.layers, options.size, bits)
            size = sum(file.stat().st_size for file in Path(folder).iterdir()) / 2**20
            command = [sys.executable, "-m", "benchmarks.speed.lora_memory", "--train", str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peak = float(done.stdout.split()[-1])
            print(f"{bits} bits: file {size:.0f} MB, process {peak:.0f} MB at most")


if __name__ == "__main__":
    main()
