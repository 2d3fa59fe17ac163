"""Fashion-MNIST (Xiao et al. 2017, arXiv:1708.07747), as Debian's dataset-fashion-mnist has it, and
what networks that are trained on it here have in common."""

from __future__ import annotations

import gzip
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lowbit.models.model import (
    Arrays,
    ImageModel,
    Metric,
    Run,
    Weights,
    classified,
    in_batches,
    outputs,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

Bytes = npt.NDArray[np.uint8]

FOLDER = "/usr/share/datasets/fashion-mnist"
PACKAGE = "dataset-fashion-mnist"
CLASSES = 10
SIDE = 28  # pixels
MEAN, DEVIATION = 0.2860, 0.3530  # of the training images' pixels, where 255 is 1
_STEMS = {"train": "train", "test": "t10k"}


@lru_cache(maxsize=4)
def fashion(part: str, folder: str = FOLDER) -> tuple[Bytes, Bytes]:
    """uint8 images [N, 28, 28] and labels [N]: 60,000 of `part` "train", 10,000 of "test".

    FileNotFoundError, with what to install, if a file is not there. ValueError for a damaged one.
    """
    images = _idx(Path(folder, f"{_STEMS[part]}-images-idx3-ubyte.gz"), 3)
    labels = _idx(Path(folder, f"{_STEMS[part]}-labels-idx1-ubyte.gz"), 1)
    if len(images) != len(labels) or images.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"{folder} has {images.shape} images and {labels.shape} labels")
    return images, labels


def _idx(path: Path, dimensions: int) -> Bytes:
    """An array of bytes in the IDX format: 0, 0, 8 (bytes), dimensions, then big-endian sizes."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there; Fashion-MNIST is Debian's package {PACKAGE}, or the four files "
            "of the same names in another folder"
        )
    with gzip.open(path) as file:
        data = file.read()
    sizes = np.frombuffer(data, ">u4", dimensions, 4) if len(data) >= 4 + 4 * dimensions else []
    body = np.frombuffer(data, np.uint8)[4 + 4 * dimensions :]
    if data[:4] != bytes((0, 0, 8, dimensions)) or body.size != np.prod(sizes, dtype=np.int64):
        raise ValueError(f"{path} is no IDX file of bytes in {dimensions} dimensions, or truncated")
    return body.reshape([int(n) for n in sizes])


@lru_cache(maxsize=8)
def resizing(size: int) -> npt.NDArray[np.float32]:
    """The matrix [size, 28] that enlarges a column of pixels by linear interpolation between the
    pixels' centres, and repeats the outer ones."""
    centres = np.clip((np.arange(size) + 0.5) * SIDE / size - 0.5, 0, SIDE - 1)
    low = np.minimum(centres.astype(int), SIDE - 2)
    matrix = np.zeros((size, SIDE), np.float32)
    matrix[np.arange(size), low] = 1 - (centres - low)
    matrix[np.arange(size), low + 1] = centres - low
    return matrix


def prepared(images: Bytes, size: int) -> npt.NDArray[np.float32]:
    """What networks take: float32 [N, 3, size, size], enlarged, normalized, grey three times."""
    matrix = resizing(size)
    pixels = (images.astype(np.float32) / 255 - MEAN) / DEVIATION
    grey: Any = matrix @ pixels @ matrix.T
    return np.ascontiguousarray(np.broadcast_to(grey[:, None], (len(images), 3, size, size)))


IMAGENET_CLASSES = 1000


class FashionModel(ImageModel):
    """A network of `network(classes, size)`, whose checkpoints say both."""

    source = "trained here on Fashion-MNIST"
    accuracy_size = 112
    """Pixels of an image's side in training and where accuracy is measured."""
    folder = FOLDER
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

        from lowbit.models import checkpoint

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
        images, _ = fashion("train", self.folder)
        order = np.random.default_rng(0).permutation(len(images))[: count * batch]
        if count * batch > len(order):
            raise ValueError(f"{count} batches of {batch} are more than {len(order)} images")
        for chosen in order.reshape(count, batch):
            yield (prepared(images[chosen], self.accuracy_size),)

    def accuracy(
        self, run: Run, limit: int | None = None, reference: Run | None = None
    ) -> dict[str, Metric]:
        """`top1` on the first `limit` of 10,000 test images; `agreement` and `sqnr_db`."""
        images, labels = (part[:limit] for part in fashion("test", self.folder))
        parts = in_batches(images, self.batch)
        batches = ((prepared(part, self.accuracy_size),) for (part,) in parts)
        scores, wanted = outputs(run, reference, batches)
        return classified(scores, labels, wanted)
