"""`jaxonnx demo`: a network from an ONNX file, trained dense and sparse, back to ONNX files."""

import time
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import optax
from rich.console import Console
from rich.table import Table

from jaxonnx import sparse
from jaxonnx._files import check_writable, write_atomically
from jaxonnx.errors import Error
from jaxonnx.model import Model, load
from jaxonnx.training import History, shade, train

EPOCHS = 24
BATCH = 32
_PACKAGES = ("matplotlib", "onnxruntime", "sklearn")
_DYNAMIC = 2
"""The phase in which masks change."""


@dataclass(frozen=True)
class Row:
    """A row of the table: one network. Accuracies are of the test images."""

    name: str
    path: Path
    jaxonnx: float
    onnxruntime: float
    verified: int
    """Weights proved to be 2:4 along both axes, in every product of both passes."""
    weights: dict[str, np.ndarray]
    """The weights that can be 2:4."""
    bytes_dense: int
    bytes_packed: int
    """With these weights as two values and two 2-bit places for every four."""
    history: History


def model() -> Model:
    """Load a small untrained CNN for 8x8 digits, as PyTorch's exporter wrote it."""
    return load((files("jaxonnx") / "assets" / "digits_cnn.onnx").read_bytes())


def mlp(hidden: int = 32) -> Model:
    """Make an untrained network for 8x8 digits with two layers, `body` and `head`."""
    proto = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        digits (float[n, 1, 8, 8] x) => (float[n, 10] logits) {
            [flat] pixels = Flatten(x)
            [body] features = Gemm(pixels, body_weight, body_bias)
            [relu] rectified = Relu(features)
            [head] logits = Gemm(rectified, head_weight, head_bias)
        }""")
    random = np.random.default_rng(0)
    for name, *shape in (("body", 64, hidden), ("head", hidden, 10)):
        weight = random.normal(size=shape, scale=shape[0] ** -0.5)
        for part, value in (("weight", weight), ("bias", np.zeros(shape[1]))):
            tensor = onnx.numpy_helper.from_array(value.astype(np.float32), f"{name}_{part}")
            proto.graph.initializer.append(tensor)
    return load(proto)


def digits(seed: int = 0) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Load scikit-learn's 1797 digits as (images, labels): three quarters to train, one to test."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise Error("the digits need scikit-learn: pip install 'jaxonnx[demo]'") from error

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    split: Any = train_test_split(
        images, labels, test_size=0.25, random_state=seed, stratify=labels
    )
    x, x_test, y, y_test = split
    return (x, y), (x_test, y_test)


def run(
    folder: str | Path = ".",
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
    progress: bool | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Train dense, then three-phase sparse; write dense.onnx, sparse.onnx and report.png.

    Raises:
      Error: a package of the extra `demo` is missing.
      OSError: the folder cannot be written.
    """
    console = console or Console()
    folder = Path(folder)
    paths = {name: folder / f"{name}.onnx" for name in ("dense", "sparse")}
    # raise now the errors that would otherwise come after the training
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise Error(f"the demo needs {', '.join(missing)}: pip install 'jaxonnx[demo]'")
    folder.mkdir(parents=True, exist_ok=True)
    check_writable(folder / "dense.onnx")
    begin = time.perf_counter()
    data, test = digits(seed)
    start = model()
    console.print(start)
    rows = []
    for name, path in paths.items():
        console.print(f"[bold]{name}[/]: {epochs} epochs of {len(data[0])} images")
        steps = epochs * -(-len(data[0]) // BATCH)
        result = train(
            start,
            data,
            loss="softmax_cross_entropy_with_integer_labels",
            optimizer=optax.adamw(optax.cosine_decay_schedule(3e-3, steps)),
            epochs=epochs,
            batch_size=BATCH,
            seed=seed,
            validation=test,
            sparsity="2:4" if name == "sparse" else None,
            progress=progress,
        )
        result.model.save(path)
        rows.append(_row(name, path, result.model, result.history, test))
    _report(folder / "report.png", rows)
    table = Table(title="digits, 8x8: accuracy on the test images")
    table.add_column("network")
    for column in ("jaxonnx", "onnxruntime", "2:4 on both axes", "bytes", "packed"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.jaxonnx:.2%}",
            f"{row.onnxruntime:.2%}",
            f"{row.verified} of {len(row.weights)} weights" if row.verified else "-",
            f"{row.bytes_dense:,}",
            f"{row.bytes_packed:,}" if row.verified else "-",
        )
    console.print(table)
    seconds = time.perf_counter() - begin
    console.print(f"wrote dense.onnx, sparse.onnx and report.png to {folder} in {seconds:.0f} s")
    return rows


def _row(name: str, path: Path, trained: Model, history: History, test: Any) -> Row:
    import onnxruntime

    images, labels = test
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    logits: Any = session.run(None, {"x": images})[0]
    layers = [
        layer for layer in sparse.layers(trained.params, **trained.sparsity_options()) if layer.axes
    ]
    weights = {layer.name: np.asarray(trained.params[layer.name]) for layer in layers}
    dense = packed = sum(value.nbytes for value in trained.params.values())
    if name == "sparse":
        sparse.verify(trained.apply, trained.params, images[:4], layers=layers)
        packed += sum(sparse.pack(w).nbytes - w.nbytes for w in weights.values())
    return Row(
        name=name,
        path=path,
        jaxonnx=float(np.mean(np.argmax(trained(images), 1) == labels)),
        onnxruntime=float(np.mean(np.argmax(logits, 1) == labels)),
        verified=len(layers) if name == "sparse" else 0,
        weights=weights,
        bytes_dense=dense,
        bytes_packed=packed,
        history=history,
    )


def _report(path: Path, rows: list[Row]) -> None:
    """Draw curves of both runs, the sparse one's flip rate and the mask of its largest layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    (loss, accuracy), (flips, mask) = figure.subplots(2, 2)
    for row in rows:
        epochs = row.history.epochs
        number = range(1, len(epochs) + 1)
        loss.plot(number, [e["loss"] for e in epochs], label=row.name)
        error = [100 * (1 - e["validation_accuracy"]) for e in epochs]
        accuracy.plot(number, error, label=row.name)
    last = rows[-1]
    phases = last.history.phases
    # a mask that is fixed keeps the rate of its last change
    rates = [
        100 * e["flip_rate"] if phase == _DYNAMIC else 0.0
        for e, phase in zip(last.history.epochs, phases, strict=True)
    ]
    number = range(1, len(rates) + 1)
    flips.bar(number, rates, color="C1")
    for axes, title in (
        (loss, "training loss"),
        (accuracy, "test images that are wrong, %"),
        (flips, "mask bits that changed, %"),
    ):
        shade(axes, [0.5, *(n + 0.5 for n in number)], phases)
        axes.set(xlabel="epoch", ylabel=title)
    loss.set_yscale("log")
    loss.legend(loc="lower left")
    name, weight = max(last.weights.items(), key=lambda item: item[1].size)
    shown = weight if weight.ndim == 2 else weight[..., 0, 0]
    mask.imshow(shown != 0, cmap="Greys", interpolation="nearest")
    mask.set(title=f"kept weights of {name}", xlabel="input channel", ylabel="output channel")
    with write_atomically(path) as written:
        figure.savefig(written, dpi=110)
