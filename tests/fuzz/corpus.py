"""The models that are mutated: ONNX's own suite, the cases of the operators, and tests/data."""

import importlib
import pkgutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx.backend.test
import onnx.parser
from onnx import ModelProto
from onnx.backend.test.loader import load_node_model_tests

from tests.support.paths import DATA

LARGEST = 30_000
"""Bytes of a model: mutations of small ones are quick, and hit what matters."""
NUMBERS = 2_000
"""In its inputs."""

WRITTEN = [
    """<ir_version: 10, opset_import: ["": 21, "f": 1], metadata_props: ["jaxonnx.sparsity":
     "{\\"weights\\": {\\"w\\": {\\"pattern\\": \\"2:4\\", \\"transposable\\": true,
     \\"axes\\": [1, 0]}}}"]>
    functions (float[n, 4] x) => (y)
    <float[4, 4] w = {1, 2, 0, 0, 0, 0, 3, 4, 5, 6, 0, 0, 0, 0, 7, 8}> {
        a = MatMul(x, w)
        b = f.outer <slope = 0.5> (a)
        y = f.inner <slope = 0.25> (b)
    }
    <domain: "f", opset_import: ["": 21]> inner <slope> (x) => (y) {
        y = LeakyRelu <alpha: float = @slope> (x)
    }
    <domain: "f", opset_import: ["": 21, "f": 1]> outer <slope> (x) => (z) {
        one = Constant <value = float[4] {1, 2, 3, 4}> ()
        y = f.inner <slope: float = @slope> (x)
        z = Add(y, one)
    }""",
    """<ir_version: 10, opset_import: ["": 21], metadata_props: ["jaxonnx.image":
     "{\\"labels\\": [\\"a\\", \\"b\\"], \\"scale\\": 255, \\"mean\\": [0.5], \\"std\\": [0.5]}"]>
    control (float[2, 3] x, int64 count, bool flag) => (y, z, c)
    <int64[2] shape = {3, -1}, bool true = {1}> {
        r = Reshape(x, shape)
        y = If(flag) <then_branch = yes () => (a) { a = Relu(r) },
                      else_branch = no () => (b) { b = Neg(r) }>
        c, z = Loop(count, true, x) <body = once (int64 i, bool go, float[2, 3] v)
            => (bool on, float[2, 3] w, float[2, 3] s) {
                on = Identity(go)
                w = Add(v, x)
                s = Mul(w, x)
            }>
    }""",
]


class Seed(NamedTuple):
    """A model, and values that its inputs may have (none if they are not known)."""

    name: str
    model: bytes
    inputs: tuple[Any, ...] = ()


def seeds() -> list[Seed]:
    """Return all small models, each once, in the same order every time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite computes its data, overflow included
        listed = [*_suite(), *_operators(), *_files()]
    listed += [Seed(t.split("(")[0], _parsed(t)) for t in WRITTEN]
    unique = {seed.model: seed for seed in listed if len(seed.model) <= LARGEST}
    fits = lambda value: not isinstance(value, np.ndarray) or value.size <= NUMBERS  # noqa: E731
    return [seed for seed in unique.values() if all(map(fits, seed.inputs))]


def _parsed(text: str) -> bytes:
    return onnx.parser.parse_model(text).SerializeToString()


def _suite() -> Iterator[Seed]:
    for case in load_node_model_tests():
        inputs, _ = case.data_sets[0]
        plain = not any(hasattr(value, "SerializeToString") for value in inputs)
        yield Seed(case.name, case.model.SerializeToString(), tuple(inputs) if plain else ())
    folder = Path(onnx.backend.test.__file__).parent / "data"
    for path in sorted(folder.glob("*/*/model.onnx")):
        yield Seed(path.parent.name, path.read_bytes())


def _operators() -> Iterator[Seed]:
    """Yield the oldest and the newest version of each case of `tests/ops/cases`."""
    import tests.ops.cases

    for module in pkgutil.iter_modules(tests.ops.cases.__path__):
        for case in importlib.import_module(f"tests.ops.cases.{module.name}").CASES:
            versions = case.versions()
            for version in {versions[0], versions[-1]}:
                model: ModelProto = case.model(version)
                values = tuple(value for value in case.inputs if value is not None)
                yield Seed(f"{case.op} {case.id}", model.SerializeToString(), values)


def _files() -> Iterator[Seed]:
    for path in sorted(DATA.rglob("*.onnx")):
        yield Seed(path.stem, path.read_bytes())
