"""Special tokens, chat templates and columns of texts, in the structure of published templates."""

import json
import shutil

import numpy as np
import optax
import pytest
import tokenizers

import jaxonnx
from jaxonnx.llm._tokenizer import Tokenizer
from tests.support.paths import DATA
from tests.support.sources import read_texts

GENAI = DATA / "llm" / "qwen3-genai"
BEGIN, END = "<|endoftext|>", "<|im_end|>"  # tokens 0 and 2
HELLO = [99, 72, 155]


@pytest.fixture
def folder(tmp_path):
    """A function that writes a model's folder with a template and a post-processor."""

    def write(template=None, post=None, settings=(), tokens=(), ends=()):
        path = shutil.copytree(GENAI, tmp_path / "model", dirs_exist_ok=True)
        if template is not None:
            (path / "chat_template.jinja").write_text(template)
        tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.add_special_tokens([*tokens])
        if post is not None:
            tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single=post, special_tokens=[(BEGIN, 0), (END, 2)]
            )
        tokenizer.save(str(path / "tokenizer.json"))
        if ends:
            genai = json.loads((path / "genai_config.json").read_text())
            genai["model"]["eos_token_id"] = [tokenizer.token_to_id(name) for name in ends]
            (path / "genai_config.json").write_text(json.dumps(genai))
        config = json.loads((path / "tokenizer_config.json").read_text()) | dict(settings)
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        return path

    return write


def read(folder, *rows, **preprocess):
    """Return the tokens and labels of rows, as [text, text that counts], and the notes."""
    model = jaxonnx.load(folder)
    columns, _, notes = read_texts(model, [*rows], preprocess)
    decode = Tokenizer(model.folder).decode
    pairs = zip(columns["input_ids"], columns["labels"], strict=True)
    return [[decode(ids), decode(labels[labels >= 0])] for ids, labels in pairs], notes


@pytest.mark.parametrize("post", [f"{BEGIN} $A", f"{BEGIN} $A {END}", "$A"])
@pytest.mark.parametrize("text", ["hello", f"{BEGIN}hello", f"{BEGIN}hello{END}", f"hello{END}"])
def test_a_text_has_one_begin_and_one_end(folder, post, text):
    """Written by the text, or else by the post-processor, or else appended."""
    path = folder(post=post)
    begins = BEGIN in post or BEGIN in text
    ids = [0] * begins + [*HELLO, 2]
    model = jaxonnx.load(path)
    for row in ({"text": text}, {"prompt": text[:-12], "completion": text[-12:]}):
        columns, *_ = read_texts(model, [row])
        assert columns["input_ids"][0].tolist() == ids


def test_special_tokens_that_take_spaces_are_not_of_the_answer(folder):
    """Phi-3's tokens of roles take spaces behind them, here the first ones of the answer."""
    template = (
        "{% for m in messages %}{{ '^\n' if m.role == 'assistant' }}{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}^\n{% endif %}"
    )
    path = folder(template, tokens=[tokenizers.AddedToken("^", rstrip=True)])
    chats = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}
        for answer in ("yes", " yes", "\n\nyes")
    ]
    pairs, _ = read(path, *chats)
    assert [counted for _, counted in pairs] == [f"yes{END}"] * 3
    (pair,), _ = read(path, {"prompt": "q ^", "completion": " yes"})
    assert pair[1] == f"yes{END}"


def test_begin_and_end_are_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    path = folder(post=f"{BEGIN} $A {END}")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    assert theirs("hello")["input_ids"] == [0, *HELLO, 2]


def test_a_rendered_chat_has_one_begin_and_its_own_end(folder):
    path = folder(post=f"{BEGIN} $A {END}")
    text = f"{BEGIN}<|im_start|>user\na{END}\n<|im_start|>assistant\nb{END}\n"
    assert read(path, {"text": text}) == ([[text, text]], [])


def test_chats_begin_as_the_template_does(folder):
    """As in `apply_chat_template(tokenize=True)#, without what the post-processor adds."""
    turns = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for begin in ("", "{{ bos_token }}"):
        path = folder(begin + turns, f"{BEGIN} $A {END}", {"bos_token": BEGIN})
        ((text, _),), _ = read(path, {"messages": chat})
        assert text == f"{BEGIN * bool(begin)}<|im_start|>a{END}<|im_start|>b{END}"


def test_samples_continue_before_the_end_of_the_post_processor(folder, capsys):
    path = folder(post=f"{BEGIN} $A {END}")
    settings = {"loss": "causal_lm", "optimizer": optax.sgd(0.0), "epochs": 1, "progress": False}
    jaxonnx.train(path, [{"text": "hello"}] * 2, samples=["hello", [0, *HELLO], ""], **settings)
    texts, tokens, empty = (line[10:] for line in capsys.readouterr().out.splitlines()[-3:])
    assert texts == tokens
    assert texts.startswith(f"{BEGIN}hello")
    assert empty.startswith(BEGIN)
    assert not empty.startswith(BEGIN + END)


USER, ASSISTANT, TOOL = "~", "^", "#"  # tokens of the vocabulary, as marks of roles
CHAT = [
    {"role": "user", "content": "abc"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "no"},
]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
MARKED = """{% for m in messages %}{% if m.role == 'user' %}~{{ m.content }}
{%- elif m.role == 'tool' %}#{{ m.content }}
{%- else %}^{{ m.content }}
{%- for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor %}
{%- endif %}{% endfor %}{% if add_generation_prompt %}^{% endif %}"""
"""As GLM's: a message is ended by the mark of the next role."""
GENERATION = """{% for m in messages %}{% if m.role == 'assistant' %}^{% generation %}
{{- m.content }}{% endgeneration %}{{ 'END' }}
{%- else %}~{{ m.content }}{{ 'END' }}{% endif %}{% endfor %}"""
"""Blocks without the end of the message."""
THINKING = """{% if messages[0].role == 'system' %}
{{- '<|im_start|>system ' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}
{% set text = m.content.split('</think>')[-1] %}{% set thought = m.content.split('</think>')[:-1] %}
{% if m.role == 'assistant' and loop.index0 > ns.last and loop.last %}
{{- '<|im_start|>assistant <think>' + thought | join + '</think>' + text + '<|im_end|>\n' }}
{%- elif m.role != 'system' or not loop.first %}
{{- '<|im_start|>' + m.role + ' ' + text + '<|im_end|>\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"""
"""As Qwen3's: thoughts, or an empty one, in the last message only."""


def test_the_mark_of_the_next_role_ends_a_message(folder):
    """As in TRL's training templates for GLM, which count that mark, and write it at the end."""
    path = folder(MARKED, tokens=(USER, ASSISTANT, TOOL), ends=(BEGIN, USER, TOOL))
    config = {"eos_token": BEGIN}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    rows, notes = read(path, {"messages": CHAT})
    assert rows == [["~abc^yes~q^no~", "yes~no~"]]
    assert notes[0].startswith("messages of the assistant without an end token directly behind")
    called = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    rows, _ = read(
        path, {"messages": called}, {"messages": [*called, {"role": "tool", "content": "1"}]}
    )
    assert rows == [["~abc^(f)#", "(f)#"], ["~abc^(f)#1", "(f)#"]]
    rows, _ = read(path, {"messages": CHAT}, loss="all")
    assert rows == [["~abc^yes~q^no~"] * 2]


@pytest.mark.parametrize("end", ["", END, f"\n{END}\n"])
def test_ends_behind_generation_blocks_count(folder, end):
    """Where the template writes none, it is a label: the text stays as the template writes it."""
    template = GENERATION.replace("END", end.replace("\n", "\\n"))
    path = folder(template, tokens=(USER, ASSISTANT))
    rows, notes = read(path, {"messages": CHAT})
    text = f"~abc{end}^yes{end}~q{end}^no{end}"
    assert rows == [[text if end else text + END, f"yes{END}no{END}"]]
    if end != END:
        assert notes == [
            "messages of the assistant without an end token directly behind them in the chat "
            "template: 2; it is the label there, or appended to the chat"
        ]
    rows, _ = read(path, {"messages": CHAT[:3]})
    assert rows == [[f"~abc{end}^yes{end}~q{end}", f"yes{END}"]]


def test_empty_answers_are_noted(folder):
    """They are labels, as in TRL: the end token at once."""
    empty = [*CHAT[:3], {"role": "assistant", "content": ""}]
    rows, notes = read(folder(), {"messages": empty}, {"messages": CHAT})
    assert rows[0][1] == f"yes{END}\n{END}\n"
    assert notes == [
        "messages of the assistant that are empty: 1; they teach to end at once, unless they have "
        '"weight": 0'
    ]
    left_out = {"role": "assistant", "content": "", "weight": 0}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for last in (left_out, called):
        _, notes = read(folder(), {"messages": [*CHAT[:3], last]})
        assert not any("are empty" in note for note in notes)


def test_an_unknown_end_is_noted(folder):
    path = folder(ends=(), settings={"eos_token": None})
    (path / "genai_config.json").write_text(
        (path / "genai_config.json").read_text().replace('"eos_token_id": 2,', "")
    )
    rows, notes = read(path, {"text": "hello"})
    assert rows == [["hello", "hello"]]
    assert notes[0].startswith("the end of texts is not learned: the folder names no end token (")


def test_an_end_at_which_runtimes_go_on_is_noted(folder):
    rows, notes = read(folder(ends=[BEGIN]), {"text": "hello"})
    assert rows == [["hello" + END] * 2]
    assert notes == [
        "texts end with the tokenizer's end token [2], at which runtimes do not stop: add it to "
        "eos_token_id in generation_config.json or genai_config.json"
    ]
    assert read(folder(ends=[BEGIN, END]), {"text": "hello"})[1] == []


def test_messages_that_history_changes_are_examples_of_their_own(folder):
    """Each as the runtime writes it when it is the last one."""
    path = folder(THINKING)
    thought = [*CHAT[:3], {"role": "assistant", "content": "so</think>no"}]
    head = "<|im_start|>user abc<|im_end|>\n<|im_start|>assistant "
    first = "<think></think>yes<|im_end|>\n"
    last = "<think>so</think>no<|im_end|>\n"
    between = "yes<|im_end|>\n<|im_start|>user q<|im_end|>\n<|im_start|>assistant "
    expected = [[head + between + last, last], [head + first, first]]
    rows, notes = read(path, {"messages": thought})
    assert rows == expected
    note = (
        "messages of the assistant in examples of their own: 1, with those before, as the chat "
        "template writes them, or what they answer, differently when others follow (number 1 of 1 "
        "chat); the others are in whole chats"
    )
    assert notes == [note]
    # the message that changes is the only one to learn
    assert read(path, {"messages": CHAT[:3]})[0] == [[head + first, first]]
    # all tokens are those of the whole chat
    assert read(path, {"messages": thought}, loss="all") == ([[head + between + last] * 2], [])
    settings = {"loss": "causal_lm", "optimizer": optax.sgd(0.0), "epochs": 1, "progress": False}
    result = jaxonnx.train(path, [{"messages": thought}], **settings)
    assert note in result.history.notes


def test_the_assistant_may_begin(folder):
    """With a template that reads `messages[0]`, and so is called with a message always."""
    path = folder(THINKING)
    rows, _ = read(path, {"messages": CHAT[1:]})
    assert rows[0][0].startswith("<|im_start|>assistant yes<|im_end|>\n<|im_start|>user q")
    rows, _ = read(path, {"messages": [{"role": "system", "content": "s"}, *CHAT[1:]]})
    assert rows[0][1] == "<think></think>no<|im_end|>\n"
    head = "<|im_start|>system s<|im_end|>\n<|im_start|>assistant "
    assert rows[1] == [f"{head}<think></think>yes<|im_end|>\n", "<think></think>yes<|im_end|>\n"]


def test_chats_are_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    for template in (THINKING, MARKED, GENERATION.replace("END", END)):
        path = folder(template, tokens=(USER, ASSISTANT, TOOL))
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
        theirs.chat_template = template
        rows, _ = read(path, {"messages": CHAT})
        texts = [theirs.apply_chat_template(CHAT[:n], tokenize=False) for n in (4, 2)]
        if template is not THINKING:
            texts = [texts[0] + END * (template is MARKED)]
        assert [text for text, _ in rows] == texts


TOOLS = [{"type": "function", "function": {"name": "f", "description": "x"}}]
READING = """{% if tools %}{{ tools | tojson }}|{% endif %}{% if shouting %}!{% endif %}
{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"""
"""Reads tools and a variable of its own, and no documents."""


def test_the_template_reads_tools_and_variables(folder):
    """What it does not read, nothing does: the notes name it once."""
    path = folder(READING)
    text = "".join(f"<|im_start|>{m['role']} {m['content']}<|im_end|>" for m in CHAT[:2])
    listed = {"tools": TOOLS, "documents": [{"text": "d"}], "chat_template_kwargs": {"shouting": 1}}
    rows, notes = read(
        path,
        {"messages": CHAT[:2], "id": 3, **listed},
        {"messages": CHAT[:2], "id": 4, "tools": json.dumps(TOOLS), "source": None},
        {"messages": CHAT[:2], "chat_template_kwargs": {"louder": True}},
    )
    tools = json.dumps(TOOLS, ensure_ascii=False) + "|"
    assert [row[0] for row in rows] == [f"{tools}!{text}", tools + text, text]
    assert notes == ["columns that nothing reads: 'documents', 'id', 'louder'"]
    for wrong in ({"tools": "f(x)"}, {"chat_template_kwargs": "loud"}):
        with pytest.raises(jaxonnx.TrainingError, match="example 1 of data: tools and documents"):
            read(path, {"messages": CHAT}, {"messages": CHAT, **wrong})


def test_tools_are_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    path = folder(READING)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    theirs.chat_template = READING
    text = theirs.apply_chat_template(CHAT, tools=TOOLS, shouting=True, tokenize=False)
    row = {"messages": CHAT, "tools": TOOLS, "chat_template_kwargs": {"shouting": True}}
    assert read(path, row)[0][0][0] == text


@pytest.mark.parametrize("template", [None, GENERATION])
def test_messages_of_weight_zero_do_not_count(folder, template):
    """As in OpenAI's format; whether the template has blocks or not."""
    path = folder(template, tokens=(USER, ASSISTANT) if template else ())
    bad, good = ({**CHAT[1], "weight": 0}, {**CHAT[3], "weight": 1})
    for chat, counted in (([bad, good], "no"), ([CHAT[1], {**good, "weight": 0}], "yes")):
        row = {"messages": [CHAT[0], chat[0], CHAT[2], chat[1]]}
        ((_, text),), _ = read(path, row)
        assert text.startswith(counted)
        assert "yes" not in text or "no" not in text
        ((_, text),), _ = read(path, row, loss="all")
        assert counted in text
        assert ("yes" in text) + ("no" in text) == 1
        assert "abc" in text
    # the messages of a prompt do not count either, in blocks as elsewhere
    ((_, text),), _ = read(path, {"prompt": CHAT[:3], "completion": CHAT[3:]})
    assert "yes" not in text
    with pytest.raises(jaxonnx.TrainingError, match="weight of message 2 must be 0 or 1, got 2"):
        read(path, {"messages": [CHAT[0], {**CHAT[1], "weight": 2}]})
    with pytest.raises(jaxonnx.TrainingError, match=r"example 0 .* has no message of the assist"):
        read(path, {"messages": [CHAT[0], bad]})


def test_keys_of_messages_that_nothing_reads_are_named(folder):
    """Marks of axolotl and others that a message is not to be learned are none here."""
    plain = "{% for m in messages %}{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    chat = [CHAT[0], {**CHAT[1], "train": False, "name": "b"}]
    rows, notes = read(folder(plain), *[{"messages": chat}] * 2)
    assert rows == read(folder(plain), *[{"messages": CHAT[:2]}] * 2)[0]
    assert notes == [
        "keys of messages that nothing reads: 'train', 'name'; a message that is not to be learned "
        'has "weight" 0'
    ]
    printing = "{% for m in messages %}{{ m.role }} {{ m | tojson }}<|im_end|>{% endfor %}"
    assert read(folder(printing), {"messages": chat})[1] == []
    thoughts = [CHAT[0], {**CHAT[1], "thinking": "x"}]
    (note,) = read(folder(plain), {"messages": thoughts})[1]
    assert note.startswith("keys of messages that nothing reads: 'reasoning_content';")
    reading = plain.replace("content }}", "content }}{{ m.thinking or '' }}")
    assert read(folder(reading), {"messages": thoughts})[1] == []


def test_a_prompt_beside_messages_is_not_read(folder):
    """As in a data set with "prompt", its first message, and "messages"."""
    rows, notes = read(folder(), {"messages": CHAT, "prompt": "abc", "text": "abc"})
    assert rows == read(folder(), {"messages": CHAT})[0]
    assert notes == ["columns that nothing reads: 'prompt', 'text'"]


@pytest.mark.deep
def test_weights_of_texts_are_weights_of_examples(folder):
    """The loss is the weighted mean over tokens, as it is with arrays."""
    path = folder()
    settings = {"loss": "causal_lm", "optimizer": optax.sgd(0.0), "epochs": 1, "seed": 0}
    rows = [
        {"text": "a list", "weight": 3},
        {"text": "a tuple is immutable", "weight": 0.5},
        {"text": "of", "weight": None},
    ]
    weights = [3.0, 0.5, 1.0]
    columns, *_ = read_texts(jaxonnx.load(path), rows)
    assert columns["weight"] == weights
    losses = [
        jaxonnx.evaluate(path, [{"text": row["text"]}], loss="causal_lm")["loss"] for row in rows
    ]
    counts = [len(labels) - 1 for labels in columns["labels"]]
    expected = np.average(losses, weights=np.multiply(weights, counts))
    result = jaxonnx.train(path, rows, batch_size=3, progress=False, **settings)
    assert result.history.losses == [pytest.approx(expected, rel=1e-5)]
    assert jaxonnx.evaluate(path, rows, loss="causal_lm")["loss"] == pytest.approx(
        expected, rel=1e-5
    )
    for wrong in (-1, "heavy", float("nan")):
        with pytest.raises(jaxonnx.TrainingError, match=r"example 1 .* weight must be a number"):
            read(path, rows[0], {"text": "of", "weight": wrong})
    with pytest.raises(jaxonnx.TrainingError, match=r"example 0 .* has the weight 3, and prepro"):
        read(path, *rows, pack=True)


def test_a_byte_order_mark_is_no_part_of_a_text(folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "hello"}), "utf-8-sig")
    columns, *_ = read_texts(jaxonnx.load(folder()), path)
    assert columns["input_ids"][0].tolist() == [*HELLO, 2]
