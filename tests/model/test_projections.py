"""Roles of weights in transformers, for `LoRA(where=)`."""

import jax
import numpy as np
import pytest
from onnx import TensorProto, helper

import jaxonnx
from tests.support.paths import DATA

GENAI, OPTIMUM = (DATA / "llm" / f"qwen3-{name}" / "model.onnx" for name in ("genai", "optimum"))


def adapted(path, where):
    model = jaxonnx.LoRA(rank=2, where=where).attach(jaxonnx.load(path), jax.random.key(0))
    return {name.removesuffix(".lora_A") for name in model.params if name.endswith(".lora_A")}


def test_the_builder_names_what_the_graph_tells():
    attention, mlp, both = (adapted(GENAI, role) for role in ("attention", "mlp", "all-linear"))
    assert all(".attn." in name for name in attention)
    assert all(".mlp." in name for name in mlp)
    assert (len(attention), len(mlp)) == (4, 6)
    assert both == attention | mlp


def test_attention_that_is_decomposed():
    """optimum's names are numbers; the roles are those of nodes, whose names have the modules."""
    model = jaxonnx.load(OPTIMUM)
    nodes = {n: node.name for node in model.proto.graph.node for n in node.input if node.name}
    roles = {role: adapted(OPTIMUM, role) for role in ("attention", "mlp")}
    assert all("/self_attn/" in nodes[name] for name in roles["attention"])
    assert all("/mlp/" in nodes[name] for name in roles["mlp"])
    assert [*map(len, roles.values())] == [8, 6]


@pytest.mark.parametrize("name", ["transformer.dynamo.onnx", "transformer.legacy.onnx"])
def test_an_encoder(name):
    """Two layers: projections in and out, and two of the perceptron, in the order of the file."""
    model = jaxonnx.load(DATA / name)
    order = [n for node in model.proto.graph.node for n in node.input]
    attention, mlp = (
        sorted(adapted(DATA / name, r), key=order.index) for r in ("attention", "mlp")
    )
    place = [*map(order.index, [*attention[:2], *mlp[:2], *attention[2:], *mlp[2:]])]
    assert place == sorted(place)
    assert (len(attention), len(mlp)) == (4, 4)


def test_a_tied_embedding_stays_frozen():
    """The table of an embedding that gives the logits as well is not adapted by default."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Transpose", ["table"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["y", "head"], ["logits"]),
    ]
    rng = np.random.default_rng(0)
    weights = {"table": rng.normal(size=(50, 32)), "w": rng.normal(size=(32, 32))}
    graph = helper.make_graph(
        nodes,
        "tied",
        [info("ids", TensorProto.INT64, ["n", "t"])],
        [info("logits", TensorProto.FLOAT, ["n", "t", 50])],
        [helper.make_tensor(n, TensorProto.FLOAT, w.shape, w.ravel()) for n, w in weights.items()],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert adapted(file, None) == {"w"}
    assert adapted(file, "all-linear") == {"w"}


def test_a_role_that_there_is_not():
    with pytest.raises(jaxonnx.InputError, match="no weight has this role in the graph"):
        adapted(DATA / "lenet.dynamo.onnx", "attention")
