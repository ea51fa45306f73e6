"""Which parameters become sparse, and when."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import optax
from onnx import ModelProto

from jaxonnx import sparse
from jaxonnx._file.packed import set_record
from jaxonnx._graph.uses import weights
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model
from jaxonnx.sparse._pattern import parse
from jaxonnx.sparse._templates import Axes
from jaxonnx.train._storage import Storage

_CHOICE = ("pattern", "transposable", "select", "exclude", "axes")
"""The options of `sparse.layers` among those of `sparse.three_phase`."""


def sparsify(
    model: Model,
    optimizer: optax.GradientTransformation,
    sparsity: str | Mapping[str, Any],
    epochs: int | None,
    steps: int | None,
    storage: Storage,
) -> tuple[optax.GradientTransformationExtraArgs, Model]:
    """The optimizer inside `sparse.three_phase`, phases in epochs, and the model with its record.

    Without lengths, a third of the epochs is dense, half have a dynamic mask, the rest a fixed one.
    The result is for parameters as they are stored; the options speak of those of the file.
    """
    if steps is None:
        raise TrainingError(
            "sparsity needs the number of batches in an epoch: pass arrays, or an iterable with a "
            "length"
        )
    options: dict[str, Any]
    options = {"pattern": sparsity} if isinstance(sparsity, str) else dict(sparsity)
    if not {"dense", "dynamic", "fixed"} & {*options}:
        if epochs is None:
            raise TrainingError(
                "sparsity needs the lengths of its phases (dense, dynamic), or epochs= to share out"
            )
        options |= {"dense": epochs // 3, "dynamic": max(1, epochs // 2)}
    options = {"dense": 0, "dynamic": None} | options
    if epochs is not None and options["dense"] >= epochs:
        raise TrainingError(
            f"a dense phase of {options['dense']} epochs leaves no sparse one in {epochs} epochs"
        )
    choice = {name: options.pop(name) for name in _CHOICE if name in options}
    pattern, axes = _plan(model, **choice)
    where = {name: storage.axes(name, pair) for name, pair in axes.items()}
    phases = sparse.three_phase(
        optimizer,
        steps_per_epoch=steps,
        pattern=pattern,
        select=lambda name, _: name in where,
        axes=lambda name, _: where.get(name),
        **options,
    )
    return phases, _recorded(model, pattern, axes)


def is_sparse(memory: Any) -> bool:
    """Whether the state of an optimizer is that of `sparsify`."""
    leaves = jax.tree.leaves(memory, is_leaf=lambda x: isinstance(x, sparse.ThreePhaseState))
    return any(isinstance(x, sparse.ThreePhaseState) for x in leaves)


def masks(memory: Any) -> dict[str, jax.Array]:
    """The boolean masks of now by name, from the state of an optimizer; none where it is dense."""
    return sparse.state_masks(memory) if is_sparse(memory) else {}


def sparse_numbers(memory: Any) -> dict[str, Any]:
    """What an epoch's row has of the state of an optimizer; nothing where it is dense."""
    if not is_sparse(memory):
        return {}
    numbers = sparse.metrics(memory)
    row = {name: numbers[name] for name in ("phase", "sparsity", "flip_rate", "kept")}
    return row | {f"flip_rate/{name}": rate for name, rate in numbers["flips"].items()}


def record(
    model: Model, pattern: str | sparse.Pattern = "2:4", *, transposable: bool = True, **choice: Any
) -> Model:
    """The model with a record of what is sparse, for `Model.save` and `sparse.verify`.

    For weights of a training loop other than `jaxonnx.train`, which records by itself.

    Args:
      pattern, transposable, choice: as in `sparse.layers`; what the graph excludes stays dense.
    """
    return _recorded(model, *_plan(model, pattern, transposable=transposable, **choice))


def _plan(
    model: Model, pattern: str | sparse.Pattern = "2:4", *, transposable: bool = True, **choice: Any
) -> tuple[sparse.Pattern, dict[str, Axes]]:
    """The pattern, and the axes of each weight that becomes sparse."""
    pattern = parse(pattern, transposable)
    report = sparse.layers(model.params, pattern, **layouts(model) | choice)
    return pattern, {x.name: x.axes for x in report if x.axes is not None}


def forget(model: Model) -> Model:
    """The model without a record: what is about to be trained dense."""
    return _recorded(model, sparse.Pattern(), {})


def _recorded(model: Model, pattern: sparse.Pattern, axes: Mapping[str, Axes]) -> Model:
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    set_record(proto, pattern, axes)
    return replace(model, proto=proto)


def layouts(model: Model) -> dict[str, Any]:
    """Return what the graph says of its weights, as `exclude` and `axes` of `sparse.layers`.

    A weight that is used in anything but dense matrix products and convolutions (an embedding, a
    grouped convolution, a table that is added) cannot be sparse. The input axis is the one that the
    product sums over, at the first use of a weight that has several.
    """
    found = weights(model.graph, model.tensors)
    exclude = {name: found[name].dense for name in model.params if found[name].dense}
    axes = {name: (w.matrix.output, w.matrix.input) for name, w in found.items() if w.matrix}
    return {"exclude": exclude, "axes": lambda name, w: axes.get(name)}
