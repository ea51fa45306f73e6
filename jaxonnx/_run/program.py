"""A bound graph as compiled functions, split where a node cannot be compiled.

A graph without data-dependent shapes is one compiled function. An input that fixes shapes (sizes,
axes, k) is known while compiling: there is one compiled function for each of its values. If shapes
depend on computed values, the nodes that do not depend on such a result are compiled, and the rest
is evaluated node by node on concrete values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import numpy as np

from jaxonnx._arrays import allow_promotion, by_size, like, on_auto_axes
from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.values import data
from jaxonnx._limits import compilable
from jaxonnx._run.failures import at, convert_errors
from jaxonnx._run.scope import Context, run
from jaxonnx.errors import NodeError, StaticError, warn
from jaxonnx.lowering import has_units, jit
from jaxonnx.views import Evaluate, Outputs, View

FIXING = 64
"""The most elements of an input (scalar or vector) that is fixed while compiling."""

NOWHERE = -1
"""The index of no node: a cut there leaves all nodes to the compiled part."""


Changes = Callable[[Graph], Graph]
"""Changes of a graph for calls: a hashable function."""


@dataclass(frozen=True)
class Parts:
    """A graph that is split into a compiled part and a rest that is evaluated node by node."""

    compiled: Any
    """The jitted function of the first part."""
    boundary: tuple[str, ...]
    """The values that the compiled part passes to the rest."""
    rest: Graph | None
    """The rest; None if the whole graph is compiled."""


@dataclass(frozen=True)
class Plan:
    """Facts learned from past calls: where compiling must stop, and the compiled parts."""

    cuts: frozenset[int]
    """Indices of nodes that need the value of something that is traced while compiling."""
    fixed: frozenset[str] = frozenset()
    """Inputs whose values are constants of the compiled functions."""
    fixes: bool = True
    """Whether to fix an input where that helps before cutting the graph."""
    parts: Mapping[tuple, Parts] = field(default_factory=dict)
    """The compiled parts, by the key that `make_key` returns."""

    def fix_or_cut(self, error: StaticError, arrays: Mapping[str, Any]) -> Plan:
        """Return a plan under which a node that needs a known value can be evaluated.

        Small inputs that the value depends on are fixed; else the graph is cut at the node.

        Raises:
          StaticError: the error itself, if neither is possible.
        """
        small = all(np.ndim(arrays[n]) <= 1 and np.size(arrays[n]) <= FIXING for n in error.inputs)
        if error.inputs and small and self.fixes:
            return replace(self, fixed=self.fixed.union(error.inputs))
        if error.index is None or error.index in self.cuts:
            raise error
        return replace(self, cuts=self.cuts | {error.index}, parts={})


def make_key(
    changes: Changes | None, others: frozenset[str], fixed: Mapping[str, np.ndarray]
) -> tuple:
    """Return the key of compiled parts.

    Args:
      changes: the changes of the graph.
      others: the names of inputs that are not arrays.
      fixed: the values of the fixed inputs.
    """
    values = ((name, v.dtype.str, v.shape, v.tobytes()) for name, v in sorted(fixed.items()))
    return (changes, others, *values)


def split(
    graph: Graph, cuts: Collection[int], others: Collection[str], constant: Collection[str]
) -> tuple[Graph, Graph | None]:
    """Split a graph where compiling must stop: the compiled part, and the rest or None.

    Args:
      graph: the bound graph.
      cuts: indices of nodes that cannot be compiled.
      others: names of inputs that are not arrays.
      constant: names of tensors and inputs whose values are known while compiling.
    """
    if not cuts and not others:
        return graph, None
    outside, constant = set(others), set(constant)
    before: list[Node] = []
    after: list[Node] = []
    for node in graph.nodes:
        if node.index in cuts or not outside.isdisjoint(node.reads):
            outside.update(node.outputs)
            after.append(node)
        elif constant.issuperset(node.reads):
            # Evaluated in both parts: the rest needs its result as a known value, which a
            # result of the compiled part would not be.
            constant.update(node.outputs)
            before.append(node)
            after.append(node)
        else:
            before.append(node)
    computed = {name for node in before for name in node.outputs} - constant
    needed = {name for node in after for name in node.reads} | {*graph.outputs}
    boundary = tuple(sorted(computed & needed))
    first = replace(graph, nodes=tuple(before), outputs=boundary)
    return first, replace(graph, nodes=tuple(after))


def has_dynamic_results(node: Node) -> bool:
    """Check whether a node, or one in its subgraphs, has results without a static shape."""
    inner = (n for graph in node.subgraphs for n in graph.nodes)
    return node.op.dynamic or any(map(has_dynamic_results, inner))


V = TypeVar("V", bound=View)
VARIANTS = 32
"""The most compiled functions for values of inputs that fix shapes; beyond it the graph is cut at
the nodes that need these values, and they run one by one."""


@dataclass(eq=False)
class Program:
    """A bound graph under views: `evaluate` is a pure function, a call runs it compiled.

    The fields never change. What calls learn about the graph (the plan) and the notes for the user
    are replaced as a whole, so that threads may share a program; if two replace the plan at once,
    one of them compiles again later.
    """

    base: Graph
    """The graph of the file."""
    constants: Mapping[str, np.ndarray]
    views: tuple[View, ...] = ()
    """The changes of the graph that is evaluated, in the order in which they enter it."""
    limit: int | None = None
    """The most bytes of a single value; None: the memory of the machine."""
    sparse: Mapping[str, int] = field(default_factory=dict)
    """The 2:4 matrices among the parameters whose products are sparse in inference, by name, with
    their input axes."""

    def __post_init__(self) -> None:
        self._plan = Plan(frozenset(n.index for n in self.graph.nodes if has_dynamic_results(n)))
        self._notes: Mapping[str, str] = {}

    @cached_property
    def graph(self) -> Graph:
        """The graph that is evaluated."""
        graph = self.base
        for view in self.views:
            graph = view.enter(graph, self.constants)
        return graph

    def train(self, graph: Graph) -> Graph:
        """Return the graph that training evaluates in place of `graph`, or of a part of it."""
        for view in self.views:
            graph = view.train(graph)
        return graph

    @property
    def adapts(self) -> bool:
        """Whether parameters are tensors of a view, such as adapters, and not of the graph."""
        return any(view.adapts for view in self.views)

    def enter(self, *views: View) -> Program:
        """Return a program under further views."""
        return replace(self, views=(*self.views, *views))

    def leave(self, *kinds: type[View]) -> Program:
        """Return a program without the views of these kinds."""
        return replace(self, views=tuple(v for v in self.views if not isinstance(v, kinds)))

    def find(self, kind: type[V]) -> V | None:
        """Return the last view of a kind, or None."""
        return next((view for view in reversed(self.views) if isinstance(view, kind)), None)

    def replace_file(self, graph: Graph, constants: Mapping[str, Any]) -> Program:
        """Return the program of a changed file, whose graph the views enter that can stay."""
        views = tuple(view for view in self.views if view.stays)
        return replace(self, base=graph, constants=constants, views=views)

    def with_values(self, values: Collection[str]) -> Program:
        """Return a program that returns these inner values after the outputs."""
        return self.enter(Outputs.beside(self.graph, values))

    def draws(self, training: bool) -> bool:
        """Check whether an evaluation draws random numbers; Dropout does in training only."""
        graph = self.train(self.graph) if training else self.graph
        contexts = ({what for _, what in node.op.context} for node in graph.nodes)
        return any("key" in kinds and (training or "training" not in kinds) for kinds in contexts)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user from past evaluations, one sentence for each node."""
        return tuple(self._notes.values())

    @property
    def compiled(self) -> bool:
        """Whether there were calls, and all of them were compiled as a whole."""
        plans = self._plan.parts.values()
        return bool(plans) and all(parts.rest is None for parts in plans)

    def evaluate(
        self,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        inputs: Mapping[str, Any],
        *,
        key: jax.Array | None = None,
        training: bool | None = None,
        updates: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """Evaluate the graph as a pure function, for use under `jax.jit`, `jax.grad`, ....

        Args:
          params, state: the named tensors.
          inputs: values by name.
          key: a random key, for nodes that draw.
          training: True for training semantics, False for inference, None for those of the file.
          updates: receives new running statistics, by the name of the input that has the old ones.

        Returns:
          The outputs in file order.
        """
        if self.sparse and training is False and updates is None:
            return self._run_sparse(self.graph, params, state, key, inputs, training)
        return self._run(self.graph, params, state, key, inputs, training, updates)

    def __call__(
        self,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        key: jax.Array | None,
        inputs: Mapping[str, Any],
        training: bool | None = False,
        changes: Changes | None = None,
    ) -> tuple[Any, ...]:
        """Evaluate with as much of the graph compiled as possible.

        A StaticError of a node leads to a new plan, under which an input is a constant of the
        compiled function or the graph is cut at the node, and to another attempt.

        Args:
          params, state, key, inputs, training: as for `evaluate`.
          changes: the changes of the graph, where `params` and `state` are those of a `CallForm`.
        """
        arrays = {n: v for n, v in inputs.items() if _is_array(v)}
        others = frozenset(inputs.keys() - arrays.keys())
        plan = self._plan
        while True:
            fixed = {name: np.asarray(arrays[name]) for name in plan.fixed & arrays.keys()}
            parts_key = make_key(changes, others, fixed)
            if parts_key not in plan.parts:
                if len(plan.parts) >= VARIANTS:
                    plan = self._plan = Plan(plan.cuts, fixes=False)
                    continue
                graph = self.graph if changes is None else changes(self.graph)
                constant = {*self.constants, *fixed}
                first, rest = split(graph, plan.cuts, others, constant)
                boundary = () if rest is None else first.outputs
                parts = Parts(self._compile(first, fixed), boundary, rest)
                plan = self._plan = replace(plan, parts={**plan.parts, parts_key: parts})
            parts = plan.parts[parts_key]
            traced = {
                name: _copy_array(value) for name, value in arrays.items() if name not in fixed
            }
            try:
                with convert_errors("the compiled model", params, state, traced):
                    values = parts.compiled(params, state, key, traced, training=training)
                break
            except StaticError as error:
                if any(view.maps for view in self.views):
                    raise  # under vmap, values are traced even when nodes run one by one
                plan = self._plan = plan.fix_or_cut(error, arrays)
        if parts.rest is None:
            return values
        available = {**data(inputs), **fixed, **dict(zip(parts.boundary, values, strict=True))}
        return self._run(parts.rest, params, state, key, available, training)

    def find_compiled(self, changes: Changes | None, names: Iterable[str]) -> Callable | None:
        """Return `f(params, state, inputs)`, a call like the last one without its checks.

        None if the value of an input is fixed while compiling, or nodes run one by one.

        Args:
          changes: as for `__call__`.
          names: the names of the inputs in order, all of which are arrays.
        """
        plan, names = self._plan, (*names,)
        parts = plan.parts.get(make_key(changes, frozenset(), {}))
        if parts is None or parts.rest is not None or plan.fixed:
            return None
        compiled = parts.compiled.alone

        def call(params, state, inputs):
            arrays = map(_copy_array, inputs)
            return compiled(params, state, None, dict(zip(names, arrays)), training=False)  # noqa: B905

        return call

    def _run(
        self,
        graph: Graph,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        key: jax.Array | None,
        inputs: Mapping[str, Any],
        training: bool | None,
        updates: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """Evaluate a graph of this program; outputs are sharded along the batch as inputs are."""

        def specs(results, tensors, key, inputs):
            outputs, renewed = results
            replaced = renewed and {n: tensors.get(n, value) for n, value in renewed.items()}
            return by_size(outputs, inputs), like(replaced)

        graph = self.train(graph) if training else graph
        evaluate = self._nest(self.views, graph, training, updates is not None)
        tensors, inputs = {**state, **params}, {**inputs}
        run = allow_promotion(on_auto_axes)
        outputs, renewed = run(evaluate, specs, tensors, key, inputs)
        if updates is not None:
            updates.update(renewed)
        return outputs

    def _nest(
        self, views: tuple[View, ...], graph: Graph, training: bool | None, renews: bool
    ) -> Evaluate:
        """Return the evaluation of a graph under views, each of which wraps those before it."""
        if not views:
            return partial(self._evaluate_graph, graph, training, renews)
        *before, view = views
        below = self._nest((*before,), graph, training, renews)

        def evaluate(tensors, key, inputs):
            def measure(value, inputs):
                needed = ancestors(graph.nodes, [value])
                nodes = tuple(n for n in graph.nodes if not needed.isdisjoint(n.outputs))
                part = replace(graph, nodes=nodes, outputs=(value,), output_types=(None,))
                run = self._nest((*before,), part, training, False)
                return jax.eval_shape(lambda: run(tensors, key, inputs)[0][0]).shape

            return below(tensors, key, view.supply(inputs, measure))

        return view.wrap(evaluate)

    def _evaluate_graph(
        self, graph: Graph, training: bool | None, renews: bool, tensors: Any, key: Any, inputs: Any
    ) -> tuple[tuple, dict[str, Any] | None]:
        """Evaluate a graph on all of its inputs; return outputs and new running statistics."""
        renewed = {} if renews else None
        tensors = {**self.constants, **tensors}
        for view in reversed(self.views):
            tensors = view.read(tensors)
            if training:
                tensors = view.drop(tensors, jax.random.key(0) if key is None else key)
        context = Context(tensors, key, training, renewed, self._note, self.limit)
        return _compilable(graph, run(graph, inputs, context)), renewed

    def _run_sparse(self, graph: Graph, params: Mapping[str, Any], *rest: Any) -> tuple[Any, ...]:
        """Evaluate with sparse products of the matrices in `self.sparse`."""
        from jaxonnx.sparse import sparse_products

        run = sparse_products(lambda params: self._run(graph, params, *rest), self.sparse)
        return run({**params})

    def jit(self, function: Callable[..., Any], rounded: Any = None, **settings: Any) -> jit:
        """Compile a function of this network with the compiler's options for it.

        Args:
          function: calls the network.
          rounded: the 16-bit type to which the function rounds the factors of products, if it does.
          settings: as for `jax.jit`.
        """
        units = rounded is not None and has_units(rounded)
        onednn = self.graph.is_convolutional if rounded is None else units
        return jit(function, onednn=onednn, units=units, **settings)

    def _note(self, node: str, text: str) -> None:
        """Warn of something once for each node (a `Context.note`)."""
        if node not in self._notes:
            self._notes = {**self._notes, node: text}
            warn(text)

    def _compile(self, graph: Graph, fixed: Mapping[str, np.ndarray]):
        def compiled(params, state, key, inputs, *, training):
            run = self._run if training or not self.sparse else self._run_sparse
            return run(graph, params, state, key, {**inputs, **fixed}, training)

        return self.jit(compiled, static_argnames="training")


def _compilable(graph: Graph, outputs: tuple) -> tuple[Any, ...]:
    """Return the outputs of a graph if compiled code can return them.

    Raises:
      NodeError, StaticError: one has a type that it cannot; the error names the node.
    """
    for name, value in zip(graph.outputs, outputs, strict=True):
        try:
            compilable(value)
        except (NodeError, StaticError) as error:
            kind = type(error)
            nodes = (node for node in graph.nodes if name in node.outputs)
            if node := next(nodes, None):
                raise at(node, kind(f"{node.label}: {error}")) from None
            error = kind(f"'{name}': {error}")
            error.index = NOWHERE
            raise error from None
    return outputs


def _copy_array(value: Any) -> Any:
    """Copy a NumPy array: JAX may alias it on CPU, and the caller may change it after the call."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _is_array(value: Any) -> bool:
    """Check whether a value can be an argument of a jitted function."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype != object and value.dtype.kind not in "US"
    return isinstance(value, jax.Array | bool | int | float)
