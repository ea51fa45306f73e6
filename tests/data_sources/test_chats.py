"""Special tokens, chat templates and columns of texts, in the structure of published templates."""

import json
import shutil

import optax
import pytest

import jaxonnx
from jaxonnx._data.ragged import Padding
from jaxonnx._data.texts import read_texts
from jaxonnx._data.tokenizer import Tokenizer
from tests.support.paths import DATA

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

GENAI = DATA / "llm" / "qwen3-genai"
BEGIN, END = "<|endoftext|>", "<|im_end|>"  # tokens 0 and 2
HELLO = [99, 72, 155]


@pytest.fixture
def folder(tmp_path):
    """A function that writes a model's folder with a template and a post-processor."""

    def write(template=None, post=None, settings=(), tokens=()):
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
        config = json.loads((path / "tokenizer_config.json").read_text()) | dict(settings)
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        return path

    return write


def read(folder, *rows, **preprocess):
    """Return the tokens and labels of rows, as [text, text that counts], and the notes."""
    model = jaxonnx.load(folder)
    columns, _, _, notes = read_texts([*rows], None, model, preprocess, Padding())
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
        columns, *_ = read_texts([row], None, model, None, Padding())
        assert columns["input_ids"][0].tolist() == ids


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
    """As in `apply_chat_template(tokenize=True)`, without what the post-processor adds."""
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
