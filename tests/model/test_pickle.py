"""A model in another process, or in a copy: its file, tensors and views."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import jax
import numpy as np
import pytest

import jaxonnx
from jaxonnx import demo
from tests.support.paths import DATA
from tests.support.tiny_networks import LABELS, examples, mlp, train


def call(model, x):
    return np.asarray(model(x))


def adapted():
    return train(lora=jaxonnx.LoRA(rank=2)).lora.attach(jaxonnx.load(mlp()))


X = examples(8)[0]
ADAM = jaxonnx.optim.adam(0.1)
PICTURES = np.random.default_rng(0).normal(size=(3, 1, 8, 8)).astype(np.float32)
MODELS = {
    "plain": (lambda: jaxonnx.load(mlp()), X),
    "trained": (lambda: train(demo.model(), (PICTURES, np.arange(3)), epochs=1).model, PICTURES),
    "adapters": (adapted, X),
    "int8": (lambda: jaxonnx.quantize(jaxonnx.load(mlp()), X), X),
    "sparse": (lambda: jaxonnx.load(mlp()).with_sparsity(), X),
    "head": (lambda: jaxonnx.load(mlp()).with_head(7), X),
    "frozen": (lambda: demo.model().with_statistics("frozen").with_remat(), PICTURES),
    "fixed": (lambda: jaxonnx.load(mlp()).with_batch_axis().with_outputs(["h"]), np.stack([X] * 8)),
    "training": (lambda: jaxonnx.load(jaxonnx.add_training(mlp(), loss=LABELS, optimizer=ADAM)), X),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_pickled_model_is_the_same(name):
    make, x = MODELS[name]
    model = make()
    model(x)  # what is compiled is left behind
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(call(other, x), call(model, x))
        assert other.to_onnx() == model.to_onnx()
        assert [*other.params] == [*model.params]
        assert str(other) == str(model)
        a, b = (
            jax.jit(m.apply_train)(m.params, m.state, jax.random.key(0), x) for m in (model, other)
        )
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_pickle_has_the_weights_once():
    model = demo.model()
    size = sum(value.nbytes for value in (*model.params.values(), *model.state.values()))
    assert len(pickle.dumps(model)) < size + 20_000


def test_a_folder_stays_with_its_model():
    model = jaxonnx.load(DATA / "llm" / "qwen3-genai")
    other = pickle.loads(pickle.dumps(model))
    prompt = np.array([1, 2, 3])
    settings = {"max_new_tokens": 3}
    expected = model.generate(prompt, **settings)
    np.testing.assert_array_equal(other.generate(prompt, **settings), expected)
    assert other.folder == model.folder


def test_results_are_pickled_without_their_settings():
    """Which have functions: a loss, an optimizer, hooks."""
    result = train(lora=jaxonnx.LoRA(rank=2), validation=0.2, on_log=lambda *_: None)
    other = pickle.loads(pickle.dumps(result))
    assert (other.history, other.changes) == (result.history, result.changes)
    assert other.run is None
    assert str(other) == str(result)
    np.testing.assert_array_equal(call(other.model, X), call(result.model, X))
    both = [r.lora.attach(jaxonnx.load(mlp())) for r in (result, other)]
    np.testing.assert_array_equal(call(both[1], X), call(both[0], X))


def test_other_processes_take_models():
    model = jaxonnx.load(mlp())
    expected = call(model, X)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        np.testing.assert_allclose(pool.submit(call, model, X).result(), expected, rtol=1e-6)
    import joblib  # which pickles by cloudpickle

    (found,) = joblib.Parallel(2)([joblib.delayed(lambda m, x: np.asarray(m(x)))(model, X)])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
