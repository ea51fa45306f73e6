"""The commands with their flags, and the parser that is made from them."""

import argparse
import difflib
import functools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jaxonnx
from jaxonnx._arguments import DataArguments, LossArguments, OptimizerArguments, RunArguments
from jaxonnx.cli._flags import SCHEME, AppendAction, Flag, list_flags, read_flags, read_table

LOSS = "softmax_cross_entropy_with_integer_labels"

_MODEL = """
    model PATH        an .onnx file, a packed .npz, or the folder of a language model
"""
_EXAMPLES = f"""{_MODEL}
    examples [DATA]   an .npz or .jsonl file, or a folder of images; see --data
    --data FILE       a file (.npz, .jsonl, .json, .csv, .tsv, .parquet) with the inputs by name (a
                      single one may be 'x'), the targets (as 'y', or under any other name) and
                      optionally the 'weight' of each example, or with texts; or a folder of images
                      with one folder per class
"""
_OUTPUT = """
    -o --output --out FILE  the file to write: .onnx, packed .npz or .safetensors; a folder for a
                      language model (required)
"""
_REFERENCE = """
    --reference PATH  the second model of the loss: the teacher of distill, the reference of dpo and
                      kto (default of these two: the model before the training)
"""
_SYSTEM = """
    --system TEXT     the system message of the chat
"""
_READING = {
    "model file": """
    --any-batch       accept any batch size, if the file was exported for one size
    --dequantize      convert integer weights to floating-point parameters
"""
}
_PICTURES = {
    "images: the network gets (pixel * scale - mean) / std; the file may set the defaults": """
    --scale X         the factor for pixels from 0 to 255 (fallback: 1/255)
    --mean X,...      the mean: one number, or one per channel like 0.5,0.5,0.5 (fallback: 0)
    --std X,...       the standard deviation, in the same form (fallback: 1)
    --labels FILE|A,B  the names of the classes: a file with one per line, or a list with commas
                      (train: a new last layer, if the number differs)
    --size HxW        height and width of the images, for a network that accepts any size
    --order RGB|BGR   the order of the channels (fallback: RGB)
    --crop X          the fraction of each side to keep, like 0.875 (fallback: 1)
    --stretch         stretch images to the size, instead of cropping them to its aspect ratio
    --filter bilinear|bicubic|lanczos|box|hamming|nearest  the filter (fallback: bilinear)
"""
}
_TEXTS = {
    "texts: tokens are those of the model's folder": """
    --max-length N    the maximum number of tokens of an example (default: 1024)
    --long cut|split|skip|refuse  longer texts: cut, split into several examples, skip, or refuse
                      (default: split plain texts, cut others)
    --loss-on completions|all  the tokens that the loss counts (default: completions)
    --pack            join short texts to rows of the maximum length
"""
}
_COMMON = {
    "every command": """
    --json            print the result as JSON; nothing else goes to stdout
    --config FILE     a TOML file with values for any of these flags; flags given here win
    --cache FOLDER    the folder for compiled programs (default: ~/.cache/jaxonnx)
    --allocator keep|default=keep  keep freed memory for the next step, which is faster on Linux, or
                      leave the allocator as the system has it
"""
}

_FIELDS = (
    *("weights", "activations", "per_channel", "block", "symmetric", "calibration"),
    *("where", "skip", "dialect", "reduce_range"),
)
"""Fields of `jaxonnx.Quantization` that are not for training alone."""

Groups = Mapping[str, str | Sequence[str | Flag]]
"""Flags, or tables of them (`read_table`), by the title of their group; "" is the parser itself."""


def _generation() -> Groups:
    sampling = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    others = """
    --max-new-tokens N>0=512  the maximum number of tokens of an answer
    --seed N=0        the random seed for sampling
    --stop NAME...    a text that ends an answer, beside the folder's tokens
    --adapter PATH    LoRA adapters: .npz, .onnx_adapter, or the folder of PEFT or of checkpoints
"""
    flags = read_flags("model/_model.py", "Model.generate", sampling)
    return {"generation: by default the search settings of the folder": [*flags, others]}


def _step(without: Sequence[str] = ()) -> Groups:
    """List the flags of a training step, without those of some arguments of the model."""
    lora = {"alpha": "lora-alpha", "dora": "dora", "dropout": "lora-dropout"}
    where = """
    --lora-where NAME...  the weights to adapt: attention, mlp or all-linear; or a module, node,
                      tensor name or regular expression
"""
    adapted = [] if "lora" in without else [where, *read_flags("lora/_lora.py", "LoRA", lora, lora)]
    return {
        "loss and optimizer": [
            *list_flags(LossArguments),
            _REFERENCE,
            *list_flags(OptimizerArguments),
        ],
        "model": [*list_flags("ModelArguments", without=without), *adapted],
    }


def _run(step: Groups, without: Sequence[str] = ()) -> Groups:
    """List the flags of a command that trains.

    Args:
      step: those of the step.
      without: arguments of the data to leave out.
    """
    return {
        "": f"""{_EXAMPLES}{_OUTPUT}
    --explain         print the equivalent Python program and exit
    --dry-run         show the data, and the time and memory of one step; write nothing
""",
        **step,
        "step": [
            *list_flags("UpdateArguments"),
            """
    --distributed [HOST:PORT,COUNT,INDEX]  run as one of several processes, each with its own
                      devices; without a value the cluster is detected (SLURM, Open MPI, Kubernetes,
                      TPU pods); implies --mesh all
""",
        ],
        "run": [
            *list_flags(RunArguments),
            """
    --resume-anyway   resume, and accept other data than before
    --report FILE     write an .html report: curves, layers, confusion matrix, settings
""",
        ],
        "data": list_flags(DataArguments, without=without),
        **_READING,
        **_PICTURES,
        "images: how folders are read": """
    --workers N       the number of threads that decode (default: one a processor)
    --memory N        the bytes of decoded images to keep (default: 1 GiB)
""",
        **_TEXTS,
    }


class Command(NamedTuple):
    help: str
    examples: str
    list_groups: Callable[[], Groups]
    """A function, because it reads declarations: only that of the command that is called does."""

    def list_flags(self) -> dict[str, list[Flag]]:
        """Return the flags of the command by the title of their group."""
        groups = {**self.list_groups(), **_COMMON}
        listed: dict[str, list[Flag]] = {title: [] for title in groups}
        for title, parts in groups.items():
            for part in [parts] if isinstance(parts, str) else parts:
                listed[title] += read_table(part) if isinstance(part, str) else [part]
        return listed


COMMANDS: Mapping[str, Command] = {
    "info": Command(
        "show inputs, outputs, operators and parameters of a model",
        "jaxonnx info net.onnx --layers\njaxonnx info net.onnx --json",
        lambda: {
            "": f"""{_MODEL}
    --layers          list every layer: shape, parameters, names of weights
""",
            **_READING,
        },
    ),
    "run": Command(
        "run a model on arrays, texts or images and write the outputs",
        "jaxonnx run net.onnx inputs.npz -o outputs.npz --batch-size 32\n"
        "jaxonnx run net.onnx photos -o scores.npz",
        lambda: {
            "": f"""{_MODEL}
    data PATH         an .npz or .jsonl file with the inputs by name (a single one may be 'x'), or a
                      folder of images
    -o --output FILE  the .npz file to write (required)
    --outputs NAME...  an intermediate value, node or module to output instead
    --batch-size N    the number of examples per batch (default: all; 32 for images and texts)
""",
            "data": list_flags(DataArguments, names=("fixed", "pad", "length_buckets")),
            **_READING,
            **_PICTURES,
        },
    ),
    "train": Command(
        "train a model and write it with the trained weights",
        "jaxonnx train net.onnx data.npz -o trained.onnx --epochs 3\n"
        "jaxonnx train net.onnx data.npz -o new.onnx --head 10\n"
        "jaxonnx train net.onnx data.npz -o tuned.onnx --optimizer adamw --rate 3e-4 "
        "--schedule cosine --warmup 0.1 --clip 1 --explain\n"
        "jaxonnx train --config run.toml --rate 3e-4",
        lambda: _run(
            {**_step(), "adapters": "    --adapters FILE  also write the adapters to this file"}
        ),
    ),
    "evaluate": Command(
        "compute the loss and metrics of a model over a data set",
        "jaxonnx evaluate net.onnx data.npz --metrics accuracy --metrics confusion_matrix",
        lambda: {
            "": f"""{_EXAMPLES}
    --loss NAME       the name of a loss (default: {LOSS}, if --metrics is not given)
{_REFERENCE}
    --metrics NAME...  accuracy, top_5, f1, r2, ..., roc_auc, average_precision, confusion_matrix,
                      per_class, roc_curve, precision_recall_curve
    --plots FOLDER    a folder for plots of the tables and curves
""",
            "data": list_flags(DataArguments),
            **_READING,
            **_PICTURES,
            **_TEXTS,
        },
    ),
    "sparsify": Command(
        "train a model with transposable 2:4 sparse weights",
        "jaxonnx sparsify net.onnx data.npz -o sparse.onnx --dense 2 --dynamic 6 --fixed 2",
        lambda: {
            **_run(_step(without=("lora",)), without=("fixed",)),  # which is a phase
            "sparsity": """
    --pattern N:M|NAME=N:M...  N:M along both axes, for all weights or by name (default: 2:4)
    --method three_phase|sr_ste|s_ste|one_shot  the training method (default: three_phase)
    --select NAME...  the weights to make sparse: module, node, tensor name or regular expression
    --dense N         the epochs of the dense phase
    --dynamic N       the epochs of the dynamic phase
    --fixed N         the epochs of the fixed phase
""",
        },
    ),
    "verify": Command(
        "verify that every product with a sparse weight can use its sparsity",
        "jaxonnx verify sparse.onnx",
        lambda: {"": _MODEL, **_READING},
    ),
    "validate": Command(
        "compare a model with onnxruntime, its gradients with differences, its file with a save",
        "jaxonnx validate net.onnx\njaxonnx validate out.onnx --against net.onnx --tolerance 0.05",
        lambda: {
            "": f"""{_MODEL}
    --data FILE       a file or folder with inputs, besides random ones
    --against FILE    another file that must give the same outputs
    --tolerance X     of outputs against another file, relative to the largest (default: rounding)
    --dim NAME=SIZE...  the size of another open dimension
""",
            **_READING,
            **_PICTURES,
        },
    ),
    "quantize": Command(
        "quantize weights and activations with calibration data; train --quantize trains them",
        "jaxonnx quantize net.onnx data.npz -o int8.onnx\n"
        "jaxonnx quantize net.onnx data.npz -o int4.onnx --weights int4 --block 32 --skip head\n"
        "jaxonnx quantize net.onnx data.npz -o int8.onnx --max-loss 0.005 --metric accuracy",
        lambda: {
            "": [
                _EXAMPLES,
                _OUTPUT,
                *read_flags(
                    "training/_quantize.py",
                    "quantize",
                    ("method", "batches", "batch_size", "max_loss", "metric", "check"),
                ),
                *list_flags(RunArguments, names=("validation",)),
            ],
            "scheme": read_flags(*SCHEME, _FIELDS),
            **_READING,
            **_PICTURES,
        },
    ),
    "sensitivity": Command(
        "measure the error when one weight at a time is quantized or made sparse",
        "jaxonnx sensitivity net.onnx data.npz --types int8 --types int4 --types 2:4",
        lambda: {
            "": [
                _EXAMPLES,
                *read_flags(
                    "training/_quantize.py",
                    "sensitivity",
                    ("types", "activations", "batches", "batch_size"),
                ),
                "    --plot FILE  a file for a plot: .png or .svg",
            ],
            **_READING,
            **_PICTURES,
        },
    ),
    "export-step": Command(
        "write the training step as ONNX graphs, to train in any runtime",
        "jaxonnx export-step net.onnx data.npz -o step/ --optimizer adamw --batch-size 16",
        lambda: {
            "": [
                f"""{_EXAMPLES}
    -o --output FOLDER  the folder to write to (required)
    --opset N=18      the ONNX opset to write
    --web [FOLDER]    also write a web page that trains in a browser; FOLDER is the npm package
                      onnxruntime-web (default: downloaded with npm)
    --web-inputs KIND  with --web: what the inputs are, image, audio or table
""",
                *read_flags("_step_files/export.py", "export_step", ("check",)),
            ],
            **_step(without=("quantize",)),
            "step": list_flags("UpdateArguments", without=("mesh", "sharding")),
            "run": list_flags(RunArguments, names=("epochs",)),
            "data": list_flags(DataArguments),
            **_READING,
            **_PICTURES,
            **_TEXTS,
        },
    ),
    "import-step": Command(
        "write a model with the weights that another runtime trained with export-step",
        "jaxonnx import-step net.onnx step/ -o trained.onnx\n"
        "jaxonnx import-step net.onnx step/ --state state.safetensors -o trained.onnx",
        lambda: {
            "": f"""{_MODEL}
    folder FOLDER     the folder that export-step wrote
    --state FILE      the trained state: .npz, .safetensors, or .bin (flat, as the manifest says);
                      default: state.npz in the folder
    -o --output FILE  the .onnx file to write (required)
"""
        },
    ),
    "generate": Command(
        "continue a prompt with a language model, and print the text as it comes",
        'jaxonnx generate qwen/ --prompt "Once upon a time" --temperature 0\n'
        'jaxonnx generate qwen/ --chat --prompt "What is a list?" --temperature 0.7 --top-p 0.9',
        lambda: {
            "": f"""{_MODEL}
    --prompt TEXT     the text to continue (required)
    --chat            the prompt is a user's message, for the chat template
{_SYSTEM}""",
            **_generation(),
            **_READING,
        },
    ),
    "chat": Command(
        "talk with a language model: each line of the input is a message",
        'jaxonnx chat qwen/ --system "Answer briefly."',
        lambda: {"": [_MODEL, _SYSTEM], **_generation(), **_READING},
    ),
    "export-safetensors": Command(
        "write the weights of a model as a checkpoint of Hugging Face's transformers",
        "jaxonnx export-safetensors tuned/ hf/ --original Qwen3-0.6B/ --dequantize",
        lambda: {
            "": [
                f"{_MODEL}    folder FOLDER  the folder to write to",
                *read_flags(
                    "_hub.py",
                    "export_safetensors",
                    ("original", "dequantize", "dtype", "check"),
                ),
            ],
        },
    ),
    "classify": Command(
        "classify images with a model",
        "jaxonnx classify sparse.onnx picture.png --top 3",
        lambda: {
            "": f"""{_MODEL}
    pictures PATH...  image files that Pillow can read, or folders of them
    --top N>0=5       the number of classes to print
""",
            **_PICTURES,
        },
    ),
    "demo": Command(
        "train a small digit classifier, dense and sparse, and write a report",
        "jaxonnx demo --output report",
        lambda: {
            "": """
    -o --output FOLDER=.  the folder to write to
    --seed N=0        the random seed
    --epochs N=24     the epochs of each training
"""
        },
    ),
}

_EXITS = (
    "exit status: 0 success, 1 stopped early or failed during the work, "
    "2 invalid usage, files, model or data, 130 interrupted"
)

_ALSO_CALLED = {"lr": "rate", "learning-rate": "rate", "max-norm": "clip", "wd": "weight-decay"}
"""Names that other tools have for a flag."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of one command, from flags and `--config`; exit if they are wrong."""
    settings: dict[str, Any] = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    parser = argparse.ArgumentParser(
        prog="jaxonnx",
        description="Run, train, quantize and sparsify ONNX models with JAX.",
        epilog=f"{_EXITS}.\njaxonnx COMMAND --help shows the flags of a command, and examples.",
        **settings,
    )
    parser.add_argument("--version", action="version", version=jaxonnx.__version__)
    parsers = parser.add_subparsers(dest="verb", required=True, metavar="command")
    for name, command in COMMANDS.items():
        examples = "\n".join(f"  {line}" for line in command.examples.splitlines())
        chosen = parsers.add_parser(
            name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"examples:\n{examples}\n\n{_EXITS}",
            **settings,
        )
        if arguments[:1] == [name]:
            _add_flags(chosen, command, arguments[1:])
    return parser.parse_args(arguments)


def _add_flags(parser: argparse.ArgumentParser, command: Command, words: Sequence[str]) -> None:
    """Add the flags of a command, with defaults of the file that `--config` names."""
    actions = {}
    for title, flags in command.list_flags().items():
        group = parser.add_argument_group(title) if title else parser
        for flag in flags:
            action = group.add_argument(*flag.names.split(), help=flag.help, **flag.settings)
            long = [name for name in action.option_strings if name.startswith("--")]
            actions[(long or [action.dest])[0].removeprefix("--")] = action
    available = {flag for action in actions.values() for flag in action.option_strings} | {"--help"}
    for text in words:
        flag = text.partition("=")[0]
        if flag.startswith("--") and flag != "--" and flag not in available:
            near = _nearest(flag[2:], [name for name in actions if f"--{name}" in available])
            parser.exit(
                2,
                f"{parser.prog}: unknown flag {flag}; try {' or '.join(f'--{x}' for x in near)} "
                f"({parser.prog} --help has all)\n",
            )
    # other mistakes are left to the parser itself
    early = argparse.ArgumentParser(prog=parser.prog, add_help=False)
    early.add_argument("--config", type=Path)
    if (path := early.parse_known_args(words)[0].config) is not None:
        _configure(parser, actions, path)
    if "dry-run" in actions:
        writes_nothing = "--dry-run" in words or actions["dry-run"].default
        actions["output"].required &= not writes_nothing


def _nearest(name: str, others: Sequence[str]) -> list[str]:
    """Return the two names that are most similar to one, or to its name here."""
    return difflib.get_close_matches(_ALSO_CALLED.get(name, name), others, n=2, cutoff=0)


def _configure(
    parser: argparse.ArgumentParser, actions: Mapping[str, argparse.Action], path: Path
) -> None:
    """Make the values of a TOML file the defaults of a command's flags."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--config {path}: {error}")
    preprocess = values.pop("preprocess", {})
    if not isinstance(preprocess, dict):
        parser.error(f"--config {path}: preprocess must be a table")
    values |= {"loss-on" if key == "loss" else key: x for key, x in preprocess.items()}
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in actions or name == "config":
            near = _nearest(name, [other for other in actions if other != "config"])
            parser.error(f"--config {path}: unknown '{key}'; try {' or '.join(near)}")
        action = actions[name]
        try:
            action.default = _default(action, value)
        except ValueError as error:
            parser.error(f"--config {path}: {key} = {value!r} {error}")
        except (argparse.ArgumentTypeError, argparse.ArgumentError) as error:
            parser.error(f"--config {path}: {key}: {error}")
        action.required = False
        if not action.option_strings:
            action.nargs = "*" if action.nargs == "+" else "?"


def _default(action: argparse.Action, value: Any) -> Any:
    """Convert a value of a TOML file to that of the flag."""
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if isinstance(value, dict) and "=" in str(action.metavar):
        value = [
            f"{name}={','.join(map(str, x)) if isinstance(x, list) else x}"
            for name, x in value.items()
        ]
    if isinstance(value, bool | dict):
        raise ValueError("must be a number or a text")
    convert: Callable[[str], Any] = action.type or str  # type: ignore[assignment]
    if isinstance(action, AppendAction) or action.nargs == "+":
        values = [convert(str(x)) for x in (value if isinstance(value, list) else [value])]
        return (
            functools.reduce(action.join, values, None)
            if isinstance(action, AppendAction)
            else values
        )
    separator = "x" if action.metavar == "HxW" else ","
    text = separator.join(map(str, value)) if isinstance(value, list) else str(value)
    if action.choices and text not in action.choices:
        raise ValueError(f"is none of {', '.join(action.choices)}")
    try:
        return convert(text)
    except ValueError:
        flag = action.option_strings[-1] if action.option_strings else action.dest
        raise ValueError(f"does not fit {flag}") from None
