"""Training of files that fix the number of examples in a batch."""

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx.model import with_any_batch

X = np.random.default_rng(0).standard_normal((10, 6)).astype(np.float32)
Y = np.arange(10) % 3
WEIGHTS = "<float[2,3] w = {1,-2,3,-4,5,-6}, float[3] b = {1,2,3}, int64[3] s = {N,3,2}>"
LAYERS = "r = Reshape(x, s) h = ReduceMean <axes = [1]> (r) k = Reshape(h, t) y = Gemm(k, w, b)"


def network(layers=LAYERS, size=1, out=None, weights=WEIGHTS):
    weights = weights.replace("N", str(size)).replace("s =", f"t = {{{size},2}}, int64[3] s =", 1)
    weights = weights.replace("int64[3] t", "int64[2] t")
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[{size},6] x) => '
        f"(float[{out or f'{size},3'}] y) {weights} {{ {layers} }}"
    )


def session(model, path):
    model.save(path)
    onnx.checker.check_model(path, full_check=True)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_one_example_is_opened_and_said(tmp_path):
    result = jaxonnx.train(network(), (X, Y), batch_size=5, epochs=2)
    opened = jaxonnx.train(
        jaxonnx.load(network(), batch="any"), (X, Y), batch_size=5, epochs=2, optimizer="adam"
    )
    assert result.history.losses == opened.history.losses
    assert len(result.history.losses) == 4
    (said,) = [note for note in result.history.notes if "fixes the batch to 1" in note]
    assert "takes batches of any size" in said
    assert not any("fixes the batch" in note for note in opened.history.notes)
    run = session(result.model, tmp_path / "any.onnx").run
    for count in (1, 10):  # what was deployed for one example still is
        y = run(None, {"x": X[:count]})[0]
        np.testing.assert_allclose(y, result.model(X[:count]), rtol=1e-5, atol=1e-6)
    # for batches of an iterable as well
    assert len(jaxonnx.train(network(), [(X, Y), (X, Y)]).history.losses) == 2


@pytest.mark.deep
def test_heads_and_statistics(tmp_path):
    layers = LAYERS.replace("Gemm(k,", "Gemm(n,").replace(
        "y = ", "n = BatchNormalization(k, g, g, m, v) y = "
    )
    weights = WEIGHTS.replace(
        "float[3] b", "float[2] g = {1,1}, float[2] m = {0,0}, float[2] v = {1,1}, float[3] b"
    )
    proto = network(layers, weights=weights)
    result = jaxonnx.train(proto, (X, Y % 2), head=2, epochs=2)
    assert result.model.outputs[0].shape == ("batch", 2)
    assert np.abs(np.asarray(result.model.state["m"])).min() > 0
    y = session(result.model, tmp_path / "head.onnx").run(None, {"x": X})[0]
    np.testing.assert_allclose(y, result.model(X), rtol=1e-4, atol=1e-5)


@pytest.mark.deep
def test_a_size_that_was_asked_for(tmp_path):
    kept = jaxonnx.train(network(), (X, Y), batch_size=1)
    assert len(kept.history.losses) == 10
    assert kept.model.inputs[0].shape == (1, 6)
    assert not any("fixes the batch" in note for note in kept.history.notes)
    four = jaxonnx.train(network(size=4), (X, Y))
    assert (len(four.history.losses), four.model.inputs[0].shape[0]) == (3, 4)
    five = jaxonnx.train(network(size=4), (X, Y), batch_size=5)
    assert (len(five.history.losses), five.model.inputs[0].shape[0]) == (2, "batch")


@pytest.mark.parametrize(
    ("layers", "out", "words"),
    [
        (
            "m = ReduceMean <axes = [0]> (x) z = Add(x, m) " + LAYERS.replace("(x,", "(z,"),
            "1,3",
            r"'z' .Add, opset 17. mixes the examples .* give other values of 'z'",
        ),
        (
            LAYERS.replace("y = ", "z = ") + " y = ReduceMean <axes = [0]> (z)",
            "1,3",
            "'y' has the shape .1, 3. whatever the batch is",
        ),
        (
            LAYERS.replace("y = ", "z = ") + " y = ReduceMean <axes = [0], keepdims = 0> (z)",
            "3",
            "'y' .3. does not have the batch along its first axis",
        ),
        (
            LAYERS.replace("y = ", "z = ") + " n = Mul(z, o) y = Softmax(n)",
            "1,3",
            "have the same 'y', so the check is inconclusive",
        ),
    ],
)
def test_what_is_not_proved_is_refused(layers, out, words):
    weights = WEIGHTS.replace("float[3] b", "float o = {0}, float[3] b")
    model = jaxonnx.load(network(layers, out=out, weights=weights))
    with pytest.raises(jaxonnx.InputError, match=f"{words}.*dynamic_shapes= of torch.onnx.export"):
        with_any_batch(model, prove=True)


def test_training_without_a_proof():
    mixing = "m = ReduceMean <axes = [0]> (x) z = Add(x, m) " + LAYERS.replace("(x,", "(z,")
    with pytest.warns(UserWarning, match="each step sees one example, .*dynamic_shapes="):
        result = jaxonnx.train(network(mixing), (X, Y))
    assert len(result.history.losses) == 10
    jaxonnx.train(network(mixing), (X, Y), batch_size=1)  # without a warning
    with pytest.raises(jaxonnx.TrainingError, match=r"batch_size=5, but .* fixed to batches of 1"):
        jaxonnx.train(network(mixing), (X, Y), batch_size=5)


def test_an_input_with_the_examples_along_its_second_axis():
    """As the positions of Qwen2.5-VL, [3, batch, length]: its first axis fixes no batch."""
    shifts = "m = ReduceMean <axes = [0], keepdims = 0> (p) u = Unsqueeze(m, one) "
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n,6] x, float[3,n] p) => (float[n,3] y) '
        f"<float[6,3] w = {{{', '.join(map(str, range(18)))}}}, int64[1] one = {{1}}> "
        f"{{ {shifts} z = MatMul(x, w) y = Add(z, u) }}"
    )
    settings = {"epochs": 1, "batch_size": 5, "optimizer": optax.sgd(0.0)}
    loss = "softmax_cross_entropy_with_integer_labels"  # the same for all shifts of a row
    with pytest.raises(jaxonnx.TrainingError, match=r"lacks the model's input 'p' \(fixed="):
        jaxonnx.train(proto, {"x": X, "y": Y}, loss=loss, **settings)
    fixed = {"p": np.ones((3, 1), np.float32)}
    result = jaxonnx.train(proto, {"x": X, "y": Y}, loss=loss, fixed=fixed, **settings)
    scores = X @ np.arange(18, dtype=np.float32).reshape(6, 3)
    each = np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1)) + scores.max(1)
    each -= scores[np.arange(10), Y]
    assert np.mean(result.history.losses) == pytest.approx(each.mean(), rel=1e-5)
