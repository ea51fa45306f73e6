"""`Model.generate` against onnxruntime on whole sequences, and onnxruntime-genai."""

import json
import math
import re
import shutil
import warnings

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto
from onnx.helper import make_graph, make_node, make_tensor_value_info

import jaxonnx
from tests.support.paths import DATA
from tests.support.sweeps import sweep

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


def test_room_for_many_more_tokens_changes_none(model):
    """Attention then reads a part of the caches."""
    tokens = greedy(model, PROMPT, 12)
    new = tokens[len(PROMPT) :]
    expected = tokens[: len(PROMPT) + new.tolist().index(new[-1]) + 1]
    found = model.generate(PROMPT, max_new_tokens=700, stop=[int(new[-1])])
    np.testing.assert_array_equal(found, expected)


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


@pytest.mark.parametrize("name", sweep(["qwen2", "llama", "phi3"], "qwen2", "phi3"))
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


@pytest.mark.parametrize("side", ["behind", None])
@pytest.mark.parametrize("name", ["qwen2", "phi3"])  # logits of all steps, and of the last one
def test_the_output_layer_computes_one_place(name, side):
    """Of a prompt, whether it fills caches or is read again in each step."""
    model = jaxonnx.load(DATA / "llm" / "builder" / f"{name}.onnx")
    tokens, lengths = np.ones((2, 7), int), np.array([7, 5])
    more = model.params, model.state, {}, {}, jax.random.key(0), tokens, lengths
    jaxpr = jax.make_jaxpr(lambda: model._generator._begin(side, None, *more, size=16))()
    (vocabulary,) = {value.shape[-1] for value in model.outputs if value.name == "logits"}
    sizes = re.findall(rf"f32\[([\d,]+),{vocabulary}\]", str(jaxpr))
    assert {math.prod(map(int, size.split(","))) for size in sizes} == {2}


def with_tables_by_length(path, length):
    """A file that rotates by other tables behind a length, as the builder writes Phi-3's."""
    proto = onnx.load(path)
    tables = [x for x in proto.graph.initializer if x.name in ("cos_cache", "sin_cache")]
    tables = {x.name: onnx.numpy_helper.to_array(x) for x in tables}
    kept = [x for x in proto.graph.initializer if x.name not in tables]
    del proto.graph.initializer[:]
    sizes = {"one": 1, "length": length}
    numbers = [onnx.numpy_helper.from_array(np.array(x), n) for n, x in sizes.items()]
    proto.graph.initializer.extend([*kept, *numbers])

    def branch(name, step):
        values = [onnx.numpy_helper.from_array(x[::step].repeat(step, 0)) for x in tables.values()]
        names = [f"{name}_{n}" for n in tables]
        pairs = zip(names, values, strict=True)
        nodes = [make_node("Constant", [], [n], value=x) for n, x in pairs]
        outputs = [make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names]
        return make_graph(nodes, name, [], outputs)

    nodes = [
        make_node("Shape", ["attention_mask"], ["sizes"]),
        make_node("Gather", ["sizes", "one"], ["total"]),
        make_node("Greater", ["total", "length"], ["is_long"]),
        make_node(
            "If", ["is_long"], [*tables], then_branch=branch("a", 4), else_branch=branch("b", 1)
        ),
    ]
    for node in reversed(nodes):
        proto.graph.node.insert(0, node)
    return proto


def test_positions_are_rotated_by_the_tables_of_a_length():
    """LongRoPE: behind it the caches are computed again, as in onnxruntime-genai 0.18."""
    model = varied(with_tables_by_length(GENAI / "model.onnx", 24))
    assert model._generator._ends_of_tables == [24]
    for start in (20, 23, 24, 25):
        row = np.random.default_rng(start).integers(3, 192, start)
        found = model.generate(row, max_new_tokens=6, stop=[])
        np.testing.assert_array_equal(found, greedy(model, row, 6), err_msg=str(start))


def test_a_row_ends_with_its_stop():
    model = varied(GENAI)
    found = model.generate(PROMPT, max_new_tokens=12, stop=[])
    stop = int(found[8])
    end = 5 + found[5:].tolist().index(stop)
    ended = model.generate(PROMPT, max_new_tokens=12, stop=stop)
    np.testing.assert_array_equal(ended, found[: end + 1])


def test_a_row_ends_with_the_token_that_completes_a_text():
    import tokenizers

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
        ({"ids": []}, "prompts must be integer arrays"),
        ({"ids": np.zeros((1, 2))}, "prompts must be integer arrays"),
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


FEATURES = np.random.default_rng(0).normal(size=(2, 8, 20)).astype(np.float32)


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """A folder of Whisper whose tokens do not repeat."""
    model = jaxonnx.load(DATA / "transformers" / "whisper")
    layers = {n: 6 * x for n, x in model.params.items() if x.ndim > 1 and 48 not in x.shape}
    folder = tmp_path_factory.mktemp("speech") / "varied"
    model.replace(params={**model.params, **layers}).save(f"{folder}/")
    return folder


def transcribe(folder, tokens, count, first=(), always=()):
    """What onnxruntime writes behind tokens [2, n], all computed in each step, without some."""
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / f"{part}_model.onnx")
        for part in ("encoder", "decoder")
    )
    (states,) = encoder.run(None, {"input_features": FEATURES})
    for step in range(count):
        feed = {"input_ids": tokens, "encoder_hidden_states": states}
        logits = decoder.run(["logits"], feed)[0][:, -1]
        logits[:, [*always, *(() if step else first)]] = -np.inf
        tokens = np.concatenate([tokens, logits.argmax(-1)[:, None]], 1)
    return tokens


def test_features_give_what_the_decoder_writes(speech):
    model, features = jaxonnx.load(speech), FEATURES
    tokens = transcribe(speech, np.full((2, 1), 2), 8)
    assert len({*tokens[:, 1:].ravel().tolist()}) > 4
    assert (tokens[0] != tokens[1]).any()
    found = model.generate(features, max_new_tokens=8, stop=[])
    np.testing.assert_array_equal(found, tokens)
    one = model.generate(features[1], max_new_tokens=8, stop=tokens[1, 2])
    np.testing.assert_array_equal(one, tokens[1, : [*tokens[1, 1:]].index(tokens[1, 2]) + 2])


def test_a_step_has_nothing_of_the_encoder(speech):
    """Not its convolutions, and not the products of its states for keys and values."""
    model = jaxonnx.load(speech)
    generator, tensors, key = model._generator, (model.params, model.state), jax.random.key(0)
    rows, source = generator.read_prompts(*tensors, list(FEATURES))
    rows, lengths = np.stack(rows), np.array([1, 1])

    def begin(source):
        return generator._begin(None, None, *tensors, source, {}, key, rows, lengths, 16)

    def step(new, encoded, carry):
        return generator._step(None, None, *tensors, encoded, {}, key, new, carry)

    new, encoded, carry = jax.eval_shape(begin, source)
    products = [
        str(jaxpr).count("dot_general")
        for jaxpr in (
            jax.make_jaxpr(begin)(source),
            jax.make_jaxpr(lambda: generator._encode(*tensors, source))(),
            jax.make_jaxpr(step)(new, encoded, carry),
        )
    ]
    assert products[2] == products[0] - products[1] > 4
    assert len(encoded) == 2
    assert not any("hidden_state" in name for name in encoded)


def vary(folder, scale, target):
    """A folder whose tokens do not repeat: the layers of its decoder add more."""
    model = jaxonnx.load(folder)
    layers = {
        name: scale * x
        for name, x in model.params.items()
        if x.ndim == 2 and "encoder." not in name and 48 not in x.shape and "embed" not in name
    }
    model.replace(params={**model.params, **layers}).save(f"{target}/")
    return target


def continue_by_files(folder, feed, count):
    """What onnxruntime writes behind a start token, from the files of a folder, without caches."""
    files = jaxonnx.load(folder).folder.files
    encoder, decoder = (onnxruntime.InferenceSession(folder / file) for file in files)
    sources = {value.name: feed[value.name] for value in encoder.get_inputs()}
    outputs = [value.name for value in encoder.get_outputs()]
    known = dict(zip(outputs, encoder.run(None, sources), strict=True))
    known = {name.replace("present", "past"): value for name, value in known.items()}
    known |= {"encoder_hidden_states": known.get("last_hidden_state")}
    known |= {"encoder_attention_mask": feed.get("attention_mask"), "use_cache_branch": [False]}
    batch = len(next(iter(feed.values())))
    tokens = np.full((batch, 1), feed["start"])
    for _ in range(count):
        known["input_ids"] = tokens
        given = {}
        for value in decoder.get_inputs():
            shape = (n if isinstance(n, int) else 0 for n in value.shape[1:])
            empty = np.zeros((batch, *shape), np.float32)
            given[value.name] = np.asarray(known.get(value.name, empty))
            if "int" in value.type:
                given[value.name] = given[value.name].astype(value.type[7:-1])
        new = decoder.run(["logits"], given)[0][:, -1].argmax(-1)
        tokens = np.concatenate([tokens, new[:, None]], 1)
    return tokens


@pytest.mark.parametrize("name", ["t5-merged", "whisper-genai"])
def test_a_decoder_without_a_mask_uses_its_caches(name, tmp_path):
    """T5 has relative positions, Whisper absolute ones; both have room in their caches."""
    folder = vary(DATA / "transformers" / name, 3, tmp_path / "varied")
    random, model = np.random.default_rng(0), jaxonnx.load(folder)
    if name == "t5-merged":
        rows = [random.integers(2, 48, count) for count in (7, 4, 9)]
        mask = np.arange(9) < np.array([[7], [4], [9]])
        ids = np.stack([np.pad(row, (0, 9 - len(row))) for row in rows])
        feed = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "start": 0}
    else:
        rows = random.normal(size=(2, 8, 3000)).astype(np.float32)
        feed = {"audio_features": rows, "start": 2}
    expected = continue_by_files(folder, feed, 20)
    assert len({*expected.ravel().tolist()}) > 6
    assert model._generator._padding_side == "hidden"
    np.testing.assert_array_equal(model.generate(rows, max_new_tokens=20, stop=[]), expected)


@pytest.mark.deep
def test_draws_with_caches_are_those_without():
    settings = {"temperature": 1.0, "top_k": 9, "repetition_penalty": 1.3, "stop": []}
    model, whole = (jaxonnx.load(DATA / "transformers" / "t5-merged") for _ in range(2))
    whole._generator.__dict__["_padding_side"] = None
    rows = [np.array([5, 6, 7]), np.array([8, 9])]
    expected = whole.generate(rows, max_new_tokens=8, **settings)
    np.testing.assert_array_equal(model.generate(rows, max_new_tokens=8, **settings), expected)


UNMASKED = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
g (int64[b, s] ids, float[b, 1, p, 4] past_key, float[b, 1, p, 4] past_value)
    => (float[b, s, 12] logits, float[b, 1, t, 4] key, float[b, 1, t, 4] value) {
    x = Gather(table, ids)
    length = Shape<start = 2, end = 3>(past_key)
    new = Shape<start = 1, end = 2>(ids)
    total = Add(length, new)
    LOOKUP
    y = Add(x, places)
    a, key, value = com.microsoft.MultiHeadAttention<num_heads = 1, unidirectional = 1>(
        y, y, y, "", "", "", past_key, past_value)
    logits = MatMul(a, head)
}"""
LOOKUPS = {
    "a table": "zero = Constant<value_ints = [0]>() places = Slice(table, length, total, zero)",
    "a function": """one = Constant<value_int = 1>() axis = Constant<value_ints = [1]>()
        first = Squeeze(length) last = Squeeze(total) numbers = Range(first, last, one)
        floats = Cast<to = 1>(numbers) column = Unsqueeze(floats, axis) places = Cos(column)""",
}


@pytest.mark.parametrize("positions", LOOKUPS)
def test_positions_that_are_computed_have_no_room(positions):
    """Of positions by a table of weights the new one is looked up; others are computed again."""
    proto = onnx.parser.parse_model(UNMASKED.replace("LOOKUP", LOOKUPS[positions]))
    random = np.random.default_rng(0)
    for name, shape in {"table": (12, 4), "head": (4, 12)}.items():
        tensor = random.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(tensor, name))
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    tokens, past = np.array([[3, 5, 7], [1, 8, 2]]), np.zeros((2, 1, 0, 4), np.float32)
    model, prompts = jaxonnx.load(proto), tokens
    for _ in range(8):
        feed = {"ids": tokens, "past_key": past, "past_value": past}
        new = session.run(["logits"], feed)[0][:, -1].argmax(-1)
        tokens = np.concatenate([tokens, new[:, None]], 1)
    np.testing.assert_array_equal(model.generate(prompts, max_new_tokens=8), tokens)
    assert model._generator._padding_side == {"a table": "hidden", "a function": None}[positions]


LANGUAGES = {
    "lang_to_id": {"<|en|>": 10, "<|de|>": 11, "<|fr|>": 12},
    "task_to_id": {"transcribe": 20, "translate": 21},
}


@pytest.mark.parametrize(
    ("settings", "prompt"),
    sweep(
        [
            ({"suppress_tokens": [4, 22], "begin_suppress_tokens": [43, 26, 9]}, [2]),
            ({"forced_decoder_ids": [[1, 10], [2, 20]], "suppress_tokens": [29]}, [2, 10, 20]),
            ({"bad_words_ids": [[4], [22], [5, 43], [1]], "eos_token_id": 1}, [2]),
            (LANGUAGES | {"language": "DE", "task": "translate"}, [2, 11, 21]),
            (LANGUAGES | {"language": "<|fr|>", "no_timestamps_token_id": 30}, [2, 12, 20, 30]),
            (LANGUAGES | {"forced_decoder_ids": [[1, None], [2, 20]]}, [2, None, 20]),
            (LANGUAGES | {"no_timestamps_token_id": 30}, [2, None, 30]),
            ({"forced_bos_token_id": 7}, [2, 7]),
        ],
        *(0, 1, 2, 4, 6),
    ),
)
def test_the_folder_forces_and_suppresses_tokens(settings, prompt, speech, tmp_path):
    """As transformers does: `tests/oracles/test_optimum_pairs.py` compares with it."""
    shutil.copytree(speech, tmp_path / "told")
    path = tmp_path / "told" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    tokens = np.tile([0 if token is None else token for token in prompt], (2, 1))
    if None in prompt:  # the most likely language
        others = {*range(48)} - {10, 11, 12}
        tokens[:, 1] = transcribe(speech, tokens[:, :1], 1, others)[:, 1]
    always = settings.get("suppress_tokens", ())
    if "bad_words_ids" in settings:  # the end token stays, and words of several tokens
        always = [4, 22]
    expected = transcribe(speech, tokens, 5, settings.get("begin_suppress_tokens", ()), always)
    model = jaxonnx.load(tmp_path / "told")
    found = model.generate(FEATURES, max_new_tokens=5, stop=[])
    np.testing.assert_array_equal(found, expected)


def test_the_decoder_begins_with_given_tokens(speech):
    model = jaxonnx.load(speech)
    found = model.generate(FEATURES, max_new_tokens=5, stop=[], decoder_prompt=[2, 11, 21, 30])
    np.testing.assert_array_equal(found, transcribe(speech, np.tile([2, 11, 21, 30], (2, 1)), 5))
    with pytest.raises(jaxonnx.InputError, match="tokens from 0 to 47"):
        model.generate(FEATURES, max_new_tokens=5, decoder_prompt=[2, 48])
    with pytest.raises(jaxonnx.InputError, match="decoder_prompt= is for an encoder with"):
        jaxonnx.load(GENAI).generate(PROMPT, max_new_tokens=5, decoder_prompt=[2])


def test_an_unknown_language_or_task_is_refused(speech, tmp_path):
    shutil.copytree(speech, tmp_path / "told")
    for name, value, message in (
        ("language", "klingon", "the language 'klingon' is none of lang_to_id"),
        ("task", "summarize", r"the task 'summarize' is none of \['transcribe', 'translate'\]"),
    ):
        settings = LANGUAGES | {"decoder_start_token_id": 2, name: value}
        (tmp_path / "told" / "generation_config.json").write_text(json.dumps(settings))
        with pytest.raises(jaxonnx.InputError, match=message):
            jaxonnx.load(tmp_path / "told").generate(FEATURES, max_new_tokens=1)


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
