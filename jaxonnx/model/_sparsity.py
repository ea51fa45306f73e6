"""Record the sparse weights of a model, and find those that can be sparse."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from onnx import ModelProto

from jaxonnx._graph.select import Select, matching, near
from jaxonnx._graph.uses import weights
from jaxonnx._graph.weight_names import Places
from jaxonnx._io import records
from jaxonnx._rewrite.masks import find_masks
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import SparsityError

if TYPE_CHECKING:  # only a model with sparse weights imports what reads and writes them
    from jaxonnx.sparse import Layer, Patterns, SparsityPattern

M = TypeVar("M", bound=Network)


def options(model: Network) -> dict[str, Any]:
    """Return `exclude` and `axes` of `sparse.layers` for a model, as `Model.sparsity_options`."""
    meanings = weights(model.graph, model.tensors)
    exclude = {name: meanings[name].dense for name in model.params if meanings[name].dense}
    exclude |= dict.fromkeys(model._factors & model.params.keys(), "a factor of an adapter")
    masks = find_masks(model.graph, model.tensors).values()
    reason = "multiplied by a pruning mask, which jaxonnx.convert(model, fold_masks=True) folds"
    exclude |= {weight: reason for weight, _ in masks if weight in exclude}
    matrices = {name: w.matrix for name, w in meanings.items() if w.matrix}
    axes = {name: (matrix.output, matrix.input) for name, matrix in matrices.items()}
    return {"exclude": exclude, "axes": lambda name, _: axes.get(name)}


def resolve_selection(
    select: Select | Iterable[re.Pattern[str]], params: Mapping[str, Any], places: Places
) -> Callable[[str, Any], bool]:
    """Return `select` of `sparse.layers` as a predicate; names of modules and nodes also select.

    Raises:
      SparsityError: a name or expression selects no parameter.
    """
    if callable(select):
        return select
    chosen: set[str] = set()
    for entry in [select] if isinstance(select, str | re.Pattern) else select:
        if isinstance(entry, re.Pattern):
            names = {name for name in params if entry.fullmatch(name)}
        else:
            names = matching(entry, params, places=places)
        if not names:
            text = entry if isinstance(entry, str) else entry.pattern
            raise SparsityError(f"{text!r} selects no parameter; {near(text, params, places)}")
        chosen |= names
    return lambda name, _: name in chosen


def resolve_patterns(
    patterns: Mapping[str, str | SparsityPattern], params: Mapping[str, Any], places: Places
) -> dict[str, str | SparsityPattern]:
    """Return patterns keyed by parameter, from patterns keyed by any name that selects weights.

    Raises:
      SparsityError: a name or expression selects no parameter.
    """
    resolved: dict[str, str | SparsityPattern] = {}
    for selection, pattern in patterns.items():
        chosen = resolve_selection(selection, params, places)
        for name in params:
            if chosen(name, None):
                resolved.setdefault(re.escape(name), pattern)
    return resolved


def describe_unrecorded(model: Network) -> str:
    """Describe the parameters with 2:4 zeros along their input axis, "" if none has them."""
    axes = options(model)["axes"]
    weights = {name: (np.asarray(w), axes(name, w)) for name, w in model.params.items()}
    # a look at the first groups rules out nearly every dense weight, without its search
    likely = {name: pair for name, pair in weights.items() if pair[1] and _may_be_sparse(*pair)}
    if not likely:
        return ""
    from jaxonnx.sparse import Pattern, has

    names = [name for name, (w, layout) in likely.items() if has(w, Pattern(2, 4, False), layout)]
    if not names:
        return ""
    subject = f"{names[0]!r} and {len(names) - 1} more have" if names[1:] else f"{names[0]!r} has"
    return (
        f"{subject} 2:4 zeros, which the file does not record: jaxonnx.sparse.record(model) does, "
        "for packed files and for sparse.verify"
    )


def _may_be_sparse(w: np.ndarray, axes: tuple[int, int]) -> bool:
    """Check that the first group of four inputs of the first outputs has at most two non-zeros."""
    first = [slice(4) if axis in axes else slice(1) for axis in range(w.ndim)]
    return int(np.count_nonzero(w[tuple(first)], axis=axes[1]).max(initial=0)) <= 2


def with_record(
    model: M,
    pattern: Patterns | None,
    transposable: bool,
    method: str,
    choice: Mapping[str, Any],
) -> M:
    """Return the model of `Model.with_sparsity`."""
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    records.put(proto, records.SPARSITY, None)
    if pattern is not None:
        from jaxonnx._io.packed import set_record

        report = report_layers(model, pattern, transposable=transposable, **choice)
        set_record(proto, report, method)
    return replace(model, proto=proto)


def report_layers(
    model: Network, pattern: Patterns = "2:4", *, transposable: bool = True, **choice: Any
) -> list[Layer]:
    """Report the parameters that become sparse, and why the others do not (`sparse.layers`)."""
    from jaxonnx import sparse

    params, places = model.params, model._places
    chosen = {**options(model), **choice}
    if chosen.get("select") is not None:
        chosen["select"] = resolve_selection(chosen["select"], params, places)
    if isinstance(pattern, Mapping):
        pattern = resolve_patterns(pattern, params, places)
    return sparse.layers(params, pattern, transposable=transposable, **chosen)


def with_products(model: M) -> M:
    """Return the model of `Model.with_sparse_products`."""
    layers = () if model.sparsity is None else model.sparsity.layers
    floats = [x for x in layers if x.name in model.params]
    layers_2_4 = [x for x in floats if x.pattern is not None and x.pattern.name == "2:4"]
    axes = {x.name: x.axes[1] for x in layers_2_4 if x.axes is not None}
    if not axes:
        recorded = "none" if model.sparsity is None else str(model.sparsity)
        raise SparsityError(
            f"sparse products are of weights that the model records as 2:4, and it records "
            f"{recorded}: sparse.record(model) records those that are"
        )
    from jaxonnx.sparse import prepare_products

    weights = [model.params[name] for name in axes]
    devices = {device for w in weights for device in w.devices()}
    platform = next(device.platform for device in devices)
    is_ready = prepare_products(weights, platform, is_split=len(devices) > 1)
    program = replace(model.program, sparse=axes if is_ready else {})
    return replace(model, program=program)
