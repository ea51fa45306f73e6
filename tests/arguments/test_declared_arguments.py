"""What the declarations of arguments say of values is checked by `train`, `step` and `evaluate`."""

import inspect

import numpy as np
import pytest

import jaxonnx
from jaxonnx.training import StepArguments, TrainArguments, step
from tests.support.tiny_networks import LABELS, examples, mlp

NOT_NUMBERS = (object(), "text", b"bytes", [], True, float("nan"), np.zeros(()), 1j)
WRONG = [
    *(("accumulate", x) for x in (*NOT_NUMBERS, 0, -1, 1.5)),
    *(("batch_size", x) for x in (*NOT_NUMBERS, 0, 0.5)),
    *(("clip", x) for x in (*NOT_NUMBERS, 0, -1.0)),
    *(("ema", x) for x in (*NOT_NUMBERS, 0.0, 1.0, 2)),
    *(("label_smoothing", x) for x in (*NOT_NUMBERS, -0.1, 1.0, float("inf"))),
    *(("learning_rate", x) for x in (*NOT_NUMBERS, 0, float("inf"))),
    *(("min_improvement", x) for x in (*NOT_NUMBERS, -1, float("inf"))),
    *(("neftune", x) for x in (*NOT_NUMBERS, -1, float("inf"))),
    *(("seed", x) for x in (*NOT_NUMBERS, -1, 2**63)),
    *(("warmup", x) for x in (*NOT_NUMBERS, -0.1, float("inf"))),
    *(("schedule", x) for x in (3, "steep", ["cosine"])),
    *(("statistics", x) for x in (3, "moving", {})),
    *(("check", x) for x in (3, "yes", None)),
    *(("on_log", x) for x in (3, "log.csv", {}, {"a": print}, [print, 3])),
    *(("columns", x) for x in (3, {1: "x"}, {"x": 1})),
    *(("batching", x) for x in (3, {"x": 1}, ["x"])),
    *(("monitor", x) for x in (3, ("loss", 1), ("loss",))),
    *(("checkpoint_dir", x) for x in (3, b"folder", "a\0b")),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda x: repr(x)[:20])
def test_values_out_of_range_or_of_another_type_are_refused(name, value):
    calls = [lambda **x: jaxonnx.train(mlp(), examples(), loss=LABELS, **x)]
    if name in StepArguments.__annotations__:
        calls.append(lambda **x: step(mlp(), LABELS, **x))
    if name in jaxonnx.training.DataArguments.__annotations__:
        calls.append(lambda **x: jaxonnx.evaluate(mlp(), examples(), loss=LABELS, **x))
    for call in calls:
        with pytest.raises(jaxonnx.TrainingError, match=f"^{name} (must be|has a null byte)"):
            call(**{name: value})


RELATED = {
    "batching": ({"batching": {"x": None}, "mesh": "all"}, "leave one of the two out"),
    "checkpoint_every": ({"checkpoint_every": 2, "nan": "skip"}, "or nan='rollback'"),
    "lora": ({"lora": jaxonnx.LoRA(), "sparsity": "2:4"}, "merge the adapters"),
    "monitor": ({"monitor": "loss"}, "neither is given"),
    "resume": ({"resume": "anyway"}, "the checkpoint_dir of the run to continue"),
    "sharding": ({"sharding": "fsdp"}, "pass mesh='all'"),
    "warmup": ({"warmup": 3, "optimizer": jaxonnx.optim.adam(0.1)}, "has its own"),
}


@pytest.mark.parametrize("name", RELATED)
def test_arguments_that_need_or_exclude_others_are_refused(name):
    arguments, message = RELATED[name]
    with pytest.raises(jaxonnx.TrainingError, match=f"^{name} .*{message}"):
        jaxonnx.train(mlp(), examples(), loss=LABELS, **arguments)


def test_an_argument_at_its_default_needs_no_other():
    defaults = {"keep_best": 1, "min_improvement": 0, "resume": False, "validate_first": False}
    data = {"batching": {}, "monitor": None, "clip": None}
    assert {*defaults, *data} <= {*TrainArguments.__annotations__}
    result = jaxonnx.train(
        mlp(), examples(), loss=LABELS, progress=False, mesh="all", **defaults, **data
    )
    assert len(result.history.losses) > 0


def test_signatures_have_the_arguments_that_type_checkers_see():
    declared = {*inspect.signature(jaxonnx.train).parameters} - {"model", "data"}
    assert declared == {*TrainArguments.__annotations__}
    assert {*StepArguments.__annotations__} <= {*inspect.signature(step).parameters}
