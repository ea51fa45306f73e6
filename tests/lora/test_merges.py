"""How often the adapters of a network are merged."""

import optax

import jaxonnx
from jaxonnx.lora._merge import Merge
from tests.support.tiny_networks import LABELS, examples, mlp


def test_adapters_are_merged_once_for_all_weights(tmp_path, monkeypatch):
    """Once where an adapter is applied or written, not once for each weight of each."""
    merges, read = [], Merge.read
    monkeypatch.setattr(Merge, "read", lambda self, t: merges.append(1) or read(self, t))
    lora = jaxonnx.LoRA(rank=2)
    jaxonnx.export_step(mlp(), tmp_path, examples(16), LABELS, optax.sgd(0.1), lora=lora)
    assert 0 < len(merges) <= 8  # of two weights, one by one, they were 24
