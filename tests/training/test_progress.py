"""The progress bar and what print(result) says."""

import re
from types import SimpleNamespace

import numpy as np
import optax
import pytest
from rich import console

import jaxonnx
from jaxonnx.training import History, Result, Settings
from jaxonnx.training._loop import reporter
from jaxonnx.training._loop.reporter import Bar
from jaxonnx.training._result import changes
from tests.support.tiny_networks import LABELS, examples, mlp, train


def test_the_bar_has_rate_and_remaining_time(capsys):
    with Bar(True, Settings(epochs=4), 10, 20) as bar:
        history = History(
            losses=[1.0] * 20, epochs=[{"epoch": 1, "step": 10}, {"epoch": 2, "step": 20}]
        )
        bar.show(history)
        bar._began -= 2.0
        history.losses += [0.5] * 4
        bar.show(history)
    text = capsys.readouterr().out
    assert "epoch 3/4" in text
    assert "24/40" in text
    assert "loss 0.5, 2 steps/s, 0:08 left" in text  # 4 steps in 2 s, 16 to come


def test_nothing_is_written_where_nobody_looks(capsys):
    train(epochs=2, validation=examples(8))
    assert capsys.readouterr() == ("", "")


def test_the_length_of_an_epoch_is_learned(capsys):
    x, y = examples()
    train(data=lambda epoch: iter([(x[:8], y[:8])] * 3), epochs=2, progress=True)
    assert "6/6" in capsys.readouterr().out


def test_a_notebook_has_one_output_that_is_replaced(monkeypatch, capsys):
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
    assert "2 of 2 trained tensors changed (132 parameters)" in text
    assert re.search(r"w1 \[8, 16\]: \d+\.\d+%", text)
    still = train(optimizer=optax.sgd(0.0))
    assert "0 of 4 trained tensors changed (0 parameters)" in str(still)
    assert "not changed: w1, b1, w2, b2" in str(still)


def test_one_epoch_says_its_first_and_last_loss():
    result = train()
    first, *_, last = result.history.losses
    assert "1 epoch, 5 steps, " in str(result)
    assert f": loss {first:.4g} -> {last:.4g} (first and last step)\n" in str(result)
    single = train(data=examples(8))
    assert re.search(r"1 epoch, 1 step, .* s: loss \S+$", str(single.history))


def test_many_tensors_are_listed_from_both_ends():
    names = [f"t{i:03}" for i in range(100)]
    model = SimpleNamespace(params={name: np.zeros(2) for name in names}, state={}, aliases={})
    shares = {name: 10.0**-i for i, name in enumerate(names[:9])} | dict.fromkeys(names[9:], 1e-9)
    history = History(stopped="why")
    lines = str(Result(model, history, shares)).splitlines()  # type: ignore[arg-type]
    assert lines[1] == "100 of 100 trained tensors changed (200 parameters)"
    assert lines[2] == "  t000 [2]: 100.00%"
    assert lines[8] == "  ... 92 more; median change 1e-07%"
    assert lines[-1] == "  t099 [2]: 1e-07%"
    assert len(lines) == 1 + 1 + 6 + 1 + 2
    zeros = dict.fromkeys(names[:60], np.inf) | dict.fromkeys(names[60:], 0.1)
    lines = str(Result(model, history, zeros)).splitlines()  # type: ignore[arg-type]
    assert lines[8] == "  ... 92 more; median change from zero"
    still = Result(model, history, dict.fromkeys(names, 0.0))  # type: ignore[arg-type]
    last = str(still).splitlines()[-1]
    assert last == f"not changed: {', '.join(names[:6])} and 94 more (.changes has all)"


def test_adapters_are_counted_rather_than_what_they_change():
    result = train(lora=jaxonnx.LoRA(2, where=["w1", "w2"]))
    sizes = 2 * (8 + 16) + 2 * (16 + 4)
    line = f"{sizes} parameters trained, in adapters of 2 weights; merged, they change 2 tensors"
    assert f"{line} (192 parameters)" in str(result)


def test_a_line_now_and_then_where_there_is_no_terminal(monkeypatch, capsys):
    train(epochs=2)
    assert not capsys.readouterr().out
    monkeypatch.setattr(reporter, "_SECONDS_OF_LINES", 0.0)
    train(epochs=2, progress=False)
    assert not capsys.readouterr().out
    train(epochs=2)
    *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"epoch 2/2, loss \S+, \S+ \S+", last)


def test_changes_are_relative():
    before = {"a": np.array([3.0, 4.0]), "b": np.zeros(2), "c": np.ones(1)}
    after = {"a": np.array([3.0, 5.0]), "b": np.ones(2), "c": np.ones(1)}
    assert changes(before, after) == {"a": 0.2, "b": np.inf, "c": 0.0}


def test_a_result_without_changes_prints_its_history():
    assert str(Result(None, History(stopped="why"))) == "why"  # type: ignore[arg-type]


def test_printing_a_model_counts_in_words():
    shown = str(jaxonnx.load(mlp()).with_sparsity("2:4", select="w1"))
    assert "sparse     1 tensor, 2:4" in shown
    assert re.search(r"frozen +none *\n", shown)
    assert re.search(r"graph +mlp, ai.onnx 17 *\n", shown)  # no exporter is named


def test_an_optimizer_by_name_is_told_where_names_are_taken():
    with pytest.raises(jaxonnx.Error, match=r"jaxonnx\.training\.optimizer\('adamw', 1e-3\)"):
        jaxonnx.train(mlp(), examples(), loss=LABELS, optimizer="AdamW")
