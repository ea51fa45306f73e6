"""Encoders with merged decoders, by optimum: transformers' losses and gradients, and generation.

Needs optimum-onnx, torch and transformers; CI has none of them.
"""

import json

import numpy as np
import optax
import pytest

import jaxonnx
from jaxonnx import losses

KEEP_GRADIENTS = optax.GradientTransformation(lambda params: params, lambda g, state, _: (g, g))
SIZES = {"vocab_size": 48, "d_model": 16, "decoder_start_token_id": 2, "pad_token_id": 0}
LAYERS = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dropout": 0.0,
    "eos_token_id": 1,
}
CONFIGS = {
    "T5": {"d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0},
    "Bart": LAYERS | {"max_position_embeddings": 64, "forced_eos_token_id": None},
    "Whisper": LAYERS
    | {
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 64,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}
SHARED = {
    "T5": "shared.weight",
    "Bart": "model.shared.weight",
    "Whisper": "model.decoder.embed_tokens.weight",
}
"""The table of embeddings, which the decoder and the logits share, and with text the encoder."""


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_merged_decoders_train_with_their_encoders(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    export = pytest.importorskip("optimum.exporters.onnx").main_export
    runtime = pytest.importorskip("optimum.onnxruntime")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | CONFIGS[name])
    network = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    network.save_pretrained(tmp_path / "torch")
    speech = name == "Whisper"
    task = "automatic-speech-recognition" if speech else "text2text-generation"
    sizes = {"nb_max_frames": 20} if speech else {}
    settings = {"task": f"{task}-with-past", "do_validation": False} | sizes
    export(str(tmp_path / "torch"), tmp_path / "onnx", library_name="transformers", **settings)

    ids = torch.randint(3, 48, (3, 6))
    labels = torch.randint(3, 48, (3, 5))
    labels[1, 3:] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs = {"input_features": torch.randn(3, 8, 20)} if speech else inputs
    loss = network(**inputs, labels=labels).loss
    loss.backward()
    gradient = dict(network.named_parameters())[SHARED[name]].grad.numpy()

    batch = {n: x.numpy() for n, x in (inputs | {"labels": labels}).items()}
    model = jaxonnx.load(tmp_path / "onnx")
    assert model.folder.files[1] == "decoder_model_merged.onnx"
    data = batch | {"labels": [row[row != -100] for row in batch["labels"]]}
    told = jaxonnx.evaluate(model, data, loss="seq2seq_lm", batch_size=3)
    assert told["loss"] == pytest.approx(loss.item(), rel=1e-5)
    step = jaxonnx.training.step(model, "seq2seq_lm", KEEP_GRADIENTS)
    batch["decoder_input_ids"] = losses.shift_right(batch["labels"], start=2, padding=0)
    state, (value, _) = step.update(step.init(), batch)
    assert float(value) == pytest.approx(loss.item(), rel=1e-5)
    found = step.to_file(state).optimizer[f"{SHARED[name]}_merged_0"]
    np.testing.assert_allclose(found, gradient, rtol=1e-3, atol=2e-6)

    adam = {"optimizer": optax.adam(1e-2), "epochs": 8, "batch_size": 3, "progress": False}
    tuned = jaxonnx.train(model, data, loss="seq2seq_lm", **adam).model
    with pytest.warns(UserWarning, match="old ones: decoder_model.onnx, decoder_with_past_model"):
        tuned.save(f"{tmp_path}/tuned/")
    kind = "SpeechSeq2Seq" if speech else "Seq2SeqLM"
    session = getattr(runtime, f"ORTModelFor{kind}").from_pretrained(tmp_path / "tuned")
    logits = session(
        **inputs, decoder_input_ids=torch.from_numpy(batch["decoder_input_ids"])
    ).logits
    given = {n: batch[n] for n in (*inputs, "decoder_input_ids")}
    whole = tuned.without_cache()  # beside logits it has the keys of the encoder
    np.testing.assert_allclose(logits, whole(**given)[0], atol=1e-5)

    def greedy(tokens):
        """The next token by the saved files, all computed again."""
        return whole(**given | {"decoder_input_ids": tokens})[0][:, -1].argmax(-1)

    tokens = np.full((3, 1), 2)
    for _ in range(4):
        tokens = np.concatenate([tokens, np.asarray(greedy(tokens))[:, None]], 1)
    rows = batch["input_features" if speech else "input_ids"]
    np.testing.assert_array_equal(tuned.generate(rows, max_new_tokens=4, stop=[]), tokens)
    more = {"max_new_tokens": 4, "min_new_tokens": 4, "num_beams": 1, "do_sample": False}
    found = session.generate(**inputs, **more, eos_token_id=None)
    np.testing.assert_array_equal(found[:, -4:], tokens[:, 1:])  # Whisper leaves out the start


LANGUAGES = {
    "lang_to_id": {"<|en|>": 10, "<|de|>": 11, "<|fr|>": 12},
    "task_to_id": {"transcribe": 20, "translate": 21},
    "is_multilingual": True,
}
SETTINGS = [
    {"suppress_tokens": [22, 35, 29], "begin_suppress_tokens": [43, 18, 5]},
    {"forced_decoder_ids": [[1, 10], [2, 20], [3, 30]], "suppress_tokens": [22]},
    LANGUAGES
    | {
        "forced_decoder_ids": [[1, None], [2, 20]],
        "no_timestamps_token_id": 30,
        "begin_suppress_tokens": [7],
    },
    LANGUAGES | {"language": "<|de|>", "task": "translate", "no_timestamps_token_id": 30},
    LANGUAGES | {"language": "fr"},
    LANGUAGES | {"no_timestamps_token_id": 30},
]


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
def test_whisper_forces_and_suppresses_tokens_as_transformers(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    export = pytest.importorskip("optimum.exporters.onnx").main_export
    torch.manual_seed(0)
    kind = transformers.WhisperForConditionalGeneration
    network = kind(transformers.WhisperConfig(**SIZES | CONFIGS["Whisper"])).eval()
    with torch.no_grad():
        for name, p in network.named_parameters():
            if p.ndim > 1:
                p.copy_(
                    torch.randn_like(p) * (0.3 if "embed" in name else 1.5 * p.shape[1] ** -0.5)
                )
    network.save_pretrained(tmp_path / "torch")
    settings = {"task": "automatic-speech-recognition-with-past", "nb_max_frames": 20}
    more = {"do_validation": False, "library_name": "transformers"}
    export(str(tmp_path / "torch"), tmp_path / "onnx", **settings, **more)
    features = np.random.default_rng(0).normal(size=(3, 8, 20)).astype(np.float32)
    count = {"max_new_tokens": 6, "min_new_tokens": 6}
    for told in SETTINGS:
        told = told | {"decoder_start_token_id": 2, "pad_token_id": 0}
        for folder in ("torch", "onnx"):
            (tmp_path / folder / "generation_config.json").write_text(json.dumps(told))
        network = kind.from_pretrained(tmp_path / "torch").eval()
        expected = network.generate(torch.from_numpy(features), **count)
        found = jaxonnx.load(tmp_path / "onnx").generate(features, max_new_tokens=6, stop=[])
        np.testing.assert_array_equal(np.array(found)[:, -6:], expected)
