"""Check that notebooks hold the outputs of one whole run, and no error.

python -m tests.support.notebook_outputs notebooks/*.ipynb
"""

import json
import sys
from pathlib import Path


def faults(path: Path) -> list[str]:
    """Return what is wrong with a notebook's outputs."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells]
    found = [] if counts == [*range(1, len(cells) + 1)] else [f"cells were run as {counts}"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    return found + [o["evalue"] for o in outputs if o["output_type"] == "error"]


if __name__ == "__main__":
    wrong = [f"{name}: {fault}" for name in sys.argv[1:] for fault in faults(Path(name))]
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))
