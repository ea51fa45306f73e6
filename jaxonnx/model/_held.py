"""What a model holds, and what its file and its graph say of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from onnx import ModelProto

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.places import Places
from jaxonnx._graph.values import Value, declared
from jaxonnx._rewrite.head import Head
from jaxonnx._run.program import Program
from jaxonnx.model import _notes as notes
from jaxonnx.model._sparsity import damage, recorded

if TYPE_CHECKING:  # a model without sparse weights does not import it
    from jaxonnx._file.packed import Recorded


@dataclass(frozen=True, eq=False, repr=False)
class Held:
    """The part of a Model that its other parts read."""

    params: dict[str, jax.Array]
    state: dict[str, jax.Array]
    proto: ModelProto = field(repr=False)
    """The file without the data of its tensors."""
    program: Program
    originals: Mapping[str, np.ndarray]
    """64-bit tensors of the file, which the 32-bit arrays of JAX cannot hold."""
    heads: tuple[Head, ...] = ()
    """The layers that `with_head` put in the place of others."""

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

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs that a call must give, in order."""
        wanted = set(self.graph.inputs)
        return tuple(declared(v) for v in self.proto.graph.input if v.name in wanted)

    @cached_property
    def _defaults(self) -> frozenset[str]:
        """Inputs with an initializer as their default: they may be passed by name."""
        return frozenset(v.name for v in self.proto.graph.input) - set(self.graph.inputs)

    @cached_property
    def _input_names(self) -> frozenset[str]:
        return self._defaults.union(self.graph.inputs)

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """The outputs, in file order."""
        return tuple(map(declared, self.proto.graph.output))

    @property
    def sparsity(self) -> Recorded | None:
        """The pattern and the weights that the file records as sparse; None without a record.

        A malformed one counts as none; `warnings` tells of it.
        """
        return recorded(self.proto, self.params)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user of the model should know: about the file, and about unrolled loops."""
        return (*self._warnings, *self.program.notes)

    @cached_property
    def _warnings(self) -> tuple[str, ...]:
        texts = notes.warnings(self.proto.graph, self.program, self.tensors, self.outputs)
        return tuple(filter(None, (*texts, damage(self.proto))))
