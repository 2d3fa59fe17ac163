"""A folder in the form of Fashion-MNIST, of few images that are easily told apart."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest


def written(path: Path, array: np.ndarray) -> None:
    sizes = np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes()))


@pytest.fixture(scope="session")
def fashion_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fashion")
    random = np.random.default_rng(5)
    for stem, count in (("train", 96), ("t10k", 40)):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        # Class 3 has its fourth pair of rows bright.
        images = random.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 2] += 190
        written(folder / f"{stem}-images-idx3-ubyte.gz", images)
        written(folder / f"{stem}-labels-idx1-ubyte.gz", labels)
    return folder
