"""`jaxonnx bench`: times the forward pass and training step of a model."""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

from jaxonnx._compare.sessions import INSTALL, Session, has_onnxruntime
from jaxonnx._data.random_inputs import draw_inputs
from jaxonnx.cli._inputs import Report, read
from jaxonnx.cli._inputs import inputs as given
from jaxonnx.errors import Error, InputError, StaticError
from jaxonnx.lowering import jit
from jaxonnx.model import Model

_ROUND_S = 0.1
"""Calls are repeated within a round until they take about this long."""
_BATCH = 32


def run(options: argparse.Namespace) -> Report:
    """Time the forward pass, the training step if there is one, and onnxruntime if installed."""
    model = read(options)
    if options.data is not None:
        inputs = tuple(given(options.data, model).values())
    else:
        inputs = _random_inputs(model, options.batch, dict(options.dim or ()))
    placed = jax.device_put(inputs)
    rows = {"forward": _forward(model, placed)}
    notes = []
    if options.train:
        try:
            rows["training step"] = _training_step(model, placed)
            if options.precision:
                name = f"training step, {options.precision}"
                rows[name] = _training_step(model, placed, options.precision)
        except Error as error:
            notes.append(f"no training step: {error}")
    if not has_onnxruntime():
        notes.append(INSTALL)
    else:
        try:
            rows["onnxruntime"] = _onnxruntime(options, model, inputs)
        except Error as error:
            notes.append(str(error))
    calls = {name: row.pop("call") for name, row in rows.items()}
    for name, times in measure(calls, options.rounds).items():
        rows[name] |= {
            "ms": 1e3 * float(np.median(times)),
            "ms_quartiles": [1e3 * float(q) for q in np.quantile(times, (0.25, 0.75))],
            "samples_per_second": len(inputs[0]) / float(np.median(times)),
        }
    data = {
        "model": options.model,
        "inputs": {
            value.name: {"dtype": str(x.dtype), "shape": x.shape}
            for value, x in zip(model.inputs, inputs, strict=True)
        },
        "device": str(jax.devices()[0]),
        "measurements": rows,
        "notes": notes,
    }
    return Report(data, _table(data))


def _random_inputs(model: Model, batch: int | None, sizes: Mapping[str, int]) -> tuple:
    """Draw inputs, in order.

    Raises:
      InputError: an open dimension has no size, or a size does not fit.
    """
    for value in model.inputs:
        fixed = value.shape[0] if value.shape else None
        if isinstance(fixed, int) and batch not in (None, fixed):
            raise InputError(f"--batch {batch}, but input {value} is fixed to {fixed}")
    return tuple(draw_inputs(model.inputs, batch or _BATCH, sizes).values())


def measure(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return seconds a call in each round; calls take turns, so that load hits all alike."""
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, round(_ROUND_S / max(_seconds(call, 1), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_seconds(call, counts[name]))
    return times


def _seconds(call: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter()
    result = None
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / count


def _compile(function: Any, *arguments: Any, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """Compile a function; return it with its costs: seconds to compile, bytes to hold."""
    begin = time.perf_counter()
    jitted = jit(function, **settings)
    program = jitted.lower(jitted.trace(*arguments)).compile()
    seconds = time.perf_counter() - begin
    memory: Any = program.memory_analysis()
    sizes = ("argument", "output", "temp")
    held = sum(getattr(memory, f"{kind}_size_in_bytes") for kind in sizes)
    return program, {
        "compile_seconds": seconds,
        "memory_bytes": held - memory.alias_size_in_bytes,
    }


def _forward(model: Model, inputs: tuple) -> dict[str, Any]:
    def forward(params, state, *inputs):
        return model.apply(params, *inputs, state=state)

    try:
        program, costs = _compile(forward, model.params, model.state, *inputs)
    except StaticError:  # results whose shape depends on values: compiled as far as it goes
        return {"call": lambda: model(*inputs)}
    return costs | {"call": lambda: program(model.params, model.state, *inputs)}


def _training_step(
    model: Model, inputs: tuple, precision: Literal["bf16", "fp16"] | None = None
) -> dict[str, Any]:
    """Compile the step of `jaxonnx.train` with Adam, for the mean square of real outputs."""
    from jaxonnx.training import Batch, step

    if not model.params:
        raise InputError("the model has no parameters")

    def loss(outputs, _):
        real = [y for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.floating)]
        if not real:
            raise InputError("no output is a real number, so there is no gradient")
        return sum(jnp.square(y.astype(jnp.float32)).mean() for y in real)

    built = step(model, loss, optax.adam(1e-3), precision=precision)
    state, size = built.init(), len(inputs[0])
    batch = Batch(inputs, jnp.zeros(size), jnp.ones(size))
    program, costs = _compile(built.update, state, batch, built.frozen, donate_argnums=0)

    def call():
        nonlocal state
        state, observed = program(state, batch, built.frozen)
        return observed

    return costs | {"call": call}


def _onnxruntime(options: argparse.Namespace, model: Model, inputs: tuple) -> dict[str, Any]:
    """Run the file itself in onnxruntime, or the model as flags changed it."""
    changed = options.any_batch or options.dequantize or options.model.suffix == ".npz"
    file = model.to_onnx().SerializeToString() if changed else options.model
    feed = {value.name: x for value, x in zip(model.inputs, inputs, strict=True)}
    begin = time.perf_counter()
    session = Session(file)
    seconds = time.perf_counter() - begin
    session.run(feed)
    return {"compile_seconds": seconds, "call": lambda: session.run(feed)}


def _table(data: Mapping[str, Any]) -> Table:
    shapes = ", ".join(f"{n} {'x'.join(map(str, v['shape']))}" for n, v in data["inputs"].items())
    table = Table(title=f"{data['model']}, {shapes}, {data['device']}", caption_justify="left")
    table.caption = "\n".join(data["notes"]) or None
    table.add_column("", no_wrap=True)
    for column in ("ms", "quartiles", "samples/s", "compile s", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in data["measurements"].items():
        low, high = row["ms_quartiles"]
        costs = [row.get(key) for key in ("compile_seconds", "memory_bytes")]
        table.add_row(
            name,
            _short(row["ms"]),
            f"{_short(low)}-{_short(high)}",
            f"{row['samples_per_second']:,.0f}",
            "-" if costs[0] is None else f"{costs[0]:.2f}",
            "-" if costs[1] is None else f"{costs[1] / 1e6:.1f}",
        )
    return table


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
