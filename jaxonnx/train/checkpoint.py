"""Checkpoints of a run, one an epoch, through Orbax."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxonnx.errors import TrainingError
from jaxonnx.save import check_writable
from jaxonnx.train.history import History

_KEPT = 3


class Checkpoints:
    """The last three epochs of a run in a folder, written in the background and atomically.

    The leaves are stored as a list, because names of tensors may hold anything, and are checked
    against the shapes and names of the run that reads them.

    Raises:
      TrainingError: the folder cannot be written, or holds a run and `resume` is false.
    """

    def __init__(self, folder: str | os.PathLike, resume: bool):
        # takes seconds to import
        from orbax import checkpoint as orbax

        self._orbax = orbax
        path = Path(folder).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            check_writable(path / "checkpoint")
        except OSError as error:
            raise TrainingError(
                f"checkpoint_dir '{folder}' cannot be written ({error.strerror})"
            ) from error
        self._manager = orbax.CheckpointManager(
            path, options=orbax.CheckpointManagerOptions(max_to_keep=_KEPT)
        )
        if self._manager.latest_step() is not None and not resume:
            self._manager.close()
            raise TrainingError(
                f"checkpoint_dir '{folder}' holds a run up to epoch {self._manager.latest_step()}; "
                "pass resume=True to continue it, or another folder"
            )

    def restore(self, carry: Any) -> tuple[int, Any, History]:
        """The epochs done, the carry and the history of the latest checkpoint, if there is one."""
        done = self._manager.latest_step()
        if done is None:
            return 0, carry, History()
        args = self._orbax.args
        about = self._manager.restore(done, args=args.Composite(about=args.JsonRestore()))["about"]
        if about["leaves"] != _leaves(carry):
            raise TrainingError(
                "the checkpoint is of another run: its parameters, state or optimizer are not "
                "those of this one; pass the same model, trainable and optimizer, or another "
                "checkpoint_dir"
            )
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), carry)
        leaves, structure = jax.tree.flatten(like)
        restored = self._manager.restore(
            done, args=args.Composite(leaves=args.StandardRestore(leaves))
        )
        return done, jax.tree.unflatten(structure, restored["leaves"]), History(**about["history"])

    def save(self, done: int, carry: Any, history: History) -> None:
        """Stores the run after `done` epochs; the next steps may reuse the memory of the carry."""
        args = self._orbax.args
        about = {"leaves": _leaves(carry), "history": dataclasses.asdict(history)}
        leaves = [jnp.copy(x) for x in jax.tree.leaves(carry)]
        self._manager.save(
            done,
            args=args.Composite(leaves=args.StandardSave(leaves), about=args.JsonSave(about)),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        """Waits for what is being written."""
        self._manager.close()


def _leaves(carry: Any) -> list[str]:
    found = jax.tree_util.tree_leaves_with_path(carry)
    return [f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}" for path, x in found]
