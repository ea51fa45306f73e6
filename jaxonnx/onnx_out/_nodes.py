"""The graph under construction, as rules see it: operators on tensors that know their shapes."""

import ast
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import InconclusiveDimensionOperation
from onnx import GraphProto, ModelProto, ValueInfoProto, defs, helper

from jaxonnx._io.protos import Writer, all_nodes, onnx_type
from jaxonnx._jaxpr import inner_program, interpret, source
from jaxonnx.errors import UnsupportedError
from jaxonnx.onnx_out._rule_table import (
    Refusal,
    apply_complex,
    has_complex_rule,
    is_complex,
    is_elementwise,
    restated_as,
    rule_of,
)
from jaxonnx.onnx_out._simplify import Bounds, reduce_sum
from jaxonnx.onnx_out._tensors import (
    COMPUTED,
    FOLDED,
    MODULAR,
    WIDE,
    Tensor,
    all_known,
    fold_equation,
    known_tensor,
    order_of,
    ordered_dtype,
    plain,
    same_sizes,
)
from jaxonnx.onnx_out._tracing import describe_equation, explain_inconclusive

OLDEST = 13
"""The oldest opset that is written; bitwise operators and some scatters need a newer one."""
_SIZE_OPERATORS = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul"}
_SIZE_FUNCTIONS = {"mod": "Mod", "max": "Max", "min": "Min"}
"""The nodes of expressions of symbolic sizes."""
SCATTERED = {"add": 16, "mul": 16, "min": 18, "max": 18}
"""The opsets that brought reductions of ScatterElements and ScatterND."""


def digest(array: np.ndarray) -> tuple[Any, ...]:
    """Compute a key that arrays share if they are equal but for axes of size 1."""
    shape = tuple(size for size in array.shape if size > 1)
    return array.dtype, shape, hashlib.sha256(array.tobytes()).digest()


class Nodes:
    """A builder of one graph: `g("Add", x, y)` appends a node and returns the name of its output.

    Operands are `Tensor`s, or NumPy arrays for known values, which become initializers of the main
    graph. Subgraphs have a builder of their own (`child`).

    Attributes:
      writer: the graph and its names.
      opset: the version of ONNX's operators.
      main: the builder of the outermost graph.
      functions: the programs that become functions of the model; None if it has none.
      gates: whether gradients of Relu and Clip are products with masks, which keep NaNs.
      factors: whether factors may be merged and moved out of sums.
      whole: the jaxpr that becomes the model, to describe errors.
      pools: (maxima, places) of each MaxPool, by images and windows: its rule and that of its
        gradient share one node.
      products: the result of each matrix product, by its operands.
      constants: of the main builder: (name, array) of each initializer, by value or identity.
      labels: names for initializers, by the `digest` of their values.
      sizes: of the main builder, by each variable of symbolic sizes: (input, axis, factor), or the
        name of the tensor that has it; the latter also by expression.
      bounds: of the main builder: comparisons with numbers, see `Bounds`.
      numbers: of the main builder: how often each base of a name was used.
    """

    functions: Any = None
    gates: bool = False
    factors: bool = False
    whole: Any = None

    def __init__(self, writer: Writer, opset: int, main: "Nodes | None" = None):
        self.writer: Writer = writer
        self.opset: int = opset
        self.main: Nodes = main or self
        self.pools: dict[Any, tuple[Tensor, Tensor]] = {}
        self.products: dict[Any, Tensor] = {}
        if main is None:
            self.constants: dict[Any, tuple[str, Any]] = {}
            self.labels: Mapping[Any, str] = {}
            self.sizes: dict[str, Any] = {}
            self.bounds: Bounds = Bounds()
            self.numbers: dict[str, int] = {}

    def __call__(self, operator: str, *operands: Any, **attributes: Any) -> str:
        """Append a node with one output; return its name."""
        return self.several(operator, 1, *operands, **attributes)[0]

    def several(self, operator: str, count: int, *operands: Any, **attributes: Any) -> list[str]:
        """Append a node with `count` outputs; return their names."""
        if "domain" not in attributes and (oldest := _first_opsets()[operator]) > self.opset:
            raise Refusal(
                f"it needs {operator}, which ONNX has from opset {oldest} on: pass opset={oldest}"
            )
        outputs = [self.fresh(operator.lower()) for _ in range(count)]
        self.writer.nodes(operator, map(self.name, operands), outputs, **attributes)
        return outputs

    def fresh(self, name: str) -> str:
        """Return an unused name like `name`."""
        numbers = self.main.numbers
        number = numbers[name] = numbers.get(name, 0) + 1
        return self.writer.fresh(name if number == 1 else f"{name}_{number}")

    def name(self, value: Any) -> str:
        """Return the name of an operand: an array becomes an initializer, None an omitted input."""
        if value is None or isinstance(value, str):
            return value or ""
        array = np.asarray(value)
        # equal small arrays share an initializer; large ones only if they are the same object
        small = array.size <= FOLDED
        key = (array.dtype, array.shape, array.tobytes()) if small else id(array)
        constants = self.main.constants
        if key not in constants:
            labels = self.main.labels
            label = labels.get(digest(array), "constant") if labels else "constant"
            name = self.main.writer.constant(label, array, array.dtype)
            constants[key] = name, array  # keep it alive, so that its id stays unique
        return constants[key][0]

    def child(self, name: str) -> "Nodes":
        """Return a builder for a subgraph, which can read all tensors of this graph."""
        return Nodes(Writer(self.fresh(name), self.writer.used), self.opset, self.main)

    @property
    def graph(self) -> GraphProto:
        return self.writer.graph

    # -- programs --

    def run(self, function: Callable[..., Any], *operands: Any) -> list[Any]:
        """Trace a JAX function of arrays and append its nodes; return its results."""
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        return self.program(jax.make_jaxpr(function)(*like), operands)

    def program(self, program: Any, operands: Sequence[Any], rule: Any = None) -> list[Any]:
        """Append the nodes of a jaxpr, by a rule for its equations; return its results."""
        return interpret(
            program,
            rule or self._equation,
            list(operands),
            constant=known_tensor,
            enter=self._inline_program,
        )

    def _inline_program(self, equation: Any) -> Any:
        """Return the program to write in place of a call; None for an equation with a rule."""
        if hasattr(equation.primitive, "plain") and rule_of(equation.primitive.name, self.opset):
            return None
        program, functions = inner_program(equation), self.main.functions
        if program is not None and (other := restated_as(source(program))) is not None:
            avals = [variable.aval for variable in equation.invars]
            return jax.make_jaxpr(other)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        return None if functions and functions.has(program) else program

    def _equation(self, equation: Any, operands: list) -> list:
        """Return the results of an equation, folded or as nodes.

        Raises:
          UnsupportedError: the primitive has no rule, or its rule refuses.
        """
        outs = tuple(plain(variable.aval) for variable in equation.outvars)
        if (values := fold_equation(equation, operands, outs)) is not None:
            return values
        name = equation.primitive.name
        rule = rule_of(name, self.opset)
        if rule is None and not has_complex_rule(name):
            described = describe_equation(self.main.whole, equation)
            raise UnsupportedError(
                f"{described} has no form in ONNX (opset {self.opset}); "
                "compute it outside of the function, or register a rule with "
                "jaxonnx.onnx_out.primitive"
            )
        try:
            if any(map(is_complex, (*operands, *outs))):
                return apply_complex(self, equation, operands, outs)
            return self._apply_rule(rule, equation, operands, outs)
        except Refusal as refusal:
            raise UnsupportedError(
                f"{describe_equation(self.main.whole, equation)}: {refusal}"
            ) from None
        except InconclusiveDimensionOperation as error:
            described = describe_equation(self.main.whole, equation)
            raise UnsupportedError(f"{described} {explain_inconclusive(error)}") from error

    def _apply_rule(self, rule: Any, equation: Any, operands: list, outs: tuple) -> list:
        """Append the nodes of an equation by its rule; return its results.

        An elementwise rule is applied to operands in the order of axes in which they are stored,
        so that a chain of them transposes once at its end, or not at all.
        """
        if strange := next((out.dtype for out in outs if out.dtype not in COMPUTED), None):
            raise Refusal(f"it computes with {strange}, in which ONNX has no arithmetic")
        several = equation.primitive.multiple_results
        order = None
        if not several and is_elementwise(equation.primitive.name):
            order = order_of(operands, outs[0])
        if order is not None:
            operands = [self._transpose_operand(x, order) for x in operands]
            outs = (jax.ShapeDtypeStruct([outs[0].shape[i] for i in order], outs[0].dtype),)
        avals = [variable.aval for variable in equation.invars]
        params = {"avals": avals, "equation": equation, **equation.params}
        params["out"] = outs if several else outs[0]
        results = rule(self, *operands, **params)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        results = [self.cast_result(x, out) for x, out in zip(results, outs, strict=True)]
        return results if order is None else [self.transpose(results[0], np.argsort(order))]

    def _transpose_operand(self, x: Any, order: Sequence[int]) -> Any:
        """Transpose an operand together with the tensor that it was broadcast from."""
        if not x.shape:
            return x
        y = self.transpose(x, order)
        if getattr(x, "thin", None) is not None and x.thin.ndim == x.ndim:
            y = Tensor(y, y.shape, y.dtype, thin=self.transpose(x.thin, order))
        return y

    def cast_result(self, value: Any, out: Any) -> Any:
        """Give the result of a rule the shape and dtype of the jaxpr; arrays stay as they are."""
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
        """Append an operator in a dtype for which runtimes have it, between casts if need be.

        Args:
          operator: of ONNX.
          operands: tensors or arrays of `dtype`.
          dtype: that of the result.
          attributes: of the node.
        """
        wide = ordered_dtype(dtype) if operator not in MODULAR else WIDE.get(np.dtype(dtype))
        if wide in (None, dtype):
            return self(operator, *operands, **attributes)
        result = self(operator, *(self.cast(x, wide) for x in operands), **attributes)
        return self.cast(Tensor(result, (), wide), dtype)

    def reshape(self, x: Any, shape: Sequence[Any]) -> Any:
        """Return x in another shape; a reshape of a reshape reads the tensor behind both."""
        shape = tuple(shape)
        if isinstance(x, np.ndarray) and all_known(shape):
            return x.reshape(shape)
        if getattr(x, "shape", None) == shape:
            return x
        x = getattr(x, "flat", None) or x
        if getattr(x, "shape", None) == shape:
            return x
        symbolic = [i for i, size in enumerate(shape) if not all_known([size])]
        # -1 stands for one symbolic size, unless a size of 0 leaves it open
        if len(symbolic) == 1 and 0 not in shape:
            sizes = np.array([-1 if i in symbolic else n for i, n in enumerate(shape)], np.int64)
        else:
            sizes = self.sizes_of(shape)
        # by default a 0 in the sizes of Reshape means "as in the input"
        empty = self.opset >= 14 and any(isinstance(n, int) and n == 0 for n in shape)
        zero = {"allowzero": 1} if empty else {}
        y = self._with("Reshape", x, sizes, shape=shape, **zero)
        y.flat = x if isinstance(x, Tensor) else None
        return y

    def transpose(self, x: Any, order: Iterable[int]) -> Any:
        """Return x with its axes in another order; a transpose of a transpose reads the source."""
        order = [int(i) for i in order]
        if order == list(range(len(order))):
            return x
        if isinstance(x, np.ndarray):
            return x.transpose(order)
        if getattr(x, "product", None) is not None and 1 not in x.shape:
            a, first, b, second = x.product  # (a b)' = b' a' costs no more than a b
            return self.product(b, not second, a, not first, x.shape[::-1])
        source, before = getattr(x, "turned", None) or (x, range(len(order)))
        order = [before[i] for i in order]
        if order == list(range(len(order))):
            return source
        shape = tuple(source.shape[i] for i in order)
        # if only axes of size one move, no number does
        moved = [i for i in order if source.shape[i] != 1]
        if moved == sorted(moved):
            return self.reshape(source, shape)
        y = self._with("Transpose", source, shape=shape, perm=order)
        y.turned = source, tuple(order)
        return y

    def product(self, x: Any, first: bool, y: Any, second: bool, shape: Sequence[Any]) -> Tensor:
        """Return the product of two matrices, each of which may be read as its transpose.

        Args:
          x, y: matrices as they are stored.
          first, second: whether the product is with the transpose of x, of y.
          shape: that of the product.
        """
        key = self.name(x), first, self.name(y), second
        if key not in self.products:
            turned = {"transA": int(first), "transB": int(second)} if first or second else {}
            z = self._with("Gemm" if turned else "MatMul", x, y, shape=shape, **turned)
            z.product = x, first, y, second
            self.products[key] = z
        return self.products[key]

    def slice(self, x: Any, starts: Any, stops: Any, steps: Any) -> Any:
        """Return x[start:stop:step], with a start, stop and step for each axis.

        Starts and stops may be symbolic if the step is 1.
        """
        axes = [
            i
            for i, cut in enumerate(zip(starts, stops, steps, strict=True))
            if not same_sizes(cut, (0, x.shape[i], 1))
        ]
        if not axes:
            return x
        shape = list(x.shape)
        for i in axes:
            shape[i] = (stops[i] - starts[i] + steps[i] - 1) // steps[i]
        parts = [self.sizes_of([cut[i] for i in axes]) for cut in (starts, stops)]
        operands = *parts, np.array(axes, np.int64), np.array([steps[i] for i in axes], np.int64)
        return self._with("Slice", x, *operands, shape=shape)

    def declare_sizes(self, name: str, shape: Sequence[Any]) -> None:
        """Note from which axis of an input each variable of symbolic sizes can be read."""
        for axis, size in enumerate(shape):
            if not all_known([size]):
                # an axis of 2*batch also gives batch: divide by 2
                times, _, variable = str(size).rpartition("*")
                if variable.isidentifier() and (not times or times.isdecimal()):
                    self.sizes.setdefault(variable, (name, axis, int(times or 1)))

    def sizes_of(self, shape: Sequence[Any]) -> Any:
        """Return sizes as int64: an array, or a tensor's name if they depend on inputs' sizes.

        Raises:
          Refusal: a size depends on a variable that no axis of an input gives.
        """
        if all_known(shape):
            return np.array(shape, np.int64)
        write = self.main._write_size
        parts = [np.array([n], np.int64) if all_known([n]) else write(str(n)) for n in shape]
        return self.main("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def _write_size(self, expression: str) -> str:
        """Return an int64[1] tensor with a size as JAX prints it; written at its first use."""
        origin = self.sizes.get(expression)
        if isinstance(origin, str):
            return origin
        if origin is not None:
            name, axis, times = origin
            value = self("Gather", self("Shape", name), np.array([axis], np.int64), axis=0)
            if times > 1:
                value = self("Div", value, np.array([times], np.int64))
        else:
            value = self._evaluate_size(ast.parse(expression.replace("^", "**"), mode="eval").body)
        self.sizes[expression] = value
        return value

    def _evaluate_size(self, tree: ast.AST) -> Any:
        """Write the nodes of a parsed expression of sizes; return an int64[1] tensor or array."""
        evaluate = self._evaluate_size
        match tree:
            case ast.Constant(value):
                return np.array([value], np.int64)
            case ast.UnaryOp(ast.USub(), operand):
                return self("Neg", evaluate(operand))
            case ast.BinOp(left, ast.Pow(), ast.Constant(power)):
                return self("Pow", evaluate(left), np.array([power], np.int64))
            case ast.BinOp(left, operator, right) if type(operator) in _SIZE_OPERATORS:
                return self(_SIZE_OPERATORS[type(operator)], evaluate(left), evaluate(right))
            case ast.Call(ast.Name("floordiv"), [over, under]):  # ONNX's Div rounds towards zero
                a, b = evaluate(over), evaluate(under)
                return self("Div", self("Sub", a, self("Mod", a, b)), b)
            case ast.Call(ast.Name(function), operands) if function in _SIZE_FUNCTIONS:
                return self(_SIZE_FUNCTIONS[function], *map(evaluate, operands))
            case ast.Name(variable) if variable in self.sizes:
                return self._write_size(variable)
        raise Refusal(f"the size {ast.unparse(tree)} is not that of an input's axis")

    def reduce_tensor(self, operator: str, x: Any, axes: Sequence[int]) -> Tensor:
        """Reduce x along axes, which are dropped.

        A transpose is not written: its source is reduced along the corresponding axes. Axes of size
        one are reshaped away.
        """
        if all(isinstance(x.shape[axis], int) and x.shape[axis] == 1 for axis in axes):
            return self.reshape(x, [n for axis, n in enumerate(x.shape) if axis not in axes])
        source, order = getattr(x, "turned", None) or (x, range(x.ndim))
        rest = [order[i] for i in range(x.ndim) if i not in axes]
        left, axes = sorted(rest), sorted(order[i] for i in axes)
        if operator == "ReduceSum" and self.main.factors and isinstance(source, Tensor):
            y = reduce_sum(self, source, axes)
        else:
            shape = [source.shape[i] for i in left]
            y = Tensor(self.reduce(operator, source, axes), shape, x.dtype)
        return self.transpose(y, [left.index(i) for i in rest])

    def reduce(self, operator: str, x: Any, axes: Sequence[int], keepdims: int = 0) -> str:
        """Append a reduction node. Axes are an attribute before opset 18 (13 for ReduceSum)."""
        axes = [int(a) for a in axes]
        if self.opset >= (13 if operator == "ReduceSum" else 18):
            return self(operator, x, np.array(axes, np.int64), keepdims=keepdims)
        return self(operator, x, axes=axes, keepdims=keepdims)

    def _with(
        self, operator: str, x: Any, *operands, shape=None, dtype=None, **attributes
    ) -> Tensor:
        """Append a node on x; its result has the shape and dtype of x where none is given."""
        shape = getattr(x, "shape", ()) if shape is None else shape
        dtype = dtype or getattr(x, "dtype", np.float32)
        return Tensor(self(operator, x, *operands, **attributes), shape, dtype)


@cache
def _first_opsets() -> dict[str, int]:
    """Return the first opset that has each operator."""
    opsets: dict[str, int] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "":
            since = schema.since_version
            opsets[schema.name] = min(since, opsets.get(schema.name, since))
    return opsets


def least_opset(proto: ModelProto) -> int:
    """Return the first opset that has all operators of a model that was written here."""
    opsets = [OLDEST]
    for node in all_nodes(proto.graph):
        if node.domain == "":
            opsets.append(_first_opsets()[node.op_type])
        for attribute in node.attribute:
            if attribute.name == "reduction" and node.op_type.startswith("Scatter"):
                opsets.append(SCATTERED.get(attribute.s.decode(), OLDEST))
    return max(opsets)


def value_info(name: str, like: Any) -> ValueInfoProto:
    """Return the declaration of a tensor; a symbolic size becomes a named dimension."""
    sizes = [n if all_known([n]) else str(n) for n in like.shape]
    return helper.make_tensor_value_info(name, onnx_type(like.dtype), sizes)
