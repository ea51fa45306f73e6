"""`Network`: the tensors, the file and the graph of a loaded model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from onnx import GraphProto, ModelProto, ValueInfoProto

from jaxonnx._graph import exporter_hints
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.gradients import find_without_gradient
from jaxonnx._graph.tables import count_rows
from jaxonnx._graph.values import Value, to_value
from jaxonnx._graph.weight_names import Places
from jaxonnx._io import records
from jaxonnx._io.folders import ModelFolder
from jaxonnx._io.save import training_nodes
from jaxonnx._rewrite import dequantize as integers
from jaxonnx._rewrite.head import Head
from jaxonnx._run.program import Program
from jaxonnx._text import list_some
from jaxonnx.errors import InputError
from jaxonnx.views import View

if TYPE_CHECKING:  # a model without sparse weights does not import it
    from jaxonnx.sparse import Sparsity

N = TypeVar("N", bound="Network")


@dataclass(frozen=True, eq=False, repr=False)
class Network:
    """The data of a Model, for the rooms below `jaxonnx.model`."""

    params: dict[str, jax.Array]
    state: dict[str, jax.Array]
    proto: ModelProto = field(repr=False)
    """The file without the data of its tensors."""
    program: Program
    originals: Mapping[str, np.ndarray]
    """64-bit tensors of the file, which the 32-bit arrays of JAX cannot hold."""
    heads: tuple[Head, ...] = ()
    """The layers that `with_head` put in the place of others."""
    folder: ModelFolder | None = None
    """The folder of a language model that the file is in, if it was loaded from one."""

    @property
    def head(self) -> tuple[str, ...]:
        """The names of the tensors of new heads (`with_head`), for `trainable` and `labels`."""
        return tuple(name for head in self.heads for name in head.tensors)

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @property
    def tensors(self) -> dict[str, Any]:
        """All named tensors: parameters, state, and constants as NumPy arrays."""
        return {**self.program.constants, **self.state, **self.params}

    @cached_property
    def _places(self) -> Places:
        """The modules and nodes of the weights, and their other names."""
        return Places(self.proto.graph, self.graph, self.tensors, self.params)

    @property
    def aliases(self) -> dict[str, str]:
        """Names for weights whose exporter numbered them, by the module that reads them.

        For `onnx::MatMul_394` it is "encoder.layers.0.linear1.weight", say. It chooses the weight
        wherever a name does. The matrix of a MatMul is PyTorch's weight transposed.
        """
        return dict(self._places.aliases)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs that a call must give, in order."""
        values = self._select_values(self.proto.graph.input, {*self.graph.inputs})
        if not any(value.dtype is not None and value.dtype.kind in "iu" for value in values):
            return values
        rows = count_rows(self.graph, self.tensors)
        return tuple(replace(value, rows=rows.get(value.name)) for value in values)

    @cached_property
    def _defaults(self) -> frozenset[str]:
        """Inputs with an initializer as their default: they may be passed by name."""
        names = frozenset(v.name for v in self.proto.graph.input)
        return names.difference(self.graph.inputs, *(v.supplied_inputs for v in self.program.views))

    @cached_property
    def _input_names(self) -> frozenset[str]:
        return self._defaults.union(self.graph.inputs)

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """The outputs, in file order."""
        return self._select_values(self.proto.graph.output, {*self.graph.outputs})

    def _select_values(
        self, values: Iterable[ValueInfoProto], names: set[str]
    ) -> tuple[Value, ...]:
        """Return those of these names, as the views declare them."""
        return tuple(self._declare(to_value(v)) for v in values if v.name in names)

    def _declare(self, value: Value) -> Value:
        for view in self.program.views:
            value = view.declare(value)
        return value

    @property
    def sparsity(self) -> Sparsity | None:
        """The weights that the file records as sparse; None without a record.

        Integer weights of a quantized file are among them, although they are not parameters. A
        malformed record counts as none, and `warnings` reports it.
        """
        if not records.has(self.proto, records.SPARSITY):
            return None
        from jaxonnx._io import packed

        stored = {**self.program.constants, **self.params}
        return None if packed.damage(self.proto) else packed.find_recorded(self.proto, stored)

    @cached_property
    def _factors(self) -> frozenset[str]:
        """The tensors that the file records as factors of adapters."""
        return records.get(self.proto, records.ADAPTERS, frozenset[str]) or frozenset()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user of the model should know: about the file, and about unrolled loops."""
        return (*self._warnings, *self.program.notes)

    @cached_property
    def _warnings(self) -> tuple[str, ...]:
        texts = _file_warnings(self.proto.graph, self.program, self.tensors, self.outputs)
        more = _gradient_warning(self), _record_warning(self.proto)
        return tuple(filter(None, (*texts, *more)))


def enter(model: N, *views: View) -> N:
    """Return a model under further views."""
    return replace(model, program=model.program.enter(*views))


def leave(model: N, *kinds: type[View]) -> N:
    """Return a model without the views of these kinds."""
    return replace(model, program=model.program.leave(*kinds))


def refuse_change(model: Network, what: str) -> None:
    """Raise an InputError if a view of a model would not fit what changes beneath it."""
    if model.program.adapts:
        raise InputError(
            f"{what} of a model with adapters cannot be changed: set it before they are attached, "
            "or merge them first with .merge_adapters()"
        )


def _file_warnings(
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
            f"exported in training mode: {list_some(active, '')}; apply and save use inference "
            "semantics"
        )
    drops = any(node.op.name == "Dropout" for node in program.train(program.graph).nodes)
    yield from exporter_hints.notes(proto, drops)
    yield from integers.notes(program.graph, tensors)


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
