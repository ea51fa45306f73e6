"""If, Loop and Scan. A body is a function over the outer scope: `body(*inputs, step=i)`.

Which form an iteration takes is decided while tracing:

- a Python loop where all values are known, so that they stay known; where the body needs its
  counter known, or its carried values change shape;
- else `lax.scan` where the number of iterations is known: compiled once, differentiable both ways;
  a traced condition masks the steps after the end, up to `MASKED_LIMIT` of them;
- else `lax.while_loop`: differentiable in forward mode only.
"""

import math
import time
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import _limits
from jaxonnx._limits import OutOfTime, patience, room, tick
from jaxonnx.errors import Error, NodeError, StaticError
from jaxonnx.ops.common import INDEX, axis_of, canonical, element_dtype
from jaxonnx.ops.concrete import array, forward_only, traced
from jaxonnx.registry import known, op, xp

SCAN_LIMIT = 2**31 - 1
"""Above this trip count (exporters write the greatest int64) a loop ends by its condition only."""

MASKED_LIMIT = 10_000
"""Up to this trip count a loop with a traced condition is a scan, above it a while loop."""

_DIGIT_BITS = 31
"""Of each of the two counters of a while loop."""

LONGEST = 1 << 14
"""Iterations that are compiled one by one at most, which takes hours."""

UNROLLED = 16
"""Up to this many unrolled iterations nothing is reported: compiling them is quick."""

_TRUE = np.array(True)


@op("If", since=1)
def if_(cond, *, then_branch, else_branch):
    """The outputs of one branch; a traced condition needs branches of equal shapes and types."""
    if not traced(cond):
        return (then_branch if _item(cond) else else_branch)()
    shapes = {}

    def run(name, branch):
        outputs = [array(value) for value in branch()]
        shapes[name] = _shapes(outputs)
        return outputs

    try:
        outputs = jax.lax.cond(
            cond.reshape(()), lambda: run("then", then_branch), lambda: run("else", else_branch)
        )
    except TypeError as error:
        if len(shapes) < 2 or shapes["then"] == shapes["else"]:
            raise
        raise StaticError(
            f"one branch gives {shapes['then']}, the other {shapes['else']}: the condition chooses "
            "the shape of the result, so it must be known while tracing; it is not. Call the model "
            "outside jax.jit"
        ) from error
    return tuple(outputs)


@op("Loop", since=1)
def loop(m=None, cond=None, *v_initial, body):
    """Final carried values, then the scan outputs stacked over the iterations.

    The body maps (counter, condition, *carried) to (condition, *carried, *scan outputs). The
    condition that it returns counts only if the node has one; the one that it takes is always
    true, because it runs only while the condition holds.
    """
    carry, size = list(v_initial), len(v_initial)
    stacked = len(body.outputs) - 1 - size
    body.check(2 + size)
    if m is None and cond is None:
        raise NodeError("a Loop with neither trip count nor condition never ends")
    count = None if traced(m) else math.inf if m is None else int(_item(m))
    begins = None if traced(cond) else cond is None or bool(_item(cond))

    def step(i, carry):
        condition, *outputs = body(i, _TRUE, *carry, step=i)
        for name, value in zip(body.outputs[1 + size :], outputs[size:], strict=True):
            if value is None or isinstance(value, list | dict):
                raise NodeError(f"the scan output '{name}' is no tensor, and cannot be stacked")
        return _TRUE if cond is None else condition, outputs[:size], outputs[size:]

    if begins is False or (count is not None and count <= 0):
        return (*carry, *_empty(lambda: step(np.array(0, INDEX), carry)[2], body, stacked))
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
    def one(carry, i):
        condition, new, outputs = step(i, carry)
        if not known(condition):
            raise _TracedCondition
        if not _item(condition):
            raise StaticError("the loop ends after its first iteration")
        return _alike(carry, new), [array(value) for value in outputs]

    steps = jnp.arange(count, dtype=canonical(INDEX))
    carry, outputs = jax.lax.scan(one, [array(value) for value in carry], steps)
    return (*carry, *outputs)


def _python_loop(step, count, carry, body, why=None, late=False):
    rows, end = [], math.inf
    while len(rows) < count:
        tick()
        if time.monotonic() > end:
            raise _endless()
        condition, carry, outputs = step(np.array(len(rows), INDEX), carry)
        rows.append(outputs)
        if len(rows) == 1 and condition is _TRUE:  # no condition: as many rows as it says
            for shape, dtype in _avals([x for x in outputs if hasattr(x, "shape")]):
                room((count, *(max(n, 1) for n in shape)), dtype)
        if len(rows) == 1 and (late or traced(carry, outputs)):
            if count == math.inf:
                end = time.monotonic() + _limits.PATIENCE
            else:
                _check_length(count, late, why)
        if traced(condition):
            raise StaticError(
                "the body needs its counter known or changes the shapes of what it carries, and "
                "the condition is computed from traced values: such a loop cannot be compiled. "
                "Call the model outside jax.jit"
            )
        if not _item(condition):
            break
    results = (*carry, *_stack(rows))
    _tell(body, len(rows), results, why)
    return results


def _check_length(count, late, why):
    """Refuse many iterations, of which known values have taken their time or a program is made."""
    if count > LONGEST:
        done = "run while tracing" if late else "compiled"
        reason = "" if why is None else f": {why}"
        raise NodeError(f"its {count} iterations would be {done} one by one{reason}")


def _endless():
    return NodeError(
        f"it has no trip count, and its condition still holds after {_limits.PATIENCE:g} s of "
        "tracing; a Loop ends when its body gives a false condition"
    )


def _tell(body, count, results, why):
    """Report many iterations in one program; on concrete values none is compiled."""
    if count > UNROLLED and traced(results):
        body.unrolled(count, why)


def _conditional_loop(step, count, m, cond, carry):
    """Run a loop without scan outputs that ends by a traced condition or trip count."""
    carry = [array(value) for value in carry]
    active = jnp.array(True) if cond is None else array(cond).reshape(())

    def advance(i, carry):
        condition, new, _ = step(i, carry)
        return array(condition).reshape(()), _alike(carry, new)

    if count is not None and count <= MASKED_LIMIT:
        # after the end the carried values go through unchanged, so that a scan can do it
        def masked(state, i):
            return jax.lax.cond(state[0], lambda c: advance(i, c), lambda c: state, state[1]), None

        steps = jnp.arange(count, dtype=canonical(INDEX))
        return tuple(jax.lax.scan(masked, (active, carry), steps)[0][1])

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
        raise NodeError(f"the scan inputs must have one length, not {sorted(lengths)}")
    final = _scan(body, carry, inputs, lengths.pop())
    outputs = []
    for k, y in enumerate(final[size:]):
        y = y[::-1] if output_backward[k] else y
        outputs.append(xp(y).moveaxis(y, 0, axis_of(output_axes[k], y.ndim)))
    return (*final[:size], *outputs)


def _scan(body, carry, inputs, length):
    size = len(carry)
    stacked = len(body.outputs) - size
    body.check(size + len(inputs))

    def step(i, carry, rows):
        outputs = body(*carry, *rows, step=i)
        return list(outputs[:size]), list(outputs[size:])

    def one(carry, x):
        new, outputs = step(x[0], carry, x[1])
        return _alike(carry, new), [array(value) for value in outputs]

    def unrolled(carry):
        rows = []
        for i in range(length):
            tick()
            carry, outputs = step(np.array(i, INDEX), carry, [x[i] for x in inputs])
            rows.append(outputs)
            if i == 0 and why is not None and (body.known or traced(carry, outputs)):
                _check_length(length, body.known, why)
        return carry, rows

    why, final = None, None
    if body.known:
        with suppress(OutOfTime), patience():
            final = unrolled(carry)
    if final is None:
        steps = jnp.arange(length, dtype=canonical(INDEX))
        xs = [array(x) for x in inputs]
        try:
            carry, outputs = jax.lax.scan(one, [array(value) for value in carry], (steps, xs))
            return (*carry, *outputs)
        except Error as error:  # the Python loop works, or says better what is wrong
            why = error
        final = unrolled(carry)
    carry, rows = final
    if not rows:
        blank = [np.zeros(x.shape[1:], x.dtype) for x in inputs]
        return (*carry, *_empty(lambda: step(np.array(0, INDEX), carry, blank)[1], body, stacked))
    results = (*carry, *_stack(rows))
    _tell(body, length, results, why)
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
            new = _alike(carry, outputs[:size])
            keep = [jnp.where(i < end, a, b) for a, b in zip(new, carry, strict=True)]
            return keep, [jnp.where(i < end, y, jnp.zeros_like(y)) for y in outputs[size:]]

        inputs = [
            jnp.roll(x[::-1], end, axis=0) if reverse else x  # x[end - 1], ..., x[0], the rest
            for x, reverse in zip(inputs, backward, strict=True)
        ]
        return jax.lax.scan(one, carry, (jnp.arange(length), inputs))

    carry, outputs = jax.vmap(sequence)(ends, values[:size], values[size:])
    return (*carry, *outputs)


def _item(value):
    """Return the only element of a tensor of shape [] or [1]."""
    return np.asarray(value).reshape(()).item()


def _shapes(values):
    return [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(values)]


def _alike(old, new):
    """Return `new` for the next step; raise unless it has the shapes and types of `old`."""
    new = [array(value) for value in new]
    if jax.tree.structure(old) != jax.tree.structure(new) or _avals(old) != _avals(new):
        raise StaticError(f"the carried values change from {_shapes(old)} to {_shapes(new)}")
    return new


def _avals(values):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(values)]


def _stack(rows):
    """Stack the scan outputs of all iterations, each along a new first axis."""
    return tuple(
        np.stack(column) if known(*column) else jnp.stack([array(value) for value in column])
        for column in zip(*rows, strict=True)
    )


def _empty(outputs, body, stacked):
    """Return the scan outputs of no iteration: empty, of the shapes that the body would give."""
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
