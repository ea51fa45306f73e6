"""Tokens a second of `Model.generate` beside those of onnxruntime-genai, on the same folders.

    python -m benchmarks.speed.generate [--hidden 512] [--layers 8] [--vocabulary 2048] [--room 64]
        [--prompt 32] [--precisions fp32 int4] [--rounds 9] [--folder FOLDER]   # test-llm

A Llama with random weights, written by onnxruntime-genai's builder in float32 and in 4 bits, or a
folder of that builder, each of whose tokens is a piece of text. Both continue a prompt greedily by
64 tokens, in turn, in one process, with caches that have room for `--room` new tokens; the
first token, which fills the caches, is timed apart, and so is the first call, which compiles.
Printed are medians of a step, and median and quartiles of the ratio of each pair: the time of a
token of jaxonnx divided by that of onnxruntime-genai.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import jaxonnx
from benchmarks.speed.lora import VOCABULARY, write

NEW = 64


def time_genai(runtime, prompt: np.ndarray, room: int) -> tuple[float, float]:
    """Return the seconds to the first token, and of each further one, by onnxruntime-genai."""
    import onnxruntime_genai as genai

    settings, length = genai.GeneratorParams(runtime), len(prompt) + room
    settings.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator, start = genai.Generator(runtime, settings), time.perf_counter()
    generator.append_tokens(prompt.astype(np.int32))
    generator.generate_next_token()
    first = time.perf_counter()
    for _ in range(NEW - 1):
        generator.generate_next_token()
    return first - start, (time.perf_counter() - first) / (NEW - 1)


def time_jaxonnx(model: jaxonnx.Model, prompt: np.ndarray, room: int) -> tuple[float, float]:
    """Return the same by `Model.generate`."""
    start = time.perf_counter()
    pieces = model.generate(prompt, max_new_tokens=room, stop=[], stream=True)
    next(pieces)
    first = time.perf_counter()
    for _ in range(NEW - 1):
        next(pieces)
    end = time.perf_counter()
    pieces.close()
    return first - start, (end - first) / (NEW - 1)


def main() -> None:
    import onnxruntime_genai as genai

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--room", type=int, default=NEW)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "int4"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="of the builder, instead of a new Llama")
    options = parser.parse_args()
    prompt = np.random.default_rng(0).integers(2, options.vocabulary, options.prompt)
    with tempfile.TemporaryDirectory() as place:
        folders = [options.folder]
        if options.folder is None:
            size = options.hidden, options.layers, options.precisions, options.vocabulary
            write(Path(place), *size)
            folders = [Path(place, precision) for precision in options.precisions]
        for folder in folders:
            model, runtime = jaxonnx.load(folder), genai.Model(str(folder))
            calls = (time_genai, runtime), (time_jaxonnx, model)
            rounds = [
                [call(x, prompt, options.room) for call, x in calls]
                for _ in range(options.rounds + 1)
            ]
            (peer_first, peer), (first, ours) = np.moveaxis(np.array(rounds[1:]), 0, 2)
            low, middle, high = np.quantile(ours / peer, (0.25, 0.5, 0.75))
            print(
                f"{folder.name}: a token in {1e3 * np.median(ours):.2f} ms, onnxruntime-genai "
                f"{1e3 * np.median(peer):.2f} ms; ratio {middle:.2f} ({low:.2f} to {high:.2f}); "
                f"the first {1e3 * np.median(first):.0f} ms, {1e3 * np.median(peer_first):.0f} ms; "
                f"that of the first call {rounds[0][1][0]:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
