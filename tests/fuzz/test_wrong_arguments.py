"""Arguments of wrong types: the error is one of jaxonnx, and names what is wrong."""

import jax
import numpy as np
import pytest

import jaxonnx
from jaxonnx import demo
from tests.fuzz.wrong_arguments import CALLS, NOT_CALLED, WRONG, find_fault, find_names, net
from tests.support.paths import DATA


@pytest.mark.parametrize("function", [None, [1, 2], {"a": 1}, "net.onnx"])
def test_verify_takes_models(function):
    with pytest.raises(jaxonnx.InputError, match=r"takes a model.*jaxonnx\.load\(path\)"):
        jaxonnx.sparse.verify(function)


@pytest.mark.parametrize("targets", [{"y": 1}, "text", None, 3])
def test_distill_takes_logits(targets):
    with pytest.raises(jaxonnx.TrainingError, match="targets must be the teacher's logits"):
        jaxonnx.losses.distill()(np.ones((2, 3), np.float32), targets)


@pytest.mark.parametrize("prompts", ["text", b"bytes", None, 3, {"a": 1}, np.array(1)])
def test_generate_takes_prompts(prompts):
    decoder = jaxonnx.load(DATA / "llm" / "pairs.onnx")
    message = "no tokenizer" if prompts == "text" else "prompts must be texts"
    with pytest.raises(jaxonnx.InputError, match=message):
        decoder.generate(prompts, max_new_tokens=1)


X, Y = np.zeros((2, 1, 8, 8), np.float32), np.zeros(2, int)
OTHERS = (3, "text", b"bytes", {"a": 1}, [1], np.zeros(3), np.zeros((2, 2), int))
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


@pytest.mark.parametrize("value", OTHERS, ids=repr)
@pytest.mark.parametrize("name", CHOICES)
def test_arguments_of_wrong_types_are_explained(name, value):
    if name == "step(accumulate=)" and isinstance(value, int):
        return  # a valid one
    with pytest.raises(jaxonnx.Error):
        CHOICES[name](value)


def test_all_public_calls_have_wrong_arguments():
    names = {name for name in find_names() if not name.startswith((*NOT_CALLED,))}
    assert names == CALLS.keys() - {"jaxonnx.LoRA", "jaxonnx.Quantization"}


@pytest.mark.parametrize("name", CALLS)
def test_objects_are_refused_by_an_error_that_names_the_argument(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [*filter(None, (find_fault(name, x, "object()") for x in CALLS[name].parameters))] == []


@pytest.mark.deep
@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_refused_by_an_error_that_names_them(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults = (find_fault(name, x, text) for x in CALLS[name].parameters for text in WRONG)
    assert [*filter(None, faults)] == []


def test_types_are_named_in_errors():
    model = demo.mlp()
    with pytest.raises(jaxonnx.InputError, match=r"rng must be a key .* or None, got float64\[3\]"):
        model.with_head(7, rng=np.zeros(3))
    with pytest.raises(jaxonnx.InputError, match="path must be a string or a path, got 3"):
        model.save(3)
    with pytest.raises(
        jaxonnx.InputError, match="batches must be an integer of at least 1, got -1"
    ):
        jaxonnx.quantize(model, X, batches=-1)
    methods = "method must be 'gptq', 'awq' or None, got 'floor'"
    with pytest.raises(jaxonnx.InputError, match=methods):
        jaxonnx.quantize(model, X, method="floor")
    with pytest.raises(jaxonnx.InputError, match="transposable must be True or False"):
        jaxonnx.sparse.mask(np.ones((4, 4), np.float32), transposable=[])
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        model.with_head(7, rng=key)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda net: net.replace(params={**net.params, "b1": [0.0]}),
            r"params must be a dict of arrays or None, got a dict in which 'b1' is \[0\.0\]",
        ),
        (
            lambda net: jaxonnx.add_training(
                net, loss="squared_error", optimizer=jaxonnx.optim.adam(0.1), init={"b1": 3}
            ),
            "init must be a string, a dict of strings or None, got {'b1': 3}",
        ),
    ],
)
def test_elements_of_dicts_are_named_in_errors(call, words):
    with pytest.raises(jaxonnx.InputError, match=words):
        call(net())
