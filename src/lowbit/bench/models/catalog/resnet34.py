"""ResNet34."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lowbit.bench.models.model import models
from lowbit.bench.models.trained import FashionModel

if TYPE_CHECKING:
    from torch import Tensor, nn


class ResNet34(FashionModel):
    """Any size of images does, so that one checkpoint serves speed and accuracy."""

    name = "resnet34"
    title = "ResNet34"

    def network(self, classes: int, size: int) -> nn.Module:
        from lowbit.bench.models.networks.resnet import ResNet

        return ResNet(classes)

    def classes(self, state: Mapping[str, Tensor]) -> int:
        return state["fc.weight"].shape[0]


models.add(ResNet34.name, ResNet34())
