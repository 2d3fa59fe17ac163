"""Image networks that no package brings: trained here on Fashion-MNIST."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from lowbit.bench.models.data import fashion
from lowbit.bench.models.metrics import Metric, classified
from lowbit.bench.models.model import Arrays, ImageModel, Run, Weights

if TYPE_CHECKING:
    from torch import Tensor, nn

IMAGENET_CLASSES = 1000


class FashionModel(ImageModel):
    """A network of `network(classes, size)`, whose checkpoints say both."""

    source = "trained here on Fashion-MNIST"
    accuracy_size = 112
    """Pixels of an image's side in training and where accuracy is measured."""
    folder = fashion.FOLDER
    batch = 100

    @abstractmethod
    def network(self, classes: int, size: int) -> nn.Module:
        """With random weights. `size`: pixels of an image's side."""

    @abstractmethod
    def classes(self, state: Mapping[str, Tensor]) -> int:
        """How many classes a checkpoint has. KeyError if it is none of this network."""

    def fitted(self, state: dict[str, Tensor], size: int) -> dict[str, Tensor]:
        """A checkpoint for images of `size` pixels."""
        return state

    def trained_size(self, state: Mapping[str, Tensor]) -> int:
        """The images' side for which a checkpoint was made, in pixels."""
        return self.accuracy_size

    def build(self, weights: Weights = None, *, for_speed: bool = False) -> nn.Module:
        import torch

        from lowbit.bench.models import checkpoint

        if weights is None:
            size = self.preprocessing.size if for_speed else self.accuracy_size
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return self.network(IMAGENET_CLASSES, size).eval()
        state = checkpoint.load(weights)
        try:
            classes, size = self.classes(state), self.trained_size(state)
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"{weights} is no checkpoint of {self.name}: it has no {error}"
            ) from None
        if for_speed:
            size = self.preprocessing.size
            state = self.fitted(state, size)
        network = self.network(classes, size)
        checkpoint.load_into(network, state, str(weights))
        return network.eval()

    def calibration(self, count: int, batch: int = 32) -> Iterator[Arrays]:
        images, _ = fashion.fashion("train", self.folder)
        order = np.random.default_rng(0).permutation(len(images))[: count * batch]
        if count * batch > len(order):
            raise ValueError(f"{count} batches of {batch} are more than {len(order)} images")
        for chosen in order.reshape(count, batch):
            yield (fashion.prepared(images[chosen], self.accuracy_size),)

    def accuracy(
        self, run: Run, limit: int | None = None, reference: Run | None = None
    ) -> dict[str, Metric]:
        """`top1` on the first `limit` of 10,000 test images; `agreement` and `sqnr_db`."""
        images, labels = (part[:limit] for part in fashion.fashion("test", self.folder))
        scores, wanted = [], []
        for start in range(0, len(images), self.batch):
            pixels = fashion.prepared(images[start : start + self.batch], self.accuracy_size)
            scores.append(run(pixels))
            if reference is not None:
                wanted.append(reference(pixels))
        return classified(
            np.concatenate(scores), labels, np.concatenate(wanted) if wanted else None
        )
