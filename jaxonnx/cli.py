"""The command line: thin verbs over the functions of the package."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
from rich.console import Console

from jaxonnx.errors import Error, InputError
from jaxonnx.model import Model, load
from jaxonnx.save import check_writable

_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "rmsprop", "sgd")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 1 for a run that stopped early, 2 for an error."""
    options = _parser().parse_args(arguments)
    try:
        return options.verb(options)
    except (Error, OSError) as error:
        print(f"jaxonnx {options.name}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxonnx", description="Train ONNX files with JAX.")
    verbs = parser.add_subparsers(dest="name", required=True, metavar="command")

    def verb(function, text):
        added = verbs.add_parser(function.__name__.strip("_"), help=text, description=text)
        added.set_defaults(verb=function)
        return added

    info = verb(_info, "show inputs, outputs, operators and parameters of a model")
    info.add_argument("model", type=Path)

    run = verb(_run, "run a model on the arrays of a .npz file")
    run.add_argument("model", type=Path)
    run.add_argument("data", type=Path, help="a .npz with the inputs by name")
    run.add_argument("-o", "--output", type=Path, required=True, help="the .npz to write")

    for function, text in (
        (_train, "train a model and write it with the new weights"),
        (_sparsify, "the same with transposable 2:4 weights"),
    ):
        train = verb(function, text)
        train.add_argument("model", type=Path)
        train.add_argument(
            "data", type=Path, help="a .npz with the inputs by name, and the targets as 'y'"
        )
        train.add_argument("-o", "--output", type=Path, required=True, help="the .onnx to write")
        train.add_argument("--validation", type=Path, help="a .npz like the data")
        train.add_argument("--loss", default="softmax_cross_entropy_with_integer_labels")
        train.add_argument("--optimizer", choices=_OPTIMIZERS, default="adam")
        train.add_argument("--rate", type=float, default=1e-3, help="learning rate")
        train.add_argument("--epochs", type=int, default=10)
        train.add_argument("--batch-size", type=int)
        train.add_argument("--seed", type=int, default=0)
        train.add_argument("--trainable", action="append", help="name or regular expression")
        train.add_argument("--checkpoints", type=Path, help="a folder for checkpoints")
        train.add_argument("--resume", action="store_true")

    demo = verb(_demo, "train a small network for digits, dense and sparse, and write a report")
    demo.add_argument("-o", "--output", type=Path, default=Path(), help="folder to write to")
    demo.add_argument("--seed", type=int, default=0)
    return parser


def _info(options: argparse.Namespace) -> int:
    Console().print(load(options.model))
    return 0


def _run(options: argparse.Namespace) -> int:
    model = load(options.model)
    check_writable(options.output)
    inputs, _ = _arrays(options.data, model, None)
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    names = [value.name for value in model.outputs]
    named: dict[str, Any] = dict(zip(names, map(np.asarray, outputs), strict=True))
    np.savez(options.output, **named)
    return 0


def _train(options: argparse.Namespace, sparsity: str | None = None) -> int:
    from jaxonnx.train import train

    model = load(options.model)
    check_writable(options.output)
    result = train(
        model,
        _arrays(options.data, model, "y"),
        loss=options.loss,
        optimizer=getattr(optax, options.optimizer)(options.rate),
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
        validation=options.validation and _arrays(options.validation, model, "y"),
        trainable=options.trainable,
        sparsity=sparsity,
        checkpoint_dir=options.checkpoints,
        resume=options.resume,
    )
    result.model.save(options.output)
    print(result)
    return 1 if result.history.stopped else 0


def _sparsify(options: argparse.Namespace) -> int:
    return _train(options, "2:4")


def _demo(options: argparse.Namespace) -> int:
    from jaxonnx import demo

    demo.run(options.output, seed=options.seed)
    return 0


def _arrays(path: Path, model: Model, targets: str | None) -> tuple[tuple[Any, ...], Any]:
    """The model's inputs in order, and the targets, from a .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = dict(file)
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' is no .npz file ({error})") from error
    names = [value.name for value in model.inputs]
    wanted = [*names, *([targets] if targets else [])]
    if missing := [name for name in wanted if name not in found]:
        raise InputError(f"'{path}' has {', '.join(found) or 'no arrays'}, and needs {missing[0]}")
    return tuple(found[name] for name in names), found[targets] if targets else None
