"""Writes adapters that PEFT trained with one setting each, and what the network then computes.

    python -m tests.data.make_peft

The network is that of `tests/lora/test_peft_settings.py`. `lora/peft.npz` holds ids, the tensors of
the base, and for each setting the configuration, the tensors of the folder and the outputs (peft
0.21.2). Needs torch and peft.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
from safetensors.numpy import load_file
from torch import nn

SETTINGS = {
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_dora": {"init_lora_weights": "pissa", "use_dora": True, "use_rslora": True},
    "olora": {"init_lora_weights": "olora"},
    "mica": {"init_lora_weights": "mica"},
    "bias_all": {"bias": "all"},
    "bias_lora_only": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "tokens": {"trainable_token_indices": {"embed": [5, 1]}},
    "conv": {"target_modules": ["conv", "fc"]},
    "conv_dora": {"target_modules": ["conv"], "use_dora": True},
    "saved": {"target_modules": ["conv"], "modules_to_save": ["fc"]},
    "velora": {"velora_config": peft.VeloraConfig()},
    "lora_ga": {"init_lora_weights": "lora_ga", "lora_ga_config": peft.LoraGAConfig()},
    "alora": {"alora_invocation_tokens": [1, 2]},
}
FILE = Path(__file__).parent / "lora" / "peft.npz"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.fc = nn.Linear(6, 5)

    def forward(self, ids):
        h = torch.relu(self.conv(self.embed(ids).transpose(1, 2)))
        return self.fc(h.mean(2))


def train(ids, settings):
    """A network with adapters after some steps."""
    network = Network()
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 3, "target_modules": ["fc"]} | settings)
    if settings.get("init_lora_weights") == "lora_ga":
        loss = lambda: network(ids).square().sum().backward()  # noqa: E731
        peft.tuners.lora.loraga.preprocess_loraga(network, config, loss)
    model = peft.get_peft_model(network, config)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 3e-2)
    for _ in range(4):
        optimizer.zero_grad()
        (model(ids) - 1).square().sum().backward()
        optimizer.step()
    return model.eval()


def main():
    ids = torch.tensor([[1, 5, 2, 0], [3, 3, 6, 1]])
    base = Network()
    arrays = {"ids": ids.numpy(), "base": base(ids).detach().numpy()}
    arrays |= {f"base/{name}": x.detach().numpy() for name, x in base.named_parameters()}
    for name, settings in SETTINGS.items():
        model = train(ids, settings)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            config = json.loads(Path(folder, "adapter_config.json").read_text())
            tensors = load_file(Path(folder, "adapter_model.safetensors"))
        arrays[name] = model(ids).detach().numpy()
        arrays[f"{name}/config"] = np.array(json.dumps(config))
        arrays |= {f"{name}/tensors/{key}": x for key, x in tensors.items()}
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
