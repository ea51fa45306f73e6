"""The PyTorch networks behind the files of this folder, narrowed until each file is small."""

import torch
from torch import nn
from torch.nn import functional


class LeNet(nn.Module):
    """Two convolutions and three linear layers on 1x28x28 images; with or without normalization."""

    def __init__(self, normalized: bool):
        super().__init__()
        norm = nn.BatchNorm2d if normalized else (lambda channels: nn.Identity())
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            norm(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 12, 5),
            norm(12),
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(300, 32), nn.Tanh(), nn.Linear(32, 24), nn.Sigmoid(), nn.Linear(24, 10)
        )

    def forward(self, images):
        return self.classifier(torch.flatten(self.features(images), 1))


class BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """The layers of ResNet-18 at a sixteenth of its width, for 3x32x32 images."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8, 1))
        self.layer3 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.layer4 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, 10)

    def forward(self, images):
        x = self.maxpool(functional.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class InvertedResidual(nn.Module):
    def __init__(self, before: int, after: int, stride: int, expand: int):
        super().__init__()
        hidden = before * expand
        self.residual = stride == 1 and before == after
        self.conv = nn.Sequential(
            nn.Conv2d(before, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNet(nn.Module):
    """Five inverted residual blocks with depthwise convolutions, for 3x32x32 images."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            InvertedResidual(8, 8, 1, 2),
            InvertedResidual(8, 12, 2, 3),
            InvertedResidual(12, 12, 1, 3),
            InvertedResidual(12, 16, 2, 3),
            InvertedResidual(16, 16, 1, 3),
            nn.Conv2d(16, 40, 1, bias=False),
            nn.BatchNorm2d(40),
            nn.ReLU6(),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(40, 10))

    def forward(self, images):
        return self.classifier(self.features(images).mean((2, 3)))


class Transformer(nn.Module):
    """A two-layer encoder over twelve tokens of a vocabulary of fifty, mean-pooled."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.position = nn.Parameter(torch.randn(12, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens):
        x = self.encoder(self.embedding(tokens) + self.position)
        return self.head(self.norm(x).mean(1))


class LSTM(nn.Module):
    """Two LSTM layers, the first bidirectional, over twelve tokens of a vocabulary of fifty."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.first = nn.LSTM(16, 12, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(24, 20, batch_first=True)
        self.head = nn.Linear(20, 10)

    def forward(self, tokens):
        x, _ = self.first(self.embedding(tokens))
        _, (hidden, _) = self.second(x)
        return self.head(hidden[-1])


NETWORKS = {
    "lenet": lambda: LeNet(normalized=False),
    "lenet_bn": lambda: LeNet(normalized=True),
    "resnet18": ResNet18,
    "mobilenet": MobileNet,
    "transformer": Transformer,
    "lstm": LSTM,
}


def inputs(name: str, count: int, seed: int) -> torch.Tensor:
    """Images with 256 levels, or tokens; the same for equal arguments."""
    random = torch.Generator().manual_seed(seed)
    if name in ("transformer", "lstm"):
        return torch.randint(0, 50, (count, 12), generator=random)
    shape = (count, 1, 28, 28) if name.startswith("lenet") else (count, 3, 32, 32)
    return torch.randint(0, 256, shape, generator=random).float() / 255


def labels(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 10, (count,), generator=torch.Generator().manual_seed(seed + 1))


def network(name: str, fresh: bool = False) -> nn.Module:
    """The network in evaluation mode. Unless fresh, it has seen data: no two tensors are equal."""
    torch.manual_seed(0)
    net = NETWORKS[name]()
    if not fresh:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
            net.train()
            for seed in range(5):
                net(inputs(name, 16, seed))
    return net.eval()
