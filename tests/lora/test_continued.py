"""Adapters that are trained further, combined, or of embeddings and of whole layers."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file, save_file

import jaxonnx
from tests.support.adapter_files import changed, peft_folder
from tests.support.lora_networks import normal

pytestmark = pytest.mark.filterwarnings("ignore:the names of modules are not known")
EMBED, LAYER, HEAD = "model.embed_tokens.weight", "layers.0.q_proj.weight_t", "lm_head.weight_t"
IDS = np.array([0, 3, 6, 3])
DATA = np.arange(14) % 7, normal(14, 7)


def decoder(tied=False):
    """An embedding, a matrix and an output layer, named and transposed as mobius does."""
    nodes = [
        helper.make_node("Gather", [EMBED, "ids"], ["e"]),
        helper.make_node("MatMul", ["e", LAYER], ["h"]),
        *([helper.make_node("Transpose", [EMBED], ["t"])] if tied else []),
        helper.make_node("MatMul", ["h", "t" if tied else HEAD], ["y"]),
    ]
    arrays = {EMBED: normal(7, 4), LAYER: normal(4, 5), HEAD: normal(5, 7)}
    if tied:
        arrays = {EMBED: normal(7, 4), LAYER: normal(4, 4)}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 7])],
        [numpy_helper.from_array(x, name) for name, x in arrays.items()],
    )
    return jaxonnx.load(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    )


def fit(model, **more):
    return jaxonnx.train(
        model,
        DATA,
        loss="squared_error",
        optimizer=optax.sgd(0.05),
        batch_size=7,
        epochs=2,
        progress=False,
        **more,
    )


def test_adapters_are_trained_further(tmp_path):
    """As many epochs again as one run of twice as many makes, and saved in every form."""
    model = decoder()
    lora = jaxonnx.LoRA(rank=2, where=[LAYER])
    first = fit(model, lora=lora, seed=0)
    first.lora.save(tmp_path / "a.npz")
    loaded = jaxonnx.Adapters.load(tmp_path / "a.npz")
    second = fit(loaded.attach(model), seed=0)
    assert second.history.losses[0] < first.history.losses[0]
    whole = fit(first.lora.attach(model), seed=0)
    for name, value in second.lora.values.items():
        np.testing.assert_array_equal(value, whole.lora.values[name])
        assert not np.array_equal(value, first.lora.values[name])
    assert "not merged (result.lora has them" in str(second)
    y = second.model(IDS)
    second.model.save(tmp_path / "merged.onnx")
    second.model.save(tmp_path / "nodes.onnx", adapters="nodes")
    second.model.save(tmp_path / "inputs.onnx", adapters="inputs")
    second.lora.save(f"{tmp_path}/peft/")  # by the model of the run
    peft = jaxonnx.Adapters.load(tmp_path / "peft", model).apply(model)
    inputs = jaxonnx.load(tmp_path / "inputs.onnx")
    ours = [jaxonnx.load(tmp_path / f"{form}.onnx")(IDS) for form in ("merged", "nodes")]
    ours += [peft(IDS), inputs(ids=IDS, **second.lora.to_inputs())]
    for other in ours:
        np.testing.assert_allclose(other, y, rtol=1e-5, atol=1e-6)


def make(model, seed, alpha, rank=2):
    adapted = jaxonnx.LoRA(rank, alpha=alpha, where=[LAYER, HEAD]).attach(
        model, jax.random.key(seed)
    )
    rng = np.random.default_rng(seed)
    values = {n: jnp.asarray(rng.normal(size=x.shape), "f4") for n, x in adapted.params.items()}
    return jaxonnx.Adapters.of(adapted.replace(params=values))


def change(adapters, name):
    a, b = (np.asarray(adapters.values[f"{name}.lora_{end}"]) for end in "AB")
    return adapters.alpha / adapters.rank * b @ a


def test_combined_adapters():
    model = decoder()
    both = make(model, 1, 4.0), make(model, 2, 2.0)
    cat = jaxonnx.Adapters.combine(both, [0.7, -0.3])
    linear = jaxonnx.Adapters.combine(both, [0.7, -0.3], "linear")
    assert (cat.rank, linear.rank) == (4, 2)
    for name in (LAYER, HEAD):
        wanted = 0.7 * change(both[0], name) - 0.3 * change(both[1], name)
        np.testing.assert_allclose(change(cat, name), wanted, atol=1e-5)
        # PEFT's: sqrt(|weight * scale|) for A and for B, the sign with A
        (a, b), (c, d) = [[x.values[f"{name}.lora_{end}"] for end in "AB"] for x in both]
        f, g = np.sqrt(0.7 * 2), np.sqrt(0.3)
        wanted = (f * b + g * d) @ (f * a - g * c)
        np.testing.assert_allclose(change(linear, name), wanted, atol=1e-5)
    merged = cat.apply(model)(IDS)
    assert np.abs(merged - model(IDS)).max() > 0.1


def test_ranks_of_other_modules_are_not_added():
    """Of modules in one matrix (q_proj and v_proj in qkv_proj) with ranks 1 and 2, and 2 and 1."""
    model, member = decoder(), f"{LAYER}.lora_B"

    def share_ranks(seed, first):
        adapters = make(model, seed, 3.0, rank=3)
        blocks = np.zeros((5, 3), np.float32)
        blocks[:2, :first] = blocks[2:, first:] = 1
        return replace(
            adapters, values={**adapters.values, member: adapters.values[member] * blocks}
        )

    one, other, alike = share_ranks(1, 1), share_ranks(2, 2), share_ranks(3, 1)
    cat = jaxonnx.Adapters.combine([one, other], [0.7, 0.3])
    sums = 0.7 * change(one, LAYER) + 0.3 * change(other, LAYER)
    np.testing.assert_allclose(change(cat, LAYER), sums, atol=1e-5)
    with pytest.raises(jaxonnx.InputError, match=r"one matrix of several modules.*method='cat'"):
        jaxonnx.Adapters.combine([one, other], [0.7, 0.3], "linear")
    assert jaxonnx.Adapters.combine([one, alike], [0.7, 0.3], "linear").rank == 3


def test_what_cannot_be_combined_is_refused():
    model = decoder()
    pair = make(model, 1, 2.0), make(model, 2, 3.0, rank=3)
    combine = jaxonnx.Adapters.combine
    assert combine(pair, [1, 1]).rank == 5
    with pytest.raises(jaxonnx.InputError, match="several ranks: method='cat'"):
        combine(pair, [1, 1], "linear")
    with pytest.raises(jaxonnx.InputError, match="2 adapters and 1 weights"):
        combine(pair, [1])
    with pytest.raises(jaxonnx.InputError, match="different models"):
        combine([pair[0], make(decoder(), 1, 2.0)], [1, 1])
    others = replace(pair[0], values={**pair[0].values, "bias": jnp.ones(3)})
    with pytest.raises(jaxonnx.InputError, match=r"'bias' was trained .* cannot be combined"):
        combine([others, pair[0]], [1, 1])
    with pytest.raises(jaxonnx.InputError, match=r"DoRA.*norms of the base.*Merge one"):
        combine([jaxonnx.Adapters.of(changed(model, 2, "all-linear", dora=True))] * 2, [1, 1])


def test_embeddings_and_whole_layers_of_peft(tmp_path):
    """lora_embedding_A, modules_to_save, and both written again."""
    model, scale = decoder(), 4 / 2
    arrays = {
        "model.embed_tokens.lora_embedding_A": normal(2, 7),
        "model.embed_tokens.lora_embedding_B": normal(4, 2),
        "model.embed_tokens.base_layer.weight": np.asarray(model.params[EMBED]),
        "lm_head.weight": normal(7, 5),
    }
    peft_folder(tmp_path / "theirs", {}, modules_to_save=["lm_head"])
    save_file(
        {f"base_model.model.{name}": x for name, x in arrays.items()},
        tmp_path / "theirs" / "adapter_model.safetensors",
    )
    adapters = jaxonnx.Adapters.load(tmp_path / "theirs", model)
    a, b, _, head = arrays.values()
    table = np.asarray(model.params[EMBED]) + scale * (b @ a).T
    wanted = table[IDS] @ np.asarray(model.params[LAYER]) @ head.T
    adapted = adapters.attach(model)
    np.testing.assert_allclose(adapted(IDS), wanted, rtol=1e-5, atol=1e-5)
    assert {f"{EMBED}.lora_A", f"{EMBED}.lora_B", HEAD} == adapted.params.keys()

    adapters.save(f"{tmp_path}/ours/", model)
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    theirs = {f"base_model.model.{n}": x for n, x in arrays.items() if "base_layer" not in n}
    assert {n: x.shape for n, x in ours.items()} == {n: x.shape for n, x in theirs.items()}
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head"]
    again = jaxonnx.Adapters.load(tmp_path / "ours", model).apply(model)
    np.testing.assert_allclose(again(IDS), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [5, 8])
@pytest.mark.filterwarnings("ignore:.*the embedding and the output layer are one weight")
@pytest.mark.parametrize("tied", [False, True])
def test_tables_of_another_vocabulary(rows, tied, tmp_path):
    """PEFT saves tables whole where transformers resized them; the file may have more rows."""
    model = decoder(tied)
    table, head = normal(rows, 4), normal(rows, 5)
    head = table if tied else head
    peft_folder(tmp_path / "theirs", {})
    arrays = {"model.embed_tokens.weight": table, "lm_head.weight": head}
    arrays["layers.0.q_proj.lora_A.weight"] = normal(2, 4)
    arrays["layers.0.q_proj.lora_B.weight"] = np.zeros((4 if tied else 5, 2), np.float32)
    named = {f"base_model.model.{name}": x for name, x in arrays.items()}
    save_file(named, tmp_path / "theirs" / "adapter_model.safetensors")
    if rows > 7:
        message = r"'.*.weight' was .* is of 7 rows here, not 8: model.with_tokens\(...\) adds"
        with pytest.raises(jaxonnx.InputError, match=message):
            jaxonnx.Adapters.load(tmp_path / "theirs", model)
        return
    with pytest.warns(UserWarning, match="has 5 rows, and 7 here: those beyond stay as they are"):
        adapted = jaxonnx.Adapters.load(tmp_path / "theirs", model).attach(model)
    before = {name: np.asarray(model.params[name]) for name in model.params}
    whole = np.concatenate([table, before[EMBED][5:]])
    last = whole if tied else np.concatenate([head, before[HEAD].T[5:]])
    wanted = whole[IDS] @ before[LAYER] @ last.T
    np.testing.assert_allclose(adapted(IDS), wanted, rtol=1e-5, atol=1e-5)


def test_an_embedding_that_is_the_output_layer_too(tmp_path):
    """The adapter changes both, and a warning says so; PEFT's change one of the two."""
    model = decoder(tied=True)
    a, b = normal(2, 7), normal(4, 2)
    peft_folder(tmp_path / "theirs", {})
    save_file(
        {
            "base_model.model.model.embed_tokens.lora_embedding_A": a,
            "base_model.model.model.embed_tokens.lora_embedding_B": b,
        },
        tmp_path / "theirs" / "adapter_model.safetensors",
    )
    with pytest.raises(jaxonnx.InputError, match=r"adapts apart.*tied=\[\]"):
        jaxonnx.Adapters.load(tmp_path / "theirs", model)
    fresh = jaxonnx.LoRA(2, where=EMBED).attach
    with pytest.warns(UserWarning, match="the embedding and the output layer are one weight"):
        adapted = fresh(model, jax.random.key(0))
    values = zip(adapted.params, (a, b), strict=True)
    adapted = adapted.replace(params={name: jax.numpy.asarray(x) for name, x in values})
    table = np.asarray(model.params[EMBED]) + (b @ a).T
    wanted = table[IDS] @ np.asarray(model.params[LAYER]) @ table.T
    np.testing.assert_allclose(adapted(IDS), wanted, rtol=1e-5, atol=1e-5)
    onnx.checker.check_model(adapted.to_onnx())
    with pytest.raises(jaxonnx.InputError, match="adapts apart"):
        jaxonnx.Adapters.of(adapted).save(tmp_path / "ours", model)


@pytest.mark.filterwarnings("ignore:.*the embedding and the output layer are one weight")
@pytest.mark.parametrize("change", ["none", "both", "one"])
def test_tables_of_a_tied_model_in_a_folder(change, tmp_path):
    """PEFT saves both if they were resized, or trained in full with ensure_weight_tying."""
    model = decoder(tied=True)
    table = np.asarray(model.params[EMBED])
    trained = table if change == "none" else normal(*table.shape)
    stem = "base_model.model."
    both = {"model.embed_tokens.weight": trained, "lm_head.weight": trained}
    both |= {"lm_head.weight": table} if change == "one" else {}
    factors = {
        "layers.0.q_proj.lora_A.weight": normal(2, 4),
        "layers.0.q_proj.lora_B.weight": normal(4, 2),
    }
    peft_folder(tmp_path / "theirs", {})
    arrays = {stem + name: x for name, x in (both | factors).items()}
    save_file(arrays, tmp_path / "theirs" / "adapter_model.safetensors")
    if change == "one":
        with pytest.raises(jaxonnx.InputError, match=r"tied=\[\]"):
            jaxonnx.Adapters.load(tmp_path / "theirs", model)
        return
    adapters = jaxonnx.Adapters.load(tmp_path / "theirs", model)
    a, b = factors.values()
    matrix = np.asarray(model.params[LAYER]) + 2 * (b @ a).T
    wanted = trained[IDS] @ matrix @ trained.T
    np.testing.assert_allclose(adapters.attach(model)(IDS), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_weights_of_16_bits_that_round_an_adapter_away(kind, dora):
    """As for weights in few bits, merging says so; steps are 2**-11 and 2**-8 of a number."""
    infos = [helper.make_tensor_value_info(name, kind, ["n", 16]) for name in "xy"]
    weights = [helper.make_tensor(name, kind, [16, 16], normal(256)) for name in "vw"]
    nodes = [helper.make_node("MatMul", [x, w], [y]) for x, w, y in ("xvh", "hwy")]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], weights)
    opsets = [helper.make_opsetid("", 21)]
    model = jaxonnx.load(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    adapted = jaxonnx.LoRA(2, where=["v", "w"], dora=dora).attach(model, jax.random.key(0))

    def scaled(small):
        sizes = {"v.lora_B": small, "w.lora_B": 0.1}
        random = {n: s * normal(*adapted.params[n].shape) for n, s in sizes.items()}
        return adapted.replace(
            params=adapted.params | {n: jnp.asarray(x) for n, x in random.items()}
        )

    adapted.merge_adapters()  # warnings are errors in tests
    scaled(0.1).merge_adapters()
    with pytest.warns(UserWarning, match=r"rounds most of the adapter away in 1 weight \(v\)"):
        scaled(1e-5).merge_adapters()
