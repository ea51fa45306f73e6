"""The file of a network in a newer opset.

ONNX's converter (1.23) does most of it. It leaves out how four operators changed their meaning, and
gives bounds and paddings a type of its own; these are written here, before and after it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import onnx
import onnx.inliner
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from jaxonnx._io.protos import (
    all_nodes,
    all_tensors,
    opset_of,
    subgraphs,
    tensor_of_constant,
    unused_name,
)

ELSEWHERE = "not.onnx"
"""The domain of operators that the opset of a file does not have."""
_TYPED = {"Clip": (1, 2), "Pad": (2,)}
"""Inputs that were attributes, which the converter writes as float32, whatever is clipped."""


def to_opset(proto: ModelProto, opset: int) -> ModelProto:
    """Return a file in a newer opset, with its functions inlined; its subgraphs are converted, too.

    Operators of other domains stay as they are, and so do those that runtimes take in opsets that
    do not have them: LayerNormalization before 17, and onnxruntime's own in ONNX's domain, like
    SimplifiedLayerNormalization of its builder.

    Raises:
      RuntimeError, ValueError: the converter does not take the file.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    if not {"", "ai.onnx"} & {entry.domain for entry in proto.opset_import}:
        result.opset_import.add(domain="", version=opset)  # of ai.onnx.ml alone, as trees are
        return result
    bodies = [(result.graph, result.opset_import), *((f, f.opset_import) for f in result.functions)]
    for body, imports in bodies:
        old = opset_of(body if isinstance(body, FunctionProto) else result)
        _rewrite(body, old, opset)
        for node in all_nodes(body):
            if not node.domain and not onnx.defs.has(node.op_type, max_inclusive_version=old):
                node.domain = ELSEWHERE
        imports.add(domain=ELSEWHERE, version=1)
    result = onnx.version_converter.convert_version(inline(result), opset)
    for node in all_nodes(result.graph):
        if node.domain == ELSEWHERE:
            node.ClearField("domain")
    del result.opset_import[[x.domain for x in result.opset_import].index(ELSEWHERE)]
    _retype(result.graph, {})
    return result


def inline(proto: ModelProto) -> ModelProto:
    """Return a file with its functions inlined, in its own opset; the converter drops functions."""
    if not proto.functions:
        return proto
    typed = onnx.shape_inference.infer_shapes(proto)  # functions are converted by types of values
    typed.graph.value_info.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in proto.graph.initializer
    )
    return onnx.inliner.inline_local_functions(typed, convert_version=True)


def _rewrite(body: GraphProto | FunctionProto, old: int, new: int) -> None:
    """Write nodes that change their meaning between two opsets so that they keep it, in place."""
    rules = {name: rule for name, (since, rule) in _CHANGES.items() if old < since <= new}
    nodes = [*all_nodes(body)]
    if not any(node.op_type in rules for node in nodes):
        return
    tensors = {tensor.name: tensor for tensor in all_tensors(body)}
    constants = ((node, tensor_of_constant(node)) for node in nodes)
    tensors |= {node.output[0]: value for node, value in constants if value is not None}
    used = {name for node in nodes for name in (*node.input, *node.output)} | tensors.keys()
    fresh = partial(unused_name, used=used)

    def replace(graph: GraphProto | FunctionProto) -> None:
        replaced: list[NodeProto] = []
        for node in graph.node:
            for inner in subgraphs(node):
                replace(inner)
            rule = None if node.domain not in ("", "ai.onnx") else rules.get(node.op_type)
            replaced += [node] if rule is None else rule(node, tensors, fresh)
        del graph.node[:]
        graph.node.extend(replaced)

    replace(body)


def _resize(
    node: NodeProto, tensors: Mapping[str, TensorProto], fresh: Callable[[str], str]
) -> list[NodeProto]:
    """Say where opset 10 and before read: at j / scale, rounded down, or up where it shrinks.

    Where some axes of "nearest" grow and others shrink, or scales are not known, two nodes resize.
    """
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    y, constants = node.output[0], []

    def constant(name: str, value: object) -> str:
        tensor = numpy_helper.from_array(np.asarray(value, np.float32))
        constants.append(helper.make_node("Constant", [], [fresh(f"{y}/{name}")], value=tensor))
        return constants[-1].output[0]

    factors: Sequence[float] | None
    if len(node.input) > 1:
        scales = node.input[1]
        factors = numpy_helper.to_array(tensors[scales]).tolist() if scales in tensors else None
    else:
        sides = (attributes.get(f"{side}_scale", 1) for side in ("height", "width"))
        factors = attributes.get("scales", [1, 1, *sides])
        scales = constant("scales", factors)
    mode, roi = attributes.get("mode", b"nearest"), constant("roi", [])
    mode = mode.replace(b"bilinear", b"linear")

    def resize(x: str, scales: str, y: str, name: str, nearest: str) -> NodeProto:
        return helper.make_node(
            "Resize",
            [x, roi, scales],
            [y],
            name,
            domain=ELSEWHERE,
            coordinate_transformation_mode="asymmetric",
            mode=mode,
            nearest_mode=nearest,
        )

    shrinks = factors is None or min(factors, default=1) < 1
    grows = factors is None or max(factors, default=1) > 1
    if mode != b"nearest" or not (shrinks and grows):
        nearest = "ceil" if mode == b"nearest" and shrinks else "floor"
        return [*constants, resize(node.input[0], scales, y, node.name, nearest)]
    smaller, bounds = fresh(f"{y}/smaller"), []
    if factors is None:
        unit, down, up = constant("one", 1), fresh(f"{y}/down"), fresh(f"{y}/up")
        bounds = [
            helper.make_node(op, [scales, unit], [z]) for op, z in (("Min", down), ("Max", up))
        ]
    else:
        down, up = constant("down", np.minimum(factors, 1)), constant("up", np.maximum(factors, 1))
    return [
        *constants,
        *bounds,
        resize(node.input[0], down, smaller, f"{node.name}/shrink", "ceil"),
        resize(smaller, up, y, node.name, "floor"),
    ]


def _hardmax(node: NodeProto, _: object, fresh: Callable[[str], str]) -> list[NodeProto]:
    """Flatten all axes from `axis` on to one, as opset 12 and before did."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    if axis == -1:
        return [node]
    (x, *_), (y, *_) = node.input, node.output
    rows, largest, shape = (fresh(f"{y}/{name}") for name in ("rows", "largest", "shape"))
    return [
        helper.make_node("Flatten", [x], [rows], axis=axis),
        helper.make_node("Hardmax", [rows], [largest], node.name, axis=1),
        helper.make_node("Shape", [x], [shape]),
        helper.make_node("Reshape", [largest, shape], [y]),
    ]


def _group_norm(node: NodeProto, _: object, fresh: Callable[[str], str]) -> list[NodeProto]:
    """Write scales and biases of groups as those of an InstanceNormalization of groups."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    (x, *affine), (y, *_) = node.input, node.output
    groups, unit, shape, sizes = (fresh(f"{y}/{n}") for n in ("groups", "unit", "shape", "sizes"))
    into = numpy_helper.from_array(np.array([0, attributes.pop("num_groups"), -1]))
    return [
        helper.make_node("Constant", [], [sizes], value=into),
        helper.make_node("Reshape", [x, sizes], [groups]),
        helper.make_node(
            "InstanceNormalization", [groups, *affine], [unit], node.name, **attributes
        ),
        helper.make_node("Shape", [x], [shape]),
        helper.make_node("Reshape", [unit, shape], [y]),
    ]


_CHANGES = {
    "Upsample": (11, _resize),
    "Resize": (11, _resize),
    "Hardmax": (13, _hardmax),
    "GroupNormalization": (21, _group_norm),
}
"""The opset that gives an operator another meaning, and how a node of before is written in it."""


def _retype(graph: GraphProto, types: Mapping[str, int]) -> None:
    """Give bounds and paddings that were attributes the type of the values they are for."""
    values = (*graph.input, *graph.value_info, *graph.output)
    types = {**types, **{v.name: v.type.tensor_type.elem_type for v in values}}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    constants = {
        node.output[0]: value for node in graph.node if (value := tensor_of_constant(node))
    }
    for node in graph.node:
        for inner in subgraphs(node):
            _retype(inner, types)
        kind = types.get(node.input[0]) if node.op_type in _TYPED else None
        if not kind:
            continue
        for position in _TYPED[node.op_type]:
            value = constants.get(node.input[position]) if position < len(node.input) else None
            if value is not None and value.data_type == TensorProto.FLOAT != kind:
                dtype = helper.tensor_dtype_to_np_dtype(kind)
                with np.errstate(over="ignore"):  # the least float32, which bounds nothing
                    array = numpy_helper.to_array(value).astype(dtype)
                value.CopyFrom(numpy_helper.from_array(array))
