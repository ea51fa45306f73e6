"""Write windows and axes as onnxruntime needs them next to convolutions of integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from onnx import NodeProto, helper

from jaxonnx._io.protos import Editor
from jaxonnx._rewrite.network import Network, with_file
from jaxonnx._run.shapes import evaluate_shapes

N = TypeVar("N", bound=Network)

_WITH_AXES = ("Pad", "Resize", "CenterCropPad")


def spell_out(model: N) -> N:
    """Replace nodes that onnxruntime (1.32) gets wrong around integers by equal ones.

    Its default session moves transposes across Pad, Resize and CenterCropPad between integer
    convolutions, and permutes pads, scales and sizes as if `axes` were absent: these get a number
    for each axis. Its QLinearAveragePool counts places beyond the image where `ceil_mode` and
    `count_include_pad` meet, and refuses `dilations`: the latter are left out if they are 1, and
    `count_include_pad` where there is no padding (`find_sites` leaves other such nodes in floating
    point). Nodes whose axes or rank are not known stay as they are, and so does a Resize that keeps
    the aspect ratio of some axes.
    """
    writer = _Writer(model)
    for node in [*writer.graph.node]:
        if node.domain in ("", "ai.onnx") and node.op_type == "AveragePool":
            writer.spell_pool(node)
        elif node.domain in ("", "ai.onnx") and node.op_type in _WITH_AXES:
            writer.spell_axes(node)
    if not writer.changed:
        return model
    return with_file(model, writer.finish(), writer.added)


class _Writer(Editor):
    """Rewrites nodes of a copy of a model's file.

    Attributes:
      changed: whether a node was rewritten.
    """

    def __init__(self, model: Network):
        super().__init__(model.proto, model.tensors)
        self.changed = False
        self._model, self._tensors = model, model.tensors

    def spell_pool(self, node: NodeProto) -> None:
        """Drop dilations of 1, and `count_include_pad` from an AveragePool without padding."""
        attributes = _attributes(node)
        if "dilations" in attributes and {*attributes["dilations"]} == {1}:
            self._drop(node, "dilations")
        padded = attributes.get("auto_pad", b"NOTSET") != b"NOTSET" or any(
            attributes.get("pads", ())
        )
        if "count_include_pad" in attributes and not padded:
            self._drop(node, "count_include_pad")

    def spell_axes(self, node: NodeProto) -> None:
        """Give a Pad, Resize or CenterCropPad its numbers for all axes, where those are known."""
        attributes, inputs = _attributes(node), [*node.input, "", "", "", ""]
        axes = self._tensors.get(inputs[3]) if node.op_type == "Pad" else attributes.get("axes")
        if axes is None or attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            return
        if node.op_type == "CenterCropPad":
            axes = np.asarray(axes, np.int64)
            inputs[1] = self._scatter(node, self._add("Shape", node, inputs[:1]), axes, inputs[1])
            self._drop(node, "axes")
        else:
            shape = self._find_shape(inputs[0])
            if shape is None:
                return
            rank = len(shape)
            axes = np.asarray(axes, np.int64).reshape(-1) % rank
            ends = np.concatenate([axes, axes + rank])
            if node.op_type == "Pad":
                inputs[1] = self._scatter(node, np.zeros(2 * rank, np.int64), ends, inputs[1])
                inputs[3] = ""
            else:
                whole = np.repeat(np.array([0, 1], np.float32), rank)
                inputs[1] = self._scatter(node, whole, ends, inputs[1])
                inputs[2] = self._scatter(node, np.ones(rank, np.float32), axes, inputs[2])
                sizes = self._add("Shape", node, inputs[:1]) if inputs[3] else ""
                inputs[3] = self._scatter(node, sizes, axes, inputs[3])
                self._drop(node, "axes")
        while not inputs[-1]:
            inputs.pop()
        node.input[:] = inputs
        self.changed = True

    def _find_shape(self, name: str) -> Sequence[Any] | None:
        """Find the shape of a value, None if its rank is not known."""
        model = self._model
        shapes = model.graph.recall(
            ("shapes",), lambda: evaluate_shapes(model.proto, model.graph, self._tensors)
        )
        value = None if shapes is None else shapes.values.get(name)
        return None if value is None else value.shape

    def _scatter(self, node: NodeProto, base: Any, places: np.ndarray, numbers: str) -> str:
        """Return the name of `base`, an array or the name of a value, with `numbers` at places."""
        if not numbers:
            return ""
        constant = self._tensors.get(numbers)
        if constant is not None and not constant.size:  # an absent roi or absent scales
            return numbers
        if constant is not None and isinstance(base, np.ndarray):
            base = base.astype(constant.dtype)
            base[places] = constant
            return self._store(node, base)
        base = base if isinstance(base, str) else self._store(node, base)
        return self._add("ScatterElements", node, [base, self._store(node, places), numbers])

    def _store(self, node: NodeProto, value: Any) -> str:
        return self.add_tensor(self.unused_name(f"{node.output[0]}_numbers"), value)

    def _add(self, op: str, node: NodeProto, inputs: Sequence[str]) -> str:
        output = self.unused_name(f"{node.output[0]}_{op}")
        return self.add_node(op, inputs, output, output)

    def _drop(self, node: NodeProto, *attributes: str) -> None:
        rest = [part for part in node.attribute if part.name not in attributes]
        del node.attribute[:]
        node.attribute.extend(rest)
        self.changed = True


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {part.name: helper.get_attribute_value(part) for part in node.attribute}
