"""Every recipe of the page on models runs as it is printed, on the architecture in small."""

import json
import re
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image

from jaxonnx.cli import main
from notebooks import yolo
from tests.support.pages import PAGES, blocks
from tests.support.paths import DATA
from tests.support.small_networks import small_voice, small_yolo

PAGE = next(page for page in PAGES if page.stem == "models")
HERE = Path(__file__).with_name("models")
PRELUDE, *SECTIONS = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
SECTIONS = {text.partition("\n")[0]: text for text in SECTIONS}


def draw_photos(path):
    random = np.random.default_rng(0)
    for kind, colour in (("cat", 60), ("dog", 190)):
        (path / kind).mkdir(parents=True)
        for i in range(10):
            picture = random.integers(colour, colour + 60, (32, 32, 3)).astype(np.uint8)
            Image.fromarray(picture).save(path / kind / f"{i}.png")


def draw_objects(path):
    """Write images with a square each, and its box and its outline for YOLO and COCO."""
    for name in ("images", "labels"):
        Path(name).mkdir(exist_ok=True)
    rows = []
    for i in range(8):
        picture = np.zeros((64, 64, 3), np.uint8)
        left, kind = 4 * i, i % 2
        picture[8:40, left : left + 32, kind] = 255
        Image.fromarray(picture).save(Path("images", f"{i}.png"))
        corners = np.array([[left, 8], [left + 32, 8], [left + 32, 40], [left, 40]]) / 64
        line = " ".join(map(str, [kind, *corners.ravel()]))
        Path("labels", f"{i}.txt").write_text(line + "\n")
        rows.append({"image_id": i, "category_id": kind + 1, "bbox": [left, 8, 32, 32]})
    names = [{"id": 1, "name": "red"}, {"id": 2, "name": "green"}]
    images = [{"id": i, "file_name": f"{i}.png"} for i in range(8)]
    coco = {"images": images, "categories": names, "annotations": rows}
    Path("annotations.json").write_text(json.dumps(coco))


def write_int4(path):
    """Write the folder of the stored Qwen3, with matrices in 4 bits."""
    shutil.copytree(DATA / "llm" / "qwen3-genai", path)
    (path / "model.onnx.data").unlink()
    shutil.copy(HERE / "qwen3-int4.onnx", path / "model.onnx")


def write_rows(path):
    texts = ("the story moved me", "too loud", "a story that moved me", "long and loud")
    lines = (json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(texts))
    path.write_text("\n".join(lines))


def write_distilbert(path):
    """Write the stored classifier with a tokenizer of the words of its recipe."""
    import tokenizers

    shutil.copytree(HERE / "distilbert", path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words += re.findall(r"\w+", "a story that moved me too long and loud the ending empty")
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(path / "tokenizer.json"))


def write_chats(path):
    pairs = (("a list?", "mutable"), ("a tuple?", "fixed"), ("a set?", "of hashes"))
    chats = (
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs
    )
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))


FILES = {
    "photos": draw_photos,
    "images": draw_objects,
    "mobilenetv3.onnx": HERE / "mobilenetv3.onnx",
    "resnet50.onnx": HERE / "resnet50.onnx",
    "efficientnet.onnx": HERE / "efficientnet.onnx",
    "dinov2.onnx": HERE / "dinov2.onnx",
    "siglip": HERE / "siglip",
    "wav2vec2": HERE / "wav2vec2",
    "tagger": HERE / "tagger",
    "distilbert": write_distilbert,
    "vit": DATA / "transformers" / "vit",
    "clip": DATA / "transformers" / "clip",
    "whisper": DATA / "transformers" / "whisper",
    "minilm": DATA / "transformers" / "bert",
    "t5": DATA / "transformers" / "t5",
    "yolov8n.onnx": lambda path: onnx.save(small_yolo(), path),
    "yolo11n-seg.onnx": lambda path: onnx.save(small_yolo(masks=4), path),
    "piper.onnx": lambda path: onnx.save(small_voice(), path),
    "reviews.jsonl": write_rows,
    "chats.jsonl": write_chats,
    "qwen3-int4": write_int4,
    "smollm2.onnx": DATA / "text" / "llama.onnx",
    "gemma3.onnx": DATA / "llm" / "builder" / "gemma3_text.onnx",
    "phi4.onnx": DATA / "llm" / "builder" / "phi3.onnx",
    "lightgbm.onnx": DATA / "families" / "lightgbm.onnx",
}
"""Where what a recipe reads comes from: a stored file or folder, or a function that writes it."""


def code_of(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def prepare(text):
    """Make the files that a recipe names, in the current folder."""
    for name in FILES.keys() & set(re.findall(r"[\w.-]+", text)):
        source = FILES[name]
        if callable(source):
            source(Path(name))
        elif source.is_dir():
            shutil.copytree(source, name)
        else:
            shutil.copy(source, name)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "yolo", yolo)
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield tmp_path
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.deep
@pytest.mark.parametrize("title", SECTIONS)
def test_recipe(title, folder):
    python = code_of(SECTIONS[title], "python")
    commands = "".join(code_of(SECTIONS[title], "sh")).splitlines()
    prepare("\n".join([*python, *commands]))
    before = {path.name for path in folder.iterdir()}
    names: dict = {}
    for code in [*code_of(PRELUDE, "python"), *python]:
        exec(compile(code, title, "exec"), names)
        if code in python:
            losses = [row["loss"] for row in names["result"].history.epochs]
            assert min(losses[1:], default=0) < losses[0], losses
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command
    written = [path for path in folder.iterdir() if path.name not in before]
    models = [*folder.glob("*.onnx"), *(p for f in written for p in f.glob("*.onnx"))]
    models = [path for path in models if path.name not in before]
    assert models
    for path in models:
        onnxruntime.InferenceSession(path)


def test_every_recipe_has_its_rows():
    assert len(SECTIONS) == 21
    for title, text in SECTIONS.items():
        if title != "LightGBM":
            rows = " ".join(re.findall(r"^\| ([a-z, ]+) \|", text, re.MULTILINE))
            for word in ("trained", "data", "step", "deploy", "traps"):
                assert word in rows, (title, word)
        assert code_of(text, "python") + code_of(text, "sh"), title
    assert blocks(PAGE, "python")[0] in PRELUDE
