"""Vision-language models: three files as one model, trained, and saved as three files."""

import json
import shutil

import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx
from tests.support.three_files import FOLDERS, read_oracle, run_folder

LORA = jaxonnx.LoRA(rank=2, where="all-linear")


def logits_of(model, ids, pixels):
    return np.asarray(model.without_cache()(ids, pixels, np.ones_like(ids)))


@pytest.fixture(scope="module", params=[*FOLDERS])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return jaxonnx.load(FOLDERS[family])


@pytest.fixture(scope="module")
def oracle(family):
    return read_oracle(family)


def test_logits_are_those_of_transformers(model, oracle, family):
    axes = ["batch_size", "tiles"] if family == "internvl" else ["batch_size"]
    shapes = {value.name: [*value.shape] for value in model.inputs}
    assert [*shapes][:3] == ["input_ids", "pixel_values", "attention_mask"]
    assert shapes["pixel_values"] == [*axes, 3, 16, 16]
    logits = logits_of(model, oracle["input_ids"], oracle["pixels"])
    np.testing.assert_allclose(logits[:, -1], oracle["logits"], atol=2e-6)


def test_each_row_has_its_own_images(model, oracle):
    ids, pixels = oracle["input_ids"], oracle["pixels"]
    texts = np.where(ids == 3, 7, ids)  # a row without an image, whose pixels are not looked at
    batch = np.concatenate([texts, ids, ids])
    images = np.concatenate([0 * pixels, pixels, -pixels])
    logits = logits_of(model, batch, images)
    alone = logits_of(model, texts, 0 * pixels)
    np.testing.assert_allclose(logits[0], alone[0], atol=1e-5)
    np.testing.assert_allclose(logits[1, -1], oracle["logits"][0], atol=1e-5)
    assert np.abs(logits[2] - logits[1]).max() > 1e-3


GATHERS = """
agraph (int64[b, s] input_ids, float[n, 32] image_features) => (float[b, s, 32] inputs_embeds)
<int64 token = {3}, int64 axis = {1}, int64 one = {1}, int64 zero = {0}, float[1, 32] row = {}> {
  text = Gather(table, input_ids)
  mask = Equal(input_ids, token)
  ids = Cast <to = 7> (mask)
  sums = CumSum(ids, axis)
  places = Sub(sums, one)
  known = Clip(places, zero)
  padded = Concat <axis = 0> (image_features, row)
  chosen = Gather <axis = 0> (padded, known)
  last = Constant <value_ints = [-1]> ()
  wide = Unsqueeze(mask, last)
  inputs_embeds = Where(wide, chosen, text)
}
"""


def test_an_embedding_that_gathers_features(tmp_path):
    """As mobius-onnx writes it: for a batch it would take the images of the first row for all."""
    folder = tmp_path / "gathers"
    shutil.copytree(FOLDERS["llava"], folder)
    old = onnx.load(folder / "embedding.onnx")
    zeros = ", ".join(["0"] * 32)
    graph = onnx.parser.parse_graph(GATHERS.replace("row = {}", f"row = {{{zeros}}}"))
    graph.initializer.extend(old.graph.initializer)
    graph.initializer[-1].name = "table"
    proto = onnx.helper.make_model(graph, opset_imports=old.opset_import, ir_version=8)
    onnx.save(proto, folder / "embedding.onnx")
    oracle, model = read_oracle("llava"), jaxonnx.load(folder)
    ids, pixels = oracle["input_ids"], oracle["pixels"]
    logits = logits_of(model, np.concatenate([ids, ids]), np.concatenate([-pixels, pixels]))
    np.testing.assert_allclose(logits[1, -1], oracle["logits"][0], atol=1e-5)
    model.save(tmp_path / "saved/")
    np.testing.assert_allclose(run_folder(tmp_path / "saved", ids, pixels)[0], logits[1], atol=1e-5)
    saved = onnx.load(tmp_path / "saved" / "embedding.onnx").graph
    assert {n.output[0] for n in saved.node} == {n.output[0] for n in graph.node}
    onnx.checker.check_model(tmp_path / "saved" / "embedding.onnx", full_check=True)


def test_more_image_tokens_than_features_give_nan(model, oracle):
    ids = np.full_like(oracle["input_ids"], 3)
    assert np.isnan(logits_of(model, ids, oracle["pixels"])).any()


@pytest.mark.parametrize(
    "family", ["internvl", pytest.param("llava", marks=pytest.mark.deep)], indirect=True
)
def test_adapters_train_and_the_saved_folder_runs(model, oracle, family, tmp_path):
    """Without labels the loss is that of transformers with image tokens as -100."""
    ids, pixels = oracle["input_ids"], oracle["pixels"]
    data = {"input_ids": ids, "pixel_values": pixels}
    settings = {"loss": "causal_lm", "optimizer": optax.adam(1e-2), "progress": False}
    result = jaxonnx.train(model, data, lora=LORA, epochs=3, **settings)
    np.testing.assert_allclose(result.history.losses[0], oracle["loss"], rtol=1e-6)
    assert result.history.losses[-1] < oracle["loss"] - 0.02
    stems = "attn.qkv_proj", "attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
    modules = {name.rpartition(".MatMul")[0] for name in result.lora.layouts}
    assert modules == {f"model.layers.0.{stem}" for stem in stems}
    result.model.save(tmp_path / "tuned/")
    logits = logits_of(result.model, ids, pixels)
    np.testing.assert_allclose(run_folder(tmp_path / "tuned", ids, pixels), logits, atol=2e-6)
    np.testing.assert_allclose(
        logits_of(jaxonnx.load(tmp_path / "tuned"), ids, pixels), logits, atol=2e-6
    )
    before, after = (
        {p.relative_to(f).as_posix() for p in f.rglob("*") if p.is_file()}
        for f in (FOLDERS[family], tmp_path / "tuned")
    )
    assert before == after
    result.model.save(tmp_path / "one.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "one.onnx")
    feeds = {"input_ids": ids, "pixel_values": pixels, "attention_mask": np.ones_like(ids)}
    past = {f"past_key_values.0.{x}": np.zeros((1, 1, 0, 16), np.float32) for x in ("key", "value")}
    np.testing.assert_allclose(session.run(["logits"], feeds | past)[0], logits, atol=2e-6)


def test_an_untouched_save_keeps_all_nodes_and_weights(model, family, tmp_path):
    model.save(tmp_path)
    for name in model.folder.files:
        old, new = (onnx.load(folder / name) for folder in (FOLDERS[family], tmp_path))
        for field in ("input", "output", "node", "value_info"):
            assert [*getattr(old.graph, field)] == [*getattr(new.graph, field)], (name, field)
        assert [*old.opset_import] == [*new.opset_import]
        weights = [
            {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
            for proto in (old, new)
        ]
        assert weights[0].keys() == weights[1].keys()
        for tensor, value in weights[0].items():
            np.testing.assert_array_equal(weights[1][tensor], value)


def test_the_vision_encoder_is_frozen_unless_it_is_named():
    oracle, model = read_oracle("internvl"), jaxonnx.load(FOLDERS["internvl"])
    vision = {name for name in model.state if name.startswith("vision_encoder.")}
    assert vision
    assert not any(name.startswith("vision_encoder.") for name in model.params)
    opened = jaxonnx.load(FOLDERS["internvl"], trainable="vision_encoder.*")
    assert {*opened.params} == vision
    data = {"input_ids": oracle["input_ids"], "pixel_values": oracle["pixels"]}
    settings = {"loss": "causal_lm", "optimizer": optax.adam(1e-2), "progress": False}
    result = jaxonnx.train(opened, data, epochs=3, **settings)
    np.testing.assert_allclose(result.history.losses[0], oracle["loss"], rtol=1e-6)
    assert result.history.losses[-1] < oracle["loss"] - 0.02


def in_4_bits(proto, block=16):
    """Return a file whose products with a weight are MatMulNBits nodes."""
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            name, matrix = node.input[1], weights[node.input[1]]
            rows, columns = matrix.shape
            blocks = matrix.T.reshape(columns, -1, block)
            scales = np.abs(blocks).max(-1) / 7
            numbers = np.round(blocks / scales[..., None] + 8).astype(np.uint8)
            packed = numbers[..., ::2] | numbers[..., 1::2] << 4
            for suffix, array in (("Q4", packed), ("scales", scales.reshape(-1))):
                tensor = onnx.numpy_helper.from_array(array, f"{name}_{suffix}")
                proto.graph.initializer.append(tensor)
            node.op_type, node.domain = "MatMulNBits", "com.microsoft"
            node.input[1:] = [f"{name}_Q4", f"{name}_scales"]
            sizes = {"K": rows, "N": columns, "bits": 4, "block_size": block}
            node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in sizes.items())
            old = next(t for t in proto.graph.initializer if t.name == name)
            proto.graph.initializer.remove(old)
    return proto


@pytest.mark.deep
def test_adapters_on_a_decoder_in_4_bits(tmp_path):
    oracle = read_oracle("llava")
    shutil.copytree(FOLDERS["llava"], tmp_path / "int4")
    file = tmp_path / "int4" / "model.onnx"
    onnx.save(in_4_bits(onnx.load(file)), file)
    model = jaxonnx.load(tmp_path / "int4")
    assert "MatMulNBits" in {node.op_type for node in model.proto.graph.node}
    ids, pixels = oracle["input_ids"], oracle["pixels"]
    np.testing.assert_allclose(
        run_folder(tmp_path / "int4", ids, pixels), logits_of(model, ids, pixels), atol=1e-3
    )
    result = jaxonnx.train(
        model,
        {"input_ids": ids, "pixel_values": pixels},
        loss="causal_lm",
        lora=LORA,
        optimizer=optax.adam(1e-2),
        epochs=3,
        progress=False,
    )
    np.testing.assert_allclose(result.history.losses[0], oracle["loss"], rtol=0.05)
    assert result.history.losses[-1] < result.history.losses[0]
    result.model.save(tmp_path / "tuned/", adapters="nodes")
    np.testing.assert_allclose(
        run_folder(tmp_path / "tuned", ids, pixels), logits_of(result.model, ids, pixels), atol=1e-3
    )


def test_variants_of_transformers_js(tmp_path):
    """The decoder has the variant; what has it not comes as it is."""
    folder = tmp_path / "js"
    shutil.copytree(FOLDERS["internvl"], folder)
    for stem in ("decoder_model_merged", "embed_tokens"):
        shutil.copy(folder / "onnx" / f"{stem}.onnx", folder / "onnx" / f"{stem}_fp16.onnx")
    assert jaxonnx.load(folder, variant="fp16").folder.files == (
        "onnx/vision_encoder.onnx",
        "onnx/embed_tokens_fp16.onnx",
        "onnx/decoder_model_merged_fp16.onnx",
    )
    with pytest.raises(jaxonnx.InputError, match=r"variant= .one of 'fp16', 'fp32'."):
        jaxonnx.load(folder)


def change_config(folder, change):
    path = folder / "genai_config.json"
    settings = json.loads(path.read_text())
    change(settings["model"])
    path.write_text(json.dumps(settings))


def test_folders_that_do_not_fit(tmp_path):
    """The decoder is what onnxruntime-genai's folder is without them, as before."""
    folder = tmp_path / "genai"
    shutil.copytree(FOLDERS["llava"], folder)
    change_config(folder, lambda model: model.pop("image_token_id"))
    with pytest.warns(UserWarning, match="is loaded alone.* no configuration file names the token"):
        decoder = jaxonnx.load(folder)
    assert decoder.inputs[1].name == "inputs_embeds"
    change_config(folder, lambda model: model.update(image_token_id=3))
    vision = onnx.load(folder / "vision.onnx")
    size = onnx.helper.make_tensor_value_info("image_sizes", 7, [None, 2])
    vision.graph.input.append(size)
    onnx.save(vision, folder / "vision.onnx")
    with pytest.warns(UserWarning, match="takes image_sizes, pixel_values, and must take pixel"):
        decoder = jaxonnx.load(folder)
    decoder.save(tmp_path / "saved/")
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {p.name for p in folder.iterdir()}
    (folder / "vision.onnx").unlink()
    with pytest.raises(jaxonnx.InputError, match=r"genai_config.json names 'vision.onnx'"):
        jaxonnx.load(folder)
    js = tmp_path / "js"
    shutil.copytree(FOLDERS["internvl"], js)
    (js / "config.json").write_text("{}")
    with pytest.raises(jaxonnx.ModelError, match="no configuration file names the token"):
        jaxonnx.load(js)
