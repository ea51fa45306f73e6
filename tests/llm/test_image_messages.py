"""Chats with images: where images come from, the tokens and pixels made of them, and what is wrong.

The tokens, pixels and losses of transformers are stored (tests/data/make_vision_language.py).
"""

import base64
import contextlib
import importlib.metadata
import io
import json
import re
import shutil

import numpy as np
import optax
import pytest
from PIL import Image

import jaxonnx
from jaxonnx.llm._images import ImageProcessor
from tests.data import make_vision_language as made
from tests.data.make_vision_language import CHAT, make_picture
from tests.support.paths import DATA
from tests.support.sources import read_texts
from tests.support.three_files import (
    FOLDERS,
    IMAGE_TOKEN,
    flatten_features,
    read_oracle,
    run_folder,
)

ANSWER = CHAT[1]
TEXTS = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "a list"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "pictures").mkdir()
    Image.fromarray(make_picture()).save(folder / "pictures" / "wide.png")
    Image.fromarray(make_picture(16, 16)).save(folder / "pictures" / "square.png")
    (folder / "broken.png").write_bytes(b"not a picture")
    with open(folder / "pictures" / "wide.png", "rb") as file:
        (folder / "cut.png").write_bytes(file.read()[:200])
    return folder


@pytest.fixture(scope="module", params=[*FOLDERS])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def models():
    return {family: jaxonnx.load(path) for family, path in FOLDERS.items()}


def has_transformers():
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return int(importlib.metadata.version("transformers").partition(".")[0]) >= 5
    return False


def chat(**part):
    """Return a chat about an image, which is given by the keys of its part."""
    part = {"type": "image", **part}
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}, ANSWER]


def write(folder, *rows):
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(model, rows, **preprocess):
    return read_texts(model, rows, preprocess).data


def data_uri(path):
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


@pytest.mark.parametrize(
    "family", ["internvl", pytest.param("llava", marks=pytest.mark.deep)], indirect=True
)
def test_tokens_pixels_and_loss_are_those_of_transformers(models, family, folder, capsys):
    oracle, model = read_oracle(family), models[family]
    path = write(folder, {"messages": chat(path="pictures/wide.png")})
    columns = read(model, path, loss="all")
    np.testing.assert_array_equal(columns["input_ids"][0], oracle["input_ids"][0])
    pixels = columns["pixel_values"][0].read()
    np.testing.assert_allclose(pixels, oracle["pixels"][0], atol=1e-6)
    settings = {"loss": "causal_lm", "optimizer": optax.adam(1e-2), "progress": False}
    settings["lora"] = jaxonnx.LoRA(rank=2, where="attention")
    settings["samples"] = [chat(path=folder / "pictures" / "wide.png")[:1], "What is it?"]
    result = jaxonnx.train(model, path, preprocess={"loss": "all"}, epochs=2, **settings)
    assert "<image>" * int((oracle["input_ids"] == IMAGE_TOKEN).sum()) in capsys.readouterr().out
    np.testing.assert_allclose(result.history.losses[0], oracle["loss"], rtol=1e-6)
    assert result.history.losses[1] < result.history.losses[0]
    assert not result.history.notes


def sources(folder):
    """Return rows that mean the same image in every way."""
    path = folder / "pictures" / "wide.png"
    content = path.read_bytes()
    placed = [{"role": "user", "content": "<image>\nWhat is it?"}, ANSWER]
    url = {"type": "image_url", "image_url": {"url": data_uri(path)}}
    return [
        {"messages": chat(image="pictures/wide.png")},
        {"messages": chat(url=path.as_uri(), path=None)},
        {"messages": chat(url=data_uri(path))},
        {"messages": [{"role": "user", "content": [url, *chat()[0]["content"][1:]]}, ANSWER]},
        {"messages": chat(image=Image.open(io.BytesIO(content)))},
        {"messages": chat(image={"bytes": content, "path": None})},
        {"messages": chat(), "images": ["pictures/wide.png"]},
        {"messages": chat(), "image": path},
        {"messages": placed, "images": [content]},
    ]


def test_an_image_may_be_given_in_many_ways(models, family, folder, monkeypatch):
    monkeypatch.chdir(folder)
    rows = sources(folder)
    before = [[*row["messages"][0]["content"]] for row in rows]
    columns = read(models[family], rows)
    assert [[*row["messages"][0]["content"]] for row in rows] == before  # nothing is changed
    assert len(columns["input_ids"]) == len(rows)
    for ids, labels, images in zip(*columns.values(), strict=True):
        np.testing.assert_array_equal(ids, columns["input_ids"][0])
        np.testing.assert_array_equal(labels, columns["labels"][0])
        assert IMAGE_TOKEN not in labels
        np.testing.assert_array_equal(images.read(), columns["pixel_values"][0].read())


def test_rows_without_images_and_with_more_tiles(models, folder):
    """A batch is as wide as the row with the most tiles; what a row lacks is zero."""
    model = models["internvl"]
    several = [{"type": "image", "path": f"pictures/{name}.png"} for name in ("wide", "square")]
    question = [*several, {"type": "text", "text": "Which?"}]
    rows = [
        {"messages": TEXTS},
        {"messages": chat(path="pictures/square.png")},
        {"messages": [{"role": "user", "content": question}, ANSWER]},
    ]
    columns = read(model, write(folder, *rows))
    counts = [(ids == IMAGE_TOKEN).sum() for ids in columns["input_ids"]]
    assert counts == [0, 4, 16]  # three tiles, and one
    assert [x.shape[0] for x in columns["pixel_values"]] == [1, 1, 4]
    assert not columns["pixel_values"][0].read().any()
    settings = {"loss": "causal_lm", "optimizer": optax.adam(1e-2), "progress": False}
    lora = jaxonnx.LoRA(rank=2, where="attention")
    result = jaxonnx.train(
        model, folder / "chats.jsonl", lora=lora, epochs=2, batch_size=3, **settings
    )
    assert result.history.losses[1] < result.history.losses[0]
    with pytest.raises(jaxonnx.TrainingError, match=r"line 3 .* has 2 images, and the"):
        read(models["llava"], folder / "chats.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": chat(path="none.png")}, "none.png' is not a file"),
        ({"messages": chat(path="broken.png")}, "broken.png' is not an image that Pillow reads"),
        ({"messages": chat(url="https://example.org/a.png")}, "is on the network"),
        ({"messages": chat(url="data:image/png;base64,?")}, "is not valid base64"),
        (
            {"messages": chat(image=7)},
            "an image must be a path, .* got int",
        ),
        ({"messages": chat()}, "has 0 images in a column, and its texts refer to 1"),
        ({"messages": TEXTS, "image": "pictures/wide.png"}, "has 1 images .* refer to 0"),
        ({"messages": chat(type="audio")}, "a part of type 'audio'"),
    ],
)
def test_wrong_images_are_named_with_their_line(models, folder, row, message):
    path = write(folder, {"messages": TEXTS}, row)
    with pytest.raises(jaxonnx.TrainingError, match=re.escape("line 2 of ") + f".*{message}"):
        read(models["llava"], path)


def test_an_image_that_is_cut_off_is_named_when_it_is_read(models, folder):
    columns = read(models["llava"], write(folder, {"messages": chat(path="cut.png")}))
    with pytest.raises(jaxonnx.TrainingError, match=r"line 1 .*cut.png' is not an image"):
        columns["pixel_values"][0].read()


def test_settings_that_do_not_go_with_images(models, folder):
    path = write(folder, {"messages": chat(path="pictures/wide.png")})
    with pytest.raises(jaxonnx.TrainingError, match="'pack': True} joins texts"):
        read(models["llava"], path, pack=True)
    path = write(folder, {"messages": [*TEXTS, chat(path="pictures/wide.png")[0]]})
    with pytest.raises(jaxonnx.TrainingError, match="tokens of an image behind the limit of 40"):
        read(models["internvl"], path, max_length=40)
    assert len(read(models["internvl"], path, max_length=80)["labels"]) == 1


def test_features_of_all_images_in_a_line(tmp_path, folder):
    """As onnxruntime-genai's runtime passes them to the embedding: [features, size]."""
    shutil.copytree(FOLDERS["llava"], tmp_path / "line")
    flatten_features(tmp_path / "line" / "vision.onnx")
    oracle, model = read_oracle("llava"), jaxonnx.load(tmp_path / "line")
    columns = read(model, write(folder, {"messages": chat(path="pictures/wide.png")}))
    np.testing.assert_array_equal(columns["input_ids"][0], oracle["input_ids"][0])
    ids, pixels = oracle["input_ids"].repeat(2, 0), oracle["pixels"].repeat(2, 0)
    logits = model.without_cache()(ids, pixels, np.ones_like(ids))
    np.testing.assert_allclose(logits[1, -1], oracle["logits"][0], atol=1e-5)


def test_other_image_processors_are_refused(tmp_path, folder):
    shutil.copytree(FOLDERS["llava"], tmp_path / "other")
    settings = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 32}}
    (tmp_path / "other" / "preprocessor_config.json").write_text(json.dumps(settings))
    model = jaxonnx.load(tmp_path / "other")
    path = write(folder, {"messages": chat(path="pictures/wide.png")})
    with pytest.raises(jaxonnx.TrainingError, match="'Idefics3ImageProcessor'; images are read as"):
        read(model, path)


@pytest.mark.parametrize(
    "family", ["internvl", pytest.param("llava", marks=pytest.mark.deep)], indirect=True
)
def test_generate_answers_about_images(models, family, folder, monkeypatch):
    """The tokens are the most likely ones of the three files in onnxruntime."""
    monkeypatch.chdir(folder)
    model = models[family]
    prompts = [chat(path=f"pictures/{name}.png")[:1] for name in ("wide", "square")]
    answers = model.generate([*prompts, TEXTS[:1]], max_new_tokens=3, stop=[0])
    assert model.generate(prompts[1], max_new_tokens=3, stop=[0]) == answers[1]
    for prompt, answer in zip(prompts, answers, strict=False):
        columns = read(model, [{"messages": [*prompt, ANSWER]}])
        ids, pixels = columns["input_ids"][0], columns["pixel_values"][0].read()[None]
        ids = ids[: -len(model.tokenizer.encode("a list of objects<|im_end|>\n"))]
        new = []
        for _ in range(3):
            row = np.array([[*ids, *new]])
            new.append(int(run_folder(FOLDERS[family], row, pixels)[0, -1].argmax()))
        assert model.tokenizer.decode(new) == answer
    assert len(model.generate([(5, 6)], max_new_tokens=2, stop=[0])[0]) == 4
    with pytest.raises(jaxonnx.InputError, match="have the token of images, 3, and no images"):
        model.generate([5, 3, 3], max_new_tokens=2)


CASES = list(zip(made.IMAGE_PROCESSORS, range(9), strict=False))


@pytest.mark.parametrize(("case", "number"), CASES)
def test_pixels_are_those_of_transformers(case, number):
    """Stored values, and the pixels themselves where transformers 5 is installed."""
    told = json.loads((DATA / "vision" / "processors.json").read_text())[number]
    processor = ImageProcessor.of(
        {"image_processor_type": f"{case[0]}ImageProcessor", **case[1]}, ""
    )
    for (height, width), wanted in zip(made.SIZES, told, strict=True):
        pixels = processor.read(Image.fromarray(make_picture(height, width)))
        assert len(pixels) == processor.count_tiles(width, height)
        np.testing.assert_allclose(made.describe(pixels), wanted, atol=2e-5, rtol=1e-5)
        if has_transformers():
            expected = made.run_image_processor(*case, height, width)
            np.testing.assert_allclose(pixels, expected, atol=1e-5)
