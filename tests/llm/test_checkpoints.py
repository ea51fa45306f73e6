"""Checkpoints of transformers, of files by the builder and optimum: names and values."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx.parser
import pytest
import safetensors.numpy as safetensors

import jaxonnx
from jaxonnx.llm import _checkpoints
from tests.support import genai_builder
from tests.support.paths import DATA

LLM = DATA / "llm"
WANTED = json.loads((LLM / "builder" / "checkpoints.json").read_text())
"""Names, shapes and sums of the checkpoints that the builder read, by transformers."""


def write_config(folder, family, **more):
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": family, "dtype": "float32", **more}))
    return path


def read(folder):
    return safetensors.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", [name for name in WANTED if name != "phi3"])
def test_tensors_are_those_of_the_checkpoint_that_was_exported(name, tmp_path):
    tied = "lm_head.weight" not in WANTED[name]
    config = write_config(tmp_path, name, tie_word_embeddings=not tied)
    model = jaxonnx.load(genai_builder.FOLDER / f"{name}.onnx")
    jaxonnx.export_safetensors(model, tmp_path / "hf", original=config)
    tensors, wanted = read(tmp_path / "hf"), WANTED[name]
    assert {key: [*x.shape] for key, x in tensors.items()} == {k: s for k, (s, _) in wanted.items()}
    half = genai_builder.STORED[name][0] == "fp16"
    assert {x.dtype for x in tensors.values()} == {np.dtype("float16" if half else "float32")}
    sums = {key: total for key, (_, total) in genai_builder.describe(tensors).items()}
    for key, total in sums.items():
        close = 2e-3 * tensors[key].size ** 0.5 if half else 1e-5
        assert abs(total - wanted[key][1]) < close, key
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["tie_word_embeddings"] == tied
    assert written["dtype"] == ("float16" if half else "float32")


def test_matrices_in_few_bits_are_dequantized_when_asked(tmp_path):
    config = write_config(tmp_path, "phi3", quantization_config={"bits": 4})
    model = jaxonnx.load(genai_builder.FOLDER / "phi3.onnx")
    with pytest.raises(jaxonnx.InputError, match=r"qkv_proj.*dequantize=True"):
        jaxonnx.export_safetensors(model, tmp_path / "hf", original=config)
    assert not (tmp_path / "hf").exists()
    jaxonnx.export_safetensors(model, tmp_path / "hf", original=config, dequantize=True)
    tensors = read(tmp_path / "hf")
    assert {k: [*x.shape] for k, x in tensors.items()} == {
        key: shape for key, (shape, _) in WANTED["phi3"].items()
    }
    assert "quantization_config" not in (tmp_path / "hf" / "config.json").read_text()

    # (codes - 8) * scale, blocks of 32 along the inputs, the low half of a byte first
    packed, rows = model.tensors, []
    for part in ("gate_proj", "up_proj"):
        stem = f"model.layers.1.mlp.{part}.MatMul.weight"
        codes = np.asarray(packed[f"{stem}_Q4"])
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], 32)
        scales = np.asarray(packed[f"{stem}_scales"], np.float32).reshape(*codes.shape[:2], 1)
        rows.append(((codes.astype(np.float32) - 8) * scales).reshape(len(codes), -1))
    wanted = np.concatenate(rows)
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.gate_up_proj.weight"], wanted)


def test_adapters_of_matrices_in_few_bits_are_added_without_rounding(tmp_path):
    config = write_config(tmp_path, "phi3")
    model = jaxonnx.load(genai_builder.FOLDER / "phi3.onnx")
    lora = jaxonnx.LoRA(rank=2, alpha=4, where="attention")
    adapted = lora.attach(model, jax.random.key(0))
    key = "model.layers.0.attn.o_proj.MatMul.weight_Q4"
    b = jax.random.normal(jax.random.key(1), adapted.params[f"{key}.lora_B"].shape)
    adapted = adapted.replace(params={**adapted.params, f"{key}.lora_B": b})
    for net, folder in ((model, "before"), (adapted, "after")):
        jaxonnx.export_safetensors(net, tmp_path / folder, original=config, dequantize=True)
    before, after = read(tmp_path / "before"), read(tmp_path / "after")
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {"model.layers.0.self_attn.o_proj.weight"}
    (name,) = changed
    change = 2 * np.asarray(b) @ np.asarray(adapted.params[f"{key}.lora_A"])
    np.testing.assert_allclose(after[name] - before[name], change, atol=1e-5)


def test_a_file_with_adapters_as_nodes_is_refused(tmp_path):
    model = jaxonnx.load(genai_builder.FOLDER / "llama.onnx")
    adapted = jaxonnx.LoRA(rank=2, where="attention").attach(model, jax.random.key(0))
    adapted.save(tmp_path / "nodes.onnx", adapters="nodes")
    with pytest.raises(jaxonnx.InputError, match=r"adapters as nodes.*'merged'"):
        jaxonnx.export_safetensors(tmp_path / "nodes.onnx", tmp_path / "hf")


def test_exporters_give_the_same_checkpoint(tmp_path):
    """One network, written by the builder and by optimum, with its tokenizer."""
    config = shutil.copytree(LLM / "qwen3-optimum", tmp_path / "original")
    template = "additional_chat_templates/tool_use.jinja"
    (config / template).parent.mkdir()
    (config / template).write_text("{{ tools }}")
    jaxonnx.export_safetensors(LLM / "qwen3-genai", tmp_path / "genai", original=config)
    assert (tmp_path / "genai" / template).read_text() == "{{ tools }}"
    jaxonnx.export_safetensors(LLM / "qwen3-optimum", tmp_path / "optimum")
    ours, theirs = read(tmp_path / "genai"), read(tmp_path / "optimum")
    assert ours.keys() == theirs.keys() >= {"model.norm.weight", "model.embed_tokens.weight"}
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name])
    for folder in ("genai", "optimum"):
        names = {path.name for path in (tmp_path / folder).iterdir()}
        assert names >= {"tokenizer.json", "chat_template.jinja", "config.json"}
        assert names.isdisjoint({"genai_config.json", "model.onnx"})


def test_large_checkpoints_are_several_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(_checkpoints, "SHARD", 20_000)
    folder = LLM / "qwen3-optimum"
    jaxonnx.export_safetensors(folder, tmp_path, dtype="bfloat16")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    parts = {name: safetensors.load_file(tmp_path / name) for name in files}
    assert {k: f for f, tensors in parts.items() for k in tensors} == index["weight_map"]
    assert (
        sum(x.nbytes for t in parts.values() for x in t.values())
        == (index["metadata"]["total_size"])
    )
    assert parts[files[0]]["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    monkeypatch.undo()
    with pytest.raises(jaxonnx.InputError, match=re.escape("model-00001-of-")):
        jaxonnx.export_safetensors(folder, tmp_path)


def test_an_output_layer_that_differs_from_its_table_stays_apart(tmp_path):
    """Whatever the original configuration says: a head of int4, say, beside a table of float16."""
    config = write_config(tmp_path, "llama", tie_word_embeddings=True)
    model = jaxonnx.load(genai_builder.FOLDER / "llama.onnx")
    jaxonnx.export_safetensors(model, tmp_path / "apart", original=config)
    assert "lm_head.weight" in read(tmp_path / "apart")
    assert not json.loads((tmp_path / "apart/config.json").read_text())["tie_word_embeddings"]
    table = jnp.asarray(model.params["model.embed_tokens.weight"])
    same = model.replace(params={**model.params, "lm_head.MatMul.weight": table.T})
    jaxonnx.export_safetensors(same, tmp_path / "tied", original=config)
    assert "lm_head.weight" not in read(tmp_path / "tied")
    assert json.loads((tmp_path / "tied/config.json").read_text())["tie_word_embeddings"]


def test_the_configuration_of_a_decoder_is_its_own(tmp_path):
    """That of a vision-language model gives its decoder other names; transformers finds none."""
    text = {"model_type": "llama", "vocab_size": 64, "quantization_config": {"quant_method": "fp8"}}
    more = {"text_config": text, "vision_config": {}, "eos_token_id": 2, "bos_token_id": 1}
    config = write_config(tmp_path, "llava", **more, architectures=["LlavaForCausalLM"])
    model = jaxonnx.load(genai_builder.FOLDER / "llama.onnx")
    jaxonnx.export_safetensors(model, tmp_path / "hf", original=config)
    assert "model.layers.0.mlp.up_proj.weight" in read(tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text()) == {
        **{"model_type": "llama", "vocab_size": 64, "dtype": "float32"},
        **{"eos_token_id": 2, "bos_token_id": 1, "tie_word_embeddings": False},
    }


def test_what_cannot_be_named_is_told(tmp_path):
    path = genai_builder.FOLDER / "gpt_oss.onnx"
    config = write_config(tmp_path, "gpt_oss")
    with pytest.raises(jaxonnx.InputError, match="experts of model type 'gptoss'"):
        jaxonnx.export_safetensors(path, tmp_path / "hf", original=config, dequantize=True)
    with pytest.raises(jaxonnx.InputError, match=r"original must be a folder"):
        jaxonnx.export_safetensors(LLM / "qwen3-genai", tmp_path / "x", original=tmp_path / "none")


def test_tensors_with_a_number_need_a_name(tmp_path):
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 3] y)'
        "<float[2, 3] val_1 = {0, 1, 2, 3, 4, 5}> { y = MatMul(x, val_1) }"
    )
    with pytest.raises(jaxonnx.InputError, match=r"'val_1' \[2, 3\].*names=\{'val_1'"):
        jaxonnx.export_safetensors(proto, tmp_path)
    with pytest.warns(UserWarning, match="no config.json.*original="):
        jaxonnx.export_safetensors(proto, tmp_path, names={"val_1": "head.weight"})
    np.testing.assert_array_equal(read(tmp_path)["head.weight"], weight)


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        (["a", "b", "c"], ["a", "b", "c"]),
        (4, ["LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"]),
        (None, ["NEGATIVE", "POSITIVE"]),
    ],
)
@pytest.mark.parametrize("reloaded", [False, True])
def test_a_classifier_has_the_classes_of_the_file(classes, names, reloaded, tmp_path):
    """transformers 5.24 builds its head of `id2label`, and refuses weights of another shape."""
    net = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n,3] x) => (float[n,2] logits) { logits = MatMul(x, w) }""")
    net.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 2), np.float32), "w"))
    old = {"id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "problem_type": "regression"}
    old |= {"architectures": ["BertForSequenceClassification"]}
    config = write_config(tmp_path, "bert", **old)
    model = jaxonnx.load(net)
    model = model if classes is None else model.with_head(classes)
    model = jaxonnx.load(model.to_onnx()) if reloaded else model
    jaxonnx.export_safetensors(model, tmp_path / "hf", original=config, names={"w": "w"})
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["id2label"] == {str(i): name for i, name in enumerate(names)}
    if classes is not None:
        assert written["label2id"] == {name: i for i, name in enumerate(names)}
        assert (written["num_labels"], written["problem_type"]) == (len(names), None)


def test_a_checkpoint_that_was_written_wrongly_is_refused(tmp_path, monkeypatch):
    """One number of a tensor, and rows that are left out."""
    model = jaxonnx.load(genai_builder.FOLDER / "qwen2.onnx")
    config = write_config(tmp_path, "qwen2")
    key, write = "model.layers.1.self_attn.k_proj.weight", _checkpoints.write_safetensors

    def write_other(path, arrays, about):
        other = arrays[key].copy()
        other[0, 0] += 1
        write(path, {**arrays, key: other}, about)

    with monkeypatch.context() as patch:
        patch.setattr(_checkpoints, "write_safetensors", write_other)
        with pytest.raises(jaxonnx.ModelError, match=f"'{key}' of the checkpoint .* numbers"):
            jaxonnx.export_safetensors(model, tmp_path / "hf", original=config)
        assert not [*(tmp_path / "hf").iterdir()]
        jaxonnx.export_safetensors(model, tmp_path / "hf", original=config, check=False)
    name = _checkpoints.name_weights

    def name_fewer(*arguments):
        blocks = name(*arguments)
        del blocks[key]
        return blocks

    monkeypatch.setattr(_checkpoints, "name_weights", name_fewer)
    with pytest.raises(jaxonnx.ModelError, match=r"rows of 'model\.layers\.1\.attn\.qkv_proj"):
        jaxonnx.export_safetensors(model, tmp_path / "hf", original=config)


def test_the_vocabulary_is_that_of_the_tables(tmp_path):
    """The configuration of the original checkpoint has fewer tokens: transformers refused it."""
    config = LLM / "qwen3-optimum" / "config.json"
    model = jaxonnx.load(LLM / "qwen3-genai").with_tokens(["<tool>", "</tool>"])
    jaxonnx.export_safetensors(model, tmp_path / "hf", original=config)
    told = json.loads((tmp_path / "hf" / "config.json").read_text())
    table = read(tmp_path / "hf")["model.embed_tokens.weight"]
    assert (json.loads(config.read_text())["vocab_size"], told["vocab_size"]) == (192, 194)
    assert table.shape == (194, 32)
