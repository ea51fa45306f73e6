"""The site: pages, reference and notebooks of a checkout, built by Material for MkDocs.

The pages link to each other, to notebooks and to pictures as files of the repository, as GitHub
shows them. Here they are copied to a folder with addresses of a site, and these links follow.
"""

import base64
import inspect
import json
import logging
import posixpath
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxonnx
from jaxonnx.docs import entry, markdown, public_names

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ASSETS = ("site.css", "site.js")

_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_NAME = re.compile(r"(?<![\[`])`(jaxonnx(?:\.\w+)+)(\([^`]*\))?`(?![`\]])")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_INDENT = re.compile(r"^( +)", re.MULTILINE)
"""Two spaces where GitHub reads a part of a list's entry; Python-Markdown wants four."""

_LATER = re.compile(r"(\n\n [^\n]*(?:\n [^\n]*)*\n)(?=\* )")
"""A later paragraph of an entry, after which Python-Markdown wants a blank line."""


def build_site(site: Path, url: str | None = None, repository: str | None = None) -> None:
    """Build the site into a folder.

    Args:
      site: the folder, whose contents are replaced.
      url: the address of the site, for its map and its canonical addresses; by default
        `Documentation` under `[project.urls]` in pyproject.toml.
      repository: the address of the repository, for "edit this page" and links to sources; by
        default `Repository` under `[project.urls]`. Without it there are no such links.

    Raises:
      SystemExit: a link leads nowhere, or no menu leads to a page.
    """
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    logging.basicConfig(format="%(levelname)s: %(message)s")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    urls = project.get("urls", {})
    repository = repository or urls.get("Repository")
    with tempfile.TemporaryDirectory() as folder:
        menu = write_pages(Path(folder), repository)
        config = load_config(
            str(HERE / "mkdocs.yml"),
            site_name=f"jaxonnx {jaxonnx.__version__}",
            site_description=project["description"],
            site_url=url or urls.get("Documentation"),
            repo_url=repository,
            docs_dir=folder,
            site_dir=str(site.absolute()),
            strict=True,
        )
        config["nav"].append({"Reference": menu})
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
        config.plugins.on_shutdown()


def write_pages(folder: Path, repository: str | None) -> list[Any]:
    """Write all pages in Markdown, with their pictures; return the menu of the reference."""
    names, menu = map_names()
    pages = Pages(map_places(), names, repository)
    for source, place in pages.places.items():
        path, target = ROOT / source, folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if place == "reference/index.md":
            lines = ["# Reference", "", "Every public name, from the docstrings.", ""]
            for module, values in public_names():
                lines += [f"## {module.__name__}", "", *markdown(module.__doc__ or ""), ""]
                for name, value in values.items():
                    summary = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
                    page, label = (
                        posixpath.basename(names[name]),
                        name.removeprefix(module.__name__ + "."),
                    )
                    lines.append(f"* [`{label}`]({page}): {summary}")
                lines.append("")
            text = "\n".join(lines)
        elif path.suffix == ".ipynb":
            shutil.copy(path, target.with_suffix(".ipynb"))
            text = convert_notebook(path, target)
        elif path.suffix == ".md":
            text = path.read_text("utf-8")
        else:
            shutil.copy(path, target)
            continue
        target.write_text(pages.finish(text, source, place), "utf-8")
    for place, (source, text) in _reference_pages(names).items():
        (folder / place).write_text(pages.finish(text, source, place), "utf-8")
    return menu


def map_places() -> dict[str, str]:
    """Map the files of the repository that the site shows to their places in it."""
    places = {f"jaxonnx/docs/{path.name}": path.name for path in sorted(HERE.glob("*.md"))}
    places |= {
        "README.md": "overview.md",
        "benchmarks/README.md": "benchmarks.md",
        ".github/CONTRIBUTING.md": "contributing.md",
        "jaxonnx/docs/reference.md": "reference/index.md",
    }
    places |= {f"jaxonnx/docs/{name}": f"assets/{name}" for name in ASSETS}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        places[f"notebooks/{path.name}"] = f"notebooks/{path.stem}.md"
    for path in [*HERE.glob("gallery/*.png"), *ROOT.glob("benchmarks/charts/*.png")]:
        places[path.relative_to(ROOT).as_posix()] = f"{path.parent.name}/{path.name}"
    return places


def map_names() -> tuple[dict[str, str], list[Any]]:
    """Map public names to their pages, one for all errors; return the menu of these pages, too."""
    names: dict[str, str] = {}
    menu: list[Any] = ["reference/index.md"]
    for module, values in public_names():
        for name, value in values.items():
            error = inspect.isclass(value) and issubclass(value, Exception)
            names[name] = f"reference/{'jaxonnx.Error' if error else name}.md"
        pages = {names[name]: name.removeprefix(f"{module.__name__}.") for name in values}
        pages |= {"reference/jaxonnx.Error.md": "Errors"} if module is jaxonnx else {}
        menu.append({module.__name__: [{title: page} for page, title in pages.items()]})
    return names, menu


def _reference_pages(names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the source file and the text of each page of the reference."""
    pages: dict[str, tuple[str, str]] = {}
    for _, values in public_names():
        for name, value in values.items():
            text = "\n".join(re.sub(r"^##(?=#+ )", "", line) for line in entry(name, value)) + "\n"
            file = Path(inspect.getsourcefile(value) or __file__).relative_to(ROOT).as_posix()
            if names[name] in pages:
                file, before = pages[names[name]]
                text = before + re.sub("^# ", "## ", text)
            pages[names[name]] = file, text
    return pages


def convert_notebook(path: Path, page: Path) -> str:
    """Return a notebook with its stored outputs in Markdown; write its pictures beside the page."""
    parts: list[str] = []
    for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            if "image/png" in shown:
                picture = page.with_name(f"{page.stem}_{len(parts)}.png")
                picture.write_bytes(base64.b64decode(shown["image/png"]))
                parts.append(f"![Output of cell {number}]({picture.name})")
            elif "text/html" in shown:
                parts.append(f'<div class="output">{"".join(shown["text/html"])}</div>')
            else:
                text = "".join(shown.get("text/plain", output.get("text", ""))).strip("\n")
                text = _COLOUR.sub("", text)
                more = parts[-1].startswith("```text")  # a stream comes in pieces
                start = parts.pop().removesuffix("```") if more else "```text\n"
                parts.append(f"{start}{text}\n```")
    parts.insert(1, f"[Download this notebook]({path.name})")
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class Pages:
    """The places of files and names in the site, and the address of the repository."""

    places: Mapping[str, str]
    names: Mapping[str, str]
    repository: str | None

    def finish(self, text: str, source: str, place: str) -> str:
        """Return a page whose links follow the files to their places, with its data for MkDocs."""

        def follow(match: re.Match[str]) -> str:
            label, path, anchor = match[1], match[2], match[3] or ""
            file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
            if file in self.places:
                return f"[{label}]({_relative(self.places[file], place)}{anchor})"
            if path == posixpath.basename(source) or not (ROOT / file).exists():
                return match[0]  # lies beside the page, or MkDocs reports it
            address = f"{self.repository}/blob/main/{file}{anchor}"
            return f"[{label}]({address})" if self.repository else label

        def link(match: re.Match[str]) -> str:
            page = self.names.get(match[1], place)
            return match[0] if page == place else f"[{match[0]}]({_relative(page, place)})"

        def edit(part: str) -> str:
            part = part.replace("<details>", '<details markdown="1" open>')
            lines = _LINK.sub(follow, part).split("\n")
            return "\n".join(x if x.startswith("#") else _NAME.sub(link, x) for x in lines)

        parts = _FENCE.split(text)
        parts[::2] = (_INDENT.sub(r"\1\1", _LATER.sub(r"\1\n", edit(x))) for x in parts[::2])
        parts[1::2] = (_INDENT.sub(r"\1\1", x) if x[0] == " " else x for x in parts[1::2])
        head = json.dumps({"source": source, "description": _describe(text)})
        return f"---\n{head}\n---\n{''.join(parts)}"


def _relative(page: str, place: str) -> str:
    return posixpath.relpath(page, posixpath.dirname(place))


def _describe(text: str) -> str:
    """Return the first paragraph of a page, for search engines."""
    paragraphs = _FENCE.sub("", text).split("\n\n")
    first = next((p for p in paragraphs if re.match(r"[A-Z]", p)), "")
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split())).replace("`", "")[:300]


def format_math(source: str, *_: Any, **__: Any) -> str:
    """Return a formula of LaTeX as MathML, which browsers show without a script."""
    from latex2mathml.converter import convert

    for latex, readable in (("{aligned}", "{align*}"), (r"\_", "_"), ("'", "\N{PRIME}")):
        source = source.replace(latex, readable)
    return convert(source, display="block")


def on_page_context(context: Any, page: Any, config: Any, **_: Any) -> Any:
    """Point "edit this page" to the file that a page was made from (a hook of MkDocs)."""
    source = page.meta["source"]
    page.edit_url = f"{config.repo_url}/edit/main/{source}" if config.repo_url else None
    return context
