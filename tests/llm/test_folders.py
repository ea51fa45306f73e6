"""Folders of language models: layouts, variants, the hub, and saving all that belongs to one."""

import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import onnx
import onnxruntime
import pytest

import jaxonnx
from tests.support.paths import DATA

GENAI, OPTIMUM = DATA / "llm" / "qwen3-genai", DATA / "llm" / "qwen3-optimum"
T5 = DATA / "transformers" / "t5"


@pytest.fixture
def browser(tmp_path):
    """The layout of transformers.js, with external data for one variant."""
    folder = tmp_path / "browser"
    (folder / "onnx").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(OPTIMUM / name, folder)
    shutil.copy(OPTIMUM / "model.onnx", folder / "onnx" / "model.onnx")
    proto = onnx.load(OPTIMUM / "model.onnx")
    data = {"save_as_external_data": True, "location": "model_q4.onnx_data"}
    onnx.save_model(proto, folder / "onnx" / "model_q4.onnx", **data)
    return folder


def test_the_configuration_of_genai_names_the_decoder(tmp_path):
    folder = tmp_path / "genai"
    shutil.copytree(GENAI, folder)
    (folder / "embedding.onnx").write_bytes(b"")
    assert jaxonnx.load(folder).folder.files == ("model.onnx",)
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["filename"] = "text.onnx"
    (folder / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(jaxonnx.InputError, match=r"names 'text.onnx', and the folder does not"):
        jaxonnx.load(folder)


def test_several_models_are_named(browser):
    with pytest.raises(jaxonnx.InputError, match=r"onnx/model.onnx, onnx/model_q4.onnx; choose"):
        jaxonnx.load(browser)
    assert jaxonnx.load(browser, variant="q4").folder.files == ("onnx/model_q4.onnx",)
    assert jaxonnx.load(browser, variant="fp32").folder.files == ("onnx/model.onnx",)
    with pytest.raises(jaxonnx.InputError, match=r"no variant .fp16.; it has onnx/model.onnx"):
        jaxonnx.load(browser, variant="fp16")
    with pytest.raises(jaxonnx.InputError, match="the source is of another kind"):
        jaxonnx.load(browser / "onnx" / "model.onnx", variant="q4")


def test_a_merged_decoder_goes_before_its_parts(tmp_path):
    for name in ("decoder_model", "decoder_with_past_model", "decoder_model_merged"):
        shutil.copy(OPTIMUM / "model.onnx", tmp_path / f"{name}.onnx")
    shutil.copy(OPTIMUM / "config.json", tmp_path)
    assert jaxonnx.load(tmp_path).folder.files == ("decoder_model_merged.onnx",)
    (tmp_path / "decoder_model_merged.onnx").unlink()
    with pytest.raises(jaxonnx.InputError, match=r"decoder_model.onnx, decoder_with_past_model"):
        jaxonnx.load(tmp_path)


def test_an_encoder_goes_with_its_decoder(tmp_path):
    """The merged decoder, or the one of whole sequences; a variant is of both."""
    shutil.copytree(T5, tmp_path / "t5")
    folder = tmp_path / "t5" / "onnx"
    folder.mkdir()
    for part in ("encoder_model", "decoder_model"):
        shutil.move(tmp_path / "t5" / f"{part}.onnx", folder)
        shutil.copy(folder / f"{part}.onnx", folder / f"{part}_q4.onnx")
    with pytest.raises(jaxonnx.InputError, match=r"choose one by variant= \(one of 'fp32', 'q4'"):
        jaxonnx.load(tmp_path / "t5")
    shutil.copy(folder / "decoder_model.onnx", folder / "decoder_with_past_model.onnx")
    files = jaxonnx.load(tmp_path / "t5", variant="fp32").folder.files
    assert files == ("onnx/encoder_model.onnx", "onnx/decoder_model.onnx")
    shutil.copy(folder / "decoder_model.onnx", folder / "decoder_model_merged_q4.onnx")
    model = jaxonnx.load(tmp_path / "t5", variant="q4")
    assert model.folder.files == ("onnx/encoder_model_q4.onnx", "onnx/decoder_model_merged_q4.onnx")
    with pytest.warns(
        UserWarning, match="old ones: onnx/decoder_model.onnx, onnx/decoder_model_q4"
    ):
        model.save(f"{tmp_path}/new/")
    assert {p.name for p in (tmp_path / "new" / "onnx").iterdir()} == {
        "encoder_model_q4.onnx",
        "decoder_model_merged_q4.onnx",
    }


def pair(folder, change):
    """A folder whose two files `change` has changed."""
    shutil.copytree(T5, folder)
    protos = [onnx.load(folder / f"{part}_model.onnx") for part in ("encoder", "decoder")]
    change(*protos)
    for part, proto in zip(("encoder", "decoder"), protos, strict=True):
        onnx.save(proto, folder / f"{part}_model.onnx")
    return folder


def test_files_that_do_not_fit_each_other_are_refused(tmp_path):
    def change_opset(encoder, _):
        encoder.opset_import[0].version = 17

    def change_states(_, decoder):
        for value in decoder.graph.input:
            value.name = value.name.replace("hidden", "other")
        for node in decoder.graph.node:
            node.input[:] = [name.replace("encoder_hidden", "encoder_other") for name in node.input]

    def add_output(encoder, _):
        encoder.graph.output[0].name = encoder.graph.node[-2].output[0]
        encoder.graph.output.add().CopyFrom(encoder.graph.output[0])
        encoder.graph.output[1].name = encoder.graph.node[-1].output[0] = "pooled"

    with pytest.raises(jaxonnx.ModelError, match=r"version 17 of 'ai.onnx', the decoder of .* 18"):
        jaxonnx.load(pair(tmp_path / "opset", change_opset))
    with pytest.raises(jaxonnx.ModelError, match=r"no input 'encoder_hidden_states'.*other_states"):
        jaxonnx.load(pair(tmp_path / "states", change_states))
    with pytest.raises(jaxonnx.ModelError, match="pooled, and no 'last_hidden_state'"):
        jaxonnx.load(pair(tmp_path / "outputs", add_output))


def test_a_record_of_both_files_is_kept_in_one(tmp_path):
    model = jaxonnx.load(T5)
    (name,) = (name for name in model.params if name.endswith("MatMul_569"))
    weight = model.params[name]
    pruned = {**model.params, name: weight * jaxonnx.sparse.mask(weight)}
    sparse = model.replace(params=pruned).with_sparsity("2:4", select=[name])
    with pytest.raises(jaxonnx.InputError, match=r"'jaxonnx.sparsity' is of all files.*one file"):
        sparse.save(f"{tmp_path}/tuned/")
    assert not (tmp_path / "tuned").exists()
    sparse.save(tmp_path / "one.onnx")
    assert [x.name for x in jaxonnx.load(tmp_path / "one.onnx").sparsity.layers] == [name]


def change(model, name):
    return model.replace(params={**model.params, name: model.params[name] + 1})


def test_the_saved_folder_has_all_but_other_weights(tmp_path):
    model = change(jaxonnx.load(GENAI), "lm_head.MatMul.weight")
    model.save(f"{tmp_path}/tuned/")
    names = {path.name for path in GENAI.iterdir()}
    assert {path.name for path in (tmp_path / "tuned").iterdir()} == names
    for name in names - {"model.onnx", "model.onnx.data"}:
        assert (tmp_path / "tuned" / name).read_bytes() == (GENAI / name).read_bytes()
    old, new = (onnx.load(folder / "model.onnx") for folder in (GENAI, tmp_path / "tuned"))
    old, new = ({t.name: t.raw_data for t in p.graph.initializer} for p in (old, new))
    changed = [name for name in old.keys() | new.keys() if old[name] != new[name]]
    assert changed == ["lm_head.MatMul.weight"]
    again = jaxonnx.load(tmp_path / "tuned")
    again.save(tmp_path / "tuned")  # in its own place
    onnxruntime.InferenceSession(tmp_path / "tuned" / "model.onnx")


def test_weights_of_a_copy_are_not_overwritten(browser, tmp_path):
    """A copy of a file with external data shares them."""
    files = browser / "onnx"
    shutil.copy(files / "model_q4.onnx", files / "backup.onnx")
    before = {path: path.read_bytes() for path in files.iterdir()}
    model = jaxonnx.load(browser, variant="q4")
    with pytest.raises(jaxonnx.InputError, match=r"backup\.onnx' has its weights in 'model_q4"):
        model.save(browser)
    assert {path: path.read_bytes() for path in files.iterdir()} == before
    with pytest.warns(UserWarning, match="old ones: onnx/model"):
        model.save(tmp_path / "new")
    (files / "backup.onnx").unlink()
    with pytest.warns(UserWarning, match="old ones: onnx/model"):
        model.save(browser)


def test_other_forms_of_the_model_stay_behind(browser, tmp_path):
    shutil.copy(browser / "onnx" / "model.onnx", browser / "onnx" / "embed_tokens.onnx")
    (browser / "model.safetensors").write_bytes(b"0")
    with pytest.warns(UserWarning, match="weights are the old ones: .*onnx/model.onnx"):
        jaxonnx.load(browser, variant="q4").save(f"{tmp_path}/new/")
    names = {p.relative_to(tmp_path / "new").as_posix() for p in (tmp_path / "new").rglob("*.*")}
    files = {"model_q4.onnx", "model_q4.onnx_data", "embed_tokens.onnx"}
    assert names == {"config.json", "tokenizer.json", *(f"onnx/{name}" for name in files)}


MODULES = {
    "0_Transformer": "Transformer",
    "1_Pooling": "Pooling",
    "2_Dense": "Dense",
    "3_Normalize": "Normalize",
}


def make_sentence_transformer(folder):
    """Add the modules of sentence-transformers to a folder, and the files of its exporter."""
    file = folder / "onnx" / "model.onnx"
    for variant in ("O3", "qint8_avx512_vnni", "quint8_avx2"):
        shutil.copy(file, file.with_name(f"model_{variant}.onnx"))
    listed = [{"path": p, "type": f"sentence_transformers.models.{t}"} for p, t in MODULES.items()]
    (folder / "modules.json").write_text(json.dumps(listed))
    for path in MODULES:
        (folder / path).mkdir()
        (folder / path / "config.json").write_text("{}")
    for path in ("0_Transformer", "2_Dense"):
        (folder / path / "model.safetensors").write_bytes(b"1")


def test_modules_of_sentence_transformers_go_along(browser, tmp_path):
    for file in (browser / "onnx").glob("model_q4*"):
        file.unlink()
    make_sentence_transformer(browser)
    with pytest.raises(jaxonnx.InputError, match=r"variant= .one of 'O3', 'fp32', 'qint8_avx512"):
        jaxonnx.load(browser)
    assert jaxonnx.load(browser, variant="O3").folder.files == ("onnx/model_O3.onnx",)
    with pytest.warns(UserWarning, match="old ones: onnx/model_O3.onnx, onnx/model_qint8_avx512"):
        jaxonnx.load(browser, variant="fp32").save(f"{tmp_path}/new/")
    new = tmp_path / "new"
    assert (new / "2_Dense" / "model.safetensors").read_bytes() == b"1"
    assert all((new / path / "config.json").is_file() for path in MODULES)
    assert not (new / "0_Transformer" / "model.safetensors").exists()
    assert [p.name for p in (new / "onnx").iterdir()] == ["model.onnx"]
    (browser / "modules.json").write_text("[{}]")
    with pytest.raises(jaxonnx.ModelError, match=r"modules.json' is not JSON, or is damaged"):
        jaxonnx.load(browser, variant="fp32").save(f"{tmp_path}/other/")


def test_a_folder_is_for_models_of_folders(tmp_path):
    model = jaxonnx.load((OPTIMUM / "model.onnx").read_bytes())
    with pytest.raises(jaxonnx.InputError, match="is a folder: give the path of a file"):
        model.save(tmp_path)


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's API that a download uses."""

    SHA = "0" * 40

    def __init__(self, folder, *args):
        self.folder = folder
        super().__init__(*args)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        files = [p for p in self.folder.rglob("*") if p.is_file()]
        names = [p.relative_to(self.folder).as_posix() for p in files]
        head = {"X-Repo-Commit": self.SHA}
        if path.startswith("/api/models/us/tiny/tree/"):
            entries = [(n, (self.folder / n).stat().st_size) for n in names]
            listed = [{"type": "file", "path": n, "size": s, "oid": "1" * 40} for n, s in entries]
            self.answer(200, json.dumps(listed).encode(), head)
        elif path.startswith("/api/models/us/tiny"):
            about = {
                "id": "us/tiny",
                "sha": self.SHA,
                "siblings": [{"rfilename": n} for n in names],
            }
            self.answer(200, json.dumps(about).encode(), head)
        elif path.startswith(prefix := f"/us/tiny/resolve/{self.SHA}/"):
            name = path.removeprefix(prefix)
            self.server.given.append(name)
            self.answer(200, (self.folder / name).read_bytes(), head | {"ETag": f'"{name}"'})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer(self, code, body, head):
        self.send_response(code)
        for name, value in {**head, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_name_of_the_hub_brings_one_variant(browser, tmp_path):
    (browser / "additional_chat_templates").mkdir()
    (browser / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    make_sentence_transformer(browser)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, browser))
    server.given = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    source = """if True:
        import jaxonnx
        model = jaxonnx.load("us/tiny", variant="q4")
        files = [p.relative_to(model.folder.path) for p in model.folder.path.rglob("*.*")]
        print(*model.folder.files, *sorted(f.as_posix() for f in files))
        try:
            jaxonnx.load("us/none")
        except jaxonnx.InputError as error:
            print(str(error)[:70])
    """
    try:
        command = [sys.executable, "-c", source]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=tmp_path
        )
    finally:
        server.shutdown()
        server.server_close()
    assert not done.returncode, done.stderr[-2000:]
    first, second = done.stdout.splitlines()
    files = {"config.json", "onnx/model_q4.onnx", "onnx/model_q4.onnx_data", "tokenizer.json"}
    files |= {"additional_chat_templates/tool_use.jinja", "modules.json"}
    files |= {f"{path}/config.json" for path in MODULES if path != "0_Transformer"}
    files.add("2_Dense/model.safetensors")
    assert first.split() == ["onnx/model_q4.onnx", *sorted(files)]
    assert second.startswith("'us/none' does not exist, and the Hugging Face hub did not return it")
    assert not any(name.endswith("model.onnx") for name in server.given)


def test_without_its_package_the_hub_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(jaxonnx.InputError, match="pip install huggingface_hub"):
        jaxonnx.load("us/tiny")
