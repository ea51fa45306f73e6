"""The chat templates of a model's folder: which of them writes a chat, and the form that it takes.

Templates are rendered by jinja2 in the environment that Hugging Face's templates are written for
(`transformers.utils.chat_template_utils`).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

from jaxonnx._files import wrap_errors
from jaxonnx.errors import Error, TrainingError
from jaxonnx.llm._folders import CHAT_TEMPLATES, ModelFolder
from jaxonnx.llm._shapes import REASONING

NAME = "chat_template"
"""The variable that names a template, or is the text of one."""
_START, _END, MARK = "\ue0f0", "\ue0f1", "\ue0f2"
"""Marks around the text of a template's `generation` block, and one for a place in a message:
private-use characters of Unicode."""
_KEYS = "role", "content", "tool_calls", "function_call", "tool_call_id"
"""The keys of OpenAI's messages, of which many templates leave some out."""
_PROBE = "jaxonnx_probe"
"""An argument of a call, or the text of a message, by which a rendered chat shows how its template
writes these."""
_PRINTED_PART = re.compile(rf"""text\\*["']: *\\*["']{_PROBE}""")
"""A part of a message that is printed as an object, by Python or as JSON."""
_CONTROL = "\x7f"
"""A character that Python escapes in another way than JSON, which may leave it as it is."""


@dataclass(frozen=True)
class Chat:
    """Messages, and the other variables of a chat template.

    Attributes:
      messages: dicts with a role and content.
      variables: further variables of the template, like "tools", and "chat_template".
      where: the chat, for errors.
    """

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    where: str

    def until(self, stop: int, *others: Mapping[str, Any]) -> Chat:
        """Return the chat of the first messages, with others behind them."""
        return replace(self, messages=[*self.messages[:stop], *others])

    def map_arguments(self, function: Callable[[Any], Any]) -> Chat:
        """Return the chat with a function applied to the arguments of each call of a tool."""

        def convert(call: Mapping[str, Any]) -> Mapping[str, Any]:
            if isinstance(call.get("function"), Mapping):
                return {**call, "function": convert(call["function"])}
            if "arguments" not in call:
                return call
            return {**call, "arguments": function(call["arguments"])}

        messages = [
            {**message, "tool_calls": [*map(convert, message["tool_calls"])]}
            if message.get("tool_calls")
            else message
            for message in self.messages
        ]
        return replace(self, messages=messages)


class _Template(NamedTuple):
    """A compiled template, with the properties that its text shows."""

    compiled: Any
    variables: frozenset[str]
    """The variables that it reads."""
    words: frozenset[str]
    """All words of its text."""
    tests_content: bool
    """Whether it tests the content of messages for None, which other templates would print."""


class _ContentForms(NamedTuple):
    """Whether a template writes the content of messages where it is a text, and a list of parts.

    Templates of language models often print a list as Python does, or drop it; those of
    vision-language models may drop a text.
    """

    texts: bool
    parts: bool

    @classmethod
    def find(cls, write: Callable[[Sequence[Mapping[str, Any]]], str]) -> _ContentForms:
        """Find the forms by a message of the user, given a function that writes messages."""

        def writes(content: Any) -> bool:
            with suppress(TrainingError):
                text = write([{"role": "user", "content": content}])
                return _PROBE in text and not _PRINTED_PART.search(text)
            return False

        return cls(writes(_PROBE), writes([{"type": "text", "text": _PROBE}]))

    def fit(self, message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Give the content of a message the form that is written.

        Texts of parts are joined by line breaks, as by vLLM and llama.cpp.

        Raises:
          TrainingError: a part is no text, and the template takes texts alone.
        """
        content = message.get("content")
        if isinstance(content, str) and self.parts and not self.texts:
            return {**message, "content": [{"type": "text", "text": content}]}
        if not isinstance(content, list | tuple) or self.parts:
            return message
        texts: list[str] = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise TrainingError(
                    f"{where}: a message of {message.get('role')!r} has a part of type {kind!r}, "
                    "and the chat template writes texts alone"
                )
            texts.append(text)
        return {**message, "content": "\n".join(texts)}


@dataclass(frozen=True, eq=False)
class ChatTemplates:
    """The chat templates of a folder.

    Attributes:
      folder: the model's.
      special: the special tokens by their roles, like "eos_token", which templates read.
    """

    folder: ModelFolder
    special: Mapping[str, str]

    @functools.cached_property
    def _texts(self) -> dict[str, str]:
        """The templates by name, found as transformers finds them."""
        path = self.folder.path
        files = {"default": path / "chat_template.jinja"}
        files |= {file.stem: file for file in path.glob(CHAT_TEMPLATES)}
        files = {name: file for name, file in files.items() if file.is_file()}
        if files:
            with wrap_errors(f"a chat template of '{path}' cannot be read", TrainingError):
                return {name: file.read_text("utf-8") for name, file in files.items()}
        for file in ("tokenizer_config.json", "chat_template.json"):
            if template := self.folder.read_json(file).get("chat_template"):
                if isinstance(template, str):
                    return {"default": template}
                return {entry["name"]: entry["template"] for entry in template}
        return {}

    def _choose(self, variables: Mapping[str, Any]) -> _Template:
        """Return the template for a chat with these variables, as transformers chooses it.

        Raises:
          TrainingError: the folder has no template, or it is not valid.
        """
        name, texts, path = variables.get(NAME), self._texts, self.folder.path
        if name is None:
            with_tools = variables.get("tools") is not None and "tool_use" in texts
            name = "tool_use" if with_tools else "default"
        text = texts.get(name, name)
        if text is name and "{" not in str(name):
            raise TrainingError(
                f"'{path}' has no chat template {name!r}, but {', '.join(map(repr, texts))}: "
                f"choose one by the variable {NAME!r} ({{{NAME!r}: {next(iter(texts))!r}}} as "
                "chat_template_kwargs), or pass the text of a template by it"
                if texts
                else f"'{path}' has no chat template (chat_template.jinja, or in "
                "tokenizer_config.json) to write messages by: give texts, or prompt and completion"
            )
        return self._compile(text)

    @functools.cached_property
    def _compile(self) -> Callable[[str], _Template]:
        return functools.cache(self._compile_text)

    def _compile_text(self, text: str) -> _Template:
        jinja2 = import_package("jinja2")
        from jinja2 import meta, sandbox

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _generation_extension()],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            compiled, parsed = environment.from_string(text), environment.parse(text)
        except jinja2.TemplateError as error:
            raise TrainingError(
                f"the chat template of '{self.folder.path}' is not valid ({error})"
            ) from error
        variables = frozenset(meta.find_undeclared_variables(parsed))
        words = frozenset(re.findall(r"\w+", text))
        tests_content = "content" in _find_names_tested_for_none(parsed)
        return _Template(compiled, variables, words, tests_content)

    def find_unread(self, variables: Mapping[str, Any]) -> list[str]:
        """Return the variables that the template for a chat with them does not read.

        Messages and the generation prompt are not variables of a chat, but given by `render`.
        """
        names = (self._choose(variables).variables | {NAME}) - {"messages", "add_generation_prompt"}
        return [name for name, x in variables.items() if x is not None and name not in names]

    def find_unread_keys(self, chat: Chat, exempt: Collection[str]) -> list[str]:
        """Return the keys of messages, apart from `exempt`, that do not change what is written."""
        words = self._choose(chat.variables).words
        words |= {*REASONING} if words & {*REASONING} else {*REASONING[1:]}
        ignored = {*_KEYS, *words, *exempt}
        keys = dict.fromkeys(
            key
            for m in chat.messages
            for key, x in m.items()
            if x is not None and key not in ignored
        )

        def drop(key: str) -> Chat:
            messages = [{k: x for k, x in m.items() if k != key} for m in chat.messages]
            return replace(chat, messages=messages)

        return [key for key in keys if self.render(drop(key)) == self.render(chat)]

    def render(self, chat: Chat, more: bool = False) -> str:
        """Write a chat by its template, with marks around the text of `generation` blocks.

        Args:
          chat: one message at least, as some templates read the first one.
          more: whether to begin the next message of the assistant (`add_generation_prompt`).

        Raises:
          TrainingError: the template fails.
        """
        template = self._choose(chat.variables)
        raised = (import_package("jinja2").TemplateError, TypeError, ValueError, LookupError)
        variables = {"tools": None, "documents": None, **self.special, **chat.variables}
        variables.pop(NAME, None)
        if not all(isinstance(tool, Mapping) for tool in variables["tools"] or ()):
            raise TrainingError(
                f"{chat.where}: tools must be objects, JSON schemas of functions; "
                "transformers.utils.get_json_schema(function) makes one"
            )

        def write(messages: Sequence[Mapping[str, Any]], more: bool = False) -> str:
            try:
                return template.compiled.render(
                    **{**variables, "messages": messages, "add_generation_prompt": more}
                )
            except raised as error:
                raise TrainingError(f"{chat.where}: the chat template fails ({error})") from error

        forms = self._content_forms
        if template not in forms:
            forms[template] = _ContentForms.find(write)
        messages = [forms[template].fit(message, chat.where) for message in chat.messages]
        if not template.tests_content:
            messages = [
                {name: x for name, x in message.items() if name != "content" or x is not None}
                for message in messages
            ]
        return write(messages, more)

    @functools.cached_property
    def _content_forms(self) -> dict[_Template, _ContentForms]:
        """Which forms of content templates write, as far as this has been asked."""
        return {}

    def render_open(self, chat: Chat, key: str = "content") -> str:
        """Write a chat up to the end of the text of its last message, which is to be continued.

        The text of the message gets a mark and a space behind it. Where the template drops the
        space, it strips the text, whose own spaces are dropped then, as in transformers.

        Args:
          chat: one message at least.
          key: that of the text in the message.

        Raises:
          TrainingError: the message has no text, or the template fails, or does not write it.
        """
        message = chat.messages[-1]
        value = message.get(key)
        parts = [{"text": value}] if isinstance(value, str) else [*(value or ())]
        places = [i for i, part in enumerate(parts) if isinstance(part, Mapping) and "text" in part]
        if not places:
            raise TrainingError(
                f"{chat.where} ends with a message of {message['role']!r} without {key!r} to "
                "continue: add the message that follows (of 'tool', with the result of a call), "
                "or set 'continue_final_message' to False"
            )
        text = parts[places[-1]]["text"]
        parts[places[-1]] = {**parts[places[-1]], "text": f"{text}{MARK} "}
        marked = parts[0]["text"] if isinstance(value, str) else parts
        keys = REASONING if key in REASONING else (key,)
        marked = {name: marked for name in keys if message.get(name) == value}
        written, _ = take_marks(self.render(chat.until(-1, {**message, **marked})))
        before, mark, behind = written.rpartition(MARK)
        if not mark or text.strip() not in before:
            raise TrainingError(
                f"{chat.where}: the chat template does not write {key!r} of the last message, "
                f"{text.strip()!r}, as it is, so it cannot be continued: set "
                "'continue_final_message' to False, which begins another message"
            )
        return before if behind.startswith(" ") else before.rstrip()

    def fit_calls(self, chat: Chat) -> tuple[Chat, bool]:
        """Give the arguments of calls of tools the form that the template takes.

        Most templates take objects, which rows in OpenAI's format have as JSON text. Others print
        the arguments, or join them to texts: they get the text of the row, or JSON text.

        Returns:
          The chat, and whether its template writes arguments.
        """
        probe = chat.map_arguments(lambda _: {_PROBE: _PROBE + _CONTROL})
        if probe == chat:  # there are none
            return chat, True
        objects = chat.map_arguments(_parse_object)
        with suppress(TrainingError):
            text = self.render(probe)
            # a template may exchange the quotes, of JSON or of an object as Python prints it
            if str({_PROBE: _PROBE + _CONTROL}) not in text.replace('"', "'"):
                return objects, _PROBE in text
        texts = chat.map_arguments(lambda x: x if isinstance(x, str) else _to_json(x))
        with suppress(TrainingError):
            self.render(texts)
            return texts, True
        return objects, True


def take_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks of blocks from a text; return it with the spans of the parts inside."""
    plain, parts = "", []
    first, *rest = text.split(_START)
    plain = first
    for part in rest:
        inside, _, after = part.partition(_END)
        parts.append((len(plain), len(plain) + len(inside)))
        plain += inside + after
    return plain, parts


def _parse_object(arguments: Any) -> Any:
    """Return the object of a JSON text; other texts and objects as they are."""
    with suppress(ValueError, TypeError):
        value = json.loads(arguments)
        return value if isinstance(value, dict) else arguments
    return arguments


def _find_names_tested_for_none(parsed: Any) -> set[str]:
    """Return the variables and attributes that a template tests for None."""
    from jinja2 import nodes

    tested = [node.node for node in parsed.find_all(nodes.Test) if node.name == "none"]
    for node in parsed.find_all(nodes.Compare):
        if any(getattr(operand.expr, "value", 0) is None for operand in node.ops):
            tested.append(node.expr)
    names = set()
    for node in tested:
        key = getattr(node, "arg", None)
        names |= {getattr(node, "name", None), getattr(node, "attr", None)}
        names |= {getattr(key, "value", None)}
    return names


@functools.cache
def _generation_extension() -> type:
    """Return a Jinja extension that puts marks around the text of `{% generation %}` blocks."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (as the base class has it)

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def mark(self, caller):
            return _START + caller() + _END

    return Generation


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is, with transformers' arguments; Jinja's filter would escape HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise import_package("jinja2").TemplateError(message)


def import_package(name: str) -> ModuleType:
    """Import a package of the extra "text"."""
    try:
        return __import__(name)
    except ImportError as error:
        raise Error(f"texts need {name}: pip install 'jaxonnx[text]'") from error
