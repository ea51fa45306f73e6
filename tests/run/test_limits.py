"""What a file may ask for: memory and time are bounded, and errors say what was asked for."""

import contextlib
import json
import re
import subprocess
import sys

import jax
import numpy as np
import onnx.parser
import optax
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx import _limits
from jaxonnx._graph.bind import DEEPEST_CALLS
from jaxonnx._run import failures, folding, scope
from jaxonnx._run.shapes import infer_types
from jaxonnx.lowering import ChannelsLast, KernelFirst
from tests.support import resource_bombs
from tests.support.resource_bombs import IMAGE, body, ints, model, node, one

REFUSED = dict(resource_bombs.refused())
LASTING = dict(resource_bombs.lasting())
FINE = {name: total for name, _, total in resource_bombs.fine()}

INTERNAL = re.compile(
    r"\blax\b|jaxlib|mlir|jnp|tuple index|iterator|Traceback|static extent|NoneType|\n",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def seen():
    """What every bomb did, in a process with little memory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.resource_bombs"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [*REFUSED, *LASTING])
def test_a_print_asks_for_nothing(seen, name):
    kind, text, seconds = seen[f"{name}: print"]
    assert kind == "result", text
    assert seconds < 20


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_is_refused_by_name(seen, name):
    kind, text, seconds = seen[f"{name}: call"]
    assert kind in ("LimitError", "NodeError"), f"{kind}: {text}"
    assert text.startswith("node '"), text
    assert not INTERNAL.search(text), text
    assert seconds < 20


@pytest.mark.parametrize("name", FINE)
def test_what_only_looks_large_is_computed(seen, name):
    kind, text, seconds = seen[f"{name}: call"]
    assert (kind, float(text)) == ("result", FINE[name])
    assert seconds < 20


def test_the_limit_is_the_callers():
    proto = one("Expand", "xa", constants={"a": ints(1000, 2)})
    assert jaxonnx.load(proto)(np.ones(2, np.float32)).shape == (1000, 2)
    with pytest.raises(jaxonnx.LimitError, match=r"'n' \(Expand.*7\.8 KiB.*1\.0 KiB.*limit="):
        jaxonnx.load(proto, limit=1024)(np.ones(2, np.float32))
    small = jaxonnx.load(proto, limit=1024).with_outputs("y")
    with pytest.raises(MemoryError):
        small.apply(small.params, np.ones(2, np.float32))


@pytest.mark.parametrize("limit", [0, -1, True, "1 GB", 1.5])
def test_a_limit_is_a_number_of_bytes(limit):
    with pytest.raises(jaxonnx.InputError, match="limit"):
        jaxonnx.load(one("Relu"), limit=limit)


def test_an_evaluation_that_is_not_compiled_is_checked_before_it_allocates():
    # NonZero cuts the graph, so that what follows runs on concrete values
    nodes = [node("NonZero", "x", "i"), node("Cast", "i", "f", to=1)]
    nodes.append(node("Einsum", "ff", equation="ij,kl->ijkl"))
    loaded = jaxonnx.load(model(nodes, (("x", [300]),)), limit=1 << 18)
    with pytest.raises(jaxonnx.LimitError, match=r"Einsum.*351\.6 KiB"):
        loaded(np.ones(300, np.float32))


def test_pads_count_before_an_evaluation_that_is_not_compiled_allocates(monkeypatch):
    called = scope.array_forms.call

    def followed(op, arguments, keywords):
        assert isinstance(arguments[0], jax.core.Tracer)
        return called(op, arguments, keywords)

    monkeypatch.setattr(scope.array_forms, "call", followed)
    pool = one("MaxPool", "x", (("x", [1, 1, 50]),), kernel_shape=[3], pads=[6, 2**20], strides=[2])
    with jax.disable_jit(), pytest.raises(jaxonnx.LimitError, match=r"MaxPool.*2\.0 MiB"):
        jaxonnx.load(pool, limit=1 << 21)(np.ones((1, 1, 50), np.float32))
    monkeypatch.setattr(scope.array_forms, "call", called)
    with jax.disable_jit():
        y = jaxonnx.load(pool, limit=1 << 22)(np.ones((1, 1, 50), np.float32))
    assert y.shape == (1, 1, 524315)


def test_tables_in_attributes_are_not_multiplied():
    """The nodes of a forest are: their product would have more digits than there are nodes."""
    assert not _limits.may_exceed([], {"nodes_featureids": [9] * 10**6}, 1 << 20)
    assert _limits.may_exceed([], {"pads": [9] * 2 * _limits.AXES}, 1 << 20)


def test_shapes_are_followed_without_the_numbers():
    image, kernel = ChannelsLast(np.ones((1, 4, 4, 3))), KernelFirst(np.ones((3, 3, 3, 8)))
    seen = []

    def function(*arguments):
        seen.extend(jax.tree.leaves(arguments))
        return arguments[0]

    (result,) = folding.abstract(function, [image, kernel, np.ones(8)], {}, ())
    assert result.shape == (1, 4, 4, 3)
    assert len(seen) == 3
    assert all(isinstance(x, jax.core.Tracer) for x in seen)


def test_a_body_that_is_not_compiled_is_evaluated_once(monkeypatch):
    # what grows with the sizes of its inputs are the results of its own nodes
    seen = []

    def followed(function, *rest):
        seen.append(function.args[0].name)
        return abstract(function, *rest)

    abstract = scope.abstract
    monkeypatch.setattr(scope, "abstract", followed)
    step = [node("Identity", ["c"], ["d"]), node("Add", ["v0", "v1"], ["a"])]
    step.append(node("Identity", ["v1"], ["b"]))
    nodes = [node("NonZero", "x", "i"), node("Cast", "i", "f", to=1)]
    nodes.append(node("Loop", ["m", "", "f", "f"], ["y", "z"], body=body(step, 2, "dab")))
    loaded = jaxonnx.load(
        model(nodes, (("x", [300]),), constants={"m": np.array(2)}), limit=1 << 18
    )
    assert float(loaded(np.ones(300, np.float32)).sum()) == 3 * sum(range(300))
    assert not seen


def test_a_loop_over_known_values_is_left_to_the_program(monkeypatch):
    monkeypatch.setattr(_limits, "PATIENCE", 0.0)
    proto = LASTING["Loop, long"]
    next(t for t in proto.graph.initializer if t.name == "m").int64_data[:] = []
    next(t for t in proto.graph.initializer if t.name == "m").raw_data = ints(101).tobytes()
    assert jaxonnx.load(proto)().tolist() == [-1.0, -1.0]


def test_a_loop_without_end_is_an_error(monkeypatch):
    monkeypatch.setattr(_limits, "PATIENCE", 0.2)
    with pytest.raises(jaxonnx.NodeError, match=r"Loop.*no trip count"):
        jaxonnx.load(LASTING["Loop, endless"])()


def test_a_loop_of_traced_rows_without_end_is_an_error(monkeypatch):
    """Its condition is known, what it makes is not."""
    monkeypatch.setattr(_limits, "PATIENCE", 0.2)
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (float[4] x) => (y) <bool yes = {1}> {
        y = Loop("", yes) <body = b (int64 i, bool on) => (bool go, float[n] s) {
            go = Identity(on)
            s = Relu(x)
        }>
    }""")
    loaded = jaxonnx.load(proto)
    with pytest.raises(jaxonnx.NodeError, match=r"Loop.*no trip count"):
        jax.eval_shape(loaded.apply, loaded.params, np.ones(4, np.float32))


def test_a_loop_over_a_sequence_that_takes_too_long_is_an_error(monkeypatch):
    """No program can have it: the sequence grows."""
    monkeypatch.setattr(_limits, "PATIENCE", 0.2)
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (int64 count) => (y) {
        none = SequenceEmpty()
        one = Constant<value = float[1] {1}>()
        y = Loop(count, "", none) <body = b (int64 i, bool on, seq(float[]) s) => (
            bool go, seq(float[]) t
        ) {
            go = Identity(on)
            t = SequenceInsert(s, one)
        }>
    }""")
    loaded = jaxonnx.load(proto)
    assert len(loaded(np.array(20))) == 20
    with pytest.raises(jaxonnx.NodeError, match="1000000000 iterations would be run while tracing"):
        loaded(np.array(10**9))


def test_a_long_scan_with_a_growing_state_is_an_error():
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (int64[1] count) => (y) {
        none = Constant<value = float[1] {0}>()
        rows = ConstantOfShape<value = float[1] {1}>(count)
        y = Scan<num_scan_inputs = 1, body = b (float[n] s, float[] row) => (float[m] t) {
            one = Constant<value = int64[1] {-1}>()
            more = Reshape(row, one)
            t = Concat<axis = 0>(s, more)
        }>(none, rows)
    }""")
    loaded = jaxonnx.load(proto)
    assert loaded(np.array([20])).shape == (21,)
    with pytest.raises(jaxonnx.NodeError, match="9000000 iterations would be compiled one by one"):
        loaded(np.array([9_000_000]))


def test_scan_outputs_of_more_iterations_than_the_limit_holds_are_refused():
    """Before the loop is unrolled, which the body's need of a known counter makes it."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (float[4] x) => (y) <int64 count = {4294967296}> {
        y = Loop(count, "") <body = b (int64 i, bool on) => (bool go, float[n] s) {
            go = Identity(on)
            s = Relu(x)
        }>
    }""")
    loaded = jaxonnx.load(proto, limit=1 << 28)
    with pytest.raises(jaxonnx.LimitError, match=r"Loop.*float32\[4294967296, 4\] takes 64\.0 GiB"):
        jax.eval_shape(loaded.apply, loaded.params, np.ones(4, np.float32))


@pytest.mark.parametrize("mode", ["reflect", "wrap"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_padding_by_several_turns(mode, size):
    x = np.arange(size, dtype=np.float32)
    proto = one("Pad", "xp", (("x", [size]),), {"p": ints(7, 11)}, mode=mode)
    np.testing.assert_array_equal(jaxonnx.load(proto)(x), np.pad(x, (7, 11), mode))


# --- functions and size of the graph


def function(name, calls, callee):
    """A function of the domain "l" that calls another one some times after the other."""
    nodes = [
        node(callee, [f"v{i}"], [f"v{i + 1}"], "l" if "f" in callee else "") for i in range(calls)
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("l", 1)]
    return helper.make_function("l", name, ["v0"], [f"v{calls}"], nodes, opsets)


def chained(count, calls):
    functions = [function("f0", 1, "Neg")]
    functions += [function(f"f{i}", calls, f"f{i - 1}") for i in range(1, count)]
    return model([node(f"f{count - 1}", "x", domain="l")], functions=functions)


def test_functions_that_call_one_another_twice_are_counted_before_they_are_bound():
    with pytest.raises(jaxonnx.ModelError, match="stand for 1,610,612,7"):
        jaxonnx.load(chained(30, 2))


def test_a_chain_of_functions_has_a_bound():
    with pytest.raises(jaxonnx.ModelError, match=r"nested 500 deep.*inline_local_functions"):
        jaxonnx.load(chained(500, 1))
    deepest = jaxonnx.load(chained(DEEPEST_CALLS, 1))
    assert deepest(np.ones(2, np.float32)).tolist() == [-1.0, -1.0]


def test_recursion_is_still_told_by_its_name():
    functions = [function("f0", 1, "f1"), function("f1", 2, "f0")]
    with pytest.raises(jaxonnx.ModelError, match="calls itself"):
        jaxonnx.load(model([node("f1", "x", domain="l")], functions=functions))


@pytest.mark.deep
def test_many_nodes_are_loaded():
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(100_000)]
    loaded = jaxonnx.load(model(nodes, (("v0", [2]),), ["v100000"]))
    assert len(loaded.graph.nodes) == 100_000
    assert "Neg 100000" in str(loaded)


def test_a_program_that_is_not_compiled_is_an_error_of_ours():
    """JAX traces an argmax of complex numbers, and refuses it where it lowers it."""
    values = np.ones((2, 3), np.complex64)
    proto = one("Hardmax", given=(("x", [2, 3]),))
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.COMPLEX64
    with pytest.raises(jaxonnx.NodeError, match=r"does not run: .*complex64"):
        jaxonnx.load(proto)(values)


COMPLEX = """<ir_version: 10, opset_import: ["": 22]>
g (complex64[2, 3] x) => (float[2] y) <float[1] w = {1}> {
    i = ArgMax <axis = 1, keepdims = 0> (x)
    f = Cast <to = 1> (i)
    y = Mul(f, w)
}"""


def test_a_step_that_is_not_compiled_is_an_error_of_ours():
    proto = onnx.parser.parse_model(COMPLEX)
    values = np.ones((2, 3), np.complex64)
    data = {"x": values, "y": np.zeros(2, np.float32)}
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.1), "trainable": ["w"]}
    with pytest.raises(jaxonnx.NodeError, match=r"compiled step does not run: .*complex64"):
        jaxonnx.train(proto, data, batch_size=2, **settings)
    algorithm = onnx.parser.parse_graph("a () => (float[1] v) { v = ReduceSum(y) }")
    info = proto.training_info.add(algorithm=algorithm)
    info.update_binding.add(key="w", value="v")
    run = jaxonnx.load(proto).training
    for does in (run.step, run.inference):
        with pytest.raises(jaxonnx.NodeError, match=r"does not run: .*complex64"):
            does(run.state, {"x": values})


STRINGS = """<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 1]>
g (int64[2] x, float[2] v) => (y, z, w, c) <string[1] c = {"c"}> {
    y = ai.onnx.ml.LabelEncoder <classes_strings = ["a", "b"]> (x)
    z = Constant <value = string[1] {"z"}> ()
    w = Neg(v)
}"""


def test_strings_are_results_whatever_they_are_computed_from():
    loaded = jaxonnx.load(onnx.parser.parse_model(STRINGS))
    inputs = np.array([1, 0]), np.float32([1, 2])
    results = [np.asarray(y).tolist() for y in loaded(*inputs)]
    assert results == [["b", "a"], ["z"], [-1, -2], ["c"]]
    with pytest.raises(jaxonnx.StaticError, match="strings"):
        jax.jit(lambda v: loaded.apply(loaded.params, inputs[0], v))(inputs[1])


# --- what is read beside a call


def _bytes():
    return one(
        "Einsum", "xw", (("x", [2, 2]),), {"w": np.eye(2, dtype=np.float32)}, equation=b"\xff"
    )


def _scopes():
    proto = one("Relu")
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="{[]: 1}")
    return proto


def _training():
    proto = one("Relu")
    info = proto.training_info.add()
    info.algorithm.initializer.add(name="n", data_type=TensorProto.INT64)
    info.update_binding.add(key="n", value="n")
    return proto


def _ranks():
    """A Reshape to as many axes as there are examples, and another one behind it."""
    nodes = [
        node("Shape", "x", "n", end=1),
        node("ConstantOfShape", "n", "o", value=numpy_helper.from_array(ints(1))),
        node("Concat", "om", "t", axis=0),
        node("Reshape", "xt", "z"),
        node("Reshape", "zc"),
    ]
    return model(nodes, (("x", [2, 2]),), constants={"m": ints(-1), "c": ints(2, 2)})


BESIDE = {
    "Einsum of what is no text": _bytes,
    "scopes that are not hashable": _scopes,
    "a training tensor without data": _training,
    "a rank that is the batch": _ranks,
    "a ratio of two numbers": lambda: one("Dropout", "xr", constants={"r": np.float32([0, 1])}),
    "a ratio that is a string": lambda: one(
        "Dropout", "xr", constants={"r": np.array("a", object)}
    ),
    "Gather of a scalar": lambda: one("Gather", "ai", (), {"a": np.float32(1), "i": np.array(0)}),
    "a mean without a result": lambda: model([node("ReduceMean", "x", []), node("Sqrt", "x")]),
    "a sum without a result": lambda: model(
        [node("Add", "xa", []), node("Sqrt", "x")], constants={"a": np.float32(1)}
    ),
    "Reshape without a result": lambda: model(
        [node("Reshape", "xs", []), node("Relu", "x")], constants={"s": ints(2)}
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_read_beside_a_call_raises_errors_of_ours(name):
    loaded = jaxonnx.load(BESIDE[name]())
    for look in (str, jaxonnx.Model.summary, jaxonnx.Model.with_any_batch):
        with contextlib.suppress(jaxonnx.Error):
            look(loaded)
    with pytest.raises(jaxonnx.InputError, match="'other'"):
        loaded.with_outputs("other")


def test_an_empty_tensor_with_long_axes_is_refused_by_name():
    proto = one("Relu", "w", (), {"w": np.zeros((1, 0), np.float32)})
    proto.graph.initializer[0].dims[:] = [2**40, 0, 2**20]
    with pytest.raises(jaxonnx.LimitError, match=r"tensor 'w': float32\[1099511627776, 0, 1048576"):
        jaxonnx.load(proto)


def test_a_state_variable_holds_numbers():
    proto = one("Identity", "s", (), {"s": np.array(["a"], object)})
    info = proto.training_info.add()
    info.update_binding.add(key="s", value="y")
    with pytest.raises(jaxonnx.ModelError, match="'s' holds strings"):
        _ = jaxonnx.load(proto).training


def test_a_long_list_of_classes_makes_no_table_of_pairs():
    labels = list(range(50_000))
    options = {"coefficients": [1.0], "rho": [1.0], "support_vectors": [1.0]}
    proto = one(
        "SVMClassifier", "x", classlabels_ints=labels, vectors_per_class=[1], domain="ai.onnx.ml",
        **options,
    )  # fmt: skip
    with pytest.raises(jaxonnx.NodeError, match="1249975000 rho"):
        jaxonnx.load(proto)(np.ones(2, np.float32))


# --- messages


MESSAGES = {
    "Conv of two types": (
        one("Conv", "xw", IMAGE, {"w": np.ones((1, 1, 2, 2), np.int8)}),
        ["reads 'w' (int8), with 'x' (float); their types must be the same"],
    ),
    "StringNormalizer": (one("StringNormalizer", "x"), ["X ('x') is float, it takes string"]),
    "ArgMin": (one("ArgMin", "x", (("x", [0]),)), ["x: float32[0]"]),
    "Neg": (one("Neg", "a", (), {"a": np.array(["a"], object)}), ["X ('a') is string, it "]),
    "Mul of strings": (
        one("Mul", "ab", (), {"a": np.array(["a"], object), "b": ints(2**30)}),
        ["reads 'b' (int64), with 'a' (string)"],
    ),
    "OneHot, values": (
        one("OneHot", "xdv", constants={"d": ints(3), "v": np.float32([1])}),
        ["values has shape [1]; it must be (2)"],
    ),
    "GatherND": (
        one("GatherND", "ai", (), {"a": np.eye(2), "i": ints(0, 1)[:, None]}, batch_dims=-1),
        ["batch_dims -1 must be below the ranks of (2, 2) and (2, 1)"],
    ),
    "STFT": (
        one("STFT", ["x", "f", "", "f"], (("x", [1, 4, 1]),), {"f": np.array(-(2**40))}),
        ["do not fit 4 samples"],
    ),
    "Conv, kernel": (
        one("Conv", "xw", IMAGE, {"w": np.ones((1, 1, 0, 1), np.float32)}),
        ["the kernel (0, 1) has no elements"],
    ),
    "ConvTranspose, kernel": (
        one("ConvTranspose", "xw", IMAGE, {"w": np.ones((1, 1, 0, 1), np.float32)}),
        ["the kernel (0, 1) has no elements"],
    ),
    "DepthToSpace": (
        one("DepthToSpace", "x", IMAGE, blocksize=0),
        ["blocksize must be positive, got 0"],
    ),
    "SpaceToDepth": (
        one("SpaceToDepth", "x", IMAGE, blocksize=0),
        ["blocksize must be positive, got 0"],
    ),
    "Split": (one("Split", "x", num_outputs=0), ["num_outputs must be positive, got 0"]),
    "ConstantOfShape": (
        REFUSED["ConstantOfShape"],
        ["float32[4611686018427387904]", "1.8e+19 bytes"],
    ),
    "Range": (REFUSED["Range, float"], ["float32[", "4.0e+38 bytes"]),
    "OneHot": (
        one("OneHot", "idv", (), {"i": ints(0), "d": ints(-4), "v": np.float32([0, 1])}),
        ["depth must be positive, got [-4]"],
    ),
    "Scan": (
        one("Scan", "x", body=body([node("Identity", ["i"], ["o"])], 0, ["o"]), num_scan_inputs=9),
        ["num_scan_inputs is 9, of 1 inputs"],
    ),
    **{
        f"Resize by {scale}": (
            one("Resize", ["x", "", "s"], IMAGE, {"s": np.float32([1, 1, scale, 1])}),
            [f"scales and sizes must be positive: [1.0, 1.0, {scale:.1f}, 1.0]"],
        )
        for scale in (0.0, -1.0, np.nan, np.inf)
    },
    "MatMul": (
        one("MatMul", "xa", constants={"a": np.ones((3, 4), np.float32)}),
        ["float32[3, 4]"],
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_speak_of_the_model(name):
    proto, parts = MESSAGES[name]
    with pytest.raises((jaxonnx.ModelError, jaxonnx.NodeError)) as raised:
        jaxonnx.load(proto)(**resource_bombs.feed(proto))
    text = str(raised.value)
    assert not INTERNAL.search(text), text
    for part in ["node 'n'", *parts]:
        assert part in text


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (
            MemoryError("Unable to allocate 7.5 GiB for an array"),
            "memory is not enough for 7.5 GiB",
        ),
        (RecursionError("maximum recursion depth exceeded"), "sys.setrecursionlimit"),
        (jax.errors.JaxRuntimeError("INTERNAL: lax.x\nloc(1)"), "does not take these inputs"),
        (AttributeError("'NoneType' object has no attribute 'x'"), "does not take these inputs"),
        (NotImplementedError("MLIR translation rule"), "does not take these inputs"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_is_raised_inside_an_operator_names_its_node(error, part):
    (bound,) = jaxonnx.load(one("Relu")).graph.nodes
    told = failures.translate_error(bound, [np.ones(2, np.float32)], error)
    assert isinstance(told, jaxonnx.NodeError)
    assert isinstance(told, jaxonnx.LimitError) == isinstance(error, MemoryError)
    assert part in str(told)
    assert str(told).startswith("node 'n' (Relu, opset 21): ")


def test_a_device_without_memory_says_what_helps(monkeypatch):
    loaded = jaxonnx.load(one("Relu"))

    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 3221225472 bytes."
        )

    monkeypatch.setattr(type(loaded.program), "_compile", lambda *_: fail)
    with pytest.raises(jaxonnx.LimitError, match=r"3\.0 GiB.*x: float32\[2\].*batch.*mesh"):
        loaded(np.ones(2, np.float32))


# --- shapes for a summary


def test_a_summary_outlives_what_shape_inference_raises():
    # the declared shape contradicts the node's, which onnx.shape_inference raises
    proto = model(
        [node("NonZero", "x", "i"), node("MatMul", "xa", "y")],
        constants={"a": np.ones((3, 4), np.float32)},
    )
    loaded = jaxonnx.load(proto)
    assert "MatMul" in str(loaded.summary())


def test_shape_arithmetic_is_followed_behind_many_concatenations():
    nodes = []
    for i in range(10):  # each layer stands beside what it reads, as in a dense block
        nodes.append(node("MatMul", [f"v{i}", "w"], [f"m{i}"]))
        nodes.append(node("Concat", [f"v{i}", f"m{i}"], [f"v{i + 1}"], axis=1))
    nodes.append(node("Shape", ["v10"], ["s"], end=2))
    nodes += [node("Concat", ["s", "rest"], ["t"], axis=0), node("Reshape", ["v10", "t"])]
    proto = model(
        nodes,
        (("v0", [2, 1, 6, 3]),),
        constants={"w": np.eye(3, dtype=np.float32), "rest": ints(18)},
    )
    (y,) = jaxonnx.load(proto, outputs="y").outputs
    assert y.shape == (2, 1024, 18)


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Mul(x, long)",
        "v = RandomNormal <shape = [1099511627776]> () y = Mul(x, v)",
        "s = Constant <value_int = 2097152> () m = Add(s, n) v = ConstantOfShape(m) y = Mul(x, v)",
        "m = Mul(n, n) k = Mul(m, m) v = ConstantOfShape(k) y = Mul(x, v)",
        "v = own.f(x, long) y = Mul(x, v)",
    ],
)
def test_shape_inference_keeps_no_list_as_long_as_a_file_says(nodes):
    """As ONNX's data_prop does, of numbers for each vector: 8 TiB of them."""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 22, "own": 1]>
    g (float[2, 3] x, float[1099511627776] long) => (y)
    <int64[1] n = {{9999}}> {{ {nodes} }}
    <domain: "own", opset_import: ["": 22]>
    f (a, b) => (v) {{ v = Mul(a, b) }}""")
    infer_types(proto, {"n": ints(9999)}, ["y"])


def test_a_node_without_name_and_outputs_has_a_layer():
    proto = model([node("Relu", "x"), helper.make_node("Relu", ["x"], [])])
    assert [layer.operator for layer in jaxonnx.load(proto).summary().layers] == ["Relu", "Relu"]


def test_strings_have_no_batch_to_open():
    proto = model([node("StringNormalizer", "x")])
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    with pytest.raises(jaxonnx.InputError, match="input x"):
        jaxonnx.load(proto).with_any_batch()


def test_a_sparse_tensor_is_not_made_dense_beyond_memory():
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    places = helper.make_tensor("p", TensorProto.INT64, [1], [0])
    proto = model([node("Relu", "x")])
    proto.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, places, [2**20, 2**20, 2**10])
    )
    with pytest.raises(jaxonnx.LimitError, match="PiB"):
        jaxonnx.load(proto)


def test_the_machine_has_memory():
    assert 1 << 28 < _limits.machine() <= 2**63 - 1
    assert [_limits.format_bytes(n) for n in (12, 1536, 3 << 30)] == [
        "12 bytes",
        "1.5 KiB",
        "3.0 GiB",
    ]
