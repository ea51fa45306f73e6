"""The command line: thin verbs over the functions of the package."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax
from rich.console import Console

from jaxonnx import images, sparse
from jaxonnx.errors import Error, InputError
from jaxonnx.model import Model, load
from jaxonnx.save import check_writable
from jaxonnx.sparse_export import packed_nbytes, record

_PHASES = ("dense", "dynamic", "fixed")
_PREPARATION = ("scale", "mean", "std", "labels")
_LOSS = "softmax_cross_entropy_with_integer_labels"
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
        data = train.add_mutually_exclusive_group(required=True)
        what = "a .npz with the inputs by name (or one as 'x'), and the targets as 'y'"
        data.add_argument("--data", type=Path, help=what)
        data.add_argument("examples", metavar="data", type=Path, nargs="?", help="the same")
        what = "the .onnx to write, or a packed .npz"
        train.add_argument("-o", "--output", "--out", type=Path, required=True, help=what)
        train.add_argument("--validation", type=Path, help="a .npz like the data")
        what = f"of optax; {_LOSS}, or what the file's training_info has"
        train.add_argument("--loss", help=what)
        what = "adam, or what the file's training_info has"
        train.add_argument("--optimizer", choices=_OPTIMIZERS, help=what)
        train.add_argument("--rate", type=float, default=1e-3, help="learning rate")
        train.add_argument("--epochs", type=int, help="10, or the sum of the phases")
        train.add_argument("--batch-size", type=int)
        train.add_argument("--seed", type=int, default=0)
        train.add_argument("--trainable", action="append", help="name or regular expression")
        train.add_argument("--checkpoints", type=Path, help="a folder for checkpoints")
        train.add_argument("--resume", action="store_true")
        _add_preparation(train)
        if function is _sparsify:
            train.add_argument("--pattern", default="2:4", help="N:M along both axes")
            train.add_argument("--select", action="append", help="name or regular expression")
            for phase in _PHASES:
                train.add_argument(f"--{phase}", type=int, help="epochs of this phase")

    classify = verb(_classify, "name what pictures show")
    classify.add_argument("model", type=Path)
    classify.add_argument("pictures", type=Path, nargs="+")
    classify.add_argument("--top", type=int, default=5, help="classes to print")
    _add_preparation(classify)

    demo = verb(_demo, "train a small network for digits, dense and sparse, and write a report")
    demo.add_argument("-o", "--output", type=Path, default=Path(), help="folder to write to")
    demo.add_argument("--seed", type=int, default=0)
    return parser


def _add_preparation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "pictures", "(pixel * scale - mean) / std is what the network takes; a file may say this."
    )
    group.add_argument("--scale", type=float, help="1/255 if nothing says it")
    for name, default in (("mean", 0), ("std", 1)):
        what = f"number, or one for each channel (0.5,0.5,0.5); {default} if nothing says it"
        group.add_argument(f"--{name}", type=_numbers, help=what)
    group.add_argument("--labels", type=Path, help="names of the classes, one a line")
    group.add_argument("--size", type=_size, help="HxW, where the network takes any")


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _size(text: str) -> tuple[int, int]:
    height, width = map(int, text.split("x"))
    return height, width


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


def _train(options: argparse.Namespace, sparsity: dict[str, Any] | None = None) -> int:
    from jaxonnx.train import train

    model = load(options.model)
    check_writable(options.output)
    given, targets = _arrays(options.data or options.examples, model, "y")
    inputs = _prepared(given, model, options)
    validation = options.validation
    if validation is not None:
        held_out, truth = _arrays(validation, model, "y")
        validation = (_prepared(held_out, model, options), truth)
    carried = bool(model.proto.training_info) and not (options.loss or options.optimizer)
    result = train(
        model,
        (inputs, targets),
        loss=None if carried else options.loss or _LOSS,
        optimizer=None if carried else getattr(optax, options.optimizer or "adam")(options.rate),
        epochs=10 if options.epochs is None else options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
        validation=validation,
        trainable=options.trainable,
        sparsity=sparsity,
        checkpoint_dir=options.checkpoints,
        resume=options.resume,
    )
    trained = result.model
    if inputs is not given or any(getattr(options, name) is not None for name in _PREPARATION):
        trained = images.with_preparation(trained, _preparation(trained, options))
    trained.save(options.output)
    print(result)
    if result.history.stopped:
        return 1
    if trained.sparsity is not None:
        print(_proof(trained, inputs))
    return 0


def _proof(model: Model, inputs: tuple) -> str:
    pattern, axes = record(model.proto)
    layers = [sparse.Layer(n, model.params[n].shape, a, "") for n, a in axes.items()]
    size = (model.inputs[0].shape or (None,))[0]
    few = [x[: size if isinstance(size, int) else 2] for x in inputs]
    proof = sparse.verify(model.apply, model.params, *few, layers=layers, pattern=pattern)
    dense = sum(w.nbytes for w in model.params.values())
    packed = packed_nbytes(model.params, pattern, axes)
    return f"{proof}\n{dense:,} bytes of weights, {packed:,} packed ({packed / dense:.0%})"


def _sparsify(options: argparse.Namespace) -> int:
    phases = {name: getattr(options, name) for name in _PHASES}
    phases = {name: length for name, length in phases.items() if length is not None}
    if phases and options.epochs is None:
        options.epochs = sum(phases.values())
    return _train(options, {"pattern": options.pattern, "select": options.select, **phases})


def _classify(options: argparse.Namespace) -> int:
    model = load(options.model)
    where = images.layout(model, options.size)
    if images.preparation(model) is None and options.scale is None and where.dtype != np.uint8:
        print(f"'{options.model}' does not say how pixels are scaled: 1/255", file=sys.stderr)
    prepare = _preparation(model, options)
    for path in options.pictures:
        found = images.classify(model, images.read(path, where), prepare, where)
        print(path)
        for label, share in found[: options.top]:
            print(f"  {share:7.2%}  {label}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from jaxonnx import demo

    demo.run(options.output, seed=options.seed)
    return 0


def _preparation(model: Model, options: argparse.Namespace) -> images.Preparation:
    """What the flags say, or else the file, or else what is usual."""
    said = images.preparation(model)
    if said is None:
        said = images.Preparation(scale=1 if model.inputs[0].dtype == np.uint8 else 1 / 255)
    flags = {name: getattr(options, name) for name in _PREPARATION}
    if flags["labels"] is not None:
        flags["labels"] = tuple(flags["labels"].read_text("utf-8").splitlines())
    return replace(said, **{name: value for name, value in flags.items() if value is not None})


def _prepared(inputs: tuple, model: Model, options: argparse.Namespace) -> tuple:
    """The inputs themselves, or prepared if they are pixels and the network takes other numbers."""
    if len(inputs) != 1 or not inputs[0].dtype == np.uint8 != model.inputs[0].dtype:
        return inputs
    where = images.layout(model, options.size)
    return (images.batch(inputs[0], _preparation(model, options), where),)


def _arrays(path: Path, model: Model, targets: str | None) -> tuple[tuple[Any, ...], Any]:
    """The model's inputs in order, and the targets, from a .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = dict(file)
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' is no .npz file ({error})") from error
    names = [value.name for value in model.inputs]
    if len(names) == 1 and names[0] not in found:
        names = ["x"] if "x" in found else names
    wanted = [*names, *([targets] if targets else [])]
    if missing := [name for name in wanted if name not in found]:
        raise InputError(f"'{path}' has {', '.join(found) or 'no arrays'}, and needs {missing[0]}")
    return tuple(found[name] for name in names), found[targets] if targets else None
