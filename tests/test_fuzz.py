"""What fuzzing found stays cured, and the fuzzer sees what it is for."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import check, files, pool
from tests.fuzz.check import Outcome
from tests.fuzz.found import FILES, MODELS
from tests.fuzz.shrink import unpacked

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("what", MODELS)
def test_models_that_were_found(what):
    mode, draw, text = MODELS[what]
    outcome = check.model(unpacked(text), (), mode, draw)
    assert outcome.kind not in ("finding", "differ", "we refuse"), outcome


@pytest.mark.parametrize(
    ("message", "runs", "explained"),
    [
        (
            "node 'y' (OneHot, opset 13): depth must be positive, not -4 [inputs]",
            ["reference"],
            True,
        ),
        ("node 'y' (OneHot, opset 13): depth must be positive, not -4", ["onnxruntime"], False),
        ("node 'y' (Split, opset 13): depth must be positive, not -4", ["reference"], False),
        ("node 'y' (OneHot, opset 13): OneHot does not take these inputs", ["reference"], False),
        ("the ModelProto uses opset 99, the installed onnx 1.23 knows 27", ["onnxruntime"], True),
    ],
)
def test_refusals_are_explained_by_operator_message_and_runtime(message, runs, explained):
    assert any(refusal.explains(message, runs) for refusal in check.EXPLAINED) == explained


@pytest.fixture(scope="module")
def made():
    return files.made()


@pytest.mark.parametrize("what", FILES)
def test_files_that_were_found(what, made):
    kind, changed = FILES[what]
    content = made[kind] | {name: unpacked(text) for name, text in changed.items()}
    outcome = files.examine(kind, content)
    assert outcome.kind != "finding", outcome


def misbehave(case, stage):
    """Do what no file may make us do."""
    stage("call")
    if case == "abort":
        os.abort()
    if case == "spin":
        while True:
            pass
    if case == "sleep":
        time.sleep(60)
    if case == "fill":
        np.ones(1 << 24)
    if case == "raise":
        try:
            {}["x"]
        except KeyError as error:
            return check.finding(error, "call")
    return Outcome("ran", str(os.getpid()))


@pytest.mark.deep
def test_workers_survive_what_files_do():
    bounds = pool.Bounds(seconds=1, clock=10, memory=1 << 25)
    cases = ["fine", "abort", "fine", "spin", "sleep", "fine", "fill", "raise", "fine"]
    outcomes = list(pool.run(misbehave, cases, 1, bounds))
    assert [case for case, _ in outcomes] == cases
    buckets = [o.bucket if o.kind == "finding" else o.kind for _, o in outcomes]
    assert buckets == [
        *("ran", "death in call (-6)", "ran", "time outside", "time in call", "ran"),
        *("memory (ran)", "KeyError in outside (call)", "ran"),
    ]


@pytest.mark.deep
def test_a_minute_finds_nothing():
    """The same cases wherever it runs: as many as a quiet machine tries in that time."""
    limits = ["--minutes", "2", "--cases", "2500", "--seed", "0"]
    command = [sys.executable, "-m", "tests.fuzz", *limits]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
