"""Memory that loading a transformer of 3,000 nodes takes.

    python -m benchmarks.speed.tracing                   # 384 wide (212 MB of weights)
    python -m benchmarks.speed.tracing --width 1216      # 2.1 GB, in a file of their own

The graph is written the way PyTorch's older exporter writes one: every reshape computes its target
shape, LayerNormalization and Gelu are decomposed, constants are nodes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

HEADS = 4
TOO_WIDE = 1180
"""The width from which the weights exceed the 2 GB that a protobuf message can hold."""


class Writer:
    """A graph that is being written: its nodes and initializers."""

    def __init__(self, width: int):
        self.width = width
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.random = np.random.default_rng(0)

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        output = f"/{op}_{len(self.nodes)}_output_0"
        self.nodes.append(
            helper.make_node(op, inputs, [output], f"/{op}_{len(self.nodes)}", **attributes)
        )
        return output

    def constant(self, value: Any) -> str:
        return self.node("Constant", value=numpy_helper.from_array(np.asarray(value)))

    def weight(self, name: str, *shape: int) -> str:
        scale = 1.0 if len(shape) == 1 else shape[0] ** -0.5
        value = self.random.standard_normal(shape, np.float32) * np.float32(scale)
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def size(self, x: str, axis: int) -> str:
        size = self.node("Gather", self.node("Shape", x), self.constant(np.int64(axis)), axis=0)
        return self.node("Unsqueeze", size, self.constant(np.array([0])))

    def reshape(self, x: str, like: str, *sizes: int) -> str:
        """Reshape to the first two dimensions of `like` and then `sizes`."""
        parts = [self.size(like, 0), self.size(like, 1)]
        parts += [self.constant(np.array([size])) for size in sizes]
        return self.node("Reshape", x, self.node("Concat", *parts, axis=0))

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        product = self.node("MatMul", x, self.weight(f"{name}.weight", rows, columns))
        return self.node("Add", self.weight(f"{name}.bias", columns), product)

    def normalize(self, x: str, name: str) -> str:
        centred = self.node("Sub", x, self.node("ReduceMean", x, axes=[-1]))
        square = self.node("Pow", centred, self.constant(np.float32(2)))
        variance = self.node("ReduceMean", square, axes=[-1])
        deviation = self.node("Sqrt", self.node("Add", variance, self.constant(np.float32(1e-5))))
        scaled = self.node(
            "Mul", self.node("Div", centred, deviation), self.weight(f"{name}.weight", self.width)
        )
        return self.node("Add", scaled, self.weight(f"{name}.bias", self.width))

    def attention(self, x: str, name: str) -> str:
        size = self.width // HEADS

        def heads(kind: str, *permutation: int) -> str:
            projected = self.linear(x, f"{name}.{kind}", self.width, self.width)
            split = self.reshape(projected, x, HEADS, size)
            return self.node("Transpose", split, perm=permutation)

        queries, keys = heads("query", 0, 2, 1, 3), heads("key", 0, 2, 3, 1)
        scores = self.node("MatMul", queries, keys)
        scores = self.node("Div", scores, self.constant(np.float32(size**0.5)))
        mixed = self.node(
            "MatMul", self.node("Softmax", scores, axis=-1), heads("value", 0, 2, 1, 3)
        )
        merged = self.reshape(self.node("Transpose", mixed, perm=(0, 2, 1, 3)), x, self.width)
        return self.linear(merged, f"{name}.output", self.width, self.width)

    def gelu(self, x: str) -> str:
        error = self.node("Erf", self.node("Div", x, self.constant(np.float32(2**0.5))))
        product = self.node("Mul", x, self.node("Add", error, self.constant(np.float32(1))))
        return self.node("Mul", product, self.constant(np.float32(0.5)))

    def layer(self, x: str, name: str) -> str:
        attended = self.attention(self.normalize(x, f"{name}.norm1"), f"{name}.attention")
        x = self.node("Add", x, attended)
        hidden = self.normalize(x, f"{name}.norm2")
        hidden = self.gelu(self.linear(hidden, f"{name}.up", self.width, 4 * self.width))
        return self.node("Add", x, self.linear(hidden, f"{name}.down", 4 * self.width, self.width))


def transformer(layers: int = 29, width: int = 64, words: int = 100) -> ModelProto:
    """Build an encoder over (batch, length) word numbers, opset 17."""
    writer = Writer(width)
    x = writer.node("Gather", writer.weight("embedding", words, width), "tokens")
    for i in range(layers):
        x = writer.layer(x, f"layer{i}")
    writer.nodes.append(helper.make_node("Identity", [x], ["hidden"]))
    graph = helper.make_graph(
        writer.nodes,
        "transformer",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["batch", "length", width])],
        writer.initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


MEMORY = """
import sys, jax, jax.numpy as jnp, numpy as np, jaxonnx
from benchmarks.speed.tracing import memory
jnp.ones(3) + 1
before = memory("RssAnon"), memory("VmHWM")
model = jaxonnx.load(sys.argv[1])
jax.block_until_ready(model.params)
print(memory("RssAnon") - before[0], memory("VmHWM") - before[1])
"""


def memory(kind: str) -> int:
    """Return the bytes of this process: "RssAnon" (of no file) now, "VmHWM" (all) at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def measure_memory(external: bool, width: int = 384) -> tuple[float, float]:
    """Measure resident memory after loading and at its peak, in multiples of the weights."""
    import onnx

    proto = transformer(width=width)
    weights = sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "transformer.onnx"
        onnx.save_model(proto, path, save_as_external_data=external)
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, path],
            env={**os.environ, "PYTHONPATH": str(root)},
            check=True,
            capture_output=True,
            text=True,
        )
    steady, most = map(int, done.stdout.split())
    return steady / weights, most / weights


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of loading")
    parser.add_argument("--width", type=int, default=384)
    options = parser.parse_args()
    for external in (False, True)[options.width >= TOO_WIDE :]:
        steady, most = measure_memory(external, options.width)
        where = "in a file of their own" if external else "in the model file"
        print(f"weights {where}: {steady:.2f} of their size after loading, {most:.2f} at the peak")


if __name__ == "__main__":
    main()
