"""Small networks of architectures that are not stored: YOLO, and a voice as Piper exports it."""

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

BINS = 16


class Graph:
    """Nodes and weights, written one after another."""

    def __init__(self, seed: int = 0):
        self.nodes, self.weights = [], []
        self._random, self._count = np.random.default_rng(seed), 0

    def node(self, kind, *inputs, name=None, **attributes):
        """Append an operator; return its output."""
        name = name or f"/{kind}_{len(self.nodes)}"
        output = f"{name}_output_0"
        self.nodes.append(helper.make_node(kind, inputs, [output], name, **attributes))
        return output

    def constant(self, values):
        name = f"constant_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def conv(self, x, channels, out, kernel=1, stride=1, name=None, bias=0.0):
        """Append a convolution with a bias, into which BatchNormalization is folded."""
        name = name or f"model.{len(self.weights)}.conv"
        fan_in = channels * kernel**2
        weight = self._random.normal(0, (2 / fan_in) ** 0.5, (out, channels, kernel, kernel))
        for part, value in (("weight", weight), ("bias", np.full(out, bias))):
            self.weights.append(numpy_helper.from_array(value.astype(np.float32), f"{name}.{part}"))
        sizes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        inputs = x, f"{name}.weight", f"{name}.bias"
        return self.node("Conv", *inputs, name=f"/{name}/Conv", **sizes)

    def block(self, x, channels, out, kernel=3, stride=1):
        """Append a convolution and SiLU."""
        y = self.conv(x, channels, out, kernel, stride)
        return self.node("Mul", y, self.node("Sigmoid", y))


def small_yolo(
    classes: int = 2, size: int = 64, width: int = 8, masks: int = 0, joined: bool = False
) -> ModelProto:
    """Return a backbone, a neck over strides 8, 16 and 32, and a decoupled head.

    Args:
      masks: the number of coefficients and prototypes of a segmenter.
      joined: bins and classes are one map for each stride, as in exports before 2026.
    """
    g, w = Graph(), width
    x = g.block("images", 3, w, 3, 2)
    x = g.block(x, w, w, 3, 2)
    p3 = g.block(x, w, 2 * w, 3, 2)
    p4 = g.block(p3, 2 * w, 2 * w, 3, 2)
    p5 = g.block(p4, 2 * w, 2 * w, 3, 2)

    def merge(low, high):
        scales = g.constant(np.array([1, 1, 2, 2], np.float32))
        high = g.node("Resize", high, "", scales, mode="nearest")
        return g.block(g.node("Concat", low, high, axis=1), 4 * w, 2 * w, 1)

    p4 = merge(p4, p5)
    p3 = merge(p3, p4)
    bins, scores, coefficients = [], [], []
    for i, level in enumerate((p3, p4, p5)):
        for k, out, maps in ((2, 4 * BINS, bins), (3, classes, scores), (4, masks, coefficients)):
            if out:
                y = g.block(level, 2 * w, 2 * w)
                name = f"model.22/cv{k}.{i}/cv{k}.{i}.2"
                maps.append(g.conv(y, 2 * w, out, name=name, bias=-3.0 if k == 3 else 0.0))

    def rows(maps, channels):
        shape = g.constant(np.array([1, channels, -1]))
        return g.node("Concat", *(g.node("Reshape", x, shape) for x in maps), axis=2)

    if joined:
        pairs = zip(bins, scores, strict=True)
        both = rows([g.node("Concat", *pair, axis=1) for pair in pairs], 4 * BINS + classes)
        split = g.constant(np.array([4 * BINS, classes]))
        g.nodes.append(helper.make_node("Split", [both, split], ["distances", "logits"], axis=1))
        distances, logits = "distances", "logits"
    else:
        distances, logits = rows(bins, 4 * BINS), rows(scores, classes)

    anchors = sum((size // stride) ** 2 for stride in (8, 16, 32))
    shape = g.constant(np.array([1, 4, BINS, anchors]))
    shares = g.node("Transpose", g.node("Reshape", distances, shape), perm=[0, 2, 1, 3])
    shares = g.node("Softmax", shares, axis=1)
    g.weights.append(
        numpy_helper.from_array(
            np.arange(BINS, dtype=np.float32).reshape(1, -1, 1, 1), "dfl.weight"
        )
    )
    sides = g.node("Reshape", g.node("Conv", shares, "dfl.weight"), g.constant([1, 4, anchors]))

    low, half, high, axis = (g.constant([i]) for i in (0, 2, 4, 1))
    ends = [g.node("Slice", sides, *places, axis) for places in ((low, half), (half, high))]
    grids = [np.mgrid[: size // s, : size // s][::-1].reshape(2, -1) + 0.5 for s in (8, 16, 32)]
    centers = g.constant(np.concatenate(grids, 1)[None].astype(np.float32))
    repeated = [np.full((size // s) ** 2, s, np.float32) for s in (8, 16, 32)]
    low, high = g.node("Sub", centers, ends[0]), g.node("Add", centers, ends[1])
    middle = g.node("Div", g.node("Add", low, high), g.constant(np.float32(2)))
    boxes = g.node("Concat", middle, g.node("Sub", high, low), axis=1)
    boxes = g.node("Mul", boxes, g.constant(np.concatenate(repeated)[None]))
    parts = [boxes, g.node("Sigmoid", logits), *([rows(coefficients, masks)] if masks else [])]
    g.nodes.append(helper.make_node("Concat", parts, ["output0"], axis=1))

    outputs = {"output0": [1, 4 + classes + masks, anchors]}
    if masks:
        scales = g.constant(np.array([1, 1, 2, 2], np.float32))
        large = g.node("Resize", g.block(p3, 2 * w, 2 * w), "", scales, mode="nearest")
        g.nodes.append(helper.make_node("Identity", [g.conv(large, 2 * w, masks)], ["output1"]))
        outputs["output1"] = [1, masks, size // 4, size // 4]
    values = {"images": [1, 3, size, size]} | outputs
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in values.items()]
    graph = helper.make_graph(g.nodes, "yolo", infos[:1], infos[1:], g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def small_voice(width: int = 8, symbols: int = 20) -> ModelProto:
    """Return a VITS with Piper's inputs and output: encoder, durations, noise, a vocoder.

    As in Piper's files, the number of samples is computed from rounded durations, through which
    there is no gradient.
    """
    g = Graph()
    table = np.random.default_rng(1).normal(size=(symbols, width)).astype(np.float32)
    g.weights.append(numpy_helper.from_array(table, "enc_p.emb.weight"))
    pads = {"kernel_shape": [3], "pads": [1, 1]}

    def conv(x, channels, out, name, kind="Conv", **sizes):
        shape = (channels, out, 4) if kind == "ConvTranspose" else (out, channels, 3)
        weight = np.random.default_rng(len(name)).normal(0, 0.2, shape).astype(np.float32)
        g.weights.append(numpy_helper.from_array(weight, f"{name}.weight"))
        g.weights.append(numpy_helper.from_array(np.zeros(out, np.float32), f"{name}.bias"))
        inputs = x, f"{name}.weight", f"{name}.bias"
        return g.node(kind, *inputs, name=f"/{name}/{kind}", **(sizes or pads))

    first, one, two = (g.constant(np.array([i])) for i in (0, 1, 2))
    x = g.node("Transpose", g.node("Gather", "enc_p.emb.weight", "input"), perm=[0, 2, 1])
    x = g.node("Relu", conv(x, width, width, "enc_p.encoder"))
    means = conv(x, width, width, "enc_p.proj")
    logs = conv(g.node("Relu", conv(x, width, width, "dp.conv_1")), width, 1, "dp.proj")
    noise, length = (
        g.node("Slice", "scales", low, high) for low, high in ((first, one), (one, two))
    )
    durations = g.node("Ceil", g.node("Mul", g.node("Exp", logs), length))
    ends = g.node("CumSum", g.node("Squeeze", durations, g.constant([0, 1])), g.constant(0))
    total = g.node("Cast", g.node("ReduceMax", ends, keepdims=0), to=TensorProto.INT64)
    frames = g.node("Range", g.constant(0), total, g.constant(1))
    frames = g.node("Cast", frames, to=TensorProto.FLOAT)
    ends = g.node("Unsqueeze", ends, g.constant([1]))
    begun = g.node("Cast", g.node("Less", frames, ends), to=TensorProto.FLOAT)  # [T, frames]
    before = g.node("Pad", begun, g.constant([1, 0, -1, 0]))
    path = g.node("Sub", begun, before)
    z = g.node("MatMul", means, path)
    z = g.node("Add", z, g.node("Mul", g.node("RandomNormalLike", z), noise))
    sizes = {"kernel_shape": [4], "strides": [2], "pads": [1, 1]}
    y = g.node("LeakyRelu", conv(z, width, width, "dec.ups.0", "ConvTranspose", **sizes))
    y = g.node("Tanh", conv(y, width, 1, "dec.conv_post"))
    g.nodes.append(helper.make_node("Unsqueeze", [y, g.constant([1])], ["output"]))
    values = [
        helper.make_tensor_value_info("input", TensorProto.INT64, ["batch", "phonemes"]),
        helper.make_tensor_value_info("input_lengths", TensorProto.INT64, ["batch"]),
        helper.make_tensor_value_info("scales", TensorProto.FLOAT, [3]),
        helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 1, 1, "time"]),
    ]
    graph = helper.make_graph(g.nodes, "voice", values[:3], values[3:], g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
