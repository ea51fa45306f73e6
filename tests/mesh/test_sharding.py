"""`train(..., mesh=, sharding=)` on eight devices gives what one device gives."""

import os
import subprocess
import sys

import pytest

from tests.mesh.sharded_run import CASES
from tests.support.paths import ROOT


@pytest.mark.deep
@pytest.mark.parametrize(
    "cases", [[case.__name__ for case in process] for process in CASES], ids="-".join
)
def test_one_device_and_eight(cases, tmp_path):
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.mesh.sharded_run",
        str(tmp_path),
        *cases,
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, check=True, env=environment, cwd=ROOT)
