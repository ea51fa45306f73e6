"""The training that a file carries (`ModelProto.training_info`) as pure functions.

ONNX describes a training model as a stateful object with three methods (IR.md, "Model Semantics"
and "Training Related Information"); here the state goes in and comes out instead. The state holds
the state variables, that is the initializers named by the keys of the bindings, and nothing else.

A training step evaluates one combined graph, the inference graph followed by the algorithm, in
one scope: an algorithm reads inference tensors by name, and Gradient differentiates through them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import GraphProto, ModelProto, StringStringEntryProto, TensorProto, helper, numpy_helper

from jaxonnx._graph.bind import Graph, bind
from jaxonnx._graph.roles import HOST_ONLY
from jaxonnx._graph.values import data, fit, to_value
from jaxonnx._io.protos import subgraphs, tensor_of_constant
from jaxonnx._io.tensors import to_array
from jaxonnx._require import check_arguments, name_type
from jaxonnx._run.failures import convert_errors
from jaxonnx._run.folding import FOLD_LIMIT
from jaxonnx._run.scope import Context, run
from jaxonnx.errors import InputError, ModelError, warn
from jaxonnx.lowering import jit

State = dict[str, jax.Array]


@dataclass(frozen=True)
class _Method:
    """A graph, and the state variables (keys) that its outputs (values) are assigned to."""

    graph: Graph
    bindings: Mapping[str, str]


class Training:
    """The methods of a model that carries its own training: init, step and inference.

    All are pure and compiled; state, batch and outputs are dicts by tensor name. Operators do what
    the file says: Dropout drops if its `training_mode` input is true, and so on.

    >>> import jaxonnx
    >>> from jaxonnx import demo
    >>> loss = "softmax_cross_entropy_with_integer_labels"
    >>> file = jaxonnx.add_training(demo.model(), loss=loss, optimizer=jaxonnx.optim.adam(1e-3))
    >>> training = jaxonnx.load(file).training
    >>> batch = {"x": np.ones((4, 1, 8, 8), np.float32), "target": np.arange(4)}
    >>> state, outputs = training.step(training.state, batch)
    >>> proto = training.to_onnx(state)  # training continues from there

    Attributes:
      variables: the names of the state variables.
      inputs: for each algorithm, the names of the values that a batch must hold.
      outputs: for each algorithm, the names of the results of `step`.
      metrics: the outputs of the algorithms that are bound to no variable, such as a loss.
    """

    def __init__(self, proto: ModelProto, tensors: Mapping[str, Any]):
        """Bind the graphs.

        Args:
          proto: a model with training_info; the named tensors of its main graph may lack data.
          tensors: the values of the main graph's named tensors, by name.

        Raises:
          ModelError: there is no training_info, or it breaks a rule of the specification.
          UnsupportedError: naming every operator that has no implementation.
        """
        if not proto.training_info:
            raise ModelError(
                "the model carries no training_info; jaxonnx.add_training writes one, and "
                "jaxonnx.train trains without"
            )
        self._proto = proto
        self._stored = stored = {
            name: tensors[name] for name, _ in _tensors(proto.graph) if name in tensors
        }
        self._initial = _variables(proto, stored)
        external = stored.keys() | self._initial.keys()
        self._initializations = [
            _Method(bind(proto, info.initialization, ()), _bindings(info.initialization_binding))
            for info in proto.training_info
        ]
        self._algorithms = [
            _Method(
                bind(proto, _combine_graphs(proto.graph, info.algorithm), external),
                _bindings(info.update_binding),
            )
            for info in proto.training_info
        ]
        self._inference = bind(proto, proto.graph, external)
        self.variables: tuple[str, ...] = tuple(self._initial)
        self.inputs: tuple[tuple[str, ...], ...] = tuple(
            method.graph.inputs for method in self._algorithms
        )
        self.outputs: tuple[tuple[str, ...], ...] = tuple(
            method.graph.outputs for method in self._algorithms
        )
        bound = {name for method in self._algorithms for name in method.bindings.values()}
        listed = [value for info in proto.training_info for value in info.algorithm.output]
        names = dict.fromkeys(v.name for v in listed if v.name not in bound)
        self.metrics: tuple[str, ...] = tuple(names)
        algorithms = (info.algorithm for info in proto.training_info)
        inputs = (value for graph in (proto.graph, *algorithms) for value in graph.input)
        self._declared = {value.name: to_value(value) for value in inputs}
        # large constants are arguments of the compiled functions; small ones are known, and fold
        constants = {name: value for name, value in stored.items() if name not in self._initial}
        self._known = {
            n: v for n, v in constants.items() if v.nbytes <= FOLD_LIMIT or v.dtype in HOST_ONLY
        }
        self._large = {n: jnp.asarray(v) for n, v in constants.items() if n not in self._known}
        onednn = self._inference.is_convolutional
        self._jitted_init = jit(self._init)
        self._jitted_step = jit(self._step, onednn=onednn, static_argnames="algorithm")
        self._jitted_inference = jit(self._infer, onednn=onednn)

    @property
    def state(self) -> State:
        """The state variables as the file has them: a saved run continues from here."""
        return {name: jnp.asarray(value) for name, value in self._initial.items()}

    def init(self, key: jax.Array) -> State:
        """Return the state as if no training had happened.

        All variables get the values of their initializers; then every initialization graph is
        evaluated in order, its random operators with `key`, and its outputs are assigned.

        Raises:
          NodeError, LimitError: as in `step`.
        """
        check_arguments(Training.init, locals())
        with convert_errors("the compiled initialization", self._initial):
            return self._jitted_init(self.state, key)

    def step(
        self,
        state: State,
        batch: Mapping[str, Any],
        *,
        key: jax.Array | None = None,
        algorithm: int | None = None,
    ) -> tuple[State, dict[str, jax.Array]]:
        """Run one training iteration: every algorithm in order, each on the state after the last.

        Args:
          state: the values of the state variables.
          batch: the values of the inputs, those of the model and those of the algorithms.
          key: for random operators. Without it every step draws the same numbers (from
            `jax.random.key(0)`), as a file can hold no random state.
          algorithm: run only this one (an index into training_info); callers that interleave
            algorithms in an order of their own need it.

        Returns:
          The new state, and the outputs of the inference graph and of the algorithms by name; for
          a name of several algorithms, the last value.

        Raises:
          InputError: state or batch lacks a name or has an unknown one, or a value of the batch
            does not have the declared type and shape.
          ModelError: an output does not have the shape and type of the variable it is bound to.
          NodeError: JAX or XLA does not compile or run the step.
          LimitError: memory is not enough for it.
        """
        check_arguments(Training.step, locals())
        count = len(self._algorithms)
        if algorithm is not None and not 0 <= algorithm < count:
            raise InputError(f"algorithm is {algorithm}; the model has {count}, counted from 0")
        names = self.inputs if algorithm is None else self.inputs[algorithm : algorithm + 1]
        _check_names("state", state, self.variables)
        _check_names("batch", batch, {name: None for inputs in names for name in inputs})
        key = jax.random.key(0) if key is None else key
        arguments = dict(state), self._fit(batch), key, self._large
        with convert_errors("the compiled step", state, batch):
            return self._jitted_step(*arguments, algorithm=algorithm)

    def inference(
        self, state: State, inputs: Mapping[str, Any], *, key: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        """Return the outputs of the inference graph with the current values of the variables.

        Raises:
          InputError, NodeError, LimitError: as in `step`.
        """
        check_arguments(Training.inference, locals())
        _check_names("state", state, self.variables)
        _check_names("inputs", inputs, self._inference.inputs)
        key = jax.random.key(0) if key is None else key
        arguments = dict(state), self._fit(inputs), key, self._large
        with convert_errors("the compiled inference graph", state, inputs):
            return self._jitted_inference(*arguments)

    def to_onnx(self, state: State) -> ModelProto:
        """Return the file with the values of `state` as its initializers.

        Its inference graph uses the trained weights, and training continues where it stopped: a
        model loaded from it has exactly this `state`.
        """
        _check_names("state", state, self.variables)
        proto = ModelProto()
        proto.CopyFrom(self._proto)
        sparse = {entry.values.name for entry in proto.graph.sparse_initializer}
        values = self._stored | state
        for name, tensor in _tensors(proto.graph):
            if name in values and name not in sparse:
                _write(tensor, values[name])
        for info in proto.training_info:
            for tensor in info.algorithm.initializer:
                if tensor.name in state:
                    _write(tensor, state[tensor.name])
        return proto

    def _fit(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Check values against the declared types and shapes of their inputs, and convert them."""
        # symbolic dimensions must agree between inputs: `sizes` collects them
        sizes: dict[str, tuple[int, str]] = {}
        return data({n: fit(self._declared[n], value, sizes) for n, value in values.items()})

    def _init(self, state: State, key: jax.Array) -> State:
        """Evaluate all initialization graphs, each on its own, and assign their outputs."""
        for i, method in enumerate(self._initializations):
            context = Context(key=jax.random.fold_in(key, i))
            outputs = dict(zip(method.graph.outputs, run(method.graph, {}, context), strict=True))
            state = _assign(state, method.bindings, outputs)
        return state

    def _step(self, state: State, batch, key, large, *, algorithm):
        """Run the algorithms in order; each reads the state that the one before it assigned."""
        chosen = range(len(self._algorithms)) if algorithm is None else [algorithm]
        outputs: dict[str, Any] = {}
        for i in chosen:
            method = self._algorithms[i]
            tensors = self._known | large | state
            context = Context(tensors, jax.random.fold_in(key, i), note=lambda _, text: warn(text))
            inputs = {name: batch[name] for name in method.graph.inputs}
            results = run(method.graph, inputs, context)
            outputs |= zip(method.graph.outputs, results, strict=True)
            state = _assign(state, method.bindings, outputs)
        return state, outputs

    def _infer(self, state: State, inputs, key, large):
        context = Context(self._known | large | state, key, note=lambda _, text: warn(text))
        results = run(self._inference, inputs, context)
        return dict(zip(self._inference.outputs, results, strict=True))


def _variables(proto: ModelProto, stored: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Check all bindings, and return the state variables with their values in the file.

    A variable is an initializer of the main graph or of an algorithm that is the key of a binding.
    Graphs share it by name (IR.md: "mutable variables shared by multiple graphs"), constants of an
    algorithm are its own.

    Raises:
      ModelError: a binding breaks a rule of the specification, or values contradict each other.
    """
    main = {tensor.name for tensor in proto.graph.initializer}
    local = [{t.name: t for t in info.algorithm.initializer} for info in proto.training_info]
    keys: dict[str, None] = {}
    for i, info in enumerate(proto.training_info):
        initialization = [value.name for value in info.initialization.output]
        algorithm = [value.name for value in (*proto.graph.output, *info.algorithm.output)]
        variables = main | local[i].keys()
        where = f"training_info[{i}]"
        if info.initialization.input:
            raise ModelError(f"{where}: the initialization graph has inputs; it must have none")
        _check_bindings(
            f"{where}.initialization_binding",
            info.initialization_binding,
            variables,
            initialization,
        )
        _check_bindings(f"{where}.update_binding", info.update_binding, variables, algorithm)
        for entry in (*info.initialization_binding, *info.update_binding):
            keys[entry.key] = None
        both = main & local[i].keys()
        if both:
            raise ModelError(
                f"{where}: initializers {sorted(both)} of the algorithm are initializers of the "
                "main graph too; the combined graph must define each name once"
            )
    result = {}
    for name in keys:
        values = [stored[name]] if name in main else []
        values += [to_array(tensors[name]) for tensors in local if name in tensors]
        if any(not np.array_equal(value, values[0]) for value in values):
            raise ModelError(
                f"the algorithms give the variable '{name}' different values; they share it by its "
                "name, rename one"
            )
        if values[0].dtype in HOST_ONLY:
            kind = "strings" if values[0].dtype == object else values[0].dtype
            raise ModelError(f"the variable '{name}' holds {kind}, which no step can change")
        result[name] = values[0]
    return result


def _check_bindings(
    field: str,
    entries: Iterable[StringStringEntryProto],
    variables: Collection[str],
    outputs: Collection[str],
) -> None:
    """Raise `ModelError` unless keys are distinct variables and values are outputs of the graph."""
    assigned = set()
    for entry in entries:
        if entry.key in assigned:
            raise ModelError(f"{field} assigns '{entry.key}' twice; its keys must be unique")
        if entry.key not in variables:
            raise ModelError(
                f"{field} assigns '{entry.key}', which is not an initializer of the main graph or "
                "of the algorithm"
            )
        if entry.value not in outputs:
            raise ModelError(
                f"{field} assigns '{entry.value}' to '{entry.key}', which is not an output "
                "of the graph"
            )
        assigned.add(entry.key)


def _bindings(entries: Iterable[StringStringEntryProto]) -> dict[str, str]:
    return {entry.key: entry.value for entry in entries}


def _combine_graphs(main: GraphProto, algorithm: GraphProto) -> GraphProto:
    """Return the inference graph followed by the algorithm (onnx.proto, "algorithm")."""
    graph = GraphProto()
    graph.CopyFrom(main)
    graph.MergeFrom(algorithm)  # concatenates every list
    graph.name = f"{main.name}+{algorithm.name}"
    inputs = [value.name for value in graph.input]
    twice = {name for name in inputs if inputs.count(name) > 1}
    if twice:
        raise ModelError(
            f"the algorithm declares the inputs {sorted(twice)} of the main graph again; the "
            "combined graph has them already, leave them out"
        )
    return graph


def _tensors(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Yield the named tensors that a graph and its subgraphs store, in initializers or Constants.

    The result of an Identity is not one: it is computed from the variable that it reads.
    """
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    yield from ((sparse.values.name, sparse.values) for sparse in graph.sparse_initializer)
    for node in graph.node:
        constant = tensor_of_constant(node)
        if constant is not None:
            yield node.output[0], constant
        for inner in subgraphs(node):
            yield from _tensors(inner)


def _write(tensor: TensorProto, value: Any) -> None:
    """Replace the data of a tensor in place; its name, type and doc string stay."""
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    written = numpy_helper.from_array(np.asarray(value).astype(dtype, copy=False), tensor.name)
    written.doc_string = tensor.doc_string
    tensor.CopyFrom(written)


def _assign(state: State, bindings: Mapping[str, str], outputs: Mapping[str, Any]) -> State:
    """Return a state in which each bound variable has the value of its output.

    Raises:
      ModelError: an output has another shape or type than its variable.
    """
    new = dict(state)
    for name, output in bindings.items():
        old, value = state[name], outputs[output]
        if not hasattr(value, "dtype"):
            raise ModelError(f"'{output}' is bound to the tensor '{name}', and is not a tensor")
        if value.shape != old.shape or jax.dtypes.canonicalize_dtype(value.dtype) != old.dtype:
            raise ModelError(
                f"'{output}' ({value.dtype}{list(value.shape)}) is bound to '{name}' "
                f"({old.dtype}{list(old.shape)}); shapes and types must agree"
            )
        new[name] = value
    return new


def _check_names(what: str, values: Mapping[str, Any], expected: Iterable[str]) -> None:
    """Raise `InputError` unless values have exactly the expected names."""
    if not isinstance(values, Mapping):
        raise InputError(f"{what} must be a dict by tensor name, got {name_type(values)}")
    expected = set(expected)
    missing, unknown = sorted(expected - values.keys()), sorted(values.keys() - expected)
    if missing or unknown:
        raise InputError(
            f"{what} has the names {sorted(values)}; "
            + "; ".join(f"{w} {n}" for w, n in (("missing", missing), ("unknown", unknown)) if n)
        )
