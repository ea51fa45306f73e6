"""Tree ensembles of ai.onnx.ml: all trees are walked at once, one level per step."""

import operator
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._limits import check_size, check_time
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import table
from jaxonnx.ops.ml.features import ML, real
from jaxonnx.ops.ml.linear import (
    Transform,
    labels_of,
    number_of_classes,
    transform,
    transform_binary,
)
from jaxonnx.registry import op

_COMPARISONS = {
    "BRANCH_LEQ": operator.le,
    "BRANCH_LT": operator.lt,
    "BRANCH_GTE": operator.ge,
    "BRANCH_GT": operator.gt,
    "BRANCH_EQ": operator.eq,
    "BRANCH_NEQ": operator.ne,
}
_MODES = [*_COMPARISONS, "BRANCH_MEMBER"]
_LEAF = -1
_TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]
_AGGREGATES = ["AVERAGE", "SUM", "MIN", "MAX"]


class Forest(NamedTuple):
    """All nodes of all trees in one numbering; a leaf has mode -1 and itself as children."""

    roots: np.ndarray
    feature: np.ndarray
    mode: np.ndarray
    split: np.ndarray
    true: np.ndarray
    false: np.ndarray
    missing_true: np.ndarray
    """Whether NaN takes the true branch."""
    members: np.ndarray
    """The set [nodes, M] that BRANCH_MEMBER tests, padded with NaN."""


def _depth(forest: Forest) -> int:
    """Return the depth of the deepest tree; raise if a tree has a cycle."""
    node, depth = np.unique(forest.roots), 0
    while True:
        check_time()
        node = node[forest.mode[node] != _LEAF]
        if not node.size:
            return depth
        node = np.unique([forest.true[node], forest.false[node]])
        depth += 1
        if depth > len(forest.true):
            raise NodeError("the trees contain a cycle")


def walk(x, forest: Forest):
    """Return the leaf [N, trees] that each row of x [N, C] falls into."""
    used = np.unique(forest.mode[forest.mode != _LEAF])
    if forest.feature.max() >= x.shape[1]:
        raise NodeError(f"the trees look at feature {forest.feature.max()} of {x.shape[1]}")
    tables = jax.tree.map(lambda field: jnp.asarray(table(field)), forest)

    def step(_, node):
        value = jnp.take_along_axis(x, tables.feature[node], axis=1)
        split, mode = tables.split[node], tables.mode[node]
        goes = (value != value) & tables.missing_true[node]
        for name in used:
            if name == _MODES.index("BRANCH_MEMBER"):
                holds = (value[..., None] == tables.members[node]).any(axis=-1)
            else:
                holds = _COMPARISONS[_MODES[name]](value, split)
            goes |= holds & (mode == name)
        return jnp.where(goes, tables.true[node], tables.false[node])

    # a leaf is its own child, so a walk that ends early waits there for the longest one
    start = jnp.broadcast_to(tables.roots, (x.shape[0], len(forest.roots)))
    return jax.lax.fori_loop(0, _depth(forest), step, start)


def vote(x, forest: Forest, votes, n_targets, function):
    """Aggregate the votes of the leaves that each row of x reaches, per target: [N, n_targets].

    `votes` are nodes, targets and weights, in parallel. A target without a vote has 0.
    """
    nodes, targets, weights = (np.asarray(field) for field in votes)
    _require_lists(leaves=nodes, targets=targets, weights=weights)
    if targets.size and not 0 <= targets.min() <= targets.max() < n_targets:
        raise NodeError(f"the votes are for targets outside [0, {n_targets - 1}]")
    neutral, accumulate, reduce = {
        "MIN": (np.inf, np.minimum, jnp.min),
        "MAX": (-np.inf, np.maximum, jnp.max),
    }.get(function, (0, np.add, jnp.sum))
    # one row a node: a leaf may hold several votes, even for one target
    check_size((len(forest.true), n_targets), weights.dtype, host=True)
    ballot = np.full((len(forest.true), n_targets), neutral, weights.dtype)
    accumulate.at(ballot, (nodes, targets), weights)
    scores = reduce(jnp.asarray(table(ballot))[walk(x, forest)], axis=1)
    if function == "AVERAGE":
        return scores / len(forest.roots)
    return jnp.where(jnp.isinf(scores), 0, scores) if neutral else scores


@op("TreeEnsemble", since=5, domain=ML)
def tree_ensemble(
    x,
    *,
    aggregate_function: Literal[0, 1, 2, 3] = 1,
    leaf_targetids,
    leaf_weights,
    membership_values=None,
    n_targets=None,
    nodes_falseleafs,
    nodes_falsenodeids,
    nodes_featureids,
    nodes_hitrates=None,
    nodes_missing_value_tracks_true=None,
    nodes_modes,
    nodes_splits,
    nodes_trueleafs,
    nodes_truenodeids,
    post_transform: Literal[0, 1, 2, 3, 4] = 0,
    tree_roots,
):
    """Targets [N, n_targets] of x [N, C]; the leaves are numbered after the interior nodes."""
    del nodes_hitrates  # how often a node is visited: a hint for the order in memory
    count, leaves = len(nodes_modes), len(leaf_weights)
    _require_lists(
        nodes_modes=nodes_modes,
        nodes_splits=nodes_splits,
        nodes_featureids=nodes_featureids,
        nodes_truenodeids=nodes_truenodeids,
        nodes_trueleafs=nodes_trueleafs,
        nodes_falsenodeids=nodes_falsenodeids,
        nodes_falseleafs=nodes_falseleafs,
    )
    leaf_rows = np.arange(count, count + leaves)

    def children(ids, leafs):
        ids, leafs = np.asarray(ids), np.asarray(leafs, bool)
        if (ids < 0).any() or (ids >= np.where(leafs, leaves, count)).any():
            raise NodeError("a child is outside the nodes or the leaves")
        return np.concatenate([np.where(leafs, count + ids, ids), leaf_rows])

    modes = np.concatenate([np.asarray(nodes_modes, np.int64), np.full(leaves, _LEAF)])
    forest = Forest(
        roots=np.asarray(tree_roots),
        feature=np.concatenate([nodes_featureids, np.zeros(leaves, np.int64)]),
        mode=modes,
        split=np.concatenate([nodes_splits, np.zeros(leaves, nodes_splits.dtype)]),
        true=children(nodes_truenodeids, nodes_trueleafs),
        false=children(nodes_falsenodeids, nodes_falseleafs),
        missing_true=_missing(nodes_missing_value_tracks_true, count, leaves),
        members=_members(membership_values, modes, nodes_splits.dtype),
    )
    votes = (leaf_rows, leaf_targetids, leaf_weights)
    targets = 1 + max(leaf_targetids) if n_targets is None else n_targets
    y = vote(x, forest, votes, targets, _AGGREGATES[aggregate_function])
    return transform(y, _TRANSFORMS[post_transform], x.dtype)


def _missing(tracks, count, leaves=0):
    return np.concatenate([np.asarray(tracks or [0] * count, bool), np.zeros(leaves, bool)])


def _members(values, modes, dtype):
    """Read the sets of the BRANCH_MEMBER nodes, in their order, from one list delimited by NaNs."""
    nodes = np.flatnonzero(modes == _MODES.index("BRANCH_MEMBER"))
    values = np.zeros(0, dtype) if values is None else values
    ends = np.flatnonzero(np.isnan(values))
    sets = [part[~np.isnan(part)] for part in np.split(values, ends)[: len(nodes)]]
    if len(sets) < len(nodes) or (len(nodes) and len(ends) < len(nodes) - 1):
        raise NodeError(f"{len(nodes)} nodes test membership, but there are {len(sets)} sets")
    shape = len(modes), max(map(len, sets), default=0)
    check_size(shape, dtype, host=True)
    members = np.full(shape, np.nan, dtype)
    for node, values in zip(nodes, sets, strict=True):
        members[node, : len(values)] = values
    return members


def _require_lists(**attributes):
    """Return the values; raise unless all are there and have one length."""
    missing = [name for name, values in attributes.items() if values is None]
    if missing:
        raise NodeError(f"the attributes {missing} are missing")
    lengths = {name: len(values) for name, values in attributes.items()}
    if len(set(lengths.values())) > 1:
        raise NodeError(f"these attributes must have one length: {lengths}")
    return list(attributes.values())


def _either(floats, tensor):
    """Return a list of floats in float32, or the doubles of the tensor that may replace it."""
    if floats is not None and tensor is not None:
        raise NodeError("an attribute and its _as_tensor form must not both be given")
    return np.asarray(floats or [], np.float32) if tensor is None else tensor


class Nodes(TypedDict, total=False):
    """The attributes of the nodes of the two older operators, lists with an entry for each node."""

    nodes_falsenodeids: Any
    nodes_featureids: Any
    nodes_hitrates: Any
    nodes_hitrates_as_tensor: Any
    nodes_missing_value_tracks_true: Any
    nodes_modes: Any
    nodes_nodeids: Any
    nodes_treeids: Any
    nodes_truenodeids: Any
    nodes_values: Any
    nodes_values_as_tensor: Any


def _forest(
    nodes_values=None, nodes_values_as_tensor=None, nodes_missing_value_tracks_true=None, **nodes
):
    """Build the forest of the two older operators, and a function from (tree, node id) to node."""
    kinds = ("modes", "treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")
    required = {f"nodes_{kind}": nodes.get(f"nodes_{kind}") for kind in kinds}
    modes, treeids, nodeids, featureids, trueids, falseids = _require_lists(**required)
    values = _either(nodes_values, nodes_values_as_tensor)
    keys = list(zip(treeids, nodeids, strict=True))
    place = {key: i for i, key in enumerate(keys)}
    if len(place) < len(keys):
        raise NodeError("a node id occurs twice in one tree")
    unknown = set(modes) - {*_COMPARISONS, "LEAF"}
    if unknown:
        raise NodeError(f"unknown nodes_modes {sorted(unknown)}")

    def find(tree, node):
        if (tree, node) not in place:
            raise NodeError(f"tree {tree} has no node {node}")
        return place[tree, node]

    def children(ids):
        rows = enumerate(zip(modes, treeids, ids, strict=True))
        return np.array([i if m == "LEAF" else find(tree, child) for i, (m, tree, child) in rows])

    # the first node of a tree is its root: in reverse order it is the last to be written
    first = {tree: i for i, tree in reversed(list(enumerate(treeids)))}
    forest = Forest(
        roots=np.array(sorted(first.values())),
        feature=np.asarray(featureids),
        mode=np.array([_LEAF if mode == "LEAF" else _MODES.index(mode) for mode in modes]),
        split=values,
        true=children(trueids),
        false=children(falseids),
        missing_true=_missing(nodes_missing_value_tracks_true, len(keys)),
        members=np.zeros((len(keys), 0), np.float32),
    )
    return forest, find


@op("TreeEnsembleRegressor", since=1, domain=ML)
def tree_ensemble_regressor(
    x,
    *,
    aggregate_function: Literal["AVERAGE", "SUM", "MIN", "MAX"] = "SUM",
    base_values=None,
    base_values_as_tensor=None,
    n_targets=None,
    post_transform: Transform = "NONE",
    target_ids=None,
    target_nodeids=None,
    target_treeids=None,
    target_weights=None,
    target_weights_as_tensor=None,
    **nodes: Unpack[Nodes],
):
    """Targets [N, n_targets] of x [N, C] or [C]. Every transform is applied, also to one target."""
    forest, find = _forest(**nodes)
    trees, ids, voted = _require_lists(
        target_treeids=target_treeids, target_nodeids=target_nodeids, target_ids=target_ids
    )
    leaves = [find(*key) for key in zip(trees, ids, strict=True)]
    votes = (leaves, voted, _either(target_weights, target_weights_as_tensor))
    targets = 1 + max(voted) if n_targets is None else n_targets
    scores = vote(jnp.atleast_2d(real(x)), forest, votes, targets, aggregate_function)
    return transform(scores + _base(base_values, base_values_as_tensor, targets), post_transform)


@op("TreeEnsembleClassifier", since=1, domain=ML)
def tree_ensemble_classifier(
    x,
    *,
    base_values=None,
    base_values_as_tensor=None,
    class_ids=None,
    class_nodeids=None,
    class_treeids=None,
    class_weights=None,
    class_weights_as_tensor=None,
    classlabels_int64s=None,
    classlabels_strings=None,
    post_transform: Transform = "NONE",
    **nodes: Unpack[Nodes],
):
    """Label [N] and scores [N, classes] of x [N, C] or [C].

    The label is that of the greatest score before `post_transform`. If of two classes only one
    gets votes, its score decides alone: the second class wins above 0.5, or above 0 if a weight
    is negative, and votes for the first class stand for the second (onnxruntime's convention).
    """
    forest, find = _forest(**nodes)
    trees, ids, voted = _require_lists(
        class_treeids=class_treeids, class_nodeids=class_nodeids, class_ids=class_ids
    )
    leaves = [find(*key) for key in zip(trees, ids, strict=True)]
    weights = _either(class_weights, class_weights_as_tensor)
    classes = number_of_classes(classlabels_int64s, classlabels_strings)
    scores = vote(jnp.atleast_2d(real(x)), forest, (leaves, voted, weights), classes, "SUM")
    base = _either(base_values, base_values_as_tensor)
    if classes == 2 and len(set(voted)) == 1 and base.size < 2:
        mixed = bool((weights < 0).any())
        score = scores[:, voted[0]] + _base(base_values, base_values_as_tensor, 1)
        index = (score > (0 if mixed else 0.5)).astype(np.int32)
        if voted[0] == 0:
            scores = transform_binary(score, post_transform, opposite=mixed)
        else:
            scores = transform(jnp.stack([jnp.zeros_like(score), score], axis=-1), post_transform)
    else:
        scores = scores + _base(base_values, base_values_as_tensor, classes)
        index, scores = jnp.argmax(scores, axis=-1), transform(scores, post_transform)
    return labels_of(index, classlabels_int64s, classlabels_strings), scores


def _base(floats, tensor, size):
    base = table(_either(floats, tensor))
    if base.size not in (0, size):
        raise NodeError(f"{size} base_values are needed, not {base.size}")
    check_size([size], base.dtype, host=True)
    return base if base.size else np.zeros(size, base.dtype)
