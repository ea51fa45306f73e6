"""Strings, against onnxruntime; ONNX's own cases are in tests/oracles/test_onnx_suite.py."""

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import jaxonnx


def element_type(x):
    is_text = x.dtype == object
    return onnx.TensorProto.STRING if is_text else helper.np_dtype_to_tensor_dtype(x.dtype)


def model_of(nodes, inputs, outputs, initializers=()):
    """A model of opset 20; `inputs` and `outputs` map names to example values."""

    def values(examples):
        return [
            helper.make_tensor_value_info(name, element_type(x), [None] * x.ndim)
            for name, x in examples.items()
        ]

    graph = helper.make_graph(nodes, "g", values(inputs), values(outputs), list(initializers))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 4)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def check(nodes, inputs, outputs, initializers=()):
    """jaxonnx and onnxruntime agree; gives the results."""
    model = model_of(nodes, inputs, outputs, initializers)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    want = session.run(None, inputs)
    got = jaxonnx.load(model)(*inputs.values())
    got = got if isinstance(got, tuple) else (got,)
    for a, b in zip(got, want, strict=True):
        assert np.shape(a) == np.shape(b)
        if np.asarray(a).dtype == object:
            np.testing.assert_array_equal(a, np.asarray(b, object))
        else:
            np.testing.assert_allclose(a, b, rtol=1e-6)
    return got


TEXT, FLAGS, NUMBERS, FLOATS = (
    np.zeros(1, dtype) for dtype in (object, bool, np.int64, np.float32)
)


def strings(*words):
    return np.array(words, object)


@pytest.mark.parametrize("case_change_action", ["NONE", "LOWER", "UPPER"])
@pytest.mark.parametrize("is_case_sensitive", [0, 1])
@pytest.mark.parametrize(
    "x", [strings("A b", "the", "THE", "", "été"), strings("the"), strings("x", "the")]
)
def test_string_normalizer(x, is_case_sensitive, case_change_action):
    node = helper.make_node(
        "StringNormalizer",
        ["x"],
        ["y"],
        stopwords=["the"],
        is_case_sensitive=is_case_sensitive,
        case_change_action=case_change_action,
        locale="C.UTF-8",
    )
    check([node], {"x": x}, {"y": TEXT})


def test_string_normalizer_refuses_batches():
    node = helper.make_node("StringNormalizer", ["x"], ["y"])
    model = model_of([node], {"x": np.array([["a"]], object)}, {"y": TEXT})
    with pytest.raises(jaxonnx.Error, match=r"shape \[2, 1\]; it must be \(C\) or \(1, C\)"):
        jaxonnx.load(model)(np.array([["a"], ["b"]], object))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"\w+@\w+\.com", ["a@b.com", "a@b.com ", "é@b.com", ""]),
        (r"\d+\s?", ["12", "١٢", "12\t", "12\v"]),
        (r"(?i)ab|c", ["AB", "aB", "c", "abc"]),
        (r"a.c\z", ["abc", "a\nc"]),
        (r"[\s[:digit:]\]]+\S", ["1 x", "]x", "\vx", "1"]),
        (r"[^][:alpha:]]*", ["12", "a", "]"]),
        (r"(?P<n>x)\\z", ["x\\z", "x"]),
    ],
)
def test_regex_is_read_as_re2_does(pattern, words):
    node = helper.make_node("RegexFullMatch", ["x"], ["y"], pattern=pattern)
    check([node], {"x": strings(*words)}, {"y": FLAGS})


@pytest.mark.parametrize("pattern", [r"\pN+", r"(?=a)b", r"(a)\1", "a(", r"(?<!a)b"])
def test_regex_that_cannot_be_read(pattern):
    node = helper.make_node("RegexFullMatch", ["x"], ["y"], pattern=pattern)
    with pytest.raises(jaxonnx.Error, match="cannot be read"):
        jaxonnx.load(model_of([node], {"x": TEXT}, {"y": FLAGS}))(strings("1"))


def test_concat_and_split_of_every_rank():
    concat = helper.make_node("StringConcat", ["x", "s"], ["xs"])
    split = helper.make_node("StringSplit", ["xs"], ["parts", "count"], delimiter="-", maxsplit=1)
    for x in (
        np.array("a-b", object),
        strings("a-b", "", "-"),
        np.array([["a"], ["b-c-d"]], object),
    ):
        example = {"parts": np.zeros((1,) * (x.ndim + 1), object), "count": np.zeros(x.shape, int)}
        parts, _ = check([concat, split], {"x": x, "s": np.array("é", object)}, example)
        assert parts.dtype == object


POOL = {
    "ngram_counts": [0, 4, 10],
    "ngram_indexes": [0, 1, 2, 3, 6, 5, 4, 7],
    "pool_int64s": [2, 3, 5, 4, 5, 6, 7, 8, 6, 7, 3, 3, 3],
}
TOKENS = np.array([[1, 1, 3, 3, 3, 7], [8, 6, 7, 5, 6, 8]], np.int64)
WEIGHTS = [0.5, 0.25, 0.75, 1.5, 2.0, 2.5, 3.0, 0.125]


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize(
    ("shortest", "longest", "skips"), [(1, 3, 2), (2, 3, 0), (1, 1, 5), (2, 2, 5), (3, 3, 1)]
)
def test_tfidf(mode, shortest, longest, skips):
    attributes = {
        "mode": mode,
        "min_gram_length": shortest,
        "max_gram_length": longest,
        "max_skip_count": skips,
        **POOL,
    }
    node = helper.make_node("TfIdfVectorizer", ["x"], ["y"], weights=WEIGHTS, **attributes)
    (batch,) = check([node], {"x": TOKENS}, {"y": np.zeros((1, 1), np.float32)})
    if mode == "TFIDF":
        (row,) = check([node], {"x": TOKENS[1]}, {"y": FLOATS})
        np.testing.assert_array_equal(row, batch[1])
    model = jaxonnx.load(model_of([node], {"x": TOKENS}, {"y": np.zeros((1, 1), np.float32)}))
    jax.jit(lambda x: model.apply(model.params, x)).lower(TOKENS)  # compiled like any other
    words = {**attributes, "pool_strings": [f"w{i}" for i in POOL["pool_int64s"]]}
    del words["pool_int64s"]
    node = helper.make_node("TfIdfVectorizer", ["x"], ["y"], weights=WEIGHTS, **words)
    text = np.array([[f"w{i}" for i in row] for row in TOKENS], object)
    (named,) = check([node], {"x": text}, {"y": np.zeros((1, 1), np.float32)})
    np.testing.assert_array_equal(named, batch)


@pytest.mark.parametrize("counts", [[-(2**33) + 1, 0, 2**62], [0, 10, 4], [0, 4, 14]])
def test_tfidf_of_a_pool_that_is_not_there(counts):
    """Found by fuzzing: the pool was read from before its begin for as long as that took."""
    attributes = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0}
    node = helper.make_node(
        "TfIdfVectorizer", ["x"], ["y"], **attributes, **POOL | {"ngram_counts": counts}
    )
    proto = model_of([node], {"x": TOKENS}, {"y": np.zeros((1, 1), np.float32)})
    with pytest.raises(jaxonnx.Error, match=r"ngram_counts .* must rise"):
        jaxonnx.load(proto)(TOKENS)


def test_tfidf_of_half_a_pair():
    """Its token was counted alone."""
    attributes = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0}
    counts = POOL | {"ngram_counts": [0, 5, 10]}
    node = helper.make_node("TfIdfVectorizer", ["x"], ["y"], **attributes, **counts)
    proto = model_of([node], {"x": TOKENS}, {"y": np.zeros((1, 1), np.float32)})
    with pytest.raises(jaxonnx.Error, match="give 5 tokens to n-grams of 2"):
        jaxonnx.load(proto)(TOKENS)


def test_tfidf_of_a_scalar():
    attributes = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0}
    node = helper.make_node("TfIdfVectorizer", ["x"], ["y"], **attributes, **POOL)
    proto = model_of([node], {"x": TOKENS[0, 0]}, {"y": np.zeros(1, np.float32)})
    with pytest.raises(jaxonnx.Error, match=r"must be \(C\) or \(N, C\)"):
        jaxonnx.load(proto)(TOKENS[0, 0])


def test_tfidf_of_a_short_or_empty_input():
    node = helper.make_node(
        "TfIdfVectorizer",
        ["x"],
        ["y"],
        mode="TF",
        min_gram_length=2,
        max_gram_length=2,
        max_skip_count=3,
        **POOL,
    )
    for length in (0, 1, 2):
        check([node], {"x": TOKENS[1, :length]}, {"y": FLOATS})


def test_a_text_classifier_from_words_to_labels():
    """Issue of every text pipeline: strings in, strings out, numbers between."""
    words = ["good", "bad", "film", "plot", "good film", "bad plot"]
    unigrams, bigrams = words[:4], [w for pair in words[4:] for w in pair.split()]
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(6, 3)).astype(np.float32)
    nodes = [
        helper.make_node(
            "StringNormalizer",
            ["words"],
            ["clean"],
            stopwords=["the", "a"],
            is_case_sensitive=0,
            case_change_action="LOWER",
            locale="C.UTF-8",
        ),
        helper.make_node(
            "TfIdfVectorizer",
            ["clean"],
            ["features"],
            mode="TFIDF",
            min_gram_length=1,
            max_gram_length=2,
            max_skip_count=1,
            ngram_counts=[0, 4],
            ngram_indexes=[0, 1, 2, 3, 4, 5],
            pool_strings=unigrams + bigrams,
            weights=[1.0, 2.0, 0.5, 0.5, 3.0, 3.0],
        ),
        helper.make_node("MatMul", ["features", "weight"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=0, keepdims=0),
        helper.make_node(
            "LabelEncoder",
            ["best"],
            ["label"],
            domain="ai.onnx.ml",
            keys_int64s=[0, 1, 2],
            values_strings=["praise", "pan", "shrug"],
        ),
        helper.make_node("Identity", ["scores"], ["logits"]),
    ]
    weights = [onnx.numpy_helper.from_array(weight, "weight")]
    outputs = {"label": np.array("", object), "logits": FLOATS}
    labels = {
        str(check(nodes, {"words": strings(*text.split())}, outputs, weights)[0])
        for text in ("The good film", "A bad bad PLOT", "the the", "plot good bad film")
    }
    assert len(labels) > 1
