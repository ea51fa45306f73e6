"""Shapes of rows of texts, as data sets have them.

`SHAPES` has an entry for each shape. A row of any shape becomes a prompt and its answers, either as
texts or as lists of messages with a role and content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple

import numpy as np

from jaxonnx._data.inputs_and_targets import JUDGEMENT
from jaxonnx._data.kinds import Names, Row, Rows, drop_nones, to_python
from jaxonnx.errors import TrainingError

VARIABLES = "tools", "documents", "chat_template_kwargs"
"""Columns for the chat template."""
LABELS = "label", "labels"
"""Columns with the class of a text, or its score."""
_OTHER = "other completion"
"""The column of an answer to another prompt, which `add_other_answers` adds."""
_SHARE_GPT = {"from": "role", "value": "content", "human": "user", "gpt": "assistant"}
_SHARE_GPT |= {"observation": "tool"}
"""The names of the field "from"; "function" is a call of a tool."""
REASONING = "reasoning_content", "thinking", "reasoning"
"""Keys of a message's thoughts; templates read the first one, and that of gpt-oss the second."""
_PLAIN = "text", "instruction", "output"
"""Columns that are texts, and no lists of messages."""
_SHOWN = 60
"""Characters of a text that an error shows."""


class Texts(NamedTuple):
    """A row as a prompt and its answers: all of them texts, or all lists of messages."""

    prompt: Any
    answers: tuple[Any, ...]
    """One answer, or the one that was chosen and the one that was rejected."""

    @property
    def is_chat(self) -> bool:
        return not all(isinstance(part, str) for part in (self.prompt, *self.answers))


@dataclass(frozen=True)
class Shape:
    """A shape of rows.

    Attributes:
      columns: those that a row has.
      optional: those that it may have.
      read: converts a row, with names for its messages.
      example: a row, for errors.
      loss: the name of one that compares the answers of rows, if rows have such.
    """

    columns: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Names], Texts]
    example: str
    loss: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether rows are plain texts, which may be split where they are long."""
        return self.columns == ("text",)

    @property
    def is_judged(self) -> bool:
        """Whether rows say of a single answer if it is desirable."""
        return JUDGEMENT in self.columns

    def fits(self, row: Any) -> bool:
        """Check whether a row has the columns of this shape, as texts or lists of messages."""
        return isinstance(row, Mapping) and all(
            (name != JUDGEMENT and isinstance(row.get(name), str))
            or (name not in _PLAIN and _is_list_of_objects(row.get(name)))
            or (name == JUDGEMENT and read_judgement(row.get(name)) is not None)
            for name in self.columns
        )


def read_judgement(value: Any) -> float | None:
    """Return a judgement, above 0 for a desirable answer; None if the value is none.

    It is a boolean or an integer, or the text of one in a cell of a .csv file.
    """
    if isinstance(value, str):
        value = {"true": 1, "1": 1, "false": 0, "0": 0}.get(value.strip().lower())
    return float(value) if isinstance(value, bool | int | np.bool_ | np.integer) else None


def _is_list_of_objects(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)
    return is_list and all(isinstance(x, Mapping) for x in value)


def is_chat(value: Any) -> bool:
    """Check whether a prompt is a list of messages."""
    return _is_list_of_objects(value) and len(value) > 0


def _read_instruction(row: Mapping[str, Any], names: Names) -> Texts:
    text = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    prompt = [*_begin_with_system(row), {"role": "user", "content": text}]
    return Texts(prompt, (_to_answer(row["output"]),))


def add_other_answers(rows: Iterable[Row], before: Any) -> Iterator[Row]:
    """Add to each row the answer of the row before it.

    Args:
      before: the answer before the first row, whose own is else that of the second row.
    """
    rows = iter(rows)
    ahead = [*islice(rows, 2)]
    if before is None and len(ahead) == 1:
        raise TrainingError(f"{ahead[0][0]} is alone: an answer is compared with those of others")
    if before is None and ahead:
        before = ahead[1][1].get("completion")
    for where, row in chain(ahead, rows):
        yield where, {**row, _OTHER: before}
        before = row.get("completion")


def _read_preference(row: Mapping[str, Any], names: Names) -> Texts:
    answers = row["chosen"], row["rejected"]
    prompt = row.get("prompt")
    if all(isinstance(x, str) for x in answers):
        return _to_texts("" if prompt is None else prompt, answers, names)
    chosen, rejected = (to_messages(x, names) for x in answers)
    if isinstance(prompt, str) and chosen and chosen[0]["role"] == "assistant":
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str | None):  # whole conversations, which begin with the prompt
        pairs = zip(chosen[:-1], rejected[:-1], strict=False)
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return Texts(chosen[:count], (chosen[count:], rejected[count:]))
    return Texts(to_messages(prompt, names), (chosen, rejected))


def _to_texts(prompt: Any, answers: Sequence[Any], names: Names) -> Texts:
    if isinstance(prompt, str):
        if not all(isinstance(answer, str) for answer in answers):
            raise TrainingError("the prompt is a text, so its completion must be one, not messages")
        return Texts(prompt, tuple(answers))
    return Texts(to_messages(prompt, names), tuple(_to_answer(x, names) for x in answers))


def _to_answer(answer: Any, names: Names = {}) -> list[dict[str, Any]]:  # noqa: B006
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return to_messages(answer, names)


def _begin_with_system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = row.get("system")
    return [{"role": "system", "content": system}] if system else []


def to_messages(value: Any, names: Names) -> list[dict[str, Any]]:
    """Convert a list of messages, or its JSON text, to messages with a role and content."""
    messages = json.loads(value) if isinstance(value, str) else to_python(value)
    if not _is_list_of_objects(messages):
        raise TrainingError("messages must be a list of objects with a role and its content")
    return [_to_message(message, names) for message in messages]


def _to_message(message: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Rename keys and role; parse calls of tools; drop keys that are None, as Arrow adds them."""
    renamed = {names.get(name, name): value for name, value in message.items()}
    if "role" not in renamed and "from" in renamed:
        names = {**_SHARE_GPT, **names}
        renamed = {names.get(name, name): value for name, value in renamed.items()}
        if renamed["role"] == "function":
            return {"role": "assistant", "content": "", "tool_calls": _to_calls(renamed["content"])}
    if "role" not in renamed:
        raise TrainingError(
            f"messages must be objects with a role and content, and one has {', '.join(message)}"
        )
    role = renamed["role"]
    content = {"role": names.get(role, role), "content": renamed.get("content")}
    others = {name: drop_nones(x) for name, x in renamed.items() if x is not None}
    if "function_call" in others:  # OpenAI's name before there were several
        call = {"type": "function", "function": others["function_call"]}
        others = {"tool_calls": [call], **others}
    if calls := others.get("tool_calls"):
        others["tool_calls"] = json.loads(calls) if isinstance(calls, str) else calls
        if not _is_list_of_objects(others["tool_calls"]):
            raise TrainingError("tool_calls must be a list of objects")
    thoughts = next((others[name] for name in REASONING if name in others), None)
    if thoughts is not None:
        others = {"thinking": thoughts, **others, REASONING[0]: thoughts}
    return {**others, **content}


def _to_calls(text: str) -> list[dict[str, Any]]:
    calls = json.loads(text)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise TrainingError("the value of 'function' must be JSON with a name and arguments")
    return [{"type": "function", "function": call} for call in calls]


SHAPES = (
    Shape(
        ("messages",),
        VARIABLES,
        lambda row, names: Texts([], (to_messages(row["messages"], names),)),
        '{"messages": [{"role": "user", "content": "..."}, '
        '{"role": "assistant", "content": "..."}]}',
    ),
    Shape(
        ("conversations",),
        ("system", *VARIABLES),
        lambda row, names: Texts(
            [], (_begin_with_system(row) + to_messages(row["conversations"], names),)
        ),
        '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
    ),
    Shape(
        ("prompt", "completion"),
        VARIABLES,
        lambda row, names: _to_texts(row["prompt"], (row["completion"],), names),
        '{"prompt": "...", "completion": "..."} (texts, or lists of messages)',
    ),
    Shape(
        ("instruction", "output"),
        ("input", "system", *VARIABLES),
        _read_instruction,
        '{"instruction": "...", "input": "...", "output": "..."}',
    ),
    Shape(("text",), (), lambda row, names: Texts("", (row["text"],)), '{"text": "..."}'),
    Shape(
        ("prompt", "completion", JUDGEMENT),
        (_OTHER, *VARIABLES),
        lambda row, names: _to_texts(row["prompt"], (row["completion"], row[_OTHER]), names),
        '{"prompt": "...", "completion": "...", "label": true} (for the loss "kto")',
        "kto",
    ),
    Shape(
        ("chosen", "rejected"),
        ("prompt", *VARIABLES),
        _read_preference,
        '{"prompt": "...", "chosen": "...", "rejected": "..."} (for a loss of pairs)',
        "dpo",
    ),
)
"""The shapes of rows. If several fit, the first is meant; for a loss of pairs, the last."""


def _read_scored(*columns: str, compared: bool = False) -> Shape:
    """Return the shape of texts that are scored together, or compared with each other."""
    texts = ", ".join(f'"{name}": "..."' for name in columns)
    return Shape(
        columns,
        LABELS,
        lambda row, names: Texts("", tuple(row[name] for name in columns)),
        f'{{{texts}}} (for the loss "in_batch_negatives")'
        if compared
        else f'{{{texts}, "label": 1}} (for a model with one row of outputs for each text)',
    )


COMPARED = tuple(
    _read_scored(*columns, compared=True)
    for columns in (
        ("anchor", "positive", "negative"),
        ("query", "positive", "negative"),
        ("anchor", "positive"),
        ("query", "positive"),
    )
)
"""The shapes of rows whose texts are compared."""

SCORED = (
    _read_scored("text", "text_pair"),
    _read_scored("sentence1", "sentence2"),
    _read_scored("premise", "hypothesis"),
    _read_scored("question1", "question2"),
    _read_scored("question", "sentence"),
    _read_scored("question", "answer"),
    _read_scored("query", "passage"),
    _read_scored("query", "document"),
    _read_scored("query", "answer"),
    _read_scored("text1", "text2"),
    *COMPARED,
    _read_scored("text"),
    _read_scored("sentence"),
)
"""The shapes of rows for models that score texts, the two of a pair in their order."""


def find_shape(rows: Rows, pairs: bool = False, scores: bool = False) -> Shape | None:
    """Return the shape of the first row, if it is in the tables.

    Args:
      pairs: whether a loss of pairs is to read it.
      scores: whether a model that scores texts is; other models take the shapes of these last.
    """
    row = rows.rename(rows.first)
    shapes = SCORED if scores else (*SHAPES[:: -1 if pairs else 1], *SCORED)
    return next((shape for shape in shapes if shape.fits(row)), None)


def has_messages(rows: Rows) -> bool:
    """Check whether the first row has messages."""
    shape = find_shape(rows)
    return shape is not None and shape.read(rows.rename(rows.first), rows.names).is_chat


def check_shape(rows: Rows, what: str, inputs: Sequence[str]) -> None:
    """Refuse rows with texts whose shape is not in the table, unless they have a model's input."""
    row = rows.rename(rows.first)
    if find_shape(rows) or not isinstance(row, Mapping) or {*inputs} & {*row}:
        return
    shape = next((shape for shape in SHAPES if {*shape.columns} <= row.keys()), None)
    if shape is not None:
        values = ", ".join(f"{name!r}: {row[name]!r:.40}" for name in shape.columns)
        raise TrainingError(f"{what} begins with {{{values}}}, and rows are like {shape.example}")
    if _guess_names(row):
        raise unknown_shape(what, row)


def unknown_shape(what: str, row: Mapping[str, Any]) -> TrainingError:
    """Return the error for rows whose shape the model does not take, with the shapes to choose."""
    shapes = "".join(
        f"\n  {shape.example}" for shape in (*SHAPES, SCORED[0], COMPARED[0], SCORED[-2])
    )
    names = _guess_names(row)
    shown = {new: _shorten(row[name]) for name, new in names.items() if name in row}
    way = f"\ncolumns={names} reads this row as {shown}" if names else ""
    return TrainingError(
        f"{what} has rows of an unknown shape: it has the columns {', '.join(row)}, and rows of "
        f"texts are one of{shapes}{way}"
    )


def _guess_names(row: Mapping[str, Any]) -> dict[str, str]:
    """Return new names for the columns of a row that give it a shape; {} if it has no texts."""
    for name, messages in row.items():
        if _is_list_of_objects(messages) and messages:
            message = messages[0]  # the role is the shorter one of its texts
            texts = [key for key, x in message.items() if isinstance(x, str)]
            texts = sorted(texts, key=lambda key: len(message[key]))
            return dict(zip((name, *texts), ("messages", "role", "content"), strict=False))
    texts = [name for name, x in row.items() if isinstance(x, str)]
    names = ("text",) if len(texts) == 1 else ("prompt", "completion")
    return dict(zip(texts, names, strict=False))


def _shorten(value: Any) -> Any:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
