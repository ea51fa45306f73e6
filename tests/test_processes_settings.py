"""What one device trains with, two processes train with: their one run of all settings."""

import pytest

from tests import processes

pytestmark = pytest.mark.deep

# each process trains alone, and then both together, twice: at once, and cut and resumed
SETTINGS = """
import optax
from pathlib import Path
folder = Path(sys.argv[4])
MOMENTUM = optax.sgd(0.05, momentum=0.9)
x, y = tiny.examples()
CASES = {
    "sparse": dict(sparsity={"pattern": "2:4", "dense": 1, "dynamic": 1}),
}


def trained(case, together=False, **changes):
    settings = dict(epochs=4, optimizer=MOMENTUM) | CASES[case] | changes
    settings["validation"] = tiny.examples(16, seed=2)
    if together:
        settings |= dict(mesh=mesh, sharding=RULES)
    return tiny.train(None, progress=False, **settings)


def timeless(history):
    kept = ("loss", "validation_loss", "validation_accuracy", "phase", "sparsity")
    return [[row[name] for name in kept if name in row] for row in history.epochs]


for case in CASES:
    alone, both = trained(case), trained(case, True)
    np.testing.assert_allclose(both.history.losses, alone.history.losses, rtol=1e-5)
    for one, other in zip(timeless(both.history), timeless(alone.history), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, err_msg=case)
    weights, expected = tiny.weights(both), tiny.weights(alone)
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-6, err_msg=case)
        assert ((weights[name] == 0) == (value == 0)).all()
    for x in jax.tree.leaves((both.model.params, both.model.state)):
        assert x.is_fully_addressable  # whole in each process
        assert {d.platform for d in x.devices()} == {"cpu"}
    for epochs in (2, 4):
        cut = trained(
            case, True, epochs=epochs, checkpoint_dir=folder / case, checkpoint_every=3, resume=True
        )
    np.testing.assert_array_equal(cut.history.losses, both.history.losses, err_msg=case)
    assert tiny.same(cut, both), case

print("ended")
"""


def test_all_settings(tmp_path):
    results = processes.run(SETTINGS, 2, tmp_path)
    assert all(result.out.splitlines()[-1] == "ended" for result in results)
