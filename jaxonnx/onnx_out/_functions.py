"""Programs of `jit` that are called more than once, each written once: functions of the model."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import FunctionProto, helper

from jaxonnx._io.build import Writer, unused_name
from jaxonnx._jaxpr import programs
from jaxonnx.onnx_out import _dims as dims
from jaxonnx.onnx_out._complex_pairs import is_complex
from jaxonnx.onnx_out._nodes import Nodes, Tensor, plain
from jaxonnx.onnx_out._rule_table import primitive

DOMAIN = "jaxonnx"
"""The domain of the functions of a model. The file defines all of them, so that no runtime has to
know the domain."""

SMALLEST = 8
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


def _calls(program: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the program of each `jit` equation that can be a function.

    A program is yielded once for each equation that calls it; equations within a program count
    once, however often it is called.
    """
    jaxpr = getattr(program, "jaxpr", program)
    for equation in jaxpr.eqns:
        for inner in programs(equation.params):
            if equation.primitive.name in ("jit", "pjit") and _fits(inner):
                yield inner
            if id(inner) not in seen:
                seen.add(id(inner))
                yield from _calls(inner, seen)


def _fits(program: Any) -> bool:
    """Check whether a program can be a function: known sizes, real numbers, no captured arrays."""
    jaxpr = getattr(program, "jaxpr", program)
    values = [plain(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars)]
    return (
        len(jaxpr.eqns) >= SMALLEST
        and all(dims.all_known(v.shape) and not is_complex(v) for v in values)
        and not getattr(program, "consts", ())
    )


@primitive("jit", "pjit")
def jit(g, *operands, jaxpr, name, out):
    if all(isinstance(x, np.ndarray) for x in operands):
        return g.program(jaxpr, operands)
    return g.several(g.main.functions.name(jaxpr, name), len(out), *operands, domain=DOMAIN)
