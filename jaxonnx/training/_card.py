"""The model card of a run: the README.md of a folder, as the Hugging Face hub reads it."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jaxonnx._atomic_write import write_atomically
from jaxonnx._data.batches import Examples, Source
from jaxonnx._graph.uses import weights
from jaxonnx._text import format_count
from jaxonnx.llm import ModelFolder
from jaxonnx.model import Model
from jaxonnx.training._report import ReportSource, format_setting, list_changed, list_versions

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


def has_other_card(folder: Path, model: Model) -> bool:
    """Check whether a folder has a card that someone else wrote for it."""
    text, base = _read(folder / NAME), _read_base_card(model)
    return bool(text) and _MARK not in text and text != base


def write_card(
    result: ReportSource, folder: Path, license: str | None = None, base: str | None = None
) -> None:
    """Write the card of a run into the folder of its model or adapters."""
    model = result.model
    base, head = base or _find_base(model, folder), _HEAD.match(_read_base_card(model))
    if license is None and head and (line := re.search(r"^license: *(\S+)", head[1], re.M)):
        license = line[1]
    present = (library for name, library in _LIBRARIES if (folder / name).is_file())
    fields = {
        "base_model": base,
        "library_name": next(present, "onnx"),
        "pipeline_tag": model.folder.task if model.folder else "",
        "license": license,
        "tags": ["jaxonnx", *(["lora"] if result.lora else [])],
    }
    # JSON is YAML
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items() if value]
    text = "\n".join(["---", *lines, "---", _MARK, "", *_list_sections(result, base)])
    with write_atomically(folder / NAME) as written:
        written.write_text(text + "\n", "utf-8")


def describe_data(name: str, examples: Source) -> str:
    """Return the name of the data and the number of its examples, as far as they are known."""
    count = format_count(len(examples.rows), "example") if isinstance(examples, Examples) else ""
    return ", ".join(filter(None, [name, count]))


def _list_sections(result: ReportSource, base: str) -> Iterator[str]:
    model, history, run = result.model, result.history, result.run
    named = f"[{base}](https://huggingface.co/{base})" if base else "an ONNX file"
    yield f"# {base.rpartition('/')[2] or model.proto.graph.name or 'A model'}, fine-tuned"
    yield f"\nFine-tuned from {named} with [jaxonnx](https://pypi.org/project/jaxonnx/)."
    yield f"\n{history}"
    yield from (f"\n* {note}" for note in history.notes)
    about = {"data": run.data if run else "", "quantization": _describe_types(model)}
    about["sparsity"] = _describe_sparsity(model)
    if result.lora is not None:
        weights = f"{len(result.lora.layouts)} weights"
        about["adapters"] = f"rank {result.lora.rank}, alpha {result.lora.alpha:g}, of {weights}"
    settings = list_changed(run.settings) if run else {}
    about |= {name: format_setting(value) for name, value in settings.items()}
    yield "\n## Training\n"
    yield from _table(("setting", "value"), [(k, v) for k, v in about.items() if v])
    if history.epochs:
        names = dict.fromkeys(n for row in history.epochs for n in row if "/" not in n)
        yield "\n## Losses and metrics\n"
        rows = [[format_setting(row.get(name, "")) for name in names] for row in history.epochs]
        yield from _table([*names], rows)
    yield "\n## Versions\n"
    yield from _table(("package", "version"), list_versions())


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(str(x).replace('|', '/') for x in row)} |"


def _describe_types(model: Model) -> str:
    """Count the matrices in few bits by their form."""
    meanings = weights(model.graph, model.tensors).values()
    forms = Counter(str(weight.storage) for weight in meanings if weight.storage)
    return ", ".join(f"{count} matrices in {form}" for form, count in forms.items())


def _describe_sparsity(model: Model) -> str:
    layers = model.sparsity.layers if model.sparsity else ()
    patterns = Counter(str(layer.pattern) for layer in layers)
    return ", ".join(f"{count} weights of {pattern}" for pattern, count in patterns.items())


def _find_base(model: Model, folder: Path) -> str:
    """Return the repository of the hub with the base model; empty if that is not known.

    The configuration of adapters names it, the hub's cache, or what transformers exported.
    """
    home = model.folder
    names = [ModelFolder(folder).read_json(ADAPTERS).get("base_model_name_or_path")]
    names += [home.repository, home.origin] if home else []
    return next((name for name in names if name and _REPOSITORY.fullmatch(name)), "")


def _read_base_card(model: Model) -> str:
    return _read(model.folder.path / NAME) if model.folder else ""


def _read(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""
