"""What a run optimizes is recorded in its checkpoints, which no other objective continues."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxonnx
from tests.support.sweeps import sweep
from tests.support.tiny_networks import examples, text, train


def huber(delta):
    return lambda outputs, targets: optax.huber_loss(outputs, targets, delta=delta).mean()


def to_targets(outputs, targets, power=2.0):
    return jnp.abs(outputs - targets).mean() ** power


NUMBERS = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
OTHER_OBJECTIVES = {
    "loss by name": ({"loss": "squared_error"}, {"loss": "absolute_error"}, "loss=squared_error"),
    "default loss": ({"loss": "squared_error"}, {"loss": optax.squared_error}, None),
    "setting of a loss": (
        {"loss": jaxonnx.losses.cross_entropy(ignore_index=-1)},
        {"loss": jaxonnx.losses.cross_entropy(ignore_index=2)},
        r"cross_entropy\(.*ignore_index=-1.*and loss=.*ignore_index=2",
    ),
    "reduction": (
        {"loss": jaxonnx.losses.cross_entropy()},
        {"loss": jaxonnx.losses.cross_entropy(reduction="sum")},
        "reduction=sum",
    ),
    "number around a function": (
        {"loss": huber(1.0)}, {"loss": huber(0.5)}, "delta=1.0.*and loss=.*delta=0.5"),
    "argument": (
        {"loss": functools.partial(to_targets, power=2.0)},
        {"loss": functools.partial(to_targets, power=1.0)},
        r"to_targets\(power=2\.0.*and loss=.*power=1",
    ),
    "same function": ({"loss": huber(1.0)}, {"loss": huber(1.0)}, None),
    "code": (
        {"loss": lambda x, y: jnp.abs(x - y).mean()},
        {"loss": lambda x, y: jnp.square(x - y).mean()},
        "lambda.*code=.*and loss=",
    ),
    "share of an output": ({"loss": {"y": ("squared_error", 1.0)}},
        {"loss": {"y": ("squared_error", 2.0)}}, r"squared_error', 1\.0.*'squared_error', 2\.0"),
    "optimizer": ({"optimizer": "adam"}, {"optimizer": "adamw"}, "optimizer=adam, and"),
    "default optimizer": ({"optimizer": None}, {"optimizer": "adam"}, None),
    "rate": ({"optimizer": "adam"}, {"optimizer": "adam", "learning_rate": 0.1},
        r"learning_rate=0\.001, and learning_rate=0\.1 would"),
    "clip": ({"optimizer": "adam", "clip": 1.0}, {"optimizer": "adam", "clip": 2.0}, "clip=1"),
    "decay": ({"optimizer": "adamw"}, {"optimizer": "adamw", "weight_decay": 0.1}, "decay=None"),
    "hyperparameters": (
        {"optimizer": optax.inject_hyperparams(optax.adam)(learning_rate=0.1)},
        {"optimizer": optax.inject_hyperparams(optax.adam)(learning_rate=0.2)},
        r"optimizer=optax\(b1=.*rate=0\.1\), and optimizer=.*rate=0\.2",
    ),
    "pattern": ({"sparsity": {"pattern": "2:4", "method": "one_shot"}},
        {"sparsity": {"pattern": "1:4", "method": "one_shot"}}, "2:4.*and sparsity=.*1:4"),
    "decay of sparse": ({"sparsity": {"method": "sr_ste"}},
        {"sparsity": {"method": "sr_ste", "decay": 0.1}}, "decay"),
    "augmentation": ({"augment": lambda key, x: x + 0.5}, {"augment": lambda key, x: x + 2.5},
        "augment="),
}  # fmt: skip
RUN_ALWAYS = (
    *("default loss", "number around a function", "argument", "code", "share of an output"),
    *("rate", "hyperparameters", "pattern"),
)


@pytest.mark.parametrize("case", sweep(OTHER_OBJECTIVES, *RUN_ALWAYS))
def test_a_run_with_another_objective_does_not_resume(case, tmp_path):
    """The arrays of the checkpoint are those of both."""
    before, after, message = OTHER_OBJECTIVES[case]
    is_real = "loss" in before and "cross_entropy" not in repr(before["loss"])
    settings = {"data": (examples(16)[0], NUMBERS)} if is_real else {}
    settings |= {"checkpoint_dir": tmp_path, "epochs": 1}
    train(**settings | before)
    again = settings | {"epochs": 2, "resume": True}
    if message is None:
        assert len(train(**again | after).history.epochs) == 2
        return
    with pytest.raises(jaxonnx.TrainingError, match=f"(?s){message}.*another checkpoint_dir"):
        train(**again | after)
    assert len(train(**again | before).history.epochs) == 2


def test_preferences_resume_with_the_reference_that_they_began_with(tmp_path):
    model, ids = jaxonnx.load(text()), np.random.default_rng(0).integers(0, 7, (8, 6))
    settings = {"loss": "dpo", "batch_size": 4, "checkpoint_dir": tmp_path}
    data = {"input_ids": ids, "labels": ids}
    train(model, data, epochs=1, **settings)
    trained = jaxonnx.load(tmp_path)
    with pytest.raises(jaxonnx.TrainingError, match="reference=the initial weights"):
        train(trained, data, epochs=2, resume=True, **settings)
    assert len(train(model, data, epochs=2, resume=True, **settings).history.epochs) == 2
