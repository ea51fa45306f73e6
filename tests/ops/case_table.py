"""One table for all operators: listed in `tests/ops/cases`, run by `test_operators.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, TypeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from jaxonnx._graph.bind import bind
from jaxonnx._io.formats import read
from jaxonnx._run.program import Program
from jaxonnx.registry import Op, lookup

RUNTIME_OPSETS = range(7, 27)
"""What the installed onnxruntime implements in the default domain."""


@dataclass(frozen=True, eq=False)
class Case:
    """An operator on inputs; None stands for an omitted one.

    Attributes:
      since, until: the case is run on each schema version in this range.
      expected: what to compare with: "reference" (onnx.reference), "ort" (onnxruntime), or a
        function of the inputs.
      grad: positions of the inputs that have a gradient; all floating ones if None.
      order: of the derivatives that are checked by finite differences.
      jit, vmap: whether the case can be compiled, and batched, with its inputs traced.
    """

    op: str
    inputs: Sequence[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    domain: str = ""
    since: int = 1
    until: int | None = None
    expected: str | Callable[..., Any] = "reference"
    grad: Sequence[int] | None = None
    order: int = 2
    jit: bool = True
    vmap: bool = True
    rtol: float = 1e-5
    atol: float = 1e-6
    id: str = ""

    def versions(self) -> list[int]:
        """The versions of the operator's schema that the case is run on."""
        return [
            version
            for version in schema_versions().get((self.domain, self.op), [self.since])
            if self.since <= version <= (self.until or 10**6)
        ]

    def operator(self, version: int) -> Op:
        found = lookup(self.domain, self.op, version)
        assert found is not None, f"{self.op} of opset {version} has no implementation"
        return found

    def model(self, version: int, inputs: Sequence[Any] | None = None) -> ModelProto:
        """A model of this one node."""
        inputs = self.inputs if inputs is None else inputs
        names = [f"x{i}" if value is not None else "" for i, value in enumerate(inputs)]
        results = [f"y{i}" for i in range(self.outputs)]
        attributes = {
            name: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
            for name, value in self.attributes.items()
        }
        node = helper.make_node(self.op, names, results, domain=self.domain, **attributes)
        infos = [
            helper.make_value_info(name, type_of(value))
            for name, value in zip(names, inputs, strict=True)
            if name
        ]
        opsets = [helper.make_opsetid(self.domain, version)]
        if self.domain:
            opsets.append(helper.make_opsetid("", 17))
        outputs = [helper.make_empty_tensor_value_info(name) for name in results]
        graph = helper.make_graph([node], "case", infos, outputs)
        return helper.make_model(graph, opset_imports=opsets, ir_version=onnx.IR_VERSION)

    def function(self, version: int, inputs: Sequence[Any] | None = None) -> Callable[..., tuple]:
        """The node as a function of its inputs, evaluated by jaxonnx."""
        proto, tensors, _ = read(self.model(version, inputs))
        program = Program(bind(proto, proto.graph, tensors.keys()), tensors)

        def call(*values: Any) -> tuple:
            given = {f"x{i}": v for i, v in enumerate(values) if v is not None}
            return program.evaluate({}, {}, given)

        return call

    @cache  # noqa: B019 - cases live as long as the process
    def wanted(self, version: int) -> tuple:
        """The expected outputs, which forward, compiled and batched results are compared with."""
        if callable(self.expected):
            results = self.expected(*self.inputs)
            return results if isinstance(results, tuple) else (results,)
        given = {f"x{i}": v for i, v in enumerate(self.inputs) if v is not None}
        model = self.model(version)
        if self.expected == "reference":
            return tuple(ReferenceEvaluator(model).run(None, given))
        return run_onnxruntime(model, given)


def run_onnxruntime(model: ModelProto, given: Mapping[str, Any]) -> tuple:
    """The outputs of onnxruntime, with the model relabelled to what that knows."""
    relabelled = ModelProto()
    relabelled.CopyFrom(model)
    relabelled.ir_version = min(model.ir_version, 10)
    for entry in relabelled.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = min(max(entry.version, RUNTIME_OPSETS.start), RUNTIME_OPSETS.stop - 1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        relabelled.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return tuple(session.run(None, dict(given)))


def type_of(value: Any) -> TypeProto:
    """The ONNX type of a NumPy value; lists are sequences."""
    if isinstance(value, list):
        return helper.make_sequence_type_proto(type_of(value[0]))
    value = np.asarray(value)
    kind = (
        onnx.TensorProto.STRING
        if value.dtype.kind in "OUS"
        else helper.np_dtype_to_tensor_dtype(value.dtype)
    )
    return helper.make_tensor_type_proto(kind, value.shape)


@cache
def schema_versions() -> dict[tuple[str, str], list[int]]:
    """All versions of every schema, deprecated ones too, by domain and name."""
    versions: dict[tuple[str, str], list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        versions.setdefault((schema.domain, schema.name), []).append(schema.since_version)
    return {key: sorted(found) for key, found in versions.items()}


def is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and jax.dtypes.issubdtype(value.dtype, np.floating)
