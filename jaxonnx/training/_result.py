"""The result of a run."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxonnx._arrays import to_host
from jaxonnx._data.batches import Source
from jaxonnx._display import format_count
from jaxonnx._hub import export_safetensors
from jaxonnx._require import check_arguments
from jaxonnx.errors import InputError, ModelError, warn
from jaxonnx.lora import Adapters
from jaxonnx.losses import find_by_output
from jaxonnx.model import Model, compare_merged, record_scores
from jaxonnx.quantization import Quantization
from jaxonnx.training._loop.history import History
from jaxonnx.training._quantize import compare_quantized
from jaxonnx.training._report import NAME, Run, has_other_card, write_card, write_report
from jaxonnx.training._step import Step
from jaxonnx.views import PackedRows

_MOST, _LEAST = 6, 2
"""How many tensors are listed, of those that changed most and least."""


@dataclass(frozen=True, repr=False)
class Result:
    """The trained model and the history; printing it lists the tensors that changed most.

    A result that was pickled comes back without `run`, which has functions: losses, optimizers,
    hooks.
    """

    model: Model
    history: History
    changes: dict[str, float] = field(default_factory=dict)
    """|new - old| / |old| (Euclidean norms) of each parameter and statistic; infinite from zero."""
    lora: Adapters | None = None
    """The adapters that a run with `lora=` trained, apart from the weights of the model."""
    run: Run | None = None
    """Settings and validation data, for `report`."""

    def report(
        self, path: str | os.PathLike[str], configuration: Mapping[str, Any] | None = None
    ) -> None:
        """Write one HTML page about the run, which needs no other file.

        It has the curves, the numbers of each epoch, all tensors by their layers (trained, frozen,
        sparse, how much they changed), the confusion matrix of validation data in one piece for up
        to 30 classes, settings and versions. It needs matplotlib.

        Args:
          path: of the file.
          configuration: to be shown as the settings; by default those of `train` that are not the
            usual ones.
        """
        check_arguments(Result.report, locals())
        write_report(self, path, configuration)

    def save(
        self,
        folder: str | os.PathLike[str],
        form: Literal["model", "peft", "safetensors"] = "model",
        *,
        card: bool = True,
        license: str | None = None,
        base_model: str | None = None,
        **options: Any,
    ) -> None:
        """Write a folder with the model, and a model card for the Hugging Face hub.

        The card, `README.md`, has the base model, data, settings, losses and metrics, quantization,
        sparsity and versions; its head has what the hub reads. `jaxonnx.push_to_hub` uploads it.

        Args:
          folder: of the model; it is made.
          form: "model", the folder of `Model.save`, where a model that was loaded from a file is
            called `model.onnx`; "peft", the adapters alone, as `Adapters.save` writes them for
            PEFT; or "safetensors", the checkpoint of `jaxonnx.export_safetensors`.
          card: write the card.
          license: of the card; by default that of the base model's card, if its folder has one.
          base_model: the model that was tuned, by its name on the hub, for the card and for PEFT;
            by default as in `Adapters.save`.
          options: those of the function of the form.

        Raises:
          InputError: the folder has a card that jaxonnx did not write; or as the function of the
            form says.
          OSError: a file cannot be written.
        """
        check_arguments(Result.save, locals())
        target = Path(folder)
        if card and has_other_card(target, self.model):
            raise InputError(
                f"'{target / NAME}' exists, and jaxonnx did not write it: move it, or pass "
                "card=False"
            )
        if form == "safetensors":
            export_safetensors(self.model, target, **options)
        elif form == "peft":
            if self.lora is None:
                raise InputError("form='peft': the run has trained no adapters (lora=)")
            self.lora.save(f"{target}/", self.model, base_model=base_model, **options)
        elif self.model.companion.accepts(f"{target}/"):
            self.model.save(f"{target}/", **options)
        else:
            target.mkdir(parents=True, exist_ok=True)
            self.model.save(target / "model.onnx", **options)
        if card:
            write_card(self, target, license, base_model)

    def __reduce__(self) -> tuple[Any, ...]:
        return Result, (self.model, self.history, self.changes, self.lora)

    def __str__(self) -> str:
        return "\n".join([str(self.history), *self.history.notes, *_list_changes(self)])

    __repr__ = __str__


def to_result(
    step: Step, trained: Model, history: History, held_out: Source | None, data: str
) -> Result:
    """Return the result of a run, with adapters apart or merged into the weights."""
    if held_out is not None:
        held_out.release()
    trained = _record_loss(trained, step.settings.loss)
    before, adapters, names = step.model, None, None
    if step.settings.lora is not None:
        adapters = Adapters.of(trained)
        names = {*adapters.layouts, *adapters.values}
        if not adapters.are_apart(before):
            apart, trained = trained, trained.merge_adapters(check=False)
            before = before.merge_adapters(check=False)
            if step.settings.check:
                history.notes += _note_differences(partial(compare_merged, apart, trained))
    elif trained.program.adapts:  # those of `Adapters.attach` stay apart
        adapters = Adapters.of(trained)
    if step.settings.quantize is not None and step.settings.check:
        scheme = Quantization.of(step.settings.quantize)
        history.notes += _note_differences(partial(compare_quantized, trained, scheme))
    old, tensors = {**before.state, **before.params}, {**trained.params, **trained.state}
    new = {n: x for n, x in tensors.items() if n in old and (names is None or n in names)}
    adapters = adapters and replace(adapters, model=trained)
    run = Run(step.settings, held_out, data, step.model.program.find(PackedRows))
    return Result(trained, history, changes(old, new), adapters, run)


def _record_loss(model: Model, loss: Any) -> Model:
    """Return a model whose files say how the only loss of a run, by name, reads its outputs."""
    losses = [*find_by_output(loss).values()]
    if len(losses) != 1 or not losses[0].name:
        return model
    (term,) = losses
    of_numbers = term.elementwise and term.class_axis is None and not term.one_hot
    reads = term.logits_of or of_numbers
    return record_scores(model, term.logits_of or "") if reads else model


def _note_differences(compare: Callable[[], str]) -> list[str]:
    """Compare the file of a trained model with the model; warn if it computes something else.

    Returns:
      A note, if it does, or was not compared.
    """
    try:
        reason = compare()
    except ModelError as error:
        reason = f"{error}. The trained model is returned all the same"
        warn(reason)
    return [reason] if reason else []


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return the relative change of each tensor."""
    return {name: _change(to_host(before[name]), to_host(x)) for name, x in after.items()}


def _change(before: np.ndarray, after: np.ndarray) -> float:
    if np.array_equal(before, after):
        return 0.0
    old, new = (x.astype(np.float64).reshape(-1) for x in (before, after))
    size = np.linalg.norm(old)
    return float(np.linalg.norm(new - old) / size) if size else np.inf


def _list_changes(result: Result) -> list[str]:
    """List the tensors that changed, the largest changes first."""
    if not result.changes:
        return []
    params = {n: c for n, c in result.changes.items() if n in result.model.params}
    moved = {n: c for n, c in params.items() if c}
    lines = _count_parameters(result, len(params), moved)
    order = sorted(moved, key=lambda name: -moved[name])
    called = {name: name for name in params} | result.model.aliases
    shown = [f"  {called[n]} {[*result.model.params[n].shape]}: {_share(moved[n])}" for n in order]
    if between := order[_MOST:-_LEAST]:
        half = float(np.median([moved[name] for name in order]))
        change = "from zero" if np.isinf(half) else _share(half)
        shown[_MOST:-_LEAST] = [f"  ... {len(between)} more; median change {change}"]
    lines += shown
    if still := [name for name in params if name not in moved]:
        more = f" and {len(still) - _MOST} more (.changes has all)" if len(still) > _MOST else ""
        lines.append(f"not changed: {', '.join(called[n] for n in still[:_MOST])}{more}")
    renewed = sum(1 for n, c in result.changes.items() if n in result.model.state and c)
    if renewed:
        lines.append(f"{format_count(renewed, 'running statistic')} updated")
    return lines


def _count_parameters(result: Result, count: int, moved: Mapping[str, float]) -> list[str]:
    """Count the trained parameters, and the tensors of the model that changed."""
    numbers = sum(result.model.params[name].size for name in moved)
    changed = format_count(numbers, "parameter")
    if result.lora is None:
        return [f"{len(moved)} of {format_count(count, 'trained tensor')} changed ({changed})"]
    values = result.lora.values
    trained = sum(
        x.size
        for name, x in values.items()
        if name not in result.model.state and not jnp.issubdtype(x.dtype, jnp.integer)
    )
    weights = format_count(len(result.lora.layouts), "weight")
    done = f"{format_count(trained, 'parameter')} trained, in adapters of {weights}"
    if result.model.program.adapts:
        return [f"{done}; not merged (result.lora has them, save(..., adapters=) writes them)"]
    return [f"{done}; merged, they change {format_count(len(moved), 'tensor')} ({changed})"]


def _share(change: float) -> str:
    if np.isinf(change):
        return "from zero"
    return f"{change:.2%}" if change > 1e-3 else f"{100 * change:.2g}%"
