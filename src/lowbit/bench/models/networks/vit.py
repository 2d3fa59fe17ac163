"""Vision transformers (Dosovitskiy et al. 2020, arXiv:2010.11929), with torchvision's keys."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PATCH = 16  # pixels of a patch's side


@dataclass(frozen=True)
class Widths:
    """How large a transformer is: features of a token, blocks, heads, features inside the MLP."""

    hidden: int
    depth: int
    heads: int
    mlp: int


SMALL = Widths(384, 12, 6, 1536)
BASE = Widths(768, 12, 12, 3072)


class EncoderBlock(nn.Module):
    """Self-attention and an MLP, each behind a layer norm and added to its input."""

    def __init__(self, widths: Widths) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(widths.hidden, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(widths.hidden, widths.heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(widths.hidden, eps=1e-6)
        widen, narrow = nn.Linear(widths.hidden, widths.mlp), nn.Linear(widths.mlp, widths.hidden)
        for layer in (widen, narrow):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)
        # Position 2 is a dropout elsewhere; it keeps the keys of what follows.
        self.mlp = nn.Sequential(widen, nn.GELU(), nn.Identity(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, tokens, hidden]."""
        normed = self.ln_1(x)
        x = x + self.self_attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Encoder(nn.Module):
    """Positions added, blocks, and a last layer norm."""

    def __init__(self, widths: Widths, tokens: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, widths.hidden).normal_(std=0.02))
        self.layers = nn.Sequential(
            OrderedDict((f"encoder_layer_{i}", EncoderBlock(widths)) for i in range(widths.depth))
        )
        self.ln = nn.LayerNorm(widths.hidden, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, tokens, hidden]."""
        return self.ln(self.layers(x + self.pos_embedding))


class VisionTransformer(nn.Module):
    """Images to class scores. 86.6 M parameters (BASE) or 22.1 M (SMALL), at 224 pixels with
    1,000 classes. `size` is the images' side in pixels, a multiple of 16."""

    def __init__(self, widths: Widths, classes: int = 1000, size: int = 224) -> None:
        super().__init__()
        if size < PATCH or size % PATCH:
            raise ValueError(f"size {size} is no positive multiple of {PATCH} pixels")
        self.size = size
        self.class_token = nn.Parameter(torch.zeros(1, 1, widths.hidden))
        self.conv_proj = nn.Conv2d(3, widths.hidden, PATCH, PATCH)
        nn.init.trunc_normal_(self.conv_proj.weight, std=(3 * PATCH * PATCH) ** -0.5)
        self.encoder = Encoder(widths, (size // PATCH) ** 2 + 1)
        head = nn.Linear(widths.hidden, classes)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        self.heads = nn.Sequential(OrderedDict(head=head))

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, 3, size, size] → [images, classes]."""
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], 1)
        return self.heads(self.encoder(tokens)[:, 0])


def resized_positions(positions: Tensor, size: int) -> Tensor:
    """Position embeddings [1, tokens, hidden] for images of `size` pixels, interpolated bicubically
    as the paper's fine-tuning at another resolution does (section 3.2)."""
    old, new = round((positions.shape[1] - 1) ** 0.5), size // PATCH
    if old == new:
        return positions
    grid = positions[:, 1:].transpose(1, 2).unflatten(2, (old, old))
    grid = nn.functional.interpolate(grid, (new, new), mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :1], grid.flatten(2).transpose(1, 2)], 1)
