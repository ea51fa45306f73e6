"""The table of commands and their flags."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxonnx._arguments import (
    DataArguments,
    LossArguments,
    OptimizerArguments,
    RunArguments,
)
from jaxonnx.cli import _declarations as of
from jaxonnx.cli._declarations import ADAPTERS, GENERATE
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


LOSS = "softmax_cross_entropy_with_integer_labels"
PHASES = ("dense", "dynamic", "fixed")
SPARSE_EPOCHS = 10

_MODEL = Flag("model", "an .onnx file, a packed .npz, or the folder of a language model", PATH)
_SEED = declared_flags("UpdateArguments", names=("seed",))[0]
_EXAMPLES = [
    _MODEL,
    Flag(
        "examples",
        "an .npz or .jsonl file, or a folder of images; see --data",
        {**PATH, "nargs": "?", "metavar": "data"},
    ),
    Flag(
        "--data",
        "a file (.npz, .jsonl, .json, .csv, .tsv, .parquet) with the inputs by name (a single one "
        "may be 'x'), the targets (as 'y', or under any other name) and optionally the 'weight' of "
        "each example, or with texts; or a folder of images with one folder per class",
        FILE,
    ),
]
_PADDING = declared_flags(DataArguments, names=("pad", "length_buckets"))
_FIXED = declared_flags(DataArguments, names=("fixed",))
_OUTPUT = Flag(
    "-o --output --out",
    "the file to write: .onnx, packed .npz or .safetensors; a folder for a language model",
    NEEDED,
)
_EXPLAIN = Flag("--explain", "print the equivalent Python program and exit", SWITCH)
_DRY_RUN = Flag(
    "--dry-run", "show the data, and the time and memory of one step; write nothing", SWITCH
)
_OPTIMIZER = [*declared_flags(LossArguments), *declared_flags(OptimizerArguments)]
_DISTRIBUTED = Flag(
    "--distributed",
    "run as one of several processes, each with its own devices; without a value the cluster is "
    "detected (SLURM, Open MPI, Kubernetes, TPU pods); implies --mesh all",
    {"type": cluster, "nargs": "?", "const": "auto", "metavar": "HOST:PORT,COUNT,INDEX"},
)
_SYSTEM = Flag("--system", "the system message of the chat", {"metavar": "TEXT"})
_CALIBRATION = ("method", "batches", "batch_size", "max_loss", "metric", "check")
_CONVERSION = read_flags(
    *of.CONVERT, ("type", "opset", "keep", "fold_masks", "linear_as_gemm", "check"), {"type": "to"}
)
_ADAPTERS = Flag("--adapters", "also write the adapters to this file", FILE)
_SCHEME_FIELDS = (
    *("weights", "activations", "per_channel", "block", "symmetric", "calibration"),
    *("where", "skip", "dialect", "reduce_range"),
)
"""Fields of `jaxonnx.Quantization` that are not for training alone."""
_RESUME_ANYWAY = Flag("--resume-anyway", "resume, and accept other data than before", SWITCH)
_REPORT = Flag(
    "--report", "write an .html report: curves, layers, confusion matrix, settings", FILE
)


def _training(model: Sequence[Flag], without: Sequence[str] = ()) -> dict[str, Sequence[Flag]]:
    """Return the groups of flags of a command that trains, with those of the model."""
    return {
        "": [*_EXAMPLES, _OUTPUT, _EXPLAIN, _DRY_RUN],
        "loss and optimizer": _OPTIMIZER,
        "model": model,
        "step": [*declared_flags("UpdateArguments"), _DISTRIBUTED],
        "run": [*declared_flags(RunArguments), _RESUME_ANYWAY, _REPORT],
        "data": declared_flags(DataArguments, without=without),
        **READING,
        **PICTURES,
        **DECODING,
        **TEXTS,
    }


VERBS: Mapping[str, Verb] = {
    "info": Verb(
        "show inputs, outputs, operators and parameters of a model",
        "jaxonnx info net.onnx --layers\njaxonnx info net.onnx --json",
        {
            "": [
                _MODEL,
                Flag("--layers", "list every layer: shape, parameters, names of weights", SWITCH),
            ],
            **READING,
        },
    ),
    "run": Verb(
        "run a model on arrays, texts or images and write the outputs",
        "jaxonnx run net.onnx inputs.npz -o outputs.npz --batch-size 32\n"
        "jaxonnx run net.onnx photos -o scores.npz",
        {
            "": [
                _MODEL,
                Flag(
                    "data",
                    "an .npz or .jsonl file with the inputs by name (a single one may be 'x'), or "
                    "a folder of images",
                    PATH,
                ),
                Flag("-o --output", "the .npz file to write", NEEDED),
                Flag(
                    "--outputs",
                    "an intermediate value, node or module to output instead; repeatable",
                    MANY,
                ),
                Flag(
                    "--batch-size",
                    "the number of examples per batch (default: all; 32 for images and texts)",
                    COUNT,
                ),
                *_FIXED,
            ],
            "sequences of unequal length, in a .jsonl file": _PADDING,
            **READING,
            **PICTURES,
        },
    ),
    "train": Verb(
        "train a model and write it with the trained weights",
        "jaxonnx train net.onnx data.npz -o trained.onnx --epochs 3\n"
        "jaxonnx train net.onnx data.npz -o new.onnx --head 10\n"
        "jaxonnx train net.onnx data.npz -o tuned.onnx --optimizer adamw --rate 3e-4 "
        "--schedule cosine --warmup 0.1 --clip 1 --explain\n"
        "jaxonnx train --config run.toml --rate 3e-4",
        _training([*declared_flags("ModelArguments"), *LORA, _ADAPTERS]),
    ),
    "evaluate": Verb(
        "compute the loss and metrics of a model over a data set",
        "jaxonnx evaluate net.onnx data.npz --metrics accuracy --metrics confusion_matrix",
        {
            "": [
                *_EXAMPLES,
                Flag("--loss", f"the name of a loss (default: {LOSS}, if --metrics is not given)"),
                Flag(
                    "--metrics",
                    "accuracy, top_5, f1, r2, ..., roc_auc, average_precision, "
                    "confusion_matrix, per_class, roc_curve, precision_recall_curve; repeatable",
                    MANY,
                ),
                Flag("--plots", "a folder for plots of the tables and curves", FOLDER),
            ],
            "data": declared_flags(DataArguments),
            **READING,
            **PICTURES,
            **TEXTS,
        },
    ),
    "sparsify": Verb(
        "train a model with transposable 2:4 sparse weights",
        "jaxonnx sparsify net.onnx data.npz -o sparse.onnx --dense 2 --dynamic 6 --fixed 2",
        {
            # whose --fixed is a phase
            **_training(declared_flags("ModelArguments", without=("lora",)), without=("fixed",)),
            "sparsity": [
                Flag(
                    "--pattern",
                    "N:M along both axes, for all weights or by name (default: 2:4); repeatable",
                    {**MANY, "metavar": "N:M|NAME=N:M"},
                ),
                Flag(
                    "--method",
                    "the training method (default: three_phase)",
                    {"choices": ("three_phase", "sr_ste", "s_ste", "one_shot")},
                ),
                Flag(
                    "--select",
                    "the weights to make sparse: module, node, tensor name or regular expression; "
                    "repeatable",
                    MANY,
                ),
                *(Flag(f"--{name}", f"the epochs of the {name} phase", COUNT) for name in PHASES),
            ],
        },
    ),
    "verify": Verb(
        "verify that every product with a sparse weight can use its sparsity",
        "jaxonnx verify sparse.onnx",
        {"": [_MODEL], **READING},
    ),
    "validate": Verb(
        "compare a model with onnxruntime, its gradients with differences, its file with a save",
        "jaxonnx validate net.onnx\njaxonnx validate out.onnx --against net.onnx --tolerance 0.05",
        {
            "": [
                _MODEL,
                Flag("--data", "a file or folder with inputs, besides random ones", FILE),
                Flag("--against", "another file that must give the same outputs", FILE),
                Flag(
                    "--tolerance",
                    "of outputs against another file, relative to the largest (default: rounding)",
                    REAL,
                ),
                DIM,
            ],
            **READING,
            **PICTURES,
        },
    ),
    "quantize": Verb(
        "quantize weights and activations with calibration data; train --quantize trains them",
        "jaxonnx quantize net.onnx data.npz -o int8.onnx\n"
        "jaxonnx quantize net.onnx data.npz -o int4.onnx --weights int4 --block 32 --skip head\n"
        "jaxonnx quantize net.onnx data.npz -o int8.onnx --max-loss 0.005 --metric accuracy",
        {
            "": [
                *_EXAMPLES,
                _OUTPUT,
                *read_flags(*of.QUANTIZE, _CALIBRATION),
                *declared_flags(RunArguments, names=("validation",)),
            ],
            "scheme": read_flags(*of.SCHEME, _SCHEME_FIELDS),
            **READING,
            **PICTURES,
        },
    ),
    "convert": Verb(
        "convert a model to half precision, or to a newer version of ONNX's operators",
        "jaxonnx convert net.onnx half.onnx --to float16 --opset 21 --keep Relu",
        {"": [_MODEL, Flag("output", "the file to write", FILE), *_CONVERSION], **READING},
    ),
    "sensitivity": Verb(
        "measure the error when one weight at a time is quantized or made sparse",
        "jaxonnx sensitivity net.onnx data.npz --types int8 --types int4 --types 2:4",
        {
            "": [
                *_EXAMPLES,
                *read_flags(*of.SENSITIVITY, ("types", "activations", "batches", "batch_size")),
                Flag("--plot", "a file for a plot: .png or .svg", FILE),
            ],
            **READING,
            **PICTURES,
        },
    ),
    "export-step": Verb(
        "write the training step as ONNX graphs, to train in any runtime",
        "jaxonnx export-step net.onnx data.npz -o step/ --optimizer adamw --batch-size 16",
        {
            "": [
                *_EXAMPLES,
                Flag("-o --output", "the folder to write to", {**FOLDER, "required": True}),
                Flag("--opset", "the ONNX opset to write (default: 18)", {**COUNT, "default": 18}),
                Flag(
                    "--web",
                    "also write a web page that trains in a browser; FOLDER is the npm package "
                    "onnxruntime-web (default: downloaded with npm)",
                    {**FOLDER, "nargs": "?", "const": True},
                ),
                *read_flags(*of.EXPORT_STEP, ("check",)),
            ],
            "loss and optimizer": _OPTIMIZER,
            "model": [*declared_flags("ModelArguments", without=("quantize",)), *LORA],
            "step": declared_flags("UpdateArguments", without=("mesh", "sharding")),
            "run": declared_flags(RunArguments, names=("epochs",)),
            "data": declared_flags(DataArguments),
            **READING,
            **PICTURES,
            **TEXTS,
        },
    ),
    "import-step": Verb(
        "write a model with the weights that another runtime trained with export-step",
        "jaxonnx import-step net.onnx step/ -o trained.onnx\n"
        "jaxonnx import-step net.onnx step/ --state state.safetensors -o trained.onnx",
        {
            "": [
                _MODEL,
                Flag("folder", "the folder that export-step wrote", FOLDER),
                Flag(
                    "--state",
                    "the trained state, .npz or .safetensors (default: state.npz in the folder)",
                    FILE,
                ),
                Flag("-o --output", "the .onnx file to write", NEEDED),
            ],
        },
    ),
    "generate": Verb(
        "continue a prompt with a language model, and print the text as it comes",
        'jaxonnx generate qwen/ --prompt "Once upon a time" --temperature 0\n'
        'jaxonnx generate qwen/ --chat --prompt "What is a list?" --temperature 0.7 --top-p 0.9',
        {
            "": [
                _MODEL,
                Flag("--prompt", "the text to continue", {"required": True}),
                Flag("--chat", "the prompt is a user's message, for the chat template", SWITCH),
                _SYSTEM,
            ],
            **GENERATION,
            **READING,
        },
    ),
    "chat": Verb(
        "talk with a language model: each line of the input is a message",
        'jaxonnx chat qwen/ --system "Answer briefly."',
        {"": [_MODEL, _SYSTEM], **GENERATION, **READING},
    ),
    "export-safetensors": Verb(
        "write the weights of a model as a checkpoint of Hugging Face's transformers",
        "jaxonnx export-safetensors tuned/ hf/ --original Qwen3-0.6B/ --dequantize",
        {
            "": [
                _MODEL,
                Flag("folder", "the folder to write to", FOLDER),
                *read_flags(*of.EXPORT_SAFETENSORS, ("original", "dequantize", "dtype", "check")),
            ],
        },
    ),
    "classify": Verb(
        "classify images with a model",
        "jaxonnx classify sparse.onnx picture.png --top 3",
        {
            "": [
                _MODEL,
                Flag(
                    "pictures",
                    "image files that Pillow can read, or folders of them",
                    {**PATH, "nargs": "+"},
                ),
                Flag(
                    "--top",
                    "the number of classes to print (default: 5)",
                    {**POSITIVE, "default": 5},
                ),
            ],
            **PICTURES,
        },
    ),
    "demo": Verb(
        "train a small digit classifier, dense and sparse, and write a report",
        "jaxonnx demo --output report",
        {
            "": [
                Flag(
                    "-o --output",
                    "the folder to write to (default: the current one)",
                    {**FOLDER, "default": Path()},
                ),
                Flag(*_SEED[:2], {**COUNT, "default": 0}),
                Flag(
                    "--epochs",
                    "the epochs of each training (default: 24)",
                    {**COUNT, "default": 24},
                ),
            ]
        },
    ),
}
