"""Write the first cells of notebooks: what each takes, where it opens, how it installs.

    python -m tests.support.notebook_heads

The address of the repository is that of pyproject.toml. Other cells and outputs stay as they are.
"""

import json
import re
import tomllib
from pathlib import Path

from tests.support.paths import ROOT

TAKES = {
    "chats": "half a minute",
    "language_model": "a minute",
    "lora": "half a minute",
    "many_devices": "half a minute",
    "onnx_training": "ten seconds",
    "optax_chains": "ten seconds",
    "quantization": "a minute",
    "quickstart": "half a minute",
    "saliency_and_per_example_gradients": "half a minute",
    "sparse_training": "a minute",
    "text": "half a minute",
    "transfer_learning": "half a minute",
}
"""The time of a run on two cores, with nothing beside it."""
EXTRAS = {"chats": "notebooks,text", "language_model": "notebooks,text"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
SETUP = """\
# Outside of a checkout, on Colab or Kaggle: fetch the repository and install it.
import subprocess
import sys
from importlib.util import find_spec

if find_spec("jaxonnx") is None:
    address = "{repository}"
    subprocess.run(["git", "clone", "--depth", "1", address, "repository"], check=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "repository[{extras}]"]
    subprocess.run(install, check=True)
    sys.path.insert(0, "repository")"""


def places(stem: str) -> str:
    """Return links that open a notebook elsewhere."""
    file = f"{REPOSITORY}/blob/main/notebooks/{stem}.ipynb"
    colab = file.replace("https://github.com", "https://colab.research.google.com/github")
    return f"[Colab]({colab}) or [Kaggle](https://www.kaggle.com/kernels/welcome?src={file})"


def heads(stem: str) -> tuple[str, str]:
    """Return the paragraph that a notebook's first cell ends in, and its first cell of code."""
    extras = EXTRAS.get(stem, "notebooks")
    about = (
        f"Takes {TAKES[stem]} on two cores. Needs the extra `{extras}`, and nothing that must be "
        f"downloaded. Open it in {places(stem)}."
    )
    return about, SETUP.format(repository=REPOSITORY, extras=extras)


def write(path: Path) -> str:
    """Return a notebook with its first cells written anew."""
    notebook = json.loads(path.read_text())
    about, setup = heads(path.stem)
    first, *cells = notebook["cells"]
    text = re.sub(r"\n\nTakes [^\n]* Open it in [^\n]*$", "", "".join(first["source"]))
    first["source"] = f"{text}\n\n{about}".splitlines(keepends=True)
    if "".join(cells[0]["source"]).startswith("# Outside of a checkout"):
        cells = cells[1:]
    else:
        for cell in cells:
            for part in (cell, *cell.get("outputs", ())):
                if part.get("execution_count"):
                    part["execution_count"] += 1
    code = {"cell_type": "code", "execution_count": 1, "id": "setup", "metadata": {}}
    code |= {"outputs": [], "source": setup.splitlines(keepends=True)}
    notebook["cells"] = [first, code, *cells]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        path.write_text(write(path))
