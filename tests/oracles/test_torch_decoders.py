"""Decoders by `torch.onnx.export` at opsets 18 to 24 and by optimum, against transformers.

Needs torch, transformers and onnxscript, and for optimum's files optimum-onnx or optimum 1.27; CI
has none of them.
"""

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx

KEEP_GRADIENTS = optax.GradientTransformation(lambda params: params, lambda g, state, _: (g, g))
IDS = np.random.default_rng(0).integers(3, 60, (2, 12))
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "Llama": SIZES,
    "Qwen3": SIZES | {"tie_word_embeddings": True},
    "GPT2": {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
}


def make_network(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    network = getattr(transformers, kind)(config).eval()
    for parameter in network.parameters():  # equal norms would be one tensor of the file
        parameter.data += 0.1 * torch.randn_like(parameter)
    return network


def export(network, path, opset, cached):
    """Write a network of tokens and their mask, and of caches if asked for."""
    import torch
    from transformers import DynamicCache

    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, input_ids, attention_mask, pasts=()):
            past = DynamicCache(pasts) if cached else None
            given = {"input_ids": input_ids, "attention_mask": attention_mask}
            found = self.network(**given, past_key_values=past, use_cache=cached)
            layers = found.past_key_values.layers if cached else ()
            return found.logits, *(x for layer in layers for x in (layer.keys, layer.values))

    rows, length, past = (torch.export.Dim(n) for n in ("rows", "length", "past"))
    ids = torch.from_numpy(IDS)
    inputs, shapes = [ids, torch.ones_like(ids)], [{0: rows, 1: length}] * 2
    names = [["input_ids", "attention_mask"], ["logits"]]
    if cached:
        layers = range(SIZES["num_hidden_layers"])
        sizes = 2, SIZES["num_key_value_heads"], 3, SIZES["head_dim"]
        inputs[1] = torch.ones(2, 15, dtype=ids.dtype)
        shapes[1] = {0: rows, 1: torch.export.Dim.AUTO}
        inputs.append([[torch.zeros(sizes) for _ in range(2)] for _ in layers])
        shapes.append([[{0: rows, 2: past}] * 2 for _ in layers])
        for part, kind in zip(names, ("past_key_values", "present"), strict=True):
            part += [f"{kind}.{i}.{x}" for i in layers for x in ("key", "value")]
    settings = {"dynamo": True, "opset_version": opset, "dynamic_shapes": tuple(shapes)}
    settings |= {"input_names": names[0], "output_names": names[1], "verbose": False}
    torch.onnx.export(Flat(), tuple(inputs), path, **settings)


def check(network, path, opset):
    """Outputs, first loss and all gradients are those of transformers; the tuned file agrees."""
    import torch

    (version,) = [e.version for e in onnx.load(path).opset_import if not e.domain]
    assert version == opset
    tokens = torch.from_numpy(IDS)
    found = network(input_ids=tokens, labels=tokens)
    found.loss.backward()
    model = jaxonnx.load(path)

    def logits_of(model):
        whole = model.without_cache()
        given = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
        given["position_ids"] = np.tile(np.arange(IDS.shape[1]), (2, 1))
        return whole(**{value.name: given[value.name] for value in whole.inputs})

    np.testing.assert_allclose(logits_of(model), found.logits.detach(), atol=1e-5)
    step = jaxonnx.training.step(model, "causal_lm", KEEP_GRADIENTS)
    state, (loss, _) = jax.jit(step.update)(step.init(), {"input_ids": IDS})
    assert float(loss) == pytest.approx(found.loss.item(), rel=1e-5)
    gradients = step.to_file(state).optimizer
    names = {model.aliases.get(n, n).removeprefix("network."): n for n in model.params}
    parameters = dict(network.named_parameters())
    if "lm_head.weight" not in parameters and "lm_head.weight" in names:  # of a tied table
        (table,) = {*parameters} - {*names}
        names[table] = names.pop("lm_head.weight")
    assert {*names} == {*parameters}
    for key, parameter in parameters.items():
        ours, value = gradients[names[key]], parameter.detach().numpy()
        same = np.array_equal(model.params[names[key]], value)  # or its transpose
        expected = parameter.grad.numpy() if same else parameter.grad.numpy().T
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-6, err_msg=key)

    adam = {"optimizer": optax.adam(1e-2), "epochs": 4, "batch_size": 2, "progress": False}
    result = jaxonnx.train(model, {"input_ids": IDS}, loss="causal_lm", **adam)
    assert result.history.losses[-1] < result.history.losses[0] - 0.2
    result.model.save(path.with_name("tuned.onnx"))
    session = onnxruntime.InferenceSession(path.with_name("tuned.onnx"))
    inputs = {v.name: v.shape for v in session.get_inputs()}
    logits = []
    for row in IDS:  # onnxruntime takes no tables of one row for several, as opset 23 has them
        feed = {"input_ids": row[None], "attention_mask": np.ones_like(row[None])}
        feed["position_ids"] = np.arange(len(row))[None]
        for name in {*inputs} - {*feed}:
            feed[name] = np.zeros((1, inputs[name][1], 0, inputs[name][3]), np.float32)
        logits += session.run(["logits"], {name: feed[name] for name in inputs})
    logits = np.concatenate(logits)
    np.testing.assert_allclose(logits_of(result.model), logits, atol=2e-5)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", range(18, 25))
@pytest.mark.parametrize("name", ["Llama", "Llama with caches", "Qwen3", "GPT2"])
def test_decoders_of_pytorch(name, opset, tmp_path):
    pytest.importorskip("onnxscript")
    network = make_network(name.split()[0])
    export(network, tmp_path / "model.onnx", opset, "caches" in name)
    check(network, tmp_path / "model.onnx", opset)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [14, 18, 21])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_decoders_of_optimum(name, opset, tmp_path):
    network = make_network(name)
    export = pytest.importorskip("optimum.exporters.onnx").main_export
    network.save_pretrained(tmp_path / "torch")
    settings = {"library_name": "transformers", "do_validation": False}
    task = "text-generation-with-past"
    export(str(tmp_path / "torch"), tmp_path, task=task, opset=opset, **settings)
    check(network, tmp_path / "model.onnx", opset)
