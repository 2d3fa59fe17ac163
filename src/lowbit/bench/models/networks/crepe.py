"""CREPE (Kim et al. 2018, arXiv:1802.06182), pitch from sound, with the keys of torchcrepe."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

FRAME = 1024  # samples
BINS = 360
_CHANNELS = (1, 1024, 128, 128, 128, 256, 512)


class Crepe(nn.Module):
    """Frames of sound to how likely each of 360 pitches is; 22.2 M parameters.

    Images of one column stand for sounds, as in the checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        for i, (inputs, outputs) in enumerate(itertools.pairwise(_CHANNELS), 1):
            kernel, stride = (512, 4) if i == 1 else (64, 1)
            self.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, (kernel, 1), (stride, 1)))
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(outputs, eps=1e-3))
        self.classifier = nn.Linear(FRAME // 4 // 2**6 * _CHANNELS[-1], BINS)

    def forward(self, x: Tensor) -> Tensor:
        """float32 frames [batch, 1024], each of zero mean and unit variance → [batch, 360]."""
        x = x[:, None, :, None]
        for i in range(1, len(_CHANNELS)):
            x = nn.functional.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = nn.functional.relu(self.get_submodule(f"conv{i}")(x))
            x = nn.functional.max_pool2d(self.get_submodule(f"conv{i}_BN")(x), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()
