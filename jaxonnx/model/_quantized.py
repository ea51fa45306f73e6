"""Open a quantized model for training: its weights in floating point, before rounding."""

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
from jaxonnx.views import View

M = TypeVar("M", bound=Network)


def open_quantized(model: M) -> tuple[M, int]:
    """Return a quantized model whose integer weights and biases are parameters in floating point.

    Operators on integers are opened, too. The file is written as before.

    Returns:
      The model, and the number of the parameters.
    """
    proto, added, weights_of_operators = open_operators(model.proto, model.tensors)
    model = with_file(model, proto, added)
    proto, floats, points = unfold(model.proto, model.graph, model.tensors, weights_of_operators)
    return with_computed(model, proto, points, floats), len(floats)


def is_quantized(model: Network) -> bool:
    """Check whether a model has integer weights behind DequantizeLinear or in operators on them."""
    stored = {name for name, x in model.tensors.items() if np.dtype(x.dtype).kind not in "fcb"}
    return has_quantized_operators(model.proto.graph) or any(
        node.op.dequantizes and node.inputs[0] in stored for node in model.graph.nodes
    )


def with_computed(
    model: M, proto: ModelProto, constants: Any, params: Any, state: Mapping[str, Any] | None = None
) -> M:
    """Return the model of `proto`, whose nodes compute some old tensors from new ones."""
    new_state = {name: jnp.asarray(x) for name, x in (state or {}).items()}
    old, new = (
        {name for node in file.graph.node for name in node.output} for file in (model.proto, proto)
    )
    without_replaced = dataclasses.replace(
        model,
        state={n: x for n, x in model.state.items() if n not in new - old} | new_state,
        program=dataclasses.replace(
            model.program,
            constants={n: x for n, x in model.program.constants.items() if n not in new - old},
        ),
    )
    net: Any = with_file(without_replaced, proto, {**constants, **params})
    kept_params = [name for name in model.params if name in net.tensors]
    chosen = {*kept_params, *params}
    net = net.with_trainable(lambda name, _: name in chosen)
    return dataclasses.replace(net, params={n: net.params[n] for n in (*kept_params, *params)})


def without_schedule(model: M) -> M:
    """Return a model that rounds with constant scales, taken from its moving ranges."""
    if all(entry.domain != DOMAIN for entry in model.proto.opset_import):
        return model
    proto, moving_ranges = remove_schedule(model.proto)
    state = {**model.state}
    for moving in moving_ranges:
        limits = state[moving.low], state[moving.high]
        symmetric = not moving.zero_point
        scale, point = range_parameters(*limits, element_dtype(moving.type), symmetric)
        state[moving.scale] = scale
        if not symmetric:
            state[moving.zero_point] = point
    views = [view for view in model.program.views if view.stays]
    plain = dataclasses.replace(model, state=state, program=model.program.leave(View))
    net = with_file(plain, proto)
    # factors of adapters are not in the graph, so `with_file` has dropped them
    return dataclasses.replace(net, params=model.params, program=net.program.enter(*views))
