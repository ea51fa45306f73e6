"""Folders of pictures as data: what is read, shown, drawn, recorded, resumed and refused."""

import json
import re
import shutil
import threading
from dataclasses import replace

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from PIL import Image, PngImagePlugin

import jaxonnx
from jaxonnx._data import image_folders as folders
from jaxonnx._data import images
from jaxonnx._data.augment import Augment, crop_and_resize, part, prepare_batch
from jaxonnx._data.image_folders import image_paths
from jaxonnx._data.kinds import Reading, open_data, read
from jaxonnx.cli import main
from tests.support.pictures import net
from tests.support.tiny_networks import LABELS, same

RNG = np.random.default_rng(0)
SAID = {images.KEY: json.dumps({"mean": [0.4, 0.5, 0.6], "std": [0.5, 0.5, 0.25]})}
SHAPE = ["n", 3, 8, 6]


def model(classes=2, shape=SHAPE, metadata=SAID, **others):
    return net(shape, classes, metadata=metadata, **others)


def pixels(height, width, light):
    return RNG.integers(0, 120, (height, width, 3), np.uint8) + np.uint8(120 * light)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Ten pictures of either of two classes, in three formats and of several sizes."""
    root = tmp_path_factory.mktemp("data") / "photos"
    for light, name in enumerate(("dark", "light")):
        (root / name / "deeper").mkdir(parents=True)
        for i in range(10):
            image = Image.fromarray(pixels(8 + 3 * (i % 4), 6 + 2 * (i % 3), light))
            path = root / name / ("deeper" if i == 9 else "") / f"{i}"
            image.save(path.with_suffix((".png", ".JPG", ".webp")[i % 3]))
    return root


@pytest.fixture
def broken(tmp_path):
    """Six pictures of two classes, of which one is cut off and one is something else."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.fromarray(pixels(8, 6, name == "b")).save(tmp_path / name / f"{i}.png")
    data = (tmp_path / "a" / "1.png").read_bytes()
    (tmp_path / "a" / "1.png").write_bytes(data[: len(data) // 2])
    (tmp_path / "b" / "2.png").write_text("no pixels")
    return tmp_path


def train(data, net=None, **wanted):
    wanted = {"loss": LABELS, "optimizer": optax.sgd(0.05), "batch_size": 4} | wanted
    return jaxonnx.train(model() if net is None else net, data, **wanted)


def opened(data, preprocess=None, validation=None, size=4, net=None):
    reading = Reading(net or model(), batch_size=size, seed=0, preprocess=preprocess, trains=True)
    parts = {"data": data} if validation is None else {"data": data, "validation": validation}
    examples, *held_out = read({name: open_data(x, name) for name, x in parts.items()}, reading)
    return examples, held_out[0] if held_out else None


def by_hand(root):
    """Inputs and labels of a folder, with nothing but Pillow and NumPy."""
    x, y = [], []
    for label, name in enumerate(("dark", "light")):
        for path in sorted(p for p in (root / name).rglob("*") if p.is_file()):
            with Image.open(path) as image:
                image = image.convert("RGB")
            width = min(image.width, image.height * 6 / 8)
            height = width * 8 / 6
            left, top = (image.width - width) / 2, (image.height - height) / 2
            box = (left, top, left + width, top + height)
            shown = image.resize((6, 8), Image.Resampling.BILINEAR, box)
            x.append((np.asarray(shown) / 255 - [0.4, 0.5, 0.6]) / [0.5, 0.5, 0.25])
            y.append(label)
    # what lies deeper comes after the files beside it
    x = np.stack(x).transpose(0, 3, 1, 2).astype(np.float32)
    return x, np.array(y)


def test_a_folder_is_the_arrays_that_are_in_it(photos, tmp_path):
    settings = {"epochs": 2, "validation": 0.25}
    one = model()
    result = train(str(photos), one, **settings)
    expected = train(by_hand(photos), one, **settings)
    np.testing.assert_allclose(result.history.losses, expected.history.losses, rtol=1e-4)
    for ours, theirs in zip(result.history.epochs, expected.history.epochs, strict=True):
        assert ours["validation_accuracy"] == theirs["validation_accuracy"]
        np.testing.assert_allclose(
            ours["validation_loss"], theirs["validation_loss"], rtol=1e-4, atol=1e-6
        )
    assert "20 pictures of 2 classes: 'dark', 'light'" in str(result)
    # the file says how, and what the classes are called
    result.model.save(tmp_path / "net.onnx")
    said = images.preparation(jaxonnx.load(tmp_path / "net.onnx"))
    assert said.labels == ("dark", "light")
    assert (said.mean, said.std) == ((0.4, 0.5, 0.6), (0.5, 0.5, 0.25))


def test_a_folder_for_validation(photos, tmp_path):
    (tmp_path / "light").mkdir()  # one of the classes will do
    Image.fromarray(pixels(8, 6, True)).save(tmp_path / "light" / "a.png")
    _, held_out = opened(photos, validation=tmp_path, preprocess={"augment": ["crop", "flip"]})
    (batch,) = held_out.batches(0)
    assert batch.weight.sum() == 1
    assert batch.targets[0] == 1
    shown = images.read(tmp_path / "light" / "a.png", images.layout(model()))
    x = images.preparation(model())(shown, images.layout(model()))
    np.testing.assert_allclose(batch.inputs[0][0], x[0], rtol=1e-5, atol=1e-6)
    (tmp_path / "purple").mkdir()
    Image.fromarray(pixels(8, 6, True)).save(tmp_path / "purple" / "a.png")
    with pytest.raises(jaxonnx.TrainingError, match=r"'purple', which .* does not have: 'dark'"):
        opened(photos, validation=tmp_path)


def write_modes(folder):
    """The same picture in the modes that Pillow has, each with what it should look like."""
    color = pixels(8, 6, False)
    image = Image.fromarray(color)
    gray = image.convert("L")
    palette = image.quantize(16)
    alpha = image.convert("RGBA")
    alpha.putalpha(100)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    turned = image.transpose(Image.Transpose.ROTATE_90)
    expected = {}
    for name, saved, shown in (
        ("rgb", image, image),
        ("gray", gray, gray.convert("RGB")),
        ("palette", palette, palette.convert("RGB")),
        ("alpha", alpha, image),
        ("gray_alpha", gray.convert("LA"), gray.convert("RGB")),
        ("bits", gray.convert("1"), gray.convert("1").convert("RGB")),
    ):
        saved.save(folder / f"{name}.png")
        expected[f"{name}.png"] = np.asarray(shown)
    turned.save(folder / "turned.png", exif=exif)
    turned.save(folder / "turned.webp", exif=exif, lossless=True)
    expected["turned.png"] = expected["turned.webp"] = color
    palette.save(folder / "see_through.png", transparency=b"\0\1\2")
    expected["see_through.png"] = np.asarray(palette.convert("RGB"))
    image.save(folder / "frames.gif", save_all=True, append_images=[gray])
    with Image.open(folder / "frames.gif") as first:
        expected["frames.gif"] = np.asarray(first.convert("RGB"))
    Image.fromarray(pixels(8, 6, False)).convert("CMYK").save(folder / "cmyk.jpg")
    with Image.open(folder / "cmyk.jpg") as cmyk:
        expected["cmyk.jpg"] = np.asarray(cmyk.convert("RGB"))
    return expected


def test_modes_and_orientation(tmp_path):
    where = images.layout(model())
    for name, expected in write_modes(tmp_path).items():
        np.testing.assert_array_equal(images.read(tmp_path / name, where)[0], expected, name)
        whole, aspect = images.read_whole(tmp_path / name, where, (8, 6))
        np.testing.assert_array_equal(whole, expected, name)
        assert aspect == 6 / 8
    gray = images.read(tmp_path / "rgb.png", images.layout(model(shape=["n", 1, 8, 6])))
    with Image.open(tmp_path / "rgb.png") as image:
        np.testing.assert_array_equal(gray[0, ..., 0], np.asarray(image.convert("L")))


def test_large_jpegs_are_decoded_small_and_look_the_same(tmp_path):
    smooth = Image.fromarray(pixels(12, 16, False)).resize((640, 480), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "large.jpg", quality=95)
    smooth.save(tmp_path / "large.png")
    where = images.layout(model(shape=["n", 3, 32, 24]))
    quick, slow = (images.read(tmp_path / f"large.{s}", where).astype(int) for s in ("jpg", "png"))
    assert np.abs(quick - slow).mean() < 1


def test_the_middle_is_that_of_resizing_and_cutting(tmp_path):
    """224 of 256 in small: 28 of 32, as torchvision's transforms cut them."""
    smooth = Image.fromarray(pixels(8, 12, False)).resize((96, 64), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "a.png")
    where = images.layout(model(shape=["n", 3, 28, 28]))
    shown = images.read(tmp_path / "a.png", where, images.Preparation(crop=0.875))[0].astype(int)
    resized_ = smooth.resize((48, 32), Image.Resampling.BILINEAR).crop((10, 2, 38, 30))
    assert np.abs(shown - np.asarray(resized_)).max() <= 1


def test_order_and_numbers(photos):
    """Caffe's: BGR, from 0 to 255, less the means."""
    bgr = {"scale": 1, "mean": (1, 2, 3), "std": 1, "order": "BGR"}
    batches = [
        next(opened(photos, p)[0].batches(0)) for p in (bgr, {"scale": 1, "mean": 0, "std": 1})
    ]
    ours, plain = (np.asarray(batch.inputs[0]) for batch in batches)
    np.testing.assert_array_equal(ours, plain[:, ::-1] - np.array([1, 2, 3])[:, None, None])


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"Image.NominalPixelRange": "NominalRange_0_255"}, images.Preparation(1.0)),
        ({"Image.NominalPixelRange": "Normalized_0_1"}, images.Preparation()),
        (
            {"image.nominalPixelRange": "normalized_1_1", "Image.BitmapPixelFormat": "Bgr8"},
            images.Preparation(mean=(0.5,), std=(0.5,), order="BGR"),
        ),
        (
            {"Image.NominalPixelRange": "Normalized_1_1", images.KEY: '{"labels": ["a", "b"]}'},
            images.Preparation(mean=(0.5,), std=(0.5,), labels=("a", "b")),
        ),
    ],
)
def test_what_onnx_itself_has_for_images(metadata, expected):
    said = model(metadata=metadata)
    assert images.preparation(said) == expected
    assert images.says_numbers(said)
    assert images.preparation(images.with_preparation(said, expected)) == expected


def test_pixels_of_which_nothing_is_said(photos):
    silent = model(metadata={images.KEY: '{"labels": ["dark", "light"]}'})
    with pytest.warns(UserWarning, match=r"how to scale pixels.*(--mean, --std)"):
        opened(photos, net=silent)
    opened(photos, {"scale": 1 / 255}, net=silent)


def test_labels_keep_the_order_that_the_file_has(photos):
    names = ["night", "light", "dark"]
    three = model(3, metadata={images.KEY: json.dumps({"scale": 1, "labels": names})})
    data, _ = opened(photos, net=three)
    assert data.classes == (*names,)
    assert {*data.targets[:10]} == {2}
    # a file for other classes, and one whose labels are not those of its outputs any more
    for labels, classes in (["x", "y"], 2), (["dark", "light", "more"], 2):
        other = model(classes, metadata={images.KEY: json.dumps({"scale": 1, "labels": labels})})
        assert opened(photos, net=other)[0].classes == ("dark", "light")
    data, _ = opened(photos, {"labels": ["light", "dark"]})
    assert {*data.targets[:10]} == {1}


def write_folder(path, processor, classes=("light", "dark"), **options):
    """Write a network as a folder of transformers, with its image processor and classes."""
    path.mkdir()
    model(len(classes), metadata=None, **options).save(path / "model.onnx")
    named = {str(number): name for number, name in enumerate(classes)}
    config = {"architectures": ["ViTForImageClassification"], "id2label": named}
    (path / "config.json").write_text(json.dumps(config, sort_keys=True))
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return jaxonnx.load(path)


VIT = {
    "do_resize": True,
    "size": {"height": 8, "width": 6},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.5, 0.5, 0.25],
}


def test_a_folder_of_transformers_has_numbers_and_classes(photos, tmp_path, capsys):
    """Its classes are in the order of the outputs, not in that of the alphabet."""
    crop = {"size": 8, "do_center_crop": True, "crop_size": {"height": 8, "width": 6}}
    net = write_folder(tmp_path / "vit", VIT | crop)
    x, y = by_hand(photos)
    expected = (np.asarray(net(x)).argmax(1) == 1 - y).mean()
    scores = jaxonnx.evaluate(net, photos, metrics="accuracy", batch_size=4)
    assert scores["accuracy"] == pytest.approx(expected)
    np.testing.assert_allclose(np.asarray(net.predict(photos)), net(x), atol=1e-4)
    assert main(["classify", str(tmp_path / "vit"), str(next(photos.rglob("*.png")))]) == 0
    assert "light" in capsys.readouterr().out

    trained = train(photos, net, epochs=1).model
    assert images.preparation(trained).labels == ("light", "dark")
    trained.save(tmp_path / "alone.onnx")  # the file has them, too
    alone = images.preparation(jaxonnx.load(tmp_path / "alone.onnx"))
    assert alone == images.preparation(trained) == images.preparation(net)
    assert opened(photos, {"labels": ["dark", "light"]}, net=net)[0].classes == ("dark", "light")
    assert opened(photos, net=net.with_head(2))[0].classes == ("dark", "light")
    many = write_folder(tmp_path / "many", VIT, [*"abcdefghijklm"])  # 10 sorts before 2
    assert images.preparation(many).labels == (*"abcdefghijklm",)


NUMBERS = {"mean": (0.4, 0.5, 0.6), "std": (0.5, 0.5, 0.25)}
STRETCHED = {**NUMBERS, "size": (8, 6), "stretch": True}
SQUARE = {**NUMBERS, "size": (224, 224)}
CROP = {"do_center_crop": True, "crop_size": {"height": 224, "width": 224}}


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"resample": 3}, {**STRETCHED, "filter": "bicubic"}),
        ({**CROP, "size": {"shortest_edge": 256}}, {**SQUARE, "crop": 0.875}),
        ({**CROP, "size": 256}, {**SQUARE, "crop": 0.875}),
        (
            {**CROP, "size": 256, "image_processor_type": "DeiTImageProcessor"},
            {**SQUARE, "crop": 0.875, "stretch": True},
        ),
        ({**CROP, "size": 224, "crop_pct": 0.9}, {**SQUARE, "crop": 0.9}),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, {**SQUARE, "crop": 0.875}),
        (  # ConvNeXt stretches to this size
            {"size": {"shortest_edge": 384}, "crop_pct": 0.875},
            {**NUMBERS, "size": (384, 384), "stretch": True},
        ),
        ({**CROP, "size": {"height": 192, "width": 192}}, NUMBERS),  # Perceiver crops first
        ({"do_resize": False}, NUMBERS),
        (
            {"do_normalize": None, "do_flip_channel_order": True},
            {"order": "BGR", "size": (8, 6), "stretch": True},
        ),
        ({"do_rescale": False}, {**STRETCHED, "scale": 1.0}),
        ({"include_top": True}, None),  # EfficientNet divides twice
        ({"image_mean": [0.5]}, {**STRETCHED, "mean": (0.5,)}),
    ],
)
def test_image_processors_of_transformers(processor, expected, tmp_path):
    net = write_folder(tmp_path / "net", VIT | processor, ["no"] * 3, shape=["n", 3, "h", "w"])
    assert images.says_numbers(net) == (expected is not None)
    if expected is not None:
        expected = images.Preparation(**expected, labels=("no",) * 3)
        assert images.preparation(net) == expected


def test_stretched_images_are_those_of_pillow(tmp_path):
    path, net = tmp_path / "a.png", model()
    image = Image.fromarray(pixels(40, 64, False))
    image.save(path)
    plain = {"mean": 0, "std": 1, "stretch": True, "filter": "bicubic"}
    stretched = image.resize((6, 8), Image.Resampling.BICUBIC)
    x = (np.asarray(stretched, np.float32) / 255).transpose(2, 0, 1)[None]
    np.testing.assert_allclose(np.asarray(net.predict(path, preprocess=plain)), net(x), atol=1e-4)
    for wrong, message in ({"filter": "cubic"}, "filter"), ({"stretch": "no"}, "stretch"):
        with pytest.raises(jaxonnx.Error, match=message):
            net.predict(path, preprocess=plain | wrong)


def test_a_damaged_image_processor_is_named(tmp_path):
    net = write_folder(tmp_path / "net", VIT | {"image_std": "half"})
    with pytest.raises(
        jaxonnx.ModelError, match=r"preprocessor_config.json is damaged .*could not"
    ):
        images.preparation(net)


def test_broken_pictures_are_named_and_weigh_nothing(broken):
    with pytest.warns(UserWarning, match="left out") as caught:
        result = train(broken, epochs=2, validation=broken)
    told = [str(w.message) for w in caught]
    assert len(told) == 2  # each once, whatever the epochs and sources
    for name in ("1.png", "2.png"):
        assert sum(name in text for text in told) == 1
        assert sum(name in note for note in result.history.notes) == 1
    with pytest.warns(UserWarning, match="left out"):
        batches = [*opened(broken)[0].batches(0)]
    weight = np.concatenate([b.weight for b in batches])
    x = [row.tobytes() for b in batches for row in np.asarray(b.inputs[0])]
    real = {row for row, one in zip(x, weight, strict=True) if one}
    assert weight.sum() == len(real) == 4
    assert {*x} == real  # what fills up for the others


def test_notes_of_broken_pictures_in_a_run_that_ends_within_an_epoch(broken):
    """Each is read in the first of two parts of the data or in the second, and noted by the end."""
    with pytest.warns(UserWarning, match="left out"):
        result = train(broken, batch_size=2, steps_per_epoch=1, epochs=3)
    for name in ("1.png", "2.png"):
        assert sum(name in note for note in result.history.notes) == 1


def test_predictions_of_a_folder(photos, broken, tmp_path, monkeypatch, capsys):
    """Of all pictures, in the order of their paths, with classes or without."""
    one = model()
    expected = np.asarray(one(by_hand(photos)[0]))
    outputs = one.predict(photos, batch_size=8, preprocess={"augment": "crop"})
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    light = one.predict(photos / "light", batch_size=8)
    np.testing.assert_allclose(light, expected[10:], rtol=1e-4, atol=1e-5)
    monkeypatch.chdir(tmp_path)
    one.save("net.onnx")
    flags = "--mean 0.4,0.5,0.6 --std 0.5,0.5,0.25 --batch-size 8"
    assert main(["run", "net.onnx", str(photos), "-o", "out.npz", *flags.split()]) == 0
    saved = dict(np.load("out.npz"))
    pictures = sorted(path for path in photos.rglob("*") if path.is_file())
    assert [*saved["paths"]] == [*map(str, pictures)]
    np.testing.assert_allclose(saved[one.outputs[0].name], outputs, rtol=1e-5, atol=1e-6)
    np.savez("data.npz", x=by_hand(photos)[0])
    assert main(["run", "net.onnx", "data.npz", "-o", "out.npz", "--mean", "0"]) == 2
    assert "folder of pictures" in capsys.readouterr().err
    with pytest.raises(jaxonnx.InputError, match=r"1\.png' is not an image"):
        one.predict(broken)  # each row belongs to a picture
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(jaxonnx.TrainingError, match=r"no file that ends in \.bmp"):
        one.predict(empty)


def test_a_folder_of_broken_pictures(broken):
    for path in broken.glob("*/*.png"):
        path.write_text("no pixels")
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(jaxonnx.TrainingError, match=r"no picture of .* can be read: .*\.png"),
    ):
        train(broken)


@pytest.mark.deep
def test_random_parts():
    """Their areas and ratios are those of the paper, whatever the picture's own ratio."""
    keys = jax.random.split(jax.random.key(0), 4000)
    for aspect in (1.0, 2.0):
        parts = jax.jit(jax.vmap(lambda k: part(k, aspect, (8, 8), 0.25)))  # noqa: B023
        start, share = parts(keys)
        assert (start >= 0).all()
        assert (start + share <= 1 + 1e-6).all()
        area, ratio = share.prod(1), share[:, 1] / share[:, 0] * aspect
        assert area.min() >= 0.25 - 1e-6
        inside = (share < 1).all(1)
        assert (abs(np.log(ratio[inside])) <= np.log(4 / 3) + 1e-5).all()
        # the paper's way, one draw after the other
        areas, ratios = (
            RNG.uniform(0.25, 1, 10**5),
            np.exp(RNG.uniform(-1, 1, 10**5) * np.log(4 / 3)),
        )
        fits = (areas * ratios / aspect <= 1) & (areas / ratios * aspect <= 1)
        for ours, drawn in ((area, areas), (np.log(ratio), np.log(ratios))):
            np.testing.assert_allclose(np.mean(ours), drawn[fits].mean(), atol=0.01)
            np.testing.assert_allclose(np.std(ours), drawn[fits].std(), atol=0.01)


@pytest.mark.deep
def test_parts_are_those_that_pillow_shows():
    picture = pixels(30, 40, False)
    for seed in range(5):
        start, share = part(jax.random.key(seed), 4 / 3, (16, 24), 0.1)
        (top, left), (height, width) = (np.asarray(v) * [30, 40] for v in (start, share))
        box = (left, top, left + width, top + height)
        transform, bilinear = Image.Transform.EXTENT, Image.Resampling.BILINEAR
        expected = Image.fromarray(picture).transform((24, 16), transform, box, bilinear)
        shown = np.asarray(crop_and_resize(picture, start, share, (16, 24))).astype(int)
        assert np.abs(shown - np.asarray(expected)).max() <= 1


def test_mirrored_pictures():
    where, how = images.layout(model()), images.Preparation(scale=1)
    x = np.stack([pixels(8, 6, False)] * 64)
    rest = {"how": how, "where": where, "augment": Augment(flip=0.5)}
    args = (np.ones(64, np.float32), jax.random.key(0), np.uint32(1))
    shown = np.asarray(prepare_batch(x, *args, np.uint32(2), **rest))
    plain = x.transpose(0, 3, 1, 2)
    as_is, mirrored = ((shown == p).all((1, 2, 3)) for p in (plain, plain[..., ::-1]))
    assert (as_is ^ mirrored).all()
    assert 16 < mirrored.sum() < 48
    again = prepare_batch(x, *args, np.uint32(3), **rest)
    assert (shown != again).any()


def counted(monkeypatch):
    """The pictures that are read, one after the other."""
    seen = []
    for name in ("read", "read_whole"):
        function = getattr(images, name)
        monkeypatch.setattr(
            folders.images, name, lambda path, *a, f=function: (seen.append(path), f(path, *a))[1]
        )
    return seen


def test_pictures_are_kept_up_to_a_bound(photos, monkeypatch):
    seen = counted(monkeypatch)
    one = 8 * 6 * 3
    for memory, expected in ((20 * one, 20), (5 * one + 1, 20 + 15 + 15), (0, 60)):
        seen.clear()
        data, _ = opened(photos, {"memory": memory})
        shown = [[b.inputs[0] for b in data.batches(epoch)] for epoch in range(3)]
        assert len(seen) == expected
        whole = opened(photos)[0]
        seen.clear()
        for epoch, batches in enumerate(shown):
            jax.tree.map(
                np.testing.assert_array_equal, batches, [b.inputs[0] for b in whole.batches(epoch)]
            )


def test_no_more_is_decoded_than_is_soon_used(photos, monkeypatch):
    seen, before = counted(monkeypatch), {*threading.enumerate()}
    batches = opened(photos, {"workers": 2}, size=2)[0].batches(0)
    next(batches)
    assert len(seen) <= 6  # a batch and two ahead
    batches.close()
    added = {*threading.enumerate()} - before  # a source that nobody closed may have some, too
    assert not any("jaxonnx-pictures" in thread.name for thread in added)


class Stopped(Exception):
    pass


@pytest.mark.deep
def test_resumed_bit_for_bit(photos, tmp_path):
    def stop(step, metrics):
        if step == 7:
            raise Stopped

    preprocess = {"augment": ["crop", "flip"], "memory": 2000}  # for some of them
    settings = {"epochs": 3, "preprocess": preprocess, "validation": 0.2}
    kept = {"checkpoint_dir": tmp_path / "kept", "checkpoint_every": 3}
    one = model()
    whole = train(photos, one, **settings)
    with pytest.raises(Stopped):
        train(photos, one, **settings, **kept, on_log=stop)
    with pytest.raises(jaxonnx.TrainingError, match="preprocess="):
        train(photos, one, **settings | {"preprocess": {"augment": "flip"}}, **kept, resume=True)
    resumed = train(photos, one, **settings, **kept, resume=True)
    assert same(resumed, whole)
    assert resumed.history.losses == whole.history.losses
    plain = train(photos, one, **settings | {"preprocess": None})
    assert plain.history.losses != whole.history.losses


def test_augment_by_name_or_function(photos):
    one = model()
    named = train(photos, one, augment="flip").history.losses
    assert named == train(photos, one, preprocess={"augment": "flip"}).history.losses
    mirrored = train(photos, one, augment=lambda key, x: x[..., ::-1]).history.losses
    assert mirrored not in (named, train(photos, one).history.losses)
    with pytest.raises(jaxonnx.TrainingError, match="are two forms of one argument: leave one out"):
        train(photos, preprocess={"augment": "flip"}, augment="flip")


def test_a_network_of_pixels(photos):
    whole = model(shape=["n", 8, 6, 3], metadata=None, kind=onnx.TensorProto.UINT8)
    data, _ = opened(photos, {"augment": ["crop", "flip"]}, net=whole)
    batch = next(data.batches(0))
    assert batch.inputs[0].dtype == np.uint8
    assert batch.inputs[0].shape == (4, 8, 6, 3)


def test_other_types_and_open_sizes(photos):
    """Double precision is what JAX has of it; the size that is chosen stays in the file."""
    data, _ = opened(photos, net=model(kind=onnx.TensorProto.DOUBLE))
    assert next(data.batches(0)).inputs[0].dtype == np.float32
    any_size = model(shape=["n", 3, "h", "w"])
    with pytest.raises(jaxonnx.InputError, match=r"say which .*preprocess=\{'size'"):
        opened(photos, net=any_size)
    reading = Reading(any_size, preprocess={"size": (9, 7)}, trains=True)
    (source,) = read({"data": open_data(photos)}, reading)
    assert source.inputs.size(False) == images.preparation(reading.model).size == (9, 7)


@pytest.mark.deep
def test_from_the_command_line(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model(2, metadata=None).save("net.onnx")
    flags = "--mean 0.5 --std 0.5 --order BGR --crop 0.9 --augment flip --epochs 8 --rate 0.01"
    flags += " --stretch --filter box"
    command = ["train", "net.onnx", str(photos), "--validation", str(photos), "-o", "out.onnx"]
    assert main([*command, "--batch-size", "4", *flags.split()]) == 0
    said = images.preparation(jaxonnx.load("out.onnx"))
    expected = images.Preparation(1 / 255, (0.5,), (0.5,), ("dark", "light"), "BGR", 0.9)
    assert said == replace(expected, stretch=True, filter="box")
    capsys.readouterr()
    for name in ("dark", "light"):
        assert main(["classify", "out.onnx", str(photos / name / "0.png"), "--top", "1"]) == 0
        captured = capsys.readouterr()
        assert captured.out.split()[-1] == name
        assert not captured.err
    (tmp_path / "names.txt").write_text("more\nlight\ndark\nstill more\n")
    model(4).save("four.onnx")
    command = ["sparsify", "four.onnx", str(photos), "-o", "sparse.onnx", "--labels", "names.txt"]
    assert main([*command, "--dense", "1", "--dynamic", "0", "--fixed", "1"]) == 0
    assert "dot_general  backward" in capsys.readouterr().out
    said = images.preparation(jaxonnx.load("sparse.onnx"))
    assert said.labels == ("more", "light", "dark", "still more")
    assert main(["train", "net.onnx", str(photos), "-o", "x.onnx", "--size", "9x9"]) == 2
    assert "8x6" in capsys.readouterr().err
    np.savez("data.npz", x=np.zeros((4, 3, 8, 6), np.float32), y=np.zeros(4, int))
    assert main(["train", "net.onnx", "data.npz", "-o", "x.onnx", "--augment", "flip"]) == 2
    assert "folder of pictures" in capsys.readouterr().err


BAD = {
    "empty": ([], {}, "no classes of pictures: pictures lie in one folder for each class"),
    "no classes": (["1.png", "2.png"], {}, "no classes of pictures"),
    "hidden": ([".cache/1.png"], {}, "no classes of pictures"),
    "one class": (["cat/1.png"], {}, "has one class only, 'cat': a classifier needs two"),
    "masks": (["Images/1.png", "masks/1.png"], {}, "for segmentation.* data=.pictures, masks"),
    "labels of boxes": (["images/1.png", "labels/1.txt"], {}, "for segmentation"),
    "empty class": (["cat/1.png", "dog/1.txt"], {}, "has no pictures of 'dog'"),
    "three": (["a/1.png", "b/1.png", "c/1.png"], {}, r"3 classes \(a, b, c\), .* outputs have 2"),
    "keys": (["a/1.png", "b/1.png"], {"preprocess": {"means": 0}}, "any of scale, .* not 'means'"),
    "kind": (["a/1.png", "b/1.png"], {"preprocess": 3}, "preprocess must be a dict or None, got 3"),
    "mean": (["a/1.png", "b/1.png"], {"preprocess": {"mean": "dark"}}, "mean cannot be 'dark'"),
    "means": (["a/1.png", "b/1.png"], {"preprocess": {"mean": (1, 2)}}, "mean .* 3 channels"),
    "order": (["a/1.png", "b/1.png"], {"preprocess": {"order": "BRG"}}, "'RGB' or 'BGR'"),
    "crop": (["a/1.png", "b/1.png"], {"preprocess": {"crop": 87.5}}, "crop must be a share"),
    "size": (["a/1.png", "b/1.png"], {"preprocess": {"size": (9, 9)}}, "pictures of 8x6"),
    "workers": (["a/1.png", "b/1.png"], {"preprocess": {"workers": 0}}, "at least 1"),
    "labels": (["a/1.png", "b/1.png"], {"preprocess": {"labels": ["a"]}}, "each class .* 'b'"),
    "augment": (["a/1.png", "b/1.png"], {"preprocess": {"augment": "blur"}}, "not 'blur'"),
    "share": (["a/1.png", "b/1.png"], {"preprocess": {"augment": {"flip": 2}}}, "not 'flip': 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case, tmp_path):
    files, wanted, message = BAD[case]
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("no pixels")
        if path.suffix == ".png":
            Image.fromarray(pixels(8, 6, False)).save(path)
    with pytest.raises(jaxonnx.Error, match=message):
        train(tmp_path, **wanted)


def test_evaluate_takes_a_folder_of_one_class(photos, tmp_path):
    (tmp_path / "light").symlink_to(photos / "light")
    silent = model()
    named = model(metadata={images.KEY: json.dumps({"scale": 1, "labels": ["dark", "light"]})})

    def accuracy(net, **options):
        return jaxonnx.evaluate(net, tmp_path, metrics=["accuracy"], **options)["accuracy"]

    def share(net, number):
        return pytest.approx(np.mean(net.predict(photos / "light").argmax(-1) == number))

    assert accuracy(named) == share(named, 1)
    assert accuracy(silent, preprocess={"labels": ["dark", "light"]}) == share(silent, 1)
    with pytest.warns(UserWarning, match=r"'light', .* counts as class 0; .*'labels'"):
        assert accuracy(silent) == share(silent, 0)


def test_16_bits_are_scaled_to_8(tmp_path):
    deep = RNG.integers(0, 2**16, (8, 6)).astype(np.uint16)
    deep[0, :2] = 0, 2**16 - 1
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(deep).save(tmp_path / name / "1.png")
        Image.fromarray(deep).save(tmp_path / name / "2.tiff")
    gray = model(shape=["n", 1, 8, 6], metadata={images.KEY: '{"scale": 1}'})
    exact = np.rint(deep / 257.0)
    right = gray(exact[None, None].astype(np.float32))
    np.testing.assert_allclose(gray.predict(tmp_path), np.repeat(right, 4, 0), rtol=1e-5)
    data, _ = opened(tmp_path, net=gray)
    for batch in data.batches(0):
        np.testing.assert_array_equal(batch.inputs[0][:, 0], np.repeat(exact[None], 4, 0))
    # the range of 32 bits is not known: training and prediction name the file
    Image.fromarray(np.ones((8, 6), np.float32)).save(tmp_path / "a" / "3.tiff")
    for use in (train, lambda data: model().predict(data)):
        with pytest.raises(jaxonnx.UnsupportedError, match=r"3\.tiff' has pixels of 32 bits"):
            use(tmp_path)


def test_folders_that_go_with_nothing(photos):
    x = np.zeros((4, 3, 8, 6), np.float32), np.zeros(4, int)
    with pytest.raises(
        jaxonnx.TrainingError, match=r"validation .* goes with data that is a folder"
    ):
        train(x, validation=photos)
    with pytest.raises(jaxonnx.TrainingError, match="preprocess goes with data that is a folder"):
        train(x, preprocess={"mean": 0})


def test_an_evaluation_on_other_classes_than_those_of_the_file_warns(photos):
    listed = {images.KEY: json.dumps({"mean": [0.0], "std": [1.0], "labels": ["dark", "bright"]})}
    with pytest.warns(UserWarning, match="has the classes 'dark', 'bright', .* others, 'light'"):
        jaxonnx.evaluate(model(metadata=listed), str(photos), metrics="accuracy")
    names = {"labels": ["dark", "light"]}
    jaxonnx.evaluate(model(metadata=listed), str(photos), metrics="accuracy", preprocess=names)


def test_parts_of_a_data_set_are_no_classes(photos, tmp_path):
    """jetson-inference#671: its folder has train, val and test, each with the classes."""
    for name in ("test", "train", "val"):
        shutil.copytree(photos, tmp_path / name)
    words = "has the parts of a data set, 'test', 'train', 'val', not classes.*train' with .*val'"
    for head in (None, 3):
        with pytest.raises(jaxonnx.TrainingError, match=words):
            train(str(tmp_path), model(3), head=head)
    with pytest.raises(jaxonnx.TrainingError, match=words):
        jaxonnx.evaluate(model(), str(tmp_path), metrics="accuracy")
    (tmp_path / "test").rename(tmp_path / "bus")  # classes may be called so
    assert train(str(tmp_path), model(3)).history.losses


def test_what_is_left_out_is_said(photos, tmp_path):
    for name in ("a", "b", ".hidden"):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels(8, 6, False)).save(tmp_path / name / "1.png")
    (tmp_path / "a" / "._1.png").write_text("of a Macintosh")
    (tmp_path / "a" / "2.heic").write_text("something else")
    Image.fromarray(pixels(8, 6, False)).save(tmp_path / "loose.png")
    data, _ = opened(tmp_path)
    notes = "\n".join(data.inputs.notes)
    assert "2 pictures of 2 classes: 'a', 'b'" in notes
    assert "not named like a picture: 1 .heic" in notes
    assert "pictures that lie in no folder of a class: 1" in notes
    assert not re.search("hidden|Macintosh", notes)


@pytest.mark.deep
def test_a_new_head_for_the_classes_of_a_folder(photos, tmp_path):
    """A network for other classes, whose labels are in the file, is given those of the folder."""
    labels = ["dark", "gray", "light"]
    three = model(3, metadata={images.KEY: json.dumps({"mean": [0.5], "labels": labels})})
    assert opened(photos, net=three)[0].classes == (*labels,)
    result = jaxonnx.train(three, photos, head=2, batch_size=4)
    result.model.save(tmp_path / "two.onnx")
    said = images.preparation(jaxonnx.load(tmp_path / "two.onnx"))
    assert (said.mean, said.labels) == ((0.5,), ("dark", "light"))


def test_predict_takes_one_picture_or_a_list_of_them(photos):
    net = model()
    paths = sorted(photos.rglob("*.png"))[:3]
    every = dict(zip(image_paths(photos), net.predict(photos), strict=True))
    want = np.stack([every[path] for path in paths])
    np.testing.assert_allclose(net.predict(paths), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(net.predict([*map(str, paths)]), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(net.predict(str(paths[0])), want[:1], rtol=1e-5, atol=1e-6)
    with pytest.raises(jaxonnx.InputError, match=r"'nothing\.png' is not a file"):
        net.predict(["nothing.png"])


def test_a_suffix_that_a_plugin_teaches_pillow_counts(photos, tmp_path, monkeypatch):
    """As pillow_heif does for .heic; Pillow's own formats of other kinds stay other files."""

    class Plugin(PngImagePlugin.PngImageFile):
        format = "HEIF"

    Image.preinit()
    for table in ("OPEN", "EXTENSION", "ID"):
        monkeypatch.setattr(Image, table, getattr(Image, table).copy())
    path = tmp_path / "photo.HEIC"
    path.write_bytes(min(photos.rglob("*.png")).read_bytes())
    assert not image_paths(tmp_path)
    Image.register_open("HEIF", Plugin, lambda prefix: prefix.startswith(b"\x89PNG"))
    Image.register_extension("HEIF", ".heic")
    assert image_paths(tmp_path) == [path]
    assert model().predict(tmp_path).shape == model().predict(path).shape == (1, 2)


def test_a_step_is_exported_for_a_folder_of_pictures(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model().save("net.onnx")
    assert main(["export-step", "net.onnx", str(photos), "-o", "step", "--batch-size", "4"]) == 0
    session = onnxruntime.InferenceSession("step/step.onnx", providers=["CPUExecutionProvider"])
    shapes = {value.name: value.shape for value in session.get_inputs()}
    assert [4, 3, 8, 6] in shapes.values()


def test_pixels_become_finite_numbers():
    where = images.Layout((2, 2), 1, "NCHW", np.dtype(np.float32))
    for wrong in ({"scale": np.nan}, {"std": (np.nan,)}, {"mean": (np.inf,)}):
        with pytest.raises(jaxonnx.InputError):
            images.Preparation(**wrong).check(where)
