"""Linear models of ai.onnx.ml, whose numbers are attributes, as Gemm with weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from jaxonnx._io.protos import defined_names, opset_of, unused_name
from jaxonnx._rewrite.network import Network, with_file
from jaxonnx.errors import InputError

N = TypeVar("N", bound=Network)

_OPERATORS = ("LinearRegressor", "LinearClassifier")
_OLDEST = 9
"""The opset from which on all nodes that are written take these types."""
_TRANSFORMS = {b"NONE": "Identity", b"LOGISTIC": "Sigmoid", b"SOFTMAX": "Softmax"}


def open_linear_models(model: N) -> N:
    """Replace each LinearRegressor and LinearClassifier by a Gemm, whose weights are parameters.

    Outputs keep their names and types; the label is an ArgMax and a Gather of the class labels. The
    weights are called by the node, or by its last output.

    Raises:
      InputError: the main graph has no such node; its opset is too old; or a transform of scores
        has no operator in ONNX.
    """
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    if not any(_is_linear(node) for node in proto.graph.node):
        raise InputError("linear_as_gemm=True: the file has no LinearRegressor or LinearClassifier")
    if opset_of(proto) < _OLDEST:
        raise InputError(
            f"linear_as_gemm=True: the opset of the file is {opset_of(proto)}: pass opset={_OLDEST}"
        )
    writer = _Writer(proto)
    nodes: list[NodeProto] = []
    for node in proto.graph.node:
        nodes += writer.rewrite(node) if _is_linear(node) else [node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    for name, value in (writer.params | writer.constants).items():
        is_text = value.dtype == object
        kind = TensorProto.STRING if is_text else helper.np_dtype_to_tensor_dtype(value.dtype)
        proto.graph.initializer.add(name=name, data_type=kind, dims=value.shape)
    return with_file(model, proto, writer.constants, writer.params)


def _is_linear(node: NodeProto) -> bool:
    return node.domain == "ai.onnx.ml" and node.op_type in _OPERATORS


class _Writer:
    """The nodes and tensors that replace linear models."""

    def __init__(self, proto: ModelProto):
        self.params: dict[str, np.ndarray] = {}
        self.constants: dict[str, np.ndarray] = {}
        self._used = {*defined_names(proto.graph)}
        graph = onnx.shape_inference.infer_shapes(proto).graph
        values = (*graph.input, *graph.value_info)
        self._types = {value.name: value.type.tensor_type for value in values}

    def rewrite(self, node: NodeProto) -> list[NodeProto]:
        """Return the nodes in the place of a linear model."""
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        *label, scores = node.output
        stem = node.name or scores
        transform = attributes.get("post_transform", b"NONE")
        classes = [
            *attributes.get("classlabels_ints", ()),
            *attributes.get("classlabels_strings", ()),
        ]
        weight, bias, is_binary = self._read_weights(node, attributes, len(classes))
        # onnxruntime ignores these of one score, which the specification has applied
        ignored = transform != b"NONE" and len(weight) == 1
        if transform not in _TRANSFORMS or (
            ignored and not (is_binary and transform == b"LOGISTIC")
        ):
            raise InputError(
                f"linear_as_gemm=True: {node.op_type} '{stem}' has the transform "
                f"{transform.decode()} of {len(weight)} scores, for which there is no operator: "
                "export it with NONE"
            )
        nodes: list[NodeProto] = []

        def write(operator: str, inputs: list[str], name: str, **more: Any) -> str:
            output = unused_name(f"{stem}/{name}", self._used)
            nodes.append(helper.make_node(operator, inputs, [output], output, **more))
            return output

        x, declared = node.input[0], self._types.get(node.input[0])
        if declared is None or declared.elem_type != TensorProto.FLOAT:
            x = write("Cast", [x], "cast", to=TensorProto.FLOAT)
        if declared is None or len(declared.shape.dim) != 2:
            rows = self._add(f"{stem}/rows", np.array([-1, weight.shape[1]]))
            x = write("Reshape", [x, rows], "matrix")
        inputs = [x, self._add(f"{stem}.weight", weight, is_param=True)]
        if bias is not None:
            inputs.append(self._add(f"{stem}.bias", bias, is_param=True))
        raw = write("Gemm", inputs, "scores", transB=1)
        if any(label):
            index = self._write_index(write, raw, stem, is_binary)
            labels = np.array(classes, np.int64 if "classlabels_ints" in attributes else object)
            names = [self._add(f"{stem}/classes", labels), index]
            nodes.append(helper.make_node("Gather", names, label[:1], label[0], axis=0))
        if is_binary and transform == b"NONE":
            unit = self._add(f"{stem}/unit", np.array([1], np.float32))
            raw = write("Concat", [write("Sub", [unit, raw], "other"), raw], "both", axis=1)
        elif is_binary:
            raw = write("Concat", [write("Neg", [raw], "other"), raw], "both", axis=1)
        more: dict[str, Any] = {"axis": 1} if transform == b"SOFTMAX" else {}
        end = helper.make_node(_TRANSFORMS[transform], [raw], [scores], stem, **more)
        return [*nodes, end]

    def _write_index(self, write: Any, raw: str, stem: str, is_binary: bool) -> str:
        """Write the index of the class of each row."""
        if not is_binary:
            return write("ArgMax", [raw], "index", axis=1, keepdims=0)
        zero = self._add(f"{stem}/zero", np.array([0], np.float32))
        positive = write("Greater", [raw, zero], "positive")
        column = write("Cast", [positive], "column", to=TensorProto.INT64)
        flat = self._add(f"{stem}/flat", np.array([-1]))
        return write("Reshape", [column, flat], "index")

    def _read_weights(
        self, node: NodeProto, attributes: Mapping[str, Any], classes: int
    ) -> tuple[np.ndarray, np.ndarray | None, bool]:
        """Return weight [rows, features] and bias [rows], and whether one score is for two classes.

        Raises:
          InputError: the number of coefficients does not fit.
        """
        coefficients = np.array(attributes.get("coefficients", ()), np.float32)
        bias = np.array(attributes.get("intercepts", ()), np.float32)
        rows = classes or attributes.get("targets", 1)
        declared = self._types.get(node.input[0])
        dims = [] if declared is None else [*declared.shape.dim]
        features = dims[-1].dim_value if dims else 0
        is_binary = classes == 2 and (len(coefficients) == features if features else len(bias) == 1)
        rows = 1 if is_binary else rows
        if not len(coefficients) or len(coefficients) % rows or len(bias) not in (0, rows):
            raise InputError(
                f"linear_as_gemm=True: {node.op_type} '{node.name}' has {len(coefficients)} "
                f"coefficients and {len(bias)} intercepts for {rows} scores"
            )
        return coefficients.reshape(rows, -1), bias if len(bias) else None, is_binary

    def _add(self, name: str, value: np.ndarray, *, is_param: bool = False) -> str:
        name = unused_name(name, self._used)
        (self.params if is_param else self.constants)[name] = value
        return name
