"""Sampling against transformers' `LogitsProcessor`s, whose scores `sampling.json` has.

python -m tests.llm.test_sampling    # writes it; needs torch and transformers
"""

import ast
import json
from types import SimpleNamespace

import numpy as np
import pytest

import jaxonnx
from jaxonnx.cli import main
from jaxonnx.llm._sampling import Sampling, process_logits
from tests.support.paths import DATA

STORED = DATA / "llm" / "sampling.json"
GENAI = DATA / "llm" / "qwen3-genai"
SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 4},
    {"temperature": 1.0, "top_k": 40},  # more than there are
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 2.5, "top_k": 6, "top_p": 0.7},
    {"temperature": 0.8, "min_p": 0.2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.7},
    {"temperature": 0.0, "sequence_bias": [[[5], 2.5], [[2, 5, 1], -3.0], [[7, 1], 1.5]]},
    {
        "temperature": 0.0,
        "sequence_bias": [[[4, 4, 4, 4, 2], 9.0], [[0, 1, 2, 2, 5, 3], 9.0], [[2, 5, 9], 1.0]],
        "repetition_penalty": 1.5,
        "bad_words_ids": [[3, 7, 8], [7, 7], [4, 4, 4, 4, 6]],
    },
    {"temperature": 0.7, "forced_eos_token_id": 3, "repetition_penalty": 1.5},
    {"temperature": 0.0, "forced_eos_token_id": [3, 9], "sequence_bias": [[[3], -2.0]]},
]
LOGITS = np.random.default_rng(0).normal(0, 2, (3, 12)).astype(np.float32)
PROMPTS = np.array([[1, 2, 2, 5], [0, 11, 3, 7], [4, 4, 4, 4]])


def scores_of_transformers(settings):
    """What transformers draws from, by the processors that its `generate` makes."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    names = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    network = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**names, num_attention_heads=1, num_key_value_heads=1)
    )
    draws = settings["temperature"] > 0
    more = {n: x for n, x in settings.items() if n != "temperature" or draws}
    more |= {"top_k": 0, "max_length": PROMPTS.shape[1] + 1} | more
    config = transformers.GenerationConfig(do_sample=draws, **more)
    config._eos_token_tensor = None
    processors = network._get_logits_processor(config, input_ids_seq_length=PROMPTS.shape[1])
    return processors(torch.tensor(PROMPTS), torch.tensor(LOGITS)).numpy()


def process(settings):
    drawn = {"do_sample": settings["temperature"] > 0, "top_k": 0}
    found = {"genai_config.json": {"search": drawn | settings}}
    sampling = Sampling.of(SimpleNamespace(read_json=found.get), None)
    seen = np.zeros(LOGITS.shape, bool)
    np.put_along_axis(seen, PROMPTS, True, 1)
    recent = np.pad(PROMPTS, [(0, 0), (3, 0)], constant_values=-1)
    numbers = sampling.numbers(1)
    return np.asarray(process_logits(LOGITS, seen, sampling.top_k, numbers, (), recent))


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_scores_are_those_of_transformers(number):
    wanted = np.array(json.loads(STORED.read_text())[number], np.float32)
    np.testing.assert_allclose(process(SETTINGS[number]), wanted, rtol=1e-6)


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_stored_scores_are_those_of_transformers(number):
    wanted = json.loads(STORED.read_text())[number]
    np.testing.assert_allclose(scores_of_transformers(SETTINGS[number]), wanted, rtol=1e-6)


def test_tokens_are_drawn_by_their_probabilities():
    """And only those of `top_k`, of 2,000 rows of one prompt."""
    model = jaxonnx.load(GENAI)
    prompt = np.array([5, 17, 33, 60, 8])
    logits = np.asarray(model.without_cache()(prompt[None], np.ones((1, 5), np.int64)))[0, -1]
    best = np.argsort(-logits)[:3]
    rows = model.generate(
        [prompt] * 2000, max_new_tokens=1, temperature=2.0, top_k=3, seed=1, stop=[]
    )
    counts = np.array([[row[-1] == token for token in best] for row in rows]).sum(0)
    assert counts.sum() == 2000
    shares = np.exp(logits[best].astype(np.float64) / 2)
    shares /= shares.sum()
    assert (np.abs(counts / 2000 - shares) < 4 * np.sqrt(shares * (1 - shares) / 2000)).all()


def test_repeated_tokens_are_penalized_in_greedy_search():
    """Whatever was generated counts, too: against NumPy on the logits of whole sequences."""
    model, prompt = jaxonnx.load(GENAI), np.array([5, 17, 33, 60, 8])
    whole, rows = model.without_cache(), []
    for first in (prompt, prompt[:3]):
        ids = [*first]
        for _ in range(8):
            logits = np.array(whole(np.array([ids]), np.ones((1, len(ids)), np.int64)))[0, -1]
            chosen = logits[ids]
            logits[ids] = np.where(chosen < 0, chosen * 1.8, chosen / 1.8)
            ids.append(int(logits.argmax()))
        rows.append(ids)
    more = {"max_new_tokens": 8, "stop": []}
    assert [*model.generate(prompt, **more)] != rows[0]
    made = model.generate([prompt, prompt[:3]], repetition_penalty=1.8, **more)
    assert [row.tolist() for row in made] == rows


@pytest.mark.parametrize("counted", [0, 4])
def test_tokens_of_an_encoder_have_no_penalty(counted):
    """Against NumPy on the decoder's logits; with the encoder's tokens the row is another."""
    model, prompt = jaxonnx.load(DATA / "transformers" / "t5"), np.array([37, 28, 20, 30, 1])
    ids = [0]
    for _ in range(6):
        logits = np.array(model(prompt[None], np.ones((1, 5), np.int64), np.array([ids])))[0, -1]
        penalized = [*ids, *prompt[:counted]]
        chosen = logits[penalized]
        logits[penalized] = np.where(chosen < 0, chosen * 2, chosen / 2)
        ids.append(int(logits.argmax()))
    row = model.generate(prompt, max_new_tokens=6, stop=[], repetition_penalty=2.0)
    assert (row.tolist() == ids) == (counted == 0)


@pytest.fixture
def folder_of(tmp_path):
    """Write a folder with search settings in its files; return its path."""

    def write(genai=None, other=None):
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        for file in GENAI.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((GENAI / "genai_config.json").read_text())
        config["search"] = genai or {}
        (folder / "genai_config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text(json.dumps(other or {}))
        return folder

    return write


@pytest.fixture
def settings_of(folder_of):
    """The settings of such a folder."""
    return lambda *files: Sampling.of(jaxonnx.load(folder_of(*files)).folder, None)


def test_settings_are_those_of_the_folder_where_no_temperature_is_passed(settings_of):
    drawn = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    greedy = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.2}
    assert settings_of(drawn, greedy) == Sampling(0.6, 20, 0.9)
    assert settings_of(greedy, drawn) == Sampling(repetition_penalty=1.2)
    assert settings_of(None, {"do_sample": True}) == Sampling(1.0, 50)  # as transformers
    assert settings_of(None, drawn | {"top_k": 0, "min_p": 0.1}) == Sampling(0.6, None, 0.9, 0.1)
    assert settings_of() == Sampling()
    with pytest.warns(UserWarning, match=r"ignored: \['num_beams'\]"):
        settings_of({"num_beams": 4, "min_length": 0})


def test_the_command_takes_the_other_settings_of_the_folder_beside_a_temperature(folder_of, capsys):
    """Of a folder that draws from one token, that is the most likely one, until its stop."""
    greedy = jaxonnx.load(GENAI).generate("a list", max_new_tokens=8)
    path = str(folder_of(None, {"top_k": 1, "stop_strings": [greedy[4:6]]}))
    line = ["generate", path, "--prompt", "a list", "--max-new-tokens", "8", "--temperature", "1"]
    assert main([*line, "--seed", "1"]) == 0
    assert capsys.readouterr().out == greedy[: greedy.index(greedy[4:6])] + "\n"
    assert main([*line, "--seed", "1", "--top-k", "40"]) == 0
    assert not greedy.startswith(capsys.readouterr().out[:4])


def test_seeds_have_64_bits():
    model, prompt = jaxonnx.load(GENAI), np.array([5, 17, 33, 60, 8])
    seeds = (1, 2**32 + 1, 2**63 + 1, 2**64 - 1, -5)
    more = {"max_new_tokens": 6, "temperature": 1.0, "stop": []}
    drawn = [model.generate(prompt, seed=seed, **more) for seed in seeds]
    assert len({row.tobytes() for row in drawn}) == len(seeds)
    with pytest.raises(jaxonnx.InputError, match="seed must be an integer"):
        model.generate(prompt, seed=2**64, **more)


def test_settings_that_have_no_effect_here_are_named(settings_of):
    """Those of transformers 5.24 that change what is generated, unless they have no effect."""
    told = {
        "encoder_repetition_penalty": 1.2,
        "exponential_decay_length_penalty": [3, 1.5],
        "typical_p": 0.9,
    }
    with pytest.warns(UserWarning, match="ignored: ") as raised:
        settings_of(None, told)
    (warning,) = raised
    _, listed = str(warning.message).split("ignored: ")
    assert {*ast.literal_eval(listed)} == {*told}
    # as transformers writes them, and what says how much is generated, or how fast
    silent = {"bad_words_ids": [[1]], "encoder_repetition_penalty": 1.0, "num_beams": 1}
    silent |= {"forced_eos_token_id": None, "typical_p": 1.0, "diversity_penalty": 0.0}
    silent |= {"stop_strings": [], "max_length": 20, "use_cache": False, "min_length": 0}
    assert settings_of(None, silent) == Sampling()


def test_sequences_are_biased_and_the_end_is_forced_as_the_folder_says(folder_of):
    """By the formulas of transformers, in NumPy, on the logits of whole sequences."""
    plain, prompt = jaxonnx.load(GENAI), np.array([5, 17, 33, 60, 8])
    more = {"max_new_tokens": 6, "stop": []}
    usual = plain.generate(prompt, **more)[5:].tolist()
    biases = [[[60, 8, usual[0]], -20.0], [[11], 0.5], [[17, 33, 60, 8, 20], 0.25]]
    words = [[usual[1], usual[2]]]
    settings = {"sequence_bias": biases, "bad_words_ids": words, "forced_eos_token_id": 3}
    model, whole = jaxonnx.load(folder_of(None, settings)), plain.without_cache()
    rows = []
    for first in (prompt, prompt[2:]):
        ids = [*first.tolist()]
        for step in range(6):
            logits = np.array(whole(np.array([ids]), np.ones((1, len(ids)), np.int64)))[0, -1]
            for tokens, bias in (*biases, *((word, -np.inf) for word in words)):
                if len(tokens) == 1 or ids[1 - len(tokens) :] == tokens[:-1]:
                    logits[tokens[-1]] += bias
            ids.append(3 if step == 5 else int(logits.argmax()))
        rows.append(ids)
    found = model.generate([prompt, prompt[2:]], temperature=None, **more)
    assert [row.tolist() for row in found] == rows
    assert rows[0][5:10] != usual[:5]
    assert model.generate(prompt, **more)[5:].tolist() == usual  # of another temperature
    outside = jaxonnx.load(folder_of(None, {"sequence_bias": [[[1, 100000], 1.0]]}))
    with pytest.raises(
        jaxonnx.InputError, match=r"sequence_bias, .* has 100000; the model has tokens from 0"
    ):
        outside.generate(prompt, temperature=None, **more)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 0, "temperature": 1}, "top_k must be an integer of at least 1, got 0"),
        ({"top_p": 1.5, "temperature": 1}, "top_p must be from 0 to 1, got 1.5"),
        ({"min_p": -0.1, "temperature": 1}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"temperature": "hot"}, "temperature must be a number or None"),
        ({"top_p": 0.5, "min_p": 0.1}, "top_p, min_p: at temperature 0 the most likely"),
        ({"top_k": 2, "temperature": None}, "top_k: at temperature 0"),  # as the folder says
    ],
)
def test_settings_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(jaxonnx.InputError, match=message):
        jaxonnx.load(GENAI).generate(np.array([5, 6]), max_new_tokens=1, **arguments)


if __name__ == "__main__":
    scores = [scores_of_transformers(settings).tolist() for settings in SETTINGS]
    STORED.write_text(json.dumps(scores).replace("], ", "],\n") + "\n")
