"""Write tests/docs/models: small networks of the page on models, as exporters write them.

    python -m tests.docs.make_models [name ...]    # torch, timm, transformers 4.57, optimum-onnx

Random weights. The other networks of the page are in tests/data, or made by the tests.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import onnx
import torch
import transformers as t
from optimum.exporters.onnx import main_export

FOLDER = Path(__file__).with_name("models")
IMAGE = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TEXT = SIZES | {"vocab_size": 48, "max_position_embeddings": 16}


def randomize(model):
    """Give a network weights of a size at which each layer matters, and statistics."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if not p.is_floating_point():
                continue
            if name.endswith("running_var"):
                p.uniform_(0.5, 1.5)
            elif p.ndim > 1:
                p.copy_(torch.randn_like(p) * (2 / p[0].numel()) ** 0.5)
            else:
                p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def strip(path):
    """Leave out what nothing reads: traces of the exporting program, and shapes."""
    proto = onnx.load(path)
    del proto.graph.value_info[:]
    for part in [*proto.graph.node, *proto.graph.input, *proto.graph.output]:
        part.ClearField("doc_string")
        del part.metadata_props[:]
    onnx.save(proto, path)


def image(name, network, **settings):
    """Write a classifier of images."""
    FOLDER.mkdir(exist_ok=True)
    names = {"input_names": ["images"], "output_names": ["logits"]}
    settings = {"dynamo": False, "opset_version": 17} | settings
    torch.onnx.export(randomize(network), (IMAGE,), FOLDER / f"{name}.onnx", **names, **settings)


def folder(name, model, task, **sizes):
    """Write a folder as optimum does."""
    with tempfile.TemporaryDirectory() as temporary:
        randomize(model).save_pretrained(Path(temporary, "torch"))
        settings = {"task": task, "do_validation": False, "library_name": "transformers"}
        target = Path(temporary, "onnx")
        main_export(str(Path(temporary, "torch")), target, **settings, **sizes)
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        (FOLDER / name).mkdir(parents=True)
        shutil.copy(target / "model.onnx", FOLDER / name)
        config = json.loads((target / "config.json").read_text())
        config.pop("_name_or_path", None)
        (FOLDER / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def mobilenetv3():
    from timm.models._efficientnet_builder import decode_arch_def
    from timm.models.mobilenetv3 import MobileNetV3

    blocks = [
        ["ds_r1_k3_s2_e1_c8_se0.25_nre"],
        ["ir_r1_k3_s2_e3_c8_nre"],
        ["ir_r2_k5_s1_e3_c8_se0.25"],
        ["cn_r1_k1_s1_c24"],
    ]
    network = MobileNetV3(
        decode_arch_def(blocks),
        num_classes=5,
        stem_size=8,
        num_features=32,
        act_layer=torch.nn.Hardswish,
    )
    image("mobilenetv3", network)


def resnet50():
    from timm.models.resnet import Bottleneck, ResNet

    network = ResNet(
        Bottleneck,
        (1, 1, 1, 1),
        num_classes=5,
        stem_width=4,
        channels=(4, 4, 4, 4),
    )
    image(
        "resnet50",
        network,
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        dynamic_axes={"images": {0: "batch"}, "logits": {0: "batch"}},
    )


def efficientnet():
    from timm.models._efficientnet_builder import decode_arch_def
    from timm.models.efficientnet import EfficientNet

    blocks = [
        ["ds_r1_k3_s1_e1_c8_se0.25"],
        ["ir_r2_k3_s2_e3_c8_se0.25"],
        ["ir_r1_k5_s2_e3_c12_se0.25"],
    ]
    network = EfficientNet(
        decode_arch_def(blocks),
        num_classes=5,
        stem_size=8,
        num_features=32,
        act_layer=torch.nn.SiLU,
    )
    program = torch.onnx.export(
        randomize(network),
        (IMAGE.repeat(2, 1, 1, 1),),
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: "batch"},),
        dynamo=True,
        verbose=False,
    )
    onnx.save(program.model_proto, FOLDER / "efficientnet.onnx")


def dinov2():
    config = t.Dinov2Config(**SIZES, image_size=32, patch_size=8, mlp_ratio=2)
    model = randomize(t.Dinov2Model(config))
    FOLDER.mkdir(exist_ok=True)
    torch.onnx.export(
        model,
        (IMAGE,),
        FOLDER / "dinov2.onnx",
        input_names=["pixel_values"],
        output_names=["last_hidden_state", "pooler_output"],
        dynamic_axes={"pixel_values": {0: "batch"}},
        dynamo=False,
        opset_version=17,
    )


def siglip():
    text, vision = (
        sizes | {"hidden_size": 8, "intermediate_size": 8}
        for sizes in (TEXT, SIZES | {"image_size": 16, "patch_size": 8})
    )
    model = t.SiglipModel(t.SiglipConfig(text_config=text, vision_config=vision))
    folder("siglip", model, "zero-shot-image-classification")


def wav2vec2():
    config = t.Wav2Vec2Config(
        **SIZES,
        vocab_size=12,
        conv_dim=(8, 8),
        conv_kernel=(10, 4),
        conv_stride=(5, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    folder("wav2vec2", t.Wav2Vec2ForCTC(config), "automatic-speech-recognition")


def tagger():
    config = t.BertConfig(**TEXT, num_labels=5)
    folder("tagger", t.BertForTokenClassification(config), "token-classification")


def distilbert():
    config = t.DistilBertConfig(
        vocab_size=48,
        max_position_embeddings=16,
        dim=16,
        n_layers=1,
        n_heads=2,
        hidden_dim=24,
        num_labels=2,
    )
    folder("distilbert", t.DistilBertForSequenceClassification(config), "text-classification")


def qwen3_int4():
    """Write the stored Qwen3 with MatMulNBits, as the builder does for int4."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    source = FOLDER.parents[1] / "data" / "llm" / "qwen3-genai" / "model.onnx"
    quantizer = MatMulNBitsQuantizer(onnx.load(source), 4, 32, True)
    quantizer.process()
    onnx.save(quantizer.model.model, FOLDER / "qwen3-int4.onnx")


def main():
    makers = (
        mobilenetv3,
        resnet50,
        efficientnet,
        dinov2,
        siglip,
        wav2vec2,
        tagger,
        distilbert,
        qwen3_int4,
    )
    for write in makers:
        if write.__name__ in sys.argv[1:] or not sys.argv[1:]:
            write()
    for path in FOLDER.rglob("*.onnx"):
        strip(path)
    sizes = {str(p.relative_to(FOLDER)): p.stat().st_size for p in FOLDER.rglob("*.onnx")}
    print(*sorted(sizes.items()), sep="\n")


if __name__ == "__main__":
    main()
