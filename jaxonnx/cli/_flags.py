"""The verbs and their flags, as one table."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxonnx._arguments import (
    OPTIMIZERS,
    RATE,
    SCHEDULES,
    DataArguments,
    LossArguments,
    ModelArguments,
    RunArguments,
    StepArguments,
)
from jaxonnx.cli._declarations import QUANTIZE, SCHEME, SENSITIVITY
from jaxonnx.cli._flag_types import (
    COUNT,
    FILE,
    FOLDER,
    MANY,
    NEEDED,
    NUMBERS,
    PATH,
    POSITIVE,
    REAL,
    SIZE,
    SWITCH,
    Flag,
    Verb,
    cluster,
    declared_flags,
    dimension,
    read_flags,
)

LOSS = "softmax_cross_entropy_with_integer_labels"
PHASES = ("dense", "dynamic", "fixed")
SPARSE_EPOCHS = 10

_MODEL = Flag("model", "an .onnx file, or a packed .npz", PATH)
_SEED = declared_flags(StepArguments, names=("seed",))[0]
COMMON = {
    "every command": [
        Flag("--json", "print the result as JSON, and nothing else on stdout", SWITCH),
        Flag("--config", "a TOML file with any of these by name; flags win", FILE),
        Flag("--cache", "a folder to keep compiled programs in; ~/.cache/jaxonnx", FOLDER),
        Flag(
            "--allocator",
            "keep (what is freed is kept for the next step: faster on Linux) or default",
            {"choices": ("keep", "default"), "default": "keep"},
        ),
    ]
}
_READING = {
    "how the file is read": [
        Flag("--any-batch", "open a file that was exported for one batch size to any", SWITCH),
        Flag("--dequantize", "integer weights become trainable ones of floating point", SWITCH),
    ]
}
_PICTURES = {
    "pictures: (pixel * scale - mean) / std is what the network takes; a file may say this": [
        Flag(
            "--scale", "what a pixel from 0 to 255 is multiplied by; 1/255 if nothing says it", REAL
        ),
        Flag(
            "--mean",
            "what is subtracted then: a number, or one for each channel as 0.5,0.5,0.5; 0",
            NUMBERS,
        ),
        Flag("--std", "what is divided by then, in the same form; 1 if nothing says it", NUMBERS),
        Flag(
            "--labels",
            "a file with the names of the classes, one a line, or the names with commas; train: if "
            "the network has another number of outputs, with a new last layer",
            {**FILE, "metavar": "FILE|A,B"},
        ),
        Flag("--size", "height and width of the pictures, where the network takes any", SIZE),
        Flag(
            "--order", "order of the channels; RGB if nothing says it", {"choices": ("RGB", "BGR")}
        ),
        Flag("--crop", "share of a picture's sides that is shown, as 0.875; or 1", REAL),
    ]
}
_EXAMPLES = [
    _MODEL,
    Flag(
        "examples",
        "a .npz or .jsonl file, or a folder of pictures; --data says more",
        {**PATH, "nargs": "?", "metavar": "data"},
    ),
    Flag(
        "--data",
        "a .npz or .jsonl with the inputs by name (or one as 'x'), the targets (as 'y', or all "
        "else) and, if examples differ in it, their 'weight'; or a folder of pictures with a "
        "folder for each class",
        FILE,
    ),
]
_PADDING = declared_flags(DataArguments, names=("pad", "length_buckets"))
_FIXED = declared_flags(DataArguments, names=("fixed",))
_OUTPUT = Flag(
    "-o --output --out",
    "the .onnx to write, or a packed .npz, or the folder for a language model of one",
    NEEDED,
)
_EXPLAIN = Flag("--explain", "print the Python that does the same, and do nothing else", SWITCH)
_OPTIMIZER = [
    Flag(
        "--optimizer",
        f"{', '.join(OPTIMIZERS)}; adam, or what the file's training_info has",
        {"choices": OPTIMIZERS, "metavar": "NAME"},
    ),
    Flag(
        "--rate",
        f"learning rate, the greatest one; {RATE}, and a tenth of it for all but a new --head "
        "where none of these flags is given",
        REAL,
    ),
    Flag(
        "--schedule",
        f"{', '.join(SCHEDULES)}: how the rate falls to zero at the end of the run, if it does",
        {"choices": SCHEDULES, "metavar": "NAME"},
    ),
    Flag("--warmup", "updates in which the rate rises from zero; below 1, their share", REAL),
    Flag("--clip", "greatest norm of the gradients together", REAL),
    Flag("--weight-decay", "share of the weights, times the rate, that an update takes", REAL),
]
_DISTRIBUTED = Flag(
    "--distributed",
    "one of several processes that run this command, each with devices of the mesh, which are "
    "all if --mesh does not say; SLURM, Open MPI, Kubernetes and TPU pods are found",
    {"type": cluster, "nargs": "?", "const": "auto", "metavar": "HOST:PORT,COUNT,INDEX"},
)
_LORA_WHERE = Flag(
    "--lora-where",
    "attention, mlp or all-linear; or module, node or name of what is adapted, or an expression; "
    "repeatable",
    MANY,
)
_ADAPTERS = Flag("--adapters", "a file for the adapters alone", FILE)
_SCHEME_FIELDS = (
    *("weights", "activations", "per_channel", "block", "symmetric", "calibration"),
    *("where", "skip", "dialect", "reduce_range", "bits", "size"),
)
"""Fields of `jaxonnx.Quantization` that are not for training alone."""
_RESUME_ANYWAY = Flag(
    "--resume-anyway", "resume, with other data than the checkpoint's, too", SWITCH
)
_REPORT = Flag("--report", "an .html page: curves, layers, confusion matrix, settings", FILE)


def _training(model: Sequence[Flag], without: Sequence[str] = ()) -> dict[str, Sequence[Flag]]:
    """Return the groups of flags of a command that trains, with those of the model."""
    return {
        "": [*_EXAMPLES, _OUTPUT, _EXPLAIN],
        "loss and optimizer": [*declared_flags(LossArguments), *_OPTIMIZER],
        "model": model,
        "step": [*declared_flags(StepArguments), _DISTRIBUTED],
        "run": [*declared_flags(RunArguments), _RESUME_ANYWAY, _REPORT],
        "data": declared_flags(DataArguments, without=without),
        **_READING,
        **_PICTURES,
    }


VERBS: Mapping[str, Verb] = {
    "info": Verb(
        "show inputs, outputs, operators and parameters of a model",
        "jaxonnx info net.onnx --layers\njaxonnx info net.onnx --json",
        {
            "": [
                _MODEL,
                Flag("--layers", "every layer: shape, parameters, names of weights", SWITCH),
            ],
            **_READING,
        },
    ),
    "run": Verb(
        "run a model on arrays, texts or pictures",
        "jaxonnx run net.onnx inputs.npz -o outputs.npz --batch-size 32\n"
        "jaxonnx run net.onnx photos -o scores.npz",
        {
            "": [
                _MODEL,
                Flag(
                    "data",
                    "a .npz or .jsonl with the inputs by name (or one as 'x'), or a folder of "
                    "pictures",
                    PATH,
                ),
                Flag("-o --output", "the .npz to write", NEEDED),
                Flag("--outputs", "inner value, node or module to give instead; repeatable", MANY),
                Flag(
                    "--batch-size",
                    "run so many at a time; otherwise all at once, or 32 pictures or texts",
                    COUNT,
                ),
                *_FIXED,
            ],
            "sequences of unequal length, which a .jsonl may have": _PADDING,
            **_READING,
            **_PICTURES,
        },
    ),
    "train": Verb(
        "train a model and write it with the new weights",
        "jaxonnx train net.onnx data.npz -o trained.onnx --epochs 3\n"
        "jaxonnx train net.onnx data.npz -o new.onnx --head 10\n"
        "jaxonnx train net.onnx data.npz -o tuned.onnx --optimizer adamw --rate 3e-4 "
        "--schedule cosine --warmup 0.1 --clip 1 --explain\n"
        "jaxonnx train --config run.toml --rate 3e-4",
        _training([*declared_flags(ModelArguments), _LORA_WHERE, _ADAPTERS]),
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
                    MANY,
                ),
                Flag("--plots", "a folder for pictures of tables and curves", FOLDER),
            ],
            "data": declared_flags(DataArguments),
            **_READING,
            **_PICTURES,
        },
    ),
    "sparsify": Verb(
        "train with transposable 2:4 weights",
        "jaxonnx sparsify net.onnx data.npz -o sparse.onnx --dense 2 --dynamic 6 --fixed 2",
        {
            # whose --fixed is a phase
            **_training(declared_flags(ModelArguments, without=("lora",)), without=("fixed",)),
            "sparsity": [
                Flag(
                    "--pattern",
                    "N:M along both axes; 2:4; with names, of these weights only; repeatable",
                    {**MANY, "metavar": "N:M|NAME=N:M"},
                ),
                Flag(
                    "--method",
                    "how masks are found; three_phase",
                    {"choices": ("three_phase", "sr_ste", "s_ste", "one_shot")},
                ),
                Flag(
                    "--select",
                    "module, node or name of what is sparse, or an expression; repeatable",
                    MANY,
                ),
                *(Flag(f"--{phase}", "epochs of this phase", COUNT) for phase in PHASES),
            ],
        },
    ),
    "verify": Verb(
        "prove that every product with a sparse weight sums over its groups",
        "jaxonnx verify sparse.onnx",
        {"": [_MODEL], **_READING},
    ),
    "quantize": Verb(
        "calibrate int8 or int4 weights and activations; train --quantize trains through them",
        "jaxonnx quantize net.onnx data.npz -o int8.onnx\n"
        "jaxonnx quantize net.onnx data.npz -o int4.onnx --weights int4 --block 32 --skip head\n"
        "jaxonnx quantize net.onnx photos -o mixed.onnx --bits auto --share 0.3",
        {
            "": [
                *_EXAMPLES,
                _OUTPUT,
                *read_flags(*QUANTIZE, ("method", "equalize", "batches", "batch_size")),
            ],
            "scheme: which numbers become integers, and which integers": read_flags(
                *SCHEME, _SCHEME_FIELDS, {"size": "share"}
            ),
            **_READING,
            **_PICTURES,
        },
    ),
    "sensitivity": Verb(
        "show what each weight costs when it alone is rounded, or made sparse",
        "jaxonnx sensitivity net.onnx data.npz --types int8 --types int4 --types 2:4",
        {
            "": [
                *_EXAMPLES,
                *read_flags(*SENSITIVITY, ("types", "batches", "batch_size")),
                Flag("--plot", "a file for the picture, as .png or .svg", FILE),
            ],
            **_READING,
            **_PICTURES,
        },
    ),
    "export-step": Verb(
        "write the training step as plain ONNX, for any runtime to train with",
        "jaxonnx export-step net.onnx data.npz -o step/ --optimizer adamw --batch-size 16",
        {
            "": [
                *_EXAMPLES,
                Flag("-o --output", "the folder to write", {**FOLDER, "required": True}),
                Flag("--opset", "version of ONNX to write; 18", {**COUNT, "default": 18}),
                Flag(
                    "--web",
                    "a page as well, which trains in a browser; FOLDER is that of npm's "
                    "onnxruntime-web, without which npm brings it",
                    {**FOLDER, "nargs": "?", "const": True},
                ),
            ],
            "loss and optimizer": [*declared_flags(LossArguments), *_OPTIMIZER],
            "model": [*declared_flags(ModelArguments, without=("quantize",)), _LORA_WHERE],
            "step": declared_flags(StepArguments, without=("mesh", "sharding")),
            "run": declared_flags(RunArguments, names=("epochs",)),
            "data": declared_flags(DataArguments),
            **_READING,
            **_PICTURES,
        },
    ),
    "import-step": Verb(
        "put the weights of a state that another runtime trained back into the network",
        "jaxonnx import-step net.onnx step/ -o trained.onnx\n"
        "jaxonnx import-step net.onnx step/ --state state.safetensors -o trained.onnx",
        {
            "": [
                _MODEL,
                Flag("folder", "the folder that export-step wrote", FOLDER),
                Flag("--state", "an .npz or .safetensors file; state.npz in the folder", FILE),
                Flag("-o --output", "the .onnx to write", NEEDED),
            ],
        },
    ),
    "classify": Verb(
        "name what pictures show",
        "jaxonnx classify sparse.onnx picture.png --top 3",
        {
            "": [
                _MODEL,
                Flag(
                    "pictures",
                    "files that Pillow reads, or folders of them",
                    {**PATH, "nargs": "+"},
                ),
                Flag("--top", "classes to print", {**POSITIVE, "default": 5}),
            ],
            **_PICTURES,
        },
    ),
    "demo": Verb(
        "train a small network for digits, dense and sparse, and write a report",
        "jaxonnx demo --output report",
        {
            "": [
                Flag("-o --output", "folder to write to", {**FOLDER, "default": Path()}),
                Flag(*_SEED[:2], {**COUNT, "default": 0}),
                Flag("--epochs", "of both trainings", {**COUNT, "default": 24}),
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
                Flag("--batch", "the first dimension of inputs that leave it open", POSITIVE),
                Flag(
                    "--dim",
                    "NAME=N for any other dimension that is left open; repeatable",
                    {**MANY, "type": dimension, "metavar": "NAME=N"},
                ),
                Flag("--data", "a .npz with inputs to use instead of random ones", FILE),
                Flag("--train", "the training step too", {**SWITCH, "default": True}),
                Flag("--rounds", "measurements to take the median of", {**POSITIVE, "default": 11}),
            ],
            **_READING,
        },
    ),
}
