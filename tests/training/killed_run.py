"""Kills a training run at random moments until it has been killed often enough, then lets it end.

    python -m tests.training.killed_run FOLDER KILLS

Imports once, and forks before JAX starts: each run is a process of its own, and starts at once.
"""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import jax
import numpy as np
from orbax import checkpoint

from tests.support import tiny_networks

assert checkpoint


def run(folder: Path, resume: bool, steps: int) -> None:
    """Trains, and writes the weights to `folder`, and a byte to the pipe `steps` for each step."""
    # XLA compiles alike in each process only if the code comes from one place
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    settings = {"checkpoint_dir": folder / "run", "checkpoint_every": 5, "resume": True}
    result = tiny_networks.train(
        tiny_networks.mlp(dropout=True),
        epochs=30,
        accumulate=2,
        ema=0.9,
        patience=1000,
        on_log=lambda step, metrics: os.write(steps, b"."),
        validation=tiny_networks.examples(16, seed=2),
        **(settings if resume else {}),
    )
    history = {"losses": result.history.losses}
    history |= {"validation": [row["validation_loss"] for row in result.history.epochs]}
    np.savez(
        folder / ("resumed.npz" if resume else "whole.npz"),
        **tiny_networks.weights(result),
        **history,
    )


def child(folder: Path, resume: bool) -> tuple[int, int]:
    """Starts a run; its process number, and a pipe with a byte for each step it has done."""
    count, steps = os.pipe()
    number = os.fork()
    if number:
        os.close(steps)
        return number, count
    status = 1
    try:
        run(folder, resume, steps)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def main(folder: Path, kills: int) -> None:
    number, _ = child(folder, False)
    assert os.waitpid(number, 0)[1] == 0
    moments = random.Random(0)
    steps = []
    for i in range(kills):
        number, count = child(folder, True)
        if i % 4:  # else while it starts
            for _ in range(moments.randrange(1, 20)):
                os.read(count, 1)
        time.sleep(moments.uniform(0, 0.05))
        os.kill(number, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == -signal.SIGKILL
        os.close(count)
        found = [int(p.name) for p in (folder / "run").glob("*") if p.name.isdigit()]
        steps.append(max(found, default=0))
    number, _ = child(folder, True)
    assert os.waitpid(number, 0)[1] == 0
    print(*steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
