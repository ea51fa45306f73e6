"""Trained scales, ranges that follow the data, and rounding that begins after an epoch.

    python -m benchmarks.quantization.schedules

Each float network (eight epochs) is trained for two epochs more by each schedule. The table has the
points of accuracy lost relative to the float network, of the files in onnxruntime without graph
optimizations: mean and standard deviation over the seeds.
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import jax
import numpy as np

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import Network
from benchmarks.quantization.accuracy import NETWORKS, accuracy, load_data, train
from jaxonnx import Quantization

SCHEDULES = {
    'learn="scales"': {},
    'learn="ranges"': {"learn": "ranges"},
    'learn="scales", start=1': {"start": 1},
    'learn="ranges", start=1': {"learn": "ranges", "start": 1},
    "learn=None": {"learn": None},
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="cnn", choices=NETWORKS)
    parser.add_argument("--data", help="as in benchmarks.quantization.accuracy")
    parser.add_argument("--weights", nargs="+", default=["int8", "int4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--schedules", nargs="+", default=[*SCHEDULES], choices=SCHEDULES)
    options = parser.parse_args()
    data, test = load_data(options.network, options.data, None, 64)
    lost = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        network = Network(NETWORKS[options.network], (64, *data[0].shape[1:]), 10, 0)
        write(network, path)
        untrained = jaxonnx.load(path)
        for seed in options.seeds:
            model = untrained.reinitialize(jax.random.key(seed), ".*")
            model = train(model, data, 8, 3e-3, seed)
            model.save(path)
            whole = accuracy(path, test)
            for weights in options.weights:
                for name in options.schedules:
                    scheme = Quantization(weights=weights, **SCHEDULES[name])
                    train(model, data, 2, 3e-4, seed, quantize=scheme).save(path)
                    lost[weights, name].append(whole - accuracy(path, test))
            print(f"seed {seed}: {whole:.2f} %", flush=True)
    print("| | points lost |", "|---|---|", sep="\n")
    for (weights, name), values in lost.items():
        print(f"| {weights}, {name} | {np.mean(values):.2f} ± {np.std(values):.2f} |")


if __name__ == "__main__":
    main()
