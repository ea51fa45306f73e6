"""Convert pairs and dicts of arrays to inputs in the order of the model, and targets."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxonnx._data.ragged import (
    Needs,
    Padding,
    Ragged,
    column,
    derived_inputs,
    refuse_none,
    token_inputs,
    with_derived,
)
from jaxonnx._graph.values import Value
from jaxonnx._require import name_type, require
from jaxonnx.errors import TrainingError

_OF_BATCHES = "lists and other iterables are read as batches: make batches"


def as_pair(
    data: Any, values: Sequence[Value], what: str, labels: bool, padding: Padding
) -> tuple[tuple[Any, ...], Any]:
    """Convert data to inputs in the model's order, and targets.

    Args:
      data: a pair (x, y) or a dict, as the user passes it.
      values: the model's inputs.
      what: the data, for errors.
      labels: whether targets are wanted; else they may be missing, and are dropped.
      padding: which inputs and targets can be computed if they are missing.

    Returns:
      The inputs, and a pytree of targets: NumPy arrays, or `Ragged` for sequences of unequal
      length, with equal numbers of examples.

    Raises:
      TrainingError: something is missing, is not numbers, or has another number of examples.
    """
    # 1. inputs and targets as columns, of which some may be missing
    names, spare = [value.name for value in values], derived_inputs(values)
    needs = padding.needs if labels else Needs()
    spare = [*needs.complete, *spare]
    x, y = split_inputs(data if labels else (drop_targets(data, names), ()), names, what, spare)
    inputs = [
        None if a is None and n in spare else column(a, f"{what}: input {n!r}")
        for n, a in zip(names, x, strict=True)
    ]
    inputs = [
        array
        if not isinstance(a, list) or hasattr(next(iter(a), None), "dtype")
        else _as_input(array, value)
        for a, array, value in zip(x, inputs, values, strict=True)
    ]
    for value, array in zip(values, inputs, strict=True):
        _check_rank(value, array, what)
        of_tokens = value.name in token_inputs(values)
        _check_rows(value, array, what, negative=not labels, of_tokens=of_tokens)
    targets = jax.tree_util.tree_map_with_path(
        lambda path, a: column(a, f"{what}: the targets{jax.tree_util.keystr(path)}"),
        y,
        is_leaf=lambda v: isinstance(v, list),
    )
    # 2. inputs made of labels, masks and positions, and targets made of inputs
    for name, complete in needs.complete.items():
        inputs, targets = _complete_input(inputs, targets, names.index(name), complete, name, what)
    if all(array is None for array in inputs):
        lacks = "none of the inputs of the model" if names else "no use: the model has no inputs"
        raise TrainingError(f"{what} has {lacks}")
    inputs = with_derived(inputs, values)
    if needs.derive is not None and not jax.tree.leaves(targets):
        targets = needs.derive(inputs, values, what)
    # 3. refuse what is not numbers by example, in equal counts
    named = [(f"input {n!r}", a) for n, a in zip(names, inputs, strict=True)]
    whole = {f"input {value.name!r}" for value in values if value.whole}
    numbers = {f"input {value.name!r}" for value in values if value.shape == ()}
    texts = {f"input {value.name!r}" for value in values if value.dtype == object}
    named += [
        (f"the targets{jax.tree_util.keystr(path)}", a)
        for path, a in jax.tree_util.tree_leaves_with_path(targets)
    ]
    if labels and len(named) == len(names):
        raise TrainingError(
            f"{what} has no targets: pass (x, y), or a dict with the targets, which a function "
            "(outputs, targets) need not use"
        )
    for name, array in named:
        if not _has_numbers(array) and not (name in texts and array.dtype.kind in "OU"):
            remedy = (
                "; leave it out of the data if it is not a target"
                if name.startswith("the targets[")
                else ""
            )
            raise TrainingError(f"{what}: {name} must be numbers, got {array.dtype}{remedy}")
        if not array.ndim and name not in whole:
            way = f"{_OF_BATCHES}, or pass rows as (np.stack(xs), np.stack(ys))"
            way = _without_examples(name) if name in numbers else way
            raise TrainingError(
                f"{what}: {name} is a scalar, not an array with one value per example; {way}"
            )
    counts = {name: len(a) for name, a in named if name not in whole}
    if len({*counts.values()}) > 1:
        lengths = ", ".join(f"{n} {count}" for n, count in counts.items())
        usual = Counter(counts.values()).most_common(1)[0][0]
        differing = next(n for n, count in counts.items() if count != usual)
        if turned := _find_states(counts, dict(named)):
            listed = ", ".join(name.removeprefix("input ") for name in turned)
            all_inputs = sum(name.startswith("input") for name in counts) == len(turned)
            remedy = (
                " of sequences with the steps first. Put them first, and give each example an axis "
                "of 1 in their place: np.expand_dims(np.moveaxis(x, 1, 0), 2)"
                if all_inputs
                else ", as in states of recurrent layers. Without them in the data the states "
                "start at zeros; jaxonnx.training.step takes batches with them"
            )
            raise TrainingError(
                f"{what} has different numbers of examples: {lengths}. {listed}: the examples are "
                f"along axis 1{remedy}"
            )
        raise TrainingError(
            f"{what} has different numbers of examples: {lengths}"
            + (f"; {_without_examples(differing)}" if differing.startswith("input") else "")
        )
    if not all(counts.values()):
        raise TrainingError(f"{what} has no examples")
    return inputs, targets


def take_input_types(columns: Mapping[str, Any], values: Sequence[Value]) -> dict[str, Any]:
    """Give columns of rows the floating-point types and shapes of the inputs that they are for.

    Numbers of texts, lists and data sets have no type that was chosen for the model, unlike arrays:
    whole ones become real, and real ones are rounded to 16 bits. A column of single numbers or
    texts becomes [n, 1] for an input of that shape: pipelines of scikit-learn have one for each
    column of a table.
    """
    inputs = {value.name: value for value in values}
    if len(inputs) == 1 and inputs.keys().isdisjoint(columns):
        inputs = {"x": values[0]}
    columns = {n: _as_input(x, inputs[n]) if n in inputs else x for n, x in columns.items()}
    for name in inputs.keys() & columns.keys():
        shape, array = inputs[name].shape or (), columns[name]
        single = isinstance(array, np.ndarray) and array.ndim == 1
        if single and len(shape) == 2 and shape[1] == 1:
            columns[name] = array[:, None]
    return columns


def _as_input(array: Any, value: Value) -> Any:
    """Convert numbers without a type of their own to that of an input, if it is floating-point."""
    if isinstance(array, list):
        return [_as_input(part, value) for part in array]
    dtype = value.dtype
    # numbers of files are float32 by now, and are not widened
    if dtype is None or dtype.itemsize > 4 or not jax.numpy.issubdtype(dtype, np.floating):
        return array
    fits = isinstance(array, np.ndarray | np.generic) and array.dtype.kind in "iuf"
    return array.astype(dtype) if fits else array


def _has_numbers(array: Any) -> bool:
    return array.dtype.kind not in "OSUMm" and array.dtype.type is not np.void


def _check_rank(value: Value, array: Any, what: str) -> None:
    """Raise if an input has fewer axes than the model's, as a row where a batch is due has."""
    if value.shape is None or value.whole or not isinstance(array, np.ndarray):
        return
    if array.ndim >= len(value.shape) or not _has_numbers(array):
        return
    pairs = zip(array.shape, value.shape[len(value.shape) - array.ndim :], strict=True)
    is_row = all(not isinstance(declared, int) or size == declared for size, declared in pairs)
    remedy = (
        f"; {_OF_BATCHES}, or pass rows as one array, np.stack(rows), or if their lengths differ "
        f"{{{value.name!r}: rows}}"
    )
    raise TrainingError(
        f"{what}: input {value} has rank {len(value.shape)}, with the examples along the first "
        f"axis, and the data has the shape {[*array.shape]}{remedy if is_row else ''}"
    )


def _find_states(counts: Mapping[str, int], arrays: Mapping[str, Any]) -> list[str]:
    """Return inputs with the examples along axis 1, as recurrent states: [layers, batch, size].

    So they are in sequences with the steps first, [steps, batch, size].

    Args:
      counts: the lengths of inputs and targets by name, which differ.
    """
    for size in {*counts.values()}:
        differing = [name for name, count in counts.items() if count != size]
        shapes = [np.shape(arrays[n]) for n in differing if not isinstance(arrays[n], Ragged)]
        of_inputs = all(name.startswith("input") for name in differing)
        if of_inputs and len(shapes) == len(differing) and all(s[1:2] == (size,) for s in shapes):
            return differing
    return []


def _check_rows(value: Value, array: Any, what: str, negative: bool, of_tokens: bool) -> None:
    """Raise if an input has an index beyond its table, or a counted mask other than 1s before 0s.

    Args:
      value: the input; `rows` is the size of the table.
      array: its data.
      what: the data, for errors.
      negative: allow negative indices, which count from the end as in Gather.
      of_tokens: whether the table has a row for each token.
    """
    numbers = array.values if isinstance(array, Ragged) else array
    end = 2 if value.counted else value.rows
    if end is None or not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in "iu":
        return
    flat = numbers.reshape(-1)
    if isinstance(array, Ragged):
        starts = array.starts[:-1]
    else:
        starts = np.arange(0, flat.size, max(1, math.prod(numbers.shape[1:])))
    least = 0 if value.counted or not negative else -end
    wrong, behind = np.flatnonzero((flat < least) | (flat >= end)), False
    if value.counted and not len(wrong):
        wrong, behind = np.setdiff1d(np.flatnonzero(flat[1:] > flat[:-1]) + 1, starts), True
    if not len(wrong):
        return
    row = int(np.searchsorted(starts, wrong[0], "right")) - 1
    place = f"at place {wrong[0] - starts[row]} of input {value.name!r}"
    if behind:
        raise TrainingError(
            f"{what}: example {row} has a token behind padding, {place}, whose sum is the length "
            "of the text: put padding behind the tokens (in transformers, padding_side 'right'), "
            "or pass each text at its own length"
        )
    if value.counted:
        meaning = (
            "is 1 for each token and 0 for padding, and whose sum is the length of the text: pass "
            "each text as an example; preprocess={'pack': True} joins several in a row"
        )
    else:
        meaning = f"chooses from a table of {end} rows, 0 ... {end - 1}"
        meaning += "; model.with_tokens(...) adds the rows of tokens" * of_tokens
    raise TrainingError(f"{what}: example {row} has {flat[wrong[0]]} {place}, which {meaning}")


def _complete_input(
    inputs: list[Any],
    targets: Any,
    place: int,
    complete: Callable[[Any], tuple[Any, Any]],
    name: str,
    what: str,
) -> tuple[list[Any], Any]:
    """Compute an input from the labels, if data omits it."""
    if inputs[place] is not None:
        return inputs, targets
    labels, tree = jax.tree.flatten(targets)
    if len(labels) != 1:
        raise TrainingError(
            f"{what} has {'several targets' if labels else 'no targets'}, of which "
            f"'{name}' could be made: pass it"
        )
    array, target = complete(labels[0])
    return [*inputs[:place], array, *inputs[place + 1 :]], tree.unflatten([target])


def _without_examples(column: str) -> str:
    """Return the remedies, for an error, if a column does not have one row for each example."""
    if not column.startswith("input"):
        return "targets have the examples along the first axis, one at least"
    name = column.removeprefix("input ")
    return (
        f"fixed={{{name}: value}} gives an input one value for all examples (leave it out of the "
        f"data), and batching={{{name}: None}} passes it whole with each batch"
    )


def count_examples(inputs: Sequence[Any], targets: Any, values: Sequence[Value]) -> int:
    """Return the number of examples of a batch; inputs that are passed whole do not count."""
    pairs = zip(values, inputs, strict=True)
    rows = next((x for value, x in pairs if not value.whole), None)
    rows = jax.tree.leaves(targets)[0] if rows is None else rows
    return len(rows) if isinstance(rows, Ragged) else np.shape(rows)[0]


def split_inputs(
    data: Any, names: list[str], what: str, spare: Sequence[str]
) -> tuple[tuple[Any, ...], Any]:
    """Split a pair or a dict into inputs in the model's order, and targets.

    Args:
      data: the data.
      names: the model's inputs.
      what: the data, for errors.
      spare: inputs that may be missing, and are None then. If inputs have no names, the first ones
        of these are missing first.
    """
    x, y = _split_pair(data, names, what, spare)
    if isinstance(x, Mapping):
        if not {*names} - {*spare} <= {*x} <= {*names}:
            raise TrainingError(f"{what} has the inputs {sorted(x)}; the model has {sorted(names)}")
        x = tuple(x.get(name) for name in names)
    x = x if isinstance(x, tuple) else (x,)
    missing = spare[: max(0, len(names) - len(x))]
    if len(x) == len(names) - len(missing):
        rest = iter(x)
        x = tuple(None if name in missing else next(rest) for name in names)
    if len(x) != len(names):
        raise TrainingError(
            f"{what} has {len(x)} inputs; the model has {len(names)}: {names} "
            "(fixed={name: value} gives one a value for all examples; a tuple has one array for "
            "each input, and np.stack makes one of rows)"
        )
    return x, y


def drop_targets(data: Any, names: list[str]) -> Any:
    """Return the inputs of data without its targets."""
    if isinstance(data, Mapping):
        if len(names) == 1 and names[0] not in data and "x" in data:
            return data["x"]
        return {name: data[name] for name in names if name in data}
    if not isinstance(data, tuple | list):
        return data
    nested = any(isinstance(x, tuple | Mapping) for x in data)
    if len(data) == len(names) and not nested:
        return tuple(data)
    return data[0] if len(data) == 2 else data


def find_inputs(batch: Any, names: list[str]) -> Any:
    """Return the inputs of a batch that may have targets and weights."""
    weighed = isinstance(batch, tuple) and len(batch) == 3 != len(names)
    return drop_targets(batch[:2] if weighed else batch, names)


def _split_pair(data: Any, names: list[str], what: str, spare: Collection[str]) -> tuple[Any, Any]:
    """Split a pair or a dict into inputs and targets, without changing either."""
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1]
    if not isinstance(data, Mapping):
        expected = "a pair (x, y) or a dict with the inputs and targets"
        raise TrainingError(f"{what} must be {expected}, got {name_type(data)}")
    if len(names) == 1 and names[0] not in data and {*data} == {"x", "y"}:
        return data["x"], data["y"]
    if missing := [name for name in names if name not in data and name not in spare]:
        way = f"fixed={{{missing[0]!r}: value}} gives an input one value for all examples"
        if texts := [name for name, column in data.items() if _has_texts(column)]:
            way = f"{texts[0]!r} has texts: the tokenizer of the network makes its inputs of them"
        raise TrainingError(
            f"{what} has {', '.join(map(repr, data)) or 'nothing'}; it lacks the model's "
            f"{'input' if len(missing) == 1 else 'inputs'} {', '.join(map(repr, missing))} ({way})"
        )
    targets = {name: value for name, value in data.items() if name not in names}
    inputs = {name: data[name] for name in names if name in data}
    return inputs, next(iter(targets.values())) if len(targets) == 1 else targets


def _has_texts(column: Any) -> bool:
    """Check whether a column has texts, or lists of words, by its first example."""
    while isinstance(column, list | tuple) and len(column) > 0:
        column = column[0]
    return isinstance(column, str)


def lacks_batch_axis(batch: Any, inputs: Sequence[Value]) -> bool:
    """Check whether the model takes single examples, and data has one more axis, of examples.

    Args:
      batch: the data or a batch of it, with or without targets; None if it is not known.
      inputs: the model's inputs.
    """
    names = [value.name for value in inputs]
    x = find_inputs(batch, names)
    if isinstance(x, Mapping):
        x = tuple(x.get(name) for name in names)
    arrays = x if isinstance(x, tuple) else (x,)
    return len(arrays) == len(inputs) > 0 and all(map(_has_further_axis, arrays, inputs))


def _has_further_axis(array: Any, value: Value) -> bool:
    """Check whether an array has one axis more than an input, in front of axes that fit it."""
    shape = getattr(array, "shape", None)
    if shape is None or value.shape is None or value.whole or len(shape) != len(value.shape) + 1:
        return False
    sizes = zip(shape[1:], value.shape, strict=True)
    return all(not isinstance(declared, int) or declared == size for size, declared in sizes)


KEY = "weight"
"""The name of the weights in a dict."""
JUDGEMENT = "label"
"""The name of the column that says whether an answer is desirable."""


def split_weights(
    data: Any, inputs: Collection[str], targets: Collection[str], derived: bool = False
) -> tuple[Any, Any]:
    """Split the weights of examples off data.

    They are the third of three arrays (x, y, weights), or the entry `KEY` of a dict that also has
    targets or needs none.

    Args:
      data: as the user passes it.
      inputs: the names of the model's inputs.
      targets: the names of targets; if `KEY` is one of them, it is not weights.
      derived: whether targets may be missing, as the loss makes them of the inputs.

    Returns:
      The data without weights, and the weights or None.
    """
    if isinstance(data, tuple | list) and len(data) == 3 and _numbers(data[2]):
        return (data[0], data[1]), data[2]
    if isinstance(data, Mapping) and KEY in data and KEY not in {*inputs, *targets}:
        rest = {name: value for name, value in data.items() if name != KEY}
        if derived or rest.keys() - {*inputs}:
            return rest, data[KEY]
    return data, None


def checked_weights(weights: Any, count: int, what: str) -> np.ndarray:
    """Return weights as float32.

    Raises:
      TrainingError: they are not one finite number of at least 0 for each example.
    """
    weights = np.asarray(weights)
    if weights.dtype == object and weights.ndim:
        refuse_none(weights, f"{what}: the weights")
    fits = weights.shape == (count,) and weights.dtype.kind in "biuf"
    expected = f"one number for each of {count} examples"
    require(f"{what}: the weights", weights, fits, expected, TrainingError)
    weights = weights.astype(np.float32)
    if not (usable := np.isfinite(weights) & (weights >= 0)).all():
        number = int(np.argmin(usable))
        raise TrainingError(
            f"{what}: the weight of example {number} is negative or not finite: {weights[number]}"
        )
    return weights


def _numbers(value: Any) -> bool:
    """Check whether a value is an array or a list of numbers, rather than a batch."""
    if isinstance(value, list):
        return all(isinstance(x, int | float | np.number) for x in value)
    return hasattr(value, "__array__")


def is_zero_or_one(weight: Any) -> bool:
    """Check whether each example counts fully or not at all."""
    return weight is None or bool(np.isin(weight, (0, 1)).all())
