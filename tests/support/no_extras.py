"""What works with nothing but jaxonnx and what it depends on, and what says that it needs more.

A program: `.ci/run` runs it in an environment that has none of the optional packages.
"""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx.parser
import optax

import jaxonnx
from jaxonnx import demo, flax, loggers
from jaxonnx._data.images import layout, read
from jaxonnx.cli import main

OPTIONAL = [
    "matplotlib", "PIL", "onnxruntime", "sklearn", "datasets", "grain", "safetensors",
    "tensorboardX", "torch",
]  # fmt: skip
PICTURE = """<ir_version: 10, opset_import: ["": 20]>
g (uint8[n] x) => (uint8[h,w,c] y) { y = ImageDecoder(x) }"""


def complaint(call) -> str:
    """Return the message of the error that `call` raises."""
    try:
        call()
    except jaxonnx.Error as error:
        return str(error)
    return "no error"


def check(folder: Path) -> None:
    present = [name for name in OPTIONAL if find_spec(name)]
    assert not present, f"this environment has {present}"
    model = demo.model()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 1, 8, 8)).astype(np.float32), np.arange(32) % 10
    settings = {
        "loss": "softmax_cross_entropy_with_integer_labels",
        "optimizer": optax.adam(1e-3),
        "batch_size": 16,
        "checkpoint_dir": folder / "checkpoints",
    }
    jaxonnx.train(model, (x, y), epochs=1, **settings)
    result = jaxonnx.train(model, (x, y), epochs=2, resume=True, **settings)
    assert len(result.history.losses) == 4
    result.model.save(folder / "trained.onnx")
    np.testing.assert_allclose(
        jaxonnx.load(folder / "trained.onnx")(x), result.model(x), rtol=1e-4, atol=1e-5
    )
    assert flax.Module(model)(x).shape == (32, 10)
    main(["info", str(folder / "trained.onnx")])

    assert "jaxonnx[plot]" in complaint(result.history.plot)
    assert "jaxonnx[tensorboard]" in complaint(lambda: loggers.tensorboard(folder / "log"))
    assert "jaxonnx[demo]" in complaint(lambda: demo.run(folder / "demo"))
    assert "jaxonnx[demo]" in complaint(demo.digits)
    weights = folder / "weights.safetensors"
    assert "jaxonnx[safetensors]" in complaint(lambda: model.save(weights))
    decoder = jaxonnx.load(onnx.parser.parse_model(PICTURE))
    assert "jaxonnx[image]" in complaint(lambda: decoder(np.zeros(9, np.uint8)))
    assert "jaxonnx[image]" in complaint(lambda: read(folder / "picture.png", layout(model)))
    (folder / "photos" / "a").mkdir(parents=True)
    (folder / "photos" / "a" / "1.png").write_bytes(b"")
    (folder / "photos" / "b").mkdir()
    (folder / "photos" / "b" / "2.png").write_bytes(b"")
    pictures = {"loss": settings["loss"], "optimizer": optax.sgd(0.1), "preprocess": {"scale": 1}}
    photos = folder / "photos"
    assert "jaxonnx[image]" in complaint(lambda: jaxonnx.train(model, photos, **pictures))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        check(Path(name))
    print(f"jaxonnx {jaxonnx.__version__} without extras: Python {sys.version.split()[0]}")
