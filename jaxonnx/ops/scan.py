"""Scan: a body over the rows of tensors."""

from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._limits import OutOfTime, check_time, patience
from jaxonnx.errors import Error, NodeError
from jaxonnx.ops.common import INDEX, axis_of, canonical
from jaxonnx.ops.iteration import alike, check_length, empty, note_unrolling, stack
from jaxonnx.ops.known_values import array, is_traced
from jaxonnx.registry import op, xp


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
            if i == 0 and why is not None and (body.known or is_traced(carry, outputs)):
                check_length(length, body.known, why)
        return carry, rows

    why, final = None, None
    if body.known:
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
