"""Roles of weights in transformers, for `LoRA(where=)`."""

import jax
import onnx
import pytest

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
    """The builder reads the table of the embedding from the weight of the logits."""
    assert adapted(GENAI, None) == adapted(GENAI, "all-linear")


def test_packed_experts_are_adapted_only_by_name(tmp_path):
    """A file has no place for their adapters: those of a role are saved beside the weights."""
    path, experts = DATA / "llm" / "builder" / "gpt_oss.onnx", "*experts.gate_up_proj.qweight"
    with pytest.warns(UserWarning, match=r"'all-linear' adapts no packed experts.*gate_up_proj"):
        assert not any("experts" in name for name in adapted(path, "all-linear"))
    with pytest.warns(UserWarning, match="'mlp' adapts no packed experts"):
        assert all("router" in name for name in adapted(path, "mlp"))
    assert all("attn" in name for name in adapted(path, "attention"))
    assert all("experts" in name for name in adapted(path, experts))
    with pytest.warns(UserWarning, match="where= with their names does"):
        model = jaxonnx.LoRA(2, where="all-linear").attach(jaxonnx.load(path), jax.random.key(0))
    model.save(tmp_path / "adapted.onnx", check=False)  # whose caches no random inputs fit
    names = {t.name for t in onnx.load(tmp_path / "adapted.onnx").graph.initializer}
    with pytest.warns(UserWarning, match="packed experts"):
        chosen = adapted(path, "all-linear")
    assert sum("lora_A" in name for name in names) == len(chosen)


def test_a_role_that_there_is_not():
    with pytest.raises(jaxonnx.InputError, match="no weight has this role in the graph"):
        adapted(DATA / "lenet.dynamo.onnx", "attention")


def test_a_probe_is_no_projection():
    """SigLIP pools with one learned query, [1, 1, channels], which has no low rank."""
    model = jaxonnx.load(DATA.parent / "docs" / "models" / "siglip")
    assert "vision_model.head.probe" in model.params
    adapted = jaxonnx.LoRA(rank=2, where="attention").attach(model, jax.random.key(0))
    places = [name.removesuffix(".lora_A") for name in adapted.params if name.endswith("lora_A")]
    assert len(places) == 10  # q, k, v and out of each tower, in and out of the pooling
    assert "vision_model.head.probe" not in places
