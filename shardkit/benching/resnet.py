"""ResNet-50 and its training step: what a loader has to keep busy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["resnet50", "training_step"]

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Inner channels, blocks and stride of the four stages."""
_EXPANSION = 4
_Module: TypeAlias = "torch.nn.Module"
_Foreign: TypeAlias = Any  # torch decides about the type when it runs


def resnet50(classes: int = 1000) -> _Module:
    """Return the network of He et al. (2015), with the stride in the 3 x 3 convolution, as everybody measures it."""
    from torch import nn

    def convolve(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[_Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        return [convolution, nn.BatchNorm2d(outputs)]

    class Bottleneck(nn.Module):
        def __init__(self, inputs: int, inner: int, stride: int) -> None:
            super().__init__()
            outputs = inner * _EXPANSION
            self.body = nn.Sequential(
                *convolve(inputs, inner, 1), nn.ReLU(inplace=True),
                *convolve(inner, inner, 3, stride), nn.ReLU(inplace=True), *convolve(inner, outputs, 1),
            )  # fmt: skip
            same = inputs == outputs and stride == 1
            self.shortcut = nn.Identity() if same else nn.Sequential(*convolve(inputs, outputs, 1, stride))
            self.relu = nn.ReLU(inplace=True)

        def forward(self, images: torch.Tensor) -> _Foreign:
            return self.relu(self.body(images) + self.shortcut(images))

    layers: list[_Module] = [*convolve(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for inner, blocks, stride in _STAGES:
        for number in range(blocks):
            layers.append(Bottleneck(channels, inner, stride if number == 0 else 1))
            channels = inner * _EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def training_step(model: _Module, device: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function that makes one step of SGD in bfloat16 autocast, its weights in channels_last order.

    Args:
        model: moved to the device.
        device: torch's name of it.
    """
    import torch

    torch.backends.cudnn.benchmark = True
    model = model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kind = torch.device(device).type

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(kind, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
