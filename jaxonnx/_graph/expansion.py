"""Count the nodes of a graph after functions are inlined."""

from collections import Counter
from collections.abc import Iterable, Mapping

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto

from jaxonnx.errors import ModelError

Name = tuple[str, str, str]
"""Domain, name and overload of a function."""

MOST = 1_000_000
"""The most nodes that a graph may have once its calls are expanded."""

DEEPEST = 128
"""The longest chain of functions that call one another; each takes a few Python stack frames."""


def check_expansion(graph: GraphProto, functions: Mapping[Name, FunctionProto]) -> None:
    """Raise a ModelError if the calls of a graph expand to too many nodes, or nest too deep.

    A small file can expand without bound: thirty functions that call the next one twice are 2**30
    nodes. Recursion is reported by `bind`.
    """
    if not functions:
        return
    calls = {name: _calls(function.node, functions) for name, function in functions.items()}
    sizes: dict[Name, tuple[int, int]] = dict.fromkeys(functions, (0, 0))
    for name in _inner_first(calls):
        count, called = calls[name]
        sizes[name] = _total(count, called, sizes)
    size, depth = _total(0, _calls(graph.node, functions)[1], sizes)
    if size > MOST:
        raise ModelError(
            f"the functions that graph '{graph.name}' calls stand for {size:,} nodes, as each call "
            f"is evaluated on its own; at most {MOST:,} are taken"
        )
    if depth > DEEPEST:
        raise ModelError(
            f"graph '{graph.name}' calls functions that are nested {depth} deep; at most {DEEPEST} "
            "are taken. onnx.inliner.inline_local_functions writes a file without functions"
        )


def _total(
    count: int, called: Mapping[Name, int], sizes: Mapping[Name, tuple[int, int]]
) -> tuple[int, int]:
    """Return the number of nodes of a body with its calls expanded, and the depth of calls."""
    size = count + sum(sizes[name][0] * times for name, times in called.items())
    return size, 1 + max((sizes[name][1] for name in called), default=-1)


def _calls(
    nodes: Iterable[NodeProto], functions: Mapping[Name, FunctionProto]
) -> tuple[int, Counter[Name]]:
    """Count nodes, with those of subgraphs, and the calls of each function among them."""
    size, called, waiting = 0, Counter(), [nodes]
    while waiting:
        for node in waiting.pop():
            size += 1
            domain = "" if node.domain == "ai.onnx" else node.domain
            name = (domain, node.op_type, node.overload)
            if name in functions:
                called[name] += 1
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    waiting.append(attribute.g.node)
                elif attribute.type == AttributeProto.GRAPHS:
                    waiting.extend(g.node for g in attribute.graphs)
    return size, called


def _inner_first(calls: Mapping[Name, tuple[int, Counter[Name]]]) -> list[Name]:
    """Sort functions so that each comes after those that it calls, by a depth-first search.

    The search keeps its own stack, since the depth is not checked yet.
    """
    order: dict[Name, None] = {}
    for first in calls:
        path = [(first, iter(calls[first][1]))]
        entered = {first}
        while path:
            name, inner = path[-1]
            below = next((n for n in inner if n not in order and n not in entered), None)
            if below is None:
                order[name] = None
                path.pop()
            else:
                entered.add(below)
                path.append((below, iter(calls[below][1])))
    return [*order]
