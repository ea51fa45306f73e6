"""If, Loop and Scan. A body is a function over the outer scope: `body(*inputs, step=i)`.

Which form a Loop or Scan takes is decided while tracing:

- a Python loop where all values are known, so that they stay known; where the body needs its
  counter known, or its carried values change shape;
- else `lax.scan` where the number of iterations is known: compiled once, differentiable both ways;
  a traced condition masks the steps after the end, up to `MASKED_LIMIT`;
- else `lax.while_loop`: differentiable in forward mode only.
"""

import math
import time
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import _limits
from jaxonnx._limits import OutOfTime, check_size, check_time, patience
from jaxonnx.errors import Error, NodeError, StaticError
from jaxonnx.ops.common import (
    INDEX,
    array,
    axis_of,
    canonical,
    element_dtype,
    forward_only,
    is_traced,
)
from jaxonnx.registry import is_known, op, xp

LONGEST = 1 << 14
"""The most iterations that are unrolled; compiling that many takes hours."""

UNROLLED = 16
"""The most unrolled iterations that are not reported: compiling them is quick."""


def check_length(count, late, why):
    """Raise if too many iterations would be unrolled.

    Args:
      count: the iterations.
      late: whether they run on known values while tracing, and have taken long already.
      why: why the loop cannot be compiled as one; None if unknown.
    """
    if count > LONGEST:
        done = "run while tracing" if late else "compiled"
        reason = "" if why is None else f": {why}"
        raise NodeError(f"its {count} iterations would be {done} one by one{reason}")


def note_unrolling(body, count, results, why):
    """Report a loop that was unrolled into a program; on concrete values there is no program."""
    if count > UNROLLED and is_traced(results):
        body.note_unrolling(count, why)


def item(value):
    """Return the only element of a tensor of shape [] or [1]."""
    return np.asarray(value).reshape(()).item()


def as_declared(scalar, kind):
    """Return a scalar, as a vector of length one where the TypeProto of its input has rank 1."""
    return scalar.reshape(1) if kind and len(kind.tensor_type.shape.dim) == 1 else scalar


def types_of(values):
    """Return the shapes and dtypes of tensors as strings, for a message."""
    return [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(values)]


def alike(old, new):
    """Return `new` as arrays; raise unless these have the shapes and dtypes of `old`.

    Compiled loops need that of the values that they carry.
    """
    new = [array(value) for value in new]
    if jax.tree.structure(old) != jax.tree.structure(new) or _avals(old) != _avals(new):
        raise StaticError(f"the carried values change from {types_of(old)} to {types_of(new)}")
    return new


def _avals(values):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(values)]


def stack(rows):
    """Stack the scan outputs of all iterations, each along a new first axis."""
    return tuple(
        np.stack(column) if is_known(*column) else jnp.stack([array(value) for value in column])
        for column in zip(*rows, strict=True)
    )


def empty(outputs, body, stacked):
    """Return the scan outputs of a loop without iterations: arrays with a first axis of size 0.

    Args:
      outputs: returns the scan outputs of one iteration; it is evaluated abstractly.
      body: the subgraph. If it cannot be evaluated, its declared shapes are used.
      stacked: the number of scan outputs.
    """
    if not stacked:
        return ()
    try:
        shapes = jax.eval_shape(lambda: [array(value) for value in outputs()])
        return tuple(np.zeros((0, *shape.shape), shape.dtype) for shape in shapes)
    except Error:
        declared = [kind for kind in body.output_types[-stacked:] if kind is not None]
        if len(declared) < stacked:
            raise
        types = [kind.tensor_type for kind in declared]
        return tuple(
            np.zeros((0, *(max(d.dim_value, 0) for d in t.shape.dim)), element_dtype(t.elem_type))
            for t in types
        )


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
    if definite and body.is_known:
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
            # run a loop with a known trip count and a constant true condition as a `lax.scan`
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


def _states(values, scanned):
    """Return the number of states before the scan inputs."""
    if not 1 <= scanned <= len(values):
        raise NodeError(f"num_scan_inputs is {scanned}, of {len(values)} inputs")
    return len(values) - scanned


def _each(values, count, name):
    """Return an attribute that has a number for each of `count` tensors, by default zeros."""
    if values is not None and len(values) != count:
        raise NodeError(f"{name} has {len(values)} entries for {count} tensors")
    return values or [0] * count


@op("Scan", since=9)
def scan_9(
    *initial_state_and_scan_inputs,
    body,
    num_scan_inputs,
    scan_input_axes=None,
    scan_input_directions=None,
    scan_output_axes=None,
    scan_output_directions=None,
):
    """Final states, then the scan outputs along their axes; direction 1 is from the end."""
    size = _states(initial_state_and_scan_inputs, num_scan_inputs)
    carry, inputs = (
        list(initial_state_and_scan_inputs[:size]),
        list(initial_state_and_scan_inputs[size:]),
    )
    stacked = len(body.outputs) - size
    axes = _each(scan_input_axes, num_scan_inputs, "scan_input_axes")
    backward = _each(scan_input_directions, num_scan_inputs, "scan_input_directions")
    output_axes = _each(scan_output_axes, stacked, "scan_output_axes")
    output_backward = _each(scan_output_directions, stacked, "scan_output_directions")
    for k, x in enumerate(inputs):
        x = xp(x).moveaxis(x, axis_of(axes[k], x.ndim), 0)
        inputs[k] = x[::-1] if backward[k] else x
    lengths = {len(x) for x in inputs}
    if len(lengths) != 1:
        raise NodeError(f"the scan inputs must have one length, got {sorted(lengths)}")
    final = _scan(body, carry, inputs, lengths.pop())
    outputs = []
    for k, y in enumerate(final[size:]):
        y = y[::-1] if output_backward[k] else y
        outputs.append(xp(y).moveaxis(y, 0, axis_of(output_axes[k], y.ndim)))
    return (*final[:size], *outputs)


def _scan(body, carry, inputs, length):
    """Run a body over the first axis of inputs, as a `lax.scan` or unrolled.

    A body without traced values is first run in Python for a limited time, so that its results stay
    known. Unrolling is also the fallback for bodies that `lax.scan` does not take.
    """
    size = len(carry)
    stacked = len(body.outputs) - size
    body.check(size + len(inputs))

    def step(i, carry, rows):
        outputs = body(*carry, *rows, step=i)
        return list(outputs[:size]), list(outputs[size:])

    def one(carry, x):
        new, outputs = step(x[0], carry, x[1])
        return alike(carry, new), [array(value) for value in outputs]

    def run_unrolled(carry):
        rows = []
        for i in range(length):
            check_time()
            carry, outputs = step(np.array(i, INDEX), carry, [x[i] for x in inputs])
            rows.append(outputs)
            if i == 0 and why is not None and (body.is_known or is_traced(carry, outputs)):
                check_length(length, body.is_known, why)
        return carry, rows

    why, final = None, None
    if body.is_known:
        with suppress(OutOfTime), patience():
            final = run_unrolled(carry)
    if final is None:
        steps = jnp.arange(length, dtype=canonical(INDEX))
        xs = [array(x) for x in inputs]
        try:
            carry, outputs = jax.lax.scan(one, [array(value) for value in carry], (steps, xs))
            return (*carry, *outputs)
        except Error as error:  # the Python loop works, or says better what is wrong
            why = error
        final = run_unrolled(carry)
    carry, rows = final
    if not rows:
        blank = [np.zeros(x.shape[1:], x.dtype) for x in inputs]
        return (*carry, *empty(lambda: step(np.array(0, INDEX), carry, blank)[1], body, stacked))
    results = (*carry, *stack(rows))
    note_unrolling(body, length, results, why)
    return results


@op("Scan", since=8)
def scan_8(
    sequence_lens=None,
    *initial_state_and_scan_inputs,
    body,
    num_scan_inputs,
    directions=None,
):
    """Batched along axis 0 and scanned along axis 1; scan outputs after a sequence's end are 0."""
    size = _states(initial_state_and_scan_inputs, num_scan_inputs)
    values = [array(value) for value in initial_state_and_scan_inputs]
    batch, length = values[size].shape[:2]
    ends = jnp.full(batch, length) if sequence_lens is None else array(sequence_lens)
    backward = _each(directions, num_scan_inputs, "directions")

    def sequence(end, carry, inputs):
        def one(carry, x):
            i, rows = x
            outputs = [array(value) for value in body(*carry, *rows, step=i)]
            new = alike(carry, outputs[:size])
            keep = [jnp.where(i < end, a, b) for a, b in zip(new, carry, strict=True)]
            return keep, [jnp.where(i < end, y, jnp.zeros_like(y)) for y in outputs[size:]]

        inputs = [
            jnp.roll(x[::-1], end, axis=0) if reverse else x  # x[end - 1], ..., x[0], the rest
            for x, reverse in zip(inputs, backward, strict=True)
        ]
        return jax.lax.scan(one, carry, (jnp.arange(length), inputs))

    carry, outputs = jax.vmap(sequence)(ends, values[:size], values[size:])
    return (*carry, *outputs)
