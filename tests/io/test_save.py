"""Saving: what is written, where, and what stays if it cannot be written."""

import dataclasses
import itertools
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

import jaxonnx
from jaxonnx import sparse
from tests.support.fork_server import FORKS

X = np.array([[1, 2, 3]], np.float32)


def model(ir=10, opset=22):
    proto = onnx.parser.parse_model(f"""
    <ir_version: {ir}, opset_import: ["": {opset}], producer_name: "someone">
    g (float[n,3] x) => (float[n,2] y) <float[3,2] w = {{1,2,3,4,5,6}}, int64[1] axis = {{1}}> {{
      k = Constant <value = float[2] {{1,-1}}> ()
      h = MatMul(x, w)
      a = Add(h, k)
      y = Softmax <axis = -1> (a)
    }}""")
    proto.metadata_props.add(key="origin", value="test")
    proto.graph.node[1].doc_string = "the product"
    return jaxonnx.load(proto)


def run_onnxruntime(path, x=X):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


@pytest.mark.parametrize("external", [False, True])
def test_saved_weights_run_in_onnxruntime(external, tmp_path):
    path = tmp_path / "net.onnx"
    changed = model().replace(params={k: 0.5 * v for k, v in model().params.items()})
    changed.save(path, external_data=external)
    onnx.checker.check_model(path, full_check=True)
    np.testing.assert_allclose(run_onnxruntime(path), changed(X), rtol=1e-6)
    np.testing.assert_array_equal(jaxonnx.load(path)(X), changed(X))


@pytest.mark.parametrize("name", ["net.onnx", "weights.safetensors"])
def test_whoever_may_read_new_files_may_read_all_that_is_saved(name, tmp_path):
    """External data, too: a server often runs as another user than the training."""
    (tmp_path / "new").touch()
    (tmp_path / "saved").mkdir()
    path = tmp_path / "saved" / name
    big_model = jaxonnx.load(big(tmp_path))
    big_model.save(path, **({"external_data": True} if name.endswith("onnx") else {}))
    modes = {file.name: file.stat().st_mode for file in path.parent.iterdir()}
    assert len(modes) == (2 if name.endswith("onnx") else 1)
    assert {*modes.values()} == {(tmp_path / "new").stat().st_mode}, modes


def test_what_is_no_weight_stays():
    before = model()
    after = before.to_onnx()
    assert after.producer_name == "someone"
    assert after.metadata_props[0].value == "test"
    assert [node.op_type for node in after.graph.node] == ["Constant", "MatMul", "Add", "Softmax"]
    assert after.graph.node[1].doc_string == "the product"
    assert {t.name for t in after.graph.initializer} == {"w", "axis"}


def test_a_constant_that_is_not_trained_stays_a_node():
    frozen = model().with_trainable(["w"])
    kinds = [node.op_type for node in frozen.to_onnx().graph.node]
    assert kinds == ["Constant", "MatMul", "Add", "Softmax"]
    np.testing.assert_array_equal(jaxonnx.load(frozen.to_onnx())(X), frozen(X))


def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "net.onnx"
    path.write_bytes(b"what was here before")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(onnx, "save_model", full)
    with pytest.raises(OSError, match="No space"):
        model().save(path)
    assert path.read_bytes() == b"what was here before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError):
        model().save(tmp_path / "missing" / "net.onnx")
    assert not list(tmp_path.iterdir())


def big(tmp_path):
    """A model whose weights lie in a file of their own."""
    proto = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 22]>
    g (float[n,32] x) => (float[n,32] y) { h = MatMul(x, w)  y = Mul(h, m) }""")
    draw = np.random.default_rng(0)
    for name in ("w", "m"):
        shape = (32, 32) if name == "w" else (1, 32)
        value = draw.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    path = tmp_path / "big.onnx"
    onnx.save_model(proto, path, save_as_external_data=True, location="big.onnx.data")
    return path


def test_saving_over_the_file_that_was_loaded(tmp_path):
    path, x = big(tmp_path), np.ones((1, 32), np.float32)
    loaded = jaxonnx.load(path)
    expected = 2 * loaded(x)
    doubled = loaded.replace(
        params={k: (2 if k == "w" else 1) * v for k, v in loaded.params.items()}
    )
    doubled.save(path, external_data=True)
    np.testing.assert_allclose(jaxonnx.load(path)(x), expected, rtol=1e-6)
    np.testing.assert_allclose(run_onnxruntime(path, x), expected, rtol=1e-5)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names[0] == "big.onnx"
    assert re.fullmatch(r"big\.onnx\.[0-9a-f]{16}\.data", names[1])
    assert len(names) == 2
    np.testing.assert_allclose(2 * loaded(x), expected)


def test_a_copy_of_the_file_keeps_its_external_data(tmp_path):
    path, x = big(tmp_path), np.ones((1, 32), np.float32)
    for number in range(2):  # data of other programs, and then of ours
        model, copy = jaxonnx.load(path), tmp_path / f"copy{number}.onnx"
        expected = model(x)
        shutil.copy(path, copy)
        model = model.replace(params={name: 2 * value for name, value in model.params.items()})
        model.save(path, external_data=True)
        np.testing.assert_array_equal(jaxonnx.load(copy)(x), expected)
    model.replace(params=jaxonnx.load(copy).params).save(path, external_data=True)
    assert len([*tmp_path.glob("big.onnx.*")]) == 2  # those of the copies


@pytest.mark.deep
def test_a_killed_save_leaves_the_old_or_the_new_model(tmp_path):
    """Killed before each change of the folder in turn, with `os._exit`, as `kill -9` would."""
    path, x = big(tmp_path), np.ones((1, 32), np.float32)
    old, seen = jaxonnx.load(path)(x), []
    for moment in itertools.count():
        saver = FORKS.Process(target=save_doubled, args=(path, moment), daemon=True)
        saver.start()
        saver.join()
        seen.append(float((jaxonnx.load(path)(x) / old)[0, 0]))
        np.testing.assert_allclose(jaxonnx.load(path)(x), seen[-1] * old, rtol=1e-6)
        if saver.exitcode == 0:
            break
        assert saver.exitcode == 9
    assert seen[0] == 1
    assert len(seen) >= 4  # killed before and after each replacement
    assert seen[-1] > 1
    assert len([*tmp_path.glob("big.onnx.*.data")]) == 1


def save_doubled(path, left):
    """Save a model with another weight, and die before a change of the folder."""
    model = jaxonnx.load(path)
    model = model.replace(params={k: (2 if k == "w" else 1) * v for k, v in model.params.items()})

    def dies(event, arguments):
        nonlocal left
        if event in ("os.rename", "os.remove") and (left := left - 1) < 0:
            os._exit(9)

    sys.addaudithook(dies)
    model.save(path, external_data=True)


def save_again_and_again(path, ready, halved_first):
    model = jaxonnx.load(path)
    values = {name: np.asarray(value) for name, value in model.params.items()}
    halved = {name: value / 2 for name, value in values.items()}
    for params in itertools.cycle((halved, values) if halved_first else (values, halved)):
        model.replace(params=params).save(path, external_data=True)
        ready.set()


@pytest.mark.deep
def test_saves_that_are_killed_at_random_moments(tmp_path):
    path = big(tmp_path)
    whole = {name: np.asarray(value) for name, value in jaxonnx.load(path).params.items()}
    seen = []
    for number, moment in enumerate([0, 0, *np.random.default_rng(0).uniform(0, 0.02, 8)]):
        ready = FORKS.Event()
        arguments = path, ready, number % 2 == 0  # both are seen, however slow the disk
        saver = FORKS.Process(target=save_again_and_again, args=arguments, daemon=True)
        saver.start()
        assert ready.wait(60)
        time.sleep(moment)
        saver.kill()
        saver.join()
        assert saver.exitcode == -signal.SIGKILL
        params = jaxonnx.load(path).params
        seen.append(float(params["w"][0, 0] / whole["w"][0, 0]))
        for name, value in whole.items():
            np.testing.assert_array_equal(params[name], seen[-1] * value)
        jaxonnx.load(path).replace(params=whole).save(path, external_data=True)
        assert len([*tmp_path.glob("big.onnx.*.data")]) == 1
    assert {*seen} == {0.5, 1}


def test_what_is_not_a_regular_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loaded = model()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(pipe.read_bytes)
        loaded.save(pipe)
        np.testing.assert_array_equal(jaxonnx.load(reader.result())(X), loaded(X))
    assert pipe.is_fifo()
    with pytest.raises(OSError, match="No space left"):
        loaded.save("/dev/full")
    assert Path("/dev/full").is_char_device()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(pipe.read_bytes)
        sparse.save(pipe, loaded.params, {}, layers=())
        (tmp_path / "packed.npz").write_bytes(reader.result())
    np.testing.assert_array_equal(sparse.load(tmp_path / "packed.npz")[0]["w"], loaded.params["w"])
    assert pipe.is_fifo()
    with pytest.raises(OSError, match="several files"):
        jaxonnx.load(big(tmp_path)).save("/dev/null", external_data=True)


def test_external_data_becomes_part_of_the_file(tmp_path):
    loaded, x = jaxonnx.load(big(tmp_path)), np.ones((1, 32), np.float32)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    loaded.save(folder / "whole.onnx")
    assert [p.name for p in folder.iterdir()] == ["whole.onnx"]
    np.testing.assert_array_equal(jaxonnx.load(folder / "whole.onnx")(x), loaded(x))


@pytest.mark.parametrize("ir", [3, 4, 8, 13])
def test_a_new_initializer_fits_the_ir_version(ir, tmp_path):
    """IR 3 demands that every initializer is an input too."""
    saved = model(ir, opset=11).to_onnx()
    assert saved.ir_version == ir
    onnx.checker.check_model(saved)


def rewrite(model, change):
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    change({node.op_type: node for node in proto.graph.node})
    return dataclasses.replace(model, proto=proto)


def set_slope(nodes):
    nodes["MatMul"].name = "product"
    nodes["MatMul"].attribute.append(onnx.helper.make_attribute("slope", 1.0))


def sum_other_axis(nodes):
    nodes["Add"].name = "sum"
    nodes["Add"].input[1] = "x"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (set_slope, r"to be saved is not valid.*slope.*product"),
        (sum_other_axis, r"onnxruntime.*sum"),
    ],
)
def test_an_invalid_file_is_not_written(change, error, tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(b"before")
    with pytest.raises(jaxonnx.ModelError, match=error):
        rewrite(model(), change).save(path)
    assert path.read_bytes() == b"before"
    rewrite(model(), change).save(path, check=False)
    assert len(path.read_bytes()) > 100


def test_only_changed_nodes_are_checked(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr("jaxonnx.model._save.check_valid", lambda what, *_: checked.append(what))
    net = model()
    net.save(tmp_path / "a.onnx")
    net.replace(params={n: 2 * x for n, x in net.params.items()}).save(tmp_path / "a.onnx")
    jaxonnx.LoRA(rank=1).attach(net, jax.random.key(0)).save(tmp_path / "a.onnx")
    assert not checked
    for new in (net.with_head(5), net.then(jnp.tanh), jaxonnx.quantize(net, X, "int8")):
        new.save(tmp_path / "a.onnx", check=False)
        assert not checked
        new.save(tmp_path / "a.onnx")
        assert checked.pop()


def test_what_was_refused_before_the_change_is_written(tmp_path):
    proto = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 22, "ai.onnx.preview.training": 1]>
    g (float[2] x) => (float[2] z) <float r = {0.1}, int64 t = {1}, float[2] v = {1, 2}> {
      [step] y, w = ai.onnx.preview.training.Momentum
        <alpha = 0.9, beta = 0.9, mode = "standard", norm_coefficient = 0.0> (r, t, x, x, v)
      z = Neg(y)
    }""")
    changed = jaxonnx.load(proto).then(jnp.tanh)
    changed.save(tmp_path / "net.onnx")
    with pytest.raises(Fail, match="Momentum"):
        run_onnxruntime(tmp_path / "net.onnx")


def test_a_large_changed_file_is_not_checked_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxonnx._compare.written._LARGEST", 10)
    with pytest.warns(UserWarning, match=r"to be saved was not checked: .* check=False"):
        model().then(jnp.tanh, check=False).save(tmp_path / "net.onnx")
