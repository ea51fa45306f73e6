"""Convert parameters and state once for many calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.uses import uses
from jaxonnx._run.fold_norms import Folds, folds
from jaxonnx._run.integer_products import fuse_products, integer_products
from jaxonnx._run.open_weights import open_weights
from jaxonnx._run.program import Changes, Program
from jaxonnx.lowering import KernelFirst, placed_as, store


@dataclass(frozen=True)
class CallForm:
    """Parameters and state converted once for many inference calls (`prepare_calls`)."""

    params: dict[str, Any]
    """The converted parameters."""
    state: dict[str, Any]
    """The converted state, and tensors that are results of dropped nodes."""
    changes: Changes
    """The changes of the graph that belong to these tensors."""
    reads: frozenset[str]
    """The tensors that other tensors or `changes` were computed from: to replace the value of one
    needs another conversion."""


def prepare_calls(
    program: Program, params: Mapping[str, Any], state: Mapping[str, Any]
) -> CallForm:
    """Convert parameters and state once for many inference calls.

    On top of `prepare_tensors`, BatchNormalizations are folded into the weights before them,
    quantized and half-precision weights are converted to floating point, and products between
    DequantizeLinear and QuantizeLinear become integer ones.
    """
    tensors, folded, changes = {**state, **params}, Folds(), Changes()
    reads: frozenset[str] = frozenset()
    if not program.adapts:
        constants = {**program.graph.initializers, **program.constants}
        products, decisive = integer_products(program.graph, tensors, constants)
        opened = open_weights(fuse_products(program.graph, products), tensors, constants)
        for name, x in opened.values.items():
            tensors[name] = placed_as(tensors[name], x) if name in tensors else jnp.asarray(x)
        changes = Changes(products, opened.nodes)
        folded = folds(changes(program.graph), tensors)
        changes = replace(changes, norms=folded.norms)
        reads = decisive | opened.reads | folded.reads
    for name, bias in folded.biases.items():
        tensors[name] = placed_as(tensors[name], bias)
    graph = changes(program.graph)
    converted = prepare_tensors(program, tensors, folded.factors, graph)
    new_params = {name: converted.pop(name) for name in params}
    if program.sparse:
        from jaxonnx.sparse import pack_matrix

        new_params |= {n: pack_matrix(new_params[n], axis) for n, axis in program.sparse.items()}
    return CallForm(new_params, converted, changes, reads)


def prepare_tensors(
    program: Program,
    tensors: Mapping[str, jax.Array],
    factors: Mapping[str, np.ndarray] | None = None,
    graph: Graph | None = None,
) -> dict[str, Any]:
    """Convert parameters or state once for programs that run many times.

    Weights that only convolutions read get the axis order that is best on the platform that
    they are on (`lowering.store`).

    Args:
      program: a program that reads them.
      tensors: the tensors.
      factors: factors of output channels to multiply weights by, by name.
      graph: the graph that reads them, if it is not that of the program.
    """
    if program.adapts:
        return {**tensors}
    used = [
        (use.name, use.node.op.takes(use.position, KernelFirst))
        for use in uses(graph or program.graph, tensors)
        if not (use.passes and use.node.op.per_axis)  # work on any order of axes
    ]
    others = {name for name, is_kernel in used if not is_kernel}
    return store(tensors, {name for name, _ in used} - others, factors)
