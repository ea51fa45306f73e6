"""Writes small files of many exporters, for test_families.py and the page on compatibility.

    python tests/data/make_families.py [name ...]

Each function below writes `families/<its name>.onnx` and needs the packages that it imports; their
versions are in the files. The weights are random, or of a few steps on scikit-learn's data.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

FOLDER = Path(__file__).parent / "families"
MAKERS: dict[str, Callable[[Path], None]] = {}


def maker(function):
    MAKERS[function.__name__] = function
    return function


def torch_legacy(net, example, path, **settings):
    import torch

    torch.onnx.export(net, example, path, dynamo=False, **({"opset_version": 17} | settings))


def torch_dynamo(net, example, path):
    import torch

    program = torch.onnx.export(net, example, dynamo=True, verbose=False)
    model = program.model_proto
    for node in model.graph.node:  # the exporting machine's file names
        del node.metadata_props[:]
    onnx.save(model, path)


def recurrent():
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)
            self.gru = nn.GRU(12, 5, batch_first=True)
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.gru(self.lstm(x)[0])[0])

    return Recurrent()


def encoder():
    import torch
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(30, 16)
            self.position = nn.Parameter(torch.randn(1, 7, 16))
            self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
            layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(16, 4)

        def forward(self, tokens):
            x = self.embedding(tokens)
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.position
            return self.head(self.layers(x)[:, 0])

    return Encoder()


def unet():
    import torch
    from torch import nn

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
            self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
            self.up = nn.ConvTranspose2d(8, 8, 2, 2)
            self.out = nn.Conv2d(16, 2, 1)

        def forward(self, x):
            side = torch.relu(self.down(x))
            return self.out(torch.cat([side, self.up(self.middle(side))], 1))

    return UNet()


@maker
def torch_recurrent_not_folded(path):
    import torch

    example = (torch.randn(2, 5, 8),)
    torch_legacy(recurrent(), example, path, do_constant_folding=False)


@maker
def torch_encoder_not_folded(path):
    import torch

    example = (torch.arange(12).reshape(2, 6),)
    torch_legacy(encoder().eval(), example, path, do_constant_folding=False)


@maker
def torch_encoder_dynamo(path):
    import torch

    torch_dynamo(encoder().eval(), (torch.arange(12).reshape(2, 6),), path)


@maker
def torch_unet_training_mode(path):
    import torch

    training = torch.onnx.TrainingMode.TRAINING
    example = (torch.randn(2, 3, 8, 8),)
    torch_legacy(unet(), example, path, training=training, do_constant_folding=False)


@maker
def torch_unet_half(path):
    import torch

    torch_dynamo(unet().half().eval(), (torch.randn(1, 3, 8, 8).half(),), path)


SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
}


def transformers_file(model, path, export):
    import torch

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]

    mask = torch.ones(2, 6, dtype=torch.long)
    export(Network().eval(), (torch.arange(12).reshape(2, 6), mask), path)


@maker
def transformers_bert(path):
    import transformers as t

    config = t.BertConfig(**SIZES, num_labels=3)
    transformers_file(t.BertForSequenceClassification(config), path, torch_legacy)


@maker
def transformers_albert(path):
    import transformers as t

    config = t.AlbertConfig(**SIZES, embedding_size=8, num_labels=3)
    transformers_file(t.AlbertForSequenceClassification(config), path, torch_legacy)


@maker
def transformers_llama(path):
    import transformers as t

    config = t.LlamaConfig(**SIZES, num_key_value_heads=1, use_cache=False)
    transformers_file(t.LlamaForCausalLM(config), path, torch_dynamo)


@maker
def onnxruntime_optimized_bert(path):
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "bert.onnx")
        transformers_bert(plain)
        options = onnxruntime.SessionOptions()
        level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(plain, options, providers=["CPUExecutionProvider"])


@maker
def onnxruntime_dynamic_int8(path):
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "bert.onnx")
        transformers_bert(plain)
        quantize_dynamic(plain, path)


@maker
def onnxruntime_static_int8(path):
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self):
            random = np.random.default_rng(0)
            self.left = [random.normal(size=(1, 1, 28, 28)).astype(np.float32) for _ in range(4)]

        def get_next(self):
            return {"x": self.left.pop()} if self.left else None

    quantize_static(FOLDER.parent / "lenet.legacy.onnx", path, Reader())


def tf2onnx_file(model, path, *shape, dtype="float32"):
    import tensorflow as tf
    import tf2onnx

    signature = [tf.TensorSpec((None, *shape), dtype, name="x")]
    function = tf.function(lambda x: model(x, training=False), input_signature=signature)
    tf2onnx.convert.from_function(function, signature, opset=17, output_path=str(path))


@maker
def tf2onnx_cnn(path):
    from keras import Input, Sequential, layers

    net = Sequential(
        [
            Input((12, 12, 3)),
            layers.Conv2D(6, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.SeparableConv2D(8, 3, strides=2, padding="same"),
            layers.LayerNormalization(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, activation="softmax"),
        ]
    )
    tf2onnx_file(net, path, 12, 12, 3)


@maker
def tf2onnx_recurrent(path):
    from keras import Input, Sequential, layers

    recurrent = layers.Bidirectional(layers.LSTM(6, return_sequences=True))
    net = Sequential(
        [
            Input((9,), dtype="int32"),
            layers.Embedding(30, 8),
            recurrent,
            layers.GRU(5),
            layers.Dense(2),
        ]
    )
    tf2onnx_file(net, path, 9, dtype="int32")


@maker
def tf2onnx_attention(path):
    from keras import Input, Model, layers

    x = Input((6, 8))
    y = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(x, x) + x)
    y = layers.LayerNormalization()(layers.Dense(8, "relu")(y) + y)
    tf2onnx_file(Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(y))), path, 6, 8)


@maker
def tflite_int8(path):
    import tensorflow as tf
    import tf2onnx
    from keras import Input, Sequential, layers

    net = Sequential(
        [
            Input((12, 12, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    converter = tf.lite.TFLiteConverter.from_keras_model(net)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    random = np.random.default_rng(0)
    data = [[random.normal(size=(1, 12, 12, 1)).astype(np.float32)] for _ in range(4)]
    converter.representative_dataset = lambda: data
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "net.tflite")
        file.write_bytes(converter.convert())
        tf2onnx.convert.from_tflite(str(file), opset=17, output_path=str(path))


def iris():
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True)
    return x.astype(np.float32), y


def sklearn_file(model, path, **options):
    from skl2onnx import to_onnx

    x, y = iris()
    onnx.save(to_onnx(model.fit(x, y), x[:1], target_opset=18, options=options or None), path)


@maker
def sklearn_pipeline(path):
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    sklearn_file(make_pipeline(StandardScaler(), PCA(3), LogisticRegression()), path, zipmap=False)


@maker
def sklearn_forest(path):
    from sklearn.ensemble import RandomForestClassifier

    sklearn_file(RandomForestClassifier(4, max_depth=3, random_state=0), path)


@maker
def sklearn_svm(path):
    from sklearn.svm import SVC

    sklearn_file(SVC(), path)


@maker
def sklearn_neighbours(path):
    from sklearn.neighbors import KNeighborsRegressor

    sklearn_file(KNeighborsRegressor(3), path)


@maker
def lightgbm(path):
    from lightgbm import LGBMClassifier
    from onnxmltools import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    model = LGBMClassifier(n_estimators=4, verbose=-1).fit(*iris())
    types = [("x", FloatTensorType([None, 4]))]
    onnx.save(convert_lightgbm(model, initial_types=types), path)


@maker
def xgboost(path):
    from onnxmltools import convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType
    from xgboost import XGBClassifier

    model = XGBClassifier(n_estimators=4).fit(*iris())
    onnx.save(convert_xgboost(model, initial_types=[("x", FloatTensorType([None, 4]))]), path)


@maker
def catboost(path):
    from catboost import CatBoostClassifier

    model = CatBoostClassifier(iterations=4, verbose=0, allow_writing_files=False).fit(*iris())
    model.save_model(str(path), format="onnx")


@maker
def jax2onnx_mlp(path):
    import jax2onnx
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(6, 16, rngs=rngs)
            self.norm = nnx.LayerNorm(16, rngs=rngs)
            self.last = nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.gelu(self.norm(self.first(x))))

    onnx.save(jax2onnx.to_onnx(Network(nnx.Rngs(0)), [("B", 6)]), path)


@maker
def paddle_cnn(path):
    import paddle
    from paddle import nn

    net = nn.Sequential(
        nn.Conv2D(3, 6, 3, padding=1),
        nn.BatchNorm2D(6),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2D(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )
    net.eval()
    spec = [paddle.static.InputSpec([None, 3, 12, 12], "float32", "x")]
    paddle.onnx.export(net, str(path.with_suffix("")), input_spec=spec, opset_version=14)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MAKERS:
        try:
            import torch

            torch.manual_seed(0)
        except ImportError:
            pass
        MAKERS[name](FOLDER / f"{name}.onnx")


if __name__ == "__main__":
    main()
