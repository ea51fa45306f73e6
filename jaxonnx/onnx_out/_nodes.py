"""The graph under construction, as rules see it: operators on tensors that know their shapes."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import GraphProto, ValueInfoProto, defs, helper

from jaxonnx._file.build import Writer, onnx_type
from jaxonnx._jaxpr import called, interpret, programs
from jaxonnx.errors import UnsupportedError
from jaxonnx.onnx_out import _dims as dims
from jaxonnx.onnx_out._pairs import computed, is_complex, knows
from jaxonnx.onnx_out._table import Refusal, rule_of
from jaxonnx.onnx_out._tracing import named

FOLDED = 4096
"""Elements up to which a value that depends on no input is computed here, rather than by nodes."""

WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for wide, narrows in {
        np.int32: (np.bool_, np.int8, np.int16, np.uint8, np.uint16),
        np.int64: (np.uint32, np.uint64),
        np.float32: (jnp.bfloat16,),
    }.items()
    for narrow in narrows
}
"""The dtypes in which runtimes have arithmetic, for those in which they have none. ONNX's Cast
drops the higher bits of integers, so that sums and products are those of the narrow dtype."""

COMPUTED = {*map(np.dtype, ("float16", "float32", "float64", "int32", "int64")), *WIDE}
"""The dtypes of what nodes compute."""

MODULAR = {"Add", "Sub", "Mul"}
"""Operators whose result of wrapped integers is the wrapped result."""


def ordered(dtype: Any) -> np.dtype:
    """Return the dtype in which numbers have the same order, and runtimes more operators.

    No signed type holds all numbers of uint64, so that they stay as they are.
    """
    dtype = np.dtype(dtype)
    return dtype if dtype == np.uint64 else np.dtype(WIDE.get(dtype, dtype))


class Tensor(str):
    """The name of a tensor of the graph, which knows its shape and dtype.

    Attributes:
      thin: a tensor or array that broadcasts to this one, where there is one.
    """

    shape: tuple
    dtype: np.dtype
    thin: Any

    def __new__(cls, name: str, shape: Sequence, dtype: Any, thin: Any = None):
        """Return a name with a shape and dtype."""
        tensor = super().__new__(cls, name)
        tensor.shape, tensor.dtype, tensor.thin = tuple(shape), np.dtype(dtype), thin
        return tensor

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Nodes:
    """Appends nodes to a graph; calling it gives the name of a node's output.

    Operands are tensors, or NumPy arrays for what is known, which become initializers of the main
    graph. Attributes:
      opset: the version of ONNX's operators.
      main: the nodes of the outermost graph.
      functions: the programs that are functions of the model, None where it has no functions.
      whole: the program that becomes this graph.
    """

    functions: Any = None
    whole: Any = None

    def __init__(self, writer: Writer, opset: int, main: "Nodes | None" = None):
        self.writer, self.opset = writer, opset
        self.main = main or self
        if main is None:
            self.constants: dict[Any, tuple[str, Any]] = {}
            self.sizes: dict[str, Any] = {}
            self.numbers: dict[str, int] = {}

    def __call__(self, operator: str, *operands: Any, **attributes: Any) -> str:
        """Append a node with one output; return its name."""
        return self.several(operator, 1, *operands, **attributes)[0]

    def several(self, operator: str, count: int, *operands: Any, **attributes: Any) -> list[str]:
        """Append a node with `count` outputs; return their names."""
        if "domain" not in attributes and (oldest := _since(operator)) > self.opset:
            raise Refusal(f"it needs {operator}, which ONNX has from opset {oldest} on")
        outputs = [self.fresh(operator.lower()) for _ in range(count)]
        self.writer.nodes(operator, map(self.name, operands), outputs, **attributes)
        return outputs

    def fresh(self, name: str) -> str:
        """Return an unused name like `name`."""
        numbers = self.main.numbers
        number = numbers[name] = numbers.get(name, 0) + 1
        return self.writer.fresh(name if number == 1 else f"{name}_{number}")

    def name(self, value: Any) -> str:
        """Return the name of a tensor; an array becomes an initializer, None is left out."""
        if value is None or isinstance(value, str):
            return value or ""
        array = np.asarray(value)
        small = array.size <= FOLDED
        key = (array.dtype, array.shape, array.tobytes()) if small else id(array)
        constants = self.main.constants
        if key not in constants:
            name = self.main.writer.constant("constant", array, array.dtype)
            constants[key] = name, array  # which is kept, so that no other one has its id
        return constants[key][0]

    def child(self, name: str) -> "Nodes":
        """Return the nodes of a new graph within this one, which sees all tensors of this one."""
        return Nodes(Writer(self.fresh(name), self.writer.used), self.opset, self.main)

    @property
    def graph(self) -> GraphProto:
        return self.writer.graph

    # -- programs --

    def run(self, function: Callable, *operands: Any) -> list:
        """Append what a function of arrays computes of these operands; return its results."""
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        return self.program(jax.make_jaxpr(function)(*like), operands)

    def program(self, program: Any, operands: Sequence[Any]) -> list:
        """Append what a jaxpr computes; return its results."""
        return interpret(
            program, self._equation, list(operands), constant=_known, enter=self._entered
        )

    def _entered(self, equation: Any) -> Any:
        """Return the program to write in place of an equation, None for one with a rule."""
        program, functions = called(equation), self.main.functions
        return None if functions and functions.has(program) else program

    def _equation(self, equation: Any, operands: list) -> list:
        outs = tuple(plain(variable.aval) for variable in equation.outvars)
        if (folded := _folded(equation, operands, outs)) is not None:
            return folded
        name = equation.primitive.name
        rule = rule_of(name, self.opset)
        if rule is None and not knows(name):
            raise UnsupportedError(
                f"{named(self.main.whole, equation)} has no form in ONNX (opset {self.opset}); "
                "compute it outside of the function, or register a rule with "
                "jaxonnx.onnx_out.primitive"
            )
        try:
            if any(map(is_complex, (*operands, *outs))):
                return computed(self, equation, operands, outs)
            return self._applied(rule, equation, operands, outs)
        except Refusal as refusal:
            raise UnsupportedError(f"{named(self.main.whole, equation)}: {refusal}") from None

    def _applied(self, rule: Any, equation: Any, operands: list, outs: tuple) -> list:
        """Append what a rule says of an equation; return its results."""
        if strange := next((out.dtype for out in outs if out.dtype not in COMPUTED), None):
            raise Refusal(f"it computes with {strange}, in which ONNX has no arithmetic")
        several = equation.primitive.multiple_results
        avals = [variable.aval for variable in equation.invars]
        params = {"avals": avals, "equation": equation, **equation.params}
        results = rule(self, *operands, out=outs if several else outs[0], **params)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        return [self.typed(x, out) for x, out in zip(results, outs, strict=True)]

    def typed(self, value: Any, out: Any) -> Any:
        """Return a result with the shape and dtype that JAX gives it."""
        if isinstance(value, str):
            return Tensor(value, out.shape, out.dtype, getattr(value, "thin", None))
        return value

    # -- what many rules need --

    def cast(self, x: Any, dtype: Any) -> Any:
        """Return x in another dtype; x itself if it has that already."""
        dtype = np.dtype(dtype)
        if getattr(x, "dtype", None) == dtype:
            return x
        if isinstance(x, np.ndarray):
            return x.astype(dtype)
        return self._with("Cast", x, dtype=dtype, to=onnx_type(dtype))

    def wide(self, operator: str, *operands: Any, dtype: Any, **attributes: Any) -> Any:
        """Append an operator in a dtype in which runtimes have it; return its result in `dtype`."""
        wide = ordered(dtype) if operator not in MODULAR else WIDE.get(np.dtype(dtype))
        if wide in (None, dtype):
            return self(operator, *operands, **attributes)
        result = self(operator, *(self.cast(x, wide) for x in operands), **attributes)
        return self.cast(Tensor(result, (), wide), dtype)

    def reshape(self, x: Any, shape: Sequence) -> Any:
        """Return x in another shape of as many elements."""
        shape = tuple(shape)
        if isinstance(x, np.ndarray) and dims.known(shape):
            return x.reshape(shape)
        if getattr(x, "shape", None) == shape:
            return x
        symbolic = [i for i, size in enumerate(shape) if not dims.known([size])]
        if len(symbolic) == 1 and 0 not in shape:
            sizes = np.array([-1 if i in symbolic else n for i, n in enumerate(shape)], np.int64)
        else:
            sizes = self.sizes_of(shape)
        empty = self.opset >= 14 and any(isinstance(n, int) and n == 0 for n in shape)
        zero = {"allowzero": 1} if empty else {}
        return self._with("Reshape", x, sizes, shape=shape, **zero)

    def transpose(self, x: Any, order: Iterable[int]) -> Any:
        """Return x with its axes in another order."""
        order = [int(i) for i in order]
        if order == list(range(len(order))):
            return x
        if isinstance(x, np.ndarray):
            return x.transpose(order)
        shape = tuple(x.shape[i] for i in order)
        return self._with("Transpose", x, shape=shape, perm=order)

    def slice(self, x: Any, starts, stops, steps) -> Any:
        """Return x[start:stop:step] along all axes; ends may be symbolic where the step is one."""
        axes = [
            i
            for i, cut in enumerate(zip(starts, stops, steps, strict=True))
            if not dims.same(cut, (0, x.shape[i], 1))
        ]
        if not axes:
            return x
        shape = list(x.shape)
        for i in axes:
            shape[i] = (stops[i] - starts[i] + steps[i] - 1) // steps[i]
        parts = [self.sizes_of([cut[i] for i in axes]) for cut in (starts, stops)]
        operands = *parts, np.array(axes, np.int64), np.array([steps[i] for i in axes], np.int64)
        return self._with("Slice", x, *operands, shape=shape)

    def sizes_of(self, shape: Sequence) -> Any:
        """Return sizes as an array of int64, or the name of one where they depend on inputs."""
        return dims.sizes(self.main, shape)

    def reduce(self, operator: str, x: Any, axes: Sequence[int], keepdims: int = 0) -> str:
        """Append a reduction; its axes were an attribute until opset 18 (13 for ReduceSum)."""
        axes = [int(a) for a in axes]
        if self.opset >= (13 if operator == "ReduceSum" else 18):
            return self(operator, x, np.array(axes, np.int64), keepdims=keepdims)
        return self(operator, x, axes=axes, keepdims=keepdims)

    def _with(
        self, operator: str, x: Any, *operands, shape=None, dtype=None, **attributes
    ) -> Tensor:
        """Append a node on x; its result has x's shape and dtype but for those that are said."""
        shape = getattr(x, "shape", ()) if shape is None else shape
        dtype = dtype or getattr(x, "dtype", np.float32)
        return Tensor(self(operator, x, *operands, **attributes), shape, dtype)


@cache
def _since(operator: str) -> int:
    """Return the opset that brought an operator."""
    return min(
        schema.since_version
        for schema in _schemas()
        if schema.name == operator and schema.domain == ""
    )


@cache
def _schemas() -> Sequence[Any]:
    return defs.get_all_schemas_with_history()


def plain(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array; a key is the integers that it consists of."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return jax.ShapeDtypeStruct(key.shape, key.dtype)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def value_info(name: str, like: Any) -> ValueInfoProto:
    """Return the declaration of a tensor, symbolic sizes by their names."""
    sizes = [n if dims.known([n]) else str(n) for n in like.shape]
    return helper.make_tensor_value_info(name, onnx_type(like.dtype), sizes)


def _known(value: Any, aval: Any) -> np.ndarray:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value, aval.dtype)


def _folded(equation: Any, operands: list, outs: tuple) -> list | None:
    """Return the results of an equation of known operands, None where nodes must compute them."""
    if not operands or equation.effects or not all(isinstance(x, np.ndarray) for x in operands):
        return None
    if not all(dims.known(out.shape) and prod(out.shape) <= FOLDED for out in outs):
        return None
    atoms = (*equation.invars, *equation.outvars)
    keys = any(jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key) for atom in atoms)
    if keys or programs(equation.params) or equation.primitive.name.startswith("random_"):
        return None
    with jax.ensure_compile_time_eval():
        results = equation.primitive.bind(*operands, **equation.params)
    results = results if equation.primitive.multiple_results else [results]
    return [np.asarray(result) for result in results]
