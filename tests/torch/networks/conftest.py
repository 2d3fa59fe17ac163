from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """ResNet-like: strided blocks, a projection beside them, a pool, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 8, 3, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.first, self.second = Block(8, 8, 1), Block(8, 16, 2)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.stem(x)))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = conv(inputs, outputs, 3, stride), conv(outputs, outputs, 3, 1)
        self.beside = nn.Identity() if inputs == outputs else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.two(F.relu(self.one(x))).add_(self.beside(x)))


def conv(inputs: int, outputs: int, size: int, stride: int, groups: int = 1) -> nn.Sequential:
    """A convolution and its norm, whose statistics are not those it begins with."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    norm = nn.BatchNorm2d(outputs)
    for given, (mean, spread) in {
        "running_mean": (0, 0.2), "running_var": (1, 0.1), "weight": (1, 0.2), "bias": (0, 0.2),
    }.items():  # fmt: skip
        getattr(norm, given).data.normal_(mean, spread).abs_()
    return nn.Sequential(layer, norm)


class Mobile(nn.Module):
    """MobileNet-like: depthwise convolutions, gates, the activations of that family."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.each = conv(3, 16, 1, 1), conv(16, 16, 5, 2, groups=16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = conv(16, 12, 1, 1)
        self.last = nn.Sequential(
            nn.Linear(12, 20), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(20, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.each(F.relu6(self.expand(x))))
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        x = F.silu(self.project(x * F.hardsigmoid(gate)))
        return self.last(x.mean((2, 3)))


class UNet(nn.Module):
    """Down, up again by a transposed convolution and by interpolation, with what was before."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 10, 3, padding="same")
        self.deep, self.up = nn.Conv2d(10, 10, 3, padding=1), nn.ConvTranspose2d(10, 6, 2, 2)
        self.out, self.norm = nn.Conv2d(18, 3, 1), nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        a = F.leaky_relu(self.norm(self.one(x)))
        b = F.relu(self.two(F.max_pool2d(a, 2)))
        c = F.elu(self.deep(F.avg_pool2d(b, 2)))
        d = F.interpolate(c, scale_factor=2, mode="nearest")
        e = F.interpolate(F.pad(self.up(d + b), (0, 0, 0, 0)), size=x.shape[-2:], mode="bilinear")
        return self.out(torch.cat([a, e, x, torch.tanh(a[:, :4])], 1))


class Volumes(nn.Module):
    """Convolutions of three dimensions and of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 4, 3, padding=1)
        self.second, self.norm = nn.Conv3d(4, 6, (1, 3, 3), (1, 2, 2)), nn.BatchNorm3d(6)
        self.line = nn.Conv1d(6, 8, 3, dilation=2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(F.relu(self.first(x)), (1, 2, 2))
        x = F.avg_pool3d(F.sigmoid(self.norm(self.second(x))), (1, 3, 3), count_include_pad=False)
        return self.line(x.flatten(2))


class Vision(nn.Module):
    """ViT-like: patches, a token for the class, PyTorch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.randn(1, 1, 32))
        self.places = nn.Parameter(torch.randn(1, 17, 32) * 0.2)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.layers(x)[:, 0])


class Language(nn.Module):
    """GPT-like: embeddings, causal attention in one projection, a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(12, 32)
        self.norm, self.all = nn.LayerNorm(32), nn.Linear(32, 96)
        self.join, self.head = nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        batch, length = tokens.shape
        x = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        parts = self.all(self.norm(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        seen = mask[:, None, None, :].bool() & torch.ones(length, length).tril().bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.join(y.transpose(1, 2).reshape(batch, length, 32))
        scores = torch.softmax(q @ k.transpose(-2, -1) * 8**-0.5, -1)
        return {"logits": self.head(F.gelu(x, approximate="tanh")), "inner": (x, scores.mean(1))}


def _tokens(batch: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(batch, 12, dtype=torch.int64)
    mask[0, 9:] = 0
    return torch.randint(0, 50, (batch, 12)), mask


NETWORKS: dict[str, tuple[type[nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "residual": (Residual, lambda batch: (torch.randn(batch, 3, 32, 32),)),
    "mobile": (Mobile, lambda batch: (torch.randn(batch, 3, 17, 16),)),
    "unet": (UNet, lambda batch: (torch.randn(batch, 2, 16, 24),)),
    "volumes": (Volumes, lambda batch: (torch.randn(batch, 2, 5, 18, 20),)),
    "vision": (Vision, lambda batch: (torch.randn(batch, 3, 16, 16),)),
    "language": (Language, _tokens),
}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[[int], Any]]:
    """A model of each kind, and what makes inputs of a batch for it."""
    return made(request.param)


def made(name: str) -> tuple[nn.Module, Callable[[int], Any]]:
    torch.manual_seed(3)
    kind, inputs = NETWORKS[name]
    return kind().eval(), inputs


@pytest.fixture
def build() -> Callable[[str], tuple[nn.Module, Callable[[int], Any]]]:
    """One of these models, by name."""
    return made
