"""Model cards of saved results, and their upload."""

import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
import yaml

import jaxonnx
from tests.support.paths import DATA
from tests.support.tiny_networks import train

FOLDER = DATA / "llm" / "qwen3-optimum"
IDS = {"input_ids": np.random.default_rng(0).integers(3, 90, (4, 9))}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "tokens.npz"
    np.savez(data, **IDS)
    return jaxonnx.train(
        FOLDER,
        data,
        loss="causal_lm",
        optimizer=optax.sgd(0.1),
        epochs=2,
        validation=IDS,
        lora=jaxonnx.LoRA(rank=2, where="attention"),
        progress=False,
    )


def read_card(folder):
    text = (Path(folder) / "README.md").read_text()
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert head
    return yaml.safe_load(head[1]), text


def test_each_form_has_a_card(result, tmp_path):
    wanted = {"model": "onnx", "peft": "peft", "safetensors": "transformers"}
    for form, library in wanted.items():
        result.save(tmp_path / form, form)
        head, text = read_card(tmp_path / form)
        assert head["library_name"] == library
        assert head["pipeline_tag"] == "text-generation"
        assert head["tags"] == ["jaxonnx", "lora"]
        assert head.keys() == {"library_name", "pipeline_tag", "tags"}  # base, license not known
        assert "| data | tokens.npz, 4 examples |" in text
        assert "| adapters | rank 2, alpha 2, of 8 weights |" in text
        assert f"| {jax.__version__} |" in text
        for row in result.history.epochs:
            assert f"{row['validation_loss']:.6g}" in text
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(FOLDER.absolute())
    assert config["task_type"] == "CAUSAL_LM"
    saved = jaxonnx.load(tmp_path / "model")
    ours = saved.without_cache()(**feeds(saved))
    np.testing.assert_array_equal(ours, result.model.without_cache()(**feeds(saved)))


def feeds(model):
    ids = IDS["input_ids"]
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    named = {**IDS, "attention_mask": np.ones_like(ids), "position_ids": positions}
    return {v.name: named[v.name] for v in model.without_cache().inputs}


def test_base_and_license_are_those_of_the_base(result, tmp_path):
    """Known by the hub's cache, and by the card of the base."""
    base = tmp_path / "models--someone--small" / "snapshots" / "0"
    jaxonnx.load(FOLDER).save(f"{base}/")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\nThe base.\n")
    tuned = jaxonnx.load(base)
    copied = jaxonnx.Result(tuned, result.history)
    copied.save(tmp_path / "tuned")  # to which the card of the base is copied
    head, text = read_card(tmp_path / "tuned")
    assert (head["base_model"], head["license"]) == ("someone/small", "apache-2.0")
    assert "https://huggingface.co/someone/small" in text
    copied.save(tmp_path / "tuned", license="mit")  # its own card is replaced
    assert read_card(tmp_path / "tuned")[0]["license"] == "mit"


def test_peft_and_its_card_name_the_model_of_transformers(result, tmp_path):
    """Which config.json tells, or else the hub's cache; or an argument."""
    base = tmp_path / "models--onnx-community--small-ONNX" / "snapshots" / "0"
    jaxonnx.load(FOLDER).save(f"{base}/")
    config = json.loads((base / "config.json").read_text())
    for origin, wanted in (("", "onnx-community/small-ONNX"), ("someone/small", "someone/small")):
        (base / "config.json").write_text(json.dumps({**config, "_name_or_path": origin}))
        tuned = jaxonnx.Result(jaxonnx.load(base), result.history, lora=result.lora)
        tuned.save(tmp_path / "peft", "peft")
        assert read_base(tmp_path / "peft") == wanted
        assert read_card(tmp_path / "peft")[0]["base_model"] == wanted
    tuned.save(tmp_path / "peft", "peft", base_model="someone/other")
    assert read_base(tmp_path / "peft") == "someone/other"
    assert read_card(tmp_path / "peft")[0]["base_model"] == "someone/other"
    tuned.save(tmp_path / "whole", base_model="someone/other")
    assert read_card(tmp_path / "whole")[0]["base_model"] == "someone/other"


def read_base(folder):
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_the_card_of_someone_else_stays(result, tmp_path):
    (tmp_path / "README.md").write_text("Mine.\n")
    with pytest.raises(jaxonnx.InputError, match=r"jaxonnx did not write it.*card=False"):
        result.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    result.save(tmp_path, card=False)
    assert (tmp_path / "README.md").read_text() == "Mine.\n"
    with pytest.raises(jaxonnx.InputError, match="no adapters"):
        jaxonnx.Result(result.model, result.history).save(tmp_path / "x", "peft")


def test_a_model_of_a_file(tmp_path):
    trained = train(epochs=1, sparsity={"pattern": "2:4"})
    trained.save(tmp_path / "net")
    head, text = read_card(tmp_path / "net")
    assert head == {"library_name": "onnx", "tags": ["jaxonnx"]}
    assert "| sparsity |" in text
    assert (
        jaxonnx.load(tmp_path / "net" / "model.onnx").params.keys() == trained.model.params.keys()
    )


def test_a_folder_is_uploaded(tmp_path, monkeypatch):
    """To a stand-in that takes the arguments that huggingface_hub takes."""
    import huggingface_hub as hub

    calls = []

    class Api:
        def create_repo(self, *values, **more):
            inspect.signature(hub.HfApi.create_repo).bind(self, *values, **more)
            calls.append((values, more))

        def upload_folder(self, **more):
            inspect.signature(hub.HfApi.upload_folder).bind(self, **more)
            calls.append(more)
            return SimpleNamespace(commit_url="https://huggingface.co/me/tuned/commit/0")

    monkeypatch.setattr(hub, "HfApi", Api)
    (tmp_path / "model.onnx").write_bytes(b"")
    address = jaxonnx.push_to_hub(tmp_path, "me/tuned", private=True)
    assert address.endswith("/commit/0")
    (created, more), uploaded = calls
    assert (created, more) == (("me/tuned",), {"private": True, "exist_ok": True})
    assert uploaded["repo_id"] == "me/tuned"
    assert uploaded["folder_path"] == str(tmp_path)
    with pytest.raises(jaxonnx.InputError, match="folder must be a folder"):
        jaxonnx.push_to_hub(tmp_path / "none", "me/tuned")
    (tmp_path / "texts").mkdir()
    with pytest.raises(jaxonnx.InputError, match="folder must be a folder with a model"):
        jaxonnx.push_to_hub(tmp_path / "texts", "me/tuned")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(jaxonnx.Error, match="pip install 'jaxonnx\\[hub\\]'"):
        jaxonnx.push_to_hub(tmp_path, "me/tuned")


def test_cards_are_json_in_the_head(result, tmp_path):
    """Which is YAML, also for what a name may have."""
    result.save(tmp_path, license="a: b # c")
    assert read_card(tmp_path)[0]["license"] == "a: b # c"
    assert json.dumps("a: b # c") in (tmp_path / "README.md").read_text()
