"""The commands, each a function from options to a report, and the function that runs one."""

import argparse
import json
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import jaxonnx
from jaxonnx import sparse
from jaxonnx._data import images
from jaxonnx._data.image_folders import image_paths
from jaxonnx._files import check_writable, write_atomically
from jaxonnx._graph import exporter_hints
from jaxonnx._graph.values import Value
from jaxonnx._io.formats import check_suffix
from jaxonnx._io.protos import text
from jaxonnx.cli import _inputs as reading
from jaxonnx.cli import process
from jaxonnx.cli._flags import collect_values
from jaxonnx.cli._inputs import CommandError, Report
from jaxonnx.cli._parser import LOSS
from jaxonnx.cli._training import export_step, import_step, sparsify, train
from jaxonnx.errors import Error, InputError, warn
from jaxonnx.llm import Sampling
from jaxonnx.llm import generate as continue_prompt
from jaxonnx.lora import Adapters
from jaxonnx.model import Model, operator_name
from jaxonnx.training import Interrupt


def info(options: argparse.Namespace) -> Report:
    model = reading.read(options)
    sparsity, proto = model.sparsity, model.proto
    data = {
        "graph": text(proto.graph.name),
        "producer": " ".join(map(text, (proto.producer_name, proto.producer_version))).strip(),
        "ir_version": model.proto.ir_version,
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in model.proto.opset_import},
        "inputs": [_describe(value) for value in model.inputs],
        "outputs": [_describe(value) for value in model.outputs],
        "operators": Counter(map(operator_name, model.graph.nodes)),
        "params": {name: _describe(x) for name, x in model.params.items()},
        "state": {name: _describe(x) for name, x in model.state.items()},
        "sparse": [layer.name for layer in sparsity.layers] if sparsity else [],
        "tied": {name: of for name, of in model._places.ties.items() if of in model.params},
        "without_dropout": exporter_hints.find_missing_dropout(model.proto.graph),
        "training": len(model.proto.training_info),
        "warnings": model.warnings,
    }
    if not options.layers:
        return Report(data, model)
    summary = model.summary()
    pairs = zip(summary.layers, summary.origins, strict=True)
    data["layers"] = [layer._asdict() | origin._asdict() for layer, origin in pairs]
    return Report(data, summary)


def _describe(value: Any) -> dict[str, Any]:
    """Return shape and type of an input, an output or a tensor."""
    name = {"name": value.name} if isinstance(value, Value) else {}
    return {**name, "dtype": value.dtype and str(value.dtype), "shape": value.shape}


def verify(options: argparse.Namespace) -> Report:
    proof = sparse.verify(reading.read(options))
    patterns = ", ".join(dict.fromkeys(str(product.pattern) for product in proof.products))
    return Report({"pattern": patterns, "products": [*map(vars, proof.products)]}, str(proof))


def validate(options: argparse.Namespace) -> Report:
    model: Any = options.model
    if options.any_batch or options.dequantize:
        model = reading.read(options)
    data, preprocess = None, {}
    if options.data is not None:
        data, preprocess = reading.read_unlabeled(options.data, jaxonnx.load(model), options)
    result = jaxonnx.validate(
        model,
        data,
        against=options.against,
        sizes=options.dim,
        tolerance=options.tolerance,
        **preprocess,
    )
    rows = [vars(row) for row in result.rows]
    return Report({"ok": result.ok, "rows": rows}, result, status=int(not result.ok))


def run(options: argparse.Namespace) -> Report:
    model = reading.read(options, options.outputs)
    check_writable(options.output)
    named = _outputs(model, options)
    try:
        with write_atomically(options.output) as path, path.open("wb") as file:
            np.savez(file, **named)
    except OSError as error:
        raise CommandError(f"the outputs could not be written: {error}") from error
    data = {"output": options.output, "outputs": {n: _describe(x) for n, x in named.items()}}
    shown = "\n".join(f"{n}: {x.dtype}{[*x.shape]}" for n, x in named.items())
    return Report(data, shown, written=[options.output])


def _outputs(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """Return the outputs by name, with the paths of pictures and the lengths of texts."""
    model = reading.fix(model, options)
    folder, preparation = reading.has_pictures(options.data), reading.image_options(options)
    whole = folder or reading.table(options.data) is None
    data: Any = options.data if whole else reading.inputs(options.data, model)
    names = [value.name for value in model.outputs]
    flags = (options.batch_size, options.pad, options.length_buckets)
    arrays = not whole and all(isinstance(x, np.ndarray) for x in data.values())
    plain = not preparation and flags == (None, None, None)
    if arrays and plain and len(data) == len(model.inputs):
        outputs = model(*data.values())
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return dict(zip(names, map(np.asarray, outputs), strict=True))
    outputs = model.predict(
        data,
        batch_size=options.batch_size,
        pad=options.pad,
        length_buckets=options.length_buckets,
        preprocess=preparation or None,
        progress=False if options.json else None,
    )
    named: dict[str, Any] = {"paths": [*map(str, image_paths(options.data))]} if folder else {}
    for name, x in (outputs if isinstance(outputs, dict) else {names[0]: outputs}).items():
        if isinstance(x, list):
            named[f"{name}.lengths"] = [len(row) for row in x]
            x = np.concatenate(x)
        named[name] = x
    return {name: np.asarray(x) for name, x in named.items()}


def evaluate(options: argparse.Namespace) -> Report:
    model = reading.read(options)
    where = reading.examples(options)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        check_writable(options.plots / "plot.png")
    data, _ = reading.data(where, model, options)
    result = jaxonnx.evaluate(
        model,
        data,
        metrics=options.metrics,
        loss=reading.call(reading.loss(model, options)) or (None if options.metrics else LOSS),
        batch_size=options.batch_size,
        fixed=options.fixed,
        pad=options.pad,
        length_buckets=options.length_buckets,
        columns=options.columns if isinstance(data, Path) else None,
        preprocess=reading.preprocessing(options, where) or None,
        progress=False if options.json else None,
    )
    tables = {name: x for name, x in result.items() if not isinstance(x, float)}
    plots = {} if options.plots is None else {n: options.plots / f"{n}.png" for n in tables}
    for name, path in plots.items():
        tables[name].plot().figure.savefig(path)
    lines = [f"{name}: {x:.6g}" for name, x in result.items() if isinstance(x, float)]
    lines += [f"\n{name}\n{table}" for name, table in tables.items()]
    plain = {name: table.plain() for name, table in tables.items()}
    return Report(result | plain, "\n".join(lines), written=[*plots.values()])


def quantize(options: argparse.Namespace) -> Report:
    scheme = jaxonnx.Quantization(**collect_values(options, "Quantization"))
    model, where = reading.read(options), reading.examples(options)
    check_suffix(options.output)
    check_writable(options.output)
    more = collect_values(options, "quantize")
    if options.validation is not None:
        more["validation"] = options.validation
    if "metric" in more:
        data, _ = reading.data(where, model, options)
        more["preprocess"] = reading.preprocessing(options, where) or None
        if isinstance(options.validation, Path):
            more["validation"], _ = reading.data(options.validation, model, options)
    else:
        data, preprocess = reading.read_unlabeled(where, model, options)
        more |= preprocess
    quantized = jaxonnx.quantize(model, data, scheme, **more)
    if reading.image_options(options):
        quantized = images.with_preparation(quantized, reading.preparation(model, options))
    quantized.save(options.output)
    before, after = (x.to_onnx().ByteSize() for x in (model, quantized))
    values, shown = {"output": options.output, "bytes": after}, f"{before:,} bytes became {after:,}"
    if (tried := quantized.sensitivity) is not None:
        values |= {"loss": tried.trials[-1].loss, "wider": tried.wider_types}
        shown = f"{tried}\n\n{shown}"
    return Report(values, shown, written=[options.output])


def sensitivity(options: argparse.Namespace) -> Report:
    model, where = reading.read(options), reading.examples(options)
    if options.plot is not None:
        check_writable(options.plot)
    data, preprocess = reading.read_unlabeled(where, model, options)
    values = collect_values(options, "sensitivity")
    result = jaxonnx.sensitivity(model, data, **values, **preprocess)
    if options.plot is not None:
        result.plot().figure.savefig(options.plot, bbox_inches="tight")
    written = [] if options.plot is None else [options.plot]
    return Report({"errors": result.errors, "sizes": result.sizes}, str(result), written=written)


def export_safetensors(options: argparse.Namespace) -> Report:
    values = collect_values(options, "export_safetensors")
    jaxonnx.export_safetensors(options.model, options.folder, **values)
    return Report({"output": options.folder}, None, written=[options.folder])


def classify(options: argparse.Namespace) -> Report:
    model = jaxonnx.load(options.model)
    prepare = reading.preparation(model, options)
    where = images.layout(model, prepare.size)
    if not images.says_numbers(model) and options.scale is None:
        warn(f"'{options.model}' does not say how pixels are scaled: 1/255")
    data, lines, broken = [], [], []
    paths = []
    for path in options.pictures:
        inside = image_paths(path) if path.is_dir() else [path]
        if not inside:
            raise InputError(f"the folder '{path}' has no pictures")
        paths += inside
    for path in paths:
        try:
            pixels = images.read(path, where, prepare)
        except InputError as error:
            broken.append(error)
            data.append({"picture": path, "error": str(error)})
            continue
        classes = reading.classify(model, pixels, prepare, where)[: options.top]
        data.append({"picture": path, "classes": [{"label": n, "share": p} for n, p in classes]})
        lines += [str(path), *(f"  {share:7.2%}  {label}" for label, share in classes)]
    if len(broken) == len(data):
        raise broken[0]
    for error in broken:
        warn(f"left out: {error}")
    return Report({"pictures": data}, "\n".join(lines), status=bool(broken))


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


def generate(options: argparse.Namespace) -> Report:
    prompt = options.prompt
    if options.chat:
        prompt = [*_begin(options), {"role": "user", "content": prompt}]
    elif options.system is not None:
        raise InputError("--system is for chats: pass --chat as well")
    text = _write(_read(options), prompt, options)
    return Report({"prompt": options.prompt, "text": text}, None)


def chat(options: argparse.Namespace) -> Report:
    model, messages = _read(options), _begin(options)
    for line in _lines():
        messages.append({"role": "user", "content": line})
        tokens = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        if len(tokens) >= model._generator.positions:
            raise CommandError(
                f"the conversation has {len(tokens)} tokens, and the model has positions for "
                f"{model._generator.positions}: begin a new one"
            )
        messages.append({"role": "assistant", "content": _write(model, messages, options)})
    return Report({"messages": messages}, None)


def _read(options: argparse.Namespace) -> Model:
    model = reading.read(options)
    if options.adapter is None:
        return model
    return Adapters.load(options.adapter, model).attach(model)


def _begin(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not blank; in terminals with a mark before."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _write(model: Model, prompt: Any, options: argparse.Namespace) -> str:
    """Print an answer as it comes, unless the result is to be JSON; return it."""
    settings = {"temperature": None, **collect_values(options, "Model.generate")}
    sampling = Sampling.of(model.folder, fill=True, **settings)
    count, stop = options.max_new_tokens, options.stop or None
    pieces = continue_prompt(model, prompt, count, sampling, options.seed, stop, stream=True)
    text = ""
    for piece in pieces:
        text += piece
        if not options.json:
            print(piece, end="", flush=True)
    if not options.json:
        print(flush=True)
    return text


COMMANDS = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(info, verify, validate, run, train, evaluate, sparsify, quantize, sensitivity),
        *(export_step, import_step, generate, chat, export_safetensors, classify, demo),
    )
}


def run_command(options: argparse.Namespace, own_process: bool) -> int:
    """Run a command, as `jaxonnx.cli.main` documents."""
    if not own_process:  # a program has called this
        with Interrupt():
            return _run(options)
    if options.allocator == "keep":
        process.keep_pages()
    if options.cache is None:
        process.keep_programs()
    with Interrupt(process.exit_interrupted) as interrupt:
        status = _run(options)
        process.ignore_interrupts()
        if interrupt.presses:
            process.end(status)
        return status


def _run(options: argparse.Namespace) -> int:
    """Run a command and print its report; return the exit status."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: _complain(options.verb, message)
            if options.cache is not None:
                process.keep_programs(options.cache)
            report = COMMANDS[options.verb](options)
        if options.json:
            print(json.dumps(_plain(report.data), allow_nan=False))
            return report.status
        if isinstance(report.shown, str):
            print(report.shown)
        elif report.shown is not None:
            Console().print(report.shown)
        for path in report.written:
            print(f"wrote {path}")
        return report.status
    except CommandError as error:
        _complain(options.verb, error)
        return 1
    except (Error, OSError) as error:
        _complain(options.verb, error)
        return 2
    except KeyboardInterrupt:
        _complain(options.verb, "interrupted")
        return process.INTERRUPTED


def _complain(verb: str, message: Any) -> None:
    print(f"jaxonnx {verb}: {message}", file=sys.stderr)


def _plain(value: Any) -> Any:
    """Convert values for JSON: NumPy numbers to Python's, infinite and NaN ones to null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
