"""Find tied tensors: stored once, used under several names through Identity nodes.

PyTorch's older exporter writes Identity over an initializer for two reasons. Layers share a weight
on purpose (ALBERT): these stay one tensor. Or tensors were equal by coincidence, as scales of ones
or biases of zeros are before training: each becomes a tensor of its own, and so does a running
statistic that equals a bias.

It stores an output layer that is the embedding transposed a second time, bit for bit. The current
exporter does so with the weights of a module for each time that the network calls it (ALBERT). In
memory these are one tensor, too: a node stands in the place of the others, which saving makes an
initializer again.

It also stores small tensors that are equal by coincidence once, and its nodes read this one
directly. Of a tensor with few different numbers, each module gets one of its own in memory, through
an Identity node that saving removes where the two are still equal.

Of a layer and another that multiplies by its matrix transposed, as autoencoders with tied weights
have them, both exporters store the matrix twice, too.

The older one also folds the Reshape or Transpose behind which a norm of a weight is computed, which
leaves a second copy of the weight: the same.
"""

import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, StringStringEntryProto, helper, numpy_helper

from jaxonnx._io.protos import UNNAMED, all_graphs, all_nodes, modules, value_names
from jaxonnx._io.tensors import equal_bits
from jaxonnx.registry import Op, lookup

_MEASURES = ("BatchNormalization", "Gemm", "MatMul", "Mul", "Sub")
"""Operators, besides reductions, that compute the norm or the statistics of a weight."""
_FEW = 2
"""Tensors with at most so many different numbers are equal by coincidence."""


def identity_pairs(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Yield the result and the input of every Identity node, in the order of the graph."""
    for node in all_nodes(graph):
        is_identity = node.op_type == "Identity" and node.domain in ("", "ai.onnx")
        if is_identity and node.input and node.output:
            yield node.output[0], node.input[0]


_PLACE = "place of the initializer"
"""The key that marks a node in place of an initializer; the value is that one's place."""
_STEP = "next node"
"""The value of that key at a node whose result another such node moves."""


def find_duplicates(graph: GraphProto, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the matrices that equal another tensor bit for bit, with its name.

    Embeddings equal an earlier one (of an encoder and its decoder), those of products an embedding
    or its transpose, or the matrix of another product that multiplies by the transpose, others what
    the same module reads.
    """
    inputs = {value.name for value in graph.input}
    names = [t.name for t in graph.initializer if t.name in tensors and t.name not in inputs]
    stored = {name for name in names if np.ndim(tensors[name]) == 2}
    operands: dict[str, set[str]] = {"Gather": set(), "MatMul": set(), "Gemm": set()}
    for node in all_nodes(graph):
        if node.op_type in operands and node.domain in ("", "ai.onnx") and len(node.input) > 1:
            operands[node.op_type].add(node.input[node.op_type != "Gather"])
    tables: list[str] = []
    duplicates: dict[str, str] = {}
    for name in (name for name in names if name in stored & operands["Gather"]):
        of = next((t for t in tables if _is_twin(tensors[name], tensors[t])), None)
        if of is None:
            tables.append(name)
        else:
            duplicates[name] = of
    for name in sorted(stored & (operands["MatMul"] | operands["Gemm"]) - operands["Gather"]):
        of = next((t for t in tables if _is_twin(tensors[name], tensors[t])), None)
        if of is not None:
            duplicates[name] = of
    matrices = [n for n in names if n in stored and n not in {*tables, *duplicates}]
    duplicates |= _find_transposed(graph, {name: tensors[name] for name in matrices})
    others = {n: tensors[n] for n in names if np.ndim(tensors[n]) > 1 and n not in duplicates}
    duplicates |= _find_repeated_calls(graph, others)
    return duplicates | _find_folded_copies(graph, others, duplicates)


def _find_transposed(graph: GraphProto, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the matrices by whose transpose another product multiplies, with that one's name.

    Modules that are copies of each other multiply by the same matrix, not by the transpose.
    """
    turned: dict[str, set[bool]] = {}
    for node in all_nodes(graph):
        if node.op_type in ("Gemm", "MatMul") and node.domain in ("", "ai.onnx"):
            flag = any(a.name == "transB" and a.i for a in node.attribute)
            turned.setdefault("".join(node.input[1:2]), set()).add(flag)
    first: dict[tuple, list[str]] = {}
    duplicates = {}
    # named matrices before those that an exporter numbered
    for name in sorted(tensors, key=lambda name: UNNAMED.fullmatch(name) is not None):
        value = tensors[name]
        if len(turned.get(name, ())) != 1 or not jnp.issubdtype(value.dtype, jnp.floating):
            continue
        corners = value[:1, :1].tobytes(), value[-1:, -1:].tobytes()
        others = first.setdefault((*sorted(value.shape), value.dtype, *corners), [])
        for other in others:
            of = tensors[other].T if turned[name] == turned[other] else tensors[other]
            if value.shape == of.shape and is_shared(value, of):
                duplicates[name] = other
                break
        else:
            others.append(name)
    return duplicates


def _find_repeated_calls(graph: GraphProto, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the matrices that equal an earlier one which the same module reads, with its name.

    The module is the one that PyTorch's current exporter recorded in the node's metadata.
    """
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            if name in tensors:
                readers.setdefault(name, set()).update(
                    modules(node)[-1:] if node.metadata_props else ()
                )
    first: dict[tuple, list[str]] = {}
    duplicates = {}
    for name in [name for name in tensors if name in readers]:
        value = tensors[name]
        if len(readers[name]) != 1 or not jnp.issubdtype(value.dtype, jnp.floating):
            continue
        others = first.setdefault((*readers[name], value.shape, value.dtype), [])
        of = next((n for n in others if is_shared(value, tensors[n])), None)
        if of is None:
            others.append(name)
        else:
            duplicates[name] = of
    return duplicates


def _find_folded_copies(
    graph: GraphProto, tensors: Mapping[str, Any], duplicates: Mapping[str, str]
) -> dict[str, str]:
    """Return the copies of weights that their norms and statistics are computed from.

    PyTorch's older exporter folds the Reshape or Transpose before a spectral norm, so that the norm
    would stay that of the weight before training.
    """
    constants = {*tensors, *(tensor.name for tensor in graph.initializer)}
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        kind = node.op_type if constants.issuperset(filter(None, node.input)) else ""
        constants.update(node.output if kind else ())
        for name in node.input:
            readers.setdefault(name, set()).add(kind)
    computed = [n for n in tensors if "" not in readers.get(n, {""}) and n not in duplicates]
    copies: dict[str, str] = {}
    for place, name in enumerate(computed):
        if all(kind in _MEASURES or kind.startswith("Reduce") for kind in readers[name]):
            earlier = (n for n in computed[:place] if n not in copies)
            of = next((n for n in earlier if _find_moves(tensors[name], tensors[n])), None)
            copies |= {} if of is None else {name: of}
    return copies


def _find_moves(value: np.ndarray, of: np.ndarray) -> list[NodeProto]:
    """Return nodes that make one tensor from another; none if they differ in more than axes."""
    if value.dtype != of.dtype or value.size != of.size:
        return []
    if value.shape == of.shape and is_shared(value, of):
        return [helper.make_node("Identity", [""], [""])]
    flatten = helper.make_node("Flatten", [""], [""], axis=1)
    if value.ndim == 2 and len(value) == len(of) and is_shared(value, of.reshape(value.shape)):
        return [flatten]
    turned = of.swapaxes(-1, -2)
    if value.shape == turned.shape and is_shared(value, turned):
        perm = [*range(of.ndim - 2), of.ndim - 1, of.ndim - 2]
        attributes: dict[str, Any] = {} if of.ndim == 2 else {"perm": perm}
        return [helper.make_node("Transpose", [""], [""], **attributes)]
    outputs_second = value.ndim == 2 < of.ndim and len(value) == of.shape[1]  # a ConvTranspose
    if outputs_second and is_shared(value, of.swapaxes(0, 1).reshape(value.shape)):
        perm = [1, 0, *range(2, of.ndim)]
        return [helper.make_node("Transpose", [""], [""], perm=perm), flatten]
    return []


def _move(node: NodeProto, value: Any) -> np.ndarray:
    """Return the result of a node that `_find_moves` made."""
    if node.op_type == "Flatten":
        return value.reshape(len(value), -1)
    perm = next((attribute.ints for attribute in node.attribute), None)
    return np.ascontiguousarray(np.transpose(value, perm)) if node.op_type == "Transpose" else value


def _is_twin(value: np.ndarray, table: np.ndarray) -> bool:
    """Check whether a floating-point matrix is a table or its transpose."""
    if value.dtype != table.dtype or not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    views = [table] if value.shape == table.shape else []
    views += [table.T] if value.shape == table.T.shape else []
    close = (view for view in views if equal_bits(value[:1], view[:1]))  # most are told by a row
    return any(is_shared(value, view) for view in close)


def replace_duplicates(
    graph: GraphProto, pairs: Mapping[str, str], tensors: Mapping[str, Any]
) -> None:
    """Put nodes in the place of initializers that equal other tensors, moved or not."""
    for name, of in pairs.items():
        place = next(i for i, t in enumerate(graph.initializer) if t.name == name)
        nodes = _find_moves(tensors[name], tensors[of])
        assert nodes  # by which `find_duplicates` chose them
        values = [of, *(f"{name} ({node.op_type})" for node in nodes[:-1]), name]
        for node, before, after in zip(nodes, values, values[1:], strict=False):
            node.input[0], node.output[0], node.name = before, after, f"{after} (as '{of}')"
            mark = str(place) if after == name else _STEP
            node.metadata_props.append(StringStringEntryProto(key=_PLACE, value=mark))
        del graph.initializer[place]
        for node in reversed(nodes):
            graph.node.insert(0, node)


def restore_duplicates(graph: GraphProto, values: Mapping[str, np.ndarray]) -> None:
    """Undo `replace_duplicates`: write initializers again, where they were.

    A node whose tensor is not among `values` stays, as in a file that is written for its shapes.
    """
    values = {**values}
    for node in [node for node in graph.node if _is_marked(node, _PLACE)]:
        if node.input[0] not in values:
            continue
        value = values[node.output[0]] = _move(node, values[node.input[0]])
        place = next(e.value for e in node.metadata_props if e.key == _PLACE)
        if place != _STEP:
            tensor = numpy_helper.from_array(np.ascontiguousarray(value), node.output[0])
            graph.initializer.insert(min(int(place), len(graph.initializer)), tensor)
        graph.node.remove(node)


def _is_marked(node: NodeProto, key: str) -> bool:
    return any(entry.key == key for entry in node.metadata_props)


_SHARED = "share of an initializer"
"""The key that marks an Identity that stands for an initializer of several modules."""
_STATISTICS = {3: "running_mean", 4: "running_var"}
"""PyTorch's names of the inputs of BatchNormalization that are state."""


def split_shared(proto: ModelProto, tensors: MutableMapping[str, Any]) -> None:
    """Give each module a tensor of its own where several share an initializer by coincidence.

    PyTorch's current exporter stores equal tensors once. An initializer with at most two different
    numbers that operators read as weights (scales of ones, biases of zeros) becomes one tensor for
    each module and each of its inputs: an Identity in memory, named as PyTorch names the tensor.
    Modules are those that this exporter recorded in the nodes' metadata: the older one, which
    writes Identity nodes itself, numbers the calls of a module. Uses in one module, which may be
    called several times, and in nodes without a record stay one tensor; a running statistic is
    never one with a weight.

    Args:
      proto: the model; nodes are added and read others.
      tensors: its named tensors; those of the added nodes are added.
    """
    opsets = {"" if e.domain == "ai.onnx" else e.domain: e.version for e in proto.opset_import}
    taken: set[str] = set()
    for graph in all_graphs(proto.graph):
        inputs = {value.name for value in graph.input}
        names = [t.name for t in graph.initializer if t.name in tensors and t.name not in inputs]
        uses: dict[str, list[tuple[NodeProto, int, Op]]] = {name: [] for name in names}
        for node in all_nodes(graph):
            for i, name in enumerate(node.input):
                if name in uses:
                    op = lookup(node.domain, node.op_type, opsets.get(node.domain, 1))
                    if op is not None and op.role(i) is not None:
                        uses[name].append((node, i, op))
        identities: list[NodeProto] = []
        for root, places in uses.items():
            value = tensors[root]
            floating = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize > 1
            if len(places) < 2 or not floating or not np.ndim(value) or is_shared(value, value):
                continue
            groups: dict[str, list[tuple[NodeProto, int]]] = {}
            for node, i, op in places:
                groups.setdefault(_name_use(node, i, op, root), []).append((node, i))
            weights = [n for n in groups if n.rpartition(".")[2] not in _STATISTICS.values()]
            like = [n for n in weights if n.startswith(".") == ("." not in root)]
            groups.pop(root if root in groups else [*like, *weights, *groups][0])
            taken = taken or value_names(proto.graph)
            for name, group in groups.items():
                # a name that no value has; a numbered one, if an exporter numbered the
                # initializer
                stem, first = name, [name]
                if UNNAMED.fullmatch(root):
                    stem, first = root.rpartition("_")[0], []
                elif name.startswith("."):  # the node records no module
                    stem, first = f"{root}{name}", [f"{root}{name}"]
                names = itertools.chain(first, (f"{stem}_{i}" for i in itertools.count(1)))
                new = next(name for name in names if name not in taken)
                taken.add(new)
                tensors[new] = value
                identity = helper.make_node("Identity", [root], [new], f"{new} (of '{root}')")
                identity.metadata_props.add(key=_SHARED, value=root)
                identities.append(identity)
                for node, i in group:
                    node.input[i] = new
        for identity in reversed(identities):
            graph.node.insert(0, identity)


def _name_use(node: NodeProto, position: int, op: Op, root: str) -> str:
    """Return the name that PyTorch gives to a tensor at an input, such as "layers.0.norm.bias".

    Operands of arithmetic may be buffers, which have names of their own.
    """
    module = "".join(modules(node)[-1:]) if node.metadata_props else ""
    last = root.rpartition(".")[2]
    if op.role(position) == "state":
        part = _STATISTICS.get(position, last)
    elif op.role(position) == "vector" and last not in ("weight", "bias"):
        part = last
    else:
        is_bias = op.form(position) is None and op.start(position) in (None, 0.0)
        part = "bias" if is_bias else "weight"
    return f"{module}.{part}"


def merge_shared(graph: GraphProto) -> None:
    """Undo `split_shared` where its Identity nodes are left, whose tensors are still equal."""
    for inner in all_graphs(graph):
        outputs = {value.name for value in inner.output}
        shares = [n for n in inner.node if _is_marked(n, _SHARED) and n.output[0] not in outputs]
        roots = {node.output[0]: node.input[0] for node in shares}
        for node in shares:
            inner.node.remove(node)
        for node in all_nodes(inner) if roots else ():
            for i, name in enumerate(node.input):
                if name in roots:
                    node.input[i] = roots[name]


def sources(graph: GraphProto, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors that are results of Identity nodes, with the tensors that these read."""
    return {name: of for name, of in identity_pairs(graph) if name in tensors and of in tensors}


def tied_names(graph: GraphProto, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the names under which nodes read a tensor besides its own, with the tensor's name."""
    roots: dict[str, str] = {}
    stored = {n.output[0]: n.input[0] for n in graph.node if _is_marked(n, _PLACE)}
    for name, of in dict.fromkeys([*stored.items(), *identity_pairs(graph)]):
        root = roots.get(of, of)
        if name not in tensors and root in tensors:
            roots[name] = root
    steps = {*stored} & {*stored.values()}
    return {name: root for name, root in roots.items() if name not in steps}


def update_tied(
    graph: GraphProto,
    tensors: Mapping[str, np.ndarray],
    new: Mapping[str, np.ndarray],
    all_copies: bool = False,
) -> dict[str, np.ndarray]:
    """Replace values of tensors; tied tensors get the same one.

    Args:
      all_copies: each Identity of a new value has it, also of tensors that were equal at first by
        chance (all ones, all zeros).
    """
    result = {**tensors, **new}
    for name, of in sources(graph, tensors).items():  # a chain follows its first
        if name in new or result[of] is tensors[of]:
            continue
        if all_copies or is_shared(tensors[name], tensors[of]):
            result[name] = result[of]
    for name, of in find_duplicates(graph, tensors).items():
        if name not in new and result[of] is not tensors[of]:
            result[name] = result[of]
            for node in _find_moves(tensors[name], tensors[of]):
                result[name] = _move(node, result[name])
    return result


def is_shared(value: np.ndarray, other: np.ndarray) -> bool:
    """Check whether two floating-point tensors are equal on purpose."""
    if value is not other and not equal_bits(value, other):
        return False
    bits = np.ascontiguousarray(value).reshape(-1).view(f"u{value.itemsize}")
    # most are told by their first numbers; sorting all of a large one takes seconds
    return any(len(np.unique(part)) > _FEW for part in (bits[:64], bits))
