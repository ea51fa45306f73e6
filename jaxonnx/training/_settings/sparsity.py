"""Sparse training (`sparsity=`): select the parameters, and schedule the phases.

The functions import `jaxonnx.sparse`, so that importing jaxonnx does not.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx._arguments import Argument
from jaxonnx._display import format_count, list_some
from jaxonnx._io import records
from jaxonnx._mesh.rules import mesh_of
from jaxonnx._require import require_choice
from jaxonnx.errors import TrainingError, warn
from jaxonnx.model import Model, report_layers
from jaxonnx.training._settings import Gradient, Plan, Settings
from jaxonnx.training._settings.weight_layout import WeightLayout

if TYPE_CHECKING:
    from jaxonnx.sparse import Layer

_CHOICE = ("pattern", "transposable", "select", "exclude", "axes")
"""The options of `sparse.layers` among those of `sparse.three_phase`."""
_PRUNED, _PRUNED_SIZE = 0.3, 64
"""The share of zeros from which on a weight counts as pruned, and the least size of one."""
_PHASES = frozenset({"dense", "dynamic", "fixed"})


class SparsityArguments(TypedDict, total=False):
    """Sparse weights."""

    sparsity: Annotated[
        str | Mapping[str, Any] | None,
        Argument(
            expected="a pattern like '2:4', or a dict of pattern, method and options",
            needs_loss=True,
        ),
    ]
    """Train sparse weights: "2:4", or a dict of options of `sparse.three_phase`.

    The lengths of phases are in epochs. By default a third of the epochs is dense, half have a
    dynamic mask, and the rest have a fixed mask. Other options:

    * "pattern": one pattern, or patterns by tensor, module or node, like `{"body": "2:4", "head":
      "1:4"}`. "zeros" keeps the zeros that weights have, of a network that was pruned elsewhere.
    * "method": "three_phase", "sr_ste", "s_ste" or "one_shot", with the options of `sparse.sr_ste`,
      `sparse.s_ste` and `sparse.fixed_mask`.
    * "products": "sparse" skips the zeros in forward and backward products with sparse weights. It
      needs a CPU and float32, or an NVIDIA GPU, `precision="bf16"` and the extra `sparse-cuda`.

    Embeddings and grouped convolutions stay dense. The saved model records which weights are sparse
    (`Model.sparsity`)."""


def sparsify_weights(plan: Plan) -> None:
    """Wrap the optimizer in a method of `jaxonnx.sparse`, and record the pattern in the model.

    Lengths are in epochs. Without any, a third of the epochs is dense, half have a dynamic mask,
    the rest a fixed one; the other methods have no phases. The optimizer is for parameters as they
    are stored; the options speak of those of the file. Notes say which parameters stay dense. Dense
    training drops the record of the sparse weights that it changes.
    """
    if plan.settings.sparsity is None:
        plan.model, notes = remove_sparsity(plan.model)
        plan.notes += notes
        return
    from jaxonnx import sparse

    model, storage, epochs, steps = plan.model, plan.storage, plan.epochs, plan.steps_per_epoch
    sparsity: Any = plan.settings.sparsity
    if steps is None:
        raise TrainingError(
            "sparsity needs the number of batches in an epoch: pass arrays, or an iterable with a "
            "length"
        )
    options: dict[str, Any]
    options = dict(sparsity) if isinstance(sparsity, Mapping) else {"pattern": sparsity}
    chosen = options.get("pattern")
    patterns: list[Any] = [*chosen.values()] if isinstance(chosen, Mapping) else [chosen]
    parsed = [sparse.parse(p) for p in patterns if isinstance(p, str) or hasattr(p, "search")]
    fixed = [pattern.name for pattern in parsed if pattern.is_fixed]
    only_fixed = fixed and len(fixed) == len(patterns)
    method = options.pop("method", "one_shot" if only_fixed else "three_phase")
    methods = {"three_phase": sparse.three_phase, "sr_ste": sparse.sr_ste,
               "s_ste": sparse.s_ste, "one_shot": sparse.fixed_mask}  # fmt: skip
    require_choice("the method of sparsity", method, [*methods], TrainingError)
    accepted = [*dict.fromkeys([*_CHOICE, *_options(method), "products"])]
    if fixed and method != "one_shot":
        raise TrainingError(
            f"the pattern {fixed[0]!r} is that of the initial weights: pass method 'one_shot', not "
            f"{method!r}"
        )
    if not isinstance(sparsity, str | Mapping) or options.keys() - {*accepted}:
        raise TrainingError(
            f"sparsity is a pattern like '2:4', or a dict of method and its options, for {method} "
            f"any of {', '.join(accepted)}; not {sparsity!r}"
        )
    if method == "three_phase":
        if epochs is not None and not _PHASES & {*options}:
            plan.phases = _share(epochs)
        options = _share_out(options, epochs)
    plan.last_phase = _find_last_phase(method, options, plan)
    choice = {name: options.pop(name) for name in _CHOICE if name in options}
    products = options.pop("products", "dense")
    if method == "s_ste" and choice.setdefault("transposable", False):
        raise TrainingError("s_ste is for patterns along one axis: leave transposable out")
    plan.notes += _describe_dense(report_layers(model, **choice))
    plan.model = model = model.with_sparsity(**choice, method=method)
    assert model.sparsity is not None  # or with_sparsity raises
    goals = sparse.goals(model.sparsity.layers)
    where = {name: storage.axes(name, goal.axes) for name, goal in goals.items()}
    if method in ("three_phase", "one_shot") or "refresh" in options:  # a step unless it is said
        options["steps_per_epoch"] = steps
    plan.optimizer = methods[method](
        plan.optimizer,
        pattern={re.escape(name): goal.pattern for name, goal in goals.items()},
        axes=lambda name, _: where.get(name),
        **options,
    )
    if products == "dense":
        return
    pairs = [n for n, goal in goals.items() if str(goal.pattern) == "2:4 transposable"]
    if not pairs:
        raise TrainingError(f"sparse products are of transposable 2:4, not of {model.sparsity}")
    weights = [model.params[name] for name in pairs]
    if _are_sparse(products, weights, plan.settings, storage):
        plan.gradient_wrappers.append(
            lambda gradient, memory: with_products(gradient, memory, frozenset(pairs))
        )


def _describe_dense(report: Sequence[Layer]) -> list[str]:
    """Describe the parameters that stay dense, by the reason; nothing where all become sparse."""
    reasons: dict[str, list[str]] = {}
    for layer in report:
        if layer.reason:
            reasons.setdefault(layer.reason, []).append(f"'{layer.name}'")
    parts = [f"{why} ({list_some(names, '')})" for why, names in reasons.items()]
    count = format_count(sum(map(len, reasons.values())), "dense tensor")
    return [f"{count}: {', '.join(parts)}"] if parts else []


def _share(epochs: int) -> list[int]:
    return [epochs // 3, max(1, epochs // 2)]


def _share_out(options: dict[str, Any], epochs: int | None) -> dict[str, Any]:
    """Return the options of three phases with the lengths of all."""
    if not _PHASES & {*options}:
        if epochs is None:
            raise TrainingError(
                "sparsity needs the lengths of its phases (dense, dynamic), or epochs= to share out"
            )
        options |= zip(("dense", "dynamic"), _share(epochs), strict=True)
    return {"dense": 0, "dynamic": None} | options


def _find_last_phase(method: str, options: Mapping[str, Any], plan: Plan) -> int:
    """Return the phase that a run ends in: 3 with a fixed mask, 2 with one that still moves.

    Raises:
      TrainingError: it ends in the dense phase.
    """
    steps, epochs = plan.steps_per_epoch or 1, plan.epochs
    total = plan.settings.max_steps or (None if epochs is None else epochs * steps)
    if method != "three_phase":
        return 3 if method == "one_shot" else 2
    dense, dynamic = options["dense"], options["dynamic"]
    if total is not None and round(dense * steps) >= total:
        raise TrainingError(
            f"a dense phase of {dense} epochs, {round(dense * steps)} steps, leaves no sparse one "
            f"in {total} steps"
        )
    if dynamic is None:
        return 2
    end = round(dense * steps) + round(dynamic * steps)
    return 3 if total is None or end <= total else 2


def _are_sparse(
    products: Any, weights: list[jax.Array], settings: Settings, storage: WeightLayout
) -> bool:
    """Check whether products are sparse, for which the kernel is made ready, or refuse that."""
    from jaxonnx import sparse

    require_choice("products", products, ("dense", "sparse", "cusparselt"), TrainingError)
    on_gpu = storage.platform in ("gpu", "cuda")
    if products == "cusparselt" and not on_gpu:
        raise TrainingError(
            f"products='cusparselt' is for NVIDIA GPUs, and the run is on {storage.platform!r}: "
            "products='sparse' takes what the platform has"
        )
    if products == "cusparselt" and settings.mesh is not None:
        raise TrainingError("products='cusparselt' is for one device: leave it or mesh= out")
    if on_gpu and settings.precision != "bf16":
        raise TrainingError(
            "cuSPARSELt has 2:4 products of 16-bit numbers only (1:2 ones of float32): "
            f"products={products!r} needs precision='bf16' on a GPU"
        )
    if products == "sparse":
        is_split = settings.mesh is not None and mesh_of(settings.mesh).size > 1
        return sparse.prepare_products(weights, storage.platform, is_split=is_split)
    sparse.register_products(storage.platform)
    return True


def with_products(gradient: Gradient, memory: Any, names: Collection[str]) -> Gradient:
    """Return a gradient whose products with these weights are sparse once the weights are.

    A run whose mask is there from the start may begin with dense weights, which its first step
    prunes.
    """
    from jaxonnx import sparse

    (phases,) = _phases(memory)
    pruned = (phases.phase > 1) & (phases.count > 0)
    fixed = sparse.sparse_products(gradient, names)
    return lambda params: jax.lax.cond(pruned, fixed, gradient, params)


def _options(method: str) -> list[str]:
    """Return the options of a method that a run leaves to the user."""
    from jaxonnx import sparse

    if method in ("one_shot", "s_ste"):
        return []
    if method == "sr_ste":
        return ["decay", "refresh", "moments"]
    parameters = inspect.signature(sparse.three_phase).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return [name for name in names if name != "steps_per_epoch"]


def is_sparse(memory: Any) -> bool:
    """Check whether the state of an optimizer is that of `sparsify`."""
    return bool(_phases(memory))


def _phases(memory: Any) -> list[Any]:
    """Return the states of `three_phase` in the state of an optimizer."""
    from jaxonnx import sparse

    leaves = jax.tree.leaves(memory, is_leaf=lambda x: isinstance(x, sparse.ThreePhaseState))
    return [x for x in leaves if isinstance(x, sparse.ThreePhaseState)]


def is_dense(memory: Any) -> bool:
    """Check whether the state of an optimizer is of a sparse run that has no masks yet."""
    return any(int(phases.phase) == 1 for phases in _phases(memory))


def restore_phase(memory: Any, before: Any) -> Any:
    """Return a state of an optimizer whose phases have counted no step since another state."""
    if not is_sparse(memory):
        return memory
    (phases,) = _phases(before)
    return memory._replace(count=phases.count, phase=phases.phase)


def masks(memory: Any) -> dict[str, jax.Array]:
    """Return the present masks by name, from the state of an optimizer; none where it is dense."""
    from jaxonnx import sparse

    return sparse.state_masks(memory) if is_sparse(memory) else {}


def sparse_numbers(memory: Any) -> dict[str, Any]:
    """Return the sparsity metrics of an epoch from the optimizer state, {} if it is dense."""
    if not is_sparse(memory):
        return {}
    from jaxonnx import sparse

    numbers = sparse.metrics(memory)
    row = {name: numbers[name] for name in ("phase", "sparsity", "flip_rate", "kept")}
    return row | {f"flip_rate/{name}": rate for name, rate in numbers["flips"].items()}


def _describe_zeros(tensors: Mapping[str, Any], trained: Collection[str]) -> list[str]:
    """Describe weights with zeros as of pruning, which no record of the file names.

    Tensors of zeros alone, which layers begin with, are none of these, nor are identities and other
    selections.

    Args:
      tensors: what training changes.
      trained: the tensors that it changes itself, not by adapters.
    """
    shares = {}
    for name, tensor in tensors.items():
        is_weight = isinstance(tensor, np.ndarray | jax.Array) and tensor.ndim > 1
        if not is_weight or tensor.size < _PRUNED_SIZE or not _is_readable(tensor):
            continue
        # a part of a weight rules out nearly all
        for part in (tensor[:: max(1, len(tensor) // 4)], tensor):
            share = 1 - np.count_nonzero(np.asarray(part)) / np.size(part)
            if share < _PRUNED / 2:
                break
        if _PRUNED <= share < 1 and np.count_nonzero(np.asarray(tensor), axis=0).max() > 1:
            shares[name] = share
    notes = []
    for itself, way in (
        (True, "become dense in training: sparsity='zeros' keeps them"),
        (False, "become dense where adapters are merged: save(path, adapters='nodes') leaves them"),
    ):
        shown = [f"{n!r} {share:.0%}" for n, share in shares.items() if (n in trained) is itself]
        if shown:
            count = format_count(len(shown), "weight")
            notes.append(f"{count} with zeros, as of pruning ({list_some(shown, '')}), {way}")
    return notes


def _is_readable(tensor: Any) -> bool:
    """Check whether an array has numbers in floating point that this process has all of."""
    is_float = jnp.issubdtype(tensor.dtype, jnp.floating)
    return is_float and getattr(tensor, "is_fully_addressable", True)


def remove_sparsity(model: Model) -> tuple[Model, list[str]]:
    """Drop the record of the weights that dense training changes, with a warning.

    Returns:
      The model without it, and the warning as a note; no note where no recorded weight is trained.
    """
    changed = {*model.params}.union(*(view.targets for view in model.program.views))
    if not records.has(model.proto, records.SPARSITY):
        weights = {name: x for name, x in model.tensors.items() if name in changed}
        notes = _describe_zeros(weights, model.params)
        for note in notes:
            warn(note)
        return model, notes
    from jaxonnx import sparse
    from jaxonnx._io import packed

    recorded = {} if model.sparsity is None else sparse.goals(model.sparsity.layers)
    patterns = {name: str(goal.pattern) for name, goal in recorded.items() if name in changed}
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    packed.without(proto, changed)
    model = replace(model, proto=proto)
    if not patterns:
        return model, []
    (kind, *others) = dict.fromkeys(patterns.values())
    pattern, is_transposable = kind.split()[0], kind.endswith("transposable")
    keep = f"{{'pattern': {pattern!r}, 'transposable': {is_transposable}, 'method': 'one_shot'}}"
    note = (
        f"{format_count(len(patterns), 'weight')} that the file records as {kind} "
        f"({list_some([*map(repr, patterns)], '')}) lose zeros and record in dense training: "
        f"sparsity={'a pattern for each name' if others else keep} keeps them, "
        "model.with_sparsity(None) drops the record"
    )
    warn(note)
    return model, [note]
