"""What all tests share: programs are compiled once for all runs, and forgotten when a file ends."""

import copy
import gc
import os
import resource
import zlib
from unittest import mock

import jax
import numpy as np
import pytest

PER_CLEARING = 100
"""Tests after which the programs in memory are forgotten, in the middle of a file too."""

CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def pytest_addoption(parser):
    parser.addoption("--part", metavar="I/N", help="run part I (from 0) of N of what is selected")


def pytest_configure(config):
    """Keep compiled programs in pytest's cache, for this process and those that it starts.

    `pytest --cache-clear` compiles anew, `pytest -p no:cacheprovider` leaves JAX as it is.
    """
    if hasattr(config, "cache") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = {"jax_compilation_cache_dir": str(config.cache.mkdir("jax"))}
        for name, value in (CACHE | folder).items():
            os.environ[name.upper()] = str(value)
            jax.config.update(name, value)
    # Another worker may be writing the very entry: what cannot be read is compiled.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache")
    # XLA stores no program with calls of oneDNN (jaxonnx/lowering/_compile.py)
    unstored = "ignore:Error writing persistent compilation cache entry .*MemoryError"
    config.addinivalue_line("filterwarnings", unstored)


def pytest_sessionstart():
    """Search for no garbage in what is collected: it all stays, and is half a million objects."""
    gc.disable()


def pytest_collection_finish():
    """Leave out of every later search what was collected."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config, items):
    """Select a part of the tests, and put those of one case side by side, in one worker.

    Tests of one case share what is expected: all functions of a module have it in one part. The
    parts take about the same time.
    """

    def find_case(item):
        return item.callspec.params.get("case") if hasattr(item, "callspec") else None

    def name(item):
        module = item.nodeid.partition("::")[0]
        return item.nodeid if find_case(item) is None else f"{module}[{item.callspec.id}]"

    if part := config.getoption("part"):
        index, count = map(int, part.split("/"))
        items[:] = [item for item in items if zlib.crc32(name(item).encode()) % count == index]
    places: dict[object, int] = {}

    def place(item):
        case = find_case(item)
        key = item.nodeid if case is None else (item.path, id(case))
        return places.setdefault(key, len(places))

    items.sort(key=place)


def pytest_runtest_setup(item):
    """Let a test draw from its file's generators what it draws alone, after whatever tests."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("there is no GPU")
    states = item.session.stash.setdefault(STATES, {})
    for name, value in vars(getattr(item, "module", None) or item).items():
        if isinstance(value, np.random.Generator):
            state = states.setdefault((item.path, name), copy.deepcopy(value.bit_generator.state))
            value.bit_generator.state = state


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Forget compiled programs, each of which takes memory."""
    done = item.session.stash[DONE] = item.session.stash.get(DONE, 0) + 1
    if nextitem is None or nextitem.path != item.path or done % PER_CLEARING == 0:
        jax.clear_caches()
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Let XLA's backend optimize less: most tests compile longer than they run.

    The programs stay the same; their machine code is slower, and its last bits are others:
    fixtures of all scopes have it, too. The tests of `OPTIMIZED` run what users run.
    """
    if item.path.stem in OPTIMIZED and not item.get_closest_marker("deep"):
        return (yield)
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    try:
        with mock.patch.dict(os.environ, {name.upper(): "1"}):  # for processes that a test starts
            return (yield)
    finally:
        jax.config.update(name, before)


OPTIMIZED = {
    f"test_{name}"
    for name in (
        *("cast", "divide", "elementwise", "exact_quotients", "lowering", "model", "rounded"),
        *("sparse_cpu", "sparse_masks", "sparse_products", "sparse_proof", "step"),
    )
}
"""Files of tests that look at last bits, or that compute more than they compile."""
DONE = pytest.StashKey[int]()
STATES = pytest.StashKey[dict]()


def pytest_sessionfinish():
    """Add the most memory that this process had to the file JAXONNX_TEST_MEMORY."""
    if file := os.environ.get("JAXONNX_TEST_MEMORY"):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        with open(file, "a") as out:
            print(os.environ.get("PYTEST_XDIST_WORKER", "main"), peak, "MB", file=out)
