"""Constraints on the arguments of operators: ranks, sizes, dtypes and values.

Values are declared by the annotation of a parameter: `Literal["none", "add"]` lists those that an
attribute may have, `Positive`, `NotNegative` and `AtLeast` bound numbers, lists of numbers and
known inputs from below.

Shapes are declared by `op(..., shapes=...)`, as the specification and docstrings write them::

    "x (N, group*c, *D), w (group*m, c, *K), b (group*m)"

One name is one size, wherever it stands; a name of an attribute is that attribute. In a product the
one factor that is not known yet is found by division, which must leave nothing. `*D` is any number
of axes, `rank D` how many, `_` any size; numbers may be added. Names that no input tells are found
in the order of the declarations. `(C) | (N, C)` are alternatives, of which the first that fits
holds, and `#M` is M elements in whatever shape. Lists among the attributes have shapes, too. Inputs
that are omitted, sequences and maps are not checked.
"""

import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from inspect import Parameter
from types import UnionType
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin

import numpy as np

from jaxonnx.errors import NodeError


@dataclass(frozen=True)
class AtLeast:
    """The least value of a number, or of all numbers of a list or a known input."""

    bound: int

    def fails(self, value: Any) -> str:
        """Describe the values that fit, "" if this one fits or is not known yet."""
        if isinstance(value, np.ndarray):
            value = value.ravel().tolist()
        elif isinstance(value, int | float):
            value = (value,)
        elif not isinstance(value, list | tuple):
            return ""
        for number in value:
            # sizes that `jax.export` leaves open are not numbers
            if isinstance(number, int | float) and not number >= self.bound:
                break
        else:
            return ""
        return {0: "not be negative", 1: "be positive"}.get(self.bound, f"be at least {self.bound}")


@dataclass(frozen=True)
class OneOf:
    """The values that an attribute may have."""

    values: tuple[Any, ...]

    def fails(self, value: Any) -> str:
        """Describe the values that fit, "" if this one fits."""
        if value in self.values:
            return ""
        *others, last = map(repr, self.values)
        return f"be {', '.join(others)} or {last}"


Positive = Annotated[Any, AtLeast(1)]
"""An attribute or a known input whose numbers are at least 1."""
NotNegative = Annotated[Any, AtLeast(0)]
"""An attribute or a known input whose numbers are at least 0."""


@dataclass(frozen=True)
class Default:
    """The value of an absent attribute, where it is declared in a `TypedDict`."""

    value: Any


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or any other annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def marks(annotation: Any) -> Iterator[Any]:
    """Yield the metadata of an annotation, and a `OneOf` for each Literal."""
    for member in members(annotation):
        if get_origin(member) is Required:
            yield from marks(*get_args(member))
        elif get_origin(member) is Literal:
            yield OneOf(get_args(member))
        elif hasattr(member, "__metadata__"):
            yield from member.__metadata__
            yield from marks(member.__origin__)


def value_rule(annotation: Any) -> AtLeast | OneOf | None:
    """Return the constraint in an annotation, if it has one."""
    return next((m for m in marks(annotation) if isinstance(m, AtLeast | OneOf)), None)


@dataclass(frozen=True)
class _Size:
    """A product of names and of ranks of names, times a number, plus a number."""

    names: tuple[str, ...]
    ranks: tuple[str, ...]
    factor: int = 1
    plus: int = 0
    name: str | None = None
    """That of a size that is just a name."""

    @classmethod
    def parse(cls, text: str) -> "_Size":
        if text.isidentifier():
            return cls((text,), (), name=text)
        product, sign, number = (part.strip() for part in re.split(r"([+-]|$)", text, maxsplit=1))
        factors = [part.strip() for part in product.split("*")]
        return cls(
            names=tuple(f for f in factors if f.isidentifier()),
            ranks=tuple(f.removeprefix("rank ") for f in factors if f.startswith("rank ")),
            factor=reduce(operator.mul, (int(f) for f in factors if f.isdecimal()), 1),
            plus=int(f"{sign}{number}") if number else 0,
        )

    def fits(self, size: Any, sizes: dict[str, Any]) -> bool:
        """Check a size, and add the factor that follows from it to `sizes`."""
        if self.name is not None:
            size_before = sizes.setdefault(self.name, size)
            return size_before is size or self.name == "_" or bool(size_before == size)
        product, unknown = self.factor, None
        for name in (*self.names, *self.ranks):
            size_before = sizes.get(name)
            if size_before is not None:
                product = product * (len(size_before) if name in self.ranks else size_before)
            elif unknown is not None or name in self.ranks:
                return True  # nothing follows from the size
            else:
                unknown = name
        size = size - self.plus
        if unknown is None or (isinstance(product, int) and product == 0):
            return bool(size == product)
        sizes[unknown] = size // product
        return bool(size % product == 0)


@dataclass(frozen=True)
class _Shape:
    """One alternative of a declared shape: sizes before and after the axes of `star`."""

    head: tuple[_Size, ...]
    star: str | None = None
    tail: tuple[_Size, ...] = ()
    total: bool = False
    """The only size in `head` is the number of elements."""

    @classmethod
    def parse(cls, text: str) -> "_Shape":
        if text.startswith("#"):
            return cls((_Size.parse(text[1:]),), total=True)
        parts = [part.strip() for part in text.strip("()").split(",") if part.strip()]
        at = next((i for i, part in enumerate(parts) if part[0] == "*"), None)
        if at is None:
            return cls(tuple(map(_Size.parse, parts)))
        head, tail = (tuple(map(_Size.parse, p)) for p in (parts[:at], parts[at + 1 :]))
        return cls(head, parts[at][1:], tail)

    def fits(self, shape: Sequence[Any], sizes: dict[str, Any]) -> bool:
        """Check a shape, and add the sizes that follow from it to `sizes`."""
        if self.total:
            shape = (reduce(operator.mul, shape, 1),)
        first, rest = len(self.head), len(shape) - len(self.tail)
        if rest < first or (self.star is None and rest > first):
            return False
        for part, size in zip(self.head, shape, strict=False):
            if not part.fits(size, sizes):
                return False
        for part, size in zip(self.tail, shape[rest:], strict=True):
            if not part.fits(size, sizes):
                return False
        middle = tuple(shape[first:rest])
        return (
            self.star is None or self.star == "_" or sizes.setdefault(self.star, middle) == middle
        )


@dataclass(frozen=True, eq=False)
class _ShapeDeclaration:
    """The declared shape of one argument."""

    position: int | None
    """Of an input; None for an attribute."""
    name: str
    text: str
    shapes: tuple[_Shape, ...]

    def shape(self, arguments: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        """Return the shape of the argument, None for values without a shape."""
        if self.position is None:
            value = attributes.get(self.name)
            return None if value is None else np.shape(value)
        is_passed = self.position < len(arguments)
        return getattr(arguments[self.position], "shape", None) if is_passed else None

    def check(self, shape: Sequence[Any], sizes: dict[str, Any]) -> None:
        """Check a shape, and add the sizes that follow from it to `sizes`.

        Raises:
          NodeError: it is another one.
        """
        count = len(sizes)
        for alternative in self.shapes:
            if alternative.fits(shape, sizes):
                return
            for name in [*sizes][count:]:
                del sizes[name]
        names = dict.fromkeys(re.findall(r"[A-Za-z]\w*", self.text))
        bound = {name: sizes[name] for name in names if name in sizes}
        where = ", ".join(f"{n} = {[*v] if isinstance(v, tuple) else v}" for n, v in bound.items())
        text = re.sub(r"#(\S+)", r"of size \1", self.text).replace("|", "or")
        raise NodeError(
            f"{self.name} has shape {[*shape]}; it must be {text}"
            + (f" with {where}" if where else "")
        )


def parse_shapes(
    text: str, inputs: Sequence[str], attributes: Collection[str]
) -> tuple[_ShapeDeclaration, ...]:
    """Parse the shapes that an operator declares of inputs, in their order, and of attributes.

    Raises:
      ValueError: a name is neither.
    """
    declared = []
    for part in re.split(r",\s+(?![^(]*\))", text) if text else ():
        name, _, shape = part.partition(" ")
        if name not in inputs and name not in attributes:
            raise ValueError(f"shapes of {name!r}, which is neither input nor attribute")
        position = inputs.index(name) if name in inputs else None
        alternatives = tuple(_Shape.parse(a.strip()) for a in shape.split("|"))
        declared.append(_ShapeDeclaration(position, name, shape, alternatives))
    return tuple(declared)


@lru_cache(maxsize=4096)  # the layers of a network have few shapes
def _check_shapes(
    declared: Sequence[_ShapeDeclaration], shapes: Sequence[Any], numbers: Any
) -> None:
    """Raise a NodeError if shapes are not as declared; `numbers` are names and values."""
    sizes = dict(numbers)
    for constraint, shape in zip(declared, shapes, strict=True):
        if shape is not None:
            constraint.check(shape, sizes)


@dataclass(frozen=True)
class Constraints:
    """All that an operator demands of its arguments."""

    inputs: tuple[tuple[int, str, AtLeast | OneOf], ...] = ()
    attributes: Mapping[str, AtLeast | OneOf] = field(default_factory=dict)
    shapes: tuple[_ShapeDeclaration, ...] = ()
    sizes: tuple[tuple[str, Any], ...] = ()
    """The attributes that shapes speak of, with their defaults."""

    @classmethod
    def of(
        cls, inputs: Sequence[Parameter], attributes: Collection[Parameter], shapes: str
    ) -> "Constraints":
        """Collect the constraints in the parameters' annotations and in `shapes`."""
        rules = [(i, p.name, value_rule(p.annotation)) for i, p in enumerate(inputs)]
        return cls(
            inputs=tuple((i, name, rule) for i, name, rule in rules if rule),
            attributes={p.name: r for p in attributes if (r := value_rule(p.annotation))},
            shapes=parse_shapes(shapes, [p.name for p in inputs], [p.name for p in attributes]),
            sizes=tuple(
                (p.name, p.default) for p in attributes if re.search(rf"\b{p.name}\b", shapes)
            ),
        )

    def check(self, arguments: Sequence[Any], attributes: Mapping[str, Any]) -> None:
        """Raise a NodeError that names the first argument that is not as declared."""
        if self.attributes:
            for name, value in attributes.items():
                if (rule := self.attributes.get(name)) and (must := rule.fails(value)):
                    raise NodeError(f"{name} must {must}, got {value!r}")
        for position, name, rule in self.inputs:
            if position < len(arguments) and (must := rule.fails(arguments[position])):
                value = np.asarray(arguments[position]).tolist()
                raise NodeError(f"{name} must {must}, got {value}")
        if self.shapes:
            shapes = tuple([term.shape(arguments, attributes) for term in self.shapes])
            values = ((name, attributes.get(name, default)) for name, default in self.sizes)
            numbers = tuple([pair for pair in values if isinstance(pair[1], int)])
            _check_shapes(self.shapes, shapes, numbers)
