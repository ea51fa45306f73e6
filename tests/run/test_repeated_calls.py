"""Calls like one before: the same results and errors, without the same checks."""

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import jaxonnx

MODEL = """
<ir_version: 9, opset_import: ["": 18]>
g (float[n, 3] x, float[n, 2] z) => (float[n, 2] y)
<float[2, 3] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, -1}> {
  h = Gemm <transB = 1> (x, w, b)
  y = Add(h, z)
}
"""
DOUBLES = """
<ir_version: 9, opset_import: ["": 18]>
g (double[n] x) => (double[n] y) { y = Add(x, x) }
"""
FIXING = """
<ir_version: 9, opset_import: ["": 18]>
g (float[n] x, int64[1] size) => (float[m] y) { y = Expand(x, size) }
"""


def load(text=MODEL):
    return jaxonnx.load(onnx.parser.parse_model(text))


def examples(rows=4, seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(size=(rows, size)).astype(np.float32) for size in (3, 2)]


def expected(x, z):
    session = onnxruntime.InferenceSession(onnx.parser.parse_model(MODEL).SerializeToString())
    return session.run(None, {"x": np.asarray(x), "z": np.asarray(z)})[0]


def count_calls(function):
    """Count the calls of Python functions of jaxonnx inside a call."""
    count = 0

    def watch(frame, event, _):
        nonlocal count
        count += event == "call" and "jaxonnx" in frame.f_code.co_filename

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_call_like_one_before_is_not_checked_again():
    model, (x, z) = load(), examples()
    first = count_calls(lambda: model(x, z))
    again = count_calls(lambda: model(x, z))
    assert again <= 8 < first
    assert count_calls(lambda: model(jnp.asarray(x), z)) > 8  # another signature


def test_results_are_those_of_the_first_call():
    model = load()
    for seed in range(3):
        x, z = examples(seed=seed)
        for arrays in ((x, z), (jnp.asarray(x), z), (jnp.asarray(x), jnp.asarray(z))):
            np.testing.assert_allclose(model(*arrays), expected(x, z), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(model(*arrays), expected(x, z), rtol=1e-5, atol=1e-6)
    model = model.replace(params={name: 2 * value for name, value in model.params.items()})
    np.testing.assert_allclose(model(x, z), 2 * expected(x, z) - z, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model(z=z, x=x), model(x, z), rtol=1e-6)


def test_an_array_may_change_after_the_call():
    model, (x, z) = load(), examples(1000)
    right = expected(x, z)
    for _ in range(5):
        passed = x.copy()
        y = model(passed, z)
        passed[:] = 0
        np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-6)


def test_errors_are_those_of_the_first_call():
    model, (x, z) = load(), examples()
    model(x, z)
    for wrong, message in (
        ((x.astype(np.float16), z), "casts nothing silently"),
        ((x[:, :2], z), "needs size 3 along axis 1"),
        ((x[:2], z), "'n' was 2"),
        ((np.ma.masked_array(x, x > 0), z), "masked array"),
        ((x,), "'z' is missing"),
        ((x, z, z), "takes 2 inputs"),
        (("x", z), "must be an array"),
    ):
        for _ in range(2):
            with pytest.raises(jaxonnx.InputError, match=message):
                model(*wrong)
    deleted = jnp.asarray(x)
    model(deleted, z)
    deleted.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        model(deleted, z)
    np.testing.assert_allclose(model(x, z), expected(x, z), rtol=1e-5, atol=1e-6)


def test_transformations_of_a_call_that_was_made_before():
    model, (x, z) = load(), examples()
    right = expected(x, z)
    model(x, z)
    np.testing.assert_allclose(jax.jit(model)(x, z), right, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda: model(x, z))(), right, rtol=1e-5, atol=1e-6)
    rows = jax.vmap(lambda x, z: model(x[None], z[None])[0])(x, z)
    np.testing.assert_allclose(rows, right, rtol=1e-5, atol=1e-6)
    slope = jax.grad(lambda x: model(x, z).sum())(jnp.asarray(x))
    np.testing.assert_allclose(slope, np.tile([5.0, 7, 9], (4, 1)), rtol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(model(x, z), right, rtol=1e-5, atol=1e-6)
    with jax.default_device(jax.devices()[-1]):
        assert model(x, z).devices() == model.params["w"].devices()


def test_types_follow_x64():
    model, x = load(DOUBLES), np.ones(3)
    for _ in range(2):
        assert model(x).dtype == np.float32
        assert model(x.astype(np.float32)).dtype == np.float32
        with jax.enable_x64(True):
            assert model(x).dtype == np.float64
            with pytest.raises(jaxonnx.InputError, match="was given float32"):
                model(x.astype(np.float32))


def test_an_input_that_fixes_shapes_is_read_in_each_call():
    model, x = load(FIXING), np.ones(1, np.float32)
    for size in (2, 3, 2, 5):
        assert model(x, np.array([size])).shape == (size,)


def test_threads_share_calls():
    model, results = load(), {}

    def work(seed):
        x, z = examples(rows=1 + seed % 3, seed=seed)
        results[seed] = [np.asarray(model(x, z)) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, values in results.items():
        right = expected(*examples(rows=1 + seed % 3, seed=seed))
        for value in values:
            np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-6)


def test_a_transposed_weight_of_gemm_is_not_transposed_in_each_call():
    """XLA:CPU computes a row times a transposed matrix in a loop that is not vectorized."""
    model, (x, z) = load(), examples(1)
    program = jax.jit(model.apply).lower(model.params, x, z).as_text()
    assert "stablehlo.dot_general" in program
    assert "stablehlo.transpose" not in program
