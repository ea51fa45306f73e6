"""Several processes make one run, over gloo on this machine's CPU."""

import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import jaxonnx
from tests import processes

pytestmark = pytest.mark.deep

TRAIN = """
import json
from pathlib import Path
folder, how = sys.argv[4:6]
given = dict(epochs=3, batch_size=8, validation=tiny.examples(16, seed=2))
given |= dict(mesh=mesh, sharding=RULES)
data = tiny.examples()
if how == "stream":
    x, y = data
    share = 8 // count
    starts = [i + index * share for i in range(0, 40, 8)]
    data = [(x[i:i + share], y[i:i + share]) for i in starts]
    del given["batch_size"]
    if index:
        tiny.train()  # alone, which the other does not
if how == "grain":
    import grain
    source = [*zip(*data)]
    shard = "grain.sharding.ShardByJaxProcess(drop_remainder=True)"
    page = Path(jaxonnx.__file__).parent / "docs" / "many_devices.md"
    text = "def epoch_of" + page.read_text().partition("def epoch_of")[2]
    text = text.partition("jax.distributed")[0].replace("Batch(64", "Batch(4")
    if count > 1:
        exec(text)
        data = epoch_of
    else:  # the shares of both
        shares = []
        for i in range(2):
            exec(text.replace(shard, f"grain.sharding.ShardOptions({i}, 2, True)"))
            shares.append(epoch_of)
        data = lambda epoch: (
            tuple(map(np.concatenate, zip(*both))) for both in zip(*(of(epoch) for of in shares))
        )
    del given["batch_size"]
if how == "patience":
    given |= dict(patience=1, epochs=40, monitor=("validation_accuracy", "max"))
result = tiny.train(None, data, on_log=jaxonnx.loggers.csv(f"{folder}/log.csv"), **given)
print(json.dumps([result.history.losses, result.history.epochs, result.history.stopped]))
if index == 0:
    np.savez(f"{folder}/weights.npz", **tiny.weights(result))
    result.model.save(f"{folder}/model.onnx")
"""


def trained(folder: Path, count: int, how: str):
    """Trains on four devices; what each process says, and the weights."""
    folder.mkdir()
    results = processes.run(TRAIN, count, folder, how, devices=4 // count)
    said = [json.loads(result.out.splitlines()[-1]) for result in results]
    rows = (folder / "log.csv").read_text().splitlines()
    assert len(rows) == len({*rows})  # one process writes them
    return said, dict(np.load(folder / "weights.npz"))


def timeless(said):
    losses, epochs, stopped = said
    return losses, [{k: v for k, v in row.items() if k != "seconds"} for row in epochs], stopped


@pytest.mark.parametrize("how", ["arrays", "stream", "grain", "patience"])
def test_two_processes_are_one_run(how, tmp_path):
    (alone,), weights = trained(tmp_path / "one", 1, how)
    both, others = trained(tmp_path / "two", 2, how)
    assert timeless(both[0]) == timeless(both[1])
    np.testing.assert_allclose(both[0][0], alone[0], rtol=1e-5)
    assert both[0][2] == alone[2]
    assert bool(alone[2]) == (how == "patience")
    for name, value in weights.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-5, atol=1e-7)


ENDLESS = """
x, y = tiny.examples(16)
def batches(epoch):
    for number in range(10**9):
        {event}
        print(number, flush=True)
        yield x[:8], y[:8]
result = tiny.train(None, batches, mesh=mesh, sharding=RULES, epochs=1)
print("stopped:", result.history.stopped, flush=True)
"""


@pytest.mark.parametrize(
    "event",
    [
        "if index == 1 and number == 20: raise RuntimeError('the disk is gone')",
        "if index == 1 and number == 0: raise RuntimeError('the disk is gone')",
    ],
)
def test_an_error_in_one_process_ends_all(event):
    begun = time.monotonic()
    results = processes.ended(processes.start(ENDLESS.format(event=event), 2))
    assert all(result.status for result in results)
    assert all("the disk is gone" in result.errors for result in results), results
    assert "process 1 failed: RuntimeError: the disk is gone" in results[0].errors
    assert time.monotonic() - begun < 60  # of which most is compiling


def test_different_numbers_of_batches():
    event = "if index == 1 and number == 20: return"
    results = processes.ended(processes.start(ENDLESS.format(event=event), 2))
    for result in results:
        assert result.status
        assert "different numbers of batches in epoch 1" in result.errors, result.errors


def test_ctrl_c_in_one_process():
    both = processes.start(ENDLESS.format(event=""), 2)
    for _ in range(20):
        both[1].stdout.readline()
    both[1].send_signal(signal.SIGINT)
    begun = time.monotonic()
    results = processes.ended(both)
    assert time.monotonic() - begun < 20
    ends = [result.out.splitlines()[-1] for result in results]
    assert ends[0] == ends[1]
    assert ends[0].startswith("stopped: interrupted"), results


RESUMED = """
import time
folder, pause = sys.argv[4], float(sys.argv[5])
result = tiny.train(
    tiny.mlp(dropout=True), epochs=4, batch_size=8, ema=0.9, mesh=mesh, sharding=RULES,
    checkpoint_dir=f"{folder}/run", checkpoint_every=3, resume=True,
    on_log=lambda step, metrics: time.sleep(pause),
)
if index == 0:
    np.savez(f"{folder}/weights.npz", losses=result.history.losses, **tiny.weights(result))
"""


def weights_of(folder):
    return dict(np.load(folder / "weights.npz"))


def test_a_killed_run_goes_on_in_other_processes(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    processes.run(RESUMED, 2, whole, 0)
    both = processes.start(RESUMED, 2, cut, 0.5)
    while not [*cut.glob("run/[369]")]:
        time.sleep(0.05)
        assert all(process.poll() is None for process in both)
    both[1].kill()
    killed = processes.ended(both)
    assert all(result.status for result in killed)
    assert not (cut / "weights.npz").exists()
    shutil.copytree(cut, tmp_path / "eight")

    processes.run(RESUMED, 2, cut, 0)
    expected, found = weights_of(whole), weights_of(cut)
    for name, value in expected.items():
        assert value.tobytes() == found[name].tobytes(), name
    processes.run(RESUMED, 1, tmp_path / "eight", 0, devices=8)
    for name, value in weights_of(tmp_path / "eight").items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7)
    model = jaxonnx.load(cut / "run")
    np.testing.assert_array_equal(model.params["w1"], expected["w1"])
