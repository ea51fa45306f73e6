"""Kills one of the two processes of a run at random moments; lets other processes end it.

    python -m tests.mesh.killed_processes FOLDER KILLS

Two processes with two devices each make the run, and after each kill two make it again. The folder
of checkpoints is copied after the first kill that leaves one: there one process with eight devices
goes on.

Imports once, and forks before JAX starts, as `killed_run` does.
"""

import os
import random
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax import P
from orbax import checkpoint

from tests.support import run_processes, tiny_networks

assert checkpoint
DEVICES = {2: 2, 1: 8}
"""Of each process, by how many there are."""
PATIENCE = 120


def run(folder: Path, count: int, index: int, coordinator: str, steps: int) -> None:
    """Trains as one of the processes; process 0 writes a byte to `steps` for each step."""
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / f"cache{count}"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_num_cpu_devices", DEVICES[count])
    if count > 1:
        # a process that is killed is missed by then wherever the others wait for it
        beat = {"heartbeat_timeout_seconds": 10, "initialization_timeout": 30}
        jax.distributed.initialize(coordinator, count, index, **beat)
    result = tiny_networks.train(
        tiny_networks.mlp(dropout=True),
        epochs=6,
        ema=0.9,
        on_log=lambda step, metrics: os.write(steps, b"."),
        validation=tiny_networks.examples(16, seed=2),
        mesh=jax.make_mesh((jax.device_count(),), ("data",)),
        sharding={"w1": P("data"), "w2": P("data")},
        checkpoint_dir=folder / "run",
        checkpoint_every=4,
        resume=True,
    )
    if count > 1:
        jax.distributed.shutdown()  # the first that ends would take the others with it
    if index == 0:
        history = {"losses": result.history.losses}
        history |= {"validation": [row["validation_loss"] for row in result.history.epochs]}
        np.savez(folder / "end.npz", **tiny_networks.weights(result), **history)


@dataclass
class Started:
    """The processes of a run, by index, and the steps that process 0 tells."""

    numbers: list[int]
    steps: int

    def wait_for_steps(self, count: int) -> None:
        """Wait for so many steps, or the end of the run."""
        while count and select.select([self.steps], [], [], PATIENCE)[0]:
            if not os.read(self.steps, 1):
                return
            count -= 1

    def ended(self) -> list[int]:
        """Return the exit statuses; all must end within two minutes."""
        until, codes = time.monotonic() + PATIENCE, dict.fromkeys(self.numbers)
        while None in codes.values():
            assert time.monotonic() < until, codes
            for number in [n for n, code in codes.items() if code is None]:
                done, status = os.waitpid(number, os.WNOHANG)
                if done:
                    codes[number] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.close(self.steps)
        return [code for code in codes.values() if code is not None]


def start(folder: Path, count: int) -> Started:
    """Starts the processes of a run."""
    steps, told = os.pipe()
    coordinator, numbers = run_processes.coordinator(), []
    for index in range(count):
        if number := os.fork():
            numbers.append(number)
            continue
        status = 1
        try:
            os.close(steps)
            run(folder, count, index, coordinator, told)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(told)
    return Started(numbers, steps)


def kill(folder: Path, count: int, moments: random.Random) -> tuple[int, int]:
    """Kills one of the processes of a run; which, and the last checkpoint that there is then."""
    one = start(folder, count)
    one.wait_for_steps(moments.randrange(0, 16))
    time.sleep(moments.uniform(0, 0.1))
    victim = moments.randrange(count)
    os.kill(one.numbers[victim], signal.SIGKILL)
    codes = one.ended()
    assert codes[victim] == -signal.SIGKILL, codes
    assert all(codes), codes  # the others have not gone on without it
    found = [int(p.name) for p in (folder / "run").glob("*") if p.name.isdigit()]
    return victim, max(found, default=0)


def end(folder: Path, count: int) -> None:
    codes = start(folder, count).ended()
    assert not any(codes), codes


def main(folder: Path, kills: int) -> None:
    whole, same, other = (folder / name for name in ("whole", "same", "other"))
    for path in (whole, same):
        path.mkdir()
    end(whole, 2)
    moments, told = random.Random(0), []
    while len(told) < kills or not other.exists():
        told.append(kill(same, 2, moments))
        if told[-1][1] and not other.exists():
            shutil.copytree(same, other)
    end(same, 2)
    print(*told, flush=True)
    end(other, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
