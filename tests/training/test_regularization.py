"""Label smoothing, noise on embeddings, and dropout of adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from jaxonnx import losses
from tests.support.tiny_networks import LABELS, examples, mlp, same, text, train

RNG = np.random.default_rng(0)


def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def smooth_loss(logits, labels, share, weight=None):
    """As PyTorch's cross_entropy with label_smoothing, and LabelSmoother of transformers."""
    scores = -log_softmax(logits)
    weight = np.ones(logits.shape[-1]) if weight is None else weight
    counts, labels = labels >= 0, np.maximum(labels, 0)
    taken = np.take_along_axis(scores, labels[..., None], -1)[..., 0]
    each = (1 - share) * taken * weight[labels] + share * (scores * weight).mean(-1)
    return (each * counts).sum() / (weight[labels] * counts).sum()


def first_loss(model, data, loss, **settings):
    step = jaxonnx.training.step(model, loss, optax.sgd(0.1), **settings)
    _, (value, _) = jax.jit(step.update)(step.init(), data)
    return float(value), step


def test_smoothed_labels_of_examples():
    x, y = examples(8)
    logits = np.asarray(jaxonnx.load(mlp())(x))
    wanted = smooth_loss(logits, y, 0.1)
    for loss in (LABELS, losses.cross_entropy()):
        value, step = first_loss(mlp(), (x, y), loss, label_smoothing=0.1)
        assert value == pytest.approx(wanted, rel=1e-5)
        sums = jax.jit(step.evaluate)(step.sums((x, y)), step.init(), (x, y))
        assert step.row(sums)["validation_loss"] == pytest.approx(wanted, rel=1e-5)
    hot = np.eye(4, dtype=np.float32)[y]
    value, _ = first_loss(mlp(), (x, hot), "softmax_cross_entropy", label_smoothing=0.1)
    assert value == pytest.approx(wanted, rel=1e-5)
    weight = [1.0, 3.0, 0.5, 2.0]
    loss = losses.cross_entropy(weight=weight)
    value, _ = first_loss(mlp(), (x, y), loss, label_smoothing=0.2)
    assert value == pytest.approx(smooth_loss(logits, y, 0.2, np.array(weight)), rel=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_smoothed_labels_have_the_weights_of_their_classes(share):
    """Not that of the label alone: PyTorch's cross_entropy(weight=, label_smoothing=)."""
    x, y = examples(8)
    weight = np.array([1.0, 3.0, 0.5, 2.0])
    settings = {"label_smoothing": share or None, "class_weights": dict(enumerate(weight.tolist()))}
    scores = -log_softmax(np.asarray(jaxonnx.load(mlp())(x)))
    hot = np.eye(4)[y]
    mixed = 0.7 * hot + 0.3 * np.roll(hot, 1, axis=0)  # as mixup makes them
    for loss, data, labels in [
        (LABELS, y, hot),
        (losses.cross_entropy(), y, hot),
        ("softmax_cross_entropy", hot.astype(np.float32), hot),
        ("softmax_cross_entropy", mixed.astype(np.float32), mixed),
    ]:
        wanted = ((1 - share) * labels + share / 4) * weight * scores
        value, _ = first_loss(mlp(), (x, data), loss, **settings)
        assert value == pytest.approx(wanted.sum() / (labels @ weight).sum(), rel=1e-5)


def test_smoothed_labels_of_tokens_leave_out_what_is_ignored():
    ids = RNG.integers(0, 7, (3, 6))
    labels = np.where(RNG.random((3, 6)) < 0.3, -100, ids)
    model = jaxonnx.load(text())
    mask = np.ones_like(ids)
    logits = np.asarray(model(ids, mask))
    value, _ = first_loss(model, ((ids, mask), labels), "causal_lm", label_smoothing=0.1)
    assert value == pytest.approx(smooth_loss(logits[:, :-1], labels[:, 1:], 0.1), rel=1e-5)


def test_smoothed_labels_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    smoother = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother(0.1)
    logits = RNG.normal(size=(2, 5, 7)).astype(np.float32)
    labels = np.where(RNG.random((2, 5)) < 0.3, -100, RNG.integers(0, 7, (2, 5)))
    theirs = smoother({"logits": torch.tensor(logits)}, torch.tensor(labels), shift_labels=True)
    assert float(theirs) == pytest.approx(smooth_loss(logits[:, :-1], labels[:, 1:], 0.1), rel=1e-5)
    weight = np.array([1.0, 3, 0.5, 2, 1, 1, 4], np.float32)
    theirs = torch.nn.functional.cross_entropy(
        torch.tensor(logits[0]), torch.tensor(labels[0]), torch.tensor(weight), label_smoothing=0.2
    )
    assert float(theirs) == pytest.approx(smooth_loss(logits[0], labels[0], 0.2, weight), rel=1e-5)


def test_noise_on_embeddings_is_uniform_and_in_training_only():
    """Within +-alpha / sqrt(length * features), as `neftune_post_forward_hook` of transformers."""
    model = jaxonnx.load(text()).with_outputs(["embedded"])
    ids = RNG.integers(0, 7, (64, 50))
    step = jaxonnx.training.step(model, lambda y, t: y.mean(), optax.sgd(0.1), neftune=5.0)
    noisy = step.model

    def noise(key):
        run, _ = noisy.apply_train(noisy.params, noisy.state, key, ids)
        return np.asarray(run - model(ids))

    first, second = noise(jax.random.key(0)), noise(jax.random.key(1))
    most = 5 / np.sqrt(50 * 4)
    assert 0.99 * most < np.abs(first).max() <= most * (1 + 1e-5)
    assert first.std() == pytest.approx(most / np.sqrt(3), rel=0.02)
    assert abs(first.mean()) < 0.02 * most
    assert np.abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.03
    np.testing.assert_array_equal(noisy(ids), model(ids))
    assert jaxonnx.load(noisy.to_onnx()).graph.nodes[0].op.name == "Gather"


@pytest.mark.parametrize(("factor", "share"), [(2.0, 1.0), (2.004, 1.0), (3.0, 3.0)])
def test_noise_is_behind_the_scale_of_embeddings(factor, share):
    """As `neftune_post_forward_hook` adds it to Gemma's scaled embeddings of 4 features.

    A multiplier that is not the root of the features (Granite's) follows the noise.
    """
    scaled = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> net (int64[n, t] input_ids)
        => (float[n, t, 4] y) <float[7, 4] table = {{{",".join(map(str, range(28)))}}},
        float factor = {{{factor}}}> {{ x = Gather(table, input_ids) y = Mul(factor, x) }}"""
    )
    model = jaxonnx.load(scaled)
    ids = RNG.integers(0, 7, (64, 50))
    noisy = jaxonnx.training.step(model, lambda y, t: y.mean(), optax.sgd(0.1), neftune=5.0).model
    run, _ = noisy.apply_train(noisy.params, noisy.state, jax.random.key(0), ids)
    most = share * 5 / np.sqrt(50 * 4)
    assert 0.99 * most < np.abs(run - model(ids)).max() <= most * (1 + 1e-3)


def test_noise_and_smoothing_resume_and_are_compared(tmp_path):
    ids = RNG.integers(0, 7, (24, 6))
    data = {"input_ids": ids}
    settings = {"loss": "causal_lm", "neftune": 2.0, "label_smoothing": 0.1, "batch_size": 8}
    whole = train(text(), data, epochs=2, **settings)
    train(text(), data, max_steps=4, checkpoint_dir=tmp_path, **settings)
    again = {"checkpoint_dir": tmp_path, "resume": True, "epochs": 2}
    assert same(whole, train(text(), data, **settings, **again))
    assert not same(whole, train(text(), data, epochs=2, **{**settings, "neftune": None}))
    with pytest.raises(jaxonnx.TrainingError, match=r"has label_smoothing=0\.1"):
        train(text(), data, **{**settings, "label_smoothing": None}, **again)


MATRIX = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]> net (float[n, 4] x) => (float[n, 4] y)
    <float[4, 4] w = {1,2,3,4, 2,1,0,3, 4,4,1,2, 0,3,2,1}> {y = MatMul(x, w)}"""
)


def adapted(**settings):
    """Adapters whose change is x itself, and their model."""
    model = jaxonnx.LoRA(rank=4, where="w", **settings).attach(
        jaxonnx.load(MATRIX), jax.random.key(0)
    )
    eye = jnp.eye(4)
    return model.replace(params={**model.params, "w.lora_A": eye, "w.lora_B": eye})


def run(model, x, key=7):
    return np.asarray(model.apply_train(model.params, model.state, jax.random.key(key), x)[0])


def dropped_inputs(x, ratio):
    model = adapted(dropout=ratio)
    return run(model, x) - x @ np.asarray(model.state["w"])


def test_dropout_of_adapters_drops_inputs_of_a():
    x = RNG.normal(size=(500, 4)).astype(np.float32)
    dropped = dropped_inputs(x, 0.25)
    kept = np.abs(dropped) > 1e-4
    np.testing.assert_allclose(dropped[kept], (x / 0.75)[kept], rtol=1e-3, atol=1e-4)
    assert 1 - kept.mean() == pytest.approx(0.25, abs=0.03)
    model = adapted(dropout=0.25)
    assert not np.array_equal(run(model, x), run(model, x, key=8))
    np.testing.assert_allclose(model(x), adapted()(x), rtol=1e-5)
    np.testing.assert_array_equal(
        model.merge_adapters().params["w"], adapted().merge_adapters().params["w"]
    )


def peft_formula(x, dropped, w, norms):
    """The forward pass of peft's Linear with DoRA in training: `DoraLinearLayer.forward`."""
    change = np.eye(4)
    scale = norms / np.linalg.norm(w + change, axis=0)
    return x @ w + (scale - 1) * (dropped @ w) + scale * (dropped @ change)


def test_dropout_of_dora_is_that_of_peft():
    x = RNG.normal(size=(50, 4)).astype(np.float32)
    dropped = dropped_inputs(x, 0.5)
    model = adapted(dropout=0.5, dora=True)
    w, norms = np.asarray(model.state["w"]), np.asarray(model.params["w.lora_magnitude"])
    wanted = peft_formula(x, dropped, w, norms)
    np.testing.assert_allclose(run(model, x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_the_formulas_are_those_of_peft(dora):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    x = RNG.normal(size=(6, 4)).astype(np.float32)
    mask = (RNG.random((6, 4)) < 0.5).astype(np.float32) * 2
    net = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    config = peft.LoraConfig(
        r=4, lora_alpha=4, target_modules=["0"], lora_dropout=0.5, use_dora=dora
    )
    layer = peft.get_peft_model(net, config).base_model.model[0]

    class Masked(torch.nn.Module):
        def forward(self, x):
            return x * torch.tensor(mask)

    layer.lora_dropout["default"] = Masked()
    with torch.no_grad():
        for part in (layer.lora_A, layer.lora_B):
            part["default"].weight.copy_(torch.eye(4))
        theirs = layer.train()(torch.tensor(x)).numpy()
        w = layer.base_layer.weight.numpy().T
    wanted = x @ w + (x * mask) @ np.eye(4)
    if dora:
        norms = layer.lora_magnitude_vector["default"].weight.detach().numpy()
        wanted = peft_formula(x, x * mask, w, norms)
    np.testing.assert_allclose(theirs, wanted, rtol=1e-4, atol=1e-5)


def test_runs_with_dropout_of_adapters_resume(tmp_path):
    lora = jaxonnx.LoRA(rank=2, dropout=0.2)
    whole = train(lora=lora, epochs=2)
    train(lora=lora, max_steps=7, checkpoint_dir=tmp_path)
    assert same(whole, train(lora=lora, epochs=2, checkpoint_dir=tmp_path, resume=True))
    assert not same(whole, train(lora=jaxonnx.LoRA(rank=2), epochs=2))


def test_what_does_not_fit():
    with pytest.raises(jaxonnx.TrainingError, match="label_smoothing goes with cross entropies"):
        train(loss=lambda y, t: y.mean(), label_smoothing=0.1)
    with pytest.raises(jaxonnx.TrainingError, match="label_smoothing must be a number of at least"):
        train(label_smoothing=1.0)
    with pytest.raises(jaxonnx.TrainingError, match="no input of tokens"):
        train(neftune=5.0)
    with pytest.raises(jaxonnx.InputError, match=r"dropout must be a number in \[0, 1\)"):
        jaxonnx.LoRA(dropout=1.5)
    conv = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        net (float[n, 4, 5, 5] x) => (float[n, 4, 3, 3] y) <float[4, 4, 3, 3] w = {%s}>
        {y = Conv(x, w)}""".replace("%s", ",".join("1" * 144))
    )
    with pytest.raises(jaxonnx.InputError, match=r"the adapter of 'w' is added to the weight"):
        jaxonnx.LoRA(rank=2, dropout=0.1).attach(jaxonnx.load(conv), jax.random.key(0))


def test_short_runs_say_that_their_average_is_the_initial_weights():
    """0.999 ** 8 of them; an average of half of each update has left them."""
    run = train(mlp(), ema=0.999, epochs=1)
    (note,) = (note for note in run.history.notes if "ema" in note)
    updates = len(run.history.losses)
    assert f"leaves {0.999**updates:.0%} of the initial weights" in note
    assert not [note for note in train(mlp(), ema=0.1, epochs=1).history.notes if "ema" in note]
