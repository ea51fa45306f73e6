"""Guesses about what an exporter did for inference."""

import re

import onnx
import onnx.parser
import pytest

import jaxonnx
from jaxonnx import demo
from jaxonnx._graph import exporter_hints
from tests.support.paths import DATA


def graph(name):
    return onnx.load(DATA / f"{name}.onnx", load_external_data=False).graph


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18.dynamo", 20),
        ("mobilenet.dynamo", 17),
        ("lenet_bn.dynamo", 2),
        # BatchNormalization is there, or was never there
        ("resnet18.legacy", 0),
        ("lenet_bn.legacy", 0),
        ("lenet.dynamo", 0),
        ("lenet.legacy", 0),
        ("transformer.dynamo", 0),
    ],
)
def test_folded_batch_normalization(name, count):
    assert exporter_hints.find_folded_norms(graph(name))[0] == count


def convolutions(count, weight, bias):
    nodes = "".join(
        f"c{i} = Conv(h{i}, {weight.format(i)}, {bias.format(i)}) h{i + 1} = Relu(c{i}) "
        for i in range(count)
    )
    text = f"g (float[n,1,4,4] h0) => (float[n,1,4,4] h{count}) {{ {nodes} }}"
    return onnx.parser.parse_graph(text)


def test_folded_batch_normalization_by_names():
    found = convolutions(2, "w{}", "b{}")
    for node in found.node:
        if node.op_type == "Conv":
            node.input[1:] = [
                node.input[1].replace("w", "onnx::Conv_1"),
                node.input[2].replace("b", "onnx::Conv_2"),
            ]
    count, why = exporter_hints.find_folded_norms(found)
    assert count == 2
    assert "onnx::Conv_10" in why
    assert exporter_hints.find_folded_norms(convolutions(5, "w{}", "b{}"))[0] == 5
    assert (
        exporter_hints.find_folded_norms(convolutions(4, "w{}", "b{}"))[0] == 0
    )  # too few to tell
    vgg = convolutions(6, "w{}", "b{}")
    for node in vgg.node:
        if node.op_type == "Conv":
            node.input[1:] = [f"features.{node.input[1]}.weight", f"features.{node.input[1]}.bias"]
    assert exporter_hints.find_folded_norms(vgg)[0] == 0


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("mobilenet.legacy", ["/ReduceMean_output_0"]),  # classifier.0 is nowhere
        ("mobilenet.dynamo", ["mean"]),
        ("transformer.dynamo", ["gelu", "linear_3", "gelu_1", "linear_7"]),
        ("lenet.legacy", []),
        ("lenet.dynamo", []),
        ("resnet18.legacy", []),
        ("lstm.dynamo", []),
    ],
)
def test_dropout_that_was_left_out(name, places):
    assert exporter_hints.find_missing_dropout(graph(name)) == places


def test_the_summary_says_what_it_means():
    model = jaxonnx.load(DATA / "mobilenet.dynamo.onnx")
    folded, dropped = model.warnings
    assert "seems to be folded into 17 convolutions" in folded
    assert "learning rate" in folded
    assert "left out behind 'mean'" in dropped
    assert "dropout=" in dropped
    assert "seems" in str(model)
    assert model.with_dropout({"mean": 0.2}).to_onnx() == model.to_onnx()
    assert not demo.model().warnings


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("SoftmaxCrossEntropyLossInternalGrad", "training_model.onnx"),
        ("InPlaceAccumulatorV2", "training_model.onnx"),
        ("AdamWOptimizer", "optimizer_model.onnx"),
    ],
)
def test_artifacts_of_onnxruntime_training_are_recognised(operator, kind):
    """They name the file to start from, where a list of unknown operators said nothing."""
    proto = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 15, "com.microsoft": 1]>
        g (float[n, 2] x) => (float[n, 2] y) {{ y = com.microsoft.{operator}(x, x) }}""")
    words = rf"{operator}.*This is a {re.escape(kind)}, as onnxruntime-training.*inference file"
    with pytest.raises(jaxonnx.UnsupportedError, match=rf"(?s){words}"):
        jaxonnx.load(proto)


@pytest.mark.parametrize("name", ["gemma3_text", "llama", "lfm2"])
def test_an_omitted_output_is_not_a_missing_dropout(name):
    """onnxruntime-genai's builder omits outputs of SkipSimplifiedLayerNormalization."""
    file = onnx.load(DATA / "llm" / "builder" / f"{name}.onnx", load_external_data=False)
    assert any("" in node.output for node in file.graph.node)
    assert exporter_hints.find_missing_dropout(file.graph) == []
