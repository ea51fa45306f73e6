"""Tokens a second of `Model.generate` beside those of onnxruntime-genai, on the same folders.

    python -m benchmarks.speed.generate [--hidden 512] [--layers 8] [--rounds 9]   # test-llm

A Llama with random weights, written by onnxruntime-genai's builder in float32 and in 4 bits. Both
continue a prompt of 32 tokens greedily by 64, in turn, in one process; the first token, which
fills the caches, is timed apart. Printed are medians of a step, and median and quartiles of the
ratio of each pair: the tokens a second of jaxonnx by those of onnxruntime-genai.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import jaxonnx
from benchmarks.speed.lora import VOCABULARY, write

PROMPT, NEW = 32, 64


def time_genai(runtime, prompt: np.ndarray) -> tuple[float, float]:
    """Return the seconds to the first token, and of each further one, by onnxruntime-genai."""
    import onnxruntime_genai as genai

    settings = genai.GeneratorParams(runtime)
    settings.set_search_options(max_length=PROMPT + NEW, min_length=PROMPT + NEW, do_sample=False)
    generator, start = genai.Generator(runtime, settings), time.perf_counter()
    generator.append_tokens(prompt.astype(np.int32))
    generator.generate_next_token()
    first = time.perf_counter()
    for _ in range(NEW - 1):
        generator.generate_next_token()
    return first - start, (time.perf_counter() - first) / (NEW - 1)


def time_jaxonnx(model: jaxonnx.Model, prompt: np.ndarray) -> tuple[float, float]:
    """Return the same by `Model.generate`."""
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=1, stop=[])
    first = time.perf_counter() - start
    model.generate(prompt, max_new_tokens=NEW, stop=[])
    return first, (time.perf_counter() - start - 2 * first) / (NEW - 1)


def main() -> None:
    import onnxruntime_genai as genai

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    prompt = np.random.default_rng(0).integers(2, VOCABULARY, PROMPT)
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), options.hidden, options.layers, ["fp32", "int4"])
        for precision in ("fp32", "int4"):
            model = jaxonnx.load(Path(place, precision))
            runtime = genai.Model(str(Path(place, precision)))
            calls = (time_genai, runtime), (time_jaxonnx, model)
            rounds = [[call(x, prompt) for call, x in calls] for _ in range(options.rounds + 1)]
            (peer_first, peer), (first, ours) = np.moveaxis(np.array(rounds[1:]), 0, 2)
            low, middle, high = np.quantile(peer / ours, (0.25, 0.5, 0.75))
            print(
                f"{precision}: a token in {1e3 * np.median(ours):.2f} ms, onnxruntime-genai "
                f"{1e3 * np.median(peer):.2f} ms; ratio of tokens a second {middle:.2f} "
                f"({low:.2f} to {high:.2f}); the first {1e3 * np.median(first):.0f} ms, "
                f"{1e3 * np.median(peer_first):.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
