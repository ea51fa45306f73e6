"""Find the uses of tensors: the node, the input, and the role there."""

import math
from collections import ChainMap
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._weights import Matrix, Storage
from jaxonnx.errors import Error
from jaxonnx.lowering import ChangedWeight, LowRank

_SEVERAL = ("BeginRounding", "Concat")
"""Operators whose results are views of all their inputs, not of the first alone."""

PARTS = ("Concat", "Expand", "Gather", "GatherND", "Slice", "Split", "Tile")
"""Operators whose results are parts, joins or repetitions of their inputs."""

_SEQUENCES = ("SequenceAt", "SplitToSequence")
"""Operators that PyTorch's current exporter takes weights apart with, unless it optimizes them."""

_RESAMPLES = ("AveragePool", "Pad", "Resize", "Upsample")
"""Operators that make a grid of another size, as ViTs do with learned tables of positions."""


SIZES = ("Shape", "Size")
"""Operators that read no numbers."""


@dataclass(frozen=True)
class View:
    """A value of the graph as a view of a tensor."""

    name: str
    """The name of the tensor."""
    axes: tuple[int | None, ...] | None
    """For each axis of the value, the axis of the tensor; None for an added axis of length one.
    None as a whole behind a Reshape that merges or splits axes or has an unknown target."""
    shape: tuple[int, ...]
    """The shape of the value, where `axes` is known; an upper bound behind a Slice."""
    apart: tuple[int, ...] = ()
    """Axes of the tensor that a Gather took one index of: the tensor stacks weights along them."""
    part: bool = False
    """Whether the value is a part of the tensor, resampled, or joined to others (Slice, Split,
    Gather, Concat, Resize, Pad)."""
    expanded: bool = False
    """Whether the value repeats the tensor along axes (Expand, Tile)."""
    in_rows: bool = False
    """Whether the value is a matrix with the numbers of a row of the tensor in each row."""


@dataclass(frozen=True)
class Use:
    """A tensor at an input of a node, directly or behind views (Transpose, Reshape, Slice, ...)."""

    view: View
    node: Node
    position: int
    rank: int
    """The tensor's rank."""
    outer: Node
    """The node of the main graph that contains the node in a subgraph or function, or is it."""
    passes: bool
    """Whether the node's results are views of the tensor, so that it is not the final reader."""

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.view.name

    @property
    def matrix(self) -> Matrix | None:
        """The meaning of the tensor's own axes in this product; None if it has none, or they are
        not known behind a Reshape."""
        form, axes = self.node.op.form(self.position), self.view.axes
        if form is not None and self._is_repacked and self.view.in_rows:
            # an embedding in few bits that reads the codes of its output layer
            return form.axes(2, self.node.attributes, self.position)
        if form is None or axes is None:
            return None
        place = form.axes(len(axes), self.node.attributes, self.position)
        if self._is_repacked:  # axes of the matrix have no view of the tensor
            return place if self.is_direct else None
        return None if place is None else place.of(axes, self.rank, self.view.apart)

    @property
    def is_direct(self) -> bool:
        """Whether the node reads the tensor itself, and no view of it."""
        return self.node.inputs[self.position] == self.name

    @property
    def _is_repacked(self) -> bool:
        declared = self.node.op.quantized.get(self.position)
        return declared is not None and declared.repacked

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of scale, zero points and groups of an operand in few bits; "" where absent."""
        inputs = self.node.inputs
        places = self.node.op.parts.get(self.position, ())
        return tuple(inputs[i] if 0 <= i < len(inputs) else "" for i in places)

    @property
    def is_summed(self) -> bool:
        """Whether a product here sums over an axis of the tensor's own."""
        form, axes = self.node.op.form(self.position), self.view.axes
        if form is None or axes is None or self._is_repacked:
            return False
        place = form.axes(len(axes), self.node.attributes, self.position)
        return place is not None and axes[place.input] is not None

    @property
    def dense(self) -> str:
        """Why a tensor that is used like this cannot be sparse; empty if it can."""
        form, place = self.node.op.form(self.position), self.matrix
        where = f"input {self.position} of {self.node.op.name}"
        if form is not None and self.view.axes is None:
            return f"reshaped before {where}, so that its axes are not known"
        if place is None or place.lookup:
            return f"{where}, no factor of a matrix product"
        if self.view.part:
            return f"taken apart or joined before {where}"
        return "a grouped convolution" if place.grouped else ""


def uses(
    graph: Graph, tensors: Mapping[str, Any], computed: Collection[str] = ()
) -> tuple[Use, ...]:
    """Return every use of the numbers of the named tensors, in the order of the nodes.

    Subgraphs and the bodies of functions are included. The graph keeps the result.

    Args:
      graph: the bound main graph.
      tensors: objects with a shape, by name; the values of NumPy arrays among them are used where
        they are targets of Reshape and the like.
      computed: those of `tensors` that are not tensors of the file but results of nodes of the main
        graph.
    """
    key = "uses", _describe(tensors), frozenset(computed)

    def walk() -> tuple[Use, ...]:
        return (*_walk(graph, ChainMap(), {*graph.inputs}, None, tensors, computed),)

    return graph.recall(key, walk)


def uses_by_tensor(graph: Graph, tensors: Mapping[str, Any]) -> Mapping[str, Sequence[Use]]:
    """Return the uses of each named tensor that has any. The graph keeps the result."""

    def group() -> Mapping[str, Sequence[Use]]:
        by_name: dict[str, list[Use]] = {}
        for use in uses(graph, tensors):
            by_name.setdefault(use.name, []).append(use)
        return by_name

    return graph.recall(("uses by tensor", _describe(tensors)), group)


def find_tied(graph: Graph, tensors: Mapping[str, Any]) -> list[str]:
    """Return the weights that are both an embedding and the matrix of a product."""
    lookups = {
        name: {use.matrix.lookup for use in used if not use.passes and use.matrix is not None}
        for name, used in uses_by_tensor(graph, tensors).items()
    }
    return [name for name, kinds in lookups.items() if len(kinds) > 1]


def direct_uses(all_uses: Sequence[Use]) -> list[Use]:
    """Return the uses of a tensor itself, without Reshape, which passes its numbers on."""
    return [use for use in all_uses if use.is_direct and use.node.op.name != "Reshape"]


def _describe(tensors: Mapping[str, Any]) -> Hashable:
    """Return all that the analyses here read of tensors: types, shapes, and values of targets."""
    described = []
    for name, x in tensors.items():
        value = None
        if isinstance(x, np.ndarray):  # that of an integer, as the target of a Reshape or an index
            value = x.tobytes() if x.ndim < 2 and x.dtype.kind == "i" else b""
        described.append((name, x.dtype, tuple(x.shape), value))
    return frozenset(described)


def _walk(
    graph: Graph,
    behind: ChainMap,
    fed: set[str],
    outer: Node | None,
    tensors: Mapping[str, Any],
    computed: Collection[str],
) -> Iterator[Use]:
    """Yield the uses in one graph.

    Args:
      behind: the views of tensors that each value is, by name; it is extended.
      fed: the values that depend on the graph's inputs.
      outer: the node of the main graph that the graph is in; None in the main graph itself.
      tensors, computed: as in `uses`.
    """
    for name in tensors.keys() & graph.weights:
        behind[name] = _view_whole(name, tensors)
    for node in graph.nodes:
        top = outer or node
        new = _views(node, behind, fed, tensors)
        first = len(node.inputs) if node.op.name in _SEVERAL else 1  # inputs that results view
        for i, name in enumerate(() if node.op.name in SIZES else node.inputs):
            for view in behind.get(name) or ():
                rank = len(tensors[view.name].shape)
                passes = node.body is not None or (bool(new) and i < first)
                yield Use(view, node, i, rank, top, passes)
        if new:
            behind.update(dict.fromkeys(filter(None, node.outputs), new))
        if outer is None and computed:
            behind.update({n: _view_whole(n, tensors) for n in node.outputs if n in computed})
        if not fed.isdisjoint(node.reads):
            fed.update(node.outputs)
        for g in node.subgraphs:
            visible = behind.new_child(dict.fromkeys(g.inputs))
            yield from _walk(g, visible, {*fed, *g.inputs}, top, tensors, computed)
        if node.body is not None:
            pairs = [*zip(node.body.inputs, node.inputs, strict=False)]
            inner = {local: behind.get(name) for local, name in pairs}
            for local, name in node.body.lifted.items():
                if name in tensors:
                    inner[local] = _view_whole(name, tensors)
            fed_inside = {local for local, name in pairs if name in fed}
            yield from _walk(node.body, ChainMap(inner), fed_inside, top, tensors, computed)


def _view_whole(name: str, tensors: Mapping[str, Any]) -> tuple[View, ...]:
    shape = tuple(tensors[name].shape)
    return (View(name, tuple(range(len(shape))), shape),)


def _views(
    node: Node, behind: Mapping[str, Any], fed: set[str], tensors: Mapping[str, Any]
) -> tuple[View, ...]:
    """Return the views that the results of a node are; none if it computes something."""
    name, inputs = node.op.name, node.inputs
    if not node.op.view and name not in (*PARTS, *_RESAMPLES, *_SEQUENCES):
        return ()
    views: tuple[View, ...] = (behind.get(inputs[0]) if inputs else None) or ()
    others = [tensors.get(name) for name in inputs[1:]]
    if node.op.view:
        return tuple(_view_elementwise(view, node, others) for view in views)
    if node.op.domain:
        return ()
    if name in _RESAMPLES:
        return tuple(replace(view, axes=None, shape=(), part=True) for view in views)
    # the sizes of views may depend on data: a table that is resized to the image
    if name == "Concat" and (fed.isdisjoint(inputs) or all(map(behind.get, inputs))):
        joined = [view for i in inputs for view in behind.get(i) or ()]
        return _concat_views(joined, node.attributes.get("axis", 1))
    if name in ("Slice", "Split"):
        return tuple(_view_slice(view, node, others) for view in views)
    if name in _SEQUENCES and node.attributes.get("keepdims", 1):
        return tuple(replace(view, part=True) for view in views)
    if name == "Gather" and inputs[1] not in fed:
        return tuple(_view_gather(view, node, others[0]) for view in views)
    if name == "GatherND" and inputs[1] not in fed:
        return tuple(replace(view, axes=None, shape=(), part=True) for view in views)
    if name == "Tile":
        return tuple(_view_tile(view, others[0]) for view in views)
    if name == "Expand":
        return tuple(_view_expand(view, others[0]) for view in views)
    return ()


def _view_elementwise(view: View, node: Node, others: Sequence[Any]) -> View:
    """Return a view behind one that keeps all numbers; `others` are the node's other inputs."""
    axes, before = view.axes, view.shape
    if node.op.same_axes:
        return view
    view = replace(view, in_rows=False)
    if axes is None:
        return view
    if node.op.name == "Transpose":
        order = node.attributes.get("perm", range(len(axes))[::-1])
        if {*order} != {*range(len(axes))}:  # an invalid perm, which an evaluation will report
            return replace(view, axes=None, shape=())
        shape = tuple(before[i] for i in order)
        return replace(view, axes=tuple(axes[i] for i in order), shape=shape)
    unknown = replace(view, axes=None, shape=())
    if not all(isinstance(value, np.ndarray) for value in others):
        return unknown
    # Reshape, Flatten, Squeeze, Unsqueeze: followed where only axes of length one come and go
    after = _result(node, before, others)
    if after is None:
        return unknown
    in_rows = axes[:1] == (0,) and after[:1] == before[:1] and len(after) == 2 and not view.part
    view, unknown = replace(view, in_rows=in_rows), replace(unknown, in_rows=in_rows)
    if after == before:
        return view
    # the axes longer than one keep their order, so they match one by one
    long = [a for a, n in zip(axes, before, strict=True) if n != 1]
    if [n for n in after if n != 1] != [n for n in before if n != 1]:
        return unknown
    axes = tuple(None if n == 1 else long.pop(0) for n in after)
    return replace(view, axes=axes, shape=after)


def _view_slice(view: View, node: Node, others: Sequence[Any]) -> View:
    """Return a view behind Slice or Split, with the same axes."""
    shape = view.shape
    if view.axes is not None and all(isinstance(value, np.ndarray) for value in others):
        after = _result(node, shape, others)
        shape = shape if after is None else after
    return replace(view, shape=shape, part=True)


def _result(node: Node, shape: tuple[int, ...], others: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the shape of a node's first result for data of a shape; None if it does not fit."""
    results = evaluate(node, [np.zeros(shape, np.int8), *others])
    return None if results is None else results[0].shape


def evaluate(node: Node, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
    """Evaluate a node on known inputs; None if it fails, which an evaluation will report better."""
    wrong = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)
    counts = {name: len(node.outputs) for name, what in node.op.context if what == "outputs"}
    try:
        with np.errstate(all="ignore"):
            y = node.op(*inputs, **node.attributes, **counts)
    except (Error, *wrong):
        return None
    return y if isinstance(y, tuple) else (y,)


def _view_gather(view: View, node: Node, indices: Any) -> View:
    """Return a view behind Gather; an index without axes drops the axis."""
    axes, shape = view.axes, view.shape
    if not axes or not isinstance(indices, np.ndarray) or indices.ndim > 1:
        return replace(view, axes=None, shape=(), part=True)
    axis = node.attributes.get("axis", 0) % len(axes)
    if indices.ndim:
        shape = (*shape[:axis], indices.size, *shape[axis + 1 :])
        return replace(view, shape=shape, part=True)
    gathered = axes[axis]
    return replace(
        view,
        axes=(*axes[:axis], *axes[axis + 1 :]),
        shape=(*shape[:axis], *shape[axis + 1 :]),
        apart=view.apart if gathered is None else (*view.apart, gathered),
        part=True,
    )


def _view_expand(view: View, target: Any) -> View:
    """Return a view behind Expand; the rank is taken to stay if the target is not known."""
    axes, before = view.axes, view.shape
    if axes is None or not isinstance(target, np.ndarray) or target.ndim != 1:
        return replace(view, expanded=True)
    more = max(0, len(target) - len(before))
    axes, before = (None,) * more + axes, (1,) * more + before
    padded = (1,) * (len(before) - len(target)) + tuple(int(n) for n in target)
    pairs = [*zip(before, padded, strict=True)]
    expanded = tuple(a if n != 1 or m == 1 else None for a, (n, m) in zip(axes, pairs, strict=True))
    return replace(view, axes=expanded, shape=tuple(map(max, pairs)), expanded=True)


def _view_tile(view: View, repeats: Any) -> View:
    """Return a view behind Tile; unknown repeats are taken to be along axes of length one."""
    axes, before = view.axes, view.shape
    if axes is None or not isinstance(repeats, np.ndarray) or repeats.shape != (len(before),):
        return replace(view, expanded=True)
    pairs = [*zip(before, map(int, repeats), strict=True)]
    if any(n > 1 and k != 1 for n, k in pairs):
        return replace(view, axes=None, shape=(), expanded=True)
    return _view_expand(view, np.array([n * k for n, k in pairs]))


def _concat_views(views: Sequence[View], axis: int) -> tuple[View, ...]:
    """Return the views behind Concat, one for each tensor; its axes are unknown if views differ."""
    total = sum(view.shape[axis] for view in views if -len(view.shape) <= axis < len(view.shape))
    once: dict[str, View] = {}
    for view in views:
        joined = replace(view, part=True)
        if -len(view.shape) <= axis < len(view.shape):
            at = axis % len(view.shape)
            joined = replace(joined, shape=(*view.shape[:at], total, *view.shape[at + 1 :]))
        if once.setdefault(view.name, joined) != joined:
            once[view.name] = replace(joined, axes=None, shape=())
    return tuple(once.values())


@dataclass(frozen=True)
class Weight:
    """The meaning of a tensor to all the operators that read it."""

    matrix: Matrix | None
    """The meaning of its axes, by the first use that tells; None if it is not a matrix."""
    start: float | None
    """The constant that a fresh weight is filled with; None if it is drawn at random."""
    dense: str
    """Why it cannot be sparse; empty where every use is a product in which it can."""
    shape: tuple[int, ...] = ()
    """The shape of the matrix, which is not that of the tensor where codes are packed."""
    storage: Storage | None = None
    """How a quantized matrix is stored; None for a floating-point tensor, and where an operator
    reads the tensor that cannot add a low-rank change to the matrix."""
    is_vector: bool = False
    """Whether one axis at most is longer than 1, besides those that layers are stacked along."""


def weights(graph: Graph, tensors: Mapping[str, Any]) -> dict[str, Weight]:
    """Return the meaning of each tensor to the operators that read it, in the order of first use.

    LoRA, `reinitialize`, sparsity and the summary are based on it. The graph keeps the result.
    """

    def find() -> dict[str, Weight]:
        uses_of = uses_by_tensor(graph, tensors)
        return {
            name: _weight(tensors[name], [u for u in uses_of.get(name, ()) if u.node.body is None])
            for name in dict.fromkeys([*uses_of, *tensors])
        }

    return {**graph.recall(("weights", (*tensors,), _describe(tensors)), find)}


def _weight(tensor: Any, all_uses: Sequence[Use]) -> Weight:
    shape = tuple(tensor.shape)
    used = [use for use in all_uses if not use.passes]
    # find the axes along which a tensor stacks weights: each index has a reader of its own (a
    # table of which one row is read, as that of BERT's token types may be, is no stack)
    dropped = {
        tuple(axis for axis, n in enumerate(shape) if n > 1 and axis not in use.view.axes)
        if use.view.axes is not None
        else ()
        for use in used
    }
    axes = dropped.pop() if len(dropped) == 1 else ()
    stacked = axes if len(used) >= math.prod(shape[axis] for axis in axes) else ()
    layer = [n for axis, n in enumerate(shape) if axis not in stacked]
    is_vector = math.prod(layer) == max(layer, default=1)
    # final readers first, then views that mean something by themselves (a Gather of a table, but
    # not one that takes the weight of a layer out of a stack)
    ordered = [*used, *(use for use in all_uses if use.passes and not stacked)]
    matrix = next((place for use in ordered if (place := use.matrix) is not None), None)
    start = None
    if matrix is None:
        trained = [use for use in used if use.node.op.role(use.position) is not None]
        start = trained[0].node.op.start(trained[0].position) if trained else None
        if start is None and is_vector:
            start = 0.0  # a vector whose operator declares nothing is taken for a bias
    reasons = [use.dense for use in used] or ["no factor of a matrix product"]
    storage = None if matrix is None else _storage(tensor, all_uses)
    dense = next(filter(None, reasons), "")
    return Weight(matrix, start, dense, storage.shape if storage else shape, storage, is_vector)


def _storage(tensor: Any, all_uses: Sequence[Use]) -> Storage | None:
    """Return the storage of a quantized matrix; None if a reader cannot add an adapter to it."""
    shape, direct = tuple(tensor.shape), direct_uses(all_uses)
    if len(direct) < sum(use.is_direct for use in all_uses):
        # behind a Reshape of codes, only rows can have a change
        others = [use for use in all_uses if not use.is_direct]
        if not direct or any(use.matrix is None for use in others):
            return None
    narrow = not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.dtype.itemsize == 1
    if not narrow or not all(
        use.node.op.takes(use.position, LowRank, ChangedWeight) for use in direct
    ):
        return None
    for use in direct:
        storage = use.node.op.storage(use.position, tensor, use.node.attributes)
        return storage or Storage(shape, str(tensor.dtype))
    return None
