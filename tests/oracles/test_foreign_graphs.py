"""Graphs that nobody here wrote: a folder of .onnx files of other projects, beside onnxruntime.

    JAXONNX_FOREIGN=FOLDER python -m pytest -n 2 -q -m deep tests/oracles/test_foreign_graphs.py

Files lie as onnxruntime, ONNX and MIGraphX keep them: a graph with `test_data_set_*` beside it
(`input_0.pb`), or alone (burn-onnx, PINTO's), which then gets random inputs. For each file that
onnxruntime runs: outputs agree at two batch sizes, integers exactly; an untouched save has the
tensors of the file bit for bit; gradients of the parameters are finite where outputs are. A file
that onnxruntime refuses must load and run, or be refused by an error of jaxonnx. A file that takes
longer than `SECONDS`, or ends its process, fails.
"""

import multiprocessing
import os
import time
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx import validation
from jaxonnx._io.protos import all_nodes
from tests.fuzz.compare import RANDOM

FOLDER = os.environ.get("JAXONNX_FOREIGN", "")
BATCHES = (2, 3)
SECONDS = 120
"""The time for a file; onnxruntime, too, has files without end."""
REASONS = {
    "all_dtypes.onnx": "1e100 in float64; 32 bits without jax_enable_x64",
    "attention_qk_output_2.onnx": "masked scores are -inf in onnx.reference, too; onnxruntime adds"
    " the lowest float32",
    "topk_neg_axis_test.onnx": "sorted=0 leaves the order open; both give the same numbers",
    "BatchNorm1D_15.onnx": "in training mode, which a call of a Model replaces by inference",
    "BatchNorm2D_15.onnx": "in training mode, which a call of a Model replaces by inference",
    "BatchNorm3D_15.onnx": "in training mode, which a call of a Model replaces by inference",
    "ArgMax_17.onnx": "of NaN: onnx.reference takes the first one, too",
    "DFT_17_irfft.onnx": "onnx.reference and NumPy agree with jaxonnx at these lengths",
    "DFT_20_irfft.onnx": "onnx.reference and NumPy agree with jaxonnx at these lengths",
    "celu_zero_alpha_test.onnx": "x / 0 in the formula: onnxruntime gives NaN, jaxonnx the limit",
    "reducesum_variable_dynamic_axes_test.onnx": "an axis twice, refused by onnx.reference, too",
    "reducesum_variable_dynamic_axes_verify_test.onnx": "an axis twice",
    "reducesum_variable_dynamic_axes_noop_set_verify_test.onnx": "an axis twice",
    "layer_norm_3d_half_stash_off_test.onnx": "stash_type 0 is no type; onnx.reference refuses it",
    "layer_norm_3d_half_stash_off_epsilon_test.onnx": "stash_type 0 is no type",
    "scatternd_invalid_reduction_test.onnx": "invalid: reduction is 'invalid'",
    "scatter_elements_invalid_reduction_test.onnx": "invalid: reduction is 'invalid'",
    "softmaxcrossentropyloss_weight_wrong_dims_test.onnx": "invalid: 2 weights of 4 classes",
    "group_norm_invalid_scale_shape_test.onnx": "invalid: a scale of 1 for 2 groups of 4 channels",
    "mvn_default_axes_rank_too_small_test.onnx": "invalid: axis 3 of 3 axes",
    "implicit_sub_bcast_test.onnx": "uint64 below 0, in 32 bits without jax_enable_x64",
    "pow_i64_fp32_test.onnx": "above int64; 32 bits without jax_enable_x64",
    "resize_downsample_f_test.onnx": "align_corners: the backend suite and onnx.reference keep the"
    " fractional resized length, 2.4; onnxruntime takes 2",
    "squeeze_empty_axes_test.onnx": "onnx.reference and shape inference squeeze no axis, too",
    "attention_multihead_test.onnx": "scores up to 5900: both round in float32 by as much",
    "attention_multihead_bias_mask_test.onnx": "scores in the thousands: both round in float32",
    "mha_attention_bias_test.onnx": "all keys masked: scores - 10000, rounded to 1e-3 in float32",
    "mha_bias_attention_bias_test.onnx": "all keys masked: scores - 10000, rounded to 1e-3",
    "skip_simplified_layer_normalization_test.onnx": "no mean is computed; onnxruntime's is unset",
    "skip_simplified_layer_normalization_bias_test.onnx": "no mean; onnxruntime's is unset memory",
    "loop_default_test.onnx": "endless for the second random input: onnxruntime fills the memory",
    "einsum_multiple_ellipses_negative_test.onnx": "invalid: onnxruntime's session hangs",
}
"""Why a file differs, by the end of its path."""


def find_files(folder):
    return sorted(Path(folder).rglob("*.onnx")) if folder else []


def run_onnxruntime(source, feeds, optimize=True):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def draw(value, batch, random):
    """Draw a value for an input; None for what is not a tensor of numbers."""
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or tensor.elem_type == TensorProto.STRING:
        return None
    shape = [d.dim_value if d.dim_value > 0 else batch for d in tensor.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if dtype.kind == "b":
        return random.random(shape) < 0.5
    if dtype.kind in "iu":  # also valid as indices and sizes, mostly
        return random.integers(0, 2, shape).astype(dtype)
    return random.normal(size=shape).astype(dtype)


def find_feeds(path, proto):
    """Yield the inputs of each call: those that lie beside the file, else random ones."""
    stored = {t.name for t in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in stored]
    sets = [folder for folder in sorted(path.parent.glob("test_data*")) if folder.is_dir()]
    for folder in sets if len([*path.parent.glob("*.onnx")]) == 1 else ():
        arrays = []
        for i in range(len(inputs)):
            data = folder / f"input_{i}.pb"
            arrays.append(numpy_helper.to_array(onnx.load_tensor(data)) if data.exists() else None)
        if all(array is not None for array in arrays):
            yield {value.name: array for value, array in zip(inputs, arrays, strict=True)}
    random = np.random.default_rng(0)
    for batch in BATCHES:
        feeds = {value.name: draw(value, batch, random) for value in inputs}
        if all(array is not None for array in feeds.values()):
            yield feeds


def assert_close(ours, theirs):
    """Compare integers exactly, and numbers to the rounding of sums taken in another order."""
    if isinstance(theirs, list | dict):
        assert len(ours) == len(theirs)
        pairs = zip(ours, theirs, strict=True) if isinstance(theirs, list) else ()
        for a, b in pairs:
            assert_close(a, b)
        return
    if ours is None or theirs is None:
        assert ours is theirs
        return
    a, b = np.asarray(ours), np.asarray(theirs)
    assert a.shape == b.shape
    if b.dtype.kind in "OUS":
        assert a.tolist() == b.tolist()
        return
    if a.dtype.kind == "V":  # bfloat16 and its like, whose bits onnxruntime gives as integers
        assert a.dtype.itemsize == b.dtype.itemsize
        a, b = a.astype(np.float32), b.view(a.dtype).astype(np.float32)
        rounding = 2e-2
    else:
        assert (a.dtype.kind in "fc") == (b.dtype.kind in "fc")
        rounding = 5e-3 if b.dtype == np.float16 else 1e-4
    if b.dtype.kind in "biu":
        np.testing.assert_array_equal(a, b)
        return
    wide = np.complex128 if b.dtype.kind == "c" else np.float64
    finite = np.abs(b[np.isfinite(b)].astype(wide))
    scale = finite.max() if finite.size else 0
    tolerances = {"rtol": rounding, "atol": rounding * (scale + 0.01)}
    np.testing.assert_allclose(a.astype(wide), b.astype(wide), **tolerances)


def compare(path):
    """Compare a file with onnxruntime; return what it did.

    Returns:
      "agree", "both refuse", "jaxonnx alone" (onnxruntime refuses), "random", or "data" if no
      inputs could be made.

    Raises:
      AssertionError: results differ.
      jaxonnx.Error: onnxruntime runs the file, and jaxonnx does not.
    """
    try:
        proto = onnx.load(path)
    except Exception:  # noqa: BLE001 - protobuf's errors have no common class
        with pytest.raises(jaxonnx.Error):
            jaxonnx.load(path)
        return "both refuse"
    if any(node.op_type.startswith(RANDOM) for node in all_nodes(proto.graph)):
        return "random"
    result, model = "data", None
    for feeds in find_feeds(path, proto):
        try:
            theirs = run_onnxruntime(path, feeds)
        except Exception:  # noqa: BLE001 - onnxruntime's errors have no common class
            theirs = None
        try:
            model = jaxonnx.load(path) if model is None else model
            ours = model(**{f"{name}": array for name, array in feeds.items()})
        except jaxonnx.Error:
            if theirs is not None:
                raise
            result = "both refuse" if result == "data" else result
            continue
        if theirs is None:
            result = result if result == "agree" else "jaxonnx alone"
            continue
        ours = ours if isinstance(ours, tuple) else (ours,)
        try:
            assert_close([*ours], theirs)
        except AssertionError:  # its optimizations may be what is wrong
            assert_close([*ours], run_onnxruntime(path, feeds, optimize=False))
        if result != "agree":
            assert not validation.find_changes(proto, model.to_onnx())
            check_gradient(model, feeds, ours)
        result = "agree"
    return result


def explain_failure(path):
    """Compare a file, and return the traceback if that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compare(path)
        except Exception:  # noqa: BLE001 - any failure is reported
            return traceback.format_exc()
    return ""


class Guarded:
    """Calls functions in another process, which is replaced if one hangs or crashes."""

    def __init__(self):
        self.pool = None

    def __call__(self, function, *arguments, seconds=SECONDS):
        if self.pool is None:
            self.pool = multiprocessing.get_context("spawn").Pool(1)
        try:
            return self.pool.apply_async(function, arguments).get(seconds)
        except multiprocessing.TimeoutError:  # a crash loses the call, which looks the same
            self.close()
            return f"it hung or crashed: no result within {seconds} seconds"

    def close(self):
        if self.pool is not None:
            self.pool.terminate()
            self.pool = None


@pytest.fixture(scope="module")
def guarded():
    """A `Guarded`."""
    guarded = Guarded()
    yield guarded
    guarded.close()


def check_gradient(model, feeds, outputs):
    """Check that gradients are finite where outputs are."""
    real = [i for i, y in enumerate(outputs) if np.asarray(y).dtype.kind == "f"]
    if not model.params or not model.program.compiled or not real:
        return
    if not all(np.isfinite(outputs[i]).all() for i in real):
        return

    def total(params):
        results = model.apply(params, **feeds)
        results = results if isinstance(results, tuple) else (results,)
        return sum(jnp.sum(results[i].astype(jnp.float32)) for i in real)

    for name, slope in jax.grad(total)(model.params).items():
        assert np.isfinite(np.asarray(slope)).all(), f"the gradient of {name}"


def explain(path):
    """Return the reason why a file differs; "" if it must not."""
    return next((why for end, why in REASONS.items() if path.as_posix().endswith(end)), "")


@pytest.mark.deep
@pytest.mark.skipif(not FOLDER, reason="JAXONNX_FOREIGN names no folder of .onnx files")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", find_files(FOLDER), ids=lambda path: str(path)[len(FOLDER) :])
def test_foreign_graphs(path, guarded):
    if reason := explain(path):
        pytest.skip(reason)
    if failure := guarded(explain_failure, path):
        pytest.fail(failure, pytrace=False)


def test_hangs_and_crashes_fail(guarded):
    assert guarded(abs, -1) == 1
    for function, argument in ((time.sleep, 60), (os._exit, 0)):
        assert "it hung or crashed" in guarded(function, argument, seconds=1)


ADD = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, 2] x) => (float[n, 2] y) <float[2] b = {1, 2}> { y = Add(x, b) }"""
INTEGERS = """<ir_version: 8, opset_import: ["": 17]>
g (int64[n, 3] x) => (int64[n] y) { y = ArgMax <axis = 1, keepdims = 0> (x) }"""
REFUSED = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, 2] x) => (float[n, 2] y) <float[3] b = {1, 2, 3}> { y = Add(x, b) }"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.fixture
def folder(tmp_path):
    """Three graphs: one with data, as ONNX and onnxruntime keep them, and two alone."""
    path = write(tmp_path / "add" / "model.onnx", ADD)
    data = path.parent / "test_data_set_0"
    data.mkdir()
    x = numpy_helper.from_array(np.array([[1, 2]], np.float32), "x")
    (data / "input_0.pb").write_bytes(x.SerializeToString())
    write(tmp_path / "burn" / "argmax.onnx", INTEGERS)
    write(tmp_path / "burn" / "refused.onnx", REFUSED)
    return tmp_path


def test_files_are_found_with_their_data(folder):
    paths = find_files(folder)
    assert [path.name for path in paths] == ["model.onnx", "argmax.onnx", "refused.onnx"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # 64-bit outputs
        assert [*map(compare, paths)] == ["agree", "agree", "both refuse"]
    first, *others = find_feeds(paths[0], onnx.load(paths[0]))
    np.testing.assert_array_equal(first["x"], [[1, 2]])
    assert [feeds["x"].shape for feeds in others] == [(2, 2), (3, 2)]


def test_files_that_onnxruntime_refuses_are_called(folder, monkeypatch):
    broken = folder / "broken.onnx"
    broken.write_bytes(b"no protobuf")
    assert compare(broken) == "both refuse"
    monkeypatch.setattr(jaxonnx.Model, "__call__", lambda self, x: x)
    monkeypatch.setattr(f"{__name__}.run_onnxruntime", lambda *_: 1 / 0)
    assert compare(folder / "add" / "model.onnx") == "jaxonnx alone"
    monkeypatch.setattr(jaxonnx.Model, "__call__", lambda self, x: x[5])
    with pytest.raises(IndexError):  # not an error of jaxonnx
        compare(folder / "add" / "model.onnx")


def test_two_bytes_are_compared():
    bits = np.array([0x3F80, 0x4000], np.uint16)  # 1 and 2 in bfloat16
    ours = np.array([1, 2], ml_dtypes.bfloat16)
    assert_close(ours, bits)
    assert_close(bits, bits)
    for wrong in (ours + ours, bits + bits):
        with pytest.raises(AssertionError):
            assert_close(wrong, bits)


@pytest.mark.parametrize("wrong", [{"y": 1e-2}, {"i": 1}], ids=["numbers", "integers"])
def test_what_differs_fails(wrong):
    right = {"y": np.ones(3, np.float32), "i": np.arange(3)}
    assert_close([right["y"], right["i"]], [right["y"], right["i"]])
    other = {name: value + wrong.get(name, 0) for name, value in right.items()}
    with pytest.raises(AssertionError):
        assert_close([*other.values()], [*right.values()])


def test_a_file_that_jaxonnx_computes_otherwise_is_named(folder, monkeypatch):
    monkeypatch.setattr(jaxonnx.Model, "__call__", lambda self, x: x)
    with pytest.raises(AssertionError):
        compare(folder / "add" / "model.onnx")


def test_a_changed_save_is_named(folder):
    model = jaxonnx.load(folder / "add" / "model.onnx")
    other = onnx.parser.parse_model(ADD.replace("{1, 2}", "{1, 3}"))
    assert validation.find_changes(other, model.to_onnx()) == ["tensor 'b' has other bits"]


def test_gradients_that_are_not_finite_are_named(tmp_path):
    text = ADD.replace("Add(x, b)", "Sqrt(z)").replace("{ y", "{ z = Mul(x, b) y")
    model = jaxonnx.load(onnx.parser.parse_model(text)).with_trainable(["b"])
    x = np.zeros((2, 2), np.float32)
    y = model(x)
    with pytest.raises(AssertionError, match="the gradient of b"):
        check_gradient(model, {"x": x}, (y,))
