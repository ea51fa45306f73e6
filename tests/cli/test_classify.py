"""Pictures to classes: layouts, preparation, the two commands, and what goes wrong."""

import json
import re

import numpy as np
import pytest
from onnx import TensorProto, helper
from PIL import Image

import jaxonnx
from jaxonnx._data import images
from jaxonnx.cli import main
from jaxonnx.errors import InputError, ModelError
from tests.support.paths import DATA
from tests.support.pictures import net

RNG = np.random.default_rng(0)
LAYOUTS = {
    "NCHW": ["n", 1, 8, 6],
    "NCHW in color": ["n", 3, 8, 6],
    "NHWC": ["n", 8, 6, 1],
    "NHWC in color": ["n", 8, 6, 3],
    "NHW": ["n", 8, 6],
    "N": ["n", 48],
    "a fixed batch": [4, 1, 8, 6],
}


@pytest.fixture
def picture(tmp_path):
    """8x6 pixels in color, and their file."""
    pixels = RNG.integers(0, 256, (8, 6, 3), np.uint8)
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    return pixels, path


def classify(net, picture, flags, capsys):
    """The labels and shares that the command gives a picture."""
    assert main(["classify", str(net), str(picture), "--json", *flags.split()]) == 0
    (found,) = json.loads(capsys.readouterr().out)["pictures"]
    return [(entry["label"], entry["share"]) for entry in found["classes"]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, picture, tmp_path, capsys):
    pixels, path = picture
    model = net(LAYOUTS[name])
    model.save(tmp_path / "net.onnx")
    where = images.layout(model, (8, 6) if name == "N" else None)
    assert (where.size, where.kind) == ((8, 6), name.split()[0] if "batch" not in name else "NCHW")
    flags = "--mean 0.5 --std 0.25 --labels a,b,c --scale 0.00392156862745098"
    flags += " --size 8x6" * (name == "N")
    found = classify(tmp_path / "net.onnx", path, flags, capsys)

    gray = "color" not in name
    x = np.asarray(Image.fromarray(pixels).convert("L"))[..., None] if gray else pixels
    x = (x.astype(np.float32) / 255 - 0.5) / 0.25
    x = x.transpose(2, 0, 1) if where.kind == "NCHW" else x
    scores = x.reshape(-1) @ np.asarray(model.params["w"])
    expected = np.exp(scores - scores.max())
    expected /= expected.sum()
    assert [label for label, _ in found] == [("a", "b", "c")[i] for i in np.argsort(-expected)]
    np.testing.assert_allclose([p for _, p in found], np.sort(expected)[::-1], rtol=1e-4, atol=1e-7)


def test_mean_and_std_of_each_channel(picture):
    pixels, path = picture
    where = images.layout(net(["n", 3, 8, 6]))
    prepare = images.Preparation(mean=(0.1, 0.2, 0.3), std=(1, 2, 4))
    x = prepare(images.read(path, where), where)
    expected = (pixels / 255 - [0.1, 0.2, 0.3]) / [1, 2, 4]
    np.testing.assert_allclose(x[0].transpose(1, 2, 0), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="mean"):
        images.Preparation(mean=(1, 2))(images.read(path, where), where)
    with pytest.raises(InputError, match="std"):
        images.Preparation(std=(0,))(images.read(path, where), where)


def test_probabilities_stay_as_they_are(picture, tmp_path, capsys):
    _, path = picture
    model = net(["n", 1, 8, 6], softmax=True)
    where = images.layout(model)
    model.save(tmp_path / "net.onnx")
    found = classify(tmp_path / "net.onnx", path, "", capsys)
    x = images.Preparation()(images.read(path, where), where)
    np.testing.assert_allclose([p for _, p in found], np.sort(model(x)[0])[::-1])
    assert sorted(label for label, _ in found) == ["0", "1", "2"]


def test_pixels_for_a_network_of_pixels(picture):
    pixels, path = picture
    where = images.layout(net(["n", 8, 6, 3], kind=TensorProto.UINT8))
    x = images.Preparation(scale=1)(images.read(path, where), where)
    np.testing.assert_array_equal(x[0], pixels)
    with pytest.raises(InputError, match="pixels as they are"):
        images.Preparation()(images.read(path, where), where)


def test_other_sizes_are_cut_to_the_middle(tmp_path):
    wide = np.zeros((16, 40, 3), np.uint8)
    wide[:, 14:26] = 255  # the middle 12 columns are what 8x6 shows of it
    Image.fromarray(wide).save(tmp_path / "wide.png")
    where = images.layout(net(["n", "h", "w", 3]), (8, 6))
    assert (images.read(tmp_path / "wide.png", where) > 200).all()


def test_batches_of_pictures(picture, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pixels, _ = picture
    model = net(["n", 3, 8, 6])
    model.save("net.onnx")
    x, y = (pixels / 255).astype(np.float32).transpose(2, 0, 1)[None], np.array([1])
    loss = "softmax_cross_entropy_with_integer_labels"
    expected = jaxonnx.evaluate(model, (x, y), loss=loss)["loss"]
    for given in (pixels[None], pixels.transpose(2, 0, 1)[None]):
        np.savez("images.npz", x=given, y=y)
        assert main(["evaluate", "net.onnx", "images.npz", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(expected, rel=1e-5)
    np.savez("images.npz", x=pixels[None, ..., 0], y=y)
    assert main(["evaluate", "net.onnx", "images.npz"]) == 2
    assert "pictures of shape [8, 6]" in capsys.readouterr().err


def test_lists_and_texts_of_a_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    net(["n", 48]).save("net.onnx")
    for name in ("a.png", "b.png"):
        Image.fromarray(RNG.integers(0, 256, (8, 6, 3), np.uint8)).save(name)
    (tmp_path / "run.toml").write_text(
        'model = "net.onnx"\npictures = ["a.png", "b.png"]\nmean = [0.5]\nsize = "8x6"\n'
    )
    assert main(["classify", "--config", "run.toml", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["pictures"]
    assert [row["picture"] for row in rows] == ["a.png", "b.png"]
    flags = "--size 8x6 --mean 0.5"
    assert classify("net.onnx", "b.png", flags, capsys) == [
        (entry["label"], entry["share"]) for entry in rows[1]["classes"]
    ]
    others = classify("net.onnx", "b.png", "--config run.toml --mean 0", capsys)
    assert others == classify("net.onnx", "b.png", "--size 8x6 --mean 0", capsys)


def test_the_file_says_how(tmp_path):
    said = images.Preparation(2.0, (1, 2, 3), (4,), ("cat", "dog"))
    model = images.with_preparation(net(["n", 3, 8, 6]), said)
    model.save(tmp_path / "a.onnx")
    assert images.preparation(jaxonnx.load(tmp_path / "a.onnx")) == said
    assert images.preparation(net(["n", 3, 8, 6])) == images.Preparation()
    assert not images.says_numbers(net(["n", 3, 8, 6]))
    for value in ("1", '{"size": 3}', '{"mean": 3}', "{"):
        with pytest.raises(ModelError, match="malformed"):
            images.preparation(net(["n", 3, 8, 6], metadata={images.KEY: value}))


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        (["n", 4, 8, 6], None, "neither one nor three channels"),
        (["n", 1, "h", "w"], None, "--size HxW"),
        (["n", 48], None, "--size HxW"),
        (["n", 1, 8, 6], (8, 8), "takes pictures of 8x6"),
        (["n"], None, "does not take images"),
    ],
)
def test_networks_that_take_no_picture(shape, size, message):
    with pytest.raises(InputError, match=message):
        images.layout(net(shape), size)


def test_channels_that_the_file_leaves_open():
    """optimum writes [batch_size, num_channels, height, width]: the first convolution has them."""
    vit = jaxonnx.load(DATA / "transformers" / "vit")
    assert vit.inputs[0].shape == ("batch_size", "num_channels", "height", "width")
    where = images.layout(vit, (16, 16))
    assert (where.kind, where.channels, where.size) == ("NCHW", 3, (16, 16))
    with pytest.raises(InputError, match="--size HxW"):
        images.layout(vit)


def test_train_on_pixels_then_classify(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dark = RNG.integers(0, 100, (32, 8, 8), np.uint8)
    y = np.arange(32, dtype=np.uint8) % 2
    np.savez("images.npz", x=dark + 150 * y[:, None, None], y=y)
    net(["n", 1, 8, 8], classes=4).save("net.onnx")
    (tmp_path / "labels.txt").write_text("dark\nlight\nneither\nnothing\n")
    command = "sparsify net.onnx --data images.npz --dense 2 --dynamic 6 --fixed 2 --out out.onnx"
    more = "--validation images.npz --labels labels.txt --mean 0.5 --rate 0.02 --batch-size 8"
    assert main([*command.split(), *more.split()]) == 0
    printed = capsys.readouterr().out
    assert "10 epochs" in printed
    assert re.search("validation_accuracy [0-9.]+ -> 1,", printed)
    assert "w       dot_general  backward  axis 1" in printed
    assert "1,024 bytes of weights, 544 packed (53%)" in printed
    said = images.preparation(jaxonnx.load("out.onnx"))
    assert said == images.Preparation(mean=(0.5,), labels=("dark", "light", "neither", "nothing"))

    Image.fromarray(dark[0]).save("dark.png")
    Image.fromarray(np.repeat(dark[0][..., None] + 150, 3, 2)).save("light.jpg")
    assert main(["classify", "out.onnx", "dark.png", "light.jpg", "--top", "1"]) == 0
    printed = capsys.readouterr()
    assert [line.split()[-1] for line in printed.out.splitlines()] == [
        "dark.png", "dark", "light.jpg", "light",
    ]  # fmt: skip
    assert not printed.err
    assert main(["classify", "net.onnx", "dark.png", "--mean", "0.5", "--std", "0.5"]) == 0
    assert "1/255" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("net.onnx nothing.png", "'nothing.png' is not a file"),
        ("net.onnx text.png", "is not an image"),
        ("net.onnx half.png", "is not an image"),
        ("net.onnx deep.tiff", "pixels of 32 bits"),
        ("net.onnx good.png --labels two.txt", "2 labels for 3 classes"),
        ("net.onnx good.png --labels nothing.txt", "nothing.txt"),
        ("net.onnx good.png --mean 1,2", "mean"),
        ("nothing.onnx good.png", "nothing.onnx"),
        ("maps.onnx good.png", "is not one score for each class"),
    ],
)
def test_what_is_wrong_is_said(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    net(["n", 1, 8, 6]).save("net.onnx")
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "maps",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 8, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1, 8, 6])],
    )
    jaxonnx.load(helper.make_model(graph, ir_version=10)).save("maps.onnx")
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8)).save("good.png")
    data = (tmp_path / "good.png").read_bytes()
    (tmp_path / "half.png").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.png").write_text("no pixels")
    Image.fromarray(np.full((8, 8), 60000, np.int32)).save("deep.tiff")
    (tmp_path / "two.txt").write_text("a\nb\n")
    assert main(["classify", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") <= 2
    assert not captured.out


def test_phases_that_leave_no_sparse_one(tmp_path, capsys):
    net(["n", 1, 8, 8], classes=4).save(tmp_path / "net.onnx")
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 8, 8), np.uint8), y=np.zeros(4, np.uint8))
    out = tmp_path / "out.onnx"
    command = ["sparsify", str(tmp_path / "net.onnx"), str(tmp_path / "a.npz"), "-o", str(out)]
    assert main([*command, "--dense", "2", "--dynamic", "0", "--fixed", "0"]) == 2
    assert "sparse" in capsys.readouterr().err
    assert not out.exists()


def test_metadata_is_plain_json():
    model = images.with_preparation(net(["n", 3, 8, 6]), images.Preparation())
    (entry,) = model.to_onnx().metadata_props
    assert json.loads(entry.value).keys() == {"scale", "mean", "std", "labels"}


def test_folders_are_classified_past_what_is_broken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    net(["n", 1, 8, 6], metadata={"jaxonnx.image": json.dumps({"scale": 1 / 255})}).save("net.onnx")
    (tmp_path / "photos" / "deeper").mkdir(parents=True)
    for name in ("photos/a.png", "photos/c.png", "photos/deeper/d.png", "e.png"):
        Image.fromarray(RNG.integers(0, 256, (8, 6), np.uint8)).save(name)
    (tmp_path / "photos" / "b.png").write_text("no pixels")
    assert main(["classify", "net.onnx", "photos", "e.png", "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)["pictures"]
    names = [row["picture"] for row in found]
    assert names == ["photos/a.png", "photos/b.png", "photos/c.png", "photos/deeper/d.png", "e.png"]
    assert [len(row.get("classes", ())) for row in found] == [3, 0, 3, 3, 3]
    assert "not an image" in found[1]["error"]
    assert "left out: 'photos/b.png' is not an image" in said.err
    (tmp_path / "empty").mkdir()
    assert main(["classify", "net.onnx", "empty"]) == 2
    assert "the folder 'empty' has no pictures" in capsys.readouterr().err
