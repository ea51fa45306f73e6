"""Files that ask for more than there is: built here, tried by `tests/run/test_limits.py`.

`python -m tests.support.resource_bombs` tries all of them in little memory and prints what each
did, as JSON.
"""

import json
import resource
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from jaxlib.mlir.ir import MLIRError
from onnx import TensorProto, helper, numpy_helper

LIMIT = 1 << 30
"""Bytes that a value may take when a bomb is called."""

RAW = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, NotImplementedError),
    *(RuntimeError, TypeError, ValueError, MLIRError),
)
"""Errors that are not of the package."""

ROOM = 5 << 29
"""Bytes of address space that the process may take beyond those at its start."""


def node(kind, inputs, outputs=("y",), domain="", **attributes):
    return helper.make_node(kind, inputs, outputs, name="n", domain=domain, **attributes)


def model(nodes, inputs=(("x", [2]),), outputs=("y",), constants=None, functions=(), opset=21):
    """A model of float inputs; `constants` are its initializers."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), name) for name, v in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("l", 1)]
    opsets.append(helper.make_opsetid("ai.onnx.ml", 5))
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def body(nodes, count, outputs, carried=TensorProto.FLOAT):
    """A body of Loop: counter, condition and `count` carried values; its first output is a bool."""
    inputs = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        *(helper.make_tensor_value_info(f"v{k}", carried, None) for k in range(count)),
    ]
    return helper.make_graph(
        nodes, "body", inputs, [helper.make_empty_tensor_value_info(name) for name in outputs]
    )


def ints(*values):
    return np.array(values, np.int64)


IMAGE = (("x", [1, 1, 4, 4]),)
HUGE = 2**40


def one(kind, inputs=("x",), given=(("x", [2]),), constants=None, **attributes):
    return model([node(kind, inputs, **attributes)], given, constants=constants)


def refused():
    """Models whose call must be an error, by name: each with the operator that it names."""
    yield "Range", one("Range", "abc", (), {"a": 0, "b": 2**62, "c": 1})
    yield (
        "Range, float",
        one("Range", "abc", (), dict(zip("abc", np.float32([0, 1, 1e-38]), strict=True))),
    )
    yield (
        "Range, infinite",
        one("Range", "abc", (), dict(zip("abc", np.float32([0, np.inf, 1]), strict=True))),
    )
    # XLA ends the process at a constant of six bits
    for kind in (TensorProto.FLOAT6E2M3, TensorProto.FLOAT6E3M2):
        yield f"Cast, type {kind}", one("Cast", "a", (), {"a": np.float32([1, 2])}, to=kind)
        cast = [helper.make_node("Cast", ["a"], ["s"], to=kind)]
        branch = helper.make_graph(cast, "six", [], [helper.make_empty_tensor_value_info("s")])
        nodes = [
            helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BOOL),
            node("If", "b", then_branch=branch, else_branch=branch),
        ]
        yield f"If, type {kind}", model(nodes, (("x", []),), constants={"a": np.float32([1, 2])})
    yield "ConstantOfShape", one("ConstantOfShape", "a", (), {"a": ints(2**62)})
    yield "ConstantOfShape, two axes", one("ConstantOfShape", "a", (), {"a": ints(2**20, 2**20)})
    yield "Expand", one("Expand", "xa", constants={"a": ints(HUGE, 2)})
    yield "Expand, axes", one("Expand", "xa", constants={"a": ints(2**62, 2**62, 2)})
    for count in (2**38, -1, 2**62):
        yield f"Tile, {count}", one("Tile", "xr", constants={"r": ints(count)})
    yield "Tile, known", one("Tile", "ar", (), {"a": np.ones(2, np.float32), "r": ints(2**38)})
    for mode in ("constant", "edge", "reflect", "wrap"):
        yield f"Pad, {mode}", one("Pad", "xp", constants={"p": ints(HUGE, 0)}, mode=mode)
    yield "CenterCropPad", one("CenterCropPad", "xp", constants={"p": ints(HUGE)})
    on = {"d": ints(HUGE), "v": np.float32([0, 1])}
    yield "OneHot", one("OneHot", "xdv", constants=on)
    eye = [node("ConstantOfShape", ["s"], ["z"]), node("EyeLike", ["z"])]
    yield "EyeLike", model(eye, (), constants={"s": ints(2**20, 2**20)})
    scales = np.float32([1, 1, 1e12, 1e12])
    yield "Resize, scales", one("Resize", ["x", "", "s"], IMAGE, {"s": scales})
    sizes = ints(1, 1, HUGE, HUGE)
    for mode in ("nearest", "linear", "cubic"):
        yield f"Resize, {mode}", one("Resize", ["x", "", "", "s"], IMAGE, {"s": sizes}, mode=mode)
    for kind in ("HannWindow", "HammingWindow", "BlackmanWindow"):
        yield kind, one(kind, "s", (), {"s": np.array(HUGE)})
    mel = dict(zip("abcde", [*ints(8, HUGE, 16000), *np.float32([0, 8000])], strict=True))
    yield "MelWeightMatrix", one("MelWeightMatrix", "abcde", (), mel)
    yield "DFT", one("DFT", ["x", "n"], (("x", [1, 4, 1]),), {"n": np.array(HUGE)})
    yield "RandomNormal", one("RandomNormal", (), (), shape=[HUGE])
    yield "RandomUniform", one("RandomUniform", (), (), shape=[2**31, 2**31, 2**31])
    yield "Multinomial", one("Multinomial", "x", (("x", [1, 4]),), sample_size=HUGE)
    rois = {"r": np.ones((1, 4), np.float32), "b": ints(0)}
    big = {"output_height": 2**20, "output_width": 2**20}
    yield "RoiAlign", one("RoiAlign", "xrb", IMAGE, rois, **big)
    yield "RoiAlign, samples", one("RoiAlign", "xrb", IMAGE, rois, sampling_ratio=HUGE)
    rois = {"r": np.ones((1, 5), np.float32)}
    yield "MaxRoiPool", one("MaxRoiPool", "xr", IMAGE, rois, pooled_shape=[2**20, 2**20])
    for kind in ("AveragePool", "MaxPool", "LpPool"):
        wide = {"kernel_shape": [2**31, 2**31], "pads": [2**31] * 4}
        yield kind, one(kind, "x", IMAGE, **wide)
        yield f"{kind}, pads", one(kind, "x", IMAGE, kernel_shape=[10**5] * 2, pads=[99_999] * 4)
    kernel = {"w": np.ones((1, 1, 2, 2), np.float32)}
    far = {"dilations": [2**31] * 2, "pads": [2**31] * 4}
    yield "Conv", one("Conv", "xw", IMAGE, kernel, **far)
    yield "Conv, strides", one("Conv", "xw", IMAGE, kernel, strides=[2**31] * 2, pads=[2**31] * 4)
    yield "ConvTranspose", one("ConvTranspose", "xw", IMAGE, kernel, strides=[2**31] * 2)
    col = {"s": ints(2**20, 2**20), "b": ints(1, 2**20)}
    yield "Col2Im", one("Col2Im", "xsb", (("x", [1, 2**20, 4]),), col)
    yield "AffineGrid", one("AffineGrid", "ts", (("t", [1, 2, 3]),), {"s": ints(1, 1, HUGE, HUGE)})
    places = {"i": np.zeros((1, 1, 4, 4), np.int64), "s": ints(2**31, 2**31, 2**31, 1)}
    yield "MaxUnpool", one("MaxUnpool", "xis", IMAGE, places, kernel_shape=[2, 2])
    vectors = (("x", [2**16]), ("z", [2**16]))
    yield "Einsum", one("Einsum", "xz", vectors, equation="i,j->ij")
    yield "Add", one("Add", "xz", (("x", [2**16, 1]), ("z", [2**16])))
    known = {name: np.ones(2**14, np.float64) for name in "ab"}
    outer = [
        node("Einsum", ["a", "b"], ["o"], equation="i,j->ij"),
        node("Einsum", "oo", equation="ij,kl->ijkl"),
    ]
    yield "Einsum, known", model(outer, (), constants=known)
    doubling = [node("Concat", [f"v{i}"] * 2, [f"v{i + 1}"], axis=0) for i in range(40)]
    yield "Concat, doubling", model(doubling, (("v0", [2]),), ["v40"])
    yield "Concat, known", model(doubling, (), ["v40"], {"v0": np.ones(2, np.float32)})
    pieces = [
        node("ConstantOfShape", ["s"], ["z"]),
        node("SplitToSequence", ["z"], ["q"]),
        node("SequenceLength", ["q"]),
    ]
    yield "SplitToSequence", model(pieces, (), constants={"s": ints(10**8)})
    yield "TfIdfVectorizer", one(
        "TfIdfVectorizer", "x", max_gram_length=1, max_skip_count=0, min_gram_length=1, mode="TF",
        ngram_counts=[0], ngram_indexes=[HUGE], pool_int64s=[1],
    )  # fmt: skip
    doubles = body(
        [node("Concat", ["v0", "v0"], ["w"], axis=0), node("Identity", ["c"], ["d"])], 1, "dw"
    )
    yield "Loop, doubling", one("Loop", ["m", "", "x"], constants={"m": np.array(40)}, body=doubles)
    start = {"m": np.array(40), "a": np.ones(2, np.float32)}
    yield "Loop, doubling, known", one("Loop", ["m", "", "a"], (), start, body=doubles)
    grows = body([node("Concat", "vx", ["w"], axis=0), node("Identity", "c", "d")], 0, "dw")
    grows.input.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, None))
    long = {"m": np.array(2**40)}
    yield "Loop, growing", one("Loop", ["m", "", "x"], constants=long, body=grows)
    empty = {"a": np.zeros((2**20, 0), np.float32), "b": np.zeros((0, 2**20), np.float32)}
    yield "MatMul, empty", one("MatMul", "ab", (), empty)
    rows = {"a": np.zeros((0, 2**29), np.float32), "b": ints(0)}
    yield "ReduceSum, empty", one("ReduceSum", "ab", (), rows)
    pixels = (("x", [1] * 26), ("g", [1] * 25 + [24]))
    yield "GridSample, axes", one("GridSample", "xg", pixels)
    moved = {"w": np.ones([1] * 26, np.float32), "o": np.ones([1, 24] + [1] * 24, np.float32)}
    yield "DeformConv, axes", one("DeformConv", "xwo", pixels[:1], moved)
    axes = {"s": ints(*[1] * 5000, 2)}
    turned = [node("Reshape", "xs", "z"), node("Transpose", "z", "u"), node("Relu", "u")]
    yield "Reshape, axes", model(turned, constants=axes)
    wide = {"domain": "ai.onnx.ml", "inputdimensions": [HUGE]}
    yield "FeatureVectorizer", one("FeatureVectorizer", "x", **wide)
    words = {"a": np.array([","] * 20_000 + ["," * 20_000], object)}
    parts = node("StringSplit", "a", ["y", "z"], delimiter=",")
    yield "StringSplit", model([parts], (), constants=words)
    texts = [node("ConstantOfShape", "s", "z"), node("Cast", "z", to=TensorProto.STRING)]
    yield "Cast, strings", model(texts, (), constants={"s": ints(2**25)})


def lasting():
    """Models that keep Python busy for long, whose call is not tried but for its name."""
    same = body([node("Identity", ["c"], ["d"]), node("Neg", ["v0"], ["w"])], 1, "dw")
    start = {"m": np.array(10**9), "t": np.array(True), "a": np.ones(2, np.float32)}
    yield "Loop, long", one("Loop", ["m", "", "a"], (), start, body=same)
    yield "Loop, endless", one("Loop", ["", "t", "a"], (), start, body=same)
    boxes = {"b": np.random.default_rng(0).random((50, 2000, 4), np.float32) / 100, "k": ints(2000)}
    boxes["b"][..., 2:] += 0.001
    boxes["s"] = np.ones((50, 20, 2000), np.float32)
    yield "NonMaxSuppression", one("NonMaxSuppression", "bsk", (), boxes)
    long = (("x", [1, 10**7, 1]),)
    yield "STFT", one("STFT", ["x", "f", "", "l"], long, {"f": np.array(1), "l": np.array(10**6)})
    heads = [(name, [1, 1, 10**6, 8]) for name in "qkv"]
    yield "Attention", model([node("Attention", "qkv", is_causal=1)], heads, opset=23)
    yield "declared", model([node("Relu", "x")], (("x", [2**62, 2**62]),))


def fine():
    """Models that look like bombs and are none, each with the sum of its result."""
    yield (
        "Pad, turns",
        one("Pad", "xp", constants={"p": ints(10**6, 10**6)}, mode="reflect"),
        2.0 * 10**6 + 2,
    )
    skip = one(
        "TfIdfVectorizer", "x", max_gram_length=2, max_skip_count=2**62, min_gram_length=1,
        mode="TF", ngram_counts=[0, 1], ngram_indexes=[0, 1], pool_int64s=[1, 1, 1],
    )  # fmt: skip
    yield "TfIdfVectorizer, skips", skip, 3.0
    ends = {"a": ints(2**63 - 1), "b": ints(-(2**63)), "c": ints(0), "d": ints(-(2**63))}
    yield "Slice", one("Slice", "xabcd", constants=ends), 1.0
    scaled = {"q": np.ones((2, 1), np.int8), "s": np.float32([[3]])}
    block = one("DequantizeLinear", "qs", (), scaled, axis=0, block_size=HUGE)
    yield "DequantizeLinear, block", block, 6.0
    line, short = (("x", [1, 1, 2**16]),), {"s": ints(1, 1, 1)}
    far = node("Resize", ["x", "", "", "s"], ["r"], mode="cubic", antialias=1)
    yield "Resize, antialias", model([far, node("Round", "r")], line, constants=short), 1.0
    yield "Split", one("Split", "x", num_outputs=10**9), 1.0


def feed(made):
    """Ones for the inputs of a model."""
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in made.graph.input}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def tried(action):
    """What an action did: its result or its error, and the seconds that it took."""
    import jaxonnx

    start = time.monotonic()
    try:
        kind, text = "result", str(action())
    except jaxonnx.Error as error:
        kind, text = type(error).__name__, str(error)
    except RAW as error:
        kind, text = f"raw {type(error).__name__}", str(error)
    return kind, text, time.monotonic() - start


def main():
    """Print, summarize and call every bomb in little memory."""
    import jax

    import jaxonnx

    warnings.simplefilter("ignore")
    jaxonnx.load(one("Relu"))(np.ones(2, np.float32)).block_until_ready()
    jax.numpy.ones(2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    taken = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
    seen = {}
    for name, made in [*refused(), *lasting()]:
        loaded = jaxonnx.load(made, limit=LIMIT)
        seen[f"{name}: print"] = tried(lambda loaded=loaded: f"{loaded} {loaded.summary()}")
        print(name, "print", *seen[f"{name}: print"][::2], file=sys.stderr, flush=True)
    for name, made in refused():
        loaded, values = jaxonnx.load(made, limit=LIMIT), feed(made)
        seen[f"{name}: call"] = tried(
            lambda loaded=loaded, v=values: jax.block_until_ready(loaded(**v))
        )
        print(name, *seen[f"{name}: call"], file=sys.stderr, flush=True)
    for name, made, total in fine():
        loaded, values = jaxonnx.load(made, limit=LIMIT), feed(made)
        seen[f"{name}: call"] = tried(lambda loaded=loaded, v=values: float(np.sum(loaded(**v))))
        print(name, *seen[f"{name}: call"], total, file=sys.stderr, flush=True)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
