"""Arguments of wrong types: the error is one of jaxonnx, and names what is wrong."""

import numpy as np
import pytest

import jaxonnx
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
