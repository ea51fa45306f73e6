"""Programs compiled for devices that need not be there: counted, not timed.

    python -m benchmarks.compiled.programs --for tpu-v5e [--networks lenet lstm]
                                           [--programs step forward]

XLA compiles for TPU where libtpu is installed (the extra `tpu-compile`) and for CUDA with JAX's
plugin (`cuda-compile`), on any machine. Counted are the bytes that a program reads and writes (XLA
tells them for TPU and CPU, with one turn of each loop), the same with all turns of loops that say
how many they have, those of one turn of its loops (these two estimated from the program's text),
what it needs beside arguments and results, the copies and transpositions that run by themselves,
the calls of libraries and its code; and the seconds that compiling took. Each program is compiled
in a process of its own: an error may abort it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

import jaxonnx
from benchmarks.compiled.hlo import Module
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, batch
from benchmarks.systems import FOREVER, flax_functions, optax_step, train_step
from jaxonnx.lowering import _recurrence_kernel
from jaxonnx.lowering._stored_array import ORDERS

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tpu-v5e": {
        "platform": "tpu",
        "topology_name": "v5e:1x1",
        "chips_per_host_bounds": (1, 1, 1),
    },
    "tpu-v6e": {
        "platform": "tpu",
        "topology_name": "v6e:1x1",
        "chips_per_host_bounds": (1, 1, 1),
    },
    "h100": {"platform": "cuda", "target_config": H100, "topology": "1x1x1"},
}
TARGETS = (*TOPOLOGIES, "cpu")

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu would ask the network which TPU this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
"""Of a process that compiles for a device that is not there."""

SEARCHED = 4096
"""Rows and columns of the weight whose mask is searched."""


def device(target: str):
    """Return a device to compile for."""
    if target == "cpu":
        return jax.devices("cpu")[0]
    return topologies.get_topology_desc(**TOPOLOGIES[target]).devices[0]


def like(tree: Any, place: Any) -> Any:
    """Return the shapes and types of arrays, on a device."""
    sharding = jax.sharding.SingleDeviceSharding(place)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=sharding), tree
    )


def compiled(function: Callable, place: Any, *arguments: Any, donated: tuple[int, ...] = ()):
    """Compile a function for a device, whether or not it is there."""
    if place.platform != "cpu":  # a host with a GPU or TPU would not choose kernels for CPU
        _recurrence_kernel.LEAST = np.inf
    lowered = jax.jit(function, donate_argnums=donated).lower(*like(arguments, place))
    return lowered.compile()


def counts(program: Any) -> dict[str, Any]:
    """Count what a compiled program does."""
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    module = Module(program.as_text())
    found = [*module.operations()]
    told, turn = cost.get("bytes accessed", 0), {n: module.moved(n) for n in module.loops}
    more = sum((n - 1) * turn[body] for body, n in module.turns().items())
    calls = Counter(
        target[1]
        for name, line in found
        if name == "custom-call" and (target := re.search(r'custom_call_target="([^"]+)"', line))
    )
    return {
        "MB accessed": told / 1e6 or None,
        "MB in all turns": (told + more) / 1e6 if told else None,
        "MB a turn": sum(turn.values()) / 1e6,
        "MB of temporaries": memory.temp_size_in_bytes / 1e6,
        "copies": sum(name == "copy" for name, _ in found),
        "transpositions": sum(name == "transpose" for name, _ in found),
        "MB of code": memory.generated_code_size_in_bytes / 1e6,
        "calls": dict(calls),
    }


def step_of(settings: dict[str, Any]):
    """Return what compiles the training step of a network with these settings of `train`."""

    def build(name: str, place: Any):
        model = _model(name)
        x, y = map(jnp.asarray, batch(NETWORKS[name]))
        update, *arguments = train_step(model, x, y, platform=place.platform, **settings)
        return compiled(update, place, *arguments, donated=(0,))

    return build


def forward(name: str, place: Any):
    model = _model(name)
    first = place.platform in ORDERS
    params = jax.eval_shape(jaxonnx.kernels_first, model.params) if first else model.params
    x, _ = batch(NETWORKS[name])
    return compiled(lambda p, s, x: model.apply(p, x, state=s), place, params, model.state, x)


def _model(name: str) -> jaxonnx.Model:
    with tempfile.TemporaryDirectory() as folder:
        write(NETWORKS[name], Path(folder) / "network.onnx")
        model = jaxonnx.load(Path(folder) / "network.onnx")
    tables = {n for n, v in model.state.items() if v.ndim == 2}  # as in `systems.jaxonnx`
    return model.with_trainable(lambda n, _: n in model.params or n in tables)


def flax_step(name: str, place: Any, guarded: bool = False):
    x, y, params, state, train, _ = _flax(name)
    step, optimizer = optax_step(train, guarded)
    carry = params, state, jax.eval_shape(optimizer.init, params)
    return compiled(step, place, carry, x, y, donated=(0,))


def flax_forward(name: str, place: Any):
    x, _, params, state, _, infer = _flax(name)
    return compiled(infer, place, params, state, x)


def _flax(name: str):
    x, y = batch(NETWORKS[name])
    x = x.transpose(0, 2, 3, 1) if x.ndim == 4 else x
    init, train, infer = flax_functions(NETWORKS[name])
    params, state = jax.eval_shape(init, jax.random.key(0), x)
    return x, y, params, state, train, infer


def mask_search(name: str, place: Any):
    from jaxonnx.sparse._search import search

    w = jax.ShapeDtypeStruct((SEARCHED, SEARCHED), jnp.float32)
    return compiled(lambda w: search(w, (0, 1)).codes, place, w)


def mask_refresh(name: str, place: Any):
    """Compile the search of a mask, and the mask as bits."""
    from jaxonnx.sparse import Goal, Pattern
    from jaxonnx.sparse._three_phase import renew_masks

    def refresh(true, w, old):
        return renew_masks(true, {"w": w}, {"w": old}, {"w": Goal(Pattern(), (0, 1))})

    w = jax.ShapeDtypeStruct((SEARCHED, SEARCHED), jnp.float32)
    bits = jax.ShapeDtypeStruct((SEARCHED**2 // 8,), jnp.uint8)
    return compiled(refresh, place, jnp.bool(True), w, bits)


PROGRAMS: dict[str, tuple[Callable, Callable | None]] = {
    "step": (step_of({}), flax_step),
    "guarded": (step_of({}), partial(flax_step, guarded=True)),
    "bf16": (step_of({"precision": "bf16"}), None),
    "2:4": (step_of({"sparsity": {"dynamic": FOREVER, "refresh": FOREVER}}), None),
    "lora": (step_of({"lora": jaxonnx.LoRA()}), None),
    "forward": (forward, flax_forward),
}
"""Programs of a network: of jaxonnx, and the same as it is written in Flax; `guarded` with its step
taken only where loss and gradients are finite, as every step of jaxonnx is."""
SEARCHES: dict[str, Callable] = {"mask codes": mask_search, "mask refresh": mask_refresh}


def one(target: str, name: str, program: str, system: str) -> dict[str, Any]:
    """Compile a program and count."""
    place = device(target)
    build = SEARCHES.get(program) or PROGRAMS[program][system == "flax"]
    assert build is not None
    start = time.perf_counter()
    result = counts(build(name, place))
    return {**result, "s to compile": time.perf_counter() - start}


def apart(target: str, *what: str) -> dict[str, Any]:
    """Run `one` in a process of its own; {"error": ...} if it failed."""
    module = "benchmarks.compiled.programs"
    command = [sys.executable, "-m", module, "--for", target, "--one", *what]
    folder = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"ended with code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def show(rows: dict[str, tuple[dict, dict | None]], target: str) -> None:
    table = Table("program", title=f"compiled for {target}: jaxonnx / Flax")
    memory = "MB accessed", "MB in all turns", "MB a turn", "MB of temporaries"
    columns = (*memory, "copies", "transpositions", "MB of code")
    for column in (*columns, "s to compile", "calls"):
        table.add_column(column)

    def cell(column, ours, theirs):
        values = [result[column] for result in (ours, theirs) if result and column in result]
        if any(value is None for value in values):
            return "-"
        text = " / ".join(f"{value:.4g}" for value in values)
        return text + (f" = {values[0] / values[1]:.2f}" if len(values) == 2 and values[1] else "")

    for name, (ours, theirs) in rows.items():
        if "error" in ours:
            table.add_row(name, ours["error"])
            continue
        calls = " / ".join(
            ", ".join(f"{n} {call}" for call, n in sorted(result.get("calls", {}).items())) or "-"
            for result in (ours, theirs)
            if result
        )
        cells = [cell(column, ours, theirs) for column in (*columns, "s to compile")]
        table.add_row(name, *cells, calls)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--for", dest="target", choices=TARGETS, required=True)
    parser.add_argument("--networks", choices=NETWORKS, default=[*NETWORKS], nargs="*")
    parser.add_argument("--programs", choices=(*PROGRAMS, *SEARCHES), nargs="+")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.target, *options.one)))
        return
    programs = options.programs or [name for name in (*PROGRAMS, *SEARCHES) if name != "guarded"]
    rows = {}
    for program in programs:
        for name in options.networks if program in PROGRAMS else ("",):
            ours = apart(options.target, name, program, "jaxonnx")
            other = program in PROGRAMS and PROGRAMS[program][1] is not None
            theirs = apart(options.target, name, program, "flax") if other else None
            rows[f"{name}, {program}".removeprefix(", ")] = ours, theirs
    show(rows, options.target)


if __name__ == "__main__":
    main()
