"""Which tensors are parameters and which are running statistics, by where they are used.

`jaxonnx.registry` says what stands at the inputs of an operator; a tensor keeps its role behind
Transpose, Reshape, Cast, Identity and the like, in parts (Slice, Split, Concat, Gather of constant
indices), repeated (Expand), in subgraphs and in functions of the model.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from onnx import GraphProto

from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.normalizations import normalizations
from jaxonnx._graph.rules import CONSTANT, Rule, is_trained, judge, judge_part
from jaxonnx._graph.sites import Facts, Site, Tensor
from jaxonnx._graph.uses import PARTS, SIZES, Use, evaluate, uses
from jaxonnx._io.protos import all_graphs

KNOWN_LIMIT = 4096
"""Bytes; a frozen tensor above it is an argument of the compiled function, not a constant in it."""

PRODUCTS = ("Conv", "Gemm", "MatMul")
"""Operators whose integers and packed operands are weights, in all their variants (`Op.like`)."""

HOST_ONLY = (object, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn)
"""Element types that XLA does not have: such tensors stay in NumPy."""


def split(
    graph: Graph, tensors: Mapping[str, np.ndarray], proto: GraphProto
) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """Split the tensors of a graph into parameters, state and constants.

    State is running statistics, and frozen tensors that are too large to be constants of a compiled
    function.

    Args:
      graph: the bound main graph.
      tensors: the values of its named tensors.
      proto: the graph as the file has it.
    """
    role_of = Roles(graph, tensors, stored_names(proto)).of
    params, state, constants = {}, {}, {}
    for name in graph_tensors(graph):
        value = tensors[name]
        if role_of.get(name) == "param":
            params[name] = value
        elif name in role_of or (value.nbytes > KNOWN_LIMIT and value.dtype not in HOST_ONLY):
            state[name] = value
        else:
            constants[name] = value
    return params, state, constants


def stored_names(proto: GraphProto) -> set[str]:
    """Return the names of the initializers, and of the results of Identity nodes.

    Some exporters write a tensor that equals an initializer as an Identity of that.
    """
    graphs = [*all_graphs(proto)]
    names = {tensor.name for inner in graphs for tensor in inner.initializer}
    nodes = (node for inner in graphs for node in inner.node if node.op_type == "Identity")
    return names | {node.output[0] for node in nodes if node.output}


def graph_tensors(graph: Graph) -> list[str]:
    """Return the named tensors of a graph, its subgraphs and the functions that it calls."""
    names = [*graph.weights, *graph.lifted.values()]
    for node in graph.nodes:
        for g in (*node.subgraphs, *([] if node.body is None else [node.body])):
            names += graph_tensors(g)
    return list(dict.fromkeys(names))


def running_statistics(graph: Graph) -> set[str]:
    """Return the names that are used as running statistics, also in subgraphs and functions."""
    names = set()
    for node in graph.nodes:
        names |= {name for i, name in enumerate(node.inputs) if node.op.role(i) == "state"}
        for g in node.subgraphs:
            names |= running_statistics(g)
        if node.body is not None:
            outer = dict(zip(node.body.inputs, node.inputs, strict=False)) | dict(node.body.lifted)
            names |= {outer[name] for name in running_statistics(node.body) if name in outer}
    return names


class Roles:
    """The roles of the tensors of a graph, by `jaxonnx._graph.rules`.

    Args:
      graph: the bound main graph.
      tensors: its named tensors.
      initializers: the names of those that are initializers; the others sit in Constant nodes.
      trained: the names of tensors that are parameters in any case.

    Attributes:
      used: the uses of the tensors.
      rules: the rule that decided on each tensor that stands where weights do.
      of: "param" or "state", for the tensors that have a role.
      constants: for tensors that stand where weights do and are constants, why they are.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Mapping[str, Any],
        initializers: Collection[str],
        trained: Collection[str] = (),
    ) -> None:
        expressions = evaluate_constant_expressions(graph, tensors)
        results = {name: expression.value for name, expression in expressions.items()}
        named, everything = {*initializers, *results}, {**tensors, **results}
        floats = self._tensors = {
            name: Tensor(value, name in named)
            for name, value in everything.items()
            if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize > 1
        }
        all_uses = uses(graph, everything, results)
        self.used = [use for use in all_uses if use.name not in results]
        # what is part of an expression is judged by what the expression's result is
        parts = frozenset[str]().union(*(expression.parts for expression in expressions.values()))
        norms = frozenset[str]().union(*(expression.norms for expression in expressions.values()))
        facts = Facts(graph, normalizations(graph, tensors), norms - parts)
        sites = [Site(use, floats[use.name], facts) for use in all_uses if use.name in floats]
        visible = [
            site
            for site in sites
            if not (site.name in parts and site.meets_no_data)
            # a Gather of one constant index takes a part, whose readers decide
            and not (
                site.use.passes
                and site.operator == "Gather"
                and np.shape(everything.get(site.others[0], (0,))) == ()
            )
        ]
        integers = (use for use in all_uses if use.name not in floats)
        find_layers(facts, visible, initializers, integers)
        self.rules: dict[str, Rule] = {}
        for site in visible:
            self._add(site.name, judge(site, site.name in trained))
        first = {site.name: site for site in reversed(sites)}
        for name, expression in expressions.items():
            rule = self.rules.pop(name, None)
            if rule is not None:
                for part in sorted(expression.parts - self.rules.keys()):
                    self._add(part, judge_part(first[part], rule))

    def _add(self, name: str, rule: Rule | None) -> None:
        """Note a rule for a tensor: the first counts, but constants come last."""
        if rule is not None:
            before = self.rules.get(name, rule)
            self.rules[name] = rule if before.verdict == CONSTANT != rule.verdict else before

    @property
    def of(self) -> dict[str, str]:
        """The tensors that have a role, "param" or "state"."""
        return {n: r.verdict for n, r in self.rules.items() if r.verdict != CONSTANT}

    @property
    def constants(self) -> dict[str, str]:
        """Constants in weight positions, with the rule that made them constant."""
        return {n: r.name for n, r in self.rules.items() if r.verdict == CONSTANT}

    @property
    def without_role(self) -> dict[str, str]:
        """The tensors that look learned but have no role, with the operator that reads each.

        They are floating-point initializers with more than two different numbers that are not an
        arithmetic sequence.
        """
        readers: dict[str, str] = {}
        for use in self.used:
            op = use.node.op
            scale = (op.view and use.position > 0) or use.position in op.scales
            if not (use.passes or scale or op.domain == "ai.onnx.ml"):
                readers.setdefault(use.name, op.name)
        return {
            name: readers[name]
            for name, tensor in self._tensors.items()
            if name in readers and name not in self.rules
            if tensor.stored and tensor.irregular and not tensor.description
        }


def find_layers(
    facts: Facts, sites: Sequence[Site], initializers: Collection[str], integers: Iterable[Use]
) -> None:
    """Add the nodes that have weights to the facts of a graph, before the rules that ask for them.

    First come those whose operators declare weights, also quantized ones; then those with operands
    that are trained in view of these.

    Args:
      facts: the facts of all sites.
      sites: the uses of floating-point tensors.
      initializers: the names of tensors that are initializers.
      integers: the uses of other tensors.
    """
    weights = [site for site in sites if site.is_declared_weight]
    stored = (s for s in weights if s.name in initializers and s.node.op.form(s.use.position))
    facts.weights_stored = any(True for _ in stored)
    facts.layers = {site.use.outer.index for site in weights}
    facts.layers |= {use.outer.index for use in integers if use.node.op.like in PRODUCTS}
    # a vector of Add or Mul makes no layer: it may normalize inputs
    others = [site for site in sites if site.role is None or site.is_table]
    first = replace(facts)
    operands = (replace(site, facts=first) for site in others if site.role != "param")
    facts.layers = facts.layers | {s.use.outer.index for s in operands if is_trained(s)}


_LARGEST = 2**26
"""The most elements of a tensor that anything is computed from."""
_FOLLOWED = ("Constant", "ConstantOfShape", "CumSum", "Einsum", "Gemm", "LogSoftmax")
_FOLLOWED += ("LpNormalization", "MatMul", "Range", "ScatterElements", "ScatterND", "Softmax")
_FOLLOWED += ("Trilu",)
_FOLLOWED += ("BatchNormalization", "InstanceNormalization")
"""Operators that are evaluated, besides pointwise ones, reductions, views and sizes."""
_LOOKUPS = ("Gather", "GatherElements", "GatherND", "Expand", "Reshape", "Slice", "Tile")
"""Operators whose results are numbers of their first input; the others are indices and shapes."""


class ConstantExpression(NamedTuple):
    """A value and the floating-point tensors that it is computed from."""

    value: np.ndarray
    parts: frozenset[str]
    norms: frozenset[str]
    """The tensors that its divisors are computed from, such as the vectors of a spectral norm."""


def evaluate_constant_expressions(
    graph: Graph, tensors: Mapping[str, Any]
) -> dict[str, ConstantExpression]:
    """Evaluate the arithmetic of a graph that depends on its tensors alone, like g * v / |v|.

    Its results stand where data meet them as weights would that an exporter had folded, so their
    places and numbers tell what the tensors behind them are.

    Results that are plain views of one tensor are left out, and so is everything that is computed
    from one-byte integers, which are packed weights.

    Args:
      graph: the bound main graph.
      tensors: the values of its named tensors.

    Returns:
      The results that nodes with data read, by name.
    """
    constants = {**graph.initializers, **tensors}
    # the floating-point tensors behind each value: no scalars; None behind packed weights, which
    # have types of one byte
    sources: dict[str, frozenset[str] | None] = {}
    for name, value in constants.items():
        dtype, several = np.asarray(value).dtype, np.size(value) > 1
        is_packed = several and dtype.kind not in "bO" and dtype.itemsize == 1
        tensors_behind = {name} if several and jnp.issubdtype(dtype, jnp.floating) else ()
        sources[name] = None if is_packed else frozenset(tensors_behind)
    arithmetic: set[str] = set()
    inner: list[Node] = []
    norms: dict[str, frozenset[str]] = {}
    # 1. collect the nodes that compute with tensors alone: arithmetic, views and parts
    for node in graph.nodes:
        op = node.op
        followed = op.name in (*_FOLLOWED, *_LOOKUPS, *PARTS, *SIZES)
        followed = followed or op.name.startswith("Reduce")
        simple = op.pointwise or op.view or (followed and not op.domain)
        if not simple or op.dynamic or node.subgraphs:
            continue
        if not all(name in sources for name in node.reads):
            continue
        operands = node.inputs[:1] if node.op.name in _LOOKUPS else node.inputs
        if node.op.name in SIZES:
            operands = ()  # it reads no numbers
        if node.op.name == "BatchNormalization":
            operands = node.inputs[:3]  # the others are statistics of the first
        if node.op.name == "Div" and sources[node.inputs[0]]:
            operands = node.inputs[:1]  # the divisor of a weight is its norm or a quantization step
        behind: frozenset[str] | None = frozenset()
        for name in filter(None, operands):
            read_sources = sources[name]
            behind = None if read_sources is None or behind is None else behind | read_sources
        divided = frozenset[str]().union(*(norms.get(name, ()) for name in node.inputs))
        for name in arithmetic.intersection({*node.inputs} - {*operands}):
            divisor = sources[name] or frozenset()
            divided |= divisor if len(divisor) > 1 else frozenset()
        norms.update(dict.fromkeys(node.outputs, divided))
        sources.update(dict.fromkeys(filter(None, node.outputs), behind))
        inner.append(node)
        moved = node.op.view or (not node.op.domain and node.op.name in PARTS)
        if behind and not (moved and arithmetic.isdisjoint(operands)):
            arithmetic.update(filter(None, node.outputs))
    # 2. evaluate the results that other nodes read
    inside = {node.index for node in inner}
    outer = {name for node in graph.nodes if node.index not in inside for name in node.reads}
    results = arithmetic & outer
    values = _evaluate(inner, results, constants)
    return {
        n: ConstantExpression(v, sources[n] or frozenset(), norms.get(n, frozenset()))
        for n, v in values.items()
        if n in results
    }


def _is_small(node: Node, inputs: Sequence[Any]) -> bool:
    """Check, before evaluating a node, that its result has at most `_LARGEST` elements."""
    if node.op.name in ("Expand", "Tile"):
        sizes = np.asarray(inputs[1], np.float64)
        return float(np.prod(np.maximum(sizes, 1))) * np.size(inputs[0]) <= _LARGEST
    if node.op.name == "Range":
        start, limit, delta = (float(np.reshape(value, -1)[0]) for value in inputs)
        return delta != 0 and abs(limit - start) <= _LARGEST * abs(delta)
    if node.op.name == "ConstantOfShape":
        return float(np.prod(np.asarray(inputs[0], np.float64))) <= _LARGEST
    shapes = [np.shape(value) for value in inputs]
    sizes = [math.prod(shape) for shape in shapes]
    if node.op.name in ("Gemm", "MatMul"):
        # (rows * summed) * (summed * columns) / summed^2 = elements of the result
        place = -2 if node.attributes.get("transA") else -1
        summed = shapes[0][place] if len(shapes[0]) >= -place else 0
        return summed > 0 and sizes[0] * sizes[1] <= _LARGEST * summed**2
    if node.op.name == "Einsum":
        return math.prod(sizes) <= _LARGEST  # which bounds its work, too
    if node.op.name.startswith("Gather"):
        return max(sizes[:2]) ** 2 <= _LARGEST
    if node.op.pointwise:
        longest = itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
        return math.prod(max(axis) for axis in longest) <= _LARGEST
    return True


def _evaluate(
    nodes: list[Node], names: Collection[str], constants: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Evaluate nodes as far as `names` needs them; values that are too large are left out."""
    needed = ancestors(nodes, names) if names else set()
    if any(np.size(constants[name]) > _LARGEST for name in needed if name in constants):
        return {}
    values: dict[str, np.ndarray] = {}
    for node in nodes:
        if needed.isdisjoint(node.outputs):
            continue
        inputs = [values.get(n, constants.get(n)) if n else None for n in node.inputs]
        if any(value is None and n for n, value in zip(node.inputs, inputs, strict=True)):
            continue
        results = evaluate(node, inputs) if _is_small(node, inputs) else None
        for name, value in zip(node.outputs, results or (), strict=False):
            if np.size(value) <= _LARGEST:
                values[name] = np.asarray(value)
    return values
