"""Every setting of PEFT's LoraConfig: applied, without effect, or refused by its name.

`tests/data/make_peft.py` trained the adapters in PEFT; its outputs are stored.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

import jaxonnx
from tests.support.few_bit_files import normal
from tests.support.paths import DATA

STORED = np.load(DATA / "lora" / "peft.npz")
NAMES = sorted({key.partition("/")[0] for key in STORED} - {"ids", "base"})
REFUSED = {"lora_ga", "alora"}
NETWORK = """<ir_version: 10, opset_import: ["": 21]>
g (int64[n,t] ids) => (float[n,5] y) {
    e = Gather(embed_weight, ids)
    x = Transpose<perm = [0, 2, 1]>(e)
    h = Conv<pads = [1, 1]>(x, conv_weight, conv_bias)
    r = Relu(h)
    m = ReduceMean<keepdims = 0>(r, axes)
    y = Gemm<transB = 1>(m, fc_weight, fc_bias)
}"""


def load_network(text=NETWORK, **changed):
    proto = onnx.parser.parse_model(text)
    for node in proto.graph.node:
        node.input[:] = [re.sub("_(weight|bias)$", r".\1", name) for name in node.input]
    tensors = {key[5:]: STORED[key] for key in STORED if key.startswith("base/")}
    tensors |= {"axes": np.array([2])} | changed
    arrays = [onnx.numpy_helper.from_array(x, name) for name, x in tensors.items()]
    proto.graph.initializer.extend(arrays)
    return jaxonnx.load(proto)


def write_folder(folder, name, **changed):
    folder.mkdir()
    config = json.loads(str(STORED[f"{name}/config"])) | changed
    (folder / "adapter_config.json").write_text(json.dumps(config))
    stem = f"{name}/tensors/"
    tensors = {key.removeprefix(stem): STORED[key] for key in STORED if key.startswith(stem)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("name", sorted({*NAMES} - REFUSED))
def test_what_peft_computes(name, tmp_path):
    model = load_network()
    np.testing.assert_allclose(model(STORED["ids"]), STORED["base"], rtol=0, atol=1e-6)
    adapters = jaxonnx.Adapters.load(write_folder(tmp_path / "theirs", name), model)
    assert np.abs(STORED[name] - STORED["base"]).max() > 0.01
    for adapted in (adapters.attach(model), adapters.apply(model)):
        np.testing.assert_allclose(adapted(STORED["ids"]), STORED[name], rtol=0, atol=2e-6)
    adapters.save(tmp_path / "back", model)
    back = jaxonnx.Adapters.load(tmp_path / "back", model).attach(model)
    np.testing.assert_allclose(back(STORED["ids"]), STORED[name], rtol=0, atol=2e-6)
    shapes = {n: x.ndim for n, x in load_file(tmp_path / "back/adapter_model.safetensors").items()}
    stem = f"{name}/tensors/"
    theirs = {key.removeprefix(stem): STORED[key].ndim for key in STORED if key.startswith(stem)}
    if name not in ("tokens", "velora", "lora_bias"):  # written in another way
        assert shapes == theirs


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        (
            "lora_ga",
            {},
            r"gradients chose was subtracted.*path_initial_model_for_weight_conversion",
        ),
        ("pissa", {"init_lora_weights": "pissa_niter_4"}, "random singular vectors"),
        ("pissa", {"init_lora_weights": "corda"}, "what data chose"),
        ("pissa", {"init_lora_weights": "loftq"}, "quantized values"),
        ("pissa", {"init_lora_weights": "later"}, "'later', a start that is not known"),
        ("alora", {}, r"alora_invocation_tokens=\[1, 2\].*from these tokens on only"),
        ("bias_all", {"kasa_config": {"beta": 1}}, "smallest singular values"),
        ("bias_all", {"target_parameters": ["fc.weight"]}, "such as experts"),
        ("bias_all", {"use_qalora": True}, "averages of groups"),
        ("bias_all", {"some_later_setting": 0.5}, "some_later_setting=0.5.*not known"),
    ],
)
def test_settings_that_change_more_than_the_weights(name, changed, words, tmp_path):
    folder = write_folder(tmp_path / "theirs", name, **changed)
    with pytest.raises(jaxonnx.InputError, match=words):
        jaxonnx.Adapters.load(folder, load_network())


def test_unknown_settings_that_are_off_do_not_matter(tmp_path):
    folder = write_folder(tmp_path / "theirs", "conv", later_setting=None, other={}, third=False)
    jaxonnx.Adapters.load(folder, load_network())


def test_a_start_cannot_be_subtracted_from_rounded_weights(tmp_path):
    text = NETWORK.replace("Gemm<transB = 1>(m, fc_weight", "Gemm<transB = 1>(m, w")
    text = text.replace("    y = ", "    w = DequantizeLinear<axis = 0>(fc_weight, s)\n    y = ")
    scale = np.abs(STORED["base/fc.weight"]).max(1) / 127
    codes = np.round(STORED["base/fc.weight"] / scale[:, None]).astype(np.int8)
    model = load_network(text, s=scale, **{"fc.weight": codes})
    with pytest.raises(jaxonnx.InputError, match=r"exact weights.*'fc.weight' is stored in few"):
        jaxonnx.Adapters.load(write_folder(tmp_path / "theirs", "pissa"), model)
    jaxonnx.Adapters.load(write_folder(tmp_path / "other", "mica"), model)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_kernels_in_groups(group, tmp_path):
    """PEFT's A reads all channels; each group has ranks of its own, checked in torch by the oracle
    `test_peft.py`."""
    text = NETWORK.replace("Conv<", f"Conv<group = {group}, ")
    weight = normal(8, 4 // group, 3)
    changed = {"conv.weight": weight, "conv.bias": normal(8), "fc.weight": normal(5, 8)}
    model = load_network(text, **changed)
    adapted = jaxonnx.LoRA(1, where="conv.weight").attach(model, jax.random.key(0))
    adapted = adapted.replace(
        params={n: jnp.asarray(normal(*v.shape)) for n, v in adapted.params.items()}
    )
    jaxonnx.Adapters.of(adapted).save(tmp_path / "peft", model)
    arrays = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    a, b = (arrays[f"base_model.model.conv.lora_{end}.weight"] for end in "AB")
    assert (a.shape, b.shape) == ((group, 4, 3), (8, 1, 1))
    back = jaxonnx.Adapters.load(tmp_path / "peft", model)
    ids = STORED["ids"]
    np.testing.assert_allclose(back.attach(model)(ids), adapted(ids), rtol=1e-5, atol=1e-5)

    own = a * normal(group, 1, 1)  # ranks that differ from group to group
    save_file(
        {
            "base_model.model.conv.lora_A.weight": own,
            "base_model.model.conv.lora_B.weight": b,
        },
        tmp_path / "peft" / "adapter_model.safetensors",
    )
    loaded = jaxonnx.Adapters.load(tmp_path / "peft", model)
    change = np.zeros_like(weight)
    for output in range(8):
        g = output * group // 8
        mine = own[g, g * (4 // group) : (g + 1) * (4 // group)]
        change[output] = b[output, 0, 0] * mine
    merged = loaded.apply(model).params["conv.weight"]
    np.testing.assert_allclose(merged, weight + change, rtol=1e-5, atol=1e-5)
    if group > 1:
        arrays["base_model.model.conv.lora_A.weight"] = normal(*a.shape)
        save_file(arrays, tmp_path / "peft" / "adapter_model.safetensors")
        with pytest.raises(
            jaxonnx.InputError, match=f"in {group} groups, reads the channels of all"
        ):
            jaxonnx.Adapters.load(tmp_path / "peft", model)


@pytest.mark.parametrize(
    ("convolution", "words"),
    [
        ("Conv<dilations = [2], pads = [2, 2]>(x,", "is dilated"),
        ("ConvTranspose(x,", "read by ConvTranspose"),
        ("Conv(p,", "padded by mode 'reflect'"),
    ],
)
def test_convolutions_that_peft_computes_otherwise(convolution, words, tmp_path):
    text = NETWORK.replace("Conv<pads = [1, 1]>(x,", convolution)
    text = text.replace("    h = ", '    p = Pad<mode = "reflect">(x, pads)\n    h = ')
    changed = {"pads": np.array([0, 0, 1, 0, 0, 1])}
    if "Transpose(" in convolution:
        changed["conv.weight"] = normal(4, 6, 3)
    model = load_network(text, **changed)
    adapted = jaxonnx.LoRA(1, where="conv.weight").attach(model, jax.random.key(0))
    with pytest.raises(jaxonnx.InputError, match=words):
        jaxonnx.Adapters.of(adapted).save(tmp_path / "ours", model)
    if "Transpose(" not in convolution:
        with pytest.raises(jaxonnx.InputError, match=words):
            jaxonnx.Adapters.load(write_folder(tmp_path / "theirs", "conv"), model)


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_one_table_in_few_bits_for_both_ends_is_named(tmp_path, module):
    """As onnxruntime-genai's builder stores a tied table; PEFT adapts its two readers apart."""
    sizes = "K = 32, N = 24, bits = 4, block_size = 32"
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21, "ms": 1]>
    g (int64[n,t] ids) => (float[n,t,24] logits) <int64[2] size = {{24, 16}}> {{
        packed = Reshape(table, size)
        x = ms.GatherBlockQuantized
            <bits = 4, block_size = 32, gather_axis = 0, quantize_axis = 1> (packed, ids, scales)
        logits = ms.MatMulNBits<{sizes}>(x, table, scales)
    }}""")
    renamed = {"table": "lm_head.MatMul.weight_Q4", "scales": "lm_head.MatMul.weight_scales"}
    for node in proto.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.domain = "com.microsoft" if node.domain else ""
    proto.opset_import[1].domain = "com.microsoft"
    random = np.random.default_rng(0)
    tensors = random.integers(0, 256, (24, 1, 16), np.uint8), random.random((24, 1), np.float32)
    for name, value in zip(renamed.values(), tensors, strict=True):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    sides = (("embedding_A", 24), ("embedding_B", 32))
    if module == "lm_head":
        sides = (("A.weight", 32), ("B.weight", 24))
    (tmp_path / "peft").mkdir()
    arrays = {
        f"base_model.model.{module}.lora_{end}": normal(*((2, n) if "A" in end else (n, 2)))
        for end, n in sides
    }
    save_file(arrays, tmp_path / "peft" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    message = r"'lm_head.MatMul.weight_Q4' is both the embedding and the output .*shared_embeddings"
    with pytest.raises(jaxonnx.InputError, match=message):
        jaxonnx.Adapters.load(tmp_path / "peft", jaxonnx.load(proto))
