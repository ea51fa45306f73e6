"""Masked language models: what is hidden, against transformers' collator, and what is learned."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers

import jaxonnx
from jaxonnx import losses
from jaxonnx.training._objective.needs import complete_batches
from tests.support.paths import DATA

BERT = DATA / "transformers" / "bert"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["one", "two", "three", "four", "five", "##s", "##ty", "##teen"]
ROWS = [{"text": text} for text in ("one two threes", "fourty fiveteens two", "two ones", "five")]
MASK = SPECIAL.index("[MASK]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """BERT with a layer of logits, in a folder with a WordPiece tokenizer."""
    place = tmp_path_factory.mktemp("bert")
    for file in BERT.iterdir():
        shutil.copy(file, place)
    words = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(place / "tokenizer.json"))
    named = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    (place / "tokenizer_config.json").write_text(json.dumps(named))
    head = np.random.default_rng(0).normal(size=(16, 13)).astype(np.float32)
    model = jaxonnx.load(place).then(lambda hidden: hidden @ head, outputs=["logits"])
    model.save(f"{place}/")
    return place


TOKENS = np.random.default_rng(0).integers(5, 13, (400, 40))
TOKENS[:, 0], TOKENS[:, -1], TOKENS[::2, -6:] = 2, 3, 0


class Batches:
    """A source of one batch of the tokens."""

    targets = weights = size = classes = resumable = spent = in_shares = None

    def batches(self, epoch, start=0):
        labels = np.where(TOKENS == 0, -100, TOKENS)
        yield jaxonnx.training.Batch((TOKENS, TOKENS, TOKENS), labels, np.ones(len(TOKENS)))


def hide(folder, purpose=0, epoch=0, seed=0, **settings):
    """The tokens and labels of a batch, as a step gets them."""
    sources = [None, None]
    sources[purpose] = Batches()
    loss = losses.masked_lm(**settings)
    changed = complete_batches(jaxonnx.load(folder), loss, sources, seed)[purpose]
    (batch,) = changed.batches(epoch)
    np.testing.assert_array_equal(batch.inputs[1], TOKENS)
    return batch.inputs[0], batch.targets


def shares_of(tokens, labels, original):
    """Of the tokens that may be hidden: chosen, then hidden, changed and left."""
    chosen = labels != -100
    assert not np.isin(original[chosen], range(5)).any()
    np.testing.assert_array_equal(labels[chosen], original[chosen])
    np.testing.assert_array_equal(tokens[~chosen], original[~chosen])
    new, old = tokens[chosen], original[chosen]
    kinds = (new == MASK), (new != MASK) & (new != old), new == old
    return np.array([chosen[original > 4].mean(), *(kind.mean() for kind in kinds)])


EXPECTED = np.array([0.15, 0.8 + 0.1 / 13, 0.1 * 11 / 13, 0.1 + 0.1 / 13])
"""Another token may be the mask token, or the token itself."""


def test_tokens_are_hidden_by_the_shares_of_bert(folder):
    shares = shares_of(*hide(folder), TOKENS)
    np.testing.assert_allclose(shares, EXPECTED, atol=0.03)
    more = shares_of(*hide(folder, probability=0.5), TOKENS)
    np.testing.assert_allclose(more, [0.5, *EXPECTED[1:]], atol=0.03)


def test_shares_are_those_of_transformers(folder):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        **json.loads((folder / "tokenizer_config.json").read_text()),
    )
    collate = transformers.DataCollatorForLanguageModeling(fast, mlm_probability=0.15)
    torch.manual_seed(0)
    batch = collate([{"input_ids": row.tolist()} for row in TOKENS])
    tokens, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    theirs = shares_of(tokens, labels, TOKENS)
    np.testing.assert_allclose(theirs, shares_of(*hide(folder), TOKENS), atol=0.03)


def test_tokens_that_the_model_lacks_hide_nothing(folder, tmp_path):
    """A tokenizer has more of them where some were added and the model was not resized."""
    place = shutil.copytree(folder, tmp_path / "larger")
    tokenizer = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.add_tokens([f"new{i}" for i in range(50)])
    tokenizer.save(str(place / "tokenizer.json"))
    tokens, labels = hide(place)
    assert tokens.max() < 13
    shares_of(tokens, labels, TOKENS)


def test_draws_depend_on_the_seed_and_the_epoch(folder):
    first = hide(folder, seed=1, epoch=2)
    for other, same in (
        (hide(folder, seed=1, epoch=2), True),
        (hide(folder, seed=2, epoch=2), False),
        (hide(folder, seed=1, epoch=3), False),
        (hide(folder, purpose=1, seed=1, epoch=2), False),
    ):
        assert all(map(np.array_equal, first, other)) == same
    held_out = hide(folder, purpose=1, epoch=0)
    assert all(map(np.array_equal, held_out, hide(folder, purpose=1, epoch=5)))


def test_words_are_chosen_whole(folder):
    _, labels = hide(folder, whole_words=True)
    chosen, inside = labels != -100, TOKENS >= 10  # "##s" and others
    both = inside[:, 1:] & (TOKENS[:, :-1] > 4)
    np.testing.assert_array_equal(chosen[:, 1:][both], chosen[:, :-1][both])
    assert chosen[TOKENS > 4].mean() == pytest.approx(0.15, abs=0.03)
    _, labels = hide(folder)
    chosen = labels != -100
    assert (chosen[:, 1:][both] != chosen[:, :-1][both]).any()


@pytest.mark.parametrize("space", ["\u0120", "\u2581"])
def test_words_are_chosen_whole_by_the_spaces_before_them(space, folder, tmp_path):
    """Of byte-level BPE (RoBERTa, ModernBERT) and SentencePiece, which may have a token "##"."""
    shutil.copytree(folder, tmp_path / "model")
    pieces = ["#", "##", "l", "o", "lo", space, f"{space}lo", "."]
    words = {word: i for i, word in enumerate(SPECIAL + pieces)}
    merges = [("#", "#"), ("l", "o"), (space, "lo")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges, unk_token="[UNK]"))
    before = tokenizers.pre_tokenizers
    of_spaces = before.Metaspace(prepend_scheme="never")
    tokenizer.pre_tokenizer = before.ByteLevel(False) if space == "\u0120" else of_spaces
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    tokens = np.array(tokenizer.encode("[CLS]lolo lol ## lo. lo[SEP]").ids)
    assert [tokenizer.id_to_token(i) for i in tokens[1:6]] == ["lo", "lo", f"{space}lo", "l", space]
    words = np.array([-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, -1])
    rows = np.tile(tokens, (200, 1))
    change = losses.masked_lm(whole_words=True, probability=0.3).draw(
        jaxonnx.load(tmp_path / "model")
    )
    batch = jaxonnx.training.Batch((rows, rows, rows), rows, np.ones(200))
    chosen = change(np.random.default_rng(0), batch).targets != -100
    assert not chosen[:, words < 0].any()
    by_word = np.stack([chosen[:, words == word].all(1) for word in range(5)], 1)
    np.testing.assert_array_equal(chosen[:, 1:-1], by_word[:, words[1:-1]])
    assert by_word.mean() == pytest.approx(0.3, abs=0.05)
    assert abs(np.corrcoef(by_word.T) - np.eye(5)).max() < 0.3  # and words apart


def test_texts_train_and_the_loss_is_the_cross_entropy_of_hidden_tokens(folder):
    settings = {"batch_size": 4, "epochs": 10, "optimizer": optax.adam(5e-2), "seed": 1}
    loss = losses.masked_lm(probability=0.4)
    result = jaxonnx.train(folder, ROWS * 4, loss=loss, validation=ROWS, **settings)
    history = result.history
    assert history.epochs[-1]["validation_loss"] < history.epochs[0]["validation_loss"]
    assert not [note for note in history.notes if "end of texts" in note]
    again = jaxonnx.train(folder, ROWS * 4, loss=loss, validation=ROWS, **settings)
    assert again.history.losses == history.losses
    # tokens without a tokenizer, by hand
    model = jaxonnx.load(folder)
    data = {"input_ids": TOKENS[:8, :16]}
    plain = losses.masked_lm(mask_token=MASK, special_tokens=range(5), probability=0.4)
    made = jaxonnx.evaluate(model, data, loss=plain, batch_size=8, metrics=[])["loss"]
    labels = np.where(data["input_ids"] > 0, data["input_ids"], -100)
    batch = jaxonnx.training.Batch((data["input_ids"],) * 3, labels, np.ones(8))
    source = type("One", (Batches,), {"batches": lambda self, epoch, start=0: iter([batch])})()
    (hidden,) = complete_batches(model, plain, [None, source], 0)[1].batches(0)
    mask = np.ones((8, 16), np.int64)
    logits = model(jnp.asarray(hidden.inputs[0]), mask, 0 * mask)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(hidden.targets, 0))
    counts = hidden.targets >= 0
    assert made == pytest.approx(float((each * counts).sum() / counts.sum()), rel=1e-5)


def test_the_loss_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(1).normal(size=(3, 5, 7)).astype(np.float32)
    labels = np.random.default_rng(2).integers(-2, 7, (3, 5))
    labels[labels < 0] = -100
    wanted = torch.nn.functional.cross_entropy(
        torch.tensor(logits).transpose(1, 2), torch.tensor(labels)
    )
    assert float(losses.masked_lm()(logits, labels)) == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "data", "message"),
    [
        (losses.masked_lm(), {"input_ids": TOKENS[:4, :16]}, "no folder with a tokenizer"),
        (
            losses.masked_lm(mask_token=4, whole_words=True),
            {"input_ids": TOKENS[:4, :16]},
            "whole_words needs a tokenizer",
        ),
        (
            losses.masked_lm(mask_token=4),
            {"input_ids": TOKENS[:4, :16], "labels": TOKENS[:4, 1:17]},
            "the labels are not the tokens: leave them out",
        ),
    ],
)
def test_what_cannot_be_hidden_is_said(loss, data, message, folder):
    model = jaxonnx.load((folder / "model.onnx").read_bytes())
    with pytest.raises(jaxonnx.TrainingError, match=message):
        jaxonnx.train(model, data, loss=loss, batch_size=4)
    with pytest.raises(jaxonnx.TrainingError, match="probability must be between 0 and 1"):
        losses.masked_lm(probability=1.0)


def test_a_preview_shows_the_hidden_tokens(folder):
    """As they were, and as many as the first epoch hides."""
    settings = {"optimizer": optax.sgd(0.1), "batch_size": 2}
    settings |= {"loss": losses.masked_lm(probability=0.5)}
    seen = jaxonnx.training.preview(folder, ROWS * 4, **settings)
    tokenizer = jaxonnx.load(folder).tokenizer
    lengths = [len(tokenizer.encode(row["text"])) for row in ROWS * 4]
    assert seen.tokens == sum(lengths)
    assert seen.trained_tokens is not None
    assert 0 < seen.trained_tokens < sum(lengths) - 2 * len(lengths)  # not [CLS] and [SEP]
    for parts, row in zip(seen.examples, ROWS, strict=False):
        tokens = [token for text, _ in parts for token in text.split()]
        assert tokens == tokenizer.decode(tokenizer.encode(row["text"])).split()
    assert any(counts for parts in seen.examples for _, counts in parts)
    assert f"of which {seen.trained_tokens} are trained in the first epoch" in str(seen)
    again = jaxonnx.training.preview(folder, ROWS * 4, seed=1, **settings)
    assert again.examples != seen.examples


def test_the_loss_of_texts_is_that_of_masks_by_default(folder):
    result = jaxonnx.train(folder, ROWS, batch_size=4)
    assert "loss: masked_lm (default for texts)" in result.history.notes
