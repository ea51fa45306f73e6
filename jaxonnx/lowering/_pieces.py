"""Compile a deep network in pieces: layers that are equal but for their weights once.

XLA compiles each of 28 equal layers anew, and takes as long as there are layers. A program whose
equations repeat is cut here into functions of a few layers, all of which are the same function of
other arrays. They are compiled once, and called one after the other.

A call with a hundred arrays takes the host some 0.1 ms, while the piece before it runs. Values
between two pieces are arrays in memory, which XLA cannot fuse away: a cut is where the fewest are
needed.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxonnx._jaxpr import Program, bind_equation, is_program, live, programs

LEAST = 1024
"""The fewest equations that need not be compiled, for a program to be cut."""
SHORT = 8
"""The fewest equations of a layer, and of its repetitions."""
LAYERS = 4
"""The most layers of a piece: compiling takes as long as their number, running as its inverse."""


@dataclass(frozen=True)
class _Call:
    """A call of a compiled function on values of the program, by their places."""

    function: Callable[..., Sequence[Any]]
    inputs: Sequence[int]
    outputs: Sequence[int]
    last: Sequence[int]
    """The values that no other call needs."""


@dataclass(frozen=True)
class Pieces:
    """A program as calls of compiled functions, in order."""

    calls: Sequence[_Call]
    constants: Sequence[Any]
    results: Sequence[int | Literal]
    """Places of values, or numbers."""
    size: int

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the results on arrays, of which those that are donated are deleted."""
        values: list[Any] = [*self.constants, *arguments]
        values += [None] * (self.size - len(values))
        for call in self.calls:
            results = call.function(*[values[i] for i in call.inputs])
            for place, result in zip(call.outputs, results, strict=True):
                values[place] = result
            for place in call.last:
                values[place] = None
        return [
            jnp.array(i.val, _type_of(i)[1]) if isinstance(i, Literal) else values[i]
            for i in self.results
        ]


def cut(program: Program, donated: Sequence[bool], jit: Callable[..., Any]) -> Pieces | None:
    """Return a program in pieces; None if it hardly repeats itself.

    Args:
      program: a jaxpr, closed or not.
      donated: whether the memory of each argument may be used for results.
      jit: compiles a function, with `donate_argnums` as `jax.jit` does.
    """
    program = live(program)
    jaxpr = getattr(program, "jaxpr", program)
    equations = jaxpr.eqns
    if jaxpr.effects:
        return None
    windows = _find_windows(jaxpr)
    if not windows:
        return None

    # 1. The ranges of equations of each piece, and the kind of piece: windows of one run are equal.
    ranges: list[tuple[int, int, int]] = []
    at, others = 0, count(-1, -1)
    for kind, (length, starts) in enumerate(windows):
        for start in starts:
            if at < start:
                ranges.append((at, start, next(others)))
            at = start + length
            ranges.append((start, at, kind))
    if at < len(equations):
        ranges.append((at, len(equations), next(others)))

    # 2. What each piece reads, in order of appearance, and what others read of it. Pieces of a kind
    # return the same results, those that any of them is asked for.
    last = {atom: len(ranges) for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    reads: list[dict[Any, None]] = []
    for number, (start, stop, _) in enumerate(ranges):
        computed = {v for equation in equations[start:stop] for v in equation.outvars}
        atoms = (a for e in equations[start:stop] for a in e.invars if not isinstance(a, Literal))
        reads.append(dict.fromkeys(a for a in atoms if a not in computed))
        for atom in reads[-1]:
            last[atom] = max(number, last.get(atom, number))
    needed: dict[int, set[tuple[int, int]]] = {}
    for number, (start, stop, kind) in enumerate(ranges):
        for i, equation in enumerate(equations[start:stop]):
            for k, variable in enumerate(equation.outvars):
                if last.get(variable, -1) > number:
                    needed.setdefault(kind, set()).add((i, k))

    # 3. One function of each kind, with the arguments whose memory all of its calls may use.
    free = {v for v, is_free in zip(jaxpr.invars, donated, strict=True) if is_free}
    spent: dict[int, set[int]] = {}
    for number, (*_, kind) in enumerate(ranges):
        is_last = (i for i, v in enumerate(reads[number]) if v in free and last[v] == number)
        spent[kind] = spent[kind] & {*is_last} if kind in spent else {*is_last}
    functions: dict[int, Callable] = {}
    for number, (start, stop, kind) in enumerate(ranges):
        if kind not in functions:
            body, places = equations[start:stop], sorted(needed.get(kind, ()))
            functions[kind] = _compile(jit, body, [*reads[number]], places, spent[kind])

    # 4. The calls, with a place for each value that goes from one to another.
    place = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    calls = []
    for number, (start, _, kind) in enumerate(ranges):
        outputs = [equations[start + i].outvars[k] for i, k in sorted(needed.get(kind, ()))]
        for variable in outputs:
            place[variable] = len(place)
        ended = (v for v in (*reads[number], *outputs) if last.get(v, -1) <= number)
        inputs = [place[v] for v in reads[number]]
        calls.append(
            _Call(functions[kind], inputs, [place[v] for v in outputs], [place[v] for v in ended])
        )
    results = [a if isinstance(a, Literal) else place[a] for a in jaxpr.outvars]
    constants = [*map(jnp.asarray, getattr(program, "consts", ()))]
    return Pieces(calls, constants, results, len(place))


def _compile(
    jit: Callable[..., Any],
    body: Sequence[JaxprEqn],
    inputs: Sequence[Any],
    outputs: Sequence[tuple[int, int]],
    spent: set,
) -> Callable[..., Sequence[Any]]:
    """Return a function of the inputs of equations that gives some of their outputs, jitted."""

    def piece(*arguments):
        values = dict(zip(inputs, arguments, strict=True))
        for equation in body:
            operands = [a.val if isinstance(a, Literal) else values[a] for a in equation.invars]
            values.update(zip(equation.outvars, bind_equation(equation, operands), strict=True))
        return [values[body[i].outvars[k]] for i, k in outputs]

    # memory is used for a result of the same type; of others JAX would warn
    results = Counter(_type_of(body[i].outvars[k]) for i, k in outputs)
    donated = []
    for i in sorted(spent):
        if results[_type_of(inputs[i])] > 0:
            results[_type_of(inputs[i])] -= 1
            donated.append(i)
    return jit(piece, donate_argnums=donated)


def _type_of(variable: Any) -> tuple:
    return variable.aval.shape, variable.aval.dtype


def _find_windows(jaxpr: Any) -> list[tuple[int, list[int]]]:
    """Return (length, starts) of ranges of equations that do the same, in order, without overlap.

    Each is at least two ranges that follow each other.
    """
    equations = jaxpr.eqns
    signs = _Signs()
    runs = _find_runs(np.array([signs.of_equation(equation) for equation in equations]))
    producers = {v: i for i, equation in enumerate(equations) for v in equation.outvars}
    # how many values are needed behind each equation: cut where these are few
    last = {
        atom: i
        for i, e in enumerate(equations)
        for atom in e.invars
        if not isinstance(atom, Literal)
    }
    last |= {atom: len(equations) for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    change = np.zeros(len(equations) + 2, int)
    for variable, i in producers.items():
        if variable in last:
            change[i + 1] += 1
            change[last[variable] + 1] -= 1
    needed = change.cumsum()

    def wire(start: int, stop: int) -> tuple:
        """List the results that the equations of a range read, by their places in it."""
        outside: dict[Any, int] = {}
        wires = []
        for equation in equations[start:stop]:
            for atom in equation.invars:
                if isinstance(atom, Literal):
                    continue
                i = producers.get(atom, -1)
                if i < start:
                    wires.append((-1, outside.setdefault(atom, len(outside))))
                else:
                    wires.append((i - start, equations[i].outvars.index(atom)))
        return tuple(wires)

    windows = []
    for start, period, stop in runs:
        # the cut is looked for in the middle: around the first and last layers more is needed
        middle = start + (stop - start) // period // 2 * period
        shift = min(
            range(min(period, stop - start - 2 * period + 1)), key=lambda i: needed[middle + i]
        )
        layers = (stop - start - shift) // period
        each = next(n for n in range(min(LAYERS, layers // 2), 0, -1) if layers % n < 2)
        length = period * each
        starts = [*range(start + shift, stop - length + 1, length)]
        wires = [wire(i, i + length) for i in starts]
        same, most = Counter(wires).most_common(1)[0]
        if most > 1:
            windows.append((length, [i for i, w in zip(starts, wires, strict=True) if w == same]))
    saved = sum(length * (len(starts) - 1) for length, starts in windows)
    return windows if saved >= LEAST else []


def _find_runs(signs: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (start, period, stop) of the parts of a sequence that repeat themselves, in order."""
    runs, parts = [], [(0, len(signs))]
    while parts:
        begin, end = parts.pop()
        best = SHORT, 0, 0, 0
        part = signs[begin:end]
        for period in range(SHORT, len(part) // 2 + 1):
            ends = np.flatnonzero(part[:-period] != part[period:])
            ends = np.concatenate([[-1], ends, [len(part) - period]])
            longest = int(np.diff(ends).argmax())
            length = int(ends[longest + 1] - ends[longest] - 1)
            saved = length // period * period
            if saved > best[0]:
                start = begin + int(ends[longest]) + 1
                best = saved, start, period, start + length + period
        _, start, period, stop = best
        if period:
            runs.append((start, period, stop))
            parts += [(begin, start), (stop, end)]
    return sorted(runs)


class _Signs:
    """Numbers for equations, equal for those that do the same to other values."""

    def __init__(self):
        self._numbers: dict[Hashable, int] = {}
        self._programs: dict[int, int] = {}

    def of_equation(self, equation: JaxprEqn) -> int:
        params = {**equation.params}
        if equation.primitive.name.startswith("custom_"):  # nothing differentiates a piece
            params = {"programs": programs(params)}
        params = self._describe(params)
        atoms = tuple(map(self._describe_atom, equation.invars))
        results = tuple(v.aval for v in equation.outvars)
        return self._number((equation.primitive, equation.ctx, params, atoms, results))

    def _number(self, description: Hashable) -> int:
        return self._numbers.setdefault(description, len(self._numbers))

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, list | tuple):
            return type(value), *map(self._describe, value)
        if isinstance(value, Mapping):
            return "mapping", *((key, self._describe(item)) for key, item in value.items())
        if is_program(value):
            if id(value) not in self._programs:
                self._programs[id(value)] = self._number(self._describe_program(value))
            return "program", self._programs[id(value)]
        try:
            hash(value)
        except TypeError:
            return "object", id(value)
        # 0.0 equals -0.0
        return type(value), value, repr(value) if isinstance(value, float) else ""

    def _describe_program(self, program: Program) -> Hashable:
        jaxpr = getattr(program, "jaxpr", program)
        places = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
        description: list = [
            tuple(v.aval for v in places),
            self._describe([*getattr(program, "consts", ())]),
        ]

        def find(atom: Any) -> Hashable:
            return self._describe_atom(atom) if isinstance(atom, Literal) else places[atom]

        for equation in jaxpr.eqns:
            description.append((self.of_equation(equation), tuple(map(find, equation.invars))))
            for variable in equation.outvars:
                places[variable] = len(places)
        return *description, tuple(map(find, jaxpr.outvars))

    def _describe_atom(self, atom: Any) -> Hashable:
        if not isinstance(atom, Literal):
            return atom.aval
        return "literal", atom.aval, np.asarray(atom.val).tobytes()
