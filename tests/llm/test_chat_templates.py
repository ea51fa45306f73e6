"""Which template writes a chat, what it gets, and where it ends.

The texts that are expected here are those of `apply_chat_template` of transformers 5.24, with the
templates and messages of this file; where it fails, the test says so.
"""

import json
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest

import jaxonnx
from jaxonnx.llm._tokenizer import Tokenizer
from tests.support.paths import DATA
from tests.support.sources import read_texts

GENAI = DATA / "llm" / "qwen3-genai"
PLAIN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
PROMPT = "{% if add_generation_prompt %}a:{% endif %}"
TOOL_USE = (
    "T{{ tools | length }}|{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %};{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]
USER = {"role": "user", "content": "q"}


def called(arguments, content=""):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": content, "tool_calls": [call]}]


CALLED = called({"a": 1})


@pytest.fixture(scope="module")
def home():
    return jaxonnx.load(GENAI).folder


@pytest.fixture
def write(tmp_path, home):
    """A function that writes a folder with templates and returns its tokenizer."""

    def write(template=None, files=(), model=False):
        path = tmp_path / "model"
        if model:
            shutil.copytree(GENAI, path, dirs_exist_ok=True)
            (path / "chat_template.jinja").unlink()
        path.mkdir(exist_ok=True)
        shutil.copy(GENAI / "tokenizer.json", path)
        settings = {"eos_token": "<|im_end|>", "chat_template": template}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        for name, text in dict(files).items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(text)
        return Tokenizer(replace(home, path=path))

    return write


def name_templates(**texts):
    return [{"name": name, "template": text} for name, text in texts.items()]


IN_FILES = {
    "chat_template.jinja": PLAIN,
    "additional_chat_templates/tool_use.jinja": TOOL_USE,
    "additional_chat_templates/rag.jinja": "R" + PLAIN,
}


@pytest.mark.parametrize(
    "templates",
    [
        (name_templates(default=PLAIN, tool_use=TOOL_USE, rag="R" + PLAIN), {}),
        (None, IN_FILES),
        (name_templates(default="not read", tool_use="nor this"), IN_FILES),
    ],
    ids=["list", "files", "files before a list"],
)
def test_templates_have_names(write, templates):
    """`tool_use` writes chats with tools, also with none of them; a name or a text, any chat."""
    apply = write(*templates).apply_chat_template
    tools = 'T1|u:q;a:{"name": "f", "arguments": {"a": 1}};'
    assert apply(CALLED, tools=TOOLS, tokenize=False) == tools
    assert apply(CALLED, tools=[], tokenize=False) == "T0" + tools[2:]
    assert apply([USER], tokenize=False) == "u:q;"
    assert apply([USER], tokenize=False, chat_template="rag") == "Ru:q;"
    with pytest.warns(UserWarning, match="does not read: tools"):
        assert apply([USER], tokenize=False, tools=TOOLS, chat_template="default") == "u:q;"
    assert apply([USER], tokenize=False, chat_template="{{ messages | length }}") == "1"


def test_a_template_that_is_not_chosen_is_refused_by_names(write):
    tokenizer = write(name_templates(tool_use=TOOL_USE, rag="R" + PLAIN))
    with pytest.raises(jaxonnx.TrainingError, match="no chat template 'default', but 'tool_use',"):
        tokenizer.apply_chat_template([USER])
    assert tokenizer.apply_chat_template([USER], chat_template="rag", tokenize=False) == "Ru:q;"
    assert tokenizer.apply_chat_template([USER], tools=TOOLS, tokenize=False) == "T1|u:q;"
    with pytest.raises(jaxonnx.TrainingError, match="no chat template 'rags', but"):
        tokenizer.apply_chat_template([USER], chat_template="rags")
    with pytest.raises(jaxonnx.TrainingError, match="no chat template 'tool_use', but 'default'"):
        write(PLAIN).apply_chat_template([USER], chat_template="tool_use")
    with pytest.raises(jaxonnx.TrainingError, match=r"has no chat template \(chat_template"):
        write().apply_chat_template([USER], chat_template="tool_use")


def read(model, *rows, data=None):
    """Return the texts of rows, as [text, text that counts], and the notes."""
    made = read_texts(model, data or [*rows])
    decode = model.tokenizer.decode
    pairs = zip(made.data["input_ids"], made.data["labels"], strict=True)
    return [[decode(ids), decode(labels[labels >= 0])] for ids, labels in pairs], made.notes


def test_rows_and_generation_choose_as_the_tokenizer_does(write):
    templates = name_templates(default=PLAIN + PROMPT, tool_use=TOOL_USE + PROMPT)
    model = jaxonnx.load(write(templates, model=True).folder.path)
    written = '{"name": "f", "arguments": {"a": 1}};<|im_end|>'
    row = {"messages": CALLED, "tools": TOOLS}
    assert read(model, row)[0] == [["T1|u:q;a:" + written, written]]
    default = {**row, "chat_template_kwargs": {"chat_template": "default"}}
    rows, notes = read(model, default)
    assert rows == [["u:q;a:;<|im_end|>", ";<|im_end|>"]]
    assert "columns that nothing reads: 'tools'" in notes
    assert "chats with calls of tools whose arguments the chat template does not write: 1" in notes
    fixed = {"messages": [USER, {"role": "assistant", "content": "b"}]}
    fixed["chat_template_kwargs"] = {"add_generation_prompt": False}
    assert "columns that nothing reads: 'add_generation_prompt'" in read(model, fixed)[1]
    settings = {"loss": "causal_lm", "epochs": 1, "batch_size": 1}
    assert "T1|u:q;a:⟦{" in str(jaxonnx.training.preview(model, [row], **settings))
    for more, text in (({"tools": TOOLS}, "T1|u:q;a:"), ({}, "u:q;a:")):
        ids = model.tokenizer.encode(text, special=False)
        expected = model.tokenizer.decode(model.generate(ids, max_new_tokens=4)[len(ids) :])
        assert model.generate([USER], max_new_tokens=4, chat_template_kwargs=more) == expected
    with pytest.raises(jaxonnx.InputError, match="tokenize: not a variable of chat templates"):
        model.generate([USER], max_new_tokens=1, chat_template_kwargs={"tokenize": False})


HEAD = "<|im_start|>assistant\n"
OPEN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TRIMMED = OPEN.replace("{{ m.content }}", "{{ m.content | trim }}")
PARTS = OPEN.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
THOUGHTS = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}.{% endfor %}"
BLOCKS = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message", "key", "expected"),
    [
        (OPEN, {"content": "is mut "}, True, HEAD + "is mut "),
        (OPEN, {"content": ""}, True, HEAD),
        (TRIMMED, {"content": "is mut \n"}, True, HEAD + "is mut"),
        (TRIMMED, {"content": " is mut"}, True, HEAD + "is mut"),
        (BLOCKS, {"content": "is mut"}, True, "is mut"),
        (
            PARTS,
            {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "is "}]},
            True,
            HEAD + "ais ",
        ),
        (THOUGHTS, {"content": "x", "reasoning_content": "hm"}, "reasoning_content", "[hm"),
        (THOUGHTS, {"content": "x", "thinking": "hm"}, "reasoning_content", "[hm"),
        (THOUGHTS, {"content": "x", "reasoning": "hm"}, True, "[hm]x"),
    ],
)
def test_the_last_message_stays_open(write, template, message, key, expected):
    chat = [{"role": "assistant", **message}]
    apply = write(template).apply_chat_template
    assert apply(chat, tokenize=False, continue_final_message=key) == expected


def test_messages_that_cannot_be_continued_are_refused(write):
    """As by transformers, also what the template does not write as it is."""
    apply = write(OPEN).apply_chat_template
    with pytest.raises(jaxonnx.TrainingError, match="a message of 'assistant' without 'content'"):
        apply([{"role": "assistant", "content": None}], continue_final_message=True)
    with pytest.raises(jaxonnx.TrainingError, match="without 'reasoning_content' to continue"):
        apply([USER], continue_final_message="reasoning_content")
    thought = [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]
    with pytest.raises(jaxonnx.TrainingError, match="does not write 'reasoning_content' of the"):
        apply(thought, continue_final_message="reasoning_content")
    cut = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    with pytest.raises(jaxonnx.TrainingError, match="does not write 'content' of the last message"):
        write(cut).apply_chat_template(
            [{"role": "assistant", "content": "a</think>b"}], continue_final_message=True
        )
    with pytest.raises(jaxonnx.InputError, match="exclude each other"):
        apply([USER], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(jaxonnx.InputError, match="of at least one, got"):
        apply([])


def test_arguments_that_nothing_reads_are_named(write):
    apply = write(OPEN).apply_chat_template
    with pytest.warns(UserWarning, match="template does not read: enable_thinkin, tools"):
        apply([USER], enable_thinkin=False, tools=TOOLS)
    with pytest.raises(jaxonnx.InputError, match="max_length, truncation: apply_chat_template"):
        apply([USER], max_length=3, truncation=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply([USER], tools=None, return_tensors=None, padding=False, return_dict=False)
        reading = write("{{ max_length }}").apply_chat_template
        assert reading([USER], max_length=3, tokenize=False) == "3"
    with pytest.warns(UserWarning, match="does not write the arguments of calls"):
        apply(CALLED)


def test_generation_continues_the_assistant():
    """As transformers' pipelines do, unless the next message is asked for."""
    model = jaxonnx.load(GENAI)
    chat = [{"role": "user", "content": "a list"}, {"role": "assistant", "content": "is mut"}]
    count = {"max_new_tokens": 6}
    head = "<|im_start|>user\na list<|im_end|>\n<|im_start|>assistant\nis mut"
    texts = []
    for text in (head, head + "<|im_end|>\n<|im_start|>assistant\n"):
        ids = model.tokenizer.encode(text, special=False)
        texts.append(model.tokenizer.decode(model.generate(ids, **count)[len(ids) :]))
    assert texts[0] != texts[1]
    assert model.generate(chat, **count) == texts[0]
    shared = [{"from": "human", "value": "a list"}, {"from": "gpt", "value": "is mut"}]
    assert model.generate(shared, **count) == texts[0]
    assert "".join(model.generate(chat, stream=True, **count)) == texts[0]
    for more in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert model.generate(chat, chat_template_kwargs=more, **count) == texts[1]
    with pytest.raises(jaxonnx.TrainingError, match="'assistant' without 'content' to continue"):
        model.generate([{"role": "assistant", "content": None}], **count)


def around(arguments):
    """A template that writes the arguments of calls by an expression."""
    return (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        f"{{{{ {arguments} }}}}{{% endfor %}};{{% endfor %}}"
    )


OBJECT = {"a": 1, "b": None, "c": "é<x>"}
TEXT = '{"a":1,  "b":null, "c":"\\u00e9<x>"}'
JSON = '{"a": 1, "b": null, "c": "é<x>"}'


@pytest.mark.parametrize(
    ("expression", "of_object", "of_text"),
    [
        # transformers writes the text as JSON once more, a string
        ("c.function.arguments | tojson", JSON, JSON),
        # it fails with objects: 'can only concatenate str (not "dict") to str'
        ("'```' + c['function']['arguments']", "```" + JSON, "```" + TEXT),
        # it writes Python's repr of objects
        ("c.function.arguments", JSON, TEXT),
        ("'(' ~ c.function.arguments ~ ')'", f"({JSON})", f"({TEXT})"),
        # transformers writes objects like this, and puts the text into quotes
        (
            """c.function.arguments | tojson | replace('"', "'")""",
            JSON.replace('"', "'"),
            JSON.replace('"', "'"),
        ),
        (
            """c.function.arguments | tojson(ensure_ascii=True) | replace('"', "'")""",
            JSON.replace('"', "'").replace("é", "\\u00e9"),
            JSON.replace('"', "'").replace("é", "\\u00e9"),
        ),
        # it writes None, which is no JSON, for null in objects
        ("""c.function.arguments | string | replace("'", '"')""", JSON, TEXT),
        # it fails with texts: 'str object' has no attribute 'items'
        ("c.function.arguments.items() | map('first') | join", "abc", "abc"),
        (
            "c.function.arguments if c.function.arguments is string"
            " else c.function.arguments | tojson",
            JSON,
            JSON,
        ),
    ],
)
def test_arguments_have_the_form_that_the_template_takes(write, expression, of_object, of_text):
    apply = write(around(expression)).apply_chat_template
    assert apply(called(OBJECT), tokenize=False) == f"q;{of_object};"
    assert apply(called(TEXT), tokenize=False) == f"q;{of_text};"
    old = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": TEXT}}
    assert apply([USER, old], tokenize=False) == f"q;{of_text};"


def test_quotes_around_a_part_are_no_printed_list(write):
    template = """{% for m in messages %}{% for c in m['content'] %}'{{ c.text }}'{% endfor %}
{%- endfor %}"""
    apply = write(template).apply_chat_template
    for content in ("q", [{"type": "text", "text": "q"}]):
        assert apply([{"role": "user", "content": content}], tokenize=False) == "'q'"


FORMS = {
    # transformers prints lists by this template, as Python does
    "texts": PLAIN,
    # it fails with lists: 'can only concatenate str (not "list") to str'
    "sums": "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}",
    # it drops lists (Qwen3)
    "tested": "{% for m in messages %}{% set c = m.content if m.content is string else '' %}"
    "{{ m.role[0] }}:{{ c }};{% endfor %}",
    # it drops texts (LLaVA)
    "parts": "{% for m in messages %}{{ m.role[0] }}:{% for c in m['content'] | "
    "selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %};{% endfor %}",
    "both": "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %};{% endfor %}",
}


@pytest.mark.parametrize("form", FORMS)
def test_content_has_the_form_that_the_template_writes(write, form):
    tokenizer = write(FORMS[form] + PROMPT, model=True)
    model = jaxonnx.load(tokenizer.folder.path)
    apply = tokenizer.apply_chat_template
    texts = [USER, {"role": "assistant", "content": "b"}]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in texts]
    for chat in (texts, parts, [texts[0], parts[1]], [parts[0], texts[1]]):
        assert apply(chat, tokenize=False) == "u:q;a:b;"
        assert apply(chat, tokenize=False, continue_final_message=True) == "u:q;a:b"
        assert read(model, {"messages": chat})[0] == [["u:q;a:b;<|im_end|>", "b;<|im_end|>"]]
    two = [{**USER, "content": [{"type": "text", "text": text} for text in "xy"]}]
    joined = "x\ny" if form in ("texts", "sums", "tested") else "xy"  # as vLLM and llama.cpp do
    assert apply(two, tokenize=False) == f"u:{joined};"
    image = [{**USER, "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
    if form in ("parts", "both"):
        assert apply(image, tokenize=False) == "u:x;"
        return
    with pytest.raises(jaxonnx.TrainingError, match="message of 'user' has a part of type 'image'"):
        apply(image, tokenize=False)


DEEPSEEK = """{% for m in messages %}{% if m['role'] == 'user' %}U{{ m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}A{% for call in m['tool_calls'] %}
{{- call['function']['name'] + '\njson\n' + call['function']['arguments'] + '\n' }}
{%- endfor %}E{% endif %}{% if m['role'] == 'assistant' and m['content'] is not none %}A
{{- m['content'] + 'E' }}{% endif %}{% endfor %}"""
"""As DeepSeek V3's, which writes calls where the content is null."""


def test_calls_without_content(write):
    """Null is left out where a template would print it, and given where it tests for it.

    transformers 5 leaves it out always, and DeepSeek's template fails then; older versions printed
    "None" by other templates.
    """
    chat = called('{"a":1}', None)
    template = around("c.function.arguments | tojson")
    assert write(template).apply_chat_template(chat, tokenize=False) == 'q;{"a": 1};'
    deepseek = write(DEEPSEEK)
    expected = 'UqAf\njson\n{"a":1}\nE'
    assert deepseek.apply_chat_template(chat, tokenize=False) == expected
    model = jaxonnx.load(write(DEEPSEEK, model=True).folder.path)
    (row,), _ = read(model, {"messages": chat})
    counted = expected.removeprefix("Uq") + "<|im_end|>"
    assert row == ["Uq" + counted, counted]


def test_nulls_are_the_rows_own(write, tmp_path):
    """Those of Arrow are not: it gives all structs the same keys."""
    template = "{{ tools | tojson }}" + around("c.function.arguments | tojson")
    model = jaxonnx.load(write(template, model=True).folder.path)
    tools = [{"name": "f", "default": None}]
    rows = [{"messages": called(x), "tools": tools} for x in ({"a": None}, {"b": 1})]
    texts = [
        f'[{{"name": "f", "default": null}}]q;{x};<|im_end|>' for x in ('{"a": null}', '{"b": 1}')
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for data in (rows, tmp_path / "rows.jsonl"):
        assert [text for text, _ in read(model, data=data)[0]] == texts
    import pyarrow.parquet as parquet

    table = __import__("pyarrow").Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet")
    filled = [text for text, _ in read(model, data=tmp_path / "rows.parquet")[0]]
    assert filled == [f'[{{"name": "f"}}]q;{x};<|im_end|>' for x in ("{}", '{"b": 1}')]


def test_calls_that_are_no_objects_are_refused(write):
    tokenizer = write(PLAIN)
    for calls in ("[1]", [1], 3):
        chat = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
        with pytest.raises(jaxonnx.TrainingError, match="tool_calls must be a list of objects"):
            tokenizer.apply_chat_template(chat)
    with pytest.raises(jaxonnx.TrainingError, match="tools must be objects"):
        write("{{ tools }}").apply_chat_template([USER], tools=[print])
    np.testing.assert_equal(tokenizer.apply_chat_template([USER]).ndim, 1)


@pytest.mark.parametrize(
    ("settings", "mapped", "expected"),
    [
        ({"eos_token": "b", "extra_special_tokens": {"image_token": "i"}}, {}, "|b|i"),
        ({}, {"eos_token": {"content": "b", "special": True}, "bos_token": "a"}, "a|b|"),
        ({"eos_token": "c"}, {"eos_token": "b"}, "|b|"),
        ({"added_tokens_decoder": {}}, {"eos_token": "b"}, "||"),
    ],
)
def test_templates_read_special_tokens(write, settings, mapped, expected):
    """From the files that transformers reads them from."""
    template = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}"
    files = {
        "tokenizer_config.json": json.dumps({**settings, "chat_template": template}),
        "special_tokens_map.json": json.dumps(mapped),
    }
    assert write(files=files).apply_chat_template([USER], tokenize=False) == expected
