"""What a new process costs: what is imported, and what is compiled a second time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = "flax grain IPython matplotlib onnxruntime orbax pandas PIL safetensors sklearn "
OPTIONAL += "tensorboardX torch"

CACHED = """
import json, sys, jax, numpy as np, optax, jaxonnx
from jaxonnx import demo
counts = {"misses": 0, "hits": 0}
def count(event, **_):
    for kind in counts:
        counts[kind] += event == f"/jax/compilation_cache/cache_{kind}"
jax.monitoring.register_event_listener(count)
model = demo.model()
x = np.zeros((8, 1, 8, 8), np.float32)
model(x)
loss = "softmax_cross_entropy_with_integer_labels"
data = (x, np.arange(8))
jaxonnx.train(model, data, loss=loss, optimizer=optax.adam(1e-3), batch_size=4, validation=data)
print(json.dumps(counts))
"""


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.deep
def test_import_leaves_the_optional_and_the_slow_alone():
    loaded = python("import json, sys, jaxonnx; print(json.dumps([*sys.modules]))")
    assert not {*OPTIONAL.split()} & {*loaded}


@pytest.mark.deep
def test_a_second_process_compiles_nothing(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first, second = (python(CACHED, **settings) for _ in range(2))
    assert first["misses"] > 3
    assert second == {"misses": 0, "hits": first["misses"] + first["hits"]}


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_freed_is_kept_if_asked():
    code = """
import json, sys
from pathlib import Path
from jaxonnx.cli.process import keep_pages
if sys.argv[1:]:
    keep_pages()
import numpy as np
def faults():
    return int(Path("/proc/self/stat").read_text().split()[9])
for _ in range(2):
    np.ones(1 << 23)
before = faults()
for _ in range(4):
    np.ones(1 << 23)
print(json.dumps(faults() - before))
"""
    kept, usual = python(code.replace("sys.argv[1:]", "1")), python(code)
    assert 2 * kept < usual
