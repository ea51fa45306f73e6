"""Checkpoints of a run, written by Orbax.

Orbax writes arrays in the background, commits them by renaming a folder, and deletes old ones.
Added here: names, dtypes and checksums, so that a checkpoint of another run or a damaged one is
refused with a reason; the model beside the checkpoints; one line, not a traceback, for a full disk.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._arrays import to_host
from jaxonnx._data.batches import difference
from jaxonnx._files import check_writable
from jaxonnx._io import formats
from jaxonnx._io.checkpoints import (
    MODEL,
    UNREADABLE,
    add_checksum,
    check,
    check_form,
    checksum,
    reason,
    verify_checksum,
)
from jaxonnx._mesh.processes import Processes
from jaxonnx.errors import TrainingError, warn
from jaxonnx.lora import Adapters
from jaxonnx.model import Model, to_proto
from jaxonnx.training._loop.history import History
from jaxonnx.views import View

_LOGGER = logging.getLogger("absl")
_KEPT = 3
_UNWRITABLE = (OSError, RuntimeError, ValueError)
"""Orbax's errors when it cannot write; errors of the system come as ValueError, too."""


class Position(NamedTuple):
    """The next batch of a run."""

    epoch: int = 0
    batch: int = 0
    sums: Sequence[Sequence[float]] = ((0.0,), (0.0,))
    """The numerators and denominators of this epoch's losses so far."""


class NotWritten(Exception):
    """A checkpoint could not be written; the message is the reason of the system."""


class Checkpoints:
    """The last three checkpoints of a run in a folder, and the best ones.

    They are written in the background, and appear under their name only when they are complete.
    Leaves are stored as a list, because names of tensors may hold anything; names, shapes and
    dtypes are compared with those of the run that reads them, and the bytes with their CRC. The
    initial model lies beside them, so that `jaxonnx.load` opens the folder.

    Args:
      folder: created if it does not exist.
      resume: continue the run in the folder; "anyway": with other data, too.
      settings: the arguments that a resumed run must share, by name; "data" holds the fingerprint
        of the examples, or None if it is not known. "updates", those that a schedule is made for,
        and "phases", of sparsity, may differ.
      model: the model that is trained.
      frozen: arrays of the model that are not trained; a resumed run must have the same.
      processes: the processes of the run, each of which writes its shards.
      best: the number of best checkpoints to keep.

    Raises:
      TrainingError: the folder cannot be written, or holds a run and `resume` is false.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        resume: bool | Literal["anyway"],
        settings: dict[str, Any],
        model: Model,
        frozen: dict[str, jax.Array],
        processes: Processes,
        best: int,
    ):
        # takes seconds to import
        from orbax import checkpoint as orbax
        from orbax.checkpoint import checkpoint_managers as managers

        self._orbax = orbax
        self._settings = settings
        self._any_data = resume == "anyway"
        self.notes: list[str] = []
        """Differences that `restore` accepted."""
        self._processes = processes
        self._frozen = frozen
        self._frozen_checksums = self._checksums()
        self.folder = os.fspath(folder)
        path = Path(folder).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            check_writable(path / "checkpoint")
        except OSError as error:
            raise TrainingError(
                f"checkpoint_dir '{folder}' cannot be written ({error.strerror})"
            ) from error
        self._directory = path
        # One damaged step would make Orbax fail for all: it reads their scores at once
        damaged = []
        for step in (entry for entry in path.iterdir() if entry.name.isdigit()):
            try:
                check_form(step)
            except UNREADABLE as error:
                damaged.append((step.name, error))
        processes.agree(not damaged)  # all have looked before one changes anything
        for name, error in sorted(damaged, key=lambda pair: pair[0]):
            self._set_aside(name, error)

        def of_metrics(metrics):
            return metrics["score"]

        policies = [managers.LatestN(_KEPT), managers.BestN(get_metric_fn=of_metrics, n=best)]
        self._failed = False
        """Whether a checkpoint could not be written."""
        self._manager = orbax.CheckpointManager(
            path,
            options=orbax.CheckpointManagerOptions(
                best_fn=of_metrics,  # else the scores are not stored
                preservation_policy=managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,
            ),
        )
        latest = self._manager.latest_step()
        if latest is not None and not resume:
            self._manager.close()
            raise TrainingError(
                f"checkpoint_dir '{folder}' holds a run up to step {latest}; pass resume=True to "
                "continue it, or another folder"
            )
        self._adapters = Adapters.of(model).about if model.program.adapts else None
        if not processes.agree(latest is not None and (path / MODEL).exists()):
            plain = processes.gather(model)
            try:
                _write(plain, path / MODEL, processes.first)
            except OSError as error:
                self._manager.close()
                raise TrainingError(
                    f"'{path / MODEL}' cannot be written ({reason(error)})"
                ) from error

    def restore(self, tree: Any) -> tuple[Position, Any, History]:
        """Return the newest checkpoint that can be read: position, arrays like `tree`'s, history.

        Raises:
          TrainingError: it is of another run, or there are checkpoints and none can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                about = self._about(step)
            except UNREADABLE as error:
                self._set_aside(step, error)
                self._manager.reload()
                continue
            self._compare(about, tree)
            try:
                restored = self._arrays(step, tree, about["crc"])
            except UNREADABLE as error:
                self._set_aside(step, error)
                self._manager.reload()
                continue
            return Position(*about["position"]), restored, History(**about["history"])
        if steps:
            raise TrainingError(
                f"no checkpoint in '{self.folder}' can be read; pass another checkpoint_dir to "
                "start anew"
            )
        return Position(), tree, History()

    def save(self, at: Position, tree: Any, history: History, score: float | None) -> None:
        """Store the run at its present step; the next steps may reuse the memory of the tree.

        Args:
          tree: a `State` in the order of the file, the best weights, and the parameters of the
            model if they are not those of the state; None for missing ones.
          score: greater is better; None does not compete for the best.

        Raises:
          NotWritten: this checkpoint or the one before it.
        """
        leaves = [_copy_for_writing(_data(x)) for x in jax.tree.leaves(tree)]
        state, _, params = jax.tree.unflatten(jax.tree.structure(tree), range(len(leaves)))
        about = {
            "leaves": _leaves(tree),
            "tensors": {**state.state, **(params or state.params)},
            "adapters": self._adapters,
            "fixed": self._frozen_checksums,
            "settings": self._settings,
            "position": list(at),
            "history": dataclasses.asdict(history),
            "crc": [checksum(x) for x in leaves],
        }
        args, text = self._orbax.args, add_checksum(about)
        try:
            self._manager.save(
                len(history.losses),
                args=args.Composite(leaves=args.StandardSave(leaves), about=args.JsonSave(text)),
                metrics={"score": -math.inf if score is None else score},
            )
        except _UNWRITABLE as error:
            self._failed = True
            raise NotWritten(reason(error)) from error

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
          NotWritten: the last checkpoint.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except _UNWRITABLE as error:
            self._failed = True
            raise NotWritten(reason(error)) from error

    @property
    def where(self) -> str:
        """A clause that says where the newest complete checkpoint is."""
        with suppress(NotWritten):  # whoever saves or waits says it
            self.wait()
        try:
            self._manager.reload()
            steps = self._manager.all_steps()
        except _UNWRITABLE as error:
            return f"the checkpoints in '{self.folder}' cannot be listed ({reason(error)})"
        if not steps:
            return f"there is no checkpoint in '{self.folder}'"
        return (
            f"the last checkpoint is that of step {max(steps)} in '{self.folder}', from which "
            "resume=True goes on"
        )

    def __enter__(self) -> "Checkpoints":
        _LOGGER.addFilter(_is_news)
        return self

    def __exit__(self, *_) -> None:
        try:
            self._manager.close()
        except _UNWRITABLE as error:  # an error of the run may have come before it was said
            self._failed = True
            warn(f"a checkpoint was not written ({reason(error)})")
        finally:
            # threads of Orbax that nothing waits for log what was raised, up to the program's end
            if not self._failed:
                _LOGGER.removeFilter(_is_news)

    def _about(self, step: int) -> dict[str, Any]:
        args = self._orbax.args
        restored = self._manager.restore(step, args=args.Composite(about=args.JsonRestore()))
        return verify_checksum(restored["about"])

    def _arrays(self, step: int, tree: Any, seals: list[int | str]) -> Any:
        args = self._orbax.args
        leaves, structure = jax.tree.flatten(tree)
        like = []
        for x, seal in zip(map(_data, leaves), seals, strict=True):
            # where an array is restored to, if it is sharded or was when it was saved
            several = len(x.sharding.device_set) > 1 or isinstance(seal, str)
            place = x.sharding if several else None
            like.append(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place))
        parts = args.Composite(leaves=args.StandardRestore(like))
        restored = self._manager.restore(step, args=parts)
        check(restored["leaves"], seals)
        return jax.tree.unflatten(structure, map(_like, restored["leaves"], leaves))

    def _compare(self, about: dict[str, Any], tree: Any) -> None:
        free = "data", "updates", "phases"
        settings = {name: x for name, x in self._settings.items() if name not in free}
        for name, value in settings.items():
            # an optimizer of optax has no rate or decay to compare with those of a named one
            before = about["settings"].get(name, value)
            # with any patience the best weights are kept, which a run without one does not have
            keeps_best = name == "patience" and None not in (before, value)
            if before != value and not keeps_best:
                raise TrainingError(
                    f"the run in '{self.folder}' has {name}={before}, and {name}={value} would not "
                    f"continue it; pass {name}={before}, or another checkpoint_dir (with "
                    f"jaxonnx.load('{self.folder}') as the model, to go on from its weights)"
                )
        same = about["fixed"] == self._frozen_checksums
        fixed = self._frozen_checksums if same else self._checksums(about["fixed"])
        before, now = [*about["leaves"], *about["fixed"]], [*_leaves(tree), *fixed]
        if before != now:
            differing = [
                f"{kind} {next((line for line in lines if line not in other), 'another order')}"
                for kind, lines, other in (("it has", before, now), ("this one has", now, before))
            ]
            raise TrainingError(
                f"the checkpoint in '{self.folder}' is of another run: its parameters, state or "
                f"optimizer are not those of this one ({', '.join(differing)}); pass the same "
                "model, trainable and optimizer, or another checkpoint_dir"
            )
        self._compare_data(about["settings"]["data"])
        before, now = about["settings"]["updates"], self._settings["updates"]
        rates = about["history"]["rates"][-1:]
        if before != now and before is not None and now is not None:
            rate = "".join(f", whose learning rate ended at {x:.3g}," for x in rates)
            self.notes.append(
                f"the schedule of the run in '{self.folder}' was made for {before:,} updates{rate} "
                f"and that of this one is for {now:,}: the rate goes on where the new schedule has "
                "it, which may be far away; schedule='constant' with a small learning_rate and "
                "the saved model, in another checkpoint_dir, trains on without a jump"
            )
        before, now = about["settings"].get("phases"), self._settings.get("phases")
        if before != now and before is not None and now is not None:
            self.notes.append(
                f"sparsity shared out other epochs in the run in '{self.folder}': {before[0]} "
                f"dense and {before[1]} dynamic, now {now[0]} and {now[1]}; the run goes on in the "
                "phase that these have there, which may be an earlier one; sparsity={'dense': "
                "..., 'dynamic': ...} in both runs keeps the phases"
            )

    def _checksums(self, before: Sequence[str] = ()) -> list[str]:
        """Return a line for each fixed array: its name and checksum.

        As for leaves, the checksum of a sharded array is a sum on its devices. A run that resumes
        on other devices computes the kind of checksum that `before` has.
        """
        lines = []
        for place, (name, x) in enumerate(self._frozen.items()):
            summed = isinstance(x, jax.Array) and not x.is_fully_replicated
            if place < len(before):
                summed = before[place].startswith(f"{name} sum ")
            lines.append(f"{name} {checksum(jax.numpy.asarray(x) if summed else to_host(x))}")
        return lines

    def _compare_data(self, before: dict[str, Any] | None) -> None:
        """Refuse other data, where both are known: a stream does not say which it has."""
        now = self._settings["data"]
        if before is None or now is None or before == now:
            return
        differ = f"the run in '{self.folder}' had {difference(before, now)}"
        if not self._any_data:
            raise TrainingError(
                f"{differ}: pass the same data, another checkpoint_dir, or resume='anyway' to "
                "continue with these"
            )
        self.notes.append(differ)

    def _set_aside(self, step: int | str, error: Exception) -> None:
        """Rename a checkpoint that cannot be read: the run will write one of the same number."""
        names = (f"unreadable.{step}" + ("" if n == 1 else f".{n}") for n in count(1))
        aside = next(path for path in map(self._directory.joinpath, names) if not path.exists())
        if self._processes.first:
            os.rename(self._directory / str(step), aside)
        self._processes.agree(True)
        warn(
            f"the checkpoint of step {step} in '{self.folder}' cannot be read ({reason(error)}), "
            f"and was renamed to {aside.name}; the previous one is used",
        )


def _is_news(record: logging.LogRecord) -> bool:
    """Filter out errors that Orbax logs with a traceback and raises as well."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _leaves(tree: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}" for path, x in leaves]


def _data(x: jax.Array) -> jax.Array:
    """Return the data of a PRNG key, which the state of some optimizers has; other arrays as is."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _copy_for_writing(x: Any) -> Any:
    """Return a copy that survives the donation of the array to the next step.

    A sharded array stays on its devices, and each process writes its shards: Orbax copies them to
    the host before `save` returns. On CPU they are there already, so that it does not: copy here.
    """
    if isinstance(x, np.ndarray) or x.is_fully_replicated:  # a resumed run has its best in NumPy
        return np.array(x)
    return jnp.copy(x) if next(iter(x.sharding.device_set)).platform == "cpu" else x


def _like(data: jax.Array, x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def _write(model: Model, path: Path, first: bool) -> None:
    """Write a model as it is trained, without adapters, and with its metadata: weights may not be
    sparse yet."""
    if not first:
        return
    plain = dataclasses.replace(model, program=model.program.leave(View))

    def graph() -> Any:
        proto = to_proto(plain)
        del proto.metadata_props[:]
        proto.metadata_props.extend(model.proto.metadata_props)
        return proto

    formats.save(path, graph, dict)
