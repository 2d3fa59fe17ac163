"""Models of PyTorch as one call: the kernels give what the layers give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.graph import Session
from lowbit.graph.passes import simplified
from lowbit.isa import available
from lowbit.torch import to_graph


class Encoder(nn.Module):
    """Of sentences, with masks; the mean of its tokens, of length 1."""

    def __init__(self, size: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(50, size), nn.Embedding(32, size)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(3))
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        batch, length = ids.shape
        x = self.norms[0](self.words(ids) + self.places(torch.arange(length)))
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = mask[:, None, None, :].bool()
        y = F.scaled_dot_product_attention(*parts.unbind(0), attn_mask=seen)
        x = self.norms[1](x + self.out(y.transpose(1, 2).reshape(batch, length, -1)))
        x = self.norms[2](x + self.narrow(F.gelu(self.wide(x))))
        weight = mask.float()[..., None]
        mean = (x * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return F.normalize(mean, dim=-1), torch.tanh(x[:, 0])


class ConvNeXt(nn.Module):
    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, size, 4, 4), nn.Conv2d(size, 2 * size, 2, 2)
        self.deep, self.norm = nn.Conv2d(size, size, 7, padding=3, groups=size), nn.LayerNorm(size)
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.scale = nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.narrow(F.gelu(self.wide(y))) * self.scale
        return self.down(x + y.permute(0, 3, 1, 2)).mean((2, 3))


class Mobile(nn.Module):
    """Squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.last = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.deep(F.hardswish(self.norm(self.stem(x)))))
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        return self.last(x * F.hardsigmoid(gate))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.groups = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.down, self.up = nn.Conv2d(8, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, 2)
        self.both = nn.Conv2d(16, 8, 3, padding=1, padding_mode="reflect")
        self.images, self.last = nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        left = F.silu(self.groups(self.first(x)))
        right = F.leaky_relu(self.down(F.max_pool2d(left, 2)), 0.1)
        y = self.images(F.elu(self.both(torch.cat([left, self.up(right)], 1))))
        y = self.last(y)
        smooth = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return smooth, F.interpolate(y, scale_factor=2, mode="nearest").softmax(1)


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8)
        self.second = nn.Conv3d(8, 8, (1, 3, 3), stride=(1, 2, 2), groups=2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.mish(self.norm(self.first(x))))
        return self.last(F.adaptive_avg_pool3d(y, 1).flatten(1)).log_softmax(-1)


class ViT(nn.Module):
    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, size, 8, 8), nn.Linear(size, 5)
        self.first = nn.Parameter(torch.randn(1, 1, size))
        self.places = nn.Parameter(torch.randn(1, 17, size))
        layer = nn.TransformerEncoderLayer(size, 4, 96, 0.0, "gelu", batch_first=True,
                                           norm_first=True)  # fmt: skip
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        made = self.head(self.layers(x)[:, 0])
        return made, made.argmax(-1)


def _words() -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([12, 7, 3])
    return torch.randint(0, 50, (3, 12)), (torch.arange(12)[None] < lengths[:, None]).long()


def _image() -> tuple[Tensor]:
    return (torch.randn(2, 3, 32, 32),)


MODELS = [(Encoder, _words), (ConvNeXt, _image), (Mobile, _image), (UNet, _image), (ViT, _image),
          (Video, lambda: (torch.randn(2, 2, 4, 9, 8),))]  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize(("make", "example"), MODELS)
def test_models(make: type[nn.Module], example: Any) -> None:
    torch.manual_seed(0)
    model, given = make().eval(), example()
    with torch.no_grad():
        want = model(*given)
    graph = simplified(to_graph(model, given))
    for name in {available()[0], "avx2", "generic"} & set(available()):
        made = Session(graph, threads=2, isa=name)(*(one.numpy() for one in given))
        wanted, got = ((one,) if not isinstance(one, tuple) else one for one in (want, made))
        for left, right in zip(wanted, got, strict=True):
            np.testing.assert_allclose(right, left.numpy(), rtol=1e-4, atol=2e-5)
