"""Batches and tokens of data, without a run that takes them."""

from types import SimpleNamespace
from typing import Any, NamedTuple

from jaxonnx._data.kinds import Reading, open_data
from jaxonnx._data.ragged import PLAIN, Needs, Padding


class Tokens(NamedTuple):
    """The columns of texts, how batches of them are padded, and notes for the history."""

    data: Any
    padding: Padding
    notes: list[str]


def make_source(data, inputs, size=None, seed=None, padding=PLAIN):
    model: Any = SimpleNamespace(inputs=inputs)
    return open_data(data).read(Reading(model, padding, size, seed))


def read_texts(model, data, preprocess=None, names=None, group=1):
    reading = Reading(model, Padding(needs=Needs(group=group)), preprocess=preprocess)
    opened: Any = open_data(data, names=names)
    opened.prepare({"data": opened}, reading)
    (notes,) = reading.notes
    return Tokens(opened.columns, reading.padding, notes)
