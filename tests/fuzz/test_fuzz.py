"""What fuzzing found stays cured, and the fuzzer sees what it is for."""

import os
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

from tests.fuzz import check, files, pool
from tests.fuzz.compare import ROWS, differences
from tests.fuzz.explain import Compared, why
from tests.fuzz.found import FILES, MODELS
from tests.fuzz.outcome import Outcome
from tests.fuzz.shrink import unpacked
from tests.support.paths import ROOT


@pytest.mark.parametrize("what", MODELS)
def test_models_that_were_found(what):
    mode, draw, text = MODELS[what]
    outcome = check.model(unpacked(text), (), mode, draw)
    assert outcome.kind not in ("finding", "differ", "we refuse"), outcome


NODE = '<ir_version: 10, opset_import: ["": 13]> g (float[2] x) => (y) {{ y = {} (x) }}'
X = np.ones(2, np.float32)


def explained(node, refused="", errors=None, different=None, x=X):
    proto = onnx.parser.parse_model(NODE.format(node))
    errors, different = errors or {}, different or {}
    return why(Compared(proto, {"x": x}, refused, errors, different), ROWS)


@pytest.mark.parametrize(
    ("message", "runs", "known"),
    [
        (
            "node 'y' (OneHot, opset 13): depth must be positive, got [-4] [inputs]",
            ["reference"],
            True,
        ),
        ("node 'y' (OneHot, opset 13): depth must be positive, got [-4]", ["onnxruntime"], False),
        ("node 'y' (Split, opset 13): depth must be positive, got [-4]", ["reference"], False),
        ("node 'y' (OneHot, opset 13): OneHot does not take these inputs", ["reference"], False),
        ("the ModelProto uses opset 99, the installed onnx 1.23 knows 27", ["onnxruntime"], True),
    ],
)
def test_refusals_are_explained_by_operator_message_and_runtime(message, runs, known):
    assert bool(explained("Relu", message, different={key: [] for key in runs})) == known


def test_a_refusal_is_right_where_shape_inference_agrees():
    message, one = "node 'y' (Relu, opset 13): whatever", {"reference": []}
    assert explained("Relu", message, {"onnxruntime": "[ShapeInferenceError] no"}, one)
    assert not explained("Relu", message, {"onnxruntime": "NOT_IMPLEMENTED"}, one)


def test_a_model_that_jaxonnx_alone_runs_needs_a_reason_for_each_other():
    lacks = "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation"
    nobody = {"reference": "No implementation for operator 'Relu'", "onnxruntime": lacks}
    assert explained("Relu", errors=nobody)
    assert not explained("Relu", errors=nobody | {"reference": "the input is wrong"})


def test_results_are_explained_by_every_array_that_differs():
    negative = "Attention <scale = -1.0>"
    right = {"reference": [(X, X * np.nan)]}
    assert explained(negative, different=right)
    assert not explained(negative, different={"reference": [(X, X * 2)]})
    assert not explained(negative, different={"reference": [(X, X * np.nan), (X, X * 2)]})
    assert not explained(negative, different=right | {"onnxruntime": [(X, X * 2)]})
    assert not explained("Relu", different=right)
    clipped = {"reference": [(np.uint8([1, 255]), np.uint8([1, 0]))]}
    assert explained("Cast <to = 2>", different=clipped, x=np.float32([1, np.inf]))
    assert not explained("Cast <to = 2>", different=clipped, x=np.float32([1, 7]))


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ([X], [X], True),
        ([X], [X * 2], False),
        ([X], [X, X], False),
        ([{"a": X[0]}], [{"a": 1.0}], True),
        ([{"a": X[0]}], [{"a": 2.0}], False),
        ([{"a": X[0]}], [{"b": 1.0}], False),
        ([X.astype(ml_dtypes.float8_e4m3fn)], [np.uint8([56, 56])], True),
        ([X.astype(ml_dtypes.float8_e4m3fn)], [np.uint8([56, 57])], False),
        ([np.array(["a"], object)], [np.array(["b"], object)], False),
        ([None], [None], True),
    ],
)
def test_differences(ours, theirs, same):
    assert ([*differences(ours, theirs)] == []) == same


@pytest.fixture(scope="module")
def original_files():
    return files.write_files()


@pytest.mark.parametrize("what", FILES)
def test_files_that_were_found(what, original_files):
    kind, changed = FILES[what]
    content = original_files[kind] | {name: unpacked(text) for name, text in changed.items()}
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
def test_hundreds_of_cases_find_nothing():
    """The same cases wherever it runs."""
    limits = ["--minutes", "2", "--cases", "400", "--seed", "0"]
    command = [sys.executable, "-m", "tests.fuzz", *limits]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
