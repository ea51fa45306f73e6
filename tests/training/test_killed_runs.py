"""A run that is killed at any moment and resumed ends with the bits of the uninterrupted one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import jaxonnx
from jaxonnx import docs
from jaxonnx.cli import main
from tests.support import run_processes, tiny_networks
from tests.support.paths import ROOT

KILLS = 4


@pytest.mark.deep
def test_kills_leave_no_trace(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.killed_run", tmp_path, str(KILLS)],
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
        [sys.executable, "-W", "ignore", "-m", "tests.mesh.killed_processes", tmp_path, "1"],
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
    params = jaxonnx.load(tmp_path / "same" / "run").params
    np.testing.assert_array_equal(params["w1"], same["w1"])


LOOP = """
sleep() { echo "slept $1" >> {index}.log; command sleep 1; }
jaxonnx() {
    {python} -W ignore -m jaxonnx "$@" &
    if [ {index} = 1 ] && [ ! -e killed ]; then
        until compgen -G 'run/*[05]' > /dev/null || ! kill -0 $!; do command sleep 0.02; done
        touch killed
        kill -9 $!
    fi
    wait $!
    local status=$?
    echo "ended $status" >> {index}.log
    return $status
}
"""


def supervised(folder, index, **changes):
    """Start the restart loop of the page as one of two hosts, whose second is killed once."""
    page = (Path(docs.__file__).parent / "many_devices.md").read_text()
    (loop,) = (b for b in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "until" in b)
    for text, other in changes.items():
        assert text in loop
        loop = loop.replace(text, other)
    head = LOOP.replace("{index}", str(index)).replace("{python}", sys.executable)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        ["bash", "-c", head + loop], cwd=folder, env=environment, stderr=subprocess.DEVNULL
    )


@pytest.mark.deep
def test_the_restart_loop_of_the_docs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = tiny_networks.examples()
    onnx.save(tiny_networks.mlp(), "net.onnx")
    np.savez("data.npz", x=x, y=y)
    settings = "--epochs 10 --batch-size 8 --checkpoint-every 5"
    address = run_processes.coordinator()
    hosts = [
        supervised(tmp_path, i, all=f"all --distributed {address},2,{i} {settings}")
        for i in range(2)
    ]
    try:
        assert [host.wait(timeout=150) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    for index in range(2):
        log = Path(f"{index}.log").read_text().splitlines()
        assert log[-1] == "ended 0", log
        # the one that is left raises an error, or JAX's runtime ends it
        assert log[0] == "ended 137" if index else log[0] not in ("ended 0", "ended 2"), log
        assert log[1:-1:2] == ["slept 10"] * (len(log) // 2), log
    assert main(["train", "net.onnx", "data.npz", "-o", "whole.onnx", *settings.split()[:4]]) == 0
    trained, whole = (jaxonnx.load(f"{name}.onnx").params for name in ("trained", "whole"))
    for name, value in whole.items():
        np.testing.assert_allclose(trained[name], value, rtol=1e-4, atol=1e-6, err_msg=name)

    refused = supervised(tmp_path, 2, run="run --epochs none")
    assert refused.wait(timeout=60) == 0
    assert Path("2.log").read_text().split() == ["ended", "2"]
