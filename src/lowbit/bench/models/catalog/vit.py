"""Vision transformers with patches of 16 pixels: B, and S, which fits Fashion-MNIST better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lowbit.bench.models.model import models
from lowbit.bench.models.trained import FashionModel

if TYPE_CHECKING:
    from torch import Tensor, nn

_POSITIONS = "encoder.pos_embedding"


class _ViT(FashionModel):
    def classes(self, state: Mapping[str, Tensor]) -> int:
        return state["heads.head.weight"].shape[0]

    def trained_size(self, state: Mapping[str, Tensor]) -> int:
        from lowbit.bench.models.networks.vit import PATCH

        return PATCH * round((state[_POSITIONS].shape[1] - 1) ** 0.5)

    def fitted(self, state: dict[str, Tensor], size: int) -> dict[str, Tensor]:
        from lowbit.bench.models.networks.vit import resized_positions

        return state | {_POSITIONS: resized_positions(state[_POSITIONS], size)}


class ViTB(_ViT):
    name = "vit_b_16"
    title = "ViT-B/16"

    def network(self, classes: int, size: int) -> nn.Module:
        from lowbit.bench.models.networks.vit import BASE, VisionTransformer

        return VisionTransformer(BASE, classes, size)


class ViTS(_ViT):
    name = "vit_s_16"
    title = "ViT-S/16"

    def network(self, classes: int, size: int) -> nn.Module:
        from lowbit.bench.models.networks.vit import SMALL, VisionTransformer

        return VisionTransformer(SMALL, classes, size)


models.add(ViTB.name, ViTB())
models.add(ViTS.name, ViTS())
