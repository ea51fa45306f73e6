"""Tokens and texts of prompts, of training and of `generate`, against onnxruntime-genai's own."""

import json

import numpy as np
import pytest

import jaxonnx
from tests.support.paths import DATA

genai = pytest.importorskip("onnxruntime_genai")
FOLDER = DATA / "llm" / "qwen3-genai"
TEXTS = ("a list", "  two  spaces\n\n", "<|im_start|>user", "don't 12345", "a list<|im_end|>")
CHAT = [
    {"role": "system", "content": "of"},
    {"role": "user", "content": "a list"},
    {"role": "assistant", "content": "is mutable"},
]


@pytest.fixture(scope="module")
def runtime():
    return genai.Model(str(FOLDER))


@pytest.fixture(scope="module")
def tokenizer(runtime):
    return genai.Tokenizer(runtime)


@pytest.fixture(scope="module")
def model():
    return jaxonnx.load(FOLDER)


def test_prompts_have_the_tokens_of_the_runtime(model, tokenizer):
    for text in TEXTS:
        np.testing.assert_array_equal(model.tokenizer.encode(text), tokenizer.encode(text))
    text = tokenizer.apply_chat_template(json.dumps(CHAT[:2]), add_generation_prompt=True)
    made = model.tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True)
    np.testing.assert_array_equal(made, tokenizer.encode(text))


@pytest.mark.parametrize("rows", ["texts", "chats"])
def test_training_has_the_tokens_of_the_runtime(rows, model, tokenizer):
    """The loss of texts is that of the runtime's tokens."""
    if rows == "texts":
        data = [{"text": text} for text in TEXTS[:-1]]
        ids = [[*tokenizer.encode(text), 2] for text in TEXTS[:-1]]
        labels = ids
    else:
        data = [{"messages": CHAT}]
        before, whole = (
            tokenizer.apply_chat_template(json.dumps(chat), add_generation_prompt=more)
            for chat, more in ((CHAT[:2], True), (CHAT, False))
        )
        ids = [tokenizer.encode(whole).tolist()]
        start = len(tokenizer.encode(before))  # the rest is what the template adds for the answer
        labels = [[i if at >= start else -100 for at, i in enumerate(ids[0])]]
    settings = {"loss": "causal_lm", "batch_size": len(data), "metrics": []}
    made = jaxonnx.evaluate(model, data, **settings)["loss"]
    wanted = jaxonnx.evaluate(model, {"input_ids": ids, "labels": labels}, **settings)["loss"]
    assert made == pytest.approx(wanted, rel=1e-6)


def test_texts_and_streams_are_those_of_the_runtime(model, runtime, tokenizer):
    for prompt in ("a list", CHAT[:2]):
        text = prompt
        if not isinstance(prompt, str):
            text = tokenizer.apply_chat_template(json.dumps(prompt), add_generation_prompt=True)
        settings = genai.GeneratorParams(runtime)
        ids = tokenizer.encode(text)
        settings.set_search_options(max_length=len(ids) + 20, do_sample=False)
        generator, stream = genai.Generator(runtime, settings), tokenizer.create_stream()
        generator.append_tokens(ids)
        pieces = []
        while not generator.is_done():
            generator.generate_next_token()
            pieces.append(stream.decode(generator.get_next_tokens()[0]))
        made = model.generate(prompt, max_new_tokens=20, stream=True)
        assert "".join(made) == "".join(pieces).removesuffix("<|im_end|>")


def test_a_repetition_penalty_is_that_of_the_runtime(model, runtime):
    prompt = np.array([5, 17, 33, 60, 8])
    settings = genai.GeneratorParams(runtime)
    settings.set_search_options(max_length=25, do_sample=False, repetition_penalty=1.7)
    generator = genai.Generator(runtime, settings)
    generator.append_tokens(prompt.astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    made = model.generate(prompt, max_new_tokens=20, repetition_penalty=1.7)
    np.testing.assert_array_equal(made, generator.get_sequence(0))
