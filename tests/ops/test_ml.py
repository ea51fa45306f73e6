"""ai.onnx.ml beyond the table in tests/ops/cases/ml.py: maps, gradients, pipelines, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from jax.test_util import check_grads
from onnx import TensorProto, helper
from scipy.special import softmax

import jaxonnx
from jaxonnx.errors import NodeError
from jaxonnx.registry import lookup
from tests.support.lazy_cases import Module

ensemble, samples = Module("sklearn.ensemble"), Module("sklearn.datasets")
ML = "ai.onnx.ml"
X = np.array([[1, -2, 3], [0.25, 0, 0.5], [-1, -4, -2]], np.float32)


def tensor_type(kind, shape=None):
    return helper.make_tensor_type_proto(kind, shape)


def map_type(key, kind):
    return helper.make_map_type_proto(key, tensor_type(kind, []))


FLOAT, INT, TEXT = (
    tensor_type(kind) for kind in (TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING)
)


def model_of(nodes, inputs, outputs, version=3):
    """A model; `inputs` and `outputs` map names to types."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_value_info(name, kind) for name, kind in inputs.items()],
        [helper.make_value_info(name, kind) for name, kind in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(ML, version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def runtime(model, **inputs):
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs, outputs, domain=ML, **attributes)


def function(op, outputs=1, **attributes):
    """One operator on x as a pure function of it; the last output."""
    names = ["y", "z"][:outputs]
    kinds = dict(zip(names, [FLOAT] if outputs == 1 else [INT, FLOAT], strict=True))
    model = jaxonnx.load(model_of([node(op, ["x"], names, **attributes)], {"x": FLOAT}, kinds))

    def f(x):
        y = model.apply(model.params, x)
        return y[-1] if outputs > 1 else y

    return f


@pytest.mark.parametrize("keys", ["int", "str"])
def test_zip_map(keys):
    labels = [4, 2, 8] if keys == "int" else ["a", "b", "c"]
    name = "classlabels_int64s" if keys == "int" else "classlabels_strings"
    kind = map_type(TensorProto.INT64 if keys == "int" else TensorProto.STRING, TensorProto.FLOAT)
    model = model_of(
        [node("ZipMap", ["x"], ["y"], **{name: labels})],
        {"x": FLOAT},
        {"y": helper.make_sequence_type_proto(kind)},
    )
    assert jaxonnx.load(model)(X) == runtime(model, x=X)[0]
    with pytest.raises(jaxonnx.Error, match="2 columns but 3 class labels"):
        jaxonnx.load(model)(X[:, :2])


@pytest.mark.parametrize(
    ("attributes", "value", "kind", "want"),
    [
        ({"cast_to": "TO_FLOAT"}, {3: 2.5, 1: -1.25}, FLOAT, [-1.25, 2.5]),
        ({"cast_to": "TO_INT64"}, {3: 2.5, 1: -1.25}, INT, [-1, 2]),
        ({"cast_to": "TO_STRING"}, {3: 2.5, 1: -1.25}, TEXT, ["-1.250000", "2.500000"]),
        ({"map_form": "SPARSE", "max_map": 4}, {3: 2.5, 1: 1.0}, FLOAT, [0, 1, 0, 2.5]),
        ({"cast_to": "TO_STRING"}, {3: "u", 1: "v"}, TEXT, ["v", "u"]),
        ({"cast_to": "TO_FLOAT"}, {3: "2.5", 1: "-1"}, FLOAT, [-1, 2.5]),
        ({"cast_to": "TO_INT64"}, {3: "2", 1: "-1"}, INT, [-1, 2]),
    ],
)
def test_cast_map(attributes, value, kind, want):
    is_text = isinstance(value[3], str)
    values = TensorProto.STRING if is_text else TensorProto.FLOAT
    model = model_of(
        [node("CastMap", ["x"], ["y"], **attributes)],
        {"x": map_type(TensorProto.INT64, values)},
        {"y": kind},
    )
    got = jaxonnx.load(model)(value)
    assert got.tolist() == [want]
    assert got.dtype == {"f": np.float32, "i": np.int64, "O": object}[got.dtype.kind]
    if not is_text:  # which onnxruntime's Python interface cannot be given
        assert runtime(model, x=value)[0].tolist() == [want]


def test_a_sparse_map_has_bounds():
    attributes = {"map_form": "SPARSE", "max_map": 2}
    model = model_of(
        [node("CastMap", ["x"], ["y"], **attributes)],
        {"x": map_type(TensorProto.INT64, TensorProto.FLOAT)},
        {"y": FLOAT},
    )
    with pytest.raises(jaxonnx.Error, match=r"keys must be in \[0, 1\]"):
        jaxonnx.load(model)({2: 1.0})


@pytest.mark.parametrize(
    ("vocabulary", "value", "kind", "want"),
    [
        (["a", "b", "c"], {"c": 1.5, "a": -2.0}, FLOAT, [-2, 0, 1.5]),
        (["a", "b", "c"], {"b": 3}, INT, [0, 3, 0]),
        ([4, 2, 8], {8: 1.5, 4: -2.0}, FLOAT, [-2, 0, 1.5]),
        ([4, 2, 8], {8: "u"}, TEXT, ["", "", "u"]),
    ],
)
def test_dict_vectorizer(vocabulary, value, kind, want):
    named = isinstance(vocabulary[0], str)
    attributes = {"string_vocabulary" if named else "int64_vocabulary": vocabulary}
    key = TensorProto.STRING if named else TensorProto.INT64
    model = model_of(
        [node("DictVectorizer", ["x"], ["y"], **attributes)],
        {"x": map_type(key, kind.tensor_type.elem_type)},
        {"y": kind},
    )
    vectorize = jaxonnx.load(model)
    assert vectorize(value).tolist() == [want]
    if kind is FLOAT:  # onnxruntime's Python interface takes no other maps
        assert runtime(model, x=value)[0].tolist() == [want]
    unknown = {"z" if named else 99: next(iter(value.values()))}
    with pytest.raises(jaxonnx.Error, match="not in the vocabulary"):
        vectorize(unknown)


SVM = {
    "support_vectors": [1.0, 0, 1, -1, 0.5, 0, 0, 2, 1, 0.5, -1, 0],
    "kernel_params": [0.5, 0.25, 3.0],
    "coefficients": [1.0, -0.5, 0.25, -1, 0.5, -0.25, 0.75, 1],
    "vectors_per_class": [2, 1, 1],
    "rho": [0.1, -0.2, 0.3],
    "classlabels_ints": [4, 2, 8],
}
CHANCES = {"prob_a": [-1.5, -0.5, -2.0], "prob_b": [0.1, 0.2, -0.3]}
AFFINE = {"coefficients": [0.5, 0.25, -0.5, 1.0, 0.0, 0.25], "intercepts": [0.125, 0.5]}


@pytest.mark.deep
@pytest.mark.parametrize(
    "f",
    [
        *(function("SVMClassifier", 2, kernel_type=k, **SVM) for k in ("POLY", "RBF", "SIGMOID")),
        function("SVMClassifier", 2, kernel_type="RBF", **SVM, **CHANCES),
        function(
            "LinearClassifier", 2, classlabels_ints=[4, 2], post_transform="SOFTMAX", **AFFINE
        ),
        function("LinearRegressor", targets=2, post_transform="LOGISTIC", **AFFINE),
        function("LinearRegressor", targets=2, post_transform="SOFTMAX_ZERO", **AFFINE),
        *(function("Normalizer", norm=norm) for norm in ("MAX", "L1", "L2")),
        function("Scaler", offset=[0.5], scale=[2.0]),
        function("Imputer", imputed_value_floats=[1.0], replaced_value_float=0.25),
    ],
)
def test_gradients(f):
    """In float32 and with a wide step, because the outputs are tensor(float)."""
    x = X + np.float32(0.03)
    check_grads(jax.jit(f), (x,), order=1, modes=["fwd", "rev"], eps=1e-2, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_the_gradient_of_normalising_zeros_is_the_identity(norm):
    f = function("Normalizer", norm=norm)
    jacobian = jax.jacrev(lambda x: f(x[None])[0])(jnp.zeros(3))
    np.testing.assert_array_equal(jacobian, np.eye(3))


def test_trees_have_gradient_zero():
    nodes, votes = forest_of(fitted_forest())
    f = function("TreeEnsembleClassifier", 2, **nodes, **votes, classlabels_int64s=[0, 1, 2])
    x = samples.load_iris().data[:2].astype(np.float32)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: f(x).sum()))(x), np.zeros((2, 4)))


def test_transforms_of_a_single_score():
    """onnxruntime leaves these untransformed; the specification does not."""
    one = {"coefficients": [0.25, 0.0, 0.125]}
    score = X @ np.array([0.25, 0, 0.125], np.float32)
    got = function("LinearRegressor", post_transform="LOGISTIC", **one)(X)
    np.testing.assert_allclose(got[:, 0], 1 / (1 + np.exp(-score)), rtol=1e-6)
    labels = {"classlabels_ints": [4, 2], "intercepts": [0.0]}
    got = function("LinearClassifier", 2, post_transform="SOFTMAX", **one, **labels)(X)
    np.testing.assert_allclose(got, softmax(np.stack([-score, score], 1), axis=1), rtol=1e-6)


def test_probit_is_exact():
    p = np.array([[0.5], [0.975], [0.1]], np.float32)
    got = function("LinearRegressor", post_transform="PROBIT", coefficients=[1.0])(p)
    np.testing.assert_allclose(got[:, 0], [0, 1.959964, -1.2815516], atol=1e-5)


def test_softmax_zero_of_zeros():
    got = function("LinearRegressor", post_transform="SOFTMAX_ZERO", **AFFINE | {"targets": 2})
    zero = np.linalg.lstsq(
        np.reshape(AFFINE["coefficients"], (2, 3)), -np.array(AFFINE["intercepts"]), rcond=None
    )[0]
    got = got(zero[None].astype(np.float32))
    np.testing.assert_allclose(got, [[0.5, 0.5]])


def test_label_encoder_where_onnxruntime_departs_from_the_specification():
    """Of repeated keys the last counts from version 4 on; NaN is a key from version 2 on."""
    table = {"keys_floats": [1.0, float("nan"), 1.0], "values_int64s": [5, 6, 7]}
    x = np.array([1, np.nan, 2], np.float32)
    for version, want in ((2, [5, 6, -1]), (4, [7, 6, -1])):
        encode = node("LabelEncoder", ["x"], ["y"], **table)
        model = jaxonnx.load(model_of([encode], {"x": FLOAT}, {"y": INT}, version))
        np.testing.assert_array_equal(model(x), want)


def test_string_labels_need_concrete_scores():
    nodes = [
        node("LinearClassifier", ["x"], ["y", "z"], classlabels_strings=["a", "b"], **AFFINE),
    ]
    model = jaxonnx.load(model_of(nodes, {"x": FLOAT}, {"y": TEXT, "z": FLOAT}))
    labels, scores = model(X)
    assert set(labels) <= {"a", "b"}
    assert scores.shape == (3, 2)
    with pytest.raises(jaxonnx.Error, match="string labels cannot be compiled"):
        jax.jit(model.apply)(model.params, X)


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        ("Normalizer", {"norm": "L3"}, "norm must be 'MAX'.*got 'L3'"),
        ("Imputer", {"imputed_value_floats": [1.0, 2.0]}, "1 or 3 imputed values"),
        ("LinearRegressor", {"coefficients": [1.0]}, "1 x 3 coefficients"),
        ("LinearRegressor", {"coefficients": [1.0] * 3, "post_transform": "EXP"}, "post_transform"),
        ("OneHotEncoder", {}, "exactly one of cats_int64s, cats_strings"),
        ("OneHotEncoder", {"cats_int64s": [1], "zeros": 0}, "none of the categories"),
        ("SVMRegressor", {"coefficients": [1.0]}, "rho"),
        ("SVMClassifier", SVM | {"prob_a": [1.0] * 3}, "prob_a and prob_b must have one length"),
        ("FeatureVectorizer", {"inputdimensions": [1, 2]}, "1 inputs, but 2"),
    ],
)
def test_what_is_refused(op, attributes, message):
    with pytest.raises(jaxonnx.Error, match=message):
        function(op, **attributes)(X)


TREE = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [0, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_values": [0.0, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
    "target_treeids": [0, 0],
    "target_nodeids": [1, 2],
    "target_ids": [0, 0],
    "target_weights": [1.0, 2.0],
    "n_targets": 1,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes_truenodeids": [0, 0, 0]}, "cycle"),
        ({"nodes_truenodeids": [7, 0, 0]}, "tree 0 has no node 7"),
        ({"nodes_nodeids": [0, 1, 1]}, "twice"),
        (
            {"target_weights": [1.0]},
            "must have one length: {'leaves': 2, 'targets': 2, 'weights': 1",
        ),
        ({"nodes_modes": ["BRANCH_IN", "LEAF", "LEAF"]}, "unknown nodes_modes"),
        ({"nodes_featureids": [3, 0, 0]}, "feature 3 of 3"),
        ({"target_ids": [0, 1]}, "outside"),
        ({"base_values": [1.0, 2.0]}, "1 base_values"),
        ({"aggregate_function": "MEDIAN"}, "aggregate_function"),
    ],
)
def test_malformed_trees_are_refused(change, message):
    with pytest.raises(jaxonnx.Error, match=message):
        function("TreeEnsembleRegressor", **{**TREE, **change})(X)


def fitted_forest():
    iris = samples.load_iris()
    x = iris.data.astype(np.float32)
    return ensemble.RandomForestClassifier(8, max_depth=5, random_state=0).fit(x, iris.target)


def forest_of(model):
    """The trees of a scikit-learn ensemble as attributes, and the leaves' votes for every class."""
    rows, votes = [], []
    for t, estimator in enumerate(np.ravel(model.estimators_)):
        tree = estimator.tree_
        for i in range(tree.node_count):
            leaf = tree.children_left[i] < 0
            # scikit-learn compares float32 features with float64 thresholds
            split = np.float32(tree.threshold[i])
            if split > tree.threshold[i]:
                split = np.nextafter(split, np.float32(-np.inf))
            children = (0, 0) if leaf else (tree.children_left[i], tree.children_right[i])
            mode, feature = "LEAF" if leaf else "BRANCH_LEQ", max(int(tree.feature[i]), 0)
            rows.append((t, i, feature, mode, float(split), *map(int, children)))
            if leaf:
                votes += [(t, i, c, float(v)) for c, v in enumerate(tree.value[i][0])]
    names = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids")
    nodes = {f"nodes_{n}": list(c) for n, c in zip(names, zip(*rows, strict=True), strict=True)}
    names = ("class_treeids", "class_nodeids", "class_ids", "class_weights")
    return nodes, {n: list(c) for n, c in zip(names, zip(*votes, strict=True), strict=True)}


@pytest.mark.parametrize("labels", [[0, 1, 2], ["setosa", "versicolor", "virginica"]])
def test_a_scikit_learn_pipeline_with_zip_map(labels):
    """Scaler, random forest and ZipMap, as converters write it: labels and a list of maps."""
    x = samples.load_iris().data.astype(np.float32)
    forest = fitted_forest()
    nodes, votes = forest_of(forest)
    votes["class_weights"] = [w / 8 for w in votes["class_weights"]]
    kind = "strings" if isinstance(labels[0], str) else "int64s"
    classes = {f"classlabels_{kind}": labels}
    key = TensorProto.STRING if kind == "strings" else TensorProto.INT64
    model = model_of(
        [
            node("Scaler", ["x"], ["scaled"], offset=[0.0] * 4, scale=[1.0] * 4),
            node("TreeEnsembleClassifier", ["scaled"], ["label", "p"], **nodes, **votes, **classes),
            node("ZipMap", ["p"], ["maps"], **classes),
        ],
        {"x": FLOAT},
        {
            "label": TEXT if kind == "strings" else INT,
            "maps": helper.make_sequence_type_proto(map_type(key, TensorProto.FLOAT)),
        },
    )
    label, maps = jaxonnx.load(model)(x)
    want_label, want_maps = runtime(model, x=x)
    np.testing.assert_array_equal(label, np.asarray(want_label, label.dtype))
    for got, want in zip(maps, want_maps, strict=True):
        assert list(got) == list(want)
        np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-5, atol=1e-6)
    chances = np.array([list(row.values()) for row in maps])
    np.testing.assert_allclose(chances, forest.predict_proba(x), atol=1e-5)
    np.testing.assert_array_equal(label, np.array(labels)[forest.predict(x)])


@pytest.mark.deep
def test_gradient_boosting_is_compiled_whole():
    iris = samples.load_iris()
    x, y = iris.data[:, :3].astype(np.float32), iris.data[:, 3]
    boosted = ensemble.GradientBoostingRegressor(n_estimators=10, max_depth=3, random_state=0).fit(
        x, y
    )
    nodes, votes = forest_of(boosted)
    votes = {name.replace("class", "target"): column for name, column in votes.items()}
    votes["target_weights"] = [0.1 * w for w in votes["target_weights"]]
    base = [float(boosted.init_.constant_[0, 0])]
    f = function("TreeEnsembleRegressor", n_targets=1, base_values=base, **nodes, **votes)
    got = jax.jit(f)(x)
    np.testing.assert_allclose(got[:, 0], boosted.predict(x), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda row: f(row)[0])(x), got, rtol=1e-6)


def test_a_tree_ensemble_has_lists_of_one_length():
    """A shorter list of features was read at its end for the nodes beyond."""
    run = lookup("ai.onnx.ml", "TreeEnsemble", 5)
    with pytest.raises(NodeError, match="must have one length"):
        run(
            np.ones((3, 2)),
            leaf_targetids=[0, 1],
            leaf_weights=np.ones(2),
            n_targets=2,
            nodes_falseleafs=[1],
            nodes_falsenodeids=[0],
            nodes_featureids=[0, 1],
            nodes_modes=np.uint8([0]),
            nodes_splits=np.ones(1),
            nodes_trueleafs=[1],
            nodes_truenodeids=[1],
            tree_roots=[0],
        )
