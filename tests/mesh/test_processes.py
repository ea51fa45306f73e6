"""Several processes make one run, over gloo on this machine's CPU."""

import json
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support import run_processes

pytestmark = pytest.mark.deep

ENDLESS = """
def endless(event):
    x, y = tiny.examples(16)
    def batches(epoch):
        for number in range(10**9):
            if index == 1 and event(number):
                return
            print(number, flush=True)
            yield x[:8], y[:8]
    result = tiny.train(None, batches, mesh=mesh, sharding=RULES, epochs=1)
    print("stopped:", result.history.stopped, flush=True)


def lost(number):
    raise RuntimeError("the disk is gone")
"""

TRAIN = """
import json
from pathlib import Path
folder = Path(sys.argv[4])


def data_of(how):
    if how == "stream":
        x, y = tiny.examples()
        share = 8 // count
        starts = [i + index * share for i in range(0, 40, 8)]
        if index:
            tiny.train()  # alone, which the other does not
        return [(x[i:i + share], y[i:i + share]) for i in starts]
    if how == "grain":
        names = {"source": [*zip(*tiny.examples())]}
        shard = "grain.sharding.ShardByJaxProcess(drop_remainder=True)"
        page = Path(jaxonnx.__file__).parent / "docs" / "many_devices.md"
        text = "import grain\\ndef epoch_of" + page.read_text().partition("def epoch_of")[2]
        text = text.partition("jax.distributed")[0].replace("Batch(64", "Batch(4")
        if count > 1:
            exec(text, names)
            return names["epoch_of"]
        shares = []  # of both
        for i in range(2):
            mine = dict(names)
            exec(text.replace(shard, f"grain.sharding.ShardOptions({i}, 2, True)"), mine)
            shares.append(mine["epoch_of"])
        return lambda epoch: (
            tuple(map(np.concatenate, zip(*both))) for both in zip(*(of(epoch) for of in shares))
        )
    return None


said = {}
for how in ("stream", "grain", "arrays"):
    settings = dict(epochs=3, validation=tiny.examples(16, seed=2))
    if how == "arrays":
        settings |= dict(batch_size=8, epochs=40, patience=1)
        settings |= dict(monitor=("validation_accuracy", "max"))
    log = jaxonnx.loggers.csv(f"{folder}/{how}.csv")
    result = tiny.train(
        None, data_of(how), on_log=log, mesh=mesh, sharding=RULES, **settings
    )
    epochs = [{k: v for k, v in row.items() if k != "seconds"} for row in result.history.epochs]
    said[how] = result.history.losses, epochs, result.history.stopped
    if index == 0:
        np.savez(folder / f"{how}.npz", **tiny.weights(result))
        result.model.save(folder / f"{how}.onnx")
print("said:", json.dumps(said), flush=True)
if count > 1:
    endless(lambda number: number == 20)
"""


def trained(folder: Path, count: int):
    """Train on four devices; return how each process has ended, and what it said."""
    folder.mkdir()
    results = run_processes.ended(
        run_processes.start(ENDLESS + TRAIN, count, folder, devices=4 // count)
    )
    for log in folder.glob("*.csv"):
        rows = log.read_text().splitlines()
        assert len(rows) == len({*rows}), log  # one process writes them
    said = [re.findall("^said: (.*)$", result.out, re.MULTILINE) for result in results]
    assert all(said), results[0].errors + results[-1].errors
    return results, [json.loads(line) for (line,) in said]


def test_two_processes_are_one_run(tmp_path):
    """At last one of them has fewer batches than the other, in another run."""
    (ended,), (alone,) = trained(tmp_path / "one", 1)
    assert not ended.status
    unequal, (first, second) = trained(tmp_path / "two", 2)
    for result in unequal:
        assert result.status
        assert "different numbers of batches in epoch 1" in result.errors, result.errors
    assert first == second
    for how, (losses, _, stopped) in alone.items():
        np.testing.assert_allclose(first[how][0], losses, rtol=1e-5, err_msg=how)
        assert first[how][2] == stopped
        assert bool(stopped) == (how == "arrays")  # out of patience
        one, two = (np.load(tmp_path / folder / f"{how}.npz") for folder in ("one", "two"))
        for name, value in one.items():
            np.testing.assert_allclose(two[name], value, rtol=1e-5, atol=1e-7, err_msg=how)


def check_lost(results):
    """Check that an error in one process has ended all."""
    assert all(result.status for result in results)
    assert all("the disk is gone" in result.errors for result in results), results
    assert "process 1 failed: RuntimeError: the disk is gone" in results[0].errors


def test_an_error_before_the_first_step_ends_all():
    begun = time.monotonic()
    check_lost(run_processes.ended(run_processes.start(ENDLESS + "endless(lost)", 2)))
    assert time.monotonic() - begun < 60  # of which most is compiling


def test_ctrl_c_in_one_process_and_then_an_error():
    later = "endless(lambda number: number == 20 and lost(number))"
    both = run_processes.start(f"{ENDLESS}\nendless(lambda number: False)\n{later}", 2)
    for _ in range(20):
        both[1].stdout.readline()
    both[1].send_signal(signal.SIGINT)
    begun = time.monotonic()
    end = next((line for line in both[1].stdout if line.startswith("stopped")), "")
    assert time.monotonic() - begun < 20
    results = run_processes.ended(both)
    assert end.startswith("stopped: interrupted"), results
    assert end in results[0].out
    check_lost(results)


PADDED = """
from pathlib import Path
from tests.llm.test_padding_tokens import BY_TOKEN, LABELS, LAST_PLACE, LOSS, PAD, TEXTS
from tests.llm.test_padding_tokens import write
folder = Path(sys.argv[4]) / str(index)
folder.mkdir()
data = {"input_ids": TEXTS[:4], "y": LABELS[:4]}
settings = dict(loss=LOSS, epochs=2, progress=False, mesh=mesh)
path = write(folder, LAST_PLACE, config={"pad_token_id": PAD})
for examples, size in ((data, 4), ([{n: x[2:] for n, x in data.items()}], None)):
    try:
        jaxonnx.train(path, examples, batch_size=size, **settings)
    except jaxonnx.TrainingError as error:
        print("refused:", error, flush=True)
path = write(folder, BY_TOKEN, config={"pad_token_id": PAD})
result = jaxonnx.train(path, data, batch_size=4, **settings)
print("losses:", [round(x, 5) for x in result.history.losses], flush=True)
distributed = jaxonnx.load(folder, mesh=mesh, sharding={"table": P("data")})
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    jaxonnx.train(distributed, data, batch_size=4, **settings)
print("told:", *{str(w.message) for w in told if "not checked" in str(w.message)}, flush=True)
"""


def test_padding_is_checked_by_each_process(tmp_path):
    """With the token beside the file, as in a run of one process."""
    (tmp_path / "one").mkdir()
    (alone,) = run_processes.run(PADDED, 1, tmp_path / "one", devices=2)
    (tmp_path / "two").mkdir()
    both = run_processes.run(PADDED, 2, tmp_path / "two", devices=1)
    for result in both:
        refusals = re.findall("^refused: .* with padding", result.out, re.MULTILINE)
        assert len(refusals) == 2, result.out + result.errors
        losses = re.findall("^losses: .*$", result.out, re.MULTILINE)
        assert losses == re.findall("^losses: .*$", alone.out, re.MULTILINE)
        assert "distributed over several processes" in result.out
    assert "distributed over" not in alone.out


SCALAR = """
import optax
mean = lambda y, t: optax.softmax_cross_entropy_with_integer_labels(y, t).mean()
x, y = tiny.examples(7)
settings = dict(epochs=2, progress=False, mesh=mesh, optimizer=optax.sgd(0.5))
for loss in (tiny.LABELS, mean):
    result = tiny.train(data=(x, y), batch_size=4, loss=loss, **settings)
    print("losses:", [round(x, 5) for x in result.history.losses], flush=True)
shares = [(x[:2], y[:2]), (x[2:3], y[2:3])]
try:
    tiny.train(data=shares, loss=mean, **settings)
except jaxonnx.TrainingError as error:
    print("refused:", error, flush=True)
"""


@pytest.mark.deep
def test_a_scalar_of_a_short_batch_of_two_processes():
    for result in run_processes.run(SCALAR, 2):
        per_example, mean = re.findall("^losses: .*$", result.out, re.MULTILINE)
        assert per_example == mean
        assert re.search("^refused: .*has fewer examples than those", result.out, re.MULTILINE)
