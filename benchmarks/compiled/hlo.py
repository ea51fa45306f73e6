"""What a compiled program does, read from its text."""

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

NOT_MOVING = {
    *("after-all", "bitcast", "call", "conditional", "constant", "copy-done", "custom-call"),
    *("get-tuple-element", "parameter", "slice-done", "tuple", "while"),
}
"""Instructions that read and write nothing by themselves, or of which the text does not tell."""


class Instruction(NamedTuple):
    operator: str
    type: str
    operands: list[str]
    """Names; of a parameter its number."""
    calls: str | None
    is_root: bool
    line: str


class Module:
    """The computations of a program: instructions by name, by the name of the computation."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        for part in re.split(r"\n(?=\S)", text):
            if name := re.match(r"(?:ENTRY )?%?([\w.-]+)", part):
                self.computations[name[1]] = dict(_instructions(part))
        self.loops = set(re.findall(r"\bbody=%?([\w.-]+)", text))
        """The bodies of loops."""

    def turns(self) -> dict[str, int]:
        """Count the turns of each loop by its body: 1 where only the program will know."""
        found: dict[str, int] = {}

        def follow(computation: str, times: int) -> None:
            for x in self.computations[computation].values():
                inner = re.search(r"\bbody=%?([\w.-]+)", x.line)
                if inner:
                    found[inner[1]] = found.get(inner[1], 0) + times * self._bound(x.line)
                    follow(inner[1], times * self._bound(x.line))

        for name in self.computations.keys() - self.loops:
            follow(name, 1)
        return found

    def _bound(self, loop: str) -> int:
        """Return the turns of a loop that counts from 0, as JAX's do."""
        if told := re.search(r"known_trip_count\D+(\d+)", loop):
            return int(told[1])
        condition = re.search(r"\bcondition=%?([\w.-]+)", loop)
        body = self.computations[condition[1]] if condition else {}
        last = next((x for x in body.values() if x.is_root), None)
        if last is None or last.operator != "compare" or "direction=LT" not in last.line:
            return 1
        bounds = [body[n].line for n in last.operands if body[n].operator == "constant"]
        return int(re.search(r"constant\((\d+)\)", bounds[0])[1]) if bounds else 1  # type: ignore[index]

    def operations(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the line of every instruction that runs by itself.

        A fusion has the name of what it gives: a fusion of a copy is a copy.
        """
        every = [x for body in self.computations.values() for x in body.values()]
        fused = {x.calls for x in every if x.operator == "fusion"}
        for name, body in self.computations.items():
            for x in body.values() if name not in fused else ():
                inner = self.computations[x.calls or ""] if x.operator == "fusion" else {}
                yield next((y.operator for y in inner.values() if y.is_root), x.operator), x.line

    def moved(self, computation: str) -> float:
        """Return the bytes that a computation reads and writes, as far as the text tells."""
        body, total = self.computations[computation], 0.0
        for x in body.values():
            if x.operator in NOT_MOVING:
                continue
            if x.operator == "fusion":
                inner = x.calls or ""
                reads = (
                    self._read(inner, self._parameter(inner, i)) for i in range(len(x.operands))
                )
                total += self._written(inner) + sum(reads)
            elif x.operator in ("dynamic-slice", "slice"):
                total += 2 * size(x.type)
            elif x.operator == "dynamic-update-slice":
                total += 2 * size(body[x.operands[1]].type)
            else:
                total += size(x.type) + sum(size(body[n].type) for n in x.operands if n in body)
        return total

    def _parameter(self, computation: str, number: int) -> str:
        body = self.computations[computation].items()
        return next(n for n, x in body if (x.operator, x.operands) == ("parameter", [str(number)]))

    def _read(self, computation: str, name: str) -> float:
        """Return the bytes that a fusion reads of a value: of a slice of it those of the slice."""
        body, total = self.computations[computation], 0.0
        whole = size(body[name].type)
        for other, x in body.items():
            for i in [i for i, n in enumerate(x.operands) if n == name]:
                if x.operator in ("dynamic-slice", "slice"):
                    total += size(x.type) * (i == 0)
                elif x.operator == "fusion":
                    total += self._read(x.calls or "", self._parameter(x.calls or "", i))
                elif x.operator == "bitcast":
                    total += self._read(computation, other)
                elif x.operator != "tuple" and (x.operator, i) != ("dynamic-update-slice", 0):
                    total += whole
        return min(total, whole)

    def _written(self, computation: str, name: str | None = None) -> float:
        """Return the bytes that a fusion writes: of an array updated in place those of the part."""
        body = self.computations[computation]
        x = body[name or next(n for n, x in body.items() if x.is_root)]
        if x.operator == "dynamic-update-slice":
            return size(body[x.operands[1]].type)
        if x.operator in ("tuple", "bitcast"):
            return sum(self._written(computation, n) for n in x.operands)
        if x.operator == "fusion":
            return self._written(x.calls or "")
        return 0 if x.operator == "parameter" else size(x.type)


def _instructions(part: str) -> Iterator[tuple[str, Instruction]]:
    pattern = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)")
    for line in part.splitlines()[1:]:
        if not (match := pattern.match(line)):
            continue
        root, name, kind, operator, rest = match.groups()
        inside = rest.partition(")")[0]
        operands = [inside] if operator == "parameter" else re.findall(r"%([\w.-]+)", inside)
        calls = re.search(r"\bcalls=%?([\w.-]+)", line)
        yield name, Instruction(operator, kind, operands, calls and calls[1], bool(root), line)


def size(kind: str) -> float:
    """Return the bytes of a type, or of the types in a tuple."""
    arrays = re.findall(r"\b(?:pred|(?:bf|[fsuc])(\d+)(?:e\w+)?)\[([\d,]*)\]", kind)
    return sum(
        int(bits or 8) / 8 * prod(map(int, filter(None, n.split(",")))) for bits, n in arrays
    )
