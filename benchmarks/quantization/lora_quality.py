"""What 4 bits cost a decoder that learns another style: before its adapters, or after them.

    python -m benchmarks.quantization.lora_quality     # onnxruntime and onnx_ir: its quantizer

The decoder of the notebook on language models learns the manual of Python, then the source of
Python's library, in four ways: all weights in float32; adapters on the float32 base, merged; the
same, quantized afterwards by onnxruntime's MatMulNBitsQuantizer (what people do today); and
adapters on the base that was quantized before. All matrices of the layers have 4 bits, in
blocks of 32; embedding and logits stay as they are. Each row is the loss of a token on texts of
the second style that nothing was trained on, of the model as it is saved.
"""

import argparse
import inspect
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import onnx

import jaxonnx
from jaxonnx import training
from tests.support.paths import DATA

MODULES = "argparse ast dataclasses textwrap inspect typing tarfile zipfile"
HELD_OUT = "configparser csv shlex gettext"
FOLDER = DATA / "llm" / "qwen3-genai"


def sources(names: str) -> list[dict[str, str]]:
    """Return the source of modules as rows of texts."""
    modules = map(__import__, names.split())
    return [{"text": inspect.getsource(module)} for module in modules]


def tune(model, rows, rate, epochs, seed, **settings):
    return jaxonnx.train(
        model,
        rows,
        loss="causal_lm",
        optimizer=lambda steps: training.optimizer("adam", rate, steps, schedule="cosine"),
        epochs=epochs,
        batch_size=16,
        seed=seed,
        progress=False,
        **settings,
    )


def quantize(model: jaxonnx.Model, folder: Path) -> jaxonnx.Model:
    """Return the folder of a model with the matrices of its layers in 4 bits, by onnxruntime."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model.save(folder)
    logits = [n.name for n in model.proto.graph.node if "logits" in n.output]
    quantizer = MatMulNBitsQuantizer(
        onnx.load(folder / "model.onnx"),
        block_size=32,
        is_symmetric=True,
        nodes_to_exclude=logits,
    )
    quantizer.process()
    written: Any = quantizer.model
    onnx.save(getattr(written, "model", written), folder / "model.onnx")
    return jaxonnx.load(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="of adapters and of the data's order")
    parser.add_argument("--epochs", type=int, default=6, help="of each run")
    parser.add_argument("--folder", type=Path, default=Path("lora_quality"), help="for files")
    options = parser.parse_args()
    style, held_out, start = sources(MODULES), sources(HELD_OUT), time.perf_counter()
    english = [{"text": text} for text in topics.values()]
    base = tune(jaxonnx.load(FOLDER), english, 2e-2, options.epochs, 0).model
    packed = quantize(base, options.folder / "base")

    def loss(model):
        return jaxonnx.evaluate(model, held_out, loss="causal_lm", metrics=[], batch_size=16)[
            "loss"
        ]

    print(f"before: float32 {loss(base):.4f}, 4 bits {loss(packed):.4f}", flush=True)
    rows: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        given = style, 5e-3, options.epochs, seed
        lora = jaxonnx.LoRA(rank=8, where="all-linear")
        found = {
            "all weights, float32": tune(base, *given).model,
            "adapters on float32, merged": tune(base, *given, lora=lora).model,
        }
        after = found["adapters on float32, merged"]
        found["adapters on float32, then 4 bits"] = quantize(after, options.folder / f"{seed}")
        found["adapters on 4 bits"] = tune(packed, *given, lora=lora).model
        for name, model in found.items():
            rows.setdefault(name, []).append(loss(model))
            print(
                f"{time.perf_counter() - start:.0f} s, {seed}, {name}: {rows[name][-1]:.4f}",
                flush=True,
            )
    print("\n| | loss of a token | perplexity |\n|---|---|---|")
    for name, values in rows.items():
        spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
        print(f"| {name} | {np.mean(values):.4f}{spread} | {np.exp(np.mean(values)):.3f} |")


if __name__ == "__main__":
    main()
