"""Bind a GraphProto: look up operators, attributes, functions and subgraphs, once.

Binding finds at load time what can be found then: unknown operators (all of them at once), missing
or unknown attributes, names without a value, recursion.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import entry_points
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto
from onnx.defs import OpSchema

import jaxonnx.ops  # noqa: F401  (importing the operators registers them)
from jaxonnx._io.protos import all_nodes, find_without_statistics, names_of_constants
from jaxonnx._io.tensors import to_array, to_dense
from jaxonnx.errors import ModelError, UnsupportedError
from jaxonnx.registry import Op, lookup

T = TypeVar("T")
_ANALYSES = 16
"""The most results that `Graph.recall` keeps, those for other tensors of the same graph."""


@dataclass(frozen=True)
class Graph:
    """A graph whose nodes are bound to their operators."""

    name: str
    inputs: tuple[str, ...]
    """The inputs; those of the main graph without the ones that have an initializer."""
    outputs: tuple[str, ...]
    output_types: tuple[onnx.TypeProto | None, ...]
    weights: tuple[str, ...]
    """The names of the graph's tensors whose values come from outside (`Context.weights`)."""
    initializers: Mapping[str, np.ndarray]
    """The values of the other tensors."""
    nodes: tuple[Node, ...]
    """The nodes, sorted; without those that compute a tensor in `weights`."""
    lifted: Mapping[str, str] = field(default_factory=dict)
    """In a function's body: local names whose values come from outside, to names in the model."""
    input_types: tuple[onnx.TypeProto | None, ...] = ()
    """The declared types of the inputs."""
    recomputes: bool = False
    """Whether training keeps few values for the gradient and computes the others again."""

    # The index of the graph, which is immutable: computed once, when first asked for.

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that computes each value."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    @cached_property
    def readers(self) -> Mapping[str, Sequence[Node]]:
        """The nodes that read each value, also in their subgraphs, in order."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.reads:
                readers.setdefault(name, []).append(node)
        return readers

    @cached_property
    def is_convolutional(self) -> bool:
        """Whether it has convolutions, and no more products of matrices than convolutions."""
        convolutions = self._counts["Conv"] + self._counts["ConvTranspose"]
        return convolutions >= max(1, self._counts["Gemm"] + self._counts["MatMul"])

    @cached_property
    def _counts(self) -> Counter[str]:
        """The number of nodes of each operator, also in subgraphs."""
        inner = (graph._counts for node in self.nodes for graph in node.subgraphs)
        return sum(inner, Counter(node.op.like for node in self.nodes))

    def recall(self, key: Hashable, analyze: Callable[[], T]) -> T:
        """Return the result of an analysis of this graph, made anew if the key is a new one."""
        if key not in self._analyses:
            for old in [*self._analyses][: 1 - _ANALYSES]:
                self._analyses.pop(old, None)
            self._analyses[key] = analyze()
        return self._analyses[key]

    @cached_property
    def _analyses(self) -> dict[Hashable, Any]:
        return {}


@dataclass(frozen=True)
class Node:
    """A node with its operator, or with the body of the function that it calls."""

    label: str
    op: Op
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    graphs: Mapping[str, Graph | list[Graph]]
    reads: tuple[str, ...]
    """Every name that the node reads: its inputs and what its subgraphs capture."""
    index: int
    """Unique within the model; what random nodes fold into the caller's key."""
    body: Graph | None = None
    """The body, if the node calls a function of the model."""
    version: int = 0
    """The version of the operator set that the operator is of."""

    @property
    def subgraphs(self) -> list[Graph]:
        """Every graph among the attributes."""
        return _flatten_graphs(self.graphs)


def _flatten_graphs(graphs: Mapping[str, Graph | list[Graph]]) -> list[Graph]:
    return [g for v in graphs.values() for g in (v if isinstance(v, list) else [v])]


def bind(model: ModelProto, graph: GraphProto, external: Collection[str]) -> Graph:
    """Bind a graph of a model: look up its operators, functions and attributes.

    Args:
      model: the file, for its opsets and functions.
      graph: the graph.
      external: the names of tensors whose values come from outside (`Graph.weights`).

    Raises:
      UnsupportedError: naming every operator that has no implementation, with its nodes.
      ModelError: a malformed graph (names, attributes, recursion).
    """
    opsets = {_domain(entry.domain): entry.version for entry in model.opset_import}
    functions = {}
    for function in model.functions:
        key = (_domain(function.domain), function.name, function.overload)
        if key in functions:
            raise ModelError(f"the function '{'.'.join(filter(None, key))}' is defined twice")
        functions[key] = function
    check_expansion(graph, functions)
    binder = _Binder(functions, frozenset(external), lifted=frozenset(external))
    try:
        bound = binder.graph(graph, opsets or {"": 1})
    except RecursionError:
        raise ModelError(
            f"graph '{graph.name}' nests graphs and functions deeper than Python's recursion limit "
            "allows; sys.setrecursionlimit sets another"
        ) from None
    if binder.missing:
        lines = [f"  {what}: {', '.join(nodes)}" for what, nodes in binder.missing.items()]
        if any("com.microsoft.PagedAttention" in what for what in binder.missing):
            lines.append(
                "PagedAttention is for serving: build the file without use_paged_attention"
            )
        text = "\n".join(["no implementation of these operators:", *lines])
        raise UnsupportedError(f"{text}\n{_hint_at_artifact(graph)}".rstrip())
    fixed = find_without_statistics(graph)
    nodes = (
        replace(n, op=n.op.without_statistics()) if n.op.normalizes and n.outputs[0] in fixed else n
        for n in bound.nodes
    )
    return replace(bound, nodes=tuple(nodes)) if fixed else bound


def _hint_at_artifact(graph: GraphProto) -> str:
    """Explain an artifact of onnxruntime-training and its remedy; "" for any other graph."""
    types = {node.op_type for node in graph.node if node.domain == "com.microsoft"}
    gradients = any(name.endswith("Grad") for name in types) or "InPlaceAccumulatorV2" in types
    if not gradients and not types & {"AdamWOptimizer", "SGDOptimizerV2"}:
        return ""
    kind = "training_model.onnx" if gradients else "optimizer_model.onnx"
    return (
        f"This is a {kind}, as onnxruntime-training's generate_artifacts writes it. Start from the "
        "inference file that it was given: jaxonnx.train(path, data) makes gradients and updates "
        "itself (docs: from_onnxruntime_training)"
    )


def _domain(name: str) -> str:
    """Return the name of a domain; "ai.onnx" is an alias of ""."""
    return "" if name == "ai.onnx" else name


@dataclass
class _Binder:
    """One pass over a model, in the order of its nodes, that binds graphs within graphs.

    `visible` holds the names that a node may read. A subgraph gets a copy: it sees all names that
    are defined before its node, and its own names are not seen outside. `own` holds the names that
    a graph defines itself, each once; a subgraph may shadow outer names. The body of a function
    sees its own names only, and is bound anew for each call by a `_Binder` of its own, because the
    values of its attributes (`refs`, None outside of functions) differ from call to call.
    """

    functions: dict[tuple[str, str, str], FunctionProto]
    external: frozenset[str]
    """The tensors of the main graph and its subgraphs whose values come from outside."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """Operators without an implementation, with the nodes that need them."""
    count: int = 0
    """Nodes bound so far, in functions too: the next node's index."""
    lifted: frozenset[str] = frozenset()
    """The constants of functions whose values come from outside, by their names in the model."""

    def graph(
        self,
        proto: GraphProto,
        opsets: dict[str, int],
        visible: Collection[str] = (),
        refs=None,
        nested: bool = False,
    ) -> Graph:
        """Bind a graph, or a subgraph (`nested`) that sees the names in `visible`."""
        tensors: dict[str, Any] = {tensor.name: (to_array, tensor) for tensor in proto.initializer}
        tensors |= {t.values.name: (to_dense, t) for t in proto.sparse_initializer}
        weights = [name for name in tensors if name in self.external]
        initializers = {
            n: convert(t) for n, (convert, t) in tensors.items() if n not in self.external
        }
        inputs = [v.name for v in proto.input]
        stored = [t.name for t in proto.initializer]
        stored += [t.values.name for t in proto.sparse_initializer]
        for kind, names in (("input", inputs), ("initializer", stored)):
            for name, count in Counter(names).items():
                if count > 1 or not name:
                    raise ModelError(
                        f"graph '{proto.name}' has {count} {kind}s named '{name}'; names must be "
                        "unique and not empty"
                    )
        for node in proto.node:
            weights += [name for name in node.output if name in self.external]
        defined = {*inputs, *weights, *initializers}
        nodes = self.nodes(proto.node, opsets, {*visible, *defined}, defined, refs)
        names = {*visible, *defined, *(name for node in nodes for name in node.outputs)}
        for value in proto.output:
            if value.name not in names:
                raise ModelError(f"graph '{proto.name}': output '{value.name}' is never computed")
        # An input of the main graph with an initializer is a default value, and so a tensor. A node
        # passes all inputs of its subgraphs, defaults or not.
        if not nested:
            inputs = [n for n in inputs if n not in initializers and n not in weights]
        return Graph(
            name=proto.name,
            inputs=tuple(inputs),
            outputs=tuple(v.name for v in proto.output),
            output_types=_types(proto.output),
            weights=tuple(weights),
            initializers=initializers,
            nodes=nodes,
            input_types=_types(v for v in proto.input if v.name in inputs),
        )

    def nodes(self, protos, opsets, visible: set[str], defined: set[str], refs) -> tuple[Node, ...]:
        """Bind nodes in order; their outputs are added to `visible` and `defined`."""
        bound = []
        for proto in protos:
            if proto.output and proto.output[0] in defined and proto.output[0] in self.external:
                continue  # a constant whose value comes from outside: nothing is left to compute
            node = self.node(proto, opsets, visible, refs)
            for name in node.reads:
                if name not in visible:
                    raise ModelError(
                        f"{node.label} reads '{name}', which no input, initializer or earlier node "
                        "defines (nodes must be sorted and acyclic)"
                    )
            for name in filter(None, node.outputs):
                if name in defined:
                    raise ModelError(f"{node.label} defines '{name}', which is already defined")
                defined.add(name)
                visible.add(name)
            bound.append(node)
        return tuple(bound)

    def node(self, proto: NodeProto, opsets: dict[str, int], visible: set[str], refs) -> Node:
        """Bind a node; an operator without an implementation is recorded in `missing`."""
        domain = _domain(proto.domain)
        label = (
            f"node '{proto.name or (proto.output[0] if proto.output else '?')}' ({proto.op_type})"
        )
        self.count += 1
        # 1. the values that the node reads and defines, and its attributes, among them bound graphs
        inputs, outputs = _strip_empty(proto.input), _strip_empty(proto.output)
        passed = _resolve_attributes(proto, refs, label)
        attributes, graphs = {}, {}
        for name, attribute in passed.items():
            if attribute.type == AttributeProto.GRAPH:
                graphs[name] = self.graph(attribute.g, opsets, visible, refs, nested=True)
            elif attribute.type == AttributeProto.GRAPHS:
                graphs[name] = [
                    self.graph(g, opsets, visible, refs, nested=True) for g in attribute.graphs
                ]
            else:
                attributes[name] = _value(attribute, label)
        captured = [name for graph in _flatten_graphs(graphs) for name in _free_names(graph)]
        index, body, op = self.count, None, None
        # 2. its meaning: a function of the model comes before an operator of the same name
        function = self.functions.get((domain, proto.op_type, proto.overload))
        if function is not None:
            check_call(proto, function, passed, label)
            op, body = _CALL, self.function(function, passed, opsets)
        elif domain in opsets:
            version = opsets[domain]
            label = f"{label[:-1]}, opset {version})"
            op = lookup(domain, proto.op_type, version)
            if op is None and load_plugins():
                op = lookup(domain, proto.op_type, version)
        # 3. refuse what the operator does not take
        if op is None:
            # go on, so that the error names every missing operator of the model at once
            version = opsets.get(domain)
            what = f"{domain or 'ai.onnx'}.{proto.op_type}" + (
                f" (opset {version})" if version else f" (domain '{domain}' is not imported)"
            )
            self.missing.setdefault(what, []).append(label.partition(" ")[2].rpartition(" (")[0])
            op = _CALL
        elif body is None:
            check_node(proto, op, opsets[domain], passed, label)
            attributes.pop("consumed_inputs", None)  # a hint of opset 1
            if any(what == "scope" for _, what in op.context):
                # an operator that sees the scope (Gradient) names values in its attributes
                strings = [v if isinstance(v, list) else [v] for v in attributes.values()]
                captured += [s for value in strings for s in value if isinstance(s, str) and s]
        # 4. all that it reads: inputs, and what its graphs capture
        reads = tuple(dict.fromkeys([*(n for n in inputs if n), *captured]))
        version = opsets.get(domain, 0)
        return Node(label, op, inputs, outputs, attributes, graphs, reads, index, body, version)

    def function(
        self, function: FunctionProto, passed: Mapping[str, AttributeProto], opsets
    ) -> Graph:
        """Bind a function's body for one call, with attribute references replaced by values."""
        name = ".".join(filter(None, (function.domain, function.name, function.overload)))
        defaults = {a.name: a for a in function.attribute_proto}
        refs = dict.fromkeys(function.attribute) | defaults | dict(passed)
        imported = {_domain(e.domain): e.version for e in function.opset_import} or opsets
        # names in a function are its own: only what was lifted out of it comes from outside
        inner = _Binder(self.functions, frozenset(), self.missing, self.count, self.lifted)
        lifted = {
            local: whole for local, whole in names_of_constants(function) if whole in self.lifted
        }
        names = {*function.input, *lifted}
        # constants that training may change are inputs of the body, in effect
        computed = [node for node in function.node if not {*node.output} & lifted.keys()]
        nodes = inner.nodes(computed, imported, names, set(names), refs)
        self.count = inner.count
        for output in function.output:
            if output not in names:
                raise ModelError(f"function '{name}': output '{output}' is never computed")
        return Graph(
            name=name,
            inputs=tuple(function.input),
            outputs=tuple(function.output),
            output_types=(None,) * len(function.output),
            weights=(),
            initializers={},
            nodes=nodes,
            lifted=lifted,
        )


# stands for the operator of nodes that call a function, and of those without an implementation
_CALL = Op()


def _types(values) -> tuple[onnx.TypeProto | None, ...]:
    return tuple(value.type if value.HasField("type") else None for value in values)


def _strip_empty(names) -> tuple[str, ...]:
    """Drop the omitted inputs or outputs at the end."""
    names = list(names)
    while names and not names[-1]:
        names.pop()
    return tuple(names)


def _value(attribute: AttributeProto, label: str) -> Any:
    """Convert an attribute: tensors to NumPy arrays, strings to str (bytes if not UTF-8)."""
    kind = attribute.type
    if kind == AttributeProto.TENSOR:
        return to_array(attribute.t)
    if kind == AttributeProto.TENSORS:
        return [to_array(t) for t in attribute.tensors]
    if kind == AttributeProto.SPARSE_TENSOR:
        return to_dense(attribute.sparse_tensor)
    if kind == AttributeProto.STRING:
        return _text(attribute.s)
    if kind == AttributeProto.STRINGS:
        return [_text(s) for s in attribute.strings]
    try:
        value = onnx.helper.get_attribute_value(attribute)
    except ValueError as error:
        raise ModelError(f"{label}: attribute '{attribute.name}' is malformed ({error})") from error
    return list(value) if kind in (AttributeProto.INTS, AttributeProto.FLOATS) else value


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _resolve_attributes(proto: NodeProto, refs, label: str) -> dict[str, AttributeProto]:
    """Return the attributes by name, with references to the enclosing function's resolved."""
    result = {}
    for attribute in proto.attribute:
        if attribute.name in result:
            raise ModelError(f"{label} has the attribute '{attribute.name}' twice")
        value, reference = attribute, attribute.ref_attr_name
        if reference:
            if refs is None or reference not in refs:
                raise ModelError(
                    f"{label}: attribute '{attribute.name}' refers to '{reference}', which is not "
                    "an attribute of an enclosing function"
                )
            value = refs[reference]
        if value is not None:
            result[attribute.name] = value
    return result


def _free_names(graph: Graph) -> Iterator[str]:
    """Yield the names that a subgraph reads from the scopes around it."""
    bound = {*graph.inputs, *graph.weights, *graph.initializers}
    for node in graph.nodes:
        yield from (name for name in node.reads if name not in bound)
        bound.update(node.outputs)
    yield from (name for name in graph.outputs if name not in bound)


@dataclass(frozen=True)
class _Rules:
    """The requirements of one version of a schema on a node."""

    inputs: tuple[str | None, ...]
    """The names of the required inputs, None for those that may be omitted."""
    fewest: int
    """The least number of inputs, counting omitted ones."""
    most: int | None
    """The greatest number of inputs; None if any number is allowed."""
    outputs: int | None
    """The greatest number of outputs; None if any number is allowed."""
    types: Mapping[str, int]
    """The AttributeType of each attribute."""


def check_node(
    proto: NodeProto, op: Op, version: int, attributes: Mapping[str, AttributeProto], label: str
) -> None:
    """Raise a ModelError if a node does not fit its operator.

    Args:
      proto: the node.
      op: its operator.
      version: the opset that the graph imports.
      attributes: those of the node, references resolved.
      label: the name of the node in messages.
    """
    unknown = {*attributes} - op.attributes - {"consumed_inputs"}
    if unknown:
        raise ModelError(
            f"{label} has unknown attributes {sorted(map(str, unknown))}; {op.name} has "
            f"{sorted(op.attributes) or 'none'}"
        )
    missing = op.required - {*attributes}
    if missing:
        raise ModelError(f"{label} lacks the required attributes {sorted(missing)}")
    rules = _rules(op.domain, op.name, version) or _Rules(
        op.needed, len(op.needed), op.inputs, None, {}
    )
    for name, attribute in attributes.items():
        expected = rules.types.get(name, attribute.type)
        if attribute.type != expected:
            actual, right = map(AttributeProto.AttributeType.Name, (attribute.type, expected))
            raise ModelError(f"{label}: attribute '{name}' is {actual}, it must be {right}")
    count = _count(proto.input)
    if rules.most is not None and count > rules.most:
        raise ModelError(f"{label} has {count} inputs; {op.name} takes at most {rules.most}")
    for i, name in enumerate(rules.inputs):
        if name is not None and (i >= count or not proto.input[i]):
            raise ModelError(f"{label} lacks input {i} ({name}), which {op.name} requires")
    if (listed := len(proto.input)) < rules.fewest:  # omitted ones count: Loop(count, "")
        raise ModelError(f"{label} has {listed} inputs; {op.name} takes at least {rules.fewest}")
    listed = _count(proto.output)
    if rules.outputs is not None and listed > rules.outputs:
        raise ModelError(f"{label} has {listed} outputs; {op.name} gives at most {rules.outputs}")


def check_call(
    proto: NodeProto, function: onnx.FunctionProto, attributes: Iterable[str], label: str
) -> None:
    """Raise a ModelError if a node uses attributes, inputs or outputs that its function lacks."""
    declared = {*function.attribute, *(a.name for a in function.attribute_proto)}
    unknown = sorted(map(str, {*attributes} - declared))
    name = f"{function.domain}.{function.name}"
    if unknown:
        raise ModelError(
            f"{label} has unknown attributes {unknown}; function '{name}' has "
            f"{sorted(declared) or 'none'}"
        )
    for what, listed, formal in (
        ("inputs", proto.input, function.input),
        ("outputs", proto.output, function.output),
    ):
        if _count(listed) > len(formal):
            raise ModelError(
                f"{label} has {_count(listed)} {what}; function '{name}' has {len(formal)}"
            )


def _count(names: Sequence[str]) -> int:
    """Return the number of inputs or outputs, without omitted ones at the end."""
    return max((i + 1 for i, name in enumerate(names) if name), default=0)


@cache
def _rules(domain: str, name: str, version: int) -> _Rules | None:
    """Return the rules of ONNX's schema; None for operators that ONNX does not know."""
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return None
    kind = OpSchema.FormalParameterOption
    endless = [any(p.option == kind.Variadic for p in ps) for ps in (schema.inputs, schema.outputs)]
    return _Rules(
        inputs=tuple(p.name if p.option == kind.Single else None for p in schema.inputs),
        fewest=schema.min_input,
        most=None if endless[0] else schema.max_input,
        outputs=None if endless[1] else schema.max_output,
        types={
            name: attribute.type.value  # type: ignore[attr-defined]
            for name, attribute in schema.attributes.items()
        },
    )


Name = tuple[str, str, str]
"""Domain, name and overload of a function."""

MOST_NODES = 1_000_000
"""The most nodes that a graph may have once its calls are expanded."""

DEEPEST_CALLS = 128
"""The longest chain of functions that call one another; each takes a few Python stack frames."""


def check_expansion(graph: GraphProto, functions: Mapping[Name, FunctionProto]) -> None:
    """Raise a ModelError if the calls of a graph have no end, are too many, or nest too deep.

    A small file can expand without bound: thirty functions that call the next one twice are 2**30
    nodes.
    """
    if not functions:
        return
    called = _count_calls(graph, functions)[1]
    calls: dict[Name | None, tuple[int, Counter[Name]]] = {None: (0, called)}
    waiting = [*called]
    while waiting:
        if (name := waiting.pop()) not in calls:
            calls[name] = _count_calls(functions[name], functions)
            waiting += calls[name][1]
    # the number of nodes with calls expanded, and the depth of calls
    sizes: dict[Name | None, tuple[int, int]] = {}
    try:
        for name in TopologicalSorter({n: inner for n, (_, inner) in calls.items()}).static_order():
            count, inner = calls[name]
            size = count + sum(sizes[n][0] * times for n, times in inner.items())
            sizes[name] = size, 1 + max((sizes[n][1] for n in inner), default=-1)
    except CycleError as error:
        name = ".".join(filter(None, error.args[1][0]))
        raise ModelError(f"function '{name}' calls itself; ONNX forbids recursion") from None
    size, depth = sizes[None]
    if size > MOST_NODES:
        raise ModelError(
            f"the functions that graph '{graph.name}' calls stand for {size:,} nodes, as each call "
            f"is evaluated on its own; at most {MOST_NODES:,} are taken"
        )
    if depth > DEEPEST_CALLS:
        raise ModelError(
            f"graph '{graph.name}' calls functions that are nested {depth} deep; at most "
            f"{DEEPEST_CALLS} are taken. onnx.inliner.inline_local_functions writes a file without "
            "functions"
        )


def _count_calls(
    body: GraphProto | FunctionProto, functions: Mapping[Name, FunctionProto]
) -> tuple[int, Counter[Name]]:
    """Count nodes, with those of subgraphs, and the calls of each function among them."""
    nodes = [*all_nodes(body)]
    names = (("" if n.domain == "ai.onnx" else n.domain, n.op_type, n.overload) for n in nodes)
    return len(nodes), Counter(name for name in names if name in functions)


PLUGIN_GROUP = "jaxonnx.operators"


@functools.cache
def load_plugins() -> bool:
    """Import the modules of all entry points, once; return whether there are any.

    Raises:
      UnsupportedError: a module fails to import, or an entry point names none; the message names
        its package.
    """
    points = entry_points(group=PLUGIN_GROUP)
    for point in points:
        try:
            point.load()
        except (ImportError, AttributeError, TypeError, ValueError, LookupError) as error:
            package = point.dist.name if point.dist is not None else "an unknown package"
            raise UnsupportedError(
                f"the operators of the package '{package}' ({point.value}) cannot be loaded: "
                f"{type(error).__name__}: {error}; repair or uninstall it"
            ) from error
    return bool(points)
