"""notebooks/yolo.py: the loss of YOLO's maps beside NumPy and Ultralytics, and what is read."""

import json
from functools import partial

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from PIL import Image

import jaxonnx
from notebooks import yolo
from tests.support.small_networks import small_yolo

SIZES = (8, 4, 2)
"""Sides of the maps of an image of 64 x 64 pixels."""
parts_of = jax.jit(yolo.loss_parts)


@pytest.fixture(scope="module")
def example():
    """Maps of two images with three classes, masks, and three boxes and two."""
    random = np.random.default_rng(0)

    def maps(channels):
        return [random.normal(size=(2, channels, s, s)).astype(np.float32) for s in SIZES]

    bins, classes = maps(64), maps(3)
    boxes = [
        [[6, 8, 30, 40], [20, 20, 58, 50], [40, 6, 46, 12]],
        [[0, 0, 64, 64], [10, 30, 28, 44]],
    ]
    targets = yolo.pad(boxes, [[0, 2, 1], [1, 1]])
    coefficients = maps(4)
    prototypes = random.normal(size=(2, 4, 16, 16)).astype(np.float32)
    targets["masks"] = random.random((2, 3, 16, 16)) < 0.5
    return [*bins, *classes, *coefficients, prototypes], targets


def test_the_loss_is_that_of_ultralytics(example):
    """v8SegmentationLoss of ultralytics 8.4.190, of these maps and targets, on CPU."""
    maps, targets = example
    parts = {
        name: float(value.mean()) * yolo.GAINS[name]
        for name, value in parts_of(maps, targets).items()
    }
    assert parts == pytest.approx(
        {
            "box": 5.1675639152526855,
            "mask": 7.698524475097656,
            "classes": 122.30908966064453,
            "bins": 5.037886619567871,
        },
        rel=1e-6,
    )
    gradients = jax.jit(jax.grad(lambda maps: yolo.loss(maps, targets).mean()))(maps[:6])
    norms = [float(np.linalg.norm(x)) for x in gradients]
    expected = [0.34379738569, 0, 0, 3.21194601059, 1.60735642910, 0.85986429453]
    np.testing.assert_allclose(norms, expected, rtol=1e-5, atol=1e-7)


def test_the_assigner_is_that_of_ultralytics(example):
    maps, targets = example
    p = yolo.arrange(maps[:6])
    found = jax.jit(yolo.assign)(jax.nn.sigmoid(p.classes), yolo.boxes_of(p), p.centers, targets)
    anchors = [np.flatnonzero(row).tolist() for row in found.weight]
    assert anchors == [
        [5, 9, 10, 12, 13, 17, 18, 19, 25, 26, 27, 28, 29, 30, 33, 34, 36, 37, 38, 43, 44, 45],
        [2, 4, 11, 12, 26, 28, 29, 33, 34, 35, 41, 42, 46, 52, 73],
    ]
    boxes = [
        box[places].tolist() for box, places in zip(found.box, map(np.array, anchors), strict=True)
    ]
    assert boxes == [
        [2, 0, 0, 2, 2, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1],
    ]


def ciou(a, b):
    """The complete IoU of two boxes, by the equations of arXiv:1911.08287."""
    width, height = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    area = [(x[2] - x[0]) * (x[3] - x[1]) for x in (a, b)]
    iou = width * height / (sum(area) - width * height)
    centers = [((x[0] + x[2]) / 2, (x[1] + x[3]) / 2) for x in (a, b)]
    distance = sum((p - q) ** 2 for p, q in zip(*centers, strict=True))
    diagonal = sum((max(a[i + 2], b[i + 2]) - min(a[i], b[i])) ** 2 for i in (0, 1))
    angles = [np.arctan((x[2] - x[0]) / (x[3] - x[1])) for x in (a, b)]
    v = 4 / np.pi**2 * (angles[0] - angles[1]) ** 2
    return iou - distance / diagonal - v * v / (1 - iou + v)


def reference(maps, boxes, classes, top=10):
    """The parts of the loss of a batch in float64: loops over images, anchors and boxes.

    TOOD, arXiv:2108.07755, equations 3 to 7, with exponents 1/2 and 6; GFL, arXiv:2006.04388,
    equation 6; sums are divided by the sum of the scores that anchors should have.
    """
    totals, score_sum = {"box": 0.0, "classes": 0.0, "bins": 0.0}, 0.0
    for image, (truth, kinds) in enumerate(zip(boxes, classes, strict=True)):
        anchors = []
        for level, (size, stride) in enumerate(zip(SIZES, yolo.STRIDES, strict=True)):
            for row, column in np.ndindex(size, size):
                bins = maps[level][image, :, row, column].astype(float).reshape(4, 16)
                shares = np.exp(bins) / np.exp(bins).sum(1, keepdims=True)
                x, y = (column + 0.5) * stride, (row + 0.5) * stride
                left, above, right, below = shares @ np.arange(16) * stride
                box = x - left, y - above, x + right, y + below
                logits = maps[3 + level][image, :, row, column].astype(float)
                anchors.append((x, y, stride, np.log(shares), box, 1 / (1 + np.exp(-logits))))
        overlap, aligned, taken = {}, {}, {}
        for m, (box, kind) in enumerate(zip(truth, kinds, strict=True)):
            for a, (x, y, _, _, predicted, scores) in enumerate(anchors):
                middle = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
                sides = max(box[2] - box[0], 16), max(box[3] - box[1], 16)
                if abs(x - middle[0]) < sides[0] / 2 and abs(y - middle[1]) < sides[1] / 2:
                    overlap[m, a] = max(ciou(box, predicted), 0)
                    aligned[m, a] = scores[kind] ** 0.5 * overlap[m, a] ** 6
            inside = sorted((-t, a) for (n, a), t in aligned.items() if n == m)
            for _, a in inside[:top]:
                taken.setdefault(a, []).append(m)
        for a, several in taken.items():
            if len(several) > 1:
                taken[a] = [max((u, -m) for (m, b), u in overlap.items() if b == a)[1] * -1]
        wanted = np.zeros((len(anchors), 3))
        for a, (m,) in taken.items():
            own = [b for b, (n,) in taken.items() if n == m]
            best = max(aligned[m, b] for b in own)
            weight = aligned[m, a] / (best + 1e-9) * max(overlap[m, b] for b in own)
            wanted[a, kinds[m]] = weight
            x, y, stride, logs, predicted, _ = anchors[a]
            totals["box"] += weight * (1 - ciou(predicted, truth[m]))
            left, above, right, below = truth[m]
            distances = np.array([x - left, y - above, right - x, below - y]) / stride
            for side, distance in enumerate(np.clip(distances, 0, 14.99)):
                low = int(distance)
                share = distance - low
                entropy = (1 - share) * logs[side, low] + share * logs[side, low + 1]
                totals["bins"] -= weight * entropy / 4
        scores = np.array([anchor[5] for anchor in anchors])
        entropies = wanted * np.log(scores) + (1 - wanted) * np.log(1 - scores)
        totals["classes"] -= entropies.sum()
        score_sum += wanted.sum()
    return {name: value / max(score_sum, 1) for name, value in totals.items()}


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_that_of_the_papers(seed):
    random = np.random.default_rng(seed)
    maps = [
        (2 * random.normal(size=(3, channels, s, s))).astype(np.float32)
        for channels in (64, 3)
        for s in SIZES
    ]
    boxes, classes = [], []
    for count in (4, 0, 2):  # the second image has no objects
        corner = random.uniform(0, 40, (count, 2))
        boxes.append(np.hstack([corner, corner + random.uniform(5, 24, (count, 2))]))
        classes.append(random.integers(0, 3, count))
    targets = yolo.pad(boxes, classes)
    found = parts_of(maps, targets)
    expected = reference(maps, [list(map(tuple, b)) for b in boxes], classes)
    assert {name: float(x.mean()) for name, x in found.items()} == pytest.approx(expected, rel=2e-5)
    wider = {  # more padding changes nothing
        "boxes": np.pad(targets["boxes"], ((0, 0), (0, 3), (0, 0))),
        "classes": np.pad(targets["classes"], ((0, 0), (0, 3)), constant_values=-1),
    }
    for name, value in parts_of(maps, wider).items():
        np.testing.assert_allclose(value, found[name], rtol=1e-6)


def test_masks_within_their_boxes():
    """One object, one anchor within it: the mean of the entropies of the pixels in the box."""
    maps = [np.zeros((1, 64, s, s), np.float32) for s in SIZES]
    maps += [np.zeros((1, 1, s, s), np.float32) for s in SIZES]
    maps += [np.ones((1, 1, s, s), np.float32) for s in SIZES]
    logits = np.random.default_rng(0).normal(size=(1, 1, 16, 16)).astype(np.float32)
    targets = yolo.pad([[[8, 16, 24, 32]]], [[0]])
    targets["masks"] = np.zeros((1, 1, 16, 16), bool)
    targets["masks"][0, 0, 5:8, 2:5] = True
    found = jax.jit(partial(yolo.loss_parts, top=1))([*maps, logits], targets)["mask"]
    pixels, truth = logits[0, 0, 4:8, 2:6], targets["masks"][0, 0, 4:8, 2:6]
    expected = np.logaddexp(0, np.where(truth, -pixels, pixels)).mean()
    assert float(found[0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"masks": 4}, {"joined": True}], ids=str)
def test_the_end_of_a_file_is_found_and_put_back(settings, tmp_path):
    path = tmp_path / "yolo.onnx"
    onnx.save(small_yolo(**settings), path)
    onnx.checker.check_model(path, full_check=True)
    maps = yolo.find_maps(path)
    assert maps.bins == [f"/model.22/cv2.{i}/cv2.{i}.2/Conv_output_0" for i in range(3)]
    assert maps.classes == [f"/model.22/cv3.{i}/cv3.{i}.2/Conv_output_0" for i in range(3)]
    assert len(maps.coefficients) == 3 * ("masks" in settings)
    yolo.finish(yolo.load(path)).save(tmp_path / "again.onnx")
    x = np.random.default_rng(0).random((1, 3, 64, 64), np.float32)
    before, after = (
        onnxruntime.InferenceSession(tmp_path / name).run(None, {"images": x})
        for name in ("yolo.onnx", "again.onnx")
    )
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_files_without_bins_are_refused():
    proto = small_yolo()
    proto.graph.output[0].name = "/model.22/cv2.0/cv2.0.2/Conv_output_0"
    with pytest.raises(ValueError, match="nms=True"):
        yolo.find_maps(proto)
    with pytest.raises(ValueError, match="nms=True"):
        yolo.find_maps("tests/data/lenet.legacy.onnx")


def draw(count, seed, size=64):
    """Return red squares and blue discs on noise, their boxes and classes."""
    random = np.random.default_rng(seed)
    images = random.random((count, 3, size, size), np.float32) * 0.2
    rows, columns = np.mgrid[:size, :size] + 0.5
    boxes, classes = [], []
    for image in images:
        places, kinds = [], []
        for _ in range(random.integers(1, 4)):
            side = random.integers(14, 34)
            left, top = random.integers(0, size - side, 2)
            kind = int(random.integers(2))
            x, y = columns - left - side / 2, rows - top - side / 2
            inside = (np.abs(x) < side / 2) & (np.abs(y) < side / 2)
            if kind:
                inside &= x**2 + y**2 < (side / 2) ** 2
            image[:, inside] = np.array([[0.9, 0.2, 0.3], [0.2, 0.4, 0.9]][kind])[:, None]
            places.append([left, top, left + side, top + side])
            kinds.append(kind)
        boxes.append(places)
        classes.append(kinds)
    return images, yolo.pad(boxes, classes)


@pytest.mark.deep
def test_a_small_detector_learns_shapes(tmp_path):
    """From 80 classes and random weights: five of six shapes are found, with few others."""
    onnx.save(small_yolo(classes=80), tmp_path / "yolo.onnx")
    result = jaxonnx.train(
        yolo.load(tmp_path / "yolo.onnx", classes=2),
        draw(256, 0),
        loss=yolo.loss,
        optimizer=optax.adam(4e-3),
        epochs=40,
        batch_size=16,
    )
    losses = [row["loss"] for row in result.history.epochs]
    assert losses[-1] < losses[0] / 3
    yolo.finish(result.model).save(tmp_path / "shapes.onnx")
    images, targets = draw(64, 1)
    session = onnxruntime.InferenceSession(tmp_path / "shapes.onnx")
    (output,) = session.run(None, {"images": images})
    assert output.shape == (64, 6, 84)
    found = count = others = 0
    for i, (boxes, kinds, _) in enumerate(yolo.suppress(output, 0.3)):
        real = targets["classes"][i] >= 0
        truth, wanted = targets["boxes"][i][real], targets["classes"][i][real]
        overlap = np.asarray(yolo.complete_iou(truth[:, None], boxes[None])) > 0.5
        overlap &= wanted[:, None] == kinds
        found += int(overlap.any(1).sum())
        others += int((~overlap.any(0)).sum())
        count += len(truth)
    assert found > 5 / 6 * count
    assert others < count / 6


def test_masks_of_polygons(tmp_path):
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    for name in "ab":
        Image.new("RGB", (64, 64)).save(tmp_path / "images" / f"{name}.png")
    (tmp_path / "labels" / "a.txt").write_text("2 0.25 0.25 0.75 0.25 0.25 0.75")
    _, targets = yolo.read_yolo(tmp_path / "images", tmp_path / "labels", size=64, masks=True)
    assert targets["masks"].shape == (2, 1, 16, 16)
    rows, columns = np.mgrid[:16, :16]
    triangle = (rows >= 4) & (columns >= 4) & (rows + columns <= 16)
    np.testing.assert_array_equal(targets["masks"][0, 0], triangle)
    assert not targets["masks"][1].any()
    assert targets["boxes"][0].tolist() == [[16, 16, 48, 48]]


def test_boxes_of_coco_and_of_text_files(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / "images" / "a.png")
    Image.new("L", (16, 32)).save(tmp_path / "images" / "b.png")
    (tmp_path / "labels" / "a.txt").write_text("1 0.5 0.5 0.5 0.5\n\n0 0.1 0.2 0.3 0.2 0.2 0.6\n")
    coco = {
        "images": [{"id": 7, "file_name": "a.png"}, {"id": 3, "file_name": "b.png"}],
        "categories": [{"id": 9, "name": "dog"}, {"id": 2, "name": "cat"}],
        "annotations": [
            {"image_id": 7, "category_id": 9, "bbox": [10, 5, 20, 10]},
            {"image_id": 7, "category_id": 2, "bbox": [4, 4, 8, 8], "iscrowd": 0},
            {"image_id": 3, "category_id": 2, "bbox": [0, 0, 9, 9], "iscrowd": 1},
        ],
    }
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    images, targets = yolo.read_yolo(tmp_path / "images", tmp_path / "labels", size=32)
    again, same, names = yolo.read_coco(tmp_path / "coco.json", tmp_path / "images", size=32)
    assert names == ["cat", "dog"]
    np.testing.assert_array_equal(images, again)
    assert images.shape == (2, 3, 32, 32)
    assert images[0, :, 16, 16].tolist() == [1, 0, 0]
    assert images[0, :, 7, 0] == pytest.approx(114 / 255)  # 40 x 20 becomes 32 x 16, from row 8 on
    np.testing.assert_allclose(targets["boxes"][0], [[8, 12, 24, 20], [3.2, 11.2, 9.6, 17.6]])
    np.testing.assert_allclose(same["boxes"], targets["boxes"], rtol=1e-6)
    assert targets["classes"].tolist() == [[1, 0], [-1, -1]]
    np.testing.assert_array_equal(same["classes"], targets["classes"])


@pytest.mark.parametrize("settings", [{}, {"masks": 4}, {"joined": True}])
def test_a_whole_file_trains_what_ultralytics_trains(settings):
    """Neither the bins of distances nor the strides, also where these are initializers."""
    model = jaxonnx.load(small_yolo(**settings))
    odd = [n for n, x in model.params.items() if "dfl" in n or np.ptp(np.asarray(x)) > 8]
    assert odd == []
    assert any("dfl.weight" in line for line in str(model).splitlines())
