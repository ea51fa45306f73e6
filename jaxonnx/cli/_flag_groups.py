"""Flags that several commands have: for pictures, texts, generation, and for all."""

from jaxonnx.cli._declarations import ADAPTERS, GENERATE
from jaxonnx.cli._flag_types import (
    COUNT,
    FILE,
    FOLDER,
    MANY,
    NUMBERS,
    PATH,
    POSITIVE,
    REAL,
    SIZE,
    SWITCH,
    Flag,
    dimension,
    read_flags,
)

READING = {
    "model file": [
        Flag("--any-batch", "accept any batch size, if the file was exported for one size", SWITCH),
        Flag("--dequantize", "convert integer weights to floating-point parameters", SWITCH),
    ]
}
PICTURES = {
    "images: the network gets (pixel * scale - mean) / std; the file may set the defaults": [
        Flag("--scale", "the factor for pixels from 0 to 255 (fallback: 1/255)", REAL),
        Flag(
            "--mean",
            "the mean: one number, or one per channel like 0.5,0.5,0.5 (fallback: 0)",
            NUMBERS,
        ),
        Flag("--std", "the standard deviation, in the same form (fallback: 1)", NUMBERS),
        Flag(
            "--labels",
            "the names of the classes: a file with one per line, or a list with commas (train: a "
            "new last layer, if the number differs)",
            {**FILE, "metavar": "FILE|A,B"},
        ),
        Flag("--size", "height and width of the images, for a network that accepts any size", SIZE),
        Flag("--order", "the order of the channels (fallback: RGB)", {"choices": ("RGB", "BGR")}),
        Flag("--crop", "the fraction of each side to keep, like 0.875 (fallback: 1)", REAL),
    ]
}
TEXTS = {
    "texts: tokens are those of the model's folder": [
        Flag("--max-length", "the maximum number of tokens of an example (default: 1024)", COUNT),
        Flag(
            "--long",
            "longer texts: cut, split into several examples, skip, or refuse (default: split plain "
            "texts, cut others)",
            {"choices": ("cut", "split", "skip", "refuse")},
        ),
        Flag(
            "--loss-on",
            "the tokens that the loss counts (default: completions)",
            {"choices": ("completions", "all")},
        ),
        Flag("--pack", "join short texts to rows of the maximum length", SWITCH),
    ]
}
GENERATION = {
    "generation: by default the search settings of the folder": [
        Flag(
            "--max-new-tokens",
            "the maximum number of tokens of an answer (default: 512)",
            {**POSITIVE, "default": 512},
        ),
        *read_flags(*GENERATE, ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")),
        Flag("--seed", "the random seed for sampling (default: 0)", {**COUNT, "default": 0}),
        Flag("--stop", "a text that ends an answer, beside the folder's tokens; repeatable", MANY),
        Flag(
            "--adapter",
            "LoRA adapters: .npz, .onnx_adapter, or the folder of PEFT or of checkpoints",
            {**PATH, "metavar": "PATH"},
        ),
    ]
}
COMMON = {
    "every command": [
        Flag("--json", "print the result as JSON; nothing else goes to stdout", SWITCH),
        Flag(
            "--config", "a TOML file with values for any of these flags; flags given here win", FILE
        ),
        Flag("--cache", "the folder for compiled programs (default: ~/.cache/jaxonnx)", FOLDER),
        Flag(
            "--allocator",
            "keep: freed memory is kept for the next step, which is faster on Linux; default: the "
            "allocator of the system",
            {"choices": ("keep", "default"), "default": "keep"},
        ),
    ]
}
DIM = Flag(
    "--dim",
    "the size of another open dimension, as NAME=N; repeatable",
    {**MANY, "type": dimension, "metavar": "NAME=N"},
)
_LORA_FLAGS = {"alpha": "lora-alpha", "dora": "dora", "dropout": "lora-dropout"}
DECODING = {
    "images: how folders are read": [
        Flag("--workers", "the number of threads that decode (default: one a processor)", COUNT),
        Flag("--memory", "the bytes of decoded images to keep (default: 1 GiB)", COUNT),
    ]
}
LORA = [
    Flag(
        "--lora-where",
        "the weights to adapt: attention, mlp or all-linear; or a module, node, tensor name or "
        "regular expression; repeatable",
        MANY,
    ),
    *read_flags(*ADAPTERS, _LORA_FLAGS, _LORA_FLAGS),
]
