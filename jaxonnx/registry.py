"""The table of operators: the Python function of each ONNX operator, from an opset on.

An operator is a plain function that reads like its specification::

    @op("Gemm", since=7, weights={"b": matrix(transpose="transB")}, params={"c": 0.0})
    def gemm(a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
        y = alpha * (a.T if transA else a) @ (b.T if transB else b)
        return y if c is None else y + beta * c

Positional parameters are the inputs in the order of the specification (None when omitted),
keyword-only parameters are the attributes with the specification's spelling and defaults, and a
tuple means several outputs. There is one function per semantic change; the one with the greatest
`since` not above the model's opset is used.

The decorator names the inputs for trained tensors. `weights` are factors, with the meaning of their
axes (`matrix`, `convolution`, `recurrent`, `einsum` and `table` of `jaxonnx._weights`): LoRA,
initializers, sparsity and `Model.summary` go by it. `params` are biases, scales and the like,
`vectors` are operands that count as trained only if they are vectors (of Add, Mul), `state` are
running statistics; each with the value that it starts from. All names must be those of the
function's inputs and attributes.

`quantized` are operands in few bits, each with the inputs for its scale and zero point and with its
form in the file (`jaxonnx._weights`); `like` is the operator that computes the same in floating
point. Adapters, shardings and files go by these, never by the name of an operator.

`accepts` names the inputs that may be in another form than the file's, with one or a union of the
classes of `jaxonnx.lowering` (`RoundedArray`, `LowRank`, `KernelFirst`, ...). The evaluator
converts all others to plain arrays before the call::

    @op("MatMul", since=1, weights={"b": matrix()}, accepts={"b": LowRank | Packed})

Annotations say what a parameter needs beyond its value: `Static` on an input that must be known
while tracing; `Key`, `Training`, `Outputs`, `Names`, `Channels` and `ReusesInputs` on
keyword-only parameters that the evaluator fills in and that are not attributes.

What the specification demands of values and shapes is declared, and checked before the function is
called (`jaxonnx._constraints`)::

    @op("MaxPool", since=1, shapes="x (N, C, D1, *D)", without=("ceil_mode", "storage_order"))
    @op("MaxPool", since=8, shapes="x (N, C, D1, *D)")
    def max_pool(x, *, storage_order: Literal[0, 1] = 0, **window: Unpack[PoolAttributes]): ...

`Literal`, `Positive`, `NotNegative` and `AtLeast` are the values that a parameter may have,
`shapes` the shapes of inputs and lists, `without` the attributes that came in later opsets.
Attributes that several operators share are the keys of a `TypedDict`, which says their defaults.
A NodeError is raised in the function only for what it computes.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import jax.numpy as jnp
import numpy as np
from jax import export

from jaxonnx._constraints import Constraints, Default, marks
from jaxonnx._weights import Form, Quantized, Storage
from jaxonnx._weights import InBytes as InBytes
from jaxonnx._weights import matrix as matrix
from jaxonnx._weights import packed as packed

Static = Annotated[np.ndarray, "static"]
"""An input whose value must be known while tracing; the function receives an `np.ndarray`."""

Omissible = Annotated[Any, "omissible"]
"""An input that may be omitted ("" in the file) although a later one is required: `Omissible` alone
or in a union."""

PerAxis = Annotated[Any, "per axis"]
"""A scalar, or a vector along the attribute `axis` of the first input. The operator is elementwise
otherwise, so that the first input may be stored with its axes in another order, and the function
gets the `axis` of that order."""

Key = Annotated[Callable[..., Any], "key"]
"""`key(seed=None)` gives this node's own PRNG key; equal seeds give equal keys."""

Training = Annotated[bool | None, "training"]
"""True in training, False in inference, None if the caller has set no mode: do as the file says."""

Outputs = Annotated[int, "outputs"]
"""The number of outputs that the node lists (trailing omitted ones not counted)."""

Names = Annotated[Any, "scope"]
"""The scope that the node is evaluated in (`jaxonnx._run.scope.Scope`); only `Gradient` uses it."""

Channels = Annotated[int, "channels"]
"""The axis of the channels in the first input and the first output: 1 as in the specification, or
-1 where the evaluator keeps images with their channels last (`jaxonnx._run.array_forms`)."""

ReusesInputs = Annotated[bool, "reuses inputs"]
"""Whether a result that continues an input may be written into it: what the input has behind its
valid steps stays there."""

_CONTEXT = {
    "key": Key,
    "training": Training,
    "outputs": Outputs,
    "scope": Names,
    "channels": Channels,
    "reuses inputs": ReusesInputs,
}
"""The markers of keyword-only parameters that the evaluator passes, not attributes of the node."""


@dataclass(frozen=True)
class Op:
    """An operator from one opset on. Integers in the fields are positions of the node's inputs."""

    name: str = ""
    domain: str = ""
    since: int = 0
    function: Callable[..., Any] = lambda: None
    params: tuple[int, ...] = ()
    """Inputs for a trained weight or bias."""
    vectors: tuple[int, ...] = ()
    """Inputs for a trained vector, a bias or scale. A table or a scalar there is not trained."""
    state: tuple[int, ...] = ()
    """Inputs for running statistics; in training, output k + 1 is the new value of the k-th."""
    view: bool = False
    """Whether the result is a view of the first input, so that a weight keeps its role through it:
    a Transpose, say."""
    same_axes: bool = False
    """Whether it is a view with the axes of the first input: a Cast, say."""
    dynamic: bool = False
    """Whether the shape of the result depends on values, so that the node cannot be compiled."""
    static: frozenset[int] = frozenset()
    """Inputs that must be known while tracing."""
    context: tuple[tuple[str, str], ...] = ()
    """Pairs of a keyword-only parameter and the key of `_CONTEXT` for what the evaluator passes."""
    attributes: frozenset[str] = frozenset()
    """The names of all attributes."""
    required: frozenset[str] = frozenset()
    """The names of the attributes without a default."""
    inputs: int | None = None
    """The greatest number of inputs; None if the last one is variadic."""
    pointwise: bool = False
    """Whether the operator is elementwise with NumPy's broadcasting, except along the attribute
    `axis` if it has one."""
    pasts: tuple[int, ...] = ()
    """Inputs for caches of earlier calls (`past_key`, ...); output k + 1 is the new value of the
    k-th."""
    per_axis: frozenset[int] = frozenset()
    """Inputs that are marked `PerAxis`."""
    accepts: Mapping[int, tuple[type, ...]] = field(default_factory=dict, hash=False)
    """The forms of arrays, besides the file's, that the function takes for an input."""
    needed: tuple[str | None, ...] = ()
    """The names of the inputs up to the last required one, None for those that may be omitted."""
    last: int = 0
    """The position of the last input; a variadic one starts there."""
    forms: Mapping[int, Form] = field(default_factory=dict, hash=False)
    """The meaning of the axes of those `params` that are matrices or kernels."""
    starts: Mapping[int, float] = field(default_factory=dict, hash=False)
    """The initial values of trained vectors and statistics, if the operator declares them."""
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The values of optional attributes that a node omits."""
    constraints: Constraints = field(default_factory=Constraints, hash=False)
    """The specification's demands on inputs and attributes; checked before each call."""
    like: str = ""
    """The operator of ONNX that computes the same of operands in floating point; else its name."""
    quantized: Mapping[int, Quantized] = field(default_factory=dict, hash=False)
    """The declarations of operands in few bits."""
    parts: Mapping[int, tuple[int, int, int]] = field(default_factory=dict, hash=False)
    """For each operand in few bits, the inputs for its scale, zero point and groups; -1: none."""
    result: int | None = None
    """The input for the scale of a quantized result; the next one is for its zero point."""
    bias: int | None = None
    """The input that is added to a product; in units of both scales if the result is quantized."""
    frozen: bool = False
    """Whether training uses the running statistics, and keeps them, as inference does."""
    reuses_inputs: bool = False
    """Whether results may be written into the inputs that they continue. A view sets it."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Check the constraints, and call the function."""
        self.constraints.check(arguments, keywords)
        return self.function(*arguments, **keywords)

    @cached_property
    def channels(self) -> bool:
        """Whether the operator also takes images with their channels last."""
        return any(what == "channels" for _, what in self.context)

    @property
    def normalizes(self) -> bool:
        """Whether the operator normalizes by batch statistics in training."""
        return bool(self.state and self.params)

    @property
    def scales(self) -> set[int | None]:
        """The inputs for scales and zero points, which are not learned tensors."""
        return {self.result, *(i for places in self.parts.values() for i in places[:2])}

    @property
    def is_integer(self) -> bool:
        """Whether the operator computes with integers alone: without scales."""
        return self.like != self.name and not self.quantized

    @property
    def dequantizes(self) -> bool:
        """Whether the result has the numbers that an input in few bits stands for."""
        return self.view and bool(self.quantized)

    def without_statistics(self) -> "Op":
        """Return the operator without running statistics, in the mode of the file."""
        context = tuple(pair for pair in self.context if pair[1] != "training")
        function = partial(self.function, training=None)
        return replace(self, state=(), context=context, function=function)

    def storage(self, position: int, x: Any, attributes: Mapping[str, Any]) -> Storage | None:
        """Return the form of an operand in few bits at an input, if it is declared."""
        declared = self.quantized.get(position)
        return declared and declared.storage(tuple(x.shape), x.dtype, attributes)

    def takes(self, position: int, *forms: type) -> bool:
        """Check whether an input may be in one of these forms (`accepts`)."""
        return any(form in forms for form in self.accepts.get(position, ()))

    def role(self, position: int) -> str | None:
        """Return the role of an input: "param", "vector", "state", or None if it is not trained."""
        position = min(position, self.last)
        for role, positions in (("param", self.params), ("vector", self.vectors)):
            if position in positions:
                return role
        return "state" if position in self.state else None

    def form(self, position: int) -> Form | None:
        """Return the meaning of the axes of a weight at an input; None if it is not declared."""
        return self.forms.get(min(position, self.last))

    def start(self, position: int) -> float | None:
        """Return the initial value of a tensor at an input; None if it is not declared."""
        return self.starts.get(min(position, self.last))


F = TypeVar("F", bound=Callable[..., Any])
Starts = Mapping[str, float] | tuple[str, ...]
"""Names of inputs with their initial values; or only the names, with the initial value 0."""

_PASTS = ("past", "past_key", "past_value", "past_state")

_OPS: dict[tuple[str, str], list[Op]] = defaultdict(list)


def op(
    name: str,
    since: int,
    *,
    domain: str = "",
    weights: Mapping[str, Form] | None = None,
    params: Starts = (),
    vectors: Starts = (),
    state: Starts = (),
    quantized: Mapping[str, Quantized] | None = None,
    like: str = "",
    result: str = "",
    bias: str = "",
    view: bool | Literal["same axes"] = False,
    dynamic: bool = False,
    pointwise: bool = False,
    accepts: Mapping[str, Any] | None = None,
    shapes: str = "",
    without: Collection[str] = (),
) -> Callable[[F], F]:
    """Register the decorated function as operator `name` of `domain` from opset `since` on.

    `weights`, `params`, `vectors` and `state` name the inputs for factors, for biases and other
    trained tensors, for bias or scale vectors, and for running statistics; a variadic input is
    named without its asterisk and means every position from there on. `quantized` are operands in
    few bits, and `accepts` says which inputs may be in which forms of arrays; `like` is the
    operator of ONNX that computes the same in floating point, `result` the scale of a quantized
    result, `bias` what is added to a product. `shapes` declares the shapes of inputs, as
    `jaxonnx._constraints` describes; `without` names attributes of the function that
    the operator does not have in this opset yet.

    Raises:
      ValueError: a name is not an input, or one in `weights` not an attribute.
    """

    def register(function: F) -> F:
        signature = inspect.signature(function, eval_str=True).parameters.values()
        positional = [p for p in signature if p.kind is p.POSITIONAL_OR_KEYWORD]
        variadic = [p for p in signature if p.kind is p.VAR_POSITIONAL]
        keywords = [p for p in signature if p.kind is p.KEYWORD_ONLY]
        order = [p.name for p in positional + variadic]
        context = tuple(
            (p.name, what)
            for p in keywords
            for what, marker in _CONTEXT.items()
            if p.annotation == marker
        )
        filled = {parameter for parameter, _ in context}
        attributes = {p.name: p for p in keywords if p.name not in filled}
        for p in signature:
            if p.kind is p.VAR_KEYWORD:
                attributes |= _attributes_of(get_args(p.annotation)[0])
        attributes = {name: p for name, p in attributes.items() if name not in without}
        defaults = {n: p.default for n, p in attributes.items() if p.default is not p.empty}
        forms, accepted = weights or {}, accepts or {}
        named = {*order, *attributes}
        attribute_names = (form.attributes for form in forms.values())
        stored = quantized or {}
        scale = filter(None, (result, bias))
        for group in (forms, params, vectors, state, accepted, stored, scale, *attribute_names):
            if unknown := [*filter(lambda what: what not in named, group)]:
                raise ValueError(f"operator {name} has no input or attribute {unknown[0]!r}")
        starts = [group for group in (params, vectors, state) if isinstance(group, Mapping)]
        omissible = _positions_of(positional, Omissible)
        _OPS[domain, name].append(
            Op(
                name=name,
                domain=domain,
                since=since,
                function=function,
                params=tuple(map(order.index, (*forms, *params))),
                vectors=tuple(map(order.index, vectors)),
                state=tuple(map(order.index, state)),
                view=bool(view),
                same_axes=view == "same axes",
                like=like or name,
                quantized={order.index(n): declared for n, declared in stored.items()},
                parts={order.index(n): declared.parts(order) for n, declared in stored.items()},
                result=order.index(result) if result else None,
                bias=order.index(bias) if bias else None,
                dynamic=dynamic,
                pointwise=pointwise,
                pasts=tuple(i for i, name in enumerate(order) if name in _PASTS),
                static=_positions_of(positional, Static),
                accepts={order.index(n): get_args(kind) or (kind,) for n, kind in accepted.items()},
                per_axis=_positions_of(positional, PerAxis),
                context=context,
                attributes=frozenset(attributes),
                required=frozenset(attributes.keys() - defaults.keys()),
                defaults=defaults,
                constraints=Constraints.of(positional, attributes.values(), shapes),
                inputs=None if variadic else len(positional),
                needed=tuple(
                    None if i in omissible else p.name
                    for i, p in enumerate(positional)
                    if p.default is p.empty
                ),
                last=len(order) - 1,
                forms={order.index(what): form for what, form in forms.items()},
                starts={order.index(w): x for group in starts for w, x in group.items()},
            )
        )
        _OPS[domain, name].sort(key=lambda o: o.since)
        return function

    return register


def _attributes_of(group: type) -> dict[str, inspect.Parameter]:
    """Convert the keys of a `TypedDict` of attributes to keyword-only parameters."""
    parameters = {}
    for name, hint in get_type_hints(group, include_extras=True).items():
        default = next((mark.value for mark in marks(hint) if isinstance(mark, Default)), None)
        default = inspect.Parameter.empty if name in group.__required_keys__ else default
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
        )
    return parameters


def _positions_of(parameters, marker) -> frozenset[int]:
    """Return the positions of parameters annotated with `marker`, alone or in a union."""
    return frozenset(
        i
        for i, p in enumerate(parameters)
        if p.annotation == marker or marker in get_args(p.annotation)
    )


def lookup(domain: str, name: str, opset: int) -> Op | None:
    """Return the operator with the greatest `since` not above `opset`, or None."""
    versions = _OPS.get(("" if domain == "ai.onnx" else domain, name), ())
    return next((o for o in reversed(versions) if o.since <= opset), None)


def operators() -> list[Op]:
    """Return all operators, sorted by domain, name and opset."""
    return sorted(
        (o for ops in _OPS.values() for o in ops), key=lambda o: (o.domain, o.name, o.since)
    )


def symbolic(value: Any) -> bool:
    """Check whether a known value contains symbolic dimensions (`jax.export.symbolic_shape`).

    Such a value is an object array of integers and symbolic expressions.
    """
    is_object = isinstance(value, np.ndarray) and value.dtype == object and value.size > 0
    # the other object arrays are of strings, and may be long: look at the first element only
    if not is_object or isinstance(value.flat[0], str):
        return False
    return any(map(export.is_symbolic_dim, value.flat))


def is_known(*values: Any) -> bool:
    """Check whether all values are known while tracing: NumPy arrays, None, sequences of these."""
    return all(
        value is None
        or isinstance(value, np.ndarray | np.generic)
        or (isinstance(value, list | tuple) and is_known(*value))
        or (isinstance(value, dict) and is_known(*value.values()))
        for value in values
    )


def xp(*values: Any) -> Any:
    """Return `numpy` if all values are known, so that nothing is traced, else `jax.numpy`."""
    return np if is_known(*values) else jnp
