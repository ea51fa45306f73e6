"""Names of modules in folders of PEFT: those of transformers, whoever wrote the file.

`tests.support.genai_builder` stores adapters that PEFT saved, its logits with them, and the names
of transformers' modules; `tests/oracles/test_peft.py` asks PEFT itself.
"""

import json
import re
import shutil
import warnings

import numpy as np
import onnx
import optax
import pytest
from onnx.helper import make_node, make_operatorsetid
from safetensors.numpy import load_file, save_file

import jaxonnx
from tests.support.adapter_files import changed, peft_folder
from tests.support.few_bit_files import network, normal
from tests.support.genai_builder import FOLDER, STORED, describe
from tests.support.paths import DATA

IDS = np.array(json.loads((FOLDER / "losses.json").read_text())["ids"])
CHECKPOINTS = json.loads((FOLDER / "checkpoints.json").read_text())
MODULES = json.loads((FOLDER / "modules.json").read_text())
PEFT = FOLDER / "peft"


def load_family(name, folder, family=None):
    """A stored file in a folder that tells its model type."""
    folder.mkdir(exist_ok=True)
    shutil.copy(FOLDER / f"{name}.onnx", folder / "model.onnx")
    about = {"model": {"type": family or name, "decoder": {"filename": "model.onnx"}}}
    (folder / "genai_config.json").write_text(json.dumps(about))
    return jaxonnx.load(folder)


def saved(adapters, folder, *model, **named):
    """The arrays by name, and the configuration."""
    adapters.save(f"{folder}/", *model, **named)
    arrays = load_file(folder / "adapter_model.safetensors")
    return arrays, json.loads((folder / "adapter_config.json").read_text())


def find_names(model, pattern):
    return [name for name in model.params if re.fullmatch(pattern, name)]


def product(adapters, name):
    a, b = (np.asarray(adapters.values[f"{name}.lora_{end}"]) for end in "AB")
    return adapters.alpha / adapters.rank * b @ a


def test_a_folder_of_peft_on_a_decoder_with_norms_of_queries_and_keys(tmp_path):
    """Split, Reshape and norms stand between qkv_proj and the attention of Gemma 3."""
    model = load_family("gemma3_text", tmp_path / "model")
    adapters = jaxonnx.Adapters.load(PEFT, model)
    named = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}

    def logits(adapters):
        return adapters.attach(model).without_cache().predict(named)

    wanted = np.load(PEFT / "logits.npy")
    np.testing.assert_allclose(logits(adapters), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    arrays, _ = saved(adapters, tmp_path / "back", model)
    theirs = load_file(PEFT / "adapter_model.safetensors")
    assert {name: x.shape for name, x in arrays.items()} == {n: x.shape for n, x in theirs.items()}
    again = jaxonnx.Adapters.load(tmp_path / "back", model)
    np.testing.assert_allclose(logits(again), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", STORED)
def test_modules_are_those_of_transformers(name, tmp_path):
    model = load_family(name, tmp_path / "model", {"gpt_oss": "gptoss"}.get(name))
    where = {"gpt_oss": "attention", "lfm2": ["*_proj*"]}.get(name, "all-linear")
    arrays, _ = saved(jaxonnx.Adapters.of(changed(model, 2, where)), tmp_path / "peft", model)
    stems = {re.sub(r"^base_model\.model\.|\.lora_[AB]\.weight$", "", key) for key in arrays}
    assert sorted(stems) == MODULES[name]


@pytest.mark.parametrize("name", ["gemma3_text", "lfm2", "qwen2", "qwen3"])
def test_vectors_trained_beside_adapters_have_the_names_of_transformers(name, tmp_path):
    """Gemma's norms are 1 + those of transformers, and the file of Qwen2 packs three biases.

    PEFT ignores names that it does not find; `describe` gives shape and values of transformers'.
    """
    model = load_family(name, tmp_path / "model")
    vectors = [key for key, value in model.params.items() if value.ndim == 1]
    lora, still = jaxonnx.LoRA(2, where="attention"), optax.sgd(1e-6)
    settings = {"loss": "causal_lm", "optimizer": still, "lora": lora, "trainable": vectors}
    result = jaxonnx.train(model, {"input_ids": IDS[:, :4]}, **settings)
    arrays, _ = saved(result.lora, tmp_path / "peft")
    written = {
        re.sub(r"^base_model\.model\.|base_layer\.", "", key): x
        for key, x in arrays.items()
        if ".lora_" not in key
    }
    theirs = {key: x for key, x in CHECKPOINTS[name].items() if len(x[0]) == 1}
    assert written.keys() == theirs.keys()
    for key, (shape, total) in describe(written).items():
        assert [*shape] == theirs[key][0]
        np.testing.assert_allclose(total, theirs[key][1], rtol=0, atol=2e-2)
    more = {key: x + 0.5 if ".lora_" not in key else x for key, x in arrays.items()}
    save_file(more, tmp_path / "peft" / "adapter_model.safetensors")
    again = jaxonnx.Adapters.load(tmp_path / "peft", model)
    for key in vectors:
        value, present = again.values[key], model.params[key]
        assert value.dtype == present.dtype  # float16 for Qwen
        np.testing.assert_allclose(value, present + 0.5, rtol=0, atol=2e-3)


def test_a_part_of_a_packed_bias_leaves_the_others(tmp_path):
    """As `bias="lora_only"` with q_proj alone: keys and values keep theirs."""
    model = load_family("qwen2", tmp_path / "model")
    stem = "model.layers.1.self_attn.q_proj"
    arrays = peft_folder(tmp_path / "peft", {stem: {"A": normal(2, 32), "B": normal(32, 2)}})
    bias = normal(32)
    arrays[f"base_model.model.{stem}.base_layer.bias"] = bias
    save_file(arrays, tmp_path / "peft" / "adapter_model.safetensors")
    (name,) = {*jaxonnx.Adapters.load(tmp_path / "peft", model).values} & model.params.keys()
    value = jaxonnx.Adapters.load(tmp_path / "peft", model).values[name]
    np.testing.assert_allclose(value[:32], bias, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(value[32:], model.params[name][32:])


def test_names_of_vectors_that_are_not_there_are_said(tmp_path):
    model = load_family("qwen3", tmp_path / "model")
    stem = "model.layers.1.self_attn.o_proj"
    arrays = peft_folder(tmp_path / "peft", {stem: {"A": normal(2, 32), "B": normal(32, 2)}})
    arrays["base_model.model.model.layers.1.input_norm.weight"] = normal(32)
    save_file(arrays, tmp_path / "peft" / "adapter_model.safetensors")
    words = "input_norm.*unknown here; near it are model.layers.1.input_layernorm.weight"
    with pytest.raises(jaxonnx.InputError, match=words):
        jaxonnx.Adapters.load(tmp_path / "peft", model)


def test_dora_of_a_part_of_a_packed_matrix(tmp_path):
    """The keys beside q_proj and v_proj keep the norms that they have in the base."""
    model = load_family("gemma3_text", tmp_path / "model")
    stem, (name,) = "model.layers.0.self_attn", find_names(model, r".*layers\.0.*qkv_proj.*")
    parts = {"q_proj": slice(32), "v_proj": slice(48, 64)}
    factors, norms, wanted = {}, {}, np.array(model.params[name]).T
    for end, rows in parts.items():
        a, b, norm = normal(2, 16), normal(len(wanted[rows]), 2), normal(len(wanted[rows]))
        factors[f"{stem}.{end}"], norms[end] = {"A": a, "B": b}, norm
        whole = wanted[rows] + 2 * b @ a
        wanted[rows] = norm[:, None] * whole / np.linalg.norm(whole, axis=1, keepdims=True)
    arrays = peft_folder(tmp_path / "peft", factors, use_dora=True)
    for end, norm in norms.items():
        arrays[f"base_model.model.{stem}.{end}.lora_magnitude_vector"] = norm
    save_file(arrays, tmp_path / "peft" / "adapter_model.safetensors")
    adapters = jaxonnx.Adapters.load(tmp_path / "peft", model)
    whole = np.array(model.params[name]).T + product(adapters, name)
    scale = adapters.values[f"{name}.lora_magnitude"] / np.linalg.norm(whole, axis=1)
    np.testing.assert_allclose(scale[:, None] * whole, wanted, rtol=0, atol=1e-5)


def test_rows_of_tokens_where_a_packed_matrix_has_the_shape_of_the_table(tmp_path):
    """64 tokens, and 64 queries, keys and values of 16 inputs."""
    model = load_family("gemma3_text", tmp_path / "model")
    (name,) = find_names(model, r".*qkv_proj.*")[:1]
    (table,) = find_names(model, "lm_head.*")
    assert {*model.params[name].shape} == {*model.params[table].shape} == {16, 64}
    stem = "model.layers.1.self_attn.o_proj"
    factors = {stem: {"A": normal(2, 32), "B": normal(16, 2)}}
    arrays = peft_folder(tmp_path / "peft", factors, trainable_token_indices=[4, 6])
    rows = normal(2, 16)
    arrays["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"] = rows
    save_file(arrays, tmp_path / "peft" / "adapter_model.safetensors")
    adapters = jaxonnx.Adapters.load(tmp_path / "peft", model)
    assert {*adapters.layouts} == {table, "model.layers.1.attn.o_proj.MatMul.weight"}
    indices, changes = (adapters.values[f"{table}.lora_{end}"] for end in "AB")
    np.testing.assert_array_equal(indices, [4, 6])
    present = model.params[table].T[indices]
    np.testing.assert_allclose(changes.T + present, rows, rtol=0, atol=1e-5)


def test_modules_of_phi_3_are_joined_or_split(tmp_path):
    """transformers has gate_up_proj and qkv_proj, the builder's file gate_proj, up_proj and qkv."""
    model = load_family("phi3", tmp_path / "model")
    layer = "model.layers.1"
    factors = {
        f"{layer}.self_attn.qkv_proj": {"A": normal(2, 32), "B": normal(96, 2)},
        f"{layer}.mlp.gate_up_proj": {"A": normal(2, 32), "B": normal(192, 2)},
    }
    arrays = peft_folder(tmp_path / "peft", factors)
    wanted = {name: 2 * pair["B"] @ pair["A"] for name, pair in factors.items()}
    for reader in (model, jaxonnx.load(FOLDER / "phi3.onnx")):  # the folder tells the family
        adapters = jaxonnx.Adapters.load(tmp_path / "peft", reader)
        gate, up, qkv = (
            next(name for name in adapters.layouts if part in name)
            for part in ("gate_proj", "up_proj.", "qkv_proj")
        )
        halves = np.concatenate([product(adapters, gate), product(adapters, up)])
        np.testing.assert_allclose(halves, wanted[f"{layer}.mlp.gate_up_proj"], rtol=1e-5)
        qkv = product(adapters, qkv)
        np.testing.assert_allclose(qkv, wanted[f"{layer}.self_attn.qkv_proj"], rtol=1e-5)
    back, config = saved(adapters, tmp_path / "back", model)
    assert back.keys() == arrays.keys()
    assert config["lora_alpha"] == 2 * config["r"]
    for name, change in wanted.items():
        a, b = (back[f"base_model.model.{name}.lora_{end}.weight"] for end in "AB")
        np.testing.assert_allclose(2 * b @ a, change, rtol=1e-4, atol=1e-5)
    fresh = {name: pair | {"B": 0 * pair["B"]} for name, pair in factors.items()}
    peft_folder(tmp_path / "fresh", fresh)
    assert {*jaxonnx.Adapters.load(tmp_path / "fresh", model).layouts} == {*adapters.layouts}


@pytest.mark.parametrize(
    ("name", "layers"), [("llava-genai", 1), ("internvl-js", 1), ("qwen2_5_vl_text", 2)]
)
def test_a_decoder_beside_a_vision_encoder(name, layers, tmp_path):
    """transformers has it in `model.language_model`; PEFT ignores names that it does not find.

    tests/oracles/test_vision_language.py asks PEFT, of a decoder alone tests/oracles/test_peft.py.
    """
    if layers == 1:
        model = jaxonnx.load(DATA / "vision" / name)
    else:
        model = load_family("llama", tmp_path / "model", name)
    adapters = jaxonnx.Adapters.of(changed(model, 2, "all-linear"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays, config = saved(adapters, tmp_path / "saved", model)
    assert config.get("task_type") is None
    stem = "base_model.model.model.language_model.layers."
    assert len(arrays) == 14 * layers
    assert all(key.startswith(stem) for key in arrays)
    named = {"saved": stem, "alone": "base_model.model.model.layers."}
    named["older"] = "base_model.model.language_model.model.layers."
    for folder, other in named.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "adapter_config.json").write_text(json.dumps(config))
        renamed = {key.replace(stem, other): x for key, x in arrays.items()}
        save_file(renamed, tmp_path / folder / "adapter_model.safetensors")
        read = jaxonnx.Adapters.load(tmp_path / folder, model)
        assert read.layouts.keys() == adapters.layouts.keys()
        for weight in adapters.layouts:
            np.testing.assert_allclose(product(read, weight), product(adapters, weight), atol=1e-5)


def test_names_that_are_not_certain_are_said(tmp_path):
    """PEFT ignores what it does not find."""
    model = jaxonnx.load(FOLDER / "llama.onnx")
    adapters = jaxonnx.Adapters.of(changed(model, 2, "attention"))
    with pytest.warns(UserWarning, match=r"model type, which the file does not tell.*self_attn"):
        adapters.save(f"{tmp_path}/unknown/", model)
    with pytest.warns(UserWarning, match="model type 'glm'.*named_modules"):
        adapters.save(f"{tmp_path}/unknown/", load_family("llama", tmp_path / "model", "glm"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapters.save(f"{tmp_path}/known/", load_family("llama", tmp_path / "model"))
        adapters.save(f"{tmp_path}/named/", model, names=lambda name: name)
    with pytest.raises(jaxonnx.InputError, match=r"one matrix for several modules.*pass the model"):
        adapters.save(f"{tmp_path}/alone/")


def test_a_weight_without_a_module_is_refused(tmp_path):
    nodes = [make_node("MatMul", ["x", "onnx::MatMul_7"], ["y"])]
    weight = {"onnx::MatMul_7": normal(32, 32)}
    proto = network(nodes, ("x", onnx.TensorProto.FLOAT, ["n", 32]), **weight)
    model = jaxonnx.load(proto)
    adapters = jaxonnx.Adapters.of(changed(model, 2, "onnx*"))
    with pytest.raises(jaxonnx.InputError, match=r"module of 'onnx::MatMul_7'.*pass names="):
        adapters.save(f"{tmp_path}/peft/", model)
    arrays, _ = saved(adapters, tmp_path / "peft", model, names=lambda name: "head")
    assert {*arrays} == {f"base_model.model.head.lora_{end}.weight" for end in "AB"}
    proto.graph.node[0].name = "/encoder/layers.0/linear1/MatMul"
    model = jaxonnx.load(proto)
    arrays, _ = saved(jaxonnx.Adapters.of(changed(model, 2, "onnx*")), tmp_path / "named", model)
    assert min(arrays) == "base_model.model.encoder.layers.0.linear1.lora_A.weight"


def test_names_are_anchored_since_peft_matches_their_ends(tmp_path):
    names = ("q", "blk.q", "out.q")
    nodes = [
        make_node("MatMul", [x, f"{name}.weight"], [y])
        for name, x, y in zip(names, ("x", "h", "i"), ("h", "i", "y"), strict=True)
    ]
    weight = {f"{name}.weight": normal(16, 16) for name in names}
    proto = network(nodes, ("x", onnx.TensorProto.FLOAT, ["n", 16]), **weight)
    proto.opset_import.append(make_operatorsetid("com.microsoft", 1))
    ranks = {"q": 2, "blk.q": 3}
    factors = {n: {"A": normal(r, 16), "B": normal(16, r)} for n, r in ranks.items()}
    peft_folder(tmp_path / "theirs", factors, r=3, rank_pattern={"^q": 2})
    model = jaxonnx.load(proto)
    adapters = jaxonnx.Adapters.load(tmp_path / "theirs", model)
    _, config = saved(adapters, tmp_path / "peft", model)
    # as PEFT 0.21 matches: check_target_module_exists, get_pattern_key
    targets = {name for name in names if re.fullmatch(config["target_modules"], name)}
    assert targets == {"q", "blk.q"}
    for name, rank in ranks.items():
        numbers = []
        for kind, default in (("rank", config["r"]), ("alpha", config["lora_alpha"])):
            pattern = config[f"{kind}_pattern"]
            keys = [key for key in pattern if re.match(rf"(.*\.)?({key})$", name)]
            numbers.append(pattern[keys[0]] if keys else default)
        assert numbers == [rank, rank * adapters.alpha / adapters.rank]


HEADS = """<ir_version: 10, opset_import: ["": 21]>
g (float[n,4] x) => (float[n,3] y) {
    a = Gemm<transB = 1>(x, body_weight)
    b = Gemm<transB = 1>(a, pre_fc_weight, pre_fc_bias)
    c = Relu(b)
    y = Gemm<transB = 1>(c, fc_weight, fc_bias)
}"""


@pytest.mark.parametrize("trainable", [{"fc.weight", "fc.bias"}, {"fc.weight"}])
def test_modules_that_peft_saves_beside_one_that_was_trained_in_full(trainable, tmp_path):
    """It saves those whose names end alike, too, and of all of them weight and bias.

    `tests/oracles/test_peft.py` loads such a folder in PEFT.
    """
    model = load_heads()
    adapted = train_heads(model, trainable, "body.weight")
    arrays, config = saved(adapted.lora, tmp_path / "peft", model)
    assert {*config["modules_to_save"]} >= {"fc"}
    names = {f"base_model.model.{m}.{x}" for m in ("pre_fc", "fc") for x in ("weight", "bias")}
    assert names == {name for name in arrays if "lora" not in name}
    np.testing.assert_array_equal(
        arrays["base_model.model.pre_fc.weight"], model.params["pre_fc.weight"]
    )
    loaded = jaxonnx.Adapters.load(tmp_path / "peft", model).attach(model)
    x = normal(5, 4)
    np.testing.assert_allclose(loaded(x), adapted.model(x), rtol=0, atol=1e-5)


def test_a_module_with_adapters_beside_one_that_was_trained_in_full_is_refused(tmp_path):
    adapted = train_heads(load_heads(), {"fc.weight"}, "pre_fc.weight")
    with pytest.raises(jaxonnx.InputError, match=r"'pre_fc\.weight'.*it has adapters: train it in"):
        adapted.lora.save(f"{tmp_path}/peft/")


def load_heads():
    proto = onnx.parser.parse_model(HEADS)
    for node in proto.graph.node:
        node.input[:] = [re.sub("_(weight|bias)$", r".\1", name) for name in node.input]
    shapes = {"body.weight": (4, 4), "pre_fc.weight": (6, 4), "fc.weight": (3, 6)}
    shapes |= {"pre_fc.bias": (6,), "fc.bias": (3,)}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(normal(*shape), name) for name, shape in shapes.items()
    )
    return jaxonnx.load(proto)


def train_heads(model, trainable, where):
    data = normal(8, 4), np.arange(8) % 3
    lora, settings = jaxonnx.LoRA(rank=2, where=where), {"epochs": 2, "progress": False}
    return jaxonnx.train(model, data, lora=lora, trainable=[*trainable], **settings)


@pytest.mark.parametrize("prefix", ["", "model.", "module.model.", "_orig_mod."])
def test_a_wrapper_around_the_network_is_left_out(tmp_path, prefix):
    """torch.onnx.export of a module that holds the network puts its own name before all others."""
    modules = ["model.layers.0.self_attn.q_proj", "lm_head"]
    weights = [f"{prefix}{module}.weight" for module in modules]
    nodes = [make_node("MatMul", [x, w], [y]) for x, w, y in zip("xh", weights, "hy", strict=True)]
    tensors = {name: normal(32, 32) for name in weights}
    model = jaxonnx.load(network(nodes, ("x", onnx.TensorProto.FLOAT, ["n", 32]), **tensors))
    pairs = {module: {"A": normal(2, 32), "B": normal(32, 2)} for module in modules}
    peft_folder(tmp_path / "peft", pairs)
    adapters = jaxonnx.Adapters.load(tmp_path / "peft", model)
    for module, name in zip(modules, weights, strict=True):
        expected = 2 * pairs[module]["B"] @ pairs[module]["A"]
        np.testing.assert_allclose(product(adapters, name), expected, rtol=1e-4, atol=1e-5)
    written, _ = saved(adapters, tmp_path / "back", model)
    assert written.keys() == load_file(tmp_path / "peft" / "adapter_model.safetensors").keys()
    peft_folder(tmp_path / "wrapped", {f"{prefix}{module}": pairs[module] for module in modules})
    again = jaxonnx.Adapters.load(tmp_path / "wrapped", model)
    np.testing.assert_array_equal(product(again, weights[1]), product(adapters, weights[1]))
    raw, _ = saved(
        again, tmp_path / "names", model, names=lambda name: name.removesuffix(".weight")
    )
    assert raw.keys() == load_file(tmp_path / "wrapped" / "adapter_model.safetensors").keys()
    peft_folder(tmp_path / "other", {"layers.1.q_proj": pairs["lm_head"]})
    with pytest.raises(jaxonnx.InputError, match=r"no weight of a module 'layers\.1\.q_proj'"):
        jaxonnx.Adapters.load(tmp_path / "other", model)


@pytest.mark.parametrize(
    ("modules", "wrapper"),
    [
        (["net.model.layers.0.mlp.up_proj", "net.lm_head", "value"], "net."),
        (["a.net.model.layers.0.mlp.up_proj", "a.net.model.embed_tokens"], "a.net."),
        (["_orig_mod.layers.0.mlp.up_proj", "_orig_mod.score"], "_orig_mod."),
        (["model.model.layers.0.mlp.up_proj", "model.score"], "model."),
        (["_orig_mod.module.model.layers.0.mlp.up_proj"], "_orig_mod.module."),
        # the network's own names, or those of a part of a model, which PEFT has as well
        (["model.layers.0.mlp.up_proj", "model.embed_tokens"], ""),
        (["model.model.0.conv", "model.model.1.conv"], ""),
        (["module.0.conv", "module.1.conv"], ""),
        (["a.model.layers.0.mlp.up_proj", "b.model.layers.0.mlp.up_proj"], ""),
        (["model.backbone.model.encoder.0.conv", "model.decoder.layers.0.fc1"], ""),
        (["decoder.transformer.h.0.attn.c_attn", "decoder.lm_head"], ""),
        (["language_model.model.layers.0.mlp.up_proj", "language_model.lm_head"], ""),
    ],
)
def test_names_are_written_without_that_of_a_wrapper(tmp_path, modules, wrapper):
    """Also of what is trained beside adapters, and of checkpoints."""
    weights, bias = [f"{module}.weight" for module in modules], f"{modules[0]}.bias"
    nodes, values = [], ["x"]
    for weight in weights:
        values.append(f"{weight}.product")
        nodes.append(make_node("MatMul", [values[-2], weight], [values[-1]]))
    nodes.append(make_node("Add", [values[-1], bias], ["y"]))
    tensors = {name: normal(32, 32) for name in weights} | {bias: normal(32)}
    model = jaxonnx.load(network(nodes, ("x", onnx.TensorProto.FLOAT, ["n", 32]), **tensors))
    data, lora = (normal(4, 32), normal(4, 32)), jaxonnx.LoRA(2, where=weights)
    settings = {"loss": "squared_error", "lora": lora, "trainable": [bias]}
    adapters = jaxonnx.train(model, data, optimizer=optax.sgd(1e-4), **settings).lora
    arrays, _ = saved(adapters, tmp_path / "peft")
    stems = [module.removeprefix(wrapper) for module in modules]
    keys = {f"{stem}.lora_{end}.weight" for stem in stems for end in "AB"}
    keys.add(f"{stems[0]}.base_layer.bias")
    assert {key.removeprefix("base_model.model.") for key in arrays} == keys
    again = jaxonnx.Adapters.load(tmp_path / "peft", model)
    assert again.values.keys() == adapters.values.keys()
    raw, _ = saved(
        again, tmp_path / "names", model, names=lambda name: name.removesuffix(".weight")
    )
    assert f"base_model.model.{modules[0]}.base_layer.bias" in raw
    again = jaxonnx.Adapters.load(tmp_path / "names", model)
    assert again.values.keys() == adapters.values.keys()
    with pytest.warns(UserWarning, match=r"has no config\.json"):
        jaxonnx.export_safetensors(model, tmp_path / "checkpoint")
    stored = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert stored.keys() == {f"{stem}.weight" for stem in stems} | {f"{stems[0]}.bias"}
