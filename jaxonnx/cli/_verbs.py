"""The verbs: options in, a report out."""

import argparse
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
from rich.console import Console

from jaxonnx import loggers, sparse
from jaxonnx._file.disk import check_writable, whole
from jaxonnx._file.packed import packed_nbytes, record
from jaxonnx._graph.values import Value
from jaxonnx.cli import _images as pictures
from jaxonnx.cli._flags import LOSS, PHASES, RATE
from jaxonnx.errors import Error, InputError
from jaxonnx.lora import LoRA
from jaxonnx.model import Model, load
from jaxonnx.model import _images as images
from jaxonnx.model._show import operator

_PREPARATION = ("scale", "mean", "std", "labels", "order", "crop", "size")
"""Flags that are fields of `images.Preparation` by the same name."""
_SETTINGS = (
    "batch_size", "seed", "trainable", "statistics", "metrics", "accumulate", "ema", "nan",
    "precision", "remat", "patience", "monitor", "checkpoint_dir", "checkpoint_every", "resume",
)  # fmt: skip
"""Flags that are arguments of `jaxonnx.train` by the same name."""


class Report(NamedTuple):
    """The result of a verb."""

    data: Mapping[str, Any]
    """For `--json`."""
    shown: Any
    """For people: a text, something that rich renders, or None if nothing is left to say."""
    status: int = 0


class Failed(Error):
    """Raised when a command fails after its work began, not because it was refused."""


def read(options: argparse.Namespace, outputs: Sequence[str] | None = None) -> Model:
    """Load the model of a command."""
    batch = "any" if options.any_batch else None
    return load(options.model, outputs=outputs, batch=batch, dequantize=options.dequantize)


def info(options: argparse.Namespace) -> Report:
    model = read(options)
    sparsity = model.sparsity
    data = {
        "graph": model.proto.graph.name,
        "producer": f"{model.proto.producer_name} {model.proto.producer_version}".strip(),
        "ir_version": model.proto.ir_version,
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in model.proto.opset_import},
        "inputs": [_described(value) for value in model.inputs],
        "outputs": [_described(value) for value in model.outputs],
        "operators": Counter(map(operator, model.graph.nodes)),
        "params": {name: _described(x) for name, x in model.params.items()},
        "state": {name: _described(x) for name, x in model.state.items()},
        "sparse": [layer.name for layer in sparsity[1]] if sparsity else [],
        "training": len(model.proto.training_info),
        "warnings": model.warnings,
    }
    return Report(data, model.summary() if options.layers else model)


def _described(value: Any) -> dict[str, Any]:
    """Return shape and type of an input, an output or a tensor."""
    name = {"name": value.name} if isinstance(value, Value) else {}
    return {**name, "dtype": value.dtype and str(value.dtype), "shape": value.shape}


def run(options: argparse.Namespace) -> Report:
    model = read(options, options.outputs)
    check_writable(options.output)
    inputs, _ = arrays(options.data, model, None)
    names = [value.name for value in model.outputs]
    if options.batch_size is not None:
        progress = False if options.json else None
        outputs = model.predict(inputs, batch_size=options.batch_size, progress=progress)
        outputs = tuple(outputs.values()) if isinstance(outputs, dict) else outputs
    else:
        outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named: dict[str, Any] = dict(zip(names, map(np.asarray, outputs), strict=True))
    try:
        with whole(options.output) as path, path.open("wb") as file:
            np.savez(file, **named)
    except OSError as error:
        raise Failed(f"the outputs could not be written: {error}") from error
    data = {"output": options.output, "outputs": {n: _described(x) for n, x in named.items()}}
    return Report(data, "\n".join(f"{n}: {x.dtype}{[*x.shape]}" for n, x in named.items()))


def train(options: argparse.Namespace, sparsity: Mapping[str, Any] | None = None) -> Report:
    from jaxonnx.train import train

    model = read(options)
    check_writable(options.output)
    data, recorded = _data(_examples(options), model, options)
    validation, preprocess = options.validation, None
    if isinstance(validation, Path):
        validation, _ = _data(validation, model, options)
    if isinstance(data, Path):
        preprocess = {**_said(options), "augment": options.augment}
    elif options.augment:
        raise InputError("--augment goes with a folder of pictures")
    head = _head(model, options)
    chosen = options.loss or options.optimizer or head
    carried = bool(model.proto.training_info) and not chosen
    settings = {name: getattr(options, name) for name in _SETTINGS}
    result = train(
        model,
        data,
        loss=options.loss or (None if carried or head else LOSS),
        optimizer=None if carried else _optimizer(options, head),
        head=head,
        epochs=10 if options.epochs is None else options.epochs,
        validation=validation,
        preprocess=preprocess,
        dropout=_dropout(options),
        sparsity=sparsity,
        lora=_lora(options) if sparsity is None else None,
        on_log=[_logger(path) for path in options.log or ()],
        progress=False if options.json else None,
        **{name: value for name, value in settings.items() if value is not None},
    )
    trained = result.model
    if recorded:
        trained = images.with_preparation(trained, _preparation(trained, options))
    _save(trained, options.output)
    if result.lora is not None and options.adapters is not None:
        result.lora.save(options.adapters)
    history = result.history
    report = Report(
        {"output": options.output, "history": asdict(history), "changes": result.changes},
        str(result),
        bool(history.stopped) and not history.early,
    )
    if trained.sparsity is None or report.status:
        return report
    return _with_proof(report, trained, data)


def _optimizer(options: argparse.Namespace, head: Any) -> optax.GradientTransformation | None:
    """Return the optimizer; None for the two rates that `train` has for a new head."""
    if head is not None and not options.optimizer and options.rate is None:
        return None
    rate = RATE if options.rate is None else options.rate
    return getattr(optax, options.optimizer or "adam")(rate)


def evaluate(options: argparse.Namespace) -> Report:
    from jaxonnx.train import evaluate

    model = read(options)
    if options.plots is not None:
        check_writable(options.plots / "plot.png")
    data, _ = _data(_examples(options), model, options)
    result = evaluate(
        model,
        data,
        metrics=options.metrics,
        loss=options.loss or (None if options.metrics else LOSS),
        batch_size=options.batch_size,
        preprocess=_said(options) if isinstance(data, Path) else None,
        progress=False if options.json else None,
    )
    tables = {name: x for name, x in result.items() if not isinstance(x, float)}
    if options.plots is not None:
        for name, table in tables.items():
            table.plot().figure.savefig(options.plots / f"{name}.png")
    lines = [f"{name}: {x:.6g}" for name, x in result.items() if isinstance(x, float)]
    lines += [f"\n{name}\n{table}" for name, table in tables.items()]
    return Report(result | {n: table.plain() for n, table in tables.items()}, "\n".join(lines))


def _dropout(options: argparse.Namespace) -> float | dict[str, float] | None:
    """Return one ratio, or ratios by name."""
    ratios = dict(options.dropout or ())
    if "" in ratios and len(ratios) > 1:
        raise InputError("--dropout takes one ratio for all nodes, or NAME=X for each, not both")
    return ratios.get("", ratios) if ratios else None


def _logger(path: Path) -> loggers.Logger:
    kinds = {".csv": loggers.csv, ".jsonl": loggers.jsonl, "": loggers.tensorboard}
    if path.suffix not in kinds:
        raise InputError(f"--log {path}: neither .csv, nor .jsonl, nor a folder")
    return kinds[path.suffix](path)


def _lora(options: argparse.Namespace) -> LoRA | None:
    if options.adapters is not None:
        check_writable(options.adapters)
    if options.lora is not None:
        return LoRA(options.lora, where=options.lora_where)
    if options.lora_where or options.adapters:
        raise InputError("--lora-where and --adapters go with --lora RANK")
    return None


def _save(model: Model, path: Path) -> None:
    """Write the result of a long training; elsewhere, if it cannot be written here."""
    try:
        model.save(path)
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="jaxonnx-"))
        model.save(folder / path.name)
        raise Failed(f"{error}; the trained model is in {folder / path.name}") from error


def _with_proof(report: Report, model: Model, data: Any) -> Report:
    pattern, axes = record(model.proto)
    layers = [sparse.Layer(n, model.params[n].shape, a, "") for n, a in axes.items()]
    size = (model.inputs[0].shape or (None,))[0]
    size = size if isinstance(size, int) else 2
    if isinstance(data, Path):
        prepare = _preparation(model, argparse.Namespace())
        where = images.layout(model, prepare.size)
        few = [prepare(np.zeros((size, *where.size, where.channels), np.uint8), where)]
    else:
        few = [x[:size] for x in data[0]]
    proof = sparse.verify(model.apply, model.params, *few, layers=layers, pattern=pattern)
    dense = sum(w.nbytes for w in model.params.values())
    packed = packed_nbytes(model.params, pattern, axes)
    sizes = f"{dense:,} bytes of weights, {packed:,} packed ({packed / dense:.0%})"
    data = {
        **report.data,
        "pattern": str(pattern),
        "products": [asdict(product) for product in proof.products],
        "bytes": dense,
        "bytes_packed": packed,
    }
    return report._replace(data=data, shown=f"{report.shown}\n{proof}\n{sizes}")


def sparsify(options: argparse.Namespace) -> Report:
    phases = {name: getattr(options, name) for name in PHASES}
    phases = {name: length for name, length in phases.items() if length is not None}
    if phases and options.epochs is None:
        options.epochs = sum(phases.values())
    return train(options, {"pattern": options.pattern, "select": options.select, **phases})


def classify(options: argparse.Namespace) -> Report:
    model = load(options.model)
    prepare = _preparation(model, options)
    where = images.layout(model, prepare.size)
    if not images.says_numbers(model) and options.scale is None:
        warnings.warn(f"'{options.model}' does not say how pixels are scaled: 1/255", stacklevel=1)
    data, lines = [], []
    for path in options.pictures:
        pixels = images.read(path, where, prepare.crop)
        classes = pictures.classify(model, pixels, prepare, where)[: options.top]
        data.append({"picture": path, "classes": [{"label": n, "share": p} for n, p in classes]})
        lines += [str(path), *(f"  {share:7.2%}  {label}" for label, share in classes)]
    return Report({"pictures": data}, "\n".join(lines))


def demo(options: argparse.Namespace) -> Report:
    from jaxonnx import demo

    console = Console(stderr=options.json)
    rows = demo.run(
        options.output,
        epochs=options.epochs,
        seed=options.seed,
        console=console,
        progress=False if options.json else None,
    )
    left_out = ("weights", "history")
    data = [{k: v for k, v in vars(row).items() if k not in left_out} for row in rows]
    return Report({"networks": data}, None)


def _preparation(model: Model, options: argparse.Namespace) -> images.Preparation:
    """Return the preparation by the flags, or else by the file, or else the usual one."""
    return replace(images.preparation(model), **_said(options))


def _said(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags say of pictures."""
    flags = {name: getattr(options, name, None) for name in _PREPARATION}
    if flags["labels"] is not None:
        flags["labels"] = _names(flags["labels"])
    return {name: value for name, value in flags.items() if value is not None}


def _names(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text("utf-8").splitlines())


def _head(model: Model, options: argparse.Namespace) -> Any:
    """Return the new heads: their classes by output, or those of the only one; None for none.

    Labels that are more or less than the outputs of the network need a new head as well.
    """
    heads = dict(options.head or ())
    names = _names(options.labels) if options.labels is not None else ()
    shape = model.outputs[0].shape if len(model.outputs) == 1 else None
    if not heads and names and shape and len(shape) == 2 and shape[1] not in (None, len(names)):
        heads[""] = len(names)
    for output, count in heads.items() if names else ():
        if count != len(names):
            raise InputError(f"--head {count}, but '{options.labels}' has {len(names)} names")
        heads[output] = names
    if "" in heads and len(heads) > 1:
        raise InputError("--head takes one number, or OUTPUT=N for each of several, not both")
    return heads.get("", heads) or None


def _data(path: Path, model: Model, options: argparse.Namespace) -> tuple[Any, bool]:
    """Return inputs and targets, or the path of a folder; and whether the file is to say how.

    Pixels are prepared if the network takes other numbers.
    """
    if path.is_dir():
        return path, False
    inputs, targets = arrays(path, model, "y")
    if len(inputs) != 1 or not inputs[0].dtype == np.uint8 != model.inputs[0].dtype:
        return (inputs, targets), bool(_said(options))
    prepare = _preparation(model, options)
    where = images.layout(model, prepare.size)
    return ((pictures.batch(inputs[0], prepare, where),), targets), True


def _examples(options: argparse.Namespace) -> Path:
    """Return the path of the data, named with or without its flag."""
    paths = [path for path in (options.examples, options.data) if path is not None]
    if len(paths) != 1:
        raise InputError(f"give the data once: jaxonnx {options.verb} MODEL DATA, or --data DATA")
    return paths[0]


def arrays(path: Path, model: Model, targets: str | None) -> tuple[tuple[Any, ...], Any]:
    """Load the model's inputs in order, and the targets, from a .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            values = dict(file)
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' is not a .npz file ({error})") from error
    names = [value.name for value in model.inputs]
    if len(names) == 1 and names[0] not in values:
        names = ["x"] if "x" in values else names
    wanted = [*names, *([targets] if targets else [])]
    if missing := [name for name in wanted if name not in values]:
        raise InputError(f"'{path}' has {', '.join(values) or 'no arrays'}, and needs {missing[0]}")
    return tuple(values[name] for name in names), values[targets] if targets else None
