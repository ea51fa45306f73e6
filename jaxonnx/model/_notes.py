"""Warnings for the user of a model: types, random operators, what its exporter did to it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from onnx import GraphProto

from jaxonnx._file.save import training_nodes
from jaxonnx._graph import exports
from jaxonnx._graph.values import Value
from jaxonnx._rewrite import dequantize as integers
from jaxonnx._run.program import Program


def warnings(
    proto: GraphProto, program: Program, tensors: Mapping[str, Any], outputs: Sequence[Value]
) -> Iterator[str]:
    """Yield the sentences of `Model.warnings`."""
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        types = {np.dtype(t) for t in (np.int64, np.uint64, np.float64)}
        wide = [value.name for value in outputs if value.dtype in types]
        if wide:
            yield (
                f"64-bit outputs ({', '.join(wide)}) are computed and returned in 32 bits; set "
                "jax_enable_x64 for the exact types"
            )
    if program.draws(training=True):
        yield "random operators: pass rng=jax.random.key(...), or they draw the same numbers always"
    active = training_nodes(proto)
    if active:
        yield (
            f"exported in training mode: {', '.join(active)}; apply and save use inference "
            "semantics"
        )
    nodes = program.graph.nodes
    drops = any(node.op.name == "Dropout" or program.overlay.added(node) for node in nodes)
    yield from exports.notes(proto, drops)
    yield from integers.notes(program.graph, tensors)
