"""Preferences and teachers: losses for which `train` evaluates a second model."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest
from onnx import helper, numpy_helper

import jaxonnx
from jaxonnx import losses
from tests.llm.test_rows import Streamed
from tests.support.paths import DATA
from tests.support.sweeps import sweep
from tests.support.tiny_networks import examples, mlp, same, text, train, weights

GENAI = DATA / "llm" / "qwen3-genai"
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 7, (16, 6))
LABELS = np.where(np.arange(6) < 2, -100, IDS)
LABELS[5, 4:] = -100
PAIRS = {"input_ids": IDS, "labels": LABELS}


def scores(model):
    """Log-likelihoods of the answers in float64."""
    logits = np.asarray(model(IDS, np.ones_like(IDS)), np.float64)[:, :-1]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = LABELS[:, 1:]
    taken = np.take_along_axis(logs, np.maximum(labels, 0)[..., None], -1)[..., 0]
    return (taken * (labels >= 0)).sum(1), (labels >= 0).sum(1)


def sigmoid_loss(x):
    return np.log1p(np.exp(-x))


@pytest.mark.parametrize("lora", [None, jaxonnx.LoRA(rank=2)])
def test_references_are_computed_by_train(lora):
    settings = {"lora": lora, "batch_size": 4, "epochs": 3, "optimizer": optax.adam(0.05)}
    settings |= {"validation": PAIRS, "validate_first": True}
    model = jaxonnx.load(text())
    result = train(model, PAIRS, loss="dpo", **settings)
    before, after = scores(model)[0], scores(result.model)[0]
    margins = 0.1 * ((after - before)[::2] - (after - before)[1::2])
    first, *_, last = result.history.epochs
    assert first["validation_loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert (first["validation_margin"], first["validation_accuracy"]) == (0, 0)
    assert last["validation_loss"] == pytest.approx(sigmoid_loss(margins).mean(), rel=1e-4)
    assert last["validation_margin"] == pytest.approx(margins.mean(), rel=1e-3)
    assert last["validation_accuracy"] == pytest.approx((margins > 0).mean())
    assert margins.mean() > 0.1
    # as with references that a user computes before
    reference = before.astype(np.float32)
    table = {"input_ids": IDS}, {"labels": LABELS, "reference": reference}
    by_hand = train(model, table, loss=losses.dpo(), **{**settings, "validation": table})
    for name, value in weights(result).items():
        np.testing.assert_allclose(weights(by_hand)[name], value, rtol=1e-3, atol=1e-4)


def test_a_run_of_preferences_resumes(tmp_path):
    settings = {"loss": losses.dpo(beta=0.3), "batch_size": 4, "lora": jaxonnx.LoRA(rank=2)}
    whole = train(text(), PAIRS, epochs=2, **settings)
    train(text(), PAIRS, max_steps=6, checkpoint_dir=tmp_path, **settings)
    again = {"checkpoint_dir": tmp_path, "resume": True}
    assert same(whole, train(text(), PAIRS, epochs=2, **settings, **again))
    batches = [(({"input_ids": IDS[i : i + 4]}), LABELS[i : i + 4]) for i in range(0, 16, 4)]
    streamed = train(text(), batches, **{**settings, "batch_size": None})
    assert streamed.history.losses[0] == pytest.approx(np.log(2), rel=1e-6)


class StreamedPairs(Streamed):
    column_names = ("prompt", "chosen", "rejected")


@pytest.mark.parametrize("loss", sweep(["dpo", "orpo"], "dpo"))
def test_pairs_that_are_cut_to_the_same_tokens_are_noted(loss):
    """As in TRL they stay: of dpo each adds log 2 to the loss, and nothing to its gradient."""
    prompt, same = "one two", " three four five one two three four five one two three four five"
    rows = [
        {"prompt": prompt, "chosen": " three", "rejected": " four"},
        {"prompt": prompt, "chosen": same + " six", "rejected": same + " seven"},
    ]
    settings = {"loss": loss, "optimizer": optax.sgd(0.1), "batch_size": 2, "epochs": 2}
    settings["trainable"] = "*layers.1.mlp*"
    note = "pairs whose answers are equal in their first 8 tokens"
    whole = jaxonnx.train(GENAI, rows, **settings)
    assert not [n for n in whole.history.notes if "answers are equal" in n]
    settings["preprocess"] = {"max_length": 8}
    cut = jaxonnx.train(GENAI, rows, **settings)
    assert [n for n in cut.history.notes if n.startswith(note) and n.endswith(": 1")]
    streamed = jaxonnx.train(GENAI, StreamedPairs(rows), **settings)
    assert [n for n in streamed.history.notes if n.startswith(note)]
    np.testing.assert_allclose(streamed.history.losses, cut.history.losses, rtol=1e-5)
    if loss == "dpo":
        np.testing.assert_allclose(cut.history.losses[0], np.log(2), rtol=1e-6)
        alone = jaxonnx.train(GENAI, rows[1:], **settings)
        np.testing.assert_allclose(alone.history.losses, np.log(2), rtol=1e-6)
        unchanged = jaxonnx.load(GENAI).params
        for name, w in alone.model.params.items():
            np.testing.assert_allclose(w, unchanged[name], atol=1e-6)


def test_a_stream_whose_texts_are_all_skipped_says_so():
    row = {"prompt": "one two", "chosen": " three" * 20, "rejected": " four"}
    settings = {"loss": "dpo", "optimizer": optax.sgd(0.1), "batch_size": 1, "epochs": 1}
    settings["preprocess"] = {"max_length": 8, "long": "skip"}
    for data in ([row], StreamedPairs([row])):
        with pytest.raises(jaxonnx.TrainingError, match="leaves no example of data"):
            jaxonnx.train(GENAI, data, **settings)


@pytest.mark.parametrize("answers", [("yes", "yes"), ("yes", "no")])
def test_judged_answers_that_are_equal_are_trained(answers):
    """Each is compared with itself until `draw` gives it another's answer: it is no pair."""
    rows = [
        {"prompt": f"one {i}", "completion": answer, "label": i % 2 == 0}
        for i, answer in enumerate(answers * 2)
    ]
    run = jaxonnx.train(GENAI, rows, loss="kto", optimizer=optax.sgd(0.1), batch_size=2, epochs=2)
    assert len(run.history.losses) == 8
    assert not [n for n in run.history.notes if "answers are equal" in n]


def test_answers_in_texts_are_pairs():
    row = {"prompt": "one two", "chosen": " three", "rejected": " four"}
    result = jaxonnx.train(
        GENAI,
        [row, {**row, "chosen": " five"}],
        loss="dpo",
        lora=jaxonnx.LoRA(rank=2, where="attention"),
        learning_rate=1e-2,
        epochs=3,
    )
    assert result.history.losses[0] == pytest.approx(np.log(2), abs=1e-5)
    assert result.history.losses[-1] < result.history.losses[0]


def kto_of_trl(changes, wanted, beta, desirable, undesirable):
    """The losses of `KTOTrainer`, in float64; `changes` are those of all rows."""
    divergence = max(changes[1::2].mean(), 0)
    above = changes[::2] - divergence
    gains = 1 / (1 + np.exp(-beta * above)), 1 / (1 + np.exp(beta * above))
    return np.where(wanted, desirable * (1 - gains[0]), undesirable * (1 - gains[1]))


@pytest.mark.parametrize("shift", [-3.0, 3.0])  # a divergence of 0, and one above
def test_kto_is_that_of_trl(shift):
    logits = RNG.normal(size=(16, 6, 7)).astype(np.float32)
    logs = np.log(np.exp(logits.astype(np.float64)).sum(-1))[:, :-1]
    taken = np.take_along_axis(logits[:, :-1], np.maximum(LABELS[:, 1:], 0)[..., None], -1)[..., 0]
    likelihoods = ((taken - logs) * (LABELS[:, 1:] >= 0)).sum(1)
    reference = (likelihoods - shift + RNG.normal(size=16)).astype(np.float32)
    judged = np.repeat(np.arange(8) % 3 > 0, 2).astype(np.float32)
    targets = {"labels": LABELS, "label": judged, "reference": reference}
    loss = losses.kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    wanted = kto_of_trl(likelihoods - reference, judged[::2] > 0, 0.3, 1.5, 0.5)
    np.testing.assert_allclose(loss(logits, targets), np.repeat(wanted, 2), rtol=1e-5)
    # the rows that fill a batch do not count
    weight = np.repeat([1.0] * 6 + [0.0] * 2, 2)
    short = {name: x[:12] for name, x in targets.items()}
    np.testing.assert_allclose(
        loss(logits, targets, weight)[:12], loss(logits[:12], short), rtol=1e-5
    )
    # the divergence has no gradient: that of mismatched rows is 0
    gradient = np.asarray(jax.jit(jax.grad(lambda x: loss(x, targets).sum()))(logits))
    assert not gradient[1::2].any()
    assert gradient[::2].any()


def test_kto_of_pytorch_has_the_same_gradient():
    torch = pytest.importorskip("torch")
    logits = RNG.normal(size=(16, 6, 7)).astype(np.float32)
    reference, judged = -RNG.random(16).astype(np.float32) * 9, np.repeat(np.arange(8) % 2, 2)
    x = torch.tensor(logits, requires_grad=True)
    scores = -torch.nn.functional.cross_entropy(
        x[:, :-1].transpose(1, 2), torch.from_numpy(LABELS[:, 1:]), reduction="none"
    ).sum(1)
    ratios = scores - torch.from_numpy(reference)
    divergence = ratios[1::2].mean().detach().clamp(min=0)
    sign = torch.from_numpy(2.0 * judged[::2] - 1).float()
    (1 - torch.sigmoid(0.1 * sign * (ratios[::2] - divergence))).sum().backward()
    targets = {"labels": LABELS, "label": judged, "reference": reference}
    gradient = jax.grad(lambda x: losses.kto()(x, targets).sum() / 2)(jnp.asarray(logits))
    np.testing.assert_allclose(gradient, x.grad.numpy(), atol=1e-6)


def test_answers_with_a_judgement_are_compared_with_others():
    """Each row is two: with its own answer, and with that of the row before."""
    parts = [("one", " two", True), ("three four", " five", False), ("six", " is", True)]
    rows = [dict(zip(("prompt", "completion", "label"), part, strict=True)) for part in parts]
    settings = {"batch_size": 6, "optimizer": optax.sgd(0.5), "epochs": 4}
    settings |= {"trainable": "*mlp*", "validation": rows, "validate_first": True}
    model = jaxonnx.load(GENAI)
    made = jaxonnx.train(model, rows, loss="kto", **settings)
    read = model.tokenizer.encode
    pairs = [(i, j) for i, other in ((0, 1), (1, 0), (2, 1)) for j in (i, other)]
    prompts = [read(parts[i][0]) for i, _ in pairs]
    ids = [[*read(parts[i][0] + parts[j][1]), 2] for i, j in pairs]
    labels = [[*[-100] * len(p), *row[len(p) :]] for p, row in zip(prompts, ids, strict=True)]
    judged = [float(parts[i][2]) for i, _ in pairs]
    table = {"input_ids": ids, "labels": labels, "label": np.array(judged, np.float32)}
    other = jaxonnx.train(model, table, loss="kto", **settings | {"validation": table})
    assert made.history.epochs[0]["validation_loss"] == pytest.approx(0.5, abs=1e-6)
    assert made.history.epochs[-1]["validation_loss"] < 0.48
    for name, value in weights(made).items():
        np.testing.assert_allclose(weights(other)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "loss", "message"),
    [
        ([{"prompt": "a", "completion": "b", "label": True}], "kto", "is alone: an answer is"),
        (
            [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2,
            "kto",
            "'kto' takes rows like .*completion",
        ),
        (
            [{"prompt": "a", "completion": "b", "label": True}] * 2,
            "dpo",
            "'dpo' takes rows like .*chosen",
        ),
    ],
)
def test_rows_for_another_loss_are_refused(data, loss, message):
    with pytest.raises(jaxonnx.TrainingError, match=message):
        jaxonnx.train(GENAI, data, loss=loss, batch_size=2)


def test_judgements_are_ignored_by_other_losses():
    rows = [{"prompt": "a", "completion": " b", "label": True}] * 2
    result = jaxonnx.train(GENAI, rows, loss="causal_lm", batch_size=2, epochs=1)
    assert "columns that nothing reads: 'label'" in result.history.notes


def orpo_of_trl(chosen, rejected, beta):
    """`ORPOTrainer.odds_ratio_loss` of mean log-likelihoods, and the first term of the paper."""
    odds = (chosen - rejected) - (np.log1p(-np.exp(chosen)) - np.log1p(-np.exp(rejected)))
    return -chosen + beta * sigmoid_loss(odds)


def test_orpo_is_that_of_its_paper():
    model = jaxonnx.load(text())
    total, count = scores(model)
    means = total / count
    wanted = orpo_of_trl(means[::2], means[1::2], 0.2)
    logits = jnp.asarray(model(IDS, np.ones_like(IDS)))
    np.testing.assert_allclose(
        losses.orpo(beta=0.2)(logits, LABELS), np.repeat(wanted, 2), rtol=1e-5
    )
    result = train(
        model, PAIRS, loss="orpo", validation=PAIRS, epochs=8, optimizer=optax.adam(0.05)
    )
    total, count = scores(result.model)
    means = total / count
    last = result.history.epochs[-1]
    assert last["validation_loss"] == pytest.approx(
        orpo_of_trl(means[::2], means[1::2], 0.1).mean(), rel=1e-4
    )
    assert last["validation_accuracy"] == pytest.approx((means[::2] > means[1::2]).mean())
    assert last["validation_margin"] == pytest.approx(0.1 * (means[::2] - means[1::2]).mean())
    gradient = jax.grad(lambda x: losses.orpo()(x, LABELS).sum())(50 * jax.nn.one_hot(IDS, 7))
    assert np.isfinite(gradient).all()


def test_preferences_are_those_of_trl():
    torch = pytest.importorskip("torch")
    trl = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    chosen, rejected = -RNG.random(4), -RNG.random(4)
    pair = torch.tensor(chosen), torch.tensor(rejected)
    holder = SimpleNamespace(beta=0.2, accelerator=SimpleNamespace(device="cpu"))
    theirs, *_ = trl.ORPOTrainer.odds_ratio_loss(holder, *pair)
    np.testing.assert_allclose(
        -chosen - theirs.numpy(), orpo_of_trl(chosen, rejected, 0.2), rtol=1e-5
    )


@pytest.mark.parametrize("top", [None, 4, 3])
def test_a_teacher_is_evaluated_batch_by_batch(top):
    x, y = examples()
    teacher = train(epochs=5).model
    loss = losses.distill(teacher=teacher, soft=0.7, temperature=1.5, top=top)
    settings = {"batch_size": 8, "epochs": 2, "validation": (x, y)}
    taught = train(mlp(hidden=4), (x, y), loss=loss, **settings)
    table = np.asarray(teacher.predict(x)), y
    given = {**settings, "validation": (x, table)}
    plain = losses.distill(soft=0.7, temperature=1.5)
    by_hand = train(mlp(hidden=4), (x, table), loss=plain, **given)
    ends = [r.history.epochs[-1]["validation_loss"] for r in (taught, by_hand)]
    if top == 3:
        assert ends[0] == pytest.approx(ends[1], rel=0.05)
        return
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
    for name, value in weights(by_hand).items():
        np.testing.assert_allclose(weights(taught)[name], value, rtol=1e-4, atol=1e-5)


def test_the_greatest_logits_and_the_rest_bound_the_divergence():
    student, teacher = (jnp.asarray(RNG.normal(size=(5, 3, 40)) * 2, jnp.float32) for _ in "12")
    exact = np.asarray(losses.distill(temperature=1.0)(student, teacher))
    bounds = []
    for top in (1, 5, 20, 39):
        loss = losses.distill(temperature=1.0, teacher=object(), top=top)
        targets = loss.shorten(teacher, -1), np.zeros((5, 3), np.int32)
        found = np.asarray(loss(student, targets))
        log_q = np.asarray(jax.nn.log_softmax(student), np.float64)
        log_p = np.asarray(jax.nn.log_softmax(teacher), np.float64)
        order = np.argsort(-log_p)[..., :top]
        p, q = (np.take_along_axis(np.exp(a), order, -1) for a in (log_p, log_q))
        rest = 1 - p.sum(-1), 1 - q.sum(-1)
        wanted = (p * np.log(p / q)).sum(-1) + rest[0] * np.log(rest[0] / rest[1])
        np.testing.assert_allclose(found, wanted.mean(1), rtol=1e-3)
        bounds.append(found)
    assert (np.diff([*bounds, exact], axis=0) > -1e-5).all()


def test_a_teacher_of_tokens():
    model, teacher = jaxonnx.load(text()), jaxonnx.load(text(outputs="float[n, t, 7] logits"))
    teacher = teacher.replace(params={n: 2 * x for n, x in teacher.params.items()})
    loss = losses.distill(teacher=teacher, temperature=1.0, next_token=True)
    result = train(model, PAIRS, loss=loss, batch_size=16)
    logs = [jax.nn.log_softmax(net(IDS, np.ones_like(IDS))) for net in (teacher, model)]
    each = (jnp.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)[:, :-1]
    counts = LABELS[:, 1:] >= 0
    wanted = (each * counts).sum() / counts.sum()
    assert result.history.losses[0] == pytest.approx(float(wanted), rel=1e-4)


def test_what_does_not_fit():
    with pytest.raises(jaxonnx.TrainingError, match="beta must be above 0"):
        losses.orpo(beta=-1)
    with pytest.raises(jaxonnx.TrainingError, match="top must be left out without teacher="):
        losses.distill(top=3)
    other = jaxonnx.load(mlp()).with_head(3)
    with pytest.raises(jaxonnx.TrainingError, match="the teacher has 3 classes, the student 4"):
        train(loss=losses.distill(teacher=other))
    with pytest.raises(jaxonnx.TrainingError, match="the teacher has 3 classes, the student 4"):
        train(loss=losses.distill(teacher=other, top=2))
    with pytest.raises(jaxonnx.TrainingError, match="they need inputs of the same names"):
        train(text(), PAIRS, loss=losses.distill(teacher=mlp(), next_token=True))


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_an_evaluation_compares_with_a_model(loss):
    """By the values of a table of references."""
    before = jaxonnx.load(text())
    after = before.replace(params={name: 1.3 * x for name, x in before.params.items()})
    judged = {"label": np.repeat([1, 0], 8)} if loss == "kto" else {}
    make, data = getattr(losses, loss), {"input_ids": IDS, "labels": LABELS, **judged}
    table = {**data, "reference": scores(before)[0].astype(np.float32)}
    expected = jaxonnx.evaluate(after, table, loss=make(), batch_size=16)
    assert expected["loss"] != pytest.approx(np.log(2) if loss == "dpo" else 0.5, rel=1e-3)
    found = jaxonnx.evaluate(after, data, loss=make(reference=before), batch_size=16)
    assert found == {name: pytest.approx(x, rel=1e-4) for name, x in expected.items()}
    with pytest.raises(jaxonnx.TrainingError, match=f"{loss} takes .*; where nothing is trained"):
        jaxonnx.evaluate(after, data, loss=make())


@pytest.mark.deep
def test_teachers_are_asked_in_evaluations_and_bounds():
    """`evaluate`, and the metric of `quantize`."""
    model = jaxonnx.load(GENAI)
    teacher = model.replace(params={name: 1.5 * x for name, x in model.params.items()})
    loss = losses.distill(teacher=teacher, next_token=True)
    rows = [{"text": "a list"}, {"text": "a tuple is"}] * 2
    run = jaxonnx.train(
        model, rows, loss=loss, optimizer=optax.sgd(0.0), validation=rows, batch_size=4
    )
    expected = run.history.epochs[-1]["validation_loss"]
    assert jaxonnx.evaluate(model, rows, loss=loss)["loss"] == pytest.approx(expected, rel=1e-4)
    bounded = jaxonnx.quantize(model, rows, "int8", max_loss=1.0, metric=loss, validation=rows)
    assert bounded.sensitivity.trials[-1].loss < 1


@pytest.mark.parametrize(
    ("top", "options"),
    [
        (None, {"batch_size": 4}),
        pytest.param(8, {"batch_size": 1, "accumulate": 4}, marks=pytest.mark.deep),
    ],
)
def test_teachers_of_packed_texts(top, options):
    """The step is that of separate rows, whose tokens count alike."""
    model = jaxonnx.load(GENAI)
    teacher = model.replace(params={name: 1.5 * x for name, x in model.params.items()})
    loss = losses.distill(teacher=teacher, next_token=True, soft=0.5, top=top)
    texts = ("a list", "a tuple is immutable", "of", "the dict has keys", "x")
    rows = [{"prompt": "one ", "completion": text} for text in texts]
    settings = {"loss": loss, "optimizer": optax.sgd(1.0), "seed": 0}
    alone = jaxonnx.train(model, rows, batch_size=5, **settings)
    pack = {"pack": True, "max_length": 40}
    packed = jaxonnx.train(model, rows, preprocess=pack, **options, **settings)
    for name, x in model.params.items():
        expected, found = (x - run.model.params[name] for run in (alone, packed))
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def with_ending(proto, node):
    """The network with one more node behind its only output."""
    proto.graph.node.append(node)
    proto.graph.output[0].name = node.output[0]
    return proto


def pictures(seed):
    kernel = np.random.default_rng(seed).normal(size=(4, 3, 1, 1))
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    pictures (float[n, 3, 2, 5] x) => (float[n, 4, 2, 5] y)
    <float[4, 3, 1, 1] w = {{{", ".join(map(str, kernel.ravel()))}}}> {{ y = Conv(x, w) }}""")


@pytest.mark.parametrize("axis", [-1, 1])
def test_endings_of_teacher_and_student_are_left_out(axis):
    """The divergence is that of the logits before, not of a softmax of probabilities."""
    x, y = examples(10)
    networks = [mlp(), mlp(hidden=24)]
    if axis == 1:  # pictures
        x, y = RNG.normal(size=(10, 3, 2, 5)).astype(np.float32), RNG.integers(0, 4, (10, 2, 5))
        networks = [pictures(0), pictures(1)]
    plain = [jaxonnx.load(net) for net in networks]
    a, b = (jnp.moveaxis(net(x), axis, -1) / 3 for net in plain)
    expected = float(
        9 * optax.losses.kl_divergence(jax.nn.log_softmax(a), jax.nn.softmax(b)).mean()
    )
    end = helper.make_node("Softmax", ["y"], ["p"], axis=axis)
    ended = [jaxonnx.load(with_ending(net, end)) for net in networks]
    for student, teacher in ((plain[0], ended[1]), (ended[0], plain[1]), ended):
        loss = losses.distill(teacher=teacher, temperature=3.0)
        value = jaxonnx.evaluate(student, (x, y), loss=loss, batch_size=4)["loss"]
        assert value == pytest.approx(expected, rel=1e-5)


def test_a_teacher_of_one_of_several_outputs():
    """As DeiT trains: one layer learns the labels, and one the teacher."""
    proto, teacher = mlp(), jaxonnx.load(mlp(hidden=24))
    proto.graph.initializer.append(
        numpy_helper.from_array(RNG.normal(size=(16, 4)).astype(np.float32), "w3")
    )
    proto.graph.node.append(helper.make_node("MatMul", ["d", "w3"], ["distilled"]))
    proto.graph.output.append(helper.make_tensor_value_info("distilled", 1, ["batch", 4]))
    model, (x, y) = jaxonnx.load(proto), examples(10)
    weight = RNG.uniform(0.5, 2, 10).astype(np.float32)
    data = x, {"y": y, "distilled": y}, weight
    loss = {
        "y": "softmax_cross_entropy_with_integer_labels",
        "distilled": (losses.distill(teacher=teacher), 0.5),
    }

    def objective(params):
        logits, distilled = model.apply(params, x)
        learned = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        student, soft = jax.nn.log_softmax(distilled / 2), jax.nn.softmax(teacher(x) / 2)
        each = learned + 0.5 * 4 * optax.losses.kl_divergence(student, soft)
        return (each * weight).sum() / weight.sum()

    expected, gradient = jax.value_and_grad(objective)(model.params)
    run = train(model, data, loss=loss, optimizer=optax.sgd(0.1), batch_size=10, validation=data)
    assert run.history.losses == [pytest.approx(float(expected), rel=1e-5)]
    for name, value in weights(run).items():
        np.testing.assert_allclose(value, model.params[name] - 0.1 * gradient[name], atol=1e-6)
    value = jaxonnx.evaluate(model, data, loss=loss, batch_size=4)["loss"]
    assert value == pytest.approx(float(expected), rel=1e-5)
