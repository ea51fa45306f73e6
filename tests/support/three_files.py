"""Run the three files of a vision-language model in onnxruntime, as its runtimes do."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from tests.support.paths import DATA

FOLDERS = {"llava": DATA / "vision" / "llava-genai", "internvl": DATA / "vision" / "internvl-js"}
IMAGE_TOKEN, HEAD_SIZE = 3, 16


def read_oracle(family):
    """Return tokens, pixels (as the joined model takes them), loss and logits of transformers."""
    with np.load(DATA / "vision" / f"{family}.npz") as stored:
        oracle = dict(stored)
    pixels = oracle["pixel_values"]
    return oracle | {"pixels": pixels[None] if family == "internvl" else pixels}


def run_folder(folder, ids, pixels):
    """Return the logits of a row, without a past, by the files of a folder."""
    folder = Path(folder)
    if (folder / "genai_config.json").exists():
        model = json.loads((folder / "genai_config.json").read_text())["model"]
        names = [model[part]["filename"] for part in ("vision", "embedding", "decoder")]
    else:
        stems = "vision_encoder", "embed_tokens", "decoder_model_merged"
        names = [f"onnx/{stem}.onnx" for stem in stems]
    vision, embedding, decoder = (onnxruntime.InferenceSession(folder / name) for name in names)
    (features,) = vision.run(None, {"pixel_values": pixels.reshape(-1, *pixels.shape[-3:])})
    features = features.reshape(-1, features.shape[-1])
    if len(embedding.get_inputs()) > 1:
        (embeds,) = embedding.run(None, {"input_ids": ids, "image_features": features})
    else:
        (embeds,) = embedding.run(None, {"input_ids": ids})
        embeds[ids == IMAGE_TOKEN] = features
    feeds = {"inputs_embeds": embeds, "attention_mask": np.ones_like(ids)}
    positions = np.arange(ids.shape[1])[None]
    for value in decoder.get_inputs():
        if value.name.startswith("past"):
            feeds[value.name] = np.zeros((1, value.shape[1], 0, HEAD_SIZE), np.float32)
        elif value.name == "position_ids":
            feeds[value.name] = positions
    return decoder.run(["logits"], feeds)[0]


def flatten_features(path):
    """Let a vision encoder give [features, size], as onnxruntime-genai passes them on."""
    vision = onnx.load(path)
    (output,) = vision.graph.output
    vision.graph.node[-1].output[0] = "rows"
    vision.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 32]), "line"))
    vision.graph.node.append(onnx.helper.make_node("Reshape", ["rows", "line"], [output.name]))
    output.CopyFrom(onnx.helper.make_tensor_value_info(output.name, 1, ["features", 32]))
    onnx.save(vision, path)
