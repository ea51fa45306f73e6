"""`Model.generate` against onnxruntime on whole sequences, and onnxruntime-genai."""

import warnings

import numpy as np
import onnxruntime
import pytest

import jaxonnx
from tests.support.paths import DATA

GENAI, OPTIMUM = DATA / "llm" / "qwen3-genai", DATA / "llm" / "qwen3-optimum"
PROMPT = np.array([5, 17, 33, 60, 8])


def varied(folder):
    """A model whose tokens do not repeat: its layers add more to the embedding."""
    model = jaxonnx.load(folder)
    layers = {n: 4 * x for n, x in model.params.items() if x.ndim == 2 and 192 not in x.shape}
    return model.replace(params={**model.params, **layers})


@pytest.fixture(scope="module", params=[GENAI, OPTIMUM], ids=lambda path: path.name)
def model(request):
    return varied(request.param)


def greedy(model, prompt, count):
    """What onnxruntime continues with, from whole sequences."""
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    ids = prompt[None]
    for _ in range(count):
        known = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        known["position_ids"] = np.arange(ids.shape[1])[None]
        empty = np.zeros((1, 1, 0, 16), np.float32)
        feeds = {v.name: known.get(v.name, empty) for v in session.get_inputs()}
        new = session.run(["logits"], feeds)[0][:, -1].argmax(-1)
        ids = np.concatenate([ids, new[:, None]], 1)
    return ids[0]


def test_greedy_is_that_of_onnxruntime(model):
    found = model.generate(PROMPT, max_new_tokens=12, stop=[])
    np.testing.assert_array_equal(found, greedy(model, PROMPT, 12))
    assert len({*found.tolist()}) > 10
    assert model._generator._padding_side is not None


def test_rows_of_unequal_length_are_those_alone(model):
    long, short = model.generate([PROMPT, PROMPT[:2]], max_new_tokens=6, stop=[])
    np.testing.assert_array_equal(long, greedy(model, PROMPT, 6))
    np.testing.assert_array_equal(short, greedy(model, PROMPT[:2], 6))


def test_without_caches_all_is_computed_again():
    model = varied(OPTIMUM)
    plain = model.with_outputs("logits")
    whole = jaxonnx.load(plain.to_onnx()).without_cache()
    assert whole._generator._padding_side is None
    found = model.generate(PROMPT, max_new_tokens=4, stop=[])
    again = type(model._generator)(model)
    again.__dict__["_padding_side"] = None
    (other,) = again(model.params, model.state, [PROMPT], 4)
    np.testing.assert_array_equal(found, other)


@pytest.mark.parametrize("name", ["qwen2", "llama", "phi3"])
def test_files_of_the_builder_continue_as_without_caches(name):
    """Logits of the last step alone, lengths that are values of a mask, and caches of int8."""
    model = jaxonnx.load(DATA / "llm" / "builder" / f"{name}.onnx")
    whole, row = model.without_cache(), PROMPT
    for _ in range(4):
        ids = row[None]
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        logits = whole(**{v.name: feeds[v.name] for v in whole.inputs})
        row = np.append(row, np.asarray(logits)[0, -1].argmax())
    np.testing.assert_array_equal(model.generate(PROMPT, max_new_tokens=4, stop=[]), row)


def test_a_row_ends_with_its_stop():
    model = varied(GENAI)
    found = model.generate(PROMPT, max_new_tokens=12, stop=[])
    stop = int(found[8])
    end = 5 + found[5:].tolist().index(stop)
    ended = model.generate(PROMPT, max_new_tokens=12, stop=stop)
    np.testing.assert_array_equal(ended, found[: end + 1])


def test_a_row_ends_with_the_token_that_completes_a_text():
    tokenizers = pytest.importorskip("tokenizers")
    model, read = varied(GENAI), tokenizers.Tokenizer.from_file(str(GENAI / "tokenizer.json"))
    rows = model.generate([PROMPT, PROMPT[:2]], max_new_tokens=24, stop=[])

    def ended(row, prompt, text):
        """The tokens up to the first that completes the text."""
        ends = range(len(prompt) + 1, len(row) + 1)
        parts = [row[:end] for end in ends]
        return next((p for p in parts if text in read.decode(p[len(prompt) :].tolist())), row)

    new = read.decode(rows[0][len(PROMPT) :].tolist())
    text = new[len(new) // 2 :][:5]
    wanted = [ended(row, p, text) for row, p in zip(rows, (PROMPT, PROMPT[:2]), strict=True)]
    assert len(PROMPT) + 2 < len(wanted[0]) < len(rows[0])
    for stop in (text, [text], ["never written", text], (text, 10**6)):
        found = model.generate([PROMPT, PROMPT[:2]], max_new_tokens=24, stop=stop)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
    early = int(rows[0][len(PROMPT) + 1])
    found = model.generate(PROMPT, max_new_tokens=24, stop=[text, early])
    assert found[-1] == early
    assert len(found) <= len(PROMPT) + 2


def test_texts_end_a_row_where_transformers_ends_it():
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    from transformers.generation import StopStringCriteria

    read = transformers.PreTrainedTokenizerFast(tokenizer_file=str(GENAI / "tokenizer.json"))
    model = varied(GENAI)
    new = model.generate(PROMPT, max_new_tokens=24, stop=[])[len(PROMPT) :]
    pieces = read.batch_decode([[token] for token in new])
    for place in range(2, 20):
        text = pieces[place][-1:] + pieces[place + 1][:1]
        rule = StopStringCriteria(read, [text])
        ends = (n for n in range(1, 25) if rule(torch.tensor(new[None, :n]), None).all())
        found = model.generate(PROMPT, max_new_tokens=24, stop=text)
        np.testing.assert_array_equal(found[len(PROMPT) :], new[: next(ends, 24)])


@pytest.mark.parametrize("folder", [GENAI, OPTIMUM])
def test_continuations_end_with_the_last_position(folder):
    """Of 128, by the rotary table or the configuration; a shorter row has more room."""
    model = varied(folder)
    long, short = np.resize(PROMPT, 123), PROMPT
    with pytest.warns(UserWarning, match="has positions for 128 tokens: a continuation ends"):
        rows = model.generate([long, short], max_new_tokens=8, stop=[])
    assert [*map(len, rows)] == [128, 13]
    np.testing.assert_array_equal(rows[0], greedy(model, long, 5))
    np.testing.assert_array_equal(rows[1], greedy(model, short, 8))
    whole = jaxonnx.load(model.without_cache().to_onnx())  # no folder, no caches
    if folder == GENAI:
        with pytest.warns(UserWarning, match="has positions for 128 tokens: a continuation ends"):
            rows = whole.generate([long, short], max_new_tokens=8, stop=[])
        assert [*map(len, rows)] == [128, 13]
        np.testing.assert_array_equal(rows[0], greedy(model, long, 5))
    stop = int(rows[0][125])
    model.generate(long, max_new_tokens=8, stop=stop)  # no warning: it ends before


def test_drawn_tokens_depend_on_the_seed():
    model = varied(GENAI)

    def draw(seed, temperature):
        given = {"max_new_tokens": 12, "temperature": temperature, "seed": seed, "stop": []}
        return model.generate(PROMPT, **given).tolist()

    assert draw(1, 3.0) == draw(1, 3.0)
    assert draw(1, 3.0) != draw(2, 3.0)
    assert draw(1, 1e-4) == model.generate(PROMPT, max_new_tokens=12, stop=[]).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": []}, "tokens to continue are integers"),
        ({"ids": np.zeros((1, 2))}, "tokens to continue are integers"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"stop": [1.5]}, "stop must be tokens, or texts for a model of a folder with a tokenizer"),
        ({"stop": [5, ""]}, "stop must be tokens, or texts .*, got ''"),
    ],
)
def test_what_cannot_be_continued_is_said(arguments, message):
    given = {"ids": PROMPT, "max_new_tokens": 2} | arguments
    with pytest.raises(jaxonnx.InputError, match=message):
        jaxonnx.load(GENAI).generate(given.pop("ids"), **given)


def test_features_give_what_the_decoder_writes(tmp_path):
    """Against Whisper's two files in onnxruntime, which computes all tokens in each step."""
    model = jaxonnx.load(DATA / "transformers" / "whisper")
    layers = {n: 6 * x for n, x in model.params.items() if x.ndim > 1 and 48 not in x.shape}
    model = model.replace(params={**model.params, **layers})
    model.save(f"{tmp_path}/varied/")
    features = np.random.default_rng(0).normal(size=(2, 8, 20)).astype(np.float32)
    encoder, decoder = (
        onnxruntime.InferenceSession(tmp_path / "varied" / f"{part}_model.onnx")
        for part in ("encoder", "decoder")
    )
    (states,) = encoder.run(None, {"input_features": features})
    tokens = np.full((2, 1), 2)
    for _ in range(8):
        feed = {"input_ids": tokens, "encoder_hidden_states": states}
        new = decoder.run(["logits"], feed)[0][:, -1].argmax(-1)
        tokens = np.concatenate([tokens, new[:, None]], 1)
    assert len({*tokens[:, 1:].ravel().tolist()}) > 4
    assert (tokens[0] != tokens[1]).any()
    found = model.generate(features, max_new_tokens=8, stop=[])
    np.testing.assert_array_equal(found, tokens)
    one = model.generate(features[1], max_new_tokens=8, stop=tokens[1, 2])
    np.testing.assert_array_equal(one, tokens[1, : [*tokens[1, 1:]].index(tokens[1, 2]) + 2])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (PROMPT, r"reads features \[8, .* of numbers for 'input_features'.* has \[\] of int64"),
        (np.zeros((1, 8), np.float32), r"reads features \[8.*one has \[1, 8\] of float32"),
        (np.zeros((7, 20), np.float32), r"reads features \[8.*one has \[7, 20\] of float32"),
        ([np.zeros((8, n), np.float32) for n in (20, 18)], r"one shape; one has \[8, 18\]"),
        (np.zeros((8, 20), int), r"one has \[8, 20\] of int64"),
        (np.zeros((0, 8, 20), np.float32), "there are no input features for 'input_features'"),
    ],
)
def test_features_of_another_shape_are_refused(features, message):
    model = jaxonnx.load(DATA / "transformers" / "whisper")
    with pytest.raises(jaxonnx.InputError, match=message):
        model.generate(features, max_new_tokens=2)


def test_a_model_of_images_is_no_decoder():
    model = jaxonnx.load(DATA / "lenet.dynamo.onnx")
    with pytest.raises(jaxonnx.InputError, match="where they are the only input"):
        model.generate(PROMPT, max_new_tokens=2)


def test_the_saved_folder_runs_in_onnxruntime_genai(tmp_path):
    genai = pytest.importorskip("onnxruntime_genai")
    model = varied(GENAI)
    model.save(f"{tmp_path}/tuned/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runtime = genai.Model(f"{tmp_path}/tuned/")
        settings = genai.GeneratorParams(runtime)
        settings.set_search_options(max_length=30, do_sample=False)
        generator = genai.Generator(runtime, settings)
        generator.append_tokens(PROMPT.astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
    found = model.generate(PROMPT, max_new_tokens=25)
    np.testing.assert_array_equal(generator.get_sequence(0), found)
    tokenizer = genai.Tokenizer(runtime)
    assert tokenizer.decode(tokenizer.encode("a list")) == "a list"
