"""The verbs and their flags, as one table."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "rmsprop", "sgd")
LOSS = "softmax_cross_entropy_with_integer_labels"
RATE = 1e-3
PHASES = ("dense", "dynamic", "fixed")


class Flag(NamedTuple):
    names: str
    help: str
    settings: Mapping[str, Any] = {}
    """Other arguments of `argparse.ArgumentParser.add_argument`."""


class Verb(NamedTuple):
    what: str
    examples: str
    groups: Mapping[str, Sequence[Flag]]
    """Flags by the title of their group; "" is the parser itself."""


class Gather(argparse.Action):
    """An action that collects a repeated flag's values; they replace the configuration's."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [values] if before is self.default else [*before, values])


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def size(text: str) -> tuple[int, int]:
    height, width = map(int, text.split("x"))
    return height, width


def share(text: str) -> Path | float:
    """Parse a number as a share, anything else as a file."""
    try:
        return float(text)
    except ValueError:
        return Path(text)


def ratio(text: str) -> tuple[str, float]:
    """Parse NAME=X, or X alone."""
    name, _, number = text.rpartition("=")
    return name, float(number)


def counted(text: str) -> tuple[str, int]:
    """Parse OUTPUT=N, or N alone."""
    name, _, number = text.rpartition("=")
    return name, int(number)


def dimension(text: str) -> tuple[str, int]:
    name, number = text.rsplit("=", 1)
    return name, int(number)


_PATH: Mapping[str, Any] = {"type": Path}
_FILE: Mapping[str, Any] = {"type": Path, "metavar": "FILE"}
_FOLDER: Mapping[str, Any] = {"type": Path, "metavar": "FOLDER"}
_REAL: Mapping[str, Any] = {"type": float, "metavar": "X"}
_COUNT: Mapping[str, Any] = {"type": int, "metavar": "N"}
_NUMBERS: Mapping[str, Any] = {"type": numbers, "metavar": "X,..."}
_SIZE: Mapping[str, Any] = {"type": size, "metavar": "HxW"}
_SWITCH: Mapping[str, Any] = {"action": argparse.BooleanOptionalAction, "default": False}
_MANY: Mapping[str, Any] = {"action": Gather, "metavar": "NAME"}

_NEEDED: Mapping[str, Any] = {**_FILE, "required": True}

_MODEL = Flag("model", "an .onnx file, or a packed .npz", _PATH)
_SEED = Flag("--seed", "of the order of the examples and of random operators", _COUNT)
COMMON = {
    "every command": [
        Flag("--json", "print the result as JSON, and nothing else on stdout", _SWITCH),
        Flag("--config", "a TOML file with any of these by name; flags win", _FILE),
        Flag("--cache", "a folder to keep compiled programs in, for the next run", _FOLDER),
        Flag(
            "--allocator",
            "keep (what is freed is kept for the next step: faster on Linux) or default",
            {"choices": ("keep", "default"), "default": "keep"},
        ),
    ]
}
_READING = {
    "how the file is read": [
        Flag("--any-batch", "of a file that was exported for one batch size", _SWITCH),
        Flag("--dequantize", "integer weights become trainable ones of floating point", _SWITCH),
    ]
}
_PICTURES = {
    "pictures: (pixel * scale - mean) / std is what the network takes; a file may say this": [
        Flag("--scale", "1/255 if nothing says it", _REAL),
        Flag("--mean", "number, or one for each channel (0.5,0.5,0.5); or 0", _NUMBERS),
        Flag("--std", "the same; 1 if nothing says it", _NUMBERS),
        Flag(
            "--labels",
            "a file with the names of the classes, one a line; train: if the network has another "
            "number of outputs, with a new last layer",
            _FILE,
        ),
        Flag("--size", "of the pictures, where the network takes any", _SIZE),
        Flag("--order", "of the channels; RGB if nothing says it", {"choices": ("RGB", "BGR")}),
        Flag("--crop", "share of a picture's sides that is shown, as 0.875; or 1", _REAL),
    ]
}
_EXAMPLES = [
    _MODEL,
    Flag("examples", "like --data", {"type": Path, "nargs": "?", "metavar": "data"}),
    Flag(
        "--data",
        "a .npz with the inputs by name (or one as 'x') and the targets as 'y', or a folder of "
        "pictures with a folder for each class",
        _FILE,
    ),
]
_TRAINING = [
    *_EXAMPLES,
    Flag(
        "-o --output --out",
        "the .onnx to write, or a packed .npz",
        _NEEDED,
    ),
    Flag(
        "--validation",
        "a .npz or a folder like the data, or the share of the data that is held out",
        {"type": share, "metavar": "PATH|SHARE"},
    ),
    Flag("--loss", f"of optax; {LOSS}, or what the file's training_info has"),
    Flag(
        "--optimizer",
        f"{', '.join(OPTIMIZERS)}; adam, or what the file's training_info has",
        {"choices": OPTIMIZERS, "metavar": "NAME"},
    ),
    Flag("--rate", f"learning rate; {RATE}, with a new head a tenth of it for all else", _REAL),
    Flag("--epochs", "10, or the sum of the phases", _COUNT),
    Flag("--batch-size", "32, or what the network is fixed to", _COUNT),
    Flag(*_SEED[:2], {**_COUNT, "default": 0}),
    Flag(
        "--head",
        "a new last layer for N classes; OUTPUT=N for one of several, repeatable",
        {**_MANY, "type": counted, "metavar": "N"},
    ),
    Flag("--trainable", "name or regular expression of what is trained; repeatable", _MANY),
    Flag(
        "--statistics",
        "of BatchNormalization: of the batch, or frozen as they are in the file",
        {"choices": ("batch", "frozen")},
    ),
    Flag(
        "--dropout",
        "ratio of all Dropout nodes, or NAME=X behind a value or module; repeatable",
        {**_MANY, "type": ratio, "metavar": "X"},
    ),
    Flag(
        "--augment",
        "crop: random parts of pictures; flip: some mirrored; in training; repeatable",
        {**_MANY, "choices": ("crop", "flip")},
    ),
    Flag("--metrics", "accuracy, top_5, f1, r2...: of the validation data; repeatable", _MANY),
    Flag("--accumulate", "batches whose mean gradient makes an update", _COUNT),
    Flag(
        "--precision",
        "bf16: factors of products in bfloat16, weights in float32",
        {"choices": ("bf16",)},
    ),
    Flag("--remat", "keep few values for the gradient, compute the rest again", _SWITCH),
    Flag("--ema", "share that a moving average of the weights keeps of itself, as 0.999", _REAL),
    Flag(
        "--nan",
        "what a loss that is not finite does to the run",
        {"choices": ("stop", "skip", "rollback")},
    ),
]
_LORA = [
    Flag("--lora", "train adapters of this rank instead of the weights", _COUNT),
    Flag("--lora-where", "name or regular expression of what is adapted; repeatable", _MANY),
    Flag("--adapters", "a file for the adapters alone", _FILE),
]
_LONG = [
    Flag("--patience", "epochs without a better value of what is monitored, then stop", _COUNT),
    Flag(
        "--monitor", "a number of the epochs; validation_loss if there is one", {"metavar": "NAME"}
    ),
    Flag("--checkpoints", "a folder for checkpoints", {**_FOLDER, "dest": "checkpoint_dir"}),
    Flag("--checkpoint-every", "steps between checkpoints; otherwise one an epoch", _COUNT),
    Flag("--resume", "continue from the newest checkpoint, if there is one", _SWITCH),
    Flag("--log", ".csv, .jsonl, or a folder for TensorBoard; repeatable", {**_MANY, **_FILE}),
]

VERBS: Mapping[str, Verb] = {
    "info": Verb(
        "show inputs, outputs, operators and parameters of a model",
        "jaxonnx info net.onnx --layers\njaxonnx info net.onnx --json",
        {
            "": [_MODEL, Flag("--layers", "every layer: shape, parameters, notes", _SWITCH)],
            **_READING,
        },
    ),
    "run": Verb(
        "run a model on the arrays of a .npz file",
        "jaxonnx run net.onnx inputs.npz -o outputs.npz --batch-size 32",
        {
            "": [
                _MODEL,
                Flag("data", "a .npz with the inputs by name (or one as 'x')", _PATH),
                Flag("-o --output", "the .npz to write", _NEEDED),
                Flag("--outputs", "inner value, node or module to give instead; repeatable", _MANY),
                Flag("--batch-size", "run so many at a time; otherwise all at once", _COUNT),
            ],
            **_READING,
        },
    ),
    "train": Verb(
        "train a model and write it with the new weights",
        "jaxonnx train net.onnx data.npz -o trained.onnx --epochs 3\n"
        "jaxonnx train net.onnx data.npz -o new.onnx --head 10\n"
        "jaxonnx train --config run.toml --rate 3e-4",
        {"": _TRAINING, "adapters": _LORA, "long runs": _LONG, **_READING, **_PICTURES},
    ),
    "evaluate": Verb(
        "compute losses and metrics of a model over all of some data",
        "jaxonnx evaluate net.onnx data.npz --metrics accuracy --metrics confusion_matrix",
        {
            "": [
                *_EXAMPLES,
                Flag("--loss", f"of optax; {LOSS} if there are no --metrics"),
                Flag(
                    "--metrics",
                    "accuracy, top_5, f1, r2..., also roc_auc, average_precision, "
                    "confusion_matrix, per_class, roc_curve, precision_recall_curve; repeatable",
                    _MANY,
                ),
                Flag("--batch-size", "32, or what the network is fixed to", _COUNT),
                Flag("--plots", "an existing folder for pictures of tables and curves", _FOLDER),
            ],
            **_READING,
            **_PICTURES,
        },
    ),
    "sparsify": Verb(
        "train with transposable 2:4 weights",
        "jaxonnx sparsify net.onnx data.npz -o sparse.onnx --dense 2 --dynamic 6 --fixed 2",
        {
            "": _TRAINING,
            "long runs": _LONG,
            "sparsity": [
                Flag("--pattern", "N:M along both axes", {"default": "2:4"}),
                Flag("--select", "name or regular expression of what is sparse; repeatable", _MANY),
                *(Flag(f"--{phase}", "epochs of this phase", _COUNT) for phase in PHASES),
            ],
            **_READING,
            **_PICTURES,
        },
    ),
    "classify": Verb(
        "name what pictures show",
        "jaxonnx classify sparse.onnx picture.png --top 3",
        {
            "": [
                _MODEL,
                Flag("pictures", "files that Pillow reads", {"type": Path, "nargs": "+"}),
                Flag("--top", "classes to print", {**_COUNT, "default": 5}),
            ],
            **_PICTURES,
        },
    ),
    "demo": Verb(
        "train a small network for digits, dense and sparse, and write a report",
        "jaxonnx demo --output report",
        {
            "": [
                Flag("-o --output", "folder to write to", {**_FOLDER, "default": Path()}),
                Flag(*_SEED[:2], {**_COUNT, "default": 0}),
                Flag("--epochs", "of both trainings", {**_COUNT, "default": 24}),
            ]
        },
    ),
    "bench": Verb(
        "time a model's forward pass and training step, and onnxruntime's forward pass",
        "jaxonnx bench net.onnx --batch 32\n"
        "jaxonnx bench encoder.onnx --batch 8 --dim sequence=64 --no-train",
        {
            "": [
                _MODEL,
                Flag("--batch", "the first dimension of inputs that leave it open", _COUNT),
                Flag(
                    "--dim",
                    "NAME=N for any other dimension that is left open; repeatable",
                    {**_MANY, "type": dimension, "metavar": "NAME=N"},
                ),
                Flag("--data", "a .npz with inputs to use instead of random ones", _FILE),
                Flag("--train", "the training step too", {**_SWITCH, "default": True}),
                Flag("--rounds", "measurements to take the median of", {**_COUNT, "default": 11}),
            ],
            **_READING,
        },
    ),
}
