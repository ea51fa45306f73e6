"""What a user of a model should know: types, random operators, what its exporter did to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxonnx._file.save import training_nodes
from jaxonnx._graph import exports
from jaxonnx._rewrite import dequantize as integers

if TYPE_CHECKING:
    from jaxonnx.model._model import Model


def warnings(model: Model) -> Iterator[str]:
    """Sentences for `Model.warnings`."""
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        types = {np.dtype(t) for t in (np.int64, np.uint64, np.float64)}
        wide = [value.name for value in model.outputs if value.dtype in types]
        if wide:
            yield (
                f"64-bit outputs ({', '.join(wide)}) are computed and returned in 32 bits; set "
                "jax_enable_x64 for the exact types"
            )
    if any(what == "key" for node in model.graph.nodes for _, what in node.op.context):
        yield "random operators: pass rng=jax.random.key(...), or they draw the same numbers always"
    active = training_nodes(model.proto.graph)
    if active:
        yield (
            f"exported in training mode: {', '.join(active)}; apply and save use inference "
            "semantics"
        )
    drops = any(node.op.name == "Dropout" for node in model.graph.nodes)
    yield from exports.notes(model.proto.graph, drops)
    yield from integers.notes(model.graph, model.tensors)
