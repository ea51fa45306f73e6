"""A run that is killed at any moment and resumed ends with the bits of the uninterrupted one."""

import subprocess
import sys

import numpy as np
import pytest

KILLS = 20


@pytest.mark.deep
def test_twenty_kills_leave_no_trace(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.killed_run", tmp_path, str(KILLS)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()  # runs that take long say how far they are
    steps = [int(n) for n in last.split()]
    assert len(steps) == KILLS
    assert len({*steps}) > KILLS / 3  # it got on in between
    whole, resumed = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("whole", "resumed"))
    assert {*whole} == {*resumed}
    for name, value in whole.items():
        assert value.tobytes() == resumed[name].tobytes(), name


@pytest.mark.deep
def test_a_killed_process_leaves_no_trace(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.killed_processes", tmp_path, "3"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    whole, same, other = (
        dict(np.load(tmp_path / name / "end.npz")) for name in ("whole", "same", "other")
    )
    assert {*whole} == {*same} == {*other}
    for name, value in whole.items():
        assert value.tobytes() == same[name].tobytes(), name
        np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
