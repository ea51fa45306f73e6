"""Prompts as texts and messages, streams of text, and the commands that print them."""

import io
import json

import jax
import numpy as np
import onnx
import pytest
import tokenizers

import jaxonnx
from jaxonnx.cli import main
from jaxonnx.llm._generate import Continuation, Generator
from jaxonnx.llm._tokenizer import clean_up
from tests.support.paths import DATA

GENAI, OPTIMUM = DATA / "llm" / "qwen3-genai", DATA / "llm" / "qwen3-optimum"
CHAT = [{"role": "user", "content": "a list"}]


@pytest.fixture(scope="module", params=[GENAI, OPTIMUM], ids=lambda path: path.name)
def model(request):
    return jaxonnx.load(request.param)


@pytest.fixture(scope="module")
def read():
    return tokenizers.Tokenizer.from_file(str(GENAI / "tokenizer.json"))


def bytes_of(pieces):
    """Decode tokens that are bytes, as tokenizers do."""
    return bytes(pieces).decode("utf-8", errors="replace")


TEXT = "naïve 🙂 日本 é"


def test_pieces_are_of_whole_characters():
    written = Continuation(decode=bytes_of, room=100)
    pieces = [written.add(byte) for byte in TEXT.encode()]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert sum(map(bool, pieces)) == len(TEXT)
    cut = Continuation(decode=bytes_of, room=len(TEXT.encode()) - 1)
    assert "".join(map(cut.add, TEXT.encode())) == TEXT[:-1]  # its last character is not whole
    assert cut.is_done


@pytest.mark.parametrize("stop", ["🙂", " 日", "本 é", "x", "nai", "n"])
def test_a_text_that_ends_never_appears(stop):
    """Nor a part of it; what only begins like it does."""
    written = Continuation(texts=(stop, "本 é!"), decode=bytes_of, room=100)
    pieces = [*map(written.add, TEXT.encode())]
    shown = "".join(pieces)
    assert written.ended == (stop in TEXT)
    held = "" if written.ended else "本 é"
    assert shown + held == TEXT.split(stop)[0]
    ended = Continuation(frozenset({0}), (stop, "本 é!"), bytes_of, 100)
    assert "".join(map(ended.add, [*TEXT.encode(), 0, 65])) == TEXT.split(stop)[0]
    full = Continuation(texts=(stop, "本 é!"), decode=bytes_of, room=len(TEXT.encode()))
    assert "".join(map(full.add, TEXT.encode())) == TEXT.split(stop)[0]


PIECES = ["▁", "▁n", "▁'", "'", "t", "▁'m", "▁s", "▁,", ".", "▁.", "▁ve", "n't", "▁n't", "do", "▁a"]


def spaced(model):
    """A tokenizer of 192 tokens with spaces before punctuation, each piece several times."""
    names = {f"{PIECES[i % len(PIECES)]}#{i}": i for i in range(192)}
    kinds = tokenizers.models
    made = {
        "WordLevel": lambda: kinds.WordLevel(names, unk_token="▁a#14"),
        "Unigram": lambda: kinds.Unigram([(name, -1.0) for name in names], 0),
        "BPE": lambda: kinds.BPE(names, []),
    }
    tokenizer = tokenizers.Tokenizer(made[model]())
    parts = tokenizers.decoders
    numbers = parts.Replace(tokenizers.Regex("#[0-9]+"), "")
    tokenizer.decoder = parts.Sequence([numbers, parts.Replace("▁", " ")])
    return tokenizer


CLEANED = {"clean_up_tokenization_spaces": True}
FORCED = CLEANED | {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        # transformers 5.24
        ("WordLevel", CLEANED, " adon't,n'tn't a's"),
        ("Unigram", CLEANED, " adon't,n'tn't a's"),
        ("Unigram", {}, " ado n ' t , n't n ' t a ' s"),
        ("Unigram", {"clean_up_tokenization_spaces": None}, " ado n ' t , n't n ' t a ' s"),
        ("BPE", CLEANED, " ado n ' t , n't n ' t a ' s"),
        ("BPE", FORCED, " adon't,n'tn't a's"),
    ],
)
def test_spaces_are_cleaned_up_as_transformers_does(copy_of, kind, settings, text):
    model = copy_of(tokenizer_config=settings)
    spaced(kind).save(str(model.folder.path / "tokenizer.json"))
    tokenizer = jaxonnx.load(model.folder.path).tokenizer
    assert tokenizer.decode([14, 13, 1, 2, 0, 4, 7, 12, 1, 2, 0, 4, 14, 2, 6]) == text


def test_a_text_that_is_cleaned_up_is_that_of_its_stream(copy_of):
    rng = np.random.default_rng(0)
    read = spaced("WordLevel").decode
    for _ in range(300):
        ids = rng.integers(0, len(PIECES), 12).tolist()
        written = Continuation(decode=read, room=len(ids), cleans_up=True)
        assert "".join(map(written.add, ids)) == clean_up(read(ids)), read(ids)
    stopped = Continuation(texts=("do,",), decode=read, room=9, cleans_up=True)
    assert "".join(map(stopped.add, [14, 13, 7, 14])) == " a"
    assert stopped.tokens == [14, 13, 7]
    model = copy_of(tokenizer_config=CLEANED)
    spaced("WordLevel").save(str(model.folder.path / "tokenizer.json"))
    model = jaxonnx.load(model.folder.path)
    more = {"max_new_tokens": 20, "repetition_penalty": 3.0, "stop": []}
    tokens, text = model.generate([np.array([14]), "▁a#14"], **more)
    assert text == clean_up(read(tokens[1:].tolist())) == model.tokenizer.decode(tokens[1:])
    assert (
        "".join(model.generate("▁a#14", stream=True, **more)) == text != read(tokens[1:].tolist())
    )


def test_a_text_is_continued_with_the_space_of_the_next_word():
    """Llama's decoders drop the space of a first token, which is the first of the new ones only."""
    words = {"▁Once": 0, "▁upon": 1, "▁a": 2, "▁time": 3, ",": 4}
    llama = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=","))
    parts = tokenizers.decoders
    whole = [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    for decoder in (parts.Sequence(whole), parts.Metaspace()):
        llama.decoder = decoder
        behind, begun = (Continuation(decode=llama.decode, room=9) for _ in range(2))
        behind.continue_text([0, 1])
        assert [*map(behind.add, [2, 3, 4])] == [" a", " time", ","]
        assert [*map(begun.add, [2, 3, 4])] == ["a", " time", ","]


def test_texts_and_messages_are_their_tokens(model, read):
    """One or several of any kind, whose results are of the kind of the prompt."""
    more = {"max_new_tokens": 6}
    prompts = ["a list", CHAT, np.array([5, 17]), "of"]
    template = "<|im_start|>user\na list<|im_end|>\n<|im_start|>assistant\n"
    ids = [read.encode(text).ids for text in ("a list", template)]
    rows = [model.generate(np.array(row), **more) for row in (*ids, [5, 17], read.encode("of").ids)]
    text, answer, tokens, last = model.generate(prompts, **more)
    np.testing.assert_array_equal(tokens, rows[2])
    for made, row, count in ((text, rows[0], len(ids[0])), (answer, rows[1], len(ids[1]))):
        assert made == read.decode(row[count:].tolist(), skip_special_tokens=False).rstrip("\ufffd")
    assert isinstance(last, str)
    assert model.generate("a list", **more) == text
    assert model.generate(CHAT, **more) == answer
    assert model.generate([CHAT], **more) == [answer]
    assert model.generate(("a list", "of"), **more) == [text, last]


def test_a_stream_is_the_text(model):
    for prompt in ("a list", CHAT):
        text = model.generate(prompt, max_new_tokens=9)
        pieces = [*model.generate(prompt, max_new_tokens=9, stream=True)]
        assert "".join(pieces) == text
        assert len(pieces) > 2
        stop = text[3:5]
        cut = model.generate(prompt, max_new_tokens=9, stop=stop)
        assert cut == text[: text.index(stop)]
        assert "".join(model.generate(prompt, max_new_tokens=9, stop=stop, stream=True)) == cut


def test_the_first_token_does_not_wait_for_the_program_of_the_others(model):
    model = model.replace(params=dict(model.params))  # nothing is compiled
    rows, source = model._generator.read_prompts(model.params, model.state, [np.arange(5)])
    written = [Continuation(frozenset())]
    steps = model._generator.extend(model.params, model.state, rows, source, written, 5)
    next(steps)
    ((begin, step, _),) = model._generator._programs.values()
    assert (begin.alone._cache_size(), step.alone._cache_size()) == (1, 0)
    assert len([*steps]) == 4
    assert step.alone._cache_size() == 1


@pytest.mark.parametrize(
    "model",
    [GENAI, pytest.param(OPTIMUM, marks=pytest.mark.deep)],
    ids=lambda path: path.name,
    indirect=True,
)
def test_turns_of_a_chat_keep_the_caches(model, monkeypatch):
    """With the answers that whole prompts have; a chat that goes another way has others."""
    model = model.replace(params={n: 3 * x if x.ndim > 1 else x for n, x in model.params.items()})
    computed, extend = [], Generator._extend_caches

    def count(self, side, params, state, new, *others):
        computed.append(new.shape[1])
        return extend(self, side, params, state, new, *others)

    monkeypatch.setattr(Generator, "_extend_caches", count)
    drawn = {"temperature": 1.5, "seed": 3, "repetition_penalty": 1.3, "top_k": 20}
    chat = []
    for text, more in (("a list", {}), ("of lists", {}), ("is it", drawn), ("it", {})):
        if text == "it":  # as if the last turn had not been
            chat = chat[:-2]
        chat.append({"role": "user", "content": text})
        tokens = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        alone = model.generate(tokens, max_new_tokens=9, **more)[len(tokens) :]
        answer = model.generate(chat, max_new_tokens=9, **more)
        assert model.tokenizer.decode(alone).startswith(answer)
        assert len(answer) > 9
        chat.append({"role": "assistant", "content": answer.strip()})
    assert 32 in computed  # not the 64 and 128 of the prompts
    assert len(model.tokenizer.apply_chat_template(chat)) > 64
    stream = model.generate(chat[:3], max_new_tokens=9, stream=True)
    next(stream)
    stream.close()
    assert model.generate(chat[:1], max_new_tokens=3)


@pytest.fixture
def copy_of(tmp_path):
    """A copy of the folder of optimum, with some files of JSON, and a template of one's own."""

    def copy(template=None, **files):
        for file in OPTIMUM.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        return jaxonnx.load(tmp_path)

    return copy


def test_stops_are_those_of_the_first_file_that_names_any(copy_of, read):
    """They hold beside texts, and tokens replace them."""
    ids = np.array(read.encode("a list").ids)
    more = {"max_new_tokens": 8, "repetition_penalty": 3.0}  # which makes them differ
    whole = jaxonnx.load(OPTIMUM).generate(ids, stop=[], **more)
    first, second, third = [*dict.fromkeys(whole[len(ids) :].tolist())][1:4]
    config = json.loads((OPTIMUM / "config.json").read_text())

    def length(stop):
        return len(ids) + 1 + whole[len(ids) :].tolist().index(stop)

    model = copy_of(
        genai_config={"model": {"eos_token_id": [first, 2]}},
        generation_config={"eos_token_id": second},
        config=config | {"eos_token_id": third},
    )
    assert len(model.generate(ids, **more)) == length(first)
    assert len(model.generate(ids, stop="never written", **more)) == length(first)
    assert len(model.generate(ids, stop=third, **more)) == length(third)
    assert len(model.generate(ids, stop=[third, "never written"], **more)) == length(third)
    assert len(model.generate(ids, stop=[], **more)) == len(whole)
    text = model.generate("a list", **more)
    assert text == read.decode(whole[len(ids) : length(first) - 1].tolist()).rstrip("\ufffd")
    model = copy_of(genai_config={}, generation_config={"eos_token_id": second})
    assert len(model.generate(ids, **more)) == length(second)
    model = copy_of(generation_config={}, genai_config={}, config=config | {"eos_token_id": third})
    assert len(model.generate(ids, **more)) == length(third)


def test_texts_of_the_folder_stop_where_its_settings_count(copy_of, read):
    """As transformers' `StopStringCriteria`, which leaves the text that ends it."""
    ids = np.array(read.encode("a list").ids)
    more = {"max_new_tokens": 8, "stop": None, "temperature": None}
    settings = {"repetition_penalty": 3.0}
    files = {"genai_config": {}, "config": {}}
    plain = copy_of(generation_config=settings, **files)
    whole = plain.generate("a list", **more)
    stop = whole[2:4]
    for texts in (stop, ["never written", stop]):
        model = copy_of(generation_config=settings | {"stop_strings": texts}, **files)
        assert model.generate("a list", **more) == whole[: whole.index(stop)]
        (*tokens,) = model.generate(ids, **more)[len(ids) :]
        assert stop in read.decode(tokens)
        assert stop not in read.decode(tokens[:-1])
        assert model.generate("a list", **more | {"stop": []}) == whole
        assert model.generate("a list", **more | {"stop": whole[0]}) == ""
        assert stop in model.generate("a list", **more | {"temperature": 0.0})


def test_the_end_token_of_the_tokenizer_stops_too(copy_of, read):
    """It is what training appends to texts; of transformers, the Trainer adds it to the others."""
    ids = np.array(read.encode("a list").ids)
    more = {"max_new_tokens": 8, "repetition_penalty": 3.0}
    whole = jaxonnx.load(OPTIMUM).generate(ids, stop=[], **more)[len(ids) :].tolist()
    third = [*dict.fromkeys(whole)][2]
    settings = {"eos_token": read.id_to_token(third)}
    ends = {"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 0}}
    expected = len(ids) + 1 + whole.index(third)
    model = copy_of(tokenizer_config=settings, special_tokens_map={}, **ends)
    assert len(model.generate(ids, **more)) == expected
    model = copy_of(tokenizer_config={}, special_tokens_map=settings, **ends)  # of older versions
    assert len(model.generate(ids, **more)) == expected


def test_the_template_gets_its_variables(copy_of):
    model = copy_of("{{ messages[0].content }}{% if enable_thinking %} of{% endif %}")
    written = [
        model.generate(CHAT, max_new_tokens=5, chat_template_kwargs={"enable_thinking": x})
        for x in (False, True)
    ]
    assert written == [model.generate(t, max_new_tokens=5) for t in ("a list", "a list of")]


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        (["a", "list"], {"stream": True}, "stream=True is for one prompt, and there are 2"),
        (7, {}, "prompts must be texts, lists of messages .* or arrays of tokens"),
        ([CHAT, "a", [0.5]], {}, "prompts must be integer arrays"),
        ("a", {"stream": True, "max_new_tokens": 0}, "max_new_tokens must be"),
        ([{"content": "a"}], {}, "messages must be objects with a role"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_at_once(prompts, arguments, message):
    with pytest.raises((jaxonnx.Error, ValueError), match=message):
        jaxonnx.load(GENAI).generate(prompts, **{"max_new_tokens": 2, **arguments})


def test_texts_need_a_folder():
    model = jaxonnx.load(onnx.load(GENAI / "model.onnx"))
    with pytest.raises(jaxonnx.InputError, match="not loaded from a folder"):
        model.generate("a list", max_new_tokens=2)


LINE = ["--max-new-tokens", "6"]


def test_the_command_prints_the_text(capsys, tmp_path):
    model = jaxonnx.load(GENAI)
    assert main(["generate", str(GENAI), "--prompt", "a list", *LINE]) == 0
    assert capsys.readouterr().out == model.generate("a list", max_new_tokens=6) + "\n"
    chat = ["generate", str(GENAI), "--chat", "--prompt", "a list", "--json", *LINE]
    assert main(chat) == 0
    written = json.loads(capsys.readouterr().out)
    assert written == {"prompt": "a list", "text": model.generate(CHAT, max_new_tokens=6)}
    sampling = {"temperature": 3.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 4}
    sampling |= {"repetition_penalty": 1.2}
    flags = [f"--{n.replace('_', '-')}={x}" for n, x in sampling.items()]
    assert main(["generate", str(GENAI), "--prompt", "a list", *LINE, *flags]) == 0
    drawn = model.generate("a list", max_new_tokens=6, **sampling)
    assert capsys.readouterr().out == drawn + "\n"
    stop = ["--stop", drawn[2:4], "--stop", "never written"]
    assert main(["generate", str(GENAI), "--prompt", "a list", *LINE, *flags, *stop]) == 0
    assert capsys.readouterr().out == drawn[: drawn.index(drawn[2:4])] + "\n"
    assert main(["generate", str(GENAI), "--prompt", "a", "--system", "b"]) == 2
    assert "--system is for chats: pass --chat as well" in capsys.readouterr().err


def test_adapters_change_what_commands_print(capsys, tmp_path):
    model = jaxonnx.load(GENAI)
    adapted = jaxonnx.LoRA(rank=2, where="all-linear").attach(model, jax.random.key(0))
    adapted = adapted.replace(params={n: x + 0.3 for n, x in adapted.params.items()})
    jaxonnx.Adapters.of(adapted).save(tmp_path / "a.npz")
    line = ["generate", str(GENAI), "--prompt", "a list", *LINE]
    assert main([*line, "--adapter", str(tmp_path / "a.npz")]) == 0
    text = adapted.generate("a list", max_new_tokens=6)
    assert text != model.generate("a list", max_new_tokens=6)
    assert capsys.readouterr().out == text + "\n"


def test_a_chat_keeps_its_history(capsys, monkeypatch):
    model, messages = jaxonnx.load(GENAI), [{"role": "system", "content": "of"}]
    for line in ("a list", "a tuple"):
        messages.append({"role": "user", "content": line})
        text = model.generate(messages, max_new_tokens=6)
        messages.append({"role": "assistant", "content": text})
    line = ["chat", str(GENAI), "--system", "of", *LINE]
    for more, wanted in (
        (["--json"], json.dumps({"messages": messages})),
        ([], f"{messages[2]['content']}\n{messages[4]['content']}"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("a list\n\n a tuple"))
        assert main([*line, *more]) == 0
        assert capsys.readouterr().out == wanted + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("a list " * 60 + "\n"))
    assert main(line) == 1
    assert "and the model has positions for 128: begin a new one" in capsys.readouterr().err
