"""Branches and loops: their programs become graphs that see the tensors around them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._jaxpr import scan as parts_of_scan
from jaxonnx._jaxpr import while_loop as parts_of_while
from jaxonnx.onnx_out._nodes import Nodes, Tensor, plain, value_info
from jaxonnx.onnx_out._rule_table import primitive


@primitive("platform_index")
def platform_index(g, *, platforms):
    """Choose the default branch of `lax.platform_dependent`, or else that of the CPU."""
    fitting = [i for i, names in enumerate(platforms) if names is None or "cpu" in names]
    return np.int32(fitting[-1])  # the default branch is the last


@primitive("cond")
def cond(g, index, *operands, branches, out):
    if not out:
        return []
    if isinstance(index, np.generic | np.ndarray):
        return g.program(branches[int(np.clip(index, 0, len(branches) - 1))], operands)
    if len(branches) == 1:
        return g.program(branches[0], operands)
    # what all branches return as they got it is no result of theirs
    unchanged = []
    for variables in zip(*(getattr(b, "jaxpr", b).outvars for b in branches), strict=True):
        places = {_find(b, v) for b, v in zip(branches, variables, strict=True)}
        unchanged.append(places.pop() if len(places) == 1 else None)
    computed = [i for i, place in enumerate(unchanged) if place is None]
    graphs = []
    for branch in branches:  # a graph without inputs, which reads the operands from around it
        inner = g.child("branch")
        results, avals = inner.program(branch, operands), _out_avals(branch)
        _outputs(inner, [results[i] for i in computed], [avals[i] for i in computed])
        graphs.append(inner.graph)
    names = iter(_choose(g, index, graphs, [out[i] for i in computed]) if computed else ())
    return [next(names) if place is None else operands[place] for place in unchanged]


def _find(program: Any, variable: Any) -> int | None:
    """Return the number of the operand that a result of a program is, None for any other."""
    operands = getattr(program, "jaxpr", program).invars
    return next((i for i, operand in enumerate(operands) if operand is variable), None)


def _choose(g: Nodes, index: Any, graphs: list, out: Any) -> list[str]:
    """Append an If for two branches, or nested Ifs for more.

    Args:
      g: the graph.
      index: the number of the branch: a bool or an integer.
      graphs: the branches.
      out: the shapes and dtypes of the results.

    Returns:
      The names of the results.
    """
    if len(graphs) == 2:
        which = g.cast(index, np.bool_)
        return g.several("If", len(out), which, then_branch=graphs[1], else_branch=graphs[0])
    first = g("Equal", g.cast(index, np.int32), np.int32(0))
    inner = g.child("branch")
    one_less = Tensor(inner("Sub", inner.name(g.cast(index, np.int32)), np.int32(1)), (), np.int32)
    names = _choose(inner, one_less, graphs[1:], out)
    inner.graph.output.extend(map(value_info, names, out))
    return g.several("If", len(out), first, then_branch=graphs[0], else_branch=inner.graph)


def _outputs(inner: Nodes, results: Any, avals: Any) -> None:
    """Declare the outputs of a subgraph, each by an Identity.

    A result may be a tensor of the graph around it, which cannot be an output of the subgraph.
    """
    for result, aval in zip(results, avals, strict=True):
        inner.graph.output.append(value_info(inner("Identity", result), plain(aval)))


def _out_avals(program: Any) -> list:
    return [variable.aval for variable in getattr(program, "jaxpr", program).outvars]


def _in_avals(program: Any) -> list:
    jaxpr = getattr(program, "jaxpr", program)
    return [variable.aval for variable in jaxpr.invars]


def _inputs(inner: Nodes, avals: Any) -> list[Tensor]:
    """Declare inputs of a subgraph with these shapes and dtypes; return their tensors."""
    tensors = []
    for like in map(plain, avals):
        name = inner.fresh("carry")
        inner.graph.input.append(value_info(name, like))
        tensors.append(Tensor(name, like.shape, like.dtype))
    return tensors


@primitive("scan")
def scan(g, *operands, equation, out):
    loop = parts_of_scan(equation, operands)
    body, n = loop.body, len(loop.carry)
    inner = g.child("body")
    if not loop.sliced:
        return _counting_loop(g, inner, loop, out)
    avals = _in_avals(body)[len(loop.fixed) :]
    results = inner.program(body, [*loop.fixed, *_inputs(inner, avals)])
    _outputs(inner, results, _out_avals(body))
    directions = {}
    if loop.reverse:
        directions["scan_input_directions"] = [1] * len(loop.sliced)
        if len(out) > n:
            directions["scan_output_directions"] = [1] * (len(out) - n)
    return g.several(
        "Scan", len(out), *loop.carry, *loop.sliced, body=inner.graph,
        num_scan_inputs=len(loop.sliced), **directions,
    )  # fmt: skip


def _counting_loop(g: Nodes, inner: Nodes, loop: Any, out: Any) -> list:
    """Append a Loop for a scan that slices no arrays: ONNX's Scan needs at least one."""
    n = len(loop.carry)
    avals = _in_avals(loop.body)[len(loop.fixed) :]
    going = _counter(inner)
    results = inner.program(loop.body, [*loop.fixed, *_inputs(inner, avals)])
    inner.graph.output.append(value_info(inner("Identity", going), going))
    _outputs(inner, results, _out_avals(loop.body))
    steps = np.int64(loop.length)
    results = g.several("Loop", len(out), steps, np.bool_(True), *loop.carry, body=inner.graph)
    if not loop.reverse:
        return results
    # a Loop stacks results in the order of its iterations: reverse them
    back = np.array([-1], np.int64), np.array([np.iinfo(np.int64).min + 1], np.int64)
    axis, step = np.array([0], np.int64), np.array([-1], np.int64)
    return [*results[:n], *(g("Slice", y, *back, axis, step) for y in results[n:])]


def _counter(inner: Nodes) -> Tensor:
    """Declare the iteration number and the condition, a Loop body's first inputs; return the
    condition.
    """
    count = Tensor(inner.fresh("count"), (), np.int64)
    going = Tensor(inner.fresh("going"), (), np.bool_)
    inner.graph.input.extend(value_info(tensor, tensor) for tensor in (count, going))
    return going


@primitive("while")
def while_(g, *operands, equation, out):
    loop = parts_of_while(equation, operands)
    if not out:
        return []
    (first,) = g.program(loop.condition, [*loop.tested, *loop.carry])
    inner = g.child("body")
    _counter(inner)
    carry = _inputs(inner, _in_avals(loop.body)[len(loop.fixed) :])
    results = inner.program(loop.body, [*loop.fixed, *carry])
    if first.shape:  # a loop under vmap: it runs until all have ended; those that have stay as is
        (going,) = inner.program(loop.condition, [*loop.tested, *carry])
        pairs = zip(results, carry, strict=True)
        results = [inner.run(_select_new, going, new, old)[0] for new, old in pairs]
    (again,) = inner.program(loop.condition, [*loop.tested, *results])
    (first,), (again,) = g.run(jnp.any, first), inner.run(jnp.any, again)
    inner.graph.output.append(value_info(inner("Identity", again), jax.ShapeDtypeStruct((), bool)))
    _outputs(inner, results, _out_avals(loop.body))
    return g.several("Loop", len(out), None, first, *loop.carry, body=inner.graph)


def _select_new(going: Any, new: Any, old: Any) -> Any:
    return jnp.where(going.reshape(going.shape + (1,) * (new.ndim - going.ndim)), new, old)
