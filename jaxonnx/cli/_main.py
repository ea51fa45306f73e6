"""Run a command, print its report, and return its exit status."""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console

from jaxonnx.cli import _training as training
from jaxonnx.cli import _verbs as verbs
from jaxonnx.cli import process
from jaxonnx.cli._inputs import Failed
from jaxonnx.errors import Error
from jaxonnx.training import Interrupt

_VERBS = {
    "info": verbs.info,
    "verify": verbs.verify,
    "validate": verbs.validate,
    "run": verbs.run,
    "train": training.train,
    "evaluate": verbs.evaluate,
    "sparsify": training.sparsify,
    "quantize": verbs.quantize,
    "sensitivity": verbs.sensitivity,
    "convert": verbs.convert,
    "export-step": training.export_step,
    "import-step": training.import_step,
    "generate": verbs.generate,
    "chat": verbs.chat,
    "export-safetensors": verbs.export_safetensors,
    "classify": verbs.classify,
    "demo": verbs.demo,
}


def run(options: argparse.Namespace, own_process: bool) -> int:
    """Run a command, as `jaxonnx.cli.main` documents."""
    if not own_process:  # a program has called this
        with Interrupt():
            return _run(options)
    if options.allocator == "keep":
        process.keep_pages()
    if options.cache is None:
        process.keep_programs()
    with Interrupt(process.exit_interrupted) as interrupt:
        status = _run(options)
        process.ignore_interrupts()
        if interrupt.presses:
            process.end(status)
        return status


def _run(options: argparse.Namespace) -> int:
    """Run a command and print its report; return the exit status."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: _complain(options.verb, message)
            if options.cache is not None:
                process.keep_programs(options.cache)
            report = _VERBS[options.verb](options)
        if options.json:
            print(json.dumps(_plain(report.data), allow_nan=False))
            return report.status
        if isinstance(report.shown, str):
            print(report.shown)
        elif report.shown is not None:
            Console().print(report.shown)
        for path in report.written:
            print(f"wrote {path}")
        return report.status
    except Failed as error:
        _complain(options.verb, error)
        return 1
    except (Error, OSError) as error:
        _complain(options.verb, error)
        return 2
    except KeyboardInterrupt:
        _complain(options.verb, "interrupted")
        return process.INTERRUPTED


def _complain(verb: str, message: Any) -> None:
    print(f"jaxonnx {verb}: {message}", file=sys.stderr)


def _plain(value: Any) -> Any:
    """Convert values for JSON: NumPy numbers to Python's, infinite and NaN ones to null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
