"""The layers as ONNX nodes (opset 17, the operators that exporters write), with random weights."""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.networks import Network


@dataclass(frozen=True)
class Tensor:
    layers: "Onnx"
    name: str
    shape: tuple[int, ...]

    def __add__(self, other: "Tensor") -> "Tensor":
        return self.layers.node("Add", self, other, shape=self.shape)


class Onnx:
    def __init__(self, training: bool = False):
        self.training = training
        """BatchNormalization in training mode, which onnxruntime-training wants in the file."""
        self.nodes, self.weights = [], []
        self.random = np.random.default_rng(0)

    def node(self, kind, *inputs, shape, outputs=(), **attributes) -> Tensor:
        name = f"v{len(self.nodes)}"
        names = [i.name if isinstance(i, Tensor) else i for i in inputs]
        self.nodes.append(helper.make_node(kind, names, [name, *outputs], **attributes))
        return Tensor(self, name, shape)

    def constant(self, value) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, *shape, fan_in) -> str:
        value = self.random.normal(size=shape) * fan_in**-0.5
        return self.constant(value.astype(np.float32))

    def filled(self, value, *shape) -> str:
        return self.constant(np.full(shape, value, np.float32))

    def conv(self, x, features, kernel, stride=1, pad=0, groups=1, bias=False):
        n, c, *size = x.shape
        fan_in = c // groups * kernel**2
        inputs = [self.weight(features, c // groups, kernel, kernel, fan_in=fan_in)]
        if bias:
            inputs.append(self.filled(0, features))
        return self.node(
            "Conv",
            x,
            *inputs,
            shape=(n, features, *((s + 2 * pad - kernel) // stride + 1 for s in size)),
            kernel_shape=[kernel] * 2,
            strides=[stride] * 2,
            pads=[pad] * 4,
            group=groups,
        )

    def batch_norm(self, x):
        statistics = [self.filled(v, x.shape[1]) for v in (1, 0, 0, 1)]
        renewed = [f"{name}.new" for name in statistics[2:]] if self.training else []
        return self.node(
            "BatchNormalization",
            x,
            *statistics,
            shape=x.shape,
            outputs=renewed,
            training_mode=int(self.training),
        )

    def max_pool(self, x, kernel, stride, pad=0):
        n, c, *size = x.shape
        return self.node(
            "MaxPool",
            x,
            shape=(n, c, *((s + 2 * pad - kernel) // stride + 1 for s in size)),
            kernel_shape=[kernel] * 2,
            strides=[stride] * 2,
            pads=[pad] * 4,
        )

    def relu(self, x):
        return self.node("Relu", x, shape=x.shape)

    def relu6(self, x):
        limits = self.constant(np.float32(0)), self.constant(np.float32(6))
        return self.node("Clip", x, *limits, shape=x.shape)

    def gelu(self, x):
        half, root = self.constant(np.float32(0.5)), self.constant(np.float32(2**0.5))
        one = self.constant(np.float32(1))
        scaled = self.node("Div", x, root, shape=x.shape)
        erf = self.node("Erf", scaled, shape=x.shape)
        product = self.node("Mul", x, self.node("Add", erf, one, shape=x.shape), shape=x.shape)
        return self.node("Mul", product, half, shape=x.shape)

    def flatten(self, x):
        return self.node("Flatten", x, shape=(x.shape[0], int(np.prod(x.shape[1:]))))

    def spatial_mean(self, x):
        return self.flatten(self.node("GlobalAveragePool", x, shape=(*x.shape[:2], 1, 1)))

    def sequence(self, x):
        n, features, *size = x.shape
        length = int(np.prod(size))
        merged = self.constant(np.array([0, features, length]))
        x = self.node("Reshape", x, merged, shape=(n, features, length))
        return self.node("Transpose", x, perm=[0, 2, 1], shape=(n, length, features))

    def sequence_mean(self, x):
        return self.node("ReduceMean", x, shape=(x.shape[0], x.shape[2]), axes=[1], keepdims=0)

    def dense(self, x, features):
        size = x.shape[-1]
        shape = (*x.shape[:-1], features)
        if len(shape) == 2:
            weight = self.weight(features, size, fan_in=size)
            return self.node("Gemm", x, weight, self.filled(0, features), shape=shape, transB=1)
        product = self.node("MatMul", x, self.weight(size, features, fan_in=size), shape=shape)
        return self.node("Add", self.filled(0, features), product, shape=shape)

    def layer_norm(self, x):
        vectors = self.filled(1, x.shape[-1]), self.filled(0, x.shape[-1])
        # onnxruntime-training wants the statistics, which nobody else asks for
        extra = (
            [f"v{len(self.nodes)}.{name}" for name in ("mean", "scale")] if self.training else []
        )
        return self.node("LayerNormalization", x, *vectors, shape=x.shape, outputs=extra, axis=-1)

    def embed(self, tokens, vocabulary, features):
        table = self.weight(vocabulary, features, fan_in=features)
        return self.node("Gather", table, tokens, shape=(*tokens.shape, features))

    def positions(self, x):
        return self.node("Add", x, self.weight(*x.shape[1:], fan_in=x.shape[2]), shape=x.shape)

    def attention(self, x, heads):
        n, length, size = x.shape
        depth = size // heads
        both = self.dense(x, 3 * size)
        split = self.constant(np.array([size] * 3))
        parts = [f"{both.name}.{part}" for part in "kv"]
        query = self.node("Split", both, split, shape=x.shape, outputs=parts, axis=2)
        apart = self.constant(np.array([0, 0, heads, depth]))

        def head(part, perm, shape):
            part = self.node("Reshape", part, apart, shape=(n, length, heads, depth))
            return self.node("Transpose", part, perm=perm, shape=shape)

        across, down = (n, heads, length, depth), (n, heads, depth, length)
        query = head(query, [0, 2, 1, 3], across)
        key, value = head(parts[0], [0, 2, 3, 1], down), head(parts[1], [0, 2, 1, 3], across)
        square = (n, heads, length, length)
        scores = self.node("MatMul", query, key, shape=square)
        scale = self.constant(np.float32(depth**-0.5))
        scores = self.node("Mul", scores, scale, shape=square)
        weights = self.node("Softmax", scores, shape=square, axis=-1)
        mixed = self.node("MatMul", weights, value, shape=across)
        mixed = self.node("Transpose", mixed, perm=[0, 2, 1, 3], shape=(n, length, heads, depth))
        together = self.constant(np.array([0, 0, size]))
        return self.dense(self.node("Reshape", mixed, together, shape=x.shape), size)

    def lstm(self, x, hidden):
        n, length, size = x.shape
        last = f"v{len(self.nodes) + 1}.last"
        steps = self.node("Transpose", x, perm=[1, 0, 2], shape=(length, n, size))
        self.node(
            "LSTM",
            steps,
            self.weight(1, 4 * hidden, size, fan_in=hidden),
            self.weight(1, 4 * hidden, hidden, fan_in=hidden),
            self.filled(0, 1, 8 * hidden),
            shape=(length, 1, n, hidden),
            outputs=[last],
            hidden_size=hidden,
        )
        return self.node("Squeeze", last, self.constant(np.array([0])), shape=(n, hidden))


def write(network: Network, path, training: bool = False) -> None:
    """Write the network as an ONNX file with a symbolic batch dimension."""
    layers = Onnx(training)
    kind = TensorProto.INT32 if network.tokens else TensorProto.FLOAT
    output = network.build(layers, Tensor(layers, "x", network.shape))
    renewed = [o for n in layers.nodes if n.op_type == "BatchNormalization" for o in n.output[1:]]
    graph = helper.make_graph(
        layers.nodes,
        network.build.__name__,
        [helper.make_tensor_value_info("x", kind, ["batch", *network.shape[1:]])],
        [
            helper.make_tensor_value_info(output.name, 1, ["batch", network.classes]),
            *(helper.make_tensor_value_info(name, 1, None) for name in renewed),
        ],
        layers.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
