"""Convolutions of ResNet-50, in both memory formats."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn import functional

from lowbit.bench.operators.registry import OperatorCase, Work, chosen, drawn, operation
from lowbit.bench.operators.registry import case as _case
from lowbit.spec.operations import convolution as stated
from lowbit.torch import functional as ours

# Batch, channels, size, output channels, kernel, stride.
_LAYERS = [(64, 3, 224, 64, 7, 2), (64, 64, 56, 64, 3, 1), (64, 128, 28, 128, 3, 1)]
_LAYERS += [(64, 256, 14, 1024, 1, 1), (64, 512, 14, 512, 3, 2)]
_NAMES = ("B", "C", "H", "O", "K", "stride")
_CASES = [
    _case(dict(zip(_NAMES, layer, strict=True)), dtype, last=last)
    for dtype, last in (("bfloat16", True), ("bfloat16", False), ("float32", True))
    for layer in _LAYERS
]


@operation("conv2d", _CASES, copies=False, quick=4)
def conv2d(case: OperatorCase, generator: Generator) -> Work:
    """Against cuDNN, which torch calls; neither rounds float32 to TF32."""
    torch.backends.cudnn.allow_tf32 = False
    b, c, h, o, k, stride = (case.sizes[name] for name in _NAMES)
    memory = torch.channels_last if case.options["last"] else torch.contiguous_format
    x, weight = (
        drawn(case, generator, *shape).contiguous(memory_format=memory)
        for shape in ((b, c, h, h), (o, c, k, k))
    )

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return functional.conv2d(x, weight, stride=stride, padding=k // 2)

    calls = {
        "lowbit": lambda: ours.conv2d(x, weight, stride=stride, padding=k // 2),
        "torch (cuDNN)": lambda: plain(x, weight),
    }
    result = plain(x.to("meta"), weight.to("meta"))
    sizes = {"B": b, "C": c, "H": h, "W": h, "O": o, "KH": k, "KW": k}
    specs = (chosen(stated.conv2d, case),)
    return Work(
        case,
        calls,
        lambda: plain(x.double(), weight.double()),
        specs,
        sizes,
        (result, x, weight),
    )
