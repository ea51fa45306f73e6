"""Runs of several processes: which one reports, and how an error in one ends the others.

JAX's runtime connects them (`jax.distributed.initialize`), and a step waits for all of them inside
a collective, where no Python runs. A process that fails writes the reason to the key-value store of
the runtime, which a thread of each other process polls.

Two things here look as if JAX could do them, and it cannot:

* `jax._src.distributed`: the client of the key-value store has no public name. `multihost_utils`
  has collectives only, which the failed process would have to join.
* `os._exit`: the main thread is blocked in C++, so that neither an exception nor a signal handler
  of Python reaches it, and SIGTERM belongs to JAX's preemption notifier. JAX's own heartbeat ends
  the process as well, but only after its timeout (100 s by default), with an abort and without the
  reason. The thread waits `_GRACE` seconds for an orderly end first, and prints the reason.
"""

import itertools
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import jax
import numpy as np
from jax._src import distributed  # nothing public gives the key-value store
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxonnx._arrays import put_array, to_host
from jaxonnx._mesh.rules import mesh_of
from jaxonnx.errors import TrainingError, warn

_POLL = 0.5
_GRACE = 3.0
"""Seconds that a process has to end in order once another has failed."""
_RUNS = itertools.count()


class HasTensors(Protocol):
    """The part of a Model that is gathered from several processes."""

    @property
    def params(self) -> Mapping[str, Any]: ...

    @property
    def state(self) -> Mapping[str, Any]: ...

    def replace(self, *, params: Any, state: Any) -> Self: ...


M = TypeVar("M", bound=HasTensors)


class Processes:
    """Ends all processes of a run if one fails; does nothing in a run of one process.

    The others raise the error before their next step. A process that is blocked in a collective
    prints the error and exits with status 1.

    Args:
      mesh: of the run, as in `train`.

    Attributes:
      several: whether several processes make the run.
      first: whether this process is the one that reports and writes files.
    """

    def __init__(self, mesh: Any):
        many = jax.process_count() > 1
        if many and mesh is None:
            warn(
                f"each of the {jax.process_count()} processes trains a model of its own: "
                "mesh='all' makes one run of them",
            )
        self._mesh = None if mesh is None else mesh_of(mesh)
        self.several = self._mesh is not None and self._mesh.is_multi_process
        self.first = not self.several or jax.process_index() == 0
        self._client: Any = distributed.global_state.client if self.several else None
        # counted only for shared runs: a process may have trained alone before, the others not
        self._run = f"jaxonnx/run/{next(_RUNS)}" if self.several else ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._failure: str | None = None
        self._at = 0, 0
        self._flags: dict[bool, jax.Array] = {}

    def __enter__(self) -> "Processes":
        if self.several:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.several:
            self._over.set()
            self._thread.join()
        if self.several and kind is not None and self._failure is None:
            self._send(f"{kind.__name__}: {error}" if str(error) else kind.__name__)

    def step(self, epoch: int, steps: int) -> None:
        """Record that this process has another batch, after `steps` of an epoch.

        Raises:
          TrainingError: another process has failed.
        """
        self._at = epoch, steps + 1
        self._check()

    def close_epoch(self, epoch: int, steps: int) -> None:
        """Wait until all processes have ended an epoch.

        Raises:
          TrainingError: they had different numbers of batches, or another process has failed.
        """
        if not self.several:
            return
        self._client.key_value_set(f"{self._run}/epoch/{epoch}/{jax.process_index()}", str(steps))
        self._at = epoch, steps
        while len(ended := self._finished_steps(epoch)) < jax.process_count():
            self._check()
            time.sleep(0.01)
        if len({*ended.values()}) > 1:
            raise TrainingError(_unequal(epoch, ended))

    def stop_flag(self, pressed: bool) -> jax.Array | None:
        """Return the stop flag of this process over the mesh; None in a run of one process."""
        if self._mesh is None or not self.several:
            return None
        if pressed not in self._flags:
            each = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
            flags = np.full(self._mesh.size, pressed, np.float32)
            self._flags[pressed] = put_array(flags, each)
        return self._flags[pressed]

    def reduce_stop(self, report: jax.Array, flag: jax.Array | None) -> jax.Array:
        """Append the maximum of all stop flags to the report of a step, within the program."""
        if self._mesh is None or flag is None:
            return report
        report = jax.numpy.append(report, flag.max().astype(report.dtype))
        return jax.lax.with_sharding_constraint(report, NamedSharding(self._mesh, PartitionSpec()))

    def gather(self, model: M) -> M:
        """Gather a model into host memory, one tensor at a time."""
        if not self.several:
            return model
        host = jax.local_devices(backend="cpu")[0]
        params, state = (
            {name: jax.device_put(to_host(x), host) for name, x in tensors.items()}
            for tensors in (model.params, model.state)
        )
        return model.replace(params=params, state=state)

    def agree(self, here: bool) -> bool:
        """Check whether `here` is true in all processes; all must call this."""
        if not self.several:
            return here
        return bool(multihost_utils.process_allgather(np.array(here)).all())

    def _finished_steps(self, epoch: int) -> dict[int, int]:
        """Return the number of steps of each process that has ended an epoch."""
        entries = self._client.key_value_dir_get(f"{self._run}/epoch/{epoch}/")
        return {int(key.rpartition("/")[2]): int(steps) for key, steps in entries}

    def _check(self) -> None:
        if self._failure is not None:
            raise TrainingError(self._failure)

    def _send(self, what: str) -> None:
        self._failure = f"process {jax.process_index()} failed: {what}"
        with suppress(jax.errors.JaxRuntimeError):  # another one was the first to fail
            self._client.key_value_set(f"{self._run}/failed/first", self._failure)

    def _receive(self) -> None:
        while not self._over.wait(_POLL):
            self._failure = self._failure or self._read_failure()
            if self._failure is not None and not self._over.wait(_GRACE):
                print(f"jaxonnx: {self._failure}", file=sys.stderr, flush=True)
                # the shutdown of the others waits for this process, unless it leaves the runtime
                leave = threading.Thread(target=jax.distributed.shutdown, daemon=True)
                leave.start()
                leave.join(_GRACE)
                os._exit(1)

    def _read_failure(self) -> str | None:
        """Return the error of another process, or the one that this process must raise."""
        epoch, steps = self._at
        try:
            failed = self._client.key_value_dir_get(f"{self._run}/failed/")
            ended = self._finished_steps(epoch)
        except jax.errors.JaxRuntimeError as error:
            return f"process 0 cannot be reached: {error}"
        if failed:
            return failed[0][1]
        if ended and min(ended.values()) < steps:  # this one would wait for it forever
            self._send(f"TrainingError: {_unequal(epoch, {jax.process_index(): steps, **ended})}")
        return self._failure


def _unequal(epoch: int, steps: dict[int, int]) -> str:
    had = ", ".join(f"process {index} {count}" for index, count in sorted(steps.items()))
    return (
        f"the processes have different numbers of batches in epoch {epoch + 1} ({had}); an "
        "iterable must give each as many (drop_remainder=True in Grain's ShardByJaxProcess)"
    )
