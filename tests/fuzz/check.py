"""What may happen to a file: it is refused with an error of ours, or it runs. Nothing else."""

import contextlib
import inspect
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (NumPy learns its types)
import numpy as np
import onnx
from onnx import TypeProto, helper

import jaxonnx
from jaxonnx import _limits
from jaxonnx.backend import Rep
from tests.fuzz.compare import compared
from tests.fuzz.mutate import array, parsed
from tests.fuzz.outcome import Outcome

LIMIT = 1 << 28
"""Bytes that a mutated model may ask for in a single value."""
OPTIONS = {"limit": LIMIT} if "limit" in inspect.signature(jaxonnx.load).parameters else {}
_limits.PATIENCE = 3.0
"""Seconds for a Loop that may have no end: less than a case has."""
OURS = str(Path(jaxonnx.__file__).parent)
SHOWN = (str, jaxonnx.Model.summary, jaxonnx.Model.to_onnx, jaxonnx.Model.with_any_batch)


class Overtime(BaseException):
    """Raised by a worker's alarm when a case has had its time."""


def finding(error: BaseException, stage: str) -> Outcome:
    """Return the outcome of an exception that is not ours: its bucket is where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(OURS)]
    place = "outside"
    if ours:
        place = f"{Path(ours[-1].filename).relative_to(OURS)}:{ours[-1].name}"
    text = f"{type(error).__name__}: {error}"[:300]
    return Outcome("finding", f"{type(error).__name__} in {place} ({stage})", text)


def model(
    data: bytes, inputs: tuple, mode: str, draw: int, stage: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Load a model, print it, write it, run it, and compare the results with others'.

    Args:
      data: the file.
      inputs: values for its inputs, which are used where they fit.
      mode: "trace" (on shapes), "compile", or "compare" (operator by operator, in 64 bits).
      draw: a seed for inputs, and for what is tried beside running it.
      stage: told what comes next.
    """
    random, now = Random(draw), "load"

    def enter(name: str) -> None:
        nonlocal now
        now = name
        stage(name)

    results, feeds, refused = None, None, ""
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as modes:
            warnings.simplefilter("ignore")
            modes.enter_context(jax.enable_x64(mode == "compare"))
            if mode == "compare":
                modes.enter_context(jax.disable_jit())
            enter("load")
            loaded = jaxonnx.load(data, **OPTIONS)
            enter("print")
            with contextlib.suppress(jaxonnx.Error):
                for show in random.sample(SHOWN, random.choice((0, 0, 1, 2))):
                    show(loaded)
            enter("call")
            infos = {info.name: info for info in loaded.proto.graph.input}
            infos = [infos[value.name] for value in loaded.inputs]
            nasty = mode != "compare" and random.random() < 0.3
            feeds = fed(infos, inputs, random, nasty)
            if feeds is None:
                return Outcome("ran", "inputs that are too large")
            if mode == "trace":
                traced(loaded, feeds, random)
            elif mode == "compile":
                jax.block_until_ready(loaded(**feeds))
            else:
                results = [*Rep(loaded).run(feeds)]
    except jaxonnx.Error as error:
        refused = str(error) or "no message"
    except Overtime as error:
        if mode == "compare":  # loops take Python's time there
            return Outcome("ran", "the comparison takes too long")
        return finding(error, now)
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return finding(error, now)
    proto = parsed(data) if mode == "compare" else None
    if proto is not None and feeds is None:  # refused before it was called
        stored = {tensor.name for tensor in proto.graph.initializer}
        infos = [info for info in proto.graph.input if info.name not in stored]
        feeds = fed(infos, inputs, Random(draw), False)
    if proto is None or feeds is None:
        return Outcome("refused" if refused else "ran", detail=refused)
    enter("compare")
    try:
        return compared(proto, feeds, results, refused)
    except Overtime:
        return Outcome("refused" if refused else "ran", "the reference takes too long")


def traced(loaded: jaxonnx.Model, feeds: dict[str, Any], random: Random) -> None:
    """Trace a model, which compiles nothing; some inputs of integers are known meanwhile."""
    hidden = {
        name: value
        for name, value in feeds.items()
        if isinstance(value, np.ndarray)
        and value.dtype != object
        and (value.dtype.kind not in "iub" or random.random() < 0.3)
    }
    known = {name: value for name, value in feeds.items() if name not in hidden}

    def run(hidden: dict[str, Any]) -> None:
        loaded.apply(loaded.params, **known, **hidden)

    jax.eval_shape(run, hidden)


def fed(infos: list, inputs: tuple, random: Random, nasty: bool) -> dict[str, Any] | None:
    """Return inputs by name, None if the file asks for large ones."""
    sizes: dict[str, int] = {}
    own, feeds = random.random() < 0.6, {}
    for i, info in enumerate(infos):
        value = value_of(info.type, random, nasty, sizes)
        if isinstance(value, np.ndarray) and value.size > 1 << 16:
            return None
        known = inputs[i] if own and i < len(inputs) else None
        if known is not None and _alike(known, value):
            value = known
        feeds[info.name] = value
    return feeds


def _alike(known: Any, value: Any) -> bool:
    if isinstance(known, list):
        return isinstance(value, list)
    same = isinstance(known, np.ndarray) and isinstance(value, np.ndarray)
    return same and (known.dtype, known.shape) == (value.dtype, value.shape)


def value_of(kind: TypeProto, random: Random, nasty: bool, sizes: dict[str, int]) -> Any:
    """Return a value of a type that a file declares."""
    which = kind.WhichOneof("value")
    if which == "sequence_type":
        inner = kind.sequence_type.elem_type
        return [value_of(inner, random, nasty, sizes) for _ in range(random.randint(1, 3))]
    if which == "optional_type":
        if random.random() < 0.3:
            return None
        return value_of(kind.optional_type.elem_type, random, nasty, sizes)
    if which == "map_type":
        keys = ["a", "b"] if kind.map_type.key_type == onnx.TensorProto.STRING else [0, 1]
        inner = kind.map_type.value_type
        return {key: value_of(inner, random, nasty, sizes) for key in keys}
    tensor = kind.tensor_type
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        dtype = np.dtype(np.float32)
    shape = []
    for i, dim in enumerate(tensor.shape.dim):
        name = dim.dim_param or f"{id(tensor)} {i}"
        size = sizes.setdefault(name, random.choice((1, 2, 3, 3, 4, 0)))
        shape.append(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else size)
    if not tensor.HasField("shape"):
        shape = [random.randint(1, 3) for _ in range(random.randint(0, 3))]
    if np.prod(shape, dtype=float) > 1 << 16:
        return np.empty((1 << 16) + 1, np.int8)
    return array(random, tuple(shape), dtype, nasty)
