"""Rewriting a file that was exported for one batch size to take any.

Without dynamic axes an exporter writes the batch size of its example into targets of Reshape and
initial states of recurrent layers. Two evaluations on shapes, one with the file's size and one with
another, tell which axis of every value is the batch; a target that holds the size gets a -1 in its
place. In a file for one example, rows beside a batch are repeated, and indices of examples become a
range. The new graph is run on two batches in one, and must give what the old one gives for each:
there may be several places to choose from, and a file for one example may mix those of a batch (a
Softmax over the first axis).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from jaxonnx import _limits as limits
from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph, Node, bind
from jaxonnx._graph.caches import count_rows
from jaxonnx._graph.values import Value, hint_at_image, to_value
from jaxonnx._io.protos import declare, unused_name
from jaxonnx._run.program import Program
from jaxonnx._run.scope import Context, Scope
from jaxonnx.errors import Error, InputError
from jaxonnx.views import FixedInputs, Outputs

Shape = tuple[int, ...]
_RECURRENT = ("GRU", "LSTM", "RNN")
_INITIAL = (5, 6)
"""The positions of `initial_h` and `initial_c` among the inputs of recurrent layers."""
ROUND_TOGETHER = (
    "DynamicQuantizeLinear",
    "DynamicQuantizeLSTM",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
)
"""Operators whose rounding depends on all numbers of a batch."""
_WAY_OUT = (
    "export the network with a dynamic batch: dynamic_shapes= of torch.onnx.export, or "
    "dynamic_axes= with dynamo=False"
)


def free_batch(
    proto: ModelProto,
    program: Program,
    params: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    prove: bool,
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Rewrite a file that was exported with a fixed batch size to take any batch size.

    The new file declares the dimension "batch" as the first one of inputs and outputs. A file whose
    first dimensions are symbolic already is returned as it is, unless it runs with one example and
    not with several.

    Args:
      proto: the file.
      program: the program of `proto`, which evaluates it; it holds the constants.
      params, state: the other named tensors of the program.
      prove: require as well that each output has the batch along its first axis, and depends on the
        inputs.

    Returns:
      The new file and the constants that it adds, by name.

    Raises:
      InputError: a node fixes the batch in a way that cannot be rewritten (the message names it),
        or the two files give different results.
    """
    values = [to_value(v) for v in proto.graph.input if v.name in program.graph.inputs]
    # inputs that the program fixes to one value are not among the weights of the graph
    views = (view for view in program.views if isinstance(view, FixedInputs))
    fixed = {n: x.array for v in views for n, x in v.values.items() if x.axis is None}
    tensors = {**program.constants, **fixed, **state, **params}
    rows = count_rows(program.graph, tensors)
    values = [replace(v, rows=rows.get(v.name)) for v in values]
    sizes = {v.name: v.shape[0] for v in values if v.shape and isinstance(v.shape[0], int)}
    samples = _close_other_axes(program.graph, values, tensors)
    inputs = samples[0]
    if not sizes:
        batches = {v.shape[0] for v in inputs if v.shape}
        ends = [v for v in map(to_value, proto.graph.output) if v.shape and v.shape[0] in batches]
        if not _takes_one_alone(program.graph, inputs, tensors, [v.name for v in ends]):
            return proto, {}
        samples = [[*map(_as_one, inputs)] for inputs in samples]
        inputs = samples[0]
        sizes = {v.name: 1 for v in inputs if v.shape}
    if len({*sizes.values()}) > 1:
        raise InputError(f"the first axes of the inputs are not one batch: {sizes}; {_WAY_OUT}")
    (size,) = {*sizes.values()}
    changes, *others = (_find_changes(program.graph, x, tensors, size) for x in samples)
    for other in others:
        changes.check_same(other)
    nodes, outputs = program.graph.nodes, program.graph.outputs
    needed = ancestors([*map(changes.apply, nodes)], outputs)
    if lost := {*fixed} & ancestors(nodes, outputs) - needed:  # states that are zeros
        listed = ", ".join(f"'{name}'" for name in sorted(lost))
        raise InputError(f"fixed inputs have the batch in their values: {listed}; {_WAY_OUT}")
    for name in outputs if prove else ():  # others mix the examples
        old, freed = changes.shapes.get(name, ((), ()))
        moved = [axis for axis, (a, b) in enumerate(zip(old, freed, strict=False)) if a != b]
        if moved != [0]:
            raise InputError(
                f"the output '{name}' {[*old]} does not have the batch along its first axis; "
                f"{_WAY_OUT}"
            )
    added = {_input_name(*at): value for at, value in changes.inputs.items()}

    def write(changes: _Changes) -> ModelProto:
        result = ModelProto()
        result.CopyFrom(proto)
        _write_changes(result.graph, [*sizes], changes, size)
        if prove or not program.draws(training=False):  # random numbers differ with the batch
            graph = bind(result, result.graph, {*tensors, *added})
            new = replace(program, base=graph, constants={**program.constants, **added})
            _compare(program, new, params, state, inputs, changes, prove=prove)
        return result

    try:
        return write(changes), added
    except InputError:
        if not changes.guesses:
            raise
        with suppress(InputError):
            return write(replace(changes, computed=changes.computed | changes.guesses)), added
        raise


_SAMPLES = (((7, 64), (11, 96)), ((64, 128), (96, 160)), ((4096, 256), (6144, 384)))
"""Sizes of open axes, and of open sides of pictures, to try: two of each, to find changes with."""


def _close_other_axes(
    graph: Graph, inputs: list[Value], tensors: Mapping[str, Any]
) -> list[list[Value]]:
    """Return inputs with two samples of sizes for open axes behind the first, if there are any.

    Raises:
      InputError: the file fixes the batch, and the network takes none of the samples.
    """
    first = {v.shape[0] for v in inputs if v.shape}
    names: dict[Any, int] = {}

    def close(value: Value, length: int, side: int) -> Value:
        shape = [*(value.shape or ())]
        is_picture = len(shape) == 4 and value.dtype is not None and value.dtype.kind == "f"
        for axis, size in enumerate(shape[1:], 1):
            if not isinstance(size, int) and (size is None or size not in first):
                number = names.setdefault(size or (value.name, axis), len(names))
                shape[axis] = side + 32 * number if is_picture and axis > 1 else length + number
        return value if value.shape is None else replace(value, shape=tuple(shape))

    for pair in _SAMPLES:
        samples = [[close(value, *sizes) for value in inputs] for sizes in pair]
        if not names:
            return [inputs]
        alone = [[*map(_as_one, sample)] for sample in samples]
        try:
            for sample, single in zip(samples, alone, strict=True):
                fixed = all(isinstance(v.shape[0], int) for v in sample if v.shape)
                _trace(graph, sample if fixed else single, tensors, 0, 0, lambda node, _: node)
        except InputError:
            continue
        return samples
    if all(isinstance(size, int) for size in first):
        raise InputError(
            f"{', '.join(map(str, inputs))}: other axes are open than the batch, and none of the "
            f"sizes that were tried fits; {_WAY_OUT}"
        )
    return [inputs]


def _as_one(value: Value) -> Value:
    """Return an input that is declared for any batch as one for a single example."""
    return replace(value, shape=(1, *value.shape[1:])) if value.shape else value


def _takes_one_alone(
    graph: Graph, inputs: list[Value], tensors: Mapping[str, Any], outputs: list[str]
) -> bool:
    """Check whether inputs that are declared for any batch are taken for one example alone.

    So they are where an exporter was given names of dynamic axes, but wrote the batch of its
    example into the nodes. Several examples are then refused, or become one.

    Args:
      outputs: those that are declared to have the batch.
    """
    if any(v.shape is None or not all(isinstance(d, int) for d in v.shape[1:]) for v in inputs):
        return False  # shapes cannot be followed
    ones = [*map(_as_one, inputs)]
    try:
        single = _trace(graph, ones, tensors, 1, 1, lambda node, _: node)
    except InputError:
        return False
    try:
        several = _trace(graph, ones, tensors, 1, 3, lambda node, _: node)
    except InputError:
        return True
    return any(single[name][:1] == several[name][:1] == (1,) for name in outputs)


@dataclass
class _Changes:
    """The changes that make the batch size free; nodes are named by their first output."""

    inputs: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    """New constants, by node and input position: targets of Reshape, data of Expand."""
    computed: dict[tuple[str, int], Row | Lookup] = field(default_factory=dict)
    """Inputs that new nodes compute for each example, by node and input position: rows of Concat,
    GatherElements and MatMul, and indices of Gather and GatherND."""
    guesses: dict[tuple[str, int], Lookup] = field(default_factory=dict)
    """Indices of Gather and GatherND that depend on the inputs. They may lack the number of the
    example, which is 0 in the file."""
    stateless: set[str] = field(default_factory=set)
    """Recurrent layers whose initial states are constant zeros: the inputs are dropped, because an
    absent initial state is zero for any batch size."""
    copying: set[str] = field(default_factory=set)
    """Reshapes with `allowzero`, which goes, as their new target copies the batch by a 0."""
    shapes: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """The shapes of each value for the file's batch size and for the other one."""

    def check_same(self, other: _Changes) -> None:
        """Refuse changes that differ with the sizes of other axes that are open."""
        if self.computed != other.computed or self.stateless != other.stateless:
            raise InputError(f"what fixes the batch depends on other open axes; {_WAY_OUT}")
        for at in self.inputs.keys() | other.inputs.keys():
            a, b = self.inputs.get(at), other.inputs.get(at)
            if a is None or b is None or not np.array_equal(a, b):
                raise InputError(
                    f"input {at[1]} of the node of '{at[0]}' fixes the batch, and depends on other "
                    f"open axes; {_WAY_OUT}"
                )

    def apply(self, node: Node) -> Node:
        """Return the node with its new input names, for the evaluation of the changed graph."""
        first = node.outputs[0] if node.outputs else ""
        inputs = tuple(
            _input_name(first, i) if (first, i) in {*self.inputs, *self.computed} else name
            for i, name in enumerate(node.inputs)
        )
        if first in self.stateless:
            inputs = tuple("" if i in _INITIAL else name for i, name in enumerate(inputs))
        if first in self.copying:
            node = replace(node, attributes={**node.attributes, "allowzero": 0})
        reads = (*(n for n in inputs if n), *(n for n in node.reads if n not in node.inputs))
        return replace(node, inputs=inputs, reads=tuple(dict.fromkeys(reads)))


def _input_name(output: str, position: int) -> str:
    """Name the new tensor at an input of the node whose first output is `output`."""
    return f"{output}/input_{position}"


def _find_changes(
    graph: Graph, inputs: list[Value], tensors: Mapping[str, Any], size: int
) -> _Changes:
    """Find the nodes that fix the batch to `size`, by two evaluations on shapes.

    Raises:
      InputError: a node or an output fixes the batch in a way that cannot be rewritten.
    """
    changes = _Changes()
    targets: dict[str, np.ndarray] = {}
    indices: dict[str, np.ndarray] = {}
    like = next(v.name for v in inputs if v.shape and v.shape[0] == size)

    # 1. with the file's size, note the targets of Reshape and the indices that are known
    def note_constants(node: Node, scope: Scope) -> Node:
        constants = {"Reshape": targets, "Gather": indices, "GatherND": indices}.get(node.op.name)
        if constants is not None and len(node.inputs) > 1 and node.outputs:
            value = scope[node.inputs[1]]
            if isinstance(value, np.ndarray):
                constants[node.outputs[0]] = value
        return node

    # 2. with another size, a target that stays the same may hold the file's size
    def free_node(node: Node, scope: Scope) -> Node:
        first = node.outputs[0] if node.outputs else ""
        if first in targets and np.array_equal(scope[node.inputs[1]], targets[first]):
            before, now = old[node.inputs[0]], tuple(scope[node.inputs[0]].shape)
            axes = batch_axes(before, now, old[first], size)
            if axes:
                # the result's shape for the other size: its batch axis takes what the rest leaves
                new = list(old[first])
                new[axes[0]] = -1
                rest = math.prod(d for d in new if d > 0)
                new[axes[0]] = math.prod(now) // max(rest, 1)
                # a target with 0 or -1 in the right places gives this shape as it is; any other
                # holds the file's size as a number, in place of which -1 is written
                if new != resolve_target(targets[first], now):
                    # the rest of the target stays, as other axes may be open
                    target, rest = targets[first].copy(), np.delete(targets[first], axes[0])
                    target[axes[0]] = 0 if -1 in rest else -1
                    if new != resolve_target(target, now):
                        new[axes[0]] = -1
                        target = np.array(new, np.int64)
                    elif (
                        0 in target and 0 not in targets[first] and node.attributes.get("allowzero")
                    ):
                        changes.copying.add(first)
                    replace_input(first, 1, target, scope)
        elif node.op.name in _RECURRENT and _starts_at_zero(node, scope):
            changes.stateless.add(first)  # zeros of the file's size are left out
        elif node.op.name == "Expand" and isinstance(data := scope[node.inputs[0]], np.ndarray):
            # An exporter folded the repetition of one row to the file's size into the constant:
            # keep the row alone. Expand broadcasts, so axes are matched from the last one.
            target = scope[node.inputs[1]]
            for axis, (a, b) in enumerate(zip(data.shape[::-1], target[::-1], strict=False)):
                repeated = np.take(data, [0], -1 - axis)
                if a == size and b not in (1, a) and np.array_equal(data, data * 0 + repeated):
                    replace_input(first, 0, repeated, scope)
        elif node.op.name in ("Concat", "GatherElements", "MatMul") and size == 1:
            # with a batch of one example, a row has the right length without repetition
            for i, row in find_rows(node, scope, old).items():
                changes.computed[first, i] = row
                scope.values[_input_name(first, i)] = row.repeat(scope)
        elif size == 1 and (lookup := find_lookup(node, scope, old, like)):
            # with a batch of one example, a constant index of its values needs no offset
            index = scope[lookup.index]
            if not isinstance(index, np.ndarray):
                changes.guesses |= {(first, 1): lookup} if len(index) > 1 else {}
            elif np.array_equal(index, indices.get(first, ())):
                changes.computed[first, 1] = lookup
                scope.values[_input_name(first, 1)] = lookup.move(index, scope[like].shape[0])
        return changes.apply(node)

    # the pass goes on with the new value, so that later nodes see the batch too
    def replace_input(first: str, position: int, value: np.ndarray, scope: Scope) -> None:
        changes.inputs[first, position] = scope.values[_input_name(first, position)] = value

    old = _trace(graph, inputs, tensors, size, size, note_constants)
    # 2 n + 1 has no factor in common with n: a target that holds n rarely fits by chance
    new = _trace(graph, inputs, tensors, size, 2 * size + 1, free_node)
    for name in graph.outputs:
        if name in old and old[name][:1] == (size,) and new.get(name) == old[name]:
            raise InputError(
                f"the output '{name}' has the shape {list(old[name])} whatever the batch is; "
                f"{_WAY_OUT}"
            )
    changes.shapes.update((name, (old[name], new[name])) for name in old.keys() & new.keys())
    return changes


def _trace(
    graph: Graph,
    inputs: list[Value],
    tensors: Mapping[str, Any],
    size: int,
    other: int,
    visit: Callable[[Node, Scope], Node],
) -> dict[str, Shape]:
    """Evaluate a graph on shapes with another batch size; return the shapes of all values.

    Args:
      size: the batch size of the file; an input whose first dimension it is gets `other` there.
      other: the batch size to evaluate with.
      visit: called before each node with the values so far; returns the node to evaluate.

    Raises:
      InputError: an input has no fixed shape, or a node does not take this batch size.
    """
    arguments = {}
    for value in inputs:
        if value.dtype is None or value.shape is None or None in value.shape:
            raise InputError(f"input {value} has no fixed shape; {_WAY_OUT}")
        if value.dtype == object:
            raise InputError(f"input {value} has no numbers, whose shapes could be followed")
        if any(isinstance(d, str) for d in value.shape):
            raise InputError(f"input {value} is open in other axes; {_WAY_OUT}")
        batch = (other if value.shape[:1] == (size,) else d for d in value.shape[:1])
        shape, dtype = (*batch, *value.shape[1:]), jax.dtypes.canonicalize_dtype(value.dtype)
        limits.check_size(shape, dtype)
        arguments[value.name] = jax.ShapeDtypeStruct(shape, dtype)
    shapes: dict[str, Shape] = {}

    def body(arguments):
        values = {n: tensors[n] for n in tensors.keys() - {*graph.weights}} | arguments
        scope = Scope(graph, Context(tensors, jax.random.key(0), False), None, values)
        for node in graph.nodes:
            node = visit(node, scope)
            try:
                scope.step(node)
            except Error as error:
                # without the remedies of the node
                cause = re.split(r"; (?:jaxonnx\.load\(path, b|if axis 0)", str(error))[0]
                raise InputError(
                    f"{node.label} fixes the batch to {size} ({cause}); {_WAY_OUT}"
                    f"{hint_at_image(inputs, size)}"
                ) from error
        shapes.update((n, tuple(v.shape)) for n, v in scope.values.items() if hasattr(v, "shape"))

    with limits.inspection_limits():
        jax.eval_shape(body, arguments)
    return shapes


def _starts_at_zero(node: Node, scope: Scope) -> bool:
    """Check whether a recurrent layer has initial states, and all of them are constant zeros."""
    states = [scope[node.inputs[i]] for i in _INITIAL if i < len(node.inputs) and node.inputs[i]]
    zero = [not isinstance(s, Tracer) and not np.any(np.asarray(s)) for s in states]
    return bool(states) and all(zero)


def _write_changes(graph: GraphProto, inputs: list[str], changes: _Changes, size: int) -> None:
    """Write the changes and the symbolic dimension of `inputs` and outputs into a graph, in place.

    New constants become initializers without data, which `save` fills in.
    """
    # 1. the symbolic batch in inputs and outputs
    ends = (*graph.input, *graph.output)
    batch = unused_name("batch", {d.dim_param for v in ends for d in v.type.tensor_type.shape.dim})
    for value in graph.input:
        if value.name in inputs:
            value.type.tensor_type.shape.dim[0].dim_param = batch
    for value in graph.output:
        old, new = changes.shapes.get(value.name, ((), ()))
        dims = value.type.tensor_type.shape.dim
        for dim, a, b in zip(dims, old, new, strict=False):
            if a != b:
                dim.Clear()
                if a == size:
                    dim.dim_param = batch
    # 2. new inputs of nodes; the shapes that the file records for its values hold the old size
    del graph.value_info[:]
    for node in graph.node:
        first = node.output[0] if node.output else ""
        for at, value in changes.inputs.items():
            if at[0] == first:
                node.input[at[1]] = _input_name(*at)
                graph.initializer.append(declare(node.input[at[1]], value))
        if first in changes.stateless:
            for i in _INITIAL:
                if i < len(node.input):
                    node.input[i] = ""
        if first in changes.copying:
            node.attribute.remove(next(a for a in node.attribute if a.name == "allowzero"))
    # 3. rows and indices, computed right in front of their readers, as nodes must be sorted
    nodes = [*graph.node]
    del graph.node[:]
    for node in nodes:
        for at, value in changes.computed.items():
            if node.output and at[0] == node.output[0]:
                graph.node.extend(value.nodes(_input_name(*at)))
                node.input[at[1]] = _input_name(*at)
        graph.node.append(node)


def _compare(
    old: Program,
    new: Program,
    params: Mapping[str, Any],
    state: Mapping[str, Any],
    inputs: list[Value],
    changes: _Changes,
    *,
    prove: bool,
) -> None:
    """Compare two programs on random inputs.

    The new one is run on two batches concatenated; it must give the concatenation of what the old
    one gives for each.

    Raises:
      InputError: the results differ (the message names the first node whose values do), or both
        batches give the same, which shows nothing.
    """
    # 1. two batches that differ in the inputs with a batch axis, and both as one
    batched = [v.name for v in inputs if v.shape and isinstance(v.shape[0], int)]
    draw = np.random.default_rng(0)
    halves: list[dict[str, np.ndarray]] = []
    for _ in range(2):
        # inputs without a batch axis must be the same in both halves, or no run of both exists
        half = {} if not halves else {n: x for n, x in halves[0].items() if n not in batched}
        for v in inputs:
            if v.name in half:
                continue
            assert v.shape is not None
            assert v.dtype is not None
            shape = tuple(d for d in v.shape if isinstance(d, int))
            # tokens are rows of their table; 0 and 1 are valid as masks and as labels
            whole = v.dtype.kind in "iub"
            random = draw.integers(0, v.rows or 2, shape) if whole else draw.standard_normal(shape)
            half[v.name] = np.asarray(random, jax.dtypes.canonicalize_dtype(v.dtype))
        halves.append(half)
    # and two that differ in one input: a mask may change less than the tolerance beside others
    first_half, second_half = halves
    lasts = {"": second_half}
    if len(batched) > 1:
        lasts |= {n: {**first_half, n: second_half[n]} for n in batched}
    # 2. the axis along which each value grows with the batch
    rounds = any(node.op.name in ROUND_TOGETHER for node in old.graph.nodes)
    axes = {}
    for name, (a, b) in changes.shapes.items():
        moved = [axis for axis, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
        if len(a) == len(b) and len(moved) == 1:
            axes[name] = moved[0]

    def find_mixed(values: Iterable[str], alone: str) -> str | None:
        """Find the first value of which two batches in one are not each of them.

        Values that do not grow with the batch have nothing to compare.

        Args:
          values: their names.
          alone: the input in which the batches differ; all if it is empty.
        """
        last = lasts[alone]
        view = Outputs(tuple(name for name in values if name in axes))
        both = {
            n: np.concatenate([x, last[n]]) if n in batched else x for n, x in first_half.items()
        }
        first, second, whole = (
            program.enter(view)(params, state, None, batch)
            for program, batch in ((old, first_half), (old, last), (new, both))
        )
        for name, *results in zip(view.names, first, second, whole, strict=True):
            result_a, result_b, result = map(np.asarray, results)
            if alone and np.array_equal(result_a, result_b):
                continue  # the input has no part in it
            if not _agree(result, result_a, result_b, axes[name], rounds or bool(alone)):
                return name
            same = prove and name in old.graph.outputs and np.array_equal(result_a, result_b)
            if same and result_a.dtype.kind == "f":
                raise InputError(
                    f"two random batches have the same '{name}', so the check is inconclusive; "
                    f"{_WAY_OUT}"
                )
        return None

    # 3. outputs that differ, and then the first value that does
    for alone in lasts:
        if (output := find_mixed(old.graph.outputs, alone)) is None:
            continue
        nodes = old.graph.nodes
        first = find_mixed((name for node in nodes for name in node.outputs), alone) or output
        before = {} if alone else ancestors(nodes, [first])
        chosen = ", ".join(f"'{name}'" for name, _ in changes.inputs if name in before)
        (label,) = (node.label for node in nodes if first in node.outputs)
        differing = f" that differ in the input '{alone}' alone" if alone else ""
        mixed = f"two batches in one{differing} give other values of '{first}' than each of them"
        raise InputError(
            f"the batch cannot be told from other axes in the Reshape of {chosen}: {mixed}; "
            f"{_WAY_OUT}"
            if chosen
            else f"{label} mixes the examples of a batch: {mixed}; keep the batch size of the "
            f"file, or change this node and {_WAY_OUT}"
        )


def _agree(
    result: np.ndarray, result_a: np.ndarray, result_b: np.ndarray, axis: int, rounds: bool
) -> bool:
    """Check whether a result is the concatenation of two, to 1 % of the difference of the two.

    The tolerance is relative to that difference, since a wrong axis mixes the two batches, and to
    the rounding error of the type. It is 10 % where a batch is rounded as a whole (`rounds`).
    """
    expected = np.concatenate([result_a, result_b], axis)
    if result.shape != expected.shape:
        return False
    if expected.dtype.kind != "f":
        return rounds or np.allclose(result, expected, rtol=1e-2)
    finite = np.isfinite(expected)  # logarithms and roots of random numbers may be none
    size, distance = (
        np.max(np.abs(x), initial=0, where=np.isfinite(x)) for x in (expected, result_a - result_b)
    )
    share = 0.1 if rounds else 0.01
    bound = max(distance * share, 32 * np.finfo(expected.dtype).eps * size)
    return np.array_equal(result[~finite], expected[~finite], equal_nan=True) and bool(
        np.all(np.abs(result - expected)[finite] <= bound)
    )


# Targets of Reshape: where the batch can be in them.


def batch_axes(before: Shape, now: Shape, after: Shape, size: int) -> list[int]:
    """Return the axes of a Reshape's result that the batch can be in, the likeliest first.

    Args:
      before, now: the shape of the data for the file's batch size, and for another one.
      after: the shape of the result for the file's batch size.
      size: the batch size of the file.
    """
    if len(before) != len(now) or size == 0:
        return []
    moved = [axis for axis, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
    if len(moved) != 1:
        return []
    (axis,) = moved
    # In C order the batch axis is where as many elements lie behind it (`end`), or from it on
    # (`start`), as in the data. Only one of the two fits where Reshape merged it with neighbours.
    start, end = math.prod(before[axis:]), math.prod(before[axis + 1 :])
    ranked = []
    for place, length in enumerate(after):
        if length % size:
            continue
        starts = math.prod(after[place:]) == start
        ends = math.prod(after[place + 1 :]) == end
        if starts or ends:
            # an axis of its own; or the outer part of one with the axes behind it (heads), rather
            # than of the last one (features); or the inner part of one with those before it (time)
            last = place == len(after) - 1
            rank = 0 if length == size else 1 if starts and not last else 2 if ends else 3
            ranked.append((rank, abs(place - axis), place))
    return [place for _, _, place in sorted(ranked)]


def resolve_target(target: np.ndarray, shape: Shape) -> list[int] | None:
    """Resolve the 0 and -1 of a Reshape's target for data of a shape; None if it does not fit."""
    new = [shape[i] if d == 0 and i < len(shape) else int(d) for i, d in enumerate(target)]
    rest = math.prod(d for d in new if d != -1)
    if -1 in new:
        if rest == 0 or math.prod(shape) % rest:
            return None
        new[new.index(-1)] = math.prod(shape) // rest
    return new if math.prod(new) == math.prod(shape) else None


# Values without a batch beside values with one: rows of Concat (class tokens, constant pads), of
# GatherElements (types of tokens) and of MatMul (relative positions), and indices (of masks).


class Row(NamedTuple):
    """A tensor without a batch, to be repeated along the batch axis."""

    name: str
    """The tensor."""
    like: str
    """Another input of the node, which has the batch."""
    axis: int
    """The batch axis of both."""
    rank: int
    """The rank of both."""
    length: int
    """The length of the axis, for one example; that of the heads, where these are in one axis with
    the batch."""

    def repeat(self, scope: Scope) -> Any:
        """Return the tensor for the batch of `like`."""
        value, counts = scope[self.name], [1] * self.rank
        counts[self.axis] = scope[self.like].shape[self.axis] // self.length
        return (np if isinstance(value, np.ndarray) else jnp).tile(value, counts)

    def nodes(self, result: str) -> list[NodeProto]:
        """Return nodes that compute `result`: the tensor for the batch of `like`."""
        batch = np.arange(self.rank) == self.axis
        shape, mask, ones, target, lengths, counts = (f"{result}/{i}" for i in range(6))
        # the target is the shape of `like` at the batch axis, and 1 (no change) elsewhere
        nodes = [
            helper.make_node("Shape", [self.like], [shape]),
            _constant(mask, batch),
            _constant(ones, np.ones(1, np.int64)),
            helper.make_node("Where", [mask, shape, ones], [target]),
        ]
        if self.length == 1:
            return [*nodes, helper.make_node("Expand", [self.name, target], [result])]
        return [
            *nodes,
            _constant(lengths, np.where(batch, self.length, 1)),
            helper.make_node("Div", [target, lengths], [counts]),
            helper.make_node("Tile", [self.name, counts], [result]),
        ]


def _constant(name: str, value: np.ndarray) -> NodeProto:
    """Return a node of a constant."""
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def find_rows(node: Node, scope: Scope, old: Mapping[str, tuple[int, ...]]) -> dict[int, Row]:
    """Find the inputs of a node that lack the batch of the others, by position.

    Args:
      node: a Concat, GatherElements or MatMul of a file whose batch size is one.
      scope: the values for a larger batch.
      old: the shapes of the values for a batch of one.
    """
    moved = {
        name: axis
        for name in node.inputs
        for axis, length in enumerate(old[name])
        if length != scope[name].shape[axis]
    }
    if len({*moved.values()}) != 1:
        return {}
    like, axis = next(iter(moved.items()))
    rank, length = len(old[like]), old[like][axis]
    # the axes that the node joins, looks up along or multiplies
    default = {"Concat": 1, "GatherElements": 0}.get(node.op.name)
    joined = [-1, -2] if default is None else [node.attributes.get("axis", default)]
    if axis in [i % rank for i in joined] or (default is None and length == 1):  # it broadcasts
        return {}
    return {
        i: Row(name, like, axis, rank, length)
        for i, name in enumerate(node.inputs)
        if name not in moved and len(old[name]) == rank and old[name][axis] == length
    }


class Lookup(NamedTuple):
    """An index of values of one example, to be moved on to those of each example."""

    index: str
    """The index; the length of its first axis is one in the file, and becomes the batch."""
    rank: int
    """The rank of the index."""
    steps: tuple[int, ...]
    """The distance from an example to the next one, for each number of an index."""
    like: str
    """An input of the graph whose first axis is the batch."""

    def move(self, index: np.ndarray, count: int) -> np.ndarray:
        """Return the index for so many examples."""
        return index + np.arange(count).reshape(-1, *[1] * (self.rank - 1)) * np.array(self.steps)

    def nodes(self, result: str) -> list[NodeProto]:
        """Return nodes that compute `result`: the index for the batch of `like`."""
        names = [f"{result}/{i}" for i in range(10)]
        shape, zero, batch, unit, numbers, target, column, steps, offsets, index = names
        return [
            helper.make_node("Shape", [self.like], [shape]),
            _constant(zero, np.array(0)),
            helper.make_node("Gather", [shape, zero], [batch]),
            _constant(unit, np.array(1)),
            helper.make_node("Range", [zero, batch, unit], [numbers]),
            _constant(target, np.array([-1, *[1] * (self.rank - 1)])),
            helper.make_node("Reshape", [numbers, target], [column]),
            _constant(steps, np.array(self.steps)),
            helper.make_node("Mul", [column, steps], [offsets]),
            helper.make_node("Cast", [self.index], [index], to=TensorProto.INT64),
            helper.make_node("Add", [index, offsets], [result]),
        ]


def find_lookup(
    node: Node, scope: Scope, old: Mapping[str, tuple[int, ...]], like: str
) -> Lookup | None:
    """Find the index of a Gather or GatherND that looks values up along the batch, if it does.

    Args:
      node: a node of a file whose batch size is one.
      scope: the values for a larger batch.
      old: the shapes of the values for a batch of one.
      like: an input of the graph whose first axis is the batch.
    """
    if node.op.name not in ("Gather", "GatherND") or node.version < 11:  # there is no Range
        return None
    name, index = node.inputs
    before, shape = old[name], old[index]
    moved = [axis for axis, size in enumerate(scope[name].shape) if size != before[axis]]
    if node.op.name == "Gather":
        axes = [node.attributes.get("axis", 0) % len(before)]
    else:
        axes = [*range(shape[-1])] if len(shape) > 1 else []
    if shape[:1] != (1,) or len(moved) != 1 or moved[0] not in axes:
        return None
    if node.attributes.get("batch_dims", 0):
        return None
    steps = tuple(before[axis] if axis == moved[0] else 0 for axis in axes)
    return Lookup(index, len(shape), steps, like)
