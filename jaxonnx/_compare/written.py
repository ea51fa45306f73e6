"""Check a file that was written: the checker, a runtime, and the network that it was written from.

All functions that rewrite nodes end here: `jaxonnx.convert`, `jaxonnx.quantize`, `Model.then`, ...
The inputs are random, in the shapes that the network declares, and few; the figures are those of
`validate`.
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, helper

from jaxonnx._compare import (
    ROUNDS,
    Difference,
    NoKernel,
    Session,
    compare_arrays,
    compare_integers,
    has_onnxruntime,
    largest,
    saturates,
)
from jaxonnx._data.random_inputs import draw_inputs, find_sizes
from jaxonnx._graph.bind import bind
from jaxonnx._graph.values import Value, to_value
from jaxonnx._io.formats import read
from jaxonnx._io.protos import all_graphs, all_nodes, all_tensors, opset_of
from jaxonnx._limits import format_bytes
from jaxonnx._rewrite.network import Network
from jaxonnx._rewrite.opset import ELSEWHERE
from jaxonnx._run.program import Program
from jaxonnx.errors import Error, InputError, ModelError, warn
from jaxonnx.registry import lookup

_LARGEST = 1 << 28
"""Bytes of weights; a check of larger files would take as much memory again several times."""
QUANTIZED = 2e-2
"""The tolerance of outputs behind integers: ties that are rounded otherwise have consequences."""
_COARSE = 0.1
"""That of outputs from the same integers, before which onnxruntime may round factors of weights of
few bits to int8 (MatMulNBits)."""

_DRAWN = 2, 4
"""The batch size and the length of random inputs."""
_RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform")

_HALF = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
_REAL = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

_Write = Callable[[], ModelProto | None]
"""Write the file before a change, if there is one."""
Run = Callable[..., Sequence[Any]]
"""Evaluate a network on inputs by name, `run(feeds, names=())`: outputs, then values within."""


class Origin(NamedTuple):
    """The network that a file was written from."""

    inputs: Sequence[Value]
    run: Run
    proto: ModelProto | Callable[[], ModelProto] | None = None
    """Its own file, or a function that writes it, if it has one."""
    names: Collection[str] = ()
    """The values within."""
    size: int = 0
    """The fewest bytes of tensors that a file of it has, or takes as inputs, if known."""
    extends: bool = False
    """Whether `run` computes more than `proto`, whose own faults are excused all the same."""
    append: Callable[[Run], Run] | None = None
    """Makes an evaluation of the whole of one of `proto`, if the file continues that."""
    draw: Callable[[int], Mapping[str, Any]] | None = None
    """Draw inputs from a seed, if not by the declarations of `inputs`."""
    adapters: Mapping[str, Any] = {}
    """Inputs of the file alone, which have other defaults."""

    @property
    def file(self) -> ModelProto | None:
        return self.proto() if callable(self.proto) else self.proto


def check_written(
    what: str,
    written: ModelProto | Callable[[], ModelProto],
    origin: Origin | ModelProto,
    **options: bool,
) -> None:
    """Compare a file as `compare_written` does; warn if its results were not compared."""
    if reason := compare_written(what, written, origin, **options):
        warn_unproven(reason)


def compare_written(
    what: str,
    written: ModelProto | Callable[[], ModelProto],
    origin: Origin | ModelProto,
    *,
    rounded: bool = False,
    optimized: bool = True,
) -> str:
    """Compare a file with the network that it was written from.

    onnx's checker and onnxruntime, where it is installed, must accept it, and it must compute what
    the network computes, on random inputs. If onnxruntime runs both, both are its results; if it
    does not run the file (it lacks a kernel or the opset, say), or rounds what products with
    weights in few bits read, both are evaluated here.

    Args:
      what: the subject of an error, like "the converted file".
      written: the file, or a function that writes it.
      rounded: whether the file has integers for real numbers. Differences that rounding of ties
        explains are no faults then.
      optimized: as in `Session`; False for a file that is not for onnxruntime's processors.

    Returns:
      Why results were not compared; "" if they were.

    Raises:
      ModelError: the checker or onnxruntime refuses the file, and not the one that it was written
        from; or its results differ. The error names the first node that gives another value.
    """
    if isinstance(origin, ModelProto):
        names = {name for node in origin.graph.node for name in node.output}
        values = {value.name: to_value(value) for value in origin.graph.input}
        defaults = {tensor.name for tensor in origin.graph.initializer}
        inputs = [value for name, value in values.items() if name not in defaults]
        origin = Origin(inputs, _evaluate(origin), origin, names)
    reason = find_excess(origin.size)
    if not reason:
        written = written if isinstance(written, ModelProto) else written()
        reason = find_excess(count_bytes(written))
        if not reason and any(node.op_type in _RANDOM for node in all_nodes(written.graph)):
            reason = "it draws random numbers"
        reason = reason or _check(what, written, origin, rounded=rounded, optimized=optimized)
    return reason and (
        f"{what} was not compared with the network that it was written from: {reason}"
    )


def warn_unproven(reason: str) -> None:
    """Warn that a file was not compared."""
    hint = "jaxonnx.validate compares saved files on data, and check=False skips this check"
    warn(f"{reason}. {hint}")


def check_valid(what: str, proto: ModelProto, original: Callable[[], ModelProto]) -> None:
    """Check that onnx's checker and onnxruntime, where it is installed, accept a file.

    Args:
      what: as in `check_written`.
      original: makes the file before the change; a refusal of that one as well is no fault.

    Raises:
      ModelError: with the node that is refused.
    """
    if size := find_excess(count_bytes(proto)):
        warn(f"{what} was not checked: {size}; check=False skips the check")
        return
    _check_validity(what, proto, original)
    _open_session(what, proto, original)


def make_origin(
    network: Network, proto: ModelProto | Callable[[], ModelProto] | None = None
) -> Origin:
    """Return a model as the network that a file was written from."""

    def run(feeds: Mapping[str, Any], names: Sequence[str] = ()) -> Sequence[Any]:
        return _run(network.program, network.params, network.state, feeds, names)

    names = frozenset(network.graph.producers)
    size = sum(x.nbytes for x in network.tensors.values()) // 4  # written types are as narrow
    return Origin(network.inputs, run, proto, names, size)


def count_bytes(proto: ModelProto) -> int:
    """Count the bytes of a file's tensors."""
    return sum(len(tensor.raw_data) for tensor in all_tensors(proto.graph))


def find_excess(size: int) -> str:
    """Say why files of this size are not checked; "" if they are."""
    if size <= _LARGEST:
        return ""
    return f"it has {format_bytes(size)} of weights, which a check holds several times"


def _check(what: str, proto: ModelProto, origin: Origin, *, rounded: bool, optimized: bool) -> str:
    """Check a file; say why its results were not compared, if they were not."""
    # 1. choose what evaluates the file, and what the network: onnxruntime both where it can
    _check_validity(what, proto, lambda: origin.file)
    if _divides_integers(proto):
        session = "a division of integers by zero, in onnxruntime, would end the process"
    else:
        session = _open_session(what, proto, lambda: origin.file, optimized=optimized)
    if isinstance(session, str) and rounded:
        return session
    written = _evaluate(proto) if isinstance(session, str) else session
    original, tolerance = None, QUANTIZED if rounded else None
    if written is session and not (rounded or origin.extends) and (file := origin.file) is not None:
        # onnxruntime evaluates functions in the opset of the model, whatever they import
        alike = all(opset_of(function) == opset_of(file) for function in file.functions)
        original = _try_session(file) if alike else None
    if original is None and not rounded:
        nodes = [*all_nodes(proto.graph)]
        types = {tensor.data_type for tensor in all_tensors(proto.graph)}
        types |= {a.i for node in nodes for a in node.attribute if node.op_type == "Cast"}
        types |= {value.type.tensor_type.elem_type for value in proto.graph.input}
        if types & _HALF or any(node.op_type in ROUNDS for node in nodes):
            tolerance = QUANTIZED
        operators = [lookup(node.domain, node.op_type, sys.maxsize) for node in nodes]
        if any(op is not None and (op.quantized or op.dequantizes) for op in operators):
            written = _evaluate(proto)
    # 2. compare them on random inputs
    append = origin.append or (lambda run: run)
    origin = origin._replace(run=append(origin.run))
    expect = append(original) if original else origin.run
    draw = origin.draw or _make_draw(origin, proto)
    if origin.adapters:
        written = _bind_inputs(written, origin.adapters)
    difference, where = Difference(0, 0), ""
    feeds: Mapping[str, Any] = {}
    for seed in range(2):  # a difference of one draw may be a tie: the largest of two scores, say
        try:
            feeds = draw(seed)
            expected = expect(feeds)
        except Error as error:
            return f"random inputs do not fit it ({error})"
        try:
            results = written(feeds)
        except Error as error:
            raise ModelError(f"{what} does not run: {error}") from error
        pairs = zip(results, expected, strict=True)
        parts = [compare_arrays(a, b, tolerance) for a, b in pairs]
        difference = largest(parts)
        if difference.ok or (not rounded and _explain_by_rounding(parts, expect, feeds, expected)):
            return ""
        if rounded:
            try:
                integers = compare_integers(proto, feeds, _COARSE, optimized=optimized)
            except Error as error:
                return f"results differ by {difference}, and integers were not compared ({error})"
            if integers.gap <= 1 and integers.outputs.ok:
                return ""
            if saturates():
                return (
                    "onnxruntime's sums of int8 products saturate on this processor, and change "
                    f"the results ({difference}); reduce_range=True avoids it"
                )
            where = integers.first and f"; from {integers.first} on, integers differ by more than 1"
    # 3. name the first node that differs
    if not where:
        where = name_difference(proto.graph, origin.names, (written, expect), feeds, tolerance)
    raise ModelError(
        f"{what} computes something else than the network that it was written from: "
        f"{difference}{where}. check=False writes it without this check"
    )


def _explain_by_rounding(
    differences: Sequence[Difference], run: Run, feeds: Mapping[str, Any], expected: Sequence[Any]
) -> bool:
    """Check whether outputs differ by no more than they do if inputs change by their rounding."""
    random, shaken = np.random.default_rng(0), dict(feeds)
    for name, x in feeds.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            steps = 16 * float(jnp.finfo(x.dtype).eps) * random.choice([-1, 1], x.shape)
            shaken[name] = (x * (1 + steps)).astype(x.dtype)
    moved = [compare_arrays(a, b) for a, b in zip(run(shaken), expected, strict=True)]
    pairs = zip(differences, moved, strict=True)
    return all(part.ok or part.size <= 8 * change.size for part, change in pairs)


def _bind_inputs(run: Run, values: Mapping[str, Any]) -> Run:
    """Return an evaluation with the values of some inputs."""
    return lambda feeds, names=(): run({**feeds, **values}, names)


def _make_draw(origin: Origin, proto: ModelProto) -> Callable[[int], Mapping[str, Any]]:
    """Return a function that draws inputs of a file from a seed."""
    graph = bind(proto, proto.graph, {tensor.name for tensor in proto.graph.initializer})
    inputs, (batch, length) = origin.inputs, _DRAWN
    shapes = {tensor.name: tensor.dims for tensor in proto.graph.initializer}

    def draw(seed: int) -> dict[str, np.ndarray]:
        sizes = find_sizes(graph, inputs, origin.run, shapes, {})
        return draw_inputs(inputs, batch, sizes, length=length, graph=graph, seed=seed)

    return draw


def _check_validity(what: str, proto: ModelProto, original: _Write) -> None:
    """Let onnx's checker look at a file, unless it refuses the one before, too."""
    if text := find_fault(proto):
        if (file := original()) is not None and find_fault(file):
            return
        raise ModelError(f"{what} is not valid, says onnx's checker: {text}")


def find_fault(proto: ModelProto) -> str:
    """Say why onnx's checker refuses a file; "" if it accepts it."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    for node in all_nodes(copy.graph):  # onnxruntime has operators of its own in ONNX's domain
        if not node.domain and not onnx.defs.has(
            node.op_type, max_inclusive_version=opset_of(proto)
        ):
            node.domain = ELSEWHERE
    copy.opset_import.add(domain=ELSEWHERE, version=1)
    try:
        onnx.checker.check_model(copy)
    except onnx.checker.ValidationError as error:
        return " ".join(str(error).split())
    return ""


def _open_session(
    what: str, proto: ModelProto, original: _Write, *, optimized: bool = True
) -> Run | str:
    """Open a session of onnxruntime, or return why it failed, if by no fault of the file."""
    if not has_onnxruntime():
        return "onnxruntime, which would run it, is not installed"
    try:
        return run_session(proto, optimized=optimized)
    except NoKernel as error:
        return str(error)
    except InputError as error:
        opset = next((e.version for e in proto.opset_import if e.domain == ""), 1)
        is_new = not _knows(opset, proto.ir_version)
        file = original()
        if is_new or (file is not None and _try_session(file) is None):
            return str(error)
        raise ModelError(f"{what}: {error}") from error


def _divides_integers(proto: ModelProto) -> bool:
    """Check for divisors among integers that random inputs may make zero: the process would end."""
    tensors = {tensor.name for tensor in proto.graph.initializer}
    tensors |= {node.output[0] for node in proto.graph.node if node.op_type == "Constant"}
    nodes = [node for node in all_nodes(proto.graph) if node.op_type in ("Div", "Mod")]
    divisors = {node.input[1] for node in nodes} - tensors
    if not divisors:
        return False
    typed = onnx.shape_inference.infer_shapes(proto)
    values = [
        value
        for graph in all_graphs(typed.graph)
        for value in (*graph.input, *graph.value_info, *graph.output)
    ]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return any(types.get(name) not in _REAL for name in divisors)


def _try_session(proto: ModelProto) -> Run | None:
    try:
        return run_session(proto)
    except InputError:
        return None


def run_session(proto: ModelProto, *, optimized: bool = True) -> Run:
    """Return a session of onnxruntime, and of a second one for values within."""
    session = Session(proto.SerializeToString(), threads=1, optimized=optimized)
    inputs = {value.name for value in proto.graph.input}

    def run(feeds: Mapping[str, Any], names: Sequence[str] = ()) -> Sequence[Any]:
        feeds = {name: x for name, x in feeds.items() if name in inputs}
        if names:
            result = ModelProto()
            result.CopyFrom(proto)
            result.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
            return run_session(result, optimized=optimized)(feeds)
        return session.run(feeds)

    return run


@cache
def _knows(opset: int, ir_version: int) -> bool:
    """Check whether onnxruntime knows an opset, by a file of one node."""
    text = f'<ir_version: {ir_version}, opset_import: ["": {opset}]> g (float[1] x) => (float[1] y)'
    proto = onnx.parser.parse_model(text + " { y = Identity(x) }")
    return _try_session(proto) is not None


def _evaluate(proto: ModelProto) -> Run:
    """Evaluate a file as `jaxonnx.load` does."""

    @cache
    def read_program() -> Program:
        plain, tensors, _ = read(proto)
        return Program(bind(plain, plain.graph, tensors.keys()), tensors)

    def run(feeds: Mapping[str, Any], names: Sequence[str] = ()) -> Sequence[Any]:
        program = read_program()
        values = {name: x for name, x in feeds.items() if name in program.constants}
        return _run(program, {}, values, feeds, names)

    return run


def _run(
    program: Program,
    params: Mapping[str, Any],
    state: Mapping[str, Any],
    feeds: Mapping[str, Any],
    names: Sequence[str],
) -> Sequence[Any]:
    if names:
        base = program.base
        types = (*base.output_types, *(None for _ in names))
        base = replace(base, outputs=(*base.outputs, *names), output_types=types)
        program = replace(program, base=base)
    return program(params, state, None, feeds)


def name_difference(
    graph: GraphProto,
    names: Collection[str],
    runs: tuple[Run, Run],
    feeds: Mapping[str, Any],
    tolerance: float | None,
) -> str:
    """Name the first node of a graph that gives another value in one of two evaluations.

    Args:
      names: the values that both have.
      runs: of the graph, and of another network with the same outputs.
      tolerance: as in `compare_arrays`.
    """
    outputs = [value.name for value in graph.output]
    makers = {name: node for node in graph.node for name in node.output if name in names}
    within = [name for name in makers if name not in outputs]
    try:
        ours, theirs = (
            dict(zip([*outputs, *within], run(feeds, within), strict=True)) for run in runs
        )
    except Error:  # a value within may have a type that no output has
        return ""
    for name, node in makers.items():
        if not (difference := compare_arrays(ours[name], theirs[name], tolerance)).ok:
            node_name = f"{node.op_type} '{node.name}'"
            return f"; the first value that differs is '{name}', of {node_name}: {difference}"
    return ""
