"""Check that type checkers know the type of each public name.

    python -m tests.support.public_types

pyright reports on the installed package. Modules of operators and of rules for primitives are left
out: their functions read like the specification, and users call none of them.
"""

import json
import subprocess
import sys

INSIDE = (
    *("jaxonnx.__main__", "jaxonnx.cli", "jaxonnx.demo", "jaxonnx.docs", "jaxonnx.lowering"),
    *("jaxonnx.onnx_out.passes", "jaxonnx.onnx_out.rules", "jaxonnx.ops", "jaxonnx.views"),
)
UNTYPED = {
    "jaxonnx.optim.OnnxTransformation",  # a subclass of a class of optax, which has no py.typed
    *("jaxonnx.add_training", "jaxonnx.model.add_training"),
    *("jaxonnx.optim.adam", "jaxonnx.optim.adagrad", "jaxonnx.optim.momentum"),
}
"""Names whose type has a part that another package does not declare."""


def find_unknown() -> tuple[list[str], int]:
    """Return the public names of unknown type, and the number of public names."""
    command = [sys.executable, "-m", "pyright", "--verifytypes", "jaxonnx", "--ignoreexternal"]
    done = subprocess.run([*command, "--outputjson"], capture_output=True, text=True, check=False)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    public = [s for s in symbols if s["isExported"] and not s["name"].startswith(INSIDE)]
    unknown = [s["name"] for s in public if not s["isTypeKnown"]]
    return [name for name in unknown if name not in UNTYPED], len(public)


if __name__ == "__main__":
    names, count = find_unknown()
    print(f"{count - len(names)} of {count} public names have a known type", *names, sep="\n")
    sys.exit(bool(names) or count < 100)
