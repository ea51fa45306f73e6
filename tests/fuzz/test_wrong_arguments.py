"""Arguments of wrong types: the error is one of jaxonnx, and names what is wrong."""

import numpy as np
import pytest

import jaxonnx
from jaxonnx import demo
from tests.support.paths import DATA


@pytest.mark.parametrize("function", ["net.onnx", None, [1, 2], {"a": 1}])
def test_verify_takes_models(function):
    with pytest.raises(jaxonnx.InputError, match=r"takes a model.*jaxonnx\.load\(path\)"):
        jaxonnx.sparse.verify(function)


@pytest.mark.parametrize("targets", [{"y": 1}, "text", None, 3])
def test_distill_takes_logits(targets):
    with pytest.raises(jaxonnx.TrainingError, match="targets must be the teacher's logits"):
        jaxonnx.losses.distill()(np.ones((2, 3), np.float32), targets)


@pytest.mark.parametrize("ids", ["text", b"bytes", None, 3, {"a": 1}, np.array(1)])
def test_generate_takes_tokens(ids):
    decoder = jaxonnx.load(DATA / "llm" / "pairs.onnx")
    with pytest.raises(jaxonnx.InputError, match="ids must be a prompt of tokens"):
        decoder.generate(ids, max_new_tokens=1)


X, Y = np.zeros((2, 1, 8, 8), np.float32), np.zeros(2, int)
WRONG = (3, "text", b"bytes", {"a": 1}, [1], np.zeros(3), np.zeros((2, 2), int))
CHOICES = {
    "load(batch=)": lambda value: jaxonnx.load(demo.mlp().to_onnx(), batch=value),
    "to_onnx(adapters=)": lambda value: demo.mlp().to_onnx(adapters=value),
    "with_statistics": lambda value: demo.mlp().with_statistics(value),
    "with_outputs": lambda value: demo.mlp().with_outputs(value),
    "with_fixed_inputs": lambda value: demo.mlp().with_fixed_inputs(value),
    "predict(fixed=)": lambda value: demo.mlp().predict(X, fixed=value),
    "apply(params)": lambda value: demo.mlp().apply(value, X),
    "apply(state=)": lambda value: demo.mlp().apply({}, X, state=value),
    "apply_train(params)": lambda value: demo.mlp().apply_train(value, {}, None, X),
    "LoRA(init=)": lambda value: jaxonnx.LoRA(init=value),
    "quantize(scheme=)": lambda value: jaxonnx.quantize(demo.mlp(), X, value),
    "quantize(method=)": lambda value: jaxonnx.quantize(demo.mlp(), X, method=value),
    "sparse.record": lambda value: jaxonnx.sparse.record(value),
} | {
    f"step({name}=)": lambda value, name=name: jaxonnx.training.step(
        demo.mlp(), **({"loss": "squared_error", "optimizer": "adam"} | {name: value})
    )
    for name in ("optimizer", "nan", "precision", "statistics", "quantize", "ema", "accumulate")
}
"""Public calls by name, as functions of the argument that is wrong."""


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", CHOICES)
def test_arguments_of_wrong_types_are_explained(name, value):
    if name == "step(accumulate=)" and isinstance(value, int):
        return  # a valid one
    with pytest.raises(jaxonnx.Error):
        CHOICES[name](value)
