"""ONNX's backend interface, so that ONNX's own test runner drives jaxonnx.

Types are exactly those of the specification: 64-bit types are on during a call, whatever the
setting of the caller. Training flags of the file are followed.

`python -m jaxonnx.backend [PATTERN ...]` runs ONNX's suite, or the cases whose names match, and
prints the counts of the backend scoreboard (github.com/onnx/backend-scoreboard).
"""

import re
import sys
import unittest
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from onnx import ModelProto, NodeProto, helper
from onnx.backend.base import Backend, BackendRep, Device, DeviceType, namedtupledict

from jaxonnx.model import Model, load


class Rep(BackendRep):
    """A prepared model: `run` takes the inputs in order or by name and returns NumPy values."""

    def __init__(self, model: Model):
        self.model: Model = model

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        model = self.model
        if not isinstance(inputs, Mapping):
            inputs = dict(zip((value.name for value in model.inputs), inputs, strict=False))
        with jax.enable_x64(True):
            arrays = {name: _array(value) for name, value in inputs.items()}
            results = model.program(model.params, model.state, None, arrays, training=None)
            results = tuple(jax.tree.map(np.asarray, result) for result in results)
        return namedtupledict("Outputs", [value.name for value in model.outputs])(*results)


class JaxBackend(Backend):
    """The backend; the functions of this module are its class methods."""

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> Rep:
        """Load a model."""
        with jax.enable_x64(True):
            return Rep(load(model))

    @classmethod
    def run_model(
        cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any
    ) -> tuple[Any, ...]:
        """Load a model and run it once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run a single node; `opset_imports` (ids) may say which operator sets are meant."""
        names = [name for name in node.input if name]
        if isinstance(inputs, Mapping):
            inputs = [inputs[name] for name in names]
        infos = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in zip(names, map(np.asarray, inputs), strict=True)
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = helper.make_graph([node], "node", infos, outputs)
        options = {k: v for k, v in kwargs.items() if k == "opset_imports"}
        return cls.run_model(helper.make_model(graph, **options), inputs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Check whether JAX has this kind of device here."""
        kind = Device(device).type
        if kind == DeviceType.CPU:
            return True
        return kind == DeviceType.CUDA and any(d.platform == "gpu" for d in jax.devices())


def _array(value: Any) -> Any:
    """Convert to an array, strings to one of objects; sequences and maps stay as they are."""
    if not isinstance(value, np.ndarray | np.generic):
        return value
    return np.asarray(value, object) if value.dtype.kind in "USO" else np.asarray(value)


prepare: Callable[..., Rep] = JaxBackend.prepare
run_model: Callable[..., tuple[Any, ...]] = JaxBackend.run_model
run_node: Callable[..., tuple[Any, ...]] = JaxBackend.run_node
supports_device: Callable[[str], bool] = JaxBackend.supports_device
is_compatible: Callable[..., bool] = JaxBackend.is_compatible


def main(patterns: Sequence[str] = ()) -> None:
    """Run ONNX's suite on the CPU; print the counts, and the names of cases that fail.

    Args:
      patterns: regular expressions of names of cases; all cases without them.
    """
    import onnx.backend.test

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite computes its own data, with overflows
        cases = onnx.backend.test.BackendTest(JaxBackend, __name__).test_cases
        print(f"{'cases':<38}{'passed':>8}{'failed':>8}{'skipped':>8}")
        failed: list[str] = []
        for name, case in cases.items():
            chosen = [
                case(label)
                for label in unittest.defaultTestLoader.getTestCaseNames(case)
                if not label.endswith("_cuda")
                and any(re.search(pattern, label) for pattern in patterns or ("",))
            ]
            result = unittest.TestResult()
            unittest.TestSuite(chosen).run(result)
            broken = [test.id().rpartition(".")[2] for test, _ in result.failures + result.errors]
            skipped = len(result.skipped)
            passed = result.testsRun - len(broken) - skipped
            print(f"{name:<38}{passed:>8}{len(broken):>8}{skipped:>8}")
            failed += broken
    print(*failed, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
