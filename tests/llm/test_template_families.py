"""Chat templates with the structure of ten published families: what counts, and what stops.

The templates are written here, each with what is special of its family. What counts is the message
of the assistant and the token that ends it, in a text that the template writes when this message is
the last one, or in the middle of a chat.
"""

import json
import re
import shutil

import numpy as np
import pytest
import tokenizers

import jaxonnx
from jaxonnx.llm import _texts as texts
from tests.support.paths import DATA
from tests.support.sources import read_texts

GENAI = DATA / "llm" / "qwen3-genai"
QWEN2_5 = """{%- if tools %}<|im_start|>system
tools{% for tool in tools %}{{ "\\n" + (tool | tojson) }}{% endfor %}<|im_end|>
{% elif messages[0].role != 'system' %}<|im_start|>system
helpful<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool>{{ m.content }}</tool><|im_end|>
{% elif m.tool_calls %}<|im_start|>assistant{% for call in m.tool_calls %}{{ '\n' }}
{{- '<call>' }}{{ call.function | tojson }}</call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN3 = """{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}
{%- set text = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- if m.role == 'assistant' and loop.index0 > ns.last and loop.last %}<|im_start|>assistant
<think>
{{ thought if '</think>' in m.content else '' }}
</think>

{{ text }}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ text }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
LLAMA3 = """{{ bos_token }}<|start_header_id|>system<|end_header_id|>

Today: {{ strftime_now("%Y") | length }} digits<|eot_id|>{% for m in messages %}
{%- set head = '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' %}
{{- head + m.content | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA3 = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif %}<start_of_turn>
{{- 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
PHI = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %} {{ m.content + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""
SMOLLM3 = """<|im_start|>system
{{ '/no_think' if enable_thinking is defined and not enable_thinking else '/think' }}<|im_end|>
{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content.lstrip('\\n') + '<|im_end|>' }}{% endgeneration %}
{{ '' }}
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GLM = """[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'tool' %}<|observation|>
{{ m.content }}{% else %}<|assistant|>
<think></think>
{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
HARMONY = """<|start|>system<|message|>{{ strftime_now("%Y-%m-%d") | length }}<|end|>
{%- for m in messages %}{% if m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
GRANITE = """<|start_of_role|>system<|end_of_role|>
{{- strftime_now('%B') | length > 2 }}<|end_of_text|>
{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

CHATML = ("<|im_end|>", "<|endoftext|>")
THINKING = "<think>\n{}\n</think>\n\n"
FAMILIES = {
    # template, end tokens, and what counts of two turns in the whole chat and in other examples
    "Qwen2.5": (QWEN2_5, CHATML, ["yes<|im_end|>\nno<|im_end|>\n"]),
    "Qwen3": (
        QWEN3,
        CHATML,
        [THINKING.format("so") + "no<|im_end|>\n", THINKING.format("") + "yes<|im_end|>\n"],
    ),
    "Llama 3": (LLAMA3, ("<|eot_id|>", "<|end_of_text|>"), ["yes<|eot_id|>no<|eot_id|>"]),
    "Gemma 3": (GEMMA3, ("<eos>", "<end_of_turn>"), ["yes<end_of_turn>\nno<end_of_turn>\n"]),
    "Phi": (
        PHI,
        ("<|endoftext|>", "<|end|>", "<|assistant|>"),
        ["yes<|end|>\nno<|end|>\n<|endoftext|>"],
    ),
    "Mistral": (MISTRAL, ("</s>",), [" yes</s> no</s>"]),
    "SmolLM3": (SMOLLM3, CHATML, ["yes<|im_end|>no<|im_end|>"]),
    "GLM": (
        GLM,
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ["\n<think></think>\nyes<|user|>\n<think></think>\nno<|user|>"],
    ),
    "harmony": (
        HARMONY,
        ("<|return|>", "<|call|>"),
        [f"<|channel|>final<|message|>{x}<|return|>" for x in ("no", "yes")],
    ),
    "Granite": (GRANITE, ("<|end_of_text|>",), ["yes<|end_of_text|>\nno<|end_of_text|>\n"]),
}
BEGIN = "<s>"
CHAT = [
    {"role": "user", "content": "abc"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "no"},
]


def messages_of(family):
    thought = "<think>\nso\n</think>\n\n" if family == "Qwen3" else ""
    return [*CHAT[:3], {"role": "assistant", "content": thought + "no"}]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A function that loads a model with the template and the tokens of a family.

    Its tokenizer begins each text with a token, as those do whose templates write it as well.
    """
    # the tokens of the family are new to this model, and its names many tokens
    monkeypatch.setattr(texts, "vocabulary", lambda model: None)
    monkeypatch.setattr(texts, "_limit", lambda model, settings: 4096)

    def load(family):
        template, ends, _ = FAMILIES[family]
        folder = shutil.copytree(GENAI, tmp_path / "model")
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        marks = re.findall(r"<\|?[a-z_]+\|?>|\[/?INST\]|\[gMASK\]", template)
        tokenizer.add_special_tokens([BEGIN, *ends, *dict.fromkeys(marks), "<|assistant|>"])
        begin = (BEGIN, tokenizer.token_to_id(BEGIN))
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[begin]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(template)
        genai = json.loads((folder / "genai_config.json").read_text())
        genai["model"]["eos_token_id"] = [*map(tokenizer.token_to_id, ends)]
        (folder / "genai_config.json").write_text(json.dumps(genai))
        special = {"eos_token": ends[0], "bos_token": BEGIN}
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
        return jaxonnx.load(folder)

    return load


def read(model, *rows):
    return read_texts(model, [*rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_assistant_and_its_ends_count(family, load):
    model = load(family)
    tokenizer, ends = model.tokenizer, FAMILIES[family][1]
    columns, _, notes = read(model, {"messages": messages_of(family)})
    counted = [tokenizer.decode(labels[labels >= 0]) for labels in columns["labels"]]
    assert counted == FAMILIES[family][2]
    for ids, labels in zip(columns["input_ids"], columns["labels"], strict=True):
        assert (ids == tokenizer.encode(BEGIN, special=False)[0]).sum() == (
            "bos_token" in FAMILIES[family][0]
        )
        last = tokenizer.decode(labels[labels >= 0]).rstrip()
        assert last.endswith(ends)
        # inputs are what the template writes; only behind GLM's last message one more is learned
        text = tokenizer.decode(ids)
        assert (text.removesuffix("<|user|>") == text) == (family != "GLM")
    other = "messages of the assistant in examples of their own: 1, with those before"
    assert any(note.startswith(other) for note in notes) == (len(counted) == 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_continues_the_prompt_that_generate_gets(family, load):
    """The tokens before those that count are those of the generation prompt."""
    model = load(family)
    chat = messages_of(family)[:2]
    columns, *_ = read(model, {"messages": chat})
    (ids,), (labels,) = columns.values()
    start = np.flatnonzero(labels >= 0)[0]
    prompt = model.tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)
    np.testing.assert_array_equal(ids[:start], prompt)
    whole = model.tokenizer.apply_chat_template(chat)
    np.testing.assert_array_equal(ids[: len(whole)], whole)
    assert model.tokenizer.apply_chat_template(chat, tokenize=False) == model.tokenizer.decode(
        whole
    )


def test_an_answer_follows_its_prompt_where_this_is_written_for_requests_alone(load):
    """Mistral 0.3 and Nemo write the system prompt only into a message that ends the chat."""
    model, system = load("Mistral"), {"role": "system", "content": "brief"}
    path = model.folder.path / "chat_template.jinja"
    turn = "{% set system = messages[0].content %}{% for m in messages[1:] %}"
    request = "{{- '[INST] ' + (system + '\\n\\n' if loop.last else '') "
    template = MISTRAL.replace("{% for m in messages %}", turn).replace("{{- '[INST] '", request)
    path.write_text(template)
    model = jaxonnx.load(model.folder.path)
    tokenizer, chat = model.tokenizer, [system, *CHAT]
    columns, _, notes = read(model, {"messages": chat})
    pairs = zip(columns["input_ids"], columns["labels"], (2, 4), ("yes", "no"), strict=True)
    for ids, labels, count, answer in pairs:
        (counted,) = np.nonzero(labels >= 0)
        prompt = tokenizer.apply_chat_template(chat[:count], add_generation_prompt=True)
        assert "brief" in tokenizer.decode(prompt)
        np.testing.assert_array_equal(ids[: counted[0]], prompt)
        assert tokenizer.decode(ids[counted]) == f" {answer}</s>"
    assert any(note.startswith("messages of the assistant in examples of") for note in notes)


def test_thoughts_can_be_switched_off(load):
    """Qwen3's empty thought is then part of the prompt, and does not count."""
    model = load("Qwen3")
    row = {"messages": CHAT[:2], "chat_template_kwargs": {"enable_thinking": False}}
    columns, *_ = read(model, row)
    (labels,) = columns["labels"]
    assert model.tokenizer.decode(labels[labels >= 0]) == "yes<|im_end|>\n"


@pytest.mark.parametrize("begin", ["\n", ""])
def test_calls_of_tools_count(load, begin):
    """Also where they do not begin as the generation prompt does, and contents are not written."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "<x>"}'}}
    chat = [
        CHAT[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        CHAT[1],
    ]
    model = load("Qwen2.5")
    if not begin:
        path = model.folder.path / "chat_template.jinja"
        path.write_text(path.read_text().replace("{{ '\n' }}\n{{- '<call>' }}", "{{ '<call>' }}"))
        model = jaxonnx.load(model.folder.path)
    columns, *_ = read(model, {"messages": chat, "tools": [{"name": "f"}]})
    (labels,) = columns["labels"]
    assert model.tokenizer.decode(labels[labels >= 0]) == (
        '<call>{"name": "f", "arguments": {"x": "<x>"}}</call><|im_end|>\nyes<|im_end|>\n'
    )


@pytest.mark.parametrize("family", ["Gemma 3", "Mistral"])
def test_refusals_of_templates_name_the_row(family, load):
    row = {"messages": [{"role": "tool", "content": "a"}, *CHAT]}
    with pytest.raises(jaxonnx.TrainingError, match=r"example 0 of data: the chat template fails"):
        read(load(family), row)


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_masks_are_those_of_transformers(family, load):
    """Masks where the template has generation blocks, texts everywhere."""
    transformers = pytest.importorskip("transformers")
    model, chat = load(family), messages_of(family)
    path = model.folder.path
    special = json.loads((path / "tokenizer_config.json").read_text())
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{path}/tokenizer.json", **special
    )
    theirs.chat_template = FAMILIES[family][0]
    columns, *_ = read(model, {"messages": chat})
    rendered = [theirs.apply_chat_template(chat[:n], tokenize=False) for n in (4, 2)]
    for ids, text in zip(columns["input_ids"], rendered, strict=False):
        written = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids[: len(written)].tolist() == written
    assert model.tokenizer.apply_chat_template(chat, tokenize=False) == rendered[0]
    if "generation %" in FAMILIES[family][0]:
        masked = theirs.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        (labels,) = columns["labels"]
        np.testing.assert_array_equal(labels >= 0, np.array(masked["assistant_masks"]) > 0)
