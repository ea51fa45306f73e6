"""If and Loop. A body is a function over the outer scope: `body(*inputs, step=i)`.

`jaxonnx.ops.iteration` says which form a loop takes.
"""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import _limits
from jaxonnx._limits import OutOfTime, check_size, check_time, patience
from jaxonnx.errors import Error, NodeError, StaticError
from jaxonnx.ops.common import INDEX, canonical
from jaxonnx.ops.iteration import (
    alike,
    as_declared,
    check_length,
    empty,
    item,
    note_unrolling,
    stack,
    types_of,
)
from jaxonnx.ops.known_values import array, forward_only, is_traced
from jaxonnx.registry import is_known, op

SCAN_LIMIT = 2**31 - 1
"""The trip count from which it is not a limit (exporters write the greatest int64): the loop ends
by its condition only."""

MASKED_LIMIT = 10_000
"""Up to this trip count a loop with a traced condition is a scan, above it a while loop."""

_DIGIT_BITS = 31
"""Of each of the two counters of a while loop."""

_TRUE = np.array(True)


@op("If", since=1)
def if_(cond, *, then_branch, else_branch):
    """The outputs of one branch; a traced condition needs branches of equal shapes and types."""
    if not is_traced(cond):
        return (then_branch if item(cond) else else_branch)()
    shapes = {}

    def run(name, branch):
        try:
            outputs = [array(value) for value in branch()]
        except StaticError:
            raise  # it names another value, which may be known
        except Error as error:
            raise _choice_needed(f"its '{name}' branch cannot be traced ({error})") from error
        shapes[name] = types_of(outputs)
        return outputs

    try:
        outputs = jax.lax.cond(
            cond.reshape(()), lambda: run("then", then_branch), lambda: run("else", else_branch)
        )
    except TypeError as error:
        if len(shapes) < 2 or shapes["then"] == shapes["else"]:
            raise
        raise _choice_needed(
            f"one branch gives {shapes['then']}, the other {shapes['else']}"
        ) from error
    return tuple(outputs)


def _choice_needed(reason: str) -> StaticError:
    """Return the error of an If whose condition must be known."""
    error = StaticError()
    error.why = f"{reason}: the condition must be known while tracing, and is computed from"
    return error


@op("Loop", since=1)
def loop(m=None, cond=None, *v_initial, body):
    """Final carried values, then the scan outputs stacked over the iterations.

    The body maps (counter, condition, *carried) to (condition, *carried, *scan outputs). The
    condition that it returns counts unless the node has a trip count and no condition; without
    both it is what ends the loop, as in onnxruntime. The one that it takes is always true, because
    it runs only while the condition holds. Counter and condition have the rank that the body
    declares, 0 or 1, as in onnxruntime.
    """
    carry, size = list(v_initial), len(v_initial)
    stacked = len(body.outputs) - 1 - size
    body.check(2 + size)
    counted = m is not None and cond is None
    count = None if is_traced(m) else math.inf if m is None else int(item(m))
    begins = None if is_traced(cond) else cond is None or bool(item(cond))

    def step(i, carry):
        counter, holds = map(as_declared, (i, _TRUE), body.input_types[:2])
        condition, *outputs = body(counter, holds, *carry, step=i)
        for name, value in zip(body.outputs[1 + size :], outputs[size:], strict=True):
            if value is None or isinstance(value, list | dict):
                raise NodeError(f"the scan output '{name}' is not a tensor, and cannot be stacked")
        return _TRUE if counted else condition, outputs[:size], outputs[size:]

    if begins is False or (count is not None and count <= 0):
        return (*carry, *empty(lambda: step(np.array(0, INDEX), carry)[2], body, stacked))
    definite = count is not None and begins is not None
    late = False
    if definite and body.known:
        try:
            with patience():
                return _python_loop(step, count, carry, body)
        except OutOfTime as error:
            if count == math.inf:
                raise _endless() from error
            late = True
    why = None
    if begins and count is not None and count <= SCAN_LIMIT:
        try:
            return _scan_loop(step, count, carry)
        except _TracedCondition:
            pass
        except Error as error:  # the Python loop works, or says better what is wrong
            return _python_loop(step, count, carry, body, error, late)
    if not stacked:
        try:
            return _conditional_loop(step, count, m, cond, carry)
        except Error as error:
            if not definite:
                raise
            why = error
    if not definite:
        raise StaticError(
            "the number of iterations is computed from traced values, and it is the length of a "
            "scan output. Make trip count and condition known, or call the model outside jax.jit"
        )
    return _python_loop(step, count, carry, body, why, late)


class _TracedCondition(Exception):
    """Raised when the body's condition is traced, so that the number of iterations is not known."""


def _scan_loop(step, count, carry):
    """Run a loop with a known trip count and a constant true condition as a `lax.scan`."""

    def one(carry, i):
        condition, new, outputs = step(i, carry)
        if not is_known(condition):
            raise _TracedCondition
        if not item(condition):
            raise StaticError("the loop ends after its first iteration")
        return alike(carry, new), [array(value) for value in outputs]

    steps = jnp.arange(count, dtype=canonical(INDEX))
    carry, outputs = jax.lax.scan(one, [array(value) for value in carry], steps)
    return (*carry, *outputs)


def _python_loop(step, count, carry, body, why=None, late=False):
    """Run a loop in Python: its iterations are unrolled into the program.

    Args:
      step: a function of (iteration, carry) that returns (condition, carry, scan outputs).
      count: the trip count, which may be infinite.
      carry: the first carried values.
      body: the subgraph, for reports.
      why: why the loop cannot be compiled as one; None if unknown.
      late: whether a run on known values has taken long already.
    """
    rows, end = [], math.inf
    while len(rows) < count:
        check_time()
        if time.monotonic() > end:
            raise _endless()
        condition, carry, outputs = step(np.array(len(rows), INDEX), carry)
        rows.append(outputs)
        # without a condition there are exactly `count` rows: check their memory before the rest
        if len(rows) == 1 and condition is _TRUE:
            for x in outputs:
                if hasattr(x, "shape"):
                    check_size((count, *(max(n, 1) for n in x.shape)), x.dtype)
        if len(rows) == 1 and (late or is_traced(carry, outputs)):
            if count == math.inf:
                end = time.monotonic() + _limits.PATIENCE
            else:
                check_length(count, late, why)
        if is_traced(condition):
            raise StaticError(
                "the body needs its counter known or changes the shapes of what it carries, and "
                "the condition is computed from traced values: such a loop cannot be compiled. "
                "Call the model outside jax.jit"
            )
        if not item(condition):
            break
    results = (*carry, *stack(rows))
    note_unrolling(body, len(rows), results, why)
    return results


def _endless():
    return NodeError(
        f"it has no trip count, and its condition still holds after {_limits.PATIENCE:g} s of "
        "tracing; a Loop ends when its body gives a false condition"
    )


def _conditional_loop(step, count, m, cond, carry):
    """Run a loop without scan outputs whose condition or trip count is traced.

    A small known limit of iterations gives a masked scan, which has a gradient; else it is a
    `lax.while_loop`.
    """
    carry = [array(value) for value in carry]
    active = jnp.array(True) if cond is None else array(cond).reshape(())

    def advance(i, carry):
        condition, new, _ = step(i, carry)
        return array(condition).reshape(()), alike(carry, new)

    if count is not None and count <= MASKED_LIMIT:
        # after the end the carried values go through unchanged, so that a scan can do it
        def masked_step(state, i):
            return jax.lax.cond(state[0], lambda c: advance(i, c), lambda c: state, state[1]), None

        steps = jnp.arange(count, dtype=canonical(INDEX))
        return tuple(jax.lax.scan(masked_step, (active, carry), steps)[0][1])

    # Two digits, because without 64-bit types one counter would end at 2**31 - 1. What the body
    # sees of them wraps there, as any other integer does.
    index, digit = canonical(INDEX), 1 << _DIGIT_BITS
    limit = jnp.maximum(array(m).reshape(()), 0) if count is None else min(count, 2**63 - 1)
    end = [jnp.asarray(x, np.uint32) for x in (limit >> _DIGIT_BITS, limit & (digit - 1))]

    def proceeds(state):
        (high, low), active, _ = state
        return active & ((high != end[0]) | (low != end[1]))

    def iterate(state):
        (high, low), _, carry = state
        i = (high.astype(index) << _DIGIT_BITS) | low.astype(index)
        full = low == digit - 1
        digits = (high + full.astype(np.uint32), jnp.where(full, 0, low + 1).astype(np.uint32))
        return (digits, *advance(i, carry))

    zero = jnp.zeros((), np.uint32)
    _, _, carry = jax.lax.while_loop(proceeds, iterate, ((zero, zero), active, carry))
    return tuple(forward_only(value, _NO_REVERSE) for value in carry)


_NO_REVERSE = (
    "a Loop whose number of iterations is not known while tracing has no reverse-mode gradient "
    "(jax.jvp and jax.jacfwd work). Give it a known trip count, at most "
    f"{MASKED_LIMIT} if its condition is computed from traced values"
)
