"""Losses of distillation and preference, against PyTorch and optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxonnx
from jaxonnx import losses
from tests.support.paths import DATA

GENAI = DATA / "llm" / "qwen3-genai" / "model.onnx"
RNG = np.random.default_rng(0)
STUDENT, TEACHER = (RNG.normal(size=(4, 7, 11)).astype(np.float32) for _ in range(2))
LABELS = np.where(RNG.random((4, 7)) < 0.3, -100, RNG.integers(0, 11, (4, 7)))
REFERENCE = -RNG.random(4).astype(np.float32) * 20


def test_distill_is_the_divergence_of_optax():
    found = losses.distill(temperature=3.0)(STUDENT, TEACHER)
    student = jax.nn.log_softmax(STUDENT / 3.0)
    wanted = 9 * optax.losses.kl_divergence(student, jax.nn.softmax(TEACHER / 3.0)).mean(1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    # places that are ignored do not count, others are cross entropy as far as `soft` says
    hard = losses.distill(soft=0.0)(STUDENT, (TEACHER, LABELS))
    each = optax.losses.softmax_cross_entropy_with_integer_labels(STUDENT, np.maximum(LABELS, 0))
    counts = LABELS >= 0
    np.testing.assert_allclose(hard, (each * counts).sum(1) / counts.sum(1), rtol=1e-5)


def test_distill_and_dpo_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    student, teacher, labels = map(torch.from_numpy, (STUDENT, TEACHER, LABELS))
    student.requires_grad_()
    counts = labels >= 0
    each = functional.kl_div(
        functional.log_softmax(student / 2, -1),
        functional.softmax(teacher / 2, -1),
        reduction="none",
    ).sum(-1)
    cross = functional.cross_entropy(student.transpose(1, 2), labels, reduction="none")
    wanted = ((0.7 * 4 * each + 0.3 * cross) * counts).sum(1) / counts.sum(1)
    wanted.sum().backward()
    loss = losses.distill(soft=0.7)
    np.testing.assert_allclose(loss(STUDENT, (TEACHER, LABELS)), wanted.detach().numpy(), rtol=1e-5)
    gradient = jax.grad(lambda x: loss(x, (TEACHER, LABELS)).sum())(jnp.asarray(STUDENT))
    np.testing.assert_allclose(gradient, student.grad.numpy(), atol=1e-6)

    likelihoods = -functional.cross_entropy(
        student[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
    ).sum(1)
    found = losses.log_likelihoods(STUDENT, LABELS)
    np.testing.assert_allclose(found, likelihoods.detach().numpy(), rtol=1e-5)
    ratios = likelihoods - torch.from_numpy(REFERENCE)
    wanted = -functional.logsigmoid(0.2 * (ratios[::2] - ratios[1::2]))
    found = losses.dpo(beta=0.2)(STUDENT, {"labels": LABELS, "reference": REFERENCE})
    np.testing.assert_allclose(found, np.repeat(wanted.detach().numpy(), 2), rtol=1e-5)


@pytest.mark.deep
def test_dpo_prefers_what_was_chosen():
    """Over the step of any loss, with a reference that is computed once."""
    model = jaxonnx.load(GENAI)
    ids = np.array([[5, 6, 7, 8], [5, 6, 9, 10], [5, 11, 12, 13], [5, 11, 14, 15]])
    labels = np.where(np.arange(4) < 2, -100, ids)
    whole = model.without_cache()
    score = lambda net: losses.log_likelihoods(jnp.asarray(net.predict(ids)), labels)  # noqa: E731
    reference = np.asarray(score(whole))
    batch = {"input_ids": ids}, {"labels": labels, "reference": reference}
    result = jaxonnx.train(
        model,
        [batch] * 5,
        loss=losses.dpo(beta=0.5),
        optimizer=optax.adam(1e-2),
        lora=jaxonnx.LoRA(rank=2, where="attention"),
    )
    assert result.history.losses[0] == pytest.approx(np.log(2), abs=1e-4)
    assert result.history.losses[-1] < 0.5
    change = np.asarray(score(result.model.without_cache())) - reference
    assert (change[::2] > change[1::2]).all()


def test_arguments_that_do_not_fit():
    with pytest.raises(jaxonnx.TrainingError, match="beta must be above 0"):
        losses.dpo(beta=0)
    with pytest.raises(jaxonnx.TrainingError, match="temperature is above 0"):
        losses.distill(temperature=0)
    with pytest.raises(jaxonnx.TrainingError, match="'labels' and 'reference'"):
        losses.dpo()(STUDENT, LABELS)
    with pytest.raises(jaxonnx.TrainingError, match="pairs of rows, and a batch has 3 rows"):
        losses.dpo()(STUDENT[:3], {"labels": LABELS[:3], "reference": REFERENCE[:3]})


SCORES, OTHERS = (RNG.normal(size=(4, 5, 6, 7)).astype(np.float32) for _ in range(2))
PIXELS = RNG.integers(0, 5, (4, 6, 7))


def test_distill_has_the_classes_of_images_on_axis_1():
    """As pytorch's kl_div and cross_entropy along dim=1; the labels tell the axis."""
    student, teacher = (jnp.moveaxis(x, 1, -1) for x in (SCORES, OTHERS))
    expected = losses.distill(soft=0.7)(student, (teacher, PIXELS))
    np.testing.assert_allclose(
        losses.distill(soft=0.7)(SCORES, (OTHERS, PIXELS)), expected, rtol=1e-5
    )
    soft = losses.distill()(np.asarray(student).reshape(4, -1, 5), teacher.reshape(4, -1, 5))
    np.testing.assert_allclose(losses.distill(axis=1)(SCORES, OTHERS), soft, rtol=1e-5)
    with pytest.raises(jaxonnx.TrainingError, match=r"pass axis=1, as in images of ONNX"):
        losses.distill()(SCORES, OTHERS)
    with pytest.raises(jaxonnx.TrainingError, match=r"axis -1, and labels with their other axes"):
        losses.distill(axis=-1)(SCORES, (OTHERS, PIXELS))
    with pytest.raises(jaxonnx.TrainingError, match=r"learns integer labels .* float64"):
        losses.distill(soft=0.5)(SCORES, (OTHERS, PIXELS * 0.5))


def make_network(seed, axis=1):
    w = np.random.default_rng(seed).normal(size=(5, 3, 3, 3)).astype(np.float32)

    def function(x):
        return jnp.moveaxis(jax.lax.conv(x, w, (1, 1), "SAME"), 1, axis)

    proto = jaxonnx.to_onnx(function, np.zeros((2, 3, 6, 7), np.float32))
    return jaxonnx.load(proto, batch="any")


def test_a_teacher_of_images_and_the_metrics_of_their_labels():
    x = RNG.normal(size=(4, 3, 6, 7)).astype(np.float32)
    student, teacher = make_network(0), make_network(1)
    values = losses.distill(soft=0.7)(student(x), (teacher(x), PIXELS))
    last = make_network(0, -1), losses.distill(teacher=make_network(1, -1), soft=0.7, top=2)
    greatest = jaxonnx.evaluate(last[0], (x, PIXELS), loss=last[1])["loss"]
    for top, expected in ((None, values.mean()), (2, greatest)):
        row = jaxonnx.evaluate(
            student,
            (x, PIXELS),
            loss=losses.distill(teacher=teacher, soft=0.7, top=top),
            metrics=["accuracy", "iou"],
            batch_size=2,
        )
        np.testing.assert_allclose(row["loss"], expected, rtol=1e-5)
        hard = jaxonnx.evaluate(
            student, (x, PIXELS), loss=losses.cross_entropy(), metrics=["accuracy", "iou"]
        )
        assert (row["accuracy"], row["iou"]) == (hard["accuracy"], hard["iou"])
    wrong = PIXELS.copy()
    wrong[0, 0] = 255
    loss = losses.distill(teacher=teacher, soft=0.7)
    with pytest.raises(jaxonnx.TrainingError, match=r"7 labels outside of 0 ... 4, .* is 255"):
        jaxonnx.train(student, (x, wrong), loss=loss, epochs=1, batch_size=2)
