"""Train YOLOv8 and YOLO11, detectors and segmenters, from their .onnx files.

Copy this file beside your program. An exported file ends in decoded boxes and probabilities, of
which there is no good gradient: a loss needs the feature maps before them. `load` cuts the file
there and may give it other classes, `loss` is the loss of these maps, and `finish` puts the end of
the file back, as nodes of the saved file. All functions of arrays are pure, and have static shapes:
each image has the same number of boxes, of which the last ones may be padding, of class -1.

Sizes below: B images, M boxes each, A anchors (the places of all maps), C classes, R bins of a
distance (16). Boxes are corners (left, top, right, bottom) in pixels.

  TOOD: Task-aligned One-stage Object Detection, arXiv:2108.07755 (the assigner)
  Generalized Focal Loss, arXiv:2006.04388 (distances as distributions over bins)
  Distance-IoU Loss, arXiv:1911.08287 (the complete IoU of boxes)
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax

import jaxonnx

STRIDES = (8, 16, 32)
GAINS = {"box": 7.5, "classes": 0.5, "bins": 1.5, "mask": 7.5}
"""Weights of the parts of the loss."""


# ---- the file ------------------------------------------------------------------------------------


class Maps(NamedTuple):
    """Names of the feature maps that a file decodes, in the order of the strides."""

    bins: list[str]
    classes: list[str]
    coefficients: list[str]
    """Of a segmenter, else none."""
    prototypes: list[str]

    @property
    def names(self) -> list[str]:
        return [name for names in self for name in names]


def find_maps(path: Any) -> Maps:
    """Find the maps before the end of a file, by the graph: names differ between exports.

    Raises:
      ValueError: the file does not end in distances over bins, as those of YOLOv8 and YOLO11 do.
    """
    proto = path if isinstance(path, onnx.ModelProto) else onnx.load(path)
    graph = proto.graph
    makers = {name: node for node in graph.node for name in node.output}
    joints: list[Any] = []

    def walk(name: str) -> list[str]:
        """Return the outputs of the convolutions that a value is arranged from."""
        node = makers.get(name)
        if node is None or node.op_type == "Constant":
            return []
        if node.op_type == "Conv":
            return [name]
        if node.op_type == "Concat":
            joints.append(node)
        if node.op_type not in ("Concat", "Reshape", "Split", "Slice", "Transpose"):
            return []
        return list(dict.fromkeys(found for value in node.input for found in walk(value)))

    softmax = [node for node in graph.node if node.op_type == "Softmax"]
    last = makers.get(graph.output[0].name)
    if last is None or last.op_type != "Concat" or not softmax:
        raise ValueError(
            "the file must end in a Concat of decoded boxes and of classes, behind a Softmax over "
            "bins: export without nms=True and end2end=True"
        )
    bins = walk(softmax[-1].input[0])
    sigmoid = [makers[n] for n in last.input if n in makers and makers[n].op_type == "Sigmoid"]
    classes = walk(sigmoid[0].input[0]) if sigmoid else []
    if set(bins) == set(classes):  # of exports until 2025: one map of bins and classes for a stride
        pairs = [node for node in joints if all(name in bins for name in node.input)]
        pairs = list({node.output[0]: node for node in pairs}.values())
        bins, classes = ([node.input[i] for node in pairs] for i in (0, 1))
    if not bins or len(bins) != len(classes):
        raise ValueError(
            "before the end of the file there are no maps of distances over bins, as YOLOv8 and "
            "YOLO11 have; YOLO26 has distances without bins, which this loss does not learn"
        )
    others = [n for n in last.input if walk(n) and set(walk(n)).isdisjoint({*bins, *classes})]
    coefficients = walk(others[-1]) if others else []
    prototypes = [value.name for value in graph.output[1:]][: len(coefficients[:1])]
    return Maps(bins, classes, coefficients, prototypes)


def load(path: Any, classes: int | None = None) -> jaxonnx.Model:
    """Load a file up to its feature maps; with a number of classes, with new layers for them."""
    maps = find_maps(path)
    model = jaxonnx.load(path).with_outputs(maps.names)
    if classes is None:
        return model
    for name in maps.classes:
        model = model.with_head(classes, at=name)
        _, bias = model.head[-2:]
        rare = jnp.full_like(model.params[bias], np.log(0.01 / 0.99))  # most anchors have no object
        model = model.replace(params={**model.params, bias: rare})
    return model


def finish(model: jaxonnx.Model) -> jaxonnx.Model:
    """Return a model of maps with decoded outputs, as Ultralytics exports them.

    The second output of a segmenter is called "prototypes", as "output1" is a value of the file.
    """
    outputs = ["output0", "prototypes"] if len(model.outputs) % 3 else ["output0"]
    return model.then(decode, outputs=outputs)


# ---- maps, anchors and boxes ---------------------------------------------------------------------


class Predictions(NamedTuple):
    """Feature maps with one axis of anchors."""

    bins: jax.Array
    """[B, A, 4, R]: logits of the distances to the sides, in strides."""
    classes: jax.Array
    """[B, A, C]: logits."""
    coefficients: jax.Array | None
    """[B, A, K]"""
    prototypes: jax.Array | None
    """[B, K, H, W]"""
    centers: np.ndarray
    """[A, 2], in pixels."""
    strides: np.ndarray
    """[A, 1]"""


def arrange(maps: Sequence[jax.Array], strides: Sequence[int] = STRIDES) -> Predictions:
    """Arrange the maps of a file (those of bins, of classes, of coefficients, prototypes)."""
    count = len(strides)
    rows = [x.reshape(*x.shape[:2], -1).swapaxes(1, 2) for x in maps[: len(maps) // count * count]]
    bins, classes, *more = [
        jnp.concatenate(rows[i : i + count], 1) for i in range(0, len(rows), count)
    ]
    places, sizes = [], []
    for x, stride in zip(maps, strides, strict=False):
        rows_, columns = np.mgrid[: x.shape[2], : x.shape[3]]
        places.append((np.stack([columns, rows_], -1).reshape(-1, 2) + 0.5) * stride)
        sizes.append(np.full((rows_.size, 1), stride))
    return Predictions(
        bins.reshape(*bins.shape[:2], 4, -1),
        classes,
        more[0] if more else None,
        maps[-1] if more else None,
        np.concatenate(places).astype(np.float32),
        np.concatenate(sizes).astype(np.float32),
    )


def boxes_of(predictions: Predictions) -> jax.Array:
    """Return the boxes [B, A, 4]: a distance is the mean of its distribution over bins."""
    shares = jax.nn.softmax(predictions.bins, -1)
    distances = shares @ np.arange(shares.shape[-1], dtype=np.float32) * predictions.strides
    return jnp.concatenate(
        [predictions.centers - distances[..., :2], predictions.centers + distances[..., 2:]], -1
    )


def decode(*maps: jax.Array) -> Any:
    """Return [B, 4 + C, A]: centers and sizes of boxes, probabilities; the end of a file."""
    predictions = arrange(maps)
    low, high = jnp.split(boxes_of(predictions), 2, -1)
    parts = [(low + high) / 2, high - low, jax.nn.sigmoid(predictions.classes)]
    if predictions.coefficients is not None:
        parts.append(predictions.coefficients)
    decoded = jnp.concatenate(parts, -1).swapaxes(1, 2)
    return decoded if predictions.prototypes is None else (decoded, predictions.prototypes)


def complete_iou(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the complete IoU of boxes [..., 4]: less by distance and by difference in shape.

        CIoU = IoU - d^2 / c^2 - alpha v,    v = 4/pi^2 (atan w/h - atan w'/h')^2

    for d between centers, c the diagonal of the box around both, alpha = v / (1 - IoU + v), which
    counts as a constant in the gradient (equations 10 to 12 of arXiv:1911.08287).
    """
    small = 1e-7
    size_a, size_b = a[..., 2:] - a[..., :2], b[..., 2:] - b[..., :2]
    shared = jnp.minimum(a[..., 2:], b[..., 2:]) - jnp.maximum(a[..., :2], b[..., :2])
    shared = jnp.maximum(shared, 0).prod(-1)
    iou = shared / (size_a.prod(-1) + size_b.prod(-1) - shared + small)
    around = jnp.maximum(a[..., 2:], b[..., 2:]) - jnp.minimum(a[..., :2], b[..., :2])
    apart = (a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) / 2
    angle_a, angle_b = (jnp.arctan2(x[..., 0], x[..., 1] + small) for x in (size_a, size_b))
    shape = 4 / np.pi**2 * (angle_a - angle_b) ** 2
    alpha = lax.stop_gradient(shape / (1 - iou + shape + small))
    return iou - (apart**2).sum(-1) / ((around**2).sum(-1) + small) - alpha * shape


# ---- which anchor learns which box ---------------------------------------------------------------


class Assignment(NamedTuple):
    """What each anchor learns."""

    box: jax.Array
    """[B, A]: the number of its box."""
    weight: jax.Array
    """[B, A]: the score that its class should have; 0 for anchors without a box."""


def assign(
    scores: jax.Array,
    boxes: jax.Array,
    centers: Any,
    targets: Mapping[str, jax.Array],
    *,
    top: int = 10,
    alpha: float = 0.5,
    beta: float = 6.0,
    least: float = 16,
) -> Assignment:
    """Give each box the anchors that are best at class and place together (TOOD, section 3.2).

    The alignment of an anchor and a box is t = s^alpha u^beta, for s the score of the class of the
    box and u their overlap. A box gets the `top` anchors within it of the greatest t; an anchor of
    several boxes goes to the one that it overlaps most. Its score is t, scaled so that the greatest
    of a box is the greatest overlap of its anchors.

    Args:
      scores: probabilities [B, A, C].
      boxes: [B, A, 4].
      centers: of the anchors, [A, 2].
      targets: "boxes" [B, M, 4] and "classes" [B, M], -1 for padding.
      least: sides of boxes that are shorter count as this long for what lies within, so that a box
        between centers has anchors, too.
    """
    real, truth, classes = targets["classes"] >= 0, targets["boxes"], targets["classes"]
    half = jnp.maximum(truth[..., 2:] - truth[..., :2], least)[:, :, None] / 2
    middle = (truth[..., 2:] + truth[..., :2])[:, :, None] / 2
    inside = (jnp.abs(centers - middle) < half).all(-1) & real[..., None]  # [B, M, A]

    overlap = jnp.maximum(complete_iou(truth[:, :, None], boxes[:, None]), 0) * inside
    index = jnp.maximum(classes, 0)[..., None]
    score = jnp.take_along_axis(scores.swapaxes(1, 2), index, 1)  # [B, M, A]
    aligned = score**alpha * overlap**beta

    top = min(top, aligned.shape[-1])
    _, best = lax.top_k(jnp.where(inside, aligned, -1), top)
    chosen = jax.nn.one_hot(best, aligned.shape[-1], dtype=bool).any(2) & inside
    several = chosen.sum(1, keepdims=True) > 1
    most = jax.nn.one_hot(overlap.argmax(1), truth.shape[1], axis=1, dtype=bool)
    chosen = jnp.where(several, most, chosen)

    aligned, overlap = aligned * chosen, overlap * chosen
    scale = overlap.max(-1, keepdims=True) / (aligned.max(-1, keepdims=True) + 1e-9)
    return Assignment(chosen.argmax(1), (aligned * scale).max(1))


# ---- the loss ------------------------------------------------------------------------------------


def cross_entropy_of_bins(bins: jax.Array, distances: jax.Array) -> jax.Array:
    """Return the distribution focal loss [...] of logits [..., R] and distances in strides.

    A distance lies between two bins, and their probabilities should be the shares of each
    (equation 6 of arXiv:2006.04388).
    """
    distances = jnp.clip(distances, 0, bins.shape[-1] - 1.01)
    left = jnp.floor(distances)
    share = distances - left
    logs = jax.nn.log_softmax(bins)
    places = jnp.arange(bins.shape[-1])
    wanted = jnp.where(places == left[..., None], 1 - share[..., None], 0)
    wanted = jnp.where(places == left[..., None] + 1, share[..., None], wanted)
    return -(wanted * logs).sum(-1)


def loss(maps: Sequence[jax.Array], targets: Mapping[str, jax.Array], **settings: Any) -> jax.Array:
    """Return the loss of each image, [B]; for `jaxonnx.train(load(path), data, loss=yolo.loss)`.

    The mean of these is the loss of the batch: sums over anchors, weighted by their scores, by the
    sum of all scores.

    Args:
      maps: of the model that `load` returns.
      targets: "boxes" [B, M, 4] in pixels and "classes" [B, M], -1 for padding. Of a segmenter also
        "masks" [B, M, H, W] of the size of the prototypes, a quarter of the image's.
      settings: those of `assign`.
    """
    parts = loss_parts(maps, targets, **settings)
    return sum(GAINS[name] * value for name, value in parts.items())  # type: ignore


def loss_parts(
    maps: Sequence[jax.Array], targets: Mapping[str, jax.Array], **settings: Any
) -> dict[str, jax.Array]:
    """Return the parts of the loss of each image, without their gains: [B] each."""
    predictions = arrange(maps)
    boxes = boxes_of(predictions)
    scores = jax.nn.sigmoid(predictions.classes)
    fixed = lax.stop_gradient((scores, boxes))
    which, weight = lax.stop_gradient(assign(*fixed, predictions.centers, targets, **settings))
    truth = jnp.take_along_axis(targets["boxes"], which[..., None], 1)
    classes = jnp.take_along_axis(targets["classes"], which, 1)

    wanted = jax.nn.one_hot(classes, scores.shape[-1]) * weight[..., None]
    logits = predictions.classes
    entropy = jnp.maximum(logits, 0) - logits * wanted + jnp.log1p(jnp.exp(-jnp.abs(logits)))

    sides = jnp.concatenate(
        [predictions.centers - truth[..., :2], truth[..., 2:] - predictions.centers], -1
    )
    bins = cross_entropy_of_bins(predictions.bins, sides / predictions.strides).mean(-1)
    total = jnp.maximum(weight.sum(), 1) / len(weight)
    parts = {
        "box": (weight * (1 - complete_iou(boxes, truth))).sum(1) / total,
        "classes": entropy.sum((1, 2)) / total,
        "bins": (weight * bins).sum(1) / total,
    }
    if predictions.prototypes is not None:
        parts["mask"] = mask_loss(predictions, which, weight, truth, targets["masks"])
    return parts


def mask_loss(
    predictions: Predictions,
    which: jax.Array,
    weight: jax.Array,
    truth: jax.Array,
    masks: jax.Array,
    instances: int = 64,
) -> jax.Array:
    """Return the cross entropy of masks within their boxes, [B], of the anchors of most weight.

    A mask is a sum of prototypes with the coefficients of an anchor (YOLACT, arXiv:1904.02689).
    """
    assert predictions.coefficients is not None
    assert predictions.prototypes is not None
    weight, best = lax.top_k(weight, min(instances, weight.shape[1]))
    truth, coefficients = (
        jnp.take_along_axis(x, best[..., None], 1) for x in (truth, predictions.coefficients)
    )
    wanted = jnp.take_along_axis(
        masks, jnp.take_along_axis(which, best, 1)[..., None, None], 1
    ).astype(coefficients.dtype)
    logits = jnp.einsum("bik,bkhw->bihw", coefficients, predictions.prototypes)
    entropy = jnp.maximum(logits, 0) - logits * wanted + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    height, width = masks.shape[2:]
    step = predictions.strides[0] / 2  # pixels of the image in one of the prototypes: 4
    left, top, right, bottom = jnp.split(truth[..., None] / step, 4, 2)  # [B, I, 1, 1]
    rows, columns = np.arange(height)[:, None], np.arange(width)
    inside = (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
    area = jnp.maximum((right - left) * (bottom - top), 1)[..., 0, 0]
    values = (entropy * inside).sum((2, 3)) / area * (weight > 0)
    count = jnp.maximum((weight > 0).sum(), 1) / len(weight)  # in the batch, for one image
    return values.sum(1) / count


# ---- data ----------------------------------------------------------------------------------------

Object = tuple[int, np.ndarray]
"""A class, and corners [K, 2] in pixels: of a box two, of a polygon more."""


def letterbox(picture: Any, size: int) -> tuple[np.ndarray, float, tuple[int, int]]:
    """Fit a picture of Pillow into a grey square; return the pixels, the scale and the corner."""
    scale = size / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    square = np.full((size, size, 3), 114, np.uint8)
    left, top = (size - width) // 2, (size - height) // 2
    square[top : top + height, left : left + width] = picture.convert("RGB").resize((width, height))
    return square.transpose(2, 0, 1).astype(np.float32) / 255, scale, (left, top)


def read_coco(
    annotations: Any, folder: Any, size: int = 640
) -> tuple[np.ndarray, dict[str, np.ndarray], list[str]]:
    """Read a COCO file of boxes: images [N, 3, size, size], padded targets, names of classes.

    Crowds are left out. Ids of categories, which COCO numbers with gaps, become 0, 1, ... in order.
    """
    text = json.loads(Path(annotations).read_text())
    categories = sorted(text["categories"], key=lambda category: category["id"])
    number = {category["id"]: i for i, category in enumerate(categories)}
    objects: dict[int, list[Object]] = {}
    for row in text["annotations"]:
        if not row.get("iscrowd"):
            left, top, width, height = row["bbox"]
            corners = np.array([[left, top], [left + width, top + height]])
            objects.setdefault(row["image_id"], []).append((number[row["category_id"]], corners))
    images = [(Path(folder, x["file_name"]), objects.get(x["id"], [])) for x in text["images"]]
    return *_collect(images, size, False), [category["name"] for category in categories]


def read_yolo(
    images: Any, labels: Any, size: int = 640, masks: bool = False
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Read a folder of images and one of .txt files with lines `class x y width height`.

    The numbers are shares of width and height, x and y the center. An image without a file has no
    objects. Lines of segmenters have a polygon, `class x1 y1 x2 y2 x3 y3 ...`, of which the box is
    read, and with `masks` what it encloses, for prototypes of a quarter of the size.
    """
    from PIL import Image

    pairs = []
    for path in sorted(Path(images).iterdir()):
        file, objects = Path(labels, f"{path.stem}.txt"), []
        with Image.open(path) as picture:
            scale = np.array(picture.size)
        for line in file.read_text().splitlines() if file.exists() else ():
            kind, *numbers = line.split() or [""]
            corners = np.array(numbers, float).reshape(-1, 2)
            if len(corners) == 2:  # center and size
                corners = corners[0] + np.array([[-0.5, -0.5], [0.5, 0.5]]) * corners[1]
            if kind:
                objects.append((int(kind), corners * scale))
        pairs.append((path, objects))
    return _collect(pairs, size, masks)


def _collect(
    images: Iterable[tuple[Path, list[Object]]], size: int, with_masks: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return pixels, and the objects in them, padded to the greatest number."""
    from PIL import Image, ImageDraw

    pixels, boxes, classes, masks = [], [], [], []
    for path, objects in images:
        with Image.open(path) as picture:
            square, scale, corner = letterbox(picture, size)
        pixels.append(square)
        placed = [corners * scale + corner for _, corners in objects]
        boxes.append([np.concatenate([x.min(0), x.max(0)]) for x in placed])
        classes.append([kind for kind, _ in objects])
        drawn = []
        for corners in placed if with_masks else ():
            mask = Image.new("1", (size // 4, size // 4))
            shape = (
                ImageDraw.Draw(mask).polygon if len(corners) > 2 else ImageDraw.Draw(mask).rectangle
            )
            shape([*(corners / 4).ravel()], fill=1)
            drawn.append(np.array(mask))
        masks.append(drawn)
    targets = pad(boxes, classes)
    if with_masks:
        places = (*targets["classes"].shape, size // 4, size // 4)
        targets["masks"] = np.zeros(places, bool)
        for all_, drawn in zip(targets["masks"], masks, strict=True):
            all_[: len(drawn)] = np.reshape(drawn, (-1, *places[2:]))
    return np.stack(pixels), targets


def pad(boxes: Sequence[Any], classes: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return the targets of `loss` for lists of boxes and classes, one list for each image."""
    most = max(1, *map(len, classes))
    targets = {
        "boxes": np.zeros((len(boxes), most, 4), np.float32),
        "classes": np.full((len(boxes), most), -1, np.int32),
    }
    for i, (places, kinds) in enumerate(zip(boxes, classes, strict=True)):
        targets["boxes"][i, : len(kinds)] = np.reshape(places, (-1, 4))
        targets["classes"][i, : len(kinds)] = kinds
    return targets


# ---- detections ----------------------------------------------------------------------------------


def suppress(
    output: np.ndarray, score: float = 0.25, overlap: float = 0.45
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return boxes, classes and scores of each image of `output0`, without those that repeat."""
    results = []
    for anchors in np.swapaxes(output, 1, 2):
        x, y, width, height = anchors[:, :4].T
        boxes = np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], 1)
        classes, scores = anchors[:, 4:].argmax(1), anchors[:, 4:].max(1)
        rest = [i for i in np.argsort(-scores) if scores[i] >= score]
        left = []
        while rest:
            best, *others = rest
            left.append(best)
            others = np.array(others, int)
            low = np.maximum(boxes[best, :2], boxes[others, :2])
            high = np.minimum(boxes[best, 2:], boxes[others, 2:])
            shared = np.maximum(high - low, 0).prod(1)
            areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
            iou = shared / (areas[best] + areas[others] - shared + 1e-7)
            rest = list(others[(iou < overlap) | (classes[others] != classes[best])])
        results.append((boxes[left], classes[left], scores[left]))
    return results
