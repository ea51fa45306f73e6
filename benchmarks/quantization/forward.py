"""Forward passes of files in int8 and float16, beside onnxruntime.

    python -m benchmarks.quantization.forward [--files resnet50-qdq t5-dynamic] [--rounds 20]

Networks with random weights, quantized by onnxruntime's own tools: a ResNet-50 at 64 pixels, as
QuantizeLinear/DequantizeLinear and as QLinearConv (static, per channel); an encoder-decoder of the
size of T5-small and an encoder of that of MiniLM (dynamic int8); the same ResNet-50 and encoder in
float16. Batch 1. Calls take turns in one process; printed are the least CPU times of a call (all
threads; those of onnxruntime do not spin), their ratio, and what part of the outputs' range they
differ by at most. Beside each is the file in float32.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import onnx
import onnxruntime
from onnxruntime import quantization as ort
from rich.console import Console
from rich.table import Table

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import Network, batch, resnet50


def minilm(layers, tokens):
    """Write six layers of 384, as sentence-transformers/all-MiniLM-L6-v2 has them."""
    x = layers.layer_norm(layers.positions(layers.embed(tokens, 30522, 384)))
    for _ in range(6):
        x = layers.layer_norm(x + layers.attention(x, 12))
        x = layers.layer_norm(x + layers.dense(layers.gelu(layers.dense(x, 1536)), 384))
    return layers.sequence_mean(x)


def t5(layers, tokens):
    """Write an encoder and a decoder of six layers of 512 each, over the same tokens."""
    table = layers.embed(tokens, 32128, 512)

    def stack(x, mix):
        for _ in range(6):
            for _ in range(mix):
                x = x + layers.attention(layers.layer_norm(x), 8)
            x = x + layers.dense(layers.relu(layers.dense(layers.layer_norm(x), 2048)), 512)
        return layers.layer_norm(x)

    encoded = stack(table, 1)
    decoded = stack(table + encoded, 2)
    return layers.dense(layers.sequence_mean(decoded), 32128)


IMAGES = Network(resnet50, (1, 3, 64, 64), 1000)
SENTENCE = Network(minilm, (1, 32), 384, tokens=30522)
TEXT = Network(t5, (1, 16), 32128, tokens=32128)


class Reader(ort.CalibrationDataReader):
    def __init__(self, network: Network):
        random = np.random.default_rng(1)
        shape = network.shape
        self.batches = iter([{"x": random.normal(size=shape).astype("f")} for _ in range(8)])

    def get_next(self):
        return next(self.batches, None)


def static(style: ort.QuantFormat) -> Callable[[Path, Path, Network], None]:
    def convert(source: Path, path: Path, network: Network) -> None:
        ort.shape_inference.quant_pre_process(str(source), str(path.with_suffix(".pre.onnx")))
        ort.quantize_static(
            str(path.with_suffix(".pre.onnx")),
            str(path),
            Reader(network),
            quant_format=style,
            per_channel=True,
        )

    return convert


def dynamic(source: Path, path: Path, network: Network) -> None:
    ort.quantize_dynamic(str(source), str(path), weight_type=ort.QuantType.QInt8)


def half(source: Path, path: Path, network: Network) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), path)


FILES = {
    "resnet50-qdq": (IMAGES, static(ort.QuantFormat.QDQ)),
    "resnet50-qlinear": (IMAGES, static(ort.QuantFormat.QOperator)),
    "t5-dynamic": (TEXT, dynamic),
    "minilm-dynamic": (SENTENCE, dynamic),
    "resnet50-float16": (IMAGES, half),
    "minilm-float16": (SENTENCE, half),
}


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def measure(name: str, folder: Path, rounds: int) -> list[str]:
    network, convert = FILES[name]
    paths = {kind: folder / f"{network.build.__name__}-{kind}.onnx" for kind in ("float32", name)}
    if not paths["float32"].exists():
        write(network, paths["float32"])
    if not paths[name].exists():
        convert(paths["float32"], paths[name], network)
    x = batch(network)[0]
    calls, outputs = [], []
    for path in paths.values():
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(str(path), options)
        model = jaxonnx.load(path)
        calls += [lambda model=model: jax.block_until_ready(model(x))]
        calls += [lambda session=session: session.run(None, {"x": x})[0]]
        outputs += [np.asarray(calls[-2]()), calls[-1]()]
    for call in calls:
        call()
    times = np.array([[cpu_seconds(call) for call in calls] for _ in range(rounds)])
    plain, plain_ort, ours, theirs = 1e3 * times.min(axis=0)
    apart = np.abs(outputs[2] - outputs[3]).max() / np.ptp(outputs[3])
    figures = f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}", f"{apart:.1e}"
    return [name, *figures, f"{plain:.2f}", f"{plain / plain_ort:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", choices=FILES, nargs="+", default=[*FILES])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where to keep the files")
    options = parser.parse_args()
    heads = ("file", "jaxonnx, ms", "onnxruntime, ms", "ratio", "apart", "float32, ms", "ratio")
    table = Table(*heads, title="CPU time of a call, batch 1")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.files:
            row = measure(name, options.folder or Path(folder), options.rounds)
            print(*row, flush=True)
            table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
