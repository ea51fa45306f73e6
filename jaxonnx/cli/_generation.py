"""The commands that print what a language model writes, as it comes."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from jaxonnx.cli import _inputs as reading
from jaxonnx.cli._declarations import GENERATE
from jaxonnx.cli._flag_types import collect_values
from jaxonnx.cli._inputs import Failed, Report
from jaxonnx.errors import InputError
from jaxonnx.lora import Adapters
from jaxonnx.model import Model


def generate(options: argparse.Namespace) -> Report:
    prompt = options.prompt
    if options.chat:
        prompt = [*_begin(options), {"role": "user", "content": prompt}]
    elif options.system is not None:
        raise InputError("--system is for chats: pass --chat as well")
    text = _write(_read(options), prompt, options)
    return Report({"prompt": options.prompt, "text": text}, None)


def chat(options: argparse.Namespace) -> Report:
    model, messages = _read(options), _begin(options)
    for line in _lines():
        messages.append({"role": "user", "content": line})
        tokens = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        if len(tokens) >= model._generator.positions:
            raise Failed(
                f"the conversation has {len(tokens)} tokens, and the model has positions for "
                f"{model._generator.positions}: begin a new one"
            )
        messages.append({"role": "assistant", "content": _write(model, messages, options)})
    return Report({"messages": messages}, None)


def _read(options: argparse.Namespace) -> Model:
    model = reading.read(options)
    if options.adapter is None:
        return model
    return Adapters.load(options.adapter, model).attach(model)


def _begin(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not blank; in terminals with a mark before."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _write(model: Model, prompt: Any, options: argparse.Namespace) -> str:
    """Print an answer as it comes, unless the result is to be JSON; return it."""
    settings = {"temperature": None, **collect_values(options, GENERATE[1])}
    pieces = model.generate(
        prompt,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        stop=options.stop or None,
        stream=True,
        **settings,
    )
    text = ""
    for piece in pieces:
        text += piece
        if not options.json:
            print(piece, end="", flush=True)
    if not options.json:
        print(flush=True)
    return text
