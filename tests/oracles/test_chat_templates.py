"""Messages that count in published chat templates, against the masks of TRL's training templates.

TRL writes `{% generation %}` blocks into copies of published templates by hand; ours are found in
the published ones, which are read from the installed package.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import jinja2
import numpy as np
import pytest
import tokenizers

import jaxonnx
from jaxonnx.llm import _texts as texts
from tests.support.paths import DATA
from tests.support.sources import read_texts

transformers = pytest.importorskip("transformers")
GENAI = DATA / "llm" / "qwen3-genai"
CHATML = ("<|im_end|>", "<|endoftext|>")
GLM = ("<|endoftext|>", "<|user|>", "<|observation|>")
FAMILIES = {
    "phi3": ("<|endoftext|>", "<|end|>", "<|assistant|>"),
    "phi3_5": ("<|endoftext|>", "<|end|>", "<|assistant|>"),
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "gemma": ("<eos>", "<end_of_turn>"),
    "gemma3": ("<eos>", "<end_of_turn>"),
    "glm4moe": GLM,
    "lfm2": CHATML,
    "llama3": ("<|eot_id|>", "<|end_of_text|>"),
    "qwen3": CHATML,
    "qwen3_instruct_2507": CHATML,
    "qwen3_vl": CHATML,
}
"""The end tokens that the folders of each family name."""
CHAT = [
    {"role": "user", "content": "abc"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "no"},
]


def write_folder(path, template, ends):
    """Write a model's folder; return its tokenizer by transformers."""
    shutil.copytree(GENAI, path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([*ends, "<|assistant|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    genai = json.loads((path / "genai_config.json").read_text())
    genai["model"]["eos_token_id"] = [*map(tokenizer.token_to_id, ends)]
    (path / "genai_config.json").write_text(json.dumps(genai))
    special = {"eos_token": ends[0], "bos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(special))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{path}/tokenizer.json", **special)
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_messages_that_count_are_those_of_trl(family, turns, tmp_path, monkeypatch):
    package = importlib.util.find_spec("trl")
    if package is None:
        pytest.skip("trl is not installed")
    folder = Path(package.submodule_search_locations[0]) / "chat_templates"
    template, training = (
        (folder / f"{family}{kind}.jinja").read_text("utf-8") for kind in ("", "_training")
    )
    chat = CHAT[: 2 * turns]
    theirs = write_folder(tmp_path / "theirs", training, FAMILIES[family])
    masked = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    mask = np.array(masked["assistant_masks"], bool)
    expected = theirs.decode(np.array(masked["input_ids"])[mask])
    ours = write_folder(tmp_path / "ours", template, FAMILIES[family])
    # the tokens of the family are new to this model, and its names many tokens
    monkeypatch.setattr(texts, "vocabulary", lambda model: None)
    monkeypatch.setattr(texts, "_limit", lambda model, settings: 4096)
    model = jaxonnx.load(tmp_path / "ours")
    columns, *_ = read_texts(model, [{"messages": chat}])
    counted = [ours.decode(labels[labels >= 0]) for labels in columns["labels"]]
    *others, whole = counted[1:] + counted[:1]
    assert "".join([*others, whole]) == expected
    # the examples are as the published template writes the messages, and GLM's mark behind them
    rendered = [ours.apply_chat_template(chat[:n], tokenize=False) for n in (2 * turns, 2)]
    for ids, text in zip(columns["input_ids"], rendered, strict=False):
        written = ours(text, add_special_tokens=False)["input_ids"]
        assert ids[: len(written)].tolist() == written
        assert ours.decode(ids[len(written) :]) == "<|user|>" * (family == "glm4moe")


ARGUMENTS = {"a": 1, "b": None, "c": "é<x>"}
CALL_ID = "abcdefghi"
"""Nine characters, as Mistral's templates want."""


def chat_with_call(arguments):
    function = {"name": "f", "arguments": arguments}
    call = {"type": "function", "id": CALL_ID, "function": function}
    return [
        CHAT[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "name": "f", "tool_call_id": CALL_ID},
        CHAT[1],
    ]


@pytest.mark.filterwarnings("ignore:variables that the chat", "ignore:the chat template does not")
def test_arguments_of_calls_are_written_as_by_transformers():
    """By each template of TRL's, from objects and from texts, as transformers from what it takes.

    These are texts for DeepSeek's, objects for all others.
    """
    package = importlib.util.find_spec("trl")
    if package is None:
        pytest.skip("trl is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(GENAI)
    ours = jaxonnx.load(GENAI).tokenizer
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    compared = 0
    for path in Path(package.submodule_search_locations[0], "chat_templates").glob("*.jinja"):
        more = {"chat_template": path.read_text("utf-8"), "tools": tools, "tokenize": False}
        takes_text = path.stem == "deepseekv3"
        given = json.dumps(ARGUMENTS, ensure_ascii=False) if takes_text else ARGUMENTS
        try:
            expected = theirs.apply_chat_template(chat_with_call(given), **more)
        except (jinja2.TemplateError, TypeError):  # it takes no calls, or other ones
            continue
        for arguments in (ARGUMENTS, json.dumps(ARGUMENTS, ensure_ascii=False)):
            text = ours.apply_chat_template(chat_with_call(arguments), **more)
            assert text == expected, path.stem
        compared += 1
    assert compared > 20
