"""The exported training step in stock onnxruntime: does it train the same, and how quickly?

    python -m benchmarks.speed.export_step [--networks lenet mlp] [--rounds 7]
                                     [--ort-python PYTHON] [--sim-python PYTHON]
    python -m benchmarks.speed.export_step --agree 100 [--networks lenet mlp] [--frozen]

Times and peak memory are those of `python -m benchmarks`, of the systems that train an ONNX file:
jaxonnx, its exported step in onnxruntime, onnxruntime-training 1.19.2 (its own interpreter:
`--ort-python`) and onnxsim's loop (`--sim-python`).

With `--agree` jaxonnx and onnxruntime train side by side on handwritten digits, a new batch at
each step: in float64, which shows that they are the same training, and in float32, beside what two
runs of jaxonnx differ by whose first weights differ in the last bit, and by how far jaxonnx itself
is from float64. Shown are the first step whose losses differ by more than 1e-5, the largest
relative difference of losses, that of the last step, and the largest of weights, relative to the
largest of their tensor.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import __main__ as networks
from benchmarks.networks import NETWORKS
from benchmarks.speed.agreement import agreement
from benchmarks.systems import LEARNING_RATE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", choices=NETWORKS, default=[*NETWORKS], nargs="+")
    parser.add_argument("--agree", type=int, help="steps to train side by side")
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam", help="of --agree")
    parser.add_argument("--rate", type=float, help="of --agree")
    parser.add_argument("--frozen", action="store_true", help="statistics of the file in --agree")
    options, rest = parser.parse_known_args()
    if options.agree is None:
        systems = ["jaxonnx", "exported", "onnxruntime-training", "onnxsim"]
        absent = [
            a
            for flag, a in zip(("--ort-python", "--sim-python"), systems[2:], strict=True)
            if not any(r.startswith(flag) for r in rest)
        ]
        chosen = [system for system in systems if system not in absent]
        sys.argv[1:] = ["--networks", *options.networks, "--phases", "train", *rest]
        sys.argv += ["--systems", *chosen]
        networks.main()
        return
    import optax

    optimizer = {
        "adam": optax.adam(options.rate or LEARNING_RATE),
        "sgd": optax.sgd(options.rate or 1e-2, momentum=0.9),
    }
    columns = ("network", "compared", "above 1e-5 at", "losses", "last loss", "weights")
    table = Table(*columns)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            chosen = optimizer[options.optimizer]
            for what, d in agreement(
                name, Path(folder), options.agree, chosen, options.frozen
            ).items():
                numbers = (f"{x:.1e}" for x in (d.worst, d.last, d.weights))
                row = name, what, "never" if d.first is None else str(d.first), *numbers
                table.add_row(*row)
                print(*row, sep=" | ", file=sys.stderr, flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
