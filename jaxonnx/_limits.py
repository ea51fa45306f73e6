"""Memory limits for single values, checked from shapes before anything is allocated.

An evaluation sets a `Budget`. The evaluator checks the results of every node against it (`check`);
operators call `check_size` for what grows with the values of inputs and attributes, before they
make it, and loops of Python on known values call `check_time`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer

from jaxonnx._files import memory
from jaxonnx.errors import LimitError, NodeError, StaticError

FOLDED = 1 << 28
"""Bytes that a value may take which is computed while tracing, and a table of an operator while a
model is printed."""

SECONDS = 2.0
"""Time for the loops of a node that is folded, and for all those of a print or summary."""

PATIENCE = 10.0
"""Seconds for a Loop over known values in a call, before it is left to the compiled program."""

SIX_BITS = frozenset(map(np.dtype, (ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn)))
"""Types that XLA does not have: it ends the process at a constant of one."""

STRING = 64
"""Bytes that a short string takes in Python, with its place in an array."""

AXES = 64
"""Of an array of NumPy at most; XLA takes minutes for thousands."""

_WIDEST = np.dtype(np.complex128).itemsize
"""Bytes of an element at most."""

_LARGEST = 2**63 - 1
"""XLA counts bytes and elements in 64 bits."""


class OutOfTime(LimitError):
    """Raised when loops on known values take too long."""


class Budget(NamedTuple):
    """The time and memory that an evaluation may take."""

    value: int
    """Bytes of a single value of the graph."""
    host: int
    """Bytes of an array of NumPy that an operator makes while tracing."""
    deadline: float = math.inf
    """When loops of Python on known values must end (`time.monotonic`)."""


_BUDGET: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def _use_budget(budget: Budget) -> Iterator[None]:
    token = _BUDGET.set(budget)
    try:
        yield
    finally:
        _BUDGET.reset(token)


@contextmanager
def evaluation(limit: int | None) -> Iterator[None]:
    """Hold an evaluation to a limit in bytes for a single value, unless an outer one is held."""
    if _BUDGET.get() is not None:
        yield
        return
    value = machine() if limit is None else limit
    with _use_budget(Budget(value, value)):
        yield


@contextmanager
def inspection_limits() -> Iterator[None]:
    """Hold evaluations on shapes, for a print or a summary, to little memory and time."""
    if _BUDGET.get() is not None:
        yield
        return
    with _use_budget(Budget(machine(), FOLDED, time.monotonic() + SECONDS)):
        yield


class folding:
    """Hold the evaluation of a node on known values to little memory and time."""

    # not a generator: every folded node enters one
    def __enter__(self) -> None:
        outer = _current()
        deadline = min(outer.deadline, time.monotonic() + SECONDS)
        self.token = _BUDGET.set(
            Budget(min(outer.value, FOLDED), min(outer.host, FOLDED), deadline)
        )

    def __exit__(self, *_: object) -> None:
        _BUDGET.reset(self.token)


@contextmanager
def patience() -> Iterator[None]:
    """Hold a loop over known values to `PATIENCE`."""
    outer = _current()
    with _use_budget(outer._replace(deadline=min(outer.deadline, time.monotonic() + PATIENCE))):
        yield


def _current() -> Budget:
    return _BUDGET.get() or Budget(machine(), machine())


def check_time() -> None:
    """Raise an OutOfTime when the time for known values is over."""
    budget = _BUDGET.get()
    if budget is not None and time.monotonic() > budget.deadline:
        raise OutOfTime("what it computes from known values takes too long while tracing")


def check_size(shape: Sequence[Any], dtype: Any = np.uint8, *, host: bool = False) -> None:
    """Raise a LimitError unless an array of this shape is within the limit.

    An axis of length 0 counts as one of length 1: what is made along the others takes memory.

    Args:
      shape: its shape; one that `jax.export` leaves open is not checked.
      dtype: its element type; `object` for strings.
      host: NumPy makes it while tracing.
    """
    if not all(isinstance(n, int | np.integer) for n in shape):
        return
    budget = _current()
    limit = min(budget.host if host else budget.value, _LARGEST)
    item = STRING if dtype is object else np.dtype(dtype).itemsize
    size = math.prod(max(int(n), 1) for n in shape) * item
    if size > limit:
        raise LimitError(
            f"{np.dtype(dtype)}{[int(n) for n in shape]} takes {format_bytes(size)}, and a value "
            f"may take {format_bytes(limit)}; jaxonnx.load(..., limit=bytes) sets another limit"
        )


def check(values: Sequence[Any]) -> None:
    """Raise a LimitError if the shape of a value is above the limit; NumPy arrays are there."""
    limit = value_limit()
    for value in values:
        if isinstance(value, list):
            check(value)
        elif not isinstance(value, np.ndarray):
            shape = getattr(value, "shape", ())
            if len(shape) > AXES:
                raise LimitError(f"it has {len(shape)} axes, and may have {AXES}")
            size = count_elements(shape)
            if isinstance(size, int) and size * _WIDEST > limit:
                check_size(shape, value.dtype)


def count_elements(shape: Sequence[Any]) -> Any:
    """Return the product of the axes that are not empty."""
    return math.prod(shape) or math.prod(n or 1 for n in shape)


def compilable(value: Any) -> Any:
    """Return a known value that compiled code is to hold.

    Raises:
      NodeError: XLA does not have its type.
      StaticError: it holds strings, which exist only outside of compiled code.
    """
    types = {getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(value)}
    if np.dtype(object) in types and isinstance(jnp.zeros(()), Tracer):
        raise StaticError("strings cannot leave compiled code: call the model outside of jax.jit")
    if (narrow := types & SIX_BITS) and isinstance(jnp.zeros(()), Tracer):
        raise NodeError(
            f"{min(map(str, narrow))} is a type that XLA does not have, and compiled code "
            "cannot hold it: cast it to another in the graph, or call the model under "
            "jax.disable_jit()"
        )
    return value


def may_exceed(arguments: Sequence[Any], attributes: Mapping[str, Any], limit: int) -> bool:
    """Check whether a result could be above a limit, judged by arguments and attributes.

    All operators but those that call `check_size` give at most the product of the arguments'
    sizes and of the whole numbers in attributes (pads, for example; longer lists are tables, not
    sizes).
    """
    size = 8
    for value in arguments:
        size *= count_elements(getattr(value, "shape", ()))
    for value in attributes.values():
        numbers = value if isinstance(value, list | tuple) else (value,)
        for number in numbers if len(numbers) <= 2 * AXES else ():
            size *= max(abs(number), 1) if isinstance(number, int) else 1
    return isinstance(size, int) and size > limit


def value_limit() -> int:
    """Return the bytes that a single value of the present evaluation may take."""
    return min(_current().value, _LARGEST)


def format_bytes(size: int) -> str:
    """Return a number of bytes for people to read."""
    if size > _LARGEST:
        return f"{size:.1e} bytes"
    for power, unit in ((6, "EiB"), (5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1 << 10 * power:
            return f"{size / (1 << 10 * power):,.1f} {unit}"
    return f"{size} bytes"


@cache
def machine() -> int:
    """Return the bytes of memory of this machine, or of its accelerators if they have more."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return max(memory() or _LARGEST, stats.get("bytes_limit", 0) * jax.device_count())
