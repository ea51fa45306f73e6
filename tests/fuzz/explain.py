"""How a case that ended differently is explained: the sorts of rows of `tests.fuzz.explained_*`."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from jaxonnx._io.protos import all_graphs, all_nodes

REFERENCE, RUNTIME = "reference", "onnxruntime"
BOTH, RUNTIME_ALONE = frozenset({REFERENCE, RUNTIME}), frozenset({RUNTIME})


class Compared(NamedTuple):
    """A model, and what became of it.

    Attributes:
      proto: the model.
      feeds: its inputs.
      refused: what jaxonnx says if it refuses it.
      errors: what others say, by runtime.
      different: for each runtime that runs it, pairs of arrays that differ, of jaxonnx and its own.
    """

    proto: ModelProto
    feeds: Mapping[str, Any]
    refused: str
    errors: Mapping[str, str]
    different: Mapping[str, list[tuple[Any, Any]]]


class Node(NamedTuple):
    """A node: its attributes, the values of its inputs where they are known, the opset.

    And whether other nodes use what it gives.
    """

    op: str
    attributes: dict[str, Any]
    inputs: list[Any]
    opset: int
    used: bool

    def known(self, i: int) -> np.ndarray:
        """Return an input, an array without elements if it is not known."""
        value = self.inputs[i] if i < len(self.inputs) else None
        return value if isinstance(value, np.ndarray) else np.zeros(0)


class Refusal(NamedTuple):
    """Models that jaxonnx refuses on purpose and others run.

    Attributes:
      operators: that refuse them, as a regular expression; empty where no node is the reason.
      said: how the message goes on, likewise.
      why: others run them.
      by: which of the others.
      other: what the one that does not run them says, likewise.
      when: a node must be of this sort.
    """

    operators: str
    said: str
    why: str
    by: frozenset[str] = frozenset({REFERENCE})
    other: str = ""
    when: Callable[[Node], bool] | None = None

    def explains(self, case: Compared) -> bool:
        place = rf"node '.*?' \((?:{self.operators}), opset \d+\): " if self.operators else ".*"
        return (
            self.by.issuperset(case.different)
            and re.match(f"{place}(?:{self.said})", case.refused, re.DOTALL) is not None
            and re.search(self.other, " ".join(case.errors.values())) is not None
            and (self.when is None or any(map(self.when, nodes_of(case.proto, case.feeds))))
        )


class Limit(NamedTuple):
    """Models that others refuse, though they are valid.

    Attributes:
      said: what one of them says, as a regular expression.
      why: it does.
      by: which of them.
      when: a node must be of this sort.
    """

    said: str
    why: str
    by: frozenset[str] = frozenset({REFERENCE})
    when: Callable[[Node], bool] | None = None

    def explains(self, name: str, error: str, nodes: Iterable[Node]) -> bool:
        told = name in self.by and re.search(self.said, error, re.DOTALL)
        return bool(told) and (self.when is None or any(map(self.when, nodes)))


class Difference(NamedTuple):
    """Results that differ, where jaxonnx's are right or the specification leaves them open.

    Attributes:
      operators: of a node that is the reason, as a regular expression.
      when: the node, jaxonnx's array and the other one are of this sort.
      why: they differ.
      by: whose results.
    """

    operators: str
    when: Callable[[Node, Any, Any], bool]
    why: str
    by: frozenset[str] = frozenset({REFERENCE})

    def explains(self, pair: tuple[Any, Any], nodes: Iterable[Node]) -> bool:
        if not all(isinstance(value, np.ndarray) for value in pair):
            return False
        named = (node for node in nodes if re.fullmatch(self.operators, node.op))
        return any(self.when(node, *pair) for node in named)


Row = Refusal | Limit | Difference


def why(case: Compared, rows: Iterable[Row]) -> str | None:
    """Return the reason why a case ended as it did, None if no row has it."""
    if case.refused:
        found = [row.why for row in rows if isinstance(row, Refusal) and row.explains(case)]
        return found[0] if found else None
    nodes = [*nodes_of(case.proto, case.feeds)]
    reasons: list[str | None] = []
    for name, error in case.errors.items() if not case.different else ():
        limits = (row for row in rows if isinstance(row, Limit))
        reasons.append(next((r.why for r in limits if r.explains(name, error, nodes)), None))
    for name, pairs in case.different.items():
        for pair in pairs:
            found = (row for row in rows if isinstance(row, Difference) and name in row.by)
            reasons.append(next((r.why for r in found if r.explains(pair, nodes)), None))
    return " and ".join(dict.fromkeys(filter(None, reasons))) if all(reasons) else None


def nodes_of(proto: ModelProto, feeds: Mapping[str, Any]) -> Iterator[Node]:
    opset = max((e.version for e in proto.opset_import if not e.domain), default=1)
    values = dict(feeds)
    for graph in all_graphs(proto.graph):
        values |= {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    functions = (node for function in proto.functions for node in function.node)
    listed: list[NodeProto] = [*all_nodes(proto.graph), *functions]
    read = {name for node in listed for name in node.input}
    for node in listed:
        attributes = (a for a in node.attribute if a.type and not a.ref_attr_name)
        given = {a.name: helper.get_attribute_value(a) for a in attributes}
        inputs, used = [values.get(name) for name in node.input], not read.isdisjoint(node.output)
        yield Node(node.op_type, given, inputs, opset, used)
        if node.op_type == "Constant" and "value" in given:
            values[node.output[0]] = numpy_helper.to_array(given["value"])
