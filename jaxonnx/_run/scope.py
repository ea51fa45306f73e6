"""The evaluator of bound graphs: names, folding, subgraph closures, function bodies.

`bind` looks everything up once (operators, attributes, functions); `run` evaluates the bound graph
on values. A value that is an `np.ndarray` is known while tracing: a node whose inputs are all known
is folded, so shape arithmetic never reaches the jaxpr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import jax
import numpy as np

from jaxonnx import _limits as limits
from jaxonnx import lowering
from jaxonnx._graph.ancestors import find_between
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.quantization_patterns import find_idle_rounding
from jaxonnx._run import array_forms, failures
from jaxonnx._run.array_forms import on_cpu
from jaxonnx._run.folding import abstract, broadcast_late, fold, folds, is_traced, on_device
from jaxonnx.errors import Error, NodeError, StaticError
from jaxonnx.registry import Op, is_known, symbolic


@dataclass(frozen=True)
class Context:
    """The arguments of an evaluation besides its inputs."""

    weights: Mapping[str, Any] = field(default_factory=dict)
    """Values of the graph's named tensors (`Graph.weights`)."""
    key: jax.Array | None = None
    training: bool | None = None
    """True: training semantics, False: inference, None: what the file says."""
    updates: dict[str, Any] | None = None
    """Receives new running statistics, by the name of the node's input that has the old ones."""
    note: Callable[[str, str], None] | None = None
    """Receives notes for the user: the label of a node, and a sentence."""
    limit: int | None = None
    """The most bytes of a single value; None: the memory of the machine."""


def run(
    graph: Graph, inputs: Mapping[str, Any], context: Context, outer: Scope | None = None
) -> tuple:
    """Evaluate a bound graph.

    Args:
      graph: the graph.
      inputs: values by name.
      context: weights, random key, mode of evaluation.
      outer: the scope around a subgraph, whose values the subgraph may read.

    Returns:
      The outputs in file order.
    """
    scope = Scope(graph, context, outer, inputs)
    with limits.evaluation(context.limit):
        if context.training and graph.recomputes:
            for start, end in pairwise((0, *find_cuts(graph), len(graph.nodes))):
                scope.segment(start, end)
        else:
            for node in graph.nodes:
                scope.step(node)
    return tuple(lowering.to_array(scope[name]) for name in graph.outputs)


class Scope:
    """The names visible to a graph: its own values, then those of the enclosing scopes."""

    def __init__(
        self, graph: Graph, context: Context, outer: Scope | None, inputs: Mapping[str, Any]
    ):
        self.graph = graph
        self.idle = find_idle_rounding(graph)
        self.context = context
        self.outer = outer
        self.values: dict[str, Any] = dict(graph.initializers)
        self.values.update((name, context.weights[name]) for name in graph.weights)
        self.values.update((local, context.weights[name]) for local, name in graph.lifted.items())
        self.values.update(inputs)

    def __getitem__(self, name: str) -> Any:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        raise NodeError(f"the graph '{self.graph.name}' has no value named '{name}'")

    def _enclosing(self) -> Iterator[Scope]:
        """Yield this scope and those around it, inner ones first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer

    def step(self, node: Node) -> None:
        """Evaluate one node and bind its outputs; attach node and inputs to errors."""
        names = node.inputs
        if (same := self.idle.get(node.index)) and np.size(self[names[1]]) == 1:
            self.values[node.outputs[0]] = self[same]
            return
        arguments = [on_cpu(self[name], node.label, name) if name else None for name in names]
        try:
            arguments = array_forms.choose(node.op, arguments)
            failures.check_types(node, arguments)
            results = self._results(node, arguments)
        except Error as error:
            if error.node is None:
                error.node = node.label
                if isinstance(error, StaticError):
                    failures.add_sources(error, *self._roots(_traced_names(node, arguments)))
                error.args = (failures.message(node, arguments, error),)
            # An error from the body of a function names inputs of the function: translate them to
            # the caller's names on the way out.
            elif node.body is not None and isinstance(error, StaticError) and error.inputs:
                passed = dict(zip(node.body.inputs, node.inputs, strict=False))
                failures.add_sources(error, *self._roots([passed[name] for name in error.inputs]))
            # every enclosing node sets this on the way out, so that it ends as the outermost one,
            # at which `Program` can cut the graph
            error.index = node.index
            raise
        except jax.errors.ConcretizationTypeError as error:
            raise self._static_error(node, arguments, "its inputs", arguments) from error
        except failures.FOREIGN as error:
            raise failures.at(node, failures.translate_error(node, arguments, error)) from error
        if len(results) < len(node.outputs):
            text = f"{node.label} gives {len(results)} outputs, not {len(node.outputs)}"
            raise failures.at(node, NodeError(text))
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                self.values[name] = on_cpu(result, node.label, name)

    def segment(self, start: int, end: int) -> None:
        """Evaluate the nodes from `start` to `end` under rematerialization.

        The gradient evaluates them again instead of keeping their values.
        """
        nodes = self.graph.nodes[start:end]
        later = {name for node in self.graph.nodes[end:] for name in node.reads}
        later.update(self.graph.outputs)
        computed = {name for node in nodes for name in node.outputs}
        inputs = {name: self[name] for node in nodes for name in node.reads if name not in computed}
        crossing = {name: value for name, value in inputs.items() if not is_known(value)}
        weights = {name: crossing.pop(name) for name in self.graph.weights if name in crossing}
        # `remat` returns tracers; known values leave the segment by this dictionary instead
        constants = {}

        def evaluate(weights, values):
            key, crossing, before = values
            context = replace(
                self.context, key=key, updates=None if renewed is None else {**before}
            )
            scope = Scope(_NO_GRAPH, context, self, weights | crossing)
            for node in nodes:
                scope.step(node)
            results = {n: v for n, v in scope.values.items() if n in later and n in computed}
            constants.update((name, value) for name, value in results.items() if is_known(value))
            return {n: v for n, v in results.items() if n not in constants}, context.updates

        renewed = self.context.updates
        before = {n: renewed[n] for node in nodes for n in node.inputs if renewed and n in renewed}
        results: Any = lowering.remat(evaluate, weights, (self.context.key, crossing, before))
        values, updates = results
        self.values.update(values | constants)
        if renewed is not None:
            renewed.update(updates)

    def depends(self, target: str, names: Iterable[str]) -> bool:
        """Check whether `target` is computed from any of `names`, here or in an enclosing graph."""
        names = set(names)
        return target in names or bool(self._find_between(names, [target]))

    def recompute(self, targets: Sequence[str], fixed: Mapping[str, Any]) -> tuple:
        """Compute `targets` with other values for the names in `fixed`, for a Gradient node.

        The graph is cut at the names in `fixed`. Only the nodes on paths from there to `targets`
        are evaluated again; all other values are read from this scope. Nothing is bound in it.

        Raises:
          NodeError: a name has no value here.
        """
        for name in (*targets, *fixed):
            self[name]  # raises if the name is unknown
        # running statistics were updated when the nodes ran; here the updates are discarded
        context = replace(self.context, updates=None if self.context.updates is None else {})
        scope = Scope(_NO_GRAPH, context, self, fixed)
        for node in self._find_between(fixed, targets):
            scope.step(node)
            # a node on a path may compute a given value, too; the cut keeps the one that was given
            scope.values.update(fixed)
        return tuple(lowering.to_array(scope[name]) for name in targets)

    def _find_between(self, names: Iterable[str], targets: Iterable[str]) -> list[Node]:
        """Return the nodes on the paths from `names` to `targets`, those of outer graphs first."""
        scopes = reversed([*self._enclosing()])
        return find_between([*chain(*(s.graph.nodes for s in scopes))], names, targets)

    def _results(self, node: Node, arguments: list) -> tuple:
        """Compute the results of a node: call its function's body, fold it, or call its operator.

        Raises:
          StaticError: a static input is traced, or any input of an operator whose results have no
            static shape.
        """
        if node.body is not None:
            return self._call(node, node.body, arguments)
        op = node.op
        for i in op.static:
            if i < len(arguments):
                arguments[i] = self._static_input(node, arguments, i)
        if op.state and self.context.updates and self._training(node):
            # a module that is called twice moves its statistics twice, as in PyTorch
            for i in op.state[: len(arguments)]:
                arguments[i] = self.context.updates.get(node.inputs[i], arguments[i])
        if op.dynamic and is_traced(arguments):
            raise self._static_error(node, arguments, "its inputs", arguments)
        keywords = dict(node.attributes)
        for name, graph in node.graphs.items():
            keywords[name] = (
                Closure(graph, self, node)
                if isinstance(graph, Graph)
                else [Closure(g, self, node) for g in graph]
            )
        for name, what in op.context:
            keywords[name] = self._context_value(node, arguments, what)
        op.constraints.check(arguments, node.attributes)
        # `alone`: the arguments determine the results, without subgraphs, random key and scope
        alone = not node.graphs and not any(what in ("key", "scope") for _, what in op.context)
        if alone and folds(op, arguments, keywords):
            results = fold(op, arguments, keywords)
            if results is not None:
                return results
            # not folded because it is large: traced arguments keep it in the compiled graph
            arguments = _on_device(op, arguments)
        elif any(map(symbolic, arguments)):
            arguments = _on_device(op, arguments)
        elif not node.graphs and not op.dynamic:  # bodies check what they use; these have NumPy
            failures.check_range([a for i, a in enumerate(arguments) if i not in op.static])
        if (
            alone
            and not is_traced(arguments)
            and limits.may_exceed(arguments, keywords, limits.value_limit())
        ):
            # the operator would allocate before its results can be checked; the nodes of a body are
            # checked one by one
            limits.check(abstract(partial(_call, op), arguments, keywords, op.static) or ())
        results = array_forms.call(op, arguments, keywords)
        results = tuple(map(broadcast_late, results if isinstance(results, tuple) else (results,)))
        limits.check(results)
        if op.state and self._training(node) and op.state[0] < len(node.inputs):
            self._update_statistics(node, results)
        return results

    def _call(self, node: Node, body: Graph, arguments: list) -> tuple:
        """Evaluate the body of a function of the model, which sees only its arguments."""
        updates = self.context.updates
        actual = dict(zip(body.inputs, node.inputs, strict=False)) | dict(body.lifted)
        before = {local: updates[n] for local, n in actual.items() if updates and n in updates}
        inner = replace(self.context, updates=None if updates is None else before)
        inputs = dict.fromkeys(body.inputs) | dict(zip(body.inputs, arguments, strict=False))
        results = run(body, inputs, inner)
        if inner.updates and updates is not None:
            # the body updated statistics under its own names: translate them to the caller's
            updates.update((actual.get(name, name), new) for name, new in inner.updates.items())
        return results

    def _update_statistics(self, node: Node, results: tuple) -> None:
        """Store the new running statistics of a node in `Context.updates`.

        Raises:
          NodeError: the node is in a body of control flow.
        """
        if self.context.updates is None:
            raise NodeError(
                "running statistics inside a control-flow body cannot be renewed in training; "
                "keep those of the file, with .with_statistics('frozen') or statistics='frozen'"
            )
        # result 0 is the output; the statistics follow in the order of the inputs `state`
        for k, i in enumerate(node.op.state):
            self.context.updates[node.inputs[i]] = results[k + 1]

    def _context_value(self, node: Node, arguments: list, what: str) -> Any:
        """Return an argument of an operator that is no input of the node (see `registry.op`)."""
        if what == "key":
            return lambda seed=None: self._key(node, seed)
        if what == "training":
            return self._training(node)
        if what == "channels":
            return -1 if isinstance(arguments[0], lowering.ChannelsLast) else 1
        if what == "reuses inputs":
            return node.op.reuses_inputs
        return len(node.outputs) if what == "outputs" else self

    def _training(self, node: Node) -> bool | None:
        """Return the mode of a node: normalizations with frozen statistics always infer."""
        return False if node.op.frozen else self.context.training

    def _key(self, node: Node, seed: float | None) -> jax.Array:
        """Return a random key that is unique to the node, or to the `seed` of its attributes."""
        data = node.index if seed is None else np.float32(seed).view(np.uint32)
        return jax.random.fold_in(_key(self.context), data)

    def _static_input(self, node: Node, arguments: list, i: int) -> Any:
        """Return an input as a known value.

        Raises:
          StaticError: it is traced.
        """
        value = arguments[i]
        if is_known(value):
            return value
        if is_traced([value]):
            raise self._static_error(node, arguments, f"input {i} ('{node.inputs[i]}')", [value])
        return np.asarray(value)

    def _static_error(self, node: Node, arguments: list, what: str, values: list) -> StaticError:
        names = _traced_names(node, arguments)
        if len(values) == 1:
            names = [n for n, v in zip(node.inputs, arguments, strict=False) if v is values[0]]
        return failures.static_error(node, what, *self._roots(names))

    def _roots(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Find the sources of traced values.

        Returns:
          The names of inputs of the main graph, and descriptions of other sources.
        """
        needed, others, inputs = set(names), [], []
        for scope in self._enclosing():
            for node in reversed(scope.graph.nodes):
                if any(name in needed for name in node.outputs):
                    needed.update(name for name in node.reads if is_traced([self[name]]))
            others += [f"tensor '{name}'" for name in scope.graph.weights if name in needed]
            inputs = [name for name in scope.graph.inputs if name in needed]
            if scope.outer is not None:
                others += [f"'{name}' of the body '{scope.graph.name}'" for name in inputs]
        return inputs, others


class Closure:
    """A subgraph as a function `body(*inputs) -> outputs` that may read the enclosing scope."""

    def __init__(self, graph: Graph, scope: Scope, node: Node):
        self.graph = graph
        self.inputs = graph.inputs
        self.outputs = graph.outputs
        self.input_types = graph.input_types
        self.output_types = graph.output_types
        self._scope = scope
        self._node = node

    @property
    def is_known(self) -> bool:
        """Whether the node's inputs and all that its bodies capture are known while tracing."""
        return is_known(*(self._scope[name] for name in self._node.reads))

    def note_unrolling(self, count: int, why: Error | None) -> None:
        """Tell the user that the program holds `count` copies of the body, and why."""
        label, note = self._node.label, self._scope.context.note
        reason = "" if why is None else f", as lax.scan does not take it ({why.node or why})"
        if note is not None:
            note(
                label,
                f"{label} is unrolled{reason}: its {count} iterations are compiled one by one, "
                "which takes time and memory in proportion",
            )

    def check(self, count: int) -> None:
        """Raise a NodeError unless the body takes `count` inputs."""
        if count != len(self.inputs):
            raise NodeError(
                f"the body '{self.graph.name}' takes {len(self.inputs)} inputs, "
                f"and was given {count}"
            )

    def __call__(self, *inputs: Any, step: Any = None) -> tuple:
        """Evaluate the body; `step`, the number of the iteration, is folded into its random key."""
        self.check(len(inputs))
        context = replace(self._scope.context, updates=None)
        if step is not None:
            context = replace(context, key=jax.random.fold_in(_key(context), step))
        named = dict(zip(self.inputs, inputs, strict=True))
        return run(self.graph, named, context, self._scope)


_NO_GRAPH = Graph(
    name="", inputs=(), outputs=(), output_types=(), weights=(), initializers={}, nodes=()
)
"""The graph of a scope whose nodes belong to the one around it."""


def _call(op: Op, *arguments: Any, **keywords: Any) -> Any:
    return array_forms.call(op, arguments, keywords)


def _on_device(op: Op, arguments: list) -> list:
    """Convert known arguments to traced ones, but for static ones."""
    skipped = range(len(arguments)) if op.dynamic else op.static
    return [a if i in skipped else on_device(a) for i, a in enumerate(arguments)]


def _key(context: Context) -> jax.Array:
    return jax.random.key(0) if context.key is None else context.key


def _traced_names(node: Node, arguments: Sequence[Any]) -> list[str]:
    return [n for n, v in zip(node.inputs, arguments, strict=False) if is_traced([v])]


# Where a graph is cut so that its training takes less memory.
#
# Between two cuts nothing is kept for the gradient but the values that cross a cut; the rest is
# computed again, one segment at a time (Chen et al., "Training Deep Nets with Sublinear Memory
# Cost", arXiv:1604.06174). With about as many segments as each has nodes, memory grows with the
# square root of the depth.


def find_cuts(graph: Graph) -> tuple[int, ...]:
    """Choose about sqrt(nodes) positions between nodes to cut at, where few values cross.

    The nodes are divided into equal ranges; each cut is the position with the fewest crossing
    values of its range, the last one on a tie.
    """
    if any(what == "scope" for node in graph.nodes for _, what in node.op.context):
        return ()  # a Gradient node reads values of all nodes before it from the scope
    # count for each position the values computed before it and read at it or after it
    producer, last_reader = {}, {}
    for i, node in enumerate(graph.nodes):
        producer.update((name, i) for name in node.outputs if name)
        last_reader.update((name, i) for name in node.reads)
    last_reader.update((name, len(graph.nodes)) for name in graph.outputs)
    # a value crosses the positions from its producer + 1 to its last reader: count by differences
    changes = [0] * (len(graph.nodes) + 2)
    for name, i in producer.items():
        if name in last_reader:
            changes[i + 1] += 1
            changes[last_reader[name] + 1] -= 1
    total, crossing = 0, []
    for change in changes:
        total += change
        crossing.append(total)
    count = round(math.sqrt(len(graph.nodes)))
    bounds = [round(i * len(graph.nodes) / (count + 1)) for i in range(1, count + 2)]
    # before a Dropout that takes over the name of the value before it (`views.Dropout`): the last
    # choice
    rebinds = [not {*node.inputs}.isdisjoint(node.outputs) for node in graph.nodes]
    rebinds.append(False)
    return tuple(
        min(range(a, b), key=lambda i: (rebinds[i], crossing[i], -i))
        for a, b in pairwise(bounds)
        if a < b
    )
