"""A quantized file as it is trained: its weights in floating point, in front of their rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx._network import Network
from jaxonnx._rewrite.moving_ranges import remove_schedule
from jaxonnx._rewrite.qoperators import has_quantized_operators, open_operators
from jaxonnx._rewrite.quantize import unfold
from jaxonnx.model._transforms import with_file
from jaxonnx.ops.common import element_dtype
from jaxonnx.ops.contrib.moving_ranges import DOMAIN, range_parameters

M = TypeVar("M", bound=Network)


def open_quantized(model: M) -> tuple[M, int]:
    """Return a quantized model whose integer weights and biases are parameters in floating point.

    Operators on integers are opened, too. The file is written as before.

    Returns:
      The model, and the number of the parameters.
    """
    proto, added, opened = open_operators(model.proto, model.tensors)
    model = with_file(model, proto, added)
    proto, floats, points = unfold(model.proto, model.graph, model.tensors, opened)
    return with_computed(model, proto, points, floats), len(floats)


def is_quantized(model: Network) -> bool:
    """Check whether a model has integer weights behind DequantizeLinear or in operators on them."""
    stored = {name for name, x in model.tensors.items() if np.dtype(x.dtype).kind not in "fcb"}
    return has_quantized_operators(model.proto.graph) or any(
        node.op.name == "DequantizeLinear" and node.inputs[0] in stored
        for node in model.graph.nodes
    )


def with_computed(
    model: M, proto: ModelProto, constants: Any, params: Any, state: Mapping[str, Any] | None = None
) -> M:
    """Return the model of a file in which nodes compute some of its tensors from new ones."""
    own = {name: jnp.asarray(x) for name, x in (state or {}).items()}
    before, after = (
        {name for node in one.graph.node for name in node.output} for one in (model.proto, proto)
    )
    rest = dataclasses.replace(
        model,
        state={n: x for n, x in model.state.items() if n not in after - before} | own,
        program=dataclasses.replace(
            model.program,
            constants={n: x for n, x in model.program.constants.items() if n not in after - before},
        ),
    )
    net: Any = with_file(rest, proto, {**constants, **params})
    kept = [name for name in model.params if name in net.tensors]
    chosen = {*kept, *params}
    net = net.with_trainable(lambda name, _: name in chosen)
    return dataclasses.replace(net, params={n: net.params[n] for n in (*kept, *params)})


def without_schedule(model: M) -> M:
    """Return a model whose rounding follows no schedule, with the scales that its ranges give."""
    if all(entry.domain != DOMAIN for entry in model.proto.opset_import):
        return model
    proto, moved = remove_schedule(model.proto)
    state = {**model.state}
    for one in moved:
        limits = (state[name] for name in (one.low, one.high))
        symmetric = not one.zero_point
        scale, point = range_parameters(*limits, element_dtype(one.type), symmetric)
        state |= {one.scale: scale} if symmetric else {one.scale: scale, one.zero_point: point}
    net = with_file(dataclasses.replace(model, state=state), proto)
    # those of adapters are not in the graph
    return dataclasses.replace(net, params=model.params)
