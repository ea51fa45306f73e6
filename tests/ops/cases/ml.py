"""Cases of `jaxonnx/ops/ml*.py`, against onnxruntime.

The specification makes nearly all outputs tensor(float), which is too coarse for finite differences
in float64: the gradients are in tests/ops/test_ml.py.
"""

import itertools
from functools import partial

import numpy as np
from onnx import numpy_helper

from tests.ops.case_table import Case

ML = "ai.onnx.ml"
X = np.array([[1, -2, 3], [0, 0, 0], [-1, -4, -2], [0.5, 2, 0.25]], np.float32)
NAN = np.where(X == 0.5, np.nan, X).astype(np.float32)
WORDS = np.array([["b", "a"], ["z", "c"]], object)
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")

compiled = partial(Case, domain=ML, expected="ort", grad=())
texts = partial(compiled, jit=False, vmap=False)
# The first axis of every input is not one batch axis.
whole = partial(compiled, vmap=False)


def grow(trees, depth, votes, modes, seed=0):
    """A random forest as attributes, and its votes as (tree, node, target, weight) columns."""
    rng = np.random.default_rng(seed)
    rows, leaves = [], []

    def node(tree, level, count):
        me = next(count)
        if level == 0 or (level < depth and rng.random() < 0.2):
            rows.append((tree, me, 0, "LEAF", 0.0, 0, 0, 0))
            leaves.extend((tree, me, int(t), float(rng.integers(-8, 9)) / 8) for t in votes(rng))
        else:
            true, false = node(tree, level - 1, count), node(tree, level - 1, count)
            split = float(rng.integers(-4, 5)) / 2
            mode, feature = str(rng.choice(modes)), int(rng.integers(3))
            rows.append((tree, me, feature, mode, split, true, false, int(rng.integers(2))))
        return me

    for tree in range(trees):
        node(tree, depth, itertools.count())
    rows.sort(key=lambda row: row[:2])
    names = (
        "nodes_treeids",
        "nodes_nodeids",
        "nodes_featureids",
        "nodes_modes",
        "nodes_values",
        "nodes_truenodeids",
        "nodes_falsenodeids",
        "nodes_missing_value_tracks_true",
    )
    attributes = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    return attributes, [list(column) for column in zip(*leaves, strict=True)]


ORDERED = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT"]
ALL_MODES = [*ORDERED, "BRANCH_EQ", "BRANCH_NEQ"]


def regressors():
    op = partial(compiled, "TreeEnsembleRegressor", [NAN], until=3)
    for function in ("SUM", "AVERAGE", "MIN", "MAX"):
        nodes, (trees, ids, targets, weights) = grow(3, 3, lambda _: range(2), ALL_MODES)
        votes = {
            "target_treeids": trees,
            "target_nodeids": ids,
            "target_ids": targets,
            "target_weights": weights,
        }
        kind = {**nodes, **votes, "n_targets": 2, "aggregate_function": function}
        yield op({**kind, "base_values": [0.25, -0.5]}, id=function)
    for post_transform in TRANSFORMS:
        yield op({**kind, "post_transform": post_transform}, id=post_transform)
    nodes, (trees, ids, targets, weights) = grow(3, 3, lambda _: [0], ["BRANCH_LEQ"], seed=1)
    votes = {
        "target_treeids": trees,
        "target_nodeids": ids,
        "target_ids": targets,
        "target_weights": weights,
    }
    yield op({**nodes, **votes, "n_targets": 1, "base_values": [0.25]}, id="one")


def classifiers():
    op = partial(compiled, "TreeEnsembleClassifier", [NAN], outputs=2, until=3)
    for modes in (["BRANCH_LT"], ALL_MODES):
        for post_transform in TRANSFORMS:
            nodes, votes = forest_classifier(3, lambda _: range(3), modes)
            labels = {"classlabels_int64s": [7, 3, 9], "post_transform": post_transform}
            yield op({**nodes, **votes, **labels}, id=f"{len(modes)}-{post_transform}")
    yield op({**nodes, **votes, **labels, "base_values": [0.25, -0.5, 1.0]}, id="base")
    names = {"classlabels_strings": ["x", "y", "z"]}
    yield texts("TreeEnsembleClassifier", [NAN], {**nodes, **votes, **names}, outputs=2, until=3)
    for voted in (0, 1):
        for sign in ("mixed", "positive"):
            nodes, votes = forest_classifier(2, lambda _, v=voted: [v], ORDERED)
            if sign == "positive":
                votes["class_weights"] = [abs(w) for w in votes["class_weights"]]
            for post_transform in ("NONE", "LOGISTIC"):
                labels = {"classlabels_int64s": [7, 3], "post_transform": post_transform}
                yield op({**nodes, **votes, **labels}, id=f"{voted}-{sign}-{post_transform}")
        if voted == 0:
            yield op({**nodes, **votes, **labels, "base_values": [0.25]}, id="binary-base")


def forest_classifier(classes, votes, modes):
    nodes, (trees, ids, targets, weights) = grow(3, 3, votes, modes, seed=classes)
    return nodes, {
        "class_treeids": trees,
        "class_nodeids": ids,
        "class_ids": targets,
        "class_weights": weights,
    }


def stumps():
    """The version that deprecates the older operators, which onnxruntime therefore refuses."""
    nodes = {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [1, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_values": [0.0, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
    }
    votes = {"treeids": [0, 0], "nodeids": [1, 2], "ids": [0, 1], "weights": [1.0, 2.0]}
    targets = {f"target_{name}": column for name, column in votes.items()}
    classes = {f"class_{name}": column for name, column in votes.items()}
    low = X[:, 1] <= 0
    scores = np.stack([np.where(low, 1, 0), np.where(low, 0, 2)], axis=1).astype(np.float32)
    op = partial(compiled, since=5)
    yield op(
        "TreeEnsembleRegressor",
        [X],
        {**nodes, **targets, "n_targets": 2},
        expected=lambda x: scores,
    )
    yield op(
        "TreeEnsembleClassifier",
        [X],
        {**nodes, **classes, "classlabels_int64s": [7, 3]},
        outputs=2,
        expected=lambda x: (np.where(low, 7, 3), scores),
    )


def ensembles():
    """Splits, set membership and leaves that several nodes share."""
    structure = {
        "n_targets": 2,
        "tree_roots": [0, 2],
        "nodes_featureids": [0, 1, 2],
        "nodes_truenodeids": [1, 0, 2],
        "nodes_trueleafs": [0, 1, 1],
        "nodes_falsenodeids": [3, 1, 3],
        "nodes_falseleafs": [1, 1, 1],
        "nodes_missing_value_tracks_true": [0, 1, 0],
        "leaf_targetids": [0, 1, 0, 1],
        "nodes_modes": numpy_helper.from_array(np.array([0, 3, 6], np.uint8)),
    }
    for dtype in (np.float32, np.float64):
        tensors = {
            name: numpy_helper.from_array(np.array(values, dtype))
            for name, values in {
                "nodes_splits": [0.5, -0.25, 0],
                "leaf_weights": [1.5, -2, 0.25, 0.75],
                "membership_values": [3, -2, np.nan],
            }.items()
        }
        for function in range(4):
            attributes = {**structure, **tensors, "aggregate_function": function}
            yield compiled("TreeEnsemble", [NAN.astype(dtype)], attributes, since=5)


def svms():
    vectors = {
        "support_vectors": [1.0, 0, 1, -1, 0.5, 0, 0, 2, 1, 0.5, -1, 0, 1, 1, 1],
        "kernel_params": [0.5, 0.25, 3.0],
    }
    three = dict(
        vectors,
        vectors_per_class=[2, 2, 1],
        coefficients=[1.0, -0.5, 0.25, -1, 0.5, -0.25, 0.75, 1, -0.75, -1],
        rho=[0.1, -0.2, 0.3],
        classlabels_ints=[4, 2, 8],
    )
    two = dict(
        vectors,
        vectors_per_class=[3, 2],
        coefficients=[1.0, -0.5, 0.25, -1, 0.5],
        rho=[0.1],
        classlabels_ints=[4, 2],
    )
    chances = {"prob_a": [-1.5, -0.5, -2.0], "prob_b": [0.1, 0.2, -0.3]}
    svc = partial(compiled, "SVMClassifier", [X], outputs=2, rtol=1e-4)
    for kernel in ("LINEAR", "POLY", "RBF", "SIGMOID"):
        kind = {"kernel_type": kernel}
        yield svc({**three, **kind}, id=kernel)
        yield svc({**two, **kind}, id=f"binary-{kernel}")
        yield svc({**three, **kind, **chances}, id=f"chances-{kernel}")
        svr = dict(vectors, coefficients=two["coefficients"], rho=[0.5], n_supports=5)
        yield compiled("SVMRegressor", [X], {**svr, **kind}, rtol=1e-4, id=kernel)
    yield compiled("SVMRegressor", [X], {**svr, "one_class": 1}, id="outliers")
    linear = {"coefficients": [0.5, 1.0, -0.25], "rho": [0.5], "kernel_params": [0.0, 0.0, 0.0]}
    yield compiled("SVMRegressor", [X], linear, id="linear")
    for transform in TRANSFORMS[1:]:
        yield svc({**three, "post_transform": transform}, id=transform)
    yield svc({**two, "post_transform": "LOGISTIC"}, id="binary-LOGISTIC")
    yield svc({**two, "prob_a": [-1.5], "prob_b": [0.5]}, id="binary-chances")
    scores = {
        "coefficients": [0.5, 1, -0.25, 2, 0, 1, -1, 1, 1],
        "rho": [0.5],
        "kernel_params": [0.0, 0.0, 0.0],
    }
    scores["coefficients"] = [float(c) for c in scores["coefficients"]]
    yield svc({**scores, "classlabels_ints": [4, 2, 8]}, id="linear")
    named = {**three, "classlabels_strings": ["a", "b", "c"]}
    del named["classlabels_ints"]
    yield texts("SVMClassifier", [X], named, outputs=2, rtol=1e-4)


def linear_models():
    one = {"coefficients": [0.5, 0.25, -0.5], "intercepts": [0.125]}
    three = {
        "coefficients": [0.5, 0.25, -0.5, 1.0, 0.0, 0.25, -0.5, 0.5, 0.75],
        "intercepts": [0.125, 0.5, -0.25],
    }
    for transform in TRANSFORMS:
        post = {"post_transform": transform}
        labels = {"classlabels_ints": [4, 2, 8]}
        yield compiled(
            "LinearClassifier", [X], {**three, **labels, **post}, outputs=2, id=transform
        )
        yield compiled("LinearRegressor", [X], {**three, "targets": 3, **post}, id=transform)
    for transform in ("NONE", "LOGISTIC"):
        attributes = {**one, "classlabels_ints": [4, 2], "post_transform": transform}
        yield compiled("LinearClassifier", [X], attributes, outputs=2, id=f"binary-{transform}")
    for x in (X.astype(np.float64), X.astype(np.int32), X.astype(np.int64)):
        attributes = {**three, "classlabels_ints": [4, 2, 8]}
        yield compiled("LinearClassifier", [x], attributes, outputs=2, id=str(x.dtype))
    attributes = {**three, "classlabels_strings": ["a", "b", "c"]}
    yield texts("LinearClassifier", [X], attributes, outputs=2)
    yield compiled("LinearRegressor", [X], {"coefficients": one["coefficients"]}, id="plain")


def encoders():
    floats = np.array([1, 2, -0.5, 0], np.float32)
    for since in (2, 4):
        encode = partial(compiled, "LabelEncoder", since=since, until=3 if since == 2 else None)
        strings = partial(texts, "LabelEncoder", since=since, until=3 if since == 2 else None)
        table = {"keys_floats": [1.0, -0.5], "values_floats": [5.0, 6.0], "default_float": 0.5}
        yield encode([floats], table, id="float-float")
        yield encode(
            [floats], {"keys_floats": [1.0, -0.5], "values_int64s": [5, 6]}, id="float-int"
        )
        table = {"keys_int64s": [9, 3, 5], "values_floats": [5.0, 6.0, 7.0]}
        yield encode([np.array([[3, 9], [4, 5]])], table, id="int-float")
        yield strings([WORDS], {"keys_strings": ["a", "b"], "values_int64s": [5, 6]}, id="str-int")
        table = {"keys_int64s": [1, 2], "values_strings": ["x", "y"], "default_string": "?"}
        yield strings([np.array([1, 2, 3])], table, id="int-str")
        table = {"keys_strings": ["a"], "values_strings": ["x"]}
        yield strings([WORDS], table, id="str-str")
    tables = {
        "keys_tensor": numpy_helper.from_array(np.array([1, 2], np.int64)),
        "values_tensor": numpy_helper.from_array(np.array([0.5, 1.5], np.float64)),
        "default_tensor": numpy_helper.from_array(np.array([9], np.float64)),
    }
    yield compiled("LabelEncoder", [np.array([2, 1, 0])], tables, since=4, id="tensors")
    yield texts("LabelEncoder", [WORDS], {"classes_strings": ["a", "b", "c"]}, until=1, id="index")
    names = {"classes_strings": ["a", "b", "c"]}
    yield texts("LabelEncoder", [np.array([0, 2, 5, -1])], names, until=1, id="name")
    pairs = {"cats_strings": ["a", "b"], "cats_int64s": [4, 5]}
    yield texts("CategoryMapper", [WORDS], pairs, id="str-int")
    yield texts("CategoryMapper", [np.array([[4], [9]])], pairs, id="int-str")
    integers = {"cats_int64s": [1, 2, 3]}
    yield compiled("OneHotEncoder", [np.array([[1, 2], [3, 7]])], integers, id="int")
    yield compiled("OneHotEncoder", [np.array([1.5, 2, 3], np.float32)], integers, id="float")
    yield texts("OneHotEncoder", [WORDS], {"cats_strings": ["a", "b"]}, id="str")
    yield texts("OneHotEncoder", [np.array([1, 3])], {**integers, "zeros": 0}, id="strict")


def transforms():
    for x in (X, X.astype(np.float64), X.astype(np.int32), X.astype(np.int64)):
        name = str(x.dtype)
        shift = {"offset": [0.5, 0.25, 1.0], "scale": [2.0, 3.0, 0.5]}
        yield compiled("Scaler", [x], shift, id=name)
        yield compiled("Scaler", [x], {"offset": [0.5], "scale": [2.0]}, id=f"{name}-one")
        for norm in ("MAX", "L1", "L2"):
            yield compiled("Normalizer", [x], {"norm": norm}, id=f"{name}-{norm}")
        yield whole("FeatureVectorizer", [x, x], {"inputdimensions": [3, 3]}, id=name)
    yield compiled("Normalizer", [X[0]], {"norm": "L2"}, id="vector")
    yield whole("FeatureVectorizer", [X, X[:, :2]], {"inputdimensions": [2, 4]}, id="fitted")
    yield whole("FeatureVectorizer", [X[0], X[1]], {"inputdimensions": [3, 3]}, id="vectors")
    yield compiled("Binarizer", [X], {"threshold": 0.5})
    columns = np.array([2, 0])
    yield whole("ArrayFeatureExtractor", [X, columns])
    yield whole("ArrayFeatureExtractor", [X[0], columns], id="vector")
    yield whole("ArrayFeatureExtractor", [np.stack([X, -X]), columns], id="rank3")
    yield texts("ArrayFeatureExtractor", [WORDS, np.array([1])], id="strings")
    missing = {"imputed_value_floats": [9.0, 8.0, 7.0], "replaced_value_float": float("nan")}
    yield compiled("Imputer", [NAN], missing, id="nan")
    zero = {"imputed_value_floats": [9.0], "replaced_value_float": 0.0}
    yield compiled("Imputer", [X], zero, id="zero")
    three = {"imputed_value_int64s": [9], "replaced_value_int64": 3}
    yield compiled("Imputer", [X.astype(np.int64)], three, id="int")


CASES = [
    *transforms(),
    *encoders(),
    *linear_models(),
    *svms(),
    *regressors(),
    *classifiers(),
    *stumps(),
    *ensembles(),
]
