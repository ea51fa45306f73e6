"""The table of the page on compatibility: which files the tests run, and what is trained in each.

    python -m tests.support.family_table

It is written between the markers of the page; `test_families.py` checks that it is up to date.
"""

import re
import warnings
from pathlib import Path

import onnx
from onnx import ModelProto

import jaxonnx
from tests.support.paths import DATA, ROOT

_OTHERS = ("families", "inputs", "llm", "ort", "rules", "text", "transformers", "vision")
"""Folders of files with several inputs, or other batches."""
OPEN = sorted(
    name
    for path in DATA.rglob("*.onnx")
    if not (name := path.relative_to(DATA).as_posix()).startswith(("unfolded", *_OTHERS))
)
"""Files of one input with an open batch (or a batch that `with_any_batch` opens), and no maps."""
PAGE = ROOT / "jaxonnx" / "docs" / "compatibility.md"
MARKERS = "<!-- families -->", "<!-- /families -->"
HEAD = "file", "what it is", "exporter, opsets", "trained", "frozen", "gradient against"
FINITE = "finite differences"
NETWORKS = {
    "digits": "PyTorch: convolutions, BatchNormalization in training mode",
    "lenet": "PyTorch: convolutions, pooling",
    "lenet_bn": "PyTorch: the same with BatchNormalization",
    "lstm": "PyTorch: recurrent layers",
    "mobilenet": "PyTorch: depthwise convolutions",
    "resnet18": "PyTorch: residual convolutions",
    "sklearn_mlp": "scikit-learn: a perceptron",
    "transformer": "PyTorch: attention",
    "external": "PyTorch: external data",
    "catboost": "CatBoost: trees",
    "jax2onnx_mlp": "Flax: linear layers, normalization",
    "lightgbm": "LightGBM: trees",
    "onnxruntime_dynamic_int8": "onnxruntime: a BERT quantized dynamically",
    "onnxruntime_optimized_bert": "onnxruntime: a BERT with fused operators",
    "onnxruntime_static_int8": "onnxruntime: QuantizeLinear and DequantizeLinear",
    "paddle_cnn": "PaddlePaddle: convolutions",
    "sklearn_forest": "scikit-learn: trees",
    "sklearn_neighbours": "scikit-learn: nearest neighbours",
    "sklearn_pipeline": "scikit-learn: scaling, PCA, logistic regression",
    "sklearn_svm": "scikit-learn: a support vector machine",
    "tf2onnx_attention": "Keras: attention",
    "tf2onnx_cnn": "Keras: convolutions, normalization, channels last",
    "tf2onnx_recurrent": "Keras: embedding, LSTM, GRU",
    "tflite_int8": "TensorFlow Lite: int8",
    "torch_encoder_dynamo": "PyTorch: attention, learned positions and class token",
    "torch_encoder_not_folded": "PyTorch: the same, constants not folded",
    "torch_recurrent_not_folded": "PyTorch: recurrent layers, constants not folded",
    "torch_unet_half": "PyTorch: a U-Net in float16",
    "torch_unet_training_mode": "PyTorch: a U-Net exported in training mode",
    "transformers_albert": "transformers: ALBERT, its layers share weights",
    "transformers_bert": "transformers: BERT",
    "transformers_llama": "transformers: Llama, rotary positions",
    "unfolded": "PyTorch: recurrent layers and attention, constants not folded",
    "untrained": "PyTorch: normalizations before any training, equal tensors shared",
    "xgboost": "XGBoost: trees",
}
"""The framework and the kind of network, by the first part of a file's name."""


def files() -> list[Path]:
    """Return the files of the table."""
    groups = (DATA.glob(f"{folder}*.onnx") for folder in ("", "external/", "families/"))
    return [path for group in groups for path in sorted(group)]


def load(path: Path) -> jaxonnx.Model:
    """Load a file, without the warning that labels are 64-bit outputs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "64-bit outputs")
        return jaxonnx.load(path)


def exporter(proto: ModelProto) -> str:
    """Return who wrote a file, and the opsets that its nodes use."""
    version = (proto.producer_version.split() or [""])[0].partition("+")[0]
    used = {node.domain for node in proto.graph.node}
    opsets = (f"{o.domain} {o.version}".strip() for o in proto.opset_import if o.domain in used)
    version = version if version[:1].isdigit() else ""
    return ", ".join([f"{proto.producer_name or 'unnamed'} {version}".strip(), *sorted(opsets)])


def numbers(tensors: dict) -> str:
    """Return how many numbers are in how many tensors."""
    count = sum(value.size for value in tensors.values())
    return f"{count:,} in {len(tensors)}" if tensors else "–"


def gradient(path: Path, model: jaxonnx.Model) -> str:
    """Return what the gradient of a file is compared with."""
    if not model.params:
        return "–"
    if "int8" in path.stem:
        return "nothing: its values are steps"
    if path.name == "digits.training.onnx":
        return "onnxruntime-training"
    golden = path.with_suffix(".npz").exists() or path.parent.name == "external"
    return "PyTorch" if golden else FINITE


def table() -> str:
    """Return the table in Markdown."""
    rows = [HEAD, ["---"] * len(HEAD)]
    for path in files():
        name = path.relative_to(DATA).with_suffix("").as_posix().removeprefix("families/")
        model, proto = load(path), onnx.load(path, load_external_data=False)
        network = NETWORKS[re.split(r"[./]", name)[0]]
        rows.append(
            [
                f"`{name}`",
                network,
                exporter(proto),
                numbers(model.params),
                numbers(model.state),
                gradient(path, model),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    start, end = MARKERS
    before, _, rest = PAGE.read_text().partition(start)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{start}\n{table()}\n{end}{after}")


if __name__ == "__main__":
    main()
