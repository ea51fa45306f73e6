"""Training in float64: files of doubles, and graphs that onnxruntime can run in them.

onnxruntime has no Conv, ConvTranspose and Erf of doubles. `for_onnxruntime` writes them as slices,
products of matrices and a series, with no other operator of the graph changed.
"""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper
from onnx import TensorProto as Kind
from onnx.shape_inference import infer_shapes

from jaxonnx._io.protos import subgraphs


def doubled(model: ModelProto) -> ModelProto:
    """Return a network of float32 with float64 in its place."""
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    for tensor in graph.initializer:
        if tensor.data_type == Kind.FLOAT:
            array = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == Kind.FLOAT:
            value.type.tensor_type.elem_type = Kind.DOUBLE
    for node in graph.node:
        if node.op_type == "LayerNormalization":  # whose statistics are float32 otherwise
            node.attribute.append(helper.make_attribute("stash_type", Kind.DOUBLE))
    return result


def for_onnxruntime(model: ModelProto) -> ModelProto:
    """Return a graph of fixed sizes without operators that onnxruntime lacks for doubles."""
    graph = infer_shapes(model).graph
    shapes = {
        value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    result = ModelProto()
    result.CopyFrom(model)
    _replace(result.graph, shapes, "doubles")
    return result


def _replace(graph: GraphProto, shapes: dict[str, tuple], prefix: str) -> None:
    """Replace the operators, in the graphs within as well: a Scan may have an Erf."""
    rules = {"Conv": _conv, "ConvTranspose": _conv_transpose, "Erf": _erf}
    nodes: list[NodeProto] = []
    for i, node in enumerate(graph.node):
        if node.op_type not in rules:
            for inner in subgraphs(node):
                _replace(inner, shapes, f"{prefix}.{i}")
            nodes.append(node)
            continue
        g = _Nodes(f"{prefix}.{i}")
        settings = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        known = [shapes.get(name) for name in (*node.input, node.output[0])]
        y = rules[node.op_type](g, *node.input, *known, **settings)
        nodes += [*g.nodes, helper.make_node("Identity", [y], node.output)]
    new = GraphProto()
    new.node.extend(nodes)
    del graph.node[:]
    graph.node.extend(new.node)


class _Nodes:
    """Nodes that take the place of one, with names of their own."""

    def __init__(self, prefix: str):
        self.prefix, self.nodes = prefix, list[NodeProto]()

    def __call__(self, kind: str, *inputs: str, **attributes) -> str:
        output = f"{self.prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def integers(self, values: Iterable[int]) -> str:
        return self("Constant", value_ints=[*map(int, values)])

    def double(self, value: float) -> str:
        return self("Constant", value=numpy_helper.from_array(np.array(value, np.float64)))

    def reshape(self, x: str, *shape: int) -> str:
        return self("Reshape", x, self.integers(shape))

    def pad(self, x: str, low: Sequence[int], high: Sequence[int]) -> str:
        edges = [0, 0, *low, 0, 0, *high]
        return self("Pad", x, self.integers(edges)) if any(edges) else x

    def part(self, x: str, starts, sizes, steps) -> str:
        """Return each `steps`th row and column from `starts` on."""
        ends = [s + (n - 1) * step + 1 for s, n, step in zip(starts, sizes, steps, strict=True)]
        return self("Slice", x, *map(self.integers, (starts, ends, (2, 3), steps)))


def _conv(g, x, w, *rest, strides, pads, dilations, group, kernel_shape):
    """Return a convolution of two axes: a product of matrices for all of its windows.

    The side that has fewer places, kernel or result, is the one that is written place by place.
    """
    bias = rest[:1] if isinstance(rest[0], str) else ()
    (n, channels, *_), (features, inside, *kernel), *_, out = rest[len(bias) :]
    x = g.pad(x, pads[:2], pads[2:])
    places = [(i, j) for i in range(kernel[0]) for j in range(kernel[1])]
    w = g.reshape(w, 1, group, features // group, inside * prod(kernel))
    if prod(kernel) <= prod(out[2:]):
        parts = [
            g.reshape(
                g.part(x, (i * dilations[0], j * dilations[1]), out[2:], strides),
                *(n, group, channels // group, 1, prod(out[2:])),
            )
            for i, j in places
        ]
        windows = g("Concat", *parts, axis=3) if len(parts) > 1 else parts[0]
        windows = g.reshape(windows, n, group, inside * prod(kernel), prod(out[2:]))
        y = g.reshape(g("MatMul", w, windows), *out)
    else:
        w = g("Transpose", g.reshape(w, group, features // group, -1), perm=[0, 2, 1])
        columns = []
        for i, j in ((i, j) for i in range(out[2]) for j in range(out[3])):
            window = g.part(x, (i * strides[0], j * strides[1]), kernel, dilations)
            window = g.reshape(window, n, group, inside * prod(kernel))
            product = g("MatMul", g("Transpose", window, perm=[1, 0, 2]), w)
            product = g("Transpose", product, perm=[1, 0, 2])
            columns.append(g.reshape(product, n, features, 1))
        y = g("Concat", *columns, axis=2) if len(columns) > 1 else columns[0]
        y = g.reshape(y, *out)
    return g("Add", y, g.reshape(bias[0], 1, features, 1, 1)) if bias else y


def _conv_transpose(g, x, w, x_shape, w_shape, out, **settings):
    """Return the convolution of x, with zeros between its places, and the turned kernel."""
    strides, pads, group = settings["strides"], settings["pads"], settings["group"]
    dilations, kernel = settings["dilations"], w_shape[2:]
    n, channels, *size = x_shape
    if any(stride > 1 for stride in strides):
        x = g.reshape(x, n, channels, size[0], 1, size[1], 1)
        edges = [0, 0, 0, strides[0] - 1, 0, strides[1] - 1]
        x = g("Pad", x, g.integers([0] * 6 + edges))
        size = [a * b for a, b in zip(size, strides, strict=True)]
        x = g.reshape(x, n, channels, *size)
        size = [a - b + 1 for a, b in zip(size, strides, strict=True)]
        x = g.part(x, (0, 0), size, (1, 1))
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    low = [r - p for r, p in zip(reach, pads[:2], strict=True)]
    high = [o - s - below + r for o, s, below, r in zip(out[2:], size, low, reach, strict=True)]
    ends = [-k - 1 for k in kernel]
    w = g("Slice", w, *map(g.integers, ((-1, -1), ends, (2, 3), (-1, -1))))
    inside, features = channels // group, w_shape[1]
    w = g.reshape(w, group, inside, features, prod(kernel))
    w = g("Transpose", w, perm=[0, 2, 1, 3])
    w_shape = group * features, inside, *kernel
    padded = n, channels, *(s + a + b for s, a, b in zip(size, low, high, strict=True))
    return _conv(
        g, g.pad(x, low, high), g.reshape(w, *w_shape), padded, w_shape, out,
        strides=(1, 1), pads=(0, 0, 0, 0), dilations=dilations, group=group, kernel_shape=kernel,
    )  # fmt: skip


def _erf(g, x, *_):
    """Return 2 / sqrt(pi) * exp(-x^2) * sum of 2^n x^(2n+1) / (2n+1)!!, of up to 6, as Horner."""
    x = g("Min", g("Max", x, g.double(-6)), g.double(6))
    square = g("Mul", x, x)
    total = one = g.double(1)
    for n in range(130, 0, -1):
        total = g("Add", one, g("Mul", g("Mul", total, square), g.double(2 / (2 * n + 1))))
    decay = g("Exp", g("Neg", square))
    return g("Mul", g("Mul", g("Mul", x, decay), total), g.double(2 / np.sqrt(np.pi)))
