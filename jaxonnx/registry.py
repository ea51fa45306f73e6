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
axes (`matrix`, `convolution`, `recurrent`, `einsum` and `table` of `jaxonnx._axes`): LoRA,
initializers, sparsity and `Model.summary` go by it. `params` are biases, scales and the like,
`vectors` are operands that count as trained only if they are vectors (of Add, Mul), `state` are
running statistics; each with the value that it starts from. All names must be those of the
function's inputs and attributes.

Annotations say what a parameter needs beyond its value: `Static` on an input that must be known
while tracing; `Key`, `Training`, `Outputs` and `Names` on keyword-only parameters that the
evaluator fills in and that are not attributes.

What the specification demands of values and shapes is declared, and checked before the function is
called (`jaxonnx._constraints`)::

    @op("MaxPool", since=1, shapes="x (N, C, D1, *D)", without=("ceil_mode", "storage_order"))
    @op("MaxPool", since=8, shapes="x (N, C, D1, *D)")
    def max_pool(x, *, storage_order: Literal[0, 1] = 0, **window: Unpack[Pooled]): ...

`Literal`, `Positive`, `NotNegative` and `AtLeast` are the values that a parameter may have,
`shapes` the shapes of inputs and lists, `without` the attributes that came in later opsets.
Attributes that several operators share are the keys of a `TypedDict`, which says their defaults.
A NodeError is raised in the function only for what it computes.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxonnx._axes import Form
from jaxonnx._constraints import Constraints, Default, marks

Static = Annotated[np.ndarray, "static"]
"""An input whose value must be known while tracing; the function receives an `np.ndarray`."""

Through = Annotated[Any, "through"]
"""An input through which gradients pass to the numbers before rounding: the function receives the
`Rounded` itself, where all other functions receive its `value` alone."""

Omissible = Annotated[Any, "omissible"]
"""An input that may be omitted ("" in the file) although others after it may not: `Omissible` alone
or in a union, as in `Through | Omissible`."""

Kernel = Annotated[Any, "kernel"]
"""A weight (M, C, *kernel) that may be kept in another order, for `lowering` alone to read."""

Factor = Annotated[Any, "factor"]
"""A matrix that rows are multiplied by (`x @ w`), which may be an `Adapted` of `lowering`."""

PerAxis = Annotated[Any, "per axis"]
"""A scalar, or a vector along the attribute `axis` of the first input, on which the operator works
element by element: that may be kept in another order, in which `axis` is another."""

Rows = Annotated[Any, "rows"]
"""A matrix whose rows may be a `MergedRows` of `lowering`."""

Key = Annotated[Callable[..., Any], "key"]
"""`key(seed=None)` gives this node's own PRNG key; equal seeds give equal keys."""

Training = Annotated[bool | None, "training"]
"""True in training, False in inference, None to do as the file says."""

Outputs = Annotated[int, "outputs"]
"""The number of outputs that the node lists (trailing omitted ones not counted)."""

Names = Annotated[Any, "scope"]
"""The scope the node stands in (`jaxonnx._run.scope.Scope`); only `Gradient` asks for it."""

Channels = Annotated[int, "channels"]
"""The axis of the channels in the first input and the first output: 1 as in the specification, or
-1 where the evaluator keeps images with their channels last (`jaxonnx._run.channels_last`)."""

_CONTEXT = {
    "key": Key,
    "training": Training,
    "outputs": Outputs,
    "scope": Names,
    "channels": Channels,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """A quantized array and the real numbers it was rounded from; only these have a gradient."""

    value: Any
    real: Any


@dataclass(frozen=True)
class Op:
    """One operator from one opset on. Positions are those of the node's inputs."""

    name: str
    domain: str
    since: int
    function: Callable[..., Any]
    params: tuple[int, ...]
    """Inputs for a trained weight or bias."""
    vectors: tuple[int, ...]
    """Inputs for a trained bias or scale vector, but not for a table or a scalar."""
    state: tuple[int, ...]
    """Inputs that hold running statistics; in training the k-th is renewed by output k + 1."""
    view: bool
    """The result is a view of the first input: a tensor keeps its role behind it."""
    dynamic: bool
    """The shape of the result depends on values, so that it cannot be compiled."""
    static: frozenset[int]
    context: tuple[tuple[str, str], ...]
    """Pairs of keyword-only parameter and the name of what the evaluator passes there."""
    attributes: frozenset[str]
    required: frozenset[str]
    inputs: int | None
    """The greatest number of inputs; None when the last one is variadic."""
    pointwise: bool = False
    """Every element of the results depends on the elements of the inputs at the same place, which
    broadcast as in NumPy; an attribute `axis` names the only axis of which that is not true."""
    pasts: tuple[int, ...] = ()
    """Inputs with what earlier calls left, by the names that specifications give them; the k-th is
    continued by output k + 1."""
    through: frozenset[int] = frozenset()
    kernels: frozenset[int] = frozenset()
    factors: frozenset[int] = frozenset()
    rows: frozenset[int] = frozenset()
    per_axis: frozenset[int] = frozenset()
    needed: tuple[str | None, ...] = ()
    """The names of the inputs up to the last required one, None for those that may be omitted."""
    last: int = 0
    """The position of the last input; a variadic one starts there."""
    forms: Mapping[int, Form] = field(default_factory=dict, hash=False)
    """Among `params`: the factors, and what their axes mean."""
    starts: Mapping[int, float] = field(default_factory=dict, hash=False)
    """The values that trained tensors and statistics start from, where the operator says."""
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The values of the attributes that are not `required`, where they are absent."""
    constraints: Constraints = field(default_factory=Constraints, hash=False)
    """What the operator demands of its inputs and attributes, checked before it is called."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Check the arguments, and call the function."""
        self.constraints.check(arguments, keywords)
        return self.function(*arguments, **keywords)

    @property
    def channels(self) -> bool:
        """Whether the operator can have the channels of its images last."""
        return any(what == "channels" for _, what in self.context)

    @property
    def normalizes(self) -> bool:
        """Whether the running statistics are those of a batch, which training normalizes by."""
        return bool(self.state and self.params)

    def role(self, position: int) -> str | None:
        """Return the role of an input: "param", "vector", "state", or None if it is not trained."""
        position = min(position, self.last)
        for role, positions in (("param", self.params), ("vector", self.vectors)):
            if position in positions:
                return role
        return "state" if position in self.state else None

    def form(self, position: int) -> Form | None:
        """Return what the operator declares of the axes of a weight at an input."""
        return self.forms.get(min(position, self.last))

    def start(self, position: int) -> float | None:
        """Return the value that a tensor at an input starts from; None if it is not declared."""
        return self.starts.get(min(position, self.last))


Starts = Mapping[str, float] | tuple[str, ...]
"""Inputs with the values that they start from, or only their names: vectors then start at 0."""

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
    view: bool = False,
    dynamic: bool = False,
    pointwise: bool = False,
    shapes: str = "",
    without: Collection[str] = (),
):
    """Register the decorated function as operator `name` of `domain` from opset `since` on.

    `weights`, `params`, `vectors` and `state` name the inputs for factors, for biases and other
    trained tensors, for bias or scale vectors, and for running statistics; a variadic input is
    named without its asterisk and means every position from there on. `shapes` declares the shapes
    of inputs, as `jaxonnx._constraints` describes; `without` names attributes of the function that
    the operator does not have in this opset yet.

    Raises:
      ValueError: a name is not an input, or one in `weights` not an attribute.
    """

    def register(function):
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
        forms = weights or {}
        named = {*order, *attributes}
        read = (form.attributes for form in forms.values())
        for group in (forms, params, vectors, state, *read):
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
                view=view,
                dynamic=dynamic,
                pointwise=pointwise,
                pasts=tuple(i for i, name in enumerate(order) if name in _PASTS),
                static=_positions_of(positional, Static),
                through=_positions_of(positional, Through),
                kernels=_positions_of(positional, Kernel),
                factors=_positions_of(positional, Factor),
                rows=_positions_of(positional, Rows),
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
    """Return the attributes that are the keys of a `TypedDict`, as keyword-only parameters."""
    parameters = {}
    for name, hint in get_type_hints(group, include_extras=True).items():
        default = next((mark.value for mark in marks(hint) if isinstance(mark, Default)), None)
        default = inspect.Parameter.empty if name in group.__required_keys__ else default
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
        )
    return parameters


def _positions_of(parameters, marker) -> frozenset[int]:
    """Return the positions annotated with `marker`, alone or in a union."""
    return frozenset(
        i
        for i, p in enumerate(parameters)
        if p.annotation == marker or marker in get_args(p.annotation)
    )


def lookup(domain: str, name: str, opset: int) -> Op | None:
    """Return the operator with the greatest `since` not above `opset`, or None."""
    known = _OPS.get(("" if domain == "ai.onnx" else domain, name), ())
    return next((o for o in reversed(known) if o.since <= opset), None)


def operators() -> list[Op]:
    """Return all operators, sorted by domain, name and opset."""
    return sorted(
        (o for ops in _OPS.values() for o in ops), key=lambda o: (o.domain, o.name, o.since)
    )


def symbolic(value: Any) -> bool:
    """Check whether a known value holds sizes that `jax.export` leaves open (`symbolic_shape`).

    Such a value is an array of objects: integers, and expressions of the open sizes.
    """
    is_object = isinstance(value, np.ndarray) and value.dtype == object and value.size > 0
    if not is_object or isinstance(value.flat[0], str):  # of strings there may be many
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
    """Return `numpy` if all values are known, so that they cost no compile, else `jax.numpy`."""
    return np if is_known(*values) else jnp
