"""on_log, and the files that go with it."""

import csv
import importlib
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import jaxonnx
from jaxonnx import loggers
from tests.support.tiny_networks import LABELS, examples, mlp, train


def test_hooks_see_every_step_and_epoch_late_and_in_order():
    calls, others = [], []
    started = []

    def data(epoch):
        x, y = examples()
        for i in range(0, 40, 2):
            started.append(i)
            yield x[i : i + 2], y[i : i + 2]

    def hook(step, metrics):
        calls.append((step, metrics, len(started)))

    result = train(data=data, epochs=2, on_log=[hook, lambda *call: others.append(call)])
    history = result.history
    steps = [(n, m) for n, m, _ in calls if "epoch" not in m]
    assert steps == [(i + 1, {"loss": value}) for i, value in enumerate(history.losses)]
    assert [m for _, m, _ in calls if "epoch" in m] == history.epochs
    assert [n for n, m, _ in calls if "epoch" in m] == [20, 40]
    assert others == [(step, metrics) for step, metrics, _ in calls]
    # the first loss is read when eight more steps were started: nothing waits for a step
    assert calls[0][2] == 9


def test_the_table_of_epochs_is_continued(tmp_path):
    path = tmp_path / "logs" / "log.csv"
    settings = {"validation": examples(8, 2), "checkpoint_dir": tmp_path / "run"}
    train(epochs=2, on_log=loggers.csv(path), **settings)
    whole = train(epochs=4, on_log=loggers.csv(path), resume=True, **settings)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [5, 10, 15, 20]
    for row, kept in zip(rows, whole.history.epochs, strict=True):
        assert float(row["validation_loss"]) == kept["validation_loss"]
    log = loggers.csv(path)
    train(epochs=1, on_log=log)
    train(epochs=1, on_log=log)
    assert path.read_text().splitlines()[0] == "step,epoch,loss,seconds"
    assert len(path.read_text().splitlines()) == 2


def test_lines_drop_what_is_done_again(tmp_path):
    path = tmp_path / "log.jsonl"
    train(epochs=2, on_log=loggers.jsonl(path), checkpoint_dir=tmp_path / "run")
    with path.open("a") as file:  # a run that was killed after its last checkpoint
        file.write('{"step": 11, "loss": 1.0}\n{"step": 12, "lo')
    whole = train(
        epochs=3, on_log=loggers.jsonl(path), checkpoint_dir=tmp_path / "run", resume=True
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["loss"] for row in rows if "epoch" not in row] == whole.history.losses
    assert [row["step"] for row in rows if "epoch" in row] == [5, 10, 15]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    log = loggers.jsonl(tmp_path / "log.jsonl")
    log(1, {"loss": float("nan")})
    log.close()
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 1, "loss": None}


def test_other_files_are_not_overwritten(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("x,y\n1,2\n")
    for make in (loggers.csv, loggers.jsonl):
        with pytest.raises(jaxonnx.Error, match="not the log of a run"):
            make(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        loggers.csv(tmp_path / "folder")
    assert path.read_text() == "x,y\n1,2\n"


def read_events(file):
    """The events of a file of TensorBoard."""
    from tensorboardX.proto.event_pb2 import Event

    data, events = file.read_bytes(), []
    while data:  # length, CRC, event, CRC
        size = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return events


def logged_losses(folder):
    """By step: what later files have of a step replaces what earlier ones have."""
    events = [e for file in sorted(folder.iterdir()) for e in read_events(file)]
    losses = {}
    for event in events:
        if event.HasField("session_log"):
            losses = {step: x for step, x in losses.items() if step < event.step}
        for value in event.summary.value:
            if value.tag == "step/loss":
                losses[event.step] = value.simple_value
    return losses


KILLED = """
import os, signal, sys
from pathlib import Path
from jaxonnx import loggers
from tests.support.tiny_networks import train

folder = Path(sys.argv[1])


def kill(step, metrics):
    if any((folder / "run" / name).exists() for name in ("8", "9", "10")):
        os.kill(os.getpid(), signal.SIGKILL)


names = {"csv": "log.csv", "jsonl": "log.jsonl", "tensorboard": "events"}
logs = [getattr(loggers, kind)(folder / name) for kind, name in names.items()]
train(epochs=100, checkpoint_dir=folder / "run", checkpoint_every=4, on_log=[*logs, kill])
"""


def test_logs_of_a_killed_run_have_what_is_before_its_last_checkpoint(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert done.returncode == -signal.SIGKILL
    last = max(int(p.name) for p in (tmp_path / "run").iterdir() if p.name.isdigit())
    assert last % 5  # within an epoch

    assert {*range(1, last + 1)} <= logged_losses(tmp_path / "events").keys()
    lines = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {*range(1, last + 1)} <= {row["step"] for row in lines}
    with (tmp_path / "log.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)][: last // 5] == [
            *range(5, last + 1, 5)
        ]
    resumed = train(
        epochs=last // 5 + 2,
        checkpoint_dir=tmp_path / "run",
        checkpoint_every=4,
        resume=True,
        on_log=loggers.tensorboard(tmp_path / "events"),
    )
    values = logged_losses(tmp_path / "events")
    assert [*values] == [*range(1, len(resumed.history.losses) + 1)]
    np.testing.assert_allclose([*values.values()], resumed.history.losses, rtol=1e-6)


def test_events_stay_in_order_when_the_clock_steps_back(tmp_path, monkeypatch):
    writer = importlib.import_module("tensorboardX.event_file_writer")
    for epochs, now in (1, 2e9), (2, 1e9), (3, 1e9):
        monkeypatch.setattr(writer, "time", SimpleNamespace(time=lambda now=now: now))
        result = train(
            epochs=epochs,
            checkpoint_dir=tmp_path / "run",
            resume=epochs > 1,
            on_log=loggers.tensorboard(tmp_path / "events"),
        )
    values = logged_losses(tmp_path / "events")
    np.testing.assert_allclose([*values.values()], result.history.losses, rtol=1e-6)


def test_hooks_are_flushed_before_a_checkpoint(tmp_path):
    seen = []

    class Log:
        def __call__(self, step, metrics):
            seen.append(step)

        def flush(self):
            kept = [int(p.name) for p in (tmp_path / "run").iterdir() if p.name.isdigit()]
            seen.append(("flushed", seen[-1] not in kept))

    train(checkpoint_dir=tmp_path / "run", checkpoint_every=2, on_log=Log())
    assert seen == [1, 2, ("flushed", True), 3, 4, ("flushed", True), 5, 5, ("flushed", True)]


def test_tensorboard(tmp_path):
    result = train(epochs=2, on_log=loggers.tensorboard(tmp_path))
    (file,) = tmp_path.glob("events*")
    events = read_events(file)
    found = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    losses = [(step, value) for step, tag, value in found if tag == "step/loss"]
    assert [step for step, _ in losses] == list(range(1, 11))
    np.testing.assert_allclose([value for _, value in losses], result.history.losses, rtol=1e-6)
    assert {tag for _, tag, _ in found} == {"step/loss", "epoch/loss", "epoch/seconds"}


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(jaxonnx.Error, match="pip install 'jaxonnx\\[tensorboard\\]'"):
        loggers.tensorboard(tmp_path)


class Wandb:
    """A stand-in for the package wandb, which records its calls."""

    def __init__(self):
        self.runs = {}

    def init(self, *, project, id=None, resume=None, **settings):
        assert resume == (None if id is None else "allow")
        name = id or f"run{len(self.runs)}"
        rows = self.runs.setdefault(name, {"project": project, "rows": [], **settings})["rows"]
        axes = []
        return SimpleNamespace(
            id=name,
            define_metric=lambda name, step_metric=None: axes.append((name, step_metric)),
            log=rows.append,
            finish=lambda: rows.append(axes),
        )


def test_wandb_continues_the_run_of_the_checkpoints(tmp_path, monkeypatch):
    service = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", service)
    run = tmp_path / "run"
    log = loggers.wandb("digits", folder=run, name="first")
    first = train(epochs=2, on_log=log, checkpoint_dir=run)
    again = train(epochs=3, on_log=log, checkpoint_dir=run, resume=True)
    ((name, kept),) = service.runs.items()
    assert (kept["project"], kept["name"]) == ("digits", "first")
    assert (run / "wandb_run.txt").read_text() == name
    axes = [("step", None), ("*", "step")]
    assert [row for row in kept["rows"] if isinstance(row, list)] == [axes, axes]
    rows = [row for row in kept["rows"] if "step/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 16))
    assert [row["step/loss"] for row in rows] == again.history.losses
    assert again.history.losses[:10] == first.history.losses
    assert [row["step"] for row in kept["rows"] if "epoch/loss" in row] == [5, 10, 15]
    train(epochs=1, on_log=log)
    assert len(service.runs) == 2  # one that begins with the first step is a new one


class MLflow:
    """A stand-in for the package mlflow with the signatures of 3.17, which records its calls."""

    def __init__(self):
        self.experiments, self.runs = {}, {}
        self.entities = SimpleNamespace(Metric=lambda *values: values)

    def MlflowClient(self):
        return self

    def get_experiment_by_name(self, name):
        number = self.experiments.get(name)
        return number and SimpleNamespace(experiment_id=number)

    def create_experiment(self, name):
        return self.experiments.setdefault(name, f"e{len(self.experiments)}")

    def create_run(self, experiment_id):
        name = f"{experiment_id}/{len(self.runs)}"
        self.runs[name] = {"status": ["RUNNING"], "metrics": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def update_run(self, run_id, status=None):
        self.runs[run_id]["status"].append(status)

    def log_batch(self, run_id, metrics):
        assert 0 < len(metrics) <= 1000
        self.runs[run_id]["metrics"] += metrics

    def set_terminated(self, run_id):
        self.runs[run_id]["status"].append("FINISHED")


def test_mlflow_continues_the_run_of_the_checkpoints(tmp_path, monkeypatch):
    service = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", service)
    run = tmp_path / "run"
    train(epochs=2, on_log=loggers.mlflow("digits", folder=run), checkpoint_dir=run)
    log = loggers.mlflow("digits", folder=run)
    whole = train(epochs=3, on_log=log, checkpoint_dir=run, resume=True)
    ((name, kept),) = service.runs.items()
    assert name == "e0/0"
    assert kept["status"] == ["RUNNING", "FINISHED", "RUNNING", "FINISHED"]
    losses = [(step, value) for key, value, _, step in kept["metrics"] if key == "step/loss"]
    assert losses == list(enumerate(whole.history.losses, 1))
    assert [step for key, _, _, step in kept["metrics"] if key == "epoch/loss"] == [5, 10, 15]
    before = len(kept["metrics"])
    log(16, {"loss": 1.0})
    assert len(kept["metrics"]) == before
    log.flush()  # as before a checkpoint
    assert kept["metrics"][-1][:2] == ("step/loss", 1.0)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_a_service_the_error_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(jaxonnx.Error, match=f"pip install {name}"):
        getattr(loggers, name)("digits")


@pytest.mark.deep
def test_the_algorithm_of_a_file_logs_as_well():
    model = jaxonnx.add_training(mlp(), loss=LABELS, optimizer=jaxonnx.optim.adam(0.01))
    calls = []
    result = jaxonnx.train(
        model, iter([examples(8), examples(8, 2)]), on_log=lambda *call: calls.append(call)
    )
    losses = [(step, m["loss"]) for step, m in calls if "epoch" not in m]
    assert losses == list(zip([1, 2], result.history.losses, strict=True))
    assert calls[-1] == (2, result.history.epochs[0])
