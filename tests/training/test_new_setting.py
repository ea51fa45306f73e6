"""A setting of `train` that nobody here has seen is one module, and its lines in `order.py`.

They are added to a copy of the package, as its signatures are made when it is imported.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxonnx
from tests.support.tiny_networks import mlp

MODULE = '''"""Gaussian noise on gradients (`gradient_noise=`)."""

from typing import Annotated, TypedDict

import jax
import optax

from jaxonnx._arguments import Argument
from jaxonnx.training._settings import Plan


class GradientNoiseArguments(TypedDict, total=False):
    """Noise on gradients."""

    gradient_noise: Annotated[
        float | None,
        Argument(
            form="X",
            least=0,
            excludes=("sparsity",),
            reason="would change what sparsity prunes: leave one of the two out",
            resume=True,
            needs_loss=True,
        ),
    ]
    """The variance of the noise that gradients get, which falls with the updates.

    Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks", 2015
    (arXiv:1511.06807)."""


def add_gradient_noise(plan: Plan) -> None:
    """Add the noise to the gradients of an update."""
    if variance := plan.settings.gradient_noise:
        noise = optax.add_noise(variance, 0.55, jax.random.key(plan.settings.seed))
        plan.optimizer = optax.chain(noise, plan.optimizer)
        plan.notes.append(f"gradients get noise of the variance {variance}")
'''
IMPORT = """from jaxonnx.training._settings.gradient_noise import (
    GradientNoiseArguments,
    add_gradient_noise,
)
"""
LINES = {
    "from jaxonnx.training._settings.ema": f"{IMPORT}from jaxonnx.training._settings.ema",
    "    MeshArguments,": "    GradientNoiseArguments,\n    MeshArguments,",
    "= (accumulate_batches,": "= (add_gradient_noise, accumulate_batches,",
}

SCRIPT = """
import json, subprocess, sys
import jax, numpy as np, optax
import jaxonnx
from jaxonnx import training
from jaxonnx.cli import main

LOSS = "softmax_cross_entropy_with_integer_labels"
x = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
data = {"x": x, "y": np.arange(24) % 4}
np.savez("data.npz", **data)


def train(**arguments):
    settings = {"loss": LOSS, "epochs": 2, "batch_size": 8, "seed": 3, "progress": False}
    return jaxonnx.train("net.onnx", data, **settings | arguments)


def refusal(call, **arguments):
    try:
        call(**arguments)
    except jaxonnx.TrainingError as error:
        return str(error)


def lists(result):
    return {name: np.asarray(x).tolist() for name, x in result.params.items()}


rule, noise = optax.sgd(0.1), optax.add_noise(0.1, 0.55, jax.random.key(3))
noisy = train(optimizer=rule, gradient_noise=0.1, checkpoint_dir="run")
status = main(["train", "net.onnx", "data.npz", "-o", "out.onnx", "--loss", LOSS, "--epochs", "2",
    "--batch-size", "8", "--seed", "3", "--optimizer", "sgd", "--rate", "0.1",
    "--gradient-noise", "0.1"])
report = {
    "ours": lists(noisy.model),
    "optax": lists(train(optimizer=optax.chain(noise, rule)).model),
    "without": lists(train(optimizer=rule).model),
    "shell": lists(jaxonnx.load("out.onnx")),
    "status": status,
    "notes": noisy.history.notes,
    "documentation": jaxonnx.train.__doc__,
    "step": refusal(training.step, model="net.onnx", loss=LOSS, gradient_noise=-1.0),
    "with sparsity": refusal(train, gradient_noise=0.1, sparsity="2:4"),
    "resumed": refusal(train, optimizer=rule, gradient_noise=0.2, checkpoint_dir="run",
        resume=True, epochs=3),
}
with open("report.json", "w") as file:
    json.dump(report, file)
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """A folder with the package, in which the setting is."""
    folder = tmp_path_factory.mktemp("package")
    package = folder / "jaxonnx"
    shutil.copytree(
        Path(jaxonnx.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    settings = package / "training" / "_settings"
    (settings / "gradient_noise.py").write_text(MODULE)
    order = (settings / "order.py").read_text()
    for line, more in LINES.items():
        assert order.count(line) == 1, line
        order = order.replace(line, more)
    (settings / "order.py").write_text(order)
    jaxonnx.load(mlp()).save(folder / "net.onnx")
    return folder


def run(where, *command):
    environment = {**os.environ, "PYTHONPATH": str(where)}
    arguments = [sys.executable, *command]
    done = subprocess.run(
        arguments, cwd=where, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report(where):
    run(where, "-c", SCRIPT)
    return json.loads((where / "report.json").read_text())


def test_a_new_setting_changes_the_run(report):
    assert report["ours"] == report["optax"]
    assert report["ours"] != report["without"]
    assert "gradients get noise of the variance 0.1" in report["notes"]
    assert "gradient_noise: The variance of the noise that gradients" in report["documentation"]


def test_values_of_a_new_setting_are_checked(report):
    expected = "gradient_noise must be a finite number of at least 0, got -1.0"
    assert report["step"] == expected
    assert report["with sparsity"].startswith("gradient_noise would change what sparsity prunes")


def test_a_run_with_another_value_is_not_resumed(report):
    assert "gradient_noise" in report["resumed"]


def test_a_new_setting_is_a_flag(report, where):
    assert (report["status"], report["shell"]) == (0, report["ours"])
    show = "import sys; from jaxonnx.cli import main; main(['train', '--help'])"
    text = run(where, "-c", f"try: {show}\nexcept SystemExit: print('jax' in sys.modules)")
    assert "--gradient-noise X" in text
    assert text.endswith("False\n")  # the help is shown without JAX
