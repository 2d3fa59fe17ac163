"""Small networks of PyTorch, exported to ONNX."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest


def _networks() -> dict[str, tuple[Callable[[], Any], tuple[int, ...]]]:
    import torch
    from torch import nn

    class ResNet(nn.Module):
        """A stem and two blocks, the second of half the size, and a classifier."""

        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(
                nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                nn.MaxPool2d(3, 2, 1),
            )  # fmt: skip
            self.a = nn.Sequential(
                nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8),
            )  # fmt: skip
            self.b = nn.Sequential(
                nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16),
            )  # fmt: skip
            self.down = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16))
            self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

        def forward(self, x: Any) -> Any:
            x = self.stem(x)
            x = torch.relu(self.a(x) + x)
            return self.head(torch.relu(self.b(x) + self.down(x)))

    class MobileNet(nn.Module):
        """An inverted residual block with squeeze and excitation."""

        def __init__(self) -> None:
            super().__init__()
            self.expand = nn.Sequential(
                nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.Hardswish(),
                nn.Conv2d(24, 24, 5, 1, 2, groups=24, bias=False), nn.BatchNorm2d(24),
                nn.Hardswish(),
            )  # fmt: skip
            self.gate = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(24, 8, 1), nn.ReLU(), nn.Conv2d(8, 24, 1),
                nn.Hardsigmoid(),
            )  # fmt: skip
            self.project = nn.Sequential(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8))

        def forward(self, x: Any) -> Any:
            y = self.expand(x)
            return self.project(y * self.gate(y)) + x

    class Transformer(nn.Module):
        """A layer of an encoder, written out, so that it is exported as products."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
            self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
            self.up, self.down, self.gelu = nn.Linear(32, 64), nn.Linear(64, 32), nn.GELU()
            self.swish = nn.Linear(32, 32)

        def forward(self, x: Any) -> Any:
            b, t, _ = x.shape
            q, k, v = self.qkv(x).reshape(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
            weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)
            x = self.first(x + self.out((weights @ v).transpose(1, 2).reshape(b, t, 32)))
            x = self.second(x + self.down(self.gelu(self.up(x))))
            return nn.functional.silu(self.swish(x))

    class UNet(nn.Module):
        """Down, up again by a transposed convolution and by interpolation, joined by Concat."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.LeakyReLU(0.1))
            self.b = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU6())
            self.c = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.SiLU())
            self.up = nn.Sequential(nn.ConvTranspose2d(16, 16, 2, 2), nn.BatchNorm2d(16), nn.ReLU())
            self.scale = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
            self.last = nn.Conv2d(40, 2, 1)

        def forward(self, x: Any) -> Any:
            a = self.a(x)
            b = self.b(a)
            u = torch.cat((self.up(self.c(b)), b), 1)
            return self.last(torch.cat((self.scale(u), a), 1))

    return {
        "resnet": (ResNet, (2, 3, 32, 32)),
        "mobilenet": (MobileNet, (2, 8, 12, 12)),
        "transformer": (Transformer, (2, 9, 32)),
        "unet": (UNet, (1, 3, 16, 16)),
    }


@pytest.fixture(scope="session")
def exported() -> Callable[..., Any]:
    """Exports a network by PyTorch's new exporter or its old one: an ONNX model and its input."""
    torch, onnx = pytest.importorskip("torch"), pytest.importorskip("onnx")
    made: dict[tuple[str, bool, int], Any] = {}

    def export(name: str, dynamo: bool = False, opset: int = 18) -> Any:
        if dynamo:
            pytest.importorskip("onnxscript")
        key = name, dynamo, opset
        if key not in made:
            torch.manual_seed(3)
            network, shape = _networks()[name]
            model = network()
            for one in model.modules():
                if isinstance(one, torch.nn.BatchNorm2d):
                    torch.nn.init.normal_(one.running_mean)
                    torch.nn.init.uniform_(one.running_var, 0.5, 2)
                    torch.nn.init.uniform_(one.weight, 0.5, 2)
                    torch.nn.init.normal_(one.bias)
            x = torch.randn(shape)
            file = io.BytesIO()
            more = (
                {"dynamic_shapes": ({0: "batch"},)}
                if dynamo
                else {"dynamic_axes": {"x": {0: "batch"}}}
            )
            torch.onnx.export(
                model.eval(), (x,), file, input_names=["x"], output_names=["y"],
                opset_version=opset, dynamo=dynamo, **more,
            )  # fmt: skip
            made[key] = onnx.load_from_string(file.getvalue()), x.numpy()
        return made[key]

    return export
