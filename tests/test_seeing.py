"""The progress bar and what print(result) says."""

import re

import numpy as np
import optax
import pytest
from rich import console

from jaxonnx.train import History, Result
from jaxonnx.train._progress import Bar
from jaxonnx.train._result import changes
from tests.tiny import examples, train


def test_the_bar_has_rate_and_remaining_time(capsys):
    with Bar(True, 4, 10, 20) as bar:
        history = History(losses=[1.0] * 20, epochs=[{"step": 10}, {"step": 20}])
        bar.show(history)
        bar._began -= 2.0
        history.losses += [0.5] * 4
        bar.show(history)
    text = capsys.readouterr().out
    assert "epoch 3/4" in text
    assert "24/40" in text
    assert "loss 0.5, 2 steps/s, 0:08 left" in text  # 4 steps in 2 s, 16 to come


def test_nothing_is_written_where_nobody_looks(capfd):
    train(epochs=2, validation=examples(8))
    assert capfd.readouterr() == ("", "")


def test_the_length_of_an_epoch_is_learned(capsys):
    x, y = examples()
    train(data=lambda epoch: iter([(x[:8], y[:8])] * 3), epochs=2, progress=True)
    assert "6/6" in capsys.readouterr().out


def test_a_notebook_has_one_output_that_is_replaced(monkeypatch, capsys):
    pytest.importorskip("IPython")
    shown, updates = [], []

    class Handle:
        def update(self, html):
            updates.append(html.data)

    def display(html, display_id):
        shown.append(html.data)
        return Handle()

    monkeypatch.setattr(console, "_is_jupyter", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    train(epochs=3, validation=examples(8))
    assert len(shown) == 1
    found = re.fullmatch(r'<progress value="15" max="15"></progress> (.*)', updates[-1])
    assert found
    assert re.fullmatch(r"epoch 3/3, loss \S+, accuracy \S+%, \S+ steps/s", found[1])
    assert not capsys.readouterr().out


def test_printing_a_result_says_what_changed():
    result = train(epochs=2, validation=examples(16, 2), trainable=["w1", "b2"])
    first, last = result.history.epochs
    text = str(result)
    assert "2 epochs, 10 steps" in text
    assert f"loss {first['loss']:.4g} -> {last['loss']:.4g}" in text
    assert f"validation_loss {first['validation_loss']:.4g} -> " in text
    assert "2 of 2 trained tensors changed (132 numbers)" in text
    assert re.search(r"w1 \[8, 16\]: \d+\.\d+%", text)
    still = train(optimizer=optax.sgd(0.0))
    assert "0 of 4 trained tensors changed (0 numbers)" in str(still)
    assert "not changed: w1, b1, w2, b2" in str(still)


def test_changes_are_relative():
    before = {"a": np.array([3.0, 4.0]), "b": np.zeros(2), "c": np.ones(1)}
    after = {"a": np.array([3.0, 5.0]), "b": np.ones(2), "c": np.ones(1)}
    assert changes(before, after) == {"a": 0.2, "b": np.inf, "c": 0.0}


def test_a_result_without_changes_prints_its_history():
    assert str(Result(None, History(stopped="why"))) == "why"  # type: ignore[arg-type]
