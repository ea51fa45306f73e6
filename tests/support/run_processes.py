"""Runs of several processes on this machine, connected by JAX's runtime."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

HEAD = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
signal.alarm(300)  # what hangs ends, whatever waits for it
import jax
coordinator, count, index = sys.argv[1], *map(int, sys.argv[2:4])
if count > 1:
    jax.distributed.initialize(coordinator, count, index, heartbeat_timeout_seconds=20)
import numpy as np
from jax import P
import jaxonnx
from tests.support import tiny_networks as tiny
mesh = jax.make_mesh((jax.device_count(),), ("data",))
RULES = {"w1": P("data"), "w2": P("data")}
"""


@dataclass
class Ended:
    """How a process has ended."""

    status: int
    out: str
    errors: str


def coordinator() -> str:
    """Returns an address that is free now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def start(program: str, count: int, *arguments, devices: int = 2) -> list[subprocess.Popen]:
    """Starts processes with so many devices each; `program` has `mesh`, `index` and `RULES`."""
    address = coordinator()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-c", HEAD + program),
                *(address, str(count), str(index), *map(str, arguments)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(count)
    ]


def ended(processes: list[subprocess.Popen], timeout: float = 240) -> list[Ended]:
    """Waits for processes, and kills them if that takes too long."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            with process:  # whose end closes its pipes
                process.kill()
    return [Ended(p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]


def run(program: str, count: int, *arguments, devices: int = 2) -> list[Ended]:
    """Runs a program to its end, which must be a good one in each process."""
    results = ended(start(program, count, *arguments, devices=devices))
    assert not any(result.status for result in results), results[0].errors + results[-1].errors
    return results
