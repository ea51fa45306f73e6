"""`to_onnx`: a JAX function as a ModelProto."""

import ast
import functools
import inspect
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from onnx import FunctionProto, GraphProto, ModelProto, ValueInfoProto, helper

from jaxonnx._compare.written import Origin, check_written
from jaxonnx._data.random_inputs import draw_inputs
from jaxonnx._graph.values import to_value
from jaxonnx._io.protos import Writer, defined_names, subgraphs, unused_name
from jaxonnx._jaxpr import bind_equation, interpret, live, programs
from jaxonnx._require import check_arguments, name_type
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError
from jaxonnx.onnx_out._nodes import OLDEST, Nodes, Tensor, digest, plain, value_info
from jaxonnx.onnx_out._rule_table import is_complex, primitive
from jaxonnx.onnx_out._simplify import scales_by_bits
from jaxonnx.onnx_out._tensors import all_known, known_tensor
from jaxonnx.onnx_out._tracing import trace

OPSET = 18
"""The opset that is written where none is asked for: the oldest that has bitwise operators."""

IR_VERSION = 10
"""The newest version of the file format that onnxruntime 1.18 reads."""


def to_onnx(
    function: Callable,
    *examples: Any,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    opset: int = OPSET,
    check: bool = True,
) -> ModelProto:
    """Return a JAX function as an ONNX model of standard operators.

    Gradients, `vmap`, random numbers, loops and branches become nodes like all else; arrays that
    the function captures become initializers. Those of a `Model` whose `apply` or `function` it
    calls have the names of its tensors, unless they are computed with first, like the statistics of
    BatchNormalization.

    Args:
      function: a pure function of pytrees of arrays; or a module of Flax (nnx, or linen as
        `net.bind(variables)`), whose weights become initializers that have their path as a name.
      *examples: its arguments: arrays, numbers or `jax.ShapeDtypeStruct`s, of which only shapes and
        dtypes matter. Sizes may be symbolic (`jax.export.symbolic_shape("batch, 3")`).
      inputs: the names of the graph's inputs, one for each array among the examples; by default
        those of the function's parameters, with the path to the array within.
      outputs: the names of its outputs; "output" by default, with the path.
      opset: the version of ONNX's operators, 13 or newer.
      check: compare the model with the function, by onnxruntime where it is installed: on arrays
        among the examples that have different numbers, and on random numbers in place of others,
        whose symbolic sizes get numbers that meet their constraints. A warning says so where this
        is not possible.

    >>> import jax, jax.numpy as jnp
    >>> proto = to_onnx(jax.grad(lambda x: jnp.sin(x).sum()), jnp.ones(3))
    >>> [node.op_type for node in proto.graph.node]
    ['Cos', 'Mul']

    Raises:
      UnsupportedError: ONNX cannot say a primitive of the function; the message has its name and
        the line of the program. Or the function has side effects.
      InputError: names collide, or are not as many as there are arrays; the function returns none.
      ModelError: `check` finds a difference, or onnxruntime refuses the model; the message names
        the first node that differs.
    """
    check_arguments(to_onnx, locals())
    proto, written = write_function(function, examples, inputs, outputs, opset)
    if check:
        check_written("the exported function", proto, _to_origin(proto, written, examples))
    return proto


def write_function(
    function: Callable,
    examples: Sequence[Any],
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    opset: int,
    flat: bool = False,
) -> "tuple[ModelProto, ExportedFunction]":
    """Write a JAX function as a model: see `to_onnx`.

    Args:
      flat: whether the model is a training step. It has no functions of its own then, and is
        optimized for speed: gradients of Relu and Clip are masks, factors are merged.
    """
    if opset < OLDEST:
        raise InputError(
            f"opset {opset} is too old: functions become nodes of opset {OLDEST} on. Pass "
            f"opset={OLDEST} or newer, as long as the runtime takes it"
        )
    graph = GraphProto(name=getattr(function, "__name__", type(function).__name__))
    leaves, _ = jax.tree_util.tree_flatten_with_path(examples)
    names = _names(inputs, [_input(function, path) for path, _ in leaves], "inputs")
    functions: list[FunctionProto] = []
    receiver = None if flat else functions
    written = append(graph, function, examples, names, outputs, opset, receiver, flat)
    if not written.outputs:
        raise InputError(
            f"the function returns no array for these examples ({len(leaves)} arrays among them); "
            "a model needs an output"
        )
    for name, (path, leaf) in zip(names, leaves, strict=True):
        graph.input.append(value_info(name, plain(_struct(leaf, path))))
    graph.output.extend(written.outputs)
    opsets = [helper.make_opsetid("", opset)]
    if functions:
        opsets.append(helper.make_opsetid(DOMAIN, 1))
    proto = helper.make_model(
        graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="jaxonnx",
        functions=functions,
    )  # fmt: skip
    return proto, written


class ExportedFunction(NamedTuple):
    """The nodes that were written for a JAX function."""

    outputs: list[ValueInfoProto]
    """The declarations of the results."""
    run: Callable[..., list[Any]]
    """Evaluate the function on arrays, `run(arrays, names=())`: its results, then the values that
    it has where the graph has tensors of these names."""
    names: Collection[str]
    """The tensors of the graph that hold results of equations."""


def append(
    graph: GraphProto,
    function: Callable,
    examples: Any,
    inputs: Sequence[str],
    outputs: Sequence[str] | None,
    opset: int,
    functions: list[FunctionProto] | None = None,
    gates: bool = False,
) -> ExportedFunction:
    """Append the nodes of a JAX function that reads tensors of a graph.

    Args:
      graph: receives the nodes and initializers, under names that it does not have yet.
      function: a function of pytrees, or a Flax module, whose weights become initializers named by
        their path.
      examples: its arguments; only shapes and dtypes matter.
      inputs: for each array among the arguments the tensor of the graph to read.
      outputs: the names of the results; "output" and the path by default.
      opset: that of the graph.
      functions: receives functions for the programs of `jit` that are called more than once; if
        None, these are written out at each call.
      gates: whether gradients of Relu and Clip are products with a mask, and factors are merged and
        moved out of sums, for speed.

    Returns:
      The results, which are not added to the graph's outputs.
    """
    # 1. trace the function
    call, weights = split_weights(function)
    leaves, tree = jax.tree_util.tree_flatten_with_path(examples)
    structs = [_struct(leaf, path) for path, leaf in leaves]
    arguments = jax.tree_util.tree_unflatten(tree, structs)
    closed, shapes = trace(call, weights, arguments)
    closed = live(closed)
    # 2. name its results
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]
    used = {*defined_names(graph), *inputs}
    default = [unused_name("output" + _key(path), used) for path in paths]
    results = default if outputs is None else _names(outputs, default, "outputs")
    if shared := used.difference(default).intersection(results):
        raise InputError(f"{sorted(shared)[0]!r} is the name of another tensor; give outputs=")
    used.update(results)
    # 3. write a node, or several, for each equation
    before = len(graph.node), len(graph.initializer)
    writer = Writer(graph.name, used)
    writer.graph = graph
    g = Nodes(writer, opset)
    g.whole = closed
    g.labels = {} if gates else name_captured(function)
    g.gates = gates
    g.factors = gates and not scales_by_bits(closed)
    if functions is not None:
        g.functions = Functions(closed, opset)
    tensors = [
        Tensor(writer.constant(name, np.asarray(x), x.dtype), x.shape, x.dtype)
        for name, x in weights.items()
    ]
    for name, struct in zip(inputs, map(plain, structs), strict=True):
        tensors.append(Tensor(name, struct.shape, struct.dtype))
        g.declare_sizes(name, struct.shape)
    tensors_of: list[list[str]] = []  # the results of each equation

    def write(equation: Any, operands: list) -> list:
        results = g._equation(equation, operands)
        tensors_of.append([str(x) if isinstance(x, str) else "" for x in results])
        return results

    values = g.program(closed, tensors, write)
    # a result may be an input or a constant, and one value several results: an Identity each, most
    # of which `merge_identities` removes
    for name, value in zip(results, values, strict=True):
        writer.nodes("Identity", [g.name(value)], [name])
    prune(graph, results, *before)
    merge_identities(graph, before[0])
    if functions is not None:
        functions.extend(g.functions.protos)
    # 4. a function that evaluates the same, and its values within by the names of tensors
    declared = [value_info(n, plain(a)) for n, a in zip(results, closed.out_avals, strict=True)]
    # it runs once or twice: the program that was traced, compiled without optimizations
    options = _UNOPTIMIZED if jax.default_backend() == "cpu" else None
    is_fixed = all(all_known(struct.shape) for struct in structs)
    compiled = jaxpr_as_fun(closed)
    if closed.jaxpr.eqns:
        compiled = jax.jit(compiled, compiler_options=options)

    def run(arrays: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
        operands = [_as_example(x, struct) for x, struct in zip(arrays, structs, strict=True)]
        arguments = jax.tree_util.tree_unflatten(tree, operands)
        leaves_in = [*jax.tree.leaves(weights), *operands]
        try:
            if is_fixed:
                values = compiled(*leaves_in)
            else:
                values = jax.tree.leaves(jax.jit(call)(weights, *arguments))
        except NotImplementedError:  # a primitive that XLA does not know may have a function
            try:
                values = jax.tree.leaves(call(weights, *arguments))
            except NotImplementedError as error:
                raise InputError(f"JAX does not evaluate the function: {error}") from error
        except (TypeError, ValueError) as error:
            if is_fixed:
                raise
            raise InputError(
                f"the function does not take the shapes {[x.shape for x in operands]}: {error}; "
                "say in the sizes of the examples which it takes, like multiples '4*h'"
            ) from error
        if names:
            program, results_of = closed, []
            if not is_fixed:
                program = live(trace(call, weights, arguments)[0])

            def evaluate(equation: Any, inputs: list) -> list:
                results_of.append(bind_equation(equation, inputs))
                return results_of[-1]

            interpret(program, evaluate, leaves_in, enter=g._inline_program)
            pairs = zip(tensors_of, results_of, strict=True)
            named = {n: x for ns, xs in pairs for n, x in zip(ns, xs, strict=True)}
            values += [named[name] for name in names]
        return [
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in values
        ]

    produced = {name for node in graph.node[before[0] :] for name in node.output}
    return ExportedFunction(
        declared, run, produced & {name for names in tensors_of for name in names}
    )


_LARGEST_SIZE, _MOST_ATTEMPTS = 256, 100_000
_SIZE_FUNCTIONS = {"mod": operator.mod, "floordiv": operator.floordiv, "max": max, "min": min}
"""The functions in symbolic sizes."""
_SIZE_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Eq: operator.eq,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
}
"""The operators in symbolic sizes and their constraints."""
_UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def _as_example(array: Any, struct: jax.ShapeDtypeStruct) -> Any:
    """Return an array in the dtype of an example; as PRNG keys where it has such."""
    if not jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return jnp.asarray(array, struct.dtype)
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), struct)
    return jax.random.wrap_key_data(jnp.asarray(array), impl=impls[0])


def _choose_sizes(symbolic: Sequence[Any]) -> dict[str, int]:
    """Return a number for each symbolic size, by its text, such that all constraints hold.

    The variables are 4, 5, 6, ... where the constraints allow it.

    Raises:
      InputError: none up to `_LARGEST_SIZE` are found.
    """
    # 1. sizes and constraints as JAX prints them: expressions of Python, but for powers
    scopes = {str(n.scope).partition(" with constraints:")[2] for n in symbolic}
    lines = [line.strip() for text in scopes for line in text.splitlines() if line.strip()]
    sizes = [*map(str, symbolic)]
    trees = {x: ast.parse(x.replace("^", "**"), mode="eval").body for x in (*sizes, *lines)}
    names_of = {
        x: {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - _SIZE_FUNCTIONS.keys()
        for x, tree in trees.items()
    }
    values_of = {x: _compile_size(tree) for x, tree in trees.items()}

    # 2. one variable after the other, each with the first number that fits those before it
    names = sorted(set().union(*names_of.values()))

    def search(variables: Mapping[str, int]) -> Iterator[Mapping[str, int] | None]:
        """Yield variables that fit, and None for each attempt that does not."""
        i = len(variables)
        if i == len(names):
            yield variables
            return
        for number in (*range(4 + i, _LARGEST_SIZE + 1), *range(3 + i, 0, -1)):
            more = {**variables, names[i]: number}
            decided = (x for x, of in names_of.items() if names[i] in of and of <= more.keys())
            fits = all(values_of[x](more) > 0 for x in decided)
            yield from search(more) if fits else [None]

    for variables in islice(search({}), _MOST_ATTEMPTS):
        if variables is not None:
            return {size: values_of[size](variables) for size in sizes}
    raise InputError(
        f"no sizes up to {_LARGEST_SIZE} were found that meet the constraints of the examples' "
        f"{', '.join(sizes)}"
    )


def _compile_size(tree: ast.expr) -> Callable[[Mapping[str, int]], int]:
    """Return a function of the variables that evaluates a symbolic size or a constraint."""
    match tree:
        case ast.Constant(value=int(number)):
            return lambda variables: number
        case ast.Name(id=name):
            return lambda variables: variables[name]
        case ast.Call(func=ast.Name(id=name), args=parts):
            function = _SIZE_FUNCTIONS[name]
        case ast.UnaryOp(op=kind, operand=part):
            function, parts = _SIZE_OPERATORS[type(kind)], [part]
        case ast.BinOp(left=a, op=kind, right=b) | ast.Compare(left=a, ops=[kind], comparators=[b]):
            function, parts = _SIZE_OPERATORS[type(kind)], [a, b]
        case _:
            raise InputError(f"the size {ast.unparse(tree)} cannot be evaluated: pass check=False")
    values = [*map(_compile_size, parts)]
    return lambda variables: function(*(value(variables) for value in values))


def _to_origin(proto: ModelProto, written: ExportedFunction, examples: Sequence[Any]) -> Origin:
    """Return a function as the network that a file was written from."""
    inputs, leaves = [*map(to_value, proto.graph.input)], jax.tree.leaves(examples)

    def run(feeds: Mapping[str, Any], names: Sequence[str] = ()) -> list[Any]:
        return written.run([feeds[value.name] for value in inputs], names)

    def draw(seed: int) -> dict[str, Any]:
        open_sizes = [n for x in leaves for n in np.shape(x) if not all_known([n])]
        feeds = draw_inputs(inputs, 0, _choose_sizes(open_sizes), seed=seed)
        for value, leaf in zip(inputs, leaves, strict=True):
            x = feeds[value.name]
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                example = known_tensor(leaf, _struct(leaf, ()))
                if example.ndim == 0 or (example != example.flat[:1]).any():
                    feeds[value.name] = example
            elif seed and jnp.issubdtype(x.dtype, jnp.floating):
                feeds[value.name] = abs(x)  # roots and logarithms have no others
        return feeds

    names = {value.name for value in proto.graph.output}
    return Origin(inputs, run, names=names.union(written.names), draw=draw)


def prune(graph: GraphProto, results: Iterable[str], nodes: int = 0, tensors: int = 0) -> None:
    """Remove nodes and initializers that no result needs, in subgraphs as well.

    Rules leave such nodes behind. Runtimes remove them from the main graph, but not always from the
    branches of an If.

    Args:
      graph: is changed in place.
      results: the names that are needed.
      nodes, tensors: the first node and initializer to consider.
    """
    needed, reached = {*results}, []
    for node in reversed(graph.node[nodes:]):
        if needed.intersection(node.output):
            for inner in subgraphs(node):
                prune(inner, [value.name for value in inner.output])
            needed.update(reads(node))
            reached.append(node)
    weights = [tensor for tensor in graph.initializer[tensors:] if tensor.name in needed]
    del graph.node[nodes:]
    graph.node.extend(reversed(reached))
    del graph.initializer[tensors:]
    graph.initializer.extend(weights)


def merge_identities(graph: GraphProto, first: int = 0, *, inner: bool = False) -> None:
    """Remove each Identity of a computed tensor by renaming the tensor to the Identity's output.

    The first Identity of a tensor is removed; others remain.

    Args:
      graph: is changed in place.
      first: the first node to consider.
      inner: do so in subgraphs alone.
    """
    if inner:
        for node in graph.node[first:]:
            for part in subgraphs(node):
                merge_identities(part, inner=True)
                merge_identities(part)
        return
    computed = {name for node in graph.node[first:] for name in node.output}
    names: dict[str, str] = {}
    nodes = []
    for node in graph.node[first:]:
        (source, *_) = [*node.input, ""]
        if node.op_type == "Identity" and source in computed and source not in names:
            names[source] = node.output[0]
        else:
            nodes.append(node)
    for node in nodes:
        rename(node, names)
    del graph.node[first:]
    graph.node.extend(nodes)


def rename(node: Any, names: dict[str, str]) -> None:
    """Rename inputs and outputs of a node, and of the nodes of its subgraphs."""
    for values in (node.input, node.output):
        for i, name in enumerate(values):
            values[i] = names.get(name, name)
    for inner in subgraphs(node):
        for value in inner.output:
            value.name = names.get(value.name, value.name)
        for other in inner.node:
            rename(other, names)


def reads(node: Any) -> set[str]:
    """Return the names that a node reads, also from within its subgraphs.

    Names that a subgraph defines itself are included as well.
    """
    names = {*node.input}
    for graph in subgraphs(node):
        names.update(value.name for value in graph.output)
        for inner in graph.node:
            names |= reads(inner)
    return names


def _struct(leaf: Any, path: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and the canonical dtype of an example.

    Raises:
      InputError: it is not an array of numbers or PRNG keys.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        dtype: Any = jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    except TypeError as error:
        what = jax.tree_util.keystr(path)
        raise InputError(f"example {what} is {name_type(leaf)}, not an array: {error}") from None
    numbers = jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_
    if not numbers and not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        what = jax.tree_util.keystr(path)
        raise InputError(f"example {what} is {name_type(leaf)}, not an array of numbers")
    return jax.ShapeDtypeStruct(array.shape, dtype)


def _names(chosen: Sequence[str] | None, default: list[str], what: str) -> list[str]:
    """Check the chosen names; return them, or the defaults.

    Raises:
      InputError: their number is wrong, or a name occurs twice.
    """
    names = default if chosen is None else list(chosen)
    if len(names) != len(default):
        raise InputError(f"{what}= has {len(names)} names for {len(default)} arrays: {default}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{what}: two arrays have the name {twice[0]!r}; give names by {what}=")
    return names


def _input(function: Callable, path: Any) -> str:
    """Return the default name of an input: the function's parameter and the path within it."""
    first, *rest = path
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    name = "input"
    if first.idx < len(parameters):
        parameter = parameters[first.idx]
        if parameter.kind is not parameter.VAR_POSITIONAL:
            return parameter.name + _key(rest)
        name = parameter.name
    elif parameters and parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        name = parameters[-1].name
    return f"{name}.{first.idx}" + _key(rest)


def _key(path: Any) -> str:
    """Return a path within a pytree as ".key.key", or "" if it is empty."""
    text = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
    return f".{text}" if text else ""


# Names of tensors of models that a function captures.

_SILENT = {"jax", "jaxlib", "jaxonnx", "numpy", "flax", "optax"}
"""Packages whose functions capture no models by global names."""


def name_captured(function: Any) -> dict[Any, str]:
    """Return the names of the tensors of models that a function captures, by their `digest`.

    A matrix that the function transposes has its name, too.
    """
    labels: dict[Any, str] = {}
    for model in _find_models(function):
        for name, tensor in {**model.state, **model.params}.items():
            array = np.asarray(tensor)
            if array.size > 1:
                labels.setdefault(digest(array), name)
                if array.ndim == 2:
                    labels.setdefault(digest(array.T), name)
    return labels


def _find_models(function: Any) -> list[Network]:
    """Find the models in closures, arguments and global names of a function and of those it has."""
    waiting, visited, models = [function], set[int](), list[Network]()
    while waiting:
        x = waiting.pop()
        if id(x) in visited:
            continue
        visited.add(id(x))
        if isinstance(x, Network):
            models.append(x)
        elif isinstance(x, functools.partial):
            waiting += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, Mapping):
            waiting += x.values()
        elif isinstance(x, tuple | list):
            waiting += x
        elif inspect.ismethod(x):
            waiting += [x.__self__, x.__func__]
        elif inspect.isfunction(x):
            waiting += x.__defaults__ or ()
            for cell in x.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    waiting.append(cell.cell_contents)
            if (x.__module__ or "").partition(".")[0] not in _SILENT:
                waiting += [x.__globals__.get(name) for name in x.__code__.co_names]
        elif callable(getattr(x, "__wrapped__", None)):  # of `jax.jit`
            waiting.append(x.__wrapped__)
    return models


# Modules of Flax as functions of named weights.

Weights = Mapping[str, Any]


def split_weights(function: Any) -> tuple[Callable, Weights]:
    """Split a function into a pure function of (weights, *arguments), and its weights.

    Args:
      function: an `nnx.Module`, a bound linen module (`net.bind(variables)`), or any other
        function, which has no weights.

    Returns:
      The pure function, and the weights by their path in the module.
    """
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    if nnx is not None and isinstance(function, nnx.Module):
        definition, state = nnx.split(function)
        return _flatten(state, lambda state, *xs: nnx.merge(definition, state)(*xs))
    if linen is not None and isinstance(function, linen.Module):
        module, variables = function.unbind()
        return _flatten(variables, module.apply)
    return lambda weights, *arguments: function(*arguments), {}


def _flatten(tree: Any, apply: Callable) -> tuple[Callable, Weights]:
    """Return `apply` as a function of a flat dictionary in place of a tree, and the dictionary.

    PRNG keys (of dropout) are not weights: the function captures them.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    # "dense.kernel" for ['params']['dense']['kernel'] and for .dense.kernel.value
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    names = [name.removeprefix("params.").removesuffix(".value") for name in names]
    weights = {
        name: leaf
        for name, (_, leaf) in zip(names, leaves, strict=True)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }

    def call(weights, *arguments):
        values = [weights.get(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
        return apply(jax.tree_util.tree_unflatten(structure, values), *arguments)

    return call, weights


DOMAIN = "jaxonnx"
"""The domain of the functions of a model. The file defines all of them, so that no runtime has to
know the domain."""

SMALLEST_FUNCTION = 8
"""The fewest equations of a program that becomes a function."""


class Functions:
    """The functions of a model under construction: programs of `jit` that are called repeatedly.

    Attributes:
      protos: the functions that have been written.
    """

    def __init__(self, program: Any, opset: int):
        """Find the programs that `program` calls more than once."""
        self.whole, self.opset = program, opset
        self.protos: list[FunctionProto] = []
        counts: Counter[int] = Counter()
        self._programs: dict[int, Any] = {}
        for called in _calls(program, set()):
            counts[id(called)] += 1
            self._programs[id(called)] = called  # keep it alive, so that its id stays unique
        self._repeated = {key for key, count in counts.items() if count > 1}
        self._names: dict[int, str] = {}
        self._used: set[str] = set()

    def has(self, program: Any) -> bool:
        """Check whether a program becomes a function."""
        return id(program) in self._repeated

    def name(self, program: Any, like: str) -> str:
        """Return the name of a program's function, and write the function at the first call.

        Args:
          program: a program that is called more than once.
          like: the name of the Python function, from which the name is made.
        """
        if id(program) not in self._names:
            writer = Writer(like, set())
            g = Nodes(writer, self.opset)
            g.functions, g.whole = self, self.whole
            jaxpr = getattr(program, "jaxpr", program)
            tensors = []
            for aval in map(plain, (variable.aval for variable in jaxpr.invars)):
                tensors.append(Tensor(g.fresh("x"), aval.shape, aval.dtype))
            outputs = [g("Identity", x) for x in g.program(program, tensors)]
            # a function has no initializers: its constants are nodes
            constants = [
                helper.make_node("Constant", [], [x.name], value=x)
                for x in writer.graph.initializer
            ]
            name = unused_name(re.sub(r"\W", "_", like), self._used)  # "<lambda>" has no valid name
            opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(DOMAIN, 1)]
            nodes = [*constants, *writer.graph.node]
            self.protos.append(
                helper.make_function(DOMAIN, name, tensors, outputs, nodes, opset_imports=opsets)
            )
            self._names[id(program)] = name
        return self._names[id(program)]


def _calls(program: Any, visited: set[int]) -> Iterator[Any]:
    """Yield the program of each `jit` equation that can be a function.

    A program is yielded once for each equation that calls it; equations within a program count
    once, however often it is called.
    """
    jaxpr = getattr(program, "jaxpr", program)
    for equation in jaxpr.eqns:
        for inner in programs(equation.params):
            if equation.primitive.name in ("jit", "pjit") and _fits(inner):
                yield inner
            if id(inner) not in visited:
                visited.add(id(inner))
                yield from _calls(inner, visited)


def _fits(program: Any) -> bool:
    """Check whether a program can be a function: known sizes, real numbers, no captured arrays."""
    jaxpr = getattr(program, "jaxpr", program)
    values = [plain(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars)]
    return (
        len(jaxpr.eqns) >= SMALLEST_FUNCTION
        and all(all_known(v.shape) and not is_complex(v) for v in values)
        and not getattr(program, "consts", ())
    )


@primitive("jit", "pjit")
def jit(g, *operands, jaxpr, name, out):
    if all(isinstance(x, np.ndarray) for x in operands):
        return g.program(jaxpr, operands)
    return g.several(g.main.functions.name(jaxpr, name), len(out), *operands, domain=DOMAIN)
