"""Ctrl-C, once and twice, at any moment of the command: real signals to a real process."""

import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest

import jaxonnx
from tests.support.fork_server import Command
from tests.support.tiny_networks import examples, mlp


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Starts `jaxonnx train` for a run without end, with further flags.

    It starts as a user's command does, or forked: the same from the end of its imports on.
    """
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "net.onnx")
    x, y = examples()
    np.savez("data.npz", x=x, y=y)
    # where tests were started in the background, SIGINT is ignored from the start
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    line = "train net.onnx data.npz -o out.onnx --log log.csv --batch-size 8 --epochs 100000000"
    started = []

    def start(*flags, forked=True):
        arguments = [*line.split(), *flags]
        if forked:
            process = Command(arguments, tmp_path)
        else:
            whole = [sys.executable, "-m", "jaxonnx", *arguments]
            both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(whole, text=True, **both)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
    signal.signal(signal.SIGINT, before)


def wait_for_steps(process, folder, steps):
    """Wait until so many steps are logged."""
    log = folder / "log.csv"
    end = time.monotonic() + 240
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > steps):
        assert time.monotonic() < end, "no steps"
        time.sleep(0.02)


def pressed(process, *pauses):
    """Press Ctrl-C after each pause; return the exit status and all output."""
    for pause in pauses:
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    try:
        said = process.communicate(timeout=120)
    finally:
        process.kill()
    said = said if isinstance(said, str) else said[0]
    assert "Traceback" not in said, said
    assert "FATAL" not in said, said
    return process.returncode, said


@pytest.mark.deep
def test_ctrl_c_twice_writes_the_weights(command, tmp_path):
    process = command("--checkpoints", "kept")
    wait_for_steps(process, tmp_path, 20)
    status, said = pressed(process, 0, 0.05)
    assert status == 1, said
    assert "interrupted" in said
    assert "wrote out.onnx" in said
    before = jaxonnx.load("net.onnx").params
    after = jaxonnx.load("out.onnx").params
    assert all(not np.array_equal(before[name], after[name]) for name in before)


KEPT = ("--checkpoints", "kept", "--checkpoint-every", "7")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("pause", "flags"),
    [
        *((pause, ()) for pause in (0.0, 0.2)),
        *((pause, KEPT) for pause in (0.001, 0.05, 1.0)),
    ],
)
def test_ctrl_c_twice_at_any_distance(command, tmp_path, flags, pause):
    process = command(*flags)
    wait_for_steps(process, tmp_path, 20)
    status, said = pressed(process, 0.3 + pause / 7, pause)
    assert status == 1, said
    assert jaxonnx.load("out.onnx").params
    if flags:
        assert jaxonnx.load("kept").params


@pytest.mark.deep
@pytest.mark.parametrize("several", [False, True])
def test_ctrl_c_from_the_start_to_the_first_steps(command, several):
    """During imports, loading and compilation: 130, or 1 and a file once there were steps."""
    seen = set()
    for number in range(12):
        process = command("--checkpoints", f"kept{number}", forked=False)
        moment = 0.4 * 2**number
        status, said = pressed(process, moment, *([0.02] * 3 if several else []))
        assert status in (1, 130), said
        assert "interrupted" in said
        assert (status == 1) == ("wrote out.onnx" in said)
        seen.add(status)
        if status == 1:
            break
    assert seen == {1, 130}
