"""Where quantized files have integers: onnxruntime's own optimized graphs, and their CPU time.

    python -m benchmarks.quantization.placement [--networks unet vit] [--rounds 30]

Ten networks with random weights are quantized by `jaxonnx.quantize` and by onnxruntime's
`quantize_static` (QDQ, per channel, uint8 activations, after its pre-processing) with the same
batches. Of each file onnxruntime's default session is asked for the graph that it runs: operators
on integers, products left in floating point, conversions between the two, and the rest. Calls take
turns in one process; printed are the least CPU times of a call of batch 1, the median of the ratios
of the rounds, and what the outputs differ by from those of the float network (root mean square,
relative to theirs).
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnxruntime import quantization as ort
from rich.console import Console
from rich.table import Table

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import Network, encoder, mobilenet_v2, resnet18

PRODUCTS = {"Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul"}
PRODUCTS |= {"FusedMatMul", "MatMulNBits"}
INTEGER = ("QLinear", "QGemm", "QAttention", "DynamicQuantize", "ConvInteger", "MatMulInteger")
CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")


def normalized(layers, x, features, kernel, stride=1):
    return layers.relu(layers.batch_norm(layers.conv(x, features, kernel, stride, kernel // 2)))


def concat(layers, *parts):
    n, _, *size = parts[0].shape
    shape = (n, sum(x.shape[1] for x in parts), *size)
    return layers.node("Concat", *parts, axis=1, shape=shape)


def resize(layers, x, mode="nearest"):
    n, c, h, w = x.shape
    scales = layers.constant(np.array([1, 1, 2, 2], np.float32))
    where = "asymmetric" if mode == "nearest" else "half_pixel"
    options = {"mode": mode, "coordinate_transformation_mode": where}
    if mode == "nearest":
        options["nearest_mode"] = "floor"
    return layers.node("Resize", x, "", scales, shape=(n, c, 2 * h, 2 * w), **options)


def squeezenet(layers, x):
    x = layers.max_pool(layers.relu(layers.conv(x, 64, 3, 2, bias=True)), 3, 2)
    for i, (squeezed, features) in enumerate(((16, 64), (16, 64), (32, 128), (32, 128))):
        x = layers.max_pool(x, 3, 2) if i == 2 else x
        x = layers.relu(layers.conv(x, squeezed, 1, bias=True))
        parts = (layers.conv(x, features, 3, pad=1, bias=True), layers.conv(x, features, 1))
        x = concat(layers, *map(layers.relu, parts[::-1]))
    return layers.spatial_mean(layers.relu(layers.conv(x, 100, 1, bias=True)))


def densenet(layers, x):
    x = layers.max_pool(normalized(layers, x, 32, 7, 2), 3, 2, 1)
    for i in range(2):
        for _ in range(4):
            y = layers.relu(layers.batch_norm(x))
            y = normalized(layers, layers.conv(y, 64, 1), 64, 1)
            x = concat(layers, x, layers.conv(y, 16, 3, pad=1))
        x = layers.conv(layers.relu(layers.batch_norm(x)), 48, 1)
        if i == 0:
            n, c, h, w = x.shape
            pooled = {"kernel_shape": [2, 2], "strides": [2, 2]}
            x = layers.node("AveragePool", x, shape=(n, c, h // 2, w // 2), **pooled)
    return layers.dense(layers.spatial_mean(x), 100)


def unet(layers, x):
    skips = []
    for features in (16, 32, 64):
        x = normalized(layers, normalized(layers, x, features, 3), features, 3)
        skips.append(x)
        x = layers.max_pool(x, 2, 2)
    x = normalized(layers, x, 128, 3)
    for features, skip in zip((64, 32, 16), skips[::-1], strict=True):
        x = concat(layers, resize(layers, x), skip)
        x = normalized(layers, normalized(layers, x, features, 3), features, 3)
    return layers.spatial_mean(layers.conv(x, 10, 1, bias=True))


def detector(layers, x):
    """Write a small YOLO: split stages, pooled pyramid, upsampling, boxes of two scales."""

    def silu(x):
        return layers.node("Mul", x, layers.node("Sigmoid", x, shape=x.shape), shape=x.shape)

    def block(x, features, kernel, stride=1):
        return silu(layers.conv(x, features, kernel, stride, kernel // 2, bias=True))

    def stage(x, features):
        x = block(x, features, 1)
        n, _, h, w = x.shape
        half = features // 2
        parts = layers.constant(np.array([half, half]))
        second = f"v{len(layers.nodes)}.second"
        first = layers.node("Split", x, parts, outputs=[second], axis=1, shape=(n, half, h, w))
        other = type(x)(layers, second, (n, half, h, w))
        third = other + block(block(other, half, 3), half, 3)
        return block(concat(layers, first, other, third), features, 1)

    def boxes(x):
        x = layers.conv(x, 18, 1, bias=True)
        n, c, h, w = x.shape
        shape = layers.constant(np.array([0, c, h * w]))
        return layers.node("Reshape", x, shape, shape=(n, c, h * w))

    x = stage(block(block(x, 16, 3, 2), 32, 3, 2), 32)
    fine = stage(block(x, 64, 3, 2), 64)
    coarse = block(stage(block(fine, 128, 3, 2), 128), 64, 1)
    pools = [coarse]
    for _ in range(3):
        pools.append(layers.max_pool(pools[-1], 5, 1, 2))
    coarse = block(concat(layers, *pools), 128, 1)
    fine = stage(concat(layers, resize(layers, coarse), fine), 64)
    coarse = stage(concat(layers, block(fine, 64, 3, 2), coarse), 128)
    parts = boxes(fine), boxes(coarse)
    n, c, _ = parts[0].shape
    both = (n, c, sum(part.shape[2] for part in parts))
    found = layers.node("Concat", *parts, axis=2, shape=both)
    return layers.node("ReduceMax", found, axes=[2], keepdims=0, shape=(n, c))


def vit(layers, x):
    x = layers.conv(x, 128, 8, 8, bias=True)
    n, c, h, w = x.shape
    flat = layers.constant(np.array([0, c, h * w]))
    x = layers.node("Reshape", x, flat, shape=(n, c, h * w))
    x = layers.node("Transpose", x, perm=[0, 2, 1], shape=(n, h * w, c))
    x = layers.positions(x)
    for _ in range(4):
        x = x + layers.attention(layers.layer_norm(x), 4)
        x = x + layers.dense(layers.gelu(layers.dense(layers.layer_norm(x), 512)), 128)
    x = layers.layer_norm(x)
    x = layers.node("Gather", x, layers.constant(np.int64(0)), axis=1, shape=(n, c))
    return layers.dense(x, 100)


def shufflenet(layers, x):
    """Write units of ShuffleNetV2: channels are split by Slice, and shuffled by Transpose."""

    def part(x, start, end):
        n, _, h, w = x.shape
        ends = ([start], [end], [1])
        bounds = [layers.constant(np.array(value)) for value in ends]
        return layers.node("Slice", x, *bounds, shape=(n, end - start, h, w))

    def shuffle(x):
        n, c, h, w = x.shape
        apart = layers.constant(np.array([0, 2, c // 2, h, w]))
        x = layers.node("Reshape", x, apart, shape=(n, 2, c // 2, h, w))
        x = layers.node("Transpose", x, perm=[0, 2, 1, 3, 4], shape=(n, c // 2, 2, h, w))
        together = layers.constant(np.array([0, c, h, w]))
        return layers.node("Reshape", x, together, shape=(n, c, h, w))

    def branch(x, features, stride):
        x = normalized(layers, x, features, 1)
        x = layers.batch_norm(layers.conv(x, features, 3, stride, 1, groups=features))
        return normalized(layers, x, features, 1)

    x = layers.max_pool(normalized(layers, x, 24, 3, 2), 3, 2, 1)
    for features in (48, 96):
        down = layers.batch_norm(layers.conv(x, x.shape[1], 3, 2, 1, groups=x.shape[1]))
        down = normalized(layers, down, features, 1)
        x = shuffle(concat(layers, down, branch(x, features, 2)))
        for _ in range(2):
            first, second = part(x, 0, features), part(x, features, 2 * features)
            x = shuffle(concat(layers, first, branch(second, features, 1)))
    return layers.dense(layers.spatial_mean(normalized(layers, x, 256, 1)), 100)


def segmenter(layers, x):
    """Write a pyramid of features as DeepLab has it: pooled branches, Pad, bilinear Resize."""
    low = normalized(layers, x, 32, 3, 2)
    n, c, h, w = low.shape
    pads = layers.constant(np.array([0, 0, 0, 0, 0, 0, 1, 1]))
    x = layers.node("Pad", low, pads, shape=(n, c, h + 1, w + 1))
    x = layers.relu6(layers.conv(x, 64, 3, 2, bias=True))
    pooled = layers.node("GlobalAveragePool", x, shape=(*x.shape[:2], 1, 1))
    pooled = layers.relu(layers.conv(pooled, 64, 1, bias=True))
    size = layers.constant(np.array([1, 64, *x.shape[2:]]))
    pooled = layers.node("Expand", pooled, size, shape=x.shape)
    branches = [normalized(layers, x, 64, kernel) for kernel in (1, 3)]
    x = normalized(layers, concat(layers, *branches, pooled), 64, 1)
    x = resize(layers, x, "linear")
    x = normalized(layers, concat(layers, x, normalized(layers, low, 16, 1)), 64, 3)
    return layers.spatial_mean(resize(layers, layers.conv(x, 10, 1, bias=True), "linear"))


IMAGE = (1, 3, 64, 64)
NETWORKS = {
    "resnet18": Network(resnet18, IMAGE, 1000),
    "mobilenetv2": Network(mobilenet_v2, IMAGE, 1000),
    "squeezenet": Network(squeezenet, IMAGE, 100),
    "densenet": Network(densenet, IMAGE, 100),
    "shufflenet": Network(shufflenet, IMAGE, 100),
    "unet": Network(unet, IMAGE, 10),
    "segmenter": Network(segmenter, IMAGE, 10),
    "detector": Network(detector, IMAGE, 18),
    "vit": Network(vit, IMAGE, 100),
    "encoder": Network(encoder, (1, 64), 10, tokens=1000),
}


class Reader(ort.CalibrationDataReader):
    def __init__(self, batches):
        self.batches = iter({"x": x} for x in batches)

    def get_next(self):
        return next(self.batches, None)


def draw(network: Network, count: int, seed: int) -> list[np.ndarray]:
    """Return batches of smooth pictures, or of tokens."""
    random = np.random.default_rng(seed)
    if network.tokens:
        return [
            random.integers(0, network.tokens, network.shape).astype(np.int32) for _ in range(count)
        ]
    coarse = random.normal(size=(count, *network.shape[:2], 8, 8)).astype(np.float32)
    noise = random.normal(size=(count, *network.shape)).astype(np.float32)
    return [*(coarse.repeat(8, -1).repeat(8, -2) + 0.3 * noise)]


def write_files(name: str, folder: Path) -> dict[str, Path]:
    """Write a network in float32, and by both quantizers."""
    network = NETWORKS[name]
    paths = {kind: folder / f"{name}.{kind}.onnx" for kind in ("float", "theirs", "ours")}
    write(network, paths["float"])
    batches = draw(network, 8, 1)
    before = folder / f"{name}.before.onnx"
    # symbolic shapes do not know Resize with a symbolic batch
    ort.shape_inference.quant_pre_process(paths["float"], before, skip_symbolic_shape=True)
    ort.quantize_static(
        str(before),
        str(paths["theirs"]),
        Reader(batches),
        per_channel=True,
        activation_type=ort.QuantType.QUInt8,
    )
    scheme = jaxonnx.Quantization(calibration="minmax")
    jaxonnx.quantize(paths["float"], batches, scheme).save(paths["ours"])
    return paths


def count_kernels(path: Path) -> Counter[str]:
    """Count the kinds of nodes in the graph that a default session makes of a file."""
    nodes = onnx.load(path).graph.node
    kinds = Counter(node.op_type for node in nodes)
    products = sum(n for kind, n in kinds.items() if kind in PRODUCTS)
    integer = sum(n for kind, n in kinds.items() if kind.startswith(INTEGER))
    conversions = sum(kinds[kind] for kind in CONVERSIONS)
    rest = len(nodes) - products - integer - conversions
    return Counter(integer=integer, products=products, conversions=conversions, rest=rest)


def open_session(path: Path) -> tuple[onnxruntime.InferenceSession, Path]:
    optimized = path.with_suffix(".optimized.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(optimized)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options), optimized


def measure(name: str, folder: Path, rounds: int) -> list[str]:
    paths = write_files(name, folder)
    sessions = {kind: open_session(path) for kind, path in paths.items()}
    batches = draw(NETWORKS[name], 8, 2)
    outputs = {
        kind: np.stack([session.run(None, {"x": x})[0] for x in batches])
        for kind, (session, _) in sessions.items()
    }
    times: dict[str, list[float]] = {kind: [] for kind in paths}
    for _ in range(rounds):
        for kind, (session, _) in sessions.items():
            began = time.process_time()
            for x in batches:
                session.run(None, {"x": x})
            times[kind].append(time.process_time() - began)
    least = {kind: 1e3 * min(spent) / len(batches) for kind, spent in times.items()}
    row = [name]
    for kind in ("ours", "theirs"):
        counts = count_kernels(sessions[kind][1])
        error = np.linalg.norm(outputs[kind] - outputs["float"]) / np.linalg.norm(outputs["float"])
        shown = " ".join(str(counts[k]) for k in ("integer", "products", "conversions", "rest"))
        row += [shown, f"{error:.2%}", f"{least[kind]:.3f}"]
    ratio = np.median(np.divide(times["ours"], times["theirs"]))
    return [*row, f"{ratio:.2f}", f"{least['float']:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", choices=NETWORKS, nargs="+", default=[*NETWORKS])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="where to keep the files")
    options = parser.parse_args()
    heads = ("network", *("nodes", "error", "ms") * 2, "ratio", "float32, ms")
    table = Table(
        *heads,
        title="jaxonnx, then quantize_static; nodes: integer, float products, conversions, rest",
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            row = measure(name, options.folder or Path(folder), options.rounds)
            print(*row, sep=" | ", flush=True)
            table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
