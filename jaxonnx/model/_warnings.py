"""The sentences of `Model.warnings`."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from onnx import ModelProto

from jaxonnx._graph import exporter_hints
from jaxonnx._graph.types import find_without_gradient
from jaxonnx._io import records
from jaxonnx._io.save import training_nodes
from jaxonnx._rewrite.network import Network
from jaxonnx._text import list_some
from jaxonnx.quantization import describe_integers


def describe_file(model: Network) -> Iterator[str]:
    """Describe the traits of a file that matter before it is run or trained."""
    program = model.program
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        types = {np.dtype(t) for t in (np.int64, np.uint64, np.float64)}
        wide = [value.name for value in model.outputs if value.dtype in types]
        if wide:
            yield (
                f"64-bit outputs ({', '.join(wide)}) are computed and returned in 32 bits; set "
                "jax_enable_x64 for the exact types"
            )
    if program.draws(training=True):
        yield "random operators: pass rng=jax.random.key(...), or they draw the same numbers always"
    active = training_nodes(model.proto.graph)
    if active:
        yield (
            f"exported in training mode: {list_some(active, '')}; apply and save use inference "
            "semantics"
        )
    drops = any(node.op.name == "Dropout" for node in program.train(program.graph).nodes)
    yield from exporter_hints.notes(model.proto.graph, drops)
    yield from describe_integers(program.graph, model.tensors)
    yield from filter(None, (_gradient_warning(model), _record_warning(model.proto)))


def _gradient_warning(model: Network) -> str:
    """Return a warning of parameters that no gradient reaches; "" if there are none."""
    names = () if model.program.adapts else model.params
    frozen = [f"'{name}'" for name in find_without_gradient(model.graph, names)]
    trained = [f"'{name}'" for name in model.params if f"'{name}'" not in frozen]
    if not frozen:
        return ""
    return (
        f"no output has a gradient with respect to {list_some(frozen)}, as none has behind "
        "operators on integers: training leaves them as they are, and trains "
        f"{list_some(trained) or 'nothing'}"
    )


def _record_warning(proto: ModelProto) -> str:
    """Return a warning that the record of sparse weights is malformed; "" if it is not."""
    if not records.has(proto, records.SPARSITY):
        return ""
    from jaxonnx._io import packed  # only a file with a record imports `jaxonnx.sparse`

    why = packed.damage(proto)
    return why and (
        f"{why}: no weight counts as sparse, and files keep the record as it is; "
        "model.with_sparsity(None) drops it, jaxonnx.sparse.record(model) writes a new one"
    )
