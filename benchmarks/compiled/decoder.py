"""The full training step of a decoder, compiled for a device: jaxonnx beside hand-written Flax.

    python -m benchmarks.compiled.decoder --for tpu-v5e [--hidden 256] [--layers 4]
    python -m benchmarks.compiled.decoder --for cpu --vocabulary 151936    # memory
    python -m benchmarks.compiled.decoder --for cpu --time 20

The file has the nodes of onnxruntime-genai's builder: packed GroupQueryAttention with rotary
positions, SkipSimplifiedLayerNormalization, a gated perceptron. The Flax module is what one writes
by hand, with `jax.nn.dot_product_attention`. Both take an AdamW step on next tokens. Counted is
what `benchmarks.compiled` counts, and the fusions of the program; `--time` runs both in turn.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

import jaxonnx
from benchmarks.compiled import programs

VOCABULARY, HEAD = 2048, 64


def tables(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines of rotary positions, each [length, HEAD / 2]."""
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(0, HEAD, 2) / HEAD)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def decoder(hidden: int, layers: int, length: int, vocabulary: int = VOCABULARY) -> jaxonnx.Model:
    """Return a decoder as onnxruntime-genai's builder writes it, with random weights."""
    random, inner, heads = np.random.default_rng(0), hidden * 11 // 128 * 32, hidden // HEAD
    tensors: dict[str, np.ndarray] = dict(zip(("cos", "sin"), tables(length), strict=True))
    tensors |= {"axis": np.array([1], np.int64), "one": np.array([1], np.int32)}
    nodes = []

    def weight(name, *shape):
        scale = shape[0] ** -0.5 if len(shape) > 1 else 0
        made = random.normal(size=shape) * scale + (len(shape) == 1)
        tensors[name] = made.astype(np.float32)
        return name

    def node(kind, inputs, output, domain="", extra=(), **attributes):
        nodes.append(helper.make_node(kind, inputs, [output, *extra], domain=domain, **attributes))
        return output

    node("Cast", ["attention_mask"], "mask", to=TensorProto.INT32)
    node("Sub", [node("ReduceSum", ["mask", "axis"], "count", keepdims=0), "one"], "lengths")
    node("ReduceMax", ["count"], "total", keepdims=0)
    x = node("Gather", [weight("embed", vocabulary, hidden), "input_ids"], "x")
    h = node("SimplifiedLayerNormalization", [x, weight("0.norm1", hidden)], "0.h", epsilon=1e-6)
    skip = partial(node, "SkipSimplifiedLayerNormalization", domain="com.microsoft", epsilon=1e-6)
    for i in range(layers):
        qkv = node("MatMul", [h, weight(f"{i}.qkv", hidden, 3 * hidden)], f"{i}.qkv.y")
        inputs = [qkv, "", "", "", "", "lengths", "total", "cos", "sin"]
        sizes = {"num_heads": heads, "kv_num_heads": heads, "do_rotary": 1}
        y = node("GroupQueryAttention", inputs, f"{i}.a", "com.microsoft", **sizes)
        y = node("MatMul", [y, weight(f"{i}.o", hidden, hidden)], f"{i}.o.y")
        h = skip([x, y, weight(f"{i}.norm2", hidden)], f"{i}.h2", extra=("", "", f"{i}.x2"))
        gate = node("MatMul", [h, weight(f"{i}.gate", hidden, inner)], f"{i}.gate.y")
        up = node("MatMul", [h, weight(f"{i}.up", hidden, inner)], f"{i}.up.y")
        gate = node("Mul", [gate, node("Sigmoid", [gate], f"{i}.sigmoid")], f"{i}.silu")
        both = node("Mul", [gate, up], f"{i}.both")
        y = node("MatMul", [both, weight(f"{i}.down", inner, hidden)], f"{i}.down.y")
        last = weight(f"{i + 1}.norm1", hidden)
        h = skip([f"{i}.x2", y, last], f"{i + 1}.h", extra=("", "", f"{i + 1}.x"))
        x = f"{i + 1}.x"
    node("MatMul", [h, weight("head", hidden, vocabulary)], "logits")
    info = helper.make_tensor_value_info
    tokens = [info(n, TensorProto.INT64, ["n", "t"]) for n in ("input_ids", "attention_mask")]
    logits = info("logits", TensorProto.FLOAT, ["n", "t", vocabulary])
    known = [numpy_helper.from_array(x, name) for name, x in tensors.items()]
    graph = helper.make_graph(nodes, "decoder", tokens, [logits], known)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return jaxonnx.load(helper.make_model(graph, opset_imports=opsets, ir_version=10))


class Decoder(linen.Module):
    """The same decoder in Flax."""

    hidden: int
    layers: int
    vocabulary: int

    @linen.compact
    def __call__(self, ids):
        heads, inner = self.hidden // HEAD, self.hidden * 11 // 128 * 32
        dense = partial(linen.Dense, use_bias=False)
        norm = partial(linen.RMSNorm, epsilon=1e-6)
        cos, sin = (t[:, None] for t in tables(ids.shape[1]))

        def rotate(x):
            a, b = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        x = linen.Embed(self.vocabulary, self.hidden)(ids)
        for _ in range(self.layers):
            qkv = dense(3 * self.hidden)(norm()(x)).reshape(*ids.shape, 3, heads, HEAD)
            q, k, v = (qkv[:, :, i] for i in range(3))
            y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x = x + dense(self.hidden)(y.reshape(x.shape))
            h = norm()(x)
            x = x + dense(self.hidden)(linen.silu(dense(inner)(h)) * dense(inner)(h))
        return dense(self.vocabulary)(norm()(x))


def ours(options: argparse.Namespace, place: Any):
    """Return the step of `jaxonnx.train` and its arguments."""
    from jaxonnx.training import Batch
    from jaxonnx.training._settings import Settings
    from jaxonnx.training._step.build import build_step

    model = decoder(options.hidden, options.layers, options.sequence, options.vocabulary)
    settings = Settings(loss="causal_lm", optimizer=optax.adamw(1e-3))
    platform = None if place is None else place.platform
    step = build_step(model, settings, 1, 1, platform=platform)
    state = step.init() if place is None else jax.eval_shape(step.init)
    ids = _tokens(options)
    batch = Batch((ids, jnp.ones_like(ids)), ids, jnp.ones(len(ids)))
    return step.update, state, batch, step.frozen


def flax(options: argparse.Namespace, place: Any):
    """Return the step by hand and its arguments."""
    net, optimizer, ids = (
        Decoder(options.hidden, options.layers, options.vocabulary),
        optax.adamw(1e-3),
        _tokens(options),
    )

    def init():
        params = net.init(jax.random.key(0), ids)
        return params, optimizer.init(params)

    def update(state, ids):
        def loss(params):
            logits: Any = net.apply(params, ids)
            rows = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
            return rows.mean()

        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return update, jax.jit(init)() if place is None else jax.eval_shape(init), ids


SYSTEMS = {"jaxonnx": ours, "Flax": flax}


def _tokens(options: argparse.Namespace) -> jax.Array:
    shape = options.batch, options.sequence
    return jnp.asarray(np.random.default_rng(0).integers(0, options.vocabulary, shape), jnp.int32)


def count(options: argparse.Namespace) -> dict[str, Any]:
    """Compile a step of one system and count."""
    place = programs.device(options.target)
    update, *arguments = SYSTEMS[options.one](options, place)
    compiled = programs.compiled(update, place, *arguments, donated=(0,))
    cost, text = compiled.cost_analysis() or {}, compiled.as_text() or ""
    more = {"GFLOP": cost.get("flops", 0) / 1e9 or None, "fusions": text.count(" fusion(")}
    return programs.counts(compiled) | more


def seconds(options: argparse.Namespace) -> dict[str, list[float]]:
    """Run both steps in turn."""
    runs, times = {}, {}
    for name, made in SYSTEMS.items():
        update, state, *rest = made(options, None)
        start = time.perf_counter()
        compiled = jax.jit(update, donate_argnums=(0,)).lower(state, *rest).compile()
        print(f"{name}: {time.perf_counter() - start:.1f} s to compile")
        runs[name], times[name] = [compiled, state, rest], []
    for _ in range(options.time):
        for name, (compiled, state, rest) in runs.items():
            start = time.perf_counter()
            state, _ = jax.block_until_ready(compiled(state, *rest))
            times[name].append(time.perf_counter() - start)
            runs[name][1] = state
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--for", dest="target", choices=programs.TARGETS, required=True)
    sizes = {"hidden": 256, "layers": 4, "sequence": 128, "batch": 8, "vocabulary": VOCABULARY}
    for name, size in (sizes | {"time": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(count(options)))
        return
    if options.time:
        times = {name: np.array(each) * 1e3 for name, each in seconds(options).items()}
        table = Table("step", "ms, least", "ms, median")
        for name, each in times.items():
            table.add_row(name, f"{each.min():.1f}", f"{np.median(each):.1f}")
    else:
        rows = {}
        for name in SYSTEMS:  # in a process of its own: XLA may abort it
            command = [sys.executable, "-m", "benchmarks.compiled.decoder", *sys.argv[1:]]
            done = subprocess.run(
                [*command, "--one", name],
                env=os.environ | programs.ENVIRONMENT,
                cwd=Path(__file__).parents[2],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            rows[name] = json.loads(done.stdout.splitlines()[-1])
        table = Table(f"step, {options.target}", *rows)
        for what in rows["Flax"]:
            cells = (row[what] for row in rows.values())
            table.add_row(what, *(f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells))
    Console().print(table)


if __name__ == "__main__":
    main()
