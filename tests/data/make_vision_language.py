"""Write tests/data/vision: two tiny vision-language models in three files, with random weights.

    python -m tests.data.make_vision_language    # transformers 5, torch, onnxruntime-genai 0.18

LLaVA (CLIP, an MLP as projector) in the layout of onnxruntime-genai, InternVL (tiles of an image)
in that of transformers.js. PyTorch's exporter writes the vision encoder and the embedding,
onnxruntime-genai's builder the decoder. `llava.npz` and `internvl.npz` have what transformers makes
of a chat with an image: pixels, tokens, the loss. `processors.json` has what its image processors
make of pictures of several sizes.
"""

import contextlib
import io
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import numpy as np

FOLDER = Path(__file__).with_name("vision")
VOCABULARY = 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<img>", "</img>")
TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}<image>
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
IMAGE_TOKEN = SPECIAL.index("<image>")
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
PIXELS = {"image_mean": [0.5, 0.45, 0.4], "image_std": [0.25, 0.26, 0.27]}
PROCESSORS = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 18},
        "crop_size": {"height": 16, "width": 16},
        **PIXELS,
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 16, "width": 16},
        "crop_to_patches": True,
        "max_patches": 4,
        **PIXELS,
    },
}
CHAT = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "a list of objects"}]},
]


SIDES = {"height": 24, "width": 20}
SIZES = (33, 50), (64, 17), (40, 40), (9, 200), (300, 301), (48, 32)
"""The heights and widths of pictures that image processors read."""
SMALL_TILES = {"crop_to_patches": True, "size": {"height": 16, "width": 16}}
IMAGE_PROCESSORS = (
    ("CLIP", {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}),
    ("CLIP", {"size": {"shortest_edge": 30}, "crop_size": SIDES}),
    ("CLIP", {"size": {"shortest_edge": 16}, "crop_size": SIDES}),  # pads
    ("Siglip", {"size": SIDES}),
    ("Siglip", {"size": SIDES, "resample": 2, "do_rescale": False}),
    ("GotOcr2", {"size": SIDES, "do_normalize": False}),
    ("GotOcr2", {**SMALL_TILES, "max_patches": 12}),
    ("GotOcr2", {**SMALL_TILES, "min_patches": 2, "max_patches": 6}),
)


def run_image_processor(kind, settings, height, width):
    """Return the pixels that transformers makes of a picture, without torchvision."""
    from PIL import Image
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    kinds = CLIPImageProcessorPil, SiglipImageProcessorPil, GotOcr2ImageProcessorPil
    processor = next(k for k in kinds if k.__name__.startswith(kind))(**settings)
    picture = Image.fromarray(make_picture(height, width))
    return processor([picture], return_tensors="np")["pixel_values"]


def describe(pixels):
    """Return numbers that pixels are recognized by: tiles, and means along two axes of each."""
    rows = pixels.mean((1, 3)).reshape(len(pixels), -1)
    return [len(pixels), *(rows @ np.cos(np.arange(rows.shape[1])) / rows.shape[1]).tolist()]


def make_picture(height=20, width=36):
    """Return pixels that are the same on each machine, uint8[height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x * y) % 256], -1).astype(np.uint8)


def make_network(family):
    """Return a network of transformers with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    tied = {"tie_word_embeddings": family == "internvl"}
    if family == "llava":
        config = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**TEXT, **tied),
            vision_config=transformers.CLIPVisionConfig(
                **VISION, image_size=16, patch_size=8, projection_dim=16
            ),
            image_token_index=IMAGE_TOKEN,
            **tied,
        )
    else:
        config = transformers.InternVLConfig(
            text_config=transformers.Qwen2Config(**TEXT, **tied),
            vision_config=transformers.InternVLVisionConfig(
                **{**VISION, "num_hidden_layers": 1}, image_size=[16, 16], patch_size=[4, 4]
            ),
            image_token_id=IMAGE_TOKEN,
            image_seq_length=4,
            **tied,
        )
    network = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in network.parameters():
            scale = 0.1 if p.ndim == 1 or p.shape[0] == VOCABULARY else p.shape[-1] ** -0.5
            p.copy_(torch.randn_like(p) * scale + (p.ndim == 1))
    return network.eval()


def make_tokenizer():
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator([text for text in topics.values() if text.isascii()], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        extra_special_tokens={
            "image_token": "<image>",
            "context_image_token": "<image>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<|endoftext|>",
        },
    )


def process(family, tokenizer, picture, text):
    """Return pixels and tokens as the processors of transformers make them of PIL's images."""
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    settings = {k: v for k, v in PROCESSORS[family].items() if k != "image_processor_type"}
    if family == "llava":
        processor = transformers.LlavaProcessor(
            CLIPImageProcessorPil(**settings),
            tokenizer,
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
        return processor(images=[picture], text=[text], return_tensors="pt")
    # a whole InternVLProcessor has one for videos, which needs torchvision
    tiles = GotOcr2ImageProcessorPil(**settings)([picture], return_tensors="pt")
    marks = SimpleNamespace(
        image_token="<image>",
        image_seq_length=4,
        start_image_token="<img>",
        end_image_token="</img>",
    )
    expanded = transformers.InternVLProcessor.replace_image_token(marks, tiles, 0)
    text = text.replace("<image>", expanded)
    return {**tokenizer([text], return_tensors="pt"), "pixel_values": tiles["pixel_values"]}


def export(module, inputs, path, axes, output, **settings):
    """Run PyTorch's exporter; of its two, the older one writes what runtimes' folders have."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            path,
            input_names=[*inputs],
            output_names=[output],
            dynamic_axes=axes,
            dynamo=False,
            **{"opset_version": 18, **settings},
        )


def write_parts(network, vision, embedding, merges):
    """Write the vision encoder and the embedding; `merges` says whether it places the features."""
    import torch

    class Features(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network.model

        def forward(self, pixel_values):
            if network.config.model_type == "internvl":
                return self.network.get_image_features(pixel_values).pooler_output
            # LLaVA's get_image_features splits its results by the number of images
            states = self.network.vision_tower(pixel_values, output_hidden_states=True)
            return self.network.multi_modal_projector(states.hidden_states[-2][:, 1:])

    class Embedding(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = network.get_input_embeddings()

        def forward(self, input_ids, image_features=None):
            embeds = self.embed_tokens(input_ids)
            if image_features is None:
                return embeds
            places = (input_ids == IMAGE_TOKEN).unsqueeze(-1).expand_as(embeds)
            return embeds.masked_scatter(places, image_features)

    pixels = torch.randn(2, 3, 16, 16)
    features = Features()(pixels)
    ids = torch.tensor([[5, 6, *[IMAGE_TOKEN] * (features.shape[0] * features.shape[1]), 7]])
    batch = {"pixel_values": {0: "batch_size"}}
    export(Features(), {"pixel_values": pixels}, vision, batch, "image_features")
    axes = {"input_ids": {0: "batch_size", 1: "sequence_length"}}
    inputs = {"input_ids": ids}
    if merges:
        inputs["image_features"] = features.flatten(0, 1)
        axes["image_features"] = {0: "num_image_tokens"}
    export(Embedding(), inputs, embedding, axes, "inputs_embeds")


def write_decoder(network, folder, precision="fp32"):
    """Run onnxruntime-genai's builder on the language model, without its embedding."""
    import onnxruntime_genai
    import transformers

    sys.path.insert(0, str(Path(onnxruntime_genai.__file__).parent / "models"))
    import builder

    config = network.config.text_config
    text = transformers.AutoModelForCausalLM.from_config(config)
    text.model.load_state_dict(network.model.language_model.state_dict())
    text.lm_head.load_state_dict(network.lm_head.state_dict())
    with tempfile.TemporaryDirectory() as source, contextlib.redirect_stdout(io.StringIO()):
        text.save_pretrained(source)
        make_tokenizer().save_pretrained(source)
        arguments = None, source, str(folder), precision, "cpu", source
        options = builder.parse_extra_options(*arguments, ["exclude_embeds=true"])
        builder.create_model(*arguments, **options)


def write_folder(family, layout, folder, precision="fp32"):
    """Write a folder, and return the network of transformers that it is."""
    network, tokenizer = make_network(family), make_tokenizer()
    folder = Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    write_decoder(network, folder, precision)
    if layout == "genai":
        write_parts(network, folder / "vision.onnx", folder / "embedding.onnx", merges=True)
        settings = json.loads((folder / "genai_config.json").read_text())
        model = settings["model"]
        model["vision"] = {
            "filename": "vision.onnx",
            "inputs": {"pixel_values": "pixel_values"},
            "outputs": {"image_features": "image_features"},
        }
        model["embedding"] = {
            "filename": "embedding.onnx",
            "inputs": {"input_ids": "input_ids", "image_features": "image_features"},
            "outputs": {"inputs_embeds": "inputs_embeds"},
        }
        model["image_token_id"] = IMAGE_TOKEN
        (folder / "genai_config.json").write_text(json.dumps(settings))
    else:
        (folder / "genai_config.json").unlink()
        network.config.save_pretrained(folder)
        decoder = folder / "onnx" / "decoder_model_merged.onnx"
        decoder.parent.mkdir()
        (folder / "model.onnx").rename(decoder)
        (folder / "model.onnx.data").rename(decoder.with_name("model.onnx.data"))
        names = "vision_encoder.onnx", "embed_tokens.onnx"
        write_parts(network, *(decoder.with_name(n) for n in names), merges=False)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    text = (folder / "tokenizer.json").read_text("utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(text)), "utf-8")
    return network


def run_transformers(family, network, picture, messages=CHAT):
    """Return what transformers makes of a chat with an image, and its loss without image tokens."""
    import torch

    tokenizer = make_tokenizer()
    text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
    batch = process(family, tokenizer, picture, text)
    ids = batch["input_ids"]
    labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
    pixels = batch["pixel_values"].float()
    with torch.no_grad():
        outputs = network(input_ids=ids, pixel_values=pixels, labels=labels)
    return {
        "input_ids": ids.numpy(),
        "pixel_values": pixels.numpy(),
        "logits": outputs.logits.numpy()[:, -1],
        "loss": outputs.loss.numpy(),
    }


def main():
    from PIL import Image

    told = [
        [describe(run_image_processor(*case, *size)) for size in SIZES] for case in IMAGE_PROCESSORS
    ]
    (FOLDER / "processors.json").write_text(json.dumps(told) + "\n")

    for family, layout in (("llava", "genai"), ("internvl", "js")):
        target = FOLDER / f"{family}-{layout}"
        network = write_folder(family, layout, target)
        picture = Image.fromarray(make_picture())
        np.savez_compressed(FOLDER / f"{family}.npz", **run_transformers(family, network, picture))
        print(*sorted((str(p), p.stat().st_size) for p in target.rglob("*")), sep="\n")


if __name__ == "__main__":
    main()
