"""Files of many exporters: results, what an untouched save keeps, gradients; the table of them."""

from functools import cache

import jax
import numpy as np
import onnx
import onnxruntime
import pytest

import jaxonnx
from tests.support import family_table
from tests.support.exact_products import SATURATES, avoid_saturation

FILES = [path for path in family_table.files() if path.parent.name == "families"]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@cache
def load(path) -> jaxonnx.Model:
    return family_table.load(path)


def session(path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def inputs(model) -> dict[str, np.ndarray]:
    """Two rows of normal numbers, or of the first integers."""
    random = np.random.default_rng(0)
    made = {}
    for value in model.inputs:
        shape = tuple(d if isinstance(d, int) else 2 for d in value.shape)
        if "mask" in value.name:
            array = np.ones(shape)
        elif value.dtype.kind == "i":
            array = np.arange(np.prod(shape)).reshape(shape)
        else:
            array = random.normal(size=shape)
        made[value.name] = array.astype(value.dtype)
    return made


def leaves(value) -> list[np.ndarray]:
    """Return the arrays of outputs, also those within sequences and maps."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [np.asarray(value)]


def read_tensors(path) -> dict[str, list[tuple]]:
    """Return the tensors of a file's graphs and functions by name; a Constant has its output's."""
    tensors: dict[str, list[tuple]] = {}
    messages: list[tuple] = [(onnx.load(path), "")]
    while messages:
        message, constant = messages.pop()
        if isinstance(message, onnx.TensorProto):
            array = onnx.numpy_helper.to_array(message)
            data = str(array.tolist()) if array.dtype == object else array.tobytes()
            about = (message.data_type, tuple(message.dims), hash(data))
            tensors.setdefault(constant or message.name, []).append(about)
            continue
        if isinstance(message, onnx.NodeProto):
            constant = message.output[0] if message.op_type == "Constant" else ""
        for field, value in message.ListFields():
            if field.message_type:
                messages += [(v, constant) for v in (value if field.is_repeated else [value])]
    return tensors


@pytest.mark.deep
@each_file
def test_results_are_those_of_onnxruntime_and_an_untouched_save_changes_none(path, tmp_path):
    """Within the rounding of the types: one step of int8 changes an output by 1 / 255 of it."""
    model, saved = load(path), tmp_path / "saved.onnx"
    given = inputs(model)
    model.save(saved)
    assert read_tensors(path).items() <= read_tensors(saved).items()
    before, after = (leaves(session(file).run(None, given)) for file in (path, saved))
    exact = after
    if SATURATES and "int8" in path.stem:
        onnx.save(avoid_saturation(onnx.load(saved)), tmp_path / "exact.onnx")
        exact = leaves(session(tmp_path / "exact.onnx").run(None, given))
    training = any("training mode" in warning for warning in model.warnings)
    close = 2e-2 if "int8" in path.stem or "half" in path.stem else 1e-4
    outputs = leaves(jax.device_get(model(**given)))
    for a, c, b, output in zip(before, after, exact, outputs, strict=True):
        assert a.tobytes() == c.tobytes() or training  # saved with inference semantics
        assert output.shape == b.shape
        if b.dtype.kind == "f":
            np.testing.assert_allclose(output, b, rtol=0, atol=close * np.abs(b).max())
        else:
            np.testing.assert_array_equal(output, b)


@pytest.mark.deep
@pytest.mark.parametrize(
    "path", [p for p in FILES if "int8" not in p.stem], ids=lambda path: path.stem
)
def test_the_gradient_is_that_of_finite_differences_in_onnxruntime(path, tmp_path):
    """Along a random direction, from two saved files with moved weights."""
    model = load(path)
    if family_table.gradient(path, model) != family_table.FINITE:
        return  # nothing is trained
    given = inputs(model)
    random = np.random.default_rng(1)
    direction = {
        name: np.sign(random.normal(size=w.shape)) * np.abs(w).mean()
        for name, w in model.params.items()
    }
    shapes = jax.eval_shape(lambda params: model.apply(params, **given), model.params)
    weights = [random.normal(size=y.shape) for y in jax.tree.leaves(shapes)]

    def loss(outputs):
        return sum((w * y).mean() for w, y in zip(weights, outputs, strict=True))

    def moved(step):
        params = {n: w + (step * direction[n]).astype(w.dtype) for n, w in model.params.items()}
        model.replace(params=params).save(tmp_path / "moved.onnx")
        outputs = session(tmp_path / "moved.onnx").run(None, given)
        return loss([y.astype(np.float64) for y in leaves(outputs)])

    step, close = (5e-2, 1e-1) if "half" in path.stem else (2e-4, 2e-2)
    expected = (moved(step) - moved(-step)) / (2 * step)
    gradients = jax.jit(jax.grad(lambda p: loss(jax.tree.leaves(model.apply(p, **given)))))(
        model.params
    )
    slope = sum((np.asarray(g, np.float64) * direction[n]).sum() for n, g in gradients.items())
    np.testing.assert_allclose(slope, expected, rtol=close)


def test_the_page_is_up_to_date():
    text = family_table.PAGE.read_text()
    start, end = family_table.MARKERS
    shown = text.partition(start)[2].partition(end)[0].strip()
    assert shown == family_table.table(), "run: python -m tests.support.family_table"
