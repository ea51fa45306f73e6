"""Warnings point to the line of the user's program, whatever lies between it and their cause."""

import ast
import threading
import warnings
from pathlib import Path

import jax
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from jaxonnx.errors import warn
from tests.support.few_bit_files import FILES

PACKAGE = Path(jaxonnx.__file__).parent


def model(text):
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')


FIXED = model(
    """g (float[1, 3] x) => (float[1, 3] y) <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
    m = ReduceMean <axes = [0]> (x) z = Add(x, m) h = MatMul(z, w) y = Softmax(h) }"""
)
WIDE = model("g (float[N] x) => (int64[N] y) { y = Cast <to = 7> (x) }")
DATA = np.ones((8, 3), np.float32), np.zeros(8, np.int32)


def places(call, words):
    """Return the lines of this file that the warnings with these words point to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    caught = [w for w in caught if words in str(w.message)]
    assert {w.filename for w in caught} <= {__file__}
    lines = Path(__file__).read_text().splitlines()
    return [lines[w.lineno - 1].strip() for w in caught]


def test_load():
    def call():
        jaxonnx.load(WIDE)

    assert places(call, "64-bit outputs") == ["jaxonnx.load(WIDE)"]


def test_a_run_of_a_batch_that_is_fixed():
    loss = "softmax_cross_entropy_with_integer_labels"

    def call():
        jaxonnx.train(FIXED, DATA, loss=loss, epochs=1)

    assert places(call, "fixes the batch") == ["jaxonnx.train(FIXED, DATA, loss=loss, epochs=1)"]


def test_a_step_whose_result_save_refuses():
    packed = jaxonnx.load(FILES["4 bits, bias"]())
    lora = jaxonnx.LoRA(2, where="w", dora=True)

    def call():
        jaxonnx.training.step(packed, "squared_error", optax.sgd(0.1), lora=lora)

    (line,) = places(call, "save(path) will refuse")
    assert line.startswith("jaxonnx.training.step(packed")


def test_within_a_transformation_and_a_thread():
    def within(x):
        warn("in jit")
        return x

    assert places(lambda: jax.jit(within)(1.0), "in jit") == ['warn("in jit")']

    def run():
        jaxonnx.load(WIDE)  # in a thread

    def call():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    assert places(call, "64-bit outputs") == ["jaxonnx.load(WIDE)  # in a thread"]


def test_a_filter_by_module_takes_the_users_module():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=__name__)
        jaxonnx.load(WIDE)
    with pytest.warns(UserWarning, match="64-bit outputs"):
        jaxonnx.load(WIDE)


def test_all_warnings_come_by_one_function():
    def calls(path):
        nodes = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
        return {ast.unparse(node.func) for node in nodes}

    assert not [p for p in PACKAGE.rglob("*.py") if "warnings.warn" in calls(p)]
