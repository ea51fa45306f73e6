"""Pages about a run: its HTML report, and the model card that the Hugging Face hub reads."""

import base64
import io
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxonnx._data import images
from jaxonnx._data.batches import Batch, Examples, Source
from jaxonnx._files import write_atomically
from jaxonnx._graph.uses import uses, weights
from jaxonnx._io.protos import modules
from jaxonnx._require import name_type
from jaxonnx._rewrite.network import enter
from jaxonnx.errors import Error
from jaxonnx.lora import Adapters
from jaxonnx.model import Model
from jaxonnx.quantization import list_layers, plot_ranges
from jaxonnx.training._data import fit_to_evaluation
from jaxonnx.training._evaluate import evaluate_objective
from jaxonnx.training._loop.history import History
from jaxonnx.training._objective import find_objective
from jaxonnx.training._settings import Settings
from jaxonnx.views import PackedRows

NAME, ADAPTERS = "README.md", "adapter_config.json"
_MARK = "<!-- written by jaxonnx -->"
_LIBRARIES = (
    (ADAPTERS, "peft"),
    ("model.safetensors", "transformers"),
    ("model.safetensors.index.json", "transformers"),
    ("genai_config.json", "onnxruntime-genai"),
)
"""By a file of the folder, the library that the hub shows; otherwise ONNX."""
_HEAD = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")

_CLASSES = 30
"""Classes up to which there is a confusion matrix."""
_PACKAGES = ("jaxonnx", "jax", "jaxlib", "numpy", "optax", "onnx")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e4e4e4;
         vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td { overflow-wrap: anywhere; } .number, .word { white-space: nowrap; overflow-wrap: normal; }
.sparse { color: #8a4b00; } .trained { color: #14602b; } .frozen, small { color: #666; }
td:first-child { white-space: nowrap; } summary { cursor: pointer; }
"""


@dataclass(frozen=True)
class Run:
    """The settings and the data of a run.

    Attributes:
      held_out: the validation data.
      data: the name of the data, and the number of its examples, as far as they are known.
      packing: the view with which the model takes rows of several texts, if the data has such.
    """

    settings: Settings
    held_out: Source | None
    data: str
    packing: PackedRows | None


class ReportSource(Protocol):
    """The part of a `Result` that the pages show."""

    @property
    def model(self) -> Model: ...
    @property
    def history(self) -> History: ...
    @property
    def changes(self) -> Mapping[str, float]: ...
    @property
    def lora(self) -> Adapters | None: ...
    @property
    def run(self) -> Run | None: ...


def write_report(
    result: ReportSource,
    path: str | os.PathLike[str],
    configuration: Mapping[str, Any] | None,
) -> None:
    """Write the page; `Result.report` has the arguments."""
    text = "\n".join(_write_page(result, configuration))
    with write_atomically(path) as file:
        file.write_text(text, "utf-8")


def _write_page(result: ReportSource, configuration: Mapping[str, Any] | None) -> Iterator[str]:
    model, history = result.model, result.history
    title = f"Training of {model.proto.graph.name or 'a model'}"
    yield "<!doctype html>"
    yield f"<html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
    yield "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    yield f"<style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(title)}</h1>"
    yield from (f"<p>{escape(line)}</p>" for line in (str(history), *history.notes))
    yield "<h2>Curves</h2>"
    yield _draw_picture("curves of losses and metrics", history.plot)
    yield from _list_epochs(history)
    matrix = confusion(result)
    if matrix is not None:
        yield "<h2>Confusion matrix of the validation data</h2>"
        yield _draw_picture("confusion matrix", matrix.plot, (6, 5))
        yield f"<details><summary>Counts</summary><pre>{escape(str(matrix))}</pre></details>"
    yield "<h2>Layers</h2>"
    yield from _list_layers(result)
    yield from _list_rounded(result)
    if configuration is None:
        configuration = {} if result.run is None else list_changed(result.run.settings)
    if configuration:
        yield "<h2>Configuration</h2>"
        yield from _write_table(
            ("setting", "value"), [(k, format_setting(v)) for k, v in configuration.items()]
        )
    yield "<h2>Versions</h2>"
    yield from _write_table(("", ""), list_versions())
    yield "</body></html>"


def _list_epochs(history: History) -> Iterator[str]:
    names = list(dict.fromkeys(n for row in history.epochs for n in row if "/" not in n))
    rows = [[row.get(name, "") for name in names] for row in history.epochs]
    yield "<details><summary>Metrics of each epoch</summary>"
    yield from _write_table(names, rows)
    if history.events:
        heads = ("step", "event", "why")
        yield from _write_table(
            heads, [[event[name] for name in heads] for event in history.events]
        )
    yield "</details>"


def _list_layers(result: ReportSource) -> Iterator[str]:
    """Yield a table of tensors by the layer that first uses each."""
    model = result.model
    learned = {**model.params, **model.state}
    nodes = {name: node for node in model.proto.graph.node for name in node.output}
    places: dict[str, tuple[str, str]] = {}
    for use in uses(model.graph, model.tensors):
        if not use.passes and use.name in learned and use.outer.outputs:
            node = nodes.get(use.outer.outputs[0])
            path = [] if node is None else modules(node)
            name = path[-1] if path else (node and node.name) or use.outer.outputs[0]
            places.setdefault(use.name, (name, use.outer.op.name))
    rows = []
    for name in [*places, *(name for name in learned if name not in places)]:
        x, change = learned[name], result.changes.get(name, 0.0)
        moved = "from zero" if np.isinf(change) else f"{change:.2%}" if change else ""
        shape = " x ".join(map(str, x.shape)) or "scalar"
        zeros = f"{float(np.mean(np.asarray(x) == 0)):.0%}" if x.size else ""
        layer, operator = places.get(name, ("", ""))
        status = _describe_status(result, name)
        rows.append([layer, operator, name, shape, x.size, status, moved, zeros])
    heads = ("layer", "operator", "tensor", "shape", "size", "", "change", "zeros")
    yield from _write_table(heads, rows)
    trained = sum(x.size for x in model.params.values())
    frozen = sum(x.size for x in model.state.values())
    yield f"<p><small>{trained:,} parameters trained, {frozen:,} frozen.</small></p>"


def _list_rounded(result: ReportSource) -> Iterator[str]:
    """Draw the rounded inputs of the layers of a quantized network, and list them in a table."""
    model, batch = _fit_to_validation(result)
    layers = list_layers(model, None if batch is None else batch.inputs)
    if not layers:
        return
    yield "<h2>Ranges</h2>"
    height = 1.5 + 0.3 * len(layers)
    yield _draw_picture("ranges of layers", lambda axes: plot_ranges(layers, axes), (9, height))
    scales = "smallest scale", "largest scale"
    heads = ("layer", "operator", "tensor", "type", "scales", *scales, "range", "clipped")
    rows = []
    for layer in layers:
        for tensor in (*([layer.weight] if layer.weight else []), *layer.activations):
            clipped = "" if tensor.clipped is None else f"{tensor.clipped:.2%}"
            ends = f"{tensor.range[0]:.4g} to {tensor.range[1]:.4g}"
            cells = (tensor.name, tensor.type, tensor.scales, *tensor.scale, ends, clipped)
            rows.append([layer.name, layer.operator, *cells])
    yield from _write_table(heads, rows)
    origin = "the first batch of the validation data" if batch is not None else "weights only"
    yield f"<p><small>Clipped values are counted on {origin}.</small></p>"


def _describe_status(result: ReportSource, name: str) -> str:
    """Return the status of a tensor: trained, frozen, sparse."""
    model = result.model
    if name not in model.params:
        return "renewed" if result.changes.get(name) else "frozen"
    if result.lora is not None and name in result.lora.layouts:
        return "adapters"
    if result.lora is not None and name not in result.lora.values:
        return "frozen"
    layers = () if model.sparsity is None else model.sparsity.layers
    return next((f"sparse {x.pattern}" for x in layers if x.name == name), "trained")


def confusion(result: ReportSource) -> Any:
    """Return the confusion matrix of validation data in one piece, with few classes, or None."""
    run = result.run
    if run is None or run.settings.loss is None or not isinstance(run.held_out, Examples):
        return None
    model, _ = _fit_to_validation(result)
    goal = find_objective(model, run.settings.loss, None)
    if len(goal.terms) != 1:
        return None
    (term,) = goal.terms
    output, axis = term.output, term.loss.class_axis
    shape = model.outputs[0 if output is None else goal.names.index(output)].shape
    classes = shape[axis] if shape and axis is not None else None
    if not isinstance(classes, int) or classes > _CLASSES:
        return None
    name = "confusion_matrix"
    goal = find_objective(model, run.settings.loss, name if output is None else {output: name})
    labels = images.preparation(result.model).labels
    values = evaluate_objective(goal, run.held_out, labels, progress=False)
    return next(value for key, value in values.items() if key.endswith(name))


def _fit_to_validation(result: ReportSource) -> tuple[Model, Batch | None]:
    """Return the model with the inputs of the validation data, and the first batch of these."""
    run = result.run
    if run is None or not isinstance(run.held_out, Examples):
        return result.model, None
    batch = next(run.held_out.batches(0))
    model = fit_to_evaluation(result.model, run.settings, (batch.inputs, batch.targets))
    return model if run.packing is None else enter(model, run.packing), batch


def list_changed(settings: Settings) -> dict[str, Any]:
    """Return the settings that say more than their defaults."""
    always = ("loss", "epochs", "batch_size", "seed")
    values = [
        (field.name, getattr(settings, field.name), field.default) for field in fields(settings)
    ]
    return {name: x for name, x, default in values if name in always or x is not default}


def format_setting(value: Any) -> str:
    """Format a setting; one without a short form by its name or type."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str | int | None):
        return str(value)
    if isinstance(value, Mesh):
        value = dict(value.shape)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {format_setting(x)}" for name, x in value.items())
    if isinstance(value, list | tuple) and type(value) in (list, tuple) and len(value) <= _CLASSES:
        return ", ".join(map(format_setting, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.ndarray | jax.Array):
        return f"{value.dtype}{[*value.shape]}"
    return getattr(value, "__name__", None) or name_type(value)


def list_versions() -> list[tuple[str, str]]:
    versions = [("python", platform.python_version()), ("machine", platform.platform())]
    versions.append(("device", f"{jax.device_count()} x {jax.devices()[0].device_kind}"))
    for name in _PACKAGES:
        try:
            versions.append((name, version(name)))
        except PackageNotFoundError:  # not installed, but on the path
            continue
    return versions


def _write_table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield "<div class='wide'><table>"
    if any(heads):
        yield f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"
    for row in rows:
        yield f"<tr>{''.join(map(_write_cell, row))}</tr>"
    yield "</table></div>"


def _write_cell(value: Any) -> str:
    if isinstance(value, int | float):
        text = f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
        return f"<td class='number'>{text}</td>"
    word = value.split(" ")[0]
    kind = f" class='word {word}'" if word in ("trained", "frozen", "sparse") else ""
    return f"<td{kind}>{escape(value)}</td>"


def _draw_picture(title: str, plot: Any, size: tuple[float, float] = (9, 4.5)) -> str:
    """Return a drawing as an SVG inside of an `img`, so that its names meet no other's."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Error("a report needs matplotlib: pip install 'jaxonnx[plot]'") from error
    figure, buffer = Figure(figsize=size, layout="constrained"), io.BytesIO()
    plot(figure.subplots())
    figure.savefig(buffer, format="svg")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='{escape(title)}' src='data:image/svg+xml;base64,{data}'>"


def has_other_card(folder: Path, model: Model) -> bool:
    """Check whether a folder has a card that someone else wrote for it."""
    text, base = _read_text(folder / NAME), _read_base_card(model)
    return bool(text) and _MARK not in text and text != base


def write_card(result: ReportSource, folder: Path, license: str | None, base: str | None) -> None:
    """Write the card of a run into the folder of its model or adapters."""
    model = result.model
    base, head = base or _find_base(model, folder), _HEAD.match(_read_base_card(model))
    if license is None and head and (line := re.search(r"^license: *(\S+)", head[1], re.M)):
        license = line[1]
    present = (library for name, library in _LIBRARIES if (folder / name).is_file())
    entries = {
        "base_model": base,
        "library_name": next(present, "onnx"),
        "pipeline_tag": model.folder.task if model.folder else "",
        "license": license,
        "tags": ["jaxonnx", *(["lora"] if result.lora else [])],
    }
    # JSON is YAML
    lines = [f"{name}: {json.dumps(value)}" for name, value in entries.items() if value]
    text = "\n".join(["---", *lines, "---", _MARK, "", *_list_sections(result, base)])
    with write_atomically(folder / NAME) as written:
        written.write_text(text + "\n", "utf-8")


def _list_sections(result: ReportSource, base: str) -> Iterator[str]:
    model, history, run = result.model, result.history, result.run
    named = f"[{base}](https://huggingface.co/{base})" if base else "an ONNX file"
    yield f"# {base.rpartition('/')[2] or model.proto.graph.name or 'A model'}, fine-tuned"
    yield f"\nFine-tuned from {named} with [jaxonnx](https://pypi.org/project/jaxonnx/)."
    yield f"\n{history}"
    yield from (f"\n* {note}" for note in history.notes)
    meanings = weights(model.graph, model.tensors).values()
    forms = Counter(str(weight.storage) for weight in meanings if weight.storage)
    about = {
        "data": run.data if run else "",
        "quantization": ", ".join(f"{count} matrices in {form}" for form, count in forms.items()),
    }
    layers = model.sparsity.layers if model.sparsity else ()
    patterns = Counter(str(layer.pattern) for layer in layers)
    about["sparsity"] = ", ".join(
        f"{count} weights of {pattern}" for pattern, count in patterns.items()
    )
    if result.lora is not None:
        adapted = f"{len(result.lora.layouts)} weights"
        about["adapters"] = f"rank {result.lora.rank}, alpha {result.lora.alpha:g}, of {adapted}"
    settings = list_changed(run.settings) if run else {}
    about |= {name: format_setting(value) for name, value in settings.items()}
    yield "\n## Training\n"
    yield from _write_markdown_table(("setting", "value"), [(k, v) for k, v in about.items() if v])
    if history.epochs:
        names = dict.fromkeys(n for row in history.epochs for n in row if "/" not in n)
        yield "\n## Losses and metrics\n"
        rows = [[format_setting(row.get(name, "")) for name in names] for row in history.epochs]
        yield from _write_markdown_table([*names], rows)
    yield "\n## Versions\n"
    yield from _write_markdown_table(("package", "version"), list_versions())


def _write_markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(str(x).replace('|', '/') for x in row)} |"


def _find_base(model: Model, folder: Path) -> str:
    """Return the repository of the hub with the base model; empty if that is not known.

    The configuration of adapters names it, the hub's cache, or what transformers exported.
    """
    home = model.folder
    configuration = json.loads(_read_text(folder / ADAPTERS) or "{}")
    names = [configuration.get("base_model_name_or_path")]
    names += [home.repository, home.origin] if home else []
    return next((name for name in names if name and _REPOSITORY.fullmatch(name)), "")


def _read_base_card(model: Model) -> str:
    return _read_text(model.folder.path / NAME) if model.folder else ""


def _read_text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""
