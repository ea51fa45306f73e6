"""Count the nodes of a graph after functions are inlined."""

from collections import Counter
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from onnx import FunctionProto, GraphProto

from jaxonnx._io.protos import all_nodes
from jaxonnx.errors import ModelError

Name = tuple[str, str, str]
"""Domain, name and overload of a function."""

MOST = 1_000_000
"""The most nodes that a graph may have once its calls are expanded."""

DEEPEST = 128
"""The longest chain of functions that call one another; each takes a few Python stack frames."""


def check_expansion(graph: GraphProto, functions: Mapping[Name, FunctionProto]) -> None:
    """Raise a ModelError if the calls of a graph have no end, are too many, or nest too deep.

    A small file can expand without bound: thirty functions that call the next one twice are 2**30
    nodes.
    """
    if not functions:
        return
    called = _count_calls(graph, functions)[1]
    calls: dict[Name | None, tuple[int, Counter[Name]]] = {None: (0, called)}
    waiting = [*called]
    while waiting:
        if (name := waiting.pop()) not in calls:
            calls[name] = _count_calls(functions[name], functions)
            waiting += calls[name][1]
    # the number of nodes with calls expanded, and the depth of calls
    sizes: dict[Name | None, tuple[int, int]] = {}
    try:
        for name in TopologicalSorter({n: inner for n, (_, inner) in calls.items()}).static_order():
            count, inner = calls[name]
            size = count + sum(sizes[n][0] * times for n, times in inner.items())
            sizes[name] = size, 1 + max((sizes[n][1] for n in inner), default=-1)
    except CycleError as error:
        name = ".".join(filter(None, error.args[1][0]))
        raise ModelError(f"function '{name}' calls itself; ONNX forbids recursion") from None
    size, depth = sizes[None]
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


def _count_calls(
    body: GraphProto | FunctionProto, functions: Mapping[Name, FunctionProto]
) -> tuple[int, Counter[Name]]:
    """Count nodes, with those of subgraphs, and the calls of each function among them."""
    nodes = [*all_nodes(body)]
    names = (("" if n.domain == "ai.onnx" else n.domain, n.op_type, n.overload) for n in nodes)
    return len(nodes), Counter(name for name in names if name in functions)
