"""Without the optional packages, and as `python -W error` imports it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.bare

ROOT = Path(__file__).parents[1]
WITHOUT = f"""
import runpy, sys
from importlib.machinery import PathFinder

class Without:
    finders = [*sys.meta_path]
    find_distributions = staticmethod(PathFinder.find_distributions)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {tests.bare.OPTIONAL!r}:
            found = (finder.find_spec(name, path, target) for finder in self.finders)
            return next(filter(None, found), None)

sys.meta_path[:] = [Without()]
runpy.run_path({str(ROOT / "tests" / "bare.py")!r}, run_name="__main__")
"""


@pytest.mark.deep
def test_without_the_optional_packages():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "without extras" in done.stdout
