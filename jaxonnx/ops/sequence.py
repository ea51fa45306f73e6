"""Sequences are Python lists; an optional is its element, or None if it is empty."""

import jax.numpy as jnp
import numpy as np

from jaxonnx._limits import check_size, check_time
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import FIXED_BATCH, INDEX, array, axis_of, is_traced
from jaxonnx.registry import Static, is_known, op, xp


def _position(position, length, *, end):
    """Resolve a possibly negative position; `end` also allows the place after the last element."""
    i = int(position.reshape(()))
    if not -length <= i < length + end:
        raise NodeError(f"position {i} is out of range for a sequence of {length}")
    return i + length if i < 0 else i


LONGEST = {True: 1 << 16, False: 1 << 22}
"""The parts that a traced tensor splits into at most, each an operation to compile; and others."""

_PART = 128
"""Bytes that an array takes besides its elements, about."""


@op("SequenceAt", since=11)
def sequence_at(input_sequence, position: Static):
    return input_sequence[_position(position, len(input_sequence), end=0)]


@op("SequenceConstruct", since=11)
def sequence_construct(*inputs):
    return list(inputs)


@op("SequenceEmpty", since=11)
def sequence_empty(*, dtype=None):
    """The empty sequence; a list has no element type, so `dtype` is not kept."""
    del dtype
    return []


@op("SequenceErase", since=11)
def sequence_erase(input_sequence, position: Static | None = None):
    length = len(input_sequence)
    i = length - 1 if position is None else _position(position, length, end=0)
    if i < 0:
        raise NodeError("an empty sequence has nothing to erase")
    return input_sequence[:i] + input_sequence[i + 1 :]


@op("SequenceInsert", since=11)
def sequence_insert(input_sequence, tensor, position: Static | None = None):
    length = len(input_sequence)
    i = length if position is None else _position(position, length, end=1)
    return [*input_sequence[:i], tensor, *input_sequence[i:]]


@op("SequenceLength", since=11)
def sequence_length(input_sequence):
    return np.array(len(input_sequence), INDEX)


@op("SequenceMap", since=17)
def sequence_map(input_sequence, *additional_inputs, body):
    """The body applied to every element; further inputs that are sequences go along with it."""
    length = len(input_sequence)
    for sequence in additional_inputs:
        if isinstance(sequence, list) and len(sequence) != length:
            raise NodeError(f"sequences of {length} and {len(sequence)} cannot be mapped together")
    rows = []
    for i, element in enumerate(input_sequence):
        check_time()
        others = (x[i] if isinstance(x, list) else x for x in additional_inputs)
        rows.append(body(element, *others, step=i))
    return tuple([row[k] for row in rows] for k in range(len(body.outputs)))


@op("SplitToSequence", since=11)
def split_to_sequence(input, split: Static | None = None, *, axis=0, keepdims=1):
    """Slices of length `split` (a scalar: equal ones, the last may be shorter) along `axis`.

    Without `split` the slices have length 1, and no such axis if `keepdims` is 0.
    """
    axis = axis_of(axis, input.ndim)
    size = input.shape[axis]
    if split is None or split.ndim == 0:
        length = 1 if split is None else int(split)
        if length <= 0:
            raise NodeError(f"split must be positive, got {length}")
        bounds = range(length, size, length)
        count = -(-size // length)
    else:
        if (split < 0).any() or split.sum() != size:
            raise NodeError(
                f"split {split.tolist()} does not add up to the axis length {size}"
                f"{'' if axis else FIXED_BATCH}"
            )
        bounds, count = np.cumsum(split)[:-1].tolist(), len(split)
    if count > LONGEST[is_traced(input)]:
        raise NodeError(
            f"a sequence of {count} tensors is above the {LONGEST[is_traced(input)]} here"
        )
    check_size((count, _PART), host=True)
    parts = xp(input).split(input, list(bounds), axis=axis) if count else []
    return [part.squeeze(axis) for part in parts] if split is None and not keepdims else parts


@op("ConcatFromSequence", since=11)
def concat_from_sequence(input_sequence, *, axis, new_axis=0):
    """The elements joined along `axis`, or stacked along it if `new_axis` is 1."""
    if not input_sequence:
        raise NodeError("an empty sequence cannot be concatenated")
    if is_known(input_sequence):
        return (np.stack if new_axis else np.concatenate)(input_sequence, axis=axis)
    items = [array(item) for item in input_sequence]
    return (jnp.stack if new_axis else jnp.concatenate)(items, axis=axis)


@op("Optional", since=15)
def optional(input=None, *, type=None):
    del type  # says what an empty optional could hold; None holds no type
    return input


@op("OptionalGetElement", since=15)
def optional_get_element(input):
    if input is None:
        raise NodeError("the optional is empty; check it with OptionalHasElement first")
    return input


@op("OptionalHasElement", since=15)
def optional_has_element(input=None):
    return np.array(input is not None)
