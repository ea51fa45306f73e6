"""`train(..., mesh=, sharding=)` on eight devices gives what one device gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sharded_run import CASES


def on_eight_devices(case, folder):
    command = [sys.executable, "-W", "ignore", "-m", "tests.sharded_run", case, str(folder)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[1])


@pytest.mark.deep
def test_quick(tmp_path):
    on_eight_devices("quick", tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("case", [case.__name__ for case in CASES[1:]])
def test_one_device_and_eight(case, tmp_path):
    on_eight_devices(case, tmp_path)
