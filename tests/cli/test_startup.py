"""What a new process costs: what is imported, and what is compiled a second time."""

import contextlib
import json
import os
import subprocess
import sys

import jax
import pytest

from jaxonnx.cli import process
from tests.support.paths import ROOT

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
model = demo.mlp()
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


NEW = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX warns of what it reads")


@NEW
@pytest.mark.deep
def test_the_command_line_keeps_programs(tmp_path):
    """As a user has it: without settings of JAX, in the user's folder for caches."""
    settings = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    settings |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    settings["JAX_LOG_COMPILES"] = settings["JAX_EXPLAIN_CACHE_MISSES"] = "1"
    network = ROOT / "jaxonnx" / "assets" / "digits_cnn.onnx"
    command = [sys.executable, "-m", "jaxonnx", "validate", network]
    said = []
    for _ in range(2):
        done = subprocess.run(command, env=settings, check=True, capture_output=True, text=True)
        said.append(done.stderr.count("PERSISTENT COMPILATION CACHE MISS"))
    assert len([*(tmp_path / "jaxonnx").glob("*-cache")]) > 0
    assert said[0] > said[1]
    assert "cpu_aot_loader" not in done.stderr  # "Loading XLA:CPU AOT result..."


@NEW
def test_programs_not_read_for_longest_go_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(process, "PROGRAMS", 250)
    (tmp_path / "jaxonnx").mkdir()
    for i, name in enumerate(("second", "first", "third")):
        file = tmp_path / "jaxonnx" / name
        file.write_bytes(bytes(100))
        os.utime(file, (1e9, 1e9 + (i if i != 1 else -1)))
    with restored("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"):
        process.keep_programs()
        assert {file.name for file in (tmp_path / "jaxonnx").iterdir()} == {"second", "third"}
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jaxonnx")
        process.keep_programs(tmp_path)
        process.keep_programs()  # JAX has a folder
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)


def test_a_home_that_cannot_be_written_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with restored("jax_compilation_cache_dir"):
        process.keep_programs()
        assert jax.config.jax_compilation_cache_dir is None


@contextlib.contextmanager
def restored(*names):
    """Let JAX have no settings of these names in a block."""
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


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


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["--version"], 0), (["train", "--help"], 0), (["train", "--epoch", "3"], 2)],
)
def test_what_the_command_says_of_itself_imports_nothing_slow(arguments, status):
    """A tenth of a second, in place of three for JAX, ONNX and optax."""
    code = f"""import json, sys
from jaxonnx.cli import main
try:
    main({arguments})
except SystemExit as end:
    print(json.dumps([end.code, *{{name.partition(".")[0] for name in sys.modules}}]))
"""
    found, *loaded = python(code)
    assert found == status
    assert not {"jax", "onnx", "optax", "numpy", "rich"} & {*loaded}
