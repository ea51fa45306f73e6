"""The commands of training, and the Python program of `--explain`."""

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxonnx
from jaxonnx import loggers, sparse, training
from jaxonnx._arguments import OptimizerArguments, list_arguments
from jaxonnx._data import images
from jaxonnx._data.batches import Source
from jaxonnx._files import check_writable
from jaxonnx._graph.projections import ROLES
from jaxonnx._io.formats import check_suffix
from jaxonnx._io.packed import packed_nbytes
from jaxonnx.cli import _inputs as reading
from jaxonnx.cli._flags import AUTO, collect_values
from jaxonnx.cli._inputs import CommandError, Report
from jaxonnx.cli._parser import LOSS
from jaxonnx.errors import InputError, ModelError, warn
from jaxonnx.lora import LoRA
from jaxonnx.model import Model
from jaxonnx.quantization import Quantization
from jaxonnx.training import (
    Result,
    Settings,
    StepArguments,
    TrainArguments,
    has_other_card,
    open_data,
    read_data,
)

SPARSE_EPOCHS = 10
"""The epochs of `sparsify` if no phase has a length."""


def train(options: argparse.Namespace, sparsity: Mapping[str, Any] | None = None) -> Report:
    first = _connect_processes(options)
    model = reading.read(options)
    # check before the training that its results can be written
    if (output := options.output) is not None:  # else --dry-run
        check_suffix(output)
        if _has_folder(output, model):  # the first folder that is there
            existing = next(p for p in (output, *output.absolute().parents) if p.exists())
            check_writable(existing / "config.json")
        else:
            check_writable(output)
    if options.report is not None:
        check_writable(options.report)
        if find_spec("matplotlib") is None:
            raise InputError("--report needs matplotlib: pip install 'jaxonnx[plot]'")
    path = reading.examples(options)
    settings = _settings(options, model, path, sparsity)
    if options.explain:
        text = _explain(options, model, path, settings)
        return Report({"python": text}, text)
    data, recorded = reading.data(path, model, options)
    if recorded:
        model = images.with_preparation(model, reading.preparation(model, options))
    if isinstance(options.validation, Path):
        settings["validation"], _ = reading.data(options.validation, model, options)
    if not isinstance(data, Path):
        settings.pop("columns", None)  # they have new names by now
    progress = False if options.json else None
    if not first:  # the files are those of one process
        settings.pop("on_log", None)
    arguments = {name: reading.call(value) for name, value in settings.items()}
    if options.dry_run:
        overview = training.preview(
            model, data, **{n: x for n, x in arguments.items() if n != "on_log"}
        )
        return Report(asdict(overview), overview)
    result = jaxonnx.train(model, data, progress=progress, **arguments)
    history, trained = result.history, result.model
    stopped = bool(history.stopped) and not history.early
    if not first:
        return Report({}, None, stopped)
    assert options.output is not None  # a dry run ended above
    _save(result, options.output)
    if result.lora is not None and options.adapters is not None:
        result.lora.save(options.adapters)
    if options.report is not None:
        passed = {n: x for n, x in vars(options).items() if x not in (None, False, [])}
        result.report(options.report, passed)
    paths = [options.output, *(options.on_log or ()), options.checkpoint_dir, options.report]
    paths.append(getattr(options, "adapters", None))
    written = [path for path in paths if path is not None]
    about = {"output": options.output, "written": written}
    about |= {"history": asdict(history), "changes": result.changes}
    report = Report(about, str(result), stopped, written)
    if trained.sparsity is None or report.status:
        return report
    return _with_proof(report, trained, data, settings)


def _connect_processes(options: argparse.Namespace) -> bool:
    """Connect the processes that run this command; return whether this one reports."""
    if options.distributed is None:
        return True
    options.mesh = options.mesh or "all"
    if options.explain:
        return True
    where = () if options.distributed == AUTO else options.distributed
    try:
        jax.distributed.initialize(*where)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"--distributed: {error} (without HOST:PORT,COUNT,INDEX it needs SLURM, Open MPI, "
            "Kubernetes or a TPU pod)"
        ) from error
    return jax.process_index() == 0


def export_step(options: argparse.Namespace) -> Report:
    from jaxonnx._step_files.export import FILES, export_step

    model = reading.read(options)
    path = reading.examples(options)
    for name in (*list_arguments(TrainArguments), "adapters", "resume_anyway"):
        vars(options).setdefault(name, None)  # those of training that this command does not have
    settings = _settings(options, model, path, None)
    arguments = {name: reading.call(value) for name, value in settings.items()}
    data, _ = reading.data(path, model, options)
    model, examples = _examples(data, model, settings, options.batch_size)
    of_step = {"loss", "optimizer", *list_arguments(StepArguments)}
    arguments = {name: value for name, value in arguments.items() if name in of_step}
    arguments |= {"epochs": options.epochs or 1, "steps_per_epoch": examples.steps}
    arguments |= collect_values(options, "export_step")
    batches = [*examples.batches(0)] if options.web else [next(examples.batches(0))]
    if options.web_inputs is not None and not options.web:
        raise InputError("--web-inputs goes with --web")
    if options.web:
        if len({tuple(x.shape[1:] for x in jax.tree.leaves(batch)) for batch in batches}) > 1:
            raise InputError("--web takes examples of one shape: pad them to one width")
        real = [batch.weight > 0 for batch in batches]  # without what fills them up

        def join(*arrays: Any) -> np.ndarray:
            return np.concatenate([x[keep] for x, keep in zip(arrays, real, strict=True)])

        arguments["web"] = jax.tree.map(join, *batches)
        if options.web_inputs is not None:
            arguments["web"] = {"inputs": options.web_inputs, "examples": arguments["web"]}
        arguments["runtime"] = None if options.web == AUTO else options.web
    batch = batches[0]
    if options.any_batch:
        (size,) = jax.export.symbolic_shape("batch")
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch)
    manifest = export_step(model, options.output, batch, opset=options.opset, **arguments)
    parts = [part for name, part in manifest.items() if name in FILES]
    beside = [name for part in parts for name in part.get("data", ())]
    names = [*dict.fromkeys([*(part["file"] for part in parts), *beside])]
    names += ["index.html", "manifest.json"] if options.web else ["manifest.json"]
    written = [options.output / name for name in names]
    shown = "\n".join(f"note: {text}" for text in model.warnings) or None
    data = {"written": written, "manifest": manifest, "warnings": model.warnings}
    return Report(data, shown, False, written)


def import_step(options: argparse.Namespace) -> Report:
    from jaxonnx._step_files.load import import_step

    model = import_step(options.model, options.folder, options.state)
    model.save(options.output)
    written = [options.output]
    return Report({"written": written}, None, False, written)


def sparsify(options: argparse.Namespace) -> Report:
    values = {name: x for name, x in vars(options).items() if x is not None}
    phases = {name: values[name] for name in ("dense", "dynamic", "fixed") if name in values}
    if options.epochs is None:
        options.epochs = sum(phases.values()) if phases else SPARSE_EPOCHS
    choice = {name: values[name] for name in ("select", "method") if name in values}
    return train(options, {"pattern": options.pattern or "2:4", **choice, **phases})


def _settings(
    options: argparse.Namespace, model: Model, path: Path, sparsity: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of `jaxonnx.train` that are not its defaults, calls as `partial`."""
    preprocess = reading.preprocessing(options, path)
    if options.augment and not reading.has_pictures(path):
        raise InputError("--augment goes with a folder of pictures")
    if options.augment:
        preprocess["augment"] = options.augment
    head = _head(model, options)
    carried = bool(model.proto.training_info) and not (options.loss or options.optimizer or head)
    flags = {n: x.argument.flag or n for n, x in list_arguments(OptimizerArguments).items()}
    passed = [flag for name, flag in flags.items() if getattr(options, name) is not None]
    if carried and passed:
        raise InputError(
            f"--{passed[0].replace('_', '-')} goes with --optimizer and --loss: '{options.model}' "
            "carries an algorithm of its own, which has its rate"
        )
    settings = {name: getattr(options, name, None) for name in list_arguments(TrainArguments)}
    scheme = options.quantize
    if isinstance(scheme, Mapping):
        Quantization(**scheme)  # refuses fields that do not fit
        scheme = partial(Quantization, **scheme)
    settings |= {
        "loss": reading.loss(model, options) or (None if carried or head else LOSS),
        "head": head,
        "preprocess": preprocess,
        "augment": None,  # of images, in `preprocess`
        "batching": dict.fromkeys(options.batching or ()),
        # of `sparsify` this is the length of a phase
        "fixed": options.fixed if sparsity is None else None,
        "quantize": scheme,
        "sparsity": sparsity,
        "lora": _lora(options) if sparsity is None else None,
        "mesh": reading.mesh(options),
        "on_log": [_logger(path, options.checkpoint_dir) for path in options.on_log or ()],
    }
    if options.resume_anyway:
        settings["resume"] = "anyway"
    return {name: x for name, x in settings.items() if x is not None and x not in ([], {})}


def _explain(
    options: argparse.Namespace, model: Model, path: Path, settings: Mapping[str, Any]
) -> str:
    """Return the Python that does what the command does."""
    ways: dict[str, Any] = {"batch": "any"} if options.any_batch else {}
    ways |= {"dequantize": True} if options.dequantize else {}
    lines = [f"model = {_source(partial(jaxonnx.load, options.model, **ways))}"]
    for name, source in (("data", path), ("validation", settings.get("validation"))):
        if isinstance(source, Path) and "columns" not in settings and reading.table(source):
            lines += _explain_reading(name, source, model, options)
        elif source is not None:
            lines.append(f"{name} = {_source(source)}")
    if "validation" in settings:
        settings = {**settings, "validation": _Name("validation")}
    arguments = ["model", "data", *(f"{name}={_source(x)}" for name, x in settings.items())]
    lines += ["result = jaxonnx.train(", *(f"    {argument}," for argument in arguments), ")"]
    if options.distributed is not None:
        where = () if options.distributed == AUTO else options.distributed
        lines.insert(0, f"jax.distributed.initialize({', '.join(map(repr, where))})")
        lines.append("# in process 0 alone:")
    calls = {"result.model.save": options.output, "result.report": options.report}
    if options.output is not None and _has_folder(options.output, model):
        calls = {"result.save": options.output, "result.report": options.report}
    if "lora" in settings:
        calls["result.lora.save"] = options.adapters
    lines += [f"{call}({_source(path)})" for call, path in calls.items() if path is not None]
    uses = {"jax": "jax.", "numpy as np": "np."}
    first = "".join(f"import {x}\n" for x, y in uses.items() if any(y in line for line in lines))
    return "\n".join([f"{first}import jaxonnx\n", *lines, "print(result)"])


def _explain_reading(name: str, path: Path, model: Model, options: argparse.Namespace) -> list[str]:
    """Return the lines that read data from a file."""
    _, prepared = reading.data(path, model, options)
    if prepared:
        raise InputError(
            f"--explain supports a folder of pictures, but not pictures in '{path}' or, beside it, "
            "flags for pictures and --labels, which the command applies itself"
        )
    table = reading.table(path) or {}
    columns = reading.columns(path, [*table], reading.fix(model, options))
    if path.suffix == ".jsonl":
        used = {*columns.inputs, *columns.targets, *columns.weight}
        if unused := [column for column in table if column not in used]:
            raise InputError(
                f"--explain does not support '{path}', which has more than inputs and "
                f"targets: {', '.join(unused)}"
            )
        return [f"{name} = {_source(path)}"]
    arrays = {column: _Name(f"arrays[{_source(column)}]") for column in table}
    inputs: Any = {key: arrays[column] for key, column in columns.inputs.items()}
    targets: Any = {column: arrays[column] for column in columns.targets}
    parts = [
        tuple(inputs.values()) if len(inputs) == len(model.inputs) else inputs,
        *(targets.values() if len(targets) == 1 else [targets]),
        *(arrays[column] for column in columns.weight),
    ]
    return [f"arrays = np.load({_source(path)})", f"{name} = {', '.join(map(_source, parts))}"]


class _Name(str):
    """A name in a program rather than a text."""


def _source(value: Any) -> str:
    """Return the Python that makes a value; `partial` is a call."""
    match value:
        case partial():
            named = [f"{name}={_source(x)}" for name, x in value.keywords.items()]
            called = value.func.__qualname__  # by the name that users call it by
            in_package = called in jaxonnx.__all__
            room = "jaxonnx" if in_package else value.func.__module__.partition("._")[0]
            return f"{room}.{called}({', '.join([*map(_source, value.args), *named])})"
        case _Name():
            return str(value)
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False)
        case Mapping():
            return "{" + ", ".join(f"{_source(k)}: {_source(x)}" for k, x in value.items()) + "}"
        case tuple():
            return "(" + ", ".join(map(_source, value)) + ("," if len(value) == 1 else "") + ")"
        case list():
            return "[" + ", ".join(map(_source, value)) + "]"
    return repr(value)


def _head(model: Model, options: argparse.Namespace) -> Any:
    """Return the classes of the new head, or those by output of several, which may be none.

    Labels that are more or less than the outputs of the network need a new head as well.
    """
    heads: dict[str, Any] = dict(options.head) if isinstance(options.head, Mapping) else {}
    if isinstance(options.head, int):  # of the only output
        heads[""] = options.head
    names = reading.class_names(options.labels) if options.labels is not None else ()
    shape = model.outputs[0].shape if len(model.outputs) == 1 else None
    if not heads and names and shape and len(shape) == 2 and shape[1] not in (None, len(names)):
        heads[""] = len(names)
    for output, count in heads.items() if names else ():
        if count != len(names):
            raise InputError(f"--head {count}, but '{options.labels}' has {len(names)} names")
        heads[output] = names
    return heads.get("", heads)


def _logger(path: Path, folder: Path | None) -> partial:
    service, _, name = str(path).partition(":")
    if name and service in ("wandb", "mlflow"):
        return partial(getattr(loggers, service), name, folder=folder)
    kinds = {".csv": loggers.csv, ".jsonl": loggers.jsonl, "": loggers.tensorboard}
    if path.suffix not in kinds:
        raise InputError(f"--log {path}: neither .csv, nor .jsonl, nor a folder")
    return partial(kinds[path.suffix], path)


def _lora(options: argparse.Namespace) -> partial | None:
    if options.adapters is not None:
        check_writable(options.adapters)
    if options.lora is not None:
        where = options.lora_where or []
        chosen = where[0] if len(where) == 1 and where[0] in ROLES else where
        more = ({"where": chosen} if where else {}) | collect_values(options, "LoRA")
        return partial(LoRA, options.lora, **more)
    if options.lora_where or options.adapters or collect_values(options, "LoRA"):
        raise InputError(
            "--lora-where, --lora-alpha, --lora-dropout, --dora and --adapters go with --lora RANK"
        )
    return None


def _has_folder(path: Path, model: Model) -> bool:
    """Check whether a model is saved as a folder, which has a card as well."""
    return model.companion.accepts(path)


def _save(result: Result, path: Path) -> None:
    """Write the result of a long training; elsewhere, if it cannot be written here."""
    save = result.model.save
    if _has_folder(path, result.model):
        card = not has_other_card(path, result.model)
        save = partial(result.save, card=card)
        if not card:
            warn(f"README.md of '{path}' stays: jaxonnx did not write it")
    try:
        save(path)
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="jaxonnx-"))
        save(folder / path.name)
        raise CommandError(f"{error}; the trained model is in {folder / path.name}") from error
    except ModelError as error:
        save(path, check=False)
        raise CommandError(f"{error}. The trained model is in {path} nevertheless") from error


def _examples(
    data: Any, model: Model, settings: Mapping[str, Any], size: int | None
) -> tuple[Model, Source]:
    """Return the examples of a file in their order, and the model with the classes of images."""
    names = {"pad", "length_buckets", "loss", "preprocess", "columns"} & settings.keys()
    chosen = Settings(batch_size=size, **{name: reading.call(settings[name]) for name in names})
    model, examples, *_ = read_data(model, chosen, open_data(data, chosen), training=False)
    return model, examples


def _with_proof(report: Report, model: Model, data: Any, settings: Mapping[str, Any]) -> Report:
    assert model.sparsity is not None
    size = (model.inputs[0].shape or (None,))[0]
    size = size if isinstance(size, int) else 2
    if isinstance(data, Path):
        prepare = reading.preparation(model, argparse.Namespace())
        where = images.layout(model, prepare.size)
        few = [prepare(np.zeros((size, *where.size, where.channels), np.uint8), where)]
    else:
        few = next(_examples(data, model, settings, size)[1].batches(0)).inputs
    proof = sparse.verify(model.apply, model.params, *few, layers=model.sparsity.layers)
    dense = sum(w.nbytes for w in model.params.values())
    packed = packed_nbytes(model.params, model.sparsity)
    sizes = f"{dense:,} bytes of weights, {packed:,} packed ({packed / dense:.0%})"
    data = {
        **report.data,
        "pattern": str(model.sparsity),
        "products": [*map(vars, proof.products)],
        "bytes": dense,
        "bytes_packed": packed,
    }
    return report._replace(data=data, shown=f"{report.shown}\n{proof}\n{sizes}")
