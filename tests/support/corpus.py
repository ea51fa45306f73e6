"""The files of `tests/data` through every change of a Model, as digests of what comes out.

    python -m tests.support.corpus before.json                        before a change of the code
    python -m tests.support.corpus --against before.json              and after it: 1 if any changed
    python -m tests.support.corpus --stored                           writes what a test compares

A digest of the structure of a saved file holds on every machine: nodes, attributes, names, types,
shapes and metadata. So does one of the file's bytes where a change computes no number that it
writes (`EXACT`). Other bytes, outputs and gradients hold on one machine with one JAX, where two
checkouts are compared bit for bit.
"""

import argparse
import hashlib
import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from onnx import ModelProto, TensorProto

import jaxonnx
from tests.support.paths import DATA

STORED = DATA / "corpus.json"
FILES = sorted(path for path in DATA.rglob("*.onnx") if path.parent.name != "ort")
PAIRS = (
    "digits.training.onnx",
    "llm/builder/llama.onnx",
    "lstm.legacy.onnx",
    "families/onnxruntime_static_int8.onnx",
)
"""Files that go through two changes, in every order."""
Inputs = dict[str, np.ndarray]


@cache
def load(path: Path) -> jaxonnx.Model:
    return jaxonnx.load(path)


def make_inputs(model: jaxonnx.Model) -> Inputs:
    """Make two rows of normal numbers, of small integers, and of ones for masks."""
    random, inputs = np.random.default_rng(0), {}
    for value in model.inputs:
        shape = tuple(size if isinstance(size, int) else 2 for size in value.shape or ())
        if "mask" in value.name:
            array = np.ones(shape)
        elif value.dtype is not None and value.dtype.kind in "iub":
            array = np.arange(np.prod(shape)).reshape(shape) % 5
        else:
            array = random.normal(size=shape)
        inputs[value.name] = array.astype(value.dtype or np.float32)
    return inputs


def middle(model: jaxonnx.Model) -> str:
    """The name of an inner value: the first output of the node in the middle of the file."""
    nodes = model.proto.graph.node
    return nodes[len(nodes) // 2].output[0]


def move(values: Mapping[str, Any]) -> dict[str, Any]:
    """Move each tensor a little, to numbers that do not depend on the processor."""
    return {
        n: jax.numpy.asarray(np.asarray(x) + np.asarray(0.125, x.dtype)) for n, x in values.items()
    }


def attach(model: jaxonnx.Model, **settings: Any) -> jaxonnx.Model:
    """Attach adapters whose changes are not zero."""
    new = jaxonnx.LoRA(rank=2, **settings).attach(model, jax.random.key(0))
    return new.replace(params=move(new.params))


def quantize(model: jaxonnx.Model, scheme: Any) -> jaxonnx.Model:
    return jaxonnx.quantize(model, [tuple(make_inputs(model).values())], scheme)


def train_rounded(model: jaxonnx.Model, **settings: Any) -> jaxonnx.Model:
    """Prepare quantization-aware training, whose ranges and scales are trained."""
    scheme = jaxonnx.Quantization(**settings)
    rounded = quantize(model, scheme)
    step = jaxonnx.training.step(
        rounded, lambda outputs, targets: 0.0, optax.sgd(0.1), quantize=scheme, epochs=2
    )
    return step.model


def prune(model: jaxonnx.Model) -> jaxonnx.Model:
    return model.replace(
        params=jaxonnx.sparse.prune(model.params, **model.sparsity_options())
    ).with_sparsity()


def read_tokens(model: jaxonnx.Model) -> jaxonnx.Model:
    """The decoder that `train` makes of one with caches: whole sequences, logits of all steps."""
    return jaxonnx.training.step(model, "causal_lm", optax.sgd(0.1)).model


def fix_first(model: jaxonnx.Model) -> jaxonnx.Model:
    name, value = next(iter(make_inputs(model).items()))
    return model.with_fixed_inputs({name: value})


CHANGES: dict[str, Callable[[jaxonnx.Model], jaxonnx.Model]] = {
    "as loaded": lambda model: model,
    "moved values": lambda model: model.replace(params=move(model.params)),
    "no caches": lambda model: model.without_cache(),
    "read tokens": read_tokens,
    "fixed input": fix_first,
    "batch axis": lambda model: model.with_batch_axis(),
    "any batch": lambda model: model.with_any_batch(),
    "inner output": lambda model: model.with_outputs([middle(model)]),
    "head": lambda model: model.with_head(5),
    "then": lambda model: model.then(jax.nn.softmax, outputs=["probabilities"]),
    "trainable": lambda model: model.with_trainable([*model.params][:2]),
    "dropout": lambda model: model.with_dropout({middle(model): 0.5}),
    "frozen statistics": lambda model: model.with_statistics("frozen"),
    "remat": lambda model: model.with_remat(),
    "LoRA": attach,
    "DoRA": lambda model: attach(model, dora=True),
    "int8": lambda model: quantize(model, "int8"),
    "int4 weights": lambda model: quantize(
        model, jaxonnx.Quantization(weights="int4", activations=None)
    ),
    "trained scales": lambda model: train_rounded(model, learn="scales"),
    "moving ranges": lambda model: train_rounded(model, learn="ranges"),
    "float weights": lambda model: model.with_float_weights(),
    "2:4": prune,
}
"""Every public change of a Model, by name."""
FORMS = {"LoRA": ("merged", "nodes", "inputs"), "DoRA": ("merged", "nodes")}
"""The forms in which a changed model is saved, where there are several."""
EXACT = frozenset(CHANGES) - {
    *("any batch", "head", "then", "LoRA", "DoRA", "int8", "int4 weights"),
    *("trained scales", "moving ranges", "2:4"),
}
"""Changes after which a file has the same bytes on every machine."""
SLOW = {"any batch", "head", "LoRA", "DoRA", "int8", "trained scales", "moving ranges", "2:4"}
"""Changes that compile many programs: what is stored has each with one file in `SHARE`."""
SHARE = 5


def digest(*parts: Any) -> str:
    """Hash texts, bytes and arrays."""
    total = hashlib.sha256()
    for part in parts:
        if not isinstance(part, str | bytes):
            array = np.asarray(part)
            part = f"{array.dtype}{array.shape}".encode() + array.tobytes()
        total.update(part.encode() if isinstance(part, str) else part)
    return total.hexdigest()[:16]


def strip_values(proto: ModelProto) -> ModelProto:
    """Return a file without the numbers of its tensors."""
    bare = ModelProto()
    bare.CopyFrom(proto)

    def strip(tensor: TensorProto) -> None:
        for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data"):
            tensor.ClearField(field)

    graphs = [bare.graph]
    while graphs:
        graph = graphs.pop()
        for tensor in graph.initializer:
            strip(tensor)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    strip(attribute.t)
                graphs += [attribute.g] if attribute.HasField("g") else attribute.graphs
    return bare


def save(model: jaxonnx.Model, change: str, *, bits: bool) -> Iterator[tuple[str, str]]:
    """Yield the digests of the files of a model."""
    for form in FORMS.get(change, (None,)):
        try:
            proto = model.to_onnx(adapters=form)
        except jaxonnx.Error as error:
            yield f"file {form or ''}".strip(), type(error).__name__
            continue
        parts = {"structure": strip_values(proto)} | ({"bytes": proto} if bits else {})
        for part, file in parts.items():
            yield f"{part} {form or ''}".strip(), digest(file.SerializeToString(deterministic=True))


def evaluate(model: jaxonnx.Model) -> Iterator[tuple[str, str]]:
    """Yield the digests of outputs, in inference and training, and of gradients."""
    inputs = make_inputs(model)
    try:
        outputs = model(**inputs)
    except jaxonnx.Error as error:
        yield "outputs", type(error).__name__
        return
    leaves = jax.tree.leaves(outputs)
    yield "outputs", digest(*leaves)

    def loss(params):
        outputs, state = model.apply_train(params, model.state, jax.random.key(1), **inputs)
        floats = [y for y in jax.tree.leaves(outputs) if jax.numpy.issubdtype(y.dtype, np.floating)]
        return sum((y.astype(np.float32) ** 2).sum() for y in floats) + 0.0, (outputs, state)

    if not model.params:
        return
    try:
        gradients, aside = jax.jit(jax.grad(loss, has_aux=True))(model.params)
    except jaxonnx.Error as error:
        yield "training", type(error).__name__
        return
    yield "training", digest(*jax.tree.leaves(aside))
    yield "gradients", digest(*(gradients[name] for name in sorted(gradients)))


def describe(
    path: Path, changes: tuple[str, ...], *, bits: bool, runs: bool = False
) -> dict[str, str]:
    """Return the digests of a file behind changes, or the type of error that one ends with.

    Args:
      bits: whether to digest the bytes of saved files, beside their structure.
      runs: whether to digest outputs and gradients.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = load(path)
            for name in changes:
                model = CHANGES[name](model)
        except jaxonnx.Error as error:
            return {"refused": type(error).__name__}
        result = dict(save(model, changes[-1], bits=bits))
        return result | (dict(evaluate(model)) if runs else {})


def digest_for_all(path: Path, change: str) -> str:
    """Return a digest of a saved file that holds on every machine, or the type of an error."""
    parts = describe(path, (change,), bits=change in EXACT)
    return parts.get("refused") or digest(json.dumps(parts))[:8]


def stored_cases() -> Iterator[tuple[Path, str]]:
    """Yield the files and changes whose digests are stored."""
    for path in FILES:
        name = str(path.relative_to(DATA))
        for change in CHANGES:
            if change not in SLOW or zlib.crc32(f"{name} {change}".encode()) % SHARE == 0:
                yield path, change


def store_digests() -> None:
    """Write what the tests compare: by file and change, without what is "as loaded"."""
    stored: dict[str, dict[str, str]] = {}
    for path, change in stored_cases():
        if (name := str(path.relative_to(DATA))) not in stored:
            jax.clear_caches()
        row = stored.setdefault(name, {})
        result = digest_for_all(path, change)
        if result != row.get("as loaded"):
            row[change] = result
    STORED.write_text(json.dumps(stored, indent=0) + "\n")


def cases() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield each file with each change, and some with every two."""
    for path in FILES:
        yield from ((path, (name,)) for name in CHANGES)
        if str(path.relative_to(DATA)) in PAIRS:
            yield from ((path, pair) for pair in permutations([*CHANGES][1:], 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--only", default="", help="a part of the paths of files")
    options = parser.parse_args()
    if options.stored:
        return store_digests()
    before = json.loads(options.against.read_text()) if options.against else {}
    results: dict[str, dict[str, str]] = {}
    last, changed = None, 0
    for path, changes in cases():
        name = str(path.relative_to(DATA))
        if options.only not in name:
            continue
        if path != last:
            jax.clear_caches()
            last = path
        key = " | ".join((name, *changes))
        results[key] = describe(path, changes, bits=True, runs=True)
        if before and results[key] != before.get(key):
            changed += 1
            print(f"{key}: {before.get(key)} -> {results[key]}", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
    refused = sum("refused" in row for row in results.values())
    print(f"{len(results)} cases, {refused} refused, {changed} changed")
    if changed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
