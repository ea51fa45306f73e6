"""Weights chosen by what people call them: modules, nodes, scopes, other names of a tie."""

import json

import jax
import numpy as np
import onnx
import optax
import pytest

import jaxonnx
from jaxonnx._io.protos import modules
from jaxonnx.cli import main
from tests.support.paths import DATA

KEY = jax.random.key(0)
HEAD = {"head.weight", "head.bias"}
LAYER = {
    *(f"encoder.layers.0.norm{i}.{part}" for i in (1, 2) for part in ("weight", "bias")),
    *(f"encoder.layers.0.linear{i}.bias" for i in (1, 2)),
    *(f"encoder.layers.0.self_attn.{name}" for name in ("in_proj_bias", "out_proj.bias")),
}
"""What the older exporter calls the tensors of the first layer; it renames the matrices."""


def load(name, **options):
    return jaxonnx.load(DATA / f"{name}.onnx", **options)


@pytest.fixture(scope="module")
def legacy():
    return load("transformer.legacy")


def shapes(params):
    return sorted(tuple(value.shape) for value in params.values())


def test_adapters_that_the_file_has_are_weights_of_their_own():
    """As PEFT's exports name them; those of `jaxonnx.LoRA` are where their weight is."""
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[n,4] x) => (float[n,4] y) { y = MatMul(x, w) }
    """)
    proto.graph.node[0].name = "/q_proj/lora_A/MatMul"
    name = "q_proj.lora_A.default.weight"
    proto.graph.node[0].input[1] = name
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype="f4"), name))
    model = jaxonnx.load(proto)
    assert [*model.with_trainable("/q_proj/lora_A/MatMul").params] == [name]


def test_a_module_has_all_its_weights_whatever_the_exporter_calls_them(legacy):
    """Both exporters wrote the same network, one with `onnx::MatMul_...` for its matrices."""
    for module in ("encoder.layers.0", "encoder.layers.1.linear2", "encoder", "head"):
        old, new = (load(f"transformer.{e}", trainable=module) for e in ("legacy", "dynamo"))
        assert shapes(old.params) == shapes(new.params)
    first = legacy.with_trainable("encoder.layers.0").params
    assert {*first} > LAYER
    assert [name for name in first if name.startswith("onnx::MatMul")]
    # a regular expression that fits names of tensors means these alone, and aliases are names
    assert legacy.with_trainable(r"encoder\.layers\.0\..*").params.keys() == first.keys()


@pytest.mark.parametrize("file", ["transformer.legacy", "transformer.dynamo"])
def test_weights_that_an_exporter_numbers_are_called_by_their_modules(file):
    model = load(file)
    known = {f"encoder.layers.{i}.linear{j}.weight" for i in (0, 1) for j in (1, 2)}
    known |= {f"encoder.layers.{i}.self_attn.weight" for i in (0, 1)}
    assert {*model.aliases.values()} == known
    assert {*model.aliases} <= {*model.params}
    one = model.with_trainable("encoder.layers.1.linear2.weight").params
    assert [model.aliases[name] for name in one] == ["encoder.layers.1.linear2.weight"]
    assert model.params[next(iter(one))].shape == (64, 32)
    assert len(model.with_trainable(r".*linear\d\.weight").params) == 4
    assert len(model.with_trainable("*linear?.weight").params) == 4
    for text in (str(model), str(model.summary())):
        assert "encoder.layers.1.linear2.weight" in text
    with pytest.raises(jaxonnx.InputError, match=r"tensors .*encoder\.layers\.0\.linear1\.weight"):
        model.with_trainable("linear1.weihgt")
    labels = jaxonnx.labels({"mlp": r".*linear\d\.weight"}, default="rest", model=model)
    assert [*labels(model.params).values()].count("mlp") == 4
    adapters = jaxonnx.LoRA(rank=2, where=r".*linear\d\.weight").attach(model, KEY)
    assert len([name for name in adapters.params if name.endswith("lora_A")]) == 4


def test_aliases_of_recurrent_quantized_and_equal_weights(tmp_path):
    assert sorted(load("lstm.dynamo").aliases.values()) == [
        *("first.B", "first.R", "first.W", "second.B", "second.R", "second.W")
    ]
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[n,4] x) => (float[n,4] y) {
        a = MatMul(x, w)
        b = MatMul(a, w)
        y = Add(b, c)
    }
    """)
    graph = proto.graph
    for node, name in zip(graph.node, ("MatMul", "MatMul_1", "Add"), strict=True):
        node.name = f"/net/block/{name}"
    graph.node[0].input[1], graph.node[1].input[1] = "onnx::MatMul_7", "onnx::MatMul_8_quantized"
    graph.node[2].input[1] = "/net/Constant_3_output_0"
    for node in graph.node:
        size = (4,) if node.op_type == "Add" else (4, 4)
        value = np.random.default_rng(0).normal(size=size).astype("f4")
        graph.initializer.append(onnx.numpy_helper.from_array(value, node.input[1]))
    graph.node[0].name = "/net/block/MatMul"
    assert jaxonnx.load(proto).aliases == {
        "onnx::MatMul_7": "net.block.weight",
        "onnx::MatMul_8_quantized": "net.block.weight_quantized",
        "/net/Constant_3_output_0": "net.block.bias",
    }
    graph.initializer[0].name = graph.node[0].input[1] = "val_3"
    graph.initializer[1].name = graph.node[1].input[1] = "net.block.weight"
    assert jaxonnx.load(proto).aliases["val_3"] == "net.block.weight_1"
    for node in graph.node:
        node.name = ""
    assert jaxonnx.load(proto).aliases == {}


@pytest.mark.parametrize(
    ("wanted", "number"),
    [
        ("/encoder/layers.0/linear1/MatMul", 1),  # a node
        ("/encoder/layers.0/linear1/MatMul_output_0", 1),  # what it gives
        ("*.linear1", 4),  # a weight and a bias in each of two layers
        ("*.linear1.*", 4),  # one of each is called onnx::MatMul_...
        (r"encoder\.layers\.[01]\.linear1", 4),
        (["head", "embedding"], 3),
    ],
)
def test_names_and_patterns(legacy, wanted, number):
    assert len(legacy.with_trainable(wanted).params) == number


def test_scopes_of_tensorflow():
    model = load("families/tf2onnx_cnn")
    chosen = model.with_trainable("sequential_1/dense_1").params
    assert [*chosen] == ["sequential_1/dense_1/Cast/ReadVariableOp:0"]
    assert chosen.keys() == model.with_trainable("*/dense_1").params.keys()
    # a convolution with the normalization behind it folded in is in the modules of both
    for module in ("sequential_1/conv2d_1", "sequential_1/batch_normalization_1"):
        assert len(model.with_trainable(module).params) == 1

    scope = "sequential_1/global_average_pooling2d_1"
    assert model.with_outputs(scope)(np.zeros((2, 12, 12, 3), np.float32)).shape[:2] == (2, 8)


def test_either_record_of_the_current_exporter():
    """Its names of scopes, or where a tool dropped these, its namespace."""
    for node in onnx.load(DATA / "transformer.dynamo.onnx").graph.node:
        bare = onnx.NodeProto()
        bare.CopyFrom(node)
        kept = [entry for entry in node.metadata_props if "scopes" not in entry.key]
        del bare.metadata_props[:]
        bare.metadata_props.extend(kept)
        assert modules(bare) == modules(node)


def test_another_name_of_a_tie():
    model = load("families/transformers_albert")
    name, of = next((n, of) for n, of in model._places.ties.items() if of in model.params)
    assert [*model.with_trainable([name]).params] == [of]
    # a module that reads a shared weight has it
    assert any(len(layer.tensors) for layer in model.summary().origins)


def test_constants_and_statistics_are_not_chosen_by_module():
    model = load("lenet_bn.legacy")
    assert {*model.with_trainable("features.1").params} == {
        "features.1.weight",
        "features.1.bias",
    }
    again = model.reinitialize(KEY, "features.1")
    changed = {n for n, x in again.tensors.items() if not np.array_equal(x, model.tensors[n])}
    assert "features.1.running_mean" in changed
    assert all(name.startswith("features.1.") for name in changed)
    llama = load("families/transformers_llama")  # with a table of rotary positions
    params = {*llama.params}
    assert {*llama.with_trainable("model").params} <= params


def test_every_argument_takes_them(legacy):
    matrices = legacy.with_trainable("*.linear1").params
    weight = next(name for name, x in matrices.items() if x.ndim == 2)
    adapted = jaxonnx.LoRA(2, where="encoder.layers.0.linear1").attach(legacy, KEY)
    roots = {name.partition(".lora_")[0] for name in adapted.params}
    assert len(roots) == 1
    assert roots < {*matrices}
    label = jaxonnx.labels({"linear": "*.linear1"}, default="rest", model=legacy)
    assert {n for n, group in label(legacy.params).items() if group == "linear"} == {*matrices}
    label = jaxonnx.labels({"a": "encoder.layers.0.linear1"}, default="rest", model=adapted)
    assert {*label(adapted.params).values()} == {"a"}
    optimizer = optax.multi_transform({"linear": optax.sgd(1.0), "rest": optax.sgd(0.0)}, label)
    assert optimizer is not None
    sparse = legacy.with_sparsity(select="*.linear1")
    assert {layer.name for layer in sparse.sparsity.layers} < {*matrices}
    assert len(sparse.sparsity.layers) == 2
    fresh = legacy.reinitialize(KEY, "encoder.layers.0.linear1")
    changed = {n for n, x in fresh.params.items() if not np.array_equal(x, legacy.params[n])}
    assert changed <= {*matrices}
    assert changed
    assert weight in matrices


def test_an_error_lists_near_names_of_all_kinds(legacy):
    with pytest.raises(jaxonnx.InputError) as caught:
        legacy.with_trainable("linear1")
    text = str(caught.value)
    assert "trainable='linear1' matches no" in text
    for near in (
        "tensors encoder.layers.0.linear1.bias",
        "modules encoder.layers.0.linear1",
        "nodes /encoder/layers.0/linear1/MatMul",
    ):
        assert near in text
    for wanted, said in (("*.linaer1", False), ("linear1(", True)):
        with pytest.raises(jaxonnx.InputError) as caught:
            legacy.with_trainable(wanted)
        assert ("no regular expression" in str(caught.value)) == said
    with pytest.raises(jaxonnx.SparsityError, match=r"'linear9' selects no parameter; near it"):
        legacy.with_sparsity(select="linear9")
    with pytest.raises(jaxonnx.InputError, match=r"'linear1' matches no .*weight that can be"):
        jaxonnx.LoRA(1, where="linear1").attach(legacy, KEY)


@pytest.mark.parametrize("name", ["transformer.legacy", "families/onnxruntime_optimized_bert"])
def test_what_is_shown_fits_and_is_whole(name, capsys):
    model = load(name)
    summary = model.summary()
    text = str(summary)
    for shown in (text, str(model)):
        assert max(map(len, shown.splitlines())) <= 80
        assert "…" not in shown
    lines = text.splitlines()
    for origin in summary.origins:
        if origin.tensors:
            chosen = {n for n in origin.tensors if n in model.params}
            assert not chosen or {*model.with_trainable(origin.node).params} >= chosen
            for copied in (origin.node, *origin.tensors):
                assert any(copied in line for line in lines), copied
    assert main(["info", str(DATA / f"{name}.onnx"), "--layers", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    tensors = [tuple(layer["tensors"]) for layer in said["layers"]]
    assert tensors == [origin.tensors for origin in summary.origins]


@pytest.mark.parametrize(
    ("name", "key"),
    [("families/transformers_albert", "tied"), ("mobilenet.legacy", "without_dropout")],
)
def test_names_that_a_sentence_leaves_out_are_in_the_json(name, key, capsys):
    path = DATA / f"{name}.onnx"
    assert main(["info", str(path), "--json"]) == 0
    listed = [*json.loads(capsys.readouterr().out)[key]]
    assert listed
    assert f"'{listed[0]}'" in " ".join(str(jaxonnx.load(path)).split())


def test_initializers_of_a_file_with_training():
    written = jaxonnx.add_training(
        load("lenet.dynamo"),
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=jaxonnx.optim.adam(0.01),
        trainable="classifier",
        init={"classifier.4": "zeros"},
    )
    bound = {entry.key for entry in written.training_info[0].initialization_binding}
    assert {"classifier.4.weight", "classifier.4.bias"} == {n for n in bound if n[:2] == "cl"}
