"""What the operators that read matrices in few bits dequantize them with."""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.uses import uses
from jaxonnx.errors import ModelError

SCALES: Mapping[tuple[str, int], tuple[int, int]] = {
    ("DequantizeLinear", 0): (1, 2),
    ("DynamicQuantizeMatMul", 1): (2, 3),
    ("GatherBlockQuantized", 0): (2, 3),
    ("MatMulBnb4", 1): (2, -1),
    ("MatMulIntegerToFloat", 1): (3, 5),
    ("MatMulNBits", 1): (2, 3),
    ("QMoE", 2): (3, 11),
    ("QMoE", 5): (6, 12),
    ("QMoE", 8): (9, 13),
}
"""By operator and input of a weight: the inputs with its scales and zero points; -1: none."""


def check_stored(graph: Graph, tensors: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise a ModelError if what dequantizes one of the named weights is damaged.

    Scales and zero points in floating point must be finite, an index of groups within them.
    """
    for use in uses(graph, tensors):
        if use.name not in names or not use.is_direct:
            continue
        node = use.node
        for position, name in enumerate(node.inputs):
            value = tensors.get(name)
            if value is None or name == use.name:
                continue
            value = np.asarray(value)
            if jnp.issubdtype(value.dtype, jnp.floating) and not np.isfinite(value).all():
                raise ModelError(f"{node.label}: '{name}' has numbers that are not finite")
            if node.op.name == "MatMulNBits" and position == 4 and value.size:
                count = -(-node.attributes["K"] // node.attributes["block_size"])
                if value.min() < 0 or value.max() >= count:
                    worst = max(int(value.max()), -int(value.min()))
                    raise ModelError(
                        f"{node.label}: '{name}' has group {worst}, and there are {count} groups"
                    )
