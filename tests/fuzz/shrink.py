"""Smaller models that end in the same bucket, and files as text for `tests/fuzz/found.py`."""

import base64
import zlib
from collections.abc import Iterator
from itertools import islice

import onnx.parser
import onnx.printer
from google.protobuf.message import Message
from onnx import ModelProto

from tests.fuzz import pool
from tests.fuzz.cases import Case, examine
from tests.fuzz.mutate import parsed

TRIES = 400


def shrunk(case: Case, bucket: str) -> Case:
    """Return a case of a model with less in it that ends in the same bucket."""
    best = case

    def candidates() -> Iterator[Case]:
        if case.kind != "model":
            return
        for draw in range(30):
            if best.inputs:  # values drawn anew need no room in the table
                yield best._replace(inputs=(), draw=draw)
        model = parsed(best.content)
        place = 0 if model is None else len([*_pieces(model)])
        while place > 0:
            place -= 1
            model = ModelProto.FromString(best.content)
            pieces = [*_pieces(model)]
            if place < len(pieces):
                _delete(*pieces[place])
                yield best._replace(content=model.SerializeToString())

    for candidate, outcome in pool.run(examine, islice(candidates(), TRIES), 1):
        if outcome.bucket == bucket:
            best = candidate
    return best


def _pieces(message: Message) -> Iterator[tuple[Message, str, int | None]]:
    """Yield the fields that are set below a message, outer ones last."""
    for field, value in message.ListFields():
        for i, item in enumerate(value if field.is_repeated else [value]):
            yield message, field.name, i if field.is_repeated else None
            if field.message_type:
                yield from _pieces(item)


def _delete(message: Message, name: str, index: int | None) -> None:
    if index is None:
        message.ClearField(name)
    else:
        del getattr(message, name)[index]


def written(content: bytes | dict[str, bytes]) -> str:
    """Return a file as a Python expression: `packed` unpacks it, and text is a model's."""
    if isinstance(content, dict):
        return "\n".join(f"{name}: {written(data)}" for name, data in content.items())
    model = parsed(content)
    if model is not None:
        try:
            text = onnx.printer.to_text(model)
            if onnx.parser.parse_model(text) == model:
                return text
        except (onnx.parser.ParseError, UnicodeDecodeError, ValueError, RuntimeError):
            pass
    return repr(base64.b85encode(zlib.compress(content, 9)).decode())


def unpacked(text: str) -> bytes:
    """Return what `written` was given."""
    if "opset_import" in text:
        return onnx.parser.parse_model(text).SerializeToString()
    return zlib.decompress(base64.b85decode(text))
