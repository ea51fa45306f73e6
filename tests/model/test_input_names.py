"""Inputs with the names of our own arguments: `state` (Silero VAD has it), `params`, `rng`."""

import jax
import numpy as np
import onnx.parser
import optax
import pytest
from flax import nnx

import jaxonnx
from jaxonnx import cli

NAMES = ("state", "params", "rng", "self", "inputs", "named", "train")
TEXT = f"""<ir_version: 9, opset_import: ["": 17]>
g ({", ".join(f"float[n,2] {name}" for name in NAMES)}) => (float[n,2] y)
<float[2] w = {{1, 2}}> {{
  c = Concat <axis = 1> ({", ".join(NAMES)})
  s = Constant <value_ints = [0, {len(NAMES)}, 2]> ()
  r = Reshape(c, s)
  a = Constant <value_ints = [1]> ()
  m = ReduceSum <keepdims = 0> (r, a)
  y = Mul(m, w)
}}"""
DRAW = np.random.default_rng(0)
INPUTS = {name: DRAW.standard_normal((4, 2)).astype(np.float32) for name in NAMES}
EXPECTED = sum(INPUTS.values()) * np.float32([1, 2])


@pytest.fixture(scope="module")
def model():
    return jaxonnx.load(onnx.parser.parse_model(TEXT))


def close(y, factor=1.0):
    np.testing.assert_allclose(y, factor * EXPECTED, rtol=1e-5, atol=1e-6)


def test_a_name_of_an_input_means_the_input(model):
    close(model(**INPUTS))
    close(model(**INPUTS, rng_=jax.random.key(1)))
    close(model.apply(model.params, **INPUTS))
    close(model.apply_train(model.params, model.state, None, **INPUTS)[0])
    first, *others = NAMES
    close(model(INPUTS[first], **{name: INPUTS[name] for name in others}))


def test_our_arguments_take_an_underscore(model):
    twice = {"w": 2 * model.params["w"]}
    close(model.apply(**INPUTS, params_=twice, state_={}, rng_=jax.random.key(1)), 2)
    outputs, new = model.apply_train(**INPUTS, params_=twice, state_={"seen": 1}, rng_=None)
    close(outputs, 2)
    assert new == {"seen": 1}  # which is no input
    with pytest.raises(jaxonnx.InputError, match="'rng' is missing"):
        model(**{name: value for name, value in INPUTS.items() if name != "rng"})


def test_without_such_an_input_both_spellings_are_the_argument():
    model = jaxonnx.load(
        onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 17]>
        g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }""")
    )
    x, params = np.ones(2, np.float32), {"w": np.ones(2, np.float32)}
    for given in ({"params": params, "state": {}}, {"params_": params, "state_": {}}):
        np.testing.assert_array_equal(model.apply(x=x, **given), x)
        np.testing.assert_array_equal(model.apply_train(x=x, rng=None, **given)[0], x)
    with pytest.raises(TypeError, match="'state_'"):
        model.apply(params, x, state={}, state_={})
    with pytest.raises(jaxonnx.InputError, match="no input 'stat'"):
        model.apply(params, x, stat={})


def test_data_and_modules_and_the_command_line_take_them_by_name(model, tmp_path):
    module = jaxonnx.flax.Module(model)
    close(module(**INPUTS))
    close(nnx.view(module, deterministic=False)(**INPUTS))
    data = {**INPUTS, "y": 3 * EXPECTED}
    settings = {"loss": "squared_error", "optimizer": optax.sgd(1e-2), "epochs": 1}
    trained = jaxonnx.train(model, data, batch_size=4, **settings).model
    assert not np.array_equal(trained.params["w"], model.params["w"])
    np.savez(tmp_path / "data.npz", **data)
    model.save(tmp_path / "net.onnx")
    out = tmp_path / "out.npz"
    arguments = ["run", tmp_path / "net.onnx", tmp_path / "data.npz", "-o", out]
    assert cli.main([*map(str, arguments)]) == 0
    close(np.load(out)["y"])
