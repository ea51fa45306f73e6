"""Prints the PyTorch values in tests/optim/test_optim.py (needs torch; the tests do not)."""

import torch

OPTIMIZERS = {
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.25, eps=1e-6, weight_decay=0.0625),
    "sgd": lambda p: torch.optim.SGD(p, 0.0625, 0.5, dampening=0.25, weight_decay=0.0625),
    "nesterov": lambda p: torch.optim.SGD(p, 0.0625, 0.5, nesterov=True, weight_decay=0.0625),
    "adam": lambda p: torch.optim.Adam(p, 0.1, (0.875, 0.96875), eps=0.0),
}

for name, make in OPTIMIZERS.items():
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    optimizer = make([x])
    for t in range(5):
        g = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64) * (t + 1)
        x.grad = g + 0.05 * x.detach()
        optimizer.step()
    print(f'    "{name}": {[round(v, 8) for v in x.tolist()]},')
