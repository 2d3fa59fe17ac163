"""Photographs with labels: ImageNet's folders, and the 20 that the package foolbox brings.

Decoding needs PIL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lowbit.registry.extras import folder_of, require

if TYPE_CHECKING:
    from PIL.Image import Image  # pyright: ignore[reportMissingImports]

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

SUFFIXES = {".jpeg", ".jpg", ".png"}
SAMPLES = 20


@dataclass(frozen=True)
class Preprocessing:
    """The shorter side resized to `resize` pixels, `size` × `size` cut out of the middle,
    (pixel / 255 − mean) / deviation. The defaults are torchvision's for ImageNet."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    deviation: tuple[float, ...] = (0.229, 0.224, 0.225)
    resize: int = 256
    size: int = 224
    bicubic: bool = False

    def middle(self, image: Image) -> Floats:
        """float32 [3, size, size]."""
        shorter = min(image.size)
        width, height = (side * self.resize // shorter for side in image.size)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        resized = image.convert("RGB").resize((width, height), self._filter())
        return self._normalized(resized.crop((left, top, left + self.size, top + self.size)))

    def part(self, image: Image, box: tuple[float, float, float, float]) -> Floats:
        """A part (left, top, right, bottom) of an image as float32 [3, size, size]."""
        sides = (self.size, self.size)
        return self._normalized(image.convert("RGB").resize(sides, self._filter(), box=box))

    def _filter(self) -> Any:
        from PIL.Image import Resampling  # pyright: ignore[reportMissingImports]

        return Resampling.BICUBIC if self.bicubic else Resampling.BILINEAR

    def _normalized(self, image: Image) -> Floats:
        mean, deviation = (np.array(one, np.float32) for one in (self.mean, self.deviation))
        normal: Floats = (np.asarray(image, np.float32) / np.float32(255) - mean) / deviation
        return np.ascontiguousarray(normal.transpose(2, 0, 1))


class ImageFolder:
    """Images in one folder a class; the classes are numbered in the order of the folders' names,
    as ImageNet's are."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """FileNotFoundError if there is no such folder, ValueError if it has no class or image."""
        require("reading images", "models", "PIL")
        root = Path(folder)
        if not root.is_dir():
            raise FileNotFoundError(f"there is no folder {os.fspath(folder)!r}")
        self.folder = root
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        found = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted(root.joinpath(name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not found:
            raise ValueError(
                f"{root} has no images; expected a folder for each class, with files that end in "
                f"{', '.join(sorted(SUFFIXES))}"
            )
        self.paths = [path for path, _ in found]
        self.labels: Labels = np.array([label for _, label in found])

    def batches(
        self, preprocessing: Preprocessing, batch: int, limit: int | None = None
    ) -> Iterator[tuple[Floats, Labels]]:
        """Images [batch, 3, size, size] and labels; of `limit` images, the same random ones always.

        ValueError, naming the file, for one that is no image.
        """
        order = np.random.default_rng(0).permutation(len(self.paths))[:limit]
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            images = [preprocessing.middle(opened(self.paths[i])) for i in chosen]
            yield np.stack(images), self.labels[chosen]


def opened(path: Path) -> Image:
    """An image, decoded. ValueError if it cannot be."""
    from PIL import Image  # pyright: ignore[reportMissingImports]

    try:
        with Image.open(path) as image:
            image.load()
            return image
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from None


def samples() -> list[tuple[Image, int]]:
    """foolbox's 20 photographs of 512 × 512 pixels and their ImageNet classes; of that package
    nothing but the files is used. ModuleNotFoundError if it, or PIL, is not installed."""
    require("the photographs", "models", "PIL")
    folder = folder_of("the photographs", "foolbox") / "data"
    # imagenet_07_609.jpg: number, class.
    paths = sorted(folder.glob("imagenet_*.jpg"))
    return [(opened(path), int(path.stem.rpartition("_")[2])) for path in paths]


def boxes(image: Image, count: int, seed: int) -> Iterator[tuple[float, float, float, float]]:
    """Random squares of an image, with sides of 0.6 to 1 of its shorter one."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        side = min(image.size) * random.uniform(0.6, 1)
        left, top = (random.uniform(0, length - side) for length in image.size)
        yield left, top, left + side, top + side
