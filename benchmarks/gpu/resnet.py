"""ResNet-50: torchvision's where it is installed, else the same network in plain torch (He et al., 2015, table 1)."""

from __future__ import annotations

import torch
from torch import nn

_EXPANSION = 4


def resnet(classes: int, *, small: bool = False) -> tuple[nn.Module, str]:
    """The network and where it is from; a small one for trials."""
    if small:
        return ResNet(classes, blocks=(1, 1, 1, 1), width=8), "a small network of the same kind"
    try:
        from torchvision.models import resnet50
    except (ImportError, RuntimeError):  # not installed, or for another torch than the one that is here
        return ResNet(classes), "ResNet-50 in plain torch"
    return resnet50(num_classes=classes), "torchvision's ResNet-50"


class Bottleneck(nn.Module):
    """Convolutions of size 1, 3 and 1 with a way around them; the stride is in the middle one."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * _EXPANSION
        self.body = nn.Sequential(
            *convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, out, 1),
        )
        around = stride == 1 and channels == out
        self.around = nn.Identity() if around else nn.Sequential(*convolution(channels, out, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.around(x))


class ResNet(nn.Module):
    """A stem, four stages of bottleneck blocks, and a linear layer over the mean."""

    def __init__(self, classes: int, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            for block in range(count):
                layers.append(Bottleneck(channels, inner, 2 if stage and not block else 1))
                channels = inner * _EXPANSION
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def convolution(channels: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and its normalisation."""
    return [nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]
