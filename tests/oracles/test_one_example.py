"""Transformers exported for one example, trained on batches of three, against PyTorch.

Needs torch, transformers 5 and onnxscript; CI has none of them.
"""

import numpy as np
import optax
import pytest

import jaxonnx

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 24}
CONFIGS = {
    "Bert": SIZES,
    "Roberta": SIZES,
    "DistilBert": {"vocab_size": 40, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24},
    "DebertaV2": SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "Qwen2": SIZES | {"num_key_value_heads": 1, "use_cache": False, "pad_token_id": 1},
}
LABELS = np.array([2, 0, 1])
LENGTHS = np.array([7, 4, 5])
MASK = np.int64(np.arange(7) < LENGTHS[:, None])
IDS = np.where(MASK, np.random.default_rng(0).integers(3, 40, (3, 7)), 1)


@pytest.mark.filterwarnings("default")  # of the exporters
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_batches_of_a_file_for_one_example(name, dynamo, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name], num_labels=3)
    network = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    for parameter in network.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)

    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, input_ids, attention_mask):
            return self.network(input_ids=input_ids, attention_mask=attention_mask).logits

    ids, mask, labels = map(torch.from_numpy, (IDS, MASK, LABELS))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(Flat()(ids, mask), labels).item()
    path = tmp_path / "one.onnx"
    names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["logits"]}
    torch.onnx.export(Flat(), (ids[:1], mask[:1]), path, dynamo=dynamo, **names)
    data = {"input_ids": IDS, "attention_mask": MASK, "y": LABELS}
    loss, settings = "softmax_cross_entropy_with_integer_labels", {"epochs": 1, "batch_size": 3}
    result = jaxonnx.train(path, data, loss=loss, optimizer=optax.sgd(0.0), **settings)
    np.testing.assert_allclose(result.history.losses, [expected], rtol=1e-5)
    assert result.model.inputs[0].shape == ("batch", 7)
